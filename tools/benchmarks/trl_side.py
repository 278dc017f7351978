"""What both sides of `bench.py trl` share, and TRL's side; TRL's environment needs nothing of MegaRL to import it."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

WORKS = {"quickstart": (16, 40), "shared": (4, 40)}
"""Workloads: prompts per step, each with 8 answers, and tokens per answer."""
SAMPLES = 8
KL = 0.04
LR = 1e-7
"""So small that policies stay random: one that learned would end its answers earlier, and do less work."""
PROMPT_TOKENS = 300
"""Tokens of a prompt of `shared`; a prompt of the quickstart has about 22."""


def variety(text: str) -> float:
    """Return a reward that differs between answers: the share of distinct characters in a text."""
    return len(set(text)) / max(1, len(text))


def rollout_variety(rollout: Any) -> float:
    return variety(rollout.answer)


def wait_for_turn() -> None:
    if not sys.stdin.readline():
        os._exit(0)  # the bench is over


def report_metrics(figures: dict[str, float]) -> None:
    print("STEP " + json.dumps(figures), flush=True)


def run_trl(folder: Path, work: str, micro_batch: int) -> None:
    """Run TRL's side: GRPO with the model and prompts in a folder. micro_batch: answers; 0 for all at once."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    prompts, tokens = WORKS[work]
    rows = [{"prompt": json.loads(line)["text"]} for line in (folder / "trl.jsonl").read_text().splitlines()]
    seconds: dict[str, float] = {}
    count = {"tokens": 0.0}

    def timed(name: str) -> Any:
        work = getattr(GRPOTrainer, name)

        def call(*arguments: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = work(*arguments, **kwargs)
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start
            return result

        setattr(GRPOTrainer, name, call)

    for name in ("_generate", "_generate_and_score_completions"):
        timed(name)

    class TimedRun(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            wait_for_turn()
            seconds.clear()
            self.start = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            step = time.perf_counter() - self.start
            generate = seconds["_generate"]
            scored = seconds["_generate_and_score_completions"]
            phases = {"generate": generate, "reference_logprobs": scored - generate, "actor_update": step - scored}
            report_metrics(phases | {"step": step} | count)

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        count["tokens"] = sum(map(len, completion_ids)) / len(completion_ids)
        return [variety(text) for text in completions]

    settings = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=micro_batch or prompts * SAMPLES,
        gradient_accumulation_steps=prompts * SAMPLES // (micro_batch or prompts * SAMPLES),
        num_generations=SAMPLES,
        max_completion_length=tokens,
        generation_kwargs={"min_new_tokens": tokens},
        max_steps=1_000_000,
        beta=KL,
        learning_rate=LR,
        max_grad_norm=1.0,
        weight_decay=0.0,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_steps=1_000_000,
        disable_tqdm=True,
        seed=1,
        model_init_kwargs={"dtype": "float32"},
    )
    GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder / "model", padding_side="left"),
        callbacks=[TimedRun()],
    ).train()
