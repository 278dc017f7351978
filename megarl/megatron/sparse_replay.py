"""Replay of sparse attention indices: the trainer's tokens attend to the keys that the engine's indexers chose.

As with expert routing, rounding alone makes trainer and engine choose differently at the margin, and more often: many
keys score nearly the same, and ReLU makes some scores equal.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megarl.megatron.sparse_attention import sparse_layers
from megarl.models.sparse_indices import IndexShape


def recorded_layers(chunks: Sequence[torch.nn.Module], shape: IndexShape) -> tuple[int, ...]:
    """Return the layers of these chunks that replay, as indices among all layers with an indexer."""
    return tuple(shape.layers.index(layer.layer_number - 1) for chunk in chunks for layer in sparse_layers(chunk))


def start_micro_batch(chunk: torch.nn.Module, keys: torch.Tensor | None) -> None:
    """Set what the chunk's next forward pass replays. Its indexers choose if `keys` is None.

    keys: as from `models.sparse_indices.select`.
    """
    for index, layer in enumerate(sparse_layers(chunk)):
        layer.recorded.set_recorded(None if keys is None else keys[:, index], chunk.training)


def reset(chunks: Sequence[torch.nn.Module]) -> None:
    """Discard the replay state of aborted passes in these chunks."""
    for layer in (layer for chunk in chunks for layer in sparse_layers(chunk)):
        layer.recorded.reset()
