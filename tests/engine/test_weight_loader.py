"""The weight loader on a plain module, called through an order buffer in shared memory, without SGLang."""

from __future__ import annotations

import base64
import json
import pickle
import re
from typing import Any

import pytest
import torch

from megarl.engine import weight_loader
from megarl.engine.engine_protocol import EngineError
from megarl.engine.sglang.sglang_backend import SGLangBackend
from megarl.engine.weight_sender import OrderBuffer
from megarl.parallel.device import allocate_shared
from megarl.reshard.run.checksum import device_hash

pytestmark = pytest.mark.alone


class Model(torch.nn.Module):
    """A stack of 3 experts [4, 6], a matrix [4, 6] in bf16, a vector [5], buffers, and a second name for the matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.Parameter(torch.zeros(3, 4, 6))
        self.matrix = torch.nn.Parameter(torch.zeros(4, 6, dtype=torch.bfloat16))
        self.vector = torch.nn.Parameter(torch.zeros(5), requires_grad=False)
        self.again = self.matrix
        self.register_buffer("kept", torch.zeros(2))
        self.register_buffer("computed", torch.zeros(2), persistent=False)
        self.register_buffer("constant", torch.tensor(0.0))


DTYPES = {"experts": "float32", "matrix": "bfloat16", "vector": "float32"}


def execute(
    model: torch.nn.Module, order: Any, bucket: torch.Tensor | None = None, answer_bytes: int = 1 << 20
) -> dict[str, Any]:
    answer = torch.zeros(answer_bytes, dtype=torch.uint8)
    text = order if isinstance(order, bytes) else json.dumps(order).encode()
    tensors = [("order", torch.frombuffer(bytearray(text), dtype=torch.uint8)), ("answer", answer)]
    weight_loader.load(model, tensors + ([] if bucket is None else [("bucket", bucket)]))
    return weight_loader.read_answer(answer)


def write_order(*slices: list[Any], **changes: Any) -> dict[str, Any]:
    return {"do": "write", "version": 1, "tensor_dtype": DTYPES, "slices": list(slices), **changes}


def make_bucket(*tensors: torch.Tensor) -> torch.Tensor:
    """Return a bucket with the tensors in turn, each at a multiple of 16 bytes."""
    parts = []
    for tensor in tensors:
        data = tensor.contiguous().view(-1).view(torch.uint8)
        parts += [data, data.new_zeros(-len(data) % 16)]
    return to_shared(torch.cat(parts))


def to_shared(data: torch.Tensor) -> torch.Tensor:
    return allocate_shared(len(data)).copy_(data)


def test_describe_lists_parameters_and_saved_buffers() -> None:
    assert execute(Model(), {"do": "describe"}) == {
        "tensors": {
            "experts": ["float32", [3, 4, 6]],
            "matrix": ["bfloat16", [4, 6]],
            "vector": ["float32", [5]],
            "kept": ["float32", [2]],
        },
        "odd": [],
    }


def test_writes_only_the_given_slices() -> None:
    model = Model()
    a, b, c = torch.randn(2, 3), torch.randn(3, 2).bfloat16(), torch.randn(3)
    hashes = torch.tensor([device_hash(a), device_hash(b), device_hash(c)])
    bucket = make_bucket(a, b, c, hashes)  # at 0, 32, 48, 64
    order = write_order(
        ["experts", 2, 1, 3, 2, 5, 0, 64],
        ["matrix", -1, 1, 4, 4, 6, 32, 72],
        ["vector", -1, 2, 5, 0, 1, 48, 80],
        ["experts", 0, 0, 2, 0, 3, 0, -1],
    )
    assert execute(model, order, bucket) == {"wrong": []}
    expected = Model()
    with torch.no_grad():
        expected.experts[2, 1:3, 2:5] = a
        expected.experts[0, 0:2, 0:3] = a
        expected.matrix[1:4, 4:6] = b
        expected.vector[2:5] = c
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_writes_one_vector_of_a_stack() -> None:
    """As the biases of an expert."""
    model, part = Model(), torch.randn(3).bfloat16()
    expected = model.matrix.data.clone()
    expected[2, 1:4] = part
    assert execute(model, write_order(["matrix", 2, 1, 4, 0, 1, 0, -1]), make_bucket(part)) == {"wrong": []}
    assert torch.equal(model.matrix.data, expected)


def test_hash_detects_a_flipped_bit() -> None:
    matrix, vector = torch.randn(4, 6).bfloat16(), torch.randn(5)
    bucket = make_bucket(matrix, vector, torch.tensor([device_hash(matrix), device_hash(vector)]))  # at 0, 48, 80
    checked = write_order(["matrix", -1, 0, 4, 0, 6, 0, 80], ["vector", -1, 0, 5, 0, 1, 48, 88])
    assert execute(Model(), checked, bucket) == {"wrong": []}
    bucket[11] ^= 4
    assert execute(Model(), checked, bucket) == {"wrong": ["matrix"]}
    unchecked = write_order(["matrix", -1, 0, 4, 0, 6, 0, -1], ["vector", -1, 0, 5, 0, 1, 48, 88])
    assert execute(Model(), unchecked, bucket) == {"wrong": []}


def test_compare_names_differing_tensors_and_writes_nothing() -> None:
    model, vector = Model(), torch.randn(5)
    original = model.matrix.data.clone()
    bucket = make_bucket(original, vector, torch.tensor([device_hash(original), device_hash(vector)]))  # at 0, 48, 80
    compare = write_order(["matrix", -1, 0, 4, 0, 6, 0, 80], ["vector", -1, 0, 5, 0, 1, 48, 88], do="compare")
    assert execute(model, compare, bucket) == {"differ": ["vector"]}
    assert torch.equal(model.matrix.data, original) and not torch.equal(model.vector.data, vector)
    model.matrix.data[0, 0] += 1
    assert execute(model, compare, bucket) == {"differ": ["matrix", "vector"]}
    assert "needs a bucket" in execute(model, compare)["error"]


def test_hash_detects_overlapping_writes() -> None:
    """The hash is of the final tensor, not of the copied slice."""
    first, second = torch.ones(5), torch.full((5,), 2.0)
    bucket = make_bucket(first, second, torch.tensor([device_hash(first), device_hash(second)]))  # at 0, 32, 64
    order = write_order(["vector", -1, 0, 5, 0, 1, 0, 64], ["vector", -1, 0, 5, 0, 1, 32, 72])
    assert execute(Model(), order, bucket) == {"wrong": ["vector"]}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (["nonsense", -1, 0, 1, 0, 1, 0, -1], "the engine has no tensor nonsense"),
        (["kept", -1, 0, 1, 0, 1, 0, -1], "does not state the dtype of kept"),
        (["matrix", -1, 0, 5, 0, 6, 0, -1], "rows 0:5, columns 0:6 are not in matrix, which has 4 and 6"),
        (["matrix", -1, 0, 4, -1, 6, 0, -1], "rows 0:4, columns -1:6 are not in matrix"),
        (["matrix", -1, 2, 2, 0, 6, 0, -1], "rows 2:2"),
        (["vector", -1, 0, 5, 0, 2, 0, -1], "which has 5 and 1"),
        (["matrix", 0, 0, 4, 0, 6, 0, -1], "rows 0:4, columns 0:6 are not in matrix, which has 6 and 1"),
        (["vector", 0, 0, 1, 0, 1, 0, -1], r"vector has the shape \[5\]; index 0 does not fit it"),
        (["experts", -1, 0, 4, 0, 6, 0, -1], "rows 0:4, columns 0:6 are not in experts, which has 3 and 24"),
        (["experts", 3, 0, 4, 0, 6, 0, -1], "index 3 does not fit it"),
        (["experts", -2, 0, 4, 0, 6, 0, -1], "index -2 does not fit it"),
        (["experts", 0, 0, 4, 0, 6, 0, -1], "bytes 0:96 are outside of the bucket, which has 64"),
        (["matrix", -1, 0, 4, 0, 6, -2, -1], "bytes -2:46 are outside of the bucket"),
        (["matrix", -1, 0, 4, 0, 6, 1, -1], "byte 1 does not fit bfloat16"),
        (["matrix", -1, 0, 4, 0, 6, 0, 60], "bytes 60:68 are outside of the bucket"),
        (["matrix", -1, 0, 4], "not enough values to unpack"),
    ],
    ids=str,
)
def test_invalid_slice_is_an_error_and_writes_nothing(entry: list[Any], message: str) -> None:
    model = Model()
    answer = execute(model, write_order(["vector", -1, 0, 5, 0, 1, 0, -1], entry), torch.ones(64, dtype=torch.uint8))
    assert answer.keys() == {"error"} and re.search(message, answer["error"]), answer
    assert not any(tensor.any() for tensor in model.state_dict().values())


def test_wrong_dtype_is_an_error() -> None:
    order = write_order(["matrix", -1, 0, 4, 0, 6, 0, -1], tensor_dtype={"matrix": "float32"})
    error = execute(Model(), order, torch.ones(256, dtype=torch.uint8))["error"]
    assert error == "ValueError: matrix is bfloat16 in the engine, not float32"


@pytest.mark.parametrize("order", [b"no JSON", b"[]", {}, {"do": "sing"}, {"do": "write"}, write_order()], ids=str)
def test_malformed_order_is_an_error(order: Any) -> None:
    assert execute(Model(), order).keys() == {"error"}


def test_answer_too_long_for_the_buffer_is_an_error() -> None:
    assert "for a buffer of" in execute(Model(), {"do": "describe"}, answer_bytes=100)["error"]


def test_load_does_not_raise_without_an_answer_buffer(capfd: pytest.CaptureFixture[str]) -> None:
    weight_loader.load(Model(), [])
    assert "cannot be sent" in capfd.readouterr().out


def decode_payload(payload: str) -> list[tuple[str, torch.Tensor]]:
    return pickle.loads(base64.b64decode(payload))


def test_order_buffer_carries_orders_and_answers() -> None:
    model, buffer = Model(), OrderBuffer(SGLangBackend())
    bucket = make_bucket(torch.arange(5.0))
    for shift in range(3):  # the bucket keeps its place after its first use
        bucket[:20].view(torch.float32)[:] = torch.arange(5.0) + shift
        weight_loader.load(
            model, decode_payload(buffer.make_payload(write_order(["vector", -1, 0, 5, 0, 1, 0, -1]), bucket))
        )
        assert buffer.read_answer() == {"wrong": []}
        assert model.vector.tolist() == [shift, shift + 1, shift + 2, shift + 3, shift + 4]
    weight_loader.load(model, decode_payload(buffer.make_payload({"do": "describe"})))
    assert buffer.read_answer()["tensors"]["vector"] == ["float32", [5]]


def test_order_buffer_ignores_old_answers() -> None:
    buffer = OrderBuffer(SGLangBackend())
    weight_loader.load(Model(), decode_payload(buffer.make_payload({"do": "describe"})))
    buffer.read_answer()
    buffer.make_payload({"do": "describe"})  # nobody executes it
    with pytest.raises(EngineError, match="did not answer"):
        buffer.read_answer()
    weight_loader.load(Model(), decode_payload(buffer.make_payload({"do": "sing"})))
    with pytest.raises(EngineError, match="failed to execute a request: ValueError: unknown order 'sing'"):
        buffer.read_answer()


def test_scans_tensor_names_once_per_weight_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """And again in the next, because SGLang may replace tensors when it recomputes derived ones."""
    model, scans, scan = Model(), [], weight_loader.writable_tensors

    def count_and_scan(module: torch.nn.Module) -> dict[str, torch.Tensor]:
        scans.append(module)
        return scan(module)

    monkeypatch.setattr(weight_loader, "writable_tensors", count_and_scan)
    data = make_bucket(torch.full((5,), 3.0))
    first = ["vector", -1, 0, 5, 0, 1, 0, -1]
    for sync_id, expected in (("a", 1), ("a", 1), ("b", 2), ("b", 2), ("a", 3)):
        assert execute(model, write_order(first, sync_id=sync_id), data) == {"wrong": []}
        assert len(scans) == expected
    model.vector = torch.nn.Parameter(torch.zeros(5), requires_grad=False)
    assert execute(model, write_order(first, sync_id="c"), data) == {"wrong": []}
    assert model.vector.tolist() == [3.0] * 5
    assert execute(model, write_order(first), data) == {"wrong": []} and len(scans) == 5  # without a weight sync
