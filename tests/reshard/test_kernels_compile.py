"""The reshard's Triton kernels compile for GPUs: the interpreter, in which other tests run them, checks no types."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parents[2]
# Triton must not have been imported for its interpreter, hence a process of its own.
COMPILE = """
import json
import re
import subprocess
import sys
from pathlib import Path

import triton
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
    Path("kernel.cubin").write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run([tool, "--dump-resource-usage", "kernel.cubin"], capture_output=True, text=True, check=True)
    print(json.dumps([function.__name__, warps, dict(re.findall(r"(REG|STACK|SHARED|LOCAL):([0-9]+)", usage.stdout))]))

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
        [sys.executable, "-W", "ignore", str(script), str(capability)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    kernels = [json.loads(line) for line in process.stdout.splitlines()]
    assert [name for name, _, _ in kernels] == ["_copy", "_quantise", "_quantise", "_hash"]
    for name, num_warps, text in kernels:
        usage = {key: int(value) for key, value in text.items()}
        print(f"sm_{capability} {name}: {usage}")
        assert usage["LOCAL"] == usage["STACK"] == 0, f"{name} spills registers: {usage}"
        # At least two programs at a time on a multiprocessor, which has 65,536 registers and 227 KiB of shared memory.
        assert 2 * usage["REG"] * 32 * num_warps <= 65536 and usage["SHARED"] <= 2048, f"{name}: {usage}"
