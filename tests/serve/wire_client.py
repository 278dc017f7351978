"""A client in Tinker's wire format, without the SDK."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megarl.serve.tinker_wire import MESSAGES, PROTOBUF

Inputs = Mapping[str, Sequence[float]]


class Failed(Exception):
    """The server has refused or failed a request."""


def datum(tokens: Sequence[int], targets: Sequence[int], **inputs: Sequence[float]) -> Any:
    """Return a Datum. inputs: by name, one number for each token."""
    message = MESSAGES["Datum"]()
    message.model_input.add().encoded_text.tokens = np.array(tokens, "<i4").tobytes()
    columns = [("target_tokens", np.array(targets, "<i8"), 2)]
    columns += [(name, np.array(values, "<f4"), 1) for name, values in inputs.items()]
    for name, values, dtype in columns:
        tensor = message.loss_fn_inputs.add(key=name).value
        tensor.dense, tensor.dtype = values.tobytes(), dtype
        tensor.shape.extend(values.shape)
    return message


def supervised(tokens: Sequence[int]) -> Any:
    """Return a Datum that predicts each token after the first."""
    return datum(tokens[:-1], tokens[1:], weights=[1.0] * (len(tokens) - 1))


def forward_backward_body(
    model_id: str, data: Sequence[Any], loss: str, seq_id: int = 0, forward_only: bool = False, **options: float
) -> bytes:
    message = MESSAGES["ForwardBackwardRequest"](
        model_id=model_id, seq_id=seq_id, loss_fn=loss, forward_only=forward_only
    )
    message.data.extend(data)
    for name, value in options.items():
        message.loss_fn_config.add(key=name, value=value)
    content: bytes = message.SerializeToString()
    return content


class WireClient:
    """One session. Results are those of finished requests."""

    def __init__(self, url: str, key: str = "tml-test") -> None:
        self.url, self.key, self._num_requests = url, key, 0
        self.session_id = self.post("create_session", {"tags": [], "user_metadata": {}, "sdk_version": "0"})[
            "session_id"
        ]

    def request(
        self, path: str, body: bytes | None, content_type: str = "application/json", method: str | None = None
    ) -> tuple[int, str, bytes]:
        """Return status, content type and content of a response."""
        headers = {"Content-Type": content_type, "X-API-Key": self.key}
        request = urllib.request.Request(f"{self.url}/api/v1/{path}", body, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return response.status, response.headers.get_content_type(), response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.headers.get_content_type(), error.read()

    def post(self, path: str, tree: Any) -> Any:
        return self._json(*self.request(path, json.dumps(tree).encode()))

    def get(self, path: str) -> Any:
        return self._json(*self.request(path, None))

    @staticmethod
    def _json(status: int, kind: str, content: bytes) -> Any:
        if status >= 400:
            raise Failed(f"{status}: {json.loads(content)['error']}")
        return json.loads(content) if content else None

    def result(self, request_id: str) -> Any:
        """Wait for a result: a message of protobuf's, or a JSON object."""
        status = 408
        while status == 408:
            body = json.dumps({"request_id": request_id}).encode()
            status, kind, content = self.request("retrieve_future", body)
        if kind == PROTOBUF:
            name = "SampleResponse" if ":sample:" in request_id else "ForwardBackwardOutput"
            return MESSAGES[name].FromString(content)
        tree = self._json(status, kind, content)
        if "error" in tree:
            raise Failed(f"{tree['category']}: {tree['error']}")
        return tree

    def create_model(self, base_model: str, number: int = 0, **fields: Any) -> str:
        tree = {"session_id": self.session_id, "model_seq_id": number, "base_model": base_model, **fields}
        return str(self.result(self.post("create_model", tree)["request_id"])["model_id"])

    def _next(self) -> int:
        self._num_requests += 1
        return self._num_requests

    def forward_backward(
        self,
        model_id: str,
        data: Sequence[Any],
        loss: str = "cross_entropy",
        forward_only: bool = False,
        **options: float,
    ) -> tuple[list[list[float]], dict[str, float]]:
        """Return the log-probs of each datum, and the metrics."""
        return self.passed(self.start_pass(model_id, data, loss, forward_only, **options))

    def start_pass(
        self, model_id: str, data: Sequence[Any], loss: str, forward_only: bool = False, **options: float
    ) -> str:
        """Send a request as of `forward_backward`, and return its id."""
        body = forward_backward_body(model_id, data, loss, self._next(), forward_only, **options)
        return str(self._json(*self.request("forward_backward", body, PROTOBUF))["request_id"])

    def passed(self, request_id: str) -> tuple[list[list[float]], dict[str, float]]:
        """Wait for the result of `start_pass`."""
        message = self.result(request_id)
        (field,) = message.loss_fn_outputs[0].fields
        offsets = np.frombuffer(field.value.offsets, "<i8") // 4
        values = np.frombuffer(field.value.data, "<f4")
        rows = [values[start:stop].tolist() for start, stop in zip(offsets[:-1], offsets[1:], strict=True)]
        return rows, {item.key: item.value for item in message.metrics}

    def optim_step(self, model_id: str, **params: float) -> dict[str, float]:
        tree = {"model_id": model_id, "adam_params": params, "seq_id": self._next()}
        metrics: dict[str, float] = self.result(self.post("optim_step", tree)["request_id"])["metrics"]
        return metrics

    def call(self, path: str, /, **fields: Any) -> Any:
        """Send a request that has a future, and return its result."""
        return self.result(self.post(path, {"seq_id": self._next(), **fields})["request_id"])

    def sampler(self, **fields: Any) -> str:
        tree = {"session_id": self.session_id, "sampling_session_seq_id": self._next(), **fields}
        return str(self.post("create_sampling_session", tree)["sampling_session_id"])

    def sample(self, sampler: str, prompt: Sequence[int], num_samples: int = 1, **fields: Any) -> Any:
        params = {name: fields.pop(name) for name in list(fields) if name in SAMPLING_PARAMS}
        tree = {
            "sampling_session_id": sampler,
            "num_samples": num_samples,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(prompt)}]},
            "sampling_params": params,
            **fields,
        }
        return self.call("asample", **tree)


SAMPLING_PARAMS = ("max_tokens", "seed", "stop", "temperature", "top_k", "top_p")


def tokens_of(sequence: Any) -> list[int]:
    ids: list[int] = np.frombuffer(sequence.tokens, "<i4").tolist()
    return ids


def logprobs_of(data: bytes) -> list[float]:
    values: list[float] = np.frombuffer(data, "<f4").tolist()
    return values
