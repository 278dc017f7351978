"""Whole runs of a tiny MoE: Megatron on two gloo ranks and SGLang engines.

Most tests share one three-step PPO run, or replay its rollouts without an engine. Its reward is the sum of a function
and of a reward model, which is trained first.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import kimi_k25_folder
import pytest
import tiny_models
import torch
from drafter import predictable_policy
from safetensors.torch import load_file, save_file
from sentencepiece_tokenizer import put_pieces
from training_run import (
    ROOT,
    SMALL,
    assert_replays,
    build_command,
    check_communication,
    log_lines,
    make_folder,
    read_metrics,
    read_steps,
    run_cli,
    train,
    with_host,
)

sys.path.insert(0, str(Path(__file__).parent / "rewards"))
from reward_server import RewardServer

from megarl.config import LoraConfig, ParallelConfig
from megarl.environments.ready.calculator import calculator
from megarl.models.memory import ModelVariant, stage_elements
from megarl.models.registry import load_hf_config
from megarl.observe.rollout_log import read_records, read_rollouts
from megarl.observe.trackers.prometheus import sanitize_metric
from megarl.rollout.partial_rollouts import read_groups


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("quickstart") / "q", "qwen3_moe")


def write_preferences(path: Path, count: int, seed: int) -> None:
    """Write pairs of answers to a question; the chosen one contains a 7."""
    draw = random.Random(seed)

    def chat(question: str, seven: bool) -> list[dict[str, str]]:
        numbers = (str(draw.randint(0, 9999)) for _ in range(10000))
        number = next(number for number in numbers if ("7" in number) == seven)
        return [{"role": "user", "content": question}, {"role": "assistant", "content": f"The answer is {number}."}]

    with path.open("w") as file:
        for _ in range(count):
            question = f"What is {draw.randint(1, 99)}+{draw.randint(1, 99)}?"
            file.write(json.dumps({"chosen": chat(question, True), "rejected": chat(question, False)}) + "\n")


@pytest.fixture(scope="module")
def reward_run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a reward model, trained from the policy's weights for 12 steps of 32 pairs."""
    workdir = tmp_path_factory.mktemp("reward_model")
    write_preferences(workdir / "train.jsonl", 384, seed=1)
    write_preferences(workdir / "eval.jsonl", 96, seed=2)
    data = [f"data.train={workdir}/train.jsonl", f"data.eval={workdir}/eval.jsonl", "data.prompts_per_step=32"]
    steps = ["run.num_rollout=12", "run.eval_every=12", "run.save_every=0", "run.num_update=1", "run.ppo_epochs=1"]
    train(folder, workdir / "run", "algorithm=reward_model", *data, *steps)
    return workdir / "run"


PPO = ["critic.warmup_steps=1", "kl.target=0.015", "kl.horizon=64"]
"""An adaptive KL coefficient that changes by the most allowed."""


STAGES = (
    "stages={2: {rollout: {max_context: 224, max_new_tokens: 48, temperature: 0.8}, critic: {optimizer: {lr: 5e-4}}, "
    "train: {max_tokens_per_gpu: 512}}}"
)


@pytest.fixture(scope="module")
def ppo_run(folder: Path, reward_run: Path, host: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "ppo"
    train(folder, run_dir, f"reward.model={reward_run}/export", *PPO, STAGES, host=host, record=True)
    return run_dir


def test_reward_model_learns_the_preference(reward_run: Path) -> None:
    rows = read_metrics(reward_run)
    steps = [row for row in rows if "reward_model/loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 13))
    assert steps[0]["reward_model/loss"] == pytest.approx(math.log(2))  # its head starts at zero
    assert steps[-1]["reward_model/accuracy"] > 0.9 and steps[-1]["reward_model/loss"] < 0.3
    before, after = (row for row in rows if "eval/accuracy" in row)
    assert (before["eval/accuracy"], before["eval/margin"]) == (0.0, 0.0)
    assert before["eval/loss"] == pytest.approx(math.log(2))
    assert after["eval/accuracy"] > 0.9 and after["eval/margin"] > 1.0 and after["eval/loss"] < 0.3


def test_reward_model_scores_match_transformers(ppo_run: Path, reward_run: Path) -> None:
    """Megatron on two ranks scored the sampled token ids in the run."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(reward_run / "export", dtype=torch.float32)
    assert type(model).__name__ == "Qwen3MoeForSequenceClassification"
    scores = []
    for rollout in read_rollouts(ppo_run, 2):
        with torch.no_grad():
            scores.append(float(model(torch.tensor([rollout.token_ids.tolist()])).logits))
        assert rollout.reward_parts.keys() == {"even", "model"}
        assert rollout.reward == rollout.reward_parts["even"] + rollout.reward_parts["model"]
        assert rollout.reward_parts["model"] == pytest.approx(scores[-1], abs=1e-4)
    assert max(scores) - min(scores) > 0.01
    (row,) = [row for row in read_metrics(ppo_run) if row["step"] == 2 and "reward/model" in row]
    assert row["reward/model"] == pytest.approx(sum(scores) / len(scores), abs=1e-4)


def test_grafana_board_shows_metrics_of_a_run(ppo_run: Path) -> None:
    names = {sanitize_metric(name) for row in read_metrics(ppo_run) for name in row}
    names |= {"megarl_step_time_seconds", "megarl_alarms_total"}
    names |= {"megarl_eval_reward_greedy", "megarl_eval_reward_sampled"}  # of runs with `data.eval`
    board = json.loads((ROOT / "docs/grafana.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    used = {name for query in queries for name in re.findall(r"megarl_\w+", query)}
    assert len(used) > 30 and used <= names


def test_ppo_trains_three_steps(ppo_run: Path) -> None:
    rows = read_steps(ppo_run)
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["rollout/logprob_diff_p95"] <= 1e-4  # not the largest: a tie of two experts may fall either way
        names = ["critic/grad_norm", "critic/vf_loss", "time/generate", "time/weight_sync"]
        if row["step"] > 1:  # the first step only updates the critic
            names += ["actor/grad_norm", "actor/entropy", "time/actor_update"]
            assert "actor/ppo_kl" in row and "actor/pg_clipfrac" in row
        assert "critic/vf_clipfrac" in row and all(row[name] > 0 for name in names)
    assert "actor/lr" not in rows[0]
    # Two updates per step, four of the policy: its cosine ends at update 5, the critic's at 7.
    # The critic's peak changes at step 2.
    for name, peaks, first, end in (("actor", [2e-4, 2e-4], 1, 5), ("critic", [1e-3, 5e-4, 5e-4], 0, 7)):
        for step, (row, peak) in enumerate(zip(rows[first:], peaks, strict=True)):
            rates = [peak * (0.5 + 0.5 * math.cos(math.pi * (2 * step + k) / end)) for k in (1, 2)]
            assert row[f"{name}/lr"] == pytest.approx(sum(rates) / 2)
    assert list(ppo_run.glob("**/events.out.tfevents*"))


def test_stage_changes_sampling_and_limits(ppo_run: Path) -> None:
    """The untrained model writes until a limit stops it, of a turn or of the conversation. `logprob_diff_p95` above
    shows that engine and trainer change the temperature together."""
    longest = []
    for step in (1, 2, 3):
        rollouts = read_rollouts(ppo_run, step)
        longest.append(max(len(turn.token_ids) for rollout in rollouts for turn in rollout.turns if turn.is_action))
    assert longest == [40, 48, 48]
    (line,) = log_lines(ppo_run, "stage, from step")
    assert "stage, from step 2 on: rollout.max_context 192 -> 224, rollout.max_new_tokens 40 -> 48, " in line
    assert "rollout.temperature 1.0 -> 0.8, critic.optimizer.lr 0.001 -> 0.0005, train.max_tokens_per_gpu 4096" in line


def test_communication_is_valid_for_nccl(ppo_run: Path) -> None:
    counts = check_communication(ppo_run)
    assert counts["send"] == counts["receive"] > 0 and counts["all_reduce"] > 0 and counts["reduce_scatter_single"] > 0


def test_rollout_log_records_weight_versions(ppo_run: Path) -> None:
    for step in (1, 2, 3):
        rollouts = read_rollouts(ppo_run, step)
        assert len(rollouts) == 16 and {r.group for r in rollouts} == {0, 1, 2, 3}
        versions = {turn.weight_version for r in rollouts for turn in r.turns if turn.is_action}
        assert versions == {step - 1}


def test_trained_export_loads_in_transformers(ppo_run: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(ppo_run / "export", dtype=torch.float32)
    AutoTokenizer.from_pretrained(ppo_run / "export")
    before = load_file(folder / "model" / "model.safetensors")
    after = load_file(ppo_run / "export" / "model.safetensors")
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert model.config.num_hidden_layers == 4


def test_resume_is_bitwise_equal_to_the_uninterrupted_run(
    ppo_run: Path, reward_run: Path, folder: Path, tmp_path: Path
) -> None:
    resumed = tmp_path / "resumed"
    checkpoint = "checkpoints/step_000001"
    shutil.copytree(ppo_run / checkpoint, resumed / checkpoint)
    shutil.copy(ppo_run / "config.yaml", resumed / "config.yaml")
    overrides = f"reward.model={reward_run}/export", *PPO, STAGES
    train(folder, resumed, "run.resume=auto", f"rollout.replay={ppo_run}", *overrides)
    rows = read_steps(resumed)
    assert [row["step"] for row in rows] == [2, 3]
    first = load_file(ppo_run / "export" / "model.safetensors")
    second = load_file(resumed / "export" / "model.safetensors")
    assert all(torch.equal(first[name], second[name]) for name in first)
    uninterrupted = read_steps(ppo_run)[1:]
    assert len({row["actor/kl_coef"] for row in uninterrupted}) == 2  # the checkpoint must restore it
    for expected_row, resumed_row in zip(uninterrupted, rows, strict=True):
        for name in expected_row:
            if name.split("/")[0] in ("actor", "critic", "rollout") and name != "rollout/idle_frac":  # of engines
                assert expected_row[name] == resumed_row[name], name


def test_grpo_trains_with_the_reward_model_alone(ppo_run: Path, reward_run: Path, folder: Path, tmp_path: Path) -> None:
    reward = ("reward.functions=[]", f"reward.model={reward_run}/export")
    train(folder, tmp_path / "grpo", "algorithm=grpo", f"rollout.replay={ppo_run}", "run.num_rollout=1", *reward)
    (row,) = read_metrics(tmp_path / "grpo")
    recorded = read_rollouts(ppo_run, 1)
    mean = sum(rollout.reward_parts["model"] for rollout in recorded) / len(recorded)
    assert row["rollout/reward_mean"] == pytest.approx(mean)
    assert "actor/ppo_kl" in row and not any(name.startswith("critic/") for name in row)


def test_weights_rewards_of_function_model_and_service(
    ppo_run: Path, reward_run: Path, folder: Path, tmp_path: Path
) -> None:
    """Each part is recorded unweighted, and has its own metrics."""
    replay = f"rollout.replay={ppo_run}"
    model, weights = f"reward.model={reward_run}/export", "reward.weights={even: 0.4, model: 0.5, service: 0.1}"
    with RewardServer() as server:
        service = f"roles={{reward: {{backend: http, options: {{url: {server.url}, private: true, batch: 5}}}}}}"
        train(folder, tmp_path / "run", "algorithm=grpo", replay, "run.num_rollout=1", model, weights, service)
        scored_items = [item for batch in server.batches() for item in batch]
    (row,) = read_metrics(tmp_path / "run")
    recorded, scored = read_rollouts(ppo_run, 1), read_rollouts(tmp_path / "run", 1)
    assert sorted(item["answer"] for item in scored_items) == sorted(item.answer for item in recorded)
    of_service = dict.fromkeys(("service", "service/style"))
    for before, after in zip(recorded, scored, strict=True):
        parts = after.reward_parts
        assert parts.keys() == {"even", "model", *of_service}
        assert parts["even"] == before.reward_parts["even"]
        assert parts["model"] == pytest.approx(before.reward_parts["model"], abs=1e-5)
        assert (parts["service"], parts["service/style"]) == (len(after.answer.split()), 0.5)
        full = 0.4 * parts["even"] + 0.5 * parts["model"] + 0.1 * parts["service"]
        assert after.reward == pytest.approx(full)
    for name, weight in (("even", 0.4), ("model", 0.5), ("service", 0.1)):
        mean = sum(item.reward_parts[name] for item in scored) / len(scored)
        assert row[f"reward/{name}"] == pytest.approx(mean, abs=1e-5)
        assert row[f"reward/{name}_weight"] == weight and f"reward/{name}_failed_frac" not in row
    assert row["rollout/reward_mean"] == pytest.approx(sum(item.reward for item in scored) / len(scored))


def test_routing_replay_reduces_bf16_mismatch(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """With 8 of 64 experts per token, two experts nearly tie in bf16 for almost every token. For five random models the
    mean mismatch was 3.1 to 5.0 times as large without replay, the 95th percentile 4.8 to 8.9 times."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "rollout"))
    model = tiny_models.qwen3_moe(num_experts=64, num_experts_per_tok=8, num_hidden_layers=4)
    overrides = [
        f"model.path={tiny_models.save(model, tmp_path / 'model')}",
        *("algorithm=grpo", "model.dtype=bfloat16", "train.routing_replay=true"),
        *("run.num_rollout=1", "run.save_every=0", "run.export=false", "rollout.max_turns=1"),
        *("parallel.world_size=1", "parallel.tp=1", "parallel.ep=1"),
    ]
    train(folder, tmp_path / "run", *overrides, host=host)
    (row,) = read_metrics(tmp_path / "run")
    for name in ("rollout/logprob_diff_mean", "rollout/logprob_diff_p95"):
        assert 0 < row[name] < 0.5 * row[f"{name}_unreplayed"], (name, row)
    assert "without replay" in (tmp_path / "run" / "log.txt").read_text()


def test_sparse_index_replay_reduces_bf16_mismatch(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """Without experts, keys are all that rounding can change: the mean mismatch was 17 times as large without
    replay, the 95th percentile 21 times."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "rollout"))
    import tiny_models

    model = tiny_models.deepseek_v32(first_k_dense_replace=3)
    overrides = [
        f"model.path={tiny_models.save(model, tmp_path / 'model')}",
        *("algorithm=grpo", "model.dtype=bfloat16", "train.sparse_index_replay=true"),
        *("run.num_rollout=2", "run.save_every=0", "run.export=false", "rollout.max_turns=1"),
        *("parallel.world_size=1", "parallel.tp=1", "parallel.ep=1"),
    ]
    train(folder, tmp_path / "run", *overrides, host=host)
    rows = read_metrics(tmp_path / "run")
    for name in ("rollout/logprob_diff_mean", "rollout/logprob_diff_p95"):
        assert 0 < rows[0][name] < 0.2 * rows[0][f"{name}_unreplayed"], (name, rows[0])
        assert rows[1][name] < 2 * rows[0][name]


@pytest.mark.nightly
def test_glm_moe_dsa_replays_experts_and_keys_on_two_ranks_also_from_a_recording(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "rollout"))
    import tiny_models

    model = tiny_models.glm_moe_dsa()
    overrides = [
        f"model.path={tiny_models.save(model, tmp_path / 'model')}",
        *("algorithm=grpo", "train.sparse_index_replay=true", "train.routing_replay=true"),
        *("run.num_rollout=2", "run.save_every=0", "train.indexer_loss_coef=0.1"),
    ]
    train(folder, tmp_path / "run", *overrides, host=host)
    rows = read_steps(tmp_path / "run")
    assert len(rows) == 2
    for row in rows:
        assert row["rollout/logprob_diff_p95"] <= 1e-4 and row["actor/indexer_loss"] > 0
    assert_replays(lambda target, replay: train(folder, target, *overrides, replay), tmp_path / "run")


OVERSAMPLED = [
    *("algorithm=grpo", "rollout.oversample=1.5", "rollout.concurrency=6", "rollout.max_staleness=2"),
    *("kl.apply_to=none", "correction.kind=icepop"),
]


@pytest.fixture(scope="module")
def oversampled(folder: Path, host: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of four prompts with six in flight, on two engines with six slots each."""
    run_dir = tmp_path_factory.mktemp("runs") / "oversampled"
    train(folder, run_dir, *OVERSAMPLED, host=host)
    return run_dir


@pytest.mark.nightly
def test_partial_groups_continue_in_the_next_step(oversampled: Path) -> None:
    rows = [row for row in read_metrics(oversampled) if "rollout/staleness_mean" in row]
    assert [row["step"] for row in rows] == [1, 2, 3] and rows[0]["rollout/partial_groups"] == 0
    assert all(1 <= row["rollout/partial_groups"] <= 2 and row["rollout/restarted_rollouts"] == 0 for row in rows[1:])
    first_steps: dict[str, int] = {}
    for step, row in enumerate(rows, 1):
        rollouts = read_rollouts(oversampled, step)
        assert [rollout.group for rollout in rollouts] == [group for group in range(4) for _ in range(4)]
        assert len({rollout.seed for rollout in rollouts}) == 16
        assert all(first_steps.setdefault(rollout.prompt.id, step) == step for rollout in rollouts)
        staleness = [
            step - 1 - version
            for rollout in rollouts
            for version, tokens in rollout.version_spans
            for _ in range(tokens)
        ]
        assert row["rollout/staleness_max"] == max(staleness)
        assert row["rollout/staleness_mean"] == pytest.approx(sum(staleness) / len(staleness))
        assert ("rollout/logprob_diff_stale" in row) == (max(staleness) > 0)
        assert row["rollout/logprob_diff_p95"] <= 1e-4 and 0 < row["rollout/idle_frac"] < 1
        buckets = {min(age, 3) for age in staleness} if max(staleness) else set()
        assert {int(name[-1]) for name in row if name.startswith("rollout_corr/kl_staleness")} == buckets
        assert row["rollout_corr/rollout_is_mean"] == pytest.approx(1.0, abs=0.2) and "actor/pg_clipfrac" in row
        assert buckets or abs(row["rollout_corr/kl"]) < 1e-4
    assert len(first_steps) == 12
    assert "does not correct" not in (oversampled / "log.txt").read_text()  # PPO's ratio is to the sampling policy


@pytest.mark.nightly
def test_replay_of_an_oversampled_run_is_bitwise_equal(oversampled: Path, folder: Path) -> None:
    """Groups that began in earlier steps keep their staleness. The replay deals out no further prompts."""
    assert_replays(lambda target, replay: train(folder, target, *OVERSAMPLED, replay), oversampled, "data/epoch")


@pytest.mark.nightly
def test_one_engine_resumes_partial_groups_of_two(oversampled: Path, folder: Path, tmp_path: Path, host: str) -> None:
    checkpoint = "checkpoints/step_000002"
    shutil.copytree(oversampled / checkpoint, tmp_path / checkpoint)
    shutil.copy(oversampled / "config.yaml", tmp_path / "config.yaml")
    files = sorted((tmp_path / checkpoint / "partial_groups").iterdir())
    partial_groups = [group for file in files for group in read_groups(file)]
    single_rank = ["parallel.world_size=1", "parallel.tp=1", "parallel.ep=1"]
    train(folder, tmp_path, *OVERSAMPLED, *single_rank, "run.resume=auto", host=host)
    (row,) = [row for row in read_metrics(tmp_path) if "rollout/staleness_mean" in row]
    assert len(files) == 2 and row["step"] == 3 and row["rollout/partial_groups"] == len(partial_groups) > 0
    before = {rollout.prompt.id for step in (1, 2) for rollout in read_rollouts(oversampled, step)}
    after = read_rollouts(tmp_path, 3)
    assert [rollout.group for rollout in after] == [group for group in range(4) for _ in range(4)]
    assert not before & {rollout.prompt.id for rollout in after}
    partial = {item.seed: item for group in partial_groups for item in group}
    assert any(rollout.seed in partial for rollout in after)
    for rollout in after:
        if rollout.seed in partial:
            assert (
                rollout.token_ids[: partial[rollout.seed].num_tokens].tolist()
                == partial[rollout.seed].token_ids.tolist()
            )


LORA = ["lora.rank=32", "lora.alpha=64"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "prefix", "lora"),
    [("deepseek_v3", "model.layers.2.", []), ("qwen3_next", "mtp.", []), ("deepseek_v3", "model.layers.2.", LORA)],
)
def test_mtp_training_raises_draft_acceptance(
    family: str, prefix: str, lora: list[str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """Equal rewards leave only the multi-token prediction layer to learn. Acceptance rises only if the weight sync
    updates the draft model of the two-rank engine from the second pipeline stage."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "rollout"))
    if family == "qwen3_next":  # whose random policy is too hard to predict
        model = tiny_models.save(predictable_policy(build=tiny_models.qwen3_next), tmp_path / "model")
        file = model / "model.safetensors"
        random_joint = 0.1 * torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
        save_file(load_file(file) | {"mtp.fc.weight": random_joint}, file, {"format": "pt"})
    else:
        model = tiny_models.save(tiny_models.deepseek_v3(num_nextn_predict_layers=1), tmp_path / "model")
    overrides = [
        f"model.path={model}",
        *("algorithm=grpo", "reward.functions=[sum_reward:same]", "kl.apply_to=none"),
        *(
            "train.mtp_loss_coef=1.0",
            "rollout.num_speculative_tokens=2",
            "rollout.tp=2",
            "rollout.temperature=0.1",
            "rollout.max_turns=1",
        ),
        *("parallel.tp=1", "parallel.pp=2", "parallel.ep=1", "run.num_rollout=8", "run.save_every=0"),
        *("actor_optimizer.lr=0.01", "actor_optimizer.schedule=constant", "actor_optimizer.weight_decay=0"),
    ]
    train(folder, tmp_path / "run", *overrides, *lora, host=host)
    rows = read_metrics(tmp_path / "run")
    rates = [row["rollout/spec_accept_rate"] for row in rows]
    assert rates[0] < 0.02 and sum(rates[4:]) / 4 > 0.05, rates  # answers differ with the order of requests
    assert rows[4]["actor/mtp_loss"] < rows[0]["actor/mtp_loss"] - 1.0
    assert max(row["rollout/logprob_diff_p95"] for row in rows) <= 1e-4
    before, after = (load_file(path / "model.safetensors") for path in (model, tmp_path / "run" / "export"))
    assert before.keys() == after.keys()
    untrained = ["embed_tokens.weight", "shared_head.head.weight", "e_score_correction_bias"]
    untrained += ["norm.weight", "mlp.gate.weight"] if lora else []
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.startswith(prefix) and not name.endswith(tuple(untrained))}


@pytest.mark.nightly
def test_draft_layer_follows_a_policy_that_learns(folder: Path, tmp_path: Path, host: str) -> None:
    """The policy learns by its rewards, and the layer learns the policy's tokens meanwhile. In a replay of the rollouts
    with a weight of its loss that is far below Adam's epsilon, it does not, and predicts them worse."""
    model = tiny_models.save(predictable_policy(), tmp_path / "model")
    overrides = [
        f"model.path={model}",
        *("algorithm=grpo", "kl.apply_to=none", "train.mtp_loss_coef=1.0", "rollout.num_speculative_tokens=2"),
        *("rollout.tp=2", "rollout.temperature=0.5", "rollout.max_turns=1", "rollout.max_new_tokens=64"),
        *("run.num_rollout=8", "run.save_every=0", "actor_optimizer.lr=0.002", "actor_optimizer.schedule=constant"),
        *("actor_optimizer.weight_decay=0", "actor_optimizer.warmup_fraction=0"),
    ]
    train(folder, tmp_path / "run", *overrides, host=host)
    control = [*overrides, "train.mtp_loss_coef=1e-12", f"rollout.replay={tmp_path}/run"]
    train(folder, tmp_path / "control", *control, host=host)
    rows, control_rows = read_metrics(tmp_path / "run"), read_metrics(tmp_path / "control")
    trained, frozen = ([row["actor/mtp_loss"] for row in steps[2:]] for steps in (rows, control_rows))
    assert sum(trained) / 6 < sum(frozen) / 6 - 0.2, (trained, frozen)
    assert rows[0]["rollout/spec_accept_length"] > 1.5
    assert max(row["actor/ppo_kl"] for row in rows) > 0.01  # the policy changes
    assert max(row["rollout/logprob_diff_p95"] for row in rows) <= 1e-4


def test_drafts_with_truncated_sampling(folder: Path, tmp_path: Path, host: str) -> None:
    """The trainer's log-probs over the sampling masks, with replayed routing, are the engine's, of drafted tokens too,
    before and after an update of policy and draft layer."""
    model = tiny_models.save(predictable_policy(), tmp_path / "model")
    overrides = [
        f"model.path={model}",
        *("algorithm=grpo", "kl.apply_to=none", "train.mtp_loss_coef=0.1", "train.routing_replay=true"),
        *("rollout.num_speculative_tokens=2", "rollout.tp=2", "rollout.max_turns=1", "rollout.max_new_tokens=16"),
        *("rollout.top_p=0.9", "rollout.top_k=20", "rollout.min_p=0.02"),
        *("run.num_rollout=2", "run.save_every=0", "run.export=false", "rollout.samples_per_prompt=2"),
    ]
    train(folder, tmp_path / "run", *overrides, host=host)
    rows = read_steps(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2] and rows[0]["actor/grad_norm"] > 0
    for row in rows:
        assert row["rollout/spec_accept_rate"] > 0.05 and 1 < row["rollout/sampling_mask_size_mean"] < 20
        assert row["rollout/logprob_diff"] <= 1e-5, row


@pytest.mark.nightly
@pytest.mark.parametrize(
    "family", [*(name for name in tiny_models.families_without_builder() if name != "qwen3_5"), "kimi_k25"]
)
def test_two_steps_of_an_moe_family(family: str, folder: Path, tmp_path: Path, host: str) -> None:
    """GRPO on two tensor and expert parallel ranks with replayed routing: engine and trainer compute the same policy
    before and after an update, and the export has every tensor, changed except for the routers' biases and towers."""
    build = getattr(tiny_models, family, partial(tiny_models.of_family, family))
    model = tiny_models.save(build(), tmp_path / "model")
    overrides = [
        f"model.path={model}",
        *("algorithm=grpo", "kl.apply_to=none", "loss.entropy_coef=0.1", "train.routing_replay=true"),
        *("run.num_rollout=2", "run.save_every=0", "rollout.max_turns=1", "rollout.max_new_tokens=8"),
        *("actor_optimizer.lr=0.01", "actor_optimizer.schedule=constant", "rollout.verify_weights_every=1"),
        *(["rollout.sglang.trust_remote_code=true"] if family == "ling2" else []),
    ]
    train(folder, tmp_path / "run", *overrides, host=host)
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2]
    assert max(row["rollout/logprob_diff"] for row in rows) <= 1e-4
    before, after = (load_file(path / "model.safetensors") for path in (model, tmp_path / "run" / "export"))
    assert before.keys() == after.keys()
    frozen = {name for name in before if name.endswith(("e_score_correction_bias", "expert_bias"))}
    frozen |= {name for name in before if name.startswith(kimi_k25_folder.VISION)}
    assert {name for name in before if torch.equal(before[name], after[name])} == frozen


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["ernie4_5_moe", "gpt_oss", "qwen3_next", "glm4_moe"])
def test_bf16_run_from_a_float32_folder(family: str, folder: Path, tmp_path: Path, host: str) -> None:
    """Some of the engine's tensors stay in FP32: a router, its bias, biases of experts, or the decays of delta nets."""
    build = getattr(tiny_models, family, partial(tiny_models.of_family, family))
    model = tiny_models.save(build(), tmp_path / "model")
    assert json.loads((model / "config.json").read_text())["dtype"] == "float32"
    overrides = [
        f"model.path={model}",
        *("model.dtype=bfloat16", "algorithm=grpo", "loss.entropy_coef=0.1", "train.routing_replay=true"),
        *("run.num_rollout=2", "run.save_every=0", "rollout.max_turns=1", "rollout.max_new_tokens=8"),
        *("actor_optimizer.lr=0.01", "actor_optimizer.schedule=constant", "rollout.verify_weights_every=1"),
        *("parallel.world_size=1", "parallel.tp=1", "parallel.ep=1"),
    ]
    train(folder, tmp_path / "run", *overrides, host=host)
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2]
    assert max(row["rollout/logprob_diff_mean"] for row in rows) < 0.05
    exported = load_file(tmp_path / "run" / "export" / "model.safetensors")
    assert exported.keys() == load_file(model / "model.safetensors").keys()


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.nightly
def test_sft_policy_calls_its_tool_in_training_and_evaluation(folder: Path, tmp_path: Path, host: str) -> None:
    """After SFT on a single conversation the engine generates the tool call, SGLang's parser parses it, and the tool
    process answers, in training and in the evaluations before and after. The tool is README.md's. A tool that fails on
    every call ends the run."""
    from transformers import AutoTokenizer

    question = {"role": "user", "content": "What is 61+17?"}
    function = {"name": "calculator", "arguments": {"expression": "61+17"}}
    tool_call_message = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    answer = {"role": "assistant", "content": "The answer is 78."}
    conversation = [question, tool_call_message, {"role": "tool", "content": "78"}, answer]
    sft_row = {"messages": conversation, "tools": [calculator.schema]}
    lessons = write_jsonl(tmp_path / "sft.jsonl", [sft_row] * 16)
    eval_file = write_jsonl(
        tmp_path / "eval.jsonl", [{"prompt": [question], "ground_truth": 78, "data_source": name} for name in "aab"]
    )
    single_rank = ["parallel.world_size=1", "parallel.tp=1", "parallel.ep=1", "run.save_every=0", "run.num_update=1"]
    single_rank += ["run.ppo_epochs=1"]
    optimizer = ["actor_optimizer.lr=0.005", "actor_optimizer.schedule=constant", "data.prompts_per_step=16"]
    train(
        *(folder, tmp_path / "sft", "algorithm=sft", f"data.train={lessons}", "run.num_rollout=40"),
        *(*single_rank, *optimizer),
    )
    overrides = ["algorithm=grpo", f"model.path={tmp_path}/sft/export", f"data.train={eval_file}", "run.num_rollout=1"]
    overrides += [f"data.eval={eval_file}", "run.eval_every=1", "run.export=false", "rollout.temperature=0.05"]
    overrides += ["kl.apply_to=none", "data.prompts_per_step=2", "rollout.samples_per_prompt=2"]
    (text,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
        if "def calculator" in block
    ]
    (tmp_path / "my_tools.py").write_text(text)
    (tmp_path / "broken_tools.py").write_text(text.replace("return", "raise OSError('no licence')\n    return"))

    def run(name: str, *extra: str) -> subprocess.CompletedProcess[str]:
        environment = with_host(host)
        environment |= {"PYTHONPATH": f"{tmp_path}{os.pathsep}{environment.get('PYTHONPATH', '')}"}
        command = build_command(folder, tmp_path / name, *single_rank, *overrides, *extra)
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, env=environment)

    done = run("run", "rollout.tools=[my_tools:calculator]")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert (tmp_path / "run" / "logs" / "tools_0.log").read_text().count("called with 61+17") >= 4
    rollouts = read_rollouts(tmp_path / "run", 1)
    assert len(rollouts) == 4
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "sft" / "export")
    for rollout in rollouts:
        assert (rollout.status, rollout.tool_calls, rollout.tool_errors) == ("stop", 1, 0), rollout
        assert [message["role"] for message in rollout.messages] == ["user", "assistant", "tool", "assistant"]
        (call,) = rollout.messages[1]["tool_calls"]
        assert call["function"] == function and call["id"] == rollout.messages[2]["tool_call_id"]
        assert rollout.messages[2]["content"] == "78" and rollout.messages[3]["content"] == answer["content"]
        assert [turn.is_action for turn in rollout.turns] == [False, True, False, True]
        assert "<tool_response>\n78\n</tool_response>" in tokenizer.decode(list(rollout.turns[2].token_ids))
    before, step, after = read_metrics(tmp_path / "run")
    assert step["rollout/logprob_diff_p95"] <= 1e-4 and step["rollout/aborted_frac"] == 0.0
    for name in ("greedy", "sampled"):
        for row in (before, after):
            assert row[f"eval/turns_mean_{name}"] == 2.0 and row[f"eval/aborted_frac_{name}"] == 0.0
            assert 0.0 <= row[f"eval/reward_{name}"] <= 1.0 and row[f"eval/response_length_mean_{name}"] > 10
            by_source = [row[f"eval/reward_{name}/{source}"] for source in "ab"]
            assert row[f"eval/reward_{name}"] == pytest.approx((2 * by_source[0] + by_source[1]) / 3)
    counts = {name: value for name, value in step.items() if name.startswith("rollout/count/")}
    assert counts in ({}, {"rollout/count/a": 2.0, "rollout/count/b": 2.0})  # both prompts may come from a
    assert "held out, after step 1: " in (tmp_path / "run" / "log.txt").read_text()
    assert step["rollout/tool_failed_frac"] == step["tool/calculator_failed_frac"] == 0.0

    done = run("broken", "rollout.tools=[broken_tools:calculator]", "rollout.samples_per_prompt=16", "run.eval_every=0")
    message = (
        r"error: (\d+) of \1 calls of the tool calculator failed, more than "
        r"rollout.max_tool_failed_frac=0.99 allows: no "
    )
    assert done.returncode == 2 and re.match(message + r"licence \(OSError at ", done.stderr), done.stderr
    log = (tmp_path / "broken" / "log.txt").read_text()
    assert re.search(r"ALARM: step 1: (\d+) of \1 calls of the tool calculator failed: no licence \(OSError at ", log)


@pytest.mark.nightly
def test_gdpo_normalizes_each_part_of_the_reward(folder: Path, tmp_path: Path, host: str) -> None:
    """Two steps; the recorded advantages follow from the recorded parts, whose scales differ by a factor of 100."""
    parts = ["reward.functions=[sum_reward:even, sum_reward:short]", "reward.weights={short: 0.5}", "run.num_rollout=2"]
    train(folder, tmp_path / "run", "algorithm=gdpo", *parts, "track.save_replay_data=true", host=host)
    rows = read_steps(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2] and all(row["actor/skipped"] == 0 for row in rows)
    for row in rows:
        assert row["actor/advantage_mean"] == pytest.approx(0.0, abs=1e-5)
        assert row["actor/advantage_variance"] == pytest.approx(1.0, rel=1e-4)
        records = read_records(tmp_path / "run", row["step"], include_trainer_columns=True)
        rollouts = [record.rollout for record in records]
        sums = [0.0] * len(records)
        for name, weight in {"even": 1.0, "short": 0.5}.items():
            for i, rollout in enumerate(rollouts):
                group = torch.tensor([x.reward_parts[name] for x in rollouts if x.group == rollout.group])
                if group.min() < group.max():
                    sums[i] += weight * float((rollout.reward_parts[name] - group.mean()) / group.std())
        tokens = torch.cat([torch.full((x.num_actions,), total) for x, total in zip(rollouts, sums, strict=True)])
        for record, total in zip(records, sums, strict=True):
            assert record.advantages is not None
            expected = float((total - tokens.mean()) / tokens.std(correction=0))
            actions = [turn.is_action for turn in record.rollout.turns for _ in turn.token_ids]
            assert record.advantages[actions].tolist() == pytest.approx([expected] * sum(actions), abs=1e-3)


@pytest.mark.nightly
def test_resume_before_a_stage_with_engines(
    ppo_run: Path, reward_run: Path, folder: Path, tmp_path: Path, host: str
) -> None:
    """Resumed after step 1, engines sample step 2 with the stage's limits, and trainer and engine agree about its
    temperature. (The trainer's side is bitwise that of an uninterrupted run, see above; engines draw other samples.)"""
    resumed = tmp_path / "resumed"
    shutil.copytree(ppo_run / "checkpoints/step_000001", resumed / "checkpoints/step_000001")
    shutil.copy(ppo_run / "config.yaml", resumed / "config.yaml")
    overrides = f"reward.model={reward_run}/export", *PPO, STAGES, "run.num_rollout=2", "run.resume=auto"
    train(folder, resumed, *overrides, host=host)
    (row,) = read_steps(resumed)
    assert row["step"] == 2 and row["rollout/logprob_diff_p95"] <= 1e-4
    turns = [turn for rollout in read_rollouts(resumed, 2) for turn in rollout.turns if turn.is_action]
    assert max(len(turn.token_ids) for turn in turns) == 48


@pytest.mark.nightly
def test_broken_reward_ends_the_run_with_one_line(ppo_run: Path, folder: Path, tmp_path: Path) -> None:
    done = run_cli(folder, tmp_path / "run", "reward.functions=[sum_reward:broken]", f"rollout.replay={ppo_run}")
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.strip()]
    message = (
        "error: 16 of 16 rollouts have no reward, more than reward.max_failed_frac=0.1 allows: 16 "
        "x broken: it raised Zero"
    )
    assert line.startswith(message) and "sum_reward.py:" in line
    assert not (tmp_path / "run" / "checkpoints").exists() and not (tmp_path / "run" / "export").exists()


@pytest.mark.nightly
def test_reward_timeouts_end_the_run_early(ppo_run: Path, folder: Path, tmp_path: Path) -> None:
    """Each call takes four seconds. After two failures of 16 the limit of 1.6 is exceeded."""
    slow = ["reward.functions=[sum_reward:hanging]", "reward.timeout=4", "reward.processes=2"]
    done = run_cli(folder, tmp_path / "run", *slow, f"rollout.replay={ppo_run}")
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.strip()]
    message = (
        r"error: (\d+) of 16 rollouts have no reward, more than reward.max_failed_frac=0.1 allows "
        r"\(the other (\d+) were "
    )
    match = re.match(message + r"not graded\): \1 x hanging: it took longer than reward.timeout=4 s", line)
    assert match and int(match[1]) in (2, 3, 4) and int(match[1]) + int(match[2]) == 16, line


@pytest.mark.nightly
def test_control_file_weights_survive_a_resume(ppo_run: Path, folder: Path, tmp_path: Path) -> None:
    run, replay = tmp_path / "run", f"rollout.replay={ppo_run}"
    run.mkdir()
    (run / "control.yaml").write_text("reward: {weights: {even: 0.25}}\n")
    functions = "reward.functions=[sum_reward:even,sum_reward:same]"
    train(folder, run, "algorithm=grpo", functions, replay, "run.num_rollout=1")
    (run / "control.yaml").write_text("reward: {weights: {evn: 0.5}}\n")
    train(folder, run, "algorithm=grpo", functions, replay, "run.num_rollout=2", "run.resume=auto")
    first, second = (row for row in read_metrics(run) if "rollout/reward_mean" in row)
    for row in (first, second):
        assert row["rollout/reward_mean"] == pytest.approx(0.25 * row["reward/even"] + 1.0)
        assert (row["reward/even_weight"], row["reward/same_weight"], row["reward/same"]) == (0.25, 1.0, 1.0)
    log = (run / "log.txt").read_text()
    assert "control.yaml, from step 1 on: reward.weights={'even': 0.25}" in log
    assert "as control.yaml has set it: reward.weights={'even': 0.25}" in log
    assert "no part of the reward is called 'evn'; did you mean even" in log and "it changes nothing" in log


@pytest.mark.nightly
def test_wrong_engine_weights_stop_the_run_and_name_the_layer(folder: Path, tmp_path: Path, host: str) -> None:
    """`train_with_corrupt_sync.py` corrupts an engine tensor after step 1's comparison, and no hash differs."""
    launched = [
        sys.executable,
        "-m",
        "megarl.torchrun",
        "--standalone",
        "--nproc-per-node",
        "2",
        "tests/train_with_corrupt_sync.py",
    ]
    single = (
        "algorithm=grpo",
        "kl.apply_to=none",
        "run.num_update=1",
        "run.ppo_epochs=1",
        "run.save_every=0",
        "model.dtype=float32",
    )
    command = [*launched, *build_command(folder, tmp_path / "run", *single)[3:]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, env=with_host(host))
    assert done.returncode == 2, done.stdout[-3000:] + done.stderr[-3000:]
    assert "engines and trainer compute different policies: on the same tokens" in done.stderr
    named = "Layer 1: the engines' weights differ from the trainer's (model.layers.1.self_attn.o_proj.weight)"
    assert named in done.stderr
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1]


@pytest.mark.nightly
def test_hello_script_with_deepseek_lora_and_a_two_node_engine(tmp_path: Path, host: str) -> None:
    """`ranks_per_node=1` makes two nodes of this machine, each with one of the engine's two tensor parallel ranks. The
    actor is context parallel, the critic tensor parallel, and both are offloaded during generation. The entropy bonus
    moves the policy whatever the rewards. The tokenizer is a `tokenizer.model` alone."""
    folder = make_folder(tmp_path / "deepseek", "deepseek_v3")
    put_pieces(folder / "model", (folder / "sft.jsonl").read_text())
    command = [sys.executable, "-m", "megarl.torchrun", "--standalone", "--nproc-per-node", "2"]
    overrides = [
        f"model.path={folder}/model",
        f"data.train={folder}/train.jsonl",
        f"run.dir={tmp_path}/hello",
        *SMALL[1:],
        *(
            "parallel.ranks_per_node=1",
            "parallel.tp=1",
            "parallel.cp=2",
            "critic.parallel={tp: 2, cp: 1}",
            "train.offload=true",
            "train.routing_replay=true",
            "rollout.tp=2",
            "rollout.max_new_tokens=8",
            "rollout.max_turns=2",
            "rollout.verify_weights_every=2",
            "lora.rank=4",
            "actor_optimizer.lr=0.01",
            "loss.entropy_coef=0.1",
        ),
    ]
    done = subprocess.run(
        [*command, "launch/ppo_hello.py", *overrides],
        cwd=ROOT,
        env=with_host(host),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert len(re.findall(r"^reward \S+, KL \S+$", done.stdout, re.MULTILINE)) == 1, "the result, once"
    assert not re.findall(r".*Warning: .*", done.stderr), "nothing of what libraries advise their users"
    rows = read_metrics(tmp_path / "hello")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert max(row["rollout/logprob_diff"] for row in rows) <= 1e-4  # the maximum: replayed experts cannot tie
    assert ["rollout/logprob_diff_unreplayed" in row for row in rows] == [True, False, True]
    assert all(row["time/offload"] > 0 for row in rows)
    check_layouts(folder / "model", (tmp_path / "hello" / "log.txt").read_text())
    # The reference is the base model; trainer and engine agree, and are far from it.
    assert abs(rows[0]["actor/kl_to_reference"]) < 1e-4 and rows[2]["actor/kl_to_reference"] > 0.1
    check_export_of_lora(folder / "model", tmp_path / "hello")
    assert [path.name for path in (tmp_path / "hello" / "export").glob("tokenizer*")] == ["tokenizer.model"]
    assert {path.stem for path in (tmp_path / "hello" / "logs").glob("*.log")} == {"engine_0_node_0", "engine_0_node_1"}


@pytest.mark.nightly
def test_grpo_with_gated_delta_nets(tmp_path: Path, host: str) -> None:
    """Conversations of two turns, so the engine goes on from states of delta nets that it has kept."""
    folder = make_folder(tmp_path / "delta", "qwen3_next")
    settings = [
        "algorithm=grpo",
        "run.num_rollout=2",
        "rollout.tp=2",
        "rollout.max_turns=2",
        "rollout.max_new_tokens=8",
    ]
    settings += ["train.routing_replay=true", "rollout.verify_weights_every=1", "loss.entropy_coef=0.1"]
    settings += ["actor_optimizer.lr=0.01", "run.export=true"]
    train(folder, tmp_path / "run", *settings, host=host)
    rows = read_steps(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2]
    assert max(row["rollout/logprob_diff"] for row in rows) <= 1e-4
    assert all(math.isfinite(row["actor/grad_norm"]) and row["actor/grad_norm"] > 0 for row in rows)


def check_layouts(model: Path, log: str) -> None:
    """Check the logged parameter counts of actor and critic against the memory estimate of their layouts."""
    hf = load_hf_config(model)
    for role, tp, cp in (("actor", 1, 2), ("critic", 2, 1)):
        message = rf"{role}: tp={tp} cp={cp} pp=1 ep=2 etp=1, ([\d,]+) parameters on rank 0"
        ((count, trained),) = re.findall(message + r", of which LoRA trains ([\d,]+) ", log)
        parallel, layers = ParallelConfig(world_size=2, tp=tp, cp=cp, ep=2), [range(hf["num_hidden_layers"])]
        variant = ModelVariant(head=role == "critic", lora=LoraConfig(rank=4))
        (elements,) = stage_elements(hf, parallel, layers, variant)
        assert int(count.replace(",", "")) == sum(elements), role
        head = hf["hidden_size"] if role == "critic" else 0  # trained too, but not an adapter
        assert int(trained.replace(",", "")) == elements.dense + elements.expert - head, role


def check_export_of_lora(model: Path, run_dir: Path) -> None:
    """Check that the exported model is the base model plus the exported adapter, and that nothing else changed."""
    base, merged = (load_file(path / "model.safetensors") for path in (model, run_dir / "export"))
    adapter = load_file(run_dir / "adapter" / "adapter_model.safetensors")
    settings = json.loads((run_dir / "adapter" / "adapter_config.json").read_text())
    assert settings["r"] == 4 and settings["base_model_name_or_path"] == str(model.resolve())
    assert base.keys() == merged.keys()
    num_changed = 0
    for name, weight in base.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{module}.lora_B.weight" not in adapter:
            assert torch.equal(merged[name], weight), name
            continue
        assert module.rpartition(".")[2] in settings["target_modules"]
        a, b = (adapter.pop(f"{module}.{factor}.weight").double() for factor in ("lora_A", "lora_B"))
        assert torch.allclose(merged[name].double(), weight + settings["lora_alpha"] / 4 * b @ a, rtol=0, atol=1e-6)
        num_changed += bool((merged[name] - weight).abs().max() > 1e-4)
    assert not adapter and num_changed > 20
