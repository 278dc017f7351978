"""Bytes per rank compared with transformers' models, published sizes and Megatron's formulas."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from measured_steps import read_steps
from small_configs import QWEN2

from megarl.config import Config, ConfigError, ParallelConfig, from_dict, load_config
from megarl.controllers.controller import load_requirements
from megarl.models.activation_memory import (
    activation_elements,
    logits_bytes,
    micro_batch_bytes,
    micro_batches_in_flight,
)
from megarl.models.memory import (
    ElementCounts,
    ModelVariant,
    StageMemory,
    classifier_stages,
    engine_bytes,
    inference_stages,
    kv_elements,
    pack,
    plan_memory,
    stage_elements,
    stage_fp8_copies,
    state_bytes,
    sync_staging_bytes,
    unique_params,
)
from megarl.models.pipeline_stages import stage_layers
from megarl.models.registry import family_of, load_hf_config, param_count

pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parent.parent.parent
MODELS = ROOT / "configs" / "models"
MOE = QWEN2 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}


def make_config(**sections: Any) -> Config:
    return from_dict({"model": {"dtype": "bfloat16"}, **sections})


def plan_stages(hf: dict[str, Any], config: Config, *others: Any) -> list[StageMemory]:
    return plan_memory(hf, config, load_requirements(config), *others)


def stage_counts(hf: dict[str, Any], head: bool = False, **sizes: int) -> list[ElementCounts]:
    """Return the element counts of each stage, with layers split evenly."""
    parallel = ParallelConfig(**sizes)
    stages = stage_layers(hf["num_hidden_layers"], parallel.pp, {}, parallel.vpp)
    return stage_elements(hf, parallel, stages, ModelVariant(head))


@pytest.mark.parametrize(
    "file, total",
    [
        (
            "deepseek_v3.json",
            671_026_419_200,
        ),  # without the MTP layer, and with 58 router biases that the published count omits
        ("qwen3_235b.json", 235_093_634_560),
        ("qwen3_30b_a3b.json", 30_532_122_624),
        ("gpt_oss_20b.json", 20_914_757_184),
        ("gpt_oss_120b.json", 116_829_156_672),
        ("qwen3_next_80b_a3b.json", 79_674_391_296),
        ("qwen3.5_35b_a3b.json", 34_660_610_688),
        ("qwen3.5_397b_a17b.json", 396_346_350_336),
        ("qwen2.5_7b.json", 7_615_616_512),
        ("qwen2.5_0.5b.json", 494_032_768),
        ("mixtral_8x7b.json", 46_702_792_704),
        ("ernie4.5_21b.json", 21_825_437_888),
    ],
)
def test_counts_match_published_sizes(file: str, total: int) -> None:
    hf = load_hf_config(MODELS / file)
    assert sum(param_count(hf).values()) == total
    # On one rank without padding (all the vocabularies are multiples of 128) the plan counts the same.
    assert sum(stage_counts(hf)[0]) == total
    assert sum(param.size * count for param, count in unique_params(hf)) == total


@pytest.mark.parametrize(
    "name, hf", [("Qwen2", QWEN2), ("Qwen3Moe", MOE), ("Qwen2", QWEN2 | {"tie_word_embeddings": True})]
)
def test_counts_match_transformers(name: str, hf: dict[str, Any]) -> None:
    import transformers

    values = {key: value for key, value in hf.items() if key != "architectures"}
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**values))
    assert sum(stage_counts(hf)[0]) == model.num_parameters()
    head = 0 if hf["tie_word_embeddings"] else 1024 * 64
    assert sum(stage_counts(hf, head=True)[0]) == model.num_parameters() - head + 64


@pytest.mark.parametrize("etp", [1, 2])
def test_ranks_hold_each_weight_once_per_replica(etp: int) -> None:
    params = family_of(MOE).params(MOE, 2)
    stages = stage_counts(MOE, tp=2, ep=4, etp=etp, pp=2)
    experts = sum(param.size for param in params if param.expert is not None)
    assert sum(stage.expert for stage in stages) * 4 * etp == experts
    # Both tensor parallel ranks have norms and routers.
    copies = 4 * (2 * 64 + 2 * 32 + 8 * 64) + 64
    dense = sum(param.size for param in params if param.expert is None)
    assert sum(stage.dense for stage in stages) * 2 == dense + copies
    # The embedding and the output layer weigh the same, the final norm is extra.
    assert stages[0].dense - stages[1].dense == -64
    # With virtual stages, a stage has other layers but as many of them.
    assert stage_counts(MOE, tp=2, ep=4, etp=etp, pp=2, vpp=2) == stages
    with pytest.raises(ConfigError, match="moe_intermediate_size=48 does not divide by tensor parallel size 5"):
        stage_counts(MOE, etp=5)


def test_tied_embedding_is_copied_to_the_last_stage() -> None:
    tied = QWEN2 | {"tie_word_embeddings": True}
    first, last = stage_counts(tied, pp=2)
    assert last.dense - first.dense == 64  # the final norm
    assert stage_counts(tied)[0].dense == sum(param.size for param in family_of(tied).params(tied, 1))
    first, last = stage_counts(tied, head=True, pp=2)  # a scalar head has no output layer to tie
    assert first.dense - last.dense == 1024 * 64 - 2 * 64


def test_mtp_layers_and_embedding_copy_are_on_the_last_stage() -> None:
    """The published checkpoint has 684.5 B parameters because its MTP layer repeats embedding and head."""
    hf = load_hf_config(MODELS / "deepseek_v3.json")
    total, vocabulary = 682_636_487_424, 129280 * 7168
    assert sum(param.size * count for param, count in unique_params(hf, mtp=True)) == total
    assert round((total + 2 * vocabulary) / 1e9, 1) == 684.5
    parallel, stages = ParallelConfig(world_size=2, pp=2), [range(31), range(31, 61)]
    plain, drafting = (stage_elements(hf, parallel, stages, ModelVariant(mtp=mtp)) for mtp in (False, True))
    assert drafting[0] == plain[0]
    layer = total - 671_026_419_200
    assert sum(drafting[1]) - sum(plain[1]) == layer + vocabulary
    uneven = {"num_layers_in_last_pipeline_stage": 30}
    config = from_dict({"model": {"megatron": uneven}, "parallel": {"world_size": 2, "pp": 2, "ranks_per_node": 2}})
    (_, before), (_, after) = (
        plan_stages(hf, replace(config, train=replace(config.train, mtp_loss_coef=weight))) for weight in (0.0, 0.1)
    )
    assert after.states["actor weights"] - before.states["actor weights"] == 2 * (layer + vocabulary - 256) + 4 * 256
    assert after.training["activations"] > before.training["activations"]


def test_router_biases_are_fp32_and_frozen() -> None:
    hf = load_hf_config(MODELS / "deepseek_v3.json")
    (stage,) = stage_counts(hf, tp=8, ep=32)
    assert stage.biases == 58 * 256
    without_biases = state_bytes(stage._replace(biases=0), 8, 2, 2)
    full = state_bytes(stage, 8, 2, 2)
    assert full == without_biases | {"weights": without_biases["weights"] + 4 * 58 * 256}


def test_counts_include_vocabulary_padding() -> None:
    odd_vocab = QWEN2 | {"vocab_size": 1000}
    assert stage_counts(odd_vocab)[0].dense - sum(param_count(odd_vocab).values()) == 2 * 24 * 64
    # 4 tokens of 512 words in bf16 and fp32; the weight's gradient in fp32 and bf16; 10 hidden states, twice
    expected = 4 * 512 * (2 + 16) + 512 * 64 * (4 + 2) + 2 * 10 * 64 * 2
    assert logits_bytes(1000, 64, 2, tokens=10, chunk_tokens=4, size=2) == expected


@pytest.mark.parametrize("size, dp, per_element", [(2, 1, 18.0), (2, 4, 6 + 12 / 4), (4, 1, 16.0), (4, 8, 8 + 8 / 8)])
def test_distributed_optimizer_bytes_per_element(size: int, dp: int, per_element: float) -> None:
    """Megatron-Core's guide: 6 + 12 / d in bf16 with fp32 gradients, and 8 + 8 / d in fp32."""
    assert sum(state_bytes(ElementCounts(1000, 0), dp, 1, size).values()) == 1000 * per_element
    # Experts have data parallel groups of their own.
    assert sum(state_bytes(ElementCounts(0, 1000), 1, dp, size).values()) == 1000 * per_element


def test_671b_policy_takes_18_bytes_per_expert_weight() -> None:
    """With ep 32 x pp 16 = 512 ranks no two hold the same expert, so its optimizer states are not sharded."""
    config = load_config(ROOT / "configs" / "deepseek_v3_671b.yaml")
    hf = load_hf_config(config.model.hf_config)
    stages = plan_stages(hf, config)
    assert [len(stage.layers) for stage in stages] == [3, *[4] * 14, 2]
    ranks = config.parallel.world_size // config.parallel.pp
    states = sum(sum(stage.states.values()) for stage in stages) * ranks
    experts = param_count(hf)["experts"] * 18
    assert experts < states < experts * 1.1
    with_critic = plan_stages(hf, config, hf)
    assert sum(with_critic[1].states.values()) == 2 * sum(stages[1].states.values())  # no embedding, no head: the same
    assert max(stage.peak for stage in with_critic) < 0.93 * 141e9


def test_engine_bytes_by_hand() -> None:
    params = family_of(QWEN2).params(QWEN2, 1)
    assert engine_bytes(QWEN2, 1, 2) == 2 * sum(param.size for param in params)
    # tp 4 with 2 key-value heads: every rank has one head of keys and values, a quarter of the rest, all of the norms.
    norms = (2 * 4 + 1) * 64
    kv = 4 * 2 * (32 * 64 + 32)  # k and v of four layers, weights and biases
    sharded_elements = sum(param.size for param in params) - norms - kv
    assert engine_bytes(QWEN2, 4, 1) == sharded_elements // 4 + kv // 2 + norms
    # In FP8 the matrices of the layers have a byte an element, and 4 for each block of 128 x 128.
    matrices = sum(p.size for p in params if p.megatron.startswith("decoder.layers") and p.megatron.endswith("weight"))
    matrices -= (2 * 4) * 64
    other_elements = sum(param.size for param in params) - matrices
    quantised = QWEN2 | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    assert engine_bytes(quantised, 1, 2) == pytest.approx(2 * other_elements + matrices * (1 + 4 / 128**2), abs=1)


def test_engine_bytes_of_redundant_experts() -> None:
    experts = family_of(MOE).num_experts(MOE)
    one = sum(param.size for param in family_of(MOE).params(MOE, 1) if param.expert == 0)
    assert engine_bytes(MOE, 2, 2, copies=4) - engine_bytes(MOE, 2, 2) == 2 * 4 * one // 2
    assert experts >= 4


def test_kv_elements_by_hand() -> None:
    assert kv_elements(MOE, 1) == 2 * 4 * 2 * 32
    assert kv_elements(MOE, 2) == kv_elements(MOE, 4) == 2 * 4 * 1 * 32
    deepseek = load_hf_config(MODELS / "deepseek_v3.json")
    assert kv_elements(deepseek, 32) == 61 * 576  # 70 KB a token, on every rank
    assert kv_elements(deepseek, 32, drafts=True) == 62 * 576
    layer = sum(param.size * count for param, count in unique_params(deepseek, mtp=True)) - 671_026_419_200
    assert engine_bytes(deepseek, 1, 2, drafts=True) - engine_bytes(deepseek, 1, 2) == 2 * layer


def test_activation_elements_by_hand() -> None:
    settings = family_of(QWEN2).megatron_config(QWEN2)
    saved, work = activation_elements(settings, [range(2)], tp=1, tokens=100, in_flight=1)
    # By hand: inputs and outputs of two norms; q, k, v and attention's output; gate, up and their product.
    assert saved == 100 * 2 * (4 * 64 + (64 + 32 + 32 + 64) + 3 * 96)
    assert work == 100 * 2 * 96  # gradients of gate and up
    assert activation_elements(settings, [range(2)], tp=2, tokens=100, in_flight=3) == (saved * 3 // 2, work // 2)
    assert activation_elements(settings, [range(1), range(2, 3)], tp=1, tokens=100, in_flight=1) == (saved, work)
    # Without the fused SwiGLU, SiLU's output and a copy of up are saved, too.
    settings |= {"bias_activation_fusion": False}
    unfused, _ = activation_elements(settings, [range(2)], tp=1, tokens=100, in_flight=1)
    assert unfused - saved == 100 * 2 * 2 * 96


def test_activations_match_peaks_measured_on_a_gpu() -> None:
    for step in read_steps():
        (stage,) = plan_stages(step.hf, step.config)
        result = sum(stage.training.values()) / 1e9
        assert f"{result:.2f}" == step.planned and f"{result / step.measured:.2f}" == step.planned_ratio, step
        assert 0.95 < result / step.measured < 1.1


def test_gemma2_post_norms_add_activations_and_weights() -> None:
    """The weights of these norms are replicated and trained like those of any other norm."""
    hf = QWEN2 | {"architectures": ["Gemma2ForCausalLM"], "head_dim": 16, "tie_word_embeddings": True}
    hf |= {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh", "query_pre_attn_scalar": 16}
    hf |= {"sliding_window": 32, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    budget = {
        "parallel": {"world_size": 2, "tp": 2},
        "train": {"max_tokens_per_gpu": 128},
        "rollout": {"max_context": 128},
    }
    (gemma,) = plan_stages(hf, make_config(algorithm="grpo", **budget))
    # By hand: inputs and outputs of two norms, inputs of two more; q, k, v and attention's output; gate, up, product,
    # and as Megatron does not fuse this GELU, its output and a copy of up.
    assert gemma.training["activations"] == 2 * 128 // 2 * 4 * (6 * 64 + (64 + 32 + 32 + 64) + 5 * 96)
    attention, mlp = 64 * 64 + 2 * 64 * 32 + 64 * 64, 3 * 64 * 96
    weights = 1024 * 64 // 2 + 4 * ((attention + mlp) // 2 + 4 * 64) + 64
    assert gemma.states["actor weights"] == 2 * weights and gemma.states["actor gradients"] == 4 * weights


def test_routing_replay_adds_its_records_to_the_micro_batch() -> None:
    sizes = {"data": {"prompts_per_step": 3}, "rollout": {"samples_per_prompt": 5, "max_context": 100}}
    plain, replayed = (plan_stages(MOE, make_config(**sizes, train={"routing_replay": on}))[0] for on in (False, True))
    assert replayed.states == plain.states and replayed.host == plain.host
    assert replayed.training["micro-batches"] - plain.training["micro-batches"] == 3072 * 4 * 2 * 2


def test_micro_batch_bytes_by_hand() -> None:
    """The bytes do not depend on the number of micro-batches per step, and a critic has no routing."""
    sizes: dict[str, Any] = {
        "parallel": {"world_size": 8, "tp": 2, "pp": 2, "cp": 2},
        "train": {"routing_replay": True},
    }
    small_batch, large_batch = (
        plan_stages(MOE, make_config(**sizes, data={"prompts_per_step": n}), MOE) for n in (1, 1000)
    )
    assert [stage.training for stage in small_batch] == [stage.training for stage in large_batch]
    assert small_batch[0].host == large_batch[0].host
    first, last = (stage.training["micro-batches"] for stage in small_batch)
    routing = 2 * 2 * 2 * 3072 // 2  # two layers, two experts, half of the rank's tokens
    assert first == 2 * (16 * 3072 + routing)  # two in flight
    assert last == 8 * 3072 + (3 * 8 + 1 + 9 * 4) * 2 * 3072 + routing
    trained = make_config(algorithm="reward_model", **{name: sizes[name] for name in ("parallel",)})
    assert plan_stages(MOE, trained)[1].training["micro-batches"] == last - routing
    assert micro_batch_bytes({}, (), 10, last=False) == 160
    assert micro_batch_bytes({}, (), 10, first=False, mtp=2) == 160 + 3 * 80 + 610


@pytest.mark.parametrize(
    "method, saved, recomputed",
    [
        ({}, 4 * 64, 736),  # inputs of all layers, and one layer at a time
        ({"recompute_method": "uniform", "recompute_num_layers": 2}, 2 * 64, 2 * 736),
        ({"recompute_method": "uniform", "recompute_num_layers": 3}, 2 * 64, 3 * 736),
        ({"recompute_method": "block", "recompute_num_layers": 3}, 3 * 64 + 736, 736),
    ],
)
def test_full_recomputation(method: dict[str, Any], saved: int, recomputed: int) -> None:
    settings = family_of(QWEN2).megatron_config(QWEN2) | {"recompute_granularity": "full"} | method
    item = activation_elements(settings, [range(4)], tp=1, tokens=100, in_flight=3)
    assert item == (100 * 3 * saved, 100 * (recomputed + 2 * 96))  # gradients of gate and up


@pytest.mark.parametrize(
    "modules, dropped, largest",
    [
        (None, 0, 0),  # core_attn: flash attention keeps nothing of its own
        (["layernorm"], 2 * 2 * 64, 2 * 64),
        (["mlp"], 3 * 96, 3 * 96),  # the dense layer only
        (["moe_act"], 2 * 48, 2 * 48),  # two experts a token
        (["moe"], 2 * (64 + 3 * 48) + 3 * 40, 2 * (64 + 3 * 48) + 3 * 40),
        (["shared_experts", "moe_act"], 2 * 48 + 3 * 40, 2 * 48 + 3 * 40),
    ],
)
def test_selective_recomputation(modules: list[str] | None, dropped: int, largest: int) -> None:
    settings = family_of(MOE).megatron_config(MOE)
    settings |= {"moe_layer_freq": [0, 1], "moe_shared_expert_intermediate_size": 40}
    complete = activation_elements(settings, [range(2)], tp=1, tokens=10, in_flight=4)
    settings |= {"recompute_granularity": "selective"} | ({"recompute_modules": modules} if modules else {})
    result = activation_elements(settings, [range(2)], tp=1, tokens=10, in_flight=4)
    assert complete[0] - result[0] == 10 * 4 * dropped and result[1] - complete[1] == 10 * largest


def test_recomputing_mla_up_proj_drops_q_k_v() -> None:
    hf = load_hf_config(MODELS / "deepseek_v3.json")
    settings = family_of(hf).megatron_config(hf)
    complete = activation_elements(settings, [range(4, 5)], tp=1, tokens=1, in_flight=2)
    settings |= {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}
    remaining = activation_elements(settings, [range(4, 5)], tp=1, tokens=1, in_flight=2)
    dropped = 128 * (192 + 192)  # q and k of 128 heads; attention saves padded values
    assert complete[0] - remaining[0] == 2 * dropped and remaining[1] - complete[1] == dropped


def test_expert_tensor_parallel_doubles_expert_tokens() -> None:
    settings = family_of(MOE).megatron_config(MOE)
    etp1, etp2 = (activation_elements(settings, [range(1)], 2, tokens=10, in_flight=1, etp=etp) for etp in (1, 2))
    assert etp2[0] - etp1[0] == 10 * 2 * 64 // 2  # inputs of two experts, of as many tokens again
    assert etp2[1] - etp1[1] == 3 * 10 * 2 * 64 // 2  # sorted tokens, and the experts' outputs in two orders


def test_micro_batches_in_flight_by_stage() -> None:
    assert [micro_batches_in_flight(4, stage) for stage in range(4)] == [4, 3, 2, 1]
    # arXiv:2205.05198 section 4.2.3: 1 + (p - 1) / (p m) times as many on the first stage, in m parts each.
    for pp, vpp in ((4, 2), (8, 3), (2, 4)):
        assert micro_batches_in_flight(pp, 0, vpp) == pytest.approx(pp * (1 + (pp - 1) / (pp * vpp)))
    assert [micro_batches_in_flight(4, stage, 2) for stage in range(4)] == [5.5, 4.5, 3.5, 2.5]


def test_context_parallelism_splits_long_sequences_and_optimizer() -> None:
    def plan(**sizes: int) -> Any:
        rollout = {"max_context": 8192}
        return plan_stages(QWEN2, make_config(algorithm="grpo", parallel=sizes, rollout=rollout, train=budget))[0]

    budget = {"max_tokens_per_gpu": 1024}
    cp1, cp4 = plan(world_size=4), plan(world_size=4, cp=4)
    assert cp4.states == cp1.states
    assert cp4.training["activations"] * 4 == cp1.training["activations"]
    budget = {"max_tokens_per_gpu": 4096}  # tokens of a micro-batch per rank, however long its sequences
    assert plan(world_size=4, cp=4).training["activations"] * 2 == cp1.training["activations"]


def test_weight_sync_staging_bytes() -> None:
    assert sync_staging_bytes(1 << 30, 10**10, 10**10) == 2 << 30
    assert sync_staging_bytes(1 << 30, 1000, 500) == 3000  # no more than there is
    grpo = plan_stages(QWEN2, make_config(algorithm="grpo", rollout={"weight_sync_bucket_mb": 1}))[0]
    assert grpo.weight_sync["reshard staging"] == 4 * grpo.states["actor weights"] < 2 << 20
    states, engine, cache = (
        sum(grpo.states.values()),
        grpo.weight_sync["engine weights"],
        grpo.generation["engine KV cache"],
    )
    assert grpo.generation == {"engine weights": engine, "engine KV cache": cache} and engine > 0 and cache > 0
    assert grpo.generation_total == states + engine + cache
    assert (
        grpo.weight_sync_total == states + engine + grpo.weight_sync["reshard staging"]
    )  # the KV cache comes back after it


def test_offload_moves_states_to_host_while_generating() -> None:
    stay, leave = (plan_stages(QWEN2, make_config(train={"offload": offload}), QWEN2)[0] for offload in (False, True))
    assert leave.generation_total == sum(leave.generation.values())
    engine = leave.generation["engine weights"]
    assert leave.weight_sync_total == leave.states["actor weights"] + engine + leave.weight_sync["reshard staging"]
    assert stay.weight_sync_total == leave.weight_sync_total + sum(stay.states.values()) - stay.states["actor weights"]
    states = [amount for name, amount in stay.states.items() if "gradients" not in name]
    assert leave.host["states, while generating"] == sum(states)
    assert leave.host["reference weights"] == stay.host["reference weights"]


@pytest.mark.parametrize(("recipe", "scales"), [(None, 0.0), ("blockwise", 4 / 128**2), ("mxfp8", 1 / 32)])
def test_fp8_copies_of_weights_stay_while_engines_generate(recipe: str | None, scales: float) -> None:
    fp8 = {"fp8": "hybrid"} | ({"fp8_recipe": recipe} if recipe else {})
    models = ({"dtype": "bfloat16", "megatron": settings} for settings in ({}, fp8))
    configs = (make_config(model=model, train={"offload": True}) for model in models)
    before, after = (plan_stages(QWEN2, config, QWEN2)[0] for config in configs)
    # Four layers: queries, keys and values, attention's output, gate and up, down. Each in two copies.
    elements = 4 * (64 * (4 + 2 * 2) * 16 + 64 * 64 + 3 * 64 * 96)
    copies = {f"{role} FP8 copies of weights": ceil(2 * elements * (1 + scales)) for role in ("actor", "critic")}
    assert after.states == before.states | copies and after.is_offloaded
    for phase in ("training_total", "generation_total", "weight_sync_total"):
        assert getattr(after, phase) == getattr(before, phase) + sum(copies.values()), phase
    assert after.host == before.host


def test_a_model_that_is_not_trained_has_one_fp8_copy_of_each_weight() -> None:
    model = {"dtype": "bfloat16", "megatron": {"fp8": "hybrid"}}
    config = make_config(model=model)
    (served,) = inference_stages(MOE, config, load_requirements(config), head=True)
    (trained,) = plan_stages(MOE, make_config(algorithm="sft", model=model))
    assert 2 * served.copies == trained.states["actor FP8 copies of weights"] > 0
    layers = {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 2, "num_layers_at_end_in_bf16": 0}
    assert stage_fp8_copies(MOE, config.parallel, [(0, 1)], {"fp8": "e4m3", "num_layers": 2} | layers) == [0]


def test_guard_keeps_last_good_policy_on_host() -> None:
    (stage,) = plan_stages(QWEN2, make_config(guards={"ppo_kl": 0.05}), QWEN2)
    assert stage.host["last good policy"] == stage.states["actor weights"] + stage.states["actor optimizer"]
    assert "last good policy" not in plan_stages(QWEN2, make_config(), QWEN2)[0].host


@pytest.mark.parametrize("dtype, master", [("bfloat16", 4), ("float32", 0)])
def test_offloaded_states_are_on_the_host(dtype: str, master: int) -> None:
    """Per element 12 bytes of states and 4 of gradients on the host; in fp32 a weight on the device is its master."""

    def plan(fraction: float, critic_fraction: float = 0.0) -> StageMemory:
        config = make_config(
            model={"dtype": dtype},
            actor_optimizer={"offload_fraction": fraction},
            critic={"optimizer": {"offload_fraction": critic_fraction}},
            guards={"ppo_kl": 0.05},
            run={"save_every": 5, "save_async": True},
        )
        return plan_stages(QWEN2, config, QWEN2)[0]

    count, none = sum(param_count(QWEN2).values()), plan(0.0)
    for fraction in (0.25, 1.0):
        some, critic = plan(fraction), plan(0.0, fraction)
        rest = round((1 - fraction) * count * (8 + master))
        assert some.states == none.states | {"actor optimizer": rest}
        assert none.states["actor optimizer"] == count * (8 + master)
        on_host = round(fraction * count)
        parts = {"actor optimizer, offloaded": 12 * on_host, "actor gradients, offloaded": 4 * on_host}
        # A rollback needs them as well. A checkpoint is of the same size, wherever its parts are.
        kept = some.states["actor weights"] + rest + 12 * on_host
        assert some.host == none.host | parts | {"last good policy": kept}
        assert "actor optimizer, offloaded" not in critic.host
        assert critic.host["critic optimizer, offloaded"] == 3 * critic.host["critic gradients, offloaded"] > 0
        assert critic.states["actor optimizer"] == none.states["actor optimizer"]


def test_muon_has_one_moment_of_matrices() -> None:
    """On one rank, 8 bytes per element of a matrix in bf16 instead of 12, and 4 instead of 8 in fp32."""
    count = sum(param_count(QWEN2).values())
    others = sum(
        row.size * copies
        for row, copies in unique_params(QWEN2)
        if len(row.hf[0].shape) == 1 or any(part in row.megatron for part in ("embedding", "output_layer"))
    )
    for dtype, states in (("bfloat16", 12), ("float32", 8)):
        tree: dict[str, Any] = {"algorithm": "sft", "model": {"dtype": dtype}}
        (adam,) = plan_stages(QWEN2, make_config(**tree))
        (muon,) = plan_stages(QWEN2, make_config(**tree, actor_optimizer={"type": "muon"}))
        assert adam.states["actor optimizer"] == states * count
        assert muon.states == adam.states | {"actor optimizer": states * count - 4 * (count - others)}


def test_muon_pads_buffers_to_the_fullest_rank() -> None:
    """Of weights and of gradients: two ranks with matrices of 640 and of 512 elements have room for 640 each."""
    elements, matrices = ElementCounts(1152, 0), pack((640, 256, 256), 2)
    for size in (2, 4):
        parts = state_bytes(elements, 2, 1, size, matrices=matrices)
        assert (parts["weights"], parts["gradients"]) == (1280 * size, 1280 * 4)


def test_fsdp_divides_weights_gradients_and_states() -> None:
    """Over data parallel ranks, those of context parallelism included. All else is gathered for weight sync."""
    count = sum(param_count(QWEN2).values())
    for dtype, size, states in (("bfloat16", 2, 12), ("float32", 4, 8)):
        parallel = {"world_size": 8, "ranks_per_node": 8, "cp": 2}
        tree: dict[str, Any] = {"algorithm": "grpo", "model": {"dtype": dtype}, "parallel": parallel}
        plain, sharded = (plan_stages(QWEN2, make_config(**tree, train={"fsdp": fsdp}))[0] for fsdp in (False, True))
        shard = -(-count // 8)
        expected = {"weights": shard * size, "gradients": shard * 4, "optimizer": shard * states}
        assert {name: sharded.states[f"actor {name}"] for name in expected} == expected
        assert sharded.weight_sync["gathered weights"] == plain.states["actor weights"] - shard * size
        # All layers of a small model are fetched ahead of the first, and wait to be reduced.
        assert sharded.training["gathered layers"] == count * (size + 4)
        assert "gathered layers" not in plain.training and "gathered weights" not in plain.weight_sync


def test_matrices_go_to_the_rank_with_the_fewest_elements() -> None:
    assert pack((), 2) == (0, 0)
    assert pack((640, 256, 256), 2) == (1152, 640)
    assert pack((640, 512, 256, 256), 2) == (1664, 896)
    assert pack((640,), 4) == (640, 640)  # three ranks have none


def test_each_policy_has_its_own_share_on_the_host() -> None:
    roles = {"actor_b": {"optimizer": {"offload_fraction": 1.0}}}
    controller = "megarl.controllers.policies:PPOAndReMaxController"
    config = make_config(algorithm=controller, roles=roles)
    (stage,) = plan_memory(QWEN2, config, load_requirements(config), QWEN2, other_models={"rollout_b": QWEN2})
    assert stage.states["actor b optimizer"] < stage.states["actor optimizer"]
    assert "actor optimizer, offloaded" not in stage.host and stage.host["actor b optimizer, offloaded"] > 0


def test_async_save_keeps_a_copy_on_host() -> None:
    """The copy has weights and three fp32 numbers per element, one of which is the weight in an fp32 model."""
    count = sum(param_count(QWEN2).values())
    for dtype, size in (("bfloat16", 2), ("float32", 4)):
        tree = {"algorithm": "sft", "model": {"dtype": dtype}}
        (stage,) = plan_stages(QWEN2, make_config(**tree, run={"save_every": 5}))
        assert stage.host == {"checkpoint under way": (size + 12) * count}
        (stage,) = plan_stages(QWEN2, make_config(**tree, run={"save_every": 5, "save_async": False}))
        assert stage.host == {}
        for parallel, count_in_memory in (({"world_size": 2}, 2 + 1), ({"world_size": 2, "ranks_per_node": 1}, 4 + 1)):
            run = {"save_every": 5, "memory_save_every": 1}
            plan = plan_stages(QWEN2, make_config(**tree, parallel=parallel, run=run))[0].host
            assert plan["checkpoints in memory"] == count_in_memory * plan["checkpoint under way"] > 0
    (first, _) = plan_stages(QWEN2, make_config(parallel={"world_size": 4, "pp": 2}, run={"save_every": 5}), QWEN2)
    expected = sum(first.states[f"{role} {kind}"] for role in ("actor", "critic") for kind in ("weights", "optimizer"))
    assert first.host["checkpoint under way"] == expected


def test_critic_with_its_own_layout() -> None:
    def plan(**critic: int) -> Any:
        parallel = {"world_size": 4, "pp": 2}
        return plan_stages(QWEN2, make_config(parallel=parallel, critic={"parallel": critic}), QWEN2)

    tp1, tp2 = plan(), plan(tp=2)
    assert [stage.states["actor weights"] for stage in tp2] == [stage.states["actor weights"] for stage in tp1]
    assert tp2[1].states["critic weights"] < 0.6 * tp1[1].states["critic weights"]
    # With pp=1 both actor stages have the whole critic; with pp=4 each counts the larger of two critic stages.
    complete, fine = plan(pp=1), plan(pp=4)
    assert (
        complete[0].states["critic weights"] == complete[1].states["critic weights"] > tp1[0].states["critic weights"]
    )
    assert fine[0].states["critic weights"] == 2 * stage_counts(QWEN2, head=True, world_size=4, pp=4)[0].dense
    assert fine[1].states["critic weights"] < fine[0].states["critic weights"]  # a layer and a small head


def test_stages_by_algorithm() -> None:
    sft = plan_stages(QWEN2, make_config(algorithm="sft"))[0]
    assert sft.generation == {} and sft.weight_sync == {} and sft.host == {}
    dpo, simpo = (plan_stages(QWEN2, make_config(algorithm=name))[0] for name in ("dpo", "simpo"))
    assert dpo.host == {"reference weights": dpo.states["actor weights"]} and simpo.host == {}
    grpo = plan_stages(QWEN2, make_config(algorithm="grpo", kl={"apply_to": "none"}))[0]
    assert grpo.generation["engine weights"] == sum(param_count(QWEN2).values()) * 2
    assert grpo.host == {}
    trained = plan_stages(QWEN2, make_config(algorithm="reward_model", model={"dtype": "float32"}))[0]
    count = sum(param_count(QWEN2).values()) - 1024 * 64 + 64  # a head of one value for the words
    assert trained.states == {
        "reward model weights": 4 * count,
        "reward model gradients": 4 * count,
        "reward model optimizer": 8 * count,
    }
    assert trained.generation == {} and trained.training["logits"] == 0
    ppo = plan_stages(QWEN2, make_config(), QWEN2)[0]
    assert ppo.host["reference weights"] == ppo.states["actor weights"]
    assert ppo.training.keys() == {"activations", "logits", "micro-batches"}
    assert ppo.training_total == sum(ppo.states.values()) + sum(ppo.training.values())


def test_serving_reward_model_adds_fp32_weights() -> None:
    layout = {"parallel": {"world_size": 4, "tp": 2, "pp": 2}, "rollout": {"max_context": 128}}
    config = make_config(**layout)
    stages = {"reward": inference_stages(MOE, config, load_requirements(config), head=True)}
    plain, served = (plan_stages(QWEN2, config, QWEN2, others) for others in (None, stages))
    elements = stage_counts(MOE, head=True, tp=2, pp=2)
    for before, after, weights in zip(plain, served, elements, strict=True):
        assert after.states == before.states | {"reward model weights": 4 * sum(weights)}
        assert after.training == before.training
        # One layer of 3072 tokens: norms; q, k, v and attention's output; of 2 experts input and three widths;
        # queries and keys also before their norms.
        item = 4 * 64 + (2 * 4 + 2 * 2 + 4 + 2) * 32 + 2 * (64 + 3 * 48)
        assert after.generation == before.generation | {"reward model activations": 4 * 3072 * item // 2}


def test_teacher_adds_weights_and_computes_between_generations() -> None:
    config = make_config(parallel={"world_size": 4, "tp": 2, "pp": 2}, rollout={"max_context": 128})
    stages = {"teacher": inference_stages(MOE, config, load_requirements(config), head=False, dtype="bfloat16")}
    plain, served = (plan_stages(QWEN2, config, QWEN2, others) for others in (None, stages))
    elements = stage_counts(MOE, tp=2, pp=2)
    for before, after, weights in zip(plain, served, elements, strict=True):
        assert after.states == before.states | {"teacher weights": 2 * sum(weights)}
        assert after.generation == before.generation and after.training["micro-batches"] > 0
    assert served[-1].training["logits"] == plain[-1].training["logits"] > 0  # the same vocabulary and hidden size
    teacher_only = plan_stages(QWEN2, config, QWEN2, stages, "teacher")
    # Of one layer of 3072 tokens: norms; q, k, v and attention's output; of 2 experts input and three widths;
    # queries and keys also before their norms.
    item = 4 * 64 + (2 * 4 + 2 * 2 + 4 + 2) * 32 + 2 * (64 + 3 * 48)
    assert [stage.layers for stage in teacher_only] == [(0, 1), (2, 3)]
    assert teacher_only[0].training == {"activations": 2 * 3072 * item // 2, "logits": 0, "micro-batches": 0}
    assert teacher_only[1].training["logits"] > 0


def test_foreign_classifier_is_replicated() -> None:
    bert = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 64}
    (stage,) = classifier_stages(bert, 1000, "float32", make_config())
    assert stage == ((0, 1, 2), 4000, 4 * 3072 * (6 * 32 + 3 * 64), 0, 0)


def test_lora_has_gradients_and_states_of_adapters_only() -> None:
    """Factors of a layer: qkv 4 (64 + 256), proj 4 (128 + 64), and 4 (64 + 96 + 48 + 64) for each of 8 experts."""
    config = {"parallel": {"world_size": 2, "tp": 1, "pp": 1, "ep": 2}, "reward": {"functions": ["a:b"]}}
    full = plan_stages(MOE, make_config(**config), MOE)[0]
    lora = plan_stages(MOE, make_config(**config, lora={"rank": 4}), MOE)[0]
    dense, expert = 4 * 4 * (64 + 256 + 128 + 64), 4 * 4 * 4 * (64 + 96 + 48 + 64)
    assert lora.states["actor weights"] == full.states["actor weights"] + 2 * (dense + expert)
    assert lora.states["actor gradients"] == 4 * (dense + expert)
    assert lora.states["actor optimizer"] == 6 * dense + 12 * expert
    assert lora.states["critic gradients"] == 4 * (dense + expert + 64)  # and the value head
    assert lora.states["critic weights"] == full.states["critic weights"] + 2 * (dense + expert)
    assert "reference weights" in full.host and not lora.host  # the reference is the actor without its adapters


def test_engines_that_serve_adapters_hold_the_model_once() -> None:
    """The second policy has no engine of its own; one rank of two has half of each cut factor, for each policy."""
    hf: dict[str, Any] = {
        **{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 512, "rms_norm_eps": 1e-6},
        **{"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "max_position_embeddings": 512},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False},
    }
    algorithm = "megarl.controllers.policies:PPOAndReMaxController"
    sections = {"algorithm": algorithm, "parallel": {"world_size": 2}, "model": {"dtype": "float32"}}
    plans = []
    for loras in (0, 2):
        rollout = {"engine": "vllm", "tp": 2, "max_loras": loras}
        config = from_dict({**sections, "lora": {"rank": 3}, "rollout": rollout})
        declared = load_requirements(config)
        (stage,) = plan_memory(hf, config, declared, hf, other_models={"rollout_b": hf})
        plans.append(stage)
    merged, served = plans
    assert merged.other_engines.keys() == {"rollout_b"} and served.other_engines == {}
    attention = 3 * (128 + (128 + 2 * 64) // 2) + 3 * (128 // 2 + 128)  # A and B of qkv, then of the output
    mlp = 3 * (128 + 512 // 2) + 3 * (256 // 2 + 128)
    assert served.generation["engine adapters"] == 2 * 2 * (attention + mlp) * 4
    assert "engine adapters" not in merged.generation
    assert served.generation["engine weights"] == merged.generation["engine weights"]
    assert not any("before merging" in name for name in served.host)
    assert served.other_syncs["actor_b"]["engine weights"] == served.generation["engine weights"]
