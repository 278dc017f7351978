"""Install with `bash launch/install.sh`, which takes the pinned lists of launch/ and then `pip install --no-deps -e .`.

The extras are for those who install otherwise; `pip install -e .` alone has nothing but this package:

    pip install -e '.[cpu]' --extra-index-url https://download.pytorch.org/whl/cpu
    pip install --no-deps sglang==0.5.23 verifiers==0.3.1       what they ask for is for CUDA, or is another's version

    pip install -c launch/constraints-cuda.txt -e '.[cuda]'     NEVER RUN BY US, as all of that list
    pip install --no-deps megatron-core==0.16.1
    pip install -c launch/constraints-cuda.txt --no-build-isolation 'transformer-engine[pytorch,core_cu13]==2.20.2'
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent
APART = {"sglang", "verifiers"}, {"megatron-core", "transformer-engine"}
"""Of the lists for CPU and CUDA: what must not bring what it asks for, or is built against what is there."""


def listed(file: str, apart: set[str]) -> list[str]:
    """Requirements of a list of launch/; none where that is not at hand."""
    path = HERE / "launch" / file
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [line for line in lines if line and line[0] != "#" and re.split(r"[^\w-]", line)[0] not in apart]


def version() -> str:
    text = (HERE / "megarl/__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    assert found
    return found[1]


setup(
    name="megarl",
    version=version(),
    description="Megatron-native research codebase for MoE-scale reinforcement learning",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["megarl", "megarl.*"]),
    package_data={"megarl.view": ["static/*", "README.md"]},
    extras_require={
        "cpu": listed("requirements-cpu.txt", APART[0]),
        "cuda": listed("requirements-cuda.txt", APART[1]),
        # What adapters need that a run without them does not; for verifiers see launch/requirements-verifiers.txt.
        "mcp": ["mcp>=1.30,<3"],
        # Trackers besides TensorBoard.
        "wandb": ["wandb>=0.19"],
        "swanlab": ["swanlab>=0.10"],
        "mlflow": ["mlflow-skinny>=3"],
    },
    # SGLang loads every plug-in of this group in each of its processes; ours makes its CPU path whole.
    entry_points={"sglang.srt.plugins": ["megarl = megarl.rollout.cpu_plugin:register"]},
)
