"""Evaluation of a policy on held-out prompts: sampling modes and metrics, between steps or during training."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from megarl.config import Config
from megarl.observe.eval_metrics import CORRECT_REWARD, pass_at_k
from megarl.observe.metrics import mask_by_source, rollout_metrics
from megarl.rewards.failed_rewards import summarize_unscored
from megarl.rollout.aborted import check_abort_limit
from megarl.types import Rollouts
from megarl.workers.async_rollout import PendingGeneration, newest_version

if TYPE_CHECKING:
    from megarl.flow import HybridFlow


class SamplingMode(NamedTuple):
    """How held-out prompts are sampled, and the name of this mode in metrics."""

    name: str
    greedy: bool
    samples: int


def sampling_modes(config: Config) -> tuple[SamplingMode, ...]:
    return SamplingMode("greedy", True, 1), SamplingMode("sampled", False, config.run.eval_samples)


def compute_eval_metrics(flow: HybridFlow, generated: Iterable[tuple[SamplingMode, Rollouts]]) -> dict[str, float]:
    """Score the rollouts of each mode and return metrics, see `PolicyController.evaluate`. Each mode is scored before
    the next is generated."""
    metrics = {}
    for mode, unscored in generated:
        rollouts = flow.reward.score(unscored)
        if rollouts.version >= 0:
            metrics["eval/weight_version"] = float(rollouts.version)
        if mode.samples > 1:
            metrics |= pass_at_k_metrics(rollouts, mode.samples)
        if reasons := summarize_unscored(rollouts):
            flow.log.log(f"evaluation, {mode.name}: answers without a reward, which count in no mean: {reasons}")
        for metric, value in rollout_metrics(rollouts).items():
            kind, _, source = metric.removeprefix("rollout/").partition("/")
            short = kind.replace("reward_mean", "reward")
            if short in ("reward", "turns_mean", "response_length_mean", "aborted_frac", "reward_failed_frac"):
                metrics[f"eval/{short}_{mode.name}" + (f"/{source}" if source else "")] = value
    return metrics


class AsyncEvaluation:
    """An evaluation during training, a `controller.Evaluation`.

    Training does not wait, so weights are not held constant: conversations continue with the new weights after a weight
    sync. `eval/weight_version` is the version at the start, `eval/weight_version_last` the newest that sampled a token.
    """

    def __init__(self, flow: HybridFlow, pending: Sequence[tuple[SamplingMode, PendingGeneration]]) -> None:
        self._flow, self._pending = flow, pending

    def is_done(self) -> bool:
        return all(pending.is_done() for _, pending in self._pending)

    def result(self) -> dict[str, float]:
        answered = [(mode, pending.result()) for mode, pending in self._pending]
        for _, rollouts in answered:
            check_abort_limit(rollouts, self._flow.config)
        return compute_eval_metrics(self._flow, answered) | {
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
