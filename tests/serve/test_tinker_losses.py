"""The losses that clients name, against the formulas of Tinker's documentation, sequence by sequence."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from megarl.serve.tinker_losses import LOSSES, check_loss, join_losses, make_batch, make_loss, split_targets
from megarl.serve.tinker_wire import Example, RequestRefused
from megarl.types import ModelOutput

Formula = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def clip(ratio: torch.Tensor) -> torch.Tensor:
    return ratio.clamp(0.7, 1.1)


CLIP = {"clip_low_threshold": 0.7, "clip_high_threshold": 1.1}
FORMULAS: dict[str, tuple[dict[str, float], Formula]] = {
    # p, q, advantages of one sequence -> the sum of its objective
    "importance_sampling": ({}, lambda p, q, a: (torch.exp(p - q) * a).sum()),
    "ppo": (CLIP, lambda p, q, a: torch.minimum(torch.exp(p - q) * a, clip(torch.exp(p - q)) * a).sum()),
    "cispo": (CLIP, lambda p, q, a: (clip(torch.exp(p - q)).detach() * p * a).sum()),
    "dro": ({"beta": 0.3}, lambda p, q, a: (p * a - 0.5 * 0.3 * (p - q) ** 2).sum()),
    "gspo": (
        CLIP,
        lambda p, q, a: torch.minimum((p - q).mean().exp() * a, clip((p - q).mean().exp()) * a).sum(),
    ),
}


def make_examples() -> list[Example]:
    generator = np.random.default_rng(3)

    def column(length: int) -> np.ndarray:
        return generator.normal(size=length).astype(np.float32)

    return [
        Example(
            generator.integers(0, 50, length),
            generator.integers(0, 50, length),
            {"logprobs": column(length), "advantages": column(length)},
        )
        for length in (1, 6, 3)
    ]


@pytest.mark.parametrize("name", FORMULAS)
def test_losses_are_the_negated_sum_of_the_objective(name: str) -> None:
    examples, (options, formula) = make_examples(), FORMULAS[name]
    batch, expected_grads, expected = make_batch(examples), [], 0.0
    logprobs = (
        batch.rollout_logprobs + torch.randn(13, generator=torch.Generator().manual_seed(1)) / 4
    ).requires_grad_()
    loss = make_loss(name, options)(ModelOutput(logprobs), batch).loss
    assert batch.loss_weights is not None
    total = (batch.loss_weights * loss).sum()
    (grad,) = torch.autograd.grad(total, logprobs)
    for example, row in zip(examples, split_targets(logprobs.detach(), examples), strict=True):
        p = torch.from_numpy(row).requires_grad_()
        inputs = [torch.from_numpy(example.inputs[key]) for key in ("logprobs", "advantages")]
        objective = -formula(p, *inputs)
        expected += float(objective)
        expected_grads.append(torch.autograd.grad(objective, p)[0])
    assert float(total) == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(
        torch.cat([torch.from_numpy(row) for row in split_targets(grad, examples)]), torch.cat(expected_grads)
    )
    assert not grad[[0, 2, 9]].any()  # nothing is predicted before the first input token


def test_gspo_takes_the_ratio_over_the_mask() -> None:
    example = make_examples()[1]
    mask = np.array([0, 0, 1, 1, 0, 1], np.float32)
    batch = make_batch([Example(example.tokens, example.targets, {**example.inputs, "sequence_ratio_mask": mask})])
    logprobs = batch.rollout_logprobs + torch.arange(7) / 100
    loss = make_loss("gspo", CLIP)(ModelOutput(logprobs), batch).loss
    ratio = torch.tensor([0.03, 0.04, 0.06]).mean().exp()
    advantages = torch.from_numpy(example.inputs["advantages"]) * torch.from_numpy(mask)
    torch.testing.assert_close(loss[1:], -torch.minimum(ratio * advantages, clip(ratio) * advantages))


def test_cross_entropy_weights_the_targets() -> None:
    examples = [Example(np.array([5, 6]), np.array([6, 9]), {"weights": np.array([0.5, -2], np.float32)})]
    batch = make_batch(examples)
    assert batch.tokens.tolist() == [5, 6, 9] and batch.loss_weights is not None and batch.targets is not None
    assert batch.targets[1:].tolist() == [6, 9] and batch.loss_weights.tolist() == [0, 0.5, -2]
    loss = make_loss("cross_entropy", {})(ModelOutput(torch.tensor([0.0, -1.0, -4.0])), batch).loss
    assert float((batch.loss_weights * loss).sum()) == 0.5 - 8


def test_targets_may_differ_from_the_inputs() -> None:
    batch = make_batch([Example(np.array([5, 6, 7]), np.array([0, 0, 8]))])
    assert batch.tokens.tolist() == [5, 6, 7, 8] and batch.targets is not None
    assert batch.targets[1:].tolist() == [0, 0, 8]


@pytest.mark.parametrize(
    ("name", "options", "inputs", "text"),
    [
        ("nothing", {}, {}, "loss_fn 'nothing' is unknown; the losses are cross_entropy, "),
        ("cross_entropy", {}, {"logprobs": 1}, "datum 0: cross_entropy needs weights"),
        ("cross_entropy", {}, {"weights": 1, "mask": 1}, "datum 0: cross_entropy has no input 'mask'"),
        ("cross_entropy", {"beta": 1}, {"weights": 1}, "loss_fn_config of cross_entropy has no 'beta'"),
        ("ppo", {"clip_low_threshold": 1.5}, {"logprobs": 1, "advantages": 1}, "0 <= low <= 1 <= high"),
    ],
)
def test_refuses_what_a_loss_does_not_have(
    name: str, options: dict[str, float], inputs: dict[str, float], text: str
) -> None:
    columns = {key: np.full(2, value, np.float32) for key, value in inputs.items()}
    with pytest.raises(RequestRefused, match=text):
        check_loss(name, options, [Example(np.array([1, 2]), np.array([2, 3]), columns)])


def test_every_loss_is_tested() -> None:
    assert LOSSES.keys() == {*FORMULAS, "cross_entropy"}


def test_joined_losses_are_those_of_each_request() -> None:
    """Requests of one client each: three losses, one of them twice with different options."""
    requests = [("gspo", CLIP), ("dro", {"beta": 0.3}), ("ppo", CLIP), ("ppo", {}), ("dro", {"beta": 0.3})]
    examples = make_examples()
    batch = make_batch(examples * len(requests))
    batch = batch.with_(adapter=torch.arange(len(requests)).repeat_interleave(13))
    logprobs = (batch.rollout_logprobs + torch.randn(65, generator=torch.Generator().manual_seed(1))).requires_grad_()
    joined = join_losses(requests)(ModelOutput(logprobs), batch)
    (grads,) = torch.autograd.grad(joined.loss.sum(), logprobs)
    alone = make_batch(examples)
    rows = zip(requests, logprobs.split(13), joined.loss.split(13), grads.split(13), strict=True)
    for number, ((name, options), part, loss, grad) in enumerate(rows):
        values = part.detach().requires_grad_()
        expected = make_loss(name, options)(ModelOutput(values), alone).loss
        assert torch.equal(loss, expected)
        assert torch.equal(grad, torch.autograd.grad(expected.sum(), values)[0])
        parts = joined.metrics[f"loss/{number}"].split(13)
        assert torch.equal(parts[number], expected)
        assert not any(part.any() for index, part in enumerate(parts) if index != number)
