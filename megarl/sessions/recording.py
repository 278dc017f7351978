"""One session: a client's requests to the policy, and the tree of what came of them."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from megarl.config import ConfigError, RolloutConfig
from megarl.rollout.chat import Chat
from megarl.rollout.client import Generation, Policy, RequestFailed
from megarl.rollout.messages import call_id
from megarl.rollout.multi_turn import Halted, sample_seed
from megarl.rollout.partial import Partial
from megarl.rollout.reasoning import is_open
from megarl.rollout.tool_calls import Call, Parse, Reply
from megarl.sessions.answers import Answered, Choice
from megarl.sessions.asked import Asked
from megarl.sessions.messages import Digest, Refused, extended, histories, normal
from megarl.sessions.tree import Node, Tree
from megarl.types import Ids, Message, Prompt, ids_of

T = TypeVar("T")
_LATE = "it was not done within rollout.step_timeout"
_MARK = 16
"""Tokens within which the head of a turn opens reasoning."""


@dataclass
class Figures:
    """Of one session, or of several together.

    requests: that became tokens. refused: that could not. failed: that the engine did not answer. forks: as of a
    `Tree`. branches: conversations that came of it all. drift: those of them that would have been asked for with other
    ids if their messages had been rendered and tokenised afresh. ignored: fields that were not followed, by name.
    """

    sessions: int = 0
    requests: int = 0
    refused: int = 0
    failed: int = 0
    forks: int = 0
    branches: int = 0
    drift: int = 0
    ignored: Counter[str] = field(default_factory=Counter)

    def add(self, other: Figures) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass(frozen=True)
class Around:
    """What sessions need besides the policy. model: its name for clients. say: is told of each field that is not
    followed, once."""

    chat: Chat
    parse: Parse
    config: RolloutConfig
    model: str = "policy"
    say: Callable[[str], None] = lambda line: None
    dropped: dict[tuple[tuple[str, bool, bool], ...], bool] = field(default_factory=dict)
    """Whether the template leaves out reasoning before such messages, as far as somebody wanted to know."""
    spelled: dict[int, str] = field(default_factory=dict)
    """The texts of tokens, likewise."""


@dataclass(frozen=True)
class Place:
    """Where in its tree a request is answered. ids: what the engine is asked with; routed: those whose routing is known
    already."""

    node: Node
    history: Digest
    ids: Ids
    routed: int


class Recording:
    """A session as its owner has it. id, key, base_url: by which its client reaches it. failure: why it has failed,
    empty where it has not."""

    def __init__(
        self,
        around: Around,
        url: str,
        prompt: Prompt,
        policy: Policy,
        params: Mapping[str, Any],
        deadline: float | None,
        seed: int,
    ) -> None:
        self.id, self.key = secrets.token_hex(8), f"sk-{secrets.token_urlsafe(24)}"
        self.base_url = f"{url}/s/{self.id}/v1"
        self.model = around.model
        self.tree = Tree()
        self.figures = Figures(sessions=1)
        self.failure = ""
        self.params = dict(params)
        self._around, self._prompt, self._policy, self._seed = around, prompt, policy, seed
        self._deadline = deadline
        self._work: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._unanswered: dict[Node, str] = {}
        self._broken: Exception | None = None
        self._asked: Counter[bytes] = Counter()
        self._first = _first(around.chat, prompt)

    # --- for its owner

    def fail(self, reason: str) -> None:
        """Its branches are aborted, for this reason, and nothing more is answered. The first one counts."""
        self.failure = self.failure or reason

    def branches(self) -> tuple[Partial, ...]:
        """What has come of it, one conversation for every last answer. All are `aborted` where the session has failed,
        or a request of it has which was not answered later; also where nothing was sampled, which is one without a turn
        of the policy. Raises what the policy raised where that was of more than one request."""
        if self._broken is not None:
            raise self._broken
        found = self.tree.branches(self._prompt, self._seed)
        failure = self.failure or next(iter(self._unanswered.values()), "")
        if not found:
            failure = failure or "the session asked the policy for nothing"
            found = (Partial.begin(self._prompt, self._seed),)
        return tuple(replace(one, status="aborted", failure=failure) for one in found) if failure else found

    def count(self) -> None:
        """Have the figures of what only its end can say."""
        leaves = self.tree.leaves()
        self.figures.branches = len(leaves)
        self.figures.drift = sum(map(self._drifts, leaves))

    async def close(self) -> None:
        """Cancel the requests under way; nothing more is answered."""
        self._closed = True
        for task in self._work:
            task.cancel()
        if self._work:
            await asyncio.wait(self._work)

    # --- for its client

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What comes of the work, which ends with the session, and with whoever waits for it. Raises Refused."""
        task = asyncio.ensure_future(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
        if task.cancelled():
            raise Refused("the session is closed", status=503, code="session_closed")
        return task.result()

    def place(self, asked: Asked) -> Place:
        """The context that a request becomes. Raises Refused."""
        self._check_open()
        for name in asked.ignored:
            self.figures.ignored[name] += 1
            self._around.say(name)
        tree, messages = self.tree, asked.messages
        known = histories(messages, asked.schemas)
        found, count = tree.find(known, messages)
        node = tree.context(found, known[-1])
        if node is None:
            try:
                parent, ids = self._go_on(found, messages, count, asked.schemas)
            except ConfigError as error:
                raise Refused(str(error), "messages") from None
            tokens = len(ids) + (0 if parent is None else len(parent.tokens))
            if tokens >= self._around.config.max_context:
                raise self._full(found, tokens)
            behind = messages if parent is None else messages[parent.count :]
            node = tree.ask(parent, found, known[-1], ids, behind, asked.schemas)
        self.figures.requests += 1
        self.figures.forks = tree.forks
        return Place(node, known[-1], node.tokens, node.known)

    async def answer(self, asked: Asked, place: Place) -> Answered:
        """What the policy says to it. Raises Refused."""
        node = place.node
        try:
            async with asyncio.timeout_at(self._deadline):
                said = await self._sample(asked, place)
                choices = [await self._read(one, asked, node) for one in said]
        except TimeoutError:
            self.fail(_LATE)
            raise self._failed(node, self.failure, 503) from None
        except Halted:
            raise self._failed(node, "generation was stopped", 503) from None
        except RequestFailed as error:
            raise self._failed(node, str(error), 500) from None
        except Exception as error:  # the engine is gone, or this is wrong: whoever has opened the session hears of it
            self._broken = self._broken or error
            raise self._failed(node, f"{type(error).__name__}: {error}", 503) from None
        self._unanswered.pop(node, None)
        for choice in choices:
            self.tree.answer(node, extended(place.history, choice.message), choice, place.routed)
        own = f"chatcmpl-{secrets.token_hex(12)}"
        return Answered(own, self.model, len(place.ids), tuple(choices))

    def _check_open(self) -> None:
        if self._deadline is not None and asyncio.get_running_loop().time() >= self._deadline:
            self.fail(_LATE)
        if self._closed or self.failure:
            reason = f"the session has failed: {self.failure}" if self.failure else "the session is closed"
            raise Refused(reason, status=503, code="session_closed")

    def _failed(self, node: Node, reason: str, status: int) -> Refused:
        self.figures.failed += 1
        self._unanswered[node] = reason
        return Refused(reason, status=status, code="engine_failed")

    # --- tokens

    def _go_on(
        self, found: Node | None, messages: Sequence[Message], count: int, schemas: tuple[dict[str, Any], ...]
    ) -> tuple[Node | None, Ids]:
        """The answer behind which a context of these messages is to stand, and its ids. found: that which goes farthest
        into them, `count` messages.

        Where the template leaves out reasoning of earlier turns, what was said is kept by its ids without those of the
        reasoning, from the first such turn on.
        """
        chat = self._around.chat
        if found is None:
            fresh = (tuple(messages), schemas) != self._first
            return None, ids_of(chat.opening(messages, schemas)) if fresh else self._prompt.token_ids
        behind = ids_of(chat.continuation(messages[count:], schemas, int(found.ids[-1])))
        path = found.path()
        cut = [bool(node.thought) and self._drops(messages[node.count :]) for node in path]
        if True not in cut:
            return found, behind
        first = cut.index(True)
        parts = [
            node.ids[node.thought :] if own else self._shut(node.ids) if below else node.ids
            for node, own, below in zip(path, cut, [*cut[1:], False], strict=True)
        ]
        return path[first - 1].parent, np.concatenate([*parts[first - 1 :], behind])

    def _drops(self, behind: Sequence[Message]) -> bool:
        """Whether the template leaves out the reasoning of a turn before these messages."""
        kinds = tuple((one["role"], bool(one["content"]), bool(one.get("tool_calls"))) for one in behind)
        known = self._around.dropped
        if kinds not in known:
            known[kinds] = self._around.chat.drops_reasoning(behind)
        return known[kinds]

    def _shut(self, ids: Ids) -> Ids:
        """A context without the mark by which the template opens reasoning at its end."""
        chat = self._around.chat
        if chat.marks is not None:
            for tail in range(1, min(len(ids), _MARK) + 1):
                text = chat.text(ids[-tail:])
                if chat.marks[0] in text:
                    return ids[:-tail] if is_open(text, chat.marks) else ids
        return ids

    def _full(self, parent: Node | None, tokens: int) -> Refused:
        if parent is not None:
            parent.full = True
        most = self._around.config.max_context
        return Refused(
            f"the messages are {tokens} tokens, and a conversation may have {most} with its answer "
            "(rollout.max_context)",
            "messages",
            "context_length_exceeded",
        )

    async def _sample(self, asked: Asked, place: Place) -> list[Generation]:
        config, ids = self._around.config, place.ids
        budget = min(config.max_new_tokens, config.max_context - len(ids))
        budget = budget if asked.limit is None else min(budget, asked.limit)
        params = {**self.params, "max_new_tokens": budget}
        if asked.stops:
            params["stop"] = list(asked.stops)
        seeds = self._seeds(ids, asked.choices)

        async def one(seed: dict[str, int]) -> Generation:
            said = await self._policy.generate(ids, {**params, **seed}, place.routed)
            over = len(said.token_ids) == budget or _last(said.token_ids) in self._around.chat.ends
            if said.finish == "abort" and not over:
                raise RequestFailed(said.reason or "the engine cut the answer off")
            return said

        if asked.choices == 1:
            return [await one(seeds[0])]
        tasks = [asyncio.ensure_future(one(seed)) for seed in seeds]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    def _seeds(self, ids: Ids, count: int) -> list[dict[str, int]]:
        """Of so many answers to these ids: the run's own for the first, and others for all that follow, also in later
        requests, which would all read the same."""
        if "sampling_seed" not in self.params:
            return [{}] * count
        asked = hashlib.blake2b(np.ascontiguousarray(ids).tobytes()).digest()
        own, first = self.params["sampling_seed"], self._asked[asked]
        self._asked[asked] += count
        return [
            {"sampling_seed": own if number == 0 else sample_seed(own, number, 0)}
            for number in range(first, first + count)
        ]

    async def _read(self, said: Generation, asked: Asked, node: Node) -> Choice:
        """An answer as the client gets it."""
        chat, ids = self._around.chat, ids_of(said.token_ids)
        last, after = _last(ids), node.messages[-1]["role"]
        own = ids[:-1] if last in chat.ends else ids
        whole = chat.text(own)
        stopped = [whole.find(stop) for stop in asked.stops if stop in whole]
        thoughts, text = chat.reasoned(whole[: min(stopped)] if stopped else whole, after)
        reply = Reply(text)
        if asked.schemas and last is not None and last == chat.end_of_call:
            reply = await self._around.parse(text, asked.schemas)
        message: Message = {"role": "assistant", "content": reply.text}
        if thoughts:
            message["reasoning_content"] = thoughts
        if reply.calls:
            before = sum(one.calls for one in node.path())
            message["tool_calls"] = [_call(call, number) for number, call in enumerate(reply.calls, before)]
        cut = said.finish == "length" and last not in chat.ends and not stopped
        return Choice(
            message,
            "tool_calls" if reply.calls else "length" if cut else "stop",
            said,
            spelled=tuple(map(self._spell, ids.tolist())) if asked.logprobs else None,
            thought=self._thought(own, after),
            errors=int(bool(reply.error)),
        )

    def _spell(self, token: int) -> str:
        known = self._around.spelled
        if token not in known:
            known[token] = self._around.chat.text([token])
        return known[token]

    def _thought(self, ids: Ids, after: str) -> int:
        """Tokens of an answer that are reasoning, and space behind it."""
        chat = self._around.chat
        span = chat.reasoning(ids, after)
        end = 0 if span is None else span.stop
        while 0 < end < len(ids) and not chat.text(ids[end : end + 1]).strip():
            end += 1
        return end

    def _drifts(self, leaf: Node) -> bool:
        path = leaf.path()[:-1]
        if len(path) == 1:
            return False  # it was rendered
        messages = [message for node in path for message in node.messages]
        try:
            fresh = self._around.chat.opening(messages, path[0].schemas)
        except ConfigError:
            return True
        return not np.array_equal(ids_of(fresh), path[-1].tokens)


def _call(call: Call, number: int) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call_id(call.name, number), "type": "function", "function": function}


def _last(ids: Ids) -> int | None:
    return int(ids[-1]) if len(ids) else None


def _first(chat: Chat, prompt: Prompt) -> tuple[tuple[Message, ...], tuple[dict[str, Any], ...]] | None:
    """What a client asks with that begins with the prompt as it is; None where its ids are not there."""
    if not len(prompt.token_ids):
        return None
    try:
        return normal(prompt.messages), tuple(chat.schemas(prompt))
    except (Refused, ConfigError):
        return None
