"""Choose what `parallel.auto` leaves to the program: the layout of the models and the size of the engines.

The choice is a pure function of the configuration, the models' config.json and the memory of a rank. All ranks agree on
the latter before (`flow.py`), so all of them choose the same, and so does a run that resumes in the same world.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megarl.config import Config, ConfigError
from megarl.config.stages import largest_config
from megarl.controllers.controller import load_requirements
from megarl.dry_run import config_checks as checks
from megarl.dry_run import model_folders
from megarl.dry_run.job_models import JobModels, raise_failure
from megarl.dry_run.suggest_layout import (
    SIZES,
    USABLE_FRACTION,
    LayoutPlan,
    Search,
    layout_text,
    select_best,
)
from megarl.engine.engine_backends import engine_backend
from megarl.models import megatron_fields
from megarl.models.memory import StageMemory
from megarl.models.registry import family_of
from megarl.models.step_time import GPUSpec, StepTime
from megarl.parallel import device, rendezvous
from megarl.parallel.placement import check_placement
from megarl.rewards.reward_settings import check_reward
from megarl.types.requirements import Requirements
from megarl.workers.worker_registry import RegisteredWorker, check_roles, is_builtin, worker_options

MAX_WORLD_FACTOR = 64  # of the number of ranks, up to which an error looks for one that fits
_STAGE_KEYS = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
_REMEDIES = {
    "training": "lower train.max_tokens_per_gpu",
    "generation": "lower rollout.concurrency or set rollout.sglang.max_total_tokens, which bound the KV cache, or set "
    "train.offload=true",
    "weight sync": "lower rollout.weight_sync_bucket_mb, or set train.offload=true",
}


@dataclass(frozen=True)
class LayoutChoice:
    """config: the configuration with the chosen keys, and with an empty `parallel.auto`. runner_up: the best of the
    other layouts that fit and are about as fast; None without one."""

    config: Config
    chosen: LayoutPlan
    runner_up: LayoutPlan | None
    gpu_bytes: float

    def describe(self) -> list[tuple[str, str]]:
        """Return rows of (name, value)."""
        rows = [("chosen", _describe_plan(self.chosen, self.gpu_bytes))]
        if self.runner_up is not None:
            rows.append(("runner-up", _describe_plan(self.runner_up, self.gpu_bytes)))
        return rows


def with_job_size(config: Config, num_nodes: int | None = None) -> Config:
    """Return the configuration with the `parallel.world_size` and `ranks_per_node` that `parallel.auto` leaves open.

    They are those of the job that this process is a rank of. Otherwise there are `ranks_per_gpu` ranks for each GPU of
    this machine, or one without a GPU, on each of `num_nodes` nodes; a size that is set counts instead.

    num_nodes: given by a process that starts ranks, whatever job its environment describes; None for any other.
    """
    parallel, sizes = config.parallel, dict[str, Any]()
    is_open = {name: name in parallel.auto for name in ("world_size", "ranks_per_node")}
    if not any(is_open.values()):
        return config
    env = rendezvous.read_launch_env() if num_nodes is None else rendezvous.LaunchEnv(0, 1, False)
    if env.is_launched:
        sizes = {"world_size": env.world, "ranks_per_node": env.local_world or parallel.ranks_per_node}
    else:
        nodes = num_nodes or 1
        if not is_open["ranks_per_node"]:
            ranks = parallel.ranks_per_node
        elif is_open["world_size"]:
            ranks = max(1, device.count() * parallel.ranks_per_gpu)
        elif num_nodes and parallel.world_size % num_nodes == 0:
            ranks = parallel.world_size // num_nodes
        else:  # a job for other machines than this one
            ranks = parallel.ranks_per_node
        sizes = {"world_size": nodes * ranks, "ranks_per_node": ranks}
    sizes = {name: size for name, size in sizes.items() if is_open[name]}
    auto = tuple(key for key in parallel.auto if key not in is_open)
    return replace(config, parallel=replace(parallel, **sizes, auto=auto))


def rank_memory_bytes(config: Config) -> int:
    """Return the bytes of memory of a rank on this machine."""
    parallel = config.parallel
    return device.memory_bytes(min(parallel.world_size, parallel.ranks_per_node), parallel.ranks_per_gpu)


def choose_layout(
    config: Config, registered: Mapping[str, RegisteredWorker], dry_run: bool, gpu_bytes: int = 0
) -> LayoutChoice:
    """Choose the keys in `parallel.auto`. Raises ConfigError if the configuration is invalid, or nothing fits.

    gpu_bytes: memory of a rank if `parallel.gpu_gb` is not set; 0 for that of this machine.
    """
    config = with_job_size(config)
    declared = load_requirements(config)
    check_roles(config, declared, registered)
    if declared.has_rollout:
        engine_backend(config)  # raises for an unknown engine
    models = _read_models(config, declared, registered, dry_run)
    _check_sections(models, config)
    part = (config.parallel.gpu_gb or 0) * 1e9 / config.parallel.ranks_per_gpu
    size = part or gpu_bytes or rank_memory_bytes(config)
    base = _with_open_keys(largest_config(config) if config.stages else config)
    ones: dict[str, Any] = dict.fromkeys(SIZES, 1)
    check_placement(replace(base, parallel=replace(base.parallel, **ones)), declared.roles, [])
    search = Search(models, base, size, optimizer_step_time(models, base), frozenset(config.parallel.auto))
    fitting, closest = search.run(exhaustive=False)
    if not fitting:
        raise _nothing_fits(search, closest)
    try:
        chosen = _select_syncable(models, fitting)
    except ConfigError:  # of the fastest; slower ones may do
        fitting = search.run().fitting
        chosen = _select_syncable(models, fitting)
    others = [plan for plan in fitting if plan.config.parallel != chosen.config.parallel]
    chosen_config = replace(
        config,
        parallel=chosen.config.parallel,
        rollout=replace(config.rollout, tp=chosen.config.rollout.tp, ep=chosen.config.rollout.ep),
        model=replace(config.model, megatron=chosen.config.model.megatron),
    )
    return LayoutChoice(chosen_config, chosen, select_best(others) if others else None, size)


def _check_sections(models: JobModels, config: Config) -> None:
    """Raise ConfigError for settings of other packages that plans cannot read."""
    family = family_of(models.hf)
    is_latent = bool(family.megatron_config(models.hf).get("multi_latent_attention"))
    megatron_fields.check_ddp(config.train.ddp)
    megatron_fields.check(config.model.megatron, is_latent, family.extras(models.hf))
    if models.declared.has_engines(config):
        engine_backend(config).check(models.hf, config)


def _read_models(
    config: Config, declared: Requirements, registered: Mapping[str, RegisteredWorker], dry_run: bool
) -> JobModels:
    warnings: list[str] = []  # `validate` repeats them
    reward = registered.get("reward", RegisteredWorker())
    has_builtin_reward = "reward" in declared.roles and is_builtin(config, declared, "reward", reward)
    if has_builtin_reward:
        check_reward(config, declared, worker_options(config, "reward", reward))
    hf, critic_hf = model_folders.policy_and_critic(config, declared, dry_run, warnings)
    served = model_folders.read_served_models(hf, config, declared, registered, has_builtin_reward, dry_run, warnings)
    return JobModels(hf, critic_hf, served, declared)


def _with_open_keys(config: Config) -> Config:
    """Return the configuration with the keys in `parallel.auto` at their smallest, or unset; and without a division of
    the layers that was meant for another `pp`."""
    auto, model = config.parallel.auto, config.model
    sizes: dict[str, Any] = {name: 1 for name in SIZES if name in auto}
    engine: dict[str, Any] = {"ep": 1} if "rollout.ep" in auto else {}
    if "rollout.tp" in auto:
        engine["tp"] = engine.get("ep", config.rollout.ep)
    dropped = [*(["recompute_"] if "recompute" in auto else []), *(_STAGE_KEYS if "pp" in auto else [])]
    settings = {name: value for name, value in model.megatron.items() if not name.startswith(tuple(dropped))}
    model = replace(model, megatron=settings)
    parallel = replace(config.parallel, auto=(), **sizes)
    return replace(config, parallel=parallel, rollout=replace(config.rollout, **engine), model=model)


def optimizer_step_time(models: JobModels, config: Config) -> StepTime:
    """Return the model of an optimizer step of this configuration, in which a sequence has half of the tokens of
    `rollout.max_context`."""
    run, length = config.run, max(1, config.rollout.max_context // 2)
    updates = max(1, run.num_update // run.ppo_epochs)
    sequences = max(1, checks.sequences_per_step(config, models.declared) // updates)
    sequences *= 2 if models.declared.item == "pairs" else 1
    return StepTime(models.hf, sequences * length, length, GPUSpec())


def _select_syncable(models: JobModels, plans: list[LayoutPlan]) -> LayoutPlan:
    """Select the best layout whose weights can be synced with the engines, and remove better ones from `plans`. Raises
    ConfigError if there is none."""
    while True:
        best = select_best(plans)
        try:
            models.check_weight_syncs(best.config, raise_failure)
            return best
        except ConfigError:
            plans.remove(best)
            if not plans:
                raise


def _describe_plan(plan: LayoutPlan, gpu_bytes: float) -> str:
    parallel, rollout = plan.config.parallel, plan.config.rollout
    recompute = "no recomputation" if plan.recompute == "none" else f"{plan.recompute} recomputation"
    engines = f", engines of TP{rollout.tp} EP{rollout.ep}" if any(stage.generation for stage in plan.memory) else ""
    time = f", modelled {plan.total:.3g} s an update on H100s" if plan.seconds else ""
    memory = f"{plan.peak / 1e9:.3g} of {gpu_bytes / 1e9:.3g} GB"
    return f"{layout_text(parallel)} on {parallel.world_size} ranks, {recompute}{engines}: {memory}{time}"


def _nothing_fits(search: Search, closest: LayoutPlan) -> ConfigError:
    """Return the error for a search in which nothing fits: what the closest layout needs, on how many GPUs something
    fits, and what would need less."""
    search.models.check_training(closest.config, raise_failure)  # keys that the user has set may be what is wrong
    search.models.check_engines(closest.config, raise_failure)
    fullest = max(closest.memory, key=lambda stage: stage.peak)
    phases = {"generation": fullest.generation_total, "weight sync": fullest.weight_sync_total}
    phase, needed = "training", closest.training_peak
    if search.fits_training(closest):
        phase, needed = max(phases, key=lambda name: phases[name]), closest.peak
    world, remedy = find_smallest_world(search, fullest), _REMEDIES[phase]
    if world:
        remedy = f"{world} such ranks are enough (parallel.world_size); or {remedy}"
    parallel = search.config.parallel
    return ConfigError(
        f"parallel.auto: no layout of {parallel.world_size} ranks with {search.gpu_bytes / 1e9:.3g} GB each "
        f"(parallel.gpu_gb) fits {Path(search.config.model.path or search.config.model.hf_config).name}: the closest, "
        f"{layout_text(closest.config.parallel)}, needs {needed / USABLE_FRACTION / 1e9:.3g} GB, in {phase}; "
        f"{remedy}"
    )


def find_smallest_world(search: Search, fullest: StageMemory) -> int:
    """Return the smallest number of ranks, by doubling, for which a layout fits; 0 if there is none up to
    `MAX_WORLD_FACTOR` times as many, or if `placement` names ranks."""
    config = search.config
    if config.placement:
        return 0
    # The states are divided by twice as many ranks at best.
    needed = sum(fullest.states.values()) / (USABLE_FRACTION * search.gpu_bytes)
    factor = 2
    while factor <= MAX_WORLD_FACTOR:
        parallel = replace(config.parallel, world_size=config.parallel.world_size * factor)
        if factor >= needed:
            larger = replace(config, parallel=parallel)
            with suppress(ConfigError):
                checks.check_nodes(larger, search.models.declared)
                if replace(search, config=larger).has_fitting():
                    return parallel.world_size
        factor *= 2
    return 0
