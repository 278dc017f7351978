"""The engine's side of the reshard: `load` runs in SGLang's processes and writes slices straight into their tensors.

SGLang calls it where /update_weights_from_tensor names it as the load format. The rank of the trainer beside an
engine's rank shares tensors of bytes with it: "order" (JSON), "answer" (room for JSON), "bucket" (data; "write" needs
it) and, for a session, "bucket1". Nothing is fused, divided or repeated here; the trainer knows where each byte
belongs, and the engine only checks and copies.

Orders, and what answers them; an order that does not fit is answered by {"error": text} before anything is written:

{"do": "describe"} -> {"tensors": {name: [dtype, shape]}, "odd": [text]}: what may be written, and which layers keep
their weights otherwise than their shapes show, in words, see `find_layout_oddities`.
{"do": "write", "version": v, "push": text, "tensor_dtype": {name: dtype},
 "slices": [[name, index, r0, r1, c0, c1, offset, hash_offset], ...]} -> {"wrong": [names]}: see `_write`.
{"do": "compare", ...} as to write -> {"differ": [names]}: nothing is written; what holds other bits than its hash says.
{"do": "session", "socket": path} -> {"orders": n}: further orders, which come and are answered by a socket until the
other side hangs up, see `weight_channel.py`; each says by "bucket" in which one its data are, and whether it is for the
"draft" model.
{"do": "join"} -> {}: this model, a draft model, takes part in the session that follows.
{"do": "finish"} -> {}: SGLang computes what it derives from weights.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from megarl.engine.weight_channel import serve_orders
from megarl.parallel import device, shared_memory
from megarl.reshard.run.checksum import device_hashes
from megarl.reshard.run.copies import unpack

LOADER_NAME = f"{__name__}.load"
"""By which SGLang knows it, as server argument and as load format."""

_LENGTH = struct.Struct("<q")


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Do what "order" says and answer in "answer". Never raises, for that would end SGLang's process.

    On a GPU SGLang moves every tensor to its device before this call: of what lies elsewhere we are given a copy, and
    nobody would see what is written there.
    """
    try:
        shared = open_shared(named_tensors)
    except Exception as error:  # of a rank that has ended meanwhile
        print(f"what a rank shares is not there: {type(error).__name__}: {error}", flush=True)
        return
    try:
        with torch.no_grad():
            order = json.loads(_bytes(shared["order"]))
            if order["do"] == "session":
                answer = _session(model, order["socket"], [shared["bucket"], shared["bucket1"]])
            else:
                answer = _run_order(model, order, shared.get("bucket"))
            device.synchronize(shared["answer"], whole=True)  # failures show here; the bucket is free once we answer
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    try:
        _write_answer(shared["answer"], answer)
        device.synchronize(shared["answer"], whole=True)
    except Exception as error:
        print(f"the answer {str(answer)[:500]} cannot be given: {error}", flush=True)  # the trainer finds none


def open_shared(named_tensors: Sequence[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The tensors that a rank of the trainer shares, by name. On a CPU it says in one, "shared", where the others are;
    see `engine_cpu.pack`."""
    shared = dict(named_tensors)
    if "shared" not in shared:
        return shared
    places = json.loads(_bytes(shared["shared"]))
    return {name: shared_memory.map_handle(*place) for name, place in places.items()}


_DRAFT_MODELS: list[torch.nn.Module] = []
"""The draft models of the next session. SGLang calls `load` for one model at a time, and cannot while one lasts."""


def _session(model: torch.nn.Module, path: str, buckets: Sequence[torch.Tensor]) -> dict[str, Any]:
    drafts = list(_DRAFT_MODELS)
    _DRAFT_MODELS.clear()

    def obey(order: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        try:
            for one in drafts if order["draft"] else [model]:
                for key, names in _run_order(one, order, buckets[order["bucket"]]).items():
                    found[key] = [*found.get(key, []), *names]
            if not found:
                raise ValueError("no draft model has joined the session")
            device.synchronize(buckets[0], whole=True)  # SGLang may compute in streams of its own
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return found

    return {"orders": serve_orders(path, obey)}


def _write_answer(buffer: torch.Tensor, content: dict[str, Any]) -> None:
    """Write JSON into a shared tensor of bytes, after its length as 8 bytes, little-endian."""
    data = json.dumps(content).encode()
    if _LENGTH.size + len(data) > buffer.numel():
        data = json.dumps({"error": f"an answer of {len(data)} bytes for {buffer.numel()} bytes of room"}).encode()
    packed = torch.frombuffer(bytearray(_LENGTH.pack(len(data)) + data), dtype=torch.uint8)
    buffer[: len(packed)].copy_(packed)


def read_answer(answer: torch.Tensor) -> dict[str, Any]:
    """What the engine has put into the tensor "answer". Raises ValueError where there is nothing."""
    length = _LENGTH.unpack(_bytes(answer[: _LENGTH.size]))[0]
    if not 0 < length <= answer.numel() - _LENGTH.size:
        raise ValueError(f"the engine has not answered: {length} bytes")
    return dict(json.loads(_bytes(answer[_LENGTH.size : _LENGTH.size + length])))


def clear_answer(answer: torch.Tensor) -> None:
    """Make `read` fail until the next answer, so that an old one is not taken for it."""
    answer[: _LENGTH.size].zero_()


def _run_order(model: torch.nn.Module, order: dict[str, Any], bucket: torch.Tensor | None) -> dict[str, Any]:
    match order["do"]:
        case "describe":
            tensors = writable_tensors(model)
            held = {name: [_dtype(tensor), list(tensor.shape)] for name, tensor in tensors.items()}
            return {"tensors": held, "odd": find_layout_oddities(model)}
        case "write":
            if bucket is None:
                raise ValueError("an order to write needs a bucket")
            return {"wrong": _write(_get_tensors(model, order.get("push")), order, bucket)}
        case "compare":
            if bucket is None:
                raise ValueError("an order to compare needs a bucket")
            return {"differ": _write(writable_tensors(model), order, bucket, writes=False)}
        case "join":
            if not any(one is model for one in _DRAFT_MODELS):
                _DRAFT_MODELS.append(model)
            return {}
        case "finish":
            _TENSOR_CACHE.pop(model, None)
            from sglang.srt.model_loader.loader import post_load_weights

            post_load_weights(model)
            for module in model.modules():  # Gemma's norms keep 1 + weight for fused kernels
                getattr(module, "refresh_gemma_weight", lambda: None)()
            return {}
    raise ValueError(f"unknown order {order['do']!r}")


_TENSOR_CACHE: WeakKeyDictionary[torch.nn.Module, tuple[str | None, dict[str, torch.Tensor]]] = WeakKeyDictionary()


def _get_tensors(model: torch.nn.Module, push: str | None) -> dict[str, torch.Tensor]:
    """`writable_tensors`, looked for once in a push: with the modules of a large model that takes longer than a round's copies.
    Between pushes SGLang may replace tensors."""
    known = _TENSOR_CACHE.get(model)
    if known is None or push is None or known[0] != push:
        known = _TENSOR_CACHE[model] = push, writable_tensors(model)
    return known[1]


def writable_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's parameters and the buffers that a checkpoint has, by name; shared ones once, by their first name.
    A buffer of one number is no weight: Gemma's normalizer follows from the size."""
    found = {name: parameter.data for name, parameter in model.named_parameters()}
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if buffer.dim() and name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                found[name] = buffer
    return found


_LAYOUT_MARKERS = {
    "load_up_proj_weight_first": "has the rows of up before those of gate",
    "use_flashinfer_trtllm_moe": "has the rows of up before those of gate, and packs them into blocks",
    "w13_swiglu_interleaved": "has the rows of gate and up in turn",
    "use_triton_kernels": "has its experts transposed",
    "use_marlin": "has its weights repacked",
    "_mega_moe_weights_built": "has its experts repacked",
    "is_shuffled": "has its weights shuffled",
    "aiter_bpreshuffled": "has its weights shuffled",
    "format_ue8m0": "has scales that are powers of two",
    "hpc_ops_w13_weight_scale": "computes with a copy of its scales",
    "_block_fp8_bf16_weight": "computes with a copy of its weights",
}
"""Marks that SGLang puts on a layer, on what computes with its weights or on these: what a shape does not show."""


def find_layout_oddities(model: torch.nn.Module) -> list[str]:
    """What the model itself says of weights that are not where the tables have them; one line for each layer."""
    found = []
    for name, module in model.named_modules():
        method = getattr(module, "weight_load_method", None) or getattr(module, "quant_method", None)
        for owner in (module, method, *module.parameters(recurse=False)):
            for mark, means in _LAYOUT_MARKERS.items():
                value = getattr(owner, mark, None)
                if value is not None and value is not False:
                    found.append(f"{name or 'the model'} {means} ({mark})")
    return list(dict.fromkeys(found)) + _check_expert_location()


def _check_expert_location() -> list[str]:
    """SGLang's own table of which expert is where, if it has loaded it: each must be where its number says."""
    module = sys.modules.get("sglang.srt.eplb.expert_location")
    table = module.get_global_expert_location_metadata() if module is not None else None
    if table is None:
        return []
    where = table.physical_to_logical_map_cpu
    if bool((where == torch.arange(where.shape[1]) % table.num_logical_experts).all()):
        return []
    return ["the engine's experts are not where their numbers say (init_expert_location)"]


class _WriteTarget(NamedTuple):
    name: str
    target: torch.Tensor  # [rows, columns], a view of the model's tensor
    offset: int  # in the bucket
    hash: torch.Tensor | None  # [1] int64, what the target must have in the end


def _write(
    tensors: dict[str, torch.Tensor], order: dict[str, Any], bucket: torch.Tensor, writes: bool = True
) -> list[str]:
    """Copy slices out of the bucket into the model's tensors; the names of those that then hold other bits.
    writes: whether they are copied at all, before they are looked at.

    A slice [name, index, r0, r1, c0, c1, offset, hash_offset] is the box [r0, r1) x [c0, c1) of a tensor [rows,
    columns], or [rows] as [rows, 1], or, where `index` is not -1, of that one of a stack of such. Its elements are in
    the bucket from byte `offset` on, in row-major order, in the tensor's own dtype, which "tensor_dtype" states for
    each name that is written, so that no bytes are taken for what they are not. Where `hash_offset` is not -1, the
    bucket has there the hash (int64) that the box must have once everything is written, read back from its place.
    """
    for name, dtype in order["tensor_dtype"].items():
        if name in tensors and _dtype(tensors[name]) != dtype:
            raise ValueError(f"{name} is {_dtype(tensors[name])} in the engine, not {dtype}")
    boxes = [
        _resolve_target(tensors, order["tensor_dtype"], bucket, *entry) for entry in order["slices"]
    ]  # all, before any is written
    dense = [box.target.shape[1] == 1 or box.target.stride(1) == 1 for box in boxes]
    if writes:
        unpack(bucket, [(box.target, box.offset) for box, is_dense in zip(boxes, dense, strict=True) if is_dense])
    for box, is_dense in zip(boxes, dense, strict=True):
        if writes and not is_dense:  # a tensor that the engine keeps transposed
            source = _view_bucket(bucket, box.offset, box.target.numel(), box.target.dtype)
            box.target.copy_(source.view(box.target.shape))
    checked = [(box, box.hash) for box in boxes if box.hash is not None]
    if not checked:
        return []
    held = device_hashes([box.target for box, _ in checked])
    equal = (held == torch.cat([value for _, value in checked])).tolist()  # the device is waited for only here
    return list(dict.fromkeys(box.name for (box, _), same in zip(checked, equal, strict=True) if not same))


def _resolve_target(
    tensors: dict[str, torch.Tensor],
    dtypes: dict[str, str],
    bucket: torch.Tensor,
    name: str,
    index: int,
    r0: int,
    r1: int,
    c0: int,
    c1: int,
    offset: int,
    hash_offset: int,
) -> _WriteTarget:
    """The views that a slice names. Raises ValueError for one that is not there."""
    if name not in tensors:
        raise ValueError(f"the engine has no tensor {name}")
    if name not in dtypes:
        raise ValueError(f"the order does not state the dtype of {name}")
    tensor = tensors[name]
    if tensor.dim() not in ((1, 2) if index == -1 else (3,)) or not -1 <= index < len(tensor):
        raise ValueError(f"{name} has the shape {list(tensor.shape)}; index {index} does not fit it")
    whole = tensor if index == -1 else tensor[index]
    if whole.dim() == 1:
        whole = whole[:, None]
    rows, columns = whole.shape
    if not (0 <= r0 < r1 <= rows and 0 <= c0 < c1 <= columns):
        raise ValueError(f"rows {r0}:{r1}, columns {c0}:{c1} are not in {name}, which has {rows} and {columns}")
    target = whole[r0:r1, c0:c1]
    _view_bucket(bucket, offset, target.numel(), target.dtype)  # whether it is there
    wanted = _view_bucket(bucket, hash_offset, 1, torch.int64) if hash_offset != -1 else None
    return _WriteTarget(name, target, offset, wanted)


def _view_bucket(bucket: torch.Tensor, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """[count]: the elements that begin at byte `offset`. Raises ValueError where the bucket does not have them."""
    stop = offset + count * dtype.itemsize
    if offset < 0 or stop > bucket.numel():
        raise ValueError(f"bytes {offset}:{stop} are outside of the bucket, which has {bucket.numel()}")
    if offset % dtype.itemsize:
        raise ValueError(f"byte {offset} is no place for {_dtype(bucket.new_empty(0, dtype=dtype))}")
    return bucket[offset:stop].view(dtype)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()
