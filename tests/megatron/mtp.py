"""Multi-token prediction layers for transformers' DeepSeek and GLM models, which lack them: section 2.2 of DeepSeek's
report (arXiv:2412.19437) in torch."""

from __future__ import annotations

import types
from typing import Any

import torch


def add_layers(model: Any) -> None:
    """Append MTP layers to the decoder's, of which transformers runs as many as the config says.

    Names are those of the published checkpoints."""
    config, first_layer = model.config, model.config.num_hidden_layers
    norm, hidden = type(model.model.norm), model.config.hidden_size
    kinds = {"indexer_types": "full", "mlp_layer_types": "sparse"}  # of each layer
    decoder_kinds = {name: getattr(config, name) for name in kinds if getattr(config, name, None) is not None}
    for name, own in decoder_kinds.items():
        setattr(config, name, [*own, *[kinds[name]] * config.num_nextn_predict_layers])
    for number in range(config.num_nextn_predict_layers):
        layer = type(model.model.layers[-1])(config, first_layer + number)
        layer.enorm, layer.hnorm = norm(hidden, config.rms_norm_eps), norm(hidden, config.rms_norm_eps)
        layer.eh_proj = torch.nn.Linear(2 * hidden, hidden, bias=False)
        layer.shared_head = torch.nn.ModuleDict({"norm": norm(hidden, config.rms_norm_eps)})
        layer.predict_ahead = types.MethodType(predict_ahead, layer)
        layer.float().eval().apply(model._init_weights)
        model.model.layers.append(layer)
    for (
        name,
        own,
    ) in decoder_kinds.items():  # transformers saves types of decoder layers only
        setattr(config, name, own)


def predict_ahead(layer: Any, state: torch.Tensor, embedded: torch.Tensor, rotary: Any) -> torch.Tensor:
    """Map two [1, s, hidden] to the normed state for the output layer and the next MTP layer."""
    joined = layer.eh_proj(torch.cat([layer.enorm(embedded), layer.hnorm(state)], -1))
    size = joined.shape[1]
    mask = torch.full((size, size), -torch.inf).triu(1)[None, None]
    result = layer(joined, attention_mask=mask, position_embeddings=rotary)
    normed: torch.Tensor = layer.shared_head["norm"](result[0] if isinstance(result, tuple) else result)
    return normed


def loss(model: Any, tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted cross-entropy of one sequence [s], averaged over MTP layers, which alone have gradients."""
    first_layer, count = model.config.num_hidden_layers, model.config.num_nextn_predict_layers
    positions = torch.arange(len(tokens))[None]
    with torch.no_grad():
        state = model.model(tokens[None]).last_hidden_state
        rotary = model.model.rotary_emb(state, positions)
    embedding, head = model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach()
    total = torch.zeros(())
    for depth, layer in enumerate(model.model.layers[first_layer : first_layer + count], 1):
        if len(tokens) <= depth + 1:
            break
        length = len(tokens) - depth
        cos_sin = tuple(part[:, :length] for part in rotary)
        state = layer.predict_ahead(state[:, :length], embedding[tokens[depth:]][None], cos_sin)
        log_p = (state[0, :-1] @ head.T).log_softmax(-1)
        targets = tokens[depth + 1 :]
        total = total - (weights[depth + 1 :] * log_p.gather(1, targets[:, None])[:, 0]).sum()
    return total / count
