"""Writes rollout logs of random responses, for tests that train on recorded rollouts without an engine."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from megarl.dry_run.model_folders import vocabulary_hash
from megarl.models.registry import load_hf_config
from megarl.models.routing import routing_shape
from megarl.observe.rollout_log import part_file, write_part
from megarl.types import Prompt, Rollout, SamplingMask, Turn

PROMPTS, SAMPLES, CHOICES = 4, 4, 10


def write(run_dir: Path, model: Path, steps: int, ranks: int = 1) -> None:
    """Write rollouts with routing and sampling masks to the log of a run folder."""
    shape, vocabulary = routing_shape(load_hf_config(model), {}), vocabulary_hash(str(model))
    draw = np.random.default_rng(0)
    for step in range(1, steps + 1):
        rollouts = []
        for number in range(PROMPTS * SAMPLES):
            prompt = Prompt(str(number // SAMPLES), ({"role": "user", "content": "1+1?"},), draw.integers(0, 200, 12))
            count = int(draw.integers(5, 30))
            ids = draw.integers(0, 200, count)
            logprobs = -draw.random(count).astype(np.float32)
            mask_size = (11 + count) * len(shape.moe_layers)
            routing = np.stack([draw.permutation(shape.num_experts)[: shape.topk] for _ in range(mask_size)])
            other_ids = 300 + np.tile(np.arange(CHOICES - 1), (count, 1))
            rollouts.append(
                Rollout(
                    prompt,
                    (Turn(prompt.token_ids), Turn(ids, logprobs, True, step - 1)),
                    seed=number,
                    group=number // SAMPLES,
                    messages=(*prompt.messages, {"role": "assistant", "content": str(int(ids.sum()))}),
                    routing=torch.from_numpy(routing.astype(np.uint8)).view(-1, len(shape.moe_layers), shape.topk),
                    sampling_mask=SamplingMask.from_rows(np.concatenate([ids[:, None], other_ids], 1).tolist()),
                )
            )
        for rank in range(ranks):
            numbers = range(rank, len(rollouts), ranks)
            local = [rollouts[number] for number in numbers]
            write_part(part_file(run_dir, step, rank), step, len(rollouts), numbers, local, None, vocabulary)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
