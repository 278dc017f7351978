"""`torch.compile` of an expert's MLP and the log-probs after it, with gradients, against eager mode."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from gpu.found import CheckResult, make_result


def work(hidden: torch.Tensor, up: torch.Tensor, down: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """hidden [T, h], up [h, 2f], down [f, V], tokens [T] -> log-probs [T] fp32."""
    gate, value = (hidden @ up).chunk(2, dim=-1)
    return ((F.silu(gate) * value) @ down).float().log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)


def compiled(device: str) -> CheckResult:
    generator = torch.Generator().manual_seed(1)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    matrices = [torch.randn(*shape, generator=generator) * 0.1 for shape in ((64, 128), (128, 512), (256, 300))]
    inputs = [matrix.to(device, dtype).requires_grad_() for matrix in matrices]
    tokens = torch.randint(0, 300, (64,), generator=generator).to(device)
    gaps = []
    compiled_work = torch.compile(work)
    hidden, up, down = inputs
    expected, result = work(hidden, up, down, tokens), compiled_work(hidden, up, down, tokens)
    gaps.append(float((expected - result).detach().abs().max()))
    gradients = [torch.autograd.grad(output.sum(), inputs) for output in (expected, result)]
    gaps += [float((a - b).abs().max() / a.abs().max()) for a, b in zip(*gradients, strict=True)]
    bound = 0.05 if device == "cuda" else 1e-4
    faults = [f"differs by {max(gaps):.3g} from the same without"] if max(gaps) > bound else []
    return make_result(faults, f"the same within {max(gaps):.1e}", {"largest difference": max(gaps)})
