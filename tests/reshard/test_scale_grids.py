"""Blockwise FP8: bitwise equal to SGLang and DeepGEMM, also for shards that split blocks."""

from __future__ import annotations

import ast
import importlib.util
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from boxes import random_weights

from megarl.models.fp8 import FP8, block_amax, compute_scales, dequantise, grid_shape, is_quantised, quantise
from megarl.models.registry import family_of
from megarl.reshard.plan.layout import TrainLayout
from megarl.reshard.run.scale_grids import compute_scale_grids, has_split_blocks

pytestmark = pytest.mark.alone

SHAPES = ((128, 128), (1, 1), (127, 129), (256, 384), (300, 200), (576, 130), (64, 1000))


def load_sglang_functions(*names: str) -> SimpleNamespace:
    """Load functions of SGLang without importing their module, which needs GPU libraries.

    Scales are not rounded up to powers of two, so `per_block_cast_to_fp8` is DeepGEMM's with use_ue8m0=False.
    """
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.origin is not None
    source = (Path(spec.origin).parent / "srt/layers/quantization/fp8_utils.py").read_text()
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name in names]
    assert len(functions) == len(names)
    space: dict[str, Any] = {
        "torch": torch,
        "Tuple": tuple,
        "List": list,
        "ceil_to_ue8m0": lambda x: x,
        "ceil_align": lambda x, y: -(-x // y) * y,
    }
    exec(compile(ast.Module(functions, []), "fp8_utils", "exec"), space)
    return SimpleNamespace(**{name: space[name] for name in names})


SGLANG = load_sglang_functions("per_block_cast_to_fp8", "block_quant_dequant")


def quantise_whole(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    grid = compute_scales(block_amax(weight, 0, 0, grid_shape(weight.shape)))
    return quantise(weight, grid, 0, 0), grid


def is_same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize("shape", SHAPES)
def test_quantisation_equals_sglang_bitwise(shape: tuple[int, int], dtype: torch.dtype) -> None:
    for seed in range(5):
        weight = random_weights(random.Random(f"{seed} {shape}"), *shape, dtype)
        quantised, grid = quantise_whole(weight)
        expected, expected_grid = SGLANG.per_block_cast_to_fp8(weight)
        assert is_same_bits(grid, expected_grid)
        assert is_same_bits(quantised, expected)
        dequantised = SGLANG.block_quant_dequant(quantised, grid, [128, 128], torch.bfloat16)
        assert is_same_bits(dequantise(quantised, grid), dequantised)


def test_zeros_get_the_minimum_scale() -> None:
    weight = torch.zeros(128, 256, dtype=torch.bfloat16)
    weight[0, 128] = 1e-6
    quantised, grid = quantise_whole(weight)
    expected, expected_grid = SGLANG.per_block_cast_to_fp8(weight)
    assert is_same_bits(quantised, expected) and is_same_bits(grid, expected_grid)
    assert grid[0, 0] == grid[0, 1] == torch.tensor(1e-4) / 448
    assert not quantised[:, :128].float().any()


def test_nonfinite_values_match_sglang() -> None:
    weight = torch.ones(128, 512, dtype=torch.bfloat16)
    weight[3, 5], weight[7, 130], weight[9, 300] = torch.nan, torch.inf, -torch.inf
    quantised, grid = quantise_whole(weight)
    expected, expected_grid = SGLANG.per_block_cast_to_fp8(weight)
    assert torch.equal(grid.nan_to_num(-1), expected_grid.nan_to_num(-1))
    assert torch.equal(quantised.float().isnan(), expected.float().isnan())
    assert torch.equal(quantised.float().nan_to_num(0), expected.float().nan_to_num(0))


def test_error_is_within_three_mantissa_bits() -> None:
    weight = random_weights(random.Random(0), 300, 500)
    weight[weight.abs() < 1e-5] = 0
    error = (dequantise(*quantise_whole(weight), dtype=torch.float32) - weight.float()).abs()
    finest = quantise_whole(weight)[1].repeat_interleave(128, 0).repeat_interleave(128, 1)[:300, :500]
    # Half a unit in the last place: 2^-4 of a value, or of the smallest normal value, 2^-6.
    assert (error <= 1.001 * torch.maximum(weight.float().abs() / 16, finest * 2**-10)).all()


@pytest.mark.parametrize("seed", range(40))
def test_shards_quantise_to_the_bits_of_the_whole_tensor(seed: int) -> None:
    rng = random.Random(f"cut {seed}")
    rows, columns = rng.randint(1, 400), rng.randint(1, 400)
    weight = random_weights(rng, rows, columns, rng.choice((torch.bfloat16, torch.float32)))
    expected, grid = quantise_whole(weight)
    boundaries = [sorted({0, size, *(rng.randint(0, size) for _ in range(3))}) for size in (rows, columns)]
    boxes = [
        (r0, r1, c0, c1)
        for r0, r1 in zip(boundaries[0], boundaries[0][1:], strict=False)
        for c0, c1 in zip(boundaries[1], boundaries[1][1:], strict=False)
    ]
    amax = torch.zeros(grid.shape)
    for r0, r1, c0, c1 in boxes:
        amax = torch.maximum(amax, block_amax(weight[r0:r1, c0:c1], r0, c0, grid.shape))
    assert is_same_bits(compute_scales(amax), grid)
    for r0, r1, c0, c1 in boxes:
        assert is_same_bits(quantise(weight[r0:r1, c0:c1], grid, r0, c0), expected[r0:r1, c0:c1].contiguous())
        dequantised = dequantise(expected[r0:r1, c0:c1], grid, r0, c0)
        assert is_same_bits(dequantised, dequantise(expected, grid)[r0:r1, c0:c1].contiguous())


def test_invalid_inputs_raise() -> None:
    grid = torch.ones(1, 2)
    with pytest.raises(ValueError, match="need 2 x 1 blocks, the grid has 1 x 2"):
        quantise(torch.zeros(2, 2), grid, 127, 0)
    with pytest.raises(ValueError, match="need 1 x 3"):
        block_amax(torch.zeros(2, 200), 0, 100, (1, 2))
    with pytest.raises(ValueError, match="BF16 or FP32"):
        quantise(torch.zeros(2, 2, dtype=torch.float16), grid, 0, 0)


MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 192,
    "num_hidden_layers": 1,
    "intermediate_size": 256,
    "moe_intermediate_size": 192,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 64,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


@pytest.mark.parametrize("tp,etp", ((1, 1), (4, 1), (4, 2), (2, 4)))
def test_ranks_agree_on_scales_of_shared_blocks(tp: int, etp: int) -> None:
    train = TrainLayout(4, tp, 1, ((0,),), etp)
    params = [p for p in family_of(MODEL).layer(MODEL, 0, range(2)) if is_quantised(p)]
    rng = random.Random(0)
    full = {tensor.name: random_weights(rng, *tensor.shape) for param in params for tensor in param.hf}

    def shards(rank: int) -> dict[str, torch.Tensor]:
        result = {}
        for param in params:
            parts = []
            for shard_slice in sorted(train.slices_of_rank(rank, param), key=lambda shard_slice: shard_slice.offset):
                parts.append(
                    full[param.hf[shard_slice.source].name].narrow(
                        shard_slice.dim, shard_slice.start, shard_slice.stop - shard_slice.start
                    )
                )
            result[param.megatron] = torch.cat(parts, dim=shard_slice.dim)
        return result

    reductions: dict[int, list[tuple[tuple[int, ...], list[torch.Tensor]]]] = {}
    for rank in range(4):
        reductions[rank] = []

        def record(tensors: list[torch.Tensor], ranks: Any, rank: int = rank) -> list[torch.Tensor]:
            reductions[rank].append((tuple(ranks), tensors))
            return tensors

        compute_scale_grids(shards(rank), params, train, rank, record)
    assert len({len(calls) for calls in reductions.values()}) == 1
    assert bool(reductions[0]) == any(has_split_blocks(param, train) for param in params) == (tp > 1 or etp > 1)
    for rank in range(4):
        calls = iter(range(2))

        def maximum(tensors: list[torch.Tensor], ranks: Any, calls: Any = calls) -> list[torch.Tensor]:
            call = next(calls)
            return [
                torch.stack(per_rank).amax(0) for per_rank in zip(*(reductions[r][call][1] for r in ranks), strict=True)
            ]

        grids = compute_scale_grids(shards(rank), params, train, rank, maximum)
        for param in params:
            for shard_slice in train.slices_of_rank(rank, param):
                grid = grids[param.megatron, shard_slice.source]
                weight = full[param.hf[shard_slice.source].name]
                shard = shards(rank)[param.megatron].narrow(
                    shard_slice.dim, shard_slice.offset, shard_slice.stop - shard_slice.start
                )
                offset = (shard_slice.start, 0) if shard_slice.dim == 0 else (0, shard_slice.start)
                expected = quantise_whole(weight)[0].narrow(
                    shard_slice.dim, shard_slice.start, shard_slice.stop - shard_slice.start
                )
                assert is_same_bits(quantise(shard, grid, *offset), expected.contiguous())
                assert quantise(shard, grid, *offset).dtype == FP8


def test_replicated_matrices_need_no_exchange() -> None:
    """DeepSeek's down projections are replicated on all tensor parallel ranks."""
    hf = dict(MODEL, architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", q_lora_rank=128)
    hf |= dict(kv_lora_rank=64, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, first_k_dense_replace=1)
    hf |= dict(n_routed_experts=2, n_shared_experts=1, num_nextn_predict_layers=0)
    train = TrainLayout(4, 4, 1, ((0,),))
    block_params = {
        p.megatron: has_split_blocks(p, train) for p in family_of(hf).layer(hf, 0, range(2)) if is_quantised(p)
    }
    down_names = {name for name in block_params if "_down_proj" in name}
    assert down_names and not any(block_params[name] for name in down_names)
    assert any(block_params.values())
