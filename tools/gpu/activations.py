"""Memory and seconds of a training step above the model's states, beside those that are planned and rehearsed."""

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

TOLERANCE = 0.05
"""Maximum distance of a measured peak from the rehearsed one, as a share of it; eight steps on an H200 were within
0.2 %."""
SEQUENCES, LENGTH = 8, 1024
MODES: dict[str, dict[str, Any]] = {
    "no recomputation": {},
    "full recomputation": dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
}


def peaks(device: str) -> CheckResult:
    """Compare the peak of torch's allocator in one step with that of a rehearsal, for each of `MODES`.

    On a CPU, whose memory torch does not count, only the rehearsed peaks are compared with each other.
    """
    faults: list[str] = []
    figures: dict[str, float] = {}
    ratios: list[str] = []
    rehearsed: list[float] = []
    for name, megatron in MODES.items():
        try:
            results = _run("rehearse", megatron)
            results |= _run("measure", megatron) if device == "cuda" else {}
        except RuntimeError as error:
            return CheckResult("failed", f"{name}: {error}")
        figures |= {f"{name}: {figure}": value for figure, value in results.items()}
        rehearsed.append(results["rehearsed GB"])
        ratio = results.get("GB", rehearsed[-1]) / rehearsed[-1]
        ratios.append(f"{ratio:.3f} with {name}")
        if not abs(ratio - 1) <= TOLERANCE:
            faults.append(f"with {name} a step takes {ratio:.2f} of the rehearsed {rehearsed[-1]:.2f} GB")
    if not rehearsed[1] < rehearsed[0]:
        faults.append("recomputation does not lower the rehearsed peak")
    text = f"measured over rehearsed peak: {', '.join(ratios)}" if device == "cuda" else "rehearsed, not measured"
    return make_result(faults, text, figures)


def _run(what: str, megatron: dict[str, Any]) -> dict[str, float]:
    """Return the figures that a process of its own finds. Raises RuntimeError with its last line."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if what == "rehearse" else {}
    command = [sys.executable, "-W", "ignore", "-m", "gpu.activations", what, json.dumps(megatron)]
    process = subprocess.run(command, env={**os.environ, **hidden}, capture_output=True, text=True, timeout=100)
    results = [line for line in process.stdout.splitlines() if line.startswith("RESULT ")]
    if process.returncode or not results:
        raise RuntimeError((process.stderr.strip().splitlines() or ["no output"])[-1][:300])
    figures: dict[str, float] = json.loads(results[-1].removeprefix("RESULT "))
    return figures


def _model(megatron: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return config.json and configuration of the step."""
    from megarl.config import from_dict

    hf = {**MODEL, **LARGER, "head_dim": 64, "max_position_embeddings": LENGTH}
    train = {"max_tokens_per_gpu": SEQUENCES * LENGTH}
    tree = {"model": {"dtype": "bfloat16", "megatron": megatron}, "train": train}
    return hf, from_dict({**tree, "algorithm": "grpo", "rollout": {"max_context": LENGTH}})


def rehearse(megatron: dict[str, Any]) -> dict[str, float]:
    """Return GB and seconds by the plans, and GB of the step on tensors without bytes. In a process of its own."""
    from megarl.rehearse import fake_job, play

    play.prepare()
    from megarl.models.activation_memory import working_bytes
    from megarl.models.step_time import GPUSpec, StepTime
    from megarl.parallel import ranks
    from megarl.rehearse import megatron_values
    from megarl.rehearse.step_peak import rehearse_peak

    fake_job.join(0, 1, 1)
    megatron_values.balance_experts()
    hf, config = _model(megatron)
    tokens = SEQUENCES * LENGTH
    layout = ranks.create_layout(config.parallel)
    return {
        "planned GB": working_bytes(hf, config, layout, "actor", tokens, True) / 1e9,
        "rehearsed GB": rehearse_peak(hf, config, SEQUENCES, LENGTH) / 1e9,
        "modelled s": sum(StepTime(hf, tokens, LENGTH, GPUSpec()).seconds(config).values()),
    }


def measure(megatron: dict[str, Any]) -> dict[str, float]:
    """Return GB and seconds of the step on this machine's GPU. In a process of its own."""
    import torch

    from megarl.megatron.optimizer import create_states
    from megarl.megatron.trainer_model import MegatronModel
    from megarl.parallel import ranks
    from megarl.rehearse.step_peak import loss, make_batch
    from megarl.utils.addresses import free_port

    os.environ.setdefault("MASTER_PORT", str(free_port()))
    hf, config = _model(megatron)
    model = MegatronModel(hf, config, ranks.initialize(config.parallel, timeout_s=90), "actor", total_updates=10)
    create_states(model.optimizer)
    batch = make_batch(SEQUENCES, LENGTH, hf["vocab_size"])
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
    result = {"GB": (torch.cuda.max_memory_allocated() - states) / 1e9, "s": sorted(seconds)[1]}
    ranks.shutdown()
    return result


if __name__ == "__main__":
    print("RESULT " + json.dumps({"rehearse": rehearse, "measure": measure}[sys.argv[1]](json.loads(sys.argv[2]))))
