"""Install with `pip install --no-deps -e .`; the pinned requirements are in launch/, see launch/install.sh."""

from setuptools import find_packages, setup

setup(
    name="megarl",
    version="0.1.0",
    description="Megatron-native research codebase for MoE-scale reinforcement learning",
    python_requires=">=3.11",
    packages=find_packages(include=["megarl", "megarl.*"]),
    package_data={"megarl.view": ["static/*", "README.md"]},
    # What adapters need that a run without them does not; for verifiers see launch/requirements-verifiers.txt.
    extras_require={"mcp": ["mcp>=1.30,<3"]},
    # SGLang loads every plug-in of this group in each of its processes; ours makes its CPU path whole.
    entry_points={"sglang.srt.plugins": ["megarl = megarl.rollout.cpu_plugin:register"]},
)
