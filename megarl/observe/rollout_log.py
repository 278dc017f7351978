"""Record every rollout of a step on disk, for inspection and exact replay.

    <run>/rollouts/step_000012/rank_00003.parquet

Each rank writes its own rollouts in the background; `rollout_columns` documents the file format. A step is complete
when its files together have as many rollouts as each file's metadata say that the step has.
"""

from __future__ import annotations

import functools
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megarl.config import ConfigError
from megarl.observe.rollout_columns import COLUMNS_SINCE_FORMAT, DICTIONARY_COLUMNS, FORMAT, SCHEMA, TRAINER_COLUMNS
from megarl.observe.rollout_table import (
    Record,
    StepGeneration,
    TrainerLogprobs,
    iter_table_rows,
    to_batch,
    to_record,
)
from megarl.parallel.policy_configs import POLICIES_FOLDER
from megarl.types import Rollout
from megarl.utils.text import one_line

ROW_GROUP_TOKENS = 1 << 20
"""Tokens per row group. While a row group is written, it is held in memory twice."""
TOKEN_BYTES = 12
"""Bytes of a token with its log-prob and advantage; `TRAINER_COLUMNS` count as a token per so many bytes."""


EVALUATION_FOLDER = "evaluation"
"""Name of `evaluation_folder`."""


def step_folder(run_dir: str | Path, step: int) -> Path:
    """Return the folder of a step's rollouts. Steps count from 1."""
    return Path(run_dir) / "rollouts" / f"step_{step:06d}"


def policy_folder(run_dir: Path, policy: str) -> Path:
    """Return a policy's folder in a run folder, where its rollouts are recorded, or in a checkpoint; the first policy,
    whose name is empty, has the folder itself."""
    return run_dir / POLICIES_FOLDER / policy if policy else run_dir


def evaluation_folder(run_dir: Path) -> Path:
    """Return the folder of a run, or of one of its policies, where the rollouts of evaluations are recorded, in
    files like those of training. Their step is the one after which the evaluation began, from 0."""
    return run_dir / EVALUATION_FOLDER


def part_file(run_dir: str | Path, step: int, rank: int) -> Path:
    """Return the file to which a rank writes its rollouts of a step."""
    return step_folder(run_dir, step) / f"rank_{rank:05d}.parquet"


def recorded_steps(run_dir: str | Path) -> list[int]:
    """Return the steps with a folder, ascending. The last one may be incomplete."""
    names = (re.fullmatch(r"step_(\d{6,12})", path.name) for path in Path(run_dir, "rollouts").glob("step_*"))
    return sorted(int(name[1]) for name in names if name)


class Part(NamedTuple):
    """A rank's file of a step, open for reading."""

    path: Path
    file: pq.ParquetFile

    @staticmethod
    def open(path: Path) -> Part:
        return Part(path, pq.ParquetFile(path.absolute(), page_checksum_verification=True))

    @property
    def names(self) -> set[str]:
        """Columns that the file has."""
        return set(self.file.schema_arrow.names)

    def read_metadata(self, name: str) -> str:
        """Return an entry of the file's metadata, such as `vocabulary`; empty if missing."""
        metadata = self.file.schema_arrow.metadata or {}
        return str(metadata.get(f"megarl.{name}".encode(), b"").decode(errors="replace"))


def list_parts(run_dir: str | Path, step: int) -> list[Path]:
    """Return the files of a step."""
    paths = step_folder(run_dir, step).glob("rank_*")
    return sorted(path for path in paths if re.fullmatch(r"rank_\d{5,9}\.parquet", path.name))


def remove_after(run_dir: str | Path, step: int) -> None:
    """Remove the rollouts of steps after `step`, which will be repeated, possibly by another number of ranks."""
    for later in recorded_steps(run_dir):
        if later > step:
            shutil.rmtree(step_folder(run_dir, later))


# --- writing --------------------------------------------------------------------------------------------------


class RolloutLog:
    """Writes this rank's rollouts in a background thread.

    Args:
        warn: called by `write`, `drain` and `close`, on the caller's thread, with the first failure to write. Nothing
            is raised, and later failures are silent.
        save_replay_data: whether to write `TRAINER_COLUMNS`.
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
        self._run_dir, self._rank, self._warn = run_dir, rank, warn
        self._save_replay_data, self._vocab_hash = save_replay_data, vocab_hash
        self._has_warned = False
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
        calls: Sequence[int | None] | None = None,
        generation: StepGeneration | None = None,
    ) -> None:
        """Queue this rank's rollouts of a step for writing. Call once per step.

        Waits until the previous step is on disk, so that at most one step is held in memory. The arguments must not be
        modified afterwards.

        Args:
            total: rollouts of the step on all ranks.
            numbers: index of each rollout in the step.
            advantages: [tokens] float32 per rollout, None for a rollout that was not trained on.
            trainer_logprobs: trainer log-probs per rollout, likewise.
            calls: which of the step's generations each rollout is of, which `generation` describes.
        """
        self.drain()
        if rollouts:
            file = part_file(self._run_dir, step, self._rank)
            columns = numbers, rollouts, advantages, self._vocab_hash, trainer_logprobs, calls
            self._pending_write = self._thread.submit(
                write_part, file, step, total, *columns, generation, self._save_replay_data
            )

    def drain(self) -> None:
        """Wait until everything queued is on disk; warn if it could not be written."""
        if self._pending_write is None:
            return
        error, self._pending_write = self._pending_write.exception(), None
        if error is not None and not self._has_warned:
            self._has_warned = True
            self._warn(f"could not record rollouts: {one_line(error)}; training continues without them")

    def make_drain(self) -> Callable[[], object]:
        """Return a function that waits, on any thread, for what is queued now but not for later writes."""
        # A failure is reported by the next `write` or `drain`.
        return functools.partial(wait, [] if self._pending_write is None else [self._pending_write])

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
    calls: Sequence[int | None] | None = None,
    generation: StepGeneration | None = None,
    save_replay_data: bool = True,
) -> None:
    """Write some of a step's rollouts to `file`, which appears atomically. Arguments as for `RolloutLog.write`.

    Raises OSError, and ValueError or OverflowError for values that the columns cannot hold.
    """
    generation = generation or StepGeneration()
    metadata = {"megarl.format": FORMAT, "megarl.step": step, "megarl.total": total, "megarl.vocabulary": vocab_hash}
    metadata["megarl.generation"] = generation.to_json()
    schema = SCHEMA.with_metadata({name: str(value) for name, value in metadata.items()})
    advantages = [None] * len(rollouts) if advantages is None else advantages
    trainer_logprobs = [None] * len(rollouts) if trainer_logprobs is None else trainer_logprobs
    calls = [None] * len(rollouts) if calls is None else calls
    image_numbers: dict[bytes, int] = {}
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}")  # readers of whole folders skip dot files
    try:
        with pq.ParquetWriter(
            partial.absolute(), schema, compression="zstd", use_dictionary=DICTIONARY_COLUMNS, write_page_checksum=True
        ) as writer:
            for rows in _split_row_groups(rollouts):
                values = advantages[rows], trainer_logprobs[rows], calls[rows]
                writer.write_batch(
                    to_batch(
                        *(numbers[rows], rollouts[rows], *values, generation.greedy, image_numbers, save_replay_data)
                    )
                )
        partial.replace(file)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _split_row_groups(rollouts: Sequence[Rollout]) -> Iterator[slice]:
    start = tokens = 0
    images: set[bytes] = set()
    for end, rollout in enumerate(rollouts, 1):
        mask = rollout.sampling_mask
        num_bytes = 0 if rollout.routing is None else rollout.routing.nbytes
        num_bytes += 0 if rollout.sparse_indices is None else rollout.sparse_indices.nbytes
        num_bytes += 0 if mask is None else mask.counts.nbytes + mask.ids.nbytes
        new_images = {image.data for image in rollout.images} - images
        num_bytes += sum(map(len, new_images))
        images |= new_images
        tokens += rollout.num_tokens + num_bytes // TOKEN_BYTES
        if tokens >= ROW_GROUP_TOKENS or end == len(rollouts):
            yield slice(start, end)
            start, tokens = end, 0


# --- reading --------------------------------------------------------------------------------------------------


def read_rollouts(
    run_dir: str | Path, step: int, rank: int = 0, world: int = 1, include_trainer_columns: bool = False
) -> list[Rollout]:
    """Return a step's rollouts in order, equal to those written.

    Raises ConfigError if the step is incomplete, or a file is damaged or of an unknown format.

    Args:
        rank, world: return only the rollouts written by ranks congruent to `rank` modulo `world`, so that a smaller
            world covers the files of a larger one.
        include_trainer_columns: include `TRAINER_COLUMNS`.
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
    for part in open_complete_parts(run_dir, step):
        if int(part.path.stem.removeprefix("rank_")) % world != rank:
            continue
        image_files: list[bytes] = []
        for number, row in enumerate(iter_rows(part, names)):
            if (new_files := row.get("image_files")) is not None:
                image_files += new_files.tolist()
            try:
                records.append(to_record(row, image_files))
            except (TypeError, ValueError) as error:
                raise ConfigError(f"{part.path}, row {number}, is not a recorded rollout: {error}") from None
    return sorted(records, key=lambda record: record.number)


def is_complete(run_dir: str | Path, step: int) -> bool:
    """Return whether all rollouts of a step are on disk. Raises ConfigError if a file is damaged."""
    parts = _open_valid_parts(run_dir, step)
    return bool(parts) and sum(part.file.metadata.num_rows for part in parts) == _read_integer(parts[0], "total")


def open_complete_parts(run_dir: str | Path, step: int) -> list[Part]:
    """Open the files of a step. Raises ConfigError unless they hold each of its rollouts exactly once."""
    folder = step_folder(run_dir, step)
    parts = _open_valid_parts(run_dir, step)
    if not parts:
        raise ConfigError(f"{run_dir} has no rollouts of step {step}: no file rank_*.parquet in {folder}")
    totals = {_read_integer(part, "total") for part in parts}
    if len(totals) > 1:
        raise ConfigError(f"{folder} has files of steps of {min(totals)} and of {max(totals)} rollouts: from two runs")
    counts = Counter(row["number"] for part in parts for row in iter_rows(part, ["number"]))
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


def _open_valid_parts(run_dir: str | Path, step: int) -> list[Part]:
    parts = []
    for path in list_parts(run_dir, step):
        with _raise_config_error(path):
            part = Part.open(path)
        for field in map(SCHEMA.field, _format_columns(part)):
            if field.name not in part.names:
                raise ConfigError(f"{path} is not a file of recorded rollouts: it has no column {field.name!r}")
            if not (actual := part.file.schema_arrow.field(field.name)).equals(field):
                problem = "may be null" if actual.type == field.type else f"is of {actual.type}, not of {field.type}"
                raise ConfigError(f"{path} is not a file of recorded rollouts: its column {field.name!r} {problem}")
        if (recorded_step := _read_integer(part, "step")) != step:
            raise ConfigError(f"{path} is of step {recorded_step}: it has been moved")
        parts.append(part)
    return parts


def _format_columns(part: Part) -> list[str]:
    """Return the columns of the file's format. Raises ConfigError for an unsupported format."""
    supported = range(min(COLUMNS_SINCE_FORMAT) - 1, FORMAT + 1)
    if (file_format := _read_integer(part, "format")) not in supported:
        raise ConfigError(
            f"{part.path} is of format {file_format}, but this program reads only formats {supported[0]} to {FORMAT}"
        )
    later = {name for format, names in COLUMNS_SINCE_FORMAT.items() if format > file_format for name in names}
    return [name for name in SCHEMA.names if name not in later]


def _read_integer(part: Part, name: str) -> int:
    if not (text := part.read_metadata(name)).isdecimal():
        raise ConfigError(f"{part.path} is not a file of recorded rollouts: its metadata have no megarl.{name}")
    return int(text)


def iter_rows(part: Part, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield these columns of each row; None for columns newer than the file's format. Raises ConfigError."""
    available = set(_format_columns(part))
    missing = dict.fromkeys(name for name in columns if name not in available)
    for group in range(part.file.num_row_groups):
        with _raise_config_error(part.path):
            table = part.file.read_row_group(group, [name for name in columns if name in available])
            rows = list(iter_table_rows(table))
        yield from ({**row, **missing} for row in rows) if missing else rows


@contextmanager
def _raise_config_error(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = one_line(error, 300)
        raise ConfigError(f"{path} is not a file of recorded rollouts, or is damaged: {reason}") from None
