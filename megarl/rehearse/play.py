"""Play one rank of a job for one step, in this process."""

from __future__ import annotations

import dataclasses
import functools
import gc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from megarl.config import Config, ConfigError
from megarl.models.layout_algebra import HFConfig
from megarl.models.lora_tables import adapted_weights
from megarl.models.registry import family_of, load_hf_config
from megarl.rehearse import fake_job
from megarl.rehearse.fake_job import FakeJob
from megarl.rehearse.peak_memory import LiveTensors, PeakMemory
from megarl.rehearse.rank_kinds import Family

if TYPE_CHECKING:
    from megarl.rehearse.rehearsed_flow import PhaseClock, RehearsedFlow
    from megarl.rehearse.step_costs import StepCosts

MIN_LEAK = 1 << 18
"""Bytes by which a step's memory must grow to count as a leak: metrics may keep small tensors."""
NUM_LARGEST = 3
"""Kinds of tensors that are named for a peak or a leak."""


@dataclass(frozen=True)
class PlayedRank:
    """The record of a rank's step."""

    rank: int
    stage: int | None
    """Pipeline stage of the first trained model; None on a rank without one."""
    events: list[dict[str, Any]]
    """Its communication, see `comm_recorder.CommRecorder`; groups have the names of their families. Without the
    transfers of weight syncs, which ranks of a kind do not share."""
    families: dict[str, Family]
    """The groups of the job, by family, in order of creation."""
    peaks: dict[str, int]
    """The most bytes of device memory by phase of the step, including what existed before."""
    size: Any
    """The rehearsed `StepSize`."""
    faults: list[str]
    """Differences between the weight sync and its plan, a line each."""
    nbytes: dict[str, int]
    """Bytes of this rank: of its engine and the weight sync's buffers (`RehearsedEngines.sizes`), `sync_sent` and
    `sync_received`, and of a checkpoint (`checkpoint_play`)."""
    largest: list[LiveTensors]
    """The tensors that take the most bytes at the largest of `peaks`."""
    leaks: list[LiveTensors]
    """The tensors that take more bytes after a second step than after the first; none below `MIN_LEAK` in all."""
    host: int
    """The most bytes of tensors in host memory."""
    flops: int
    """Floating-point operations of the step's matrix products."""


def with_local_model(config: Config) -> Config:
    """Return the configuration with `model.hf_config` in place of a model folder, which need not exist."""
    if not config.model.hf_config:
        return config
    model = dataclasses.replace(config.model, path=config.model.hf_config, hf_config="")
    return dataclasses.replace(config, model=model)


def check(config: Config) -> None:
    """Raise ConfigError for what a rehearsal has no stand-in for."""
    if config.train.fsdp:
        raise ConfigError(
            "--rehearse does not play train.fsdp: Megatron's FSDP would initialise weights, which have no bytes here; "
            "set it to false, or use --dry-run"
        )


@functools.cache
def prepare() -> None:
    """Import everything that `play` needs, patched for a rehearsal; later calls do nothing. Ranks may then fork."""
    torch.set_num_threads(1)
    fake_job.prepare()
    import megarl.megatron
    import megarl.rehearse.megatron_values
    import megarl.rehearse.rehearsed_flow  # noqa: F401
    from megarl.rehearse import kernel_stand_ins

    kernel_stand_ins.install()


def _trains_experts(config: Config, hf: HFConfig) -> bool:
    """Return whether experts are trained if the model has any: without adapters, or if they have adapters."""
    if not config.lora.rank:
        return True
    params = family_of(hf).params(hf, config.parallel.tp, config.parallel.etp, False)
    return any(param.expert is not None for param in adapted_weights(params, config.lora.target_modules))


def play(config: Config, rank: int, finds_leaks: bool = True) -> PlayedRank:
    """Play a step of the rank. Once per process, after `prepare`.

    config: resolved by the dry run, as the run would see it. finds_leaks: play a second, shorter step for `leaks`.
    """
    job = fake_job.join(rank, config.parallel.world_size, config.parallel.ranks_per_node)
    # The tokens of all conversations are the same; real ones may have none in common.
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, share_prefixes=False))
    from megarl.rehearse import megatron_values
    from megarl.rehearse.rehearsed_flow import PhaseClock, RehearsedFlow
    from megarl.rehearse.step_costs import StepCosts, count_flops

    hf = load_hf_config(config.model.path)
    settings = {**family_of(hf).megatron_config(hf), **config.model.megatron}
    memory = StepCosts(records=True)
    clock = PhaseClock(memory)
    flow = RehearsedFlow(config, clock)
    megatron_values.balance_experts()
    megatron_values.align_param_groups(_trains_experts(config, hf))
    with memory:
        flow.build()
        megatron_values.set_stage_shape((flow.size.local_rows, 1, int(settings["hidden_size"])))
        flow.play()
        flops, position, live = count_flops(), memory.position, _count_live(memory)
        flow.save()
        result = _describe(job, flow, clock, memory, flops)
        if finds_leaks:
            flow.play(step=2)
            if _count_live(memory) - live >= MIN_LEAK:
                result = dataclasses.replace(result, leaks=memory.growth(position, NUM_LARGEST))
    return result


def _count_live(memory: PeakMemory) -> int:
    """Return the bytes that exist, without garbage."""
    gc.collect()
    return memory.live


def _describe(job: FakeJob, flow: RehearsedFlow, clock: PhaseClock, memory: StepCosts, flops: int) -> PlayedRank:
    """Return what a rank has done so far."""
    from megarl.rehearse import rehearsed_engines, sync_order

    rank = flow.job.rank
    layouts = [flow.layouts[role] for role in flow.requirements.trained_roles if flow.layouts.get(role) is not None]
    stage = layouts[0].pp_rank if layouts and layouts[0] else None
    faults = sync_order.check_record(job.events, rehearsed_engines.sync_runs(), rank)
    transfers = [transfer for batch in sync_order.recorded_batches(job.events) for transfer in batch]
    for is_send, name in ((True, "sync_sent"), (False, "sync_received")):
        flow.nbytes[name] = sum(transfer.nbytes for transfer in transfers if transfer.is_send == is_send)
    return PlayedRank(
        rank=rank,
        stage=stage,
        events=sync_order.without_transfers(job.events),
        families=job.families,
        peaks=dict(clock.peaks),
        size=flow.size,
        faults=faults,
        nbytes=dict(flow.nbytes),
        largest=memory.largest(NUM_LARGEST),
        leaks=[],
        host=memory.host.peak,
        flops=flops,
    )
