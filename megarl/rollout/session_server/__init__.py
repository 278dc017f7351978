"""A server that speaks OpenAI's chat completions to agents and records, token for token, what the engine saw and said.

`messages`: what clients send, in one form; `asked`: the fields of a request; `tree`: tokens and how histories fork;
`recording`: one session; `answers`: what clients get; `server`: HTTP on loopback.
"""

from megarl.rollout.session_server.recording import Recording
from megarl.rollout.session_server.server import SessionServer

__all__ = ["Recording", "SessionServer"]
