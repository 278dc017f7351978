"""HybridFlow: roles, their placement, and the only training loop.

Every rank builds the same flow and runs the same controller. The ranks of a role (`flow.actor`, `flow.rollout`, ...)
share the work of a call; on other ranks the call returns at once, with a future whose `wait()`, called by all ranks,
receives the value. So an algorithm is written as if there were one process. `workers/README.md` shows a step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Never

import torch

from megarl.checkpoint import disk_space
from megarl.checkpointing import Checkpointer
from megarl.config import Config, ConfigError, load_config
from megarl.config.command_line import format_command
from megarl.config.paths import expand_config_paths
from megarl.config.stages import largest_config
from megarl.config.strict import closest_match
from megarl.controllers.controller import StepResult, load_requirements, make_controller
from megarl.controllers.evaluation import Evaluator
from megarl.data.loader import PromptLoader
from megarl.dry_run.auto_layout import rank_memory_bytes, with_job_size
from megarl.dry_run.data_checks import check_offered, read_chat, should_check_offered
from megarl.dry_run.model_folders import vocabulary_hash
from megarl.dry_run.rollout_checks import check_enough_prompts
from megarl.dry_run.validation import check_step, validate
from megarl.item_reader import ItemReader
from megarl.launch import exit_status
from megarl.launch.exit_status import REQUEUE_EXIT_CODE as REQUEUE_EXIT_CODE
from megarl.models.flops import peak_flops
from megarl.models.registry import load_hf_config
from megarl.observe.clock import Clock
from megarl.observe.control import Configurable, Control
from megarl.observe.hang_watchdog import HangWatchdog
from megarl.observe.live_status import LiveStatus
from megarl.observe.metrics import ZeroSpreadWarning, batch_metrics, prefix_metrics, rollout_metrics
from megarl.observe.mfu import GpuMonitor, compute_throughput, select_remote_clocks
from megarl.observe.profiler import StepProfiler
from megarl.observe.run_log import RunLog
from megarl.observe.step_record import GenerateCall
from megarl.parallel import device, kv_store, ranks, row_exchange, wait_listeners
from megarl.parallel.placement import (
    has_separate_reference,
    is_engine_role,
    placement_of,
    split_role,
    with_role,
)
from megarl.parallel.policy_configs import find_shared_ranks, has_other_model, policy_config, takes_turns
from megarl.parallel.ranks import create_role_layouts
from megarl.workers.actor import ActorWorker, ReferenceWorker, SeparateReferenceWorker
from megarl.workers.context import Context, Worker
from megarl.workers.critic import CriticWorker, RewardModelWorker
from megarl.workers.model_worker import ModelWorker
from megarl.workers.reward import RewardWorker
from megarl.workers.rollout import RolloutWorker
from megarl.workers.worker_registry import RegisteredWorker, load_workers

_ARGUMENTS = {
    "num_rollout": "num_rollouts rollouts num_steps steps max_steps total_steps iterations num_iterations",
    "num_update": "num_updates updates updates_per_step",
    "until": "until_step stop_at",
    "model": "model_path path model_name_or_path hf_checkpoint checkpoint model_name",
    "parallel={'tp': ..}": "tp tensor_parallel_size tensor_model_parallel_size",
    "parallel={'pp': ..}": "pp pipeline_parallel_size pipeline_model_parallel_size",
    "parallel={'ep': ..}": "ep expert_parallel_size expert_model_parallel_size",
    "parallel={'cp': ..}": "cp context_parallel_size",
    "backend": "engine strategy",
    "worker": "cls worker_cls worker_class",
    "flow.set_placement({role: '0-3'})": "ranks gpus num_gpus n_gpus devices resource_pool placement",
}
_ARGUMENTS_BY_OTHER_NAME = {name: argument for argument, names in _ARGUMENTS.items() for name in names.split()}


def _reject_arguments(call: str, names: Iterable[str], known: Sequence[str] = ()) -> None:
    """Raise ConfigError for the first of `names`, arguments that a call does not have, with the one that it has."""
    for name in names:
        match = _ARGUMENTS_BY_OTHER_NAME.get(name) or closest_match(name, known)
        has = f" (it has {', '.join(known)})" if known else ""
        raise ConfigError(f"{call} has no argument {name}{f'; did you mean {match}?' if match else ''}{has}")


class RoleUnavailable(ConfigError, AttributeError):
    """Raised for a role that a controller reads before the workers start, or that it does not list."""


@dataclasses.dataclass(frozen=True)
class RoleComponent:
    """A worker that gets a changed configuration as its role sees it, see `policy_configs.policy_config`."""

    role: str
    worker: Worker

    def check_config(self, config: Config) -> None:
        self.worker.check_config(policy_config(config, self.role))

    def set_config(self, config: Config) -> None:
        self.worker.set_config(policy_config(config, self.role))


class HybridFlow:
    """An algorithm's roles and the loop that runs it.

        flow = HybridFlow("configs/quickstart.yaml")
        flow.register_worker("reward", reward_fn=lambda rollout: float("42" in rollout.answer))
        flow.run(num_rollout=10, num_update=2)

    Roles that the controller needs and that are not registered get their default worker.
    """

    policy_name = ""
    rollout: RolloutWorker
    actor: ActorWorker
    reference: ReferenceWorker | SeparateReferenceWorker
    critic: CriticWorker
    reward: RewardWorker
    reward_model: RewardModelWorker

    def __init__(self, config: Config | str | Path, overrides: Sequence[str] = ()) -> None:
        if not isinstance(config, Config | str | Path):
            raise ConfigError(
                f"HybridFlow takes the path of a YAML file, or a Config, not a {type(config).__name__}: "
                "megarl.config.from_dict builds a Config from a mapping"
            )
        self.config = config if isinstance(config, Config) else load_config(config, overrides)
        self.registered: dict[str, RegisteredWorker] = {}
        self.watchdog: HangWatchdog | None = None
        self.live_status: LiveStatus | None = None
        self.gpu: GpuMonitor | None = None
        self.step = 0
        self.checkpointer: Checkpointer | None = None

    def register_worker(
        self,
        role: str,
        worker: Callable[..., Worker] | str | None = None,
        *,
        backend: str = "",
        model: str | None = None,
        parallel: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Register the worker that implements `role`.

        worker: called as `worker(context, **options)`, or its `module:name`; None for the built-in worker with this
        `backend`. model, parallel: HF folder and layout of the role's own model, as in the configuration.
        """
        if worker is None:  # a fork's worker may have options of any name
            call = f"register_worker({role!r}, ..)"
            _reject_arguments(call, [name for name in options if name in _ARGUMENTS_BY_OTHER_NAME])
        self.config = with_role(self.config, role, model, parallel, backend)
        self.registered[role] = RegisteredWorker(worker, options)

    def __getattr__(self, name: str) -> Any:
        """Raise an error that says how to make a missing role available."""
        declared = vars(self).get("requirements")
        if declared is None and name in {*HybridFlow.__annotations__, *vars(self).get("registered", ())}:
            raise RoleUnavailable(f"flow.{name} is not available before flow.run(...), which starts the workers")
        if name.startswith("_") or declared is None:
            raise AttributeError(f"a HybridFlow has no {name!r}")
        if name in declared.roles:
            raise RoleUnavailable(
                f"flow.{name} is not available yet: workers start after `load_items`, which reads the data"
            )
        roles = f"`roles()` of {declared.name} lists {', '.join(declared.roles)}"
        raise RoleUnavailable(f"flow.{name} is not available: {roles}; add it there")

    def set_placement(self, placement: Mapping[str, Any]) -> None:
        """Place the roles on ranks, as the key `placement` does; ranks may also be a range or a set."""
        ranks_by_role = {
            role: sorted(ranks) if isinstance(ranks, range | set | frozenset) else ranks
            for role, ranks in placement.items()
        }
        self.config = dataclasses.replace(self.config, placement=ranks_by_role)

    def run(
        self, num_rollout: int | None = None, num_update: int | None = None, until: int = 0, **unknown: Never
    ) -> dict[str, float]:
        """Train for `num_rollout` steps of `num_update` optimizer steps each. Return the last step's metrics.

        Both default to the configuration. until: stop after this step, without changing schedules; 0 runs to the end.
        Call once per process. Raises ConfigError for a user's mistake, `GracefulExit` after a requested stop that has
        saved a checkpoint, and `SignalExit` if a signal ends the run; `exit_status.classify_error` tells them apart.
        """
        _reject_arguments("flow.run", unknown, ("num_rollout", "num_update", "until"))
        warnings = self._prepare(num_rollout, num_update, until)
        with self._running(warnings) as checkpointer:
            run, evaluator = self.config.run, self.evaluator
            metrics: dict[str, float] = {}
            while self.step < self.last_step:
                if evaluator.is_due(self.step):
                    evaluator.run(self.step)
                items = self.loader.next_batch()
                self._start_step(self.step + 1)
                # Do not bind the result: it would keep this step's tensors alive during the next step.
                metrics = self._finish_step(self.controller.step(self, items))
                should_roll_back = bool(self.log.guards.skip_limited_roles)
                evaluator.poll(wait=should_roll_back)
                if should_roll_back:
                    checkpointer.rollback(self.step)
                if checkpointer.save_if_due(self.step):
                    evaluator.drop()
                    raise exit_status.GracefulExit(
                        f"stopped on request: saved step {self.step}, resume with run.resume=auto"
                    )
            if evaluator.is_due(self.step, is_last=True):
                metrics |= evaluator.run(self.step)
            metrics |= evaluator.poll(wait=True)
            if run.export and self.requirements.trained_roles:
                checkpointer.export()
            if checkpointer.save_error is not None:
                raise checkpointer.save_error  # no later checkpoint follows; the export was tried first
        return metrics

    # --- a step ------------------------------------------------------------------------------------------------

    def _start_step(self, step: int) -> None:
        self.step = step
        self.log.begin_step(step)
        self.profile.begin(step)
        self.begin_step()
        self.control.apply(step, ranks.broadcast_object(self.control.read() if self.log.is_writer else None))
        every = self.config.kl.refresh_reference_every
        if every and step > 1 and (step - 1) % every == 0:
            for role, worker in self.workers.items():
                base, policy = split_role(role)
                if base == "reference":
                    reference: Any = worker
                    reference.refresh(self.workers[f"actor_{policy}" if policy else "actor"])

    def _finish_step(self, result: StepResult) -> dict[str, float]:
        metrics = dict(result.metrics)
        if result.rollouts is not None:
            metrics |= rollout_metrics(result.rollouts, self.config.rollout.num_speculative_tokens)
        worker_metrics = {role: worker.metrics() for role, worker in self.workers.items()}
        for role, values in worker_metrics.items():
            metrics |= prefix_metrics(values, split_role(role)[1])
        if self.watchdog is not None:
            watchdog_metrics, alarm = self.watchdog.check_step(self.step)
            metrics |= watchdog_metrics
            if alarm:
                self.log.alarm(alarm)
        if alarm := self.spread.check(self.step, metrics):
            self.log.alarm(alarm)
        metrics |= self.loader.epoch_metrics() | self.clock.lap(self.step)
        self.log.write_spans(self.clock.drain_spans())
        self.profile.end(self.step)
        if result.batch is not None:
            metrics |= batch_metrics(result.batch, metrics["time/step"], self.job.world)
        role_flops = [
            worker.work for worker in self.workers.values() if isinstance(worker, ModelWorker) and worker.work
        ]
        remote_clocks = {
            source: ranks.broadcast_object({name: metrics.get(name, 0.0) for name in keys}, source)
            for source, keys in select_remote_clocks(role_flops).items()
        }
        metrics |= compute_throughput(role_flops, metrics, self.job.world, peak_flops(device.gpu_name()), remote_clocks)
        if self.gpu is not None:
            metrics |= self.gpu.metrics()
        metrics["perf/peak_memory_gib"] = device.peak_memory_bytes() / 2**30
        calls = self._generate_calls()
        for policy, other in result.policies.items():
            recorded = other.rollouts, other.batch, other.trained_rollouts, calls.get(policy, [])
            self.log.record_step(self.step, *recorded, worker_metrics.get(f"rollout_{policy}"), policy)
        recorded = result.rollouts, result.batch, result.trained_rollouts, calls.get("", [])
        return self.log.end_step(self.step, metrics, *recorded, worker_metrics.get("rollout"))

    def check_config(self, config: Config) -> None:
        """Raise ConfigError for a configuration that the run cannot change to."""
        check_step(self.hf_config, config, self.requirements)

    def set_config(self, config: Config) -> None:
        """Set the configuration of the next step."""
        self.config = config

    def begin_step(self) -> None:
        """Tell the workers the current step, which seeds what they sample."""
        for worker in self.workers.values():
            worker.begin_step(self.step)

    def _generate_calls(self) -> dict[str, list[GenerateCall]]:
        """Return what each policy has generated so far in the current step, with rewards if it has been scored."""
        pairs = getattr(vars(self).get("reward"), "scored", [])
        scored = {id(original): rewarded for original, rewarded in pairs}
        result = {}
        for role, worker in self.workers.items():
            base, policy = split_role(role)
            if base == "rollout":
                calls: Sequence[GenerateCall] = getattr(worker, "generations", ())
                result[policy] = [
                    call._replace(rollouts=scored.get(id(call.rollouts), call.rollouts)) for call in calls
                ]
        return result

    # --- start and end ----------------------------------------------------------------------------------------

    def _prepare(self, num_rollout: int | None, num_update: int | None, until: int) -> Sequence[str]:
        """Check the configuration, join the job and load the data. Return the warnings of the checks.

        The data come before models and run folder, so that a broken line costs neither.
        """
        exit_status.catch_signals()
        self.config = expand_config_paths(self.config)  # a Config built in Python may have unexpanded paths
        run = self.config.run
        run = dataclasses.replace(
            run,
            num_rollout=run.num_rollout if num_rollout is None else num_rollout,
            num_update=run.num_update if num_update is None else num_update,
            resume="auto" if exit_status.get_restart_count() and not run.resumes else run.resume,
        )
        exit_status.register_run(
            run_dir=run.dir,
            save_every=run.save_every,
            max_restarts=run.max_restarts,
            timeout_s=run.distributed_timeout_s,
        )
        config = with_job_size(dataclasses.replace(self.config, run=run))
        self.last_step = until or run.num_rollout
        parallel, gpu_bytes = config.parallel, 0
        if parallel.auto:  # all ranks choose the same layout, which fits on the smallest
            self.job = ranks.join(parallel.world_size, run.distributed_timeout_s, parallel.ranks_per_gpu)
            gpu_bytes = min(ranks.all_gather_objects(rank_memory_bytes(config)))
        report = validate(config, registered=self.registered, until=self.last_step, gpu_bytes=gpu_bytes)
        self.config = config = report.resolve(config)
        self.requirements = load_requirements(config)
        self.controller = make_controller(config)
        self.workers: dict[str, Worker] = {}
        self.hf_config = load_hf_config(config.model.path)
        self.chat = read_chat(self.hf_config, config, self.requirements)
        if report.choice is None:
            self.job = ranks.join(parallel.world_size, run.distributed_timeout_s, parallel.ranks_per_gpu)
        self.layouts = create_role_layouts(config, self.requirements.roles)
        self.worker_factories = load_workers(config, self.requirements, self.registered)
        with ranks.with_timeout(run.storage_timeout_s):
            self.data = ItemReader(config, self.hf_config, self.chat, self.job)
            items = self.controller.load_items(self)
            check_enough_prompts(len(items), config)
            self.loader = PromptLoader.from_config(items, config)
            self.eval_items = self.controller.load_eval_items(self) if config.data.eval and run.eval_every else ()
            if should_check_offered(config, self.requirements):
                check_offered((item for items in (items, self.eval_items) for item in items), self.chat.catalog)
        records = config.track.save_rollouts and self.requirements.has_rollout
        vocabularies = {
            policy: vocabulary_hash(policy_config(config, role).model.path)
            for role in self.requirements.roles
            for base, policy in [split_role(role)]
            if base == "rollout" and records
        }
        self.log = RunLog(config, self.job, vocabularies, is_training=bool(self.requirements.trained_roles))
        for name, plan in report.choice.describe() if report.choice else ():
            self.log.log(f"parallel.auto: {name} {plan}")
        self.spread = ZeroSpreadWarning(self.requirements)
        return report.warnings

    @contextlib.contextmanager
    def _running(self, warnings: Sequence[str]) -> Iterator[Checkpointer]:
        """Start the workers; close everything when the run ends, and record why it ended."""
        is_finished = False
        try:
            for warning in warnings:
                self.log.log(f"warning: {warning}")
            with ranks.with_timeout(self.config.run.storage_timeout_s):
                self._start()
            gc.freeze()  # models and modules are permanent; otherwise each collection would scan them
            if self.config.run.save_every:
                exit_status.save_on_sigterm()
            assert self.checkpointer is not None
            yield self.checkpointer
            is_finished = True
            if self.requirements.trained_roles:
                self.log.log(f"done: {self.step} steps in {self.config.run.dir}")
                self.log.log(format_command("megarl report", self.config.run.dir))
        except BaseException as error:
            exit_status.begin_exit()
            if isinstance(error, Exception) and self.checkpointer is not None:
                self.checkpointer.finish_on_error(error)
            self.log.record_failed_step(self.step, self._generate_calls())
            if self.watchdog is not None:
                self.watchdog.drain()
            cause = kv_store.exchange_root_cause(error, exit_status.classify_error(error)[0])
            self.log.log_end(error, isinstance(error, exit_status.ORDERLY_EXITS), cause)
            raise
        finally:
            gc.unfreeze()  # libraries report objects that are still frozen at exit as leaks
            if self.checkpointer is not None:
                self.checkpointer.close()  # stops writer threads
            for worker in reversed(self.workers.values()):
                worker.close()
            if self.watchdog is not None:
                self.watchdog.close()
            if self.live_status is not None:
                self.live_status.close()
            if self.gpu is not None:
                self.gpu.close()
            if hasattr(self, "clock"):
                wait_listeners.set_wait_listener(None)
                wait_listeners.set_progress_listener(None)
                self.profile.close()
                self.log.write_spans(self.clock.drain_spans())
            self.log.close()
            if is_finished:
                row_exchange.close_row_exchange()
                ranks.shutdown()

    def _start(self) -> None:
        config = self.config
        self.clock = Clock(self.log.progress.begin_phase)
        wait_listeners.set_wait_listener(self.clock.span)
        wait_listeners.set_progress_listener(self.log.progress.update_phase if self.log.is_writer else None)
        self.profile = StepProfiler(
            *(config.track.profile_steps, self.clock, self.log.run_dir / "profile", self.job.rank), self.log.log
        )
        if self.job.world > 1:
            self.watchdog = HangWatchdog(
                *(self.job, self.log.run_dir, self.clock, self.layouts.keys()),
                alarm=self.log.alarm_any_rank,
                notify_launcher=lambda rank, text: exit_status.notify_launcher("late", text, rank),
            )
            self.watchdog.start()
        self.live_status = LiveStatus(
            *(self.log.run_dir, self.job.rank, self.job.world), lambda: self.clock.position[:2], lambda: self.step
        )
        self.live_status.start()
        if self.log.is_writer:
            self.gpu = GpuMonitor(device.gpu_load)
        critic_path = config.critic.path or config.model.path if "critic" in self.requirements.roles else None
        needs = disk_space.estimate_space(
            self.hf_config, load_hf_config(critic_path) if critic_path else None, config, self.requirements
        )
        self.checkpointer = Checkpointer(self, needs)
        checkpoint = self.checkpointer.find_checkpoint()
        for note in self.data.notes:
            self.log.log(note)
        context = Context(
            config=largest_config(config),
            job=self.job,
            layouts=self.layouts,
            hf_config=self.hf_config,
            chat=self.chat,
            clock=self.clock,
            run_dir=self.log.run_dir,
            num_updates={role: self.controller.num_updates(role) for role in self.requirements.roles},
            prompt_loader=self.loader,
            log=self.log.log,
            alarm=self.log.alarm,
        )
        for role, factory in self.worker_factories.items():
            ranks.run_on_all(self._make_worker(role, factory, context).start)
        for worker in self.workers.values():
            worker.wait_ready()
        workers = [RoleComponent(role, worker) for role, worker in self.workers.items()]
        components: list[Configurable] = [self, self.controller, *workers]
        self.control = self.checkpointer.control = Control(self.log.run_dir, config, components, self.log.log)
        self.control.start(1)
        self.evaluator = Evaluator(self, self.eval_items)
        for line in sum(ranks.all_gather_objects(self._describe_models()), []):
            self.log.log(line)
        self.checkpointer.check_copies()
        if checkpoint is not None:
            self.step = self.checkpointer.resume(checkpoint)
            self.begin_step()
            self.sync_weights()
            changes = self.checkpointer.store.describe_changes(checkpoint) if self.log.is_writer else ""
            self.log.log(f"resumed from {checkpoint} after step {self.step}{changes}")
        self.clock.lap()

    def _make_worker(self, role: str, factory: Callable[..., Worker], context: Context) -> Worker:
        """Make a role's worker, which is then `flow.<role>`. A reference without a model of its own gets the actor."""
        base, policy = split_role(role)
        shares_model = base == "reference" and (bool(policy) or not has_separate_reference(self.config))
        arguments = {"actor": getattr(self, f"actor_{policy}" if policy else "actor")} if shares_model else {}
        worker = factory(self._role_context(context, role), **arguments)
        setattr(self, role, worker)
        self.workers[role] = worker
        return worker

    def _role_context(self, context: Context, role: str) -> Context:
        """Return the context of a role's worker."""
        roles = self.requirements.roles
        if is_engine_role(self.config, role):
            takes, shared = takes_turns(self.config, roles, role), find_shared_ranks(self.config, roles, role)
            context = dataclasses.replace(context, takes_turns=takes, shared_ranks=shared)
        context = dataclasses.replace(context, role=role)
        config = policy_config(self.config, role)
        if config is self.config:
            return context
        context = dataclasses.replace(
            context, config=largest_config(config), hf_config=load_hf_config(config.model.path)
        )
        base, policy = split_role(role)
        if not policy:  # a frozen model: no updates, and no weight sync
            return dataclasses.replace(context, num_updates={})
        updates = {**context.num_updates, "actor": context.num_updates[f"actor_{policy}"]}
        chat = read_chat(context.hf_config, config, self.requirements)
        context = dataclasses.replace(context, num_updates=updates, chat=chat)
        if base == "rollout":
            render = chat.render_prompt if has_other_model(self.config, policy) else None
            context = dataclasses.replace(context, prompt_loader=self.loader.fork(policy, render))
        return context

    def sync_weights(self) -> None:
        """Sync restored weights to the engines, if there are any; no update precedes this."""
        for role, worker in self.workers.items():
            base, policy = split_role(role)
            actor = self.workers.get(f"actor_{policy}" if policy else "actor")
            if base == "rollout" and actor is not None:
                rollout: Any = worker
                rollout.sleep()  # as in a step: a weight sync never coexists with a KV cache
                rollout.update_weights(actor)

    def _describe_models(self) -> list[str]:
        """Return a line for each model whose first rank this is."""
        lines, placement = [], placement_of(self.config)
        for role, worker in self.workers.items():
            model = worker.model if isinstance(worker, ModelWorker) else None
            if model is not None and model.ranks.role_rank == 0:
                layout = " ".join(f"{name}={getattr(model.ranks, name)}" for name in ("tp", "cp", "pp", "ep", "etp"))
                where = "" if placement.is_colocated else f" on ranks {placement.format_ranks(role)}"
                adapters = sum(map(torch.numel, model.local_adapters().values()))
                count = sum(map(torch.numel, model.local_params().values())) + adapters
                trained = f", of which LoRA trains {adapters:,} ({adapters / count:.2%})" if adapters else ""
                trained = trained if role in self.requirements.trained_roles else ", not trained"
                lines.append(f"{role}{where}: {layout}, {count:,} parameters on rank {self.job.rank}{trained}")
        return lines
