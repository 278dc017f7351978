"""PF-PPO: which samples are relied on, and that the batch is filled up from the buffer of earlier ones."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from played import Played, one  # noqa: E402

from megarl.config import ConfigError, from_dict  # noqa: E402
from megarl.controllers.controller import load_requirements, make_controller  # noqa: E402
from megarl.controllers.pf_ppo import reliable_mask  # noqa: E402
from megarl.types import LOCAL, Prompt, Rollouts  # noqa: E402

pytestmark = pytest.mark.alone


def draw() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def test_the_best_and_the_worst_of_a_prompt_always_stay() -> None:
    rewards = [[0.0, 0.5, 1.0, 1.0], [2.0, 3.0, 4.0, 3.5], [1.0, 1.0, 1.0, 1.0]]
    rollouts = Rollouts.gather([one(group, reward) for group, result in enumerate(rewards) for reward in result])
    retained = reliable_mask(rollouts, 1.0, draw()).tolist()
    assert retained == [True, False, True, True, True, False, True, False, True, True, True, True]
    assert bool(reliable_mask(rollouts, 0.0, draw()).all())


def test_of_the_others_the_share_is_left_out() -> None:
    rollouts = Rollouts.gather([one(0, float(reward)) for reward in range(2002)])
    left_out = 1 - reliable_mask(rollouts, 0.8, draw()).double().mean()
    assert abs(float(left_out) - 0.8 * 2000 / 2002) < 0.03
    assert torch.equal(reliable_mask(rollouts, 0.8, draw()), reliable_mask(rollouts, 0.8, draw()))


def test_a_batch_is_filled_up_from_the_buffer(tmp_path: Path) -> None:
    options = {"drop_prob": 1.0, "buffer_size": 6}
    config = from_dict({"algorithm": "pf_ppo", "kl": {"apply_to": "none"}, "options": options})
    controller: Any = make_controller(config)
    prompts = [Prompt("a", ()), Prompt("b", ())]
    generation = [[0.0, 0.5, 1.0], [3.0, 2.0, 2.5]]

    first = controller.step(Played(config, [generation]), prompts)
    assert first.batch.sequence_reward.tolist() == [0.0, 1.0, 3.0, 2.0]  # there is nothing older yet
    assert first.metrics["rollout/filtered_frac"] == pytest.approx(1 / 3) and first.metrics["rollout/buffer_size"] == 4
    second = controller.step(Played(config, [generation]), prompts)
    older, fresh = second.batch.sequence_reward[:2].tolist(), second.batch.sequence_reward[2:].tolist()
    assert len(set(older) & {0.0, 1.0, 2.0, 3.0}) == 2 and fresh == [0.0, 1.0, 3.0, 2.0]
    assert second.metrics["rollout/buffer_size"] == 6  # the oldest two are gone

    written = controller.save()(tmp_path)
    assert [path.relative_to(tmp_path).parts[0] for path in written] == ["buffer"]
    restored: Any = make_controller(config)
    restored.restore(tmp_path, LOCAL)
    restored.load_state_dict(controller.state_dict())
    assert restored.buffer._rollouts.local == controller.buffer._rollouts.local and len(restored.buffer) == 6
    third, again = (one.step(Played(config, [generation]), prompts) for one in (controller, restored))
    assert third.batch.sequence_reward.tolist() == again.batch.sequence_reward.tolist()
    assert torch.equal(third.batch.tokens, again.batch.tokens)


def test_sampling_that_is_cut_off_is_refused() -> None:
    with pytest.raises(ConfigError, match="^algorithm=pf_ppo with truncated sampling"):
        load_requirements(from_dict({"algorithm": "pf_ppo", "rollout": {"top_p": 0.9}}))


def test_an_empty_buffer_writes_nothing(tmp_path: Path) -> None:
    controller = make_controller(from_dict({"algorithm": "pf_ppo"}))
    assert controller.save()(tmp_path) == {}
    controller.restore(tmp_path, LOCAL)
