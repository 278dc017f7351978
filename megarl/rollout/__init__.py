"""Rollouts: the scheduler of conversations, one conversation turn by turn, and the session server for agents.

Built on `engine/` (SGLang), `chat_format/` (templates) and `environments/` (tools).
"""
