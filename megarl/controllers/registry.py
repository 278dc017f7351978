"""Which controller a name in the configuration means."""

from __future__ import annotations

from megarl.config import Config
from megarl.controllers.base import Controller
from megarl.controllers.grpo import GRPOController
from megarl.controllers.ppo import PPOController
from megarl.controllers.reward_model import RewardModelController
from megarl.controllers.sft import SFTController

CONTROLLERS: dict[str, type[Controller]] = {
    "ppo": PPOController,
    "grpo": GRPOController,
    "sft": SFTController,
    "reward_model": RewardModelController,
}


def make_controller(config: Config) -> Controller:
    return CONTROLLERS[config.algorithm](config)
