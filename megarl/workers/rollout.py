"""The rollout role: lead ranks feed their engines from one queue. Rollouts stay there; all ranks get the statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from megarl.checkpoint.manifest import Write, write_nothing
from megarl.config import Config, ConfigError
from megarl.engine.engine_protocol import EngineLost
from megarl.engine.sglang_engine import Engine
from megarl.engine.tool_calls import check_parser
from megarl.models.routing import routing_shape
from megarl.models.sparse_indices import index_shape
from megarl.observe.clock import REMOTE, WAIT
from megarl.observe.replayed_rollouts import ReplaySource, needs_trainer_columns
from megarl.observe.rollout_log import read_records
from megarl.parallel import ranks, row_exchange
from megarl.parallel.kv_store import KVStore
from megarl.parallel.placement import split_role
from megarl.rollout.aborted import TooManyAborted, check_abort_limit, format_abort_error
from megarl.rollout.group_queue import GroupQueue
from megarl.rollout.rollout_runner import RolloutRunner
from megarl.rollout.scheduler import GenerationResult, Group, ReturnedGroup
from megarl.types import Prompt, Rollout, Rollouts
from megarl.workers.actor import ActorWorker
from megarl.workers.async_rollout import STREAM_NAME, Oversampling, PendingGeneration, RolloutStream
from megarl.workers.context import Context, Worker
from megarl.workers.engines import Engines, run_if_present
from megarl.workers.tool_stats import AgentMetrics, ToolMonitor


class RolloutWorker(Worker):
    """Generates rollouts with the engines, see `Engines`.

    With `rollout.replay` there are no engines: `generate` reads the rollouts that another run recorded for the current
    step. The step also seeds the samples. Without an actor engines keep the weights that they have loaded.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.engines = Engines(context)
        self._store_name = "megarl/generation" + (f"/{context.role}" if split_role(context.role)[1] else "")
        """Prefix of this role's names in the store that the ranks share."""
        self.version = 0
        self.should_check_logprobs = not self.config.rollout.replay
        """True until engine and trainer log-probs have been compared after the last start or fully verified weight
        sync."""
        self.step_rollouts: list[Rollouts] = []
        """Sampled rollouts that the current step has received."""
        self._num_generations, self._last_step = 0, 0
        self._next_group = 0
        self._is_closing = False
        self._runner: RolloutRunner | None = None
        self._lost_counts = {"rollout/lost_samples": 0, "rollout/regenerated_samples": 0}
        if self.config.rollout.replay:
            return
        lead_engine, num_engines = self.engines.lead_engine, len(self.engines.engine_ranks)
        if lead_engine is not None and self.engines.engine_restart is not None:
            replays = self.config.train.routing_replay
            routing = routing_shape(context.hf_config, self.config.model.megatron) if replays else None
            self._runner = RolloutRunner(
                lead_engine,
                context.chat,
                self.config.rollout,
                routing,
                context.on_rollout_finished,
                self.engines.engine_restart.report_lost,
                index_shape(context.hf_config, self.config),
            )
        has_agents = any(environment.kind == "agent" for environment in context.chat.catalog.environments.values())
        self._agent_metrics = AgentMetrics(has_agents, row_exchange.WorldComm(), self._runner)
        catalog = context.chat.catalog
        self._tool_monitor = ToolMonitor(
            bool(catalog.tools or catalog.environments),
            *(self.config.rollout, row_exchange.WorldComm(), self._runner, context.log, context.alarm),
        )
        engine_index = None if lead_engine is None else self.engines.engine_index
        self._oversampling = Oversampling(
            self.config.rollout,
            context.prompt_loader,
            row_exchange.WorldComm(),
            engine_index,
            num_engines,
            (self.config.train.routing_replay or self.config.train.sparse_index_replay)
            and "actor" in context.num_updates,
        )
        self._stream = RolloutStream(
            self.config,
            context.next_prompts,
            row_exchange.WorldComm(),
            self._runner,
            num_engines,
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

    def set_config(self, config: Config) -> None:
        super().set_config(config)
        if self._runner is not None:
            self._runner.set_config(config.rollout)

    def start(self) -> None:
        self.engines.start()

    def wait_ready(self) -> None:
        with self.clock.phase("engine_start"):
            self.engines.wait_ready()
            if not self.config.rollout.replay:
                self._check_tool_parser()

    def _check_tool_parser(self) -> None:
        """Raise ConfigError unless the engine's parser reads the tool calls that the model's template writes."""
        chat, config = self.context.chat, self.config.rollout
        if not chat.tools:
            return
        limit, is_family_default = config.request_timeout, not config.tool_call_parser

        def check(engine: Engine) -> str:
            parser, marker = engine.tool_call_parser, engine.tool_call_marker
            return check_parser(chat, engine.url, engine.api_key, parser, marker, limit, is_family_default)

        problem = self.engines.run_on_leads(check)
        for text in ranks.all_gather_objects(problem):
            if text:
                raise ConfigError(text)

    def generate(
        self, prompts: Sequence[Prompt], samples: int, greedy: bool = False, held_out: bool = False
    ) -> Rollouts:
        """Generate `samples` conversations for each prompt, adjacent and in the order of the prompts.

        A step may call this several times. Group numbers continue over its sampling calls and determine the seeds;
        greedy responses need no seed and have the numbers of their prompts, from 0. held_out: sample with the
        parameters of an evaluation (`rollout.eval_temperature`, `rollout.eval_top_p`); these rollouts are not trained
        on.

        With `rollout.asynchronous`, generation of the groups of a step's first training call starts before the call,
        and groups of later steps are in flight when it returns.

        With `rollout.oversample`, a step's first training call returns as many groups as prompts, in order of
        completion. These may come from an earlier step; unfinished groups are kept for later steps.

        Rollouts cut off by a failure or a timeout have status `aborted`. Raises ConfigError on all ranks if more than
        `rollout.max_aborted_frac` are, or if an engine is lost by the same fault twice in a row. Other engines
        regenerate the conversations of a lost engine.
        """
        config = self.config
        self.engines.offload_models()
        with self.clock.phase("generate", WAIT):
            if config.rollout.replay:
                self.step_rollouts.append(self._replay(self._allocate_groups(len(prompts)), greedy))
                return self.step_rollouts[-1]
            self.engines.recovery.exchange_losses(should_check=True)
            self.engines.wait_for_engine(self._resume_stream)
            self.engines.wake()
            is_first, loader = self.step > self._last_step and not greedy, self.context.prompt_loader
            if is_first:
                self._last_step = self.step
            # `start_timeout` covers the time an engine needs to release aborted requests.
            with self.engines.with_timeout(config.rollout.step_timeout + config.rollout.start_timeout):
                if is_first and config.rollout.asynchronous and loader is not None and loader.is_last_batch(prompts):
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
        """Like `generate`, without waiting: with `rollout.asynchronous` it continues during the following steps.

        After a weight sync it continues with the new weights, as configured by `rollout.on_weight_sync`; each token
        records its version.
        """
        self.engines.recovery.exchange_losses(should_check=True)
        self.engines.wait_for_engine(self._resume_stream)
        self.engines.wake()
        self._num_generations += 1
        num_engines, future = len(self.engines.engine_ranks), None
        group_queue = GroupQueue(len(prompts), num_engines, KVStore(), f"{self._store_name}/{self._num_generations}")
        first_group = 0 if greedy else self._allocate_groups(len(prompts)).start
        if self._runner is not None and self.engines.recovery.is_available(self.engines.engine_index):
            future = self._runner.start_generation(
                prompts,
                queue=group_queue,
                samples=samples,
                greedy=greedy,
                seed=self._step_seed(self.step),
                first_group=first_group,
                held_out=held_out,
            )
        return PendingGeneration(
            *(future, group_queue, row_exchange.WorldComm()),
            start_version=self.version,
            current_version=lambda: self.version,
            wait_phase=self._wait_phase,
        )

    @contextmanager
    def _wait_phase(self) -> Iterator[None]:
        config = self.config.rollout
        with self.clock.phase("generate", WAIT), self.engines.with_timeout(config.step_timeout + config.start_timeout):
            yield

    def _generate(self, prompts: Sequence[Prompt], samples: int, greedy: bool, held_out: bool) -> Rollouts:
        self._num_generations += 1
        name = f"{self._store_name}/{self._num_generations}"
        plan = self._oversampling.plan(prompts, self.step, greedy)
        num_groups = max(len(plan.prompts), plan.num_needed or 0)  # partial groups reduce the prompts to start
        first_group = 0 if greedy else self._allocate_groups(num_groups).start
        group_queue = GroupQueue(
            len(plan.prompts), len(self.engines.engine_ranks), KVStore(), name, plan.num_partial_groups
        )

        partial_groups = self._continued_groups(plan.partial_groups, group_queue)
        result: GenerationResult | None = None
        lost, attempt = True, 0
        while lost:
            attempt += 1
            alarm = f"{name}/alarm/{attempt}"

            def work(runner: RolloutRunner) -> GenerationResult:
                with self.clock.span(f"generation of step {self.step}", "rollout", self.engines.device_ranks):
                    try:
                        return runner.generate(
                            plan.prompts,
                            queue=group_queue,
                            samples=samples,
                            greedy=greedy,
                            seed=self._step_seed(self.step),
                            first_group=first_group,
                            num_needed_groups=plan.num_needed,
                            partial_groups=partial_groups,  # noqa: B023  called immediately
                            num_total=len(plan.prompts) * samples if plan.num_needed is None else None,
                            check=lambda: self._check_alarm(alarm),  # noqa: B023
                            held_out=held_out,
                        )
                    except TooManyAborted as error:
                        raise RuntimeError(
                            format_abort_error(error.count, error.total, error.failures, self.config)
                        ) from None

            partial_result, lost = self._run_engine(work, alarm)
            result = (
                partial_result if result is None else result if partial_result is None else result.merge(partial_result)
            )
            partial_groups = ()
            if lost and not self._has_missing_groups(group_queue, plan.num_needed):
                break
            if lost:
                self.engines.wait_for_engine(self._resume_stream)
        if attempt > 1 or lost:
            while result is not None and (returned := group_queue.claim_returned()) is not None:
                result.partials.append(returned.group)  # not needed in this step: a later step continues it
            counts = torch.tensor([result.num_interrupted, result.num_restarted] if result else [0, 0])
            self._count_lost(row_exchange.WorldComm().all_reduce(counts).tolist())
        rollouts = _gather_rollouts(result.rollouts if result else [], self.version)
        self._oversampling.record_result(plan, result, group_queue.count_claimed(), rollouts)
        return rollouts

    def _continued_groups(self, groups: Sequence[Group], queue: GroupQueue) -> Sequence[Group]:
        """Return the groups that this rank's engine continues. If it is not available, other engines continue them."""
        recovery = self.engines.recovery
        if not recovery.is_available(self.engines.engine_index):
            for group in groups:
                queue.return_group(replace(ReturnedGroup.restart(0, group), num_interrupted=0))
            groups = ()
        if recovery.restarting or recovery.unsynced:
            ranks.barrier()  # otherwise other engines might look for them before they are returned
        return groups

    def _run_engine(
        self, work: Callable[[RolloutRunner], GenerationResult | None], alarm: str, include_lost: bool = False
    ) -> tuple[GenerationResult | None, bool]:
        """Run `work` if this rank leads an available engine, or any engine with `include_lost`. Collective.

        Returns the result on this rank, and whether any engine was lost. Other failures are raised on all ranks, and
        set the flag `alarm` to stop the engines that are still generating.
        """
        error, result = "", None
        if self._runner is not None and (include_lost or self.engines.recovery.is_available(self.engines.engine_index)):
            try:
                result = work(self._runner)
            except _GenerationStopped:
                pass
            except EngineLost as lost:
                assert self.engines.engine_restart is not None
                self.engines.engine_restart.report_lost(lost)
            except RuntimeError as failure:
                error = str(failure)
                ranks.set_flag(alarm)
        return result, self.engines.recovery.exchange_losses(error)

    def _has_missing_groups(self, queue: GroupQueue, num_needed: int | None) -> bool:
        """True if groups are missing after an engine loss. No engine may claim groups meanwhile. Collective."""
        is_missing = queue.count_unclaimed() > 0 if num_needed is None else queue.count_complete() < num_needed
        return any(ranks.all_gather_objects(is_missing))

    def _count_lost(self, counts: Sequence[int]) -> None:
        for name, more in zip(self._lost_counts, counts, strict=True):
            self._lost_counts[name] += more

    def _generate_streaming(self, prompts: Sequence[Prompt], samples: int) -> Rollouts:
        """Collect the step's groups from the stream."""
        self._allocate_groups(len(prompts))  # the groups have these numbers
        run_if_present(self._stream, lambda stream: stream.request_groups(prompts, samples, self.step))
        result: GenerationResult | None = None
        while True:
            collected, _ = self._run_engine(
                lambda runner: runner.collect(len(prompts), lambda: self._check_alarm(STREAM_NAME)).result(),
                STREAM_NAME,
                include_lost=True,
            )
            if collected is not None:
                result = collected
            # Completed groups of lost engines are collected, too.
            is_missing = self._runner is not None and collected is None
            if self.engines.recovery.has_available_engine or not any(ranks.all_gather_objects(is_missing)):
                break
            self.engines.wait_for_engine(self._resume_stream)
        rollouts = _gather_rollouts(result.rollouts if result else [], self.version)
        self._stream.update_metrics(result, rollouts)
        self._count_lost(self._stream.lost_counts)
        return rollouts

    def _resume_stream(self) -> None:
        """Resume the stream, if any, after this rank's engine has restarted."""
        if self._runner is not None:
            self._runner.resume()

    def _step_seed(self, step: int) -> int:
        return self.config.run.seed * 1_000_003 + step

    def _record_generation(self, start: float, end: float) -> None:
        self.clock.add_span("generation", "rollout", start, end, self.engines.device_ranks, thread="generation")

    def _check_alarm(self, alarm: str) -> None:
        if self._is_closing or ranks.is_flag_set(alarm):
            raise _GenerationStopped

    def update_weights(self, actor: ActorWorker) -> None:
        """Sync the actor's weights to every engine, with the step as their version. Collective over all ranks.

        The engines' KV caches stay asleep until `generate`, when the memory for the sync has been freed. An engine lost
        during the sync restarts, and no engine uses these weights before all have them.
        """
        self.engines.offload_models(actor)
        takes_part = self.engines.engine_index is not None or actor.model is not None
        with self.clock.phase("weight_sync", "weight_sync" if takes_part else REMOTE):
            self.version = self.step
            if self.config.rollout.replay:
                return
            self._pause_generation()
            self.engines.sync_weights(actor, self.version)
            self.should_check_logprobs = self.should_check_logprobs or self.engines.is_verified
            if self.config.rollout.asynchronous:
                run_if_present(self._stream, lambda stream: stream.resume(self.step))

    def find_mismatches(self, actor: ActorWorker) -> list[str] | None:
        """See `Engines.find_mismatches`. The engines no longer generate afterwards."""
        self._pause_generation()
        return self.engines.find_mismatches(actor)

    def _pause_generation(self) -> None:
        """Pause running responses before a weight sync, as configured by `rollout.on_weight_sync`."""
        if not self.config.rollout.asynchronous:
            return
        config = self.config.rollout
        engine = self.engines.engine
        is_same_version = engine is not None and engine.weight_version == self.version
        # If the engine has used this version before, its KV cache, which is salted by the version, must not be reused.
        mode = "retract" if is_same_version and config.on_weight_sync == "in_place" else config.on_weight_sync
        with self.clock.span("training", WAIT):
            ranks.barrier()  # engine ranks have nothing to train, and would get here before there are new weights
        with (
            self.clock.phase("drain_generation", WAIT),
            self.engines.with_timeout(config.step_timeout + config.start_timeout),
        ):
            run_if_present(self._runner, lambda runner: runner.pause(mode))

    def sleep(self) -> None:
        """Release the device for training, unless the engines are on separate ranks."""
        if self.config.rollout.asynchronous or self.config.rollout.replay:
            return
        with self.clock.phase("sleep", self.engines.phase_owner):
            self.engines.sleep()

    def metrics(self) -> dict[str, float]:
        if self.config.rollout.replay:
            return {}
        recovery_metrics = self.engines.recovery.metrics()
        if recovery_metrics or any(self._lost_counts.values()):
            recovery_metrics |= {name: float(count) for name, count in self._lost_counts.items()}
        return (
            self._oversampling.metrics
            | self._stream.metrics
            | self._agent_metrics.metrics
            | self._tool_monitor.metrics
            | recovery_metrics
        )

    def save(self) -> Write:
        """Save the partial groups that a later step continues."""
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
        """Allocate the next `count` group numbers of the step."""
        first, self._next_group = self._next_group, self._next_group + count
        return range(first, self._next_group)

    def _replay(self, groups: range, greedy: bool) -> Rollouts:
        """Read the recorded rollouts of these groups of the step.

        If the recorded run had as many ranks, each rank reads its own rollouts, so that values summed rank by rank are
        bitwise equal.
        """
        source = ReplaySource.parse(self.config.rollout.replay)
        step = source.recorded_step(self.step)
        where = f"rollout.replay={self.config.rollout.replay}, step {step}"
        if greedy:
            raise ConfigError(f"{where}: greedy rollouts are not recorded, but this algorithm generates some")
        recorded = read_records(source.folder, step, self.job.rank, self.job.world, needs_trainer_columns(self.config))
        local_records = [record for record in recorded if record.rollout.group in groups]
        # Order by recorded number, since the mapping of files to ranks may differ.
        rollouts = Rollouts.gather(
            [record.rollout for record in local_records],
            [record.number for record in local_records],
            row_exchange.WorldComm(),
            self.version,
        )
        if groups and not len(rollouts):
            raise ConfigError(
                f"{where} has no rollouts of the groups {groups.start} to {groups.stop - 1}: of a step that generates "
                f"several times, only StepResult.rollouts is recorded"
            )
        return rollouts


def _gather_rollouts(rollouts: Sequence[Rollout], version: int) -> Rollouts:
    return Rollouts.gather(rollouts, [rollout.group for rollout in rollouts], row_exchange.WorldComm(), version)


class _GenerationStopped(RuntimeError):
    """Generation was stopped because another engine has failed."""
