"""Everything that touches Megatron-Core: the CPU shim, model building, heads, log-probs, the training step, names.

Imports models, data, parallel and types. Imported by workers (and, for the shim alone, by `parallel/ranks.py`).
"""

from megarl.megatron import cpu_platform
from megarl.parallel import device

# Here, so that nothing can import Megatron-Core by way of this package before it fits the machine.
if not device.has_cuda():
    cpu_platform.install()
