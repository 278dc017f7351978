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

from megarl.chat_format.chat_template import ChatTemplate
from megarl.config import ConfigError, RolloutConfig
from megarl.engine.generation import Generation, Policy, RequestFailed, StreamingPolicy
from megarl.rollout.conversation import Halted, derive_seed
from megarl.rollout.partial_rollouts import PartialRollout
from megarl.rollout.request_gate import merge_generations
from megarl.rollout.session_server.rendering import ContextOverflow, MessageRenderer, RenderedMessages, get_last
from megarl.rollout.session_server.requests import (
    CompletionRequest,
    Digest,
    MessageCache,
    RequestRefused,
    extend_digest,
    normalize_messages,
)
from megarl.rollout.session_server.responses import EMPTY_CHOICE, CompletionResponse, Field, StreamedResponse, new_id
from megarl.rollout.session_server.token_tree import Node, Schemas, TokenTree
from megarl.types import Branch, Ids, Message, Prompt

T = TypeVar("T")
_MAX_EXTRA_REQUESTS = 32
"""Requests beyond `rollout.max_turns` that are answered with nothing; agents that then still go on would do so for
ever, and are told by an error."""
_TIMEOUT_REASON = "it was not done within rollout.step_timeout"


@dataclass
class SessionMetrics:
    """Of one session, or of several together.

    requests: that became tokens. refused: that could not. failed: that the engine did not answer. forks: as of a
    `TokenTree`. branches: conversations that came of it all. drift: those of them that would have been asked for with other
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

    def add(self, other: SessionMetrics) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass(frozen=True)
class SessionContext:
    """What sessions need besides the policy. model: its name for clients. say: is told of each field that is not
    followed, once."""

    renderer: MessageRenderer
    config: RolloutConfig
    model: str = "policy"
    log: Callable[[str], None] = lambda line: None


@dataclass(frozen=True)
class TreePosition:
    """Where in its tree a request is answered. ids: what the engine is asked with; routed: those whose routing is known
    already. over: it is not asked, for the answer at `node` was the last that the policy may give."""

    node: Node
    history: Digest
    ids: Ids
    num_routed: int
    is_past_last_turn: bool = False


class AgentSession:
    """A session as its owner has it. id, key, base_url: by which its client reaches it. failure: why it has failed,
    empty where it has not."""

    def __init__(
        self,
        around: SessionContext,
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
        self.tree = TokenTree()
        self.metrics = SessionMetrics(sessions=1)
        self.failure = ""
        self.params = dict(params)
        self._context, self._prompt, self._seed = around, prompt, seed
        self._policy_ready = asyncio.Event()
        self.set_policy(policy, halt or asyncio.Event(), deadline)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._unanswered: dict[Node, str] = {}
        self._unexpected_error: Exception | None = None
        self._num_asked: Counter[bytes] = Counter()
        self._prompt_request = _make_prompt_request(around.renderer.chat, prompt)
        self._drift_by_leaf: dict[Node, bool] = {}
        self.message_cache = MessageCache()

    # --- for its owner

    def set_policy(self, policy: Policy, halt: asyncio.Event, deadline: float | None = None) -> None:
        """Go on with another policy, as in a later step: also what was halted, with the tokens that it has. Where
        `halt` is set, what the policy cuts off waits for the next one; its client does not notice."""
        self._policy, self._halt, self._deadline = policy, halt, deadline
        self._policy_ready.set()

    def fail(self, reason: str) -> None:
        """Its branches are aborted, for this reason, and nothing more is answered. The first one counts."""
        self.failure = self.failure or reason

    def collect_branches(self) -> tuple[PartialRollout, ...]:
        """What has come of it, one conversation for every last answer. All are `aborted` where the session has failed,
        or a request of it has which was not answered later; also where nothing was sampled, which is one without a turn
        of the policy. Raises what the policy raised where that was of more than one request."""
        if self._unexpected_error is not None:
            raise self._unexpected_error
        forks, leaves = self.tree.num_forks, self.tree.find_leaves()
        found = tuple(
            replace(one, branch=Branch(number, forks, self._has_drift(leaf)))
            for number, (one, leaf) in enumerate(
                zip(self.tree.collect_branches(self._prompt, self._seed), leaves, strict=True)
            )
        )
        failure = self.failure or next(iter(self._unanswered.values()), "")
        if not found:
            failure = failure or "the session asked the policy for nothing"
            found = (PartialRollout.begin(self._prompt, self._seed),)
        return tuple(replace(one, status="aborted", failure=failure) for one in found) if failure else found

    def count_branches(self) -> None:
        """Have the figures of what only its end can say."""
        leaves = self.tree.find_leaves()
        self.metrics.branches = len(leaves)
        self.metrics.drift = sum(map(self._has_drift, leaves))

    def _has_drift(self, leaf: Node) -> bool:
        """As of `MessageRenderer.has_drift`, which renders it all, and is asked once."""
        if leaf not in self._drift_by_leaf:
            self._drift_by_leaf[leaf] = self._context.renderer.has_drift(leaf)
        return self._drift_by_leaf[leaf]

    async def close(self) -> None:
        """Cancel the requests under way; nothing more is answered."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    # --- for its client

    async def run_request(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What comes of the work, which ends with the session, and with whoever waits for it. Raises Refused."""
        self._check_open()
        task = asyncio.ensure_future(work())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await task
        except asyncio.CancelledError:
            waits = asyncio.current_task()
            if waits is not None and waits.cancelling():
                raise  # the client has gone
            raise RequestRefused("the session is closed", status=503, code="session_closed") from None

    def locate_request(self, asked: CompletionRequest) -> TreePosition:
        """The context that a request becomes. Raises Refused."""
        self._check_open()
        for name in asked.ignored:
            self.metrics.ignored[name] += 1
            self._context.log(name)
        tree, messages = self.tree, asked.messages
        known = self.message_cache.hash_prefixes(messages, asked.schemas)
        found, count = tree.find_answer(known, messages)
        if found is not None and found.num_turns >= self._context.config.max_turns:
            return self._locate_past_limit(found, known[-1])
        node = tree.find_context(found, known[-1])
        if node is None:
            parent, shown = self._render_context(found, messages, count, asked.schemas)
            node = tree.add_context(parent, found, known[-1], shown.ids, shown.messages, asked.schemas)
            self.metrics.observations_cut += shown.num_truncated
        self.metrics.requests += 1
        self.metrics.forks = tree.num_forks
        return TreePosition(node, known[-1], node.tokens, node.num_routed)

    def make_streamed_response(
        self, asked: CompletionRequest, place: TreePosition, say: Callable[[Field, str], None]
    ) -> StreamedResponse:
        """What is told of an answer while it is written; see `answer`."""
        return StreamedResponse(self._context.renderer.chat, asked, str(place.node.messages[-1]["role"]), say)

    async def answer(
        self, asked: CompletionRequest, place: TreePosition, own: str = "", told: Sequence[StreamedResponse] = ()
    ) -> CompletionResponse:
        """What the policy says to it. own: the answer's id. told: one for each choice, where they are to be told while
        they are written, by a policy that can. Raises Refused."""
        node = place.node
        own = own or new_id()
        if place.is_past_last_turn:
            return CompletionResponse(own, self.model, len(place.ids), (EMPTY_CHOICE,) * asked.num_choices)
        try:
            said = await self._sample(asked, place, told)
            async with asyncio.timeout_at(self._deadline):
                choices = [await self._context.renderer.read_answer(one, asked, node) for one in said]
            if not all(one.is_prefix_of(choice.message) for one, choice in zip(told, choices, strict=False)):
                raise RequestFailed("the answer has become another than the client was told of while it was written")
        except TimeoutError:
            self.fail(_TIMEOUT_REASON)
            raise self._fail_request(node, self.failure, 503) from None
        except RequestFailed as error:
            raise self._fail_request(node, str(error), 500) from None
        except Exception as error:  # the engine is gone, or this is wrong: whoever has opened the session hears of it
            self._unexpected_error = self._unexpected_error or error
            raise self._fail_request(node, f"{type(error).__name__}: {error}", 503) from None
        self._unanswered.pop(node, None)
        for choice in choices:
            self.tree.add_answer(node, extend_digest(place.history, choice.message), choice, place.num_routed)
        return CompletionResponse(own, self.model, len(place.ids), tuple(choices))

    def _check_open(self) -> None:
        if self._deadline is not None and asyncio.get_running_loop().time() >= self._deadline:
            self.fail(_TIMEOUT_REASON)
        if self._closed or self.failure:
            reason = f"the session has failed: {self.failure}" if self.failure else "the session is closed"
            raise RequestRefused(reason, status=503, code="session_closed")

    def _fail_request(self, node: Node, reason: str, status: int) -> RequestRefused:
        self.metrics.failed += 1
        self._unanswered[node] = reason
        return RequestRefused(reason, status=status, code="engine_failed")

    # --- tokens

    def _render_context(
        self, found: Node | None, messages: tuple[Message, ...], count: int, schemas: Schemas
    ) -> tuple[Node | None, RenderedMessages]:
        """As of `MessageRenderer.render_continuation`, or `begin` where nothing was found. Raises Refused."""
        rendering, config = self._context.renderer, self._context.config
        try:
            if found is not None:
                return rendering.render_continuation(found, messages, count, schemas, config)
            own = self._prompt.token_ids
            if (messages, schemas) == self._prompt_request and len(own) < config.max_context:
                return None, RenderedMessages(own, messages)
            return None, rendering.render_conversation(messages, schemas, config)
        except ConfigError as error:
            raise RequestRefused(str(error), "messages") from None
        except ContextOverflow as error:
            if found is not None:
                found.end_reason = "length"
            raise RequestRefused(
                f"the messages are {error.tokens} tokens, and a conversation may have {config.max_context} with its "
                "answer (rollout.max_context)",
                "messages",
                "context_length_exceeded",
            ) from None

    def _locate_past_limit(self, found: Node, history: Digest) -> TreePosition:
        """Of a request behind an answer that was to be the last."""
        found.end_reason = "max_turns"
        self.metrics.turns_over += 1
        if self.metrics.turns_over > _MAX_EXTRA_REQUESTS:
            most = self._context.config.max_turns
            raise RequestRefused(
                f"the policy has had its {most} turns (rollout.max_turns)", "messages", "max_turns_exceeded"
            )
        return TreePosition(found, history, found.tokens, 0, is_past_last_turn=True)

    async def _sample(
        self, asked: CompletionRequest, place: TreePosition, told: Sequence[StreamedResponse]
    ) -> list[Generation]:
        config, ids = self._context.config, place.ids
        budget = min(config.max_new_tokens, config.max_context - len(ids))
        budget = budget if asked.max_tokens is None else min(budget, asked.max_tokens)
        params = {**self.params, "max_new_tokens": budget}
        if asked.stop_strings:
            params["stop"] = list(asked.stop_strings)
        seeds = self._derive_seeds(ids, asked.num_choices)

        if asked.num_choices == 1:
            return [await self._generate(place, {**params, **seeds[0]}, *told)]
        tellings: Sequence[StreamedResponse | None] = told or [None] * asked.num_choices
        tasks = [
            asyncio.ensure_future(self._generate(place, {**params, **seed}, one))
            for seed, one in zip(seeds, tellings, strict=True)
        ]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _generate(
        self, place: TreePosition, params: dict[str, Any], told: StreamedResponse | None = None
    ) -> Generation:
        """One answer; where the policy is halted in the middle, what the next one makes of it."""
        ids, routed, budget = place.ids, place.num_routed, params["max_new_tokens"]
        said: Generation | None = None
        while True:
            await self._policy_ready.wait()
            policy, halt = self._policy, self._halt
            written = 0 if said is None else len(said.token_ids)
            context = ids if said is None else np.concatenate([ids, said.token_ids])
            known = routed if said is None or said.routing is None else routed + len(said.routing)
            try:
                async with asyncio.timeout_at(self._deadline):
                    own = {**params, "max_new_tokens": budget - written}
                    if told is not None and isinstance(policy, StreamingPolicy):
                        more = await policy.stream(context, own, known, told.add_tokens)
                    else:
                        more = await policy.generate(context, own, known)
                said = more if said is None else merge_generations(said, more)
            except Halted:
                pass
            else:
                over = (
                    len(said.token_ids) == budget
                    or get_last(said.token_ids) in self._context.renderer.chat.end_token_ids
                )
                if said.finish_reason != "abort" or over:
                    return said
                if not halt.is_set():
                    raise RequestFailed(said.abort_reason or "the engine cut the answer off")
            if policy is self._policy:
                self._policy_ready.clear()

    def _derive_seeds(self, ids: Ids, count: int) -> list[dict[str, int]]:
        """Of so many answers to these ids: the run's own for the first, and others for all that follow, also in later
        requests, which would all read the same."""
        if "sampling_seed" not in self.params:
            return [{}] * count
        asked = hashlib.blake2b(np.ascontiguousarray(ids).tobytes()).digest()
        own, first = self.params["sampling_seed"], self._num_asked[asked]
        self._num_asked[asked] += count
        return [
            {"sampling_seed": own if number == 0 else derive_seed(own, number, 0)}
            for number in range(first, first + count)
        ]


def _make_prompt_request(chat: ChatTemplate, prompt: Prompt) -> tuple[tuple[Message, ...], Schemas] | None:
    """What a client asks with that begins with the prompt as it is; None where its ids are not there."""
    if not len(prompt.token_ids):
        return None
    try:
        return normalize_messages(prompt.messages), tuple(chat.select_schemas(prompt))
    except (RequestRefused, ConfigError):
        return None
