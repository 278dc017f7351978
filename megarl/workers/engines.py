"""The engines of the job as one: where they are, when they are awake, the weights they have, and which are lost."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

from megarl.config import ConfigError
from megarl.engine.engine_loss import EngineError
from megarl.engine.restart import EngineRestart
from megarl.engine.sglang_engine import Engine
from megarl.observe.clock import REMOTE
from megarl.parallel import device, ranks
from megarl.parallel.placement import engine_ranks, placement_of, role_parallel
from megarl.workers.actor import ActorWorker
from megarl.workers.context import Context
from megarl.workers.recovery import EngineRecovery
from megarl.workers.weight_sync import WeightSync

Member = TypeVar("Member")
Result = TypeVar("Result")


class Engines:
    """Of `rollout.tp` ranks each, one behind the other on the role's ranks; the first rank of one leads it. An engine
    across machines has processes on each, started by the first of its ranks there. What is public is for all ranks of
    the job together, unless it says otherwise.
    """

    def __init__(self, context: Context) -> None:
        self.config, self.job, self.clock, self._context = context.config, context.job, context.clock, context
        tp, here = self.config.rollout.tp, self.config.parallel.ranks_per_node
        self.engine_ranks = engine_ranks(self.config)
        """The ranks of each."""
        self._host_groups = [ranks.new_host_group(members) for members in self.engine_ranks]
        mine = [index for index, members in enumerate(self.engine_ranks) if self.job.rank in members]
        self.engine_index = mine[0] if mine else None
        """Which engine this rank belongs to; None for none."""
        self._position = self.engine_ranks[mine[0]].index(self.job.rank) if mine else -1
        self.engine: Engine | None = None
        """This rank's, where it has processes of it."""
        self.weight_sync: WeightSync | None = None
        """None where there is no actor: engines keep the weights that they have loaded themselves."""
        self.version = 0
        self._actor: ActorWorker | None = None
        """Whose weights they have; None where they have those that they loaded."""
        if self.config.rollout.replay:
            return
        addresses = ranks.all_gather_objects(f"{ranks.node_address()}:{ranks.free_port()}")
        if self.engine_index is not None and self._position % min(tp, here) == 0:
            self.engine = Engine(
                self.config,
                self.engine_index,
                first_device=self.job.local_rank,
                nnodes=-(-tp // here),
                node_rank=self._position // here,
                dist_init_addr=addresses[self.engine_ranks[self.engine_index][0]] if tp > here else "",
            )
        self.engine_restart = None if self.engine is None else EngineRestart(self.engine)
        speaks = self.lead_engine is not None
        self.recovery = EngineRecovery(
            self.config, len(self.engine_ranks), self.engine_index, self.engine_restart, speaks, context.log
        )
        if "actor" not in context.num_updates:
            return
        placement = placement_of(self.config)
        apart = not placement.is_colocated
        trains, generates = (placement.ranks_of("actor"), placement.ranks_of("rollout")) if apart else (None, None)
        parallel = dataclasses.replace(role_parallel(self.config, "actor"), world_size=self.job.world)
        pushed = dataclasses.replace(self.config, parallel=parallel)
        is_lost = (lambda error: False) if self.engine_restart is None else self.engine_restart.restart_if_lost
        self.weight_sync = WeightSync(
            context.hf_config, pushed, self.job, self.lead_engine, self._collect, trains, generates, is_lost
        )

    @property
    def lead_engine(self) -> Engine | None:
        """This rank's engine, where it speaks for it."""
        return self.engine if self._position == 0 else None

    @property
    def is_verified(self) -> bool:
        """Whether the last push was verified in full."""
        return self.weight_sync is not None and self.weight_sync.is_verified

    @property
    def phase_owner(self) -> str:
        """Who is in the engines' phases on this rank."""
        return REMOTE if self.engine_index is None else "rollout"

    @property
    def device_ranks(self) -> Sequence[int]:
        """The ranks of this rank's engine."""
        return () if self.engine_index is None else self.engine_ranks[self.engine_index]

    def start(self) -> None:
        """Not collective, and returns at once."""
        if self.engine is not None:
            self.engine.start()

    def wait_ready(self) -> None:
        with self.with_timeout(self.config.rollout.start_timeout):
            run_if_present(self.engine, Engine.wait_ready)
            if self.weight_sync is not None:
                self.weight_sync.check_engines()  # a mistake costs the start then, and no step

    def close(self) -> None:
        """Not collective."""
        if self.engine is not None and self.engine_restart is not None:
            self.engine_restart.close()

    def wake(self, how: Callable[[Engine], None] = Engine.wake) -> None:
        """Once every rank has given back what it has freed: an engine's lead wakes it on the devices of others, too."""
        device.empty_cache()
        ranks.barrier()
        with self.clock.span("wake", self.phase_owner):
            self.run_on_leads(how)

    def sleep(self) -> None:
        """Leave the device to training. One that is being started again takes its part of it first, where there is such
        a part."""
        if device.has_cuda():
            self._wait_restarts()
        self.run_on_leads(Engine.sleep)

    def sync_weights(self, actor: ActorWorker, version: int) -> None:
        """Give all of them the actor's weights, those that are away when they are there again; also once more where one
        is lost by it. They are awake then as far as that needs."""
        self._actor, self.version = actor, version
        self.recovery.exchange_losses(look=True)
        self._wait_restarts(actor)
        self.wake(Engine.wake_weights)
        while not self._sync_once(actor):
            self._wait_restarts(actor)
            self.wake(Engine.wake_weights)

    def find_mismatches(self, actor: ActorWorker) -> list[str] | None:
        """The tensors, by name, in which an engine holds other bits than the actor gave it, the same on all ranks; None
        where the engines' weights are gone, as a GPU's are that they share with the trainer."""
        if self.weight_sync is None or (device.has_cuda() and not self.config.rollout.asynchronous):
            return None
        with self.with_timeout(self.config.rollout.start_timeout):
            mine = self.weight_sync.find_mismatches(
                {} if actor.model is None else actor.model.merged_params(), self.version
            )
            return sorted({name for found in ranks.all_gather_objects(mine) for name in found})

    def wait_for_engine(self, there_again: Callable[[], None]) -> None:
        """Where none is left, wait until all have started again, and give them the weights that they had, which the
        actor still has. there_again: is called then on their leads."""
        while not self.recovery.has_available_engine:
            self._wait_restarts()
            actor = self._actor
            if actor is None:
                self.recovery.on_weight_sync(True)
            else:
                self.offload_models(actor)
                self._sync_once(actor)
                self.offload_models()
            if self.recovery.has_available_engine:
                run_if_present(self.lead_engine, lambda engine: there_again())

    def _sync_once(self, actor: ActorWorker) -> bool:
        """Whether all engines have the weights then; where one is lost by it none may generate."""
        assert self.weight_sync is not None, "there is no actor whose weights could be pushed"
        if self.recovery.unsynced:
            self.weight_sync.verify_next()
        with self.with_timeout(self.config.rollout.start_timeout):
            self.weight_sync.sync({} if actor.model is None else actor.model.merged_params(), self.version)
            lost = self.recovery.exchange_losses()
        self.recovery.on_weight_sync(not lost)
        return not lost

    def _wait_restarts(self, pushed: ActorWorker | None = None) -> None:
        """Where some are being started again, wait for them; where weights are pushed then, only room for these is
        taken."""
        if not self.recovery.restarting:
            return
        self.offload_models()  # a whole engine has to fit in
        with self.clock.span("engines start", self.phase_owner), self.with_timeout(self.config.rollout.start_timeout):
            self.recovery.wait_restarts()
        if pushed is not None and not self.config.rollout.asynchronous:
            self.run_on_leads(Engine.sleep)
            self.offload_models(pushed)

    def offload_models(self, pushed: ActorWorker | None = None) -> None:
        """With `train.offload` models leave the device to the engines, but for weights that are on their way there."""
        if not self.config.train.offload or self.config.rollout.replay:
            return
        with self.clock.phase("offload"):
            self._context.models.offload(None if pushed is None else pushed.model)

    def run_on_leads(self, work: Callable[[Engine], Result]) -> Result | None:
        """On those whose engines are not away. One that is lost by it is told of at the next exchange."""

        def unless_lost(engine: Engine) -> Result | None:
            try:
                return work(engine)
            except EngineError as error:
                if self.engine_restart is None or not self.engine_restart.restart_if_lost(error):
                    raise
                return None

        away = self.engine_index in self.recovery.restarting
        with self.with_timeout(self.config.rollout.start_timeout):
            return run_if_present(None if away else self.lead_engine, unless_lost)

    def with_timeout(self, seconds: float) -> AbstractContextManager[None]:
        """While some ranks wait for their engine, which may take so long, the others wait for them."""
        return ranks.with_timeout(seconds + self.config.run.timeout_s)

    def _collect(self, payload: str) -> list[str]:
        """Of the ranks of this engine, on each of them; see `engine.sglang_engine.GatherPayloads`.

        Nobody returns before all have come, for the sizes of the payloads go from all to all first.
        """
        assert self.engine_index is not None
        return ranks.all_gather_objects(payload, self._host_groups[self.engine_index])


def run_if_present(party: Member | None, work: Callable[[Member], Result]) -> Result | None:
    """Do it on the ranks that have a party. A failure is raised on every rank, so that none waits for the others."""
    error, result = "", None
    if party is not None:
        try:
            result = work(party)
        except RuntimeError as failure:
            error = str(failure)
    errors = [text for text in ranks.all_gather_objects(error) if text]
    if errors:
        raise ConfigError(errors[0])
    return result
