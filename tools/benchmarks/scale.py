"""Modelled host seconds of a step, outside of model, optimizer and engine, for jobs too large for this machine.

    .venv/bin/python tools/bench.py scale [--config configs/deepseek_v3_671b.yaml] [--sequences 1024] [--length 32768]

The host seconds of a rank are the sum of

- work on tokens of its own rollouts: columns, token functions, mini-batches, checks, rows laid out for other ranks;
  seconds per token, and per byte of their routing records, whatever the number of ranks;
- work on the tokens that it computes: micro-batches; likewise;
- plans: who computes what, and who needs what from whom. They grow with all sequences and with the ranks of a machine;
  these are not modelled: this process creates them, as that rank, from the lengths of all sequences;
- exchanges of values of all sequences, as many in every step: fixed seconds, plus some for each round; twice as many
  ranks need one more round (`parallel/collectives.py`);
- bytes sent to other machines, which this process counts in the plans, at the speed of gloo.

The first two are CPU seconds, measured in steps of `bench.py flow` at 2 and 4 ranks; so are the exchanges', at 2, 4 and
8 ranks, without the network between machines. Then a step at 8 ranks in another layout is predicted and measured.
Rollouts are recorded in the background, and waits for other ranks are attributed to the model.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from flow import planned
from flow.answers import SIZES, Shape
from flow.parts import NOT_OURS

from benchmarks.flow import run_ranks
from benchmarks.output import Report
from megarl.config import Config, load_config
from megarl.config.command_line import int_in_range
from megarl.models.flops import quadratic_cost
from megarl.models.pipeline_stages import stage_layers
from megarl.models.registry import family_of, load_hf_config
from megarl.models.routing import routing_shape

if TYPE_CHECKING:
    from flow.paper import PlannedJob

PLANS = ("plans", "rows to models", "numbers back")
"""Parts in which plans are made."""
SCALING_QUANTITIES: dict[str, tuple[str, ...]] = {
    "micro-batches": ("computed", "computed records"),
    "rows to models": ("home", "home records"),
    "numbers back": ("home", "computed"),
    "plans": (),
}
"""Quantities that the seconds of a part grow with; all other parts grow with the tokens of the rank's own rollouts."""


@dataclass(frozen=True)
class Work:
    """Work of a rank in a step: tokens, and bytes of their routing records in all layers, or in those of its stage."""

    home: float
    record: float
    computed: float
    stage_record: float

    def features(self, names: Sequence[str]) -> list[float]:
        """Return the quantities, with a 1 for what does not grow."""
        quantities = {
            "home": self.home,
            "home records": self.home * self.record,
            "computed": self.computed,
            "computed records": self.computed * self.stage_record,
        }
        return [*(quantities[name] for name in names), 1.0]


@dataclass(frozen=True)
class Constants:
    """parts: by part, the seconds for each quantity that it grows with, and per step. planning: seconds of a plan in
    this process over those in a rank. exchange: fixed seconds of an exchange, and seconds per round. byte: seconds per
    byte to another machine."""

    parts: Mapping[str, Sequence[float]]
    exchange: tuple[float, float]
    exchanges: int
    byte: float

    def seconds(self, work: Work) -> dict[str, float]:
        """Return CPU seconds by part, without plans."""
        return {
            part: float(np.dot(coefficients, work.features(scaling_quantities(part))))
            for part, coefficients in self.parts.items()
        }


def rounds(world: int) -> int:
    """Return the number of rounds of an exchange between this many ranks."""
    return (world - 1).bit_length()


def scaling_quantities(part: str) -> tuple[str, ...]:
    return SCALING_QUANTITIES.get(part, ("home",))


@dataclass(frozen=True)
class Step:
    """Work of a rank in a measured run, and its CPU seconds by part without plans, which take `planning` seconds."""

    work: Work
    busy: Mapping[str, float]
    planning: float


def make_spec(world: int, layers: int, sequences: int, length: int, repeats: int, **layout: int) -> dict[str, Any]:
    settings = {"controller": "ppo", "updates": 4, "tp": 1, "pp": 1, "engine_tp": 2, "repeats": repeats} | layout
    shape = Shape(sequences, 4, str(length), 1, layers, 8)
    return settings | dict(ranks=world, shape=vars(shape), token_budget=32768, per_machine=world)


def measured_steps(spec: Mapping[str, Any], by_rank: Sequence[Mapping[str, Any]]) -> list[Step]:
    shape, results = Shape(**spec["shape"]), []
    record = shape.layers * shape.topk
    for name, share in SIZES.items():
        part = {**spec, "shape": {**spec["shape"], "sequences": round(shape.sequences * share)}}
        planned_job = planned.plan_job(part)
        for rank, sizes in enumerate(by_rank):
            repeated_steps = sizes[name]
            planning = planned_job.step(rank, repeated_steps[0]["seed"]).seconds
            busy = {
                name: statistics.median(step["busy_parts"].get(name, 0.0) for step in repeated_steps)
                for name in {name for step in repeated_steps for name in step["busy_parts"]} - {NOT_OURS}
            }
            spent = sum(busy.get(name, 0.0) for name in PLANS)
            for plan_part in PLANS:  # plans are part of these, and counted separately
                busy[plan_part] = busy.get(plan_part, 0.0) * max(0.0, 1 - planning / spent)
            computed = repeated_steps[0]["computed"]
            work = Work(sizes["own"] * share, record, computed, record / spec["pp"])
            results.append(Step(work, busy, planning))
    return results


def fit_constants(steps: Sequence[Step]) -> dict[str, list[float]]:
    """Fit the constants by part with least squares; negative ones are dropped."""
    constants = {}
    for part in sorted({part for step in steps for part in step.busy} - {"plans"}):
        seconds = np.array([step.busy.get(part, 0.0) for step in steps])
        rows = np.array([step.work.features(scaling_quantities(part)) for step in steps])
        used = list(range(rows.shape[1]))
        while True:
            scale = rows[:, used].max(0)
            coefficients = np.linalg.lstsq(rows[:, used] / scale, seconds, rcond=None)[0] / scale
            if (coefficients >= 0).all() or len(used) == 1:
                break
            used.pop(int(np.argmin(coefficients * scale)))
        full = np.zeros(rows.shape[1])
        full[used] = coefficients.clip(min=0)
        constants[part] = full.tolist()
    return constants


def job(config: Config, sequences: int, length: int) -> tuple[PlannedJob, torch.Tensor, Any, list[tuple[int, ...]]]:
    """Return a job's plans, the ranks of its sequences, the routing records of a token, and the part of them that a
    stage replays."""
    from flow.paper import PlannedJob  # imports Megatron

    parallel, hf = config.parallel, load_hf_config(config.model.hf_config or config.model.path)
    routing = routing_shape(hf, config.model.megatron)
    settings = {**family_of(hf).megatron_config(hf), **config.model.megatron}
    stages = stage_layers(int(settings["num_layers"]), parallel.pp, settings, parallel.vpp)
    position = {layer: number for number, layer in enumerate(routing.moe_layers)}
    layers = [tuple(position[layer] for layer in stage if layer in position) for stage in stages]
    engines = parallel.world_size // config.rollout.tp
    homes = torch.arange(sequences) * engines // sequences * config.rollout.tp
    sizes = torch.full((sequences,), length)
    return PlannedJob(config, sizes, homes, routing, layers, quadratic_cost(hf)), homes, routing, layers


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", default="configs/deepseek_v3_671b.yaml")
    parser.add_argument("--sequences", type=int_in_range(), default=1024)
    parser.add_argument("--length", type=int_in_range(), default=32768)
    parser.add_argument("--step-s", type=float, default=300.0, help="seconds of the whole step")
    parser.add_argument("--small", type=int_in_range(), default=64, help="sequences of the steps that are measured")
    parser.add_argument("--small-length", type=int_in_range(), default=8192, help="their tokens")
    parser.add_argument("--repeats", type=int_in_range(), default=3)


def run(options: argparse.Namespace, report: Report) -> None:
    small = options.small, options.small_length, options.repeats
    specs = [make_spec(2, 4, *small), make_spec(2, 16, *small), make_spec(4, 4, *small, tp=2)]
    specs.append(make_spec(8, 8, *small, tp=2, pp=2, engine_tp=4))
    report.start()
    runs = [(spec, run_ranks(spec)) for spec in specs]
    constants = report_constants(runs, report)
    report_job(options, constants, report)


def report_constants(
    runs: Sequence[tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]], report: Report
) -> Constants:
    """Fit the constants to all runs but the last, and report how they predict that."""
    *fitted_runs, (last, last_results) = runs
    waits = {rounds(spec["ranks"]): min(rank["latency"] for rank in measured) for spec, measured in runs}
    slope, start = np.polyfit(list(waits), list(waits.values()), 1)
    constants = Constants(
        fit_constants([step for fitted_run in fitted_runs for step in measured_steps(*fitted_run)]),
        (max(0.0, float(start)), max(0.0, float(slope))),
        max(step["collectives"] for _, measured in runs for step in measured[0]["full"]),
        min(rank["wire"] for _, measured in runs for rank in measured),
    )
    rows = []
    for part, coefficients in constants.parts.items():
        by_name = dict(zip((*scaling_quantities(part), "once"), coefficients, strict=True))
        names = {"home": "ns a token at home", "home records": "a byte of its record"}
        names |= {"computed": "a computed token", "computed records": "a byte"}
        row = {"part": part} | {title: 1e9 * by_name.get(name, 0.0) for name, title in names.items()}
        rows.append(row | {"ms a step": 1e3 * by_name["once"]})
    report.table("constants, fitted to measured steps at 2 and 4 ranks", rows)
    fixed, per_round = constants.exchange
    report.note(
        f"an exchange: {1e3 * fixed:.2f} ms and {1e3 * per_round:.3f} a round, of which "
        f"there are {constants.exchanges} in a step; to another machine {1e-9 / constants.byte:.2f} GB/s"
    )
    predictions = []
    for rank, step in enumerate(measured_steps(last, last_results)[-len(last_results) :]):
        guess = sum(constants.seconds(step.work).values()) + step.planning
        measured = sum(step.busy.values()) + step.planning
        row = {"rank": str(rank), "predicted, processor s": guess, "measured, processor s": measured}
        predictions.append(row | {"predicted over measured": guess / measured})
    report.table("a step at 8 ranks, of which no constant is", predictions)
    return constants


def report_job(options: argparse.Namespace, constants: Constants, report: Report) -> None:
    """Model the host seconds of some ranks of the large job."""
    extra = [f"data.prompts_per_step={options.sequences // 16}", "rollout.samples_per_prompt=16"]
    config = load_config(
        options.config,
        [
            *extra,
            f"rollout.max_context={options.length}",
            f"train.max_tokens_per_gpu={options.length}",
            "train.routing_replay=true",
        ],
    )
    parallel = config.parallel
    planned_job, homes, routing, layers = job(config, options.sequences, options.length)
    stage = parallel.world_size // parallel.pp
    routing_bytes = len(routing.moe_layers) * routing.topk * routing.dtype.itemsize
    plans: dict[int, dict[str, float]] = {}
    for rank in sorted({0, 1, parallel.world_size // 2, parallel.world_size - stage, parallel.world_size - 1}):
        traffic = planned_job.step(rank, 0)
        home = float((homes == rank).sum()) * options.length
        record_bytes = len(layers[rank // stage]) * routing.topk * routing.dtype.itemsize
        plans[rank] = constants.seconds(Work(home, routing_bytes, traffic.computed, record_bytes)) | {
            "plans": traffic.seconds,
            "exchanges": constants.exchanges
            * (constants.exchange[0] + constants.exchange[1] * rounds(parallel.world_size)),
            "bytes to other machines": traffic.network * constants.byte,
        }
    modelled = []
    for rank, parts in plans.items():
        total = sum(parts.values())
        row = {"rank": f"rank {rank}", **parts, "in all": total, f"of {options.step_s:g} s, %": total / options.step_s}
        modelled.append(row)
    report.table(f"{parallel.world_size} ranks, modelled seconds of a step", modelled, transposed=True)
