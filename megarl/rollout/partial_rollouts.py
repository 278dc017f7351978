"""The state of a conversation, which can be halted and continued in a later step, and its file in a checkpoint.

A file has one engine's partial rollouts: a line of JSON followed by the arrays it numbers, in their in-memory format.
Arrays are streamed, because routing creates them too large for a second copy in memory, and arrays shared by samples of
a prompt are written once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import torch

from megarl.checkpoint.manifest import Entry, HashingFile, write_hashed
from megarl.config import ConfigError
from megarl.environments.process_sessions import EnvironmentSession
from megarl.types import (
    Branch,
    Ids,
    Message,
    Prompt,
    Reward,
    RewardFailure,
    RewardResult,
    Rollout,
    SamplingMask,
    Status,
    Turn,
    as_branches,
)
from megarl.utils import exact_json

StoreArray = Callable[[npt.NDArray[Any]], int]
"""Stores an array and returns the index to load it by."""
LoadArray = Callable[[int], npt.NDArray[Any]]
"""Returns a writable array stored under this index."""


@dataclass(frozen=True)
class PartialRollout:
    """A conversation in progress or finished.

    `turns`, `messages`, `tool_calls`, `routing`, `sampling_masks` and so on are as in `Rollout`, with the last two in
    parts. The last turn may be one that the policy has not finished. Records omit `session`, `earlier_branches` and
    `branch`.

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
        return PartialRollout(prompt, seed, (Turn(prompt.token_ids),), prompt.messages)

    def restart(self) -> PartialRollout:
        """Close its session and start again from the original prompt."""
        if self.session is not None:
            self.session.close()
        return PartialRollout.begin(self.original_prompt or self.prompt, self.seed)

    @property
    def token_ids(self) -> Ids:
        return np.concatenate([turn.token_ids for turn in self.turns])

    @property
    def num_tokens(self) -> int:
        return sum(len(turn.token_ids) for turn in self.turns)

    @property
    def num_routed(self) -> int:
        """Number of leading tokens with known routing."""
        return sum(map(len, self.routing))

    def extend_masks(self, more: SamplingMask | None, tokens: int) -> tuple[SamplingMask, ...]:
        """Return `sampling_masks` extended by the masks of `tokens` newly sampled tokens.

        `more` is None if they were sampled without truncation, as an earlier run may have done for all tokens.
        """
        if more is None:
            return (
                (*self.sampling_masks, SamplingMask.unrestricted(tokens))
                if self.sampling_masks and tokens
                else self.sampling_masks
            )
        num_sampled = sum(len(turn.token_ids) for turn in self.turns if turn.is_action)
        return (*(self.sampling_masks or ((SamplingMask.unrestricted(num_sampled),) if num_sampled else ())), more)

    @property
    def oldest_version(self) -> int | None:
        """Oldest weight version that sampled one of its tokens; None if there is none."""
        return min(
            (version for turn in self.turns if turn.is_action for version, _ in turn.version_spans), default=None
        )

    def to_rollouts(self, group: int, sample: int) -> list[Rollout]:
        """Convert a finished conversation to rollouts of this sample, one per branch.

        All branches share the status of the last.
        """
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
            sampling_mask=SamplingMask.concat(self.sampling_masks) if self.sampling_masks else None,
            drafted=self.drafted,
            accepted=self.accepted,
            failure=self.failure,
            env_reward=self.env_reward,
            branch=self.branch,
        )


Group = tuple[PartialRollout, ...]
"""All conversations of one prompt, ordered by sample."""


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


def to_record(partial: PartialRollout, put: StoreArray) -> dict[str, Any]:
    """Convert to plain JSON-compatible values for a checkpoint.

    Arrays, which routing makes large, are stored through `put`. Encode with `utils.exact_json`, since a prompt may hold
    unusual values.
    """
    omitted = ("session", "earlier_branches", "branch")  # agents' conversations are never continued
    record = {
        item.name: getattr(partial, item.name)
        for item in dataclasses.fields(PartialRollout)
        if item.name not in omitted
    }
    record["prompt"] = _prompt_to_record(partial.prompt, put)
    record["original_prompt"] = (
        None if partial.original_prompt is None else _prompt_to_record(partial.original_prompt, put)
    )
    if isinstance(partial.env_reward, RewardFailure):
        record["env_reward"] = {"why": partial.env_reward.reason}
    elif partial.env_reward is not None:
        reward = partial.env_reward
        record["env_reward"] = {"reward": reward.reward, "parts": dict(reward.parts), "turns": list(reward.turns)}
    record["turns"] = [
        {
            "token_ids": put(turn.token_ids),
            "logprobs": put(turn.logprobs),
            "is_action": turn.is_action,
            "weight_version": turn.weight_version,
            "versions": turn.versions,
            "cached": turn.cached_tokens,
        }
        for turn in partial.turns
    ]
    record["routing"] = [put(part.numpy()) for part in partial.routing]
    record["sampling_masks"] = [[put(part.counts.numpy()), put(part.ids.numpy())] for part in partial.sampling_masks]
    return record


def from_record(record: dict[str, Any], get: LoadArray) -> PartialRollout:
    """Restore a conversation from its record. Raises ConfigError for an invalid record."""
    try:
        fields = dict(record)
        if fields["status"] not in (None, *get_args(Status)):
            raise ValueError(f"a rollout does not end as {fields['status']!r}")
        fields["prompt"] = _prompt_from_record(fields["prompt"], get)
        fields["original_prompt"] = (
            None if fields.get("original_prompt") is None else _prompt_from_record(fields["original_prompt"], get)
        )
        if (reward := fields.get("env_reward")) is not None:
            fields["env_reward"] = _verdict_from_record(reward)
        fields["messages"] = tuple(fields["messages"])
        fields["turns"] = tuple(
            Turn(
                get(turn["token_ids"]),
                get(turn["logprobs"]),
                bool(turn["is_action"]),
                int(turn["weight_version"]),
                tuple((int(version), int(tokens)) for version, tokens in turn["versions"]),
                cached_tokens=int(turn.get("cached", -1)),
            )
            for turn in fields["turns"]
        )
        fields["routing"] = tuple(torch.from_numpy(get(part)) for part in fields["routing"])
        fields["sampling_masks"] = tuple(
            SamplingMask(torch.from_numpy(get(counts)), torch.from_numpy(get(ids)))
            for counts, ids in fields["sampling_masks"]
        )
        return PartialRollout(**fields)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"not a recorded conversation: {error!r}") from None


def _prompt_to_record(prompt: Prompt, put: StoreArray) -> dict[str, Any]:
    record = {item.name: getattr(prompt, item.name) for item in dataclasses.fields(Prompt)}
    return {**record, "token_ids": put(prompt.token_ids)}


def _verdict_from_record(record: dict[str, Any]) -> RewardResult:
    if "why" in record:
        return RewardFailure(str(record["why"]))
    return Reward(float(record["reward"]), dict(record["parts"]), tuple(record["turns"]))


def _prompt_from_record(record: dict[str, Any], get: LoadArray) -> Prompt:
    lists = {name: tuple(record[name]) for name in ("messages", "tools")}
    return Prompt(**{**record, **lists, "token_ids": get(record["token_ids"])})


def write_groups(file: Path, groups: Sequence[Group]) -> Entry:
    """Write the groups to a file. Raises OSError if the file system fails."""
    arrays: list[npt.NDArray[Any]] = []
    index_by_id: dict[int, int] = {}

    def put(array: npt.NDArray[Any]) -> int:
        if id(array) not in index_by_id:
            index_by_id[id(array)] = len(arrays)
            arrays.append(array)
        return index_by_id[id(array)]

    def write(stream: HashingFile) -> None:
        records = [[to_record(partial, put) for partial in group] for group in groups]
        shapes = [[str(array.dtype), array.shape] for array in arrays]
        stream.write(exact_json.dumps({"groups": records, "arrays": shapes}).encode() + b"\n")
        for array in arrays:
            stream.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    file.parent.mkdir(parents=True, exist_ok=True)
    return write_hashed(file, write)[1]


def read_groups(file: Path) -> list[Group]:
    """Read groups from a file. Raises ConfigError if it is not in this format."""
    try:
        with file.open("rb") as stream:
            tree = exact_json.loads(stream.readline().decode())
            arrays = [_read_array(stream, dtype, shape) for dtype, shape in tree["arrays"]]
        return [tuple(from_record(record, arrays.__getitem__) for record in group) for group in tree["groups"]]
    except (OSError, ValueError, LookupError, TypeError, ConfigError) as error:
        raise ConfigError(f"{file} does not hold conversations of this program: {error}") from None


def assign_groups(files: Sequence[Path], engine: int, num_engines: int) -> list[Group]:
    """Return the groups that an engine continues.

    If the number of engines is unchanged, each engine gets its previous groups; otherwise groups are dealt out
    round-robin. `files` belong to the previous engines, in order.
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


def _read_array(stream: Any, dtype: str, shape: list[int]) -> npt.NDArray[Any]:
    count = int(np.prod(shape, dtype=np.int64))
    values = np.fromfile(stream, np.dtype(dtype), count)
    if len(values) != count:
        raise ValueError("it is truncated")
    return values.reshape(shape)
