"""Tinker's wire format: protobuf and JSON bodies as typed values, and results as bodies.

`forward_backward` has a protobuf body, other requests have JSON. Results of `forward_backward` and `asample` are
protobuf, others JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

PROTOBUF = "application/x-protobuf"
_PACKAGE = "tinker_public"
_MESSAGES = {
    # name -> fields: name:type=number, with * if repeated, ? if optional; types are scalars or messages
    "Tensor": "dense?:bytes=1 sparse_csr:SparseCsr=2 dtype:int32=3 shape*:int64=4",
    "SparseCsr": "values:bytes=1",
    "TopkLogprobs": "token_ids:bytes=1 logprobs:bytes=2 k:uint32=3 length:uint32=4",
    "SampledSequence": "stop_reason:int32=1 tokens:bytes=2 logprobs?:bytes=3 topk_sampled_logprobs:TopkLogprobs=4",
    "SampleResponse": "sequences*:SampledSequence=1 prompt_logprobs?:bytes=2 topk_prompt_logprobs:TopkLogprobs=3 "
    "prompt_cache_hit_tokens:int32=4",
    "BatchedTensor": "data:bytes=1 offsets:bytes=2 dtype:int32=3 trailing_shape*:int64=4",
    "TensorField": "key:string=1 value:BatchedTensor=2",
    "ArrayRecord": "type_tag:string=1 fields*:TensorField=2 num_datums:int64=3",
    "Metric": "key:string=1 value:double=2",
    "ForwardBackwardOutput": "loss_fn_output_type:string=1 loss_fn_outputs*:ArrayRecord=2 metrics*:Metric=3",
    "ForwardBackwardRequest": "model_id:string=1 seq_id:int32=2 data*:Datum=3 loss_fn:string=4 "
    "loss_fn_config*:Metric=5 forward_only:bool=6 loss_fn_config_v2*:LossOption=7",
    "LossOption": "key:string=1 value:LossOptionValue=2",
    "LossOptionValue": "number?:double=1 text?:string=2",
    "Datum": "model_input*:Chunk=1 loss_fn_inputs*:LossInput=2",
    "LossInput": "key:string=1 value:Tensor=2",
    "Chunk": "encoded_text:EncodedText=1 image:Opaque=2 dmel:Opaque=3",
    "EncodedText": "tokens:bytes=1",
    "Opaque": "data:bytes=1",
}
"""The messages that are used, as far as they are used. A map is on the wire a list of messages with key and value."""


def _make_messages() -> dict[str, Any]:
    """Return the message classes of `_MESSAGES` by name."""
    file = descriptor_pb2.FileDescriptorProto(name="megarl_tinker.proto", package=_PACKAGE, syntax="proto3")
    kinds: Any = descriptor_pb2.FieldDescriptorProto
    for name, text in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for part in text.split():
            head, _, number = part.partition("=")
            label, _, kind = head.partition(":")
            entry = message.field.add(name=label.rstrip("*?"), number=int(number))
            entry.label = kinds.LABEL_REPEATED if label.endswith("*") else kinds.LABEL_OPTIONAL
            if kind in _MESSAGES:
                entry.type, entry.type_name = kinds.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
            else:
                entry.type = getattr(kinds, f"TYPE_{kind.upper()}")
            if label.endswith("?"):
                entry.proto3_optional, entry.oneof_index = True, len(message.oneof_decl)
                message.oneof_decl.add(name=f"_{entry.name}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _MESSAGES
    }


MESSAGES = _make_messages()
_FLOAT32, _INT64, _INT32 = 1, 2, 3
_DTYPES: dict[int, np.dtype[Any]] = {_FLOAT32: np.dtype("<f4"), _INT64: np.dtype("<i8"), _INT32: np.dtype("<i4")}
NO_LOGPROB = -99999.0
"""Log-prob of a missing entry in a matrix of the likeliest tokens, by which the SDK recognizes it."""
_STOP_REASONS = {"stop": 0, "length": 1}


class RequestRefused(Exception):
    """A client's request cannot be executed. The message tells the client why; nothing has changed."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Example:
    """One `Datum`: input tokens, and for each of them the target, the token to predict after it, and the loss's inputs.

    tokens, targets: [N] int64. inputs: [N] float32 by name, such as weights, logprobs and advantages.
    """

    tokens: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    inputs: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict)


@dataclass(frozen=True)
class ForwardBackwardRequest:
    model_id: str
    seq_id: int
    examples: tuple[Example, ...]
    loss: str
    options: dict[str, float]
    forward_only: bool


@dataclass(frozen=True)
class SampleRequest:
    """A prompt to continue. stop: None for the model's end tokens, [] for none, else texts or token ids."""

    prompt: list[int]
    num_samples: int
    max_tokens: int | None
    seed: int | None
    stop: list[str] | list[int] | None
    temperature: float
    top_k: int
    top_p: float
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_logprobs: int = 0
    first_scored: int = 0
    """The first prompt token with a log-prob."""


@dataclass(frozen=True)
class SampledSequence:
    """A sampled sequence. topk: (token id, log-prob) of the likeliest tokens at each position, if requested."""

    token_ids: list[int]
    logprobs: list[float]
    stop_reason: str
    topk: list[list[tuple[int, float]]] | None = None


@dataclass(frozen=True)
class Samples:
    """Response to a `SampleRequest`. prompt_logprobs: NaN where there is none, as for the first token."""

    sequences: list[SampledSequence]
    prompt_logprobs: list[float] | None = None
    topk_prompt: list[list[tuple[int, float]]] | None = None
    cached_tokens: int = 0


# --- requests


def parse_forward_backward(body: bytes, max_examples: int) -> ForwardBackwardRequest:
    """Parse the body of `forward_backward`. Raises RequestRefused."""
    message = MESSAGES["ForwardBackwardRequest"]()
    try:
        message.ParseFromString(body)
    except DecodeError:
        raise RequestRefused("the body is not a ForwardBackwardRequest in protobuf") from None
    if not 1 <= len(message.data) <= max_examples:
        raise RequestRefused(f"a request has 1 to {max_examples} data, not {len(message.data)}")
    options = {item.key: float(item.value) for item in message.loss_fn_config}
    for item in message.loss_fn_config_v2:
        if item.value.HasField("text"):
            raise RequestRefused(f"loss_fn_config[{item.key!r}] is a text; the losses here have numbers only")
        options[item.key] = float(item.value.number)
    if bad := [name for name, value in options.items() if not math.isfinite(value)]:
        raise RequestRefused(f"loss_fn_config[{bad[0]!r}] is not finite")
    examples = tuple(_parse_datum(datum, f"datum {number}") for number, datum in enumerate(message.data))
    return ForwardBackwardRequest(
        message.model_id, message.seq_id, examples, message.loss_fn, options, message.forward_only
    )


def _parse_datum(datum: Any, where: str) -> Example:
    chunks = []
    for chunk in datum.model_input:
        if not chunk.HasField("encoded_text"):
            raise RequestRefused(f"{where}: model_input has an image or audio chunk; only encoded text is supported")
        chunks.append(_from_bytes(chunk.encoded_text.tokens, np.dtype("<i4"), f"{where}: model_input"))
    tokens = np.concatenate([np.zeros(0, np.int64), *chunks]).astype(np.int64)
    columns = {
        item.key: _parse_tensor(item.value, len(tokens), f"{where}: {item.key}") for item in datum.loss_fn_inputs
    }
    if not len(tokens):
        raise RequestRefused(f"{where}: model_input is empty")
    if (targets := columns.pop("target_tokens", None)) is None:
        raise RequestRefused(f"{where}: loss_fn_inputs lacks target_tokens")
    if targets.dtype.kind != "i":
        raise RequestRefused(f"{where}: target_tokens are not integers")
    inputs = {name: column.astype(np.float32) for name, column in columns.items()}
    for name, column in inputs.items():
        if not np.isfinite(column).all():
            raise RequestRefused(f"{where}: {name} has values that are not finite")
    return Example(tokens, targets.astype(np.int64), inputs)


def _parse_tensor(tensor: Any, length: int, where: str) -> npt.NDArray[Any]:
    """Return a tensor as a row of `length` numbers."""
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise RequestRefused(f"{where} has the dtype {tensor.dtype}, not float32, int64 or int32")
    if not tensor.HasField("dense"):
        raise RequestRefused(f"{where} is sparse; only dense tensors with one number per input token are supported")
    shape, values = list(tensor.shape), _from_bytes(tensor.dense, dtype, where)
    if len(shape) > 1 or (shape and shape[0] != len(values)) or len(values) != length:
        raise RequestRefused(
            f"{where} has the shape {shape or [len(values)]} and {len(values)} values; it needs one for each of the "
            f"{length} input tokens"
        )
    return values


def _from_bytes(data: bytes, dtype: np.dtype[Any], where: str) -> npt.NDArray[Any]:
    if len(data) % dtype.itemsize:
        raise RequestRefused(f"{where} has {len(data)} bytes, no multiple of {dtype.itemsize}")
    return np.frombuffer(data, dtype)


def check_tokens(ids: npt.ArrayLike, vocab_size: int, where: str) -> None:
    """Raise RequestRefused unless these are token ids of a vocabulary of this size."""
    values = np.asarray(ids)
    if values.size and (values.min() < 0 or values.max() >= vocab_size):
        wrong = values[(values < 0) | (values >= vocab_size)][0]
        raise RequestRefused(f"{where}: {wrong} is no token id; the vocabulary has {vocab_size} tokens, from 0")


class Fields:
    """The fields of a JSON object, read with their types. Raises RequestRefused, naming the field."""

    def __init__(self, tree: Any, where: str) -> None:
        if not isinstance(tree, Mapping):
            raise RequestRefused(f"{where} is not a JSON object")
        self._tree, self._where = tree, where

    def text(self, name: str, default: str | None = None) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise RequestRefused(f"{self._where}: {name} is not a text")
        return value

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        value = self._get(name, default)
        if type(value) is not int or not low <= value <= high:
            raise RequestRefused(f"{self._where}: {name} is not a whole number from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        value = self._get(name, default)
        if type(value) not in (int, float) or not low <= value <= high:
            raise RequestRefused(f"{self._where}: {name} is not a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise RequestRefused(f"{self._where}: {name} is not true or false")
        return value

    def has(self, name: str) -> bool:
        return self._tree.get(name) is not None

    def raw(self, name: str) -> Any:
        return self._tree.get(name)

    def nested(self, name: str) -> Fields:
        return Fields(self._tree.get(name), f"{self._where}: {name}")

    def _get(self, name: str, default: Any) -> Any:
        value = self._tree.get(name)
        if value is None and default is None:
            raise RequestRefused(f"{self._where} lacks {name}")
        return default if value is None else value


def parse_sample(fields: Fields, vocab_size: int, max_context: int) -> SampleRequest:
    """Parse the body of `asample`. Raises RequestRefused."""
    for name in ("target_prompt_logprobs", "prompt_alt_tokens_k"):
        if fields.raw(name):
            raise RequestRefused(f"asample: {name} is not supported")
    prompt = parse_prompt(fields.nested("prompt"))
    check_tokens(prompt, vocab_size, "prompt")
    if not 1 <= len(prompt) < max_context:
        raise RequestRefused(f"the prompt has {len(prompt)} tokens, but may have 1 to {max_context - 1}")
    params = fields.nested("sampling_params")
    stop: Any = params.raw("stop")
    stop = [stop] if isinstance(stop, str) else stop
    if stop is not None and not (
        isinstance(stop, list) and (all(type(x) is int for x in stop) or all(isinstance(x, str) for x in stop))
    ):
        raise RequestRefused("sampling_params: stop is neither a text nor a list of texts or of token ids")
    has_logprobs = fields.flag("prompt_logprobs")
    last = fields.integer("prompt_logprobs_last_n", 1, len(prompt), len(prompt))
    return SampleRequest(
        prompt,
        num_samples=fields.integer("num_samples", 1, 1024, 1),
        max_tokens=params.integer("max_tokens", 1, 2**31 - 1) if params.has("max_tokens") else None,
        seed=params.integer("seed", -(2**63), 2**64 - 1) if params.has("seed") else None,
        stop=stop,
        temperature=params.number("temperature", 0, 100, 1.0),
        top_k=params.integer("top_k", -1, 2**31 - 1, -1),
        top_p=params.number("top_p", 1e-6, 1, 1.0),
        prompt_logprobs=has_logprobs,
        topk_prompt_logprobs=fields.integer("topk_prompt_logprobs", 0, 100, 0),
        topk_logprobs=fields.integer("topk_sample_logprobs", 0, 100, 0),
        first_scored=len(prompt) - last,
    )


def parse_prompt(fields: Fields) -> list[int]:
    """Return the token ids of a ModelInput in JSON."""
    chunks, ids = fields.raw("chunks"), list[int]()
    for chunk in chunks if isinstance(chunks, list) else ():
        tokens = chunk.get("tokens") if isinstance(chunk, dict) else None
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise RequestRefused("the prompt has a chunk without tokens; only encoded text is supported")
        ids += tokens
    return ids


# --- results


def format_forward_backward(logprobs: Sequence[npt.NDArray[np.float32]], metrics: Mapping[str, float]) -> bytes:
    """Encode the result of `forward_backward`: the targets' log-probs of each datum, and metrics."""
    result = MESSAGES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    for name, value in metrics.items():
        result.metrics.add(key=name, value=value)
    record = result.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(logprobs))
    values = record.fields.add(key="logprobs").value
    values.data = b"".join(row.astype("<f4").tobytes() for row in logprobs)
    values.offsets = np.cumsum([0, *(4 * len(row) for row in logprobs)], dtype="<i8").tobytes()
    values.dtype = _FLOAT32
    content: bytes = result.SerializeToString()
    return content


def format_samples(samples: Samples) -> bytes:
    """Encode the result of `asample`."""
    result = MESSAGES["SampleResponse"](prompt_cache_hit_tokens=samples.cached_tokens)
    for item in samples.sequences:
        sequence = result.sequences.add(stop_reason=_STOP_REASONS[item.stop_reason])
        sequence.tokens = np.array(item.token_ids, "<i4").tobytes()
        sequence.logprobs = np.array(item.logprobs, "<f4").tobytes()
        if item.topk is not None:
            _fill_topk(sequence.topk_sampled_logprobs, item.topk)
    if samples.prompt_logprobs is not None:
        result.prompt_logprobs = np.array(samples.prompt_logprobs, "<f4").tobytes()
    if samples.topk_prompt is not None:
        _fill_topk(result.topk_prompt_logprobs, samples.topk_prompt)
    content: bytes = result.SerializeToString()
    return content


def _fill_topk(message: Any, rows: Sequence[Sequence[tuple[int, float]]]) -> None:
    """Write rows of (token id, log-prob) as two matrices; missing entries have the id 0 and NO_LOGPROB."""
    width = max(map(len, rows), default=0)
    ids, values = np.zeros((len(rows), width), "<i4"), np.full((len(rows), width), NO_LOGPROB, "<f4")
    for number, row in enumerate(rows):
        for place, (token, logprob) in enumerate(row):
            ids[number, place], values[number, place] = token, logprob
    message.token_ids, message.logprobs, message.k, message.length = ids.tobytes(), values.tobytes(), width, len(rows)
