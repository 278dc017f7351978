"""Forward passes and training steps of tiny models in several layouts, whose communication is recorded.

Real ranks (`ranks_recorded_steps.py`) and rehearsed ones (`rehearsed_steps.py`) take the same steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tiny

from megarl.types import ModelOutput, TokenLoss, TrainBatch

LENGTH, PER_MICRO_BATCH, MICRO_BATCHES = 16, 2, 4
OVERLAP = {"train": {"ddp": {"overlap_grad_reduce": True}}}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
STEPS: dict[int, dict[str, tuple[str, dict[str, int], dict[str, Any]]]] = {
    2: {
        "TP2": ("qwen3", dict(tp=2), {}),
        "TP2 of MLA": ("deepseek_v3", dict(tp=2), {}),
        "TP2, recomputed": ("qwen3", dict(tp=2), {"model": {"megatron": RECOMPUTE}}),
        "PP2, tied embeddings": ("qwen2", dict(pp=2), {}),
        "PP2, experts in the second stage": ("deepseek_v3", dict(pp=2), {}),
        "DP2": ("llama", {}, {}),
        "DP2, overlapped": ("llama", {}, OVERLAP),
        "EP2": ("qwen3_moe", dict(ep=2), {}),
        "TP2 EP2": ("qwen3_moe", dict(tp=2, ep=2), {}),
    },
    4: {
        "TP2 EP2 DP2": ("qwen3_moe", dict(tp=2, ep=2), {}),
        "PP2 EP2 of MLA": ("deepseek_v3", dict(pp=2, ep=2), {}),
        # An update gets at least two micro-batches for each stage, or stages would wait for each other.
        "PP4 VPP2": ("llama", dict(pp=4, vpp=2), {"sequences": PER_MICRO_BATCH * MICRO_BATCHES}),
    },
    8: {"TP2 PP2 EP2 DP2": ("qwen3_moe", dict(tp=2, pp=2, ep=2), {})},
}
"""Family, layout and other sections of the configuration, by name, by number of ranks."""


def take_steps(world: int, is_rehearsal: bool, read_events: Callable[[], list[dict[str, Any]]]) -> dict[str, Any]:
    """Take each step of `world` ranks, and return what this rank has recorded on devices in each.

    read_events: returns the record so far.
    """
    result = {}
    for name, (family, layout, sections) in STEPS[world].items():
        start = len(read_events())
        take_step(world, family, layout, sections, is_rehearsal)
        result[name] = device_events(read_events()[start:])
    return result


def device_events(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the operations of device groups, numbered from 0, and the waits for them."""
    posts = [event for event in events if event["do"] == "post" and not event["host"]]
    numbers = {event["op"]: number for number, event in enumerate(posts)}
    return [event | {"op": numbers[event["op"]]} for event in events if event["op"] in numbers]


def take_step(world: int, family: str, layout: dict[str, int], sections: dict[str, Any], is_rehearsal: bool) -> None:
    from megarl.megatron.trainer_model import MegatronModel
    from megarl.parallel import ranks

    defaults = dict(max_tokens_per_gpu=PER_MICRO_BATCH * LENGTH, logits_chunk_size=5, share_prefixes=False)
    train = defaults | sections.get("train", {})
    model_settings = {"dtype": "bfloat16"} | sections.get("model", {})
    config = tiny.config(world=world, **layout, model=model_settings, train=train)
    place = ranks.create_layout(config.parallel, 60)
    hf = tiny.HF[family] | {"num_hidden_layers": max(2, place.pp * place.vpp)}
    model = MegatronModel(hf, config, place, "actor", total_updates=9)
    if is_rehearsal:
        from megarl.rehearse import megatron_values, rehearsed_flow

        model.set_dispatcher(rehearsed_flow.with_all_ranks(model.dispatcher, place))
    default = PER_MICRO_BATCH * MICRO_BATCHES * place.dp
    batch = tiny.batch((LENGTH,) * sections.get("sequences", default))
    for trains in (False, True):
        plan = model.dispatcher.plan(batch, forward_only=not trains)
        if is_rehearsal:
            megatron_values.set_stage_shape((LENGTH * len(plan[0][0]) // place.tp, 1, hf["hidden_size"]))
        if trains:
            model.train_step(batch, policy_loss)
        else:
            model.forward(batch)


def policy_loss(output: ModelOutput, batch: TrainBatch) -> TokenLoss:
    assert output.logprobs is not None
    return TokenLoss(-output.logprobs * batch.advantages)
