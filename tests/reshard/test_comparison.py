"""Verification of a weight sync in one process: which syncs verify fully, and which tensor differs afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megarl.config import from_dict
from megarl.engine import weight_loader
from megarl.models.fp8 import SCALE_SUFFIX, grid_shape, is_quantised
from megarl.models.layout_algebra import shard
from megarl.models.registry import family_of
from megarl.reshard.plan.from_config import build_plan
from megarl.reshard.plan.layout import EngineLayout, engine_shapes
from megarl.reshard.run.executor import Executor, is_fully_verified

pytestmark = pytest.mark.alone

HF: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
}
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}}


@pytest.mark.parametrize("hf", [HF, HF | FP8], ids=["bf16", "fp8"])
def test_compare_only_names_a_corrupted_tensor_and_writes_nothing(hf: dict[str, Any]) -> None:
    config = from_dict({"model": {"dtype": "bfloat16"}, "parallel": {"world_size": 1}})
    layout = EngineLayout(1)
    params = family_of(hf).params(hf, 1)
    generator = torch.Generator().manual_seed(0)
    full = {item.name: torch.randn(item.shape, generator=generator).bfloat16() for row in params for item in row.hf}
    local = {row.megatron: shard(row, full, 1, 0) for row in params}
    slots = [layout.slot_of(row) for row in params if hf is not HF and is_quantised(row)]
    quantised = {slot.name for slot in slots if slot is not None}
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in engine_shapes(params, layout, 0, 4).items():
        tensors[name] = torch.zeros(shape, dtype=torch.float8_e4m3fn if name in quantised else torch.bfloat16)
        if name in quantised:
            tensors[name + SCALE_SUFFIX] = torch.zeros((*shape[:-2], *grid_shape(shape[-2:])))
    calls: list[tuple[str, bool, list[str]]] = []

    def record_order(buffer: torch.Tensor, order: dict[str, Any], draft: bool) -> None:
        result = weight_loader._write(tensors, order, buffer, writes=order["do"] == "write")
        calls.append((order["do"], all(entry[-1] != -1 for entry in order["slices"]), result))

    executor = Executor(build_plan(hf, config, layout), 0, 3, lambda size: torch.empty(size, dtype=torch.uint8))
    for version in (1, 2):
        executor.sync(local, record_order, version)
    executor.sync(local, record_order, 2, compare_only=True)
    corrupted = "model.layers.1.self_attn.o_proj.weight"
    tensors[corrupted].view(torch.uint8)[0, 0] ^= 1
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    executor.sync(local, record_order, 2, compare_only=True)
    assert calls == [("write", True, []), ("write", False, []), ("compare", True, []), ("compare", True, [corrupted])]
    assert executor.num_syncs == 2 and [is_fully_verified(number, 3) for number in range(1, 5)] == [
        True,
        False,
        False,
        True,
    ]
    assert all(torch.equal(before[name].view(torch.uint8), tensors[name].view(torch.uint8)) for name in tensors)
