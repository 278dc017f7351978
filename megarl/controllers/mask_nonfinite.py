"""Mask sequences with non-finite values; count and log them.

A single answer may overflow in a model that is correct on all others. If more than half of the sequences do, the model
is at fault and its worker ends the run (`workers/model_worker.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch

from megarl.algorithms.token_rewards import sequence_sums
from megarl.types import ModelOutput, Rollouts, TrainBatch

if TYPE_CHECKING:
    from megarl.flow import HybridFlow

METRIC = "rollout/quarantined"
"""Number of masked sequences of a step; absent if there are none."""


def mask_nonfinite(
    flow: HybridFlow, rollouts: Rollouts, batch: TrainBatch, *outputs: ModelOutput
) -> tuple[TrainBatch, list[ModelOutput], dict[str, float]]:
    """Return the batch and model outputs with all episodes masked that have a non-finite value on an action token.
    Their `loss_mask` is False and all their values are 0, so they enter no mean. Values computed from their rewards
    before stay. Collective."""
    columns = {f"{name} of the batch": getattr(batch, name) for name in batch.columns()}
    for output in outputs:
        columns |= {item.name: value for item in fields(output) if (value := getattr(output, item.name)) is not None}
    nonfinite = {name: mask for name, values in columns.items() if (mask := _nonfinite_mask(values, batch)) is not None}
    is_hit = torch.zeros(len(batch.local_indices), dtype=torch.int64)
    for mask in nonfinite.values():
        is_hit += sequence_sums(mask.int(), batch.cu_seqlens)
    episodes = batch.local_episodes
    is_hit = episodes.expand(episodes.sum_branches(is_hit)) > 0
    if not (count := int(batch.all_reduce(is_hit.sum()))):
        return batch, list(outputs), {}
    step_records = [
        {
            "prompt": rollout.prompt.id,
            "group": rollout.group,
            "seed": rollout.seed,
            "not_finite": _count_nonfinite(nonfinite, batch, number),
        }
        for number, rollout in enumerate(rollouts.local)
        if is_hit[number]
    ]
    flow.log.report_quarantined(
        flow.step, [record for rank_records in batch.comm.all_gather_objects(step_records) for record in rank_records]
    )
    is_masked = torch.repeat_interleave(is_hit, batch.cu_seqlens.diff())
    floats = [name for name in batch.columns() if getattr(batch, name).is_floating_point()]
    cleaned = {name: getattr(batch, name).masked_fill(is_masked, 0.0) for name in floats}
    return (
        batch.with_(loss_mask=batch.loss_mask & ~is_masked, **cleaned),
        [_mask_output(output, is_masked) for output in outputs],
        {METRIC: float(count)},
    )


def add_metrics(metrics: Mapping[str, float], counts: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics with the counts of another `mask_nonfinite` added."""
    return {**metrics, **{name: value + metrics.get(name, 0.0) for name, value in counts.items()}}


def _nonfinite_mask(values: torch.Tensor, batch: TrainBatch) -> torch.Tensor | None:
    """Return [T] bool of non-finite action tokens; None if all values are finite, which a finite sum proves quickly."""
    if not values.is_floating_point() or bool(torch.isfinite(values.sum())):
        return None
    return batch.loss_mask & ~torch.isfinite(values)


def _count_nonfinite(nonfinite: Mapping[str, torch.Tensor], batch: TrainBatch, number: int) -> dict[str, int]:
    """Return the number of non-finite tokens of a sequence, by column."""
    begin, end = batch.cu_seqlens[number : number + 2].tolist()
    counts: Counter[str] = Counter({name: int(mask[begin:end].sum()) for name, mask in nonfinite.items()})
    return {name: count for name, count in counts.items() if count}


def _mask_output(output: ModelOutput, is_masked: torch.Tensor) -> ModelOutput:
    values: dict[str, Any] = {item.name: getattr(output, item.name) for item in fields(output)}
    if all(value is None for value in values.values()):
        return output
    return ModelOutput(
        **{name: None if value is None else value.masked_fill(is_masked, 0.0) for name, value in values.items()}
    )
