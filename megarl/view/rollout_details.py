"""Load one rollout with its turns and all per-token records as plain data for the page.

Token ids are decoded with the run's tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from megarl.observe.rollout_log import EVALUATION_FOLDER
from megarl.observe.rollout_table import iter_table_rows
from megarl.parallel.policy_configs import POLICIES_FOLDER
from megarl.utils import exact_json
from megarl.utils.text import one_line
from megarl.view.column_codec import finite_or_none
from megarl.view.rollout_files import READ_ERRORS, Notes, iter_groups, open_parts, read_group

Decode = Callable[[list[int]], str]
REPLACEMENT_CHAR = "\ufffd"
"""The character that decoders return for bytes that are not UTF-8."""
MAX_TOKENS_PER_CHAR = 4
"""Tokens that one character may span: one per UTF-8 byte."""


def load_decoder_or_default(run_dir: Path) -> Decode:
    """Return a decoder from the tokenizer of the run's model or export; without one, it returns the ids as text."""
    return load_decoder(run_dir) or (lambda ids: " ".join(map(str, ids)))


def tokenizer_folders(run_dir: Path) -> list[Path]:
    """Return folders with a tokenizer for the run: `model.path`, also relative to where the run was started, and the
    export. For the folder of a policy in a run of several, those of its model; for that of evaluations, those of their
    run."""
    folders = []
    run_dir = run_dir.parent if run_dir.name == EVALUATION_FOLDER else run_dir
    policy = run_dir.name if run_dir.parent.name == POLICIES_FOLDER else ""
    run_dir = run_dir.parent.parent if policy else run_dir
    try:
        tree = yaml.safe_load((run_dir / "config.yaml").read_text(encoding="utf-8"))
        actor = (tree.get("roles") or {}).get(f"actor_{policy}") or {}
        model = Path(actor.get("model") or tree["model"]["path"])
        folders.append(model)
        run_path, configured_dir = run_dir.resolve(), Path(tree["run"]["dir"])
        if run_path.parts[-len(configured_dir.parts) :] == configured_dir.parts:
            folders.append(Path(*run_path.parts[: -len(configured_dir.parts)], model))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, yaml.YAMLError):
        pass
    folders.append(run_dir / (f"export_{policy}" if policy else "export"))
    return [folder for folder in folders if (folder / "tokenizer_config.json").is_file()]


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

    def decode_each(self, ids: list[int]) -> list[str]:
        """Return the text of each token.

        A character that spans several tokens is assigned to the last one; the others are empty. Bytes that are not
        UTF-8 become U+FFFD each.
        """
        for token in set(ids) - self._cache.keys():
            self._cache[token] = self._decode_ids([token])
        texts = [self._cache[token] for token in ids]
        index = 0
        while index < len(texts):
            if REPLACEMENT_CHAR in texts[index]:
                for count in range(2, min(MAX_TOKENS_PER_CHAR, len(texts) - index) + 1):
                    text = self._decode_ids(ids[index : index + count])
                    if REPLACEMENT_CHAR not in text:
                        texts[index : index + count] = [""] * (count - 1) + [text]
                        index += count - 1
                        break
            index += 1
        return texts

    def _decode_ids(self, ids: list[int]) -> str:
        if self._decode is None:
            return " ".join(map(str, ids)) + " "
        try:
            return self._decode(ids)
        except Exception:  # an id outside the vocabulary, of another model
            return f"[{' '.join(map(str, ids))}]"


_SCALAR_COLUMNS = (
    *("number", "group", "episode", "status", "failure", "reward", "advantage", "logprob", "tool_calls", "tool_errors"),
    *("seed", "id", "data_source", "branch", "forks", "drift", "greedy"),
)
_JSON_COLUMNS = ("reward_parts", "unscored", "ground_truth", "turn_versions", "messages", "prompt_messages")
_TURN_COLUMNS = ("turn_lengths", "turn_is_action", "turn_weight_version", "turn_rewards", "turn_cached_tokens")
_TOKEN_COLUMNS = {"logprobs": 7, "advantages": 5, "trainer_logprobs": 7, "unreplayed_logprobs": 7}
"""Columns of one float per token, with the decimal places that are shown: differences of two log-probs are 1e-6 in a
healthy run. The last two are only in steps with trainer log-probs."""
COLUMNS = (*_SCALAR_COLUMNS, *_JSON_COLUMNS, *_TURN_COLUMNS, "token_ids", *_TOKEN_COLUMNS)


Detail = dict[str, Any]
"""A rollout as the page shows it: scalars; `messages`, of which the first `num_prompt_messages` are the prompt's;
`turns` as {num_tokens, is_action, weight_version, version_spans, reward, cached_tokens}; and per token `token_ids`,
`token_texts`, `logprobs`, `advantages`, `trainer_logprobs`, `unreplayed_logprobs`, each of the last four None if not
recorded."""


def read_details(
    run_dir: Path, step: int, numbers: set[int] | None, decoder: TokenDecoder, notes: Notes | None = None
) -> Iterator[Detail]:
    """Yield the requested rollouts of a step, all if `numbers` is None. Damaged ones are noted and skipped."""
    notes = Notes() if notes is None else notes
    for part in open_parts(run_dir, step, notes):
        for group, numbers_table in iter_groups(part, ["number"], notes):
            group_numbers = numbers_table.column("number").to_pylist()
            rows = [row for row, number in enumerate(group_numbers) if numbers is None or number in numbers]
            table = read_group(part, group, COLUMNS, notes) if rows else None
            if table is None:
                continue
            for row in rows:
                try:
                    (values,) = iter_table_rows(table.slice(row, 1))
                    yield _build_detail({**dict.fromkeys(COLUMNS), **values}, step, decoder)
                except (*READ_ERRORS, RecursionError) as error:
                    problem = f"rollout {group_numbers[row]} is inconsistent and is excluded: {one_line(error, 200)}"
                    notes.add(f"{part.path}: {problem}")


def _build_detail(row: dict[str, Any], step: int, decoder: TokenDecoder) -> Detail:
    """Build a rollout from its row, in which columns that the file lacks are None."""
    detail: Detail = {"step": step, **{name: finite_or_none(row[name]) for name in _SCALAR_COLUMNS}}
    trees = {name: None if row[name] is None else exact_json.loads(row[name]) for name in _JSON_COLUMNS}
    detail["reward_parts"] = {str(name): finite_or_none(value) for name, value in (trees["reward_parts"] or {}).items()}
    detail["unscored"] = {str(part): str(reason) for part, reason in (trees["unscored"] or {}).items()}
    detail["ground_truth"] = row["ground_truth"]
    detail["messages"] = [format_message(message) for message in trees["messages"] or ()]
    detail["num_prompt_messages"] = count_shared(trees["messages"] or (), trees["prompt_messages"] or ())
    num_turns, num_tokens = len(row["turn_lengths"]), int(row["turn_lengths"].sum())
    turn_columns = [[None] * num_turns if row[name] is None else row[name].tolist() for name in _TURN_COLUMNS]
    if any(len(column) != num_turns for column in turn_columns):
        raise ValueError("its columns disagree on the number of turns")
    version_spans = trees["turn_versions"] or {}
    detail["turns"] = [
        {
            "num_tokens": length,
            "is_action": is_action,
            "weight_version": version,
            "version_spans": [[int(number), int(count)] for number, count in version_spans.get(str(turn), ())],
            "reward": finite_or_none(reward),
            "cached_tokens": None if num_cached is None or num_cached < 0 else num_cached,
        }
        for turn, (length, is_action, version, reward, num_cached) in enumerate(zip(*turn_columns, strict=True))
    ]
    ids = [0] * num_tokens if row["token_ids"] is None else row["token_ids"].tolist()
    if num_tokens != len(ids):
        raise ValueError(f"turns of {num_tokens} tokens with {len(ids)} token ids")
    detail["token_ids"], detail["token_texts"] = ids, decoder.decode_each(ids)
    for name, digits in _TOKEN_COLUMNS.items():
        values = row[name]
        if values is not None and len(values) != num_tokens:
            raise ValueError(f"{len(values)} {name} for {num_tokens} tokens")
        detail[name] = None if values is None else [finite_or_none(round(value, digits)) for value in values.tolist()]
    return detail


def count_shared(messages: Sequence[Any], prompt: Sequence[Any]) -> int:
    """Return the number of leading messages of a conversation that are its prompt's."""
    count = 0
    for message, other in zip(messages, prompt, strict=False):
        if message != other:
            break
        count += 1
    return count


def format_message(message: Any) -> dict[str, str]:
    """Return role and text, with a line `name(arguments)` per tool call."""
    if not isinstance(message, dict):
        return {"role": "?", "text": str(message)}
    content = message.get("content")
    text = content if isinstance(content, str) else "" if content is None else exact_json.dumps(content)
    calls = message.get("tool_calls")
    lines = [text, *map(_format_call, calls if isinstance(calls, list) else [calls] if calls else [])]
    return {"role": str(message.get("role", "?")), "text": "\n".join(line for line in lines if line)}


def _format_call(call: Any) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return exact_json.dumps(call)
    arguments = function.get("arguments")
    return f"{function.get('name', '?')}({arguments if isinstance(arguments, str) else exact_json.dumps(arguments)})"
