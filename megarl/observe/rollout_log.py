"""Every rollout of a step as a line of JSON, for people and for exact repeats.

    <run>/rollouts/step_000012.jsonl

A line holds everything that a `Rollout` is, so that `read_rollouts` gives back equal values, plus what only readers
need: the text of each turn, and the advantages where there are some.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

import numpy as np

from megarl.config import Config, ConfigError
from megarl.observe import exact_json
from megarl.types import Prompt, Rollout, Status, TrainBatch, Turn

Decode = Callable[[list[int]], str]
Number = TypeVar("Number", int, bool)


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
                own = advantages[start : start + rollout.num_tokens]
            file.write(exact_json.dumps(to_record(rollout, own, decode)) + "\n")
    partial.replace(path)


def read_rollouts(path: str | Path) -> list[Rollout]:
    """The rollouts of a file, equal to those written. Raises ConfigError where the file is missing or damaged."""
    rollouts = []
    for number, record in enumerate(read_records(path), 1):
        try:
            rollouts.append(from_record(record))
        except ConfigError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None
    return rollouts


def check_replay(config: Config) -> None:
    """The recorded run has the rollouts of all steps, in the numbers that this configuration has."""
    folder = Path(config.rollout.replay)
    if not folder.is_dir():
        raise ConfigError(f"rollout.replay={folder}: there is no such run folder")
    if not (folder / "rollouts").is_dir():
        raise ConfigError(f"rollout.replay={folder} has no folder rollouts; name a run with track.rollouts=true")
    first = 1
    if config.run.resume == "auto":  # steps that a checkpoint has behind it are not taken again
        saved = (path.name.removeprefix("step_") for path in Path(config.run.dir, "checkpoints").glob("step_*"))
        first += max((int(number) for number in saved if number.isdecimal()), default=0)
    for step in range(first, config.run.num_rollout + 1):
        file = rollout_file(folder, step)
        if not file.is_file():
            raise ConfigError(
                f"rollout.replay={folder} has no rollouts of step {step} ({file.name}): lower run.num_rollout="
                f"{config.run.num_rollout}, or replay a run of as many steps"
            )
        check_recorded(read_rollouts(file), file, config)


def check_recorded(rollouts: Sequence[Rollout], path: Path, config: Config) -> None:
    """Raise ConfigError where these are not what a step of this configuration would have generated."""
    prompts, samples = config.data.prompts_per_step, config.rollout.samples_per_prompt
    sizes = Counter(rollout.group for rollout in rollouts)
    if len(rollouts) != prompts * samples or set(sizes.values()) != {samples} or set(sizes) != set(range(prompts)):
        raise ConfigError(
            f"{path} holds {len(rollouts)} rollouts of {len(sizes)} prompts, not {samples} of each of {prompts} "
            "(rollout.samples_per_prompt, data.prompts_per_step): it is of another configuration"
        )
    for number, rollout in enumerate(rollouts, 1):
        if not all(np.isfinite(turn.logprobs).all() for turn in rollout.turns):
            raise ConfigError(f"{path}, line {number}: a log-prob is not finite")
        if (length := rollout.num_tokens) > config.rollout.max_context:
            raise ConfigError(
                f"{path}, line {number}: a rollout of {length} tokens, beyond rollout.max_context="
                f"{config.rollout.max_context}: it is of another configuration"
            )


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a file as they were written, with texts and advantages."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read recorded rollouts {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a file of recorded rollouts: {error.reason} at byte {error.start}") from None
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(exact_json.loads(line))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}, line {number}, is not a recorded rollout: {error}") from None
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
        if turn.versions:
            entry["versions"] = turn.versions
        entry["token_ids"] = turn.token_ids.tolist()
        if decode is not None:
            entry["text"] = decode(entry["token_ids"])
        if turn.is_action:
            entry["logprobs"] = turn.logprobs.tolist()
            if advantages is not None:
                entry["advantages"] = list(advantages[position : position + len(turn.token_ids)])
                chosen += entry["advantages"]
        position += len(turn.token_ids)
        turns.append(entry)
    prompt = {item.name: getattr(rollout.prompt, item.name) for item in dataclasses.fields(Prompt)}
    prompt["token_ids"] = rollout.prompt.token_ids.tolist()
    if turns and prompt["token_ids"] == turns[0]["token_ids"]:
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
        turns = tuple(_turn(turn) for turn in record["turns"])
        fields = dict(record["prompt"])
        fields.setdefault("token_ids", turns[0].token_ids)
        fields["messages"] = tuple(fields["messages"])
        fields["tools"] = tuple(fields["tools"])
        if record["status"] not in get_args(Status):
            raise ValueError(f"a rollout does not end as {record['status']!r}")
        if not turns or turns[0].is_action:
            raise ValueError("its first turn is not a prompt")
        return Rollout(
            prompt=Prompt(**fields),
            turns=turns,
            messages=tuple(record["messages"]),
            failure=str(record.get("failure", "")),
            status=record["status"],
            reward=float(record["reward"]),
            reward_parts=dict(record["reward_parts"]),
            seed=_of(record["seed"], int),
            group=_of(record["group"], int),
            tool_calls=_of(record["tool_calls"], int),
            tool_errors=_of(record["tool_errors"], int),
        )
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"not a recorded rollout: {error!r}") from None


def _turn(turn: dict[str, Any]) -> Turn:
    return Turn(
        turn["token_ids"],
        turn.get("logprobs", ()),
        _of(turn["is_action"], bool),
        _of(turn["weight_version"], int),
        tuple((_of(version, int), _of(tokens, int)) for version, tokens in turn.get("versions", ())),
    )


def _of(value: Any, kind: type[Number]) -> Number:
    if type(value) is not kind:
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    return value
