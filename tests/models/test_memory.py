"""Bytes per rank against counts made in other ways: transformers' own models, published sizes, Megatron's formula."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megarl.config import Config, from_dict, load_config
from megarl.models.memory import (
    activation_elements,
    critic_params,
    engine_bytes,
    kv_elements,
    logits_bytes,
    plan_memory,
    stage_elements,
    state_bytes,
)
from megarl.models.registry import family_of, load_hf_config, param_count
from megarl.models.stages import stage_layers

ROOT = Path(__file__).resolve().parent.parent.parent
MODELS = ROOT / "configs" / "models"
QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
MOE = QWEN2 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}


def config_of(**sections: Any) -> Config:
    return from_dict({"model": {"dtype": "bfloat16"}, **sections})


@pytest.mark.parametrize(
    "file, total",
    [
        ("deepseek_v3.json", 671_026_419_200),  # 671.0 B without the multi-token prediction layer
        ("qwen3_235b.json", 235_093_634_560),
        ("qwen2.5_0.5b.json", 494_032_768),
    ],
)
def test_published_sizes(file: str, total: int) -> None:
    hf = load_hf_config(MODELS / file)
    assert sum(param_count(hf).values()) == total
    # On one rank without padding (all three vocabularies are multiples of 128) the plan counts the same.
    layers = [range(hf["num_hidden_layers"])]
    assert sum(stage_elements(family_of(hf).params(hf, 1), 1, 1, layers)[0]) == total


@pytest.mark.parametrize(
    "name, hf", [("Qwen2", QWEN2), ("Qwen3Moe", MOE), ("Qwen2", QWEN2 | {"tie_word_embeddings": True})]
)
def test_elements_are_those_of_transformers(transformers_models: ModuleType, name: str, hf: dict[str, Any]) -> None:
    values = {key: value for key, value in hf.items() if key != "architectures"}
    model = getattr(transformers_models, f"{name}ForCausalLM")(getattr(transformers_models, f"{name}Config")(**values))
    layers = [range(hf["num_hidden_layers"])]
    assert sum(stage_elements(family_of(hf).params(hf, 1), 1, 1, layers)[0]) == model.num_parameters()
    critic = sum(stage_elements(critic_params(family_of(hf).params(hf, 1), 64), 1, 1, layers)[0])
    head = 0 if hf["tie_word_embeddings"] else 1024 * 64
    assert critic == model.num_parameters() - head + 64


def test_ranks_together_hold_every_weight_once_or_as_often_as_it_is_replicated() -> None:
    params = family_of(MOE).params(MOE, 2)
    held = stage_elements(params, 2, 4, stage_layers(4, 2, {}))
    experts = sum(param.size for param in params if param.expert is not None)
    assert sum(expert for _, expert in held) * 4 == experts
    # Replicated on both tensor parallel ranks: norms and routers.
    copies = 4 * (2 * 64 + 2 * 32 + 8 * 64) + 64
    dense = sum(param.size for param in params if param.expert is None)
    assert sum(dense for dense, _ in held) * 2 == dense + copies
    assert held[0][0] - held[1][0] == -64  # the embedding and the output layer weigh the same, the final norm is extra


def test_a_tied_embedding_has_a_copy_on_the_last_stage() -> None:
    tied = QWEN2 | {"tie_word_embeddings": True}
    params = family_of(tied).params(tied, 1)
    (first, _), (last, _) = stage_elements(params, 1, 1, stage_layers(4, 2, {}))
    assert last - first == 64  # the final norm
    assert stage_elements(params, 1, 1, [range(4)])[0][0] == sum(param.size for param in params)


def test_a_vocabulary_is_padded() -> None:
    odd = QWEN2 | {"vocab_size": 1000}
    held = stage_elements(family_of(odd).params(odd, 1), 1, 1, [range(4)])[0][0]
    assert held - sum(param_count(odd).values()) == 2 * 24 * 64
    # 4 tokens of 512 words in bf16 and fp32; the weight's gradient in fp32 and bf16; 10 hidden states, twice
    expected = 4 * 512 * (2 + 16) + 512 * 64 * (4 + 2) + 2 * 10 * 64 * 2
    assert logits_bytes(1000, 64, 2, tokens=10, at_once=4, size=2) == expected


@pytest.mark.parametrize("size, dp, per_element", [(2, 1, 18.0), (2, 4, 6 + 12 / 4), (4, 1, 16.0), (4, 8, 8 + 8 / 8)])
def test_bytes_of_the_distributed_optimizer(size: int, dp: int, per_element: float) -> None:
    """The table in Megatron-Core's guide: 6 + 12 / d in bf16 with fp32 gradients, 8 + 8 / d in fp32."""
    assert sum(state_bytes(1000, 0, dp, 1, size).values()) == 1000 * per_element
    assert sum(state_bytes(0, 1000, 1, dp, size).values()) == 1000 * per_element  # experts, by their own sharing


def test_the_671b_policy_alone_takes_18_bytes_an_expert_weight() -> None:
    """ep 32 x pp 16 = 512 ranks: no two hold the same expert, so its optimizer states are not shared."""
    config = load_config(ROOT / "configs" / "deepseek_v3_671b.yaml")
    hf = load_hf_config(config.model.hf_config)
    stages = plan_memory(hf, config)
    assert [len(stage.layers) for stage in stages] == [3, *[4] * 14, 2]
    ranks = config.parallel.world_size // config.parallel.pp
    states = sum(sum(stage.states.values()) for stage in stages) * ranks
    experts = param_count(hf)["experts"] * 18
    assert experts < states < experts * 1.1
    with_critic = plan_memory(hf, config, hf)
    assert sum(with_critic[1].states.values()) == 2 * sum(stages[1].states.values())  # no embedding, no head: the same
    assert max(stage.peak for stage in with_critic) < 0.93 * 141e9


def test_engine_weights() -> None:
    params = family_of(QWEN2).params(QWEN2, 1)
    assert engine_bytes(params, 1, 2, False) == 2 * sum(param.size for param in params)
    # tp 4 with 2 key-value heads: every rank has one head of keys and values, a quarter of the rest, all of the norms.
    norms = (2 * 4 + 1) * 64
    kv = 4 * 2 * (32 * 64 + 32)  # k and v of four layers, weights and biases
    rest = sum(param.size for param in params) - norms - kv
    assert engine_bytes(params, 4, 1, False) == rest // 4 + kv // 2 + norms
    # In FP8 the matrices of the layers have a byte an element, and 4 for each block of 128 x 128.
    matrices = sum(p.size for p in params if p.megatron.startswith("decoder.layers") and p.megatron.endswith("weight"))
    matrices -= (2 * 4) * 64
    others = sum(param.size for param in params) - matrices
    assert engine_bytes(params, 1, 2, True) == pytest.approx(2 * others + matrices * (1 + 4 / 128**2), abs=1)


def test_kv_cache() -> None:
    gqa = family_of(MOE).megatron_config(MOE)
    assert kv_elements(gqa, 1) == 2 * 4 * 2 * 32
    assert kv_elements(gqa, 2) == kv_elements(gqa, 4) == 2 * 4 * 1 * 32
    deepseek = load_hf_config(MODELS / "deepseek_v3.json")
    assert kv_elements(family_of(deepseek).megatron_config(deepseek), 32) == 61 * 576  # 70 KB a token, on every rank


def test_activations_scale() -> None:
    settings = family_of(QWEN2).megatron_config(QWEN2)
    one = activation_elements(settings, range(2), tp=1, tokens=100, in_flight=1)
    # By hand: inputs and outputs of two norms; q, k, v and attention's output; gate, up and their product.
    assert one == 100 * 2 * (4 * 64 + (64 + 32 + 32 + 64) + 3 * 96)
    assert activation_elements(settings, range(2), tp=2, tokens=100, in_flight=3) == one * 3 // 2
    full = settings | {"recompute_granularity": "full"}
    assert activation_elements(full, range(2), tp=1, tokens=100, in_flight=3) == 100 * (3 * 2 * 64) + one // 2


def test_what_a_run_without_rollouts_needs() -> None:
    sft = plan_memory(QWEN2, config_of(algorithm="sft"))[0]
    assert sft.generation == {} and sft.host == {}
    grpo = plan_memory(QWEN2, config_of(algorithm="grpo", kl={"place": "none"}))[0]
    assert grpo.generation["engine weights"] == sum(param_count(QWEN2).values()) * 2
    assert grpo.host == {}
    trained = plan_memory(QWEN2, config_of(algorithm="reward_model", model={"dtype": "float32"}))[0]
    count = sum(param_count(QWEN2).values()) - 1024 * 64 + 64  # a head of one value for the words
    assert trained.states == {
        "reward model weights": 4 * count,
        "reward model gradients": 4 * count,
        "reward model optimizer": 8 * count,
    }
    assert trained.generation == {} and trained.training["logits"] == 0
    ppo = plan_memory(QWEN2, config_of(), QWEN2)[0]
    assert ppo.host["reference weights"] == ppo.states["actor weights"]
    assert ppo.training_total == sum(ppo.states.values()) + ppo.training["activations"] + ppo.training["logits"]


def test_a_reward_model_that_serves_has_fp32_weights_alone() -> None:
    layout = {"parallel": {"world_size": 4, "tp": 2, "pp": 2}, "rollout": {"max_context": 128}}
    plain, served = (plan_memory(QWEN2, config_of(**layout), QWEN2, reward) for reward in (None, MOE))
    layers = [range(2), range(2, 4)]
    elements = stage_elements(critic_params(family_of(MOE).params(MOE, 2), 64), 2, 1, layers)
    for before, after, (dense, expert) in zip(plain, served, elements, strict=True):
        assert after.states == before.states | {"reward model weights": 4 * (dense + expert)}
        assert after.training == before.training
        # One layer of 3072 tokens: norms; q, k, v and attention's output; of 2 experts input, output and three widths.
        one = 4 * 64 + (2 * 4 + 2 * 2) * 32 + 2 * (2 * 64 + 3 * 48)
        assert after.generation == before.generation | {"reward model activations": 4 * 3072 * one // 2}


def test_lora_keeps_gradients_and_states_of_adapters_only() -> None:
    """One layer's factors by hand: qkv 4 (64 + 256), proj 4 (128 + 64), of each of 8 experts 4 (64 + 96 + 48 + 64)."""
    config = {"parallel": {"world_size": 2, "tp": 1, "pp": 1, "ep": 2}, "reward": {"functions": ["a:b"]}}
    full = plan_memory(MOE, config_of(**config), MOE)[0]
    lora = plan_memory(MOE, config_of(**config, lora={"rank": 4}), MOE)[0]
    dense, expert = 4 * 4 * (64 + 256 + 128 + 64), 4 * 4 * 4 * (64 + 96 + 48 + 64)
    assert lora.states["actor weights"] == full.states["actor weights"] + 2 * (dense + expert)
    assert lora.states["actor gradients"] == 4 * (dense + expert)
    assert lora.states["actor optimizer"] == 6 * dense + 12 * expert
    assert lora.states["critic gradients"] == 4 * (dense + expert + 64)  # and the value head
    assert lora.states["critic weights"] == full.states["critic weights"] + 2 * (dense + expert)
    assert "reference weights" in full.host and not lora.host  # the reference is the actor without its adapters
