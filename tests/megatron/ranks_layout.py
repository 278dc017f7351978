"""One layout: forward, loss, every gradient and one optimizer step of each family compared with transformers and torch.

Arguments: layout (tp=2,ep=2), family:role (separated by blanks), folder for checkpoints. A layout may include flags
(tp=2,overlap,recompute; dsa for Megatron's module of sparse attention). family:role@pp=2 has its own layout, as a
critic can. Prints the largest differences.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[2] / "tools")]
torch.set_num_threads(1)

import images  # noqa: E402
import reference  # noqa: E402
import replay  # noqa: E402
import sampling_masks  # noqa: E402
import sparse_indices  # noqa: E402
import tiny  # noqa: E402

from megarl.algorithms.losses import bradley_terry  # noqa: E402
from megarl.algorithms.preference_losses import PreferenceOptions  # noqa: E402
from megarl.algorithms.preference_losses import preference_loss as policy_preference_loss  # noqa: E402
from megarl.config import Config  # noqa: E402
from megarl.controllers.controller import load_requirements  # noqa: E402
from megarl.models.activation_memory import micro_batches_in_flight  # noqa: E402
from megarl.models.layout_algebra import Param, shard, unshard  # noqa: E402
from megarl.models.memory import plan_memory  # noqa: E402
from megarl.models.prefix_sharing import reason_against  # noqa: E402
from megarl.models.registry import family_of  # noqa: E402
from megarl.parallel import device  # noqa: E402
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


REPLAYED = ("qwen3_moe", "deepseek_v3", "deepseek_v2", "minimax_m2", "ernie4_5_moe", "gpt_oss")
"""Families whose routing replay is compared with transformers: one for each of its routers."""

DPO = PreferenceOptions(beta=2.0, label_smoothing=0.1, sft_coef=0.5)


def dpo_loss(output: ModelOutput, batch: TrainBatch) -> TokenLoss:
    assert output.logprobs is not None
    return policy_preference_loss(output.logprobs, batch, DPO)


def train_beside_rank(config: Config, members: Sequence[int]) -> dict[str, float]:
    """Take a step of a Qwen3-MoE policy on some ranks of the job, and return its metrics; none on the others."""
    from megarl.megatron.trainer_model import MegatronModel

    ranks = parallel_ranks.create_layout(config.parallel, 60, members=members)
    if ranks is None:
        return {}
    weights = tiny.hf_tensors(tiny.hf_model("qwen3_moe"))
    model = MegatronModel(tiny.HF["qwen3_moe"], config, ranks, "actor", total_updates=9)
    model.load_shards(lambda param, parts, part: shard(param, weights, parts, part))
    return model.train_step(tiny.batch(), policy_loss)


LOSSES = {"actor": policy_loss, "critic": value_loss, "reward_model": preference_loss, "dpo": dpo_loss}
"""By role; `dpo` is the role actor on preference pairs."""


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


def states(model: Any) -> Iterator[torch.Tensor]:
    """Yield masters, moments and AdamW's step counts in the order of the model's parameters."""
    from megarl.megatron.optimizer import _dist_optimizers, _layer_wise_optimizers

    for part in _layer_wise_optimizers(model.optimizer).values():
        for _, values in part.states():
            yield from values.values()
    for _, part in _dist_optimizers(model.optimizer):
        for param in part.model_param_group_index_map:
            values = part._get_main_param_and_optimizer_states(param)
            yield from (values[name].detach().flatten() for name in ("param", "exp_avg", "exp_avg_sq", "step"))


def equal(first: Any, second: Any) -> bool:
    """Return whether weights, adapters, masters, moments and step counts of two models have the same bits."""
    pairs = list(zip(states(first), states(second), strict=True))
    for one, other in zip(*((model.local_params(), model.local_adapters()) for model in (first, second)), strict=True):
        assert one.keys() == other.keys()
        pairs += [(one[name], other[name]) for name in one]
    return all(torch.equal(a, b) for a, b in pairs)


def gather(
    model: Any, local: dict[str, torch.Tensor], add: bool, params: Sequence[Param] = ()
) -> dict[str, torch.Tensor]:
    """Gather HF tensors by name from all ranks: sums of gradient shards, or copies of weights. params: their table, if
    it is not the model's."""
    all_tensors = parallel_ranks.all_gather_objects((model.ranks, local))
    result: dict[str, torch.Tensor] = {}
    for param in params or model.params():
        holders = [(owner, tensors[param.megatron]) for owner, tensors in all_tensors if param.megatron in tensors]
        if not holders:
            continue
        stage = min(owner.pp_rank for owner, _ in holders)  # a tied embedding is on two stages
        holders = [(owner, tensor) for owner, tensor in holders if owner.pp_rank == stage]
        shards = []
        expert = param.expert is not None
        parts, _ = model.ranks.tp_size_and_rank(expert)
        for part in range(parts):
            copies = [tensor for owner, tensor in holders if owner.tp_size_and_rank(expert)[1] == part]
            shards.append(torch.stack(copies).sum(0) if add else copies[0])
            if not add:
                assert all(torch.equal(copy, copies[0]) for copy in copies), f"{param.megatron} differs between ranks"
        result |= unshard(param, shards)
    return result


def largest_difference(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], skip: tuple[str, ...]
) -> float:
    expected_names = {name for name in expected if name not in skip}
    assert actual.keys() == expected_names, sorted(actual.keys() ^ expected_names)
    return max(float((actual[name] - expected[name]).abs().max()) for name in expected_names)


def check(family: str, role: str, layout: dict[str, int], folder: str) -> dict[str, float]:
    from megarl.dry_run.plan_layouts import model_state_bytes
    from megarl.megatron.trainer_model import MegatronModel

    sections: dict[str, Any] = {"actor_optimizer": ADAM, "critic": {"optimizer": ADAM}}
    train: dict[str, Any] = (
        {"ddp": {"overlap_grad_reduce": True, "bucket_size": 10_000}} if "overlap" in OPTIONS else {}
    )
    megatron: dict[str, Any] = {}
    settings: dict[str, Any] = {}
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
        period = tiny.HF[family].get("index_topk_freq", 1)  # of layers that share indices, which parts cannot
        tiny.HF[family]["num_hidden_layers"] = layout["pp"] * layout["vpp"] * period
    elif layout.get("pp", 1) == 2 and family == "qwen3_vl_moe":
        megatron["num_layers_in_first_pipeline_stage"] = 3  # those with features of images
    elif layout.get("pp", 1) > 1 and tiny.HF[family]["num_hidden_layers"] == 3:
        # Three layers split unevenly, which gives a stage without experts.
        megatron["num_layers_in_first_pipeline_stage"] = 1
    loss_fn, has_pairs = LOSSES[role], role == "dpo"
    batch = tiny.pairs() if role == "reward_model" else tiny.policy_pairs() if has_pairs else tiny.batch()
    role = "actor" if has_pairs else role
    if "vision_config" in tiny.HF[family]:
        patch = tiny.HF[family]["vision_config"]["patch_size"]
        batch = images.add(batch, patch)
        settings |= {"path": images.processor_folder(patch), "freeze_vision_tower": False}
    if family_of(tiny.HF[family]).num_mtp_layers(tiny.HF[family]):
        train["mtp_loss_coef"] = 0.3
    trainer = reference.Trainer(family, role, train.get("mtp_loss_coef", 0.0), DPO if has_pairs else None)
    weights = {name: tensor.clone() for name, tensor in trainer.tensors().items()}
    if tiny.HF[family]["tie_word_embeddings"]:
        embedding = f"{family_of(tiny.HF[family]).embedding_name}.weight"
        weights.setdefault("lm_head.weight", weights[embedding])

    is_dynamic = "dynamic_cp" in layout

    rows = layout["world"] // (layout.get("tp", 1) * layout.get("pp", 1))  # ranks with different tokens
    budgets = 26, 1000
    if is_dynamic:  # of which sequences of `batch` need one, two and cp ranks
        budgets = {(2, 2): (16, 10), (4, 2): (14, 10), (4, 4): (10, 16)}[rows, layout["cp"]]

    def build(budget: int = budgets[0]) -> Any:
        overrides = {"train": {"max_tokens_per_gpu": budget, **train}, "model": {"megatron": megatron, **settings}}
        chosen = tiny.config(**layout, **sections, **overrides)
        layout_ranks = parallel_ranks.create_layout(chosen.parallel)
        model = MegatronModel(tiny.HF[family], chosen, layout_ranks, role, total_updates=3)  # type: ignore[arg-type]
        model.load_shards(lambda param, tp, rank: shard(param, weights, tp, rank))
        return model

    model = build()
    algorithm = "reward_model" if role == "reward_model" else "ppo"
    declared = load_requirements(replace(model.config, algorithm=algorithm))
    estimate = plan_memory(tiny.HF[family], model.config, declared, tiny.HF[family])
    states, name = estimate[model.ranks.pp_rank].states, role.replace("_", " ")
    sizes = model_state_bytes(model)
    sizes["weights"] = sum(tensor.nbytes for tensor in model.local_params().values())  # exact, without padding
    result = {f"planned {part}": abs(size / states[f"{name} {part}"] - 1) for part, size in sizes.items()}
    names = ("logprobs", "entropy") if role == "actor" else ()
    sharded = tiny.shard_batch(batch)
    actual = {name: tiny.gather_tokens(sharded, values) for name, values in model.forward(sharded, names=names).items()}
    whole = model.forward(batch, names=names)  # whose plan may differ, as no rank is the home of a sequence
    with torch.no_grad():
        if role == "actor":
            logprobs, entropy = reference.policy(trainer.model, batch)
            result["logprobs"] = float((actual["logprobs"] - logprobs).abs().max())
            result["entropy"] = float((actual["entropy"] - entropy).abs().max())
            cool, _ = reference.policy(trainer.model, batch, temperature=0.7)
            result["temperature"] = float((model.forward(batch, temperature=0.7)["logprobs"] - cool).abs().max())
        elif role == "critic":
            expected_outputs = reference.values(trainer.model, trainer.head, batch)  # type: ignore[arg-type]
            result["values"] = float((actual["values"] - expected_outputs).abs().max())
        else:
            expected_outputs = reference.scores(trainer.model, trainer.head, batch)  # type: ignore[arg-type]
            result["scores"] = float((actual["scores"] - expected_outputs).abs().max())
            frozen = MegatronModel(tiny.HF[family], model.config, model.ranks, "reward_model", trains=False)
            frozen.load_shards(lambda param, tp, rank: shard(param, weights, tp, rank))
            assert frozen.offload() > 0 and weight_and_state_bytes(frozen) == (0, 0)
            result["serving"] = float((frozen.forward(batch)["scores"] - whole["scores"]).abs().max())
            assert not any(tensor.requires_grad for chunk in frozen.chunks for tensor in chunk.parameters())
            margins = expected_outputs[batch.cu_seqlens[1:] - 1].view(-1, 2) @ torch.tensor([1.0, -1.0])

    before = tiny.snapshot(model)
    result["parked"] = float(offloads_and_reloads(model, batch, whole))
    with count_live_micro_batches(model) as excess:
        metrics = model.train_step(sharded, loss_fn)
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
    if has_pairs:
        accuracy, margin = trainer.preferences
        assert 0 < accuracy < 1 and metrics["rewards/accuracy"] == pytest.approx(accuracy)
        result["metric"] = abs(metrics["rewards/margin"] - margin)
    elif role == "actor":
        result["metric"] = abs(metrics["entropy"] - float((batch.loss_weights * entropy).sum()))
    if role == "reward_model":
        clamped_fraction = float((margins > 0).float().mean())
        assert 0 < clamped_fraction < 1 and metrics["reward_model/accuracy"] == clamped_fraction
        result["metric"] = abs(metrics["reward_model/margin"] - float(margins.mean()))
    tied = tiny.HF[family]["tie_word_embeddings"]
    skip = ("lm_head.weight",) if role != "actor" or tied else ()
    grads = trainer.tensors(grads=True)
    largest = max(float(grad.abs().max()) for name, grad in grads.items() if name not in skip)
    gathered = gather(model, shard_of_gradient(model), add=True)
    result["gradients"] = largest_difference(gathered, grads, skip) / largest
    after = gather(model, model.local_params(), add=False)
    result["step"] = largest_difference(after, trainer.tensors(), skip) / ADAM["lr"]

    # The step does not depend on the micro-batches: one per sequence, or all in one, or on more or fewer ranks.
    large_batches = build(budgets[1])
    if is_dynamic:
        widths = [part.dispatcher.plan(batch, forward_only=False).widths for part in (model, large_batches)]
        assert any(len(set(sizes)) > 1 for sizes in widths) and layout["cp"] in sum(widths, ())
    largest = max(model, large_batches, key=lambda part: part.dispatcher.token_budget)
    _, skipped = largest.dispatcher.list_work(batch, forward_only=False)
    is_shared = reason_against(tiny.HF[family], model.config, device.has_cuda()) is None
    assert (sum(skipped) > 0) == is_shared, (family, role, skipped)
    repeat = large_batches.train_step(batch, loss_fn)
    result["packing"] = abs(repeat[f"{role}/loss"] - metrics[f"{role}/loss"])
    gap = [
        float((a - b).abs().max())
        for a, b in zip(tiny.snapshot(model).values(), tiny.snapshot(large_batches).values(), strict=True)
    ]
    result["packing_step"] = max(gap) / ADAM["lr"]

    # Swapping weights and back, and a gradient that is not finite, change nothing.
    overrides, reference_weights = tiny.snapshot(model), model.host_copy()
    reference_weights.copy_from(map(tensor_bytes, before.values()))
    with model.swap_weights(reference_weights):
        reloaded = model.forward(batch)
    result["swapped"] = max(float((reloaded[name] - whole[name]).abs().max()) for name in reloaded)
    step = model.train_step(batch, lambda output, part: infinite_loss(loss_fn(output, part)))
    result["skipped"] = step[f"{role}/skipped"]
    reference_columns = torch.cat(reference_weights.pieces)
    result["unchanged"] = float(
        all(torch.equal(overrides[name], tensor) for name, tensor in tiny.snapshot(model).items())
        and torch.equal(
            torch.cat(list(map(tensor_bytes, before.values()))), reference_columns[: reference_weights.size]
        )
    )

    if family == "qwen3_moe" and role == "actor":
        result |= aux_losses(layout, weights)
    if role == "actor" and family in REPLAYED:
        uneven = {name: value for name, value in megatron.items() if not name.startswith("recompute")}
        actual = replay.check(
            family, layout, uneven, RANKS, lambda model: gather(model, shard_of_gradient(model), True)
        )
        result |= {f"replay {name}": value for name, value in actual.items()}
    if role == "actor" and family in sparse_indices.FAMILIES:
        uneven = {name: value for name, value in megatron.items() if not name.startswith("recompute")}
        actual = sparse_indices.check(
            family, layout, uneven, RANKS, lambda model: gather(model, shard_of_gradient(model), True)
        )
        result |= {f"indices {name}": value for name, value in actual.items()}
    if role == "actor" and family in sampling_masks.FAMILIES:
        without_recompute = {name: value for name, value in megatron.items() if not name.startswith("recompute")}
        actual = sampling_masks.check(
            family, layout, without_recompute, RANKS, lambda model: gather(model, shard_of_gradient(model), True)
        )
        result |= {f"cut {name}": value for name, value in actual.items()}
    if folder:
        result["resumed"] = float(resumes_bitwise(model, build, batch, loss_fn, folder))
    return result


def aux_losses(layout: dict[str, int], weights: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the logged metrics of a step with auxiliary losses; no sequence needs padding, which they would count."""
    from megarl.megatron.trainer_model import MegatronModel

    rows = 1 if "dynamic_cp" in layout else layout.get("cp", 1)
    budget = {"max_tokens_per_gpu": 26 // rows}  # the same micro-batches in every layout
    config = tiny.config(**layout, model={"megatron": tiny.AUX_LOSSES}, train=budget)
    model = MegatronModel(tiny.HF["qwen3_moe"], config, RANKS, "actor")
    model.load_shards(lambda param, tp, rank: shard(param, weights, tp, rank))
    metrics = model.train_step(tiny.batch((8, 20, 12)), lambda output, _: TokenLoss(-output.logprobs))
    return {f"aux {name}": metrics[f"actor/{name}"] for name in ("moe_load_balancing_loss", "moe_z_loss", "grad_norm")}


def vocab_parallel_difference(real: int, truncated: bool = False) -> float:
    """Return the largest difference of log-probs, entropies and gradients between a sharded and the whole vocabulary.

    With real=7, rank 1 has padding only. truncated: with candidate sets, some of which are on one rank only."""
    from megatron.core import parallel_state

    from megarl.megatron.logprobs import vocab_parallel_logprobs

    rows, width, generator = 9, 8, torch.Generator().manual_seed(3)
    hidden = torch.randn(rows, 5, generator=generator).requires_grad_()
    complete = torch.randn(2 * width, 5, generator=generator).requires_grad_()
    targets = torch.randint(0, real, (rows,), generator=generator)
    weight = torch.randn(2, rows, generator=generator)
    vocab_slice = slice(RANKS.tp_rank * width, (RANKS.tp_rank + 1) * width)
    local_hidden, part = (tensor.detach().clone().requires_grad_() for tensor in (hidden, complete[vocab_slice]))
    group = parallel_state.get_tensor_model_parallel_group()
    sets = torch.rand(rows, real, generator=generator) < torch.linspace(0, 1, rows)[:, None]
    sets.scatter_(1, targets[:, None], True)
    sets[3] = (torch.arange(real) < width) == bool(targets[3] < width)
    ids = [row.nonzero()[:, 0].tolist() if i != 5 else [] for i, row in enumerate(sets)]
    sets[5] = True
    support = SamplingMask.from_rows(ids) if truncated else None
    actual = vocab_parallel_logprobs(
        local_hidden, part, targets, real, group, 1.3, chunk_tokens=4, sampling_mask=support
    )
    logits = (hidden @ complete.T)[:, :real] / 1.3
    log_p = (logits.masked_fill(~sets, -torch.inf) if truncated else logits).log_softmax(-1)
    expected = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p.clamp(min=-1e9)).sum(-1)
    for pair in (actual, expected):
        (weight[0] * pair[0] + weight[1] * pair[1]).sum().backward()
    assert (
        local_hidden.grad is not None
        and part.grad is not None
        and hidden.grad is not None
        and complete.grad is not None
    )
    torch.distributed.all_reduce(local_hidden.grad, group=group)
    gaps = (
        actual[0] - expected[0],
        actual[1] - expected[1],
        part.grad - complete.grad[vocab_slice],
        local_hidden.grad - hidden.grad,
    )
    return max(float(gap.detach().abs().max()) for gap in gaps)


@contextmanager
def count_live_micro_batches(model: Any) -> Iterator[list[int]]:
    """Yield by how many the micro-batches with live tensors on this rank ever exceed those in flight."""
    from megarl.megatron import trainer_model as module

    parallel, make = model.config.parallel, module.make_micro_batch
    allowed = round(micro_batches_in_flight(parallel.pp, model.ranks.pp_rank, parallel.vpp) * parallel.vpp)
    live_refs: list[list[weakref.ref[torch.Tensor]]] = []
    excess = [-allowed]

    def watch(*args: Any, **kwargs: Any) -> Any:
        micro = make(*args, **kwargs)
        last_stage_inputs = micro.tokens, micro.batch.loss_weights  # only the last stage has loss weights
        live_refs.append([weakref.ref(tensor) for tensor in last_stage_inputs if tensor is not None])
        gc.collect()
        num_alive = sum(any(ref() is not None for ref in refs) for refs in live_refs)
        excess[0] = max(excess[0], num_alive - allowed)
        return micro

    module.make_micro_batch = watch
    try:
        yield excess
    finally:
        module.make_micro_batch = make
        assert len(live_refs) >= 2 * parallel.vpp
        excess[0] = max(0, excess[0])


def offloads_and_reloads(model: Any, batch: TrainBatch, actual: dict[str, torch.Tensor]) -> bool:
    """Offload optimizer and weights, reload, compare outputs, and leave the model offloaded."""
    weights, _ = weight_and_state_bytes(model)
    freed = [model.offload(weights=False)]
    is_weights_only = weight_and_state_bytes(model) == (weights, 0)
    freed.append(model.offload())
    is_offloaded = weight_and_state_bytes(model) == (0, 0)
    reloaded = model.forward(batch)
    is_weights_loaded = weight_and_state_bytes(model) == (weights, 0)
    freed.append(model.offload())
    is_equal = all(torch.equal(reloaded[name], actual[name]) for name in reloaded)
    return min(freed) > 0 and is_weights_only and is_offloaded and is_weights_loaded and is_equal


def weight_and_state_bytes(model: Any) -> tuple[int, int]:
    """Return the bytes of weights, and of optimizer states that are no weights, without step counts."""
    from megarl.megatron.optimizer import state_tensors

    params = [tensor for chunk in model.chunks for tensor in chunk.parameters()]
    param_storages = {tensor.untyped_storage() for tensor in params}
    states = [] if model.optimizer is None else [t for t in state_tensors(model.optimizer) if t.dim()]
    state_storages = {tensor.untyped_storage() for tensor in states} - param_storages
    return sum(storage.nbytes() for storage in param_storages), sum(storage.nbytes() for storage in state_storages)


def infinite_loss(result: TokenLoss) -> TokenLoss:
    return TokenLoss(result.loss * torch.inf)


def resumes_bitwise(model: Any, build: Any, batch: TrainBatch, loss_fn: Any, folder: str) -> bool:
    """Return whether a step after restoring is bitwise the step after saving."""
    from megarl.megatron.dist_checkpoint import restore_model

    tiny.save_model(model, Path(folder))
    first = model.train_step(batch, loss_fn)
    resumed = build()
    restore_model(resumed, Path(folder))
    second = resumed.train_step(batch, loss_fn)
    pairs = zip(tiny.snapshot(model).values(), tiny.snapshot(resumed).values(), strict=True)
    return first == second and all(torch.equal(a, b) for a, b in pairs)


def parse_layout(text: str) -> dict[str, int]:
    """Parse a layout into arguments of `tiny.config`."""
    pairs = (item.split("=") for item in text.split(",") if "=" in item)
    dynamic = {"dynamic_cp": 1} if "dynamic" in text.split(",") else {}
    return {"world": int(os.environ["WORLD_SIZE"])} | {name: int(size) for name, size in pairs} | dynamic


def with_transformer_engine_flags(set_flags: Any) -> Any:
    """Wrap `norm_counting.set_flags` to start from the flags that Transformer Engine's modules set.

    Those leave grouped experts without a flag, and mark linear layers as sharded that every rank has whole."""

    def set_flags_after_reset(tensors_by_name: dict[str, torch.Tensor], table: Any) -> Any:
        for name, tensor in tensors_by_name.items():
            if ".mlp.experts." in name:
                tensor.__dict__.pop("tensor_model_parallel", None)
            elif "_down_proj" in name:
                tensor.tensor_model_parallel = True  # type: ignore[attr-defined]
        changed = set_flags(tensors_by_name, table)
        wrong_flags = (".mlp.experts.", "_down_proj", "softmax_offset")  # Megatron never flags the last, the sinks
        assert all(name in changed for name in tensors_by_name if any(part in name for part in wrong_flags))
        return changed

    return set_flags_after_reset


if __name__ == "__main__":
    from megarl.models import norm_counting

    tiny.avoid_wide_micro_batches()
    norm_counting.set_flags = with_transformer_engine_flags(norm_counting.set_flags)
    layout, OPTIONS = parse_layout(sys.argv[1]), sys.argv[1].split(",")
    if "dsa" in OPTIONS:
        sparse_indices.use_megatron_module()
    RANKS = parallel_ranks.initialize(tiny.config(**layout).parallel, timeout_s=120)
    results = {}
    for item in sys.argv[2].split():
        family_role, _, layout_name = item.partition("@")
        family, role = family_role.split(":")
        folder = f"{sys.argv[3]}/{len(results)}" if len(sys.argv) > 3 else ""
        results[item] = check(family, role, parse_layout(layout_name) if layout_name else layout, folder)
    if RANKS.tp > 1:
        for item in results.values():
            item["vocabulary"] = max(
                vocab_parallel_difference(real, truncated) for real in (7, 13, 16) for truncated in (False, True)
            )
    print("RESULT " + json.dumps(results))
    parallel_ranks.shutdown()
