"""`program:COMMAND`: an agent that is any program, in any language, with a client of OpenAI's API.

It reads the row as JSON on stdin, and OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL from its environment. The last
line it prints is the reward, a number or {"reward", "parts", "turns"}; without one, `reward.functions` compute it.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import tempfile
from typing import Any

from megarl.config.strict import ConfigError

MODEL = "policy"
MAX_OUTPUT_BYTES = 1 << 20
"""Bytes of stdout that are kept, from the end."""


def environment(command: str) -> Any:
    """Return an agent that runs the command. Raises ConfigError if it cannot be run."""
    try:
        arguments = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"it is not a command: {error}") from None
    if not arguments:
        raise ConfigError("no command follows the colon; write program:python agent.py")
    if shutil.which(arguments[0]) is None:
        raise ConfigError(f"no program {arguments[0]!r} in PATH ({os.environ.get('PATH', '')})")

    async def run(row: dict[str, Any], base_url: str, api_key: str) -> Any:
        env = {**os.environ, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, "OPENAI_MODEL": MODEL}
        with tempfile.TemporaryFile() as stdin:
            stdin.write(json.dumps(row).encode())
            stdin.seek(0)
            process = await asyncio.create_subprocess_exec(
                *arguments, stdin=stdin, stdout=asyncio.subprocess.PIPE, limit=MAX_OUTPUT_BYTES, env=env
            )
        output = b""
        try:
            assert process.stdout is not None
            while chunk := await process.stdout.read(1 << 16):
                output = (output + chunk)[-MAX_OUTPUT_BYTES:]
            status = await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
        if status:
            raise RuntimeError(f"it ended with exit status {status}")
        return parse_reward(output)

    return run


def parse_reward(output: bytes) -> Any:
    """Parse the last non-empty line; None if it is neither a number nor a JSON object."""
    lines = [line for line in output.decode(errors="replace").splitlines() if line.strip()]
    try:
        value = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    return value if isinstance(value, int | float | dict) else None
