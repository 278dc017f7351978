"""Bytes that a rank needs, by part, worked out from a family's table: no process, no device.

Weights, gradients, optimizer states and the engine's weights are exact, element by element. Activations, what the loss
takes for logits, and the KV cache are estimates, as their functions say. What CUDA, NCCL and the allocator take for
themselves is not counted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from megarl.config import Config
from megarl.models.adapters import adapter_params
from megarl.models.family import HFConfig
from megarl.models.fp8 import BLOCK, is_fp8, is_quantised
from megarl.models.layout import HFTensor, Param, Qkv, Replicated, local_shape, padded_vocab
from megarl.models.registry import family_of
from megarl.models.stages import stage_layers

BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class StageMemory:
    """One rank of a pipeline stage. Every rank of a stage needs the same. All numbers are bytes.

    While training the engine sleeps and has given its memory back; while generating there are no activations. The
    states of actor and critic stay on the device in both.
    """

    stage: int
    layers: tuple[int, ...]  # decoder layers of the stage
    states: dict[str, int]  # there all the time
    training: dict[str, int]  # besides, while training
    generation: dict[str, int]  # besides, while generating
    host: dict[str, int]  # in the host's memory

    @property
    def training_total(self) -> int:
        return sum(self.states.values()) + sum(self.training.values())

    @property
    def generation_total(self) -> int:
        return sum(self.states.values()) + sum(self.generation.values())

    @property
    def peak(self) -> int:
        return max(self.training_total, self.generation_total)


def plan_memory(
    hf: HFConfig, config: Config, critic_hf: HFConfig | None = None, reward_hf: HFConfig | None = None
) -> list[StageMemory]:
    """Memory of a rank of each pipeline stage. `critic_hf`: of the critic's model; None where there is no critic.
    `reward_hf`: likewise, of the reward model that serves, in fp32 and with its weights alone.

    Raises ConfigError where the layout does not divide the model.
    """
    parallel, rollout = config.parallel, config.rollout
    size = BYTES[config.model.dtype]
    settings = {**family_of(hf).megatron_config(hf), **config.model.megatron}
    params = family_of(hf).params(hf, parallel.tp)
    trains_reward = config.algorithm == "reward_model"
    tables = {} if trains_reward else {"actor": (params, settings)}
    for role, other in (("critic", critic_hf), ("reward model", hf if trains_reward else reward_hf)):
        if other is not None:
            shape = {**family_of(other).megatron_config(other), **config.model.megatron}
            table = params if other is hf else family_of(other).params(other, parallel.tp)
            tables[role] = (critic_params(table, int(other["hidden_size"])), shape)
    models = {}
    for role, (table, shape) in tables.items():
        layers = stage_layers(int(shape["num_layers"]), parallel.pp, shape, parallel.vpp)
        adapts = config.lora.rank and (role != "reward model" or trains_reward)
        adapters = adapter_params(table, config.lora) if adapts else []
        heads = [param for param in table if param.slot is None]  # a critic's is trained with LoRA, too
        held = stage_elements([*table, *adapters], parallel.tp, parallel.ep, layers)
        trained = stage_elements([*adapters, *heads], parallel.tp, parallel.ep, layers) if adapters else held
        models[role] = (shape, layers, held, trained)
    generation = {}
    if config.generates:
        # The engine may only use so much of its own accord; what is asked for is what all its conversations need.
        tokens = int(rollout.sglang.get("max_total_tokens") or rollout.concurrency * rollout.max_context)
        generation = {
            "engine weights": engine_bytes(params, rollout.tp, size, is_fp8(hf)),
            "engine KV cache": tokens * kv_elements(settings, rollout.tp) * size,
        }
    tokens = max(config.train.token_budget, rollout.max_context if config.generates else 0)
    stages = []
    dp = parallel.world_size // (parallel.tp * parallel.pp)
    expert_dp = max(1, parallel.world_size // (parallel.pp * parallel.ep))
    for stage in range(parallel.pp):
        states: dict[str, int] = {}
        training = {"activations": 0, "logits": 0}
        host = {}
        awake = dict(generation)
        for role, (shape, layers, held, trained) in models.items():
            if role == "reward model" and not trains_reward:
                states["reward model weights"] = sum(held[stage]) * 4
                # It scores while the engine is awake, and has one layer's activations at a time.
                widest = max(_layer_elements(shape, layer) for layer in layers[stage])
                awake["reward model activations"] = widest * tokens // parallel.tp * 4
                continue
            weights = {"weights": state_bytes(*held[stage], dp, expert_dp, size)["weights"]}
            for part, amount in (state_bytes(*trained[stage], dp, expert_dp, size) | weights).items():
                states[f"{role} {part}"] = amount
            # One model computes at a time: the greater of the two counts.
            used = activation_elements(shape, layers[stage], parallel.tp, tokens, in_flight=parallel.pp - stage) * size
            training["activations"] = max(training["activations"], used)
        if stage == parallel.pp - 1 and not trains_reward:
            words, hidden = int(hf["vocab_size"]), int(hf["hidden_size"])
            training["logits"] = logits_bytes(words, hidden, parallel.tp, tokens, config.train.logits_at_once, size)
        if config.generates and config.kl.place != "none" and not config.lora.rank:
            host["reference weights"] = states["actor weights"]
        layers = next(iter(models.values()))[1]
        stages.append(StageMemory(stage, layers[stage], states, training, awake, host))
    return stages


def critic_params(policy: Sequence[Param], hidden: int) -> list[Param]:
    """A policy's table with a head of one value in place of the output layer."""
    head = Param("output_layer.weight", (HFTensor("score.weight", (1, hidden)),), Replicated())
    return [*(param for param in policy if param.megatron != head.megatron), head]


def stage_elements(
    params: Sequence[Param], tp: int, ep: int, stages: Sequence[Collection[int]]
) -> list[tuple[int, int]]:
    """Elements of (dense, routed expert) parameters that one rank of each stage holds, vocabulary padding included.

    `stages`: the decoder layers of each, see `stage_layers`.
    """
    dense, expert = [0] * len(stages), [0] * len(stages)
    stage_of = {layer: stage for stage, layers in enumerate(stages) for layer in layers}
    tied = all(param.megatron != "output_layer.weight" for param in params)
    last = len(stages) - 1
    for param in params:
        name = param.megatron
        if param.expert is not None:
            expert[stage_of[int(name.split(".")[2])]] += param.size
            continue
        size = prod(local_shape(param, tp, 0))
        if name.startswith("decoder.layers."):
            dense[stage_of[int(name.split(".")[2])]] += size
        elif name.startswith("embedding."):
            dense[0] += size
            if tied and last > 0:
                dense[last] += size  # the output layer's copy of a tied embedding
        else:
            dense[last] += size
    return [(amount, of_experts // ep) for amount, of_experts in zip(dense, expert, strict=True)]


def state_bytes(dense: int, expert: int, dp: int, expert_dp: int, size: int) -> dict[str, int]:
    """Weights, fp32 gradients, and the distributed optimizer's share of master weights and two moments.

    Per element, with d ranks to share the optimizer: 6 + 12 / d bytes in bf16 and 8 + 8 / d in fp32, where the weights
    are their own masters: the table in Megatron-Core's guide to its distributed optimizer. Dense parameters are shared
    over data parallel ranks, experts over the ranks that hold the same experts.
    """
    states = 12 if size == 2 else 8
    return {
        "weights": (dense + expert) * size,
        "gradients": (dense + expert) * 4,
        "optimizer": -(-dense * states // dp) + -(-expert * states // expert_dp),
    }


def activation_elements(
    settings: Mapping[str, Any], layers: Collection[int], tp: int, tokens: int, in_flight: int
) -> int:
    """Elements that the layers of a stage keep for the backward pass: an estimate.

    The tensors that enter a matrix product, a norm, an activation function or flash attention are kept, as counted in
    arXiv:2205.05198 section 4, here for gated MLPs, grouped or latent attention and routed experts. Sequence
    parallelism divides all of them by tp; tokens are taken to be spread evenly over the experts. A stage holds
    `in_flight` micro-batches at once (1F1B). With `recompute_granularity: full` a layer keeps its input, and one layer
    at a time is computed anew.
    """
    hidden = int(settings["hidden_size"])
    per_layer = [_layer_elements(settings, layer) for layer in layers]
    kept = sum(per_layer)
    extra = 0
    if settings.get("recompute_granularity") == "full":
        kept, extra = hidden * len(layers), max(per_layer, default=0)
    return (kept * in_flight + extra) * tokens // tp


def _layer_elements(settings: Mapping[str, Any], layer: int) -> int:
    """Kept per token by one layer before any division."""
    hidden, heads = int(settings["hidden_size"]), int(settings["num_attention_heads"])
    if settings.get("multi_latent_attention"):
        nope, turned, value = (int(settings[key]) for key in ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"))
        latents = int(settings.get("q_lora_rank") or 0) + int(settings["kv_lora_rank"]) + turned
        attention = 2 * latents + heads * (2 * (nope + turned) + 2 * value)  # latents and their norms; q, k, v, out
    else:
        head = _head_size(settings)
        attention = (2 * heads + 2 * int(settings["num_query_groups"])) * head  # q, out, k, v
    mlp = 3 * int(settings["ffn_hidden_size"])  # gate, up, their product
    if _is_moe(settings, layer):
        width, topk = int(settings["moe_ffn_hidden_size"]), int(settings["moe_router_topk"])
        shared = int(settings.get("moe_shared_expert_intermediate_size") or 0)
        mlp = topk * (2 * hidden + 3 * width) + 3 * shared  # dispatched input and output of each chosen expert
    return 4 * hidden + attention + mlp  # the two norms' inputs and outputs


def _is_moe(settings: Mapping[str, Any], layer: int) -> bool:
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


def engine_bytes(params: Sequence[Param], tp: int, size: int, fp8: bool) -> int:
    """What one rank of an SGLang engine holds in weights, of `size` bytes an element, or 1 and a scale for a block.

    Of experts it has 1 / tp, whether they are dealt out whole or cut. Keys and values are held more than once where
    there are fewer heads than ranks; latents, norms and routers by all.
    """
    total = 0.0
    for param in params:
        if isinstance(param.cut, Replicated) and param.expert is None:
            elements = param.size
        elif isinstance(param.cut, Qkv):
            q, k, v = (prod(tensor.shape) for tensor in param.hf)
            elements = q // tp + (k + v) // min(tp, param.cut.groups)
        else:
            elements = -(-param.size // tp)
        total += elements * (1 + 4 / BLOCK**2 if fp8 and is_quantised(param) else size)
    return round(total)


def kv_elements(settings: Mapping[str, Any], tp: int) -> int:
    """Elements of KV cache per token on one rank of an engine: keys and values of its heads, or the whole latent."""
    layers = int(settings["num_layers"])
    if settings.get("multi_latent_attention"):
        return layers * (int(settings["kv_lora_rank"]) + int(settings["qk_pos_emb_head_dim"]))
    heads = max(1, int(settings["num_query_groups"]) // tp)
    return 2 * layers * heads * _head_size(settings)


def _head_size(settings: Mapping[str, Any]) -> int:
    return int(settings["kv_channels"] or settings["hidden_size"] // settings["num_attention_heads"])
