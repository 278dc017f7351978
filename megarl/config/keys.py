"""All configuration keys, as one dataclass per section. The docstring under a field documents its key.

Sections: run, model, parallel, optimizers, train, critic, lora and track; data and rollout; loss, advantage, kl,
correction, reward and guards; sandbox. `config/__init__.py` assembles them into `Config`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, get_args

from megarl.config.strict import (
    NonNegativeFloat,
    NonNegativeInt,
    PathStr,
    PositiveFloat,
    PositiveInt,
    Range,
    Remedy,
    Seconds,
    Share,
)


@dataclass(frozen=True)
class SandboxConfig:
    """`sandbox/README.md` describes the layers of protection."""

    backend: str = "bubblewrap"
    """`bubblewrap` for local boxes, the URL of a service with SandboxFusion's API (`http://sandbox:8080`), or `none`:
    no protection at all, programs run as the user who runs the training. A run whose reward or environments use the
    sandbox does not start if its layers are not available."""
    memory_mb: Annotated[int, Range(16, 1_048_576)] = 512
    """MiB that one box may use for all its processes and files together; a caller may override it."""
    max_boxes: Annotated[int, Range(1, 4096)] = 16
    """Boxes that run at once on a machine, over all its ranks and reward processes; others queue. An interpreter counts
    only while a call runs."""


# The range of a number is part of its type. Bounds far beyond any real run catch typos before they cost hours.
Ranks = Annotated[int, Range(1, 65_536)]
Rate = Annotated[float, Range(0, 10)]
Weight = Annotated[float, Range(0, 1000)]


@dataclass(frozen=True)
class RunConfig:
    dir: PathStr = "runs/default"
    """Run folder: configuration, log, metrics, rollouts, checkpoints, export. In this and every other path `~`,
    `~user`, `$NAME` and `${NAME}` are expanded."""
    seed: NonNegativeInt = 1
    """Seed of initial heads, data order and sampling."""
    num_rollout: PositiveInt = 100
    """Steps of the loop; each generates one batch of rollouts."""
    num_update: PositiveInt = 1
    """Optimizer steps per rollout batch, a multiple of `run.ppo_epochs`: each epoch is split into equal
    mini-batches."""
    ppo_epochs: PositiveInt = 1
    """Passes over each rollout batch; for SFT, passes over the rows of each step, not over the data set."""
    resume: Literal["never", "auto", "forced"] = "never"
    """`auto` resumes from the newest checkpoint in the run folder, or starts from scratch if there is none and the run
    is not finished. Most keys may change on resuming; the folder's README.txt lists those that must not. `forced`
    resumes even if some of those, or the content of `data.train`, have changed: from there on it is a different run."""
    save_every: NonNegativeInt = 0
    """Steps between checkpoints, with one more at the end; 0 disables them. If the disk cannot take a checkpoint,
    training continues; the run fails only if the last one cannot be written."""
    max_restarts: NonNegativeInt = 3
    """How often in a row the run restarts from its newest checkpoint after a rank died or hung, without having written
    a new one; 0, or a run without `save_every`, never restarts. Configuration errors and requests to stop end the
    run."""
    save_async: bool = True
    """Write checkpoints in the background: the ranks copy their state while the next step computes, the next update
    waits for the copy, and a save waits for the previous one. From the first save on the copy takes host memory, on
    each rank the size of its part of a checkpoint; turn this off if the host cannot hold it. The run always waits for
    its last checkpoint, and for that of a requested stop."""
    memory_save_every: NonNegativeInt = 0
    """Steps between checkpoints in the memory of the nodes, in addition to those on disk (`save_every`); 0 disables
    them. They take seconds where the disk takes minutes. Each rank's part is also on another node, so a restart
    continues from the newest one, with several nodes even if one has been lost. Memory holds up to two of them."""
    memory_dir: PathStr = "/dev/shm"
    """Folder on each node for checkpoints in memory: on tmpfs, or on a disk of the node. Each run has one in it."""
    keep_checkpoints: PositiveInt = 2
    """Number of checkpoints to keep on disk."""
    eval_every: NonNegativeInt = 0
    """Steps between evaluations on `data.eval`, which also run before the first and after the last step; 0 disables
    them."""
    eval_samples: Annotated[int, Range(1, 1024)] = 1
    """Sampled responses to each held-out prompt, in addition to the greedy one; with more than one, `eval/pass_at_<k>`
    is reported for k = 1, 2, 4 ... up to this number, where a reward of 0.5 or more counts as correct."""
    export: bool = True
    """Write the policy, or the reward model, as an HF folder to `<run.dir>/export` at the end."""
    distributed_timeout_s: Seconds = 1800.0
    """Timeout of a collective, after which the run is stopped. Host work of unpredictable length has timeouts of its
    own: `rollout.step_timeout`, `run.storage_timeout_s`, `reward.timeout`."""
    storage_timeout_s: Seconds = 7200.0
    """How long ranks wait for the slowest rank to read or write its part of a model or checkpoint."""
    max_skipped_updates: NonNegativeInt = 5
    """Consecutive updates that may be skipped because of non-finite gradients. One more rolls models and optimizers
    back to the newest checkpoint from before these updates and continues with the next data; without such a checkpoint,
    or if it happens again before a step without skipped updates, the run stops."""

    @property
    def resumes(self) -> bool:
        """True if an existing run in the folder is continued."""
        return self.resume != "never"


@dataclass(frozen=True)
class ModelConfig:
    path: PathStr = ""
    """HF folder of the policy: config.json, safetensors, tokenizer."""
    hf_config: PathStr = ""
    """config.json for a `--dry-run` without access to the folder `model.path`."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Parameters and activations. Master weights and optimizer states are always fp32."""
    megatron: dict[str, Any] = field(default_factory=dict)
    """Further fields of Megatron's TransformerConfig, by Megatron's names."""
    freeze_vision_tower: bool = True
    """Do not train the vision tower, of a model that has one."""


AutoKey = Literal[
    "world_size", "ranks_per_node", "tp", "pp", "vpp", "cp", "ep", "etp", "recompute", "rollout.tp", "rollout.ep"
]
AUTO_KEYS: tuple[AutoKey, ...] = get_args(AutoKey)

RECOMPUTE_MODES = ("none", "selective", "full")
"""Kinds of activation recomputation, the least first."""


@dataclass(frozen=True)
class ParallelConfig:
    synonyms = {
        "tensor_model_parallel_size": "tp",
        "tensor_parallel_size": "tp",
        "pipeline_model_parallel_size": "pp",
        "pipeline_parallel_size": "pp",
        "virtual_pipeline_model_parallel_size": "vpp",
        "context_parallel_size": "cp",
        "expert_model_parallel_size": "ep",
        "expert_parallel_size": "ep",
        "expert_tensor_parallel_size": "etp",
    }
    world_size: Ranks = 1
    """Ranks of the whole job. `torchrun` must start this many; without it they are started for you on one machine."""
    ranks_per_node: Ranks = 8
    """Ranks on one machine."""
    ranks_per_gpu: Annotated[int, Range(1, 64)] = 1
    """Ranks that share a GPU, by NCCL 2.30 or later: any layout runs on a single GPU, slowly, to test and debug it.
    Each has an equal part of the GPU's memory in plans. Without a GPU it changes nothing else."""
    tp: Ranks = 1
    """Tensor parallel size of the dense layers; above 1 enables sequence parallelism."""
    pp: Ranks = 1
    """Pipeline stages."""
    vpp: Ranks = 1
    """Virtual stages per pipeline stage (interleaved schedule): smaller bubbles, more communication."""
    cp: Ranks = 1
    """Context parallel size: each rank has two chunks of every sequence, which is padded to a multiple of 2 cp
    tokens."""
    dynamic_cp: bool = False
    """Choose a context parallel size for each micro-batch: the largest, `cp`, for sequences that need it, and down to 1
    for those within `train.max_tokens_per_gpu`. With smaller sizes, the ranks of a context parallel group compute
    several micro-batches at a time."""
    ep: Ranks = 1
    """Expert parallel size; EP x ETP ranks are taken from TP x CP x DP."""
    etp: Ranks = 1
    """Tensor parallel size of the experts, which are not split by default."""
    auto: tuple[AutoKey, ...] = ()
    """Keys that the program chooses: those of the layout that fits and is the fastest by its model. `parallel: auto`
    leaves all of them to the program, `{auto: true, pp: 1}` all that are not set, and a list, such as [tp, ep], these
    alone. recompute stands for the `recompute_` keys of `model.megatron`. `parallel=auto` on a command line replaces
    the sizes in this section of the file. Roles with their own layout keep it. `docs/tuning.md` states the rule."""
    gpu_gb: Annotated[float, Range(above=0, most=1_000_000)] | None = None
    """GB (1e9 bytes) of a GPU for which `parallel.auto` plans; null asks the GPUs of the run, or without any divides
    the host's memory by the ranks of a node."""
    host_gb: Annotated[float, Range(above=0, most=1_000_000)] | None = None
    """GB (1e9 bytes) of a node's memory, with which a rehearsal (`--rehearse`) compares what its ranks need; null
    compares nothing."""


@dataclass(frozen=True)
class MuonConfig:
    momentum: Annotated[float, Range(0, below=1)] = 0.95
    """Decay rate of the mean of gradients that is orthogonalized."""
    nesterov: bool = False
    """Orthogonalize that mean moved once more towards the gradient."""
    split_qkv: bool = True
    """Orthogonalize the queries', keys' and values' parts of Megatron's fused matrix each by itself; MLA has none,
    and those of vision towers stay whole."""
    scale_mode: Literal["spectral", "shape_scaling", "unit_rms_norm"] = "spectral"
    """Scale of an orthogonal update [out, in]: sqrt(max(out, in)), whose entries have a root mean square of 1 like
    Adam's first update (arXiv:2502.16982); sqrt(max(1, out / in)) (Keller Jordan); or sqrt(out / in)
    (arXiv:2502.07529)."""
    extra_scale_factor: PositiveFloat = 1.0
    """Factor on the update; with `spectral`, 0.2 is the usual root mean square of Adam's updates (arXiv:2502.16982)."""
    coefficient_type: Literal["simple", "quintic", "polar_express", "cans", "aol", "deepseekv4"] = "quintic"
    """Coefficients of the Newton-Schulz iteration: emerging_optimizers' sets."""
    num_ns_steps: PositiveInt = 5
    """Steps of the Newton-Schulz iteration."""
    tp_mode: Literal["duplicated", "distributed", "blockwise"] = "duplicated"
    """With tp or etp: all its ranks gather and orthogonalize a matrix; or share the work, along the dimension that is
    sharded; or each orthogonalizes its own shard, which is another update (Megatron's default)."""
    fp32_matmul_prec: Literal["highest", "high", "medium"] = "medium"
    """Precision of the iteration's matrix products: fp32, TF32 on a GPU, or bf16."""


@dataclass(frozen=True)
class OptimizerConfig:
    type: Literal["adam", "muon"] = "adam"
    """`muon` updates matrices by Muon: momentum, orthogonalized by a Newton-Schulz iteration. Embeddings, output layer,
    value head, norms, biases and other parameters that are not matrices have AdamW. Both have the same learning rate
    and weight decay."""
    muon: MuonConfig = field(default_factory=MuonConfig)
    """Megatron's `muon_` settings."""
    lr: Rate = 1e-6
    """Peak learning rate."""
    min_lr: Rate = 0.0
    """Learning rate at the end of the decay."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Learning rate schedule after the warm-up."""
    warmup_fraction: Share = 0.1
    """Share of all optimizer steps over which the learning rate rises to its peak."""
    weight_decay: Rate = 0.01
    """Decoupled weight decay (AdamW), applied times the learning rate; biases and norms are exempt."""
    beta1: Annotated[float, Range(0, below=1)] = 0.9
    """Adam's decay rate of the mean of gradients."""
    beta2: Annotated[float, Range(0, below=1)] = 0.95
    """Adam's decay rate of the mean of squared gradients."""
    eps: PositiveFloat = 1e-8
    """Term that Adam adds to the root of the mean of squared gradients; much smaller gradients have little effect."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Gradients are clipped to this norm; 0 disables clipping."""
    offload_fraction: Share = 0.0
    """Share of master weights and moments that is in host memory, where AdamW updates it, while gradients and weights
    are copied (Megatron's HybridDeviceOptimizer). Frees up to 12 bytes per element of a rank's shard on the device (8
    in fp32), and takes 16 on the host."""


@dataclass(frozen=True)
class CriticConfig:
    path: PathStr = ""
    """HF folder that the critic starts from; empty for `model.path`. If it has no value head, the head starts at
    zero."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    """Same keys as `actor_optimizer`; also used to train a reward model."""
    warmup_steps: NonNegativeInt = 0
    """Steps in which only the critic is updated."""
    parallel: dict[str, Any] = field(default_factory=dict)
    """Layout of the critic where it differs from the policy's: keys of `parallel` except world_size and
    ranks_per_node."""


@dataclass(frozen=True)
class TrainConfig:
    max_tokens_per_gpu: PositiveInt = 3072
    """Tokens of a micro-batch per rank, `cp` times as many in all; a longer sequence forms a micro-batch by itself."""
    logits_chunk_size: PositiveInt = 512
    """Tokens whose logits are materialized at once: about 18 bytes per token and vocabulary entry in bf16, divided by
    tp."""
    share_prefixes: bool | None = None
    """Compute once what sequences of a micro-batch have in common: the prompt of samples, the earlier turns of
    branches, the prompt of a pair. Outputs and gradients change by rounding alone. Without effect on gated delta nets,
    sparse attention, models with a vision tower, dropout, and auxiliary losses of routers. null: on CPUs; on GPUs the
    attention that does this has not run yet."""
    routing_replay: bool = False
    """MoE: compute the policy's log-probs and updates with the experts that the engine selected for each token,
    weighted by the trainer's own router (R3, arXiv:2510.11370). Matters in bf16. A rank that leads an engine stores one
    byte (two with more than 256 experts) per token of its conversations, MoE layer and selected expert, and as much
    again while a model computes; each rank then also stores that of its replica's tokens and its stage's layers. A
    conversation that newer weights continue is recorded again from its start, so that all of its tokens are replayed
    with the experts of the newest weights that read it."""
    sparse_index_replay: bool = False
    """Sparse attention (DeepSeek-V3.2, GLM-5): let the policy's log-probs and updates attend to the keys that the
    engine's indexer chose for each token. Keys at the margin score nearly or, by its ReLU, exactly the same, so that
    rounding alone makes trainer and engine choose others. A rank that leads an engine stores two bytes (four with a
    `rollout.max_context` above 65,535) per chosen key, layer with an indexer and token after the first index_topk of
    its conversations: 250 KB for a token of DeepSeek-V3.2, 4 KB a layer; each rank then also stores that of its
    replica's tokens and its stage's layers. Conversations up to index_topk tokens cost nothing. What newer
    weights continue is recorded again, as in `train.routing_replay`."""
    indexer_loss_coef: Weight = 0.0
    """Sparse attention: weight of the loss from which the policy's indexers learn, the mean over tokens of the KL
    divergence from attention, over the chosen keys, to the softmax of the indexer's scores (arXiv:2512.02556 section
    2.1), summed over layers; attention itself gets no gradient from it. 0 freezes the indexers, the default of GLM-5's
    RL (arXiv:2602.15763)."""
    mtp_loss_coef: Weight = 0.0
    """Loss weight of the policy's multi-token prediction layers, which then learn to predict the policy's tokens,
    without a gradient into the rest of the model (arXiv:2412.19437 section 2.2; it uses 0.3 and later 0.1, section
    4.2); 0 does not train them. With `lora.rank` their linear layers get adapters like the decoder's."""
    deterministic: bool = False
    """Make equal runs give bitwise equal results on GPUs, too; on CPUs they always do. Slower, and on Hopper the
    backward pass of cuDNN's attention then takes 128 B x sequences x heads x longest length^2 per micro-batch: 256 GiB
    for 128 sequences of up to 1,024 tokens and 16 heads."""
    offload: bool = False
    """Offload weights and optimizer states to the host while engines generate; the host must have room for those of
    both models."""
    fsdp: bool = False
    """Megatron-FSDP instead of DistributedDataParallel: weights and gradients of trained models are sharded over data
    parallel ranks, as optimizer states always are. A layer's weights are gathered for its passes, and all weights of a
    rank's tp and ep shards for weight sync."""
    ddp: dict[str, Any] = field(default_factory=dict)
    """Further fields of Megatron's DistributedDataParallelConfig, by Megatron's names, such as overlap_grad_reduce."""


@dataclass(frozen=True)
class LoraConfig:
    rank: Annotated[int, Range(0, 65536)] = 0
    """Rank of the LoRA adapters (arXiv:2106.09685), which are then all that is trained apart from a critic's head; 0
    trains all weights. Applies to policy and critic; raise their learning rates about tenfold."""
    alpha: PositiveFloat = 32.0
    """The output of the adapters is scaled by alpha / rank."""
    target_modules: tuple[str, ...] = ()
    """Linear layers that get an adapter, by Megatron's names (linear_qkv, linear_proj, linear_fc1, linear_fc2, MLA's
    linear_q_down_proj ...), qualified by their parent where it matters (experts.linear_fc1, shared_experts.linear_fc2);
    empty for all layers of attention, MLPs and experts."""

    @property
    def scale(self) -> float:
        """The factor of B A in a weight with its adapter merged."""
        return self.alpha / self.rank


@dataclass(frozen=True)
class TrackConfig:
    trackers: tuple[Literal["tensorboard", "wandb", "swanlab", "mlflow", "prometheus"], ...] = ("tensorboard",)
    """Trackers that receive the metrics, in addition to metrics.jsonl. W&B, SwanLab and MLflow read keys and projects
    from their own environment variables (WANDB_API_KEY, WANDB_MODE=offline, ...), Prometheus its port from
    MEGARL_PROMETHEUS_PORT; without key, network or port the run continues."""
    opentelemetry: bool = False
    """Send the timeline's spans by OTLP to OTEL_EXPORTER_OTLP_ENDPOINT: each step is a trace of all ranks."""
    save_rollouts: bool = True
    """Record every rollout of training and of evaluations in the run folder, as parquet."""
    save_replay_data: bool = True
    """With `track.save_rollouts`: also record each token's expert routing (`train.routing_replay`), keys of sparse
    attention (`train.sparse_index_replay`) and sampling mask (`rollout.top_k`), and the images, if there are any, which
    a replay of the rollouts needs. They take one byte per MoE layer and expert of a token (two with more than 256
    experts), two or four per layer with an indexer and key, 4 bytes per id of the sampling mask, and each different
    image of a step once. For a large model this exceeds everything else: 464 bytes per token of DeepSeek-V3, next to
    12."""
    profile_steps: tuple[PositiveInt, ...] = ()
    """Steps to profile, such as [3, 4]: with CUDA for `nsys profile -c cudaProfilerApi`, with NVTX ranges by phase and
    role; without CUDA, torch's profiler writes a Chrome trace of each rank into the run folder."""
    webhook: str = ""
    """Where to post alarms as JSON: an http(s) URL, such as Slack's, or `env:NAME` for the environment variable that
    holds it, which is the form for the command line. The URL is a secret and not written to the run folder's
    config.yaml."""
    progress: bool = True
    """Live display on the terminal; plain lines if the output is not a terminal."""


BatchSize = Annotated[int, Range(1, 1_000_000)]
OnWeightSync = Literal["retract", "in_place", "wait"]


@dataclass(frozen=True)
class RolloutConfig:
    tp: Ranks = 1
    """Ranks per engine, which is tensor parallel over them; as many engines run as fit on the role's ranks."""
    ep: Ranks = 1
    """Expert parallel size inside an engine; divides rollout.tp."""
    samples_per_prompt: BatchSize = 8
    """Rollouts of each prompt in training."""
    max_turns: PositiveInt = 5
    """Turns that the policy may take in one conversation."""
    max_new_tokens: PositiveInt = 1024
    """Tokens that the policy may generate in one turn."""
    max_context: PositiveInt = 4096
    """Tokens of a whole conversation. Longer prompts are dropped and counted."""
    temperature: Annotated[float, Range(0, 100)] = 1.0
    """Sampling temperature in training; 0 is greedy. Evaluation runs both greedy and at this temperature, or at
    `rollout.eval_temperature`."""
    top_p: Annotated[float, Range(above=0, most=1)] = 1.0
    """Nucleus sampling: sample only from the most likely tokens whose probabilities sum to this. With `top_p`, `top_k`
    or `min_p`, log-probs, entropy and KL are those of the truncated distribution, not of all tokens. Also needs
    `rollout.top_k`."""
    top_k: Annotated[int, Range(-1, 4096)] = -1
    """Sample only from this many of the most likely tokens, 2 or more; -1 for all tokens."""
    min_p: Annotated[float, Range(0, below=1)] = 0.0
    """Sample only tokens with at least this share of the most likely token's probability; 0 for all. Also needs
    `rollout.top_k`."""
    eval_temperature: Annotated[float, Range(above=0, most=100)] | None = None
    """`rollout.temperature` of the sampled responses of an evaluation; null uses that of training."""
    eval_top_p: Annotated[float, Range(above=0, most=1)] | None = None
    """`rollout.top_p` of the sampled responses of an evaluation, which does not need `rollout.top_k`; null uses that of
    training."""
    tools: tuple[str, ...] = ()
    """Tools as `module:name`; a prompt may call the tools that it lists, or all if it lists none."""
    environments: tuple[str, ...] = ()
    """Environments as `module:Class`, or agents, see `environments/README.md`. A prompt selects one with its column
    `environment`; the default is the first."""
    tool_timeout: Seconds = 30.0
    """Seconds that a tool may take before it is killed; the policy then sees the timeout as its observation. Also
    applies to an environment's methods unless its class has a `timeout`; their timeout aborts the conversation."""
    max_tool_failed_frac: Share = 0.99
    """Share of a tool's calls that may fail inside the tool: it raises, dies, or exceeds `rollout.tool_timeout`.
    Evaluated over 16 calls or more; above it the run stops. Malformed calls, or calls with arguments that the schema
    does not allow, are the policy's mistakes: they reach no tool and do not count."""
    tool_memory_mb: Annotated[int, Range(0, 100_000_000)] = 4096
    """MiB of data that each process of tools, environments and reward functions, and each of its children, may have; 0
    for no limit."""
    pass_env: tuple[str, ...] = ()
    """Environment variables to pass to tools, environments and reward functions. By default they see only PATH, HOME,
    the locale and the like: no tokens, no keys."""
    max_tool_response_tokens: PositiveInt = 1024
    """Tokens of one tool result that the policy sees: a longer result is cut to its beginning and its end, with a note
    between that gives the number of omitted tokens. Results are shortened further to fit `rollout.max_context`."""
    tool_call_parser: str = ""
    """SGLang's parser for this model's tool calls; empty for that of the model's family."""
    num_speculative_tokens: Annotated[int, Range(0, 1024)] = 0
    """Tokens that the model's multi-token prediction layer drafts at a time, which the policy then accepts or replaces
    (speculative decoding): the same distribution in fewer steps. 0 disables it."""
    concurrency: BatchSize = 128
    """Concurrent conversations per engine, not counting those that wait for a tool, which may be as many again. An
    engine has up to twice as many tool processes, each started only when a call would otherwise wait. An environment
    has one process per conversation."""
    fit_kv_cache: bool = False
    """Adapt the number of conversations in flight, at most those of `rollout.concurrency`, to the engine's KV cache.
    Once it evicts prefixes that next turns need, or retracts requests, the youngest conversations wait until the others
    leave room. Conversations that wait long for a tool take no room. `engine/evicted_frac` shows whether it is needed.
    Without `rollout.external`, whose engines have caches of their own."""
    asynchronous: bool = False
    """Engines on separate ranks (`placement.rollout`) keep generating while the others train, and engines that share
    ranks with models whenever these leave them the device: a step's prompts start up to `rollout.max_staleness` steps
    early, and responses continue across weight syncs. For tokens that older weights sampled, the importance ratio is to
    the engine's log-probs at that time."""
    on_weight_sync: OnWeightSync = "retract"
    """How running responses are handled when engines get new weights (`rollout.asynchronous`, `rollout.oversample`):
    `retract` interrupts them and continues from their tokens with a recomputed KV cache; `in_place` continues with the
    KV cache of the old weights, at no cost and with a small bias; `wait` lets them finish first, so that each response
    comes from one version of the weights. `in_place` is for engines without models on their ranks, since others release
    their KV cache meanwhile."""
    oversample: Annotated[float, Range(1, 100)] = 1.0
    """Ratio of prompts in flight to the prompts that a step needs, `data.prompts_per_step`. A step takes those that are
    done first; the others continue in the next step, or, with `rollout.asynchronous`, meanwhile. 1 disables it: a step
    waits for its longest response."""
    max_staleness: Annotated[int, Range(0, 1000)] = 1
    """Maximum staleness: versions by which a rollout's first token may be older than the weights in training.
    `rollout.asynchronous` starts no prompt earlier: 0 is on policy, 1 overlaps a step's generation with the previous
    step's training. With `rollout.oversample`, rollouts that would exceed it start over. `rollout/staleness_mean` and
    others report the staleness, and `rollout/logprob_diff_stale` compares the log-probs of stale tokens, which are
    those of the weights that sampled them."""
    request_timeout: Seconds = 600.0
    """Seconds that one response may take once the engine has started on it; then the conversation is aborted."""
    step_timeout: Seconds = 7200.0
    """Seconds that the rollouts of a step may take in all; unfinished ones are then aborted."""
    hang_timeout: Seconds = 120.0
    """Seconds without progress of an engine that has requests, or is writing a bucket of weights, before it is
    restarted. Kernel compilation at the first request counts."""
    max_aborted_frac: Share = 0.1
    """Share of a step's rollouts that may be aborted by a failure or a timeout; above it the run stops without waiting
    for the others. Aborted rollouts are recorded, but enter no loss and no statistic."""
    start_timeout: Seconds = 600.0
    """Seconds that an engine may take to start, and to execute a command: wake, sleep, receive weights."""
    weight_sync_bucket_mb: BatchSize = 1024
    """MiB that each rank may stage for sending weights to engines, and as much for receiving them."""
    verify_weights_every: PositiveInt = 20
    """Engine weights are verified bit by bit on the first and every N-th weight sync; the other syncs verify a 1/N
    sample."""
    sync_changes_only: bool = False
    """Between nodes, weight syncs send only the 16-bit words that have changed since the last sync; the engines get the
    same bits. Pays where the network is slow and most weights keep their bits: BF16 with a small learning rate. Each
    rank keeps a copy of the shards that it sends in host memory, and engines that sleep keep their weights there. The
    first sync, and the first after the restart of an engine, send everything."""
    num_redundant_experts: Annotated[int, Range(0, 4096)] = 0
    """Redundant experts of each MoE layer of an engine: copies of the most loaded experts, which share their tokens
    (EPLB, arXiv:2412.19437 section 3.4). `rollout.ep` must divide the experts with the copies. Needs
    `rollout.rebalance_experts_every`."""
    rebalance_experts_every: Annotated[int, Range(0, 1_000_000)] = 0
    """Every N-th step, the weight sync places an engine's experts on its expert parallel ranks so that the tokens that
    they got since the last time are balanced (EPLB), if that lowers the imbalance by 2 % of the mean; 0 leaves them in
    place. The engines record each token's experts for that, as with `train.routing_replay`, without which the records
    are dropped once they are counted. A sync that moves experts is verified in full."""
    sync_adapters_only: bool = False
    """With `lora.rank`: weight syncs send the adapters alone, and each engine rank merges them into the weights that it
    has loaded from `model.path`, with the bits that a sync of all weights would give. The engines keep a copy of the
    weights that have adapters in host memory, and if they sleep, one of all weights."""
    max_loras: Annotated[int, Range(0, 64)] = 0
    """With `lora.rank`: adapters that an engine serves at once, one for each policy (vLLM's name). The policies of a
    controller with several then share the engines of the first, which hold the weights of `model.path` once; weight
    syncs send the adapters alone, and requests name theirs. 0: each policy has engines of its own, with its adapters
    merged. With `rollout.engine=vllm` and dense models, on CPUs only, not with `external`, nor with `asynchronous` for
    several policies. A value above the number of policies only costs memory."""
    replay: PathStr = ""
    """Run folder whose recorded rollouts are used instead of generating: for training without engines, debugging and
    exact repeats. Each generation of a step gets the rollouts of the same generation of the recorded step, however they
    were generated; keys that concern engines alone (`rollout.asynchronous`, `rollout.oversample` ...) then have no
    effect. `RUN@7` starts with the rollouts of step 7. With several policies, each replays its own
    recording."""
    external: tuple[str, ...] = ()
    """Addresses HOST:PORT of engines outside of the job, which `tools/engine_pool.py serve` starts from the same
    configuration. They get the weights of each weight sync and take part of the requests, on top of the run's own
    engines; `rollout.concurrency` stays the same. May change in any step, see `tools/engine_pool.py add`. One that dies
    loses no sample, and is used again from the weight sync that finds it back."""
    external_weights_dir: PathStr = ""
    """Folder that the run and the engines of `rollout.external` share, such as one on a network file system. Weights
    reach them in files there, which all of them read and the run then removes; it needs room for half of
    `rollout.weight_sync_bucket_mb` per rank with an engine. Runs whose `run.dir` is the same path on different machines
    need one each. Empty sends weights to each engine over TCP. An engine may
    see the folder at another path: `tools/engine_pool.py serve ... rollout.external_weights_dir=/mnt/x`."""
    engine: str = "sglang"
    """Engine that generates: `sglang`; `vllm`, on CPUs and for some model families; or a fork's own as `module:name`,
    see `megarl/engine/README.md`."""
    sglang: dict[str, Any] = field(default_factory=dict)
    """Further fields of SGLang's ServerArgs, by SGLang's names."""
    vllm: dict[str, Any] = field(default_factory=dict)
    """Further fields of vLLM's AsyncEngineArgs, by vLLM's names; `megarl/engine/vllm/vllm_settings.py` lists those that
    leave weights in place."""

    @property
    def eval_config(self) -> RolloutConfig:
        """This section with the sampling parameters of an evaluation."""
        temperature = self.temperature if self.eval_temperature is None else self.eval_temperature
        return replace(self, temperature=temperature, top_p=self.top_p if self.eval_top_p is None else self.eval_top_p)

    @property
    def has_truncated_sampling(self) -> bool:
        """True if training samples from a subset of the tokens, so that the engine must report sampling masks."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)


@dataclass(frozen=True)
class DataConfig:
    train: tuple[PathStr, ...] = ()
    """Training prompts, one or more files: .parquet with verl's columns, or .jsonl. Conversations for SFT, pairs for
    a reward model; `data/README.md` documents the columns. Rows longer than the model's context, or
    `rollout.max_context`, are dropped and counted."""
    mixture_weights: tuple[Annotated[float, Range(above=0, most=1_000_000)], ...] = ()
    """One weight per file of `data.train`: its share in every step; each file then has its own epochs. Empty joins the
    files into one data set."""
    curriculum_key: str = ""
    """Numeric column that sorts the first epoch in ascending order: a curriculum. Later epochs are shuffled; without
    `data.shuffle` all are sorted. Ties, and rows without a number, stay where the shuffle puts them."""
    eval: tuple[PathStr, ...] = ()
    """Held-out prompts, conversations or pairs, one or more files in the same formats; empty for none."""
    prompts_per_step: BatchSize = 64
    """Prompts in one rollout batch; conversations or pairs in a step of SFT or reward modeling."""
    prompt_key: str = "prompt"
    """Column of the prompt: a list of chat messages, or a string that becomes one user message."""
    label_key: str = "ground_truth"
    """Column of the ground truth if there is no `reward_model.ground_truth`; for SFT, if set, the column of the
    response to the prompt."""
    shuffle: bool = True
    """Reshuffle each epoch, with `run.seed`."""


def max_pending_groups(needed: int, oversample: float) -> int:
    """Return the maximum number of groups in flight, including those of earlier steps, for a step that needs
    `needed`."""
    return math.ceil(round(oversample * needed, 6))  # in fp, 1.1 * 10 is slightly more than 11


@dataclass(frozen=True)
class LossConfig:
    clip: Annotated[float, Range(above=0, most=1)] = 0.2
    """PPO: the ratio is clipped to [1 - clip, 1 + clip_high]."""
    clip_high: Annotated[float, Range(above=0, most=100)] | None = None
    """Upper clip range if it differs from `loss.clip`, as in DAPO."""
    dual_clip: Annotated[float, Range(above=1, most=1000)] | None = 3.0
    """Bound of the loss for negative advantages (arXiv:1912.09729); null disables it."""
    value_clip: PositiveFloat | None = 0.2
    """Clip range of the value update; null disables it."""
    entropy_coef: Weight = 0.0
    """Weight of the entropy bonus."""
    policy_loss: str = "ppo"
    """The policy loss: ppo, gspo, gspo_token, gmpo, cispo, sapo, clip_cov, kl_cov, or `module:name` of a fork.
    `algorithms/README.md` lists the papers. The clips above apply to ppo and clip_cov; other losses have their own."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the policy loss, such as `{clip_low: 0.0003}` for gspo; `algorithms/README.md` lists them."""
    agg_mode: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = "token-mean"
    """How an update averages token losses, by verl's names: `token-mean` over all action tokens (DAPO, arXiv:2503.14476
    section 3.3); `seq-mean-token-mean` over sequences, each the mean over its action tokens (GRPO, arXiv:2402.03300 eq.
    3); `seq-mean-token-sum-norm` over sequences, each the sum over its action tokens divided by `loss.scale_factor`
    (Dr. GRPO, arXiv:2503.20783). An agent's episode counts as one sequence. Metrics are means over action tokens."""
    scale_factor: PositiveInt | None = None
    """Divisor of `loss.agg_mode=seq-mean-token-sum-norm`; null for the tokens that the policy may generate in a
    conversation, which are `rollout.max_new_tokens` times `rollout.max_turns`, at most `rollout.max_context`."""
    truncated: Literal["train", "mask", "drop"] = "train"
    """Rollouts truncated by a token limit or the number of turns: trained on like others; masked, that is without a
    loss of their own but counted in their group (DAPO's overlong filtering, arXiv:2503.14476 section 3.4); or dropped
    like aborted ones, which are never trained on."""


@dataclass(frozen=True)
class AdvantageConfig:
    estimator: Literal["grpo", "gdpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "opo"] = "grpo"
    """Baseline of a reward in GRPO: `grpo`, its group's mean; `gdpo`, that for each part of the reward, whose weighted
    sum is normalized over the batch; `rloo`, the mean of the others of its group; `reinforce_pp`, normalization over
    the batch (REINFORCE++); `reinforce_pp_baseline`, its group's mean, then normalization over the batch; `opo`, its
    group's length-weighted mean. `algorithms/README.md` lists the papers."""
    gamma: Share = 1.0
    """Discount per action token in PPO and REINFORCE++. Below 1 the first tokens of a long response learn nothing from
    a reward at its end: 0.99^1000 is 4e-5."""
    lam: Share = 0.95
    """GAE's lambda."""
    whiten: bool = True
    """PPO: normalize advantages to mean 0 and standard deviation 1 over the global batch's action tokens."""
    norm_by_std: bool = True
    """GRPO, `advantage.estimator=grpo`: divide by the group's standard deviation; Dr. GRPO does not."""


@dataclass(frozen=True)
class KLConfig:
    apply_to: Literal["reward", "loss", "none"] = "reward"
    """Where the KL to the reference policy enters; `none` builds no reference. Many recipes set it, such as `loss` for
    grpo (`controllers/README.md`)."""
    estimator: Literal["k1", "k2", "k3", "k3_unbiased"] | None = None
    """Estimator of the KL at a token (http://joschu.net/blog/kl-approx.html); null is k1 in the reward and k3_unbiased
    in the loss. The latter is k3 times the importance ratio (arXiv:2512.02556 section 3.1), whose gradient is the KL's,
    on policy and off policy. As a loss, k2 has the KL's gradient on policy only, k3 that of another divergence, on
    policy the reversed KL(reference || policy), and k1 none."""
    coef: Weight = 0.001
    """Initial coefficient."""
    target: Annotated[float, Range(above=0, most=1000)] | None = 0.015
    """Adaptive controller's target in nats per token (arXiv:1909.08593); null keeps the coefficient fixed."""
    max_coef: Weight = 0.2
    """Upper bound of the coefficient under the adaptive controller."""
    horizon: PositiveInt = 10000
    """Rollouts over which the adaptive controller closes the gap."""
    refresh_reference_every: NonNegativeInt = 0
    """Steps after which the policy's current weights become the reference, again and again, as in DeepSeek-R1
    (arXiv:2501.12948, every 400 steps); 0 keeps the weights of `model.path`. The KL, `kl.target` and `guards.kl` are
    relative to the present reference: the KL restarts at 0 after each refresh, and an adaptive coefficient carries on
    from its value, so it falls until the KL is back at its target; `kl.target: null` keeps it fixed. Takes as much host
    memory as without, or with LoRA that of a copy of the adapters; checkpoints then hold the reference, too. With
    several policies, each policy refreshes its own reference."""

    @property
    def resolved_estimator(self) -> Literal["k1", "k2", "k3", "k3_unbiased"]:
        """The estimator, with its default resolved."""
        return self.estimator or ("k3_unbiased" if self.apply_to == "loss" else "k1")


@dataclass(frozen=True)
class CorrectionConfig:
    """`algorithms/CORRECTIONS.md` has the equations and the names in other projects."""

    kind: Literal["none", "tis", "icepop", "mis", "reject"] = "none"
    """Correction if the policy that learns differs from the one that sampled, through other kernels or older weights,
    by the ratio of its probability of a token to the engine's. `tis`: weight a token's loss by the ratio, clipped to
    [low, high]; `icepop`: weight it, and mask it outside this range (arXiv:2510.18855); `mis`: the same with the ratio
    of the whole sequence; `reject`: leave out sequences outside the range, and do not weight the others."""
    level: Literal["token", "sequence", "geometric"] | None = None
    """Level of the ratio: a token, the product over a sequence, or the geometric mean over its tokens. null is token
    for tis and icepop, sequence for mis, geometric for reject; `token` rejects a sequence with one such token."""
    low: Annotated[float, Range(0, 1_000_000)] | None = None
    """Smallest ratio; null is 0 for tis, 0.5 for icepop and mis, 0.95 for reject."""
    high: Annotated[float, Range(above=0, most=1_000_000_000)] | None = None
    """Largest ratio; null is 2 for tis and mis, 5 for icepop, 1.05 for reject."""
    proximal: Literal["behavior", "trainer", "engine"] | None = None
    """Log-probs in the denominator of the loss's clipped ratio. `trainer`: the trainer's at the beginning of the step,
    which with `kind` tis is decoupled PPO (arXiv:2505.24298); `engine`: the engine's, which saves computing the
    trainer's; `behavior`: the trainer's, but the engine's for tokens of older weights. null is trainer for the kinds
    with weights, behavior for none and reject."""

    @property
    def has_weights(self) -> bool:
        """True if the correction weights token losses."""
        return self.kind in ("tis", "icepop", "mis")

    @property
    def resolved_level(self) -> Literal["token", "sequence", "geometric"]:
        """The level, with its default resolved."""
        return self.level or _CORRECTION_DEFAULTS[self.kind][0]

    @property
    def bounds(self) -> tuple[float, float]:
        """Smallest and largest ratio, with defaults resolved."""
        _, low, high = _CORRECTION_DEFAULTS[self.kind]
        return (low if self.low is None else self.low), (high if self.high is None else self.high)

    @property
    def resolved_proximal(self) -> Literal["behavior", "trainer", "engine"]:
        """The proximal policy, with its default resolved."""
        return self.proximal or ("trainer" if self.has_weights else "behavior")


_CORRECTION_DEFAULTS: dict[str, tuple[Literal["token", "sequence", "geometric"], float, float]] = {
    "none": ("token", 0.5, 2.0),  # for metrics only
    "tis": ("token", 0.0, 2.0),
    "icepop": ("token", 0.5, 5.0),
    "mis": ("sequence", 0.5, 2.0),
    "reject": ("geometric", 0.95, 1.05),
}
"""Default (level, low, high) of each kind of correction."""


Weights = Annotated[
    dict[str, Any], Remedy("write {right: 1, short: 0.1}, by the names of functions; the environment's is environment")
]


@dataclass(frozen=True)
class RewardConfig:
    functions: tuple[str, ...] = ()
    """Reward functions as `module:name`; each takes a Rollout and returns a number, at most 1e6, or a `Reward`. Those
    in the signature of another library are `verl:module:name` or `trl:module:name`. They run in separate processes
    during generation, coroutine functions concurrently. The reward is their sum."""
    weights: Weights = field(default_factory=dict)
    """Weight of each part of the reward in the sum: functions by name, `environment`, `model`, `service`, `judge`; the
    default is 1. `control.yaml` in the run folder can change it during the run, see `rewards/README.md`."""
    model: PathStr = ""
    """HF folder of a reward model, as `algorithm: reward_model` exports it, with the policy's tokenizer: its score of
    the whole conversation is added to the reward. It runs in fp32 on the job's ranks with the policy's layout, or that
    of `roles.reward.parallel`; with `roles.reward.backend=transformers` it may be any sequence classifier."""
    timeout: Seconds = 60.0
    """Seconds that one call of a reward function may take; after that the rollout has no reward."""
    processes: NonNegativeInt = 0
    """Processes per machine for reward functions; 0 is half of its cores, at most 64."""
    max_failed_frac: Share = 0.1
    """Share of a step's rollouts that may lack a reward because a part of it failed: they are not trained on and enter
    no mean. Above it the run stops immediately, without waiting for the others, and reports the reason."""


@dataclass(frozen=True)
class GuardsConfig:
    """Automatic reactions when a run goes wrong, all off by default. `observe/README.md` explains each, and what to
    do."""

    ppo_kl: Annotated[float, Range(above=0, most=1000)] | None = None
    """`actor/ppo_kl` above which the policy is rolled back to before the step, the step's other updates are skipped,
    and the learning rate restarts with its warm-up; three rollbacks in a row end the run. A usual value is 0.05. Each
    rank keeps one host copy of its part of the policy and its optimizer, refreshed at each step."""
    kl: Annotated[float, Range(above=0, most=1000)] | None = None
    """KL to the reference, in nats per token, above which `kl.coef` falls to 0 and stays there until the user changes
    it, because the penalty rather than the reward would drive the policy."""
    oom_retry: bool = False
    """After an out-of-memory error on any rank, all ranks repeat the pass with half as many tokens per micro-batch,
    down to one sequence, and then with all layers recomputed. `megatron/oom_retry.py` documents what is covered."""
    alarms: bool = False
    """Raise alarms when metrics leave the bands of `observe/health_bands.py`, and log when they are back."""
    bands: dict[str, Any] = field(default_factory=dict)
    """Custom bands for any metric: `{actor/entropy: [0.4, 0.6], perf/tokens_per_second_per_rank: [2000, null]}`; null
    instead of a band disables it. The upper end of `rollout/logprob_diff_mean` stops the run even without alarms: it
    bounds the mean difference between the log-probs of engine and trainer on the first tokens after the start, the
    first weight sync and each verified one; the default is 0.3 with model.dtype=bfloat16 and 0.01 with float32."""
