"""An OpenAI-compatible chat completions server for agents, which records the exact tokens of every request.

`requests.py` and `responses.py` are the API; `rendering.py` and `token_tree.py` map messages to tokens along every
branch of the history; `recording.py` is one session; `server.py` serves HTTP on loopback.
"""

from megarl.rollout.session_server.recording import AgentSession
from megarl.rollout.session_server.server import SessionServer

__all__ = ["AgentSession", "SessionServer"]
