"""A tree of tokens: what the engine was asked and what it said, along every history that a client has gone on from.

Runs of tokens alternate: a *context*, which a client's messages became, and below it each answer that was *sampled* to
it. A history is found again by its messages; what stands below it are ids, which are never made again from words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from megarl.engine.generation import Generation
from megarl.rollout.partial_rollouts import PartialRollout
from megarl.rollout.session_server.requests import Digest
from megarl.rollout.session_server.responses import Choice
from megarl.types import Ids, Message, Prompt, SamplingMask, Status, Turn

Schemas = tuple[dict[str, Any], ...]


@dataclass(eq=False)
class Node:
    """parent: None of a root, which is a context. ids: its own, [n] int32. messages: that these are in words.

    Of a context: schemas, the tools that there were. Of an answer: said, by the engine; routed, tokens whose routing
    was known before it was asked for; calls of tools; errors, calls that could not be read; thought, tokens that it
    begins with that are reasoning; ended, what kept a client that wanted to go on behind it, None for nothing; gone_on,
    whether something was said behind it, by these ids or without its reasoning; number, how many answers came before.

    turns: answers that the policy has given down to here, in words: also where the ids of some are left out.
    """

    parent: Node | None
    ids: Ids
    messages: tuple[Message, ...]
    schemas: Schemas = ()
    generation: Generation | None = None
    num_routed_before: int = 0
    num_calls: int = 0
    num_parse_errors: int = 0
    num_reasoning_tokens: int = 0
    end_reason: Literal["length", "max_turns"] | None = None
    is_continued: bool = False
    answer_index: int = 0
    num_turns: int = 0
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
        """Of the path: what the engine was asked with, or that and this answer."""
        return np.concatenate([node.ids for node in self.path()])

    @property
    def num_messages(self) -> int:
        """Messages of the path."""
        return sum(len(node.messages) for node in self.path())

    @property
    def num_routed(self) -> int:
        """Tokens of the path whose routing is on record, from the first on. Answers to the same context have a record
        of it each, for each request has run it."""
        records = [node.generation.routing for node in self.path() if node.generation is not None]
        return sum(len(record) for record in records if record is not None)


class TokenTree:
    """forks: contexts at which a client has left a history that it had begun: it changed what was said, or began anew,
    or went on from an answer for the second time with other words, or its template left out what was reasoned."""

    def __init__(self) -> None:
        self.roots: list[Node] = []
        self.num_forks = 0
        self._answers: dict[Digest, list[Node]] = {}
        self._contexts: dict[tuple[Node | None, Digest], Node] = {}

    def find_answer(self, histories: Sequence[Digest], messages: Sequence[Message]) -> tuple[Node | None, int]:
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
                return min(fit, key=lambda node: (node.is_continued, (node, whole) not in self._contexts)), count
        return None, 0

    def find_context(self, found: Node | None, history: Digest) -> Node | None:
        """What these messages became, if they were gone on with before from the answer that was found."""
        return self._contexts.get((found, history))

    def add_context(
        self,
        parent: Node | None,
        found: Node | None,
        history: Digest,
        ids: Ids,
        messages: Sequence[Message],
        schemas: Schemas = (),
    ) -> Node:
        """A new context behind an answer, None for a root. found: the answer that messages go on from, which is another
        where its reasoning is left out. history: of all messages down to here."""
        turns = 0 if found is None else found.num_turns
        node = self._contexts[found, history] = Node(parent, ids, tuple(messages), schemas, num_turns=turns)
        siblings = self.roots if parent is None else parent.children
        self.num_forks += bool(siblings)
        siblings.append(node)
        if found is not None:
            found.is_continued = True
        return node

    def add_answer(self, context: Node, history: Digest, choice: Choice, routed: int) -> Node:
        """What was sampled behind a context. history: with this message, as it is returned."""
        node = Node(
            context,
            np.asarray(choice.generation.token_ids, np.int32),
            (choice.message,),
            generation=choice.generation,
            num_routed_before=routed,
            num_calls=len(choice.message.get("tool_calls", ())),
            num_parse_errors=choice.num_parse_errors,
            num_reasoning_tokens=choice.num_reasoning_tokens,
            answer_index=sum(map(len, self._answers.values())),
            num_turns=context.num_turns + 1,
        )
        context.children.append(node)
        self._answers.setdefault(history, []).append(node)
        return node

    def collect_branches(self, prompt: Prompt, seed: int) -> tuple[PartialRollout, ...]:
        """A conversation for every last answer, in the order in which these came. An answer that several of them share
        is an action in the first, and context in the others. Status: `length` where the last answer was full, or was
        left no room to go on, `max_turns` where it was to be the last, else `stop`."""
        found: list[PartialRollout] = []
        trained: set[Node] = set()
        for leaf in self.find_leaves():
            path = leaf.path()
            own = [node for node in path if node.generation is not None and node not in trained]
            trained.update(own)
            found.append(_make_partial(path, own, prompt, seed))
        return tuple(found)

    def find_leaves(self) -> list[Node]:
        """Answers without another one below them, in the order in which they came."""
        found: list[Node] = []
        left = self.roots[::-1]
        while left:
            node = left.pop()
            if node.generation is None:
                below = node.children
            else:
                below = [answer for context in node.children for answer in context.children]
                found += [] if below else [node]
            left += below[::-1]
        return sorted(found, key=lambda node: node.answer_index)


def _make_partial(path: Sequence[Node], own: Sequence[Node], prompt: Prompt, seed: int) -> PartialRollout:
    """own: the answers of the path that are actions."""
    actions = {node: node.generation for node in own if node.generation is not None}
    turns = [
        Turn(node.ids)
        if said is None
        else Turn(node.ids, said.logprobs, True, said.weight_version, said.versions, cached_tokens=said.cached)
        for node, said in ((node, actions.get(node)) for node in path)
    ]
    routing, known = [], 0
    for node in path:
        if node.generation is not None and node.generation.routing is not None:
            assert node.num_routed_before == known, "the records of a path follow on each other"
            routing.append(node.generation.routing)
            known += len(node.generation.routing)
    last, said = path[-1], list(actions.values())
    status: Status = last.end_reason or ("length" if said[-1].finish_reason == "length" else "stop")
    cut_off = any(one.sampling_mask is not None for one in said)
    return PartialRollout(
        prompt=prompt,
        seed=seed,
        turns=tuple(turns),
        messages=tuple(message for node in path for message in node.messages),
        routing=tuple(routing),
        sampling_masks=tuple(_get_sampling_mask(one) for one in said) if cut_off else (),
        num_turn_tokens=len(last.ids),
        is_turn_complete=True,
        num_turns=len(own),
        tool_calls=sum(node.num_calls for node in own),
        tool_errors=sum(node.num_parse_errors for node in own),
        drafted=sum(one.drafted for one in said),
        accepted=sum(one.accepted for one in said),
        status=status,
    )


def _get_sampling_mask(said: Generation) -> SamplingMask:
    return SamplingMask.unrestricted(len(said.token_ids)) if said.sampling_mask is None else said.sampling_mask
