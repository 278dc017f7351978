"""Model the seconds of a configuration's step, and say which single changes of its layout would save the most.

Pure, like `suggest_layout.py`, which applies a layout and plans its memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from megarl.config import Config, ConfigError
from megarl.config.keys import RECOMPUTE_MODES
from megarl.controllers.mini_batches import needs_old_logprobs
from megarl.dry_run import config_checks as checks
from megarl.dry_run.auto_layout import optimizer_step_time
from megarl.dry_run.job_models import JobModels, raise_failure
from megarl.dry_run.suggest_layout import (
    MAX_EXPERT_RANKS,
    USABLE_FRACTION,
    Search,
    recompute_settings,
)
from megarl.dry_run.validation import GPU_SIZES
from megarl.models.rl_step_time import LOGPROBS, UPDATES, Conversations, rl_step_seconds, training_seconds
from megarl.parallel.placement import check_placement, placement_of

NUM_CHANGES = 3
MIN_SAVING = 0.03
"""Share of a step's seconds below which a change is not worth a line."""
_STAGE_KEYS = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")


@dataclass(frozen=True)
class Change:
    """A change of one setting. text: what to change. config: with the change. saving: modelled share of a step's
    seconds that it saves."""

    setting: str
    text: str
    config: Config
    saving: float = 0.0

    def __str__(self) -> str:
        return f"{self.text}: about {self.saving * 100:.0f} % fewer seconds"


def has_modelled_step(models: JobModels, config: Config) -> bool:
    """Return whether a step is one that `step_seconds` models: engines generate for one trained policy."""
    declared = models.declared
    return declared.has_engines(config) and "actor" in declared.trained_roles and not declared.policies


def conversations_of(models: JobModels, config: Config) -> Conversations:
    """Return a step's conversations, assumed to have half of `rollout.max_context` tokens on average, and an eighth of
    that length in the prompt."""
    longest = max(2, config.rollout.max_context)
    prompt, count = max(1, longest // 16), checks.sequences_per_step(config, models.declared)
    return Conversations(count, max(longest / 2, prompt + 1), longest, prompt)


def step_seconds(models: JobModels, config: Config) -> dict[str, float]:
    """Return the modelled seconds of a step by phase, see `rl_step_seconds`, on H100s.

    A critic's log-probs and updates follow the policy's if they share ranks; otherwise the slower of the two counts.
    Raises ConfigError if a layout does not divide.
    """
    roles, conversations = models.declared.roles, conversations_of(models, config)
    needs_policy_logprobs = "critic" in roles or config.kl.apply_to == "reward" or needs_old_logprobs(config)
    passes = int(needs_policy_logprobs) + sum(role in ("reference", "teacher") for role in roles)
    seconds = rl_step_seconds(models.hf, config, conversations, passes)
    if models.critic_hf is not None and "critic" in models.declared.trained_roles:
        critic = training_seconds(models.critic_hf, config, conversations, 1, role="critic")
        placement = placement_of(config)
        shares_ranks = set(placement.ranks_of("critic")) & set(placement.ranks_of("actor"))
        for phase in (LOGPROBS, UPDATES):
            both = seconds[phase], critic[phase]
            seconds[phase] = sum(both) if shares_ranks else max(both)
    return seconds


def best_changes(models: JobModels, config: Config) -> list[Change]:
    """Return the changes that save the most seconds and fit, at most one of a setting: a size halved or doubled, or
    less recomputation.

    A change fits if `parallel.gpu_gb` suffices for it; if unset, the smallest GPU that suffices for `config`.
    """
    total = sum(step_seconds(models, config).values())
    search = Search(models, config, 0.0, optimizer_step_time(models, config), frozenset())
    if config.parallel.gpu_gb:
        gpu_bytes = config.parallel.gpu_gb * 1e9 / config.parallel.ranks_per_gpu
    else:
        needed = search.plan_layout(config.parallel, "none").peak / USABLE_FRACTION
        gpu_bytes = min((size * 1e9 for size in GPU_SIZES if size * 1e9 >= needed), default=needed)
    search = replace(search, gpu_bytes=gpu_bytes)
    changes = []
    for change in _iter_changes(models, config):
        with suppress(ConfigError):
            check_placement(change.config, models.declared.roles, [])
            checks.check_nodes(change.config, models.declared)
            plan = replace(search, config=change.config).plan_layout(change.config.parallel, "none")
            saving = 1 - sum(step_seconds(models, plan.config).values()) / total
            if saving >= MIN_SAVING and search.fits(plan):
                changes.append(replace(change, config=plan.config, saving=saving))
    best: dict[str, Change] = {}
    for change in sorted(changes, key=lambda change: -change.saving):
        if change.setting not in best and len(best) < NUM_CHANGES:
            with suppress(ConfigError):  # slow checks last
                models.check_training(change.config, raise_failure)
                models.check_engines(change.config, raise_failure)
                models.check_weight_syncs(change.config, raise_failure)
                best[change.setting] = change
    return list(best.values())


def _iter_changes(models: JobModels, config: Config) -> Iterator[Change]:
    """Yield the changes to try, whether they divide or not."""
    parallel, rollout, model = config.parallel, config.rollout, config.model

    def resize(setting: str, size: int, changed: Config) -> Change:
        section, name = setting.split(".")
        before = getattr(getattr(config, section), name)
        return Change(setting, f"{setting}={size} rather than {before}", changed)

    limits = {"tp": parallel.ranks_per_node, "ep": MAX_EXPERT_RANKS}
    unsplit = {name: value for name, value in model.megatron.items() if name not in _STAGE_KEYS}
    for name in ("tp", "pp", "ep", "cp"):
        for size in (getattr(parallel, name) // 2, getattr(parallel, name) * 2):
            # A micro-batch holds the longest conversation.
            is_short = name == "cp" and size * config.train.max_tokens_per_gpu < rollout.max_context
            if 1 <= size <= limits.get(name, parallel.world_size) and not is_short:
                changed = replace(config, parallel=replace(parallel, **{name: size}))
                if name == "pp":
                    changed = replace(changed, model=replace(model, megatron=unsplit))
                yield resize(f"parallel.{name}", size, changed)
    for size in (rollout.tp // 2, rollout.tp * 2):
        if size:
            sized = replace(rollout, tp=size, ep=min(rollout.ep, size))
            yield resize("rollout.tp", size, replace(config, rollout=sized))
    size = 2 * rollout.concurrency
    yield resize("rollout.concurrency", size, replace(config, rollout=replace(rollout, concurrency=size)))

    mode = str(model.megatron.get("recompute_granularity") or "none")
    others = {name: value for name, value in model.megatron.items() if not name.startswith("recompute_")}
    for less in RECOMPUTE_MODES[: RECOMPUTE_MODES.index(mode)]:
        settings = others | recompute_settings(models.hf, less)
        text = f"{less.replace('none', 'no')} recomputation rather than {mode}"
        yield Change("recomputation", text, replace(config, model=replace(model, megatron=settings)))


def describe_step(models: JobModels, config: Config) -> list[str]:
    """Return lines about the modelled seconds of a step, and the changes that would save the most; none if they are not
    modelled."""
    if not has_modelled_step(models, config):
        return []
    seconds, mean = step_seconds(models, config), conversations_of(models, config).mean_tokens
    phases = ", ".join(f"{phase} {_format_seconds(value)}" for phase, value in seconds.items())
    total = _format_seconds(sum(seconds.values()))
    lines = [f"modelled on H100s, with {mean:,.0f} tokens per conversation on average: {total} s a step ({phases})"]
    changes = best_changes(models, config)
    lines += [f"- {change}" for change in changes]
    return lines if changes else [*lines, f"- no change of one size would save {MIN_SAVING * 100:.0f} % and fit"]


def _format_seconds(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 10 else f"{seconds:.2g}"
