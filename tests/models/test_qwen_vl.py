"""Qwen2.5-VL and Qwen3-VL-MoE: the table against transformers' folders, config.json, SGLang's shards of the tower."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.config import ConfigError, from_dict
from megarl.models import qwen_vl
from megarl.models.config_json import DEFAULTS
from megarl.models.family import StoredSlice
from megarl.models.hf_folder import open_hf, save_hf
from megarl.models.layout_algebra import PADDING
from megarl.models.registry import VISION_FAMILIES, family_of, load_hf_config

sys.path.insert(0, str(Path(__file__).parents[1] / "megatron"))

import tiny  # noqa: E402

pytestmark = pytest.mark.alone

FAMILIES = ("qwen2_5_vl", "qwen3_vl_moe")
MODELS = Path(__file__).parents[2] / "configs/models"


def nested(family: str) -> dict[str, Any]:
    """Return config.json with the text model's keys in `text_config`."""
    hf = dict(tiny.HF[family])
    outer = {key: hf.pop(key) for key in ("architectures", "model_type", "tie_word_embeddings", *tiny.VISION_KEYS)}
    return outer | {"text_config": hf}


def write_config(folder: Path, hf: dict[str, Any]) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(hf))
    return load_hf_config(folder)


def save(family: str, folder: Path) -> dict[str, torch.Tensor]:
    """Write a folder as published, with transposed experts, and return its tensors."""
    tiny.hf_model(family).save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = {name: t.mT.contiguous() if ".experts." in name else t for name, t in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    return tensors


@pytest.mark.parametrize("family", FAMILIES)
def test_reads_and_writes_published_folders(family: str, tmp_path: Path) -> None:
    (source := tmp_path / "source").mkdir()
    stored = save(family, source)
    hf = load_hf_config(source)
    weights = open_hf(source)
    weights.check(hf)
    expected = tiny.hf_tensors(tiny.hf_model(family))
    table = [tensor for param in family_of(hf).params(hf, 1) for tensor in param.hf]
    assert {tensor.name: tensor.shape for tensor in table} == {k: tuple(v.shape) for k, v in expected.items()}
    assert all(torch.equal(weights.get(name), tensor) for name, tensor in expected.items())
    save_hf(tmp_path / "copy", ((tensor.name, weights.get(tensor.name)) for tensor in table), source, dtype=None)
    copied = load_file(tmp_path / "copy/model.safetensors")
    assert copied.keys() == stored.keys() and all(torch.equal(copied[name], stored[name]) for name in stored)
    assert (tmp_path / "copy/config.json").read_bytes() == (source / "config.json").read_bytes()


def test_export_in_another_dtype_changes_nested_dtypes(tmp_path: Path) -> None:
    (source := tmp_path / "source").mkdir()
    save("qwen3_vl_moe", source)
    config = json.loads((source / "config.json").read_text())
    config["text_config"]["dtype"] = "float32"
    write_config(source, config)
    weights, hf = open_hf(source), load_hf_config(source)
    names = [tensor.name for param in family_of(hf).params(hf, 1) for tensor in param.hf]
    save_hf(tmp_path / "copy", ((name, weights.get(name)) for name in names), source, dtype=torch.bfloat16)
    written = json.loads((tmp_path / "copy/config.json").read_text())
    assert (written["dtype"], written["text_config"]["dtype"]) == ("bfloat16", "bfloat16")
    assert written["vision_config"] == config["vision_config"] and "hidden_size" not in written


def test_names_of_modules_are_read_too(tmp_path: Path) -> None:
    """Some tools save Qwen2.5-VL by the names of transformers' modules."""
    stored = save("qwen2_5_vl", tmp_path)
    assert "visual.merger.ln_q.weight" in stored and "model.layers.0.input_layernorm.weight" in stored
    tensors = tiny.hf_tensors(tiny.hf_model("qwen2_5_vl"))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    open_hf(tmp_path).check(load_hf_config(tmp_path))


@pytest.mark.parametrize("family", FAMILIES)
def test_text_config_and_top_level_mean_the_same(family: str, tmp_path: Path) -> None:
    hf = write_config(tmp_path, nested(family))
    flat = tiny.HF[family]
    for derive in ("params", "megatron_config", "gpt_kwargs"):
        arguments = (1,) if derive == "params" else ()
        assert getattr(family_of(hf), derive)(hf, *arguments) == getattr(family_of(flat), derive)(flat, *arguments)
    contradiction = nested(family) | {"hidden_size": 48}
    with pytest.raises(ConfigError, match="hidden_size differs from text_config.hidden_size; remove one of them"):
        write_config(tmp_path, contradiction)


@pytest.mark.parametrize("family", FAMILIES)
def test_either_tie_word_embeddings_ties(family: str, tmp_path: Path) -> None:
    for outer, inner in ((True, False), (False, True), (None, True)):
        hf = nested(family)
        hf["text_config"]["tie_word_embeddings"] = inner
        hf |= {"tie_word_embeddings": outer} if outer is not None else {}
        if outer is None:
            del hf["tie_word_embeddings"]
        read = write_config(tmp_path, hf)
        assert family_of(read).gpt_kwargs(read)["share_embeddings_and_output_weights"]


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_match_transformers(family: str) -> None:
    import transformers

    name = tiny.HF[family]["architectures"][0].partition("For")[0]
    config = getattr(transformers, f"{name}Config")()
    vision = dict(qwen_vl.VISION_DEFAULTS[family])
    vision.pop("rope_parameters")
    for key, value in vision.items():
        default = getattr(config.vision_config, key)
        assert (list(default) if isinstance(default, tuple) else default) == value, key
    defaults = DEFAULTS[name.replace("_", "").lower()]
    for key in tiny.VISION_KEYS[1:]:
        assert defaults[key] == getattr(config, key)
    assert defaults["rope_theta"] == config.text_config.rope_parameters["rope_theta"]


def changes(family: str) -> list[tuple[dict[str, Any], str]]:
    hf = tiny.HF[family]
    vision = hf["vision_config"]
    rope = hf["rope_scaling"]

    def tower(**values: Any) -> dict[str, Any]:
        return {"vision_config": vision | values}

    cases: list[tuple[dict[str, Any], str]] = [
        (tower(unknown=1), "vision_config.unknown=1 is not implemented; known: depth"),
        (tower(in_channels=1), "vision_config.in_channels=1 is not implemented"),
        (tower(temporal_patch_size=1), "vision_config.temporal_patch_size=1 is not implemented"),
        (tower(hidden_act="relu"), "vision_config.hidden_act='relu' is not implemented"),
        (tower(out_hidden_size=64), "out_hidden_size=64, but the text model's hidden_size is 32"),
        (tower(num_heads=3), "hidden_size must be num_heads times a multiple of 4"),
        (tower(depth="2"), "vision_config.depth must be a"),
        (tower(rope_parameters={"rope_theta": 5.0}), "SGLang turns by theta 10000 only"),
        ({"vision_config": None}, "vision_config is missing"),
        ({"image_token_id": 200}, "image_token_id must be a"),
        ({"rope_scaling": rope | {"mrope_section": [1, 1]}}, "must be three numbers with the sum"),
        ({"rope_scaling": rope | {"mrope_section": [1, 1, 1]}}, "must be three numbers with the sum"),
        ({"rope_scaling": rope | {"mrope_interleaved": family == "qwen2_5_vl"}}, "mrope_interleaved must be"),
        ({"rope_scaling": rope | {"rope_type": "yarn", "type": "yarn"}}, "rope_type='yarn' is not implemented"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config is not implemented with a vision tower",
        ),
    ]
    if family == "qwen3_vl_moe":
        cases += [
            (tower(deepstack_visual_indexes=[1, 0, 2]), "deepstack_visual_indexes=.* must ascend"),
            (tower(deepstack_visual_indexes=[0, 1, 7]), "names no layer of 4"),
            (tower(deepstack_visual_indexes=[0, 1]), "SGLang adds features after three decoder layers"),
            (tower(num_position_embeddings=15), "num_position_embeddings must be a square"),
            ({"rope_scaling": rope | {"mrope_section": [1, 4, 3]}}, "cannot be interleaved past the last frequency"),
            ({"norm_topk_prob": False}, "norm_topk_prob"),
        ]
    else:
        cases.append((tower(fullatt_block_indexes=[2]), "names no layer of 2"))
        cases.append((tower(patch_size=16), r"vision_config.patch_size=16 is not implemented \(implemented: 14\)"))
    return cases


@pytest.mark.parametrize(
    ("family", "change", "message"), [(family, *case) for family in FAMILIES for case in changes(family)]
)
def test_refuses_what_is_not_implemented(family: str, change: dict[str, Any], message: str) -> None:
    hf = tiny.HF[family]
    family_of(hf).params(hf, 1)
    with pytest.raises(ConfigError, match=message):
        family_of(hf).params({**hf, **change}, 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_shape_keys_of_the_tower_change_the_table(family: str) -> None:
    hf = tiny.HF[family]
    table = family_of(hf).params(hf, 1)
    larger = {"depth": 5, "intermediate_size": 32, "spatial_merge_size": 1, "num_heads": 4}
    larger |= {"hidden_size": 32, "num_position_embeddings": 25}
    for key in larger.keys() & (hf["vision_config"].keys() | {"spatial_merge_size"}):
        changed = hf | {"vision_config": hf["vision_config"] | {key: larger[key]}}
        assert family_of(hf).params(changed, 1) != table, key


def test_refuses_other_roles_and_layouts() -> None:
    hf, config = tiny.HF["qwen3_vl_moe"], tiny.config()
    family = family_of(hf)
    qwen_vl.check_training(hf, family, config)
    for role in ("critic", "reward_model"):
        with pytest.raises(ConfigError, match="transformers has no sequence classifier of it"):
            qwen_vl.check_training(hf, family, config, role)
    with pytest.raises(ConfigError, match="the first pipeline stage has 2 decoder layers .* after the first 3"):
        qwen_vl.check_training(hf, family, tiny.config(pp=2, world=2))
    adapters = from_dict({"lora": {"rank": 2}, "model": {"freeze_vision_tower": False}})
    with pytest.raises(ConfigError, match="model.freeze_vision_tower=false trains all of the tower, lora.rank"):
        qwen_vl.check_training(hf, family, adapters)
    imprecise = from_dict({"rollout": {"sglang": {"enable_precise_embedding_interpolation": False}}})
    with pytest.raises(ConfigError, match="the engine would place patches elsewhere than the trainer; remove it"):
        qwen_vl.check_training(hf, family, imprecise)
    fused = from_dict({"model": {"megatron": {"apply_rope_fusion": True}}})
    with pytest.raises(ConfigError, match="model.megatron.apply_rope_fusion"):
        qwen_vl.check_training(hf, family, fused)


def test_published_sizes() -> None:
    """7.7 B of text (as Qwen2.5-7B) and 0.68 B of tower; 30.5 B and 0.54 B: the models' names and cards."""
    from megarl.models.registry import param_count

    for file, total, tower in (("qwen2.5_vl_7b", 8.29e9, 0.677e9), ("qwen3_vl_30b_a3b", 31.07e9, 0.539e9)):
        counts = param_count(load_hf_config(MODELS / f"{file}.json"))
        assert sum(counts.values()) == pytest.approx(total, rel=0.002)
        assert counts["vision tower"] == pytest.approx(tower, rel=0.01)


def test_engine_pads_the_width_of_the_tower() -> None:
    """SGLang rounds 20 up to 24 and has up behind gate in one tensor; each of two ranks has 12 of both."""
    up = qwen_vl.EngineParts(24, "width", 24, before=1)
    _, first = up.split([(20, 5)], 2, 0)
    assert [tuple(piece) for piece in first] == [(PADDING, 0, 12), (0, 0, 12)]
    _, second = up.split([(20, 5)], 2, 1)
    assert [tuple(piece) for piece in second] == [(PADDING, 0, 12), (0, 12, 20), (PADDING, 0, 4)]
    qkv = qwen_vl.EngineParts(4, "heads", 16, parts=3)
    _, slices = qkv.split([(48, 16)], 2, 1)
    assert [tuple(piece) for piece in slices] == [(0, 8, 16), (0, 24, 32), (0, 40, 48)]
    with pytest.raises(ConfigError, match="heads=4 does not divide by tensor parallel size 3; sizes that do: 1, 2, 4"):
        qkv.split([(48, 16)], 3, 0)


def test_stacked_experts_are_transposed() -> None:
    hf = tiny.HF["qwen3_vl_moe"]
    stored = family_of(hf).stored_slice
    prefix = "model.language_model.layers.0.mlp.experts"
    gate, up, down = (stored(hf, f"{prefix}.3.{name}_proj.weight") for name in ("gate", "up", "down"))
    assert gate == StoredSlice(f"{prefix}.gate_up_proj", 3, slice(0, 24), transposed=True)
    assert up == StoredSlice(f"{prefix}.gate_up_proj", 3, slice(24, 48), transposed=True)
    assert down == StoredSlice(f"{prefix}.down_proj", 3, slice(None), transposed=True)
    assert stored(hf, "model.visual.pos_embed.weight") is None


def test_vision_families_are_those_with_a_tower() -> None:
    assert VISION_FAMILIES.keys() == {tiny.HF[family]["architectures"][0] for family in FAMILIES}
