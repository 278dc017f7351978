"""Bytes that a micro-batch takes on a rank while it is computed: what is asked for before ranks begin together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megarl.config import Config
from megarl.models.activations import (
    activation_elements,
    layer_elements,
    logits_bytes,
    micro_batch_bytes,
    micro_batches_in_flight,
)
from megarl.models.registry import family_of, trained_mtp
from megarl.models.stages import stage_layers

if TYPE_CHECKING:
    from megarl.parallel.ranks import Ranks


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def working_bytes(
    hf: Mapping[str, Any], config: Config, ranks: Ranks, role: str, tokens: int, trains: bool, recomputes: bool = False
) -> int:
    """Of a rank in the layout `ranks`, with micro-batches of so many tokens on it: activations, logits, the micro-batch
    itself, all estimates as in `activations.py`. A pass that trains keeps what the backward pass needs, of all
    micro-batches in flight; another has one layer at a time. recomputes: besides what `model.megatron` says."""
    size = 4 if config.model.dtype == "float32" else 2
    family = family_of(hf)
    settings = {**family.megatron_config(hf), **config.model.megatron, "post_norms": family.extras(hf).post_norms}
    settings |= FULL if recomputes else {}
    layers = stage_layers(int(settings["num_layers"]), ranks.pp, settings, ranks.vpp)
    mine, last = layers[ranks.pp_rank], ranks.pp_rank == ranks.pp - 1
    mtp = trained_mtp(hf, config) if role == "actor" and trains and last else 0
    count = len(mine) // ranks.vpp
    runs = [mine[i * count : (i + 1) * count] for i in range(ranks.vpp)]
    in_flight = micro_batches_in_flight(ranks.pp, ranks.pp_rank, ranks.vpp) if trains else 1
    if trains:
        runs[-1] = runs[-1] + layers[-1][-1:] * mtp
        kept = activation_elements(settings, runs, ranks.tp, tokens, in_flight, ranks.etp)
    else:
        kept = max((layer_elements(settings, layer, ranks.etp) for layer in mine), default=0) * tokens // ranks.tp
    cut = micro_batch_bytes(settings, mine, tokens, ranks.tp, ranks.cp, ranks.pp_rank == 0, last, mtp)
    logits = 0
    if last and role == "actor":
        hidden, at_once = int(hf["hidden_size"]), config.train.logits_at_once
        logits = logits_bytes(int(hf["vocab_size"]), hidden, ranks.tp, tokens, at_once, size)
    return round(kept * size + cut * in_flight) + logits
