"""SFT as a user starts it: two ranks, evaluation on held-out conversations, resumed, and its export in plain
`transformers`, by an interpreter that knows nothing of MegaRL."""

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
FIRST_USE = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
assert not any(name.split(".")[0] == "megarl" for name in sys.modules)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
total, count = 0.0, 0
for question, answer in json.loads(sys.argv[2]):
    prompt = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    ids, written = (tokenizer.encode(text, add_special_tokens=False) for text in (prompt, answer + "<|im_end|>"))
    with torch.no_grad():
        logprobs = model(torch.tensor([ids + written])).logits[0, :-1].log_softmax(-1)
    own = logprobs[len(ids) - 1:].gather(1, torch.tensor(written)[:, None])
    total, count = total - float(own.sum()), count + len(written)
text = tokenizer.decode(model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0, len(ids):])
print(json.dumps({"nll": total / count, "text": text}))
"""


def first_use(folder: Path, conversations: list[list[Any]]) -> dict[str, Any]:
    """-I: neither this tree nor anything of the user's is on the path, as in a shell elsewhere."""
    command = [sys.executable, "-I", "-W", "ignore", "-c", FIRST_USE, str(folder), json.dumps(conversations)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, conversations of which one is longer than its 2,048 positions, and held-out ones as parquet."""
    target = tmp_path_factory.mktemp("sft") / "q"
    sizes = ["--train", "1", "--held-out", "1", "--demonstrations", "100"]
    command = [sys.executable, "tools/make_quickstart.py", str(target), *sizes]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, env=ENVIRONMENT)
    rows = [json.loads(line) for line in (target / "sft.jsonl").read_text().splitlines()]
    guesses = [row["messages"] for row in rows if len(row["messages"]) == 2]
    long = [{"role": "user", "content": "1+" * 2100}, guesses[0][1]]
    (target / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"messages": long}]))
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{"messages": talk} for talk in guesses[:20]]), target / "e.parquet"
    )
    return target


def train(folder: Path, run_dir: Path, *overrides: str) -> None:
    paths = [f"model.path={folder}/model", f"data.train={folder}/sft.jsonl", f"data.eval={folder}/e.parquet"]
    steps = ["run.num_rollout=4", "run.eval_every=2", "run.save_every=2", "data.prompts_per_step=16"]
    command = [
        sys.executable,
        "-m",
        "megarl.train",
        "configs/quickstart_sft.yaml",
        *paths,
        *steps,
        f"run.dir={run_dir}",
    ]
    done = subprocess.run(
        [*command, *overrides], cwd=ROOT, capture_output=True, text=True, timeout=300, env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.fixture(scope="module")
def sft_run(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("runs") / "sft"
    train(folder, run_dir)
    return run_dir


def metrics_of(run_dir: Path, name: str) -> dict[int, float]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row[name] for row in rows if name in row}


def test_it_learns_and_says_so(sft_run: Path) -> None:
    assert list(metrics_of(sft_run, "actor/nll")) == [1, 2, 3, 4]
    held_out = metrics_of(sft_run, "eval/nll")
    assert list(held_out) == [0, 2, 4] and held_out[0] > held_out[2] > held_out[4] > 0
    log = (sft_run / "log.txt").read_text()
    assert re.findall(r"held out, after step (\d): nll (\d\.\d+)", log) == [
        (str(step), f"{value:.3f}") for step, value in held_out.items()
    ]
    assert "1 of 101 conversations are longer than the model's 2048 positions: left out" in log


def test_plain_transformers_loads_the_export_and_generates(sft_run: Path, folder: Path) -> None:
    """And says of the held-out conversations what the run said of them."""
    talks = pyarrow.parquet.read_table(folder / "e.parquet").to_pylist()
    conversations = [[row["messages"][:1], row["messages"][1]["content"]] for row in talks]
    found = first_use(sft_run / "export", conversations)
    assert found["nll"] == pytest.approx(metrics_of(sft_run, "eval/nll")[4], abs=1e-4)
    assert found["text"]


def test_resume_equals_the_uninterrupted_run_bit_for_bit(sft_run: Path, folder: Path, tmp_path: Path) -> None:
    resumed = tmp_path / "resumed"
    shutil.copytree(sft_run / "checkpoints/step_000002", resumed / "checkpoints/step_000002")
    shutil.copy(sft_run / "config.yaml", resumed / "config.yaml")
    train(folder, resumed, "run.resume=auto")
    first, second = (load_file(run_dir / "export" / "model.safetensors") for run_dir in (sft_run, resumed))
    assert all(torch.equal(first[name], second[name]) for name in first)
    for name in ("actor/nll", "eval/nll"):
        whole, after = metrics_of(sft_run, name), metrics_of(resumed, name)
        assert after == {step: value for step, value in whole.items() if step in after} and 4 in after
