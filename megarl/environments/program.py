"""`program:COMMAND`: an agent that is any program, in any language, with a client of OpenAI's API.

It gets the row as JSON on stdin, and in its environment OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL. The last line
that it prints is the reward, a number or {"reward", "parts", "turns"}; without one `reward.functions` say what it was
worth. What it prints on stderr is in the log of the tools.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
from typing import Any

from megarl.config.strict import ConfigError

MODEL = "policy"
MAX_OUTPUT_BYTES = 1 << 20
"""Bytes that it may print."""


def environment(command: str) -> Any:
    """Raises ConfigError for a command that cannot be run."""
    try:
        arguments = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"it is no command: {error}") from None
    if not arguments:
        raise ConfigError("there is no command behind the colon, as in program:python agent.py")
    if shutil.which(arguments[0]) is None:
        raise ConfigError(f"there is no program {arguments[0]!r} in PATH ({os.environ.get('PATH', '')})")

    async def run(row: dict[str, Any], base_url: str, api_key: str) -> Any:
        own = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, "OPENAI_MODEL": MODEL}
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *arguments, stdin=pipe, stdout=pipe, limit=MAX_OUTPUT_BYTES, env={**os.environ, **own}
        )
        try:
            assert process.stdin is not None and process.stdout is not None
            said, _ = await asyncio.gather(
                _read_tail(process.stdout), _write_row(process.stdin, json.dumps(row).encode())
            )
            status = await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
        if status:
            raise RuntimeError(f"it ended with exit status {status}")
        return parse_reward(said)

    return run


async def _write_row(stdin: asyncio.StreamWriter, row: bytes) -> None:
    try:
        stdin.write(row)
        await stdin.drain()
        stdin.close()
    except (BrokenPipeError, ConnectionResetError):  # it does not want to know
        pass


async def _read_tail(stdout: asyncio.StreamReader) -> bytes:
    """Its last `MOST` bytes."""
    said = b""
    while part := await stdout.read(1 << 16):
        said = (said + part)[-MAX_OUTPUT_BYTES:]
    return said


def parse_reward(said: bytes) -> Any:
    """Of the last line that is not empty; None where that is no number and no JSON object."""
    lines = [line for line in said.decode(errors="replace").splitlines() if line.strip()]
    try:
        value = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    return value if isinstance(value, int | float | dict) else None
