"""Check the models that a configuration names, as they are on disk, without loading them.

The functions only read files. They raise ConfigError, and append to `warnings` what is valid but surely not intended.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from math import prod
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from megarl.config import Config, ConfigError, strict
from megarl.config.paths import is_hub_name
from megarl.models.family import VALUE_HEAD, HFConfig, is_classifier
from megarl.models.hf_folder import open_hf
from megarl.models.memory import InferenceStage, classifier_stages, inference_stages, unique_params
from megarl.models.registry import family_of, load_hf_config, param_count
from megarl.parallel.placement import (
    BUILTIN_ROLES,
    is_engine_role,
    is_on_megatron,
    role_backends,
    role_config,
    role_settings,
    split_role,
)
from megarl.parallel.policy_configs import policy_config
from megarl.rewards.reward_settings import options_without
from megarl.rewards.sequence_classifier import ClassifierOptions, get_context_length, resolve_label
from megarl.types.requirements import Requirements
from megarl.workers.worker_registry import (
    SEPARATE_REFERENCE,
    TEACHER,
    RegisteredWorker,
    resolve_worker,
    worker_options,
)


def policy_and_critic(
    config: Config, declared: Requirements, dry_run: bool, warnings: list[str]
) -> tuple[HFConfig, HFConfig | None]:
    """Return config.json of the policy and of the critic, if there is one: complete folders, known families, one
    vocabulary."""
    if dry_run and config.model.hf_config:
        hf = _check_family(load_hf_config(config.model.hf_config))
    elif config.model.path:
        hf = read_complete_folder(
            config.model.path, "model.path", declared.has_scalar_head, mtp=config.train.mtp_loss_coef > 0
        )
        check_tokenizer(config.model.path, int(hf["vocab_size"]))
    else:
        raise ConfigError("model.path is not set; it must name the HF folder of the policy")
    if is_classifier(hf) and not declared.has_scalar_head:
        raise ConfigError(
            f"model.path={config.model.path} is a classifier, {hf['architectures'][0]}, which generates no text; a "
            f"reward model serves as reward.model, or starts a critic as critic.path"
        )
    if "critic" not in declared.roles:
        if config.critic.path and not any(split_role(role)[0] == "critic" for role in declared.roles):
            warnings.append(f"critic.path is set, but {declared.name} has no critic")
        return hf, None
    path, source = config.critic.path, f"critic.path={config.critic.path}"
    if not path or _plans_as_policy(path, source, dry_run and bool(config.model.hf_config), warnings):
        return hf, hf
    critic = read_complete_folder(path, "critic.path", head=True)
    reason = "the critic reads the policy's tokens, so it must have its tokenizer and vocabulary"
    _check_vocab_size(hf, config, critic, source, reason, trains=True)
    return hf, critic


def _plans_as_policy(path: str, source: str, dry_run: bool, warnings: list[str]) -> bool:
    """True if a dry run takes the policy's model in place of a folder that does not exist."""
    is_missing = dry_run and not Path(path).exists()
    if is_missing:
        warnings.append(f"{source} not found; planned as if it were the policy's model")
    return is_missing


def _check_vocab_size(
    hf: HFConfig, config: Config, model: HFConfig, source: str, reason: str, trains: bool = False
) -> None:
    """Raise ConfigError if a model's embedding lacks a row for a token of the policy; it may have more rows.

    Embeddings of the same tokenizer differ in padding, also between sizes of a family. A model that is not trained may
    lack padding rows of the policy (`ModelWorker`); a critic would be updated on a token that it does not have.
    """
    size, policy_size, whose = int(model["vocab_size"]), int(hf["vocab_size"]), "the policy"
    if not trains and config.model.path and Path(config.model.path).exists():
        if ids := _read_vocabulary(config.model.path).values():
            policy_size, whose = max(ids) + 1, "the policy's tokenizer"
    if size < policy_size:
        raise ConfigError(f"{source} has a vocabulary of {size}, {whose} one of {policy_size}; {reason}")


def check_same_tokenizer(config: Config, source: str, path: str, reason: str) -> None:
    """Raise ConfigError unless a model's tokenizer has all tokens of the policy's, with the same ids, and the same
    merges: with others the model has never read text as the policy writes it. It may have more tokens. Skipped if the
    policy is not on disk.

    source: the key and the path. reason: why it must have them.
    """
    if not config.model.path or not Path(config.model.path).exists():
        return
    vocabulary, policy_vocabulary = _read_vocabulary(path), _read_vocabulary(config.model.path)
    if vocabulary and policy_vocabulary and policy_vocabulary.items() <= vocabulary.items():
        merges, policy_merges = _read_merges(path), _read_merges(config.model.path)
        if not merges or not policy_merges or merges == policy_merges:
            return
        pairs = enumerate(zip_longest(merges, policy_merges))
        number, pair = next((number, pair) for number, pair in pairs if pair[0] != pair[1])
        actual, expected = ("missing" if merge is None else repr(" ".join(merge)) for merge in pair)
        raise ConfigError(
            f"{source} has another tokenizer than model.path={config.model.path}: its tokens are equal, but merge "
            f"{number} is {actual}, the policy's {expected}; {reason}"
        )
    if not vocabulary and not policy_vocabulary:
        return
    what = "one of them has no vocabulary to compare"
    if vocabulary and policy_vocabulary:
        token, number = min(policy_vocabulary.items() - vocabulary.items(), key=lambda item: item[1])
        what = f"they differ in {token!r}, token {number}"
    raise ConfigError(f"{source} has another tokenizer than model.path={config.model.path}: {what}; {reason}")


def check_positions(hf: HFConfig, config: Config, source: str) -> None:
    """Raise ConfigError if a conversation may have more tokens than a model has positions."""
    longest = int(family_of(hf).gpt_kwargs(hf)["max_sequence_length"])
    rollout = config.rollout
    if rollout.max_context > longest:
        raise ConfigError(f"{rollout.max_context=} is beyond the {longest} positions of {source}; lower it")


def _read_merges(folder: str) -> list[tuple[str, str]]:
    """Return the merges of a folder's byte-pair encoding from tokenizer.json, else merges.txt, in order.

    Empty if it has none.
    """
    tokenizer, lines = Path(folder, "tokenizer.json"), Path(folder, "merges.txt")
    merges: Sequence[Any] = ()
    if tokenizer.is_file():
        merges = (strict.read_json(tokenizer).get("model") or {}).get("merges") or ()
    elif lines.is_file():
        merges = [line for line in lines.read_text(encoding="utf-8").splitlines() if not line.startswith("#version")]
    pairs = [merge.split(" ", 1) if isinstance(merge, str) else merge for merge in merges if merge]
    if broken := [pair for pair in pairs if len(pair) != 2]:
        raise ConfigError(f"{folder}: the merge {' '.join(broken[0])!r} is not a pair; restore its tokenizer")
    return [(str(first), str(second)) for first, second in pairs]


def _read_vocabulary(folder: str) -> dict[str, int]:
    """Return the ids of a folder's tokens from tokenizer.json, else vocab.json, else SentencePiece's tokenizer.model.

    Empty if it has none of them.
    """
    tokenizer, vocabulary, pieces = (Path(folder, n) for n in ("tokenizer.json", "vocab.json", "tokenizer.model"))
    if tokenizer.is_file():
        try:
            return dict(Tokenizer.from_file(str(tokenizer)).get_vocab(with_added_tokens=True))
        except Exception as error:  # noqa: B036  the package raises nothing narrower
            raise ConfigError(f"{tokenizer} is not a tokenizer: {' '.join(str(error).split())[:200]}") from None
    if vocabulary.is_file():
        return strict.read_json(vocabulary)
    if not pieces.is_file():
        return {}
    from sentencepiece import SentencePieceProcessor

    try:
        model = SentencePieceProcessor(model_file=str(pieces))
    except (RuntimeError, OSError):
        return {}  # of another kind, which the tokenizer's class reads
    return {model.id_to_piece(number): number for number in range(model.get_piece_size())}


def vocabulary_hash(folder: str) -> str:
    """Return a hash of the vocabulary; empty if the folder has none. Raises ConfigError."""
    tokens = sorted((number, token) for token, number in _read_vocabulary(folder).items())
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest() if tokens else ""


def check_tokenizer(folder: str, size: int) -> None:
    """Raise ConfigError unless a folder has a readable tokenizer whose ids are below `size`."""
    if not list(Path(folder).glob("tokenizer*")):
        raise ConfigError(f"model.path={folder} has no tokenizer; put tokenizer.json beside config.json")
    for name in ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
        if (file := Path(folder) / name).is_file():
            strict.read_json(file)
    token, highest = max(_read_vocabulary(folder).items(), key=lambda item: item[1], default=("", -1))
    if highest >= size:
        raise ConfigError(
            f"model.path={folder}: the tokenizer gives {token!r} the id {highest}, but config.json has "
            f"vocab_size={size}; the tokenizer is another model's"
        )


def read_complete_folder(path: str, key: str, head: bool, mtp: bool = False) -> HFConfig:
    """Return config.json of a folder, and check that it has all the weights that config.json describes.

    head: the output layer may be missing, because a scalar head replaces it. mtp: require the weights of multi-token
    prediction, too.
    """
    hf = _check_family(folder_config(path, key))
    heads = (VALUE_HEAD, "lm_head.weight") if head or is_classifier(hf) else ()
    open_hf(path).check(dict(hf), optional=heads, mtp=mtp)
    return hf


def folder_config(path: str, key: str) -> HFConfig:
    """Return config.json of a folder. Raises ConfigError if it is missing, or if there are no *.safetensors files."""
    if Path(path).is_file():
        raise ConfigError(f"{key}={path} is a file; name the model's folder, which has its config.json and weights")
    if not Path(path).is_dir():
        remedy = "put the model there, or correct the path"
        if is_hub_name(path):
            remedy = (
                "nor has this machine's cache of the Hub a model of that name: `hf download NAME` gets it by its name, "
                "`hf download NAME --local-dir FOLDER` into a folder"
            )
        raise ConfigError(f"{key}={path}: no such folder; {remedy}")
    hf_config = load_hf_config(path)
    if not list(Path(path).glob("*.safetensors")):
        raise ConfigError(f"{key}={path} has no *.safetensors files; convert the weights to safetensors")
    return hf_config


def _check_family(hf: HFConfig) -> HFConfig:
    """Check that there is a family for a config.json and that it has the required keys; return it."""
    family = family_of(hf)
    family.check(hf)
    family.megatron_config(hf)
    family.gpt_kwargs(hf)
    return hf


@dataclass(frozen=True)
class ServedModels:
    megatron_configs: Mapping[str, HFConfig]
    """config.json of models that Megatron computes, by role."""
    classifier: tuple[HFConfig, int, str] | None
    """The reward model that transformers computes: config.json, number of elements, dtype."""
    engine_configs: Mapping[str, HFConfig] = field(default_factory=dict)
    """config.json of the models on engines besides the first policy's, by role."""
    critic_configs: Mapping[str, HFConfig] = field(default_factory=dict)
    """config.json of the critics of other policies than the first, by role."""

    @property
    def roles(self) -> tuple[str, ...]:
        reward = ("reward",) if self.classifier else ()
        return (*self.megatron_configs, *reward, *self.engine_configs, *self.critic_configs)

    def trained_config(self, role: str) -> HFConfig:
        """Return config.json of the actor or critic of another policy than the first."""
        base, policy = split_role(role)
        return self.critic_configs[role] if base == "critic" else self.engine_configs[f"rollout_{policy}"]

    def count_params(self, role: str) -> int:
        """Return the number of parameters of a role's model, without its head if Megatron computes it."""
        configs = {**self.megatron_configs, **self.engine_configs, **self.critic_configs}
        if role in configs or not self.classifier:
            return sum(param_count(configs[role]).values())
        return self.classifier[1]

    def stages(self, config: Config, declared: Requirements) -> dict[str, list[InferenceStage]]:
        """Return what a rank of each pipeline stage needs, by role. Raises ConfigError if a layout does not divide."""
        stages_by_role = {}
        for role, hf in self.megatron_configs.items():
            head = role == "reward" or is_classifier(hf)
            dtype: str = "float32" if role == "reward" else config.model.dtype
            stages_by_role[role] = inference_stages(hf, role_config(config, role), declared, head, dtype)
        if self.classifier:
            stages_by_role["reward"] = classifier_stages(*self.classifier, config)
        return stages_by_role


def read_served_models(
    hf: HFConfig,
    config: Config,
    declared: Requirements,
    registered: Mapping[str, RegisteredWorker],
    has_builtin_reward: bool,
    dry_run: bool,
    warnings: list[str],
) -> ServedModels:
    """Read the configurations of all models that are not trained: reward models, teachers, those of a fork's roles.

    hf: the policy's. has_builtin_reward: a built-in worker computes the reward, and its options are valid.
    """

    def worker_of(role: str) -> RegisteredWorker:
        return registered.get(role, RegisteredWorker())

    classifier = None
    if has_builtin_reward:
        options = worker_options(config, "reward", worker_of("reward"))
        classifier = _read_classifier(hf, config, options, dry_run, warnings)
    configs = {}
    if reward_config := _reward_model(hf, config, declared, dry_run, warnings):
        configs["reward"] = reward_config
    frozen = (TEACHER, SEPARATE_REFERENCE)
    frozen_policies = [r for r in declared.roles if resolve_worker(config, declared, r, worker_of(r)) in frozen]
    configs |= _read_role_models(hf, config, declared, frozen_policies, dry_run, warnings)
    engine_configs = {
        role: _engine_model(hf, config, role, dry_run, warnings)
        for role in declared.roles
        if is_engine_role(config, role) and role != "rollout"
    }
    critic_configs = {
        role: _other_critic(engine_configs[f"rollout_{policy}"], config, role, dry_run, warnings)
        for role in declared.roles
        for base, policy in [split_role(role)]
        if base == "critic" and policy
    }
    return ServedModels(configs, classifier, engine_configs, critic_configs)


def _other_critic(hf: HFConfig, config: Config, role: str, dry_run: bool, warnings: list[str]) -> HFConfig:
    """Return config.json of another policy's critic. hf: that policy's."""
    derived = policy_config(config, role)
    path, key = derived.critic.path, f"roles.{role}.model" if role_settings(config, role).model else "critic.path"
    source = f"{key}={path}"
    if not path or _plans_as_policy(path, source, dry_run, warnings):
        return hf
    critic = read_complete_folder(path, key, head=True)
    reason = "the critic reads the policy's tokens, so it must have its tokenizer and vocabulary"
    _check_vocab_size(hf, derived, critic, source, reason, trains=True)
    return critic


def _engine_model(hf: HFConfig, config: Config, role: str, dry_run: bool, warnings: list[str]) -> HFConfig:
    """Return config.json of the model on a role's engines, which only sees text of the first policy."""
    path, policy = policy_config(config, role).model.path, split_role(role)[1]
    if policy and not role_settings(config, f"actor_{policy}").model:
        return hf  # the first policy's
    key = f"roles.{f'actor_{policy}' if policy else role}.model"
    source = f"{key}={path}"
    if _plans_as_policy(path, source, dry_run, warnings):
        return hf
    model = read_complete_folder(path, key, head=False)
    if is_classifier(model):
        raise ConfigError(f"{source} is a classifier, {model['architectures'][0]}, which generates no text")
    if not list(Path(path).glob("tokenizer*")):
        raise ConfigError(f"{source} has no tokenizer; put tokenizer.json beside config.json")
    return model


def _reward_model(
    hf: HFConfig, config: Config, declared: Requirements, dry_run: bool, warnings: list[str]
) -> HFConfig | None:
    """Return config.json of the reward model on Megatron, or None. It must read the policy's token ids."""
    path, source = config.reward.model, f"reward.model={config.reward.model}"
    if not path:
        return None
    if "reward" not in declared.roles:
        warnings.append(f"reward.model is set, but {declared.name} has no rollouts to score")
        return None
    if not is_on_megatron(config, "reward"):
        return None
    if _plans_as_policy(path, source, dry_run, warnings):
        return hf
    reward_config = read_complete_folder(path, "reward.model", head=True)
    if VALUE_HEAD not in open_hf(path).names():
        raise ConfigError(
            f"{source} has no {VALUE_HEAD}: it is not a reward model; train one with algorithm=reward_model"
        )
    reason = (
        "the reward model reads the policy's tokens, so it must have its tokenizer and vocabulary; name a model that "
        "has them, or set roles.reward.backend=transformers"
    )
    _check_vocab_size(hf, config, reward_config, source, reason)
    check_same_tokenizer(config, source, path, reason)
    check_positions(reward_config, config, source)
    return reward_config


def _read_classifier(
    hf: HFConfig, config: Config, worker_settings: dict[str, Any], dry_run: bool, warnings: list[str]
) -> tuple[HFConfig, int, str] | None:
    """Return `ServedModels.classifier`. Its tokenizer may differ from the policy's.

    worker_settings: options of its worker.
    """
    path = config.reward.model
    model, service = role_backends(config, "reward")
    if not path or model != "transformers":
        return None
    options = ClassifierOptions.read(options_without(worker_settings, service))
    if _plans_as_policy(path, f"reward.model={path}", dry_run, warnings):
        return hf, sum(param_count(hf).values()), options.dtype
    classifier_config = folder_config(path, "reward.model")
    resolve_label(classifier_config, options, path)
    if not list(Path(path).glob("tokenizer*")) and not (Path(path) / "vocab.txt").is_file():
        raise ConfigError(f"reward.model={path} has no tokenizer; put tokenizer.json beside config.json")
    longest = get_context_length(classifier_config, config.rollout.max_context)
    if longest < config.rollout.max_context and options.on_overlong == "error":
        warnings.append(
            f"rollout.max_context={config.rollout.max_context} is beyond the {longest} positions of "
            f"reward.model={path}: a longer conversation ends the run, or is truncated with "
            f"roles.reward.options.on_overlong=truncate"
        )
    weights = open_hf(path)
    return classifier_config, sum(prod(weights.shape(name)) for name in weights.names()), options.dtype


def _read_role_models(
    hf: HFConfig,
    config: Config,
    declared: Requirements,
    frozen_policies: Collection[str],
    dry_run: bool,
    warnings: list[str],
) -> dict[str, HFConfig]:
    """Return config.json of the `roles` models that Megatron computes, by role; they must read the policy's token ids.

    frozen_policies: roles whose models compute log-probs of tokens.
    """
    warnings += [
        f"roles.{role} is set, but {declared.name} has no {role}" for role in config.roles if role not in declared.roles
    ]
    configs: dict[str, HFConfig] = {}
    for role in declared.roles:
        is_engine = is_engine_role(config, role)
        if is_engine or (split_role(role)[0] in BUILTIN_ROLES and role != "reference"):
            continue
        if role == "reference" and is_on_megatron(config, role) and not role_settings(config, role).model:
            configs[role] = hf  # the policy's, on other ranks or in another layout
        path, key, is_megatron = role_settings(config, role).model, f"roles.{role}.model", is_on_megatron(config, role)
        source = f"{key}={path}"
        if not path and role in frozen_policies and role != "reference":
            raise ConfigError(f"{key} is not set; it must name the HF folder of the {role}")
        if not path:
            continue
        if _plans_as_policy(path, source, dry_run, warnings):
            configs |= {role: hf} if is_megatron else {}
            continue
        if not is_megatron:
            folder_config(path, key)
            continue
        model = configs[role] = read_complete_folder(path, key, head=False)
        if role in frozen_policies and is_classifier(model):
            raise ConfigError(
                f"{source} is a classifier, {model['architectures'][0]}, which has no log-probs of tokens"
            )
        if role in declared.cross_tokenizer_roles:
            check_positions(model, config, source)  # of about as many tokens as the policy's
            continue
        if role == "reference" and config.kl.refresh_reference_every and unique_params(hf) != unique_params(model):
            raise ConfigError(
                f"{source} with kl.refresh_reference_every={config.kl.refresh_reference_every}: that model has other "
                "tensors than the policy, whose weights it cannot take; remove one of them"
            )
        reason = f"the {role} reads the policy's tokens, so it must have its tokenizer and vocabulary; "
        reason += "name a model that has them"
        if config.algorithm == "distill":
            reason += f", or set options.teachers.{role}.tokenizer=teacher"
        _check_vocab_size(hf, config, model, source, reason)
        check_same_tokenizer(config, source, path, reason)
        if declared.has_rollout:
            check_positions(model, config, source)
    return configs
