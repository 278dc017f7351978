"""Boxes of a service with SandboxFusion's API, `POST /run_code`. Their isolation is up to the service."""

from __future__ import annotations

import asyncio
import base64
import binascii
import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp

from megarl.config import ConfigError, SandboxConfig
from megarl.sandbox.results import Reason, Result
from megarl.sandbox.runner_client import SandboxError

_MARGIN_S = 60.0
"""Extra seconds that the service may need, including its own queue."""
_HARNESS = Path(__file__).with_name("inside_harness.py").read_text(encoding="utf-8")


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
    ) -> Result:
        """Run a command through the service's shell; see `Sandbox.run`.

        The service enforces only the limits on seconds and memory; output is truncated here. Its stdin is text, so
        bytes that are not UTF-8 are replaced.
        """
        body = {
            "language": "bash",
            "code": f"exec {shlex.join(command)}",
            "stdin": stdin.decode(errors="replace"),
            "files": {name: base64.b64encode(content).decode() for name, content in files.items()},
            "fetch_files": list(fetch),
            "run_timeout": limits["seconds"],
            "compile_timeout": limits["seconds"],
            "memory_limit_MB": limits["memory_mb"],
        }
        return self._parse_result(await self._post(body, limits["seconds"]), limits, fetch)

    async def run_harness(
        self, preamble: bytes, nonce: str, files: Mapping[str, bytes], stdin: bytes, limits: Mapping[str, Any]
    ) -> tuple[Result, bytes]:
        """Run a harness and return the bytes that it sent. Its channel is a file with an unguessable name."""
        channel, program = (f"{kind}-{secrets.token_hex(16)}" for kind in ("channel", "harness"))
        all_files = {**files, program: _HARNESS.encode(), channel: preamble}
        command = ["sh", "-c", f"exec 3<>{channel}; exec python3 -I -S {program}"]
        run = await self.run(command, all_files, stdin, limits, [channel])
        channel_bytes = run.files.get(channel, b"")
        channel_bytes = channel_bytes[len(preamble) :] if channel_bytes.startswith(preamble) else b""
        return replace(run, files={}), channel_bytes

    async def check(self) -> None:
        """Check that the service responds and runs Python. Raises ConfigError."""
        limits = {"seconds": 30.0, "memory_mb": 512, "output_bytes": 1 << 16}
        try:
            run = await self.run(["python3", "-c", "print(6 * 7)"], {}, b"", limits, ())
        except SandboxError as error:
            raise ConfigError(f"sandbox.backend: {error}; start the service, or correct its address") from None
        if run.stdout.strip() != b"42":
            output = (run.stdout + run.stderr).decode(errors="replace")[-200:]
            raise ConfigError(f"sandbox.backend: {self._url} runs no Python: {output!r}")

    async def close(self) -> None:
        if self._session is not None and self._loop is asyncio.get_running_loop():
            await self._session.close()
        self._session = self._loop = None

    def _parse_result(self, response: dict[str, Any], limits: Mapping[str, Any], fetch: Sequence[str]) -> Result:
        compile_result, run_result = response.get("compile_result"), response.get("run_result")
        details = run_result if isinstance(run_result, dict) else compile_result
        if response.get("status") == "SandboxError" or not isinstance(details, dict):
            raise SandboxError(f"{self._url} says {str(response.get('message') or response)[:200]!r}")
        max_output = int(limits["output_bytes"])
        outputs = [str(details.get(name) or "").encode(errors="replace") for name in ("stdout", "stderr")]
        status = details.get("return_code")
        reason: Reason = ""
        if details.get("status") == "TimeLimitExceeded":
            reason = "time"
        elif any(len(output) > max_output for output in outputs):
            reason = "output"
        elif not isinstance(status, int) or status < 0:
            reason = "signal"
        elif status:
            reason = "exit"
        files = _decoded(response.get("files"), fetch, 16 * max_output)
        is_ok = not reason and response.get("status") == "Success"
        seconds = details.get("execution_time")
        reported_status = status if isinstance(status, int) and reason not in ("time", "output") else None
        stdout, stderr = (output[:max_output] for output in outputs)
        return Result(
            is_ok, reported_status, stdout, stderr, float(seconds or 0.0), reason or ("" if is_ok else "exit"), files
        )

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


def _decoded(files: Any, fetch: Sequence[str], max_bytes: int) -> dict[str, bytes]:
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
