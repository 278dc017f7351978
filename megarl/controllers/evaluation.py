"""Evaluation on held-out prompts: sampling modes, metrics, and when it runs.

It runs between steps, or during training if generation has its own ranks. Then no step waits: results are logged when
they arrive, as of the step after which the evaluation began. A failed evaluation is logged and the run continues; at
most one evaluation runs at a time."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from megarl.config import Config, ConfigError
from megarl.controllers.controller import Evaluation, Flow
from megarl.observe.eval_metrics import CORRECT_REWARD, pass_at_k
from megarl.observe.metrics import mask_by_source, rollout_metrics
from megarl.observe.step_record import GenerateCall
from megarl.rewards.composite import summarize_unscored
from megarl.rollout.aborted import check_abort_limit
from megarl.types import Rollouts
from megarl.workers.async_rollout import PendingGeneration, newest_version


class SamplingMode(NamedTuple):
    """A way of sampling held-out prompts, and its name in metrics."""

    name: str
    greedy: bool
    samples: int


def sampling_modes(config: Config) -> tuple[SamplingMode, ...]:
    return SamplingMode("greedy", True, 1), SamplingMode("sampled", False, config.run.eval_samples)


def compute_eval_metrics(flow: Flow, generated: Iterable[tuple[SamplingMode, Rollouts]], step: int) -> dict[str, float]:
    """Score the rollouts of each mode, record them, and return metrics, see `PolicyController.evaluate`. Each mode is
    scored before the next is generated. step: after which the evaluation began."""
    metrics = {}
    calls = []
    for mode, unscored in generated:
        rollouts = flow.reward.score(unscored)
        calls.append(GenerateCall(rollouts, mode.greedy))
        if rollouts.version >= 0:
            metrics["eval/weight_version"] = float(rollouts.version)
        if mode.samples > 1:
            metrics |= pass_at_k_metrics(rollouts, mode.samples)
        if reasons := summarize_unscored(rollouts):
            flow.log.log(f"evaluation, {mode.name}: answers without a reward, excluded from all means: {reasons}")
        for metric, value in rollout_metrics(rollouts).items():
            kind, _, source = metric.removeprefix("rollout/").partition("/")
            short = kind.replace("reward_mean", "reward")
            if short in ("reward", "turns_mean", "response_length_mean", "aborted_frac", "reward_failed_frac"):
                metrics[f"eval/{short}_{mode.name}" + (f"/{source}" if source else "")] = value
    flow.log.record_evaluation(step, calls, flow.policy_name)
    return metrics


class AsyncEvaluation:
    """An evaluation during training, a `controller.Evaluation`.

    Training does not wait, so weights are not held constant: conversations continue with the new weights after a weight
    sync. `eval/weight_version` is the version at the start, `eval/weight_version_last` the newest that sampled a token.
    """

    def __init__(self, flow: Flow, pending: Sequence[tuple[SamplingMode, PendingGeneration]]) -> None:
        self._flow, self._pending, self._step = flow, pending, flow.step

    def is_done(self) -> bool:
        return all(pending.is_done() for _, pending in self._pending)

    def result(self) -> dict[str, float]:
        answered = [(mode, pending.result()) for mode, pending in self._pending]
        for _, rollouts in answered:
            check_abort_limit(rollouts, self._flow.config)
        return compute_eval_metrics(self._flow, answered, self._step) | {
            "eval/weight_version": float(self._pending[0][1].start_version),
            "eval/weight_version_last": float(max(newest_version(rollouts) for _, rollouts in answered)),
        }


def pass_at_k_metrics(rollouts: Rollouts, samples: int) -> dict[str, float]:
    """Return `eval/pass_at_<k>` for k = 1, 2, 4 ... up to `samples`, in total and by source: the mean over prompts that
    have at least k answers with a reward. A k without such a prompt is left out."""
    whole = rollouts.merge_branches()
    scored = whole.select(~whole.has_status("aborted") & (whole.unscored == 0))
    metrics = {}
    masks = {"": torch.ones(len(scored), dtype=torch.bool)} | mask_by_source(scored.source, scored.sources)
    for source, mask in masks.items():
        groups, row = torch.unique(scored.group[mask], return_inverse=True)
        num_correct = torch.bincount(row, (scored.reward[mask] >= CORRECT_REWARD).double(), len(groups)).long().tolist()
        counts = torch.bincount(row, minlength=len(groups)).tolist()
        for k in (1 << power for power in range(samples.bit_length())):
            estimates = [
                pass_at_k(count, correct, k) for count, correct in zip(counts, num_correct, strict=True) if count >= k
            ]
            if estimates:
                metrics[f"eval/pass_at_{k}" + (f"/{source}" if source else "")] = statistics.fmean(estimates)
    return metrics


class Evaluator:
    """Runs the evaluations of a run.

    items: held-out items; without any, evaluation is off.
    """

    def __init__(self, flow: Flow, items: Sequence[Any]) -> None:
        self._flow, self._items = flow, items
        self._every = flow.config.run.eval_every
        self._is_async = flow.requirements.has_rollout and flow.rollout.generates_beside_training
        """Whether generation has ranks of its own."""
        self._pending: tuple[int, Evaluation] | None = None
        """The running evaluation, and the step after which it began."""

    def is_due(self, step: int, is_last: bool = False) -> bool:
        """Return whether to evaluate after this step. The last step is always evaluated."""
        return bool(self._every and len(self._items) and (is_last or step % self._every == 0))

    def run(self, step: int) -> dict[str, float]:
        """Evaluate the current weights. Returns metrics, or {} if the evaluation continues during the next steps."""
        self.poll(wait=True)
        flow = self._flow
        flow.begin_step()  # so that the seeds do not depend on what the last step sampled
        evaluation = flow.controller.begin_evaluation(flow, self._items) if self._is_async else None
        if evaluation is not None:
            self._pending = step, evaluation
            flow.clock.lap()
            return {}
        return self._report(step, flow.controller.evaluate(flow, self._items))

    def poll(self, wait: bool) -> dict[str, float]:
        """Return the metrics of a finished asynchronous evaluation; {} if it is still running or has failed."""
        if self._pending is None or not (wait or self._pending[1].is_done()):
            return {}
        (step, evaluation), self._pending = self._pending, None
        try:
            metrics = evaluation.result()
        except ConfigError as error:
            self._flow.clock.lap()
            self._flow.log.alarm(f"the evaluation after step {step} failed: {error}")
            return {}
        return self._report(step, metrics)

    def drop(self) -> None:
        """Abandon the running evaluation of a run that stops early."""
        if self._pending is not None:
            self._flow.log.log(f"the evaluation after step {self._pending[0]} has not finished and is skipped")
            self._pending = None

    def _report(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        self._flow.clock.lap()  # evaluation is not part of a training step's time
        self._flow.log.log_evaluation(step, metrics)
        return metrics
