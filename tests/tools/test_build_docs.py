"""`build_docs`: the environment of the site is made once, and a failure of pip is one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megarl.config import ConfigError

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import build_docs  # noqa: E402

pytestmark = pytest.mark.alone


def test_installs_nothing_if_the_list_is_unchanged(tmp_path: Path) -> None:
    (tmp_path / "requirements-docs.txt").write_bytes(build_docs.REQUIREMENTS.read_bytes())
    build_docs.install(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["requirements-docs.txt"]


@pytest.mark.slow
def test_reports_a_failure_of_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match=r"pip could not install launch/requirements-docs\.txt"):
        build_docs.install(tmp_path / "environment")
    assert not (tmp_path / "environment/requirements-docs.txt").exists()


def test_every_package_is_pinned() -> None:
    lines = [line for line in build_docs.REQUIREMENTS.read_text().splitlines() if not line.startswith("#")]
    assert len(lines) > 10 and all("==" in line for line in lines)
