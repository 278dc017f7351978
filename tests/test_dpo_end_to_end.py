"""DPO in whole runs: two steps, held-out evaluation, resume, export; LoRA, and losses without a reference."""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training_run import make_folder, read_metrics, train

PAIRS = 8
"""Pairs in a step."""


def write_pairs(path: Path, count: int, seed: int) -> list[dict[str, str]]:
    """Write pairs of answers of different lengths to a question; the chosen one contains a 7."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        chosen = f"It is {draw.randint(10, 99)}7."
        rejected = f"I think that it may be {draw.choice('1234568')}."
        rows.append({"prompt": f"What is {draw.randint(1, 99)}+1?", "chosen": chosen, "rejected": rejected})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = make_folder(tmp_path_factory.mktemp("dpo") / "q", "qwen3_moe")
    write_pairs(target / "pairs.jsonl", 2 * PAIRS, seed=1)
    write_pairs(target / "held_out.jsonl", PAIRS, seed=2)
    return target


def run_dpo(folder: Path, run_dir: Path, *overrides: str) -> list[dict[str, float]]:
    """Train two steps of two updates on two ranks (tp=2, ep=2), with an evaluation before and after."""
    data = [f"data.train={folder}/pairs.jsonl", f"data.eval={folder}/held_out.jsonl", f"data.prompts_per_step={PAIRS}"]
    steps = ["run.num_rollout=2", "run.num_update=2", "run.ppo_epochs=1", "run.eval_every=2", "data.shuffle=false"]
    fast = ["actor_optimizer.lr=1e-3", "actor_optimizer.schedule=constant", "actor_optimizer.warmup_fraction=0"]
    train(folder, run_dir, "algorithm=dpo", *data, *steps, *fast, "reward.functions=[]", *overrides)
    return read_metrics(run_dir)


def score_answers(model: Path, rows: list[dict[str, str]], key: str) -> list[float]:
    """Return the log-probs of the answers in transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    scores = []
    for row in rows:
        question = [{"role": "user", "content": row["prompt"]}]
        head = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
        ids, answer = (tokenizer.encode(x, add_special_tokens=False) for x in (head, row[key] + "<|im_end|>"))
        with torch.no_grad():
            logprobs = policy(torch.tensor([ids + answer])).logits[0, len(ids) - 1 : -1].log_softmax(-1)
        scores.append(float(logprobs.gather(1, torch.tensor(answer)[:, None]).sum()))
    return scores


def test_dpo_trains_evaluates_resumes_and_exports(folder: Path, tmp_path: Path) -> None:
    rows = run_dpo(folder, tmp_path / "run")
    before, after = (row for row in rows if "eval/accuracy" in row)
    assert before["eval/loss"] == pytest.approx(math.log(2)) and before["eval/margin"] == before["eval/accuracy"] == 0
    assert after["eval/accuracy"] > 0.9 and after["eval/margin"] > 0.1 and after["eval/loss"] < 0.65
    first, second = (row for row in rows if "rewards/margin" in row)
    assert first["actor/skipped"] == 0 and first["actor/grad_norm"] > 0
    assert second["rewards/margin"] > first["rewards/margin"] > 0  # the mean of two updates, the first of which has 0
    pairs = [json.loads(line) for line in (folder / "held_out.jsonl").read_text().splitlines()]
    models = {"before": folder / "model", "after": tmp_path / "run/export"}
    scores = {(n, key): score_answers(m, pairs, key) for n, m in models.items() for key in ("chosen", "rejected")}
    margins = [
        0.1 * ((c1 - c0) - (r1 - r0))
        for c1, c0, r1, r0 in zip(
            *(scores[n, key] for key in ("chosen", "rejected") for n in ("after", "before")), strict=True
        )
    ]
    assert after["eval/margin"] == pytest.approx(
        sum(margins) / len(margins), abs=1e-4
    )  # of the export, in transformers
    loss = sum(math.log(1 + math.exp(-margin)) for margin in margins) / len(margins)
    assert after["eval/loss"] == pytest.approx(loss, abs=1e-4)

    resumed = tmp_path / "resumed"
    shutil.copytree(tmp_path / "run/checkpoints/step_000001", resumed / "checkpoints/step_000001")
    shutil.copy(tmp_path / "run/config.yaml", resumed / "config.yaml")
    (again,) = (row for row in run_dpo(folder, resumed, "run.resume=auto") if "rewards/margin" in row)
    names = [name for name in second if name.startswith(("rewards/", "logps/", "actor/"))]
    assert {name: again[name] for name in names} == {name: second[name] for name in names}
    first_export, second_export = (load_file(path / "export/model.safetensors") for path in (tmp_path / "run", resumed))
    assert all(torch.equal(tensor, second_export[name]) for name, tensor in first_export.items())


@pytest.mark.nightly
@pytest.mark.parametrize(
    "overrides",
    [
        ["lora.rank=4", "lora.alpha=8"],
        ["algorithm=ipo", "options.length_normalized=true"],
        ["algorithm=simpo", "parallel.tp=1", "parallel.cp=2", "parallel.ep=1"],
        ["algorithm=orpo", "parallel.tp=1", "parallel.pp=2", "parallel.ep=1"],
        ["algorithm=cpo", "parallel.tp=1", "parallel.ep=1", "options.loss=hinge"],
    ],
    ids=lambda overrides: overrides[0],
)
def test_relatives_learn_in_every_layout(folder: Path, overrides: list[str], tmp_path: Path) -> None:
    """LoRA, whose reference is the model without adapters; context, pipeline and data parallel ranks."""
    rows = run_dpo(folder, tmp_path / "run", *overrides)
    before, after = (row for row in rows if "eval/accuracy" in row)
    assert after["eval/margin"] > before["eval/margin"] and after["eval/loss"] < before["eval/loss"]
    assert all(row["actor/skipped"] == 0 for row in rows if "actor/skipped" in row)
    assert (tmp_path / "run/export/model.safetensors").exists()
