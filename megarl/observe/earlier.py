"""How far the run got that a run folder holds, where no checkpoint says so."""

from __future__ import annotations

from pathlib import Path

from megarl.config import Config
from megarl.observe.tracker import read_metrics


def last_step(run: Path) -> int:
    """The last step that has figures; 0 where none has, or they cannot be read."""
    try:
        return max(read_metrics(run), default=0)
    except (OSError, ValueError):
        return 0


def afresh(run: Path) -> str:
    """What is said of a run that is asked to go on in this folder, which has no checkpoint."""
    lost = last_step(run)
    again = (
        f"; there are figures of {lost} steps, which are taken again, and their rollouts are removed" if lost else ""
    )
    return f"no checkpoint in the run folder yet: starting afresh{again}"


def has_checkpoints(run: Path) -> bool:
    """Whole ones or others: which of them are, a resume says."""
    return any((run / "checkpoints").glob("step_*"))


def is_finished(run: Path, config: Config) -> bool:
    """Whether the run of this configuration has come to its end in this folder: there is what it exports or, where it
    exports nothing, its last step has figures."""
    if config.run.export:
        return (run / "export" / "config.json").is_file()
    return last_step(run) >= config.run.num_rollout
