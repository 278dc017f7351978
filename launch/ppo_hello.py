"""PPO in a dozen lines, the same path as the YAML form; run it as two ranks, after launch/quickstart.sh:

.venv/bin/python -m megarl.torchrun --standalone --nproc-per-node 2 launch/ppo_hello.py [section.key=value ...]
"""

import sys

from megarl.flow import HybridFlow
from megarl.launch.exit_status import exit_on_error

with exit_on_error():  # whatever ends it; not needed
    flow = HybridFlow("configs/quickstart.yaml", sys.argv[1:] or ["run.dir=runs/hello"])
    flow.register_worker("actor")
    flow.register_worker("critic")
    flow.register_worker("reward", reward_fn=lambda done: float(f" {done.prompt.ground_truth}." in done.answer))
    metrics = flow.run(num_rollout=3, num_update=2)
    if flow.job.rank == 0:  # every rank has them
        print(f"reward {metrics['rollout/reward_mean']:.2f}, KL {metrics['actor/ppo_kl']:.4f}")
