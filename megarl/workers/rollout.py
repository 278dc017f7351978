"""Generation: engines, each fed by its lead rank from one queue. Rollouts stay there, their figures go everywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from megarl.checkpoint.manifest import Entry
from megarl.config import ConfigError
from megarl.models.routing import routing_shape
from megarl.observe.rollout_log import read_rollouts
from megarl.parallel import device, everyone, ranks
from megarl.rollout.aborted import check_aborted
from megarl.rollout.conversations import Conversations
from megarl.rollout.engine import Engine
from megarl.rollout.queue import Tickets
from megarl.rollout.tool_calls import rehearse
from megarl.types import Prompt, Rollout, Rollouts
from megarl.workers.actor import ActorWorker
from megarl.workers.context import Context, Worker
from megarl.workers.oversampling import Oversampling
from megarl.workers.push import WeightPush

Party = TypeVar("Party")
Result = TypeVar("Result")


class RolloutWorker(Worker):
    """world_size / rollout.tp engines; ranks e * tp ... (e + 1) * tp - 1 belong to engine e, and the first leads it.

    An engine across machines has processes on each, started by the first of its ranks there. With `rollout.replay`
    there are no engines: `generate` reads the rollouts that another run recorded. The step under way names them, and
    seeds the samples.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        tp, here = self.config.rollout.tp, self.config.parallel.ranks_per_node
        self.engines = self.ranks.job.world // tp
        self.engine_index, self.position = divmod(self.ranks.job.rank, tp)
        self.lead_rank = self.engine_index * tp
        self.groups = [ranks.new_host_group(range(e * tp, (e + 1) * tp)) for e in range(self.engines)]
        self.engine: Engine | None = None
        self.version = 0
        self._generations = 0
        self._talks: Conversations | None = None
        if self.config.rollout.replay:
            return
        addresses = ranks.all_gather_objects(f"{ranks.own_address()}:{ranks.free_port()}")
        if self.position % min(tp, here) == 0:
            self.engine = Engine(
                self.config,
                self.engine_index,
                first_device=self.ranks.job.local_rank,
                nnodes=-(-tp // here),
                node_rank=self.position // here,
                dist_init_addr=addresses[self.lead_rank] if tp > here else "",
            )
        lead = self.engine if self.leads else None
        if lead is not None:
            replays = self.config.train.replay_routing
            routing = routing_shape(context.hf_config, self.config.model.megatron) if replays else None
            self._talks = Conversations(lead, context.chat, self.config.rollout, routing)
        number = None if lead is None else self.engine_index
        self._ahead = Oversampling(self.config.rollout, context.source, everyone.AllRanks(), number, self.engines)
        self._push = WeightPush(context.hf_config, self.config, self.ranks, lead, self._collect)

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for its engine."""
        return self.position == 0 and self.engine is not None

    def start(self) -> None:
        if self.engine is not None:
            self.engine.start()

    def ready(self) -> None:
        with self.clock.phase("engine_start"), self._patient(self.config.rollout.start_timeout):
            _on_any(self.engine, Engine.wait_ready)
            if not self.config.rollout.replay:
                self._push.compare()  # a mistake costs the start then, and no step
                self._rehearse_calls()

    def _rehearse_calls(self) -> None:
        """See to it that the engine's parser reads the tool calls that the model's template writes."""
        chat, limit = self.context.chat, self.config.rollout.request_timeout
        if not chat.tools:
            return
        complaint = self._on_leads(
            lambda engine: rehearse(
                chat, engine.url, engine.api_key, engine.tool_call_parser, engine.tool_call_marker, limit
            )
        )
        for text in ranks.all_gather_objects(complaint):
            if text:
                raise ConfigError(text)

    def generate(self, prompts: Sequence[Prompt], samples: int, greedy: bool = False) -> Rollouts:
        """`samples` conversations of each prompt, next to each other, in the order of the prompts.

        With `rollout.oversample` a step's first training call has as many groups as prompts, but those that are
        complete first, in that order: others are under way besides, of an earlier step too, and the rest is kept.

        Those that a failure or a time-out cut off are aborted ones. Raises ConfigError on all ranks where they are more
        than `rollout.max_aborted`, and as soon as an engine is gone.
        """
        config = self.config
        self._make_room()
        with self.clock.phase("generate"):
            if config.rollout.replay:
                return _gathered(self._replayed(), self.version)
            self._wake(Engine.wake)
            self._generations += 1
            name = f"megarl/generation/{self._generations}"
            plan = self._ahead.plan(prompts, self.step, greedy)
            tickets = Tickets(len(plan.prompts), self.engines, ranks.count, name, plan.held)
            # The last part is for an engine to let go of what is aborted.
            with self._patient(config.rollout.step_timeout + config.rollout.start_timeout):
                mine = _on_any(
                    self._talks,
                    lambda talks: talks.generate(
                        plan.prompts,
                        tickets=tickets,
                        samples=samples,
                        greedy=greedy,
                        seed=config.run.seed * 1_000_003 + self.step,
                        needed=plan.needed,
                        carried=plan.carried,
                        look=lambda: _stop_at(name),
                    ),
                    name,
                )
            rollouts = _gathered(mine.rollouts if mine else [], self.version)
            self._ahead.keep(plan, mine, tickets.taken(), rollouts)
            check_aborted(rollouts, config)
            return rollouts

    def update_weights(self, actor: ActorWorker) -> None:
        """Give every engine the actor's weights under the next version number; all ranks take part.

        The engines' KV caches stay asleep until `generate`, when what the push needed is gone.
        """
        self._make_room(actor)
        with self.clock.phase("push_weights"):
            self.version = self.step
            if self.config.rollout.replay:
                return
            self._wake(Engine.wake_weights)
            with self._patient(self.config.rollout.start_timeout):
                self._push.push(actor.model.merged(), self.version)

    def _wake(self, how: Callable[[Engine], None]) -> None:
        """Once every rank has given back what it has freed: an engine's lead wakes it on the devices of others, too."""
        device.empty_cache()
        ranks.barrier()
        self._on_leads(how)

    def _make_room(self, pushing: ActorWorker | None = None) -> None:
        """With `train.offload` models leave the device to the engines, but for weights that are on their way there."""
        if not self.config.train.offload or self.config.rollout.replay:
            return
        with self.clock.phase("offload"):
            self.context.models.park(None if pushing is None else pushing.model)

    def _collect(self, payload: str) -> list[str]:
        """Of the ranks of this engine, on its lead rank; see `rollout.engine.Collect`.

        Nobody returns before all have come, for the sizes of the payloads go from all to all first.
        """
        payloads: list[str] = [""] * self.config.rollout.tp
        own = self.groups[self.engine_index]
        dist.gather_object(payload, payloads if self.position == 0 else None, dst=self.lead_rank, group=own)
        return payloads

    def sleep(self) -> None:
        """Leave the device to training."""
        with self.clock.phase("sleep"):
            self._on_leads(Engine.sleep)

    def figures(self) -> dict[str, float]:
        return {} if self.config.rollout.replay else self._ahead.figures

    def save(self, folder: Path) -> dict[Path, Entry]:
        """Conversations that a later step goes on with."""
        return {} if self.config.rollout.replay else self._ahead.save(folder)

    def restore(self, folder: Path) -> None:
        if not self.config.rollout.replay:
            self._ahead.restore(folder)

    def close(self) -> None:
        if self._talks is not None:
            self._talks.close()
        if self.engine is not None:
            self.engine.shutdown()

    def _on_leads(self, work: Callable[[Engine], Result]) -> Result | None:
        with self._patient(self.config.rollout.start_timeout):
            return _on_any(self.engine if self.leads else None, work)

    def _patient(self, seconds: float) -> AbstractContextManager[None]:
        """While some ranks wait for their engine, which may take so long, the others wait for them."""
        return ranks.patient(seconds + self.config.run.timeout_s)

    def _replayed(self) -> list[Rollout]:
        """This rank's part of what is recorded of the step, in whole groups."""
        recorded = read_rollouts(self.config.rollout.replay, self.step)
        groups = 1 + max((rollout.group for rollout in recorded), default=0)
        job = self.ranks.job
        return [rollout for rollout in recorded if rollout.group * job.world // groups == job.rank]


def _gathered(mine: Sequence[Rollout], version: int) -> Rollouts:
    return Rollouts.of(mine, [rollout.group for rollout in mine], everyone.AllRanks(), version)


class _Stopped(RuntimeError):
    """This engine is all right, another has failed."""


def _stop_at(alarm: str) -> None:
    if ranks.alarm_raised(alarm):
        raise _Stopped


def _on_any(party: Party | None, work: Callable[[Party], Result], alarm: str = "") -> Result | None:
    """Do it on the ranks that have a party. A failure is raised on every rank, so that none waits for the others.

    alarm: raised where it fails, for those that are still at it.
    """
    error, result = "", None
    if party is not None:
        try:
            result = work(party)
        except _Stopped:
            pass
        except RuntimeError as failure:
            error = str(failure)
            if alarm:
                ranks.raise_alarm(alarm)
    errors = [text for text in ranks.all_gather_objects(error) if text]
    if errors:
        raise ConfigError(errors[0])
    return result
