"""Two policies by algorithms that learn from greedy rollouts, which are the same in a resumed run."""

from __future__ import annotations

from megarl.controllers.grpo import GRPOController
from megarl.controllers.policies import PoliciesController
from megarl.controllers.ppo import PPOController


class ReinforceAndPPOController(PoliciesController):
    """REINFORCE++ with `advantage.estimator=reinforce_pp`, which compares different prompts, and PPO with a critic."""

    algorithms = {"": GRPOController, "b": PPOController}
