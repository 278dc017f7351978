"""The losses that a client names, as pure functions over packed tokens. The loss of a request is the sum over tokens.

With p the log-prob of the target, q that of the sampler (`logprobs`), A the advantage and r = exp(p - q):

    cross_entropy        -p * weights
    importance_sampling  -r A
    ppo                  -min(r A, clip(r, clip_low_threshold, clip_high_threshold) A)
    cispo                -sg(clip(r, clip_low_threshold, clip_high_threshold)) p A
    dro                  -(p A - beta / 2 (p - q)^2)
    gspo                 `algorithms.policy_losses.gspo_loss`, with the ratio of a sequence over `sequence_ratio_mask`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from megarl.algorithms.policy_losses import MAX_LOG_RATIO, Clip, GSPOOptions, PolicyLossInput, gspo_loss
from megarl.serve.tinker_wire import Example, RequestRefused
from megarl.types import ModelOutput, TokenLoss, TrainBatch, reads

if TYPE_CHECKING:
    from megarl.megatron.trainer_model import LossFn

TokenLossFn = Callable[[torch.Tensor, TrainBatch, Mapping[str, float]], torch.Tensor]
"""Takes the log-probs, the batch and the options; returns the loss of each token, all [T] but the options."""


def cross_entropy(logprobs: torch.Tensor, part: TrainBatch, options: Mapping[str, float]) -> torch.Tensor:
    return -logprobs


def importance_sampling(logprobs: torch.Tensor, part: TrainBatch, options: Mapping[str, float]) -> torch.Tensor:
    return -_ratio(logprobs, part) * _advantages(part)


def ppo(logprobs: torch.Tensor, part: TrainBatch, options: Mapping[str, float]) -> torch.Tensor:
    ratio, advantages = _ratio(logprobs, part), _advantages(part)
    clipped = ratio.clamp(options["clip_low_threshold"], options["clip_high_threshold"])
    return -torch.minimum(ratio * advantages, clipped * advantages)


def cispo(logprobs: torch.Tensor, part: TrainBatch, options: Mapping[str, float]) -> torch.Tensor:
    clipped = _ratio(logprobs, part).detach().clamp(options["clip_low_threshold"], options["clip_high_threshold"])
    return -clipped * logprobs * _advantages(part)


def dro(logprobs: torch.Tensor, part: TrainBatch, options: Mapping[str, float]) -> torch.Tensor:
    return -(logprobs * _advantages(part) - options["beta"] / 2 * (logprobs - part.rollout_logprobs) ** 2)


def gspo(logprobs: torch.Tensor, part: TrainBatch, options: Mapping[str, float]) -> torch.Tensor:
    assert part.marked is not None
    inputs = PolicyLossInput(logprobs, part.rollout_logprobs, _advantages(part), part.marked, part.cu_seqlens)
    clip = GSPOOptions(1 - options["clip_low_threshold"], options["clip_high_threshold"] - 1)
    return gspo_loss(inputs, Clip(), clip).loss


def _ratio(logprobs: torch.Tensor, part: TrainBatch) -> torch.Tensor:
    return torch.exp((logprobs - part.rollout_logprobs).clamp(max=MAX_LOG_RATIO))


def _advantages(part: TrainBatch) -> torch.Tensor:
    assert part.advantages is not None
    return part.advantages


@dataclass(frozen=True)
class Loss:
    """A loss by name. inputs: of each datum, required and optional; options: numbers, with their defaults."""

    function: TokenLossFn
    inputs: tuple[str, ...] = ("logprobs", "advantages")
    optional: tuple[str, ...] = ()
    options: Mapping[str, float] = field(default_factory=dict)


_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES = {
    "cross_entropy": Loss(cross_entropy, ("weights",)),
    "importance_sampling": Loss(importance_sampling),
    "ppo": Loss(ppo, options=_CLIP),
    "cispo": Loss(cispo, options=_CLIP),
    "dro": Loss(dro, options={"beta": 0.05}),
    "gspo": Loss(
        gspo,
        optional=("sequence_ratio_mask",),
        options={"clip_low_threshold": 1 - GSPOOptions().clip_low, "clip_high_threshold": 1 + GSPOOptions().clip_high},
    ),
}


def check_loss(name: str, options: Mapping[str, float], examples: Sequence[Example]) -> None:
    """Raise RequestRefused unless the loss exists, and has these options and the examples' inputs."""
    if (loss := LOSSES.get(name)) is None:
        raise RequestRefused(f"loss_fn {name[:80]!r} is unknown; the losses are {', '.join(LOSSES)}")
    if unknown := sorted(options.keys() - loss.options.keys()):
        known = ", ".join(loss.options) or "none"
        raise RequestRefused(f"loss_fn_config of {name} has no {unknown[0][:80]!r}; its options are: {known}")
    values = {**loss.options, **options}
    if "clip_low_threshold" in values and not 0 <= values["clip_low_threshold"] <= 1 <= values["clip_high_threshold"]:
        raise RequestRefused(f"loss_fn_config of {name}: the clip thresholds need 0 <= low <= 1 <= high")
    for number, example in enumerate(examples):
        if missing := [key for key in loss.inputs if key not in example.inputs]:
            raise RequestRefused(f"datum {number}: {name} needs {missing[0]}")
        if extra := sorted(example.inputs.keys() - {*loss.inputs, *loss.optional}):
            raise RequestRefused(
                f"datum {number}: {name} has no input {extra[0][:80]!r}; its inputs are target_tokens, "
                f"{', '.join((*loss.inputs, *loss.optional))}"
            )


def make_loss(name: str, options: Mapping[str, float]) -> LossFn:
    """Return the loss of a batch of `make_batch`."""
    loss = LOSSES[name]
    values = {**loss.options, **options}

    @reads("targets", "advantages", "rollout_logprobs", "marked")
    def token_loss(output: ModelOutput, part: TrainBatch) -> TokenLoss:
        assert output.logprobs is not None
        return TokenLoss(loss.function(output.logprobs, part, values))

    return token_loss


def join_losses(losses: Sequence[tuple[str, Mapping[str, float]]]) -> LossFn:
    """Return the loss of a batch of several requests, in which `adapter` is the number of each token's request.

    Metrics loss/0, loss/1, ... are the losses of the requests.

    losses: name and options of each request's.
    """
    groups: list[tuple[TokenLossFn, Mapping[str, float], list[int]]] = []
    for number, (name, options) in enumerate(losses):
        function, values = LOSSES[name].function, {**LOSSES[name].options, **options}
        group = next((group for group in groups if group[:2] == (function, values)), None)
        if group is None:
            groups.append((function, values, [number]))
        else:
            group[2].append(number)

    @reads("targets", "advantages", "rollout_logprobs", "marked", "adapter")
    def token_loss(output: ModelOutput, part: TrainBatch) -> TokenLoss:
        assert output.logprobs is not None and part.adapter is not None
        total = torch.zeros_like(output.logprobs)
        for function, values, numbers in groups:
            is_in_group = torch.isin(part.adapter, part.adapter.new_tensor(numbers))
            total = torch.where(is_in_group, function(output.logprobs, part, values), total)
        each = (torch.where(part.adapter == number, total, 0.0).detach() for number in range(len(losses)))
        return TokenLoss(total, {f"loss/{number}": loss for number, loss in enumerate(each)})

    return token_loss


def make_batch(examples: Sequence[Example]) -> TrainBatch:
    """Pack examples into a batch that every rank has.

    An example of N tokens becomes a sequence of N + 1: the input tokens and the last target. Index t + 1 speaks about
    target t; index 0 has weight 0.
    """
    lengths = torch.tensor([len(example.tokens) + 1 for example in examples])

    def pack(rows: Sequence[np.ndarray], fill: float = 0) -> torch.Tensor:
        """Return the rows one behind the other, with a number before each."""
        return torch.from_numpy(np.concatenate([np.concatenate([[fill], row]).astype(rows[0].dtype) for row in rows]))

    def column(name: str, default: float) -> torch.Tensor:
        rows = [example.inputs.get(name, np.full(len(example.tokens), default, np.float32)) for example in examples]
        return pack(rows)

    is_target = pack([np.ones(len(example.tokens), np.bool_) for example in examples])
    sequences = [np.concatenate([example.tokens, example.targets[-1:]]) for example in examples]
    return TrainBatch(
        tokens=torch.from_numpy(np.concatenate(sequences)),
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        loss_mask=is_target,
        group=torch.arange(len(examples)),
        sequence_reward=torch.zeros(len(examples)),
        rollout_logprobs=column("logprobs", 0.0),
        advantages=column("advantages", 0.0),
        loss_weights=column("weights", 1.0),
        marked=is_target & (column("sequence_ratio_mask", 1.0) > 0),
        targets=pack([example.targets for example in examples]),
    )


def split_targets(values: torch.Tensor, examples: Sequence[Example]) -> list[np.ndarray]:
    """Return the values at each example's targets, [N] each, of a column of `make_batch`."""
    rows = values.split([len(example.tokens) + 1 for example in examples])
    return [row[1:].numpy() for row in rows]
