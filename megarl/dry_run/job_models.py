"""The models of a job: whether their layouts divide them, and the memory of each set of ranks with the same models.

Shared by the dry run, which checks one layout, and by `parallel.auto`, which compares many. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from megarl.config import Config
from megarl.dry_run import config_checks as checks
from megarl.dry_run.model_folders import ServedModels
from megarl.engine.engine_backends import engine_backend, plan_from_config
from megarl.models.family import HFConfig
from megarl.models.memory import StageMemory, plan_memory
from megarl.parallel.placement import Placement, format_ranges, placement_of, role_settings, split_role
from megarl.parallel.policy_configs import list_engine_roles, policy_config, syncs_adapters
from megarl.types.requirements import Requirements

Passes = Callable[..., bool]
"""Called with a check and its arguments: returns whether it raises no ConfigError, or lets it raise."""


def raise_failure(check: Callable[..., object], *arguments: object) -> bool:
    """The `Passes` that lets a check raise its ConfigError."""
    check(*arguments)
    return True


@dataclass(frozen=True)
class JobModels:
    """hf, critic_hf: config.json of the policy, and of the critic if there is one. served: the other models."""

    hf: HFConfig
    critic_hf: HFConfig | None
    served: ServedModels
    declared: Requirements

    def check_training(self, config: Config, passes: Passes) -> bool:
        """Return whether each model that Megatron computes divides by the layout of its role."""
        hf, critic_hf, does_divide = self.hf, self.critic_hf, True
        if self.declared.trained_roles:
            does_divide = passes(checks.check_training_layout, hf, config)
            does_divide = does_divide and passes(checks.check_mtp, hf, config, self.declared)
        has_separate_layout = critic_hf is not hf or config.critic.parallel or "critic" in config.placement
        if critic_hf is not None and (has_separate_layout or (does_divide and config.lora.rank)):
            does_divide = passes(checks.check_role_layout, critic_hf, config, "critic") and does_divide
        for role, model in self.served.megatron_configs.items():
            if model is not hf or role_settings(config, role).parallel:
                does_divide = passes(checks.check_role_layout, model, config, role) and does_divide
        for role, model in self.served.engine_configs.items():
            if policy := split_role(role)[1]:
                does_divide = passes(checks.check_role_layout, model, config, f"actor_{policy}") and does_divide
        for role, model in self.served.critic_configs.items():
            does_divide = passes(checks.check_role_layout, model, config, role) and does_divide
        for role in self.declared.trained_roles:
            model = self._trained_config(role)
            does_divide = passes(checks.check_muon, model, config, role) and does_divide
            does_divide = passes(checks.check_fsdp, model, config, role) and does_divide
        return does_divide

    def _trained_config(self, role: str) -> HFConfig:
        """Return config.json of a trained role's model."""
        if split_role(role)[1]:
            return self.served.trained_config(role)
        if role == "critic":
            assert self.critic_hf is not None, "a trained critic has a model"
            return self.critic_hf
        return self.hf

    def check_engines(self, config: Config, passes: Passes) -> bool:
        """Return whether each model on engines divides by their size."""
        does_divide = not self.declared.has_engines(config) or passes(checks.check_engine, self.hf, config)
        for role, model in self.served.engine_configs.items():
            if role in list_engine_roles(config, self.declared.roles):
                does_divide = passes(checks.check_role_engine, model, config, role) and does_divide
        return does_divide

    def check_weight_syncs(self, config: Config, passes: Passes) -> bool:
        """Return whether the weights of each policy can be synced from its layout to that of its engines."""
        is_planned = True
        if self.declared.has_engines(config):
            is_planned = passes(engine_backend(config).layout, self.hf, config)
            is_planned = is_planned and (not self.declared.trained_roles or passes(_plan_syncs, self.hf, config))
        for role, model in self.served.engine_configs.items():
            if split_role(role)[1] and role in list_engine_roles(config, self.declared.roles):
                is_planned = passes(_plan_syncs, model, policy_config(config, role)) and is_planned
        return is_planned

    def plan_memory(self, config: Config) -> dict[str, list[StageMemory]]:
        """Return the memory of a rank of each pipeline stage, for each set of ranks with the same models, by a label.

        The actor's ranks come first. Functions need no significant memory. Raises ConfigError if a model does not
        divide.
        """
        stages = self.served.stages(config, self.declared)
        other_models = {**self.served.engine_configs, **self.served.critic_configs}
        return {
            label: plan_memory(self.hf, config, self.declared, self.critic_hf, stages, role, ranks, other_models)
            for label, (role, ranks) in _group_ranks(config, self.declared.roles, stages).items()
        }


def _plan_syncs(hf: HFConfig, config: Config) -> None:
    """Plan the weight syncs. Those of adapters are compared with one of all weights, so both must be possible."""
    plan_from_config(hf, config)
    if syncs_adapters(config):
        plan_from_config(hf, config, adapters=True)


def _group_ranks(config: Config, roles: Sequence[str], served: Iterable[str]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return a label for each set of ranks with the same models -> the role whose stages they are planned by, and the
    ranks. The role is one with engines if there are only engines."""
    placement = placement_of(config)
    trained = [role for role in ("actor", "reward_model", "critic") if role in roles]
    trained += list_other_trained(roles)
    models = (*trained, *served, *list_engine_roles(config, roles))
    ranks_by_models: dict[tuple[str, ...], list[int]] = {}
    for rank in range(placement.world):
        if local_models := tuple(role for role in models if rank in placement.ranks_of(role)):
            ranks_by_models.setdefault(local_models, []).append(rank)
    groups = sorted(ranks_by_models.items(), key=lambda group: models.index(group[0][0]))
    return {_describe_ranks(placement, roles, ranks): (local_models[0], tuple(ranks)) for local_models, ranks in groups}


def list_other_trained(roles: Sequence[str]) -> list[str]:
    """Return the actors and critics of other policies than the first."""
    return [role for role in roles if split_role(role)[0] in ("actor", "critic") and split_role(role)[1]]


def _describe_ranks(placement: Placement, roles: Sequence[str], ranks: Sequence[int]) -> str:
    names = [role.replace("_", " ") for role in roles if set(ranks) <= set(placement.ranks_of(role))]
    return f"rank{'s' if len(ranks) > 1 else ''} {format_ranges(ranks)}: {', '.join(names)}"
