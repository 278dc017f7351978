"""The host process of engines: its environment and its restarts."""

from __future__ import annotations

import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from engine_config import make_config

from megarl.config import from_dict
from megarl.engine.engine_backends import engine_backend
from megarl.engine.engine_host import HOST_VARIABLE, HostProcess, secret_variables
from megarl.engine.engine_protocol import EngineError


def test_hides_secrets_and_torchrun_variables_from_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    environment: dict[str, str] = {}

    class FakeProcess(subprocess.Popen[bytes]):
        def __init__(self, *_: Any, env: dict[str, str], **__: Any) -> None:
            environment.update(env)
            super().__init__(["sleep", "600"])

    monkeypatch.setattr(subprocess, "Popen", FakeProcess)
    secret = ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "my_password", "SLACK_WEBHOOK", "TOKEN", "JUDGE")
    public = ("TOKENIZERS_PARALLELISM", "KEYBOARD", "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG")
    for name in (*secret, *public, "RANK", "MASTER_ADDR"):
        monkeypatch.setenv(name, "1")
    host = HostProcess({"OWN": "2"}, hidden={"JUDGE"})
    host.close()
    assert environment["OWN"] == "2" and all(environment[name] == "1" for name in public)
    assert not {*secret, "RANK", "MASTER_ADDR"} & environment.keys()


def test_variables_named_in_the_config_are_secret() -> None:
    roles = {"reward": {"backend": "http", "options": {"url": "http://a", "auth_env": "JUDGE"}}, "actor": {}}
    config = from_dict({"roles": roles, "track": {"webhook": "env:HOOK"}})
    assert secret_variables(config) == {"JUDGE", "HOOK"}
    assert secret_variables(from_dict({"track": {"webhook": "https://hooks.example.com/x"}})) == set()


def test_gives_up_on_a_host_that_keeps_exiting(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class ExitingProcess(subprocess.Popen[bytes]):
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__(["sh", "-c", "exit 3"])

    monkeypatch.setattr(subprocess, "Popen", ExitingProcess)
    host = HostProcess({})
    deadline = time.monotonic() + 20
    while Path(host.path).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    with pytest.raises(OSError), socket.socket(socket.AF_UNIX) as rank:
        rank.connect(host.path)
    host.close()
    lines = capfd.readouterr().err.splitlines()
    prefix = "the engine host process"
    restarts = [f"{prefix} ended (exit status 3) and is restarted"] * 3
    assert lines == [*restarts, f"{prefix} ended 4 times within 60 s each, and is not restarted"]
    assert not Path(host.path).parent.exists()


def test_a_host_that_cannot_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[str] = []
    mkdtemp = tempfile.mkdtemp

    def record(*args: Any, **kwargs: Any) -> str:
        folders.append(mkdtemp(*args, **kwargs))
        return folders[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", record)
    monkeypatch.delenv(HOST_VARIABLE, raising=False)
    missing = str(tmp_path / "python")
    with pytest.raises(FileNotFoundError):
        HostProcess({}, python=missing)
    path = tiny_models.save(tiny_models.qwen3(), tmp_path / "model")
    config = make_config(path, tmp_path / "run", engine="vllm")
    monkeypatch.setattr("megarl.engine.vllm.vllm_engine.interpreter", lambda: missing)
    with pytest.raises(EngineError, match="engine 0: its host process cannot be started .*No such file"):
        engine_backend(config).make_engine(config).start()
    assert len(folders) == 2 and not any(Path(folder).exists() for folder in folders)
