"""Recorded rollouts in the place of generation: which step they are of, and whether they fit a configuration."""

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
"""Columns that say whether a step fits a configuration; about a thousandth of the file."""
_SPEC = re.compile(r"(.+)@(\d{1,9})")


class ReplaySource(NamedTuple):
    """What `rollout.replay` names."""

    folder: Path
    first_step: int = 1
    """The recorded step that is the first one of this run."""

    @staticmethod
    def parse(text: str) -> ReplaySource:
        """`RUN`, or `RUN@7` where the first step is given what was recorded of step 7. Raises ConfigError."""
        found = None if Path(text).is_dir() else _SPEC.fullmatch(text)
        if found is None:
            return ReplaySource(Path(text))
        if int(found[2]) < 1:
            raise ConfigError(f"rollout.replay={text}: steps count from 1")
        return ReplaySource(Path(found[1]), int(found[2]))

    def recorded_step(self, step: int) -> int:
        """The recorded step that a step of this run is given."""
        return self.first_step - 1 + step


def needs_trainer_columns(config: Config) -> bool:
    """Whether a replay reads more than tokens: the experts they went through, or what they could have been."""
    return config.train.replay_routing or config.rollout.has_truncated_sampling


def check_replay(config: Config, hf: HFConfig, vocabulary: str = "", until: int = 0) -> None:
    """The recorded run has the rollouts of all steps that will be taken, up to `until` where that is not 0, in the
    numbers that this configuration has, of its vocabulary and its shape of routing. Reads of each file what is not of
    tokens or words; those are checked when they are read.

    vocabulary: a hash of the tokenizer's, as the log has it; empty where it cannot be told. Raises ConfigError.
    """
    recorded = ReplaySource.parse(config.rollout.replay)
    folder, key = recorded.folder, f"rollout.replay={config.rollout.replay}"
    if not folder.is_dir():
        raise ConfigError(f"{key}: there is no such run folder")
    if not (folder / "rollouts").is_dir():
        raise ConfigError(f"{key} has no folder rollouts; name a run with track.rollouts=true")
    first, last = 1, until or config.run.num_rollout
    if config.run.resumes:  # steps that a checkpoint has behind it are not taken again
        saved = (path.name.removeprefix("step_") for path in Path(config.run.dir, "checkpoints").glob("step_*"))
        first += max((int(number) for number in saved if number.isdecimal()), default=0)
    for step in range(first, last + 1):
        theirs = recorded.recorded_step(step)
        if not step_folder(folder, theirs).is_dir():
            there = recorded_steps(folder)
            have = f"it has steps {there[0]} to {there[-1]}" if there else "it has none"
            remedy = f"lower run.num_rollout={last}, or replay a run of as many steps"
            if there and there[0] > theirs:
                remedy = f"{folder}@{there[0]} begins with its first"
            name = step_folder(folder, theirs).name
            raise ConfigError(f"{key} has no rollouts of step {theirs} ({name}), {have}: {remedy}")
        _check_step(folder, theirs, config, hf, vocabulary)


def _check_step(run_dir: Path, step: int, config: Config, hf: HFConfig, vocabulary: str) -> None:
    """Raise ConfigError where these are not what a step of this configuration would have generated."""
    prompts, samples = config.data.prompts_per_step, config.rollout.samples_per_prompt
    shape = routing_shape(hf, config.model.megatron) if config.train.replay_routing else None
    wanted = None if shape is None else [len(shape.moe_layers), shape.topk]
    counts = ("support_counts",) if config.rollout.has_truncated_sampling else ()
    sizes: Counter[int] = Counter()
    episodes: set[tuple[int, int]] = set()
    for file, part in open_complete_parts(run_dir, step):
        if vocabulary and (theirs := read_vocabulary_hash(part)) and theirs != vocabulary:
            raise ConfigError(
                f"{file} was recorded with another tokenizer than that of model.path={config.model.path}, to which its "
                "token ids are other words; set model.path to a model with the same one"
            )
        _check_range(file, part, int(hf["vocab_size"]))
        for number, row in enumerate(iter_rows(file, part, (*_CHECKED_COLUMNS, "routing_shape", *counts))):
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
            if row["status"] != "aborted" and row["turn_is_action"].any():
                found = row["routing_shape"]
                if wanted is not None and (found is None or found[1:].tolist() != wanted):
                    said = "no routing" if found is None else f"that of {found[1]} layers with {found[2]} experts each"
                    raise ConfigError(
                        f"train.replay_routing=true, but {where}, has {said}, and this model has {wanted[0]} layers "
                        f"with {wanted[1]}: replay a run that recorded it (with train.replay_routing and "
                        "track.records), or set train.replay_routing=false"
                    )
                if counts and row["support_counts"] is None:
                    raise ConfigError(
                        f"sampling is cut off by rollout.top_p, top_k or min_p, but {where}, does not say what could "
                        "have been sampled: replay a run that recorded it (cut off likewise, with track.records), or "
                        "set these keys back"
                    )
            episode = row["group"], row["episode"]
            sizes[row["group"]] += row["episode"] < 0 or episode not in episodes  # each of its branches is a row
            episodes.add(episode)
    asked = dict.fromkeys(range(prompts), samples)
    first = {group: size for group, size in sizes.items() if group in asked}
    # Groups beyond are of further generations of the step, which may have other sizes, and leave some of the first out.
    several = len(first) < len(sizes) and _read_prompts_per_step(run_dir) == prompts
    if sizes != asked and not (several and set(first.values()) <= {samples}):
        raise ConfigError(
            f"{step_folder(run_dir, step)} holds {sizes.total()} rollouts of {len(sizes)} prompts, not {samples} of "
            f"each of {prompts} (rollout.samples_per_prompt, data.prompts_per_step): it is of another configuration"
        )


def _read_prompts_per_step(run_dir: Path) -> int | None:
    """Prompts that a step of a run is given, which is the same for all of its steps; None where it does not say."""
    try:
        return load_config(run_dir / "config.yaml").data.prompts_per_step
    except ConfigError:
        return None


def _check_range(file: Path, part: pq.ParquetFile, words: int) -> None:
    """Look at the least and largest values that parquet keeps of a column, which tell of all of its tokens. words: of
    which the model has that many."""
    for group in range(part.num_row_groups):
        found = part.metadata.row_group(group)
        for column in map(found.column, range(found.num_columns)):
            name, known = column.path_in_schema.split(".")[0], column.statistics
            if known is None or not known.has_min_max:
                continue
            if name in ("token_ids", "prompt_token_ids", "support_ids"):
                if known.min < 0:
                    raise ConfigError(f"{file} is not a file of recorded rollouts: a token id is negative")
                if known.max >= words:
                    raise ConfigError(
                        f"{file} has the token {known.max}, and the model of model.path knows {words} words: it was "
                        "recorded with another model"
                    )
            if name == "logprobs" and not (math.isfinite(known.min) and math.isfinite(known.max)):
                raise ConfigError(f"{file}: a log-prob is not finite")
