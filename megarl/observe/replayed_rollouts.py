"""Replay recorded rollouts instead of generating: map steps, and check that a recording fits a configuration."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from megarl.config import Config, ConfigError, load_config
from megarl.models.layout_algebra import HFConfig
from megarl.models.registry import VISION_FAMILIES
from megarl.models.routing import RoutingShape, routing_shape
from megarl.observe.rollout_log import Part, iter_rows, open_complete_parts, recorded_steps, step_folder
from megarl.observe.rollout_table import check_turns

_CHECKED_COLUMNS = (
    *("number", "group", "episode", "status", "logprob"),
    *("turn_lengths", "turn_is_action", "turn_weight_version", "routing_shape"),
)
"""Columns needed to check a step against a configuration; about a thousandth of the file."""
_SPEC = re.compile(r"(.+)@(\d{1,9})")


class ReplaySource(NamedTuple):
    """The recording that `rollout.replay` names."""

    folder: Path
    first_step: int = 1
    """The recorded step that is replayed as step 1."""

    @staticmethod
    def parse(text: str) -> ReplaySource:
        """Parse `RUN`, or `RUN@7` to replay from recorded step 7 on. Raises ConfigError."""
        match = None if Path(text).is_dir() else _SPEC.fullmatch(text)
        if match is None:
            return ReplaySource(Path(text))
        if int(match[2]) < 1:
            raise ConfigError(f"rollout.replay={text}: steps count from 1")
        return ReplaySource(Path(match[1]), int(match[2]))

    def recorded_step(self, step: int) -> int:
        """Return the recorded step that is replayed as step `step` of this run."""
        return self.first_step - 1 + step


def needs_trainer_columns(config: Config) -> bool:
    """Return whether a replay needs `TRAINER_COLUMNS`: routing, or sampling masks."""
    return config.train.routing_replay or config.rollout.has_truncated_sampling


def check_replay(config: Config, hf: HFConfig, vocab_hash: str = "", max_step: int = 0) -> None:
    """Check that the recording has the rollouts of all steps to take and fits the configuration.

    Checks counts, vocabulary and the shape of routing. Tokens and messages are checked when they are replayed.

    Args:
        vocab_hash: hash of the tokenizer's vocabulary, as recorded by the rollout log; empty if unknown.
        max_step: last step to check; 0 for all.

    Raises:
        ConfigError: if the recording does not fit.
    """
    if (name := next(iter(hf.get("architectures") or ()), "")) in VISION_FAMILIES:
        raise ConfigError(
            f"rollout.replay: recordings hold no images, which {name} reads; generate instead, without rollout.replay"
        )
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
    for step in map(source.recorded_step, range(first_step, last_step + 1)):
        if not step_folder(folder, step).is_dir():
            available = recorded_steps(folder)
            available_text = f"it has steps {available[0]} to {available[-1]}" if available else "it has none"
            remedy = f"lower run.num_rollout={last_step}, or replay a run of as many steps"
            if available and available[0] > step:
                remedy = f"{folder}@{available[0]} begins with its first"
            name = step_folder(folder, step).name
            raise ConfigError(f"{key} has no rollouts of step {step} ({name}), {available_text}: {remedy}")
        _check_step(folder, step, config, hf, vocab_hash)


def _check_step(run_dir: Path, step: int, config: Config, hf: HFConfig, vocab_hash: str) -> None:
    """Raise ConfigError unless the step's rollouts could have been generated with this configuration."""
    prompts, samples = config.data.prompts_per_step, config.rollout.samples_per_prompt
    shape = routing_shape(hf, config.model.megatron) if config.train.routing_replay else None
    counts = ("support_counts",) if config.rollout.has_truncated_sampling else ()
    sizes: Counter[int] = Counter()
    episodes: set[tuple[int, int]] = set()
    for part in open_complete_parts(run_dir, step):
        if vocab_hash and part.read_metadata("vocabulary") not in ("", vocab_hash):
            raise ConfigError(
                f"{part.path} was recorded with another tokenizer than that of model.path={config.model.path}; set "
                f"model.path to a model with the same tokenizer"
            )
        _check_range(part, int(hf["vocab_size"]))
        for number, row in enumerate(iter_rows(part, (*_CHECKED_COLUMNS, *counts))):
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
                    f"{config.rollout.max_context}: it is of another configuration"
                )
            if row["status"] != "aborted" and row["turn_is_action"].any():
                _check_trainer_columns(row, location, shape, bool(counts))
            episode = row["group"], row["episode"]
            sizes[row["group"]] += row["episode"] < 0 or episode not in episodes  # an episode has a row per branch
            episodes.add(episode)
    expected = dict.fromkeys(range(prompts), samples)
    first_sizes = {group: size for group, size in sizes.items() if group in expected}
    # Further groups come from resampling within the step: they may have other sizes and replace some of the first.
    has_resampling = len(first_sizes) < len(sizes) and _read_prompts_per_step(run_dir) == prompts
    if sizes != expected and not (has_resampling and set(first_sizes.values()) <= {samples}):
        raise ConfigError(
            f"{step_folder(run_dir, step)} holds {sizes.total()} rollouts of {len(sizes)} prompts, not {samples} of "
            f"each of {prompts} (rollout.samples_per_prompt, data.prompts_per_step): it is of another configuration"
        )


def _check_trainer_columns(row: dict[str, Any], location: str, shape: RoutingShape | None, needs_masks: bool) -> None:
    """Raise ConfigError unless the row has routing of this shape, if any, and sampling masks if they are needed."""
    if shape is not None:
        recorded, expected = row["routing_shape"], [len(shape.moe_layers), shape.topk]
        if recorded is None or recorded[1:].tolist() != expected:
            actual = "no routing"
            if recorded is not None:
                actual = f"that of {recorded[1]} layers with {recorded[2]} experts each"
            raise ConfigError(
                f"train.routing_replay=true, but {location}, has {actual}, and this model has {expected[0]} layers "
                f"with {expected[1]}: replay a run that recorded it (with train.routing_replay and "
                "track.save_replay_data), or set train.routing_replay=false"
            )
    if needs_masks and row["support_counts"] is None:
        raise ConfigError(
            f"sampling is truncated by rollout.top_p, top_k or min_p, but {location}, has no sampling masks: replay a "
            "run that recorded them (with the same keys and track.save_replay_data), or reset these keys"
        )


def _read_prompts_per_step(run_dir: Path) -> int | None:
    """Return the recorded run's `data.prompts_per_step`; None if its configuration cannot be read."""
    try:
        return load_config(run_dir / "config.yaml").data.prompts_per_step
    except ConfigError:
        return None


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
