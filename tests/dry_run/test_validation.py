"""The dry run's errors, warnings and memory plans, and that all recipes are valid."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megarl.config import Config, ConfigError, from_dict, load_config, to_dict
from megarl.dry_run.config_checks import check_engine
from megarl.dry_run.validation import Report, render, validate
from megarl.engine.sglang import server_args
from megarl.models.registry import load_hf_config
from megarl.workers.worker_registry import RegisteredWorker

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from model_folder import write_tokenizer, write_weights  # noqa: E402

pytestmark = [pytest.mark.alone, pytest.mark.slow]

RECIPES = sorted((ROOT / "configs").glob("*.yaml"))
ROW = {  # a prompt, a conversation and a pair
    "prompt": "1+1?",
    "ground_truth": 2,
    "messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}],
    "chosen": "2",
    "rejected": "3",
}
MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
}
DENSE = {key: value for key, value in MOE.items() if "expert" not in key and key != "head_dim"} | {
    "architectures": ["Qwen2ForCausalLM"]
}


@pytest.fixture
def plan(tmp_path: Path):
    """Return plan(*overrides, hf=...), the report on a small valid configuration with these changes."""

    def make(*overrides: str, hf: dict[str, Any] = MOE, **options: Any) -> Report:
        (tmp_path / "config.json").write_text(json.dumps(hf))
        (tmp_path / "train.jsonl").write_text(json.dumps(ROW) + "\n")
        tree = {
            "model": {"hf_config": str(tmp_path / "config.json")},
            "parallel": {"world_size": 4, "tp": 2, "pp": 1, "ep": 2},
            "rollout": {"max_context": 256, "max_new_tokens": 64},
            "data": {"train": str(tmp_path / "train.jsonl"), "prompts_per_step": 8},
            "reward": {"functions": ["megarl.rewards.gsm8k:gsm8k"]},
        }
        (tmp_path / "c.yaml").write_text(json.dumps(tree))
        return validate(load_config(tmp_path / "c.yaml", overrides), **{"dry_run": True, **options})

    return make


def test_valid_configuration(plan) -> None:
    report = plan()
    assert report.ok and report.warnings == []
    report.raise_errors()
    assert dict(report.facts["layout"])["dense layers"] == "tp 2 x pp 1 x dp 2"
    assert dict(report.facts["layout"])["experts"] == "ep 2 x pp 1 x dp 2"
    assert dict(report.facts["batch"])["sequences a step"] == "8 prompts x 8"


def test_roles_on_separate_ranks(plan) -> None:
    """The actor's ranks have half the data parallel size and none of the critic's states."""
    report = plan("placement={actor: 0-1, critic: 2-3}", "critic.parallel={tp: 1, pp: 2, ep: 1}", "rollout.tp=2")
    assert report.ok, report.errors
    layout, full = dict(report.facts["layout"]), plan("rollout.tp=2")
    assert layout["ranks"] == "4 = 1 nodes x 4"
    assert layout["roles"] == "all: rollout; 0-1: actor, reference, reward; 2-3: critic"
    assert (layout["dense layers"], layout["experts"]) == ("tp 2 x pp 1 x dp 1", "ep 2 x pp 1 x dp 1")
    assert (layout["critic's dense layers"], layout["critic's experts"]) == ("tp 1 x pp 2 x dp 1", "ep 1 x pp 2 x dp 1")
    assert dict(report.facts["engines"])["SGLang engines"] == "2 of tp 2, ep 1"
    actual_states, expected_states = report.memory[0].states, full.memory[0].states
    assert actual_states.keys() == {name for name in expected_states if name.startswith("actor")}
    assert actual_states["actor weights"] == expected_states["actor weights"]
    assert actual_states["actor optimizer"] == 2 * expected_states["actor optimizer"]
    assert report.memory_label == "ranks 0-1: rollout, actor, reference, reward"
    ((label, critics),) = report.other_memory.items()
    assert label == "ranks 2-3: rollout, critic" and [stage.layers for stage in critics] == [(0, 1), (2, 3)]
    for stage in critics:  # they receive the weight sync and send nothing
        assert {name.split()[0] for name in stage.states} == {"critic"} and stage.host == {}
        assert stage.generation.keys() == report.memory[0].generation.keys() == {"engine weights", "engine KV cache"}
        assert stage.weight_sync["engine weights"] == report.memory[0].weight_sync["engine weights"]
        assert stage.weight_sync["reshard staging"] < report.memory[0].weight_sync["reshard staging"]
        assert stage.training["activations"] > 0 and stage.training["logits"] == 0
    text = render(report)
    assert f"on {report.memory_label}\n" in text and f"on {label}\n" in text


def test_separate_ranks_for_actor_critic_and_engine(plan) -> None:
    """The actor has two ranks, the critic one, the engine one, which only receives weights."""
    split = ["parallel.world_size=4", "parallel.tp=1", "placement={actor: 0-1, critic: 2, rollout: 3}"]
    report = plan(*split, "critic.parallel={ep: 1}", "train.offload=true")
    assert report.ok, report.errors
    assert report.memory_label == "ranks 0-1: actor, reference, reward"
    assert list(report.other_memory) == ["rank 2: critic", "rank 3: rollout"]
    (actor,), ((critic,), (engine,)) = report.memory, report.other_memory.values()
    assert actor.generation == {} and actor.weight_sync["engine weights"] == 0 < actor.weight_sync["reshard staging"]
    assert critic.generation == critic.weight_sync == {} and "states, while generating" in critic.host
    assert engine.states == engine.training == engine.host == {} and engine.layers == ()
    weights, cache = engine.generation["engine weights"], engine.generation["engine KV cache"]
    assert (
        engine.peak == max(weights + cache, sum(engine.weight_sync.values()))
        and engine.weight_sync["engine weights"] == weights
    )
    received = dict(report.facts["weight sync"])["each rank of an engine receives"]
    assert received == "1.1 MB on average"  # all 0.53 M parameters, in bf16
    assert "engines only" in render(report)


def test_reward_model_on_separate_ranks(plan) -> None:
    split = ["parallel.world_size=4", "parallel.tp=1", "placement={actor: 0-1, reward: 2-3}", "reward.model=/x"]
    report = plan(*split, "algorithm=grpo")
    assert report.ok, report.errors
    ((label, (serving,)),) = report.other_memory.items()
    assert label == "ranks 2-3: rollout, reward" and serving.states.keys() == {"reward model weights"}
    assert "reward model weights" not in report.memory[0].states and serving.training == {}


def test_reference_on_ranks_that_overlap_with_the_actors(plan) -> None:
    """Each rank is planned with the stages that it has: of the actor, the reference, both, or neither."""
    layout = ["parallel.world_size=4", "parallel.tp=1", "parallel.ep=1", "kl.apply_to=loss", "algorithm=grpo"]
    colocated = plan(*layout, "placement={actor: 0-1}")
    assert colocated.ok and colocated.memory[0].host["reference weights"] > 0, colocated
    settings = "roles={reference: {parallel: {pp: 2}}}"
    report = plan(*layout, "placement={actor: 0-1, reference: 1-2}", settings)
    assert report.ok, report.errors
    assert report.memory_label == "rank 0: rollout, actor, reward"
    assert list(report.other_memory) == [
        "rank 1: rollout, actor, reference, reward",
        "rank 2: rollout, reference",
        "rank 3: rollout",
    ]
    (actor,), ((both,), (reference,), (engine,)) = report.memory, report.other_memory.values()
    weights = actor.states["actor weights"]
    assert both.states == actor.states | {"reference weights": both.states["reference weights"]}
    assert reference.states.keys() == {"reference weights"} and reference.layers == (2, 3) and not engine.states
    assert both.states["reference weights"] + reference.states["reference weights"] == weights
    assert all("reference weights" not in stage.host for stage in (actor, both, reference))
    assert dict(report.facts["layout"])["reference's dense layers"] == "tp 1 x pp 2 x dp 1"
    assert "placement has actor on 0-1 and reference on 1-2: where only some ranks" in report.warnings[0]
    errors = plan(*layout, "placement={actor: 0-1, reference: 1-3}", settings).errors
    assert errors[0].startswith("the reference: placement.reference=1-3 (3 ranks) is not a multiple of tp x pp")


def test_lora_on_int4_experts_is_rejected() -> None:
    hf = load_hf_config(ROOT / "configs/models/kimi_k2_thinking.json") | {"num_hidden_layers": 2}
    attention = ["linear_q_down_proj", "linear_q_up_proj", "linear_kv_up_proj", "linear_proj"]
    check_engine(hf, from_dict({"lora": {"rank": 8, "target_modules": attention}}))
    for targets in ([], ["linear_fc1"], [*attention, "linear_fc2"]):
        with pytest.raises(ConfigError, match="lora.rank: adapters on the routed experts of an INT4 checkpoint"):
            check_engine(hf, from_dict({"lora": {"rank": 8, "target_modules": targets}}))


def test_lora_memory(plan) -> None:
    report = plan("lora.rank=4")
    assert report.ok
    # 4 layers of 4 (64 + 256 + 128 + 64) in attention, and of 8 experts 4 (64 + 96 + 48 + 64) each
    assert dict(report.facts["model"])["trained"] == "adapters of rank 4, 0.04 M parameters of the policy"
    assert report.memory[0].states["actor optimizer"] < plan().memory[0].states["actor optimizer"] / 5


def test_syncs_of_adapters_are_planned(plan) -> None:
    merged = plan("lora.rank=4", "rollout.tp=2", "rollout.ep=2")
    settings = ("lora.rank=4", "rollout.tp=2", "rollout.ep=2", "rollout.sync_adapters_only=true")
    report = plan(*settings, "lora.target_modules=[linear_proj]")
    assert report.ok and merged.ok, report.errors
    sent, whole = (dict(facts["weight sync"]) for facts in (report.facts, merged.facts))
    assert sent["adapters alone are sent as"] == whole["weights are sent as"]
    # A and B of 4 layers: half of A [4, 128], which both sides cut alike, and B [64, 4], bfloat16. All are local.
    assert sent["each rank receives"] == "0.0 MB on average"
    host = report.memory[0].host
    assert host["engine weights before merging"] == 4 * 64 * 128 // 2 * 2
    assert host["engine weights, asleep"] == report.memory[0].generation["engine weights"]
    assert "engine weights before merging" not in merged.memory[0].host


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["parallel.world_size=6", "parallel.pp=4"], r"=6 is not a multiple of tp x pp .* nearest valid sizes: 8"),
        (["parallel.ep=3"], r"parallel.ep=3 does not divide the 4 ranks.*possible: 1, 2, 4"),
        (["parallel.ep=2", "parallel.etp=4"], r"parallel.ep=2 does not divide .* beside etp=4; possible: 1"),
        (["parallel.cp=3"], r"=4 is not a multiple of tp x cp x pp .* nearest valid sizes: "),
        (["critic.parallel={tp: 4}"], r"the critic: .*num_key_value_heads=2 does not divide by tensor parallel size 4"),
        (["critic.parallel={cp: 3}"], r"the critic: critic.parallel.world_size=4 is not a multiple of tp x cp x pp"),
        (["critic.parallel={tpp: 2}"], r"unknown key critic.parallel.tpp; did you mean critic.parallel.tp"),
        (["critic.parallel={world_size: 2}"], r"critic.parallel.world_size: placement.critic sets"),
        (["train.ddp={overlap_grad_reduc: true}"], r"did you mean overlap_grad_reduce"),
        (["train.ddp={overlap_param_gather: true}"], r"overlap_param_gather cannot be set: weights must be complete"),
        (["parallel.vpp=2"], r"parallel.vpp=2 needs at least 3 pipeline stages"),
        (["parallel.world_size=16", "parallel.ep=16", "parallel.tp=1"], r"ep=16 does not divide the model's 8 experts"),
        (["parallel.tp=4"], r"num_key_value_heads=2 does not divide by tensor parallel size 4; sizes that do: 1, 2"),
        (["parallel.world_size=6", "parallel.tp=1", "parallel.pp=3"], r"4 layers cannot be split over parallel.pp=3"),
        (["parallel.world_size=12", "parallel.ranks_per_node=8"], r"not a multiple of parallel.ranks_per_node=8"),
        (["rollout.tp=3"], r"rollout.tp=3 does not divide parallel.world_size=4; sizes that do: 1, 2, 4"),
        (["rollout.tp=4", "parallel.world_size=12", "parallel.ranks_per_node=6"], r"tp=4 does not fit nodes of 6"),
        (["rollout.ep=2"], r"rollout.ep=2 does not divide rollout.tp=1"),
        (["rollout.max_context=1024"], r"max_context=1024 is beyond the model's 512 positions"),
        (["rollout.max_new_tokens=256"], r"max_new_tokens=256 leaves no room for a prompt"),
        (["run.num_update=1", "run.ppo_epochs=3"], r"run.num_update=1 is not a multiple of run.ppo_epochs=3"),
        (["run.num_update=3", "run.ppo_epochs=2"], r"run.num_update=3 is not a multiple of run.ppo_epochs=2"),
        (["run.num_update=65"], r"cuts a batch of 64 sequences in 65 mini-batches"),
        (["algorithm=grpo", "rollout.samples_per_prompt=1"], r"every advantage is 0; set it to 2 or more"),
        (["algorithm=grpo", "rollout.temperature=0"], r"every advantage is 0; set it above 0"),
        (
            ["kl.apply_to=loss", "kl.estimator=k1"],
            r"kl.estimator=k1 with kl.apply_to=loss.*set kl.estimator to null, or kl.",
        ),
        (["rollout.temperature=1e-5"], r"rollout.temperature=1e-05 is neither 0, which is greedy, nor at least 0.001"),
        (["actor_optimizer.min_lr=1"], r"actor_optimizer.min_lr=1 is above actor_optimizer.lr=1e-06"),
        (["critic.optimizer.lr=0", "critic.optimizer.min_lr=1e-9"], r"critic.optimizer.min_lr=1e-09 is above"),
        (["critic.warmup_steps=100"], r"critic.warmup_steps=100 leaves none of run.num_rollout=100 steps"),
        (["reward.functions=[]"], r"reward.functions is empty"),
        (["reward.functions=[megarl.rewards.gsm8k:nothing]"], r"has no 'nothing'"),
        (
            ["rollout.tools=[megarl.environments.ready.calculator:abacus]"],
            r"megarl.environments.ready.calculator has no 'abacus'",
        ),
        (["data.train=''"], r"data.train is not set; .*prompts"),
        (["algorithm=sft", "data.train=''"], r"data.train is not set; .*conversations"),
        (["algorithm=reward_model", "data.train=''"], r"data.train is not set; .*preference pairs"),
        (["algorithm=reward_model", "run.eval_every=5"], r"run.eval_every=5 needs data.eval; .*held-out pairs"),
        (["algorithm=reward_model", "run.num_update=9"], r"cuts a batch of 8 pairs in 9 mini-batches"),
        (["run.eval_every=5"], r"run.eval_every=5 needs data.eval"),
        (["run.memory_save_every=5"], r"run.memory_save_every=5 needs checkpoints on disk less often"),
        (["run.save_every=5", "run.memory_save_every=5"], r"set run.save_every to more steps than that"),
        (["rollout.replay=/nowhere"], r"rollout.replay=/nowhere: no such run folder"),
        (["train.routing_replay=true", "algorithm=sft"], r"sft has no engine whose routing could be replayed"),
        (
            ["train.routing_replay=true", "rollout.replay=/"],
            r"rollout.replay=/ has no folder rollouts; name a run with track.save_rollouts=true",
        ),
        (["train.routing_replay=true", "model.megatron.moe_router_fusion=true"], r"cannot replay routing"),
        (
            ["train.routing_replay=true", "model.megatron.moe_router_load_balancing_type=sinkhorn"],
            r"=sinkhorn is incompatible with train.routing_replay",
        ),
        (
            ["rollout.sglang.speculative_algorithm=EAGLE"],
            r"speculative_algorithm cannot be set; it is decided by rollout.num_speculative_tokens",
        ),
        (
            ["rollout.num_speculative_tokens=2"],
            r"num_speculative_tokens=2 needs a model with one layer of .*this Qwen3MoeForCausalLM has 0",
        ),
        (["train.routing_replay=true", "rollout.sglang.chunked_prefill_size=-1"], r"size must be positive"),
        (["rollout.sglang.enable_return_routed_experts=true"], r"cannot be set; it is decided by train.routing_replay"),
        (["model.megatron.num_layers=2"], r"num_layers cannot be set: the model's config.json decides it"),
        (["model.megatron.num_layer=3"], r"num_layer is not a field of Megatron's.*; did you mean num_layers"),
        (["model.megatron.q_lora_rank=3"], r"q_lora_rank cannot be set: the model's config.json decides it"),
        (["model.megatron={fp8: hybrid, fp8_recipe: delayed}"], r"Engine 2 does not accept; use tensorwise"),
        (["model.megatron.cache_mla_latents=true"], r"latents is not a field of Megatron's TransformerConfig"),
        (["model.megatron.bf16=true"], r"model.megatron.bf16 has its own key: set model.dtype"),
        (["model.megatron.context_parallel_size=2"], r"has its own key: set parallel.cp"),
        (["rollout.sglang.moe_runner_backend=flashinfer_cutlass"], r"has \[up; gate\]; use one of triton, deep_gemm"),
        (["rollout.sglang.init_expert_location=/experts.json"], r"experts must be at their index"),
        (["rollout.tool_call_parser=qwen26"], r"qwen26 is not a parser of SGLang; did you mean qwen25"),
        (["rollout.sglang.max_total_tokens=100"], r"less than one conversation of rollout.max_context="),
        (["rollout.sglang.mem_fraction=0.5"], r"mem_fraction is not a field of SGLang's.*did you mean mem_fr"),
        (["rollout.sglang.tp_size=2"], r"rollout.sglang.tp_size cannot be set; it is decided by rollout.tp"),
        (["lora.rank=65"], r"lora.rank=65 is beyond the model's hidden_size=64"),
        (
            ["lora.target_modules=[linear_qkv]"],
            r"lora.target_modules is set, but lora.rank=0 trains all weights; set lora.rank",
        ),
        (
            ["lora.rank=8", "lora.target_modules=[q_proj]"],
            r"q_proj names no linear layer of this model; it has linear_fc1, l",
        ),
        (
            ["train.mtp_loss_coef=0.1"],
            r"this Qwen3MoeForCausalLM has no layers of multi-token prediction .* set it to 0",
        ),
        (["model.hf_config=/nowhere/config.json"], r"no model folder or config.json at /nowhere/config.json"),
        (["model.hf_config=''"], r"model.path is not set"),
        (["model.hf_config=''", "model.path=/nowhere"], r"model.path=/nowhere: no such folder"),
    ],
)
def test_invalid_settings_name_key_and_remedy(plan, overrides: list[str], message: str) -> None:
    report = plan(*overrides)
    assert not report.ok
    assert len(report.errors) == 1 and re.search(message, report.errors[0]), report.errors
    with pytest.raises(ConfigError, match=message):
        report.raise_errors()
    assert "is valid" not in render(report)


def test_yarn_beyond_max_position_embeddings_names_the_remedy(plan) -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    report = plan("rollout.max_context=1024", hf=MOE | {"rope_scaling": yarn})
    message = r"beyond the model's 512 positions; its rope_type yarn is for 2048: set max_position_embeddings in "
    assert any(re.search(message, error) for error in report.errors), report.errors


@pytest.mark.parametrize(
    "hf, overrides, message",
    [
        (MOE | {"architectures": ["GPT2LMHeadModel"]}, [], r"no model family for the architecture GPT2LMHeadModel"),
        (DENSE, [], r"parallel.ep=2, but Qwen2ForCausalLM has no experts; set it to 1"),
        (DENSE, ["parallel.ep=1", "rollout.tp=2", "rollout.ep=2"], r"rollout.ep=2, but the model has no experts"),
        (DENSE | {"intermediate_size": 98}, ["parallel.ep=1", "rollout.tp=4"], r"would cut.*diate_size=98 in 4"),
        (MOE | {"moe_intermediate_size": 49}, ["rollout.tp=2"], r"would cut the model's moe_intermediate_size=49 in 2"),
        (MOE | {"num_experts": 6}, ["rollout.tp=4", "rollout.ep=4"], r"rollout.ep=4 does not divide the model's 6"),
        (MOE | {"num_attention_heads": 6}, ["rollout.tp=4"], r"rollout.tp=4 does not divide.* 6 attention"),
        (
            MOE | {"rope_scaling": {"type": "linear", "factor": 2.0}},
            ["rollout.sglang.enable_fused_qk_norm_rope=true"],
            r"enable_fused_qk_norm_rope: SGLang's kernel computes yarn for rope_type=linear, too; remove it",
        ),
    ],
)
def test_model_that_does_not_fit_the_layout(plan, hf: dict[str, Any], overrides: list[str], message: str) -> None:
    report = plan(*overrides, hf=hf)
    assert len(report.errors) == 1 and re.search(message, report.errors[0]), report.errors
    assert report.memory == []


def test_dense_model_rejects_routing_replay(plan) -> None:
    report = plan("parallel.ep=1", "train.routing_replay=true", hf=DENSE)
    assert report.errors == ["train.routing_replay=true, but Qwen2ForCausalLM has no experts; set it to false"]


@pytest.mark.parametrize(
    "overrides, message",
    [
        (
            ["algorithm=reward_model"],
            r"train.mtp_loss_coef trains a policy's layers, but algorithm=reward_model trains none",
        ),
        (["model.megatron.mtp_num_layers=1"], r"mtp_num_layers has its own key: set train.mtp_loss_coef"),
    ],
)
def test_mtp_training_limits(plan, overrides: list[str], message: str) -> None:
    hf = json.loads((ROOT / "configs/models/deepseek_v3.json").read_text())
    small = ["parallel.tp=1", "train.mtp_loss_coef=0.1"]
    report = plan(*small, "rollout.num_speculative_tokens=2", hf=hf)
    assert dict(report.facts["model"])["trained besides"].startswith("1 layer(s) of multi-token prediction, 11.6")
    assert dict(report.facts["engines"])["drafts"] == "2 tokens at a time; the draft layer is synced with the policy"
    (error,) = plan(*small, *overrides, hf=hf).errors
    assert re.search(message, error)
    stages = ["parallel.pp=2", "parallel.ep=1", "model.megatron.num_layers_in_last_pipeline_stage=30"]
    assert plan(*small, *stages, hf=hf).ok
    assert plan(*small, *stages, "lora.rank=4", hf=hf).ok
    (error,) = plan(*small, *stages, hf=hf | {"tie_word_embeddings": True}).errors
    assert re.search(
        r"train.mtp_loss_coef with tie_word_embeddings=true and parallel.pp above 1 is not implemented", error
    )


def test_adapters_of_mtp_layers_are_counted(plan) -> None:
    """The joint projection of 14,336 to 7,168 features, the only target, is in no critic."""
    hf = json.loads((ROOT / "configs/models/deepseek_v3.json").read_text()) | {"num_hidden_layers": 4}
    small = ["parallel={world_size: 4, tp: 1, pp: 1, ep: 2}", "train.mtp_loss_coef=0.1", "lora.rank=4"]
    report = plan(*small, "lora.target_modules=[eh_proj]", "algorithm=grpo", hf=hf)
    assert report.ok, report.errors
    model = dict(report.facts["model"])
    assert model["trained"] == "adapters of rank 4, 0.09 M parameters of the policy"  # 4 (14,336 + 7,168)
    assert "trained besides" not in model
    (error,) = plan(*small, "lora.target_modules=[eh_proj]", hf=hf).errors
    assert error.startswith("the critic: lora.target_modules: eh_proj names no linear layer of this model; it has ")
    (error,) = plan(*small[:1], "lora.rank=4", "lora.target_modules=[eh_proj]", "algorithm=grpo", hf=hf).errors
    assert error.startswith("lora.target_modules: eh_proj names no linear layer")
    int4 = load_hf_config(ROOT / "configs/models/kimi_k2_thinking.json") | {"num_hidden_layers": 2}
    lora = {"rank": 8, "target_modules": ["eh_proj"]}
    check_engine(int4 | {"num_nextn_predict_layers": 1}, from_dict({"lora": lora, "train": {"mtp_loss_coef": 0.1}}))


@pytest.mark.parametrize(
    ("file", "key"), [("qwen3_next_80b_a3b", "num_nextn_predict_layers"), ("qwen3.5_35b_a3b", "mtp_num_hidden_layers")]
)
def test_mtp_training_names_the_key_of_an_undeclared_layer(plan, file: str, key: str) -> None:
    hf = json.loads((ROOT / f"configs/models/{file}.json").read_text()) | {"num_hidden_layers": 4}
    small = ["parallel.tp=1", "train.mtp_loss_coef=0.1"]
    (error,) = plan(*small, hf=hf | {key: 0}).errors
    assert error.endswith(f"set it to 0, or add {key}=1 to config.json if the checkpoint has one")
    report = plan(*small, "rollout.num_speculative_tokens=2", hf=hf | {key: 1})
    assert dict(report.facts["model"])["trained besides"].startswith("1 layer(s) of multi-token prediction")
    assert dict(report.facts["engines"])["drafts"] == "2 tokens at a time; the draft layer is synced with the policy"


def test_context_beyond_the_positions_of_a_scaled_model(plan) -> None:
    hf = MOE | {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}}
    (error,) = plan("rollout.max_context=1024", hf=hf).errors
    assert "beyond the model's 512 positions; its rope_type yarn is for 2048: set max_position_embeddings in " in error


def test_all_errors_are_reported_together(plan) -> None:
    report = plan("rollout.tp=3", "kl.apply_to=loss", "kl.estimator=k1", "data.train=''")
    assert len(report.errors) == 3
    with pytest.raises(ConfigError, match=r"rollout.tp=3.*; and .*k1.*; and .*data.train"):
        report.raise_errors()


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["train.max_tokens_per_gpu=100"], "a longer conversation is a micro-batch of its own"),
        (["data.prompts_per_step=1", "run.num_update=8"], "a mini-batch of 1 sequences leaves some of 2 data-parallel"),
        (["run.num_update=3"], "64 sequences do not divide evenly into 3 mini-batches on 2"),
        (["rollout.temperature=0"], "training on greedy rollouts explores nothing"),
        (["kl.coef=0"], "kl.coef=0 stays 0"),
        # 64 tokens at 20 per second.
        (
            ["rollout.request_timeout=3"],
            "request_timeout=3 s may be too short: an answer of rollout.max_new_tokens=64 w",
        ),
        # 8 prompts on 4 engines are 16 rollouts each; 512 tokens hold 2 of them; each has 256 tokens at 20 per second.
        (
            [
                *("rollout.sglang={max_total_tokens: 512}", "rollout.step_timeout=100"),
                *("rollout.request_timeout=100",),
            ],
            "an engine's 16 rollouts of a step, of up to 256 tokens and 2 at once, so in 8 waves, would take 102 s",
        ),
        (["run.resume=auto"], "there will be no checkpoint"),
        (["algorithm=grpo", "critic.path=/x"], "critic.path is set, but grpo has no critic"),
        (
            ["algorithm=reward_model", "data.prompts_per_step=3"],
            "3 pairs do not divide evenly into 1 mini-batches on 2",
        ),
        (["algorithm=sft", "reward.model=/x"], "reward.model is set, but sft has no rollouts to score"),
        (["algorithm=sft", "run.ppo_epochs=2", "run.num_update=2"], "passes over the data follow from run.num_rollout"),
        (
            ["data.train=[nowhere.jsonl,train.parquet]", "data.mixture_weights=[1,2]"],
            "data.train=train.parquet not found",
        ),
        (["reward.model=/x"], "reward.model=/x not found; planned as if it were the policy's model"),
        (["critic.path=/x"], "critic.path=/x not found; planned as if it were the policy's model"),
        (["data.train=nowhere.jsonl"], "data.train=nowhere.jsonl not found; it must exist when the run starts"),
    ],
)
def test_warnings(plan, overrides: list[str], message: str) -> None:
    report = plan(*overrides)
    assert report.ok
    assert [line for line in report.warnings if message in line], report.warnings
    assert message in " ".join(render(report).split())


def test_run_needs_its_files(plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unlike a dry run, a run needs weights, tokenizer and data."""
    folder = tmp_path / "model"
    overrides = [f"model.path={folder}", "data.train=nowhere.jsonl"]
    for missing in ("no such folder", "no config.json", r"no \*.safetensors", "no tokenizer"):
        errors = plan(*overrides, dry_run=False).errors
        assert errors[0] == "data.train=nowhere.jsonl: no such file"
        assert re.search(missing, errors[1]), errors
        if missing == "no such folder":
            folder.mkdir()
        elif missing == "no config.json":
            (folder / "config.json").write_text(json.dumps(MOE))
        elif "safetensors" in missing:
            write_weights(folder, MOE)
    write_tokenizer(folder, ("a",))
    assert plan(f"model.path={folder}", dry_run=False).ok
    with monkeypatch.context() as patch:
        patch.setattr(server_args, "sglang_folder", server_args.sglang_folder.__wrapped__)
        find = server_args.importlib.util.find_spec
        patch.setattr(
            server_args.importlib.util, "find_spec", lambda name, *more: None if name == "sglang" else find(name, *more)
        )
        message = "the package sglang is not installed: bash launch/install.sh"
        (warning,) = plan().warnings
        assert warning.startswith(f"the run would be rejected: {message}")
        (error,) = plan(f"model.path={folder}", dry_run=False).errors
        assert error.startswith(message)
        assert plan(f"model.path={folder}", "algorithm=sft", "reward.functions=[]", dry_run=False).ok
    # A critic with a smaller vocabulary.
    critic_folder = tmp_path / "critic"
    critic_folder.mkdir()
    (critic_folder / "config.json").write_text(json.dumps(MOE | {"vocab_size": 512}))
    write_weights(critic_folder, MOE | {"vocab_size": 512})
    errors = plan(f"model.path={folder}", f"critic.path={critic_folder}", dry_run=False).errors
    assert len(errors) == 1 and "vocabulary of 512, the policy one of 1024" in errors[0]


def write_model(folder: Path, hf: dict[str, Any], words: tuple[str, ...], tensors: tuple[str, ...] = ()) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf))
    write_tokenizer(folder, words)
    write_weights(folder, hf, tensors)
    return folder


def test_reward_model_needs_a_head_and_the_policys_tokenizer(plan, tmp_path: Path) -> None:
    policy, head = write_model(tmp_path / "policy", MOE, ("a", "b")), ("score.weight",)
    reward = {**MOE, "architectures": ["Qwen3MoeForSequenceClassification"], "num_hidden_layers": 2}
    cases: dict[str, tuple[dict[str, Any], tuple[str, ...], tuple[str, ...], str]] = {
        "headless": (reward, ("a", "b"), (), "has no score.weight: it is not a reward model; train one"),
        "smaller": (reward | {"vocab_size": 1}, ("a", "b"), head, "vocabulary of 1, the policy's tokenizer one of 3"),
        "words": (reward, ("a", "c"), head, r"another tokenizer than model.path=.*differ in 'b', token 1; .*must"),
        "tokenless": (reward, (), head, "differ in "),
        "short": (reward | {"max_position_embeddings": 128}, ("a", "b"), head, "beyond the 128 positions of reward.mo"),
        "layers": (reward | {"num_key_value_heads": 1}, ("a", "b"), head, "num_key_value_heads=1 does not divide"),
    }
    for name, (hf, words, tensors, message) in cases.items():
        folder = write_model(tmp_path / name, hf, words, tensors)
        report = plan(f"model.path={policy}", f"reward.model={folder}", dry_run=False)
        assert len(report.errors) == 1 and re.search(message, report.errors[0]), (name, report.errors)
    for vocab_size in (512, 2048):  # padded to another size
        padded = write_model(tmp_path / f"padded_{vocab_size}", reward | {"vocab_size": vocab_size}, ("a", "b"), head)
        assert plan(f"model.path={policy}", f"reward.model={padded}", dry_run=False).ok
    valid_folder = write_model(tmp_path / "good", reward, ("a", "b"), head)
    report = plan(
        f"model.path={policy}", f"reward.model={valid_folder}", "reward.functions=[]", "algorithm=grpo", dry_run=False
    )
    assert report.ok, report.errors
    text = render(report)
    assert "reward model weights" in text and "reward model activations" in text and "reward model optim" not in text
    errors = plan(f"model.path={policy}", "reward.model=/nowhere", dry_run=False).errors
    assert len(errors) == 1 and "reward.model=/nowhere: no such folder" in errors[0]
    # A classifier cannot be a policy, but reward model training may start from one.
    errors = plan(f"model.path={valid_folder}", dry_run=False).errors
    assert len(errors) == 1 and "is a classifier, Qwen3MoeForSequenceClassification" in errors[0]
    assert plan(f"model.path={valid_folder}", "algorithm=reward_model", dry_run=False).ok


CONTROLLER = """
from megarl.controllers.grpo import GRPOController
from megarl.controllers.policies import PoliciesController
from megarl.controllers.ppo import PPOController


class Distilled(GRPOController):
    @classmethod
    def roles(cls, config):
        return (*super().roles(config), "teacher")


class GRPOAndPPO(PoliciesController):
    algorithms = {"": GRPOController, "b": PPOController}


class Judged(GRPOController):
    workers = {"judge": "no.such:Judge"}

    @classmethod
    def roles(cls, config):
        return (*super().roles(config), "judge")
"""


@pytest.fixture
def custom_controllers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "dry_lab.py").write_text(CONTROLLER)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("dry_lab", None)


def test_teacher_memory_and_layout(plan, custom_controllers: None) -> None:
    """A teacher adds its weights only, colocated or on separate ranks."""
    args = ["algorithm=dry_lab:Distilled", "roles={teacher: {model: /big}}"]
    colocated, without = plan(*args), plan("algorithm=grpo")
    assert colocated.ok and "roles.teacher.model=/big not found; planned as if" in colocated.warnings[0], colocated
    assert dict(colocated.facts["model"])["teacher"] == dict(colocated.facts["model"])["parameters"].partition(",")[0]
    states, before = colocated.memory[0].states, without.memory[0].states
    assert states == before | {"teacher weights": before["actor weights"]}
    split_args = ["parallel.world_size=4", "parallel.tp=1", "parallel.ep=1"]
    local = {"teacher": {"model": "/big", "parallel": {"tp": 1, "pp": 2}}}
    report = plan(args[0], f"roles={json.dumps(local)}", *split_args, "placement={actor: 0-1, teacher: 2-3}")
    assert report.ok, report.errors
    assert dict(report.facts["layout"])["teacher's dense layers"] == "tp 1 x pp 2 x dp 1"
    ((label, stages),) = report.other_memory.items()
    assert label == "ranks 2-3: rollout, teacher" and [stage.layers for stage in stages] == [(0, 1), (2, 3)]
    assert all(stage.states.keys() == {"teacher weights"} for stage in stages)
    assert stages[0].training["activations"] > 0 and stages[0].training["logits"] == 0 < stages[1].training["logits"]
    assert "teacher weights" not in report.memory[0].states and "teacher weights" in render(report)
    errors = plan(args[0], f"roles={json.dumps(local)}", *split_args, "placement={actor: 0, teacher: 1-3}").errors
    assert re.search(r"^the teacher: placement.teacher=1-3 \(3 ranks\) is not a multiple of tp x pp", errors[0])
    local["teacher"]["parallel"] = {"tp": 1, "pp": 1, "ep": 3}
    errors = plan(args[0], f"roles={json.dumps(local)}", *split_args, "placement={actor: 0, teacher: 1-3}").errors
    assert errors == [
        "the teacher: roles.teacher.parallel.ep=3 does not divide the model's 8 experts; sizes that do: 1, 2, 4, 8"
    ]


def test_second_policy_in_the_report(plan, custom_controllers: None, tmp_path: Path) -> None:
    """A dense actor and critic over a policy with experts, on ranks of their own."""
    dense = write_model(tmp_path / "dense", DENSE, ("a",))
    roles = {"actor_b": {"model": str(dense), "optimizer": {"lr": 1e-7}}, "critic_b": {"optimizer": {"min_lr": 1}}}
    args = ["algorithm=dry_lab:GRPOAndPPO", "parallel={world_size: 4, tp: 1, pp: 1, ep: 1}", "rollout.tp=1"]
    args += ["placement={actor: 0-1, actor_b: 2-3, critic_b: 2-3}"]
    report = plan(*args, f"roles={json.dumps(roles | {'critic_b': {}})}")
    assert report.ok, report.errors
    model, layout = dict(report.facts["model"]), dict(report.facts["layout"])
    assert model["critic_b"] == model["rollout_b"] != model["parameters"] and "critic" not in model
    assert layout["actor_b's dense layers"] == layout["critic_b's dense layers"] == "tp 1 x pp 1 x dp 2"
    assert "experts" in layout and "actor_b's experts" not in layout and "critic_b's experts" not in layout
    (error,) = plan(*args, f"roles={json.dumps(roles)}", "actor_optimizer.min_lr=1e-8").errors
    assert re.search(r"roles.critic_b.optimizer.min_lr=1 is above critic.optimizer.lr=", error)
    (error,) = plan(*args, f"roles={json.dumps(roles)}", "actor_optimizer={min_lr: 1.0e-6, lr: 1}").errors
    assert "actor_optimizer.min_lr=1e-06 is above roles.actor_b.optimizer.lr=1e-07, its starting point; lower" in error
    same = [*args, "critic.path=/nowhere"]
    assert "critic.path=/nowhere not found; planned as" in " ".join(plan(*same).warnings)
    named = {"critic_b": {"model": "/other"}}
    assert "roles.critic_b.model=/other not found" in " ".join(plan(*same, f"roles={json.dumps(named)}").warnings)
    text = render(report)
    assert "in weight sync of the actor_b" in text and "rollout_b weights" in text


def test_teacher_needs_the_policys_tokenizer(plan, custom_controllers: None, tmp_path: Path) -> None:
    policy = write_model(tmp_path / "policy", MOE, ("a", "b"))
    args, head = ["algorithm=dry_lab:Distilled", f"model.path={policy}"], ("score.weight",)
    classifier = {**MOE, "architectures": ["Qwen3MoeForSequenceClassification"]}
    larger = {**DENSE, "vocab_size": 2048, "num_hidden_layers": 2}
    cases: dict[str, tuple[dict[str, Any], tuple[str, ...], tuple[str, ...], str]] = {
        "smaller": (
            MOE | {"vocab_size": 1},
            ("a", "b"),
            (),
            "vocabulary of 1, the policy's tokenizer one of 3; the teacher reads",
        ),
        "words": (
            larger,
            ("a", "c"),
            (),
            r"roles.teacher.model=.*another tokenizer than model.path=.*differ in 'b'",
        ),
        "judge": (
            classifier,
            ("a", "b"),
            head,
            "is a classifier, Qwen3MoeForSequenceClassification, which has no log-p",
        ),
        "short": (larger | {"max_position_embeddings": 128}, ("a", "b"), (), "beyond the 128 positions of roles.teac"),
        "heads": (
            larger | {"num_key_value_heads": 1},
            ("a", "b"),
            (),
            "^the teacher: .*num_key_value_heads=1 does not",
        ),
    }
    for name, (hf, words, tensors, message) in cases.items():
        folder = write_model(tmp_path / name, hf, words, tensors)
        teacher = f"roles={{teacher: {{model: {folder}, parallel: {{ep: 1}}}}}}"
        errors = plan(*args, teacher, dry_run=False).errors
        assert len(errors) == 1 and re.search(message, errors[0]), (name, errors)
    valid_folder = write_model(tmp_path / "good", larger, ("a", "b"))
    report = plan(*args, f"roles={{teacher: {{model: {valid_folder}, parallel: {{ep: 1}}}}}}", dry_run=False)
    assert report.ok, report.errors
    for roles, message in (
        ("{}", "roles.teacher.model is not set; it must name the HF folder of the teacher"),
        ("{teacher: {model: /nowhere}}", "roles.teacher.model=/nowhere: no such folder"),
        ("{teacher: {model: /x, backend: sglang}}", "roles.teacher.backend=sglang: no such backend"),
    ):
        errors = plan(*args, f"roles={roles}", dry_run=False).errors
        assert len(errors) == 1 and message in errors[0], errors


def test_model_of_a_custom_role_is_checked(plan, custom_controllers: None, tmp_path: Path) -> None:
    """On Megatron it is checked like the others; a custom backend has no layout."""
    policy = write_model(tmp_path / "policy", MOE, ("a", "b"))
    args = ["algorithm=dry_lab:Judged", f"model.path={policy}"]
    assert plan(*args, dry_run=False).ok  # it needs none
    errors = plan(*args, "roles={judge: {model: /nowhere}}", dry_run=False).errors
    assert len(errors) == 1 and "roles.judge.model=/nowhere: no such folder" in errors[0]
    other_folder = tmp_path / "other"
    other_folder.mkdir()
    (other_folder / "config.json").write_text('{"architectures": ["BertForMaskedLM"]}')
    (other_folder / "model.safetensors").touch()
    errors = plan(*args, f"roles={{judge: {{model: {other_folder}}}}}", dry_run=False).errors
    assert len(errors) == 1 and "no model family for the architecture BertForMaskedLM" in errors[0]
    assert plan(*args, f"roles={{judge: {{model: {other_folder}, backend: mine}}}}", dry_run=False).ok
    report = plan("roles={teacher: {model: /x}}")
    assert report.ok and report.warnings == ["roles.teacher is set, but ppo has no teacher"]


def test_transformers_classifier_as_reward_model(plan, tmp_path: Path) -> None:
    policy, folder = write_model(tmp_path / "policy", MOE, ("a", "b")), tmp_path / "judge"
    args = ["algorithm=grpo", f"model.path={policy}", "reward.functions=[]", f"reward.model={folder}"]
    chosen = "roles={reward: {backend: transformers}}"
    bert = {"architectures": ["BertForSequenceClassification"], "num_hidden_layers": 1, "hidden_size": 8}
    bert |= {"intermediate_size": 16, "max_position_embeddings": 512, "id2label": {"0": "bad", "1": "good"}}
    missing = {
        "no such folder": folder.mkdir,
        "no config.json": lambda: (folder / "config.json").write_text(json.dumps(bert)),
        r"no \*.safetensors files": lambda: save_file({"w": torch.zeros(3, 4), "b": torch.zeros(5)}, weights),
        "has 2 labels, and a score is one number": lambda: (folder / "config.json").write_text(json.dumps(single)),
        "no tokenizer": lambda: write_tokenizer(folder, ("a", "c")),
    }
    weights, single = folder / "model.safetensors", bert | {"id2label": {"0": "good"}}
    for message, fix in missing.items():
        errors = plan(*args, chosen, dry_run=False).errors
        assert len(errors) == 1 and re.search(message, errors[0]), (message, errors)
        fix()
    assert plan(*args, chosen, dry_run=False).ok
    (folder / "config.json").write_text(json.dumps(bert))
    error = "roles={reward: {backend: transformers, options: {label: good}}}"
    split_args = ["parallel.tp=1", "placement={actor: 0-1, reward: 2-3}", "parallel.ep=2"]
    report = plan(*args, error, *split_args, dry_run=False)
    assert report.ok, report.errors
    ((label, (stage,)),) = report.other_memory.items()
    assert label == "ranks 2-3: rollout, reward" and stage.states == {"reward model weights": 4 * 17}
    assert stage.generation["reward model activations"] == 4 * 3072 * (6 * 8 + 3 * 16) and stage.layers == (0,)
    (folder / "config.json").write_text(json.dumps(bert | {"max_position_embeddings": 128}))
    (warning,) = plan(*args, error, dry_run=False).warnings
    assert "is beyond the 128 positions of reward.model=" in warning and "on_overlong=truncate" in warning
    errors = plan(*args, chosen.replace("transformers}", "transformers, options: {label: fine}}"), dry_run=False).errors
    assert len(errors) == 1 and "label=fine: reward.model=" in errors[0]


def test_reward_model_with_its_own_layout(plan) -> None:
    split = ["algorithm=grpo", "reward.model=/x", "placement={actor: 0-1, reward: 2-3}"]
    report = plan(*split, "roles={reward: {parallel: {tp: 1, pp: 2, ep: 1}}}")
    assert report.ok, report.errors
    assert dict(report.facts["layout"])["reward's dense layers"] == "tp 1 x pp 2 x dp 1"
    assert [stage.layers for stage in report.other_memory["ranks 2-3: rollout, reward"]] == [(0, 1), (2, 3)]


@pytest.mark.parametrize(
    "roles, overrides, message",
    [
        ("{backend: http}", [], "roles.reward.options.url is not set"),
        ("{backend: http, options: {url: judge}}", [], "'judge' is not a URL"),
        ("{backend: [http, judge]}", [], r"roles.reward.backend=\[http, judge\]: name one of http and judge"),
        ("{backend: [pool, megatron]}", [], "name one of pool and megatron, and http or judge beside it"),
        ("{backend: [grpc, http]}", [], "roles.reward.backend=grpc: no such backend"),
        ("{backend: [transformers, http], options: {label: x}}", ["reward.model=/x"], "options.url is not set"),
        (
            "{backend: [transformers, http], options: {url: http://a/b, labels: 1}}",
            ["reward.model=/x"],
            "unknown key roles.reward.options.labels",
        ),
        (
            "{backend: http, options: {url: http://a/b, label: 1}}",
            ["reward.model=/x"],
            "unknown key roles.reward.options.label",
        ),
        ("{backend: pool}", ["reward.model=/x"], "reward.model=/x with roles.reward.backend=pool, which has no model"),
        ("{backend: pool}", ["reward.functions=[]"], "reward.functions is empty; ppo needs at least one"),
        ("{backend: transformers}", [], "roles.reward.backend=transformers needs reward.model"),
        (
            "{backend: transformers, options: {labels: 1}}",
            ["reward.model=/x"],
            "unknown key roles.reward.options.labels",
        ),
        (
            "{backend: grpc}",
            [],
            "roles.reward.backend=grpc: .* for the reward; it has megatron, transformers, pool, http",
        ),
        ("{model: /x}", [], "roles.reward.model: for the reward this is reward.model; set that"),
        ("{options: 3}", [], "roles.reward.options must be a mapping"),
    ],
)
def test_invalid_reward_roles(plan, roles: str, overrides: list[str], message: str) -> None:
    errors = plan(f"roles={{reward: {roles}}}", *overrides).errors
    assert len(errors) == 1 and re.search(message, errors[0]), errors


def test_reward_service_needs_no_functions(plan) -> None:
    report = plan("reward.functions=[]", "roles={reward: {backend: http, options: {url: http://a:80/b}}}")
    assert report.ok and report.warnings == []
    script = {"reward": RegisteredWorker(options={"url": ["http://a/b", "http://c/d"]})}
    assert plan("reward.functions=[]", "roles={reward: {backend: http}}", registered=script).ok


@pytest.mark.parametrize("backend", ["http", "[megatron, http]", "[transformers, http]"])
def test_function_model_and_service_combine(plan, backend: str) -> None:
    weights = "reward.weights={gsm8k: 0.4, model: 0.5, service: 0.1}"
    roles = f"roles={{reward: {{backend: {backend}, options: {{url: http://a:80/b}}}}}}"
    report = plan("reward.model=/x", weights, roles)
    assert report.ok, report.errors
    (error,) = plan("reward.model=/x", weights.replace("service", "servise"), roles).errors
    assert "no part of the reward is called 'servise'; did you mean service? (it has gsm8k, model, service)" in error


def test_reward_model_training_needs_no_engine(plan) -> None:
    report = plan("algorithm=reward_model", "rollout.tp=3", "reward.functions=[]", "rollout.max_context=100000")
    assert report.ok, report.errors
    assert "engines" not in report.facts and report.memory[0].generation == {}
    assert dict(report.facts["batch"])["pairs a step"] == "8"


def test_script_with_reward_fn_needs_no_reward_functions(plan) -> None:
    assert plan("reward.functions=[]", registered={"reward": RegisteredWorker(options={"reward_fn": len})}).ok


def test_sft_ignores_rollout_settings(plan) -> None:
    report = plan("algorithm=sft", "rollout.tp=3", "reward.functions=[]", "rollout.max_context=100000")
    assert report.ok, report.errors
    assert "engines" not in report.facts and report.memory[0].generation == {}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes_are_valid(recipe: Path, tmp_path: Path) -> None:
    tree = to_dict(load_config(recipe))
    if not tree["model"]["hf_config"]:
        (tmp_path / "config.json").write_text(json.dumps(MOE))
        tree["model"]["hf_config"] = str(tmp_path / "config.json")
    else:
        tree["model"]["hf_config"] = str(ROOT / tree["model"]["hf_config"])
    config: Config = from_dict(tree)
    report = validate(config, dry_run=True)
    assert report.ok, report.errors
    expected = "not found; it must exist", "the run would be rejected here"  # without bubblewrap
    assert all(any(text in line for text in expected) for line in report.warnings), report.warnings
    assert "the configuration is valid" in render(report)


BF16 = f"model.hf_config={ROOT}/configs/models/deepseek_v3.json"


def test_cluster_recipes_fit_their_gpus() -> None:
    for name, gpu, extra in (
        ("deepseek_v3_671b", 141, []),
        ("deepseek_v3_671b", 80, ["algorithm=grpo", BF16, "rollout.tp=64", "rollout.ep=64", "rollout.concurrency=256"]),
        ("deepseek_v3_671b", 141, [BF16, "rollout.tp=32", "rollout.ep=32"]),
        ("deepseek_v3_671b_256", 141, []),
        ("deepseek_v3_671b_96", 96, []),
        ("glm_5", 141, []),
        ("qwen3_235b", 80, []),
        ("qwen3_30b_a3b", 80, []),
        ("gpt_oss_20b", 80, []),
        ("qwen3_next_80b_a3b", 80, []),
        ("qwen3.5_35b_a3b", 80, []),
        ("qwen2.5_7b", 80, []),
        ("qwen2.5_7b", 80, ["algorithm=ppo", "parallel.tp=4"]),
        ("ppo_gsm8k", 40, []),
        ("sft", 80, []),
        ("qwen2.5_32b_dapo", 80, []),
        ("llama3_70b", 80, []),
        ("deepseek_r1", 141, ["parallel.world_size=256", "parallel.ep=16", "rollout.concurrency=512"]),
        ("deepseek_r1", 96, []),
        *((name, 80, []) for name in ("minimax_m2", "glm4.7_flash", "mixtral_8x7b", "ernie4.5_21b", "ling_flash_2.0")),
        ("kimi_k2_thinking", 80, []),
        ("kimi_k2.5", 80, []),
    ):
        recipe = ROOT / "configs" / f"{name}.yaml"
        hf = ROOT / load_config(recipe, extra).model.hf_config
        config = load_config(recipe, [text for text in extra if text != BF16] + [f"model.hf_config={hf}"])
        report = validate(config, dry_run=True)
        assert f"GPUs of {gpu} GB or more" in render(report), (name, extra)
        assert f"{gpu} GB" in recipe.read_text() or extra, f"{name} does not say for which GPUs it is"
        if config.algorithm == "sft":
            continue
        # SGLang's memory fraction must hold the planned weights and KV cache.
        engine = report.memory[0].generation
        needed = engine["engine weights"] + engine["engine KV cache"] + engine.get("engine states", 0)
        assert needed < config.rollout.sglang["mem_fraction_static"] * gpu * 1e9, (name, needed)


def test_report_shows_every_part(plan) -> None:
    text = render(plan("parallel.pp=2"))
    parts = ("actor weights", "actor gradients", "actor optimizer", "critic weights", "activations", "logits")
    for part in (*parts, "engine weights", "engine KV cache", "reshard staging", "reference weights (host)", "stage 1"):
        assert part in text, part
    assert "the fullest rank needs" in text


def test_parts_of_several_phases_name_their_phase(plan) -> None:
    text = render(plan())
    for row in ("engine weights, in generation", "engine weights, in weight sync"):
        assert text.count(row) == 1, row
    names = [line.split("   ")[0] for line in text.partition("memory per rank")[2].splitlines() if line[:2] == "  "]
    names = [name for name in names if name.strip()]
    assert len(names) == len(set(names))


def test_dry_run_command(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "megarl.train", "--dry-run", "configs/qwen3_235b.yaml"]
    valid = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert valid.returncode == 0 and "Qwen3MoeForCausalLM" in valid.stdout, valid.stderr
    invalid = subprocess.run([*command, "parallel.ep=5"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert invalid.returncode == 2
    assert "parallel.ep=5 does not divide the 16 ranks" in invalid.stdout + invalid.stderr
    # The dry run imports neither Megatron nor SGLang nor transformers.
    heavy = ("megatron.core", "sglang", "transformers")
    probe = f"import sys, megarl.dry_run.validation; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stdout


def test_plans_the_largest_stage(plan) -> None:
    stages = "stages={5: {rollout: {max_context: 512}}, 9: {rollout: {max_context: 128, max_new_tokens: 32}}}"
    report = plan(stages, "train.max_tokens_per_gpu=64")
    assert report.ok
    assert report.facts["stages"] == [
        ("from step 5 on", "rollout.max_context 256 -> 512"),
        ("from step 9 on", "rollout.max_context 512 -> 128, rollout.max_new_tokens 64 -> 32"),
    ]
    first, largest = plan("train.max_tokens_per_gpu=64"), plan("rollout.max_context=512", "train.max_tokens_per_gpu=64")
    assert report.memory == largest.memory != first.memory
    assert "stages" in render(report)
    late = plan("stages={200: {loss: {clip: 0.1}}}")
    assert late.warnings == ["stages: the run ends after 100 steps, before 200"]


def test_plans_the_reference_of_a_refreshed_lora(plan) -> None:
    """The copy has the adapters alone: 4 bytes of gradient, and 2 of bf16 weights, per element."""
    (stage,) = plan("lora.rank=4", "run.save_every=0").memory
    assert "reference weights" not in stage.host
    (stage,) = plan("lora.rank=4", "run.save_every=0", "kl.refresh_reference_every=5").memory
    assert stage.host["reference weights"] == stage.states["actor gradients"] // 2
    saved, unrefreshed = (
        plan("run.save_every=5", f"kl.refresh_reference_every={every}").memory[0].host for every in (5, 0)
    )
    copy = saved["reference weights"]
    assert copy == unrefreshed["reference weights"]
    assert saved["checkpoint under way"] == unrefreshed["checkpoint under way"] + copy


def test_environment_reward_needs_no_functions(plan) -> None:
    local = ["reward.functions=[]", "rollout.environments=[toy_environments:Guess]"]
    report = plan(*local, "reward.weights={environment: 2}")
    assert report.ok and report.warnings == []
    plain_report = plan("rollout.environments=[toy_environments:Plain]", "reward.functions=[]")
    assert plain_report.errors == [
        "rollout.environments: toy_environments:Plain has no `reward`, and there are no reward.functions, so its "
        "conversations have no reward; add one of the two"
    ]
    assert "no part of the reward is called 'environment'" in plan("reward.weights={environment: 2}").errors[0]
    broken = plan("rollout.environments=[toy_environments:Nothing]", "rollout.pass_env=[NOT_SET_HERE]")
    (error,) = broken.errors
    assert error.startswith("rollout.environments: toy_environments has no 'Nothing'; it has ")
    warned = plan("rollout.pass_env=[NOT_SET_HERE]").warnings
    assert warned == ["rollout.pass_env: NOT_SET_HERE is not set here, so tools and rewards will not have it"]
