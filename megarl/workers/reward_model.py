"""The reward model in training: scores, updates, export. Trained, it serves in `workers/reward.py`."""

from __future__ import annotations

from pathlib import Path

import torch

from megarl.checkpoint.gather import gather_hf
from megarl.checkpoint.hf import save_hf
from megarl.models.classifier import classifier_config
from megarl.models.registry import family_of
from megarl.parallel.placement import role_config
from megarl.parallel.ranks import together
from megarl.types import ModelOutput, TrainBatch
from megarl.workers.training import TrainingWorker


class RewardModelWorker(TrainingWorker):
    """The trunk of `model.path`, a policy or a reward model; of a policy, the head starts at zero."""

    role = "reward_model"

    def start(self) -> None:
        self.build(self.context.hf_config, self.config.model.path, role_config(self.config, self.role))

    def forward(self, batch: TrainBatch) -> ModelOutput:
        """scores[t] is of the conversation up to and including token t."""
        with self.clock.phase("reward_model_scores", self.at_work):
            return self._forward(batch, "scores", every=True)

    def export(self, folder: Path) -> None:
        """Write an HF folder of a sequence classifier with one label; the role's first rank writes, all of its ranks
        take part. Raises OSError on all of them where the disk does not take it."""
        with self.clock.phase("export"):
            together(lambda: self._export_model(folder), group=self.trained.ranks.host)

    def _export_model(self, folder: Path) -> None:
        table, hf = self.trained.params(), self.context.hf_config
        save_hf(
            folder,
            gather_hf(self.trained.merged(), table, self.trained.ranks),
            self.config.model.path,
            dtype=getattr(torch, self.config.model.dtype),
            write=self.trained.ranks.role_rank == 0,
            table=table,
            config=classifier_config(hf, family_of(hf).architecture, self._padding()),
        )

    def _padding(self) -> int | None:
        """A token to pad batches with that no conversation ends with; None where the tokenizer and config.json have
        none, and HF's class then takes one conversation at a time."""
        tokenizer, hf = self.context.chat.tokenizer, self.context.hf_config
        known = (tokenizer.pad_token_id, hf.get("pad_token_id"))
        return next((token for token in known if token not in (None, self.context.chat.end_of_turn)), None)
