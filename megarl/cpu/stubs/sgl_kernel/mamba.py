"""Stands in for SGLang's compiled kernels of linear attention on a CPU without AMX."""

from megarl.cpu.sglang_gated_delta_net import (  # noqa: F401
    causal_conv1d_fn_cpu,
    causal_conv1d_update_cpu,
    chunk_gated_delta_rule_cpu,
)
