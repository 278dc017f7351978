"""INT4 experts: the format of compressed-tensors, its values bit for bit, and a quantiser that reproduces them."""

from __future__ import annotations

import json
import sys
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization.lifecycle.forward import dequantize
from int4_folder import QUANTIZATION, expert_names, quantise_experts, write_model
from kimi_k25_folder import vision_shapes
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "megatron"))
import tiny

from megarl.config import ConfigError
from megarl.models import int4
from megarl.models.config_json import require_common
from megarl.models.hf_folder import open_hf, save_hf
from megarl.models.layout_algebra import shard
from megarl.models.memory import engine_bytes
from megarl.models.registry import family_of, load_hf_config

ROOT = Path(__file__).resolve().parents[2]
HF: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 130,
    "hidden_size": 64,
    "intermediate_size": 16,
    "moe_intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 2,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def random_matrix(seed: int, rows: int = 300, columns: int = 256) -> torch.Tensor:
    """Return a matrix whose groups have heavy and light tails, and many magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    weight *= weight.abs() ** (seed % 3) * torch.exp(3 * torch.randn(rows, 1, generator=generator))
    return weight.bfloat16()


def codes_of(packed: torch.Tensor) -> torch.Tensor:
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1).to(torch.int8) - 8


def test_bits_are_those_of_compressed_tensors() -> None:
    weight = random_matrix(0)
    scales = int4.compute_scales(weight)
    packed = int4.quantise(weight, scales)
    assert torch.equal(pack_to_int32(codes_of(packed), 4).view(torch.uint8), packed)
    expected = dequantize(unpack_from_int32(packed.view(torch.int32), 4, weight.shape), scales)
    actual = int4.dequantise(int4.Int4Matrix(packed, scales))
    assert actual.dtype == expected.dtype == torch.bfloat16 and torch.equal(actual, expected)


@pytest.mark.parametrize("divisor", [7.0, 7.5, 8.0])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_quantiser_reproduces_what_other_quantisers_wrote(divisor: float, seed: int) -> None:
    """With scales from a symmetric range of 7, the middle of both ends, or 8."""
    groups = random_matrix(seed).float().unflatten(1, (-1, 32))
    scales = (groups.abs().amax(-1) / divisor).bfloat16()
    codes = (groups / scales.float()[..., None]).round().clamp(-8, 7).flatten(1)
    stored = dequantize(codes.to(torch.int8), scales)
    again = stored.clone()
    int4.round_to_grid(again)
    assert torch.equal(again, stored) and not torch.equal(stored, groups.flatten(1).bfloat16())


@pytest.mark.parametrize("seed", range(6))
def test_rounding_is_idempotent_close_and_independent_of_the_part(seed: int) -> None:
    weight = random_matrix(seed)
    rounded = weight.clone()
    int4.round_to_grid(rounded)
    scales = int4.compute_scales(weight)
    assert torch.equal(int4.dequantise(int4.Int4Matrix(int4.quantise(weight, scales), scales)), rounded)
    again = rounded.clone()
    int4.round_to_grid(again)
    assert torch.equal(again, rounded)
    # Not worse than the largest magnitude over 7, by definition of the search.
    groups, values = weight.float().unflatten(1, (-1, 32)), rounded.float().unflatten(1, (-1, 32))
    plain = (groups.abs().amax(-1, keepdim=True) / 7).bfloat16().float()
    plain_values = ((groups / plain).round().clamp(-8, 7) * plain).bfloat16().float()
    error, plain_error = (((x - groups).double() ** 2).sum(-1) for x in (values, plain_values))
    assert bool((error <= plain_error * (1 + 1e-5)).all()) and float((error < 0.9 * plain_error).double().mean()) > 0.1
    part = weight[17:20, 32:128].clone()
    int4.round_to_grid(part)
    assert torch.equal(part, rounded[17:20, 32:128])


def test_groups_of_zeros_tiny_and_not_finite_numbers() -> None:
    weight = torch.zeros(5, 32, dtype=torch.bfloat16)
    weight[1] = 1e-38
    weight[2, 3], weight[3, 4], weight[4, 5] = torch.nan, torch.inf, -3.0
    int4.round_to_grid(weight)
    assert torch.equal(weight[:2], torch.zeros(2, 32, dtype=torch.bfloat16))
    assert bool(weight[2:4].isnan().all()) and float(weight[4, 5]) == -3.0 and float(weight[4].abs().sum()) == 3.0
    with pytest.raises(ValueError, match=r"\[2, 40\] does not consist of groups of 32"):
        int4.compute_scales(torch.zeros(2, 40))


def quantised_folder(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    table = family_of(HF).params(HF, 1)
    write_model(
        tmp_path / "plain", HF, {t.name: torch.randn(t.shape, generator=generator) for p in table for t in p.hf}
    )
    return tmp_path / "int4", quantise_experts(tmp_path / "plain", tmp_path / "int4")


def test_reads_folder_slice_by_slice_and_exports_bfloat16(tmp_path: Path) -> None:
    folder, dense = quantised_folder(tmp_path)
    weights, hf = open_hf(folder), HF | {"quantization_config": QUANTIZATION}
    weights.check(hf)
    assert sorted(weights.names()) == sorted(dense)
    for param in family_of(hf).params(hf, 1):
        for parts in (1, 2) if param.expert is None else (1, 2, 3, 4):  # 4 cut through groups
            for rank in range(parts):
                expected = shard(param, dense, parts, rank)
                assert torch.equal(weights.get_shard(param, parts, rank), expected), param.megatron
    save_hf(tmp_path / "out", ((name, weights.get_lazy(name)) for name in weights.names()), folder)
    exported = load_file(tmp_path / "out/model.safetensors")
    assert exported.keys() == dense.keys() and all(torch.equal(exported[name], dense[name]) for name in dense)
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())


def test_kimi_k25_is_its_language_model(tmp_path: Path) -> None:
    """Its tensors have a prefix, its options are in text_config, and the vision tower is exported as it was."""
    text = {key: value for key, value in tiny.HF["kimi_k2"].items() if key != "architectures"}
    text |= {"hidden_size": 64, "moe_intermediate_size": 64, "model_type": "kimi_k2", "rms_norm_eps": 1e-5}
    flat = text | {"architectures": ["DeepseekV3ForCausalLM"]}
    generator = torch.Generator().manual_seed(1)
    table = family_of(flat).params(flat, 1)
    tensors = {t.name: torch.randn(t.shape, generator=generator) for p in table for t in p.hf}
    write_model(tmp_path / "plain", flat, tensors)
    dense = quantise_experts(tmp_path / "plain", tmp_path / "k2")
    stored = {f"language_model.{name}": value for name, value in load_file(tmp_path / "k2/model.safetensors").items()}
    vision = {"vision_tower.patch_embed.proj.weight": torch.randn(3, 2), "mm_projector.pre_norm.bias": torch.ones(4)}
    config = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "dtype": "bfloat16"}
    config |= {"text_config": text | {"quantization_config": QUANTIZATION}, "vision_config": {"patch_size": 14}}
    write_model(tmp_path / "k25", config, stored | vision)
    hf = load_hf_config(tmp_path / "k25")
    family, weights = family_of(hf), open_hf(tmp_path / "k25")
    assert int4.is_int4(hf) and family.parser(hf) == "kimi_k2"
    assert family.megatron_config(hf) == family_of(flat).megatron_config(flat)
    weights.check(hf)
    assert [param.hf for param in family.params(hf, 1)] == [param.hf for param in table]
    for param in table:
        assert torch.equal(weights.get_shard(param, 1, 0), shard(param, dense, 1, 0)), param.megatron
    save_hf(tmp_path / "out", ((name, weights.get(name)) for name in dense), tmp_path / "k25")
    exported = load_file(tmp_path / "out/model.safetensors")
    expected = {f"language_model.{name}": value for name, value in dense.items()} | vision
    assert exported.keys() == expected.keys() and all(torch.equal(exported[name], expected[name]) for name in expected)
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written == config | {"text_config": text}
    write_model(tmp_path / "half", config, {name: value for name, value in stored.items() if "lm_head" not in name})
    with pytest.raises(ConfigError, match="lm_head.weight is missing"):
        open_hf(tmp_path / "half").check(hf)


def test_kimi_k25_engines_have_the_whole_tower() -> None:
    """So many weights as the published folder has for the tower, on each rank; no multi-token prediction layer."""
    hf = load_hf_config(ROOT / "configs/models/kimi_k2.5.json")
    elements = sum(prod(shape) for shape in vision_shapes(hf["vision_config"]).values())
    assert elements == 471_143_920
    text = {key: value for key, value in hf.items() if key != "vision_config"} | {"model_type": "kimi_k2"}
    language_model = engine_bytes(text | {"architectures": ["DeepseekV3ForCausalLM"]}, 32, 2)
    assert engine_bytes(hf, 32, 2) == language_model + 2 * elements
    assert family_of(hf).engine_settings["enable_multimodal"] is False
    with pytest.raises(ConfigError, match="num_nextn_predict_layers=1 is not implemented: SGLang has no draft model"):
        family_of(hf).check(hf | {"num_nextn_predict_layers": 1})


def test_rejects_folders_that_config_json_does_not_describe(tmp_path: Path) -> None:
    folder, _ = quantised_folder(tmp_path)
    hf = HF | {"quantization_config": QUANTIZATION}
    with pytest.raises(ConfigError, match="INT4, but config.json does not say so"):
        open_hf(folder).check(HF)
    with pytest.raises(ConfigError, match="not INT4; remove quantization_config"):
        open_hf(tmp_path / "plain").check(hf)
    tensors, name = load_file(folder / "model.safetensors"), min(expert_names(HF))

    def write(changes: dict[str, torch.Tensor]) -> None:
        save_file({**tensors, **changes}, folder / "model.safetensors", {"format": "pt"})

    write({name + "_scale": tensors[name + "_scale"][:, :1].contiguous()})
    with pytest.raises(ConfigError, match=r"_scale has shape .* needs"):
        open_hf(folder).check(hf)
    write({name + "_scale": tensors[name + "_scale"].float()})
    with pytest.raises(ConfigError, match="stored as I32 with scales in F32"):
        open_hf(folder).check(hf)
    attention = "model.layers.0.self_attn.o_proj.weight"
    write({attention + "_packed": torch.zeros(64, 8, dtype=torch.int32)})
    with pytest.raises(ConfigError, match="o_proj.weight is INT4, but only routed experts"):
        open_hf(folder).check(hf)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"format": "int-quantized"}, "format='int-quantized'"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ({"config_groups": {}}, "exactly one of config_groups"),
        ({"ignore": 3}, "ignore of quantization_config"),
        ({"linear_fp8_config": {"quant_method": "fp8"}}, "linear_fp8_config"),
        *(
            ({"weights": {key: value}}, f"weights.{key}={value!r}")
            for key, value in (
                ("num_bits", 8),
                ("group_size", 128),
                ("symmetric", False),
                ("strategy", "channel"),
                ("type", "float"),
                ("actorder", "group"),
                ("dynamic", True),
            )
        ),
    ],
)
def test_other_quantisations_are_rejected_by_name(changes: dict[str, Any], key: str) -> None:
    changed = json.loads(json.dumps(QUANTIZATION))
    changed["config_groups"]["group_0"]["weights"] |= changes.pop("weights", {})
    assert int4.is_int4({"quantization_config": QUANTIZATION})
    with pytest.raises(ConfigError, match=key.replace("(", r"\(")):
        require_common(HF | {"quantization_config": changed | changes})


def test_memory_plan_counts_codes_and_scales() -> None:
    experts = sum(param.size for param in family_of(HF).params(HF, 1) if param.expert is not None)
    plain, quantised = (engine_bytes(hf, 2, 2) for hf in (HF, HF | {"quantization_config": QUANTIZATION}))
    assert plain - quantised == experts // 2 * (2 - 0.5 - 2 / 32)
    assert np.isclose(
        experts * 0.5625,
        sum(
            packed.numel() + 2 * scales.numel()
            for packed, scales in (
                (torch.empty(t.shape[0], t.shape[1] // 2), torch.empty(t.shape[0], t.shape[1] // 32))
                for p in family_of(HF).params(HF, 1)
                if p.expert is not None
                for t in p.hf
            )
        ),
    )
