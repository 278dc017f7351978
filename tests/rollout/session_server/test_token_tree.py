"""Token trees worked out by hand. An answer's log-probs are its negated token ids, so that each is identifiable."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megarl.engine.engine_protocol import Generation, RecordedPrefix
from megarl.rollout.session_server.requests import hash_prefixes
from megarl.rollout.session_server.responses import Choice
from megarl.rollout.session_server.token_tree import Node, TokenTree
from megarl.types import Message, Prompt, SamplingMask, as_token_ids

pytestmark = pytest.mark.alone

PROMPT = Prompt("p", ({"role": "user", "content": "x"},), as_token_ids([1, 2]))


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def make_choice(
    content: str, *tokens: int, routed: int, prompt_length: int, version: int = 7, **fields: object
) -> Choice:
    positions = torch.arange(routed, prompt_length + len(tokens) - 1, dtype=torch.uint8)[:, None, None]
    values = -np.array(tokens, np.float32)
    record: dict[str, Any] = {"routing": positions, "record_start": routed, "cached": routed, **fields}
    generation = Generation(as_token_ids(tokens), values, "stop", version, **record)
    return Choice({"role": "assistant", "content": content}, "stop", generation)


class ExampleTree:
    """1 2          9 9
           /   \\         |
        3 4     5 6      30
       /   \\     |
     7       8  10 11
     |       |
    12      13 14
    """

    def __init__(self) -> None:
        self.tree = TokenTree()
        self.nodes: dict[str, Node] = {}
        self.history: dict[str, list[Message]] = {"": []}
        self.context("root", "", "x", 1, 2)
        self.answer("a", "root", "A", 3, 4)
        self.answer("b", "root", "B", 5, 6)
        self.context("a1", "a", "u", 7)
        self.context("a2", "a", "v", 8)
        self.context("b1", "b", "u", 10, 11)
        self.answer("aa", "a1", "AA", 12)
        self.answer("ab", "a2", "AB", 13, 14)
        self.context("other", "", "y", 9, 9)
        self.answer("o", "other", "O", 30)

    def context(self, name: str, parent_name: str, content: str, *tokens: int) -> None:
        messages = self.history[name] = [*self.history[parent_name], user(content)]
        parent = self.nodes.get(parent_name)
        node = self.tree.add_context(
            parent, parent, hash_prefixes(messages, ())[-1], as_token_ids(tokens), [user(content)]
        )
        self.nodes[name] = node

    def answer(self, name: str, parent_name: str, content: str, *tokens: int) -> None:
        parent = self.nodes[parent_name]
        choice = make_choice(content, *tokens, routed=parent.recorded.tokens, prompt_length=len(parent.tokens))
        self.nodes[name] = self.tree.add_answer(parent, choice)
        self.history[name] = [*self.history[parent_name], choice.message]


def test_collects_branches() -> None:
    branches = [branch for _, branch in ExampleTree().tree.collect_branches(PROMPT, 4)]
    result = [[(turn.token_ids.tolist(), turn.is_action) for turn in branch.turns] for branch in branches]
    assert result == [
        [([1, 2], False), ([5, 6], True)],  # a question without an answer is omitted
        [([1, 2], False), ([3, 4], True), ([7], False), ([12], True)],
        [([1, 2], False), ([3, 4], False), ([8], False), ([13, 14], True)],  # shared tokens are an action once
        [([9, 9], False), ([30], True)],
    ]  # in order of arrival
    assert [branch.num_turns for branch in branches] == [1, 2, 1, 1]
    assert [branch.status for branch in branches] == ["stop"] * 4
    assert all(
        branch.is_turn_complete and branch.num_turn_tokens == len(branch.turns[-1].token_ids) for branch in branches
    )
    assert [message["content"] for message in branches[2].messages] == ["x", "A", "v", "AB"]
    records = [torch.cat(branch.routing).flatten().tolist() for branch in branches]
    assert records == [[*range(branch.num_tokens - 1)] for branch in branches]
    assert [turn.logprobs.tolist() for turn in branches[1].turns] == [[], [-3, -4], [], [-12]]
    assert {turn.weight_version for branch in branches for turn in branch.turns if turn.is_action} == {7}
    assert [turn.cached_tokens for turn in branches[2].turns] == [-1, -1, -1, 3]
    assert all(branch.seed == 4 and branch.prompt is PROMPT for branch in branches)


def test_counts_forks() -> None:
    assert ExampleTree().tree.num_forks == 2  # at `a2` and `other`


def test_finds_the_deepest_matching_answer() -> None:
    example = ExampleTree()

    def find(messages: list[Message]) -> tuple[Node | None, int]:
        return example.tree.find_answer(hash_prefixes(messages, ()), messages)

    ab = example.history["ab"]
    assert find([*ab, user("w")]) == (example.nodes["ab"], 4)
    assert find([*ab[:3], {"role": "assistant", "content": "edited"}, user("w")]) == (example.nodes["a"], 2)
    assert find([user("edited"), *ab[1:], user("w")]) == (None, 0)
    assert find([user("x")]) == (None, 0)
    assert example.tree.find_answer(hash_prefixes([*ab, user("w")], [{"name": "f"}]), [*ab, user("w")]) == (None, 0)


def test_prefers_unextended_answers_among_equal_texts() -> None:
    example = ExampleTree()
    example.answer("a'", "root", "A", 3, 44)
    messages = [*example.history["a"], user("w")]
    hashes = hash_prefixes(messages, ())
    first, _ = example.tree.find_answer(hashes, messages)
    assert first is example.nodes["a'"]
    node = example.tree.add_context(first, first, hashes[-1], as_token_ids([20]), [user("w")])
    # Both are extended now: the one with exactly these messages comes first.
    assert example.tree.find_answer(hashes, messages)[0] is first
    assert example.tree.find_context(first, hashes[-1]) is node
    changed = [*example.history["a"], user("u")]
    assert example.tree.find_answer(hash_prefixes(changed, ()), changed)[0] is example.nodes["a"]


def test_reasoning_sent_by_the_client_must_match() -> None:
    tree, question = TokenTree(), user("x")
    root = tree.add_context(None, None, hash_prefixes([question], ())[-1], as_token_ids([1]), [question])
    nodes = []
    for number, thoughts in enumerate(("hm", "so")):
        choice = make_choice("A", 2 + number, routed=0, prompt_length=1)
        choice.message["reasoning_content"] = thoughts
        nodes.append(tree.add_answer(root, choice))

    def find(**fields: str) -> Node | None:
        messages = [question, {"role": "assistant", "content": "A", **fields}, user("w")]
        return tree.find_answer(hash_prefixes(messages, ()), messages)[0]

    assert find() is nodes[0] and find(reasoning_content="so ") is nodes[1] and find(reasoning_content="no") is None


def test_branches_keep_sampling_masks_of_their_actions() -> None:
    tree, question = TokenTree(), user("x")
    first = hash_prefixes([question], ())[-1]
    root = tree.add_context(None, None, first, as_token_ids([1]), [question])
    truncated = make_choice("A", 3, 4, routed=0, prompt_length=1, sampling_mask=SamplingMask.from_rows([[3, 5], [4]]))
    full = make_choice("B", 6, routed=2, prompt_length=4)
    a = tree.add_answer(root, truncated)
    after = hash_prefixes([question, truncated.message, question], ())[-1]
    followup = tree.add_context(a, a, after, as_token_ids([2]), [question])
    for _ in range(2):
        tree.add_answer(followup, full)
    (_, merged), (_, second) = tree.collect_branches(PROMPT, 0)
    joined = SamplingMask.concat(merged.sampling_masks)
    assert joined.counts.tolist() == [2, 1, 0] and joined.ids.tolist() == [3, 5, 4]
    assert second.sampling_masks == ()


def test_branch_statuses() -> None:
    tree, question = TokenTree(), user("x")
    root = tree.add_context(None, None, hash_prefixes([question], ())[-1], as_token_ids([1]), [question])
    for number in range(3):
        choice = make_choice(str(number), 2, routed=0, prompt_length=1)
        node = tree.add_answer(root, choice)
    node.end_reason = "length"
    long = Generation(as_token_ids([5]), np.zeros(1), "length", 0)
    tree.add_answer(root, Choice({"role": "assistant", "content": "3"}, "length", long))
    assert [branch.status for _, branch in tree.collect_branches(PROMPT, 0)] == ["stop", "stop", "length", "length"]


def test_branches_have_the_record_of_the_newest_weights_on_their_path() -> None:
    """Version 8 continues after an answer of version 7 and reads it again, on one of two branches."""
    tree = TokenTree()

    def answer(parent: Node, number: int, version: int) -> Node:
        start = parent.recorded.next_start(version)
        choice = make_choice(str(number), number, routed=start, prompt_length=len(parent.tokens), version=version)
        return tree.add_answer(parent, choice)

    def ask(parent: Node | None, *contents: str) -> Node:
        history = hash_prefixes([user(content) for content in contents], ())[-1]
        return tree.add_context(parent, parent, history, as_token_ids([1, 2]), [user(contents[-1])])

    first = answer(ask(None, "x"), 3, 7)
    reread = answer(ask(first, "x", "u"), 4, 8)
    last = answer(ask(reread, "x", "u", "v"), 5, 8)
    assert (first.recorded, reread.recorded) == (RecordedPrefix(2, 7), RecordedPrefix(5, 8))
    assert last.generation is not None and last.generation.record_start == 5
    other = answer(ask(first, "x", "w"), 6, 7)
    assert other.generation is not None and other.generation.record_start == 2
    branches = [branch for _, branch in tree.collect_branches(PROMPT, 4)]
    assert [[len(part) for part in branch.routing] for branch in branches] == [[5, 3], [2, 3]]
    records = [torch.cat(branch.routing).flatten().tolist() for branch in branches]
    assert records == [[*range(8)], [*range(5)]]
    assert [branch.recorded for branch in branches] == [RecordedPrefix(8, 8), RecordedPrefix(5, 7)]
