"""Reward models, services and a teacher on two of three ranks; the first and the last rank have the rollouts.

Argument: a folder with models and `jobs.json`, which lists the jobs. Prints each rank's results.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)

from megarl.chat_format.chat_template import ChatTemplate  # noqa: E402
from megarl.config import Config, ConfigError, from_dict  # noqa: E402
from megarl.models.registry import load_hf_config  # noqa: E402
from megarl.observe.clock import Clock  # noqa: E402
from megarl.parallel import ranks, row_exchange  # noqa: E402
from megarl.parallel.ranks import create_role_layouts  # noqa: E402
from megarl.types import Prompt, Rollout, Rollouts, TrainBatch, Turn  # noqa: E402
from megarl.types.requirements import Requirements  # noqa: E402
from megarl.workers.context import Context  # noqa: E402
from megarl.workers.worker_registry import RegisteredWorker, load_worker  # noqa: E402

FOLDER = Path(sys.argv[1])
JOBS = json.loads((FOLDER / "jobs.json").read_text())


def rollouts() -> Rollouts:
    """Return this rank's rollouts: two of every three are on the first rank, one on the last."""
    items = []
    for number, job in enumerate(JOBS["rollouts"]):
        ids, messages = job["ids"], tuple(job["messages"])
        turns = (Turn(ids[:2]), Turn(ids[2:], [0.0] * (len(ids) - 2), True, 0))
        prompt = Prompt(str(number), messages[:1], ids[:2], ground_truth="5")
        items.append(Rollout(prompt, turns, job["status"], messages=messages, group=number))
    local = [number for number in range(len(items)) if {0: 0, 1: 0, 2: 2}[number % 3] == RANK]
    return Rollouts.gather([items[i] for i in local], local, row_exchange.WorldComm())


def context(tree: dict[str, Any], role: str) -> Context:
    config = config_of(tree)
    layouts = create_role_layouts(config, ("actor", "reward", *config.roles))
    hf, chat = load_hf_config(config.model.path), ChatTemplate.load(config.model.path)
    return Context(config, JOB, hf, chat, Clock(), FOLDER, {}, layouts, role)


def config_of(tree: dict[str, Any]) -> Config:
    base = {
        "model": {"path": f"{FOLDER}/policy", "dtype": "float32"},
        "parallel": {"world_size": 3, "ranks_per_node": 3},
        "rollout": {"temperature": 0.7, "max_context": 64},
        "train": {"max_tokens_per_gpu": 48},
    }
    return from_dict(base | tree)


def make_worker(tree: dict[str, Any], role: str) -> Any:
    worker_context = context(tree, role)
    declared = Requirements("lab", "prompts", ("rollout", "actor", "reward", *worker_context.config.roles), ("actor",))
    worker = load_worker(worker_context.config, declared, role, RegisteredWorker())(worker_context)
    worker.begin_step(3)
    ranks.run_on_all(worker.start)
    worker.wait_ready()
    return worker


def score(tree: dict[str, Any]) -> Any:
    try:
        worker = make_worker(tree, "reward")
        scored = worker.score(rollouts())
        worker.close()
    except ConfigError as error:
        return str(error)
    parts = {name: values.tolist() for name, values in scored.reward_parts.items()}
    local_rollouts = [
        (int(number), rollout.reward) for number, rollout in zip(scored.local_indices, scored.local, strict=True)
    ]
    return {"reward": scored.reward.tolist(), "parts": parts, "local": local_rollouts, "metrics": worker.metrics()}


def teach(tree: dict[str, Any]) -> Any:
    """Return log-probs of the local sequences by number, at the rollouts' temperature and at another."""
    (role,) = tree["roles"]
    worker = make_worker(tree, role)
    assert (worker.model is None) == (RANK == 0) and worker.name == role
    batch, actual = TrainBatch.from_rollouts(rollouts()), {}
    for name, options in (("as sampled", {}), ("at 1", {"temperature": 1.0})):
        logprobs = worker.forward(batch, **options).wait().logprobs
        parts = logprobs.split(batch.cu_seqlens.diff().tolist())
        actual[name] = {int(number): part.tolist() for number, part in zip(batch.local_indices, parts, strict=True)}
    return actual | {"spans": sorted({span.name for span in worker.clock.drain_spans()})}


if __name__ == "__main__":
    JOB = ranks.join(3, 120.0)
    RANK = JOB.rank
    run = {"score": score, "teach": teach}
    result = {name: run[job["what"]](job["config"]) for name, job in JOBS["jobs"].items()}
    print("RESULT " + json.dumps(result), flush=True)
    row_exchange.close_row_exchange()
    ranks.shutdown()
