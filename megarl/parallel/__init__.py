"""Ranks, groups and devices: the hardware, the placement of roles, and communication between ranks."""
