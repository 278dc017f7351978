"""Host side: a task, a conversation about it turn by turn, and the figures of many that every rank knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, Literal, get_args

import numpy as np
import torch

from megarl.types.arrays import Ids, Logprobs, as_read_only, as_token_ids, concat, fields_equal, no_ids, no_logprobs
from megarl.types.comm import LOCAL, Comm
from megarl.types.episodes import Branch, Episodes, assign_episode_ids
from megarl.types.reward_values import RewardResult
from megarl.types.sampling_mask import SamplingMask

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
        object.__setattr__(self, "token_ids", as_token_ids(self.token_ids))

    def __eq__(self, other: object) -> bool:
        return fields_equal(self, other) if isinstance(other, Prompt) else NotImplemented


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
    reward: float = 0.0
    """What an action turn itself was found to be worth; it is a part of the rollout's reward."""
    cached_tokens: int = field(default=-1, compare=False)
    """Of all tokens before an action turn, how many the engine had in its cache when it was asked for it; -1 where that
    is not on record. It depends on which request came first, so turns that are alike may differ in it."""

    def __post_init__(self) -> None:
        logprobs = np.asarray(self.logprobs, dtype=np.float32)
        object.__setattr__(self, "token_ids", as_token_ids(self.token_ids))
        object.__setattr__(self, "logprobs", as_read_only(logprobs, self.logprobs))
        if self.is_action and logprobs.shape != self.token_ids.shape:
            raise ValueError(f"an action turn has {len(self.token_ids)} tokens but {logprobs.size} logprobs")
        if not self.is_action and logprobs.size:
            raise ValueError("only an action turn carries logprobs")
        if (self.reward or self.cached_tokens >= 0) and not self.is_action:
            raise ValueError("only an action turn has a reward, and tokens that were cached for it")
        if self.versions and sum(tokens for _, tokens in self.versions) != len(self.token_ids):
            raise ValueError(f"a turn of {len(self.token_ids)} tokens with versions of others: {self.versions}")
        if self.versions and self.versions[-1][0] != self.weight_version:
            raise ValueError(f"a turn by version {self.weight_version} that ends by another: {self.versions}")

    def __eq__(self, other: object) -> bool:
        return fields_equal(self, other) if isinstance(other, Turn) else NotImplemented

    @property
    def version_spans(self) -> tuple[tuple[int, int], ...]:
        """(version, tokens) of one run of tokens after the other that weights of one version chose."""
        return self.versions or ((self.weight_version, len(self.token_ids)),)

    @property
    def token_versions(self) -> Ids:
        """Version of the weights that chose each token."""
        return np.repeat(
            np.array([run[0] for run in self.version_spans], np.int32), [tokens for _, tokens in self.version_spans]
        )


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
    """What all of it is worth, that of its turns included."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    seed: int = 0
    group: int = 0
    messages: tuple[Message, ...] = ()
    tool_calls: int = 0
    tool_errors: int = 0
    routing: torch.Tensor | None = field(default=None, compare=False, repr=False)
    """[known, MoE layers, topk]: the experts that each of the first `known` tokens went through in the engine, in any
    order. uint8 where the model has at most 256 of them, else int16. None where nothing was recorded."""
    sampling_mask: SamplingMask | None = field(default=None, compare=False, repr=False)
    """Of the tokens that the policy chose, one after the other, those that it could have chosen, where sampling was cut
    off; None where it never was."""
    drafted: int = 0
    """Tokens that were drafted for the policy (rollout.draft_tokens)."""
    accepted: int = 0
    """Those of them that it accepted."""
    failure: str = ""
    """Of an aborted rollout, what cut it off."""
    env_reward: RewardResult | None = None
    """What its environment says it is worth, a part of the reward; None where nobody was asked."""
    unscored: dict[str, str] = field(default_factory=dict)
    """Where it has no reward, by the parts of it that failed: why. Its `reward` is 0 then, and means nothing."""
    episode: int = -1
    """Shared by the branches of one episode of an agent, within a group; -1 where the conversation is all of it. How it
    ended and its reward are the same on all of them; tokens that the policy chose, calls and drafts are each counted in
    one, and in the others the tokens are of turns with `is_action` False."""
    branch: Branch | None = None
    """Of an agent's episode, alone or not, which one it is; None of all others."""

    @property
    def token_ids(self) -> Ids:
        """All turns' in one array, made when it is asked for."""
        return concat([turn.token_ids for turn in self.turns], np.int32)

    @property
    def num_tokens(self) -> int:
        return sum(len(turn.token_ids) for turn in self.turns)

    @property
    def num_actions(self) -> int:
        """Tokens that the policy chose."""
        return sum(len(turn.token_ids) for turn in self.turns if turn.is_action)

    @property
    def version_spans(self) -> tuple[tuple[int, int], ...]:
        """(version, tokens) of the tokens that the policy chose, as of a `Turn`."""
        return tuple(run for turn in self.turns if turn.is_action for run in turn.version_spans)

    @property
    def answer(self) -> str:
        """What the policy said last, as text."""
        for message in reversed(self.messages):
            if message["role"] == "assistant":
                return str(message.get("content") or "")
        return ""


def as_branches(conversations: Sequence[Rollout], episode: int) -> tuple[Rollout, ...]:
    """An agent's conversations, in the order in which they came, as branches of one episode, which has ended as the
    last of them has; one conversation as it is."""
    if len(conversations) < 2:
        return tuple(conversations)
    last = conversations[-1]
    return tuple(replace(one, episode=episode, status=last.status, failure=last.failure) for one in conversations)


ROLLOUT_STATS: dict[str, Callable[[Rollout], float]] = {
    "group": lambda rollout: rollout.group,
    "episode": lambda rollout: rollout.episode,
    "length": lambda rollout: rollout.num_tokens,
    "prompt_length": lambda rollout: len(rollout.turns[0].token_ids),
    "actions": lambda rollout: rollout.num_actions,
    "turns": lambda rollout: sum(turn.is_action for turn in rollout.turns),
    "status": lambda rollout: STATUSES.index(rollout.status),
    "tool_calls": lambda rollout: rollout.tool_calls,
    "tool_errors": lambda rollout: rollout.tool_errors,
    "drafted": lambda rollout: rollout.drafted,
    "accepted": lambda rollout: rollout.accepted,
    "routed_tokens": lambda rollout: 0 if rollout.routing is None else len(rollout.routing),
    "sampling_mask_sizes": lambda rollout: 0 if rollout.sampling_mask is None else len(rollout.sampling_mask.ids),
    "oldest_version": lambda rollout: min((version for version, _ in rollout.version_spans), default=-1),
    "rewarded_turns": lambda rollout: sum(turn.reward != 0 for turn in rollout.turns),
    "unscored": lambda rollout: len(rollout.unscored),
}
"""What every rank knows of every rollout, beside its reward: whole numbers."""


@dataclass(frozen=True)
class Rollouts:
    """N rollouts in an order that is the same on all ranks: figures of all of them, and those whose home is here."""

    local: tuple[Rollout, ...]
    local_indices: torch.Tensor  # [n] int64, which of the N those `here` are, ascending
    home: torch.Tensor  # [N] int64, the rank that has it
    group: torch.Tensor  # [N] int64, samples of one prompt share a number
    episode: torch.Tensor  # [N] int64, branches of one episode share a number, which no other rollout has
    length: torch.Tensor  # [N] int64 tokens
    prompt_length: torch.Tensor  # [N] int64 tokens
    actions: torch.Tensor  # [N] int64 tokens that the policy chose
    turns: torch.Tensor  # [N] int64 turns of the policy
    status: torch.Tensor  # [N] int64, place in STATUSES
    tool_calls: torch.Tensor  # [N] int64
    tool_errors: torch.Tensor  # [N] int64
    drafted: torch.Tensor  # [N] int64
    accepted: torch.Tensor  # [N] int64
    routed_tokens: torch.Tensor  # [N] int64 tokens at the beginning whose routing was recorded
    sampling_mask_sizes: (
        torch.Tensor
    )  # [N] int64 ids in the record of what could have been sampled; 0 where nothing was cut off
    oldest_version: torch.Tensor  # [N] int64, first version of the weights that chose a token of it; -1 where none did
    rewarded_turns: torch.Tensor  # [N] int64 turns with a reward of their own
    unscored: torch.Tensor  # [N] int64 parts of its reward that failed; where there is one it has no reward
    reward: torch.Tensor  # [N] float64; 0 where it has none
    reward_parts: dict[str, torch.Tensor]  # [N] float64 each; 0 where a rollout has no such part
    source: torch.Tensor  # [N] int64, place in `sources`
    sources: tuple[str, ...] = ()  # the prompts' data_source, each once, in the order of the alphabet
    failures: tuple[str, ...] = ()  # of the aborted ones, in no order; of an episode one
    unscored_reasons: tuple[
        tuple[str, str, str], ...
    ] = ()  # (part, why, id of the sample) of each that failed, likewise
    version: int = -1  # of the policy's weights as they are now; -1 where nobody said
    comm: Comm = field(default=LOCAL, compare=False, repr=False)

    @staticmethod
    def gather(
        here: Sequence[Rollout],
        order: Sequence[int] | torch.Tensor | None = None,
        everyone: Comm = LOCAL,
        version: int = -1,
        episode: torch.Tensor | None = None,
    ) -> Rollouts:
        """Put together what all ranks have. order: a number for each of those here, by which all of them are ordered;
        equal ones by rank, then as they are given, and so are all where it is None. Branches of an episode must follow
        each other in it, and be on one rank. episode: the figure, where it is known. Collective."""
        ends = _last_branches(here)
        keys = torch.zeros(len(here), dtype=torch.int64) if order is None else torch.as_tensor(order, dtype=torch.int64)
        mine = (
            sorted({name for rollout in here for name in rollout.reward_parts}),
            [rollout.failure or "no reason on record" for rollout in ends if rollout.status == "aborted"],
            sorted({rollout.prompt.data_source for rollout in here}),
            [(part, why, rollout.prompt.id) for rollout in ends for part, why in rollout.unscored.items()],
        )
        said = everyone.all_gather_objects(mine)
        parts = sorted({name for names, *_ in said for name in names})
        sources = sorted({name for _, _, names, _ in said for name in names})
        at_source = {name: number for number, name in enumerate(sources)}
        whole = [
            [*(get(rollout) for get in ROLLOUT_STATS.values()), at_source[rollout.prompt.data_source]]
            for rollout in here
        ]
        rewards = [[rollout.reward, *(rollout.reward_parts.get(name, 0.0) for name in parts)] for rollout in here]
        numbers = torch.tensor(whole, dtype=torch.int64).reshape(len(here), len(ROLLOUT_STATS) + 1)
        marks = torch.stack([keys, torch.full_like(keys, everyone.rank)], dim=1)
        rated = torch.tensor(rewards, dtype=torch.float64).reshape(len(here), 1 + len(parts))
        # One exchange for both: the rewards' bits, as whole numbers.
        table = everyone.all_gather_rows(torch.cat([marks, numbers, rated.view(torch.int64)], dim=1))
        table = table[torch.sort(table[:, 0], stable=True).indices]
        rated = table[:, 3 + len(ROLLOUT_STATS) :].contiguous().view(torch.float64)
        own = (table[:, 1] == everyone.rank).nonzero().squeeze(1)
        at = torch.sort(keys, stable=True).indices.tolist()  # equal keys of one rank are in its own order above, too
        home, figures = (
            table[:, 1].contiguous(),
            {name: table[:, i].contiguous() for i, name in enumerate(ROLLOUT_STATS, 2)},
        )
        if episode is None:
            episode = assign_episode_ids(figures["group"], figures["episode"], home=home, status=figures["status"])
        return Rollouts(
            local=tuple(here[i] for i in at),
            local_indices=own,
            home=home,
            **figures | {"episode": episode},
            reward=rated[:, 0].contiguous(),
            reward_parts={name: rated[:, column].contiguous() for column, name in enumerate(parts, 1)},
            source=table[:, 2 + len(ROLLOUT_STATS)].contiguous(),
            sources=tuple(sources),
            failures=tuple(reason for _, reasons, *_ in said for reason in reasons),
            unscored_reasons=tuple(one for *_, failed in said for one in failed),
            version=version,
            comm=everyone,
        )

    @staticmethod
    def concat(parts: Sequence[Rollouts]) -> Rollouts:
        """One after the other, of several generations of a step; their groups have different numbers, or are meant to
        be the same; their episodes are different ones. There is at least one; version and `everyone` are those of the
        last."""
        last, sizes = parts[-1], [len(part) for part in parts]
        names = sorted({name for part in parts for name in part.reward_parts})
        zeros = [torch.zeros(size, dtype=torch.float64) for size in sizes]
        offsets = np.cumsum([0, *sizes[:-1]]).tolist()
        sources = tuple(sorted({source for part in parts for source in part.sources}))
        places = [torch.tensor([sources.index(source) for source in part.sources] or [0]) for part in parts]
        figures: dict[str, Any] = {
            name: torch.cat([getattr(part, name) for part in parts]) for name in ("home", *ROLLOUT_STATS, "reward")
        }
        further = np.cumsum([0, *(max(part.episode.tolist(), default=0) + 1 for part in parts)]).tolist()
        figures["episode"] = torch.cat([part.episode + first for part, first in zip(parts, further, strict=False)])
        return replace(
            last,
            local=tuple(rollout for part in parts for rollout in part.local),
            local_indices=torch.cat([part.local_indices + offset for part, offset in zip(parts, offsets, strict=True)]),
            **figures,
            source=torch.cat([place[part.source] for part, place in zip(parts, places, strict=True)]),
            sources=sources,
            reward_parts={
                name: torch.cat([part.reward_parts.get(name, none) for part, none in zip(parts, zeros, strict=True)])
                for name in names
            },
            failures=tuple(reason for part in parts for reason in part.failures),
            unscored_reasons=tuple(one for part in parts for one in part.unscored_reasons),
        )

    def __len__(self) -> int:
        return len(self.home)

    def replace_local(self, here: Sequence[Rollout]) -> Rollouts:
        """The same with others in the place of those that are here, one for each. Collective."""
        return Rollouts.gather(here, self.local_indices, self.comm, self.version, self.episode)

    @property
    def episodes(self) -> Episodes:
        """Which of them are branches of one."""
        return Episodes.from_ids(self.episode)

    def merge_branches(self) -> Rollouts:
        """One for each episode: its last branch, with what is counted, such as action tokens, turns and tool calls,
        added up over all branches, the prompt of the first, and the length of the longest."""
        episodes = self.episodes
        if len(episodes) == len(self):
            return self
        names = ("actions", "turns", "tool_calls", "tool_errors", "drafted", "accepted", "sampling_mask_sizes")
        counted: dict[str, Any] = {name: episodes.sum_branches(getattr(self, name)) for name in names}
        longest = self.length.new_zeros(len(episodes)).scatter_reduce(
            0, episodes.episode_ids, self.length, reduce="amax"
        )
        return replace(
            self.select(episodes.is_last),
            **counted,
            prompt_length=self.prompt_length[episodes.first],
            length=longest,
        )

    @property
    def staleness(self) -> torch.Tensor:
        """[N] int64: by how many versions the first of its tokens is older than the weights now; 0 where nobody said
        which they are."""
        return torch.where(self.oldest_version >= 0, (self.version - self.oldest_version).clamp(min=0), 0)

    def has_status(self, *statuses: Status) -> torch.Tensor:
        """[N] bool: which of them ended so."""
        return torch.isin(self.status, torch.tensor([STATUSES.index(status) for status in statuses]))

    def select(self, keep: torch.Tensor) -> Rollouts:
        """Those where `keep`, [N] bool, says so, in their order."""
        kept = keep[self.local_indices]
        figures = {name: getattr(self, name)[keep] for name in ("home", *ROLLOUT_STATS, "source", "reward")}
        return replace(
            self,
            local=tuple(rollout for rollout, stays in zip(self.local, kept.tolist(), strict=True) if stays),
            local_indices=(keep.cumsum(0) - 1)[self.local_indices[kept]],
            **figures,
            reward_parts={name: part[keep] for name, part in self.reward_parts.items()},
        )


def _last_branches(here: Sequence[Rollout]) -> list[Rollout]:
    """The last branch of each episode, of which things are said once, and those that are alone."""
    return [
        one
        for one, after in zip_longest(here, here[1:])
        if after is None or one.episode < 0 or (one.group, one.episode) != (after.group, after.episode)
    ]
