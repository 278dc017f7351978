"""Find the layouts of a model that fit a number of GPUs of a given size, and select the best.

Pure: plans memory (`models.memory`) and time (`models.step_time`) of each layout that divides. All roles share all
ranks; for roles on separate ranks (`placement`), a dry run shows the memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megarl.config import Config, ConfigError, ParallelConfig
from megarl.dry_run import config_checks as checks
from megarl.dry_run.model_folders import ServedModels
from megarl.engine.engine_backends import plan_from_config
from megarl.models.family import HFConfig
from megarl.models.memory import StageMemory, plan_memory
from megarl.models.registry import family_of
from megarl.models.step_time import StepTime
from megarl.parallel.placement import check_layout, check_placement
from megarl.types.requirements import Requirements

RECOMPUTE_MODES = ("none", "selective", "full")  # of activation recomputation, the least first
USABLE_FRACTION = 0.93  # of a GPU's memory; the rest is for CUDA, NCCL and fragmentation
TIE_RATIO = 1.1  # layouts whose modelled seconds differ by less count as equal: the model is no more accurate
MAX_EXPERT_RANKS = 64  # upper limit: all-to-alls among more run far below the links' speed, which is not modelled
RULE = (
    f"Rule: of the layouts that fit in {USABLE_FRACTION:.0%} of a GPU, the least modelled seconds a step; of those "
    f"within {TIE_RATIO - 1:.0%} of that, the fewest model parallel ranks (tp x pp x cp), then the fewest of experts "
    f"(ep x etp). Tensor parallel ranks stay in a node, expert parallel ranks are at most {MAX_EXPERT_RANKS}."
)


@dataclass(frozen=True)
class LayoutPlan:
    """A configuration, its memory by stage, and the modelled seconds of a policy's optimizer step by activity."""

    config: Config
    recompute: str
    """Mode of activation recomputation."""
    memory: list[StageMemory]
    seconds: dict[str, float]

    @property
    def peak(self) -> int:
        return max(stage.peak for stage in self.memory)

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Search:
    """Search over layouts.

    config: everything but the layout; its world_size and ranks_per_node apply. recompute_modes: modes to choose from.
    should_size_engines: also choose rollout.tp and rollout.ep, for the smallest engine that fits beside the training
    states. critic_hf, declared: as in `plan_memory`. frozen: config.json of models that are not trained, by role, in
    the policy's layout; their time is not modelled.
    """

    hf: HFConfig
    critic_hf: HFConfig | None
    config: Config
    declared: Requirements
    gpu_bytes: float
    time: StepTime
    recompute_modes: tuple[str, ...] = RECOMPUTE_MODES
    should_size_engines: bool = True
    frozen: Mapping[str, HFConfig] = field(default_factory=dict)

    def plan_stages(self, config: Config) -> list[StageMemory]:
        """Plan the memory of all models. Raises ConfigError if one of them does not divide."""
        frozen = ServedModels(self.frozen, None).stages(config, self.declared)
        return plan_memory(self.hf, config, self.declared, self.critic_hf, frozen)

    def plan_layout(self, parallel: ParallelConfig, recompute: str) -> LayoutPlan:
        """Plan one layout. Raises ConfigError if it does not divide."""
        config = apply_layout(self.hf, self.config, parallel, recompute)
        memory = self.plan_stages(config)
        return LayoutPlan(config, recompute, memory, self.time.seconds(config))

    def fits(self, plan: LayoutPlan) -> bool:
        return plan.peak <= USABLE_FRACTION * self.gpu_bytes

    def find_fitting(self) -> list[LayoutPlan]:
        """Return the layouts that fit, in ascending order of modelled seconds.

        Searches tp inside a node, pp, ep, and cp if a conversation is longer than the token budget. etp is tried only
        if nothing fits without it, and vpp only for the best layout found.
        """
        plans: list[LayoutPlan] = []
        for etp in (1, 2, 4, 8) if family_of(self.hf).num_experts(self.hf) else (1,):
            plans = plans or list(self._iter_fitting(etp))
        if not plans:
            return []
        best = select_best(plans)
        if best.config.parallel.pp > 1:
            for vpp in (2, 3, 4, 6, 8):
                plans += self._try_layout(replace(best.config.parallel, vpp=vpp))
        return sorted(plans, key=lambda plan: plan.total)

    def _iter_fitting(self, etp: int) -> Iterator[LayoutPlan]:
        base = self.config.parallel
        world, experts = base.world_size, family_of(self.hf).num_experts(self.hf)
        context_parallel_sizes = [1]  # up to the first at which the longest conversation fits the token budget
        longest = self.config.rollout.max_context if self.declared.has_rollout else 0
        while context_parallel_sizes[-1] * self.config.train.max_tokens_per_gpu < longest:
            context_parallel_sizes.append(context_parallel_sizes[-1] * 2)
        for tp in divisors(min(world, base.ranks_per_node)):
            for cp in context_parallel_sizes:
                for pp in divisors(world // tp):
                    for ep in [n for n in divisors(experts or 1) if n <= MAX_EXPERT_RANKS]:
                        yield from self._try_layout(replace(base, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp))

    def least_recomputing(self, parallel: ParallelConfig) -> LayoutPlan:
        """Plan a layout with the least recomputation that fits training, and the smallest engine that fits generation.

        With the most recomputation if none fits. Raises ConfigError if the layout does not divide.
        """
        for mode in self.recompute_modes:
            plan = self.plan_layout(parallel, mode)
            if max(stage.training_total for stage in plan.memory) <= USABLE_FRACTION * self.gpu_bytes:
                break
        if self.should_size_engines and self.declared.has_rollout and not self.fits(plan):
            for tp, ep in engine_sizes(self.hf, self.config, self.declared):
                config = replace(plan.config, rollout=replace(plan.config.rollout, tp=tp, ep=ep))
                memory = self.plan_stages(config)
                candidate = replace(plan, config=config, memory=memory)
                if self.fits(candidate):
                    return candidate
        return plan

    def _try_layout(self, parallel: ParallelConfig) -> Iterator[LayoutPlan]:
        """Yield the layout's plan if it divides and fits."""
        try:
            check_layout(parallel)
            plan = self.least_recomputing(parallel)
        except ConfigError:
            return
        if self.fits(plan):
            yield plan


def select_best(plans: list[LayoutPlan]) -> LayoutPlan:
    """Select from layouts that fit, at least one, by `RULE`."""
    least = min(plan.total for plan in plans)

    def ranks(plan: LayoutPlan) -> tuple[int, int, float]:
        layout = plan.config.parallel
        return layout.tp * layout.pp * layout.cp, layout.ep * layout.etp, plan.total

    return min((plan for plan in plans if plan.total <= TIE_RATIO * least), key=ranks)


def check_feasible(hf: HFConfig, config: Config, declared: Requirements) -> None:
    """Raise ConfigError, like a dry run, if a layout does not divide or its weights cannot be synced."""
    check_placement(config, declared.roles, [])
    checks.check_nodes(config, declared)
    checks.check_training_layout(hf, config)
    if declared.has_rollout:
        checks.check_engine(hf, config)
        plan_from_config(hf, config)


def apply_layout(hf: HFConfig, config: Config, parallel: ParallelConfig, recompute: str) -> Config:
    """Return the configuration with this layout, a split of the layers, and one of `RECOMPUTE_MODES`.

    Raises ConfigError if the layers cannot be split.
    """
    layers = int(hf["num_hidden_layers"])
    split = split_layers(layers, parallel.pp, parallel.vpp)
    if split is None:
        fitting = {
            "pp": [n for n in range(1, layers + 1) if split_layers(layers, n, parallel.vpp) is not None],
            "vpp": [n for n in range(1, layers + 1) if split_layers(layers, parallel.pp, n) is not None],
        }
        nearest_sizes = {name: nearest(getattr(parallel, name), sizes) for name, sizes in fitting.items()}
        remedies = [f"{name} to {' or '.join(map(str, sizes))}" for name, sizes in nearest_sizes.items() if sizes]
        raise ConfigError(
            f"{layers} layers cannot be split over pp={parallel.pp} stages of vpp={parallel.vpp} parts, even "
            f"with other numbers on the first and last; the nearest valid settings: {', or '.join(remedies)}"
        )
    megatron = {**split, **recompute_settings(hf, recompute), **config.model.megatron}
    return replace(config, parallel=parallel, model=replace(config.model, megatron=megatron))


def split_layers(num_layers: int, pp: int, vpp: int = 1) -> dict[str, int] | None:
    """Return the keys of `model.megatron` that split the layers over stages.

    Empty if they divide evenly; otherwise fewer layers on the first and last stages, which have the embedding and the
    output layer. None if there is no such split.
    """
    if num_layers % (pp * vpp) == 0:
        return {}
    if pp == 1 or num_layers < pp * vpp or num_layers % vpp:
        return None
    units = num_layers // vpp  # runs of vpp layers, one for each part of a stage
    middle_units = -(-units // pp) if pp > 2 else 0
    while middle_units and units - middle_units * (pp - 2) < 2:
        middle_units -= 1
    if pp > 2 and not middle_units:
        return None
    end_units = units - middle_units * (pp - 2)
    first_units, last_units = end_units - end_units // 2, end_units // 2
    return {
        "num_layers_in_first_pipeline_stage": first_units * vpp,
        "num_layers_in_last_pipeline_stage": last_units * vpp,
    }


def recompute_settings(hf: HFConfig, mode: str) -> dict[str, Any]:
    """Return the keys of `model.megatron` for one of `RECOMPUTE_MODES`.

    Selective recomputes the activation of experts, which needs no matrix product, and the up-projection of latent
    attention; of dense models the MLP.
    """
    if mode == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if mode == "none":
        return {}
    settings = family_of(hf).megatron_config(hf)
    modules = ["moe_act"] if settings.get("num_moe_experts") else ["mlp"]
    modules += ["mla_up_proj"] if settings.get("multi_latent_attention") else []
    return {"recompute_granularity": "selective", "recompute_modules": modules}


def engine_sizes(hf: HFConfig, config: Config, declared: Requirements) -> Iterator[tuple[int, int]]:
    """Yield possible sizes (tp, ep) of an engine, the smallest first, with the largest ep that divides."""
    experts = family_of(hf).num_experts(hf)
    for tp in divisors(config.parallel.world_size):
        for ep in reversed([ep for ep in divisors(tp) if ep == 1 or (experts and experts % ep == 0)]):
            sized = replace(config, rollout=replace(config.rollout, tp=tp, ep=ep))
            try:
                checks.check_nodes(sized, declared)
                checks.check_engine(hf, sized)
            except ConfigError:
                continue
            yield tp, ep
            break


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def nearest(number: int, candidates: list[int]) -> list[int]:
    """Return the largest number below and the smallest above, if any."""
    below, above = [n for n in candidates if n < number], [n for n in candidates if n > number]
    return below[-1:] + above[:1]
