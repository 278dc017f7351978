"""The numbers of the hash of `checksum.py`, which `hash_kernel.py` computes with, too."""

STEP = -7046029254386353131  # 0x9E3779B97F4A7C15, 2^64 / golden ratio: no two positions in reach get the same offset
MIX = ((30, -4658895280553007687), (27, -7723592293110705685))  # splitmix64: 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
