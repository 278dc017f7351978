"""Conversations of a scripted policy with environments: rendered after reset, rated at the end, kept while stopped."""

from __future__ import annotations

import asyncio
import json
import tempfile
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted import CONFIG, END, TOKENIZER, Script, ids, parse, said

from megarl.chat_format.chat_template import ChatTemplate
from megarl.config import RolloutConfig
from megarl.engine.engine_protocol import Generation
from megarl.environments.catalog import load_catalog
from megarl.environments.process_sessions import EnvironmentPool
from megarl.rollout.conversation import RolloutContext, run_conversation
from megarl.rollout.group_queue import GroupQueue
from megarl.rollout.partial_rollouts import PartialRollout, read_groups, write_groups
from megarl.rollout.scheduler import gather_rollouts
from megarl.types import Prompt, Reward, RewardFailure, Rollouts

pytestmark = pytest.mark.alone

USER = {"role": "user", "content": "Play."}
SPECS = ("odd_worlds:Guess", "odd_worlds:Odd", "odd_worlds:Found", "odd_worlds:Waits")
KNOWN = load_catalog(RolloutConfig(environments=SPECS))
CHAT = ChatTemplate(TOKENIZER, KNOWN.tools, environments=KNOWN.environments)


def prompt(ground_truth: Any, environment: str = "Guess") -> Prompt:
    return Prompt("p", (USER,), ground_truth=ground_truth, extra={"environment": environment})


def begun(task: Prompt) -> PartialRollout:
    return PartialRollout.begin(replace(task, token_ids=CHAT.encode_prompt(task)), 9)  # type: ignore[arg-type]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def talk(start: PartialRollout, *lines: Any, **config: Any) -> tuple[PartialRollout, Script]:
    script = Script(*lines)

    async def run() -> PartialRollout:
        async with aclosing(EnvironmentPool(KNOWN, 60.0, 2)) as sessions:
            around = RolloutContext(CHAT, sessions, parse, replace(CONFIG, **config))
            return await run_conversation(start, script, around, {})

    return asyncio.run(run()), script


def test_a_game_is_rendered_after_reset_and_rated_at_the_end() -> None:
    task = prompt(62)
    done, script = talk(begun(task), call("guess", number=50), call("guess", number=62), "62")
    messages = (USER, {"role": "user", "content": "I think of a number from 1 to 100."})
    rendered = CHAT.encode_prompt(replace(task, messages=messages))
    assert script.asked[0][0] == rendered and done.turns[0].token_ids.tolist() == rendered
    assert done.prompt.messages == messages and done.prompt.token_ids is done.turns[0].token_ids
    assert done.original_prompt is not None and done.original_prompt.messages == (USER,)
    rollout = done.to_rollout(0)
    assert rollout.status == "stop" and rollout.tool_calls == 2 and rollout.tool_errors == 0
    assert rollout.env_reward == Reward(1.0, {"tries": 2.0}, (-0.01,) * 3)
    assert [message["content"] for message in rollout.messages if message["role"] == "tool"] == ["higher", "right"]
    assert done.session is None


def test_a_reset_that_changes_nothing_leaves_the_prompts_ids_shared() -> None:
    start = begun(prompt("fine", "Odd"))
    done, _ = talk(start, "bye")
    assert done.prompt is start.prompt and done.original_prompt is None and done.env_reward == Reward(0.25)
    assert done.turns[0].token_ids is start.turns[0].token_ids


def test_tools_found_at_run_time_are_in_the_prompt() -> None:
    start = begun(prompt(["look"], "Found"))
    assert "look" not in CHAT.decode(start.token_ids)
    done, _ = talk(start, call("look", x="y"), "bye")
    assert '"look"' in CHAT.decode(done.turns[0].token_ids) and done.tool_errors == 0
    assert done.messages[2]["content"] == "look of {'x': 'y'}" and done.env_reward is None


@pytest.mark.parametrize(
    ("task", "lines", "why", "turns"),
    [
        (prompt("reset raise", "Odd"), ["x"], "Odd: reset raised ValueError: it is odd", 1),
        (prompt("fine", "Odd"), [call("act", how="die"), "x"], "Odd: the tool act: its process ended", 2),
        (prompt("reset assistant", "Odd"), ["x"], "end with the assistant's", 1),
        (prompt("reset long", "Odd"), ["x"], "tokens after reset, which leaves no room in rollout.max_context=1000", 1),
    ],
)
def test_a_conversation_whose_environment_is_lost_is_aborted(
    task: Prompt, lines: list[str], why: str, turns: int
) -> None:
    done, _ = talk(begun(task), *lines)
    assert done.status == "aborted" and why in done.failure and len(done.turns) == turns
    assert done.env_reward is None and done.session is None
    done.to_rollout(0)


def test_what_a_tool_raises_or_writes_is_read_by_the_policy_and_is_no_turn() -> None:
    done, script = talk(begun(prompt("fine", "Odd")), call("act", how="controls"), call("act", how="raise"), "bye")
    assert (done.status, done.tool_calls, done.tool_errors) == ("stop", 2, 1)
    frame = CHAT.encode_continuation([{"role": "tool", "name": "f", "tool_call_id": "f", "content": "0"}])
    assert list(done.turns[2].token_ids).count(END) == frame.count(END)
    assert "it is odd in two lines" in CHAT.decode(done.turns[4].token_ids)
    assert script.asked[1][0] == [*done.turns[0].token_ids, *done.turns[1].token_ids, *done.turns[2].token_ids]


def test_a_reward_that_fails_leaves_a_rollout_without_one() -> None:
    done, _ = talk(begun(prompt("reward nan", "Odd")), "bye")
    assert done.status == "stop" and isinstance(done.env_reward, RewardFailure) and "finite" in done.env_reward.reason


class Halts(Script):
    """Is stopped in its second turn."""

    def __init__(self, *lines: Any) -> None:
        super().__init__(*lines)
        self.halt = asyncio.Event()

    async def generate(
        self, context: Any, params: dict[str, Any], routed: int = 0, on_tokens: Any = None
    ) -> Generation:
        if self.asked:
            self.halt.set()
        return await super().generate(context, params, routed)


def test_a_stop_in_the_middle_of_a_call_calls_nothing_twice() -> None:
    """And a stop in the middle of a turn keeps the session; one out of a checkpoint is begun anew."""
    halt = asyncio.Event()

    async def run() -> tuple[PartialRollout, PartialRollout, PartialRollout]:
        async with aclosing(EnvironmentPool(KNOWN, 60.0, 2)) as sessions:
            around = RolloutContext(CHAT, sessions, parse, CONFIG)
            script = Script(call("wait", seconds=0.3), "done")
            first = asyncio.create_task(
                run_conversation(begun(prompt(0, "Waits")), script, replace(around, halt=halt), {})
            )
            while len(script.asked) < 1:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            halt.set()
            stopped = await first
            ended = await run_conversation(stopped, script, around, {})
            # A game with a guess behind it, in another process of the run: its number of tries begins again.
            cut = Halts(call("guess", number=1), said("6", finish="abort"))
            middle = await run_conversation(begun(prompt(62)), cut, replace(around, halt=cut.halt), {})
            return stopped, ended, middle

    stopped, ended, middle = asyncio.run(run())
    assert (stopped.status, stopped.tool_calls, stopped.is_turn_complete) == (
        None,
        0,
        True,
    ) and stopped.session is not None
    assert (ended.status, ended.tool_calls, ended.tool_errors, ended.env_reward) == ("stop", 1, 0, Reward(1.0))
    assert middle.status is None and middle.session is not None and middle.tool_calls == 1
    read = read_back(middle)
    assert read.session is None and read.original_prompt == middle.original_prompt and read.prompt == middle.prompt
    again, script = talk(read, "62")
    assert script.asked[0][0] == middle.turns[0].token_ids.tolist()
    assert again.env_reward == Reward(1.0, {"tries": 0.0}, (-0.01,))


def test_a_reset_is_not_waited_for_where_all_are_to_stop() -> None:
    async def run() -> PartialRollout:
        async with aclosing(EnvironmentPool(KNOWN, 60.0, 2)) as sessions:
            halt = asyncio.Event()
            around = RolloutContext(CHAT, sessions, parse, CONFIG, halt)
            work = asyncio.create_task(run_conversation(begun(prompt("reset hang", "Odd")), Script("x"), around, {}))
            await asyncio.sleep(0.2)
            halt.set()
            return await asyncio.wait_for(work, 60.0)

    stopped = asyncio.run(run())
    assert stopped.status is None and stopped.session is None and len(stopped.turns) == 1


def read_back(partial: PartialRollout) -> PartialRollout:
    with tempfile.TemporaryDirectory() as folder:
        write_groups(Path(folder, "file"), [(partial,)])
        return read_groups(Path(folder, "file"))[0][0]


@pytest.mark.parametrize("verdict", [None, RewardFailure("why"), Reward(1.0, {"a": 2.0}, (0.5,))])
def test_a_verdict_is_recorded(verdict: Any) -> None:
    assert read_back(replace(begun(prompt(1)), env_reward=verdict)).env_reward == verdict


def test_samples_of_a_group_may_have_prompts_of_their_own() -> None:
    """Figures, batches and the log take each rollout's own first turn for its prompt."""

    async def run() -> Any:
        async with aclosing(EnvironmentPool(KNOWN, 60.0, 4)) as sessions:
            tasks = [prompt(1), prompt("fine", "Odd")]
            around = RolloutContext(CHAT, sessions, parse, CONFIG)
            return await gather_rollouts(tasks, GroupQueue(2), Script("1"), around, samples=2, greedy=False, seed=1)

    rollouts = Rollouts.gather(asyncio.run(run()).rollouts)
    assert rollouts.group.tolist() == [0, 0, 1, 1]
    assert rollouts.prompt_length.tolist() == [len(item.prompt.token_ids) for item in rollouts.local]
    assert [item.env_reward for item in rollouts.local][2:] == [Reward(0.25)] * 2
    first, second = rollouts.local[:2]
    assert first.prompt == second.prompt and len(ids("1")) + 1 == first.num_actions
