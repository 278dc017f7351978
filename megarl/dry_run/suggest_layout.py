"""Find the layouts of a job's models that fit a number of GPUs of a given size, and select the best.

Pure: plans memory (`models.memory`) and time (`models.step_time`) of each layout that divides. `auto_layout.py` chooses
the layout of a configuration by it, `megarl plan` that of a model without one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, NamedTuple

from megarl.config import AUTO_KEYS, Config, ConfigError, ParallelConfig
from megarl.config.keys import RECOMPUTE_MODES
from megarl.dry_run import config_checks as checks
from megarl.dry_run.job_models import JobModels, raise_failure
from megarl.engine.engine_backends import plan_from_config
from megarl.models.family import HFConfig
from megarl.models.memory import StageMemory
from megarl.models.registry import family_of
from megarl.models.step_time import StepTime
from megarl.parallel.placement import check_placement, placement_of, role_config, role_parallel
from megarl.types.requirements import Requirements

SIZES = ("tp", "pp", "vpp", "cp", "ep", "etp")  # of a layout
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
    """A configuration, its memory by stage of each set of ranks with the same models, and the modelled seconds of the
    policy's optimizer step by activity, which are none if nothing is trained."""

    config: Config
    memory: list[StageMemory]
    seconds: dict[str, float]

    @property
    def recompute(self) -> str:
        """Mode of activation recomputation."""
        return str(self.config.model.megatron.get("recompute_granularity") or "none")

    @property
    def peak(self) -> int:
        return max(stage.peak for stage in self.memory)

    @property
    def training_peak(self) -> int:
        return max(stage.training_total for stage in self.memory)

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


class SearchResult(NamedTuple):
    fitting: list[LayoutPlan]
    """In ascending order of modelled seconds."""
    closest: LayoutPlan
    """The one with the least memory, whether it fits or not; in training if none fits in training."""


@dataclass(frozen=True)
class Search:
    """Search over layouts.

    config: its world_size and ranks_per_node apply. auto: keys to choose, of `AUTO_KEYS`, which are 1 in `config`, or
    unset; all others stay as they are. The layout is `parallel`, that of the actor and of all roles without their own.
    The engines are the smallest that fit beside the training states. gpu_bytes: memory of a rank.
    """

    models: JobModels
    config: Config
    gpu_bytes: float
    time: StepTime
    auto: Collection[str] = frozenset(AUTO_KEYS)

    def plan_layout(self, parallel: ParallelConfig, recompute: str) -> LayoutPlan:
        """Plan one layout with one of `RECOMPUTE_MODES`, or as the configuration says if its recomputation is not to be
        chosen. Raises ConfigError if the layout does not divide."""
        config = apply_layout(self.models.hf, self.config, parallel, recompute)
        return LayoutPlan(config, self._plan_memory(config), self._seconds(config))

    def has_fitting(self) -> bool:
        """Return whether any layout fits with `etp` of 1 or as configured, in the time of few plans if one does."""
        search = replace(self, auto=frozenset(self.auto) - {"recompute", "vpp"})
        if "recompute" in self.auto:
            megatron = {**self.config.model.megatron, **recompute_settings(self.models.hf, "full")}
            model = replace(self.config.model, megatron=megatron)
            search = replace(search, config=replace(self.config, model=model))
        layouts = search._iter_layouts(self._choices("etp", (1,))[0])
        for parallel in sorted(layouts, key=lambda layout: -layout.tp * layout.pp * layout.cp * layout.ep):
            with suppress(ConfigError):
                if search.fits(search._plan_valid(parallel)):
                    return True
        return False

    def fits_training(self, plan: LayoutPlan) -> bool:
        return plan.training_peak <= USABLE_FRACTION * self.gpu_bytes

    def fits(self, plan: LayoutPlan) -> bool:
        return plan.peak <= USABLE_FRACTION * self.gpu_bytes

    def run(self, exhaustive: bool = True) -> SearchResult:
        """Search tp inside a node, pp, ep, and cp if a conversation is longer than the token budget. etp is tried only
        if nothing fits without it, and vpp only for the best layout found.

        exhaustive: find all layouts that fit; otherwise those that `select_best` would compare, in a tenth of the time.
        Raises ConfigError if no layout divides, or if sizes that are not to be chosen do not.
        """
        checks.check_nodes(self.config, self.models.declared)
        if "rollout.tp" not in self.auto:  # `rollout.ep` is 1, or set as well
            self.models.check_engines(self.config, raise_failure)
        plans: list[LayoutPlan] = []
        fitting: list[LayoutPlan] = []
        etps = self._choices("etp", (1, 2, 4, 8) if self._num_experts else (1,))
        errors: list[ConfigError] = []
        for etp in etps:
            if not fitting:
                plans += self._plan_layouts(etp, exhaustive, errors)
                fitting = [plan for plan in plans if self.fits(plan)]
        if not plans:
            raise errors[0]
        best = select_best(fitting) if fitting else plans[0]
        if fitting and "vpp" in self.auto and best.config.parallel.pp > 1:
            for vpp in (2, 3, 4, 6, 8):
                try:
                    plans.append(self._plan_valid(replace(best.config.parallel, vpp=vpp)))
                except ConfigError:
                    continue
            fitting = [plan for plan in plans if self.fits(plan)]
        if trainable := [plan for plan in plans if self.fits_training(plan)]:
            closest = min(trainable, key=lambda plan: plan.peak)
        else:
            closest = min(plans, key=lambda plan: plan.training_peak)
        return SearchResult(sorted(fitting, key=lambda plan: plan.total), closest)

    def least_recomputing(self, parallel: ParallelConfig) -> LayoutPlan:
        """Plan a layout with the least recomputation that fits training, and the smallest engine that fits generation.

        With the most recomputation if training does not fit, or else with the engine with the least memory. Raises
        ConfigError if the layout does not divide.
        """
        for mode in self._modes:
            plan = self.plan_layout(parallel, mode)
            if self.fits_training(plan):
                break
        if self.fits_training(plan) and not self.fits(plan) and self.models.declared.has_engines(self.config):
            for rollout in self._engines():
                config = replace(plan.config, rollout=replace(plan.config.rollout, tp=rollout[0], ep=rollout[1]))
                plan = min(plan, replace(plan, config=config, memory=self._plan_memory(config)), key=lambda p: p.peak)
                if self.fits(plan):
                    break
        return plan

    def _plan_valid(self, parallel: ParallelConfig) -> LayoutPlan:
        """Return `least_recomputing`. Raises ConfigError also if the dry run would reject a layout that fits."""
        check_placement(replace(self.config, parallel=parallel), self.models.declared.roles, [])
        plan = self.least_recomputing(parallel)
        if self.fits(plan):  # slow, and few fit
            self.models.check_training(plan.config, raise_failure)
            self.models.check_engines(plan.config, raise_failure)
        return plan

    @property
    def _num_experts(self) -> int:
        return int(family_of(self.models.hf).num_experts(self.models.hf) or 0)

    @property
    def _modes(self) -> Sequence[str]:
        return RECOMPUTE_MODES if "recompute" in self.auto else RECOMPUTE_MODES[:1]

    def _choices(self, name: str, sizes: Sequence[int]) -> Sequence[int]:
        """Return the sizes to try for a key of `parallel`."""
        return sizes if name in self.auto else (getattr(self.config.parallel, name),)

    def _plan_memory(self, config: Config) -> list[StageMemory]:
        return [stage for stages in self.models.plan_memory(config).values() for stage in stages]

    def _seconds(self, config: Config) -> dict[str, float]:
        declared = self.models.declared
        optimizer = config.critic.optimizer if declared.has_scalar_head else config.actor_optimizer
        return self.time.seconds(role_config(config, declared.main_role), optimizer) if declared.trained_roles else {}

    def _plan_layouts(self, etp: int, exhaustive: bool, errors: list[ConfigError]) -> list[LayoutPlan]:
        """Plan the layouts that divide, the fastest first, as they would be without recomputation. Append to `errors`
        why others do not."""
        candidates: list[tuple[float, ParallelConfig]] = []
        for parallel in self._iter_layouts(etp):
            try:
                config = apply_layout(self.models.hf, self.config, parallel, self._modes[0])
                check_placement(config, self.models.declared.roles, [])
                candidates.append((sum(self._seconds(config).values()), parallel))
            except ConfigError as error:
                errors.append(error)
        plans: list[LayoutPlan] = []
        least = float("inf")
        for seconds, parallel in sorted(candidates, key=itemgetter(0)):
            if not exhaustive and seconds > TIE_RATIO * least:
                break
            try:
                plan = self._plan_valid(parallel)
            except ConfigError as error:
                errors.append(error)
                continue
            plans.append(plan)
            least = min(least, plan.total) if self.fits(plan) else least
        return plans

    def _iter_layouts(self, etp: int) -> Iterator[ParallelConfig]:
        base, declared = self.config.parallel, self.models.declared
        if not declared.trained_roles and not self.models.served.megatron_configs:  # engines only
            yield base
            return
        context_parallel_sizes = [1]  # up to the first at which the longest conversation fits the token budget
        longest = self.config.rollout.max_context if declared.has_rollout else 0
        while context_parallel_sizes[-1] * self.config.train.max_tokens_per_gpu < longest:
            context_parallel_sizes.append(context_parallel_sizes[-1] * 2)
        ranks = role_parallel(self.config, declared.main_role).world_size
        expert_sizes = [n for n in divisors(self._num_experts or 1) if n <= MAX_EXPERT_RANKS]
        for tp in self._choices("tp", divisors(min(ranks, base.ranks_per_node))):
            for cp in self._choices("cp", context_parallel_sizes):
                for pp in self._choices("pp", divisors(max(1, ranks // tp))):
                    for ep in self._choices("ep", expert_sizes):
                        yield replace(base, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)

    def _engines(self) -> Iterator[tuple[int, int]]:
        """Yield possible sizes (tp, ep) of an engine, the smallest first, with the largest ep that divides."""
        hf, rollout = self.models.hf, self.config.rollout
        sizes = divisors(len(placement_of(self.config).ranks_of("rollout")))
        for tp in sizes if "rollout.tp" in self.auto else (rollout.tp,):
            fitting = [ep for ep in divisors(tp) if ep == 1 or (self._num_experts and self._num_experts % ep == 0)]
            for ep in reversed(fitting) if "rollout.ep" in self.auto else (rollout.ep,):
                sized = replace(self.config, rollout=replace(rollout, tp=tp, ep=ep))
                try:
                    checks.check_nodes(sized, self.models.declared)
                    checks.check_engine(hf, sized)
                except ConfigError:
                    continue
                yield tp, ep
                break


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


def layout_text(parallel: ParallelConfig) -> str:
    """Return the sizes above 1: `TP4 EP8`."""
    names = [name for name in SIZES if getattr(parallel, name) > 1]
    return " ".join(f"{name.upper()}{getattr(parallel, name)}" for name in names) or "DP only"


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def nearest(number: int, candidates: list[int]) -> list[int]:
    """Return the largest number below and the smallest above, if any."""
    below, above = [n for n in candidates if n < number], [n for n in candidates if n > number]
    return below[-1:] + above[:1]
