"""Generation: the engines, each fed by its lead rank from one queue. Rollouts stay there, their figures go to all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from megarl.checkpoint.manifest import Entry
from megarl.config import ConfigError
from megarl.models.routing import routing_shape
from megarl.observe.clock import ELSEWHERE, WAIT
from megarl.observe.recorded import Recorded, needs_records
from megarl.observe.rollout_log import read_rollouts
from megarl.parallel import device, everyone, ranks
from megarl.parallel.placement import engine_ranks, placement_of, role_parallel
from megarl.rollout.aborted import check_aborted
from megarl.rollout.conversations import Conversations
from megarl.rollout.engine import Engine
from megarl.rollout.gathering import Gathered
from megarl.rollout.queue import Tickets
from megarl.rollout.tool_calls import rehearse
from megarl.types import Prompt, Rollout, Rollouts
from megarl.workers.actor import ActorWorker
from megarl.workers.agents import Agents
from megarl.workers.context import Context, Worker
from megarl.workers.oversampling import Oversampling
from megarl.workers.push import WeightPush
from megarl.workers.streaming import NAME, Streaming

Party = TypeVar("Party")
Result = TypeVar("Result")


class RolloutWorker(Worker):
    """Engines of `rollout.tp` ranks each, one behind the other on the role's ranks; the first rank of one leads it.

    An engine across machines has processes on each, started by the first of its ranks there. With `rollout.replay`
    there are no engines: `generate` reads the rollouts that another run recorded. The step under way names them, and
    seeds the samples. Without an actor engines keep the weights that they have loaded themselves.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        tp, here = self.config.rollout.tp, self.config.parallel.ranks_per_node
        self.engines = engine_ranks(self.config)
        self.groups = [ranks.new_host_group(members) for members in self.engines]
        mine = [index for index, members in enumerate(self.engines) if self.job.rank in members]
        self.index = mine[0] if mine else None
        """Which engine this rank belongs to; None for none."""
        self.position = self.engines[mine[0]].index(self.job.rank) if mine else -1
        self.engine: Engine | None = None
        self.version = 0
        self.made: list[Rollouts] = []
        """What the step under way has been given."""
        self._generations, self._served = 0, 0
        self._next_group = 0
        self._closing = False
        self._talks: Conversations | None = None
        if self.config.rollout.replay:
            return
        addresses = ranks.all_gather_objects(f"{ranks.own_address()}:{ranks.free_port()}")
        if self.index is not None and self.position % min(tp, here) == 0:
            self.engine = Engine(
                self.config,
                self.index,
                first_device=self.job.local_rank,
                nnodes=-(-tp // here),
                node_rank=self.position // here,
                dist_init_addr=addresses[self.engines[self.index][0]] if tp > here else "",
            )
        lead = self.engine if self.leads else None
        if lead is not None:
            replays = self.config.train.replay_routing
            routing = routing_shape(context.hf_config, self.config.model.megatron) if replays else None
            self._talks = Conversations(lead, context.chat, self.config.rollout, routing, context.ended)
        agents = any(one.kind == "agent" for one in context.chat.known.environments.values())
        self._agents = Agents(agents, everyone.AllRanks(), self._talks)
        number = None if lead is None else self.index
        self._surplus = Oversampling(
            self.config.rollout, context.source, everyone.AllRanks(), number, len(self.engines)
        )
        self._stream = Streaming(
            self.config,
            context.upcoming,
            everyone.AllRanks(),
            self._talks,
            len(self.engines),
            ranks.count,
            self._seed,
            self._answered,
        )
        self._push: WeightPush | None = None
        if "actor" not in context.updates:
            return
        placement = placement_of(self.config)
        sets = () if placement.colocated else (placement.of("actor"), placement.of("rollout"))
        parallel = dataclasses.replace(role_parallel(self.config, "actor"), world_size=self.job.world)
        pushed = dataclasses.replace(self.config, parallel=parallel)
        self._push = WeightPush(context.hf_config, pushed, self.job, lead, self._collect, *sets)

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for its engine."""
        return self.position == 0 and self.engine is not None

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        self._next_group = 0
        self.made = []

    @property
    def at_work(self) -> str:
        """Who is in this role's phases on this rank."""
        return ELSEWHERE if self.index is None else "rollout"

    def start(self) -> None:
        if self.engine is not None:
            self.engine.start()

    def ready(self) -> None:
        with self.clock.phase("engine_start"), self._patient(self.config.rollout.start_timeout):
            _on_any(self.engine, Engine.wait_ready)
            if not self.config.rollout.replay:
                if self._push is not None:
                    self._push.compare()  # a mistake costs the start then, and no step
                self._rehearse_calls()

    def _rehearse_calls(self) -> None:
        """See to it that the engine's parser reads the tool calls that the model's template writes."""
        chat, config = self.context.chat, self.config.rollout
        if not chat.tools:
            return
        limit, of_family = config.request_timeout, not config.tool_call_parser
        complaint = self._on_leads(
            lambda engine: rehearse(
                chat, engine.url, engine.api_key, engine.tool_call_parser, engine.tool_call_marker, limit, of_family
            )
        )
        for text in ranks.all_gather_objects(complaint):
            if text:
                raise ConfigError(text)

    def generate(self, prompts: Sequence[Prompt], samples: int, greedy: bool = False) -> Rollouts:
        """`samples` conversations of each prompt, next to each other, in the order of the prompts.

        A step may call this several times. The groups of its sampling calls are numbered on, and seeds follow from
        them; greedy answers, which need no seed, have the numbers of their prompts, from 0 on.

        With `rollout.asynchronous` the groups of a step's first training call have been begun before it, and those of
        later steps are under way when it returns.

        With `rollout.oversample` a step's first training call has as many groups as prompts, but those that are
        complete first, in that order: others are under way besides, of an earlier step too, and the rest is kept.

        Those that a failure or a time-out cut off are aborted ones. Raises ConfigError on all ranks where they are more
        than `rollout.max_aborted`, and as soon as an engine is gone.
        """
        config = self.config
        self._make_room()
        with self.clock.phase("generate", WAIT):
            if config.rollout.replay:
                self.made.append(self._replayed(self._groups(len(prompts)), greedy))
                return self.made[-1]
            self._wake(Engine.wake)
            is_first, source = self.step > self._served and not greedy, self.context.source
            if is_first:
                self._served = self.step
            # The last part is for an engine to let go of what is aborted.
            with self._patient(config.rollout.step_timeout + config.rollout.start_timeout):
                if is_first and config.rollout.asynchronous and source is not None and source.ends_with(prompts):
                    rollouts = self._go_on(prompts, samples)
                else:
                    rollouts = self._generate(prompts, samples, greedy)
            self._agents.note()
            if not greedy:
                self.made.append(rollouts)
            check_aborted(rollouts, config)
            return rollouts

    def _generate(self, prompts: Sequence[Prompt], samples: int, greedy: bool) -> Rollouts:
        self._generations += 1
        name = f"megarl/generation/{self._generations}"
        plan = self._surplus.plan(prompts, self.step, greedy)
        numbers = max(len(plan.prompts), plan.needed or 0)  # fewer are begun where others are gone on with
        first_group = 0 if greedy else self._groups(numbers).start
        tickets = Tickets(len(plan.prompts), len(self.engines), ranks.count, name, plan.held)

        def work(talks: Conversations) -> Gathered:
            with self.clock.span(f"generation of step {self.step}", "rollout", self._devices):
                return talks.generate(
                    plan.prompts,
                    tickets=tickets,
                    samples=samples,
                    greedy=greedy,
                    seed=self._seed(self.step),
                    first_group=first_group,
                    needed=plan.needed,
                    carried=plan.carried,
                    look=lambda: self._look(name),
                )

        mine = _on_any(self._talks, work, name)
        rollouts = _gathered(mine.rollouts if mine else [], self.version)
        self._surplus.keep(plan, mine, tickets.taken(), rollouts)
        return rollouts

    def _go_on(self, prompts: Sequence[Prompt], samples: int) -> Rollouts:
        """The step's groups out of what goes on."""
        self._groups(len(prompts))  # whose numbers they have
        _on_any(self._stream, lambda stream: stream.open(prompts, samples, self.step), NAME)
        mine = _on_any(self._talks, lambda talks: talks.take(len(prompts), lambda: self._look(NAME)).result(), NAME)
        rollouts = _gathered(mine.rollouts if mine else [], self.version)
        self._stream.note(mine, rollouts)
        return rollouts

    def _seed(self, step: int) -> int:
        return self.config.run.seed * 1_000_003 + step

    @property
    def _devices(self) -> Sequence[int]:
        """The ranks of this rank's engine, for the timeline."""
        return () if self.index is None else self.engines[self.index]

    def _answered(self, began: float, ended: float) -> None:
        self.clock.keep("generation", "rollout", began, ended, self._devices, thread="generation")

    def _look(self, alarm: str) -> None:
        if self._closing or ranks.alarm_raised(alarm):
            raise _Stopped

    def update_weights(self, actor: ActorWorker) -> None:
        """Give every engine the actor's weights under the next version number; all ranks take part.

        The engines' KV caches stay asleep until `generate`, when what the push needed is gone.
        """
        self._make_room(actor)
        takes_part = self.index is not None or actor.model is not None
        with self.clock.phase("push_weights", "push" if takes_part else ELSEWHERE):
            self.version = self.step
            if self.config.rollout.replay:
                return
            assert self._push is not None, "there is no actor whose weights could be pushed"
            self._hold_answers()
            self._wake(Engine.wake_weights)
            with self._patient(self.config.rollout.start_timeout):
                self._push.push({} if actor.model is None else actor.model.merged(), self.version)
            if self.config.rollout.asynchronous:
                _on_any(self._stream, lambda stream: stream.go_on(self.step), NAME)

    def _hold_answers(self) -> None:
        """Have what is under way out of the way of new weights, as `rollout.on_push` says."""
        if not self.config.rollout.asynchronous:
            return
        config = self.config.rollout
        again = self.engine is not None and self.engine.version == self.version
        # Weights under a number that the engine has had must find no cache that is salted by it.
        how = "retract" if again and config.on_push == "in_place" else config.on_push
        with self.clock.span("training", WAIT):
            ranks.barrier()  # engines' ranks have nothing to train, and would be here before there are weights
        with self.clock.phase("generate_rest", WAIT), self._patient(config.step_timeout + config.start_timeout):
            _on_any(self._talks, lambda talks: talks.pause(how), NAME)

    def _wake(self, how: Callable[[Engine], None]) -> None:
        """Once every rank has given back what it has freed: an engine's lead wakes it on the devices of others, too."""
        device.empty_cache()
        ranks.barrier()
        with self.clock.span("wake", self.at_work):
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
        assert self.index is not None
        lead, own = self.engines[self.index][0], self.groups[self.index]
        dist.gather_object(payload, payloads if self.position == 0 else None, dst=lead, group=own)
        return payloads

    def sleep(self) -> None:
        """Leave the device to training, unless it is the engines' own."""
        if self.config.rollout.asynchronous:
            return
        with self.clock.phase("sleep", self.at_work):
            self._on_leads(Engine.sleep)

    def figures(self) -> dict[str, float]:
        if self.config.rollout.replay:
            return {}
        return self._surplus.figures | self._stream.figures | self._agents.figures

    def save(self, folder: Path) -> dict[Path, Entry]:
        """Conversations that a later step goes on with."""
        return {} if self.config.rollout.replay else self._surplus.save(folder)

    def restore(self, folder: Path) -> None:
        if not self.config.rollout.replay:
            self._surplus.restore(folder)

    def close(self) -> None:
        self._closing = True
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

    def _groups(self, count: int) -> range:
        """Numbers of so many further groups of the step."""
        first, self._next_group = self._next_group, self._next_group + count
        return range(first, self._next_group)

    def _replayed(self, groups: range, greedy: bool) -> Rollouts:
        """What is recorded of these groups of the step. Each rank has what it had, where the recorded run had as many:
        figures that are summed up rank by rank then have the same bits."""
        source = Recorded.of(self.config.rollout.replay)
        step = source.step(self.step)
        where = f"rollout.replay={self.config.rollout.replay}, step {step}"
        if greedy:
            raise ConfigError(f"{where}: only what is sampled is recorded, and this algorithm generates greedily, too")
        recorded = read_rollouts(source.folder, step, self.job.rank, self.job.world, needs_records(self.config))
        found = _gathered([one for one in recorded if one.group in groups], self.version)
        if groups and not len(found):
            raise ConfigError(
                f"{where} has nothing of the groups {groups.start} to {groups.stop - 1}: of a step that generates "
                "several times only what StepResult.rollouts has is recorded"
            )
        return found


def _gathered(mine: Sequence[Rollout], version: int) -> Rollouts:
    return Rollouts.of(mine, [rollout.group for rollout in mine], everyone.AllRanks(), version)


class _Stopped(RuntimeError):
    """This engine is all right, another has failed."""


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
