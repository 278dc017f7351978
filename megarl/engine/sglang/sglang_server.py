"""The program of an SGLang engine, see `engine/engine_host.py`: SGLang's HTTP server and all of its processes.

It writes to the file `facts` what the rank must know about SGLang's tool-call parser, so that a rank never has to
import SGLang. `main` has the only patches of SGLang outside of `cpu/`: how processes start, and the names of their
shared memory. Which GPU a rank of the engine gets is an argument of SGLang's.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megarl.engine.engine_host import LEFTOVERS
from megarl.engine.sglang.sglang_parsers import find_tool_call_marker


def preload() -> None:
    """Import all that an engine's processes will need, except what depends on the model."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    import sglang.launch_server
    import sglang.srt.entrypoints.http_server
    import sglang.srt.function_call.function_call_parser
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401


def instance_id(folder: str) -> str:
    """Return SGLang's instance id for the engine with this folder."""
    return hashlib.blake2s(os.fsencode(folder), digest_size=6).hexdigest()


def load_file(folder: str) -> Path:
    """Return the file by which this engine's processes report their load, which SGLang never removes.

    The name is as in `sglang.srt.managers.load_snapshot`.
    """
    name = instance_id(folder)
    return Path(f"/dev/shm/sglang_loads_{name}_{hashlib.blake2s(name.encode(), digest_size=4).hexdigest()}.shm")


def compile_sampler(backend: str | None) -> None:
    """Compile flashinfer's kernels for truncated sampling, unless they are cached or another backend samples.

    It takes minutes. At the first request, the engine would answer no health check meanwhile, and count as hanging.
    """
    from sglang.srt.utils import is_flashinfer_available

    if backend in (None, "flashinfer") and is_flashinfer_available():  # SGLang's default
        from flashinfer.sampling import get_sampling_module

        get_sampling_module()


def run_scheduler(gpu_offsets: Sequence[int], server_args: Any, port_args: Any, gpu_id: int, *others: Any) -> None:
    """Run SGLang's process of a rank on the GPU that this rank has.

    SGLang gives ranks consecutive GPUs from `base_gpu_id` on, and refuses a step of 0.

    gpu_offsets: for each of the ranks on this machine, its GPU, counted from `base_gpu_id`. gpu_id: SGLang's choice.
    """
    from sglang.srt.managers.scheduler import run_scheduler_process

    first = server_args.base_gpu_id
    run_scheduler_process(server_args, port_args, first + gpu_offsets[gpu_id - first], *others)


def main(settings: dict[str, Any]) -> None:
    """Run the server until it ends, then kill its child processes.

    settings: see `SGLangEngine._launch`; and "folder" from the host.
    """
    from megarl.cpu import sglang_plugin
    from megarl.engine.sglang import sglang_server  # the name by which SGLang's processes import it
    from megarl.parallel.job_secret import SECRET_ENV
    from megarl.parallel.rendezvous import STORE_FOLDER_ENV

    os.environ[SECRET_ENV] = settings["secret"]  # for SGLang's child processes, which need not be forks of this one
    if settings["server_args"].get("nnodes", 1) == 1:  # an engine across nodes has no common folder
        os.environ[STORE_FOLDER_ENV] = tempfile.gettempdir()
    Path(settings["folder"], LEFTOVERS).write_text(f"{load_file(settings['folder'])}\n")
    preload()
    sglang_plugin.seal_pickles()
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import PortArgs, ServerArgs
    from sglang.srt.utils import kill_process_tree

    if method := settings["start_method"]:  # under SGLang's own "spawn" each process would import everything again
        set_start_method = multiprocessing.set_start_method
        multiprocessing.set_start_method = lambda *_, **__: set_start_method(method, force=True)
    init_new = PortArgs.init_new

    def init_with_id(*args: Any, **kwargs: Any) -> PortArgs:
        """Replace the random instance id in SGLang's shared-memory names, so that others can remove those files."""
        ports = init_new(*args, **kwargs)
        ports.instance_id = instance_id(settings["folder"])
        return ports

    PortArgs.init_new = staticmethod(init_with_id)
    if settings["has_truncated_sampling"]:
        compile_sampler(settings["server_args"].get("sampling_backend"))
    facts = {"tool_call_marker": find_tool_call_marker(settings["tool_call_parser"])}
    Path(settings["facts"]).write_text(json.dumps(facts))
    try:
        launch_server(
            ServerArgs(**settings["server_args"]),
            run_scheduler_process_func=partial(sglang_server.run_scheduler, settings["gpu_offsets"]),
        )
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":  # SGLang's children import this file again under another name
    main(json.load(sys.stdin))
