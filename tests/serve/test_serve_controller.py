"""Configurations that the service cannot run with fail before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.config import ConfigError, from_dict
from megarl.controllers.controller import load_requirements
from megarl.serve.serve_controller import KEY_VARIABLE

ALGORITHM = "megarl.serve.serve_controller:ServeController"


def test_needs_an_actor_and_engines() -> None:
    assert load_requirements(from_dict({"algorithm": ALGORITHM})).roles == ("actor", "rollout")


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"options": {"host": "0.0.0.0"}}, f"options.host=0.0.0.0 is open to other machines; set {KEY_VARIABLE}"),
        ({"options": {"port": 70000}}, "options.port"),
        ({"options": {"loss_aliases": {"x": "grpo"}}}, "options.loss_aliases: grpo is none of this server's losses"),
        ({"options": {"loss_aliases": {"ppo": "cispo"}}}, "options.loss_aliases: ppo is a loss of this server"),
        ({"actor_optimizer": {"type": "muon"}}, "actor_optimizer.type=muon: clients send the settings of Adam"),
        ({"rollout": {"engine": "vllm"}}, "rollout.engine=vllm: serve samples by SGLang's interface alone"),
        ({"rollout": {"asynchronous": True}}, "rollout.asynchronous=false"),
        ({"train": {"routing_replay": True}}, "train.routing_replay"),
        (
            {"parallel": {"world_size": 2}, "placement": {"actor": "1", "rollout": "0"}},
            "serve needs the actor on rank 0",
        ),
    ],
)
def test_refuses_what_it_cannot_serve(settings: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(ConfigError) as refused:
        load_requirements(from_dict({"algorithm": ALGORITHM, **settings}))
    assert text in str(refused.value)


def test_a_key_opens_the_service_to_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "tml-secret")
    load_requirements(from_dict({"algorithm": ALGORITHM, "options": {"host": "0.0.0.0"}}))
