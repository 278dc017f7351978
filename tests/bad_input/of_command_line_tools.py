"""Commands of `megarl` and programs under tools/: invalid numbers, folders that are not runs, unwritable paths."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from case import Case, no_changes

from megarl.__main__ import COMMANDS as MEGARL_COMMANDS
from megarl.observe.rollout_log import part_file, write_part
from megarl.types import Prompt, Rollout, Turn

Prepare = Callable[[Path], None]
METRICS = b'{"step": 1, "time": 0.0, "time/step": 2.0, "rollout/reward_mean": 0.5}\n'
PROBLEM = {"question": "1+1?", "answer": "It is #### 2"}


def write_run(metrics: bytes = METRICS, rollouts: bytes | None = None, config: bytes = b"algorithm: grpo\n") -> Prepare:
    """Write a run folder FOLDER/r with rollouts of step 1, or with `rollouts` as its file."""

    def prepare(folder: Path) -> None:
        file = part_file(folder / "r", 1, 0)
        file.parent.mkdir(parents=True)
        (folder / "r/metrics.jsonl").write_bytes(metrics)
        (folder / "r/config.yaml").write_bytes(config)
        if rollouts is None:
            write_part(file, 1, 2, [0, 1], [Rollout(Prompt("p", ()), (Turn((1,)),))] * 2)
        else:
            file.write_bytes(rollouts)

    return prepare


def with_columns(**changes: Any) -> Prepare:
    """Write two rollouts, the second with changed columns; None drops a column."""

    def prepare(folder: Path) -> None:
        write_run()(folder)
        file = part_file(folder / "r", 1, 0)
        table = pq.read_table(file, partitioning=None)
        for name, value in changes.items():
            field, values = table.schema.field(name), table.column(name).to_pylist()
            table = table.drop_columns(name)
            if value is not None:
                table = table.append_column(field, pa.array([values[0], value], field.type))
        pq.write_table(table, file)

    return prepare


def replayable(folder: Path) -> None:
    """Write a run that can be replayed with the base folder's model."""
    config: dict[str, Any] = {
        "model": {"path": f"{folder}/model"},
        "reward": {"functions": ["megarl.rewards.arithmetic:arithmetic"]},
    }
    config |= {"data": {"train": f"{folder}/train.jsonl", "prompts_per_step": 1}, "algorithm": "grpo"}
    config["rollout"] = {"samples_per_prompt": 2, "max_context": 64, "max_new_tokens": 8}
    write_run(config=json.dumps(config).encode())(folder)


def empty_step(folder: Path) -> None:
    write_run()(folder)
    part_file(folder / "r", 1, 0).unlink()


def write_gsm8k(train: bytes | dict[str, Any] = b"", test: dict[str, Any] | None = PROBLEM) -> Prepare:
    """Write a GSM8K folder FOLDER/g."""

    def prepare(folder: Path) -> None:
        (folder / "g").mkdir()
        (folder / "g/train.jsonl").write_bytes(train if isinstance(train, bytes) else json.dumps(train).encode())
        if test is not None:
            (folder / "g/test.jsonl").write_text(json.dumps(test))

    return prepare


def tool(program: str) -> Callable[..., Case]:
    def case(name: str, expected: tuple[str, ...], *arguments: str, prepare: Prepare = no_changes) -> Case:
        return Case(f"{program}: {name}", expected, prepare=prepare, command=(f"tools/{program}.py", *arguments))

    return case


def megarl_command(program: str) -> Callable[..., Case]:
    def case(name: str, expected: tuple[str, ...], *arguments: str, prepare: Prepare = no_changes) -> Case:
        command = ("-m", MEGARL_COMMANDS[program].module, *arguments)
        return Case(f"megarl {program}: {name}", expected, prepare=prepare, command=command)

    return case


report = megarl_command("report")
REPORT = [
    report("no arguments", ("RUN_DIR", "required")),
    report("an unknown option", ("unrecognized arguments: --nonsense",), "FOLDER/r", "--nonsense", prepare=write_run()),
    report("no folder", ("no run folder FOLDER/none",), "FOLDER/none"),
    report("a file", ("no run folder",), "FOLDER/config.yaml"),
    report("not a run folder", ("has no metrics yet", "is it a run folder?"), "FOLDER/model"),
    report(
        "one of two is not a run folder",
        ("FOLDER/model has no metrics",),
        "FOLDER/r",
        "FOLDER/model",
        prepare=write_run(),
    ),
    report("empty metrics", ("has no metrics yet",), "FOLDER/r", prepare=write_run(b"")),
    report(
        "binary metrics", ("metrics.jsonl is no file of metrics",), "FOLDER/r", prepare=write_run(bytes(range(256)))
    ),
    report("metrics of zeros", ("no metrics",), "FOLDER/r", prepare=write_run(bytes(1000))),
    report("truncated metrics", ("has no metrics yet",), "FOLDER/r", prepare=write_run(METRICS[:20])),
    report("nested metrics", ("has no metrics yet",), "FOLDER/r", prepare=write_run(b"[" * 100000)),
    report("metrics without steps", ("has no metrics yet",), "FOLDER/r", prepare=write_run(b'{"loss": 1.0}\n')),
    report(
        "metrics of another program",
        ("none of a run's metrics",),
        "FOLDER/r",
        prepare=write_run(b'{"step": 1, "loss": 1.0}\n'),
    ),
    report(
        "text instead of numbers in metrics",
        ("none of a run's",),
        "FOLDER/r",
        prepare=write_run(b'{"step": 1, "time/step": "2 s"}\n'),
    ),
    report(
        "step number too large",
        ("no metrics",),
        "FOLDER/r",
        prepare=write_run(b'{"step": 1%s, "time/step": 1}' % (b"0" * 400)),
    ),
    report("a damaged configuration", ("config.yaml is damaged",), "FOLDER/r", prepare=write_run(config=b"a: [")),
    report("a binary configuration", ("config.yaml is damaged",), "FOLDER/r", prepare=write_run(config=b"\xff\xfe\0")),
    report(
        "a plot in a missing folder",
        ("--plot", "create it first"),
        "FOLDER/r",
        "--plot",
        "FOLDER/x/a.png",
        prepare=write_run(),
    ),
    report(
        "a plot below a file",
        ("--plot", "no folder"),
        "FOLDER/r",
        "--plot",
        "FOLDER/config.yaml/a.png",
        prepare=write_run(),
    ),
    report(
        "a plot in a read-only folder",
        ("--plot", "cannot be written"),
        "FOLDER/r",
        "--plot",
        "/proc/a.png",
        prepare=write_run(),
    ),
    report(
        "a plot path that is a folder", ("--plot", "suffix"), "FOLDER/r", "--plot", "FOLDER/model", prepare=write_run()
    ),
    report(
        "an unknown plot format",
        ("--plot", "png", "'docx'"),
        "FOLDER/r",
        "--plot",
        "FOLDER/a.docx",
        prepare=write_run(),
    ),
]

view = tool("view_rollouts")
VIEW = [
    view("no arguments", ("RUN_DIR", "required")),
    view("no folder", ("no run folder FOLDER/none",), "FOLDER/none"),
    view("a file", ("no run folder",), "FOLDER/train.jsonl"),
    view("not a run folder", ("has no recorded rollouts", "track.save_rollouts"), "FOLDER/model"),
    view("a negative number", ("--show", "from 0", "-3"), "FOLDER/r", "--show", "-3", prepare=write_run()),
    view("a fractional rollout number", ("--show", "whole number"), "FOLDER/r", "--show", "1.5", prepare=write_run()),
    view("a number too large", ("--show", "whole number"), "FOLDER/r", "--show", "9" * 5000, prepare=write_run()),
    view("step 0", ("--step", "from 1"), "FOLDER/r", "--step", "0", prepare=write_run()),
    view("a step as text", ("--step", "whole number"), "FOLDER/r", "--step", "last", prepare=write_run()),
    view(
        "a step that is not in the run",
        ("no rollouts of step 9", "1 to 1"),
        "FOLDER/r",
        "--step",
        "9",
        prepare=write_run(),
    ),
    view("worst and best", ("--best", "not allowed with"), "FOLDER/r", "--worst", "--best", prepare=write_run()),
    view(
        "a page in a missing folder",
        ("--html", "create it first"),
        "FOLDER/r",
        "--html",
        "FOLDER/x/a.html",
        prepare=write_run(),
    ),
    view(
        "a page path that is a folder",
        ("--html", "is a folder"),
        "FOLDER/r",
        "--html",
        "FOLDER/model",
        prepare=write_run(),
    ),
    view(
        "a page in a read-only folder",
        ("--html", "cannot be written"),
        "FOLDER/r",
        "--html",
        "/proc/a",
        prepare=write_run(),
    ),
    view("a page on a full disk", ("No space left",), "FOLDER/r", "--html", "/dev/full", prepare=write_run()),
    view("no rollouts in the step", ("has no rollouts of step 1", "rank_*.parquet"), "FOLDER/r", prepare=empty_step),
    view("binary", ("parquet is not a file of",), "FOLDER/r", prepare=write_run(rollouts=bytes(range(256)))),
    view("empty", ("parquet is not a file of",), "FOLDER/r", prepare=write_run(rollouts=b"")),
    view("JSON lines", ("parquet is not a file of",), "FOLDER/r", prepare=write_run(rollouts=b'{"text": "x"}\n')),
    view("no turns", ("has no column 'turn_lengths'",), "FOLDER/r", prepare=with_columns(turn_lengths=None)),
    view("no id", ("has no column 'id'",), "FOLDER/r", prepare=with_columns(id=None)),
    *(
        view(name, ("parquet, row 1, is not a recorded rollout", expected), "FOLDER/r", prepare=with_columns(**changes))
        for name, expected, changes in (
            ("turns longer than the tokens", "turns of 2 tokens with 1 token ids", {"turn_lengths": [2]}),
            ("columns with different numbers of turns", "disagree on the number", {"turn_lengths": [1, 0]}),
            ("negative ids", "a token id is negative", {"token_ids": [-1]}),
            ("an unknown status", "'done'", {"status": "done"}),
            ("a reward part as text", "not a number", {"reward_parts": '{"a": "high"}'}),
            ("reward parts as a number", "not a dict", {"reward_parts": "3"}),
            ("an unscored reason that is not text", "not text", {"unscored": '{"a": 3}'}),
            ("fewer turn rewards than turns", "disagree on the number", {"turn_rewards": []}),
            ("truncated messages", "messages: ", {"messages": '[{"role": "us'}),
            ("deeply nested messages", "messages: ", {"messages": "[" * 100000}),
            ("prompt messages as text", "prompt_messages is", {"prompt_messages": '"x"'}),
            ("more advantages than tokens", "2 advantages", {"advantages": [0.5, 0.5]}),
        )
    ),
]

mismatch = tool("mismatch")
MISMATCH = [
    mismatch("no arguments", ("RUN_DIR", "required")),
    mismatch("no folder", ("no run folder FOLDER/none",), "FOLDER/none"),
    mismatch("not a run folder", ("has no recorded rollouts", "track.save_rollouts"), "FOLDER/model"),
    mismatch("a step as text", ("--step", "whole number"), "FOLDER/r", "--step", "last", prepare=write_run()),
    mismatch(
        "a step that is not in the run",
        ("no rollouts of step 9", "1 to 1"),
        "FOLDER/r",
        "--step",
        "9",
        prepare=write_run(),
    ),
    mismatch("a negative number", ("--worst", "from 0"), "FOLDER/r", "--worst", "-1", prepare=write_run()),
    mismatch(
        "no trainer log-probs",
        ("no log-probs", "rollout.verify_weights_every=1"),
        "FOLDER/r",
        prepare=write_run(),
    ),
    mismatch("binary", ("parquet is not a file of",), "FOLDER/r", prepare=write_run(rollouts=bytes(range(256)))),
    mismatch(
        "more log-probs than tokens",
        ("parquet, row 1, is not a recorded rollout", "2 trainer_logprobs for a rollout of 1 tokens"),
        "FOLDER/r",
        prepare=with_columns(trainer_logprobs=[0.5, 0.5]),
    ),
]

memory, QWEN = megarl_command("plan"), ("--model", "qwen3-30b-a3b")
MEMORY = [
    memory("no arguments", ("--model", "required")),
    memory("an unknown model", ("--model gpt-5", "qwen3-30b-a3b"), "--model", "gpt-5", "--gpus", "8"),
    memory("a folder without a model", ("config.json",), "--model", "FOLDER/r", "--gpus", "8", prepare=write_run()),
    memory("neither layout nor GPUs", ("--gpus",), *QWEN),
    memory("negative GPUs", ("--gpus", "-8"), *QWEN, "--gpus", "-8"),
    memory("a fractional number of GPUs", ("--gpus", "whole number"), *QWEN, "--gpus", "0.5"),
    memory("too many GPUs", ("--gpus", "1048576"), *QWEN, "--gpus", "1" + "0" * 12),
    *(
        memory(f"{option} {value}", (option,), *QWEN, "--gpus", "8", option, value)
        for option, values in {
            "--gpu-gb": ("-1", "0", "nan", "inf", "80GB"),
            "--gpus-per-node": ("0", "-8", "nan"),
            "--tokens": ("0", "-1", "nan", "1e4"),
            "--context": ("-1", "nan"),
            "--kv-tokens": ("0", "-5"),
            "--logits-chunk-size": ("0", "-5"),
            "--bucket-mb": ("0", "-1", "9" * 30),
            "--batch-tokens": ("0", "-1", "9" * 30),
            "--algorithm": ("dpo",),
            "--dtype": ("fp4",),
            "--recompute": ("some",),
        }.items()
        for value in values
    ),
    memory("a layout without world", ("world",), *QWEN, "--layout", "tp=8"),
    memory("an unknown key in a layout", ("--layout has no 'zp'", "tp"), *QWEN, "--layout", "world=8,zp=2"),
    memory("a layout size of 0", ("--layout tp", "'0'"), *QWEN, "--layout", "world=8,tp=0"),
    memory("a negative layout size", ("--layout tp", "'-2'"), *QWEN, "--layout", "world=8,tp=-2"),
    memory("a layout size as text", ("--layout tp", "'two'"), *QWEN, "--layout", "world=8,tp=two"),
    memory("a layout size with 5,001 digits", ("--layout world",), *QWEN, "--layout", "world=1" + "0" * 5000),
    memory("an indivisible layout", ("3",), *QWEN, "--layout", "world=8,tp=3"),
    memory("ep larger than the world", ("ep=16",), *QWEN, "--layout", "world=8,ep=16"),
    memory("an engine size of 0", ("--rollout tp",), *QWEN, "--gpus", "8", "--rollout", "tp=0"),
    memory("an unknown key of the engine", ("--rollout has no 'pp'",), *QWEN, "--gpus", "8", "--rollout", "pp=2"),
    memory("a layout too large to measure", ("--measure", "GB"), *QWEN, "--layout", "world=8,tp=2", "--measure"),
    memory("two layouts to measure", ("--measure", "one"), *QWEN, "--layout", "world=2", "world=4", "--measure"),
]

reshard = tool("plan_reshard")
LAYOUTS = (*QWEN, "--train", "world=8,tp=2,ep=4", "--engine", "tp=4,ep=4")
RESHARD = [
    reshard("no arguments", ("--model", "--train", "--engine", "required")),
    reshard("an unknown model", ("--model gpt-5", "qwen3-30b-a3b"), *LAYOUTS, "--model", "gpt-5"),
    reshard("no world size", ("--train needs world",), *LAYOUTS, "--train", "tp=8"),
    reshard("no engine size", ("--engine needs tp",), *LAYOUTS, "--engine", "ep=8"),
    reshard("an engine larger than the job", ("8",), *LAYOUTS, "--engine", "tp=16"),
    reshard("a size as text", ("--engine tp", "'x'"), *LAYOUTS, "--engine", "tp=x"),
    reshard("a negative size", ("--train tp", "'-2'"), *LAYOUTS, "--train", "world=8,tp=-2"),
    reshard("a size too large", ("--train tp",), *LAYOUTS, "--train", "world=8,tp=1" + "0" * 30),
    reshard("an indivisible layout", ("3",), *LAYOUTS, "--train", "world=8,tp=3"),
    reshard("indivisible experts", ("ep", "128"), *LAYOUTS, "--train", "world=6,ep=3", "--engine", "tp=2,ep=2"),
    reshard("more stages than layers", ("stages",), *LAYOUTS, "--train", "world=64,pp=64"),
    reshard("layers as text", ("--pp-layers", "4,4,3"), *LAYOUTS, "--pp-layers", "a,b"),
    reshard("layers for another number of stages", ("[4, 4]",), *LAYOUTS, "--pp-layers", "4,4"),
    reshard("a page in a missing folder", ("--html", "create it first"), *LAYOUTS, "--html", "FOLDER/x/a.html"),
    reshard("a page path that is a folder", ("--html", "is a folder"), *LAYOUTS, "--html", "FOLDER/model"),
    *(
        reshard(f"{option} {value}", (option,), *LAYOUTS, option, value)
        for option, values in {
            "--gpus-per-node": ("0", "-8", "nan"),
            "--bucket-mb": ("0", "-1", "9" * 30),
            "--nic-gbs": ("0", "-1", "nan", "inf", "fast"),
            "--nvlink-gbs": ("0", "nan"),
            "--round-us": ("-1", "nan", "inf"),
            "--wire": ("fp4",),
        }.items()
        for value in values
    ),
]

prepare_data = tool("prepare_data")


def gsm8k(name: str, expected: tuple[str, ...], *arguments: str, prepare: Prepare = no_changes) -> Case:
    return prepare_data(f"gsm8k, {name}", expected, "gsm8k", *arguments, prepare=prepare)


def write_row(row: dict[str, Any] | bytes) -> Prepare:
    """Write FOLDER/rows.jsonl with this row."""

    def prepare(folder: Path) -> None:
        (folder / "rows.jsonl").write_bytes(row if isinstance(row, bytes) else json.dumps(row).encode())

    return prepare


HUMANEVAL = {"task_id": "HumanEval/0", "prompt": "def f(x):\n", "entry_point": "f", "test": "def check(c):\n    pass"}
GSM8K = [
    prepare_data("no arguments", ("NAME", "SOURCE", "OUT", "required")),
    prepare_data("an unknown data set", ("'mbpp'", "gsm8k", "humaneval"), "mbpp", "FOLDER/g", "FOLDER/out"),
    prepare_data("no file", ("there is no file FOLDER/none",), "aime", "FOLDER/none", "FOLDER/out"),
    *(
        prepare_data(name, expected, mode, "FOLDER/rows.jsonl", "FOLDER/out", prepare=write_row(row))
        for name, expected, mode, row in (
            ("empty", ("rows.jsonl holds no problems",), "math500", b""),
            ("a broken line", ("rows.jsonl:1: not JSON",), "math500", b'{"problem": '),
            ("no ground truth", ("rows.jsonl:1", "no ground truth"), "math500", {"problem": "1+1?"}),
            ("an empty ground truth", ("rows.jsonl:1", "no ground truth"), "aime", {"problem": "1+1?", "answer": " "}),
            ("an answer out of AIME's range", ("rows.jsonl:1", "0 to 999"), "aime", {"problem": "1+1?", "answer": "x"}),
            ("no tests", ("rows.jsonl:1", "'test'"), "humaneval", {"prompt": "def f(): ", "entry_point": "f"}),
            ("tests with a syntax error", ("rows.jsonl:1",), "humaneval", {**HUMANEVAL, "test": "def check(c:"}),
            ("an invalid entry point", ("rows.jsonl:1",), "humaneval", {**HUMANEVAL, "entry_point": "a b"}),
        )
    ),
    gsm8k("no arguments", ("SOURCE", "OUT", "required")),
    gsm8k("no target", ("OUT", "required"), "FOLDER/g", prepare=write_gsm8k(PROBLEM)),
    gsm8k("no source", ("no folder FOLDER/none",), "FOLDER/none", "FOLDER/out"),
    gsm8k("a file as the source", ("no folder",), "FOLDER/train.jsonl", "FOLDER/out"),
    gsm8k("a folder with other files", ("must have one of train.jsonl",), "FOLDER/model", "FOLDER/out"),
    gsm8k("no test", ("must have one of test.jsonl",), "FOLDER/g", "FOLDER/out", prepare=write_gsm8k(PROBLEM, None)),
    gsm8k("empty", ("train.jsonl holds no problems",), "FOLDER/g", "FOLDER/out", prepare=write_gsm8k()),
    gsm8k("not JSON", ("train.jsonl:1: not JSON",), "FOLDER/g", "FOLDER/out", prepare=write_gsm8k(b"{")),
    gsm8k(
        "latin-1", ("train.jsonl:1: not UTF-8",), "FOLDER/g", "FOLDER/out", prepare=write_gsm8k(b'{"question": "\xe9"}')
    ),
    gsm8k("lists as rows", ("train.jsonl:1: a list",), "FOLDER/g", "FOLDER/out", prepare=write_gsm8k(b"[]")),
    gsm8k("another data set", ("no text 'question'",), "FOLDER/g", "FOLDER/out", prepare=write_gsm8k({"text": "x"})),
    gsm8k(
        "an answer as a number",
        ("'answer'",),
        "FOLDER/g",
        "FOLDER/out",
        prepare=write_gsm8k(PROBLEM | {"answer": 2}),
    ),
    gsm8k(
        "an answer without a result",
        ("'#### <result>'",),
        "FOLDER/g",
        "FOLDER/out",
        prepare=write_gsm8k(PROBLEM | {"answer": "2"}),
    ),
    gsm8k(
        "a file as the target",
        ("OUT FOLDER/config.yaml is not a folder",),
        "FOLDER/g",
        "FOLDER/config.yaml",
        prepare=write_gsm8k(PROBLEM),
    ),
    gsm8k(
        "a target below a file",
        ("OUT", "is not a folder"),
        "FOLDER/g",
        "FOLDER/config.yaml/x",
        prepare=write_gsm8k(PROBLEM),
    ),
    gsm8k("a target in a read-only folder", ("/proc",), "FOLDER/g", "/proc/out", prepare=write_gsm8k(PROBLEM)),
]

quickstart = tool("make_quickstart")
QUICKSTART = [
    quickstart("no arguments", ("out", "required")),
    quickstart("a folder with other files", ("FOLDER is not empty", "another folder"), "FOLDER"),
    quickstart("a file", ("config.yaml is not a folder",), "FOLDER/config.yaml"),
    quickstart("below a file", ("is not a folder",), "FOLDER/config.yaml/q"),
    quickstart("a read-only folder", ("/proc",), "/proc/q"),
    quickstart("an unknown family", ("--family", "qwen3_moe"), "FOLDER/q", "--family", "nonsense"),
    *(
        quickstart(f"{option} {value}", (option,), "FOLDER/q", option, value)
        for option, value in (
            ("--seed", "-1"),
            ("--seed", "x"),
            ("--train", "-5"),
            ("--train", "9" * 12),
            ("--held-out", "nan"),
            ("--demonstrations", "1.5"),
        )
    ),
]


def bench(command: str) -> Callable[..., Case]:
    def case(name: str, expected: tuple[str, ...], *arguments: str, prepare: Prepare = no_changes) -> Case:
        return tool("bench")(f"{command}, {name}", expected, command, *arguments, prepare=prepare)

    return case


COMMANDS = ("reshard", "step", "trl", "asynchronous", "turns", "boxes", "sessions", "save", "observe", "flow", "scale")
step, sync, flow = bench("step"), bench("reshard"), bench("flow")
BENCHES = [
    tool("bench")("no command", ("COMMAND", "required")),
    tool("bench")("an unknown command", ("'speed'", "reshard", "scale"), "speed"),
    *(
        bench(name)("an option and no more", ("--nonsense", "see --help"), *folder, "--nonsense")
        for name in COMMANDS
        for folder in [["FOLDER"] if name in ("asynchronous", "turns", "sessions", "observe") else []]
    ),
    *(
        bench(name)("no folder of the quickstart", ("is not what tools/make_quickstart.py makes",), "FOLDER/none")
        for name in ("asynchronous", "turns", "sessions", "observe")
    ),
    bench("trl")("no rounds", ("--rounds",), "--rounds", "0"),
    bench("boxes")("another backend", ("must be bubblewrap here",), "sandbox.backend=none"),
    bench("save")("no layers", ("--layers",), "--layers", "0"),
    bench("scale")("no sequences", ("--sequences",), "--sequences", "0"),
    flow("lengths as a word", ("--lengths", "lognormal"), "--lengths", "many"),
    flow("a batch of too few groups", ("--sequences 40", "engines"), "--ranks", "2", "--sequences", "40"),
    *(
        step(f"{option} {value}", (option,), option, value)
        for option, values in {
            "--ranks": ("0", "-1", "nan", "9" * 12),
            "--budget": ("0", "9" * 12),
            "--longest": ("1", "-5"),
            "--sequences": ("0", "-1", "9" * 12),
        }.items()
        for value in values
    ),
    step("no text file", ("no data file FOLDER/none.jsonl",), "--texts", "FOLDER/none.jsonl"),
    step("texts in another column", ("train.jsonl:1 has no text 'answer'", "--key"), "--texts", "FOLDER/train.jsonl"),
    step("texts that are not JSON", ("not JSON",), "--texts", "FOLDER/g/train.jsonl", prepare=write_gsm8k(b"{")),
    step("an empty text file", ("holds no texts",), "--texts", "FOLDER/g/train.jsonl", prepare=write_gsm8k()),
    step("not a run folder", ("--run", "no steps"), "--run", "FOLDER/none"),
    step("a run of another program", ("--run", "no steps"), "--run", "FOLDER/r", prepare=write_run(b'{"step": 1}\n')),
    step("a binary run", ("--run", "metrics.jsonl"), "--run", "FOLDER/r", prepare=write_run(bytes(range(256)))),
    step("run metrics as text", ("--run",), "--run", "FOLDER/r", prepare=write_run(b'{"step": 1, "time/step": "x"}\n')),
    *(
        sync(f"{option} {value}", (option,), option, value)
        for option, values in {
            "--ranks": ("0", "3", "x"),
            "--nodes": ("3",),
            "--gbit": ("0", "-1", "nan"),
            "--repeats": ("0", "-1"),
            "--hidden": ("0", "-64", "100", "9" * 12),
            "--timeout": ("0", "nan"),
            "--ways": ("push",),
        }.items()
        for value in values
    ),
    sync("a JSON file in a missing folder", ("--json", "create it first"), "--json", "FOLDER/x/a.json"),
    sync("a JSON path that is a folder", ("--json", "is a folder"), "--json", "FOLDER/model"),
]

parity = tool("check_parity")
PARITY = [
    parity("an unknown family", ("--family", "nonsense", "qwen3_moe"), "--family", "nonsense"),
    parity("an unknown layout", ("--layout", "tp=3"), "--layout", "tp=3"),
    parity("an unknown engine", ("--engine", "tp=16"), "--engine", "tp=16"),
    parity("a README in a missing folder", ("--readme", "create it first"), "--readme", "FOLDER/x/README.md"),
    parity("a README without the marks", ("--readme", "two marks"), "--readme", "FOLDER/config.yaml"),
    parity("a README path that is a folder", ("--readme", "is a folder"), "--readme", "FOLDER/model"),
    parity("a README path that is a model", ("--readme", "is no text"), "--readme", "FOLDER/model/model.safetensors"),
]

replay = tool("replay_step")
REPLAY = [
    replay("not a run folder", ("FOLDER/model is not a run folder",), "FOLDER/model", "--step", "1"),
    replay("no step", ("required: --step",), "FOLDER/r", prepare=write_run()),
    replay("step 0", ("--step: must be from 1",), "FOLDER/r", "--step", "0", prepare=write_run()),
    replay(
        "a function that does not exist",
        ("--break: cannot import no_lab",),
        *("FOLDER/r", "--step", "1", "--break", "no_lab:loss"),
        prepare=write_run(),
    ),
    replay(
        "a step that was not recorded",
        ("--step 2", "has recorded steps 1 to 1"),
        "FOLDER/r",
        "--step",
        "2",
        prepare=replayable,
    ),
    replay("a step after the last", ("--step 999", "steps 1 to 1"), "FOLDER/r", "--step", "999", prepare=replayable),
    replay(
        "an invalid change",
        ("FOLDER/r/changes.jsonl: no change of a key: '[1]'",),
        *("FOLDER/r", "--step", "1"),
        prepare=lambda folder: (write_run()(folder), (folder / "r/changes.jsonl").write_text("[1]\n"), None)[2],
    ),
]

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = [file.stem for file in sorted((ROOT / "tools").glob("*.py")) if "__main__" in file.read_text()]
UNKNOWN = [tool(program)("an option and no more", ("see --help",), "--nonsense") for program in PROGRAMS]

CASES = [*UNKNOWN, *REPORT, *VIEW, *MISMATCH, *REPLAY, *MEMORY, *RESHARD, *GSM8K, *QUICKSTART, *BENCHES, *PARITY]
