"""Every rollout of a step on disk, for people and for exact repeats.

    <run>/rollouts/step_000012/rank_00003.parquet

Each rank writes the rollouts that it has, in the background; `rollout_columns` says what is in a file. A step is whole
when its files together have as many rollouts as each of them says that the step has.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megarl.config import ConfigError
from megarl.observe.rollout_columns import COLUMNS_SINCE_FORMAT, DICTIONARY_COLUMNS, FORMAT, SCHEMA, TRAINER_COLUMNS
from megarl.observe.rollout_table import Record, TrainerLogprobs, iter_table_rows, to_batch, to_record
from megarl.types import Rollout

ROW_GROUP_TOKENS = 1 << 20
"""Tokens from which on a row group is full: what is held in two forms at once while it is written."""
TOKEN_BYTES = 12
"""Bytes of a token, its log-prob and its advantage; as many of a record count as one."""

_PART_NAME = re.compile(r"rank_(\d{5,9})\.parquet")
"""Of a file, with the number of the rank."""


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
    not be written. Nothing is raised for that, and no more is said of later ones. records: whether those of routing,
    and of what could have been drawn, are written, too. vocabulary: a hash of it.
    """

    def __init__(
        self,
        run_dir: str | Path,
        rank: int,
        warn: Callable[[str], None],
        records: bool = True,
        vocabulary: str = "",
    ) -> None:
        self._run_dir = run_dir
        self._rank = rank
        self._warn = warn
        self._has_trainer_columns, self._vocabulary = records, vocabulary
        self._warned = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollout-log")
        self._pending_write: Future[None] | None = None

    def write(
        self,
        step: int,
        total: int,
        numbers: Sequence[int],
        rollouts: Sequence[Rollout],
        advantages: Sequence[np.ndarray | None] | None = None,
        trainer: Sequence[TrainerLogprobs | None] | None = None,
    ) -> None:
        """Hand over this rank's rollouts of a step; `numbers` says which they are of its `total`. Once per step.

        advantages: [tokens] float32 of each, None for one that was not trained on; trainer: likewise. What is handed
        over must not be changed later. Waits until the step before is on disk, so that never more than one is held for
        that.
        """
        self.drain()
        if rollouts:
            given = [None] * len(rollouts) if advantages is None else list(advantages)
            if not self._has_trainer_columns:
                rollouts = [replace(rollout, routing=None, sampling_mask=None) for rollout in rollouts]
            file = part_file(self._run_dir, step, self._rank)
            self._pending_write = self._thread.submit(
                write_part, file, step, total, numbers, rollouts, given, self._vocabulary, trainer
            )

    def drain(self) -> None:
        """Wait until all that was handed over is on disk."""
        if self._pending_write is None:
            return
        error = self._pending_write.exception()
        self._pending_write = None
        if error is not None and not self._warned:
            self._warned = True
            what = " ".join(str(error).split()) or type(error).__name__
            self._warn(f"could not record rollouts: {what}; training goes on without them")

    def make_drain(self) -> Callable[[], None]:
        """What waits for that in another thread, and not for what is handed over later."""
        under_way = [] if self._pending_write is None else [self._pending_write]

        def settle() -> None:
            wait(under_way)  # whether it could be written is said by `write`

        return settle

    def close(self) -> None:
        self.drain()
        self._thread.shutdown()


def write_part(
    file: Path,
    step: int,
    total: int,
    numbers: Sequence[int],
    rollouts: Sequence[Rollout],
    advantages: Sequence[np.ndarray | None] | None = None,
    vocabulary: str = "",
    trainer: Sequence[TrainerLogprobs | None] | None = None,
) -> None:
    """Write some of a step's `total` rollouts, as `RolloutLog.write` is given them; the file appears under its name
    when it is whole. Raises OSError, and ValueError or OverflowError for values that the columns cannot hold."""
    about = {"megarl.format": FORMAT, "megarl.step": step, "megarl.total": total, "megarl.vocabulary": vocabulary}
    schema = SCHEMA.with_metadata({name: str(value) for name, value in about.items()})
    own = [None] * len(rollouts) if advantages is None else advantages
    says = [None] * len(rollouts) if trainer is None else trainer
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}")  # readers of whole folders leave out what begins with a dot
    try:
        with pq.ParquetWriter(
            partial.absolute(), schema, compression="zstd", use_dictionary=DICTIONARY_COLUMNS, write_page_checksum=True
        ) as writer:
            for first, end in _split_row_groups(rollouts):
                part = slice(first, end)
                writer.write_batch(to_batch(numbers[part], rollouts[part], own[part], says[part]))
        partial.replace(file)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _split_row_groups(rollouts: Sequence[Rollout]) -> Iterator[tuple[int, int]]:
    first = tokens = 0
    for end, rollout in enumerate(rollouts, 1):
        tokens += rollout.num_tokens + _record_bytes(rollout) // TOKEN_BYTES
        if tokens >= ROW_GROUP_TOKENS or end == len(rollouts):
            yield first, end
            first, tokens = end, 0


def _record_bytes(rollout: Rollout) -> int:
    routing, support = rollout.routing, rollout.sampling_mask
    return (0 if routing is None else routing.nbytes) + (
        0 if support is None else support.counts.nbytes + support.ids.nbytes
    )


# --- reading --------------------------------------------------------------------------------------------------


def read_rollouts(run_dir: str | Path, step: int, rank: int = 0, world: int = 1, whole: bool = False) -> list[Rollout]:
    """The rollouts of a step in their order, equal to those written; where this is one of several ranks those that it
    had, or in a larger world had a rank that it stands for. whole: with their records of routing and of what could have
    been drawn. Raises ConfigError where some of the step are missing, or a file is damaged or of another format."""
    return [record.rollout for record in read_records(run_dir, step, rank, world, whole)]


def read_records(
    run_dir: str | Path, step: int, rank: int = 0, world: int = 1, whole: bool = False, without: Sequence[str] = ()
) -> list[Record]:
    """As `read_rollouts`, with numbers, advantages and what the trainer says. without: of `TRAINER_COLUMNS`, those that are
    left out all the same."""
    records = []
    names = [name for name in SCHEMA.names if name not in (without if whole else TRAINER_COLUMNS)]
    for file, part in open_complete_parts(run_dir, step):
        if int(_PART_NAME.fullmatch(file.name)[1]) % world != rank:  # type: ignore[index]
            continue
        for number, row in enumerate(iter_rows(file, part, names)):
            try:
                records.append(to_record(row))
            except (TypeError, ValueError) as error:
                raise ConfigError(f"{file}, row {number}, is not a recorded rollout: {error}") from None
    return sorted(records, key=lambda record: record.number)


def is_complete(run_dir: str | Path, step: int) -> bool:
    """Whether all rollouts of a step are there. Raises ConfigError where a file is damaged."""
    parts = _open_parts(run_dir, step)
    return bool(parts) and sum(part.metadata.num_rows for _, part in parts) == _read_metadata(*parts[0], "total")


def open_complete_parts(run_dir: str | Path, step: int) -> list[tuple[Path, pq.ParquetFile]]:
    """The files of a step, which have each of its rollouts once. Raises ConfigError."""
    folder = step_folder(run_dir, step)
    parts = _open_parts(run_dir, step)
    if not parts:
        raise ConfigError(f"{run_dir} has no rollouts of step {step}: there is no file rank_*.parquet in {folder}")
    totals = {_read_metadata(file, part, "total") for file, part in parts}
    if len(totals) > 1:
        raise ConfigError(f"{folder} has files of steps of {min(totals)} and of {max(totals)} rollouts: of two runs")
    counts = Counter(row["number"] for file, part in parts for row in iter_rows(file, part, ["number"]))
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


def _open_parts(run_dir: str | Path, step: int) -> list[tuple[Path, pq.ParquetFile]]:
    parts = []
    for file in sorted(file for file in step_folder(run_dir, step).glob("rank_*") if _PART_NAME.fullmatch(file.name)):
        with _raise_config_error(file):
            part = pq.ParquetFile(file.absolute(), page_checksum_verification=True)
        names = _format_columns(file, part)
        if wrong := [name for name in names if name not in part.schema_arrow.names]:
            raise ConfigError(f"{file} is not a file of recorded rollouts: it has no column {wrong[0]!r}")
        if wrong := [name for name in names if not part.schema_arrow.field(name).equals(SCHEMA.field(name))]:
            kind, own = part.schema_arrow.field(wrong[0]), SCHEMA.field(wrong[0])
            what = "may be null" if kind.type == own.type else f"is of {kind.type}, not of {own.type}"
            raise ConfigError(f"{file} is not a file of recorded rollouts: its column {wrong[0]!r} {what}")
        if (found := _read_metadata(file, part, "step")) != step:
            raise ConfigError(f"{file} is of step {found}: it has been moved")
        parts.append((file, part))
    return parts


def _format_columns(file: Path, part: pq.ParquetFile) -> list[str]:
    """That a file of its format has. Raises ConfigError for a format that is not read."""
    known = range(min(COLUMNS_SINCE_FORMAT) - 1, FORMAT + 1)
    if (found := _read_metadata(file, part, "format")) not in known:
        raise ConfigError(f"{file} is of format {found}, and this program reads formats {known[0]} to {FORMAT} only")
    later = {name for format, names in COLUMNS_SINCE_FORMAT.items() if format > found for name in names}
    return [name for name in SCHEMA.names if name not in later]


def _read_metadata(file: Path, part: pq.ParquetFile, name: str) -> int:
    """A number in the file's metadata."""
    value = (part.schema_arrow.metadata or {}).get(f"megarl.{name}".encode(), b"")
    if not value.isdigit():
        raise ConfigError(f"{file} is not a file of recorded rollouts: its metadata have no megarl.{name}")
    return int(value)


def iter_rows(file: Path, part: pq.ParquetFile, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """These columns of each row, with None where the file is of a format before a column's. Raises ConfigError."""
    there = set(_format_columns(file, part))
    missing = dict.fromkeys(name for name in columns if name not in there)
    for group in range(part.num_row_groups):
        with _raise_config_error(file):
            found = list(iter_table_rows(part.read_row_group(group, [name for name in columns if name in there])))
        yield from ({**row, **missing} for row in found) if missing else found


def read_vocabulary_hash(part: pq.ParquetFile) -> str:
    """Hash of that of the tokenizer, empty where it is not on record."""
    return str((part.schema_arrow.metadata or {}).get(b"megarl.vocabulary", b"").decode(errors="replace"))


@contextmanager
def _raise_config_error(file: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        what = " ".join(str(error).split())[:300] or type(error).__name__
        raise ConfigError(f"{file} is not a file of recorded rollouts, or is damaged: {what}") from None
