"""How values moved before rollouts stayed on the ranks that made them, for `bench_flow.py --against` fb96440 and
similar revisions. To be dropped with the option."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flow.answers import Answer
from megarl.megatron import trainer_model as megatron_model
from megarl.parallel import ranks
from megarl.types import Prompt, Rollout, Turn  # of the other revision, with tuples in their fields


class BaselineAdapter:
    """Every rank has every rollout, pickled, as tuples of numbers; every model's outputs go to all ranks."""

    @staticmethod
    def rank(place: Any) -> int:
        return int(place.rank)

    @staticmethod
    def log_context(place: Any) -> Any:
        return place

    @staticmethod
    def num_outputs(role: str) -> int:
        return len(megatron_model.OUTPUT_NAMES[role])

    @staticmethod
    def prepare(model: Any) -> None:
        return None

    @staticmethod
    def unpack_batch(model: Any, batch: Any, arguments: Any, forward_only: bool) -> tuple[Any, Any, tuple[int, ...]]:
        def take(make: Callable[..., Any], indices: Sequence[int], *rest: Any) -> Any:
            return make(batch, indices, *rest)

        return model._plan(batch, forward_only)[model.ranks.dp_rank], take, model.layers

    @staticmethod
    def rollouts(group: int, group_answers: Sequence[Answer]) -> list[Rollout]:
        rollouts, prompt_ids = [], tuple(group_answers[0].prompt.tolist())
        prompt = Prompt(str(group), (), prompt_ids)  # type: ignore[arg-type]
        for answer in group_answers:
            turns = [Turn(prompt.token_ids)]
            for ids, logprobs in answer.turns:
                turn: Any = tuple(ids.tolist()), tuple(logprobs.tolist()), bool(len(logprobs))
                turns.append(Turn(*turn))
            routing = None
            if answer.routing is not None:
                last = np.full((1, *answer.routing.shape[1:]), -1, np.int16)
                routing = torch.from_numpy(np.concatenate([answer.routing.astype(np.int16), last]))
            rollouts.append(Rollout(prompt, tuple(turns), seed=answer.seed, group=group, routing=routing))
        return rollouts

    @staticmethod
    def gather_rollouts(local_rollouts: Sequence[Rollout]) -> list[Rollout]:
        return [rollout for share in ranks.all_gather_objects(local_rollouts) for rollout in share]

    @staticmethod
    def machines(size: int) -> None:
        return None

    @staticmethod
    def timed(parts: Any) -> None:
        return None

    @staticmethod
    def posted() -> int:
        return 0

    @staticmethod
    def is_written_by(file: Path, rank: int) -> bool:
        """Return whether this rank wrote the file: rank 0 writes all."""
        return rank == 0 and file.suffix == ".jsonl" and file.parent.name == "rollouts"
