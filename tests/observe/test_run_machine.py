"""machine.jsonl: what a run ran with, one line for each start."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from pathlib import Path

import pytest

from megarl.checkpoint.provenance import code_revision
from megarl.config import from_dict
from megarl.observe import run_machine
from megarl.observe.run_folder import claim_and_begin

pytestmark = pytest.mark.alone


def test_each_start_adds_a_line(tmp_path: Path) -> None:
    config = from_dict({"run": {"dir": str(tmp_path), "save_every": 1, "resume": "auto"}})
    claim_and_begin(tmp_path, config, resume=False).release()
    folder = claim_and_begin(tmp_path, config, resume=True)
    folder.begin(7)
    folder.release()
    records = run_machine.read(tmp_path)
    assert [record["step"] for record in records] == [0, 0, 7]
    for record in records:
        assert record["code"] == code_revision() and record["cores"] == len(os.sched_getaffinity(0))
        assert record["versions"]["python"] == platform.python_version()
        assert record["versions"]["torch"] == importlib.metadata.version("torch")
        assert record["cpu"] and isinstance(record["gpus"], list)


def test_reads_what_there_is(tmp_path: Path) -> None:
    assert run_machine.read(tmp_path) == []
    (tmp_path / run_machine.FILE_NAME).write_text('{"step": 0}\n[1]\n{"step": 4, "ti')
    assert run_machine.read(tmp_path) == [{"step": 0}]


def test_no_name_of_user_or_host_is_recorded(tmp_path: Path) -> None:
    """`megarl push` publishes it."""
    run_machine.record(tmp_path, 0)
    text = (tmp_path / run_machine.FILE_NAME).read_text()
    assert set(json.loads(text)) == {"step", "time", "code", "versions", "gpus", "cpu", "cores"}
    assert platform.node() not in text and str(Path.home()) not in text


def test_lists_only_installed_packages() -> None:
    versions = run_machine.list_versions(["torch", "no-such-package"])
    assert set(versions) == {"megarl", "python", "torch"}
