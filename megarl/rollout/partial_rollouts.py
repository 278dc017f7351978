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
from megarl.environments.process_sessions import Session
from megarl.types import (
    Branch,
    Failed,
    Ids,
    Message,
    Prompt,
    Reward,
    Rollout,
    Status,
    Support,
    Turn,
    Verdict,
    as_branches,
)

Put = Callable[[npt.NDArray[Any]], int]
"""Keeps an array; what it is found again by."""
Get = Callable[[int], npt.NDArray[Any]]
"""The array that was kept under this number, which can be written to."""


@dataclass(frozen=True)
class Partial:
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
    support: tuple[Support, ...] = ()
    written: int = 0
    whole: bool = False
    taken: int = 0
    tool_calls: int = 0
    tool_errors: int = 0
    drafted: int = 0
    accepted: int = 0
    status: Status | None = None
    failure: str = ""
    verdict: Verdict | None = None
    task: Prompt | None = None
    before: tuple[Partial, ...] = ()
    branch: Branch | None = None
    session: Session | None = field(default=None, compare=False, repr=False)

    @staticmethod
    def begin(prompt: Prompt, seed: int) -> Partial:
        """A conversation of which there is only the prompt, rendered (`token_ids`)."""
        return Partial(prompt, seed, (Turn(prompt.token_ids),), prompt.messages)

    def anew(self) -> Partial:
        """The same from its beginning; what it had is given back."""
        if self.session is not None:
            self.session.end()
        return Partial.begin(self.task or self.prompt, self.seed)

    @property
    def token_ids(self) -> Ids:
        return np.concatenate([turn.token_ids for turn in self.turns])

    @property
    def num_tokens(self) -> int:
        return sum(len(turn.token_ids) for turn in self.turns)

    @property
    def routed(self) -> int:
        """Tokens whose routing is known, from the first on."""
        return sum(map(len, self.routing))

    def supports(self, more: Support | None, tokens: int) -> tuple[Support, ...]:
        """`support` with that of so many tokens that it has chosen since; None of those whose sampling was not cut off,
        as all may have been in an earlier run."""
        if more is None:
            return (*self.support, Support.whole(tokens)) if self.support and tokens else self.support
        chosen = sum(len(turn.token_ids) for turn in self.turns if turn.is_action)
        return (*(self.support or ((Support.whole(chosen),) if chosen else ())), more)

    @property
    def oldest(self) -> int | None:
        """The first version of the weights that has chosen a token of it; None where none has."""
        return min((version for turn in self.turns if turn.is_action for version, _ in turn.runs), default=None)

    def rollouts(self, group: int, sample: int) -> list[Rollout]:
        """What it is where it has ended, as the sample of this number: its branches, one where it has no others. They
        have all ended as the last did."""
        return list(as_branches([one.rollout(group) for one in (*self.before, self)], sample))

    def rollout(self, group: int) -> Rollout:
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
            support=Support.joined(self.support) if self.support else None,
            drafted=self.drafted,
            accepted=self.accepted,
            failure=self.failure,
            verdict=self.verdict,
            branch=self.branch,
        )


def joined(turn: Turn, more: Turn) -> Turn:
    """A turn of the policy with what it has written since. What was cached is of the request that began it."""
    runs: list[tuple[int, int]] = []
    for version, tokens in (*turn.runs, *more.runs):
        before = runs.pop()[1] if runs and runs[-1][0] == version else 0
        runs.append((version, before + tokens))
    return Turn(
        np.concatenate([turn.token_ids, more.token_ids]),
        np.concatenate([turn.logprobs, more.logprobs]),
        is_action=True,
        weight_version=more.weight_version,
        versions=tuple(runs) if len(runs) > 1 else (),
        cached=turn.cached,
    )


def to_record(partial: Partial, put: Put) -> dict[str, Any]:
    """As plain values that JSON can hold (`utils.exact_json` where a prompt's own may be odd), for a checkpoint; its
    arrays, which routing makes large, go through `put`."""
    gone = ("session", "before", "branch")  # no agent's is gone on with
    record = {item.name: getattr(partial, item.name) for item in dataclasses.fields(Partial) if item.name not in gone}
    record["prompt"] = _of_prompt(partial.prompt, put)
    record["task"] = None if partial.task is None else _of_prompt(partial.task, put)
    if isinstance(partial.verdict, Failed):
        record["verdict"] = {"why": partial.verdict.why}
    elif partial.verdict is not None:
        said = partial.verdict
        record["verdict"] = {"reward": said.reward, "parts": dict(said.parts), "turns": list(said.turns)}
    record["turns"] = [
        {
            "token_ids": put(turn.token_ids),
            "logprobs": put(turn.logprobs),
            "is_action": turn.is_action,
            "weight_version": turn.weight_version,
            "versions": turn.versions,
            "cached": turn.cached,
        }
        for turn in partial.turns
    ]
    record["routing"] = [put(part.numpy()) for part in partial.routing]
    record["support"] = [[put(part.counts.numpy()), put(part.ids.numpy())] for part in partial.support]
    return record


def from_record(record: dict[str, Any], get: Get) -> Partial:
    """The conversation that a record was made of. Raises ConfigError where it is no such record."""
    try:
        fields = dict(record)
        if fields["status"] not in (None, *get_args(Status)):
            raise ValueError(f"a rollout does not end as {fields['status']!r}")
        fields["prompt"] = _prompt(fields["prompt"], get)
        fields["task"] = None if fields.get("task") is None else _prompt(fields["task"], get)
        if (said := fields.get("verdict")) is not None:
            fields["verdict"] = _verdict(said)
        fields["messages"] = tuple(fields["messages"])
        fields["turns"] = tuple(
            Turn(
                get(turn["token_ids"]),
                get(turn["logprobs"]),
                bool(turn["is_action"]),
                int(turn["weight_version"]),
                tuple((int(version), int(tokens)) for version, tokens in turn["versions"]),
                cached=int(turn.get("cached", -1)),
            )
            for turn in fields["turns"]
        )
        fields["routing"] = tuple(torch.from_numpy(get(part)) for part in fields["routing"])
        fields["support"] = tuple(
            Support(torch.from_numpy(get(counts)), torch.from_numpy(get(ids))) for counts, ids in fields["support"]
        )
        return Partial(**fields)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"not a recorded conversation: {error!r}") from None


def _of_prompt(prompt: Prompt, put: Put) -> dict[str, Any]:
    record = {item.name: getattr(prompt, item.name) for item in dataclasses.fields(Prompt)}
    return {**record, "token_ids": put(prompt.token_ids)}


def _verdict(record: dict[str, Any]) -> Verdict:
    if "why" in record:
        return Failed(str(record["why"]))
    return Reward(float(record["reward"]), dict(record["parts"]), tuple(record["turns"]))


def _prompt(record: dict[str, Any], get: Get) -> Prompt:
    lists = {name: tuple(record[name]) for name in ("messages", "tools")}
    return Prompt(**{**record, **lists, "token_ids": get(record["token_ids"])})
