"""Checkpoints that clients have saved: `<root>/<model>/<kind>/<name>`, complete once `<name>.json` is beside it.

They outlive their clients and the server.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megarl.serve.tinker_wire import RequestRefused
from megarl.utils.text import write_atomically

BASE = "base"
"""Name of the model whose only checkpoint has the weights of `model.path`."""
TRAINING, SAMPLER = "weights", "sampler_weights"
KINDS = {TRAINING: "training", SAMPLER: "sampler"}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,199}")


@dataclass(frozen=True)
class SavedCheckpoint:
    """A complete checkpoint. time, expires: seconds since the epoch."""

    model_id: str
    kind: str
    name: str
    base_model: str
    lora_rank: int
    time: float
    expires: float | None = None
    user_metadata: dict[str, str] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return f"tinker://{self.model_id}/{self.kind}/{self.name}"

    def describe(self) -> dict[str, Any]:
        """Return the fields of Tinker's `Checkpoint`."""
        return {
            "checkpoint_id": f"{self.kind}/{self.name}",
            "checkpoint_type": KINDS[self.kind],
            "time": _iso(self.time),
            "tinker_path": self.path,
            "public": False,
            "user_metadata": self.user_metadata or None,
            "expires_at": None if self.expires is None else _iso(self.expires),
        }


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


class SavedWeights:
    """The checkpoints below a folder. Only rank 0 reads and lists them; all ranks know their folders' names."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.base_folder = root / BASE / SAMPLER / BASE

    def folder_of(self, model_id: str, kind: str, name: str) -> Path:
        """Return the folder of a checkpoint, which may not exist. Raises RequestRefused for a name that is none."""
        for part in (model_id, name):
            if not _NAME.fullmatch(part) or part.endswith((".json", ".tmp")):
                raise RequestRefused(f"{part[:80]!r} is no name: use up to 200 letters, digits and _ . : -")
        if kind not in KINDS:
            raise RequestRefused(f"{kind[:80]!r} is not one of {', '.join(KINDS)}")
        return self.root / model_id / kind / name

    def find(self, path: str, kind: str | None = None) -> tuple[SavedCheckpoint, Path]:
        """Return a checkpoint by its tinker:// path, and its folder. kind: the one that it must have.

        Raises RequestRefused, with status 404 if there is none.
        """
        parts = path.removeprefix("tinker://").split("/")
        if not path.startswith("tinker://") or len(parts) != 3:
            raise RequestRefused(f"{path[:200]!r} is not of the form tinker://model/{'|'.join(KINDS)}/name")
        if kind is not None and parts[1] != kind:
            raise RequestRefused(
                f"{path[:200]!r} is not a checkpoint of {KINDS[kind]}: it must be tinker://.../{kind}/..."
            )
        folder = self.folder_of(*parts)
        if (saved := self._read(folder)) is None:
            raise RequestRefused(f"there is no checkpoint {path[:200]}", 404)
        return saved, folder

    def record(self, saved: SavedCheckpoint, written: Path) -> None:
        """Make a checkpoint complete, in the place of an older one of this name. written: the folder with its files."""
        folder = self.folder_of(saved.model_id, saved.kind, saved.name)
        if written != folder:
            self.delete(folder)
            written.rename(folder)
        write_atomically(folder.with_name(f"{folder.name}.json"), json.dumps(asdict(saved)))

    def delete(self, folder: Path) -> None:
        folder.with_name(f"{folder.name}.json").unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)

    def list(self, model_id: str = "") -> list[SavedCheckpoint]:
        """Return the checkpoints of a model, or of all, newest first."""
        if model_id:
            self.folder_of(model_id, TRAINING, "x")
        files = self.root.glob(f"{model_id or '*'}/*/*.json")
        checkpoints = filter(None, (self._read(file.with_suffix("")) for file in files))
        return sorted(checkpoints, key=lambda saved: -saved.time)

    def delete_expired(self) -> None:
        for saved in self.list():
            if saved.expires is not None and saved.expires < time.time():
                self.delete(self.folder_of(saved.model_id, saved.kind, saved.name))

    def _read(self, folder: Path) -> SavedCheckpoint | None:
        """Return a checkpoint; None if there is none, or its record is damaged."""
        try:
            return SavedCheckpoint(**json.loads(folder.with_name(f"{folder.name}.json").read_text()))
        except (OSError, ValueError, TypeError):
            return None
