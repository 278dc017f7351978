"""Dispatch rows to a model and collect results, on ranks that have some sequences each; count the bytes sent.

    ranks_rows.py all_replicas|replicas|disjoint

`all_replicas`: each rank is a replica of the model; `replicas`: each two ranks are one; `disjoint`: the last two ranks
are replicas, the others have the sequences.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

torch.set_num_threads(1)

from megarl.config import ParallelConfig  # noqa: E402
from megarl.data.packing import MicroBatchPlan, plan_micro_batches  # noqa: E402
from megarl.megatron.distribution import BatchDispatcher, ModelRank  # noqa: E402
from megarl.parallel import ranks, row_exchange  # noqa: E402
from megarl.types import BatchSharding, TokenLoss, TrainBatch, reads  # noqa: E402
from megarl.types.batch import select_columns  # noqa: E402

BUDGET = 400


@reads("old_logprobs", "advantages")
def loss(output: Any, part: TrainBatch) -> TokenLoss:
    raise AssertionError("nothing is trained here")


def make_batch(holders: list[int]) -> TrainBatch:
    """Return 256 sequences with every column, each with a home rank among `holders`."""
    draw = torch.Generator().manual_seed(3)
    lengths = torch.randint(20, 80, (256,), generator=draw)
    total = int(lengths.sum())
    column = {
        name: torch.randn(total, generator=draw)
        for name in "rollout_logprobs old_logprobs ref_logprobs values rewards advantages returns loss_weights".split()
    }
    owner = torch.tensor(holders)[torch.randint(0, len(holders), (256,), generator=draw)]
    local = torch.arange(256)
    return TrainBatch(
        tokens=torch.randint(0, 200, (total,), generator=draw, dtype=torch.int32),
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        loss_mask=torch.rand(total, generator=draw) < 0.5,
        group=local // 8,
        sequence_reward=torch.zeros(256),
        sharding=BatchSharding(lengths, torch.zeros_like(lengths), owner, local, row_exchange.WorldComm()),
        **column,
    )


def shard_batch(full: TrainBatch, rank: int) -> TrainBatch:
    assert full.sharding is not None
    local = (full.sharding.home == rank).nonzero().squeeze(1)
    part = replace(full, sharding=None).select(local.tolist())
    sharding = replace(full.sharding, local_indices=local)
    return replace(part, group=full.group, sequence_reward=full.sequence_reward, sharding=sharding)


def tokens_crossing(batch: TrainBatch, plan: MicroBatchPlan, model_ranks: dict[int, ModelRank]) -> int:
    """Return the number of tokens that a rank other than their home reads."""
    assert batch.sharding is not None
    expected_crossing = {
        i: {rank for rank, model_rank in model_ranks.items() if model_rank.row == r}
        for r, local in enumerate(plan)
        for i in sum(local, [])
    }
    owner, lengths = batch.sharding.home.tolist(), batch.lengths.tolist()
    return sum(lengths[i] for i, readers in expected_crossing.items() if readers - {owner[i]})


def main() -> None:
    world = int(os.environ["WORLD_SIZE"])
    ranks.initialize(ParallelConfig(world_size=world), timeout_s=60.0)
    rank, exchange = dist.get_rank(), row_exchange.get_row_exchange()
    size = 2 if sys.argv[1] == "replicas" else 1
    members = list(range(world))[-2:] if sys.argv[1] == "disjoint" else list(range(world))
    model_ranks = {member: ModelRank(n // size, True, True, n % size == 0, ()) for n, member in enumerate(members)}
    dispatcher = BatchDispatcher(model_ranks, len(members) // size, BUDGET, 0.0, 1, None)
    full = make_batch(members if size == 1 and len(members) == world else list(range(world - 2)))
    batch, this_rank = shard_batch(full, rank), model_ranks.get(rank)
    result: dict[str, Any] = {"wrong": []}

    def sent() -> int:
        return int(row_exchange.WorldComm().all_reduce(torch.tensor(exchange.bytes_sent["machine"])))

    def check_rows(rows: Any, plan: MicroBatchPlan, names: tuple[str, ...]) -> None:
        for indices in plan[this_rank.row] if this_rank else ():
            selected, expected = rows.select(indices), replace(full, sharding=None).select(indices)
            mismatches = [name for name in names if not torch.equal(getattr(selected, name), getattr(expected, name))]
            mismatches += [
                name
                for name in set(full.columns()) - {*names, "tokens", "loss_mask", "rollout_logprobs"}
                if getattr(selected, name) is not None
            ]
            result["wrong"] += mismatches

    plan = dispatcher.plan(batch, forward_only=True)
    free = plan_micro_batches(batch.lengths, dispatcher.rows, BUDGET)
    result |= {
        "crossing": tokens_crossing(batch, plan, model_ranks),
        "without homes": tokens_crossing(batch, free, model_ranks),
    }
    result |= {"tokens": int(batch.lengths.sum()), "as without homes": plan == free}
    before = sent()
    rows = dispatcher.dispatch(batch, plan, ("tokens",))
    check_rows(rows, plan, ("tokens",))
    result["tokens sent"] = sent() - before
    outputs = [
        (indices, {"x": rows.select(indices).tokens * 2.0}) for indices in (plan[this_rank.row] if this_rank else ())
    ]
    before = sent()
    results = dispatcher.collect(batch, plan, outputs, ("x",))()
    if not torch.equal(results["x"], batch.tokens * 2.0):
        result["wrong"].append("results back")
    result["results sent"] = sent() - before

    mini = batch.select(range(0, 256, 2))
    plan = dispatcher.plan(mini, forward_only=False)
    full = full.select(range(0, 256, 2))
    result["crossing of an update"] = tokens_crossing(mini, plan, model_ranks)
    for case, value in (
        ("named", select_columns(loss, mini)),
        ("all", select_columns(lambda output, part: None, mini)),
    ):
        before = sent()
        check_rows(dispatcher.dispatch(mini, plan, value), plan, value)
        result[f"{case} sent"], result[case] = sent() - before, value
    print("RESULT " + json.dumps(result), flush=True)
    ranks.barrier()
    row_exchange.close_row_exchange()
    ranks.shutdown()


if __name__ == "__main__":
    main()
