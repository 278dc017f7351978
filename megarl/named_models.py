"""The models that a configuration names, as they are on disk: whole folders, known families, one vocabulary.

Pure, like `checks.py`: they read files, raise ConfigError, and append to `warnings` what is surely not meant.
"""

from __future__ import annotations

import json
from pathlib import Path

from megarl.checkpoint.hf import open_hf
from megarl.config import Config, ConfigError
from megarl.models.classifier import VALUE_HEAD, is_classifier
from megarl.models.family import HFConfig
from megarl.models.registry import family_of, load_hf_config


def policy_and_critic(config: Config, dry_run: bool, warnings: list[str]) -> tuple[HFConfig, HFConfig | None]:
    """config.json of the policy and, for PPO, of the critic."""
    if dry_run and config.model.hf_config:
        hf = load_hf_config(config.model.hf_config)
    elif config.model.path:
        hf = load_hf_config(_whole_folder(config.model.path, "model.path"))
        if not list(Path(config.model.path).glob("tokenizer*")):
            raise ConfigError(f"model.path={config.model.path} has no tokenizer; put tokenizer.json beside config.json")
    else:
        raise ConfigError("model.path is not set; it must name the HF folder of the policy")
    family_of(hf)
    if is_classifier(hf) and config.algorithm != "reward_model":
        raise ConfigError(
            f"model.path={config.model.path} is a classifier, {hf['architectures'][0]}, which writes no words; a "
            "reward model serves as reward.model, or starts a critic as critic.path"
        )
    if config.algorithm != "ppo":
        if config.critic.path:
            warnings.append(f"critic.path is set, but {config.algorithm} has no critic")
        return hf, None
    if not config.critic.path:
        return hf, hf
    if dry_run and config.model.hf_config and not Path(config.critic.path).exists():
        warnings.append(f"critic.path={config.critic.path} is not here; planned as if it were the policy's model")
        return hf, hf
    critic = load_hf_config(_whole_folder(config.critic.path, "critic.path"))
    if critic.get("vocab_size") != hf.get("vocab_size"):
        raise ConfigError(
            f"critic.path={config.critic.path} has a vocabulary of {critic.get('vocab_size')}, the policy of "
            f"{hf.get('vocab_size')}; the critic reads the policy's tokens, so it must share its tokenizer"
        )
    return hf, critic


def reward_model(hf: HFConfig, config: Config, dry_run: bool, warnings: list[str]) -> HFConfig | None:
    """config.json of the reward model that serves; None where there is none. It reads the policy's token ids."""
    path = config.reward.model
    if not path:
        return None
    if not config.generates:
        warnings.append(f"reward.model is set, but {config.algorithm} has no rollouts to score")
        return None
    if dry_run and not Path(path).exists():
        warnings.append(f"reward.model={path} is not here; planned as if it were the policy's model")
        return hf
    found = load_hf_config(_whole_folder(path, "reward.model"))
    family_of(found)
    if VALUE_HEAD not in open_hf(path).names():
        raise ConfigError(
            f"reward.model={path} has no {VALUE_HEAD}: it is no reward model; train one with algorithm=reward_model"
        )
    must = "the reward model reads the policy's tokens, so it must have its tokenizer and vocabulary"
    if found.get("vocab_size") != hf.get("vocab_size"):
        raise ConfigError(
            f"reward.model={path} has a vocabulary of {found.get('vocab_size')}, the policy of "
            f"{hf.get('vocab_size')}; {must}"
        )
    if config.model.path and Path(config.model.path).exists():
        theirs, ours = _vocabulary(path), _vocabulary(config.model.path)
        if theirs != ours:
            odd = sorted(theirs.items() ^ ours.items(), key=lambda item: item[1])[0] if theirs and ours else None
            what = f"they differ in {odd[0]!r}, token {odd[1]}" if odd else "one of them has no vocabulary to compare"
            raise ConfigError(
                f"reward.model={path} has another tokenizer than model.path={config.model.path}: {what}; {must}"
            )
    longest = int(family_of(found).gpt_kwargs(found)["max_sequence_length"])
    if config.rollout.max_context > longest:
        raise ConfigError(
            f"rollout.max_context={config.rollout.max_context} is beyond the {longest} positions of "
            f"reward.model={path}; lower it"
        )
    return found


def _vocabulary(folder: str) -> dict[str, int]:
    """Tokens and their ids, as tokenizer.json has them, or vocab.json where there is none; empty where neither is."""
    for name in ("tokenizer.json", "vocab.json"):
        file = Path(folder) / name
        if not file.is_file():
            continue
        try:
            tree = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{file} is not valid JSON: {error}") from None
        if name == "vocab.json":
            return dict(tree)
        words = (tree.get("model") or {}).get("vocab") or {}  # a list of (token, score) for a unigram model
        ids = dict(words) if isinstance(words, dict) else {word: i for i, (word, _) in enumerate(words)}
        return ids | {token["content"]: token["id"] for token in tree.get("added_tokens") or ()}
    return {}


def _whole_folder(path: str, key: str) -> str:
    """The folder, if it has a config.json and safetensors."""
    if not Path(path).is_dir():
        raise ConfigError(f"{key}={path}: there is no such folder; put the model there, or correct the path")
    load_hf_config(path)
    if not list(Path(path).glob("*.safetensors")):
        raise ConfigError(f"{key}={path} has no *.safetensors files; convert the weights to safetensors")
    return path
