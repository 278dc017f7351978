"""Fused kernels are enabled by what Megatron has; in a separate process, because it changes torch on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.alone

SCRIPT = """
import json, sys
from types import ModuleType
from torch.nn.functional import gelu, silu
from megarl.megatron import build as fusions

found = []
def record(**values):
    found.append(sorted(name for name, is_on in fusions.select_fusions(values).items() if is_on))

record(normalization="LayerNorm")
fusions.device.has_cuda = lambda: True
record(normalization="RMSNorm")
fusions.layers._grad_accum_fusion_available = True
record(normalization="RMSNorm")
for name in fusions._SOFTMAX:
    record()
    sys.modules[name] = ModuleType(name)
    sys.modules[name].__spec__ = json.__spec__
fusions.fused_layer_norm.HAVE_PERSIST_LAYER_NORM = True
record(normalization="RMSNorm")
record(normalization="LayerNorm")
for values in ({}, {"add_bias_linear": True}, {"activation_func_clamp_value": 7.0}, {"activation_func": gelu}):
    record(**{"gated_linear_unit": True, "activation_func": silu, **values})
print(json.dumps([sorted(fusions.select_fusions({})), found]))
"""


def test_enables_fusions_whose_kernels_are_available() -> None:
    root = Path(__file__).resolve().parents[2]
    process = subprocess.run([sys.executable, "-c", SCRIPT], cwd=root, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    names, result = json.loads(process.stdout)
    gradients, softmax, norm = "gradient_accumulation_fusion", "masked_softmax_fusion", "persist_layer_norm"
    swiglu = "bias_activation_fusion"
    assert names == [swiglu, gradients, softmax, norm]
    assert result[:2] == [[], []], "without a GPU, and with one but without Apex"
    assert result[2:6] == [[gradients]] * 4, "the softmax needs all three of its kernels"
    assert result[6:8] == [[gradients, softmax], [gradients, softmax, norm]]
    assert [swiglu in names for names in result[8:]] == [True, False, False, False], "SwiGLU without biases and clamps"
