"""The installed package: dependencies, command, types and files."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import megarl

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "view"))

import example_run  # noqa: E402

pytestmark = [pytest.mark.alone, pytest.mark.slow, pytest.mark.nightly]
OPTIONAL_PACKAGES = {
    *("flashinfer", "google", "mcp", "mlflow", "opentelemetry", "optuna", "prometheus_client"),
    *("sglang", "swanlab", "verifiers", "vllm", "wandb", "zstandard"),
}
"""Imported only on request: extras, or packages installed without their dependencies."""
DISTRIBUTIONS = {"yaml": "pyyaml", "megatron": "megatron-core", "PIL": "pillow"}


def package_files() -> list[Path]:
    return [file for file in (ROOT / "megarl").rglob("*") if file.is_file() and "__pycache__" not in file.parts]


def config_files() -> list[Path]:
    return [file for file in (ROOT / "configs").rglob("*") if file.is_file()]


def build(target: Path, *options: str) -> Path:
    """Build the wheel from a copy, because setuptools leaves build folders behind."""
    copy = target / "copy"
    lists = (*ROOT.glob("launch/requirements*"), *config_files())
    for file in (*package_files(), *lists, ROOT / "setup.py", ROOT / "MANIFEST.in"):
        name = file.relative_to(ROOT)
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes(file.read_bytes())
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "wheel"]
    command = [*pip, "--no-deps", "--no-build-isolation", "--no-index", *options, "-w", str(target), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = target.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def metadata(installed: Path, name: str) -> str:
    (file,) = installed.glob(f"megarl-*.dist-info/{name}")
    return file.read_text(encoding="utf-8")


def test_declares_every_imported_package(installed: Path) -> None:
    import ast

    lines = message_from_string(metadata(installed, "METADATA")).get_all("Requires-Dist") or []
    requirements = [Requirement(line) for line in lines]
    required = {canonicalize_name(item.name) for item in requirements if item.marker is None}
    imported = set()
    for file in (ROOT / "megarl").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            imported |= {name.partition(".")[0] for name in names}
    third_party = imported - sys.stdlib_module_names - {"megarl"} - OPTIONAL_PACKAGES
    assert (
        "torch" in third_party
        and {canonicalize_name(DISTRIBUTIONS.get(name, name)) for name in third_party} <= required
    )
    assert not required & {"pytest", "mypy", "ruff", "sglang", "transformer-engine"}
    (torch,) = (item for item in requirements if item.name == "torch" and item.marker is None)
    assert "2.13.0" in torch.specifier and "2.14.1" in torch.specifier and "2.15.0" not in torch.specifier


def test_includes_every_file(installed: Path) -> None:
    package_paths = [str(file.relative_to(ROOT)) for file in package_files()]
    left_out = [name for name in package_paths if not (installed / name).is_file() and not name.endswith(".png")]
    assert len(package_paths) > 150 and not left_out
    assert (installed / "megarl" / "py.typed").is_file()
    for file in config_files():
        assert (installed / "megarl" / file.relative_to(ROOT)).read_bytes() == file.read_bytes()


def run_command(installed: Path, folder: Path, *arguments: str) -> tuple[int, str]:
    """Run the command in a folder, like the console script; return its exit status and output."""
    code = "import sys; sys.path.remove(''); from megarl.__main__ import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=180,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(installed), "HOME": str(folder)},
    )
    return done.returncode, done.stdout + done.stderr


def test_commands_run_outside_of_a_checkout(installed: Path, tmp_path: Path) -> None:
    """The whole of a newcomer's walk: check the machine, copy a recipe, check it, plan it, look at a recorded run."""
    run_folder = tmp_path / "run"
    example_run.write_run(run_folder)

    def check(*arguments: str) -> str:
        status, text = run_command(installed, tmp_path, *arguments)
        assert status == 0, (arguments, text)
        return text

    assert "Next: " in check("doctor")
    assert "wrote quickstart_sft.yaml" in check("recipes", "quickstart_sft")
    assert "qwen3-30b-a3b" in check("plan", "--help")
    assert "GB" in check("plan", "--model", "qwen3-30b-a3b", "--gpus", "16", "--gpu-gb", "80")
    check("view", str(run_folder), "--out", "page.html")
    assert (tmp_path / "page.html").stat().st_size > 10_000


def test_command_runs_from_the_package(installed: Path, tmp_path: Path) -> None:
    assert "megarl = megarl.__main__:main" in metadata(installed, "entry_points.txt")
    (tmp_path / "my_reward.py").write_text("raise ValueError('imported')")
    (tmp_path / "a.yaml").write_text("algorithm: grpo\nreward: {functions: [my_reward:right]}\n")

    assert run_command(installed, tmp_path, "train", "--version") == (0, f"MegaRL {megarl.__version__}\n")
    status, text = run_command(installed, tmp_path, "train", "nowhere.yaml")
    assert status == 2 and text == "error: no configuration file nowhere.yaml\n"
    status, text = run_command(installed, tmp_path, "train", "a.yaml", "--dry-run")
    assert status == 2 and "ValueError: imported" in text  # found in the working directory


@pytest.mark.parametrize("package", ["yaml", "safetensors", "torch"])
def test_a_missing_package_is_one_line(package: str, installed: Path, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("algorithm: sft\n")
    (tmp_path / "program.py").write_text(f"""
import sys

sys.modules[{package!r}] = None  # importing it raises ModuleNotFoundError
sys.path.insert(0, {str(installed)!r})
from megarl.__main__ import main

sys.exit(main())
""")
    command = [sys.executable, "-I", "-W", "ignore", str(tmp_path / "program.py"), "train", str(tmp_path / "a.yaml")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    remedy = "bash launch/install.sh in a checkout, or pip as described in launch/README.md"
    assert (done.returncode, done.stderr) == (2, f"error: the package {package} is not installed: {remedy}\n")


def test_editable_install_is_typed(tmp_path: Path) -> None:
    """Mypy reads the .pth file of an editable installation without import hooks, and finds py.typed."""
    copy, site, workdir = tmp_path / "copy", tmp_path / "site", tmp_path / "place"
    build(tmp_path)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--no-index"]
    command = [*pip, "--no-deps", "--no-build-isolation", "--target", str(site), "--editable", str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(workdir)], check=True, timeout=120)
    (packages,) = workdir.glob("lib/python*/site-packages")
    for file in site.iterdir():
        if file.is_file():
            (packages / file.name).write_bytes(file.read_bytes())
    module_text = "from megarl.config.strict import is_valid\n\n\ndef right() -> str:\n    return is_valid(1, int)\n"
    (tmp_path / "mine.py").write_text(module_text)
    options = ["--config-file=", "--python-executable", str(workdir / "bin" / "python"), "--follow-imports=silent"]
    check = [sys.executable, "-m", "mypy", *options, "mine.py"]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(check, cwd=tmp_path, capture_output=True, text=True, timeout=300, env=environment)
    assert 'Incompatible return value type (got "bool", expected "str")' in done.stdout, done.stdout + done.stderr
    assert "Found 1 error" in done.stdout
