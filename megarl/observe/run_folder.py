"""The run folder: create, lock and describe it before anything else starts."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import stat
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import IO, Any, NamedTuple

import yaml

from megarl.config import Config, ConfigError, load_config, to_dict
from megarl.launch.restarts import read_memory_step
from megarl.observe import run_machine, user_code
from megarl.observe.rollout_log import EVALUATION_FOLDER
from megarl.observe.tracker import read_metrics
from megarl.observe.webhook import ENV_PREFIX
from megarl.parallel.policy_configs import POLICIES_FOLDER
from megarl.utils.text import one_line, write_atomically


def last_step(run: Path) -> int:
    """Return the last step with metrics; 0 if there is none or they cannot be read."""
    try:
        return max(read_metrics(run), default=0)
    except (OSError, ValueError):
        return 0


def describe_fresh_start(run: Path) -> str:
    """Return the message for a resume in a folder without checkpoints."""
    last = last_step(run)
    repeated = f"; metrics of {last} steps exist; these steps are repeated, and their rollouts removed" if last else ""
    return f"no checkpoint in the run folder yet: starting afresh{repeated}"


IDENTITY_KEYS = (
    *("algorithm", "run.seed", "model.path", "model.dtype", "data.train", "data.mixture_weights"),
    *("data.curriculum_key", "data.prompt_key", "data.label_key", "data.prompts_per_step", "data.shuffle"),
    *("lora.", "critic.path", "train.mtp_loss_coef"),
)
"""Keys and key prefixes that identify a run: what is trained, and on which data in which order. For
`train.mtp_loss_coef` only whether it is 0 matters. All other keys may change on resume and apply from there on."""

PRIVATE_MODE = 0o700
"""Mode of a run folder: only the owner may read its rollouts, weights and logs."""
UNREPORTED_KEYS = ("run.resume", "run.dir", "track.")
"""Key prefixes whose changes are not logged."""

CHECKPOINTS = "checkpoints"
RESULT_NAMES = ("metrics.jsonl", "rollouts", EVALUATION_FOLDER, POLICIES_FOLDER, CHECKPOINTS, "export")

README = files("megarl.observe").joinpath("run_folder_readme.txt").read_text(encoding="utf-8")


class Change(NamedTuple):
    """A configuration key that has changed since the run was last started."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.old!r} -> {self.new!r}"


@dataclass
class RunFolder:
    """A locked run folder. The lock ends with `release` or with the process, however it dies.

    Nothing in the folder changes before `begin`; a `release` before that restores the folder as it was.
    """

    path: Path
    is_resumed: bool
    _config: Config
    _lock: IO[str] | None
    _created: list[Path]
    """Paths created by `claim`, innermost first."""

    def begin(self, step: int = 0) -> list[Change]:
        """Write config.yaml, README.txt, machine.jsonl and the user's code, for a run that continues after step `step`.

        Return the configuration and code changes that apply from there on. Raises ConfigError if the folder cannot be
        written.
        """
        changes = check_earlier_run(self.path, self._config, self.is_resumed)
        text = yaml.safe_dump(redact_config(self._config), sort_keys=False, allow_unicode=True)
        try:
            for change in changes:
                with (self.path / "changes.jsonl").open("a", encoding="utf-8") as file:
                    record = {"step": step + 1, **change._asdict(), "time": time.time()}
                    file.write(json.dumps(record, default=str) + "\n")
            write_atomically(self.path / "config.yaml", text)
            write_atomically(self.path / "README.txt", README)
            run_machine.record(self.path, step)
            code = user_code.record(self.path, self._config, step, self.is_resumed)
        except OSError as error:
            raise _unusable(self.path, error) from None
        self._created = []
        return changes + [Change(f"{user_code.FOLDER}/{name}", old, new) for name, old, new in code]

    def release(self) -> None:
        if self._lock is not None:
            _close(self._lock)
            self._lock = None
            _remove_created(self._created)


def claim(run_dir: str | Path, config: Config, resume: bool) -> RunFolder:
    """Create and lock the folder. Called by one process of the job.

    Raises ConfigError, without changing anything, if the folder cannot be written, is locked by another job, has
    results although `resume` is False, or has results of another run (see `IDENTITY_KEYS`).
    """
    path = Path(run_dir)
    created: list[Path] = []
    lock = None
    try:
        check_earlier_run(path, config, resume)
        _create_folders(path, created)
        _restrict_access(path)
        lock_file = path / ".lock"
        if not lock_file.exists():
            created.insert(0, lock_file)
        lock = _lock(lock_file)
        check_earlier_run(path, config, resume)  # again under the lock: another job may just have ended
        _probe(path)
        if config.run.save_every and (path / CHECKPOINTS).is_dir():
            _probe(path / CHECKPOINTS)  # or else the first checkpoint would fail, hours later
        return RunFolder(path, resume and _has_results(path), config, lock, created)
    except (OSError, ConfigError) as error:
        if lock is not None:
            _close(lock)
        _remove_created(created)
        raise (_unusable(path, error) if isinstance(error, OSError) else error) from None


def check_folder(config: Config) -> None:
    """Raise the ConfigError that `claim` would raise for a folder of another run, before any process is started."""
    path = Path(config.run.dir)
    try:
        check_earlier_run(path, config, config.run.resumes)
    except OSError as error:
        raise _unusable(path, error) from None


def claim_and_begin(run_dir: str | Path, config: Config, resume: bool) -> RunFolder:
    """Do `claim` and `begin` together, for runs that do not resume from a checkpoint."""
    folder = claim(run_dir, config, resume)
    try:
        folder.begin()
    except ConfigError:
        folder.release()
        raise
    return folder


def diff_configs(old: Config, new: Config) -> list[Change]:
    """Return the keys that differ, sorted, except `UNREPORTED_KEYS`."""
    before, after = flatten(to_dict(old)), flatten(to_dict(new))
    return [
        Change(key, before.get(key), after.get(key))
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not key.startswith(UNREPORTED_KEYS)
    ]


def check_earlier_run(path: Path, config: Config, resume: bool) -> list[Change]:
    """Return the changes since the run in this folder was last started; empty if there is no such run. Read-only.

    Raises ConfigError if the folder belongs to another run, or has results although `resume` is False.
    """
    file = path / "config.yaml"
    if not _has_results(path):
        for target in (path / "README.txt", file):  # a new folder, or a start without results, which wrote both
            if target.exists() and not _is_ours(path / "README.txt"):
                raise ConfigError(
                    f"run.dir={path} is not a run folder and has a {target.name} that a run would overwrite; set "
                    "run.dir to a new folder"
                )
        return []
    if not file.is_file():
        raise ConfigError(f"run folder {path} has results but no config.yaml; set run.dir to another folder")
    try:
        old = load_config(file)
        changes = diff_configs(old, config)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"run folder {path} has results, but {file} cannot be read as their configuration "
            f"({one_line(error, 200)}); set run.dir to another folder"
        ) from None
    identity_changes = [
        change
        for change in changes
        if change.key.startswith(IDENTITY_KEYS)
        and (change.key != "train.mtp_loss_coef" or bool(change.old) != bool(change.new))
    ]
    if identity_changes and config.run.resume != "forced":
        more = f"; and {len(identity_changes) - 8} more" if len(identity_changes) > 8 else ""
        raise ConfigError(
            f"run folder {path} belongs to another run ({'; '.join(map(str, identity_changes[:8]))}{more}); set "
            "run.dir to another folder, set these keys back, or set run.resume=forced to continue with them anyway"
        )
    # Complete or not: a resume checks for completeness.
    has_checkpoints = any((path / CHECKPOINTS).glob("step_*")) or read_memory_step(path) > 0
    if not resume and has_checkpoints:
        raise ConfigError(
            f"run folder {path} already contains this run; set run.resume=auto to continue it, or run.dir to another "
            f"one"
        )
    if not resume:
        raise ConfigError(
            f"run folder {path} already contains this run, without a checkpoint from which run.resume=auto could "
            "continue it; set run.dir to another one"
        )
    has_export, has_last_step = (path / "export/config.json").is_file(), last_step(path) >= old.run.num_rollout
    if (has_export if old.run.export else has_last_step) and not has_checkpoints:
        raise ConfigError(
            f"run folder {path} already contains this run, finished and without a checkpoint (run.save_every): "
            f"run.resume={config.run.resume} would start afresh and overwrite its rollouts and its export; set run.dir "
            "to another folder, or remove this one"
        )
    return changes


def append_metrics(run: Path, step: int, metrics: Mapping[str, float]) -> None:
    """Append metrics of a step to the metrics.jsonl of a run that is not in progress.

    Raises ConfigError if it is, and OSError if the folder cannot be written.
    """
    file = run / "metrics.jsonl"
    lock = _lock(run / ".lock")
    try:
        text = file.read_bytes() if file.is_file() else b""
        separator = "\n" if text and not text.endswith(b"\n") else ""  # a crash has truncated the last line
        with file.open("a", encoding="utf-8") as stream:
            stream.write(separator + json.dumps({"step": step, "time": time.time(), **metrics}) + "\n")
    finally:
        _close(lock)


def redact_config(config: Config) -> dict[str, Any]:
    """Return the configuration without secrets: the URL in `track.webhook`, unless given as an `env:` variable."""
    tree = to_dict(config)
    if not config.track.webhook.startswith(ENV_PREFIX):
        tree["track"]["webhook"] = ""
    return tree


def _has_results(path: Path) -> bool:
    return any((path / name).exists() for name in RESULT_NAMES)


def _is_ours(readme: Path) -> bool:
    try:
        return readme.read_text(encoding="utf-8").startswith(README[:40])
    except (OSError, ValueError):
        return False


def _create_folders(path: Path, created: list[Path]) -> None:
    """Like `mkdir -p`; prepend the created folders to `created`."""
    missing = []
    while not path.exists():
        if path.is_symlink():
            raise OSError(errno.ENOENT, f"{path} is a link to {os.readlink(path)}, which does not exist")
        missing.append(path)
        path = path.parent
    if not path.is_dir():
        raise OSError(errno.ENOTDIR, f"{path} is not a folder")
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        created.insert(0, folder)
    if missing:
        missing[0].chmod(PRIVATE_MODE)  # regardless of the umask


def _restrict_access(path: Path) -> None:
    """Restrict a new run folder to its owner, regardless of the modes of files in it.

    A folder with results keeps its mode, since the user may have opened it to others.
    """
    if _has_results(path) or not stat.S_IMODE(path.stat().st_mode) & ~PRIVATE_MODE:
        return
    try:
        path.chmod(PRIVATE_MODE)
    except OSError as error:
        message = f"other users may be able to read {path}, whose mode cannot be set: {error.strerror}"
        warnings.warn(message, stacklevel=4)


def _probe(folder: Path) -> None:
    """Raise ConfigError if no file can be written in the folder."""
    probe = folder / ".probe"
    try:
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise _unusable(folder, error) from None


def _remove_created(created: list[Path]) -> None:
    for path in created:
        with contextlib.suppress(OSError):  # another job has written into it
            path.unlink() if path.name == ".lock" else path.rmdir()


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
        warnings.warn(f"this file system has no locks ({error.strerror}): two jobs could use it at once", stacklevel=3)
        return lock
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    lock.flush()
    return lock


def _close(lock: IO[str]) -> None:
    with contextlib.suppress(OSError):  # the disk is full, which has been reported
        lock.close()


def _unusable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot write to run folder {path}: {error.strerror or error}; free space or get write permission, or set "
        f"run.dir to another folder"
    )


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a configuration by `section.key`, as on the command line."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        # Pass-through mappings (model.megatron, rollout.sglang) may be empty, which counts as a value.
        is_section = isinstance(value, Mapping) and value
        leaves |= flatten(value, f"{prefix}{key}.") if is_section else {f"{prefix}{key}": value}
    return leaves
