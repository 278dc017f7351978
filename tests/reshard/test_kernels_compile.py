"""The reshard's Triton kernels compile for GPUs: the interpreter, in which other tests run them, checks no types."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parents[2]
# Triton must not have been imported for its interpreter, hence a process of its own.
COMPILE = """
import sys
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from megarl.reshard.run import triton_kernels as kernels

def compile_kernel(function, signature, constants, warps):
    names = function.arg_names
    types = {name: signature.get(name, "constexpr") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(function, types, values)
    compiled = compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32), options={"num_warps": warps})
    print(function.__name__, len(compiled.asm["cubin"]))

tables = {"tables": "*i64", "boxes": "i32"}
compile_kernel(kernels._copy, tables, {"UNITS": kernels.UNITS}, 4)
for dtype in (tl.bfloat16, tl.float32):
    constants = {"TYPE": dtype, "BLOCK": kernels.BLOCK, "ROWS": kernels._ROWS, "HARDWARE": True}
    compile_kernel(kernels._quantise, tables, constants, kernels._WARPS)
constants = {"WORDS": kernels.WORDS, "AT_ONCE": kernels._AT_ONCE, "FIELDS": kernels._FIELDS}
compile_kernel(kernels._hash, {**tables, "output": "*i64"}, constants, 4)
"""


@pytest.mark.parametrize("capability", [90, 100], ids=["Hopper", "Blackwell"])
def test_kernels_compile_without_a_gpu(tmp_path: Path, capability: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    script = tmp_path / "compile_kernels.py"  # Triton reads the source of its functions
    script.write_text(COMPILE)
    process = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(capability)], env=environment, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr[-3000:]
    sizes = dict(line.split() for line in process.stdout.splitlines())
    assert set(sizes) == {"_copy", "_quantise", "_hash"} and all(int(size) > 1000 for size in sizes.values())
