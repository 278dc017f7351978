"""The actor's weights into the engines: the reshard, its checks, and what becomes of an engine when it fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from megarl.config import Config, ConfigError
from megarl.models.cuts import HFConfig, Param
from megarl.models.registry import family_of, trained_mtp
from megarl.parallel import device
from megarl.parallel.ranks import Ranks, all_gather_objects
from megarl.reshard.check import digest, digest_problem, engine_problems, layout_problems, shard_problems
from megarl.reshard.configured import engine_layout, push_plan
from megarl.reshard.executor import Executor, PushError
from megarl.rollout.engine import Collect, Engine
from megarl.rollout.handoff import HandOff


class WeightPush:
    """Pushes weights to all engines of the job. Collective over all ranks.

    engine: this rank's, where it leads one. collect: over the ranks of this rank's engine.
    """

    def __init__(self, hf: HFConfig, config: Config, ranks: Ranks, engine: Engine | None, collect: Collect) -> None:
        self.hf, self.config, self.ranks, self.engine = hf, config, ranks, engine
        self.collect = collect
        family = family_of(hf)
        self.num_experts = family.num_experts(hf)
        self.params: list[Param] = family.params(hf, 1, mtp=trained_mtp(hf, config) > 0)
        self.plan = push_plan(hf, config, engine_layout(config))
        self.executor: Executor | None = None
        self.compared = False
        """Whether the engines are known to hold what the plan says."""
        known = digest(
            dict(hf), self.plan.train, self.plan.engine, config.parallel.ranks_per_node, self.plan.bucket_bytes
        )
        if problem := digest_problem(all_gather_objects(known)):
            raise ConfigError(problem)

    def compare(self) -> None:
        """Hold the engines, which have started and are awake, against the table, before anything is trained. They have
        the weights afterwards that they had, under version 0.

        Raises ConfigError on all ranks, naming tensor and rank, where an engine holds something else; it generates no
        more then.
        """
        where = "the engines as they have started"
        _raise_first(self._on_engine(lambda engine: engine.begin_update()), where)
        hand_over = HandOff(self.engine, self.collect)
        problems = self._describe(hand_over)
        errors = _gathered(problems + hand_over.errors)
        errors += _gathered(self._on_engine(lambda engine: engine.end_update(None if errors else 0)))
        if errors:
            raise ConfigError(f"{where}: {errors[0]}" + (f" ({len(errors)} such)" if len(errors) > 1 else ""))
        self.compared = True

    def push(self, local: Mapping[str, torch.Tensor], version: int) -> None:
        """Replace every engine's weights by the shards `local` (canonical name -> tensor) of all ranks, under a number.

        Raises ConfigError on all ranks, naming tensor and rank, where something does not fit or arrived otherwise than
        it was sent; no engine generates then.
        """
        where = f"the push of version {version}"
        _raise_first(shard_problems(local, self.params, self.plan.train, self.ranks.job.rank, self.num_experts), where)
        _raise_first(self._on_engine(lambda engine: engine.begin_update()), where)
        hand_over = HandOff(self.engine, self.collect)
        problems = [] if self.compared else self._describe(hand_over)
        errors = _gathered(problems + hand_over.errors)
        if not errors:
            self.compared = True
            if self.executor is None:
                self.executor = Executor(self.plan, self.ranks.job.rank, self.config.rollout.verify_every, _allocate)
            try:
                self.executor.push(local, hand_over, version)
            except PushError as error:
                raise ConfigError(str(error)) from error  # a rank is lost: there is nobody to agree with
            hand_over.settle()
            for draft in self._models:
                hand_over.ask({"do": "finish"}, draft)
            errors = _gathered(hand_over.errors)
        errors += _gathered(self._on_engine(lambda engine: engine.end_update(None if errors else version)))
        if errors:
            raise ConfigError(f"{where}: {errors[0]}")

    @property
    def _models(self) -> tuple[bool, ...]:
        """What each engine's models that are pushed to are: its own, and its draft model."""
        return (False, True) if self.plan.engine.draft else (False,)

    def _describe(self, hand_over: HandOff) -> list[str]:
        """Compare the engine with the table, and plan for what it is; what does not fit."""
        held: dict[str, Any] = {}
        odd: list[str] = []
        for draft in self._models:
            answer = hand_over.ask({"do": "describe"}, draft)
            held |= answer.get("tensors", {})
            odd += answer.get("odd", [])
        if hand_over.errors:
            return []
        layout = self.plan.engine
        shared = any(param.slot and ".shared_experts." in param.slot.name for param in self.params)
        if shared and not any(".shared_experts." in name for name in held):
            layout = replace(layout, fuse_shared=True)  # as SGLang has decided, the same on all ranks
        position, wire = self.ranks.job.rank % layout.tp, self.plan.assignment.wire
        problems = layout_problems(odd) + engine_problems(held, self.params, layout, position, self.num_experts, wire)
        if problems:
            return problems
        try:
            self.plan = self.plan if layout == self.plan.engine else push_plan(self.hf, self.config, layout)
        except ConfigError as error:
            return [str(error)]
        return []

    def _on_engine(self, work: Callable[[Engine], None]) -> list[str]:
        if self.engine is None:
            return []
        try:
            work(self.engine)
        except RuntimeError as error:
            return [str(error)]
        return []


def _allocate(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device.device())


def _gathered(mine: list[str]) -> list[str]:
    """The problems of all ranks, in the order of ranks, on all of them."""
    return [problem for found in all_gather_objects(mine) for problem in found]


def _raise_first(mine: list[str], where: str) -> None:
    if found := _gathered(mine):
        raise ConfigError(f"{where}: {found[0]}" + (f" ({len(found)} such)" if len(found) > 1 else ""))
