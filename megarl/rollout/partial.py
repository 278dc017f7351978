"""A conversation as far as it has come: what is kept of one that is stopped, to go on in a later step."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import torch

from megarl.config import ConfigError
from megarl.types import Message, Prompt, Rollout, Status, Turn


@dataclass(frozen=True)
class Partial:
    """turns: as of `Rollout`. What the policy wrote in one turn by several versions of the weights are several action
    turns, next to each other, one for each version.

    routing: parts, next to each other, [tokens, MoE layers, topk] each, of the tokens from the first on.
    written: tokens of the policy's last turn, which stand at the end; 0 where it is the policy's turn and it has
    written nothing yet. whole: that turn is over, and its calls were not answered. taken: the policy's turns that are
    over. status: of one that has ended, while others of its group have not; then only `rollout` is left to do.
    """

    prompt: Prompt
    seed: int
    turns: tuple[Turn, ...]
    messages: tuple[Message, ...]
    routing: tuple[torch.Tensor, ...] = ()
    written: int = 0
    whole: bool = False
    taken: int = 0
    tool_calls: int = 0
    tool_errors: int = 0
    drafted: int = 0
    accepted: int = 0
    status: Status | None = None
    failure: str = ""

    @staticmethod
    def begin(prompt: Prompt, seed: int) -> Partial:
        """A conversation of which there is only the prompt, rendered (`token_ids`)."""
        return Partial(prompt, seed, (Turn(prompt.token_ids),), prompt.messages)

    @property
    def token_ids(self) -> list[int]:
        return [token for turn in self.turns for token in turn.token_ids]

    @property
    def routed(self) -> int:
        """Tokens whose routing is known, from the first on."""
        return sum(map(len, self.routing))

    @property
    def oldest(self) -> int | None:
        """The first version of the weights that has chosen a token of it; None where none has."""
        return min((turn.weight_version for turn in self.turns if turn.is_action), default=None)

    def rollout(self, group: int) -> Rollout:
        """What it is where it has ended."""
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
            routing=_completed(self.routing, len(self.token_ids)),
            drafted=self.drafted,
            accepted=self.accepted,
            failure=self.failure,
        )


def _completed(parts: Sequence[torch.Tensor], tokens: int) -> torch.Tensor | None:
    """[tokens, MoE layers, topk]: the parts, and -1 for the tokens at the end that no request has run."""
    if not parts:
        return None
    known = torch.cat(list(parts))
    return torch.cat([known, known.new_full((tokens - len(known), *known.shape[1:]), -1)])


def to_record(partial: Partial) -> dict[str, Any]:
    """As plain values that JSON can hold (`observe.exact_json` where a prompt's own may be odd), for a checkpoint."""
    record = {item.name: getattr(partial, item.name) for item in dataclasses.fields(Partial)}
    record["prompt"] = {item.name: getattr(partial.prompt, item.name) for item in dataclasses.fields(Prompt)}
    record["turns"] = [
        {
            "token_ids": _packed(np.asarray(turn.token_ids, dtype=np.int32)),
            "logprobs": _packed(np.asarray(turn.logprobs, dtype=np.float64)),
            "is_action": turn.is_action,
            "weight_version": turn.weight_version,
        }
        for turn in partial.turns
    ]
    record["routing"] = [_packed(part.numpy()) for part in partial.routing]
    return record


def from_record(record: dict[str, Any]) -> Partial:
    """The conversation that a record was made of. Raises ConfigError where it is no such record."""
    try:
        fields = dict(record)
        prompt = dict(fields["prompt"])
        for name in ("messages", "token_ids", "tools"):
            prompt[name] = tuple(prompt[name])
        if fields["status"] not in (None, *get_args(Status)):
            raise ValueError(f"a rollout does not end as {fields['status']!r}")
        fields["prompt"] = Prompt(**prompt)
        fields["messages"] = tuple(fields["messages"])
        fields["turns"] = tuple(
            Turn(
                tuple(_unpacked(turn["token_ids"]).tolist()),
                tuple(_unpacked(turn["logprobs"]).tolist()),
                bool(turn["is_action"]),
                int(turn["weight_version"]),
            )
            for turn in fields["turns"]
        )
        fields["routing"] = tuple(torch.from_numpy(_unpacked(part)) for part in fields["routing"])
        return Partial(**fields)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"not a recorded conversation: {error!r}") from None


def _packed(array: np.ndarray) -> dict[str, Any]:
    text = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"dtype": str(array.dtype), "shape": list(array.shape), "base64": text}


def _unpacked(record: dict[str, Any]) -> np.ndarray:
    """An array of its own, which can be written to."""
    values = np.frombuffer(base64.b64decode(record["base64"], validate=True), dtype=np.dtype(record["dtype"]))
    return values.reshape(record["shape"]).copy()
