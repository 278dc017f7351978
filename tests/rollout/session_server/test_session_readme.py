"""The example in the README of the session server."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from scripted import CHAT, CONFIG, PROMPT, parse
from serving import NumberedPolicy

from megarl.config import Config
from megarl.types import Branch

pytestmark = pytest.mark.alone
PAGE = (Path(__file__).resolve().parents[3] / "megarl/rollout/session_server/README.md").read_text()


def test_readme_example_runs() -> None:
    (text,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len([line for line in text.splitlines() if line.strip()]) < 15
    names: dict[str, Any] = {}
    exec(text, names)
    config, policy = Config(rollout=CONFIG), NumberedPolicy("It is 3")
    (branch,) = asyncio.run(names["episode"](CHAT, parse, config, PROMPT, policy, 5))
    rollout = branch.to_rollout(2)
    assert (rollout.answer, rollout.num_actions, rollout.group) == ("It is 3", len(policy.calls[0][3].token_ids), 2)
    assert rollout.branch == Branch(0, 0, False)
