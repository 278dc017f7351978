"""Sequences of which a number is none: nothing is trained on them, they are counted, and said by name.

One answer may overflow in a model that is right for all others. Where more than half do, the model is at fault, and
its worker ends the run (`workers/model_worker.py`).
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
"""Sequences of a step that were; of a step without any it is not there."""


def mask_nonfinite(
    flow: HybridFlow, rollouts: Rollouts, batch: TrainBatch, *outputs: ModelOutput
) -> tuple[TrainBatch, list[ModelOutput], dict[str, float]]:
    """The batch of these rollouts, and what models say of it, without the episodes that have a number on an action
    token that is none: their tokens are masked, and 0 in all columns, so that they are in no mean of others. What was
    computed of their rewards stays. Collective."""
    said = {f"{name} of the batch": getattr(batch, name) for name in batch.columns()}
    for output in outputs:
        said |= {item.name: value for item in fields(output) if (value := getattr(output, item.name)) is not None}
    odd = {name: found for name, values in said.items() if (found := _nonfinite_mask(values, batch)) is not None}
    hit = torch.zeros(len(batch.local_indices), dtype=torch.int64)
    for found in odd.values():
        hit += sequence_sums(found.int(), batch.cu_seqlens)
    episodes = batch.local_episodes
    hit = episodes.expand(episodes.sum_branches(hit)) > 0
    if not (count := int(batch.all_reduce(hit.sum()))):
        return batch, list(outputs), {}
    step_records = [
        {
            "prompt": one.prompt.id,
            "group": one.group,
            "seed": one.seed,
            "not_finite": _count_nonfinite(odd, batch, number),
        }
        for number, one in enumerate(rollouts.local)
        if hit[number]
    ]
    flow.log.report_quarantined(
        flow.step, [record for here in batch.comm.all_gather_objects(step_records) for record in here]
    )
    gone = torch.repeat_interleave(hit, batch.cu_seqlens.diff())
    floats = [name for name in batch.columns() if getattr(batch, name).is_floating_point()]
    cleaned = {name: getattr(batch, name).masked_fill(gone, 0.0) for name in floats}
    return (
        batch.with_(loss_mask=batch.loss_mask & ~gone, **cleaned),
        [_mask_output(output, gone) for output in outputs],
        {METRIC: float(count)},
    )


def add_metrics(metrics: Mapping[str, float], found: Mapping[str, float]) -> dict[str, float]:
    """Metrics with those of a further look."""
    return {**metrics, **{name: value + metrics.get(name, 0.0) for name, value in found.items()}}


def _nonfinite_mask(values: torch.Tensor, batch: TrainBatch) -> torch.Tensor | None:
    """[T] bool; None where there are none, which a finite sum shows quickly."""
    if not values.is_floating_point() or bool(torch.isfinite(values.sum())):
        return None
    return batch.loss_mask & ~torch.isfinite(values)


def _count_nonfinite(odd: Mapping[str, torch.Tensor], batch: TrainBatch, number: int) -> dict[str, int]:
    """Tokens of a sequence by the column in which they are odd."""
    begin, end = batch.cu_seqlens[number : number + 2].tolist()
    found: Counter[str] = Counter({name: int(where[begin:end].sum()) for name, where in odd.items()})
    return {name: count for name, count in found.items() if count}


def _mask_output(output: ModelOutput, gone: torch.Tensor) -> ModelOutput:
    known: dict[str, Any] = {item.name: getattr(output, item.name) for item in fields(output)}
    if all(value is None for value in known.values()):
        return output
    return ModelOutput(
        **{name: None if value is None else value.masked_fill(gone, 0.0) for name, value in known.items()}
    )
