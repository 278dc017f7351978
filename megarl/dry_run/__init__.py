"""Check a run before anything starts: settings, model folders, data, sandbox, memory; and suggest a layout.

Starts neither ranks nor engines. Only the entry points and the flow import it.
"""
