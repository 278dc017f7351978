"""The run folder: made, claimed and explained before anything else starts."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import warnings
from pathlib import Path
from typing import IO, Any

import yaml

from megarl.config import Config, ConfigError, to_dict

MAY_DIFFER = (
    "run.resume",
    "run.dir",
    "run.timeout_s",
    "run.keep_checkpoints",
    "track.",
    "rollout.start_timeout",
    "rollout.replay",
)
"""Keys, and beginnings of keys, that a resumed run may change: they do not touch what is computed."""

RESULTS = ("metrics.jsonl", "rollouts", "checkpoints", "export")

README = """\
This folder is one run of MegaRL. What is in it:

config.yaml      every key of the configuration as it ran; to repeat it, in the project's folder:
                 .venv/bin/python -m megarl.train <this folder>/config.yaml run.dir=...
log.txt          what the run said, with the time
logs/            what each SGLang engine said; the traceback of a rank that failed
metrics.jsonl    one line of metrics per step and per evaluation: {"step": 12, "time": ..., "rollout/reward_mean": ...}
tensorboard/     the same for TensorBoard: .venv/bin/python -m tensorboard.main --logdir <this folder>
rollouts/        step_000012.jsonl holds every conversation of step 12: turns with token ids, texts, log-probs and
                 advantages, reward, seed. Look: .venv/bin/python tools/view_rollouts.py <this folder> --step 12
checkpoints/     step_000020/ is the whole state after step 20; `run.resume=auto` continues from the newest
export/          the trained policy as a Hugging Face folder, written at the end
adapter/         with LoRA, its adapters alone, as PEFT writes them
.lock            held by the process that writes here; it may be deleted when none runs

A table and a plot of it all: .venv/bin/python tools/report.py <this folder>
"""


class RunFolder:
    """A claimed run folder; the claim ends with `release` or with the process, however it dies."""

    def __init__(self, path: Path, lock: IO[str] | None) -> None:
        self.path = path
        self._lock = lock

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def prepare(run_dir: str | Path, config: Config, resume: bool) -> RunFolder:
    """Make the folder, lock it, write config.yaml and README.txt. Called by one process of the job.

    Raises ConfigError where it cannot be written, where another job holds it, where it has results and `resume` is
    False, or where it has results of a configuration that differs in a key that matters; nothing is changed then.
    """
    path = Path(run_dir)
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = _lock(path / ".lock")
    except OSError as error:
        raise _unusable(path, error) from None
    try:
        _check_earlier_run(path, config, resume)
        text = yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)
        _write(path / "config.yaml", text)
        _write(path / "README.txt", README)
    except OSError as error:
        _close(lock)
        raise _unusable(path, error) from None
    except ConfigError:
        _close(lock)
        raise
    return RunFolder(path, lock)


def differing_keys(old: Config | dict[str, Any], new: Config | dict[str, Any]) -> list[str]:
    """`key: old -> new` for every leaf that differs and matters (see MAY_DIFFER)."""
    before, after = (_leaves(tree if isinstance(tree, dict) else to_dict(tree)) for tree in (old, new))
    return [
        f"{key}: {before.get(key)!r} -> {after.get(key)!r}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not key.startswith(MAY_DIFFER)
    ]


def _check_earlier_run(path: Path, config: Config, resume: bool) -> None:
    if not any((path / name).exists() for name in RESULTS):
        return  # new, or a start that came to nothing
    file = path / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"run folder {path} has results but no config.yaml; set run.dir to another folder")
    try:
        old = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is not valid YAML ({error}); set run.dir to another folder") from None
    differences = differing_keys(old if isinstance(old, dict) else {}, config)
    if differences:
        shown = "; ".join(differences[:8]) + (f"; and {len(differences) - 8} more" if len(differences) > 8 else "")
        raise ConfigError(
            f"run folder {path} belongs to a run of another configuration ({shown}); "
            "set run.dir to another folder, or set these keys back"
        )
    if not resume:
        raise ConfigError(
            f"run folder {path} already holds a run of this configuration; set run.resume=auto to continue it, "
            "or run.dir to another folder"
        )


def _lock(path: Path) -> IO[str]:
    lock = path.open("a+", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            lock.seek(0)
            holder = lock.read().strip() or "another process"
            lock.close()
            raise ConfigError(
                f"run folder {path.parent} is in use by {holder}; wait for it, end it, or set run.dir to another folder"
            ) from None
        warnings.warn(f"this file system has no locks ({error.strerror}): nothing keeps two jobs apart", stacklevel=3)
        return lock
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    lock.flush()
    return lock


def _close(lock: IO[str]) -> None:
    try:
        lock.close()
    except OSError:
        pass  # the disk is full, which has been said


def _write(path: Path, text: str) -> None:
    partial = path.with_suffix(".tmp")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _unusable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot write to run folder {path}: {error.strerror or error}; "
        "make room or get the right to write there, or set run.dir to another folder"
    )


def _leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        # A mapping that passes through (model.megatron, rollout.sglang) may be empty: that is a value, too.
        if isinstance(value, dict) and value:
            leaves |= _leaves(value, f"{prefix}{key}.")
        else:
            leaves[prefix + str(key)] = value
    return leaves
