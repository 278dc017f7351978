"""What the allocator of a GPU's memory must not be told where engines are given weights by CUDA IPC.

With `expandable_segments` torch's blocks are no allocations of CUDA's that a handle names: whether a block can be
handed to another process depends on torch, driver and container then, and SGLang's memory saver refuses it.
"""

from __future__ import annotations

from collections.abc import Mapping

from megarl.config import ConfigError

VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Where torch reads its allocator's settings; the second since 2.9, and the first still."""


def check_allocator(environ: Mapping[str, str]) -> None:
    """Raise ConfigError where the environment sets `expandable_segments`."""
    for name in VARIABLES:
        for setting in environ.get(name, "").split(","):
            key, _, value = setting.partition(":")
            if key.strip() == "expandable_segments" and value.strip().lower() in ("true", "1"):
                raise ConfigError(
                    f"{name}={environ[name][:200]}: with expandable_segments weights cannot be handed to an engine's "
                    "process, and SGLang's memory saver refuses it; take expandable_segments out of the variable"
                )
