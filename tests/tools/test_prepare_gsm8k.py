import json
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from megarl.data.prompts import read_prompts

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "prepare_gsm8k.py"
ROWS = [
    {"question": "1 + 1?", "answer": "1 + 1 = <<1+1=2>>2\n#### 2"},
    {"question": "1000 + 80?", "answer": "It is 1,080\n#### 1,080"},
]


def run(source, target):
    return subprocess.run([sys.executable, str(SCRIPT), str(source), str(target)], capture_output=True, text=True)


def write(folder, **splits):
    folder.mkdir(exist_ok=True)
    for name, rows in splits.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_jsonl(tmp_path):
    source = write(tmp_path / "in", train=ROWS, test=ROWS[:1])
    target = tmp_path / "a" / "out"
    done = run(source, target)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{target}/train.parquet: 2 problems\n{target}/test.parquet: 1 problems\n"
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


def test_parquet(tmp_path):
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
def test_bad_rows_leave_nothing(tmp_path, train, message):
    source = write(tmp_path / "in", test=ROWS)
    (source / "train.jsonl").write_text(train)
    done = run(source, tmp_path / "out")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and message in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_missing_files_and_folders(tmp_path):
    done = run(tmp_path / "nowhere", tmp_path / "out")
    assert done.returncode == 2 and "there is no folder" in done.stderr
    done = run(write(tmp_path / "in", train=ROWS), tmp_path / "out")
    assert done.returncode == 2 and "must have one of test.jsonl, test.parquet" in done.stderr
    (tmp_path / "file").write_text("")
    done = run(write(tmp_path / "in", test=ROWS), tmp_path / "file")
    assert done.returncode == 2 and done.stderr.startswith("error: ")
    assert not (tmp_path / "out").exists()
