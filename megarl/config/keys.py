"""All configuration keys, as one dataclass per section. The docstring under a field documents its key.

Sections: run, model, parallel, optimizers, train, critic, lora and track; data and rollout; loss, advantage, kl,
correction, reward and guards; sandbox. `config/__init__.py` assembles them into `Config`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from megarl.config.strict import (
    NonNegativeFloat,
    NonNegativeInt,
    PathStr,
    PositiveFloat,
    PositiveInt,
    Range,
    Seconds,
    Share,
)


@dataclass(frozen=True)
class SandboxConfig:
    """`sandbox/README.md` says what protects from what."""

    backend: str = "bubblewrap"
    """Boxes of this machine by bubblewrap, or the address of a service with SandboxFusion's API (`http://sandbox:8080`),
    or `none`: no protection at all, the program runs as the user who runs the training. A run whose reward or
    environments use the sandbox does not start where its layers cannot be had."""
    memory_mb: Annotated[int, Range(16, 1_048_576)] = 512
    """MiB that one box may use, all of its processes and files together; a caller may give it less or more."""
    processes: Annotated[int, Range(1, 4096)] = 16
    """Boxes that run at once on a machine, of all its ranks and reward processes; others wait for their turn. An
    interpreter counts only while a call runs."""


# What a key's number may be is part of its type. Bounds that no run comes near keep a slip from taking hours.
Ranks = Annotated[int, Range(1, 65_536)]
Rate = Annotated[float, Range(0, 10)]
Weight = Annotated[float, Range(0, 1000)]


@dataclass(frozen=True)
class RunConfig:
    dir: PathStr = "runs/default"
    """Run folder: configuration, log, metrics, rollouts, checkpoints, export. In this and every other path `~`,
    `~user`, `$NAME` and `${NAME}` are expanded."""
    seed: NonNegativeInt = 1
    """Seeds everything: initial heads, data order, sampling."""
    num_rollout: PositiveInt = 100
    """Steps of the loop; each generates one batch of rollouts."""
    num_update: PositiveInt = 1
    """Optimizer steps per rollout batch, a multiple of `run.epochs`: each epoch is cut into equal mini-batches."""
    epochs: PositiveInt = 1
    """Passes over each rollout batch; of SFT over the rows of each step, not over the data."""
    resume: Literal["never", "auto", "forced"] = "never"
    """`auto` goes on from the newest checkpoint in the run folder, or starts afresh where there is none and the run is
    not finished. Most keys may change then; the folder's README.txt says which not. `forced` goes on although some
    of those have changed, or the content of `data.train`: what is trained is then another run's from there on."""
    save_every: NonNegativeInt = 0
    """Write a checkpoint every so many steps, and at the end; 0 writes none. Where the disk does not take one, training
    goes on, but not beyond the last."""
    max_restarts: NonNegativeInt = 3
    """How often in a row the run starts again, from its newest checkpoint, when a rank dies or hangs, before it has
    written another one; 0 never does, nor does a run without `save_every`. Mistakes and requests to stop end it."""
    save_async: bool = True
    """Write checkpoints while training goes on: a step waits only until its ranks have copied what they hold, and the
    next save for the one before. The copy takes host memory, on each rank as much as its part of a checkpoint, from the
    first save on; turn it off where the host has no room for that. The last checkpoint, and that of a run which was
    asked to stop, are always waited for."""
    keep_checkpoints: PositiveInt = 2
    """How many checkpoints stay on disk."""
    eval_every: NonNegativeInt = 0
    """Evaluate on `data.eval` every so many steps, before the first and after the last; 0 never does."""
    eval_samples: Annotated[int, Range(1, 1024)] = 1
    """Sampled answers to each held-out prompt, beside the greedy one; with several there is also `eval/pass_at_<k>`,
    for k = 1, 2, 4 ... up to so many: an answer whose reward is 0.5 or more is right."""
    export: bool = True
    """Write the policy, or the reward model, as an HF folder, `<run.dir>/export`, at the end."""
    timeout_s: Seconds = 1800.0
    """How long a collective may wait for a peer before the run is stopped. Work on the host that takes as long as it
    takes has bounds of its own: `rollout.step_timeout`, `run.storage_timeout_s`, `reward.timeout`."""
    storage_timeout_s: Seconds = 7200.0
    """How long ranks wait for the slowest to read its part of a model or checkpoint, or to write it."""
    max_skipped: NonNegativeInt = 5
    """Updates in a row that may be skipped because a gradient is not finite. At one more the models go back to the
    newest checkpoint from before these, with their optimizers, and on with the next data; where there is none, or it
    comes again before a step in which none was skipped, the run stops."""

    @property
    def resumes(self) -> bool:
        """Whether a run that is in the folder already is continued."""
        return self.resume != "never"


@dataclass(frozen=True)
class ModelConfig:
    path: PathStr = ""
    """HF folder of the policy: config.json, safetensors, tokenizer."""
    hf_config: PathStr = ""
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
    """Share of a weight, times the learning rate, that a step takes off it (AdamW); biases and norms have no decay."""
    beta1: Annotated[float, Range(0, below=1)] = 0.9
    """Adam's share of the mean of gradients that it keeps in a step."""
    beta2: Annotated[float, Range(0, below=1)] = 0.95
    """Adam's share of the mean of squared gradients that it keeps in a step."""
    eps: PositiveFloat = 1e-8
    """Added by Adam to the root of the squares, below which a gradient counts for little."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Gradients are scaled down to this norm; 0 leaves them as they are."""


@dataclass(frozen=True)
class CriticConfig:
    path: PathStr = ""
    """HF folder that the critic starts from; empty for `model.path`. Without a head in it, its head starts at zero."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    """As `actor_optimizer`; of a reward model in training, too."""
    warmup_steps: NonNegativeInt = 0
    """Steps in which only the critic is updated."""
    parallel: dict[str, Any] = field(default_factory=dict)
    """Layout of the critic where it differs: keys of `parallel` but world_size and ranks_per_node."""


@dataclass(frozen=True)
class TrainConfig:
    token_budget: PositiveInt = 3072
    """Tokens of a micro-batch on one rank, `cp` times as many in all; a longer sequence is a micro-batch of its own."""
    logits_at_once: PositiveInt = 512
    """Tokens whose logits exist at the same time: in bf16 about 18 bytes for each token and word, over tp."""
    replay_routing: bool = False
    """MoE: the policy's log-probs and updates send each token through the experts that the engine chose for it, by the
    trainer's own weights of them (R3, arXiv:2510.11370). Matters in bf16. A rank that leads an engine holds a byte, or
    two with more than 256 experts, for each token of its conversations, MoE layer and chosen expert, and while a model
    computes the same again; each rank then also of its replica's tokens and its stage's layers. Not with conversations
    that newer weights go on with (`rollout.oversample`, `rollout.on_push=retract`): these read the beginning again."""
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
    alpha: PositiveFloat = 32.0
    """What the adapters add is scaled by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Linear layers that get an adapter, by Megatron's names (linear_qkv, linear_proj, linear_fc1, linear_fc2, MLA's
    linear_q_down_proj ...), with what they are in where that matters (experts.linear_fc1, shared_experts.linear_fc2);
    empty for all of attention, MLPs and experts."""


@dataclass(frozen=True)
class TrackConfig:
    trackers: tuple[Literal["tensorboard", "wandb", "swanlab", "mlflow"], ...] = ("tensorboard",)
    """Who is told the metrics, beside metrics.jsonl. Keys and projects of W&B, SwanLab and MLflow are in environment
    variables of theirs (WANDB_API_KEY, WANDB_MODE=offline, ...); without key or network the run goes on."""
    rollouts: bool = True
    """Record every rollout in the run folder, as parquet."""
    records: bool = True
    """With `track.rollouts`, where there is such: also the experts that each token went through
    (`train.replay_routing`), and what it could have been (`rollout.top_k`), which a replay of them needs. A byte for
    each MoE layer and expert of a token, two with more than 256 experts; 4 bytes for each word that a token could have
    been. For a large model that is more than all else: 464 bytes a token of DeepSeek-V3, beside 12."""
    profile: tuple[PositiveInt, ...] = ()
    """Steps over which a profiler looks, such as [3, 4]: with CUDA for `nsys profile -c cudaProfilerApi`, with NVTX
    ranges by phase and role; without, torch's writes a Chrome trace of each rank into the run folder."""
    webhook: str = ""
    """Where alarms are posted as JSON, besides: an http(s) URL, of Slack for one, or `env:NAME` of the environment
    variable that holds it, which is for the command line. It is a secret: the run folder's config.yaml has it not."""
    progress: bool = True
    """Live display on the terminal; plain lines where the output is no terminal."""


BatchSize = Annotated[int, Range(1, 1_000_000)]
OnWeightSync = Literal["retract", "in_place", "wait"]


@dataclass(frozen=True)
class RolloutConfig:
    tp: Ranks = 1
    """Ranks per engine: as many engines run as its ranks have room for, each tensor parallel over its ranks."""
    ep: Ranks = 1
    """Expert parallel size inside an engine; divides rollout.tp."""
    samples_per_prompt: BatchSize = 8
    """Rollouts of each prompt in training."""
    max_turns: PositiveInt = 5
    """Turns that the policy may take in one conversation."""
    max_new_tokens: PositiveInt = 1024
    """Tokens that the policy may write in one turn."""
    max_context: PositiveInt = 4096
    """Tokens of a whole conversation. Longer prompts are dropped and counted."""
    temperature: Annotated[float, Range(0, 100)] = 1.0
    """Sampling temperature in training; 0 is greedy. Evaluation runs both greedy and at this temperature, or at
    `rollout.eval_temperature`."""
    top_p: Annotated[float, Range(above=0, most=1)] = 1.0
    """Nucleus sampling: only the likeliest tokens that have this probability together are drawn from. Then, and with
    `top_k` or `min_p`, log-probs, entropy and KL are of the distribution that was drawn from, not of all tokens. Needs
    `rollout.top_k`, too."""
    top_k: Annotated[int, Range(-1, 4096)] = -1
    """Only so many of the likeliest tokens are drawn from, 2 or more; -1 for all of them."""
    min_p: Annotated[float, Range(0, below=1)] = 0.0
    """Only tokens are drawn that have this share of the likeliest one's probability; 0 for all. Needs `rollout.top_k`,
    too."""
    eval_temperature: Annotated[float, Range(above=0, most=100)] | None = None
    """`rollout.temperature` of the sampled answers of an evaluation; null is that of training."""
    eval_top_p: Annotated[float, Range(above=0, most=1)] | None = None
    """`rollout.top_p` of the sampled answers of an evaluation, which needs no `rollout.top_k`; null is that of
    training."""
    tools: tuple[str, ...] = ()
    """Tools as `module:name`; a prompt may call those that it lists, or all where it lists none."""
    environments: tuple[str, ...] = ()
    """Environments as `module:Class`, or agents, see `environments/README.md`. A prompt's column `environment` names
    its own; one that names none has the first."""
    tool_timeout: Seconds = 30.0
    """Seconds that a tool may take before it is killed; the policy then sees the time-out as its observation. An
    environment's methods, too, unless its class has a `timeout`: then the conversation is aborted."""
    max_failed_tools: Share = 0.99
    """Share of a tool's calls that may fail inside the tool: it raises, dies, or is stopped by `rollout.tool_timeout`.
    Judged of 16 calls or more together; beyond it the run stops. Calls that the policy gets wrong, malformed or with
    arguments that the schema does not allow, reach no tool and do not count."""
    tool_memory_mb: Annotated[int, Range(0, 100_000_000)] = 4096
    """MiB of data that each process of tools, environments and reward functions may have, and each that it starts; 0
    for no limit."""
    pass_env: tuple[str, ...] = ()
    """Variables of the environment that tools, environments and reward functions are given; they see PATH, HOME, the
    language and the like, and no others: no tokens, no keys."""
    max_observation: PositiveInt = 1024
    """Tokens of one tool's result that the policy gets to see: of a longer one its beginning and its end, and a mark
    between that says how many are cut. Results are cut further where `rollout.max_context` has no room for them."""
    tool_call_parser: str = ""
    """SGLang's parser for this model's tool calls; empty for that of the model's family."""
    draft_tokens: Annotated[int, Range(0, 1024)] = 0
    """Tokens that the model's own layer of multi-token prediction drafts at a time, and that the policy then accepts or
    replaces (speculative decoding): the same distribution in fewer steps. 0 is off."""
    concurrency: BatchSize = 128
    """Conversations at once per engine, not counting those that wait for a tool, which may be as many more. An engine
    has up to twice as many processes for tools; one is started where a call would wait for another's. An environment
    has one for each of its conversations."""
    asynchronous: bool = False
    """Engines on ranks of their own (`placement.rollout`) go on generating while the others train: a step's prompts are
    begun up to `rollout.max_lag` steps before it is their turn, and answers go on through the pushes of weights. The
    importance ratio of tokens that older weights chose is that to the engine's own log-probs of then."""
    on_push: OnWeightSync = "retract"
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
    `rollout/logprob_diff_stale` compares such tokens' log-probs, which are of the weights that chose them,
    `rollout/logprob_diff_carried` those of newer tokens behind them."""
    request_timeout: Seconds = 600.0
    """Seconds that one answer of the engine may take, from when it begins to work on it; the conversation is aborted
    then."""
    step_timeout: Seconds = 7200.0
    """Seconds that the rollouts of a step may take in all; what is not done by then is aborted."""
    hang_timeout: Seconds = 120.0
    """Seconds that an engine may go without a sign of life while it is asked for something, or take to write a bucket
    of weights, before it is ended and started again. Kernels that are compiled at the first request count."""
    max_aborted: Share = 0.1
    """Share of a step's rollouts that may be aborted, by a failure or a time-out; beyond it the run stops, and waits
    for no others. They are recorded, and neither a loss nor a statistic contains them."""
    start_timeout: Seconds = 600.0
    """Seconds that an engine may take to start, and to do what it is told: wake, sleep, take weights."""
    push_bucket_mb: BatchSize = 1024
    """MiB that each rank may stage for sending weights to engines, and as much for receiving them."""
    verify_every: PositiveInt = 20
    """The engines' weights are verified bit by bit in the first push and every so many; in the others, one part in so
    many of them."""
    replay: PathStr = ""
    """A run folder whose recorded rollouts are used instead of generating: for training without engines, debugging and
    exact repeats. `RUN@7`: the first step is given those of its step 7."""
    sglang: dict[str, Any] = field(default_factory=dict)
    """Further fields of SGLang's ServerArgs, by its own names."""

    @property
    def eval_config(self) -> RolloutConfig:
        """The same with the sampling of an evaluation."""
        temperature = self.temperature if self.eval_temperature is None else self.eval_temperature
        return replace(self, temperature=temperature, top_p=self.top_p if self.eval_top_p is None else self.eval_top_p)

    @property
    def has_truncated_sampling(self) -> bool:
        """Whether some tokens cannot be drawn in training, so that the engine has to say which could be."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclass(frozen=True)
class DataConfig:
    train: tuple[PathStr, ...] = ()
    """Prompts to train on, a file or several: .parquet with verl's columns, or .jsonl. Conversations for SFT, pairs for
    a reward model; `data/README.md` has the columns. What is longer than the model, or `rollout.max_context`, is left
    out and counted."""
    weights: tuple[Annotated[float, Range(above=0, most=1_000_000)], ...] = ()
    """One for each file of `data.train`: the shares that they have in every step, each with epochs of its own. Without,
    they are one data set."""
    order: str = ""
    """Column of numbers by whose order the first epoch goes, from the least: a curriculum. Later ones are shuffled;
    without `data.shuffle` all go by it. Ties, and rows without a number, are where the shuffling puts them."""
    eval: tuple[PathStr, ...] = ()
    """Held-out prompts, conversations or pairs, a file or several, same formats; empty for none."""
    prompts_per_step: BatchSize = 64
    """Prompts in one rollout batch; conversations or pairs in a step of SFT or of a reward model."""
    prompt_key: str = "prompt"
    """Column of the prompt: a list of chat messages, or a string that becomes one user message."""
    label_key: str = "ground_truth"
    """Column of the ground truth where there is no `reward_model.ground_truth`; for SFT, where it is set, that of the
    answer to the prompt."""
    shuffle: bool = True
    """Shuffle anew each epoch, by `run.seed`."""


def max_pending_groups(needed: int, oversample: float) -> int:
    """Groups that a step has under way at most, those of earlier steps among them, where it needs so many."""
    return math.ceil(round(oversample * needed, 6))  # 1.1 * 10 is a little more than 11


@dataclass(frozen=True)
class LossConfig:
    clip: Annotated[float, Range(above=0, most=1)] = 0.2
    """PPO: the ratio is clipped to [1 - clip, 1 + clip_high]."""
    clip_high: Annotated[float, Range(above=0, most=100)] | None = None
    """Upper clip range where it differs from `loss.clip`, as in DAPO."""
    dual_clip: Annotated[float, Range(above=1, most=1000)] | None = 3.0
    """Bound of the loss for negative advantages (arXiv:1912.09729); null turns it off."""
    value_clip: PositiveFloat | None = 0.2
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
    length: PositiveInt | None = None
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
    horizon: PositiveInt = 10000
    """Rollouts over which the adaptive controller closes the gap."""

    @property
    def resolved_estimator(self) -> Literal["k1", "k2", "k3", "k3_unbiased"]:
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
    def has_weights(self) -> bool:
        """Whether tokens' losses have weights."""
        return self.kind in ("tis", "icepop", "mis")

    @property
    def resolved_level(self) -> Literal["token", "sequence", "geometric"]:
        """The level where none is named, too."""
        return self.level or _CORRECTION_DEFAULTS[self.kind][0]

    @property
    def bounds(self) -> tuple[float, float]:
        """Least and largest ratio, also where they are not named."""
        _, low, high = _CORRECTION_DEFAULTS[self.kind]
        return (low if self.low is None else self.low), (high if self.high is None else self.high)

    @property
    def resolved_proximal(self) -> Literal["drawn", "trainer", "engine"]:
        """The proximal policy where none is named, too."""
        return self.proximal or ("trainer" if self.has_weights else "drawn")


_CORRECTION_DEFAULTS: dict[str, tuple[Literal["token", "sequence", "geometric"], float, float]] = {
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
    processes: NonNegativeInt = 0
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
    sequence, and then with all layers recomputed. `megatron/oom_retry.py` says what is covered."""
    alarms: bool = False
    """Say when figures leave their bands and when they are back: those of `observe/health_bands.py`."""
    bands: dict[str, Any] = field(default_factory=dict)
    """Bands of one's own: `{actor/entropy: [0.4, 0.6], perf/tokens_per_second_per_rank: [2000, null]}`, of any metric;
    null in place of a band is none. The upper end of `rollout/logprob_diff_mean` is what a run stops at, also without
    alarms: the mean difference between the log-probs of engine and trainer on the first tokens after the start, the
    first push and each verified one; 0.3 with model.dtype=bfloat16, 0.01 with float32 where it is not given."""
