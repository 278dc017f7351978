"""Replay of sparse attention indices: the trainer's tokens attend to the keys that the engine's indexers chose.

As with expert routing, rounding alone makes trainer and engine choose differently at the margin, and more often: many
keys score nearly the same, and ReLU makes some scores equal.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megarl.config import ConfigError
from megarl.megatron.sparse_attention import sparse_layers
from megarl.models.sparse_indices import IndexShape, positions


def recorded_layers(chunks: Sequence[torch.nn.Module], shape: IndexShape) -> tuple[int, ...]:
    """Return the layers of these chunks that replay, as indices among all layers with an indexer."""
    return tuple(shape.layers.index(layer.layer_number - 1) for chunk in chunks for layer in sparse_layers(chunk))


def select(record: torch.Tensor, rows: torch.Tensor, layers: Sequence[int]) -> torch.Tensor:
    """Return the keys of each token, [len(rows), layers, topk] int32, -1 for tokens without a record.

    record: [recorded tokens, layers, topk]. rows: the row of `record` of each token, -1 for none. layers: indices among
    the layers of the record.
    """
    recorded = (rows >= 0).nonzero().squeeze(1)
    keys = torch.full((len(rows), len(layers), record.shape[2]), -1, dtype=torch.int32)
    if len(recorded):
        chosen = record.index_select(0, rows[recorded])
        if tuple(layers) != tuple(range(record.shape[1])):
            chosen = chosen.index_select(1, torch.tensor(list(layers)))
        keys.index_copy_(0, recorded, positions(chosen))
    return keys


def start_micro_batch(chunk: torch.nn.Module, keys: torch.Tensor | None) -> None:
    """Set what the chunk's next forward pass replays, as from `select`. Its indexers choose if `keys` is None."""
    for index, layer in enumerate(sparse_layers(chunk)):
        layer.recorded.set_recorded(None if keys is None else keys[:, index], chunk.training)


def reset(chunks: Sequence[torch.nn.Module]) -> None:
    """Discard the replay state of aborted passes in these chunks."""
    for layer in (layer for chunk in chunks for layer in sparse_layers(chunk)):
        layer.recorded.reset()


def check_record(record: torch.Tensor, shape: IndexShape) -> None:
    """Raise ConfigError unless a record has this model's layers, and distinct earlier keys of each token."""
    expected = (len(shape.layers), shape.topk)
    if not len(record):
        return
    if tuple(record.shape[1:]) != expected:
        raise ConfigError(
            f"the recorded sparse attention indices are of {record.shape[1]} layers with {record.shape[2]} keys a "
            f"token, the trainer's model has {expected[0]} with {expected[1]}: engine and trainer must load the same "
            "config.json"
        )
    ascending = positions(record).sort(dim=-1).values
    last = torch.arange(shape.topk, shape.topk + len(record))[:, None]
    valid = (ascending.diff(dim=-1) > 0).all(-1) & (ascending[..., 0] >= 0) & (ascending[..., -1] <= last)
    if not valid.all():
        token, layer = (~valid).nonzero()[0].tolist()
        raise ConfigError(
            f"the recorded sparse attention indices of token {token + shape.topk} in layer {shape.layers[layer]} are "
            f"not {shape.topk} different tokens up to itself; the engine does not record this model's: set "
            "train.sparse_index_replay=false"
        )
