"""The last safety net of a weight sync: engine and trainer must agree on the log-probs of a batch before it is trained
on.

A fault of a layout, of an SGLang setting or of a kernel need not raise an error: hashes agree, and the engine samples
from another policy. So after an engine (re)start, after the first weight sync of a run and after each fully verified
one, the log-probs of the next sampled tokens are compared. A run whose difference exceeds rounding stops.

Only tokens sampled by the weights that both sides have are compared, and none after a token of older weights, whose
keys and values may be those of the older weights. With `rollout.asynchronous` a step may have no such token; the next
step that has some is then checked. Hashes of the engine's tensors, if these are still loaded, tell whether a layer's
weights are wrong. If they agree, the weights are the trainer's and the computation with them differs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from megarl.algorithms.token_stats import diff_stats
from megarl.config import Config, ConfigError
from megarl.observe.health_bands import LOGPROB_DIFF
from megarl.types import ModelOutput, TrainBatch

if TYPE_CHECKING:
    from megarl.flow import HybridFlow

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
    """Return [T] bool: action tokens sampled by the current weights, with no token of older weights before them."""
    if batch.staleness is None:
        return batch.loss_mask
    is_stale = (batch.staleness > 0) & batch.loss_mask
    starts = torch.repeat_interleave(batch.cu_seqlens[:-1], batch.cu_seqlens.diff())
    num_stale = torch.cat([is_stale.new_zeros(1, dtype=torch.int64), is_stale.long().cumsum(0)])
    num_stale_before = num_stale[1:] - num_stale[starts.long()]
    return batch.loss_mask & (num_stale_before == 0)


def check_same_policy(flow: HybridFlow, batch: TrainBatch, policy: ModelOutput | None = None) -> None:
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
        f"the engines and the trainer are two policies: on the same tokens with the same version of the weights their "
        f"log-probs differ by {stats.mean:.3g} in the mean (95th percentile {stats.p95:.3g}), above {bound:g}, the "
        f"most for model.dtype={flow.config.model.dtype} (guards.bands.{LOGPROB_DIFF}). {describe_mismatch(flow)}"
    )


def describe_mismatch(flow: HybridFlow) -> str:
    """Return a sentence on whether the engines' tensors hold the trainer's bits."""
    names = flow.rollout.find_mismatches(flow.actor)
    if names is None:
        return (
            "The engines have freed their weights since, so no layer can be named: see rollout.sglang, and "
            "`tools/mismatch.py` for what of it is routing"
        )
    if names:
        return f"{describe_layers(names)}: the engines hold other bits there than the trainer ({', '.join(names[:3])})"
    return (
        "All tensors of the engines hold the trainer's bits, so it is what computes with them: see rollout.sglang, "
        "train.replay_routing, and `tools/mismatch.py` for what of it is routing"
    )


def describe_layers(names: Sequence[str]) -> str:
    """Return `Layers 1, 3 and what is in no layer` for names of an engine's tensors."""
    matches = [re.search(r"\blayers\.(\d+)\.", name) for name in names]
    numbers = sorted({int(match[1]) for match in matches if match})
    text = f"Layer{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}" if numbers else ""
    outside = "what is in no layer" if not all(matches) else ""
    return " and ".join(part for part in (text, outside) if part)
