"""Tasks for the environment adapters: a sum with an MCP server's tool, and a Harbor task folder that wants a name in a
file."""

from __future__ import annotations

import json
import random
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from environment_tasks import NAMES, Conversation, Row, Task, assistant, calls, user
from environment_tasks import rewards as ready_rewards

from megarl.environments.harbor import HarborTask, rows
from megarl.environments.schemas import build_schema
from megarl.rewards.arithmetic import arithmetic
from megarl.rewards.by_source import BySource
from megarl.types import Rollout

SERVER = Path(__file__).parent / "environments" / "mcp_server.py"
ADDS = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "properties": {"a": {"title": "A", "type": "integer"}, "b": {"title": "B", "type": "integer"}},
            "required": ["a", "b"],
            "title": "addArguments",
            "type": "object",
        },
    },
}
SETTINGS = "[verifier]\ntimeout_sec = 20.0\n[environment]\nmemory_mb = 256\nstorage_mb = 16\n"
VERIFIER = '[ "$(cat who.txt)" = "{name}" ] && reward=1 || reward=0\necho $reward > /logs/verifier/reward.txt\n'


def zero_reward(rollout: Rollout) -> float:
    """Leave the reward to the task's verifier."""
    return 0.0


rewards = BySource({**ready_rewards.sources, "mcp": arithmetic, "harbor": zero_reward})


def write_servers(folder: Path) -> list[str]:
    """Write the configuration of the MCP server; return the value of `rollout.tools`."""
    if "mcp" not in TASKS:
        return []
    entry = {"command": sys.executable, "args": [str(SERVER)], "tools": ["add"]}
    (folder / "servers.json").write_text(json.dumps({"mcpServers": {"sums": entry}}))
    return [f"mcp:{folder}/servers.json"]


def write_folders(folder: Path) -> str:
    """Write the Harbor task folders; return the entry of `rollout.environments`."""
    for name in NAMES:
        task = folder / "harbor" / name
        (task / "tests").mkdir(parents=True)
        (task / "task.toml").write_text(SETTINGS)
        (task / "instruction.md").write_text(f"Write {name} into who.txt.\n")
        (task / "tests" / "test.sh").write_text(VERIFIER.format(name=name))
    return f"harbor:{folder}/harbor"


def mcp(rng: random.Random, expert: bool, folder: Path) -> tuple[Row, Conversation]:
    a, b = rng.randint(1, 9), rng.randint(1, 9)
    row = {"prompt": [user(f"Add {a} to {b}.")], "ground_truth": str(a + b), "environment": "Calculator"}
    tool_call = calls("add", str(a + b), a=a, b=b) if expert else []
    return row, [*tool_call, assistant(f"The answer is {a + b if expert else rng.randint(2, 18)}.")]


def harbor(rng: random.Random, expert: bool, folder: Path) -> tuple[Row, Conversation]:
    value: dict[str, Any] = rng.choice(rows(f"{folder}/harbor"))
    name = value["id"] if expert else rng.choice(NAMES)
    row = {**value, "prompt": [user(value["prompt"])]}
    return row, [*calls("bash", "", command=f"echo {name} > who.txt"), assistant("done")]


TASKS: dict[str, tuple[Task, list[dict[str, Any]]]] = {
    "mcp": (mcp, [ADDS]),
    "harbor": (harbor, [build_schema(HarborTask().bash, "bash")]),
}
"""Tasks with the schemas of their tools."""
if find_spec("mcp") is None:  # an extra: pip install -e .[mcp]
    del TASKS["mcp"]
