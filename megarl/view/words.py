"""Token ids as words, by the tokenizer of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

Decode = Callable[[list[int]], str]
LOST = "\ufffd"
"""What a decoder makes of bytes that are no UTF-8."""
LONGEST_CHARACTER = 4
"""Tokens that one character may be spread over, a byte each."""


def find_tokenizer(run_dir: Path) -> Decode:
    """Ids to text by the tokenizer of the run's model, or by that of its export; where neither is here, the ids."""
    return tokenizer_of(run_dir) or (lambda ids: " ".join(map(str, ids)))


def tokenizer_folders(run_dir: Path) -> list[Path]:
    """Where a tokenizer lies that may be the run's: its model's, also as seen from where the run was started, and that
    of its export."""
    folders = []
    try:
        tree = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
        model = Path(tree["model"]["path"])
        folders.append(model)
        here, own = run_dir.resolve(), Path(tree["run"]["dir"])
        if here.parts[-len(own.parts) :] == own.parts:
            folders.append(Path(*here.parts[: -len(own.parts)], model))
    except (OSError, ValueError, LookupError, TypeError, RecursionError, yaml.YAMLError):
        pass
    return [folder for folder in (*folders, run_dir / "export") if (folder / "tokenizer_config.json").is_file()]


def tokenizer_of(run_dir: Path) -> Decode | None:
    """The same, or None."""
    for folder in tokenizer_folders(run_dir):
        from transformers import AutoTokenizer  # seconds, for a run that has texts only

        try:
            decode: Decode = AutoTokenizer.from_pretrained(folder, local_files_only=True).decode
            return decode
        except Exception:  # whatever the readers of a broken file raise
            continue
    return None


class Words:
    """Each token by itself, as a page shows it. decode: None where no tokenizer is known; then a token is its id."""

    def __init__(self, decode: Decode | None) -> None:
        self._decode = decode
        self._known: dict[int, str] = {}

    def of(self, ids: Sequence[int]) -> list[str]:
        """[tokens]. A character that several tokens share is with the last of them, and the others are empty; bytes
        that are no UTF-8 are U+FFFD each."""
        found = [self._word(int(one)) for one in ids]
        at = 0
        while at < len(found):
            if LOST in found[at]:
                for count in range(2, min(LONGEST_CHARACTER, len(found) - at) + 1):
                    text = self._text([int(one) for one in ids[at : at + count]])
                    if LOST not in text:
                        found[at : at + count] = [""] * (count - 1) + [text]
                        at += count - 1
                        break
            at += 1
        return found

    def _word(self, token: int) -> str:
        if token not in self._known:
            self._known[token] = self._text([token])
        return self._known[token]

    def _text(self, ids: list[int]) -> str:
        if self._decode is None:
            return " ".join(map(str, ids)) + " "
        try:
            return self._decode(ids)
        except Exception:  # an id that the tokenizer does not have, of another model
            return f"[{' '.join(map(str, ids))}]"
