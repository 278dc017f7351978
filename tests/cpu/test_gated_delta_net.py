"""Gated delta nets on a CPU, the trainer's and the engine's, compared with the recurrence written out."""

from __future__ import annotations

import itertools

import pytest
import torch

from megarl.cpu import flash_linear_attention as fla
from megarl.cpu import sglang_gated_delta_net as engine

HEADS, KEY, VALUE = 4, 6, 10
LENGTHS = (70, 1, 64, 3, 130)


def random_inputs(*lengths: int, key_heads: int = HEADS) -> tuple[torch.Tensor, ...]:
    """Return q, k, v, g and beta in fp64, as requires gradients."""
    generator, total = torch.Generator().manual_seed(3), sum(lengths)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(1, total, *shape, dtype=torch.float64, generator=generator)

    q, k = (fla.l2norm(randn(key_heads, KEY)).double() for _ in range(2))
    g, beta = -randn(HEADS).exp(), randn(HEADS).sigmoid()
    return tuple(x.requires_grad_() for x in (q, k, randn(HEADS, VALUE), g, beta))


def recurrence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs [n, heads, value size] of one sequence and its final state [heads, key size, value size]."""
    outputs = []
    for t in range(q.shape[1]):
        state = state * g[0, t].exp()[:, None, None]
        written = beta[0, t][:, None] * (v[0, t] - torch.einsum("hkv,hk->hv", state, k[0, t]))
        state = state + k[0, t][:, :, None] * written[:, None]
        outputs.append(torch.einsum("hkv,hk->hv", state, q[0, t]) * KEY**-0.5)
    return torch.stack(outputs), state


def test_packed_rule_and_its_gradients_match_the_recurrence() -> None:
    inputs = random_inputs(*LENGTHS)
    bounds = torch.tensor([0, *itertools.accumulate(LENGTHS)])
    zero = torch.zeros(HEADS, KEY, VALUE, dtype=torch.float64)
    parts = [
        recurrence(*(x[:, start:stop] for x in inputs), zero) for start, stop in itertools.pairwise(bounds.tolist())
    ]
    expected, states = torch.cat([output for output, _ in parts]), torch.stack([state for _, state in parts])
    actual, actual_states = fla.chunk_gated_delta_rule(*inputs, cu_seqlens=bounds, output_final_state=True)
    assert actual_states is not None
    torch.testing.assert_close(actual[0], expected, atol=5e-6, rtol=0)
    torch.testing.assert_close(actual_states.double(), states, atol=2e-5, rtol=0)
    weight = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    expected_grads = torch.autograd.grad((expected * weight).sum(), inputs)
    actual_grads = torch.autograd.grad((actual[0] * weight).sum(), inputs)
    for name, actual_grad, expected_grad in zip("qkvgb", actual_grads, expected_grads, strict=True):
        torch.testing.assert_close(actual_grad, expected_grad, atol=2e-5, rtol=0, msg=name)


def test_convolution_starts_anew_with_each_sequence() -> None:
    generator = torch.Generator().manual_seed(5)
    x, weight = torch.randn(1, sum(LENGTHS), 7, generator=generator), torch.randn(7, 4, generator=generator)
    bounds = torch.tensor([0, *itertools.accumulate(LENGTHS)])
    actual, _ = fla.causal_conv1d(x, weight, activation="silu", cu_seqlens=bounds)
    for start, stop in itertools.pairwise(bounds.tolist()):
        padded = torch.nn.functional.pad(x[0, start:stop].T, (3, 0))
        expected = torch.nn.functional.conv1d(padded, weight[:, None], groups=7).T
        torch.testing.assert_close(actual[0, start:stop], torch.nn.functional.silu(expected))


@pytest.mark.parametrize("first", [1, 2, 64, 100])
def test_engine_continues_a_request_where_it_stopped(first: int) -> None:
    """A request computed in two prompts and then token by token is the request computed at once."""
    total, slots = 150, torch.tensor([3])
    generator = torch.Generator().manual_seed(6)
    channels = 2 * 2 * KEY + HEADS * VALUE
    x, weight = torch.randn(total, channels, generator=generator), torch.randn(channels, 4, generator=generator)
    a, b = torch.randn(2, total, HEADS, generator=generator)
    a_log, dt_bias = torch.randn(2, HEADS, generator=generator)

    def split(mixed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v = mixed.split([2 * KEY, 2 * KEY, HEADS * VALUE], dim=-1)
        return q.view(1, -1, 2, KEY), k.view(1, -1, 2, KEY), v.view(1, -1, HEADS, VALUE)

    def run(prompts: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        conv_states, states = torch.full((5, channels, 3), 9.0), torch.zeros(5, HEADS, VALUE, KEY)
        outputs, start = [], 0
        for stop in prompts:
            mixed = engine.causal_conv1d_fn_cpu(
                x[start:stop].T,
                weight,
                None,
                activation="silu",
                conv_states=conv_states,
                has_initial_state=torch.tensor([start > 0]),
                cache_indices=slots,
                query_start_loc=torch.tensor([0, stop - start]),
            ).T
            g, beta = engine._fused_gdn_gating(a_log, a[start:stop], b[start:stop], dt_bias)
            q, k, v = split(mixed)
            output, _, _ = engine.chunk_gated_delta_rule_cpu(
                q=q,
                k=k,
                v=v,
                g=g,
                beta=beta,
                initial_state=states,
                initial_state_indices=slots,
                cu_seqlens=torch.tensor([0, stop - start]),
                head_first=False,
                use_qk_l2norm_in_kernel=True,
            )
            outputs.append(output[0])
            start = stop
        for t in range(start, total):
            mixed = engine.causal_conv1d_update_cpu(
                x[t : t + 1], conv_states, weight, None, "silu", conv_state_indices=slots
            )
            q, k, v = split(mixed)
            outputs.append(
                engine._delta_rule_update(
                    a_log, dt_bias, q, k, v, a[t : t + 1], b[t : t + 1], states, slots, slots, True, 1.0, 20.0
                )[0]
            )
        return torch.cat(outputs), conv_states, states

    expected, actual = run([total]), run([first, first + 20])
    for value, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(value, reference, atol=2e-5, rtol=1e-5)
    assert actual[0].abs().max() > 0.1
