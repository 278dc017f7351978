"""One step of a run in a rehearsal: the real controller and the real workers of models, without engines and data.

Every conversation has the same length, and every rank has as many, so that micro-batches are full, and equal on all
ranks. Once the pipeline is full a micro-batch does what the one before did, so an update is played with at most
`EXTRA_MICRO_BATCHES` more than there are stages, and a step with at most `MAX_UPDATES` updates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megarl.config import Config
from megarl.controllers.controller import load_requirements, make_controller
from megarl.flow import HybridFlow
from megarl.megatron.distribution import BatchDispatcher, make_model_rank
from megarl.megatron.micro_batch import padding_units
from megarl.megatron.optimizer import create_states
from megarl.megatron.trainer_model import FP8_ROWS, make_dispatcher
from megarl.models.registry import load_hf_config
from megarl.observe.clock import Clock
from megarl.parallel import ranks, row_exchange
from megarl.parallel.placement import placement_of, role_parallel, split_role
from megarl.parallel.ranks import Job, Ranks
from megarl.rehearse import checkpoint_play
from megarl.rehearse.peak_memory import PeakMemory
from megarl.rehearse.role_stand_ins import (
    DataStandIn,
    EmptyRowExchange,
    EngineStandIn,
    LoaderStandIn,
    RewardStandIn,
    make_items,
)
from megarl.types.requirements import Requirements
from megarl.workers.context import Context
from megarl.workers.model_worker import ModelWorker
from megarl.workers.worker_registry import RegisteredWorker, load_workers

EXTRA_MICRO_BATCHES = 2
MAX_UPDATES = 1


@dataclasses.dataclass(frozen=True)
class StepSize:
    """The size of a rehearsed step, which has no data."""

    length: int  # tokens of each conversation
    local_rows: int  # tokens of a micro-batch on a rank, after context and sequence parallelism
    prompts: int
    short_prompts: int  # of a step with the fewest micro-batches
    samples: int  # of each prompt
    micro_batches: int  # of a data parallel rank in an update
    total_micro_batches: int  # of the real step
    updates: int
    total_updates: int


def size_step(config: Config, requirements: Requirements, dp: int) -> StepSize:
    """Return the size of a rehearsed step, whose conversations have `rollout.max_context` tokens.

    Conversations that no engine generates fill a micro-batch, alone or as a pair.

    dp: data parallel ranks of the trained model.
    """
    parallel, budget = config.parallel, config.train.max_tokens_per_gpu * config.parallel.cp
    samples = config.rollout.samples_per_prompt if requirements.has_rollout else int(requirements.item == "pairs") + 1
    length = config.rollout.max_context if requirements.has_rollout else budget // samples
    per_micro_batch = max(1, budget // length)
    sequences = config.data.prompts_per_step * samples
    total = max(1, sequences * config.run.ppo_epochs // (config.run.num_update * dp * per_micro_batch))
    stages = parallel.pp
    count = min(total, stages + EXTRA_MICRO_BATCHES)
    if parallel.vpp > 1:
        count = max(-(-count // stages), 2 if stages > 3 else 1) * stages  # see `BatchDispatcher.min_trained`
    updates = min(config.run.num_update, MAX_UPDATES)
    played = count * updates * dp * per_micro_batch
    prompts = max(updates, -(-played // samples))
    shortest = (2 if stages > 3 else 1) * stages if parallel.vpp > 1 else 1  # see `BatchDispatcher.min_trained`
    short_prompts = max(updates, -(-played * shortest // count // samples))
    rows = padded_tokens([length] * per_micro_batch, config) // (parallel.cp * parallel.tp)
    return StepSize(length, rows, prompts, short_prompts, samples, count, total, updates, config.run.num_update)


def padded_tokens(lengths: Sequence[int], config: Config) -> int:
    """Return the tokens of a micro-batch of these sequences over all context parallel ranks, with padding."""
    cp, fp8_rows = config.parallel.cp, FP8_ROWS if config.model.megatron.get("fp8") else 1
    unit, multiple = padding_units(config.parallel.tp * fp8_rows, cp)
    tokens = sum(-(-length // unit) * unit for length in lengths)
    return max(1, -(-tokens // multiple)) * multiple


def with_all_ranks(dispatcher: BatchDispatcher, layout: Ranks) -> BatchDispatcher:
    """Return a dispatcher that has the positions of all members of a layout, of which at most this rank's is known.

    Megatron numbers ranks by tp, cp, dp and pp, the first fastest. The layers that other stages replay are not known.
    With dynamic context parallelism, all micro-batches have the largest size, since the stages of a rehearsal cannot
    send each other the shapes of each.
    """
    model_ranks, local = {}, dispatcher.model_ranks.get(layout.job.rank)
    # Of other stages only matters here whether they replay at all; these have some layer.
    others = (0,) if dispatcher.routing_shape else (), (0,) if dispatcher.index_shape else ()
    for index, rank in enumerate(layout.members):
        index, tp_rank = divmod(index, layout.tp)
        index, cp_rank = divmod(index, layout.cp)
        pp_rank, dp_rank = divmod(index, layout.dp)
        position = dataclasses.replace(layout, tp_rank=tp_rank, cp_rank=cp_rank, pp_rank=pp_rank, dp_rank=dp_rank)
        is_like = local is not None and pp_rank == layout.pp_rank
        model_ranks[rank] = make_model_rank(
            position, *((local.replayed_layers, local.indexed_layers) if is_like and local else others)
        )
    return dataclasses.replace(dispatcher, model_ranks=model_ranks, widths=dispatcher.widths[-1:])


def _layout_elsewhere(config: Config, role: str, job: Job) -> Ranks:
    """Return a layout of which this rank is no member, as its first rank sees it."""
    parallel, members = role_parallel(config, role), tuple(placement_of(config).ranks_of(role))
    sizes = {name: getattr(parallel, name) for name in ("tp", "pp", "ep", "cp", "etp", "vpp", "dynamic_cp")}
    dp = len(members) // (parallel.tp * parallel.pp * parallel.cp)
    return Ranks(job=job, members=members, dp=dp, tp_rank=0, pp_rank=0, ep_rank=0, dp_rank=0, **sizes)


class PhaseClock(Clock):
    """A clock that records the peak of device memory in each phase, by the name of the phase."""

    def __init__(self, memory: PeakMemory) -> None:
        super().__init__()
        self.memory = memory
        self.peaks: dict[str, int] = {}

    @contextmanager
    def phase(self, name: str, category: str = "rank") -> Iterator[None]:
        with super().phase(name, category), self.memory.phase() as peak:
            yield
        self.peaks[name] = max(self.peaks.get(name, 0), *peak)


class _Log:
    """Swallows what a step logs."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


class RehearsedFlow(HybridFlow):
    """A flow whose process is one rank of a `fake_job`. config: resolved, with the layout of each role."""

    def __init__(self, config: Config, clock: Clock) -> None:
        super().__init__(config)
        self.clock = clock
        self.requirements = load_requirements(config)
        self.log, self.loader = _Log(), LoaderStandIn()  # type: ignore[assignment]
        self.workers, self.chat = {}, None  # type: ignore[assignment]
        self.nbytes: dict[str, int] = {}
        """Sizes of the step, see `PlayedRank.nbytes`."""

    def build(self) -> None:
        """Create the groups and the workers, and load weights without values."""
        config = self.config
        self.job = ranks._job()
        self.hf_config = load_hf_config(config.model.path)
        self.layouts = ranks.create_role_layouts(config, self.requirements.roles)
        row_exchange._row_exchange = EmptyRowExchange()  # type: ignore[assignment]
        dp = next(
            (layout.dp for role, layout in self.layouts.items() if role in self.requirements.trained_roles and layout),
            1,
        )
        self.size = size_step(config, self.requirements, dp)
        self.data = DataStandIn(self.size.length, self.job.rank, self.job.world)  # type: ignore[assignment]
        run = dataclasses.replace(config.run, num_update=self.size.updates, ppo_epochs=1)
        data = dataclasses.replace(config.data, prompts_per_step=self.size.prompts)
        critic = dataclasses.replace(config.critic, warmup_steps=0)
        self.config = config = dataclasses.replace(config, run=run, data=data, critic=critic)
        self.controller = make_controller(config)
        homes = placement_of(config).ranks_of("rollout") if self.requirements.has_rollout else range(self.job.world)
        leads = list(homes)[:: config.rollout.tp]
        options = {"length": self.size.length, "homes": [self.job.rank, *leads[1:]]}
        registered = {
            role: RegisteredWorker(RewardStandIn if split_role(role)[0] == "reward" else EngineStandIn, {})
            for role in self.requirements.roles
            if split_role(role)[0] in ("rollout", "reward")
        }
        registered = {
            role: dataclasses.replace(item, options=options) if item.worker is EngineStandIn else item
            for role, item in registered.items()
        }
        self.worker_factories = load_workers(config, self.requirements, registered)
        context = Context(
            config=config,
            job=self.job,
            layouts=self.layouts,
            hf_config=self.hf_config,
            chat=None,  # type: ignore[arg-type]
            clock=self.clock,
            run_dir=Path("/nonexistent"),
            num_updates={role: self.controller.num_updates(role) for role in self.requirements.roles},
        )
        for role, factory in self.worker_factories.items():
            worker = self._make_worker(role, factory, context)
            worker.start()
            if isinstance(worker, ModelWorker) and worker.model is not None:
                worker.model.set_dispatcher(with_all_ranks(worker.model.dispatcher, worker.model.ranks))
        for role, worker in self.workers.items():
            if isinstance(worker, ModelWorker) and worker.model is None:
                layout = _layout_elsewhere(config, role, self.job)
                dispatcher = make_dispatcher(self.hf_config, config, layout, worker.role, {})
                worker.distribution = with_all_ranks(dispatcher, layout)
            worker.wait_ready()
            if isinstance(worker, ModelWorker) and worker.model is not None and worker.model.optimizer is not None:
                create_states(worker.model.optimizer)

    def play(self, step: int = 1) -> None:
        """Play the first step, or a later one, which is shorter: it has as few micro-batches as possible."""
        self.step = self.last_step = step
        self.begin_step()
        prompts = self.size.prompts if step == 1 else self.size.short_prompts
        self.controller.step(self, make_items(self.requirements.item, prompts))

    def save(self) -> None:
        """Measure the engines, and save a checkpoint and resume from it if the run has any."""
        for worker in self.workers.values():
            if isinstance(worker, EngineStandIn):
                self.nbytes |= worker.engines.sizes()
        if self.config.run.save_every:
            trained = [self.workers[role] for role in self.requirements.trained_roles]
            models = [item.model for item in trained if isinstance(item, ModelWorker) and item.model is not None]
            with self.clock.phase("save"):
                self.nbytes |= checkpoint_play.play_save(models, self.config.run.save_async)
            with self.clock.phase("resume"):
                self.nbytes |= checkpoint_play.play_resume(models)
