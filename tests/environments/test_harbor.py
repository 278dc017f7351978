"""Harbor's task folders: read, run in a real container where an engine answers, run in the sandbox."""

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
from real_boxes import needs_boxes

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


def task_folder(folder: Path, settings: str = SETTINGS, verifier: str | None = VERIFIER) -> Path:
    """A task in Harbor's format, without an image."""
    for name in ("environment", "tests", "solution"):
        (folder / name).mkdir(parents=True)
    (folder / "task.toml").write_text(settings)
    (folder / "instruction.md").write_text("<!-- canary: not to be trained on -->\n\nWrite hello into greeting.txt.\n")
    (folder / "environment" / "note.txt").write_text("a note")
    (folder / "solution" / "solve.sh").write_text(SOLUTION)
    if verifier is not None:
        (folder / "tests" / "test.sh").write_text(verifier)
    return folder


def with_image(folder: Path) -> Path:
    """A Dockerfile that needs nothing from elsewhere: some of this machine's programs, and what they are linked to."""
    with tarfile.open(folder / "environment" / "programs.tar", "w") as packed:
        for program in PROGRAMS:
            path = os.path.realpath(shutil.which(program) or f"/bin/{program}")
            packed.add(path, f"bin/{program}")
            linked = subprocess.run(["ldd", path], capture_output=True, text=True).stdout
            for library in {word for word in linked.split() if word.startswith("/")}:
                packed.add(os.path.realpath(library), library[1:])
    dockerfile = "FROM scratch\nADD programs.tar /\nCOPY note.txt /app/\nWORKDIR /app\n"
    (folder / "environment" / "Dockerfile").write_text(dockerfile)
    return folder


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        # Podman's defaults ask for more open files than a machine for tests may allow.
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
def episode() -> Callable[..., Any]:
    """Run `what(session)` in a session of a folder's task."""

    def run(folder: Path, what: Callable[[harbor.HarborTask], Awaitable[Any]], task: str = "greet") -> Any:
        async def session() -> Any:
            item = created()
            try:
                await item.reset(task=task)
                return await what(item)
            finally:
                await item.close()

        created = harbor.environment(str(folder))
        return asyncio.run(session())

    return run


async def solved(session: harbor.HarborTask) -> dict[str, Any]:
    assert await session.bash(command="cat note.txt; echo $PLACE") == "a notetask\n"
    assert await session.bash(command="cat greeting.txt; exit 3") == (
        "cat: greeting.txt: No such file or directory\n\n[exit status 3]"
    )
    assert "test.sh" not in await session.bash(command="ls /tests/ /logs/verifier/; ls")
    assert await session.bash(command=SOLUTION) == ""
    return await session.reward()


async def cheated(session: harbor.HarborTask) -> dict[str, Any]:
    """Rewards planted before, and a process that plants them on and on."""
    plant = 'mkdir -p /logs/verifier /tests; echo 1 > /logs/verifier/reward.txt; echo "{}" > /logs/verifier/reward.json'
    await session.bash(command=f"{plant}; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh")
    await session.bash(command=f"(while true; do {plant}; done) > /dev/null 2>&1 &")
    return await session.reward()


async def flooding(session: harbor.HarborTask, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    monkeypatch.setattr(harbor, "COMMAND_LIMIT_S", 2.0)
    text = await session.bash(command="while true; do printf '%01000d\n' 7; done")
    return text, await session.bash(command="echo on")


def test_a_task_in_a_container(tmp_path: Path, engine: str, episode: Callable[..., Any]) -> None:
    with_image(task_folder(tmp_path / "greet"))
    assert episode(tmp_path, solved) == {"reward": 1.0, "parts": {"tidy": 0.5}}
    left = subprocess.run([engine, "ps", "-aq", "--filter", "name=megarl-"], capture_output=True, text=True)
    assert left.stdout == ""


def test_a_container_earns_nothing_by_planting_rewards(
    tmp_path: Path, engine: str, episode: Callable[..., Any]
) -> None:
    with_image(task_folder(tmp_path / "greet"))
    assert episode(tmp_path, cheated)["reward"] == 0.0


def test_a_container_goes_on_after_a_flood(
    tmp_path: Path, engine: str, episode: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_image(task_folder(tmp_path / "greet"))
    text, after = episode(tmp_path, lambda session: flooding(session, monkeypatch))
    assert text.startswith("0000") and text.endswith("[stopped after 2 s]") and "[...]" in text
    assert len(text) < 100_000 and after == "on\n"


def test_a_container_ends_with_the_process_that_has_it(tmp_path: Path, engine: str) -> None:
    """As a session's process is ended: by SIGKILL, with all that it has started."""
    with_image(task_folder(tmp_path / "greet"))
    code = (
        "import asyncio, os, sys; from megarl.environments import harbor\n"
        "async def main():\n"
        "    one = harbor.environment(sys.argv[1])(); await one.reset(task='greet'); os.killpg(0, 9)\n"
        "asyncio.run(main())"
    )
    process = subprocess.run([sys.executable, "-c", code, str(tmp_path)], start_new_session=True)
    assert process.returncode == -signal.SIGKILL
    for _ in range(100):
        left = subprocess.run([engine, "ps", "-q", "--filter", "name=megarl-"], capture_output=True, text=True).stdout
        if not left:
            break
        asyncio.run(asyncio.sleep(0.1))
    assert left == ""


@needs_boxes
def test_a_task_in_the_sandbox(tmp_path: Path, episode: Callable[..., Any]) -> None:
    task_folder(tmp_path / "greet")
    assert episode(tmp_path, solved) == {"reward": 1.0, "parts": {"tidy": 0.5}}


@needs_boxes
def test_a_box_earns_nothing_by_planting_rewards(tmp_path: Path, episode: Callable[..., Any]) -> None:
    task_folder(tmp_path / "greet")
    assert episode(tmp_path, cheated)["reward"] == 0.0


@needs_boxes
def test_a_box_goes_on_after_a_flood(
    tmp_path: Path, episode: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    task_folder(tmp_path / "greet")
    text, after = episode(tmp_path, lambda session: flooding(session, monkeypatch))
    assert text.startswith("0000") and text.endswith("[stopped after 2 s]") and "[...]" in text
    assert len(text) < 100_000 and after == "on\n"


@needs_boxes
def test_a_box_that_was_ended_is_worth_nothing(tmp_path: Path, episode: Callable[..., Any]) -> None:
    async def exhausting(session: harbor.HarborTask) -> tuple[str, str, Any]:
        await session.bash(command=SOLUTION)
        text = await session.bash(command="python3 -c 'x = bytearray(1 << 30); print(len(x))'; kill -9 -1; sleep 9")
        return text, await session.bash(command="ls"), await session.reward()

    task_folder(tmp_path / "greet")
    text, after, reward = episode(tmp_path, exhausting)
    assert "the machine stopped; all its files are lost" in text
    assert after == "Error: the machine was lost" and reward == {"reward": 0.0}


@needs_boxes
def test_a_verifier_that_does_not_end_is_worth_nothing(tmp_path: Path, episode: Callable[..., Any]) -> None:
    settings = SETTINGS.replace("timeout_sec = 20.0", "timeout_sec = 1.0")
    task_folder(tmp_path / "greet", settings, "echo 1 > /logs/verifier/reward.txt; sleep 60")
    assert episode(tmp_path, lambda session: session.reward()) == {"reward": 0.0}


@needs_boxes
def test_a_state_that_is_forged_is_worth_nothing(tmp_path: Path, episode: Callable[..., Any]) -> None:
    """The policy writes where its box's own answers go."""

    async def forging(session: harbor.HarborTask) -> Any:
        await session.bash(command=SOLUTION)
        forged = "for p in /proc/[0-9]*; do (sleep 1; echo 'megarl: \"AAAA\"' > $p/fd/1) & done"
        await session.bash(command=f"({forged}) 2> /dev/null > /dev/null")
        await asyncio.sleep(1.5)
        return await session.reward()

    task_folder(tmp_path / "greet")
    assert episode(tmp_path, forging)["reward"] in (0.0, 1.0)  # whichever, it is a verdict


@needs_boxes
def test_a_verifier_that_writes_nothing_is_an_error(tmp_path: Path, episode: Callable[..., Any]) -> None:
    task_folder(tmp_path / "greet", verifier="echo no pytest here >&2")
    with pytest.raises(Exception, match=r"the verifier failed: it wrote neither .*\(no pytest here\)"):
        episode(tmp_path, lambda session: session.reward())


def test_folders_become_rows(tmp_path: Path) -> None:
    task_folder(tmp_path / "one")
    task_folder(tmp_path / "more" / "two")
    (tmp_path / "more" / "two" / "tests" / "task.toml").write_text("")  # of its fixtures, not another task
    rows = harbor.rows(str(tmp_path))
    assert [row["task"] for row in rows] == ["more/two", "one"]
    assert rows[1]["prompt"] == "Write hello into greeting.txt."
    assert rows[1]["environment"] == str(tmp_path) and rows[1]["id"] == "one"
    assert [task.name for task in read_tasks(str(tmp_path / "one"))] == ["one"]


def test_an_image_without_an_engine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_image(task_folder(tmp_path / "greet"))
    monkeypatch.setenv("PATH", str(tmp_path))
    containers.find_runtime.cache_clear()
    said = "task greet has its own image: containers are not available here: there is no docker; there is no podman"
    with pytest.raises(ConfigError, match=said):
        harbor.environment(str(tmp_path))
    containers.find_runtime.cache_clear()


@pytest.mark.parametrize(
    "settings, said",
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
def test_tasks_that_cannot_be_run(tmp_path: Path, settings: str, said: str) -> None:
    task_folder(tmp_path / "greet", settings)
    with pytest.raises(ConfigError, match=f"task greet: .*{said}|task greet: {said}"):
        read_tasks(str(tmp_path))


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no folder"):
        read_tasks(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="has no folder with a task.toml"):
        read_tasks(str(tmp_path))
    task_folder(tmp_path / "greet", verifier=None)
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
def test_what_a_verifier_wrote(files: dict[str, bytes], reward: float, parts: dict[str, float]) -> None:
    assert parse_reward(files) == (reward, parts)


@pytest.mark.parametrize(
    "files, said",
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
def test_rewards_that_are_none(files: dict[str, bytes], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_reward(files)
