"""The training side: packed batches, model outputs and losses, aligned as `types/__init__.py` describes.

A loss declares with `@reads` which columns of a batch it uses. Only those are sent to the model that it trains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import numpy as np
import torch

from megarl.config.strict import ConfigError
from megarl.types.arrays import concat
from megarl.types.comm import LOCAL, Comm, LocalComm
from megarl.types.episodes import Episodes
from megarl.types.rollouts import Rollout, Rollouts
from megarl.types.sampling_mask import SamplingMask


@dataclass(frozen=True)
class BatchSharding:
    """Which rank has which of a batch's N sequences."""

    lengths: torch.Tensor  # [N] int64 tokens
    routed_tokens: torch.Tensor  # [N] int64 tokens at the beginning whose routing was recorded
    home: torch.Tensor  # [N] int64, the rank
    local_indices: torch.Tensor  # [n] int64, which of the N are here; the batch has their tokens in this order
    comm: Comm = field(compare=False, repr=False)
    sampling_mask_sizes: torch.Tensor | None = (
        None  # [N] int64 ids in the records of `support`; None where there are none
    )


@dataclass(frozen=True)
class Counts:
    """Of a whole mini-batch, of which a rank and a micro-batch have shares: what its metrics are means over."""

    actions: int
    sequences: int  # with an action token
    positive_actions: int = 0  # action tokens of those whose reward is above 0


@dataclass(frozen=True)
class TrainBatch:
    """N sequences, of which n are here, packed into `[T]` tensors; see the head of this file for the alignment.

    float tensors are fp32. Without `shares` all sequences are here, on each rank: n is N.
    """

    tokens: torch.Tensor  # [T] int32 or int64
    cu_seqlens: torch.Tensor  # [n + 1] int64, cu_seqlens[i] is where the i-th of those here starts, cu_seqlens[n] == T
    loss_mask: torch.Tensor  # [T] bool, True where the policy chose the token
    group: torch.Tensor  # [N] int64, samples of one prompt share a number
    sequence_reward: torch.Tensor  # [N] reward of each sequence, that of its turns included
    rollout_logprobs: torch.Tensor  # [T] as the engine reported them
    old_logprobs: torch.Tensor | None = None  # [T] of the policy before the first update on this batch
    trainer_logprobs: torch.Tensor | None = None  # [T] likewise, also of tokens that older weights chose; to be read
    unreplayed_logprobs: torch.Tensor | None = None  # [T] likewise, where the trainer has chosen its experts itself
    ref_logprobs: torch.Tensor | None = None  # [T]
    values: torch.Tensor | None = None  # [T]
    rewards: torch.Tensor | None = None  # [T] token rewards: outcome plus, where asked for, the KL penalty
    advantages: torch.Tensor | None = None  # [T]
    returns: torch.Tensor | None = None  # [T]
    staleness: torch.Tensor | None = (
        None  # [T] int32 versions by which the weights that chose it are older; None: all are 0
    )
    importance: torch.Tensor | None = None  # [T] weight of the policy's loss: what sampled is not what learns; None: 1
    turn_rewards: torch.Tensor | None = None  # [T] each turn's own reward on its last token; None: no turn has any
    loss_weights: torch.Tensor | None = None  # [T] the token's share of the batch's mean; sums to 1 over a mini-batch
    routing: tuple[torch.Tensor, ...] | None = None  # n records as of `Rollout`; the policy's model replays them
    sampling_mask: tuple[SamplingMask, ...] | None = (
        None  # n records, of each of a sequence's tokens; of policies' models
    )
    sharding: BatchSharding | None = None
    marked: torch.Tensor | None = None  # [T] bool, tokens that the policy loss has chosen out of the whole mini-batch
    counts: Counts | None = None  # of the mini-batch that this is, or is a part of
    episode: torch.Tensor | None = None  # [N] int64, branches of one episode share a number; None: all are alone

    @staticmethod
    def from_rollouts(rollouts: Rollouts | Sequence[Rollout]) -> TrainBatch:
        """Pack finished rollouts; a rollout without any action token is packed too and has an empty mask.

        Of a plain sequence each rank packs what it is given, as one that is alone.
        """
        rollouts = rollouts if isinstance(rollouts, Rollouts) else Rollouts.gather(rollouts)
        turns = [turn for rollout in rollouts.local for turn in rollout.turns]
        lengths = [len(turn.token_ids) for turn in turns]
        starts = np.cumsum([0, *(rollout.num_tokens for rollout in rollouts.local)], dtype=np.int64)
        mask = np.repeat(np.array([turn.is_action for turn in turns], dtype=np.bool_), lengths)
        logprobs = np.zeros(len(mask), dtype=np.float32)
        logprobs[mask] = concat([turn.logprobs for turn in turns], np.float32)
        lag = None
        if bool((rollouts.staleness > 0).any()):
            versions = concat([turn.token_versions for turn in turns], np.int32)
            lag = torch.from_numpy(np.where(mask, np.maximum(rollouts.version - versions, 0), 0).astype(np.int32))
        turn_rewards = None
        if bool((rollouts.rewarded_turns > 0).any()):
            placed = np.zeros(len(mask), dtype=np.float32)
            ends = np.cumsum(lengths, dtype=np.int64)
            for turn, length, end in zip(turns, lengths, ends.tolist(), strict=True):
                if length and turn.reward:
                    placed[end - 1] = turn.reward
            turn_rewards = torch.from_numpy(placed)
        shares = BatchSharding(
            rollouts.length,
            rollouts.routed_tokens,
            rollouts.home,
            rollouts.local_indices,
            rollouts.comm,
            rollouts.sampling_mask_sizes,
        )
        return TrainBatch(
            tokens=torch.from_numpy(concat([turn.token_ids for turn in turns], np.int32)),
            cu_seqlens=torch.from_numpy(starts),
            loss_mask=torch.from_numpy(mask),
            group=rollouts.group,
            episode=rollouts.episode if len(rollouts.episodes) < len(rollouts) else None,
            sequence_reward=rollouts.reward.float(),
            rollout_logprobs=torch.from_numpy(logprobs),
            staleness=lag,
            turn_rewards=turn_rewards,
            routing=_pack_routing(rollouts),
            sampling_mask=_pack_sampling_masks(rollouts),
            sharding=None if isinstance(rollouts.comm, LocalComm) else shares,
        )

    @property
    def lengths(self) -> torch.Tensor:
        """[N] tokens of each sequence."""
        return self.cu_seqlens.diff() if self.sharding is None else self.sharding.lengths

    @property
    def local_indices(self) -> torch.Tensor:
        """[n] which of the N sequences are here."""
        return torch.arange(len(self.cu_seqlens) - 1) if self.sharding is None else self.sharding.local_indices

    @property
    def comm(self) -> Comm:
        """Those who have the others."""
        return LOCAL if self.sharding is None else self.sharding.comm

    @property
    def num_sequences(self) -> int:
        """N."""
        return len(self.lengths)

    @property
    def episodes(self) -> Episodes:
        """Which of the N sequences are branches of one episode."""
        return Episodes.singletons(self.num_sequences) if self.episode is None else Episodes.from_ids(self.episode)

    @property
    def local_episodes(self) -> Episodes:
        """The same of the n that are here, of episodes all of whose branches are."""
        return Episodes.from_ids(self.local_indices if self.episode is None else self.episode[self.local_indices])

    @property
    def cu_episodes(self) -> torch.Tensor:
        """`cu_seqlens` of the episodes that are here, whose branches lie end to end: what makes a function of sequences
        one of episodes."""
        return self.local_episodes.merge_cu_seqlens(self.cu_seqlens)

    @property
    def positions(self) -> torch.Tensor:
        """[T] index of each token within its sequence."""
        starts = torch.repeat_interleave(self.cu_seqlens[:-1], self.cu_seqlens.diff())
        return torch.arange(len(starts), device=starts.device) - starts

    @property
    def sequence_ids(self) -> torch.Tensor:
        """[T] which of the N sequences each token belongs to."""
        return torch.repeat_interleave(self.local_indices.to(self.cu_seqlens.device), self.cu_seqlens.diff())

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of a small tensor over the ranks that have sequences of this batch, the same on all. Collective."""
        return self.comm.all_reduce(part)

    def all_gather(self, figures: torch.Tensor) -> torch.Tensor:
        """[n] -> [N]: a number of each sequence that is here -> those of all, on every rank. Collective."""
        if self.sharding is None:
            return figures
        rows = self.comm.all_gather_rows(torch.stack([self.local_indices.double(), figures.double()], dim=1))
        result = figures.new_zeros(self.num_sequences)
        result[rows[:, 0].long()] = rows[:, 1].to(figures.dtype)
        return result

    def with_(self, **changes: Any) -> TrainBatch:
        """A new batch with the named tensors in place of the old ones."""
        return replace(self, **changes)

    def select(self, indices: Sequence[int]) -> TrainBatch:
        """The sub-batch of the given sequences, in the given order; each of them stays where it is, and branches of an
        episode beside each other."""
        numbers = torch.as_tensor(list(indices), dtype=torch.int64)
        place = torch.full((self.num_sequences,), -1, dtype=torch.int64)  # among those here, of all N
        place[self.local_indices] = torch.arange(len(self.local_indices))
        rows = place[numbers]
        own = (rows >= 0).nonzero().squeeze(1)
        rows = rows[own]
        lengths = self.cu_seqlens.diff()[rows]
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        shift = self.cu_seqlens[rows] - starts[:-1]
        tokens = torch.arange(int(starts[-1])) + torch.repeat_interleave(shift, lengths)
        changes: dict[str, Any] = {name: getattr(self, name)[tokens] for name in self.columns()}
        if self.routing is not None:
            changes["routing"] = tuple(self.routing[row] for row in rows.tolist())
        if self.sampling_mask is not None:
            changes["sampling_mask"] = tuple(self.sampling_mask[row] for row in rows.tolist())
        if self.sharding is not None:
            known = {name: getattr(self.sharding, name)[numbers] for name in ("lengths", "routed_tokens", "home")}
            if self.sharding.sampling_mask_sizes is not None:
                known["sampling_mask_sizes"] = self.sharding.sampling_mask_sizes[numbers]
            changes["sharding"] = replace(self.sharding, local_indices=own, **known)
        changes |= {"group": self.group[numbers], "sequence_reward": self.sequence_reward[numbers]}
        if self.episode is not None:
            changes["episode"] = self.episode[numbers]
        return self.with_(cu_seqlens=starts, **changes)

    def columns(self) -> tuple[str, ...]:
        """Names of the [T] tensors that there are."""
        return tuple(name for name in TOKEN_COLUMNS if getattr(self, name) is not None)


_NON_TOKEN_FIELDS = ("cu_seqlens", "group", "episode", "sequence_reward", "routing", "sampling_mask", "sharding", "counts")
TOKEN_COLUMNS = tuple(item.name for item in fields(TrainBatch) if item.name not in _NON_TOKEN_FIELDS)
"""The [T] tensors of a batch."""


def _pack_routing(rollouts: Rollouts) -> tuple[torch.Tensor, ...] | None:
    """Of the rollouts that are here, empty where one has none; None where no rollout has one, here or elsewhere."""
    if not bool((rollouts.routed_tokens > 0).any()):
        return None
    found = [rollout.routing for rollout in rollouts.local]
    shapes = {record.shape[1:] for record in found if record is not None}
    if len(shapes) > 1:
        raise ValueError(f"rollouts whose routing has different shapes per token: {sorted(map(tuple, shapes))}")
    for record, rollout in zip(found, rollouts.local, strict=True):
        if record is not None and len(record) > (tokens := rollout.num_tokens):
            raise ValueError(f"a rollout of {tokens} tokens has the routing of {len(record)}")
    (shape,) = shapes or {torch.Size((0, 0))}
    none = torch.zeros((0, *shape), dtype=torch.uint8)
    return tuple(none if record is None else record for record in found)


def _pack_sampling_masks(rollouts: Rollouts) -> tuple[SamplingMask, ...] | None:
    """Of the rollouts that are here, with nothing for the tokens that no policy chose; None where no rollout's sampling
    was cut off, here or elsewhere."""
    if not bool((rollouts.sampling_mask_sizes > 0).any()):
        return None
    found = []
    for rollout in rollouts.local:
        whose = torch.cat([torch.full((len(turn.token_ids),), turn.is_action) for turn in rollout.turns])
        record = (
            SamplingMask.unrestricted(rollout.num_actions) if rollout.sampling_mask is None else rollout.sampling_mask
        )
        if len(record) != rollout.num_actions:
            raise ValueError(
                f"a rollout whose policy chose {rollout.num_actions} tokens says of {len(record)} what they could be"
            )
        spread = record.index_select((whose.cumsum(0) - 1).where(whose, -1))
        if bool((outside := spread.excludes(torch.tensor(rollout.token_ids))).any()):
            raise ValueError(f"token {int(outside.nonzero()[0])} of a rollout is not among those that could be chosen")
        found.append(spread)
    return tuple(found)


@dataclass(frozen=True)
class ModelOutput:
    """What a model says of a micro-batch; index t speaks about token t, as at the head of this file. On the device."""

    logprobs: torch.Tensor | None = None  # [T] of the policy
    entropy: torch.Tensor | None = None  # [T] of the distribution that token t was drawn from
    values: torch.Tensor | None = None  # [T] of the critic
    scores: torch.Tensor | None = None  # [T] of a reward model, of each beginning of the sequence


@dataclass(frozen=True)
class TokenLoss:
    """What a loss returns: a number per token, and further numbers per token or per sequence to be logged.

    The optimizer step minimises sum(loss_weights * loss). The weights are shares of the global mini-batch, so the
    result does not depend on how it was cut up.
    """

    loss: torch.Tensor  # [T], differentiable
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)  # name -> [T], detached
    sequence_metrics: dict[str, torch.Tensor] = field(default_factory=dict)  # name -> [n], 0 of those without an action

    def reduce_metrics(self, batch: TrainBatch) -> dict[str, torch.Tensor]:
        """What is logged: each metric's share of its mean over the mini-batch, to be added up over its parts.

        A metric is a mean over the mini-batch's action tokens, or over its sequences that have some, whatever the loss
        is a mean of. Without `counts`, as of a reward model, it is weighted as the loss.
        """
        counts, weights = batch.counts, batch.loss_weights
        assert weights is not None
        if counts is not None:
            weights = batch.loss_mask.float().div_(max(counts.actions, 1))
        found = {name: (weights * metric).sum().detach() for name, metric in self.metrics.items()}
        for name, metric in self.sequence_metrics.items():
            assert counts is not None, f"{name} is a mean over sequences, of which the batch has no counts"
            found[name] = (metric.sum() / max(counts.sequences, 1)).detach()
        return found


Loss = TypeVar("Loss", bound=Callable[..., Any])

REQUIRED_COLUMNS = ("tokens", "loss_mask", "loss_weights")
"""What every loss is given; what is of a sequence, such as `group`, is everywhere."""


def reads(*columns: str) -> Callable[[Loss], Loss]:
    """Name the columns that a loss reads beside ALWAYS:

        @reads("values", "returns")
        def critic_loss(output: ModelOutput, part: TrainBatch) -> TokenLoss: ...

    Another column of its `part` cannot be read then. A loss that says nothing is given all that there are. Raises
    ConfigError for a name that is no column.
    """
    if unknown := [name for name in columns if name not in TOKEN_COLUMNS]:
        raise ConfigError(f"@reads: {unknown[0]!r} is no column of a batch; there are {', '.join(TOKEN_COLUMNS)}")

    def mark(loss: Loss) -> Loss:
        loss.reads = columns  # type: ignore[attr-defined]
        return loss

    return mark


def get_declared_columns(loss: Callable[..., Any]) -> tuple[str, ...] | None:
    """What a loss has named; None where it has said nothing."""
    return getattr(loss, "reads", None)


def select_columns(loss: Callable[..., Any], batch: TrainBatch) -> tuple[str, ...]:
    """The columns of a batch that a loss is given, of those that there are."""
    named = get_declared_columns(loss)
    return tuple(name for name in batch.columns() if named is None or name in named or name in REQUIRED_COLUMNS)
