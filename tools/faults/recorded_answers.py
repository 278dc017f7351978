"""Rollouts that no engine generates: texts written by the tool, recorded as a run records them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from megarl.observe.rollout_log import part_file, write_part
from megarl.types import Prompt, Rollout, Turn

Answer = Callable[[int, int, int], str]
"""(step, group, sample) -> text; see `wordy`."""


def wordy(step: int, group: int, sample: int) -> str:
    draw = random.Random(f"{step} {group} {sample}")
    return " ".join(str(draw.randint(0, 99)) for _ in range(draw.randint(4, 12)))


def record(
    run_dir: Path, model: Path, steps: Sequence[int], groups: int, samples: int, answer: Answer = wordy, ranks: int = 1
) -> Path:
    """Write a run folder with the rollouts of these steps, for `rollout.replay`, with a part of them on each of
    `ranks`. The log-probs are those of a uniform policy. Returns the folder."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    even = -float(np.log(len(tokenizer)))
    for step in steps:
        by_rank: list[list[tuple[int, Rollout]]] = [[] for _ in range(ranks)]
        for group in range(groups):
            question = {"role": "user", "content": f"Say numbers, {group} of step {step}."}
            prompt_text = tokenizer.apply_chat_template([question], add_generation_prompt=True, tokenize=False)
            ids = np.array(tokenizer(prompt_text, add_special_tokens=False)["input_ids"], np.int32)
            prompt = Prompt(f"{step}-{group}", (question,), ids)
            for sample in range(samples):
                text = answer(step, group, sample)
                answer_ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
                turns = (Turn(ids), Turn(answer_ids, np.full(len(answer_ids), even, np.float32), True, step - 1))
                messages = (question, {"role": "assistant", "content": text})
                number = group * samples + sample
                rollout = Rollout(prompt, turns, seed=number, group=group, messages=messages)
                by_rank[number * ranks // (groups * samples)].append((number, rollout))
        for rank, rank_rollouts in enumerate(by_rank):
            numbers, rollouts = zip(*rank_rollouts, strict=True)
            write_part(part_file(run_dir, step, rank), step, groups * samples, numbers, rollouts)
    return run_dir


def even(rollout: Rollout) -> float:
    """Return a reward that half of the samples get."""
    return float(sum(int(turn.token_ids.sum()) for turn in rollout.turns if turn.is_action) % 2 == 0)
