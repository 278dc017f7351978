"""Out of memory: the ranks of a model agree, cut its micro-batches smaller, and take the pass again.

Nothing that a pass has left is used: weights change in the optimizer's step only, gradients are zeroed before the next
try, and a loss is a sum over micro-batches, however they are cut. So the result is that of a run that had the memory.

A rank that fails must not leave its peers in a collective. Where a model is whole on each of its ranks (data parallel
alone) a pass has no collective before gradients are reduced: there all ranks say first how they fared. Where ranks
compute together (tp, cp, pp, ep, or gradients reduced while the backward pass goes on) each first takes, in one piece,
what is planned for its largest micro-batch, and all say whether they got it before any of them begins. What runs out
beyond that plan, in the middle of such a pass, cannot be taken back: the run ends in a line that says what to set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from megatron.core.distributed.finalize_model_grads import reset_model_temporary_tensors
from megatron.core.tensor_parallel.random import _unset_checkpointing
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.config import Config, ConfigError
from megarl.data.packing import plan_micro_batches
from megarl.megatron import routing_replay
from megarl.megatron.distribution import BatchDispatcher, MicroBatchPlan
from megarl.megatron.parameter_names import unwrap
from megarl.models.activation_memory import working_bytes
from megarl.parallel import device
from megarl.parallel.ranks import Ranks, all_gather_objects
from megarl.types import TrainBatch

T = TypeVar("T")
OOM_MESSAGES = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "ALLOC_FAILED")
"""Of errors that have no class of their own: torch's allocator of the host, CUDA's libraries."""


class OOMReport(NamedTuple):
    """What a rank was at when its memory ran out."""

    tokens: int
    num_units: int
    """Sequences of the micro-batch, or groups of them that are not parted."""
    message: str


class _PeerOutOfMemory(Exception):
    """Another rank's memory ran out; nobody reduces gradients."""


class OOMRetry:
    """How much of a batch a model computes at once. Without `guards.memory` that is what the configuration says.

    What is found out holds for the rest of the run: `budget` tokens of a micro-batch on all context parallel ranks,
    whether layers are recomputed, how `num_ooms` memory has run out.
    """

    def __init__(
        self,
        hf: Mapping[str, Any],
        config: Config,
        ranks: Ranks,
        role: str,
        chunks: Sequence[torch.nn.Module],
        distribution: BatchDispatcher,
    ) -> None:
        self._hf, self._config, self._ranks, self._role, self._chunks = hf, config, ranks, role, chunks
        self._dispatcher = distribution
        self._is_enabled = config.guards.memory
        self.token_budget, self.should_recompute, self.num_ooms = distribution.token_budget, False, 0
        self._current_sequences: Sequence[int] = ()
        self._reports: list[OOMReport] | None = None
        """What all have said of the pass that is under way."""
        settings = unwrap(chunks[0]).config
        kinds, overlaps = settings.moe_router_load_balancing_type, ("overlap_grad_reduce", "overlap_param_gather")
        together = ranks.tp * ranks.cp * ranks.pp * ranks.ep * ranks.etp > 1 or "global_aux_loss" in kinds
        self._has_collectives = together or any(config.train.ddp.get(name) for name in overlaps)
        self._finalize_grads = settings.finalize_model_grads_func
        if self._is_enabled:
            settings.finalize_model_grads_func = self._finalize_unless_oom

    # ---- a pass

    def run(
        self, batch: TrainBatch, plan: MicroBatchPlan, work: Callable[[MicroBatchPlan], T], trains: bool
    ) -> tuple[T, MicroBatchPlan]:
        """What `work` returns of a plan, and the plan: the given one, or as it had to be cut. All ranks of the model
        call it. Raises ConfigError on all of them where the smallest micro-batches are too large."""
        if not self._is_enabled:
            return work(plan), plan
        units = batch.group if trains and self._dispatcher.should_keep_groups else torch.arange(batch.num_sequences)
        while True:
            cut = self.shrink_plan(plan, batch, trains)
            found = self._try_pass(batch, cut, units, work, trains)
            if not self._reports:
                return found[0], cut
            self._lower_memory_use(cut, batch, units, trains)

    def shrink_plan(self, plan: MicroBatchPlan, batch: TrainBatch, trains: bool) -> MicroBatchPlan:
        """The plan with micro-batches of at most `budget` tokens. Sequences stay on the ranks that have got them, so
        that those who send and take back rows need not know."""
        of = self._dispatcher
        if self.token_budget >= of.token_budget:
            return plan
        lengths = np.asarray(batch.lengths)
        group = np.asarray(batch.group) if trains and of.should_keep_groups else None
        parts = []
        for micros in plan:
            mine = np.array(list(chain.from_iterable(micros)), dtype=np.int64)
            kept = None if group is None else group[mine]
            (cut,) = plan_micro_batches(lengths[mine], 1, self.token_budget, of.quadratic_cost, of.multiple, kept)
            parts.append([mine[micro].tolist() for micro in cut])
        count = max(map(len, parts))
        return [[*part, *([[]] * (count - len(part)))] for part in parts]

    def track_current(self, micros: Sequence[Sequence[int]]) -> Iterator[Sequence[int]]:
        """These, each as the one that is at work."""
        for indices in micros:
            self._current_sequences = indices
            yield indices

    def _try_pass(
        self,
        batch: TrainBatch,
        cut: MicroBatchPlan,
        units: torch.Tensor,
        work: Callable[[MicroBatchPlan], T],
        trains: bool,
    ) -> list[T]:
        """What `work` returns, in a list, which is empty where some rank was short: `_said` has which."""
        self._reports, self._current_sequences, mine, found = None, (), None, []
        if self._has_collectives and self._gather_reports(self._try_reserve(batch, cut, units, trains)):
            return []
        try:
            found = [work(cut)]
        except _PeerOutOfMemory:
            pass
        except Exception as error:  # noqa: BLE001  a host's allocator has no class of its own
            if not is_out_of_memory(error):
                raise
            mine = self._make_report(batch, units, error)
        # Out of the `except`, whose error has all frames of the pass, and their tensors.
        if mine is not None and self._reports is not None:  # the others are at something that they need this rank for
            raise ConfigError(self._mid_pass_message(mine))
        if self._reports is None:
            self._gather_reports(mine)
        return found

    def _gather_reports(self, mine: OOMReport | None) -> list[OOMReport]:
        said = all_gather_objects(mine, self._ranks.host_group)
        self._reports = [short for short in said if short is not None]
        return self._reports

    def _finalize_unless_oom(self, *arguments: Any, **named: Any) -> Any:
        if self._reports is None and self._gather_reports(None):
            raise _PeerOutOfMemory
        return self._finalize_grads(*arguments, **named)

    def _try_reserve(
        self, batch: TrainBatch, cut: MicroBatchPlan, units: torch.Tensor, trains: bool
    ) -> OOMReport | None:
        """Take what the largest micro-batch will need, and give it back at once."""
        sizes = [int(batch.lengths[micro].sum()) for micro in cut[self._ranks.dp_rank]]
        tokens = max(sizes)
        share = -(-tokens // self._ranks.cp)
        needed = working_bytes(self._hf, self._config, self._ranks, self._role, share, trains, self.should_recompute)
        try:
            device.reserve(needed)
        except Exception as error:  # noqa: BLE001
            if not is_out_of_memory(error):
                raise
            self._current_sequences = cut[self._ranks.dp_rank][sizes.index(tokens)]
            return self._make_report(batch, units, RuntimeError(f"it needs about {needed:,} bytes"))
        return None

    def _make_report(self, batch: TrainBatch, units: torch.Tensor, error: Exception) -> OOMReport:
        at = list(self._current_sequences)
        what = (str(error).splitlines() or [type(error).__name__])[0][:200]
        return OOMReport(int(batch.lengths[at].sum()), len(units[at].unique()), what)

    # ---- less at once

    def _lower_memory_use(self, cut: MicroBatchPlan, batch: TrainBatch, units: torch.Tensor, trains: bool) -> None:
        """Half of the tokens; where micro-batches are of one sequence, recomputation; then there is nothing left."""
        self.num_ooms += 1
        self._reset_after_abort(trains)
        short = self._reports or []
        joined = [int(batch.lengths[micro].sum()) for part in cut for micro in part if len(units[micro].unique()) > 1]
        if joined and any(one.num_units > 1 for one in short):
            self.token_budget = max(1, min(self.token_budget, max(joined)) // 2)
        elif trains and not self.should_recompute and self._can_recompute():
            self._enable_recompute()
        else:
            worst = max(short)
            raise ConfigError(
                f"out of memory in a micro-batch of one sequence, of {worst.tokens} tokens ({worst.message}), of the "
                f"{self._role.replace('_', ' ')}{', with all layers recomputed' if self.should_recompute else ''}: lower "
                "rollout.max_context or train.logits_at_once, or raise parallel.tp, cp or pp"
            )

    def _reset_after_abort(self, trains: bool) -> None:
        """What a pass that was broken off has left, but for the gradients, which each begins by zeroing."""
        if trains:
            _unset_checkpointing()
            reset_model_temporary_tensors(unwrap(self._chunks[0]).config, list(self._chunks))
            get_moe_layer_wise_logging_tracker().clear()
            routing_replay.reset(self._chunks)
        device.empty_cache()

    def _can_recompute(self) -> bool:
        settings = unwrap(self._chunks[0]).config
        return settings.recompute_granularity is None and not settings.fp8

    def _enable_recompute(self) -> None:
        """Megatron asks for it in each forward pass."""
        self.should_recompute = True
        modules = (module for chunk in self._chunks for module in chunk.modules())
        for settings in (module.config for module in modules if hasattr(module, "config")):
            if isinstance(settings, TransformerConfig):
                settings.recompute_granularity, settings.recompute_method = "full", "uniform"
                settings.recompute_num_layers = 1

    def _mid_pass_message(self, short: OOMReport) -> str:
        tokens = short.tokens // self._ranks.cp
        return (
            f"out of memory in a micro-batch of {short.tokens} tokens of the {self._role.replace('_', ' ')} "
            f"({short.message}), where other ranks compute with this one and cannot be called back: go on with "
            f"run.resume=auto and train.token_budget={max(1, min(tokens, self.token_budget // self._ranks.cp) // 2)}, or "
            "with model.megatron.recompute_granularity=full"
        )

    # ---- state

    @property
    def metrics(self) -> dict[str, float]:
        """For metrics; none where the guard is off."""
        if not self._is_enabled:
            return {}
        budget = float(self.token_budget // self._ranks.cp)
        return {
            "token_budget": budget,
            "recomputes": float(self.should_recompute),
            "out_of_memory": float(self.num_ooms),
        }

    def state_dict(self) -> dict[str, Any]:
        whole = self._dispatcher.token_budget
        return {"of": whole, "budget": self.token_budget, "recomputes": self.should_recompute, "often": self.num_ooms}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Of a run with another `train.token_budget` only how often memory ran out: somebody has set it anew."""
        self.num_ooms = int(state.get("often", 0))
        if self._is_enabled and state.get("of") == self._dispatcher.token_budget:
            self.token_budget = int(state["budget"])
            if state["recomputes"] and self._can_recompute():
                self._enable_recompute()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it says that there was no memory, on the device or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in OOM_MESSAGES)
