"""The SandboxFusion backend against a local server that implements `/run_code`.

If MEGARL_SANDBOX_FUSION is the address of SandboxFusion's own server, commands and results are tested with that, too.
"""

import asyncio
import base64
import os
import subprocess
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from megarl.config import ConfigError, SandboxConfig
from megarl.sandbox.box import Sandbox
from megarl.sandbox.results import Limits
from megarl.sandbox.runner_client import SandboxError

pytestmark = pytest.mark.alone


@asynccontextmanager
async def service(folder, answer=None, requests=None):
    """Start a server that runs code on this machine, and yield a sandbox that uses it."""

    async def run_code(request):
        body = await request.json()
        if requests is not None:
            requests.append(body)
        if answer is not None:
            return await answer(body) if callable(answer) else web.json_response(answer)
        for name, content in body["files"].items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(base64.b64decode(content))
        assert body["language"] == "bash"
        result = {"status": "Finished", "execution_time": 0.1, "return_code": 0, "stdout": "", "stderr": ""}
        try:
            done = await asyncio.to_thread(
                subprocess.run,
                ["bash", "-c", body["code"]],
                input=body["stdin"].encode(),
                capture_output=True,
                cwd=folder,
                timeout=body["run_timeout"],
            )
            result |= {"return_code": done.returncode, "stdout": done.stdout.decode(), "stderr": done.stderr.decode()}
        except subprocess.TimeoutExpired:
            result |= {"status": "TimeLimitExceeded", "return_code": None}
        correct = result["return_code"] == 0
        files = {
            name: base64.b64encode((folder / name).read_bytes()).decode()
            for name in body["fetch_files"]
            if (folder / name).is_file()
        }
        response = {
            "status": "Success" if correct else "Failed",
            "message": "",
            "compile_result": None,
            "run_result": result,
        }
        return web.json_response({**response, "executor_pod_name": None, "files": files})

    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/run_code", run_code)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    sandbox = Sandbox(SandboxConfig(backend=f"http://127.0.0.1:{port}/", max_boxes=3))
    try:
        yield sandbox
    finally:
        await sandbox.close()
        await runner.cleanup()


OWN_SERVER = os.environ.get("MEGARL_SANDBOX_FUSION", "")


@pytest.fixture(params=["stand-in", *([OWN_SERVER] if OWN_SERVER else [])])
def run_in_service(request, tmp_path):
    """Call a function with a sandbox of the local server, or of SandboxFusion's own."""

    async def use_own_server(use_sandbox):
        sandbox = Sandbox(SandboxConfig(backend=request.param, max_boxes=3))
        try:
            return await use_sandbox(sandbox)
        finally:
            await sandbox.close()

    def run(use_sandbox):
        if request.param == "stand-in":
            return use_service(tmp_path, use_sandbox)
        return asyncio.run(use_own_server(use_sandbox))

    return run


def use_service(folder, use_sandbox, **kwargs):
    async def main():
        async with service(folder, **kwargs) as sandbox:
            return await use_sandbox(sandbox)

    return asyncio.run(main())


def test_runs_commands(run_in_service):
    async def use_sandbox(sandbox):
        assert (await sandbox.probe()).layers == ("the service's sandbox",)
        return [
            await sandbox.run(
                ["python3", "-c", "print(input(), open('a/b').read()); open('c', 'wb').write(b'\\xff')"],
                {"a/b": b"it's"},
                b"in",
                fetch=["c", "none"],
            ),
            await sandbox.run(["sh", "-c", "echo $0 >&2; exit 3", "a b;c"]),
            await sandbox.run(["sleep", "9"], limits=Limits(seconds=0.5)),
            await sandbox.run(["sh", "-c", "yes | head -c 5000"], limits=Limits(output_bytes=1000)),
        ]

    correct, wrong, slow, long = run_in_service(use_sandbox)
    assert correct.ok and correct.stdout == b"in it's\n" and correct.files == {"c": b"\xff"}
    assert (wrong.ok, wrong.status, wrong.reason, wrong.stderr) == (False, 3, "exit", b"a b;c\n")
    assert (slow.reason, slow.status) == ("time", None)
    assert long.reason == "output" and len(long.stdout) == 1000


def test_harness_results_come_from_a_file(run_in_service):
    async def use_sandbox(sandbox):
        complete = await sandbox.run_harness(
            "for i in range(3): print(i); send(i, [i, open('x').read()])", 3, {"x": b"y"}
        )
        crashed = await sandbox.run_harness("import os; send(0, 1); os._exit(0)", 2)
        return complete, crashed

    complete, crashed = run_in_service(use_sandbox)
    assert (
        complete.is_complete
        and complete.results == {i: [i, "y"] for i in range(3)}
        and complete.run.stdout == b"0\n1\n2\n"
    )
    assert not complete.run.files and not crashed.is_complete and crashed.results == {0: 1}


def test_sends_the_documented_request(tmp_path):
    requests = []

    async def use_sandbox(sandbox):
        await sandbox.run(["true"], {"x": b"\0"}, b"\xff", Limits(seconds=7, memory_mb=99), ["y"])

    use_service(tmp_path, use_sandbox, requests=requests)
    assert requests == [
        {
            "language": "bash",
            "code": "exec true",
            "stdin": "�",
            "files": {"x": "AA=="},
            "fetch_files": ["y"],
            "run_timeout": 7,
            "compile_timeout": 7,
            "memory_limit_MB": 99,
        }
    ]


def test_limits_concurrent_requests(tmp_path):
    concurrent, max_concurrent = 0, 0

    async def answer(body):
        nonlocal concurrent, max_concurrent
        concurrent += 1
        max_concurrent = max(max_concurrent, concurrent)
        await asyncio.sleep(0.02)
        concurrent -= 1
        return web.json_response({"status": "Success", "run_result": {"return_code": 0}})

    async def use_sandbox(sandbox):
        return await asyncio.gather(*(sandbox.run(["true"]) for _ in range(12)))

    assert all(result.ok for result in use_service(tmp_path, use_sandbox, answer=answer)) and max_concurrent == 3


@pytest.mark.parametrize(
    "answer",
    [
        {"status": "SandboxError", "message": "no room"},
        {"status": "Success", "run_result": None, "compile_result": None},
        {},
        [],
        "text",
    ],
)
def test_service_faults_are_sandbox_errors(tmp_path, answer):
    with pytest.raises(SandboxError):
        use_service(tmp_path, lambda sandbox: sandbox.run(["true"]), answer=answer)


def test_invalid_responses_are_errors(tmp_path):
    async def busy(body):
        return web.Response(status=503, text="busy")

    async def invalid(body):
        return web.Response(text="{", content_type="text/plain")

    for answer, reason in ((busy, "503"), (invalid, "does not answer correctly")):
        with pytest.raises(SandboxError, match=reason):
            use_service(tmp_path, lambda sandbox: sandbox.run(["true"]), answer=answer)
    with pytest.raises(ConfigError, match=r"^sandbox.backend: .*start the service"):
        use_service(tmp_path, lambda sandbox: sandbox.probe(), answer=busy)


def test_returns_only_requested_files(tmp_path):
    response = {
        "status": "Success",
        "run_result": {"return_code": 0},
        "files": {"a": "YQ==", "../b": "YQ==", "c": "?", "d": 1},
    }

    async def use_sandbox(sandbox):
        return await sandbox.run(["true"], fetch=["a", "c", "d"])

    assert use_service(tmp_path, use_sandbox, answer=response).files == {"a": b"a"}


def test_probe_fails_when_nothing_listens():
    sandbox = Sandbox(SandboxConfig(backend="http://127.0.0.1:9"))

    async def main():
        try:
            await sandbox.probe()
        finally:
            await sandbox.close()

    with pytest.raises(ConfigError, match="does not answer correctly"):
        asyncio.run(main())


def test_refuses_interpreter_sessions(tmp_path):
    with pytest.raises(ConfigError, match="keeps no state"):
        use_service(tmp_path, lambda sandbox: sandbox.interpreter())
