"""Resolve Hugging Face Hub names of models to their folders in this machine's cache."""

from __future__ import annotations

import re
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_name(path: str) -> bool:
    """True if `path` looks like a Hub name, such as `Qwen/Qwen3-30B-A3B`, and does not exist locally."""
    return bool(_NAME.fullmatch(path)) and not Path(path).exists()


def folder_of(path: str) -> str:
    """Return the folder of a model in the Hub's cache (`HF_HOME`), or `path` itself if it is not there.

    Never downloads: every rank of a job would, and nodes may have no network.
    """
    if not is_name(path):
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return str(snapshot_download(path, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError, OSError):
        return path
