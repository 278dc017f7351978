"""Several adapters in one pass compared with each alone. Arguments: family@layout, separated by blanks."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)

import tiny  # noqa: E402
from ranks_layout import ADAM  # noqa: E402

from megarl.models.layout_algebra import shard  # noqa: E402
from megarl.parallel import ranks as parallel_ranks  # noqa: E402
from megarl.types import ModelOutput, TokenLoss, TrainBatch  # noqa: E402
from megarl.types.adam_settings import AdamSettings  # noqa: E402

NUM_ADAPTERS = 3
# With eps of the order of gradients, an update depends on their size, too. With this rate, the rounding of the sum of
# weight and update does not matter.
SETTINGS = AdamSettings(lr=1000.0, beta1=0.9, beta2=0.9, eps=1.0, weight_decay=0.0, max_grad_norm=0.0)


def loss(output: ModelOutput, batch: TrainBatch) -> TokenLoss:
    assert output.logprobs is not None and batch.advantages is not None
    return TokenLoss(-output.logprobs * batch.advantages)


def relative(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the largest difference over the largest expected value."""
    gap = max(float((a - b).abs().max()) for a, b in zip(actual, expected, strict=True))
    return gap / max(float(tensor.abs().max()) for tensor in expected)


def check(family: str, layout: dict[str, int]) -> dict[str, float]:
    from megarl.megatron.trainer_model import MegatronModel

    sections: dict[str, Any] = {"actor_optimizer": ADAM, "lora": {"rank": 3, "alpha": 6.0}}
    if layout.pop("recompute", 0):
        sections["model"] = {"megatron": {"recompute_granularity": "full", "recompute_method": "uniform"}}
        sections["model"]["megatron"]["recompute_num_layers"] = 1
    config = tiny.config(**layout, **sections)
    ranks = parallel_ranks.create_layout(config.parallel)
    model = MegatronModel(tiny.HF[family], config, ranks, "actor", total_updates=3)
    policy = tiny.hf_model(family).requires_grad_(False)
    weights = tiny.split_experts(dict(policy.named_parameters())) | dict(policy.named_buffers())
    model.load_shards(lambda param, parts, part: shard(param, weights, parts, part))
    assert not model.reason_against_slots()

    def draw(seed: int) -> list[torch.Tensor]:
        """Return this rank's factors of an adapter that is equal in every layout."""
        tensors = []
        table = {param.megatron: param for param in model.adapter_params()}
        for name in model.adapter_shards():
            param = table[name]
            generator = torch.Generator().manual_seed(hash_of(name) + seed)
            full = {item.name: torch.randn(item.shape, generator=generator) * 0.2 for item in param.hf}
            tensors.append(shard(param, full, *ranks.tp_size_and_rank(param.expert is not None)).contiguous())
        return tensors

    def update(adapter: list[torch.Tensor], tokens: int, write: Any) -> tuple[list[torch.Tensor], float]:
        """Return what an update adds to an adapter, and the norm of its gradient. write: writes the gradient."""
        model.reset_optimizer()
        for tensor, value in zip(model.adapter_shards().values(), adapter, strict=True):
            tensor.copy_(value)
        model.optimizer.reload_model_params()
        write()
        norm = model.update(tokens, SETTINGS)["actor/grad_norm"]
        return [new - old for new, old in zip(model.adapter_shards().values(), adapter, strict=True)], norm

    adapters = [draw(seed) for seed in range(NUM_ADAPTERS)]
    batch = tiny.batch().with_(prefixes=None)
    numbers = torch.arange(batch.num_sequences) % NUM_ADAPTERS
    batch = batch.with_(adapter=numbers.repeat_interleave(batch.lengths))
    alone: list[tuple[torch.Tensor, list[torch.Tensor], float]] = []
    for slot, adapter in enumerate(adapters):
        part = batch.select((numbers == slot).nonzero()[:, 0].tolist()).with_(adapter=None)
        outputs: list[torch.Tensor] = []
        change = update(
            adapter,
            len(part.tokens),
            lambda part=part, outputs=outputs: outputs.append(model.forward_backward(part, loss)[1]),
        )
        alone.append((outputs[0], *change))
    metrics, logprobs, slots = model.forward_backward_adapters(batch, loss, adapters)
    result = {"not_finite": metrics["not_finite"], "logprobs": 0.0, "updates": 0.0, "norms": 0.0, "effect": 1e9}
    for slot, (adapter, (expected, changes, norm)) in enumerate(zip(adapters, alone, strict=True)):
        part = batch.select((numbers == slot).nonzero()[:, 0].tolist())
        actual = logprobs[batch.adapter == slot]
        result["logprobs"] = max(result["logprobs"], relative([actual], [expected]))
        actual_changes, actual_norm = update(adapter, len(part.tokens), lambda slot=slot: slots.write_gradient(slot))
        result["updates"] = max(result["updates"], relative(actual_changes, changes))
        result["norms"] = max(result["norms"], abs(actual_norm / norm - 1))
        result["effect"] = min(result["effect"], norm)
    # The model's adapter computes as before.
    first = batch.select((numbers == 2).nonzero()[:, 0].tolist()).with_(adapter=None)
    change = []
    update(adapters[2], len(first.tokens), lambda: change.append(model.forward_backward(first, loss)[1]))
    result["afterwards"] = float((change[0] - alone[2][0]).abs().max())
    return result


def reasons() -> dict[str, str]:
    """Return why adapters cannot share a pass, by what stands against it."""
    from megarl.megatron.adapter_slots import reason_against_slots

    plain = dict(fp8=None, mtp_num_layers=None, num_moe_experts=4, moe_aux_loss_coeff=0.0, moe_z_loss_coeff=None)
    plain |= dict(moe_expert_capacity_factor=None, moe_token_dispatcher_type="alltoall")
    adapted = {"lora": {"rank": 3}}
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "nothing": (adapted, {}),
        "full fine-tuning": ({}, {}),
        "fsdp": (adapted | {"train": {"fsdp": True}}, {}),
        "overlap": (adapted | {"train": {"ddp": {"overlap_grad_reduce": True}}}, {}),
        "aux loss": (adapted, {"moe_aux_loss_coeff": 0.01}),
        "aux loss of a dense model": (adapted, {"moe_aux_loss_coeff": 0.01, "num_moe_experts": None}),
        "capacity": (adapted, {"moe_expert_capacity_factor": 1.0}),
        "flex": (adapted, {"moe_token_dispatcher_type": "flex"}),
        "mtp": (adapted, {"mtp_num_layers": 1}),
        "fp8": (adapted, {"fp8": "e4m3"}),
    }
    return {
        name: reason_against_slots(tiny.config(**sections), SimpleNamespace(**{**plain, **settings}))  # type: ignore[arg-type]
        for name, (sections, settings) in cases.items()
    }


def grouped_experts() -> float:
    """Return the largest difference of grouped experts, which need a GPU, from each adapter alone."""
    from megarl.megatron.lora import Adapter, LayerSlots

    generator, splits = torch.Generator().manual_seed(1), [3, 0, 5]
    x, slots = torch.randn(8, 6, generator=generator), torch.tensor([0, 1, 1, 1, 0, -1, 0, 1])
    weights: list[Any] = [SimpleNamespace(expert=expert, sharding=None) for expert in range(3)]

    def draw() -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(torch.randn(3, 6, generator=generator), torch.randn(4, 3, generator=generator)) for _ in weights]

    linear, drawn = torch.nn.Identity(), [draw(), draw()]
    each = [
        Adapter(linear, weights, [(torch.nn.Parameter(a), torch.nn.Parameter(b)) for a, b in pairs], 2.0, 1)
        for pairs in drawn
    ]
    expected = [adapter(x, splits) for adapter in each]
    pairs = list(zip(*drawn, strict=True))
    stacked_a = [torch.cat([a for a, _ in pair]) for pair in pairs]
    stacked_b = [torch.cat([b for _, b in pair], 1) for pair in pairs]
    each[0].slots = LayerSlots(stacked_a, stacked_b, lambda: slots)
    actual = each[0](x, splits)
    rows = [torch.zeros(4) if slot < 0 else expected[slot][index] for index, slot in enumerate(slots.tolist())]
    return float((actual - torch.stack(rows)).abs().max())


def hash_of(name: str) -> int:
    return sum(ord(letter) * (index + 1) for index, letter in enumerate(name)) * 16


if __name__ == "__main__":
    world = int(os.environ["WORLD_SIZE"])
    parallel_ranks.initialize(tiny.config(world=world).parallel, timeout_s=120)
    results: dict[str, Any] = {"reasons": reasons(), "grouped": grouped_experts()}
    for case in sys.argv[1].split():
        family, _, layout = case.partition("@")
        sizes = {name: int(size) for name, size in (pair.split("=") for pair in layout.split(","))}
        results[case] = check(family, {**sizes, "world": world})
    print("RESULT " + json.dumps(results))
    parallel_ranks.shutdown()
