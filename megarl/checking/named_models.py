"""The models that a configuration names, as they are on disk: whole folders, known families, one vocabulary. Here those
that are trained; `served_models.py` has the others.

Pure, like `checks.py`: they read files, raise ConfigError, and append to `warnings` what is surely not meant.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from tokenizers import Tokenizer

from megarl import strict
from megarl.checkpoint.hf import open_hf
from megarl.config import Config, ConfigError
from megarl.config.hub import is_name
from megarl.models.classifier import VALUE_HEAD, is_classifier
from megarl.models.family import HFConfig
from megarl.models.registry import family_of, load_hf_config
from megarl.types.declared import Declared


def policy_and_critic(
    config: Config, declared: Declared, dry_run: bool, warnings: list[str]
) -> tuple[HFConfig, HFConfig | None]:
    """config.json of the policy and, where there is one, of the critic."""
    if dry_run and config.model.hf_config:
        hf = _known(load_hf_config(config.model.hf_config))
    elif config.model.path:
        hf = whole_folder(config.model.path, "model.path", declared.trains_head, mtp=config.train.mtp > 0)
        _check_tokenizer(config.model.path, int(hf["vocab_size"]))
    else:
        raise ConfigError("model.path is not set; it must name the HF folder of the policy")
    if is_classifier(hf) and not declared.trains_head:
        raise ConfigError(
            f"model.path={config.model.path} is a classifier, {hf['architectures'][0]}, which writes no words; a "
            "reward model serves as reward.model, or starts a critic as critic.path"
        )
    if "critic" not in declared.roles:
        if config.critic.path:
            warnings.append(f"critic.path is set, but {declared.name} has no critic")
        return hf, None
    if not config.critic.path:
        return hf, hf
    if dry_run and config.model.hf_config and not Path(config.critic.path).exists():
        warnings.append(f"critic.path={config.critic.path} is not here; planned as if it were the policy's model")
        return hf, hf
    critic = whole_folder(config.critic.path, "critic.path", head=True)
    if critic.get("vocab_size") != hf.get("vocab_size"):
        raise ConfigError(
            f"critic.path={config.critic.path} has a vocabulary of {critic.get('vocab_size')}, the policy of "
            f"{hf.get('vocab_size')}; the critic reads the policy's tokens, so it must share its tokenizer"
        )
    return hf, critic


def check_same_tokenizer(config: Config, which: str, path: str, must: str) -> None:
    """Raise ConfigError unless a model's tokenizer has the words of the policy's, which may not be at hand. which: the
    key and the path. must: why."""
    if not config.model.path or not Path(config.model.path).exists():
        return
    theirs, ours = _vocabulary(path), _vocabulary(config.model.path)
    if theirs == ours:
        return
    odd = sorted(theirs.items() ^ ours.items(), key=lambda item: item[1])[0] if theirs and ours else None
    what = f"they differ in {odd[0]!r}, token {odd[1]}" if odd else "one of them has no vocabulary to compare"
    raise ConfigError(f"{which} has another tokenizer than model.path={config.model.path}: {what}; {must}")


def check_positions(hf: HFConfig, config: Config, which: str) -> None:
    """Raise ConfigError where a conversation may have more tokens than a model has positions."""
    longest = int(family_of(hf).gpt_kwargs(hf)["max_sequence_length"])
    if config.rollout.max_context > longest:
        raise ConfigError(
            f"rollout.max_context={config.rollout.max_context} is beyond the {longest} positions of {which}; lower it"
        )


def _vocabulary(folder: str) -> dict[str, int]:
    """Tokens and their ids, as tokenizer.json has them, vocab.json where there is none, or SentencePiece's
    tokenizer.model; empty where none is."""
    for name in ("tokenizer.json", "vocab.json"):
        file = Path(folder) / name
        if not file.is_file():
            continue
        if name == "vocab.json":
            return strict.read_json(file)
        try:
            return dict(Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True))
        except Exception as error:  # noqa: B036  the package raises nothing narrower
            raise ConfigError(f"{file} is no tokenizer: {' '.join(str(error).split())[:200]}") from None
    pieces = Path(folder, "tokenizer.model")
    return _pieces(pieces) if pieces.is_file() else {}


def _pieces(file: Path) -> dict[str, int]:
    from sentencepiece import SentencePieceProcessor

    try:
        model = SentencePieceProcessor(model_file=str(file))
    except (RuntimeError, OSError):
        return {}  # of another kind, which the tokenizer's class reads
    return {model.id_to_piece(number): number for number in range(model.get_piece_size())}


def vocabulary_hash(folder: str) -> str:
    """Of the words that token ids stand for; empty where the folder does not say. Raises ConfigError."""
    words = sorted((number, word) for word, number in _vocabulary(folder).items())
    return hashlib.sha256(json.dumps(words).encode()).hexdigest() if words else ""


def _check_tokenizer(folder: str, size: int) -> None:
    """Raise ConfigError unless a folder has a tokenizer that can be read, of ids that a model of `size` words knows."""
    if not list(Path(folder).glob("tokenizer*")):
        raise ConfigError(f"model.path={folder} has no tokenizer; put tokenizer.json beside config.json")
    for name in ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
        if (file := Path(folder) / name).is_file():
            strict.read_json(file)
    word, highest = max(_vocabulary(folder).items(), key=lambda item: item[1], default=("", -1))
    if highest >= size:
        raise ConfigError(
            f"model.path={folder}: the tokenizer gives {word!r} the id {highest}, but config.json has "
            f"vocab_size={size}; the tokenizer is another model's"
        )


def whole_folder(path: str, key: str, head: bool, mtp: bool = False) -> HFConfig:
    """config.json of a folder that has all the weights that it describes. head: not of the output layer, in place of
    which there is a head of one value, or will be. mtp: with those of multi-token prediction."""
    hf = _known(folder_config(path, key))
    heads = (VALUE_HEAD, "lm_head.weight") if head or is_classifier(hf) else ()
    open_hf(path).check(dict(hf), optional=heads, mtp=mtp)
    return hf


def folder_config(path: str, key: str) -> HFConfig:
    """config.json of a folder. Raises ConfigError where it has none, or no weights that could be read."""
    if not Path(path).is_dir():
        get = "put the model there, or correct the path"
        if is_name(path):
            get = (
                "nor has this machine's cache of the Hub a model of that name: `hf download NAME` gets it by its name, "
                "`hf download NAME --local-dir FOLDER` into a folder"
            )
        if Path(path).is_file():
            raise ConfigError(f"{key}={path} is a file; name the model's folder, which has its config.json and weights")
        raise ConfigError(f"{key}={path}: there is no such folder; {get}")
    found = load_hf_config(path)
    if not list(Path(path).glob("*.safetensors")):
        raise ConfigError(f"{key}={path} has no *.safetensors files; convert the weights to safetensors")
    return found


def _known(hf: HFConfig) -> HFConfig:
    """The same config.json, if there is a table for it and it has what the table reads."""
    family = family_of(hf)
    family.check(hf)
    family.megatron_config(hf)
    family.gpt_kwargs(hf)
    return hf
