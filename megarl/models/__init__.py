"""One table per model family: HF config <-> Megatron config, and the location of every weight.

`layout_algebra.py` defines how tensors are sharded, `blocks.py` the rows that families share, and `registry.py` maps
architectures to family files. `hf_folder.py` reads and writes weights. The package is plain data and torch tensors and
imports no process group, no Megatron and no SGLang.
"""
