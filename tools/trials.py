"""Run a configuration several times, for tools that compare the results."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megarl.config import ConfigError
from megarl.engine.engine_host import HOST_VARIABLE
from megarl.observe.tracker import read_metrics

ROOT = Path(__file__).resolve().parents[1]
MARKER = "finished"
"""File in a run folder that marks a finished run, with its configuration."""


def quickstart(folder: Path) -> list[str]:
    """Return overrides that turn a recipe into one of the quickstart's task, starting from its warm-up. Raises
    ConfigError if the folder is not that of launch/quickstart.sh."""
    for part in ("sft/export/config.json", "train.jsonl", "eval.jsonl"):
        if not (folder / part).is_file():
            raise ConfigError(
                f"{folder} has no {part}: call launch/quickstart.sh first, or give the folder it has made"
            )
    return [f"model.path={folder}/sft/export", f"data.train={folder}/train.jsonl", f"data.eval={folder}/eval.jsonl"]


def run(config: str, overrides: Sequence[str], run_dir: Path, host: str | None = None) -> dict[int, dict[str, float]]:
    """Run a configuration and return metrics by step. A finished run is not repeated; an interrupted one starts anew.
    host: where its engines are started.

    Raises SystemExit with the end of its output if it fails, ConfigError if the folder has another run.
    """
    marker, settings = run_dir / MARKER, "\n".join([config, *overrides])
    if marker.exists() and marker.read_text() != settings:
        raise ConfigError(f"{run_dir} has a run with other settings (see {marker}); name another --out, or remove it")
    if not marker.exists():
        if (run_dir / "config.yaml").is_file():
            shutil.rmtree(run_dir)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | (
            {HOST_VARIABLE: host} if host else {}
        )
        command = [sys.executable, "-W", "ignore", "-m", "megarl.train", config, *overrides, f"run.dir={run_dir}"]
        ended = subprocess.run(
            [*command, "track.progress=false"], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        if ended.returncode:
            raise SystemExit(f"{run_dir.name} has failed:\n{ended.stdout[-1500:]}{ended.stderr[-1500:]}")
        marker.write_text(settings)
    return read_metrics(run_dir)
