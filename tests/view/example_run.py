"""Run folders for viewer tests, written by the writers of a run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from megarl.config import Config
from megarl.observe.clock import Span, Timeline
from megarl.observe.rollout_log import evaluation_folder, part_file, write_part
from megarl.observe.rollout_table import StepGeneration
from megarl.observe.run_folder import claim_and_begin
from megarl.observe.tracker import Tracker
from megarl.types import Prompt, Rollout, Turn

EVIL = "</script><script>document.title='RAN'</script><img src=x onerror=\"document.title='RAN'\"><!--"
WORDS = {"<unk>": 0, "two": 1, "three": 2, "four": 3, EVIL: 4, "five": 5}
PROMPTS, SAMPLES = 2, 2


def make_rollout(step: int, number: int, reward: float, ids: tuple[int, ...] = (3, 4, 5), name: str = "p") -> Rollout:
    group = number // SAMPLES
    prompt = Prompt(
        f"{name}{group}", ({"role": "user", "content": EVIL},), (1, 2), ground_truth=EVIL, data_source="sums"
    )
    logprobs = tuple(-0.25 * (position + 1) for position in range(len(ids)))
    turns = (Turn(prompt.token_ids), Turn(ids, logprobs, True, step - 1, cached_tokens=1))
    response = ({"role": "assistant", "content": EVIL},)
    return Rollout(prompt, turns, "stop", reward, seed=number, group=group, messages=(*prompt.messages, *response))


def write_step(folder: Path, step: int, rollouts: list[Rollout], rank: int = 0, ranks: int = 1) -> None:
    numbers = range(rank, len(rollouts), ranks)
    advantages = [np.full(rollouts[number].num_tokens, 0.5, np.float32) for number in numbers]
    write_part(part_file(folder, step, rank), step, len(rollouts), numbers, [rollouts[i] for i in numbers], advantages)


def write_evaluation(folder: Path, step: int, rewards: tuple[float, float]) -> None:
    """Write the evaluation of a run after a step: a greedy and a sampled rollout, and their rewards."""
    rollouts = [make_rollout(step, number, reward, name="held") for number, reward in enumerate(rewards)]
    file = part_file(evaluation_folder(folder), step, 0)
    generation = StepGeneration((True, False), step)
    write_part(file, step, 2, [0, 1], rollouts, calls=[0, 1], generation=generation)


def write_run(folder: Path, steps: int = 3, last_response: tuple[int, ...] = (3, 4, 5), name: str = "p") -> Path:
    """Write a run folder. last_response: tokens of rollout 1 in the last step."""
    model = folder.parent / "model"
    if not model.is_dir():
        PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(WORDS, unk_token="<unk>"))).save_pretrained(model)
    defaults = Config()
    alarms = dataclasses.replace(defaults.guards, alarms=True)
    model_config = dataclasses.replace(defaults.model, path=str(model))
    config = dataclasses.replace(defaults, algorithm="grpo", guards=alarms, model=model_config)
    claim_and_begin(folder, config, resume=False).release()
    tracker, timeline = Tracker(folder, names=()), Timeline(folder, 0, print)
    for step in range(1, steps + 1):
        metrics = {"rollout/reward_mean": step / 4, "actor/entropy": 0.7, "time/generate": 2.0, "time/step": 3.0}
        tracker.log(step, metrics)
        rollouts = [make_rollout(step, number, float(number), name=name) for number in range(PROMPTS * SAMPLES)]
        if step == steps:
            rollouts[1] = make_rollout(step, 1, 1.0, last_response, name)
        for rank in range(2):
            write_step(folder, step, rollouts, rank, 2)
        start = 1000.0 + 3 * step
        spans = [Span(f"step {step}", "step", "main", start, start + 3)]
        timeline.write([*spans, Span(f"generation of step {step}", "rollout", "main", start, start + 2)])
    tracker.close()
    (folder / ".lock").unlink()  # this process still runs, but the run is over
    with (folder / "log.txt").open("a", encoding="utf-8") as log:
        log.write("2026-01-01 10:00:00  ALARM: step 2: actor/entropy is 0.7, above 0.4 to 0.6: lower it\n")
    return folder


def write_sft_run(folder: Path) -> Path:
    """Write the folder of a run that generates no rollouts."""
    claim_and_begin(folder, dataclasses.replace(Config(), algorithm="sft"), resume=False).release()
    tracker = Tracker(folder, names=())
    for step in range(1, 4):
        tracker.log(step, {"actor/nll": 3.0 / step, "time/actor_update": 1.0, "time/step": 2.0})
    tracker.close()
    (folder / ".lock").unlink()
    return folder
