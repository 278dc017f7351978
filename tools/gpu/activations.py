"""Memory and seconds of a training step above the model's states, beside what the plans say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

from gpu.found import CheckResult, make_result
from gpu.memory import LARGER
from gpu.training import MODEL

TOLERANCE = 0.15
"""Maximum distance of a measured peak from the plan, as a share of it; eight steps on an H200 were within 9 %."""
SEQUENCES, LENGTH = 8, 1024
MODES: dict[str, dict[str, Any]] = {
    "no recomputation": {},
    "full recomputation": dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
}


def peaks(device: str) -> CheckResult:
    """Compare the peak of torch's allocator in one step with `working_bytes`, for each of `MODES`."""
    faults: list[str] = []
    figures: dict[str, float] = {}
    for name, megatron in MODES.items():
        command = [sys.executable, "-W", "ignore", "-m", "gpu.activations", json.dumps(megatron)]
        process = subprocess.run(command, capture_output=True, text=True, timeout=100)
        results = [line for line in process.stdout.splitlines() if line.startswith("RESULT ")]
        if process.returncode or not results:
            return CheckResult("failed", f"{name}: {(process.stderr.strip().splitlines() or ['no output'])[-1][:300]}")
        found = json.loads(results[-1].removeprefix("RESULT "))
        ratio = found["bytes"] / found["planned"]
        figures |= {
            f"{name}: of the plan": ratio,
            f"{name}: GB": found["bytes"] / 1e9,
            f"{name}: s": found["seconds"],
            f"{name}: modelled s": found["modelled_s"],
        }
        if not abs(ratio - 1) <= TOLERANCE:
            faults.append(f"with {name} a step takes {ratio:.2f} of the planned {found['planned'] / 1e9:.2f} GB")
    ratios = ", ".join(f"{figures[f'{name}: of the plan']:.2f} with {name}" for name in MODES)
    return make_result(faults, f"measured over planned peak: {ratios}", figures)


def measure(megatron: dict[str, Any]) -> None:
    """Run as a separate process."""
    import torch

    from megarl.config import from_dict
    from megarl.megatron.optimizer import create_states
    from megarl.megatron.trainer_model import MegatronModel
    from megarl.models.activation_memory import working_bytes
    from megarl.models.step_time import GPUSpec, StepTime
    from megarl.parallel import ranks
    from megarl.types import ModelOutput, TokenLoss, TrainBatch
    from megarl.utils.addresses import free_port

    os.environ.setdefault("MASTER_PORT", str(free_port()))
    hf, tokens = {**MODEL, **LARGER, "head_dim": 64, "max_position_embeddings": LENGTH}, SEQUENCES * LENGTH
    tree = {"model": {"dtype": "bfloat16", "megatron": megatron}, "train": {"max_tokens_per_gpu": tokens}}
    config = from_dict({**tree, "algorithm": "grpo", "rollout": {"max_context": LENGTH}})
    place = ranks.initialize(config.parallel, timeout_s=90)
    model = MegatronModel(hf, config, place, "actor", total_updates=10)
    create_states(model.optimizer)
    ids = torch.randint(0, hf["vocab_size"], (tokens,), generator=torch.Generator().manual_seed(1))
    starts, mask = torch.arange(0, tokens + 1, LENGTH), torch.ones(tokens, dtype=torch.bool)
    mask[starts[:-1]] = False
    columns = torch.arange(SEQUENCES), torch.zeros(SEQUENCES), torch.zeros(tokens)
    batch = TrainBatch(ids, starts, mask, *columns).with_(loss_weights=mask / mask.sum())

    def loss(output: ModelOutput, _: TrainBatch) -> TokenLoss:
        assert output.logprobs is not None
        return TokenLoss(-output.logprobs)

    for _ in range(2):  # kernels are compiled, and cuBLAS takes its workspace
        model.train_step(batch, loss)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    states, seconds = torch.cuda.memory_allocated(), []
    for _ in range(3):
        start = time.perf_counter()
        model.train_step(batch, loss)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    result = {
        "bytes": torch.cuda.max_memory_allocated() - states,
        "planned": working_bytes(hf, config, place, "actor", tokens, True),
        "seconds": sorted(seconds)[1],
        "modelled_s": sum(StepTime(hf, tokens, LENGTH, GPUSpec()).seconds(config).values()),
    }
    print("RESULT " + json.dumps(result), flush=True)
    ranks.shutdown()


if __name__ == "__main__":
    measure(json.loads(sys.argv[1]))
