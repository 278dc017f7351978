"""Generation: the engines, each fed by its lead rank from one queue. Rollouts stay there, their figures go to all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from megarl.checkpoint.manifest import Write, write_nothing
from megarl.config import ConfigError
from megarl.engine.engine_loss import EngineLost
from megarl.engine.tool_calls import check_parser
from megarl.models.routing import routing_shape
from megarl.observe.clock import REMOTE, WAIT
from megarl.observe.replayed_rollouts import ReplaySource, needs_trainer_columns
from megarl.observe.rollout_log import read_records
from megarl.parallel import ranks, row_exchange
from megarl.parallel.kv_store import KVStore
from megarl.rollout.aborted import TooManyAborted, check_abort_limit, format_abort_error
from megarl.rollout.group_queue import GroupQueue
from megarl.rollout.rollout_context import RolloutRunner
from megarl.rollout.scheduler import GenerationResult, Group, ReturnedGroup, restart_unfinished
from megarl.types import Prompt, Rollout, Rollouts
from megarl.workers.actor import ActorWorker
from megarl.workers.async_rollout import STREAM_NAME, PendingGeneration, RolloutStream
from megarl.workers.context import Context, Worker
from megarl.workers.engines import Engines, run_if_present
from megarl.workers.staleness import Oversampling
from megarl.workers.tool_stats import AgentMetrics, ToolMonitor


class RolloutWorker(Worker):
    """What engines generate, see `Engines`. With `rollout.replay` there are none: `generate` reads the rollouts that
    another run recorded. The step under way names them, and seeds the samples. Without an actor engines keep the
    weights that they have loaded themselves.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.engines = Engines(context)
        self.version = 0
        self.should_check_logprobs = not self.config.rollout.replay
        """Whether nobody has compared what the engines say with what the trainer says since they have started, or since
        a push that was verified in full."""
        self.step_rollouts: list[Rollouts] = []
        """What the step under way has been given."""
        self._num_generations, self._last_step = 0, 0
        self._next_group = 0
        self._is_closing = False
        self._runner: RolloutRunner | None = None
        self._lost_counts = {"rollout/lost_samples": 0, "rollout/regenerated_samples": 0}
        if self.config.rollout.replay:
            return
        lead, count = self.engines.lead_engine, len(self.engines.engine_ranks)
        if lead is not None and self.engines.engine_restart is not None:
            replays = self.config.train.replay_routing
            routing = routing_shape(context.hf_config, self.config.model.megatron) if replays else None
            self._runner = RolloutRunner(
                lead,
                context.chat,
                self.config.rollout,
                routing,
                context.on_rollout_finished,
                self.engines.engine_restart.report_lost,
            )
        agents = any(one.kind == "agent" for one in context.chat.catalog.environments.values())
        self._agent_metrics = AgentMetrics(agents, row_exchange.WorldComm(), self._runner)
        known = context.chat.catalog
        self._tool_monitor = ToolMonitor(
            bool(known.tools or known.environments),
            *(self.config.rollout, row_exchange.WorldComm(), self._runner, context.log, context.alarm),
        )
        number = None if lead is None else self.engines.engine_index
        self._oversampling = Oversampling(
            self.config.rollout,
            context.prompt_loader,
            row_exchange.WorldComm(),
            number,
            count,
            self.config.train.replay_routing and "actor" in context.num_updates,
        )
        self._stream = RolloutStream(
            self.config,
            context.next_prompts,
            row_exchange.WorldComm(),
            self._runner,
            count,
            KVStore(),
            self._step_seed,
            self._record_generation,
        )

    def begin_step(self, step: int) -> None:
        if step > self.step and not self.config.rollout.replay:
            self.engines.recovery.begin_step()
            self._lost_counts = dict.fromkeys(self._lost_counts, 0)
            self._tool_monitor.begin_step()
        super().begin_step(step)
        self._next_group = 0
        self.step_rollouts = []

    def start(self) -> None:
        self.engines.start()

    def wait_ready(self) -> None:
        with self.clock.phase("engine_start"):
            self.engines.wait_ready()
            if not self.config.rollout.replay:
                self._check_tool_parser()

    def _check_tool_parser(self) -> None:
        """See to it that the engine's parser reads the tool calls that the model's template writes."""
        chat, config = self.context.chat, self.config.rollout
        if not chat.tools:
            return
        limit, of_family = config.request_timeout, not config.tool_call_parser
        complaint = self.engines.run_on_leads(
            lambda engine: check_parser(
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
        self.engines.offload_models()
        with self.clock.phase("generate", WAIT):
            if config.rollout.replay:
                self.step_rollouts.append(self._replay(self._allocate_groups(len(prompts)), greedy))
                return self.step_rollouts[-1]
            self.engines.recovery.exchange_losses(look=True)
            self.engines.wait_for_engine(self._resume_stream)
            self.engines.wake()
            is_first, source = self.step > self._last_step and not greedy, self.context.prompt_loader
            if is_first:
                self._last_step = self.step
            # The last part is for an engine to let go of what is aborted.
            with self.engines.with_timeout(config.rollout.step_timeout + config.rollout.start_timeout):
                if is_first and config.rollout.asynchronous and source is not None and source.is_last_batch(prompts):
                    rollouts = self._generate_streaming(prompts, samples)
                else:
                    rollouts = self._generate(prompts, samples, greedy, held_out)
            self._agent_metrics.update()
            self._tool_monitor.update(self.step)
            if not greedy:
                self.step_rollouts.append(rollouts)
            check_abort_limit(rollouts, config)
            return rollouts

    def start_generation(
        self, prompts: Sequence[Prompt], samples: int, greedy: bool = False, held_out: bool = False
    ) -> PendingGeneration:
        """As `generate`, but nobody waits: with `rollout.asynchronous` it goes on while steps are taken. Where engines
        get other weights meanwhile, it goes on by those, as `rollout.on_push` says; each token has its version."""
        self.engines.recovery.exchange_losses(look=True)
        self.engines.wait_for_engine(self._resume_stream)
        self.engines.wake()
        self._num_generations += 1
        engines, mine = len(self.engines.engine_ranks), None
        tickets = GroupQueue(len(prompts), engines, KVStore(), f"megarl/generation/{self._num_generations}")
        first = 0 if greedy else self._allocate_groups(len(prompts)).start
        if self._runner is not None and self.engines.recovery.is_available(self.engines.engine_index):
            mine = self._runner.start_generation(
                prompts,
                tickets=tickets,
                samples=samples,
                greedy=greedy,
                seed=self._step_seed(self.step),
                first_group=first,
                held_out=held_out,
            )
        return PendingGeneration(
            *(mine, tickets, row_exchange.WorldComm()),
            begun=self.version,
            now=lambda: self.version,
            waiting=self._wait_phase,
        )

    @contextmanager
    def _wait_phase(self) -> Iterator[None]:
        config = self.config.rollout
        with self.clock.phase("generate", WAIT), self.engines.with_timeout(config.step_timeout + config.start_timeout):
            yield

    def _generate(self, prompts: Sequence[Prompt], samples: int, greedy: bool, held_out: bool) -> Rollouts:
        self._num_generations += 1
        name = f"megarl/generation/{self._num_generations}"
        plan = self._oversampling.plan(prompts, self.step, greedy)
        numbers = max(len(plan.prompts), plan.num_needed or 0)  # fewer are begun where others are gone on with
        first_group = 0 if greedy else self._allocate_groups(numbers).start
        tickets = GroupQueue(
            len(plan.prompts), len(self.engines.engine_ranks), KVStore(), name, plan.num_partial_groups
        )

        carried = self._continued_groups(plan.partial_groups, tickets)
        mine: GenerationResult | None = None
        lost, turn = True, 0
        while lost:
            turn += 1
            alarm = f"{name}/alarm/{turn}"

            def work(talks: RolloutRunner) -> GenerationResult:
                with self.clock.span(f"generation of step {self.step}", "rollout", self.engines.device_ranks):
                    try:
                        return talks.generate(
                            plan.prompts,
                            tickets=tickets,
                            samples=samples,
                            greedy=greedy,
                            seed=self._step_seed(self.step),
                            first_group=first_group,
                            needed=plan.num_needed,
                            carried=carried,  # noqa: B023  it is called at once
                            of=len(plan.prompts) * samples if plan.num_needed is None else None,
                            look=lambda: self._check_alarm(alarm),  # noqa: B023
                            held_out=held_out,
                        )
                    except TooManyAborted as many:
                        raise RuntimeError(
                            format_abort_error(many.count, many.total, many.failures, self.config)
                        ) from None

            found, lost = self._run_engine(work, alarm)
            mine = found if mine is None else mine if found is None else mine.merge(found)
            carried = ()
            if lost and not self._has_missing_groups(tickets, plan.num_needed):
                break
            if lost:
                self.engines.wait_for_engine(self._resume_stream)
        if turn > 1 or lost:
            while mine is not None and (back := tickets.claim_returned()) is not None:
                mine.partials.append(back.group)  # nobody needs it now: it goes on in a later step
            counts = torch.tensor([mine.num_interrupted, mine.num_restarted] if mine else [0, 0])
            self._count_lost(row_exchange.sum_over_ranks(counts).tolist())
        rollouts = _gather_rollouts(mine.rollouts if mine else [], self.version)
        self._oversampling.record_result(plan, mine, tickets.count_claimed(), rollouts)
        return rollouts

    def _continued_groups(self, groups: Sequence[Group], tickets: GroupQueue) -> Sequence[Group]:
        """What this rank's engine goes on with; where that is away, others do."""
        recovery = self.engines.recovery
        if not recovery.is_available(self.engines.engine_index):
            for group in groups:
                tickets.return_group(ReturnedGroup(0, restart_unfinished(group)))
            groups = ()
        if recovery.restarting or recovery.unsynced:
            ranks.barrier()  # else others might have looked for it before
        return groups

    def _run_engine(
        self, work: Callable[[RolloutRunner], GenerationResult | None], alarm: str, lost_too: bool = False
    ) -> tuple[GenerationResult | None, bool]:
        """What comes of it on this rank, where it leads an engine that is there, or with `lost_too` any, and whether
        some engine was lost meanwhile. Any other failure is raised on all ranks, and the alarm, for those that are
        still at it."""
        error, found = "", None
        if self._runner is not None and (lost_too or self.engines.recovery.is_available(self.engines.engine_index)):
            try:
                found = work(self._runner)
            except _GenerationStopped:
                pass
            except EngineLost as lost:
                assert self.engines.engine_restart is not None
                self.engines.engine_restart.report_lost(lost)
            except RuntimeError as failure:
                error = str(failure)
                ranks.set_flag(alarm)
        return found, self.engines.recovery.exchange_losses(error)

    def _has_missing_groups(self, tickets: GroupQueue, needed: int | None) -> bool:
        """Whether groups are, after an engine was lost; nobody takes any meanwhile."""
        return self._any_rank(tickets.count_unclaimed() > 0 if needed is None else tickets.count_complete() < needed)

    def _any_rank(self, something: bool) -> bool:
        return any(ranks.all_gather_objects(something))

    def _count_lost(self, counts: Sequence[int]) -> None:
        for name, more in zip(self._lost_counts, counts, strict=True):
            self._lost_counts[name] += more

    def _generate_streaming(self, prompts: Sequence[Prompt], samples: int) -> Rollouts:
        """The step's groups out of what goes on."""
        self._allocate_groups(len(prompts))  # whose numbers they have
        run_if_present(self._stream, lambda stream: stream.request_groups(prompts, samples, self.step))
        mine: GenerationResult | None = None
        while True:
            found, _ = self._run_engine(
                lambda talks: talks.collect(len(prompts), lambda: self._check_alarm(STREAM_NAME)).result(),
                STREAM_NAME,
                lost_too=True,
            )
            if found is not None:
                mine = found
            # Of engines that are lost, too, what was complete is taken.
            if self.engines.recovery.has_available_engine or not self._any_rank(
                self._runner is not None and found is None
            ):
                break
            self.engines.wait_for_engine(self._resume_stream)
        rollouts = _gather_rollouts(mine.rollouts if mine else [], self.version)
        self._stream.update_metrics(mine, rollouts)
        self._count_lost(self._stream.lost_counts)
        return rollouts

    def _resume_stream(self) -> None:
        """This rank's engine is there again, and its stream, if there is one, goes on."""
        if self._runner is not None:
            self._runner.resume()

    def _step_seed(self, step: int) -> int:
        return self.config.run.seed * 1_000_003 + step

    def _record_generation(self, began: float, ended: float) -> None:
        self.clock.add_span("generation", "rollout", began, ended, self.engines.device_ranks, thread="generation")

    def _check_alarm(self, alarm: str) -> None:
        if self._is_closing or ranks.is_flag_set(alarm):
            raise _GenerationStopped

    def update_weights(self, actor: ActorWorker) -> None:
        """Give every engine the actor's weights under the next version number; all ranks take part.

        The engines' KV caches stay asleep until `generate`, when what the push needed is gone. An engine that is lost
        meanwhile is started again, and no engine has these weights before all have them.
        """
        self.engines.offload_models(actor)
        takes_part = self.engines.engine_index is not None or actor.model is not None
        with self.clock.phase("push_weights", "push" if takes_part else REMOTE):
            self.version = self.step
            if self.config.rollout.replay:
                return
            self._pause_generation()
            self.engines.sync_weights(actor, self.version)
            self.should_check_logprobs = self.should_check_logprobs or self.engines.is_verified
            if self.config.rollout.asynchronous:
                run_if_present(self._stream, lambda stream: stream.resume(self.step))

    def find_mismatches(self, actor: ActorWorker) -> list[str] | None:
        """See `Engines.find_mismatches`; nothing is generated any more."""
        self._pause_generation()
        return self.engines.find_mismatches(actor)

    def _pause_generation(self) -> None:
        """Have what is under way out of the way of new weights, as `rollout.on_push` says."""
        if not self.config.rollout.asynchronous:
            return
        config = self.config.rollout
        own = self.engines.engine
        again = own is not None and own.weight_version == self.version
        # Weights under a number that the engine has had must find no cache that is salted by it.
        how = "retract" if again and config.on_push == "in_place" else config.on_push
        with self.clock.span("training", WAIT):
            ranks.barrier()  # engines' ranks have nothing to train, and would be here before there are weights
        with (
            self.clock.phase("generate_rest", WAIT),
            self.engines.with_timeout(config.step_timeout + config.start_timeout),
        ):
            run_if_present(self._runner, lambda talks: talks.pause(how))

    def sleep(self) -> None:
        """Leave the device to training, unless it is the engines' own."""
        if self.config.rollout.asynchronous or self.config.rollout.replay:
            return
        with self.clock.phase("sleep", self.engines.phase_owner):
            self.engines.sleep()

    def metrics(self) -> dict[str, float]:
        if self.config.rollout.replay:
            return {}
        recovered = self.engines.recovery.metrics()
        if recovered or any(self._lost_counts.values()):
            recovered |= {name: float(count) for name, count in self._lost_counts.items()}
        return (
            self._oversampling.metrics
            | self._stream.metrics
            | self._agent_metrics.metrics
            | self._tool_monitor.metrics
            | recovered
        )

    def save(self) -> Write:
        """Conversations that a later step goes on with."""
        return write_nothing if self.config.rollout.replay else self._oversampling.save()

    def restore(self, folder: Path) -> None:
        if not self.config.rollout.replay:
            self._oversampling.restore(folder)

    def close(self) -> None:
        self._is_closing = True
        if self._runner is not None:
            self._runner.close()
        self.engines.close()

    def _allocate_groups(self, count: int) -> range:
        """Numbers of so many further groups of the step."""
        first, self._next_group = self._next_group, self._next_group + count
        return range(first, self._next_group)

    def _replay(self, groups: range, greedy: bool) -> Rollouts:
        """What is recorded of these groups of the step. Each rank has what it had, where the recorded run had as many:
        figures that are summed up rank by rank then have the same bits."""
        source = ReplaySource.parse(self.config.rollout.replay)
        step = source.recorded_step(self.step)
        where = f"rollout.replay={self.config.rollout.replay}, step {step}"
        if greedy:
            raise ConfigError(f"{where}: only what is sampled is recorded, and this algorithm generates greedily, too")
        recorded = read_records(source.folder, step, self.job.rank, self.job.world, needs_trainer_columns(self.config))
        mine = [one for one in recorded if one.rollout.group in groups]
        # By their numbers, since files of several ranks may be one rank's now, or the other way round.
        found = Rollouts.gather(
            [one.rollout for one in mine], [one.number for one in mine], row_exchange.WorldComm(), self.version
        )
        if groups and not len(found):
            raise ConfigError(
                f"{where} has nothing of the groups {groups.start} to {groups.stop - 1}: of a step that generates "
                "several times only what StepResult.rollouts has is recorded"
            )
        return found


def _gather_rollouts(mine: Sequence[Rollout], version: int) -> Rollouts:
    return Rollouts.gather(mine, [rollout.group for rollout in mine], row_exchange.WorldComm(), version)


class _GenerationStopped(RuntimeError):
    """This engine is all right, another has failed."""
