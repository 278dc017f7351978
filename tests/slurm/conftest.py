"""A temporary three-node Slurm on this machine, with its own folder and ports."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel", "srun")
NODES = ("n1", "n2", "n3")
CONF = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/spool-%n
SlurmdLogFile={folder}/%n.log
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobRequeue=1
MinJobAge=3600
KillWait=10
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 RealMemory=4000
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 RealMemory=4000
NodeName=n3 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[3]} CPUs=1 RealMemory=4000
PartitionName=all Nodes=n[1-3] Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """Nodes n1 to n3. `run` runs a Slurm command with the configuration of the cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = dict(os.environ, SLURM_CONF=str(folder / "slurm.conf"))
        self.jobs: list[str] = []

    def run(self, *command: str, cwd: Path | None = None) -> str:
        process = subprocess.run(command, env=self.env, cwd=cwd, capture_output=True, text=True, timeout=60)
        assert process.returncode == 0, f"{' '.join(command)}: {process.stderr}{self.logs()}"
        return process.stdout

    def submit(self, *arguments: str, cwd: Path) -> str:
        job = self.run("sbatch", "--parsable", *arguments, cwd=cwd).strip()
        self.jobs.append(job)
        return job

    def fields(self, job: str) -> dict[str, str]:
        """Return the fields of `scontrol show job`."""
        words = self.run("scontrol", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, job: str, *states: str, timeout: float = 600.0) -> str:
        """Block until the job is in one of the states; any other final state is a failure."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            state = self.fields(job)["JobState"]
            if state in states:
                return state
            if state in ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "COMPLETED"):
                break
            time.sleep(0.5)
        job_fields = self.fields(job)
        output = Path(job_fields["StdOut"])
        text = output.read_text()[-6000:] if output.is_file() else "no output"
        pytest.fail(
            f"job {job} is {job_fields['JobState']} ({job_fields['Reason']}), not {states}:\n{text}{self.logs()}"
        )

    def logs(self) -> str:
        return "".join(f"\n--- {log.name}\n{log.read_text()[-1500:]}" for log in sorted(self.folder.glob("*.log")))


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for probe in sockets:
        probe.bind(("127.0.0.1", 0))
    ports = [int(probe.getsockname()[1]) for probe in sockets]
    for probe in sockets:
        probe.close()
    return ports


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)}; on Debian or Ubuntu: apt-get install slurm-wlm munge")
    if os.getuid() != 0:
        pytest.skip("a Slurm of its own needs root")
    # munge refuses a socket in a folder that others may not enter, such as pytest's.
    folder = Path(tempfile.mkdtemp(prefix="megarl-slurm-"))
    folder.chmod(0o755)
    cluster = Cluster(folder)
    (folder / "state").mkdir()
    for node in NODES:
        (folder / f"spool-{node}").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(folder=folder, ports=free_ports(1 + len(NODES))))
    daemons: list[subprocess.Popen[bytes]] = []

    def start(*command: str) -> None:
        log = (folder / "daemons.log").open("ab")
        process = subprocess.Popen(command, env=cluster.env, stdout=log, stderr=log, start_new_session=True)
        daemons.append(process)

    try:
        files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "log", "pid", "seed")]
        start("munged", "--foreground", f"--socket={folder}/munge.socket", *files)
        _wait_until(lambda: (folder / "munge.socket").exists(), cluster)
        start("slurmctld", "-D", "-f", str(conf))
        for node in NODES:
            start("slurmd", "-D", "-N", node, "-f", str(conf))
        _wait_until(lambda: _idle_nodes(cluster) == len(NODES), cluster)
        yield cluster
    finally:
        for job in cluster.jobs:
            _cancel(cluster, job)
        for process in reversed(daemons):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _wait_until(condition: object, cluster: Cluster, timeout: float = 60.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"the local Slurm is not ready after {timeout:g} s{cluster.logs()}")
        time.sleep(0.2)


def _idle_nodes(cluster: Cluster) -> int:
    process = subprocess.run(
        ["sinfo", "-h", "-N", "-o", "%T"], env=cluster.env, capture_output=True, text=True, timeout=60
    )
    return process.stdout.split().count("idle")


def _cancel(cluster: Cluster, job: str) -> None:
    """Cancel a job and wait until its processes have ended. Never raises, so that the daemons are always stopped."""
    subprocess.run(["scancel", job], env=cluster.env, capture_output=True)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        squeue = ["squeue", "-h", "-j", job, "-o", "%T"]  # lists a job until its last process has ended
        if not subprocess.run(squeue, env=cluster.env, capture_output=True, text=True).stdout.strip():
            return
        time.sleep(0.3)
