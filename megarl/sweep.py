"""Sweep entry point: runs with different values of some keys, and one table of their results.

    megarl sweep my.yaml --grid actor_optimizer.lr=1e-6,3e-6 --grid kl.coef=0,0.001 run.dir=runs/a
    megarl sweep my.yaml --search actor_optimizer.lr=log:1e-7..1e-5 --trials 20 run.dir=runs/b
    megarl sweep my.yaml --grid kl.coef=0,0.001 --sbatch "--nodes=2" run.dir=/shared/c
    megarl sweep --table runs/a

`--grid` runs every combination, in turn or with `--sbatch` as the tasks of a Slurm array of slurm/ppo_moe.sh.
`--search` asks an Optuna study (`pip install optuna`) for each trial; several of these commands may work on one study
side by side. Every trial is a run folder in run.dir. The same command continues a sweep: trials that have finished are
not repeated.
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from megarl.config import Config, ConfigError, load_config
from megarl.config.command_line import Parser, int_in_range, run_cli
from megarl.config.strict import list_keys
from megarl.utils.text import write_atomically

LAST_STEPS = 5
"""The result of a trial is the mean of a metric over this many last steps that have it; of an evaluation the last."""
DEFAULT_METRICS = "eval/reward_greedy", "eval/reward_sampled", "rollout/reward_mean", "eval/nll"
PLAN, STUDY = "sweep.json", "study.db"
"""In run.dir: what is swept, and the Optuna study. `0007.overrides` has the overrides of trial 7, one per line, and
`0007.exit` its exit status if it was run in turn."""
MAX_TRIALS = 10_000


class Trial(NamedTuple):
    """A run of a sweep. values: of the keys that the sweep changes, as on the command line."""

    name: str
    values: Mapping[str, str]

    def overrides(self) -> list[str]:
        return [f"{key}={value}" for key, value in self.values.items()]


class Range(NamedTuple):
    """An interval that a search samples from. is_integer: whether its key takes whole numbers."""

    low: float
    high: float
    is_log: bool
    is_integer: bool


def split_values(text: str) -> list[str]:
    """Split at the commas outside of brackets and quotes: YAML values of a key."""
    parts, depth, quote = [""], 0, ""
    for char in text:
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in "[{":
            depth += 1
        elif char in "]}":
            depth -= 1
        if char == "," and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts]


def parse_grid(texts: Sequence[str]) -> dict[str, list[str]]:
    """Return the values of each key from `section.key=value,value`. Raises ConfigError."""
    grid: dict[str, list[str]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        choices = split_values(values)
        if not equals or not key or not all(choices):
            raise ConfigError(f"--grid {text}: write section.key=value,value,...")
        if key in grid or len(set(choices)) < len(choices):
            raise ConfigError(f"--grid {text}: name each key, and each of its values, once")
        grid[key] = choices
    if (count := math.prod(map(len, grid.values()))) > MAX_TRIALS:
        raise ConfigError(f"--grid has {count} combinations; a sweep has at most {MAX_TRIALS}: use --search")
    return grid


def parse_search(texts: Sequence[str]) -> dict[str, Range | list[str]]:
    """Return what each key is sampled from: `key=1e-7..1e-5`, `key=log:1e-7..1e-5` or choices `key=a,b`. Raises
    ConfigError."""
    space: dict[str, Range | list[str]] = {}
    integers = {key for key, value in list_keys(Config()) if isinstance(value, int)}
    for text in texts:
        key, equals, values = text.partition("=")
        if not equals or not key or not values or key in space:
            raise ConfigError(
                f"--search {text}: write section.key=low..high, log:low..high or value,value, each key once"
            )
        is_log, interval = values.startswith("log:"), values.removeprefix("log:")
        low, dots, high = interval.partition("..")
        if not dots:
            if is_log:
                raise ConfigError(f"--search {text}: write log:low..high")
            space[key] = split_values(values)
            continue
        try:
            ends = float(low), float(high)
        except ValueError:
            ends = math.nan, math.nan
        if not (-1e300 < ends[0] < ends[1] < 1e300) or is_log and ends[0] <= 0:
            above = " above 0" if is_log else ""
            raise ConfigError(f"--search {text}: an interval is low..high, two numbers{above}, the lower first")
        if key in integers and not all(end.is_integer() for end in ends):
            raise ConfigError(f"--search {text}: {key} takes whole numbers")
        space[key] = Range(*ends, is_log, key in integers)
    return space


def list_trials(grid: Mapping[str, Sequence[str]]) -> list[Trial]:
    """Return a trial for each combination, the last key fastest."""
    combinations = itertools.product(*grid.values())
    return [Trial(f"{number:04}", dict(zip(grid, values, strict=True))) for number, values in enumerate(combinations)]


def result_of(run_dir: Path, metric: str) -> float | None:
    """Return a trial's result, or None if it has none. metric: empty for the first of `DEFAULT_METRICS` that exists."""
    from megarl.observe.tracker import read_metrics  # imports torch

    steps = read_metrics(run_dir)
    names = [metric] if metric else DEFAULT_METRICS
    for name in names:
        values = [step[name] for step in steps.values() if name in step]
        if values:
            return statistics.fmean(values[-LAST_STEPS:]) if not name.startswith("eval/") else values[-1]
    return None


def exit_status_of(folder: Path, name: str) -> int | None:
    """Return the exit status of a trial that has ended; None if it has not, or has failed in a Slurm array."""
    lines = _read(folder / name / "log.txt").splitlines()
    ends = [" done: " in line for line in lines if "  run folder " in line or "  done: " in line]
    status = _read(folder / f"{name}.exit").strip()
    return 0 if ends and ends[-1] else int(status) if status else None


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


def run_to_end(command: Sequence[str]) -> int:
    """Run a trial and return its exit status.

    Ctrl-C reaches the trial, too: this waits until it has saved and ended, and then raises KeyboardInterrupt.
    """
    process, is_interrupted = subprocess.Popen(command), False
    while True:
        try:
            status = process.wait()
            break
        except KeyboardInterrupt:
            is_interrupted = True
    if is_interrupted:
        raise KeyboardInterrupt
    return status


class Sweep:
    """A folder of trials of one configuration. Raises ConfigError if the configuration is invalid."""

    def __init__(self, config: str, overrides: Sequence[str], metric: str = "", minimizes: bool = False) -> None:
        self.config, self.overrides, self.metric, self.minimizes = config, list(overrides), metric, minimizes
        self.folder = Path(load_config(config, overrides).run.dir)
        self._train, self._sbatch = run_to_end, subprocess.run

    def begin(self, keys: Mapping[str, Any]) -> None:
        """Claim the folder for a sweep over `keys`, which the same sweep may continue.

        Raises ConfigError if the folder has another sweep or other files.
        """
        source = {"config": str(Path(self.config).resolve()), "overrides": self.overrides}
        plan = source | {"keys": keys, "metric": self.metric, "minimizes": self.minimizes}
        plan = json.loads(json.dumps(plan))  # as it comes back from the file
        file = self.folder / PLAN
        if file.is_file():
            if json.loads(file.read_text(encoding="utf-8")) != plan:
                raise ConfigError(f"run.dir: {self.folder} has another sweep ({file}); name another folder")
            return
        if self.folder.is_dir() and any(self.folder.iterdir()):
            raise ConfigError(f"run.dir: {self.folder} is not empty and has no sweep; name another folder")
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(plan, indent=2) + "\n")

    def check(self, trials: Iterable[Trial]) -> None:
        """Raise ConfigError for the first trial whose configuration is invalid."""
        for trial in trials:
            load_config(self.config, self.trial_overrides(trial))

    def trial_overrides(self, trial: Trial) -> list[str]:
        rest = [text for text in self.overrides if not text.startswith(("run.dir=", "run.resume="))]
        return [*rest, *trial.overrides(), f"run.dir={self.folder / trial.name}", "run.resume=auto"]

    def run(self, trial: Trial) -> int:
        """Run or continue a trial unless it has finished, and return its exit status.

        Raises KeyboardInterrupt if the trial was interrupted.
        """
        if exit_status_of(self.folder, trial.name) == 0:
            return 0
        print(f"trial {trial.name}: {' '.join(trial.overrides())}", flush=True)
        self._write_overrides(trial)
        command = [sys.executable, "-m", "megarl.train", self.config, *self.trial_overrides(trial)]
        status = self._train(command)
        write_atomically(self.folder / f"{trial.name}.exit", f"{status}\n")
        return status

    def _write_overrides(self, trial: Trial) -> None:
        lines = "".join(f"{text}\n" for text in self.trial_overrides(trial))
        write_atomically(self.folder / f"{trial.name}.overrides", lines)

    def submit(self, trials: Sequence[Trial], options: Sequence[str]) -> str:
        """Submit the trials that have not finished as a Slurm array, and return what sbatch prints."""
        pending = [trial for trial in trials if exit_status_of(self.folder, trial.name) != 0]
        if not pending:
            return "all trials have finished"
        for trial in pending:
            self._write_overrides(trial)
        tasks = ",".join(str(int(trial.name)) for trial in pending)
        script = Path("slurm/ppo_moe.sh")
        if not script.is_file():
            raise ConfigError(f"--sbatch: no {script} here; start it from the project's folder")
        command = ["sbatch", f"--array={tasks}", *options, str(script), self.config]
        environment = dict(os.environ, MEGARL_SWEEP=str(self.folder.resolve()))
        try:
            process = self._sbatch(command, env=environment, capture_output=True, text=True)
        except FileNotFoundError:
            raise ConfigError("--sbatch: there is no sbatch on this machine; leave it out") from None
        if process.returncode:
            raise ConfigError(f"--sbatch: {' '.join(process.stderr.split())[:300]}")
        return str(process.stdout).strip()

    def search(self, space: Mapping[str, Range | list[str]], count: int) -> list[Trial]:
        """Run trials that an Optuna study chooses, until it has `count`, and return this command's."""
        try:
            import optuna
        except ModuleNotFoundError:
            raise ConfigError("--search needs Optuna: pip install optuna") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(
            storage=f"sqlite:///{self.folder / STUDY}",
            study_name="sweep",
            load_if_exists=True,
            direction="minimize" if self.minimizes else "maximize",
        )
        trials = list[Trial]()
        states = optuna.trial.TrialState
        while len(study.get_trials(deepcopy=False, states=(states.COMPLETE, states.RUNNING, states.FAIL))) < count:
            asked = study.ask()
            trial = Trial(f"{asked.number:04}", {key: suggest(asked, key, part) for key, part in space.items()})
            trials.append(trial)
            try:
                self.check([trial])
                status = self.run(trial)
            except KeyboardInterrupt:  # not counted; the next command begins with these values
                study.tell(asked, state=states.PRUNED)
                study.enqueue_trial(asked.params)
                (self.folder / f"{trial.name}.overrides").unlink(missing_ok=True)
                raise
            except ConfigError as error:  # an invalid combination; the others may be valid
                print(f"trial {trial.name}: {error}", file=sys.stderr)
                status = 1
            result = result_of(self.folder / trial.name, self.metric) if status == 0 else None
            if result is None or not math.isfinite(result):
                study.tell(asked, state=states.FAIL)
            else:
                study.tell(asked, result)
        return trials

    def print_table(self) -> int:
        """Print the trials, the best first, write `sweep.csv`, and return how many did not finish."""
        return print_table(self.folder, self.metric, self.minimizes)


def suggest(trial: Any, key: str, part: Range | list[str]) -> str:
    """Return the value of a key that Optuna suggests, as on the command line."""
    if isinstance(part, list):
        return str(trial.suggest_categorical(key, part))
    if part.is_integer:
        return str(trial.suggest_int(key, int(part.low), int(part.high), log=part.is_log))
    return repr(float(trial.suggest_float(key, part.low, part.high, log=part.is_log)))


def print_table(folder: Path, metric: str = "", minimizes: bool = False) -> int:
    """Print the trials in a sweep's folder, the best first, write `sweep.csv`, and return how many did not finish."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    rows = list[tuple[str, Mapping[str, str], float | None, str]]()
    unfinished = 0
    for file in sorted(folder.glob("*.overrides")):
        status = exit_status_of(folder, file.stem)
        unfinished += status != 0
        state = "finished" if status == 0 else "not finished" if status is None else f"failed, exit {status}"
        rows.append((file.stem, read_values(file), result_of(folder / file.stem, metric), state))
    sign = 1 if minimizes else -1
    rows.sort(key=lambda row: (row[2] is None or not math.isfinite(row[2]), sign * (row[2] or 0.0), row[0]))
    keys = list(dict.fromkeys(key for _, values, _, _ in rows for key in values))
    name = metric or "result"
    table = Table(box=box.SIMPLE_HEAD, title=f"{folder}: {len(rows)} trials", title_justify="left")
    for column in ("trial", *keys, name, "state"):
        table.add_column(column, overflow="fold")
    stream = io.StringIO()
    writer = csv.writer(stream)
    writer.writerow(["trial", *keys, name, "state"])
    for trial, values, result, state in rows:
        cells = [trial, *(values.get(key, "") for key in keys)]
        table.add_row(*cells, "-" if result is None else f"{result:.4g}", state)
        writer.writerow([*cells, "" if result is None else repr(result), state])
    write_atomically(folder / "sweep.csv", stream.getvalue())
    Console(highlight=False).print(table)
    return unfinished


def read_values(file: Path) -> dict[str, str]:
    """Return the values of a trial's keys that the sweep changes. file: its overrides."""
    keys = json.loads((file.parent / PLAN).read_text(encoding="utf-8"))["keys"]
    pairs = (line.partition("=")[::2] for line in file.read_text(encoding="utf-8").splitlines())
    return {key: value for key, value in pairs if key in keys}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(__doc__, prog="megarl sweep")
    parser.add_argument("config", nargs="?", help="a YAML file")
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value", help="for all trials")
    parser.add_argument("--grid", action="append", default=[], metavar="KEY=VALUE,VALUE", help="all values of a key")
    parser.add_argument(
        "--search", action="append", default=[], metavar="KEY=LOW..HIGH", help="values that Optuna chooses"
    )
    parser.add_argument("--trials", type=int_in_range(1, MAX_TRIALS), default=20, metavar="N", help="of a search")
    parser.add_argument(
        "--metric", default="", help="result of a trial (default: the held-out reward, else the reward)"
    )
    parser.add_argument("--minimize", action="store_true", help="the lowest result is the best")
    parser.add_argument("--sbatch", metavar="OPTIONS", help="submit the grid as a Slurm array with these options")
    parser.add_argument("--table", type=Path, metavar="FOLDER", help="print the table of a sweep, start nothing")
    options: argparse.Namespace = parser.parse_intermixed_args(arguments)
    if options.table is None:
        if options.config is None:
            parser.error("name a configuration file, for example configs/quickstart.yaml")
        if bool(options.grid) == bool(options.search):
            parser.error("name the keys to change by --grid or by --search")
        if options.search and options.sbatch is not None:
            parser.error("--sbatch is for --grid: a search chooses each trial by the results of others")
    return options


def sweep(options: argparse.Namespace, make: Callable[..., Sweep] = Sweep) -> int:
    if options.table is not None:
        if not (options.table / PLAN).is_file():
            raise ConfigError(f"--table: {options.table} has no sweep")
        plan = json.loads((options.table / PLAN).read_text(encoding="utf-8"))
        print_table(options.table, options.metric or plan["metric"], plan["minimizes"])
        return 0
    job = make(options.config, options.overrides, options.metric, options.minimize)
    if options.search:
        space = parse_search(options.search)
        job.begin({key: part if isinstance(part, list) else part._asdict() for key, part in space.items()})
        with told_when_interrupted():
            job.search(space, options.trials)
        return 1 if job.print_table() else 0
    grid = parse_grid(options.grid)
    trials = list_trials(grid)
    job.check(trials)
    job.begin(grid)
    if options.sbatch is not None:
        print(job.submit(trials, shlex.split(options.sbatch)))
        return 0
    with told_when_interrupted():
        for trial in trials:
            job.run(trial)
    return 1 if job.print_table() else 0


@contextmanager
def told_when_interrupted() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)
        raise


def main(arguments: Sequence[str] | None = None) -> int:
    return run_cli(lambda: sweep(parse(arguments)))


if __name__ == "__main__":
    sys.exit(main())
