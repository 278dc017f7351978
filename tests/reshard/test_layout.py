"""Checks of shards and engines before the first weight sync."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megarl.models.registry import family_of
from megarl.reshard.plan.layout import (
    EngineLayout,
    TrainLayout,
    engine_shapes,
    find_digest_mismatch,
    find_engine_problems,
    find_layout_problems,
    find_nonfinite,
    find_shard_problems,
    plan_digest,
)

pytestmark = pytest.mark.alone

HF: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 8,
    "intermediate_size": 16,
    "moe_intermediate_size": 4,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
}
PARAMS = family_of(HF).params(HF, 1)
TRAIN = TrainLayout(4, 2, 2, ((0,), (1,)))
EXPERT = "decoder.layers.1.mlp.experts.3.linear_fc2.weight"


@pytest.fixture
def shards() -> dict[str, torch.Tensor]:
    """Return the shards of the last rank: second half of the vocabulary, second stage, experts 2 and 3."""
    result = {}
    for param in PARAMS:
        if TRAIN.has_param(3, param, 4):
            slices = TRAIN.slices_of_rank(3, param)
            shape = list(param.hf[0].shape)
            shape[slices[0].dim if slices else 0] = max((h.offset + h.stop - h.start for h in slices), default=0)
            result[param.megatron] = torch.zeros(shape)
    result["output_layer.weight"] = torch.zeros(128, 8)  # with padding
    return result


def test_valid_shards_have_no_problems(shards: dict[str, torch.Tensor]) -> None:
    assert "decoder.layers.1.mlp.experts.2.linear_fc1.weight" in shards
    assert "decoder.layers.0.input_layernorm.weight" not in shards
    assert find_shard_problems(shards, PARAMS, TRAIN, 3, 4) == []


def test_tied_head_on_the_last_stage(shards: dict[str, torch.Tensor]) -> None:
    """By the name that `megatron.parameter_names` gives it."""
    tied = family_of(HF).params(HF | {"tie_word_embeddings": True}, 1)
    shards["embedding.word_embeddings.weight"] = shards.pop("output_layer.weight")
    assert find_shard_problems(shards, tied, TRAIN, 3, 4) == []


def test_shard_problems_name_tensor_and_rank(shards: dict[str, torch.Tensor]) -> None:
    def problems(**changed: Any) -> list[str]:
        return find_shard_problems({**shards, **changed}, PARAMS, TRAIN, 3, 4)

    assert problems(**{EXPERT: torch.zeros(2, 4)}) == [f"{EXPERT} on rank 3 has shape (2, 4), not (8, 4)"]
    assert problems(value_head=torch.zeros(1)) == ["rank 3 has value_head, which is not in the table"]
    for value in (float("nan"), float("inf")):
        broken = shards[EXPERT].clone()
        broken[1, 2] = value
        assert find_nonfinite({**shards, EXPERT: broken}, 3) == [f"{EXPERT} on rank 3 is not finite"]
    assert find_nonfinite({**shards, EXPERT: torch.full((8, 4), 3e38)}, 3) == []  # only its sum is not finite
    del shards[EXPERT]
    assert find_shard_problems(shards, PARAMS, TRAIN, 3, 4) == [f"rank 3 lacks {EXPERT}"]


def test_owner_of() -> None:
    owner = {param.megatron: TRAIN.owner_of(param, 4) for param in PARAMS}
    assert owner["embedding.word_embeddings.weight"] == owner["decoder.layers.0.input_layernorm.weight"] == (0, None)
    assert [owner[f"decoder.layers.1.mlp.experts.{e}.linear_fc1.weight"] for e in range(4)] == [
        (1, e // 2) for e in range(4)
    ]
    assert owner["decoder.final_layernorm.weight"] == owner["output_layer.weight"] == (1, None)


def test_engine_problems_of_another_model() -> None:
    engine = EngineLayout(2, ep=2)
    tensors: dict[str, Any] = {n: ("float32", s) for n, s in engine_shapes(PARAMS, engine, 1, 4).items()}
    w2 = "model.layers.0.mlp.experts.w2_weight"
    assert tensors[w2] == ("float32", (2, 8, 4))
    assert find_engine_problems(tensors, PARAMS, engine, 1, 4, "fp32") == []
    shape = find_engine_problems({**tensors, w2: ("float32", (4, 8, 4))}, PARAMS, engine, 1, 4, "fp32")
    assert shape == [f"{w2} has shape (4, 8, 4) in the engine, not (2, 8, 4)"]
    problems = find_engine_problems({**tensors, w2: ("int8", (2, 8, 4))}, PARAMS, engine, 1, 4, "fp32")
    assert problems == [f"{w2} is int8 in the engine, but it is sent as float32"]
    del tensors[w2]
    assert find_engine_problems(tensors, PARAMS, engine, 1, 4, "fp32") == [f"the engine has no tensor {w2}"]


def test_engine_problems_of_a_dtype() -> None:
    """In bf16, a slot may be FP32; every other tensor in FP32 is a problem."""
    name, engine = "decoder.layers.0.mlp.router.weight", EngineLayout(2, ep=2)
    (row,) = (param for param in PARAMS if param.megatron == name)
    assert row.slot
    fp32 = replace(row, slot=replace(row.slot, is_fp32=True))
    tensors = {row.slot.name: ("float32", row.hf[0].shape)}
    assert find_engine_problems(tensors, [fp32], engine, 0, 4, "bf16") == []
    problem = f"{row.slot.name} is float32 in the engine, but it is sent as bfloat16"
    assert find_engine_problems(tensors, [row], engine, 0, 4, "bf16") == [problem]
    (problem,) = find_engine_problems({row.slot.name: ("bfloat16", row.hf[0].shape)}, [fp32], engine, 0, 4, "bf16")
    assert problem == f"{row.slot.name} is bfloat16 in the engine, but it is sent as float32"


def test_fp8_engine_needs_scales() -> None:
    engine = EngineLayout(2, ep=2)
    qkv, w2 = "model.layers.0.self_attn.qkv_proj.weight", "model.layers.0.mlp.experts.w2_weight"
    tensors: dict[str, Any] = {n: ("bfloat16", s) for n, s in engine_shapes(PARAMS, engine, 1, 4).items()}
    assert find_engine_problems(tensors, PARAMS, engine, 1, 4, "bf16") == []
    problems = find_engine_problems(tensors, PARAMS, engine, 1, 4, "fp8")
    assert f"{qkv} is bfloat16 in the engine, but it is sent as float8_e4m3fn" in problems
    assert f"the engine has no tensor {w2}_scale_inv" in problems
    assert not any("embed_tokens" in problem or "norm" in problem for problem in problems)
    for name in {problem.split()[0] for problem in problems if " is bfloat16 " in problem}:
        shape = tensors[name][1]
        tensors[name] = "float8_e4m3fn", shape
        tensors[f"{name}_scale_inv"] = "float32", (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    assert find_engine_problems(tensors, PARAMS, engine, 1, 4, "fp8") == []
    assert tensors[f"{w2}_scale_inv"][1] == (2, 1, 1)
    tensors[f"{w2}_scale_inv"] = "float32", (2, 1, 2)
    assert "has shape (2, 1, 2)" in find_engine_problems(tensors, PARAMS, engine, 1, 4, "fp8")[0]


def test_digest_mismatch_names_the_ranks() -> None:
    same_digest, other_digest = plan_digest(HF, TRAIN, 8), plan_digest({**HF, "num_experts": 8}, TRAIN, 8)
    assert same_digest != other_digest != plan_digest(HF, TrainLayout(4, 2, 2, ((1,), (0,))), 8)
    assert find_digest_mismatch(dict.fromkeys(range(4), same_digest)) == ""
    differs = find_digest_mismatch({4: same_digest, 5: same_digest, 2: other_digest, 3: other_digest})
    assert "rank(s) 2, 3 have another model or layout than rank 4" in differs


def test_dense_and_shared_mlps_have_separate_tp() -> None:
    hf = HF | {
        "architectures": ["Glm4MoeForCausalLM"],
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "head_dim": 2,
        "partial_rotary_factor": 1.0,
    }
    params = family_of(hf).params(hf, 1)
    dense, shared = "model.layers.0.mlp.gate_up_proj.weight", "model.layers.1.mlp.shared_experts.gate_up_proj.weight"
    for layout, rows in (
        (EngineLayout(2, 2), (16, 4)),
        (EngineLayout(2, 2, mlp_tp=1), (32, 4)),
        (EngineLayout(2, 2, shared_tp=1), (16, 8)),
        (EngineLayout(2, 2, mlp_tp=1, shared_tp=1), (32, 8)),
    ):
        shapes = engine_shapes(params, layout, 1, 4)
        assert (shapes[dense][0], shapes[shared][0]) == rows


def test_layout_problems_name_the_remedy() -> None:
    assert find_layout_problems([]) == []
    (line,) = find_layout_problems(["model.layers.0.mlp.experts has its experts transposed (use_triton_kernels)"])
    assert "in the engine, model.layers.0.mlp.experts has its experts transposed" in line
    assert "remove moe_runner_backend" in line
