"""Timeouts that cannot hold, and recorded rollouts that do not match the run."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from case import Case

from megarl.observe.rollout_columns import FORMAT
from megarl.observe.rollout_log import part_file, write_part
from megarl.types import Prompt, Rollout, Turn

LATER_FORMAT = str(FORMAT + 1)
REPLAY = ("rollout.replay=FOLDER/recorded",)
STEP_2 = "FOLDER/recorded/rollouts/step_000002"
PART = f"{STEP_2}/rank_00001.parquet"


def record(
    folder: Path,
    steps: int = 2,
    prompts: int = 4,
    samples: int = 4,
    tokens: int = 2,
    logprob: float = -0.5,
    config: str = "",
) -> Path:
    """Write a recorded run of two ranks; return the file of rank 1 in step 2. config: its config.yaml."""
    run_dir = folder / "recorded"
    if config:
        run_dir.mkdir()
        (run_dir / "config.yaml").write_text(config)
    for step in range(1, steps + 1):
        rollouts = [
            Rollout(
                Prompt(str(group), ({"role": "user", "content": "1"},)),
                (Turn((5, 6)), Turn((7,) * tokens, (logprob,) * tokens, True, step - 1)),
                group=group,
            )
            for group in range(prompts)
            for _ in range(samples)
        ]
        total = len(rollouts)
        for rank, numbers in enumerate((range(0, total, 2), range(1, total, 2))):
            rank_rollouts = [rollouts[number] for number in numbers]
            write_part(part_file(run_dir, step, rank), step, total, numbers, rank_rollouts)
    return part_file(run_dir, 2, 1)


def recorded(**shape: Any) -> Callable[[Path], None]:
    return lambda folder: (record(folder, **shape), None)[1]


def corrupted(corrupt: Callable[[Path], Any]) -> Callable[[Path], None]:
    """Corrupt a file of the second step of a recording."""
    return lambda folder: (corrupt(record(folder)), None)[1]


def edit_bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return corrupted(lambda file: file.write_bytes(change(file.read_bytes())))


def edit_table(change: Callable[[pa.Table], pa.Table]) -> Callable[[Path], None]:
    """Rewrite the file with a changed table."""
    return corrupted(lambda file: pq.write_table(change(pq.read_table(file, partitioning=None)), file))


def set_cell(name: str, value: Any) -> Callable[[Path], None]:
    """Replace a value in the third row."""

    def change(result: pa.Table) -> pa.Table:
        values = result.column(name).to_pylist()
        values[2] = value
        field = result.schema.field(name)
        return result.set_column(result.schema.get_field_index(name), field, pa.array(values, field.type))

    return edit_table(change)


def set_column(name: str, values: list[Any], kind: pa.DataType) -> Callable[[Path], None]:
    """Replace a column."""
    return edit_table(
        lambda result: result.set_column(result.schema.get_field_index(name), name, pa.array(values * 8, kind))
    )


def set_metadata(**changes: str | None) -> Callable[[Path], None]:
    """Change the schema metadata."""

    def change(result: pa.Table) -> pa.Table:
        metadata = dict(result.schema.metadata)
        for name, value in changes.items():
            metadata[f"megarl.{name}".encode()] = (value or "").encode()
        return result.replace_schema_metadata(metadata)

    return edit_table(change)


def file_case(name: str, prepare: Callable[[Path], None], *expected: str) -> Case:
    return Case(name, (PART, *expected), REPLAY, prepare)


def row_case(name: str, prepare: Callable[[Path], None], expected: str = "not a recorded rollout") -> Case:
    return Case(name, (PART, "row 2", expected), REPLAY, prepare)


NOT_A_RECORDING = "is not a file of recorded rollouts"
DAMAGED = f"{NOT_A_RECORDING}, or is damaged"

CASES = [
    # Waits.
    Case(
        "request timeout above the step timeout",
        ("rollout.request_timeout=600", "rollout.step_timeout=60", "lower the first or raise the second"),
        ("rollout.step_timeout=60",),
    ),
    Case(
        "request timeout above the default step timeout",
        ("rollout.request_timeout=1e+06", "rollout.step_timeout=7200"),
        ("rollout.request_timeout=1e6",),
    ),
    Case(
        "request timeout too short",
        ("rollout.request_timeout=0.01 s is too short", "rollout.max_new_tokens=40", "raise it"),
        ("rollout.request_timeout=0.01",),
    ),
    Case(
        "step timeout too short",
        ("rollout.step_timeout=1 s is too short", "16 rollouts", "raise it"),
        ("rollout.step_timeout=1", "rollout.request_timeout=1", "rollout.concurrency=1"),
    ),
    Case(
        "step timeout too short for the prompts",
        ("rollout.step_timeout=7200 s is too short", "rollouts of a step", "raise it"),
        ("data.prompts_per_step=100000", "rollout.concurrency=2"),
    ),
    Case(
        "step timeout too short for the samples",
        ("rollout.step_timeout=7200 s is too short", "rollouts of a step"),
        ("rollout.samples_per_prompt=1000000",),
    ),
    Case(
        "step timeout too short for one running request",
        ("rollout.step_timeout=20 s is too short", "1 at once"),
        (
            *("rollout.step_timeout=20", "rollout.request_timeout=20", "rollout.sglang={max_running_requests: 1}"),
            "data.prompts_per_step=100",
        ),
    ),
    Case(
        "a KV cache smaller than a conversation",
        ("rollout.sglang.max_total_tokens=100", "rollout.max_context=192", "raise the first or lower the second"),
        ("rollout.sglang={max_total_tokens: 100}",),
    ),
    Case(
        "a KV cache of one token",
        ("rollout.sglang.max_total_tokens=1 ", "rollout.max_context=192"),
        ("rollout.sglang={max_total_tokens: 1}",),
    ),
    Case(
        "vLLM with settings of SGLang",
        ("rollout.sglang.page_size with rollout.engine=vllm", "remove it"),
        ("rollout.engine=vllm", "rollout.sglang={page_size: 4}"),
    ),
    Case(
        "SGLang with settings of vLLM",
        ("rollout.vllm.max_num_seqs with rollout.engine=sglang", "remove it"),
        ("rollout.vllm={max_num_seqs: 4}",),
    ),
    Case(
        "a setting of vLLM that nobody has reviewed",
        ("rollout.vllm.quantization may not be set", "max_num_seqs"),
        ("rollout.engine=vllm", "rollout.vllm={quantization: fp8}"),
    ),
    Case(
        "a temperature that vLLM raises",
        ("rollout.temperature=0.001 with rollout.engine=vllm", "0.01"),
        ("rollout.engine=vllm", "rollout.temperature=0.001"),
    ),
    # Recordings as a whole.
    Case("a missing recording", ("rollout.replay=FOLDER/recorded", "no such run folder"), REPLAY),
    Case(
        "a file as recording",
        ("rollout.replay=FOLDER/recorded", "no such run folder"),
        REPLAY,
        lambda folder: (folder / "recorded").write_text("x") and None,
    ),
    Case(
        "a recording without rollouts",
        ("rollout.replay=FOLDER/recorded", "no folder rollouts", "track.save_rollouts=true"),
        REPLAY,
        lambda folder: (folder / "recorded").mkdir(),
    ),
    Case(
        "a model as recording",
        ("rollout.replay=FOLDER/model", "no folder rollouts"),
        ("rollout.replay=FOLDER/model",),
    ),
    Case(
        "a recording without steps",
        ("no rollouts of step 1", "step_000001", "lower run.num_rollout"),
        REPLAY,
        lambda folder: (folder / "recorded" / "rollouts").mkdir(parents=True),
    ),
    Case("fewer recorded steps", ("no rollouts of step 2", "run.num_rollout=2"), REPLAY, recorded(steps=1)),
    Case(
        "a step is missing",
        ("no rollouts of step 2", "step_000002"),
        REPLAY,
        corrupted(lambda file: shutil.rmtree(file.parent)),
    ),
    Case(
        "more steps than recorded",
        ("no rollouts of step 3", "run.num_rollout=7"),
        (*REPLAY, "run.num_rollout=7"),
        recorded(),
    ),
    Case(
        "a step as a file",
        ("no rollouts of step 2", "step_000002"),
        REPLAY,
        corrupted(lambda file: (shutil.rmtree(file.parent), file.parent.write_text(""))),
    ),
    Case(
        "a step without files",
        ("no rollouts of step 2", "rank_*.parquet"),
        REPLAY,
        corrupted(lambda file: (shutil.rmtree(file.parent), file.parent.mkdir())),
    ),
    Case(
        "a step of JSON lines",
        ("no rollouts of step 2", "step_000002"),
        REPLAY,
        corrupted(lambda file: (shutil.rmtree(file.parent), file.parent.with_suffix(".jsonl").write_text("{}"))),
    ),
    Case(
        "recorded steps that begin later",
        ("no rollouts of step 1 ", "it has steps 2 to 2", "FOLDER/recorded@2 begins with its first"),
        REPLAY,
        lambda folder: (record(folder), shutil.rmtree(folder / "recorded/rollouts/step_000001"), None)[2],
    ),
    Case(
        "a start after the last recorded step",
        ("rollout.replay=FOLDER/recorded@2", "no rollouts of step 3 ", "it has steps 1 to 2"),
        ("rollout.replay=FOLDER/recorded@2",),
        recorded(),
    ),
    Case(
        "a start at step 0",
        ("rollout.replay=FOLDER/recorded@0", "steps count from 1"),
        ("rollout.replay=FOLDER/recorded@0",),
        recorded(),
    ),
    Case(
        "recorded without sampling masks",
        ("rollout.top_p, top_k or min_p", "row 0, has no sampling masks", "reset these keys"),
        (*REPLAY, "rollout.top_k=20"),
        recorded(),
    ),
    Case(
        "recorded without routing",
        (
            "train.routing_replay=true",
            "row 0, has no routing",
            "track.save_replay_data",
            "or set train.routing_replay=false",
        ),
        (*REPLAY, "train.routing_replay=true"),
        recorded(),
    ),
    Case(
        "a token beyond the vocabulary",
        (f"{PART} has the token 500000", "recorded with another model"),
        REPLAY,
        set_cell("token_ids", [5, 6, 7, 500000]),
    ),
    Case(
        "recorded with another tokenizer",
        (f"{PART} was recorded with another tokenizer", "model.path=FOLDER/model"),
        REPLAY,
        edit_table(
            lambda result: result.replace_schema_metadata({**result.schema.metadata, b"megarl.vocabulary": b"0" * 64})
        ),
    ),
    Case(
        "a recording without greedy answers",
        ("rollout.replay=FOLDER/recorded has no greedy answers in step 1", "algorithm=remax"),
        (*REPLAY, "algorithm=remax"),
        recorded(),
    ),
    Case(
        "recorded with longer conversations",
        ("a rollout of 302 tokens, beyond rollout.max_context=192", "raise it"),
        REPLAY,
        recorded(tokens=300),
    ),
    # Parts of a step.
    Case("a file is missing", (STEP_2, "8 of the 16 rollouts", "rollout 1 is missing"), REPLAY, corrupted(Path.unlink)),
    Case(
        "files of two world sizes",
        (STEP_2, "rollout 1 twice", "two runs"),
        REPLAY,
        corrupted(lambda file: shutil.copy(file, file.with_name("rank_00002.parquet"))),
    ),
    Case(
        "a file with more rollouts than the step",
        (STEP_2, "of 16 and of 32 rollouts", "two runs"),
        REPLAY,
        set_metadata(total="32"),
    ),
    Case(
        "a file without its last row",
        (STEP_2, "15 of the 16 rollouts", "rollout 15 is missing"),
        REPLAY,
        edit_table(lambda result: result.slice(0, 7)),
    ),
    Case(
        "a file without rows",
        (STEP_2, "8 of the 16 rollouts", "rollout 1 is missing"),
        REPLAY,
        edit_table(lambda result: result.slice(0, 0)),
    ),
    Case("a rollout number beyond the step", (STEP_2, "rollout 5 is missing"), REPLAY, set_cell("number", 16)),
    Case("a negative rollout number", (STEP_2, "rollout 5 is missing"), REPLAY, set_cell("number", -1)),
    file_case("a file of another step", set_metadata(step="3"), "is of step 3"),
    file_case(
        "a file of a later version",
        set_metadata(format=str(FORMAT + 1)),
        f"format {FORMAT + 1}",
        f"formats 3 to {FORMAT}",
    ),
    file_case("an unreadable description of the generation", set_metadata(generation="{"), "megarl.generation"),
    # Damaged files.
    file_case("an empty file", edit_bytes(lambda full: b""), DAMAGED),
    file_case("a binary file", edit_bytes(lambda full: bytes(range(256)) * 4), DAMAGED),
    file_case("a file of text", edit_bytes(lambda full: b'{"id": "a"}\n'), DAMAGED),
    file_case("the first half of a file", edit_bytes(lambda full: full[: len(full) // 2]), DAMAGED),
    file_case("the second half of a file", edit_bytes(lambda full: full[len(full) // 2 :]), DAMAGED),
    file_case("a file without its last bytes", edit_bytes(lambda full: full[:-40]), DAMAGED),
    file_case("a file of zeros", edit_bytes(lambda full: bytes(len(full))), DAMAGED),
    file_case("a folder instead of a file", corrupted(lambda file: (file.unlink(), file.mkdir())), DAMAGED),
    file_case("a dead link", corrupted(lambda file: (file.unlink(), file.symlink_to("none"))), DAMAGED),
    file_case(
        "prompts instead of rollouts",
        corrupted(lambda file: pq.write_table(pa.table({"prompt": ["What is 1+1?"], "ground_truth": [2]}), file)),
        NOT_A_RECORDING,
        "megarl.format",
    ),
    file_case(
        "no metadata", edit_table(lambda result: result.replace_schema_metadata(None)), NOT_A_RECORDING, "megarl.format"
    ),
    file_case("no step", set_metadata(step=None), NOT_A_RECORDING, "megarl.step"),
    file_case("a total as text", set_metadata(total="all"), NOT_A_RECORDING, "megarl.total"),
    # Columns of something else.
    *(
        file_case(
            f"no column {name}", edit_table(lambda result, name=name: result.drop_columns(name)), f"no column {name!r}"
        )
        for name in (
            "number",
            "status",
            "group",
            "turn_lengths",
            "token_ids",
            "logprobs",
            "messages",
            "prompt_messages",
        )
    ),
    file_case("groups as text", set_column("group", ["0"], pa.string()), "'group' is of string"),
    file_case("a reward as text", set_column("reward", ["high"], pa.string()), "'reward' is of string"),
    file_case(
        "reward parts as numbers", set_column("reward_parts", [1.0], pa.float64()), "'reward_parts' is of double"
    ),
    file_case("turns as text", set_column("turn_lengths", ["2 2"], pa.string()), "'turn_lengths' is of string"),
    file_case("log-probs as text", set_column("logprobs", [["a", "b"]], pa.list_(pa.string())), "'logprobs'"),
    file_case("log-probs in float64", set_column("logprobs", [[-0.5]], pa.list_(pa.float64())), "'logprobs'"),
    file_case("tokens as text", set_column("token_ids", [["a"]], pa.list_(pa.string())), "'token_ids'"),
    file_case("tokens as fractions", set_column("token_ids", [[1.5]], pa.list_(pa.float32())), "'token_ids'"),
    file_case("tokens as a scalar", set_column("token_ids", [7], pa.int32()), "'token_ids' is of int32"),
    file_case("messages as a number", set_column("messages", [3], pa.int64()), "'messages' is of int64"),
    file_case("a nullable status", set_column("status", [None], pa.string()), "'status' may be null"),
    # Rows of something else.
    row_case("no turns", set_cell("turn_lengths", [])),
    row_case("fewer versions than turns", set_cell("turn_weight_version", [-1]), "disagree on the number"),
    row_case("an unknown status", set_cell("status", "done"), "'done'"),
    row_case("a first turn by the policy", set_cell("turn_is_action", [True, True]), "not a prompt"),
    row_case("a negative turn length", set_cell("turn_lengths", [5, -1]), "negative length"),
    Case(
        "NaN log-probs",
        ("FOLDER/recorded/rollouts/step_000001/rank_00000.parquet, row 0", "not finite"),
        REPLAY,
        recorded(logprob=math.nan),
    ),
    file_case("infinite log-probs", set_cell("logprobs", [0.0, 0.0, -math.inf, -0.5]), "not finite"),
    file_case("negative tokens", set_cell("token_ids", [5, 6, -7, 7]), "negative"),
]
