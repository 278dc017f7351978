"""Ranks, groups and the device: what hardware there is, who runs where, and how values travel between ranks.

Only `device.py` asks whether there is a GPU. `ranks.py` initialises torch.distributed and Megatron's groups.
"""
