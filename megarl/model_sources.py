"""Resolve what to evaluate or chat with: a model folder, a Hub name in the local cache, a checkpoint, or a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from megarl.checkpoint import manifest
from megarl.checkpoint.manifest import resolve_checkpoint
from megarl.checkpoint.to_hf import convert
from megarl.config import AUTO_OVERRIDE, Config, ConfigError, RolloutConfig, load_config, plain_yaml
from megarl.config.paths import find_model_folder
from megarl.controllers.controller import load_requirements
from megarl.dry_run.model_folders import folder_config
from megarl.models.registry import family_of, load_hf_config, num_trained_mtp

POLICY_SECTIONS = ("model", "rollout", "reward", "sandbox")
"""Sections of a run's configuration that define how its policy responds and how responses are scored."""
BY_SOURCE = "megarl.rewards.by_source:by_source"


@dataclass(frozen=True)
class Target:
    """A resolved TARGET; `argument` is what the user wrote.

    model: an HF folder; for a checkpoint that is not converted yet, the model that its run started from. settings:
    sections of the run's configuration, if there is a run.
    """

    argument: str
    model: str
    checkpoint: Path | None = None
    step: int | None = None
    run: Config | None = None
    settings: Mapping[str, Any] | None = None

    @property
    def name(self) -> str:
        """A short name, used for folders."""
        path = Path(self.argument).absolute()
        if self.checkpoint is not None:
            path = self.checkpoint.absolute()
            return f"{path.parent.parent.name}-{path.name}"
        return path.parent.name if path.name in ("export", "model") else path.name

    def prepare(self, out: Path) -> Target:
        """Return this target with an HF folder as its model, converting a checkpoint into `out`, which must not exist.

        Raises ConfigError and OSError.
        """
        if self.checkpoint is None or self.run is None:
            return self
        if out.exists() or out.is_symlink():
            raise ConfigError(f"{out} exists, but the checkpoint would be converted into it; name another --out")
        source = Path(self.run.model.path)
        folder_config(str(source), "model.path of the run, which has its tokenizer,")
        hf = load_hf_config(source)
        table = family_of(hf).params(hf, 1, mtp=bool(num_trained_mtp(hf, self.run)))
        out.parent.mkdir(parents=True, exist_ok=True)
        convert(self.checkpoint / "actor", out, self.run, source, table)
        return replace(self, model=str(out))


def resolve_target(argument: str) -> Target:
    """Resolve a path or a name. Raises ConfigError if it is no model and contains none."""
    path = Path(find_model_folder(argument))
    try:
        is_folder, is_model = path.is_dir(), (path / "config.json").is_file()
    except OSError as error:
        raise ConfigError(f"TARGET {argument[:200]}: {error.strerror}") from None
    if not is_folder and path.exists():
        raise ConfigError(f"TARGET {argument} is a file; name the folder of a model, a checkpoint or a run")
    if not is_folder or is_model:
        return _model_target(argument, path, path.absolute().parent if path.name == "export" else None)
    is_checkpoint = (path / manifest.FILE_NAME).is_file() or path.name.startswith("step_")
    if not is_checkpoint and (path / "config.yaml").is_file() and not any((path / "checkpoints").glob("step_*")):
        if not (path / "export/config.json").is_file():
            raise ConfigError(
                f"TARGET {argument} is a run without a checkpoint and without an export: run.save_every and run.export "
                "are off, or it is not that far; name another"
            )
        return _model_target(argument, path / "export", path)
    if not is_checkpoint and not (path / "checkpoints").is_dir():
        raise ConfigError(
            f"TARGET {argument} is neither a model (it has no config.json) nor a checkpoint nor a run folder; name one"
        )
    return _checkpoint_target(argument, resolve_checkpoint(path))


def _model_target(argument: str, folder: Path, run: Path | None) -> Target:
    """Return a model folder as target. run: the folder of the run that exported it, if any."""
    folder_config(str(folder), "TARGET")
    has_settings = run is not None and (run / "config.yaml").is_file()
    return Target(argument, str(folder), settings=_read_settings(run / "config.yaml") if run and has_settings else None)


def _checkpoint_target(argument: str, folder: Path) -> Target:
    file = folder.parent.parent / "config.yaml"
    if not file.is_file():
        raise ConfigError(
            f"no {file}, the configuration of the run of {folder}; keep the checkpoint in its run folder, or convert "
            f"it with tools/checkpoints.py and name the result"
        )
    run = load_config(file)
    manifest.check_model(folder, "actor")
    if load_requirements(run).has_scalar_head:
        raise ConfigError(f"{folder} has no policy: its model is a classifier")
    step = manifest.read(folder)[0].get("step")
    settings = _read_settings(file)
    return Target(argument, run.model.path, folder, step if isinstance(step, int) else None, run, settings)


def _read_settings(file: Path) -> dict[str, Any]:
    """Return the parts of a run's configuration that apply to its policy without a trainer."""
    tree = plain_yaml.read(file)
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} is not a mapping of sections")
    sections = {name: dict(tree[name]) for name in POLICY_SECTIONS if isinstance(tree.get(name), dict)}
    sections["model"] = {name: value for name, value in sections.get("model", {}).items() if name == "dtype"}
    training_only = "asynchronous", "oversample", "max_staleness", "replay", "samples_per_prompt", "on_weight_sync"
    # No weight syncs, none of these.
    synced = "sync_adapters_only", "max_loras", "num_redundant_experts", "rebalance_experts_every"
    for name in (*training_only, *synced, "external", "external_weights_dir"):
        sections.get("rollout", {}).pop(name, None)
    data = {name: value for name, value in (tree.get("data") or {}).items() if name in ("prompt_key", "label_key")}
    roles = {name: value for name, value in (tree.get("roles") or {}).items() if name == "reward"}
    return {**sections, "data": data, **({"roles": roles} if roles else {})}


RESERVED_KEYS = {
    "algorithm": "nothing is trained",
    "options": "nothing is trained",
    "model.path": "use TARGET",
    "rollout.replay": "engines generate",
}
"""Keys that a user cannot set here, with the reason."""


def build_config(
    target: Target,
    settings: Mapping[str, Mapping[str, Any]],
    overrides: Sequence[str],
    file: Path,
    reserved: Mapping[str, str] = MappingProxyType({}),
) -> Config:
    """Build a generation-only configuration and write it, without the overrides, to `file`. Raises ConfigError.

    `settings` takes precedence over the settings of the target's run. If the user names a reward, the run's rewards are
    dropped; if nothing defines a reward and there is no environment, the data source selects it. One engine runs unless
    parallel.world_size is larger, or parallel=auto gives engines all GPUs of the machine. reserved: further keys that
    the user cannot set, with the reason.
    """
    keys = [text.partition("=")[0] for text in overrides]
    for key in keys:
        for name, reason in {**RESERVED_KEYS, **reserved}.items():
            if key == name or key.startswith(f"{name}."):
                raise ConfigError(f"{key} cannot be set here: {reason}")
    tree: dict[str, Any] = {name: dict(section) for name, section in (target.settings or {}).items()}
    if any(key.startswith(("reward.functions", "reward.model", "roles.reward")) for key in keys):
        tree.pop("reward", None)
        tree.pop("roles", None)
    for name, section in settings.items():
        tree[name] = {**tree.get(name, {}), **section}
    if AUTO_OVERRIDE in overrides or "parallel.auto" in keys:  # the engine's size is chosen for this machine
        tree["rollout"] = {name: value for name, value in tree.get("rollout", {}).items() if name not in ("tp", "ep")}
    tree["algorithm"], tree["model"] = "generate", {**tree.get("model", {}), "path": target.model}
    if target.settings is None:
        defaults, positions = RolloutConfig(), load_hf_config(Path(target.model)).get("max_position_embeddings")
        if isinstance(positions, int) and positions < defaults.max_context:
            max_new_tokens = min(defaults.max_new_tokens, max(1, positions // 2))
            lengths = {"max_context": positions, "max_new_tokens": max_new_tokens}
            tree["rollout"] = {**lengths, **tree.get("rollout", {})}
    config = _load_tree(tree, overrides, file)
    has_reward = config.reward.functions or config.reward.model or config.roles.get("reward")
    if not has_reward and not config.rollout.environments:
        tree["reward"] = {**tree.get("reward", {}), "functions": [BY_SOURCE]}
    if "world_size" not in config.parallel.auto:
        world = config.parallel.world_size if "parallel.world_size" in keys else config.rollout.tp
        tree["parallel"] = {**tree.get("parallel", {}), "world_size": world, "ranks_per_node": world}
    return _load_tree(tree, overrides, file)


def _load_tree(tree: dict[str, Any], overrides: Sequence[str], file: Path) -> Config:
    file.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    return load_config(file, overrides)
