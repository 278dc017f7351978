"""A reference on two of three ranks, which share one with the actor: equal to the actor at first, and after a refresh.

Arguments: a folder, a family, the rank of LoRA; the layouts of actor and reference, and `model.megatron`, as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "megatron"))
torch.set_num_threads(1)

import tiny  # noqa: E402

from megarl.config import LoraConfig  # noqa: E402
from megarl.models.registry import load_hf_config  # noqa: E402
from megarl.observe.clock import Clock  # noqa: E402
from megarl.parallel import ranks, row_exchange  # noqa: E402
from megarl.types import ModelOutput, Prompt, Rollout, Rollouts, TokenLoss, TrainBatch, Turn  # noqa: E402


def loss(output: ModelOutput, part: TrainBatch) -> TokenLoss:
    assert output.logprobs is not None
    return TokenLoss(-output.logprobs, {})


def batch_of_rollouts() -> TrainBatch:
    """Return a batch whose sequences are on all three ranks, the last without the actor, the first without the
    reference."""
    large = tiny.batch()
    rollouts = []
    for number, ids in enumerate(large.tokens.split(large.lengths.tolist())):
        turns = (Turn(ids[:1].tolist()), Turn(ids[1:].tolist(), [0.0] * (len(ids) - 1), True, 0))
        rollouts.append(Rollout(Prompt(str(number), ()), turns, group=number))
    local = range(JOB.rank, len(rollouts), 3)
    batch = TrainBatch.from_rollouts(Rollouts.gather([rollouts[i] for i in local], local, row_exchange.WorldComm()))
    return batch.with_(loss_weights=batch.loss_mask.float() / 50)


def compare(folder: str, family: str, lora_rank: int, settings: dict[str, dict[str, int]]) -> list[float]:
    """Return the largest difference of log-probs: at first, after an update, and after the refresh."""
    from megarl.workers.actor import ActorWorker, SeparateReferenceWorker
    from megarl.workers.context import Context

    if JOB.rank == 0:
        tiny.hf_model(family).save_pretrained(folder)
    ranks.barrier()
    config = tiny.config(**settings["actor"], world=3, model={"megatron": settings["megatron"]})
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, path=folder),
        lora=LoraConfig(rank=lora_rank, target_modules=("linear_qkv",) if lora_rank else ()),
        actor_optimizer=dataclasses.replace(config.actor_optimizer, lr=0.02, schedule="constant", warmup_fraction=0.0),
        placement={"actor": "0-1", "reference": "1-2"},
        roles={"reference": {"parallel": settings["reference"]}},
    )
    layouts = ranks.create_role_layouts(config, ("actor", "reference"))
    chat: Any = SimpleNamespace()
    context = Context(config, JOB, load_hf_config(folder), chat, Clock(), Path(folder), {"actor": 3}, layouts)
    actor = ActorWorker(dataclasses.replace(context, role="actor"))
    reference = SeparateReferenceWorker(dataclasses.replace(context, role="reference"))
    for worker in (actor, reference):
        worker.start()
    for worker in (actor, reference):
        worker.wait_ready()
    batch = batch_of_rollouts()

    def difference() -> float:
        futures = actor.forward(batch), reference.forward(batch)
        policy, other = (future.wait().logprobs for future in futures)
        return float((policy - other).abs().max())

    differences = [difference()]
    for _ in range(2):  # with LoRA the first changes one factor only
        actor.update(batch, loss)
    differences.append(difference())
    reference.refresh(actor)
    assert reference.version == 1
    return [max(ranks.all_gather_objects(value)) for value in (*differences, difference())]


if __name__ == "__main__":
    JOB = ranks.join(3, 120.0)
    result = compare(sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4]))
    print("RESULT " + json.dumps(result), flush=True)
    row_exchange.close_row_exchange()
    ranks.shutdown()
