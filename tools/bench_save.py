"""Cost of a save to training: steps with an asynchronous save and with a synchronous one, interleaved in one run.

    .venv/bin/python tools/bench_save.py [--width 512] [--layers 6] [--tokens 4096] [--rounds 5] [--folder DIR]

Two data parallel ranks of this machine train a small MoE. Each round has a series of steps without a save, one with an
asynchronous save after its first step, and one with a synchronous save; their order changes from round to round. `held
up`: how long ranks wait at the end of steps, for copying, planning and completing the checkpoint. `longer`: how much
longer the whole series takes than the one without a save. This includes the cores that the writer thread takes from the
steps, which is much if ranks have no other cores than those they train on.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from local_ranks import run
from rich import box
from rich.console import Console
from rich.table import Table

from megarl.config.command_line import Parser, int_in_range, run_cli

MODES = ("no save", "asynchronous", "waited for")
STEPS = 4
"""Steps of a series."""


def model_config(width: int, layers: int) -> dict[str, Any]:
    return dict(
        architectures=["Qwen3MoeForCausalLM"],
        vocab_size=4096,
        hidden_size=width,
        head_dim=64,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 128),
        intermediate_size=2 * width,
        moe_intermediate_size=width,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=layers,
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        tie_word_embeddings=False,
    )


def measure(folder: Path, width: int, layers: int, tokens: int, rounds: int) -> None:
    """Run as one of the ranks."""
    import torch

    from megarl.checkpoint.store import CheckpointStore, RankWrite
    from megarl.config import from_dict
    from megarl.megatron.dist_checkpoint import WRITERS, StagedCheckpoint
    from megarl.megatron.trainer_model import MegatronModel
    from megarl.parallel import ranks
    from megarl.parallel.host_copy import StagingBuffer
    from megarl.types import TokenLoss, TrainBatch

    config = from_dict({"model": {"dtype": "bfloat16"}, "parallel": {"world_size": 2}})
    place = ranks.initialize(config.parallel, timeout_s=600)
    torch.manual_seed(1)
    model = MegatronModel(model_config(width, layers), config, place, "actor", total_updates=10_000)
    starts = torch.arange(0, tokens + 1, 512)
    ids = torch.randint(0, 4096, (tokens,), generator=torch.Generator().manual_seed(2))
    mask = torch.arange(tokens) % 512 > 0
    groups = torch.arange(len(starts) - 1)
    batch = TrainBatch(ids, starts, mask, groups, torch.zeros(len(groups)), torch.zeros(tokens))
    batch = batch.with_(loss_weights=mask / mask.sum())
    store, staging = CheckpointStore(folder, keep=1), StagingBuffer()

    def step() -> None:
        model.train_step(batch, lambda output, _: TokenLoss(-output.logprobs))  # type: ignore[operator]

    def begin(number: int, mode: str) -> None:
        def stage(target: Path) -> RankWrite:
            staged = StagedCheckpoint(model, target / "actor", staging if mode == "asynchronous" else None)
            threads = 1 if mode == "asynchronous" else WRITERS
            return RankWrite(lambda ended: staged.write(threads, ended), staged.finish)

        store.begin(number, {"step": number}, stage)
        if mode == "waited for":
            store.finish()

    def stretch(number: int, mode: str) -> tuple[float, float]:
        """Return the seconds of the whole series, and of the time between its steps."""
        ranks.barrier()
        start, between = time.perf_counter(), 0.0
        for turn in range(STEPS):
            step()
            ended = time.perf_counter()
            written = all(ranks.all_gather_objects(store.is_written()))
            if store.pending_step is not None and (written or turn == STEPS - 1):
                store.finish()
            if turn == 0 and mode != MODES[0]:
                begin(number, mode)
            between += time.perf_counter() - ended
        return time.perf_counter() - start, between

    seconds: dict[str, list[tuple[float, float]]] = {mode: [] for mode in MODES}
    step()
    gc.freeze()  # as a run does before its first step
    for turn in range(rounds + 1):
        for number, mode in enumerate(MODES[turn % 3 :] + MODES[: turn % 3]):
            stretch_times = stretch(turn * len(MODES) + number + 1, mode)
            if turn:  # the first round allocates memory and makes plans
                seconds[mode].append(stretch_times)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    copied = ranks.all_gather_objects(staging.nbytes)
    print("RESULT " + json.dumps({"seconds": seconds, "bytes": size, "copied": copied}), flush=True)
    ranks.shutdown()


def figures(seconds: dict[str, list[tuple[float, float]]]) -> dict[str, dict[str, float]]:
    """Return, by kind of save: median seconds of a step, how long a save holds it up, and how much longer the series
    takes; the latter two also as shares of a step."""
    totals = {mode: statistics.median(value for value, _ in samples) for mode, samples in seconds.items()}
    between = {mode: statistics.median(value for _, value in samples) for mode, samples in seconds.items()}
    step = (totals[MODES[0]] - between[MODES[0]]) / STEPS
    return {
        mode: {
            "held up, s": (blocked := between[mode] - between[MODES[0]]),
            "of a step": blocked / step,
            "longer, s": (longer := totals[mode] - totals[MODES[0]]),
            "of the stretch": longer / totals[MODES[0]],
        }
        for mode in MODES[1:]
    } | {MODES[0]: {"step, s": step}}


def parse() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--width", type=int_in_range(128, 1 << 16), default=512, help="hidden size, a multiple of 128")
    parser.add_argument("--layers", type=int_in_range(most=1 << 10), default=6, help="of the model")
    parser.add_argument(
        "--tokens", type=int_in_range(1024, 1 << 24), default=4096, help="of a step, a multiple of 1024"
    )
    parser.add_argument("--rounds", type=int_in_range(most=1000), default=5, help="of three stretches each")
    parser.add_argument("--folder", type=Path, help="where to write; by default where the system says")
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    options = parse()
    sizes = [options.width, options.layers, options.tokens, options.rounds]
    if options.as_rank:
        measure(options.folder, *json.loads(options.as_rank))
        return 0
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        results = run([__file__, "--as-rank", json.dumps(sizes), "--folder", folder], world=2)
    rows = figures(results["seconds"])
    step = rows.pop(MODES[0])["step, s"]
    copied = " and ".join(f"{size / 1e6:.0f}" for size in results["copied"])
    print(
        f"a checkpoint of {results['bytes'] / 1e6:.0f} MB, of which ranks copy {copied} MB; a step takes {step:.2f} s"
    )
    table = Table("a save that is", *(next(iter(rows.values()))), box=box.SIMPLE_HEAD)
    for mode, row in rows.items():
        cells = [f"{value:.1%}" if name.startswith("of ") else f"{value:.3f}" for name, value in row.items()]
        table.add_row(mode, *cells)
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
