"""Requirements of an algorithm, which configuration, checks, planner and flow read before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from megarl.config import Config

ItemKind = Literal["prompts", "conversations", "pairs", "rows", "requests"]
"""What the loader yields: prompts, finished conversations, preference pairs, rows whose format only the algorithm knows
and which are not checked before its `load_items` reads them, or requests of clients, which are in no file."""

ITEM_KINDS: tuple[ItemKind, ...] = get_args(ItemKind)


@dataclass(frozen=True)
class Requirements:
    """A controller's declaration for one configuration. `controllers/controller.py` documents the fields."""

    name: str
    """The algorithm's name in the configuration, used in messages."""
    item: ItemKind
    roles: tuple[str, ...]
    trained_roles: tuple[str, ...]
    has_scalar_head: bool = False
    is_group_relative: bool = False
    is_off_policy: bool = False
    has_dynamic_sampling: bool = False
    needs_greedy: bool = False
    workers: Mapping[str, str] = field(default_factory=dict)
    cross_tokenizer_roles: tuple[str, ...] = ()
    """Roles whose models read texts in their own tokens, so that their tokenizers may differ from the policy's."""
    policies: Mapping[str, Requirements] = field(default_factory=dict)
    """Requirements of each policy of several, by name; the first has the empty name."""

    @property
    def has_rollout(self) -> bool:
        """True if the algorithm samples from the policy."""
        return "rollout" in self.roles

    def has_engines(self, config: Config) -> bool:
        """True if the run starts engines: it samples, and does not replay recorded rollouts."""
        return self.has_rollout and not config.rollout.replay

    @property
    def main_role(self) -> str:
        """The role whose model is exported and which `model.path` and `parallel` describe; `rollout` if nothing is
        trained."""
        return self.trained_roles[0] if self.trained_roles else "rollout"
