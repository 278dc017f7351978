"""Qwen2.5-VL and Qwen3-VL-MoE: the text models of Qwen2 and Qwen3-MoE behind a vision tower.

The tower is transformers' module (`megatron/vision.py`). Every tensor parallel rank of the first pipeline stage holds
all of it, and SGLang shards it. Images enter as features in place of the embeddings of image tokens. Qwen3-VL also adds
features of earlier layers of the tower to the states after the first decoder layers ("deepstack", arXiv:2406.04334).

Positions are triples of time, row and column ("mrope"). Qwen2.5-VL rotates runs of a head's frequencies by each of the
three, `mrope_section` frequencies long; Qwen3-VL interleaves the three.

Qwen2.5-VL's published config.json has the text model's keys beside `vision_config`, Qwen3-VL's has them in
`text_config`. `load_hf_config` moves the latter to the top level.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from megarl.config import Config, ConfigError
from megarl.config.strict import Range, check_value, short_repr
from megarl.models import blocks, gqa
from megarl.models.config_json import Heads, Layers, Size, need, require, require_default_rope
from megarl.models.family import Family, StoredSlice, VisionFamily
from megarl.models.layout_algebra import (
    PADDING,
    TOWER,
    EngineSlot,
    EngineVocabSharding,
    HFConfig,
    HFTensor,
    IndivisibleError,
    Param,
    Replicated,
    Sharding,
    ShardSpec,
    Slice,
)
from megarl.models.pipeline_stages import stage_layers

ENGINE_SETTINGS = {"enable_precise_embedding_interpolation": True}
"""SGLang's settings with which Qwen3-VL's tower scales its position embeddings to an image as transformers does."""
MROPE = "mrope_section", "mrope_interleaved"
TOKENS = "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"

_DEFAULTS: dict[str, Any] = {
    "depth": 32,
    "hidden_size": 3584,
    "hidden_act": "silu",
    "intermediate_size": 3420,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "tokens_per_second": 4,
    "window_size": 112,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "initializer_range": 0.02,
    "rope_parameters": None,
}
_DEFAULTS_3: dict[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
    "initializer_range": 0.02,
    "rope_parameters": None,
}
VISION_DEFAULTS = {"qwen2_5_vl": _DEFAULTS, "qwen3_vl_moe": _DEFAULTS_3}
"""Defaults of `vision_config` by model_type, from its configuration class in transformers."""
_VISION_FIELDS: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "out_hidden_size", "num_position_embeddings"), Size),
    **dict.fromkeys(("patch_size", "spatial_merge_size", "window_size", "tokens_per_second"), Size),
    "depth": Layers,
    "num_heads": Heads,
    "hidden_act": str,
    **dict.fromkeys(("deepstack_visual_indexes", "fullatt_block_indexes"), list[int]),
}
_IGNORED = frozenset("model_type dtype torch_dtype transformers_version in_chans spatial_patch_size".split())
"""Keys of `vision_config` that neither transformers nor SGLang reads for these models."""


def vision_config(hf: HFConfig) -> dict[str, Any]:
    """Return `vision_config` with transformers' defaults. Raises ConfigError for what is not implemented."""
    given, defaults = hf.get("vision_config"), VISION_DEFAULTS[str(hf["model_type"])]
    if not isinstance(given, Mapping):
        raise _error(hf, "vision_config is missing")
    for key, value in given.items():
        if key not in defaults and key not in _IGNORED:
            raise _error(
                hf, f"vision_config.{key}={short_repr(value)} is not implemented; known: {', '.join(defaults)}"
            )
        if key in _VISION_FIELDS:
            check_value(value, _VISION_FIELDS[key], f"config.json of {_name(hf)}: vision_config.{key}")
    values = {key: given.get(key, default) for key, default in defaults.items()}
    fixed = {"in_channels": 3, "temporal_patch_size": 2, "hidden_act": defaults["hidden_act"]}
    if hf["model_type"] == "qwen2_5_vl":
        fixed["patch_size"] = 14  # SGLang takes patches of another size for finished features
    for key, value in fixed.items():
        if values[key] != value:
            raise _error(hf, f"vision_config.{key}={short_repr(values[key])} is not implemented (implemented: {value})")
    rope = values["rope_parameters"] or {}
    if (rope.get("rope_type", "axial"), rope.get("rope_theta", 10000.0)) != ("axial", 10000.0):
        raise _error(hf, f"vision_config.rope_parameters={short_repr(rope)}: SGLang turns by theta 10000 only")
    if values["hidden_size"] % values["num_heads"] or values["hidden_size"] // values["num_heads"] % 4:
        raise _error(hf, "vision_config: hidden_size must be num_heads times a multiple of 4")
    if values["out_hidden_size"] != need(hf, "hidden_size"):
        raise _error(
            hf,
            f"vision_config.out_hidden_size={values['out_hidden_size']}, but the text model's hidden_size is "
            f"{need(hf, 'hidden_size')}",
        )
    for key in ("deepstack_visual_indexes", "fullatt_block_indexes"):
        if any(not 0 <= layer < values["depth"] for layer in values.get(key) or ()):
            raise _error(hf, f"vision_config.{key}={short_repr(values[key])} names no layer of {values['depth']}")
    stacked = values.get("deepstack_visual_indexes") or ()
    if list(stacked) != sorted(set(stacked)) or len(stacked) > need(hf, "num_hidden_layers"):
        raise _error(
            hf, f"vision_config.deepstack_visual_indexes={short_repr(stacked)} must ascend, one decoder layer each"
        )
    if "deepstack_visual_indexes" in defaults and len(stacked) != 3:
        raise _error(
            hf,
            f"vision_config.deepstack_visual_indexes={short_repr(stacked)}: SGLang adds features after three decoder "
            "layers, whatever their number",
        )
    side = round(values.get("num_position_embeddings", 1) ** 0.5)
    if side * side != values.get("num_position_embeddings", 1):
        raise _error(hf, "vision_config.num_position_embeddings must be a square")
    return values


def text_config(hf: HFConfig) -> dict[str, Any]:
    """Return the text model's config as that of a model without images: one position per token."""
    text = {key: value for key, value in hf.items() if key not in ("vision_config", *TOKENS)}
    for block in ("rope_scaling", "rope_parameters"):
        if isinstance(options := text.get(block), Mapping):
            plain = {key: value for key, value in options.items() if key not in MROPE}
            plain |= {key: "default" for key in ("type", "rope_type") if plain.get(key) == "mrope"}
            text[block] = plain
    return text


def mrope_section(hf: HFConfig) -> list[int]:
    """Return the number of frequencies of time, row and column. Raises ConfigError unless they are those of a head."""
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    section, frequencies = rope.get("mrope_section"), blocks.head_dim(text_config(hf)) // 2
    check_value(section, list[int] | None, f"config.json of {_name(hf)}: mrope_section")
    if section is None or len(section) != 3 or min(section) < 1 or sum(section) != frequencies:
        raise _error(hf, f"mrope_section={short_repr(section)} must be three numbers with the sum {frequencies}")
    return section


def _check(hf: HFConfig, text: Family, is_interleaved: bool) -> None:
    if hf.get("quantization_config"):
        raise _error(hf, "quantization_config is not implemented with a vision tower; convert the model to bfloat16")
    require_default_rope(text_config(hf), "a model with a vision tower rotates by rows and columns, too")
    text.check(text_config(hf))
    for key in TOKENS:
        check_value(
            need(hf, key), Annotated[int, Range(0, need(hf, "vocab_size") - 1)], f"config.json of {_name(hf)}: {key}"
        )
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if bool(rope.get("mrope_interleaved")) != is_interleaved:
        value = "true" if is_interleaved else "false"
        raise _error(hf, f"mrope_interleaved must be {value}: transformers computes nothing else")
    section = mrope_section(hf)
    if is_interleaved and max(section[1:]) * 3 > sum(section):
        raise _error(hf, f"mrope_section={section}: rows and columns cannot be interleaved past the last frequency")
    vision_config(hf)


def _name(hf: HFConfig) -> str:
    return str((hf.get("architectures") or [hf["model_type"]])[0])


def _error(hf: HFConfig, problem: str) -> ConfigError:
    return ConfigError(f"config.json of {_name(hf)}: {problem}")


# --- the tower's table


@dataclass(frozen=True)
class EngineParts(Sharding):
    """SGLang's sharding of a source that consists of `parts` equal parts, such as q, k and v.

    Each part is padded to `padded` rows (columns if `dim` is 1) and sharded by `units`; a shard has its block of each.
    `before` equally large parts of other sources precede it in the engine's tensor.
    """

    units: int
    unit_name: str
    padded: int
    parts: int = 1
    before: int = 0
    dim: int = 0

    def split(self, sources: Sequence[tuple[int, ...]], tp: int, rank: int) -> ShardSpec:
        if self.units % tp or self.padded % tp:
            sizes = ", ".join(str(n) for n in range(1, self.units + 1) if self.units % n == self.padded % n == 0)
            problem = f"{self.unit_name}={self.units} does not divide by tensor parallel size {tp}"
            raise IndivisibleError(f"{problem}; sizes that do: {sizes}")
        size, local = sources[0][self.dim] // self.parts, self.padded // tp
        slices = [Slice(PADDING, 0, local)] * self.before
        for part in range(self.parts):
            start, stop = min(size, rank * local), min(size, (rank + 1) * local)
            slices += [Slice(0, part * size + start, part * size + stop), Slice(PADDING, 0, local - (stop - start))]
        return ShardSpec(self.dim, tuple(piece for piece in slices if piece.stop > piece.start))


class _Tower:
    """Builds the rows of a tower: canonical names, HF names behind `hf_prefix`, and SGLang's."""

    def __init__(self, vision: Mapping[str, Any], hf_prefix: str) -> None:
        self.vision, self.hf_prefix = vision, hf_prefix
        self.rows: list[Param] = []

    def add(self, name: str, shape: tuple[int, ...], sharding: Sharding | None = None, slot: str = "") -> None:
        tensor = HFTensor(self.hf_prefix + name, shape)
        engine = EngineSlot(TOWER + (slot or name), sharding or Replicated(), "attention")
        self.rows.append(Param(TOWER + name, (tensor,), Replicated(), engine))

    def linear(
        self, name: str, rows: int, columns: int, by: Sharding | None, slot: str = "", bias: Sharding | None = None
    ) -> None:
        self.add(f"{name}.weight", (rows, columns), by, slot and f"{slot}.weight")
        self.add(f"{name}.bias", (rows,), bias, slot and f"{slot}.bias")

    def column(self, name: str, rows: int, columns: int, width: str, slot: str = "", **parts: int) -> None:
        by = EngineParts(rows, width, parts.pop("padded", rows), **parts)
        self.linear(name, rows, columns, by, slot, by)

    def row(self, name: str, rows: int, columns: int, width: str, padded: int = 0) -> None:
        self.linear(name, rows, columns, EngineParts(columns, width, padded or columns, dim=1))

    def attention(self, name: str) -> None:
        hidden, heads = self.vision["hidden_size"], self.vision["num_heads"]
        by = EngineParts(heads, "vision_config.num_heads", hidden, parts=3)
        self.linear(f"{name}.qkv", 3 * hidden, hidden, by, f"{name}.qkv_proj", by)
        self.linear(f"{name}.proj", hidden, hidden, EngineParts(heads, "vision_config.num_heads", hidden, dim=1))

    def norm(self, name: str, size: int, bias: bool) -> None:
        for kind in ("weight", "bias") if bias else ("weight",):
            self.add(f"{name}.{kind}", (size,))

    def patch_shape(self) -> tuple[int, ...]:
        vision = self.vision
        return vision["hidden_size"], 3, vision["temporal_patch_size"], vision["patch_size"], vision["patch_size"]


def _qwen2_5_tower(hf: HFConfig) -> list[Param]:
    vision = vision_config(hf)
    hidden, ffn, width = vision["hidden_size"], vision["intermediate_size"], "vision_config.intermediate_size"
    merged, padded = hidden * vision["spatial_merge_size"] ** 2, -(-ffn // 8) * 8  # SGLang pads the MLP's width
    tower = _Tower(vision, "model.visual.")
    tower.add("patch_embed.proj.weight", tower.patch_shape())
    for layer in range(vision["depth"]):
        block = f"blocks.{layer}"
        tower.norm(f"{block}.norm1", hidden, bias=False)
        tower.norm(f"{block}.norm2", hidden, bias=False)
        tower.attention(f"{block}.attn")
        for before, name in enumerate(("gate_proj", "up_proj")):
            by = EngineParts(padded, width, padded, before=before)
            tower.linear(f"{block}.mlp.{name}", ffn, hidden, by, f"{block}.mlp.gate_up_proj", by)
        tower.row(f"{block}.mlp.down_proj", hidden, ffn, width, padded)
    tower.norm("merger.ln_q", hidden, bias=False)
    tower.column("merger.mlp.0", merged, merged, "vision_config.hidden_size")
    tower.row("merger.mlp.2", vision["out_hidden_size"], merged, "vision_config.hidden_size")
    return tower.rows


def _qwen3_tower(hf: HFConfig) -> list[Param]:
    vision = vision_config(hf)
    hidden, ffn, width = vision["hidden_size"], vision["intermediate_size"], "vision_config.intermediate_size"
    merged = hidden * vision["spatial_merge_size"] ** 2
    tower = _Tower(vision, "model.visual.")
    tower.add("patch_embed.proj.weight", tower.patch_shape())
    tower.add("patch_embed.proj.bias", (hidden,))
    tower.add("pos_embed.weight", (vision["num_position_embeddings"], hidden), EngineVocabSharding())
    for layer in range(vision["depth"]):
        block = f"blocks.{layer}"
        tower.norm(f"{block}.norm1", hidden, bias=True)
        tower.norm(f"{block}.norm2", hidden, bias=True)
        tower.attention(f"{block}.attn")
        tower.column(f"{block}.mlp.linear_fc1", ffn, hidden, width)
        tower.row(f"{block}.mlp.linear_fc2", hidden, ffn, width)
    mergers = [f"deepstack_merger_list.{number}" for number in range(len(vision["deepstack_visual_indexes"]))]
    for name in ("merger", *mergers):
        tower.norm(f"{name}.norm", hidden if name == "merger" else merged, bias=True)
        tower.column(f"{name}.linear_fc1", merged, merged, "vision_config.hidden_size")
        tower.row(f"{name}.linear_fc2", vision["out_hidden_size"], merged, "vision_config.hidden_size")
    return tower.rows


# --- the families


TEXT_PREFIX = "model.language_model."
_QWEN2_5_VISION = VisionFamily(_qwen2_5_tower, vision_config, is_interleaved=False, text_prefix=TEXT_PREFIX)
_QWEN3_VISION = VisionFamily(_qwen3_tower, vision_config, is_interleaved=True, text_prefix=TEXT_PREFIX)


def _gpt_kwargs(hf: HFConfig) -> dict[str, Any]:
    return blocks.gpt_kwargs(text_config(hf)) | dict(position_embedding_type="mrope")


def _qwen2_5_check(hf: HFConfig) -> None:
    _check(hf, gqa.QWEN2, is_interleaved=False)


def _qwen2_5_config(hf: HFConfig) -> dict[str, Any]:
    _qwen2_5_check(hf)
    return gqa.QWEN2.megatron_config(text_config(hf)) | dict(mrope_section=mrope_section(hf))


def _qwen2_5_layer(hf: HFConfig, layer: int, experts: Iterable[int]) -> list[Param]:
    return _QWEN2_5_VISION.rename(gqa.QWEN2.layer(text_config(hf), layer, experts))


def _qwen2_5_stored(hf: HFConfig, name: str) -> StoredSlice | None:
    """Map the names of transformers' modules, which PEFT uses, to those of published checkpoints."""
    for prefix, stored in (("model.visual.", "visual."), (TEXT_PREFIX, "model.")):
        if name.startswith(prefix):
            return StoredSlice(stored + name.removeprefix(prefix))
    return None


QWEN2_5_VL = Family(
    "Qwen2_5_VLForConditionalGeneration",
    "qwen2_5_vl",
    _qwen2_5_check,
    _qwen2_5_config,
    _gpt_kwargs,
    _qwen2_5_layer,
    lambda hf: 0,
    tool_call_parser="qwen25",
    stored_slice=_qwen2_5_stored,
    engine_settings=ENGINE_SETTINGS,
    vision=_QWEN2_5_VISION,
)


def _qwen3_check(hf: HFConfig) -> None:
    _check(hf, gqa.QWEN3_MOE, is_interleaved=True)
    require(hf, "norm_topk_prob", True)  # transformers does not read it


def _qwen3_config(hf: HFConfig) -> dict[str, Any]:
    _qwen3_check(hf)
    return gqa.QWEN3_MOE.megatron_config(text_config(hf)) | dict(mrope_section=mrope_section(hf))


def _qwen3_layer(hf: HFConfig, layer: int, experts: Iterable[int]) -> list[Param]:
    return _QWEN3_VISION.rename(gqa.QWEN3_MOE.layer(text_config(hf), layer, experts))


def _qwen3_stored(hf: HFConfig, name: str) -> StoredSlice | None:
    """Map an expert's tensor to the stacks of published checkpoints: gate above up, each matrix transposed."""
    stack, _, rest = name.partition(".experts.")
    if not rest:
        return None
    number, matrix, _ = rest.split(".")
    ffn = need(hf, "moe_intermediate_size")
    rows = {"gate_proj": slice(0, ffn), "up_proj": slice(ffn, 2 * ffn), "down_proj": slice(None)}[matrix]
    stored = "down_proj" if matrix == "down_proj" else "gate_up_proj"
    return StoredSlice(f"{stack}.experts.{stored}", int(number), rows, transposed=True)


QWEN3_VL_MOE = Family(
    "Qwen3VLMoeForConditionalGeneration",
    "qwen3_vl_moe",
    _qwen3_check,
    _qwen3_config,
    _gpt_kwargs,
    _qwen3_layer,
    lambda hf: gqa.QWEN3_MOE.num_experts(text_config(hf)),
    tool_call_parser="qwen25",
    stored_slice=_qwen3_stored,
    engine_settings=ENGINE_SETTINGS,
    vision=_QWEN3_VISION,
)


def check_training(hf: HFConfig, family: Family, config: Config, role: str = "actor") -> None:
    """Raise ConfigError if a model with a vision tower cannot be trained with this configuration."""
    if (vision := family.vision) is None:
        return
    name = hf["architectures"][0]
    if role != "actor":
        raise ConfigError(
            f"{name} as a {role.replace('_', ' ')} is not implemented: transformers has no sequence classifier of it, "
            "in which form these are saved; use an algorithm without one, such as grpo"
        )
    if config.model.megatron.get("apply_rope_fusion"):
        raise ConfigError(
            "model.megatron.apply_rope_fusion: Transformer Engine's kernel turns each token by its index in the "
            f"sequence, but {name} has positions in rows and columns; remove it"
        )
    for key, value in ENGINE_SETTINGS.items():
        if config.rollout.sglang.get(key, value) != value:
            raise ConfigError(
                f"rollout.sglang.{key}={config.rollout.sglang[key]}: the engine would place patches elsewhere than the "
                "trainer; remove it"
            )
    if config.lora.rank and not config.model.freeze_vision_tower:
        raise ConfigError(
            "model.freeze_vision_tower=false trains all of the tower, lora.rank adapters of the language model alone; "
            "set freeze_vision_tower to true, or lora.rank to 0"
        )
    stacked = len(vision.config(hf).get("deepstack_visual_indexes") or ())
    first = stage_layers(int(hf["num_hidden_layers"]), config.parallel.pp, config.model.megatron, config.parallel.vpp)[
        0
    ]
    if len(first) // config.parallel.vpp < stacked:
        raise ConfigError(
            f"the first pipeline stage has {len(first) // config.parallel.vpp} decoder layers in its first part, but "
            f"{name} adds features of images after the first {stacked}; lower parallel.pp or parallel.vpp, or set "
            "model.megatron.num_layers_in_first_pipeline_stage"
        )
