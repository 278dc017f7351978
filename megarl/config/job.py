"""The run itself: what is trained, on which ranks, with which optimizers, and what is kept of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from megarl.strict import Count, CountOrNone, NotNegative, PathStr, Positive, Range, Seconds, Share

# What a key's number may be is part of its type. Bounds that no run comes near keep a slip from taking hours.
Ranks = Annotated[int, Range(1, 65_536)]
Rate = Annotated[float, Range(0, 10)]
Weight = Annotated[float, Range(0, 1000)]


@dataclass(frozen=True)
class RunConfig:
    dir: PathStr = "runs/default"
    """Run folder: configuration, log, metrics, rollouts, checkpoints, export. In this and every other path `~`,
    `~user`, `$NAME` and `${NAME}` are expanded."""
    seed: CountOrNone = 1
    """Seeds everything: initial heads, data order, sampling."""
    num_rollout: Count = 100
    """Steps of the loop; each generates one batch of rollouts."""
    num_update: Count = 1
    """Optimizer steps per rollout batch, a multiple of `run.epochs`: each epoch is cut into equal mini-batches."""
    epochs: Count = 1
    """Passes over each rollout batch; of SFT over the rows of each step, not over the data."""
    resume: Literal["never", "auto", "forced"] = "never"
    """`auto` goes on from the newest checkpoint in the run folder, or starts afresh where there is none and the run is
    not finished. Most keys may change then; the folder's README.txt says which not. `forced` goes on although some
    of those have changed, or the content of `data.train`: what is trained is then another run's from there on."""
    save_every: CountOrNone = 0
    """Write a checkpoint every so many steps, and at the end; 0 writes none. Where the disk does not take one, training
    goes on, but not beyond the last."""
    max_restarts: CountOrNone = 3
    """How often in a row the run starts again, from its newest checkpoint, when a rank dies or hangs, before it has
    written another one; 0 never does, nor does a run without `save_every`. Mistakes and requests to stop end it."""
    save_async: bool = True
    """Write checkpoints while training goes on: a step waits only until its ranks have copied what they hold, and the
    next save for the one before. The copy takes host memory, on each rank as much as its part of a checkpoint, from the
    first save on; turn it off where the host has no room for that. The last checkpoint, and that of a run which was
    asked to stop, are always waited for."""
    keep_checkpoints: Count = 2
    """How many checkpoints stay on disk."""
    eval_every: CountOrNone = 0
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
    max_skipped: CountOrNone = 5
    """Updates in a row that may be skipped because a gradient is not finite. At one more the models go back to the
    newest checkpoint from before these, with their optimizers, and on with the next data; where there is none, or it
    comes again before a step in which none was skipped, the run stops."""

    @property
    def goes_on(self) -> bool:
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
    eps: Positive = 1e-8
    """Added by Adam to the root of the squares, below which a gradient counts for little."""
    max_grad_norm: NotNegative = 1.0
    """Gradients are scaled down to this norm; 0 leaves them as they are."""


@dataclass(frozen=True)
class CriticConfig:
    path: PathStr = ""
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
    alpha: Positive = 32.0
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
    profile: tuple[Count, ...] = ()
    """Steps over which a profiler looks, such as [3, 4]: with CUDA for `nsys profile -c cudaProfilerApi`, with NVTX
    ranges by phase and role; without, torch's writes a Chrome trace of each rank into the run folder."""
    webhook: str = ""
    """Where alarms are posted as JSON, besides: an http(s) URL, of Slack for one, or `env:NAME` of the environment
    variable that holds it, which is for the command line. It is a secret: the run folder's config.yaml has it not."""
    progress: bool = True
    """Live display on the terminal; plain lines where the output is no terminal."""
