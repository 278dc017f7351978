"""One table per model family: HF config <-> Megatron config, and where every weight lives.

`reshard/plan/layout.py` is the algebra of cuts, `blocks.py` the rows that families share, one file per family,
`registry.py` the one line that names each. Plain data and torch tensors: imports no process group, no Megatron, no
SGLang.
"""
