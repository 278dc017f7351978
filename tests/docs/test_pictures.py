"""The README's pictures are those that today's code draws."""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools"))

import readme_pictures  # noqa: E402

FOLDER = ROOT / "docs/images"
REDRAW = "run tools/readme_pictures.py on a run of the quickstart, and look at the pictures"


@pytest.mark.parametrize("picture", readme_pictures.SOURCES)
def test_picture_is_not_older_than_its_code(picture: str) -> None:
    hashes = json.loads((FOLDER / "sources.json").read_text())
    assert hashes[picture] == readme_pictures.hash_sources(picture), f"{picture} is older than its code: {REDRAW}"


def test_readme_shows_all_pictures() -> None:
    shown = set(re.findall(r"docs/images/([\w.]+)", (ROOT / "README.md").read_text()))
    assert shown == readme_pictures.SOURCES.keys() == {file.name for file in FOLDER.iterdir()} - {"sources.json"}


def test_architecture_is_what_the_tool_draws() -> None:
    text = (FOLDER / "architecture.svg").read_text()
    assert text == readme_pictures.draw_architecture()
    namespace = {"svg": "http://www.w3.org/2000/svg"}
    boxes = ET.fromstring(text).findall("svg:rect", namespace)
    _, _, width, height = map(float, ET.fromstring(text).attrib["viewBox"].split())
    assert len(boxes) == 10
    for box in boxes:
        x, y, w, h = (float(box.attrib[name]) for name in ("x", "y", "width", "height"))
        assert 0 <= x and x + w <= width and 0 <= y and y + h <= height


def test_a_change_of_the_code_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    monkeypatch.setattr(readme_pictures, "ROOT", tmp_path)
    (tmp_path / "tools/readme_pictures.py").write_text("1")
    first = readme_pictures.hash_sources("architecture.svg")
    (tmp_path / "tools/readme_pictures.py").write_text("2")
    assert readme_pictures.hash_sources("architecture.svg") != first
