"""What a rollout is worth, and what is learned from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from megarl.config.job import Weight
from megarl.strict import Count, CountOrNone, PathStr, Positive, Range, Seconds, Share


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
    policy: str = "ppo"
    """The policy's loss: ppo, gspo, gspo_token, gmpo, cispo, sapo, clip_cov, kl_cov, or `module:name` of a fork.
    `algorithms/README.md` has their papers. The clips above are of ppo and clip_cov; others have their own."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of that loss, such as `{clip_low: 0.0003}` of gspo; `algorithms/README.md` lists them."""
    mean: Literal["token", "sequence", "constant"] = "token"
    """What the losses of an update are a mean of: its action tokens, each counting alike, as in DAPO (arXiv:2503.14476
    section 3.3); or its sequences, each of which is the mean of its action tokens, as in GRPO's paper
    (arXiv:2402.03300 eq. 3), where a token of a long answer counts for less; or `constant`, its sequences, each the sum
    over its action tokens divided by `loss.length`, as in Dr. GRPO (arXiv:2503.20783). An agent's episode is one of
    them, however many sequences it became. Metrics are means over action tokens under each."""
    length: Count | None = None
    """Of `loss.mean=constant`; null for the tokens that the policy may write in a conversation, which are
    `rollout.max_new_tokens` times `rollout.max_turns`, at most `rollout.max_context`."""
    truncated: Literal["train", "mask", "drop"] = "train"
    """Rollouts that a length or the number of turns cut off: trained on like others; masked, which is no loss of their
    own, but counts among their group (DAPO's overlong filtering, arXiv:2503.14476 section 3.4); or dropped like aborted
    ones, which are never trained on."""


@dataclass(frozen=True)
class AdvantageConfig:
    kind: Literal["group", "rloo", "reinforce", "reinforce_baseline", "opo"] = "group"
    """GRPO, what a reward is compared with: its group's mean; the mean of the others of its group (RLOO); those of the
    whole batch, normalised (REINFORCE++); its group's mean, then normalised over the batch (REINFORCE++ with baseline);
    its group's mean by length (OPO). `algorithms/README.md` has the papers."""
    gamma: Share = 1.0
    """Discount per action token, of PPO and REINFORCE++. Below 1 the first tokens of a long answer learn nothing from a
    reward at its end: 0.99^1000 is 4e-5."""
    lam: Share = 0.95
    """GAE's lambda."""
    whiten: bool = True
    """PPO: advantages to mean 0 and standard deviation 1 over the global batch's action tokens."""
    group_std: bool = True
    """GRPO, `advantage.kind=group`: divide by the group's standard deviation; Dr. GRPO does not."""


@dataclass(frozen=True)
class KLConfig:
    place: Literal["reward", "loss", "none"] = "reward"
    """Where the KL to the reference policy enters; `none` builds no reference. Many recipes set it, such as `loss` for
    grpo (`controllers/README.md`)."""
    estimator: Literal["k1", "k2", "k3", "k3_unbiased"] | None = None
    """Of the KL at a token (http://joschu.net/blog/kl-approx.html); null is k1 in the reward and k3_unbiased in the
    loss. That is k3 times the importance ratio (arXiv:2512.02556 section 3.1), whose gradient is the KL's, on policy
    and off it. Of the others as a loss, k2's is the KL's on policy only, k3's is that of another divergence, the
    reversed KL(reference || policy) on policy, and k1 has none."""
    coef: Weight = 0.001
    """Initial coefficient."""
    target: Annotated[float, Range(above=0, most=1000)] | None = 0.015
    """Adaptive controller's target in nats per token (arXiv:1909.08593); null keeps the coefficient fixed."""
    most: Weight = 0.2
    """What the adaptive controller raises the coefficient to at most."""
    horizon: Count = 10000
    """Rollouts over which the adaptive controller closes the gap."""

    @property
    def kind(self) -> Literal["k1", "k2", "k3", "k3_unbiased"]:
        """The estimator where none is named, too."""
        return self.estimator or ("k3_unbiased" if self.place == "loss" else "k1")


@dataclass(frozen=True)
class CorrectionConfig:
    """`algorithms/CORRECTIONS.md` has the equations, and which are called what elsewhere."""

    kind: Literal["none", "tis", "icepop", "mis", "reject"] = "none"
    """What is done where the policy that learns differs from the one that sampled, in other kernels or by older
    weights, by the ratio of its probability of a token to the engine's. `tis`: a token's loss is weighted by the ratio,
    cut to [low, high]; `icepop`: weighted, and not learned from outside of them (arXiv:2510.18855); `mis`: the same by
    the ratio of the whole sequence; `reject`: sequences outside of them are left out, the others not weighted."""
    level: Literal["token", "sequence", "geometric"] | None = None
    """Of what the ratio is: a token, the product over a sequence, or the geometric mean over its tokens. null is token
    for tis and icepop, sequence for mis, geometric for reject; `token` rejects a sequence with one such token."""
    low: Annotated[float, Range(0, 1_000_000)] | None = None
    """Least ratio; null is 0 for tis, 0.5 for icepop and mis, 0.95 for reject."""
    high: Annotated[float, Range(above=0, most=1_000_000_000)] | None = None
    """Largest ratio; null is 2 for tis and mis, 5 for icepop, 1.05 for reject."""
    proximal: Literal["drawn", "trainer", "engine"] | None = None
    """Whose log-probs the clipped ratio of the loss is to. `trainer`: the trainer's at the beginning of the step, which
    with `kind` tis is decoupled PPO (arXiv:2505.24298); `engine`: the engine's, so that those of the
    trainer need not be computed; `drawn`: the trainer's, but the engine's for tokens of older weights. null is trainer
    for the kinds that weight, drawn for none and reject."""

    @property
    def weighs(self) -> bool:
        """Whether tokens' losses have weights."""
        return self.kind in ("tis", "icepop", "mis")

    @property
    def measured(self) -> Literal["token", "sequence", "geometric"]:
        """The level where none is named, too."""
        return self.level or _OF_KIND[self.kind][0]

    @property
    def bounds(self) -> tuple[float, float]:
        """Least and largest ratio, also where they are not named."""
        _, low, high = _OF_KIND[self.kind]
        return (low if self.low is None else self.low), (high if self.high is None else self.high)

    @property
    def clipped_to(self) -> Literal["drawn", "trainer", "engine"]:
        """The proximal policy where none is named, too."""
        return self.proximal or ("trainer" if self.weighs else "drawn")


_OF_KIND: dict[str, tuple[Literal["token", "sequence", "geometric"], float, float]] = {
    "none": ("token", 0.5, 2.0),  # which then count, and change nothing
    "tis": ("token", 0.0, 2.0),
    "icepop": ("token", 0.5, 5.0),
    "mis": ("sequence", 0.5, 2.0),
    "reject": ("geometric", 0.95, 1.05),
}
"""Of each kind of correction what it measures, and its bounds, where nobody says otherwise."""


@dataclass(frozen=True)
class RewardConfig:
    functions: tuple[str, ...] = ()
    """Reward functions as `module:name`; each takes a Rollout and returns a number, at most 1e6, or a `Reward`. They
    run in processes beside the ranks while generation goes on, coroutine functions many at once. The reward is their
    sum."""
    weights: dict[str, Any] = field(default_factory=dict)
    """What each part of the reward counts for in that sum: functions by name, `environment`, `model`, `service`,
    `judge`; others count as they are. Changes while the run goes on where `control.yaml` in the run folder says so, see
    `rewards/README.md`."""
    model: PathStr = ""
    """HF folder of a reward model, as `algorithm: reward_model` exports it, with the policy's tokenizer: its score of
    the whole conversation is added to the reward. It is computed in fp32 on the job's ranks, laid out as the policy, or
    by `roles.reward.parallel`; with `roles.reward.backend=transformers` it may be any sequence classifier."""
    timeout: Seconds = 60.0
    """Seconds that one call of a reward function may take; the rollout has no reward then."""
    processes: CountOrNone = 0
    """Processes of a machine in which reward functions run; 0 is half of its cores, at most 64."""
    max_failed: Share = 0.1
    """Of a step's rollouts, the share that may be without a reward, because a part of it failed: they are not trained
    on and count in no mean. As soon as there are more the run stops, without waiting for the others, and says why."""


@dataclass(frozen=True)
class GuardsConfig:
    """What is done where a run goes wrong; all off. What each means and what to do is in `observe/README.md`."""

    ppo_kl: Annotated[float, Range(above=0, most=1000)] | None = None
    """`actor/ppo_kl` above which the policy goes back to what it was before the step, whose other updates are left out,
    and the learning rate begins anew with its warm-up; three steps in a row end the run. Usual is 0.05. Each rank keeps
    its part of the policy and its optimizer on the host, once, copied there at each step."""
    kl: Annotated[float, Range(above=0, most=1000)] | None = None
    """KL to the reference, nats a token, above which `kl.coef` falls to 0, and stays there until somebody sets it anew:
    what then would drive the policy is the penalty and not the reward."""
    memory: bool = False
    """Where a rank runs out of memory, all take the pass again with half as many tokens in a micro-batch, down to one
    sequence, and then with all layers recomputed. `megatron/fitting.py` says what is covered."""
    alarms: bool = False
    """Say when figures leave their bands and when they are back: those of `observe/bands.py`."""
    bands: dict[str, Any] = field(default_factory=dict)
    """Bands of one's own: `{actor/entropy: [0.4, 0.6], perf/tokens_per_second_per_rank: [2000, null]}`, of any metric;
    null in place of a band is none. The upper end of `rollout/logprob_diff_mean` is what a run stops at, also without
    alarms: the mean difference between the log-probs of engine and trainer on the first tokens after the start, the
    first push and each verified one; 0.3 with model.dtype=bfloat16, 0.01 with float32 where it is not given."""
