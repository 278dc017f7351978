"""Which kind of engine a configuration names."""

from __future__ import annotations

import pytest

from megarl.config import ConfigError, from_dict
from megarl.engine.engine_backends import engine_backend
from megarl.engine.sglang.sglang_backend import SGLangBackend
from megarl.parallel.placement import is_engine_role
from megarl.parallel.policy_configs import policy_config

pytestmark = pytest.mark.alone


class LabBackend(SGLangBackend):
    title = "Lab"


def test_a_fork_names_its_own_engine() -> None:
    assert type(engine_backend(from_dict({}))) is SGLangBackend
    settings = {"rollout": {"engine": f"{__name__}:LabBackend"}}
    assert engine_backend(from_dict(settings)).title == "Lab"
    roles = {"judge": {"backend": "sglang", "model": "/judge"}}
    config = from_dict({**settings, "roles": roles})
    assert is_engine_role(config, "judge") and type(engine_backend(policy_config(config, "judge"))) is SGLangBackend


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sglan", "rollout.engine=sglan: no such engine; set it to sglang, vllm, or to module:name"),
        ("nowhere:Backend", "rollout.engine: cannot import nowhere"),
        (f"{__name__}:Missing", "has no 'Missing'; it has LabBackend"),
    ],
)
def test_unknown_engines_are_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_backend(from_dict({"rollout": {"engine": name}}))
