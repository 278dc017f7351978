"""PPO in a dozen lines, the same path as the YAML form. Run: torchrun --nproc-per-node 2 launch/ppo_hello.py"""

import sys

from megarl.flow import HybridFlow

flow = HybridFlow("configs/quickstart.yaml", sys.argv[1:] or ["run.dir=runs/hello"])
flow.register_worker("actor")
flow.register_worker("critic")
flow.register_worker("reward", reward_fn=lambda rollout: float(f" {rollout.prompt.ground_truth}." in rollout.answer))
metrics = flow.run(num_rollout=3, num_update=2)
print(f"reward {metrics['rollout/reward_mean']:.2f}, KL {metrics['actor/ppo_kl']:.4f}")
