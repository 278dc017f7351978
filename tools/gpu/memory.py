"""Memory of a model's states as `megarl plan` predicts it, against that of a model built on the GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from gpu.found import CheckResult, make_result
from gpu.training import MODEL

TOOLS = Path(__file__).resolve().parents[1]
LARGER = dict(hidden_size=1024, num_hidden_layers=5, moe_intermediate_size=512, num_experts=16, vocab_size=32000)


def states(device: str) -> CheckResult:
    """Compare weights, gradients and optimizer states; activations, NCCL and CUDA are not included."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps({**MODEL, **LARGER, "model_type": "qwen3_moe"}))
        command = [sys.executable, "-W", "ignore", "-m", "megarl", "plan", "--model", str(config)]
        process = subprocess.run(
            [*command, "--layout", "world=1", "--measure", "--json"], capture_output=True, text=True, timeout=280
        )
    try:
        result = json.loads(process.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return CheckResult("failed", (process.stderr.strip().splitlines() or ["no output"])[-1][:300])
    worst = float(result["largest_difference"])
    faults = [f"states differ by {worst:.1%} from the plan, at most 10 % wanted"] if worst > 0.1 else []
    return make_result(faults, f"states within {worst:.2%} of the plan (no activations)", {"largest difference": worst})
