"""The last net under a push: engine and trainer say the same of the same tokens, before anything is trained on these.

A fault of a layout, of a setting of SGLang's or of a kernel need raise nothing: hashes agree, and the engine samples
from another policy. So when the engines have started, after the first push of a run and after each that was verified in
full, the log-probs of the first tokens that come of it are compared, and a run that finds more than rounding stops.

Only tokens of the weights that both have are compared, none behind one of older weights, whose keys and values may be
those of then. With `rollout.asynchronous` a step may have none; then the next one that has some is looked at. Whether
a layer has gone wrong is told by hashes of the engine's tensors, where they are still there; where these agree, the
weights are the trainer's, and what computes with them is not.
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
"""By `model.dtype`: the mean |log p_trainer - log p_engine| beyond which a run stops. In fp32 it is about 1e-6, but
where experts tie; in bf16 without replayed routing up to 0.07 was measured (megatron/README.md)."""
CHECK_EPISODES = 16
"""That are computed for the comparison alone, or one for each of the trainer's replicas if these are more, where an
algorithm asks for no log-probs before its update."""


def logprob_diff_bound(config: Config) -> float | None:
    """The bound: `guards.bands` of rollout/logprob_diff_mean, else by the type; None where that is null."""
    if LOGPROB_DIFF not in config.guards.bands:
        return MAX_LOGPROB_DIFF.get(config.model.dtype, MAX_LOGPROB_DIFF["bfloat16"])
    ends = config.guards.bands[LOGPROB_DIFF]
    return None if ends is None or ends[1] is None else float(ends[1])


def current_policy_mask(batch: TrainBatch) -> torch.Tensor:
    """[T] bool: tokens that the policy chose by the weights that it has now, and none of older ones before them."""
    if batch.staleness is None:
        return batch.loss_mask
    older = (batch.staleness > 0) & batch.loss_mask
    begins = torch.repeat_interleave(batch.cu_seqlens[:-1], batch.cu_seqlens.diff())
    before = torch.cat([older.new_zeros(1, dtype=torch.int64), older.long().cumsum(0)])
    behind = before[1:] - before[begins.long()]
    return batch.loss_mask & (behind == 0)


def check_same_policy(flow: HybridFlow, batch: TrainBatch, policy: ModelOutput | None = None) -> None:
    """Compare, where the engines' weights are `should_check_logprobs`; on all ranks together. policy: what the trainer says of
    the batch before its update, if it was asked; else it is asked about the first episodes.

    Raises ConfigError where the two sides are further apart than `most`, naming the layers whose weights differ.
    """
    bound = logprob_diff_bound(flow.config)
    if bound is None or not getattr(flow.rollout, "should_check_logprobs", False):
        return
    if flow.config.rollout.temperature == 0:  # greedy ones the trainer scores as if they were drawn at 1
        return
    if policy is None or policy.logprobs is None:
        episodes, parallel = batch.episodes, flow.config.parallel
        replicas = parallel.world_size // (parallel.tp * parallel.cp * parallel.pp)
        count = min(max(CHECK_EPISODES, replicas), len(episodes))
        batch = batch.select(episodes.sequence_indices(list(range(count))))
        policy = flow.actor.forward(batch).wait()
    assert policy.logprobs is not None
    found = diff_stats(batch.rollout_logprobs, policy.logprobs, current_policy_mask(batch), batch.all_reduce)
    if found is None:
        return
    if math.isfinite(found.mean) and found.mean <= bound:
        flow.rollout.should_check_logprobs = False
        return
    raise ConfigError(
        f"the engines and the trainer are two policies: on the same tokens with the same version of the weights their "
        f"log-probs differ by {found.mean:.3g} in the mean (95th percentile {found.p95:.3g}), above {bound:g}, the "
        f"most for model.dtype={flow.config.model.dtype} (guards.bands.{LOGPROB_DIFF}). {describe_mismatch(flow)}"
    )


def describe_mismatch(flow: HybridFlow) -> str:
    """What the engines' tensors say, in a sentence."""
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
    """`Layers 1, 3 and what is in no layer`, of an engine's tensors."""
    found = [re.search(r"\blayers\.(\d+)\.", name) for name in names]
    numbers = sorted({int(match[1]) for match in found if match})
    text = f"Layer{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}" if numbers else ""
    outside = "what is in no layer" if not all(found) else ""
    return " and ".join(part for part in (text, outside) if part)
