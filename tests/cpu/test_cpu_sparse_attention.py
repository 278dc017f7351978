"""The CPU's sparse attention that replaces SGLang's kernels."""

from __future__ import annotations

import pytest
import torch

from megarl.cpu import sglang_sparse_attention as sparse

pytestmark = pytest.mark.alone


def test_scores_and_choice_follow_the_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    query, keys = torch.randn(3, 5, 8, generator=generator), torch.randn(7, 8, generator=generator)
    weights = torch.randn(3, 5, generator=generator)
    scores = sparse.score_keys(query, keys, weights)
    for i in range(3):
        for j in range(7):
            products = (query[i] @ keys[j]) / 8**0.5
            assert float(scores[i, j]) == pytest.approx(float((weights[i] * products.clamp(min=0)).sum()), abs=1e-5)
    torch.testing.assert_close(sparse.score_keys(query, keys.expand(3, 7, 8), weights), scores)
    last = torch.tensor([1, 4, 6])
    chosen = sparse.top_keys(scores, last, 4)
    assert sorted(chosen[0].tolist()) == [-1, -1, 0, 1] and chosen.dtype == torch.int32
    for i in (1, 2):
        best = scores[i, : last[i] + 1].topk(4).indices
        assert sorted(chosen[i].tolist()) == sorted(best.tolist())
    assert sparse.top_keys(scores, last, 9).shape == (3, 9)


@pytest.mark.parametrize("max_elements", [1 << 23, 40])
def test_attends_to_chosen_slots_only(max_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "_MAX_ELEMENTS", max_elements)
    generator = torch.Generator().manual_seed(1)
    cache, query = torch.randn(20, 10, generator=generator), torch.randn(4, 3, 10, generator=generator)
    slots = torch.tensor([[3, 7, 19], [0, -1, 5], [8, -1, -1], [2, 1, 4]])
    result = sparse.sparse_attention(query, cache, slots, 6, 0.3)
    for i, row in enumerate(slots.tolist()):
        keys = cache[[slot for slot in row if slot >= 0]]
        expected = (0.3 * query[i] @ keys.T).softmax(-1) @ keys[:, :6]
        torch.testing.assert_close(result[i], expected, rtol=1e-5, atol=1e-6)
