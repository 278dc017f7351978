"""Models in training with a scalar head on the policy's trunk: the value function and the reward model.

`workers/reward_models.py` serves a trained reward model.
"""

from __future__ import annotations

from pathlib import Path

import torch

from megarl.checkpoint.export import gather_hf
from megarl.models.family import classifier_config, padding_of
from megarl.models.hf_folder import save_hf
from megarl.models.registry import family_of, load_hf_config
from megarl.parallel.placement import role_config
from megarl.parallel.ranks import run_on_all
from megarl.parallel.wait_listeners import track_progress
from megarl.types import ModelOutput, TrainBatch
from megarl.workers.futures import Future
from megarl.workers.model_worker import TrainingWorker


class CriticWorker(TrainingWorker):
    role = "critic"

    def start(self) -> None:
        path = self.config.critic.path or self.config.model.path
        self.build(load_hf_config(path), path, role_config(self.config, self.role))

    def forward(self, batch: TrainBatch) -> Future[ModelOutput]:
        """Return [T] values; values[t] is that of the state before token t."""
        with self.clock.phase(f"{self.name}_values", self.phase_owner):
            return self._forward(batch, "values")


class RewardModelWorker(TrainingWorker):
    """The trunk of `model.path`, a policy or a reward model; a policy's head is initialised to zero."""

    role = "reward_model"

    def start(self) -> None:
        self.build(self.context.hf_config, self.config.model.path, role_config(self.config, self.role))

    def forward(self, batch: TrainBatch) -> Future[ModelOutput]:
        """Return [T] scores; scores[t] is that of the conversation up to and including token t."""
        with self.clock.phase("reward_model_scores", self.phase_owner):
            return self._forward(batch, "scores", all_tokens=True)

    def export(self, folder: Path) -> None:
        """Write an HF folder of a sequence classifier with one label. All of the role's ranks call it, and the first
        one writes. Raises OSError on all of them if the disk fails."""
        with self.clock.phase("export"):
            run_on_all(lambda: self._export_model(folder), group=self.local_model.ranks.host_group)

    def _export_model(self, folder: Path) -> None:
        table, hf, chat_format = self.local_model.params(), self.context.hf_config, self.context.chat
        padding_id = padding_of(hf, chat_format.tokenizer.pad_token_id, chat_format.end_of_turn)
        with self.local_model.gathered_params():
            save_hf(
                folder,
                track_progress(
                    gather_hf(self.local_model.merged_params(), table, self.local_model.ranks),
                    sum(len(param.hf) for param in table),
                ),
                self.config.model.path,
                dtype=getattr(torch, self.config.model.dtype),
                write=self.local_model.ranks.role_rank == 0,
                table=table,
                config=classifier_config(hf, family_of(hf).architecture, padding_id),
            )
