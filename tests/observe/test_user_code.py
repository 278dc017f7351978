"""User code: copied into the run folder, with changes recorded on resume."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megarl.config import Config, ConfigError, from_dict
from megarl.observe import user_code
from megarl.observe.run_folder import claim, claim_and_begin

pytestmark = pytest.mark.alone


def read_sources(folder: Path) -> dict[str, str]:
    return {str(file.relative_to(folder)): file.read_text() for file in sorted(folder.rglob("*.py"))}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Reward and tool modules, which import others, in a separate folder."""
    source_dir = tmp_path / "source"
    (source_dir / "lab/deep").mkdir(parents=True)
    sources = {
        "right_reward.py": "import json\nimport numpy\nfrom lab import words\nfrom shared_by_both import LIMIT\n",
        "count_tool.py": "def run():\n    import shared_by_both\n",
        "shared_by_both.py": "LIMIT = 1\n",
        "not_imported.py": "raise SystemExit('nobody imports this')\n",
        "lab/__init__.py": "raise SystemExit('nothing is imported to find out')\n",
        "lab/words.py": "from .deep import numbers\nfrom . import letters\n",
        "lab/letters.py": "",
        "lab/sign.py": "from megarl.controllers.grpo import GRPOController\n",
        "lab/deep/numbers.py": "this is no Python\n",
    }
    for name, text in sources.items():
        (source_dir / name).write_text(text)
    monkeypatch.syspath_prepend(str(source_dir))
    functions = ["right_reward:right", "lab.sign:signed", "megarl.rewards.gsm8k:gsm8k", "no_such_module:x"]
    tree = {
        "reward": {"functions": functions},
        "rollout": {"tools": ["count_tool:run", "mcp:servers.json", "program:python agent.py"]},
    }
    return from_dict(tree)


def test_copies_named_modules_and_their_imports(config: Config, tmp_path: Path) -> None:
    run = tmp_path / "run"
    claim_and_begin(run, config, resume=False).release()
    copied = read_sources(run / "code")
    expected = {f"lab/{name}.py" for name in ("__init__", "words", "letters", "sign", "deep/numbers")}
    assert expected | {"right_reward.py", "count_tool.py", "shared_by_both.py"} <= set(copied)
    assert "not_imported.py" not in copied and not [name for name in copied if "megarl" in name or "numpy" in name]
    assert copied["shared_by_both.py"] == "LIMIT = 1\n" and "lab" not in sys.modules
    assert not (run / "code/changes.jsonl").exists()


def test_resume_reports_changes_and_keeps_the_old_code(config: Config, tmp_path: Path) -> None:
    run, source_dir = tmp_path / "run", tmp_path / "source"
    claim_and_begin(run, config, resume=False).release()
    (run / "metrics.jsonl").write_text('{"step": 20}\n')
    (run / "checkpoints").mkdir()

    def resume(step: int) -> list[str]:
        folder = claim(run, config, resume=True)
        changes = [str(change) for change in folder.begin(step)]
        folder.release()
        return changes

    assert resume(20) == []
    (source_dir / "shared_by_both.py").write_text("LIMIT = 2\n")
    (source_dir / "lab/words.py").write_text("from .deep import numbers\n")
    changes = resume(20)
    assert [change.partition(": ")[0] for change in changes] == [
        "code/lab/letters.py",
        "code/lab/words.py",
        "code/shared_by_both.py",
    ]
    assert changes[0].endswith("-> None")
    assert (run / "code/until_step_000020/shared_by_both.py").read_text() == "LIMIT = 1\n"
    assert (run / "code/shared_by_both.py").read_text() == "LIMIT = 2\n"
    lines = [json.loads(line) for line in (run / "code/changes.jsonl").read_text().splitlines()]
    assert [(line["step"], line["file"]) for line in lines][2] == (21, "shared_by_both.py")
    assert resume(30) == []
    (source_dir / "shared_by_both.py").write_text("LIMIT = 1\n")
    assert len(resume(30)) == 1 and (run / "code/until_step_000030/shared_by_both.py").read_text() == "LIMIT = 2\n"
    # A second start at the same step keeps the code of the steps before it.
    (source_dir / "shared_by_both.py").write_text("LIMIT = 3\n")
    assert len(resume(30)) == 1 and (run / "code/until_step_000030/shared_by_both.py").read_text() == "LIMIT = 2\n"
    # A start that was killed, or a full disk.
    (run / "code/files.json").write_text("")
    assert resume(30) == [] and resume(30) == []
    assert (run / "code/until_step_000030/shared_by_both.py").read_text() == "LIMIT = 2\n"


def test_foreign_code_folder_is_left_alone(config: Config, tmp_path: Path) -> None:
    user_file = tmp_path / "run/code/mine.py"
    user_file.parent.mkdir(parents=True)
    user_file.write_text("x = 1\n")
    with pytest.raises(ConfigError, match="has a code that no run wrote"):
        claim_and_begin(tmp_path / "run", config, resume=False)
    assert user_file.read_text() == "x = 1\n"


def test_main_script_is_part_of_the_user_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "hello.py"
    script.write_text("import beside_it\n")
    (tmp_path / "beside_it.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    assert set(user_code.find(Config())) == {"hello.py", "beside_it.py"}
