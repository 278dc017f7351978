"""Modelled seconds of training steps with static and with dynamic context parallelism (`parallel.dynamic_cp`).

    .venv/bin/python tools/bench.py context [--ranks 32] [--cp 8] [--sequences 512] [--median 2048 8192]

Lengths are log-normal, with a standard deviation of 1 of their logarithm, clipped at `--longest`. Costs are those of
Qwen3-30B-A3B on H100s, without recomputation, by the rates of `models/step_time.py`: matrix products of the padded
tokens, keys and values sent around each context parallel group, and a fixed time for the kernels of each micro-batch.
All ranks wait for the slowest after each micro-batch, as with expert parallelism over all of them.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence

import numpy as np

from benchmarks.output import Report
from benchmarks.workloads import ROOT
from megarl.config import ConfigError
from megarl.config.command_line import int_in_range
from megarl.data.packing import MicroBatchPlan, plan_micro_batches
from megarl.models.activation_memory import DTYPE_BYTES
from megarl.models.family import HFConfig
from megarl.models.flops import active_params, quadratic_cost
from megarl.models.registry import family_of, load_hf_config
from megarl.models.step_time import GPUSpec, context_costs, kv_elements
from megarl.parallel.context_parallel import context_sizes

RANKS_PER_NODE = 8
COSTS = ROOT / "configs/models/qwen3_30b_a3b.json"


def draw_lengths(count: int, median: int, longest: int) -> list[int]:
    """Return seeded log-normal lengths."""
    drawn = np.random.default_rng(1).lognormal(np.log(median), 1.0, count)
    return [int(length) for length in drawn.clip(64, longest)]


def plan_static(lengths: Sequence[int], ranks: int, cp: int, budget: int, quadratic: float) -> MicroBatchPlan:
    """Plan micro-batches of the largest size alone."""
    plan = plan_micro_batches(lengths, ranks // cp, budget * cp, quadratic)
    return MicroBatchPlan((row for row in plan for _ in range(cp)), (cp,) * len(plan.widths))


def model_seconds(hf: HFConfig, lengths: Sequence[int], plan: MicroBatchPlan, tp: int) -> dict[str, float]:
    """Return the seconds of an update by part, of the slowest ranks in each micro-batch."""
    machine, settings = GPUSpec(), family_of(hf).megatron_config(hf)
    layers, quadratic = int(settings["num_layers"]), quadratic_cost(hf)
    per_token = 6 * active_params(hf) / machine.flops
    keys_and_values = kv_elements(settings) * DTYPE_BYTES["bfloat16"]
    seconds = {"computing": 0.0, "context": 0.0, "launches": layers * machine.moe_layer_overhead * len(plan.widths)}
    for number, width in enumerate(plan.widths):
        unit = 2 * width if width > 1 else 1
        parts = [np.array([-(-lengths[i] // unit) * unit for i in plan[row][number]]) for row in range(len(plan))]
        slowest = max(parts, key=lambda padded: float((padded + quadratic * padded**2).sum()))
        seconds["computing"] += float((slowest + quadratic * slowest**2).sum()) / width / tp * per_token
        # Keys and values pass all other ranks in the forward and the backward pass, and so do their gradients.
        sent = 3 * layers * (width - 1) / width / tp * int(slowest.sum()) * keys_and_values
        seconds["context"] += machine.transfer_seconds(sent, crosses_nodes=tp * width > RANKS_PER_NODE)
    return seconds


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int_in_range(most=1 << 14), default=32, help="context and data parallel ranks")
    parser.add_argument("--tp", type=int_in_range(most=64), default=1, help="tensor parallel size, of further ranks")
    parser.add_argument("--cp", type=int_in_range(2, 64), default=8, help="largest context parallel size")
    parser.add_argument("--sequences", type=int_in_range(most=1 << 18), default=512, help="of an update")
    parser.add_argument("--budget", type=int_in_range(most=1 << 24), default=16_384, help="tokens of a rank")
    parser.add_argument("--longest", type=int_in_range(64, 1 << 24), default=131_072, help="tokens of a sequence")
    parser.add_argument(
        "--median", type=int_in_range(64, 1 << 24), nargs="+", default=[2048, 4096, 8192, 16_384], help="tokens"
    )


def run(options: argparse.Namespace, report: Report) -> None:
    if options.ranks % options.cp:
        raise ConfigError(f"--ranks {options.ranks} is not a multiple of --cp {options.cp}")
    report.start()
    hf = load_hf_config(COSTS)
    quadratic, rows = quadratic_cost(hf), []
    for median in options.median:
        lengths = draw_lengths(options.sequences, median, options.longest)
        widths = dict(context_costs(hf, context_sizes(options.cp), options.tp, RANKS_PER_NODE))
        plans = {
            f"cp {options.cp}": plan_static(lengths, options.ranks, options.cp, options.budget, quadratic),
            "dynamic": plan_micro_batches(lengths, options.ranks, options.budget, quadratic, widths=widths),
        }
        for name, plan in plans.items():
            seconds = model_seconds(hf, lengths, plan, options.tp)
            sizes = ", ".join(f"{count} of {width}" for width, count in sorted(Counter(plan.widths).items()))
            rows.append(
                {"median": median, "way": name, "micro-batches": sizes, "step": sum(seconds.values())} | seconds
            )
    report.table(f"{options.sequences} sequences on {options.ranks} ranks, seconds (modelled)", rows)
