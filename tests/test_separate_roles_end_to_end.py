"""A run with reference and reward model on ranks, and in layouts, of their own, compared with one where they share the
actor's ranks; and its reward, fused from a function, a model, a service and a judge."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from training_run import ROOT, check_communication, log_lines, make_folder, read_steps, train

from megarl.observe.rollout_log import read_rollouts

sys.path.insert(0, str(ROOT / "tests/rewards"))
from reward_server import RewardServer, chat_completion

WEIGHTS = {"even": 0.4, "model": 0.5, "service": 0.1, "tone": -0.2}
SETTINGS = [
    *("algorithm=grpo", "run.ppo_epochs=1", "run.num_update=2", "run.num_rollout=4", "run.export=false"),
    *("kl.refresh_reference_every=2", "run.keep_checkpoints=4"),
    *("rollout.samples_per_prompt=2", "rollout.max_turns=1", "rollout.max_new_tokens=16", "kl.apply_to=loss"),
    *("kl.coef=0.1", "train.routing_replay=true", f"reward.weights={json.dumps(WEIGHTS)}"),
]
SEPARATE = [  # the actor shares some of its ranks with the reference, and some with the engines
    "placement={actor: 0-1, reference: [1, 2], reward: gpus 0-2, rollout: reference}",
    *("parallel.world_size=3", "parallel.ranks_per_node=3"),
]
ROLES = ("actor", "reference", "reward")
LAYOUTS = "reference: {parallel: {tp: 1, pp: 2, ep: 1}}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quickstart, with a reward model that is wider and deeper than the policy, and has a larger vocabulary. It uses
    all experts, so that none of them can tie."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForSequenceClassification

    created = make_folder(tmp_path_factory.mktemp("quickstart") / "q", "qwen3_moe")
    policy = Qwen3MoeConfig.from_pretrained(created / "model").to_dict()
    changes = {"hidden_size": 192, "num_hidden_layers": 6, "vocab_size": policy["vocab_size"] + 64, "num_labels": 1}
    changes["num_experts_per_tok"] = policy["num_local_experts"]
    torch.manual_seed(3)
    config = Qwen3MoeConfig(**{**policy, **changes, "architectures": ["Qwen3MoeForSequenceClassification"]})
    Qwen3MoeForSequenceClassification(config).save_pretrained(created / "reward")
    for path in (created / "model").glob("*token*"):
        shutil.copy(path, created / "reward")
    tokenizer = Tokenizer.from_file(str(created / "model/tokenizer.json"))
    tokenizer.add_special_tokens(["<score>"])  # the policy does not have it
    tokenizer.save(str(created / "reward/tokenizer.json"))
    return created


@pytest.fixture(scope="module")
def server() -> Iterator[RewardServer]:
    """A service that counts the characters of an answer, and a judge that gives 7 for an odd number, and 2 for an even
    one."""

    def reply(body: dict[str, Any]) -> Any:
        if "messages" in body:
            return chat_completion(f"Score: {(2, 7)[len(body['messages'][0]['content']) % 2]}")
        return [{"reward": len(conversation["answer"])} for conversation in body["conversations"]]

    with RewardServer(reply=reply) as running:
        yield running


def roles(server: RewardServer, reference: str = "", **reward: int) -> str:
    layout = f"parallel: {json.dumps(reward)}, " if reward else ""
    tone = {"backend": "judge", "url": server.address, "model": "m", "prompt": "{answer}", "private": True}
    options = json.dumps({"url": server.url, "private": True, "services": {"tone": tone}})
    reward_role = f"reward: {{{layout}backend: http, options: {options}}}"
    return f"roles={{{', '.join(filter(None, (reference, reward_role)))}}}"


@pytest.fixture(scope="module")
def separate_run(folder: Path, server: RewardServer, host: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "separate"
    settings = [*SETTINGS, *SEPARATE, f"reward.model={folder}/reward", roles(server, LAYOUTS, tp=1, pp=3, ep=1)]
    train(folder, run_dir, *settings, host=host, record=True)
    return run_dir


def test_separate_reference_equals_the_colocated_one(
    separate_run: Path, folder: Path, server: RewardServer, tmp_path: Path
) -> None:
    """The same rollouts on the actor's two ranks, where the reference is the actor's model with swapped weights; both
    take the policy's weights before step 3."""
    settings = [*SETTINGS, f"reward.model={folder}/reward", roles(server), f"rollout.replay={separate_run}"]
    train(folder, tmp_path / "colocated", *settings)
    separate, colocated = read_steps(separate_run), read_steps(tmp_path / "colocated")
    assert [row["step"] for row in separate] == [row["step"] for row in colocated] == [1, 2, 3, 4]
    assert [row["actor/reference_version"] for row in separate] == [0, 0, 1, 1]
    for actual, expected in zip(separate, colocated, strict=True):
        assert actual["actor/kl_to_reference"] == pytest.approx(expected["actor/kl_to_reference"], abs=1e-6)
        for name in ("actor/kl_loss", "actor/loss", "actor/grad_norm", "rollout/reward_mean", "reward/model"):
            assert actual[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-6), name
        assert actual["time/reference_logprobs"] > 0
    assert min(row["actor/kl_to_reference"] for row in (separate[1], separate[3])) > 1e-5
    for step, names in ((2, ["actor"]), (3, ["actor", "reference"])):
        folders = (separate_run / f"checkpoints/step_{step:06d}").iterdir()
        assert sorted(path.name for path in folders if path.is_dir() and path.name in ROLES) == names
    assert log_lines(separate_run, "reference on ranks 1-2: tp=1 cp=1 pp=2 ep=1 etp=1, ")
    assert log_lines(separate_run, "placement has rollout on 1-2 and actor on 0-1; actor on 0-1 and reference on 1-2:")


def test_communication_is_valid_for_nccl(separate_run: Path) -> None:
    """No deadlock among models on overlapping ranks."""
    counts = check_communication(separate_run)
    assert counts["send"] == counts["receive"] > 0


@pytest.mark.nightly
def test_resume_restores_a_refreshed_reference(
    separate_run: Path, folder: Path, server: RewardServer, tmp_path: Path
) -> None:
    """Step 4 again, from the checkpoint after step 3: with the reference in another layout, its KL is the same."""
    resumed = tmp_path / "resumed"
    shutil.copytree(separate_run / "checkpoints/step_000003", resumed / "checkpoints/step_000003")
    shutil.copy(separate_run / "config.yaml", resumed / "config.yaml")
    settings = [*SETTINGS, *SEPARATE, f"reward.model={folder}/reward", f"rollout.replay={separate_run}"]
    layouts = roles(server, "reference: {parallel: {tp: 2, pp: 1, ep: 2}}", tp=1, pp=3, ep=1)
    train(folder, resumed, *settings, layouts, "run.resume=auto")
    (actual,), expected = read_steps(resumed), read_steps(separate_run)[-1]
    assert actual["actor/reference_version"] == 1 and actual["actor/loss"] == pytest.approx(
        expected["actor/loss"], abs=1e-6
    )
    assert actual["actor/kl_to_reference"] == pytest.approx(expected["actor/kl_to_reference"], abs=1e-6)


@pytest.mark.nightly
def test_separate_reference_of_a_policy_with_adapters(
    separate_run: Path, folder: Path, server: RewardServer, tmp_path: Path
) -> None:
    """With LoRA, a colocated reference disables or swaps the adapters, and a separate one gets them merged."""
    settings = [*SETTINGS, "lora.rank=4", f"rollout.replay={separate_run}", f"reward.model={folder}/reward"]
    settings += ["actor_optimizer.lr=0.01", "run.save_every=0"]
    train(folder, tmp_path / "separate", *settings, *SEPARATE, roles(server, LAYOUTS, tp=1, pp=3, ep=1))
    train(folder, tmp_path / "colocated", *settings, roles(server))
    separate, colocated = read_steps(tmp_path / "separate"), read_steps(tmp_path / "colocated")
    assert len(separate) == 4 and separate[1]["actor/kl_to_reference"] > 1e-5
    for actual, expected in zip(separate, colocated, strict=True):
        assert actual["actor/kl_to_reference"] == pytest.approx(expected["actor/kl_to_reference"], rel=1e-4, abs=1e-6)


def test_reward_of_each_rollout_is_the_weighted_sum_of_its_parts(separate_run: Path, folder: Path) -> None:
    """Each part is computed by hand: the model's with transformers."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder / "reward", dtype=torch.float32)
    for step in (1, 2, 3, 4):
        rollouts = read_rollouts(separate_run, step)
        assert len(rollouts) == 8
        for rollout in rollouts:
            sampled = sum(int(turn.token_ids.sum()) for turn in rollout.turns if turn.is_action)
            with torch.no_grad():
                score = float(model(torch.tensor([rollout.token_ids.tolist()])).logits)
            length = len(rollout.answer)
            tone = 7.0 if length % 2 else 2.0
            parts = {"even": float(sampled % 2 == 0), "model": score, "service": float(length), "tone": tone}
            assert {name: rollout.reward_parts[name] for name in parts} == pytest.approx(parts, abs=1e-4)
            total = 0.4 * parts["even"] + 0.5 * score + 0.1 * length - 0.2 * tone
            assert rollout.reward == pytest.approx(total, abs=1e-4)
