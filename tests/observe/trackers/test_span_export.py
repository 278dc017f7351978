"""Spans sent by OpenTelemetry's own exporter, received over HTTP."""

from __future__ import annotations

import gzip
import threading
import warnings
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from megarl.config import ConfigError
from megarl.observe.clock import STEP, Span
from megarl.observe.span_export import SpanExporter, check_span_export

pytestmark = pytest.mark.alone

SPANS = [
    Span("generate", "rollout", "main", 100.0, 104.0),
    Span("wait", "wait", "main", 101.0, 102.0),
    Span("reward", "reward", "rewards", 101.5, 103.0, (0, 1)),
    Span("actor_update", "actor", "main", 104.0, 109.5),
    Span("step 3", STEP, "main", 100.0, 110.0),
]


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Spans that arrive at a collector, each with the attributes of its rank."""
    trace_service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    spans = list[Any]()

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            request = trace_service.ExportTraceServiceRequest.FromString(body)
            for resource in request.resource_spans:
                attributes = {item.key: item.value for item in resource.resource.attributes}
                rank, run = attributes["megarl.rank"].int_value, attributes["megarl.run"].string_value
                assert run == "mine" and attributes["service.name"].string_value == "megarl"
                spans.extend((rank, span) for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield spans
    server.shutdown()
    server.server_close()


def export(rank: int, warn: Callable[[str], None], run_id: str = "start 1") -> None:
    exporter = SpanExporter("mine", run_id, rank, warn)
    exporter.write(SPANS)
    exporter.close()


def test_a_step_is_one_trace_of_all_ranks(received: list[Any]) -> None:
    warned = list[str]()
    for rank in (0, 1):
        export(rank, warned.append)
    assert warned == [] and len(received) == 2 * len(SPANS)
    assert len({span.trace_id for _, span in received}) == 1
    by_name = {(rank, span.name): span for rank, span in received}
    root = by_name[0, "step 3"]
    assert root.parent_span_id == b"" and by_name[1, "step 3, rank 1"].parent_span_id == root.span_id
    for rank, step in ((0, "step 3"), (1, "step 3, rank 1")):
        parents = {name: by_name[rank, name].parent_span_id for name in ("generate", "wait", "reward", "actor_update")}
        step_id, generation = by_name[rank, step].span_id, by_name[rank, "generate"].span_id
        assert parents == {"generate": step_id, "wait": generation, "reward": step_id, "actor_update": step_id}
    generate = by_name[1, "generate"]
    assert (generate.start_time_unix_nano, generate.end_time_unix_nano) == (100 * 10**9, 104 * 10**9)
    attributes = {item.key: item.value for item in by_name[0, "reward"].attributes}
    assert attributes["megarl.role"].string_value == "reward" and attributes["thread.name"].string_value == "rewards"
    assert [value.int_value for value in attributes["megarl.ranks"].array_value.values] == [0, 1]


def test_spans_outside_of_steps_are_a_trace(received: list[Any]) -> None:
    exporter = SpanExporter("mine", "start 1", 0, warnings.warn)
    exporter.write([Span("load", "actor", "main", 40.0, 90.0), *SPANS])
    exporter.write([Span("export", "actor", "main", 110.0, 112.0)])
    exporter.close()
    by_name = {span.name: span for _, span in received}
    assert by_name["load"].trace_id != by_name["step 3"].trace_id == by_name["generate"].trace_id
    assert len({by_name[name].trace_id for name in ("load", "export", "step 3")}) == 3
    roots = [span for _, span in received if span.name == "outside of steps"]
    assert {root.span_id for root in roots} == {by_name[name].parent_span_id for name in ("load", "export")}


def test_a_later_start_has_traces_of_its_own(received: list[Any]) -> None:
    export(0, warnings.warn)
    export(0, warnings.warn, run_id="start 2")
    assert len({span.trace_id for _, span in received}) == 2


def test_dead_collector_is_told_once(received: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://user:secret-word@127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    warned = list[str]()
    exporter = SpanExporter("mine", "start 1", 0, warned.append)
    for _ in range(3):
        exporter.write(SPANS)
    exporter.close()
    (text,) = warned
    assert "spans are not sent; is OTEL_EXPORTER_OTLP_ENDPOINT right?" in text and "secret-word" not in text


def test_missing_packages_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.observe.span_export.find_spec", lambda name: None)
    check_span_export(False)
    with pytest.raises(ConfigError, match="run `pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http`"):
        check_span_export(True)
