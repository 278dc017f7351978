"""`bench.py trl`: stepping both sides, their ratio, equal prompts, and TRL's side without MegaRL."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import trl
from benchmarks.output import Report

pytestmark = pytest.mark.nightly

WORKER = """
import json, sys
for number, _ in enumerate(sys.stdin, 1):
    print("something else")
    sum(range(2_000_000))
    print("STEP " + json.dumps({"step": float(number)}), flush=True)
    if number == 2:
        sys.exit("no more")
"""


def test_side_steps_on_request(tmp_path: Path) -> None:
    side = trl.Side("one", [sys.executable, "-c", WORKER], 0, {}, tmp_path / "log")
    try:
        steps = [side.step(), side.step()]
        assert [step["step"] for step in steps] == [1.0, 2.0]
        assert all(0 < step["CPU seconds"] < 60 for step in steps)
        with pytest.raises(SystemExit, match="one has ended(?s:.*)no more"):
            side.step()
    finally:
        side.end()


def test_ratios_compare_consecutive_steps(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    megarl_rows = [{"generate": 1.0, "step": s, "CPU seconds": 2.0} for s in (1.0, 2.0, 10.0)]
    trl_rows = [{"step": s, "CPU seconds": 3.0} for s in (2.0, 6.0, 5.0)]
    report = Report("trl", argparse.Namespace(json=tmp_path / "result"))
    report.start(trl="1.16.0")
    trl.show("quickstart", {"MegaRL": megarl_rows, "TRL": trl_rows}, report)
    report.close()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["step", "2.000", "5.000"] in lines and ["generate", "1.000", "0.000"] in lines
    result = json.loads((tmp_path / "result").read_text())
    assert result["versions"]["trl"] == "1.16.0"
    megarl, _ = result["rows"]
    assert megarl["TRL's seconds over these"] == {"median": 2.0, "low": 0.5, "high": 3.0}
    assert megarl["TRL's CPU seconds over these"]["median"] == 1.5


def test_side_of_trl_needs_nothing_of_megarl() -> None:
    program = (
        "import sys; import benchmarks.trl_side; sys.exit(sum(m in sys.modules for m in ('megarl', 'rich', 'psutil')))"
    )
    subprocess.run([sys.executable, "-c", program], cwd=trl.TOOLS, check=True)


def test_both_sides_get_the_same_prompts(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    trl.make_work(tmp_path / "work", "quickstart")
    chats, texts = (
        [json.loads(line) for line in (tmp_path / "work" / name).read_text().splitlines()]
        for name in ("prompts.jsonl", "trl.jsonl")
    )
    assert len(chats) == len(texts) == 1024
    assert chats[0]["prompt"][0]["content"] in texts[0]["text"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "work/model")
    assert texts[0]["text"].endswith("<|im_start|>assistant\n")
    assert 15 < len(tokenizer(texts[0]["text"])["input_ids"]) < 30
