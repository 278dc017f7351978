"""MegaRL: Megatron-native reinforcement learning for MoE models. Start at `train.py` and `flow.py`."""

import sys

__version__ = "0.2.0"

if sys.version_info < (3, 12):  # all that emerging_optimizers, which Megatron-Core imports, needs of 3.12
    import typing

    import typing_extensions

    typing.override = typing_extensions.override  # type: ignore[attr-defined,unused-ignore]
