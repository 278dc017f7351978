"""LoRA tables: which weights have adapters, how factors are sharded, and the PEFT export."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "megatron"))
import tiny  # noqa: E402

from megarl.config import ConfigError, LoraConfig
from megarl.models import lora_tables
from megarl.models.layout_algebra import Param, local_shape, shard, unshard
from megarl.models.lora_tables import (
    adapted_weights,
    adapter_params,
    factor_params,
    merge_adapter,
    peft_config,
    peft_tensors,
)
from megarl.models.registry import family_of

pytestmark = pytest.mark.alone


def table(family: str, tp: int = 1) -> list[Param]:
    return family_of(tiny.HF[family]).params(tiny.HF[family], tp)


def modules(params: list[Param]) -> set[str]:
    return {param.megatron.removesuffix(".weight").removeprefix("decoder.layers.") for param in params}


def test_adapts_all_linear_layers_by_default() -> None:
    assert modules(adapted_weights(table("qwen2"), ())) == {
        f"{layer}.{name}"
        for layer in (0, 1)
        for name in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    }
    latent = {name.partition(".")[2] for name in modules(adapted_weights(table("deepseek_v3"), ()))}
    attention = {"q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj", "proj"}
    mlps = {"mlp", "mlp.shared_experts", *(f"mlp.experts.{e}" for e in range(4))}
    expected = {f"self_attention.linear_{name}" for name in attention}
    assert latent == expected | {f"{module}.linear_fc{n}" for module in mlps for n in (1, 2)}
    sparse = {name.partition(".")[2] for name in modules(adapted_weights(table("deepseek_v32"), ()))}
    assert sparse == latent - {"self_attention.linear_kv_up_proj"}


def test_selects_targets_by_name_and_parent() -> None:
    moe = table("deepseek_v3")
    assert len(adapted_weights(moe, ("linear_proj",))) == 3
    assert len(adapted_weights(moe, ("linear_fc1",))) == 1 + 2 * (4 + 1)
    assert len(adapted_weights(moe, ("experts.linear_fc1",))) == 2 * 4
    assert modules(adapted_weights(moe, ("mlp.linear_fc2", "shared_experts.linear_fc2"))) == {
        "0.mlp.linear_fc2",
        "1.mlp.shared_experts.linear_fc2",
        "2.mlp.shared_experts.linear_fc2",
    }


@pytest.mark.parametrize("target", ["linear_qkvv", "q_proj", "router", "experts", "output_layer", "linear_q_proj", ""])
def test_refuses_target_without_layers(target: str) -> None:
    with pytest.raises(
        ConfigError, match=f"lora.target_modules: {target} names no linear layer of this model; it has .*fc1"
    ):
        adapter_params(table("qwen3_moe"), LoraConfig(rank=4, target_modules=("linear_proj", target)))


@pytest.mark.parametrize(
    "family",
    ["qwen2", "qwen3_moe", "deepseek_v3", "glm4_moe", "gpt_oss", "deepseek_v32", "qwen3_next", "qwen3_5", "minimax_m2"]
    + ["ling2"],
)
def test_merging_commutes_with_sharding(family: str) -> None:
    """On each of two ranks, the shard of W + s B A equals the merge of the shards of W, B and A."""
    generator, scale = torch.Generator().manual_seed(0), 2.5
    for param in adapted_weights(table(family, 2), ()):
        a, b = factor_params(param, 3)
        full = {t.name: torch.randn(t.shape, generator=generator) for row in (param, a, b) for t in row.hf}
        (a_tensor,) = a.hf
        merged = {
            w.name: (full[w.name].double() + scale * full[f.name].double() @ full[a_tensor.name].double()).float()
            for w, f in zip(param.hf, b.hf, strict=True)
        }
        shards = []
        for rank in range(2):
            local = [shard(row, full, 2, rank) for row in (param, a, b)]
            shards.append(merge_adapter(*local, scale))
            assert torch.allclose(shards[-1], shard(param, merged, 2, rank), atol=1e-5)
        for row in (a, b):
            result = unshard(row, [shard(row, full, 2, rank) for rank in range(2)])
            assert all(torch.equal(result[name], full[name]) for name in result)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_part_of_a_weight_gets_the_bits_of_the_whole(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for rows, columns, rank in ((300, 517, 33), (7, 1000, 16), (129, 1, 4), (64, 64, 1)):
        shapes = (rows, columns), (rank, columns), (rows, rank)
        weight, a, b = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
        whole = merge_adapter(weight, a, b, 0.3)
        assert torch.allclose(whole.float(), weight.float() + 0.3 * b.float() @ a.float(), rtol=1e-2, atol=1e-2)
        for cut in (slice(1, None), slice(rows // 3, rows // 2), slice(None, None, 3)):
            assert torch.equal(merge_adapter(weight[cut], a, b[cut], 0.3), whole[cut])
        for cut in (slice(columns // 5, None), slice(0, 1), slice(None, None, 2)):
            assert torch.equal(merge_adapter(weight[:, cut], a[:, cut], b, 0.3), whole[:, cut])


@pytest.mark.parametrize("at_once", [1 << 22, 300])
def test_stack_of_weights_gets_the_bits_of_each(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_tables, "MERGED_AT_ONCE", at_once)
    generator = torch.Generator().manual_seed(0)
    weight, a, b = (torch.randn(shape, generator=generator) for shape in ((5, 33, 47), (5, 7, 47), (5, 33, 7)))
    merged = merge_adapter(weight[:, 3:], a, b[:, 3:], 0.3)
    assert torch.equal(
        merged, torch.stack([merge_adapter(*entry, 0.3)[3:] for entry in zip(weight, a, b, strict=True)])
    )


def test_sharded_factor_follows_the_weight() -> None:
    result = {
        row.megatron.rpartition("linear_")[2]: local_shape(row, 2, 1)
        for param in adapted_weights(table("deepseek_v3", 2), ())
        if param.megatron.startswith("decoder.layers.0.")
        for row in factor_params(param, 3)
    }
    assert result == {
        "q_down_proj.lora_a": (3, 32), "q_down_proj.lora_b": (24, 3),  # replicated, as the weight is
        "q_up_proj.lora_a": (3, 24), "q_up_proj.lora_b": (40, 3),
        "kv_down_proj.lora_a": (3, 32), "kv_down_proj.lora_b": (24, 3),
        "kv_up_proj.lora_a": (3, 16), "kv_up_proj.lora_b": (48, 3),
        "proj.lora_a": (3, 24), "proj.lora_b": (32, 3),
        "fc1.lora_a": (3, 32), "fc1.lora_b": (48, 3),
        "fc2.lora_a": (3, 24), "fc2.lora_b": (32, 3),
    }  # fmt: skip


def test_bf16_merge_rounds_once() -> None:
    weight, a, b = torch.full((1, 1), 1.0), torch.full((1, 1), 0.5), torch.full((1, 1), 2**-7)
    merged = merge_adapter(weight.bfloat16(), a.bfloat16(), b.bfloat16(), 3.0)
    assert merged.dtype == torch.bfloat16
    assert float(merged) == 1 + 2**-6  # 1 + 3 * 2^-8 lies between 1 + 2^-7 and 1 + 2^-6, as far from either: to even


def test_peft_tensors_share_a_and_split_b() -> None:
    params = adapted_weights(table("qwen3_moe"), ("linear_qkv", "experts.linear_fc2"))
    tensors = {t.name: torch.randn(t.shape) for param in params for row in factor_params(param, 3) for t in row.hf}
    result = peft_tensors(tensors, params, 3)
    q, k, v, down_proj = "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.experts.3.down_proj"
    layer = {
        name.removeprefix("base_model.model.model.layers.1."): t for name, t in result.items() if ".layers.1." in name
    }
    assert len(result) == 2 * len(layer) == 2 * 2 * (3 + 4)
    assert {name: tuple(layer[f"{name}.lora_A.weight"].shape) for name in (q, k, v, down_proj)} == {
        q: (3, 32), k: (3, 32), v: (3, 32), down_proj: (3, 24),
    }  # fmt: skip
    assert {name: tuple(layer[f"{name}.lora_B.weight"].shape) for name in (q, k, v, down_proj)} == {
        q: (64, 3), k: (32, 3), v: (32, 3), down_proj: (32, 3),
    }  # fmt: skip
    assert torch.equal(layer[f"{q}.lora_A.weight"], layer[f"{v}.lora_A.weight"])


def test_peft_config() -> None:
    def config(family: str, *targets: str) -> dict[str, Any]:
        return peft_config(table(family), LoraConfig(rank=4, alpha=8, target_modules=targets), "/models/base")

    full = config("qwen3_moe")
    assert (full["peft_type"], full["r"], full["lora_alpha"], full["base_model_name_or_path"]) == (
        "LORA", 4, 8, "/models/base",
    )  # fmt: skip
    linear = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert full["target_modules"] == linear
    assert config("deepseek_v3", "linear_q_up_proj", "linear_kv_down_proj")["target_modules"] == [
        "kv_a_proj_with_mqa", "q_b_proj",
    ]  # fmt: skip
    # The dense layer and the shared experts have a down_proj without an adapter, so the name alone is ambiguous.
    experts = config("deepseek_v3", "experts.linear_fc2")["target_modules"]
    assert experts == [f"model.layers.{layer}.mlp.experts.{e}.down_proj" for layer in (1, 2) for e in range(4)]
