"""lm-eval and inspect, unmodified, on an engine with a tiny model; log-likelihoods are those of plain transformers.

They are in an environment of their own, whose interpreter MEGARL_EVALUATORS names, as in .ci/run.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from training_run import ENVIRONMENT, ROOT, make_folder
from transformers import AutoModelForCausalLM, AutoTokenizer

from megarl.observe.tracker import read_metrics

PYTHON = os.environ.get("MEGARL_EVALUATORS", "")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not PYTHON, reason="MEGARL_EVALUATORS does not name an environment with lm-eval and inspect"),
]

SUMS = [(1, 2), (3, 4), (5, 6), (10, 12), (7, 7), (20, 4)]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: {kind}
doc_to_text: "What is {{{{question}}}}?"
metric_list: [{{metric: {metric}, aggregation: mean, higher_is_better: true}}]
"""
GENERATE = 'doc_to_target: "{{answer}}"\ngeneration_kwargs: {until: ["?"], max_gen_toks: 8, do_sample: false}\n'
CHOOSE = 'doc_to_target: 0\ndoc_to_choice: "{{[answer, wrong]}}"\ntarget_delimiter: " "\n'
INSPECT_TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

@task
def sums():
    samples = [Sample(input=f"What is {a}+{b}?", target=str(a + b)) for a, b in SUMS]
    return Task(samples, solver=generate(), scorer=includes())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("quickstart") / "q", "qwen3_moe")


def evaluate(folder: Path, out: Path, *arguments: str) -> None:
    """Run megarl eval with the evaluators' environment in PATH."""
    environment = ENVIRONMENT | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    environment["PATH"] = f"{Path(PYTHON).parent}:{environment['PATH']}"
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "megarl.eval",
        str(folder / "model"),
        "--out",
        str(out),
        *arguments,
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def log_likelihood(model: torch.nn.Module, ids: list[int], start: int) -> float:
    """Return the log-likelihood of the tokens from `start` on."""
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)
    return sum(logprobs[index - 1, ids[index]].item() for index in range(start, len(ids)))


def test_lm_eval(folder: Path, tmp_path: Path) -> None:
    rows = [{"question": f"{a}+{b}", "answer": str(a + b), "wrong": str(a + b + 1)} for a, b in SUMS]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, kind, metric, rest in (
        ("sums_generate", "generate_until", "exact_match", GENERATE),
        ("sums_choose", "multiple_choice", "acc", CHOOSE),
    ):
        text = TASK.format(name=name, kind=kind, metric=metric, file=tmp_path / "sums.jsonl") + rest
        (tmp_path / f"{name}.yaml").write_text(text)
    out = tmp_path / "out"
    evaluate(
        folder,
        out,
        "--lm-eval",
        "sums_generate,sums_choose",
        "model.dtype=float32",
        "--",
        "--include_path",
        str(tmp_path),
    )

    metrics = read_metrics(out)[0]
    assert 0 <= metrics["eval/lm_eval/sums_generate/exact_match"] <= 1
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    (file,) = (out / "lm_eval").rglob("samples_sums_choose_*.jsonl")
    compared, right = 0, 0
    for sample in map(json.loads, file.read_text().splitlines()):
        expected = []
        for number, (result, _) in enumerate(sample["filtered_resps"]):
            pair = sample["arguments"][f"gen_args_{number}"]
            context = tokenizer.encode(pair["arg_0"], add_special_tokens=False)
            ids = tokenizer.encode(pair["arg_0"] + pair["arg_1"], add_special_tokens=False)
            assert ids[: len(context)] == context and len(ids) > len(context)
            expected.append(log_likelihood(model, ids, len(context)))
            assert math.isclose(float(result), expected[-1], abs_tol=1e-4)
            compared += 1
        right += expected[0] > expected[1]
    assert compared == 2 * len(SUMS)
    assert metrics["eval/lm_eval/sums_choose/acc"] == pytest.approx(right / len(SUMS))
    (file,) = (out / "lm_eval").rglob("samples_sums_generate_*.jsonl")
    answers = [json.loads(line)["filtered_resps"][0] for line in file.read_text().splitlines()]
    assert len(answers) == len(SUMS) and any(answers)


def test_inspect(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "sums.py").write_text(f"SUMS = {SUMS}\n{INSPECT_TASK}")
    out = tmp_path / "out"
    evaluate(
        folder, out, "--inspect", str(tmp_path / "sums.py"), "rollout.max_new_tokens=12", "--", "--temperature", "0"
    )
    metrics = read_metrics(out)[0]
    (file,) = (out / "inspect").glob("*.json")
    samples = json.loads(file.read_text())["samples"]
    assert len(samples) == len(SUMS) and all(sample["output"]["usage"]["output_tokens"] > 0 for sample in samples)
    right = sum(sample["scores"]["includes"]["value"] == "C" for sample in samples)
    assert metrics["eval/inspect/sums/includes_accuracy"] == pytest.approx(right / len(SUMS))
