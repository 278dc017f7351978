"""A run's outputs behind one object: run folder, log, metrics, recorded rollouts, display."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import secrets
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megarl.config import Config, ConfigError
from megarl.observe.clock import Span, Timeline
from megarl.observe.guards import Guards
from megarl.observe.health_bands import load_bands
from megarl.observe.progress import Progress
from megarl.observe.rollout_log import RolloutLog, evaluation_folder, policy_folder, remove_after
from megarl.observe.rollout_table import TrainerLogprobs
from megarl.observe.run_folder import Change, RunFolder, claim, redact_config
from megarl.observe.span_export import SpanExporter
from megarl.observe.step_record import GenerateCall, StepRecord, make_step_record
from megarl.observe.tracker import Tracker
from megarl.observe.trackers.adapter import make_rows
from megarl.observe.webhook import Webhook, resolve_webhook
from megarl.parallel import ranks
from megarl.parallel.policy_configs import POLICIES_FOLDER
from megarl.rewards.composite import summarize_unscored
from megarl.rollout.aborted import summarize_aborts
from megarl.types import Rollout, Rollouts, TrainBatch


class RunLog:
    """Logs and records a run. The constructor is collective.

    Every rank records its own rollouts; rank 0 writes and prints everything else. When a run is resumed, nothing in its
    folder changes before `begin`. Failures to write are warned of once per kind.

    Args:
        vocab_hashes: hash of the tokenizer's vocabulary of each policy whose rollouts are recorded, by name.
        is_training: whether anything is trained.

    Raises:
        ConfigError: on all ranks, if the run folder cannot be claimed.
    """

    def __init__(
        self, config: Config, job: ranks.Job, vocab_hashes: Mapping[str, str] | None = None, is_training: bool = True
    ) -> None:
        self.run_dir = Path(config.run.dir)
        self.is_writer, self._rank = job.rank == 0, job.rank
        self._warned: set[str] = set()
        self._webhook: Webhook | None = None
        self._step = 0
        self._last_recorded_step: dict[str, int] = {}
        """The last step whose rollouts were recorded, by policy."""
        self._folder: RunFolder | None = None
        self._pending_lines: list[str] | None = []
        """Lines logged before `begin`; None afterwards."""

        def prepare() -> None:
            self._folder = claim(self.run_dir, config, resume=config.run.resumes)
            if not self._folder.is_resumed:
                self._folder.begin()

        self._on_lead(prepare)
        self.progress = Progress(
            config.algorithm.rpartition(":")[2].upper(),
            config.run.num_rollout,
            enabled=self.is_writer,
            live=None if config.track.progress else False,
            bands=load_bands(config.guards),
            has_steps=is_training or config.run.num_rollout > 1,
        )
        self.guards = Guards(config.guards, self.log, self.alarm)
        self._tracker: Tracker | None = None
        if self.is_writer:
            self._tracker = Tracker(self.run_dir, config.track.trackers, self._warn, redact_config(config))
            if url := resolve_webhook(config.track.webhook):
                self._webhook = Webhook(url, config.run.dir)
        self._rollouts: dict[str, RolloutLog] = {}
        """Recorded rollouts by policy; empty if none are recorded."""
        if config.track.save_rollouts:
            settings = job.rank, self._warn, config.track.save_replay_data
            self._rollouts = {
                policy: RolloutLog(policy_folder(self.run_dir, policy), *settings, vocab_hash)
                for policy, vocab_hash in (vocab_hashes or {"": ""}).items()
            }
        self._evaluations: dict[str, RolloutLog] = {}
        """Rollouts of evaluations by policy, recorded as `_rollouts` are, without replay data."""
        self._eval_source = Path(config.data.eval[0]).stem if config.data.eval else ""
        """Name of the evaluation set for prompts without a data source, which only a single file may have."""
        if config.data.eval and self._rollouts:
            self._evaluations = {
                policy: RolloutLog(
                    evaluation_folder(policy_folder(self.run_dir, policy)), job.rank, self._warn, False, vocab_hash
                )
                for policy, vocab_hash in (vocab_hashes or {"": ""}).items()
            }
        self._eval_every, self._num_rollout = config.run.eval_every, config.run.num_rollout
        self._timeline = Timeline(self.run_dir, job.rank, self._warn)
        self._span_exporter: SpanExporter | None = None
        if config.track.opentelemetry:
            run_id = ranks.broadcast_object(secrets.token_hex(16))
            self._span_exporter = SpanExporter(self.run_dir.resolve().name, run_id, job.rank, self._warn)
        if self._folder is None or not self._folder.is_resumed:
            self._pending_lines = None
        self.log(f"run folder {self.run_dir}")

    def begin(self, step: int) -> None:
        """Continue the run after step `step`: log and record configuration changes.

        Removes the rollouts of later steps, and of evaluations from `step` on, which will be repeated. Collective.
        """
        repeats_evaluation = bool(self._eval_every) and (step % self._eval_every == 0 or step >= self._num_rollout)
        changes: list[Change] = []

        def begin() -> None:
            if self._folder is not None and self._folder.is_resumed:
                changes.extend(self._folder.begin(step))
                for policy in ("", *(path.name for path in (self.run_dir / POLICIES_FOLDER).glob("*"))):
                    folder = policy_folder(self.run_dir, policy)
                    try:
                        remove_after(folder, step)
                        remove_after(evaluation_folder(folder), step - repeats_evaluation)
                    except OSError as error:
                        raise ConfigError(
                            f"cannot remove the rollouts of steps after {step} in {folder}/rollouts, which are "
                            f"repeated: {error}; remove them, or set run.dir to another folder"
                        ) from None

        self._on_lead(begin)
        self._last_recorded_step = dict.fromkeys(self._rollouts, step)
        pending_lines, self._pending_lines = self._pending_lines or [], None
        for text in pending_lines:
            self._append_line(text)
        for change in changes:
            self.log(f"changed, from step {step + 1} on: {change}")

    def write_spans(self, spans: Sequence[Span]) -> None:
        """Write this rank's spans to the timeline, and send them with `track.opentelemetry`."""
        self._timeline.write(spans)
        if self._span_exporter is not None:
            self._span_exporter.write(spans)

    def alarm(self, text: str) -> None:
        """Raise an alarm: log it, send it to the trackers, and post it to `track.webhook`."""
        self.log(f"ALARM: {text}")
        if self._tracker is not None:
            self._tracker.alarm(self._step, text)
        self._post(text)

    def _post(self, text: str) -> None:
        if self._webhook is not None:
            self._webhook.post(text, self._step)

    def _check_webhook(self) -> None:
        if self._webhook is not None and (failure := self._webhook.pop_failure()):
            self.log(failure)

    def report_nonfinite(self, step: int, rollouts: Sequence[Mapping[str, Any]]) -> None:
        """Append rollouts with non-finite values, which are not trained on, to nonfinite.jsonl and raise an alarm.

        They are recorded with the step's other rollouts; `prompt` and `seed` identify them there.
        """
        if not self.is_writer:
            return
        try:
            with (self.run_dir / "nonfinite.jsonl").open("a", encoding="utf-8") as file:
                file.writelines(json.dumps({"step": step, **rollout}) + "\n" for rollout in rollouts)
        except OSError as error:
            self._warn(f"could not write nonfinite.jsonl: {error.strerror}; training continues without it")
        shown = ", ".join(f"{row['prompt']} ({', '.join(row['not_finite']) or 'a branch'})" for row in rollouts[:3])
        more = f" and {len(rollouts) - 3} more" if len(rollouts) > 3 else ""
        self.alarm(f"step {step}: masked rollouts with non-finite values: {shown}{more}; see nonfinite.jsonl")

    def alarm_any_rank(self, text: str) -> None:
        """Raise an alarm from any rank and thread."""
        if self.is_writer:
            self.alarm(text)
            return
        print(f"ALARM: {text}", flush=True)
        self._append_line(f"ALARM: {text}")

    def _on_lead(self, work: Callable[[], None]) -> None:
        """Run `work` on rank 0 and raise its ConfigError on all ranks. Collective."""
        message = ""
        if self.is_writer:
            try:
                work()
            except ConfigError as error:
                message = str(error)
        message = ranks.broadcast_object(message)
        if message:
            if self._folder is not None:
                self._folder.release()
            raise ConfigError(message)

    def log(self, text: str) -> None:
        """Log a line to the terminal and log.txt. Does nothing on other ranks than 0."""
        if self.is_writer:
            self.progress.log(text)
            self._append_line(text)

    def begin_step(self, step: int) -> None:
        """Start step `step`, counted from 1."""
        self._step = step
        self._check_webhook()
        self.progress.begin_step(step)

    def end_step(
        self,
        step: int,
        metrics: Mapping[str, float],
        rollouts: Rollouts | None = None,
        batch: TrainBatch | None = None,
        trained: Rollouts | None = None,
        calls: Sequence[GenerateCall] = (),
        generation_metrics: Mapping[str, float] | None = None,
    ) -> dict[str, float]:
        """Check the guards, record the step's rollouts in the background, and log its metrics. Collective.

        Args:
            rollouts: the step's rollouts; each rank records its local ones.
            batch: the training batch, made of the `trained` rollouts in their order.
            trained: rollouts that were trained on; all by default.
            calls: what the step generated; recorded, too, also what is not among the `rollouts`.
            generation_metrics: metrics of the rollout worker, for a replay.

        Returns:
            The metrics with those of the guards.

        Raises:
            ConfigError: on all ranks, if a guard ends the run.
        """
        metrics = {**metrics, **self.guards.check(step, metrics)}
        self.record_step(step, rollouts, batch, trained, calls, generation_metrics)
        if self._tracker is not None:
            self._log_step(self._tracker, step, metrics, rollouts)
        self.guards.raise_if_stopped()
        return metrics

    def record_step(
        self,
        step: int,
        rollouts: Rollouts | None,
        batch: TrainBatch | None = None,
        trained: Rollouts | None = None,
        calls: Sequence[GenerateCall] = (),
        generation_metrics: Mapping[str, float] | None = None,
        policy: str = "",
    ) -> None:
        """Record a policy's rollouts of a step in the background, with arguments as for `end_step`, which does this for
        the first policy. Collective."""
        if rollouts is not None and policy in self._rollouts:
            trained = rollouts if trained is None else trained
            record = make_step_record(calls, rollouts, generation_metrics)
            values = () if batch is None else split_batch(batch, trained, record.rollouts)
            self._record(policy, step, record, *values)

    def record_evaluation(self, step: int, calls: Sequence[GenerateCall], policy: str = "") -> None:
        """Record what an evaluation of the state after `step` steps has generated, with rewards, in the background. Not
        collective.

        The data source of its prompts names their evaluation set: those without one get that of the file.
        """
        if policy in self._evaluations:
            record = make_step_record(calls)
            prompts = {id(rollout.prompt): rollout.prompt for rollout in record.rollouts}  # samples share one
            named = {
                key: prompt if prompt.data_source else dataclasses.replace(prompt, data_source=self._eval_source)
                for key, prompt in prompts.items()
            }
            rollouts = [dataclasses.replace(rollout, prompt=named[id(rollout.prompt)]) for rollout in record.rollouts]
            values = record.total, record.numbers, rollouts, None, None, record.calls, record.generation
            self._evaluations[policy].write(step, *values)

    def record_failed_step(self, step: int, calls: Mapping[str, Sequence[GenerateCall]]) -> None:
        """Record what a step that failed has generated, by policy, so that it can be replayed. Not collective."""
        for policy, generated in calls.items():
            if generated and step > self._last_recorded_step.get(policy, 0):
                self._record(policy, step, make_step_record(generated))

    def _record(
        self, policy: str, step: int, record: StepRecord, advantages: Any = None, trainer_logprobs: Any = None
    ) -> None:
        if policy in self._rollouts:
            values = advantages, trainer_logprobs, record.calls, record.generation
            self._rollouts[policy].write(step, record.total, record.numbers, record.rollouts, *values)
            self._last_recorded_step[policy] = step

    def _log_step(self, tracker: Tracker, step: int, metrics: Mapping[str, float], rollouts: Rollouts | None) -> None:
        tracker.log(step, metrics)
        if rollouts is not None:
            if self._rollouts:
                tracker.table(step, make_rows(step, rollouts.local))
            if reasons := summarize_aborts(rollouts):
                self.log(f"step {step}: aborted rollouts, excluded from training: {reasons}")
            if reasons := summarize_unscored(rollouts):
                self.log(f"step {step}: rollouts without a reward, excluded from training: {reasons}")
        self.progress.end_step(step, metrics)
        self._append_line(self.progress.format_step(step, metrics))

    def make_drain(self) -> Callable[[], object]:
        """Return a function that waits, on any thread, until the rollouts recorded so far are on disk."""
        drains = [rollouts.make_drain() for rollouts in (*self._rollouts.values(), *self._evaluations.values())]
        return lambda: [drain() for drain in drains]

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log evaluation metrics of the state after `step` steps."""
        if self._tracker is not None:
            self._tracker.log(step, metrics, self._step)
            self._append_line(self.progress.report_evaluation(step, metrics))

    def log_end(self, error: BaseException, is_graceful: bool, cause: str = "") -> None:
        """Log in log.txt why the run ends early: `cause`, the message of another rank whose failure caused this error.

        Unless the end is graceful or the user's error, write the traceback to logs/rank_N.log and add a note on this to
        the error.
        """
        if self.is_writer:
            message = cause or (str(error) if is_graceful else f"{type(error).__name__}: {error}")
            self._append_line(message)
            if not is_graceful:
                self._post(f"the run has ended: {message}")
        if is_graceful or (isinstance(error, ConfigError) and error.__cause__ is None):
            return
        file = self.run_dir / "logs" / f"rank_{self._rank}.log"
        with contextlib.suppress(OSError):  # the traceback goes to the terminal instead
            file.parent.mkdir(exist_ok=True)
            with file.open("a", encoding="utf-8", errors="backslashreplace") as log:
                log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n{''.join(traceback.format_exception(error))}\n")
            error.add_note(f"the full traceback is in {file}")

    def close(self) -> None:
        self.progress.close()
        for rollouts in (*self._rollouts.values(), *self._evaluations.values()):
            rollouts.close()
        if self._tracker is not None:
            self._tracker.close()
        if self._span_exporter is not None:
            self._span_exporter.close()
        if self._webhook is not None:  # last, since the others may still raise alarms
            self._webhook.close()
            self._check_webhook()
        if self._folder is not None:
            self._folder.release()

    def _append_line(self, text: str) -> None:
        if self._pending_lines is not None:
            self._pending_lines.append(text)
            return
        try:
            with (self.run_dir / "log.txt").open("a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}\n")
        except OSError as error:
            self._warn(f"could not write log.txt: {error.strerror}; training continues without it")

    def _warn(self, text: str) -> None:
        kind = text.split(":")[0]
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(text, stacklevel=3)
            self._post(text)


def split_batch(
    batch: TrainBatch, trained: Rollouts, rollouts: Sequence[Rollout]
) -> tuple[list[np.ndarray | None], list[TrainerLogprobs | None]]:
    """Return advantages ([tokens] float32) and trainer log-probs of each rollout, as views of the batch.

    None for rollouts that were not trained on, and if they were not computed.

    Args:
        batch: made of the `trained` rollouts in their order.
    """
    ends = batch.cu_seqlens[1:-1].tolist()

    def split(column: torch.Tensor | None) -> list[np.ndarray | None]:
        parts = [] if column is None else np.split(column.numpy(), ends)
        values_by_id = dict(zip(map(id, trained.local), parts, strict=False))
        return [values_by_id.get(id(rollout)) for rollout in rollouts]

    logprobs, unreplayed = (
        split(None if column is None else torch.where(batch.loss_mask, column, 0.0))
        for column in (batch.trainer_logprobs, batch.unreplayed_logprobs)
    )
    trainer_logprobs = [
        None if values is None else TrainerLogprobs(values, unreplayed_values)
        for values, unreplayed_values in zip(logprobs, unreplayed, strict=True)
    ]
    return split(batch.advantages), trainer_logprobs
