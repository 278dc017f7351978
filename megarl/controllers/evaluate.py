"""What a policy answers to held-out prompts: how it is asked, and what is said of it; at once, or beside training."""

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
    """How held-out prompts are asked, and what its figures are called."""

    name: str
    greedy: bool
    samples: int


def sampling_modes(config: Config) -> tuple[SamplingMode, ...]:
    return SamplingMode("greedy", True, 1), SamplingMode("sampled", False, config.run.eval_samples)


def compute_eval_metrics(flow: HybridFlow, answered: Iterable[tuple[SamplingMode, Rollouts]]) -> dict[str, float]:
    """See `PolicyController.evaluate`; each of the answers is scored before the next is asked for."""
    metrics = {}
    for way, answers in answered:
        rollouts = flow.reward.score(answers)
        if rollouts.version >= 0:
            metrics["eval/weight_version"] = float(rollouts.version)
        if way.samples > 1:
            metrics |= pass_at_k_metrics(rollouts, way.samples)
        if reasons := summarize_unscored(rollouts):
            flow.log.log(f"evaluation, {way.name}: answers without a reward, which count in no mean: {reasons}")
        for metric, value in rollout_metrics(rollouts).items():
            figure, _, source = metric.removeprefix("rollout/").partition("/")
            short = figure.replace("reward_mean", "reward")
            if short in ("reward", "turns_mean", "response_length_mean", "aborted_frac", "reward_failed_frac"):
                metrics[f"eval/{short}_{way.name}" + (f"/{source}" if source else "")] = value
    return metrics


class AsyncEvaluation:
    """An evaluation while models are trained, as `base.Evaluation`. Nothing holds the weights still, for training would
    have to wait: what is under way when they change goes on by the new ones. `eval/weight_version` is the one by which
    it began, `eval/weight_version_last` the newest that chose a token."""

    def __init__(self, flow: HybridFlow, under_way: Sequence[tuple[SamplingMode, PendingGeneration]]) -> None:
        self._flow, self._pending = flow, under_way

    def is_done(self) -> bool:
        return all(answers.is_done() for _, answers in self._pending)

    def result(self) -> dict[str, float]:
        answered = [(way, answers.result()) for way, answers in self._pending]
        for _, rollouts in answered:
            check_abort_limit(rollouts, self._flow.config)
        return compute_eval_metrics(self._flow, answered) | {
            "eval/weight_version": float(self._pending[0][1].start_version),
            "eval/weight_version_last": float(max(newest_version(rollouts) for _, rollouts in answered)),
        }


def pass_at_k_metrics(rollouts: Rollouts, samples: int) -> dict[str, float]:
    """`eval/pass_at_<k>` for k = 1, 2, 4 ... up to `samples`, of each source too: the mean over those prompts that have
    k answers with a reward; left out where none has."""
    whole = rollouts.merge_branches()
    scored = whole.select(~whole.has_status("aborted") & (whole.unscored == 0))
    metrics = {}
    among = {"": torch.ones(len(scored), dtype=torch.bool)} | mask_by_source(scored.source, scored.sources)
    for source, own in among.items():
        groups, row = torch.unique(scored.group[own], return_inverse=True)
        right = torch.bincount(row, (scored.reward[own] >= CORRECT_REWARD).double(), len(groups)).long().tolist()
        counts = torch.bincount(row, minlength=len(groups)).tolist()
        for k in (1 << power for power in range(samples.bit_length())):
            each = [pass_at_k(count, good, k) for count, good in zip(counts, right, strict=True) if count >= k]
            if each:
                metrics[f"eval/pass_at_{k}" + (f"/{source}" if source else "")] = statistics.fmean(each)
    return metrics
