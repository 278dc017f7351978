"""Generation: the engines, each fed by its lead rank from one queue. Rollouts stay there, their figures go to all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from megarl.checkpoint.manifest import Write, write_nothing
from megarl.config import ConfigError
from megarl.engine.engine_loss import EngineLost
from megarl.engine.tool_calls import rehearse
from megarl.models.routing import routing_shape
from megarl.observe.clock import ELSEWHERE, WAIT
from megarl.observe.replayed_rollouts import Recorded, needs_records
from megarl.observe.rollout_log import read_records
from megarl.parallel import ranks, row_exchange
from megarl.parallel.kv_store import Board
from megarl.rollout.aborted import TooManyAborted, check_aborted, complaint
from megarl.rollout.group_queue import Tickets
from megarl.rollout.rollout_context import Conversations
from megarl.rollout.scheduler import Gathered, Group, Returned, at_their_beginning
from megarl.types import Prompt, Rollout, Rollouts
from megarl.workers.actor import ActorWorker
from megarl.workers.async_rollout import NAME, Generation, Streaming
from megarl.workers.context import Context, Worker
from megarl.workers.engines import Engines, on_any
from megarl.workers.staleness import Oversampling
from megarl.workers.tool_stats import Agents, ToolCalls


class RolloutWorker(Worker):
    """What engines generate, see `Engines`. With `rollout.replay` there are none: `generate` reads the rollouts that
    another run recorded. The step under way names them, and seeds the samples. Without an actor engines keep the
    weights that they have loaded themselves.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.engines = Engines(context)
        self.version = 0
        self.in_question = not self.config.rollout.replay
        """Whether nobody has compared what the engines say with what the trainer says since they have started, or since
        a push that was verified in full."""
        self.made: list[Rollouts] = []
        """What the step under way has been given."""
        self._generations, self._served = 0, 0
        self._next_group = 0
        self._closing = False
        self._talks: Conversations | None = None
        self._lost = {"rollout/lost_samples": 0, "rollout/regenerated_samples": 0}
        if self.config.rollout.replay:
            return
        lead, count = self.engines.lead, len(self.engines.members)
        if lead is not None and self.engines.revival is not None:
            replays = self.config.train.replay_routing
            routing = routing_shape(context.hf_config, self.config.model.megatron) if replays else None
            self._talks = Conversations(
                lead, context.chat, self.config.rollout, routing, context.ended, self.engines.revival.lost
            )
        agents = any(one.kind == "agent" for one in context.chat.known.environments.values())
        self._agents = Agents(agents, row_exchange.AllRanks(), self._talks)
        known = context.chat.known
        self._tool_calls = ToolCalls(
            bool(known.tools or known.environments),
            *(self.config.rollout, row_exchange.AllRanks(), self._talks, context.say, context.alarm),
        )
        number = None if lead is None else self.engines.index
        self._surplus = Oversampling(
            self.config.rollout,
            context.source,
            row_exchange.AllRanks(),
            number,
            count,
            self.config.train.replay_routing and "actor" in context.updates,
        )
        self._stream = Streaming(
            self.config,
            context.upcoming,
            row_exchange.AllRanks(),
            self._talks,
            count,
            Board(),
            self._seed,
            self._answered,
        )

    def begin_step(self, step: int) -> None:
        if step > self.step and not self.config.rollout.replay:
            self.engines.recovery.next_step()
            self._lost = dict.fromkeys(self._lost, 0)
            self._tool_calls.begin_step()
        super().begin_step(step)
        self._next_group = 0
        self.made = []

    def start(self) -> None:
        self.engines.start()

    def ready(self) -> None:
        with self.clock.phase("engine_start"):
            self.engines.ready()
            if not self.config.rollout.replay:
                self._rehearse_calls()

    def _rehearse_calls(self) -> None:
        """See to it that the engine's parser reads the tool calls that the model's template writes."""
        chat, config = self.context.chat, self.config.rollout
        if not chat.tools:
            return
        limit, of_family = config.request_timeout, not config.tool_call_parser
        complaint = self.engines.on_leads(
            lambda engine: rehearse(
                chat, engine.url, engine.api_key, engine.tool_call_parser, engine.tool_call_marker, limit, of_family
            )
        )
        for text in ranks.all_gather_objects(complaint):
            if text:
                raise ConfigError(text)

    def generate(
        self, prompts: Sequence[Prompt], samples: int, greedy: bool = False, held_out: bool = False
    ) -> Rollouts:
        """`samples` conversations of each prompt, next to each other, in the order of the prompts.

        A step may call this several times. The groups of its sampling calls are numbered on, and seeds follow from
        them; greedy answers, which need no seed, have the numbers of their prompts, from 0 on. held_out: sampled as in
        an evaluation (`rollout.eval_temperature`, `rollout.eval_top_p`), and not trained on.

        With `rollout.asynchronous` the groups of a step's first training call have been begun before it, and those of
        later steps are under way when it returns.

        With `rollout.oversample` a step's first training call has as many groups as prompts, but those that are
        complete first, in that order: others are under way besides, of an earlier step too, and the rest is kept.

        Those that a failure or a time-out cut off are aborted ones. Raises ConfigError on all ranks where they are more
        than `rollout.max_aborted`, and where an engine is lost by the same fault twice in a row. What an engine had
        under way when it was lost is generated again, by those that are there.
        """
        config = self.config
        self.engines.make_room()
        with self.clock.phase("generate", WAIT):
            if config.rollout.replay:
                self.made.append(self._replayed(self._groups(len(prompts)), greedy))
                return self.made[-1]
            self.engines.recovery.exchange(look=True)
            self.engines.have_one(self._resume)
            self.engines.wake()
            is_first, source = self.step > self._served and not greedy, self.context.source
            if is_first:
                self._served = self.step
            # The last part is for an engine to let go of what is aborted.
            with self.engines.patient(config.rollout.step_timeout + config.rollout.start_timeout):
                if is_first and config.rollout.asynchronous and source is not None and source.ends_with(prompts):
                    rollouts = self._go_on(prompts, samples)
                else:
                    rollouts = self._generate(prompts, samples, greedy, held_out)
            self._agents.note()
            self._tool_calls.note(self.step)
            if not greedy:
                self.made.append(rollouts)
            check_aborted(rollouts, config)
            return rollouts

    def begin(
        self, prompts: Sequence[Prompt], samples: int, greedy: bool = False, held_out: bool = False
    ) -> Generation:
        """As `generate`, but nobody waits: with `rollout.asynchronous` it goes on while steps are taken. Where engines
        get other weights meanwhile, it goes on by those, as `rollout.on_push` says; each token has its version."""
        self.engines.recovery.exchange(look=True)
        self.engines.have_one(self._resume)
        self.engines.wake()
        self._generations += 1
        engines, mine = len(self.engines.members), None
        tickets = Tickets(len(prompts), engines, Board(), f"megarl/generation/{self._generations}")
        first = 0 if greedy else self._groups(len(prompts)).start
        if self._talks is not None and self.engines.recovery.is_there(self.engines.index):
            mine = self._talks.begin(
                prompts,
                tickets=tickets,
                samples=samples,
                greedy=greedy,
                seed=self._seed(self.step),
                first_group=first,
                held_out=held_out,
            )
        return Generation(
            *(mine, tickets, row_exchange.AllRanks()),
            begun=self.version,
            now=lambda: self.version,
            waiting=self._waiting,
        )

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        config = self.config.rollout
        with self.clock.phase("generate", WAIT), self.engines.patient(config.step_timeout + config.start_timeout):
            yield

    def _generate(self, prompts: Sequence[Prompt], samples: int, greedy: bool, held_out: bool) -> Rollouts:
        self._generations += 1
        name = f"megarl/generation/{self._generations}"
        plan = self._surplus.plan(prompts, self.step, greedy)
        numbers = max(len(plan.prompts), plan.needed or 0)  # fewer are begun where others are gone on with
        first_group = 0 if greedy else self._groups(numbers).start
        tickets = Tickets(len(plan.prompts), len(self.engines.members), Board(), name, plan.held)

        carried = self._carried(plan.carried, tickets)
        mine: Gathered | None = None
        lost, turn = True, 0
        while lost:
            turn += 1
            alarm = f"{name}/alarm/{turn}"

            def work(talks: Conversations) -> Gathered:
                with self.clock.span(f"generation of step {self.step}", "rollout", self.engines.devices):
                    try:
                        return talks.generate(
                            plan.prompts,
                            tickets=tickets,
                            samples=samples,
                            greedy=greedy,
                            seed=self._seed(self.step),
                            first_group=first_group,
                            needed=plan.needed,
                            carried=carried,  # noqa: B023  it is called at once
                            of=len(plan.prompts) * samples if plan.needed is None else None,
                            look=lambda: self._look(alarm),  # noqa: B023
                            held_out=held_out,
                        )
                    except TooManyAborted as many:
                        raise RuntimeError(complaint(many.count, many.of, many.failures, self.config)) from None

            found, lost = self._gather(work, alarm)
            mine = found if mine is None else mine if found is None else mine.and_then(found)
            carried = ()
            if lost and not self._is_missing(tickets, plan.needed):
                break
            if lost:
                self.engines.have_one(self._resume)
        if turn > 1 or lost:
            while mine is not None and (back := tickets.take_back()) is not None:
                mine.partials.append(back.group)  # nobody needs it now: it goes on in a later step
            counts = torch.tensor([mine.gone, mine.again] if mine else [0, 0])
            self._count_lost(row_exchange.total(counts).tolist())
        rollouts = _gathered(mine.rollouts if mine else [], self.version)
        self._surplus.keep(plan, mine, tickets.taken(), rollouts)
        return rollouts

    def _carried(self, groups: Sequence[Group], tickets: Tickets) -> Sequence[Group]:
        """What this rank's engine goes on with; where that is away, others do."""
        recovery = self.engines.recovery
        if not recovery.is_there(self.engines.index):
            for group in groups:
                tickets.give_back(Returned(0, at_their_beginning(group)))
            groups = ()
        if recovery.away or recovery.bare:
            ranks.barrier()  # else others might have looked for it before
        return groups

    def _gather(
        self, work: Callable[[Conversations], Gathered | None], alarm: str, lost_too: bool = False
    ) -> tuple[Gathered | None, bool]:
        """What comes of it on this rank, where it leads an engine that is there, or with `lost_too` any, and whether
        some engine was lost meanwhile. Any other failure is raised on all ranks, and the alarm, for those that are
        still at it."""
        error, found = "", None
        if self._talks is not None and (lost_too or self.engines.recovery.is_there(self.engines.index)):
            try:
                found = work(self._talks)
            except _Stopped:
                pass
            except EngineLost as lost:
                assert self.engines.revival is not None
                self.engines.revival.lost(lost)
            except RuntimeError as failure:
                error = str(failure)
                ranks.raise_alarm(alarm)
        return found, self.engines.recovery.exchange(error)

    def _is_missing(self, tickets: Tickets, needed: int | None) -> bool:
        """Whether groups are, after an engine was lost; nobody takes any meanwhile."""
        return self._lack(tickets.left() > 0 if needed is None else tickets.finished() < needed)

    def _lack(self, something: bool) -> bool:
        return any(ranks.all_gather_objects(something))

    def _count_lost(self, counts: Sequence[int]) -> None:
        for name, more in zip(self._lost, counts, strict=True):
            self._lost[name] += more

    def _go_on(self, prompts: Sequence[Prompt], samples: int) -> Rollouts:
        """The step's groups out of what goes on."""
        self._groups(len(prompts))  # whose numbers they have
        on_any(self._stream, lambda stream: stream.open(prompts, samples, self.step))
        mine: Gathered | None = None
        while True:
            found, _ = self._gather(
                lambda talks: talks.take(len(prompts), lambda: self._look(NAME)).result(), NAME, lost_too=True
            )
            if found is not None:
                mine = found
            # Of engines that are lost, too, what was complete is taken.
            if self.engines.recovery.some_are_there or not self._lack(self._talks is not None and found is None):
                break
            self.engines.have_one(self._resume)
        rollouts = _gathered(mine.rollouts if mine else [], self.version)
        self._stream.note(mine, rollouts)
        self._count_lost(self._stream.lost)
        return rollouts

    def _resume(self) -> None:
        """This rank's engine is there again, and its stream, if there is one, goes on."""
        if self._talks is not None:
            self._talks.resume()

    def _seed(self, step: int) -> int:
        return self.config.run.seed * 1_000_003 + step

    def _answered(self, began: float, ended: float) -> None:
        self.clock.keep("generation", "rollout", began, ended, self.engines.devices, thread="generation")

    def _look(self, alarm: str) -> None:
        if self._closing or ranks.alarm_raised(alarm):
            raise _Stopped

    def update_weights(self, actor: ActorWorker) -> None:
        """Give every engine the actor's weights under the next version number; all ranks take part.

        The engines' KV caches stay asleep until `generate`, when what the push needed is gone. An engine that is lost
        meanwhile is started again, and no engine has these weights before all have them.
        """
        self.engines.make_room(actor)
        takes_part = self.engines.index is not None or actor.model is not None
        with self.clock.phase("push_weights", "push" if takes_part else ELSEWHERE):
            self.version = self.step
            if self.config.rollout.replay:
                return
            self._hold_answers()
            self.engines.push(actor, self.version)
            self.in_question = self.in_question or self.engines.verified
            if self.config.rollout.asynchronous:
                on_any(self._stream, lambda stream: stream.go_on(self.step))

    def differing(self, actor: ActorWorker) -> list[str] | None:
        """See `Engines.differing`; nothing is generated any more."""
        self._hold_answers()
        return self.engines.differing(actor)

    def _hold_answers(self) -> None:
        """Have what is under way out of the way of new weights, as `rollout.on_push` says."""
        if not self.config.rollout.asynchronous:
            return
        config = self.config.rollout
        own = self.engines.own
        again = own is not None and own.version == self.version
        # Weights under a number that the engine has had must find no cache that is salted by it.
        how = "retract" if again and config.on_push == "in_place" else config.on_push
        with self.clock.span("training", WAIT):
            ranks.barrier()  # engines' ranks have nothing to train, and would be here before there are weights
        with self.clock.phase("generate_rest", WAIT), self.engines.patient(config.step_timeout + config.start_timeout):
            on_any(self._talks, lambda talks: talks.pause(how))

    def sleep(self) -> None:
        """Leave the device to training, unless it is the engines' own."""
        if self.config.rollout.asynchronous or self.config.rollout.replay:
            return
        with self.clock.phase("sleep", self.engines.at_work):
            self.engines.sleep()

    def figures(self) -> dict[str, float]:
        if self.config.rollout.replay:
            return {}
        recovered = self.engines.recovery.figures()
        if recovered or any(self._lost.values()):
            recovered |= {name: float(count) for name, count in self._lost.items()}
        return (
            self._surplus.figures | self._stream.figures | self._agents.figures | self._tool_calls.figures | recovered
        )

    def save(self) -> Write:
        """Conversations that a later step goes on with."""
        return write_nothing if self.config.rollout.replay else self._surplus.save()

    def restore(self, folder: Path) -> None:
        if not self.config.rollout.replay:
            self._surplus.restore(folder)

    def close(self) -> None:
        self._closing = True
        if self._talks is not None:
            self._talks.close()
        self.engines.close()

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
        recorded = read_records(source.folder, step, self.job.rank, self.job.world, needs_records(self.config))
        mine = [one for one in recorded if one.rollout.group in groups]
        # By their numbers, since files of several ranks may be one rank's now, or the other way round.
        found = Rollouts.of(
            [one.rollout for one in mine], [one.number for one in mine], row_exchange.AllRanks(), self.version
        )
        if groups and not len(found):
            raise ConfigError(
                f"{where} has nothing of the groups {groups.start} to {groups.stop - 1}: of a step that generates "
                "several times only what StepResult.rollouts has is recorded"
            )
        return found


def _gathered(mine: Sequence[Rollout], version: int) -> Rollouts:
    return Rollouts.of(mine, [rollout.group for rollout in mine], row_exchange.AllRanks(), version)


class _Stopped(RuntimeError):
    """This engine is all right, another has failed."""
