"""Invalid model folders: config.json, weights and tokenizers."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from case import Case
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "megatron"))
import tiny  # noqa: E402

Prepare = Callable[[Path], None]
REMOVED = object()
DRY = ("--dry-run", "model.hf_config=FOLDER/other.json")
OTHER = ("parallel.world_size=1", "rollout.max_context=128", "model.path=''")


def change(**changes: Any) -> Prepare:
    """Change values of config.json."""

    def prepare(folder: Path) -> None:
        file = folder / "model/config.json"
        values = {**json.loads(file.read_text()), **changes}
        file.write_text(json.dumps({key: value for key, value in values.items() if value is not REMOVED}))

    return prepare


def other_family(family: str, **changes: Any) -> Prepare:
    """Write other.json with the changed config of another model family."""

    def prepare(folder: Path) -> None:
        values = {**tiny.HF[family], **changes}
        text = json.dumps({key: value for key, value in values.items() if value is not REMOVED})
        (folder / "other.json").write_text(text)

    return prepare


def write_file(name: str, data: bytes | str) -> Prepare:
    """Replace a file of the model."""

    def prepare(folder: Path) -> None:
        (folder / "model" / name).write_bytes(data.encode() if isinstance(data, str) else data)

    return prepare


def without(name: str) -> Prepare:
    return lambda folder: (folder / "model" / name).unlink()


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 123456\n"


def adapter_only(folder: Path) -> None:
    (folder / "model/config.json").unlink()
    (folder / "model/adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "base"}')


def weights(edit: Callable[[dict[str, Any]], Any]) -> Prepare:
    """Edit the weights."""

    def prepare(folder: Path) -> None:
        tensors = load_file(folder / "model/model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model/model.safetensors", metadata={"format": "pt"})

    return prepare


def truncated(share: float) -> Prepare:
    """Truncate the weights like an interrupted download."""

    def prepare(folder: Path) -> None:
        file = folder / "model/model.safetensors"
        file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])

    return prepare


def index(files: Any) -> Prepare:
    return write_file("model.safetensors.index.json", json.dumps(files))


def change_vocab(size: int) -> Prepare:
    """Shrink the vocabulary of the model below that of its tokenizer."""

    def prepare(folder: Path) -> None:
        change(vocab_size=size)(folder)
        names = ("model.embed_tokens.weight", "lm_head.weight")
        weights(lambda tensors: tensors.update({name: tensors[name][:size].clone() for name in names}))(folder)

    return prepare


FIELDS: dict[str, tuple[Any, ...]] = {
    "num_hidden_layers": ("three", 0, -1, 10**12, 2.0, None, [4]),
    "hidden_size": ("128", 0, -128, 1e400, REMOVED),
    "intermediate_size": (None, "wide"),
    "num_attention_heads": (0, 4.5, REMOVED),
    "num_key_value_heads": (-2, "2"),
    "head_dim": (0, "32", math.nan),
    "vocab_size": (0, "1024", 10**400),
    "max_position_embeddings": (0, REMOVED, math.inf),
    "rms_norm_eps": (0, -1e-6, math.nan, "1e-6", REMOVED),
    "initializer_range": (-1, "x"),
    "rope_theta": (-1.0, 0, "10000", math.nan),
    "rope_scaling": ("yarn", [1], {"type": 3}, {"factor": "2"}, {"rope_type": "default", "rope_theta": -1}),
    "tie_word_embeddings": ("false", 1),
    "attention_bias": (0, "no"),
    "layer_types": ("full", [1], {"a": 1}),
    "quantization_config": ("fp8", []),
    "num_experts": ("eight", 0, -8, 10**6, [8]),
    "num_experts_per_tok": (0, -1, "2", REMOVED),
    "moe_intermediate_size": ("64", 0, None),
    "norm_topk_prob": ("true", 1.0),
}
DEEPSEEK: dict[str, tuple[Any, ...]] = {
    "n_routed_experts": ("four", 0),
    "n_shared_experts": (-1, "1"),
    "first_k_dense_replace": (-1, "1"),
    "routed_scaling_factor": (0, "x", math.nan),
    "n_group": (0, "1"),
    "topk_group": (0, [1]),
    "q_lora_rank": (0, "24"),
    "kv_lora_rank": (0, None),
    "qk_rope_head_dim": (-8, "8"),
    "num_nextn_predict_layers": (-1, "one"),
}


def format_value(value: Any) -> str:
    return "missing" if value is REMOVED else repr(value)[:20]


CASES = [
    *(
        Case(f"{key} is {format_value(value)}", ("config.json", key), prepare=change(**{key: value}))
        for key, values in FIELDS.items()
        for value in values
    ),
    *(
        Case(
            f"V3: {key} is {format_value(value)}",
            ("config.json", key),
            (*DRY, *OTHER),
            other_family("deepseek_v3", **{key: value}),
        )
        for key, values in DEEPSEEK.items()
        for value in values
    ),
    # --- what does not go together
    Case(
        "more experts per token than experts",
        ("num_experts_per_tok=100", "8 experts"),
        prepare=change(num_experts_per_tok=100),
    ),
    Case("indivisible heads", ("num_key_value_heads=3",), prepare=change(num_key_value_heads=3)),
    Case(
        "no head size and indivisible heads",
        ("num_attention_heads=6", "hidden_size=128"),
        prepare=change(num_attention_heads=6, head_dim=None),
    ),
    Case("an odd head size", ("pairs", "head_dim=31"), prepare=change(head_dim=31)),
    Case(
        "layer types for another number of layers",
        ("layer_types", "3 entries", "4 layers"),
        prepare=change(layer_types=["full_attention"] * 3),
    ),
    Case("unknown layer types", ("layer_types", "linear"), prepare=change(layer_types=["linear_attention"] * 4)),
    Case(
        "an unknown quantisation",
        ("quant_method='awq'", "bfloat16"),
        prepare=change(quantization_config={"quant_method": "awq"}),
    ),
    Case(
        "architectures as text", ("architectures must be a list",), prepare=change(architectures="Qwen3MoeForCausalLM")
    ),
    Case("architectures as a number", ("architectures must be a list",), prepare=change(architectures=3)),
    Case("architectures of numbers", ("architectures must be a list",), prepare=change(architectures=[3])),
    Case("an unknown architecture", ("BertModel", "known:"), prepare=change(architectures=["BertModel"])),
    Case(
        "no architecture",
        ("no model family for the architecture",),
        prepare=change(architectures=REMOVED, model_type=REMOVED),
    ),
    Case("model_type as a list", ("model_type must be text",), prepare=change(model_type=[1])),
    Case(
        "V3: an odd rope head size",
        ("qk_rope_head_dim=7",),
        (*DRY, *OTHER),
        other_family("deepseek_v3", qk_rope_head_dim=7),
    ),
    Case(
        "V3: more groups per token than groups",
        ("topk_group=3 of n_group=2",),
        (*DRY, *OTHER),
        other_family("deepseek_v3", n_group=2, topk_group=3),
    ),
    Case("V3: uneven groups", ("n_group=3",), (*DRY, *OTHER), other_family("deepseek_v3", n_group=3, topk_group=3)),
    Case(
        "V3: yarn without a factor",
        ("has no factor",),
        (*DRY, *OTHER),
        other_family("deepseek_v3", rope_scaling={"type": "yarn"}),
    ),
    Case(
        "V3: a yarn factor as text",
        ("factor must be a number",),
        (*DRY, *OTHER),
        other_family("deepseek_v3", rope_scaling={"type": "yarn", "factor": "8"}),
    ),
    Case(
        "Gemma: a null cap",
        ("has no attn_logit_softcapping",),
        (*DRY, *OTHER),
        other_family("gemma2", attn_logit_softcapping=None),
    ),
    Case(
        "Gemma: a cap of 0",
        ("final_logit_softcapping must be",),
        (*DRY, *OTHER),
        other_family("gemma2", final_logit_softcapping=0),
    ),
    Case(
        "Gemma: a window as text",
        ("sliding_window must be",),
        (*DRY, *OTHER),
        other_family("gemma2", sliding_window="6"),
    ),
    Case(
        "Gemma: a negative scale",
        ("query_pre_attn_scalar must be",),
        (*DRY, *OTHER),
        other_family("gemma2", query_pre_attn_scalar=-1),
    ),
    Case(
        "Gemma: a number of layers as text",
        ("num_hidden_layers must be",),
        (*DRY, *OTHER),
        other_family("gemma2", num_hidden_layers="two"),
    ),
    Case(
        "GLM: a negative rotary factor",
        ("partial_rotary_factor must be",),
        (*DRY, *OTHER),
        other_family("glm4_moe", partial_rotary_factor=-0.5),
    ),
    Case(
        "GLM: QK norm as text",
        ("use_qk_norm must be true or false",),
        (*DRY, *OTHER),
        other_family("glm4_moe", use_qk_norm="yes"),
    ),
    Case(
        "Llama: a rope factor as text",
        ("high_freq_factor must be",),
        (*DRY, *OTHER),
        other_family("llama", rope_parameters={"rope_type": "llama3", "high_freq_factor": "4"}),
    ),
    # --- files
    Case("no config.json", ("no config.json in FOLDER/model",), prepare=without("config.json")),
    Case(
        "a pointer of Git LFS",
        ("is a pointer of Git LFS", "git lfs pull"),
        prepare=write_file("model.safetensors", LFS),
    ),
    Case(
        "config.json is a Git LFS pointer too",
        ("config.json is a pointer of Git LFS",),
        prepare=write_file("config.json", LFS),
    ),
    Case("a PEFT folder", ("is a folder of PEFT's", "'base'", "merge"), prepare=adapter_only),
    Case("config.json is empty", ("config.json is not valid JSON",), prepare=write_file("config.json", "")),
    Case(
        "config.json has a BOM", ("config.json is not valid JSON", "BOM"), prepare=write_file("config.json", "\ufeff{}")
    ),
    Case(
        "config.json is UTF-16",
        ("config.json is not valid JSON",),
        prepare=write_file("config.json", "{}".encode("utf-16")),
    ),
    Case("config.json is a list", ("config.json holds a list",), prepare=write_file("config.json", "[]")),
    Case("config.json is a number", ("config.json holds a int",), prepare=write_file("config.json", "3")),
    Case(
        "config.json is deeply nested",
        ("config.json is not valid JSON",),
        prepare=write_file("config.json", '{"a": ' * 100000),
    ),
    Case(
        "config.json has a duplicate key",
        ("'hidden_size' twice",),
        prepare=write_file("config.json", '{"hidden_size": 1, "hidden_size": 2}'),
    ),
    Case(
        "config.json has a number of many digits",
        ("config.json is not valid JSON",),
        prepare=write_file("config.json", f'{{"a": {"9" * 5000}}}'),
    ),
    Case("no folder", ("model.path=FOLDER/nowhere", "no such folder"), ("model.path=FOLDER/nowhere",)),
    Case(
        "a file instead of a folder", ("model.path=FOLDER/train.jsonl is a file",), ("model.path=FOLDER/train.jsonl",)
    ),
    Case("no model", ("model.path is not set",), ("model.path=",)),
    Case("no critic", ("critic.path=FOLDER/nowhere", "no such folder"), ("critic.path=FOLDER/nowhere",)),
    Case("a data folder as critic", ("config.json",), ("critic.path=FOLDER",)),
    Case("not a reward model", ("reward.model=FOLDER/nowhere",), ("reward.model=FOLDER/nowhere",)),
    Case("a policy as reward model", ("has no score.weight",), ("reward.model=FOLDER/model",)),
    # --- weights
    Case("no weights", ("safetensors",), prepare=without("model.safetensors")),
    Case(
        "weights in another format",
        ("safetensors",),
        prepare=lambda folder: (folder / "model/model.safetensors").rename(folder / "model/pytorch_model.bin"),
    ),
    Case("weights are empty", ("model.safetensors is truncated",), prepare=write_file("model.safetensors", "")),
    Case(
        "weights are text",
        ("model.safetensors is truncated or not",),
        prepare=write_file("model.safetensors", "these are no weights"),
    ),
    Case("truncated weights", ("model.safetensors is truncated",), prepare=truncated(0.5)),
    Case("weights truncated in the header", ("model.safetensors is truncated",), prepare=truncated(0.0005)),
    Case(
        "a tensor is missing", ("model.norm.weight is missing",), prepare=weights(lambda t: t.pop("model.norm.weight"))
    ),
    Case(
        "an extra tensor",
        ("spare is not part of Qwen3MoeForCausalLM",),
        prepare=weights(lambda t: t.update(spare=t["model.norm.weight"].clone())),
    ),
    Case(
        "a tensor with another shape",
        ("model.norm.weight has shape", "asks for"),
        prepare=weights(lambda t: t.update({"model.norm.weight": t["model.norm.weight"][:7].clone()})),
    ),
    Case("another model's weights", ("FOLDER/model", "not part of"), prepare=change(num_hidden_layers=3)),
    Case("a larger model's config.json", ("are missing",), prepare=change(num_experts=16)),
    Case(
        "an index that is not JSON",
        ("index.json is not valid JSON",),
        prepare=write_file("model.safetensors.index.json", "no"),
    ),
    Case("an index as a list", ("index.json holds a list",), prepare=index([])),
    Case("an index without a map", ("it has no weight_map",), prepare=index({"metadata": {}})),
    Case(
        "an index with a map of numbers", ("which is not a file next to it",), prepare=index({"weight_map": {"a": 3}})
    ),
    Case(
        "an index with a path outside the folder",
        ("'../secret.safetensors'", "not a file next to it"),
        prepare=index({"weight_map": {"a": "../secret.safetensors"}}),
    ),
    Case(
        "an index with an absolute path",
        ("'/etc/passwd'", "not a file next to it"),
        prepare=index({"weight_map": {"a": "/etc/passwd"}}),
    ),
    Case(
        "an index of missing files",
        ("x.safetensors is missing",),
        prepare=index({"weight_map": {"a": "x.safetensors"}}),
    ),
    Case(
        "an index of missing tensors",
        ("lists a in model.safetensors",),
        prepare=index({"weight_map": {"a": "model.safetensors"}}),
    ),
    # --- tokenizers
    Case(
        "no tokenizer",
        ("has no tokenizer", "tokenizer.json"),
        prepare=lambda folder: [path.unlink() for path in (folder / "model").glob("tokenizer*")] and None,
    ),
    Case("an empty tokenizer", ("tokenizer.json is not a tokenizer",), prepare=write_file("tokenizer.json", "")),
    Case(
        "a binary tokenizer",
        ("tokenizer.json is not a tokenizer",),
        prepare=write_file("tokenizer.json", bytes(range(256))),
    ),
    Case(
        "a tokenizer without a model",
        ("tokenizer.json is not a tokenizer",),
        prepare=write_file("tokenizer.json", '{"version": "1.0"}'),
    ),
    Case("a tokenizer as a list", ("tokenizer.json is not a tokenizer",), prepare=write_file("tokenizer.json", "[]")),
    Case(
        "a garbled tokenizer_config",
        ("tokenizer_config.json is not valid JSON",),
        prepare=write_file("tokenizer_config.json", "{"),
    ),
    Case(
        "a garbled generation_config",
        ("generation_config.json is not valid JSON",),
        prepare=write_file("generation_config.json", "{"),
    ),
    Case("a larger model's tokenizer", ("the tokenizer gives", "vocab_size=512"), prepare=change_vocab(512)),
]
