"""Every rollout of a step on disk, for people and for exact repeats.

    <run>/rollouts/step_000012/rank_00003.parquet

Each rank writes the rollouts that it has, in the background; `rollout_table` says what is in a file. A step is whole
when its files together have as many rollouts as each of them says that the step has.
"""

from __future__ import annotations

import math
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megarl.config import Config, ConfigError, load_config
from megarl.observe.rollout_table import FORMAT, REPEATED, SCHEMA, Record, check_turns, rows, to_batch, to_record
from megarl.types import Rollout

SHARE = 1 << 20
"""Tokens from which on a row group is full: what is held in two forms at once while it is written."""

_NAME = re.compile(r"rank_(\d{5,9})\.parquet")
"""Of a file, with the number of the rank."""
_LIGHT = ("number", "group", "episode", "status", "logprob", "turn_lengths", "turn_is_action", "turn_weight_version")
"""Columns that say whether a step fits a configuration; about a thousandth of the file."""


def step_folder(run_dir: str | Path, step: int) -> Path:
    """Where the rollouts of a step lie; steps count from 1."""
    return Path(run_dir) / "rollouts" / f"step_{step:06d}"


def part_file(run_dir: str | Path, step: int, rank: int) -> Path:
    """Where a rank writes its share of them."""
    return step_folder(run_dir, step) / f"rank_{rank:05d}.parquet"


def recorded_steps(run_dir: str | Path) -> list[int]:
    """Steps that have a folder, ascending; the last may still be written."""
    names = (re.fullmatch(r"step_(\d{6,12})", path.name) for path in Path(run_dir, "rollouts").glob("step_*"))
    return sorted(int(name[1]) for name in names if name)


def remove_after(run_dir: str | Path, step: int) -> None:
    """Remove what is recorded of the steps after this one, which are to be taken again, maybe by another number of
    ranks. Raises OSError."""
    for later in recorded_steps(run_dir):
        if later > step:
            shutil.rmtree(step_folder(run_dir, later))


# --- writing --------------------------------------------------------------------------------------------------


class RolloutLog:
    """Writes this rank's rollouts on one thread of its own, beside training.

    warn: called by `write`, `settle` and `close`, on their thread, with what is to be said where an earlier step could
    not be written. Nothing is raised for that, and no more is said of later ones.
    """

    def __init__(self, run_dir: str | Path, rank: int, warn: Callable[[str], None]) -> None:
        self._run_dir = run_dir
        self._rank = rank
        self._warn = warn
        self._warned = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollout-log")
        self._under_way: Future[None] | None = None

    def write(
        self,
        step: int,
        total: int,
        numbers: Sequence[int],
        rollouts: Sequence[Rollout],
        advantages: Sequence[np.ndarray | None] | None = None,
    ) -> None:
        """Hand over this rank's rollouts of a step; `numbers` says which they are of its `total`. Once per step.

        advantages: [tokens] float32 of each, None for one that was not trained on. What is handed over must not be
        changed later. Waits until the step before is on disk, so that never more than one is held for that.
        """
        self.settle()
        if rollouts:
            given = [None] * len(rollouts) if advantages is None else list(advantages)
            file = part_file(self._run_dir, step, self._rank)
            self._under_way = self._thread.submit(write_part, file, step, total, numbers, rollouts, given)

    def settle(self) -> None:
        """Wait until all that was handed over is on disk."""
        if self._under_way is None:
            return
        error = self._under_way.exception()
        self._under_way = None
        if error is not None and not self._warned:
            self._warned = True
            what = " ".join(str(error).split()) or type(error).__name__
            self._warn(f"could not record rollouts: {what}; training goes on without them")

    def settling(self) -> Callable[[], None]:
        """What waits for that in another thread, and not for what is handed over later."""
        under_way = [] if self._under_way is None else [self._under_way]

        def settle() -> None:
            wait(under_way)  # whether it could be written is said by `write`

        return settle

    def close(self) -> None:
        self.settle()
        self._thread.shutdown()


def write_part(
    file: Path,
    step: int,
    total: int,
    numbers: Sequence[int],
    rollouts: Sequence[Rollout],
    advantages: Sequence[np.ndarray | None] | None = None,
) -> None:
    """Write some of a step's `total` rollouts, as `RolloutLog.write` is given them; the file appears under its name
    when it is whole. Raises OSError, and ValueError or OverflowError for values that the columns cannot hold."""
    about = {"megarl.format": FORMAT, "megarl.step": step, "megarl.total": total}
    schema = SCHEMA.with_metadata({name: str(value) for name, value in about.items()})
    own = [None] * len(rollouts) if advantages is None else advantages
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}")  # readers of whole folders leave out what begins with a dot
    try:
        with pq.ParquetWriter(
            partial, schema, compression="zstd", use_dictionary=REPEATED, write_page_checksum=True
        ) as writer:
            for first, end in _shares(rollouts):
                part = slice(first, end)
                writer.write_batch(to_batch(numbers[part], rollouts[part], own[part]))
        partial.replace(file)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _shares(rollouts: Sequence[Rollout]) -> Iterator[tuple[int, int]]:
    first = tokens = 0
    for end, rollout in enumerate(rollouts, 1):
        tokens += sum(len(turn.token_ids) for turn in rollout.turns)
        if tokens >= SHARE or end == len(rollouts):
            yield first, end
            first, tokens = end, 0


# --- reading --------------------------------------------------------------------------------------------------


def read_rollouts(run_dir: str | Path, step: int, rank: int = 0, world: int = 1) -> list[Rollout]:
    """The rollouts of a step in their order, equal to those written but for routing; where this is one of several ranks
    those that it had, or in a larger world had a rank that it stands for. Raises ConfigError where some of the step are
    missing, or a file is damaged or of another format."""
    return [record.rollout for record in read_records(run_dir, step, rank, world)]


def read_records(run_dir: str | Path, step: int, rank: int = 0, world: int = 1) -> list[Record]:
    """As `read_rollouts`, with numbers and advantages."""
    records = []
    for file, part in _parts(run_dir, step):
        if int(_NAME.fullmatch(file.name)[1]) % world != rank:  # type: ignore[index]
            continue
        for number, row in enumerate(_rows(file, part)):
            try:
                records.append(to_record(row))
            except (TypeError, ValueError) as error:
                raise ConfigError(f"{file}, row {number}, is not a recorded rollout: {error}") from None
    return sorted(records, key=lambda record: record.number)


def is_whole(run_dir: str | Path, step: int) -> bool:
    """Whether all rollouts of a step are there. Raises ConfigError where a file is damaged."""
    parts = _opened(run_dir, step)
    return bool(parts) and sum(part.metadata.num_rows for _, part in parts) == _about(*parts[0], "total")


def _parts(run_dir: str | Path, step: int) -> list[tuple[Path, pq.ParquetFile]]:
    """The files of a step, which have each of its rollouts once. Raises ConfigError."""
    folder = step_folder(run_dir, step)
    parts = _opened(run_dir, step)
    if not parts:
        raise ConfigError(f"{run_dir} has no rollouts of step {step}: there is no file rank_*.parquet in {folder}")
    totals = {_about(file, part, "total") for file, part in parts}
    if len(totals) > 1:
        raise ConfigError(f"{folder} has files of steps of {min(totals)} and of {max(totals)} rollouts: of two runs")
    counts = Counter(row["number"] for file, part in parts for row in _rows(file, part, ["number"]))
    if twice := [number for number, count in counts.items() if count > 1]:
        raise ConfigError(f"{folder} has rollout {min(twice)} twice: its files are of two runs")
    (total,) = totals
    if missing := set(range(total)) - set(counts):
        raise ConfigError(
            f"{folder} has {len(counts)} of the {total} rollouts of its step, rollout {min(missing)} is missing: the "
            "file of another rank is not there"
        )
    if beyond := set(counts) - set(range(total)):
        raise ConfigError(f"{folder} has a rollout {max(beyond)}, but its step has {total}: it is damaged")
    return parts


def _opened(run_dir: str | Path, step: int) -> list[tuple[Path, pq.ParquetFile]]:
    parts = []
    for file in sorted(file for file in step_folder(run_dir, step).glob("rank_*") if _NAME.fullmatch(file.name)):
        with _readable(file):
            part = pq.ParquetFile(file, page_checksum_verification=True)
        if (found := _about(file, part, "format")) != FORMAT:
            raise ConfigError(f"{file} is of format {found}, and this program reads format {FORMAT} only")
        names = SCHEMA.names
        if wrong := [name for name in names if name not in part.schema_arrow.names]:
            raise ConfigError(f"{file} is not a file of recorded rollouts: it has no column {wrong[0]!r}")
        if wrong := [name for name in names if not part.schema_arrow.field(name).equals(SCHEMA.field(name))]:
            kind, own = part.schema_arrow.field(wrong[0]), SCHEMA.field(wrong[0])
            what = "may be null" if kind.type == own.type else f"is of {kind.type}, not of {own.type}"
            raise ConfigError(f"{file} is not a file of recorded rollouts: its column {wrong[0]!r} {what}")
        if (found := _about(file, part, "step")) != step:
            raise ConfigError(f"{file} is of step {found}: it has been moved")
        parts.append((file, part))
    return parts


def _about(file: Path, part: pq.ParquetFile, name: str) -> int:
    """A number in the file's metadata."""
    value = (part.schema_arrow.metadata or {}).get(f"megarl.{name}".encode(), b"")
    if not value.isdigit():
        raise ConfigError(f"{file} is not a file of recorded rollouts: its metadata have no megarl.{name}")
    return int(value)


def _rows(file: Path, part: pq.ParquetFile, columns: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
    for group in range(part.num_row_groups):
        with _readable(file):
            found = list(rows(part.read_row_group(group, SCHEMA.names if columns is None else columns)))
        yield from found


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        what = " ".join(str(error).split())[:300] or type(error).__name__
        raise ConfigError(f"{file} is not a file of recorded rollouts, or is damaged: {what}") from None


# --- replaying ------------------------------------------------------------------------------------------------


def check_replay(config: Config) -> None:
    """The recorded run has the rollouts of all steps, in the numbers that this configuration has. Reads of each file
    what is not of tokens or words; those are checked when they are read."""
    folder = Path(config.rollout.replay)
    if not folder.is_dir():
        raise ConfigError(f"rollout.replay={folder}: there is no such run folder")
    if not (folder / "rollouts").is_dir():
        raise ConfigError(f"rollout.replay={folder} has no folder rollouts; name a run with track.rollouts=true")
    first = 1
    if config.run.goes_on:  # steps that a checkpoint has behind it are not taken again
        saved = (path.name.removeprefix("step_") for path in Path(config.run.dir, "checkpoints").glob("step_*"))
        first += max((int(number) for number in saved if number.isdecimal()), default=0)
    for step in range(first, config.run.num_rollout + 1):
        if not step_folder(folder, step).is_dir():
            raise ConfigError(
                f"rollout.replay={folder} has no rollouts of step {step} ({step_folder(folder, step).name}): lower "
                f"run.num_rollout={config.run.num_rollout}, or replay a run of as many steps"
            )
        _check_recorded(folder, step, config)


def _check_recorded(run_dir: Path, step: int, config: Config) -> None:
    """Raise ConfigError where these are not what a step of this configuration would have generated."""
    prompts, samples = config.data.prompts_per_step, config.rollout.samples_per_prompt
    sizes: Counter[int] = Counter()
    episodes: set[tuple[int, int]] = set()
    for file, part in _parts(run_dir, step):
        _check_range(file, part)
        for number, row in enumerate(_rows(file, part, _LIGHT)):
            where = f"{file}, row {number}"
            try:
                check_turns(row)
            except ValueError as error:
                raise ConfigError(f"{where}, is not a recorded rollout: {error}") from None
            if row["logprob"] is not None and not math.isfinite(row["logprob"]):
                raise ConfigError(f"{where}: a log-prob is not finite")
            if (length := int(row["turn_lengths"].sum())) > config.rollout.max_context:
                raise ConfigError(
                    f"{where}: a rollout of {length} tokens, beyond rollout.max_context="
                    f"{config.rollout.max_context}: it is of another configuration"
                )
            episode = row["group"], row["episode"]
            sizes[row["group"]] += row["episode"] < 0 or episode not in episodes  # each of its branches is a row
            episodes.add(episode)
    asked = dict.fromkeys(range(prompts), samples)
    first = {group: size for group, size in sizes.items() if group in asked}
    # Groups beyond are of further generations of the step, which may have other sizes, and leave some of the first out.
    several = len(first) < len(sizes) and _prompts_of(run_dir) == prompts
    if sizes != asked and not (several and set(first.values()) <= {samples}):
        raise ConfigError(
            f"{step_folder(run_dir, step)} holds {sizes.total()} rollouts of {len(sizes)} prompts, not {samples} of "
            f"each of {prompts} (rollout.samples_per_prompt, data.prompts_per_step): it is of another configuration"
        )


def _prompts_of(run_dir: Path) -> int | None:
    """Prompts that a step of a run is given, which is the same for all of its steps; None where it does not say."""
    try:
        return load_config(run_dir / "config.yaml").data.prompts_per_step
    except ConfigError:
        return None


def _check_range(file: Path, part: pq.ParquetFile) -> None:
    """Look at the least and largest values that parquet keeps of a column, which tell of all of its tokens."""
    for group in range(part.num_row_groups):
        found = part.metadata.row_group(group)
        for column in map(found.column, range(found.num_columns)):
            name, known = column.path_in_schema.split(".")[0], column.statistics
            if known is None or not known.has_min_max:
                continue
            if name in ("token_ids", "prompt_token_ids") and known.min < 0:
                raise ConfigError(f"{file} is not a file of recorded rollouts: a token id is negative")
            if name == "logprobs" and not (math.isfinite(known.min) and math.isfinite(known.max)):
                raise ConfigError(f"{file}: a log-prob is not finite")
