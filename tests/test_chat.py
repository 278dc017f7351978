"""`megarl.chat` rejects bad arguments before it starts an engine; `test_eval_end_to_end.py` uses a real one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from training_run import make_folder

from megarl import chat as program
from megarl.engine.sglang.sglang_engine import SGLangEngine

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with mock.patch.object(SGLangEngine, "start", lambda self: pytest.fail("it was started")):
        yield make_folder(tmp_path_factory.mktemp("quickstart") / "q", "qwen3_moe") / "model"


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--tools", "no.such:tool"), ("rollout.tools", "no.such")),
        (("--environment", "no.such:World"), ("rollout.environments", "no.such")),
        (("--tools", "a:b", "--environment", "a:B"), ("not allowed with",)),
        (("--row", "[1]"), ("--row", "JSON object")),
        (("--row", "{"), ("--row", "JSON object")),
        (("rollout.temprature=1",), ("rollout.temperature",)),
        (("data.train=x",), ("data.train", "you write the prompts")),
        (("run.dir=x",), ("run.dir", "nothing is saved")),
        (("parallel.world_size=2",), ("parallel.world_size=2", "one engine")),
    ],
)
def test_rejects_bad_arguments(
    model: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    assert program.main([str(model), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and all(word in error for word in words), error


def test_rejects_bad_targets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for target, message in ((tmp_path / "none", "no such folder"), (tmp_path, "is neither a model")):
        assert program.main([str(target)]) == 2
        assert message in capsys.readouterr().err
    assert program.main([]) == 2
    assert "arguments are required: TARGET;" in capsys.readouterr().err  # and no overrides
