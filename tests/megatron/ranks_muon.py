"""Muon on two ranks: two updates compared with transformers' gradients and a Muon written out, and all that keeps or
moves its states.

Arguments: `beside`, for a step beside a third rank without a model; or a folder for checkpoints, and the cases of
`CASES` to run, separated by semicolons. Prints for each what differs and what is equal.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[2] / "tools")]
torch.set_num_threads(1)

import reference  # noqa: E402
import tiny  # noqa: E402
from ranks_layout import (  # noqa: E402
    equal,
    gather,
    infinite_loss,
    policy_loss,
    states,
    train_beside_rank,
    value_loss,
    weight_and_state_bytes,
)

from megarl.controllers.controller import load_requirements  # noqa: E402
from megarl.models.layout_algebra import shard  # noqa: E402
from megarl.models.memory import plan_memory  # noqa: E402
from megarl.parallel import ranks as parallel_ranks  # noqa: E402

MUON: dict[str, Any] = dict(type="muon", lr=0.01, weight_decay=0.1, max_grad_norm=0.5, beta1=0.9, beta2=0.95, eps=1e-3)
MUON |= dict(schedule="constant", warmup_fraction=0.0)
SETTINGS: dict[str, Any] = dict(coefficient_type="simple", num_ns_steps=5, momentum=0.9, fp32_matmul_prec="highest")
BF16, LORA = {"model": {"dtype": "bfloat16"}}, {"lora": {"rank": 4}}
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "DP 2": ("qwen3_moe", "actor", {}, {"nesterov": True}),
    "TP 2": ("qwen3_moe", "actor", {"tp": 2}, {"extra_scale_factor": 0.2}),  # both ranks share the experts' gradients
    "TP 2, EP 2, distributed": ("qwen3_moe", "actor", {"tp": 2, "ep": 2}, {"tp_mode": "distributed"}),
    "PP 2": ("qwen3_moe", "actor", {"pp": 2}, {"scale_mode": "shape_scaling"}),
    "MLA, EP 2": ("deepseek_v3", "actor", {"ep": 2}, {"scale_mode": "unit_rms_norm"}),
    "critic, CP 2": ("qwen3_moe", "critic", {"cp": 2}, {}),
    "bf16, buckets": (
        "qwen3_moe",
        "actor",
        {"ep": 2, **BF16, "train": {"ddp": {"overlap_grad_reduce": True, "bucket_size": 10_000}}},
        {},
    ),
    "LoRA, TP 2, ETP 2": ("qwen3_moe", "actor", {"tp": 2, "etp": 2, **LORA}, {}),
}
"""Name -> family, role, layout and sections, settings of `muon`."""
UPDATES, WARM_UP = 9, {"DP 2": 4}
"""All updates of the schedule, and by case those in which the learning rate rises: by as much in each."""


def newton_schulz(matrix: torch.Tensor) -> torch.Tensor:
    """Return Keller Jordan's zeropower_via_newtonschulz5 of a matrix, in fp32.

    https://kellerjordan.github.io/posts/muon/"""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.square().sum().sqrt()
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


class Reference:
    """transformers' model with Muon for matrices and AdamW for other parameters."""

    def __init__(self, family: str, role: str, muon: dict[str, Any], warm_up: int) -> None:
        self.warm_up, self.lr = warm_up, MUON["lr"]
        self.trainer, self.muon = reference.Trainer(family, role), muon
        self.moments: dict[str, list[torch.Tensor]] = {}
        self.steps = 0

    def step(self, batch: Any) -> float:
        """Take a step and return the gradient's norm."""
        self.steps += 1
        self.lr = MUON["lr"] * min(1.0, self.steps / max(1, self.warm_up))
        trainer, is_critic = self.trainer, self.trainer.head is not None
        params = {n: p for n, p in trainer.model.named_parameters() if not (is_critic and n == "lm_head.weight")}
        params |= {reference.HEAD: trainer.head} if trainer.head is not None else {}
        for param in params.values():
            param.grad = None
        trainer.loss(batch).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(params.values(), MUON["max_grad_norm"]))
        with torch.no_grad():
            for name, param in params.items():
                if any(part in name for part in ("embed", "lm_head", reference.HEAD)) or param.ndim == 1:
                    self.update_by_adam(param, name)
                elif param.ndim == 3:  # experts, each with gate and up as one matrix, as in Megatron
                    for expert, weight in enumerate(param):
                        self.update_matrix([weight], param.grad[expert], f"{name} {expert}")
                elif "gate_proj" in name:
                    up = params[name.replace("gate_proj", "up_proj")]
                    self.update_matrix([param, up], torch.cat([param.grad, up.grad]), name)
                elif "up_proj" not in name:
                    self.update_matrix([param], param.grad, name)
        return norm

    def update_matrix(self, weights: list[torch.Tensor], grad: torch.Tensor, name: str) -> None:
        (momentum,) = self.moments.setdefault(name, [torch.zeros_like(grad)])
        beta = SETTINGS["momentum"]
        momentum.copy_(beta * momentum + (1 - beta) * grad)
        update = newton_schulz(beta * momentum + (1 - beta) * grad if self.muon.get("nesterov") else momentum)
        out, inner = grad.shape
        scale = {
            "spectral": max(out, inner) ** 0.5,
            "shape_scaling": max(1.0, out / inner) ** 0.5,
            "unit_rms_norm": (out / inner) ** 0.5,
        }[self.muon.get("scale_mode", "spectral")]
        update = update * scale * self.muon.get("extra_scale_factor", 1.0)
        for weight, part in zip(weights, update.split([len(weight) for weight in weights]), strict=True):
            weight.mul_(1 - self.lr * MUON["weight_decay"]).sub_(self.lr * part)

    def update_by_adam(self, weight: torch.Tensor, name: str) -> None:
        grad = weight.grad
        assert grad is not None
        mean, square = self.moments.setdefault(name, [torch.zeros_like(grad), torch.zeros_like(grad)])
        mean.lerp_(grad, 1 - MUON["beta1"])
        square.lerp_(grad.square(), 1 - MUON["beta2"])
        if weight.ndim > 1:
            weight.mul_(1 - self.lr * MUON["weight_decay"])
        root = (square / (1 - MUON["beta2"] ** self.steps)).sqrt() + MUON["eps"]
        weight.sub_(self.lr * mean / (1 - MUON["beta1"] ** self.steps) / root)


def gathered(model: Any) -> dict[str, torch.Tensor]:
    """Return the model's weights by name, or with LoRA those of its adapters. Ranks that have the same weight agree."""
    if model.config.lora.rank:
        adapters = {name: tensor.detach().clone() for name, tensor in model.local_adapters().items()}
        return gather(model, adapters, add=False, params=model.adapter_params())
    return gather(model, tiny.snapshot(model), add=False)


def check(name: str, folder: Path) -> dict[str, Any]:
    from megarl.dry_run.plan_layouts import model_state_bytes
    from megarl.megatron.dist_checkpoint import async_copy_bytes, restore_model
    from megarl.megatron.trainer_model import MegatronModel

    family, role, sections, settings = CASES[name]
    expected = Reference(family, role, settings, WARM_UP.get(name, 0))
    weights = {key: tensor.clone() for key, tensor in expected.trainer.tensors().items()}
    loss, batch = value_loss if role == "critic" else policy_loss, tiny.batch()
    warm_up = {"warmup_fraction": WARM_UP.get(name, 0) / UPDATES}
    optimizer = MUON | warm_up | {"muon": SETTINGS | settings}

    def build(**sections: Any) -> Any:
        config = tiny.config(world=2, **sections, actor_optimizer=optimizer, critic={"optimizer": optimizer})
        ranks = parallel_ranks.create_layout(config.parallel)
        model = MegatronModel(tiny.HF[family], config, ranks, role, total_updates=UPDATES)  # type: ignore[arg-type]
        model.load_shards(lambda param, parts, part: shard(param, weights, parts, part))
        return model

    model = build(**sections)
    declared = load_requirements(model.config)
    plan = plan_memory(tiny.HF[family], model.config, declared, tiny.HF[family])[model.ranks.pp_rank].states
    sizes = [model_state_bytes(model), *parallel_ranks.all_gather_objects(model_state_bytes(model))]
    stage = sizes[:1] if model.ranks.pp > 1 else sizes
    planned = {part: plan[f"{role} {part}"] for part in sizes[0]}
    has_adapters = "lora" in sections  # which `model_state_bytes` does not count as weights
    result: dict[str, Any] = {
        f"planned {part}": max(size[part] for size in stage) / planned[part] - 1
        for part in ([] if has_adapters else planned)
    }

    model.save_snapshot()
    start = gathered(model)
    metrics = [model.train_step(batch, loss)]
    if "model" not in sections and not has_adapters:
        skip = ("lm_head.weight",) if role == "critic" else ()
        for step in range(2):
            norm = expected.step(batch)
            metrics += [model.train_step(batch, loss)] if step else []
            result["norm"] = max(result.get("norm", 0.0), abs(metrics[step][f"{role}/grad_norm"] / norm - 1))
            after, wanted = gathered(model), expected.trainer.tensors()
            assert after.keys() == wanted.keys() - set(skip)
            gaps = {key: float((after[key] - wanted[key]).abs().max()) / MUON["lr"] for key in after}
            result[f"step {step + 1}"] = max(gaps.values())
            trained = [key for key in after if not key.endswith("e_score_correction_bias")]
            assert all(float((after[key] - weights[key]).abs().max()) > 1e-3 * MUON["lr"] for key in trained)
    else:
        metrics.append(model.train_step(batch, loss))
        changed = [not torch.equal(tensor, start[key]) for key, tensor in gathered(model).items() if "bias" not in key]
        result["trained"] = bool(changed) and all(changed)

    before = [tensor.clone() for tensor in states(model)]
    skipped = model.train_step(batch, lambda output, part: infinite_loss(loss(output, part)))
    result["skipped"] = skipped[f"{role}/skipped"] == 1.0 and all(map(torch.equal, before, states(model)))

    # Save, and resume in the same layout: the next step is the same, bit by bit.
    path = folder / name
    path.mkdir(parents=True, exist_ok=True)
    tiny.save_model(model, path)
    held = sum(tensor.nbytes for tensor in states(model) if tensor.numel() > 1 or tensor.dim() > 1)
    local = sum(tensor.nbytes for tensor in (*model.local_params().values(), *model.local_adapters().values()))
    result["saved bytes"] = abs(async_copy_bytes(model) - held - local) <= 64
    resumed = build(**sections)
    restore_model(resumed, path)
    result["restored"] = equal(model, resumed)
    # In another layout, where other ranks have the matrices.
    other = build(**{key: value for key, value in sections.items() if key not in ("tp", "ep", "pp", "cp", "etp")})
    restore_model(other, path)
    metrics = [each.train_step(batch, loss) for each in (model, resumed, other)]
    result["resumed"] = metrics[0] == metrics[1] and equal(model, resumed)
    gap = [float((a - b).abs().max()) for a, b in zip(*(gathered(m).values() for m in (model, other)), strict=True)]
    result["other layout"] = max(gap) / MUON["lr"]

    # All leaves the device and comes back.
    freed = model.offload()
    result["offloaded"] = freed > 0 and weight_and_state_bytes(model) == (0, 0)
    metrics = [each.train_step(batch, loss) for each in (model, resumed)]
    result["after offloading"] = metrics[0] == metrics[1] and equal(model, resumed)

    model.rollback()
    fresh = build(**sections)
    result["rolled back"] = equal(model, fresh)
    metrics = [each.train_step(batch, loss) for each in (model, fresh)]
    result["after rollback"] = metrics[0] == metrics[1] and equal(model, fresh)
    return result


if __name__ == "__main__" and sys.argv[1] == "beside":
    parallel_ranks.initialize(tiny.config(world=3).parallel, timeout_s=60)
    config = tiny.config(world=2, actor_optimizer=MUON)
    print("RESULT " + json.dumps(train_beside_rank(config, members=(0, 1))))
    parallel_ranks.shutdown()
elif __name__ == "__main__":
    parallel_ranks.initialize(tiny.config(world=2).parallel, timeout_s=120)
    names = sys.argv[2].split(";") if len(sys.argv) > 2 else list(CASES)
    print("RESULT " + json.dumps({name: check(name, Path(sys.argv[1])) for name in names}))
    parallel_ranks.shutdown()
