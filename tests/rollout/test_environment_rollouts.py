"""Conversations of a scripted policy with environments: reset, tools, rewards, and resuming from a checkpoint."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from scripted import CONFIG, END, TOKENIZER, ScriptedPolicy, ids, make_generation, parse, write_and_read

from megarl.chat_format.chat_template import ChatTemplate
from megarl.config import RolloutConfig
from megarl.environments.catalog import load_catalog
from megarl.environments.process_sessions import EnvironmentPool
from megarl.rollout.conversation import Conversation, Deadline, RolloutContext, run_conversation
from megarl.rollout.group_queue import GroupQueue
from megarl.rollout.partial_rollouts import PartialRollout
from megarl.rollout.scheduler import gather_rollouts
from megarl.types import Prompt, Reward, RewardFailure, Rollouts

pytestmark = pytest.mark.alone

USER = {"role": "user", "content": "Play."}
SPECS = ("toy_environments:Guess", "toy_environments:Odd", "toy_environments:Found", "toy_environments:Waits")
CATALOG = load_catalog(RolloutConfig(environments=SPECS))
CHAT = ChatTemplate(TOKENIZER, CATALOG.tools, environments=CATALOG.environments)


def prompt(ground_truth: Any, environment: str = "Guess") -> Prompt:
    return Prompt("p", (USER,), ground_truth=ground_truth, extra={"environment": environment})


def begin_rollout(task: Prompt) -> PartialRollout:
    return PartialRollout.begin(replace(task, token_ids=CHAT.encode_prompt(task)), 9)  # type: ignore[arg-type]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def converse(start: PartialRollout, *lines: Any, **config: Any) -> tuple[PartialRollout, ScriptedPolicy]:
    policy = ScriptedPolicy(*lines)

    async def run() -> PartialRollout:
        async with aclosing(EnvironmentPool(CATALOG, 60.0, 2)) as sessions:
            context = RolloutContext(CHAT, sessions, parse, replace(CONFIG, **config))
            return await run_conversation(start, policy, context, {})

    return asyncio.run(run()), policy


def test_renders_the_prompt_after_reset_and_rewards_at_the_end() -> None:
    task = prompt(62)
    done, policy = converse(begin_rollout(task), call("guess", number=50), call("guess", number=62), "62")
    messages = (USER, {"role": "user", "content": "I think of a number from 1 to 100."})
    rendered = CHAT.encode_prompt(replace(task, messages=messages))
    assert policy.requests[0][0] == rendered and done.turns[0].token_ids.tolist() == rendered
    assert done.prompt.messages == messages and done.prompt.token_ids is done.turns[0].token_ids
    assert done.original_prompt is not None and done.original_prompt.messages == (USER,)
    rollout = done.to_rollout(0)
    assert rollout.status == "stop" and rollout.tool_calls == 2 and rollout.tool_errors == 0
    assert rollout.env_reward == Reward(1.0, {"tries": 2.0}, (-0.01,) * 3)
    assert [message["content"] for message in rollout.messages if message["role"] == "tool"] == ["higher", "right"]
    assert done.session is None


def test_reset_without_changes_shares_the_prompt_tokens() -> None:
    start = begin_rollout(prompt("fine", "Odd"))
    done, _ = converse(start, "bye")
    assert done.prompt is start.prompt and done.original_prompt is None and done.env_reward == Reward(0.25)
    assert done.turns[0].token_ids is start.turns[0].token_ids


def test_prompt_lists_tools_discovered_at_reset() -> None:
    start = begin_rollout(prompt(["look"], "Found"))
    assert "look" not in CHAT.decode(start.token_ids)
    done, _ = converse(start, call("look", x="y"), "bye")
    assert '"look"' in CHAT.decode(done.turns[0].token_ids) and done.tool_errors == 0
    assert done.messages[2]["content"] == "look of {'x': 'y'}" and done.env_reward is None


@pytest.mark.parametrize(
    ("task", "lines", "failure", "turns"),
    [
        (prompt("reset raise", "Odd"), ["x"], "Odd: reset raised ValueError: it is odd", 1),
        (prompt("fine", "Odd"), [call("act", behavior="die"), "x"], "Odd: the tool act: its process ended", 2),
        (prompt("reset assistant", "Odd"), ["x"], "end with the assistant's", 1),
        (prompt("reset long", "Odd"), ["x"], "tokens after reset, which leaves no room in rollout.max_context=1000", 1),
    ],
)
def test_failing_environment_aborts_its_conversation(task: Prompt, lines: list[str], failure: str, turns: int) -> None:
    done, _ = converse(begin_rollout(task), *lines)
    assert done.status == "aborted" and failure in done.failure and len(done.turns) == turns
    assert done.env_reward is None and done.session is None
    done.to_rollout(0)


def test_tool_errors_and_control_tokens_reach_the_policy_as_plain_text() -> None:
    done, policy = converse(
        begin_rollout(prompt("fine", "Odd")), call("act", behavior="controls"), call("act", behavior="raise"), "bye"
    )
    assert (done.status, done.tool_calls, done.tool_errors) == ("stop", 2, 1)
    frame = CHAT.encode_continuation([{"role": "tool", "name": "f", "tool_call_id": "f", "content": "0"}])
    assert list(done.turns[2].token_ids).count(END) == frame.count(END)
    assert "it is odd in two lines" in CHAT.decode(done.turns[4].token_ids)
    assert policy.requests[1][0] == [*done.turns[0].token_ids, *done.turns[1].token_ids, *done.turns[2].token_ids]


def test_failing_reward_is_recorded_as_a_failure() -> None:
    done, _ = converse(begin_rollout(prompt("reward nan", "Odd")), "bye")
    assert done.status == "stop" and isinstance(done.env_reward, RewardFailure) and "finite" in done.env_reward.reason


def test_conversation_read_from_a_file_starts_a_new_session() -> None:
    async def run() -> PartialRollout:
        """Return a game after one guess, in the middle of the next turn."""
        async with aclosing(EnvironmentPool(CATALOG, 60.0, 2)) as sessions:
            context = RolloutContext(CHAT, sessions, parse, CONFIG)
            policy = ScriptedPolicy(call("guess", number=1), "never read")
            conversation = Conversation(begin_rollout(prompt(62)), policy, context, {})
            running = asyncio.create_task(conversation.run(Deadline()))
            while not conversation.state.tool_calls:
                await asyncio.sleep(0.001)
            partial = conversation.with_tokens([make_generation("6", finish="abort")])
            running.cancel()
            await asyncio.wait([running])
            return partial

    middle = asyncio.run(run())
    assert middle.status is None and middle.session is not None and middle.tool_calls == 1
    read = write_and_read(middle)
    assert read.session is None and read.original_prompt == middle.original_prompt and read.prompt == middle.prompt
    resumed, policy = converse(read, "62")
    assert policy.requests[0][0] == middle.turns[0].token_ids.tolist()
    assert resumed.env_reward == Reward(1.0, {"tries": 0.0}, (-0.01,))


@pytest.mark.parametrize("verdict", [None, RewardFailure("why"), Reward(1.0, {"a": 2.0}, (0.5,))])
def test_partial_rollout_files_keep_rewards(verdict: Any) -> None:
    assert write_and_read(replace(begin_rollout(prompt(1)), env_reward=verdict)).env_reward == verdict


def test_samples_of_a_group_may_differ_in_prompt() -> None:
    """Metrics, batches and logs take each rollout's first turn as its prompt."""

    async def run() -> Any:
        async with aclosing(EnvironmentPool(CATALOG, 60.0, 4)) as sessions:
            tasks = [prompt(1), prompt("fine", "Odd")]
            context = RolloutContext(CHAT, sessions, parse, CONFIG)
            return await gather_rollouts(
                tasks, GroupQueue(2), ScriptedPolicy("1"), context, samples=2, greedy=False, seed=1, deadline=None
            )

    rollouts = Rollouts.gather(asyncio.run(run()).rollouts)
    assert rollouts.group.tolist() == [0, 0, 1, 1]
    assert rollouts.prompt_length.tolist() == [len(item.prompt.token_ids) for item in rollouts.local]
    assert [item.env_reward for item in rollouts.local][2:] == [Reward(0.25)] * 2
    first, second = rollouts.local[:2]
    assert first.prompt == second.prompt and len(ids("1")) + 1 == first.num_actions
