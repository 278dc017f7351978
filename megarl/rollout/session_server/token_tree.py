"""A token tree of what the engine was asked and what it sampled, along every history of a client.

Token runs alternate: a *context*, tokenized from a client's messages, and below it each *sampled* answer to it. A
history is found by its messages, but the stored ids below it are never re-tokenized from text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from megarl.engine.engine_protocol import NOT_RECORDED, Generation, RecordedPrefix
from megarl.rollout.partial_rollouts import PartialRollout, oldest_version
from megarl.rollout.session_server.requests import Digest, extend_digest
from megarl.rollout.session_server.responses import Choice
from megarl.types import Ids, Message, Prompt, SamplingMask, Status, Turn

Schemas = tuple[dict[str, Any], ...]


@dataclass(eq=False)
class Node:
    """A context or a sampled answer.

    Attributes:
        parent: None for a root, which is a context
        ids: its tokens, [n] int32
        messages: the same as text
        history: digest of all of the client's messages up to this node
        schemas: for a context, the available tools
        generation: for an answer, what the engine returned
        num_parse_errors: for an answer, calls that could not be parsed
        num_reasoning_tokens: for an answer, its leading tokens that are reasoning
        end_reason: for an answer, why the client could not continue after it; None if nothing prevented it
        is_continued: for an answer, whether a context follows it, with these ids or without its reasoning
        answer_index: for an answer, the number of earlier answers in the tree
        num_turns: answers of the policy up to this node, including those whose ids were dropped
    """

    parent: Node | None
    ids: Ids
    messages: tuple[Message, ...]
    history: Digest
    schemas: Schemas = ()
    generation: Generation | None = None
    num_calls: int = 0
    num_parse_errors: int = 0
    num_reasoning_tokens: int = 0
    end_reason: Literal["length", "max_turns"] | None = None
    is_continued: bool = False
    answer_index: int = 0
    num_turns: int = 0
    children: list[Node] = field(default_factory=list)

    def path(self) -> list[Node]:
        """Return the nodes from the root to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    @property
    def tokens(self) -> Ids:
        """All ids along the path: the engine's input, followed by the answer if this node is one."""
        return np.concatenate([node.ids for node in self.path()])

    @property
    def num_messages(self) -> int:
        """Number of messages along the path."""
        return sum(len(node.messages) for node in self.path())

    @property
    def recorded(self) -> RecordedPrefix:
        """The leading tokens along the path with known routing or sparse attention indices.

        Answers to the same context each record its routing, because each request ran it.
        """
        known = NOT_RECORDED
        for answer in (node.generation for node in self.path() if node.generation is not None):
            known = answer.extend_prefix(known)
        return known


class TokenTree:
    """The tree of one session.

    `num_forks` counts contexts at which the client left an existing history: it edited a message, started over,
    continued twice from an answer with different messages, or its template dropped reasoning.
    """

    def __init__(self) -> None:
        self.roots: list[Node] = []
        self.num_forks = 0
        self._answers: dict[Digest, list[Node]] = {}
        self._contexts: dict[tuple[Node | None, Digest], Node] = {}

    @property
    def oldest_version(self) -> float:
        """Oldest version of the weights that sampled a token; infinity if there is none."""
        answers = (node.generation for nodes in self._answers.values() for node in nodes)
        return oldest_version([generation.to_turn() for generation in answers if generation is not None])

    def find_answer(self, histories: Sequence[Digest], messages: Sequence[Message]) -> tuple[Node | None, int]:
        """Find the answer that matches the longest prefix of the messages.

        Of answers with equal text, one that nobody continued comes first, then one continued with exactly these
        messages.

        Args:
            histories: [len(messages) + 1] digests, as from `hash_prefixes`

        Returns:
            the answer and the length of the prefix that ends with it, or (None, 0)
        """
        for count in range(len(messages), 0, -1):
            message = messages[count - 1]
            if message["role"] != "assistant":
                continue
            reasoning = message.get("reasoning_content")
            matches = [
                node
                for node in self._answers.get(histories[count], ())
                if reasoning is None or reasoning.strip() == node.messages[0].get("reasoning_content", "").strip()
            ]
            if matches:
                full_history = histories[-1]
                return min(
                    matches, key=lambda node: (node.is_continued, (node, full_history) not in self._contexts)
                ), count
        return None, 0

    def find_context(self, answer: Node | None, history: Digest) -> Node | None:
        """Return the context of these messages after an answer, if it exists."""
        return self._contexts.get((answer, history))

    def add_context(
        self,
        parent: Node | None,
        answer: Node | None,
        history: Digest,
        ids: Ids,
        messages: Sequence[Message],
        schemas: Schemas = (),
    ) -> Node:
        """Add a context below an answer, or a root if `parent` is None.

        Args:
            answer: the answer that the messages continue, which differs from `parent` if its reasoning was dropped
            history: digest of all messages up to this one
        """
        turns = 0 if answer is None else answer.num_turns
        node = self._contexts[answer, history] = Node(parent, ids, tuple(messages), history, schemas, num_turns=turns)
        siblings = self.roots if parent is None else parent.children
        self.num_forks += bool(siblings)
        siblings.append(node)
        if answer is not None:
            answer.is_continued = True
        return node

    def add_answer(self, context: Node, choice: Choice) -> Node:
        """Add a sampled answer below a context."""
        history = extend_digest(context.history, choice.message)
        node = Node(
            context,
            np.asarray(choice.generation.token_ids, np.int32),
            (choice.message,),
            history,
            generation=choice.generation,
            num_calls=len(choice.message.get("tool_calls", ())),
            num_parse_errors=choice.num_parse_errors,
            num_reasoning_tokens=choice.num_reasoning_tokens,
            answer_index=sum(map(len, self._answers.values())),
            num_turns=context.num_turns + 1,
        )
        context.children.append(node)
        self._answers.setdefault(history, []).append(node)
        return node

    def collect_branches(self, prompt: Prompt, seed: int) -> list[tuple[Node, PartialRollout]]:
        """Return one conversation per leaf, with the leaf, in the order in which the leaves were sampled.

        An answer shared by several branches is an action in the first and context in the others. The status is `length`
        if the last answer was truncated or left no room to continue, `max_turns` if it was the last one allowed, else
        `stop`.
        """
        branches: list[tuple[Node, PartialRollout]] = []
        trained: set[Node] = set()
        for leaf in self.find_leaves():
            path = leaf.path()
            new_answers = [node for node in path if node.generation is not None and node not in trained]
            trained.update(new_answers)
            branches.append((leaf, _make_partial(path, new_answers, prompt, seed)))
        return branches

    def find_leaves(self) -> list[Node]:
        """Return answers without a later answer below them, in the order in which they were sampled."""
        leaves: list[Node] = []
        stack = self.roots[::-1]
        while stack:
            node = stack.pop()
            if node.generation is None:
                children = node.children
            else:
                children = [answer for context in node.children for answer in context.children]
                leaves += [] if children else [node]
            stack += children[::-1]
        return sorted(leaves, key=lambda node: node.answer_index)


def _make_partial(path: Sequence[Node], nodes: Sequence[Node], prompt: Prompt, seed: int) -> PartialRollout:
    """Convert a path to a conversation. `nodes` lists the answers that are actions."""
    actions = {node: node.generation for node in nodes if node.generation is not None}
    leaf, sampled = path[-1], list(actions.values())
    status: Status = leaf.end_reason or ("length" if sampled[-1].finish_reason == "length" else "stop")
    masks = [
        SamplingMask.unrestricted(len(action.token_ids)) if action.sampling_mask is None else action.sampling_mask
        for action in sampled
    ]
    has_masks = any(action.sampling_mask is not None for action in sampled)
    partial = PartialRollout(
        prompt=prompt,
        seed=seed,
        turns=tuple(actions[node].to_turn() if node in actions else Turn(node.ids) for node in path),
        messages=tuple(message for node in path for message in node.messages),
        sampling_masks=tuple(masks) if has_masks else (),
        num_turn_tokens=len(leaf.ids),
        is_turn_complete=True,
        num_turns=len(nodes),
        tool_calls=sum(node.num_calls for node in nodes),
        tool_errors=sum(node.num_parse_errors for node in nodes),
        drafted=sum(action.drafted for action in sampled),
        accepted=sum(action.accepted for action in sampled),
        status=status,
    )
    for node in path:
        if node.generation is not None:
            partial = partial.extend_record(node.generation)
    return partial
