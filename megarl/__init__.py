"""MegaRL: Megatron-native reinforcement learning for MoE models. Start at `train.py` and `flow.py`."""

import sys

__version__ = "0.2.0"

if sys.version_info < (3, 12):  # all that emerging_optimizers, which Megatron-Core imports, needs of 3.12
    import typing

    # Written out, as programs without site-packages import this file: typing.override only marks a method.
    typing.override = lambda method: method  # type: ignore[attr-defined,unused-ignore]
