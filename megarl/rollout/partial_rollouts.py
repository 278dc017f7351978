"""The state of a conversation, and the file in a checkpoint of those that outlast a step."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path

import numpy as np
import torch

from megarl.checkpoint.manifest import Entry, HashingFile, write_hashed
from megarl.config import ConfigError
from megarl.engine.engine_protocol import NOT_RECORDED, Generation, RecordedPrefix, num_recorded
from megarl.environments.process_sessions import EnvironmentSession
from megarl.parallel.encoding import decode, encode
from megarl.types import Branch, Ids, Message, Prompt, RewardResult, Rollout, SamplingMask, Status, Turn, as_branches


@dataclass(frozen=True)
class PartialRollout:
    """A conversation in progress or finished.

    `turns`, `messages`, `tool_calls`, `routing`, `sampling_masks` and so on are as in `Rollout`, with the last two in
    parts. The last turn may be one that the policy has not finished.

    Attributes:
        num_turn_tokens: tokens so far of the policy's current turn, which is then the last turn; 0 if it has not
            started
        is_turn_complete: the current turn is finished, but its calls are not answered
        num_turns: finished turns of the policy
        status: None until the conversation has ended
        original_prompt: the prompt as in the dataset, if an environment replaced it
        earlier_branches: for an agent's episode of several sequences, the branches before this one, which is the last
        branch: which branch of the episode this is
        session: tools and environment of the conversation, if it started in this process
    """

    prompt: Prompt
    seed: int
    turns: tuple[Turn, ...]
    messages: tuple[Message, ...]
    routing: tuple[torch.Tensor, ...] = ()
    sparse_indices: tuple[torch.Tensor, ...] = ()
    sampling_masks: tuple[SamplingMask, ...] = ()
    num_turn_tokens: int = 0
    is_turn_complete: bool = False
    num_turns: int = 0
    tool_calls: int = 0
    tool_errors: int = 0
    drafted: int = 0
    accepted: int = 0
    status: Status | None = None
    failure: str = ""
    env_reward: RewardResult | None = None
    original_prompt: Prompt | None = None
    earlier_branches: tuple[PartialRollout, ...] = ()
    branch: Branch | None = None
    session: EnvironmentSession | None = field(default=None, compare=False, repr=False)

    @staticmethod
    def begin(prompt: Prompt, seed: int) -> PartialRollout:
        """Start a conversation from a rendered prompt (with `token_ids`)."""
        return PartialRollout(prompt, seed, (Turn(prompt.token_ids, images=prompt.images),), prompt.messages)

    def close(self) -> PartialRollout:
        """Close its session, if any, and return it without."""
        if self.session is not None:
            self.session.close()
        return replace(self, session=None)

    def restart(self) -> PartialRollout:
        """Close its session and start again from the original prompt."""
        self.close()
        return PartialRollout.begin(self.original_prompt or self.prompt, self.seed)

    @property
    def token_ids(self) -> Ids:
        return np.concatenate([turn.token_ids for turn in self.turns])

    @property
    def num_tokens(self) -> int:
        return sum(len(turn.token_ids) for turn in self.turns)

    @property
    def recorded(self) -> RecordedPrefix:
        """The leading tokens with known routing or sparse attention indices, which the newest request has read."""
        known = 0
        for routing, indices in zip_longest(self.routing, self.sparse_indices):
            known = num_recorded(known, routing, indices)
        versions = [turn.weight_version for turn in self.turns if turn.is_action]
        return RecordedPrefix(known, versions[-1]) if versions else NOT_RECORDED

    def extend_record(self, more: Generation) -> PartialRollout:
        """Return the conversation with the record of a response: appended, or in place of a record by older weights."""
        if not more.has_record:
            return self
        routing, indices = (self.routing, self.sparse_indices) if more.record_start else ((), ())
        return replace(
            self,
            routing=routing if more.routing is None else (*routing, more.routing),
            sparse_indices=indices if more.sparse_indices is None else (*indices, more.sparse_indices),
        )

    def extend_masks(self, more: SamplingMask | None, tokens: int) -> tuple[SamplingMask, ...]:
        """Return `sampling_masks` extended by the masks of `tokens` newly sampled tokens.

        `more` is None if they were sampled without truncation, as an earlier run may have done for all tokens.
        """
        if more is None:
            if not self.sampling_masks or not tokens:
                return self.sampling_masks
            more = SamplingMask.unrestricted(tokens)
        num_sampled = sum(len(turn.token_ids) for turn in self.turns if turn.is_action)
        earlier = self.sampling_masks or ((SamplingMask.unrestricted(num_sampled),) if num_sampled else ())
        return (*earlier, more)

    @property
    def oldest_version(self) -> float:
        """Oldest weight version that sampled one of its tokens; infinity if there is none."""
        return min(oldest_version(branch.turns) for branch in (*self.earlier_branches, self))

    def to_rollouts(self, group: int, sample: int) -> list[Rollout]:
        """Convert a finished conversation to rollouts, one per branch, which all have the status of the last."""
        return list(as_branches([branch.to_rollout(group) for branch in (*self.earlier_branches, self)], sample))

    def to_rollout(self, group: int) -> Rollout:
        """Convert this finished sequence. Raises ValueError if it has not ended."""
        if self.status is None:
            raise ValueError("the conversation has not ended")
        return Rollout(
            prompt=self.prompt,
            turns=self.turns,
            status=self.status,
            seed=self.seed,
            group=group,
            messages=self.messages,
            tool_calls=self.tool_calls,
            tool_errors=self.tool_errors,
            routing=torch.cat(self.routing) if self.routing else None,
            sparse_indices=torch.cat(self.sparse_indices) if self.sparse_indices else None,
            sampling_mask=SamplingMask.concat(self.sampling_masks) if self.sampling_masks else None,
            drafted=self.drafted,
            accepted=self.accepted,
            failure=self.failure,
            env_reward=self.env_reward,
            branch=self.branch,
        )


Group = tuple[PartialRollout, ...]
"""All conversations of one prompt, ordered by sample."""


def oldest_version(turns: Sequence[Turn]) -> float:
    """Return the oldest weight version that sampled a token of these turns; infinity if there is none."""
    versions = (version for turn in turns if turn.is_action for version, _ in turn.version_spans)
    return min(versions, default=float("inf"))


def merge_turns(turn: Turn, more: Turn) -> Turn:
    """Concatenate two parts of a policy turn. `cached_tokens` is that of the request that sampled its first token."""
    spans: list[tuple[int, int]] = []
    for version, tokens in (*turn.version_spans, *more.version_spans):
        if tokens:
            previous_tokens = spans.pop()[1] if spans and spans[-1][0] == version else 0
            spans.append((version, previous_tokens + tokens))
    return Turn(
        np.concatenate([turn.token_ids, more.token_ids]),
        np.concatenate([turn.logprobs, more.logprobs]),
        is_action=True,
        weight_version=spans[-1][0] if spans else more.weight_version,
        versions=tuple(spans) if len(spans) > 1 else (),
        cached_tokens=turn.cached_tokens if len(turn.token_ids) else more.cached_tokens,
    )


def write_groups(file: Path, groups: Sequence[Group]) -> Entry:
    """Write groups to a file without their sessions: their number, then each group after its size (8 bytes each).

    Encodes one group at a time, because routing makes groups large. Raises OSError if the file system fails.
    """

    def write(stream: HashingFile) -> None:
        stream.write(len(groups).to_bytes(8, "little"))
        for group in groups:
            content = encode(tuple(replace(partial, session=None) for partial in group))
            stream.write(len(content).to_bytes(8, "little"))
            stream.write(content)

    file.parent.mkdir(parents=True, exist_ok=True)
    return write_hashed(file, write)[1]


def read_groups(file: Path) -> list[Group]:
    """Read groups from a file. Raises ConfigError if it is not in this format."""
    groups: list[Group] = []
    try:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            start = 8
            for _ in range(int.from_bytes(content[:8], "little")):
                stop = start + 8 + int.from_bytes(content[start : start + 8], "little")
                group = decode(content[start + 8 : stop])
                if not all(isinstance(partial, PartialRollout) for partial in group):
                    raise ValueError("it holds other values")
                groups.append(group)
                start = stop
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{file} does not hold conversations of this program: {error}") from None
    return groups


def assign_groups(files: Sequence[Path], engine: int, num_engines: int) -> list[Group]:
    """Return the groups that an engine continues: its previous ones, or its share if the number of engines has changed.

    `files` belong to the previous engines, in order.
    """
    if len(files) == num_engines:
        return read_groups(files[engine])
    local_groups: list[Group] = []
    num_seen = 0
    for file in files:
        groups = read_groups(file)
        local_groups += groups[(engine - num_seen) % num_engines :: num_engines]
        num_seen += len(groups)
    return local_groups
