"""HybridFlow: roles, where they are, and the one training loop.

Every rank builds the same flow and runs the same controller. The roles (`flow.actor`, `flow.rollout`, ...) share the
work of a call among their ranks; on others it returns at once, with a handle whose value travels when it is read. So an
algorithm is written as if there were one process. `workers/README.md` shows a step.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megarl.batch_items import Items
from megarl.checkpoint import disk_space
from megarl.checkpointing import Keeping
from megarl.config import Config, ConfigError, load_config
from megarl.config.command_line import to_paste
from megarl.config.paths import with_expanded_paths
from megarl.controllers.controller import StepResult
from megarl.controllers.lookup import declare, make_controller
from megarl.data.prompt_data import PromptLoader
from megarl.dry_run.data_and_tools import check_offered, offers_all, read_chat
from megarl.dry_run.model_folders import vocabulary_hash
from megarl.dry_run.plan import validate
from megarl.dry_run.rollout_checks import check_enough_prompts
from megarl.evaluator import Evaluating
from megarl.launch import exit_status
from megarl.launch.exit_status import REQUEUE_EXIT_CODE as REQUEUE_EXIT_CODE
from megarl.models.flops import peak_flops
from megarl.models.registry import load_hf_config
from megarl.observe.clock import Clock
from megarl.observe.control import Control
from megarl.observe.hang_watchdog import Lookout
from megarl.observe.metrics import Spread, batch_metrics, rollout_metrics
from megarl.observe.mfu import Gpu, clocks_of, speed
from megarl.observe.profiler import Profile
from megarl.observe.run_log import RunLog
from megarl.parallel import device, last_words, ranks, row_exchange, wait_listeners
from megarl.parallel.placement import placement_of
from megarl.parallel.ranks import lay_out
from megarl.parallel.role_settings import with_role
from megarl.types import Rollouts
from megarl.workers.actor import ActorWorker
from megarl.workers.context import Context, Worker
from megarl.workers.critic import CriticWorker
from megarl.workers.model_worker import ModelWorker
from megarl.workers.reference import ReferenceWorker
from megarl.workers.reward import RewardWorker
from megarl.workers.reward_training import RewardModelWorker
from megarl.workers.role_workers import Registered, find_workers
from megarl.workers.rollout import RolloutWorker


class NotThere(ConfigError, AttributeError):
    """A role that a controller reads before it has started, or does not list."""


class HybridFlow(Items, Evaluating, Keeping):
    """An algorithm's roles and the loop that runs it.

        flow = HybridFlow("configs/quickstart.yaml")
        flow.register_worker("reward", reward_fn=lambda rollout: float("42" in rollout.answer))
        flow.run(num_rollout=10, num_update=2)

    Roles that the controller needs and nobody registered get their default worker.
    """

    rollout: RolloutWorker
    actor: ActorWorker
    reference: ReferenceWorker
    critic: CriticWorker
    reward: RewardWorker
    reward_model: RewardModelWorker

    def __init__(self, config: Config | str | Path, overrides: Sequence[str] = ()) -> None:
        self.config = config if isinstance(config, Config) else load_config(config, overrides)
        self.registered: dict[str, Registered] = {}
        self.lookout: Lookout | None = None
        self.gpu: Gpu | None = None
        self.step = 0
        self.stagings, self.lost = {}, None

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
        """Say who plays a role that the controller calls, of whatever name: `worker(context, **options)`, or its
        `module:name`, or of those that are known to play it the one with this backend.

        model, parallel: HF folder and layout of the role's own model, as the configuration would have them.
        """
        self.config = with_role(self.config, role, model, parallel, backend)
        self.registered[role] = Registered(worker, options)

    def __getattr__(self, name: str) -> Any:
        """Of a role that is not there: what to do, instead of a name that is missing."""
        declared = vars(self).get("declared")
        if declared is None and name in {*HybridFlow.__annotations__, *vars(self).get("registered", ())}:
            raise NotThere(f"flow.{name} is not there before flow.run(...): the workers start in it")
        if name.startswith("_") or declared is None:
            raise AttributeError(f"a HybridFlow has no {name!r}")
        if name in declared.roles:
            raise NotThere(f"flow.{name} is not there yet: the workers start after `items`, which reads the data")
        roles = f"`roles()` of {declared.name} lists {', '.join(declared.roles)}"
        raise NotThere(f"flow.{name} is not there: {roles}; add it to them")

    def set_placement(self, placement: Mapping[str, str | int]) -> None:
        """Say which ranks the roles are on, as the key `placement` does."""
        self.config = dataclasses.replace(self.config, placement=dict(placement))

    def run(self, num_rollout: int | None = None, num_update: int | None = None, until: int = 0) -> dict[str, float]:
        """Train for `num_rollout` steps of `num_update` optimizer steps each; returns the last step's metrics.

        Both default to the configuration. until: stop after this step already, schedules being those of all; 0 for the
        last. Call once per process. Raises ConfigError for a user's mistake, Stopped where
        it was asked to stop and has saved, and Ended where a signal ends it; `ending.one_line` tells them apart.
        """
        exit_status.catch_signals()
        self.config = with_expanded_paths(self.config)  # of one that was made in Python
        run = self.config.run
        run = dataclasses.replace(
            run,
            num_rollout=run.num_rollout if num_rollout is None else num_rollout,
            num_update=run.num_update if num_update is None else num_update,
            resume="auto" if exit_status.restarted() and not run.goes_on else run.resume,
        )
        exit_status.introduce(
            run_dir=run.dir, save_every=run.save_every, max_restarts=run.max_restarts, timeout_s=run.timeout_s
        )
        self.config = dataclasses.replace(self.config, run=run)
        self.until = until or run.num_rollout
        report = validate(self.config, registered=self.registered, until=self.until)
        report.raise_errors()
        self.declared = declare(self.config)
        self.controller = make_controller(self.config)
        self.workers: list[Worker] = []
        self._read_chat()
        self.job = ranks.join(self.config.parallel.world_size, run.timeout_s)
        self.layouts = lay_out(self.config, self.declared.roles)
        self.makers = find_workers(self.config, self.declared, self.registered)
        with ranks.patient(run.storage_timeout_s):
            self._read_data()
        records = self.config.track.rollouts and self.declared.generates
        vocabulary = vocabulary_hash(self.config.model.path) if records else ""
        self.log = RunLog(self.config, self.job, vocabulary, trains=bool(self.declared.trains))
        self.spread = Spread(self.declared)
        finished = False
        try:
            for warning in report.warnings:
                self.log.say(f"warning: {warning}")
            with ranks.patient(run.storage_timeout_s):
                self._start()
            gc.freeze()  # models and modules stay: else a collection in a step goes through all of them
            metrics = self._loop()
            finished = True
            if self.declared.trains:
                self.log.say(f"done: {self.step} steps in {run.dir}")
                if command := to_paste("tools/report.py", run.dir):
                    self.log.say(command)
            return metrics
        except BaseException as error:
            exit_status.begin()
            if isinstance(error, Exception):
                self._finish_together(error)
            self.log.failed(self.step, self._made())
            if self.lookout is not None:
                self.lookout.settle()
            cause = last_words.exchanged(error, exit_status.describe(error)[0])
            self.log.ended(error, isinstance(error, exit_status.ORDERLY), cause)
            raise
        finally:
            gc.unfreeze()  # what is left at a program's end is taken for lost, and said, by libraries
            self._leave_save()
            for worker in reversed(self.workers):
                worker.close()
            if self.lookout is not None:
                self.lookout.close()
            if self.gpu is not None:
                self.gpu.close()
            if hasattr(self, "clock"):
                wait_listeners.watch(None)
                wait_listeners.tell_share(None)
                self.profile.close()
                self.log.spans(self.clock.spans())
            self.log.close()
            if finished:
                row_exchange.close_post()
                ranks.shutdown()

    # --- the loop ---------------------------------------------------------------------------------------------

    def _loop(self) -> dict[str, float]:
        run = self.config.run
        metrics: dict[str, float] = {}
        if run.save_every:
            exit_status.answer_by_saving()
        while self.step < self.until:
            if self._eval_due(first=0):
                self._evaluate()
            items = self.loader.next_batch()
            self.step += 1
            self.log.begin_step(self.step)
            self.profile.begin(self.step)
            self._begin_step()
            self.control.take(self.step, ranks.broadcast_object(self.control.read() if self.log.writes else None))
            # No name for what it returns: the next step would be taken with all of this one still in memory.
            metrics = self._finish_step(self.controller.step(self, items))
            self._look_at_evaluation(wait=bool(self.log.guards.in_vain))
            if self.log.guards.in_vain:
                self._go_back()
            if self._keep():
                self._leave_evaluation()
                raise exit_status.Stopped(f"asked to stop: saved step {self.step}, start again with run.resume=auto")
        if self._eval_due(first=1):
            metrics |= self._evaluate()
        metrics |= self._look_at_evaluation(wait=True)
        if run.export and self.declared.trains:
            self._export()
        if self.lost is not None:
            raise self.lost  # of the last step: nothing can be written later, but the export was tried first
        return metrics

    def _finish_step(self, result: StepResult) -> dict[str, float]:
        metrics = dict(result.metrics)
        if result.rollouts is not None:
            metrics |= rollout_metrics(result.rollouts)
        for worker in self.workers:
            metrics |= worker.figures()
        if self.lookout is not None:
            figures, line = self.lookout.look(self.step)
            metrics |= figures
            if line:
                self.log.alarm(line)
        if line := self.spread.look(self.step, metrics):
            self.log.alarm(line)
        metrics |= self.loader.epochs() | self.clock.lap(self.step)
        self.log.spans(self.clock.spans())
        self.profile.end(self.step)
        if result.batch is not None:
            metrics |= batch_metrics(result.batch, metrics["time/step"], self.job.world)
        works = [worker.work for worker in self.workers if isinstance(worker, ModelWorker) and worker.work]
        elsewhere = {
            first: ranks.broadcast_object({name: metrics.get(name, 0.0) for name in names}, first)
            for first, names in clocks_of(works).items()
        }
        metrics |= speed(works, metrics, self.job.world, peak_flops(device.gpu_name()), elsewhere)
        if self.gpu is not None:
            metrics |= self.gpu.figures()
        metrics["perf/peak_memory_gib"] = device.peak_memory_bytes() / 2**30
        return self.log.step(self.step, metrics, result.rollouts, result.batch, result.trained)

    def _begin_step(self) -> None:
        for worker in self.workers:
            worker.begin_step(self.step)

    def _made(self) -> list[Rollouts]:
        """What the step under way has sampled, with rewards where it has got so far."""
        made = vars(self)["rollout"].made if "rollout" in vars(self) else []
        pairs = getattr(vars(self).get("reward"), "scored", [])
        scored = {id(given): found for given, found in pairs}
        return [scored.get(id(one), one) for one in made]

    # --- start ----------------------------------------------------------------------------------------------

    def _read_chat(self) -> None:
        """Tokenizer, template and tools, before anything is started."""
        config = self.config
        self.hf_config = load_hf_config(config.model.path)
        self.chat = read_chat(self.hf_config, config, self.declared)

    def _read_data(self) -> None:
        """Before a model is loaded and a run folder made: a broken line must not cost either."""
        config, run = self.config, self.config.run
        self._notes = []  # for the log, which is not there yet
        items = self.controller.items(self)
        check_enough_prompts(len(items), config)
        self.loader = PromptLoader.of(items, config)
        self.eval_items = self.controller.eval_items(self) if config.data.eval and run.eval_every else ()
        if offers_all(config, self.declared):
            check_offered((one for items in (items, self.eval_items) for one in items), self.chat.known)

    def _start(self) -> None:
        config = self.config
        self.clock = Clock(self.log.phase)
        wait_listeners.watch(self.clock.span)
        wait_listeners.tell_share(self.log.share if self.log.writes else None)
        self.profile = Profile(
            *(config.track.profile, self.clock, self.log.run_dir / "profile", self.job.rank), self.log.say
        )
        if self.job.world > 1:
            self.lookout = Lookout(
                *(self.job, self.log.run_dir, self.clock, self.layouts.keys()),
                alarm=self.log.alarm_from_any,
                tell=lambda rank, text: exit_status.tell_launcher("late", text, rank),
            )
            self.lookout.start()
        if self.log.writes:
            self.gpu = Gpu(device.gpu_load)
        newest = self._find_checkpoint()
        critic = config.critic.path or config.model.path if "critic" in self.declared.roles else None
        self.needs = disk_space.needs(self.hf_config, load_hf_config(critic) if critic else None, config, self.declared)
        for note in self._notes:
            self.log.say(note)
        context = Context(
            config=config,
            job=self.job,
            layouts=self.layouts,
            upcoming=self._upcoming,
            hf_config=self.hf_config,
            chat=self.chat,
            clock=self.clock,
            run_dir=self.log.run_dir,
            updates={role: self.controller.updates(role) for role in self.declared.roles},
            source=self.loader,
            say=self.log.say,
            alarm=self.log.alarm,
        )
        for role, make in self.makers.items():
            given = {"actor": self.actor} if role == "reference" else {}
            worker = make(dataclasses.replace(context, role=role), **given)
            setattr(self, role, worker)
            self.workers.append(worker)
            ranks.together(worker.start)
        for worker in self.workers:
            worker.ready()
        self.control = Control(self.log.run_dir, self.workers, self.log.say)
        for line in sum(ranks.all_gather_objects(self._models_here()), []):
            self.log.say(line)
        self._check_copies()
        if newest is not None:
            self._resume(newest)
            self._begin_step()
            if "rollout" in vars(self) and "actor" in vars(self):
                self._push_again()
            written = self.store.differs(newest) if self.log.writes else ""
            self.log.say(f"resumed from {newest} after step {self.step}{written}")
        self.clock.lap()

    def _upcoming(self, steps: int) -> Sequence[Sequence[Any]]:
        """What the next steps will be given, so many at most."""
        return self.loader.peek(min(steps, self.config.run.num_rollout - self.step))

    def _models_here(self) -> list[str]:
        """A line for each trained model whose first rank this is."""
        lines, placement = [], placement_of(self.config)
        for role, model in self._trained().items():
            if model.ranks.role_rank == 0:
                layout = " ".join(f"{name}={getattr(model.ranks, name)}" for name in ("tp", "cp", "pp", "ep", "etp"))
                where = "" if placement.colocated else f" on ranks {placement.text(role)}"
                adapters = sum(map(torch.numel, model.local_adapters().values()))
                count = sum(map(torch.numel, model.local_params().values())) + adapters
                trained = f", of which LoRA trains {adapters:,} ({adapters / count:.2%})" if adapters else ""
                lines.append(f"{role}{where}: {layout}, {count:,} parameters on rank {self.job.rank}{trained}")
        return lines
