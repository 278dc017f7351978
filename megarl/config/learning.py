"""What a rollout is worth, and what is learned from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from megarl.config.job import Weight
from megarl.strict import Count, CountOrNone, Positive, Range, Seconds, Share


@dataclass(frozen=True)
class LossConfig:
    clip: Annotated[float, Range(above=0, most=1)] = 0.2
    """PPO: the ratio is clipped to [1 - clip, 1 + clip_high]."""
    clip_high: Annotated[float, Range(above=0, most=100)] | None = None
    """Upper clip range where it differs from `loss.clip`, as in DAPO."""
    dual_clip: Annotated[float, Range(above=1, most=1000)] | None = 3.0
    """Bound of the loss for negative advantages (arXiv:1912.09729); null turns it off."""
    value_clip: Positive | None = 0.2
    """Clip range of the value update; null turns it off."""
    entropy_coef: Weight = 0.0
    """Weight of the entropy bonus."""
    mean: Literal["token", "sequence"] = "token"
    """What the losses of an update are a mean of: its action tokens, each counting alike, as in DAPO (arXiv:2503.14476
    section 3.3); or its sequences, each of which is the mean of its action tokens, as in GRPO's paper
    (arXiv:2402.03300 eq. 3), where a token of a long answer counts for less."""
    truncated: Literal["train", "mask", "drop"] = "train"
    """Rollouts that a length or the number of turns cut off: trained on like others; masked, which is no loss of their
    own, but counts among their group (DAPO's overlong filtering, arXiv:2503.14476 section 3.4); or dropped like aborted
    ones, which are never trained on."""


@dataclass(frozen=True)
class AdvantageConfig:
    gamma: Share = 0.99
    """Discount per action token."""
    lam: Share = 0.95
    """GAE's lambda."""
    whiten: bool = True
    """PPO: advantages to mean 0 and standard deviation 1 over the global batch's action tokens."""
    group_std: bool = True
    """GRPO: divide by the group's standard deviation."""


@dataclass(frozen=True)
class KLConfig:
    place: Literal["reward", "loss", "none"] = "reward"
    """Where the KL to the reference policy enters; `none` builds no reference."""
    estimator: Literal["k1", "k2", "k3", "k3_unbiased"] | None = None
    """Of the KL at a token (http://joschu.net/blog/kl-approx.html); null is k1 in the reward and k3_unbiased in the
    loss. That is k3 times the importance ratio (arXiv:2512.02556 section 3.1), whose gradient is the KL's, on policy
    and off it. Of the others as a loss, k2's is the KL's on policy only, k3's is that of another divergence, the
    reversed KL(reference || policy) on policy, and k1 has none."""
    coef: Weight = 0.001
    """Initial coefficient."""
    target: Annotated[float, Range(above=0, most=1000)] | None = 0.015
    """Adaptive controller's target in nats per token (arXiv:1909.08593); null keeps the coefficient fixed."""
    horizon: Count = 10000
    """Rollouts over which the adaptive controller closes the gap."""

    @property
    def kind(self) -> Literal["k1", "k2", "k3", "k3_unbiased"]:
        """The estimator where none is named, too."""
        return self.estimator or ("k3_unbiased" if self.place == "loss" else "k1")


@dataclass(frozen=True)
class RewardConfig:
    functions: tuple[str, ...] = ()
    """Reward functions as `module:name`; each takes a Rollout and returns a number, at most 1e6, or a `Reward`. They
    run in processes beside the ranks while generation goes on, coroutine functions many at once. The reward is their
    sum."""
    weights: dict[str, Any] = field(default_factory=dict)
    """What each part of the reward counts for in that sum: functions by name, `model`, `service`; others count as they
    are. Changes while the run goes on where `control.yaml` in the run folder says so, see `rewards/README.md`."""
    model: str = ""
    """HF folder of a reward model, as `algorithm: reward_model` exports it, with the policy's tokenizer: its score of
    the whole conversation is added to the reward. It is computed in fp32 on the job's ranks, laid out as the policy, or
    by `roles.reward.parallel`; with `roles.reward.backend=transformers` it may be any sequence classifier."""
    timeout: Seconds = 60.0
    """Seconds that one call of a reward function may take; the rollout has no reward then."""
    processes: CountOrNone = 0
    """Processes of a machine in which reward functions run; 0 is half of its cores, at most 64."""
    max_failed: Share = 0.1
    """Of a step's rollouts, the share that may be without a reward, because a part of it failed: they are not trained
    on and count in no mean. Where there are more the run stops and says why."""
