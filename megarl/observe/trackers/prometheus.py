"""Prometheus adapter: serves the newest value of each metric at http://ADDRESS:PORT/metrics.

MEGARL_PROMETHEUS_ADDRESS is the interface to listen on, 127.0.0.1 by default, and MEGARL_PROMETHEUS_PORT the port, 9464
by default, 0 for any that is free. `<run>/prometheus.json` names the address for Prometheus' `file_sd_configs`, so that
a server finds the runs of a Slurm cluster in their folders.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from megarl.observe.trackers.adapter import Row, TrackerRun
from megarl.utils.text import write_atomically

DEFAULT_PORT = 9464  # that of OpenTelemetry's exporter for Prometheus


class Prometheus:
    """Gauges `megarl_<metric>{run="..."}`, with `_` for all characters that a name may not have."""

    is_append_only: ClassVar[bool] = False
    id = ""

    def __init__(self, run: TrackerRun) -> None:
        from prometheus_client import CollectorRegistry, start_http_server
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        self._gauge, self._counter, self._run = GaugeMetricFamily, CounterMetricFamily, run.name
        self._values: dict[str, float] = {}  # replaced, never changed: server threads read it
        self._alarms = 0
        address, port = os.environ.get("MEGARL_PROMETHEUS_ADDRESS") or "127.0.0.1", _read_port()
        registry = CollectorRegistry()
        registry.register(self)  # type: ignore[arg-type]
        try:
            self._server, self._thread = start_http_server(port, address, registry)
        except OSError as error:
            raise OSError(f"{address}:{port}: {error.strerror}; set MEGARL_PROMETHEUS_PORT to a free port") from None
        host = socket.gethostname() if address in ("0.0.0.0", "::") else address
        self._targets = run.run_dir / "prometheus.json"
        target = {"targets": [f"{host}:{self._server.server_port}"], "labels": {"run": run.name}}
        write_atomically(self._targets, json.dumps([target]) + "\n")

    def collect(self) -> Iterator[Any]:
        """Yield all metrics. prometheus_client calls this on registration and for each request, in its threads."""
        for name, value in self._values.items():
            gauge = self._gauge(name, "", labels=["run"])
            gauge.add_metric([self._run], value)
            yield gauge
        alarms = self._counter("megarl_alarms", "Alarms of this run since its start.", labels=["run"])
        alarms.add_metric([self._run], self._alarms)
        yield alarms

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        named = {"step": step, "step_time_seconds": time.time(), **values}
        self._values = self._values | {sanitize_metric(name): float(value) for name, value in named.items()}

    def log_text(self, step: int, text: str) -> None:
        self._alarms += 1

    def log_table(self, step: int, rows: Sequence[Row]) -> None:
        """Do nothing: Prometheus has numbers only."""

    def close(self) -> None:
        self._targets.unlink(missing_ok=True)
        self._server.shutdown()
        self._server.server_close()


def sanitize_metric(name: str) -> str:
    """Return the name of a metric in Prometheus."""
    return "megarl_" + "".join(char if char.isascii() and char.isalnum() else "_" for char in name)


def _read_port() -> int:
    text = os.environ.get("MEGARL_PROMETHEUS_PORT") or str(DEFAULT_PORT)
    if not (text.isascii() and text.isdigit() and int(text) < 65536):
        raise ValueError(f"MEGARL_PROMETHEUS_PORT must be a port, 0 to 65535, not '{text}'")
    return int(text)
