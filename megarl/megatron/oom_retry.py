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
from megarl.megatron.distribution import Distribution, Plan
from megarl.megatron.parameter_names import unwrap
from megarl.models.activation_memory import working_bytes
from megarl.parallel import device
from megarl.parallel.ranks import Ranks, all_gather_objects
from megarl.types import TrainBatch

T = TypeVar("T")
SAID = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "ALLOC_FAILED")
"""Of errors that have no class of their own: torch's allocator of the host, CUDA's libraries."""


class Short(NamedTuple):
    """What a rank was at when its memory ran out."""

    tokens: int
    units: int
    """Sequences of the micro-batch, or groups of them that are not parted."""
    what: str


class _PeerIsShort(Exception):
    """Another rank's memory ran out; nobody reduces gradients."""


class Fitting:
    """How much of a batch a model computes at once. Without `guards.memory` that is what the configuration says.

    What is found out holds for the rest of the run: `budget` tokens of a micro-batch on all context parallel ranks,
    whether layers are recomputed, how `often` memory has run out.
    """

    def __init__(
        self,
        hf: Mapping[str, Any],
        config: Config,
        ranks: Ranks,
        role: str,
        chunks: Sequence[torch.nn.Module],
        distribution: Distribution,
    ) -> None:
        self._hf, self._config, self._ranks, self._role, self._chunks = hf, config, ranks, role, chunks
        self._distribution = distribution
        self._on = config.guards.memory
        self.budget, self.recomputes, self.often = distribution.budget, False, 0
        self._at: Sequence[int] = ()
        self._said: list[Short] | None = None
        """What all have said of the pass that is under way."""
        settings = unwrap(chunks[0]).config
        kinds, overlaps = settings.moe_router_load_balancing_type, ("overlap_grad_reduce", "overlap_param_gather")
        together = ranks.tp * ranks.cp * ranks.pp * ranks.ep * ranks.etp > 1 or "global_aux_loss" in kinds
        self._together = together or any(config.train.ddp.get(name) for name in overlaps)
        self._reduce = settings.finalize_model_grads_func
        if self._on:
            settings.finalize_model_grads_func = self._reduce_if_all_fared_well

    # ---- a pass

    def run(self, batch: TrainBatch, plan: Plan, work: Callable[[Plan], T], trains: bool) -> tuple[T, Plan]:
        """What `work` returns of a plan, and the plan: the given one, or as it had to be cut. All ranks of the model
        call it. Raises ConfigError on all of them where the smallest micro-batches are too large."""
        if not self._on:
            return work(plan), plan
        units = batch.group if trains and self._distribution.together else torch.arange(batch.num_sequences)
        while True:
            cut = self.cut(plan, batch, trains)
            found = self._try(batch, cut, units, work, trains)
            if not self._said:
                return found[0], cut
            self._make_room(cut, batch, units, trains)

    def cut(self, plan: Plan, batch: TrainBatch, trains: bool) -> Plan:
        """The plan with micro-batches of at most `budget` tokens. Sequences stay on the ranks that have got them, so
        that those who send and take back rows need not know."""
        of = self._distribution
        if self.budget >= of.budget:
            return plan
        lengths = np.asarray(batch.lengths)
        group = np.asarray(batch.group) if trains and of.together else None
        parts = []
        for micros in plan:
            mine = np.array(list(chain.from_iterable(micros)), dtype=np.int64)
            kept = None if group is None else group[mine]
            (cut,) = plan_micro_batches(lengths[mine], 1, self.budget, of.quadratic, of.multiple, kept)
            parts.append([mine[micro].tolist() for micro in cut])
        count = max(map(len, parts))
        return [[*part, *([[]] * (count - len(part)))] for part in parts]

    def noted(self, micros: Sequence[Sequence[int]]) -> Iterator[Sequence[int]]:
        """These, each as the one that is at work."""
        for indices in micros:
            self._at = indices
            yield indices

    def _try(
        self, batch: TrainBatch, cut: Plan, units: torch.Tensor, work: Callable[[Plan], T], trains: bool
    ) -> list[T]:
        """What `work` returns, in a list, which is empty where some rank was short: `_said` has which."""
        self._said, self._at, mine, found = None, (), None, []
        if self._together and self._all_say(self._short_of(batch, cut, units, trains)):
            return []
        try:
            found = [work(cut)]
        except _PeerIsShort:
            pass
        except Exception as error:  # noqa: BLE001  a host's allocator has no class of its own
            if not is_out_of_memory(error):
                raise
            mine = self._described(batch, units, error)
        # Out of the `except`, whose error has all frames of the pass, and their tensors.
        if mine is not None and self._said is not None:  # the others are at something that they need this rank for
            raise ConfigError(self._in_the_middle(mine))
        if self._said is None:
            self._all_say(mine)
        return found

    def _all_say(self, mine: Short | None) -> list[Short]:
        said = all_gather_objects(mine, self._ranks.host)
        self._said = [short for short in said if short is not None]
        return self._said

    def _reduce_if_all_fared_well(self, *arguments: Any, **named: Any) -> Any:
        if self._said is None and self._all_say(None):
            raise _PeerIsShort
        return self._reduce(*arguments, **named)

    def _short_of(self, batch: TrainBatch, cut: Plan, units: torch.Tensor, trains: bool) -> Short | None:
        """Take what the largest micro-batch will need, and give it back at once."""
        sizes = [int(batch.lengths[micro].sum()) for micro in cut[self._ranks.dp_rank]]
        tokens = max(sizes)
        share = -(-tokens // self._ranks.cp)
        needed = working_bytes(self._hf, self._config, self._ranks, self._role, share, trains, self.recomputes)
        try:
            device.reserve(needed)
        except Exception as error:  # noqa: BLE001
            if not is_out_of_memory(error):
                raise
            self._at = cut[self._ranks.dp_rank][sizes.index(tokens)]
            return self._described(batch, units, RuntimeError(f"it needs about {needed:,} bytes"))
        return None

    def _described(self, batch: TrainBatch, units: torch.Tensor, error: Exception) -> Short:
        at = list(self._at)
        what = (str(error).splitlines() or [type(error).__name__])[0][:200]
        return Short(int(batch.lengths[at].sum()), len(units[at].unique()), what)

    # ---- less at once

    def _make_room(self, cut: Plan, batch: TrainBatch, units: torch.Tensor, trains: bool) -> None:
        """Half of the tokens; where micro-batches are of one sequence, recomputation; then there is nothing left."""
        self.often += 1
        self._forget(trains)
        short = self._said or []
        joined = [int(batch.lengths[micro].sum()) for part in cut for micro in part if len(units[micro].unique()) > 1]
        if joined and any(one.units > 1 for one in short):
            self.budget = max(1, min(self.budget, max(joined)) // 2)
        elif trains and not self.recomputes and self._may_recompute():
            self._recompute()
        else:
            worst = max(short)
            raise ConfigError(
                f"out of memory in a micro-batch of one sequence, of {worst.tokens} tokens ({worst.what}), of the "
                f"{self._role.replace('_', ' ')}{', with all layers recomputed' if self.recomputes else ''}: lower "
                "rollout.max_context or train.logits_at_once, or raise parallel.tp, cp or pp"
            )

    def _forget(self, trains: bool) -> None:
        """What a pass that was broken off has left, but for the gradients, which each begins by zeroing."""
        if trains:
            _unset_checkpointing()
            reset_model_temporary_tensors(unwrap(self._chunks[0]).config, list(self._chunks))
            get_moe_layer_wise_logging_tracker().clear()
            routing_replay.forget(self._chunks)
        device.empty_cache()

    def _may_recompute(self) -> bool:
        settings = unwrap(self._chunks[0]).config
        return settings.recompute_granularity is None and not settings.fp8

    def _recompute(self) -> None:
        """Megatron asks for it in each forward pass."""
        self.recomputes = True
        modules = (module for chunk in self._chunks for module in chunk.modules())
        for settings in (module.config for module in modules if hasattr(module, "config")):
            if isinstance(settings, TransformerConfig):
                settings.recompute_granularity, settings.recompute_method = "full", "uniform"
                settings.recompute_num_layers = 1

    def _in_the_middle(self, short: Short) -> str:
        tokens = short.tokens // self._ranks.cp
        return (
            f"out of memory in a micro-batch of {short.tokens} tokens of the {self._role.replace('_', ' ')} "
            f"({short.what}), where other ranks compute with this one and cannot be called back: go on with "
            f"run.resume=auto and train.token_budget={max(1, min(tokens, self.budget // self._ranks.cp) // 2)}, or "
            "with model.megatron.recompute_granularity=full"
        )

    # ---- state

    @property
    def figures(self) -> dict[str, float]:
        """For metrics; none where the guard is off."""
        if not self._on:
            return {}
        budget = float(self.budget // self._ranks.cp)
        return {"token_budget": budget, "recomputes": float(self.recomputes), "out_of_memory": float(self.often)}

    def state_dict(self) -> dict[str, Any]:
        whole = self._distribution.budget
        return {"of": whole, "budget": self.budget, "recomputes": self.recomputes, "often": self.often}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Of a run with another `train.token_budget` only how often memory ran out: somebody has set it anew."""
        self.often = int(state.get("often", 0))
        if self._on and state.get("of") == self._distribution.budget:
            self.budget = int(state["budget"])
            if state["recomputes"] and self._may_recompute():
                self._recompute()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it says that there was no memory, on the device or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in SAID)
