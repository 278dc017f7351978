"""The configuration: dataclasses, strict YAML, `key=value` overrides. `keys.py` is the only documentation of the keys.

`model.megatron` and `rollout.sglang` pass settings of Megatron and SGLang through by their own names, checked against
the fields of `TransformerConfig` and `ServerArgs` when the run starts.

Keys of type `PathStr` are paths in which `~` and `$NAME` are expanded (`paths.py`). `recipes.py` has the defaults that
an algorithm sets.
"""

from __future__ import annotations

import os
import typing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megarl.config import shipped_files, strict
from megarl.config.keys import (  # noqa: F401  re-exported
    AUTO_KEYS,
    AdvantageConfig,
    CorrectionConfig,
    CriticConfig,
    DataConfig,
    GuardsConfig,
    KLConfig,
    LoraConfig,
    LossConfig,
    ModelConfig,
    MuonConfig,
    OnWeightSync,
    OptimizerConfig,
    ParallelConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    SandboxConfig,
    TrackConfig,
    TrainConfig,
    Weight,
)
from megarl.config.paths import expand, expand_config_paths, find_model_folder
from megarl.config.recipes import apply_recipe
from megarl.config.strict import ConfigError, Range, to_dict  # noqa: F401  re-exported

_OTHER_NAMES = {
    "actor_optimizer.lr": "lr learning_rate",
    "actor_optimizer.weight_decay": "weight_decay",
    "actor_optimizer.warmup_fraction": "warmup_ratio",
    "actor_optimizer.schedule": "lr_scheduler_type",
    "actor_optimizer.max_grad_norm": "max_grad_norm grad_clip clip_grad",
    "actor_optimizer.offload_fraction": "optimizer_offload_fraction optimizer_cpu_offload",
    "data.prompts_per_step": "batch_size train_batch_size rollout_batch_size",
    "data.train": "train_files",
    "data.eval": "val_files",
    "rollout.samples_per_prompt": "n num_generations n_samples_per_prompt",
    "rollout.max_new_tokens": "max_tokens response_length max_response_length max_completion_length",
    "rollout.max_context": "max_length max_model_len",
    "parallel.tp": "tensor_model_parallel_size",
    "parallel.pp": "pipeline_model_parallel_size",
    "parallel.ep": "expert_model_parallel_size",
    "parallel.cp": "context_parallel_size",
    "parallel.dynamic_cp": "dynamic_context_parallel hybrid_context_parallel",
    "kl.coef": "kl_coef kl_loss_coef beta",
    "advantage.estimator": "adv_estimator advantage_estimator",
    "loss.clip": "clip_ratio clip_range epsilon eps_clip",
    "loss.clip_high": "epsilon_high clip_ratio_high eps_clip_high",
    "loss.agg_mode": "loss_agg_mode loss_type",
    "loss.entropy_coef": "entropy_coeff",
    "run.ppo_epochs": "epochs num_epochs num_iterations max_epochs",
    "run.num_rollout": "max_steps num_steps total_training_steps",
    "run.save_every": "save_freq save_steps",
    "run.eval_every": "test_freq eval_steps",
    "run.dir": "output_dir save_dir default_local_dir",
    "run.resume": "resume_from_checkpoint",
    "track.trackers": "logger report_to",
    "reward.functions": "reward_funcs reward_fn",
    "model.path": "model_name model_name_or_path",
    "train.max_tokens_per_gpu": "use_dynamic_bsz ppo_max_token_len_per_gpu",
    "lora.rank": "lora_rank lora_r",
    "lora.alpha": "lora_alpha",
    "rollout.max_staleness": "staleness_threshold",
    "rollout.num_speculative_tokens": "num_draft_tokens speculative_num_draft_tokens",
    "rollout.max_tool_response_tokens": "max_tool_response_length",
    "train.routing_replay": "use_rollout_routing_replay router_replay",
    "parallel.ranks_per_node": "n_gpus_per_node num_gpus_per_node",
    "advantage.norm_by_std": "norm_adv_by_std_in_grpo scale_rewards",
    "loss.dual_clip": "clip_ratio_c",
    "loss.policy_loss": "loss_mode",
    "loss.scale_factor": "loss_scale_factor",
    "kl.estimator": "kl_loss_type kl_penalty",
    "kl.target": "target_kl",
    "kl.refresh_reference_every": "ref_model_sync_steps ref_update_interval",
    "kl.apply_to": "use_kl_loss use_kl_in_reward",
    "run.distributed_timeout_s": "distributed_timeout_minutes",
    "run.keep_checkpoints": "max_actor_ckpt_to_keep save_total_limit",
}
"""Names of keys in other projects, for suggestions in errors about unknown keys."""
SYNONYMS = {name: key for key, names in _OTHER_NAMES.items() for name in names.split()}
RENAMED_KEYS = {
    "rollout.max_lag": "rollout.max_staleness",
    "rollout.on_push": "rollout.on_weight_sync",
    "rollout.push_bucket_mb": "rollout.weight_sync_bucket_mb",
    "rollout.verify_every": "rollout.verify_weights_every",
    "rollout.max_aborted": "rollout.max_aborted_frac",
    "rollout.max_failed_tools": "rollout.max_tool_failed_frac",
    "reward.max_failed": "reward.max_failed_frac",
    "train.token_budget": "train.max_tokens_per_gpu",
    "train.logits_at_once": "train.logits_chunk_size",
    "train.mtp": "train.mtp_loss_coef",
    "run.epochs": "run.ppo_epochs",
    "run.timeout_s": "run.distributed_timeout_s",
    "run.max_skipped": "run.max_skipped_updates",
    "track.records": "track.save_replay_data",
    "track.rollouts": "track.save_rollouts",
    "track.profile": "track.profile_steps",
    "data.order": "data.curriculum_key",
    "data.weights": "data.mixture_weights",
    "guards.memory": "guards.oom_retry",
    "lora.targets": "lora.target_modules",
    "sandbox.processes": "sandbox.max_boxes",
    "advantage.kind": "advantage.estimator",
    "kl.most": "kl.max_coef",
    "kl.place": "kl.apply_to",
    "loss.policy": "loss.policy_loss",
    "loss.mean": "loss.agg_mode",
    "loss.length": "loss.scale_factor",
    "roles.reward.options.longer": "roles.reward.options.on_overlong",
    "roles.reward.options.least": "roles.reward.options.min_score",
    "roles.reward.options.most": "roles.reward.options.max_score",
    "rollout.max_observation": "rollout.max_tool_response_tokens",
    "rollout.draft_tokens": "rollout.num_speculative_tokens",
    "train.replay_routing": "train.routing_replay",
    "advantage.group_std": "advantage.norm_by_std",
}
"""Keys of MegaRL 0.1 and their names today."""
RENAMED_VALUES = {
    "advantage.estimator": {
        "group": "grpo",
        "reinforce": "reinforce_pp",
        "reinforce_baseline": "reinforce_pp_baseline",
    },
    "loss.agg_mode": {"token": "token-mean", "sequence": "seq-mean-token-mean", "constant": "seq-mean-token-sum-norm"},
    "correction.proximal": {"drawn": "behavior"},
    "roles.reward.options.on_overlong": {"stop": "error", "cut": "truncate"},
}
"""Values of MegaRL 0.1 by key, and their names today."""


@dataclass(frozen=True)
class Config:
    synonyms, renamed_keys, renamed_values = SYNONYMS, RENAMED_KEYS, RENAMED_VALUES
    algorithm: str = "ppo"
    """Algorithm of `recipes.py`, such as ppo, grpo, sft or reward_model, or a fork's, as `module:name` or by the name
    of its entry point in the group megarl.controllers. The recipe sets the algorithm's defaults; keys set here override
    them."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the algorithm, documented in its controller's `Options`."""
    placement: dict[str, Any] = field(default_factory=dict)
    """Ranks of each role: `{actor: 0-3, critic: 4-7, rollout: all, reward: cpu}`, also as `0,2,5-6`, `[4, 5]`, `nodes
    0-1`, or a role whose ranks it shares; cpu means separate processes. A role that is left out shares the actor's
    ranks; actor and rollout default to all ranks. Roles on the same ranks take turns; on disjoint ranks they run
    concurrently. `parallel` is the layout of the actor, and of all roles without one of their own."""
    roles: dict[str, Any] = field(default_factory=dict)
    """Workers of the roles: `{teacher: {model: /models/big, parallel: {tp: 2}}, reference: {parallel: {pp: 2}}, reward:
    {backend: http, options: {url: http://judge:8000/score}}, mine: {worker: lab.roles:Mine}}`, with the parameters of
    `flow.register_worker`. Models and layouts of actor, critic and reward are in their sections. With `backend: sglang`
    a role has engines for its model, whose settings are in its `rollout`. `workers/README.md` lists the backends."""
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    data: DataConfig = field(default_factory=DataConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    kl: KLConfig = field(default_factory=KLConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    actor_optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The policy's optimizer."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    guards: GuardsConfig = field(default_factory=GuardsConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    track: TrackConfig = field(default_factory=TrackConfig)
    stages: dict[str, Any] = field(default_factory=dict)
    """Keys that change at given steps: `{8200: {rollout: {max_context: 65536}}}` is DeepSeek-R1's longer context from
    step 8,200 on. A stage keeps what earlier ones have set. `config/stages.py` lists the keys; a learning rate is the
    peak of its schedule. Memory is planned for the largest stage, and prompts fit into the smallest context.
    `control.yaml` in the run folder changes the same keys by hand, and takes precedence."""
    expect: dict[str, Any] = field(default_factory=dict)
    """Expected metrics, `{eval/reward_greedy: {min: 0.9}}`, also with `max` and `step`: tools/check_recipes.py runs
    the configuration and compares. The run itself ignores them."""

    @property
    def records_routing(self) -> bool:
        """Whether the engines record each token's experts: to replay them, or to count them."""
        counts = self.rollout.rebalance_experts_every > 0 and not self.rollout.replay
        return self.train.routing_replay or counts


def load_config(path: str | Path, overrides: typing.Sequence[str] = ()) -> Config:
    """Read a YAML file and apply `section.key=value` overrides, whose values are YAML too.

    path: a file, or the name of a recipe that comes with MegaRL, such as `quickstart` (`shipped_files.py`).

    Expands paths in the file, and the file's own (`megarl/config/paths.py`). Resolves Hub names of models to the copies
    in this machine's cache. Raises ConfigError, naming the key and the closest known one, for a key that is unknown, of
    the wrong type, out of range or given twice.
    """
    file = shipped_files.find_file(expand(str(path), "the configuration file"))
    if str(path) and os.path.isdir(file):
        raise ConfigError(f"{path} is a folder; name the configuration file, which is YAML")
    if not os.path.isfile(file):
        raise ConfigError(f"no configuration file {path}")
    if any(text.startswith("track.webhook=") and "://" in text for text in overrides):
        raise ConfigError(
            "track.webhook=URL on the command line is visible to everybody on this machine: put it into the file, or "
            "the URL into an environment variable and track.webhook=env:NAME"
        )
    from megarl.config import plain_yaml  # imports yaml; if that is missing, the error is one line

    tree = plain_yaml.read(file)
    tree = {} if tree is None else tree
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds a {type(tree).__name__}, not a mapping of sections")
    example_keys: dict[str, str] = {}  # one of every section
    for key in strict.collect_key_types(Config):
        section = key.rpartition(".")[0]
        if section:
            example_keys.setdefault(section, key)
    tree = _read_auto(tree)
    layout = tree.get("parallel") or {}
    if overrides.count(AUTO_OVERRIDE) == 1 and isinstance(layout, dict):  # `build_dataclass` rejects other types
        names = ("world_size", "ranks_per_node", "ranks_per_gpu", "gpu_gb", "host_gb")
        job_size = {name: layout[name] for name in names if name in layout}
        tree["parallel"] = {**job_size, "auto": True}
        overrides = [text for text in overrides if text != AUTO_OVERRIDE]
    config = from_dict(plain_yaml.apply_overrides(tree, overrides, example_keys))
    return replace(
        config,
        model=replace(
            config.model,
            path=find_model_folder(config.model.path),
            hf_config=shipped_files.find_file(config.model.hf_config),
        ),
        critic=replace(config.critic, path=find_model_folder(config.critic.path)),
        reward=replace(config.reward, model=find_model_folder(config.reward.model)),
    )


AUTO_OVERRIDE = "parallel=auto"
"""Override that replaces the sizes of a file's `parallel` section."""


def _read_auto(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a configuration tree with `parallel: auto` written as `parallel: {auto: true}`."""
    return {**tree, "parallel": {"auto": True}} if tree.get("parallel") == "auto" else dict(tree)


def _list_auto_keys(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a configuration tree with `parallel.auto: true` written as a list of the keys that it does not
    set."""

    def section(parent: Any, name: str) -> dict[str, Any]:
        value = parent.get(name)
        return value if isinstance(value, dict) else {}  # `build_dataclass` rejects other types

    tree = _read_auto(tree)
    parallel, megatron = section(tree, "parallel"), section(section(tree, "model"), "megatron")
    if not isinstance(parallel.get("auto"), bool):
        return tree
    fixed = {*parallel, *(f"rollout.{name}" for name in section(tree, "rollout"))}
    if any(str(name).startswith("recompute_") for name in megatron):
        fixed.add("recompute")
    auto = [key for key in AUTO_KEYS if key not in fixed] if parallel["auto"] else []
    return {**tree, "parallel": {**parallel, "auto": auto}}


def from_dict(tree: dict[str, Any]) -> Config:
    """Build a Config from nested plain values and the algorithm's recipe. Validates like `load_config`."""
    tree = _list_auto_keys(tree)
    name = tree.get("algorithm", Config.algorithm)
    if isinstance(name, str):  # `build_dataclass` rejects other types
        tree = apply_recipe(tree, name)
    config: Config = strict.build_dataclass(Config, tree, "", root=Config)
    return expand_config_paths(config)


def describe_keys() -> list[tuple[str, Any]]:
    """Return every key with its default, in order; `--keys` prints these."""
    return strict.list_keys(Config())


def describe_ranges() -> dict[str, str]:
    """Return a description of each key's type and range."""
    return {key: strict.describe_type(kind) for key, kind in strict.collect_key_types(Config).items()}
