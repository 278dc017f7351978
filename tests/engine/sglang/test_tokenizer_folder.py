"""The tokenizer folder that an engine loads."""

from __future__ import annotations

from pathlib import Path

from megarl.engine.sglang.sglang_engine import tokenizer_folder


def test_writes_a_missing_tokenizer_config_into_the_run_folder(tmp_path: Path) -> None:
    model, engine_folder = tmp_path / "model", tmp_path / "logs" / "engine_0"
    model.mkdir()
    for name in ("config.json", "tokenizer.model", "model.safetensors"):
        (model / name).write_text(name)
    for _ in range(2):  # an engine may restart
        assert tokenizer_folder(str(model), engine_folder) == str(engine_folder)
        assert {path.name for path in engine_folder.iterdir()} == {
            "config.json",
            "tokenizer.model",
            "tokenizer_config.json",
        }
        assert (engine_folder / "tokenizer.model").read_text() == "tokenizer.model"
        assert (engine_folder / "tokenizer_config.json").read_text() == "{}\n"
    assert not (model / "tokenizer_config.json").exists()
    (model / "tokenizer_config.json").write_text("{}")
    assert tokenizer_folder(str(model), engine_folder) == str(model)
