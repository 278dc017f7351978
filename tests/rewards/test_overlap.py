"""Rewards overlap with generation: a finished conversation is scored while others still generate."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from scripted import CHAT, CONFIG, PROMPT, ScriptedPolicy, parse

from megarl.engine.engine_protocol import NOT_RECORDED, Generation, RecordedPrefix  # noqa: E402
from megarl.environments.process_sessions import EnvironmentPool  # noqa: E402
from megarl.rewards.functions import load_functions  # noqa: E402
from megarl.rewards.reward_pool import RewardPool  # noqa: E402
from megarl.rollout.conversation import RolloutContext  # noqa: E402
from megarl.rollout.group_queue import GroupQueue  # noqa: E402
from megarl.rollout.scheduler import GenerationResult, gather_rollouts  # noqa: E402
from megarl.types import Prompt  # noqa: E402
from megarl.types.reward_values import Reward  # noqa: E402
from megarl.workers.reward import RewardPrefetch  # noqa: E402

pytestmark = pytest.mark.alone


class WaitForFirstReward(ScriptedPolicy):
    """Finish the second response only after the first was scored, which creates `scored_file`."""

    def __init__(self, scored_file: Path) -> None:
        super().__init__("3")
        self.scored_file, self.waited = scored_file, 0

    async def generate(
        self,
        context: Sequence[int],
        params: dict[str, Any],
        recorded: RecordedPrefix = NOT_RECORDED,
        on_tokens: Any = None,
    ) -> Generation:
        first = not self.requests
        answer = await super().generate(context, params, recorded)
        while not first and not self.scored_file.exists():
            self.waited += 1
            await asyncio.sleep(0.01)
        return answer


def test_scores_a_finished_response_while_another_generates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    scored_file, specs = tmp_path / "scored", ["misbehaving_rewards:misbehave"]
    pool = RewardPool(load_functions(specs), specs, 60.0, 1, tmp_path / "rewards.log")
    prefetch = RewardPrefetch(pool.submit)
    prompts = [Prompt(f"touch/{scored_file}", PROMPT.messages), Prompt("routing", PROMPT.messages)]
    policy, sessions = WaitForFirstReward(scored_file), EnvironmentPool(CHAT.catalog, 60.0, 1)

    async def run() -> GenerationResult:
        around = RolloutContext(CHAT, sessions, parse, CONFIG, on_rollout_finished=prefetch.on_rollout_finished)
        deadline = asyncio.get_running_loop().time() + 300
        group_queue = GroupQueue(len(prompts))
        return await gather_rollouts(
            prompts, group_queue, policy, around, samples=1, greedy=False, seed=1, first_group=4, deadline=deadline
        )

    try:
        rollouts = asyncio.run(run()).rollouts
        assert [rollout.status for rollout in rollouts] == ["stop", "stop"], "the first response was never scored"
        result = [prefetch.pop(rollout)[0] for rollout in rollouts]
        assert [item.result(60) for item in result] == [{"misbehave": Reward(1.0)}] * 2
        assert not prefetch._pending
    finally:
        pool.close()


def test_skips_the_callback_for_aborted_rollouts() -> None:
    """The deadline aborts one of two rollouts; only the other reaches `on_rollout_finished`."""
    events: list[str] = []

    class SlowSecondResponse(ScriptedPolicy):
        async def generate(
            self,
            context: Sequence[int],
            params: dict[str, Any],
            recorded: RecordedPrefix = NOT_RECORDED,
            on_tokens: Any = None,
        ) -> Generation:
            if self.requests:
                await asyncio.sleep(600)
            return await super().generate(context, params, recorded)

    sessions = EnvironmentPool(CHAT.catalog, 60.0, 1)

    async def run() -> GenerationResult:
        around = RolloutContext(
            CHAT, sessions, parse, CONFIG, on_rollout_finished=lambda rollout: events.append(rollout.status)
        )
        deadline = asyncio.get_running_loop().time() + 3.0
        return await gather_rollouts(
            [PROMPT], GroupQueue(1), SlowSecondResponse("3"), around, samples=2, greedy=False, seed=1, deadline=deadline
        )

    rollouts = asyncio.run(run()).rollouts
    assert sorted(rollout.status for rollout in rollouts) == ["aborted", "stop"] and events == ["stop"]
