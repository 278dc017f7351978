"""Webhook alarms: payload, secrecy of the URL, failures and limits."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from megarl.config import Config, ConfigError, from_dict, load_config
from megarl.observe import webhook as module
from megarl.observe.run_folder import claim_and_begin
from megarl.observe.run_log import RunLog
from megarl.observe.webhook import Webhook, resolve_webhook
from megarl.parallel.ranks import Job

pytestmark = pytest.mark.alone

SECRET = "T0/marked-secret"


class Server:
    """An HTTP server that records posts and replies with `status`."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.status = 200
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.paths.append(self.path)
                outer.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(outer.status)
                self.send_header("Location", "http://127.0.0.1:1/elsewhere")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/{SECRET}?room=a"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv(module.PRIVATE_ENV, "1")
    result = Server()
    yield result
    result.close()


@pytest.fixture(autouse=True)
def single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.parallel.ranks.broadcast_object", lambda value, source=0: value)


def config(run_dir: Path, url: str) -> Config:
    return from_dict({"run": {"dir": str(run_dir)}, "track": {"trackers": [], "webhook": url}})


def test_posts_an_alarm_as_json(server: Server) -> None:
    hook = Webhook(server.url, "runs/a")
    hook.post("actor/entropy is low", 12)
    hook.post("again", 13)
    hook.close()
    assert server.paths == [f"/{SECRET}?room=a"] * 2
    host = socket.gethostname()
    assert server.bodies[0] == {
        "text": f"MegaRL runs/a on {host}, step 12: actor/entropy is low",
        "run": "runs/a",
        "step": 12,
        "alarm": "actor/entropy is low",
        "host": host,
    }
    assert server.bodies[1]["step"] == 13 and hook.pop_failure() == ""


def test_run_alarms_are_posted_without_logging_the_url(server: Server, tmp_path: Path) -> None:
    log = RunLog(config(tmp_path, server.url), Job(0, 1, 0))
    log.begin_step(3)
    log.alarm("the disk is full")
    log.log_end(RuntimeError("all is lost"), is_graceful=False)
    log.close()
    assert [(body["step"], body["alarm"]) for body in server.bodies] == [
        (3, "the disk is full"),
        (3, "the run has ended: RuntimeError: all is lost"),
    ]
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or "marked-secret" not in file.read_text(errors="replace")
    assert load_config(tmp_path / "config.yaml").track.webhook == ""


def test_alarms_appear_as_tensorboard_text(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = RunLog(from_dict({"run": {"dir": str(tmp_path)}}), Job(0, 1, 0))
    log.begin_step(2)
    log.alarm("actor/entropy is low")
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (event,) = events.Tensors("alarms/text_summary")
    assert event.step == 2 and event.tensor_proto.string_val == [b"actor/entropy is low"]


@pytest.mark.parametrize("status", [302, 404, 500])
def test_failure_is_logged_once_without_the_url(
    server: Server, tmp_path: Path, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    server.status = status
    log = RunLog(config(tmp_path, server.url), Job(0, 1, 0))
    log.alarm("one")
    log.alarm("two")
    log.close()
    assert len(server.bodies) == 2
    failure = (tmp_path / "log.txt").read_text()
    assert failure.count(f"could not be posted to track.webhook (it answered with status {status})") == 1
    assert "marked-secret" not in failure + "".join(capsys.readouterr())


def test_connection_refused_and_timeout_are_failures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: Server
) -> None:
    monkeypatch.setattr(module, "_TIMEOUT_S", 0.2)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        closed = Webhook(f"http://127.0.0.1:{listener.getsockname()[1]}/{SECRET}", "r")
        closed.post("one", 1)
        closed.close()
        assert (
            "Connection refused" in (failure := closed.pop_failure())
            and "marked" not in failure
            and closed.pop_failure() == ""
        )
        listener.listen()
        unresponsive = Webhook(f"http://127.0.0.1:{listener.getsockname()[1]}/{SECRET}", "r")
        unresponsive.post("one", 1)
        unresponsive.close()
        assert "TimeoutError" in unresponsive.pop_failure()


def test_alarm_flood_is_bounded_and_reports_dropped_alarms(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    hook, may_send = Webhook(server.url, "r"), threading.Event()
    send = hook._send
    monkeypatch.setattr(hook, "_send", lambda *alarm: (may_send.wait(), send(*alarm))[1])
    start = time.monotonic()
    for number in range(1000):
        hook.post(f"alarm {number}", number)
    assert time.monotonic() - start < 60  # posting never blocks
    may_send.set()
    hook.close()
    assert len(server.bodies) <= module._QUEUE_SIZE + 2
    assert any("further alarms were dropped" in body["text"] for body in server.bodies)


def test_private_addresses_need_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(module.PRIVATE_ENV, raising=False)
    for url in ("http://127.0.0.1:8000/x", "http://localhost/x", "http://10.0.0.3/x", "http://[::1]/x"):
        with pytest.raises(ConfigError, match="private network: export MEGARL_WEBHOOK_PRIVATE=1"):
            resolve_webhook(url)
    hook = Webhook(f"http://localhost:9/{SECRET}", "r")  # a name may resolve to another address later
    hook.post("one", 1)
    hook.close()
    assert "private network" in hook.pop_failure()
    monkeypatch.setenv(module.PRIVATE_ENV, "1")
    resolve_webhook("http://127.0.0.1:8000/x")


@pytest.mark.parametrize(
    "url", ["hooks.example.com/marked", "ftp://a/marked", "https://", "https://a:x/marked", "http://a b/marked"]
)
def test_invalid_url_is_rejected_without_repeating_it(url: str) -> None:
    with pytest.raises(ConfigError, match="track.webhook is not a URL such as") as refused:
        resolve_webhook(url)
    assert "marked" not in str(refused.value)


def test_url_may_come_from_a_variable_but_not_the_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOOK", " https://hooks.example.com/T0/x\n")
    assert resolve_webhook("env:HOOK") == "https://hooks.example.com/T0/x"
    with pytest.raises(ConfigError, match="variable NO_HOOK is not set"):
        resolve_webhook("env:NO_HOOK")
    with pytest.raises(ConfigError, match="must be the name of an environment variable"):
        resolve_webhook("env:https://marked")
    (tmp_path / "c.yaml").write_text("track: {webhook: https://hooks.example.com/T0/x}")
    assert load_config(tmp_path / "c.yaml").track.webhook
    with pytest.raises(ConfigError, match="is visible to everybody on this machine"):
        load_config(tmp_path / "c.yaml", ["track.webhook=https://hooks.example.com/T0/x"])
    claim_and_begin(
        tmp_path / "run", load_config(tmp_path / "c.yaml", ["track.webhook=env:HOOK"]), resume=False
    ).release()
    assert load_config(tmp_path / "run/config.yaml").track.webhook == "env:HOOK"
