"""Cost of a save to training: steps with asynchronous saves, to disk and in memory, and with one that is waited for.

    .venv/bin/python tools/bench.py save [--width 512] [--layers 6] [--tokens 4096] [--rounds 5] [--folder DIR]
        [--memory DIR]

Two data parallel ranks of this machine train a small MoE. Each round has a series of steps without a save, and one with
a save of each kind after its first step; their order changes from round to round. In memory each rank is a node: it
writes its files into a folder of its own, and sends them to the other. `held
up`: how long ranks wait, at the end of steps for planning and completing the checkpoint, and before the next update for
the copy of their state. `longer`: how much longer the whole series takes than the one without a save. This includes the
cores that the writer thread takes from the steps, which is much if ranks have no other cores than those they train on.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from local_ranks import run_function

from benchmarks.measure import Samples, rotate
from benchmarks.output import Report
from benchmarks.workloads import make_batch, moe_config
from megarl.config.command_line import int_in_range

MODES = ("no save", "asynchronous", "in memory", "waited for")
STEPS = 4
"""Steps of a series."""


Series = tuple[float, float, float]
"""Seconds of a series, seconds between its steps and of waits in them, and the processor seconds of both ranks."""


def model_config(width: int, layers: int) -> dict[str, Any]:
    heads = {"head_dim": 64, "num_attention_heads": width // 64, "num_key_value_heads": max(1, width // 128)}
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "moe_intermediate_size": width}
    return moe_config(vocab_size=4096, num_experts=4, num_hidden_layers=layers, **sizes, **heads)


def measure(folder: str, memory: str, width: int, layers: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Run as one of the ranks. Return the series by mode, and the bytes of a checkpoint and of the ranks' copies."""
    import torch

    from megarl.checkpoint.memory_store import MemoryStore
    from megarl.checkpoint.store import CheckpointStore, RankWrite
    from megarl.config import from_dict
    from megarl.megatron.dist_checkpoint import WRITERS, SaveSlot, StagedCheckpoint
    from megarl.megatron.trainer_model import MegatronModel
    from megarl.parallel import ranks
    from megarl.types import TokenLoss

    config = from_dict({"model": {"dtype": "bfloat16"}, "parallel": {"world_size": 2}})
    place = ranks.initialize(config.parallel, timeout_s=600)
    torch.manual_seed(1)
    model = MegatronModel(model_config(width, layers), config, place, "actor", total_updates=10_000)
    batch = make_batch([512] * (tokens // 512), 4096)
    disk, slot = CheckpointStore(Path(folder), keep=1), SaveSlot()
    nodes = MemoryStore(Path(folder), Path(memory, f"node_{place.job.rank}"), 600.0, disk.layout, print, {})
    stores: dict[str, CheckpointStore | MemoryStore] = dict.fromkeys(MODES, disk) | {"in memory": nodes}

    waits = [0.0]

    @contextmanager
    def time_wait() -> Iterator[None]:
        started = time.perf_counter()
        yield
        waits[0] += time.perf_counter() - started

    def step() -> None:
        model.train_step(batch, lambda output, _: TokenLoss(-output.logprobs))  # type: ignore[operator]

    def begin(number: int, mode: str) -> None:
        def stage(target: Path) -> RankWrite:
            if mode == "in memory":
                (target / "actor").mkdir(exist_ok=True)
            copies: Literal["later", "none"] = "none" if mode == "waited for" else "later"
            staged = StagedCheckpoint(model, target / "actor", slot, copies, waiting=time_wait)
            threads = WRITERS if mode == "waited for" else 1
            return RankWrite(lambda ended: staged.write(threads, ended), staged.finish)

        store = stores[mode]
        store.begin(number, {"step": number}, stage)
        if mode == "waited for":
            store.finish()

    def run_series(number: int, mode: str) -> Series:
        ranks.barrier()
        start, cpu_start, between, waits[0] = time.perf_counter(), time.process_time(), 0.0, 0.0
        store = stores[mode]
        for turn in range(STEPS):
            step()
            ended = time.perf_counter()
            written = all(ranks.all_gather_objects(store.is_written()))
            if store.pending_step is not None and (written or turn == STEPS - 1):
                store.finish()
            if turn == 0 and mode != MODES[0]:
                begin(number, mode)
            between += time.perf_counter() - ended
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        return seconds, between + waits[0], sum(ranks.all_gather_objects(cpu_seconds))

    series: dict[str, list[Series]] = {mode: [] for mode in MODES}
    step()
    gc.freeze()  # as a run does before its first step
    for turn in range(rounds + 1):
        for number, mode in enumerate(rotate(MODES, turn)):
            times = run_series(turn * len(MODES) + number + 1, mode)
            if turn:  # the first round allocates memory and makes plans
                series[mode].append(times)
    size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    copied = ranks.all_gather_objects(slot.staging.nbytes)
    ranks.shutdown()
    return {"series": series, "bytes": size, "copied": copied}


def compute_overheads(series: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, dict[str, float]]:
    """Return, by kind of save: median seconds of a step, how long a save holds it up, and how much longer the series
    takes; the latter two also as shares of a step and of the series."""
    totals = {mode: statistics.median(sample[0] for sample in samples) for mode, samples in series.items()}
    between = {mode: statistics.median(sample[1] for sample in samples) for mode, samples in series.items()}
    step = (totals[MODES[0]] - between[MODES[0]]) / STEPS
    return {
        mode: {
            "step, s": step,
            "held up, s": (blocked := between[mode] - between[MODES[0]]),
            "of a step, %": blocked / step,
            "longer, s": (longer := totals[mode] - totals[MODES[0]]),
            "of the series, %": longer / totals[MODES[0]],
        }
        for mode in MODES
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--width", type=int_in_range(128, 1 << 16), default=512, help="hidden size, a multiple of 128")
    parser.add_argument("--layers", type=int_in_range(most=1 << 10), default=6, help="of the model")
    parser.add_argument(
        "--tokens", type=int_in_range(1024, 1 << 24), default=4096, help="of a step, a multiple of 1024"
    )
    parser.add_argument("--rounds", type=int_in_range(most=1000), default=5, help="of four series each")
    parser.add_argument("--folder", type=Path, help="where to write; by default where the system says")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="where to write in memory")


def run(options: argparse.Namespace, report: Report) -> None:
    report.start()
    sizes = {name: getattr(options, name) for name in ("width", "layers", "tokens", "rounds")}
    temporary = tempfile.TemporaryDirectory
    with temporary(dir=options.folder) as folder, temporary(dir=options.memory) as memory:
        results = run_function("benchmarks.save:measure", 2, folder=folder, memory=memory, **sizes)
    copied = " and ".join(f"{size / 1e6:.0f}" for size in results["copied"])
    report.note(f"a checkpoint of {results['bytes'] / 1e6:.0f} MB, of which ranks copy {copied} MB")
    samples = Samples(MODES)
    for mode, series in results["series"].items():
        for seconds, _, processor_s in series:
            samples.add(mode, seconds, processor_s)
    report.table(f"series of {STEPS} steps with one save", samples.rows(compute_overheads(results["series"])))
