"""Rehearsals of the steps of `measured_steps.py`; prints the bytes of each above the model's states at its peak, and
those of the same step with a fused SwiGLU."""

import dataclasses
import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "helpers"))

from measured_steps import MeasuredStep, read_steps  # noqa: E402

from megarl.rehearse import fake_job, play  # noqa: E402

play.prepare()

import torch  # noqa: E402
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher  # noqa: E402

from megarl.megatron.optimizer import create_states  # noqa: E402
from megarl.megatron.trainer_model import MegatronModel  # noqa: E402
from megarl.models.registry import family_of  # noqa: E402
from megarl.parallel import ranks  # noqa: E402
from megarl.rehearse import megatron_values  # noqa: E402
from megarl.rehearse.host_reads import HostReads  # noqa: E402
from megarl.types import ModelOutput, TokenLoss, TrainBatch  # noqa: E402

# The steps were measured before the dispatcher forgot the router's probabilities (`core_patches.py`).
MoEAlltoAllTokenDispatcher.combine_postprocess = MoEAlltoAllTokenDispatcher.combine_postprocess.__wrapped__

fake_job.join(0, 1, 1)
megatron_values.balance_experts()


def loss(output: ModelOutput, _: TrainBatch) -> TokenLoss:
    assert output.logprobs is not None
    return TokenLoss(-output.logprobs)


def rehearse_step(step: MeasuredStep) -> int:
    """Like `measure` in tools/gpu/activations.py."""
    tokens = step.sequences * step.length
    starts, mask = torch.arange(0, tokens + 1, step.length), torch.ones(tokens, dtype=torch.bool)
    mask[starts[:-1]] = False
    columns = torch.arange(step.sequences), torch.zeros(step.sequences), torch.zeros(tokens)
    batch = TrainBatch(torch.zeros(tokens, dtype=torch.int64), starts, mask, *columns)
    batch = batch.with_(loss_weights=mask / mask.sum())
    memory = HostReads(int(family_of(step.hf).megatron_config(step.hf).get("moe_router_topk") or 1))
    with memory:
        model = MegatronModel(step.hf, step.config, ranks.create_layout(step.config.parallel), "actor")
        create_states(model.optimizer)
        model.train_step(batch, loss)  # Transformer Engine allocates dummy gradients
        states = memory.live
        with memory.phase() as peak:
            model.train_step(batch, loss)
    assert memory.live == states
    return peak[0] - states


def fused(step: MeasuredStep) -> MeasuredStep:
    megatron = step.config.model.megatron | {"bias_activation_fusion": True}
    model = dataclasses.replace(step.config.model, megatron=megatron)
    return dataclasses.replace(step, config=dataclasses.replace(step.config, model=model))


steps = read_steps()
print("RESULT", json.dumps([[rehearse_step(step), rehearse_step(fused(step))] for step in steps]))
