"""Timeline of a run: a picture for the terminal, totals, and a trace for Perfetto.

    megarl timeline RUN_DIR [--steps 3-5] [--out timeline.json]

Shows the last steps by default, with a row for each rank and for its generation thread. Prints how long each rank
worked and waited, how long each two roles worked at the same time, and the cost of controller and data plane. FILE has
all steps, unless some are named; open it in https://ui.perfetto.dev or chrome://tracing. A model's waits for its own
peers, as in a pipeline, count as work. Where a run was stopped and resumed, the time between the two steps is left out.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from megarl.config import ConfigError
from megarl.config.command_line import Parser, check_writable_file, run_cli
from megarl.observe.clock import DATA, REMOTE, STEP, WAIT, Span

DEFAULT_STEPS = 3
_SHORTEST_PAUSE_S = 1.0
NO_WORK = (WAIT, DATA, REMOTE, STEP)
MARKS = {WAIT: "·", DATA: ":", "": " "}
COLOURS = ("green", "cyan", "yellow", "magenta", "blue", "red", "bright_green", "bright_cyan", "bright_yellow")


@dataclass(frozen=True)
class Run:
    """spans: by rank and thread, those of the latest attempt at each step; an engine's are on all of its ranks.
    windows: begin and end of a step, by step and rank. pauses: by step, the seconds before it in which the run was
    stopped and restarted; times exclude them: all that follows is shifted earlier."""

    spans: Mapping[tuple[int, str], Sequence[Span]]
    windows: Mapping[int, Mapping[int, tuple[float, float]]]
    pauses: Mapping[int, float] = field(default_factory=dict)

    @property
    def ranks(self) -> list[int]:
        return sorted({rank for rank, _ in self.spans})

    def bounds(self, steps: Sequence[int]) -> tuple[float, float]:
        """Return the first begin and the last end of these steps."""
        bounds = list(chain.from_iterable(self.windows[step].values() for step in steps))
        begin = min(begin for begin, _ in bounds)
        return begin, max(begin + 1e-6, *(end for _, end in bounds))

    def notes(self, steps: Sequence[int]) -> list[str]:
        """Return notes on the pauses between these steps."""
        return [
            f"before step {step} the run was stopped and resumed: {seconds:.0f} s are left out"
            for step, seconds in self.pauses.items()
            if steps[0] < step <= steps[-1]
        ]


# --- intervals ---------------------------------------------------------------------------------------------------

Intervals = list[tuple[float, float]]
"""Disjoint time intervals in ascending order."""


def union(intervals: Iterable[tuple[float, float]]) -> Intervals:
    merged: Intervals = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def common(first: Intervals, second: Intervals) -> Intervals:
    shared, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if begin < end:
            shared.append((begin, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return shared


def without(first: Intervals, second: Intervals) -> Intervals:
    edges = [-math.inf, *chain.from_iterable(second), math.inf]
    return common(first, list(zip(edges[::2], edges[1::2], strict=True)))


def seconds(intervals: Intervals) -> float:
    return math.fsum(end - begin for begin, end in intervals)


# --- spans ------------------------------------------------------------------------------------------------


def innermost(spans: Iterable[Span]) -> list[Span]:
    """Split the spans of a thread, which nest or are disjoint, so that each moment belongs to the innermost one."""
    pieces: list[Span] = []
    open_: list[Span] = []
    position = -math.inf

    def advance(time: float) -> None:
        nonlocal position
        if open_ and position < time:
            pieces.append(open_[-1]._replace(begin=position, end=time))
        position = max(position, time)

    for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
        while open_ and open_[-1].end <= span.begin:
            advance(open_[-1].end)
            open_.pop()
        advance(span.begin)
        open_.append(span)
    while open_:
        advance(open_[-1].end)
        open_.pop()
    return pieces


# --- reading ----------------------------------------------------------------------------------------------------------


def load(path: Path) -> Run:
    """Load a run's spans. Raises ConfigError if there is no run, or no span to show. Broken lines are skipped."""
    if not path.is_dir():
        raise ConfigError(f"no run folder {path}; name one, such as runs/quickstart/run-1")
    files = sorted(path.glob("timeline/rank_*.json"))
    if not files:
        raise ConfigError(f"{path} has no timeline: a run has one once it has done a step")
    steps: dict[int, dict[int, list[Span]]] = {}
    resumed: set[int] = set()
    for file in files:
        rank = int(re.sub(r"\D", "", file.stem) or -1)
        loaded, firsts = read_steps(file)
        resumed |= firsts
        for step, done in loaded.items():
            steps.setdefault(step, {})[rank] = done
    if not steps:
        raise ConfigError(f"the files in {path / 'timeline'} have no step yet, or are damaged")
    spans: dict[tuple[int, str], list[Span]] = {}
    windows: dict[int, dict[int, tuple[float, float]]] = {}
    pauses: dict[int, float] = {}
    ended = math.inf  # end of the previous step
    for step, by_rank in sorted(steps.items()):
        latest = max(loaded[0].begin for loaded in by_rank.values())
        current = {
            rank: loaded for rank, loaded in by_rank.items() if loaded[0].end >= latest
        }  # ranks that the resumed run still has
        begin = min(loaded[0].begin for loaded in current.values())
        if step in resumed and begin - ended > _SHORTEST_PAUSE_S:
            pauses[step] = begin - ended
        else:
            begin = -math.inf
        shift = sum(pauses.values())
        for rank, (step_span, *others) in current.items():
            windows.setdefault(step, {})[rank] = step_span.begin - shift, step_span.end - shift
            for span in (step_span, *others):
                if span.end <= begin:  # part of the start after a pause
                    continue
                moved = span._replace(begin=max(span.begin, begin) - shift, end=span.end - shift)
                for member in span.ranks or (rank,):
                    spans.setdefault((member, span.thread), []).append(moved)
        ended = max(loaded[0].end for loaded in current.values())
    keys = sorted(spans, key=lambda key: (key[0], key[1] != "main", key[1]))
    return Run({key: spans[key] for key in keys}, windows, pauses)


def read_steps(file: Path) -> tuple[dict[int, list[Span]], set[int]]:
    """Return, by step, its own span and then the spans written with it; and the steps that are the first ones of a
    process. If a resumed run repeated a step, its last attempt counts, and so do the steps after that."""
    by_step: dict[int, list[Span]] = {}
    firsts: set[int] = set()
    current: list[Span] = []
    threads: dict[Any, str] = {}
    is_first = False
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        event = read_event(line)
        if event is None:
            continue
        if event["ph"] == "M":
            threads[event["tid"]] = str(event["args"].get("name"))
            # Each process names its threads once, when it starts.
            is_first = is_first or threads[event["tid"]] == "main"
            continue
        begin, length, args = float(event["ts"]), float(event["dur"]), event["args"]
        thread = threads.get(event["tid"], "main")
        members = tuple(args.get("ranks", ()))
        span = Span(event["name"], event["cat"], thread, begin / 1e6, (begin + length) / 1e6, members)
        if span.category == STEP and (number := re.fullmatch(r"step (\d{1,12})", span.name)):
            step, current = int(number[1]), []
            by_step = {other: spans for other, spans in by_step.items() if other < step} | {step: current}
            firsts = {other for other in firsts if other < step} | ({step} if is_first else set())
            is_first = False
        current.append(span)
    return by_step, firsts


def read_event(line: str) -> dict[str, Any] | None:
    """Parse a line; None if it is not a span, such as the first line, or one cut off when a process was killed."""
    try:
        event = json.loads(line.rstrip(","))
        kind, args = event["ph"], event["args"]
        if kind == "M" and isinstance(args, dict):
            return event if isinstance(event["tid"], int) else None
        has_text = all(isinstance(event[name], str) for name in ("name", "cat")) and isinstance(event["tid"], int)
        has_times = all(isinstance(event[name], int) and 0 <= event[name] < 2**60 for name in ("ts", "dur"))
        members = args.get("ranks", [])
        listed = isinstance(members, list) and all(isinstance(member, int) for member in members)
        return event if kind == "X" and has_text and has_times and listed else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def parse_steps(text: str, run: Run) -> list[int]:
    """Parse steps such as 3-5, or 4. Raises ConfigError."""
    match = re.fullmatch(r"(\d{1,12})(?:-(\d{1,12}))?", text)
    available = f"the timeline has the steps {min(run.windows)} to {max(run.windows)}"
    if match is None:
        raise ConfigError(f"--steps {text} names no steps; write 3-5, or 4; {available}")
    first, last = int(match[1]), int(match[2] or match[1])
    if not (steps := [step for step in run.windows if first <= step <= last]):
        raise ConfigError(f"--steps {text} names none that was done; {available}")
    return steps


# --- metrics ----------------------------------------------------------------------------------------------------------


def busy(run: Run, begin: float, end: float) -> dict[str, dict[int, Intervals]]:
    """Return, by kind of work and by rank, when it worked between two times; also `wait` and `data`, while the rank was
    not working in another thread."""
    result: dict[str, dict[int, Intervals]] = {}
    for (rank, _), spans in run.spans.items():
        for span in innermost(spans):
            if span.category not in (STEP, REMOTE):
                cut = max(begin, span.begin), min(end, span.end)
                result.setdefault(span.category, {}).setdefault(rank, []).append(cut)
    merged = {category: {rank: union(times) for rank, times in by_rank.items()} for category, by_rank in result.items()}
    for rank in run.ranks:
        covered = at_work(merged, rank)
        for category in (DATA, WAIT):
            remaining = without(merged.get(category, {}).get(rank, []), covered)
            merged.setdefault(category, {})[rank] = remaining
            covered = union(covered + remaining)
    return merged


def at_work(by_who: Mapping[str, Mapping[int, Intervals]], rank: int | None = None) -> Intervals:
    """Return when any kind of work was going on, on one rank or on any."""
    works = [by_rank for category, by_rank in by_who.items() if category not in NO_WORK]
    return union(
        piece for by_rank in works for other, times in by_rank.items() if rank in (None, other) for piece in times
    )


def shares(run: Run, steps: Sequence[int]) -> dict[int, dict[str, float]]:
    """Return, by rank, the shares of the time spent working, waiting, moving data, and on all else."""
    begin, end = run.bounds(steps)
    by_who, length = busy(run, begin, end), end - begin
    result = {}
    for rank in run.ranks:
        parts = {"work": seconds(at_work(by_who, rank))} | {
            category: seconds(by_who[category][rank]) for category in (WAIT, DATA)
        }
        parts["controller"] = (end - begin) - sum(parts.values())
        result[rank] = {name: value / length for name, value in parts.items()}
    return result


def overlaps(run: Run, steps: Sequence[int]) -> dict[tuple[str, str], float]:
    """Return, for each two roles, the seconds in which both worked, on any ranks."""
    by_who = busy(run, *run.bounds(steps))
    roles = sorted(category for category in by_who if category not in (*NO_WORK, "rank"))
    when = {category: union(chain.from_iterable(by_who[category].values())) for category in roles}
    return {(first, other): seconds(common(when[first], when[other])) for first, other in combinations(roles, 2)}


@dataclass(frozen=True)
class Cost:
    """Seconds of a step. idle: while no rank worked, which is how much controller and data plane lengthened the step.
    controller, data: on the rank where they are largest."""

    length: float
    idle: float
    controller: float
    data: float


def cost(run: Run, step: int) -> Cost:
    begin, end = run.bounds([step])
    by_who = busy(run, begin, end)
    controller, data = 0.0, 0.0
    for rank, window in run.windows[step].items():
        covered = union(chain(at_work(by_who, rank), by_who[WAIT][rank], by_who[DATA][rank]))
        controller = max(controller, seconds(without([window], covered)))
        data = max(data, seconds(common([window], by_who[DATA][rank])))
    return Cost(end - begin, seconds(without([(begin, end)], at_work(by_who))), controller, data)


# --- picture ----------------------------------------------------------------------------------------------------------


def span_kind(span: Span) -> str:
    """Return the kind of a span in the picture: for work, its name without the step; for the rest, its category."""
    if span.category in (STEP, REMOTE):
        return ""
    return span.category if span.category in NO_WORK else re.sub(r" of step \d+$", "", span.name)


def row(spans: Iterable[Span], begin: float, end: float, width: int) -> list[str]:
    """Return the dominant kind of each of `width` equal parts of the time."""
    cells: list[dict[str, float]] = [{} for _ in range(width)]
    size = (end - begin) / width
    for span in innermost(spans):
        first, last = max(begin, span.begin), min(end, span.end)
        if first >= last:
            continue
        for cell in range(int((first - begin) / size), min(width, math.ceil((last - begin) / size))):
            overlap = min(last, begin + (cell + 1) * size) - max(first, begin + cell * size)
            cells[cell][span_kind(span)] = cells[cell].get(span_kind(span), 0.0) + overlap
    return [max(cell, key=lambda kind: cell[kind]) if cell else "" for cell in cells]


def marks(kinds: Iterable[str]) -> dict[str, str]:
    """Assign a letter to each kind: the first one of its name that is free."""
    assigned = dict(MARKS)
    for kind in kinds:
        letters = (letter for letter in kind.upper() + kind.lower() + "0123456789" if letter.isalnum())
        assigned.setdefault(kind, next((letter for letter in letters if letter not in assigned.values()), "#"))
    return assigned


def picture(run: Run, steps: Sequence[int], width: int) -> list[Text]:
    begin, end = run.bounds(steps)
    names = {key: f"rank {key[0]}" if key[1] == "main" else f"  {key[1]}" for key in run.spans}
    margin = 1 + max(map(len, names.values()))
    width = max(10, width - margin - 1)
    rows = {key: row(spans, begin, end, width) for key, spans in run.spans.items()}
    kinds = sorted({kind for cells in rows.values() for kind in cells if kind not in MARKS})
    mark = marks(kinds)
    colour = {kind: COLOURS[number % len(COLOURS)] for number, kind in enumerate(kinds)}
    head = [" "] * width
    for step in steps:
        position = int((min(first for first, _ in run.windows[step].values()) - begin) / (end - begin) * width)
        for place, letter in enumerate(f"|{step}"[: width - position]):
            head[position + place] = letter
    lines = [Text(" " * margin + "".join(head).rstrip())]
    for key, cells in rows.items():
        line = Text(names[key].ljust(margin))
        for kind in cells:
            line.append(mark[kind], style=colour.get(kind, "dim"))
        lines.append(line)
    legend = [f"{mark[kind]} {kind}" for kind in kinds]
    lines.append(Text("   ".join([*legend, f"{MARKS[WAIT]} waits", f"{MARKS[DATA]} moves data", "blank: all else"])))
    lines.append(Text(f"{width} columns of {1000 * (end - begin) / width:.3g} ms, |N: where step N begins"))
    return lines


def tables(run: Run, steps: Sequence[int]) -> list[Table]:
    by_rank = Table("rank", "at work", "waits", "moves data", "all else", box=box.SIMPLE_HEAD)
    for rank, part in shares(run, steps).items():
        by_rank.add_row(str(rank), *(f"{part[name]:.1%}" for name in ("work", WAIT, DATA, "controller")))
    pairs = Table("at work at once", "seconds", box=box.SIMPLE_HEAD)
    overlapping = [
        (value, f"{first} and {other}") for (first, other), value in overlaps(run, steps).items() if value >= 0.005
    ]
    for pair, value in [(pair, f"{value:.2f}") for value, pair in sorted(overlapping, reverse=True)] or [
        ("no two roles", "")
    ]:
        pairs.add_row(pair, value)
    by_step = Table("step", "seconds", "nobody at work", "data, at most", "controller, at most", box=box.SIMPLE_HEAD)
    for step in steps:
        step_cost = cost(run, step)
        parts = (step_cost.idle, step_cost.data, step_cost.controller)
        cells = [f"{value:.3f} ({value / step_cost.length:.1%})" for value in parts]
        by_step.add_row(str(step), f"{step_cost.length:.2f}", *cells)
    by_step.caption = overhead([cost(run, step) for step in steps])
    return [by_rank, pairs, by_step]


def overhead(costs: Sequence[Cost]) -> str:
    """Describe the overhead of placement and controllers in the median step, and the step time of which it would be
    one percent, since it hardly grows with a step."""
    idle, length = statistics.median(cost.idle for cost in costs), statistics.median(cost.length for cost in costs)
    return f"overhead: {idle:.3f} s of a step, {idle / length:.1%}; 1% of one of {100 * idle:.0f} s"


def trace(run: Run, steps: Sequence[int]) -> dict[str, Any]:
    """Return the trace for Perfetto: a process per rank, times from 0 on, in microseconds."""
    begin, end = run.bounds(steps)
    events: list[dict[str, Any]] = []
    for number, ((rank, thread), spans) in enumerate(run.spans.items()):
        place = {"pid": rank, "tid": number}
        events.append({"name": "process_name", "ph": "M", **place, "args": {"name": f"rank {rank}"}})
        events.append({"name": "thread_name", "ph": "M", **place, "args": {"name": thread}})
        for span in spans:
            if span.begin < end and span.end > begin:
                times = {"ts": round((span.begin - begin) * 1e6), "dur": round((span.end - span.begin) * 1e6)}
                events.append({"name": span.name, "cat": span.category, "ph": "X", **times, **place})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(__doc__, prog="megarl timeline")
    parser.add_argument("run", type=Path, metavar="RUN_DIR")
    parser.add_argument("--steps", metavar="FIRST-LAST", help="steps to show, as 3-5, or 4 (default: the last ones)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the ranks' files as one trace")
    return parser.parse_args(arguments)


def show(options: argparse.Namespace) -> int:
    run = load(options.run)
    steps = parse_steps(options.steps, run) if options.steps else list(run.windows)[-DEFAULT_STEPS:]
    check_writable_file(options.out, "--out")
    console = Console(highlight=False)
    for line in picture(run, steps, console.width):
        console.print(line, soft_wrap=True)
    for table in tables(run, steps):
        console.print(table)
    for note in run.notes(steps):
        console.print(note, soft_wrap=True)
    if options.out is not None:
        written = steps if options.steps else list(run.windows)
        options.out.write_text(json.dumps(trace(run, written)), encoding="utf-8")
        console.print(f"{options.out}: open it with https://ui.perfetto.dev", soft_wrap=True, markup=False)
    return 0


def main(arguments: list[str]) -> int:
    return run_cli(lambda: show(parse(arguments)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
