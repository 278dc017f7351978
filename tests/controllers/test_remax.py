"""ReMax: the greedy response's reward is the baseline."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from scripted_flow import ScriptedFlow  # noqa: E402

from megarl.config import from_dict  # noqa: E402
from megarl.controllers.controller import load_requirements, make_controller  # noqa: E402
from megarl.types import Prompt, Rollouts  # noqa: E402

pytestmark = pytest.mark.alone

CONFIG = from_dict({"algorithm": "remax", "kl": {"apply_to": "none"}})


def test_greedy_reward_is_the_baseline() -> None:
    flow: Any = ScriptedFlow(CONFIG, [[[1.0, 0.0], [0.5, 3.0]]], [[[0.25], [1.0]]])
    result = make_controller(CONFIG).step(flow, [Prompt("a", ()), Prompt("b", ())])
    assert result.batch is not None and result.batch.advantages is not None
    actions = result.batch.advantages[result.batch.loss_mask].tolist()
    assert actions == [0.75, 0.75, -0.25, -0.25, -0.5, -0.5, 2.0, 2.0]
    assert result.metrics["rollout/reward_greedy"] == 0.625
    assert result.rollouts is not None and len(result.rollouts) == 4  # without the greedy ones


def test_kl_to_go_is_subtracted() -> None:
    """A_t = r - r_greedy - coef sum_{i >= t} KL_i."""
    config = from_dict({"algorithm": "remax", "kl": {"coef": 0.1, "target": None}})
    flow: Any = ScriptedFlow(config, [[[1.0, 0.0]]], [[[0.25]]])
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        flow.policy.table += torch.randn(flow.policy.table.shape, generator=draw)
    result = make_controller(config).step(flow, [Prompt("a", ())])
    batch = result.batch
    assert batch is not None and batch.advantages is not None
    assert batch.trainer_logprobs is not None and batch.ref_logprobs is not None
    kl = (batch.trainer_logprobs - batch.ref_logprobs)[batch.loss_mask].view(2, 2)
    assert bool((kl.abs() > 0.01).all())
    to_go = kl + torch.stack([kl[:, 1], torch.zeros(2)], dim=1)
    expected = torch.tensor([[0.75], [-0.25]]) - 0.1 * to_go
    torch.testing.assert_close(batch.advantages[batch.loss_mask].view(2, 2), expected)


def test_prompts_with_aborted_greedy_rollouts_are_dropped() -> None:
    flow: Any = ScriptedFlow(CONFIG, [[[1.0, 0.0], [None, 3.0]]], [[[None], [1.0]]])
    result = make_controller(CONFIG).step(flow, [Prompt("a", ()), Prompt("b", ())])
    assert result.batch is not None and result.batch.advantages is not None
    assert result.batch.group.tolist() == [1] and result.batch.advantages[result.batch.loss_mask].tolist() == [2.0, 2.0]


def test_prompts_with_unscored_greedy_rollouts_are_dropped() -> None:
    """A failed reward is not a baseline of 0."""

    class Failing(ScriptedFlow):
        def score(self, rollouts: Rollouts) -> Rollouts:
            first = len(rollouts) == 2  # the greedy rollouts
            return rollouts.replace_local(
                [replace(item, unscored={"a": "why"}) if first and item.group == 0 else item for item in rollouts.local]
            )

    flow: Any = Failing(CONFIG, [[[1.0, 0.0], [0.5, 3.0]]], [[[0.0], [1.0]]])
    result = make_controller(CONFIG).step(flow, [Prompt("a", ()), Prompt("b", ())])
    assert result.batch is not None and result.batch.group.tolist() == [1, 1]
    assert result.metrics["rollout/reward_greedy"] == 1.0


def test_one_sample_per_prompt_suffices() -> None:
    assert not load_requirements(CONFIG).is_group_relative
