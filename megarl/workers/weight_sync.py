"""The actor's weights into the engines: the reshard, its checks, and what becomes of an engine when it fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megarl.config import Config, ConfigError
from megarl.engine.engine_loss import EngineError
from megarl.engine.sglang_engine import Collect, Engine, allocate
from megarl.engine.weight_sender import HandOff
from megarl.models.layout_algebra import HFConfig, Param
from megarl.models.registry import family_of, trained_mtp
from megarl.parallel.ranks import Job, all_gather_objects, host_group, new_host_group
from megarl.reshard.plan.checks import digest, digest_problem, engine_problems, layout_problems, shard_problems
from megarl.reshard.plan.from_config import engine_layout, push_plan
from megarl.reshard.run.executor import Executor, PushError, is_full


class WeightPush:
    """Pushes weights from the ranks that train to all engines of the job. It is made on all ranks of the job together;
    `compare` and `push` are collective over the ranks of either side and return at once on the others.

    engine: this rank's, where it leads one. collect: over the ranks of this rank's engine. train_ranks, engine_ranks:
    see `push_plan`. is_lost: whether this rank's engine, which has failed so, is gone, and is to be started again.
    """

    def __init__(
        self,
        hf: HFConfig,
        config: Config,
        job: Job,
        engine: Engine | None,
        collect: Collect,
        train_ranks: Sequence[int] | None = None,
        engine_ranks: Sequence[int] | None = None,
        is_lost: Callable[[EngineError], bool] = lambda error: False,
    ) -> None:
        self.is_lost, self._lost = is_lost, False
        self.hf, self.config, self.job, self.engine = hf, config, job, engine
        self.collect = collect
        family = family_of(hf)
        self.num_experts = family.num_experts(hf)
        self.params: list[Param] = family.params(hf, 1, mtp=trained_mtp(hf, config) > 0)
        self.train_ranks, self.engine_ranks = train_ranks, engine_ranks
        self.plan = push_plan(hf, config, engine_layout(config), train_ranks, engine_ranks)
        self.among = self.plan.sides.taking_part
        """The ranks of either side, rising."""
        self.group = host_group() if len(self.among) == dist.get_world_size() else new_host_group(self.among)
        self.takes_part = job.rank in self.among
        self.engine_rank = self.plan.sides.engine_rank(job.rank)
        self.executor: Executor | None = None
        self.pushes = 0
        """Since the engines' weights were last to be verified in full; also on ranks that take no part."""
        self.compared = False
        """Whether the engines are known to hold what the plan says."""
        if self.takes_part:
            here, bucket = config.parallel.ranks_per_node, self.plan.bucket_bytes
            known = digest(dict(hf), self.plan.train, self.plan.engine, here, bucket)
            if problem := digest_problem(dict(zip(self.among, self._gather(known), strict=True))):
                raise ConfigError(problem)

    def compare(self) -> None:
        """Hold the engines, which have started and are awake, against the table, before anything is trained. They have
        the weights afterwards that they had, under version 0.

        Raises ConfigError on all ranks that take part, naming tensor and rank, where an engine holds something else; it
        generates no more then.
        """
        if not self.takes_part:
            return
        where = "the engines as they have started"
        self._raise_first(self._on_engine(lambda engine: engine.begin_update()), where)
        errors = self._describe(self._hand_off())
        errors += self._gathered(self._on_engine(lambda engine: engine.end_update(None if errors else 0)))
        if errors:
            raise ConfigError(f"{where}: {errors[0]}" + (f" ({len(errors)} such)" if len(errors) > 1 else ""))
        self.compared = True

    def push(self, local: Mapping[str, torch.Tensor], version: int) -> bool:
        """Replace every engine's weights by the shards `local` (canonical name -> tensor) of all ranks that train, of
        which others have none, under a number. Whether all of them have these then: where an engine was lost meanwhile
        none generates, and it is to be done again when that one is back.

        Raises ConfigError on all ranks that take part, naming tensor and rank, where something does not fit or arrived
        otherwise than it was sent; no engine generates then.
        """
        self.pushes += 1
        if not self.takes_part:
            return True
        where = f"the push of version {version}"
        self._lost = False
        problems = shard_problems(local, self.params, self.plan.train, self.job.rank, self.num_experts)
        self._raise_first(problems, where)
        problems, lost = self._judged(self._on_engine(lambda engine: engine.begin_update()))
        if not (problems or lost):
            hand_over = self._hand_off()
            found = [] if self.compared else self._describe(hand_over)
            if not found:
                self._send(local, hand_over, version)
            if hand_over.failure is not None:
                self._see(hand_over.failure)
            problems, lost = self._judged(hand_over.errors)
            problems = problems if lost else found or problems
        fine = not (problems or lost)
        more, gone = self._judged(self._on_engine(lambda engine: engine.end_update(version if fine else None)))
        if problems := problems + more:
            raise ConfigError(f"{where}: {problems[0]}")
        self.compared = self.compared or fine
        return not (lost or gone)

    def _send(self, local: Mapping[str, torch.Tensor], hand_over: HandOff, version: int) -> None:
        self._run(local, hand_over, version)
        for draft in self._models if self.engine_rank is not None else ():
            hand_over.ask({"do": "finish"}, draft)

    def _run(self, local: Mapping[str, torch.Tensor], hand_over: HandOff, version: int, compares: bool = False) -> None:
        if self.executor is None:
            self.executor = Executor(self.plan, self.job.rank, self.config.rollout.verify_every, allocate)

        def share(buckets: Sequence[torch.Tensor]) -> None:
            hand_over.open(buckets, self.plan.engine.draft)

        try:
            self.executor.push(local, hand_over, version, hand_over.settle, compares, share)
        except BaseException as error:
            hand_over.hang_up()  # the engine's rank waits for orders
            if isinstance(error, PushError):
                raise ConfigError(str(error)) from error  # a rank is lost: there is nobody to agree with
            raise
        hand_over.close()

    def _hand_off(self) -> HandOff:
        return HandOff(self.engine, self.collect, self.config.rollout.hang_timeout)

    @property
    def verified(self) -> bool:
        """Whether the last push was verified in full."""
        return is_full(self.pushes, self.config.rollout.verify_every)

    def differing(self, local: Mapping[str, torch.Tensor], version: int) -> list[str]:
        """The engines' tensors, by name, that hold other bits than the shards `local`, which they were given under this
        version; their weights are awake, and they generate no more afterwards. Collective as `push`; on ranks that take
        no part it is empty."""
        if not self.takes_part:
            return []
        where = "the comparison of weights"
        self._raise_first(self._on_engine(lambda engine: engine.begin_update()), where)
        hand_over = self._hand_off()
        self._run(local, hand_over, version, compares=True)
        self._raise_first(hand_over.errors, where)
        self._on_engine(lambda engine: engine.end_update(None))
        return sorted({name for found in self._gather(hand_over.differ) for name in found})

    def verify_next(self) -> None:
        """Have the next push verified in full; on all ranks."""
        self.pushes = 0
        if self.executor is not None:
            self.executor.pushes = 0

    @property
    def _models(self) -> tuple[bool, ...]:
        """What each engine's models that are pushed to are: its own, and its draft model."""
        return (False, True) if self.plan.engine.draft else (False,)

    def _describe(self, hand_over: HandOff) -> list[str]:
        """Compare the engines with the table, and plan for what they are; what does not fit, of all ranks."""
        problems, fuses = self._found(hand_over) if self.engine_rank is not None else ([], False)
        told = self._gather((problems + hand_over.errors, fuses))
        found = [problem for mine, _ in told for problem in mine]
        layout = self.plan.engine
        if not found and any(fused for _, fused in told) and not layout.fuse_shared:
            try:
                layout = replace(layout, fuse_shared=True)
                self.plan = push_plan(self.hf, self.config, layout, self.train_ranks, self.engine_ranks)
            except ConfigError as error:
                return [str(error)]
        return found

    def _found(self, hand_over: HandOff) -> tuple[list[str], bool]:
        """How this rank's engine differs from the table, and whether it fuses the shared expert with the others."""
        held: dict[str, Any] = {}
        odd: list[str] = []
        for draft in self._models:
            answer = hand_over.ask({"do": "describe"}, draft)
            held |= answer.get("tensors", {})
            odd += answer.get("odd", [])
        if hand_over.errors:
            return [], False
        layout = self.plan.engine
        shared = any(param.slot and ".shared_experts." in param.slot.name for param in self.params)
        fuses = shared and not any(".shared_experts." in name for name in held)
        if fuses:
            layout = replace(layout, fuse_shared=True)  # as SGLang has decided, the same on all ranks
        assert self.engine_rank is not None
        position, wire = self.engine_rank % layout.tp, self.plan.assignment.wire
        problems = engine_problems(held, self.params, layout, position, self.num_experts, wire)
        return layout_problems(odd) + problems, fuses

    def _gather(self, mine: Any) -> list[Any]:
        """What each of the ranks that take part has, in their order, on all of them."""
        return all_gather_objects(mine, self.group)

    def _gathered(self, mine: list[str]) -> list[str]:
        """The problems of all ranks, in the order of ranks, on all of them."""
        return [problem for found in self._gather(mine) for problem in found]

    def _judged(self, mine: list[str]) -> tuple[list[str], bool]:
        """The problems of all ranks but those of lost engines, and whether there are such; the same on all of them."""
        number = None if self.engine_rank is None else self.engine_rank // self.plan.engine.tp
        told = self._gather((number, self._lost, mine))
        lost = {number for number, is_lost, _ in told if is_lost}
        return [problem for number, _, found in told if number not in lost for problem in found], bool(lost)

    def _see(self, error: EngineError) -> None:
        self._lost = self.is_lost(error) or self._lost

    def _raise_first(self, mine: list[str], where: str) -> None:
        if found := self._gathered(mine):
            raise ConfigError(f"{where}: {found[0]}" + (f" ({len(found)} such)" if len(found) > 1 else ""))

    def _on_engine(self, work: Callable[[Engine], None]) -> list[str]:
        if self.engine is None or self._lost:
            return []
        try:
            work(self.engine)
        except EngineError as error:
            self._see(error)
            return [str(error)]
        return []
