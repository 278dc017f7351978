"""Off-policy correction of a sampled batch: the log-probs in the ratio of the loss, and a weight for each token.

The section `correction` configures it; `algorithms/corrections.py` computes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.corrections import compute_correction, correction_metrics, log_ratios
from megarl.config import Config, ConfigError
from megarl.controllers.logprob_check import check_same_policy
from megarl.controllers.policy_gradient import add_trainer_logprobs, behavior_logprobs
from megarl.types import ModelOutput, TrainBatch
from megarl.types.requirements import Requirements
from megarl.workers.futures import Future

if TYPE_CHECKING:
    from megarl.flow import HybridFlow


def compute_old_logprobs(flow: HybridFlow, batch: TrainBatch, needed: bool = True) -> Future[ModelOutput]:
    """Start computing the policy's log-probs before the step's updates. With `correction.proximal: engine` the ratio of
    the loss is to the engine's log-probs, which are returned without a forward pass.

    needed: whether the algorithm uses them. If not, and no correction does, they are None, which saves the forward
    pass.
    """
    settings = flow.config.correction
    if settings.resolved_proximal == "engine":
        return Future.completed(ModelOutput(logprobs=batch.rollout_logprobs))
    if not needed and settings.kind == "none" and settings.resolved_proximal == "drawn":
        return Future.completed(ModelOutput())
    return flow.actor.forward(batch)


def apply_correction(
    flow: HybridFlow, batch: TrainBatch, policy: ModelOutput, steps: int
) -> tuple[TrainBatch, dict[str, float]]:
    """Return the batch with `old_logprobs`, the denominator of the loss ratio, with `importance` weights if a
    correction weighs or rejects tokens, and with the trainer's log-probs for the record; and metrics of the distance
    between the behavior policy and the trained one.

    policy: from `compute_old_logprobs`. steps: steps taken so far. With `correction.proximal: engine`, the trainer's
    log-probs are computed for metrics only every `rollout.verify_every` steps.
    """
    config, settings = flow.config, flow.config.correction
    if policy.logprobs is None:
        check_same_policy(flow, batch)
        return batch, {}
    old = policy.logprobs if settings.resolved_proximal != "drawn" else behavior_logprobs(batch, policy)
    batch = batch.with_(old_logprobs=old)
    if settings.resolved_proximal == "engine":
        if steps % config.rollout.verify_every:
            check_same_policy(flow, batch)
            return batch, {}
        policy = flow.actor.forward(batch).wait()
    check_same_policy(flow, batch, policy)
    batch, metrics = add_trainer_logprobs(flow, batch, policy, steps)
    if settings.kind == "none" and batch.staleness is None:
        return batch, metrics
    assert policy.logprobs is not None
    logs, cu = log_ratios(policy.logprobs, batch.rollout_logprobs, batch.loss_mask), batch.cu_episodes
    correction = compute_correction(logs, batch.loss_mask, cu, settings.kind, settings.resolved_level, *settings.bounds)
    metrics |= correction_metrics(logs, batch.loss_mask, cu, correction, batch.staleness, batch.all_reduce)
    return batch if settings.kind == "none" else batch.with_(importance=correction.weights), metrics


def check_correction(config: Config, requirements: Requirements) -> None:
    """Raise ConfigError unless the algorithm's loss has a ratio to the behavior policy, and the correction's kind,
    level, bounds and proximal policy are compatible."""
    settings, (low, high) = config.correction, config.correction.bounds
    kind, level, proximal = settings.kind, settings.resolved_level, settings.resolved_proximal
    key = f"correction.kind={kind}"
    if kind == "none" and proximal == "drawn":
        return
    if not requirements.has_rollout or not requirements.is_off_policy:
        why = "its loss has no ratio to who sampled" if requirements.has_rollout else "it has no engine that samples"
        raise ConfigError(f"{key} with algorithm={requirements.name}: {why}; leave the section correction out")
    if not low <= 1 <= high:
        raise ConfigError(
            f"correction.low={low:g} and correction.high={high:g} must have 1 between them, the ratio of equal policies"
        )
    if (kind == "icepop" and level != "token") or (kind == "mis" and level == "token"):
        other = "mis" if kind == "icepop" else "icepop"
        raise ConfigError(f"{key} with correction.level={level}: that is correction.kind={other}")
    if settings.has_weights and proximal != "trainer":
        raise ConfigError(
            f"{key} weights by the ratio of the trainer's log-probs to the engine's, which with "
            f"correction.proximal={proximal} is in the ratio of the loss as well; leave the latter out"
        )
    if kind == "reject" and proximal == "engine":
        raise ConfigError(
            f"{key} needs the trainer's log-probs, which correction.proximal=engine does without; set it to drawn"
        )
