"""What a model's last stage emits for a micro-batch, read as numbers per token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state

from megarl.megatron.context import gather_context
from megarl.megatron.logprobs import vocab_parallel_logprobs
from megarl.megatron.micro_batch import MicroBatch
from megarl.types import ModelOutput, Support


@dataclass(frozen=True)
class Reader:
    """model: the GPTModel of the last stage. role: of the model. vocab_size: without padding. at_once: tokens whose
    logits exist at the same time. cap: above 0, the soft cap of the logits."""

    model: Any
    role: str
    vocab_size: int
    at_once: int
    cap: float

    def read(
        self, micro: MicroBatch, emitted: torch.Tensor, temperature: float, with_entropy: bool = True
    ) -> ModelOutput:
        """[1, P / cp, hidden] states or [1, P / cp, 1] values, as emitted -> [T], shifted but for scores.

        Every context parallel rank has all of a micro-batch's numbers and computes the same loss of them.
        """
        if self.role == "reward_model":
            return ModelOutput(scores=micro.unshifted(_gathered(micro, emitted[0, :, 0].float())))
        if self.role == "critic":
            return ModelOutput(values=micro.align(_gathered(micro, emitted[0, :, 0].float())))
        weight = self._output_weight()
        states = emitted[0, :, : weight.shape[1]]
        found = self._logprobs(states, weight, micro.ahead[0], temperature, with_entropy, micro.support)
        logprobs, entropy = (None if x is None else micro.align(_gathered(micro, x)) for x in found)
        return ModelOutput(logprobs=logprobs, entropy=entropy)

    def mtp_loss(self, micro: MicroBatch, emitted: torch.Tensor) -> torch.Tensor:
        """Of states [1, P / cp, (1 + layers) hidden]: the mean over MTP layers of the cross-entropy of what each
        predicts, weighted as the batch weights these tokens; a number, without a gradient for the output layer."""
        weight = self._output_weight().detach()
        assert micro.batch.loss_weights is not None
        losses = []
        for number, states in enumerate(emitted[0].split(weight.shape[1], dim=1)[1:], 1):
            logprobs, _ = self._logprobs(states, weight, micro.ahead[number], 1.0, False)
            losses.append(-(micro.batch.loss_weights * micro.align(_gathered(micro, logprobs), number + 1)).sum())
        return torch.stack(losses).mean()

    def _output_weight(self) -> torch.Tensor:
        tied = self.model.share_embeddings_and_output_weights
        weight: torch.Tensor = (
            self.model.shared_embedding_or_output_weight() if tied else self.model.output_layer.weight
        )
        return weight

    def _logprobs(
        self,
        states: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        with_entropy: bool,
        support: Support | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        group = parallel_state.get_tensor_model_parallel_group()
        settings = self.vocab_size, group, temperature, self.at_once, self.cap
        return vocab_parallel_logprobs(states, weight, targets, *settings, with_entropy, support)


def _gathered(micro: MicroBatch, local: torch.Tensor) -> torch.Tensor:
    return gather_context(local, micro.places, parallel_state.get_context_parallel_group(), same_gradient=True)
