"""What the process that engines come from is given of this one's environment."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import pytest

from megarl.config import from_dict
from megarl.rollout.hosting import Host, secret_variables


def test_engines_are_given_no_secret_and_nothing_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, str] = {}

    def started(*_: Any, env: dict[str, str], **__: Any) -> None:
        given.update(env)

    monkeypatch.setattr(subprocess, "Popen", started)
    secret = ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "my_password", "SLACK_WEBHOOK", "TOKEN", "JUDGE")
    plain = ("TOKENIZERS_PARALLELISM", "KEYBOARD", "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG")
    for name in (*secret, *plain, "RANK", "MASTER_ADDR"):
        monkeypatch.setenv(name, "1")
    host = Host({"OWN": "2"}, preload=False, hidden={"JUDGE"})
    shutil.rmtree(host._folder)
    assert given["OWN"] == "2" and all(given[name] == "1" for name in plain)
    assert not {*secret, "RANK", "MASTER_ADDR"} & given.keys()


def test_variables_that_a_configuration_names_are_secret() -> None:
    roles = {"reward": {"backend": "http", "options": {"url": "http://a", "auth_env": "JUDGE"}}, "actor": {}}
    config = from_dict({"roles": roles, "track": {"webhook": "env:HOOK"}})
    assert secret_variables(config) == {"JUDGE", "HOOK"}
    assert secret_variables(from_dict({"track": {"webhook": "https://hooks.example.com/x"}})) == set()
