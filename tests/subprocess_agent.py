"""An agent program: reads the row from stdin, calls OPENAI_BASE_URL, prints its reward as the last line."""

import asyncio
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from example_agents import calculating

row = json.load(sys.stdin)
print("a black box says what it likes")
reward = asyncio.run(calculating(row, os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]))
print(json.dumps({"reward": reward, "parts": {"right": reward}}))
