"""Keys that may change during a run: at steps that `stages` names, or by hand in `control.yaml` (`observe/control.py`).

A step's configuration is a pure function of the configuration, the step, and the values that `control.yaml` has set. So
a resumed run continues with the same values, without any state of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megarl.config import Config, ConfigError, strict
from megarl.config.strict import short_repr

LENGTH_KEYS = (
    "rollout.max_context",
    "rollout.max_new_tokens",
    "rollout.max_turns",
    "rollout.max_tool_response_tokens",
)
SAMPLING_KEYS = ("rollout.temperature", "rollout.top_p", "rollout.top_k", "rollout.min_p")
"""The policy's distribution. A response is scored with that of the step that trains on it."""
STAGED_KEYS = (
    *LENGTH_KEYS,
    *SAMPLING_KEYS,
    "rollout.samples_per_prompt",
    "rollout.external",
    "loss.clip",
    "loss.clip_high",
    "loss.dual_clip",
    "loss.value_clip",
    "loss.entropy_coef",
    "kl.coef",
    "kl.target",
    "reward.weights",
    "actor_optimizer.lr",
    "critic.optimizer.lr",
    "train.max_tokens_per_gpu",
)
"""Keys that workers and controllers read anew in each step. Engines, models, data and placement are built once."""
PLANNED_KEYS = (*LENGTH_KEYS, "rollout.top_k", "rollout.samples_per_prompt", "train.max_tokens_per_gpu")
"""Keys whose largest value memory is planned for."""


def parse_stages(config: Config) -> dict[int, Config]:
    """Return the configuration from each stage's first step on, in ascending order. A stage keeps the values of those
    before it. Raises ConfigError for stages that are not ascending, and for keys and values as `change_config`."""
    stages: dict[int, Config] = {}
    current, last = config, 1
    for key, tree in config.stages.items():
        step = int(key) if key.isdecimal() and len(key) < 10 else 0
        if step < 2:
            raise ConfigError(
                f"stages: {short_repr(key)} is no step from 2 on, at which a stage may begin; values from the first "
                "step on belong into their sections"
            )
        if step <= last:
            raise ConfigError(f"stages: {step} follows {last}; name the steps in ascending order, each once")
        stages[step] = current = change_config(current, tree, f"stages.{step}.")
        last = step
    return stages


def change_config(config: Config, tree: Any, where: str) -> Config:
    """Return the configuration with the values of `tree`, nested like a configuration file.

    where: prefix of keys in messages. Raises ConfigError for a key that is unknown or not one of `STAGED_KEYS`, and for
    a value of the wrong type or out of range.
    """
    for name in tree if isinstance(tree, dict) else ():
        if "." in str(name):
            section, _, leaf = str(name).rpartition(".")
            raise ConfigError(f"{where}{name}: write {leaf} in the section {section}, as everywhere in a file")
    changed: Config = strict.build_dataclass(Config, tree, where, root=Config, default=config)
    for key in list_leaves(tree):
        if key not in STAGED_KEYS:
            raise ConfigError(f"{where}{key} cannot change during a run (keys that can: {', '.join(STAGED_KEYS)})")
    return changed


def list_leaves(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a nested tree by key, such as `critic.optimizer.lr`."""
    sections = {key.rpartition(".")[0] for key in STAGED_KEYS} | {"critic"}

    def walk(node: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for name, value in node.items():
            key = f"{prefix}{name}"
            if key in sections and isinstance(value, Mapping):
                yield from walk(value, f"{key}.")
            else:
                yield key, value

    return dict(walk(tree, ""))


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree of `list_leaves`."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return tree


def get_value(config: Config, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def config_of_step(config: Config, step: int) -> Config:
    """Return the configuration of a step, counted from 1."""
    current = config
    for first_step, staged in parse_stages(config).items():
        current = staged if first_step <= step else current
    return current


def largest_config(config: Config) -> Config:
    """Return the configuration that engines, models and memory are planned for: the largest value of each of
    `PLANNED_KEYS`, and truncated sampling if any stage has it."""
    configs = [config, *parse_stages(config).values()]
    values = {key: max(get_value(staged, key) for staged in configs) for key in PLANNED_KEYS}
    values["rollout.top_p"] = min(staged.rollout.top_p for staged in configs)
    values["rollout.min_p"] = max(staged.rollout.min_p for staged in configs)
    return change_config(config, nest(values), "")


def smallest_context(config: Config) -> int:
    """Return the smallest `rollout.max_context`: a prompt must leave room for a response in every step."""
    return min(staged.rollout.max_context for staged in (config, *parse_stages(config).values()))


def check_change(
    config: Config, changed: Config, where: str = "", key_of: Callable[[str], str] = "rollout.{}".format
) -> None:
    """Check a change of a running job from `config` to `changed`. Raises ConfigError.

    where: prefix of the changed key in messages. key_of: returns the key that sets a field of `rollout`.

    A conversation that runs across the change has tokens of both distributions, and all of it is scored with the later
    one: for tokens of the current weights, the log-probs of engine and trainer would differ.
    """
    rollout = config.rollout
    if rollout.asynchronous or rollout.oversample > 1:
        mode = key_of("asynchronous") if rollout.asynchronous else f"{key_of('oversample')}={rollout.oversample:g}"
        for key in (*SAMPLING_KEYS, "rollout.samples_per_prompt"):
            if get_value(config, key) != get_value(changed, key):
                raise ConfigError(
                    f"{where}{key} cannot change with {mode}: conversations run across steps, and each is sampled from "
                    "one distribution, in a group of one size"
                )


def describe_stage(config: Config, changed: Config) -> str:
    """Return what differs between two configurations, in one line."""
    values = {key: (get_value(config, key), get_value(changed, key)) for key in STAGED_KEYS}
    return ", ".join(f"{key} {old} -> {new}" for key, (old, new) in values.items() if old != new) or "no change"
