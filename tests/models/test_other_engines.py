"""Memory of engines besides the policy's: a judge, and those of another policy."""

from __future__ import annotations

import pytest
from small_configs import QWEN2

from megarl.config import from_dict
from megarl.controllers.controller import load_requirements
from megarl.models.activation_memory import logits_bytes
from megarl.models.memory import engine_bytes, plan_memory, sync_staging_bytes

pytestmark = pytest.mark.alone

DEEP = {**QWEN2, "num_hidden_layers": 8}
JUDGE = {"backend": "sglang", "model": "/judge", "rollout": {"tp": 2, "max_context": 100, "concurrency": 3}}
KV_BYTES = 2 * 300 * 2 * 8 * 1 * 16  # bf16; tokens; keys and values; layers; a head of two on each rank; head size


@pytest.mark.parametrize(
    ("offload", "placement", "turns"),
    [(False, {}, True), (True, {}, True), (False, {"actor": "0-1", "rollout": "0-1", "judge": "2-3"}, False)],
)
def test_judge_is_awake_alone(offload: bool, placement: dict[str, str], turns: bool) -> None:
    """Its weights and cache count apart from generation. Where it takes turns, its weights sleep on the host."""
    tree = {"algorithm": "grpo", "parallel": {"world_size": 4}, "train": {"offload": offload}, "placement": placement}
    config = from_dict({**tree, "roles": {"judge": JUDGE, "reward": {"backend": "judge"}}})
    lead = "" if turns else "judge"
    (stage,) = plan_memory(QWEN2, config, load_requirements(config), None, None, lead, other_models={"judge": DEEP})
    weights = engine_bytes(DEEP, 2, 2)
    assert stage.other_engines == {"judge": {"judge weights": weights, "judge KV cache": KV_BYTES}}
    states = 0 if offload else sum(stage.states.values())
    assert stage.other_engine_total("judge") == states + weights + KV_BYTES <= stage.peak
    asleep = {name: amount for name, amount in stage.host.items() if name.endswith("asleep")}
    assert asleep == (
        {"engine weights, asleep": engine_bytes(QWEN2, 1, 2), "judge weights, asleep": weights} if turns else {}
    )
    assert bool(stage.states) == turns


def test_second_policy_adds_its_states_and_engine() -> None:
    name = "megarl.controllers.policies:PPOAndReMaxController"
    config = from_dict({"algorithm": name, "parallel": {"world_size": 2}, "kl": {"apply_to": "none"}})
    declared = load_requirements(config)
    (stage,) = plan_memory(QWEN2, config, declared, QWEN2, None, "", other_models={"rollout_b": DEEP})
    one = stage.states["actor weights"] - 2 * (2 * 1024 * 64 + 64)  # bf16, without embedding, output layer, final norm
    assert stage.states["actor b weights"] - 2 * (2 * 1024 * 64 + 64) == 2 * one  # twice as many layers
    assert stage.other_engines["rollout_b"]["rollout_b weights"] == engine_bytes(DEEP, 1, 2)


def test_largest_logits_and_each_weight_sync_of_several_policies_count() -> None:
    """Ranks have both; the second has four times the vocabulary. Offloaded, its weights are alone in its sync."""
    name = "megarl.controllers.policies:PPOAndReMaxController"
    wide = {**QWEN2, "vocab_size": 4096}
    tree = {"algorithm": name, "kl": {"apply_to": "none"}, "train": {"offload": True}, "guards": {"ppo_kl": 0.1}}
    config = from_dict(tree)
    declared = load_requirements(config)
    (stage,) = plan_memory(QWEN2, config, declared, QWEN2, other_models={"rollout_b": wide})
    (alone,) = plan_memory(QWEN2, config, declared, QWEN2, None, "actor_b", other_models={"rollout_b": wide})
    (equal,) = plan_memory(QWEN2, config, declared, QWEN2, other_models={"rollout_b": QWEN2})
    tokens, at_once = max(config.train.max_tokens_per_gpu, config.rollout.max_context), config.train.logits_chunk_size
    for plan, vocabulary in ((stage, 4096), (alone, 4096), (equal, 1024)):
        assert plan.training["logits"] == logits_bytes(vocabulary, 64, 1, tokens, at_once, 2)
    weights, own = stage.states["actor b weights"], engine_bytes(wide, 1, 2)
    bucket = config.rollout.weight_sync_bucket_mb << 20
    parts = {"rollout_b weights": own, "reshard staging": sync_staging_bytes(bucket, weights, own)}
    assert stage.other_syncs == alone.other_syncs == {"actor_b": parts}
    assert stage.other_sync_total("actor_b") == weights + sum(parts.values()) <= stage.peak
    assert stage.weight_sync["engine weights"] == engine_bytes(QWEN2, 1, 2)
    assert stage.weight_sync_total == stage.states["actor weights"] + sum(stage.weight_sync.values())
    kept = sum(stage.states[f"{actor} {part}"] for actor in ("actor", "actor b") for part in ("weights", "optimizer"))
    assert stage.host["last good policy"] == kept
