"""The SGLang engine: its arguments, process, HTTP client, weight loading and recovery."""
