"""Harbor's task folders: parse them, and run them in containers and in the sandbox."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sync_sandbox import needs_bubblewrap

from megarl.config import ConfigError
from megarl.environments import containers, harbor
from megarl.environments.harbor_tasks import parse_reward, read_tasks

pytestmark = pytest.mark.alone

SETTINGS = """
version = "1.0"
[verifier]
timeout_sec = 20.0
env = { WANTED = "${WANTED:-hello}" }
[agent]
timeout_sec = 60.0
[environment]
build_timeout_sec = 120.0
allow_internet = false
memory_mb = 256
storage_mb = 64
env = { PLACE = "task" }
"""
VERIFIER = """
[ -f greeting.txt ] && [ "$(cat greeting.txt)" = "$WANTED" ] && reward=1 || reward=0
echo "{\\"reward\\": $reward, \\"tidy\\": 0.5}" > /logs/verifier/reward.json
exit 1
"""
SOLUTION = "printf hello > greeting.txt"
PROGRAMS = ("bash", "cat", "chmod", "id", "ls", "mkdir", "rm", "sleep", "timeout", "true")


def write_task(folder: Path, settings: str = SETTINGS, verifier: str | None = VERIFIER) -> Path:
    """Write a task in Harbor's format, without an image."""
    for name in ("environment", "tests", "solution"):
        (folder / name).mkdir(parents=True)
    (folder / "task.toml").write_text(settings)
    (folder / "instruction.md").write_text("<!-- canary: not to be trained on -->\n\nWrite hello into greeting.txt.\n")
    (folder / "environment" / "note.txt").write_text("a note")
    (folder / "solution" / "solve.sh").write_text(SOLUTION)
    if verifier is not None:
        (folder / "tests" / "test.sh").write_text(verifier)
    return folder


def add_image(folder: Path) -> Path:
    """Add a Dockerfile that needs no downloads: it copies programs of this machine and their libraries."""
    with tarfile.open(folder / "environment" / "programs.tar", "w") as archive:
        for program in PROGRAMS:
            path = os.path.realpath(shutil.which(program) or f"/bin/{program}")
            archive.add(path, f"bin/{program}")
            ldd_output = subprocess.run(["ldd", path], capture_output=True, text=True).stdout
            for library in {word for word in ldd_output.split() if word.startswith("/")}:
                archive.add(os.path.realpath(library), library[1:])
    dockerfile = "FROM scratch\nADD programs.tar /\nCOPY note.txt /app/\nWORKDIR /app\n"
    (folder / "environment" / "Dockerfile").write_text(dockerfile)
    return folder


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        # Podman's default limit of open files may exceed that of a test machine.
        settings = '[containers]\ndefault_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]\n'
        settings += '[engine]\nruntime = "runc"\n' if shutil.which("runc") else ""
        file = tmp_path_factory.mktemp("engine") / "containers.conf"
        file.write_text(settings)
        patch.setenv("CONTAINERS_CONF", str(file))
        containers.find_runtime.cache_clear()
        try:
            name = containers.find_runtime()
        except ConfigError as error:
            pytest.skip(str(error))
        yield name
        containers.find_runtime.cache_clear()


@pytest.fixture
def run_session() -> Callable[..., Any]:
    """Run `run_task(session)` in a session of a task."""

    def run(folder: Path, run_task: Callable[[harbor.HarborTask], Awaitable[Any]], task: str = "greet") -> Any:
        async def session() -> Any:
            harbor_task = environment()
            try:
                await harbor_task.reset(task=task)
                return await run_task(harbor_task)
            finally:
                await harbor_task.close()

        environment = harbor.environment(str(folder))
        return asyncio.run(session())

    return run


async def solve(session: harbor.HarborTask) -> dict[str, Any]:
    assert await session.bash(command="cat note.txt; echo $PLACE") == "a notetask\n"
    assert await session.bash(command="cat greeting.txt; exit 3") == (
        "cat: greeting.txt: No such file or directory\n\n[exit status 3]"
    )
    assert "test.sh" not in await session.bash(command="ls /tests/ /logs/verifier/; ls")
    assert await session.bash(command=SOLUTION) == ""
    return await session.reward()


async def plant_rewards(session: harbor.HarborTask) -> dict[str, Any]:
    """Plant rewards beforehand and from a background loop."""
    plant = 'mkdir -p /logs/verifier /tests; echo 1 > /logs/verifier/reward.txt; echo "{}" > /logs/verifier/reward.json'
    await session.bash(command=f"{plant}; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh")
    await session.bash(command=f"(while true; do {plant}; done) > /dev/null 2>&1 &")
    return await session.reward()


async def flood_output(session: harbor.HarborTask, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    monkeypatch.setattr(harbor, "COMMAND_LIMIT_S", 2.0)
    text = await session.bash(command="while true; do printf '%01000d\n' 7; done")
    return text, await session.bash(command="echo on")


def test_runs_a_task_in_a_container(tmp_path: Path, engine: str, run_session: Callable[..., Any]) -> None:
    add_image(write_task(tmp_path / "greet"))
    assert run_session(tmp_path, solve) == {"reward": 1.0, "parts": {"tidy": 0.5}}
    containers_running = subprocess.run(
        [engine, "ps", "-aq", "--filter", "name=megarl-"], capture_output=True, text=True
    )
    assert containers_running.stdout == ""


def test_planted_rewards_earn_nothing_in_a_container(
    tmp_path: Path, engine: str, run_session: Callable[..., Any]
) -> None:
    add_image(write_task(tmp_path / "greet"))
    assert run_session(tmp_path, plant_rewards)["reward"] == 0.0


def test_container_survives_an_output_flood(
    tmp_path: Path, engine: str, run_session: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    add_image(write_task(tmp_path / "greet"))
    text, after = run_session(tmp_path, lambda session: flood_output(session, monkeypatch))
    assert text.startswith("0000") and text.endswith("[stopped after 2 s]") and "[...]" in text
    assert len(text) < 100_000 and after == "on\n"


def test_container_ends_with_its_owner(tmp_path: Path, engine: str) -> None:
    """The owner is killed with SIGKILL, like a session process."""
    add_image(write_task(tmp_path / "greet"))
    code = (
        "import asyncio, os, sys; from megarl.environments import harbor\n"
        "async def main():\n"
        "    one = harbor.environment(sys.argv[1])(); await one.reset(task='greet'); os.killpg(0, 9)\n"
        "asyncio.run(main())"
    )
    process = subprocess.run([sys.executable, "-c", code, str(tmp_path)], start_new_session=True)
    assert process.returncode == -signal.SIGKILL
    for _ in range(100):
        containers_running = subprocess.run(
            [engine, "ps", "-q", "--filter", "name=megarl-"], capture_output=True, text=True
        ).stdout
        if not containers_running:
            break
        asyncio.run(asyncio.sleep(0.1))
    assert containers_running == ""


@needs_bubblewrap
def test_runs_a_task_in_the_sandbox(tmp_path: Path, run_session: Callable[..., Any]) -> None:
    write_task(tmp_path / "greet")
    assert run_session(tmp_path, solve) == {"reward": 1.0, "parts": {"tidy": 0.5}}


@needs_bubblewrap
def test_planted_rewards_earn_nothing_in_the_sandbox(tmp_path: Path, run_session: Callable[..., Any]) -> None:
    write_task(tmp_path / "greet")
    assert run_session(tmp_path, plant_rewards)["reward"] == 0.0


@needs_bubblewrap
def test_sandbox_survives_an_output_flood(
    tmp_path: Path, run_session: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_task(tmp_path / "greet")
    text, after = run_session(tmp_path, lambda session: flood_output(session, monkeypatch))
    assert text.startswith("0000") and text.endswith("[stopped after 2 s]") and "[...]" in text
    assert len(text) < 100_000 and after == "on\n"


@needs_bubblewrap
def test_a_killed_sandbox_earns_nothing(tmp_path: Path, run_session: Callable[..., Any]) -> None:
    async def kill_sandbox(session: harbor.HarborTask) -> tuple[str, str, Any]:
        await session.bash(command=SOLUTION)
        text = await session.bash(command="python3 -c 'x = bytearray(1 << 30); print(len(x))'; kill -9 -1; sleep 9")
        return text, await session.bash(command="ls"), await session.reward()

    write_task(tmp_path / "greet")
    text, after, reward = run_session(tmp_path, kill_sandbox)
    assert "the machine stopped; all its files are lost" in text
    assert after == "Error: the machine was lost" and reward == {"reward": 0.0}


@needs_bubblewrap
def test_a_verifier_timeout_earns_nothing(tmp_path: Path, run_session: Callable[..., Any]) -> None:
    settings = SETTINGS.replace("timeout_sec = 20.0", "timeout_sec = 1.0")
    write_task(tmp_path / "greet", settings, "echo 1 > /logs/verifier/reward.txt; sleep 60")
    assert run_session(tmp_path, lambda session: session.reward()) == {"reward": 0.0}


@needs_bubblewrap
def test_forged_sandbox_replies_do_not_break_the_reward(tmp_path: Path, run_session: Callable[..., Any]) -> None:
    """The policy writes to the channel of the sandbox's replies."""

    async def forge_replies(session: harbor.HarborTask) -> Any:
        await session.bash(command=SOLUTION)
        forged = "for p in /proc/[0-9]*; do (sleep 1; echo 'megarl: \"AAAA\"' > $p/fd/1) & done"
        await session.bash(command=f"({forged}) 2> /dev/null > /dev/null")
        await asyncio.sleep(1.5)
        return await session.reward()

    write_task(tmp_path / "greet")
    assert run_session(tmp_path, forge_replies)["reward"] in (0.0, 1.0)  # either is a valid verdict


@needs_bubblewrap
def test_a_verifier_without_a_reward_is_an_error(tmp_path: Path, run_session: Callable[..., Any]) -> None:
    write_task(tmp_path / "greet", verifier="echo no pytest here >&2")
    with pytest.raises(Exception, match=r"the verifier failed: it wrote neither .*\(no pytest here\)"):
        run_session(tmp_path, lambda session: session.reward())


def test_lists_tasks_as_rows(tmp_path: Path) -> None:
    write_task(tmp_path / "one")
    write_task(tmp_path / "more" / "two")
    (tmp_path / "more" / "two" / "tests" / "task.toml").write_text("")  # a fixture of the tests, not another task
    rows = harbor.rows(str(tmp_path))
    assert [row["task"] for row in rows] == ["more/two", "one"]
    assert rows[1]["prompt"] == "Write hello into greeting.txt."
    assert rows[1]["environment"] == str(tmp_path) and rows[1]["id"] == "one"
    assert [task.name for task in read_tasks(str(tmp_path / "one"))] == ["one"]


def test_refuses_images_without_a_container_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_image(write_task(tmp_path / "greet"))
    monkeypatch.setenv("PATH", str(tmp_path))
    containers.find_runtime.cache_clear()
    message = "task greet has its own image: containers are not available here: there is no docker; there is no podman"
    with pytest.raises(ConfigError, match=message):
        harbor.environment(str(tmp_path))
    containers.find_runtime.cache_clear()


@pytest.mark.parametrize(
    "settings, message",
    [
        ("[", "task.toml cannot be read"),
        ("steps = [{name = 'a'}]", "has several steps"),
        ("[verifier]\nenvironment_mode = 'separate'", "needs a separate container for its verifier"),
        ("[environment]\ngpus = 1", "wants GPUs"),
        ("[environment]\nnetwork_mode = 'allowlist'", "wants the network mode 'allowlist'"),
        ("[environment]\nmcp_servers = [{name = 'a'}]", "has `mcp_servers` in its environment"),
        ("[environment]\nenv = {A = 1}", "`environment.env.A` in task.toml: Input should be a valid string"),
        ("[verifier]\ntimeout_sec = 'long'", "`verifier.timeout_sec` in task.toml: Input should be a valid number"),
        ("environment = 3", "`environment` in task.toml must be a table"),
    ],
)
def test_refuses_unsupported_tasks(tmp_path: Path, settings: str, message: str) -> None:
    write_task(tmp_path / "greet", settings)
    with pytest.raises(ConfigError, match=f"task greet: .*{message}|task greet: {message}"):
        read_tasks(str(tmp_path))


def test_refuses_folders_without_valid_tasks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no folder"):
        read_tasks(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="has no folder with a task.toml"):
        read_tasks(str(tmp_path))
    write_task(tmp_path / "greet", verifier=None)
    with pytest.raises(ConfigError, match="task greet: has no verifier, tests/test.sh; without one there is no reward"):
        read_tasks(str(tmp_path))


@pytest.mark.parametrize(
    "files, reward, parts",
    [
        ({"reward.txt": b" 0.5\n"}, 0.5, {}),
        ({"reward.json": b'{"reward": 1, "style": 0.25}'}, 1.0, {"style": 0.25}),
        ({"reward.json": b'{"score": 0.75}'}, 0.75, {}),
        ({"reward.json": b'{"reward": 0}', "reward.txt": b"1"}, 0.0, {}),
    ],
)
def test_parses_verifier_rewards(files: dict[str, bytes], reward: float, parts: dict[str, float]) -> None:
    assert parse_reward(files) == (reward, parts)


@pytest.mark.parametrize(
    "files, message",
    [
        ({}, "wrote neither"),
        ({"reward.txt": b"good"}, "cannot be read: 'good'"),
        ({"reward.txt": b"nan"}, "not made of finite numbers"),
        ({"reward.json": b"{"}, "cannot be read"),
        ({"reward.json": b"1"}, "not made of finite numbers"),
        ({"reward.json": b'{"reward": true}'}, "not made of finite numbers"),
        ({"reward.json": b'{"a": 1, "b": 0}'}, "has no `reward`, but a, b"),
    ],
)
def test_refuses_invalid_verifier_rewards(files: dict[str, bytes], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_reward(files)
