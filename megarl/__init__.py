"""MegaRL: Megatron-native reinforcement learning for MoE models. Start at `train.py` and `flow.py`."""

__version__ = "0.2.0"
