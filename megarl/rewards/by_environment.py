"""The part of a reward that environments give themselves, `Rollout.verdict`."""

from __future__ import annotations

from megarl.config import ConfigError, RolloutConfig
from megarl.environments.describing import ENVIRONMENTS, known_of

PART = "environment"


def is_part(config: RolloutConfig, others: bool) -> bool:
    """Whether environments have a `reward`. others: whether there are other parts. Raises ConfigError where there are
    none, and nobody would say what the conversations of an environment are worth."""
    environments = known_of(config).environments.values()
    for one in environments:
        if not one.rewards and not others:
            raise ConfigError(
                f"{ENVIRONMENTS}: {one.spec} has no `reward`, and there are no reward.functions: nobody says what its "
                "conversations are worth; give it one, or set the latter"
            )
    return any(one.rewards for one in environments)
