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

from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher  # noqa: E402

from megarl.rehearse import megatron_values  # noqa: E402
from megarl.rehearse.step_peak import rehearse_peak  # noqa: E402

# The steps were measured before the dispatcher forgot the router's probabilities (`core_patches.py`).
MoEAlltoAllTokenDispatcher.combine_postprocess = MoEAlltoAllTokenDispatcher.combine_postprocess.__wrapped__

fake_job.join(0, 1, 1)
megatron_values.balance_experts()


def rehearse(step: MeasuredStep) -> int:
    return rehearse_peak(step.hf, step.config, step.sequences, step.length)


def fused(step: MeasuredStep) -> MeasuredStep:
    megatron = step.config.model.megatron | {"bias_activation_fusion": True}
    model = dataclasses.replace(step.config.model, megatron=megatron)
    return dataclasses.replace(step, config=dataclasses.replace(step.config, model=model))


steps = read_steps()
print("RESULT", json.dumps([[rehearse(step), rehearse(fused(step))] for step in steps]))
