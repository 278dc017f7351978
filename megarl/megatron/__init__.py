"""Everything that touches Megatron-Core: building models, heads, log-probs, the training step, its checkpoint format.

Importing this package patches Megatron-Core for machines without a GPU (`cpu/megatron_platform.py`).
`parallel/ranks.py` imports it for that reason alone.
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
