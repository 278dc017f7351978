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
class Declared:
    """A controller's declaration for one configuration. `controllers/controller.py` says what each of them means."""

    name: str
    """As messages have it: that of the configuration."""
    item: ItemKind
    roles: tuple[str, ...]
    trains: tuple[str, ...]
    trains_head: bool = False
    compares_samples: bool = False
    corrects_lag: bool = False
    follows_prompts: bool = False
    asks_further: bool = False
    workers: Mapping[str, str] = field(default_factory=dict)

    @property
    def generates(self) -> bool:
        """Whether it samples from the policy, and so has engines."""
        return "rollout" in self.roles

    def has_engines(self, config: Config) -> bool:
        """Whether engines are started, as what is sampled is not read from a record."""
        return self.generates and not config.rollout.replay

    @property
    def main(self) -> str:
        """The role whose model is exported, and has `model.path` and `parallel`; the engines where nothing is
        trained."""
        return self.trains[0] if self.trains else "rollout"
