"""Engine against trainer log-probs of a sampled batch: off-policy correction, metrics, and the check of a weight sync.

The section `correction` configures which log-probs are in the ratio of the loss, and a weight for each token;
`algorithms/corrections.py` computes it.

`check_same_policy` is the last safety net of a weight sync: engine and trainer must agree on the log-probs of a batch
before it is trained on. A fault of a layout, of an SGLang setting or of a kernel need not raise an error: hashes agree,
and the engine samples from another policy. So after an engine (re)start, after the first weight sync of a run and after
each fully verified one, the log-probs of the next sampled tokens are compared. A run whose difference exceeds rounding
stops.

Only tokens sampled by the weights that both sides have are compared. What precedes them may be of older weights, but
the engine has read it again with the current ones. With `rollout.asynchronous` a step may have no such token; the next
step that has some is then checked. Hashes of the engine's tensors, if these are still loaded, tell whether a layer's
weights are wrong. If they agree, the weights are the trainer's and the computation with them differs."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import torch

from megarl.algorithms.corrections import compute_correction, correction_metrics, log_ratios
from megarl.algorithms.token_stats import diff_stats
from megarl.config import Config, ConfigError
from megarl.controllers.controller import Flow
from megarl.observe.health_bands import LOGPROB_DIFF
from megarl.types import ModelOutput, TrainBatch
from megarl.types.requirements import Requirements
from megarl.workers.futures import Future

MAX_LOGPROB_DIFF = {"float32": 0.01, "bfloat16": 0.3}
"""Mean |log p_trainer - log p_engine| above which a run stops, by `model.dtype`. In fp32 it is about 1e-6, unless
experts tie; in bf16 without replayed routing, up to 0.07 was measured (megatron/README.md)."""
CHECK_EPISODES = 16
"""Number of episodes to compute for the comparison alone, if the algorithm asks for no log-probs before its update; at
least one for each of the trainer's replicas."""


def logprob_diff_bound(config: Config) -> float | None:
    """Return the bound: from `guards.bands` of rollout/logprob_diff_mean, else by dtype; None if that band is null."""
    if LOGPROB_DIFF not in config.guards.bands:
        return MAX_LOGPROB_DIFF.get(config.model.dtype, MAX_LOGPROB_DIFF["bfloat16"])
    band = config.guards.bands[LOGPROB_DIFF]
    return None if band is None or band[1] is None else float(band[1])


def current_policy_mask(batch: TrainBatch) -> torch.Tensor:
    """Return [T] bool: action tokens sampled by the current weights, from keys and values of the current weights."""
    return batch.loss_mask if batch.staleness is None else batch.loss_mask & (batch.staleness <= 0)


def check_same_policy(flow: Flow, batch: TrainBatch, policy: ModelOutput | None = None) -> None:
    """Compare engine and trainer log-probs if `rollout.should_check_logprobs` is set. Collective.

    policy: the trainer's output for the batch before its update; if None or without log-probs, it is computed for the
    first episodes. Raises ConfigError if the mean difference exceeds `logprob_diff_bound`, and names the layers whose
    weights differ.
    """
    bound = logprob_diff_bound(flow.config)
    if bound is None or not getattr(flow.rollout, "should_check_logprobs", False):
        return
    if flow.config.rollout.temperature == 0:  # the trainer scores greedy tokens as if sampled at temperature 1
        return
    if policy is None or policy.logprobs is None:
        episodes, parallel = batch.episodes, flow.config.parallel
        replicas = parallel.world_size // (parallel.tp * parallel.cp * parallel.pp)
        count = min(max(CHECK_EPISODES, replicas), len(episodes))
        batch = batch.select(episodes.sequence_indices(list(range(count))))
        policy = flow.actor.forward(batch).wait()
    assert policy.logprobs is not None
    stats = diff_stats(batch.rollout_logprobs, policy.logprobs, current_policy_mask(batch), batch.all_reduce)
    if stats is None:
        return
    if math.isfinite(stats.mean) and stats.mean <= bound:
        flow.rollout.should_check_logprobs = False
        return
    raise ConfigError(
        f"engines and trainer compute different policies: on the same tokens with the same weight version, their "
        f"log-probs differ by {stats.mean:.3g} on average (95th percentile {stats.p95:.3g}), above {bound:g}, the "
        f"limit for model.dtype={flow.config.model.dtype} (guards.bands.{LOGPROB_DIFF}). {describe_mismatch(flow)}"
    )


def describe_mismatch(flow: Flow) -> str:
    """Return a sentence on whether the engines' tensors hold the trainer's bits."""
    names = flow.rollout.find_mismatches(flow.actor)
    if names is None:
        return (
            "The engines have since freed their weights, so no layer can be named: see rollout.sglang, and "
            "`tools/mismatch.py` for the share due to routing"
        )
    if names:
        return f"{describe_layers(names)}: the engines' weights differ from the trainer's ({', '.join(names[:3])})"
    return (
        "All tensors of the engines equal the trainer's, so the computation differs: see rollout.sglang, "
        "train.routing_replay, and `tools/mismatch.py` for the share due to routing"
    )


def describe_layers(names: Sequence[str]) -> str:
    """Return `Layers 1, 3 and tensors outside the layers` for names of an engine's tensors."""
    matches = [re.search(r"\blayers\.(\d+)\.", name) for name in names]
    numbers = sorted({int(match[1]) for match in matches if match})
    text = f"Layer{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}" if numbers else ""
    outside = "tensors outside the layers" if not all(matches) else ""
    return " and ".join(part for part in (text, outside) if part)


def compute_old_logprobs(flow: Flow, batch: TrainBatch, needed: bool = True) -> Future[ModelOutput]:
    """Start computing the policy's log-probs before the step's updates. With `correction.proximal: engine` the ratio of
    the loss is to the engine's log-probs, which are returned without a forward pass.

    needed: whether the algorithm uses them. If not, and no correction does, they are None, which saves the forward
    pass.
    """
    settings = flow.config.correction
    if settings.resolved_proximal == "engine":
        return Future.completed(ModelOutput(logprobs=batch.rollout_logprobs))
    if not needed and settings.kind == "none" and settings.resolved_proximal == "behavior":
        return Future.completed(ModelOutput())
    return flow.actor.forward(batch)


def apply_correction(
    flow: Flow, batch: TrainBatch, policy: ModelOutput, steps: int
) -> tuple[TrainBatch, dict[str, float]]:
    """Return the batch with `old_logprobs`, the denominator of the loss ratio, with `importance` weights if a
    correction weighs or rejects tokens, and with the trainer's log-probs for the record; and metrics of the distance
    between the behavior policy and the trained one.

    policy: from `compute_old_logprobs`. steps: steps taken so far. With `correction.proximal: engine`, the trainer's
    log-probs are computed for metrics only every `rollout.verify_weights_every` steps.
    """
    config, settings = flow.config, flow.config.correction
    if policy.logprobs is None:
        check_same_policy(flow, batch)
        return batch, {}
    old = policy.logprobs if settings.resolved_proximal != "behavior" else behavior_logprobs(batch, policy)
    batch = batch.with_(old_logprobs=old)
    if settings.resolved_proximal == "engine":
        if steps % config.rollout.verify_weights_every:
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
    if kind == "none" and proximal == "behavior":
        return
    if not requirements.has_rollout or not requirements.is_off_policy:
        why = "its loss has no ratio to the sampling policy" if requirements.has_rollout else "it does not generate"
        raise ConfigError(f"{key} with algorithm={requirements.name}: {why}; remove the section correction")
    if not low <= 1 <= high:
        raise ConfigError(
            f"correction.low={low:g} and correction.high={high:g} must enclose 1, the ratio of equal policies"
        )
    if (kind == "icepop" and level != "token") or (kind == "mis" and level == "token"):
        other = "mis" if kind == "icepop" else "icepop"
        raise ConfigError(f"{key} with correction.level={level}: that is correction.kind={other}")
    if settings.has_weights and proximal != "trainer":
        raise ConfigError(
            f"{key} weights by the ratio of the trainer's log-probs to the engine's, which with "
            f"correction.proximal={proximal} is also in the ratio of the loss; remove the latter"
        )
    if kind == "reject" and proximal == "engine":
        raise ConfigError(
            f"{key} needs the trainer's log-probs, which correction.proximal=engine does not compute; set it to "
            "behavior"
        )


def behavior_logprobs(batch: TrainBatch, policy: ModelOutput) -> torch.Tensor | None:
    """Return [T] log-probs by the policy that sampled the tokens: the trainer's current ones, in its own kernels, and
    the engine's recorded ones for tokens sampled by older weights."""
    if batch.staleness is None or policy.logprobs is None:
        return policy.logprobs
    return torch.where(batch.staleness > 0, batch.rollout_logprobs, policy.logprobs)


def logprob_diff_metrics(batch: TrainBatch, policy: ModelOutput, suffix: str = "") -> dict[str, float]:
    """Return the largest, 95th percentile and mean difference of engine and trainer log-probs on the same tokens.

    Both hold the same weights when a batch is sampled. A difference beyond rounding is therefore a fault of the weight
    sync, of a layout or of a kernel, and then shows on all tokens. The largest alone can jump without a fault: where
    two experts of a token tie within rounding, engine and trainer may choose differently, and that token and a few
    after it differ. `train.routing_replay` rules this out. suffix: appended to the names, if `policy` was not computed
    as in training.

    Tokens sampled by older weights also differ by what the policy has learned since; their metrics are `..._stale`.
    """
    if policy.logprobs is None:
        return {}
    masks = {"": batch.loss_mask}
    if batch.staleness is not None:
        masks = {"": current_policy_mask(batch), "_stale": batch.loss_mask & (batch.staleness > 0)}
    metrics = {}
    for kind, mask in masks.items():
        if (stats := diff_stats(batch.rollout_logprobs, policy.logprobs, mask, batch.all_reduce)) is not None:
            metrics[f"rollout/logprob_diff{kind}{suffix}"] = stats.largest
            metrics[f"rollout/logprob_diff_p95{kind}{suffix}"] = stats.p95
            metrics[f"rollout/logprob_diff_mean{kind}{suffix}"] = stats.mean
    return metrics


def add_trainer_logprobs(
    flow: Flow, batch: TrainBatch, policy: ModelOutput, steps: int
) -> tuple[TrainBatch, dict[str, float]]:
    """Return the batch with the trainer's log-probs, for the record, and their `logprob_diff_metrics`.

    With replayed routing or sparse attention indices, the first step and every `rollout.verify_weights_every`-th add
    log-probs and metrics with the trainer's own choices, which costs another forward pass. steps: steps taken so far.
    """
    metrics = logprob_diff_metrics(batch, policy)
    recorded = batch.with_(trainer_logprobs=policy.logprobs)
    if (batch.routing is None and batch.sparse_indices is None) or steps % flow.config.rollout.verify_weights_every:
        return recorded, metrics
    unreplayed = flow.actor.forward(batch.with_(routing=None, sparse_indices=None)).wait()
    return recorded.with_(unreplayed_logprobs=unreplayed.logprobs), metrics | logprob_diff_metrics(
        batch, unreplayed, "_unreplayed"
    )
