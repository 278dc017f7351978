"""What engines on GPUs need: settings of the CUDA allocator, and kernels that are compiled before the first request."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from engine_config import make_config

from megarl.config import ConfigError
from megarl.engine.sglang import sglang_server
from megarl.engine.sglang.sglang_cuda import ALLOCATOR_VARIABLES, check
from megarl.engine.sglang.sglang_engine import SGLangEngine

pytestmark = pytest.mark.alone


@pytest.mark.parametrize("name", ALLOCATOR_VARIABLES)
@pytest.mark.parametrize("value", ["expandable_segments:True", "max_split_size_mb:64, expandable_segments: true"])
def test_rejects_expandable_segments(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}={value}: with expandable_segments weights cannot be shared"):
        check({}, {name: value})


def test_accepts_other_allocator_settings() -> None:
    check({}, {})
    check({}, dict.fromkeys(ALLOCATOR_VARIABLES, "expandable_segments:False,max_split_size_mb:64"))


def test_check_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOCATOR_VARIABLES[0], "expandable_segments:True")
    with pytest.raises(ConfigError, match=ALLOCATOR_VARIABLES[0]):
        check({})


@pytest.mark.parametrize(
    ("sampling", "is_truncated"),
    [({}, False), ({"top_p": 0.9}, True), ({"min_p": 0.1}, True), ({"eval_top_p": 0.9}, True)],
)
def test_server_is_told_whether_sampling_is_truncated(
    sampling: dict[str, float], is_truncated: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}')
    launch = SGLangEngine(make_config(tmp_path, tmp_path / "run", **sampling))._make_launch()
    assert launch.settings["has_truncated_sampling"] == is_truncated


@pytest.mark.parametrize(
    ("backend", "is_available", "is_compiled"),
    [(None, True, True), ("flashinfer", True, True), ("pytorch", True, False), (None, False, False)],
)
def test_compiles_kernels_of_the_sampler_in_use(
    backend: str | None, is_available: bool, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    utils: Any = ModuleType("sglang.srt.utils")
    utils.is_flashinfer_available = lambda: is_available
    sampling: Any = ModuleType("flashinfer.sampling")
    sampling.get_sampling_module = lambda: calls.append("compiled")
    for name in ("sglang", "sglang.srt", "flashinfer"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for module in (utils, sampling):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    sglang_server.compile_sampler(backend)
    assert calls == ["compiled"] * is_compiled
