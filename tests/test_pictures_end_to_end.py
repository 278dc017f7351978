"""Whole runs on pictures with a tiny vision-language model, trained with its tower: GRPO on the real SGLang, DPO and
SFT."""

from __future__ import annotations

import base64
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_jobs import shared_jobs
from safetensors.torch import load_file
from training_run import ROOT, assert_replays, read_metrics, read_steps, with_host

from megarl.data.images import ImageProcessor
from megarl.observe.rollout_log import read_rollouts


def run(tmp_path: Path, family: str, host: str, *overrides: str) -> tuple[Path, Path]:
    """Train two steps. Return the folder of the data, and that of the run."""
    folder, run_dir = tmp_path / "pictures", tmp_path / "run"
    make_data(folder, family)
    train(folder, run_dir, *overrides, host=host)
    return folder, run_dir


def make_data(folder: Path, family: str) -> None:
    sizes = ["--train", "16", "--held-out", "4"]
    command = [sys.executable, "tools/make_pictures.py", str(folder), "--family", family, *sizes]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)


def train(folder: Path, run_dir: Path, *overrides: str, host: str = "") -> None:
    settings = [
        f"run.dir={run_dir}",
        f"model.path={folder}/model",
        f"data.train={folder}/train.jsonl",
        f"data.eval={folder}/eval.jsonl",
        *("run.num_rollout=2", "run.eval_every=0", "run.max_restarts=0", "track.progress=false"),
        *("data.prompts_per_step=4", "rollout.samples_per_prompt=4", "rollout.max_new_tokens=3"),
        "reward.functions=[sum_reward:even]",
    ]
    settings = list({item.partition("=")[0]: item for item in (*settings, *overrides)}.values())
    world = 2 if any("world_size=2" in item for item in overrides) else 1
    variables = with_host(host)
    config = "configs/quickstart_pictures.yaml"
    shared_jobs().run(world, "tests/train_rank.py", config, *settings, timeout=500, variables=variables)


def check_run(folder: Path, run_dir: Path, tower: str) -> None:
    rows = read_steps(run_dir)
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:  # the engine had the trainer's pixels, positions and weights, the tower's among them
        assert row["rollout/logprob_diff_p95"] <= 1e-4, row
        assert row["actor/grad_norm"] > 0
    before, after = (load_file(path / "model.safetensors") for path in (folder / "model", run_dir / "export"))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name for name in before if name.startswith(tower)} <= changed
    assert (run_dir / "export/preprocessor_config.json").exists()
    for rollout in read_rollouts(run_dir, 1):
        assert rollout.messages[0]["content"] == "<image> how many squares ?"


def test_qwen2_5_vl_trains_two_steps_and_replays_them_bitwise(tmp_path: Path, host: str) -> None:
    folder, run_dir = run(tmp_path, "qwen2_5_vl", host)
    check_run(folder, run_dir, "visual.")
    assert_replays(lambda target, replay: train(folder, target, replay), run_dir)


@pytest.mark.nightly
def test_qwen3_vl_moe_trains_two_steps_on_two_ranks_and_replays_them_bitwise(tmp_path: Path, host: str) -> None:
    layout = ["parallel.world_size=2", "parallel.ranks_per_node=2", "parallel.tp=2", "parallel.ep=2", "rollout.tp=2"]
    placed = ["rollout.num_redundant_experts=2", "rollout.rebalance_experts_every=1"]
    settings = [*layout, "rollout.ep=2", "train.routing_replay=true", *placed]
    folder, run_dir = run(tmp_path, "qwen3_vl_moe", host, *settings)
    check_run(folder, run_dir, "model.visual.")
    assert_replays(lambda target, replay: train(folder, target, *settings, replay), run_dir)


@pytest.mark.nightly
def test_adapters_in_bf16_leave_the_tower_unchanged(tmp_path: Path, host: str) -> None:
    settings = ["model.freeze_vision_tower=true", "model.dtype=bfloat16", "lora.rank=4", "actor_optimizer.lr=0.01"]
    folder, run_dir = run(tmp_path, "qwen2_5_vl", host, *settings)
    for row in read_steps(run_dir):
        assert row["rollout/logprob_diff_p95"] <= 0.1 and row["actor/grad_norm"] > 0, row
    before, after = (load_file(path / "model.safetensors") for path in (folder / "model", run_dir / "export"))
    changed = {name for name in before if not torch.equal(before[name].bfloat16(), after[name])}
    assert changed and all(name.startswith("model.layers.") for name in changed)


def rewrite_rows(folder: Path, make: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    for name in ("train", "eval"):
        file = folder / f"{name}.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps(make(row)) + "\n" for row in rows))


def score_answers(model: Path, rows: list[dict[str, Any]], key: str) -> list[float]:
    """Return the log-probs of the answers in transformers."""
    from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

    tokenizer, processor = AutoTokenizer.from_pretrained(model), ImageProcessor.load(str(model))
    policy = Qwen2_5_VLForConditionalGeneration.from_pretrained(model, dtype=torch.float32)
    pad, scores = policy.config.image_token_id, []
    for row in rows:
        data = base64.b64decode(row["images"][0]["bytes"])
        image = processor.read(data)
        picture = "<|vision_start|> " + "<|image_pad|> " * image.num_tokens + "<|vision_end|>"
        head = f"<|im_start|> user {picture} how many squares ? <|im_end|> <|im_start|> assistant "
        question, answer = (tokenizer.encode(x, add_special_tokens=False) for x in (head, f"{row[key]} <|im_end|>"))
        tokens = torch.tensor([question + answer])
        pixels = {"pixel_values": processor.pixels(data), "image_grid_thw": torch.tensor([image.grid])}
        with torch.no_grad():
            logits = policy(tokens, mm_token_type_ids=(tokens == pad).int(), **pixels).logits
        logprobs = logits[0, len(question) - 1 : -1].log_softmax(-1)
        scores.append(float(logprobs.gather(1, torch.tensor(answer)[:, None]).sum()))
    return scores


@pytest.mark.nightly
def test_dpo_on_pairs_with_pictures_equals_transformers(tmp_path: Path) -> None:
    """Two steps train the tower, too; the loss on held-out pairs before and after is that of the folders in
    transformers."""
    folder, run_dir = tmp_path / "pictures", tmp_path / "run"
    make_data(folder, "qwen2_5_vl")

    def make_pair(row: dict[str, Any]) -> dict[str, Any]:
        right = int(row["ground_truth"])
        return {"prompt": row["prompt"], "images": row["images"], "chosen": str(right), "rejected": str(right % 4 + 1)}

    rewrite_rows(folder, make_pair)
    settings = ["algorithm=dpo", "reward.functions=[]", "run.num_update=1", "run.eval_every=2", "loss.entropy_coef=0"]
    train(folder, run_dir, *settings, "actor_optimizer.schedule=constant", "actor_optimizer.warmup_fraction=0")
    before, after = (row for row in read_metrics(run_dir) if "eval/loss" in row)
    assert before["eval/loss"] == pytest.approx(math.log(2)) and before["eval/margin"] == 0
    pairs = [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]
    models = folder / "model", run_dir / "export"
    scores = [[score_answers(model, pairs, key) for key in ("chosen", "rejected")] for model in models]
    (chosen, rejected), (chosen_after, rejected_after) = scores
    margins = [
        0.1 * ((c1 - c0) - (r1 - r0))
        for c0, r0, c1, r1 in zip(chosen, rejected, chosen_after, rejected_after, strict=True)
    ]
    assert after["eval/margin"] == pytest.approx(sum(margins) / len(margins), abs=1e-4) and any(margins)
    assert after["eval/loss"] == pytest.approx(
        sum(math.log(1 + math.exp(-m)) for m in margins) / len(margins), abs=1e-4
    )
    weights, trained = (load_file(path / "model.safetensors") for path in models)
    assert all(not torch.equal(weights[name], trained[name]) for name in weights if name.startswith("visual."))


@pytest.mark.nightly
def test_sft_on_pictures_equals_transformers(tmp_path: Path) -> None:
    """The negative log-probability of held-out answers, before and after two steps on context-parallel ranks."""
    folder, run_dir = tmp_path / "pictures", tmp_path / "run"
    make_data(folder, "qwen2_5_vl")
    rewrite_rows(
        folder, lambda row: {"prompt": row["prompt"], "images": row["images"], "response": row["ground_truth"]}
    )
    layout = ["parallel.world_size=2", "parallel.ranks_per_node=2", "parallel.cp=2"]
    settings = ["algorithm=sft", "reward.functions=[]", "run.num_update=1", "run.eval_every=2", "loss.entropy_coef=0"]
    train(folder, run_dir, *settings, *layout)
    rows = [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]
    reported = [row["eval/nll"] for row in read_metrics(run_dir) if "eval/nll" in row]
    scores = [score_answers(model, rows, "response") for model in (folder / "model", run_dir / "export")]
    expected = [-sum(values) / (2 * len(rows)) for values in scores]  # a word and the end of the turn
    assert reported == pytest.approx(expected, abs=1e-4) and reported[1] < reported[0]
