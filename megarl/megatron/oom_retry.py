"""Out of memory: a model's ranks agree on smaller micro-batches and retry the pass.

A rank that fails must not leave its peers in a collective. With data parallelism alone, a pass has no collective before
gradient reduction, so all ranks report just before it whether they ran out of memory. Where ranks compute together (tp,
cp, pp, ep, or gradient reduction overlapping the backward pass), each rank first allocates, in one block, the planned
memory of its largest micro-batch, and all report whether that succeeded before any rank starts. If memory runs out
beyond that plan, in the middle of such a pass, there is no retry: the run ends with an error that names the setting to
change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.core.distributed.finalize_model_grads import reset_model_temporary_tensors
from megatron.core.tensor_parallel.random import _unset_checkpointing
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossLoggingHelper
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.config import Config, ConfigError
from megarl.data.packing import MicroBatchPlan, plan_micro_batches
from megarl.megatron import routing_replay, sparse_attention
from megarl.megatron.distribution import BatchDispatcher
from megarl.megatron.parameter_names import unwrap
from megarl.models.activation_memory import working_bytes
from megarl.parallel import device
from megarl.parallel.ranks import Ranks, all_gather_objects
from megarl.types import TrainBatch

OOM_MESSAGES = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "ALLOC_FAILED")
"""Messages of out-of-memory errors without a class of their own: torch's host allocator, CUDA libraries."""


class OOMReport(NamedTuple):
    """The micro-batch in which a rank ran out of memory."""

    tokens: int  # over all context parallel ranks
    rank_tokens: int  # about those of this rank
    num_units: int  # sequences, or groups if these are not split
    message: str


class _PeerOutOfMemory(Exception):
    """Another rank ran out of memory, so no rank reduces gradients."""


class OOMRetry:
    """Limits how much of a batch a model computes at once. Without `guards.oom_retry` the configured limit stays.

        for retried_plan in oom_retry.plans(batch, plan, trains=True):
            with oom_retry.catch_oom():
                ...  # the pass

    Its state lasts for the rest of the run: `token_budget` (as that of the dispatcher),
    `should_recompute` (whether all layers are recomputed) and `num_ooms` (how often memory ran out).
    """

    def __init__(
        self,
        hf: Mapping[str, Any],
        config: Config,
        ranks: Ranks,
        role: str,
        chunks: Sequence[torch.nn.Module],
        dispatcher: BatchDispatcher,
    ) -> None:
        self._hf, self._config, self._ranks, self._role, self._chunks = hf, config, ranks, role, chunks
        self._dispatcher = dispatcher
        self._is_enabled = config.guards.oom_retry
        self.token_budget, self.should_recompute, self.num_ooms = dispatcher.token_budget, False, 0
        self._ranks_per_row = 1 if ranks.dynamic_cp else ranks.cp
        self._current_sequences: Sequence[int] = ()
        self._current_width = 1
        self._message = ""  # this rank's out-of-memory error in the current pass
        self._reports: list[OOMReport] | None = None  # of all ranks on the current pass; None until gathered
        settings = unwrap(chunks[0]).config
        self._has_collectives = (
            ranks.tp * ranks.cp * ranks.pp * ranks.ep * ranks.etp > 1
            or "global_aux_loss" in settings.moe_router_load_balancing_type
            or config.train.fsdp
            or any(config.train.ddp.get(name) for name in ("overlap_grad_reduce", "overlap_param_gather"))
        )
        self._finalize_grads = settings.finalize_model_grads_func
        if self._is_enabled:
            settings.finalize_model_grads_func = self._finalize_unless_oom

    # ---- a pass

    def plans(self, batch: TrainBatch, plan: MicroBatchPlan, trains: bool) -> Iterator[MicroBatchPlan]:
        """Yield the plan of each try of a pass, with smaller micro-batches after each out-of-memory error.

        Collective over the model's ranks. Raises ConfigError on all of them if even the smallest micro-batches do not
        fit.
        """
        if not self._is_enabled:
            yield plan
            return
        units = batch.group if trains and batch.keeps_groups else torch.arange(batch.num_sequences)
        while True:
            cut = self._shrink_plan(plan, batch, trains)
            self._reports, self._current_sequences, self._message = None, (), ""
            if self._has_collectives:
                self._try_reserve(batch, cut, trains)
                self._gather_reports(self._make_report(batch, units))
            if not self._reports:
                yield cut
                report = self._make_report(batch, units)
                if report is not None and self._reports is not None:  # the other ranks are in a collective
                    raise ConfigError(
                        f"out of memory in a micro-batch of {report.tokens} tokens of the {self._display_name} "
                        f"({report.message}), which other ranks compute jointly and cannot repeat: continue with "
                        "run.resume=auto and train.max_tokens_per_gpu="
                        f"{max(1, min(report.rank_tokens, self.token_budget // self._ranks_per_row) // 2)}, or with "
                        "model.megatron.recompute_granularity=full"
                    )
                if self._reports is None:
                    self._gather_reports(report)
            if not self._reports:
                return
            self._lower_memory_use(cut, batch, units, trains)

    @contextmanager
    def catch_oom(self) -> Iterator[None]:
        """Catch the out-of-memory error of a pass within the block, to be retried with the next of `plans`.

        Only its message is kept: the error itself keeps all frames of the pass and their tensors alive.
        """
        try:
            yield
        except _PeerOutOfMemory:
            pass
        except Exception as error:  # noqa: BLE001  the host allocator's error has no class of its own
            if not self._is_enabled or not is_out_of_memory(error):
                raise
            self._message = (str(error).splitlines() or [type(error).__name__])[0][:200]

    def _shrink_plan(self, plan: MicroBatchPlan, batch: TrainBatch, trains: bool) -> MicroBatchPlan:
        """Return the plan with micro-batches of at most `token_budget` tokens.

        Sequences stay on their ranks, so ranks that exchange rows with them are not affected.
        """
        dispatcher = self._dispatcher
        if self.token_budget >= dispatcher.token_budget:
            return plan
        lengths = np.asarray(batch.lengths)
        group = np.asarray(batch.group) if trains and batch.keeps_groups else None

        def cut(width: int, micros: Sequence[Sequence[int]]) -> list[list[int]]:
            sequences = np.array(list(chain.from_iterable(micros)), dtype=np.int64)
            groups, budget = None if group is None else group[sequences], self.token_budget * width
            (smaller,) = plan_micro_batches(
                *(lengths[sequences], 1, budget, dispatcher.quadratic_cost, dispatcher.multiple, groups),
                minimum=dispatcher.min_trained if trains else 1,
                common=dispatcher.common_tokens(batch, sequences.tolist()),
            )
            return [sequences[micro].tolist() for micro in smaller]

        rows, widths = [list[list[int]]() for _ in plan], list[int]()
        for width in sorted(set(plan.widths), reverse=True):
            numbers = [number for number, value in enumerate(plan.widths) if value == width]
            parts = [cut(width, [plan[row][number] for number in numbers]) for row in range(0, len(plan), width)]
            count = max(map(len, parts))
            widths += [width] * count
            for row, micros in enumerate(rows):
                part = parts[row // width]
                micros += [*part, *([] for _ in range(count - len(part)))]
        return MicroBatchPlan(rows, widths)

    def track_current(self, plan: MicroBatchPlan) -> Iterator[tuple[Sequence[int], int]]:
        """Iterate over this rank's micro-batches and their widths, recording each as the current one."""
        assert self._dispatcher.this_rank is not None
        for indices, width in zip(plan[self._dispatcher.this_rank.row], plan.widths, strict=True):
            self._current_sequences, self._current_width = indices, width
            yield indices, width

    def _gather_reports(self, local: OOMReport | None) -> list[OOMReport]:
        reports = all_gather_objects(local, self._ranks.host_group)
        self._reports = [report for report in reports if report is not None]
        return self._reports

    def _finalize_unless_oom(self, *arguments: Any, **named: Any) -> Any:
        if self._reports is None and self._gather_reports(None):
            raise _PeerOutOfMemory
        return self._finalize_grads(*arguments, **named)

    def _try_reserve(self, batch: TrainBatch, plan: MicroBatchPlan, trains: bool) -> None:
        """Allocate the memory that the largest micro-batch needs, and free it at once."""
        assert self._dispatcher.this_rank is not None
        micros = zip(plan[self._dispatcher.this_rank.row], plan.widths, strict=True)
        largest, width = max(micros, key=lambda micro: self._count_rank_tokens(batch, *micro))
        cp_tokens = self._count_rank_tokens(batch, largest, width)
        ranks = replace(self._ranks, cp=width * self._ranks_per_row)
        needed = working_bytes(self._hf, self._config, ranks, self._role, cp_tokens, trains, self.should_recompute)
        try:
            device.reserve(needed)
        except Exception as error:  # noqa: BLE001
            if not is_out_of_memory(error):
                raise
            self._current_sequences, self._current_width = largest, width
            self._message = f"it needs about {needed:,} bytes"

    def _count_rank_tokens(self, batch: TrainBatch, micro_batch: Sequence[int], width: int) -> int:
        """Return the tokens of a context parallel rank."""
        return -(-self._dispatcher.count_tokens(batch, micro_batch) // (width * self._ranks_per_row))

    def _make_report(self, batch: TrainBatch, units: torch.Tensor) -> OOMReport | None:
        if not self._message:
            return None
        indices = list(self._current_sequences)
        rank_tokens = self._count_rank_tokens(batch, indices, self._current_width)
        tokens, num_units = self._dispatcher.count_tokens(batch, indices), len(units[indices].unique())
        return OOMReport(tokens, rank_tokens, num_units, self._message)

    # ---- retry

    def _lower_memory_use(self, plan: MicroBatchPlan, batch: TrainBatch, units: torch.Tensor, trains: bool) -> None:
        """Halve the token budget or, with one sequence per micro-batch, enable recomputation; else raise."""
        self.num_ooms += 1
        if trains:  # clear the state of the aborted pass, except for gradients, which every pass zeroes first
            _unset_checkpointing()
            reset_model_temporary_tensors(unwrap(self._chunks[0]).config, list(self._chunks))
            destroy_moe_metrics_tracker()
            DSAIndexerLossLoggingHelper.tracker.clear()
            routing_replay.reset(self._chunks)
            sparse_attention.reset(self._chunks)
        device.empty_cache()
        reports = self._reports or []
        divisible_sizes = [
            self._dispatcher.count_tokens(batch, micro) // width
            for part in plan
            for micro, width in zip(part, plan.widths, strict=True)
            if len(units[micro].unique()) > 1
        ]
        if divisible_sizes and any(report.num_units > 1 for report in reports):
            self.token_budget = max(1, min(self.token_budget, max(divisible_sizes)) // 2)
        elif trains and not self.should_recompute and self._can_recompute():
            self._enable_recompute()
        else:
            worst = max(reports)
            raise ConfigError(
                f"out of memory in a micro-batch of one sequence, of {worst.tokens} tokens ({worst.message}), of the "
                f"{self._display_name}{', with all layers recomputed' if self.should_recompute else ''}: "
                "lower rollout.max_context or train.logits_chunk_size, or raise parallel.tp, cp or pp"
            )

    def _can_recompute(self) -> bool:
        settings = unwrap(self._chunks[0]).config
        return settings.recompute_granularity is None and not settings.fp8

    def _enable_recompute(self) -> None:
        """Enable full recomputation. Megatron reads these settings in each forward pass."""
        self.should_recompute = True
        modules = (module for chunk in self._chunks for module in chunk.modules())
        for settings in (module.config for module in modules if hasattr(module, "config")):
            if isinstance(settings, TransformerConfig):
                settings.recompute_granularity, settings.recompute_method = "full", "uniform"
                settings.recompute_num_layers = 1

    @property
    def _display_name(self) -> str:
        return self._role.replace("_", " ")

    # ---- state

    def set_dispatcher(self, dispatcher: BatchDispatcher) -> None:
        """Use the budget of another dispatcher, as if no pass had run out of memory with it."""
        self._dispatcher, self.token_budget = dispatcher, dispatcher.token_budget

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the guard; empty if it is off."""
        if not self._is_enabled:
            return {}
        return {
            "token_budget": float(self.token_budget // self._ranks_per_row),
            "recomputes": float(self.should_recompute),
            "out_of_memory": float(self.num_ooms),
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "of": [self._dispatcher.token_budget, self._ranks_per_row],
            "budget": self.token_budget,
            "recomputes": self.should_recompute,
            "often": self.num_ooms,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state. If `train.max_tokens_per_gpu` has changed since, restore only `num_ooms`."""
        self.num_ooms = int(state.get("often", 0))
        if self._is_enabled and state.get("of") == [self._dispatcher.token_budget, self._ranks_per_row]:
            self.token_budget = int(state["budget"])
            if state["recomputes"] and self._can_recompute():
                self._enable_recompute()


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error means out of memory, on the device or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in OOM_MESSAGES)
