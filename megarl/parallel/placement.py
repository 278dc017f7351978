"""Each role's settings and ranks, and checks of its layout. Pure: no process is asked.

A role's layout has the number of its ranks as world_size, and the sizes of `parallel` or of the role's own layout.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import prod
from typing import Any

from megarl.config import Config, ConfigError, ParallelConfig, strict, to_dict
from megarl.config.strict import closest_match

BUILTIN_ROLES: dict[str, tuple[str, str]] = {
    "actor": ("model.path", "parallel"),
    "reward_model": ("model.path", "parallel"),
    "critic": ("critic.path", "critic.parallel"),
    "reward": ("reward.model", "roles.reward.parallel"),
    "reference": ("roles.reference.model", "roles.reference.parallel"),
    "rollout": ("", ""),
}
"""Keys of each built-in role's model and layout; empty if it has none of its own."""

_ROLE_NAMES = {
    "actor": "policy policy_model actor_model trainer train training student learner",
    "reference": "ref ref_policy ref_model reference_policy reference_model",
    "critic": "value value_model value_function critic_model",
    "reward": "rm reward_model reward_fn reward_function grader scorer",
    "rollout": "generator generation rollout_engine inference sampler engine engines sglang vllm",
    "teacher": "teacher_model distill_teacher",
}
ROLES_BY_OTHER_NAME = {name: role for role, names in _ROLE_NAMES.items() for name in names.split()}
"""Names of roles in other projects, for suggestions in errors about unknown roles."""


POLICY_ROLES = ("actor", "rollout", "reference", "critic")
"""Roles that each policy has of its own, if its algorithm needs them."""
_POLICY_ROLE = re.compile(rf"({'|'.join(POLICY_ROLES)})_(\w+)")


def split_role(role: str) -> tuple[str, str]:
    """Return the role that `role` is for another policy than the first, and that policy's name: (actor, b) of actor_b.

    The name is empty for all other roles.
    """
    match = _POLICY_ROLE.fullmatch(role)
    return (match[1], match[2]) if match else (role, "")


MEGATRON, ENGINES = "megatron", ("sglang",)
SERVICES = ("http", "judge")
"""Reward backends that query a service, in addition to the backend that computes `reward.model`."""


@dataclass(frozen=True)
class RoleConfig:
    worker: str = ""
    """Implementation as `module:name`; empty for the controller's or the built-in one."""
    backend: tuple[str, ...] = ()
    """Backends by name; empty for the default.

    For a custom worker, the backend of its model (empty for Megatron). The reward may name two: one that computes
    `reward.model`, and http or judge.
    """
    model: str = ""
    """HF folder of the role's own model, which must have the policy's vocabulary unless an engine serves it."""
    parallel: dict[str, Any] = field(default_factory=dict)
    """Overrides of that model's layout: keys of `parallel` except world_size and ranks_per_node."""
    rollout: dict[str, Any] = field(default_factory=dict)
    """Settings of the role's engines: keys of `rollout`, see `parallel/policy_configs.py`."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    """Overrides of `actor_optimizer` for another policy's actor, and of `critic.optimizer` for its critic."""
    options: dict[str, Any] = field(default_factory=dict)
    """Additional arguments of the worker, by name."""


def optimizer_key(role: str) -> str:
    """Return the key of a trained role's optimizer."""
    base, policy = split_role(role)
    if policy:
        return f"roles.{role}.optimizer"
    return "actor_optimizer" if base == "actor" else "critic.optimizer"


def role_settings(config: Config, role: str) -> RoleConfig:
    """Return a role's settings. Raises ConfigError for invalid keys and for keys that belong to another section."""
    settings: RoleConfig = strict.build_dataclass(RoleConfig, config.roles.get(role, {}), f"roles.{role}.", root=Config)
    base, policy = split_role(role)
    usual_keys = BUILTIN_ROLES.get(role, ()) if base in ("actor", "critic") or not policy else ("", "")
    for name, key in zip(("model", "parallel"), usual_keys, strict=False):
        if getattr(settings, name) and key != f"roles.{role}.{name}":
            actor = f"actor_{policy}; set roles.actor_{policy}.{name}" if policy else "actor; remove it"
            location = f"is {key}; set that" if key else f"is that of the {actor}"
            raise ConfigError(f"roles.{role}.{name}: for the {role} this {location}")
    if settings.optimizer and not (base in ("actor", "critic") and policy):
        key = "critic.optimizer" if role == "critic" else "actor_optimizer"
        raise ConfigError(
            f"roles.{role}.optimizer is for actor and critic of another policy, such as actor_b; set {key}"
        )
    return settings


def role_backends(config: Config, role: str) -> tuple[str, str]:
    """Return the backend of the role's model and its service of `SERVICES`; each empty if unset.

    If a service is named and `reward.model` is set, Megatron computes that model unless another backend is named.
    Raises ConfigError for two of a kind.
    """
    backends = role_settings(config, role).backend
    services = [name for name in backends if role == "reward" and name in SERVICES]
    models = [name for name in backends if name not in services]
    for names in (services, models):
        if len(names) > 1:
            raise ConfigError(
                f"roles.{role}.backend=[{', '.join(backends)}]: name one of {' and '.join(names)}"
                + (", and http or judge beside it" if names is models and role == "reward" else "")
            )
    model, service = ("".join(models), "".join(services))
    return (MEGATRON if service and not model and config.reward.model else model), service


def has_model(config: Config, role: str) -> bool:
    """Return whether the role computes a model on ranks: every built-in role does, except a reward without a model."""
    if role == "reward":
        return bool(config.reward.model)
    return split_role(role)[0] in BUILTIN_ROLES or bool(role_settings(config, role).model)


def is_engine_role(config: Config, role: str) -> bool:
    """Return whether the role runs engines on its ranks: `rollout`, also of another policy, and any role whose
    backend is one of `ENGINES`."""
    base = split_role(role)[0]
    backend = role_settings(config, role).backend if base not in BUILTIN_ROLES else ()
    return base == "rollout" or (len(backend) == 1 and backend[0] in ENGINES)


def has_separate_reference(config: Config) -> bool:
    """Return whether the reference is a model of its own: on other ranks than the actor, in another layout, or of
    another folder. Otherwise it is the actor's model with its initial weights."""
    settings, placement = role_settings(config, "reference"), placement_of(config)
    return bool(settings.model or settings.parallel or placement.ranks_of("reference") != placement.ranks_of("actor"))


def _shares_actor(config: Config, role: str) -> bool:
    base, policy = split_role(role)
    return base == "reference" and (bool(policy) or not has_separate_reference(config))


def is_on_megatron(config: Config, role: str) -> bool:
    """Return whether the role has a model of its own, with a Megatron layout over its ranks."""
    if split_role(role)[0] == "rollout" or _shares_actor(config, role):
        return False
    return has_model(config, role) and role_backends(config, role)[0] in ("", MEGATRON)


def suggest_role(name: str, roles: Collection[str], where: str = "") -> str:
    """Return a hint with the role that `name`, which is none of `roles`, most likely means; empty if there is none.

    where: prefix of the role in the hint.
    """
    role = ROLES_BY_OTHER_NAME.get(name.lower(), "")
    match = role if role in roles else closest_match(name, roles)
    return f"; did you mean {where}{match}?" if match else ""


def with_role(
    config: Config, role: str, model: str | None, parallel: Mapping[str, Any] | None, backend: str = ""
) -> Config:
    """Return the configuration with a role's model, layout and backend set in their sections."""
    if backend:  # replaces a worker that the configuration names
        config = _replace_path(config, ["roles", role, "backend"], backend)
        config = _replace_path(config, ["roles", role, "worker"], "")
    for name, value in (("model", model), ("parallel", parallel)):
        if value is None:
            continue
        key = BUILTIN_ROLES[role][name == "parallel"] if role in BUILTIN_ROLES else f"roles.{role}.{name}"
        if not key:
            remedy = "its engines serve the actor's" if name == "model" else "set rollout.tp and rollout.ep"
            raise ConfigError(f"register_worker({role!r}): the {role} has no separate {name}; {remedy}")
        new_value = value
        if key == "parallel":
            sizes = dict(parallel or {})
            auto = tuple(name for name in config.parallel.auto if name not in sizes)
            new_value = strict.build_dataclass(
                ParallelConfig, sizes, "parallel.", Config, dataclasses.replace(config.parallel, auto=auto)
            )
        config = _replace_path(config, key.split("."), new_value)
    return config


def _replace_path(section: Any, path: list[str], value: Any) -> Any:
    first, *rest = path
    is_mapping = isinstance(section, Mapping)
    if rest:
        inner = section.get(first, {}) if is_mapping else getattr(section, first)
        value = _replace_path(inner, rest, value)
    return {**section, first: value} if is_mapping else dataclasses.replace(section, **{first: value})


ALL, CPU = "all", "cpu"
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_SLICE = re.compile(r"[0-9]*:[0-9]*(:[0-9]*)?")
_UNIT = re.compile(r"(?:gpus?|cuda|devices?|ranks?)[: ]*(?=[0-9])", re.I)
_NODES = re.compile(r"nodes?[: ]*(?=[0-9])", re.I)
_COLOCATED = re.compile(r"co-?locate(?:d)?(?: with)?[: ]*", re.I)
REMEDY = "write ranks as 0-3 or 0,2,5-6, or all, cpu, nodes 0-1, or another role, whose ranks it shares"


_INDEPENDENT = ("actor", "rollout")
"""Roles that are on all ranks by default; the others share the actor's."""


def _default_role(role: str) -> str:
    """Return the role whose ranks a dependent role shares by default."""
    base, policy = split_role(role)
    if not policy:
        return "actor"
    return f"actor_{policy}" if base in ("reference", "critic") else base


@dataclass(frozen=True)
class Placement:
    """Parsed `placement`: the ranks of each placed role, ascending; empty for a role on the host CPUs."""

    world: int
    role_ranks: Mapping[str, tuple[int, ...]]

    @classmethod
    def parse(cls, placement: Mapping[str, Any], world: int, ranks_per_node: int = 0) -> Placement:
        """Parse the configuration's values: ranks as text or as a list, `nodes 0-1`, all, cpu, or another role, whose
        ranks it shares. Raises ConfigError for unreadable values and ranks out of range.

        ranks_per_node: 0 for a job on one node.
        """
        ranks_per_node = min(ranks_per_node or world, world)
        role_ranks: dict[str, tuple[int, ...]] = {}

        def ranks_of(role: str, following: tuple[str, ...] = ()) -> tuple[int, ...]:
            if role in following:
                chain = " -> ".join((*following, role))
                raise ConfigError(f"placement: {chain} follow each other; name the ranks of one of them")
            if role not in placement:
                return tuple(range(world)) if role in _INDEPENDENT else ranks_of(_default_role(role), following)
            if role not in role_ranks:
                key = f"placement.{role}={strict.short_repr(placement[role]).strip(chr(39))}"
                text = _to_text(placement[role], key)
                if other := _parse_role(text, role, placement, key):
                    role_ranks[role] = ranks_of(other, (*following, role))
                else:
                    role_ranks[role] = _parse_ranks(text, key, world, ranks_per_node)
            return role_ranks[role]

        return cls(world, {role: ranks_of(role) for role in placement})

    def ranks_of(self, role: str) -> tuple[int, ...]:
        """Return a role's ranks. By default actor and engines are on all ranks, another policy's on those of the first,
        and other roles on the actor's."""
        if role in self.role_ranks:
            return self.role_ranks[role]
        return tuple(range(self.world)) if role in _INDEPENDENT else self.ranks_of(_default_role(role))

    @property
    def is_colocated(self) -> bool:
        """Whether each placed role is on all ranks or on none."""
        return all(len(ranks) in (0, self.world) for ranks in self.role_ranks.values())

    def describe(self, roles: Iterable[str]) -> str:
        """Format each set of ranks with its roles: `0-3: actor, reference; 4-7: critic; all: rollout; cpu: reward`."""
        roles_by_ranks: dict[str, list[str]] = {}
        for role in roles:
            roles_by_ranks.setdefault(self.format_ranks(role), []).append(role)
        return "; ".join(f"{ranks}: {', '.join(names)}" for ranks, names in roles_by_ranks.items())

    def format_ranks(self, role: str) -> str:
        """Format a role's ranks as in the configuration."""
        ranks = self.ranks_of(role)
        if len(ranks) in (0, self.world):
            return ALL if ranks else CPU
        return format_ranges(ranks)


def format_ranges(ranks: Sequence[int]) -> str:
    """Format ascending ranks as ranges: 0,2,5-6."""
    firsts = [rank for rank in ranks if rank - 1 not in ranks]
    lasts = [rank for rank in ranks if rank + 1 not in ranks]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(firsts, lasts, strict=True))


def _to_text(value: Any, key: str) -> str:
    """Return a value of `placement` as text. Raises ConfigError for one that lists no ranks."""
    if isinstance(value, Mapping):
        if set(value) != {"ranks"}:
            raise ConfigError(
                f"{key}: {REMEDY}; layouts and models are in roles.ROLE and {{ranks: 0-3}} is the only key"
            )
        value = value["ranks"]
    items = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(item, str | int) and not isinstance(item, bool) for item in items):
        raise ConfigError(f"{key} lists no ranks: {REMEDY}, or remove the role")
    text = " ".join(",".join(map(str, items)).split())
    if not text:
        raise ConfigError(f"{key} lists no ranks: {REMEDY}, or remove the role")
    return text


def _parse_role(text: str, role: str, placement: Collection[str], key: str) -> str:
    """Return the role that a value names, `actor` or `colocated with actor`; empty if it names ranks."""
    name, num_prefixes = _COLOCATED.subn("", text, count=1)
    if num_prefixes and not name:
        return "" if role == "actor" else "actor"
    policy = split_role(name)[1]
    is_placed_policy = bool(policy) and any(split_role(other)[1] == policy for other in placement)
    if name in placement or name in BUILTIN_ROLES or is_placed_policy:
        return name
    if other := ROLES_BY_OTHER_NAME.get(name.lower()):
        raise ConfigError(f"{key}: here {name} is the role {other}; write placement.{role}={other}")
    if num_prefixes:
        raise ConfigError(f"{key}: {name} is no role; name one, such as placement.{role}=actor")
    return ""


def _parse_ranks(text: str, key: str, world: int, ranks_per_node: int) -> tuple[int, ...]:
    if text.lower() in (CPU, "host"):
        return ()
    if text.lower() == ALL or _COLOCATED.fullmatch(text):
        return tuple(range(world))
    unit, size, last_unit = "rank", 1, world - 1
    if _NODES.match(text):
        unit, size, last_unit = "node", ranks_per_node, world // ranks_per_node - 1
        text = _NODES.sub("", text)
    numbers: set[int] = set()
    for part in (_UNIT.sub("", part.strip()).replace(" ", "") for part in text.split(",")):
        if _SLICE.fullmatch(part):
            raise ConfigError(f"{key}: {part} does not say whether the last {unit} is included; write the range as 0-3")
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ConfigError(f"{key} is not a set of ranks, because {strict.short_repr(part)} is not: {REMEDY}")
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last:
            raise ConfigError(f"{key}: the range {part} is descending; write {last}-{first}")
        if last > last_unit:
            raise ConfigError(
                f"{key} names {unit} {last}, but the job has the {unit}s 0 to {last_unit}: name others, or raise "
                f"parallel.world_size={world}"
            )
        if repeated := numbers & set(range(first, last + 1)):
            raise ConfigError(f"{key} names {unit} {min(repeated)} twice; name it once")
        numbers |= set(range(first, last + 1))
    return tuple(rank for number in sorted(numbers) for rank in range(number * size, (number + 1) * size))


def placement_of(config: Config) -> Placement:
    return Placement.parse(config.placement, config.parallel.world_size, config.parallel.ranks_per_node)


def role_parallel(config: Config, role: str) -> ParallelConfig:
    """Return the layout of a role's model, with the number of its ranks as world_size. Raises ConfigError.

    Sizes that a role lacks are the first actor's; those of another policy's critic are its actor's.
    """
    (base, policy), default = split_role(role), config.parallel
    overrides = config.critic.parallel if role == "critic" else role_settings(config, role).parallel
    if base == "critic" and policy:
        overrides, default = overrides or config.critic.parallel, role_parallel(config, f"actor_{policy}")
    key = layout_key(role)
    if "ranks_per_gpu" in overrides:
        raise ConfigError(f"{key}ranks_per_gpu: ranks share GPUs in the whole job; set parallel.ranks_per_gpu")
    for name in ("world_size", "ranks_per_node"):
        if name in overrides:
            raise ConfigError(f"{key}{name}: placement.{role} sets the ranks of the {role}; remove it")
    for name in ("auto", "gpu_gb", "host_gb"):
        if name in overrides:
            raise ConfigError(
                f"{key}{name}: the program chooses `parallel`, which the {role} shares by default; remove {key}{name}, "
                "or set the sizes"
            )
    tree = {**to_dict(default), **overrides, "world_size": len(placement_of(config).ranks_of(role))}
    parallel: ParallelConfig = strict.build_dataclass(ParallelConfig, tree, key, root=Config)
    return parallel


def layout_key(role: str) -> str:
    """Return the prefix of the keys of a role's own layout."""
    return "critic.parallel." if role == "critic" else f"roles.{role}.parallel."


def prefix_role_error(config: Config, role: str, error: ConfigError) -> ConfigError:
    """Rewrite an error about a layout for a role other than the actor, which may have its own layout."""
    has_layout = role == "critic" or role_settings(config, role).parallel
    text = str(error).replace("parallel.", layout_key(role)) if has_layout else str(error)
    return ConfigError(f"the {role}: {text}")


_STAGE_SETTINGS = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")


def role_config(config: Config, role: str) -> Config:
    """Return the configuration as a role's model sees it, with the role's ranks as the whole job.

    The layers of the actor's first and last stage (`model.megatron`) apply to models with as many stages.
    """
    parallel, model = role_parallel(config, role), config.model
    if parallel.pp != config.parallel.pp:
        settings = {name: value for name, value in model.megatron.items() if name not in _STAGE_SETTINGS}
        model = dataclasses.replace(model, megatron=settings)
    return dataclasses.replace(config, parallel=parallel, model=model, placement={})


def engine_ranks(config: Config) -> list[tuple[int, ...]]:
    """Return the ranks of each engine: consecutive groups of `rollout.tp`. A replay has no engines."""
    if config.rollout.replay:
        return []
    ranks, tp = placement_of(config).ranks_of("rollout"), config.rollout.tp
    return [ranks[first : first + tp] for first in range(0, len(ranks), tp)]


def describe_rank_roles(config: Config, roles: Iterable[str]) -> dict[int, str]:
    """Describe the roles of each rank in words if roles are on separate ranks. Rewards are listed only if placed."""
    placement = placement_of(config)
    if placement.is_colocated:
        return {}
    ranks_by_role = {role: placement.ranks_of(role) for role in roles if role != "reward" or role in config.placement}
    return {
        rank: ", ".join(role for role, ranks in ranks_by_role.items() if rank in ranks) or "no role"
        for rank in range(placement.world)
    }


# --- checks ----------------------------------------------------------------------------------------------------------


def check_placement(config: Config, roles: Collection[str], warnings: list[str]) -> None:
    """Raise ConfigError if the roles of an algorithm cannot be placed as `placement` says; warn of ranks that wait.

    Roles may share all of their ranks, some, or none: every rank makes the same calls in the same order, so models on
    overlapping ranks take turns, and no rank waits for one that waits for it. With partial overlap, the ranks of a role
    outside the overlap are idle while its other ranks compute the other role.
    """
    for role in config.placement:
        if role not in roles:
            raise ConfigError(
                f"placement.{role}: {config.algorithm} has no such role{suggest_role(str(role), roles, 'placement.')} "
                f"(it has {', '.join(roles)})"
            )
    placement = placement_of(config)
    for role in roles:
        if not placement.ranks_of(role) and has_model(config, role):
            what = "reward.model runs" if role == "reward" else f"the {role} computes"
            raise ConfigError(f"placement.{role}=cpu, but {what} on ranks: name ranks, or remove the role")
    for role in roles:
        base, policy = split_role(role)
        if policy and base == "reference" and placement.ranks_of(role) != placement.ranks_of(f"actor_{policy}"):
            raise ConfigError(
                f"placement.{role}={placement.format_ranks(role)}, but it is the model of actor_{policy} with other "
                f"weights, and that is on {placement.format_ranks(f'actor_{policy}')}: remove placement.{role}"
            )
    overlapping = []
    models = [role for role in roles if has_model(config, role) and not _shares_actor(config, role)]
    for role, other in combinations(models, 2):
        ranks_a, ranks_b = set(placement.ranks_of(role)), set(placement.ranks_of(other))
        is_everywhere = placement.world in (len(ranks_a), len(ranks_b))
        if ranks_a & ranks_b and ranks_a != ranks_b and not is_everywhere:
            overlapping.append(
                f"{role} on {placement.format_ranks(role)} and {other} on {placement.format_ranks(other)}"
            )
    if overlapping:
        warnings.append(
            f"placement has {'; '.join(overlapping)}: where only some ranks are shared, the others wait while these "
            "compute both roles in turn"
        )
    for role in roles:
        if is_on_megatron(config, role):
            _check_model(config, placement, role)
    used = {rank for role in roles for rank in placement.ranks_of(role)}
    if idle := [rank for rank in range(placement.world) if rank not in used]:
        warnings.append(
            f"placement leaves rank {format_ranges(idle)} of {placement.world} without a role; give it one, or lower "
            "parallel.world_size"
        )


def _check_model(config: Config, placement: Placement, role: str) -> None:
    layout, is_on_all_ranks = role_parallel(config, role), len(placement.ranks_of(role)) == placement.world
    try:
        check_layout(
            layout,
            "" if is_on_all_ranks else f"placement.{role}={placement.format_ranks(role)} ({layout.world_size} ranks)",
        )
    except ConfigError as error:
        if role in ("actor", "reward_model"):
            raise
        raise prefix_role_error(config, role, error) from None


def check_engine_ranks(config: Config) -> None:
    """Raise ConfigError if the engines do not fit their ranks or nodes."""
    placement, tp = placement_of(config), config.rollout.tp
    ranks_per_node = min(config.parallel.ranks_per_node, placement.world)
    if (count := len(placement.ranks_of("rollout"))) % tp:
        world = f"parallel.world_size={placement.world}"
        if count < placement.world:
            world = f"the {count} ranks of placement.rollout={placement.format_ranks('rollout')}"
        fits = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
        raise ConfigError(f"rollout.tp={tp} does not divide {world}; sizes that do: {fits}")
    if ranks_per_node % tp and tp % ranks_per_node:
        raise ConfigError(
            f"rollout.tp={tp} does not fit nodes of {ranks_per_node} ranks: an engine must fit into a node, or span "
            f"whole nodes"
        )
    for engine in engine_ranks(config):
        nodes_fit = engine[0] // ranks_per_node == engine[-1] // ranks_per_node or engine[0] % ranks_per_node == 0
        if engine[-1] - engine[0] != tp - 1 or not nodes_fit:
            raise ConfigError(
                f"placement.rollout={placement.format_ranks('rollout')} with rollout.tp={tp} builds an engine from "
                f"ranks {format_ranges(engine)}: they must be adjacent in a node of {ranks_per_node} ranks, or whole "
                f"nodes"
            )


def check_layout(parallel: ParallelConfig, world: str = "") -> None:
    """Raise ConfigError if the layout does not divide the world; the error suggests sizes that do.

    world: description of the world in errors.
    """
    strict.check_dataclass(parallel, "parallel.")
    sizes = {"tp": parallel.tp, "cp": parallel.cp, "pp": parallel.pp}
    shown = {name: size for name, size in sizes.items() if name != "cp" or size > 1}
    model_parallel = prod(sizes.values())
    if parallel.world_size % model_parallel:
        low = parallel.world_size // model_parallel * model_parallel
        nearest = f"{low} and {low + model_parallel}" if low else str(model_parallel)
        raise ConfigError(
            f"{world or f'parallel.world_size={parallel.world_size}'} is not a multiple of {' x '.join(shown)} = "
            f"{' x '.join(map(str, shown.values()))} = {model_parallel}; the nearest valid sizes: {nearest}"
        )
    expert_ranks = parallel.world_size // parallel.pp
    if expert_ranks % (parallel.ep * parallel.etp):
        for name, size, other in (("ep", parallel.ep, parallel.etp), ("etp", parallel.etp, parallel.ep)):
            fits = [n for n in range(1, expert_ranks + 1) if expert_ranks % (n * other) == 0]
            if size not in fits and (fits or name == "etp"):
                stage = "ranks / pp" if world else "world_size / pp"
                beside = f", beside {'etp' if name == 'ep' else 'ep'}={other}" if other > 1 else ""
                raise ConfigError(
                    f"parallel.{name}={size} does not divide the {expert_ranks} ranks of a pipeline stage "
                    f"({stage}){beside}; possible: {', '.join(map(str, fits)) or 'none'}"
                )
    if parallel.vpp > 1 and parallel.pp < 3:
        # With two stages, each precedes and follows the other, and Megatron 0.19.2 confuses messages in both
        # directions.
        raise ConfigError(
            f"parallel.vpp={parallel.vpp} needs at least 3 pipeline stages, not parallel.pp={parallel.pp}"
        )
