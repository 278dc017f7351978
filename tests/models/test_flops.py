"""Counted operations compared with what torch counts in transformers' models, and with counts by hand."""

from __future__ import annotations

import importlib
import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megarl.config import LoraConfig
from megarl.models.flops import PEAK_FLOPS, Flops, model_flops, peak_flops, windowed_pairs

pytestmark = pytest.mark.alone

TESTS = Path(__file__).resolve().parents[1]
CONFIGS = TESTS.parent / "configs/models"
LENGTH = 40


def load_tiny() -> Any:
    spec = importlib.util.spec_from_file_location("tiny", TESTS / "megatron/tiny.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TINY = load_tiny()


def masked_half(flops: Flops, length: int) -> float:
    """Return the extra operations of eager attention, which computes all pairs and masks half of them, or more."""
    return (
        (flops.attention_per_pair + flops.windowed_per_pair + flops.indexed_per_pair) * length**2
        - flops.forward([length])
        + length * (flops.forward_per_token + flops.head_forward)
    )


FAMILIES = ("qwen3_moe", "deepseek_v3", "deepseek_v2", "glm4_moe", "qwen3", "llama", "gemma2", "qwen3_next", "qwen3_5")
FAMILIES += ("gpt_oss", "glm_moe_dsa", "minimax_m2", "glm4_moe_lite", "mixtral", "ernie4_5_moe")


@pytest.mark.parametrize("family", FAMILIES)
def test_flops_match_torch_within_one_percent(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hf = TINY.HF[family]
    recurrence = 0
    if "linear_num_value_heads" in hf:
        # transformers computes chunks. Token by token it has no matrix products, and torch counts nothing; of a
        # depthwise convolution it counts all pairs of channels.
        modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        monkeypatch.setattr(modeling, "torch_chunk_gated_delta_rule", modeling.torch_recurrent_gated_delta_rule)
        monkeypatch.setattr(modeling, "causal_conv1d_fn", lambda x, weight, *_, **__: x * weight.sum(-1)[:, None])
        (keys, key), (values, value) = (
            (hf[f"linear_num_{kind}_heads"], hf[f"linear_{kind}_head_dim"]) for kind in ("key", "value")
        )
        recurrence = 2 * LENGTH * (3 * values * key * value + 4 * (2 * keys * key + values * value))  # of one layer
    model = TINY.hf_model(family)
    model.set_attn_implementation("eager")
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # other implementations compute experts that no token chose
    ids = torch.randint(0, 200, (1, LENGTH))
    counted = {}
    with FlopCounterMode(display=False) as counter:
        logits = model(ids, use_cache=False).logits
    counted["forward"] = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        logits.sum().backward()
    counted["backward"] = counter.get_total_flops()
    flops = model_flops(hf)
    masked = masked_half(flops, LENGTH)
    assert flops.forward([LENGTH]) + masked - recurrence == pytest.approx(counted["forward"], rel=0.01)
    masked = masked_half(replace(flops, indexed_per_pair=0.0), LENGTH)
    assert flops.backward([LENGTH]) + 2 * (masked - recurrence) == pytest.approx(counted["backward"], rel=0.01)


def test_lora_backward_trains_adapters_only() -> None:
    """Compare with the passes of W x + B (A x) that torch counts."""
    hf = TINY.HF["llama"]
    full, adapted = model_flops(hf), model_flops(hf, LoraConfig(rank=4, target_modules=("linear_proj",)))
    x = torch.randn(LENGTH, 64, requires_grad=True)
    w, a, b = torch.randn(32, 64), torch.randn(4, 64, requires_grad=True), torch.randn(32, 4, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        y = x @ w.T + x @ a.T @ b.T
    forward = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        y.sum().backward()
    weight_flops = 2 * 32 * 64 * LENGTH
    layers = 2
    adapter_flops = adapted.forward([LENGTH]) - full.forward([LENGTH])
    assert adapter_flops == layers * (forward - weight_flops)
    frozen = full.backward_per_token / 2 + counter.get_total_flops() * layers / LENGTH - layers * weight_flops / LENGTH
    assert adapted.backward_per_token == pytest.approx(frozen)
    assert adapted.head_backward == full.head_backward / 2


def test_adapters_of_mtp_layers_do_not_count() -> None:
    hf = json.loads((CONFIGS / "deepseek_v3.json").read_text()) | {"num_hidden_layers": 4}
    full, adapted = model_flops(hf), model_flops(hf, LoraConfig(rank=4, target_modules=("eh_proj",)))
    assert adapted.forward_per_token == full.forward_per_token == adapted.backward_per_token
    decoder, both = (
        model_flops(hf, LoraConfig(rank=4, target_modules=targets))
        for targets in (("linear_proj",), ("linear_proj", "eh_proj"))
    )
    assert both == decoder and decoder.forward_per_token > full.forward_per_token


def test_counts_active_experts_and_scalar_head() -> None:
    hf = TINY.HF["qwen3_moe"]
    top2, top3 = (model_flops({**hf, "num_experts_per_tok": n}).forward_per_token for n in (2, 3))
    assert top3 - top2 == 2 * 2 * 3 * 32 * 24  # layers; gate, up and down of an expert
    assert model_flops(hf, has_scalar_head=True).head_forward == 2 * 32


def test_flops_of_deepseek_v3() -> None:
    """DeepSeek-V3 has 36.6e9 active weights without its embedding, which takes no multiplication."""
    flops = model_flops(json.loads((CONFIGS / "deepseek_v3.json").read_text()))
    assert flops.forward_per_token + flops.head_forward == pytest.approx(2 * 36.6e9, rel=0.01)
    assert flops.backward([100]) == 2 * flops.forward([100])
    assert flops.forward([100], logits=10) == flops.forward([100]) - 90 * flops.head_forward


def test_attention_pairs_by_hand() -> None:
    for length, window in ((1, 4), (4, 4), (9, 4)):
        assert windowed_pairs(length, window) == sum(min(n + 1, window) for n in range(length))
    flops = Flops(0.0, 0.0, 0.0, 0.0, attention_per_pair=1.0)
    assert flops.forward([3, 2]) == 6 + 3, "sequences do not see each other"


@pytest.mark.parametrize(
    ("name", "peak_name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H200 NVL", "H200 NVL"),
        ("NVIDIA H800 PCIe", "H800 PCIe"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA A100-PCIE-40GB", "A100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090 D", "RTX 4090 D"),
        ("NVIDIA GeForce RTX 3090 Ti", "RTX 3090 Ti"),
    ],
)
def test_peak_flops_by_cuda_device_name(name: str, peak_name: str) -> None:
    assert peak_flops(name) == PEAK_FLOPS[peak_name]


def test_peak_flops_of_unknown_gpu_is_none() -> None:
    assert peak_flops("AMD Instinct MI300X") is None and peak_flops("") is None
    assert peak_flops("NVIDIA A10G") is None, "an A10G has half the speed of an A10"
