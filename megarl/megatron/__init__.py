"""Everything that touches Megatron-Core: model building, heads, log-probs, the training step and checkpoints.

Importing this package patches Megatron-Core (`core_patches.py`), on machines without a GPU for the CPU as well
(`cpu/megatron_platform.py`).
"""

import logging
import sys
import warnings

# These warnings are advice for trainer authors. Filter before the first import, which warns about missing packages.
warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")
for _logger in ("models.gpt.gpt_model", "distributed.distributed_data_parallel", "transformer.moe.experts"):
    logging.getLogger(f"megatron.core.{_logger}").setLevel(logging.ERROR)
# On a machine without GPU, torch's CUDA build warns that it found a compiler for CUDA, but no runtime.
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)

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

        from megarl.megatron import core_patches

        core_patches.install()
    finally:
        if is_hidden:
            del sys.modules["wandb"]


_import_core()
