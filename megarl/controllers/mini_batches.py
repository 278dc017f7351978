"""Mini-batches of an update: their split, loss weights and marked tokens; the policy loss that the configuration names;
and means of update metrics."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch

from megarl.algorithms.losses import constant_weights, sequence_mean_weights, token_mean_weights
from megarl.algorithms.policy_losses import POLICY_LOSSES, PolicyLoss
from megarl.algorithms.token_stats import sequence_sums
from megarl.config import Config, ConfigError, plugins, strict
from megarl.config.strict import closest_match
from megarl.types import Counts, TrainBatch
from megarl.workers.futures import UpdateMetrics, sync_metrics


def load_policy_loss(config: Config) -> tuple[PolicyLoss, Any]:
    """Return the loss that `loss.policy_loss` names, and `loss.options` as its options type. Raises ConfigError for an
    invalid loss or option."""
    name = config.loss.policy_loss
    loss: Any = POLICY_LOSSES.get(name)
    if loss is None and ":" not in name:
        match = closest_match(name, POLICY_LOSSES)
        hint = f"; did you mean {match}?" if match else ""
        raise ConfigError(
            f"loss.policy_loss must be one of {', '.join(POLICY_LOSSES)}, or module:name of a loss, not "
            f"{name[:200]!r}{hint}"
        )
    loss = loss or plugins.load(name, "loss.policy_loss")
    if not isinstance(loss, PolicyLoss):
        if not callable(loss):
            raise ConfigError(
                f"loss.policy_loss={name} is a {type(loss).__name__}, and neither a PolicyLoss nor a function"
            )
        loss = PolicyLoss(loss)
    return loss, strict.build_dataclass(loss.options, config.loss.options, "loss.options.", root=Config)


def needs_old_logprobs(config: Config) -> bool:
    """Return whether an update needs the policy's log-probs from before it, which cost a forward pass. A single update
    per batch computes them itself, unless the loss first marks tokens of the whole mini-batch."""
    return config.run.num_update > 1 or load_policy_loss(config)[0].mark is not None


def set_loss_weights(mini: TrainBatch, actions: torch.Tensor, config: Config) -> TrainBatch:
    """Return the mini-batch with `loss_weights`, each token's share in the mean that `loss.agg_mode` names, and with
    `counts`, the denominators of its metrics. An episode counts as one sequence. actions: [N] action tokens of each
    sequence."""
    episodes = int((mini.episodes.sum_branches(actions) > 0).sum())
    counts = Counts(int(actions.sum()), int((actions > 0).sum()), int(actions[mini.sequence_reward > 0].sum()))
    if config.loss.agg_mode == "token-mean":
        weights = token_mean_weights(mini.loss_mask, counts.actions)
    elif config.loss.agg_mode == "seq-mean-token-mean":
        weights = sequence_mean_weights(mini.cu_episodes, mini.loss_mask, episodes)
    else:
        scale_factor = config.loss.scale_factor or max_response_length(config)
        weights = constant_weights(mini.loss_mask, scale_factor, episodes)
    return mini.with_(loss_weights=weights, counts=counts)


def max_response_length(config: Config) -> int:
    """Return the maximum number of tokens that the policy may write in a conversation."""
    rollout = config.rollout
    return min(rollout.max_new_tokens * rollout.max_turns, rollout.max_context)


def mark_tokens(mini: TrainBatch, config: Config, seed: int) -> TrainBatch:
    """Return the mini-batch with the tokens that the policy loss marks in all of it; unchanged if the loss marks none,
    or the batch is not for a policy. Collective."""
    loss, options = load_policy_loss(config)
    if loss.mark is None or mini.advantages is None:
        return mini
    if mini.old_logprobs is None:
        raise ConfigError(
            f"loss.policy_loss={config.loss.policy_loss} selects tokens by old_logprobs, which the batch lacks"
        )
    return mini.with_(marked=loss.mark(mini, options, seed))


def split_mini_batches(batch: TrainBatch, config: Config, seed: int) -> Iterator[TrainBatch]:
    """Split a batch into `run.num_update` mini-batches over `run.ppo_epochs` passes, each pass in its own order.
    Episodes are split, so that branches of one stay together.

    Each mini-batch carries `loss_weights`, each token's share in the mean that `loss.agg_mode` names over this
    mini-batch; the `counts` that its metrics are averaged over; and the tokens `marked` by the policy loss, if it marks
    any. Mini-batches without a trained token are left out: there may be fewer sequences than mini-batches, or their
    losses may be masked.
    """
    # [N], so that every rank knows the size of a mini-batch's mean.
    actions = batch.all_gather(sequence_sums(batch.loss_mask.int(), batch.cu_seqlens))
    episodes = batch.episodes
    parts = split_indices(len(episodes), config.run.num_update, config.run.ppo_epochs, seed)
    for number, part in enumerate(map(episodes.sequence_indices, parts)):
        mini_actions = actions[part]
        if not bool(mini_actions.any()):
            continue
        mini = batch.select(part) if len(part) < batch.num_sequences else batch
        yield mark_tokens(set_loss_weights(mini, mini_actions, config), config, seed * config.run.num_update + number)


def split_indices(count: int, num_update: int, epochs: int, seed: int) -> Iterator[list[int]]:
    """Split range(count) into `num_update` parts over `epochs` passes, each pass in its own order."""
    per_epoch = num_update // epochs
    order = list(range(count))
    for epoch in range(epochs):
        if per_epoch > 1:
            random.Random(f"{seed}/{epoch}").shuffle(order)
        for part in range(per_epoch):
            yield order[part::per_epoch]


class MetricMeans:
    """Means of metrics that are reported once per update."""

    def __init__(self) -> None:
        self._updates: list[UpdateMetrics] = []

    def add(self, metrics: UpdateMetrics) -> None:
        """Record the metrics of an update. They stay where they are until `sync`, so no rank waits for the update."""
        self._updates.append(metrics)

    def sync(self) -> dict[str, float]:
        """Return the means on every rank. Collective where a role is on separate ranks."""
        values: dict[str, list[float]] = {}
        for metrics in sync_metrics(self._updates):
            for name, value in metrics.items():
                values.setdefault(name, []).append(value)
        return {name: sum(series) / len(series) for name, series in values.items()}
