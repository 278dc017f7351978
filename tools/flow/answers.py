"""Answers of a scripted engine: token ids and log-probs from a random generator, deterministic for a group."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megarl.config import Config, from_dict
from megarl.models.routing import RoutingShape

PROMPT = 256
"""Maximum tokens of a prompt; a sequence shorter than four prompts has a prompt of a quarter of its length."""
TOOL = 32
"""Tokens of a tool's answer between two turns."""

SIZES = {"quarter": 0.25, "half": 0.5, "full": 1.0}
"""Shares of the sequences in a step, which show how cost grows with size."""
QUADRATIC = 1 / (6 * 4096)
"""Quadratic cost of attention: extra cost of a token per preceding token, in a model of width 4096."""


@dataclass(frozen=True)
class Shape:
    """Shape of a step's answers. lengths: `2048-8192` uniform, `32768` constant, `lognormal` around 3,600 up to
    32,768."""

    sequences: int
    samples: int = 8
    lengths: str = "2048-8192"
    turns: int = 1
    layers: int = 0
    topk: int = 0
    experts: int = 256


@dataclass(frozen=True)
class Answer:
    seed: int
    prompt: np.ndarray  # [tokens] int32, the same array in a group
    turns: list[tuple[np.ndarray, np.ndarray]]  # ids and log-probs; log-probs are empty for tool output
    routing: np.ndarray | None  # [tokens - 1, layers, topk] uint8 or int16


def groups(shape: Shape) -> int:
    return shape.sequences // shape.samples


def total_tokens(shape: Shape) -> int:
    return sum(int(lengths(shape, group).sum()) for group in range(groups(shape)))


def lengths(shape: Shape, group: int) -> np.ndarray:
    """Return [samples] lengths in tokens."""
    random = np.random.default_rng((1, group))
    if shape.lengths == "lognormal":
        return np.exp(random.normal(8.2, 0.8, shape.samples)).clip(256, 32768).astype(np.int64)
    match = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", shape.lengths)
    if match is None or int(match[1]) < 8 or int(match[2] or match[1]) < int(match[1]):
        raise ValueError(f"lengths are 2048-8192, 32768 or lognormal, of at least 8 tokens, not {shape.lengths!r}")
    return random.integers(int(match[1]), int(match[2] or match[1]) + 1, shape.samples)


def answers(shape: Shape, group: int) -> Iterator[Answer]:
    """Return a group's answers, in order."""
    random = np.random.default_rng((2, group))
    sizes = lengths(shape, group)
    prompt = random.integers(0, 150_000, min(PROMPT, int(sizes.min()) // 4), dtype=np.int32)
    for number, size in enumerate(sizes.tolist()):
        remaining, turns = size - len(prompt), []
        spoken = remaining - min(TOOL * (shape.turns - 1), remaining // 2)
        tools = remaining - spoken
        for turn in range(shape.turns):
            turn_length = spoken // shape.turns + (turn < spoken % shape.turns)
            turns.append(
                (
                    random.integers(0, 150_000, turn_length, dtype=np.int32),
                    -random.random(turn_length, dtype=np.float32),
                )
            )
            if turn + 1 < shape.turns:
                read = tools // (shape.turns - 1) + (turn < tools % (shape.turns - 1))
                turns.append((random.integers(0, 150_000, read, dtype=np.int32), np.zeros(0, np.float32)))
        routing = None
        if shape.layers:
            kind = np.uint8 if shape.experts <= 256 else np.int16
            routing = random.integers(0, shape.experts, (size - 1, shape.layers, shape.topk), dtype=kind)
        yield Answer(group * shape.samples + number, prompt, turns, routing)


def build_config(spec: Mapping[str, Any], folder: Path) -> Config:
    """Return the ranks' options as a configuration."""
    shape = Shape(**spec["shape"])
    samples, sequences = shape.samples, shape.sequences
    longest = max(int(lengths(shape, group).max()) for group in range(groups(shape)))
    return from_dict(
        {
            "algorithm": spec["controller"],
            "run": {"dir": str(folder / "run"), "num_update": spec["updates"], "num_rollout": 1000},
            "parallel": {
                "world_size": spec["ranks"],
                "ranks_per_node": spec["per_machine"],
                "tp": spec["tp"],
                "pp": spec["pp"],
            },
            "rollout": {"samples_per_prompt": samples, "max_context": longest, "tp": spec["engine_tp"]},
            "data": {"prompts_per_step": sequences // samples},
            "train": {"max_tokens_per_gpu": spec["token_budget"], "routing_replay": bool(spec["shape"]["layers"])},
            "track": {"progress": False, "trackers": []},
        }
    )


def routing_shape(shape: Shape) -> RoutingShape | None:
    """Return routing records of a model with experts in all layers."""
    every = tuple(range(shape.layers))
    return RoutingShape(shape.layers, every, shape.topk, shape.experts) if shape.layers else None
