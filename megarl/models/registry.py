"""Model families by name. To add one, write its table and add it here, or declare an entry point."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from megarl.config import Config, ConfigError, plugins, strict
from megarl.models import bailing, deepseek, deepseek_sparse, ernie, gpt_oss, gqa, mixtral, qwen3_next, qwen_vl
from megarl.models.config_json import has_default, need
from megarl.models.family import CAUSAL_LM, CLASSIFIER, Family, HFConfig
from megarl.models.layout_algebra import TOWER, Param

_DENSE = (gqa.QWEN2, gqa.QWEN3, gqa.LLAMA, gqa.GEMMA2, qwen3_next.QWEN3_5, qwen_vl.QWEN2_5_VL)
_MOE = (
    gqa.QWEN3_MOE,
    deepseek.V2,
    deepseek.V3,
    deepseek.K25,
    gqa.GLM4_MOE,
    gpt_oss.GPT_OSS,
    qwen3_next.QWEN3_NEXT,
    qwen3_next.QWEN3_5_MOE,
    deepseek_sparse.V32,
    deepseek_sparse.GLM_MOE_DSA,
    mixtral.MINIMAX_M2,
    mixtral.MIXTRAL,
    deepseek.GLM4_MOE_LITE,
    ernie.ERNIE4_5_MOE,
    bailing.LING2,
    qwen_vl.QWEN3_VL_MOE,
)
_GENERATIVE = (CAUSAL_LM, "ForConditionalGeneration")
FAMILIES: dict[str, Family] = {family.architecture: family for family in _DENSE + _MOE}

VISION_FAMILIES = {name: family.vision for name, family in FAMILIES.items() if family.vision is not None}

ENTRY_POINT_GROUP = "megarl.families"  # of families of other packages, each named by its architecture
PARTS = ("embedding", "vision tower", "attention", "dense mlp", "experts", "router", "norms", "head")


def family_of(hf: HFConfig) -> Family:
    """Return the family of the model in config.json. A sequence classifier has the family of its language model.

    Raises ConfigError if no family is registered for it.
    """
    model_type = str(hf.get("model_type"))
    architecture_by_type = {family.model_type: family.architecture for family in FAMILIES.values()}
    name = (hf.get("architectures") or [None])[0] or architecture_by_type.get(model_type)
    architecture = str(name).replace(CLASSIFIER, CAUSAL_LM)
    if architecture in FAMILIES:
        if (type_architecture := architecture_by_type.get(model_type, architecture)) != architecture:
            raise ConfigError(
                f"config.json: architectures has {name}, but model_type={model_type} is {type_architecture}, by which "
                "transformers and SGLang read the other keys; set the right model_type"
            )
        return FAMILIES[architecture]
    declared = plugins.list_entry_points(ENTRY_POINT_GROUP)
    if architecture in declared:
        path, subject = declared[architecture].value, f"the family of {architecture}"
        family = plugins.load(path, subject)
        if not isinstance(family, Family):
            raise ConfigError(f"{subject}: {path} is not a megarl.models.family.Family")
        return family
    known, nearest = ", ".join([*FAMILIES, *declared]), nearest_architecture(hf, architecture)
    hint = f" (nearest is {nearest}; see megarl/models/README.md)" if nearest else ""
    raise ConfigError(f"no model family for the architecture {name or model_type}{hint}; known: {known}")


_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size", "moe_num_experts")
LEAST_LIKENESS = 0.6


def nearest_architecture(hf: HFConfig, architecture: str) -> str:
    """Return the registered architecture whose table is the best start for another one; empty if there is none.

    A family with experts and latent attention exactly if config.json has them counts most, then the likeness of names.
    """
    stem = architecture.partition("For")[0]
    has_experts = any(hf.get(key) for key in _EXPERT_KEYS) or "moe" in stem.lower()
    has_latents = bool(hf.get("kv_lora_rank"))

    def score(family: Family) -> tuple[int, float, bool]:
        has_latents_too = has_default({"architectures": [family.architecture]}, "q_lora_rank")
        alike = ((family in _MOE) == has_experts) + (has_latents_too == has_latents)
        name = family.architecture.partition("For")[0]
        return alike, difflib.SequenceMatcher(None, stem.lower(), name.lower()).ratio(), stem.startswith(name)

    best = max(FAMILIES.values(), key=score)
    is_decoder = "num_attention_heads" in hf and architecture.endswith(_GENERATIVE)
    return best.architecture if is_decoder or score(best)[1] >= LEAST_LIKENESS else ""


def load_hf_config(path: str | Path) -> dict[str, Any]:
    """Read config.json, given its path or that of its folder, as plain values. Raises ConfigError."""
    folder = Path(path)
    file = folder / "config.json" if folder.is_dir() else folder
    adapters = folder / "adapter_config.json"
    if not file.is_file() and adapters.is_file():
        base = strict.short_repr(strict.read_json(adapters).get("base_model_name_or_path"))
        raise ConfigError(
            f"{path} is a folder of PEFT's: adapters without the model that they adapt, {base}; merge them into it "
            "(merge_and_unload, save_pretrained) and name that folder"
        )
    if not file.is_file():
        no_config = f"no config.json in {path}: it is not an HF model folder"
        raise ConfigError(no_config if folder.is_dir() else f"no model folder or config.json at {path}")
    values = strict.read_json(file)
    for key, kind in {"architectures": list[str] | None, "model_type": str | None}.items():
        # These select the family, which checks all other keys.
        strict.check_value(values.get(key), kind, f"{file}: {key}")
    return flatten_text_config(values)


def flatten_text_config(values: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json with the keys of its `text_config` at the top level, for Kimi-K2.5 and models with a tower.

    Raises ConfigError if a key is in both places with different values.
    """
    text = values.get("text_config")
    if values.get("model_type") == deepseek.KIMI_K25:
        strict.check_value(text, dict, "config.json: text_config")
        return deepseek.flatten_kimi_k25(values)
    name = (values.get("architectures") or [None])[0]
    if (family := FAMILIES.get(str(name))) is None or family.vision is None or not isinstance(text, dict):
        return values
    outer = {key: value for key, value in values.items() if key != "text_config"}
    inner = {key: value for key, value in text.items() if key not in ("model_type", "architectures")}
    if inner.get("tie_word_embeddings") and not outer.get("tie_word_embeddings"):
        outer.pop("tie_word_embeddings", None)  # as in transformers, if either is true
    elif outer.get("tie_word_embeddings"):
        inner.pop("tie_word_embeddings", None)
    for key in sorted(outer.keys() & inner.keys() - _TOP_LEVEL):
        if outer[key] != inner[key]:
            raise ConfigError(f"config.json of {name}: {key} differs from text_config.{key}; remove one of them")
    return inner | outer


_TOP_LEVEL = frozenset("dtype torch_dtype transformers_version use_cache".split())
"""Keys of config.json that do not describe the text model."""


def num_trained_mtp(hf: HFConfig, config: Config) -> int:
    """Return how many multi-token prediction layers a policy trains, by `train.mtp_loss_coef`. Raises ConfigError."""
    family, weight = family_of(hf), config.train.mtp_loss_coef
    if weight == 0:
        return 0
    if not family.num_mtp_layers(hf):
        declared = family.num_mtp_layers({**hf, family.mtp_key: 1}) == 1
        remedy = f", or add {family.mtp_key}=1 to config.json if the checkpoint has one" if declared else ""
        raise ConfigError(
            f"train.mtp_loss_coef={weight:g}, but this {family.architecture} has no layers of multi-token prediction "
            f"that are implemented; set it to 0{remedy}"
        )
    if need(hf, "tie_word_embeddings") and config.parallel.pp > 1:
        raise ConfigError(
            "train.mtp_loss_coef with tie_word_embeddings=true and parallel.pp above 1 is not implemented: Megatron "
            "would give the last stage an embedding and an output layer of its own; set parallel.pp=1 or "
            "train.mtp_loss_coef=0"
        )
    return family.num_mtp_layers(hf)


def part_of(param: Param) -> str:
    """Return which of `PARTS` a parameter belongs to. Shared experts process every token, so they count as dense."""
    name = param.megatron
    if name.startswith("embedding."):
        return "embedding"
    if name.startswith(TOWER):
        return "vision tower"
    if name.startswith("output_layer."):
        return "head"
    if "layernorm." in name:
        return "norms"
    if ".router." in name:
        return "router"
    if ".self_attention." in name:
        return "attention"
    return "experts" if param.expert is not None else "dense mlp"


def param_count(hf: HFConfig) -> dict[str, int]:
    """Return the number of elements of each part of the model, without padding. A tied head counts as embedding."""
    counts, family = dict.fromkeys(PARTS, 0), family_of(hf)
    for param in family.params(hf, 1, max_experts=1):
        counts[part_of(param)] += param.size * (1 if param.expert is None else family.num_experts(hf))
    return counts
