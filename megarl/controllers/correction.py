"""Of a sampled batch: the log-probs that the ratio of the loss is to, and what each token counts for besides.

`correction` in the configuration says so, `algorithms/corrections.py` computes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megarl.algorithms.corrections import correction, correction_figures, log_ratios
from megarl.config import Config, ConfigError
from megarl.controllers.logprob_check import check_same_policy
from megarl.controllers.policy_gradient import drawn_by, looked_at
from megarl.types import ModelOutput, TrainBatch
from megarl.types.requirements import Declared

if TYPE_CHECKING:
    from megarl.flow import HybridFlow


def before_updates(flow: HybridFlow, batch: TrainBatch, needed: bool = True) -> ModelOutput:
    """Log-probs of the policy before the step's updates. They are the trainer's, but where the ratio of the loss is to
    the engine's (`correction.proximal: engine`) nobody needs these, and the engine's are as good.

    needed: whether the algorithm wants them. If not there are none, unless a correction does: they cost a forward pass.
    """
    settings = flow.config.correction
    if settings.clipped_to == "engine":
        return ModelOutput(logprobs=batch.rollout_logprobs)
    if not needed and settings.kind == "none" and settings.clipped_to == "drawn":
        return ModelOutput()
    return flow.actor.forward(batch)


def corrected(
    flow: HybridFlow, batch: TrainBatch, policy: ModelOutput, steps: int
) -> tuple[TrainBatch, dict[str, float]]:
    """The batch with the log-probs that the ratio of the loss is to and, where a correction weighs or rejects, weights;
    with the trainer's own, which are recorded; and figures of how far apart the sampling policy and the one that learns
    are. policy: of `before_updates`. steps: how many have been taken: without the trainer's log-probs it is looked at
    each `rollout.verify_every` only."""
    config, settings = flow.config, flow.config.correction
    if policy.logprobs is None:
        check_same_policy(flow, batch)
        return batch, {}
    old = policy.logprobs if settings.clipped_to != "drawn" else drawn_by(batch, policy)
    batch = batch.with_(old_logprobs=old)
    if settings.clipped_to == "engine":
        if steps % config.rollout.verify_every:
            check_same_policy(flow, batch)
            return batch, {}
        policy = flow.actor.forward(batch)
    check_same_policy(flow, batch, policy)
    batch, metrics = looked_at(flow, batch, policy, steps)
    if settings.kind == "none" and batch.lag is None:
        return batch, metrics
    assert policy.logprobs is not None
    logs, cu = log_ratios(policy.logprobs, batch.rollout_logprobs, batch.loss_mask), batch.cu_episodes
    made = correction(logs, batch.loss_mask, cu, settings.kind, settings.measured, *settings.bounds)
    metrics |= correction_figures(logs, batch.loss_mask, cu, made, batch.lag, batch.total)
    return batch if settings.kind == "none" else batch.with_(importance=made.weights), metrics


def check_correction(config: Config, declared: Declared) -> None:
    """A correction is of a loss that knows who sampled; its kind, level, bounds and proximal policy go together."""
    settings, (low, high) = config.correction, config.correction.bounds
    kind, level, proximal = settings.kind, settings.measured, settings.clipped_to
    key = f"correction.kind={kind}"
    if kind == "none" and proximal == "drawn":
        return
    if not declared.generates or not declared.corrects_lag:
        why = "its loss has no ratio to who sampled" if declared.generates else "it has no engine that samples"
        raise ConfigError(f"{key} with algorithm={declared.name}: {why}; leave the section correction out")
    if not low <= 1 <= high:
        raise ConfigError(
            f"correction.low={low:g} and correction.high={high:g} must have 1 between them, the ratio of equal policies"
        )
    if (kind == "icepop" and level != "token") or (kind == "mis" and level == "token"):
        other = "mis" if kind == "icepop" else "icepop"
        raise ConfigError(f"{key} with correction.level={level}: that is correction.kind={other}")
    if settings.weighs and proximal != "trainer":
        raise ConfigError(
            f"{key} weights by the ratio of the trainer's log-probs to the engine's, which with "
            f"correction.proximal={proximal} is in the ratio of the loss as well; leave the latter out"
        )
    if kind == "reject" and proximal == "engine":
        raise ConfigError(
            f"{key} needs the trainer's log-probs, which correction.proximal=engine does without; set it to drawn"
        )
