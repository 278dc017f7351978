"""Rollback of a policy on two ranks: `shared`, one replica each, or `split`, with the policy on the second rank only.

    ranks_kl_rollback.py shared|split float32|bfloat16 FOLDER

Updates use the real loss, with too high a learning rate in some steps. Prints whether the state was restored, and the
learning rates, metrics and checkpoint results.
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

SPLIT, DTYPE, FOLDER = sys.argv[1] == "split", sys.argv[2], Path(sys.argv[3])
UPDATES = 20
CONFIG = from_dict(
    {
        "model": {"path": str(FOLDER), "dtype": DTYPE},
        "parallel": {"world_size": 2, "ranks_per_node": 2},
        "placement": {"actor": 1, "rollout": 0} if SPLIT else {},
        "actor_optimizer": {"lr": 1e-4, "schedule": "linear", "warmup_fraction": 0.25, "eps": 1e-6},
        "train": {"max_tokens_per_gpu": 48},
        "guards": {"ppo_kl": 0.05, "oom_retry": True},
        "kl": {"apply_to": "none"},
    }
)


@reads(*policy_loss_columns(CONFIG))
def loss(output: ModelOutput, part: TrainBatch) -> TokenLoss:
    return policy_loss(output, part, CONFIG, 0.0)


def make_actor() -> ActorWorker:
    chat: Any = None
    layouts = create_role_layouts(CONFIG, ("actor", "rollout"))
    actor = ActorWorker(
        Context(CONFIG, JOB, tiny.HF["qwen2"], chat, Clock(), FOLDER, {"actor": UPDATES}, layouts, "actor")
    )
    ranks.run_on_all(actor.start)
    actor.wait_ready()
    return actor


def batch_of(actor: ActorWorker) -> TrainBatch:
    """Return a step's batch on the first rank; all advantages are negative, so the policy moves away."""
    batch = tiny.shard_batch(tiny.batch((9, 19, 12, 3, 26, 11)))
    logprobs = actor.forward(batch).wait().logprobs
    return batch.with_(old_logprobs=logprobs, advantages=-torch.ones_like(batch.advantages))  # type: ignore[arg-type]


def step(actor: ActorWorker, number: int, updates: int = 4, lr_factor: float = 1.0) -> list[dict[str, float]]:
    """Return the metrics of each update, synced after the last, as a controller does."""
    actor.begin_step(number)
    batch = batch_of(actor)
    if actor.model is not None:
        for group in actor.model.optimizer.param_groups:
            group["max_lr"] = CONFIG.actor_optimizer.lr * lr_factor
    return sync_metrics([actor.update(batch, loss) for _ in range(updates)])


def copy_state(actor: ActorWorker) -> list[torch.Tensor]:
    """Return copies of weights, master weights, moments and AdamW step counts."""
    from megarl.megatron.optimizer import state_tensors

    if actor.model is None:
        return []
    tensors = [*actor.model.local_params().values(), *state_tensors(actor.model.optimizer)]
    return [tensor.clone() for tensor in tensors]


def is_equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def main() -> dict[str, Any]:
    actor, result = make_actor(), {}
    first = step(actor, 1)
    before = copy_state(actor)
    result["within limit"] = [[row["actor/ppo_kl"], row["actor/lr"], "guards/ppo_kl" in row] for row in first]
    result["bytes"] = None if actor.model is None else snapshot_bytes(actor)
    exceeded = step(actor, 2, lr_factor=300.0)
    result["exceeded"] = exceeded
    result["restored state"] = is_equal(copy_state(actor), before)
    after = step(actor, 3, 2)
    result["next step"] = [[row["actor/ppo_kl"], row["actor/lr"], "guards/ppo_kl" in row] for row in after]
    result["trains on"] = not is_equal(copy_state(actor), before) or actor.model is None
    folder = FOLDER / f"checkpoint_{sys.argv[1]}_{DTYPE}"
    if actor.model is not None:
        tiny.save_model(actor.model, folder)
    restored = make_actor()
    if restored.model is not None:
        restore_model(restored.model, folder)
    result["checkpoint restored"] = is_equal(copy_state(restored), copy_state(actor))
    expected, actual = step(actor, 4, 2), step(restored, 4, 2)
    result["resumes equally"] = [expected == actual, is_equal(copy_state(restored), copy_state(actor))]
    # Two rollbacks in a row end at the same policy.
    snapshot = copy_state(actor)
    result["rollbacks"] = [
        sum("guards/ppo_kl" in row for row in step(actor, number, lr_factor=300.0)) for number in (5, 6)
    ]
    result["restored state twice"] = is_equal(copy_state(actor), snapshot)
    # A NaN KL counts as exceeded, and its update is undone.
    result["NaN rolled back"] = roll_back_nan_kl(actor)
    result["restored state after NaN"] = is_equal(copy_state(actor), snapshot)
    result["fresh optimizer"] = roll_back_fresh_optimizer()
    result["memory"] = [actor.metrics(), count_updates_after_oom(actor), actor.metrics()]
    return result


def roll_back_fresh_optimizer() -> list[bool]:
    """Roll back the first two steps of an optimizer that creates its moments lazily, like Transformer Engine's and
    Apex's. Return, for each step, whether it rolled back and whether the state is the initial one."""
    from megarl.megatron.optimizer import _inner_optimizers

    actor = make_actor()
    before = copy_state(actor)
    for inner in _inner_optimizers(actor.model.optimizer) if actor.model is not None else ():
        inner.state.clear()
    outcomes = []
    for number in (1, 2):
        rows = step(actor, number, lr_factor=3000.0)
        outcomes += [any("guards/ppo_kl" in row for row in rows), is_equal(copy_state(actor), before)]
    return outcomes


def count_updates_after_oom(actor: ActorWorker) -> int:
    """Return the number of reported updates in a step in which any micro-batch of two sequences runs out of memory."""
    if actor.model is not None:
        reader = actor.model._reader

        def read(micro: Any, *args: Any) -> Any:
            if len(micro.indices) > 1:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return reader.read(micro, *args)

        fake = SimpleNamespace(read=read, empty_loss=reader.empty_loss)
        actor.model._reader = fake  # type: ignore[assignment]
    return len([row for row in step(actor, 8, 2) if "guards/ppo_kl" not in row and row])


def roll_back_nan_kl(actor: ActorWorker) -> bool:
    def loss_with_nan_kl(output: ModelOutput, part: TrainBatch) -> TokenLoss:
        token_loss = loss(output, part)
        return TokenLoss(
            token_loss.loss, token_loss.metrics | {"actor/ppo_kl": token_loss.metrics["actor/ppo_kl"] * torch.nan}
        )

    actor.begin_step(7)
    batch = batch_of(actor)
    return "guards/ppo_kl" in actor.update(batch, loss_with_nan_kl).sync()


def snapshot_bytes(actor: ActorWorker) -> list[int]:
    """Return the bytes of the snapshot, and of weights plus this rank's optimizer states."""
    from megarl.dry_run.plan_layouts import model_state_bytes

    assert actor.model is not None
    parts = model_state_bytes(actor.model)
    return [actor.model._rollback_snapshot.host_copy.size, parts["weights"] + parts["optimizer"]]


if __name__ == "__main__":
    JOB = ranks.join(2, 60)
    print("RESULT " + json.dumps(main()))
    ranks.shutdown()
