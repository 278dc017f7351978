"""What a step costs on the host outside of model, optimizer and engine: seconds by part, bytes sent, memory.

    .venv/bin/python tools/bench_flow.py [--ranks 2 4 8] [--sequences 512] [--lengths 2048-8192] [--turns 1]
        [--controller ppo] [--routing LAYERS TOPK] [--against fb96440]

Real controllers, batches, workers, packing, deliveries and rollout log, on processes of this machine; the engines'
answers are random arrays and the models are played (`flow/ranks.py`). For each number of ranks the same batch, in steps
at a quarter of it, half of it and all of it: seconds are medians over the repeats, of the slowest rank, waits for
others among them; those of a processor, on the rank where they are most, do not depend on how many processors there
are. `from a line`: how far the three sizes are from what is linear in their tokens. `sent` is what a rank writes to
sockets and to memory shared with others in a step, without the log; `memory` what all ranks together hold at most (sum
of PSS) above what they had before there were rollouts.

--against checks out another revision into a folder of its own and lets it do the same after this one.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from flow import planned
from flow.answers import SIZES, Shape, total_tokens
from local_ranks import ROOT, run
from rich import box
from rich.console import Console
from rich.table import Table

from megarl.config.command_line import Parser, check_writable_file, int_in_range, run_cli
from megarl.config.strict import ConfigError

PLAYED = "model"
EVERY_S = 0.03
"""Seconds between two looks at the memory while it is watched."""


class Watch:
    """Bytes of all ranks together, by what the ranks say that they are doing."""

    def __init__(self) -> None:
        self._label, self.found = Path(), {}  # type: ignore[var-annotated]
        self._over = threading.Event()

    def look_into(self, folder: Path) -> None:
        """For what the ranks say."""
        self._label = folder / "label"

    def __call__(self, pids: Sequence[int]) -> None:
        threading.Thread(target=self._look, args=(pids,), daemon=True).start()

    def _look(self, pids: Sequence[int]) -> None:
        while not self._over.wait(EVERY_S):
            label = self._label.read_text() if self._label.exists() else ""
            if label:
                held = sum(map(pss, pids))
                self.found.setdefault(label, []).append(held)

    def result(self) -> dict[str, int]:
        """Bytes of the rollouts, at most in a step, and while they are recorded with the batch still there, above what
        there was before; 0 for what was over before it was looked at."""
        self._over.set()
        before = min(self.found["baseline"])
        most = {label: max(held) - before for label, held in self.found.items()}
        return {label: most.get(label, 0) for label in ("rollouts", "step", "log")}


def pss(pid: int) -> int:
    """Bytes of a process, its share of those that it has in common with others."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:  # it has ended
        return 0
    return sum(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("Pss:"))


def ranks_of(order: dict[str, Any], root: Path = ROOT, watch: Watch | None = None) -> list[dict[str, Any]]:
    """What each rank found. Without `watch` nobody looks at their memory from outside."""
    with tempfile.TemporaryDirectory(prefix="bench_flow_") as folder:
        if watch is not None:
            watch.look_into(Path(folder))
        script = str(Path(__file__).with_name("flow_rank.py"))
        found: list[dict[str, Any]] = run(
            [script, json.dumps({**order, "folder": folder})], order["ranks"], 7200.0, root, watch
        )
        return found


def measured(order: dict[str, Any], root: Path) -> dict[str, Any]:
    """Figures of a revision at some number of ranks."""
    watch = Watch()
    by_rank = ranks_of(order, root, watch)
    memory = watch.result()
    found = figures(by_rank, memory)
    return found if order["before"] else found | {"beside": planned.beside(order, by_rank)}


def figures(by_rank: Sequence[dict[str, Any]], memory: dict[str, int]) -> dict[str, Any]:
    """Of what each rank found: by size, medians of the repeats, those of the slowest rank, and of bytes the most."""
    found: dict[str, Any] = {"memory": memory}
    for size in SIZES:
        steps = [rank[size] for rank in by_rank]
        parts = [medians([step["parts"] for step in rank]) for rank in steps]
        slowest = max(parts, key=lambda found: sum(found.values()))
        found[size] = {
            "parts": slowest,
            "seconds": sum(slowest.values()),
            "busy": max(statistics.median(step["busy"] for step in rank) for rank in steps),
            "sent": max(statistics.median(step["sent"] for step in rank) for rank in steps),
            "sent_by_all": sum(statistics.median(step["sent"] for step in rank) for rank in steps),
            "tokens": steps[0][0]["tokens"],
            "metrics": steps[0][-1]["metrics"],
        }
    return found


def medians(repeats: Sequence[dict[str, float]]) -> dict[str, float]:
    """Seconds by part, without what is played."""
    names = sorted({name for step in repeats for name in step} - {PLAYED})
    return {name: statistics.median(step.get(name, 0.0) for step in repeats) for name in names}


@contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """A folder with another revision of this repository, which goes again."""
    folder = Path(tempfile.mkdtemp(prefix="bench_flow_")) / "before"
    made = git("worktree", "add", "--detach", str(folder), revision)
    if made.returncode:
        raise ConfigError(f"--against {revision}: {made.stderr.strip().splitlines()[-1]}")
    try:
        yield folder
    finally:
        git("worktree", "remove", "--force", str(folder))
        shutil.rmtree(folder.parent, ignore_errors=True)


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    if shutil.which("git") is None:
        raise ConfigError("--against: git is not installed, by which another revision is checked out; install it")
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)


def table_of(found: dict[str, dict[int, Any]]) -> Table:
    """Columns: a revision at some number of ranks. Rows: seconds by part, and what else there is."""
    columns = [(name, world, figures) for name, by_world in found.items() for world, figures in by_world.items()]
    table = Table("", *(f"{name}\n{world} ranks" for name, world, _ in columns), box=box.SIMPLE)
    whole = [figures["full"] for _, _, figures in columns]
    for part in sorted({part for one in whole for part in one["parts"]}):
        table.add_row(f"{part}, s", *(f"{one['parts'].get(part, 0.0):.3f}" for one in whole))
    table.add_section()
    table.add_row("host seconds of a step, slowest rank", *(f"{one['seconds']:.2f}" for one in whole), style="bold")
    table.add_row("of a processor, most of a rank", *(f"{one['busy']:.2f}" for one in whole))
    table.add_row("tokens/s", *(f"{one['tokens'] / one['seconds']:,.0f}" for one in whole))
    table.add_row("a token's over a quarter's", *(f"{growth(figures):.2f}" for _, _, figures in columns))
    for kind in ("seconds", "busy"):
        lines = [line_of(figures, kind) for _, _, figures in columns]
        what = "of a processor" if kind == "busy" else "of the slowest rank"
        table.add_row(f"{what}, ms a million tokens", *(f"{1e9 * slope:.0f}" for slope, _, _ in lines))
        table.add_row("  ms of none", *(f"{1e3 * start:.0f}" for _, start, _ in lines))
        table.add_row("  from a line", *(f"{off:.1%}" for _, _, off in lines))
    table.add_row("sent, most of a rank, MB", *(f"{one['sent'] / 1e6:.1f}" for one in whole))
    table.add_row("sent by all ranks, MB", *(f"{one['sent_by_all'] / 1e6:.1f}" for one in whole))
    table.add_row("memory: rollouts, MB", *(f"{one['memory']['rollouts'] / 1e6:.0f}" for _, _, one in columns))
    table.add_row("memory: most in a step, MB", *(f"{one['memory']['step'] / 1e6:.0f}" for _, _, one in columns))
    table.add_row("memory: recording it, MB", *(f"{one['memory']['log'] / 1e6:.0f}" for _, _, one in columns))
    return table


def growth(figures: dict[str, Any]) -> float:
    """A processor's seconds for a token of all sequences over those of a quarter of them: 1 where cost grows as the
    tokens do, below that where some of it does not grow."""
    few, full = figures["quarter"], figures["full"]
    return float(full["busy"] / full["tokens"] / (few["busy"] / few["tokens"]))


def line_of(figures: dict[str, Any], kind: str) -> tuple[float, float, float]:
    """Seconds a token and seconds of no token, by least squares over the sizes, and how far the one that fits worst is
    from there, as a share of it."""
    tokens = np.array([figures[size]["tokens"] for size in SIZES], float)
    seconds = np.array([figures[size][kind] for size in SIZES], float)
    slope, start = np.polyfit(tokens, seconds, 1)
    return float(slope), float(start), float(np.abs(slope * tokens + start - seconds).max() / seconds.max())


def different(one: dict[str, float], other: dict[str, float]) -> list[str]:
    """Metrics that two revisions have in common and say differently, beyond rounding; none of time."""
    common = sorted(name for name in one.keys() & other.keys() if not name.startswith(("time/", "perf/")))
    return [name for name in common if abs(one[name] - other[name]) > 1e-4 * max(1.0, abs(one[name]))]


def main() -> int:
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--ranks", type=int_in_range(), nargs="+", default=[8], help="numbers of ranks, one after another"
    )
    parser.add_argument("--sequences", type=int_in_range(), default=512)
    parser.add_argument("--samples", type=int_in_range(), default=8, help="of a prompt")
    parser.add_argument("--lengths", default="2048-8192", help="tokens: 2048-8192, 32768 or lognormal")
    parser.add_argument("--turns", type=int_in_range(), default=1)
    parser.add_argument("--routing", type=int_in_range(), nargs=2, default=(0, 0), metavar=("LAYERS", "TOPK"))
    parser.add_argument("--controller", choices=("ppo", "grpo"), default="ppo")
    parser.add_argument("--updates", type=int_in_range(), default=4, help="optimizer steps")
    parser.add_argument("--tp", type=int_in_range(), default=1)
    parser.add_argument("--pp", type=int_in_range(), default=1)
    parser.add_argument("--engine-tp", type=int_in_range(), default=1, help="every so many ranks one has rollouts")
    parser.add_argument(
        "--per-machine", type=int_in_range(), default=0, help="ranks of a machine, to play several; 0 for all"
    )
    parser.add_argument("--token-budget", type=int_in_range(), default=32768)
    parser.add_argument("--repeats", type=int_in_range(), default=3)
    parser.add_argument("--planned", action="store_true", help="what is planned of memory and messages, beside it")
    parser.add_argument("--against", default="", metavar="REVISION", help="does the same at the last number of ranks")
    parser.add_argument("--json", type=Path, help="a file to write the figures to")
    chosen = parser.parse_args()
    layers, topk = chosen.routing
    shape = Shape(chosen.sequences, chosen.samples, chosen.lengths, chosen.turns, layers, topk)
    try:
        tokens = total_tokens(shape)
    except ValueError as error:
        raise ConfigError(f"--lengths: {error}") from None
    console = Console(width=120)
    console.print(f"{shape.sequences} sequences, {tokens:,} tokens, {chosen.controller}")

    def order(world: int, before: bool) -> dict[str, Any]:
        if shape.sequences % (4 * chosen.samples * (world // chosen.engine_tp)):
            raise ConfigError(
                f"--sequences {shape.sequences} are not four times as many groups of {chosen.samples} for each of the "
                f"{world // chosen.engine_tp} engines"
            )
        own = {name: getattr(chosen, name) for name in ("controller", "updates", "tp", "pp", "engine_tp", "repeats")}
        per_machine = chosen.per_machine or world
        return own | dict(
            ranks=world, shape=vars(shape), token_budget=chosen.token_budget, per_machine=per_machine, before=before
        )

    orders = {world: order(world, False) for world in chosen.ranks}
    if chosen.planned:  # what is freed goes back at once, so that it is not counted with what is held
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 18)
    check_writable_file(chosen.json, "--json")
    if chosen.against and git("rev-parse", "--verify", f"{chosen.against}^{{commit}}").returncode:
        raise ConfigError(f"--against {chosen.against}: this repository has no such revision")
    found: dict[str, dict[int, Any]] = {"now": {world: measured(one, ROOT) for world, one in orders.items()}}
    if chosen.against:
        with checked_out(chosen.against) as folder:
            found[chosen.against] = {chosen.ranks[-1]: measured(order(chosen.ranks[-1], True), folder)}
    console.print(table_of(found))
    if chosen.planned:
        for world, one in found["now"].items():
            table = Table(f"{world} ranks, M", "planned", "measured", "", box=box.SIMPLE)
            for name, (planned, counted) in one["beside"].items():
                table.add_row(name, f"{planned / 1e6:.1f}", f"{counted / 1e6:.1f}", f"{planned / counted:.2f}")
            console.print(table)
    if chosen.against:
        now, before = (by_world[chosen.ranks[-1]] for by_world in found.values())
        console.print(
            f"at {chosen.ranks[-1]} ranks: seconds 1/{before['full']['seconds'] / now['full']['seconds']:.1f}, of a "
            f"processor 1/{before['full']['busy'] / now['full']['busy']:.1f}, sent "
            f"1/{before['full']['sent'] / now['full']['sent']:.1f}, memory "
            f"1/{before['memory']['step'] / now['memory']['step']:.1f} of {chosen.against}"
        )
        odd = different(now["full"]["metrics"], before["full"]["metrics"])
        console.print(f"other metrics: {', '.join(odd)}" if odd else "all metrics are the same")
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
