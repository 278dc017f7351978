"""Ranks, groups and the device: what hardware there is and who sits where. Imported by everything above `models/`.

`device.py` alone asks whether there is a GPU; `ranks.py` starts torch.distributed and Megatron's groups.
"""
