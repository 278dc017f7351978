"""Build SGLang's models as its engines do, but without weights and servers. stdin: a JSON list of [name, ServerArgs].

Prints a line of JSON for each: the name, and for the model and its draft model, if it has one, the dtype and shape of
each tensor that a weight sync can write. SGLang is imported once; each model is built in a process forked for it,
because SGLang has one configuration per process.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from typing import Any

from sglang.srt.plugins import load_plugins

load_plugins()

from sglang.srt.configs.load_config import LoadConfig  # noqa: E402
from sglang.srt.configs.model_config import ModelConfig  # noqa: E402
from sglang.srt.distributed import bootstrap  # noqa: E402
from sglang.srt.managers import scheduler  # noqa: E402, F401
from sglang.srt.model_loader import loader  # noqa: E402
from sglang.srt.model_loader.utils import set_default_torch_dtype  # noqa: E402
from sglang.srt.models.registry import ModelRegistry  # noqa: E402
from sglang.srt.runtime_context import SpawnRanks, publish  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

from megarl.engine import weight_loader  # noqa: E402


def build(settings: dict[str, Any]) -> list[dict[str, tuple[str, list[int]]]]:
    server_args = ServerArgs(**settings)
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    configs = [ModelConfig.from_server_args(server_args)]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{folder}/store"
        bootstrap.init_parallel_runtime(server_args=server_args, device="cpu", dist_port=0)
        bootstrap.init_layer_runtime(model_config=configs[0])
    if settings.get("speculative_algorithm"):
        configs.append(ModelConfig.from_server_args(server_args, is_draft_model=True))
    result = []
    for config in configs:
        with set_default_torch_dtype(config.dtype):
            tensors = weight_loader.writable_tensors(loader._initialize_model(config, LoadConfig()))
        result.append({name: (str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors.items()})
    return result


def main() -> None:
    ModelRegistry.get_supported_archs()  # imports the models
    for name, settings in json.load(sys.stdin):
        if child := os.fork():
            os.waitpid(child, 0)
            continue
        try:
            print("RESULT", json.dumps([name, build(settings)]), flush=True)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)


if __name__ == "__main__":
    main()
