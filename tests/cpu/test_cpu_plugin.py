"""The CPU computation of a rank's local experts."""

import torch
from torch.nn.functional import silu

from megarl.cpu.sglang_plugin import local_experts


def test_local_experts_skip_remote_and_add_repeated_choices() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w13, w2 = (torch.randn(shape, generator=generator) for shape in [(5, 4), (3, 6, 4), (3, 4, 3)])
    weights = torch.rand(5, 2, generator=generator)
    ids = torch.tensor([[0, 1], [-1, 2], [-1, -1], [2, 2], [1, -1]])
    out = local_experts(x, weights, ids, w13, w2)
    for row in range(5):
        expected = torch.zeros(4)
        for choice in range(2):
            expert = int(ids[row, choice])
            if expert >= 0:
                hidden = silu(w13[expert, :3] @ x[row]) * (w13[expert, 3:] @ x[row])
                expected += weights[row, choice] * (w2[expert] @ hidden)
        torch.testing.assert_close(out[row], expected)
    assert (out[2] == 0).all()
