"""PF-PPO: which samples are reliable, and that the replay buffer fills the batch."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from scripted_flow import ScriptedFlow, scripted_rollout  # noqa: E402

from megarl.config import from_dict  # noqa: E402
from megarl.controllers.controller import make_controller  # noqa: E402
from megarl.controllers.pf_ppo import reliable_mask  # noqa: E402
from megarl.types import LOCAL, Prompt, Rollouts, SamplingMask  # noqa: E402

pytestmark = pytest.mark.alone


def make_generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def test_best_and_worst_of_a_group_are_always_kept() -> None:
    rewards = [[0.0, 0.5, 1.0, 1.0], [2.0, 3.0, 4.0, 3.5], [1.0, 1.0, 1.0, 1.0]]
    rollouts = Rollouts.gather(
        [scripted_rollout(group, reward) for group, result in enumerate(rewards) for reward in result]
    )
    mask = reliable_mask(rollouts, 1.0, make_generator()).tolist()
    assert mask == [True, False, True, True, True, False, True, False, True, True, True, True]
    assert bool(reliable_mask(rollouts, 0.0, make_generator()).all())


def test_other_samples_are_dropped_with_drop_prob() -> None:
    rollouts = Rollouts.gather([scripted_rollout(0, float(reward)) for reward in range(2002)])
    dropped_frac = 1 - reliable_mask(rollouts, 0.8, make_generator()).double().mean()
    assert abs(float(dropped_frac) - 0.8 * 2000 / 2002) < 0.03
    assert torch.equal(reliable_mask(rollouts, 0.8, make_generator()), reliable_mask(rollouts, 0.8, make_generator()))


def test_batch_is_filled_from_the_replay_buffer(tmp_path: Path) -> None:
    options = {"drop_prob": 1.0, "buffer_size": 6}
    config = from_dict({"algorithm": "pf_ppo", "kl": {"apply_to": "none"}, "options": options})
    controller: Any = make_controller(config)
    prompts = [Prompt("a", ()), Prompt("b", ())]
    generation = [[0.0, 0.5, 1.0], [3.0, 2.0, 2.5]]

    first = controller.step(ScriptedFlow(config, [generation]), prompts)
    assert first.batch.sequence_reward.tolist() == [0.0, 1.0, 3.0, 2.0]  # the buffer is empty
    assert first.metrics["rollout/filtered_frac"] == pytest.approx(1 / 3) and first.metrics["rollout/buffer_size"] == 4
    second = controller.step(ScriptedFlow(config, [generation]), prompts)
    replayed, sampled = second.batch.sequence_reward[:2].tolist(), second.batch.sequence_reward[2:].tolist()
    assert len(set(replayed) & {0.0, 1.0, 2.0, 3.0}) == 2 and sampled == [0.0, 1.0, 3.0, 2.0]
    assert second.metrics["rollout/buffer_size"] == 6  # the oldest two were evicted

    written = controller.save()(tmp_path)
    assert [path.relative_to(tmp_path).parts[0] for path in written] == ["buffer"]
    restored: Any = make_controller(config)
    restored.restore(tmp_path, LOCAL)
    restored.load_state_dict(controller.state_dict())
    assert restored.buffer._rollouts.local == controller.buffer._rollouts.local and len(restored.buffer) == 6
    next_result, after_restore = (
        item.step(ScriptedFlow(config, [generation]), prompts) for item in (controller, restored)
    )
    assert next_result.batch.sequence_reward.tolist() == after_restore.batch.sequence_reward.tolist()
    assert torch.equal(next_result.batch.tokens, after_restore.batch.tokens)


def test_buffer_keeps_sampling_masks(tmp_path: Path) -> None:
    config = from_dict({"algorithm": "pf_ppo", "rollout": {"top_p": 0.9, "top_k": 20}})
    mask = SamplingMask.from_rows([[1, 3], [4]])
    rollout = replace(scripted_rollout(0, 1.0), sampling_mask=mask)
    controller, restored = make_controller(config), make_controller(config)
    controller.buffer.add(Rollouts.gather([rollout]))  # type: ignore[attr-defined]
    controller.save()(tmp_path)
    restored.restore(tmp_path, LOCAL)
    (read,) = restored.buffer.sample(1, make_generator()).local  # type: ignore[attr-defined]
    assert read.sampling_mask.ids.tolist() == [1, 3, 4] and read.sampling_mask.counts.tolist() == [2, 1]


def test_empty_buffer_saves_nothing(tmp_path: Path) -> None:
    controller = make_controller(from_dict({"algorithm": "pf_ppo"}))
    assert controller.save()(tmp_path) == {}
    controller.restore(tmp_path, LOCAL)
