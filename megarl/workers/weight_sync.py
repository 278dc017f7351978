"""Weight sync from the actor to the engines: the reshard, its checks, and the handling of engine failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megarl.config import Config, ConfigError
from megarl.engine.engine_backends import engine_backend
from megarl.engine.engine_protocol import Engine, EngineError, GatherPayloads
from megarl.engine.external_engines import ExternalEngines
from megarl.engine.weight_sender import WeightSender
from megarl.models.layout_algebra import HFConfig, Param
from megarl.models.lora_tables import MergedWeights, adapted_weights
from megarl.models.registry import family_of, num_trained_mtp
from megarl.parallel import device
from megarl.parallel.policy_configs import syncs_adapters, syncs_changes
from megarl.parallel.ranks import Job, all_gather_objects, host_group, new_host_group
from megarl.reshard.plan.adapters import factor_shapes, keeps_codes, list_merges
from megarl.reshard.plan.from_config import build_plan
from megarl.reshard.plan.layout import (
    find_digest_mismatch,
    find_engine_problems,
    find_layout_problems,
    find_nonfinite,
    find_shard_problems,
    is_shared_expert,
    plan_digest,
)
from megarl.reshard.plan.planner import ReshardPlan
from megarl.reshard.run.executor import Executor, WeightSyncError, is_fully_verified


class WeightSync:
    """Syncs weights from the training ranks to all engines of the job.

    Construction is collective over all ranks of the job. `find_mismatches` and `sync` are collective over the training
    and engine ranks, and return immediately on other ranks.

    engine: the engine that this rank leads, if any. collect: gathers over the ranks of this rank's engine. train_ranks,
    engine_ranks: see `build_plan`. is_lost: returns True if this error means that the engine is lost and must restart.
    external: engines outside of the job that get the weights of this rank's engine.
    adapter: name of the adapter to sync, if the engines serve those of several policies beside the base weights.
    """

    def __init__(
        self,
        hf: HFConfig,
        config: Config,
        job: Job,
        engine: Engine | None,
        gather_payloads: GatherPayloads,
        train_ranks: Sequence[int] | None = None,
        engine_ranks: Sequence[int] | None = None,
        is_lost: Callable[[EngineError], bool] = lambda error: False,
        external: ExternalEngines | None = None,
        adapter: str = "",
    ) -> None:
        self.adapter = adapter
        self.is_lost, self._has_lost_engine = is_lost, False
        self.external = external
        self.hf, self.config, self.job, self.engine = hf, config, job, engine
        self.collect = gather_payloads
        family = family_of(hf)
        self.num_experts = family.num_experts(hf)
        rows = family.params(hf, 1, mtp=num_trained_mtp(hf, config) > 0)
        self.params: list[Param] = [part for row in rows for part in row.by_slot()]
        self.adapted: list[Param] = []
        """The weights whose adapters alone are sent; empty if all weights are sent."""
        if syncs_adapters(config):
            self.adapted = [part for row in adapted_weights(rows, config.lora.target_modules) for part in row.by_slot()]
        self._adapted_names = {weight.megatron for weight in self.adapted}
        self.train_ranks, self.engine_ranks = train_ranks, engine_ranks
        self.backend = engine_backend(config)
        self.plan = build_plan(hf, config, self.backend.layout(hf, config), train_ranks, engine_ranks)
        self.member_ranks = self.plan.rank_map.participants
        """Training and engine ranks, ascending."""
        self.group = (
            host_group() if len(self.member_ranks) == dist.get_world_size() else new_host_group(self.member_ranks)
        )
        self.is_member = job.rank in self.member_ranks
        self.engine_rank = self.plan.rank_map.engine_rank(job.rank)
        self.weight_executor: Executor | None = None
        """Sends all weights; with `rollout.sync_adapters_only` only for comparison."""
        self.adapter_executor: Executor | None = None
        self._adapter_orders: dict[str, list[tuple[dict[str, Any], bool]]] = {}
        """The orders to "prepare" and "merge" for this rank's engine, built per plan, see `_list_adapter_orders`."""
        self.num_syncs = 0
        """Syncs since `verify_next`; counted on all ranks, including non-members."""
        self.is_checked = False
        """True once the engines' tensors have been compared with the plan."""
        self.sends_changes = syncs_changes(config)
        self._base_engines: list[Any] = []
        self.sent_bytes, self.whole_bytes = 0, 0
        """Bytes that all ranks sent between nodes in the last weight sync, and would have sent with whole messages.
        Counted with `rollout.sync_changes_only`."""
        self._rank_bytes = [0, 0]
        """Likewise of this rank."""
        self._check_digest()

    def _check_digest(self) -> None:
        """Check that all member ranks plan from the same inputs. Raises ConfigError on all of them."""
        if not self.is_member:
            return
        config, plan = self.config, self.plan
        sizes = config.parallel.ranks_per_node, plan.bucket_bytes
        digest = plan_digest(dict(self.hf), config.lora, plan.train, plan.engine, *sizes)
        if problem := find_digest_mismatch(dict(zip(self.member_ranks, self._gather(digest), strict=True))):
            raise ConfigError(problem)

    def check_engines(self) -> None:
        """Compare the tensors of the started, awake engines with the plan, before any training. Keeps their weights, as
        version 0.

        Raises ConfigError on all member ranks, naming tensor and rank, for a mismatch; the engines then no longer
        generate.
        """
        if not self.is_member:
            return
        where = "the engines at their start"
        self._raise_if_any(self._run_on_engine(lambda engine: engine.begin_update()), where)
        errors = self._check_tensors(self._make_sender())
        errors += self._gather_problems(self._run_on_engine(lambda engine: engine.end_update(None if errors else 0)))
        if errors:
            raise ConfigError(f"{where}: {errors[0]}" + (f" ({len(errors)} such)" if len(errors) > 1 else ""))
        self.is_checked = True

    def sync(self, local: Mapping[str, torch.Tensor], version: int) -> bool:
        """Replace every engine's weights by the training ranks' shards, as the given version.

        local: this rank's shards by canonical name, as `MergedWeights` if there are adapters; empty on ranks that do
        not train. Returns True if all engines have
        the weights. Returns False if an engine was lost: no engine generates then, and the sync must be repeated after
        the restart.

        Raises ConfigError on all member ranks, naming tensor and rank, if shards do not match the plan or verification
        fails; no engine generates then.
        """
        self.num_syncs += 1
        if not self.is_member:
            return True
        where = f"the weight sync of version {version}"
        self._has_lost_engine = False
        weights, sent = self._split(local)
        problems = find_shard_problems(weights, self.params, self.plan.train, self.job.rank, self.num_experts)
        self._raise_if_any(problems + find_nonfinite(sent, self.job.rank), where)
        problems, lost = self._gather_live_problems(self._run_on_engine(lambda engine: engine.begin_update()))
        self.sent_bytes = self.whole_bytes = 0
        self._rank_bytes = [0, 0]
        has_base = self.sync_executor is not None and self.sync_executor.has_base
        if self.sync_executor is not None and has_base and self._gather_engines() != self._base_engines:
            self.sync_executor.drop_base()
            has_base = False
        if not (problems or lost):
            sender = self._make_sender()
            mismatches = [] if self.is_checked else self._check_tensors(sender)
            if not mismatches:
                self._send(local, sender, version)
            if sender.failure is not None:
                self._record_loss(sender.failure)
            problems, lost = self._gather_live_problems(sender.errors)
            if not lost:
                problems = mismatches or problems
            elif has_base:  # what a lost engine could not read back has reached others; the sync is repeated anyway
                problems = []
        succeeded = not (problems or lost)
        if self.external is not None:
            self.external.commit(version if succeeded else None)
        end_problems, lost_at_end = self._gather_live_problems(
            self._run_on_engine(lambda engine: engine.end_update(version if succeeded else None, self.adapter))
        )
        if problems := problems + end_problems:
            raise ConfigError(f"{where}: {problems[0]}")
        self.is_checked = self.is_checked or succeeded
        is_complete = not (lost or lost_at_end)
        if self.sends_changes and self.sync_executor is not None:
            if is_complete:
                self.sync_executor.keep_base(sent)
                self._base_engines = self._gather_engines()
            counts = self._gather(self._rank_bytes)
            self.sent_bytes, self.whole_bytes = (sum(column) for column in zip(*counts, strict=True))
        return is_complete

    def place_experts(self, experts: Mapping[int, tuple[int, ...]]) -> None:
        """Place the experts of these layers so from the next weight sync on, see `EngineLayout.experts`. Call on all
        ranks.

        The plan changes with the placement, and the next sync is verified in full. Raises ConfigError if the ranks have
        different placements.
        """
        placements = dict(self.plan.engine.experts)
        placements.update(experts.items())
        layout = replace(self.plan.engine, experts=placements)
        if layout != self.plan.engine:
            self.plan = build_plan(self.hf, self.config, layout, self.train_ranks, self.engine_ranks)
            self.weight_executor = None
            self.verify_next()
        self._check_digest()

    def _gather_engines(self) -> list[Any]:
        """Return weight version and start number of each rank's engine, if the rank leads one."""
        engine = self.engine
        return self._gather(None if engine is None else (engine.version_of(self.adapter), engine.start_number))

    @property
    def sync_executor(self) -> Executor | None:
        """The executor that every weight sync runs; None before the first sync."""
        return self.adapter_executor if self.adapted else self.weight_executor

    def _send(self, local: Mapping[str, torch.Tensor], sender: WeightSender, version: int) -> None:
        if self.external is not None:
            self.external.begin()
        if self.adapted:
            self._send_adapters(local, sender, version)
        else:
            self._send_weights(local, sender, version, self.external)
        for draft in self._draft_flags if self.engine_rank is not None else ():
            experts = self.plan.engine.experts
            decoder = {} if draft else {layer: experts[layer] for layer in experts if layer is not None}
            self._send_order(sender, {"do": "finish"} | ({"experts": decoder} if decoder else {}), draft)

    def _send_order(self, sender: WeightSender, order: dict[str, Any], draft: bool) -> None:
        """Send an order without data to this rank's engine, and at the same time to its external ones."""
        if self.external is not None:
            self.external.send_order(order, draft)
        sender.send_order(order, draft)
        if self.external is not None:
            self.external.wait()

    def _send_weights(
        self,
        local: Mapping[str, torch.Tensor],
        sender: WeightSender,
        version: int,
        external: ExternalEngines | None,
        compare: bool = False,
    ) -> None:
        if self.weight_executor is None:
            self.weight_executor = self._make_executor(self.plan)
        if self.adapter:  # beside which the engines keep the base weights
            local = self._split(local)[0]
        self._run_executor(self.weight_executor, local, sender, version, external, compare)

    def _send_adapters(self, local: Mapping[str, torch.Tensor], sender: WeightSender, version: int) -> None:
        """Send the adapters, and have the engines merge them unless they serve them as they are. In the syncs that are
        fully verified, compare the engines' weights with what would have been sent."""
        if self.adapter_executor is None:
            layout = self.plan.engine
            plan = build_plan(self.hf, self.config, layout, self.train_ranks, self.engine_ranks, adapters=True)
            self.adapter_executor = self._make_executor(plan)
            self._adapter_orders = {action: list(self._list_adapter_orders(action)) for action in ("prepare", "merge")}
        for order, draft in self._adapter_orders["prepare"]:
            self._send_order(sender, order, draft)
        self._run_executor(self.adapter_executor, self._split(local)[1], sender, version, self.external)
        for order, draft in self._adapter_orders["merge"]:
            self._send_order(sender, order, draft)
        if self.is_verified:
            self._send_weights(local, sender, version, self.external, compare=True)
            if wrong := sender.mismatches:
                which = "without adapters" if self.adapter else "with the adapters merged"
                text = f"the engine's weights {which} differ from the trainer's"
                sender.errors.append(f"{text}: {', '.join(wrong[:3])} ({len(wrong)})")

    def _split(
        self, local: Mapping[str, torch.Tensor]
    ) -> tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]:
        """Return this rank's weights without adapters, and what it sends in each sync: adapters alone, or all weights
        with adapters merged."""
        if not isinstance(local, MergedWeights):
            return local, local
        return local.weights, local.adapters if self.adapted else local

    def _list_adapter_orders(self, action: str) -> Iterator[tuple[dict[str, Any], bool]]:
        """Yield the order to "prepare" (to keep the base weights, or to select an adapter that is served) or to "merge"
        for each model of this rank's engine, and whether it is the draft."""
        if self.engine_rank is None:
            return
        layout, lora, dtype = self.plan.engine, self.config.lora, self.config.model.dtype
        position = self.engine_rank % layout.tp
        for draft in self._draft_flags:
            weights = [weight for weight in self.adapted if weight.slot and weight.slot.is_draft == draft]
            if self.adapter and action == "merge":
                continue
            if action == "merge":
                merges = list_merges(weights, layout, position, self.num_experts)
                yield {"do": action, "scale": lora.scale, "merges": merges}, draft
                continue
            names = sorted({slot.name for weight in weights if (slot := layout.slot_of(weight))})
            shapes = factor_shapes(weights, lora.rank, layout, position, self.num_experts)
            factors = {name: [dtype, shape] for name, shape in shapes.items()}
            if self.adapter:
                yield {"do": "select", "adapter": self.adapter, "factors": factors}, draft
            else:
                yield {"do": "keep", "tensors": names, "factors": factors}, draft

    def _is_compared(self, param: Param) -> bool:
        """Return whether the engines must have the bits of this weight that the trainer would send."""
        return not self.adapted or not keeps_codes(param, self._adapted_names, self.plan.assignment.wire)

    def _make_executor(self, plan: ReshardPlan) -> Executor:
        period = self.config.rollout.verify_weights_every
        is_compared = self._is_compared if plan is self.plan else lambda adapter: True
        return Executor(plan, self.job.rank, period, device.allocate_shared, is_compared)

    def _run_executor(
        self,
        executor: Executor,
        local: Mapping[str, torch.Tensor],
        sender: WeightSender,
        version: int,
        external: ExternalEngines | None,
        compare: bool = False,
    ) -> None:
        def share(buckets: Sequence[torch.Tensor]) -> None:
            sender.open(buckets, self.plan.engine.draft)
            if external is not None:
                external.open(len(buckets[0]))

        def send(buffer: torch.Tensor, order: dict[str, Any], draft: bool) -> None:
            sender(buffer, order, draft)
            if external is not None:
                external.write(buffer, order, draft)

        def wait() -> None:
            sender.wait_pending()
            if external is not None:
                external.wait()

        try:
            executor.sync(local, send, version, wait, compare, share)
        except BaseException as error:
            sender.close_channel()  # the engine process waits for orders
            if isinstance(error, WeightSyncError):
                raise ConfigError(str(error)) from error  # a rank is lost, so ranks cannot agree on an error
            raise
        self._rank_bytes[0] += executor.sent_bytes
        self._rank_bytes[1] += executor.whole_bytes
        sender.close()
        if external is not None:
            external.close_session()

    def _make_sender(self) -> WeightSender:
        return WeightSender(self.backend, self.engine, self.collect, self.config.rollout.hang_timeout)

    @property
    def is_verified(self) -> bool:
        """True if the last weight sync was fully verified."""
        return is_fully_verified(self.num_syncs, self.config.rollout.verify_weights_every)

    def find_mismatches(self, local: Mapping[str, torch.Tensor], version: int) -> list[str]:
        """Return the names of engine tensors that differ bitwise from the shards `local`, synced as `version`.

        The engines' weights must be awake; the engines no longer generate afterwards. Collective like `sync`; empty on
        non-member ranks.
        """
        if not self.is_member:
            return []
        where = "the comparison of weights"
        self._raise_if_any(self._run_on_engine(lambda engine: engine.begin_update()), where)
        sender = self._make_sender()
        self._send_weights(local, sender, version, external=None, compare=True)
        if self.adapter and self.adapter_executor is not None:  # None before the first sync
            for order, draft in self._adapter_orders["prepare"]:
                sender.send_order(order, draft)
            adapters = self._split(local)[1]
            self._run_executor(self.adapter_executor, adapters, sender, version, external=None, compare=True)
        self._raise_if_any(sender.errors, where)
        self._run_on_engine(lambda engine: engine.end_update(None))
        return sorted({name for names in self._gather(sender.mismatches) for name in names})

    def verify_next(self) -> None:
        """Request full verification of the next weight sync. Call on all ranks."""
        self.num_syncs = 0
        if self.sync_executor is not None:
            self.sync_executor.num_syncs = 0
            self.sync_executor.drop_base()

    @property
    def _draft_flags(self) -> tuple[bool, ...]:
        """One flag per model of an engine that receives weights: False for its own model, True for its draft model."""
        return (False, True) if self.plan.engine.draft else (False,)

    def _check_tensors(self, sender: WeightSender) -> list[str]:
        """Compare the engines with the plan, and rebuild the plan if they fuse the shared expert.

        Returns the problems of all ranks.
        """
        problems, fuses = self._check_local_tensors(sender) if self.engine_rank is not None else ([], False)
        reports = self._gather((problems + sender.errors, fuses))
        all_problems = [problem for rank_problems, _ in reports for problem in rank_problems]
        layout = self.plan.engine
        if not all_problems and any(fused for _, fused in reports) and not layout.fuse_shared:
            try:
                layout = replace(layout, fuse_shared=True)
                self.plan = build_plan(self.hf, self.config, layout, self.train_ranks, self.engine_ranks)
            except ConfigError as error:
                return [str(error)]
        return all_problems

    def _check_local_tensors(self, sender: WeightSender) -> tuple[list[str], bool]:
        """Return the differences of this rank's engine from the plan, and whether it fuses the shared expert with the
        others."""
        tensors: dict[bool, dict[str, Any]] = {}  # a draft model may have the names of the policy
        odd_tensors: list[str] = []
        for draft in self._draft_flags:
            answer = sender.send_order({"do": "describe"}, draft)
            tensors[draft] = answer.get("tensors", {})
            odd_tensors += answer.get("odd", [])
        if sender.errors:
            return [], False
        layout = self.plan.engine
        has_shared_experts = any(param.slot and is_shared_expert(param.slot.name) for param in self.params)
        fuses = has_shared_experts and not any(map(is_shared_expert, tensors[False]))
        if fuses:
            layout = replace(layout, fuse_shared=True)  # the engine's decision, the same on all ranks
        assert self.engine_rank is not None
        position, wire = self.engine_rank % layout.tp, self.plan.assignment.wire
        problems = find_layout_problems(odd_tensors)
        for draft, own in tensors.items():
            rows = [param for param in self.params if param.slot and param.slot.is_draft == draft]
            problems += find_engine_problems(own, rows, layout, position, self.num_experts, wire)
        return problems, fuses

    def _gather(self, value: Any) -> list[Any]:
        """All-gather over the member ranks, in order."""
        return all_gather_objects(value, self.group)

    def _gather_problems(self, problems: list[str]) -> list[str]:
        """Return the problems of all member ranks, in order of ranks."""
        return [problem for rank_problems in self._gather(problems) for problem in rank_problems]

    def _gather_live_problems(self, problems: list[str]) -> tuple[list[str], bool]:
        """Return the problems of all member ranks except those of lost engines, and whether any engine is lost."""
        engine_index = None if self.engine_rank is None else self.engine_rank // self.plan.engine.tp
        reports = self._gather((engine_index, self._has_lost_engine, problems))
        lost = {engine_index for engine_index, is_lost, _ in reports if is_lost}
        return [
            problem
            for engine_index, _, rank_problems in reports
            if engine_index not in lost
            for problem in rank_problems
        ], bool(lost)

    def _record_loss(self, error: EngineError) -> None:
        self._has_lost_engine = self.is_lost(error) or self._has_lost_engine

    def _raise_if_any(self, local_problems: list[str], where: str) -> None:
        if problems := self._gather_problems(local_problems):
            raise ConfigError(f"{where}: {problems[0]}" + (f" ({len(problems)} such)" if len(problems) > 1 else ""))

    def _run_on_engine(self, work: Callable[[Engine], None]) -> list[str]:
        if self.engine is None or self._has_lost_engine:
            return []
        try:
            work(self.engine)
        except EngineError as error:
            self._record_loss(error)
            return [str(error)]
        return []
