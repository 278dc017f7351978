"""Check that the CPU shim does not patch torch if `parallel.device` reports a GPU."""

from __future__ import annotations

import json

import torch

from megarl.parallel import device

device.has_cuda = lambda: True  # type: ignore[assignment]
before = (torch.zeros, torch.Tensor.to, torch.cuda.current_device)

from megarl.cpu import megatron_platform  # noqa: E402

installed = megatron_platform.install()
after = (torch.zeros, torch.Tensor.to, torch.cuda.current_device)
print(
    "RESULT "
    + json.dumps(
        {"installed": installed, "patched": len(megatron_platform.PATCHED), "torch_is_untouched": before == after}
    )
)
