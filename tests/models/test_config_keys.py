"""Every key of config.json that transformers or SGLang reads for a supported family: absent, null and changed.

transformers' configuration class, with which SGLang reads config.json too, defines what an absent key means.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from megarl.config import ConfigError
from megarl.models.config_json import DEFAULTS
from megarl.models.registry import FAMILIES, VISION_FAMILIES, family_of

sys.path.insert(0, str(Path(__file__).parents[1] / "megatron"))

import tiny  # noqa: E402

pytestmark = pytest.mark.alone

FAMILY_NAMES = tuple(name for name in tiny.family_names() if name != "ling2")  # which transformers does not have
ALIASES = {"num_mtp_layers": "num_nextn_predict_layers", "num_experts": "num_local_experts"}
"""Class fields and the names that transformers writes them under."""

LLAMA3 = tiny.HF["llama"]["rope_parameters"]
YARN = tiny.HF["kimi_k2"]["rope_parameters"]
UNTRUNCATED_YARN = tiny.HF["gpt_oss"]["rope_parameters"]

INERT_FIELDS = {
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "use_cache",
    "max_window_layers",  # models with a sliding window are refused
    "output_router_logits",
    "pretraining_tp",  # computes the same products in parts
    "router_aux_loss_coef",  # `model.megatron` sets auxiliary losses
}
"""Class fields that do not affect log-probs."""

EXEMPT_KEYS = {
    *("__class__", "_attn_implementation", "architectures", "model_type"),
    "quantization_config",  # `tests/models/test_registry.py`
    *("rope_scaling", "rope_theta", "original_max_position_embeddings"),  # the tests of rotary embeddings below
    "dtype",  # `model.dtype` decides, and the check before a weight sync compares it with the engine's
    "original_intermediate_size",  # SGLang's own, for MXFP4 engines
    "indexer_rope_interleave",  # with index_topk, which is refused
    "target_hidden_size",  # draft models only
    *("n_shared_experts", "shared_expert_intermediate_size"),  # Qwen2-MoE only, whose file Qwen3-MoE shares
    *("num_experts", "num_local_experts"),  # two names: a test below
    *("layers_block_type", "linear_num_key_heads_cpu", "linear_num_value_heads_cpu"),  # derived by SGLang
    *("encoder_only", "torch_dtype"),
    *("moe_intermediate_size", "num_experts_per_tok"),  # of Qwen3.5-MoE, whose file Qwen3.5 shares
    *("depth", "in_channels", "num_heads", "num_position_embeddings", "out_hidden_size"),  # of vision models
    *("patch_size", "spatial_merge_size", "temporal_patch_size", "vision_config"),
    *("image_token_id", "video_token_id"),
}
"""Other keys that model code reads and that do not affect log-probs or have a test of their own."""

SOURCES = {
    "qwen2": ("qwen2",),
    "qwen3": ("qwen2", "qwen3"),
    "llama": ("llama",),
    "gemma2": ("gemma2",),
    "qwen3_moe": ("qwen2_moe", "qwen3_moe"),
    "glm4_moe": ("glm4_moe", "glm4_moe_nextn"),
    "deepseek_v2": ("deepseek_v2",),
    "deepseek_v3": ("deepseek_v2", "deepseek_nextn"),
    "glm4_moe_lite": ("glm4_moe_lite", "glm4_moe_lite_nextn"),
    "ernie4_5_moe": ("ernie4",),
    "deepseek_v32": ("deepseek_v2", "deepseek_nextn"),
    "glm_moe_dsa": ("deepseek_v2", "deepseek_nextn"),
    "qwen3_next": ("qwen2_moe", "qwen3_next", "qwen3_next_mtp"),
    "qwen3_5_moe": ("qwen2_moe", "qwen3_5", "qwen3_5_text", "qwen3_5_mtp"),
    "qwen3_5": ("qwen3_5", "qwen3_5_text", "qwen3_5_mtp"),
}
"""SGLang's files for each family, in srt/models, if not only the one of its name."""


def config_class(name: str) -> type:
    return tiny.hf_class(tiny.HF[name]).config_class  # type: ignore[no-any-return]


def architecture(name: str) -> str:
    return str(tiny.HF[name]["architectures"][0])


def class_fields(name: str) -> set[str]:
    inherited = {item.name for item in dataclasses.fields(transformers.PreTrainedConfig)}
    local = {item.name for item in dataclasses.fields(config_class(name))} - inherited
    return {ALIASES.get(key, key) for key in local}


def with_defaults(name: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the config.json that transformers writes for these values, with every default."""
    copied = json.loads(json.dumps(values))  # transformers fills the blocks that it is given
    written = json.loads(config_class(name)(**copied).to_json_string(use_diff=False))
    keys = class_fields(name) | values.keys() - {"rope_scaling", "rope_theta"}
    alias = {short: long for short, long in ALIASES.items() if long in written}
    return {key: written[key] for key in keys - alias.keys() if key in written} | {
        "architectures": [architecture(name)],
        "model_type": written["model_type"],
    }


def full_config(name: str) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 4e5}  # no default of any class
    values = {key: value for key, value in tiny.HF[name].items() if key not in ("architectures", "rope_theta")}
    return with_defaults(name, values | {"rope_parameters": rope})


def model_of(hf: dict[str, Any]) -> tuple[Any, ...]:
    """Return everything that a family's table derives from config.json."""
    family = family_of(hf)
    return (
        family.params(hf, 1),
        family.megatron_config(hf),
        family.gpt_kwargs(hf),
        family.extras(hf),
        family.untrained_prefixes(hf),
    )


def agrees_with_transformers(name: str, hf: dict[str, Any]) -> bool:
    """Return whether the table reads config.json as transformers does; True where the table refuses it."""
    try:
        parsed = model_of(hf)
    except ConfigError as error:
        assert "\n" not in str(error)
        return True
    try:
        with_defaults_ = with_defaults(name, hf)
    except Exception:  # transformers raises many types
        return False
    return parsed == model_of(with_defaults_)


def models_equal(hf: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether tables read two configs alike, or refuse both with one message."""
    results: list[Any] = []
    for values in (hf, other):
        try:
            results.append(model_of(values))
        except ConfigError as error:
            results.append(str(error))
    return bool(results[0] == results[1])


def keys_of_families() -> Iterator[Any]:
    for name in FAMILY_NAMES:
        for key in sorted(full_config(name).keys() - {"architectures", "model_type"}):
            yield pytest.param(name, key, id=f"{name}-{key}")


def changed_values(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 2 * value + 2]
    if isinstance(value, float):
        return [0.5 * value + 0.125]
    if isinstance(value, str):
        return ["another"]
    if isinstance(value, list):
        return [["sliding_attention"] * 3, [0]]
    if isinstance(value, dict):
        return [value | {"rope_theta": 123.0}, value | {"rope_type": "linear", "factor": 2.0}]
    return [True, 2]


def test_covers_all_families() -> None:
    """Except models with a vision tower, which are in `test_qwen_vl.py`."""
    others = {"BailingMoeV2ForCausalLM", "KimiK25ForConditionalGeneration"}  # the second has DeepSeek-V3's keys
    assert {architecture(name) for name in FAMILY_NAMES} == FAMILIES.keys() - others - VISION_FAMILIES.keys()
    others_defaults = {"bailingmoev2", "kimik25", "qwen25vl", "qwen3vlmoe"}
    assert {name.replace("_", "") for name in FAMILY_NAMES} == DEFAULTS.keys() - others_defaults


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_defaults_match_transformers(name: str) -> None:
    default_config = config_class(name)()
    for key, value in DEFAULTS[name.replace("_", "")].items():
        if key in class_fields(name) | {"num_mtp_layers"} and value is not None:
            assert getattr(default_config, key, 0) == value, key
        elif value is not None:  # a key of all models; the class has no field for it
            defaults = {"attention_bias": False, "use_sliding_window": False, "hidden_act": "silu"}
            defaults |= {"full_attention_interval": 4, "n_shared_experts": 1, "norm_topk_prob": True}
            defaults |= {"attention_dropout": 0.0}
            defaults |= {"partial_rotary_factor": default_config.rope_parameters.get("partial_rotary_factor", 1.0)}
            assert value == (defaults | {"rope_theta": default_config.rope_parameters["rope_theta"]})[key]


@pytest.mark.parametrize(("name", "key"), keys_of_families())
def test_absent_or_null_key_means_the_default(name: str, key: str) -> None:
    hf = full_config(name)
    assert agrees_with_transformers(name, {other: value for other, value in hf.items() if other != key})
    if key not in INERT_FIELDS:
        assert agrees_with_transformers(name, hf | {key: None})


@pytest.mark.parametrize(("name", "key"), keys_of_families())
def test_changed_key_is_honoured_or_refused(name: str, key: str) -> None:
    hf = full_config(name)
    if key in INERT_FIELDS or (
        key == "sliding_window" and name not in ("gemma2", "gpt_oss")
    ):  # with use_sliding_window, which is refused
        return
    if key == "partial_rotary_factor":  # the one in rope_parameters counts
        hf["rope_parameters"].pop(key)
    for value in changed_values(hf[key]):
        try:
            changed = model_of(hf | {key: value}) != model_of(hf)
            assert changed, value
        except ConfigError as error:
            assert "\n" not in str(error)


def config_keys_read_by(file: Path) -> set[str]:
    """Return the attributes of `config` objects that a module reads, also by getattr and hasattr."""
    read = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute):
            owner, name = node.value, node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            owner, name = node.args[0], getattr(node.args[1], "value", "")
        else:
            continue
        if getattr(owner, "id", getattr(owner, "attr", "")) in ("config", "hf_config"):
            read.add(name)
    return read


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_refuses_keys_that_only_model_code_reads(name: str) -> None:
    root = Path(transformers.__file__).parent
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.submodule_search_locations
    sglang = Path(spec.submodule_search_locations[0], "srt")
    files = [sglang / f"models/{file}.py" for file in SOURCES.get(name, (name,))]
    files += [root / f"models/{name}/modeling_{name}.py", sglang / "layers/logits_processor.py"]
    hf = full_config(name)
    unknown = []
    for key in sorted(set().union(*map(config_keys_read_by, files)) - hf.keys() - EXEMPT_KEYS - INERT_FIELDS):
        changed = 0
        for value in (True, False, 2, {"chunk_size": 8}):
            try:
                changed += model_of(hf | {key: value}) != model_of(hf)
            except ConfigError:
                changed += 1
        if not changed:
            unknown.append(key)
    assert unknown == []


def rope_blocks() -> Iterator[Any]:
    for name in FAMILY_NAMES:
        yield name, {"rope_type": "default", "rope_theta": 7e5}
        yield name, YARN
        yield name, LLAMA3
        yield name, {"rope_type": "linear", "rope_theta": 7e5, "factor": 2.0}
    yield "gpt_oss", UNTRUNCATED_YARN


@pytest.mark.parametrize(("name", "block"), list(rope_blocks()))
def test_rope_keys_may_be_absent(name: str, block: dict[str, Any]) -> None:
    hf = full_config(name) | {"max_position_embeddings": 16384}
    for spelling in ("rope_parameters", "rope_scaling"):
        flat = {key: value for key, value in hf.items() if key != "rope_parameters"} | {"rope_theta": 6e5}
        assert models_equal(flat | {spelling: block}, hf | {"rope_parameters": block})
        for key in block:
            without_key = {other: value for other, value in block.items() if other != key}
            assert agrees_with_transformers(name, flat | {spelling: without_key}), key
            assert agrees_with_transformers(name, flat | {spelling: block | {key: None}}), key
        assert agrees_with_transformers(name, flat | {spelling: block, "original_max_position_embeddings": 64})
        assert agrees_with_transformers(name, flat | {spelling: block, "partial_rotary_factor": 0.25})
        assert agrees_with_transformers(
            name, flat | {spelling: block | {"partial_rotary_factor": 0.25}, "partial_rotary_factor": 1.0}
        )
        problem = rf"{spelling}.mrope_section is not implemented; known: type, |mrope_section=\[1, 1\] must be three"
        with pytest.raises(ConfigError, match=problem):
            model_of(flat | {spelling: block | {"mrope_section": [1, 1]}})


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_refuses_rope_scaling_that_contradicts_rope_parameters(name: str) -> None:
    """As in a folder that transformers 5 saved and to which a user added the YaRN block of a model card."""
    hf = full_config(name)
    same_rope = {"type": "default", "rope_theta": 4e5}
    assert model_of(hf | {"rope_scaling": same_rope}) == model_of(hf) == model_of(hf | {"rope_scaling": None})
    assert agrees_with_transformers(name, hf | {"rope_scaling": same_rope})
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    for rope in (yarn, YARN, LLAMA3, {"rope_type": "default"}, {"rope_type": "default", "rope_theta": 1e6}):
        with pytest.raises(ConfigError, match="rope_scaling and rope_parameters are both there and differ; keep one"):
            model_of(hf | {"rope_scaling": rope})


@pytest.mark.parametrize(
    ("name", "key", "other_key"),
    [
        ("qwen3_moe", "num_experts", "num_local_experts"),
        ("gpt_oss", "num_local_experts", "num_experts"),
        ("deepseek_v2", "n_routed_experts", "num_experts"),
        ("deepseek_v3", "n_routed_experts", "num_local_experts"),
        ("deepseek_v3", "num_nextn_predict_layers", "num_mtp_layers"),
        ("glm4_moe", "n_routed_experts", "num_local_experts"),
        ("glm4_moe", "num_nextn_predict_layers", "num_mtp_layers"),
        ("minimax_m2", "num_local_experts", "num_experts"),
        ("mixtral", "num_local_experts", "num_experts"),
        ("glm4_moe_lite", "n_routed_experts", "num_local_experts"),
        ("ernie4_5_moe", "moe_num_experts", "num_experts"),
    ],
)
def test_two_names_of_an_option_must_agree(name: str, key: str, other_key: str) -> None:
    hf = {**full_config(name), key: 4, other_key: 4}
    assert model_of(hf)
    with pytest.raises(ConfigError, match=f"{key}=4 and {other_key}=8 are two names of an option; remove one"):
        model_of(hf | {other_key: 8})


def test_refuses_architecture_that_contradicts_model_type() -> None:
    """model_type selects the class, and thus the defaults."""
    with pytest.raises(ConfigError, match="Qwen2ForCausalLM, but model_type=qwen3 is Qwen3ForCausalLM, by which"):
        model_of(full_config("qwen2") | {"model_type": "qwen3"})


def test_requires_keys_that_only_sglang_reads() -> None:
    """SGLang 0.5.23 reads them without a default, and transformers has no such fields."""
    required_keys = {"gemma2": ("hidden_act",), "deepseek_v2": ("scoring_func", "moe_layer_freq")}
    required_keys["deepseek_v3"] = (*required_keys["deepseek_v2"], "topk_method")
    required_keys["glm4_moe_lite"] = ("first_k_dense_replace",)
    required_keys["minimax_m2"] = ("rotary_dim", "use_qk_norm", "use_routing_bias", "scoring_func")
    for name, keys in required_keys.items():
        for key in keys:
            hf = full_config(name)
            del hf[key]
            with pytest.raises(
                ConfigError, match=f"config.json of .*ForCausalLM has no {key}, which SGLang reads; add "
            ):
                model_of(hf)
