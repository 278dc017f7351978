"""All engines of a role as one unit: placement, wake and sleep, weight sync, and recovery of lost engines.

Roles whose engines share ranks take turns: waking those of one puts the others to sleep. Engines of several policies
also sleep while another policy trains on their ranks (`RolloutWorker.sleep`). With `rollout.max_loras` all policies
have the engines of the first; each keeps its own account of whether they have its adapter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

from megarl.config import ConfigError
from megarl.engine.engine_backends import engine_backend
from megarl.engine.engine_protocol import Engine, EngineError
from megarl.engine.engine_restart import EngineRestart
from megarl.engine.external_engines import ExternalEngines
from megarl.observe.clock import REMOTE
from megarl.parallel import device, ranks
from megarl.parallel.placement import engine_ranks, placement_of, role_parallel, split_role
from megarl.parallel.policy_configs import adapter_name, serves_adapters, syncs_adapters, syncs_changes
from megarl.utils.addresses import free_port
from megarl.workers.actor import ActorWorker
from megarl.workers.context import Context, Worker
from megarl.workers.engine_recovery import EngineRecovery
from megarl.workers.weight_sync import WeightSync

Member = TypeVar("Member")
Result = TypeVar("Result")


def _wake(engine: Engine) -> None:
    engine.wake()


def _wake_weights(engine: Engine) -> None:
    engine.wake_weights()


class Engines:
    """The engines of a role, each on `rollout.tp` consecutive ranks of the role; the first of these is its lead.

    An engine that spans machines has processes on each, started by its first rank there. Public methods are collective
    over all ranks of the job unless stated otherwise.
    """

    def __init__(self, context: Context) -> None:
        self.config, self.job, self.clock, self._context = context.config, context.job, context.clock, context
        self.takes_turns = context.takes_turns
        """Whether other roles need the ranks of these engines while they do not generate."""
        self.adapter = adapter_name(context.role or "rollout") if serves_adapters(self.config) else ""
        """Name of the adapter that the engines serve for this role's policy, if they do not merge it."""
        self._owner = self
        """The role's own engines, or those of the first policy if they serve this policy's adapter, too."""
        if self.adapter and split_role(context.role)[1]:
            self._owner = context.engines["rollout"]
        self.is_awake = True
        """True unless the last call was `sleep`; the same on all ranks."""
        self.end_turn: Callable[[], None] = self.sleep
        """Called before the engines of another role wake on shared ranks, or another policy trains."""
        label = "engine" if context.role in ("", "rollout") else f"{context.role} engine"
        tp, ranks_per_node = self.config.rollout.tp, self.config.parallel.ranks_per_node
        self.engine_ranks = engine_ranks(self.config)
        """Ranks of each engine."""
        self._host_groups = [ranks.new_host_group(members) for members in self.engine_ranks]
        local_engines = [index for index, members in enumerate(self.engine_ranks) if self.job.rank in members]
        self.engine_index = local_engines[0] if local_engines else None
        """The engine that this rank belongs to, or None."""
        self._position = self.engine_ranks[local_engines[0]].index(self.job.rank) if local_engines else -1
        self.shared = [index for index, members in enumerate(self.engine_ranks) if context.shared_ranks & set(members)]
        """The engines whose ranks also have a model, or engines of another role."""
        self.sleeps = not self.config.rollout.asynchronous or self.engine_index in self.shared
        """Whether this rank's engine sleeps while models or other engines use its device."""
        self.engine: Engine | None = None
        """The engine whose processes this rank manages, if any."""
        self.weight_sync: WeightSync | None = None
        """None without an actor: engines then keep the weights that they have loaded."""
        self.external: ExternalEngines | None = None
        """The engines outside of the job that this rank's engine feeds; None without an actor."""
        self.external_addresses: Sequence[str] = ()
        """Addresses of all external engines; the same on all ranks."""
        self._had_external = False
        self.version = 0
        self._actor: ActorWorker | None = None
        """The actor whose weights the engines have; None while they have those that they loaded."""
        if self.config.rollout.replay:
            return
        addresses = ranks.all_gather_objects(f"{ranks.node_address()}:{free_port()}")
        if self._owner is not self:
            self.engine = self._owner.engine
        elif self.engine_index is not None and self._position % min(tp, ranks_per_node) == 0:
            self.engine = engine_backend(self.config).make_engine(
                self.config,
                self.engine_index,
                label=label,
                keeps_weights=self.takes_turns or syncs_changes(self.config) or syncs_adapters(self.config),
                first_rank=self.job.local_rank,
                nnodes=-(-tp // ranks_per_node),
                node_rank=self._position // ranks_per_node,
                dist_init_addr=addresses[self.engine_ranks[self.engine_index][0]] if tp > ranks_per_node else "",
            )
        self.engine_restart: EngineRestart | None = None
        if self._owner is not self:
            self.engine_restart = self._owner.engine_restart
        elif self.engine is not None:
            self.engine_restart = EngineRestart(self.engine)
        is_lead = self.lead_engine is not None
        self.recovery = EngineRecovery(
            self.config, len(self.engine_ranks), self.engine_index, self.engine_restart, is_lead, context.log, label
        )
        context.engines[context.role] = self
        if "actor" not in context.num_updates:
            return
        placement = placement_of(self.config)
        is_separate = not placement.is_colocated
        trains, generates = (
            (placement.ranks_of("actor"), placement.ranks_of("rollout")) if is_separate else (None, None)
        )
        parallel = dataclasses.replace(role_parallel(self.config, "actor"), world_size=self.job.world)
        sync_config = dataclasses.replace(self.config, parallel=parallel)
        is_lost = (lambda error: False) if self.engine_restart is None else self.engine_restart.restart_if_lost
        if self.engine_index is not None:
            where = self.engine_index, len(self.engine_ranks), self._position
            self.external = ExternalEngines(self.config, *where, self._collect, context.role or "rollout")
        self.weight_sync = WeightSync(
            *(context.hf_config, sync_config, self.job, self.lead_engine, self._collect, trains, generates, is_lost),
            *(self.external, self.adapter),
        )

    @property
    def lead_engine(self) -> Engine | None:
        """This rank's engine, if this rank leads it."""
        return self.engine if self._position == 0 else None

    @property
    def is_verified(self) -> bool:
        """True if the last weight sync was fully verified."""
        return self.weight_sync is not None and self.weight_sync.is_verified

    def sync_metrics(self) -> dict[str, float]:
        """Return the traffic between nodes of the step's weight sync, if it sends changes only. Not collective."""
        sync = self.weight_sync
        if sync is None or not sync.whole_bytes:
            return {}
        sent, whole = sync.sent_bytes, sync.whole_bytes
        sync.sent_bytes = sync.whole_bytes = 0
        return {"weight_sync/network_gb": sent / 1e9, "weight_sync/sent_frac": sent / whole}

    @property
    def phase_owner(self) -> str:
        """Owner of the engines' phases on this rank, for the clock."""
        return REMOTE if self.engine_index is None else self._context.role or "rollout"

    @property
    def device_ranks(self) -> Sequence[int]:
        """Ranks of this rank's engine."""
        return () if self.engine_index is None else self.engine_ranks[self.engine_index]

    def start(self) -> None:
        """Start this rank's engine without waiting for it. Not collective.

        Engines that take turns start one role after the other, and sleep: each takes its share of the device as it
        starts.
        """
        if self.engine is not None and self._owner is self:
            self.engine.start()
            if self.takes_turns:
                self.engine.wait_ready()
                if self.lead_engine is not None:
                    self.engine.sleep()
        self.is_awake = not self.takes_turns

    def wait_ready(self) -> None:
        with self.with_timeout(self.config.rollout.start_timeout):
            run_if_present(self.engine, lambda engine: engine.wait_ready())
            if self.weight_sync is not None:
                if self.takes_turns:
                    self.wake(_wake_weights)
                self.weight_sync.check_engines()  # fail at the start rather than after a step
                if self.takes_turns:
                    self.sleep()

    def set_external(self, addresses: Sequence[str]) -> None:
        """Use the external engines at these addresses, from the next weight sync on. On all ranks; not collective."""
        self.external_addresses = addresses
        if self.external is not None:
            self.external.set_addresses(addresses)

    def log_external(self) -> None:
        """Log which external engines have come and gone. Collective."""
        lead = self.external if self._position == 0 else None
        for lines in ranks.all_gather_objects([] if lead is None else lead.pop_changes()):
            for line in lines:
                self._context.log(line)

    def close(self) -> None:
        """Stop this rank's engine, and hang up on external ones. Not collective."""
        if self.external is not None:
            self.external.close()
        if self._owner is self and self.engine is not None and self.engine_restart is not None:
            self.engine_restart.close()

    def wake(self, wake: Callable[[Engine], None] = _wake) -> None:
        """Wake the engines after every rank has returned its cached device memory, and other roles' engines sleep.

        The barrier is needed because a lead also wakes its engine on the devices of other ranks.
        """
        for other in self._context.engines.values() if self.takes_turns else ():
            if not other.has_engines_of(self) and other.is_awake and other.shares_ranks(self):
                other.end_turn()
        self.is_awake = True
        device.empty_cache()
        ranks.barrier()
        with self.clock.span("wake", self.phase_owner):
            self.run_on_leads(wake)

    def sleep(self) -> None:
        """Release the devices for training. On CUDA, waits for restarting engines first, since they need the device to
        start."""
        if device.has_cuda():
            self._wait_restarts()
        self._sleep()
        self.is_awake = False

    def _sleep(self) -> None:
        self.run_on_leads(lambda engine: engine.sleep() if self.sleeps else None)

    def has_engines_of(self, other: Engines) -> bool:
        """Return whether the two are the same engines, for the roles of two policies."""
        return self._owner is other._owner

    def shares_ranks(self, other: Engines) -> bool:
        """Return whether any rank has engines of both. Not collective."""
        return bool(
            {rank for ranks in self.engine_ranks for rank in ranks} & {r for ranks in other.engine_ranks for r in ranks}
        )

    def rejoin(self) -> None:
        """Let restarted engines whose weights come from disk generate again, once they have started."""
        self._wait_restarts()
        self.recovery.on_weight_sync(True)

    def sync_weights(self, actor: ActorWorker, version: int) -> None:
        """Sync the actor's weights to all engines, and leave only the engines' weights awake.

        Waits for restarting engines first, and repeats the sync if an engine is lost during it.
        """
        self._actor, self.version = actor, version
        self.recovery.exchange_losses(should_check=True)
        self._wait_restarts(actor)
        self.wake(_wake_weights)
        while not self._sync_once(actor):
            self._wait_restarts(actor)
            self.wake(_wake_weights)

    def place_experts(self, experts: Mapping[int, tuple[int, ...]]) -> None:
        """Place the experts so from the next weight sync on, in all engines, those started again included. Not
        collective, but call it on all ranks."""
        assert self.weight_sync is not None, "there is no actor to sync weights from"
        self.weight_sync.place_experts(experts)

    def find_mismatches(self, actor: ActorWorker) -> list[str] | None:
        """Return the names of tensors that differ bitwise between an engine and the actor, the same on all ranks.

        None if the engines' weights have been released, as on a GPU shared with the trainer.
        """
        is_asleep = not self.config.rollout.asynchronous or bool(self.shared)
        if self.weight_sync is None or (device.has_cuda() and is_asleep):
            return None
        with self.with_timeout(self.config.rollout.start_timeout):
            with actor.synced_weights() as weights:
                local_mismatches = self.weight_sync.find_mismatches(weights, self.version)
            return sorted({name for names in ranks.all_gather_objects(local_mismatches) for name in names})

    def wait_for_engine(self, on_restarted: Callable[[], None]) -> None:
        """If no engine is available, wait until all have restarted, and sync the actor's current weights to them.

        on_restarted: called afterwards on the lead ranks.
        """
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
                run_if_present(self.lead_engine, lambda engine: on_restarted())

    def _sync_once(self, actor: ActorWorker) -> bool:
        """Sync once. Returns False if an engine was lost; no engine may generate then."""
        assert self.weight_sync is not None, "there is no actor to sync weights from"
        if self.recovery.unsynced:
            self.weight_sync.verify_next()
        with self.with_timeout(self.config.rollout.start_timeout):
            if self.external_addresses:
                has_joined = self.external is not None and self.external.connect()
                if any(ranks.all_gather_objects(has_joined)):
                    self.weight_sync.verify_next()
            with actor.synced_weights() as weights:
                self.weight_sync.sync(weights, self.version)
            lost = self.recovery.exchange_losses()
        if self.external_addresses or self._had_external:
            self.log_external()
            self._had_external = bool(self.external_addresses)
        self.recovery.on_weight_sync(not lost)
        return not lost

    def _wait_restarts(self, synced: ActorWorker | None = None) -> None:
        """Wait for restarting engines, if any.

        synced: actor of a following weight sync. If set, colocated engines go back to sleep afterwards, so that only
        the memory for the sync is in use.
        """
        if not self.recovery.restarting:
            return
        self.offload_models()  # a whole engine must fit
        with self.clock.span("engines start", self.phase_owner), self.with_timeout(self.config.rollout.start_timeout):
            self.recovery.wait_restarts()
        if synced is not None and (self.shared or not self.config.rollout.asynchronous):
            self._sleep()
            self.offload_models(synced)

    def offload_models(self, synced: ActorWorker | None = None) -> None:
        """With `train.offload`, offload all models except the weights of `synced`, which are to be synced."""
        if not self.config.train.offload or self.config.rollout.replay:
            return
        with self.clock.phase("offload"):
            self._context.models.offload(None if synced is None else synced.model)

    def run_on_leads(self, work: Callable[[Engine], Result]) -> Result | None:
        """Run `work` on the leads of available engines. The next `exchange_losses` reports engines lost by it."""

        def run_unless_lost(engine: Engine) -> Result | None:
            try:
                return work(engine)
            except EngineError as error:
                if self.engine_restart is None or not self.engine_restart.restart_if_lost(error):
                    raise
                return None

        is_restarting = self.engine_index in self.recovery.restarting
        with self.with_timeout(self.config.rollout.start_timeout):
            return run_if_present(None if is_restarting else self.lead_engine, run_unless_lost)

    def with_timeout(self, seconds: float) -> AbstractContextManager[None]:
        """Extend the collective timeout while some ranks wait up to `seconds` for their engine."""
        return ranks.with_timeout(seconds + self.config.run.distributed_timeout_s)

    def _collect(self, payload: str) -> list[str]:
        """Gather payloads over the ranks of this engine; see `engine_protocol.GatherPayloads`.

        Acts as a barrier, since the sizes of the payloads are exchanged first.
        """
        assert self.engine_index is not None
        return ranks.all_gather_objects(payload, self._host_groups[self.engine_index])


class EngineWorker(Worker):
    """Starts, restarts and stops the engines of a frozen model. Other workers find them in `Context.engines`."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.engines = Engines(context)

    def begin_step(self, step: int) -> None:
        if step > self.step:
            self.engines.recovery.begin_step()
        super().begin_step(step)

    def start(self) -> None:
        self.engines.start()

    def wait_ready(self) -> None:
        with self.clock.phase("engine_start"):
            self.engines.wait_ready()

    def metrics(self) -> dict[str, float]:
        name = self.context.role
        return {key.replace("rollout/", f"{name}/"): value for key, value in self.engines.recovery.metrics().items()}

    def close(self) -> None:
        self.engines.close()


def run_if_present(member: Member | None, work: Callable[[Member], Result]) -> Result | None:
    """Run `work` on ranks where `member` is not None. Raises a failure of any rank on all ranks, so that none hangs."""
    error, result = "", None
    if member is not None:
        try:
            result = work(member)
        except RuntimeError as failure:
            error = str(failure)
    errors = [text for text in ranks.all_gather_objects(error) if text]
    if errors:
        raise ConfigError(errors[0])
    return result
