"""SFT in whole runs: a mixture of two data sets, held-out evaluation, resume, and the export in plain transformers."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = dict(os.environ, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
TRANSFORMERS_SCRIPT = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
assert not any(name.split(".")[0] == "megarl" for name in sys.modules)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
total, count, texts = 0.0, 0, []
conversations = json.loads(sys.argv[2])
for number, (question, answer) in enumerate(conversations):
    prompt = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    ids, response = (tokenizer.encode(text, add_special_tokens=False) for text in (prompt, answer + "<|im_end|>"))
    with torch.no_grad():
        logprobs = model(torch.tensor([ids + response])).logits[0, :-1].log_softmax(-1)
    chosen = logprobs[len(ids) - 1:].gather(1, torch.tensor(response)[:, None])
    total, count = total - float(chosen.sum()), count + len(response)
    if len(conversations) - number > 4:
        continue
    generated = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids):]
    texts.append(tokenizer.decode(generated, skip_special_tokens=True))
print(json.dumps({"nll": total / count, "texts": texts}))
"""


WORDS = {"sky": "blue", "grass": "green", "snow": "white", "coal": "black"}
"""Prompts and responses to memorize, in verl's SFT format."""


CONVERSATIONS = [
    [[{"role": "user", "content": f"What is {thing}?"}], f"It is {word}."] for thing, word in WORDS.items()
]


def score_in_transformers(folder: Path, conversations: list[list[Any]]) -> dict[str, Any]:
    """Return the mean NLL and generated texts of an export, from an isolated interpreter (-I) without MegaRL."""
    command = [sys.executable, "-I", "-W", "ignore", "-c", TRANSFORMERS_SCRIPT, str(folder), json.dumps(conversations)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model; training conversations as JSONL, one longer than 2,048 positions; prompts and responses, and held-out
    conversations, as parquet."""
    target = tmp_path_factory.mktemp("sft") / "q"
    sizes = ["--train", "1", "--held-out", "1", "--demonstrations", "100"]
    command = [sys.executable, "tools/make_quickstart.py", str(target), *sizes]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, env=ENVIRONMENT)
    rows = [json.loads(line) for line in (target / "sft.jsonl").read_text().splitlines()]
    short_conversations = [row["messages"] for row in rows if len(row["messages"]) == 2]
    long = [{"role": "user", "content": "1+" * 2100}, short_conversations[0][1]]
    (target / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"messages": long}]))
    eval_rows = [{"messages": conversation, "data_source": "sums"} for conversation in short_conversations[:20]]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(eval_rows), target / "e.parquet")
    word_rows = [{"prompt": f"What is {thing}?", "response": f"It is {word}."} for thing, word in WORDS.items()]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(word_rows), target / "words.parquet")
    return target


def train(folder: Path, run_dir: Path, *overrides: str) -> None:
    paths = [f"model.path={folder}/model", f"data.train=[{folder}/sft.jsonl,{folder}/words.parquet]"]
    paths += ["data.mixture_weights=[3,1]", f"data.eval=[{folder}/e.parquet,{folder}/words.parquet]"]
    steps = ["run.num_rollout=4", "run.eval_every=2", "run.save_every=2", "data.prompts_per_step=16"]
    defaults = dict(
        text.split("=", 1) for text in (*paths, *steps, f"run.dir={run_dir}", *overrides)
    )  # the last value of a key wins
    settings = [f"{key}={value}" for key, value in defaults.items()]
    command = [sys.executable, "-m", "megarl.train", "configs/quickstart_sft.yaml", *settings]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "nanobind" not in done.stdout + done.stderr  # leak warnings of libraries at exit


@pytest.fixture(scope="module")
def sft_run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "sft"
    train(folder, run_dir)
    return run_dir


def read_metric(run_dir: Path, name: str) -> dict[int, float]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row[name] for row in rows if name in row}


def test_training_lowers_the_held_out_loss(sft_run: Path) -> None:
    assert list(read_metric(sft_run, "actor/nll")) == [1, 2, 3, 4]
    eval_nll = read_metric(sft_run, "eval/nll")
    assert list(eval_nll) == [0, 2, 4] and eval_nll[0] > eval_nll[2] > eval_nll[4] > 0
    for source in ("sums", "words"):
        source_nll = read_metric(sft_run, f"eval/nll/{source}")
        assert list(source_nll) == [0, 2, 4] and source_nll[0] > source_nll[2] > source_nll[4] > 0
    # A step takes 12 of 100 rows and 4 of 4: each data set counts its own epochs.
    assert read_metric(sft_run, "data/epoch/sft") == {step: pytest.approx(0.12 * step) for step in (1, 2, 3, 4)}
    assert read_metric(sft_run, "data/epoch/words") == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}
    log = (sft_run / "log.txt").read_text()
    assert re.findall(r"held out, after step (\d): nll (\d\.\d+)", log) == [
        (str(step), f"{value:.3f}") for step, value in eval_nll.items()
    ]
    assert "1 of 101 conversations are longer than the model's 2048 positions and are excluded" in log


def test_transformers_agrees_with_the_held_out_loss(sft_run: Path, folder: Path) -> None:
    """The export has the NLL that the run reported for the held-out conversations."""
    rows = pyarrow.parquet.read_table(folder / "e.parquet").to_pylist()
    conversations = [[row["messages"][:1], row["messages"][1]["content"]] for row in rows]
    result = score_in_transformers(sft_run / "export", conversations)
    assert result["nll"] == pytest.approx(read_metric(sft_run, "eval/nll/sums")[4], abs=1e-4)
    assert len(result["texts"]) == 4
    expected_nll = score_in_transformers(sft_run / "export", CONVERSATIONS)
    assert expected_nll["nll"] == pytest.approx(read_metric(sft_run, "eval/nll/words")[4], abs=1e-4)


def test_resume_is_bitwise_equal_to_the_uninterrupted_run(sft_run: Path, folder: Path, tmp_path: Path) -> None:
    resumed = tmp_path / "resumed"
    shutil.copytree(sft_run / "checkpoints/step_000002", resumed / "checkpoints/step_000002")
    shutil.copy(sft_run / "config.yaml", resumed / "config.yaml")
    train(folder, resumed, "run.resume=auto")
    first, second = (load_file(run_dir / "export" / "model.safetensors") for run_dir in (sft_run, resumed))
    assert all(torch.equal(first[name], second[name]) for name in first)
    for name in ("actor/nll", "eval/nll", "eval/nll/words", "data/epoch/sft"):
        full, after = read_metric(sft_run, name), read_metric(resumed, name)
        assert after == {step: value for step, value in full.items() if step in after} and 4 in after


@pytest.mark.nightly
def test_export_generates_memorized_answers(sft_run: Path, folder: Path, tmp_path: Path) -> None:
    """Tiny micro-batches do not change the NLL of the initial model."""
    words_file = f"{folder}/words.parquet"
    data = [f"data.train={words_file}", "data.mixture_weights=[]", f"data.eval={words_file}", "data.prompts_per_step=4"]
    steps = ["run.num_rollout=60", "run.eval_every=60", "run.save_every=0", "train.max_tokens_per_gpu=64"]
    train(folder, tmp_path / "run", *data, *steps, "actor_optimizer.lr=0.005", "actor_optimizer.schedule=constant")
    eval_nll = read_metric(tmp_path / "run", "eval/nll")
    assert eval_nll[0] == pytest.approx(read_metric(sft_run, "eval/nll/words")[0], abs=1e-5)
    assert eval_nll[60] < 0.05 and read_metric(tmp_path / "run", "data/epoch")[60] == 60.0
    assert not read_metric(tmp_path / "run", "eval/nll/words")  # the only source
    result = score_in_transformers(tmp_path / "run" / "export", CONVERSATIONS)
    assert result["texts"] == [answer for _, answer in CONVERSATIONS]
    assert result["nll"] == pytest.approx(eval_nll[60], abs=1e-4)
