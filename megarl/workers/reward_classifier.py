"""Rewards by any sequence classifier of transformers, on the ranks of the role, beside those by functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from megarl.data.partition import partition
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
    """The backend `transformers` of the role: `reward.model` whole on each of its ranks, of which each scores a share
    of all conversations, about equally many tokens. Options are those of `rewards/sequence_classifier.py`."""

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

    def score_part(self, whole: Rollouts, part: str) -> Sequence[RewardResult]:
        if part != self.model_part:
            return super().score_part(whole, part)
        texts: list[torch.Tensor] = []
        cut = []

        def read() -> None:
            for rollout in whole.local:
                ids = torch.from_numpy(np.array(self.reader.tokenize(rollout), dtype=np.int32))
                texts.append(ids[-self.reader.limit :])
                cut.append(len(ids) > self.reader.limit)

        run_on_all(read)
        count = len(whole)
        mine = torch.tensor([len(text) for text in texts], dtype=torch.int64)
        table = whole.comm.all_gather_rows(
            torch.stack([whole.local_indices, mine, torch.tensor(cut, dtype=torch.int64)], dim=1)
        )
        lengths = torch.zeros(count, dtype=torch.int64)
        lengths[table[:, 0]] = table[:, 1]
        self._truncated_frac = float(table[:, 2].sum()) / count
        scores = self._score_texts(texts, lengths, whole)
        return [parse_model_score(score) for score in scores[whole.local_indices].tolist()]

    def _score_texts(self, texts: Sequence[torch.Tensor], lengths: torch.Tensor, whole: Rollouts) -> torch.Tensor:
        """[N] float64, on all ranks. texts: of the rollouts that are here. lengths: [N] tokens of all texts."""
        owner = partition(lengths.double().numpy(), len(self.members))
        shares = {rank: np.flatnonzero(owner == place).tolist() for place, rank in enumerate(self.members)}
        wants = [shares.get(rank, []) for rank in range(self.job.world)]
        column = torch.cat([torch.zeros(0, dtype=torch.int32), *texts])
        arrived = self._row_exchange.deliver({"ids": column}, {"ids": (torch.int32, ())}, lengths, whole.home, wants)
        mine = wants[self.job.rank]
        found = [] if self.classifier is None else self.classifier.score(arrived.rows("ids"), self._token_budget)
        marked = torch.tensor(list(zip(mine, found, strict=True)), dtype=torch.float64).reshape(-1, 2)
        table = whole.comm.all_gather_rows(marked)
        scores = torch.full((len(whole),), math.nan, dtype=torch.float64)
        scores[table[:, 0].long()] = table[:, 1]
        return scores

    @property
    def _token_budget(self) -> int:
        return self.config.train.token_budget

    def metrics(self) -> dict[str, float]:
        """Of the step's conversations, the share that lost its beginning."""
        return super().metrics() | ({"reward/cut_frac": self._truncated_frac} if self.options.longer == "cut" else {})
