"""The usual way is `bash launch/install.sh`: the pinned lists of launch/ and then `pip install --no-deps -e .`.

`pip install .`, or `pip install git+URL`, brings what MegaRL imports, but not SGLang, which generates rollouts: the
packages that it asks for are for CUDA. pip's own choice of torch is a build for CUDA, too, of several GB. So on a CPU:

    pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
    pip install '.[cpu]'
    pip install --no-deps sglang==0.5.23 verifiers==0.3.1       what they ask for is for CUDA, or is another's version

and on a GPU, NEVER RUN BY US, as all of that list:

    pip install -c launch/constraints-cuda.txt '.[cuda]'
    pip install -c launch/constraints-cuda.txt --no-build-isolation 'transformer-engine[pytorch,core_cu13]==2.20.2'
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent
NO_DEPS = {"sglang", "verifiers"}
"""On a CPU: what they ask for is for CUDA, or is another's version."""
BUILT = {"transformer-engine"}
"""Against the torch that is installed: after it, without build isolation."""
DEVELOPMENT = {
    "hypothesis",
    "mypy",
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "ruff",
    "types-PyYAML",
    "types-requests",
}
GPU = {"sglang", "torch_memory_saver", "onnx", "onnxscript", "nvdlfw-inspect", "nvidia-cudnn-frontend"}
"""What only a GPU needs, or rollouts."""


def listed(file: str, leave_out: set[str]) -> list[str]:
    """Return the requirements of a list of launch/."""
    lines = (HERE / "launch" / file).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and line[0] != "#" and re.split(r"[^\w-]", line)[0] not in leave_out]


def imported() -> list[str]:
    """Return what MegaRL imports, from the list for CUDA, which names no more. torch may be as old as that for CPUs."""
    lines = listed("requirements-cuda.txt", BUILT | DEVELOPMENT | GPU)
    (oldest,) = (line for line in listed("requirements-cpu.txt", set()) if line.startswith("torch=="))
    oldest = oldest.removeprefix("torch==").partition("+")[0]
    return [re.sub(r"^torch==", f"torch>={oldest},<=", line) for line in lines]


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
    # Said, it makes `pip install -e` write a plain .pth, which type checkers read; they know nothing of import hooks.
    package_dir={"": "."},
    package_data={
        "": ["*.md", "py.typed"],
        "megarl.cpu": ["stubs/*.py", "stubs/*/*.py"],
        "megarl.observe": ["*.txt"],
        "megarl.view": ["static/*"],
    },
    install_requires=imported(),
    extras_require={
        "cpu": listed("requirements-cpu.txt", NO_DEPS),
        "cuda": listed("requirements-cuda.txt", BUILT),
        # What adapters need that a run without them does not; for verifiers see launch/requirements-verifiers.txt.
        "mcp": ["mcp>=1.30,<3"],
        # Trackers besides TensorBoard.
        "wandb": ["wandb>=0.19"],
        "swanlab": ["swanlab>=0.10"],
        "mlflow": ["mlflow-skinny>=3"],
    },
    entry_points={
        "console_scripts": ["megarl = megarl.__main__:main"],
        # SGLang loads every plug-in of this group in each of its processes; ours makes its CPU path whole.
        "sglang.srt.plugins": ["megarl = megarl.cpu.sglang_plugin:register"],
    },
)
