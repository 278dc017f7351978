"""The tokenizer folder that an engine loads."""

from __future__ import annotations

from pathlib import Path

from megarl.engine.sglang_engine import tokenizer_folder


def test_writes_a_missing_tokenizer_config_into_the_run_folder(tmp_path: Path) -> None:
    model, beside = tmp_path / "model", tmp_path / "logs" / "engine_0"
    model.mkdir()
    for name in ("config.json", "tokenizer.model", "model.safetensors"):
        (model / name).write_text(name)
    for _ in range(2):  # an engine may restart
        assert tokenizer_folder(str(model), beside) == str(beside)
        assert {path.name for path in beside.iterdir()} == {"config.json", "tokenizer.model", "tokenizer_config.json"}
        assert (beside / "tokenizer.model").read_text() == "tokenizer.model"
        assert (beside / "tokenizer_config.json").read_text() == "{}\n"
    assert not (model / "tokenizer_config.json").exists()
    (model / "tokenizer_config.json").write_text("{}")
    assert tokenizer_folder(str(model), beside) == str(model)
