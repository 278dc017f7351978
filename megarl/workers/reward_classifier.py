"""Rewards from any sequence classifier of transformers, on the ranks of the role, in addition to those of functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from megarl.data.packing import partition
from megarl.models.registry import load_hf_config
from megarl.parallel.placement import placement_of
from megarl.parallel.ranks import run_on_all
from megarl.parallel.role_settings import role_backends
from megarl.rewards.reward_settings import options_for_model
from megarl.rewards.sequence_classifier import Classifier, ClassifierOptions, ClassifierTokenizer, resolve_label
from megarl.types import Rollout, Rollouts
from megarl.types.reward_values import RewardResult, parse_model_score
from megarl.workers.context import Context
from megarl.workers.reward import RewardWorker


class ClassifierRewardWorker(RewardWorker):
    """The reward backend `transformers`: each rank of the role has a full copy of `reward.model`, and scores a share of
    all conversations with about equal tokens. Options are those of `rewards/sequence_classifier.py`."""

    model_part = "model"

    def __init__(self, context: Context, reward_fn: Callable[[Rollout], float] | None = None, **options: Any) -> None:
        super().__init__(context, reward_fn, **options)
        self.options = ClassifierOptions.read(options_for_model(options, role_backends(self.config, "reward")[1]))
        self.members = placement_of(self.config).ranks_of("reward")
        self._truncated_frac = 0.0

    def start(self) -> None:
        path = self.config.reward.model
        with self.clock.phase("load"):
            hf = load_hf_config(path)
            label = resolve_label(hf, self.options, path)
            self.reader = ClassifierTokenizer(path, hf, self.context.chat.tokenizer, self.options)
            self.classifier = None
            if self.job.rank in self.members:
                self.classifier = Classifier(path, label, self.options)
                self.context.models.add(self.classifier)
        super().start()

    def score_part(self, rollouts: Rollouts, part: str) -> Sequence[RewardResult]:
        if part != self.model_part:
            return super().score_part(rollouts, part)
        texts: list[torch.Tensor] = []
        is_truncated = []

        def tokenize() -> None:
            for rollout in rollouts.local:
                ids = torch.from_numpy(np.array(self.reader.tokenize(rollout), dtype=np.int32))
                texts.append(ids[-self.reader.limit :])
                is_truncated.append(len(ids) > self.reader.limit)

        run_on_all(tokenize)
        count = len(rollouts)
        local_lengths = torch.tensor([len(text) for text in texts], dtype=torch.int64)
        table = rollouts.comm.all_gather_rows(
            torch.stack([rollouts.local_indices, local_lengths, torch.tensor(is_truncated, dtype=torch.int64)], dim=1)
        )
        lengths = torch.zeros(count, dtype=torch.int64)
        lengths[table[:, 0]] = table[:, 1]
        self._truncated_frac = float(table[:, 2].sum()) / count
        scores = self._score_texts(texts, lengths, rollouts)
        return [parse_model_score(score) for score in scores[rollouts.local_indices].tolist()]

    def _score_texts(self, texts: Sequence[torch.Tensor], lengths: torch.Tensor, rollouts: Rollouts) -> torch.Tensor:
        """Return [N] float64 scores on all ranks. texts: token ids of the local rollouts. lengths: [N] their lengths,
        over all ranks."""
        owner = partition(lengths.double().numpy(), len(self.members))
        shares = {rank: np.flatnonzero(owner == index).tolist() for index, rank in enumerate(self.members)}
        assigned = [shares.get(rank, []) for rank in range(self.job.world)]
        column = torch.cat([torch.zeros(0, dtype=torch.int32), *texts])
        received = self._row_exchange.deliver(
            {"ids": column}, {"ids": (torch.int32, ())}, lengths, rollouts.home, assigned
        )
        local_rows = assigned[self.job.rank]
        local_scores = (
            [] if self.classifier is None else self.classifier.score(received.rows("ids"), self._token_budget)
        )
        indexed_scores = torch.tensor(list(zip(local_rows, local_scores, strict=True)), dtype=torch.float64).reshape(
            -1, 2
        )
        table = rollouts.comm.all_gather_rows(indexed_scores)
        scores = torch.full((len(rollouts),), math.nan, dtype=torch.float64)
        scores[table[:, 0].long()] = table[:, 1]
        return scores

    @property
    def _token_budget(self) -> int:
        return self.config.train.max_tokens_per_gpu

    def metrics(self) -> dict[str, float]:
        """Add the share of the step's conversations that lost their beginning to truncation."""
        own = {"reward/truncated_frac": self._truncated_frac} if self.options.on_overlong == "truncate" else {}
        return super().metrics() | own
