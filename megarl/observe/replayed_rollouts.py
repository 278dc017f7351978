"""Replay recorded rollouts instead of generating: map steps, and check that a recording fits a configuration."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from megarl.config import Config, ConfigError, load_config
from megarl.config.replay_source import ReplaySource
from megarl.models.layout_algebra import HFConfig
from megarl.models.registry import VISION_FAMILIES
from megarl.models.routing import routing_shape
from megarl.models.sparse_indices import index_shape
from megarl.observe.rollout_columns import TRAINER_COLUMNS
from megarl.observe.rollout_log import (
    Part,
    iter_rows,
    list_parts,
    open_complete_parts,
    read_records,
    recorded_steps,
    step_folder,
)
from megarl.observe.rollout_table import Record, StepGeneration, check_turns

_CHECKED_COLUMNS = (
    *("number", "status", "logprob", "greedy", "images"),
    *("turn_lengths", "turn_is_action", "turn_weight_version", "routing_shape", "sparse_shape"),
)
"""Columns needed to check a step against a configuration; about a thousandth of the file."""


def replayed_columns(config: Config, hf: HFConfig) -> tuple[str, ...]:
    """Return those of `TRAINER_COLUMNS` that a replay needs: of what the trainer replays, and of the model's images."""
    routing = ("routing",) if config.train.routing_replay else ()
    masks = ("support_counts", "support_ids") if config.rollout.has_truncated_sampling else ()
    indices = ("sparse_indices",) if config.train.sparse_index_replay else ()
    return (*routing, *masks, *indices, *(("image_files",) if _vision_family(hf) else ()))


def _vision_family(hf: HFConfig) -> str:
    """Return the architecture if it reads images, else an empty string."""
    name = next(iter(hf.get("architectures") or ()), "")
    return name if name in VISION_FAMILIES else ""


class ReplayedStep:
    """A step's recorded rollouts, handed out call by call.

    If the recorded run had as many ranks, each rank reads its own rollouts, so that values summed rank by rank are
    bitwise equal.

    Args:
        step: of this run.

    Raises:
        ConfigError: if the step was not recorded completely.
    """

    def __init__(self, config: Config, hf: HFConfig, step: int, rank: int, world: int) -> None:
        self._source = ReplaySource.parse(config.rollout.replay)
        self._step = self._source.recorded_step(step)
        self.location = f"rollout.replay={config.rollout.replay}, step {self._step}"
        unused = [name for name in TRAINER_COLUMNS if name not in replayed_columns(config, hf)]
        self._records = read_records(self._source.folder, self._step, rank, world, True, exclude=unused)
        self._generation = _read_generation(self._source.folder, self._step)
        self._num_taken = {False: 0, True: 0}
        """Calls so far of sampling and of greedy generations."""
        self._next_group = 0

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the recorded generation."""
        return {} if self._generation is None else dict(self._generation.metrics)

    def version_offset(self, version: int) -> int:
        """Return what to add to this run's weight versions to get the recorded run's, by which staleness is measured.

        version: the current one of this run, which is 0 in its first step.
        """
        first = self._source.first_step
        if step_folder(self._source.folder, first).is_dir():
            generation = _read_generation(self._source.folder, first)
            return first - 1 if generation is None else max(0, generation.version)
        return 0 if self._generation is None else max(0, self._generation.version - version)  # of a resumed run

    def take(self, num_prompts: int, is_greedy: bool) -> list[Record]:
        """Return this rank's rollouts of the step's next sampling, or its next greedy generation, in order.

        num_prompts: of this call. Only in recordings without calls it tells the rollouts of a second sampling.
        """
        number = self._num_taken[is_greedy]
        self._num_taken[is_greedy] += 1
        if self._generation is None:
            return self._take_groups(num_prompts, is_greedy)
        calls = [index for index, greedy in enumerate(self._generation.greedy) if greedy == is_greedy]
        if number >= len(calls):
            kind = "greedy" if is_greedy else "sampling"
            raise ConfigError(
                f"{self.location} has {len(calls)} {kind} generations, and the algorithm asks for another: replay a "
                "run of the same algorithm and rewards"
            )
        return [record for record in self._records if record.call == calls[number]]

    def _take_groups(self, num_prompts: int, is_greedy: bool) -> list[Record]:
        """Return the rollouts of the next groups. The first generation has those of the recorded run's prompts."""
        if is_greedy:
            raise ConfigError(f"{self.location} was recorded by a version that did not record greedy answers")
        start = self._next_group
        self._next_group += num_prompts if start else _read_prompts_per_step(self._source.folder) or 1 << 62
        return [record for record in self._records if start <= record.rollout.group < self._next_group]


def _read_prompts_per_step(run_dir: Path) -> int | None:
    """Return the recorded run's `data.prompts_per_step`; None if its configuration cannot be read."""
    try:
        return load_config(run_dir / "config.yaml").data.prompts_per_step
    except ConfigError:
        return None


def _read_generation(run_dir: Path, step: int) -> StepGeneration | None:
    """Return how a step was generated; None for earlier formats. Raises ConfigError."""
    parts = list_parts(run_dir, step)
    if not parts:
        raise ConfigError(f"{run_dir} has no rollouts of step {step}: no file rank_*.parquet")
    return _parse_generation(Part.open(parts[0]))


def _parse_generation(part: Part) -> StepGeneration | None:
    try:
        generation = StepGeneration.from_json(part.read_metadata("generation"))
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{part.path} is not a file of recorded rollouts: megarl.generation: {error}") from None
    return generation if generation is None or generation.greedy else None


def check_replay(
    config: Config,
    hf: HFConfig,
    vocab_hash: str = "",
    max_step: int = 0,
    needs_greedy: bool = False,
    stage: range | None = None,
) -> None:
    """Check that the recording has the rollouts of all steps to take and fits the configuration.

    Checks vocabulary, lengths, and the records that the trainer replays. Tokens and messages are checked when they are
    replayed. The numbers of prompts and samples may be others than configured.

    Args:
        vocab_hash: hash of the tokenizer's vocabulary, as recorded by the rollout log; empty if unknown.
        max_step: last step to check; 0 for all.
        needs_greedy: whether the algorithm generates greedy answers in each step.
        stage: the only steps to check; None for all.

    Raises:
        ConfigError: if the recording does not fit.
    """
    source = ReplaySource.parse(config.rollout.replay)
    folder, key = source.folder, f"rollout.replay={config.rollout.replay}"
    if not folder.is_dir():
        raise ConfigError(f"{key}: no such run folder")
    if not (folder / "rollouts").is_dir():
        raise ConfigError(f"{key} has no folder rollouts; name a run with track.save_rollouts=true")
    first_step, last_step = 1, max_step or config.run.num_rollout
    if config.run.resumes:  # steps up to the checkpoint are not repeated
        saved = (path.name.removeprefix("step_") for path in Path(config.run.dir, "checkpoints").glob("step_*"))
        first_step += max((int(number) for number in saved if number.isdecimal()), default=0)
    steps = [step for step in range(first_step, last_step + 1) if stage is None or step in stage]
    for step in map(source.recorded_step, steps):
        if not step_folder(folder, step).is_dir():
            available = recorded_steps(folder)
            available_text = f"it has steps {available[0]} to {available[-1]}" if available else "it has none"
            remedy = f"lower run.num_rollout={last_step}, or replay a run of as many steps"
            if available and available[0] > step:
                remedy = f"{folder}@{available[0]} begins with its first"
            name = step_folder(folder, step).name
            raise ConfigError(f"{key} has no rollouts of step {step} ({name}), {available_text}: {remedy}")
        _check_step(folder, step, config, hf, vocab_hash)
        if needs_greedy and not ((generation := _read_generation(folder, step)) and any(generation.greedy)):
            raise ConfigError(
                f"{key} has no greedy answers in step {step}, which algorithm={config.algorithm} needs: replay a run "
                "of the same algorithm"
            )


def _check_step(run_dir: Path, step: int, config: Config, hf: HFConfig, vocab_hash: str) -> None:
    """Raise ConfigError unless the step's rollouts could have been generated with this configuration."""
    check = _RecordCheck(config, hf)
    for part in open_complete_parts(run_dir, step):
        if vocab_hash and part.read_metadata("vocabulary") not in ("", vocab_hash):
            raise ConfigError(
                f"{part.path} was recorded with another tokenizer than that of model.path={config.model.path}; set "
                f"model.path to a model with the same tokenizer"
            )
        _check_range(part, int(hf["vocab_size"]))
        _parse_generation(part)
        if check.vision_family and "images" not in part.names:
            raise ConfigError(
                f"{part.path} was recorded by a version that did not record images, which {check.vision_family} reads: "
                "replay a newer run"
            )
        for number, row in enumerate(iter_rows(part, check.columns)):
            location = f"{part.path}, row {number}"
            try:
                check_turns(row)
            except ValueError as error:
                raise ConfigError(f"{location}, is not a recorded rollout: {error}") from None
            if row["logprob"] is not None and not math.isfinite(row["logprob"]):
                raise ConfigError(f"{location}: a log-prob is not finite")
            if (length := int(row["turn_lengths"].sum())) > config.rollout.max_context:
                raise ConfigError(
                    f"{location}: a rollout of {length} tokens, beyond rollout.max_context="
                    f"{config.rollout.max_context}, for which memory is planned: raise it to that of the recorded run"
                )
            if row["status"] != "aborted" and row["turn_is_action"].any() and not row["greedy"]:
                check(row, location)


class _RecordCheck:
    """Checks that a row has the records that a replay needs."""

    def __init__(self, config: Config, hf: HFConfig) -> None:
        self._routing = routing_shape(hf, config.model.megatron) if config.train.routing_replay else None
        self._indices = index_shape(hf, config)
        self._needs_masks = config.rollout.has_truncated_sampling
        self.vision_family = _vision_family(hf)
        counts = ("support_counts",) if self._needs_masks else ()
        self.columns = (*_CHECKED_COLUMNS, *counts)

    def __call__(self, row: dict[str, Any], location: str) -> None:
        routing, indices, length = self._routing, self._indices, int(row["turn_lengths"].sum())
        if routing is not None:
            expected = [len(routing.moe_layers), routing.topk]
            _check_shape(row["routing_shape"], expected, "routing", "experts", "train.routing_replay", location)
        if indices is not None and length > indices.topk + 1:  # the first topk tokens attend to all keys
            expected, name = [len(indices.layers), indices.topk], "sparse attention indices"
            _check_shape(row["sparse_shape"], expected, name, "keys", "train.sparse_index_replay", location)
        if self.vision_family and row["images"] is not None and row["images"][6::7].min() < 0:
            raise ConfigError(
                f"{location}, has images, which were not recorded: replay a run with track.save_replay_data=true"
            )
        if self._needs_masks and row["support_counts"] is None:
            raise ConfigError(
                f"sampling is truncated by rollout.top_p, top_k or min_p, but {location}, has no sampling masks: "
                "replay a run that recorded them (with the same keys and track.save_replay_data), or reset these keys"
            )


def _check_shape(recorded: Any, expected: list[int], name: str, unit: str, key: str, location: str) -> None:
    """Raise ConfigError unless a record of `unit` has the `expected` layers and number per token."""
    if recorded is not None and recorded[1:].tolist() == expected:
        return
    actual = f"no {name}" if recorded is None else f"that of {recorded[1]} layers with {recorded[2]} {unit} each"
    raise ConfigError(
        f"{key}=true, but {location}, has {actual}, and this model has {expected[0]} layers with {expected[1]}: "
        f"replay a run that recorded it (with {key} and track.save_replay_data), or set {key}=false"
    )


def _check_range(part: Part, vocab_size: int) -> None:
    """Check token ids and log-probs by parquet's column statistics, without reading them."""
    metadata = part.file.metadata
    for row_group in map(metadata.row_group, range(metadata.num_row_groups)):
        for column in map(row_group.column, range(row_group.num_columns)):
            name, statistics = column.path_in_schema.split(".")[0], column.statistics
            if statistics is None or not statistics.has_min_max:
                continue
            if name in ("token_ids", "prompt_token_ids", "support_ids"):
                if statistics.min < 0:
                    raise ConfigError(f"{part.path} is not a file of recorded rollouts: a token id is negative")
                if statistics.max >= vocab_size:
                    raise ConfigError(
                        f"{part.path} has the token {statistics.max}, and the model of model.path has {vocab_size} "
                        "tokens: it was recorded with another model"
                    )
            if name == "logprobs" and not (math.isfinite(statistics.min) and math.isfinite(statistics.max)):
                raise ConfigError(f"{part.path}: a log-prob is not finite")
