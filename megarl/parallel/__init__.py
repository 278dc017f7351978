"""Ranks, groups and devices: the hardware, the placement of roles, and communication between ranks.

Only `device.py` checks for a GPU. `ranks.py` initializes torch.distributed and Megatron's groups.
"""
