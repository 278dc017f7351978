"""Share of a training step spent on real tokens, and waits of ranks for each other: planned and measured.

    .venv/bin/python tools/bench.py step [--texts gsm8k.jsonl --key answer] [--ranks 8] [--budget 3072] [--run RUN_DIR]

Compares four ways to split the same sequences into micro-batches: packed end to end or padded to the longest of each,
and by a token budget with balanced costs (as MegaRL does) or with a fixed number of sequences, in order. First on
paper, for many ranks and the costs of Qwen3-30B-A3B; then as steps of a tiny MoE on two data parallel ranks of this
machine, interleaved in one run. With --run, prints the share of a loop's steps that no phase of model, optimizer and
engine accounts for; `megarl report` plots where the rest goes.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from local_ranks import run_function

from benchmarks.measure import Samples
from benchmarks.output import Report
from benchmarks.workloads import ROOT, make_batch, moe_config
from megarl.config import ConfigError
from megarl.config.command_line import int_in_range
from megarl.data.packing import plan_micro_batches
from megarl.data.table import read_rows
from megarl.models.flops import quadratic_cost
from megarl.models.registry import load_hf_config
from megarl.observe.tracker import read_metrics

Plan = list[list[list[int]]]
METHODS = ("packed, balanced", "packed, as they come", "padded, balanced", "padded, as they come")
ROUNDS = 5
COSTS = ROOT / "configs/models/qwen3_30b_a3b.json"
MODEL = moe_config(
    vocab_size=512,
    hidden_size=64,
    head_dim=16,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=128,
    moe_intermediate_size=64,
    num_experts=8,
    num_hidden_layers=4,
)


def long_tailed(count: int, longest: int) -> list[int]:
    """Return seeded lengths distributed like those of long answers: log-normal, half below 300 tokens, clipped at
    `longest`."""
    drawn = np.random.default_rng(1).lognormal(np.log(300), 1.0, count)
    return [int(length) for length in drawn.clip(8, longest)]


def text_lengths(file: Path, key: str, limit: int) -> list[int]:
    """Return lengths of the texts under `key` in a data file, counted in words, digits and punctuation: about what
    tokenizers produce."""
    lengths = []
    for location, row in islice(read_rows(file), limit):
        if not isinstance(row.get(key), str):
            raise ConfigError(f"{location} has no text {key!r}; name the column of the texts with --key")
        lengths.append(max(1, len(re.findall(r"\d|[^\W\d]+|[^\w\s]", row[key]))))
    if not lengths:
        raise ConfigError(f"{file} holds no texts")
    return lengths


def as_they_come(lengths: Sequence[int], dp: int, budget: int) -> Plan:
    """Split in order: as many sequences per micro-batch as fit the budget whatever their lengths, dealt out in turn."""
    size = max(1, budget // max(lengths))
    parts = [list(range(i, min(i + size, len(lengths)))) for i in range(0, len(lengths), size)]
    parts += [[] for _ in range(-len(parts) % dp)]
    return [parts[rank::dp] for rank in range(dp)]


def computed(lengths: Sequence[int], part: Sequence[int], method: str) -> list[int]:
    """Return the lengths that are computed for a micro-batch's sequences."""
    part_lengths = [lengths[i] for i in part]
    return [max(part_lengths)] * len(part_lengths) if part_lengths and method.startswith("padded") else part_lengths


def plan(lengths: Sequence[int], dp: int, budget: int, quadratic: float, method: str) -> Plan:
    if method.endswith("balanced"):
        return plan_micro_batches(lengths, dp, budget, quadratic)
    return as_they_come(lengths, dp, budget)


def plan_costs(lengths: Sequence[int], dp: int, budget: int, quadratic: float, method: str) -> dict[str, float]:
    """Return the share of real tokens, and the ranks' waits: `busiest` is the cost of the most expensive rank over the
    mean, `waiting` the same if ranks meet after each micro-batch, as expert parallelism creates them."""
    micro_batches = plan(lengths, dp, budget, quadratic, method)
    parts = [[computed(lengths, part, method) for part in rank] for rank in micro_batches]
    costs = np.array([[sum(n + quadratic * n * n for n in part) for part in rank] for rank in parts])
    total = sum(sum(part) for rank in parts for part in rank)
    return {
        "micro-batches": float(len(micro_batches[0])),
        "real tokens": sum(lengths) / total,
        "busiest": float(costs.sum(1).max() / costs.sum(1).mean()),
        "waiting": float(costs.max(0).sum() / costs.mean(0).sum()),
    }


def measure(lengths: list[int], budget: int) -> dict[str, list[tuple[float, float, float]]]:
    """Run as a rank. Return for each training step in each way its seconds, the processor seconds of both ranks, and
    the share that is neither model nor optimizer."""
    import torch

    import megarl.megatron.trainer_model as model_file
    from megarl.config import from_dict
    from megarl.megatron.distribution import BatchDispatcher
    from megarl.megatron.trainer_model import MegatronModel
    from megarl.parallel import ranks
    from megarl.types import TokenLoss, TrainBatch

    tree = {"model": {"dtype": "float32"}, "parallel": {"world_size": 2}, "train": {"max_tokens_per_gpu": budget}}
    config = from_dict(tree)
    place = ranks.initialize(config.parallel, timeout_s=600)
    torch.manual_seed(1)
    model = MegatronModel(MODEL, config, place, "actor", total_updates=100)
    for tensor in model.local_params().values():
        tensor.normal_(std=0.05) if tensor.dim() > 1 else tensor.fill_(1.0)
    model.optimizer.reload_model_params()
    model_seconds: list[float] = []

    def timed(work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = work(*args, **options)
            model_seconds.append(time.perf_counter() - start)
            return result

        return call

    schedule, take_step = model_file.get_forward_backward_func, model_file.optimizer.take_step
    model_file.get_forward_backward_func = lambda: timed(schedule())  # type: ignore[assignment]
    model_file.optimizer.take_step = timed(take_step)

    def make_work(method: str) -> tuple[TrainBatch, Plan]:
        micro_batches = plan(lengths, 2, budget, model.dispatcher.quadratic_cost, method)
        sizes = list(lengths)
        for part in (part for rank in micro_batches for part in rank):
            for i, size in zip(part, computed(lengths, part, method), strict=True):
                sizes[i] = size
        return make_batch(sizes, 512), micro_batches

    work = {method: make_work(method) for method in METHODS}
    steps: dict[str, list[tuple[float, float, float]]] = {method: [] for method in METHODS}
    dispatcher = model.dispatcher
    for turn in range(ROUNDS + 1):
        for method, (batch, micro_batches) in work.items():
            # MegaRL's split is timed with its planning; the plans of the others are precomputed.
            planned = type(
                "Planned", (BatchDispatcher,), {"plan": lambda *_, fixed_plan=micro_batches, **__: fixed_plan}
            )
            model.dispatcher = dispatcher if method == METHODS[0] else planned(**vars(dispatcher))
            model_seconds.clear()
            ranks.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            model.train_step(batch, lambda output, _: TokenLoss(-output.logprobs))  # type: ignore[operator]
            elapsed, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
            processor_s = sum(ranks.all_gather_objects(cpu_seconds))
            if turn:  # the first turn is warm-up
                steps[method].append((elapsed, processor_s, 1 - sum(model_seconds) / elapsed))
    ranks.shutdown()
    return steps


def outside_of_phases(folder: Path) -> float:
    """Return the mean share of a run's steps that is in no phase, or in one other than model, optimizer and engine."""
    phases = ("generate", "actor_", "critic_", "reference_", "reward_model_", "weight_sync", "sleep")
    counted = tuple(f"time/{phase}" for phase in phases)
    shares = []
    try:
        for row in read_metrics(folder).values():
            if step_seconds := row.get("time/step"):
                shares.append(1 - sum(value for name, value in row.items() if name.startswith(counted)) / step_seconds)
    except (ValueError, TypeError, RecursionError):
        raise ConfigError(f"--run {folder}: its metrics.jsonl is not that of a run") from None
    if not shares:
        raise ConfigError(f"--run {folder} has no steps yet; is it a run folder?")
    return statistics.fmean(shares)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--texts", type=Path, help="JSONL file of texts, for their lengths")
    parser.add_argument("--key", default="answer", help="of the text in each line")
    parser.add_argument("--ranks", type=int_in_range(most=1 << 16), default=8, help="data parallel ranks on paper")
    parser.add_argument("--budget", type=int_in_range(most=1 << 24), default=3072, help="tokens of a micro-batch")
    parser.add_argument(
        "--longest", type=int_in_range(8, 1 << 24), default=4096, help="tokens at which the long-tailed lengths are cut"
    )
    parser.add_argument(
        "--sequences",
        type=int_in_range(most=1 << 20),
        default=512,
        help="of a step on paper; an eighth of them is measured",
    )
    parser.add_argument("--run", type=Path, help="run folder of a loop")


def run(options: argparse.Namespace, report: Report) -> None:
    share = outside_of_phases(options.run) if options.run else None
    sets = {"long-tailed lengths": long_tailed(options.sequences, options.longest)}
    if options.texts:
        sets[f"lengths of {options.texts.name}"] = text_lengths(options.texts, options.key, options.sequences)
    report.start()
    quadratic = quadratic_cost(load_hf_config(COSTS))
    for name, lengths in sets.items():
        costs = {method: plan_costs(lengths, options.ranks, options.budget, quadratic, method) for method in METHODS}
        report.table(
            f"{name}: {len(lengths)} sequences on {options.ranks} ranks, on paper",
            [{"way": method, **row} for method, row in costs.items()],
        )
        part = lengths[:: max(1, len(lengths) // 64)]
        steps = run_function("benchmarks.step:measure", 2, lengths=part, budget=options.budget)
        samples = Samples(METHODS)
        for method, measured in steps.items():
            for seconds, processor_s, _ in measured:
                samples.add(method, seconds, processor_s)
        outside = {
            method: {"outside of model, optimizer, %": statistics.median(share for *_, share in measured)}
            for method, measured in steps.items()
        }
        report.table(f"{name}: {len(part)} sequences on 2 ranks of this machine", samples.rows(outside))
    if share is not None:
        report.note(f"{options.run}: {share:.1%} of a step is neither model nor optimizer nor engine")
