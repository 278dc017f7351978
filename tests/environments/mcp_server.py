"""An MCP server of the official SDK for tests: over stdio, or over HTTP if given a port."""

import asyncio
import os
import sys
from typing import Any

try:
    from mcp.server.fastmcp import Context, FastMCP, Image
except ImportError:  # version 2 of the SDK
    from mcp.server.mcpserver import Context, Image
    from mcp.server.mcpserver import MCPServer as FastMCP

server: Any = FastMCP("tests")
counts = {"calls": 0}


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def count() -> str:
    """Count the calls of this process."""
    counts["calls"] += 1
    return f"{counts['calls']}"


@server.tool()
def process() -> str:
    """Return the pid of this process."""
    return str(os.getpid())


@server.tool()
def environment() -> str:
    """List the environment variables."""
    return " ".join(f"{key}={value}" for key, value in sorted(os.environ.items()))


@server.tool()
def header(name: str, ctx: Context) -> str:  # type: ignore[type-arg]
    """Return a header of the request."""
    return str(ctx.request_context.request.headers.get(name))


@server.tool(structured_output=False)
def picture() -> list[Any]:
    """Return an image with a caption."""
    return ["a dot", Image(data=b"\x89PNG", format="png")]


@server.tool()
def fails() -> str:
    """Raise an error."""
    raise ValueError("no such river")


@server.tool()
async def hangs() -> str:
    """Answer after an hour."""
    await asyncio.sleep(3600)
    return "late"


@server.tool()
def dies() -> str:
    """Exit during the call."""
    print("fatal: out of luck", file=sys.stderr, flush=True)
    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        try:
            server.settings.host, server.settings.port = "127.0.0.1", int(sys.argv[1])
            server.run(transport="streamable-http")
        except ValueError:  # version 2 takes host and port here
            server.run(transport="streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run()
