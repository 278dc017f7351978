"""Check a configuration before anything starts, and estimate what it needs.

`validate` runs at the start of every run, so that a mistake costs seconds instead of a wait in the queue. `--dry-run`
prints its report and stops. It starts no rank, device, Megatron or engine: a laptop checks a recipe for 512 GPUs. Only
a dry run also reads the tokenizer and the data (`data_checks.py`), which a run reads anyway in its first seconds.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from rich import box
from rich.console import Console
from rich.table import Table

from megarl.checkpoint.disk_space import format_bytes
from megarl.config import Config, ConfigError, ParallelConfig, Range, strict
from megarl.config.stages import describe_stage, largest_config, parse_stages
from megarl.controllers.controller import load_requirements, make_controller
from megarl.controllers.rollout_correction import check_correction
from megarl.dry_run import config_checks as checks
from megarl.dry_run import data_checks, model_folders, rollout_checks
from megarl.dry_run.auto_layout import LayoutChoice, choose_layout
from megarl.dry_run.job_models import JobModels, list_other_trained
from megarl.dry_run.model_folders import ServedModels
from megarl.engine.engine_backends import engine_backend, plan_from_config
from megarl.environments.catalog import load_catalog
from megarl.models.family import HFConfig
from megarl.models.host_memory import MEMORY_CHECKPOINTS, PENDING_CHECKPOINT, BatchSize, step_bytes
from megarl.models.lora_tables import adapter_params
from megarl.models.memory import StageMemory, unique_params
from megarl.models.pipeline_stages import stage_layers
from megarl.models.prefix_sharing import reason_against
from megarl.models.registry import family_of, num_trained_mtp, param_count
from megarl.models.routing import routing_shape
from megarl.models.sparse_indices import index_shape
from megarl.observe.guards import check_guards
from megarl.observe.profiler import check_profile
from megarl.observe.replayed_rollouts import check_replay
from megarl.observe.span_export import check_span_export
from megarl.observe.tracker import check_trackers
from megarl.observe.webhook import resolve_webhook
from megarl.parallel import device
from megarl.parallel.placement import (
    check_placement,
    engine_ranks,
    placement_of,
    role_parallel,
    role_settings,
)
from megarl.parallel.policy_configs import (
    check_change,
    list_engine_roles,
    policy_config,
    syncs_adapters,
    syncs_changes,
    takes_turns,
)
from megarl.rewards.functions import load_functions
from megarl.rewards.reward_settings import check_reward
from megarl.sandbox.box import check_backend, probe, to_environment
from megarl.types.requirements import Requirements
from megarl.workers.worker_registry import RegisteredWorker, check_roles, check_user_workers, is_builtin, worker_options


def check_sandbox(config: Config, declared: Requirements, warnings: list[str], dry_run: bool = False) -> None:
    """Export the settings to where `Sandbox.from_environment` reads them, and probe the sandbox if it is needed.

    Raises ConfigError if a configured function or environment runs in a sandbox (attribute `sandboxed`), and none
    works; in a dry run, which may be on another machine, this is a warning.
    """
    check_backend(config.sandbox)
    os.environ.update(to_environment(config.sandbox))
    if not declared.has_rollout:
        return
    sandboxed = [entry.spec for entry in load_catalog(config.rollout).environments.values() if entry.is_sandboxed]
    functions = load_functions(config.reward.functions) if "reward" in declared.roles else {}
    sandboxed += [name for name, function in functions.items() if getattr(function, "sandboxed", False)]
    if not sandboxed:
        return
    try:
        with ThreadPoolExecutor(1) as thread:  # an event loop may be running in this thread
            backend_description = thread.submit(probe, config.sandbox).result()
    except ConfigError as error:
        text = f"{sandboxed[0]} runs code that the policy writes: {error}"
        if not dry_run:
            raise ConfigError(text) from None
        warnings.append(f"the run would be rejected here: {text}")
        return
    if config.sandbox.backend == "none":
        warnings.append(str(backend_description))


Bound = Annotated[float, Range(-1e300, 1e300)]


@dataclass(frozen=True)
class Expectation:
    """The bounds of a metric. A configuration states them under `expect`, which turns an example into a test:

    expect:
      eval/reward_greedy: {min: 0.9}               # its last value
      rollout/logprob_diff: {max: 1.0e-4, step: 5}  # its last value at step 5 or earlier
    """

    synonyms = {"least": "min", "most": "max"}
    min: Bound | None = None
    max: Bound | None = None
    step: Annotated[int, Range(0, 2**31 - 1)] | None = None
    """Use the newest value up to this step; null for the last."""

    def __str__(self) -> str:
        bounds = (("at least", self.min), ("at most", self.max))
        text = " and ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)
        return text if self.step is None else f"{text} at step {self.step}"


def parse_expectations(config: Config) -> dict[str, Expectation]:
    """Return the expectations by metric. Raises ConfigError for invalid ones."""
    expectations = {}
    for metric, tree in config.expect.items():
        expectation: Expectation = strict.build_dataclass(Expectation, tree, f"expect.{metric}.", root=Config)
        if expectation.min is None and expectation.max is None:
            raise ConfigError(f"expect.{metric} has no bounds: set `min`, `max` or both")
        if expectation.step is not None and expectation.step > config.run.num_rollout:
            key = f"expect.{metric}.step={expectation.step}"
            raise ConfigError(f"{key} is beyond run.num_rollout={config.run.num_rollout}")
        expectations[metric] = expectation
    return expectations


def check_expectations(
    expected: Mapping[str, Expectation], metrics: Mapping[int, Mapping[str, float]]
) -> dict[str, tuple[float | None, bool]]:
    """Return each metric's value (None if missing) and whether it meets its expectation. metrics: by step."""
    result = {}
    for name, expectation in expected.items():
        last = math.inf if expectation.step is None else expectation.step
        values = [metrics[step][name] for step in sorted(metrics) if step <= last and name in metrics[step]]
        value = values[-1] if values else None
        least = -math.inf if expectation.min is None else expectation.min
        most = math.inf if expectation.max is None else expectation.max
        result[name] = value, value is not None and least <= value <= most  # NaN fails both bounds
    return result


_FAILED = object()
WIRE_FORMATS = {
    "bf16": "bfloat16",
    "fp32": "float32",
    "fp8": "FP8, quantised at their owner, the rest as bfloat16",
    "int4": "INT4 with a scale per 32 (routed experts), the rest as bfloat16",
}
ESTIMATE_PREFIXES = dict.fromkeys(("activations", "engine KV cache", "reward model activations"), "about ")
ESTIMATE_PREFIXES |= dict.fromkeys(
    ("micro-batches", "reshard staging", PENDING_CHECKPOINT, MEMORY_CHECKPOINTS), "at most "
)
GPU_SIZES = (16, 24, 40, 48, 80, 96, 141, 192, 288)  # GB, commercially available


@dataclass(frozen=True)
class Report:
    """Result of `validate`. Only errors and warnings if a mistake in the layout or the model leaves nothing to plan."""

    errors: list[str]
    warnings: list[str]
    facts: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    """Section -> rows of (name, value)."""
    memory: list[StageMemory] = field(default_factory=list)
    """By pipeline stage of the actor, or of the reward model in training."""
    memory_label: str = ""
    """The ranks of `memory`; empty if there are no others."""
    other_memory: Mapping[str, list[StageMemory]] = field(default_factory=dict)
    """The same for ranks with other roles, by label."""
    choice: LayoutChoice | None = None
    """Choice of the keys that `parallel.auto` leaves to the program."""
    models: JobModels | None = None
    """The models of the job; None with `stages`."""

    @property
    def ok(self) -> bool:
        return not self.errors

    def raise_errors(self) -> None:
        """Raise ConfigError with all mistakes in one line, if there are any."""
        if self.errors:
            raise ConfigError("; and ".join(self.errors))

    def resolve(self, config: Config) -> Config:
        """Return the configuration that was checked, with the keys that the program has chosen. Raises ConfigError like
        `raise_errors`."""
        self.raise_errors()
        return config if self.choice is None else self.choice.config


def validate(
    config: Config,
    dry_run: bool = False,
    registered: Mapping[str, RegisteredWorker] | None = None,
    until: int = 0,
    stage: range | None = None,
    gpu_bytes: int = 0,
) -> Report:
    """Check everything that can be checked without starting anything; every error names the key and the remedy.

    In a dry run the model may be a config.json alone (`model.hf_config`), and missing data files are warnings.
    `registered`: workers that a script has registered; a custom reward worker needs no `reward.functions`. until: the
    step after which the run will stop, 0 for its last. stage: the steps that have this configuration; None for all.
    gpu_bytes: memory of a rank for `parallel.auto`; 0 for that of this machine. Use `Report.resolve` for the run.
    """
    try:
        strict.check_dataclass(config)  # the configuration may have been built in Python
    except ConfigError as error:
        return Report([str(error)], [])
    if config.parallel.auto:
        try:
            choice = choose_layout(config, registered or {}, dry_run, gpu_bytes)
        except ConfigError as error:
            return Report([str(error)], [])
        report = validate(choice.config, dry_run, registered, until, stage)
        return replace(report, facts={"parallel.auto": choice.describe()} | report.facts, choice=choice)
    if config.stages:
        return _validate_stages(config, dry_run, registered, until)
    errors: list[str] = []
    warnings: list[str] = []
    rejected = Report(errors, warnings)
    registered = registered or {}

    def attempt(function: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result, or `_FAILED` after an error."""
        try:
            return function(*arguments)
        except ConfigError as error:
            if (text := str(error)) not in errors:  # report an error of several checks once
                errors.append(text)
            return _FAILED

    def passes(check: Callable[..., Any], *arguments: Any) -> bool:
        return attempt(check, *arguments) is not _FAILED

    # Each check depends on the previous ones: an invalid layout has no data-parallel size.
    declared: Any = attempt(load_requirements, config)
    if declared is _FAILED or not passes(check_roles, config, declared, registered):
        return rejected
    if dry_run:  # a run resolves all of them
        passes(check_user_workers, config, declared, registered)
    is_layout_valid = passes(check_placement, config, declared.roles, warnings)
    is_layout_valid = is_layout_valid and passes(checks.check_nodes, config, declared)
    is_layout_valid = is_layout_valid and passes(checks.check_registered_buffers, config, declared)
    passes(checks.check_run_dir, config)
    passes(parse_expectations, config)
    passes(check_sandbox, config, declared, warnings, dry_run)
    passes(checks.check_algorithm, config, declared, warnings)
    passes(check_correction, config, declared)
    passes(check_guards, config, declared, warnings)
    passes(resolve_webhook, config.track.webhook)
    passes(check_trackers, config.track.trackers)
    passes(check_span_export, config.track.opentelemetry)
    passes(check_profile, config)
    reward = registered.get("reward", RegisteredWorker())
    is_reward_builtin = "reward" in declared.roles and is_builtin(config, declared, "reward", reward)
    if is_reward_builtin:
        is_reward_builtin = passes(check_reward, config, declared, worker_options(config, "reward", reward))
    is_layout_valid = is_layout_valid and passes(rollout_checks.check_asynchronous, config, declared, warnings)
    passes(rollout_checks.check_oversampling, config, declared, warnings)
    passes(rollout_checks.check_expert_balance, config, declared)
    passes(rollout_checks.check_external, config, declared)
    passes(rollout_checks.check_cache_budget, config, declared)
    passes(rollout_checks.check_external_weights_dir, config, declared)
    passes(rollout_checks.check_served_adapters, config, declared)
    is_data_readable = passes(checks.check_data, config, declared, dry_run, warnings)
    is_layout_valid = is_layout_valid and passes(checks.check_schedule, config, declared)
    is_layout_valid = is_layout_valid and passes(checks.check_batch, config, declared, warnings)
    models: Any = attempt(model_folders.policy_and_critic, config, declared, dry_run, warnings)
    if models is _FAILED or not is_layout_valid:
        return rejected
    hf, critic_hf = models
    served: Any = attempt(
        model_folders.read_served_models, hf, config, declared, registered, is_reward_builtin, dry_run, warnings
    )
    if served is _FAILED:
        return rejected
    if declared.has_rollout and not passes(engine_backend, config):
        return rejected
    job_models = JobModels(hf, critic_hf, served, declared)
    does_divide = job_models.check_training(config, passes)
    if dry_run and is_data_readable:  # a run reads all of it next
        _check_chats(hf, config, declared, attempt, warnings)
    if declared.has_rollout:
        passes(engine_backend(config).check_sampling, config)
        passes(checks.check_lengths, hf, config, warnings)
        passes(rollout_checks.check_timeouts, config, warnings)
    does_divide = job_models.check_engines(config, passes) and does_divide
    if declared.has_engines(config):
        if dry_run:
            try:
                engine_backend(config).check_installed()
            except ConfigError as error:  # plans are also made on other machines
                warnings.append(f"the run would be rejected: {error}")
        else:
            for role in list_engine_roles(config, declared.roles):
                passes(_check_platform, config, role)
    elif declared.has_rollout:
        for policy, part in (declared.policies or {"": declared}).items():
            replayed = policy_config(config, f"actor_{policy}") if policy else config
            model = served.engine_configs[f"rollout_{policy}"] if policy else hf
            vocab_hash = model_folders.vocabulary_hash(replayed.model.path)
            passes(check_replay, replayed, model, vocab_hash, until, part.needs_greedy, stage)
        if config.data.eval and config.run.eval_every:
            warnings.append(
                "run.eval_every with rollout.replay: nothing is evaluated, because no engine answers the prompts of "
                "data.eval; evaluate checkpoints with `megarl eval`"
            )
    if not does_divide or not job_models.check_weight_syncs(config, passes):
        return rejected
    passes(checks.check_routing, hf, config, declared)
    passes(checks.check_sparse_indices, hf, config, declared)
    if not dry_run:
        passes(checks.check_disk_space, hf, critic_hf, config, declared, warnings)
    plans = job_models.plan_memory(config)
    (label, memory), *other_plans = plans.items()
    facts = _facts(hf, critic_hf, served, config, declared)
    return Report(errors, warnings, facts, memory, label if other_plans else "", dict(other_plans), models=job_models)


def _check_platform(config: Config, role: str) -> None:
    derived = policy_config(config, role)
    engine_backend(derived).check_platform(derived)


def check_step(hf: HFConfig, config: Config, declared: Requirements) -> None:
    """Check what depends on keys that may change during a run (`config/stages.py`). Raises ConfigError."""
    checks.check_algorithm(config, declared, [])
    checks.check_schedule(config, declared)
    checks.check_batch(config, declared, [])
    rollout_checks.check_external(config, declared)
    rollout_checks.check_cache_budget(config, declared)
    rollout_checks.check_served_adapters(config, declared)
    if declared.has_rollout:
        engine_backend(config).check_sampling(config)
        checks.check_lengths(hf, config, [])
        rollout_checks.check_timeouts(config, [])


def _validate_stages(
    config: Config, dry_run: bool, registered: Mapping[str, RegisteredWorker] | None, until: int
) -> Report:
    """Check the configuration of each stage by itself; facts and memory are those of the largest values of all."""
    try:
        stages = {1: config} | parse_stages(config)
        for changed in stages.values():
            check_change(config, changed, "stages: ")
        planned = largest_config(config)
    except ConfigError as error:
        return Report([str(error)], [])
    errors: list[str] = []
    warnings: list[str] = []
    facts: list[tuple[str, str]] = []
    previous = config
    ends = [*list(stages)[1:], config.run.num_rollout + 1]
    for (step, staged), end in zip(stages.items(), ends, strict=True):
        report = validate(replace(staged, stages={}), dry_run, registered, until, range(step, end))
        prefix = f"from step {step} on: " if step > 1 else ""
        errors += [f"{prefix}{text}" for text in report.errors if text not in errors]
        warnings += [f"{prefix}{text}" for text in report.warnings if text not in warnings]
        if step > 1:
            facts.append((f"from step {step} on", describe_stage(previous, staged)))
        if step > config.run.num_rollout:
            warnings.append(f"stages: the run ends after {config.run.num_rollout} steps, before {step}")
        previous = staged
    if errors:
        return Report(errors, warnings)
    largest = validate(replace(planned, stages={}), dry_run, registered, until, range(0))
    return replace(largest, errors=errors, warnings=warnings, facts=largest.facts | {"stages": facts})


def _check_chats(
    hf: HFConfig, config: Config, declared: Requirements, attempt: Callable[..., Any], warnings: list[str]
) -> None:
    """Check what the tokenizer's chat template makes of tools and data. Skipped if there is only a config.json."""
    if not config.model.path or not Path(config.model.path).is_dir():
        return
    if (chat := attempt(data_checks.read_chat, hf, config, declared)) is _FAILED:
        return
    if declared.has_engines(config):
        attempt(data_checks.check_tool_calls, hf, config, chat, warnings)
    if declared.item not in ("rows", "requests"):
        if attempt(data_checks.check_rows, hf, config, declared, chat, warnings) is not _FAILED:
            attempt(data_checks.check_offered_by_files, config, declared, chat.catalog)


def _facts(
    hf: HFConfig, critic_hf: HFConfig | None, served_models: ServedModels, config: Config, declared: Requirements
) -> dict[str, list[tuple[str, str]]]:
    parallel, rollout, run = config.parallel, config.rollout, config.run
    settings = {**family_of(hf).megatron_config(hf), **config.model.megatron}
    counts, experts = param_count(hf), settings.get("num_moe_experts")
    critic = "none" if critic_hf is None else _count(sum(param_count(critic_hf).values()))
    ranks_per_node = min(parallel.world_size, parallel.ranks_per_node)
    placement, roles = placement_of(config), declared.roles
    layers = [len(stage) for stage in stage_layers(int(settings["num_layers"]), parallel.pp, settings, parallel.vpp)]
    model = [
        ("architecture", family_of(hf).architecture),
        ("parameters", _count(sum(counts.values())) + (f", {_count(counts['experts'])} in experts" if experts else "")),
        *([] if critic_hf is None and served_models.critic_configs else [("critic", critic)]),
        *((role, _count(served_models.count_params(role))) for role in served_models.roles),
    ]
    mtp_layers = num_trained_mtp(hf, config)
    if config.lora.rank:
        adapters = adapter_params(family_of(hf).params(hf, 1, mtp=bool(mtp_layers)), config.lora)
        count = _count(sum(param.size for param in adapters))
        model.append(("trained", f"adapters of rank {config.lora.rank}, {count} parameters of the policy"))
    elif mtp_layers:
        size = sum(param.size * number for param, number in unique_params(hf, mtp=True)) - sum(counts.values())
        model.append(("trained besides", f"{mtp_layers} layer(s) of multi-token prediction, {_count(size)}"))
    layout = [
        ("ranks", f"{parallel.world_size} = {parallel.world_size // ranks_per_node} nodes x {ranks_per_node}"),
        *([] if placement.is_colocated else [("roles", placement.describe(roles))]),
    ]
    if declared.trained_roles:
        parts = f", each in {parallel.vpp} parts" if parallel.vpp > 1 else ""
        layout += _describe_parallel(role_parallel(config, declared.main_role), "", bool(experts))
        layout.append(("layers by stage", " ".join(map(str, layers)) + parts))
    other_models = {} if critic_hf is None else {"critic": critic_hf}
    other_models |= {role: served_models.trained_config(role) for role in list_other_trained(roles)}
    other_models |= served_models.megatron_configs
    for role, role_model in other_models.items():
        has_layout = role != "critic" and role_settings(config, role).parallel
        if placement.ranks_of(role) != placement.ranks_of("actor") or has_layout:
            has_experts = bool(family_of(role_model).num_experts(role_model))
            layout += _describe_parallel(role_parallel(config, role), f"{role}'s ", has_experts)
    sequences, per_epoch = checks.sequences_per_step(config, declared), max(1, run.num_update // run.ppo_epochs)
    unit = checks.batch_unit(declared)
    samples = f" prompts x {rollout.samples_per_prompt}" if declared.has_rollout else ""
    batch = [(f"{unit} a step", f"{config.data.prompts_per_step}{samples}")]
    if declared.trained_roles:
        reason = reason_against(hf, config, device.has_cuda())
        mini_batch = f"{sequences / per_epoch:g} {unit} over dp {checks.data_parallel_size(config, declared)}"
        batch += [
            ("updates a step", f"{run.num_update} = {run.ppo_epochs} epochs x {per_epoch}"),
            ("mini-batch", mini_batch),
            (
                "common prefixes",
                f"computed for each sequence: {reason}" if reason else "computed once in a micro-batch",
            ),
            ("updates in total", f"{run.num_rollout} steps x {run.num_update} = {run.num_rollout * run.num_update}"),
        ]
    else:
        batch.append(("steps", f"{run.num_rollout}"))
    if "critic" in roles and (warmup := config.critic.warmup_steps):
        num_updates = make_controller(config).num_updates(declared.main_role)
        batch.append(("", f"the policy's begin after {warmup} steps: {num_updates}"))
    facts = {"model": model, "layout": layout, "batch": batch}
    if declared.has_engines(config):
        nodes = -(-rollout.tp // ranks_per_node)
        spread = f", each over {nodes} nodes" if nodes > 1 else ""
        if declared.trained_roles:
            facts["weight sync"] = _describe_weight_sync(hf, config, ranks_per_node)
        engines = len(engine_ranks(config))
        facts["engines"] = [
            (f"{engine_backend(config).title} engines", f"{engines} of tp {rollout.tp}, ep {rollout.ep}{spread}"),
            ("conversations at once", f"{rollout.concurrency} an engine, up to {rollout.max_context} tokens each"),
        ]
        if rollout.num_speculative_tokens:
            is_synced = engine_backend(config).layout(hf, config).draft
            weights = "synced with the policy" if is_synced else "as in the checkpoint"
            drafts = f"{rollout.num_speculative_tokens} tokens at a time; the draft layer is {weights}"
            facts["engines"].append(("drafts", drafts))
    for role in (role for role in served_models.engine_configs if role in list_engine_roles(config, roles)):
        derived = policy_config(config, role)
        turns = "; takes turns with others" if takes_turns(config, roles, role) else ""
        facts[f"{role}"] = [
            (
                f"{engine_backend(derived).title} engines",
                f"{len(engine_ranks(derived))} of tp {derived.rollout.tp}, ep {derived.rollout.ep}",
            ),
            (
                "requests at once",
                f"{derived.rollout.concurrency} an engine, up to {derived.rollout.max_context} tokens each{turns}",
            ),
        ]
    if declared.has_rollout:
        facts["host"] = _describe_host_memory(hf, config, declared, bool(experts))
    return facts


def _describe_weight_sync(hf: HFConfig, config: Config, ranks_per_node: int) -> list[tuple[str, str]]:
    """Describe the traffic of a weight sync. ranks_per_node: ranks per machine."""
    plan = plan_from_config(hf, config, syncs_adapters(config))
    transfers, engines = plan.list_transfers(), len(plan.rank_map.engine)
    is_remote = transfers.src // ranks_per_node != transfers.dst // ranks_per_node
    received, over_network = transfers.nbytes.sum() / engines, transfers.nbytes[is_remote].sum() / engines
    network = f", {format_bytes(int(over_network))} of it over the network" if plan.world > ranks_per_node else ""
    num_buckets = 4 if syncs_changes(config) else 2
    wire = WIRE_FORMATS[plan.assignment.wire]
    receiver = "each rank" if plan.rank_map.is_colocated else "each rank of an engine"
    return [
        ("adapters alone are sent as" if syncs_adapters(config) else "weights are sent as", wire),
        (f"{receiver} receives", f"{format_bytes(int(received))} on average{network}"),
        ("rounds", f"{plan.rounds}, staging at most {num_buckets} x {config.rollout.weight_sync_bucket_mb} MiB"),
        *([("between nodes", "changes alone, after the first")] if syncs_changes(config) else []),
    ]


def _describe_host_memory(hf: HFConfig, config: Config, declared: Requirements, experts: bool) -> list[tuple[str, str]]:
    """Estimate the host memory of a step's values per machine and rank, by part, for responses of maximum length."""
    sequences, longest = checks.sequences_per_step(config, declared), config.rollout.max_context
    routing = routing_shape(hf, config.model.megatron) if config.records_routing and experts else None
    parts = step_bytes(config, declared, BatchSize(sequences * longest, sequences, longest), routing)
    ranks_per_node = min(config.parallel.world_size, config.parallel.ranks_per_node)
    share = ranks_per_node / config.parallel.world_size
    if (indices := index_shape(hf, config)) is not None:  # as the rollouts, the batch, and a pass's exchange
        tokens = share * sequences * max(0, longest - indices.topk)
        parts["records of sparse attention"] = round(3 * tokens * indices.token_bytes)
    reads_images = family_of(hf).vision is not None and declared.item == "prompts"
    if reads_images and (num_bytes := checks.mean_image_bytes(config)):  # in the batch, and in a pass's exchange
        parts["images"] = round(2 * share * sequences * num_bytes)
    total_bytes = sum(parts.values())
    num_leads = max(1, ranks_per_node // config.rollout.tp)
    on_rank = format_bytes(total_bytes // ranks_per_node)
    if num_leads < ranks_per_node:
        on_rank = f"{format_bytes(total_bytes // num_leads)} where it leads an engine"
    return [
        (
            "a step on a node",
            f"at most {format_bytes(total_bytes)}, where each answer has {config.rollout.max_context} tokens",
        ),
        ("a rank of it", on_rank),
        *((f"- {name}", format_bytes(amount)) for name, amount in parts.items() if amount),
    ]


def _describe_parallel(parallel: ParallelConfig, prefix: str, experts: bool) -> list[tuple[str, str]]:
    """Describe the parallel layout of a model."""
    context = f" x cp {'up to ' if parallel.dynamic_cp else ''}{parallel.cp}" if parallel.cp > 1 else ""
    dp = parallel.world_size // (parallel.tp * parallel.cp * parallel.pp)
    rows = [(f"{prefix}dense layers", f"tp {parallel.tp}{context} x pp {parallel.pp} x dp {dp}")]
    if experts:
        etp_text = f"etp {parallel.etp} x " if parallel.etp > 1 else ""
        expert_dp = parallel.world_size // (parallel.ep * parallel.etp * parallel.pp)
        rows.append((f"{prefix}experts", f"{etp_text}ep {parallel.ep} x pp {parallel.pp} x dp {expert_dp}"))
    return rows


def render(report: Report) -> str:
    """Render the report for a terminal: facts, memory per rank by part, and warnings. `raise_errors` reports errors."""
    parts: list[Table | str] = []
    if report.facts:
        facts = Table(box=box.SIMPLE_HEAD, show_header=False)
        facts.add_column(style="bold")
        facts.add_column()
        facts.add_column(overflow="fold")
        for section, rows in report.facts.items():
            for i, (name, value) in enumerate(rows):
                facts.add_row(section if i == 0 else "", name, value, end_section=i == len(rows) - 1)
        parts.append(facts)
    if report.memory:
        plans = {report.memory_label: report.memory, **report.other_memory}
        for label, stages in plans.items():
            parts += [f"on {label}", memory_table(stages)] if label else [memory_table(stages)]
        parts.append(summarize_peak(max(stage.peak for stages in plans.values() for stage in stages)))
    parts += [f"warning: {line}" for line in report.warnings]
    parts += ["the configuration is valid"] if report.ok else []
    console = Console(soft_wrap=False)
    with console.capture() as capture:
        for part in parts:
            console.print(part, soft_wrap=isinstance(part, str), markup=False, highlight=False)
    return capture.get().rstrip()


def summarize_peak(peak: int) -> str:
    line = f"the fullest rank needs {format_bytes(peak)}"
    if peak < 4e9:
        return line
    size = next((size for size in GPU_SIZES if peak < 0.93 * size * 1e9), None)  # the rest is for CUDA and NCCL
    return f"{line}: GPUs of {size} GB or more" if size else f"{line}, more than a GPU of {GPU_SIZES[-1]} GB has"


def memory_table(stages: list[StageMemory]) -> Table:
    """Return a table of bytes per rank: parts as rows; as columns the first, the largest inner, and the last stage."""
    shown = [stages[0], *([max(stages[1:-1], key=lambda s: s.peak)] if len(stages) > 2 else []), *stages[1:][-1:]]
    table = Table(box=box.SIMPLE_HEAD, title="memory per rank", title_justify="left")
    table.add_column("")
    for stage in shown:
        name = f"stage {stage.stage}\nlayers {_format_layers(stage.layers)}" if stage.layers else "engines only"
        table.add_column(name, justify="right")
    blocks: list[tuple[list[dict[str, int]], str, list[int]]] = [
        ([s.states for s in shown], "", []),
        ([s.training for s in shown], "in training", [s.training_total for s in shown]),
        ([s.generation for s in shown], "in generation", [s.generation_total for s in shown]),
        ([s.weight_sync for s in shown], "in weight sync", [s.weight_sync_total for s in shown]),
        *(
            (
                [s.other_syncs[actor] for s in shown],
                f"in weight sync of the {actor}",
                [s.other_sync_total(actor) for s in shown],
            )
            for actor in shown[0].other_syncs
        ),
        *(
            (
                [s.other_engines[role] for s in shown],
                f"while the {role} is awake",
                [s.other_engine_total(role) for s in shown],
            )
            for role in shown[0].other_engines
        ),
        ([s.host for s in shown], "", []),
    ]
    counts = Counter(name for parts, title, _ in blocks if title for name in parts[0])
    for parts, title, totals in blocks:
        for name in parts[0]:
            suffix = " (host)" if parts[0] is shown[0].host else ""
            if counts[name] > 1 and title:  # the same part in several phases, which do not add up
                suffix = f", {title}"
            prefix = "about " if name.endswith("KV cache") else ESTIMATE_PREFIXES.get(name, "")
            cells = [prefix + format_bytes(part[name]) if part[name] else "-" for part in parts]
            table.add_row(name + suffix, *cells)
        if totals and parts[0]:
            table.add_row(title, *map(format_bytes, totals), style="bold", end_section=True)
    return table


def _format_layers(layers: tuple[int, ...]) -> str:
    """Format layer ranges: 0-3, or 0-1, 8-9 for a stage in several parts; of many parts the first and the last."""
    starts = [layer for i, layer in enumerate(layers) if i == 0 or layer != layers[i - 1] + 1]
    ends = [layer for i, layer in enumerate(layers) if i == len(layers) - 1 or layer != layers[i + 1] - 1]
    spans = [f"{start}-{end}" if start < end else str(start) for start, end in zip(starts, ends, strict=True)]
    return ", ".join(spans if len(spans) < 3 else [spans[0], "...", spans[-1]])


def _count(number: int) -> str:
    return f"{number / 1e9:.1f} B" if number >= 1e9 else f"{number / 1e6:.2f} M"
