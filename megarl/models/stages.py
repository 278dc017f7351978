"""Which layers each pipeline stage has."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from megarl.config import ConfigError


def stage_layers(num_layers: int, pp: int, settings: Mapping[str, Any], vpp: int = 1) -> list[tuple[int, ...]]:
    """Which decoder layers each pipeline stage has: as Megatron-Core 0.16 deals them out, evenly, or with
    `num_layers_in_first_pipeline_stage` and `..._last_...` (keys of `model.megatron`) given and the rest even. With
    vpp > 1 a stage has its layers in so many equal parts, and the first parts of all stages come before the second.

    Raises ConfigError where the layers do not divide, with numbers that do.
    """
    first = settings.get("num_layers_in_first_pipeline_stage")
    last = settings.get("num_layers_in_last_pipeline_stage")
    middle = num_layers - (first or 0) - (last or 0)
    stages = pp - (first is not None) - (last is not None)
    if stages < 0 or (pp == 1 and stages == 0):
        raise ConfigError(f"model.megatron gives the layers of the first or last stage, but parallel.pp={pp}")
    if middle < 0 or (middle > 0) != (stages > 0) or (stages and middle % stages):
        remedy = _uneven_remedy(num_layers, pp)
        raise ConfigError(
            f"{num_layers} layers cannot be dealt out to parallel.pp={pp} stages (first: {first or 'even'}, last: "
            f"{last or 'even'}); {remedy}"
        )
    counts = [middle // stages] * stages if stages else []
    counts = ([first] if first is not None else []) + counts + ([last] if last is not None else [])
    for stage, count in enumerate(counts):
        if count % vpp:
            fits = [n for n in range(1, count + 1) if all(other % n == 0 for other in counts)]
            raise ConfigError(
                f"parallel.vpp={vpp} does not divide the {count} layers of pipeline stage {stage}; sizes that do for "
                f"all stages: {', '.join(map(str, fits))}"
            )
    stages_layers: list[list[int]] = [[] for _ in range(pp)]
    layers = iter(range(num_layers))
    for _ in range(vpp):
        for mine, count in zip(stages_layers, counts, strict=True):
            mine += islice(layers, count // vpp)
    return [tuple(mine) for mine in stages_layers]


def _uneven_remedy(num_layers: int, pp: int) -> str:
    """What would fit: another pp, or a shorter last stage."""
    fits = ", ".join(str(n) for n in range(1, num_layers + 1) if num_layers % n == 0 and n <= 4 * pp)
    per_stage = -(-num_layers // pp)
    last = num_layers - per_stage * (pp - 1)
    if pp > 1 and last > 0:
        return f"set model.megatron.num_layers_in_last_pipeline_stage={last}, or parallel.pp to one of {fits}"
    if pp > 2 and num_layers >= pp:
        per_stage = num_layers // (pp - 1)
        while per_stage and num_layers - per_stage * (pp - 2) < 2:
            per_stage -= 1
        ends = num_layers - per_stage * (pp - 2)
        return (
            f"set model.megatron.num_layers_in_first_pipeline_stage={ends - ends // 2} and "
            f"num_layers_in_last_pipeline_stage={ends // 2}, or parallel.pp to one of {fits}"
        )
    return f"set parallel.pp to one of {fits}"
