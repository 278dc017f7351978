"""Assign decoder layers to pipeline stages."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from megarl.config import ConfigError

FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"


def stage_layers(num_layers: int, pp: int, settings: Mapping[str, Any], vpp: int = 1) -> list[tuple[int, ...]]:
    """Return the decoder layers of each pipeline stage, as Megatron-Core 0.16 assigns them.

    Layers are spread evenly, or `num_layers_in_first_pipeline_stage` and `..._last_...` (keys of `model.megatron`) fix
    the ends and the rest is even. With vpp > 1 each stage has its layers in `vpp` equal parts, and the first parts of
    all stages precede the second parts.

    Raises ConfigError if the layers do not divide, and suggests sizes that do.
    """
    first, last = settings.get(FIRST), settings.get(LAST)
    stages = pp - (first is not None) - (last is not None)
    if stages < 0 or (pp == 1 and stages == 0):
        raise ConfigError(f"model.megatron gives the layers of the first or last stage, but parallel.pp={pp}")
    counts = _counts(num_layers, pp, settings)
    if counts is None:
        raise ConfigError(
            f"{num_layers} layers cannot be split over parallel.pp={pp} stages (first: {first or 'even'}, last: "
            f"{last or 'even'}); {_remedy(num_layers, pp, settings, vpp)}"
        )
    for stage, count in enumerate(counts):
        if count % vpp:
            divisors = [n for n in range(1, count + 1) if all(other % n == 0 for other in counts)]
            raise ConfigError(
                f"parallel.vpp={vpp} does not divide the {count} layers of pipeline stage {stage}; sizes that do for "
                f"all stages: {', '.join(map(str, divisors))}"
            )
    stages_layers: list[list[int]] = [[] for _ in range(pp)]
    layers = iter(range(num_layers))
    for _ in range(vpp):
        for local_layers, count in zip(stages_layers, counts, strict=True):
            local_layers += islice(layers, count // vpp)
    _check_shared_indices(stages_layers, settings, vpp)
    return [tuple(local_layers) for local_layers in stages_layers]


def _check_shared_indices(stages_layers: list[list[int]], settings: Mapping[str, Any], vpp: int) -> None:
    """Raise ConfigError if a part of a stage starts with a layer that shares an earlier part's choice of keys."""
    freq, offset = settings.get("dsa_indexer_topk_freq") or 1, settings.get("dsa_indexer_skip_topk_offset") or 1
    for stage, local_layers in enumerate(stages_layers):
        for first in local_layers[:: max(1, len(local_layers) // vpp)]:
            if distance := max(first + 1 - offset, 0) % freq:
                raise ConfigError(
                    f"pipeline stage {stage} would start with layer {first}, which uses the sparse attention indices "
                    f"of layer {first - distance}: Megatron does not pass them between stages; choose parallel.pp, "
                    f"parallel.vpp, model.megatron.{FIRST} and {LAST} so that parts start with one of the layers "
                    f"0 to {offset - 1}, {offset - 1 + freq}, {offset - 1 + 2 * freq}.."
                )


def _counts(num_layers: int, pp: int, settings: Mapping[str, Any]) -> list[int] | None:
    """Return the number of layers of each stage, or None if they do not divide."""
    first, last = ([settings[name]] if settings.get(name) is not None else [] for name in (FIRST, LAST))
    middle, stages = num_layers - sum(first) - sum(last), pp - len(first) - len(last)
    is_full = pp > 1 and stages == 0 == middle
    if not is_full and (stages < 1 or middle < 1 or middle % stages):
        return None
    return [*first, *([middle // stages] * stages if stages else []), *last]


def _remedy(num_layers: int, pp: int, settings: Mapping[str, Any], vpp: int) -> str:
    """Return working alternatives: other sizes of the first and last stage, or another pp. Each has been checked."""

    def fits(size: int, ends: Mapping[str, Any]) -> bool:
        counts = _counts(num_layers, size, ends)
        return counts is not None and all(count > 0 and count % vpp == 0 for count in counts)

    ends = {name: settings[name] for name in (FIRST, LAST) if settings.get(name) is not None}
    removal = f"remove model.megatron.{' and '.join(ends)}"
    descending = range(num_layers // pp + 1, 0, -1)
    uneven = [{LAST: size} for size in descending]
    uneven += [{FIRST: size, LAST: size - less} for size in descending for less in (0, 1) if size > less]
    remedies = []
    if ends and fits(pp, {}):
        remedies.append(removal)
    elif feasible := [sizes for sizes in uneven if pp > 1 and fits(pp, sizes)]:
        best = min(feasible, key=lambda sizes: (max(_counts(num_layers, pp, sizes) or ()), sizes[LAST]))
        remedies.append("set model.megatron." + " and ".join(f"{name}={count}" for name, count in best.items()))
        if FIRST in ends and FIRST not in best:
            remedies[-1] += f" and remove {FIRST}"
    numbers = [size for size in range(1, min(num_layers, 4 * pp) + 1) if fits(size, ends)]
    if numbers:
        remedies.append(f"set parallel.pp to one of {', '.join(map(str, numbers))}")
    if not remedies:  # pp=1 with vpp=1 always fits
        numbers = [size for size in range(1, num_layers + 1) if fits(size, {})] or [1]
        remedies.append(f"{removal}, and " if ends else "")
        remedies[-1] += f"set parallel.pp to one of {', '.join(map(str, numbers))}"
        if not fits(numbers[0], {}):
            remedies[-1] += " and parallel.vpp to 1"
    return ", or ".join(remedies)
