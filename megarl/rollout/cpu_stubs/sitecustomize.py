"""Python runs this file first in every process that has this folder on PYTHONPATH: an engine's, without CUDA."""

from megarl.rollout import cpu_torchvision

cpu_torchvision.install()
