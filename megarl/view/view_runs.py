"""View runs in a browser: one page that needs neither server nor network.

    megarl view RUN [RUN ...] [-o page.html] [--details N]
    megarl view RUN [RUN ...] --follow [PORT]

Writes page.html (by default view.html in the run folder; for several runs view_B_C.html in the first): curves with
their bands and alarms, where the time went, a table of all rollouts that sorts and filters, single rollouts with
colored tokens, prompts, and where two runs diverge. The tokens of at most N rollouts (20,000) are stored beside it, in
page_files/: all of a small run; for a large one those of the first and last steps, and the best and worst of others.
`--follow` shows a running job live: phases of each rank, queues of the engines, curves, alarms with their remedies, the
newest rollouts, and any other rollout. It prints an address for this machine only.

Missing files, and files of another version, are reported on the page and on the terminal, and the rest is shown.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.config import ConfigError
from megarl.config.command_line import (
    Parser,
    check_writable_file,
    check_writable_folder,
    default_output_file,
    int_in_range,
    run_cli,
)
from megarl.observe.clock import Span
from megarl.view import run_timeline

SHOWN_STEPS, MOST_ROWS, MOST_SPANS = 3, 64, 20_000
"""Limits of the timeline: the last steps, the first ranks' threads, the longest spans."""


def load_spans(path: Path) -> Mapping[str, Any] | None:
    """Return {steps, rows: [{name, spans: [[kind, name, begin, end], ...]}], begins: [step, seconds], notes}, in
    seconds from the begin of these steps; None if no spans are recorded."""
    if not any(path.glob("timeline/rank_*.json")):
        return None
    try:
        run = run_timeline.load(path)
    except (ConfigError, OSError, ValueError) as error:
        return {"rows": [], "steps": [], "begins": [], "notes": [str(error)]}
    steps = list(run.windows)[-SHOWN_STEPS:]
    begin, end = run.bounds(steps)
    rows: list[tuple[str, list[Span]]] = []
    notes = run.notes(steps)
    for (rank, thread), spans in list(run.spans.items())[:MOST_ROWS]:
        visible = [span for span in run_timeline.innermost(spans) if run_timeline.span_kind(span)]
        name = f"rank {rank}" if thread == "main" else f"rank {rank}, {thread}"
        rows.append((name, [span for span in visible if span.begin < end and span.end > begin]))
    if len(run.spans) > MOST_ROWS:
        notes.append(f"{path / 'timeline'} has {len(run.spans)} threads, of which the first {MOST_ROWS} are shown")
    lengths = sorted((span.end - span.begin for _, spans in rows for span in spans), reverse=True)
    shortest = lengths[MOST_SPANS] if len(lengths) > MOST_SPANS else -1.0
    drawn = [
        {
            "name": name,
            "spans": [
                [
                    run_timeline.span_kind(span),
                    span.name,
                    round(max(span.begin, begin) - begin, 5),
                    round(span.end - begin, 5),
                ]
                for span in spans
                if span.end - span.begin > shortest
            ],
        }
        for name, spans in rows
    ]
    begins = [[step, min(first for first, _ in run.windows[step].values()) - begin] for step in steps]
    return {"rows": drawn, "steps": steps, "length": end - begin, "begins": begins, "notes": notes}


def is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in ("config.yaml", "metrics.jsonl"))


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(__doc__, prog="megarl view")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("-o", "--out", type=Path, metavar="FILE", help="the page (default RUN/view.html)")
    mode.add_argument(
        "--follow", type=int_in_range(0, 65535), nargs="?", const=0, metavar="PORT", help="a live page, on loopback"
    )
    parser.add_argument(
        "--details", type=int_in_range(0), default=20_000, metavar="N", help="rollouts with their tokens (%(default)s)"
    )
    return parser.parse_args(arguments)


def show(options: argparse.Namespace) -> int:
    from megarl.view.page import load, write_page  # imports torch

    for path in options.runs:
        if not path.is_dir():
            raise ConfigError(f"no run folder {path}; name one, such as runs/quickstart/run-1")
    if options.follow is not None:
        return follow(options)
    if options.out is None and not is_run(options.runs[0]):
        raise ConfigError(
            f"{options.runs[0]} is not a run folder (it has neither config.yaml nor metrics.jsonl), so nothing is "
            "written into it; name a run, or with --out where the page goes"
        )
    file = options.out or default_output_file(options.runs, "view.html")
    check_writable_file(file, "--out")
    if file.exists() and not file.is_file():  # the file is replaced, so it must be a regular one
        raise ConfigError(f"--out {file} is not a regular file; name another")
    check_writable_folder(file.with_name(f"{file.stem}_files"), "--out")
    runs = [load(path, load_spans) for path in options.runs]
    written = write_page(runs, file, options.details)
    for run in runs:
        for note in [*run.notes, *(run.spans or {}).get("notes", ())]:
            print(f"note: {note}")
    rollouts = sum(len(run.index) for run in runs)
    content = (
        f"{rollouts} rollouts; tokens of {written['rollouts']} of them beside it, {written['beside'] / 2**20:.1f} MiB"
    )
    if not any(run.generates_rollouts for run in runs):
        content = f"curves and time; {' and '.join(sorted({run.algorithm for run in runs}))} generates no rollouts"
    print(f"wrote {file}: {written['page'] / 2**20:.1f} MiB, {content}")
    return 0


def follow(options: argparse.Namespace) -> int:
    from megarl.view.page_server import Server

    with Server(options.runs, options.follow, load_spans) as server:
        print(f"{server.address}\nends with ctrl-c", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


def main(arguments: list[str]) -> int:
    return run_cli(lambda: show(parse(arguments)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
