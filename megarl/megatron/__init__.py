"""Everything that touches Megatron-Core: the CPU shim, model building, heads, log-probs, the training step, names.

Imports models, data, parallel and types. Imported by workers (and, for the shim alone, by `parallel/ranks.py`).
"""

import sys
import warnings

# Their warnings are advice to the authors of trainers. Before the first import, which warns of missing packages.
warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")

from megarl.cpu import megatron_platform  # noqa: E402
from megarl.parallel import device  # noqa: E402


def _import_core() -> None:
    """Megatron-Core, once it fits the machine: here, so that nothing imports it earlier by way of this package. Without
    wandb, which it would import on every rank, for a second or two and with two folders in the temporary folder each;
    nothing of ours has it write there."""
    is_hidden = "wandb" not in sys.modules
    if is_hidden:
        sys.modules["wandb"] = None  # type: ignore[assignment]  # `import wandb` raises ImportError
    try:
        if not device.has_cuda():
            megatron_platform.install()
        import megatron.core  # noqa: F401
        import megatron.core.inference.contexts  # noqa: F401
    finally:
        if is_hidden:
            del sys.modules["wandb"]


_import_core()
