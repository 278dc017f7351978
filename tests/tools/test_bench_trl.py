"""`bench_trl`: stepping both sides, their ratio, and equal prompts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import bench_trl  # noqa: E402

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
    side = bench_trl.Side("one", [sys.executable, "-c", WORKER], 0, {}, tmp_path / "log")
    try:
        steps = [side.step(), side.step()]
        assert [step["step"] for step in steps] == [1.0, 2.0]
        assert all(0 < step["CPU seconds"] < 60 for step in steps)
        with pytest.raises(SystemExit, match="one has ended(?s:.*)no more"):
            side.step()
    finally:
        side.end()


def test_ratios_compare_consecutive_steps(capsys: pytest.CaptureFixture[str]) -> None:
    megarl_rows = [{"generate": 1.0, "step": s, "CPU seconds": 2.0} for s in (1.0, 2.0, 10.0)]
    trl_rows = [{"step": s, "CPU seconds": 3.0} for s in (2.0, 6.0, 5.0)]
    bench_trl.show("quickstart", {"MegaRL": megarl_rows, "TRL": trl_rows})
    lines = capsys.readouterr().out.splitlines()
    assert ["step", "2.000", "5.000"] in [line.split() for line in lines]
    assert ["generate", "1.000", "0.000"] in [line.split() for line in lines]
    assert lines[-2] == "2.00 times as fast (quarters 0.50 to 3.00)"
    assert lines[-1].startswith("1.50 of TRL's CPU seconds")


def test_both_sides_get_the_same_prompts(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    bench_trl.make_work(tmp_path / "work", "quickstart")
    chats, texts = (
        [json.loads(line) for line in (tmp_path / "work" / name).read_text().splitlines()]
        for name in ("prompts.jsonl", "trl.jsonl")
    )
    assert len(chats) == len(texts) == 1024
    assert chats[0]["prompt"][0]["content"] in texts[0]["text"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "work/model")
    assert texts[0]["text"].endswith("<|im_start|>assistant\n")
    assert 15 < len(tokenizer(texts[0]["text"])["input_ids"]) < 30
