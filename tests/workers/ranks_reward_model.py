"""Reward models of several families on two ranks: loaded from transformers' folders, trained, exported, and served by a
reward worker of a bf16 job. Arguments: a folder, families.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/megatron"))
torch.set_num_threads(1)

import tiny  # noqa: E402

from megarl.algorithms.losses import bradley_terry  # noqa: E402
from megarl.models.registry import load_hf_config  # noqa: E402
from megarl.observe.clock import Clock  # noqa: E402
from megarl.parallel import ranks as parallel_ranks  # noqa: E402
from megarl.parallel import row_exchange  # noqa: E402
from megarl.types import ModelOutput, Prompt, Rollout, Rollouts, TokenLoss, TrainBatch, Turn  # noqa: E402

ADAM = dict(lr=0.02, schedule="constant", warmup_fraction=0.0)


def loss(output: ModelOutput, part: TrainBatch) -> TokenLoss:
    assert output.scores is not None
    return bradley_terry(output.scores, part.cu_seqlens, part.group)


def context(path: str, folder: str, **sections: Any) -> Any:
    from megarl.workers.context import Context

    config = tiny.config(tp=2, world=2, critic={"optimizer": ADAM}, **sections)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, path=path))
    chat: Any = SimpleNamespace(tokenizer=SimpleNamespace(pad_token_id=199), end_of_turn=198)
    layouts = {"reward_model": RANKS, "reward": RANKS}
    updates = {"reward_model": 2}
    return Context(config, RANKS.job, load_hf_config(path), chat, Clock(), Path(folder), updates, layouts)


def scored(worker: Any, batch: TrainBatch) -> torch.Tensor:
    scores: torch.Tensor = worker.forward(batch).wait().scores
    return scores


def train(family: str, folder: str) -> list[float]:
    """Train two updates from a policy's folder, export, and check that the export loads with the same scores."""
    from megarl.workers.critic import RewardModelWorker

    policy, export = f"{folder}/{family}_policy", f"{folder}/{family}"
    if RANKS.job.rank == 0:
        tiny.hf_model(family).save_pretrained(policy)
        config = json.loads(Path(policy, "config.json").read_text())
        Path(policy, "config.json").write_text(json.dumps(config | {"architectures": tiny.HF[family]["architectures"]}))
    parallel_ranks.barrier()
    worker = RewardModelWorker(context(policy, folder))
    worker.start()
    worker.wait_ready()
    batch = tiny.pairs()
    assert float(scored(worker, batch).abs().max()) == 0.0  # a policy has no head
    for _ in range(2):  # the first changes the head only
        worker.update(batch, loss)
    scores = scored(worker, batch)
    worker.export(Path(export))
    parallel_ranks.barrier()
    reloaded = RewardModelWorker(context(export, folder))
    reloaded.start()
    reloaded.wait_ready()
    assert torch.equal(scored(reloaded, batch), scores)
    return [float(value) for value in scores[batch.cu_seqlens[1:] - 1]]


def serve(family: str, folder: str) -> list[dict[str, Any]]:
    """Score the same sequences as rollouts of two turns, with the model alone and with a function."""
    from megarl.workers.reward_models import MegatronRewardWorker

    worker_context, batch = context(f"{folder}/{family}", folder), tiny.pairs()
    config = worker_context.config
    model = dataclasses.replace(config.model, dtype="bfloat16")
    reward = dataclasses.replace(config.reward, model=f"{folder}/{family}")
    worker_context = dataclasses.replace(worker_context, config=dataclasses.replace(config, model=model, reward=reward))
    rollouts = []
    for i, ids in enumerate(batch.tokens.split(batch.lengths.tolist())):
        local = tuple(ids.tolist())
        turns = (Turn(local[:1]), Turn(local[1:], (0.0,) * (len(local) - 1), True))
        rollouts.append(Rollout(Prompt(str(i), ()), turns, group=0))
    worker = MegatronRewardWorker(worker_context, reward_fn=length)
    worker.start()
    worker.wait_ready()
    assert worker.model is not None and worker.model.optimizer is None
    assert {tensor.dtype for tensor in worker.model.local_params().values()} == {torch.float32}
    rank_0_worker = MegatronRewardWorker(worker_context)
    rank_0_worker.model = worker.model
    rank_0_worker.wait_ready()
    local = range(1 - RANKS.job.rank, len(rollouts), 2)
    sharded = Rollouts.gather([rollouts[i] for i in local], local, row_exchange.WorldComm())
    model_only, with_policy = rank_0_worker.score(sharded), worker.score(sharded)
    columns = {"reward": with_policy.reward, "only": model_only.reward, **with_policy.reward_parts}
    return [{name: float(values[i]) for name, values in columns.items()} for i in range(len(rollouts))]


def length(rollout: Rollout) -> float:
    return float(len(rollout.token_ids))


if __name__ == "__main__":
    RANKS = parallel_ranks.initialize(tiny.config(tp=2, world=int(os.environ["WORLD_SIZE"])).parallel, timeout_s=120)
    folder, families = sys.argv[1], sys.argv[2].split(",")
    result = {family: {"trained": train(family, folder), "served": serve(family, folder)} for family in families}
    print("RESULT " + json.dumps(result))
    parallel_ranks.shutdown()
