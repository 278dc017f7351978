"""Search, judge and measure the layouts of a model, for `megarl plan` (`plan_command.py`)."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from megarl.config import AUTO_KEYS, Config, ConfigError, ParallelConfig, from_dict
from megarl.config.shipped_files import list_model_configs
from megarl.controllers.controller import load_requirements
from megarl.dry_run.job_models import JobModels
from megarl.dry_run.model_folders import ServedModels
from megarl.dry_run.suggest_layout import (
    RULE,
    SIZES,
    LayoutPlan,
    Search,
    apply_layout,
    check_feasible,
    layout_text,
    recompute_settings,
    select_best,
)
from megarl.dry_run.validation import memory_table, summarize_peak
from megarl.models.family import HFConfig
from megarl.models.host_memory import OFFLOADED_STATES
from megarl.models.memory import StageMemory, plan_memory
from megarl.models.registry import family_of, load_hf_config
from megarl.models.step_time import GPUSpec, StepTime
from megarl.parallel.placement import check_layout
from megarl.utils.addresses import free_port

LAYOUT = dict.fromkeys(SIZES, 1)
ENGINE = {"tp": 1, "ep": 1}
FROZEN = ("reference", "reward", "teacher")
MODELS = list_model_configs()
MAX_NUMBER = 1 << 20  # limit of any number in a layout: GPUs, stages
MAX_ROWS = 8  # layouts to show of those that a search finds
MOST_MEASURED = 4e9  # bytes of states on all ranks; --measure must fit a small machine


def sizes(text: str, allowed: Mapping[str, int], option: str) -> dict[str, int]:
    """Parse `tp=8,pp=16`. Raises ConfigError; a key whose default is 0 and that comes first is required."""
    values = dict(allowed)
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        if key not in allowed:
            raise ConfigError(f"{option} has no {key!r}; it is made of {', '.join(allowed)}, as in tp=8,ep=8")
        if not value.isdecimal() or len(value) > 9 or not 0 < int(value) <= MAX_NUMBER:
            raise ConfigError(f"{option} {key} must be a positive number of at most {MAX_NUMBER}, not {value[:40]!r}")
        values[key] = int(value)
    required = next(iter(allowed))
    if not values[required]:
        raise ConfigError(f"{option} needs {required}=...")
    return values


def model_config(name: str) -> HFConfig:
    """Load a model config by its name in MegaRL, or from a config.json or its folder."""
    if name not in MODELS and not Path(name).exists():
        raise ConfigError(f"--model {name[:200]} is neither a file nor one of {', '.join(MODELS)}")
    return load_hf_config(MODELS.get(name, name))


def parse_frozen(options: argparse.Namespace) -> dict[str, str]:
    """Return the names of the models that are not trained, by role."""
    pairs = [text.partition("=") for text in options.frozen]
    if bad := next((role for role, _, name in pairs if role not in FROZEN or not name), None):
        raise ConfigError(f"--frozen {bad}: write ROLE=MODEL, with one of the roles {', '.join(FROZEN)}")
    return {role: name for role, _, name in pairs}


def base_config(options: argparse.Namespace, world: int, engine: dict[str, int]) -> Config:
    """Return the configuration that all layouts share."""
    frozen = parse_frozen(options)
    roles = {role: {"model": name} for role, name in frozen.items() if role != "reward"}
    return from_dict(
        {
            "algorithm": options.algorithm,
            "roles": roles,
            "reward": {"model": frozen.get("reward", "")},
            **({"kl": {"apply_to": "none"}} if options.algorithm == "distill" else {}),
            "model": {"dtype": options.dtype},
            "parallel": {"world_size": world, "ranks_per_node": options.gpus_per_node},
            "rollout": {
                **engine,
                "max_context": options.context or options.tokens,
                "weight_sync_bucket_mb": options.bucket_mb,
                "sglang": {"max_total_tokens": options.kv_tokens},
            },
            "actor_optimizer": {"offload_fraction": options.offload_fraction},
            "critic": {"optimizer": {"offload_fraction": options.offload_fraction}},
            "train": {
                "fsdp": options.fsdp,
                "max_tokens_per_gpu": options.tokens,
                "logits_chunk_size": options.logits_chunk_size,
            },
        }
    )


def parse_layouts(options: argparse.Namespace) -> list[ParallelConfig]:
    layouts = []
    for text in options.layout:
        layout_sizes: dict[str, Any] = sizes(text, {**LAYOUT, "world": options.gpus or -1}, "--layout")
        world = layout_sizes.pop("world")
        if world < 0:
            raise ConfigError(f"--layout {text} has no world=..., and --gpus is not given")
        layouts.append(ParallelConfig(world, options.gpus_per_node, **layout_sizes))
    return layouts


def layout_table(plans: list[LayoutPlan], search: Search, suggested: LayoutPlan | None) -> Table:
    """Build a table with a row per layout: memory of the fullest rank in GB, modelled seconds of a step."""
    table = Table(box=box.SIMPLE_HEAD)
    byte_columns = ("states", "in training", "generating", "weight sync")
    for name in ("layout", "GPUs", "recompute", "engine", *byte_columns, "fits", "step"):
        table.add_column(name, justify="left" if name in ("layout", "recompute", "engine") else "right", no_wrap=True)
    for layout_plan in plans:
        config, memory = layout_plan.config, layout_plan.memory
        rows = [max(sum(stage.states.values()) for stage in memory), max(stage.training_total for stage in memory)]
        rows += [max(stage.generation_total for stage in memory), max(stage.weight_sync_total for stage in memory)]
        table.add_row(
            layout_text(config.parallel),
            str(config.parallel.world_size),
            layout_plan.recompute,
            f"TP{config.rollout.tp} EP{config.rollout.ep}" if search.models.declared.has_rollout else "-",
            *(f"{num_bytes / 1e9:.1f}" for num_bytes in rows),
            "yes" if search.fits(layout_plan) else "no",
            f"{layout_plan.total:.2f} s",
            style="bold" if layout_plan is suggested else None,
        )
    return table


def print_full_width(console: Console, table: Table) -> None:
    """Print at full width, also on a narrow console such as the 80 columns of a pipe: a truncated number is worse than
    a wrapped line."""
    room = console.options.update(max_width=10_000)
    needed = console.measure(table, options=room).maximum
    Console(file=console.file, width=max(needed, console.width)).print(table)


def reason(layout_plan: LayoutPlan, search: Search, num_fitting: int) -> str:
    """Return a sentence on why this layout is suggested."""
    shares = sorted(((seconds, part) for part, seconds in layout_plan.seconds.items() if seconds), reverse=True)
    spent = ", ".join(
        f"{seconds / layout_plan.total:.0%} {NAMES[part]}"
        for seconds, part in shares
        if seconds > 0.005 * layout_plan.total
    )
    layout = layout_text(layout_plan.config.parallel)
    recomputation = "no recomputation" if layout_plan.recompute == "none" else f"{layout_plan.recompute} recomputation"
    scope = f"of {num_fitting} layouts that fit, by the rule" if num_fitting > 1 else "the only layout that fits"
    return (
        f"Suggested: {layout}, {recomputation}: "
        f"{scope}; "
        f"{layout_plan.peak / 1e9:.1f} of {search.gpu_bytes / 1e9:g} GB at its fullest, and of the modelled "
        f"{layout_plan.total:.2f} s {spent}."
    )


NAMES = {
    "arithmetic": "arithmetic",
    "recomputation": "recomputation",
    "memory": "what is no matrix product",
    "launches": "launching kernels",
    "tensor": "tensor parallel traffic",
    "context": "context parallel traffic",
    "expert": "expert parallel traffic",
    "data": "gradients and weights between replicas",
    "host": "the update of offloaded states on the host",
    "pipeline": "pipeline traffic",
    "waits": "waiting in the pipeline",
}


def as_json(layout_plan: LayoutPlan, search: Search) -> dict[str, Any]:
    config = layout_plan.config
    return {
        "layout": {"world": config.parallel.world_size} | {name: getattr(config.parallel, name) for name in LAYOUT},
        "recompute": layout_plan.recompute,
        "megatron": config.model.megatron,
        "rollout": {"tp": config.rollout.tp, "ep": config.rollout.ep} if search.models.declared.has_rollout else None,
        "peak_bytes": layout_plan.peak,
        "fits": search.fits(layout_plan),
        "modelled_seconds": layout_plan.seconds,
        "stages": [stage_json(stage) for stage in layout_plan.memory],
    }


def stage_json(stage: StageMemory) -> dict[str, Any]:
    parts = {name: getattr(stage, name) for name in ("states", "training", "generation", "weight_sync", "host")}
    return {"stage": stage.stage, "layers": list(stage.layers), **parts}


def plan(options: argparse.Namespace, hf: HFConfig, console: Console) -> int:
    """Judge the given layouts, or search for some. Returns 1 if none fits."""
    layouts = parse_layouts(options)
    engine = sizes(options.rollout, ENGINE, "--rollout") if options.rollout else {}
    worlds = [parallel.world_size for parallel in layouts] or [options.gpus]
    if not worlds[0]:
        raise ConfigError("--gpus is not given; without --layout it is needed, to search for layouts of so many")
    length = (options.context or options.tokens) // 2
    time = StepTime(hf, options.batch_tokens, length, GPUSpec())

    def get_search(world: int) -> Search:
        config = base_config(options, world, engine)
        declared = load_requirements(config)
        critic = hf if "critic" in declared.roles else None
        frozen = {role: model_config(name) for role, name in parse_frozen(options).items()}
        if missing := sorted(frozen.keys() - set(declared.roles)):
            raise ConfigError(
                f"--frozen {missing[0]}: --algorithm {options.algorithm} has no such role; it has "
                f"{', '.join(declared.roles)}"
            )
        if "teacher" in declared.roles and "teacher" not in frozen:
            raise ConfigError(
                f"--algorithm {options.algorithm} has a teacher; give its model by --frozen teacher=MODEL"
            )
        models = JobModels(hf, critic, ServedModels(frozen, None), declared)
        fixed = {"rollout.tp", "rollout.ep"} if engine else set()
        if options.recompute:
            fixed.add("recompute")
            megatron = recompute_settings(hf, options.recompute)
            config = replace(config, model=replace(config.model, megatron=megatron))
        return Search(models, config, options.gpu_gb * 1e9, time, frozenset(AUTO_KEYS) - fixed)

    search = get_search(worlds[0])
    evaluated: list[LayoutPlan] = []
    for parallel in layouts:
        world_search = get_search(parallel.world_size)
        check_layout(parallel)
        candidate = world_search.least_recomputing(parallel)
        check_feasible(hf, candidate.config, world_search.models.declared)
        evaluated.append(candidate)
    max_gpus = options.gpus or max(worlds)
    fitting = [
        candidate
        for candidate in evaluated
        if search.fits(candidate) and candidate.config.parallel.world_size <= max_gpus
    ]
    if not layouts:
        fitting = search.run().fitting
    best = select_best(fitting) if fitting else None
    if best is not None and not layouts:
        check_feasible(hf, best.config, search.models.declared)
    gpus = f"{max_gpus} GPUs of {options.gpu_gb:g} GB"
    if best is None:
        explanation = f"None of these layouts fits {gpus}." if layouts else f"No layout of {gpus} was found that fits."
    else:
        explanation = reason(best, search, len(fitting)) + "\n" + RULE
    if options.json:
        rows = [as_json(candidate, search) for candidate in evaluated or fitting]
        suggested = as_json(best, search)["layout"] if best else None
        text = {"model": options.model, "algorithm": options.algorithm, "gpu_gb": options.gpu_gb}
        print(json.dumps({**text, "layouts": rows, "suggested": suggested, "reason": explanation}, indent=2))
        return 0 if best else 1
    console.print(f"{Path(options.model).name}, {options.algorithm}, {options.dtype}: {gpus}", style="bold")
    rows_shown = evaluated or fitting[:MAX_ROWS]
    if best is not None and not any(candidate is best for candidate in rows_shown):
        rows_shown = [*rows_shown, best]
    if rows_shown:
        print_full_width(console, layout_table(rows_shown, search, best))
    if len(fitting) > len(rows_shown):
        console.print(f"The fastest of {len(fitting)} that fit.\n")
    console.print(explanation + "\n")
    displayed = best or (evaluated[0] if evaluated else None)
    if displayed is not None:
        if displayed.config.model.megatron:
            console.print("model.megatron: " + json.dumps(displayed.config.model.megatron))
        console.print(f"{layout_text(displayed.config.parallel)}:")
        print_full_width(console, memory_table(displayed.memory))
        console.print(summarize_peak(displayed.peak))
    return 0 if best else 1


def model_state_bytes(model: Any) -> dict[str, int]:
    """Return the bytes of a MegatronModel's weights, gradients and optimizer states on this rank, from its tensors.

    Weights include the routers' expert biases. Weights and gradients are Megatron's buffers, which pad parameters to
    multiples of 64 elements, and for Muon each rank's matrices to those of the fullest. The optimizer's are this rank's
    moments, and master weights unless they are the model's own weights. `optimizer, offloaded` are those on the host,
    if any.
    """
    from megarl.megatron import fsdp
    from megarl.megatron.optimizer import device_state_tensors, state_tensors

    weights = [*model.local_shards().values(), *model.adapter_shards().values()]
    weight_storages = {(storage := tensor.untyped_storage()).data_ptr(): storage.nbytes() for tensor in weights}
    states = [tensor for tensor in device_state_tensors(model.optimizer) if tensor.dim()]  # without step counts
    separate = [tensor for tensor in states if tensor.untyped_storage().data_ptr() not in weight_storages]
    on_device = set(map(id, states))
    on_host = [t for t in state_tensors(model.optimizer) if t.dim() and id(t) not in on_device]
    return {
        "weights": sum(weight_storages.values()),
        "gradients": sum(tensor.nbytes for tensor in fsdp.grad_tensors(model.chunks)),
        "optimizer": sum(tensor.nbytes for tensor in separate),
        **({OFFLOADED_STATES: sum(tensor.nbytes for tensor in on_host)} if on_host else {}),
    }


def measure(options: argparse.Namespace, hf: HFConfig, console: Console) -> int:
    """Build the models on this machine's CPU, as all ranks of the layout, and count the bytes of their tensors."""
    layouts = parse_layouts(options) or [ParallelConfig(options.gpus or 1, options.gpus_per_node)]
    if len(layouts) != 1:
        raise ConfigError("--measure builds one layout; give one --layout")
    if options.frozen or options.algorithm == "distill":
        raise ConfigError("--measure builds trained models only; remove --frozen and --algorithm distill")
    base = base_config(options, layouts[0].world_size, {})
    declared = load_requirements(base)
    config = apply_layout(hf, base, layouts[0], options.recompute or "none")
    check_feasible(hf, config, declared)
    critic = hf if "critic" in declared.roles else None
    planned = plan_memory(hf, config, declared, critic)
    world = layouts[0].world_size
    states = sum(sum(stage.states.values()) for stage in planned) * world // len(planned)
    if states > MOST_MEASURED:
        raise ConfigError(
            f"--measure would build {states / 1e9:.0f} GB of states on this machine; give a config.json of the same "
            f"family with fewer layers and experts, of at most {MOST_MEASURED / 1e9:g} GB"
        )
    if "RANK" not in os.environ and world > 1:
        ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
        return subprocess.run(
            [*ranks, "-m", "megarl.dry_run.plan_command", *options.given], env={**os.environ, "OMP_NUM_THREADS": "1"}
        ).returncode
    from megarl.parallel import ranks as parallel_ranks

    os.environ.setdefault("MASTER_PORT", str(free_port()))
    job = parallel_ranks.initialize(config.parallel)
    from megarl.megatron.optimizer import create_states
    from megarl.megatron.trainer_model import MegatronModel

    counted: dict[str, int] = {}
    for role in ("actor", "critic")[: 2 if critic else 1]:
        model = MegatronModel(hf, config, job, role)  # type: ignore[arg-type]
        create_states(model.optimizer)
        counted |= {f"{role} {part}": part_bytes for part, part_bytes in model_state_bytes(model).items() if part_bytes}
        if role == "actor" and "reference weights" in planned[0].host:
            counted["reference weights"] = model.host_copy().size
    everyone = parallel_ranks.all_gather_objects((job.job.rank, job.pp_rank, counted))
    parallel_ranks.shutdown()
    rows = [
        {
            "rank": rank,
            "part": part,
            "predicted": {**planned[stage].states, **planned[stage].host}[part],
            "measured": num_bytes,
        }
        for rank, stage, parts in everyone
        for part, num_bytes in parts.items()
    ]
    worst = max(abs(row["measured"] / row["predicted"] - 1) for row in rows)
    if job.job.rank == 0 and options.json:
        print(json.dumps({"rows": rows, "largest_difference": worst}))
    elif job.job.rank == 0:
        table = Table(box=box.SIMPLE_HEAD)
        for name in ("rank", "part", "predicted", "measured", "difference"):
            table.add_column(name, justify="left" if name == "part" else "right")
        for row in rows:
            difference = f"{row['measured'] / row['predicted'] - 1:+.2%}"
            table.add_row(str(row["rank"]), row["part"], f"{row['predicted']:,}", f"{row['measured']:,}", difference)
        console.print(
            f"{Path(options.model).name}, {options.dtype}: {layout_text(config.parallel)}, bytes", style="bold"
        )
        print_full_width(console, table)
    return 0 if worst <= 0.05 else 1


def run(options: argparse.Namespace) -> int:
    console, hf = Console(highlight=False), model_config(options.model)
    family_of(hf).check(hf)
    return (measure if options.measure else plan)(options, hf, console)
