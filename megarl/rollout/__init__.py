"""Rollout generation: the conversation scheduler, the turn-by-turn rollout loop, and the session server for agents.

Built on `engine/` (SGLang), `chat_format/` (templates) and `environments/` (tools).
"""
