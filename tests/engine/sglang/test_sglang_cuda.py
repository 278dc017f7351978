"""The check of the CUDA allocator's settings."""

from __future__ import annotations

import pytest

from megarl.config import ConfigError
from megarl.engine.sglang.sglang_cuda import ALLOCATOR_VARIABLES, check

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
