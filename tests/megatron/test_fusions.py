"""Which fused kernels are on, by what Megatron has found; in a process of its own, for it changes torch on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.alone

ASKED = """
import json, sys
from types import ModuleType
from megarl.megatron import build as fusions

found = []
def ask(**values):
    found.append(sorted(name for name, is_on in fusions.select_fusions(values).items() if is_on))

ask(normalization="LayerNorm")
fusions.device.has_cuda = lambda: True
ask(normalization="RMSNorm")
fusions.layers._grad_accum_fusion_available = True
ask(normalization="RMSNorm")
for name in fusions._SOFTMAX:
    ask()
    sys.modules[name] = ModuleType(name)
    sys.modules[name].__spec__ = json.__spec__
fusions.fused_layer_norm.HAVE_PERSIST_LAYER_NORM = True
ask(normalization="RMSNorm")
ask(normalization="LayerNorm")
print(json.dumps([sorted(fusions.select_fusions({})), found]))
"""


def test_each_is_on_where_its_kernel_is() -> None:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", ASKED], cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    names, result = json.loads(done.stdout)
    adds, softmax, norm = "gradient_accumulation_fusion", "masked_softmax_fusion", "persist_layer_norm"
    assert names == [adds, softmax, norm]
    assert result[:2] == [[], []], "no GPU; one without Apex"
    assert result[2:6] == [[adds]] * 4, "a softmax of three parts, of which not all are there"
    assert result[6:] == [[adds, softmax], [adds, softmax, norm]]
