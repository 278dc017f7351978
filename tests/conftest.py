"""Fixtures that the tests share: ranks as processes, tiny models, engines."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests"))  # what tests of several folders share

import nccl_order  # noqa: E402

HAS_GPU = Path("/dev/nvidia0").exists()
os.environ.setdefault("OMP_NUM_THREADS", "1")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Ranks:
    """Runs a script as the ranks of one job, see `rank_host.py`. What they say to each other must be such that it would
    not hang on NCCL, see `nccl_order.py`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.launches = 0
        self.host: subprocess.Popen[str] | None = None

    def __call__(
        self, world: int, script: str, *args: str, timeout: float = 300.0, fresh: bool = HAS_GPU, whole: bool = True
    ) -> list[dict[str, Any]]:
        """What each rank prints in its last line `RESULT {json}`. fresh: no forks, which a process that may use a GPU
        must not be. whole: they are one job; what each said is looked at if all come to their end."""
        self.launches += 1
        outputs = [self.folder / f"{self.launches}_{rank}.txt" for rank in range(world)]
        environment = dict(os.environ, WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
        environment.update(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
        order = dict(script=str(ROOT / script), args=args, world=world, timeout=timeout, fresh=fresh)
        order |= dict(environment=environment, outputs=list(map(str, outputs)))
        codes = self._ask(order)
        texts = [output.read_text() if output.exists() else "" for output in outputs]
        failed = [
            f"rank {rank} ran past {timeout} s" if code is None else f"rank {rank} exited with {code}"
            for rank, code in enumerate(codes)
            if code != 0
        ]
        if failed:
            tails = "\n".join(f"--- rank {rank}\n{text[-3000:]}" for rank, text in enumerate(texts))
            pytest.fail(f"{script} {' '.join(args)}: {'; '.join(failed)}\n{tails}")
        said = [path for output in outputs if (path := Path(f"{output}.said")).exists()]
        if whole and len(said) == world:
            nccl_order.check([nccl_order.read(path) for path in said])
        results = []
        for rank, text in enumerate(texts):
            lines = [line for line in text.splitlines() if line.startswith("RESULT ")]
            assert lines, f"rank {rank} of {script} printed no RESULT line:\n{text[-3000:]}"
            results.append(json.loads(lines[-1].removeprefix("RESULT ")))
        return results

    def _ask(self, order: dict[str, Any]) -> list[int | None]:
        if self.host is None:
            self.host = subprocess.Popen(
                [sys.executable, str(ROOT / "tests/rank_host.py"), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env=dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT)),
            )
        assert self.host.stdin is not None and self.host.stdout is not None
        print(json.dumps(order), file=self.host.stdin, flush=True)
        line = self.host.stdout.readline()
        assert line, "the host of the ranks has died"
        codes: list[int | None] = json.loads(line)
        return codes

    def close(self) -> None:
        if self.host is not None:
            self.host.kill()
            self.host.wait()
        self.host = None


@pytest.fixture(scope="session")
def run_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[dict[str, Any]]]]:
    ranks = Ranks(tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def host() -> Iterator[str]:
    """Where engines can be started that need not import SGLang, for ten seconds of a core: its socket."""
    from megarl.config import Config
    from megarl.engine.sglang_engine import start_host

    host = start_host(Config(), threads=1)
    yield host.path
    host.close()


@pytest.fixture(scope="session")
def units(run_ranks: Callable[..., list[dict[str, Any]]]) -> dict[str, Any]:
    """One process for all checks that need Megatron but no second rank: `ranks_units.py`, run once.

    Megatron is never imported into pytest's own process, because the CPU shim patches torch for good.
    """
    return run_ranks(1, "tests/megatron/ranks_units.py")[0]


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Megatron's CPU shim patches torch for good, and transformers then computes wrong numbers in every later test."""
    assert "megarl.megatron" not in sys.modules, f"{item.nodeid} imports Megatron into pytest's own process"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` on a machine without one."""
    for item in items:
        if not HAS_GPU and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU"))
