"""The configuration: dataclasses, strict YAML, `key=value` overrides. Every key is documented here and only here.

What Megatron or SGLang already names is not named again: `model.megatron` and `rollout.sglang` pass through, checked
against the fields of `TransformerConfig` and `ServerArgs` when the run starts.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from megarl import plain_yaml, strict
from megarl.strict import ConfigError as ConfigError
from megarl.strict import Count, CountOrNone, NotNegative, Positive, Range, Seconds, Share
from megarl.strict import to_dict as to_dict

# What a key's number may be is part of its type. Bounds that no run comes near keep a slip from taking hours.
Ranks = Annotated[int, Range(1, 65_536)]
Batch = Annotated[int, Range(1, 1_000_000)]
Rate = Annotated[float, Range(0, 10)]
Weight = Annotated[float, Range(0, 1000)]
OnPush = Literal["retract", "in_place", "wait"]


@dataclass(frozen=True)
class RunConfig:
    dir: str = "runs/default"
    """Run folder: configuration, log, metrics, rollouts, checkpoints, export."""
    seed: CountOrNone = 1
    """Seeds everything: initial heads, data order, sampling."""
    num_rollout: Count = 100
    """Steps of the loop; each generates one batch of rollouts."""
    num_update: Count = 1
    """Optimizer steps per rollout batch, a multiple of `run.epochs`: each epoch is cut into equal mini-batches."""
    epochs: Count = 1
    """Passes over each rollout batch."""
    resume: Literal["never", "auto"] = "never"
    """`auto` goes on from the newest checkpoint in the run folder, or starts afresh when there is none. Most keys may
    change then; the folder's README.txt says which not."""
    save_every: CountOrNone = 0
    """Write a checkpoint every so many steps, and at the end; 0 writes none. Where the disk does not take one, training
    goes on, but not beyond the last."""
    keep_checkpoints: Count = 2
    """How many checkpoints stay on disk."""
    eval_every: CountOrNone = 0
    """Evaluate on `data.eval` every so many steps, before the first and after the last; 0 never does."""
    export: bool = True
    """Write the policy, or the reward model, as an HF folder, `<run.dir>/export`, at the end."""
    timeout_s: Seconds = 1800.0
    """How long a collective may wait for a peer before the run is stopped. Work on the host that takes as long as it
    takes has bounds of its own: `rollout.step_timeout`, `run.storage_timeout_s`, `reward.timeout`."""
    storage_timeout_s: Seconds = 7200.0
    """How long ranks wait for the slowest to read its part of a model or checkpoint, or to write it."""
    max_skipped: CountOrNone = 5
    """Updates in a row that may be skipped because a gradient is not finite; at one more the run stops."""


@dataclass(frozen=True)
class ModelConfig:
    path: str = ""
    """HF folder of the policy: config.json, safetensors, tokenizer."""
    hf_config: str = ""
    """config.json to use in a `--dry-run` where the folder `model.path` is not at hand."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Parameters and activations. Master weights and optimizer states are always fp32."""
    megatron: dict[str, Any] = field(default_factory=dict)
    """Further fields of Megatron's TransformerConfig, by its own names."""


@dataclass(frozen=True)
class ParallelConfig:
    world_size: Ranks = 1
    """Ranks of the whole job. `torchrun` must start this many; without it they are started for you, on one machine."""
    ranks_per_node: Ranks = 8
    """Ranks on one machine."""
    tp: Ranks = 1
    """Tensor parallel ranks of the dense layers; more than one turns sequence parallelism on."""
    pp: Ranks = 1
    """Pipeline stages."""
    vpp: Ranks = 1
    """Parts of a pipeline stage, in turn with those of the others (interleaved schedule): less waiting, more talk."""
    cp: Ranks = 1
    """Context parallel ranks: each has two parts of every sequence, which is padded to a multiple of 2 cp tokens."""
    ep: Ranks = 1
    """Expert parallel ranks; with `etp` they are taken from TP x CP x DP."""
    etp: Ranks = 1
    """Tensor parallel ranks of the experts, which are whole by default."""


@dataclass(frozen=True)
class RolloutConfig:
    tp: Ranks = 1
    """Ranks per engine: as many engines run as its ranks have room for, each tensor parallel over its ranks."""
    ep: Ranks = 1
    """Expert parallel size inside an engine; divides rollout.tp."""
    samples_per_prompt: Batch = 8
    """Rollouts of each prompt in training."""
    max_turns: Count = 5
    """Turns that the policy may take in one conversation."""
    max_new_tokens: Count = 1024
    """Tokens that the policy may write in one turn."""
    max_context: Count = 4096
    """Tokens of a whole conversation. Longer prompts are dropped and counted."""
    temperature: Annotated[float, Range(0, 100)] = 1.0
    """Sampling temperature in training; 0 is greedy. Evaluation runs both greedy and at this temperature."""
    top_p: Annotated[float, Range(above=0, most=1)] = 1.0
    """Nucleus sampling; below 1 the engine's log-probs are those of the full distribution."""
    tools: tuple[str, ...] = ()
    """Tools as `module:name`; a prompt may call those that it lists, or all where it lists none."""
    tool_timeout: Seconds = 30.0
    """Seconds that a tool may take before it is killed; the policy then sees the time-out as its observation."""
    tool_call_parser: str = ""
    """SGLang's parser for this model's tool calls; empty for that of the model's family."""
    draft_tokens: Annotated[int, Range(0, 1024)] = 0
    """Tokens that the model's own layer of multi-token prediction drafts at a time, and that the policy then accepts or
    replaces (speculative decoding): the same distribution in fewer steps. 0 is off."""
    concurrency: Batch = 128
    """Conversations at once per engine, not counting those that wait for a tool, which may be as many more. An engine
    has up to twice as many processes for tools; one is started where a call would wait for another's."""
    asynchronous: bool = False
    """Engines on ranks of their own (`placement.rollout`) go on generating while the others train: a step's prompts are
    begun up to `rollout.max_lag` steps before it is their turn, and answers go on through the pushes of weights. The
    importance ratio of tokens that older weights chose is that to the engine's own log-probs of then."""
    on_push: OnPush = "retract"
    """What becomes of answers under way when `rollout.asynchronous` engines get weights: `retract` cuts them off and
    goes on with the tokens that they have, all keys and values computed anew; `in_place` goes on where they were, with
    those of the old weights, which costs nothing, and biases a little; `wait` lets them end first, so that each answer
    is by one version of the weights."""
    oversample: Annotated[float, Range(1, 100)] = 1.0
    """Prompts under way in a step over those that it needs, `data.prompts_per_step`. When as many are done, the others
    are stopped, and gone on with in the next step. 1 is off: a step waits for its longest answer."""
    max_lag: Annotated[int, Range(0, 1000)] = 1
    """Versions by which a rollout's first token may be older than the weights that are trained. `rollout.asynchronous`
    begins no prompt earlier: 0 is on policy, 1 overlaps a step's generation with the training before it. With
    `rollout.oversample` what would be older is begun anew. `rollout/lag_mean` and others say what it comes to, and
    `rollout/logprob_diff_stale` compares such tokens' log-probs, which are of the weights that chose them."""
    request_timeout: Seconds = 600.0
    """Seconds that one answer of the engine may take, from when it begins to work on it; the conversation is aborted
    then."""
    step_timeout: Seconds = 7200.0
    """Seconds that the rollouts of a step may take in all; what is not done by then is aborted."""
    max_aborted: Share = 0.1
    """Share of a step's rollouts that may be aborted, by a failure or a time-out; beyond it the run stops. They are
    recorded, and neither a loss nor a statistic contains them."""
    start_timeout: Seconds = 600.0
    """Seconds that an engine may take to start, and to do what it is told: wake, sleep, take weights."""
    push_bucket_mb: Batch = 1024
    """MiB that each rank may stage for sending weights to engines, and as much for receiving them."""
    verify_every: Count = 20
    """The engines' weights are verified bit by bit in the first push and every so many; in the others, one part in so
    many of them."""
    replay: str = ""
    """A run folder whose recorded rollouts are used instead of generating: for debugging and exact repeats."""
    sglang: dict[str, Any] = field(default_factory=dict)
    """Further fields of SGLang's ServerArgs, by its own names."""


@dataclass(frozen=True)
class DataConfig:
    train: str = ""
    """Prompts to train on: .parquet with verl's columns, or .jsonl. Conversations for SFT, pairs for a reward model.
    What is longer than the model, or `rollout.max_context`, is left out and counted."""
    eval: str = ""
    """Held-out prompts, conversations or pairs, same formats; empty for none."""
    prompts_per_step: Batch = 64
    """Prompts in one rollout batch; conversations or pairs in a step of SFT or of a reward model."""
    prompt_key: str = "prompt"
    """Column of the prompt: a list of chat messages, or a string that becomes one user message."""
    label_key: str = "ground_truth"
    """Column of the ground truth where there is no `reward_model.ground_truth`."""
    shuffle: bool = True
    """Shuffle anew each epoch, by `run.seed`."""


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
class OptimizerConfig:
    lr: Rate = 1e-6
    """Peak learning rate."""
    min_lr: Rate = 0.0
    """Learning rate at the end of the decay."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Decay after the warm-up."""
    warmup_fraction: Share = 0.1
    """Share of all optimizer steps in which the rate climbs to its peak."""
    weight_decay: Rate = 0.01
    beta1: Annotated[float, Range(0, below=1)] = 0.9
    beta2: Annotated[float, Range(0, below=1)] = 0.95
    eps: Positive = 1e-8
    max_grad_norm: NotNegative = 1.0
    """Gradients are scaled down to this norm; 0 leaves them as they are."""


@dataclass(frozen=True)
class CriticConfig:
    path: str = ""
    """HF folder that the critic starts from; empty for `model.path`. Without a head in it, its head starts at zero."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    """As `actor_optimizer`; of a reward model in training, too."""
    warmup_steps: CountOrNone = 0
    """Steps in which only the critic is updated."""
    parallel: dict[str, Any] = field(default_factory=dict)
    """Layout of the critic where it differs: keys of `parallel` but world_size and ranks_per_node."""


@dataclass(frozen=True)
class TrainConfig:
    token_budget: Count = 3072
    """Tokens of a micro-batch on one rank, `cp` times as many in all; a longer sequence is a micro-batch of its own."""
    logits_at_once: Count = 512
    """Tokens whose logits exist at the same time: in bf16 about 18 bytes for each token and word, over tp."""
    replay_routing: bool = False
    """MoE: the policy's log-probs and updates send each token through the experts that the engine chose for it, by the
    trainer's own weights of them (R3, arXiv:2510.11370). Matters in bf16. A rank that leads an engine holds a byte, or
    two with more than 256 experts, for each token of its conversations, MoE layer and chosen expert, and while a model
    computes the same again; each rank then also of its replica's tokens and its stage's layers."""
    mtp: Weight = 0.0
    """Weight of the loss of the policy's layers of multi-token prediction, which then learn to foresee it, without a
    gradient into the rest of it (arXiv:2412.19437 section 2.2; it has 0.3 and later 0.1, section 4.2); 0 leaves them as
    they are."""
    deterministic: bool = True
    """Equal runs give equal bits. Turn off where speed on a GPU matters more."""
    offload: bool = False
    """Weights and optimizer states go to the host while engines generate; it must have room for both models'."""
    ddp: dict[str, Any] = field(default_factory=dict)
    """Further fields of Megatron's DistributedDataParallelConfig, by its own names: overlap_grad_reduce, for one."""


@dataclass(frozen=True)
class LoraConfig:
    rank: Annotated[int, Range(0, 65536)] = 0
    """Rank of the adapters that are then all that is trained, beside a critic's head (arXiv:2106.09685); 0 trains all
    weights. Policy and critic alike; their learning rates want to be about ten times as high."""
    alpha: Positive = 32.0
    """What the adapters add is scaled by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Linear layers that get an adapter, by Megatron's names (linear_qkv, linear_proj, linear_fc1, linear_fc2, MLA's
    linear_q_down_proj ...), with what they are in where that matters (experts.linear_fc1, shared_experts.linear_fc2);
    empty for all of attention, MLPs and experts."""


@dataclass(frozen=True)
class RewardConfig:
    functions: tuple[str, ...] = ()
    """Reward functions as `module:name`; each takes a Rollout and returns a number, at most 1e6. The reward is their
    sum."""
    model: str = ""
    """HF folder of a reward model, as `algorithm: reward_model` exports it, with the policy's tokenizer: its score of
    the whole conversation is added to the reward. It is computed in fp32 on the job's ranks, laid out as the policy, or
    by `roles.reward.parallel`; with `roles.reward.backend=transformers` it may be any sequence classifier."""
    timeout: Seconds = 60.0
    """Seconds that one call of a reward function may take; the run stops then and names it."""


@dataclass(frozen=True)
class TrackConfig:
    tensorboard: bool = True
    """Write TensorBoard events into the run folder."""
    rollouts: bool = True
    """Record every rollout in the run folder, as parquet."""
    timeline: bool = True
    """Record in the run folder who did what when, for tools/timeline.py and Perfetto."""
    progress: bool = True
    """Live display on the terminal; plain lines where the output is no terminal."""


@dataclass(frozen=True)
class Config:
    algorithm: str = "ppo"
    """Which controller runs: ppo, grpo, sft, reward_model, or one of a fork, as `module:name` or by the name of its
    entry point in the group megarl.controllers."""
    placement: dict[str, Any] = field(default_factory=dict)
    """Ranks of each role: `{actor: 0-3, critic: 4-7, rollout: all, reward: cpu}`, also as `0,2,5-6`; cpu is processes
    beside the ranks. A role that is left out is where the actor is, and actor and rollout on all ranks. Two roles have
    the same ranks, and take turns, or none in common, and work at once. `parallel` is the actor's layout, and that of
    all that have none of their own."""
    roles: dict[str, Any] = field(default_factory=dict)
    """Who plays a role, and with what: `{teacher: {model: /models/big, parallel: {tp: 2}}, reward: {backend: http,
    options: {url: http://judge:8000/score}}, mine: {worker: lab.roles:Mine}}`, as `flow.register_worker` has it. Models
    and layouts of our own roles are in their sections. `workers/README.md` lists the backends."""
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    data: DataConfig = field(default_factory=DataConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    kl: KLConfig = field(default_factory=KLConfig)
    actor_optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The policy's optimizer."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    track: TrackConfig = field(default_factory=TrackConfig)


def load_config(path: str | Path, overrides: typing.Sequence[str] = ()) -> Config:
    """Read a YAML file and apply `section.key=value` overrides, whose values are YAML too.

    Raises ConfigError, naming the key and the nearest known one, for anything unknown, of the wrong type, out of range
    or given twice.
    """
    file = Path(path)
    try:
        there = file.is_file()
    except OSError:  # a name that is too long
        there = False
    if not there:
        raise ConfigError(f"there is no configuration file {path}")
    tree = plain_yaml.read(file)
    tree = {} if tree is None else tree
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds a {type(tree).__name__}, not a mapping of sections")
    return from_dict(plain_yaml.overridden(tree, overrides, _sections()))


def _sections() -> dict[str, str]:
    """Every section, with one of its keys."""
    found: dict[str, str] = {}
    for key in strict.kinds_of(Config):
        found.setdefault(key.rpartition(".")[0], key)
    del found[""]  # algorithm is in none
    return found


def from_dict(tree: dict[str, Any]) -> Config:
    """A Config out of nested plain values; strict as `load_config`."""
    config: Config = strict.build(Config, tree, "", root=Config)
    return config


def describe_keys() -> list[tuple[str, Any]]:
    """Every key with its default, in order: what `--keys` prints and what the tests count."""
    return strict.keys_of(Config())


def describe_ranges() -> dict[str, str]:
    """What each key may be, in words."""
    return {key: strict.describe(kind) for key, kind in strict.kinds_of(Config).items()}
