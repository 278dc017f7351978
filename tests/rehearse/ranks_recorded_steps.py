"""Real ranks that take the steps of `recorded_steps.py`; prints what each has recorded."""

import json
import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / "megatron")]

import torch  # noqa: E402

from megarl.rehearse import comm_recorder  # noqa: E402

torch.set_num_threads(1)
recorder = comm_recorder.install()
import recorded_steps  # noqa: E402

from megarl.parallel import ranks  # noqa: E402

world = int(sys.argv[1])
ranks.join(world, 60)
print("RESULT", json.dumps(recorded_steps.take_steps(world, False, lambda: recorder.events)))
ranks.shutdown()
