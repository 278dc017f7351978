"""Convert messages to token ids and back: chat templates, control tokens, reasoning, tool calls."""
