"""Which policy loss a configuration chooses, and what of a mini-batch is settled before it is cut up."""

from __future__ import annotations

from typing import Any

import torch

from megarl.algorithms.losses import constant_weights, sequence_mean_weights, token_mean_weights
from megarl.algorithms.policy_losses import POLICY_LOSSES, PolicyLoss
from megarl.config import Config, ConfigError, plugins, strict
from megarl.config.strict import closest_match
from megarl.types import Counts, TrainBatch


def find_policy_loss(name: str) -> PolicyLoss:
    """The loss that `loss.policy` names. Raises ConfigError for one that is not there, or is none."""
    if name in POLICY_LOSSES:
        return POLICY_LOSSES[name]
    if ":" not in name:
        near = closest_match(name, POLICY_LOSSES)
        hint = f"; did you mean {near}?" if near else ""
        raise ConfigError(
            f"loss.policy must be one of {', '.join(POLICY_LOSSES)}, or module:name of a loss, not {name[:200]!r}{hint}"
        )
    found = plugins.load(name, "loss.policy")
    if isinstance(found, PolicyLoss):
        return found
    if not callable(found):
        raise ConfigError(f"loss.policy={name} is a {type(found).__name__}, and neither a PolicyLoss nor a function")
    return PolicyLoss(found)


def load_policy_loss(config: Config) -> tuple[PolicyLoss, Any]:
    """The loss that `loss.policy` names, and `loss.options` as it takes them. Raises ConfigError for what is wrong."""
    found = find_policy_loss(config.loss.policy)
    return found, strict.build_dataclass(found.options, config.loss.options, "loss.options.", root=Config)


def needs_old_logprobs(config: Config) -> bool:
    """Whether an update needs the policy's log-probs from before it, which cost a forward pass. Of a single update per
    batch they are those of the update itself, but for a loss that marks tokens of the whole mini-batch first."""
    return config.run.num_update > 1 or load_policy_loss(config)[0].mark is not None


def set_loss_weights(mini: TrainBatch, actions: torch.Tensor, config: Config) -> TrainBatch:
    """The mini-batch with each token's share in the mean that `loss.mean` names, an episode counting as one sequence,
    and with what its metrics are means over. actions: [N] action tokens of each of its sequences."""
    episodes = int((mini.episodes.sum_branches(actions) > 0).sum())
    counts = Counts(int(actions.sum()), int((actions > 0).sum()), int(actions[mini.sequence_reward > 0].sum()))
    if config.loss.mean == "token":
        weights = token_mean_weights(mini.loss_mask, counts.actions)
    elif config.loss.mean == "sequence":
        weights = sequence_mean_weights(mini.cu_episodes, mini.loss_mask, episodes)
    else:
        weights = constant_weights(mini.loss_mask, max_response_length(config), episodes)
    return mini.with_(loss_weights=weights, counts=counts)


def max_response_length(config: Config) -> int:
    """What `loss.mean=constant` divides by: a conversation's tokens that the policy may write."""
    rollout = config.rollout
    return config.loss.length or min(rollout.max_new_tokens * rollout.max_turns, rollout.max_context)


def mark_tokens(mini: TrainBatch, config: Config, seed: int) -> TrainBatch:
    """The mini-batch with the tokens that the policy loss chooses out of all of it; as it is where the loss chooses
    none, or the batch is not for a policy. Collective."""
    loss, options = load_policy_loss(config)
    if loss.mark is None or mini.advantages is None:
        return mini
    if mini.old_logprobs is None:
        raise ConfigError(f"loss.policy={config.loss.policy} chooses tokens by old_logprobs, which the batch has not")
    return mini.with_(marked=loss.mark(mini, options, seed))
