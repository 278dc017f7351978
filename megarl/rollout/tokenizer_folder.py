"""The folder that SGLang reads a tokenizer from."""

from __future__ import annotations

import contextlib
from pathlib import Path

_CONFIG = "tokenizer_config.json"


def tokenizer_folder(model: str, beside: Path) -> str:
    """The model's own. Where that has no tokenizer_config.json, as with a tokenizer.model alone, SGLang 0.5.23 asks the
    Hub for one and does not start: then a folder `beside`, of links to the model's small files and an empty one."""
    if Path(model, _CONFIG).is_file() or not Path(model).is_dir():
        return model
    beside.mkdir(parents=True, exist_ok=True)
    for file in Path(model).iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            with contextlib.suppress(FileExistsError):
                (beside / file.name).symlink_to(file.resolve())
    (beside / _CONFIG).write_text("{}\n")
    return str(beside.resolve())
