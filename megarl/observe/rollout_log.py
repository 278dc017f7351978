"""Record every rollout of a step on disk, for inspection and exact replay.

    <run>/rollouts/step_000012/rank_00003.parquet

Each rank writes its own rollouts in the background; `rollout_columns` documents the file format. A step is complete
when its files together have as many rollouts as each file's metadata say that the step has.
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
"""Tokens per row group. While a row group is written, it is held in memory twice."""
TOKEN_BYTES = 12
"""Bytes of a token with its log-prob and advantage; routing and sampling masks count as a token per so many bytes."""

_PART_NAME = re.compile(r"rank_(\d{5,9})\.parquet")
"""Name of a rank's file."""


def step_folder(run_dir: str | Path, step: int) -> Path:
    """Return the folder of a step's rollouts. Steps count from 1."""
    return Path(run_dir) / "rollouts" / f"step_{step:06d}"


def part_file(run_dir: str | Path, step: int, rank: int) -> Path:
    """Return the file to which a rank writes its rollouts of a step."""
    return step_folder(run_dir, step) / f"rank_{rank:05d}.parquet"


def recorded_steps(run_dir: str | Path) -> list[int]:
    """Return the steps with a folder, ascending. The last one may be incomplete."""
    names = (re.fullmatch(r"step_(\d{6,12})", path.name) for path in Path(run_dir, "rollouts").glob("step_*"))
    return sorted(int(name[1]) for name in names if name)


def remove_after(run_dir: str | Path, step: int) -> None:
    """Remove the rollouts of steps after `step`, which will be repeated, possibly by another number of ranks.

    Raises OSError.
    """
    for later in recorded_steps(run_dir):
        if later > step:
            shutil.rmtree(step_folder(run_dir, later))


# --- writing --------------------------------------------------------------------------------------------------


class RolloutLog:
    """Writes this rank's rollouts in a background thread.

    Args:
        warn: called by `write`, `drain` and `close`, on the caller's thread, with the first failure to write. Nothing
            is raised, and later failures are silent.
        save_replay_data: whether to write routing and sampling masks (`TRAINER_COLUMNS`).
        vocab_hash: hash of the tokenizer's vocabulary.
    """

    def __init__(
        self,
        run_dir: str | Path,
        rank: int,
        warn: Callable[[str], None],
        save_replay_data: bool = True,
        vocab_hash: str = "",
    ) -> None:
        self._run_dir = run_dir
        self._rank = rank
        self._warn = warn
        self._has_trainer_columns, self._vocab_hash = save_replay_data, vocab_hash
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
        trainer_logprobs: Sequence[TrainerLogprobs | None] | None = None,
    ) -> None:
        """Queue this rank's rollouts of a step for writing. Call once per step.

        Waits until the previous step is on disk, so that at most one step is held in memory. The arguments must not be
        modified afterwards.

        Args:
            total: rollouts of the step on all ranks.
            numbers: index of each rollout in the step.
            advantages: [tokens] float32 per rollout, None for a rollout that was not trained on.
            trainer_logprobs: trainer log-probs per rollout, likewise.
        """
        self.drain()
        if rollouts:
            advantage_list = [None] * len(rollouts) if advantages is None else list(advantages)
            if not self._has_trainer_columns:
                rollouts = [replace(rollout, routing=None, sampling_mask=None) for rollout in rollouts]
            file = part_file(self._run_dir, step, self._rank)
            self._pending_write = self._thread.submit(
                write_part, file, step, total, numbers, rollouts, advantage_list, self._vocab_hash, trainer_logprobs
            )

    def drain(self) -> None:
        """Wait until everything queued is on disk; warn if it could not be written."""
        if self._pending_write is None:
            return
        error = self._pending_write.exception()
        self._pending_write = None
        if error is not None and not self._warned:
            self._warned = True
            reason = " ".join(str(error).split()) or type(error).__name__
            self._warn(f"could not record rollouts: {reason}; training continues without them")

    def make_drain(self) -> Callable[[], None]:
        """Return a function that waits, on any thread, for what is queued now but not for later writes."""
        pending = [] if self._pending_write is None else [self._pending_write]

        def drain() -> None:
            wait(pending)  # a failure is reported by the next `write` or `drain`

        return drain

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
    vocab_hash: str = "",
    trainer_logprobs: Sequence[TrainerLogprobs | None] | None = None,
) -> None:
    """Write some of a step's rollouts to `file`, which appears atomically. Arguments as for `RolloutLog.write`.

    Raises OSError, and ValueError or OverflowError for values that the columns cannot hold.
    """
    metadata = {"megarl.format": FORMAT, "megarl.step": step, "megarl.total": total, "megarl.vocabulary": vocab_hash}
    schema = SCHEMA.with_metadata({name: str(value) for name, value in metadata.items()})
    advantage_list = [None] * len(rollouts) if advantages is None else advantages
    trainer_list = [None] * len(rollouts) if trainer_logprobs is None else trainer_logprobs
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}")  # readers of whole folders skip dot files
    try:
        with pq.ParquetWriter(
            partial.absolute(), schema, compression="zstd", use_dictionary=DICTIONARY_COLUMNS, write_page_checksum=True
        ) as writer:
            for start, end in _split_row_groups(rollouts):
                part = slice(start, end)
                writer.write_batch(to_batch(numbers[part], rollouts[part], advantage_list[part], trainer_list[part]))
        partial.replace(file)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _split_row_groups(rollouts: Sequence[Rollout]) -> Iterator[tuple[int, int]]:
    start = tokens = 0
    for end, rollout in enumerate(rollouts, 1):
        tokens += rollout.num_tokens + _record_bytes(rollout) // TOKEN_BYTES
        if tokens >= ROW_GROUP_TOKENS or end == len(rollouts):
            yield start, end
            start, tokens = end, 0


def _record_bytes(rollout: Rollout) -> int:
    routing, sampling_mask = rollout.routing, rollout.sampling_mask
    return (0 if routing is None else routing.nbytes) + (
        0 if sampling_mask is None else sampling_mask.counts.nbytes + sampling_mask.ids.nbytes
    )


# --- reading --------------------------------------------------------------------------------------------------


def read_rollouts(
    run_dir: str | Path, step: int, rank: int = 0, world: int = 1, include_trainer_columns: bool = False
) -> list[Rollout]:
    """Return a step's rollouts in order, equal to those written.

    Args:
        rank, world: return only the rollouts written by ranks congruent to `rank` modulo `world`, so that a smaller
            world covers the files of a larger one.
        include_trainer_columns: include `TRAINER_COLUMNS`: routing and sampling masks.

    Raises:
        ConfigError: if the step is incomplete, or a file is damaged or of an unknown format.
    """
    return [record.rollout for record in read_records(run_dir, step, rank, world, include_trainer_columns)]


def read_records(
    run_dir: str | Path,
    step: int,
    rank: int = 0,
    world: int = 1,
    include_trainer_columns: bool = False,
    exclude: Sequence[str] = (),
) -> list[Record]:
    """Like `read_rollouts`, with indices, advantages and trainer log-probs.

    Args:
        exclude: columns to omit even if `include_trainer_columns`.
    """
    records = []
    names = [name for name in SCHEMA.names if name not in (exclude if include_trainer_columns else TRAINER_COLUMNS)]
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
    """Return whether all rollouts of a step are on disk. Raises ConfigError if a file is damaged."""
    parts = _open_parts(run_dir, step)
    return bool(parts) and sum(part.metadata.num_rows for _, part in parts) == _read_metadata(*parts[0], "total")


def open_complete_parts(run_dir: str | Path, step: int) -> list[tuple[Path, pq.ParquetFile]]:
    """Open the files of a step. Raises ConfigError unless they hold each of its rollouts exactly once."""
    folder = step_folder(run_dir, step)
    parts = _open_parts(run_dir, step)
    if not parts:
        raise ConfigError(f"{run_dir} has no rollouts of step {step}: no file rank_*.parquet in {folder}")
    totals = {_read_metadata(file, part, "total") for file, part in parts}
    if len(totals) > 1:
        raise ConfigError(f"{folder} has files of steps of {min(totals)} and of {max(totals)} rollouts: from two runs")
    counts = Counter(row["number"] for file, part in parts for row in iter_rows(file, part, ["number"]))
    if duplicates := [number for number, count in counts.items() if count > 1]:
        raise ConfigError(f"{folder} has rollout {min(duplicates)} twice: its files are from two runs")
    (total,) = totals
    if missing := set(range(total)) - set(counts):
        raise ConfigError(
            f"{folder} has {len(counts)} of the {total} rollouts of its step, rollout {min(missing)} is missing: "
            f"another rank's file is missing"
        )
    if out_of_range := set(counts) - set(range(total)):
        raise ConfigError(f"{folder} has a rollout {max(out_of_range)}, but its step has {total}: it is damaged")
    return parts


def _open_parts(run_dir: str | Path, step: int) -> list[tuple[Path, pq.ParquetFile]]:
    parts = []
    for file in sorted(file for file in step_folder(run_dir, step).glob("rank_*") if _PART_NAME.fullmatch(file.name)):
        with _raise_config_error(file):
            part = pq.ParquetFile(file.absolute(), page_checksum_verification=True)
        names = _format_columns(file, part)
        if invalid := [name for name in names if name not in part.schema_arrow.names]:
            raise ConfigError(f"{file} is not a file of recorded rollouts: it has no column {invalid[0]!r}")
        if invalid := [name for name in names if not part.schema_arrow.field(name).equals(SCHEMA.field(name))]:
            field, expected = part.schema_arrow.field(invalid[0]), SCHEMA.field(invalid[0])
            problem = "may be null" if field.type == expected.type else f"is of {field.type}, not of {expected.type}"
            raise ConfigError(f"{file} is not a file of recorded rollouts: its column {invalid[0]!r} {problem}")
        if (recorded_step := _read_metadata(file, part, "step")) != step:
            raise ConfigError(f"{file} is of step {recorded_step}: it has been moved")
        parts.append((file, part))
    return parts


def _format_columns(file: Path, part: pq.ParquetFile) -> list[str]:
    """Return the columns of the file's format. Raises ConfigError for an unsupported format."""
    supported = range(min(COLUMNS_SINCE_FORMAT) - 1, FORMAT + 1)
    if (file_format := _read_metadata(file, part, "format")) not in supported:
        raise ConfigError(
            f"{file} is of format {file_format}, but this program reads only formats {supported[0]} to {FORMAT}"
        )
    later = {name for format, names in COLUMNS_SINCE_FORMAT.items() if format > file_format for name in names}
    return [name for name in SCHEMA.names if name not in later]


def _read_metadata(file: Path, part: pq.ParquetFile, name: str) -> int:
    """Return an integer from the file's metadata."""
    value = (part.schema_arrow.metadata or {}).get(f"megarl.{name}".encode(), b"")
    if not value.isdigit():
        raise ConfigError(f"{file} is not a file of recorded rollouts: its metadata have no megarl.{name}")
    return int(value)


def iter_rows(file: Path, part: pq.ParquetFile, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield these columns of each row; None for columns newer than the file's format. Raises ConfigError."""
    available = set(_format_columns(file, part))
    missing = dict.fromkeys(name for name in columns if name not in available)
    for group in range(part.num_row_groups):
        with _raise_config_error(file):
            rows = list(iter_table_rows(part.read_row_group(group, [name for name in columns if name in available])))
        yield from ({**row, **missing} for row in rows) if missing else rows


def read_vocabulary_hash(part: pq.ParquetFile) -> str:
    """Return the hash of the tokenizer's vocabulary; empty if not recorded."""
    return str((part.schema_arrow.metadata or {}).get(b"megarl.vocabulary", b"").decode(errors="replace"))


@contextmanager
def _raise_config_error(file: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ConfigError(f"{file} is not a file of recorded rollouts, or is damaged: {reason}") from None
