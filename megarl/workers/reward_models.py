"""Rewards from a model in addition to functions: on Megatron, or any sequence classifier of transformers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from megarl.config import LoraConfig
from megarl.data.packing import partition
from megarl.models.registry import load_hf_config
from megarl.parallel.placement import placement_of, role_backends, role_config
from megarl.parallel.ranks import run_on_all
from megarl.rewards.reward_settings import options_without
from megarl.rewards.sequence_classifier import Classifier, ClassifierOptions, ClassifierTokenizer, resolve_label
from megarl.types import Rollout, Rollouts, TrainBatch
from megarl.types.reward_values import RewardResult, parse_model_score
from megarl.workers.context import Context
from megarl.workers.model_worker import ModelWorker
from megarl.workers.reward import RewardWorker


class MegatronRewardWorker(RewardWorker, ModelWorker):
    """The reward backend `megatron`, for a model that `algorithm: reward_model` has exported: scores each conversation
    with `reward.model`, if set, at the last of the token ids that the engine saw.

    The model's layout is the policy's, or `roles.reward.parallel`.
    """

    role = "reward_model"
    placement_key = "reward"

    def __init__(self, context: Context, reward_fn: Callable[[Rollout], float] | None = None, **options: Any) -> None:
        self.model_part = "model" if context.config.reward.model else ""
        super().__init__(context, reward_fn, **options)

    def start(self) -> None:
        """Load the model in fp32, independent of the policy's dtype, without an optimizer."""
        if path := self.config.reward.model:
            config = role_config(self.config, self.placement_key)
            settings = dataclasses.replace(config.model, dtype="float32")
            config = dataclasses.replace(config, model=settings, lora=LoraConfig())
            self.build(load_hf_config(path), path, config, trains=False)
        RewardWorker.start(self)

    def wait_ready(self) -> None:
        if self.config.reward.model:
            ModelWorker.wait_ready(self)
        RewardWorker.wait_ready(self)

    def score_part(self, rollouts: Rollouts, part: str) -> Sequence[RewardResult]:
        if part != self.model_part:
            return super().score_part(rollouts, part)
        batch = TrainBatch.from_rollouts(rollouts).with_(routing=None, sparse_indices=None)
        token_scores = self._forward(batch, "scores", all_tokens=None).wait().scores
        assert token_scores is not None
        scores = token_scores[batch.cu_seqlens[1:] - 1].tolist()
        return [parse_model_score(value) for value in scores]


class ClassifierRewardWorker(RewardWorker):
    """The reward backend `transformers`: each rank of the role has a full copy of `reward.model`, and scores a share of
    all conversations with about equal tokens. Options are those of `rewards/sequence_classifier.py`."""

    model_part = "model"

    def __init__(self, context: Context, reward_fn: Callable[[Rollout], float] | None = None, **options: Any) -> None:
        super().__init__(context, reward_fn, **options)
        self.options = ClassifierOptions.read(options_without(options, role_backends(self.config, "reward")[1]))
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
            []
            if self.classifier is None
            else self.classifier.score(received.rows("ids"), self.config.train.max_tokens_per_gpu)
        )
        indexed_scores = torch.tensor(list(zip(local_rows, local_scores, strict=True)), dtype=torch.float64).reshape(
            -1, 2
        )
        table = rollouts.comm.all_gather_rows(indexed_scores)
        scores = torch.full((len(rollouts),), math.nan, dtype=torch.float64)
        scores[table[:, 0].long()] = table[:, 1]
        return scores

    def metrics(self) -> dict[str, float]:
        """Add the share of the step's conversations that lost their beginning to truncation."""
        truncation = {"reward/truncated_frac": self._truncated_frac} if self.options.on_overlong == "truncate" else {}
        return super().metrics() | truncation
