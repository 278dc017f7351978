"""One rollout with its turns and everything recorded per token, as plain data for a page.

Token ids become text by the run's tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import yaml

from megarl.utils import exact_json
from megarl.view.column_codec import finite_or_none
from megarl.view.rollout_files import (
    READ_ERRORS,
    Notes,
    Part,
    cell,
    flatten_lists,
    format_error,
    open_parts,
    read_group,
)

Decode = Callable[[list[int]], str]
REPLACEMENT_CHAR = "\ufffd"
"""What a decoder makes of bytes that are no UTF-8."""
MAX_TOKENS_PER_CHAR = 4
"""Tokens that one character may be spread over, a byte each."""


def load_decoder_or_default(run_dir: Path) -> Decode:
    """Ids to text by the tokenizer of the run's model, or by that of its export; where neither is here, the ids."""
    return load_decoder(run_dir) or (lambda ids: " ".join(map(str, ids)))


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


def load_decoder(run_dir: Path) -> Decode | None:
    """The same, or None."""
    for folder in tokenizer_folders(run_dir):
        from transformers import AutoTokenizer  # seconds, for a run that has texts only

        try:
            decode: Decode = AutoTokenizer.from_pretrained(folder, local_files_only=True).decode
            return decode
        except Exception:  # whatever the readers of a broken file raise
            continue
    return None


class TokenDecoder:
    """Each token by itself, as a page shows it. decode: None where no tokenizer is known; then a token is its id."""

    def __init__(self, decode: Decode | None) -> None:
        self._decode = decode
        self._cache: dict[int, str] = {}

    def decode_each(self, ids: Sequence[int]) -> list[str]:
        """[tokens]. A character that several tokens share is with the last of them, and the others are empty; bytes
        that are no UTF-8 are U+FFFD each."""
        found = [self._decode_token(int(one)) for one in ids]
        at = 0
        while at < len(found):
            if REPLACEMENT_CHAR in found[at]:
                for count in range(2, min(MAX_TOKENS_PER_CHAR, len(found) - at) + 1):
                    text = self._decode_ids([int(one) for one in ids[at : at + count]])
                    if REPLACEMENT_CHAR not in text:
                        found[at : at + count] = [""] * (count - 1) + [text]
                        at += count - 1
                        break
            at += 1
        return found

    def _decode_token(self, token: int) -> str:
        if token not in self._cache:
            self._cache[token] = self._decode_ids([token])
        return self._cache[token]

    def _decode_ids(self, ids: list[int]) -> str:
        if self._decode is None:
            return " ".join(map(str, ids)) + " "
        try:
            return self._decode(ids)
        except Exception:  # an id that the tokenizer does not have, of another model
            return f"[{' '.join(map(str, ids))}]"


_SCALAR_COLUMNS: tuple[str, ...] = (
    "number",
    "group",
    "episode",
    "status",
    "failure",
    "reward",
    "advantage",
    "logprob",
    "tool_calls",
)
_SCALAR_COLUMNS += ("tool_errors", "seed", "id", "data_source", "branch", "forks", "drift")
_JSON_COLUMNS = ("reward_parts", "unscored", "ground_truth", "turn_versions", "messages")
_TURN_COLUMNS = ("turn_lengths", "turn_is_action", "turn_weight_version", "turn_rewards", "turn_cached_tokens")
_TOKEN_COLUMNS = ("logprobs", "advantages", "trainer_logprobs", "unreplayed_logprobs")
"""Of a float each; the last two are in files of runs that have looked."""
COLUMNS = (*_SCALAR_COLUMNS, *_JSON_COLUMNS, *_TURN_COLUMNS, "token_ids", *_TOKEN_COLUMNS)
DIGITS = {"advantages": 5}
"""Behind the point of a number on a token, which is drawn as a colour and read as a few digits."""
LOGPROB_DIGITS = 7
"""Of a log-prob: what is drawn is how far two of them are apart, which is 1e-6 where all is well."""


class Detail(dict[str, Any]):
    """A rollout as a page has it: figures; `turns` of {tokens, written, version, runs, reward, cached}; [tokens]
    `words`, `ids`, `logprobs`, `advantages`, `trainer`, `unreplayed` (None each where it is not on record)."""


def read_details(
    run_dir: Path, step: int, numbers: set[int] | None, words: TokenDecoder, notes: Notes | None = None
) -> Iterator[Detail]:
    """Those of a step that are asked for, all where None. What is broken is noted and left out."""
    notes = Notes() if notes is None else notes
    for part in open_parts(run_dir, step, notes):
        for group in range(part.file.num_row_groups):
            yield from _read_group_details(part, group, step, numbers, words, notes)


def _read_group_details(
    part: Part, group: int, step: int, numbers: set[int] | None, words: TokenDecoder, notes: Notes
) -> Iterator[Detail]:
    own = read_group(part, group, ["number"], notes)
    if own is None:
        return
    wanted = list(range(own.num_rows))
    if numbers is not None:
        asked = pc.is_in(own.column("number"), pa.array(sorted(numbers), pa.int32()))
        wanted = np.flatnonzero(asked.to_numpy()).tolist()
    if not wanted:
        return
    table = read_group(part, group, [name for name in COLUMNS if name in part.names], notes)
    if table is None:
        return
    for row in wanted:
        try:
            yield _build_detail(table.slice(row, 1), step, words)
        except (*READ_ERRORS, RecursionError) as error:
            number = own.column("number")[row].as_py()
            notes.add(f"{part.path}: rollout {number} makes no sense and is left out: {format_error(error)}")


def _build_detail(row: pa.Table, step: int, words: TokenDecoder) -> Detail:
    found = Detail(step=step, **{name: finite_or_none(cell(row, name, 0)) for name in _SCALAR_COLUMNS})
    texts = {name: cell(row, name, 0) for name in _JSON_COLUMNS}
    of = {name: None if text is None else exact_json.loads(text) for name, text in texts.items()}
    found["reward_parts"] = {str(name): finite_or_none(value) for name, value in (of["reward_parts"] or {}).items()}
    found["unscored"] = {str(part): str(why) for part, why in (of["unscored"] or {}).items()}
    found["ground_truth"] = texts["ground_truth"]
    found["messages"] = [_message(message) for message in of["messages"] or ()]
    lengths, written = (flatten_lists(row, name)[0] for name in _TURN_COLUMNS[:2])
    versions, rewards, cached = (
        flatten_lists(row, name)[0].tolist() if _has(row, name) else [None] * len(lengths) for name in _TURN_COLUMNS[2:]
    )
    several = of["turn_versions"] or {}
    if not len(lengths) == len(written) == len(versions) == len(rewards) == len(cached):
        raise ValueError("its turns are not as many in every column")
    found["turns"] = [
        {
            "tokens": int(count),
            "written": bool(own),
            "version": version,
            "runs": [[int(one), int(tokens)] for one, tokens in several.get(str(at), ())],
            "reward": finite_or_none(reward),
            "cached": None if served is None or served < 0 else served,
        }
        for at, (count, own, version, reward, served) in enumerate(
            zip(lengths, written, versions, rewards, cached, strict=True)
        )
    ]
    ids = (
        flatten_lists(row, "token_ids")[0]
        if "token_ids" in row.column_names
        else np.zeros(int(lengths.sum()), np.int32)
    )
    if int(lengths.sum()) != len(ids):
        raise ValueError(f"turns of {int(lengths.sum())} tokens with {len(ids)} token ids")
    found["ids"], found["words"] = ids.tolist(), words.decode_each(ids.tolist())
    for name in _TOKEN_COLUMNS:
        found[name.removesuffix("_logprobs")] = _read_token_column(row, name, len(ids))
    return found


def _has(row: pa.Table, name: str) -> bool:
    return name in row.column_names and bool(row.column(name)[0].is_valid)


def _read_token_column(row: pa.Table, name: str, tokens: int) -> list[float | None] | None:
    if not _has(row, name):
        return None
    values = flatten_lists(row, name)[0]
    if len(values) != tokens:
        raise ValueError(f"{len(values)} {name} for {tokens} tokens")
    digits = DIGITS.get(name, LOGPROB_DIGITS)
    return [finite_or_none(round(value, digits)) for value in values.astype(np.float64).tolist()]


def _message(message: Any) -> dict[str, str]:
    """Role and text; calls of tools as JSON."""
    if not isinstance(message, dict):
        return {"role": "?", "text": str(message)}
    content = message.get("content")
    text = content if isinstance(content, str) else "" if content is None else exact_json.dumps(content)
    calls = message.get("tool_calls")
    return {"role": str(message.get("role", "?")), "text": text + ("\n" + exact_json.dumps(calls) if calls else "")}
