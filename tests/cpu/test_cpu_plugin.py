"""The CPU computation of a rank's local experts."""

from functools import partial

import torch
from mxfp4_folder import quantise
from torch.nn.functional import silu

from megarl.cpu.sglang_plugin import clamped_swiglu, dequantised_stacks, local_experts


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


def test_local_experts_with_biases_and_clamped_activation() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 4), (2, 6, 4), (2, 4, 3), (2, 6), (2, 4)]
    x, w13, w2, b13, b2 = (2 * torch.randn(shape, generator=generator) for shape in shapes)
    weights, ids = torch.rand(5, 2, generator=generator), torch.tensor([[0, 1], [-1, 1], [-1, -1], [1, 0], [1, -1]])
    activation = partial(clamped_swiglu, alpha=1.5, limit=1.0)
    out = local_experts(x, weights, ids, w13, w2, b13, b2, activation)
    for row in range(5):
        expected = torch.zeros(4)
        for choice, expert in enumerate(ids[row].tolist()):
            if expert >= 0:
                gate_up = w13[expert] @ x[row] + b13[expert]
                gate, up = gate_up[0::2].clamp(max=1.0), gate_up[1::2].clamp(-1.0, 1.0)
                hidden = gate * torch.sigmoid(1.5 * gate) * (up + 1)
                expected += weights[row, choice] * (w2[expert] @ hidden + b2[expert])
        torch.testing.assert_close(out[row], expected)


def test_engines_dequantise_mxfp4_in_any_order() -> None:
    blocks, scales, meaning = quantise(torch.randn(2, 64, 3, generator=torch.Generator().manual_seed(0)))
    other = torch.zeros(1)
    pairs = [("a_blocks", blocks), ("b", other), ("a_scales", scales)]
    for order in (pairs, pairs[::-1]):
        result = dict(dequantised_stacks(iter(order)))
        assert result.keys() == {"a", "b"} and result["b"] is other
        assert torch.equal(result["a"].float(), meaning)
