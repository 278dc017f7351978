"""Patches that let Megatron-Core 0.19.2 run on a machine without CUDA.

`install()` runs once per process, on the import of `megarl.megatron`, before anything imports `megatron.core`. It does
nothing on a machine with a GPU. A test pins the list of patched names. Modules that differ on the CPU are in
`megatron_modules.py` and enter through Megatron's own layer specs.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _device

from megarl.parallel import device

PATCHED: dict[str, str] = {}
"""Dotted name -> why it is patched."""

_CPU = torch.device("cpu")
_NO_INITIALISATION = "waits for a CUDA initialisation that never comes"


class _TorchOnCPU(ModuleType):
    """torch for a module that names its device `cuda:N`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, name: Any) -> torch.device:
        return _CPU


class _Stream:
    """A no-op CUDA stream: CPU work is complete when the call returns, so there is nothing to order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, other: Any) -> None: ...

    def wait(self, stream: Any = None) -> None: ...  # of an event

    def record_event(self) -> _Stream:
        return self  # as an event

    def synchronize(self) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0


def install() -> bool:
    """Patch torch and Megatron for the CPU. Return whether this call did so: it is idempotent and a no-op on CUDA.

    Raises RuntimeError if Megatron has been imported already, since its modules bind some of these names on import.
    """
    if PATCHED or device.has_cuda():
        return False
    if "megatron.core" in sys.modules:
        raise RuntimeError("megatron.core was imported before megarl.cpu.megatron_platform.install()")
    # torch caches its tensor constructors for `with torch.device("meta")`, in which transformers loads a model. Fill
    # the cache before patching: it would otherwise hold the patched functions, and buffers would stay unset.
    _device._device_constructors()
    _patch_cuda_namespace(_CPU)
    _patch_tensors(_CPU)
    _replace_compilation(lambda function: function)
    _patch_megatron()
    return True


def install_for_rehearsal(fuse: Callable[[Any], Any]) -> None:
    """Patch torch and Megatron so that what they do on a GPU happens on `meta`, where tensors have no bytes.

    Once per process, before anything imports `megatron.core`.

    fuse: decorates the functions that Megatron compiles on a GPU.
    """
    meta = torch.device("meta")
    _device._device_constructors()
    _patch_cuda_namespace(meta)
    _patch_tensors(meta)
    _replace_compilation(fuse)
    import megatron.core.tensor_parallel.random as random

    _patch(random, "_set_cuda_rng_state", lambda *args, **kwargs: None, _NO_INITIALISATION)
    move = torch.nn.Module.to

    def move_with_flags(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        flags = {name: vars(param) for name, param in self.named_parameters()}
        result = move(self, *args, **kwargs)
        for name, param in result.named_parameters():
            vars(param).update(flags[name])
        return result

    why = (
        "between the host and a GPU a parameter is the same object, whose flags Megatron reads; on meta it is a new one"
    )
    _patch(torch.nn.Module, "to", move_with_flags, why)


def _patch(owner: Any, name: str, value: Any, why: str) -> None:
    prefix = f"{owner.__module__}.{owner.__qualname__}" if isinstance(owner, type) else owner.__name__
    setattr(owner, name, value)
    PATCHED[f"{prefix}.{name}"] = why


def _patch_cuda_namespace(device: torch.device) -> None:
    cuda = torch.cuda
    stream = _Stream()
    _patch(cuda, "current_device", lambda: device, "given as device= in about 60 places")
    _patch(cuda, "synchronize", lambda *args: None, "work is done when the call returns")
    _patch(cuda, "Stream", _Stream, "the all-to-all dispatcher copies its splits on a side stream")
    _patch(cuda, "current_stream", lambda *args: stream, "side streams wait for it")
    _patch(cuda, "stream", lambda *args: contextlib.nullcontext(), "side streams are entered with it")
    generator = torch.default_generator
    why = "Megatron's random states are those of the 'cuda' generator; here that is the CPU's"
    for module in (torch.cuda, torch.cuda.random):
        _patch(module, "get_rng_state", lambda *args, **kwargs: generator.get_state(), why)
    _patch(cuda, "manual_seed", lambda seed: generator.manual_seed(int(seed)), why)


def _patch_tensors(target: torch.device) -> None:
    def on_target(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("device") == "cuda":
                kwargs["device"] = target
            kwargs.pop("pin_memory", None)
            return function(*args, **kwargs)

        return wrapped

    for name in ("tensor", "zeros", "empty"):
        _patch(torch, name, on_target(getattr(torch, name)), "called with a literal device='cuda', or pin_memory=True")

    tensor_type = torch.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = tensor_type(self, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if isinstance(result, str) and caller.startswith("megatron."):
            return f"torch.cuda.{result.rpartition('.')[2]}"
        return result

    _patch(torch.Tensor, "cuda", lambda self, *args, **kwargs: self.to(target), "batches and buffers are moved with it")
    _patch(torch.Tensor, "type", type_, "the optimizer compares it with 'torch.cuda.FloatTensor' and the like")


def _replace_compilation(decorate: Callable[[Any], Any]) -> None:
    """Decorate the functions that Megatron would compile, instead of compiling them."""

    def replace(model: Any = None, **options: Any) -> Any:
        return decorate if model is None else decorate(model)

    compile_ = torch.compile
    torch.compile = replace  # type: ignore[assignment]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a warning per missing package: Transformer Engine, Apex ...
            import megatron.core.jit as jit
    finally:
        torch.compile = compile_  # type: ignore[assignment]
    jit.jit_fuser = decorate
    PATCHED["megatron.core.jit.jit_fuser"] = "torch.compile would run a C++ compiler for small fusions"


def _patch_megatron() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import megatron.core.tensor_parallel.mappings as mappings
        import megatron.core.tensor_parallel.random as random
        import megatron.core.transformer.moe.token_dispatcher as token_dispatcher
        from megatron.core.distributed.fsdp.src.megatron_fsdp import megatron_fsdp
        from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    gather_equal, scatter_equal = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather(input_: torch.Tensor, group: Any, sizes: list[int] | None = None, *args: Any) -> torch.Tensor:
        if sizes is None or group.size() == 1:
            return gather_equal(input_, group, sizes, *args)
        output = input_.new_empty(sum(sizes), *input_.shape[1:])
        local_rows = [len(input_)] * group.size()
        dist.all_to_all_single(output, torch.cat([input_] * group.size()), sizes, local_rows, group=group)
        return output

    def reduce_scatter(input_: torch.Tensor, group: Any, sizes: list[int] | None = None, *args: Any) -> torch.Tensor:
        if sizes is None or group.size() == 1:
            return scatter_equal(input_, group, sizes, *args)
        local_rows = sizes[group.rank()]
        parts = input_.new_empty(group.size() * local_rows, *input_.shape[1:])
        dist.all_to_all_single(parts, input_.contiguous(), [local_rows] * group.size(), sizes, group=group)
        return parts.view(group.size(), local_rows, *input_.shape[1:]).sum(0)

    init_hybrid = HybridDeviceOptimizer.__init__

    def init_unfused(self: Any, params: Any, **kwargs: Any) -> None:
        init_hybrid(self, params, **kwargs | {"fused": False})

    why = "torch's fused AdamW rounds otherwise than its plain one, which updates what is not offloaded"
    _patch(HybridDeviceOptimizer, "__init__", init_unfused, why)
    set_states = DistributedOptimizer._set_main_param_and_optimizer_states

    def set_states_but_step(self: Any, model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        group, index = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][index]]
        set_states(self, model_param, {**tensors, "step": state["step"]})

    why = "torch's AdamW has a step count among its states, which the checkpoint keeps elsewhere and loads before"
    _patch(DistributedOptimizer, "_set_main_param_and_optimizer_states", set_states_but_step, why)
    why = "experts cut by etp see other numbers of tokens on each rank, and gloo's collectives want equal sizes"
    _patch(mappings, "_gather_along_first_dim", gather, why)
    _patch(mappings, "_reduce_scatter_along_first_dim", reduce_scatter, why)
    without_output = random.CheckpointWithoutOutput.__init__
    why = "takes fp8=False for FP8 too, and then asks Transformer Engine"
    _patch(random.CheckpointWithoutOutput, "__init__", lambda self, fp8=False: without_output(self, None), why)
    set_state = torch.default_generator.set_state
    _patch(random, "_set_cuda_rng_state", lambda state, *args, **kwargs: set_state(state), _NO_INITIALISATION)
    why = "ignores as_numpy for CPU tensors; all_to_all wants lists"
    _patch(token_dispatcher, "maybe_move_tensor_to_cpu", move, why)
    why = "compares its device with the current GPU's, by name"
    _patch(megatron_fsdp, "torch", _TorchOnCPU("torch"), why)
    # Megatron warns if a fork of its RNG tracker changes the CPU generator. Here both are the same generator.
    logging.getLogger(random.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())
