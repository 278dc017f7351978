"""Boxes of a service with SandboxFusion's API, `POST /run_code`. Their isolation is up to the service."""

from __future__ import annotations

import asyncio
import base64
import binascii
import secrets
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from megarl.config import ConfigError, SandboxConfig
from megarl.sandbox.results import Reason, Result
from megarl.sandbox.runner_client import SandboxError

_MARGIN_S = 60.0
"""Extra seconds that the service may need, including its own queue."""


class SandboxFusion:
    """Client of the service, for one event loop at a time."""

    def __init__(self, settings: SandboxConfig) -> None:
        self._url = settings.backend.rstrip("/") + "/run_code"
        self._max_boxes = settings.max_boxes
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: aiohttp.ClientSession | None = None
        self._box_limit = asyncio.Semaphore(self._max_boxes)

    async def run(
        self,
        command: Sequence[str],
        files: Mapping[str, bytes],
        stdin: bytes,
        limits: Mapping[str, Any],
        fetch: Sequence[str],
        preamble: bytes = b"",
    ) -> tuple[Result, bytes]:
        """Run a command through the service's shell; see `RunnerClient.run`. The channel is a file whose name nobody
        can guess.

        The service enforces only the limits on seconds and memory; output is truncated here. Its stdin is text, so
        bytes that are not UTF-8 are replaced.
        """
        code = f"exec {shlex.join(command)}"
        channel = f"channel-{secrets.token_hex(16)}"
        if preamble:
            code, files, fetch = f"exec 3<>{channel}; {code}", {**files, channel: preamble}, [*fetch, channel]
        body = {
            "language": "bash",
            "code": code,
            "stdin": stdin.decode(errors="replace"),
            "files": {name: base64.b64encode(content).decode() for name, content in files.items()},
            "fetch_files": list(fetch),
            "run_timeout": limits["seconds"],
            "compile_timeout": limits["seconds"],
            "memory_limit_MB": limits["memory_mb"],
        }
        response = await self._post(body, limits["seconds"])
        compile_result, run_result = response.get("compile_result"), response.get("run_result")
        details = run_result if isinstance(run_result, dict) else compile_result
        if response.get("status") == "SandboxError" or not isinstance(details, dict):
            raise SandboxError(f"{self._url} says {str(response.get('message') or response)[:200]!r}")
        max_output = int(limits["output_bytes"])
        outputs = [str(details.get(name) or "").encode(errors="replace") for name in ("stdout", "stderr")]
        status = details.get("return_code")
        if not isinstance(status, int):
            status = None
        reason: Reason = ""
        if details.get("status") == "TimeLimitExceeded":
            reason, status = "time", None
        elif any(len(output) > max_output for output in outputs):
            reason, status = "output", None
        elif status is None or status < 0:
            reason = "signal"
        elif status or response.get("status") != "Success":
            reason = "exit"
        stdout, stderr = (output[:max_output] for output in outputs)
        fetched = _decode_files(response.get("files"), fetch, 16 * max_output)
        written = fetched.pop(channel, b"")
        seconds = float(details.get("execution_time") or 0.0)
        result = Result(not reason, status, stdout, stderr, seconds, reason, fetched)
        return result, written[len(preamble) :] if written.startswith(preamble) else b""

    async def check(self) -> None:
        """Check that the service responds and runs Python. Raises ConfigError."""
        limits = {"seconds": 30.0, "memory_mb": 512, "output_bytes": 1 << 16}
        try:
            run, _ = await self.run(["python3", "-c", "print(6 * 7)"], {}, b"", limits, ())
        except SandboxError as error:
            raise ConfigError(f"sandbox.backend: {error}; start the service, or correct its address") from None
        if run.stdout.strip() != b"42":
            output = (run.stdout + run.stderr).decode(errors="replace")[-200:]
            raise ConfigError(f"sandbox.backend: {self._url} runs no Python: {output!r}")

    async def close(self) -> None:
        if self._session is not None and self._loop is asyncio.get_running_loop():
            await self._session.close()
        self._session = self._loop = None

    async def _post(self, body: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        if self._session is None or self._loop is not loop:
            self._loop, self._box_limit = loop, asyncio.Semaphore(self._max_boxes)
            self._session = aiohttp.ClientSession()
        limit = aiohttp.ClientTimeout(total=seconds + _MARGIN_S)
        try:
            async with self._box_limit, self._session.post(self._url, json=body, timeout=limit) as response:
                if response.status != 200:
                    raise SandboxError(f"{self._url} answers {response.status}: {(await response.text())[:200]!r}")
                message = await response.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise SandboxError(f"{self._url} does not answer correctly: {type(error).__name__} {error}") from None
        if not isinstance(message, dict):
            raise SandboxError(f"{self._url} answers {str(message)[:100]!r}, not an object")
        return message


def _decode_files(files: Any, fetch: Sequence[str], max_bytes: int) -> dict[str, bytes]:
    contents: dict[str, bytes] = {}
    for name in fetch if isinstance(files, dict) else ():
        try:
            content = base64.b64decode(files[name], validate=True)
        except (KeyError, TypeError, binascii.Error):
            continue
        if len(content) <= max_bytes:
            max_bytes -= len(content)
            contents[name] = content
    return contents
