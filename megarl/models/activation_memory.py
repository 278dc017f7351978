"""Estimate the memory of a training step beyond the model states: activations saved for the backward pass, and the work
space of a layer or of the logits.

The inputs of matrix products, norms, activation functions and flash attention are saved, counted as in arXiv:2205.05198
section 4, for gated MLPs, grouped-query or latent attention, and routed experts, as Megatron-Core with Transformer
Engine saves them. `models/README.md` compares the estimates with the peaks of real steps on an H200.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megarl.config import Config, ParallelConfig
from megarl.models.layout_algebra import HFConfig, padded_vocab
from megarl.models.pipeline_stages import stage_layers
from megarl.models.registry import family_of, num_trained_mtp

if TYPE_CHECKING:
    from megarl.parallel.ranks import Ranks

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
RECOMPUTED_TENSORS = {
    "gdn_norm_out": (),
    "core_attn": (),  # flash attention saves no tensors of its own
    "layernorm": ("norm outputs",),
    "mla_up_proj": ("qkv",),
    "mlp": ("mlp",),
    "moe_act": ("products",),
    "moe": ("dispatched", "gate, up", "products", "shared expert"),
    "shared_experts": ("shared expert",),
}
"""The tensors that each of Megatron's `recompute_modules` recomputes."""


def megatron_settings(hf: HFConfig, config: Config) -> dict[str, Any]:
    """Return Megatron's fields and `post_norms`, for which Megatron has no field."""
    family = family_of(hf)
    return {**family.megatron_config(hf), **config.model.megatron, "post_norms": family.extras(hf).post_norms}


def can_fuse_activation(settings: Mapping[str, Any]) -> bool:
    """Return whether Megatron has a fused function for these MLPs: SwiGLU without biases, clamps or TE's own."""
    is_swiglu = settings.get("gated_linear_unit") and getattr(settings["activation_func"], "__name__", "") == "silu"
    others = "add_bias_linear", "activation_func_clamp_value", "glu_linear_offset", "use_te_activation_func"
    return bool(is_swiglu) and not any(settings.get(name) for name in others)


def activation_elements(
    settings: Mapping[str, Any], parts: Sequence[Sequence[int]], tp: int, tokens: int, in_flight: float, etp: int = 1
) -> tuple[int, int]:
    """Return the elements that a rank of a pipeline stage saves for the backward pass, and those that exist for one
    layer, or one run of recomputed layers, at a time.

    Sequence parallelism divides everything by tp. Tokens are assumed to spread evenly over the experts, whose inputs
    are replicated within an etp group.

    Full recomputation saves only the inputs of runs of `recompute_num_layers` layers (method uniform), or of the first
    `recompute_num_layers` layers of a part (block). Selective recomputation drops the outputs of its modules.
    Recomputed tensors exist for one layer, or one run, at a time, beside what the layer needs in any case.

    settings: see `megatron_settings`.
    parts: the layers of the stage, one part per model chunk.
    tokens: of a micro-batch on this rank, after context parallelism.
    in_flight: see `micro_batches_in_flight`.
    """
    hidden = int(settings["hidden_size"])
    saved, recomputed = 0, [0]
    modules = settings.get("recompute_modules") or ["core_attn"]
    recomputed_names = {name for module in modules for name in RECOMPUTED_TENSORS.get(module, ())}
    for part in parts:
        layers = [_layer_tensors(settings, layer, etp) for layer in part]
        layer_sizes = [sum(layer.values()) for layer in layers]
        layers_per_run = int(settings.get("recompute_num_layers") or 1)
        if settings.get("recompute_granularity") == "selective":
            dropped = [sum(layer.get(name, 0) for name in recomputed_names) for layer in layers]
            saved += sum(layer_sizes) - sum(dropped)
            recomputed += dropped
        elif settings.get("recompute_granularity") != "full":
            saved += sum(layer_sizes)
        elif settings.get("recompute_method") == "block":
            saved += hidden * min(layers_per_run, len(part)) + sum(layer_sizes[layers_per_run:])
            recomputed += layer_sizes[:layers_per_run]
        else:
            runs = [sum(layer_sizes[i : i + layers_per_run]) for i in range(0, len(part), layers_per_run)]
            saved += hidden * len(runs)
            recomputed += runs
    work = max((_layer_work(settings, layer, etp) for part in parts for layer in part), default=0)
    return round(saved * in_flight * tokens / tp), round((max(recomputed) + work) * tokens / tp)


def micro_batches_in_flight(pp: int, stage: int, vpp: int = 1) -> float:
    """Return the largest number of micro-batches whose activations a stage holds at once, given enough micro-batches.

    1F1B: those sent to the next stage before the first one returns. Interleaved (arXiv:2104.04473 section 2.2): on the
    first stage pp + (pp - 1) / vpp, as in arXiv:2205.05198.
    """
    if vpp == 1:
        return pp - stage
    return (2 * (pp - stage - 1) + (vpp - 1) * pp + 1) / vpp


def layer_elements(settings: Mapping[str, Any], layer: int, etp: int = 1) -> int:
    """Return the elements that one layer saves per token, before any parallel division."""
    return sum(_layer_tensors(settings, layer, etp).values())


def _layer_work(settings: Mapping[str, Any], layer: int, etp: int) -> int:
    """Return the elements per token that one layer needs for a moment and does not save."""
    if not is_moe(settings, layer):
        return 2 * int(settings["ffn_hidden_size"])  # gradients of gate and up
    width, topk = int(settings["moe_ffn_hidden_size"]), int(settings["moe_router_topk"])
    # Tokens sorted by rank, experts' outputs sorted by expert and by rank; or gradients of gate and up.
    return topk * max(3 * int(settings["hidden_size"]) * etp, 2 * width)


def _layer_tensors(settings: Mapping[str, Any], layer: int, etp: int) -> dict[str, int]:
    """Return the elements that one layer saves per token, by tensor."""
    hidden, heads = int(settings["hidden_size"]), int(settings["num_attention_heads"])
    tensors = {"norm inputs": 2 * hidden, "norm outputs": 2 * hidden}
    if settings.get("post_norms"):  # on attention and MLP outputs; their own outputs are not saved
        tensors["post norm inputs"] = 2 * hidden
    if settings.get("multi_latent_attention"):
        nope, rope, value = (int(settings[key]) for key in ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"))
        latents = int(settings.get("q_lora_rank") or 0) + int(settings["kv_lora_rank"]) + rope
        tensors["latents"] = 2 * latents  # and the outputs of their norms
        # Values are padded to the size of keys for packed sequences, and the padding is cut off their averages.
        is_padded = value != nope + rope and not settings.get("experimental_attention_variant")
        tensors["qkv"], tensors["attention"] = heads * (2 * (nope + rope) + value), heads * value
        if is_padded:
            tensors["qkv"] -= heads * value
            tensors["padded values"] = tensors["padded attention"] = heads * (nope + rope)
    elif (settings.get("linear_attention_freq") or {layer: 0})[layer]:
        keys, values = (int(settings[f"linear_{kind}_head_dim"]) for kind in ("key", "value"))
        key_heads, value_heads = (int(settings[f"linear_num_{kind}_heads"]) for kind in ("key", "value"))
        convolved = 2 * key_heads * keys + value_heads * values
        # The projection, with gates; the convolution's output; queries and keys, normalized, for each value head; and
        # of chunks of 64 tokens the inverted system.
        tensors["qkv"] = 2 * convolved + value_heads * (values + 2) + value_heads * (2 * keys + 64)
        tensors["attention"] = 2 * value_heads * values  # before and after its norm
    else:
        head = int(settings["kv_channels"] or hidden // heads)
        groups = int(settings["num_query_groups"])
        tensors["qkv"], tensors["attention"] = (heads + 2 * groups) * head, heads * head
        if settings.get("qk_layernorm"):
            tensors["qkv"] += (heads + groups) * head  # before their norms
        if settings.get("attention_output_gate"):
            tensors["qkv"], tensors["attention"] = tensors["qkv"] + heads * head, 2 * heads * head
    # For each element of a gate the fused function saves gate, up and the weighted product; the others also SiLU's
    # output, up with its offset and, in experts, the product before its weight.
    is_fused = settings.get("bias_activation_fusion", can_fuse_activation(settings))
    if is_moe(settings, layer):
        width, topk = int(settings["moe_ffn_hidden_size"]), int(settings["moe_router_topk"])
        tensors["dispatched"] = topk * hidden * etp  # the input of each chosen expert
        tensors["gate, up"], tensors["products"] = topk * 2 * width, topk * width * (1 if is_fused else 4)
        shared = int(settings.get("moe_shared_expert_intermediate_size") or 0)
        tensors["shared expert"] = (3 if is_fused else 5) * shared
    else:
        tensors["mlp"] = (3 if is_fused else 5) * int(settings["ffn_hidden_size"])
    return tensors


def is_moe(settings: Mapping[str, Any], layer: int) -> bool:
    """Return whether a layer has routed experts."""
    if not settings.get("num_moe_experts"):
        return False
    frequency = settings.get("moe_layer_freq", 1)
    return bool(frequency[layer]) if isinstance(frequency, list) else layer % int(frequency) == 0


def logits_bytes(vocab_size: int, hidden: int, tp: int, tokens: int, chunk_tokens: int, size: int) -> int:
    """Estimate the bytes that `megatron/logprobs.py` needs for a micro-batch."""
    local_vocab = padded_vocab(vocab_size, tp) // tp
    logits = min(tokens, chunk_tokens) * local_vocab * (size + 16)  # once in the model's dtype and four times in fp32
    weight_gradient = local_vocab * hidden * (4 + size)  # an fp32 sum and a summand
    return logits + weight_gradient + 2 * tokens * hidden * size  # hidden states with their gradient


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
    replays_indices: bool = False,
) -> int:
    """Return an upper bound on the device bytes of a micro-batch's inputs, as `megatron/micro_batch.py` moves them.

    tokens: of the micro-batch on this rank, after context parallelism.
    mtp: number of multi-token prediction layers.
    replays: whether expert choices are replayed, those of the tokens that sequence parallelism assigns to this rank.
    replays_indices: whether sparse attention indices are replayed.
    """
    total = 16 * tokens if first or (last and mtp) else 0  # tokens and positions, 8 bytes each
    if last:  # target tokens, and for the tokens of all cp ranks 3 indices, the mask, and at most 9 fp32 columns
        total += 8 * (1 + mtp) * tokens + (3 * 8 + 1 + 9 * 4) * tokens * cp
    if replays:  # 2 bytes per choice
        experts = sum(is_moe(settings, layer) for layer in layers) * int(settings.get("moe_router_topk") or 0)
        total += -(-2 * experts * tokens // tp)
    if replays_indices:  # 4 bytes per key, for the layers with an indexer
        freq, offset = settings.get("dsa_indexer_topk_freq") or 1, settings.get("dsa_indexer_skip_topk_offset") or 1
        indexers = sum(max(layer + 1 - offset, 0) % freq == 0 for layer in layers)
        total += 4 * indexers * int(settings.get("dsa_indexer_topk") or 0) * tokens
    return total


def training_bytes(
    settings: Mapping[str, Any],
    stages: Sequence[Sequence[int]],
    stage: int,
    parallel: ParallelConfig | Ranks,
    tokens: int,
    size: int,
    mtp: int = 0,
    replays: bool = False,
    replays_indices: bool = False,
) -> tuple[int, int, float]:
    """Return the bytes of activations and of micro-batch inputs on a rank of a stage, for all micro-batches in flight.

    The second number is what exists for one layer at a time, see `activation_elements`. On the last stage the logits
    are gone by then.

    stages: the decoder layers of each stage. size: bytes per element. For the others see `micro_batch_bytes`.
    """
    is_last = stage == parallel.pp - 1
    layers, count = stages[stage], len(stages[stage]) // parallel.vpp
    parts = [layers[i * count : (i + 1) * count] for i in range(parallel.vpp)]
    # Each costs about as much as the last layer that has attention.
    delta_nets = settings.get("linear_attention_freq") or ()
    with_attention = [layer for layers in stages for layer in layers if not (delta_nets and delta_nets[layer])]
    mtp_layers = (with_attention or list(stages[-1]))[-1:] * mtp if is_last else []
    if settings.get("fp8"):  # MTP layers are not recomputed in FP8
        elements = sum(layer_elements(settings, i, parallel.etp) for i in mtp_layers) * tokens // parallel.tp
    else:
        elements, parts[-1] = 0, [*parts[-1], *mtp_layers]
    in_flight = micro_batches_in_flight(parallel.pp, stage, parallel.vpp)
    saved, work = activation_elements(settings, parts, parallel.tp, tokens, in_flight, parallel.etp)
    sizes = tokens, parallel.tp, parallel.cp
    inputs = micro_batch_bytes(settings, layers, *sizes, stage == 0, is_last, mtp, replays, replays_indices)
    scores = unfused_sparse_bytes(settings, tokens, parallel.tp, parallel.cp)
    return (elements + saved) * size, work * size + scores, inputs * in_flight


def unfused_sparse_bytes(settings: Mapping[str, Any], tokens: int, tp: int, cp: int) -> int:
    """Return the bytes of scores in a layer of sparse attention without a fused kernel; 0 for other models.

    Megatron's torch path holds the scores of all pairs of tokens of a micro-batch in fp32, across sequences: those of
    the indexer's heads and, twice, of this rank's heads. tokens: on this rank, after context parallelism.
    """
    if not settings.get("dsa_indexer_topk") or settings.get("dsa_kernel_backend", "none") != "none":
        return 0
    heads = int(settings["dsa_indexer_n_heads"]) + 2 * int(settings["num_attention_heads"]) // tp
    return 4 * heads * tokens * tokens * cp


def working_bytes(
    hf: HFConfig, config: Config, ranks: Ranks, role: str, tokens: int, trains: bool, recomputes: bool = False
) -> int:
    """Estimate the bytes that this rank needs for a pass: activations, logits and micro-batch inputs.

    A training pass saves activations of all micro-batches in flight; a forward-only pass has one layer at a time.

    tokens: of a micro-batch on this rank.
    recomputes: full recomputation, overriding `model.megatron`.
    """
    size, settings, stage = DTYPE_BYTES[config.model.dtype], megatron_settings(hf, config), ranks.pp_rank
    if recomputes:
        settings |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    stages, is_last = stage_layers(int(settings["num_layers"]), ranks.pp, settings, ranks.vpp), stage == ranks.pp - 1
    if trains:
        mtp = num_trained_mtp(hf, config) if role == "actor" else 0
        saved, work, inputs = training_bytes(settings, stages, stage, ranks, tokens, size, mtp)
    else:
        widest = max((layer_elements(settings, layer, ranks.etp) for layer in stages[stage]), default=0)
        saved, work = 0, widest * tokens // ranks.tp * size
        inputs = micro_batch_bytes(settings, stages[stage], tokens, ranks.tp, ranks.cp, stage == 0, is_last)
    logits = 0
    if is_last and role == "actor":
        hidden, at_once = int(hf["hidden_size"]), config.train.logits_chunk_size
        logits = logits_bytes(int(hf["vocab_size"]), hidden, ranks.tp, tokens, at_once, size)
    return round(saved + inputs) + max(logits, work)
