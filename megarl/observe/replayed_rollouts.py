"""Replay recorded rollouts instead of generating: map steps, and check that a recording fits a configuration."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq

from megarl.config import Config, ConfigError, load_config
from megarl.models.layout_algebra import HFConfig
from megarl.models.routing import routing_shape
from megarl.observe.rollout_log import iter_rows, open_complete_parts, read_vocabulary_hash, recorded_steps, step_folder
from megarl.observe.rollout_table import check_turns

_CHECKED_COLUMNS = (
    "number",
    "group",
    "episode",
    "status",
    "logprob",
    "turn_lengths",
    "turn_is_action",
    "turn_weight_version",
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

    Checks counts, vocabulary and the shape of routing. Reads only `_CHECKED_COLUMNS` and the like, not tokens and
    messages, which are checked when they are replayed.

    Args:
        vocab_hash: hash of the tokenizer's vocabulary, as recorded by the rollout log; empty if unknown.
        max_step: last step to check; 0 for all.

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
    for step in range(first_step, last_step + 1):
        recorded_step = source.recorded_step(step)
        if not step_folder(folder, recorded_step).is_dir():
            available = recorded_steps(folder)
            available_text = f"it has steps {available[0]} to {available[-1]}" if available else "it has none"
            remedy = f"lower run.num_rollout={last_step}, or replay a run of as many steps"
            if available and available[0] > recorded_step:
                remedy = f"{folder}@{available[0]} begins with its first"
            name = step_folder(folder, recorded_step).name
            raise ConfigError(f"{key} has no rollouts of step {recorded_step} ({name}), {available_text}: {remedy}")
        _check_step(folder, recorded_step, config, hf, vocab_hash)


def _check_step(run_dir: Path, step: int, config: Config, hf: HFConfig, vocab_hash: str) -> None:
    """Raise ConfigError unless the step's rollouts could have been generated with this configuration."""
    prompts, samples = config.data.prompts_per_step, config.rollout.samples_per_prompt
    shape = routing_shape(hf, config.model.megatron) if config.train.routing_replay else None
    expected_shape = None if shape is None else [len(shape.moe_layers), shape.topk]
    counts = ("support_counts",) if config.rollout.has_truncated_sampling else ()
    sizes: Counter[int] = Counter()
    episodes: set[tuple[int, int]] = set()
    for file, part in open_complete_parts(run_dir, step):
        if vocab_hash and (recorded_hash := read_vocabulary_hash(part)) and recorded_hash != vocab_hash:
            raise ConfigError(
                f"{file} was recorded with another tokenizer than that of model.path={config.model.path}; set "
                f"model.path to a model with the same tokenizer"
            )
        _check_range(file, part, int(hf["vocab_size"]))
        for number, row in enumerate(iter_rows(file, part, (*_CHECKED_COLUMNS, "routing_shape", *counts))):
            location = f"{file}, row {number}"
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
                recorded_routing = row["routing_shape"]
                if expected_shape is not None and (
                    recorded_routing is None or recorded_routing[1:].tolist() != expected_shape
                ):
                    recorded_shape = (
                        "no routing"
                        if recorded_routing is None
                        else f"that of {recorded_routing[1]} layers with {recorded_routing[2]} experts each"
                    )
                    raise ConfigError(
                        f"train.routing_replay=true, but {location}, has {recorded_shape}, and this model has "
                        f"{expected_shape[0]} layers with {expected_shape[1]}: replay a run that "
                        "recorded it (with train.routing_replay and track.save_replay_data), or set "
                        "train.routing_replay=false"
                    )
                if counts and row["support_counts"] is None:
                    raise ConfigError(
                        f"sampling is truncated by rollout.top_p, top_k or min_p, but {location}, has no sampling "
                        "masks: replay a run that recorded them (with the same keys and track.save_replay_data), or "
                        "reset these keys"
                    )
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


def _read_prompts_per_step(run_dir: Path) -> int | None:
    """Return the recorded run's `data.prompts_per_step`; None if its configuration cannot be read."""
    try:
        return load_config(run_dir / "config.yaml").data.prompts_per_step
    except ConfigError:
        return None


def _check_range(file: Path, part: pq.ParquetFile, vocab_size: int) -> None:
    """Check token ids and log-probs by parquet's column statistics, without reading them. words: vocabulary size."""
    for group in range(part.num_row_groups):
        row_group = part.metadata.row_group(group)
        for column in map(row_group.column, range(row_group.num_columns)):
            name, statistics = column.path_in_schema.split(".")[0], column.statistics
            if statistics is None or not statistics.has_min_max:
                continue
            if name in ("token_ids", "prompt_token_ids", "support_ids"):
                if statistics.min < 0:
                    raise ConfigError(f"{file} is not a file of recorded rollouts: a token id is negative")
                if statistics.max >= vocab_size:
                    raise ConfigError(
                        f"{file} has the token {statistics.max}, and the model of model.path has {vocab_size} tokens: "
                        "it was recorded with another model"
                    )
            if name == "logprobs" and not (math.isfinite(statistics.min) and math.isfinite(statistics.max)):
                raise ConfigError(f"{file}: a log-prob is not finite")
