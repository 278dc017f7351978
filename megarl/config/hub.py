"""Models that are named as on the Hugging Face Hub: of those that this machine has a copy of, the folder."""

from __future__ import annotations

import re
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_name(path: str) -> bool:
    """Whether it may be the Hub's name of a model, as `Qwen/Qwen3-30B-A3B` is, and is nothing here."""
    return bool(_NAME.fullmatch(path)) and not Path(path).exists()


def folder_of(path: str) -> str:
    """The copy in the Hub's cache (`HF_HOME`) of a model that is named so; else what was given. Nothing is fetched: a
    job of many ranks would do it many times, and where there is no network."""
    if not is_name(path):
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return str(snapshot_download(path, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError, OSError):
        return path
