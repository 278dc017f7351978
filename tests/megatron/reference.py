"""The reference to compare with: transformers' models, one sequence at a time, and torch's optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import images
import tiny
import torch

from megarl.types import SamplingMask, TrainBatch

HEAD = "score.weight"


def sequences(batch: TrainBatch) -> Iterator[tuple[int, int]]:
    yield from zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True)


def policy(model: Any, batch: TrainBatch, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-prob and entropy of each token, [T]; 0 for the first of a sequence.

    A sampling mask excludes the logits of all other ids."""
    logprobs, entropies = [], []
    patch = 0 if batch.images is None else model.config.vision_config.patch_size
    for number, (start, stop) in enumerate(sequences(batch)):
        tokens = batch.tokens[start:stop]
        logits = model(tokens[None], **images.hf_inputs(batch, number, tokens, patch)).logits[0, :-1] / temperature
        if batch.sampling_mask is not None:
            logits = logits.masked_fill(~candidate_mask(batch.sampling_mask[number], logits.shape[1])[1:], -torch.inf)
        log_p = logits.log_softmax(-1)
        zero = torch.zeros(1)
        logprobs.append(torch.cat([zero, log_p.gather(1, tokens[1:, None])[:, 0]]))
        entropies.append(torch.cat([zero, -(log_p.exp() * log_p.clamp(min=-1e9)).sum(-1)]))
    return torch.cat(logprobs), torch.cat(entropies)


def candidate_mask(mask: SamplingMask, vocabulary: int) -> torch.Tensor:
    """Return the candidate ids of each token as a bool tensor [n, vocabulary]."""
    rows = (mask.counts == 0)[:, None].repeat(1, vocabulary)
    rows[torch.repeat_interleave(torch.arange(len(mask)), mask.counts), mask.ids.long()] = True
    return rows


def values(model: Any, value_head: torch.Tensor, batch: TrainBatch) -> torch.Tensor:
    """Return values [T]; 0 for the first of a sequence."""
    result = []
    for start, stop in sequences(batch):
        hidden = model.model(batch.tokens[None, start:stop]).last_hidden_state[0, :-1]
        result.append(torch.cat([torch.zeros(1), (hidden @ value_head.T)[:, 0]]))
    return torch.cat(result)


def scores(model: Any, value_head: torch.Tensor, batch: TrainBatch) -> torch.Tensor:
    """Return the head's output at every token, [T]: the logits of transformers' ...ForSequenceClassification."""
    hidden = [model.model(batch.tokens[None, start:stop]).last_hidden_state[0] for start, stop in sequences(batch)]
    return (torch.cat(hidden) @ value_head.T)[:, 0]


def value_head(hidden: int) -> torch.Tensor:
    return torch.randn(1, hidden, generator=torch.Generator().manual_seed(9)) * 0.3


class Trainer:
    """One AdamW step of the HF model; weights and gradients by HF name, experts one by one."""

    def __init__(self, family: str, role: str, mtp_weight: float = 0.0, dpo: Any = None) -> None:
        """dpo: beta, label smoothing and NLL weight of a loss on pairs."""
        self.mtp_weight = mtp_weight
        self.dpo = dpo
        self.model = tiny.hf_model(family)
        self.role = role
        self.head = value_head(self.model.config.hidden_size).requires_grad_() if role != "actor" else None

    def loss(self, batch: TrainBatch) -> torch.Tensor:
        """Return the loss of `ranks_layout.py`, written out."""
        assert batch.loss_weights is not None and batch.advantages is not None and batch.returns is not None
        if self.role == "reward_model":
            at_end = scores(self.model, self.head, batch)[batch.cu_seqlens[1:] - 1]  # type: ignore[arg-type]
            return -torch.nn.functional.logsigmoid(at_end[0::2] - at_end[1::2]).mean()
        if self.head is not None:
            return (batch.loss_weights * (values(self.model, self.head, batch) - batch.returns) ** 2).sum()
        logprobs, entropy = policy(self.model, batch)
        if self.dpo is not None:
            local = self.dpo_loss(batch, logprobs)
            return local + self.mtp_weight * self.mtp_loss(batch) if self.mtp_weight else local
        local = (batch.loss_weights * (-logprobs * batch.advantages - 0.1 * entropy)).sum()
        return local + self.mtp_weight * self.mtp_loss(batch) if self.mtp_weight else local

    def dpo_loss(self, batch: TrainBatch, logprobs: torch.Tensor) -> torch.Tensor:
        """Return conservative DPO plus the chosen answers' NLL, a mean over pairs, written out one pair at a time."""
        assert batch.ref_logprobs is not None
        losses, margins = [], []
        answers = [(a + torch.nonzero(batch.loss_mask[a:b])[:, 0]) for a, b in sequences(batch)]
        for chosen, rejected in zip(answers[0::2], answers[1::2], strict=True):
            gains = [(logprobs[ids] - batch.ref_logprobs[ids]).sum() for ids in (chosen, rejected)]
            margin = self.dpo.beta * (gains[0] - gains[1])
            wrong, probability = self.dpo.label_smoothing, margin.sigmoid()
            loss = -(1 - wrong) * probability.log() - wrong * (1 - probability).log()
            losses.append(loss - self.dpo.sft_coef * logprobs[chosen].mean())
            margins.append(float(margin.detach()))
        self.preferences = sum(m > 0 for m in margins) / len(margins), sum(margins) / len(margins)
        return torch.stack(losses).mean()

    def mtp_loss(self, batch: TrainBatch) -> torch.Tensor:
        import mtp

        assert batch.loss_weights is not None
        parts = [mtp.loss(self.model, batch.tokens[a:b], batch.loss_weights[a:b]) for a, b in sequences(batch)]
        return torch.stack(parts).sum()

    def step(self, batch: TrainBatch, lr: float, max_norm: float, **adam: Any) -> tuple[float, float]:
        """Returns the loss and the gradient's norm before clipping."""
        named = {n: p for n, p in self.model.named_parameters() if self.head is None or n != "lm_head.weight"}
        if self.head is not None:
            named[HEAD] = self.head
        params = list(named.values())
        loss = self.loss(batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(params, max_norm)
        decay = adam.pop("weight_decay")
        is_decayed = {n: p.ndim > 1 and not n.endswith("_bias") for n, p in named.items()}  # ..._bias: of all experts
        groups = [
            {"params": [p for n, p in named.items() if is_decayed[n]], "weight_decay": decay},
            {"params": [p for n, p in named.items() if not is_decayed[n]], "weight_decay": 0.0},
        ]
        torch.optim.AdamW(groups, lr=lr, **adam).step()
        return float(loss), float(norm)

    def tensors(self, grads: bool = False) -> dict[str, torch.Tensor]:
        tree = {
            name: (p.grad if p.grad is not None else torch.zeros_like(p)) if grads else p.detach()
            for name, p in self.model.named_parameters()
            if p.requires_grad or not grads
        }
        if not grads:
            saved = self.model.state_dict()  # without buffers that no checkpoint has
            tree |= {name: buffer for name, buffer in self.model.named_buffers() if name in saved}
        result = tiny.checkpoint_tensors(self.model, tree)
        if self.head is not None:
            result[HEAD] = self.head.grad if grads else self.head.detach()  # type: ignore[assignment]
        return result
