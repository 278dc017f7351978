"""Every value that crosses a stage of the loop.

Host side: frozen dataclasses, one per notion (`Prompt`, `Turn`, `Rollout`). Training side: one packed batch
(`TrainBatch`) of `[T]` tensors, T tokens of N sequences laid end to end without padding.

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

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

Message = dict[str, Any]
"""One chat message in the OpenAI form: role, content, and tool_calls where there are some."""

Status = Literal["stop", "length", "max_turns", "aborted"]
"""Why a rollout ended: the policy stopped, ran out of tokens, ran out of turns, or was cut off by a failure."""

Ids = npt.NDArray[np.int32]
"""[tokens] int32, read-only. Where a value takes it, any sequence of whole numbers will do: an array is made of it."""

Logprobs = npt.NDArray[np.float32]
"""[tokens] float32, read-only; made of any sequence of numbers, like `Ids`."""


def ids_of(values: npt.ArrayLike) -> Ids:
    """Token ids as a read-only array, without a copy of one that is such an array already.

    Raises ValueError for what is not a list of whole numbers, each of them from 0 to 2^31 - 1.
    """
    given = np.asarray(values)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise ValueError(f"token ids are a list of whole numbers, not {str(values)[:80]}")
    if given.size and given.min() < 0:
        raise ValueError(f"a token id is negative: {given.min()}")
    if given.size and given.max() > np.iinfo(np.int32).max:
        raise ValueError(f"no token has the id {given.max()}")
    return _read_only(given.astype(np.int32, copy=False), values)


def _read_only(array: npt.NDArray[Any], given: object) -> npt.NDArray[Any]:
    """The array, or a view of it where it is the one that was given, which its owner may go on writing to."""
    if array.flags.writeable:
        array = array.view() if array is given else array
        array.setflags(write=False)
    return array


def _no_ids() -> Ids:
    return ids_of(())


def _no_logprobs() -> Logprobs:
    return np.zeros(0, np.float32)


def _same(left: object, right: object) -> bool:
    """Equality of two values of one class field by field, arrays by what is in them; NaN is like NaN."""
    for item in fields(left):  # type: ignore[arg-type]
        a, b = getattr(left, item.name), getattr(right, item.name)
        if not (np.array_equal(a, b, equal_nan=True) if isinstance(a, np.ndarray) else a == b):
            return False
    return True


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
    token_ids: Ids = field(default_factory=_no_ids)
    data_source: str = ""
    ground_truth: Any = None
    tools: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", ids_of(self.token_ids))

    def __eq__(self, other: object) -> bool:
        return _same(self, other) if isinstance(other, Prompt) else NotImplemented


@dataclass(frozen=True, eq=False)
class Turn:
    """A run of tokens that one party wrote: the prompt, the policy, or a tool.

    `logprobs` has one entry per token for an action and is empty otherwise. `weight_version` is the version of the
    weights that chose the last token, and all others unless `versions` says something else; -1 for tokens that no
    policy chose. A turn during which the weights changed stays one turn: it is one thing that the policy said.
    """

    token_ids: Ids
    logprobs: Logprobs = field(default_factory=_no_logprobs)
    is_action: bool = False
    weight_version: int = -1
    versions: tuple[tuple[int, int], ...] = ()
    """(version, tokens) of one run of tokens after the other, where the weights changed meanwhile; else empty."""

    def __post_init__(self) -> None:
        logprobs = np.asarray(self.logprobs, dtype=np.float32)
        object.__setattr__(self, "token_ids", ids_of(self.token_ids))
        object.__setattr__(self, "logprobs", _read_only(logprobs, self.logprobs))
        if self.is_action and logprobs.shape != self.token_ids.shape:
            raise ValueError(f"an action turn has {len(self.token_ids)} tokens but {logprobs.size} logprobs")
        if not self.is_action and logprobs.size:
            raise ValueError("only an action turn carries logprobs")
        if self.versions and sum(tokens for _, tokens in self.versions) != len(self.token_ids):
            raise ValueError(f"a turn of {len(self.token_ids)} tokens with versions of others: {self.versions}")
        if self.versions and self.versions[-1][0] != self.weight_version:
            raise ValueError(f"a turn by version {self.weight_version} that ends by another: {self.versions}")

    def __eq__(self, other: object) -> bool:
        return _same(self, other) if isinstance(other, Turn) else NotImplemented

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
        return _joined([turn.token_ids for turn in self.turns], np.int32)

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


@dataclass(frozen=True)
class TrainBatch:
    """N sequences packed into `[T]` tensors; see the head of this file for the alignment.

    Every rank holds the whole global batch on the host, so that a controller can compute a global statistic in one
    line; workers take their share of it and gather what they computed. float tensors are fp32.
    """

    tokens: torch.Tensor  # [T] int64
    cu_seqlens: torch.Tensor  # [N + 1] int64, cu_seqlens[i] is where sequence i starts, cu_seqlens[N] == T
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
    routing: torch.Tensor | None = None  # [T, MoE layers, topk] int16, as of `Rollout`; the policy's model replays it

    @staticmethod
    def from_rollouts(rollouts: Sequence[Rollout]) -> TrainBatch:
        """Pack finished rollouts; a rollout without any action token is packed too and has an empty mask."""
        turns = [turn for rollout in rollouts for turn in rollout.turns]
        lengths = [len(turn.token_ids) for turn in turns]
        starts = np.cumsum([0, *(rollout.num_tokens for rollout in rollouts)], dtype=np.int64)
        mask = np.repeat(np.array([turn.is_action for turn in turns], dtype=np.bool_), lengths)
        logprobs = np.zeros(len(mask), dtype=np.float32)
        logprobs[mask] = _joined([turn.logprobs for turn in turns], np.float32)
        return TrainBatch(
            tokens=torch.from_numpy(_joined([turn.token_ids for turn in turns], np.int64)),
            cu_seqlens=torch.from_numpy(starts),
            loss_mask=torch.from_numpy(mask),
            group=torch.tensor([rollout.group for rollout in rollouts], dtype=torch.int64),
            sequence_reward=torch.tensor([rollout.reward for rollout in rollouts], dtype=torch.float32),
            rollout_logprobs=torch.from_numpy(logprobs),
            routing=_packed_routing(rollouts),
        )

    @property
    def lengths(self) -> torch.Tensor:
        """[N] tokens of each sequence."""
        return self.cu_seqlens.diff()

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def positions(self) -> torch.Tensor:
        """[T] index of each token within its sequence."""
        starts = torch.repeat_interleave(self.cu_seqlens[:-1], self.lengths)
        return torch.arange(len(starts), device=starts.device) - starts

    @property
    def sequence_ids(self) -> torch.Tensor:
        """[T] which sequence each token belongs to."""
        numbers = torch.arange(self.num_sequences, device=self.cu_seqlens.device)
        return torch.repeat_interleave(numbers, self.lengths)

    def with_(self, **changes: torch.Tensor | None) -> TrainBatch:
        """A new batch with the named tensors in place of the old ones."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def select(self, indices: Sequence[int]) -> TrainBatch:
        """The sub-batch of the given sequences, in the given order."""
        rows = list(indices)
        where = [torch.arange(int(self.cu_seqlens[i]), int(self.cu_seqlens[i + 1])) for i in rows]
        token_index = torch.cat(where) if where else torch.zeros(0, dtype=torch.int64)
        changes: dict[str, torch.Tensor] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if value is None or item.name == "cu_seqlens":
                continue
            changes[item.name] = value[rows] if item.name in ("group", "sequence_reward") else value[token_index]
        lengths = torch.tensor([len(index) for index in where], dtype=torch.int64)
        changes["cu_seqlens"] = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        return replace(self, **changes)  # type: ignore[arg-type]


def _joined(parts: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """The parts one after the other; there may be none."""
    return np.concatenate(parts, dtype=dtype) if parts else np.zeros(0, dtype)


def _packed_routing(rollouts: Sequence[Rollout]) -> torch.Tensor | None:
    """[T, MoE layers, topk] int16; -1 for tokens whose experts are not known, among others where they are."""
    shapes = {rollout.routing.shape[1:] for rollout in rollouts if rollout.routing is not None}
    if not shapes:
        return None
    if len(shapes) > 1:
        raise ValueError(f"rollouts whose routing has different shapes per token: {sorted(map(tuple, shapes))}")
    (shape,), start = shapes, 0
    packed = torch.full((sum(rollout.num_tokens for rollout in rollouts), *shape), -1, dtype=torch.int16)
    for rollout in rollouts:
        tokens = rollout.num_tokens
        if rollout.routing is not None:
            if len(rollout.routing) > tokens:
                raise ValueError(f"a rollout of {tokens} tokens has the routing of {len(rollout.routing)}")
            packed[start : start + len(rollout.routing)] = rollout.routing
        start += tokens
    return packed


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
