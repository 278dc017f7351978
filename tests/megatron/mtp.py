"""Layers of multi-token prediction for transformers' DeepSeek-V3, which has none: the report's section 2.2 in torch."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RMSNorm


class MTPLayer(DeepseekV3DecoderLayer):  # type: ignore[misc]
    """Names as in the published checkpoint, in which it follows the decoder's layers."""

    def __init__(self, config: Any, number: int) -> None:
        super().__init__(config, number)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm = DeepseekV3RMSNorm(hidden, eps), DeepseekV3RMSNorm(hidden, eps)
        self.eh_proj = torch.nn.Linear(2 * hidden, hidden, bias=False)
        self.shared_head = torch.nn.ModuleDict({"norm": DeepseekV3RMSNorm(hidden, eps)})

    def foresee(self, state: torch.Tensor, embedded: torch.Tensor, rotary: Any) -> torch.Tensor:
        """[1, s, hidden] twice -> what is normed for the output layer, and goes on to the next such layer."""
        joined = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(state)], -1))
        size = joined.shape[1]
        mask = torch.full((size, size), -torch.inf).triu(1)[None, None]
        found = self(joined, attention_mask=mask, position_embeddings=rotary)
        normed: torch.Tensor = self.shared_head["norm"](found[0] if isinstance(found, tuple) else found)
        return normed


def add_layers(model: Any) -> None:
    """Behind the decoder's layers, of which transformers runs as many as the config says."""
    first = model.config.num_hidden_layers
    for number in range(model.config.num_nextn_predict_layers):
        layer = MTPLayer(model.config, first + number).float().eval()
        layer.apply(model._init_weights)
        model.model.layers.append(layer)


def loss(model: Any, tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Of one sequence [s] with the weight [s] of each token: the mean over layers of the weighted cross-entropy, with
    no gradient but for these layers."""
    first, count = model.config.num_hidden_layers, model.config.num_nextn_predict_layers
    positions = torch.arange(len(tokens))[None]
    with torch.no_grad():
        state = model.model(tokens[None]).last_hidden_state
        rotary = model.model.rotary_emb(state, positions)
    embedding, head = model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach()
    total = torch.zeros(())
    for depth, layer in enumerate(model.model.layers[first : first + count], 1):
        if len(tokens) <= depth + 1:
            break
        length = len(tokens) - depth
        cos_sin = tuple(part[:, :length] for part in rotary)
        state = layer.foresee(state[:, :length], embedding[tokens[depth:]][None], cos_sin)
        log_p = (state[0, :-1] @ head.T).log_softmax(-1)
        targets = tokens[depth + 1 :]
        total = total - (weights[depth + 1 :] * log_p.gather(1, targets[:, None])[:, 0]).sum()
    return total / count
