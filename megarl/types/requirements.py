"""What an algorithm says of itself, which configuration, checks, plans and the flow read before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from megarl.config import Config

ItemKind = Literal["prompts", "conversations", "pairs", "rows"]
"""What the loader deals out, a step at a time: prompts to answer, finished conversations, pairs of a preferred answer
and another, or rows of a form that only the algorithm knows, which is not checked before its `items` reads them."""

ITEM_KINDS: tuple[ItemKind, ...] = get_args(ItemKind)


@dataclass(frozen=True)
class Requirements:
    """A controller's declaration for one configuration. `controllers/controller.py` says what each of them means."""

    name: str
    """As messages have it: that of the configuration."""
    item: ItemKind
    roles: tuple[str, ...]
    trained_roles: tuple[str, ...]
    has_scalar_head: bool = False
    is_group_relative: bool = False
    is_off_policy: bool = False
    has_fixed_prompts: bool = False
    has_dynamic_sampling: bool = False
    workers: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_rollout(self) -> bool:
        """Whether it samples from the policy, and so has engines."""
        return "rollout" in self.roles

    def has_engines(self, config: Config) -> bool:
        """Whether engines are started, as what is sampled is not read from a record."""
        return self.has_rollout and not config.rollout.replay

    @property
    def main_role(self) -> str:
        """The role whose model is exported, and has `model.path` and `parallel`; the engines where nothing is
        trained."""
        return self.trained_roles[0] if self.trained_roles else "rollout"
