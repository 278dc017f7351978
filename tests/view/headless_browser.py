"""A headless Chromium, driven by the Chrome DevTools Protocol over a pipe."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from pathlib import Path
from typing import Any

TIMEOUT_S = 120.0
BACKGROUND_ERRORS = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")


class Browser:
    """One browser process with one tab.

    Attributes:
        errors: errors of the console, uncaught exceptions and violations of the page's policy, since the last `open`.
    """

    def __init__(self, program: str, profile: Path) -> None:
        to_browser, from_browser = os.pipe(), os.pipe()
        arguments = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        arguments.append(f"--user-data-dir={profile}")
        # Chromium reads commands from file descriptor 3 and writes to 4.
        self._process = subprocess.Popen(
            ["bash", "-c", 'exec 3<&"$1" 4>&"$2"; shift 2; exec "$@"', "-", str(to_browser[0]), str(from_browser[1])]
            + [program, *arguments],
            pass_fds=(to_browser[0], from_browser[1]),
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser[0])
        os.close(from_browser[1])
        self._write_fd, self._read_fd = to_browser[1], from_browser[0]
        self._buffer, self._number, self._session = b"", 0, ""
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result. Raises AssertionError if it fails."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._write_fd, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read_message()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result

    def _read_message(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read_fd], [], [], TIMEOUT_S)
            assert ready, f"Chromium did not answer within {TIMEOUT_S} s"
            data = os.read(self._read_fd, 1 << 20)
            assert data, "Chromium has ended"
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if message.get("method") in BACKGROUND_ERRORS:
            self._note_error(message["method"], message["params"])
        return message

    def _note_error(self, method: str, event: dict[str, Any]) -> None:
        if method == "Log.entryAdded" and event["entry"]["level"] == "error":
            self.errors.append(event["entry"]["text"])
        elif method == "Runtime.exceptionThrown":
            details = event["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and event["type"] in ("error", "assert"):
            self.errors.append(str(event["args"]))

    def open(self, address: str, width: int = 1400, height: int = 1000, theme: str = "light") -> None:
        """Open the page at this size and color scheme, and wait until its first view is drawn."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        features = [{"name": "prefers-color-scheme", "value": theme}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.call("Page.navigate", url="about:blank")  # a page is not loaded again for another fragment
        self.errors.clear()
        self.call("Page.navigate", url=address)
        self.wait("document.documentElement?.dataset.ready")

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, of a promise the value that it resolves to."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, condition: str, timeout_s: float = 15.0) -> Any:
        """Wait until a JavaScript expression is truthy, and return it."""
        deadline = time.monotonic() + timeout_s
        while not (value := self.evaluate(condition)):
            assert time.monotonic() < deadline, f"not within {timeout_s} s: {condition}; {self.errors}"
            time.sleep(0.03)
        return value

    def close(self) -> None:
        self._session = ""
        self.call("Browser.close")
        self._process.wait(TIMEOUT_S)
        os.close(self._write_fd)
        os.close(self._read_fd)
