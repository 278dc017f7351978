"""Engine side of the weight sync, and the channel by which a trainer rank sends it orders.

`load` runs in the engine's processes and writes slices straight into their tensors.

The trainer rank on the same device shares tensors of bytes with it: "order" (JSON), "answer" (room for JSON), "bucket"
(data; "write" needs it) and, for a session, "bucket1". The loader fuses, splits and repeats nothing: the trainer knows
where each byte belongs, and the engine only checks and copies.

Orders and their answers; an invalid order is answered by {"error": text} before anything is written:

{"do": "describe"} -> {"tensors": {name: [dtype, shape]}, "odd": [text]}: the writable tensors, and in words the layers
whose weight layout differs from what their shapes show, see `LoaderHooks`.
{"do": "write", "version": v, "sync_id": text, "tensor_dtype": {name: dtype},
 "slices": [[name, index, r0, r1, c0, c1, offset, hash_offset], ...]} -> {"wrong": [names]}: see `_write`.
{"do": "compare", ...} as for write -> {"differ": [names]}: writes nothing; lists tensors whose bits do not match the
hash.
{"do": "read", "tensor_dtype": ..., "slices": ...} -> {}: copies the slices from the tensors to the bucket.
{"do": "session", "socket": path} -> {"orders": n}: serve further orders from a socket until the trainer hangs up, see
`WeightChannel`. Each order names its "bucket" and says whether it is for the "draft" model.
{"do": "join"} -> {}: this model, a draft model, takes part in the next session.
{"do": "keep", "tensors": [names], "factors": {name: [dtype, shape]}} -> {}: copy these tensors to the host, and create
the factors of adapters, which other orders then find like tensors. Does nothing when it is repeated.
{"do": "select", "adapter": name, "factors": {name: [dtype, shape]}} -> {}: other orders find the factors of this
adapter from now on, which the engine serves beside others, see `LoaderHooks`.
{"do": "merge", "scale": s, "merges": [...]} -> {}: write the kept tensors with adapters merged, see `merge_adapters`.
{"do": "finish", "experts": {layer: [experts]}} -> {}: the engine recomputes what it derives from weights and, if the
order names experts, sends their tokens to these places from now on, see `EngineLayout.experts`.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from megarl.engine.engine_protocol import EngineError
from megarl.models.fp8 import BLOCK, FP8, SCALE_SUFFIX, block_amax, compute_scales, dequantise, quantise
from megarl.models.layout_algebra import matrix_shape
from megarl.models.lora_tables import MERGED_AT_ONCE, merge_adapter
from megarl.parallel import device, shared_memory
from megarl.processes.temp_folders import TempFolder
from megarl.reshard.run.copies import device_hashes, pack, unpack

_LENGTH = struct.Struct("<q")
_POLL_S = 0.2


class EngineTimeout(EngineError):
    """The other side does not respond, although as far as known it still runs."""


def _send_json(connection: socket.socket, content: dict[str, Any]) -> None:
    connection.sendall(json.dumps(content).encode() + b"\n")


def _receive_json(connection: socket.socket) -> dict[str, Any] | None:
    """Receive one line; None if the other side hangs up. The two sides take turns, so nothing follows the line."""
    data = bytearray()
    while not data.endswith(b"\n"):
        if not (chunk := connection.recv(1 << 20)):
            return None
        data += chunk
    return dict(json.loads(data))


def serve_orders(path: str, execute: Callable[[dict[str, Any]], dict[str, Any]]) -> int:
    """Engine side: execute orders from the socket at `path` and answer each, until the other side hangs up.

    Returns their number. `execute` must not raise.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        orders = 0
        try:
            while (order := _receive_json(connection)) is not None:
                _send_json(connection, execute(order))
                orders += 1
        except (BrokenPipeError, ConnectionResetError):
            pass  # the trainer rank is gone; its own supervision reports that
        return orders


class WeightChannel:
    """Trainer side of the channel to the engine rank on the same device, for the duration of a weight sync.

    One request with `path` opens it: the loader connects to that socket, in a folder that only this user may enter, and
    executes orders until the trainer hangs up. So a round costs one message each way within the machine, and involves
    neither HTTP nor SGLang's other processes nor other ranks. Orders and answers are lines of JSON; weights never take
    this way. If either process dies, the kernel hangs up.

    timeout: seconds that the engine rank may take to connect, and to execute an order.
    """

    def __init__(self, timeout: float) -> None:
        self._folder = TempFolder("megarl-sync-")
        self.path = str(Path(self._folder.path, "socket"))
        self.timeout = timeout
        self._connection: socket.socket | None = None
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen(1)

    def wait_connected(self, is_over: Callable[[], bool] = lambda: False) -> bool:
        """Wait for the engine rank to connect; False if `is_over` first says that it will not. Raises EngineTimeout."""
        self._listener.settimeout(_POLL_S)
        deadline = time.monotonic() + self.timeout
        try:
            while self._connection is None:
                over = is_over()  # before accept: it may have connected just before it was over
                try:
                    self._connection, _ = self._listener.accept()
                    self._connection.settimeout(self.timeout)
                except TimeoutError:
                    if over:
                        return False
                    if time.monotonic() > deadline:
                        text = f"an engine rank did not start the weight sync within {self.timeout:g} s"
                        raise EngineTimeout(text) from None
        finally:
            self._listener.close()
            self._folder.close()
        return True

    def send(self, order: dict[str, Any]) -> None:
        """Send an order; call `receive` before the next one. Raises EngineError if the engine rank is gone."""
        assert self._connection is not None
        try:
            _send_json(self._connection, order)
        except TimeoutError:
            raise EngineTimeout(f"an engine rank did not accept a request within {self.timeout:g} s") from None
        except OSError as error:
            raise EngineError(f"an engine rank exited during a weight sync ({error})") from None

    def receive(self) -> dict[str, Any]:
        """Wait for the answer. Raises EngineError if the engine rank is gone, or could not execute the order."""
        assert self._connection is not None
        try:
            answer = _receive_json(self._connection)
        except TimeoutError:
            raise EngineTimeout(f"an engine rank did not answer a request within {self.timeout:g} s") from None
        except OSError as error:
            raise EngineError(f"an engine rank exited during a weight sync ({error})") from None
        if answer is None:
            raise EngineError("an engine rank exited during a weight sync")
        if "error" in answer:
            raise EngineError(f"an engine rank failed to execute a request: {answer['error']}")
        return answer

    def close(self) -> None:
        """Hang up; the engine rank, which has answered all of its orders, then ends the session. Idempotent."""
        self._listener.close()
        if self._connection is not None:
            self._connection.close()
        self._folder.close()


def _refuse_placement(experts: Mapping[int, Sequence[int]]) -> None:
    raise ValueError("this kind of engine cannot move its experts")


def refuse_adapters(adapter: str, factors: Mapping[str, Sequence[Any]]) -> dict[str, torch.Tensor]:
    """Refuse to find the factors of an adapter."""
    raise ValueError("this engine serves no adapters")


class LoaderHooks(NamedTuple):
    """Functions that differ between kinds of engines.

    finish: recomputes what the model derives from its weights. find_oddities: lists the layers that say that their
    weights are not where the layout tables expect them, one line each. place_experts(experts by layer): sends the
    tokens of these layers' experts to the places that the weight sync has given them. find_factors(adapter, [dtype,
    shape] by name): returns the tensors of an adapter that the engine serves, by name.
    """

    finish: Callable[[torch.nn.Module], None] = lambda model: None
    find_oddities: Callable[[torch.nn.Module], list[str]] = lambda model: []
    place_experts: Callable[[Mapping[int, Sequence[int]]], None] = _refuse_placement
    find_factors: Callable[[str, Mapping[str, Sequence[Any]]], dict[str, torch.Tensor]] = refuse_adapters


NO_HOOKS = LoaderHooks()


def load(
    model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]], hooks: LoaderHooks = NO_HOOKS
) -> None:
    """Execute "order" and write the result to "answer". Never raises, since that would end the engine's process."""
    try:
        shared = open_shared(named_tensors)
    except Exception as error:  # the rank has ended meanwhile
        print(f"a rank's shared memory is missing: {type(error).__name__}: {error}", flush=True)
        return
    try:
        with torch.no_grad():
            order = json.loads(_bytes(shared["order"]))
            if order["do"] == "session":
                answer = _session(model, order["socket"], [shared["bucket"], shared["bucket1"]], hooks)
            else:
                answer = _run_order(model, order, shared.get("bucket"), hooks)
            device.synchronize(shared["answer"], whole=True)  # surfaces failures; the answer frees the bucket
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    try:
        write_answer(shared["answer"], answer)
        device.synchronize(shared["answer"], whole=True)
    except Exception as error:
        print(f"the answer {str(answer)[:500]} cannot be sent: {error}", flush=True)  # the trainer will find no answer


def open_shared(named_tensors: Sequence[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return a rank's tensors by name. On a CPU "shared" says where they are, see `cpu.sglang_arguments.pack`."""
    shared = dict(named_tensors)
    if "shared" not in shared:
        return shared
    handles = json.loads(_bytes(shared["shared"]))
    return {name: shared_memory.map_handle(*handle) for name, handle in handles.items()}


_DRAFT_MODELS: list[torch.nn.Module] = []
"""Draft models of the next session. `load` is called for one model at a time, and not at all during a session."""


def _session(model: torch.nn.Module, path: str, buckets: Sequence[torch.Tensor], hooks: LoaderHooks) -> dict[str, Any]:
    drafts = list(_DRAFT_MODELS)
    _DRAFT_MODELS.clear()

    def execute(order: dict[str, Any]) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = {}
            targets = drafts if order["draft"] else [model]
            if not targets:
                raise ValueError("no draft model has joined the session")
            for target in targets:
                for key, names in _run_order(target, order, buckets[order["bucket"]], hooks).items():
                    answer[key] = [*answer.get(key, []), *names]
            device.synchronize(buckets[0], whole=True)  # the engine may use other CUDA streams
            return answer
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}

    return {"orders": serve_orders(path, execute)}


def write_answer(buffer: torch.Tensor, content: dict[str, Any]) -> None:
    """Write JSON into a shared tensor of bytes, after its length as 8 bytes, little-endian."""
    data = json.dumps(content).encode()
    if _LENGTH.size + len(data) > buffer.numel():
        data = json.dumps({"error": f"an answer of {len(data)} bytes for a buffer of {buffer.numel()} bytes"}).encode()
    packed = torch.frombuffer(bytearray(_LENGTH.pack(len(data)) + data), dtype=torch.uint8)
    buffer[: len(packed)].copy_(packed)


def read_answer(answer: torch.Tensor) -> dict[str, Any]:
    """Return what the engine has written to the tensor "answer". Raises ValueError if there is no answer."""
    length = _LENGTH.unpack(_bytes(answer[: _LENGTH.size]))[0]
    if not 0 < length <= answer.numel() - _LENGTH.size:
        raise ValueError(f"the engine has not answered: {length} bytes")
    return dict(json.loads(_bytes(answer[_LENGTH.size : _LENGTH.size + length])))


def clear_answer(answer: torch.Tensor) -> None:
    """Make `read_answer` fail until the next answer, so that a stale one is never read."""
    answer[: _LENGTH.size].zero_()


def _run_order(
    model: torch.nn.Module, order: dict[str, Any], bucket: torch.Tensor | None, hooks: LoaderHooks = NO_HOOKS
) -> dict[str, Any]:
    match order["do"]:
        case "describe":
            tensors = writable_tensors(model)
            dtypes_and_shapes = {name: [_dtype(tensor), list(tensor.shape)] for name, tensor in tensors.items()}
            return {"tensors": dtypes_and_shapes, "odd": hooks.find_oddities(model)}
        case "write" | "compare" | "read" as action:
            if bucket is None:
                raise ValueError(f"a request to {action} needs a bucket")
            if action == "read":
                _read(_get_tensors(model, order.get("sync_id")), order, bucket)
                return {}
            if action == "compare":
                return {"differ": _write(_get_tensors(model, order.get("sync_id")), order, bucket, writes=False)}
            return {"wrong": _write(_get_tensors(model, order.get("sync_id")), order, bucket)}
        case "join":
            if not any(draft is model for draft in _DRAFT_MODELS):
                _DRAFT_MODELS.append(model)
            return {}
        case "keep":
            if model not in _ADAPTED:
                _ADAPTED[model] = keep_base(writable_tensors(model), order)
            return {}
        case "select":
            _TENSOR_CACHE.pop(model, None)
            _ADAPTED[model] = AdaptedModel({}, hooks.find_factors(order["adapter"], order["factors"]))
            return {}
        case "merge":
            merge_adapters(writable_tensors(model), _ADAPTED[model], order)
            return {}
        case "finish":
            _TENSOR_CACHE.pop(model, None)
            hooks.finish(model)
            if experts := order.get("experts"):
                hooks.place_experts({int(layer): placement for layer, placement in experts.items()})
            return {}
    raise ValueError(f"unknown order {order['do']!r}")


_TENSOR_CACHE: WeakKeyDictionary[torch.nn.Module, tuple[str | None, dict[str, torch.Tensor]]] = WeakKeyDictionary()


def _get_tensors(model: torch.nn.Module, sync_id: str | None) -> dict[str, torch.Tensor]:
    """Return `writable_tensors`, cached for one weight sync: walking a large model takes longer than a round's copies,
    and the engine may replace tensors between weight syncs."""
    cached = _TENSOR_CACHE.get(model)
    if cached is None or sync_id is None or cached[0] != sync_id:
        tensors = writable_tensors(model) | (_ADAPTED[model].factors if model in _ADAPTED else {})
        cached = _TENSOR_CACHE[model] = sync_id, tensors
    return cached[1]


class AdaptedModel(NamedTuple):
    """The inputs of a merge, by name: the weights that the model has loaded, on the host, and the factors."""

    base: dict[str, torch.Tensor]
    factors: dict[str, torch.Tensor]


_ADAPTED: WeakKeyDictionary[torch.nn.Module, AdaptedModel] = WeakKeyDictionary()


def keep_base(tensors: Mapping[str, torch.Tensor], order: Mapping[str, Any]) -> AdaptedModel:
    """Copy tensors to the host, with their scales, and create zeros for factors, see "keep"."""
    names = [name for name in order["tensors"] if name in tensors]
    names += [name + SCALE_SUFFIX for name in names if tensors[name].dtype == FP8]
    base = {name: tensors[name].to("cpu", copy=True) for name in names}
    some = next(iter(tensors.values()))
    factors = {
        name: torch.zeros(shape, dtype=getattr(torch, dtype), device=some.device)
        for name, (dtype, shape) in order["factors"].items()
    }
    return AdaptedModel(base, factors)


def merge_adapters(tensors: Mapping[str, torch.Tensor], adapted: AdaptedModel, order: Mapping[str, Any]) -> None:
    """Write W + scale * B A into the parts of tensors that have adapters, with the bits that the trainer would send.

    For the entries of "merges" see `reshard.plan.adapters.Merge`. An FP8 tensor is dequantised to bfloat16 first, and
    quantised again; no part begins or ends within a block.
    """
    for name, first, count, dim, offset, a_name, b_name in order["merges"]:
        a, b = (_entries(adapted.factors[factor], first, count) for factor in (a_name, b_name))
        size = a.shape[-1] if dim else b.shape[-2]
        target, base = (
            _entries(side[name], first, count).narrow(dim - 2, offset, size) for side in (tensors, adapted.base)
        )
        scales = base_scales = target  # only FP8 has them
        if target.dtype == FP8:
            blocks = dim - 2, offset // BLOCK, -(-size // BLOCK)
            scales, base_scales = (
                _entries(side[name + SCALE_SUFFIX], first, count).narrow(*blocks) for side in (tensors, adapted.base)
            )
        step = max(1, MERGED_AT_ONCE // target[0].numel())
        for start in range(0, len(target), step):
            part = slice(start, start + step)
            weights = base[part].to(target.device)
            if target.dtype != FP8:
                target[part].copy_(merge_adapter(weights, a[part], b[part], order["scale"]))
                continue
            weights = torch.stack(list(map(dequantise, weights, base_scales[part].to(target.device))))
            merged = merge_adapter(weights, a[part], b[part], order["scale"])
            for entry, weight in enumerate(merged, start):
                scales[entry].copy_(compute_scales(block_amax(weight, 0, 0, scales[entry].shape)))
                target[entry].copy_(quantise(weight, scales[entry], 0, 0))


def _entries(tensor: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """Return some experts' entries of a stack, or the whole tensor as a stack of one if `first` is -1."""
    return tensor[None] if first == -1 else tensor[first : first + count]


def writable_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the model's parameters and persistent buffers by name; shared ones once, by their first name.

    Scalar buffers are not weights: Gemma's normalizer follows from the hidden size.
    """
    tensors = {name: parameter.data for name, parameter in model.named_parameters()}
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if buffer.dim() and name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                tensors[name] = buffer
    return tensors


class _WriteTarget(NamedTuple):
    name: str
    target: torch.Tensor  # [rows, columns], a view of the model's tensor
    offset: int  # bytes into the bucket
    hash: torch.Tensor | None  # [1] int64, expected hash of the target after all writes

    @property
    def has_rows(self) -> bool:
        """False if the engine stores this tensor transposed."""
        return self.target.shape[1] == 1 or self.target.stride(1) == 1


def _read(tensors: dict[str, torch.Tensor], order: dict[str, Any], bucket: torch.Tensor) -> None:
    """Copy slices from the model's tensors to the bucket, where `_write` would take them from."""
    boxes = resolve_targets(tensors, order, bucket)
    pack([(box.target, box.offset) for box in boxes if box.has_rows], bucket)
    for box in (box for box in boxes if not box.has_rows):
        _view_bucket(bucket, box.offset, box.target.numel(), box.target.dtype).view(box.target.shape).copy_(box.target)


def _write(
    tensors: dict[str, torch.Tensor], order: dict[str, Any], bucket: torch.Tensor, writes: bool = True
) -> list[str]:
    """Copy slices from the bucket into the model's tensors; return the names of those whose hash then differs.

    writes: copy the slices before checking; False only checks.

    A slice [name, index, r0, r1, c0, c1, offset, hash_offset] is the box [r0, r1) x [c0, c1) of a tensor, taken as a
    matrix as by `matrix_shape`; or, if `index` is not -1, of entry `index` of a stack of such. Its
    elements start at byte `offset` of the bucket, in row-major order and in the tensor's own dtype. "tensor_dtype"
    states the dtype of each written name, so that bytes are never misinterpreted. If `hash_offset` is not -1, the
    bucket has there the hash (int64) that the box must have once everything is written, read back from the tensor.
    """
    boxes = resolve_targets(tensors, order, bucket)
    if writes:
        dense: list[tuple[torch.Tensor, int]] = []
        for box in boxes:
            if box.has_rows:
                dense.append((box.target, box.offset))
            else:
                source = _view_bucket(bucket, box.offset, box.target.numel(), box.target.dtype)
                box.target.copy_(source.view(box.target.shape))
        unpack(bucket, dense)
    checked = [(box, box.hash) for box in boxes if box.hash is not None]
    if not checked:
        return []
    hashes = device_hashes([box.target for box, _ in checked])
    matches = (hashes == torch.cat([value for _, value in checked])).tolist()  # the only device sync
    return list(dict.fromkeys(box.name for (box, _), is_equal in zip(checked, matches, strict=True) if not is_equal))


def resolve_targets(
    tensors: dict[str, torch.Tensor], order: dict[str, Any], bucket: torch.Tensor
) -> list[_WriteTarget]:
    """Return the views of all slices of an order. Raises ValueError if one does not fit."""
    for name, dtype in order["tensor_dtype"].items():
        if name in tensors and _dtype(tensors[name]) != dtype:
            raise ValueError(f"{name} is {_dtype(tensors[name])} in the engine, not {dtype}")
    return [_resolve_target(tensors, order["tensor_dtype"], bucket, entry) for entry in order["slices"]]


def _resolve_target(
    tensors: dict[str, torch.Tensor], dtypes: dict[str, str], bucket: torch.Tensor, entry: Sequence[Any]
) -> _WriteTarget:
    """Return the views that a slice names. Raises ValueError if the slice does not fit its tensor or the bucket."""
    name, index, r0, r1, c0, c1, offset, hash_offset = entry
    if name not in tensors:
        raise ValueError(f"the engine has no tensor {name}")
    if name not in dtypes:
        raise ValueError(f"the request does not state the dtype of {name}")
    tensor = tensors[name]
    if (index != -1 and tensor.dim() not in (2, 3)) or not tensor.dim() or not -1 <= index < len(tensor):
        raise ValueError(f"{name} has the shape {list(tensor.shape)}; index {index} does not fit it")
    matrix = tensor if index == -1 else tensor[index]
    if matrix.dim() != 2:
        matrix = matrix.view(matrix_shape(matrix.shape))
    rows, columns = matrix.shape
    if not (0 <= r0 < r1 <= rows and 0 <= c0 < c1 <= columns):
        raise ValueError(f"rows {r0}:{r1}, columns {c0}:{c1} are not in {name}, which has {rows} and {columns}")
    target = matrix[r0:r1, c0:c1]
    _view_bucket(bucket, offset, target.numel(), target.dtype)  # raises if the bucket is too small
    expected_hash = _view_bucket(bucket, hash_offset, 1, torch.int64) if hash_offset != -1 else None
    return _WriteTarget(name, target, offset, expected_hash)


def _view_bucket(bucket: torch.Tensor, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return [count] elements starting at byte `offset`. Raises ValueError if they are not within the bucket."""
    stop = offset + count * dtype.itemsize
    if offset < 0 or stop > bucket.numel():
        raise ValueError(f"bytes {offset}:{stop} are outside of the bucket, which has {bucket.numel()}")
    if offset % dtype.itemsize:
        raise ValueError(f"byte {offset} does not fit {_dtype(bucket.new_empty(0, dtype=dtype))}")
    return bucket[offset:stop].view(dtype)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()
