"""HF folders: bitwise round trips, errors for incomplete or foreign folders, and no partial results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.config import ConfigError
from megarl.models import registry
from megarl.models.family import StoredSlice, classifier_config
from megarl.models.hf_folder import LazyTensor, open_hf, save_hf
from megarl.models.layout_algebra import shard
from megarl.models.memory import critic_params
from megarl.models.registry import family_of

pytestmark = pytest.mark.alone

MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 130,
    "hidden_size": 8,
    "intermediate_size": 16,
    "moe_intermediate_size": 4,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 2,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
MLA: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 20,
    "hidden_size": 8,
    "intermediate_size": 16,
    "moe_intermediate_size": 4,
    "num_hidden_layers": 1,
    "first_k_dense_replace": 0,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 2,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 4,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
    "num_nextn_predict_layers": 1,
    "torch_dtype": "bfloat16",
}


def random_tensors(hf: dict[str, Any]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        tensor.name: torch.randn(tensor.shape, generator=generator)
        for param in family_of(hf).params(hf, 1)
        for tensor in param.hf
    }


def write_source(folder: Path, hf: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("not copied")
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "source", MOE, random_tensors(MOE))


def assert_equal(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    weights = open_hf(folder)
    assert sorted(weights.names()) == sorted(tensors)
    for name, tensor in tensors.items():
        read = weights.get(name)
        assert read.dtype == tensor.dtype and torch.equal(read, tensor), name


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3", "activation_scheme": "dynamic"}
WIDE = {**MOE, "hidden_size": 200, "intermediate_size": 320, "head_dim": 64, "quantization_config": FP8}
WIDE |= {"moe_intermediate_size": 144}


def quantize_fp8(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the tensors of an FP8 checkpoint, and their values dequantized block by block."""
    quantized, dequantized = {}, {}
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight"):
            quantized[name] = dequantized[name] = tensor.bfloat16()
            continue
        rows, columns = tensor.shape
        scales = 0.5 + torch.rand(-(-rows // 128), -(-columns // 128))
        q = tensor.to(torch.float8_e4m3fn)
        value = torch.empty(rows, columns)
        for i in range(len(scales)):
            for j in range(scales.shape[1]):
                block = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
                value[block] = q[block].float() * scales[i, j]
        quantized[name], quantized[f"{name}_scale_inv"], dequantized[name] = q, scales, value.bfloat16()
    return quantized, dequantized


def test_saves_classifier_from_policy_folder(source: Path, tmp_path: Path) -> None:
    """The classifier has its own table and config.json and can itself be the source of another."""
    tensors = {name: value for name, value in random_tensors(MOE).items() if name != "lm_head.weight"}
    tensors["score.weight"] = torch.randn(1, 8)
    table = critic_params(family_of(MOE).params(MOE, 1), 8)
    config = classifier_config(MOE, "Qwen3MoeForCausalLM", 3)
    for start, folder in ((source, tmp_path / "first"), (tmp_path / "first", tmp_path / "second")):
        save_hf(folder, tensors.items(), start, table=table, config=config)
        assert json.loads((folder / "config.json").read_text()) == config
        assert (folder / "tokenizer.json").is_file()
        assert_equal(folder, tensors)
        open_hf(folder).check(config, optional=("score.weight", "lm_head.weight"))
    with pytest.raises(ConfigError, match="lm_head.weight is repeated or not part of"):
        save_hf(tmp_path / "third", random_tensors(MOE).items(), source, table=table, config=config)


def test_reads_fp8_dequantized(tmp_path: Path) -> None:
    quantized, dequantized = quantize_fp8(random_tensors(WIDE))
    source = write_source(tmp_path / "fp8", WIDE, quantized)
    assert_equal(source, dequantized)
    weights = open_hf(source)
    weights.check(WIDE)
    for param in family_of(WIDE).params(WIDE, 2):
        for rank in range(2):  # shards that begin and end within blocks
            full = {tensor.name: dequantized[tensor.name] for tensor in param.hf}
            assert torch.equal(weights.get_shard(param, 2, rank), shard(param, full, 2, rank)), param.megatron
    save_hf(tmp_path / "out", dequantized.items(), source)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert_equal(tmp_path / "out", dequantized)


def test_refuses_fp8_without_matching_scales(tmp_path: Path) -> None:
    quantized, _ = quantize_fp8(random_tensors(WIDE))
    scales = "model.layers.1.mlp.experts.0.up_proj.weight_scale_inv"
    assert quantized[scales].shape == (2, 2)
    cases = {
        "missing": ({n: t for n, t in quantized.items() if n != scales}, WIDE, f"{scales} is missing"),
        "truncated": (quantized | {scales: quantized[scales][:1].clone()}, WIDE, rf"{scales} has shape \(1, 2\)"),
        "undeclared": (
            quantized,
            {k: v for k, v in WIDE.items() if k != "quantization_config"},
            "no quantization_config",
        ),
    }
    for name, (tensors, hf, message) in cases.items():
        with pytest.raises(ConfigError, match=message):
            open_hf(write_source(tmp_path / name, hf, tensors)).check(hf)


@pytest.mark.parametrize("max_shard_bytes", [4 << 30, 2000])
def test_round_trip_is_bitwise(source: Path, tmp_path: Path, max_shard_bytes: int) -> None:
    tensors = random_tensors(MOE)
    tensors["model.norm.weight"][:2] = torch.tensor([float("inf"), -0.0])
    folder = tmp_path / "deep" / "export"
    save_hf(folder, tensors.items(), source, max_shard_bytes=max_shard_bytes)
    assert_equal(folder, tensors)
    open_hf(folder).check(MOE)
    assert torch.signbit(open_hf(folder).get("model.norm.weight")[1])
    files = sorted(path.name for path in folder.iterdir())
    if max_shard_bytes == 2000:
        shards = [name for name in files if name.startswith("model-")]
        assert len(shards) > 3 and shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
        largest = max(tensor.nbytes for tensor in tensors.values())
        assert all(sum(t.nbytes for t in load_file(folder / s).values()) <= max(2000, largest) for s in shards)
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
        files = [name for name in files if name not in (*shards, "model.safetensors.index.json")]
    else:
        files.remove("model.safetensors")
    assert files == ["config.json", "tokenizer.json"]
    assert (folder / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert [path.name for path in folder.parent.iterdir()] == ["export"]


def test_cast_updates_config_and_writes_views_of_one_buffer(source: Path, tmp_path: Path) -> None:
    tensors = random_tensors(MOE)
    buffer = torch.cat([tensor.flatten() for tensor in tensors.values()])
    parts = buffer.split([tensor.numel() for tensor in tensors.values()])
    views = [(name, part.view(tensor.shape)) for (name, tensor), part in zip(tensors.items(), parts, strict=True)]
    save_hf(tmp_path / "bf16", views, source, dtype=torch.bfloat16)
    assert_equal(tmp_path / "bf16", {name: tensor.bfloat16() for name, tensor in tensors.items()})
    assert json.loads((tmp_path / "bf16" / "config.json").read_text()) == {**MOE, "dtype": "bfloat16"}


def test_cast_keeps_fp32_tensors_and_copies_untrained_layers(tmp_path: Path) -> None:
    trained, mtp = random_tensors(MLA), {"model.layers.1.eh_proj.weight": torch.randn(8, 16).bfloat16()}
    source = write_source(tmp_path / "source", MLA, trained | mtp)
    open_hf(source).check(MLA)
    save_hf(tmp_path / "out", trained.items(), source, dtype=torch.bfloat16)
    bias = "model.layers.0.mlp.gate.e_score_correction_bias"
    expected = {name: tensor if name == bias else tensor.bfloat16() for name, tensor in trained.items()}
    assert_equal(tmp_path / "out", expected | mtp)


def test_writes_mtp_layers_and_their_copies_of_trunk_weights(tmp_path: Path) -> None:
    """The checkpoint repeats embedding and head in these layers; both copies follow the trunk even if MTP is frozen."""
    base, table = random_tensors(MLA), family_of(MLA).params(MLA, 1, mtp=True)
    full = {t.name: torch.randn(t.shape) for param in table for t in param.hf}
    copies = {
        "model.layers.1.embed_tokens.weight": "model.embed_tokens.weight",
        "model.layers.1.shared_head.head.weight": "lm_head.weight",
    }
    mtp = {name: tensor for name, tensor in full.items() if name not in base}
    assert "model.layers.1.eh_proj.weight" in mtp and len(mtp) > 20
    source = write_source(
        tmp_path / "source", MLA, full | {name: full[original].clone() for name, original in copies.items()}
    )
    open_hf(source).check(MLA, mtp=True)
    trained = {name: tensor + 1 for name, tensor in full.items()}
    save_hf(tmp_path / "out", trained.items(), source, table=table)
    assert_equal(tmp_path / "out", trained | {name: trained[original] for name, original in copies.items()})
    save_hf(tmp_path / "frozen", {name: full[name] + 1 for name in base}.items(), source)
    frozen = {name: full[name] + 1 for name in base}
    assert_equal(tmp_path / "frozen", frozen | mtp | {name: frozen[original] for name, original in copies.items()})

    part = write_source(tmp_path / "part", MLA, base | {"model.layers.1.enorm.weight": torch.ones(8)})
    open_hf(part).check(MLA)
    with pytest.raises(ConfigError, match=r"model.layers.1.hnorm.weight, .* are missing"):
        open_hf(part).check(MLA, mtp=True)


def test_get_slice_and_get_shard_match_shard(source: Path) -> None:
    weights, tensors = open_hf(source), random_tensors(MOE)
    output = "model.layers.1.self_attn.o_proj.weight"
    assert torch.equal(weights.get_slice(output, 1, 2, 6), tensors[output][:, 2:6])
    for tp in (1, 2):
        for param in family_of(MOE).params(MOE, tp):
            for rank in range(tp):
                assert torch.equal(weights.get_shard(param, tp, rank), shard(param, tensors, tp, rank)), param
    embedding = family_of(MOE).params(MOE, 1)[0]
    assert weights.get_shard(embedding, 4, 3).shape == (128, 8)  # 130 rows: rank 3 of 4 holds only padding
    assert not weights.get_shard(embedding, 4, 3).any()


def test_new_export_replaces_old_one_completely(source: Path, tmp_path: Path) -> None:
    tensors, folder = random_tensors(MOE), tmp_path / "export"
    save_hf(folder, tensors.items(), source, max_shard_bytes=2000)
    (tmp_path / "export.tmp").mkdir()  # left by a run that was killed
    (tmp_path / "export.tmp" / "part-7").write_text("old")
    changed = {name: tensor + 1 for name, tensor in tensors.items()}
    save_hf(folder, changed.items(), source)
    assert_equal(folder, changed)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export", "source"]
    assert not list(folder.glob("model-*"))


def test_failed_export_keeps_old_one_and_drains_stream(source: Path, tmp_path: Path) -> None:
    tensors, folder, sent = random_tensors(MOE), tmp_path / "export", []
    save_hf(folder, tensors.items(), source)

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors.items():
            sent.append(name)
            yield name, tensor[:1] if name == "model.embed_tokens.weight" else tensor + 1

    with pytest.raises(
        ConfigError, match=r"model.embed_tokens.weight has shape \(1, 8\); config.json asks for \(130, 8\)"
    ):
        save_hf(folder, stream(), source)
    assert sent == list(tensors)
    assert_equal(folder, tensors)


def test_nonwriting_rank_drains_stream(tmp_path: Path) -> None:
    stream = iter([("a", torch.zeros(1))])
    save_hf(tmp_path / "export", stream, tmp_path / "absent", write=False)
    assert next(stream, None) is None and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("lm_head.weight"), "lm_head.weight is missing"),
        (lambda t: [t.pop(n) for n in list(t) if "experts.1" in n], "gate_proj.weight.* and 3 more are missing"),
        (lambda t: t.update(other=torch.zeros(1)), "other is repeated or not part of Qwen3MoeForCausalLM"),
    ],
)
def test_refuses_incomplete_export(source: Path, tmp_path: Path, change: Any, message: str) -> None:
    tensors = random_tensors(MOE)
    change(tensors)
    with pytest.raises(ConfigError, match=message):
        save_hf(tmp_path / "export", tensors.items(), source)
    assert not (tmp_path / "export").exists()


def test_refuses_repeated_tensor(source: Path, tmp_path: Path) -> None:
    tensors = list(random_tensors(MOE).items())
    with pytest.raises(ConfigError, match="model.norm.weight is repeated"):
        save_hf(tmp_path / "export", [*tensors, next(t for t in tensors if t[0] == "model.norm.weight")], source)


def test_refuses_to_overwrite_source_or_foreign_folder(source: Path, tmp_path: Path) -> None:
    tensors = random_tensors(MOE)
    with pytest.raises(ConfigError, match="is the folder that the weights came from"):
        save_hf(source, tensors.items(), source)
    (tmp_path / "thesis").mkdir()
    with pytest.raises(ConfigError, match="exists and is not an HF folder"):
        save_hf(tmp_path / "thesis", tensors.items(), source)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda t: t.pop("lm_head.weight"), "lm_head.weight is missing; config.json has tie_word_embeddings=false"),
        (lambda t: t.update(spare=torch.zeros(1)), "spare is not part of Qwen3MoeForCausalLM with this config.json"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(9)}),
            r"model.norm.weight has shape \(9,\); config.json asks for \(8,\)",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(8, dtype=torch.int64)}),
            "model.norm.weight has I64 numbers; weights must be BF16, F16, F32, F64, F8_E4M3; convert the",
        ),
        (
            lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.int8)}),
            "lm_head.weight has I8 numbers",
        ),
    ],
)
def test_check_names_offending_tensor(tmp_path: Path, change: Any, message: str) -> None:
    tensors = random_tensors(MOE)
    change(tensors)
    with pytest.raises(ConfigError, match=message):
        open_hf(write_source(tmp_path / "model", MOE, tensors)).check(MOE)


def test_check_accepts_optional_heads(tmp_path: Path) -> None:
    tensors = random_tensors(MOE)
    del tensors["lm_head.weight"]
    weights = open_hf(write_source(tmp_path / "critic", MOE, tensors | {"score.weight": torch.zeros(1, 8)}))
    weights.check(MOE, optional=("lm_head.weight", "score.weight"))
    with pytest.raises(ConfigError, match="score.weight is not part of"):
        weights.check(MOE, optional=("lm_head.weight",))


def test_tied_head_must_equal_embedding(tmp_path: Path) -> None:
    tied = MOE | {"tie_word_embeddings": True}
    tensors = random_tensors(MOE)
    with pytest.raises(ConfigError, match="lm_head.weight differs from model.embed_tokens.weight"):
        open_hf(write_source(tmp_path / "differs", tied, tensors)).check(tied)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    open_hf(write_source(tmp_path / "equal", tied, tensors)).check(tied)
    open_hf(write_source(tmp_path / "absent", tied, random_tensors(tied))).check(tied)
    # Old checkpoints also carry the derived rotary frequencies.
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(2)
    open_hf(write_source(tmp_path / "old", tied, tensors)).check(tied)


def test_refuses_unreadable_folders(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model folder"):
        open_hf(tmp_path / "absent")
    with pytest.raises(ConfigError, match="no config.json"):
        open_hf(tmp_path)
    with pytest.raises(ConfigError, match="has no tensor spam"):
        open_hf(source).get("spam")
    file = source / "model.safetensors"
    full = file.read_bytes()
    for cut in (len(full) - 100, 20, 0):
        file.write_bytes(full[:cut])
        with pytest.raises(ConfigError, match="model.safetensors is truncated or not a safetensors file"):
            open_hf(source)
    file.unlink()
    with pytest.raises(ConfigError, match="only safetensors are read"):
        open_hf(source)


def test_error_names_damaged_index(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "export"
    save_hf(folder, random_tensors(MOE).items(), source, max_shard_bytes=2000)
    first = next(iter(sorted(folder.glob("model-00001-*"))))
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["spam"] = first.name
    index.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=f"lists spam in {first.name}, but it is not"):
        open_hf(folder)
    index.write_text("{}")
    with pytest.raises(ConfigError, match="is not a safetensors index"):
        open_hf(folder)
    save_hf(folder, random_tensors(MOE).items(), source, max_shard_bytes=2000)
    first.unlink()
    with pytest.raises(ConfigError, match=f"{first.name} is missing"):
        open_hf(folder)


def stack_experts(tensors: dict[str, torch.Tensor], form: str) -> dict[str, torch.Tensor]:
    """Return the tensors with the experts of each layer in `gate_up_proj` and `down_proj`, as published models do."""
    stacked = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(MOE["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([tensors[f"{prefix}.{e}.{x}_proj.weight"] for e in range(MOE["num_experts"])])
            for x in ("gate", "up", "down")
        )
        if form == "halves":  # [E, 2 ffn, hidden]
            stacked[f"{prefix}.gate_up_proj"], stacked[f"{prefix}.down_proj"] = torch.cat([gate, up], dim=1), down
        else:  # [E, hidden, 2 ffn] with gate and up in turn
            alternating = torch.stack([gate, up], dim=2).flatten(1, 2)
            stacked[f"{prefix}.gate_up_proj"] = alternating.transpose(1, 2).contiguous()
            stacked[f"{prefix}.down_proj"] = down.transpose(1, 2).contiguous()
    return stacked


def stored_slice_as(form: str, name: str) -> StoredSlice | None:
    prefix, _, rest = name.partition(".experts.")
    if not rest:
        return None
    expert, matrix, _ = rest.split(".")
    if matrix == "down_proj":
        return StoredSlice(f"{prefix}.experts.down_proj", int(expert), transposed=form == "alternating")
    ffn, is_up = MOE["moe_intermediate_size"], matrix == "up_proj"
    rows = slice(ffn * is_up, ffn * (1 + is_up)) if form == "halves" else slice(int(is_up), None, 2)
    return StoredSlice(f"{prefix}.experts.gate_up_proj", int(expert), rows, transposed=form == "alternating")


@pytest.mark.parametrize("form", ["halves", "alternating"])
def test_experts_that_checkpoints_stack(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family = replace(
        registry.FAMILIES["Qwen3MoeForCausalLM"], stored_slice=lambda hf, name: stored_slice_as(form, name)
    )
    monkeypatch.setitem(registry.FAMILIES, "Qwen3MoeForCausalLM", family)
    tensors = random_tensors(MOE)
    stacked = stack_experts(tensors, form)
    source = write_source(tmp_path / "source", MOE, stacked)
    weights = open_hf(source)
    weights.check(MOE)
    for name, tensor in tensors.items():
        assert weights.shape(name) == tuple(tensor.shape)
        assert torch.equal(weights.get(name), tensor), name
    for param in family.params(MOE, 2):
        for rank in range(2):
            assert torch.equal(weights.get_shard(param, 2, rank), shard(param, tensors, 2, rank)), param.megatron

    save_hf(tmp_path / "export", tensors.items(), source)
    assert_equal(tmp_path / "export", stacked)  # the form of the source
    lazy = ((name, LazyTensor(tuple(t.shape), t.dtype, lambda t=t: t)) for name, t in reversed(tensors.items()))
    save_hf(tmp_path / "lazy", lazy, source, max_shard_bytes=1000)
    assert_equal(tmp_path / "lazy", stacked)
    single = write_source(tmp_path / "single", MOE, tensors)
    save_hf(tmp_path / "export", tensors.items(), single)
    assert_equal(tmp_path / "export", tensors)

    few = {name: tensor[:1] if "experts" in name else tensor for name, tensor in stacked.items()}
    with pytest.raises(ConfigError, match=r"gate_up_proj has shape .1, 8, 8.; config.json asks for .2, 8, 8."):
        open_hf(write_source(tmp_path / "few", MOE, few)).check(MOE)
    with pytest.raises(ConfigError, match="missing"):
        save_hf(tmp_path / "part", list(tensors.items())[:-4], source)


def test_dequantizes_fp8_that_checkpoints_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for the language model within a larger one. Experts stacked in FP8 are refused, not read without scales."""

    def stored_slice(hf: Any, name: str) -> StoredSlice | None:
        stacked = name.startswith("model.layers.0.mlp.experts.") and name.endswith(".down_proj.weight")
        expert = int(name.split(".")[5]) if stacked else None
        return StoredSlice("stack", expert) if stacked else StoredSlice(f"inner.{name}")

    family = replace(registry.FAMILIES["Qwen3MoeForCausalLM"], stored_slice=stored_slice)
    monkeypatch.setitem(registry.FAMILIES, "Qwen3MoeForCausalLM", family)
    quantized, dequantized = quantize_fp8(random_tensors(WIDE))
    folder = {f"inner.{name}": tensor for name, tensor in quantized.items()}
    weights = open_hf(write_source(tmp_path / "renamed", WIDE, folder))
    for name in ("model.layers.1.mlp.experts.1.gate_proj.weight", "model.norm.weight"):
        assert torch.equal(weights.get(name), dequantized[name]), name
        assert torch.equal(weights.get_slice(name, 0, 3, 140), dequantized[name][3:140]), name
    down = "model.layers.0.mlp.experts.{}.down_proj.weight"
    stack = torch.stack([folder.pop(f"inner.{down.format(e)}") for e in range(MOE["num_experts"])])
    folder |= {"stack": stack, "stack_scale_inv": stack[0].clone()}
    weights = open_hf(write_source(tmp_path / "stacked", WIDE, folder))
    with pytest.raises(ConfigError, match="stack is a stack in FP8, which is not implemented"):
        weights.get(down.format(1))
