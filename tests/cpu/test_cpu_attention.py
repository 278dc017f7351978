"""The CPU attention that replaces SGLang's kernels."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from megarl.cpu import sglang_plugin

pytestmark = pytest.mark.alone


@pytest.mark.parametrize(("heads", "kv_heads", "value_dim"), [(4, 4, 8), (4, 2, 8), (4, 1, 6)])
@pytest.mark.parametrize("max_elements", [1 << 23, 300])
def test_decode_attention_equals_attention_per_sequence(
    heads: int, kv_heads: int, value_dim: int, max_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With grouped heads, values narrower than keys (MLA), and computation in parts."""
    monkeypatch.setattr(sglang_plugin, "_MAX_ELEMENTS", max_elements)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([1, 7, 3, 12, 5])
    keys = torch.randn(64, kv_heads, 8, generator=generator)
    values = torch.randn(64, kv_heads, value_dim, generator=generator)
    query = torch.randn(5, heads, 8, generator=generator)
    slots = torch.randperm(64, generator=generator)[:60].reshape(5, 12).to(torch.int32)
    out = sglang_plugin.decode_attention(query, keys, values, slots, lengths, 0.3)
    for i, length in enumerate(lengths.tolist()):
        k, v = (cache[slots[i, :length].long()].transpose(0, 1)[None] for cache in (keys, values))
        expected = scaled_dot_product_attention(query[i][None, :, None], k, v, scale=0.3, enable_gqa=True)
        torch.testing.assert_close(out[i], expected[0, :, 0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [None, 0, 4])
@pytest.mark.parametrize("cap", [0.0, 0.7])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_soft_caps_windows_and_sinks_follow_the_formula(cap: float, window: int | None, has_sinks: bool) -> None:
    """Partly cached prompts, single tokens, and decoding after them."""
    generator = torch.Generator().manual_seed(1)
    lengths, new = torch.tensor([6, 1, 9]), torch.tensor([6, 1, 3])
    keys = torch.randn(40, 2, 8, generator=generator)
    values = torch.randn(40, 2, 6, generator=generator)
    query = torch.randn(10, 4, 8, generator=generator)
    slots = torch.randperm(40, generator=generator)[:30].reshape(3, 10).to(torch.int32)
    sinks = torch.randn(4, generator=generator) if has_sinks else None
    expected = []
    for q, i, position in zip(query, (0,) * 6 + (1,) + (2,) * 3, (*range(6), 0, 6, 7, 8), strict=True):
        first = 0 if window is None else max(0, position - window)
        visible = slots[i, first : position + 1].long()
        k, v = (cache[visible].repeat_interleave(2, 1) for cache in (keys, values))
        scores = 0.3 * torch.einsum("hd,khd->hk", q, k)
        if cap:
            scores = cap * torch.tanh(scores / cap)
        terms = scores.exp()
        total = terms.sum(-1, keepdim=True) + (0.0 if sinks is None else sinks.exp()[:, None])
        expected.append(torch.einsum("hk,khd->hd", terms / total, v))
    result = sglang_plugin.extend_attention(query, keys, values, slots, lengths, new, 0.3, cap, window, sinks)
    torch.testing.assert_close(result, torch.stack(expected), rtol=1e-5, atol=1e-6)
    last = [5, 6, 9]
    decoded = sglang_plugin.decode_attention(query[last], keys, values, slots, lengths, 0.3, cap, window, sinks)
    torch.testing.assert_close(decoded, result[last], rtol=1e-5, atol=1e-6)
