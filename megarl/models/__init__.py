"""One table per model family: HF config <-> Megatron config, and where every weight lives.

`layout_algebra.py` defines how tensors are cut, `blocks.py` the rows that families share, and `registry.py` maps
architectures to the family files. `hf_folder.py` reads and writes weights. Plain data and torch tensors: imports no
process group, no Megatron, no SGLang.
"""
