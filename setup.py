"""The usual installation is `bash launch/install.sh`: the pinned lists of launch/, then `pip install --no-deps -e .`.

`pip install .`, or `pip install git+URL`, installs what MegaRL imports, but not SGLang, which generates rollouts and
requires CUDA packages. pip's default torch is a CUDA build, too, of several GB. On a CPU therefore run

    pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu
    pip install '.[cpu]'
    pip install --no-deps sglang==0.5.23 verifiers==0.3.1       their dependencies are for CUDA, or conflict with others

Python 3.11 needs --ignore-requires-python for all of these: Megatron-Core's metadata asks for 3.12, which what MegaRL
imports of it does not. On a GPU (NEVER RUN BY US, like the whole CUDA list)

    pip install -c launch/constraints-cuda.txt '.[cuda]'
    pip install -c launch/constraints-cuda.txt --no-build-isolation 'transformer-engine[pytorch,core_cu13]==2.20.2'
"""

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
NO_DEPS = {"sglang", "verifiers"}
"""Packages whose dependencies are for CUDA, or conflict with others: installed without these on a CPU."""
BUILT = {"transformer-engine"}
"""Packages built against the installed torch: installed after it, without build isolation."""
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
"""Packages needed only on GPUs or for rollouts."""


def listed(file: str, leave_out: set[str]) -> list[str]:
    """Return the requirements in a file of launch/."""
    lines = (HERE / "launch" / file).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and line[0] != "#" and re.split(r"[^\w-]", line)[0] not in leave_out]


def imported() -> list[str]:
    """Return what MegaRL imports: the rest of the CUDA list, with torch from the version of the CPU list on.

    No package is newer than in the CPU list: with --ignore-requires-python pip would take the source of a version that
    Python 3.11 cannot build.
    """
    pins = dict(line.split("==") for line in listed("requirements-cpu.txt", set()) if "==" in line)
    oldest = pins["torch"].partition("+")[0]
    lines = listed("requirements-cuda.txt", BUILT | DEVELOPMENT | GPU)
    lines = [f"{line}<={pins[line]}" if line in pins else line for line in lines]
    return [re.sub(r"^torch==", f"torch>={oldest},<=", line) for line in lines]


def version() -> str:
    text = (HERE / "megarl/__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    assert found
    return found[1]


class BuildWithConfigs(build_py):
    """Copy configs/ into the package of a wheel. An editable installation reads the checkout's."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            shutil.copytree(HERE / "configs", Path(self.build_lib) / "megarl/configs", dirs_exist_ok=True)


setup(
    name="megarl",
    version=version(),
    description="Megatron-native research codebase for MoE-scale reinforcement learning",
    license="Apache-2.0",
    python_requires=">=3.11,<3.13",
    classifiers=["Programming Language :: Python :: 3.11", "Programming Language :: Python :: 3.12"],
    packages=find_packages(include=["megarl", "megarl.*"]),
    # If set, `pip install -e` writes a plain .pth, which type checkers read; they cannot follow import hooks.
    package_dir={"": "."},
    package_data={
        "": ["*.md", "py.typed"],
        "megarl.cpu": ["stubs/*.py", "stubs/*/*.py"],
        "megarl.observe": ["*.txt"],
        "megarl.view": ["static/*"],
    },
    cmdclass={"build_py": BuildWithConfigs},
    install_requires=imported(),
    extras_require={
        "cpu": listed("requirements-cpu.txt", NO_DEPS),
        "cuda": listed("requirements-cuda.txt", BUILT),
        # Needed only by adapters; for verifiers see launch/requirements-verifiers.txt.
        "mcp": ["mcp>=1.30,<3"],
        # Trackers besides TensorBoard.
        "wandb": ["wandb>=0.19"],
        "swanlab": ["swanlab>=0.10"],
        "mlflow": ["mlflow-skinny>=3"],
        # Besides what is always installed, megarl serve needs the tinker SDK's formats.
        "serve": ["protobuf>=5", "zstandard>=0.22"],
        "sweep": ["optuna>=4"],
        "prometheus": ["prometheus-client>=0.20"],
        "opentelemetry": ["opentelemetry-sdk>=1.30", "opentelemetry-exporter-otlp-proto-http>=1.30"],
    },
    entry_points={
        "console_scripts": ["megarl = megarl.__main__:main"],
        # SGLang loads every plug-in of this group in each of its processes; ours completes its CPU path.
        "sglang.srt.plugins": ["megarl = megarl.cpu.sglang_plugin:register"],
    },
)
