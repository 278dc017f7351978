"""One host that has imported vLLM, for all engines of a test session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rank_jobs import HAS_GPU

from megarl.config import from_dict
from megarl.engine.engine_host import HostProcess
from megarl.engine.vllm.vllm_engine import start_host


@pytest.fixture(scope="session")
def vllm_host() -> Iterator[HostProcess]:
    if HAS_GPU:
        pytest.skip("vLLM is installed on CPUs only")
    host = start_host(from_dict({"rollout": {"engine": "vllm"}}), threads=1)
    yield host
    host.close()
