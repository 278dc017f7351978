"""A tree of tokens: what the engine was asked and what it said, along every history that a client has gone on from.

Runs of tokens alternate: a *context*, which a client's messages became, and below it each answer that was *sampled* to
it. A history is found again by its messages; what stands below it are ids, which are never made again from words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megarl.rollout.client import Generation
from megarl.rollout.partial import Partial
from megarl.sessions.answers import Choice
from megarl.sessions.messages import Digest
from megarl.types import Ids, Message, Prompt, Status, Support, Turn, ids_of


@dataclass(eq=False)
class Node:
    """parent: None of a root, which is a context. ids: its own, [n] int32. messages: that these are in words.

    said: the engine's answer, None of a context. routed: of an answer, the tokens whose routing was known before it was
    asked for. schemas: of a context, the tools that there were. calls, errors: of an answer, tools that it calls, and calls that could not be read. full: there was no
    room for what a client wanted to say behind it.
    """

    parent: Node | None
    ids: Ids
    messages: tuple[Message, ...]
    said: Generation | None = None
    routed: int = 0
    schemas: tuple[dict[str, Any], ...] = ()
    calls: int = 0
    errors: int = 0
    full: bool = False
    children: list[Node] = field(default_factory=list)

    def path(self) -> list[Node]:
        """From the root to this one."""
        found: list[Node] = []
        node: Node | None = self
        while node is not None:
            found.append(node)
            node = node.parent
        return found[::-1]

    @property
    def tokens(self) -> Ids:
        """Of the path: what the engine was asked with, or this answer behind it."""
        return np.concatenate([node.ids for node in self.path()])

    @property
    def known(self) -> int:
        """Tokens of the path whose routing is on record, from the first on. Answers to the same context have a record
        of it each, for each request has run it."""
        node: Node | None = self
        while node is not None and (node.said is None or node.said.routing is None):
            node = node.parent
        return 0 if node is None or node.said is None or node.said.routing is None else _end(node)


def _end(node: Node) -> int:
    assert node.said is not None and node.said.routing is not None
    return node.routed + len(node.said.routing)


class Tree:
    """forks: contexts at which a client has left a history that it had begun: it changed what was said, or began anew,
    or went on from an answer for the second time with other words."""

    def __init__(self) -> None:
        self.roots: list[Node] = []
        self.forks = 0
        self._answers: dict[Digest, list[Node]] = {}
        self._contexts: dict[tuple[Node | None, Digest], Node] = {}

    def find(self, histories: Sequence[Digest], messages: Sequence[Message]) -> tuple[Node | None, int]:
        """The answer that goes farthest into these messages, and how many of them it and what is above it make up;
        (None, 0) where none of them was sampled.

        histories: [len(messages) + 1], as `messages.histories` gives them. Among answers that read the same, one from
        which nobody has gone on comes first, then the one from which these very messages were gone on with.
        """
        for count in range(len(messages), 0, -1):
            message = messages[count - 1]
            if message["role"] != "assistant":
                continue
            thoughts = message.get("reasoning_content")
            fit = [
                node
                for node in self._answers.get(histories[count], ())
                if thoughts is None or thoughts.strip() == node.messages[0].get("reasoning_content", "").strip()
            ]
            if fit:
                whole = histories[-1]
                return min(fit, key=lambda node: (bool(node.children), (node, whole) not in self._contexts)), count
        return None, 0

    def context(self, parent: Node | None, history: Digest) -> Node | None:
        """What these messages became behind `parent`, if they were gone on with before."""
        return self._contexts.get((parent, history))

    def ask(
        self,
        parent: Node | None,
        history: Digest,
        ids: Ids,
        messages: Sequence[Message],
        schemas: tuple[dict[str, Any], ...] = (),
    ) -> Node:
        """A new context behind an answer, None for a root. history: of all messages down to here."""
        node = self._contexts[parent, history] = Node(parent, ids, tuple(messages), schemas=schemas)
        siblings = self.roots if parent is None else parent.children
        self.forks += bool(siblings)
        siblings.append(node)
        return node

    def answer(self, context: Node, history: Digest, choice: Choice, routed: int, errors: int = 0) -> Node:
        """What was sampled behind a context. history: with this message, as it is returned."""
        said, message = choice.said, choice.message
        calls = len(message.get("tool_calls", ()))
        node = Node(context, ids_of(said.token_ids), (message,), said, routed, calls=calls, errors=errors)
        context.children.append(node)
        self._answers.setdefault(history, []).append(node)
        return node

    def branches(self, prompt: Prompt, seed: int) -> tuple[Partial, ...]:
        """A conversation for every last answer, in the order of their paths. An answer that several of them share is an
        action in the first, and context in the others. Status: `length` where the last answer was full, or was left no
        room to go on, else `stop`."""
        found: list[Partial] = []
        trained: set[Node] = set()
        for leaf in self.leaves():
            path = leaf.path()
            own = [node for node in path if node.said is not None and node not in trained]
            trained.update(own)
            found.append(_partial(path, set(own), prompt, seed))
        return tuple(found)

    def leaves(self) -> list[Node]:
        """Answers without another one below them."""
        found: list[Node] = []
        left = self.roots[::-1]
        while left:
            node = left.pop()
            below = [answer for context in node.children for answer in context.children] if node.said else node.children
            if below:
                left += below[::-1]
            elif node.said is not None:
                found.append(node)
        return found


def _partial(path: Sequence[Node], own: set[Node], prompt: Prompt, seed: int) -> Partial:
    """own: the answers of the path that are actions."""
    turns, routing, support = [], [], []
    known = 0
    for node in path:
        said = node.said
        if said is None or node not in own:
            turns.append(Turn(node.ids))
        else:
            turns.append(Turn(node.ids, said.logprobs, True, said.weight_version, said.versions))
            support.append(Support.whole(len(node.ids)) if said.support is None else said.support)
        if said is not None and said.routing is not None:
            assert node.routed == known, "the records of a path follow on each other"
            routing.append(said.routing)
            known += len(said.routing)
    answers = [node for node in path if node in own]
    said = [node.said for node in answers if node.said is not None]
    last = path[-1]
    assert last.said is not None
    status: Status = "length" if last.full or last.said.finish == "length" else "stop"
    return Partial(
        prompt=prompt,
        seed=seed,
        turns=tuple(turns),
        messages=tuple(message for node in path for message in node.messages),
        routing=tuple(routing),
        support=tuple(support) if any(one.support is not None for one in said) else (),
        written=len(last.ids),
        whole=True,
        taken=len(answers),
        tool_calls=sum(node.calls for node in answers),
        tool_errors=sum(node.errors for node in answers),
        drafted=sum(one.drafted for one in said),
        accepted=sum(one.accepted for one in said),
        status=status,
    )

