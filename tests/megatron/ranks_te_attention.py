"""Compare Transformer Engine's attention over common prefixes with that of CPUs; its kernel is played by torch."""

from __future__ import annotations

import json
from typing import Any

import torch

from megarl.rehearse import te_modules

te_modules.install()  # before Megatron-Core, which then defines its classes on Transformer Engine's

import tiny  # noqa: E402

from megarl.parallel import ranks  # noqa: E402


def attend_bottom_right(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: Any, attn_mask_type: str, **packed: Any
) -> torch.Tensor:
    """Attend piece by piece; the last query of a piece sees all its keys. [T, heads, d] -> [T, heads * d]."""
    if attn_mask_type == "padding_causal":  # nothing in common
        return query.flatten(1)
    assert attn_mask_type == "padding_causal_bottom_right" and packed["qkv_format"] == "thd"
    assert packed["max_seqlen_q"] == int(packed["cu_seqlens_q"].diff().max())
    assert packed["max_seqlen_kv"] == int(packed["cu_seqlens_kv"].diff().max())
    pieces = (x.split(packed[name].diff().tolist()) for x, name in zip((query, key, value), CU_SEQLENS, strict=True))
    outputs = []
    for q, k, v in zip(*pieces, strict=True):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        is_hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(is_hidden, -torch.inf).softmax(-1), v))
    return torch.cat(outputs).flatten(1)


CU_SEQLENS = "cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_kv"

if __name__ == "__main__":
    from megarl.megatron.build import transformer_config
    from megarl.megatron.micro_batch import make_micro_batch
    from megarl.megatron.te_attention import SharedPrefixAttention

    from megatron.core.transformer.enums import AttnMaskType  # isort: skip
    from megarl.cpu.megatron_modules import PackedAttention  # isort: skip

    config = tiny.config(world=2, cp=2)
    layout = ranks.initialize(config.parallel, timeout_s=120)
    settings = transformer_config(tiny.HF["qwen3"], config)
    lengths, device = (64, 70, 90, 30), torch.device("cpu")
    tokens = torch.arange(100).repeat(4, 1)
    tokens[1, 40:], tokens[2, 55:], tokens[3] = 200, 300, 400
    flat = torch.cat([row[:length] for row, length in zip(tokens, lengths, strict=True)])
    batch = tiny.batch(lengths).with_(tokens=flat).with_prefixes()
    options: dict[str, Any] = {"shares_prefixes": True, "cp": 2, "cp_rank": layout.cp_rank}
    micro = make_micro_batch(batch, range(4), device, **options)
    torch.manual_seed(layout.cp_rank)
    heads, groups, size = settings.num_attention_heads, settings.num_query_groups, settings.kv_channels
    inputs = [torch.randn(micro.tokens.numel(), count, size, requires_grad=True) for count in (heads, groups, groups)]
    arguments = 1, AttnMaskType.causal, "self"
    ours = PackedAttention(settings, *arguments)
    te = SharedPrefixAttention(settings, *arguments)
    switched: list[Any] = []
    te_modules.DotProductAttention.set_context_parallel_group = lambda _, group, *__: switched.append(group)  # type: ignore[attr-defined]
    te_modules.DotProductAttention.forward = lambda _, *args, **options: attend_bottom_right(*args, **options)  # type: ignore[method-assign]
    results = []
    weights = torch.randn(micro.tokens.numel(), heads * size)
    for attention in (ours, te):
        output = attention(*inputs, None, attn_mask_type=AttnMaskType.causal, packed_seq_params=micro.packed)
        results.append([output, *torch.autograd.grad((output.flatten(1) * weights).sum(), inputs)])
    differences = [float((a.flatten() - b.flatten()).abs().max()) for a, b in zip(*results, strict=True)]
    whole = make_micro_batch(batch, range(4), device, cp=2, cp_rank=layout.cp_rank)
    te(*inputs, None, attn_mask_type=AttnMaskType.causal, packed_seq_params=whole.packed)
    result = {
        "differences": differences,
        "tokens": 2 * micro.tokens.numel(),
        "context parallel": [group is not None for group in switched],
    }
    print("RESULT " + json.dumps(result))
    ranks.shutdown()
