"""Estimate the memory of a training step beyond the model states: activations kept for the backward pass, and logits.

Tensors that enter a matrix product, a norm, an activation function or flash attention are kept, counted as in
arXiv:2205.05198 section 4, for gated MLPs, grouped-query or latent attention, and routed experts. The docstrings state
the units. `working_bytes` is what a rank asks for before a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megarl.config import Config
from megarl.models.layout_algebra import padded_vocab
from megarl.models.pipeline_stages import stage_layers
from megarl.models.registry import family_of, num_trained_mtp

if TYPE_CHECKING:
    from megarl.parallel.ranks import Ranks


def activation_elements(
    settings: Mapping[str, Any], parts: Sequence[Sequence[int]], tp: int, tokens: int, in_flight: float, etp: int = 1
) -> int:
    """Elements that a rank of a pipeline stage keeps for the backward pass.

    settings: Megatron's fields of the model, and `post_norms` where the family has such, see `family.Extras`.
    parts: the layers of the stage, by parts that are computed in one go. tokens: of a micro-batch on this rank, a part
    of them with context parallelism. in_flight: see `micro_batches_in_flight`. Sequence parallelism divides everything
    by tp; tokens are taken to be spread evenly over the experts, whose inputs all ranks of an etp group have.

    With `recompute_granularity` full, the inputs of `recompute_num_layers` layers at a time are kept (method uniform),
    or those of the first so many layers of a part (block); selective does without what its modules make. What is
    computed anew is there for one layer, or one such run of layers, at a time.
    """
    hidden = int(settings["hidden_size"])
    kept, anew = 0, [0]
    for part in parts:
        layers = [_layer_tensors(settings, layer, etp) for layer in part]
        whole = [sum(layer.values()) for layer in layers]
        number = int(settings.get("recompute_num_layers") or 1)
        if settings.get("recompute_granularity") == "selective":
            dropped = [_recomputed_elements(settings, layer) for layer in layers]
            kept += sum(whole) - sum(dropped)
            anew += dropped
        elif settings.get("recompute_granularity") != "full":
            kept += sum(whole)
        elif settings.get("recompute_method") == "block":
            kept += hidden * min(number, len(part)) + sum(whole[number:])
            anew += whole[:number]
        else:
            runs = [sum(whole[i : i + number]) for i in range(0, len(part), number)]
            kept += hidden * len(runs)
            anew += runs
    return round((kept * in_flight + max(anew)) * tokens / tp)


def micro_batches_in_flight(pp: int, stage: int, vpp: int = 1) -> float:
    """For how many micro-batches a stage keeps the activations of all of its layers, at most, if there are as many.

    1F1B: those that it has sent on before the first comes back. Interleaved (arXiv:2104.04473 section 2.2), the stage
    goes through its first part with pp micro-batches before it comes to the second; counted in micro-batches of all its
    parts. On the first stage pp + (pp - 1) / vpp, as in arXiv:2205.05198.
    """
    if vpp == 1:
        return pp - stage
    return (2 * (pp - stage - 1) + (vpp - 1) * pp + 1) / vpp


def layer_elements(settings: Mapping[str, Any], layer: int, etp: int = 1) -> int:
    """Kept per token by one layer before any division."""
    return sum(_layer_tensors(settings, layer, etp).values())


def _layer_tensors(settings: Mapping[str, Any], layer: int, etp: int) -> dict[str, int]:
    """The same by what it is."""
    hidden, heads = int(settings["hidden_size"]), int(settings["num_attention_heads"])
    kept = {"norm inputs": 2 * hidden, "norm outputs": 2 * hidden}
    if settings.get("post_norms"):  # of what attention and MLP add to the residual stream; their outputs nobody keeps
        kept["post norm inputs"] = 2 * hidden
    if settings.get("multi_latent_attention"):
        nope, turned, value = (int(settings[key]) for key in ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"))
        latents = int(settings.get("q_lora_rank") or 0) + int(settings["kv_lora_rank"]) + turned
        kept["latents"] = 2 * latents  # and their norms
        kept["qkv"], kept["attention"] = heads * (2 * (nope + turned) + value), heads * value
    else:
        head = int(settings["kv_channels"] or hidden // heads)
        kept["qkv"], kept["attention"] = (heads + 2 * int(settings["num_query_groups"])) * head, heads * head
    if is_moe(settings, layer):
        width, topk = int(settings["moe_ffn_hidden_size"]), int(settings["moe_router_topk"])
        kept["dispatched"] = topk * 2 * hidden * etp  # input and output of each chosen expert
        kept["gate, up"], kept["products"] = topk * 2 * width, topk * width
        kept["shared expert"] = 3 * int(settings.get("moe_shared_expert_intermediate_size") or 0)
    else:
        kept["mlp"] = 3 * int(settings["ffn_hidden_size"])  # gate, up, their product
    return kept


_RECOMPUTED_TENSORS = {
    "core_attn": (),  # flash attention keeps nothing of its own
    "layernorm": ("norm outputs",),
    "mla_up_proj": ("qkv",),
    "mlp": ("mlp",),
    "moe_act": ("products",),
    "moe": ("dispatched", "gate, up", "products", "shared expert"),
    "shared_experts": ("shared expert",),
}
"""What each of Megatron's `recompute_modules` computes anew."""
RECOMPUTE_MODULES = tuple(_RECOMPUTED_TENSORS)


def _recomputed_elements(settings: Mapping[str, Any], layer: Mapping[str, int]) -> int:
    """Of what a layer would keep, what selective recomputation does without."""
    modules = settings.get("recompute_modules") or ["core_attn"]
    return sum(
        layer.get(name, 0) for name in {name for module in modules for name in _RECOMPUTED_TENSORS.get(module, ())}
    )


def is_moe(settings: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer has routed experts."""
    if not settings.get("num_moe_experts"):
        return False
    frequency = settings.get("moe_layer_freq", 1)
    return bool(frequency[layer]) if isinstance(frequency, list) else layer % int(frequency) == 0


def logits_bytes(vocab_size: int, hidden: int, tp: int, tokens: int, at_once: int, size: int) -> int:
    """About what `megatron/logprobs.py` needs for a micro-batch: logits of some tokens, in the model's type and four
    times in fp32; the gradient of the output layer's weight, a sum in fp32 and a summand; hidden states and their
    gradient.
    """
    words = padded_vocab(vocab_size, tp) // tp
    return min(tokens, at_once) * words * (size + 16) + words * hidden * (4 + size) + 2 * tokens * hidden * size


def micro_batch_bytes(
    settings: Mapping[str, Any],
    layers: Sequence[int],
    tokens: int,
    tp: int = 1,
    cp: int = 1,
    first: bool = True,
    last: bool = True,
    mtp: int = 0,
    replays: bool = False,
) -> int:
    """The most that a pipeline stage has on the device of a micro-batch itself, as `megatron/micro_batch.py` moves it.

    tokens: of it on this rank, of a cp-th part. The first stage has tokens and positions, 8 bytes each; the last what
    they are to predict, and for all parts three indices of 8 bytes, the mask, and at most nine columns in fp32. With
    `mtp` layers of multi-token prediction there are further tokens. A policy that replays routing has 2 bytes for each
    expert that a token went through in `layers`, of the tokens that sequence parallelism gives to this rank.
    """
    found = 16 * tokens if first or (last and mtp) else 0
    if last:
        found += 8 * (1 + mtp) * tokens + (3 * 8 + 1 + 9 * 4) * tokens * cp
    if replays:
        experts = sum(is_moe(settings, layer) for layer in layers) * int(settings.get("moe_router_topk") or 0)
        found += -(-2 * experts * tokens // tp)
    return found


FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def working_bytes(
    hf: Mapping[str, Any], config: Config, ranks: Ranks, role: str, tokens: int, trains: bool, recomputes: bool = False
) -> int:
    """Of a rank in the layout `ranks`, with micro-batches of so many tokens on it: activations, logits, the micro-batch
    itself, all estimates as in `activation_memory.py`. A pass that trains keeps what the backward pass needs, of all
    micro-batches in flight; another has one layer at a time. recomputes: besides what `model.megatron` says."""
    size = 4 if config.model.dtype == "float32" else 2
    family = family_of(hf)
    settings = {**family.megatron_config(hf), **config.model.megatron, "post_norms": family.extras(hf).post_norms}
    settings |= FULL_RECOMPUTE if recomputes else {}
    layers = stage_layers(int(settings["num_layers"]), ranks.pp, settings, ranks.vpp)
    mine, last = layers[ranks.pp_rank], ranks.pp_rank == ranks.pp - 1
    mtp = num_trained_mtp(hf, config) if role == "actor" and trains and last else 0
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
