"""Plays of tiny models do what follows from their sizes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from rehearsal_cases import run_cases

from megarl.config import load_config
from megarl.controllers.controller import load_requirements
from megarl.models.activation_memory import RECOMPUTED_TENSORS
from megarl.models.memory import plan_memory

HIDDEN, HEADS, GROUPS, HEAD, FFN, WIDTH, VOCAB, LAYERS = 256, 4, 2, 64, 384, 128, 512, 4
EXPERTS, TOPK, LENGTH, SEQUENCES = 4, 2, 128, 8
COMMON = dict(
    hidden_size=HIDDEN,
    num_attention_heads=HEADS,
    num_key_value_heads=GROUPS,
    head_dim=HEAD,
    intermediate_size=FFN,
    vocab_size=VOCAB,
    num_hidden_layers=LAYERS,
    max_position_embeddings=256,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    tie_word_embeddings=False,
)
MOE = dict(num_experts=EXPERTS, num_experts_per_tok=TOPK, moe_intermediate_size=WIDTH, norm_topk_prob=True)
HF: dict[str, dict[str, Any]] = {
    "dense": COMMON | dict(architectures=["LlamaForCausalLM"]),
    "deep": COMMON | dict(architectures=["LlamaForCausalLM"], num_hidden_layers=2 * LAYERS),
    "moe": COMMON | MOE | dict(architectures=["Qwen3MoeForCausalLM"], decoder_sparse_step=1, mlp_only_layers=[]),
    "mtp": COMMON
    | dict(architectures=["Glm4MoeForCausalLM"], n_routed_experts=EXPERTS, num_experts_per_tok=TOPK)
    | dict(moe_intermediate_size=WIDTH, first_k_dense_replace=1, n_shared_experts=1, routed_scaling_factor=1.5)
    | dict(attention_bias=True, use_qk_norm=True, partial_rotary_factor=0.5, norm_topk_prob=True)
    | dict(num_nextn_predict_layers=1, n_group=1, topk_group=1),
}
SELECTIVE = ["model.megatron.recompute_granularity=selective", "model.megatron.recompute_modules=[moe_act]"]
LAYERWISE = ["model.megatron.recompute_granularity=full", "model.megatron.recompute_method=uniform"]
LAYERWISE += ["model.megatron.recompute_num_layers=1"]
LORA = ["lora.target_modules=[linear_fc2]"]
FP8, BLOCKWISE = "model.megatron.fp8=hybrid", "model.megatron.fp8_recipe=blockwise"
BF16_LAYER = ["model.megatron.first_last_layers_bf16=true", "model.megatron.num_layers_at_start_in_bf16=0"]
CASES: dict[str, tuple[str, int, list[str]]] = {
    "dense": ("dense", 1, []),
    "states on the host": ("dense", 1, ["actor_optimizer.offload_fraction=1"]),
    "half of the states on the host": ("dense", 1, ["actor_optimizer.offload_fraction=0.5"]),
    "states on the host, resumed": ("dense", 1, ["actor_optimizer.offload_fraction=1", "run.save_every=1"]),
    "dense, FP8": ("dense", 1, [FP8]),
    "dense, FP8 in blocks": ("dense", 1, [FP8, BLOCKWISE]),
    "dense, FP8 but for a layer": ("dense", 1, [FP8, *BF16_LAYER]),
    "LoRA": ("dense", 1, [*LORA, "lora.rank=8"]),
    "LoRA, rank 24": ("dense", 1, [*LORA, "lora.rank=24"]),
    "CP2": ("dense", 2, ["parallel.cp=2"]),
    "PP4 VPP2": ("deep", 4, ["parallel.pp=4", "parallel.vpp=2"]),
    "MoE": ("moe", 1, []),
    "MoE, activations recomputed": ("moe", 1, SELECTIVE),
    "MoE, layers recomputed": ("moe", 1, LAYERWISE),
    "MoE TP2 EP2": ("moe", 2, ["parallel.tp=2", "parallel.ep=2"]),
    "MoE EP4": ("moe", 4, ["parallel.ep=4"]),
    "MoE EP4, 127 tokens": ("moe", 4, ["parallel.ep=4", f"train.max_tokens_per_gpu={LENGTH - 1}"]),
    "MoE TP2 EP2, FP8": ("moe", 2, ["parallel.tp=2", "parallel.ep=2", FP8]),
    "MoE EP2 with MTP": ("mtp", 2, ["parallel.ep=2", "train.mtp_loss_coef=0.1"]),
    "MoE EP2 with MTP, FP8": ("mtp", 2, ["parallel.ep=2", "train.mtp_loss_coef=0.1", FP8]),
    "MoE EP2 without MTP": ("mtp", 2, ["parallel.ep=2"]),
}
"""Model, number of ranks, and keys. The first rank is played."""
LINEAR = LAYERS * (HIDDEN * (2 * HEADS + 2 * GROUPS) * HEAD + 3 * HIDDEN * FFN)
"""Elements of the dense model's linear layers."""


def settings(folder: Path, family: str, world: int) -> dict[str, Any]:
    """Return a configuration for a model of `HF`, whose config.json is in the folder."""
    return {
        "algorithm": "sft",
        "run": {"dir": str(folder / "run"), "num_rollout": 1},
        "model": {"path": str(folder / f"{family}.json"), "dtype": "bfloat16"},
        "parallel": {"world_size": world, "ranks_per_node": 8},
        "data": {"train": "none.jsonl", "prompts_per_step": SEQUENCES},
        "train": {"max_tokens_per_gpu": LENGTH, "logits_chunk_size": 16},
    }


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("plays")
    cases = {}
    for name, hf in HF.items():
        Path(folder, f"{name}.json").write_text(json.dumps(hf))
    for number, (name, (family, world, overrides)) in enumerate(CASES.items()):
        file = folder / f"{number}.yaml"
        file.write_text(yaml.safe_dump(settings(folder, family, world)))
        cases[name] = {"config": str(file), "overrides": overrides, "rank": "first"}
    results = run_cases("plays.py", cases, folder, timeout=300)
    for name, result in results.items():
        assert "error" not in result, f"{name}: {result['error']}"
    return results


def count(result: dict[str, Any], kind: str) -> Counter[tuple[str, int]]:
    """Return how often operations of a kind were posted, by group and bytes."""
    return Counter((post["group"], post["bytes"]) for post in result["posts"] if post["kind"] == kind)


def test_states_of_a_dense_model(played: dict[str, Any]) -> None:
    """Weights 2 bytes, gradients 4, masters 4, moments 8; every tensor is rounded up to 512 bytes."""
    params = LINEAR + 2 * VOCAB * HIDDEN + (2 * LAYERS + 1) * HIDDEN
    excess = played["dense"]["built"] - 18 * params
    assert 0 <= excess < 0.01 * 18 * params


def test_states_on_the_host(played: dict[str, Any]) -> None:
    """Masters and moments, 12 bytes, leave the device; on the host gradients take 4 more, rounded up to a power of two.

    Half of them are whole parameters, of which the last one may be too many.
    """
    params = LINEAR + 2 * VOCAB * HIDDEN + (2 * LAYERS + 1) * HIDDEN
    excess = [played["dense"][name] - played["states on the host"][name] for name in ("built", "host")]
    assert 0 <= 12 * params - excess[0] + 512 * 100 < 512 * 200
    assert 16 * params <= -excess[1] < 20.1 * params
    less, more = (played["dense"][name] - played["half of the states on the host"][name] for name in ("built", "host"))
    assert 6 * params <= less + 512 * 100 < 6 * params + 12 * VOCAB * HIDDEN + 512 * 200
    assert 8 * params <= -more < 12 * params + 16 * VOCAB * HIDDEN


def test_resuming_needs_no_second_copy_of_states_on_the_host(played: dict[str, Any]) -> None:
    """Masters and moments are read into the memory that they have."""
    needed, without = (played[f"states on the host{name}"]["host"] for name in (", resumed", ""))
    assert 0 <= needed - without < 0.01 * 12 * LINEAR


ATTENTION, EXPERT, MTP_LAYER = 2, 2, 1
"""Matrices of an attention, of an expert, and of the multi-token prediction's own projection."""
LAST_LINEAR = LINEAR // LAYERS
FP8_CASES = [
    ("dense, FP8", 2 * LINEAR, 4 * LAYERS),
    ("dense, FP8 in blocks", 2 * LINEAR * (1 + 4 / 128**2), 4 * LAYERS),
    ("dense, FP8 but for a layer", 2 * (LINEAR - LAST_LINEAR), 4 * (LAYERS - 1)),
    ("MoE TP2 EP2, FP8", 0, LAYERS * (ATTENTION + EXPERT * EXPERTS // 2)),
    # The first layer is dense; those of experts, and that of the prediction, have a shared expert.
    ("MoE EP2 with MTP, FP8", 0, 4 + LAYERS * (ATTENTION + EXPERT * (EXPERTS // 2 + 1)) + MTP_LAYER),
]
"""Case, bytes of FP8 copies if these are known, and number of matrices on the rank."""


@pytest.mark.parametrize(("case", "nbytes", "matrices"), FP8_CASES)
def test_fp8_copies_of_weights_are_planned(
    played: dict[str, Any], tmp_path: Path, case: str, nbytes: float, matrices: int
) -> None:
    """A rehearsal rounds two copies of each matrix up to 512 bytes, and their scales."""
    excess, without = (played[name]["end"] - played[name]["built"] for name in (case, case.rpartition(", FP8")[0]))
    family, world, overrides = CASES[case]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings(tmp_path, family, world)))
    config = load_config(str(tmp_path / "config.yaml"), overrides)
    planned = plan_memory(HF[family], config, load_requirements(config))[0].states["actor FP8 copies of weights"]
    assert planned == nbytes or not nbytes
    scales = planned - planned * 128**2 // (128**2 + 4) if BLOCKWISE in overrides else 0
    assert excess - without == planned - scales + 2 * 512 * matrices


def test_adapters(played: dict[str, Any]) -> None:
    difference = played["LoRA, rank 24"]["built"] - played["LoRA"]["built"]
    assert difference == 18 * 16 * LAYERS * (FFN + HIDDEN)


def test_ring_of_context_parallel_ranks(played: dict[str, Any]) -> None:
    """Forward keys and values once, backward once and then with their gradients."""
    result = played["CP2"]
    tokens, layers = result["local_rows"], LAYERS * result["micro_batches"]
    size = 2 * tokens * 2 * GROUPS * HEAD
    sends = {bytes_: number for (_, bytes_), number in count(result, "send").items()}
    assert sends == {size: 2 * layers, 2 * size: layers}


def test_sends_of_the_first_stage(played: dict[str, Any]) -> None:
    """Two chunks send activations, and the second one gradients to the last stage."""
    result = played["PP4 VPP2"]
    sends = {bytes_: number for (_, bytes_), number in count(result, "send").items()}
    assert sends[2 * result["local_rows"] * HIDDEN] == 3 * result["micro_batches"]


def test_choices_that_do_not_divide_are_rounded_up(played: dict[str, Any]) -> None:
    """127 tokens with 2 experts each are 254 choices: 64 of each of 4 ranks, as of 128 tokens."""
    odd, even = (
        [post["sends"] for post in played[name]["posts"] if post["kind"] == "all_to_all_single"]
        for name in ("MoE EP4, 127 tokens", "MoE EP4")
    )
    assert odd == even and [64 * 2 * HIDDEN] * 4 in odd


def test_all_to_alls(played: dict[str, Any]) -> None:
    """In each MoE layer tokens and their probabilities go out and tokens return, forward and backward."""
    layers = {"MoE TP2 EP2": LAYERS, "MoE EP2 without MTP": LAYERS - 1, "MoE EP2 with MTP": LAYERS, "MoE": 0}
    for name, number in layers.items():
        result = played[name]
        exchanges = sum(count(result, "all_to_all_single").values())
        assert exchanges == 2 * 3 * number * result["micro_batches"], name


def test_recomputation_lowers_the_peak(played: dict[str, Any]) -> None:
    """Weighted products of all layers but the one whose backward pass runs are not saved."""
    assert RECOMPUTED_TENSORS["moe_act"] == ("products",)
    products = 2 * LENGTH * TOPK * WIDTH
    peaks = [played[name]["peaks"]["actor_update"] for name in ("MoE", "MoE, activations recomputed")]
    assert (LAYERS - 1) * products <= peaks[0] - peaks[1] <= LAYERS * products


def test_no_layer_input_outlives_its_backward_pass(played: dict[str, Any]) -> None:
    """Nor its gradient, which the router's probabilities of a recomputed layer would keep."""
    after, saved = (played[f"MoE{name}"]["end"] - played[f"MoE{name}"]["built"] for name in (", layers recomputed", ""))
    assert abs(after - saved) < 2 * LENGTH * HIDDEN
