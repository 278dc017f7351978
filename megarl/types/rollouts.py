"""Host side: a task, a conversation about it turn by turn, and the statistics of all rollouts on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest
from typing import Any, Literal, get_args

import numpy as np
import torch

from megarl.types.arrays import (
    Ids,
    Logprobs,
    SamplingMask,
    as_read_only,
    as_token_ids,
    concat,
    fields_equal,
    no_ids,
    no_logprobs,
)
from megarl.types.comm import LOCAL, Comm
from megarl.types.episodes import Branch, Episodes, assign_episode_ids
from megarl.types.image_tokens import Image, packed_size
from megarl.types.reward_values import RewardResult

Message = dict[str, Any]
"""A chat message in OpenAI's format: role, content, and tool_calls if any."""

Status = Literal["stop", "length", "max_turns", "aborted"]
"""Why a rollout ended: the policy stopped, ran out of tokens, ran out of turns, or a failure aborted it."""

STATUSES: tuple[Status, ...] = get_args(Status)
"""Indexed by `Rollouts.status`."""


@dataclass(frozen=True, eq=False)
class Prompt:
    """A task from a data set.

    `token_ids` are the rendered chat with the generation prompt, filled in by the loader, in an array that turn 0 of
    all samples shares; `tools` are the names of the tools that the policy may call. `ground_truth` and `extra` are for
    the reward and never reach the policy.
    """

    id: str
    messages: tuple[Message, ...]
    token_ids: Ids = field(default_factory=no_ids)
    data_source: str = ""
    ground_truth: Any = None
    tools: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)
    images: tuple[Image, ...] = ()
    """Images of the messages, in order. The text of the messages has `image_tokens.IMAGE_PLACEHOLDER` for each."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", as_token_ids(self.token_ids))

    def __eq__(self, other: object) -> bool:
        return fields_equal(self, other) if isinstance(other, Prompt) else NotImplemented


@dataclass(frozen=True, eq=False)
class Turn:
    """Consecutive tokens of one author: the prompt, the policy, or a tool.

    `logprobs` has one entry per token for an action and is empty otherwise. `weight_version` is the version of the
    weights that sampled the last token, and all others unless `versions` is set; -1 for tokens that the policy did not
    sample. A turn during which the weights changed stays one turn, because it is one message of the policy.
    """

    token_ids: Ids
    logprobs: Logprobs = field(default_factory=no_logprobs)
    is_action: bool = False
    weight_version: int = -1
    versions: tuple[tuple[int, int], ...] = ()
    """(version, tokens) of consecutive spans if the weights changed during the turn; otherwise empty."""
    reward: float = 0.0
    """Reward of an action turn by itself; a part of the rollout's reward."""
    cached_tokens: int = field(default=-1, compare=False)
    """Tokens before an action turn that the engine had in its prefix cache; -1 if not recorded."""
    images: tuple[Image, ...] = ()
    """Images of a prompt or a tool result, by the start of their tokens, which `token_ids` contains."""

    def __post_init__(self) -> None:
        logprobs = np.asarray(self.logprobs, dtype=np.float32)
        object.__setattr__(self, "token_ids", as_token_ids(self.token_ids))
        object.__setattr__(self, "logprobs", as_read_only(logprobs, self.logprobs))
        if self.is_action and logprobs.shape != self.token_ids.shape:
            raise ValueError(f"an action turn has {len(self.token_ids)} tokens but {logprobs.size} logprobs")
        if not self.is_action and logprobs.size:
            raise ValueError("only an action turn carries logprobs")
        if (self.reward or self.cached_tokens >= 0) and not self.is_action:
            raise ValueError("only an action turn has a reward, and cached tokens")
        if self.images and (self.is_action or self.images[-1].stop > len(self.token_ids)):
            raise ValueError("images are in the tokens of a prompt or of a tool result")
        if self.versions and sum(tokens for _, tokens in self.versions) != len(self.token_ids):
            raise ValueError(f"a turn of {len(self.token_ids)} tokens with versions of others: {self.versions}")
        if self.versions and self.versions[-1][0] != self.weight_version:
            raise ValueError(f"a turn by version {self.weight_version} that ends by another: {self.versions}")

    def __eq__(self, other: object) -> bool:
        return fields_equal(self, other) if isinstance(other, Turn) else NotImplemented

    @property
    def version_spans(self) -> tuple[tuple[int, int], ...]:
        """(version, tokens) of consecutive spans sampled by one version of the weights."""
        return self.versions or ((self.weight_version, len(self.token_ids)),)

    @property
    def token_versions(self) -> Ids:
        """[tokens] version of the weights that sampled each token."""
        versions, tokens = zip(*self.version_spans, strict=True)
        return np.repeat(np.array(versions, np.int32), tokens)


@dataclass(frozen=True)
class Rollout:
    """One conversation: the token ids that the engine saw, turn by turn. Turn 0 is the rendered prompt.

    `group` numbers the prompt within the step: samples of one prompt share it. `messages` is the conversation as text,
    for rewards and readers; training reads only the turns.
    """

    prompt: Prompt
    turns: tuple[Turn, ...]
    status: Status = "stop"
    reward: float = 0.0
    """Total reward, turn rewards included."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    seed: int = 0
    group: int = 0
    messages: tuple[Message, ...] = ()
    tool_calls: int = 0
    tool_errors: int = 0
    routing: torch.Tensor | None = field(default=None, compare=False, repr=False)
    """[recorded tokens, MoE layers, topk]: the experts that processed each of the leading tokens in the engine, in any
    order; uint8 or int16."""
    sparse_indices: torch.Tensor | None = field(default=None, compare=False, repr=False)
    """[recorded tokens, layers with an indexer, topk] int16 or int32: the positions of the keys that each token from
    position topk on attended to in the engine, in any order; see `models.sparse_indices.IndexShape`."""
    sampling_mask: SamplingMask | None = field(default=None, compare=False, repr=False)
    """Sampling masks of the policy's tokens, in order. None if sampling was never truncated."""
    drafted: int = 0
    """Draft tokens proposed to the policy (rollout.num_speculative_tokens)."""
    accepted: int = 0
    """Draft tokens that the policy accepted."""
    failure: str = ""
    """Why the rollout was aborted."""
    env_reward: RewardResult | None = None
    """The environment's part of the reward; None if the environment was not asked."""
    unscored: dict[str, str] = field(default_factory=dict)
    """Failed parts of the reward and the reason of each. If any, `reward` is 0 and meaningless."""
    episode: int = -1
    """Number within the group that the branches of an agent's episode share; -1 for an episode without branches. Status
    and reward are equal on all branches. Each sampled token, call and draft counts in exactly one branch."""
    branch: Branch | None = None
    """Position within an agent's episode, also if it has a single branch; None for all other rollouts."""

    @property
    def token_ids(self) -> Ids:
        """Token ids of all turns in one array, concatenated on each access."""
        return concat([turn.token_ids for turn in self.turns], np.int32)

    @property
    def num_tokens(self) -> int:
        return sum(len(turn.token_ids) for turn in self.turns)

    @property
    def images(self) -> tuple[Image, ...]:
        """Images of all turns, with starts in the whole sequence."""
        return sequence_images(self.turns)

    @property
    def num_actions(self) -> int:
        """Number of tokens that the policy sampled."""
        return sum(len(turn.token_ids) for turn in self.turns if turn.is_action)

    @property
    def version_spans(self) -> tuple[tuple[int, int], ...]:
        """`Turn.version_spans` of all action turns."""
        return tuple(run for turn in self.turns if turn.is_action for run in turn.version_spans)

    @property
    def answer(self) -> str:
        """Text of the policy's last message."""
        for message in reversed(self.messages):
            if message["role"] == "assistant":
                return str(message.get("content") or "")
        return ""


def sequence_images(turns: Sequence[Turn]) -> tuple[Image, ...]:
    """Return the images of consecutive turns, with starts in their joined tokens."""
    images, offset = [], 0
    for turn in turns:
        images += [replace(image, start=image.start + offset) for image in turn.images]
        offset += len(turn.token_ids)
    return tuple(images)


def as_branches(conversations: Sequence[Rollout], episode: int) -> tuple[Rollout, ...]:
    """Turn an agent's conversations, in order, into branches of one episode with the status of the last one.

    Returns a single conversation unchanged.
    """
    if len(conversations) < 2:
        return tuple(conversations)
    status, failure = conversations[-1].status, conversations[-1].failure
    return tuple(replace(rollout, episode=episode, status=status, failure=failure) for rollout in conversations)


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
    "indexed_tokens": lambda rollout: 0 if rollout.sparse_indices is None else len(rollout.sparse_indices),
    "sampling_mask_sizes": lambda rollout: 0 if rollout.sampling_mask is None else len(rollout.sampling_mask.ids),
    "image_bytes": lambda rollout: packed_size(rollout.images),
    "oldest_version": lambda rollout: min((version for version, _ in rollout.version_spans), default=-1),
    "rewarded_turns": lambda rollout: sum(turn.reward != 0 for turn in rollout.turns),
    "unscored": lambda rollout: len(rollout.unscored),
}
"""Integer statistics of a rollout that every rank has, in addition to the reward."""


@dataclass(frozen=True)
class Rollouts:
    """N rollouts in the same order on all ranks: statistics of all of them, and the local rollouts themselves."""

    local: tuple[Rollout, ...]
    local_indices: torch.Tensor  # [n] int64, ascending indices of `local` among the N
    home: torch.Tensor  # [N] int64, the rank that has it
    group: torch.Tensor  # [N] int64, samples of one prompt share a number
    episode: torch.Tensor  # [N] int64, unique over groups; branches of one episode share it
    length: torch.Tensor  # [N] int64 tokens
    prompt_length: torch.Tensor  # [N] int64 tokens
    actions: torch.Tensor  # [N] int64 tokens that the policy sampled
    turns: torch.Tensor  # [N] int64 turns of the policy
    status: torch.Tensor  # [N] int64, index into STATUSES
    tool_calls: torch.Tensor  # [N] int64
    tool_errors: torch.Tensor  # [N] int64
    drafted: torch.Tensor  # [N] int64
    accepted: torch.Tensor  # [N] int64
    routed_tokens: torch.Tensor  # [N] int64 leading tokens with recorded routing
    indexed_tokens: torch.Tensor  # [N] int64 tokens with recorded sparse attention indices
    sampling_mask_sizes: torch.Tensor  # [N] int64 ids in the sampling mask; 0 without one
    image_bytes: torch.Tensor  # [N] int64 bytes of packed images; 0 without any
    oldest_version: torch.Tensor  # [N] int64, oldest version of the weights that sampled a token; -1 without any
    rewarded_turns: torch.Tensor  # [N] int64 turns with a reward of their own
    unscored: torch.Tensor  # [N] int64 failed parts of the reward; above 0 the rollout has no reward
    reward: torch.Tensor  # [N] float64; 0 without a reward
    reward_parts: dict[str, torch.Tensor]  # [N] float64 each; 0 for rollouts without this part
    source: torch.Tensor  # [N] int64, index into `sources`
    sources: tuple[str, ...] = ()  # distinct data_source of the prompts, sorted
    failures: tuple[str, ...] = ()  # of aborted rollouts, unordered, one per episode
    unscored_reasons: tuple[tuple[str, str, str], ...] = ()  # (part, reason, prompt id), unordered, one per episode
    version: int = -1  # current version of the policy's weights; -1 if unknown
    comm: Comm = field(default=LOCAL, compare=False, repr=False)

    @staticmethod
    def gather(
        rollouts: Sequence[Rollout],
        order: Sequence[int] | torch.Tensor | None = None,
        comm: Comm = LOCAL,
        version: int = -1,
        episode: torch.Tensor | None = None,
    ) -> Rollouts:
        """Gather the statistics of all ranks' rollouts. Collective.

        order: sort key of each local rollout; ties are sorted by rank, then by position. None sorts all this way.
        Branches of an episode must be adjacent in the order, and on one rank. episode: [N] episode ids, if known.
        """
        last_branches = _last_branches(rollouts)
        keys = torch.as_tensor([0] * len(rollouts) if order is None else order, dtype=torch.int64)
        local_info = (
            sorted({name for rollout in rollouts for name in rollout.reward_parts}),
            sorted({rollout.prompt.data_source for rollout in rollouts}),
            [rollout.failure or "no reason on record" for rollout in last_branches if rollout.status == "aborted"],
            [(part, why, rollout.prompt.id) for rollout in last_branches for part, why in rollout.unscored.items()],
        )
        part_names, source_names, failures, unscored = zip(*comm.all_gather_objects(local_info), strict=True)
        parts, sources = (sorted(set(chain.from_iterable(names))) for names in (part_names, source_names))
        getters = [*ROLLOUT_STATS.values(), lambda rollout: sources.index(rollout.prompt.data_source)]
        local_stats = [[get(rollout) for get in getters] for rollout in rollouts]
        rewards = [[rollout.reward, *(rollout.reward_parts.get(name, 0.0) for name in parts)] for rollout in rollouts]
        stats = torch.tensor(local_stats, dtype=torch.int64).reshape(len(rollouts), len(getters))
        sort_keys = torch.stack([keys, torch.full_like(keys, comm.rank)], dim=1)
        scores = torch.tensor(rewards, dtype=torch.float64).reshape(len(rollouts), 1 + len(parts))
        # One collective for both: rewards travel as the int64 view of their bits.
        table = comm.all_gather_rows(torch.cat([sort_keys, stats, scores.view(torch.int64)], dim=1))
        table = table[torch.sort(table[:, 0], stable=True).indices]
        columns = {name: table[:, i].contiguous() for i, name in enumerate(("home", *ROLLOUT_STATS, "source"), 1)}
        home, scores = columns["home"], table[:, 2 + len(getters) :].contiguous().view(torch.float64)
        # Stable like the sort of `table`, so both orders agree.
        local_order = torch.sort(keys, stable=True).indices.tolist()
        if episode is None:
            episode = assign_episode_ids(columns["group"], columns["episode"], home=home, status=columns["status"])
        return Rollouts(
            local=tuple(rollouts[i] for i in local_order),
            local_indices=(home == comm.rank).nonzero().squeeze(1),
            **columns | {"episode": episode},
            reward=scores[:, 0].contiguous(),
            reward_parts={name: scores[:, column].contiguous() for column, name in enumerate(parts, 1)},
            sources=tuple(sources),
            failures=tuple(chain.from_iterable(failures)),
            unscored_reasons=tuple(chain.from_iterable(unscored)),
            version=version,
            comm=comm,
        )

    @staticmethod
    def concat(parts: Sequence[Rollouts]) -> Rollouts:
        """Concatenate one or more parts, such as several generations of a step.

        Equal group numbers are taken as the same group; episodes of different parts stay distinct. `version` and `comm`
        are those of the last part.
        """
        last, sizes = parts[-1], [len(part) for part in parts]
        names = sorted({name for part in parts for name in part.reward_parts})
        offsets = np.cumsum([0, *sizes[:-1]]).tolist()
        sources = tuple(sorted({source for part in parts for source in part.sources}))
        source_maps = [torch.tensor([sources.index(source) for source in part.sources] or [0]) for part in parts]
        columns: dict[str, Any] = {
            name: torch.cat([getattr(part, name) for part in parts]) for name in ("home", *ROLLOUT_STATS, "reward")
        }
        episode_offsets = np.cumsum([0, *(max(part.episode.tolist(), default=0) + 1 for part in parts)]).tolist()
        episodes = [part.episode + start for part, start in zip(parts, episode_offsets, strict=False)]
        columns["episode"] = torch.cat(episodes)
        return replace(
            last,
            local=tuple(chain.from_iterable(part.local for part in parts)),
            local_indices=torch.cat([part.local_indices + offset for part, offset in zip(parts, offsets, strict=True)]),
            **columns,
            source=torch.cat([source_map[part.source] for part, source_map in zip(parts, source_maps, strict=True)]),
            sources=sources,
            reward_parts={
                name: torch.cat([part.reward_parts.get(name, torch.zeros_like(part.reward)) for part in parts])
                for name in names
            },
            failures=tuple(chain.from_iterable(part.failures for part in parts)),
            unscored_reasons=tuple(chain.from_iterable(part.unscored_reasons for part in parts)),
        )

    def __len__(self) -> int:
        return len(self.home)

    def replace_local(self, rollouts: Sequence[Rollout]) -> Rollouts:
        """Return a copy with each local rollout replaced by that of `rollouts`. Collective."""
        return Rollouts.gather(rollouts, self.local_indices, self.comm, self.version, self.episode)

    def without_routing(self) -> Rollouts:
        """Return a copy without the records of routing."""
        local = tuple(replace(rollout, routing=None) for rollout in self.local)
        return replace(self, local=local, routed_tokens=torch.zeros_like(self.routed_tokens))

    def with_groups(self, numbers: Mapping[int, int]) -> Rollouts:
        """Return a copy whose groups have new numbers, by old ones."""
        return replace(
            self,
            local=tuple(replace(rollout, group=numbers[rollout.group]) for rollout in self.local),
            group=torch.tensor([numbers[group] for group in self.group.tolist()], dtype=torch.int64),
        )

    @property
    def episodes(self) -> Episodes:
        """The episodes of the N rollouts."""
        return Episodes.from_ids(self.episode)

    def merge_branches(self) -> Rollouts:
        """Return one rollout per episode: the last branch, with the sum of all branches' counts, the prompt length of
        the first and the length of the longest."""
        episodes = self.episodes
        if len(episodes) == len(self):
            return self
        names = ("actions", "turns", "tool_calls", "tool_errors", "drafted", "accepted", "sampling_mask_sizes")
        counts: dict[str, Any] = {name: episodes.sum_branches(getattr(self, name)) for name in names}
        shortest = self.length.new_zeros(len(episodes))
        counts["length"] = shortest.scatter_reduce(0, episodes.episode_ids, self.length, reduce="amax")
        counts["prompt_length"] = self.prompt_length[episodes.first]
        return replace(self.select(episodes.is_last), **counts)

    @property
    def staleness(self) -> torch.Tensor:
        """[N] int64: age in versions of the oldest sampled token; 0 if the current version is unknown."""
        return torch.where(self.oldest_version >= 0, (self.version - self.oldest_version).clamp(min=0), 0)

    def has_status(self, *statuses: Status) -> torch.Tensor:
        """[N] bool: True for rollouts with one of `statuses`."""
        return torch.isin(self.status, torch.tensor([STATUSES.index(status) for status in statuses]))

    def select(self, keep: torch.Tensor) -> Rollouts:
        """Return the rollouts where `keep` ([N] bool) is True, in order."""
        local_keep = keep[self.local_indices]
        columns = {name: getattr(self, name)[keep] for name in ("home", *ROLLOUT_STATS, "source", "reward")}
        return replace(
            self,
            local=tuple(rollout for rollout, is_kept in zip(self.local, local_keep.tolist(), strict=True) if is_kept),
            local_indices=(keep.cumsum(0) - 1)[self.local_indices[local_keep]],
            **columns,
            reward_parts={name: part[keep] for name, part in self.reward_parts.items()},
        )


def _last_branches(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Return the last branch of each episode, and all rollouts without branches."""
    return [
        rollout
        for rollout, following in zip_longest(rollouts, rollouts[1:])
        if following is None
        or rollout.episode < 0
        or (rollout.group, rollout.episode) != (following.group, following.episode)
    ]
