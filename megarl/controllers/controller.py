"""The base class of controllers, and the lookup of the controller that `algorithm` names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from megarl.checkpoint.manifest import Write, write_nothing
from megarl.config import Config, ConfigError, plugins, strict
from megarl.config.recipes import find_recipe
from megarl.parallel.placement import is_engine_role, split_role
from megarl.parallel.policy_configs import JUDGE
from megarl.types import Comm, Rollouts, TrainBatch
from megarl.types.requirements import ITEM_KINDS, ItemKind, Requirements

if TYPE_CHECKING:
    from megarl.data.loader import PromptLoader
    from megarl.item_reader import ItemReader
    from megarl.observe.clock import Clock
    from megarl.observe.run_log import RunLog
    from megarl.parallel.ranks import Job
    from megarl.workers.actor import ActorWorker, ReferenceWorker, SeparateReferenceWorker
    from megarl.workers.context import Worker
    from megarl.workers.critic import CriticWorker, RewardModelWorker
    from megarl.workers.reward import RewardWorker
    from megarl.workers.rollout import RolloutWorker


class Flow(Protocol):
    """Interface of the flow that runs a controller, implemented by `megarl.flow.HybridFlow`."""

    config: Config
    requirements: Requirements
    job: Job
    controller: Controller
    step: int
    policy_name: str
    """The policy, in a run that trains several, whose algorithm sees the flow; empty for the first."""
    last_step: int
    """The step after which the run ends."""
    data: ItemReader
    loader: PromptLoader[Any]
    clock: Clock
    log: RunLog
    workers: dict[str, Worker]
    """The workers by role, in the order in which they started."""
    rollout: RolloutWorker
    actor: ActorWorker
    reference: ReferenceWorker | SeparateReferenceWorker
    critic: CriticWorker
    reward: RewardWorker
    reward_model: RewardModelWorker

    def __getattr__(self, name: str) -> Any:
        """Return the worker of any other role that the controller lists."""
        ...

    def begin_step(self) -> None:
        """Tell the workers the current step, which seeds what they sample."""

    def sync_weights(self) -> None:
        """Sync restored weights to the engines, if there are any; no update precedes this."""


@dataclass(frozen=True)
class StepResult:
    """The result of a step: metrics to log, the rollouts, and the batch built from them."""

    metrics: dict[str, float]
    rollouts: Rollouts | None = None
    batch: TrainBatch | None = None
    trained_rollouts: Rollouts | None = None
    """The rollouts in the batch, in its order; None if all are."""
    policies: Mapping[str, StepResult] = field(default_factory=dict)
    """Results of the policies besides the first, by name, whose rollouts are recorded, too."""


class Evaluation(Protocol):
    """An evaluation in progress. All ranks must call its methods together."""

    def is_done(self) -> bool:
        """Return whether `result` returns without waiting."""
        ...

    def result(self) -> dict[str, float]:
        """Return the metrics of `evaluate`, and the weight versions that answered. Raises ConfigError on all ranks if
        the evaluation failed."""
        ...


@dataclass(frozen=True)
class NoOptions:
    """Options of an algorithm that has none."""


class Controller(ABC):
    """Base class of algorithms. Every rank runs the same controller on the same values.

    Class attributes declare what the algorithm needs, and `declare_requirements` collects them; no other code depends
    on an algorithm's name.
    """

    item: ClassVar[ItemKind]
    """Kind of item that `load_items` returns; the dry run checks the data files against it."""
    trained_roles: ClassVar[tuple[str, ...]] = ("actor",)
    """Roles whose models are updated and checkpointed. The first is exported; it starts from `model.path` and uses the
    layout `parallel`."""
    has_scalar_head: ClassVar[bool] = False
    """Whether the first trained role has a head of one value in place of the vocabulary; it is exported as a
    classifier."""
    is_group_relative: ClassVar[bool] = False
    """Whether samples of a prompt are compared with each other. A prompt then needs at least two samples, and sampling
    may not be greedy."""
    is_off_policy: ClassVar[bool] = False
    """Whether the loss accepts samples of an older policy, because it has a ratio to that policy and bounds it."""
    has_dynamic_sampling: ClassVar[bool] = False
    """Whether a step may draw prompts beyond those it is given, from `flow.loader`."""
    needs_greedy: ClassVar[bool] = False
    """Whether each step generates greedy answers, which a replayed run must have recorded."""
    workers: ClassVar[Mapping[str, str]] = {}
    """Workers of roles that the algorithm defines itself, as `module:name` by role."""
    Options: ClassVar[type] = NoOptions
    """Frozen dataclass of settings that only this algorithm has, with defaults and ranges: the key `options`."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.options: Any = self.read_options(config)

    def check_config(self, config: Config) -> None:
        """Raise ConfigError for a configuration that the algorithm cannot change to during the run."""
        self.read_options(config)

    def set_config(self, config: Config) -> None:
        """Set the configuration of the next step, also of controllers inside this one. Only keys of `config/stages.py`
        change."""
        self.config = config
        for part in vars(self).values():
            if isinstance(part, Controller):
                part.set_config(config)

    @classmethod
    def read_options(cls, config: Config) -> Any:
        """Return the key `options` as an `Options`. Raises ConfigError for an unknown key or a value out of range."""
        return strict.build_dataclass(cls.Options, config.options, "options.", root=Config)

    @classmethod
    @abstractmethod
    def roles(cls, config: Config) -> tuple[str, ...]:
        """Return the roles that the algorithm calls, in the order in which they start."""

    @classmethod
    def declare_requirements(cls, config: Config) -> Requirements:
        return Requirements(
            name=config.algorithm,
            item=cls.item,
            roles=tuple(cls.roles(config)),
            trained_roles=tuple(cls.trained_roles),
            has_scalar_head=cls.has_scalar_head,
            is_group_relative=cls.is_group_relative,
            is_off_policy=cls.is_off_policy,
            has_dynamic_sampling=cls.has_dynamic_sampling,
            needs_greedy=cls.needs_greedy,
            workers=dict(cls.workers),
        )

    @abstractmethod
    def load_items(self, flow: Flow) -> Sequence[Any]:
        """Return the items that the loader deals out to steps: prompts, or finished conversations for SFT. Called
        before the workers start, so that a mistake in the data fails before models are loaded."""

    @abstractmethod
    def step(self, flow: Flow, items: Sequence[Any]) -> StepResult:
        """Run one step of the training loop."""

    def num_updates(self, role: str) -> int:
        """Return the role's number of optimizer steps in the whole run, which its learning-rate schedule spans."""
        return self.config.run.num_rollout * self.config.run.num_update

    def load_eval_items(self, flow: Flow) -> Sequence[Any]:
        """Return the items of `data.eval` for `evaluate`; empty if the algorithm does not evaluate."""
        return ()

    def evaluate(self, flow: Flow, items: Sequence[Any]) -> dict[str, float]:
        """Return metrics of the current model, under eval/."""
        return {}

    def begin_evaluation(self, flow: Flow, items: Sequence[Any]) -> Evaluation | None:
        """Start an evaluation that continues during the next steps, where generation has its own ranks. Returns None if
        the algorithm only has the synchronous `evaluate`."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the algorithm's state for a checkpoint, as plain JSON values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return None

    def save(self) -> Write:
        """Take a snapshot of state too large for `state_dict`, and return a function that writes it. Each rank writes
        its own files, possibly while the controller already continues."""
        return write_nothing

    def restore(self, folder: Path, comm: Comm) -> None:
        """Restore what `save` wrote, also on another number of ranks. Collective."""
        return None


def find_controller(name: str) -> type[Controller]:
    """Return the class that `algorithm` names. Raises ConfigError if it does not exist or is no complete controller."""
    key, cls = f"algorithm={name}", find_recipe(name).controller
    if isinstance(cls, str):
        cls = plugins.load(cls, key)
    if not isinstance(cls, type) or not issubclass(cls, Controller):
        kind = "another class" if isinstance(cls, type) else f"a {type(cls).__name__}"
        raise ConfigError(f"{key} is {kind}, not a Controller: derive it from megarl.controllers.controller.Controller")
    if missing := sorted(cls.__abstractmethods__):
        raise ConfigError(f"{key}: {cls.__name__} lacks {', '.join(missing)}, which every controller has")
    if getattr(cls, "item", None) not in ITEM_KINDS:
        raise ConfigError(f"{key}: {cls.__name__}.item must be one of {', '.join(ITEM_KINDS)}, the kind of its items")
    return cls


def make_controller(config: Config) -> Controller:
    return find_controller(config.algorithm)(config)


def load_requirements(config: Config) -> Requirements:
    """Return the requirements of the configured algorithm. Raises ConfigError if it does not exist or contradicts
    itself."""
    cls = find_controller(config.algorithm)
    key = f"algorithm={config.algorithm}: {cls.__name__}"
    cls.read_options(config)
    try:
        requirements = cls.declare_requirements(config)
    except ConfigError:
        raise
    except Exception as error:  # of third-party code
        raise ConfigError(f"{key}.roles(config) raised {plugins.format_error(error)}") from error
    if not requirements.roles or not all(isinstance(role, str) and role.isidentifier() for role in requirements.roles):
        raise ConfigError(f"{key}.roles(config) gives {requirements.roles!r}, not a tuple of names of roles")
    if "reward" in requirements.roles and JUDGE not in requirements.roles and is_engine_role(config, JUDGE):
        requirements = replace(requirements, roles=(JUDGE, *requirements.roles))  # first, so that the others find it
    if duplicates := {role for role in requirements.roles if requirements.roles.count(role) > 1}:
        raise ConfigError(f"{key}.roles(config) lists {min(duplicates)} twice; name it once")
    if missing := [role for role in requirements.trained_roles if role not in requirements.roles]:
        raise ConfigError(
            f"{key}.trained_roles names {missing[0]}, which its roles do not list (they are "
            f"{', '.join(requirements.roles)})"
        )
    if not requirements.trained_roles and not requirements.has_rollout:
        raise ConfigError(f"{key} trains nothing, and generates nothing: name a role in `trained_roles`")
    for role in requirements.roles:
        base, policy = split_role(role)
        actor = f"actor_{policy}" if policy else "actor"
        needs_actor = (base == "rollout" and bool(requirements.trained_roles)) or (base == "reference" and bool(policy))
        if needs_actor and actor not in requirements.roles:
            raise ConfigError(f"{key} lists the role {role}, whose weights are the actor's, but no {actor}")
    return requirements
