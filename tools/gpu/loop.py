"""The whole loop on a GPU, with the real engine: the training program on the quickstart's model and task."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from gpu.found import CheckResult, make_result

ROOT = Path(__file__).resolve().parents[2]
GAP = 0.05
"""Maximum 95th percentile of |log-prob of the engine - of the trainer| in bf16, nats."""
COMMON = ("model.dtype=bfloat16", "run.eval_every=0")
ONE_RANK = ("parallel={world_size: 1, tp: 1, ep: 1, ranks_per_node: 1}",)
TWO_RANKS = (
    "parallel={world_size: 2, tp: 2, ep: 2, ranks_per_node: 2, ranks_per_gpu: 2}",
    "rollout.tp=2",
    "rollout.ep=2",
)


def _run(*arguments: str) -> str:
    """Run a command. Return its last line if it fails."""
    process = subprocess.run([sys.executable, "-W", "ignore", *arguments], cwd=ROOT, capture_output=True, text=True)
    lines = (process.stderr + process.stdout).strip().splitlines() or ["no output"]
    return (
        ""
        if process.returncode == 0
        else f"{' '.join(arguments[:3])} ended with {process.returncode}: {lines[-1][:300]}"
    )


def _trained(folder: Path, rollouts: int, warm: bool, layout: tuple[str, ...] = ONE_RANK) -> CheckResult:
    from megarl.observe.tracker import read_metrics

    model, overrides = folder / "model", [f"data.train={folder}/train.jsonl", f"data.eval={folder}/eval.jsonl"]
    fault = _run("tools/make_quickstart.py", str(folder))
    if not fault and warm:
        run_overrides = [f"run.dir={folder}/sft", f"model.path={model}", f"data.train={folder}/sft.jsonl"]
        fault = _run("-m", "megarl.train", "configs/quickstart_sft.yaml", *run_overrides, *COMMON, *layout)
        model = folder / "sft/export"
    if not fault:
        run_overrides = [f"run.dir={folder}/run", f"model.path={model}", f"run.num_rollout={rollouts}", *overrides]
        every = [] if warm else ["rollout.verify_weights_every=1"]
        fault = _run("-m", "megarl.train", "configs/quickstart.yaml", *run_overrides, *COMMON, *layout, *every)
    if fault:
        return CheckResult("failed", fault)
    gaps = [row.get("rollout/logprob_diff_p95") for row in read_metrics(folder / "run").values()]
    numbers = [float(gap) for gap in gaps if gap is not None]
    if not numbers:
        return CheckResult("failed", "the run has no rollout/logprob_diff_p95")
    is_close = all(gap <= GAP for gap in numbers)  # false for a NaN, which `max` would lose
    faults = [] if is_close else [f"log-prob gap p95 of the steps {numbers}, at most {GAP} wanted"]
    return make_result(
        faults, f"{len(numbers)} steps, log-prob gap p95 at most {max(numbers):.3g}", {"gap p95": max(numbers)}
    )


def engine(device: str) -> CheckResult:
    """Three steps from random weights, each weight sync verified."""
    with tempfile.TemporaryDirectory() as folder:
        return _trained(Path(folder), 3, warm=False)


def two_ranks(device: str) -> CheckResult:
    """The same with two ranks on one GPU, in TP2 x EP2, and an engine of both: NCCL between real processes."""
    with tempfile.TemporaryDirectory() as folder:
        return _trained(Path(folder), 3, warm=False, layout=TWO_RANKS)


def quickstart(device: str) -> CheckResult:
    """The quickstart with its warm-up, and ten steps."""
    with tempfile.TemporaryDirectory() as folder:
        return _trained(Path(folder), 10, warm=True)
