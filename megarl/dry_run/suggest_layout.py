"""Which layouts of a model fit so many GPUs of such a size, and which of them to take.

Pure, as the dry run is: for each layout that divides, plans of memory (`models.memory`) and time (`models.step_time`).
All roles share all ranks here; of roles on ranks of their own (`placement`) a dry run shows the memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from megarl.config import Config, ConfigError, ParallelConfig
from megarl.dry_run import settings as checks
from megarl.models.family import HFConfig
from megarl.models.memory import StageMemory, plan_memory
from megarl.models.registry import family_of
from megarl.models.step_time import StepTime
from megarl.parallel.placement import check_layout, check_placement
from megarl.reshard.plan.from_config import plan_from_config
from megarl.types.requirements import Requirements

RECOMPUTE_MODES = ("none", "selective", "full")  # of recomputing activations, the least first
USABLE_FRACTION = 0.93  # of a GPU's memory; the rest is for CUDA, NCCL and what the allocator cannot use
TIE_RATIO = 1.1  # layouts whose modelled seconds differ by less are taken for equal: the model is no better than that
MAX_EXPERT_RANKS = 64  # that are tried: all-to-alls among more run far below the links' speed, which is not modelled
RULE = (
    f"Rule: of the layouts that fit in {USABLE_FRACTION:.0%} of a GPU, the least modelled seconds a step; of those within "
    f"{TIE_RATIO - 1:.0%} of that, the fewest model parallel ranks (tp x pp x cp), then the fewest of experts (ep x etp). "
    f"Tensor parallel ranks stay in a node, expert parallel ranks are at most {MAX_EXPERT_RANKS}."
)


@dataclass(frozen=True)
class LayoutPlan:
    """A configuration with its memory by stage, and the modelled seconds of an optimizer step of the policy by what
    they are spent on. `way`: how activations are recomputed."""

    config: Config
    recompute: str
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
    """config: what is the same of all layouts; its world_size and ranks_per_node are meant. ways: of recomputing that
    may be chosen from. engines: choose rollout.tp and rollout.ep too, the smallest engine that fits beside the states.
    critic_hf, declared: as for `plan_memory`."""

    hf: HFConfig
    critic_hf: HFConfig | None
    config: Config
    declared: Requirements
    gpu_bytes: float
    time: StepTime
    recompute_modes: tuple[str, ...] = RECOMPUTE_MODES
    should_size_engines: bool = True

    def plan_layout(self, parallel: ParallelConfig, way: str) -> LayoutPlan:
        """Raises ConfigError where the layout does not divide."""
        config = apply_layout(self.hf, self.config, parallel, way)
        return LayoutPlan(
            config, way, plan_memory(self.hf, config, self.declared, self.critic_hf), self.time.seconds(config)
        )

    def fits(self, one: LayoutPlan) -> bool:
        return one.peak <= USABLE_FRACTION * self.gpu_bytes

    def fit_engine(self, one: LayoutPlan) -> LayoutPlan:
        """With the smallest engine that fits beside the states, or as it is."""
        if self.should_size_engines and self.declared.has_rollout and not self.fits(one):
            for tp, ep in engine_sizes(self.hf, self.config, self.declared):
                config = replace(one.config, rollout=replace(one.config.rollout, tp=tp, ep=ep))
                memory = plan_memory(self.hf, config, self.declared, self.critic_hf)
                other = replace(one, config=config, memory=memory)
                if self.fits(other):
                    return other
        return one

    def find_fitting(self) -> list[LayoutPlan]:
        """The layouts that fit, the least modelled seconds first.

        Over tp inside a node, pp, ep, and cp where a conversation is longer than the token budget. etp is tried where
        nothing fits without it, and vpp for the best layout of those that fit.
        """
        found: list[LayoutPlan] = []
        for etp in (1, 2, 4, 8) if family_of(self.hf).num_experts(self.hf) else (1,):
            found = found or list(self._iter_fitting(etp))
        if not found:
            return []
        top = select_best(found)
        if top.config.parallel.pp > 1:
            for vpp in (2, 3, 4, 6, 8):
                found += self._try_layout(replace(top.config.parallel, vpp=vpp))
        return sorted(found, key=lambda one: one.total)

    def _iter_fitting(self, etp: int) -> Iterator[LayoutPlan]:
        base = self.config.parallel
        world, experts = base.world_size, family_of(self.hf).num_experts(self.hf)
        for tp in divisors(min(world, base.ranks_per_node)):
            for cp in self._context_parallel_sizes():
                for pp in divisors(world // tp):
                    for ep in [n for n in divisors(experts or 1) if n <= MAX_EXPERT_RANKS]:
                        yield from self._try_layout(replace(base, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp))

    def least_recomputing(self, parallel: ParallelConfig) -> LayoutPlan:
        """With the least recomputation with which training fits, and the smallest engine with which generating does;
        where it does not fit, with the most. Raises ConfigError where the layout does not divide."""
        for way in self.recompute_modes:
            one = self.plan_layout(parallel, way)
            if max(stage.training_total for stage in one.memory) <= USABLE_FRACTION * self.gpu_bytes:
                break
        return self.fit_engine(one)

    def _try_layout(self, parallel: ParallelConfig) -> Iterator[LayoutPlan]:
        """The layout, if it divides and fits."""
        try:
            check_layout(parallel)
            one = self.least_recomputing(parallel)
        except ConfigError:
            return
        if self.fits(one):
            yield one

    def _context_parallel_sizes(self) -> list[int]:
        """Context parallel sizes, up to where a rank has no more of the longest conversation than of a micro-batch."""
        sizes = [1]
        longest = self.config.rollout.max_context if self.declared.has_rollout else 0
        while sizes[-1] * self.config.train.token_budget < longest:
            sizes.append(sizes[-1] * 2)
        return sizes


def select_best(found: list[LayoutPlan]) -> LayoutPlan:
    """By `RULE`, of layouts that fit, of which there must be one."""
    least = min(one.total for one in found)

    def ranks(one: LayoutPlan) -> tuple[int, int, float]:
        layout = one.config.parallel
        return layout.tp * layout.pp * layout.cp, layout.ep * layout.etp, one.total

    return min((one for one in found if one.total <= TIE_RATIO * least), key=ranks)


def check_feasible(hf: HFConfig, config: Config, declared: Requirements) -> None:
    """Raise ConfigError, as a dry run would, for a layout that does not divide, or whose weights cannot be pushed."""
    check_placement(config, declared.roles, [])
    checks.check_nodes(config, declared)
    checks.check_training_layout(hf, config)
    if declared.has_rollout:
        checks.check_engine(hf, config)
        plan_from_config(hf, config)


def apply_layout(hf: HFConfig, config: Config, parallel: ParallelConfig, way: str) -> Config:
    """The configuration in this layout, with the layers dealt out and activations recomputed in one of `WAYS`.

    Raises ConfigError where no way to deal out the layers is known.
    """
    layers = int(hf["num_hidden_layers"])
    split = split_layers(layers, parallel.pp, parallel.vpp)
    if split is None:
        some = range(1, layers + 1)
        able = {
            "pp": nearest(parallel.pp, [n for n in some if split_layers(layers, n, parallel.vpp) is not None]),
            "vpp": nearest(parallel.vpp, [n for n in some if split_layers(layers, parallel.pp, n) is not None]),
        }
        remedies = [f"{name} to {' or '.join(map(str, sizes))}" for name, sizes in able.items() if sizes]
        raise ConfigError(
            f"{layers} layers cannot be dealt out to pp={parallel.pp} stages of vpp={parallel.vpp} parts, even with "
            f"other numbers on the first and last; the nearest that can: set {', or '.join(remedies)}"
        )
    megatron = {**split, **recompute_settings(hf, way), **config.model.megatron}
    return replace(config, parallel=parallel, model=replace(config.model, megatron=megatron))


def split_layers(num_layers: int, pp: int, vpp: int = 1) -> dict[str, int] | None:
    """Keys of `model.megatron` with which the layers divide: none where they do evenly, else fewer on the first and
    last stage, which have the embedding and the output layer; None where there is no such way."""
    if num_layers % (pp * vpp) == 0:
        return {}
    if pp == 1 or num_layers < pp * vpp or num_layers % vpp:
        return None
    units = num_layers // vpp  # runs of vpp layers, one for each part of a stage
    if pp == 2:
        first, last = units - units // 2, units // 2
    else:
        middle = -(-units // pp)
        while middle and units - middle * (pp - 2) < 2:
            middle -= 1
        ends = units - middle * (pp - 2)
        first, last = ends - ends // 2, ends // 2
        if not middle:
            return None
    return {"num_layers_in_first_pipeline_stage": first * vpp, "num_layers_in_last_pipeline_stage": last * vpp}


def recompute_settings(hf: HFConfig, way: str) -> dict[str, Any]:
    """Keys of `model.megatron` for one of `WAYS`. Selective: the products of experts' gates, which cost no matrix
    product to make again, and what latent attention projects up; of dense layers the MLP."""
    if way == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if way == "none":
        return {}
    settings = family_of(hf).megatron_config(hf)
    modules = ["moe_act"] if settings.get("num_moe_experts") else ["mlp"]
    modules += ["mla_up_proj"] if settings.get("multi_latent_attention") else []
    return {"recompute_granularity": "selective", "recompute_modules": modules}


def engine_sizes(hf: HFConfig, config: Config, declared: Requirements) -> Iterator[tuple[int, int]]:
    """Sizes (tp, ep) that an engine can have, the smallest first, its experts dealt out as far as they divide."""
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


def nearest(number: int, of: list[int]) -> list[int]:
    """The largest below and the smallest above, where there are such."""
    below, above = [n for n in of if n < number], [n for n in of if n > number]
    return below[-1:] + above[:1]
