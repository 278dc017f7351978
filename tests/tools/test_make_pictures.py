"""The task of counting squares: its pictures, and what it refuses."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import make_pictures  # noqa: E402


def test_pictures_show_as_many_squares_as_the_ground_truth(tmp_path: Path) -> None:
    make_pictures.write_data(tmp_path, seed=3, train=12, held_out=4)
    texts = [(tmp_path / f"{name}.jsonl").read_text() for name in ("train", "eval")]
    rows = [json.loads(line) for text in texts for line in text.splitlines()]
    assert len(rows) == 16 and len({row["images"][0]["bytes"] for row in rows}) == 16
    for row in rows:
        pixels = np.asarray(PIL.Image.open(io.BytesIO(base64.b64decode(row["images"][0]["bytes"]))))
        centres = pixels[
            make_pictures.FIELD // 2 :: make_pictures.FIELD, make_pictures.FIELD // 2 :: make_pictures.FIELD
        ]
        assert str(int((centres < 255).all(-1).sum())) == row["ground_truth"]
    (again := tmp_path / "again").mkdir()
    make_pictures.write_data(again, seed=3, train=12, held_out=4)
    assert [(again / f"{name}.jsonl").read_text() for name in ("train", "eval")] == texts


def test_does_not_overwrite(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = subprocess.run(
        [sys.executable, "tools/make_pictures.py", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "is not empty; name another folder" in done.stderr
