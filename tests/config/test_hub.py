"""Models named by their Hub id resolve to the local cache, without network access."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub.constants
import pytest

from megarl.config import ConfigError, load_config
from megarl.config.paths import find_model_folder, is_hub_name
from megarl.dry_run.model_folders import folder_config

NAME = "someone/Tiny-1B"


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cached model folder in the layout of huggingface_hub."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    model = tmp_path / "hub" / "models--someone--Tiny-1B"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("c0ffee")
    folder = model / "snapshots" / "c0ffee"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_recognizes_hub_names() -> None:
    assert is_hub_name(NAME) and is_hub_name("Qwen/Qwen3-30B-A3B")
    assert not any(map(is_hub_name, ("", "/a/b", "a", "a/b/c", "./a/b", "../b", "tests/config", "a/.b", "~/a")))


def test_resolves_to_the_cached_copy(cached: Path, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"model: {{path: {NAME}}}\ncritic: {{path: {cached}}}\nreward: {{model: other/not-here}}\n")
    config = load_config(file)
    assert (config.model.path, config.critic.path) == (str(cached), str(cached))
    assert config.reward.model == "other/not-here"


def test_missing_model_names_the_download_command(cached: Path) -> None:
    assert find_model_folder("other/not-here") == "other/not-here"
    with pytest.raises(ConfigError, match="model.path=other/not-here: no such folder; .*hf download NAME"):
        folder_config("other/not-here", "model.path")
    with pytest.raises(ConfigError, match="/nowhere: no such folder; put the model there"):
        folder_config("/nowhere", "model.path")
