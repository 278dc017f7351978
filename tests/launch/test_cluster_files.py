"""launch/skypilot.yaml and launch/kubernetes.yaml: their commands, played with the variables that a cluster sets."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.config import load_config
from megarl.launch.exit_status import REPEATED_FAULT_EXIT_CODE, REQUEUE_EXIT_CODE

ROOT = Path(__file__).resolve().parents[2]
USER_ERROR = 2
FAKE_PYTHON = """#!/bin/sh
case "$*" in
*megarl.torchrun*) echo "$*" ;;
*) [ -n "$MEGARL_SECRET" ] && shift 3 && echo "check $*" >>checks && echo 8 ;;
esac
"""


@pytest.fixture(scope="module")
def task() -> dict[str, Any]:
    tree = yaml.safe_load((ROOT / "launch/skypilot.yaml").read_text(encoding="utf-8"))
    assert isinstance(tree, dict)
    return tree


@pytest.fixture(scope="module")
def objects() -> dict[str, Any]:
    """The objects of the Kubernetes manifest by kind."""
    trees = yaml.safe_load_all((ROOT / "launch/kubernetes.yaml").read_text(encoding="utf-8"))
    return {tree["kind"]: tree for tree in trees}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with the launch scripts and a Python that prints the launcher's command."""
    (tmp_path / "launch").mkdir()
    for name in ("multi_node.sh", "ranks_here.sh"):
        shutil.copy(ROOT / "launch" / name, tmp_path / "launch")
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    return tmp_path


def play(checkout: Path, script: str, variables: Mapping[str, str]) -> str:
    """Run a script and return the arguments of megarl.torchrun."""
    unset = {"NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "MEGARL_SPARES", "MEGARL_SECRET"}
    environment = {name: value for name, value in os.environ.items() if name not in unset} | dict(variables)
    command = ["bash", "-c", script]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def launcher_arguments(nodes: int, rank: int, address: str, arguments: str) -> str:
    place = f"--nnodes {nodes} --node-rank {rank} --nproc-per-node 8 --master-addr {address} --master-port 29500"
    return f"-m megarl.torchrun {place} -m megarl.train {arguments}"


# --- SkyPilot


def sky_variables(task: Mapping[str, Any], rank: int, nodes: int) -> dict[str, str]:
    """What SkyPilot sets on a node, and the task's own variables."""
    addresses = "\n".join(f"10.0.0.{number + 1}" for number in range(nodes))
    place = {"SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NUM_NODES": str(nodes), "SKYPILOT_NODE_IPS": addresses}
    return {**task["envs"], "MEGARL_SECRET": "of-the-test", **place}


@pytest.mark.parametrize("rank", [0, 1])
def test_skypilot_starts_the_launcher_on_each_node(task: dict[str, Any], checkout: Path, rank: int) -> None:
    arguments = "configs/qwen3_30b_a3b.yaml run.resume=auto run.dir=/shared/runs/qwen3_30b_a3b"
    result = play(checkout, task["run"], sky_variables(task, rank, task["num_nodes"]))
    assert result == launcher_arguments(2, rank, "10.0.0.1", arguments)
    assert (checkout / "checks").read_text() == f"check 2 {arguments}\n"  # `ranks_here` validates the same


def test_skypilot_takes_variables_of_the_command_line(task: dict[str, Any], checkout: Path) -> None:
    variables = sky_variables(task, 2, 4) | {
        "MEGARL_SPARES": "1",
        "CONFIG": "my.yaml",
        "OVERRIDES": "run.seed=2 kl.coef=0",
    }
    expected = launcher_arguments(3, 2, "10.0.0.1", "my.yaml run.resume=auto run.seed=2 kl.coef=0")
    assert play(checkout, task["run"], variables) == expected
    without = play(checkout, task["run"], sky_variables(task, 0, 1) | {"OVERRIDES": ""})
    assert without == launcher_arguments(1, 0, "10.0.0.1", "configs/qwen3_30b_a3b.yaml run.resume=auto")


def test_skypilot_task_is_consistent(task: dict[str, Any]) -> None:
    assert all(isinstance(value, str) for value in task["envs"].values())  # of the schema
    assert task["secrets"] == {"MEGARL_SECRET": None}  # required, and never in the file
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [REQUEUE_EXIT_CODE]
    (mount,) = task["volumes"]
    config = load_config(ROOT / task["envs"]["CONFIG"], task["envs"]["OVERRIDES"].split())
    assert config.run.dir.startswith(f"{mount}/") and task["envs"]["HF_HOME"].startswith(f"{mount}/")
    devices = int(task["resources"]["accelerators"].rpartition(":")[2])
    assert config.parallel.world_size == devices * task["num_nodes"]


def test_skypilot_setup_links_the_shared_folders(task: dict[str, Any], checkout: Path) -> None:
    (checkout / "launch/install.sh").write_text("ls >installed")
    (checkout / "data").mkdir()  # with data of the workdir
    play(checkout, task["setup"], {})
    assert os.readlink(checkout / "models") == "/shared/models" and (checkout / "data").is_dir()
    assert "models" in (checkout / "installed").read_text()


# --- Kubernetes


def container(objects: Mapping[str, Any]) -> dict[str, Any]:
    (result,) = objects["Job"]["spec"]["template"]["spec"]["containers"]
    assert isinstance(result, dict)
    return result


def pod_variables(objects: Mapping[str, Any], rank: int) -> dict[str, str]:
    """What Kubernetes sets in a pod of the Job."""
    values = {entry["name"]: entry.get("value", "of-the-secret") for entry in container(objects)["env"]}
    return values | {"JOB_COMPLETION_INDEX": str(rank)}


def without_paths(variables: dict[str, str], checkout: Path) -> dict[str, str]:
    """Return variables for this machine, on which `getent` finds the first pod at the third attempt."""
    folder = checkout / "bin"
    folder.mkdir(exist_ok=True)
    getent = folder / "getent"
    getent.write_text('#!/bin/sh\necho "$*" >>asked\n[ "$(wc -l <asked)" -ge 3 ]\n')
    getent.chmod(0o755)
    return variables | {"HOME": str(checkout), "PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.mark.parametrize("rank", [0, 1])
def test_kubernetes_starts_the_launcher_in_each_pod(objects: dict[str, Any], checkout: Path, rank: int) -> None:
    pod = container(objects)
    assert pod["command"] == ["bash", "-c"]
    (script,) = pod["args"]
    arguments = "configs/qwen3_30b_a3b.yaml run.resume=auto run.dir=/megarl/runs/qwen3_30b_a3b"
    result = play(checkout, script, without_paths(pod_variables(objects, rank), checkout))
    assert result == launcher_arguments(2, rank, "megarl-0.megarl", arguments)
    assert (checkout / "asked").read_text() == "hosts megarl-0.megarl\n" * 3


def test_kubernetes_objects_refer_to_each_other(objects: dict[str, Any]) -> None:
    job, service = objects["Job"]["spec"], objects["Service"]
    pod, variables = job["template"]["spec"], pod_variables(objects, 0)
    name = service["metadata"]["name"]
    # A pod's host name is that of the Job with its index, in the domain of the headless Service.
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
    assert variables["MASTER_ADDR"] == f"{objects['Job']['metadata']['name']}-0.{name}" and pod["subdomain"] == name
    assert service["spec"]["selector"].items() <= job["template"]["metadata"]["labels"].items()
    assert job["completionMode"] == "Indexed" and job["completions"] == job["parallelism"]
    assert job["completions"] == int(variables["NNODES"]) + int(variables["MEGARL_SPARES"])
    port = int(variables["MASTER_PORT"])
    assert [entry["port"] for entry in service["spec"]["ports"]] == [port]
    assert [entry["containerPort"] for entry in container(objects)["ports"]] == [port]
    assert {mount["name"] for mount in container(objects)["volumeMounts"]} == {
        entry["name"] for entry in pod["volumes"]
    }
    config = load_config(ROOT / variables["CONFIG"], variables["OVERRIDES"].split())
    devices = container(objects)["resources"]["limits"]["nvidia.com/gpu"]
    assert config.parallel.world_size == devices * int(variables["NNODES"])


def test_kubernetes_restarts_only_what_can_succeed(objects: dict[str, Any]) -> None:
    job = objects["Job"]["spec"]
    assert job["template"]["spec"]["restartPolicy"] == "Never"  # podFailurePolicy requires it
    fail, ignore = job["podFailurePolicy"]["rules"]
    assert fail["action"] == "FailJob" and fail["onExitCodes"]["operator"] == "In"
    assert fail["onExitCodes"]["values"] == [USER_ERROR, REPEATED_FAULT_EXIT_CODE]
    assert fail["onExitCodes"]["containerName"] == container(objects)["name"]
    assert ignore == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert 0 < job["backoffLimit"]


def test_kubernetes_fits_the_image(objects: dict[str, Any]) -> None:
    dockerfile = (ROOT / "launch/Dockerfile").read_text(encoding="utf-8")
    (folder,) = re.findall(r"^WORKDIR (\S+)$", dockerfile, re.MULTILINE)
    pod = container(objects)
    mounts = {mount["mountPath"]: mount for mount in pod["volumeMounts"]}
    assert pod["workingDir"] == folder and folder not in mounts  # which would hide the code
    assert {f"{folder}/{name}" for name in ("models", "data", "runs")} | {"/dev/shm", "/scratch"} == set(mounts)
    volumes = {entry["name"]: entry for entry in objects["Job"]["spec"]["template"]["spec"]["volumes"]}
    assert volumes[mounts["/dev/shm"]["name"]]["emptyDir"]["medium"] == "Memory"
    security = objects["Job"]["spec"]["template"]["spec"]["securityContext"]
    assert security["runAsNonRoot"] and security["fsGroup"] == security["runAsGroup"] != 0
    variables = pod_variables(objects, 0)
    assert variables["HOME"] in mounts and variables["HF_HOME"].startswith(f"{folder}/models/")
    assert "MEGARL_SECRET" in {entry["name"] for entry in pod["env"] if "valueFrom" in entry}


def test_scripts_end_in_exec(task: dict[str, Any], objects: dict[str, Any]) -> None:
    """Signals must reach the launcher, which then saves: no shell may stand before it."""
    for script in (task["run"], container(objects)["args"][0]):
        assert script.strip().splitlines()[-1].startswith("exec bash launch/multi_node.sh ")
    assert re.search(r"^exec \.venv/bin/python -m megarl\.torchrun", (ROOT / "launch/multi_node.sh").read_text(), re.M)
