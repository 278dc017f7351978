"""Trees worked out by hand. Tokens are numbers; an answer's log-probs are minus these, so that each can be told."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megarl.engine.engine_protocol import Generation
from megarl.rollout.session_server.requests import hash_prefixes
from megarl.rollout.session_server.responses import Choice
from megarl.rollout.session_server.token_tree import Node, TokenTree
from megarl.types import Message, Prompt, SamplingMask, as_token_ids

pytestmark = pytest.mark.alone

PROMPT = Prompt("p", ({"role": "user", "content": "x"},), as_token_ids([1, 2]))


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def says(content: str, *tokens: int, routed: int, asked: int, **fields: object) -> Choice:
    places = torch.arange(routed, asked + len(tokens) - 1, dtype=torch.uint8)[:, None, None]
    values = -np.array(tokens, np.float32)
    said = Generation(as_token_ids(tokens), values, "stop", 7, routing=places, cached=routed, **fields)  # type: ignore[arg-type]
    return Choice({"role": "assistant", "content": content}, "stop", said)


class Grown:
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
        self.said: dict[str, list[Message]] = {"": []}
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

    def context(self, name: str, above: str, words: str, *tokens: int) -> None:
        messages = self.said[name] = [*self.said[above], user(words)]
        parent = self.nodes.get(above)
        node = self.tree.add_context(
            parent, parent, hash_prefixes(messages, ())[-1], as_token_ids(tokens), [user(words)]
        )
        self.nodes[name] = node

    def answer(self, name: str, above: str, words: str, *tokens: int) -> None:
        parent = self.nodes[above]
        choice = says(words, *tokens, routed=parent.num_routed, asked=len(parent.tokens))
        self.nodes[name] = self.tree.add_answer(parent, choice)
        self.said[name] = [*self.said[above], choice.message]


def test_branches_by_hand() -> None:
    branches = [branch for _, branch in Grown().tree.collect_branches(PROMPT, 4)]
    result = [[(turn.token_ids.tolist(), turn.is_action) for turn in branch.turns] for branch in branches]
    assert result == [
        [([1, 2], False), ([5, 6], True)],  # what was asked without an answer is no part of it
        [([1, 2], False), ([3, 4], True), ([7], False), ([12], True)],
        [([1, 2], False), ([3, 4], False), ([8], False), ([13, 14], True)],  # what is shared is an action once
        [([9, 9], False), ([30], True)],
    ]  # in the order in which they came
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


def test_forks_are_histories_that_were_left() -> None:
    assert Grown().tree.num_forks == 2  # at `a2` and at `other`


def test_the_farthest_answer_is_found() -> None:
    grown = Grown()

    def find(messages: list[Message]) -> tuple[Node | None, int]:
        return grown.tree.find_answer(hash_prefixes(messages, ()), messages)

    ab = grown.said["ab"]
    assert find([*ab, user("w")]) == (grown.nodes["ab"], 4)
    assert find([*ab[:3], {"role": "assistant", "content": "edited"}, user("w")]) == (grown.nodes["a"], 2)
    assert find([user("edited"), *ab[1:], user("w")]) == (None, 0)
    assert find([user("x")]) == (None, 0)
    assert grown.tree.find_answer(hash_prefixes([*ab, user("w")], [{"name": "f"}]), [*ab, user("w")]) == (None, 0)


def test_of_answers_that_read_the_same_one_that_nobody_has_gone_on_from_comes_first() -> None:
    grown = Grown()
    grown.answer("a'", "root", "A", 3, 44)
    messages = [*grown.said["a"], user("w")]
    known = hash_prefixes(messages, ())
    first, _ = grown.tree.find_answer(known, messages)
    assert first is grown.nodes["a'"]
    node = grown.tree.add_context(first, first, known[-1], as_token_ids([20]), [user("w")])
    assert grown.tree.find_answer(known, messages)[0] is first  # both were gone on from: then by these very messages
    assert grown.tree.find_context(first, known[-1]) is node
    others = [*grown.said["a"], user("u")]
    assert grown.tree.find_answer(hash_prefixes(others, ()), others)[0] is grown.nodes["a"]


def test_reasoning_that_is_told_must_be_the_same() -> None:
    tree, ask = TokenTree(), user("x")
    root = tree.add_context(None, None, hash_prefixes([ask], ())[-1], as_token_ids([1]), [ask])
    nodes = []
    for number, thoughts in enumerate(("hm", "so")):
        choice = says("A", 2 + number, routed=0, asked=1)
        choice.message["reasoning_content"] = thoughts
        nodes.append(tree.add_answer(root, choice))

    def find(**fields: str) -> Node | None:
        messages = [ask, {"role": "assistant", "content": "A", **fields}, user("w")]
        return tree.find_answer(hash_prefixes(messages, ()), messages)[0]

    assert find() is nodes[0] and find(reasoning_content="so ") is nodes[1] and find(reasoning_content="no") is None


def test_what_could_be_sampled_is_of_the_actions_of_a_branch() -> None:
    tree, ask = TokenTree(), user("x")
    first = hash_prefixes([ask], ())[-1]
    root = tree.add_context(None, None, first, as_token_ids([1]), [ask])
    cut = says("A", 3, 4, routed=0, asked=1, sampling_mask=SamplingMask.from_rows([[3, 5], [4]]))
    full = says("B", 6, routed=2, asked=4)
    a = tree.add_answer(root, cut)
    behind = hash_prefixes([ask, cut.message, ask], ())[-1]
    below = tree.add_context(a, a, behind, as_token_ids([2]), [ask])
    for _ in range(2):
        tree.add_answer(below, full)
    (_, both), (_, second) = tree.collect_branches(PROMPT, 0)
    joined = SamplingMask.concat(both.sampling_masks)
    assert joined.counts.tolist() == [2, 1, 0] and joined.ids.tolist() == [3, 5, 4]
    assert second.sampling_masks == ()


def test_statuses() -> None:
    tree, ask = TokenTree(), user("x")
    root = tree.add_context(None, None, hash_prefixes([ask], ())[-1], as_token_ids([1]), [ask])
    for number in range(3):
        choice = says(str(number), 2, routed=0, asked=1)
        node = tree.add_answer(root, choice)
    node.end_reason = "length"
    long = Generation(as_token_ids([5]), np.zeros(1), "length", 0)
    tree.add_answer(root, Choice({"role": "assistant", "content": "3"}, "length", long))
    assert [branch.status for _, branch in tree.collect_branches(PROMPT, 0)] == ["stop", "stop", "length", "length"]
