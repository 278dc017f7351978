"""Shard the same random weights on all ranks, gather and compare them. argv: tp pp ep etp."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable
from typing import Any

import torch

from megarl.checkpoint.export import gather_hf
from megarl.config import ParallelConfig
from megarl.models.layout_algebra import Param, shard
from megarl.models.registry import family_of
from megarl.parallel import ranks
from megarl.reshard.plan.layout import TrainLayout

COMMON: dict[str, Any] = {
    "vocab_size": 150,
    "hidden_size": 8,
    "intermediate_size": 16,
    "moe_intermediate_size": 4,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"architectures": ["Qwen3MoeForCausalLM"], "num_key_value_heads": 2, "num_experts": 4},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2, "tie_word_embeddings": True},
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_key_value_heads": 4,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "n_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 0,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "q_lora_rank": 6,
        "kv_lora_rank": 4,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 2,
        "v_head_dim": 4,
    },
}
STAGES = {1: ((0, 1, 2),), 2: ((0,), (1, 2))}  # uneven on purpose


FAULTS = ("missing", "misshapen", "dtype", "unknown")
FAULTY = "decoder.layers.2.mlp.experts.3.linear_fc2.weight"  # on the last EP rank of the last stage

Tensors = dict[str, torch.Tensor]


def checksum(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return one order-independent hash of the names, dtypes, shapes and bits of all tensors."""
    total = 0
    for name, tensor in tensors:
        digest = hashlib.sha256(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        total += int.from_bytes(digest.digest(), "big")
    return f"{total % (1 << 256):064x}"


def random_weights(params: list[Param]) -> Tensors:
    generator = torch.Generator().manual_seed(1)
    return {
        tensor.name: torch.randn(tensor.shape, generator=generator).to(param.dtype or torch.bfloat16)
        for param in params
        for tensor in param.hf
    }


def local_shards(params: list[Param], full: Tensors, layout_ranks: ranks.Ranks) -> Tensors:
    layout = TrainLayout(
        layout_ranks.job.world, layout_ranks.tp, layout_ranks.ep, STAGES[layout_ranks.pp], layout_ranks.etp
    )
    local = {}
    for param in params:
        if layout.has_param(layout_ranks.job.rank, param, num_experts=4):
            local_shard = shard(param, full, *layout_ranks.tp_size_and_rank(param.expert is not None))
            local[param.megatron] = local_shard.requires_grad_(not param.is_buffer)
    return local


def is_exact(gathered: list[tuple[str, torch.Tensor]], full: Tensors) -> bool:
    equal = all(t.dtype == full[n].dtype and not t.requires_grad and torch.equal(t, full[n]) for n, t in gathered)
    ordered = [name for name, _ in gathered] == list(full)
    return equal and ordered and checksum(gathered) == checksum(full.items())


def inject_fault(local: Tensors, fault: str) -> Tensors:
    faulty = dict(local)
    if fault == "missing":
        del faulty[FAULTY]
    elif fault == "misshapen":
        faulty[FAULTY] = faulty[FAULTY][:1]
    elif fault == "dtype":
        faulty[FAULTY] = faulty[FAULTY].float()
    else:
        faulty["value_head.weight"] = faulty[FAULTY]
    return faulty


def error_of(local: Tensors, params: list[Param], layout_ranks: ranks.Ranks) -> str:
    try:
        list(gather_hf(local, params, layout_ranks))
    except ValueError as error:
        return str(error)
    return ""


def main(tp: int, pp: int, ep: int, etp: int) -> None:
    world = int(os.environ["WORLD_SIZE"])
    layout_ranks = ranks.initialize(ParallelConfig(world_size=world, tp=tp, pp=pp, ep=ep, etp=etp), timeout_s=60)
    result: dict[str, Any] = {"has_all_params": False}
    for family, options in MODELS.items():
        hf = COMMON | options
        params = family_of(hf).params(hf, tp, etp)
        full = random_weights(params)
        local = local_shards(params, full, layout_ranks)
        if family == "qwen2" and layout_ranks.pp_rank == pp - 1 > 0:
            local["embedding.word_embeddings.weight"] = full[
                "model.embed_tokens.weight"
            ]  # Megatron's copy for the head
        result[family] = [
            is_exact(list(gather_hf(local, params, layout_ranks, size)), full) for size in (1, 2000, 1 << 30)
        ]
        if family == "qwen3_moe":
            result["has_all_params"] = len(local) == len(params)
            last = layout_ranks.job.rank == world - 1
            result["faults"] = {
                fault: error_of(inject_fault(local, fault) if last else local, params, layout_ranks) for fault in FAULTS
            }
    print("RESULT", json.dumps(result), flush=True)
    ranks.shutdown()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
