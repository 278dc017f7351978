"""`prepare_data`: conversion of GSM8K and evaluation sets."""

import contextlib
import importlib.util
import io
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pyarrow
import pyarrow.parquet
import pytest

from megarl.config.command_line import run_cli
from megarl.data.datasets import read_prompts
from megarl.rewards.by_source import by_source
from megarl.types import Rollout, Turn

pytestmark = pytest.mark.alone

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "prepare_data.py"
ROWS = [
    {"question": "1 + 1?", "answer": "1 + 1 = <<1+1=2>>2\n#### 2"},
    {"question": "1000 + 80?", "answer": "It is 1,080\n#### 1,080"},
]


spec = importlib.util.spec_from_file_location("prepare_data", SCRIPT)
prepare_data = importlib.util.module_from_spec(spec)
sys.modules["prepare_data"] = prepare_data
spec.loader.exec_module(prepare_data)


def run(source, target, name="gsm8k"):
    """Run the command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with mock.patch.object(sys, "argv", [str(SCRIPT), name, str(source), str(target)]):
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = run_cli(prepare_data.convert_all)
    return SimpleNamespace(returncode=status, stdout=out.getvalue(), stderr=err.getvalue())


def write(folder, **splits):
    folder.mkdir(exist_ok=True)
    for name, rows in splits.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_converts_jsonl(tmp_path):
    source = write(tmp_path / "in", train=ROWS, test=ROWS[:1])
    target = tmp_path / "a" / "out"
    process = run(source, target)
    assert process.returncode == 0, process.stderr
    assert process.stdout == f"{target}/train.parquet: 2 problems\n{target}/test.parquet: 1 problems\n"
    assert sorted(file.name for file in target.iterdir()) == ["test.parquet", "train.parquet"]
    assert pyarrow.parquet.read_table(target / "train.parquet").to_pylist()[1] == {
        "data_source": "openai/gsm8k",
        "prompt": [
            {
                "role": "user",
                "content": '1000 + 80? Let\'s think step by step and output the final answer after "####".',
            }
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1080"},
        "extra_info": {"split": "train", "index": 1, "answer": "It is 1,080\n#### 1,080", "question": "1000 + 80?"},
    }
    prompts = read_prompts(target / "train.parquet")
    assert [prompt.ground_truth for prompt in prompts] == ["2", "1080"]


def test_reads_parquet(tmp_path):
    source = write(tmp_path / "in", test=ROWS)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), source / "train-00000-of-00001.parquet")
    assert run(source, tmp_path / "out").returncode == 0
    assert len(read_prompts(tmp_path / "out" / "train.parquet")) == 2


@pytest.mark.parametrize(
    "train, message",
    [
        ('{"question": "a"\n', r"train.jsonl:1: not JSON"),
        ('{"question": "a"}\n', r"train.jsonl:1: no text 'answer'"),
        ("5\n", r"train.jsonl:1: a int, not an object"),
        ('{"question": "a", "answer": "b"}\n', r"train.jsonl:1: the answer does not end in '#### <result>'"),
        ("", r"train.jsonl holds no problems"),
    ],
)
def test_invalid_rows_leave_no_output(tmp_path, train, message):
    source = write(tmp_path / "in", test=ROWS)
    (source / "train.jsonl").write_text(train)
    process = run(source, tmp_path / "out")
    assert process.returncode == 2
    assert process.stderr.startswith("error: ") and message in process.stderr and process.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_rejects_missing_files_and_folders(tmp_path):
    process = run(tmp_path / "nowhere", tmp_path / "out")
    assert process.returncode == 2 and "no folder" in process.stderr
    process = run(write(tmp_path / "in", train=ROWS), tmp_path / "out")
    assert process.returncode == 2 and "must have one of test.jsonl, test.json" in process.stderr
    (tmp_path / "file").write_text("")
    process = run(write(tmp_path / "in", test=ROWS), tmp_path / "file")
    assert process.returncode == 2 and process.stderr.startswith("error: ")
    assert not (tmp_path / "out").exists()


MATH500 = {"problem": "Half of one?", "solution": "..", "answer": "\\frac{1}{2}", "subject": "Algebra", "level": 1}
AIME = {"id": 60, "problem": "2 + 3?", "answer": "005", "year": "2024", "url": "https://example.org"}
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": 'def double(x):\n    """Twice x."""\n',
    "entry_point": "double",
    "canonical_solution": "    return 2 * x\n",
    "test": "def check(candidate):\n    assert candidate(3) == 6\n",
}


@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize(
    "name, row, source, ground_truth, prompt_part",
    [
        ("math500", MATH500, "HuggingFaceH4/MATH-500", "\\frac{1}{2}", "\\boxed{}"),
        ("aime", AIME, "aime2024", "5", '"Answer: N"'),
        ("aime", {"ID": "2024-I-1", "Problem": "2 + 3?", "Answer": 5}, "aime", "5", '"Answer: N"'),
        ("humaneval", HUMANEVAL, "openai/openai_humaneval", None, "def double(x):"),
    ],
)
def test_converts_evaluation_sets(tmp_path, name, row, source, ground_truth, prompt_part, suffix):
    file = tmp_path / "in" / f"rows.{suffix}"
    file.parent.mkdir()
    if suffix == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), file)
    else:
        file.write_text(json.dumps(row if suffix == "jsonl" else [row]))
    process = run(file.parent if suffix == "json" else file, tmp_path / "out", name)
    assert process.returncode == 0, process.stderr
    assert process.stdout == f"{tmp_path}/out/test.parquet: 1 problems\n"
    [prompt] = read_prompts(tmp_path / "out/test.parquet")
    assert prompt.data_source == source and prompt_part in prompt.messages[0]["content"]
    assert ground_truth is None or prompt.ground_truth == ground_truth
    by_source.check(prompt)


@pytest.mark.parametrize(
    "name, row, correct, incorrect",
    [
        ("math500", MATH500, "It is \\boxed{0.5}", "It is \\boxed{2}"),
        ("aime", AIME, "So.\nAnswer: 5", "So.\nAnswer: 6"),
    ],
)
def test_reward_by_source_scores_converted_rows(tmp_path, name, row, correct, incorrect):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    assert run(tmp_path / "rows.jsonl", tmp_path / "out", name).returncode == 0
    [prompt] = read_prompts(tmp_path / "out/test.parquet")

    def rollout(text):
        messages = (*prompt.messages, {"role": "assistant", "content": text})
        return Rollout(prompt, (Turn(prompt.token_ids), Turn([1], [0.0], True, 0)), messages=messages)

    assert by_source(rollout(correct)) == 1.0 and by_source(rollout(incorrect)) <= 0.0


def test_names_a_later_row_without_ground_truth(tmp_path):
    rows = [MATH500, MATH500, {**MATH500, "answer": None}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    process = run(tmp_path / "rows.jsonl", tmp_path / "out", "math500")
    assert process.returncode == 2 and process.stderr.count("\n") == 1
    assert "rows.jsonl:3: no ground truth" in process.stderr and not (tmp_path / "out").exists()


@pytest.mark.skipif(not os.environ.get("MEGARL_GSM8K"), reason="MEGARL_GSM8K names no folder of the data set")
def test_converts_the_whole_of_gsm8k(tmp_path):
    process = run(os.environ["MEGARL_GSM8K"], tmp_path / "out")
    assert process.returncode == 0, process.stderr
    assert "train.parquet: 7473 problems" in process.stdout and "test.parquet: 1319 problems" in process.stdout
