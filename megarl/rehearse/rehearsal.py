"""`--rehearse`: play one training step of a whole job on one machine, without GPUs, weights or data.

Ranks that do the same are of one kind. The first and the last rank of each kind are played, each in a process of its
own, and must do the same; the kinds' communication is then matched as NCCL would run it.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from megarl.checkpoint.disk_space import format_bytes
from megarl.config import Config, ConfigError
from megarl.dry_run.layout_changes import describe_step
from megarl.dry_run.validation import GPU_SIZES, Report
from megarl.models.memory import FP8_COPIES, StageMemory
from megarl.rehearse import kind_order, play, sync_order
from megarl.rehearse.peak_memory import LiveTensors
from megarl.rehearse.play import PlayedRank
from megarl.rehearse.rank_kinds import Family, choose_ranks, find_kinds

USABLE_SHARE = 0.93
"""Share of a GPU's memory that tensors can have; the rest is for CUDA and NCCL."""


PLAYED_PARTS = ("reshard staging", "gathered weights")
"""Parts of the plan of memory that a play counts by itself."""
_PIPELINES = "PIPELINE_MODEL_PARALLEL_GROUP"
"""Prefix of the names of the families of pipeline groups."""
MAX_STAGE_WORK = 1.5
"""Work of a pipeline stage, relative to the mean of its pipeline's stages, above which the stages are a fault."""
MAX_FAULTS = 12
"""Faults that a report lists."""


@dataclass(frozen=True)
class KindReport:
    """The ranks of a kind: their records and their memory."""

    ranks: tuple[int, ...]
    played: tuple[PlayedRank, ...]
    peaks: Mapping[str, int]
    """The most bytes of device memory by phase, with the planned bytes of engines in those in which they are awake."""

    @property
    def peak(self) -> tuple[int, str]:
        """The most bytes, and the phase in which they exist."""
        return max((size, phase) for phase, size in self.peaks.items())


@dataclass(frozen=True)
class StageWork:
    """The busiest stage of the least even pipeline."""

    stage: int
    ranks: tuple[int, ...]
    """The ranks that are this stage in their pipelines and do the same."""
    ratio: float
    """Its matrix products, relative to the mean of the stages."""

    def __str__(self) -> str:
        return (
            f"stage {self.stage} (ranks {format_ranks(self.ranks)}) does {self.ratio:.1f} times the work of the mean "
            f"stage: the others wait {1 - 1 / self.ratio:.0%} of the time"
        )


@dataclass(frozen=True)
class Rehearsal:
    world: int
    kinds: list[KindReport]
    faults: list[str]
    """Hangs, differences between ranks, leaks and uneven stages, a line each."""
    stage_work: StageWork | None
    """None without a pipeline."""
    node: range
    """Ranks of the node that needs the most host memory."""
    node_bytes: int
    """Bytes of host memory that it needs for its ranks' tensors and sleeping engines."""
    idle: list[float | None]
    """By kind, see `idle_shares`."""
    modelled: list[str]
    """Lines about the modelled seconds of the step, and about faster layouts."""
    seconds: float

    @property
    def fullest(self) -> KindReport:
        """The kind whose ranks need the most device memory."""
        return max(self.kinds, key=lambda kind: kind.peak)

    def fits(self, gpu_gb: float | None, host_gb: float | None = None) -> bool:
        """Return whether all ranks fit on GPUs, and on nodes, of so many GB (1e9 bytes); None is enough for all."""
        fits_node = host_gb is None or self.node_bytes <= host_gb * 1e9
        return fits_node and (gpu_gb is None or self.fullest.peak[0] <= USABLE_SHARE * gpu_gb * 1e9)


def rehearse(config: Config, report: Report, num_processes: int | None = None) -> Rehearsal:
    """Rehearse a step of a configuration that the dry run has checked and resolved.

    report: of the dry run; its plan of memory has the engines'. num_processes: ranks that are played at a time; by
    default one for each processor that this process may use.

    Raises ConfigError if a rank fails.
    """
    start, config = time.monotonic(), play.with_local_model(config)
    play.check(config)
    play.prepare()
    processes = num_processes or len(os.sched_getaffinity(0))
    (first,) = _play_ranks(config, {0: True}, processes)
    kinds = find_kinds(_stages(first.families, config.parallel.world_size), first.families)
    chosen = choose_ranks(kinds)
    firsts = {first_rank for first_rank, _ in chosen}
    others = {rank: rank in firsts for rank in sorted({rank for pair in chosen for rank in pair} - {0})}
    played = {item.rank: item for item in [first, *_play_ranks(config, others, processes)]}
    faults = kind_order.check_tables({rank: item.families for rank, item in played.items()})
    for first_rank, last_rank in chosen:
        if not faults:
            faults = kind_order.compare_records(played[first_rank], played[last_rank], kinds)
    if not faults:
        faults = sync_order.check_syncs(config) + [line for item in played.values() for line in item.faults]
    if not faults:
        faults = kind_order.check([played[pair[0]].events for pair in chosen], kinds, first.families)
    reports = [
        KindReport(ranks, tuple(played[rank] for rank in sorted(set(pair))), _peaks(played[pair[0]], report))
        for ranks, pair in zip(kinds, chosen, strict=True)
    ]
    work = _stage_work(reports, first.families)
    faults += [_describe_leaks(item) for item in played.values() if item.leaks]
    faults += [str(work)] if work and work.ratio > MAX_STAGE_WORK else []
    node, node_bytes = _fullest_node(reports, report, config.parallel.ranks_per_node)
    modelled = describe_step(report.models, config) if report.models else []
    idle = idle_shares(reports, config.parallel.pp, config.parallel.vpp)
    seconds = time.monotonic() - start
    return Rehearsal(config.parallel.world_size, reports, faults, work, node, node_bytes, idle, modelled, seconds)


def _describe_leaks(played: PlayedRank) -> str:
    tensors = "; ".join(map(format_tensors, played.leaks))
    return f"rank {played.rank} needs more memory after a second step than after the first: {tensors}"


def format_tensors(item: LiveTensors) -> str:
    """Return what tensors of one kind are, and where they were created."""
    shape = f" {item.tensor}" if item.tensor else ""
    return f"{format_bytes(item.nbytes)} in {_count(item.count, 'tensor')}{shape}, created by {item.calls}"


def _stage_work(kinds: Sequence[KindReport], families: Mapping[str, Family]) -> StageWork | None:
    """Return the busiest stage of the pipeline whose stages differ the most; None if there is no pipeline."""
    kind_of = {rank: kind for kind in kinds for rank in kind.ranks}
    result: list[StageWork] = []
    for name, family in families.items():
        for group in family.groups if name.startswith(_PIPELINES) else ():
            flops = [kind_of[rank].played[0].flops for rank in group]
            if len(group) > 1 and any(flops):
                stage = max(range(len(group)), key=flops.__getitem__)
                ratio = flops[stage] * len(flops) / sum(flops)
                result.append(StageWork(stage, kind_of[group[stage]].ranks, ratio))
    return max(result, key=lambda work: work.ratio, default=None)


def idle_shares(kinds: Sequence[KindReport], stages: int, parts: int = 1) -> list[float | None]:
    """Return by kind the modelled share of log-probs and updates in which its ranks wait; None if they train nothing.

    Ranks wait while the pipeline fills and drains, which takes `stages - 1` micro-batches of one of a stage's `parts`
    (https://arxiv.org/abs/2104.04473), and for the busiest rank, as their matrix products have it.
    """
    most = max(kind.played[0].flops for kind in kinds)
    micro_batches = parts * max(kind.played[0].size.total_micro_batches for kind in kinds)
    working = micro_batches / (micro_batches + stages - 1)
    return [1 - working * kind.played[0].flops / most if kind.played[0].flops else None for kind in kinds]


def _describe_idle(rehearsal: Rehearsal) -> list[str]:
    """Return a line about the ranks that wait the least and the most; none if no rank waits."""
    shares = [(share, kind) for share, kind in zip(rehearsal.idle, rehearsal.kinds, strict=True) if share]
    if not shares:
        return []
    (least, busy), (most, idle) = (pick(shares, key=lambda item: item[0]) for pick in (min, max))
    line = f"idle in log-probs and updates, modelled: {least:.0%} (ranks {format_ranks(busy.ranks)}"
    return [line + (f") to {most:.0%} (ranks {format_ranks(idle.ranks)})" if most > least else ")")]


def _fullest_node(kinds: Sequence[KindReport], report: Report, ranks_per_node: int) -> tuple[range, int]:
    """Return the ranks of the node that needs the most host memory, and the bytes that it needs."""
    needs = {rank: _host_bytes(kind.played, report) for kind in kinds for rank in kind.ranks}
    nodes = [range(first, min(first + ranks_per_node, len(needs))) for first in range(0, len(needs), ranks_per_node)]
    return max(((node, sum(needs[rank] for rank in node)) for node in nodes), key=lambda item: item[1])


def _host_bytes(played: Sequence[PlayedRank], report: Report) -> int:
    """Return the bytes of host memory of a rank: what was played, and what the plan says of sleeping engines."""
    stage = _planned_stage(report, played[0])
    asleep = sum(size for name, size in stage.host.items() if name.endswith(", asleep")) if stage else 0
    return asleep + max(item.host + item.nbytes.get("snapshot", 0) for item in played)


def _stages(families: Mapping[str, Family], world: int) -> list[tuple[int, ...]]:
    """Return the pipeline stage of each rank in each layout, -1 outside of it."""
    stages: list[list[int]] = [[] for _ in range(world)]
    for name, family in families.items():
        if name.startswith(_PIPELINES):
            stage_of = {rank: stage for group in family.groups for stage, rank in enumerate(group)}
            for rank in range(world):
                stages[rank].append(stage_of.get(rank, -1))
    return [tuple(numbers) for numbers in stages]


def _peaks(played: PlayedRank, report: Report) -> dict[str, int]:
    """Return a rank's peaks with what the plan says that its engine needs. FP8 copies of weights exist after the first
    pass, so a rehearsed step generates without them, and later steps with them."""
    stage, peaks = _planned_stage(report, played), dict(played.peaks)
    if stage is None:
        return peaks
    copies = {name: size for name, size in stage.states.items() if name.endswith(FP8_COPIES)}
    for phase, parts in (("generate", stage.generation | copies), ("weight_sync", stage.weight_sync)):
        planned = sum(size for name, size in parts.items() if name not in PLAYED_PARTS)
        peaks[phase] = peaks.get(phase, 0) + planned
    return peaks


def _planned_stage(report: Report, played: PlayedRank) -> StageMemory | None:
    """Return the plan of memory of a rank; None if there is none, as for one with neither a model nor an engine."""
    plans = [stage for plan in (report.memory, *report.other_memory.values()) for stage in plan]
    if played.stage is None:  # engines only, which have no layers
        return max((plan for plan in plans if not plan.layers), key=lambda plan: plan.peak, default=None)
    return next((plan for plan in plans if plan.layers and plan.stage == played.stage), None)


# --- processes


def _play_ranks(config: Config, ranks: Mapping[int, bool], num_processes: int) -> list[PlayedRank]:
    """Play ranks in processes forked from this one. Raises ConfigError for the first that fails.

    ranks: whether to look for leaks, by rank.
    """
    context = multiprocessing.get_context("fork")
    waiting, running, results = deque(ranks), dict[Any, tuple[int, Any]](), list[PlayedRank]()
    with tempfile.TemporaryDirectory(prefix="megarl-rehearsal-") as folder:
        try:
            while waiting or running:
                while waiting and len(running) < num_processes:
                    rank = waiting.popleft()
                    arguments = config, rank, ranks[rank], Path(folder, str(rank))
                    process = context.Process(target=_play_rank, args=arguments)
                    process.start()
                    running[process.sentinel] = rank, process
                for sentinel in connection.wait(list(running)):
                    rank, process = running.pop(sentinel)
                    process.join()
                    results.append(_read_result(rank, process.exitcode, Path(folder, str(rank))))
        finally:
            for _, process in running.values():
                process.kill()
                process.join()
    return results


def _play_rank(config: Config, rank: int, finds_leaks: bool, file: Path) -> None:
    """Play a rank and write the result, or the error. Runs in a process of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    result: PlayedRank | str
    try:
        result = play.play(config, rank, finds_leaks)
    except ConfigError as error:
        result = str(error)
    except Exception as error:  # noqa: BLE001  reported by the parent
        traceback.print_exc()
        result = f"{type(error).__name__}: {error}; the traceback is above"
    file.write_bytes(pickle.dumps(result))


def _read_result(rank: int, exit_code: int | None, file: Path) -> PlayedRank:
    if exit_code and exit_code < 0:
        raise ConfigError(
            f"--rehearse: the process of rank {rank} was killed by {signal.Signals(-exit_code).name}; if this machine "
            "has run out of memory, leave it fewer processors (taskset -c 0), so that fewer ranks are played at a time"
        )
    if exit_code or not file.exists():
        raise ConfigError(f"--rehearse: the process of rank {rank} ended with status {exit_code}; its error is above")
    result = pickle.loads(file.read_bytes())  # written by our own child
    file.unlink()
    if isinstance(result, str):
        raise ConfigError(f"--rehearse, rank {rank}: {result}")
    played: PlayedRank = result
    return played


# --- report


def render(rehearsal: Rehearsal, gpu_gb: float | None = None, host_gb: float | None = None) -> str:
    """Render a rehearsal for a terminal.

    gpu_gb: GB of a GPU, to compare with; None names the smallest that suffices. host_gb: GB of a node's memory.
    """
    size = rehearsal.kinds[0].played[0].size
    lines: list[Table | str] = [
        f"rehearsed one step of {rehearsal.world} ranks: {_count(len(rehearsal.kinds), 'kind')} of ranks, "
        f"{sum(len(kind.played) for kind in rehearsal.kinds)} played, in {rehearsal.seconds:.0f} s",
        f"every conversation has {size.length:,} tokens; {size.updates} of {_count(size.total_updates, 'update')} with "
        f"{size.micro_batches} of {_count(size.total_micro_batches, 'micro-batch', 'micro-batches')} on each rank",
        _memory_table(rehearsal.kinds),
        _communication_table(rehearsal.kinds),
        *_describe_sizes(rehearsal.kinds),
    ]
    if rehearsal.faults:
        lines += [f"fault: {line}" for line in rehearsal.faults[:MAX_FAULTS]]
        if len(rehearsal.faults) > MAX_FAULTS:
            lines.append(f"and {len(rehearsal.faults) - MAX_FAULTS} more faults")
    else:
        count = sum(event["do"] == "post" for kind in rehearsal.kinds for event in kind.played[0].events)
        lines.append(f"communication: {count:,} operations of all kinds match; no rank would wait for ever")
    work = rehearsal.stage_work
    if work and work.ratio <= MAX_STAGE_WORK:
        lines.append(f"pipeline: {work}")
    lines += _describe_idle(rehearsal)
    lines += _describe_host(rehearsal, host_gb)
    largest = rehearsal.fullest.played[0].largest
    lines.append(f"the largest of the trainer's tensors on ranks {format_ranks(rehearsal.fullest.ranks)}:")
    lines += [f"- {format_tensors(item)}" for item in largest]
    lines += [*rehearsal.modelled, _summarize(rehearsal, gpu_gb)]
    console = Console(soft_wrap=False)
    with console.capture() as capture:
        for line in lines:
            console.print(line, soft_wrap=isinstance(line, str), markup=False, highlight=False)
    return capture.get().rstrip()


def _describe_sizes(kinds: Sequence[KindReport]) -> list[str]:
    """Return a line each for the weight sync and for checkpoints, with the most bytes of a played rank."""
    sizes: dict[str, int] = {}
    for played in (played for kind in kinds for played in kind.played):
        for name, size in played.nbytes.items():
            sizes[name] = max(sizes.get(name, 0), size)
    most = {name: format_bytes(size) for name, size in sizes.items()}
    lines = []
    if "sync_send_buffers" in most:
        lines.append(
            f"weight sync: a rank sends at most {most['sync_sent']} and receives {most['sync_received']}, "
            f"in buffers of {most['sync_send_buffers']} and {most['sync_receive_buffers']}"
        )
    if "checkpoint" in most:
        lines.append(
            f"checkpoint: a rank writes {most['checkpoint']} at most, copies {most['snapshot']} to the host "
            f"first, and reads {most['resume']}"
        )
    return lines


def _describe_host(rehearsal: Rehearsal, host_gb: float | None) -> list[str]:
    """Return a line about the fullest node; none if it needs no memory."""
    if not rehearsal.node_bytes:
        return []
    ranks = format_ranks(rehearsal.node)
    line = f"the fullest node (ranks {ranks}) needs {format_bytes(rehearsal.node_bytes)} of host memory for tensors"
    if host_gb is None:
        return [line]
    verdict = "fits" if rehearsal.fits(None, host_gb) else "does not fit"
    return [f"{line}, which {verdict} in {host_gb:g} GB"]


def _summarize(rehearsal: Rehearsal, gpu_gb: float | None) -> str:
    kind = rehearsal.fullest
    peak, phase = kind.peak
    line = (
        f"the fullest rank needs {format_bytes(peak)} ({phase.replace('_', ' ')} on ranks {format_ranks(kind.ranks)})"
    )
    if gpu_gb is not None:
        verdict = "fits" if rehearsal.fits(gpu_gb) else "does not fit"
        return f"{line}, which {verdict} on a GPU of {gpu_gb:g} GB"
    size = next((size for size in GPU_SIZES if peak <= USABLE_SHARE * size * 1e9), None)
    return f"{line}: GPUs of {size} GB or more" if size else f"{line}, more than a GPU of {GPU_SIZES[-1]} GB has"


def _memory_table(kinds: Sequence[KindReport]) -> Table:
    """Return a table of peaks: phases as rows; as columns the first kind, the fullest of the others, and the last."""
    shown = [kinds[0], *([max(kinds[1:-1], key=lambda kind: kind.peak)] if len(kinds) > 2 else []), *kinds[1:][-1:]]
    table = Table(box=box.SIMPLE_HEAD, title="device memory at most, by phase", title_justify="left")
    table.add_column("")
    for kind in shown:
        stage = kind.played[0].stage
        what = "not trained" if stage is None else f"stage {stage}"
        table.add_column(f"ranks {format_ranks(kind.ranks)}\n{what}", justify="right")
    for phase in dict.fromkeys(phase for kind in shown for phase in kind.peaks):
        cells = [format_bytes(kind.peaks[phase]) if phase in kind.peaks else "-" for kind in shown]
        table.add_row(phase.replace("_", " "), *cells)
    return table


def _communication_table(kinds: Sequence[KindReport]) -> Table:
    """Return a table of the operations, and the bytes sent, of the busiest rank by family of groups."""
    table = Table(box=box.SIMPLE_HEAD, title="device communication of a rank at most", title_justify="left")
    for name in ("groups", "ranks", "operations", "sends"):
        table.add_column(name, justify="left" if name == "groups" else "right")
    rows: dict[str, tuple[int, int, float]] = {}
    for kind in kinds:
        counts, sent, sizes = Counter[str](), dict[str, float](), dict[str, int]()
        for event in kind.played[0].events:
            size = len(event["members"]) if event["do"] == "post" else 1
            if size > 1 and not event["host"]:
                counts[event["group"]] += 1
                sent[event["group"]] = sent.get(event["group"], 0.0) + sent_bytes(event, kind.played[0].rank)
                sizes[event["group"]] = size
        for name, count in counts.items():
            before = rows.get(name, (0, 0, 0.0))
            rows[name] = sizes[name], max(before[1], count), max(before[2], sent[name])
    for name, (size, count, nbytes) in sorted(rows.items(), key=lambda row: -row[1][2]):
        table.add_row(name.lower().replace("_", " "), str(size), f"{count:,}", format_bytes(round(nbytes)))
    return table


def sent_bytes(event: Mapping[str, Any], rank: int) -> float:
    """Return the bytes that a rank sends in an operation on the device, in a ring where it is a collective.

    A record has the bytes of input and output together.
    """
    size = len(event["members"])
    if event["kind"] == "receive":
        return 0.0
    if "sends" in event:
        own = event["members"].index(rank)
        return float(sum(event["sends"]) - event["sends"][own])
    if event["kind"].startswith(("all_gather", "reduce_scatter")):
        return float(event["bytes"]) * (size - 1) / (size + 1)
    return float(event["bytes"]) * {"all_reduce": 2 * (size - 1) / size}.get(event["kind"], 1.0)


def format_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as ranges, such as `0-3, 8-11`, at most three of them."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    shown = [str(begin) if begin == end else f"{begin}-{end}" for begin, end in runs[:3]]
    return ", ".join(shown) + (f" .. {runs[-1][1]}" if len(runs) > 3 else "")


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
