"""Replay a recorded step of a run from the checkpoint before it, without engines, optionally in a debugger.

    .venv/bin/python tools/replay_step.py RUN_DIR --step 7 [--break lab.losses:my_loss] [--pdb] [--alone] [KEY=VALUE]

The step gets its recorded rollouts (`rollout.replay`) and the models, optimizers and random states of the newest
checkpoint before it; steps in between are replayed, too. In the same layout every metric equals that of the run bit for
bit; the end of the output says whether it does. RUN_DIR stays as it is: output goes to RUN_DIR/replays/.

`--break` stops when the step enters that function, or at FILE.py:LINE; a `breakpoint()` in your own code stops in that
step, too. `--pdb` opens the debugger where the step fails. With several ranks the first one is in the debugger, and the
others wait as long as it takes. `--alone` runs the step in one process, whatever the layout was.
"""

from __future__ import annotations

import json
import os
import pdb
import re
import shutil
import sys
import time
import traceback
from bdb import BdbQuit
from collections.abc import Sequence
from contextlib import suppress
from functools import reduce
from inspect import unwrap
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from megarl.config import Config, ConfigError, from_dict, load_config, plain_yaml, plugins, to_dict
from megarl.config.command_line import Parser, int_in_range, run_cli
from megarl.observe.rollout_log import recorded_steps
from megarl.observe.tracker import read_metrics

PATIENT = "run.distributed_timeout_s=2000000"
"""Override for ranks that wait for one in a debugger: the maximum timeout, 23 days."""
SINGLE_RANK = ("parallel={world_size: 1}", "placement={}", "critic.parallel={}")
_STEP = re.compile(r"step_(\d{6,12})")
UNEQUAL = ("time", "time/", "perf/")
"""Prefixes of metrics that differ between runs."""
ENDED, FAILED = "ended", "failed"
"""Files in the folder of a replay that report the state of its first rank."""
SOON = 50
"""Tenths of a second within which other ranks see one of these files."""


class ReplayRequest(NamedTuple):
    """The requested replay. folder: of the replay, in the run's folder."""

    run: Path
    step: int
    stop_at: str
    pdb: bool
    alone: bool
    overrides: tuple[str, ...]
    folder: Path


# --- the configuration ----------------------------------------------------------------------------------------


def load_recorded_config(run: Path, step: int) -> Config:
    """Return the run's configuration at a step, without changes made when the run was resumed after it."""
    config = load_config(run / "config.yaml")
    tree = to_dict(config)
    try:
        lines = (run / "changes.jsonl").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return config
    for line in reversed(lines):
        try:
            change = json.loads(line)
            is_later, (*path, leaf) = int(change["step"]) > step, change["key"].split(".")
        except (ValueError, LookupError, TypeError, AttributeError):
            raise ConfigError(f"{run}/changes.jsonl: no change of a key: {line[:80]!r}") from None
        if is_later:
            section: Any = reduce(lambda tree, name: tree.setdefault(name, {}), path, tree)
            section[leaf] = change["old"]
    return from_dict(tree)


def replay_config(request: ReplayRequest) -> Config:
    """Return the configuration of the replay: that of the run, without engines and without anything after the step."""
    overrides = [
        f"run.dir={request.folder}",
        f"rollout.replay={request.run}",
        "run.resume=auto",
        *("run.save_every=0", "run.eval_every=0", "run.export=false", PATIENT),
        *("track.progress=false", "track.save_rollouts=false", "track.trackers=[]"),
        *(SINGLE_RANK if request.alone else ()),
    ]
    tree = to_dict(load_recorded_config(request.run, request.step))
    if request.alone:
        for role in tree["roles"].values():
            role.pop("parallel", None)
    sections = {
        name: f"{name}.{next(iter(value))}" for name, value in tree.items() if isinstance(value, dict) and value
    }
    return from_dict(plain_yaml.apply_overrides(tree, [*overrides, *request.overrides], sections))


def checkpoints_before(run: Path, step: int) -> list[Path]:
    """Return the checkpoints before a step, the oldest first."""
    folders = [(_STEP.fullmatch(path.name), path) for path in (run / "checkpoints").glob("step_*") if path.is_dir()]
    return sorted(path for match, path in folders if match and int(match[1]) < step)


def check_step(run: Path, step: int) -> None:
    """Raise ConfigError for a step that the run has not reached."""
    if recorded := recorded_steps(run):
        if step not in recorded:
            raise ConfigError(
                f"--step {step}: {run} has recorded steps {recorded[0]} to {recorded[-1]}; name one of them"
            )
    elif (
        last := max(read_metrics(run), default=0)
    ) < step - 1:  # the step after the last one may be the one that failed
        raise ConfigError(f"--step {step}: {run} has come to step {last}; name one up to {last + 1}")


def prepare(run: Path, step: int) -> Path:
    """Create a folder in the state of the run's before the step: its configuration, and links to its checkpoints."""
    for number in range(1, 10**6):
        folder = run / "replays" / f"step_{step:06d}-{number}"
        try:
            folder.mkdir(parents=True)
            break
        except FileExistsError:
            continue
    checkpoints = checkpoints_before(run, step)
    if checkpoints:
        (folder / "checkpoints").mkdir()
        (folder / "config.yaml").write_bytes((run / "config.yaml").read_bytes())
    for path in checkpoints:
        (folder / "checkpoints" / path.name).symlink_to(path.resolve())
    return folder


def announce(request: ReplayRequest) -> None:
    checkpoints = checkpoints_before(request.run, request.step)
    first = int(checkpoints[-1].name.removeprefix("step_")) + 1 if checkpoints else 1
    start = f"{checkpoints[-1].name}" if checkpoints else "the start of the run, as there is no checkpoint before it"
    between = f", with the steps from {first} on" if first < request.step else ""
    print(f"step {request.step} of {request.run}, from {start}{between}, in {request.folder}", flush=True)


# --- the debugger ---------------------------------------------------------------------------------------------


class Debugger(pdb.Pdb):
    """A debugger that continues until a breakpoint."""

    def __init__(self) -> None:
        super().__init__(nosigint=True)

    def stop_at(self, place: str) -> None:
        """Set a breakpoint at `module:function`, also of a class, or `FILE.py:LINE`. Raises ConfigError."""
        self.clear_all_breaks()  # type: ignore[no-untyped-call]  # which a process shares
        file, _, line = place.rpartition(":")
        if line.isdecimal():
            problem = self.set_break(str(Path(file).resolve()), int(line))
        else:
            module, _, name = place.partition(":")
            first, *attributes = name.split(".")
            function = reduce(
                lambda of, part: getattr(of, part, None), attributes, plugins.load(f"{module}:{first}", "--break")
            )
            code = getattr(unwrap(function), "__code__", None) if callable(function) else None
            if code is None:
                raise ConfigError(f"--break {place} is no function that is written in Python")
            problem = self.set_break(code.co_filename, code.co_firstlineno, funcname=code.co_name)
        if problem:
            raise ConfigError(f"--break {place}: {problem}")

    def begin(self) -> None:
        """Start tracing, for functions called from now on."""
        self.reset()
        self.botframe: Any = sys._getframe()
        self.set_continue()  # type: ignore[no-untyped-call]
        if self.breaks:
            sys.settrace(self.trace_dispatch)

    def open_debugger(self) -> None:
        """Stop at the caller, like `breakpoint()`."""
        frame: FrameType | None = sys._getframe(1)
        self.set_trace(frame)


def ignore_breakpoint() -> None:
    """Replace `breakpoint()` on ranks without a debugger, and in earlier steps."""


# --- the step -------------------------------------------------------------------------------------------------


def run_replay(request: ReplayRequest) -> int:
    """Run the replay as one of the ranks, or as the only one."""
    from megarl.flow import HybridFlow
    from megarl.launch import exit_status
    from megarl.parallel import rendezvous

    is_first_rank = rendezvous.read_launch_env().rank == 0
    debugger = Debugger()
    if request.stop_at:
        debugger.stop_at(request.stop_at)  # on all ranks, so that all raise the same error

    class Replayed(HybridFlow):
        def begin_step(self) -> None:
            super().begin_step()
            if is_first_rank and self.step == request.step and "controller" in vars(self):
                sys.breakpointhook = debugger.open_debugger
                debugger.begin()

    sys.breakpointhook = ignore_breakpoint
    try:
        Replayed(replay_config(request)).run(until=request.step)
    except BdbQuit:
        print("left the debugger", flush=True)
    except BaseException as error:  # noqa: B036  the end of the program
        sys.settrace(None)
        status = finish(request, error, is_first_rank)
        return exit_status.report_error(error) if status is None else status
    finally:
        sys.settrace(None)
        if is_first_rank:
            (request.folder / ENDED).touch()
    if is_first_rank:
        compare(request)
    return 0


def finish(request: ReplayRequest, error: BaseException, is_first_rank: bool) -> int | None:
    """Open the debugger on an error; other ranks wait until it ends. Return the exit status, None if the error
    determines it."""
    from megarl.launch import exit_status

    if isinstance(error, exit_status.ORDERLY_EXITS):
        return None
    if is_first_rank:
        if request.pdb:
            (request.folder / FAILED).touch()
            traceback.print_exception(error)
            pdb.post_mortem(error.__traceback__)
        return None
    for _ in range(SOON):  # if the first rank has ended or fails, too; otherwise the error is this rank's own
        while (request.folder / FAILED).exists() and not (request.folder / ENDED).exists():
            time.sleep(0.1)
        if (request.folder / ENDED).exists():
            return 0
        time.sleep(0.1)
    return None


def compare(request: ReplayRequest) -> None:
    """Print how far the step's metrics agree with those of the run."""
    was, now = figures(request.run, request.step), figures(request.folder, request.step)
    if was is None or now is None:
        print(f"{request.run} has no figures of step {request.step}, which did not come to its end")
        return
    names = [name for name in sorted(was.keys() & now.keys()) if not name.startswith(UNEQUAL)]
    differing = [name for name in names if was[name] != now[name] and not was[name] != was[name] != now[name]]
    for name in differing:
        print(f"{name}: {was[name]!r} in the run, {now[name]!r} now")
    same = len(names) - len(differing)
    print(f"{same} of {len(names)} figures of step {request.step} are bit for bit those of the run", flush=True)


def figures(run: Path, step: int) -> dict[str, Any] | None:
    """Return the last metrics of a completed step."""
    try:
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return None
    metrics = None
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue  # a line cut off by a full disk
        if isinstance(row, dict) and row.get("step") == step and "time/step" in row:
            metrics = row
    return metrics


def launch(request: ReplayRequest, config: Config) -> int:
    """Run this program as all of its ranks, on this machine."""
    from megarl.launch import launcher
    from megarl.parallel.rendezvous import serve_local_store

    world = config.parallel.world_size
    if world > config.parallel.ranks_per_node:
        raise ConfigError(
            f"the run had {world} ranks on machines of {config.parallel.ranks_per_node}, and this takes a step on one "
            "machine: add --alone"
        )
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    arguments = [str(request.run), "--step", str(request.step), "--folder", str(request.folder)]
    arguments += ["--break", request.stop_at] if request.stop_at else []
    arguments += ["--pdb"] * request.pdb + ["--alone"] * request.alone
    ranks = launcher.Launch((sys.executable, __file__, *arguments, *request.overrides), world, saves_on_sigterm=False)
    with launcher.record_signals(ranks.pending), serve_local_store() as place:
        end, _ = ranks.run(place)
    if end.text:
        print(end.text, file=sys.stderr, flush=True)
    return end.status


def main(arguments: Sequence[str]) -> int:
    parser = Parser(__doc__)
    parser.add_argument("run", type=Path, metavar="RUN_DIR")
    parser.add_argument("--step", type=int_in_range(), required=True)
    parser.add_argument("--break", dest="stop_at", default="", metavar="MODULE:FUNCTION")
    parser.add_argument("--pdb", action="store_true", help="look at the place where it fails")
    parser.add_argument("--alone", action="store_true", help="in one process")
    parser.add_argument("--folder", type=Path, help="of a replay that was begun, for its ranks")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_intermixed_args(arguments)
    run, step = options.run, options.step
    if not (run / "config.yaml").is_file():
        raise ConfigError(f"{run} is not a run folder: it has no config.yaml")
    if options.folder is None:
        check_step(run, step)
    fields = run, step, options.stop_at, options.pdb, options.alone, tuple(options.overrides)
    if options.folder is not None:
        return run_replay(ReplayRequest(*fields, options.folder))
    from megarl.dry_run.validation import validate

    if options.stop_at:
        Debugger().stop_at(options.stop_at)
    request = ReplayRequest(*fields, prepare(run, step))
    try:
        config = replay_config(request)
        validate(config, until=step).raise_errors()
        announce(request)
        return run_replay(request) if config.parallel.world_size == 1 else launch(request, config)
    except ConfigError:
        shutil.rmtree(request.folder)  # nothing was produced; its checkpoints are links
        with suppress(OSError):
            request.folder.parent.rmdir()  # if this was the first replay
        raise


if __name__ == "__main__":
    sys.exit(run_cli(lambda: main(sys.argv[1:])))
