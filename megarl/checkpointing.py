"""Save, resume and roll back the models of a run, and export them at its end."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from megarl.checkpoint import disk_space
from megarl.checkpoint.manifest import Entry, host_state, list_checkpoints, step_of
from megarl.checkpoint.memory_store import MemoryStore, forget_step
from megarl.checkpoint.provenance import code_revision, config_hash
from megarl.checkpoint.store import CheckpointStore, RankWrite, StorageError, lower_priority
from megarl.config import ConfigError
from megarl.controllers.controller import Flow
from megarl.launch import exit_status
from megarl.megatron.dist_checkpoint import (
    WRITERS,
    SaveSlot,
    StagedCheckpoint,
    async_copy_bytes,
    fetch_before_reading,
    restore_model,
)
from megarl.models.host_memory import count_memory_copies
from megarl.observe.clock import WAIT
from megarl.observe.control import Control
from megarl.observe.run_folder import describe_fresh_start
from megarl.parallel import ranks, row_exchange
from megarl.parallel.placement import placement_of, role_parallel, split_role
from megarl.workers.actor import ReferenceWorker, SeparateReferenceWorker
from megarl.workers.model_worker import TrainingWorker

EXPORT_RETRY_S = 10.0
"""Seconds between attempts of an export that found no disk space."""

MEMORY_REMEDY = "if that recurs, free memory, set run.memory_dir, or set run.memory_save_every=0"
JOINT_EXIT_TIMEOUT_S = 5.0
"""Seconds that a rank that fails waits for the others to fail with the same error."""


class Checkpointer:
    """Saves, resumes, rolls back and exports the models of a run.

    A checkpoint holds the trained models, the state of workers and controller, and the position of the loop.

    flow: its workers start after `find_checkpoint`. needs: bytes of a checkpoint and an export.
    """

    def __init__(self, flow: Flow, needs: disk_space.SpaceEstimate) -> None:
        self.flow, self.needs = flow, needs
        self.config, self.requirements, self.clock, self.log = flow.config, flow.requirements, flow.clock, flow.log
        self.loader, self.controller, self.workers = flow.loader, flow.controller, flow.workers
        self.control: Control | None = None
        """Settings changed during the run, which a checkpoint holds too; set by the flow once the workers are ready."""
        self.save_error: StorageError | None = None
        """Why the latest due checkpoint could not be written; None if it was, or is still being written."""
        self._slots: dict[str, SaveSlot] = {}
        self._memory_slots: dict[str, SaveSlot] = {}
        """Plans of saves to disk and into memory, and host copies written while training continues, by role."""
        self.store = self._open_store()
        self.memory = self._open_memory()
        """Checkpoints in the nodes' memory (`run.memory_save_every`), if there are any."""

    def trained_models(self) -> dict[str, Any]:
        """Return the models that a checkpoint holds, by role, as far as they are on this rank."""
        models = {role: getattr(self.workers[role], "model", None) for role in self.requirements.trained_roles}
        return {role: model for role, model in models.items() if model is not None}

    @property
    def _references(self) -> dict[str, ReferenceWorker | SeparateReferenceWorker]:
        """The references by role. Their weights are part of a checkpoint once they are no longer those of
        `model.path`."""
        return {
            role: worker
            for role, worker in self.workers.items()
            if split_role(role)[0] == "reference" and isinstance(worker, ReferenceWorker | SeparateReferenceWorker)
        }

    def check_copies(self) -> None:
        """Warn of machines that lack memory for the copies of saves, once models are loaded."""
        run = self.config.run
        num_in_memory = count_memory_copies(self.config)
        if not (run.save_every and (run.save_async or num_in_memory)):
            return
        local_bytes = sum(async_copy_bytes(model) for model in self.trained_models().values())
        if self.config.kl.refresh_reference_every:
            local_bytes += sum(reference.nbytes for reference in self._references.values())
        needed = (run.save_async + num_in_memory) * local_bytes
        lines = disk_space.check_copy_memory(
            ranks.all_gather_objects((socket.gethostname(), needed, disk_space.free_memory())),
            "run.memory_save_every=0 or run.save_async=false" if num_in_memory else "run.save_async=false",
        )
        if self.memory is not None:
            lines += self.memory.check_space(local_bytes)
        for line in lines:
            self.log.log(f"warning: {line}")

    def close(self) -> None:
        """Stop writing, of a run that may end with an error. Not collective."""
        self.store.cancel()
        if self.memory is not None:
            self.memory.cancel()

    def save_if_due(self, step: int) -> bool:
        """Complete a checkpoint that all ranks have written, and begin another if one is due. Returns whether the run
        should stop; it has then been saved."""
        run = self.config.run
        skipped = [worker.first_skipped_step for worker in self.workers.values() if isinstance(worker, TrainingWorker)]
        first_skipped = min((number for number in skipped if number is not None), default=None)
        memory = self.memory
        is_in_memory = memory is None or memory.is_written()
        states = ranks.all_gather_objects(
            (exit_status.is_stop_requested(), self.store.is_written(), is_in_memory, first_skipped)
        )
        is_last = step == self.flow.last_step
        stop = any(is_asked for is_asked, *_ in states) and not is_last
        self.store.keep_before_step = min((number for *_, number in states if number is not None), default=None)
        is_due = stop or bool(run.save_every and (is_last or step % run.save_every == 0))
        if self.store.pending_step is not None and (is_due or all(is_written for _, is_written, *_ in states)):
            self._finish_save()  # memory allows only one at a time
        if memory is not None:
            self._save_in_memory(memory, step, not is_due, all(is_written for *_, is_written, _ in states))
        if is_due:
            in_background = run.save_async and not (stop or is_last)
            self.save_error = self._save(step, in_background, raise_on_error=stop)
            if memory is not None and self.save_error is None and (stop or is_last):
                memory.clear()
                self.memory = None
        return stop

    def _save_in_memory(self, memory: MemoryStore, step: int, may_begin: bool, is_written: bool) -> None:
        """Complete the pending checkpoint in memory if all ranks have written theirs, and begin one if it is due."""
        is_due, in_background = may_begin and step % self.config.run.memory_save_every == 0, self.config.run.save_async
        if memory.pending_step is not None and (is_due or is_written):
            self._try(memory.pending_step, memory.finish, False, MEMORY_REMEDY)
        if not is_due:
            return
        host, stage = self._capture(step, self._memory_slots, in_background)

        def stage_on_node(folder: Path) -> RankWrite:
            for role in (*self.trained_models(), *self._references):  # as rank 0 does on a disk that all share
                (folder / role).mkdir(exist_ok=True)
            return stage(folder)

        def save() -> None:
            memory.begin(step, host, stage_on_node, self.needs.checkpoint)
            if not in_background:
                memory.finish()

        self._try(step, save, False, MEMORY_REMEDY)

    def _save(self, step: int, in_background: bool, raise_on_error: bool) -> StorageError | None:
        """Write a checkpoint. If writing fails, raise if `raise_on_error`, else raise an alarm and return the error."""
        host, stage = self._capture(step, self._slots, in_background)
        error = self._try(step, lambda: self.store.begin(step, host, stage, self.needs.checkpoint), raise_on_error)
        return error if error is not None or in_background else self._finish_save(raise_on_error)

    def _capture(
        self, step: int, slots: dict[str, SaveSlot], in_background: bool
    ) -> tuple[dict[str, Any], Callable[[Path], RankWrite]]:
        """Return the state of the loop, and a function that captures that of models, workers and controller."""
        assert self.control is not None
        host = {"step": step, "loader": self.loader.state_dict(), "controller": self.controller.state_dict()}
        host |= {"guards": self.log.guards.state_dict(), "control": self.control.state_dict()}
        host["reference_versions"] = {role: reference.version for role, reference in self._references.items()}

        def stage(folder: Path) -> RankWrite:
            models = []
            for role, reference in self._references.items():
                if not reference.version or reference.saved_model is None:
                    continue
                slot = slots.setdefault(role, SaveSlot())
                # Copied even for a synchronous save: these weights are in the model only for a moment. Trained models
                # are staged afterwards: a swap of weights waits for their copies.
                with reference.use_reference_weights():
                    models.append(StagedCheckpoint(reference.saved_model, folder / role, slot, "now", True))
            for role, model in self.trained_models().items():
                slot = slots.setdefault(role, SaveSlot())
                copies: Literal["none", "later"] = "later" if in_background else "none"
                models.append(StagedCheckpoint(model, folder / role, slot, copies, waiting=self._time_wait))
            other_writes = [*(worker.save() for worker in self.workers.values()), self.controller.save()]
            drain = self.log.make_drain()

            def write(ended: Callable[[], bool]) -> dict[Path, Entry]:
                written: dict[Path, Entry] = {}
                with self.clock.span("save"):
                    for model in models:  # the next updates wait for all copies, and for no file
                        model.copy()
                    if in_background:
                        lower_priority()
                    for model in models:
                        written |= model.write(1 if in_background else WRITERS, ended)
                    for other_write in other_writes:
                        written |= other_write(folder)
                    drain()  # a run resumed from here does not repeat these steps
                return written

            def finish() -> dict[Path, Entry]:
                written: dict[Path, Entry] = {}
                for model in models:
                    written |= model.finish()
                return written

            return RankWrite(write, finish)

        return host, stage

    def _time_wait(self) -> AbstractContextManager[None]:
        """Measure how long a change of a model waits for the copy of its state, as `time/save_wait`."""
        return self.clock.phase("save_wait", WAIT)

    def _finish_save(self, raise_on_error: bool = False) -> StorageError | None:
        """Wait for the pending write and complete its checkpoint. Errors as in `_save`."""
        assert self.store.pending_step is not None
        return self._try(self.store.pending_step, self.store.finish, raise_on_error)

    def _try(
        self, step: int, action: Callable[[], object], raise_on_error: bool, remedy: str = "free disk space"
    ) -> StorageError | None:
        with self.clock.phase("save"), exit_status.defer_sigterm():
            try:
                action()
                return None
            except StorageError as error:
                if raise_on_error:
                    raise
                failure = error
        continues = step < self.flow.last_step
        self.log.alarm(f"{failure}. {f'Training continues; {remedy}' if continues else 'No checkpoint follows'}")
        return failure

    def finish_on_error(self, error: Exception) -> None:
        """Complete the pending checkpoint of a run that ends by an error that all ranks share, after which they can
        still communicate. If not all of them arrive in time, it stays unfinished."""
        if self.store.pending_step is None:
            return
        name = f"megarl/ends by {hashlib.sha256(f'{type(error).__name__} {error}'.encode()).hexdigest()}"
        with contextlib.suppress(Exception):  # the run ends for another reason
            world = torch.distributed.get_world_size()
            arrived, deadline = ranks.add_to_counter(name, 1), time.monotonic() + JOINT_EXIT_TIMEOUT_S
            while arrived < world and time.monotonic() < deadline:
                time.sleep(0.02)
                arrived = ranks.add_to_counter(name, 0)
            if arrived == world:
                self._finish_save()

    def export(self) -> None:
        """Write the trained policies. If the disk is full, wait for room: the export is the point of the run."""
        main, trained_roles = self.requirements.main_role, self.requirements.trained_roles
        for role in trained_roles:
            base, policy = split_role(role)
            if role == main or (policy and base == "actor"):
                name = "export" if role == main else f"export_{policy}"
                self._export(self.workers[role], self.log.run_dir / name)

    def _export(self, trained: Any, folder: Path) -> None:
        timeout = self.config.run.storage_timeout_s
        began, has_alarmed = time.monotonic(), False
        while True:
            try:
                with ranks.with_timeout(timeout):
                    check_space = partial(disk_space.check_free_space, folder, self.needs.export)
                    ranks.run_on_all(check_space, rank_zero_only=True)
                    ranks.run_on_all(lambda: trained.export(folder) if trained.model is not None else None)
                    return
            except OSError as error:
                is_late = ranks.broadcast_object(time.monotonic() - began > timeout)
                if is_late or any(ranks.all_gather_objects(exit_status.is_stop_requested())):
                    complete = [str(path) for path in list_checkpoints(self.log.run_dir) if path.suffix != ".tmp"]
                    newest = complete[-1] if complete else "none, for run.save_every=0"
                    raise ConfigError(
                        f"could not export to {folder}: {error}; free disk space and restart with run.resume=auto, "
                        f"from the newest checkpoint, {newest}"
                    ) from None
                if not has_alarmed:
                    self.log.alarm(f"cannot export to {folder}: {error}. Waiting for space, for up to {timeout:g} s")
                has_alarmed = True
                time.sleep(EXPORT_RETRY_S)

    def _open_store(self) -> CheckpointStore:
        run, parallel, placement = self.config.run, self.config.parallel, placement_of(self.config)
        sizes = ("tp", "cp", "pp", "vpp", "ep", "etp")
        layout = [torch.distributed.get_world_size(), *(getattr(parallel, name) for name in sizes)]
        if not placement.is_colocated:
            layout.append(placement.describe(self.requirements.roles))
        for role in self.requirements.trained_roles:
            role_layout = role_parallel(self.config, role)
            if role_layout != dataclasses.replace(parallel, world_size=role_layout.world_size):
                layout.append(f"{role}: " + " ".join(f"{name}={getattr(role_layout, name)}" for name in sizes))
        provenance = {"config": config_hash(self.config), "code": code_revision()} if ranks.is_lead() else {}
        store = CheckpointStore(
            self.log.run_dir, run.keep_checkpoints, run.storage_timeout_s, layout, self.log.log, provenance
        )
        store.remove_unfinished()
        return store

    def _open_memory(self) -> MemoryStore | None:
        run, store = self.config.run, self.store
        if not run.memory_save_every:
            if ranks.is_lead():
                self._forget_memory()
            return None
        memory = MemoryStore(
            self.log.run_dir, Path(run.memory_dir), run.storage_timeout_s, store.layout, self.log.log, store.provenance
        )
        if len(memory.nodes) == 1:
            self.log.log("checkpoints in memory are on this node alone: they are lost if the node is")
        return memory

    def _forget_memory(self) -> None:
        """Warn of a checkpoint in memory that this start does not read. Launchers then count those on disk alone."""
        with contextlib.suppress(OSError):
            if step := forget_step(self.log.run_dir):
                self.log.log(
                    f"warning: run.memory_save_every=0 ignores the checkpoint of step {step} in memory; to continue "
                    "from it, stop this run and set that key"
                )

    def find_checkpoint(self) -> Path | None:
        """Return the checkpoint to resume from, before anything is loaded; logs and records continue after its step."""
        run = self.config.run
        if not run.resumes:
            if self.memory is not None:
                self.memory.keep_only(None)
            return None
        folder = self._find_newest()
        step = self.store.read_step(folder) if folder else 0
        if step > run.num_rollout:
            raise ConfigError(
                f"run.num_rollout={run.num_rollout}, but {folder} is of step {step}; set it to that or more"
            )

        def check_data() -> None:
            """Check that the data are those that the checkpoint was written with, before anything starts."""
            if folder and isinstance(saved := host_state(folder).get("loader"), dict):  # otherwise `resume` raises
                self.loader.check(saved, run.resume == "forced")

        ranks.run_on_all(check_data, rank_zero_only=True)
        self.log.begin(step)
        if folder is None:
            self.log.log(describe_fresh_start(self.log.run_dir))
        return folder

    def _find_newest(self) -> Path | None:
        """Return the newest checkpoint, on disk or on this node's part of memory."""
        if self.memory is None:
            return self.store.find_newest()
        recorded = self.memory.recorded_step
        in_memory = self.memory.find_newest()
        if recorded > (step_of(in_memory) if in_memory is not None else 0):
            self.log.log(f"warning: the checkpoint of step {recorded} in memory is lost, or on other nodes")
        on_disk = self.store.find_newest(after=step_of(in_memory) - 1 if in_memory is not None else None)
        self.memory.keep_only(in_memory if on_disk is None else None)
        return on_disk or in_memory

    def resume(self, folder: Path) -> int:
        """Restore a checkpoint and return its step. Raises ConfigError for one that is not of this program."""
        assert self.control is not None
        host = self.store.load(folder)
        try:
            step: int = host["step"]
            self.control.load_state_dict(host.get("control", {}))
            self.control.start(step)  # before the states that depend on the configuration
            self.loader.load_state_dict(host["loader"], self.config.run.resume == "forced")
            self.controller.load_state_dict(host["controller"])
            self.log.guards.load_state_dict(host.get("guards", {}))
            # A checkpoint of an earlier version names one reference.
            versions = host.get("reference_versions", {"reference": host.get("reference_version", 0)})
            reference_versions = {role: int(versions.get(role, 0)) for role in self._references}
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{folder}/host.json is not of this program ({type(error).__name__}: {error}); move that folder away "
                f"to continue from an older checkpoint"
            ) from None

        with fetch_before_reading(self.memory.fetch) if self.memory is not None else contextlib.nullcontext():
            self._restore_models(folder)
            for role, reference in self._references.items():
                load = partial(restore_model, folder=folder / role, is_reference=True)
                ranks.run_on_all(partial(reference.restore_version, reference_versions[role], load))
        for worker in self.workers.values():
            worker.restore(folder)
        self.controller.restore(folder, row_exchange.WorldComm())
        return step

    def _restore_models(self, folder: Path) -> None:
        """Restore the trained models one by one: each load is collective, so all ranks must know that it succeeded
        before the next begins. Collective; raises the OSError or ConfigError of any rank on all of them."""
        models = self.trained_models()
        for role in self.requirements.trained_roles:
            model = models.get(role)
            ranks.run_on_all(partial(restore_model, model, folder / role) if model is not None else lambda: None)

    def rollback(self, step: int) -> None:
        """Roll all trained models back after too many skipped updates in a row: restore weights and optimizer states
        from the newest checkpoint before the first of them, and continue with the next data. Raises ConfigError on all
        ranks if there is no checkpoint, or if the models were rolled back before and no step has succeeded since."""
        guards = self.log.guards
        trained = [worker for worker in self.workers.values() if isinstance(worker, TrainingWorker)]
        local_failures = [worker.skip_failure for worker in trained if worker.skip_failure]
        first_skipped, reason = min(sum(ranks.all_gather_objects(local_failures), []))
        if guards.restored_step is not None:
            raise ConfigError(
                f"{reason}. The models were already rolled back to step {guards.restored_step} for this reason, and no "
                f"step since had all its updates"
            )
        if self.store.pending_step is not None:
            self._finish_save()  # it may be the newest one before the failure
        folder = self.store.find_newest(before=first_skipped) or self.store.find_newest()
        if folder is None:
            raise ConfigError(f"{reason}. There is no checkpoint to roll back to; set run.save_every to write them")

        with self.clock.phase("rollback"), ranks.with_timeout(self.config.run.storage_timeout_s):
            self._restore_models(folder)
        for worker in trained:
            worker.on_rollback()
        self.flow.sync_weights()
        guards.record_restore(self.store.read_step(folder))
        self.log.alarm(
            f"step {step}: {reason}. Rolled back weights and optimizer states to {folder}; training continues with the "
            f"next data. The run stops if this happens again before a step with all its updates"
        )
