"""Two data parallel ranks with optimizer states on the host, compared bit by bit with the same training on the device.

Argument: a folder for checkpoints. Prints for each case of `CASES` what is equal.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)

import tiny  # noqa: E402
from ranks_layout import equal, policy_loss, states, value_loss  # noqa: E402

from megarl.models.layout_algebra import shard  # noqa: E402
from megarl.parallel import ranks as parallel_ranks  # noqa: E402
from megarl.rehearse.peak_memory import PeakMemory  # noqa: E402

ADAM: dict[str, Any] = dict(lr=0.01, weight_decay=0.1, max_grad_norm=0.5, schedule="constant", warmup_fraction=0.0)
BF16, LORA = {"model": {"dtype": "bfloat16"}}, {"lora": {"rank": 4}}
CASES: dict[str, tuple[str, str, dict[str, Any], float]] = {
    "fp32": ("qwen3_moe", "actor", {}, 1.0),
    "fp32, a half": ("qwen3_moe", "actor", {"ep": 2}, 0.5),
    "bf16": ("deepseek_v3", "actor", BF16, 1.0),
    "bf16, EP 2": ("qwen3_moe", "actor", {"ep": 2, **BF16}, 1.0),
    "bf16, a third": ("qwen3_moe", "actor", BF16, 0.3),
    "critic": ("qwen3_moe", "critic", BF16, 1.0),
    "LoRA": ("qwen3_moe", "actor", {**BF16, **LORA}, 1.0),
}
"""Name -> family, role, layout and sections, share on the host."""


def restore_in_place(model: Any, folder: Path) -> bool:
    """Restore a checkpoint. Return whether less memory than that of the weights was needed beside weights and states.

    What is needed is a stored tensor at a time, and a copy of weights that are stored in parts.
    """
    from megarl.megatron.dist_checkpoint import restore_model
    from megarl.megatron.optimizer import state_tensors

    weights = [param for chunk in model.chunks for param in chunk.parameters()]
    memory = PeakMemory("cpu", block=1)
    memory.track([*weights, *state_tensors(model.optimizer)])
    before = memory.live
    with memory:
        restore_model(model, folder)
    return 0 < memory.peak - before < sum(weight.nbytes for weight in weights)


def check(name: str, folder: Path) -> dict[str, Any]:
    from megarl.megatron import optimizer
    from megarl.megatron.dist_checkpoint import async_copy_bytes
    from megarl.megatron.trainer_model import MegatronModel

    family, role, sections, share = CASES[name]
    weights = tiny.hf_tensors(tiny.hf_model(family)) | {"score.weight": torch.linspace(-0.2, 0.2, 32)[None]}
    loss = value_loss if role == "critic" else policy_loss
    batch = tiny.batch()

    def build(fraction: float) -> Any:
        adam = ADAM | {"offload_fraction": fraction}
        config = tiny.config(world=2, **sections, actor_optimizer=adam, critic={"optimizer": adam})
        ranks = parallel_ranks.create_layout(config.parallel)
        model = MegatronModel(tiny.HF[family], config, ranks, role, total_updates=9)  # type: ignore[arg-type]
        model.load_shards(lambda param, parts, part: shard(param, weights, parts, part))
        return model

    def train(model: Any, steps: int) -> list[dict[str, float]]:
        return [model.train_step(batch, loss) for _ in range(steps)]

    on_device, on_host = build(0.0), build(share)
    result: dict[str, Any] = {"loaded": equal(on_device, on_host)}
    on_host.save_snapshot()
    result["metrics"] = train(on_device, 3) == train(on_host, 3)
    result["trained"] = equal(on_device, on_host)
    result["moved"] = not equal(on_device, build(0.0))

    # The host of a GPU uses torch's fused AdamW, which rounds otherwise than the plain one of a CPU.
    fused = build(share)
    for _, part in optimizer._dist_optimizers(fused.optimizer):
        for group in part.optimizer.param_groups:
            assert group["fused"] is False
            group["fused"] = True
    train(fused, 3)
    masters = zip(list(states(on_device))[::4], list(states(fused))[::4], strict=True)
    result["fused"] = max(float((one - other).abs().max()) for one, other in masters) / ADAM["lr"]

    # Saved here and resumed there, and the other way round.
    device_folder, host_folder = folder / name / "device", folder / name / "host"
    for model, path in ((on_device, device_folder), (on_host, host_folder)):
        path.mkdir(parents=True, exist_ok=True)
        tiny.save_model(model, path)
    resumed = build(share), build(0.0), build(1.0 - share / 2)
    for model, path in zip(resumed, (device_folder, host_folder, host_folder), strict=True):
        result["restored in place"] = restore_in_place(model, path) and result.get("restored in place", True)
    result["restored"] = [equal(on_device, model) for model in resumed]
    for model in (on_device, *resumed):
        train(model, 2)
    result["resumed"] = [equal(on_device, model) for model in resumed]

    # What is on the device leaves it, and all comes back.
    local = [tensor.untyped_storage() for tensor in optimizer.device_state_tensors(on_host.optimizer) if tensor.dim()]
    own = {tensor.untyped_storage() for chunk in on_host.chunks for tensor in chunk.parameters()}
    before = sum(storage.nbytes() for storage in {*local} - own)
    on_host.offload(weights=False)
    result["offloaded"] = (before > 0) == (share < 1) and not any(storage.nbytes() for storage in {*local} - own)
    train(on_host, 2)
    result["after offloading"] = equal(on_device, on_host)

    all_states = [tensor for tensor in optimizer.state_tensors(on_host.optimizer) if tensor.dim()]
    held = sum(tensor.numel() for tensor in all_states)
    # Whole parameters go to the host, so that the share is at least what was asked for.
    result["share"] = 1 - sum(tensor.numel() for tensor in optimizer.device_state_tensors(on_host.optimizer)) / held
    weight_bytes = sum(t.nbytes for t in (*on_host.local_params().values(), *on_host.local_adapters().values()))
    result["saved bytes"] = async_copy_bytes(on_host) == 4 * held + weight_bytes
    on_host.rollback()
    result["rolled back"] = equal(on_host, build(0.0))
    train(on_host, 1)
    fresh = build(0.0)
    train(fresh, 1)
    result["after rollback"] = equal(on_host, fresh)
    return result


if __name__ == "__main__":
    parallel_ranks.initialize(tiny.config(world=2).parallel, timeout_s=120)
    print("RESULT " + json.dumps({name: check(name, Path(sys.argv[1])) for name in CASES}))
    parallel_ranks.shutdown()
