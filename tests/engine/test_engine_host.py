"""What the process that engines come from is given of this one's environment."""

from __future__ import annotations

import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from megarl.config import from_dict
from megarl.engine.engine_host import HostProcess
from megarl.engine.sglang_engine import secret_variables


def test_engines_are_given_no_secret_and_nothing_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    value: dict[str, str] = {}

    class Started(subprocess.Popen[bytes]):
        def __init__(self, *_: Any, env: dict[str, str], **__: Any) -> None:
            value.update(env)
            super().__init__(["sleep", "600"])

    monkeypatch.setattr(subprocess, "Popen", Started)
    secret = ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "my_password", "SLACK_WEBHOOK", "TOKEN", "JUDGE")
    plain = ("TOKENIZERS_PARALLELISM", "KEYBOARD", "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG")
    for name in (*secret, *plain, "RANK", "MASTER_ADDR"):
        monkeypatch.setenv(name, "1")
    host = HostProcess({"OWN": "2"}, preload=False, hidden={"JUDGE"})
    host.close()
    assert value["OWN"] == "2" and all(value[name] == "1" for name in plain)
    assert not {*secret, "RANK", "MASTER_ADDR"} & value.keys()


def test_variables_that_a_configuration_names_are_secret() -> None:
    roles = {"reward": {"backend": "http", "options": {"url": "http://a", "auth_env": "JUDGE"}}, "actor": {}}
    config = from_dict({"roles": roles, "track": {"webhook": "env:HOOK"}})
    assert secret_variables(config) == {"JUDGE", "HOOK"}
    assert secret_variables(from_dict({"track": {"webhook": "https://hooks.example.com/x"}})) == set()


def test_a_host_that_ends_time_and_again_is_given_up(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Ends(subprocess.Popen[bytes]):
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__(["sh", "-c", "exit 3"])

    monkeypatch.setattr(subprocess, "Popen", Ends)
    host = HostProcess({}, preload=False)
    deadline = time.monotonic() + 20
    while Path(host.path).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    with pytest.raises(OSError), socket.socket(socket.AF_UNIX) as rank:
        rank.connect(host.path)
    host.close()
    said = capfd.readouterr().err.splitlines()
    who = "the engine host process"
    again = [f"{who} ended (exit status 3) and is restarted"] * 3
    assert said == [*again, f"{who} ended 4 times within 60 s each, and is not restarted"]
    assert not Path(host.path).parent.exists()
