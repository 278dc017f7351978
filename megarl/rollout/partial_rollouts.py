"""A conversation as far as it has come: what is kept of one that is stopped, to go on in a later step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import torch

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

StoreArray = Callable[[npt.NDArray[Any]], int]
"""Keeps an array; what it is found again by."""
LoadArray = Callable[[int], npt.NDArray[Any]]
"""The array that was kept under this number, which can be written to."""


@dataclass(frozen=True)
class PartialRollout:
    """turns, messages, tool_calls ...: as of a `Rollout`. The last turn may be one that the policy has not finished.

    routing, support: as of a `Rollout`, in parts. written: tokens of the policy's turn, which is the last one then; 0
    where it is to begin its turn. whole: that turn is over, and its calls were not answered. taken: the policy's turns
    that are over. status: of a conversation that has ended, None of all others. task: the prompt as the data set has
    it, where an environment has made another of it. before: of an agent's episode that became several sequences, its
    branches before this one, which is the last; branch: which of them this is. session: its tools and environment,
    where it has been begun here; a record is without these three.
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
        """A conversation of which there is only the prompt, rendered (`token_ids`)."""
        return PartialRollout(prompt, seed, (Turn(prompt.token_ids),), prompt.messages)

    def restart(self) -> PartialRollout:
        """The same from its beginning; what it had is given back."""
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
        """Tokens whose routing is known, from the first on."""
        return sum(map(len, self.routing))

    def extend_masks(self, more: SamplingMask | None, tokens: int) -> tuple[SamplingMask, ...]:
        """`support` with that of so many tokens that it has chosen since; None of those whose sampling was not cut off,
        as all may have been in an earlier run."""
        if more is None:
            return (
                (*self.sampling_masks, SamplingMask.unrestricted(tokens))
                if self.sampling_masks and tokens
                else self.sampling_masks
            )
        chosen = sum(len(turn.token_ids) for turn in self.turns if turn.is_action)
        return (*(self.sampling_masks or ((SamplingMask.unrestricted(chosen),) if chosen else ())), more)

    @property
    def oldest_version(self) -> int | None:
        """The first version of the weights that has chosen a token of it; None where none has."""
        return min(
            (version for turn in self.turns if turn.is_action for version, _ in turn.version_spans), default=None
        )

    def to_rollouts(self, group: int, sample: int) -> list[Rollout]:
        """What it is where it has ended, as the sample of this number: its branches, one where it has no others. They
        have all ended as the last did."""
        return list(as_branches([one.to_rollout(group) for one in (*self.earlier_branches, self)], sample))

    def to_rollout(self, group: int) -> Rollout:
        """This sequence, where it has ended."""
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


def merge_turns(turn: Turn, more: Turn) -> Turn:
    """A turn of the policy with what it has written since. What was cached is of the request that began it."""
    runs: list[tuple[int, int]] = []
    for version, tokens in (*turn.version_spans, *more.version_spans):
        before = runs.pop()[1] if runs and runs[-1][0] == version else 0
        runs.append((version, before + tokens))
    return Turn(
        np.concatenate([turn.token_ids, more.token_ids]),
        np.concatenate([turn.logprobs, more.logprobs]),
        is_action=True,
        weight_version=more.weight_version,
        versions=tuple(runs) if len(runs) > 1 else (),
        cached_tokens=turn.cached_tokens,
    )


def to_record(partial: PartialRollout, put: StoreArray) -> dict[str, Any]:
    """As plain values that JSON can hold (`utils.exact_json` where a prompt's own may be odd), for a checkpoint; its
    arrays, which routing makes large, go through `put`."""
    gone = ("session", "earlier_branches", "branch")  # no agent's is gone on with
    record = {
        item.name: getattr(partial, item.name) for item in dataclasses.fields(PartialRollout) if item.name not in gone
    }
    record["prompt"] = _prompt_to_record(partial.prompt, put)
    record["original_prompt"] = None if partial.original_prompt is None else _prompt_to_record(partial.original_prompt, put)
    if isinstance(partial.env_reward, RewardFailure):
        record["env_reward"] = {"why": partial.env_reward.reason}
    elif partial.env_reward is not None:
        said = partial.env_reward
        record["env_reward"] = {"reward": said.reward, "parts": dict(said.parts), "turns": list(said.turns)}
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
    """The conversation that a record was made of. Raises ConfigError where it is no such record."""
    try:
        fields = dict(record)
        if fields["status"] not in (None, *get_args(Status)):
            raise ValueError(f"a rollout does not end as {fields['status']!r}")
        fields["prompt"] = _prompt_from_record(fields["prompt"], get)
        fields["original_prompt"] = None if fields.get("original_prompt") is None else _prompt_from_record(fields["original_prompt"], get)
        if (said := fields.get("env_reward")) is not None:
            fields["env_reward"] = _verdict_from_record(said)
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
            SamplingMask(torch.from_numpy(get(counts)), torch.from_numpy(get(ids))) for counts, ids in fields["sampling_masks"]
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
