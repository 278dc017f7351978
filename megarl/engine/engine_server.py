"""SGLang's HTTP server: in a process forked from `engine_host.py`, or as a program with its settings on stdin.

Settings: {"server_args": {...}, "facts": path, "tool_call_parser": name, "start_method": name or "", "instance": name,
"secret": text}.
Writes to `facts` what the rank must know of SGLang's tool-call parser, so that a rank never has to import SGLang.
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
    """The text that a reply contains once for each call where SGLang's parser has a word for that, or else exactly when
    it sees calls at all; empty if there is none."""
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    detector = FunctionCallParser(tools=[], tool_call_parser=parser).detector
    words = (getattr(detector, name, "") for name in ("tool_call_start_token", "bot_token"))
    marker = next((str(word).strip() for word in words if word), "")
    unmarked = ("", '{"name": "f", "arguments": {}}', "[f(a=1)]")
    return "" if any(detector.has_tool_call(text) for text in unmarked) else marker


def _force_start_method(method: str) -> None:
    """Whatever SGLang asks for: it sets "spawn", by which each of its processes imports everything once more."""
    ask = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda *_, **__: ask(method, force=True)


def _set_instance_id(name: str) -> None:
    """By this name, and no random one, SGLang calls what it keeps in shared memory, so that others can remove it."""
    from sglang.srt.server_args import PortArgs

    make = PortArgs.init_new

    def named(*args: Any, **kwargs: Any) -> PortArgs:
        ports = make(*args, **kwargs)
        ports.instance_id = name
        return ports

    PortArgs.init_new = staticmethod(named)


def import_sglang() -> None:
    """Import all that an engine's processes will need, but for what depends on its model."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    import sglang.launch_server
    import sglang.srt.entrypoints.http_server
    import sglang.srt.function_call.function_call_parser
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401


def main(settings: dict[str, Any]) -> None:
    os.environ[job_secret.SECRET_ENV] = settings[
        "secret"
    ]  # for SGLang's further processes, which may be no forks of this
    if settings["server_args"].get("nnodes", 1) == 1:  # the parts of an engine across nodes have no folder in common
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


if __name__ == "__main__":  # SGLang's children import this file anew under another name
    main(json.load(sys.stdin))
