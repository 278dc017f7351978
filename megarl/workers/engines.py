"""The engines of the job as one: where they are, when they are awake, the weights they have, and which are lost."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

from megarl.config import ConfigError
from megarl.engine.engine_loss import EngineError
from megarl.engine.restart import Revival
from megarl.engine.sglang_engine import Engine
from megarl.observe.clock import ELSEWHERE
from megarl.parallel import device, ranks
from megarl.parallel.placement import engine_ranks, placement_of, role_parallel
from megarl.workers.actor import ActorWorker
from megarl.workers.context import Context
from megarl.workers.recovery import Recovery
from megarl.workers.weight_sync import WeightPush

Party = TypeVar("Party")
Result = TypeVar("Result")


class Engines:
    """Of `rollout.tp` ranks each, one behind the other on the role's ranks; the first rank of one leads it. An engine
    across machines has processes on each, started by the first of its ranks there. What is public is for all ranks of
    the job together, unless it says otherwise.
    """

    def __init__(self, context: Context) -> None:
        self.config, self.job, self.clock, self._context = context.config, context.job, context.clock, context
        tp, here = self.config.rollout.tp, self.config.parallel.ranks_per_node
        self.members = engine_ranks(self.config)
        """The ranks of each."""
        self._groups = [ranks.new_host_group(members) for members in self.members]
        mine = [index for index, members in enumerate(self.members) if self.job.rank in members]
        self.index = mine[0] if mine else None
        """Which engine this rank belongs to; None for none."""
        self._position = self.members[mine[0]].index(self.job.rank) if mine else -1
        self.own: Engine | None = None
        """This rank's, where it has processes of it."""
        self.pushing: WeightPush | None = None
        """None where there is no actor: engines keep the weights that they have loaded themselves."""
        self.version = 0
        self._actor: ActorWorker | None = None
        """Whose weights they have; None where they have those that they loaded."""
        if self.config.rollout.replay:
            return
        addresses = ranks.all_gather_objects(f"{ranks.own_address()}:{ranks.free_port()}")
        if self.index is not None and self._position % min(tp, here) == 0:
            self.own = Engine(
                self.config,
                self.index,
                first_device=self.job.local_rank,
                nnodes=-(-tp // here),
                node_rank=self._position // here,
                dist_init_addr=addresses[self.members[self.index][0]] if tp > here else "",
            )
        self.revival = None if self.own is None else Revival(self.own)
        speaks = self.lead is not None
        self.recovery = Recovery(self.config, len(self.members), self.index, self.revival, speaks, context.say)
        if "actor" not in context.updates:
            return
        placement = placement_of(self.config)
        apart = not placement.colocated
        trains, generates = (placement.of("actor"), placement.of("rollout")) if apart else (None, None)
        parallel = dataclasses.replace(role_parallel(self.config, "actor"), world_size=self.job.world)
        pushed = dataclasses.replace(self.config, parallel=parallel)
        is_lost = (lambda error: False) if self.revival is None else self.revival.is_lost
        self.pushing = WeightPush(
            context.hf_config, pushed, self.job, self.lead, self._collect, trains, generates, is_lost
        )

    @property
    def lead(self) -> Engine | None:
        """This rank's engine, where it speaks for it."""
        return self.own if self._position == 0 else None

    @property
    def verified(self) -> bool:
        """Whether the last push was verified in full."""
        return self.pushing is not None and self.pushing.verified

    @property
    def at_work(self) -> str:
        """Who is in the engines' phases on this rank."""
        return ELSEWHERE if self.index is None else "rollout"

    @property
    def devices(self) -> Sequence[int]:
        """The ranks of this rank's engine."""
        return () if self.index is None else self.members[self.index]

    def start(self) -> None:
        """Not collective, and returns at once."""
        if self.own is not None:
            self.own.start()

    def ready(self) -> None:
        with self.patient(self.config.rollout.start_timeout):
            on_any(self.own, Engine.wait_ready)
            if self.pushing is not None:
                self.pushing.compare()  # a mistake costs the start then, and no step

    def close(self) -> None:
        """Not collective."""
        if self.own is not None and self.revival is not None:
            self.revival.close()

    def wake(self, how: Callable[[Engine], None] = Engine.wake) -> None:
        """Once every rank has given back what it has freed: an engine's lead wakes it on the devices of others, too."""
        device.empty_cache()
        ranks.barrier()
        with self.clock.span("wake", self.at_work):
            self.on_leads(how)

    def sleep(self) -> None:
        """Leave the device to training. One that is being started again takes its part of it first, where there is such
        a part."""
        if device.has_cuda():
            self._await()
        self.on_leads(Engine.sleep)

    def push(self, actor: ActorWorker, version: int) -> None:
        """Give all of them the actor's weights, those that are away when they are there again; also once more where one
        is lost by it. They are awake then as far as that needs."""
        self._actor, self.version = actor, version
        self.recovery.exchange(look=True)
        self._await(actor)
        self.wake(Engine.wake_weights)
        while not self._push(actor):
            self._await(actor)
            self.wake(Engine.wake_weights)

    def differing(self, actor: ActorWorker) -> list[str] | None:
        """The tensors, by name, in which an engine holds other bits than the actor gave it, the same on all ranks; None
        where the engines' weights are gone, as a GPU's are that they share with the trainer."""
        if self.pushing is None or (device.has_cuda() and not self.config.rollout.asynchronous):
            return None
        with self.patient(self.config.rollout.start_timeout):
            mine = self.pushing.differing({} if actor.model is None else actor.model.merged(), self.version)
            return sorted({name for found in ranks.all_gather_objects(mine) for name in found})

    def have_one(self, there_again: Callable[[], None]) -> None:
        """Where none is left, wait until all have started again, and give them the weights that they had, which the
        actor still has. there_again: is called then on their leads."""
        while not self.recovery.some_are_there:
            self._await()
            actor = self._actor
            if actor is None:
                self.recovery.pushed(True)
            else:
                self.make_room(actor)
                self._push(actor)
                self.make_room()
            if self.recovery.some_are_there:
                on_any(self.lead, lambda engine: there_again())

    def _push(self, actor: ActorWorker) -> bool:
        """Whether all engines have the weights then; where one is lost by it none may generate."""
        assert self.pushing is not None, "there is no actor whose weights could be pushed"
        if self.recovery.bare:
            self.pushing.verify_next()
        with self.patient(self.config.rollout.start_timeout):
            self.pushing.push({} if actor.model is None else actor.model.merged(), self.version)
            lost = self.recovery.exchange()
        self.recovery.pushed(not lost)
        return not lost

    def _await(self, pushed: ActorWorker | None = None) -> None:
        """Where some are being started again, wait for them; where weights are pushed then, only room for these is
        taken."""
        if not self.recovery.away:
            return
        self.make_room()  # a whole engine has to fit in
        with self.clock.span("engines start", self.at_work), self.patient(self.config.rollout.start_timeout):
            self.recovery.wait()
        if pushed is not None and not self.config.rollout.asynchronous:
            self.on_leads(Engine.sleep)
            self.make_room(pushed)

    def make_room(self, pushed: ActorWorker | None = None) -> None:
        """With `train.offload` models leave the device to the engines, but for weights that are on their way there."""
        if not self.config.train.offload or self.config.rollout.replay:
            return
        with self.clock.phase("offload"):
            self._context.models.park(None if pushed is None else pushed.model)

    def on_leads(self, work: Callable[[Engine], Result]) -> Result | None:
        """On those whose engines are not away. One that is lost by it is told of at the next exchange."""

        def unless_lost(engine: Engine) -> Result | None:
            try:
                return work(engine)
            except EngineError as error:
                if self.revival is None or not self.revival.is_lost(error):
                    raise
                return None

        away = self.index in self.recovery.away
        with self.patient(self.config.rollout.start_timeout):
            return on_any(None if away else self.lead, unless_lost)

    def patient(self, seconds: float) -> AbstractContextManager[None]:
        """While some ranks wait for their engine, which may take so long, the others wait for them."""
        return ranks.patient(seconds + self.config.run.timeout_s)

    def _collect(self, payload: str) -> list[str]:
        """Of the ranks of this engine, on each of them; see `engine.sglang_engine.Collect`.

        Nobody returns before all have come, for the sizes of the payloads go from all to all first.
        """
        assert self.index is not None
        return ranks.all_gather_objects(payload, self._groups[self.index])


def on_any(party: Party | None, work: Callable[[Party], Result]) -> Result | None:
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
