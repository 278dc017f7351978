"""Load one rollout with its turns and all per-token records as plain data for the page.

Token ids are decoded with the run's tokenizer.
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
"""What decoders return for bytes that are not UTF-8."""
MAX_TOKENS_PER_CHAR = 4
"""Tokens that one character may span: one per UTF-8 byte."""


def load_decoder_or_default(run_dir: Path) -> Decode:
    """Return a decoder from the tokenizer of the run's model or export; without one, it returns the ids as text."""
    return load_decoder(run_dir) or (lambda ids: " ".join(map(str, ids)))


def tokenizer_folders(run_dir: Path) -> list[Path]:
    """Return folders with a tokenizer for the run: `model.path`, also relative to where the run was started, and the
    export."""
    folders = []
    try:
        tree = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
        model = Path(tree["model"]["path"])
        folders.append(model)
        run_path, configured_dir = run_dir.resolve(), Path(tree["run"]["dir"])
        if run_path.parts[-len(configured_dir.parts) :] == configured_dir.parts:
            folders.append(Path(*run_path.parts[: -len(configured_dir.parts)], model))
    except (OSError, ValueError, LookupError, TypeError, RecursionError, yaml.YAMLError):
        pass
    return [folder for folder in (*folders, run_dir / "export") if (folder / "tokenizer_config.json").is_file()]


def load_decoder(run_dir: Path) -> Decode | None:
    """Return a decoder from the tokenizer of the run's model or export, or None."""
    for folder in tokenizer_folders(run_dir):
        from transformers import AutoTokenizer  # takes seconds, unneeded without a tokenizer

        try:
            decode: Decode = AutoTokenizer.from_pretrained(folder, local_files_only=True).decode
            return decode
        except Exception:  # a broken tokenizer may raise anything
            continue
    return None


class TokenDecoder:
    """Decodes tokens one by one for display. decode: None without a tokenizer, to show token ids."""

    def __init__(self, decode: Decode | None) -> None:
        self._decode = decode
        self._cache: dict[int, str] = {}

    def decode_each(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token.

        A character that spans several tokens is assigned to the last one; the others are empty. Bytes that are not
        UTF-8 become U+FFFD each.
        """
        texts = [self._decode_token(int(token)) for token in ids]
        index = 0
        while index < len(texts):
            if REPLACEMENT_CHAR in texts[index]:
                for count in range(2, min(MAX_TOKENS_PER_CHAR, len(texts) - index) + 1):
                    text = self._decode_ids([int(token) for token in ids[index : index + count]])
                    if REPLACEMENT_CHAR not in text:
                        texts[index : index + count] = [""] * (count - 1) + [text]
                        index += count - 1
                        break
            index += 1
        return texts

    def _decode_token(self, token: int) -> str:
        if token not in self._cache:
            self._cache[token] = self._decode_ids([token])
        return self._cache[token]

    def _decode_ids(self, ids: list[int]) -> str:
        if self._decode is None:
            return " ".join(map(str, ids)) + " "
        try:
            return self._decode(ids)
        except Exception:  # an id outside the vocabulary, of another model
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
"""One float per token; the last two only in steps with trainer log-probs."""
COLUMNS = (*_SCALAR_COLUMNS, *_JSON_COLUMNS, *_TURN_COLUMNS, "token_ids", *_TOKEN_COLUMNS)
DIGITS = {"advantages": 5}
"""Decimal places of per-token values, which are shown as a color and a few digits."""
LOGPROB_DIGITS = 7
"""Decimal places of log-probs: the page shows differences of two, which are 1e-6 in a healthy run."""


class Detail(dict[str, Any]):
    """A rollout as the page shows it.

    Scalars; `turns` as {tokens, written, version, runs, reward, cached}; and per token `words`, `ids`, `logprobs`,
    `advantages`, `trainer`, `unreplayed`, each None if not recorded.
    """


def read_details(
    run_dir: Path, step: int, numbers: set[int] | None, decoder: TokenDecoder, notes: Notes | None = None
) -> Iterator[Detail]:
    """Yield the requested rollouts of a step, all if `numbers` is None. Damaged ones are noted and skipped."""
    notes = Notes() if notes is None else notes
    for part in open_parts(run_dir, step, notes):
        for group in range(part.file.num_row_groups):
            yield from _read_group_details(part, group, step, numbers, decoder, notes)


def _read_group_details(
    part: Part, group: int, step: int, numbers: set[int] | None, decoder: TokenDecoder, notes: Notes
) -> Iterator[Detail]:
    numbers_table = read_group(part, group, ["number"], notes)
    if numbers_table is None:
        return
    rows = list(range(numbers_table.num_rows))
    if numbers is not None:
        is_requested = pc.is_in(numbers_table.column("number"), pa.array(sorted(numbers), pa.int32()))
        rows = np.flatnonzero(is_requested.to_numpy()).tolist()
    if not rows:
        return
    table = read_group(part, group, [name for name in COLUMNS if name in part.names], notes)
    if table is None:
        return
    for row in rows:
        try:
            yield _build_detail(table.slice(row, 1), step, decoder)
        except (*READ_ERRORS, RecursionError) as error:
            number = numbers_table.column("number")[row].as_py()
            notes.add(f"{part.path}: rollout {number} is inconsistent and is excluded: {format_error(error)}")


def _build_detail(row: pa.Table, step: int, decoder: TokenDecoder) -> Detail:
    detail = Detail(step=step, **{name: finite_or_none(cell(row, name, 0)) for name in _SCALAR_COLUMNS})
    texts = {name: cell(row, name, 0) for name in _JSON_COLUMNS}
    values_json = {name: None if text is None else exact_json.loads(text) for name, text in texts.items()}
    detail["reward_parts"] = {
        str(name): finite_or_none(value) for name, value in (values_json["reward_parts"] or {}).items()
    }
    detail["unscored"] = {str(part): str(reason) for part, reason in (values_json["unscored"] or {}).items()}
    detail["ground_truth"] = texts["ground_truth"]
    detail["messages"] = [_message(message) for message in values_json["messages"] or ()]
    lengths, action_flags = (flatten_lists(row, name)[0] for name in _TURN_COLUMNS[:2])
    versions, rewards, cached = (
        flatten_lists(row, name)[0].tolist() if _has(row, name) else [None] * len(lengths) for name in _TURN_COLUMNS[2:]
    )
    version_spans = values_json["turn_versions"] or {}
    if not len(lengths) == len(action_flags) == len(versions) == len(rewards) == len(cached):
        raise ValueError("its columns disagree on the number of turns")
    detail["turns"] = [
        {
            "tokens": int(count),
            "written": bool(is_action),
            "version": version,
            "runs": [
                [int(weight_version), int(tokens)] for weight_version, tokens in version_spans.get(str(turn_index), ())
            ],
            "reward": finite_or_none(reward),
            "cached": None if num_cached is None or num_cached < 0 else num_cached,
        }
        for turn_index, (count, is_action, version, reward, num_cached) in enumerate(
            zip(lengths, action_flags, versions, rewards, cached, strict=True)
        )
    ]
    ids = (
        flatten_lists(row, "token_ids")[0]
        if "token_ids" in row.column_names
        else np.zeros(int(lengths.sum()), np.int32)
    )
    if int(lengths.sum()) != len(ids):
        raise ValueError(f"turns of {int(lengths.sum())} tokens with {len(ids)} token ids")
    detail["ids"], detail["words"] = ids.tolist(), decoder.decode_each(ids.tolist())
    for name in _TOKEN_COLUMNS:
        detail[name.removesuffix("_logprobs")] = _read_token_column(row, name, len(ids))
    return detail


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
    """Return role and text, with tool calls as JSON."""
    if not isinstance(message, dict):
        return {"role": "?", "text": str(message)}
    content = message.get("content")
    text = content if isinstance(content, str) else "" if content is None else exact_json.dumps(content)
    calls = message.get("tool_calls")
    return {"role": str(message.get("role", "?")), "text": text + ("\n" + exact_json.dumps(calls) if calls else "")}
