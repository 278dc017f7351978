"""The rollout role: lead ranks feed their engines from one queue. Rollouts stay there; all ranks get the statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch

from megarl.checkpoint.manifest import Write, write_nothing
from megarl.config import Config, ConfigError, OnWeightSync
from megarl.engine.engine_protocol import Engine, EngineLost
from megarl.engine.tool_calls import check_parser
from megarl.models.routing import routing_shape
from megarl.models.sparse_indices import index_shape
from megarl.observe.clock import REMOTE, WAIT
from megarl.observe.replayed_rollouts import ReplayedStep
from megarl.observe.step_record import GenerateCall
from megarl.parallel import ranks, row_exchange
from megarl.parallel.kv_store import KVStore
from megarl.parallel.placement import split_role
from megarl.rollout.aborted import TooManyAborted, check_abort_limit, format_abort_error
from megarl.rollout.engine_usage import WIDTH as USAGE_WIDTH
from megarl.rollout.engine_usage import EngineUsage
from megarl.rollout.group_queue import GroupQueue
from megarl.rollout.rollout_runner import RolloutRunner
from megarl.rollout.scheduler import GenerationResult
from megarl.types import Comm, Prompt, Rollout, Rollouts
from megarl.workers.actor import ActorWorker
from megarl.workers.async_rollout import PendingGeneration, RolloutStream
from megarl.workers.context import Context, Worker
from megarl.workers.engines import Engines, run_if_present
from megarl.workers.expert_balance import ExpertBalance
from megarl.workers.tool_stats import AgentMetrics, ToolMonitor


class RolloutWorker(Worker):
    """Generates rollouts with the engines, see `Engines`.

    With `rollout.replay` there are no engines: `generate` reads the rollouts that another run recorded for the current
    step. The step also seeds the samples. Without an actor engines keep the weights that they have loaded.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.engines = Engines(context)
        self.engines.end_turn = self._sleep_engines
        policy = split_role(context.role)[1]
        self._store_name = "megarl/generation" + (f"/{context.role}" if policy else "")
        """Prefix of this role's names in the store that the ranks share."""
        self.version = 0
        self.should_check_logprobs = not self.config.rollout.replay
        """True until engine and trainer log-probs have been compared after the last start or fully verified weight
        sync."""
        self.generations: list[GenerateCall] = []
        """The calls of `generate` in the current step, and their results."""
        self._replayed_step: ReplayedStep | None = None
        self._prompts: dict[int, Prompt] = {}
        """Prompts by group number of the current step's samples, on the ranks that know them."""
        self._engine_metrics: dict[str, float] = {}
        self._num_generations = self._next_group = 0
        self._is_closing = False
        self._runner: RolloutRunner | None = None
        self._external_counts, self._num_external = [0] * 3, 0
        """Counts of this step: responses of all engines, responses of external engines, repeated requests. Then the
        number of external engines that may generate."""
        self._lost_counts = {"rollout/lost_samples": 0, "rollout/regenerated_samples": 0}
        self._expert_balance: ExpertBalance | None = None
        """Where the engines' experts are, if weight syncs move them."""
        if self.config.rollout.replay:
            return
        if self.config.rollout.rebalance_experts_every:
            self._expert_balance = ExpertBalance(context.hf_config, self.config, row_exchange.WorldComm(), policy)
        lead_engine, num_engines = self.engines.lead_engine, len(self.engines.engine_ranks)
        if lead_engine is not None and self.engines.engine_restart is not None:
            records = self.config.records_routing
            routing = routing_shape(context.hf_config, self.config.model.megatron) if records else None
            self._runner = RolloutRunner(
                lead_engine,
                context.chat,
                self.config.rollout,
                routing,
                context.on_rollout_finished,
                self.engines.engine_restart.report_lost,
                index_shape(context.hf_config, self.config),
                self.engines.external,
                self.engines.adapter,
            )
        has_agents = any(environment.kind == "agent" for environment in context.chat.catalog.environments.values())
        self._agent_metrics = AgentMetrics(has_agents, row_exchange.WorldComm(), self._runner)
        catalog = context.chat.catalog
        self._tool_monitor = ToolMonitor(
            bool(catalog.tools or catalog.environments),
            *(self.config.rollout, row_exchange.WorldComm(), self._runner, context.log, context.alarm),
        )
        self._stream = RolloutStream(
            self.config,
            context.prompt_loader,
            row_exchange.WorldComm(),
            self._runner,
            None if lead_engine is None else self.engines.engine_index,
            num_engines,
            KVStore(),
            self._step_seed,
            self._record_generation,
            policy,
        )

    def begin_step(self, step: int) -> None:
        if step > self.step and not self.config.rollout.replay:
            self.engines.recovery.begin_step()
            self._lost_counts = dict.fromkeys(self._lost_counts, 0)
            self._tool_monitor.begin_step()
        super().begin_step(step)
        self._next_group = 0
        self.generations, self._replayed_step = [], None
        self._prompts, self._engine_metrics = {}, {}
        self._external_counts = [0] * 3

    def set_config(self, config: Config) -> None:
        super().set_config(config)
        self.engines.set_external(() if config.rollout.replay else config.rollout.external)
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
            return check_parser(chat, engine.connect(limit), parser, marker, is_family_default)

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

        With `rollout.asynchronous` or `rollout.oversample`, sampling for the last prompts of the loader takes its
        groups from a stream whose other groups are in flight when the call returns. With the latter these are the first
        that are complete, of any prompts of the loader, in order of completion.

        With `rollout.replay`, a call returns what the same call of the recorded step did, whatever the prompts.

        Rollouts cut off by a failure or a timeout have status `aborted`. Raises ConfigError on all ranks if more than
        `rollout.max_aborted_frac` are, or if an engine is lost by the same fault twice in a row. Other engines
        regenerate the conversations of a lost engine.
        """
        config = self.config
        self.engines.offload_models()
        with self.clock.phase("generate", WAIT):
            if config.rollout.replay:
                return self._replay(len(prompts), greedy)
            self.engines.recovery.exchange_losses(should_check=True)
            self.engines.wait_for_engine(self._resume_stream)
            self.engines.wake()
            # `start_timeout` covers the time an engine needs to release aborted requests.
            with self._with_step_timeout():
                if not greedy and not held_out and self._stream.provides(prompts):
                    rollouts = self._generate_streaming(len(prompts), samples)
                else:
                    rollouts = self._generate(prompts, samples, greedy, held_out)
            self._agent_metrics.update()
            self._tool_monitor.update(self.step)
            if self.engines.external_addresses:
                self._count_external()
            if self._expert_balance is not None and not held_out:
                self._expert_balance.count(rollouts.local)
            if not config.train.routing_replay:
                rollouts = rollouts.without_routing()
            self.generations.append(GenerateCall(rollouts, greedy))
            check_abort_limit(rollouts, config)
            return rollouts

    def generate_again(self, rollouts: Rollouts, samples: int = 1, greedy: bool = True) -> Rollouts:
        """Generate for the prompts of these rollouts of the current step; the results have their group numbers."""
        groups = rollouts.group.unique().tolist()
        if self.config.rollout.replay:
            with self.clock.phase("generate", WAIT):
                return self._replay(len(groups), greedy)
        known = {group: self._prompts[group] for group in groups if group in self._prompts}
        prompts = {
            group: prompt
            for part in row_exchange.WorldComm().all_gather_objects(known)
            for group, prompt in part.items()
        }
        result = self.generate([prompts[group] for group in groups], samples, greedy)
        first = 0 if greedy else self._next_group - len(groups)
        result = result.with_groups({first + index: group for index, group in enumerate(groups)})
        self.generations[-1] = GenerateCall(result, greedy)
        return result

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
            keeps_routing=self.config.train.routing_replay,
        )

    @contextmanager
    def _wait_phase(self) -> Iterator[None]:
        with self.clock.phase("generate", WAIT), self._with_step_timeout():
            yield

    def _generate(self, prompts: Sequence[Prompt], samples: int, greedy: bool, held_out: bool) -> Rollouts:
        self._num_generations += 1
        name = f"{self._store_name}/{self._num_generations}"
        first_group = 0 if greedy else self._allocate_groups(len(prompts)).start
        if not greedy and not held_out:
            self._prompts |= dict(enumerate(prompts, first_group))
        group_queue = GroupQueue(len(prompts), len(self.engines.engine_ranks), KVStore(), name)
        result: GenerationResult | None = None
        lost, attempt = True, 0
        while lost:
            attempt += 1
            alarm = f"{name}/alarm/{attempt}"

            def work(runner: RolloutRunner) -> GenerationResult:
                with self.clock.span(f"generation of step {self.step}", "rollout", self.engines.device_ranks):
                    try:
                        return runner.generate(
                            prompts,
                            queue=group_queue,
                            samples=samples,
                            greedy=greedy,
                            seed=self._step_seed(self.step),
                            first_group=first_group,
                            num_total=len(prompts) * samples,
                            check=lambda: self._check_alarm(alarm),  # noqa: B023  called immediately
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
            if lost and not any(ranks.all_gather_objects(group_queue.count_unclaimed() > 0)):
                break  # no engine claims groups meanwhile
            if lost:
                self.engines.wait_for_engine(self._resume_stream)
        if attempt > 1 or lost:
            counts = torch.tensor([result.num_interrupted, result.num_restarted] if result else [0, 0])
            self._count_lost(row_exchange.WorldComm().all_reduce(counts).tolist())
        if not greedy and not held_out and not self._engine_metrics:
            self._engine_metrics = measure_engines(result, row_exchange.WorldComm())
        return _gather_rollouts(result.rollouts if result else [], self.version)

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

    def _count_external(self) -> None:
        """Add up what external engines have done since the last call. Collective."""
        external, counts = self.engines.external if self._runner is not None else None, [0] * 4
        if external is not None:
            counts = [external.num_responses, external.num_external, external.num_repeated, external.num_usable]
            external.num_responses = external.num_external = external.num_repeated = 0
        *sums, self._num_external = row_exchange.WorldComm().all_reduce(torch.tensor(counts)).tolist()
        self._external_counts = [old + new for old, new in zip(self._external_counts, sums, strict=True)]
        self.engines.log_external()

    def _count_lost(self, counts: Sequence[int]) -> None:
        for name, more in zip(self._lost_counts, counts, strict=True):
            self._lost_counts[name] += more

    def _generate_streaming(self, count: int, samples: int) -> Rollouts:
        """Collect `count` groups from the stream."""
        first_group = self._allocate_groups(count).start
        run_if_present(self._stream, lambda stream: stream.request_groups(count, samples, self.step, self.version))
        is_available = self.engines.recovery.is_available(self.engines.engine_index)
        run_if_present(self._runner if is_available else None, RolloutRunner.wake)
        result: GenerationResult | None = None
        alarm = self._stream.name
        while True:
            collected, _ = self._run_engine(
                lambda runner: runner.collect(count, first_group, lambda: self._check_alarm(alarm)).result(),
                alarm,
                include_lost=True,
            )
            if collected is not None:
                result = collected
            # Completed groups of lost engines are collected, too.
            is_missing = self._runner is not None and collected is None
            if self.engines.recovery.has_available_engine or not any(ranks.all_gather_objects(is_missing)):
                break
            self.engines.wait_for_engine(self._resume_stream)
        if result is not None:
            self._prompts |= result.prompts
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
            if self._expert_balance is not None:
                self._expert_balance.rebalance(self.step)
                self.engines.place_experts(self._expert_balance.placements)
            self.engines.sync_weights(actor, self.version)
            self.should_check_logprobs = self.should_check_logprobs or self.engines.is_verified
            run_if_present(self._stream, lambda stream: stream.on_weight_sync(self.step))
            if self.config.rollout.asynchronous:
                run_if_present(None if self.engines.sleeps else self._runner, RolloutRunner.resume)

    def find_mismatches(self, actor: ActorWorker) -> list[str] | None:
        """See `Engines.find_mismatches`. The engines no longer generate afterwards."""
        self._pause_generation()
        return self.engines.find_mismatches(actor)

    def _pause_generation(self) -> None:
        """Pause running responses before a weight sync, as configured by `rollout.on_weight_sync`."""
        config = self.config.rollout
        if not config.asynchronous:
            return
        engine = self.engines.engine
        is_same_version = engine is not None and engine.version_of(self.engines.adapter) == self.version
        # If the engine has used this version before, its KV cache, which is salted by the version, must not be reused.
        mode = "retract" if is_same_version and config.on_weight_sync == "in_place" else config.on_weight_sync
        with self.clock.span("training", WAIT):
            ranks.barrier()  # engine ranks have nothing to train, and would get here before there are new weights
        with self.clock.phase("drain_generation", WAIT), self._with_step_timeout():
            run_if_present(self._runner, lambda runner: runner.pause(mode))

    @property
    def generates_beside_training(self) -> bool:
        """True if the engines have ranks of their own and never sleep."""
        return self.config.rollout.asynchronous and not self.engines.shared

    def sleep(self) -> None:
        """Release the devices for training: those of these engines, and of others that take turns.

        With `rollout.asynchronous` engines on separate ranks go on generating. All ranks put the engines of the roles
        to sleep in the order in which the roles started.
        """
        self._sleep_engines()
        for other in self.context.engines.values():
            is_turn_over = other.takes_turns or other.has_engines_of(self.engines)
            if other is not self.engines and is_turn_over and other.is_awake:
                other.end_turn()

    def _sleep_engines(self) -> None:
        config = self.config.rollout
        if config.replay or self.generates_beside_training:
            return
        with self.clock.phase("sleep", self.engines.phase_owner):
            if self._stream.is_running:
                with self._with_step_timeout():
                    # A KV cache that is kept for newer weights would not survive.
                    mode: OnWeightSync = "wait" if config.on_weight_sync == "wait" else "retract"
                    run_if_present(self._runner if self.engines.sleeps else None, lambda runner: runner.sleep(mode))
            self.engines.sleep()

    def _with_step_timeout(self) -> AbstractContextManager[None]:
        config = self.config.rollout
        return self.engines.with_timeout(config.step_timeout + config.start_timeout)

    def metrics(self) -> dict[str, float]:
        if self.config.rollout.replay:
            return {} if self._replayed_step is None else self._replayed_step.metrics
        recovery_metrics = self.engines.recovery.metrics()
        if recovery_metrics or any(self._lost_counts.values()):
            recovery_metrics |= {name: float(count) for name, count in self._lost_counts.items()}
        return (
            self._engine_metrics
            | self._stream.metrics
            | self._agent_metrics.metrics
            | self._tool_monitor.metrics
            | self.engines.sync_metrics()
            | ({} if self._expert_balance is None else self._expert_balance.metrics)
            | self._external_metrics()
            | recovery_metrics
        )

    def _external_metrics(self) -> dict[str, float]:
        if not self.engines.external_addresses:
            return {}
        responses, external, repeated = self._external_counts
        return {
            "rollout/external_engines": float(self._num_external),
            "rollout/external_frac": external / max(1, responses),
            "rollout/external_repeated": float(repeated),
        }

    def save(self) -> Write:
        """Save the groups in flight that a later step continues, and where the engines' experts are."""
        if self.config.rollout.replay:
            return write_nothing
        writes = [self._stream.save()]
        if self._expert_balance is not None:
            writes.append(self._expert_balance.save())
        return lambda folder: {path: entry for write in writes for path, entry in write(folder).items()}

    def restore(self, folder: Path) -> None:
        if not self.config.rollout.replay:
            self._stream.restore(folder)
        if self._expert_balance is not None:
            self._expert_balance.restore(folder)

    def close(self) -> None:
        self._is_closing = True
        if self._runner is not None:
            self._runner.close()
        self.engines.close()

    def _allocate_groups(self, count: int) -> range:
        """Allocate the next `count` group numbers of the step."""
        first, self._next_group = self._next_group, self._next_group + count
        return range(first, self._next_group)

    def _replay(self, num_prompts: int, greedy: bool) -> Rollouts:
        """Return the recorded rollouts of the step's next generation."""
        if self._replayed_step is None:
            context, job = self.context, self.job
            self._replayed_step = ReplayedStep(self.config, context.hf_config, self.step, job.rank, job.world)
        records = self._replayed_step.take(num_prompts, greedy)
        # Order by recorded number, since the mapping of files to ranks may differ.
        rollouts = Rollouts.gather(
            [record.rollout for record in records],
            [record.number for record in records],
            row_exchange.WorldComm(),
            self.version + self._replayed_step.version_offset(self.version),
        )
        if num_prompts and not len(rollouts):
            raise ConfigError(
                f"{self._replayed_step.location} has no rollouts of generation {len(self.generations) + 1}"
            )
        self.generations.append(GenerateCall(rollouts, greedy))
        return rollouts


def measure_engines(result: GenerationResult | None, comm: Comm) -> dict[str, float]:
    """Return the share of the engines' slots that were idle until the last engine was done, and their queues and
    caches. result: of this rank's engine, if it leads one. Collective."""
    sizes = [] if result is None else [[result.num_slots, result.seconds, result.busy_seconds, *result.usage.to_row()]]
    rows = comm.all_gather_rows(torch.tensor(sizes, dtype=torch.float64).reshape(-1, 3 + USAGE_WIDTH))
    slots, seconds, busy = rows[:, :3].T
    offered = float(slots.sum()) * max(seconds.tolist(), default=0.0)
    usage = EngineUsage.of_rows(rows[:, 3:].tolist()).metrics if len(rows) else {}
    return usage | ({"rollout/idle_frac": 1 - float(busy.sum()) / offered} if offered else {})


def _gather_rollouts(rollouts: Sequence[Rollout], version: int) -> Rollouts:
    return Rollouts.gather(rollouts, [rollout.group for rollout in rollouts], row_exchange.WorldComm(), version)


class _GenerationStopped(RuntimeError):
    """Generation was stopped because another engine has failed."""
