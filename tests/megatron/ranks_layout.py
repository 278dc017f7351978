"""One layout: forward, loss, every gradient and one optimizer step of each family compared with transformers and torch.

Arguments: layout (tp=2,ep=2), family:role (separated by blanks), folder for checkpoints. A layout may include flags
(tp=2,overlap,recompute). family:role@pp=2 has its own layout, as a critic can. Prints the largest differences.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[2] / "tools")]
torch.set_num_threads(1)

import reference  # noqa: E402
import replay  # noqa: E402
import sampling_masks  # noqa: E402
import tiny  # noqa: E402

from megarl.algorithms.losses import bradley_terry  # noqa: E402
from megarl.controllers.controller import load_requirements  # noqa: E402
from megarl.models.activation_memory import micro_batches_in_flight  # noqa: E402
from megarl.models.layout_algebra import shard, unshard  # noqa: E402
from megarl.models.memory import plan_memory  # noqa: E402
from megarl.parallel import ranks as parallel_ranks  # noqa: E402
from megarl.parallel.host_copy import tensor_bytes  # noqa: E402
from megarl.types import ModelOutput, SamplingMask, TokenLoss, TrainBatch  # noqa: E402

ADAM: dict[str, Any] = dict(lr=0.01, weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-3, max_grad_norm=0.5)
ADAM |= dict(schedule="constant", warmup_fraction=0.0)


def policy_loss(output: ModelOutput, batch: TrainBatch) -> TokenLoss:
    return TokenLoss(-output.logprobs * batch.advantages - 0.1 * output.entropy, {"entropy": output.entropy.detach()})


def value_loss(output: ModelOutput, batch: TrainBatch) -> TokenLoss:
    return TokenLoss((output.values - batch.returns) ** 2)


def preference_loss(output: ModelOutput, batch: TrainBatch) -> TokenLoss:
    assert output.scores is not None
    return bradley_terry(output.scores, batch.cu_seqlens, batch.group)


LOSSES = {"actor": policy_loss, "critic": value_loss, "reward_model": preference_loss}


def shard_of_gradient(model: Any) -> dict[str, torch.Tensor]:
    """Return this rank's gradients by canonical name; zero where the distributed optimizer has them on another rank."""
    from megarl.megatron.parameter_names import named_params

    result = {}
    for name, tensor in named_params(model.chunks, model.ranks.ep_rank).items():
        if not isinstance(tensor, torch.nn.Parameter):
            continue
        full = torch.zeros(tensor.numel())
        for optimizer in model.optimizer.chained_optimizers:
            if tensor in optimizer.model_param_gbuf_map:
                span = optimizer._get_model_param_range_map(tensor)["param"]
                full[span.start : span.end] = tensor.main_grad.view(-1)[span.start : span.end]
        result[name] = full.view(tensor.shape)
    return result


def gather(model: Any, local: dict[str, torch.Tensor], add: bool) -> dict[str, torch.Tensor]:
    """Gather HF tensors by name from all ranks: sums of gradient shards, or copies of weights."""
    comm = parallel_ranks.all_gather_objects((model.ranks, local))
    result: dict[str, torch.Tensor] = {}
    for param in model.params():
        holders = [(where, tensors[param.megatron]) for where, tensors in comm if param.megatron in tensors]
        if not holders:
            continue
        stage = min(where.pp_rank for where, _ in holders)  # a tied embedding is on two stages
        holders = [(where, tensor) for where, tensor in holders if where.pp_rank == stage]
        shards = []
        expert = param.expert is not None
        parts, _ = model.ranks.tp_size_and_rank(expert)
        for part in range(parts):
            copies = [tensor for where, tensor in holders if where.tp_size_and_rank(expert)[1] == part]
            shards.append(torch.stack(copies).sum(0) if add else copies[0])
            if not add:
                assert all(torch.equal(copy, copies[0]) for copy in copies), f"{param.megatron} differs between ranks"
        result |= unshard(param, shards)
    return result


def largest_difference(actual: dict[str, torch.Tensor], truth: dict[str, torch.Tensor], skip: tuple[str, ...]) -> float:
    wanted = {name for name in truth if name not in skip}
    assert actual.keys() == wanted, sorted(actual.keys() ^ wanted)
    return max(float((actual[name] - truth[name]).abs().max()) for name in wanted)


def check(family: str, role: str, layout: dict[str, int], folder: str) -> dict[str, float]:
    from plan_memory import model_state_bytes

    from megarl.megatron.trainer_model import MegatronModel

    sections: dict[str, Any] = {"actor_optimizer": ADAM, "critic": {"optimizer": ADAM}}
    train: dict[str, Any] = (
        {"ddp": {"overlap_grad_reduce": True, "bucket_size": 10_000}} if "overlap" in OPTIONS else {}
    )
    megatron: dict[str, Any] = {}
    if "recompute" in OPTIONS:
        megatron = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if "selective" in OPTIONS:
        megatron = {
            "recompute_granularity": "selective",
            "recompute_modules": [
                "core_attn",
                "layernorm",
                *(["mla_up_proj"] if "kv_lora_rank" in tiny.HF[family] else []),
            ],
        }
    if layout.get("vpp", 1) > 1:
        tiny.HF[family]["num_hidden_layers"] = layout["pp"] * layout["vpp"]
    elif layout.get("pp", 1) > 1 and tiny.HF[family]["num_hidden_layers"] == 3:
        # Three layers split unevenly, which gives a stage without experts.
        megatron["num_layers_in_first_pipeline_stage"] = 1
    batch = tiny.pairs() if role == "reward_model" else tiny.batch()
    if tiny.HF[family].get("num_nextn_predict_layers"):
        train["mtp_loss_coef"] = 0.3
    trainer = reference.Trainer(family, role, train.get("mtp_loss_coef", 0.0))
    weights = {name: tensor.clone() for name, tensor in trainer.tensors().items()}
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])

    def build(budget: int = 26) -> Any:
        local_value = {"train": {"max_tokens_per_gpu": budget, **train}, "model": {"megatron": megatron}}
        chosen = tiny.config(**layout, **sections, **local_value)
        place = parallel_ranks.create_layout(chosen.parallel)
        model = MegatronModel(tiny.HF[family], chosen, place, role, total_updates=3)  # type: ignore[arg-type]
        model.load_shards(lambda param, tp, rank: shard(param, weights, tp, rank))
        return model

    model = build()
    loss_fn = LOSSES[role]
    algorithm = "reward_model" if role == "reward_model" else "ppo"
    declared = load_requirements(replace(model.config, algorithm=algorithm))
    planned = plan_memory(tiny.HF[family], model.config, declared, tiny.HF[family])
    states, name = planned[model.ranks.pp_rank].states, role.replace("_", " ")
    result = {
        f"planned {part}": abs(size / states[f"{name} {part}"] - 1) for part, size in model_state_bytes(model).items()
    }
    names = ("logprobs", "entropy") if role == "actor" else ()
    argument = tiny.shard_batch(batch)
    actual = {
        name: tiny.gather_tokens(argument, values) for name, values in model.forward(argument, names=names).items()
    }
    with torch.no_grad():
        if role == "actor":
            logprobs, entropy = reference.policy(trainer.model, batch)
            result["logprobs"] = float((actual["logprobs"] - logprobs).abs().max())
            result["entropy"] = float((actual["entropy"] - entropy).abs().max())
            cool, _ = reference.policy(trainer.model, batch, temperature=0.7)
            result["temperature"] = float((model.forward(batch, temperature=0.7)["logprobs"] - cool).abs().max())
        elif role == "critic":
            truth = reference.values(trainer.model, trainer.head, batch)  # type: ignore[arg-type]
            result["values"] = float((actual["values"] - truth).abs().max())
        else:
            truth = reference.scores(trainer.model, trainer.head, batch)  # type: ignore[arg-type]
            result["scores"] = float((actual["scores"] - truth).abs().max())
            frozen = MegatronModel(tiny.HF[family], model.config, model.ranks, "reward_model", trains=False)
            frozen.load_shards(lambda param, tp, rank: shard(param, weights, tp, rank))
            assert frozen.offload() > 0 and weight_and_state_bytes(frozen) == (0, 0)
            result["serving"] = float((frozen.forward(batch)["scores"] - actual["scores"]).abs().max())
            assert not any(tensor.requires_grad for chunk in frozen.chunks for tensor in chunk.parameters())
            margins = truth[batch.cu_seqlens[1:] - 1].view(-1, 2) @ torch.tensor([1.0, -1.0])

    before = tiny.snapshot(model)
    result["parked"] = float(offloads_and_reloads(model, batch, actual))
    with count_live_micro_batches(model) as excess:
        metrics = model.train_step(argument, loss_fn)
    result["in flight"] = float(excess[0])
    adam = {name: ADAM[name] for name in ("lr", "weight_decay", "eps")}
    betas = (ADAM["beta1"], ADAM["beta2"])
    minimised = metrics[f"{role}/loss"]
    if "mtp_loss_coef" in train:
        result["mtp_loss"] = abs(metrics["actor/mtp_loss"] - float(trainer.mtp_loss(batch)))
        minimised += train["mtp_loss_coef"] * metrics["actor/mtp_loss"]
    loss, norm = trainer.step(batch, max_norm=ADAM["max_grad_norm"], betas=betas, **adam)
    result["loss"] = abs(minimised - loss)
    result["grad_norm"] = abs(metrics[f"{role}/grad_norm"] - norm) / norm
    assert norm > 2 * ADAM["max_grad_norm"], "the step is meant to be clipped"
    if role == "actor":
        result["metric"] = abs(metrics["entropy"] - float((batch.loss_weights * entropy).sum()))
    if role == "reward_model":
        share = float((margins > 0).float().mean())
        assert 0 < share < 1 and metrics["reward_model/accuracy"] == share
        result["metric"] = abs(metrics["reward_model/margin"] - float(margins.mean()))
    tied = tiny.HF[family]["tie_word_embeddings"]
    skip = ("lm_head.weight",) if role != "actor" or tied else ()
    grads = trainer.tensors(grads=True)
    largest = max(float(grad.abs().max()) for name, grad in grads.items() if name not in skip)
    gathered = gather(model, shard_of_gradient(model), add=True)
    result["gradients"] = largest_difference(gathered, grads, skip) / largest
    after = gather(model, model.local_params(), add=False)
    result["step"] = largest_difference(after, trainer.tensors(), skip) / ADAM["lr"]

    # The step does not depend on the micro-batches: one per sequence, or all in one.
    other = build(budget=1000)
    repeat = other.train_step(batch, loss_fn)
    result["packing"] = abs(repeat[f"{role}/loss"] - metrics[f"{role}/loss"])
    gap = [
        float((a - b).abs().max())
        for a, b in zip(tiny.snapshot(model).values(), tiny.snapshot(other).values(), strict=True)
    ]
    result["packing_step"] = max(gap) / ADAM["lr"]

    # Swapping weights and back, and a gradient that is not finite, change nothing.
    local_value, reference_weights = tiny.snapshot(model), model.host_copy()
    reference_weights.copy_from(map(tensor_bytes, before.values()))
    with model.swap_weights(reference_weights):
        again = model.forward(batch)
    result["swapped"] = max(float((again[name] - actual[name]).abs().max()) for name in again)
    step = model.train_step(batch, lambda output, part: infinite_loss(loss_fn(output, part)))
    result["skipped"] = step[f"{role}/skipped"]
    kept = torch.cat(reference_weights.pieces)
    result["unchanged"] = float(
        all(torch.equal(local_value[name], tensor) for name, tensor in tiny.snapshot(model).items())
        and torch.equal(torch.cat(list(map(tensor_bytes, before.values()))), kept[: reference_weights.size])
    )

    if family == "qwen3_moe" and role == "actor":
        result |= aux_losses(layout, weights)
    if role == "actor" and family in ("qwen3_moe", "deepseek_v3", "deepseek_v2"):
        uneven = {name: value for name, value in megatron.items() if not name.startswith("recompute")}
        actual = replay.check(
            family, layout, uneven, RANKS, lambda model: gather(model, shard_of_gradient(model), True)
        )
        result |= {f"replay {name}": value for name, value in actual.items()}
    if role == "actor" and family in sampling_masks.FAMILIES:
        plain = {name: value for name, value in megatron.items() if not name.startswith("recompute")}
        actual = sampling_masks.check(
            family, layout, plain, RANKS, lambda model: gather(model, shard_of_gradient(model), True)
        )
        result |= {f"cut {name}": value for name, value in actual.items()}
    if folder:
        result["resumed"] = float(resumes_bitwise(model, build, batch, loss_fn, folder))
    return result


def aux_losses(layout: dict[str, int], weights: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the logged metrics of a step with auxiliary losses; no sequence needs padding, which they would count."""
    from megarl.megatron.trainer_model import MegatronModel

    budget = {"max_tokens_per_gpu": 26 // layout.get("cp", 1)}  # the same micro-batches in every layout
    config = tiny.config(**layout, model={"megatron": tiny.AUX_LOSSES}, train=budget)
    model = MegatronModel(tiny.HF["qwen3_moe"], config, RANKS, "actor")
    model.load_shards(lambda param, tp, rank: shard(param, weights, tp, rank))
    metrics = model.train_step(tiny.batch((8, 20, 12)), lambda output, _: TokenLoss(-output.logprobs))
    return {f"aux {name}": metrics[f"actor/{name}"] for name in ("moe_load_balancing_loss", "moe_z_loss", "grad_norm")}


def vocab_parallel_difference(real: int, cut: bool = False) -> float:
    """Return the largest difference of log-probs, entropies and gradients between a sharded and the whole vocabulary.

    With real=7, rank 1 has padding only. cut: with candidate sets, some of which are on one rank only."""
    from megatron.core import parallel_state

    from megarl.megatron.logprobs import vocab_parallel_logprobs

    rows, width, generator = 9, 8, torch.Generator().manual_seed(3)
    hidden = torch.randn(rows, 5, generator=generator).requires_grad_()
    complete = torch.randn(2 * width, 5, generator=generator).requires_grad_()
    targets = torch.randint(0, real, (rows,), generator=generator)
    weight = torch.randn(2, rows, generator=generator)
    mine = slice(RANKS.tp_rank * width, (RANKS.tp_rank + 1) * width)
    local_value, part = (tensor.detach().clone().requires_grad_() for tensor in (hidden, complete[mine]))
    group = parallel_state.get_tensor_model_parallel_group()
    sets = torch.rand(rows, real, generator=generator) < torch.linspace(0, 1, rows)[:, None]
    sets.scatter_(1, targets[:, None], True)
    sets[3] = (torch.arange(real) < width) == bool(targets[3] < width)
    ids = [row.nonzero()[:, 0].tolist() if i != 5 else [] for i, row in enumerate(sets)]
    sets[5] = True
    support = SamplingMask.from_rows(ids) if cut else None
    actual = vocab_parallel_logprobs(
        local_value, part, targets, real, group, 1.3, chunk_tokens=4, sampling_mask=support
    )
    logits = (hidden @ complete.T)[:, :real] / 1.3
    log_p = (logits.masked_fill(~sets, -torch.inf) if cut else logits).log_softmax(-1)
    truth = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p.clamp(min=-1e9)).sum(-1)
    for pair in (actual, truth):
        (weight[0] * pair[0] + weight[1] * pair[1]).sum().backward()
    assert (
        local_value.grad is not None and part.grad is not None and hidden.grad is not None and complete.grad is not None
    )
    torch.distributed.all_reduce(local_value.grad, group=group)
    gaps = (actual[0] - truth[0], actual[1] - truth[1], part.grad - complete.grad[mine], local_value.grad - hidden.grad)
    return max(float(gap.detach().abs().max()) for gap in gaps)


@contextmanager
def count_live_micro_batches(model: Any) -> Iterator[list[int]]:
    """Yield by how many the micro-batches with live tensors on this rank ever exceed those in flight."""
    from megarl.megatron import trainer_model as module

    parallel, make = model.config.parallel, module.make_micro_batch
    allowed = round(micro_batches_in_flight(parallel.pp, model.ranks.pp_rank, parallel.vpp) * parallel.vpp)
    created: list[list[weakref.ref[torch.Tensor]]] = []
    excess = [-allowed]

    def watch(*args: Any) -> Any:
        micro = make(*args)
        retained = micro.tokens, micro.batch.loss_weights  # only the last stage has loss weights
        created.append([weakref.ref(tensor) for tensor in retained if tensor is not None])
        gc.collect()
        alive = sum(any(ref() is not None for ref in refs) for refs in created)
        excess[0] = max(excess[0], alive - allowed)
        return micro

    module.make_micro_batch = watch
    try:
        yield excess
    finally:
        module.make_micro_batch = make
        assert len(created) >= 2 * parallel.vpp
        excess[0] = max(0, excess[0])


def offloads_and_reloads(model: Any, batch: TrainBatch, actual: dict[str, torch.Tensor]) -> bool:
    """Offload optimizer and weights, reload, compare outputs, and leave the model offloaded."""
    weights, _ = weight_and_state_bytes(model)
    freed = [model.offload(weights=False)]
    remaining = weight_and_state_bytes(model) == (weights, 0)
    freed.append(model.offload())
    away = weight_and_state_bytes(model) == (0, 0)
    again = model.forward(batch)
    back = weight_and_state_bytes(model) == (weights, 0)
    freed.append(model.offload())
    same = all(torch.equal(again[name], actual[name]) for name in again)
    return min(freed) > 0 and remaining and away and back and same


def weight_and_state_bytes(model: Any) -> tuple[int, int]:
    """Return the bytes of weights, and of optimizer states that are no weights, without step counts."""
    from megarl.megatron.optimizer import state_tensors

    params = [tensor for chunk in model.chunks for tensor in chunk.parameters()]
    mine = {tensor.untyped_storage() for tensor in params}
    states = [] if model.optimizer is None else [t for t in state_tensors(model.optimizer) if t.dim()]
    others = {tensor.untyped_storage() for tensor in states} - mine
    return sum(storage.nbytes() for storage in mine), sum(storage.nbytes() for storage in others)


def infinite_loss(result: TokenLoss) -> TokenLoss:
    return TokenLoss(result.loss * torch.inf)


def resumes_bitwise(model: Any, build: Any, batch: TrainBatch, loss_fn: Any, folder: str) -> bool:
    """Return whether a step after restoring is bitwise the step after saving."""
    from megarl.megatron.dist_checkpoint import restore_model

    tiny.save_model(model, Path(folder))
    first = model.train_step(batch, loss_fn)
    fresh = build()
    restore_model(fresh, Path(folder))
    second = fresh.train_step(batch, loss_fn)
    pairs = zip(tiny.snapshot(model).values(), tiny.snapshot(fresh).values(), strict=True)
    return first == second and all(torch.equal(a, b) for a, b in pairs)


def parse_layout(text: str) -> dict[str, int]:
    """Parse a layout into arguments of `tiny.config`."""
    pairs = (item.split("=") for item in text.split(",") if "=" in item)
    return {"world": int(os.environ["WORLD_SIZE"])} | {name: int(size) for name, size in pairs}


def with_transformer_engine_flags(set_flags: Any) -> Any:
    """Wrap `norm_counting.set_flags` to start from the flags that Transformer Engine's modules set.

    Those leave grouped experts without a flag, and mark linear layers as sharded that every rank has whole."""

    def set_flags_after_reset(named: dict[str, torch.Tensor], table: Any) -> Any:
        for name, tensor in named.items():
            if ".mlp.experts." in name:
                tensor.__dict__.pop("tensor_model_parallel", None)
            elif "_down_proj" in name:
                tensor.tensor_model_parallel = True  # type: ignore[attr-defined]
        changed = set_flags(named, table)
        assert all(name in changed for name in named if ".mlp.experts." in name or "_down_proj" in name)
        return changed

    return set_flags_after_reset


if __name__ == "__main__":
    from megarl.models import norm_counting

    norm_counting.set_flags = with_transformer_engine_flags(norm_counting.set_flags)
    layout, OPTIONS = parse_layout(sys.argv[1]), sys.argv[1].split(",")
    RANKS = parallel_ranks.initialize(tiny.config(**layout).parallel, timeout_s=120)
    results = {}
    for item in sys.argv[2].split():
        what, _, local_value = item.partition("@")
        family, role = what.split(":")
        folder = f"{sys.argv[3]}/{len(results)}" if len(sys.argv) > 3 else ""
        results[item] = check(family, role, parse_layout(local_value) if local_value else layout, folder)
    if RANKS.tp > 1:
        for item in results.values():
            item["vocabulary"] = max(
                vocab_parallel_difference(real, cut) for real in (7, 13, 16) for cut in (False, True)
            )
    print("RESULT " + json.dumps(results))
    parallel_ranks.shutdown()
