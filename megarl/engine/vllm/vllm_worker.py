"""Subclasses of vLLM's worker, model runner, sampler, scheduler and executor.

They enter through vLLM's own arguments (`worker_cls`, `scheduler_cls`, `distributed_executor_backend`, `load_format`),
except that the worker exchanges its runner's class and samplers after `init_device`; docs/patches.md lists all such
changes. `additional_config` carries MegaRL's settings to them. vLLM itself reports sampling masks and routed experts
with its V2 model runner only, which needs Triton. Here the V1 runner, which runs on a CPU, feeds the same outputs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.outputs import SamplingMaskLists
from vllm.v1.request import RequestStatus
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from megarl.engine import weight_loader
from megarl.engine.engine_host import LEFTOVERS
from megarl.engine.vllm.vllm_adapters import AdapterSlots
from megarl.engine.vllm.vllm_loader import SlotNames, find_layout_oddities, refresh_derived
from megarl.processes.children import die_with_parent

SETTINGS = "megarl"
"""Key of `additional_config` with MegaRL's settings: "folder" of the engine's files, "threads" of a worker, whether to
record "routing", "request_timeout" in seconds, and rank and scale of the adapters ("lora")."""
TIMED_OUT = "timed out"
"""Stop reason of a request that ran for more than "request_timeout"."""
MASK = "mask"
"""Key of a request's `extra_args`: whether to report its sampling masks."""


def _settings(vllm_config: Any) -> dict[str, Any]:
    return dict(vllm_config.additional_config[SETTINGS])


class MaskSampler(Sampler):
    """A sampler that notes which tokens could have been drawn, where vLLM gathers the log-probs."""

    is_mask_wanted = False
    masks: torch.Tensor | None = None  # [rows, vocabulary] bool

    def gather_logprobs(self, logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor) -> Any:
        """Gather as vLLM does. logprobs: [rows, vocabulary] after truncation, -inf for tokens that cannot be drawn."""
        self.masks = logprobs > float("-inf") if self.is_mask_wanted else None
        return Sampler.gather_logprobs(logprobs, num_logprobs, token_ids)


class _Batch:
    """The three attributes of the V2 model runner's batch that AuxOutputWorkerConnector reads."""

    def __init__(self, req_ids: list[str], num_scheduled: Sequence[int], num_computed: np.ndarray) -> None:
        self.req_ids = req_ids
        self.query_start_loc_np = np.concatenate([[0], np.cumsum(num_scheduled)])
        self.num_computed_tokens_np = num_computed


class RecordingRunner(CPUModelRunner):
    """The V1 model runner on a CPU, with sampling masks and routed experts in its output."""

    sampler: Any

    def start_recording(self, records_routing: bool) -> None:
        """Turn a new CPUModelRunner, whose class was set to this one, into one that records."""
        plain: Sampler = self.sampler
        self.sampler = MaskSampler(plain.logprobs_mode, plain.use_fp64_gumbel)
        if hasattr(self, "rejection_sampler"):
            self.rejection_sampler.sampler = self.sampler
        self._records_routing = records_routing
        self._routing: Any = None
        self._pending_routing: Any = None
        self._num_drafts: list[int] = []
        self._wants_mask: list[bool] = []

    def initialize_kv_cache(self, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        """Also make the store of routing, which is by blocks of the KV cache, so that it serves cached prefixes."""
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        if self._records_routing:
            self._routing = AuxOutputWorkerConnector(
                vllm_config=self.vllm_config, model=self.model, kv_cache_config=self.kv_cache_config
            )

    def load_lora_model(self, model: torch.nn.Module, vllm_config: Any, device: torch.device) -> torch.nn.Module:
        """Add slots for adapters to the model's layers."""
        lora = _settings(vllm_config)["lora"]
        self.lora_manager = AdapterSlots(vllm_config, device, model.embedding_modules, **lora)
        adapted: torch.nn.Module = self.lora_manager.create_lora_manager(model, vllm_config)
        return adapted

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the model, and note whose tokens the experts were chosen for."""
        if self._routing is not None:
            self._routing.begin_step(scheduler_output.aux_output_connector_metadata)
        result = super().execute_model(scheduler_output, *args, **kwargs)
        self._pending_routing = None
        if self._routing is not None and self.execute_model_state is not None:
            ids = list(self.input_batch.req_ids)
            num_scheduled = [scheduler_output.num_scheduled_tokens[name] for name in ids]
            num_computed = self.input_batch.num_computed_tokens_cpu[: self.input_batch.num_reqs].copy()
            self._pending_routing = self._routing.prepare_output(_Batch(ids, num_scheduled, num_computed))
            self._num_drafts = [len(scheduler_output.scheduled_spec_decode_tokens.get(name, ())) for name in ids]
        return result

    def _sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        params = [self.requests[name].sampling_params for name in self.input_batch.req_ids]
        self._wants_mask = [bool((each.extra_args or {}).get(MASK)) for each in params]
        self.sampler.is_mask_wanted, self.sampler.masks = any(self._wants_mask), None
        return super()._sample(logits, spec_decode_metadata)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample, and add masks and routing to the output."""
        self.sampler.masks = None
        output = super().sample_tokens(grammar_output)
        pending, self._pending_routing = self._pending_routing, None
        num_sampled = [len(tokens) for tokens in getattr(output, "sampled_token_ids", [])]
        if self.sampler.masks is not None and num_sampled:
            output.sampling_masks = _mask_lists(self.sampler.masks, self._wants_mask, num_sampled)
        if pending is not None:
            counts = np.array(num_sampled)
            num_rejected = np.where(counts > 0, np.maximum(np.array(self._num_drafts) + 1 - counts, 0), 0)
            pending.enqueue_cpu_copy(counts, num_rejected)
            output.aux_output_connector_output = pending.process_output()
        return output


def _mask_lists(masks: torch.Tensor, wants_mask: Sequence[bool], num_sampled: Sequence[int]) -> SamplingMaskLists:
    """Return the masks of a step. masks: [requests x rows per request, vocabulary]; with drafts a request has several
    rows, of which the first `num_sampled` count."""
    per_request = masks.shape[0] // len(num_sampled)
    rows, empty, masks_np = [], np.zeros(0, dtype=np.int32), masks.numpy()
    for number, count in enumerate(num_sampled):
        # Without drafts the scheduler finds a request's row by its index, so each request has one.
        for row in range(count if per_request > 1 else 1):
            ids = np.nonzero(masks_np[number * per_request + row])[0] if wants_mask[number] else empty
            rows.append(ids.astype(np.int32))
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    cumulative = None if per_request == 1 else np.concatenate([[0], np.cumsum(num_sampled)]).tolist()
    return SamplingMaskLists(np.concatenate(rows) if rows else empty, offsets, cumulative)


class RecordingScheduler(Scheduler):
    """Passes on sampling masks and routed experts, as vLLM does for its V2 model runner, and ends requests that run for
    more than "request_timeout" seconds. The queue and pauses do not count."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = _settings(self.vllm_config)
        self.return_sampling_mask = True
        if settings["routing"]:
            self.aux_output_connector = AuxOutputSchedulerConnector()
        self._limit: float = settings["request_timeout"]
        self._started: dict[str, float] = {}  # by request, in the seconds of `_clock`
        self._paused_at: float | None = None
        self._paused_seconds = 0.0

    def _clock(self) -> float:
        """Return seconds that stand still during pauses."""
        return (self._paused_at or time.monotonic()) - self._paused_seconds

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Pause or go on."""
        super().set_pause_state(pause_state)
        if pause_state == PauseState.PAUSED_ALL:
            self._paused_at = self._paused_at or time.monotonic()
        elif self._paused_at is not None:
            self._paused_seconds += time.monotonic() - self._paused_at
            self._paused_at = None

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule a step, and note when each request began to run."""
        result, now = super().schedule(*args, **kwargs), self._clock()
        for name in result.num_scheduled_tokens:
            self._started.setdefault(name, now)
        return result

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        """Process a step's output. A request that is out of time ends as aborted, with the stop reason TIMED_OUT."""
        outputs, now = super().update_from_output(*args, **kwargs), self._clock()
        late = [name for name, started in self._started.items() if now - started > self._limit]
        for request in self.finish_requests(late, RequestStatus.FINISHED_ABORTED):
            reason = request.get_finished_reason()
            output = EngineCoreOutput(request.request_id, [], finish_reason=reason, stop_reason=TIMED_OUT)
            outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(output)
        self._started = {name: started for name, started in self._started.items() if name in self.requests}
        return outputs


class ForkingExecutor(MultiprocExecutor):
    """Starts workers by fork, and ends the engine core with the server. It runs in the core's main thread."""

    def _init_executor(self) -> None:
        die_with_parent(os.getppid())
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # the CPU platform has set spawn
        super()._init_executor()


class SyncedWorker(CPUWorker):
    """A worker whose weights the trainer writes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        die_with_parent(os.getppid())
        super().__init__(*args, **kwargs)
        self._models: dict[bool, SlotNames] = {}

    def init_device(self) -> None:
        """Set the number of threads, which CPUWorker makes impossible, and make the model runner record."""
        settings = _settings(self.vllm_config)
        if self.rank == 0:  # names as in vllm/distributed/device_communicators/cpu_communicator.py
            name = Path(self.distributed_init_method).name
            Path(settings["folder"], LEFTOVERS).write_text(f"/dev/shm/{name}-*\n")
        torch.set_num_threads(settings["threads"])
        super().init_device()
        self.model_runner.__class__ = RecordingRunner
        self.model_runner.start_recording(settings["routing"])

    def _find_factors(self, adapter: str, factors: Mapping[str, Sequence[Any]]) -> dict[str, torch.Tensor]:
        if not self.lora_config:
            return weight_loader.refuse_adapters(adapter, factors)
        slots: AdapterSlots = self.model_runner.lora_manager
        return slots.find_factors(adapter, factors)

    def execute_order(self, payloads: list[str], is_draft: bool) -> None:
        """Execute an order of the trainer rank on the same device, see `weight_loader`.

        payloads: of all ranks, each the result of `VLLMBackend.pack_payload`.
        """
        model = self.get_draft_model() if is_draft else self.model_runner.model
        if is_draft not in self._models:
            self._models[is_draft] = SlotNames(model, is_draft)
        handles = torch.frombuffer(bytearray(payloads[self.rank].encode()), dtype=torch.uint8)
        hooks = weight_loader.LoaderHooks(
            lambda view: refresh_derived(model, self.model_config.dtype),
            lambda view: find_layout_oddities(model),
            find_factors=self._find_factors,
        )
        weight_loader.load(self._models[is_draft], [("shared", handles)], hooks)


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Repeat each request's value for each of its draft tokens.

    vLLM's CPU kernel converts its output to int64 first and drops the copy, so that temperatures stay uninitialised
    (vllm/utils/cpu_triton_utils.py, `_expand_kernel_impl`).
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    result = x.repeat_interleave(counts, output_size=num_tokens)
    return result if replace_from == replace_to else torch.where(result == replace_from, replace_to, result)


def _constrain(original: Any, logits: torch.Tensor, *args: Any) -> torch.Tensor:
    """Leave a step without drafts alone: vLLM takes the maximum of no top_k."""
    return original(logits, *args) if len(logits) else logits


def install_patches() -> None:
    """Patch vLLM's rejection sampler, which computes wrong numbers or fails on a CPU. docs/patches.md lists these."""
    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
    rejection_sampler.apply_sampling_constraints = partial(_constrain, rejection_sampler.apply_sampling_constraints)
