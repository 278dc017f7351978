"""Out-of-memory errors on one of two ranks: what ranks agree on, and whether the result is that of enough memory.

    ranks_oom_retry.py dp|tp|pp|ep

`dp`: a rank runs out of memory in the middle of a pass, once for real. Otherwise: when it reserves memory, before ranks
compute together.
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
DYNAMIC = {"cp": 2, "dynamic_cp": 1}
WIDTHS = {"short": {1}, "long": {1, 2}}
SIZES = {"dp": {}, "tp": {"tp": 2}, "pp": {"pp": 2}, "ep": {"ep": 2}, "dynamic": DYNAMIC}[LAYOUT]
# A large eps, so that rounding in other micro-batches does not flip the sign of a step.
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
    """Build a model. aux: with router losses, which depend on how the batch is split into micro-batches."""
    from megarl.megatron.trainer_model import MegatronModel

    sections: dict[str, Any] = {"guards": {"oom_retry": guarded}, "actor_optimizer": ADAM}
    sections["train"] = {"max_tokens_per_gpu": 18 if LAYOUT == "dynamic" else 26, **train}
    sections["model"] = {"megatron": tiny.AUX_LOSSES if aux else {}}
    config = tiny.config(world=2, **SIZES, **sections, critic={"optimizer": ADAM})
    layout_ranks = parallel_ranks.create_layout(config.parallel)
    model = MegatronModel(tiny.HF[FAMILY], config, layout_ranks, role, total_updates=5)  # type: ignore[arg-type]
    score_heads = {"score.weight": torch.linspace(-0.2, 0.2, 32)[None]}
    model.load_shards(lambda param, parts, part: shard(param, WEIGHTS | score_heads, parts, part))
    return model


def train_steps(model: Any, batch: TrainBatch, loss_fn: Any = loss, steps: int = 2) -> dict[str, Any]:
    """Return the metrics of training steps, and weights, moments and outputs after them."""
    from megarl.megatron.optimizer import state_tensors

    metrics = [model.train_step(batch, loss_fn) for _ in range(steps)]
    outputs = model.forward(batch)
    moments = [tensor.clone() for tensor in state_tensors(model.optimizer)]
    weights = {name: tensor.clone() for name, tensor in model.local_params().items()}
    return {"metrics": metrics, "outputs": outputs, "weights": weights, "moments": moments}


def largest_difference(a: dict[str, Any], b: dict[str, Any]) -> float:
    """Return the largest difference of any value, relative for values above 1."""
    largest = 0.0
    for actual_value, expected_value in zip(a["metrics"], b["metrics"], strict=True):
        assert actual_value.keys() == expected_value.keys()
        largest = max(
            largest,
            *(
                abs(actual_value[name] - expected_value[name]) / max(1.0, abs(expected_value[name]))
                for name in actual_value
            ),
        )
    pairs = [(a[kind][name], b[kind][name]) for kind in ("outputs", "weights") for name in a[kind]]
    pairs += list(zip(a["moments"], b["moments"], strict=True))
    gaps = [
        (actual_value - expected_value).abs() / expected_value.abs().clamp(min=1.0)
        for actual_value, expected_value in pairs
        if actual_value.numel()
    ]
    return max(largest, *(float(gap.max()) for gap in gaps))


def retry_state(model: Any) -> list[Any]:
    """Return token budget, whether layers recompute, and the number of OOMs, which must be equal on all ranks."""
    state = [model.oom_retry.token_budget, model.oom_retry.should_recompute, model.oom_retry.num_ooms]
    assert len({str(a) for a in parallel_ranks.all_gather_objects(state)}) == 1
    return state


@contextmanager
def run_out_of_memory(model: Any, when: Callable[[Any], bool], failure: str = "device") -> Iterator[list[int]]:
    """Make rank 1 run out of memory in each micro-batch for which `when` is true.

    failure: as the `device` allocator raises it, by a real allocation on the `host`, or in the `backward` pass."""
    reader, failures = model._reader, []

    def raise_oom(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def reading(micro: Any, emitted: torch.Tensor, *args: Any) -> Any:
        if micro.indices and RANKS.job.rank == 1 and when(micro):
            failures.append(len(micro.unpadded_indices))
            if failure == "host":
                torch.empty(1 << 60, dtype=torch.uint8)
            elif failure == "backward":
                emitted.register_hook(raise_oom)
            else:
                raise_oom()
        return reader.read(micro, emitted, *args)

    model._reader = SimpleNamespace(read=reading, empty_loss=reader.empty_loss)
    yield failures
    model._reader = reader


def error(call: Callable[[], Any]) -> str:
    try:
        call()
    except ConfigError as failure:
        return str(failure)
    return "no error"


def independent_ranks() -> dict[str, Any]:
    """Each rank has a whole model; the first rank has all sequences."""
    batch, result = tiny.shard_batch(tiny.batch()), {}
    expected_value = train_steps(build(False), batch)
    result["guarded"] = largest_difference(train_steps(build(True), batch), expected_value)
    for failure in ("device", "host", "backward"):
        model = build(True)
        with run_out_of_memory(model, lambda micro: len(micro.indices) > 1, failure) as failures:
            actual = train_steps(model, batch)
        result[failure] = {
            "gap": largest_difference(actual, expected_value),
            "state": retry_state(model),
            "failures": len(failures),
        }
    many_sequences = tiny.shard_batch(tiny.batch((4, 3, 5, 2, 4, 3, 5, 4, 3, 4, 2, 5)))
    model = build(True)
    with run_out_of_memory(model, lambda micro: len(micro.indices) > 1):
        actual = train_steps(model, many_sequences)
    result["halved again"] = {
        "gap": largest_difference(actual, train_steps(build(False), many_sequences)),
        "state": retry_state(model),
    }
    model = build(True, aux=True)
    with run_out_of_memory(
        model, lambda micro: len(micro.unpadded_indices) > 11 and not model.oom_retry.should_recompute
    ):
        actual = train_steps(model, batch)
    result["recomputed"] = {
        "gap": largest_difference(actual, train_steps(build(False, aux=True), batch)),
        "state": retry_state(model),
    }
    saved = model.sharded_state_dict()["guards"]
    retried, reconfigured = build(True), build(True, max_tokens_per_gpu=30)
    for restored_model in (retried, reconfigured):
        restored_model.oom_retry.load_state_dict(json.loads(json.dumps(saved)))
    result["restored"], result["restored with new config"] = retry_state(retried), retry_state(reconfigured)
    layers = next(iter(retried.chunks)).module.decoder.config
    result["restored recomputes"] = [layers.recompute_granularity, layers.recompute_method]
    model = build(True)
    with run_out_of_memory(model, lambda micro: True):
        result["unfittable"] = error(lambda: model.train_step(batch, loss))
        result["unfittable forward"] = error(lambda: model.forward(batch))
    with run_out_of_memory(model, lambda micro: len(micro.indices) > 1):
        result["after failure"] = largest_difference(train_steps(model, batch), expected_value)
    model = build(False)
    with run_out_of_memory(model, lambda micro: True):
        # An error of one rank, after which its peers fail too.
        result["unguarded"] = unguarded(model, tiny.batch())
    # Of tokens that both sequences of a pair have, gradients cancel, and Adam makes steps of what rounding leaves.
    pairs, role = tiny.shard_batch(tiny.pairs((7, 18, 12, 3, 11, 9, 26, 1))), "reward_model"
    expected_value = train_steps(build(False, role, max_tokens_per_gpu=80), pairs, preference)
    model = build(True, role, max_tokens_per_gpu=80)
    with run_out_of_memory(model, lambda micro: len(micro.indices) > 2):
        actual = train_steps(model, pairs, preference)
    result["pairs"] = {"gap": largest_difference(actual, expected_value), "state": retry_state(model)}
    return result


def unguarded(model: Any, batch: TrainBatch) -> str:
    try:
        if RANKS.job.rank == 1:
            model.forward(batch)
    except torch.OutOfMemoryError as failure:
        return type(failure).__name__
    return "not rank 1"


def model_parallel_ranks() -> dict[str, Any]:
    """Ranks compute a micro-batch together: each reserves its memory before any starts."""
    batch, result = tiny.batch(), {}
    model, reserve = build(True), device.reserve

    def required_tokens(tokens: int, recomputes: bool = False) -> int:
        return working_bytes(tiny.HF[FAMILY], model.config, model.ranks, "actor", tokens, True, recomputes)

    enough = max(required_tokens(14), required_tokens(26, recomputes=True))
    enough = parallel_ranks.all_gather_objects(enough)[1]

    def limited(size: int) -> None:
        if RANKS.job.rank == 1 and size > enough:
            raise torch.OutOfMemoryError("CUDA out of memory")
        reserve(size)

    device.reserve = limited
    for name, max_length in (("short", 14), ("long", 26)):
        selected = batch.select([i for i in range(batch.num_sequences) if batch.lengths[i] <= max_length])
        assert selected.loss_weights is not None
        selected = tiny.shard_batch(selected.with_(loss_weights=selected.loss_weights / selected.loss_weights.sum()))
        expected_value, model = train_steps(build(False), selected), build(True)
        if LAYOUT == "dynamic":
            assert set(model.dispatcher.plan(selected, forward_only=False).widths) == WIDTHS[name]
        actual = train_steps(model, selected)
        result[name] = {"gap": largest_difference(actual, expected_value), "state": retry_state(model)}
    if LAYOUT == "dynamic":  # as after an earlier error
        model = build(True)
        model.oom_retry.token_budget = 9
        plan = model.dispatcher.plan(selected, forward_only=False)
        (cut,) = model.oom_retry.plans(selected, plan, trains=True)
        actual = train_steps(model, selected)
        result["cut"] = {"gap": largest_difference(actual, expected_value), "widths": [plan.widths, cut.widths]}
    enough, model = 0, build(True)
    result["unfittable"] = error(lambda: model.train_step(batch, loss))
    device.reserve = reserve
    model = build(True)

    def raise_oom(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    if LAYOUT != "pp":  # only the last stage would fail, and the first would lose its peer
        model._reader = SimpleNamespace(read=raise_oom)
        result["unreserved"] = error(lambda: model.train_step(batch, loss))
    return result


if __name__ == "__main__":
    tiny.avoid_wide_micro_batches()
    RANKS = parallel_ranks.initialize(tiny.config(world=2, **SIZES).parallel, timeout_s=60)
    print("RESULT " + json.dumps(independent_ranks() if LAYOUT == "dp" else model_parallel_ranks()))
    parallel_ranks.shutdown()
