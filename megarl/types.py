"""Every value that crosses a stage of the loop.

Host side: frozen dataclasses, one per notion (`Prompt`, `Turn`, `Rollout`). Training side: one packed batch
(`TrainBatch`) of `[T]` tensors, T tokens of sequences laid end to end without padding.

**What is of a sequence is everywhere, what is of a token is where it was made.** Of N rollouts every rank has the
figures, as [N] tensors: lengths, groups, rewards, how they ended. The texts, tokens and records of one are on one rank,
its home, which leads the engine that wrote it. There its tokens' columns are computed and kept, and from there a model
is sent the rows that it computes. Functions of tokens (`algorithms/`) are functions of each sequence, so they are right
on a part of them; what is said of all tokens, a mean or a sum, goes through `total`, which adds up the parts:

    kl_mean = token_mean(kl, batch.loss_mask, batch.total)         and not kl.mean(), which is of this rank's tokens

On one rank all is here, and `total` gives back what it is given.

Alignment, written down here once and meant everywhere else: **index t speaks about token t.**
`logprobs[t]` is log p(tokens[t] | tokens before it), `values[t]` is the critic's value of the state in which
token t was chosen (that is, before it), `advantages[t]`, `returns[t]` and `rewards[t]` belong to the choice of
token t, and `loss_mask[t]` is True when the policy chose token t. The first token of a sequence has no
prediction: its entries are 0 and its mask is False. Models emit at index t what they predict for t + 1; the
shift happens in `megarl/megatron/` and nowhere else. `scores[t]`, of a reward model, is about the
conversation up to and including token t, which is where it is emitted: there is no shift, and the score of the whole is
at its last token.

A worked example, one tool call in two turns (ids made up; A = action):

    turn 0  prompt       [1 2 3]      is_action=False
    turn 1  tool call    [7 8]        is_action=True    logprobs [-.1 -.2]
    turn 2  tool answer  [4 5]        is_action=False
    turn 3  statement    [9]          is_action=True    logprobs [-.3]

    tokens            1  2  3  7    8    4  5  9
    positions         0  1  2  3    4    5  6  7
    loss_mask         .  .  .  A    A    .  .  A
    rollout_logprobs  0  0  0  -.1  -.2  0  0  -.3
    rewards           0  0  0  0    0    0  0  r        (an outcome reward sits on the last action)

One thing is about what becomes of a token, not of its choice: `routing[t]` names the experts that token t went through
as an input, on the way to what predicts token t + 1. The engine never runs the last token, which has no routing (-1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

import numpy as np
import torch

from megarl.arrays import Ids, Logprobs, ids_of, joined, no_ids, no_logprobs, read_only, same
from megarl.everyone import ALONE, Alone, Everyone

Message = dict[str, Any]
"""One chat message in the OpenAI form: role, content, and tool_calls where there are some."""

Status = Literal["stop", "length", "max_turns", "aborted"]
"""Why a rollout ended: the policy stopped, ran out of tokens, ran out of turns, or was cut off by a failure."""

STATUSES: tuple[Status, ...] = get_args(Status)
"""By the numbers of `Rollouts.status`."""


@dataclass(frozen=True, eq=False)
class Prompt:
    """A task, as it comes out of a data set.

    `token_ids` are the rendered chat with the generation prompt, filled in by the loader; `tools` are the names
    of the tools that the policy may call. `ground_truth` and `extra` are for the reward and never reach the policy.

    The ids are an array because turn 0 of every sample is one: all samples share the prompt's, and it is turned into
    numbers of Python only inside of a request. It also takes 4 bytes a token, a tuple 8 and up to 32 for the number.
    """

    id: str
    messages: tuple[Message, ...]
    token_ids: Ids = field(default_factory=no_ids)
    data_source: str = ""
    ground_truth: Any = None
    tools: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", ids_of(self.token_ids))

    def __eq__(self, other: object) -> bool:
        return same(self, other) if isinstance(other, Prompt) else NotImplemented


@dataclass(frozen=True, eq=False)
class Turn:
    """A run of tokens that one party wrote: the prompt, the policy, or a tool.

    `logprobs` has one entry per token for an action and is empty otherwise. `weight_version` is the version of the
    weights that chose the last token, and all others unless `versions` says something else; -1 for tokens that no
    policy chose. A turn during which the weights changed stays one turn: it is one thing that the policy said.
    """

    token_ids: Ids
    logprobs: Logprobs = field(default_factory=no_logprobs)
    is_action: bool = False
    weight_version: int = -1
    versions: tuple[tuple[int, int], ...] = ()
    """(version, tokens) of one run of tokens after the other, where the weights changed meanwhile; else empty."""

    def __post_init__(self) -> None:
        logprobs = np.asarray(self.logprobs, dtype=np.float32)
        object.__setattr__(self, "token_ids", ids_of(self.token_ids))
        object.__setattr__(self, "logprobs", read_only(logprobs, self.logprobs))
        if self.is_action and logprobs.shape != self.token_ids.shape:
            raise ValueError(f"an action turn has {len(self.token_ids)} tokens but {logprobs.size} logprobs")
        if not self.is_action and logprobs.size:
            raise ValueError("only an action turn carries logprobs")
        if self.versions and sum(tokens for _, tokens in self.versions) != len(self.token_ids):
            raise ValueError(f"a turn of {len(self.token_ids)} tokens with versions of others: {self.versions}")
        if self.versions and self.versions[-1][0] != self.weight_version:
            raise ValueError(f"a turn by version {self.weight_version} that ends by another: {self.versions}")

    def __eq__(self, other: object) -> bool:
        return same(self, other) if isinstance(other, Turn) else NotImplemented

    @property
    def token_versions(self) -> Ids:
        """Version of the weights that chose each token."""
        runs = self.versions or ((self.weight_version, len(self.token_ids)),)
        return np.repeat(np.array([version for version, _ in runs], np.int32), [tokens for _, tokens in runs])


@dataclass(frozen=True)
class Rollout:
    """One conversation: the token ids that the engine saw, turn by turn. Turn 0 is the rendered prompt.

    `group` numbers the prompt within the step: samples of one prompt share it. `messages` is the conversation in
    words, for rewards and readers; training reads only the turns.
    """

    prompt: Prompt
    turns: tuple[Turn, ...]
    status: Status = "stop"
    reward: float = 0.0
    reward_parts: dict[str, float] = field(default_factory=dict)
    seed: int = 0
    group: int = 0
    messages: tuple[Message, ...] = ()
    tool_calls: int = 0
    tool_errors: int = 0
    routing: torch.Tensor | None = field(default=None, compare=False, repr=False)
    """[known, MoE layers, topk]: the experts that each of the first `known` tokens went through in the engine, in any
    order. uint8 where the model has at most 256 of them, else int16. None where nothing was recorded."""
    drafted: int = 0
    """Tokens that were drafted for the policy (rollout.draft_tokens); 0 for recorded rollouts."""
    accepted: int = 0
    """Those of them that it accepted."""
    failure: str = ""
    """Of an aborted rollout, what cut it off."""

    @property
    def token_ids(self) -> Ids:
        """All turns' in one array, made when it is asked for."""
        return joined([turn.token_ids for turn in self.turns], np.int32)

    @property
    def num_tokens(self) -> int:
        return sum(len(turn.token_ids) for turn in self.turns)

    @property
    def num_actions(self) -> int:
        """Tokens that the policy chose."""
        return sum(len(turn.token_ids) for turn in self.turns if turn.is_action)

    @property
    def answer(self) -> str:
        """What the policy said last, as text."""
        for message in reversed(self.messages):
            if message["role"] == "assistant":
                return str(message.get("content") or "")
        return ""


FIGURES: dict[str, Callable[[Rollout], float]] = {
    "group": lambda rollout: rollout.group,
    "length": lambda rollout: rollout.num_tokens,
    "prompt_length": lambda rollout: len(rollout.turns[0].token_ids),
    "actions": lambda rollout: rollout.num_actions,
    "turns": lambda rollout: sum(turn.is_action for turn in rollout.turns),
    "status": lambda rollout: STATUSES.index(rollout.status),
    "tool_calls": lambda rollout: rollout.tool_calls,
    "tool_errors": lambda rollout: rollout.tool_errors,
    "drafted": lambda rollout: rollout.drafted,
    "accepted": lambda rollout: rollout.accepted,
    "routed": lambda rollout: 0 if rollout.routing is None else len(rollout.routing),
}
"""What every rank knows of every rollout, beside its reward: whole numbers."""


@dataclass(frozen=True)
class Rollouts:
    """N rollouts in an order that is the same on all ranks: figures of all of them, and those whose home is here."""

    here: tuple[Rollout, ...]
    own: torch.Tensor  # [n] int64, which of the N those `here` are, ascending
    home: torch.Tensor  # [N] int64, the rank that has it
    group: torch.Tensor  # [N] int64, samples of one prompt share a number
    length: torch.Tensor  # [N] int64 tokens
    prompt_length: torch.Tensor  # [N] int64 tokens
    actions: torch.Tensor  # [N] int64 tokens that the policy chose
    turns: torch.Tensor  # [N] int64 turns of the policy
    status: torch.Tensor  # [N] int64, place in STATUSES
    tool_calls: torch.Tensor  # [N] int64
    tool_errors: torch.Tensor  # [N] int64
    drafted: torch.Tensor  # [N] int64
    accepted: torch.Tensor  # [N] int64
    routed: torch.Tensor  # [N] int64 tokens at the beginning whose routing was recorded
    reward: torch.Tensor  # [N] float64
    reward_parts: dict[str, torch.Tensor]  # [N] float64 each; 0 where a rollout has no such part
    failures: tuple[str, ...] = ()  # of the aborted ones, in no order
    everyone: Everyone = field(default=ALONE, compare=False, repr=False)

    @staticmethod
    def of(
        here: Sequence[Rollout], order: Sequence[int] | torch.Tensor | None = None, everyone: Everyone = ALONE
    ) -> Rollouts:
        """Put together what all ranks have. order: a number for each of those here, by which all of them are ordered;
        equal ones by rank, then as they are given, and so are all where it is None. Collective."""
        keys = torch.zeros(len(here), dtype=torch.int64) if order is None else torch.as_tensor(order, dtype=torch.int64)
        mine = (
            sorted({name for rollout in here for name in rollout.reward_parts}),
            [rollout.failure or "no reason on record" for rollout in here if rollout.status == "aborted"],
        )
        said = everyone.objects(mine)
        parts = sorted({name for names, _ in said for name in names})
        whole = [[get(rollout) for get in FIGURES.values()] for rollout in here]
        rewards = [[rollout.reward, *(rollout.reward_parts.get(name, 0.0) for name in parts)] for rollout in here]
        numbers = torch.tensor(whole, dtype=torch.int64).reshape(len(here), len(FIGURES))
        marks = torch.stack([keys, torch.full_like(keys, everyone.rank)], dim=1)
        table = everyone.rows(torch.cat([marks, numbers], dim=1))
        rated = everyone.rows(torch.tensor(rewards, dtype=torch.float64).reshape(len(here), 1 + len(parts)))
        into = torch.sort(table[:, 0], stable=True).indices
        table, rated = table[into], rated[into]
        own = (table[:, 1] == everyone.rank).nonzero().squeeze(1)
        at = torch.sort(keys, stable=True).indices.tolist()  # equal keys of one rank are in its own order above, too
        return Rollouts(
            here=tuple(here[i] for i in at),
            own=own,
            home=table[:, 1].contiguous(),
            **{name: table[:, column].contiguous() for column, name in enumerate(FIGURES, 2)},
            reward=rated[:, 0].contiguous(),
            reward_parts={name: rated[:, column].contiguous() for column, name in enumerate(parts, 1)},
            failures=tuple(reason for _, reasons in said for reason in reasons),
            everyone=everyone,
        )

    def __len__(self) -> int:
        return len(self.home)

    def with_(self, here: Sequence[Rollout]) -> Rollouts:
        """The same with others in the place of those that are here, one for each. Collective."""
        return Rollouts.of(here, self.own, self.everyone)

    def are(self, *statuses: Status) -> torch.Tensor:
        """[N] bool: which of them ended so."""
        return torch.isin(self.status, torch.tensor([STATUSES.index(status) for status in statuses]))

    def select(self, keep: torch.Tensor) -> Rollouts:
        """Those where `keep`, [N] bool, says so, in their order."""
        kept = keep[self.own]
        figures = {name: getattr(self, name)[keep] for name in ("home", *FIGURES, "reward")}
        return replace(
            self,
            here=tuple(rollout for rollout, stays in zip(self.here, kept.tolist(), strict=True) if stays),
            own=(keep.cumsum(0) - 1)[self.own[kept]],
            **figures,
            reward_parts={name: part[keep] for name, part in self.reward_parts.items()},
        )


@dataclass(frozen=True)
class Shares:
    """Which rank has which of a batch's N sequences."""

    lengths: torch.Tensor  # [N] int64 tokens
    routed: torch.Tensor  # [N] int64 tokens at the beginning whose routing was recorded
    home: torch.Tensor  # [N] int64, the rank
    own: torch.Tensor  # [n] int64, which of the N are here; the batch has their tokens in this order
    everyone: Everyone = field(compare=False, repr=False)


@dataclass(frozen=True)
class TrainBatch:
    """N sequences, of which n are here, packed into `[T]` tensors; see the head of this file for the alignment.

    float tensors are fp32. Without `shares` all sequences are here, on each rank: n is N.
    """

    tokens: torch.Tensor  # [T] int32 or int64
    cu_seqlens: torch.Tensor  # [n + 1] int64, cu_seqlens[i] is where the i-th of those here starts, cu_seqlens[n] == T
    loss_mask: torch.Tensor  # [T] bool, True where the policy chose the token
    group: torch.Tensor  # [N] int64, samples of one prompt share a number
    sequence_reward: torch.Tensor  # [N] outcome reward of each sequence
    rollout_logprobs: torch.Tensor  # [T] as the engine reported them
    old_logprobs: torch.Tensor | None = None  # [T] of the policy before the first update on this batch
    ref_logprobs: torch.Tensor | None = None  # [T]
    values: torch.Tensor | None = None  # [T]
    rewards: torch.Tensor | None = None  # [T] token rewards: outcome plus, where asked for, the KL penalty
    advantages: torch.Tensor | None = None  # [T]
    returns: torch.Tensor | None = None  # [T]
    loss_weights: torch.Tensor | None = None  # [T] the token's share of the batch's mean; sums to 1 over a mini-batch
    routing: tuple[torch.Tensor, ...] | None = None  # n records as of `Rollout`; the policy's model replays them
    shares: Shares | None = None

    @staticmethod
    def from_rollouts(rollouts: Rollouts | Sequence[Rollout]) -> TrainBatch:
        """Pack finished rollouts; a rollout without any action token is packed too and has an empty mask.

        Of a plain sequence each rank packs what it is given, as one that is alone.
        """
        rollouts = rollouts if isinstance(rollouts, Rollouts) else Rollouts.of(rollouts)
        turns = [turn for rollout in rollouts.here for turn in rollout.turns]
        lengths = [len(turn.token_ids) for turn in turns]
        starts = np.cumsum([0, *(rollout.num_tokens for rollout in rollouts.here)], dtype=np.int64)
        mask = np.repeat(np.array([turn.is_action for turn in turns], dtype=np.bool_), lengths)
        logprobs = np.zeros(len(mask), dtype=np.float32)
        logprobs[mask] = joined([turn.logprobs for turn in turns], np.float32)
        shares = Shares(rollouts.length, rollouts.routed, rollouts.home, rollouts.own, rollouts.everyone)
        return TrainBatch(
            tokens=torch.from_numpy(joined([turn.token_ids for turn in turns], np.int32)),
            cu_seqlens=torch.from_numpy(starts),
            loss_mask=torch.from_numpy(mask),
            group=rollouts.group,
            sequence_reward=rollouts.reward.float(),
            rollout_logprobs=torch.from_numpy(logprobs),
            routing=_records(rollouts),
            shares=None if isinstance(rollouts.everyone, Alone) else shares,
        )

    @property
    def lengths(self) -> torch.Tensor:
        """[N] tokens of each sequence."""
        return self.cu_seqlens.diff() if self.shares is None else self.shares.lengths

    @property
    def own(self) -> torch.Tensor:
        """[n] which of the N sequences are here."""
        return torch.arange(len(self.cu_seqlens) - 1) if self.shares is None else self.shares.own

    @property
    def everyone(self) -> Everyone:
        """Those who have the others."""
        return ALONE if self.shares is None else self.shares.everyone

    @property
    def num_sequences(self) -> int:
        """N."""
        return len(self.lengths)

    @property
    def positions(self) -> torch.Tensor:
        """[T] index of each token within its sequence."""
        starts = torch.repeat_interleave(self.cu_seqlens[:-1], self.cu_seqlens.diff())
        return torch.arange(len(starts), device=starts.device) - starts

    @property
    def sequence_ids(self) -> torch.Tensor:
        """[T] which of the N sequences each token belongs to."""
        return torch.repeat_interleave(self.own.to(self.cu_seqlens.device), self.cu_seqlens.diff())

    def total(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of a small tensor over the ranks that have sequences of this batch, the same on all. Collective."""
        return self.everyone.total(part)

    def everywhere(self, figures: torch.Tensor) -> torch.Tensor:
        """[n] -> [N]: a number of each sequence that is here -> those of all, on every rank. Collective."""
        if self.shares is None:
            return figures
        rows = self.everyone.rows(torch.stack([self.own.double(), figures.double()], dim=1))
        result = figures.new_zeros(self.num_sequences)
        result[rows[:, 0].long()] = rows[:, 1].to(figures.dtype)
        return result

    def with_(self, **changes: torch.Tensor | None) -> TrainBatch:
        """A new batch with the named tensors in place of the old ones."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def select(self, indices: Sequence[int]) -> TrainBatch:
        """The sub-batch of the given sequences, in the given order; each of them stays where it is."""
        numbers = torch.as_tensor(list(indices), dtype=torch.int64)
        place = torch.full((self.num_sequences,), -1, dtype=torch.int64)  # among those here, of all N
        place[self.own] = torch.arange(len(self.own))
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
        if self.shares is not None:
            known = {name: getattr(self.shares, name)[numbers] for name in ("lengths", "routed", "home")}
            changes["shares"] = replace(self.shares, own=own, **known)
        changes |= {"group": self.group[numbers], "sequence_reward": self.sequence_reward[numbers]}
        return replace(self, cu_seqlens=starts, **changes)

    def columns(self) -> tuple[str, ...]:
        """Names of the [T] tensors that there are."""
        return tuple(name for name in COLUMNS if getattr(self, name) is not None)


_NO_COLUMNS = ("cu_seqlens", "group", "sequence_reward", "routing", "shares")
COLUMNS = tuple(item.name for item in fields(TrainBatch) if item.name not in _NO_COLUMNS)
"""The [T] tensors of a batch."""


def _records(rollouts: Rollouts) -> tuple[torch.Tensor, ...] | None:
    """Of the rollouts that are here, empty where one has none; None where no rollout has one, here or elsewhere."""
    if not bool((rollouts.routed > 0).any()):
        return None
    found = [rollout.routing for rollout in rollouts.here]
    shapes = {record.shape[1:] for record in found if record is not None}
    if len(shapes) > 1:
        raise ValueError(f"rollouts whose routing has different shapes per token: {sorted(map(tuple, shapes))}")
    for record, rollout in zip(found, rollouts.here, strict=True):
        if record is not None and len(record) > (tokens := rollout.num_tokens):
            raise ValueError(f"a rollout of {tokens} tokens has the routing of {len(record)}")
    (shape,) = shapes or {torch.Size((0, 0))}
    none = torch.zeros((0, *shape), dtype=torch.uint8)
    return tuple(none if record is None else record for record in found)


@dataclass(frozen=True)
class ModelOutput:
    """What a model says of a micro-batch; index t speaks about token t, as at the head of this file. On the device."""

    logprobs: torch.Tensor | None = None  # [T] of the policy
    entropy: torch.Tensor | None = None  # [T] of the distribution that token t was drawn from
    values: torch.Tensor | None = None  # [T] of the critic
    scores: torch.Tensor | None = None  # [T] of a reward model, of each beginning of the sequence


@dataclass(frozen=True)
class TokenLoss:
    """What a loss returns: a number per token, and further numbers per token to be logged.

    The optimizer step minimises sum(loss_weights * loss); each metric is logged as sum(loss_weights * metric).
    The weights are shares of the global mini-batch, so the result does not depend on how it was cut up.
    """

    loss: torch.Tensor  # [T], differentiable
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)  # name -> [T], detached
