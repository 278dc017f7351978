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

from megarl.chat_format.chat_template import Chat
from megarl.config import ConfigError, RolloutConfig
from megarl.engine.generation import Generation, Policy, RequestFailed, Streams
from megarl.rollout.conversation import Halted, sample_seed
from megarl.rollout.partial_rollouts import Partial
from megarl.rollout.request_gate import joined
from megarl.rollout.session_server.rendering import Rendering, Shown, TooMuch, last_of
from megarl.rollout.session_server.requests import Asked, Digest, Heard, Refused, extended, normal
from megarl.rollout.session_server.responses import NOTHING, Answered, Field, Telling, new_id
from megarl.rollout.session_server.token_tree import Node, Schemas, Tree
from megarl.types import Branch, Ids, Message, Prompt

T = TypeVar("T")
_MOST_OVER = 32
"""Requests beyond `rollout.max_turns` that are answered with nothing; agents that then still go on would do so for
ever, and are told by an error."""
_LATE = "it was not done within rollout.step_timeout"


@dataclass
class Figures:
    """Of one session, or of several together.

    requests: that became tokens. refused: that could not. failed: that the engine did not answer. forks: as of a
    `Tree`. branches: conversations that came of it all. drift: those of them that would have been asked for with other
    ids if their messages had been rendered and tokenised afresh. turns_over: requests beyond `rollout.max_turns`.
    observations_cut: results of tools of which the policy has seen less than the client sent. ignored: fields that
    were not followed, by name.
    """

    sessions: int = 0
    requests: int = 0
    refused: int = 0
    failed: int = 0
    forks: int = 0
    branches: int = 0
    drift: int = 0
    turns_over: int = 0
    observations_cut: int = 0
    ignored: Counter[str] = field(default_factory=Counter)

    def add(self, other: Figures) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass(frozen=True)
class Around:
    """What sessions need besides the policy. model: its name for clients. say: is told of each field that is not
    followed, once."""

    rendering: Rendering
    config: RolloutConfig
    model: str = "policy"
    say: Callable[[str], None] = lambda line: None


@dataclass(frozen=True)
class Place:
    """Where in its tree a request is answered. ids: what the engine is asked with; routed: those whose routing is known
    already. over: it is not asked, for the answer at `node` was the last that the policy may give."""

    node: Node
    history: Digest
    ids: Ids
    routed: int
    over: bool = False


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
        deadline: float | None = None,
        seed: int = 0,
        halt: asyncio.Event | None = None,
    ) -> None:
        self.id, self.key = secrets.token_hex(8), f"sk-{secrets.token_urlsafe(24)}"
        self.base_url = f"{url}/s/{self.id}/v1"
        self.model = around.model
        self.tree = Tree()
        self.figures = Figures(sessions=1)
        self.failure = ""
        self.params = dict(params)
        self._around, self._prompt, self._seed = around, prompt, seed
        self._seated = asyncio.Event()
        self.seat(policy, halt or asyncio.Event(), deadline)
        self._work: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._unanswered: dict[Node, str] = {}
        self._broken: Exception | None = None
        self._asked: Counter[bytes] = Counter()
        self._first = _first(around.rendering.chat, prompt)
        self._drifted: dict[Node, bool] = {}
        self.heard = Heard()

    # --- for its owner

    def seat(self, policy: Policy, halt: asyncio.Event, deadline: float | None = None) -> None:
        """Go on with another policy, as in a later step: also what was halted, with the tokens that it has. Where
        `halt` is set, what the policy cuts off waits for the next one; its client does not notice."""
        self._policy, self._halt, self._deadline = policy, halt, deadline
        self._seated.set()

    def fail(self, reason: str) -> None:
        """Its branches are aborted, for this reason, and nothing more is answered. The first one counts."""
        self.failure = self.failure or reason

    def branches(self) -> tuple[Partial, ...]:
        """What has come of it, one conversation for every last answer. All are `aborted` where the session has failed,
        or a request of it has which was not answered later; also where nothing was sampled, which is one without a turn
        of the policy. Raises what the policy raised where that was of more than one request."""
        if self._broken is not None:
            raise self._broken
        forks, leaves = self.tree.forks, self.tree.leaves()
        found = tuple(
            replace(one, branch=Branch(number, forks, self._drifts(leaf)))
            for number, (one, leaf) in enumerate(zip(self.tree.branches(self._prompt, self._seed), leaves, strict=True))
        )
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

    def _drifts(self, leaf: Node) -> bool:
        """As of `Rendering.drifts`, which renders it all, and is asked once."""
        if leaf not in self._drifted:
            self._drifted[leaf] = self._around.rendering.drifts(leaf)
        return self._drifted[leaf]

    async def close(self) -> None:
        """Cancel the requests under way; nothing more is answered."""
        self._closed = True
        for task in self._work:
            task.cancel()
        if self._work:
            await asyncio.wait(self._work)

    # --- for its client

    async def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What comes of the work, which ends with the session, and with whoever waits for it. Raises Refused."""
        self._check_open()
        task = asyncio.ensure_future(work())
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        try:
            return await task
        except asyncio.CancelledError:
            waits = asyncio.current_task()
            if waits is not None and waits.cancelling():
                raise  # the client has gone
            raise Refused("the session is closed", status=503, code="session_closed") from None

    def place(self, asked: Asked) -> Place:
        """The context that a request becomes. Raises Refused."""
        self._check_open()
        for name in asked.ignored:
            self.figures.ignored[name] += 1
            self._around.say(name)
        tree, messages = self.tree, asked.messages
        known = self.heard.histories(messages, asked.schemas)
        found, count = tree.find(known, messages)
        if found is not None and found.turns >= self._around.config.max_turns:
            return self._over(found, known[-1])
        node = tree.context(found, known[-1])
        if node is None:
            parent, shown = self._shown(found, messages, count, asked.schemas)
            node = tree.ask(parent, found, known[-1], shown.ids, shown.messages, asked.schemas)
            self.figures.observations_cut += shown.cut
        self.figures.requests += 1
        self.figures.forks = tree.forks
        return Place(node, known[-1], node.tokens, node.known)

    def telling(self, asked: Asked, place: Place, say: Callable[[Field, str], None]) -> Telling:
        """What is told of an answer while it is written; see `answer`."""
        return Telling(self._around.rendering.chat, asked, str(place.node.messages[-1]["role"]), say)

    async def answer(self, asked: Asked, place: Place, own: str = "", told: Sequence[Telling] = ()) -> Answered:
        """What the policy says to it. own: the answer's id. told: one for each choice, where they are to be told while
        they are written, by a policy that can. Raises Refused."""
        node = place.node
        own = own or new_id()
        if place.over:
            return Answered(own, self.model, len(place.ids), (NOTHING,) * asked.choices)
        try:
            said = await self._sample(asked, place, told)
            async with asyncio.timeout_at(self._deadline):
                choices = [await self._around.rendering.read(one, asked, node) for one in said]
            if not all(one.fits(choice.message) for one, choice in zip(told, choices, strict=False)):
                raise RequestFailed("the answer has become another than the client was told of while it was written")
        except TimeoutError:
            self.fail(_LATE)
            raise self._failed(node, self.failure, 503) from None
        except RequestFailed as error:
            raise self._failed(node, str(error), 500) from None
        except Exception as error:  # the engine is gone, or this is wrong: whoever has opened the session hears of it
            self._broken = self._broken or error
            raise self._failed(node, f"{type(error).__name__}: {error}", 503) from None
        self._unanswered.pop(node, None)
        for choice in choices:
            self.tree.answer(node, extended(place.history, choice.message), choice, place.routed)
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

    def _shown(
        self, found: Node | None, messages: tuple[Message, ...], count: int, schemas: Schemas
    ) -> tuple[Node | None, Shown]:
        """As of `Rendering.go_on`, or `begin` where nothing was found. Raises Refused."""
        rendering, config = self._around.rendering, self._around.config
        try:
            if found is not None:
                return rendering.go_on(found, messages, count, schemas, config)
            own = self._prompt.token_ids
            if (messages, schemas) == self._first and len(own) < config.max_context:
                return None, Shown(own, messages)
            return None, rendering.begin(messages, schemas, config)
        except ConfigError as error:
            raise Refused(str(error), "messages") from None
        except TooMuch as error:
            if found is not None:
                found.ended = "length"
            raise Refused(
                f"the messages are {error.tokens} tokens, and a conversation may have {config.max_context} with its "
                "answer (rollout.max_context)",
                "messages",
                "context_length_exceeded",
            ) from None

    def _over(self, found: Node, history: Digest) -> Place:
        """Of a request behind an answer that was to be the last."""
        found.ended = "max_turns"
        self.figures.turns_over += 1
        if self.figures.turns_over > _MOST_OVER:
            most = self._around.config.max_turns
            raise Refused(f"the policy has had its {most} turns (rollout.max_turns)", "messages", "max_turns_exceeded")
        return Place(found, history, found.tokens, 0, over=True)

    async def _sample(self, asked: Asked, place: Place, told: Sequence[Telling]) -> list[Generation]:
        config, ids = self._around.config, place.ids
        budget = min(config.max_new_tokens, config.max_context - len(ids))
        budget = budget if asked.limit is None else min(budget, asked.limit)
        params = {**self.params, "max_new_tokens": budget}
        if asked.stops:
            params["stop"] = list(asked.stops)
        seeds = self._seeds(ids, asked.choices)

        if asked.choices == 1:
            return [await self._write(place, {**params, **seeds[0]}, *told)]
        tellings: Sequence[Telling | None] = told or [None] * asked.choices
        tasks = [
            asyncio.ensure_future(self._write(place, {**params, **seed}, one))
            for seed, one in zip(seeds, tellings, strict=True)
        ]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _write(self, place: Place, params: dict[str, Any], told: Telling | None = None) -> Generation:
        """One answer; where the policy is halted in the middle, what the next one makes of it."""
        ids, routed, budget = place.ids, place.routed, params["max_new_tokens"]
        said: Generation | None = None
        while True:
            await self._seated.wait()
            policy, halt = self._policy, self._halt
            written = 0 if said is None else len(said.token_ids)
            context = ids if said is None else np.concatenate([ids, said.token_ids])
            known = routed if said is None or said.routing is None else routed + len(said.routing)
            try:
                async with asyncio.timeout_at(self._deadline):
                    own = {**params, "max_new_tokens": budget - written}
                    if told is not None and isinstance(policy, Streams):
                        more = await policy.stream(context, own, known, told.hear)
                    else:
                        more = await policy.generate(context, own, known)
                said = more if said is None else joined(said, more)
            except Halted:
                pass
            else:
                over = len(said.token_ids) == budget or last_of(said.token_ids) in self._around.rendering.chat.ends
                if said.finish != "abort" or over:
                    return said
                if not halt.is_set():
                    raise RequestFailed(said.reason or "the engine cut the answer off")
            if policy is self._policy:
                self._seated.clear()

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


def _first(chat: Chat, prompt: Prompt) -> tuple[tuple[Message, ...], Schemas] | None:
    """What a client asks with that begins with the prompt as it is; None where its ids are not there."""
    if not len(prompt.token_ids):
        return None
    try:
        return normal(prompt.messages), tuple(chat.schemas(prompt))
    except (Refused, ConfigError):
        return None
