"""What a run leaves on disk, goes on from and goes back to: checkpoints; and the export at its end."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megarl.checkpoint import disk_space
from megarl.checkpoint.manifest import Entry, host_state
from megarl.checkpoint.provenance import collect_provenance
from megarl.checkpoint.store import CheckpointStore, RankWrite, StorageError
from megarl.config import Config, ConfigError
from megarl.controllers.controller import Controller
from megarl.data.prompt_data import PromptLoader
from megarl.launch import exit_status
from megarl.megatron.dist_checkpoint import WRITERS, StagedCheckpoint, async_copy_bytes, restore_model
from megarl.observe.clock import Clock
from megarl.observe.control import Control
from megarl.observe.run_folder import describe_fresh_start
from megarl.observe.run_log import RunLog
from megarl.parallel import ranks, row_exchange
from megarl.parallel.host_copy import StagingBuffer
from megarl.parallel.placement import placement_of, role_parallel
from megarl.types.requirements import Requirements
from megarl.workers.actor import ActorWorker
from megarl.workers.context import Worker
from megarl.workers.model_worker import TrainingWorker
from megarl.workers.rollout import RolloutWorker

EXPORT_RETRY_S = 10.0
"""How often an export that found no room looks for it again."""

JOINT_EXIT_TIMEOUT_S = 5.0
"""How long a rank that ends by an error waits for the others to end by the same one."""


class Keeping:
    """Of a flow. A checkpoint holds the models that are trained, what workers and the controller write, and where the
    loop is."""

    config: Config
    requirements: Requirements
    controller: Controller
    workers: list[Worker]
    loader: PromptLoader[Any]
    job: ranks.Job
    clock: Clock
    log: RunLog
    control: Control
    needs: disk_space.SpaceEstimate
    step: int
    last_step: int
    """The step after which the run ends."""
    rollout: RolloutWorker
    actor: ActorWorker
    stagings: dict[str, StagingBuffer]
    """By role, where a model is copied to be written while training goes on."""
    save_error: StorageError | None
    """Why the newest checkpoint that was due is not there, if that is known."""

    def _trained(self) -> dict[str, Any]:
        """The models that a checkpoint holds, by role, as far as they are on this rank."""
        found = {role: getattr(self, role).model for role in self.requirements.trained_roles}
        return {role: model for role, model in found.items() if model is not None}

    def _check_copies(self) -> None:
        """Say which machines have no memory for what asynchronous saves copy, now that the models are there."""
        if not (self.config.run.save_every and self.config.run.save_async):
            return
        own = sum(async_copy_bytes(model) for model in self._trained().values())
        for line in disk_space.check_copy_memory(
            ranks.all_gather_objects((socket.gethostname(), own, disk_space.free_memory()))
        ):
            self.log.log(f"warning: {line}")

    def _save_if_due(self) -> bool:
        """After a step: make a checkpoint of what all ranks have written by now, and begin another where one is due.
        Returns whether the run is to stop, for which it has been saved."""
        run = self.config.run
        skipped = [one.first_skipped_step for one in self.workers if isinstance(one, TrainingWorker)]
        since = min((step for step in skipped if step is not None), default=None)
        said = ranks.all_gather_objects((exit_status.is_stop_requested(), self.store.is_written(), since))
        last = self.step == self.last_step
        stop = any(asked for asked, _, _ in said) and not last
        self.store.rollback_before = min((step for _, _, step in said if step is not None), default=None)
        due = stop or bool(run.save_every and (last or self.step % run.save_every == 0))
        if self.store.pending_step is not None and (due or all(written for _, written, _ in said)):
            self._finish_save(must=False)  # not two at a time: memory is for one
        if due:
            self.save_error = self._save(beside=run.save_async and not (stop or last), must=stop)
        return stop

    def _save(self, beside: bool, must: bool) -> StorageError | None:
        """Write a checkpoint, `beside` what comes next or at once. One that cannot be written is an error if it must
        be, else an alarm, and returned."""
        host = {"step": self.step, "loader": self.loader.state_dict(), "controller": self.controller.state_dict()}
        host |= {"guards": self.log.guards.state_dict(), "control": self.control.state_dict()}

        def stage(folder: Path) -> RankWrite:
            models = []
            for role, model in self._trained().items():
                staging = self.stagings.setdefault(role, StagingBuffer()) if beside else None
                models.append(StagedCheckpoint(model, folder / role, staging))
            others = [*(worker.save() for worker in self.workers), self.controller.save()]
            settled = self.log.make_drain()

            def write(ended: Callable[[], bool]) -> dict[Path, Entry]:
                written: dict[Path, Entry] = {}
                with self.clock.span("save"):
                    for model in models:
                        written |= model.write(1 if beside else WRITERS, ended)
                    for other in others:
                        written |= other(folder)
                    settled()  # a run that goes on from here does not take these steps again
                return written

            def finish() -> None:
                for model in models:
                    model.finish()

            return RankWrite(write, finish)

        with self.clock.phase("save"), exit_status.defer_sigterm():
            try:
                self.store.begin(self.step, host, stage, self.needs.checkpoint)
            except StorageError as error:
                return self._handle_save_error(error, self.step, must)
        return None if beside else self._finish_save(must)

    def _finish_save(self, must: bool) -> StorageError | None:
        """Wait for what is being written, and make a checkpoint of it; as `_save`."""
        step = self.store.pending_step
        assert step is not None
        with self.clock.phase("save"), exit_status.defer_sigterm():
            try:
                self.store.finish()
            except StorageError as error:
                return self._handle_save_error(error, step, must)
        return None

    def _finish_on_error(self, error: Exception) -> None:
        """Of a run that ends by an error that all ranks have alike, after which they can still talk: make a checkpoint
        of what is being written of an earlier step. Where they have not all come here in time, it stays unfinished."""
        if not hasattr(self, "store") or self.store.pending_step is None:
            return
        name = f"megarl/ends by {hashlib.sha256(f'{type(error).__name__} {error}'.encode()).hexdigest()}"
        with contextlib.suppress(Exception):  # the run ends for another reason
            there, deadline = ranks.add_to_counter(name, 1), time.monotonic() + JOINT_EXIT_TIMEOUT_S
            while there < self.job.world and time.monotonic() < deadline:
                time.sleep(0.02)
                there = ranks.add_to_counter(name, 0)
            if there == self.job.world:
                self._finish_save(must=False)

    def _cancel_save(self) -> None:
        """Of a run that ends, for whatever reason: no thread of it may write on."""
        if hasattr(self, "store"):
            self.store.cancel()

    def _handle_save_error(self, error: StorageError, step: int, must: bool) -> StorageError:
        if must:
            raise error
        goes_on = step < self.last_step
        self.log.alarm(f"{error}. {'Training goes on; make room' if goes_on else 'It was the last'}")
        return error

    def _export(self) -> None:
        """Write the trained model. Where the disk does not take it, wait for room: it is all that the run was for."""
        trained = getattr(self, self.requirements.main_role)
        folder, patience = self.log.run_dir / "export", self.config.run.storage_timeout_s
        began, said = time.monotonic(), False
        while True:
            try:
                with ranks.with_timeout(patience):
                    ranks.run_on_all(lambda: disk_space.check_free_space(folder, self.needs.export), lead=True)
                    ranks.run_on_all(lambda: trained.export(folder) if trained.model is not None else None)
                    return
            except OSError as error:
                late = ranks.broadcast_object(time.monotonic() - began > patience)
                if self._is_asked_to_stop() or late:
                    kept = self.store.list_checkpoints() or ["none, for run.save_every=0"]
                    raise ConfigError(
                        f"could not export to {folder}: {error}; make room and start again with run.resume=auto, from "
                        f"the newest checkpoint, {kept[-1]}"
                    ) from None
                if not said:
                    self.log.alarm(f"cannot export to {folder}: {error}. Waiting for room, for up to {patience:g} s")
                said = True
                time.sleep(EXPORT_RETRY_S)

    def _find_checkpoint(self) -> Path | None:
        """The one to go on from, before anything is loaded; what is said and recorded of the run goes on after it."""
        run, parallel, placement = self.config.run, self.config.parallel, placement_of(self.config)
        sizes = self.job.world, parallel.tp, parallel.cp, parallel.pp, parallel.vpp, parallel.ep, parallel.etp
        apart = [] if placement.is_colocated else [placement.describe(self.requirements.roles)]
        for role in self.requirements.trained_roles:
            if (own := role_parallel(self.config, role)) != dataclasses.replace(parallel, world_size=own.world_size):
                apart.append(f"{role}: tp={own.tp} cp={own.cp} pp={own.pp} vpp={own.vpp} ep={own.ep} etp={own.etp}")
        self.store = CheckpointStore(
            self.log.run_dir,
            run.keep_checkpoints,
            run.storage_timeout_s,
            (*sizes, *apart),
            self.log.log,
            collect_provenance(self.config) if self.job.rank == 0 else None,
        )
        self.store.remove_unfinished()
        if not run.resumes:
            return None
        folder = self.store.find_newest()
        step = self.store.read_step(folder) if folder else 0
        if step > run.num_rollout:
            raise ConfigError(
                f"run.num_rollout={run.num_rollout}, but {folder} is of step {step}; set it to that or more"
            )
        if folder is not None:
            self._check_data(folder)
        self.log.begin(step)
        if folder is None:
            self.log.log(describe_fresh_start(self.log.run_dir))
        return folder

    def _check_data(self, folder: Path) -> None:
        """Before anything is started: whether the data are those that the checkpoint was written with."""

        def look() -> None:
            host = host_state(folder)
            if isinstance(host, dict) and isinstance(saved := host.get("loader"), dict):  # else `_resume` says so
                self.loader.check(saved, self.config.run.resume == "forced")

        ranks.run_on_all(look, lead=True)

    def _resume(self, folder: Path) -> None:
        host = self.store.load(folder)
        try:
            self.step = host["step"]
            self.loader.load_state_dict(host["loader"], self.config.run.resume == "forced")
            self.controller.load_state_dict(host["controller"])
            self.log.guards.load_state_dict(host.get("guards", {}))
            self.control.load_state_dict(host.get("control", {}))
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{folder}/host.json is not of this program ({type(error).__name__}: {error}); move that folder away "
                "to go on from an older checkpoint"
            ) from None

        def restore() -> None:
            for role, model in self._trained().items():
                restore_model(model, folder / role)

        ranks.run_on_all(restore)
        for worker in self.workers:
            worker.restore(folder)
        self.controller.restore(folder, row_exchange.WorldComm())

    def _rollback(self) -> None:
        """Too many updates in a row were skipped: all trained models become what the newest checkpoint from before the
        first of them has, weights and optimizer states, and training goes on with the data that come next. Raises
        ConfigError on all ranks where there is none, and where that has been done and no step since was a good one."""
        guards = self.log.guards
        mine = [
            worker.skip_failure for worker in self.workers if isinstance(worker, TrainingWorker) and worker.skip_failure
        ]
        said = [one for here in ranks.all_gather_objects(mine) for one in here]
        first, why = min(said)
        if guards.restored_step is not None:
            raise ConfigError(
                f"{why}. The models had gone back to step {guards.restored_step} for that already, and no step since was "
                "taken whole"
            )
        if self.store.pending_step is not None:
            self._finish_save(must=False)  # it may be the one
        folder = self.store.find_newest(before=first) or self.store.find_newest()
        if folder is None:
            raise ConfigError(f"{why}. There is no checkpoint to go back to; run.save_every writes them")

        def restore() -> None:
            for role, model in self._trained().items():
                restore_model(model, folder / role)

        with self.clock.phase("go_back"), ranks.with_timeout(self.config.run.storage_timeout_s):
            ranks.run_on_all(restore)
        for worker in self.workers:
            if isinstance(worker, TrainingWorker):
                worker.on_rollback()
        if "rollout" in vars(self):
            self._sync_weights()
        step = self.store.read_step(folder)
        guards.record_restore(step)
        self.log.alarm(
            f"step {self.step}: {why}. Weights and optimizer states are those of {folder} again, and training goes on "
            "with the next data; if it comes again before a step was taken whole, the run ends"
        )

    def _sync_weights(self) -> None:
        """Give the engines the policy's weights, which no update has made."""
        self.rollout.sleep()  # as in a step, so that a push is never beside a KV cache
        self.rollout.update_weights(self.actor)

    def _is_asked_to_stop(self) -> bool:
        """Whether any rank has got a signal that asks for it; the same on all."""
        return any(ranks.all_gather_objects(exit_status.is_stop_requested()))
