"""Run SGLang's own processing of loaded weights, on a GPU's paths but with tensors on the CPU:

python post_load.py BACKEND,... for the experts

Prints a line of JSON for each kind of layer, dtype and backend: whether the tensors hold the bits that were loaded, and
the layer's own report, see `sglang_loader.find_layout_oddities`. A layer that needs a GPU kernel reports the
error.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

warnings.filterwarnings("ignore")

from sglang.srt.layers import deep_gemm_wrapper  # noqa: E402
from sglang.srt.layers.moe import MoeRunnerConfig  # noqa: E402
from sglang.srt.layers.moe.utils import MoeA2ABackend, MoeRunnerBackend, get_flags  # noqa: E402
from sglang.srt.layers.quantization import fp8, fp8_utils, unquant  # noqa: E402
from sglang.srt.model_loader import utils as loading  # noqa: E402

from megarl.engine.sglang.sglang_loader import find_layout_oddities  # noqa: E402

EXPERTS, HIDDEN, INTERMEDIATE = 2, 256, 128


def patch_gpu(blackwell: bool) -> contextlib.ExitStack:
    """Patch SGLang's GPU queries to compute capability 9.0 or 10.0."""
    platform = SimpleNamespace(is_sm90=not blackwell, is_sm100=blackwell, is_sm120=False, is_blackwell=blackwell)
    stack = contextlib.ExitStack()
    for patch in (
        *(mock.patch.object(module, "_is_cuda", True) for module in (unquant, fp8, fp8_utils)),
        *(mock.patch.object(module, "_is_cpu", False) for module in (unquant, fp8)),
        mock.patch.object(fp8, "get_platform", lambda: platform),
        mock.patch.object(fp8, "can_auto_enable_marlin_fp8", lambda: False),
        mock.patch.object(fp8, "cutlass_fp8_supported", lambda: True),
        mock.patch.object(deep_gemm_wrapper, "ENABLE_JIT_DEEPGEMM", True),
        mock.patch.object(deep_gemm_wrapper, "DEEPGEMM_SCALE_UE8M0", blackwell),
        mock.patch.object(loading, "get_device_sm", lambda: 100 if blackwell else 90),
    ):
        stack.enter_context(patch)
    return stack


def make_experts(runner: str, is_fp8: bool) -> torch.nn.Module:
    flags = get_flags().moe
    flags.runner_backend, flags.a2a_backend = MoeRunnerBackend(runner), MoeA2ABackend("none")
    layer = torch.nn.Module()
    layer.moe_runner_config = MoeRunnerConfig(num_local_experts=EXPERTS, activation="silu", is_gated=True)
    layer.moe_tp_size, layer.num_local_experts, layer._skip_aiter_moe_shuffle = 1, EXPERTS, False
    layer.hidden_size, layer.intermediate_size_per_partition = HIDDEN, INTERMEDIATE
    backend = flags.runner_backend
    method: Any
    if is_fp8:
        method = fp8.Fp8MoEMethod(fp8_config())
    else:
        method = unquant.UnquantizedFusedMoEMethod(
            backend.is_triton_kernels(), backend.is_flashinfer_trtllm(), backend.is_deep_gemm()
        )
    layer.quant_method = method
    method._moe_runner_backend = backend
    method.create_weights(layer, EXPERTS, HIDDEN, INTERMEDIATE, torch.bfloat16)
    return layer


def make_linear(linear: str, is_fp8: bool) -> torch.nn.Module:
    layer = torch.nn.Module()
    layer.tp_group, layer.deepgemm_mxfp8_input = None, False  # as `LinearBase` has them
    with mock.patch.object(fp8, "dispatch_w8a8_block_fp8_linear", lambda **named: linear_kernel(linear)):
        layer.quant_method = fp8.Fp8LinearMethod(fp8_config()) if is_fp8 else unquant.UnquantizedLinearMethod()
    loader: Callable[..., None] = lambda *original: None  # noqa: E731
    layer.quant_method.create_weights(layer, HIDDEN, [HIDDEN], HIDDEN, HIDDEN, torch.bfloat16, weight_loader=loader)
    return layer


def linear_kernel(linear: str) -> Any:
    return {
        "triton": fp8_utils.triton_w8a8_block_fp8_linear,
        "deep_gemm": fp8_utils.deepgemm_w8a8_block_fp8_linear_with_fallback,
    }[linear]


def fp8_config() -> fp8.Fp8Config:
    return fp8.Fp8Config(is_checkpoint_fp8_serialized=True, weight_block_size=[128, 128])


def process_weights(make: Callable[[str, bool], torch.nn.Module], choice: str, is_fp8: bool) -> dict[str, Any]:
    """Process a layer's weights. "same": whether all tensors keep their bits and have the shapes of Triton's layer."""
    expected_shapes = {name: item.shape for name, item in make("triton", is_fp8).named_parameters()}
    layer = make(choice, is_fp8)
    original = {}
    for name, parameter in layer.named_parameters():
        parameter.data = (torch.rand(parameter.shape) + 0.5).to(parameter.dtype)
        original[name] = parameter.data.clone()
    error = ""
    try:
        layer.quant_method.process_weights_after_loading(layer)
    except ImportError as problem:
        error = str(problem)
    loaded = {name: parameter.data for name, parameter in layer.named_parameters()}
    is_equal = {name: item.shape for name, item in loaded.items()} == expected_shapes and all(
        loaded[name].dtype == item.dtype and torch.equal(loaded[name].view(torch.uint8), item.view(torch.uint8))
        for name, item in original.items()
    )
    return {"same": is_equal, "odd": find_layout_oddities(layer), "error": error}


def main() -> None:
    runners = sys.argv[1].split(",")
    for blackwell in (False, True):
        with patch_gpu(blackwell):
            for kind, make, choices in (
                ("experts", make_experts, runners),
                ("matrix", make_linear, ["triton", "deep_gemm"]),
            ):
                for choice, is_fp8 in itertools.product(choices, (False, True)):
                    row = {"kind": kind, "choice": choice, "fp8": is_fp8, "blackwell": blackwell}
                    print("RESULT", json.dumps(row | process_weights(make, choice, is_fp8)))


if __name__ == "__main__":
    main()
