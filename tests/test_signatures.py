"""Every name and keyword argument that the code uses of SGLang and Megatron-Core exists, also on CUDA-only paths."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from signatures import Caller, Sources, missing

pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted([*ROOT.glob("megarl/**/*.py"), *ROOT.glob("tools/**/*.py"), *ROOT.glob("launch/*.py")])
DISTRIBUTIONS = {"sglang": "sglang", "megatron": "megatron-core"}
SPARSE = "megatron.core.transformer.experimental_attention_variant.dsa"
KNOWN = {
    "megatron.core.tensor_parallel.random.__name__": "every module has it",
    "megatron.core.distributed.finalize_model_grads.reset_model_temporary_tensors": "a module has its name",
    "sglang.srt.managers.io_struct.Function.strict": "a patch adds it",
    f"{SPARSE}.DSAIndexerLossAutoScaler.apply": "a function of autograd has it",
    f"{SPARSE}.DSAIndexerLossLoggingHelper.tracker.clear": "a dictionary has it",
    f"{SPARSE}.DSAIndexerLossLoggingHelper.tracker.get": "a dictionary has it",
}
"""Names that are not found, and why that is harmless."""


def missing_names(package: str) -> Iterator[tuple[str, str]]:
    sources = Sources(Path(str(metadata.distribution(DISTRIBUTIONS[package]).locate_file(""))))
    for file in FILES:
        caller = Caller(file, package)
        if caller.imported:
            for name, use in missing(sources, caller):
                yield name, f"{file.relative_to(ROOT)}, {use}"


@pytest.mark.parametrize("package", DISTRIBUTIONS)
def test_every_used_name_and_argument_exists(package: str) -> None:
    used = [file for file in FILES if Caller(file, package).imported]
    assert len(used) >= 5
    result = dict(missing_names(package))
    assert {name: location for name, location in result.items() if name not in KNOWN} == {}
    assert {name for name in KNOWN if name.startswith(package)} <= result.keys(), "no reason is needed any more"


SAMPLE = {
    "__init__.py": "from .inner import Layer, helper\nfrom ._compiled import *\nfrom other_thing import kernel\n",
    "inner.py": "class Base:\n    def __init__(self, a, *, b=0): ...\n    def forward(self, x): ...\n\n"
    "class Layer(Base):\n    kind = 1\n\ndef helper(a, **more): ...\n",
}
USES = """
import sample as s
from sample import Layer, gone, kernel
class Mine(Layer):
    def __init__(self):
        extra_kwargs = {}
        extra_kwargs["c"] = 1
        super().__init__(1, b=2, d=3)
    def forward(self, x):
        return super().forward(y=1)
s.helper(1, anything=2)
s.Layer.kind
s.Layer.size
s.inner.Base(a=1, e=2)
"""


def test_finds_missing_names_and_arguments(tmp_path: Path) -> None:
    (tmp_path / "sample").mkdir()
    for name, text in SAMPLE.items():
        (tmp_path / "sample" / name).write_text(text)
    (tmp_path / "uses.py").write_text(USES)
    result = sorted(name for name, _ in missing(Sources(tmp_path), Caller(tmp_path / "uses.py", "sample")))
    assert result == [
        "sample.Layer c",
        "sample.Layer d",
        "sample.Layer y",
        "sample.Layer.size",
        "sample.gone",
        "sample.inner.Base e",
    ]
