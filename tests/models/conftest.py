"""transformers' models, imported as if torchvision were absent: its CUDA build does not import under a CPU torch."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def transformers_models() -> ModuleType:
    import transformers
    from transformers.utils.import_utils import is_torchvision_available

    absent = "torchvision" not in sys.modules
    if absent:
        sys.modules["torchvision"] = None  # type: ignore[assignment]
        is_torchvision_available.cache_clear()
    try:
        for family in ("Qwen2", "Qwen3Moe", "DeepseekV3"):
            getattr(transformers, f"{family}ForCausalLM")
    finally:
        if absent:
            del sys.modules["torchvision"]
    return transformers
