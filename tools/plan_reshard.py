"""Plan how a model's weights go from Megatron's ranks to SGLang's, on paper: no GPU, no weights, no process.

    .venv/bin/python tools/plan_reshard.py --model deepseek-v3 --train tp=8,pp=16,ep=32,world=512 --engine tp=32,ep=32

Plans the weight sync of every rank. Prints bytes, balance, rounds and staging beside the lower bound that ownership
sets, which is computed independently of the planner; the expected time; and a better split of the layers over the
stages, if there is one. It refuses what a run would refuse, by the same checks. Rank r is on node r // gpus-per-node.
Trainer and engines share the same ranks, or use those that are named:

    ... --train world=256,tp=8,pp=8,ep=32 --engine tp=32,ep=32 --train-ranks 0-255 --engine-ranks 256-511
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from megarl.config import Config, ConfigError, from_dict
from megarl.config.command_line import (
    Parser,
    check_writable_file,
    float_in_range,
    int_in_range,
    parse_path_text,
    run_cli,
)
from megarl.controllers.controller import load_requirements
from megarl.dry_run.plan_layouts import MAX_NUMBER, MODELS, model_config, sizes
from megarl.dry_run.suggest_layout import check_feasible, split_layers
from megarl.engine.engine_backends import plan_from_config
from megarl.models.family import HFConfig
from megarl.models.fp8 import BLOCK
from megarl.models.int4 import is_int4
from megarl.models.pipeline_stages import stage_layers
from megarl.models.registry import family_of
from megarl.parallel.placement import format_ranges
from megarl.reshard.plan.bound import Bound, Columns, compute_bound, expand_to_ranks, list_layer_columns
from megarl.reshard.plan.cost_report import (
    LinkSpeeds,
    build_report,
    compute_metrics,
    format_bytes,
    render_page,
    summarize,
)
from megarl.reshard.plan.layout import EngineLayout, TrainLayout, Wire, build_rank_map, even_stages

TRAIN = {"world": 0, "tp": 1, "pp": 1, "vpp": 1, "ep": 1, "etp": 1, "cp": 1}
ENGINE = {"tp": 0, "ep": 1, "dp": 1, "mlp_tp": 0, "head_tp": 0, "shared_tp": 0}
LEAST_GAIN = 0.002  # smallest gain of another split that is worth a line


def rank_set(text: str, option: str) -> tuple[int, ...]:
    """Parse `0-3,8,9` to ranks, in this order. Raises ConfigError."""
    ranks: list[int] = []
    for part in filter(None, text.split(",")):
        first, dash, last = part.partition("-")
        ends = [first, last] if dash else [first, first]
        if not all(end.isdecimal() and len(end) <= 7 for end in ends) or not int(ends[0]) <= int(ends[1]) < MAX_NUMBER:
            raise ConfigError(f"{option} must be ranks such as 0-3,8,9, not {part[:40]!r}")
        ranks += range(int(ends[0]), int(ends[1]) + 1)
    return tuple(ranks)


def build_config(options: argparse.Namespace, hf: HFConfig) -> Config:
    """Return the configuration of a run in these layouts, after a run's checks. Raises ConfigError."""
    train, engine = sizes(options.train, TRAIN, "--train"), sizes(options.engine, ENGINE, "--engine")
    train_ranks, engine_ranks = (
        rank_set(options.train_ranks, "--train-ranks"),
        rank_set(options.engine_ranks, "--engine-ranks"),
    )
    world, placement = train.pop("world"), {}
    if train_ranks and len(train_ranks) != world:
        raise ConfigError(
            f"a layout of {world} trainer ranks cannot be placed on {len(train_ranks)} ranks: --train-ranks"
        )
    if train_ranks or engine_ranks:
        train_ranks = train_ranks or tuple(range(world))
        placement = {
            "actor": format_ranges(sorted(train_ranks)),
            "rollout": format_ranges(sorted(engine_ranks or train_ranks)),
        }
        per_node = options.gpus_per_node
        # Whole nodes: the remaining ranks of the last node have other roles.
        world = -(-(max(*train_ranks, *engine_ranks) + 1) // per_node) * per_node
    sglang, drafts = sglang_settings(engine), family_of(hf).num_mtp_layers(hf) == 1
    if "attn_dp_size" in sglang or "moe_a2a_backend" in sglang:
        drafts = False  # a run refuses the combination
    return from_dict(
        {
            "algorithm": "grpo",
            "model": {
                "dtype": "float32" if options.wire == "fp32" else "bfloat16",
                "megatron": stage_settings(options, int(hf["num_hidden_layers"]), train["pp"], train["vpp"]),
            },
            "parallel": {"world_size": world, "ranks_per_node": options.gpus_per_node, **train},
            "placement": placement,
            "rollout": {
                "tp": engine["tp"],
                "ep": engine["ep"],
                "sglang": sglang,
                "num_speculative_tokens": int(drafts),
                "weight_sync_bucket_mb": options.bucket_mb,
                "max_context": 1024,  # has no effect here
            },
            "train": {"mtp_loss_coef": float(drafts)},
        }
    )


def sglang_settings(engine: Mapping[str, int]) -> dict[str, Any]:
    """Return the SGLang settings that give this engine layout. Raises ConfigError if there are none."""
    settings: dict[str, Any] = {}
    tp, attention = engine["tp"], engine["tp"] // engine["dp"]
    if engine["dp"] > 1:
        settings["attn_dp_size"] = engine["dp"]
    if engine["mlp_tp"] not in (0, tp):
        settings["moe_dense_tp_size"] = engine["mlp_tp"]
    if engine["head_tp"] not in (0, tp):
        if engine["head_tp"] != attention:
            raise ConfigError(
                f"--engine head_tp={engine['head_tp']}: SGLang knows tp / dp = {attention} and tp={tp} only"
            )
        settings["enable_dp_lm_head"] = True
    if engine["shared_tp"] not in (0, tp):
        if engine["shared_tp"] != 1:
            raise ConfigError(f"--engine shared_tp={engine['shared_tp']}: SGLang knows 1 and tp={tp} only")
        settings["moe_a2a_backend"] = "deepep"
    return settings


def stage_settings(options: argparse.Namespace, layers: int, pp: int, vpp: int) -> dict[str, int]:
    """Return the `model.megatron` settings of the layers per stage, as requested, or as even as a run creates them."""
    if not options.pp_layers:
        return split_layers(layers, pp, vpp) or {}
    try:
        counts = [int(number) for number in options.pp_layers.split(",")]
    except ValueError:
        raise ConfigError(f"--pp-layers must be numbers such as 4,4,3, not {options.pp_layers[:80]!r}") from None
    even_stages(layers, pp, counts)  # raises unless the counts match the model
    if len(set(counts)) == 1:
        return {}
    settings = {"num_layers_in_first_pipeline_stage": counts[0], "num_layers_in_last_pipeline_stage": counts[-1]}
    if [len(stage) for stage in stage_layers(layers, pp, settings, vpp)] != counts:
        raise ConfigError(
            f"--pp-layers {options.pp_layers[:80]}: only the first and the last stage can have layers of their own "
            "number, the others have equally many"
        )
    return settings


def on_the_wire(hf: HFConfig, wire: str) -> HFConfig:
    """Return the model with a checkpoint whose engines receive weights in this format."""
    if wire == "int4":
        if not is_int4(hf):
            raise ConfigError("--wire int4 is for models whose config.json declares INT4 experts")
        return hf
    unquantized = {key: value for key, value in hf.items() if key != "quantization_config"}
    if wire != "fp8":
        return unquantized
    return unquantized | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}}


def title(options: argparse.Namespace, train: TrainLayout, engine: EngineLayout) -> str:
    vpp = sizes(options.train, TRAIN, "--train")["vpp"]
    train_sizes = {"TP": train.tp, "CP": train.cp, "PP": train.pp, "VPP": vpp, "EP": train.ep, "ETP": train.etp}
    engine_sizes = {"TP": engine.tp, "EP": engine.ep, "DP": engine.dp}

    def text(values: dict[str, int]) -> str:
        return " ".join(f"{name}{value}" for name, value in values.items() if value > 1) or "TP1"

    number = f"{train.world} GPUs"
    if train.ranks or engine.ranks:
        number += f" -> {len(engine.ranks) or train.world} GPUs"
    draft = ", with the draft model" if engine.draft else ""
    return (
        f"{Path(options.model).name}, {number}: {text(train_sizes)} -> {text(engine_sizes)}{draft}, "
        f"{options.wire} on the wire"
    )


def split_line(megatron: Mapping[str, Any], train: TrainLayout) -> str:
    counts = ",".join(str(len(stage)) for stage in train.stages)
    return f"The stages have {counts} layers; a run needs model.megatron={json.dumps(dict(megatron))} for that."


def table(metrics: dict[str, Any], receivers: int) -> Table:
    """Build a table of the bounded quantities, per GPU; means are over the engines' GPUs."""
    grid = Table(box=box.SIMPLE_HEAD, title_justify="left")
    for name in ("", "plan", "bound", "ratio"):
        grid.add_column(name, justify="right" if name else "left")
    for name, label in (("cross", "received"), ("internode", "received over the network")):
        values = (metrics[f"{name}_bytes"] / receivers, metrics[f"{name}_bound"] / receivers)
        grid.add_row(f"{label}, mean GPU", *map(format_bytes, values), f"{metrics[f'{name}_ratio']:.4f}")
    for name, label in (
        ("send", "sent"),
        ("recv", "received"),
        ("nic_send", "sent over the network"),
        ("nic_recv", "received over the network"),
    ):
        values = (metrics[f"{name}_max"], metrics[f"{name}_bound"])
        grid.add_row(f"{label}, busiest GPU", *map(format_bytes, values), f"{metrics[f'{name}_max_over_bound']:.4f}")
    staging, buckets = metrics["staging_peak_bytes"], 2 * metrics["bucket_bytes"]
    grid.add_row("staging, two buckets", format_bytes(staging), format_bytes(buckets), f"{staging / buckets:.4f}")
    return grid


SPLIT_TOLERANCE = 1.002  # among splits within this factor of the best, prefer the most even


class SplitAdvice(NamedTuple):
    """Layers of each stage, and bytes that each GPU of the busiest stage has to send: current and recommended."""

    current: tuple[int, ...]
    recommended: tuple[int, ...]
    current_bytes: float
    recommended_bytes: float

    @property
    def gain(self) -> float:
        return 1 - self.recommended_bytes / self.current_bytes if self.current_bytes else 0.0


def advise_split(
    hf: HFConfig, train: TrainLayout, engine: EngineLayout, ranks_per_node: int, wire: Wire = "bf16", vpp: int = 1
) -> SplitAdvice:
    """Find the best of all splits of the layers over the stages that a run can have.

    Weights that only one stage holds can be sent only by its GPUs, so the stage with the most to send sets the pace.
    This minimises its bytes, and does not consider whether the stages also balance in compute.

    The first and the last stage may have any number of layers, those in between have equal numbers, and each stage has
    at least one layer, or one for each of its `vpp` parts. Bytes are those that leave the node, or those that leave the
    GPU if there is only one node.
    """
    model = list_layer_columns(hf, train, engine, wire)
    rank_map = build_rank_map(train, engine, ranks_per_node)
    costs_by_stage: dict[tuple[int, int], float] = {}

    def cost(columns: Columns, stage: int) -> float:
        """Return the bytes that each GPU of the stage has to send for a layer placed there."""
        key = id(columns), stage
        if key not in costs_by_stage:
            size = rank_map.ranks_per_node if rank_map.ranks_per_node < rank_map.world else 1
            stage_has, needs = (
                np.array(matrix.reshape(-1, size, len(columns.weight)).any(1))
                for matrix in expand_to_ranks(columns, stage, train, engine, rank_map)
            )
            costs_by_stage[key] = float((columns.weight * (needs & ~stage_has).sum(0)).sum() / train.stage_ranks)
        return costs_by_stage[key]

    fixed = [sum(cost(m.columns, m.stage) for m in model if m.layer is None and m.stage == s) for s in range(train.pp)]
    layers = [member.columns for member in model if member.layer is not None]
    costs = np.array([[cost(columns, s) for columns in layers] for s in range(train.pp)])

    def busiest(stages: Sequence[Sequence[int]]) -> float:
        return max(fixed[s] + float(costs[s, list(layer_ids)].sum()) for s, layer_ids in enumerate(stages))

    current = tuple(len(layer_ids) for layer_ids in train.stages)
    loads = {current: busiest(train.stages)}
    for counts in splits(len(layers), train.pp, vpp):
        ends = {"num_layers_in_first_pipeline_stage": counts[0], "num_layers_in_last_pipeline_stage": counts[-1]}
        loads[counts] = busiest(stage_layers(len(layers), train.pp, ends if train.pp > 1 else {}, vpp))
    limit = min(loads.values()) * SPLIT_TOLERANCE
    best = min((sum(count**2 for count in counts), load, counts) for counts, load in loads.items() if load <= limit)
    return SplitAdvice(current, best[2], loads[current], best[1])


def splits(layers: int, pp: int, vpp: int = 1) -> Iterator[tuple[int, ...]]:
    """Yield the numbers of layers per stage, in all ways that a run can have them."""
    if pp == 1:
        yield (layers,)
        return
    for middle in range(vpp, layers, vpp) if pp > 2 else (0,):
        ends = layers - middle * (pp - 2)
        for first in range(vpp, ends - vpp + 1, vpp):
            if (ends - first) % vpp == 0:
                yield (first, *[middle] * (pp - 2), ends - first)


def advice_line(advice: SplitAdvice) -> str:
    if advice.gain < LEAST_GAIN:
        return "No split of the layers over the stages gives the busiest stage noticeably less to send."
    return (
        f"A better split: --pp-layers {','.join(map(str, advice.recommended))} gives the GPUs of the busiest stage "
        f"{format_bytes(advice.recommended_bytes)} to send for {format_bytes(advice.current_bytes)}, {advice.gain:.1%} "
        "less (bytes of a weight sync only: see whether the stages then compute equally long)."
    )


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument(
        "--model", type=parse_path_text, required=True, help=f"{', '.join(MODELS)}, or a config.json or its folder"
    )
    parser.add_argument("--train", required=True, metavar="SIZES", help="world=512,tp=8,pp=16,ep=32[,vpp=,etp=,cp=]")
    parser.add_argument("--engine", required=True, metavar="SIZES", help="tp=32,ep=32[,dp=,mlp_tp=,head_tp=...]")
    parser.add_argument("--train-ranks", default="", metavar="0-255", help="where the trainer is (default: from 0 on)")
    parser.add_argument("--engine-ranks", default="", metavar="256-511", help="where engines are (default: trainer's)")
    parser.add_argument("--gpus-per-node", type=int_in_range(), default=8)
    parser.add_argument("--wire", choices=("bf16", "fp8", "int4", "fp32"), default="bf16")
    parser.add_argument(
        "--pp-layers", default="", metavar="4,4,...", help="layers of each stage (default: as even as a run can)"
    )
    parser.add_argument(
        "--bucket-mb",
        type=int_in_range(most=MAX_NUMBER),
        default=1024,
        help="MiB staged for sending, and for receiving",
    )
    parser.add_argument("--json", action="store_true", help="figures for a program, instead of the table")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a picture: who sends how much to whom")
    links = parser.add_argument_group("assumed by the modelled seconds, per GPU and direction")
    links.add_argument(
        "--nic-gbs",
        type=float_in_range(),
        default=LinkSpeeds.network_bandwidth / 1e9,
        help="GB/s of network (default %(default)g)",
    )
    links.add_argument(
        "--nvlink-gbs",
        type=float_in_range(),
        default=LinkSpeeds.nvlink_bandwidth / 1e9,
        help="GB/s in a node (default %(default)g)",
    )
    links.add_argument(
        "--round-us",
        type=float_in_range(-1e-9),
        default=LinkSpeeds.round_overhead * 1e6,
        help="between rounds (default %(default)g)",
    )
    links.add_argument(
        "--hand-over-ms",
        type=float_in_range(-1e-9),
        default=LinkSpeeds.send_overhead * 1e3,
        help="least of a round: handing over the one before (default %(default)g)",
    )
    return parser.parse_args(arguments)


def run(options: argparse.Namespace, console: Console) -> int:
    check_writable_file(options.html, "--html")
    links = LinkSpeeds(
        options.nic_gbs * 1e9, options.nvlink_gbs * 1e9, options.round_us / 1e6, options.hand_over_ms / 1e3
    )
    hf = on_the_wire(model_config(options.model), options.wire)
    family_of(hf).check(hf)
    config = build_config(options, hf)
    check_feasible(hf, config, load_requirements(config))
    plan_report = build_report(lambda: plan_from_config(hf, config))
    train, engine = plan_report.plan.train, plan_report.plan.engine
    node, wire = options.gpus_per_node, options.wire
    bound: Bound = compute_bound(hf, train, engine, node, wire)
    metrics = compute_metrics(plan_report, bound, links)
    advice = advise_split(hf, train, engine, node, wire, config.parallel.vpp)
    metrics["better_pp_layers"] = list(advice.recommended) if advice.gain >= LEAST_GAIN else None
    metrics["better_pp_gain"] = round(advice.gain, 4)
    lines = [*summarize(plan_report, bound, links), advice_line(advice)]
    if config.model.megatron:
        lines.insert(0, split_line(config.model.megatron, train))
    if options.html:
        options.html.write_text(
            render_page(title(options, train, engine), plan_report, bound, links, lines), encoding="utf-8"
        )
    if options.json:
        print(json.dumps(metrics, indent=2))
        return 0
    console.print(title(options, train, engine), style="bold")
    console.print(table(metrics, len(plan_report.plan.rank_map.engine)))
    console.print(
        f"Planned in {metrics['plan_seconds']:.3f} s for one rank, {metrics['all_ranks_seconds']:.1f} s for all; "
        f"{metrics['messages']:,} messages of {format_bytes(metrics['mean_message_bytes'])} in {metrics['rounds']} "
        "rounds.\n"
    )
    for line in lines:
        console.print(line)
    if options.html:
        print(f"Picture: {options.html}")
    return 0


def main(arguments: list[str]) -> int:
    return run_cli(lambda: run(parse(arguments), Console(highlight=False)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
