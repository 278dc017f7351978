import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from megarl.rollout import cpu_attention


@pytest.mark.parametrize(("heads", "kv_heads", "value_dim"), [(4, 4, 8), (4, 2, 8), (4, 1, 6)])
@pytest.mark.parametrize("most", [1 << 23, 300])
def test_equals_attention_sequence_by_sequence(
    heads: int, kv_heads: int, value_dim: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with grouped heads, with values narrower than keys (MLA), and cut into parts."""
    monkeypatch.setattr(cpu_attention, "_MOST_ELEMENTS", most)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([1, 7, 3, 12, 5])
    keys = torch.randn(64, kv_heads, 8, generator=generator)
    values = torch.randn(64, kv_heads, value_dim, generator=generator)
    query = torch.randn(5, heads, 8, generator=generator)
    slots = torch.randperm(64, generator=generator)[:60].reshape(5, 12).to(torch.int32)
    out = cpu_attention.decode_attention(query, keys, values, slots, lengths, 0.3)
    for i, length in enumerate(lengths.tolist()):
        k, v = (cache[slots[i, :length].long()].transpose(0, 1)[None] for cache in (keys, values))
        expected = scaled_dot_product_attention(query[i][None, :, None], k, v, scale=0.3, enable_gqa=True)
        torch.testing.assert_close(out[i], expected[0, :, 0], rtol=1e-5, atol=1e-6)
