"""Jobs whose ranks are forked from one process that has imported everything, see `rank_host.py`."""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megarl.rehearse import nccl_order
from megarl.utils.addresses import free_port

ROOT = Path(__file__).resolve().parent.parent
HAS_GPU = any(Path("/dev").glob("nvidia[0-9]*"))  # a container may have just /dev/nvidia3


class RankJobs:
    """Runs scripts as the ranks of jobs, one job after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.launches = 0
        self._host: subprocess.Popen[str] | None = None

    def __call__(
        self,
        world: int,
        script: str,
        *args: str,
        timeout: float = 300.0,
        fresh: bool = HAS_GPU,
        is_one_job: bool = True,
    ) -> list[dict[str, Any]]:
        """Run a script as `world` ranks; return what each prints in its last line `RESULT {json}`.

        fresh: start interpreters instead of forks; a process that may use a GPU must not be a fork.
        is_one_job: check that the ranks' communication would not hang on NCCL, see `megarl.rehearse.nccl_order`.
        """
        texts, records = self.run(world, script, *args, timeout=timeout, fresh=fresh)
        if is_one_job and len(records) == world:
            nccl_order.check([nccl_order.read(path) for path in records])
        results = []
        for rank, text in enumerate(texts):
            lines = [line for line in text.splitlines() if line.startswith("RESULT ")]
            assert lines, f"rank {rank} of {script} printed no RESULT line:\n{text[-3000:]}"
            results.append(json.loads(lines[-1].removeprefix("RESULT ")))
        return results

    def run(
        self,
        world: int,
        script: str,
        *args: str,
        timeout: float = 300.0,
        fresh: bool = HAS_GPU,
        record: bool = True,
        variables: Mapping[str, str] | None = None,
    ) -> tuple[list[str], list[Path]]:
        """Run a script as `world` ranks; return the output of each and the records of their communication.

        record: whether ranks record their communication, see `megarl.rehearse.comm_recorder`.
        variables: more environment variables.
        """
        self.launches += 1
        outputs = [self.folder / f"{self.launches}_{rank}.txt" for rank in range(world)]
        environment = dict(os.environ, WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), OMP_NUM_THREADS="1")
        environment |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), PYTHONPATH=str(ROOT))
        order = dict(script=str(ROOT / script), args=args, world=world, timeout=timeout, fresh=fresh, record=record)
        order |= dict(environment=environment | dict(variables or {}), outputs=list(map(str, outputs)))
        codes = self._send(order)
        texts = [output.read_text() if output.exists() else "" for output in outputs]
        failed = [
            f"rank {rank} ran past {timeout} s" if code is None else f"rank {rank} exited with {code}"
            for rank, code in enumerate(codes)
            if code != 0
        ]
        if failed:
            output_tails = "\n".join(f"--- rank {rank}\n{text[-3000:]}" for rank, text in enumerate(texts))
            pytest.fail(f"{script} {' '.join(args)}: {'; '.join(failed)}\n{output_tails}")
        return texts, [path for output in outputs if (path := Path(f"{output}.record")).exists()]

    def _send(self, order: dict[str, Any]) -> list[int | None]:
        if self._host is None:
            self._host = subprocess.Popen(
                [sys.executable, str(ROOT / "tests/rank_host.py"), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env=dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT)),
            )
        assert self._host.stdin is not None and self._host.stdout is not None
        print(json.dumps(order), file=self._host.stdin, flush=True)
        line = self._host.stdout.readline()
        assert line, "the host of the ranks has died"
        codes: list[int | None] = json.loads(line)
        return codes

    def close(self) -> None:
        if self._host is not None:
            self._host.kill()
            self._host.wait()
        self._host = None


@functools.cache
def shared_jobs() -> RankJobs:
    """Return the jobs of this process; their host ends with it."""
    folder = tempfile.TemporaryDirectory(prefix="rank-jobs-")
    jobs = RankJobs(Path(folder.name))
    atexit.register(folder.cleanup)
    atexit.register(jobs.close)
    return jobs
