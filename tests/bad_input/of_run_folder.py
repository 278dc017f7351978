"""Run folders that are locked, foreign or unwritable; damaged checkpoints; full disks."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from case import Case

RESUME = "run.resume=auto"
LOCKS: list[Any] = []
"""Locks held by this process, as by another job."""


def write_run(folder: Path) -> Path:
    """Write a run of this configuration with one step."""
    import yaml

    from megarl.config import load_config, to_dict

    run = folder / "run"
    run.mkdir()
    (run / "config.yaml").write_text(yaml.safe_dump(to_dict(load_config(folder / "config.yaml"))))
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    return run


def write_checkpoint(run: Path, step: int) -> Path:
    from megarl.checkpoint.manifest import hash_file

    folder = run / "checkpoints" / f"step_{step:06d}"
    (folder / "actor").mkdir(parents=True)
    (folder / "actor" / "__0_0.distcp").write_text("weights")
    (folder / "rng_00000.pt").write_text("random states")
    (folder / "host.json").write_text(json.dumps({"step": step}))
    files = [path for path in folder.rglob("*") if path.is_file()]
    entries = {str(path.relative_to(folder)): hash_file(path)._asdict() for path in files}
    (folder / "manifest.json").write_text(json.dumps({"step": step, "world_size": 1, "layout": [], "files": entries}))
    return folder


def corrupted_run(corrupt: Callable[[Path], Any] = lambda run: None) -> Callable[[Path], None]:
    """Write a run and corrupt it."""
    return lambda folder: corrupt(write_run(folder))


def corrupted_checkpoint(corrupt: Callable[[Path], Any]) -> Callable[[Path], None]:
    """Write a run with one checkpoint and corrupt that."""
    return lambda folder: corrupt(write_checkpoint(write_run(folder), 1))


def with_config(content: bytes) -> Callable[[Path], None]:
    return corrupted_run(lambda run: (run / "config.yaml").write_bytes(content))


def both_damaged(folder: Path) -> None:
    run = write_run(folder)
    for step in (1, 12):
        (write_checkpoint(run, step) / "host.json").unlink()


def edit_manifest(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def corrupt(checkpoint: Path) -> None:
        tree = json.loads((checkpoint / "manifest.json").read_text())
        change(tree)
        (checkpoint / "manifest.json").write_text(json.dumps(tree))

    return corrupted_checkpoint(corrupt)


def other_data(checkpoint: Path) -> None:
    """Make the checkpoint that of a data.train with other rows."""
    from megarl.checkpoint.manifest import hash_file

    host = checkpoint / "host.json"
    host.write_text(json.dumps({"step": 1, "loader": {"samples": 4, "fingerprint": "of other rows"}}))
    tree = json.loads((checkpoint / "manifest.json").read_text())
    tree["files"]["host.json"] = hash_file(host)._asdict()
    (checkpoint / "manifest.json").write_text(json.dumps(tree))


def lock_run(folder: Path) -> None:
    (folder / "run").mkdir()
    lock = (folder / "run" / ".lock").open("a+")
    fcntl.flock(lock, fcntl.LOCK_EX)
    lock.write("process 7 on elsewhere")
    lock.flush()
    LOCKS.append(lock)


def fill_disk(folder: Path) -> None:
    """Report 1 MiB of free disk space to this process."""
    usage = shutil.disk_usage(folder)
    shutil.disk_usage = lambda path: usage._replace(free=1 << 20)  # type: ignore[assignment]


def link(name: str, to: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).symlink_to(folder / to)


def model_elsewhere(folder: Path) -> None:
    write_run(folder)
    shutil.copytree(folder / "model", folder / "other")


def folder_at(name: str) -> Callable[[Path], None]:
    """Create a folder with a foreign file at `name`."""

    def make(folder: Path) -> None:
        (folder / name).mkdir(parents=True)
        (folder / name / "thesis.txt").write_text("")

    return make


def finished(folder: Path) -> None:
    export = write_run(folder) / "export"
    export.mkdir()
    (export / "config.json").write_text("{}")


def exported_over_model(folder: Path) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "export").symlink_to(folder / "model")


def only(name: str, text: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / "run").mkdir()
        (folder / "run" / name).write_text(text)

    return make


def identity_case(
    key: str, *expected: str, overrides: tuple[str, ...], prepare: Callable[[Path], None] | None = None
) -> list[Case]:
    """Cases with a changed key of the run's identity, with and without resume."""
    events = ("run folder FOLDER/run belongs to another run", key, "set run.dir", *expected)
    return [
        Case(f"resumed with another {key}", events, (RESUME, *overrides), prepare or corrupted_run()),
        Case(f"a folder of another {key}", events, overrides, prepare or corrupted_run()),
    ]


DIR = ("run.dir", "set it to one", "runs/first")
UNUSABLE = ("cannot write to run folder", "set run.dir to another folder")
NONE_COMPLETE = (
    "none of the checkpoints in FOLDER/run/checkpoints is complete",
    "step_000001",
    "copy one there",
    "run.dir",
)

CASES = [
    Case("no run.dir", DIR, ("run.dir=",)),
    Case("run.dir with blanks only", DIR, ("run.dir='  '",)),
    Case("run.dir with a zero byte", ("run.dir must be text without control characters",), ('run.dir="a\\0b"',)),
    Case("run.dir is a file", (*UNUSABLE, "train.jsonl is not a folder"), ("run.dir=FOLDER/train.jsonl",)),
    Case("run.dir below a file", (*UNUSABLE, "train.jsonl is not a folder"), ("run.dir=FOLDER/train.jsonl/a/b",)),
    Case("run.dir is a device", (*UNUSABLE, "/dev/null is not a folder"), ("run.dir=/dev/null",)),
    Case("run.dir below a device", (*UNUSABLE, "/dev/null is not a folder"), ("run.dir=/dev/null/x",)),
    Case(
        "run.dir in /proc",
        ("run.dir=/proc/x is in a virtual file system", "a folder on a disk"),
        ("run.dir=/proc/x",),
    ),
    Case(
        "run.dir with a name that is too long",
        ("run.dir", "too long; choose another"),
        (f"run.dir=FOLDER/{'x' * 300}",),
    ),
    Case(
        "run.dir with a subfolder name that is too long",
        ("too long; choose another",),
        (f"run.dir=FOLDER/a/b/{'x' * 300}",),
    ),
    Case("run.dir with a path that is too long", ("too long", "another folder"), (f"run.dir=FOLDER/{'x/' * 3000}",)),
    Case("run.dir is a dead link", (*UNUSABLE, "is a link to FOLDER/gone"), ("run.dir=FOLDER/at",), link("at", "gone")),
    Case("run.dir below a dead link", (*UNUSABLE, "a link"), ("run.dir=FOLDER/at/run",), link("at", "gone")),
    Case(
        "run.dir is a link to itself",
        ("run.dir=FOLDER/at", "loop", "another folder"),
        ("run.dir=FOLDER/at",),
        link("at", "at"),
    ),
    Case(
        "run.dir is a folder with other files", ("run.dir=FOLDER", "config.yaml", "a new folder"), ("run.dir=FOLDER",)
    ),
    Case("run.dir with a README", ("README.txt", "a new folder"), (), only("README.txt", "My thesis\n")),
    Case("run.dir with a configuration", ("config.yaml", "a new folder"), (), only("config.yaml", "a: 1\n")),
    Case("run.dir in use", ("in use by process 7 on elsewhere", "wait for it", "run.dir"), (), lock_run),
    Case("run.dir in use, to resume", ("in use by process 7 on elsewhere",), (RESUME,), lock_run),
    Case("an existing run", ("already contains this run", "run.resume=auto", "run.dir"), (), corrupted_run()),
    Case("an existing run of two ranks", ("already contains this run",), ("parallel.world_size=2",), corrupted_run()),
    Case(
        "another run, of two ranks",
        ("belongs to another run", "run.seed: 1 -> 5"),
        ("parallel.world_size=2", "run.seed=5", RESUME),
        corrupted_run(),
    ),
    *[
        Case(
            f"a finished run without a checkpoint, {resume}",
            ("finished and without a checkpoint", f"run.resume={resume} would start afresh", "set run.dir"),
            (f"run.resume={resume}", "run.num_rollout=9"),
            finished,
        )
        for resume in ("auto", "forced")
    ],
    Case("an existing run with other settings", ("run.resume=auto",), ("actor_optimizer.lr=0.5",), corrupted_run()),
    Case("metrics without a configuration", ("no config.yaml", "run.dir"), (RESUME,), only("metrics.jsonl", "")),
    *[
        Case(f"a run's configuration {name}", ("FOLDER/run", "config.yaml", "run.dir"), (RESUME,), with_config(content))
        for name, content in {
            "binary": b"\x00\xff\xfe\x80",
            "Latin-1": "run: {dir: Übung}".encode("latin-1"),
            "no YAML": b"run: {dir: [",
            "a list": b"- run\n- dir\n",
            "a number": b"7",
            "another program's": b"trainer: {total_epochs: 3}",
            "of a wrong type": b"run: {seed: many}",
            "deeply nested": b"[" * 2000 + b"]" * 2000,
        }.items()
    ],
    Case("a run's configuration empty", ("belongs to another run", "run.dir"), (RESUME,), with_config(b"")),
    Case(
        "a run's configuration a folder",
        ("no config.yaml", "run.dir"),
        (RESUME,),
        corrupted_run(lambda run: ((run / "config.yaml").unlink(), (run / "config.yaml").mkdir())),
    ),
    *identity_case("algorithm", "'ppo' -> 'grpo'", overrides=("algorithm=grpo",)),
    *identity_case("run.seed", "1 -> 5", "set these keys back", overrides=("run.seed=5",)),
    *identity_case("model.dtype", overrides=("model.dtype=bfloat16",)),
    *identity_case("model.path", overrides=("model.path=FOLDER/other",), prepare=model_elsewhere),
    *identity_case("critic.path", overrides=("critic.path=FOLDER/other",), prepare=model_elsewhere),
    *identity_case("data.train", overrides=("data.train=FOLDER/eval.jsonl",)),
    *identity_case("data.mixture_weights", "[] -> [1]", overrides=("data.mixture_weights=[1]",)),
    *identity_case("data.prompts_per_step", "4 -> 8", overrides=("data.prompts_per_step=8",)),
    *identity_case("data.shuffle", overrides=("data.shuffle=false",)),
    *identity_case("lora.rank", "0 -> 4", overrides=("lora.rank=4",)),
    Case(
        "resumed with other rows in data.train",
        ("other training prompts than these", "data.train", "run.resume=forced"),
        (RESUME,),
        corrupted_checkpoint(other_data),
    ),
    Case(
        "resumed with fewer steps than done",
        ("run.num_rollout=2", "step_000003", "is of step 3", "set it to that or more"),
        (RESUME,),
        lambda folder: (write_checkpoint(write_run(folder), 3), None)[1],
    ),
    *[
        Case(f"the only checkpoint {name}", (*NONE_COMPLETE, expected), (RESUME,), prepare)
        for name, expected, prepare in (
            (
                "empty",
                "manifest.json is missing",
                corrupted_checkpoint(lambda checkpoint: (shutil.rmtree(checkpoint), checkpoint.mkdir())),
            ),
            (
                "without manifest",
                "manifest.json is missing",
                corrupted_checkpoint(lambda checkpoint: (checkpoint / "manifest.json").unlink()),
            ),
            (
                "with an invalid manifest",
                "manifest.json is broken",
                corrupted_checkpoint(lambda checkpoint: (checkpoint / "manifest.json").write_text("{")),
            ),
            (
                "with a list as manifest",
                "manifest.json is broken",
                corrupted_checkpoint(lambda checkpoint: (checkpoint / "manifest.json").write_text("[1]")),
            ),
            (
                "with a binary manifest",
                "manifest.json is broken",
                corrupted_checkpoint(lambda checkpoint: (checkpoint / "manifest.json").write_bytes(b"\xff")),
            ),
            ("with no files", "does not list host.json", edit_manifest(lambda tree: tree.update(files={}))),
            ("with files as a list", "manifest.json is broken", edit_manifest(lambda tree: tree.update(files=[1]))),
            ("with sizes as text", "broken", edit_manifest(lambda tree: tree["files"]["host.json"].update(bytes="1"))),
            (
                "with a truncated part",
                "__0_0.distcp is truncated",
                corrupted_checkpoint(lambda checkpoint: (checkpoint / "actor/__0_0.distcp").write_text("w")),
            ),
            (
                "with changed bytes",
                "differs from its checksum",
                corrupted_checkpoint(lambda checkpoint: (checkpoint / "actor/__0_0.distcp").write_text("WEIGHTS")),
            ),
            (
                "without a part",
                "__0_0.distcp is missing",
                corrupted_checkpoint(lambda checkpoint: (checkpoint / "actor/__0_0.distcp").unlink()),
            ),
            (
                "without random states",
                "rng_00000.pt is missing",
                corrupted_checkpoint(lambda checkpoint: (checkpoint / "rng_00000.pt").unlink()),
            ),
            (
                "with truncated random states",
                "rng_00000.pt is truncated",
                corrupted_checkpoint(lambda checkpoint: (checkpoint / "rng_00000.pt").write_text("r")),
            ),
            (
                "without host.json",
                "host.json is missing",
                corrupted_checkpoint(lambda checkpoint: (checkpoint / "host.json").unlink()),
            ),
            (
                "with a folder instead of a file",
                "truncated",
                corrupted_checkpoint(
                    lambda checkpoint: ((checkpoint / "host.json").unlink(), (checkpoint / "host.json").mkdir())
                ),
            ),
        )
    ],
    Case("both checkpoints damaged", (*NONE_COMPLETE, "step_000012: host.json is missing"), (RESUME,), both_damaged),
    Case(
        "checkpoints is a file",
        ("cannot list checkpoints in FOLDER/run/checkpoints", "Not a directory"),
        (RESUME,),
        corrupted_run(lambda run: (run / "checkpoints").write_text("")),
    ),
    Case("a file at the export's path", ("run/export exists", "run.dir"), (), folder_at("run/export")),
    Case("an export over the model", ("came from", "run.dir"), (), exported_over_model),
    Case("a file at the adapter's path", ("run/adapter", "run.dir"), ("lora.rank=4",), folder_at("run/adapter")),
    Case("no disk space for the export", ("1.0 MB free", "for the export", "free space"), (), fill_disk),
    Case(
        "no disk space for checkpoints",
        ("2 x", "for checkpoints", "keep_checkpoints"),
        ("run.save_every=1",),
        fill_disk,
    ),
    Case(
        "no disk space for checkpoints without export",
        ("for checkpoints",),
        ("run.save_every=1", "run.export=false"),
        fill_disk,
    ),
]
