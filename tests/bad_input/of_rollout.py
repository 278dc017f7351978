"""Waits that cannot be kept, and recorded rollouts that are not what a step of this run would have generated."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from case import Case

from megarl.observe.rollout_log import rollout_file, write_rollouts
from megarl.types import Prompt, Rollout, Turn

REPLAY = ("rollout.replay=FOLDER/recorded",)
STEP_2 = "FOLDER/recorded/rollouts/step_000002.jsonl"


def record(folder: Path, steps: int = 2, prompts: int = 4, samples: int = 4, tokens: int = 2) -> Path:
    """A recorded run as this configuration would leave it; the file of step 2."""
    for step in range(1, steps + 1):
        rollouts = [
            Rollout(
                Prompt(str(group), ({"role": "user", "content": "1"},)),
                (Turn((5, 6)), Turn((7,) * tokens, (-0.5,) * tokens, True, step - 1)),
                group=group,
            )
            for group in range(prompts)
            for _ in range(samples)
        ]
        write_rollouts(rollout_file(folder / "recorded", step), rollouts)
    return rollout_file(folder / "recorded", 2)


def recorded(**shape: int) -> Callable[[Path], None]:
    return lambda folder: (record(folder, **shape), None)[1]


def spoilt(spoil: Callable[[Path], Any]) -> Callable[[Path], None]:
    """A recording whose second step has been spoilt."""
    return lambda folder: (spoil(record(folder)), None)[1]


def line(text: str | bytes) -> Callable[[Path], None]:
    """One whose step 2 has this as its third line."""

    def spoil(file: Path) -> None:
        lines = file.read_bytes().split(b"\n")
        lines[2] = text.encode() if isinstance(text, str) else text
        file.write_bytes(b"\n".join(lines))

    return spoilt(spoil)


def changed(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """One in whose step 2 the third record has been changed."""

    def spoil(file: Path) -> None:
        lines = file.read_text().splitlines()
        found = json.loads(lines[2])
        change(found)
        lines[2] = json.dumps(found)
        file.write_text("\n".join(lines) + "\n")

    return spoilt(spoil)


def action(**changes: Any) -> Callable[[Path], None]:
    return changed(lambda found: found["turns"][1].update(changes))


def set_to(**changes: Any) -> Callable[[Path], None]:
    return changed(lambda found: found.update(changes))


def without(name: str) -> Callable[[Path], None]:
    return changed(lambda found: found.pop(name))


def case_of_line(name: str, prepare: Callable[[Path], None], says: str = "not a recorded rollout") -> Case:
    return Case(name, (STEP_2, "line 3", says), REPLAY, prepare)


OTHER = "it is of another configuration"

CASES = [
    # Waits.
    Case(
        "an answer may take longer than a step",
        ("rollout.request_timeout=600", "rollout.step_timeout=60", "lower the first or raise the second"),
        ("rollout.step_timeout=60",),
    ),
    Case(
        "an answer longer than any step",
        ("rollout.request_timeout=1e+06", "rollout.step_timeout=7200"),
        ("rollout.request_timeout=1e6",),
    ),
    Case(
        "no time for an answer",
        ("rollout.request_timeout=0.01 s is too short", "rollout.max_new_tokens=40", "raise it"),
        ("rollout.request_timeout=0.01",),
    ),
    Case(
        "no time for a step",
        ("rollout.step_timeout=1 s is too short", "16 rollouts", "raise it"),
        ("rollout.step_timeout=1", "rollout.request_timeout=1", "rollout.concurrency=1"),
    ),
    Case(
        "a step of too many prompts",
        ("rollout.step_timeout=7200 s is too short", "rollouts of a step", "raise it"),
        ("data.prompts_per_step=100000", "rollout.concurrency=2"),
    ),
    Case(
        "too many samples of a prompt",
        ("rollout.step_timeout=7200 s is too short", "rollouts of a step"),
        ("rollout.samples_per_prompt=1000000",),
    ),
    Case(
        "an engine that runs one at a time",
        ("rollout.step_timeout=20 s is too short", "1 at once"),
        (
            *("rollout.step_timeout=20", "rollout.request_timeout=20", "rollout.sglang={max_running_requests: 1}"),
            "data.prompts_per_step=100",
        ),
    ),
    Case(
        "no room for one conversation",
        ("rollout.sglang.max_total_tokens=100", "rollout.max_context=192", "raise the first or lower the second"),
        ("rollout.sglang={max_total_tokens: 100}",),
    ),
    Case(
        "room for one token",
        ("rollout.sglang.max_total_tokens=1 ", "rollout.max_context=192"),
        ("rollout.sglang={max_total_tokens: 1}",),
    ),
    # Recordings as a whole.
    Case("no such recording", ("rollout.replay=FOLDER/recorded", "no such run folder"), REPLAY),
    Case(
        "a recording that is a file",
        ("rollout.replay=FOLDER/recorded", "no such run folder"),
        REPLAY,
        lambda folder: (folder / "recorded").write_text("x") and None,
    ),
    Case(
        "a recording without rollouts",
        ("rollout.replay=FOLDER/recorded", "no folder rollouts", "track.rollouts=true"),
        REPLAY,
        lambda folder: (folder / "recorded").mkdir(),
    ),
    Case(
        "a model instead of a recording",
        ("rollout.replay=FOLDER/model", "no folder rollouts"),
        ("rollout.replay=FOLDER/model",),
    ),
    Case(
        "no step on record",
        ("no rollouts of step 1", "step_000001.jsonl", "lower run.num_rollout"),
        REPLAY,
        lambda folder: (folder / "recorded" / "rollouts").mkdir(parents=True),
    ),
    Case("fewer steps on record", ("no rollouts of step 2", "run.num_rollout=2"), REPLAY, recorded(steps=1)),
    Case("a step is missing", ("no rollouts of step 2", "step_000002.jsonl"), REPLAY, spoilt(Path.unlink)),
    Case(
        "more steps than on record",
        ("no rollouts of step 3", "run.num_rollout=7"),
        (*REPLAY, "run.num_rollout=7"),
        recorded(),
    ),
    Case(
        "a step that is a folder",
        ("no rollouts of step 2", "step_000002.jsonl"),
        REPLAY,
        spoilt(lambda file: (file.unlink(), file.mkdir())),
    ),
    Case("recorded with fewer samples", (OTHER, "holds 8 rollouts of 4 prompts"), REPLAY, recorded(samples=2)),
    Case("recorded with more samples", (OTHER, "rollout.samples_per_prompt"), REPLAY, recorded(samples=8)),
    Case("recorded with fewer prompts", (OTHER, "12 rollouts of 3 prompts"), REPLAY, recorded(prompts=3)),
    Case("recorded with more prompts", (OTHER, "data.prompts_per_step"), REPLAY, recorded(prompts=5)),
    Case("prompts for samples", (OTHER, "16 rollouts of 8 prompts"), REPLAY, recorded(prompts=8, samples=2)),
    Case("recorded with longer conversations", (OTHER, "rollout.max_context=192"), REPLAY, recorded(tokens=300)),
    Case(
        "a step without its last line",
        (STEP_2, OTHER, "15 rollouts"),
        REPLAY,
        spoilt(lambda file: file.write_text("".join(file.read_text().splitlines(True)[:-1]))),
    ),
    Case("an empty step", (STEP_2, OTHER, "0 rollouts"), REPLAY, spoilt(lambda file: file.write_text(""))),
    case_of_line("samples of different numbers", set_to(group="0")),
    Case("a prompt with a sample of another", (STEP_2, OTHER), REPLAY, set_to(group=3)),
    Case("a prompt from beyond the step", (STEP_2, OTHER), REPLAY, set_to(group=77)),
    # Damaged files.
    Case(
        "a binary step",
        (STEP_2, "not a file of recorded rollouts"),
        REPLAY,
        spoilt(lambda file: file.write_bytes(bytes(range(256)) * 4)),
    ),
    Case(
        "a step in UTF-16",
        (STEP_2, "not a file of recorded rollouts"),
        REPLAY,
        spoilt(lambda file: file.write_bytes(file.read_text().encode("utf-16"))),
    ),
    Case(
        "a line in Latin-1", (STEP_2, "not a file of recorded rollouts"), REPLAY, line('{"id": "ä"}'.encode("latin-1"))
    ),
    Case(
        "a step that ends in the middle",
        (STEP_2, "line 16", "not a recorded rollout"),
        REPLAY,
        spoilt(lambda file: file.write_bytes(file.read_bytes()[:-40])),
    ),
    Case("a step of zeros", (STEP_2, "line 1"), REPLAY, spoilt(lambda file: file.write_bytes(b"\0" * 4096))),
    case_of_line("a line that is no JSON", line("{"), "not a recorded rollout"),
    case_of_line("an empty line", line("")),
    case_of_line("a line that is a number", line("3")),
    case_of_line("a line that is null", line("null")),
    case_of_line("a line that is a list", line("[]")),
    case_of_line("an object of nothing", line("{}")),
    case_of_line("a line that nests too deeply", line("[" * 100000)),
    case_of_line("a prompt's row instead of a record", line('{"prompt": "What is 1+1?", "ground_truth": 2}')),
    # Records of something else.
    case_of_line("no turns", without("turns")),
    case_of_line("no turn at all", set_to(turns=[])),
    case_of_line("no prompt", without("prompt")),
    case_of_line("a prompt of text", set_to(prompt="1")),
    case_of_line("a prompt with a foreign key", changed(lambda found: found["prompt"].update(colour=1)), "colour"),
    case_of_line("no status", without("status")),
    case_of_line("an unknown status", set_to(status="done"), "'done'"),
    case_of_line("no group", without("group")),
    case_of_line("a reward of text", set_to(reward="high")),
    case_of_line("reward parts of text", set_to(reward_parts="high")),
    case_of_line("turns of text", set_to(turns="high")),
    case_of_line("fewer log-probs than tokens", action(logprobs=[-0.5]), "2 tokens but 1 logprobs"),
    case_of_line("log-probs of text", action(logprobs=["a", "b"])),
    case_of_line("log-probs that are not finite", action(logprobs=[{"float": "nan"}, -0.5]), "not finite"),
    case_of_line("log-probs of what no policy wrote", action(is_action=False), "only an action turn"),
    case_of_line("tokens of text", action(token_ids=["a", "b"])),
    case_of_line("tokens that are fractions", action(token_ids=[1.5, 2.5])),
    case_of_line("negative tokens", action(token_ids=[-1, 2]), "negative"),
    case_of_line("tokens that are no list", action(token_ids=7)),
    case_of_line("a first turn of the policy's", changed(lambda found: found["turns"].pop(0)), "not a prompt"),
    case_of_line("messages that are a number", set_to(messages=3)),
]
