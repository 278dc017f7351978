"""Sends the spans of the timeline as OpenTelemetry traces, one per step with the spans of all ranks.

OTEL_EXPORTER_OTLP_ENDPOINT and the other variables of OpenTelemetry's exporter say where they go, by default to
http://localhost:4318.
"""

from __future__ import annotations

import hashlib
import logging
import socket
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from typing import Any

from megarl.config import ConfigError
from megarl.observe.clock import STEP, Span
from megarl.observe.trackers.adapter import redact_secrets

PACKAGES = "opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"
REMEDY = "spans are not sent; is OTEL_EXPORTER_OTLP_ENDPOINT right?"


def check_span_export(is_enabled: bool) -> None:
    """Raise ConfigError if `track.opentelemetry` is on and its packages are not installed."""
    try:
        is_installed = find_spec("opentelemetry.sdk") and find_spec("opentelemetry.exporter.otlp.proto.http")
    except ImportError:
        is_installed = None
    if is_enabled and not is_installed:
        raise ConfigError(
            f"track.opentelemetry: OpenTelemetry is not installed; run `pip install {' '.join(PACKAGES)}`, or remove "
            "the key"
        )


class SpanExporter:
    """Exports one rank's spans in the background; a full queue or a dead collector costs spans, never time.

    Spans of a step are the children of its `step N`, and spans within a span of the same thread those of that. All
    ranks compute the same trace id for a step, from the name of the run and the step's name, and the same id for the
    first rank's step, below which those of the others are.

    run_id: the same on all ranks, and another for each start of a run.
    warn: called once if spans cannot be sent.
    """

    def __init__(self, run_name: str, run_id: str, rank: int, warn: Callable[[str], None]) -> None:
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # failures are reported by `write`
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
        from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator

        self._trace, self._run_id, self._rank, self._warn = trace, run_id, rank, warn
        next_ids = self._next_ids = list[tuple[int, int]]()
        failures = self._failures = list[str]()
        self._is_reported = False

        class StepIds(RandomIdGenerator):
            """Ids that `_start_step` sets, else random ones."""

            def generate_trace_id(self) -> int:
                return next_ids[0][0] if next_ids else super().generate_trace_id()

            def generate_span_id(self) -> int:
                return next_ids.pop()[1] if next_ids else super().generate_span_id()

        class ReportingExporter(OTLPSpanExporter):
            """Keeps failures for `write` to report; the library would log a traceback for each."""

            def export(self, spans: Sequence[Any]) -> SpanExportResult:
                try:
                    result = super().export(spans)
                except Exception as error:  # noqa: BLE001  whatever the HTTP client raises
                    failures.append(f"{redact_secrets(error)}; ")
                    return SpanExportResult.FAILURE
                if result is not SpanExportResult.SUCCESS:
                    failures.append("")
                return result

        attributes = {
            "service.name": "megarl",
            "service.instance.id": f"rank {rank}",
            "host.name": socket.gethostname(),
        }
        resource = Resource.create(attributes | {"megarl.run": run_name, "megarl.rank": rank})
        generator: IdGenerator = StepIds()
        self._provider = TracerProvider(resource=resource, id_generator=generator, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(ReportingExporter()))
        self._tracer = self._provider.get_tracer("megarl")

    def write(self, spans: Iterable[Span]) -> None:
        """Queue the spans of a step. Those outside of it, such as of the start of a run, are a trace of their own."""
        spans = list(spans)
        step = next((span for span in spans if span.category == STEP), None)
        is_inside = [step is not None and step.begin <= span.begin < step.end for span in spans]
        if outside := [span for span, inside in zip(spans, is_inside, strict=True) if not inside]:
            begin, end = min(span.begin for span in outside), max(span.end for span in outside)
            root = self._tracer.start_span("outside of steps", start_time=_nanoseconds(begin))
            root.end(end_time=_nanoseconds(end))
            self._write_below(root, outside)
        if step is not None:
            root = self._start_step(step)
            root.end(end_time=_nanoseconds(step.end))
            inside = (span for span, inside in zip(spans, is_inside, strict=True) if inside and span is not step)
            self._write_below(root, inside)
        self._report_failure()

    def _write_below(self, root: Any, spans: Iterable[Span]) -> None:
        enclosing: dict[str, list[tuple[float, Any]]] = {}  # end and span, by thread, the outermost first
        for span in sorted(spans, key=lambda span: (span.begin, -span.end)):
            parents = enclosing.setdefault(span.thread, [])
            while parents and parents[-1][0] < span.end:
                parents.pop()
            context = self._trace.set_span_in_context(parents[-1][1] if parents else root)
            started = self._tracer.start_span(span.name, context, start_time=_nanoseconds(span.begin))
            started.set_attributes({"megarl.role": span.category, "thread.name": span.thread})
            if span.ranks:
                started.set_attribute("megarl.ranks", list(span.ranks))
            started.end(end_time=_nanoseconds(span.end))
            parents.append((span.end, started))

    def close(self) -> None:
        """Send what is queued, for as long as the library's own timeouts allow."""
        self._provider.shutdown()
        self._report_failure()

    def _report_failure(self) -> None:
        if self._failures and not self._is_reported:
            self._is_reported = True
            self._warn(f"OpenTelemetry: {self._failures[0]}{REMEDY}")

    def _start_step(self, span: Span) -> Any:
        digest = hashlib.sha256(f"{self._run_id} {span.name}".encode()).digest()
        trace_id, step_id = int.from_bytes(digest[:16], "big") or 1, int.from_bytes(digest[16:24], "big") or 1
        start = _nanoseconds(span.begin)
        if self._rank == 0:
            self._next_ids.append((trace_id, step_id))
            return self._tracer.start_span(span.name, start_time=start)
        flags = self._trace.TraceFlags(self._trace.TraceFlags.SAMPLED)
        first = self._trace.NonRecordingSpan(self._trace.SpanContext(trace_id, step_id, True, flags))
        name = f"{span.name}, rank {self._rank}"
        return self._tracer.start_span(name, self._trace.set_span_in_context(first), start_time=start)


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
