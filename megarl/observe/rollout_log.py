"""Every rollout of a step as a line of JSON, for people and for exact repeats.

    <run>/rollouts/step_000012.jsonl

A line holds everything that a `Rollout` is, so that `read_rollouts` gives back equal values, plus what only readers
need: the text of each turn, and the advantages where there are some.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megarl.config import ConfigError
from megarl.observe import exact_json
from megarl.types import Prompt, Rollout, TrainBatch, Turn

Decode = Callable[[list[int]], str]


def rollout_file(run_dir: str | Path, step: int) -> Path:
    """Where the rollouts of a step lie; steps count from 1."""
    return Path(run_dir) / "rollouts" / f"step_{step:06d}.jsonl"


def write_rollouts(
    path: Path,
    rollouts: Sequence[Rollout],
    batch: TrainBatch | None = None,
    decode: Decode | None = None,
    trained: Sequence[Rollout] | None = None,
) -> None:
    """Write one line per rollout; `batch` must hold those of them that are `trained`, in their order; all by default.
    Raises OSError.

    The file appears under its name when it is whole.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    advantages = None if batch is None or batch.advantages is None else batch.advantages.tolist()
    in_batch = rollouts if trained is None else trained
    starts = {} if batch is None else dict(zip(map(id, in_batch), batch.cu_seqlens.tolist(), strict=False))
    partial = path.with_suffix(".tmp")
    with partial.open("w", encoding="utf-8") as file:
        for rollout in rollouts:
            start, own = starts.get(id(rollout)), None
            if advantages is not None and start is not None:
                own = advantages[start : start + len(rollout.token_ids)]
            file.write(exact_json.dumps(to_record(rollout, own, decode)) + "\n")
    partial.replace(path)


def read_rollouts(path: str | Path) -> list[Rollout]:
    """The rollouts of a file, equal to those written. Raises ConfigError where the file is missing or damaged."""
    return [from_record(record) for record in read_records(path)]


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a file as they were written, with texts and advantages."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read recorded rollouts {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a file of recorded rollouts: it is no text") from None
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(exact_json.loads(line))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is not a file of recorded rollouts: line {number}: {error}") from None
    return records


def to_record(
    rollout: Rollout, advantages: Sequence[float] | None = None, decode: Decode | None = None
) -> dict[str, Any]:
    """A rollout as plain values. `advantages`, one per token of the rollout, are split by turn; their mean over the
    policy's tokens is the record's `advantage`."""
    turns = []
    chosen: list[float] = []
    position = 0
    for turn in rollout.turns:
        entry: dict[str, Any] = {"is_action": turn.is_action, "weight_version": turn.weight_version}
        if decode is not None:
            entry["text"] = decode(list(turn.token_ids))
        entry["token_ids"] = list(turn.token_ids)
        if turn.is_action:
            entry["logprobs"] = list(turn.logprobs)
            if advantages is not None:
                entry["advantages"] = list(advantages[position : position + len(turn.token_ids)])
                chosen += entry["advantages"]
        position += len(turn.token_ids)
        turns.append(entry)
    prompt = {item.name: getattr(rollout.prompt, item.name) for item in dataclasses.fields(Prompt)}
    if rollout.turns and prompt["token_ids"] == rollout.turns[0].token_ids:
        del prompt["token_ids"]  # they stand in turn 0
    return {
        "id": rollout.prompt.id,
        "group": rollout.group,
        "status": rollout.status,
        "reward": rollout.reward,
        "reward_parts": rollout.reward_parts,
        "advantage": sum(chosen) / len(chosen) if chosen else None,
        "tool_calls": rollout.tool_calls,
        "tool_errors": rollout.tool_errors,
        "seed": rollout.seed,
        "messages": list(rollout.messages),
        "turns": turns,
        "prompt": prompt,
        **({"failure": rollout.failure} if rollout.failure else {}),
    }


def from_record(record: dict[str, Any]) -> Rollout:
    """The rollout that a record was made of. Raises ConfigError where it is no such record."""
    try:
        turns = tuple(
            Turn(
                token_ids=tuple(turn["token_ids"]),
                logprobs=tuple(turn.get("logprobs", ())),
                is_action=turn["is_action"],
                weight_version=turn["weight_version"],
            )
            for turn in record["turns"]
        )
        fields = dict(record["prompt"])
        fields["token_ids"] = tuple(fields["token_ids"]) if "token_ids" in fields else turns[0].token_ids
        fields["messages"] = tuple(fields["messages"])
        fields["tools"] = tuple(fields["tools"])
        return Rollout(
            prompt=Prompt(**fields),
            turns=turns,
            messages=tuple(record["messages"]),
            failure=record.get("failure", ""),
            **{
                name: record[name]
                for name in ("status", "reward", "reward_parts", "seed", "group", "tool_calls", "tool_errors")
            },
        )
    except (KeyError, TypeError, IndexError) as error:
        raise ConfigError(f"not a recorded rollout: {error!r}") from None
