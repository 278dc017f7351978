"""Fixtures that the tests share: ranks as processes, tiny models, engines."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

if TYPE_CHECKING:
    from engines import RunningEngine

    from megarl.engine.engine_host import HostProcess

ROOT = Path(__file__).resolve().parent.parent
sys.path += [
    str(ROOT / "tests"),
    str(ROOT / "tests/helpers"),
    str(ROOT / "tests/megatron"),
]  # what tests of several folders share
# This imports the parent package. Otherwise pytest without `--rootdir .` gives its name to the folder tests/megatron,
# and nothing finds Megatron-Core.
importlib.util.find_spec("megatron.core")

from rank_jobs import HAS_GPU, RankJobs, shared_jobs  # noqa: E402

os.environ.setdefault("OMP_NUM_THREADS", "1")
# No test depends on how fast the machine is.
hypothesis.settings.register_profile("megarl", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("megarl")


@pytest.fixture(scope="session")
def run_ranks() -> RankJobs:
    return shared_jobs()


@pytest.fixture(scope="session")
def host() -> Iterator[str]:
    """Socket of an engine host. Engines forked from it skip the import of SGLang, ten seconds of a core."""
    from megarl.config import Config
    from megarl.engine.sglang.sglang_engine import start_host

    host = start_host(Config(), threads=1)
    yield host.path
    host.close()


@pytest.fixture(scope="session")
def vllm_host() -> Iterator[HostProcess]:
    """A host that has imported vLLM, for all of its engines."""
    from megarl.config import ConfigError, from_dict
    from megarl.engine.vllm.vllm_backend import VLLMBackend
    from megarl.engine.vllm.vllm_engine import start_host

    try:
        VLLMBackend().check_installed()
    except ConfigError as error:
        pytest.skip(str(error))
    host = start_host(from_dict({"rollout": {"engine": "vllm"}}), threads=1)
    yield host
    host.close()


@pytest.fixture(scope="session")
def qwen3_moe(host: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    import engines
    import tiny_models

    with engines.start_engine(host, tiny_models.qwen3_moe(), tmp_path_factory.mktemp("qwen3_moe")) as running:
        yield running


@pytest.fixture(scope="session")
def deepseek_v3(host: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    import engines
    import tiny_models

    with engines.start_engine(host, tiny_models.deepseek_v3(), tmp_path_factory.mktemp("deepseek_v3")) as running:
        yield running


@pytest.fixture
def qwen3_moe_split(host: str, tmp_path: Path) -> Iterator[RunningEngine]:
    """An engine with two tensor parallel ranks, each with half of the experts."""
    import engines
    import tiny_models

    with engines.start_engine(host, tiny_models.qwen3_moe(), tmp_path, tp=2, ep=2) as running:
        yield running


@pytest.fixture(scope="session")
def units(run_ranks: Callable[..., list[dict[str, Any]]]) -> dict[str, Any]:
    """Results of `ranks_units.py`: one process runs all checks that need Megatron but no second rank.

    Megatron is never imported into pytest's own process, because the CPU shim patches torch for good.
    """
    return run_ranks(1, "tests/megatron/ranks_units.py")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each worker one file at a time, but of the grid of bad input one area, whose cases share a process."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid.partition(": ")[0] if "/bad_input/" in nodeid else super()._split_scope(nodeid)

    return Scheduling(config, log)


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Megatron's CPU shim patches torch for good, and transformers then computes wrong numbers in every later test."""
    assert "megarl.megatron" not in sys.modules, f"{item.nodeid} imports Megatron into pytest's own process"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` on a machine without one; run the short tests last, so that workers end together."""
    for item in items:
        if not HAS_GPU and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))
    items.sort(key=lambda item: item.get_closest_marker("alone") is not None)
