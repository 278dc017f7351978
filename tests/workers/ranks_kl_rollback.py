"""A policy that is driven too far, on two ranks: `shared`, a replica each, or `apart`, the policy on the second only.

    ranks_kl_rollback.py shared|apart float32|bfloat16 FOLDER

Updates are real ones, of the real loss, at a rate that is too high in one step. Prints how far what it went back to is
from what it was, and what became of the rates, of the other updates, and of a checkpoint.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path[:0] = [
    str(Path(__file__).resolve().parents[1] / "megatron"),
    str(Path(__file__).resolve().parents[2] / "tools"),
]
torch.set_num_threads(1)

import tiny  # noqa: E402

from megarl.config import from_dict  # noqa: E402
from megarl.controllers.policy_gradient import policy_loss, policy_loss_columns  # noqa: E402
from megarl.megatron.dist_checkpoint import restore_model  # noqa: E402
from megarl.observe.clock import Clock  # noqa: E402
from megarl.parallel import ranks  # noqa: E402
from megarl.parallel.ranks import create_role_layouts  # noqa: E402
from megarl.types import ModelOutput, TokenLoss, TrainBatch, reads  # noqa: E402
from megarl.workers.actor import ActorWorker  # noqa: E402
from megarl.workers.context import Context  # noqa: E402
from megarl.workers.futures import sync_metrics  # noqa: E402

APART, DTYPE, FOLDER = sys.argv[1] == "apart", sys.argv[2], Path(sys.argv[3])
UPDATES = 20
CONFIG = from_dict(
    {
        "model": {"path": str(FOLDER), "dtype": DTYPE},
        "parallel": {"world_size": 2, "ranks_per_node": 2},
        "placement": {"actor": 1, "rollout": 0} if APART else {},
        "actor_optimizer": {"lr": 1e-4, "schedule": "linear", "warmup_fraction": 0.25, "eps": 1e-6},
        "train": {"max_tokens_per_gpu": 48},
        "guards": {"ppo_kl": 0.05, "oom_retry": True},
        "kl": {"apply_to": "none"},
    }
)


@reads(*policy_loss_columns(CONFIG))
def loss(output: ModelOutput, part: TrainBatch) -> TokenLoss:
    return policy_loss(output, part, CONFIG, 0.0)


def make() -> ActorWorker:
    chat: Any = None
    layouts = create_role_layouts(CONFIG, ("actor", "rollout"))
    actor = ActorWorker(
        Context(CONFIG, JOB, tiny.HF["qwen2"], chat, Clock(), FOLDER, {"actor": UPDATES}, layouts, "actor")
    )
    ranks.run_on_all(actor.start)
    actor.wait_ready()
    return actor


def batch_of(actor: ActorWorker) -> TrainBatch:
    """A step's, at home on the first rank; all advantages are bad, so that the policy leaves these tokens."""
    batch = tiny.shard_batch(tiny.batch((9, 19, 12, 3, 26, 11)))
    said = actor.forward(batch).wait().logprobs
    return batch.with_(old_logprobs=said, advantages=-torch.ones_like(batch.advantages))  # type: ignore[arg-type]


def step(actor: ActorWorker, number: int, updates: int = 4, faster: float = 1.0) -> list[dict[str, float]]:
    """What each update reports, read when all are done, as a controller does."""
    actor.begin_step(number)
    batch = batch_of(actor)
    if actor.model is not None:
        for group in actor.model.optimizer.param_groups:
            group["max_lr"] = CONFIG.actor_optimizer.lr * faster
    return sync_metrics([actor.update(batch, loss) for _ in range(updates)])


def held(actor: ActorWorker) -> list[torch.Tensor]:
    """Weights, masters, moments, and the counts of AdamW's steps."""
    from megarl.megatron.optimizer import state_tensors

    if actor.model is None:
        return []
    tensors = [*actor.model.local_params().values(), *state_tensors(actor.model.optimizer)]
    return [tensor.clone() for tensor in tensors]


def same(item: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(item) == len(other) and all(map(torch.equal, item, other))


def main() -> dict[str, Any]:
    actor, result = make(), {}
    fine = step(actor, 1)
    before = held(actor)
    result["fine"] = [[row["actor/ppo_kl"], row["actor/lr"], "guards/ppo_kl" in row] for row in fine]
    result["bytes"] = None if actor.model is None else kept_bytes(actor)
    wild = step(actor, 2, faster=300.0)
    result["wild"] = wild
    result["as before"] = same(held(actor), before)
    after = step(actor, 3, 2)
    result["after"] = [[row["actor/ppo_kl"], row["actor/lr"], "guards/ppo_kl" in row] for row in after]
    result["moved"] = not same(held(actor), before) or actor.model is None
    folder = FOLDER / f"checkpoint_{sys.argv[1]}_{DTYPE}"
    if actor.model is not None:
        tiny.save_model(actor.model, folder)
    other = make()
    if other.model is not None:
        restore_model(other.model, folder)
    result["restored"] = same(held(other), held(actor))
    item, two = step(actor, 4, 2), step(other, 4, 2)
    result["goes on alike"] = [item == two, same(held(other), held(actor))]
    # Twice in a row: to the same policy.
    retained = held(actor)
    result["again"] = [sum("guards/ppo_kl" in row for row in step(actor, number, faster=300.0)) for number in (5, 6)]
    result["as before twice"] = same(held(actor), retained)
    # A number that is none is too much, and nothing of the update is left.
    result["not a number"] = not_a_number(actor)
    result["as before thrice"] = same(held(actor), retained)
    result["from nothing"] = from_nothing()
    result["memory"] = [actor.metrics(), short(actor), actor.metrics()]
    return result


def from_nothing() -> list[bool]:
    """With an optimizer that makes its moments in its first step, as those of Transformer Engine and Apex do: whether
    it goes back in that step, to what it was, and once more in the next."""
    from megarl.megatron.optimizer import _torch_optimizers

    actor = make()
    before = held(actor)
    for inner in _torch_optimizers(actor.model.optimizer) if actor.model is not None else ():
        inner.state.clear()
    actual = []
    for number in (1, 2):
        rows = step(actor, number, faster=3000.0)
        actual += [any("guards/ppo_kl" in row for row in rows), same(held(actor), before)]
    return actual


def short(actor: ActorWorker) -> int:
    """How many updates are reported of a step in which memory runs out wherever two sequences are joined."""
    if actor.model is not None:
        reader = actor.model._reader

        def read(micro: Any, *remaining: Any) -> Any:
            if len(micro.indices) > 1:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return reader.read(micro, *remaining)

        actor.model._reader = SimpleNamespace(read=read)  # type: ignore[assignment]
    return len([row for row in step(actor, 8, 2) if "guards/ppo_kl" not in row and row])


def not_a_number(actor: ActorWorker) -> bool:
    def spoilt(output: ModelOutput, part: TrainBatch) -> TokenLoss:
        actual = loss(output, part)
        return TokenLoss(actual.loss, actual.metrics | {"actor/ppo_kl": actual.metrics["actor/ppo_kl"] * torch.nan})

    actor.begin_step(7)
    batch = batch_of(actor)
    return "guards/ppo_kl" in actor.update(batch, spoilt).sync()


def kept_bytes(actor: ActorWorker) -> list[int]:
    """What the copy takes, and what weights and this rank's states do."""
    from plan_memory import model_state_bytes

    assert actor.model is not None
    parts = model_state_bytes(actor.model)
    return [actor.model._rollback_snapshot.host_copy.size, parts["weights"] + parts["optimizer"]]


if __name__ == "__main__":
    JOB = ranks.join(2, 60)
    print("RESULT " + json.dumps(main()))
    ranks.shutdown()
