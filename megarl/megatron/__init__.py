"""Everything that touches Megatron-Core: model building, heads, log-probs, the training step and checkpoints.

Importing this package patches Megatron-Core for machines without a GPU (`cpu/megatron_platform.py`).
"""

import logging
import sys
import warnings

import torch

# These warnings are advice for trainer authors. Filter before the first import, which warns about missing packages.
warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")
for _logger in ("models.gpt.gpt_model", "distributed.distributed_data_parallel"):
    logging.getLogger(f"megatron.core.{_logger}").setLevel(logging.ERROR)

from megarl.cpu import megatron_platform  # noqa: E402
from megarl.parallel import device  # noqa: E402


def _import_core() -> None:
    """Import Megatron-Core, patched for this machine, before anything else in this package can import it.

    Hides wandb, whose import takes a second or two and leaves two temporary folders per rank.
    """
    is_hidden = "wandb" not in sys.modules
    if is_hidden:
        sys.modules["wandb"] = None  # type: ignore[assignment]  # `import wandb` raises ImportError
    try:
        if not device.has_cuda():
            megatron_platform.install()
        import megatron.core  # noqa: F401
        import megatron.core.inference.contexts  # noqa: F401
        from megatron.core.tensor_parallel import random

        # Megatron replaces this function of torch's by one that loads no classes. Engines refuse to unpickle it under
        # Megatron's name.
        load = torch.storage._load_from_bytes
        load.__module__, load.__name__, load.__qualname__ = "torch.storage", "_load_from_bytes", "_load_from_bytes"
        # Megatron compiles a C++ extension for this when a training step first recomputes an output. That would need a
        # compiler on every node, and a lock left in a shared cache by a killed rank would stop all others.
        random._get_share_storage = lambda: _restore_storage
    finally:
        if is_hidden:
            del sys.modules["wandb"]


def _restore_storage(output: torch.Tensor, recomputed: torch.Tensor) -> None:
    """Give `output` and all its views, whose storage was freed in the forward pass, the recomputed values.

    Megatron's extension makes both tensors share a storage. Python cannot, hence a copy, as in Megatron-Core 0.16. It
    does not count as an in-place change of the output.
    """
    target, source = output.untyped_storage(), recomputed.untyped_storage()
    target.resize_(source.size())
    target.copy_(source)


_import_core()
