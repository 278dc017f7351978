"""Megatron-FSDP: steps compared with DistributedDataParallel, and all that keeps or moves weights and states.

Arguments: `beside`, for a step on ranks 1 and 2 of three; or a folder for checkpoints, and the cases of `CASES` to run,
separated by semicolons. Prints for each what differs and what is equal.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[2] / "tools")]
torch.set_num_threads(1)

import tiny  # noqa: E402
from ranks_layout import (  # noqa: E402
    ADAM,
    infinite_loss,
    policy_loss,
    train_beside_rank,
    value_loss,
    weight_and_state_bytes,
)

from megarl.controllers.controller import load_requirements  # noqa: E402
from megarl.models.layout_algebra import shard  # noqa: E402
from megarl.models.memory import plan_memory  # noqa: E402
from megarl.parallel import ranks as parallel_ranks  # noqa: E402

BF16 = {"model": {"dtype": "bfloat16"}}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LORA = {"lora": {"rank": 4}}
SHORT = {"train": {"max_tokens_per_gpu": 16}}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "tied": ("qwen2", "actor", {}),
    "untied": ("llama", "actor", {}),
    "MoE, EP 2": ("qwen3_moe", "actor", {"ep": 2}),
    "bf16": ("llama", "actor", BF16),  # without experts, which a rounding may change
    "MoE, CP 2, recompute": ("qwen3_moe", "actor", {"cp": 2, "model": {"megatron": RECOMPUTE}}),
    "MoE, CP 2, dynamic": ("qwen3_moe", "actor", {"cp": 2, "dynamic_cp": 1} | SHORT),
    "MLA, EP 2": ("deepseek_v3", "actor", {"ep": 2}),
    "critic": ("qwen3_moe", "critic", {}),
    "PP 2": ("qwen3_moe", "actor", {"pp": 2}),
    "LoRA, tied, PP 2": ("qwen2", "actor", LORA | {"pp": 2}),
    "LoRA, MoE, EP 2": ("qwen3_moe", "actor", LORA | {"ep": 2}),
    "LoRA, bf16": ("llama", "actor", LORA | BF16),
    "LoRA, critic, CP 2, dynamic, recompute": (
        "qwen3_moe",
        "critic",
        LORA | SHORT | {"cp": 2, "dynamic_cp": 1, "model": {"megatron": RECOMPUTE}},
    ),
    "LoRA, critic, CP 2, recompute": ("qwen3_moe", "critic", LORA | {"cp": 2, "model": {"megatron": RECOMPUTE}}),
    "LoRA, TP 2, DP 2, EP 2": ("qwen3_moe", "actor", LORA | {"tp": 2, "ep": 2}),
    "vision": ("qwen2_5_vl", "actor", {"train": {"ddp": {"suggested_communication_unit_size": 1}}}),  # no prefetching
    "MTP": ("deepseek_v3_mtp", "actor", {"train": {"mtp_loss_coef": 0.3}}),
    "TP 2": ("qwen3_moe", "actor", {"tp": 2}),
    "TP 2, DP 2, EP 2": ("qwen3_moe", "actor", {"tp": 2, "ep": 2}),  # of four ranks
    "PP 2, DP 2": ("qwen3_moe", "actor", {"pp": 2}),
}
"""Name -> family, role, layout and sections."""
WITH_IDLE_RANK = "untied", "PP 2, DP 2", "vision", "LoRA, MoE, EP 2"
"""Cases with a step in which some data parallel ranks have no sequence, and so no image."""


GATHERS_COUNTED = "untied", "LoRA, MoE, EP 2"
"""Cases with a step of one micro-batch in which gathers of layers are counted."""


@contextmanager
def counted_gathers(chunk: Any) -> Iterator[Counter[int]]:
    """Count how often each bucket of parameters is gathered within the block."""
    pipeline, gathers = chunk.module.all_gather_pipeline, Counter[int]()
    gather = pipeline.async_bucket_gather

    def count(bucket_id: int, bwd: bool) -> None:
        status = pipeline.bucket_status[pipeline.get_bucket_key(bucket_id, bwd)]
        gathers[bucket_id] += status.name in ("EMPTY", "PRESERVED")
        gather(bucket_id, bwd)

    pipeline.async_bucket_gather = count
    yield gathers
    pipeline.async_bucket_gather = gather


def add_image(batch: Any, models: tuple[Any, ...]) -> Any:
    """Return a batch with an image, which one rank gets, for models of a family with a vision tower."""
    import images

    patch = models[0].hf_config["vision_config"]["patch_size"]
    for model in models:
        model.__dict__["image_processor"] = images.ImageProcessor.load(images.processor_folder(patch))
    return images.add(batch, patch, {0: [(1, (3, 2))]})


def stored(model: Any) -> list[torch.Tensor]:
    """Return what this rank stores of adapters, which come first, and of weights."""
    return [*model.adapter_shards().values(), *model.local_shards().values()]


def states(model: Any) -> list[torch.Tensor]:
    """Return copies of this rank's weights, masters, moments and step counts."""
    from megarl.megatron.optimizer import iter_step_holders, state_tensors

    counts = [torch.tensor(float(holder["step"])) for holder in iter_step_holders(model.optimizer)]
    return [tensor.clone() for tensor in (*stored(model), *state_tensors(model.optimizer), *counts)]


def equal(first: Any, second: Any) -> bool:
    """Return whether two models with the same layout have the same bits."""
    pairs = list(zip(states(first), states(second), strict=True))
    return all(torch.equal(a, b) for a, b in pairs)


def whole(model: Any) -> dict[str, torch.Tensor]:
    """Return copies of this rank's weights, whole."""
    with model.gathered_params():
        local = model.local_params() | model.local_adapters()
        return {name: tensor.detach().clone() for name, tensor in local.items()}


def gap(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of weights, in learning rates."""
    assert first.keys() == second.keys() and first
    return max(float((first[name].float() - second[name].float()).abs().max()) for name in first) / ADAM["lr"]


def check(name: str, folder: Path) -> dict[str, Any]:
    from megarl.checkpoint.export import gather_hf
    from megarl.dry_run.plan_layouts import model_state_bytes
    from megarl.megatron.dist_checkpoint import async_copy_bytes, restore_model
    from megarl.megatron.lora import named_adapters
    from megarl.megatron.optimizer import state_tensors
    from megarl.megatron.trainer_model import MegatronModel

    family, role, sections = CASES[name]
    weights = tiny.hf_tensors(tiny.hf_model(family))
    if role == "critic":
        weights["score.weight"] = torch.randn(
            1, tiny.HF[family]["hidden_size"], generator=torch.Generator().manual_seed(3)
        )
    loss, batch = value_loss if role == "critic" else policy_loss, tiny.batch()

    def build(fsdp: bool) -> Any:
        train = {"max_tokens_per_gpu": 30} | sections.get("train", {}) | {"fsdp": fsdp}  # several micro-batches
        if not fsdp:
            train["ddp"] = {}
        optimizers = {"actor_optimizer": ADAM, "critic": {"optimizer": ADAM}}
        config = tiny.config(world=torch.distributed.get_world_size(), **{**sections, "train": train}, **optimizers)
        ranks = parallel_ranks.create_layout(config.parallel)
        model = MegatronModel(tiny.HF[family], config, ranks, role, total_updates=9)  # type: ignore[arg-type]
        model.load_shards(lambda param, parts, part: shard(param, weights, parts, part))
        if "dynamic" in name:
            assert len(set(model.dispatcher.plan(batch, forward_only=False).widths)) > 1
        return model

    plain, model = build(False), build(True)
    sizes = parallel_ranks.all_gather_objects(model_state_bytes(model))
    if model.ranks.pp == 1:
        declared = load_requirements(model.config)
        plan = plan_memory(tiny.HF[family], model.config, declared, tiny.HF[family])[0].states
    else:
        plan = {}
    output = "values" if role == "critic" else "logprobs"
    result: dict[str, Any] = {"loaded": gap(whole(plain), whole(model)) == 0}
    for part in sizes[0] if plan else ():
        result[f"planned {part}"] = max(size[part] for size in sizes) / plan[f"{role} {part}"] - 1
    model.save_snapshot()
    outputs = [each.forward(batch)[output] for each in (plain, model)]
    result["outputs"] = float((outputs[0] - outputs[1]).abs().max())
    for step in (1, 2, 3):
        metrics = [each.train_step(batch, loss) for each in (plain, model)]
        for key, value in metrics[0].items():
            result[f"{key} {step}"] = abs(metrics[1][key] / value - 1) if value else abs(metrics[1][key])
        result[f"weights {step}"] = gap(whole(plain), whole(model))
    if name in GATHERS_COUNTED:
        one_each = tiny.batch((5, 5))
        plain.train_step(one_each, loss)
        with counted_gathers(model.chunks[0]) as gathers:
            model.train_step(one_each, loss)
        groups = model.chunks[0].param_and_grad_buffer.param_to_param_group
        for param in named_adapters(model.chunks).values():  # a layer fetches ahead, and may come to adapters
            gathers.pop(groups[param], None)
        result["gathered for the forward and the backward pass alone"] = max(gathers.values()) == 2

    hf = [dict(gather_hf_of(each, gather_hf)) for each in (plain, model)]
    result["exported"] = gap(hf[0], hf[1])

    if name in WITH_IDLE_RANK:
        few = tiny.batch((26,))
        if family == "qwen2_5_vl":
            few = add_image(few, (plain, model))
        metrics = [each.train_step(few, loss) for each in (plain, model)]
        for key, value in metrics[0].items():
            result[f"{key} with an idle rank"] = abs(metrics[1][key] / value - 1) if value else abs(metrics[1][key])

    before = states(model)
    skipped = model.train_step(batch, lambda output, part: infinite_loss(loss(output, part)))
    result["skipped"] = skipped[f"{role}/skipped"] == 1.0 and all(map(torch.equal, before, states(model)))

    # Save, and resume in FSDP: the next step is the same, bit by bit. Without FSDP, checkpoints are the same.
    paths = [folder / name / kind for kind in ("plain", "fsdp")]
    for each, path in zip((plain, model), paths, strict=True):
        path.mkdir(parents=True, exist_ok=True)
        tiny.save_model(each, path)
    held = sum(tensor.nbytes for tensor in (*stored(model), *state_tensors(model.optimizer)) if tensor.dim())
    result["saved bytes"] = async_copy_bytes(model) == held
    resumed, crossed, back = build(True), build(True), build(False)
    restore_model(resumed, paths[1])
    restore_model(crossed, paths[0])
    restore_model(back, paths[1])
    result["restored"] = equal(model, resumed)
    result["from DDP"] = gap(whole(plain), whole(crossed)) == 0
    result["to DDP"] = gap(whole(model), whole(back)) == 0
    metrics = [each.train_step(batch, loss) for each in (model, resumed, plain, crossed, back)]
    result["resumed"] = metrics[0] == metrics[1] and equal(model, resumed)
    result["step from DDP"] = gap(whole(plain), whole(crossed))
    result["step to DDP"] = gap(whole(model), whole(back))

    # A reference's weights are swapped in and out of an actor.
    copy = model.host_copy()
    after = states(model)
    model.train_step(batch, loss)
    updated = states(model)
    if role == "actor":
        with model.swap_weights(copy):
            weights_now = stored(model)
            result["swapped"] = all(map(torch.equal, after[: len(weights_now)], weights_now))
            swapped = model.forward(batch)[output]
        result["swapped outputs"] = torch.equal(swapped, resumed.forward(batch)[output])
        result["swapped back"] = all(map(torch.equal, updated, states(model)))
    resumed.train_step(batch, loss)

    # All leaves the device and comes back.
    current = whole(model)
    freed = model.offload()
    result["offloaded"] = freed > 0 and weight_and_state_bytes(model) == (0, 0)
    result["gathered after offloading"] = gap(current, whole(model)) == 0
    metrics = [each.train_step(batch, loss) for each in (model, resumed)]
    result["after offloading"] = metrics[0] == metrics[1] and equal(model, resumed)

    model.rollback()
    fresh = build(True)
    result["rolled back"] = equal(model, fresh)
    metrics = [each.train_step(batch, loss) for each in (model, fresh)]
    result["after rollback"] = metrics[0] == metrics[1] and equal(model, fresh)
    return result


def gather_hf_of(model: Any, gather_hf: Any) -> Any:
    with model.gathered_params():
        yield from gather_hf(model.merged_params(), model.params(), model.ranks)


if __name__ == "__main__" and sys.argv[1] == "beside":
    parallel_ranks.initialize(tiny.config(world=3).parallel, timeout_s=60)
    config = tiny.config(world=2, ep=2, train={"fsdp": True}, actor_optimizer=ADAM)
    print("RESULT " + json.dumps(train_beside_rank(config, members=(1, 2))))
    parallel_ranks.shutdown()
elif __name__ == "__main__":
    parallel_ranks.initialize(tiny.config(world=int(os.environ["WORLD_SIZE"])).parallel, timeout_s=120)
    tiny.avoid_wide_micro_batches()
    names = sys.argv[2].split(";") if len(sys.argv) > 2 else list(CASES)
    print("RESULT " + json.dumps({name: check(name, Path(sys.argv[1])) for name in names}))
    parallel_ranks.shutdown()
