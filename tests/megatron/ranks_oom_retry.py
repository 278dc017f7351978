"""Memory that runs out, on two ranks: what is agreed on, and whether the result is that of a run that had the memory.

    ranks_oom_retry.py dp|tp|pp|ep

`dp`: a rank's memory runs out in the middle of a pass, once for real. Else: when it is asked for, before ranks begin
together.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)

import tiny  # noqa: E402

from megarl.config import ConfigError  # noqa: E402
from megarl.models.activation_memory import working_bytes  # noqa: E402
from megarl.models.layout_algebra import shard  # noqa: E402
from megarl.parallel import device  # noqa: E402
from megarl.parallel import ranks as parallel_ranks  # noqa: E402
from megarl.types import ModelOutput, TokenLoss, TrainBatch  # noqa: E402

LAYOUT = sys.argv[1]
SIZES = {"dp": {}, "tp": {"tp": 2}, "pp": {"pp": 2}, "ep": {"ep": 2}}[LAYOUT]
# An eps that does not turn the rounding of other micro-batches into a step of another sign.
ADAM: dict[str, Any] = dict(lr=0.01, eps=1e-3, schedule="constant", warmup_fraction=0.0, max_grad_norm=0.5)
FAMILY = "qwen3_moe"
WEIGHTS = tiny.hf_tensors(tiny.hf_model(FAMILY))


def loss(output: ModelOutput, batch: TrainBatch) -> TokenLoss:
    assert output.logprobs is not None and batch.advantages is not None
    return TokenLoss(-output.logprobs * batch.advantages, {"actor/nll": -output.logprobs.detach()})


def preference(output: ModelOutput, batch: TrainBatch) -> TokenLoss:
    from megarl.algorithms.losses import bradley_terry

    assert output.scores is not None
    return bradley_terry(output.scores, batch.cu_seqlens, batch.group)


def build(guarded: bool, role: str = "actor", aux: bool = False, **train: Any) -> Any:
    """aux: with losses of the router, which are of a micro-batch, and so are others where these are cut otherwise."""
    from megarl.megatron.trainer_model import MegatronModel

    sections: dict[str, Any] = {"guards": {"oom_retry": guarded}, "actor_optimizer": ADAM, "train": train}
    sections["model"] = {"megatron": tiny.AUX_LOSSES if aux else {}}
    config = tiny.config(world=2, **SIZES, **sections, critic={"optimizer": ADAM})
    place = parallel_ranks.create_layout(config.parallel)
    model = MegatronModel(tiny.HF[FAMILY], config, place, role, total_updates=5)  # type: ignore[arg-type]
    heads = {"score.weight": torch.linspace(-0.2, 0.2, 32)[None]}
    model.load_shards(lambda param, parts, part: shard(param, WEIGHTS | heads, parts, part))
    return model


def taken(model: Any, batch: TrainBatch, loss_fn: Any = loss, steps: int = 2) -> dict[str, Any]:
    """Metrics of steps, weights and moments after them, and what the model then says."""
    from megarl.megatron.optimizer import state_tensors

    metrics = [model.train_step(batch, loss_fn) for _ in range(steps)]
    says = model.forward(batch)
    moments = [tensor.clone() for tensor in state_tensors(model.optimizer)]
    weights = {name: tensor.clone() for name, tensor in model.local_params().items()}
    return {"metrics": metrics, "says": says, "weights": weights, "moments": moments}


def gap(item: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of anything, of what is above 1 relative to it."""
    actual = 0.0
    for mine, theirs in zip(item["metrics"], other["metrics"], strict=True):
        assert mine.keys() == theirs.keys()
        actual = max(actual, *(abs(mine[name] - theirs[name]) / max(1.0, abs(theirs[name])) for name in mine))
    pairs = [(item[kind][name], other[kind][name]) for kind in ("says", "weights") for name in item[kind]]
    pairs += list(zip(item["moments"], other["moments"], strict=True))
    gaps = [(mine - theirs).abs() / theirs.abs().clamp(min=1.0) for mine, theirs in pairs if mine.numel()]
    return max(actual, *(float(gap.max()) for gap in gaps))


def state(model: Any) -> list[Any]:
    """Budget, whether it recomputes, how often memory ran out; the same on all ranks."""
    actual = [model.oom_retry.token_budget, model.oom_retry.should_recompute, model.oom_retry.num_ooms]
    assert len({str(item) for item in parallel_ranks.all_gather_objects(actual)}) == 1
    return actual


@contextmanager
def short(model: Any, when: Callable[[Any], bool], how: str = "device") -> Iterator[list[int]]:
    """On rank 1 memory runs out in each micro-batch of which `when` is true: in its forward pass, as the device's
    allocator says it, for want of so much as no `host` has, or only in the `backward` pass."""
    reader, seen = model._reader, []

    def fails(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def reading(micro: Any, emitted: torch.Tensor, *remaining: Any) -> Any:
        if micro.indices and RANKS.job.rank == 1 and when(micro):
            seen.append(len(micro.unpadded_indices))
            if how == "host":
                torch.empty(1 << 60, dtype=torch.uint8)
            elif how == "backward":
                emitted.register_hook(fails)
            else:
                fails()
        return reader.read(micro, emitted, *remaining)

    model._reader = SimpleNamespace(read=reading)
    yield seen
    model._reader = reader


def error(call: Callable[[], Any]) -> str:
    try:
        call()
    except ConfigError as failure:
        return str(failure)
    return "no error"


def alone() -> dict[str, Any]:
    """Each rank has a whole model; all sequences are at home on the first."""
    batch, result = tiny.in_shares(tiny.batch()), {}
    undisturbed = taken(build(False), batch)
    result["guarded"] = gap(taken(build(True), batch), undisturbed)
    for how in ("device", "host", "backward"):
        model = build(True)
        with short(model, lambda micro: len(micro.indices) > 1, how) as seen:
            actual = taken(model, batch)
        result[how] = {"gap": gap(actual, undisturbed), "state": state(model), "seen": len(seen)}
    many = tiny.in_shares(tiny.batch((4, 3, 5, 2, 4, 3, 5, 4, 3, 4, 2, 5)))
    model = build(True)
    with short(model, lambda micro: len(micro.indices) > 1):
        actual = taken(model, many)
    result["halved again"] = {"gap": gap(actual, taken(build(False), many)), "state": state(model)}
    model = build(True, aux=True)
    with short(model, lambda micro: len(micro.unpadded_indices) > 11 and not model.oom_retry.should_recompute):
        actual = taken(model, batch)
    result["recomputed"] = {"gap": gap(actual, taken(build(False, aux=True), batch)), "state": state(model)}
    saved = model.sharded_state_dict()["guards"]
    again, anew = build(True), build(True, max_tokens_per_gpu=30)
    for other in (again, anew):
        other.oom_retry.load_state_dict(json.loads(json.dumps(saved)))
    result["restored"], result["set anew"] = state(again), state(anew)
    layers = next(iter(again.chunks)).module.decoder.config
    result["restored recomputes"] = [layers.recompute_granularity, layers.recompute_method]
    model = build(True)
    with short(model, lambda micro: True):
        result["never"] = error(lambda: model.train_step(batch, loss))
        result["never forward"] = error(lambda: model.forward(batch))
    with short(model, lambda micro: len(micro.indices) > 1):
        result["after all"] = gap(taken(model, batch), undisturbed)
    model = build(False)
    with short(model, lambda micro: True):
        # A rank's own error, which ends it, and then those that wait for it.
        result["unguarded"] = unguarded(model, tiny.batch())
    pairs, role = tiny.in_shares(tiny.pairs()), "reward_model"
    undisturbed = taken(build(False, role, max_tokens_per_gpu=80), pairs, preference)
    model = build(True, role, max_tokens_per_gpu=80)
    with short(model, lambda micro: len(micro.indices) > 2):
        actual = taken(model, pairs, preference)
    result["pairs"] = {"gap": gap(actual, undisturbed), "state": state(model)}
    return result


def unguarded(model: Any, batch: TrainBatch) -> str:
    try:
        if RANKS.job.rank == 1:
            model.forward(batch)
    except torch.OutOfMemoryError as failure:
        return type(failure).__name__
    return "not rank 1"


def together() -> dict[str, Any]:
    """Ranks compute a micro-batch together: each takes what it will need before any begins."""
    batch, result = tiny.batch(), {}
    model, requested, reserve = build(True), [], device.reserve

    def needs(tokens: int, recomputes: bool = False) -> int:
        return working_bytes(tiny.HF[FAMILY], model.config, model.ranks, "actor", tokens, True, recomputes)

    # A stage of one layer has that layer anyway.
    enough, full = max(needs(14), 0 if LAYOUT == "pp" else needs(26, recomputes=True)), needs(26)
    enough = parallel_ranks.all_gather_objects(enough)[1]

    def limited(size: int) -> None:
        requested.append(size)
        if RANKS.job.rank == 1 and size > enough:
            raise torch.OutOfMemoryError("CUDA out of memory")
        reserve(size)

    device.reserve = limited
    for name, longest in (("short", 14), ("long", 26)):
        value = batch.select([i for i in range(batch.num_sequences) if batch.lengths[i] <= longest])
        assert value.loss_weights is not None
        value = tiny.in_shares(value.with_(loss_weights=value.loss_weights / value.loss_weights.sum()))
        undisturbed, model = taken(build(False), value), build(True)
        if LAYOUT == "pp" and name == "long":
            result["in vain"] = error(lambda: model.train_step(value, loss))  # noqa: B023
            continue
        actual = taken(model, value)
        result[name] = {"gap": gap(actual, undisturbed), "state": state(model)}
    result["asked"] = {"first": requested[0], "whole": full, "enough": enough}
    device.reserve = reserve
    model = build(True)

    def fails(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    if LAYOUT != "pp":  # in which only the last stage would fail, and the first lose it
        model._reader = SimpleNamespace(read=fails)
        result["in the middle"] = error(lambda: model.train_step(batch, loss))
    return result


if __name__ == "__main__":
    RANKS = parallel_ranks.initialize(tiny.config(world=2, **SIZES).parallel, timeout_s=60)
    print("RESULT " + json.dumps(alone() if LAYOUT == "dp" else together()))
    parallel_ranks.shutdown()
