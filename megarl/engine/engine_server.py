"""SGLang's HTTP server: in a process forked from `engine_host.py`, or as a program with its settings on stdin.

Settings: {"server_args": {...}, "facts": path, "tool_call_parser": name, "start_method": name or "", "instance": name,
"secret": text}.
It writes to `facts` what the rank must know about SGLang's tool-call parser, so that a rank never has to import SGLang.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from megarl.cpu import sglang_plugin
from megarl.parallel import job_secret
from megarl.parallel.rendezvous import STORE_FOLDER_ENV


def find_tool_call_marker(parser: str) -> str:
    """Return the text by which SGLang's parser recognizes tool calls; empty if there is none.

    A response contains it once per call if the parser marks single calls, or else exactly when the parser sees any
    call.
    """
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    detector = FunctionCallParser(tools=[], tool_call_parser=parser).detector
    markers = (getattr(detector, name, "") for name in ("tool_call_start_token", "bot_token"))
    marker = next((str(candidate).strip() for candidate in markers if candidate), "")
    unmarked_texts = ("", '{"name": "f", "arguments": {}}', "[f(a=1)]")
    return "" if any(detector.has_tool_call(text) for text in unmarked_texts) else marker


def _force_start_method(method: str) -> None:
    """Override the start method that SGLang asks for: under its "spawn" each process would import everything again."""
    set_start_method = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda *_, **__: set_start_method(method, force=True)


def _set_instance_id(name: str) -> None:
    """Replace the random instance id in SGLang's shared-memory names, so that others can remove those files."""
    from sglang.srt.server_args import PortArgs

    init_new = PortArgs.init_new

    def init_with_id(*args: Any, **kwargs: Any) -> PortArgs:
        ports = init_new(*args, **kwargs)
        ports.instance_id = name
        return ports

    PortArgs.init_new = staticmethod(init_with_id)


def import_sglang() -> None:
    """Import all that an engine's processes will need, except what depends on the model."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    import sglang.launch_server
    import sglang.srt.entrypoints.http_server
    import sglang.srt.function_call.function_call_parser
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401


def main(settings: dict[str, Any]) -> None:
    """Run the server until it ends, then kill its child processes."""
    os.environ[job_secret.SECRET_ENV] = settings[
        "secret"
    ]  # for SGLang's child processes, which need not be forks of this one
    if settings["server_args"].get("nnodes", 1) == 1:  # an engine across nodes has no common folder
        os.environ[STORE_FOLDER_ENV] = tempfile.gettempdir()
    import_sglang()
    sglang_plugin.seal_pickles()
    from sglang.launch_server import run_server
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils import kill_process_tree

    if method := settings["start_method"]:
        _force_start_method(method)
    _set_instance_id(settings["instance"])
    facts = {"tool_call_marker": find_tool_call_marker(settings["tool_call_parser"])}
    Path(settings["facts"]).write_text(json.dumps(facts))
    try:
        run_server(ServerArgs(**settings["server_args"]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":  # SGLang's children import this file again under another name
    main(json.load(sys.stdin))
