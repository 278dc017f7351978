"""Plays ranks of jobs, each in a process forked from this one, and prints what each has done as JSON by name.

argv: a file with `{name: {"config": FILE, "overrides": [...], "rank": number or "first", "middle" or "last"}}`, and
`"finds_leaks": false` for those of which only the first step is played.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Mapping
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from megarl.config import load_config
from megarl.rehearse import play


def describe(case: Mapping[str, Any]) -> dict[str, Any]:
    """Play a rank and return its events on devices, its peaks, and what lives after the models exist and at the end."""
    from megarl.rehearse.rehearsed_flow import RehearsedFlow

    lives: list[int] = []
    build, play_step = RehearsedFlow.build, RehearsedFlow.play

    def then_measure(method: Any) -> Any:
        def run(flow: Any, *arguments: Any, **options: Any) -> None:
            method(flow, *arguments, **options)
            lives.append(flow.clock.memory.live)

        return run

    RehearsedFlow.build, RehearsedFlow.play = then_measure(build), then_measure(play_step)  # type: ignore[method-assign]
    config = play.with_local_model(load_config(case["config"], case["overrides"]))
    parallel, rank = config.parallel, case["rank"]
    if isinstance(rank, str):
        stage = {"first": 0, "middle": parallel.pp // 2, "last": parallel.pp - 1}[rank]
        rank = stage * (parallel.world_size // parallel.pp)
    played = play.play(config, rank, case.get("finds_leaks", True))
    posts = [
        {name: event.get(name) for name in ("kind", "group", "bytes", "sends")}
        for event in played.events
        if event["do"] == "post" and not event["host"]
    ]
    size = {name: getattr(played.size, name) for name in ("micro_batches", "local_rows", "length")}
    lives_by_time = {"built": lives[0], "end": lives[1]}
    return {"posts": posts, "peaks": played.peaks, "host": played.host, **lives_by_time, **size}


def describe_or_fail(case: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return describe(case)
    except Exception:
        return {"error": traceback.format_exc()}


def main(file: str) -> None:
    play.prepare()
    cases = json.loads(Path(file).read_text())
    with get_context("fork").Pool(len(os.sched_getaffinity(0)), maxtasksperchild=1) as pool:
        results = pool.map(describe_or_fail, cases.values(), chunksize=1)
    print("RESULT", json.dumps(dict(zip(cases, results, strict=True))))


if __name__ == "__main__":
    main(sys.argv[1])
