"""A Megatron model with its optimizer and scheduler, to and from a folder: Megatron's distributed checkpoints."""

from __future__ import annotations

import logging
import queue
from pathlib import Path

from megarl.megatron.model import MegatronModel  # first: it fits Megatron-Core to a machine without GPU
from megarl.parallel import ranks

from megatron.core import dist_checkpointing  # isort: skip
from megatron.core.dist_checkpointing.strategies import filesystem_async  # isort: skip

# Its advice is for users of Megatron's own trainer.
logging.getLogger("megatron.core.dist_checkpointing").setLevel(logging.ERROR)

# The writers report through a queue. Megatron's default is one of a manager process, for saving in the background, and
# that process imports the user's script anew: a script without `if __name__ == "__main__"` would train in it. We save
# in the foreground, where a plain queue serves.
filesystem_async._results_queue = queue.Queue()


def save_model(model: MegatronModel, folder: Path) -> None:
    """Write weights, fp32 masters, optimizer and scheduler. All ranks take part; raises OSError where writing fails."""
    if ranks.is_lead():
        folder.mkdir(parents=True, exist_ok=True)
    ranks.barrier()
    with ranks.active(model.ranks):
        dist_checkpointing.save(model.sharded_state_dict(), str(folder))


def restore_model(model: MegatronModel, folder: Path) -> None:
    """Read what `save_model` wrote into a model that was built in the same way. All ranks take part."""
    with ranks.active(model.ranks):
        model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(is_loading=True), str(folder)))
