"""The wire format: what is parsed from a request, and what is refused, naming the datum and the field."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import wire_client

from megarl.serve import tinker_wire
from megarl.serve.tinker_wire import Fields, RequestRefused, SampledSequence, Samples


def test_parses_examples_and_options() -> None:
    data = [wire_client.supervised([3, 1, 4]), wire_client.datum([7], [8], advantages=[0.5], logprobs=[-1.25])]
    body = wire_client.forward_backward_body("m", data, "ppo", 5, clip_low_threshold=0.75)
    request = tinker_wire.parse_forward_backward(body, 2)
    assert (request.model_id, request.seq_id, request.loss, request.forward_only) == ("m", 5, "ppo", False)
    assert request.options == {"clip_low_threshold": 0.75}
    first, second = request.examples
    assert first.tokens.tolist() == [3, 1] and first.targets.tolist() == [1, 4]
    assert {name: column.tolist() for name, column in second.inputs.items()} == {
        "advantages": [0.5],
        "logprobs": [-1.25],
    }


def broken(**changes: Any) -> bytes:
    """Return a body whose second datum is broken."""
    bad = wire_client.supervised([3, 1, 4])
    tensor = bad.loss_fn_inputs[1].value
    if "image" in changes:
        bad.model_input.add().image.data = b"x"
    if "shape" in changes:
        tensor.shape[:] = changes["shape"]
    if "dense" in changes:
        tensor.dense = changes["dense"]
    if "dtype" in changes:
        tensor.dtype = changes["dtype"]
    if "sparse" in changes:
        tensor.sparse_csr.values = b""
        tensor.ClearField("dense")
    if "targets" in changes:
        del bad.loss_fn_inputs[0]
    return wire_client.forward_backward_body("m", [wire_client.supervised([1, 2]), bad], "cross_entropy")


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"\xff\xff", "not a ForwardBackwardRequest"),
        (wire_client.forward_backward_body("m", [], "ppo"), "1 to 2 data, not 0"),
        (wire_client.forward_backward_body("m", [wire_client.supervised([1, 2])] * 3, "ppo"), "1 to 2 data, not 3"),
        (wire_client.forward_backward_body("m", [wire_client.datum([], [])], "ppo"), "datum 0: model_input is empty"),
        (broken(image=True), "datum 1: model_input has an image"),
        (broken(shape=[3]), r"datum 1: weights has the shape \[3\] and 2 values"),
        (broken(shape=[1, 2]), r"datum 1: weights has the shape \[1, 2\]"),
        (broken(dense=b"\0" * 12, shape=[3]), "needs one for each of the 2 input tokens"),
        (broken(dense=b"\0" * 7), "datum 1: weights has 7 bytes"),
        (broken(dense=np.array([1, math.nan], "<f4").tobytes()), "datum 1: weights has values that are not finite"),
        (broken(dtype=9), "datum 1: weights has the dtype 9"),
        (broken(sparse=True), "datum 1: weights is sparse"),
        (broken(targets=True), "datum 1: loss_fn_inputs lacks target_tokens"),
        (wire_client.forward_backward_body("m", [wire_client.supervised([1, 2])], "ppo", a=math.inf), "not finite"),
    ],
)
def test_refuses_broken_requests(body: bytes, text: str) -> None:
    with pytest.raises(RequestRefused, match=text):
        tinker_wire.parse_forward_backward(body, 2)


def sample_tree(**changes: Any) -> dict[str, Any]:
    params = {name: changes.pop(name) for name in list(changes) if name in wire_client.SAMPLING_PARAMS}
    return {"prompt": {"chunks": [{"tokens": [1, 2, 3]}]}, "sampling_params": params, **changes}


def test_parses_sampling_parameters() -> None:
    tree = sample_tree(max_tokens=4, seed=9, stop="x", temperature=0.5, top_k=3, top_p=0.9)
    tree |= {"num_samples": 2, "prompt_logprobs": True, "topk_prompt_logprobs": 1, "prompt_logprobs_last_n": 2}
    parsed = tinker_wire.parse_sample(Fields(tree, "asample"), 10, 8)
    assert parsed == tinker_wire.SampleRequest([1, 2, 3], 2, 4, 9, ["x"], 0.5, 3, 0.9, True, 1, 0, 1)
    default = tinker_wire.parse_sample(Fields(sample_tree(), "asample"), 10, 8)
    assert (default.max_tokens, default.seed, default.stop, default.temperature) == (None, None, None, 1.0)
    assert (default.top_k, default.top_p, default.num_samples, default.first_scored) == (-1, 1.0, 1, 0)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"prompt": {"chunks": []}}, "has 0 tokens"),
        ({"prompt": {"chunks": [{"tokens": [1] * 8}]}}, "has 8 tokens, but may have 1 to 7"),
        ({"prompt": {"chunks": [{"tokens": [1, 10]}]}}, "prompt: 10 is no token id"),
        ({"prompt": {"chunks": [{"data": "x"}]}}, "chunk without tokens"),
        ({"prompt": 3}, "prompt is not a JSON object"),
        ({"temperature": -1}, "temperature is not a number from 0 to 100"),
        ({"temperature": "1"}, "temperature is not a number"),
        ({"stop": [1, "x"]}, "stop is neither"),
        ({"max_tokens": 0}, "max_tokens is not a whole number from 1"),
        ({"num_samples": True}, "num_samples is not a whole number"),
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k is not supported"),
    ],
)
def test_refuses_broken_samples(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(RequestRefused, match=text):
        tinker_wire.parse_sample(Fields(sample_tree(**changes), "asample"), 10, 8)


def test_formats_results() -> None:
    rows = [np.array([-1.0, -2.0], np.float32), np.array([-3.0], np.float32)]
    content = tinker_wire.format_forward_backward(rows, {"loss:sum": 2.5})
    message = tinker_wire.MESSAGES["ForwardBackwardOutput"].FromString(content)
    (field,) = message.loss_fn_outputs[0].fields
    assert np.frombuffer(field.value.offsets, "<i8").tolist() == [0, 8, 12] and field.key == "logprobs"
    assert np.frombuffer(field.value.data, "<f4").tolist() == [-1.0, -2.0, -3.0]
    assert [(item.key, item.value) for item in message.metrics] == [("loss:sum", 2.5)]
    topk = [[(4, -0.5), (5, -1.5)], []]
    samples = Samples([SampledSequence([4, 6], [-0.5, -1.0], "length", topk)], [math.nan, -1.0], None, 3)
    message = tinker_wire.MESSAGES["SampleResponse"].FromString(tinker_wire.format_samples(samples))
    (sequence,) = message.sequences
    assert wire_client.tokens_of(sequence) == [4, 6] and sequence.stop_reason == 1
    assert wire_client.logprobs_of(message.prompt_logprobs)[1] == -1.0 and message.prompt_cache_hit_tokens == 3
    ids = np.frombuffer(sequence.topk_sampled_logprobs.token_ids, "<i4").reshape(2, 2)
    assert ids.tolist() == [[4, 5], [0, 0]]
