"""Training side: packed batches, model outputs and losses, aligned as `types/__init__.py` defines.

A loss declares with `@reads` which columns of a batch it uses; only these are sent to the model that it trains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch

from megarl.config.strict import ConfigError
from megarl.types.arrays import SamplingMask, concat
from megarl.types.comm import LOCAL, Comm, LocalComm
from megarl.types.episodes import Episodes
from megarl.types.image_tokens import pack_images
from megarl.types.prefixes import CommonPrefixes, Sequences, find_prefixes
from megarl.types.rollouts import Rollout, Rollouts


@dataclass(frozen=True)
class BatchSharding:
    """Distribution of a batch's N sequences over the ranks."""

    lengths: torch.Tensor  # [N] int64 tokens
    routed_tokens: torch.Tensor  # [N] int64 leading tokens with recorded routing
    home: torch.Tensor  # [N] int64, the rank
    local_indices: torch.Tensor  # [n] int64, the sequences on this rank, in the order of the batch's tokens
    comm: Comm = field(compare=False, repr=False)
    sampling_mask_sizes: torch.Tensor | None = None  # [N] int64 ids in the sampling masks; None without masks
    indexed_tokens: torch.Tensor | None = None  # [N] int64 tokens with recorded sparse attention indices
    image_bytes: torch.Tensor | None = None  # [N] int64 bytes of the packed images; None without images


@dataclass(frozen=True)
class Counts:
    """Denominators of the metrics of a global mini-batch, of which ranks and micro-batches have shares."""

    actions: int
    sequences: int  # with at least one action token
    positive_actions: int = 0  # action tokens of sequences with a reward above 0


@dataclass(frozen=True)
class TrainBatch:
    """N sequences, n of them on this rank, packed into `[T]` tensors; `types/__init__.py` defines the alignment.

    Float tensors are fp32. Without `sharding` every rank has all sequences: n is N.
    """

    tokens: torch.Tensor  # [T] int32 or int64
    cu_seqlens: torch.Tensor  # [n + 1] int64, start of each local sequence; cu_seqlens[n] == T
    loss_mask: torch.Tensor  # [T] bool, True where the policy sampled the token
    group: torch.Tensor  # [N] int64, samples of one prompt share a number
    sequence_reward: torch.Tensor  # [N] reward of each sequence, turn rewards included
    rollout_logprobs: torch.Tensor  # [T] behavior log-probs, as the engine reported them
    old_logprobs: torch.Tensor | None = None  # [T] of the policy before the first update on this batch
    trainer_logprobs: torch.Tensor | None = None  # [T] the same, also for tokens of older weights; for metrics
    unreplayed_logprobs: torch.Tensor | None = None  # [T] the same, with the trainer's own expert routing
    ref_logprobs: torch.Tensor | None = None  # [T]
    values: torch.Tensor | None = None  # [T]
    rewards: torch.Tensor | None = None  # [T] token rewards: outcome plus, if configured, the KL penalty
    advantages: torch.Tensor | None = None  # [T]
    returns: torch.Tensor | None = None  # [T]
    staleness: torch.Tensor | None = None  # [T] int32 age in versions of the weights that sampled; None: all 0
    importance: torch.Tensor | None = None  # [T] weight of the policy loss, corrects for the sampler; None: 1
    turn_rewards: torch.Tensor | None = None  # [T] each turn's own reward on its last token; None: no turn has any
    loss_weights: torch.Tensor | None = None  # [T] the token's share of the batch's mean; sums to 1 over a mini-batch
    routing: tuple[torch.Tensor, ...] | None = None  # n records as in `Rollout`; the policy's model replays them
    sparse_indices: tuple[torch.Tensor, ...] | None = None  # n records as in `Rollout`; the policy's model replays them
    sampling_mask: tuple[SamplingMask, ...] | None = None  # n masks over all tokens of a sequence, for policy models
    images: tuple[torch.Tensor, ...] | None = None  # n results of `pack_images`; None if no sequence has images
    sharding: BatchSharding | None = None
    marked: torch.Tensor | None = None  # [T] bool, tokens that the policy loss selected from the global mini-batch
    counts: Counts | None = None  # of the global mini-batch that this batch is, or is a part of
    episode: torch.Tensor | None = None  # [N] int64, branches of one episode share a number; None: no branches
    prefixes: CommonPrefixes | None = None  # of the N sequences; None: they are not known
    targets: torch.Tensor | None = None  # [T] the token that the log-prob at t is of, after tokens[:t]; None: tokens
    adapter: torch.Tensor | None = None  # [T] int64 which of several adapters computes the token; None: the trained one
    keeps_groups: bool = False  # True if the loss compares the sequences of a group, which then share a micro-batch

    @staticmethod
    def from_rollouts(rollouts: Rollouts | Sequence[Rollout]) -> TrainBatch:
        """Pack finished rollouts, also those without an action token, whose mask is empty. Collective.

        A plain sequence is packed as if this rank were the only one.
        """
        rollouts = rollouts if isinstance(rollouts, Rollouts) else Rollouts.gather(rollouts)
        turns = [turn for rollout in rollouts.local for turn in rollout.turns]
        lengths = [len(turn.token_ids) for turn in turns]
        starts = np.cumsum([0, *(rollout.num_tokens for rollout in rollouts.local)], dtype=np.int64)
        mask = np.repeat(np.array([turn.is_action for turn in turns], dtype=np.bool_), lengths)
        logprobs = np.zeros(len(mask), dtype=np.float32)
        logprobs[mask] = concat([turn.logprobs for turn in turns], np.float32)
        staleness = None
        if bool((rollouts.staleness > 0).any()):
            versions = concat([turn.token_versions for turn in turns], np.int32)
            staleness = torch.from_numpy(np.where(mask, np.maximum(rollouts.version - versions, 0), 0).astype(np.int32))
        turn_rewards = None
        if bool((rollouts.rewarded_turns > 0).any()):
            turn_rewards = torch.zeros(len(mask))
            for turn, length, end in zip(turns, lengths, np.cumsum(lengths, dtype=np.int64).tolist(), strict=True):
                if length and turn.reward:
                    turn_rewards[end - 1] = turn.reward
        sharding = None
        if not isinstance(rollouts.comm, LocalComm):
            columns = rollouts.length, rollouts.routed_tokens, rollouts.home, rollouts.local_indices
            sharding = BatchSharding(
                *columns, rollouts.comm, rollouts.sampling_mask_sizes, rollouts.indexed_tokens, rollouts.image_bytes
            )
        has_images = bool((rollouts.image_bytes > 0).any())
        batch = TrainBatch(
            tokens=torch.from_numpy(concat([turn.token_ids for turn in turns], np.int32)),
            cu_seqlens=torch.from_numpy(starts),
            loss_mask=torch.from_numpy(mask),
            group=rollouts.group,
            episode=rollouts.episode if len(rollouts.episodes) < len(rollouts) else None,
            sequence_reward=rollouts.reward.float(),
            rollout_logprobs=torch.from_numpy(logprobs),
            staleness=staleness,
            turn_rewards=turn_rewards,
            routing=_pack_routing(rollouts),
            sparse_indices=_pack_indices(rollouts),
            sampling_mask=_pack_sampling_masks(rollouts),
            images=tuple(pack_images(rollout.images) for rollout in rollouts.local) if has_images else None,
            sharding=sharding,
        )
        return batch.with_prefixes()

    @property
    def lengths(self) -> torch.Tensor:
        """[N] tokens of each sequence."""
        return self.cu_seqlens.diff() if self.sharding is None else self.sharding.lengths

    @property
    def local_indices(self) -> torch.Tensor:
        """[n] indices of this rank's sequences among the N."""
        return torch.arange(len(self.cu_seqlens) - 1) if self.sharding is None else self.sharding.local_indices

    @property
    def comm(self) -> Comm:
        """The ranks that share this batch."""
        return LOCAL if self.sharding is None else self.sharding.comm

    @property
    def num_sequences(self) -> int:
        """N."""
        return len(self.lengths)

    @property
    def episodes(self) -> Episodes:
        """The episodes of all N sequences."""
        return Episodes.from_ids(torch.arange(self.num_sequences) if self.episode is None else self.episode)

    @property
    def local_episodes(self) -> Episodes:
        """The episodes of the n local sequences. All branches of an episode are on one rank."""
        return Episodes.from_ids(self.local_indices if self.episode is None else self.episode[self.local_indices])

    @property
    def cu_episodes(self) -> torch.Tensor:
        """`cu_seqlens` of the local episodes; turns a function of sequences into a function of episodes."""
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

    def all_reduce(self, local: torch.Tensor) -> torch.Tensor:
        """Sum a small tensor over the ranks that share this batch; the same result on all. Collective."""
        return self.comm.all_reduce(local)

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        """[n] -> [N]: gather one number per local sequence on every rank. Collective."""
        if self.sharding is None:
            return values
        rows = self.comm.all_gather_rows(torch.stack([self.local_indices.double(), values.double()], dim=1))
        result = values.new_zeros(self.num_sequences)
        result[rows[:, 0].long()] = rows[:, 1].to(values.dtype)
        return result

    def with_prefixes(self) -> TrainBatch:
        """Return a copy that knows what its sequences have in common. Collective over the ranks that share the batch.

        Sequences with images count as different.
        """
        if self.images is not None:
            return self.with_(prefixes=None)
        bounds, mask, tokens = list(pairwise(self.cu_seqlens.tolist())), self.loss_mask.numpy(), self.tokens.numpy()
        prompts = [int(mask[start:stop].argmax()) if mask[start:stop].any() else stop - start for start, stop in bounds]
        routing = None if self.routing is None else [record.numpy() for record in self.routing]
        local = Sequences([tokens[start:stop] for start, stop in bounds], prompts, routing, self.sampling_mask)
        return self.with_(prefixes=find_prefixes(local, self.local_indices, self.num_sequences, self.comm))

    def with_(self, **changes: Any) -> TrainBatch:
        """Return a copy with the named fields replaced."""
        return replace(self, **changes)

    def select(self, indices: Sequence[int]) -> TrainBatch:
        """Return the sub-batch of the given sequences, in the given order.

        Sequences stay on their ranks. `indices` must keep the branches of an episode adjacent.
        """
        sequences = torch.as_tensor(list(indices), dtype=torch.int64)
        local_row = torch.full((self.num_sequences,), -1, dtype=torch.int64)  # [N] local row of each sequence, else -1
        local_row[self.local_indices] = torch.arange(len(self.local_indices))
        rows = local_row[sequences]
        selected = (rows >= 0).nonzero().squeeze(1)
        rows = rows[selected]
        lengths = self.cu_seqlens.diff()[rows]
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        shift = self.cu_seqlens[rows] - starts[:-1]
        tokens = torch.arange(int(starts[-1])) + torch.repeat_interleave(shift, lengths)
        changes: dict[str, Any] = {name: getattr(self, name)[tokens] for name in self.columns()}
        for name in ("routing", "sparse_indices", "sampling_mask", "images"):
            if (records := getattr(self, name)) is not None:
                changes[name] = tuple(records[row] for row in rows.tolist())
        if self.sharding is not None:
            names = ("lengths", "routed_tokens", "home", "sampling_mask_sizes", "indexed_tokens", "image_bytes")
            columns = {name: column for name in names if (column := getattr(self.sharding, name)) is not None}
            columns = {name: column[sequences] for name, column in columns.items()}
            changes["sharding"] = replace(self.sharding, local_indices=selected, **columns)
        for name in ("group", "sequence_reward", "episode"):
            if (column := getattr(self, name)) is not None:
                changes[name] = column[sequences]
        if self.prefixes is not None:
            changes["prefixes"] = self.prefixes.select(sequences)
        return self.with_(cu_seqlens=starts, **changes)

    def columns(self) -> tuple[str, ...]:
        """Return the names of the [T] tensors that are set."""
        return tuple(name for name in TOKEN_COLUMNS if getattr(self, name) is not None)


_OTHER_FIELDS = (
    "cu_seqlens group episode sequence_reward routing sparse_indices sampling_mask images sharding counts prefixes "
    "keeps_groups"
).split()
TOKEN_COLUMNS = tuple(item.name for item in fields(TrainBatch) if item.name not in _OTHER_FIELDS)
"""Names of the [T] tensors of a batch."""


def _pack_routing(rollouts: Rollouts) -> tuple[torch.Tensor, ...] | None:
    """Return the routing of the local rollouts, empty for those without; None if no rollout on any rank has one."""
    if not bool((rollouts.routed_tokens > 0).any()):
        return None
    records = [rollout.routing for rollout in rollouts.local]
    shapes = {record.shape[1:] for record in records if record is not None}
    if len(shapes) > 1:
        raise ValueError(f"rollouts whose routing has different shapes per token: {sorted(map(tuple, shapes))}")
    for record, rollout in zip(records, rollouts.local, strict=True):
        if record is not None and len(record) > (tokens := rollout.num_tokens):
            raise ValueError(f"a rollout of {tokens} tokens has the routing of {len(record)}")
    (shape,) = shapes or {torch.Size((0, 0))}
    empty = torch.zeros((0, *shape), dtype=torch.uint8)
    return tuple(empty if record is None else record for record in records)


def _pack_indices(rollouts: Rollouts) -> tuple[torch.Tensor, ...] | None:
    """Return the sparse attention indices of the local rollouts, empty for those without; None if no rank has any."""
    if not bool((rollouts.indexed_tokens > 0).any()):
        return None
    records = [rollout.sparse_indices for rollout in rollouts.local]
    empty = next((record[:0] for record in records if record is not None), torch.zeros((0, 0, 0), dtype=torch.int16))
    for record, rollout in zip(records, rollouts.local, strict=True):
        if record is not None and len(record) and record.shape[2] + len(record) > (tokens := rollout.num_tokens):
            raise ValueError(f"a rollout of {tokens} tokens has sparse attention indices of {len(record)}")
    return tuple(empty if record is None else record for record in records)


def _pack_sampling_masks(rollouts: Rollouts) -> tuple[SamplingMask, ...] | None:
    """Return the sampling masks of the local rollouts, unrestricted outside actions; None if no rank has one."""
    if not bool((rollouts.sampling_mask_sizes > 0).any()):
        return None
    masks = []
    for rollout in rollouts.local:
        is_action = torch.cat([torch.full((len(turn.token_ids),), turn.is_action) for turn in rollout.turns])
        mask, actions = rollout.sampling_mask, rollout.num_actions
        if mask is None:
            mask = SamplingMask.unrestricted(actions)
        if len(mask) != actions:
            raise ValueError(f"a rollout whose policy chose {actions} tokens has sampling masks of {len(mask)}")
        token_mask = mask.index_select((is_action.cumsum(0) - 1).where(is_action, -1))
        if bool((outside := token_mask.excludes(torch.tensor(rollout.token_ids))).any()):
            raise ValueError(f"token {int(outside.nonzero()[0])} of a rollout is not in its sampling mask")
        masks.append(token_mask)
    return tuple(masks)


@dataclass(frozen=True)
class ModelOutput:
    """Model outputs for a micro-batch, on the device. Index t speaks about token t, see `types/__init__.py`."""

    logprobs: torch.Tensor | None = None  # [T] of the policy
    entropy: torch.Tensor | None = None  # [T] of the distribution that token t was sampled from
    values: torch.Tensor | None = None  # [T] of the critic
    scores: torch.Tensor | None = None  # [T] of a reward model, for each prefix of the sequence


@dataclass(frozen=True)
class TokenLoss:
    """Return value of a loss: a number per token, and metrics per token or per sequence.

    The optimizer step minimizes sum(loss_weights * loss), with weights that are shares of the global mini-batch.
    """

    loss: torch.Tensor  # [T], differentiable
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)  # name -> [T], detached
    sequence_metrics: dict[str, torch.Tensor] = field(default_factory=dict)  # name -> [n], 0 without action tokens

    def reduce_metrics(self, batch: TrainBatch) -> dict[str, torch.Tensor]:
        """Return each metric's share of its mean over the mini-batch; the caller sums over micro-batches and ranks.

        Means are over the mini-batch's action tokens, or over its sequences with action tokens, however the loss is
        averaged. Without `counts`, as for a reward model, metrics are weighted like the loss.
        """
        counts, weights = batch.counts, batch.loss_weights
        assert weights is not None
        if counts is not None:
            weights = batch.loss_mask.float().div_(max(counts.actions, 1))
        reduced = {name: (weights * metric).sum().detach() for name, metric in self.metrics.items()}
        for name, metric in self.sequence_metrics.items():
            assert counts is not None, f"{name} is a mean over sequences, of which the batch has no counts"
            reduced[name] = (metric.sum() / max(counts.sequences, 1)).detach()
        return reduced


Loss = TypeVar("Loss", bound=Callable[..., Any])

REQUIRED_COLUMNS = ("tokens", "loss_mask", "loss_weights")
"""Columns that every loss receives. Per-sequence tensors such as `group` are always available."""


def reads(*columns: str) -> Callable[[Loss], Loss]:
    """Declare the columns that a loss reads in addition to `REQUIRED_COLUMNS`.

        @reads("values", "returns")
        def critic_loss(output: ModelOutput, part: TrainBatch) -> TokenLoss: ...

    The loss cannot read other columns of `part`. An undecorated loss receives all columns. Raises ConfigError for an
    unknown column.
    """
    if unknown := [name for name in columns if name not in TOKEN_COLUMNS]:
        raise ConfigError(f"@reads: {unknown[0]!r} is not a column of a batch; columns are {', '.join(TOKEN_COLUMNS)}")

    def mark(loss: Loss) -> Loss:
        loss.reads = columns  # type: ignore[attr-defined]
        return loss

    return mark


def get_declared_columns(loss: Callable[..., Any]) -> tuple[str, ...] | None:
    """Return the columns declared with `@reads`; None without a declaration."""
    return getattr(loss, "reads", None)


def select_columns(loss: Callable[..., Any], batch: TrainBatch) -> tuple[str, ...]:
    """Return the columns of `batch` that the loss receives."""
    declared = get_declared_columns(loss)
    return tuple(name for name in batch.columns() if declared is None or name in (*declared, *REQUIRED_COLUMNS))
