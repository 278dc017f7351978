"""Tiny models of each family as HF configs with transformers' random weights, and packed batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megarl.algorithms.losses import pair_mean_weights
from megarl.algorithms.preference_losses import chosen_mean_weights
from megarl.config import Config, from_dict
from megarl.parallel import row_exchange
from megarl.types import BatchSharding, SamplingMask, TrainBatch

COMMON: dict[str, Any] = dict(
    vocab_size=200,  # no multiple of 128, so the last ranks have vocabulary padding
    hidden_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    num_hidden_layers=2,
    max_position_embeddings=256,
    rms_norm_eps=1e-6,
    initializer_range=0.1,
)

EXPERTS: dict[str, Any] = dict(
    COMMON,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    first_k_dense_replace=1,
    routed_scaling_factor=1.5,
    tie_word_embeddings=False,
    rope_theta=10000.0,
)
LATENT: dict[str, Any] = dict(
    EXPERTS,
    num_key_value_heads=4,
    moe_layer_freq=1,
    kv_lora_rank=16,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=12,
)

HF: dict[str, dict[str, Any]] = {
    "qwen3_moe": dict(
        COMMON,
        architectures=["Qwen3MoeForCausalLM"],
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        tie_word_embeddings=False,
        rope_theta=10000.0,
    ),
    "deepseek_v3": dict(LATENT, architectures=["DeepseekV3ForCausalLM"], q_lora_rank=24, n_shared_experts=1)
    | dict(
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        num_hidden_layers=3,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        num_nextn_predict_layers=0,
    ),
    "deepseek_v2": dict(LATENT, architectures=["DeepseekV2ForCausalLM"], q_lora_rank=None, n_shared_experts=2)
    | dict(scoring_func="softmax")
    # Megatron would rank the two groups by the sum of their two best experts.
    | dict(topk_method="group_limited_greedy", n_routed_experts=8, n_group=2, topk_group=1, norm_topk_prob=False),
    "glm4_moe": dict(EXPERTS, architectures=["Glm4MoeForCausalLM"], head_dim=16, n_shared_experts=1)
    | dict(attention_bias=True, use_qk_norm=True, partial_rotary_factor=0.5)
    | dict(norm_topk_prob=True, num_nextn_predict_layers=0),
    "qwen3": dict(
        COMMON, architectures=["Qwen3ForCausalLM"], head_dim=16, tie_word_embeddings=True, rope_theta=10000.0
    ),
    "llama": dict(
        COMMON,
        architectures=["LlamaForCausalLM"],
        head_dim=16,
        tie_word_embeddings=False,
        rope_parameters=dict(
            rope_type="llama3",
            rope_theta=500000.0,
            factor=8.0,
            low_freq_factor=0.5,
            high_freq_factor=3.0,
            original_max_position_embeddings=12,  # sequences are longer
        ),
    ),
    "gemma2": dict(
        COMMON,
        architectures=["Gemma2ForCausalLM"],
        head_dim=16,
        hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=12,
        sliding_window=6,
        attn_logit_softcapping=1.5,  # low, so that the caps matter
        final_logit_softcapping=4.0,
        tie_word_embeddings=True,
        rope_theta=10000.0,
    ),
    "qwen2": dict(COMMON, architectures=["Qwen2ForCausalLM"], tie_word_embeddings=True, rope_theta=10000.0),
}

# These families share a table: Llama with multi-head attention, and V3 with YaRN and its own scale.
HF["deepseek_llm"] = dict(COMMON, architectures=["LlamaForCausalLM"], tie_word_embeddings=False, rope_theta=10000.0)
HF["deepseek_llm"]["num_key_value_heads"] = COMMON["num_attention_heads"]
HF["kimi_k2"] = HF["deepseek_v3"] | dict(
    routed_scaling_factor=2.827,
    rope_parameters=dict(
        rope_type="yarn",
        rope_theta=50000.0,
        factor=8.0,
        original_max_position_embeddings=32,
        beta_fast=1.0,
        beta_slow=1.0,
        mscale=1.0,
        mscale_all_dim=1.0,
    ),
)
HF["gpt_oss"] = dict(
    COMMON,
    architectures=["GptOssForCausalLM"],
    head_dim=16,
    num_local_experts=4,
    num_experts_per_tok=2,
    sliding_window=6,
    swiglu_limit=0.4,  # low, so that the clamps matter
    tie_word_embeddings=False,
    rope_parameters=dict(
        rope_type="yarn",
        rope_theta=150000.0,
        factor=8.0,
        original_max_position_embeddings=32,
        beta_fast=2.0,
        beta_slow=1.0,
        truncate=False,
    ),
)
HF["qwen3_next"] = dict(
    COMMON,
    architectures=["Qwen3NextForCausalLM"],
    head_dim=16,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    shared_expert_intermediate_size=24,
    norm_topk_prob=True,
    decoder_sparse_step=1,
    mlp_only_layers=[],
    full_attention_interval=2,
    partial_rotary_factor=0.5,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=16,
    linear_value_head_dim=24,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    tie_word_embeddings=False,
    rope_theta=10000.0,
)
HF["qwen3_5_moe"] = {
    key: value
    for key, value in HF["qwen3_next"].items()
    if key not in ("intermediate_size", "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers")
} | dict(architectures=["Qwen3_5MoeForCausalLM"])
MROPE = dict(mrope_section=[2, 1, 1], mrope_interleaved=True)  # without effect on text
HF["qwen3_5_moe"]["rope_parameters"] = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5) | MROPE
HF["qwen3_5"] = {
    key: value for key, value in HF["qwen3_next"].items() if key in COMMON or "linear" in key or "full" in key
} | dict(architectures=["Qwen3_5ForCausalLM"], head_dim=16, partial_rotary_factor=0.5, rope_theta=10000.0)
HF["qwen3_5"]["tie_word_embeddings"] = True
# The last decoder layer has a delta net, the MTP layer attention.
HF["qwen3_next_mtp"] = HF["qwen3_next"] | dict(num_hidden_layers=3, num_nextn_predict_layers=1)
HF["qwen3_5_moe_mtp"] = HF["qwen3_5_moe"] | dict(mtp_num_hidden_layers=1)
HF["qwen3_5_mtp"] = HF["qwen3_5"] | dict(mtp_num_hidden_layers=1)
HF["deepseek_v3_mtp"] = HF["deepseek_v3"] | dict(num_nextn_predict_layers=2)
HF["glm4_moe_mtp"] = HF["glm4_moe"] | dict(num_nextn_predict_layers=1)


# index_topk is below the length of the longer sequences; with many heads, ReLU leaves no keys with equal scores.
SPARSE: dict[str, Any] = dict(index_topk=6, index_head_dim=16, index_n_heads=16)
HF["deepseek_v32"] = HF["deepseek_v3"] | SPARSE | dict(architectures=["DeepseekV32ForCausalLM"])
HF["glm_moe_dsa"] = HF["deepseek_v3"] | SPARSE | dict(architectures=["GlmMoeDsaForCausalLM"])
HF["glm_moe_dsa"] |= dict(num_hidden_layers=4, index_topk_freq=2, index_skip_topk_offset=1)
HF["glm_moe_dsa"] |= dict(indexer_rope_interleave=True)
HF["glm_moe_dsa_mtp"] = HF["glm_moe_dsa"] | dict(num_nextn_predict_layers=1)
# Scaled rotary embeddings, whose sequences here are longer than the original length.
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=16.0, original_max_position_embeddings=12, beta_fast=2.0)
HF["qwen3_yarn"] = HF["qwen3"] | dict(rope_parameters=YARN | dict(truncate=False, mscale=1.0, mscale_all_dim=0.5))
HF["glm4_moe_mtp"]["rope_parameters"] = YARN
HF["deepseek_llm"]["rope_parameters"] = dict(rope_type="linear", rope_theta=10000.0, factor=4.0)
HF["minimax_m2"] = dict(
    COMMON,
    architectures=["MiniMaxM2ForCausalLM"],
    intermediate_size=24,
    head_dim=16,
    rotary_dim=8,
    use_qk_norm=True,
    num_local_experts=4,
    num_experts_per_tok=2,
    use_routing_bias=True,
    scoring_func="sigmoid",
    tie_word_embeddings=False,
    rope_theta=10000.0,
)

HF["glm4_moe_lite"] = HF["deepseek_v3"] | dict(
    architectures=["Glm4MoeLiteForCausalLM"],
    rms_norm_eps=1e-5,  # as published; transformers does not apply it to the norms of the latents, see `hf_model`
    num_hidden_layers=2,
)
HF["glm4_moe_lite_mtp"] = HF["glm4_moe_lite"] | dict(num_nextn_predict_layers=1)
HF["mixtral"] = dict(
    COMMON,
    architectures=["MixtralForCausalLM"],
    intermediate_size=24,
    num_local_experts=4,
    num_experts_per_tok=2,
    tie_word_embeddings=False,
    rope_theta=10000.0,
)
HF["ernie4_5_moe"] = dict(
    COMMON,
    architectures=["Ernie4_5_MoeForCausalLM"],
    moe_num_experts=4,
    moe_k=2,
    moe_intermediate_size=24,
    moe_num_shared_experts=2,
    moe_layer_start_index=1,
    tie_word_embeddings=True,
    rope_theta=10000.0,
)
HF["ling2"] = dict(
    COMMON,
    architectures=["BailingMoeV2ForCausalLM"],
    head_dim=16,
    partial_rotary_factor=0.5,
    use_qk_norm=True,
    use_bias=False,
    use_qkv_bias=False,
    first_k_dense_replace=1,
    num_experts=8,
    num_shared_experts=1,
    num_experts_per_tok=2,
    n_group=4,
    topk_group=1,
    moe_intermediate_size=24,
    moe_router_enable_expert_bias=True,
    norm_topk_prob=True,
    routed_scaling_factor=1.5,
    router_dtype="fp32",
    score_function="sigmoid",
    tie_word_embeddings=False,
    rope_theta=10000.0,
)

VISION: dict[str, Any] = dict(
    image_token_id=190,
    video_token_id=191,
    vision_start_token_id=192,
    vision_end_token_id=193,
    num_hidden_layers=3,
    rope_theta=10000.0,
    tie_word_embeddings=False,
)
TOWER: dict[str, Any] = dict(hidden_size=16, intermediate_size=24, num_heads=2, patch_size=4, out_hidden_size=32)
HF["qwen2_5_vl"] = COMMON | VISION | dict(architectures=["Qwen2_5_VLForConditionalGeneration"], model_type="qwen2_5_vl")
HF["qwen2_5_vl"] |= dict(
    rope_scaling={"type": "mrope", "mrope_section": [1, 1, 2]},
    vision_config=dict(TOWER, depth=2, patch_size=14, window_size=56, fullatt_block_indexes=[1]),
)
HF["qwen3_vl_moe"] = HF["qwen3_moe"] | VISION | dict(architectures=["Qwen3VLMoeForConditionalGeneration"])
HF["qwen3_vl_moe"] |= dict(
    model_type="qwen3_vl_moe",
    rope_scaling={"rope_type": "default", "mrope_interleaved": True, "mrope_section": [4, 2, 2]},
    num_hidden_layers=4,
    vision_config=dict(TOWER, depth=4, num_position_embeddings=16, deepstack_visual_indexes=[0, 1, 2]),
)
VISION_KEYS = "vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"

AUX_LOSSES = dict(moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.5, moe_z_loss_coeff=0.1)


def hf_model(family: str) -> Any:
    """Return transformers' model in fp32 with seeded weights, and with norms and biases that are not ones and zeros."""
    import mtp

    config = hf_config(HF[family])
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = hf_class(HF[family])(config).float().eval()
    if mtp.num_layers(config):
        mtp.add_layers(model)
    set_latent_eps(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name or name.endswith(("bias", "sinks")):
                tensor.add_(0.1 * torch.randn(tensor.shape, generator=generator))
            elif name.endswith("A_log"):
                tensor.sub_(3.0)  # decays of delta nets with which a state lasts for several tokens
    return model


def family_names() -> list[str]:
    """Return one of the names in `HF` for each architecture without a vision tower, the first."""
    first: dict[str, str] = {}
    for name, hf in HF.items():
        if "vision_config" not in hf:
            first.setdefault(hf["architectures"][0], name)
    return list(first.values())


def hf_class(hf: dict[str, Any]) -> Any:
    """Return transformers' class of a model; for Ling 2 the tests' own."""
    import ling
    import transformers

    name = hf["architectures"][0]
    return getattr(transformers, name, None) or getattr(ling, name)


def hf_config(hf: dict[str, Any]) -> Any:
    """Return the configuration object of a config.json."""
    values = {name: value for name, value in hf.items() if name != "architectures"}
    if "vision_config" in values:
        outer = {key: values[key] for key in (*VISION_KEYS, "tie_word_embeddings") if key in values}
        text = {key: value for key, value in values.items() if key not in VISION_KEYS and key != "model_type"}
        values = {"text_config": text, **outer}
    return hf_class(hf).config_class(**values)


def set_latent_eps(model: Any) -> Any:
    """Give the norms of latents the epsilon of config.json, as SGLang and Megatron do; transformers has 1e-6."""
    for name, module in model.named_modules():
        if name.endswith("_a_layernorm"):
            module.variance_epsilon = model.config.rms_norm_eps
    return model


def hf_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Return the weights by their names in safetensors files, where each expert has its own tensors."""
    return checkpoint_tensors(model, model.state_dict())


def checkpoint_tensors(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return weights, or their gradients, by the names of a family's table, with tensors for each expert.

    With a vision tower these are transformers' own names, otherwise those of safetensors files.
    """
    from transformers.core_model_loading import revert_weight_conversion

    has_tower = hasattr(model.config, "vision_config")
    return split_experts(dict(tensors if has_tower else revert_weight_conversion(model, tensors)))


def split_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Split transformers' stacked experts into one tensor each."""
    result: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        matrix = name.removesuffix("_bias")
        if "experts." in name and f"{matrix}_bias" in tensors:  # gpt-oss, with gate and up in turn, and transposed
            for e, part in enumerate(tensor):
                expert = matrix.replace("experts.", f"experts.{e}.")
                result[f"{expert}.weight" if name == matrix else f"{expert}.bias"] = part.T if name == matrix else part
        elif name.endswith("experts.gate_up_proj"):
            for e, (gate, up) in enumerate(part.chunk(2) for part in tensor):
                result[name.replace("gate_up_proj", f"{e}.gate_proj.weight")] = gate
                result[name.replace("gate_up_proj", f"{e}.up_proj.weight")] = up
        elif name.endswith("experts.down_proj"):
            for e, down_proj in enumerate(tensor):
                result[name.replace("down_proj", f"{e}.down_proj.weight")] = down_proj
        else:
            result[name] = tensor
    return result


DYNAMIC_BUDGET = 16


def avoid_wide_micro_batches() -> None:
    """Make dynamic CP take small sizes where it can. Of few sequences, the fastest plan may have the largest alone."""
    import megarl.megatron.trainer_model as module

    module.context_costs = lambda hf, sizes, *_: tuple((size, 2.0 * (size - 1)) for size in sizes)


def config(
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    cp: int = 1,
    etp: int = 1,
    vpp: int = 1,
    world: int = 1,
    dynamic_cp: int = 0,
    **sections: Any,
) -> Config:
    sizes = {"world_size": world, "tp": tp, "pp": pp, "ep": ep, "cp": cp, "etp": etp, "vpp": vpp}
    tree: dict[str, Any] = {
        "model": {"dtype": "float32"},
        "parallel": sizes | {"dynamic_cp": bool(dynamic_cp)},
        # With dynamic CP some sequences of `batch` need a rank, and some two.
        "train": {"max_tokens_per_gpu": DYNAMIC_BUDGET if dynamic_cp else 26, "logits_chunk_size": 5},
    }
    for name, values in sections.items():
        tree.setdefault(name, {}).update(values)
    return from_dict(tree)


def common_tokens(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return two sequences of `batch`, and how many first tokens they have in common, for all that have any."""
    return [(i - 1, i, min(lengths[i - 1], lengths[i]) - 1) for i in range(2, len(lengths), 4)]


def with_routing(batch: TrainBatch, routing: torch.Tensor) -> TrainBatch:
    """Return the batch with recorded routing, [T, layers, topk]."""
    return batch.with_(routing=routing_records(batch, routing)).with_prefixes()


def batch(lengths: tuple[int, ...] = (7, 19, 12, 3, 1, 26, 11), vocab: int = 200) -> TrainBatch:
    """Return sequences of random tokens, about half of them in the loss mask, with loss weights that sum to 1.

    The third and the seventh begin like the one before them, up to the last token of the shorter one.
    """
    generator = torch.Generator().manual_seed(5)
    total = sum(lengths)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    mask = torch.rand(total, generator=generator) < 0.5
    mask[starts[:-1]] = False
    tokens = torch.randint(0, vocab, (total,), generator=generator)
    for first, second, common in common_tokens(lengths):
        tokens[starts[second] :][:common] = tokens[starts[first] :][:common]
    return TrainBatch(
        tokens=tokens,
        cu_seqlens=starts,
        loss_mask=mask,
        group=torch.arange(len(lengths)),
        sequence_reward=torch.zeros(len(lengths)),
        rollout_logprobs=torch.zeros(total),
        advantages=torch.randn(total, generator=generator),
        returns=torch.randn(total, generator=generator),
        loss_weights=mask / mask.sum(),
    ).with_prefixes()


def pairs(lengths: tuple[int, ...] = (7, 18, 12, 3, 1, 26, 14, 12)) -> TrainBatch:
    """Return a batch of preference pairs for a reward model, with one sequence longer than a micro-batch.

    Those of the last pair are equal up to the last token of the shorter one.
    """
    large_batch = batch(lengths)
    tokens = large_batch.tokens.clone()
    chosen, rejected = large_batch.cu_seqlens[-3:-1].tolist()
    common = min(lengths[-2:]) - 1
    tokens[rejected:][:common] = tokens[chosen:][:common]
    large_batch = large_batch.with_(tokens=tokens).with_prefixes()
    group = torch.arange(len(lengths) // 2).repeat_interleave(2)
    return large_batch.with_(group=group, loss_weights=pair_mean_weights(large_batch.cu_seqlens), keeps_groups=True)


def policy_pairs(lengths: tuple[int, ...] = (7, 18, 12, 3, 5, 26, 14, 12)) -> TrainBatch:
    """Return a batch of preference pairs for a policy, with a reference's log-probs."""
    result = pairs(lengths)
    noise = torch.randn(len(result.tokens), generator=torch.Generator().manual_seed(6))
    result = result.with_(ref_logprobs=noise * 0.3 - 5.3)
    return result.with_(loss_weights=chosen_mean_weights(result))


def routing_records(batch: TrainBatch, routing: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Split routing [T, layers, topk] into a record per sequence, of its leading tokens without a -1."""
    parts = routing.split(batch.lengths.tolist())
    num_routed = [int((part.flatten(1) >= 0).all(-1).sum()) for part in parts]
    return tuple(part[:count].to(torch.uint8) for part, count in zip(parts, num_routed, strict=True))


def sampling_masks(batch: TrainBatch, vocab: int = 200) -> tuple[SamplingMask, ...]:
    """Return sampling masks that give each token of the loss mask candidate ids, including itself.

    Candidates are in turn the token alone, a few ids, ids of half of the vocabulary, and all ids."""
    generator = torch.Generator().manual_seed(11)
    rows: list[list[int]] = []
    for token, chosen in zip(batch.tokens.tolist(), batch.loss_mask.tolist(), strict=True):
        order = torch.randperm(vocab, generator=generator).tolist()
        case = len(rows) % 4
        candidates = order[: (0, 7, 60, vocab)[case]] if case != 2 else [i for i in order if i < 100][:60]
        rows.append([token, *(i for i in candidates if i != token)] if chosen else [])
    full_mask, positions = SamplingMask.from_rows(rows), torch.arange(len(rows))
    return tuple(full_mask.index_select(part) for part in positions.split(batch.lengths.tolist()))


def shard_batch(batch: TrainBatch) -> TrainBatch:
    """Distribute the sequences of a batch over all ranks; with two or more, the second has none."""
    all_ranks, world = row_exchange.WorldComm(), torch.distributed.get_world_size()
    owners = [rank for rank in range(world) if world == 1 or rank != 1]
    owner = torch.tensor([owners[number * number % len(owners)] for number in range(batch.num_sequences)])
    local = (owner == all_ranks.rank).nonzero().squeeze(1)
    num_routed = [0] * batch.num_sequences if batch.routing is None else [len(record) for record in batch.routing]
    supported = (
        None if batch.sampling_mask is None else torch.tensor([len(record.ids) for record in batch.sampling_mask])
    )
    indexed = None
    if batch.sparse_indices is not None:
        indexed = torch.tensor([len(record) for record in batch.sparse_indices])
    images = None if batch.images is None else torch.tensor([len(packed) for packed in batch.images])
    columns = batch.lengths, torch.tensor(num_routed), owner, local, all_ranks, supported
    sharding = BatchSharding(*columns, indexed, images)
    part = batch.select(local.tolist())
    of_all = {name: getattr(batch, name) for name in ("group", "sequence_reward", "prefixes")}
    return replace(part, sharding=sharding, **of_all)


def gather_tokens(batch: TrainBatch, values: torch.Tensor) -> torch.Tensor:
    """Gather each rank's per-token values of a distributed batch to [T]."""
    gathered = [torch.zeros(0)] * batch.num_sequences
    local_values = list(zip(batch.local_indices.tolist(), values.split(batch.cu_seqlens.diff().tolist()), strict=True))
    for parts in batch.comm.all_gather_objects(local_values):
        for number, part in parts:
            gathered[number] = part
    return torch.cat(gathered)


def snapshot(model: Any) -> dict[str, torch.Tensor]:
    """Return host copies of a MegatronModel's local parameters."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in model.local_params().items()}


def save_model(model: Any, folder: Path) -> None:
    """Write a checkpoint of a model. Collective over its ranks."""
    from megarl.megatron.dist_checkpoint import StagedCheckpoint

    staged = StagedCheckpoint(model, folder)
    staged.write()
    staged.finish()
