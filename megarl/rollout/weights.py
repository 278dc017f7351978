"""What a push sends: tensors in HF form and by HF name, checked against the folder that the engine started from."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

NamedTensors = Sequence[tuple[str, torch.Tensor]]
_FUSED = ("q_a_proj", "kv_a_proj_with_mqa")


def with_partners(buckets: Iterable[NamedTensors]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """The buckets, in which each half of a pair that SGLang fuses waits for the other.

    SGLang concatenates DeepSeek's q_a_proj and kv_a_proj_with_mqa of a layer, and forgets one that comes alone at the
    end of the call. Where a model has no q_a_proj, kv_a_proj_with_mqa stands alone and comes with the last bucket.
    """
    waiting: dict[str, tuple[str, torch.Tensor]] = {}
    for bucket in buckets:
        ready: list[tuple[str, torch.Tensor]] = []
        for name, tensor in bucket:
            kind = next((half for half in _FUSED if f".{half}." in name), None)
            if kind is None:
                ready.append((name, tensor))
                continue
            other = name.replace(kind, _FUSED[1 - _FUSED.index(kind)])
            if other in waiting:
                ready += [waiting.pop(other), (name, tensor)]
            else:
                waiting[name] = (name, tensor)
        if ready:
            yield ready
    if waiting:
        yield list(waiting.values())


def flatten(bucket: NamedTensors) -> list[tuple[str, torch.Tensor]]:
    """The same tensors as views of one new buffer per dtype, so that one piece of shared memory carries them all."""
    flat: list[tuple[str, torch.Tensor]] = []
    for dtype in sorted({tensor.dtype for _, tensor in bucket}, key=str):
        part = [(name, tensor.detach()) for name, tensor in bucket if tensor.dtype == dtype]
        buffer = torch.cat([tensor.reshape(-1) for _, tensor in part])
        pieces = buffer.split([tensor.numel() for _, tensor in part])
        flat += [(name, piece.view(tensor.shape)) for (name, tensor), piece in zip(part, pieces, strict=True)]
    return flat


def checksum(tensor: torch.Tensor) -> str:
    """As SGLang's weights_checker has it on a CPU: the first 8 bytes of SHA-256 over the tensor's bytes."""
    data = tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).digest()[:8].hex()


Shapes = dict[str, tuple[int, ...]]


def checkpoint_shapes(folder: str | Path) -> Shapes:
    """Shapes by name of the tensors in an HF folder's safetensors; empty where it has none. Reads headers only."""
    shapes: Shapes = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        shapes.update({name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"})
    return shapes


_TIED = "lm_head.weight"
"""May be in a folder with tied embeddings or not; SGLang takes it from the embedding either way."""


def misfit(bucket: NamedTensors, checkpoint: Shapes) -> str:
    """Why a bucket does not fit the model, measured by its folder; empty if it does.

    SGLang passes over names that it does not know in silence, and a wrong shape ends its process.
    """
    for name, tensor in bucket if checkpoint else ():
        if name not in checkpoint and name != _TIED:
            return f"tensor {name} is unknown"
        if tuple(tensor.shape) != checkpoint.get(name, tuple(tensor.shape)):
            return f"tensor {name} has the shape {tuple(tensor.shape)}, not {checkpoint[name]}"
    return ""


def missing(pushed: Iterable[str], checkpoint: Shapes, num_layers: int) -> str:
    """What a push has left out, for SGLang keeps what it had; empty if nothing.

    Not asked for: layers past `num_layers` (multi-token prediction), quantisation scales, computed buffers.
    """
    wanted = {name for name in checkpoint if not name.endswith(("_scale_inv", "inv_freq"))} - {_TIED}
    wanted = {name for name in wanted if not (hit := re.search(r"\.layers\.(\d+)\.", name)) or int(hit[1]) < num_layers}
    left = sorted(wanted - set(pushed))
    return f"{len(left)} tensors are missing, such as {left[0]}" if left else ""
