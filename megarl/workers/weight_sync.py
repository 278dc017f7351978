"""The actor's weights into the engines: the reshard, its checks, and what becomes of an engine when it fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megarl.config import Config, ConfigError
from megarl.engine.engine_loss import EngineError
from megarl.engine.sglang_engine import Engine, GatherPayloads, allocate
from megarl.engine.weight_sender import WeightSender
from megarl.models.layout_algebra import HFConfig, Param
from megarl.models.registry import family_of, num_trained_mtp
from megarl.parallel.ranks import Job, all_gather_objects, host_group, new_host_group
from megarl.reshard.plan.checks import (
    find_digest_mismatch,
    find_engine_problems,
    find_layout_problems,
    find_shard_problems,
    plan_digest,
)
from megarl.reshard.plan.from_config import build_plan, engine_layout
from megarl.reshard.run.executor import Executor, WeightSyncError, is_fully_verified


class WeightSync:
    """Pushes weights from the ranks that train to all engines of the job. It is made on all ranks of the job together;
    `compare` and `push` are collective over the ranks of either side and return at once on the others.

    engine: this rank's, where it leads one. collect: over the ranks of this rank's engine. train_ranks, engine_ranks:
    see `build_plan`. is_lost: whether this rank's engine, which has failed so, is gone, and is to be started again.
    """

    def __init__(
        self,
        hf: HFConfig,
        config: Config,
        job: Job,
        engine: Engine | None,
        collect: GatherPayloads,
        train_ranks: Sequence[int] | None = None,
        engine_ranks: Sequence[int] | None = None,
        is_lost: Callable[[EngineError], bool] = lambda error: False,
    ) -> None:
        self.is_lost, self._has_lost_engine = is_lost, False
        self.hf, self.config, self.job, self.engine = hf, config, job, engine
        self.collect = collect
        family = family_of(hf)
        self.num_experts = family.num_experts(hf)
        self.params: list[Param] = family.params(hf, 1, mtp=num_trained_mtp(hf, config) > 0)
        self.train_ranks, self.engine_ranks = train_ranks, engine_ranks
        self.plan = build_plan(hf, config, engine_layout(config), train_ranks, engine_ranks)
        self.member_ranks = self.plan.rank_map.participants
        """The ranks of either side, rising."""
        self.group = (
            host_group() if len(self.member_ranks) == dist.get_world_size() else new_host_group(self.member_ranks)
        )
        self.is_member = job.rank in self.member_ranks
        self.engine_rank = self.plan.rank_map.engine_rank(job.rank)
        self.executor: Executor | None = None
        self.num_syncs = 0
        """Since the engines' weights were last to be verified in full; also on ranks that take no part."""
        self.is_checked = False
        """Whether the engines are known to hold what the plan says."""
        if self.is_member:
            here, bucket = config.parallel.ranks_per_node, self.plan.bucket_bytes
            known = plan_digest(dict(hf), self.plan.train, self.plan.engine, here, bucket)
            if problem := find_digest_mismatch(dict(zip(self.member_ranks, self._gather(known), strict=True))):
                raise ConfigError(problem)

    def check_engines(self) -> None:
        """Hold the engines, which have started and are awake, against the table, before anything is trained. They have
        the weights afterwards that they had, under version 0.

        Raises ConfigError on all ranks that take part, naming tensor and rank, where an engine holds something else; it
        generates no more then.
        """
        if not self.is_member:
            return
        where = "the engines as they have started"
        self._raise_if_any(self._run_on_engine(lambda engine: engine.begin_update()), where)
        errors = self._check_tensors(self._make_sender())
        errors += self._gather_problems(self._run_on_engine(lambda engine: engine.end_update(None if errors else 0)))
        if errors:
            raise ConfigError(f"{where}: {errors[0]}" + (f" ({len(errors)} such)" if len(errors) > 1 else ""))
        self.is_checked = True

    def sync(self, local: Mapping[str, torch.Tensor], version: int) -> bool:
        """Replace every engine's weights by the shards `local` (canonical name -> tensor) of all ranks that train, of
        which others have none, under a number. Whether all of them have these then: where an engine was lost meanwhile
        none generates, and it is to be done again when that one is back.

        Raises ConfigError on all ranks that take part, naming tensor and rank, where something does not fit or arrived
        otherwise than it was sent; no engine generates then.
        """
        self.num_syncs += 1
        if not self.is_member:
            return True
        where = f"the push of version {version}"
        self._has_lost_engine = False
        problems = find_shard_problems(local, self.params, self.plan.train, self.job.rank, self.num_experts)
        self._raise_if_any(problems, where)
        problems, lost = self._gather_live_problems(self._run_on_engine(lambda engine: engine.begin_update()))
        if not (problems or lost):
            hand_over = self._make_sender()
            found = [] if self.is_checked else self._check_tensors(hand_over)
            if not found:
                self._send(local, hand_over, version)
            if hand_over.failure is not None:
                self._record_loss(hand_over.failure)
            problems, lost = self._gather_live_problems(hand_over.errors)
            problems = problems if lost else found or problems
        fine = not (problems or lost)
        more, gone = self._gather_live_problems(
            self._run_on_engine(lambda engine: engine.end_update(version if fine else None))
        )
        if problems := problems + more:
            raise ConfigError(f"{where}: {problems[0]}")
        self.is_checked = self.is_checked or fine
        return not (lost or gone)

    def _send(self, local: Mapping[str, torch.Tensor], hand_over: WeightSender, version: int) -> None:
        self._run_executor(local, hand_over, version)
        for draft in self._draft_flags if self.engine_rank is not None else ():
            hand_over.send_order({"do": "finish"}, draft)

    def _run_executor(
        self, local: Mapping[str, torch.Tensor], hand_over: WeightSender, version: int, compares: bool = False
    ) -> None:
        if self.executor is None:
            self.executor = Executor(self.plan, self.job.rank, self.config.rollout.verify_every, allocate)

        def share(buckets: Sequence[torch.Tensor]) -> None:
            hand_over.open(buckets, self.plan.engine.draft)

        try:
            self.executor.sync(local, hand_over, version, hand_over.wait_pending, compares, share)
        except BaseException as error:
            hand_over.close_channel()  # the engine's rank waits for orders
            if isinstance(error, WeightSyncError):
                raise ConfigError(str(error)) from error  # a rank is lost: there is nobody to agree with
            raise
        hand_over.close()

    def _make_sender(self) -> WeightSender:
        return WeightSender(self.engine, self.collect, self.config.rollout.hang_timeout)

    @property
    def is_verified(self) -> bool:
        """Whether the last push was verified in full."""
        return is_fully_verified(self.num_syncs, self.config.rollout.verify_every)

    def find_mismatches(self, local: Mapping[str, torch.Tensor], version: int) -> list[str]:
        """The engines' tensors, by name, that hold other bits than the shards `local`, which they were given under this
        version; their weights are awake, and they generate no more afterwards. Collective as `push`; on ranks that take
        no part it is empty."""
        if not self.is_member:
            return []
        where = "the comparison of weights"
        self._raise_if_any(self._run_on_engine(lambda engine: engine.begin_update()), where)
        hand_over = self._make_sender()
        self._run_executor(local, hand_over, version, compares=True)
        self._raise_if_any(hand_over.errors, where)
        self._run_on_engine(lambda engine: engine.end_update(None))
        return sorted({name for found in self._gather(hand_over.mismatches) for name in found})

    def verify_next(self) -> None:
        """Have the next push verified in full; on all ranks."""
        self.num_syncs = 0
        if self.executor is not None:
            self.executor.num_syncs = 0

    @property
    def _draft_flags(self) -> tuple[bool, ...]:
        """What each engine's models that are pushed to are: its own, and its draft model."""
        return (False, True) if self.plan.engine.draft else (False,)

    def _check_tensors(self, hand_over: WeightSender) -> list[str]:
        """Compare the engines with the table, and plan for what they are; what does not fit, of all ranks."""
        problems, fuses = self._check_local_tensors(hand_over) if self.engine_rank is not None else ([], False)
        told = self._gather((problems + hand_over.errors, fuses))
        found = [problem for mine, _ in told for problem in mine]
        layout = self.plan.engine
        if not found and any(fused for _, fused in told) and not layout.fuse_shared:
            try:
                layout = replace(layout, fuse_shared=True)
                self.plan = build_plan(self.hf, self.config, layout, self.train_ranks, self.engine_ranks)
            except ConfigError as error:
                return [str(error)]
        return found

    def _check_local_tensors(self, hand_over: WeightSender) -> tuple[list[str], bool]:
        """How this rank's engine differs from the table, and whether it fuses the shared expert with the others."""
        held: dict[str, Any] = {}
        odd: list[str] = []
        for draft in self._draft_flags:
            answer = hand_over.send_order({"do": "describe"}, draft)
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
        problems = find_engine_problems(held, self.params, layout, position, self.num_experts, wire)
        return find_layout_problems(odd) + problems, fuses

    def _gather(self, mine: Any) -> list[Any]:
        """What each of the ranks that take part has, in their order, on all of them."""
        return all_gather_objects(mine, self.group)

    def _gather_problems(self, mine: list[str]) -> list[str]:
        """The problems of all ranks, in the order of ranks, on all of them."""
        return [problem for found in self._gather(mine) for problem in found]

    def _gather_live_problems(self, mine: list[str]) -> tuple[list[str], bool]:
        """The problems of all ranks but those of lost engines, and whether there are such; the same on all of them."""
        number = None if self.engine_rank is None else self.engine_rank // self.plan.engine.tp
        told = self._gather((number, self._has_lost_engine, mine))
        lost = {number for number, is_lost, _ in told if is_lost}
        return [problem for number, _, found in told if number not in lost for problem in found], bool(lost)

    def _record_loss(self, error: EngineError) -> None:
        self._has_lost_engine = self.is_lost(error) or self._has_lost_engine

    def _raise_if_any(self, mine: list[str], where: str) -> None:
        if found := self._gather_problems(mine):
            raise ConfigError(f"{where}: {found[0]}" + (f" ({len(found)} such)" if len(found) > 1 else ""))

    def _run_on_engine(self, work: Callable[[Engine], None]) -> list[str]:
        if self.engine is None or self._has_lost_engine:
            return []
        try:
            work(self.engine)
        except EngineError as error:
            self._record_loss(error)
            return [str(error)]
        return []
