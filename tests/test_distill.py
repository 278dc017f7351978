"""Distillation in a whole run: the engine generates, and Megatron computes policy and teacher in turn."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from training_run import make_folder, read_metrics, run_cli, train
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.observe.rollout_log import read_records


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quickstart and a teacher: the same model with logits three times as large."""
    folder = make_folder(tmp_path_factory.mktemp("quickstart") / "q", "qwen3_moe")
    shutil.copytree(folder / "model", folder / "teacher")
    weights = load_file(folder / "teacher" / "model.safetensors")
    weights["lm_head.weight"] = 3.0 * weights["lm_head.weight"]
    save_file(weights, folder / "teacher" / "model.safetensors", metadata={"format": "pt"})
    return folder


def load_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def score(model: Any, head: list[int], answer: list[int]) -> torch.Tensor:
    """Return the log-probs of an answer's tokens in transformers."""
    with torch.no_grad():
        logprobs = model(torch.tensor([head + answer])).logits[0, len(head) - 1 : -1].log_softmax(-1)
    return logprobs.gather(1, torch.tensor(answer)[:, None])[:, 0]


@pytest.mark.nightly
def test_reverse_kl_to_the_teacher_falls(folder: Path, tmp_path: Path, host: str) -> None:
    overrides = ["algorithm=distill", f"roles={{teacher: {{model: {folder}/teacher}}}}", "reward.functions=[]"]
    overrides += ["run.num_rollout=12", "run.num_update=2", "run.ppo_epochs=1", "run.save_every=0", "run.export=false"]
    overrides += ["rollout.max_turns=1", "rollout.max_new_tokens=16", "rollout.samples_per_prompt=16"]
    overrides += ["parallel.world_size=1", "parallel.tp=1", "parallel.ep=1", "kl.apply_to=none"]
    overrides += [
        "options={advantage_clip: 5, center_advantages: true}",
        "actor_optimizer.lr=0.001",
        "actor_optimizer.schedule=constant",
    ]
    train(folder, tmp_path / "run", *overrides, host=host)
    rows = read_metrics(tmp_path / "run")
    result = [row["distill/reverse_kl"] for row in rows]
    assert len(result) == 12 and all(row["rollout/logprob_diff_p95"] <= 1e-4 for row in rows)
    assert result[0] > 1.0 and sum(result[-3:]) / 3 < 0.65 * result[0], result
    assert all("time/teacher_logprobs" in row and "time/reward" not in row for row in rows)
    assert "reverse KL to the teacher" in (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.parametrize(
    "environment",
    ["", pytest.param("toy_environments:Waits", marks=pytest.mark.nightly)],  # it writes the first messages
    ids=["rows", "environment"],
)
def test_two_teachers_of_which_one_is_the_policy_that_knows_the_answer(
    environment: str, folder: Path, tmp_path: Path, host: str
) -> None:
    """Two steps on two ranks; the recorded advantages of the first are those of transformers' log-probs."""
    hint = " The result is {}."
    teachers = f'{{reference: {{prompt: "{{prompt}}{hint.format("{ground_truth}")}"}}, big: {{weight: 3}}}}'
    overrides = [
        "algorithm=distill",
        f"roles={{big: {{model: {folder}/teacher}}}}",
        f"options={{teachers: {teachers}}}",
    ]
    overrides += ["run.num_rollout=2", "run.save_every=0", "run.export=false", "reward.functions=[]"]
    overrides += ["rollout.max_turns=1", "rollout.max_new_tokens=16", "kl.apply_to=none"]
    overrides += [f"rollout.environments=[{environment}]"] if environment else []
    train(folder, tmp_path / "run", *overrides, host=host)
    rows = read_metrics(tmp_path / "run")
    assert len(rows) == 2 and all(row["actor/skipped"] == 0 and row["actor/grad_norm"] > 0 for row in rows)

    student, big = (load_model(folder / name) for name in ("model", "teacher"))
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    records = read_records(tmp_path / "run", 1)
    for record in records[:4]:
        prompt, (first, turn, *_) = record.rollout.prompt, record.rollout.turns
        question, text = prompt.messages[-1]["content"], tokenizer.decode(first.token_ids)
        assert text.count(question) == 1 and ("Wait." in text) == bool(environment)
        told = text.replace(question, question + hint.format(prompt.ground_truth))
        heads = first.token_ids.tolist(), tokenizer.encode(told, add_special_tokens=False)
        own, knowing, large = (
            score(model, head, turn.token_ids.tolist())
            for model, head in ((student, heads[0]), (student, heads[1]), (big, heads[0]))
        )
        assert float((knowing - own).abs().max()) > 1e-3
        expected = knowing / 4 + 3 * large / 4 - own
        actual = torch.from_numpy(record.advantages[len(first.token_ids) :][: len(turn.token_ids)])
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.nightly
def test_a_teacher_with_another_tokenizer(folder: Path, tmp_path: Path, host: str) -> None:
    """Two steps on two ranks; the recorded advantages of the first are sums over spans of text, in transformers."""
    shutil.copytree(folder / "model", tmp_path / "other")
    tokenizer = json.loads((tmp_path / "other/tokenizer.json").read_text())
    merges = tokenizer["model"]["merges"]
    tokenizer["model"]["merges"] = merges[: len(merges) // 3]  # shorter pieces
    (tmp_path / "other/tokenizer.json").write_text(json.dumps(tokenizer))
    overrides = ["algorithm=distill", f"roles={{other: {{model: {tmp_path}/other}}}}", "reward.functions=[]"]
    overrides += ["options={teachers: {other: {tokenizer: teacher}}}", "kl.apply_to=none"]
    overrides += ["run.num_rollout=2", "run.save_every=0", "run.export=false"]
    overrides += ["rollout.max_turns=1", "rollout.max_new_tokens=16"]
    train(folder, tmp_path / "run", *overrides, host=host)
    rows = read_metrics(tmp_path / "run")
    assert len(rows) == 2 and all(row["actor/skipped"] == 0 and row["actor/grad_norm"] > 0 for row in rows)
    assert all(0.2 < row["distill/aligned_frac"] < 1 for row in rows)

    student, teacher = load_model(folder / "model"), load_model(tmp_path / "other")
    own, other = (AutoTokenizer.from_pretrained(path) for path in (folder / "model", tmp_path / "other"))
    compared = 0
    for record in read_records(tmp_path / "run", 1):
        first, turn = record.rollout.turns[:2]
        head, answer = first.token_ids.tolist(), turn.token_ids.tolist()
        text = own.decode(answer)
        limit = f"{text}\ufffd".index("\ufffd")  # a random policy also samples bytes that are no text
        taught = other.encode(text, add_special_tokens=False)
        scores = (
            score(student, head, answer),
            score(teacher, other.encode(own.decode(head), add_special_tokens=False), taught),
        )
        ends = [
            [len(tokenizer.decode(ids[: i + 1])) for i in range(len(ids))]
            for tokenizer, ids in ((own, answer), (other, taught))
        ]
        actual, begin = record.advantages[len(head) :][: len(answer)], 0
        for stop in sorted(end for end in {*ends[0]} & {*ends[1]} if end <= limit):
            places = [[i for i, place in enumerate(side) if begin < place <= stop] for side in ends]
            expected = float(scores[1][places[1]].sum() - scores[0][places[0]].sum())
            assert actual[places[0]].tolist() == pytest.approx([expected] * len(places[0]), abs=2e-3, rel=1e-3)
            begin, compared = stop, compared + 1
    assert compared > 10


def test_missing_teacher_fails_before_start(folder: Path, tmp_path: Path) -> None:
    done = run_cli(folder, tmp_path / "run", "algorithm=distill", "kl.apply_to=none")
    assert done.returncode == 2 and "roles.teacher.model is not set; it must name the HF folder" in done.stderr
    assert not (tmp_path / "run" / "logs").exists()
