"""Tiny random models as HF folders, with a byte-level tokenizer trained on the spot. Nothing is downloaded."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import kimi_k25_folder
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

# A short version of Qwen's chat format with its tool section.
CHAT_TEMPLATE = """{%- if tools %}<|im_start|>system
Tools:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for message in messages %}{% if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


WITHOUT_CALLS = re.sub(r"{% for call in .*?{% endfor %}", "", CHAT_TEMPLATE, flags=re.DOTALL)
"""A template that does not render calls."""


def tokenizer() -> PreTrainedTokenizerFast:
    base = Tokenizer(models.BPE())
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    base.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    words = ["user assistant system 0 1 2 3 4", '{"name": "calculator", "arguments": {"expression": "1+2"}}']
    base.train_from_iterator(words * 20, trainer)
    base.add_tokens(["<tool_call>", "</tool_call>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=base, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _common(heads: int) -> dict[str, Any]:
    return {
        "vocab_size": 512,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": heads,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 1024,
        "eos_token_id": 2,
        "bos_token_id": None,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }


def randomize(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Randomize the weights in place, large enough that log-probs distinguish two models."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
            elif not tensor.requires_grad:
                continue
            elif name.endswith("A_log"):  # states of delta nets that fade slowly, as in published models
                tensor.copy_(-3 + 0.1 * torch.randn(tensor.shape, generator=generator))
            elif hasattr(model.config, "linear_num_key_heads") and "norm" in name and "linear_attn" not in name:
                tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))  # these norms multiply by 1 + weight
            elif tensor.dim() == 1:
                tensor.copy_(1 + 0.1 * torch.randn(tensor.shape, generator=generator))
            else:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) / tensor.shape[-1] ** 0.5)
    return model.float().eval()


def _dense() -> dict[str, Any]:
    return {name: value for name, value in _common(2).items() if "expert" not in name and "moe" not in name}


def qwen2(seed: int = 0, **changes: Any) -> PreTrainedModel:
    return randomize(Qwen2ForCausalLM(Qwen2Config(**(_dense() | changes))), seed)


def qwen3(seed: int = 0, **changes: Any) -> PreTrainedModel:
    return randomize(Qwen3ForCausalLM(Qwen3Config(**(_dense() | {"head_dim": 32} | changes))), seed)


def llama(seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Llama 3.1's scaled rotary embeddings; the shortest scaled wavelength is below a thousand tokens."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return randomize(LlamaForCausalLM(LlamaConfig(**(_dense() | {"rope_parameters": rope} | changes))), seed)


def gemma2(seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Effective soft caps and a window shorter than a prompt; norm weights are around 1 + 1 instead of 1 + 0."""
    settings = _dense() | {
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "sliding_window": 12,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
        "tie_word_embeddings": True,
        "attn_implementation": "eager",  # the only implementation with soft caps
    }
    return randomize(Gemma2ForCausalLM(Gemma2Config(**(settings | changes))), seed)


def qwen3_moe(seed: int = 0, **changes: Any) -> PreTrainedModel:
    settings = _common(2) | {"head_dim": 16, "num_experts": 8, "norm_topk_prob": True, "decoder_sparse_step": 1}
    return randomize(Qwen3MoeForCausalLM(Qwen3MoeConfig(**(settings | changes))), seed)


def deepseek_v3(seed: int = 0, rope: bool = True, **changes: Any) -> PreTrainedModel:
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    settings = _common(4) | {
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "rope_scaling": yarn if rope else None,
        "num_nextn_predict_layers": 0,  # if 1, `save` writes the layer
    }
    return randomize(DeepseekV3ForCausalLM(DeepseekV3Config(**(settings | changes))), seed)


def deepseek_v32(seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Sparse attention to 8 keys, whose indexer has so many heads that ReLU makes no two scores equal."""
    return randomize(DeepseekV32ForCausalLM(DeepseekV32Config(**(_sparse() | changes))), seed)


def glm_moe_dsa(seed: int = 0, **changes: Any) -> PreTrainedModel:
    """The same with interleaved rotation, and the second of three layers shares the first one's choice of keys."""
    # transformers has this epsilon for the norms of latents, SGLang and Megatron that of the config
    sharing = {"index_topk_freq": 2, "index_skip_topk_offset": 1, "indexer_rope_interleave": True, "rms_norm_eps": 1e-6}
    return randomize(GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**(_sparse() | sharing | changes))), seed)


def _sparse() -> dict[str, Any]:
    return _common(4) | {
        "num_hidden_layers": 3,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "index_topk": 8,
        "index_head_dim": 32,
        "index_n_heads": 16,
        "num_nextn_predict_layers": 0,
    }


MTP_KEYS = "num_nextn_predict_layers", "mtp_num_hidden_layers"


def has_mtp(model: PreTrainedModel) -> bool:
    return any(getattr(model.config, key, 0) for key in MTP_KEYS)


def mtp_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the tensors of a model's multi-token-prediction layer, by HF's names; transformers has no such layer.

    They are random, except that an identity is added to the joint projection where it reads the embedding, so that
    predictions depend on the previous token, and attention is strong enough to change them. Embedding and head are
    copies of the model's, as in HF's checkpoints, or shared with the model in those of Qwen.
    """
    config, number, width = model.config, model.config.num_hidden_layers, model.config.hidden_size
    seed = int(model.lm_head.weight.detach().abs().sum())  # the layer depends on the model
    values = {
        key: value for key, value in config.to_dict().items() if not key.endswith(("layer_types", "indexer_types"))
    }
    is_qwen = hasattr(config, "linear_num_key_heads")
    values |= {"num_hidden_layers": number + 1} | (
        {"layer_types": ["full_attention"] * (number + 1)} if is_qwen else {}
    )
    with_mtp = type(model)(type(config)(**values))
    with TemporaryDirectory() as folder:  # saving names the experts
        randomize(with_mtp, seed).save_pretrained(folder)
        layer = load_file(Path(folder, "model.safetensors"))
    generator = torch.Generator().manual_seed(seed + 1)
    joint = torch.randn(width, 2 * width, generator=generator) / (2 * width) ** 0.5
    joint[:, :width] += 4 * torch.eye(width)
    first, second, last = (0.1 * torch.randn(width, generator=generator) + (not is_qwen) for _ in range(3))
    prefix = f"model.layers.{number}."
    layer[f"{prefix}self_attn.o_proj.weight"] *= 10
    layer = {name: tensor for name, tensor in layer.items() if name.startswith(prefix)}
    if is_qwen:
        return {name.replace(prefix, "mtp.layers.0."): tensor for name, tensor in layer.items()} | {
            "mtp.fc.weight": joint,
            "mtp.pre_fc_norm_embedding.weight": first,
            "mtp.pre_fc_norm_hidden.weight": second,
            "mtp.norm.weight": last,
        }
    own_tensors = {
        "enorm.weight": first,
        "hnorm.weight": second,
        "shared_head.norm.weight": last,
        "eh_proj.weight": joint,
        "embed_tokens.weight": model.model.embed_tokens.weight.detach().clone(),
        "shared_head.head.weight": model.lm_head.weight.detach().clone(),
    }
    return layer | {prefix + name: tensor for name, tensor in own_tensors.items()}


def kimi_k2(seed: int = 0, **changes: Any) -> PreTrainedModel:
    """DeepSeek-V3 with the options of Kimi K2's config.json: no expert groups, other rotary scaling."""
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 50000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    routing = {"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.827}
    model = deepseek_v3(seed, rope=False, rope_parameters=yarn, **routing, **changes)
    model.config.published = "kimi_k2"
    return model


def kimi_k25(seed: int = 0) -> PreTrainedModel:
    """The language model of Kimi-K2.5, which `save` writes with a vision tower: Kimi K2 with its published epsilon."""
    import tiny

    model = tiny.set_latent_eps(kimi_k2(seed, rms_norm_eps=1e-5))
    model.config.published = "kimi_k25"
    return model


def deepseek_v2(seed: int = 0, **changes: Any) -> PreTrainedModel:
    settings = _common(4) | {
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "topk_method": "group_limited_greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.5,
        "q_lora_rank": None,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
    }
    return randomize(DeepseekV2ForCausalLM(DeepseekV2Config(**(settings | changes))), seed)


def glm4_moe(seed: int = 0, **changes: Any) -> PreTrainedModel:
    settings = _common(2) | {
        "head_dim": 16,
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "num_nextn_predict_layers": 0,
    }
    return randomize(Glm4MoeForCausalLM(Glm4MoeConfig(**(settings | changes))), seed)


def families_without_builder() -> list[str]:
    """Return the families that only `of_family` builds."""
    import tiny

    return [name for name in tiny.family_names() if name not in globals()]


def of_family(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Return a model with the configuration of `tests/megatron/tiny.py`, but the vocabulary and length of these."""
    import tiny

    shared = ("vocab_size", "max_position_embeddings", "eos_token_id", "bos_token_id", "pad_token_id")
    values = tiny.HF[family] | {key: _common(1)[key] for key in shared} | changes
    return randomize(tiny.set_latent_eps(tiny.hf_class(values)(tiny.hf_config(values))), seed)


def gpt_oss(seed: int = 0, **changes: Any) -> PreTrainedModel:
    """With windows and an original context shorter than the prompts of the tests, and with clamps that matter."""
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 2.0,
        "beta_slow": 1.0,
        "truncate": False,
    }
    settings = {name: value for name, value in _common(2).items() if name != "moe_intermediate_size"} | {
        "head_dim": 16,
        "intermediate_size": 32,
        "num_local_experts": 8,
        "sliding_window": 6,
        "swiglu_limit": 0.7,
        "rope_parameters": yarn,
    }
    return randomize(GptOssForCausalLM(GptOssConfig(**(settings | changes))), seed)


DELTA_NET: dict[str, Any] = {
    "head_dim": 32,
    "full_attention_interval": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 8,
    "shared_expert_intermediate_size": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}


def qwen3_next(seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A gated delta net, then gated attention."""
    return randomize(Qwen3NextForCausalLM(Qwen3NextConfig(**(_common(2) | DELTA_NET | changes))), seed)


def qwen3_5_moe(seed: int = 0, **changes: Any) -> PreTrainedModel:
    """With sections of rotary embeddings for images, as published."""
    settings = {name: value for name, value in _common(2).items() if name != "intermediate_size"} | DELTA_NET
    rope = {**DELTA_NET["rope_parameters"], "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    settings["rope_parameters"] = rope
    return randomize(Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**(settings | changes))), seed)


def save(model: PreTrainedModel, folder: Path) -> Path:
    """Write the model, the tokenizer, and config fields that SGLang reads but transformers does not write.

    If the config has a multi-token-prediction layer, which transformers ignores, also write `mtp_tensors`.
    """
    model.save_pretrained(folder)
    if has_mtp(model):
        weights = folder / "model.safetensors"
        save_file(load_file(weights) | mtp_tensors(model), weights, {"format": "pt"})
    if model.config.model_type == "qwen3_vl_moe":
        # As published, and as SGLang reads them; transformers writes the other form, and reads both.
        tensors = load_file(folder / "model.safetensors")
        tensors = {name: t.mT.contiguous() if ".experts." in name else t for name, t in tensors.items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if (vision := getattr(model.config, "vision_config", None)) is not None:
        size = {"shortest_edge": 64, "longest_edge": 65536}
        settings = {"patch_size": vision.patch_size, "merge_size": vision.spatial_merge_size, "size": size}
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    tokenizer().save_pretrained(folder)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    published = config.pop("published", config["model_type"])  # the name in the authors' config.json
    if config["model_type"] in ("deepseek_v3", "deepseek_v32", "glm_moe_dsa"):
        config |= {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    if config["model_type"] == "gemma2":
        config |= {"hidden_act": "gelu_pytorch_tanh"}
    if config["model_type"] == "deepseek_v2":
        config |= {"moe_layer_freq": 1, "scoring_func": "softmax"}
    file.write_text(json.dumps(config | {"model_type": published}))
    if published == "kimi_k25":
        kimi_k25_folder.add_tower(folder)
    generation = {"eos_token_id": 2, "pad_token_id": 0, "bos_token_id": None}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def logprobs(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """[len(ids), vocabulary] log-probs; row t is the distribution of token t + 1."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)


def decoder_layers(model: PreTrainedModel) -> Any:
    """Return the layers of a model, or of its language model."""
    return getattr(model.model, "language_model", model.model).layers


@contextmanager
def record_experts(model: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """Record the chosen experts of the next forward pass: [tokens, topk] per MoE layer, empty for a dense model."""
    result: list[torch.Tensor] = []
    routers = (getattr(layer.mlp, "gate", getattr(layer.mlp, "router", None)) for layer in decoder_layers(model))
    gates = [router for router in routers if router is not None]
    hooks = [gate.register_forward_hook(lambda _, __, out: result.append(out[2])) for gate in gates]
    yield result
    for hook in hooks:
        hook.remove()


@contextmanager
def record_keys(model: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """Record the keys that sparse attention chooses in the next forward pass: [tokens, topk] per layer that chooses."""
    result: list[torch.Tensor] = []
    indexers = [getattr(getattr(layer, "self_attn", None), "indexer", None) for layer in decoder_layers(model)]
    hooks = [
        indexer.register_forward_hook(lambda _, __, out: result.append(out[0]))
        for indexer in indexers
        if indexer is not None
    ]
    yield result
    for hook in hooks:
        hook.remove()


def greedy(model: PreTrainedModel, ids: list[int], tokens: int) -> list[int]:
    for _ in range(tokens):
        ids = [*ids, int(logprobs(model, ids)[-1].argmax())]
    return ids[-tokens:]
