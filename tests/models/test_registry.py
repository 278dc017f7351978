"""Model tables compared with transformers' models, Megatron's fields and published sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors import safe_open

from megarl.config import ConfigError
from megarl.models.fp8 import is_fp8, is_quantised
from megarl.models.hf_folder import open_hf
from megarl.models.registry import FAMILIES, family_of, load_hf_config, param_count

pytestmark = pytest.mark.alone

SMALL: dict[str, Any] = {
    "vocab_size": 70,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
MOE = SMALL | {"moe_intermediate_size": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
MLA = MOE | {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 32,
}
HARMONIC = {  # gpt-oss's options
    "sliding_window": 16,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 2.0, "truncate": False}
    | {"original_max_position_embeddings": 32},
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GLM = MOE | {
    "head_dim": 8,
    "attention_bias": True,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "partial_rotary_factor": 0.5,
    "num_nextn_predict_layers": 0,
}
SPARSE = {"index_topk": 4, "index_head_dim": 8, "index_n_heads": 2}
SHARING = {"index_topk_freq": 2, "index_skip_topk_offset": 1}
V2 = MLA | {"topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False, "n_group": 1, "topk_group": 1}
GROUPS = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
GEMMA2 = (
    SMALL
    | {"head_dim": 8, "query_pre_attn_scalar": 6, "sliding_window": 5, "tie_word_embeddings": True}
    | {
        "hidden_act": "gelu_pytorch_tanh",
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }
)
DELTA_NETS = SMALL | {
    "head_dim": 8,
    "full_attention_interval": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
QWEN3_5_MOE = {
    key: value for key, value in (MOE | DELTA_NETS).items() if key not in ("intermediate_size", "norm_topk_prob")
}
QWEN3_5_MOE |= {"num_experts": 4, "shared_expert_intermediate_size": 12}
ERNIE = SMALL | {
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_intermediate_size": 8,
    "moe_num_shared_experts": 1,
    "moe_layer_start_index": 1,
}
MODELS = {
    "qwen2": ("Qwen2", SMALL),
    "qwen2 tied": ("Qwen2", SMALL | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", SMALL | {"head_dim": 8}),
    "llama": ("Llama", SMALL),
    "llama 3.1": ("Llama", SMALL | {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2", GEMMA2),
    "qwen3_moe": ("Qwen3Moe", MOE | {"head_dim": 8, "num_experts": 4}),
    "glm4_moe": ("Glm4Moe", GLM),
    "glm4_moe with norms": ("Glm4Moe", GLM | {"attention_bias": False, "use_qk_norm": True}),
    "gpt_oss": ("GptOss", SMALL | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2} | HARMONIC),
    "qwen3_next": ("Qwen3Next", QWEN3_5_MOE | {"intermediate_size": 24, "norm_topk_prob": True}),
    "qwen3_5_moe": ("Qwen3_5Moe", QWEN3_5_MOE),
    "qwen3_5": ("Qwen3_5", DELTA_NETS | {"tie_word_embeddings": True}),
    "deepseek_v2": ("DeepseekV2", V2),
    "deepseek_v2 without q_lora": ("DeepseekV2", V2 | {"q_lora_rank": None, "rope_parameters": YARN}),
    "deepseek_v2 with groups": ("DeepseekV2", V2 | GROUPS),
    "deepseek_v3": ("DeepseekV3", MLA | {"rope_parameters": YARN}),
    "deepseek_v3 without q_lora": ("DeepseekV3", MLA | {"q_lora_rank": None}),
    "ernie4_5_moe tied": ("Ernie4_5_Moe", ERNIE | {"tie_word_embeddings": True, "moe_num_shared_experts": 0}),
    "deepseek_v32": ("DeepseekV32", MLA | SPARSE | {"rope_parameters": YARN}),
    "glm_moe_dsa": ("GlmMoeDsa", MLA | SPARSE | {"indexer_rope_interleave": True, "rms_norm_eps": 1e-5}),
    "glm_moe_dsa sharing": ("GlmMoeDsa", MLA | SPARSE | SHARING | {"indexer_rope_interleave": True}),
}
MODELS |= {
    name: (tiny.HF[name]["architectures"][0].removesuffix("ForCausalLM"), tiny.HF[name])
    for name in tiny.family_names()
    if name not in MODELS and name != "ling2"  # which transformers does not have
}


def hf_of(name: str, **changes: Any) -> dict[str, Any]:
    family, values = MODELS[name]
    return {**values, "architectures": [f"{family}ForCausalLM"], **changes}


@pytest.mark.parametrize("name", MODELS)
def test_table_lists_the_tensors_that_transformers_writes(name: str, tmp_path: Path) -> None:
    import transformers

    family, _ = MODELS[name]
    config = tiny.hf_config(hf_of(name))
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        written = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}
    hf = load_hf_config(tmp_path)  # as transformers 5 writes it
    tensors = [tensor for param in family_of(hf).params(hf, 1) for tensor in param.hf]
    weights = open_hf(tmp_path)
    weights.check(hf)  # also the shapes of stacks
    views = {tensor.name: weights.view(tensor.name) for tensor in tensors}
    names = [tensor.name if (view := views[tensor.name]) is None else view.name for tensor in tensors]
    assert set(names) == written.keys()
    assert {tensor.name: tensor.shape for tensor in tensors if views[tensor.name] is None}.items() <= written.items()
    if "experts" in str(written) and not any(views.values()):
        # One tensor per expert, not stacked.
        assert any(name.startswith("model.layers.1.") and ".experts.3." in name for name in written)
    # The config that we write by hand in these tests means the same model.
    assert family_of(hf).params(hf, 2) == family_of(hf_of(name)).params(hf_of(name), 2)
    actual = family_of(hf).megatron_config(hf)
    assert actual == family_of(hf_of(name)).megatron_config(hf_of(name))
    assert family_of(hf).extras(hf) == family_of(hf_of(name)).extras(hf_of(name))


@pytest.mark.parametrize("name", MODELS)
def test_megatron_accepts_the_config(name: str) -> None:
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    hf = hf_of(name)
    values = family_of(hf).megatron_config(hf)
    config = (MLATransformerConfig if values.get("multi_latent_attention") else TransformerConfig)(**values)
    assert config.num_layers == hf["num_hidden_layers"] and config.hidden_size == hf["hidden_size"]
    assert config.normalization == "RMSNorm" and config.gated_linear_unit


def test_deepseek_v3_megatron_options() -> None:
    hf = hf_of("deepseek_v3")
    values = family_of(hf).megatron_config(hf)
    assert values["moe_layer_freq"] == [0, 1, 1]
    assert values["moe_shared_expert_intermediate_size"] == 16
    assert (values["moe_router_num_groups"], values["moe_router_group_topk"]) == (2, 1)
    assert values["moe_router_topk_scaling_factor"] == 2.5
    assert (values["rope_type"], values["rotary_scaling_factor"]) == ("yarn", 2.0)
    assert (values["mscale"], values["mscale_all_dim"]) == (1.0, 0.7)
    # Without YaRN nothing may scale the softmax: Megatron does where factor > 1 and mscale_all_dim > 0.
    without_yarn = hf_of("deepseek_v3", rope_parameters={"rope_type": "default", "rope_theta": 5e5}, topk_group=2)
    values = family_of(without_yarn).megatron_config(without_yarn)
    assert (values["rope_type"], values["rotary_base"], values["rotary_scaling_factor"]) == ("rope", 5e5, 1.0)
    assert values["moe_router_num_groups"] is None  # choosing all groups is no limit
    bias = [p for p in family_of(hf).params(hf, 1) if p.is_buffer]
    assert [(p.megatron, p.dtype) for p in bias] == [
        (f"decoder.layers.{layer}.mlp.router.expert_bias", torch.float32) for layer in (1, 2)
    ]


def test_rope_reads_old_and_new_spellings_alike() -> None:
    new = hf_of("deepseek_v3")
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    scaling = {key: value for key, value in YARN.items() if key not in ("rope_theta", "rope_type")}
    old |= {"rope_theta": 10000.0, "rope_scaling": scaling | {"type": "yarn"}}
    family = family_of(new)
    assert family.megatron_config(old) == family.megatron_config(new)
    assert family.gpt_kwargs(old) == family.gpt_kwargs(new)


def test_mtp_layers_are_listed_as_untrained() -> None:
    hf = hf_of("deepseek_v3", num_nextn_predict_layers=2)
    assert family_of(hf).untrained_prefixes(hf) == ("model.layers.3.", "model.layers.4.")
    assert family_of(hf_of("deepseek_v3")).untrained_prefixes(hf_of("deepseek_v3")) == ()


QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
LLAMA_31_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rope_scaling": {**LLAMA3, "rope_type": "llama3"},
}
GEMMA_2_2B = {  # as published, without tie_word_embeddings
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 256000,
}
GEMMA_2_27B = GEMMA_2_2B | {
    "head_dim": 128,
    "hidden_size": 4608,
    "intermediate_size": 36864,
    "num_attention_heads": 32,
    "num_hidden_layers": 46,
    "num_key_value_heads": 16,
    "query_pre_attn_scalar": 144,
}
DEEPSEEK_LLM_7B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "rms_norm_eps": 1e-06,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
DEEPSEEK_V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "first_k_dense_replace": 1,
    "num_attention_heads": 16,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "rms_norm_eps": 1e-06,
    "moe_layer_freq": 1,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
DEEPSEEK_V2 = DEEPSEEK_V2_LITE | {
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 60,
    "num_attention_heads": 128,
    "n_routed_experts": 160,
    "topk_method": "group_limited_greedy",
    "n_group": 8,
    "topk_group": 3,
    "routed_scaling_factor": 16.0,
    "q_lora_rank": 1536,
}
KIMI_K2 = DEEPSEEK_V3 | {
    "vocab_size": 163840,
    "first_k_dense_replace": 1,
    "num_attention_heads": 64,
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    # further keys of its config.json
    "model_type": "kimi_k2",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "pretraining_tp": 1,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
}


@pytest.mark.parametrize(
    ("hf", "total"),
    [
        (QWEN3_8B, 8_190_735_360),
        (LLAMA_31_8B, 8_030_261_248),
        (GEMMA_2_2B, 2_614_341_888),
        (GEMMA_2_27B, 27_227_128_320),
        (DEEPSEEK_LLM_7B, 6_910_365_696),
        (DEEPSEEK_V2_LITE, 15_706_484_224),
        (DEEPSEEK_V2, 235_741_434_880),
        (KIMI_K2, pytest.approx(1.0264e12, rel=1e-4)),
    ],
)
def test_published_parameter_counts(hf: dict[str, Any], total: int) -> None:
    assert sum(param_count(hf).values()) == total


def test_kimi_k2_megatron_options() -> None:
    values = family_of(KIMI_K2).megatron_config(KIMI_K2)
    assert (values["moe_router_num_groups"], values["moe_router_topk_scaling_factor"]) == (None, 2.827)
    assert (values["beta_fast"], values["beta_slow"], values["rotary_scaling_factor"]) == (1.0, 1.0, 32.0)


def test_gemma2_megatron_options() -> None:
    """The published config lacks layer_types and tie_word_embeddings; layers alternate, starting with a window."""
    values, extras = family_of(GEMMA_2_27B).megatron_config(GEMMA_2_27B), family_of(GEMMA_2_27B).extras(GEMMA_2_27B)
    assert values["window_attn_skip_freq"] == [1, 0] * 23
    assert values["window_size"] == (4095, 0)  # a query sees 4096 keys, one of them its own
    assert values["softmax_scale"] == pytest.approx(1 / 12)
    assert extras.embedding_scale == pytest.approx(67.882, abs=1e-3)
    assert family_of(GEMMA_2_27B).gpt_kwargs(GEMMA_2_27B)["share_embeddings_and_output_weights"]


def test_param_count_by_component() -> None:
    counts = param_count(hf_of("qwen3_moe"))
    assert counts == {
        "embedding": 70 * 16,
        "attention": 3 * 2 * 16 * (4 * 8 + 2 * 8),  # q and o, k and v
        "vision tower": 0,
        "dense mlp": 0,
        "experts": 3 * 4 * 3 * 8 * 16,
        "router": 3 * 4 * 16,
        "norms": 3 * (16 + 16 + 8 + 8) + 16,
        "head": 70 * 16,
    }


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3", "activation_scheme": "dynamic"}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("qwen2", {"layer_types": ["sliding_attention"]}, "layer_types with 'sliding_attention'"),
        (
            "qwen2",
            {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
            "rope_type='dynamic' is not .*: in transformers",
        ),
        (
            "qwen2",
            {"rope_scaling": {"type": "longrope", "long_factor": [1.0]}},
            "rope_type='longrope' is not .* length",
        ),
        (
            "qwen2",
            {"rope_scaling": {"type": "mrope", "factor": 4.0}},
            r"rope_type='mrope' is not .*\(implemented: default",
        ),
        ("qwen2", {"rope_scaling": {"type": "linear", "factor": 4}}, "SGLang does not accept; write 4.0"),
        ("qwen2", {"rope_parameters": YARN | {"rope_theta": 1.0}}, "rope_theta=1: it must be above 1"),
        ("qwen2", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("qwen2", {"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ("qwen2", {"quantization_config": {"quant_method": "awq"}}, "quantization_config with quant_method='awq'"),
        ("qwen2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("qwen2", {"hidden_size": None}, "has no hidden_size"),
        ("qwen3", {"attention_bias": True}, "attention_bias=True"),
        ("llama", {"mlp_bias": True}, "mlp_bias=True"),
        (
            "llama",
            {"rope_parameters": LLAMA3 | {"high_freq_factor": 1.0}},
            "low_freq_factor=1 not below high_freq_factor",
        ),
        (
            "llama",
            {"rope_parameters": YARN | {"attention_factor": 1.5}},
            "attention_factor=1.5 and .* by 1.5, SGLang by ",
        ),
        ("llama", {"rope_parameters": YARN | {"mscale": 0.0}}, "mscale=0 and mscale_all_dim=0.7 is not implemented"),
        ("llama", {"rope_parameters": YARN | {"beta_fast": None}}, "has no rope_parameters.beta_fast: it is null"),
        ("gemma2", {"layer_types": ["full_attention"] * 3}, "layer_types=.'full_attention'"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation='gelu'"),
        ("gemma2", {"hidden_act": "silu"}, "hidden_act='silu'"),
        ("gemma2", {"attn_logit_softcapping": None}, "has no attn_logit_softcapping"),
        ("gemma2", {"final_logit_softcapping": None}, "has no final_logit_softcapping"),
        ("gemma2", {"sliding_window": None}, "has no sliding_window"),
        ("gemma2", {"head_dim": None}, "has no head_dim"),
        ("gemma2", {"query_pre_attn_scalar": None}, "has no query_pre_attn_scalar"),
        ("gemma2", {"attention_bias": True}, "attention_bias=True"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("gemma2", {"tie_word_embeddings": False}, "tie_word_embeddings=False"),
        (
            "gemma2",
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            "rope_type='yarn' .* Gemma 2 reads rope_theta only",
        ),
        ("qwen3_moe", {"attention_bias": True}, "attention_bias=True"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]"),
        ("qwen3_moe", {"rope_parameters": {"rope_type": "llama3"}}, "has no factor"),
        ("qwen3_moe", {"num_experts_per_tok": 1}, "norm_topk_prob=True with num_experts_per_tok=1"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc'"),
        ("deepseek_v2", {"n_group": 4, "topk_group": 2}, "topk_method='greedy' with topk_group=2 of n_group=4"),
        ("deepseek_v2", GROUPS | {"n_group": 3}, "n_routed_experts=4 in n_group=3 groups"),
        ("deepseek_v2", GROUPS | {"topk_group": 1}, "too few for num_experts_per_tok=2"),
        ("deepseek_v2", GROUPS | {"topk_group": None}, "has no topk_group"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=True"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method='greedy'"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave=False"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ("deepseek_v3", {"v_head_dim": 13}, r"v_head_dim=13 above qk_nope_head_dim \+ qk_rope_head_dim = 12"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads=2"),
        ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob=False with num_experts_per_tok=2"),
        ("deepseek_v3", {"num_experts_per_tok": 4}, "num_experts_per_tok=4 with topk_group=1"),
        ("deepseek_v3", {"rope_parameters": YARN | {"rope_type": "longrope"}}, "rope_type='longrope'"),
        ("deepseek_v3", {"rope_parameters": YARN | {"attention_factor": 2.0}}, "attention_factor=2 and mscale"),
        ("deepseek_v3", {"rope_parameters": YARN | {"mscale": None}}, "has no rope_parameters.mscale: it is null"),
        (
            "deepseek_v3",
            {"rope_parameters": {key: value for key, value in YARN.items() if key != "mscale"}},
            "mscale_all_dim=0.7 is not implemented: transformers multiplies cosines and sines by 1.06.*; remove it",
        ),
        ("deepseek_v3", {"rope_parameters": YARN | {"truncate": False}}, "truncate=false"),
        (
            "deepseek_v3",
            {"rope_parameters": YARN | {"rope_type": "linear"}},
            "rope_type='linear' .* would compute yarn",
        ),
        ("deepseek_v3", {"rope_parameters": YARN | {"factor": None}}, "has no rope_parameters.factor"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "weight_block_size=None"),
        ("deepseek_v3", {"quantization_config": FP8 | {"scale_fmt": "ue8m0"}}, "scale_fmt='ue8m0'"),
        (
            "deepseek_v3",
            {"quantization_config": FP8 | {"ignored_layers": ["model.layers.0.self_attn.o_proj"]}},
            "o_proj",
        ),
    ],
)
def test_refuses_unimplemented_option_by_name(name: str, changes: dict[str, Any], message: str) -> None:
    hf = hf_of(name, **changes)
    with pytest.raises(ConfigError, match=message):
        family_of(hf).params(hf, 1)
    with pytest.raises(ConfigError, match=message):
        family_of(hf).megatron_config(hf)


def test_refuses_indivisible_tensor_parallel_size() -> None:
    hf = hf_of("qwen3_moe")
    with pytest.raises(ConfigError, match="model.layers.0.self_attn.q_proj.weight .* num_key_value_heads=2 does not"):
        family_of(hf).params(hf, 4)


def test_unknown_architecture_error_lists_known_ones() -> None:
    with pytest.raises(ConfigError, match=f"MambaForCausalLM; known: {', '.join(FAMILIES)}"):
        family_of({"architectures": ["MambaForCausalLM"], "model_type": "mamba"})
    assert family_of({"model_type": "qwen2"}).architecture == "Qwen2ForCausalLM"


@pytest.mark.parametrize(
    ("architecture", "values", "nearest"),
    [
        ("Qwen9MoeForCausalLM", MOE | {"num_experts": 4}, "Qwen3MoeForCausalLM"),
        ("Qwen9MoeForCausalLM", {}, "Qwen3MoeForCausalLM"),
        ("Llama9ForCausalLM", SMALL, "LlamaForCausalLM"),
        ("Gemma9ForCausalLM", SMALL, "Gemma2ForCausalLM"),
        ("DeepstarForCausalLM", MLA, "DeepseekV"),  # experts and latent attention count more than the name
        ("DeepseekV3OtherForCausalLM", MLA, "DeepseekV3ForCausalLM"),
        ("Qwen2OtherForConditionalGeneration", SMALL, "Qwen2ForCausalLM"),
        ("BertModel", SMALL, None),
        ("MambaForCausalLM", {}, None),
    ],
)
def test_unknown_architecture_error_names_the_nearest_table(
    architecture: str, values: dict[str, Any], nearest: str | None
) -> None:
    with pytest.raises(ConfigError, match=f"^no model family for the architecture {architecture}") as error:
        family_of(values | {"architectures": [architecture], "model_type": "other"})
    expected = f"{architecture}; known" if nearest is None else f"(nearest is {nearest}"
    assert expected in str(error.value)
    assert nearest is None or "; see megarl/models/README.md); known: Qwen2ForCausalLM, " in str(error.value)


def test_load_hf_config_reads_folder_or_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no config.json in"):
        load_hf_config(tmp_path)
    with pytest.raises(ConfigError, match="no model folder or config.json at"):
        load_hf_config(tmp_path / "absent")
    file = tmp_path / "config.json"
    file.write_text("{")
    with pytest.raises(ConfigError, match="is not valid JSON"):
        load_hf_config(tmp_path)
    file.write_text("[]")
    with pytest.raises(ConfigError, match="holds a list"):
        load_hf_config(file)
    file.write_text(json.dumps(SMALL))
    assert load_hf_config(file) == load_hf_config(tmp_path) == SMALL


def test_reads_the_quantization_of_minimax_m2() -> None:
    """As published: E4M3 under PyTorch's name, and the router and the head in their own dtypes."""
    excluded = ["gate", "e_score_correction_bias", "lm_head"]
    hf = tiny.HF["minimax_m2"] | {
        "quantization_config": FP8 | {"fmt": "float8_e4m3fn", "modules_to_not_convert": excluded}
    }
    assert is_fp8(hf)
    quantised = {param.hf[0].name for param in family_of(hf).params(hf, 1) if is_quantised(param)}
    assert "model.layers.0.block_sparse_moe.experts.1.w2.weight" in quantised
    assert not any(name.endswith(("gate.weight", "norm.weight", "_bias", "lm_head.weight")) for name in quantised)
