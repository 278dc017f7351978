"""Episodes of agents that run in their own processes and reach a scripted policy through OpenAI's client."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted import CONFIG, PROMPT, TOKENIZER, DeterministicPolicy, ScriptedPolicy, begin_rollout, call, parse

from megarl.chat_format.chat_template import ChatTemplate
from megarl.config import RolloutConfig
from megarl.environments.catalog import load_catalog
from megarl.environments.process_sessions import EnvironmentPool
from megarl.rollout.conversation import Deadline, RolloutContext, build_sampling_params
from megarl.rollout.group_queue import GroupQueue
from megarl.rollout.partial_rollouts import PartialRollout
from megarl.rollout.request_gate import RequestGate
from megarl.rollout.scheduler import AgentEpisode, gather_rollouts
from megarl.rollout.session_server import SessionServer
from megarl.rollout.session_server.recording import SessionMetrics
from megarl.types import Prompt, Reward, RewardFailure, Rollout, Rollouts

BLACK_BOX = f"{sys.executable} {Path(__file__).parent.parent / 'subprocess_agent.py'}"
AGENTS = ("calculating", "branching", "odd")
SPECS = (*(f"example_agents:{name}" for name in AGENTS), f"program:{BLACK_BOX}")
CATALOG = load_catalog(RolloutConfig(environments=SPECS))
CHAT = ChatTemplate(TOKENIZER, environments=CATALOG.environments)
PARAMS = build_sampling_params(CONFIG, CHAT, greedy=False, seed=0)


def task(environment: str, truth: Any = 3) -> Prompt:
    return replace(PROMPT, ground_truth=truth, extra={"environment": environment})


def run_agents(prompts: list[Prompt], policy: Any, samples: int = 1, seconds: float = 60.0) -> list[Rollout]:
    async def run() -> list[Rollout]:
        server = SessionServer(CHAT, parse, CONFIG)
        await server.start()

        async def get_server() -> SessionServer:
            return server

        async with aclosing(EnvironmentPool(CATALOG, 60.0, 2)) as sessions, aclosing(server):
            context = RolloutContext(CHAT, sessions, parse, CONFIG, get_session_server=get_server)
            deadline = asyncio.get_running_loop().time() + seconds
            kwargs: dict[str, Any] = {"samples": samples, "greedy": False, "seed": 0, "deadline": deadline}
            result = await gather_rollouts(prompts, GroupQueue(len(prompts)), policy, context, **kwargs)
            return result.rollouts

    return asyncio.run(run())


@pytest.mark.parametrize("agent", ["calculating", BLACK_BOX])
def test_agent_calls_its_own_tool_and_returns_its_reward(agent: str) -> None:
    script = ScriptedPolicy(call("1+2"), "The answer is 3.")
    (rollout,) = run_agents([task(agent)], script)
    assert rollout.status == "stop" and rollout.episode == -1
    parts = {"right": 1.0} if agent == BLACK_BOX else {}
    assert rollout.env_reward == Reward(1.0, parts)
    assert [message["role"] for message in rollout.messages] == ["user", "assistant", "tool", "assistant"]
    assert rollout.messages[2]["content"] == "3"
    first, second = (requested for requested, _ in script.requests)
    assert second[: len(first)] == first and rollout.token_ids.tolist()[: len(second)] == second
    assert [turn.is_action for turn in rollout.turns] == [False, True, False, True]


def test_branches_of_an_agent_form_one_episode() -> None:
    result = run_agents([task("branching")], ScriptedPolicy("one", "two", "three"), samples=2)
    assert [rollout.episode for rollout in result] == [0, 0, 1, 1]
    for first, last in (result[:2], result[2:]):
        assert (
            first.env_reward is None and isinstance(last.env_reward, Reward) and last.env_reward.parts == {"said": 3.0}
        )
        assert [turn.is_action for turn in first.turns] == [False, True, False, True]
        assert [turn.is_action for turn in last.turns] == [False, True]
    assert len(Rollouts.gather(result, [0] * 4).episodes) == 2


@pytest.mark.parametrize(
    ("behavior", "failure"),
    [
        ("asks nothing", "made no request"),
        ("raises", "odd: it raised ValueError: it is odd"),
        ("leaves", "odd: its process ended with exit status 3"),
    ],
)
def test_failing_agent_aborts_only_its_own_rollout(behavior: str, failure: str) -> None:
    failed, succeeded = run_agents([task("odd", behavior), task("odd", "fine")], ScriptedPolicy("x"))
    assert failed.status == "aborted" and failure in failed.failure and failed.env_reward is None
    assert succeeded.status == "stop" and succeeded.env_reward == Reward(0.5)
    assert bool(failed.num_actions) == (behavior != "asks nothing")


def test_hanging_agent_is_aborted_at_the_deadline() -> None:
    failed, succeeded = run_agents([task("odd", "hangs"), task("odd", "fine")], ScriptedPolicy("x"), seconds=15.0)
    assert failed.status == "aborted" and "rollout.step_timeout" in failed.failure and failed.num_actions
    assert succeeded.env_reward == Reward(0.5)


@pytest.mark.parametrize(("behavior", "reward"), [("nothing", None), ("text", "text"), ("nan", "nan")])
def test_missing_or_invalid_reward_of_an_agent(behavior: str, reward: str | None) -> None:
    (rollout,) = run_agents([task("odd", behavior)], ScriptedPolicy("x"))
    assert rollout.status == "stop"
    if reward is None:
        assert rollout.env_reward is None
    else:
        assert isinstance(rollout.env_reward, RewardFailure) and "it must return a" in rollout.env_reward.reason


def run_through_syncs(prompt: Prompt, stops_after: Sequence[int] = ()) -> tuple[PartialRollout, SessionMetrics]:
    """Run an agent through weight syncs, each after this many further tokens of the policy."""

    async def run() -> tuple[PartialRollout, SessionMetrics]:
        server = SessionServer(CHAT, parse, CONFIG)
        await server.start()

        async def get_server() -> SessionServer:
            return server

        stops = [*accumulate(stops_after), -1]
        policy = DeterministicPolicy(waits_after=stops[0])
        gate = RequestGate(policy, 1)
        deadline = Deadline(asyncio.get_running_loop().time() + 60.0)
        async with aclosing(EnvironmentPool(CATALOG, 60.0, 2)) as pool, aclosing(server):
            context = RolloutContext(CHAT, pool, parse, CONFIG, get_session_server=get_server)
            episode = AgentEpisode(begin_rollout(prompt, chat=CHAT), gate.open_slot(), context, PARAMS)
            running = asyncio.create_task(episode.run(deadline))
            for version, next_stop in enumerate(stops[1:], 1):
                await policy.waits.wait()
                deadline.suspend()
                await gate.pause("retract")
                assert policy.num_running == 0 and not running.done()
                policy.waits.clear()
                policy.weight_version, policy.waits_after = version, next_stop
                deadline.resume()
                gate.reopen()
            return await running, server.metrics

    return asyncio.run(run())


def test_agent_continues_after_weight_syncs() -> None:
    """It equals an undisturbed one, and newer weights record again what they read again."""
    prompt = task("branching")
    undisturbed, _ = run_through_syncs(prompt)
    interrupted, metrics = run_through_syncs(prompt, (3, 7, 5))
    assert (metrics.sessions, metrics.requests, metrics.failed) == (1, 3, 0)
    expected, actual = ([*item.earlier_branches, item] for item in (undisturbed, interrupted))
    assert len(expected) == len(actual) == 2
    for first, second in zip(expected, actual, strict=True):
        assert [turn.token_ids.tolist() for turn in first.turns] == [turn.token_ids.tolist() for turn in second.turns]
        assert second.status == first.status and second.messages == first.messages
        newest = [turn.weight_version for turn in second.turns if turn.is_action][-1]
        record = torch.cat(second.routing)[:, 0].tolist()
        assert record == [[position, newest] for position in range(second.num_tokens - 1)]
    assert interrupted.env_reward == undisturbed.env_reward and interrupted.env_reward is not None
    spans = [span for branch in actual for turn in branch.turns if turn.is_action for span in turn.version_spans]
    tokens = [sum(count for version, count in spans if version == number) for number in range(4)]
    assert tokens[:3] == [3, 7, 5] and tokens[3] > 0
