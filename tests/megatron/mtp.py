"""Multi-token prediction layers for transformers' models, which lack them: section 2.2 of DeepSeek's report
(arXiv:2412.19437) in torch, with the names of published checkpoints."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class MTPLayer(NamedTuple):
    embedding_norm: Any
    state_norm: Any
    joint: Any
    layer: Any
    final_norm: Any


def num_layers(config: Any) -> int:
    keys = "num_nextn_predict_layers", "mtp_num_hidden_layers"
    return max(getattr(config, key, None) or 0 for key in keys)


def add_layers(model: Any) -> None:
    """Add MTP layers: in DeepSeek's and GLM's models past the decoder's, of which transformers runs as many as the
    config says; in Qwen3-Next and Qwen3.5, which have one with attention, in a module `mtp`."""
    config, first_layer, count = model.config, model.config.num_hidden_layers, num_layers(model.config)
    hidden, own_module = config.hidden_size, hasattr(config, "linear_num_key_heads")
    kinds = {"indexer_types": "full", "mlp_layer_types": "sparse"}  # of each layer
    kinds |= {"layer_types": "full_attention"} if own_module else {}
    decoder_kinds = {name: getattr(config, name) for name in kinds if getattr(config, name, None) is not None}
    for name, own in decoder_kinds.items():
        setattr(config, name, [*own, *[kinds[name]] * count])
    for number in range(count):
        layer = type(model.model.layers[-1])(config, first_layer + number)
        first, second, last = (type(model.model.norm)(hidden, config.rms_norm_eps) for _ in range(3))
        joint = torch.nn.Linear(2 * hidden, hidden, bias=False)
        if own_module:
            module = model.mtp = torch.nn.Module()
            module.pre_fc_norm_embedding, module.pre_fc_norm_hidden, module.norm = first, second, last
            module.fc, module.layers = joint, torch.nn.ModuleList([layer])
        else:
            module = layer
            layer.enorm, layer.hnorm, layer.shared_head = first, second, torch.nn.ModuleDict({"norm": last})
            layer.eh_proj = joint
            model.model.layers.append(layer)
        module.float().eval().apply(model._init_weights)
    for name, own in decoder_kinds.items():  # transformers saves types of decoder layers only
        setattr(config, name, own)


def layers_of(model: Any) -> list[MTPLayer]:
    if hasattr(model, "mtp"):
        own = model.mtp
        norms = own.pre_fc_norm_embedding, own.pre_fc_norm_hidden
        return [MTPLayer(*norms, own.fc, layer, own.norm) for layer in own.layers]
    layers = list(model.model.layers)[model.config.num_hidden_layers :]
    return [MTPLayer(layer.enorm, layer.hnorm, layer.eh_proj, layer, layer.shared_head["norm"]) for layer in layers]


def predict_ahead(mtp: MTPLayer, state: torch.Tensor, embedded: torch.Tensor, rotary: Any) -> torch.Tensor:
    """Map two [1, s, hidden] to the normed state for the output layer and the next MTP layer."""
    joined = mtp.joint(torch.cat([mtp.embedding_norm(embedded), mtp.state_norm(state)], -1))
    size = joined.shape[1]
    mask = torch.full((size, size), -torch.inf).triu(1)[None, None]
    result = mtp.layer(joined, attention_mask=mask, position_embeddings=rotary)
    normed: torch.Tensor = mtp.final_norm(result[0] if isinstance(result, tuple) else result)
    return normed


def loss(model: Any, tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted cross-entropy of one sequence [s], averaged over MTP layers, which alone have gradients."""
    layers, positions = layers_of(model), torch.arange(len(tokens))[None]
    with torch.no_grad():
        state = model.model(tokens[None]).last_hidden_state
        rotary = model.model.rotary_emb(state, positions)
    embedding, head = model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach()
    total = torch.zeros(())
    for depth, layer in enumerate(layers, 1):
        if len(tokens) <= depth + 1:
            break
        length = len(tokens) - depth
        cos_sin = tuple(part[:, :length] for part in rotary)
        state = predict_ahead(layer, state[:, :length], embedding[tokens[depth:]][None], cos_sin)
        log_p = (state[0, :-1] @ head.T).log_softmax(-1)
        targets = tokens[depth + 1 :]
        total = total - (weights[depth + 1 :] * log_p.gather(1, targets[:, None])[:, 0]).sum()
    return total / len(layers)
