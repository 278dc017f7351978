"""One session: a client's requests to the policy and the token tree that records them."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any, TypeVar

import numpy as np

from megarl.chat_format.chat_template import ChatTemplate
from megarl.config import ConfigError, RolloutConfig
from megarl.engine.engine_protocol import Generation, Policy, RequestFailed, StreamingPolicy
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
"""Requests beyond `rollout.max_turns` that get an empty answer.

Further ones get an error, to stop agents that never end.
"""
_TIMEOUT_REASON = "it did not finish within rollout.step_timeout"


@dataclass
class SessionMetrics:
    """Metrics of one session, or summed over several.

    Attributes:
        requests: requests converted to tokens
        refused: requests that could not be
        failed: requests that the engine did not answer
        forks: as in `TokenTree`
        branches: conversations that the sessions produced
        drift: branches whose prompt would have had other ids if their messages had been rendered and tokenized afresh
        over_max_turns: requests beyond `rollout.max_turns`
        observations_truncated: tool results that were truncated for the policy
        ignored: count of each request field that was ignored
    """

    sessions: int = 0
    requests: int = 0
    refused: int = 0
    failed: int = 0
    forks: int = 0
    branches: int = 0
    drift: int = 0
    over_max_turns: int = 0
    observations_truncated: int = 0
    ignored: Counter[str] = field(default_factory=Counter)

    def add(self, other: SessionMetrics) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass(frozen=True)
class SessionContext:
    """What sessions need besides the policy.

    Attributes:
        model: the policy's name for clients
        log: called with the name of each ignored field
    """

    renderer: MessageRenderer
    config: RolloutConfig
    model: str = "policy"
    log: Callable[[str], None] = lambda line: None


@dataclass(frozen=True)
class TreePosition:
    """Where in the tree a request is answered.

    Attributes:
        ids: the context sent to the engine
        num_routed: leading ids with known routing
        is_past_last_turn: the answer at `node` was the policy's last, so the engine is not asked
    """

    node: Node
    history: Digest
    ids: Ids
    num_routed: int
    is_past_last_turn: bool = False


class AgentSession:
    """A session as seen by its owner.

    Attributes:
        id, key, base_url: how the client reaches it
        failure: why the session failed; empty if it did not
    """

    def __init__(
        self,
        context: SessionContext,
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
        self.model = context.model
        self.tree = TokenTree()
        self.metrics = SessionMetrics(sessions=1)
        self.failure = ""
        self.params = dict(params)
        self._context, self._prompt, self._seed = context, prompt, seed
        self._policy_ready = asyncio.Event()
        self.set_policy(policy, halt or asyncio.Event(), deadline)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._unanswered: dict[Node, str] = {}
        self._unexpected_error: Exception | None = None
        self._num_asked: Counter[bytes] = Counter()
        self._prompt_request = _make_prompt_request(context.renderer.chat, prompt)
        self._drift_by_leaf: dict[Node, bool] = {}
        self.message_cache = MessageCache()

    # --- for the owner

    def set_policy(self, policy: Policy, halt: asyncio.Event, deadline: float | None = None) -> None:
        """Continue with another policy, as in a later step.

        Halted requests keep their tokens. While `halt` is set, a request that the policy aborts waits for the next
        policy; the client does not notice.
        """
        self._policy, self._halt, self._deadline = policy, halt, deadline
        self._policy_ready.set()

    def fail(self, reason: str) -> None:
        """Refuse further requests and abort all branches for this reason; the first reason counts."""
        self.failure = self.failure or reason

    def collect_branches(self) -> tuple[PartialRollout, ...]:
        """Return one conversation per leaf of the tree.

        All are `aborted` if the session failed, or if one of its requests failed and was not answered later. If nothing
        was sampled, the result is one aborted conversation without a policy turn. An unexpected exception of the
        policy, which concerns more than one request, is raised here.
        """
        if self._unexpected_error is not None:
            raise self._unexpected_error
        forks, leaves = self.tree.num_forks, self.tree.find_leaves()
        branches = tuple(
            replace(partial, branch=Branch(index, forks, self._has_drift(leaf)))
            for index, (partial, leaf) in enumerate(
                zip(self.tree.collect_branches(self._prompt, self._seed), leaves, strict=True)
            )
        )
        failure = self.failure or next(iter(self._unanswered.values()), "")
        if not branches:
            failure = failure or "the session made no request"
            branches = (PartialRollout.begin(self._prompt, self._seed),)
        return (
            tuple(replace(partial, status="aborted", failure=failure) for partial in branches) if failure else branches
        )

    def count_branches(self) -> None:
        """Update the metrics that are known only at the end."""
        leaves = self.tree.find_leaves()
        self.metrics.branches = len(leaves)
        self.metrics.drift = sum(map(self._has_drift, leaves))

    def _has_drift(self, leaf: Node) -> bool:
        """Return `MessageRenderer.has_drift`, cached because it renders the whole conversation."""
        if leaf not in self._drift_by_leaf:
            self._drift_by_leaf[leaf] = self._context.renderer.has_drift(leaf)
        return self._drift_by_leaf[leaf]

    async def close(self) -> None:
        """Cancel running requests and refuse further ones."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    # --- for the client

    async def run_request(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run `work`; cancel it when the session closes or the caller is cancelled.

        Raises RequestRefused if the session is closed or has failed.
        """
        self._check_open()
        task = asyncio.ensure_future(work())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await task
        except asyncio.CancelledError:
            waiting_task = asyncio.current_task()
            if waiting_task is not None and waiting_task.cancelling():
                raise  # the client disconnected
            raise RequestRefused("the session is closed", status=503, code="session_closed") from None

    def locate_request(self, request: CompletionRequest) -> TreePosition:
        """Find or add the context of a request in the tree. Raises RequestRefused."""
        self._check_open()
        for name in request.ignored:
            self.metrics.ignored[name] += 1
            self._context.log(name)
        tree, messages = self.tree, request.messages
        digests = self.message_cache.hash_prefixes(messages, request.schemas)
        answer, count = tree.find_answer(digests, messages)
        if answer is not None and answer.num_turns >= self._context.config.max_turns:
            return self._locate_past_limit(answer, digests[-1])
        node = tree.find_context(answer, digests[-1])
        if node is None:
            parent, rendered = self._render_context(answer, messages, count, request.schemas)
            node = tree.add_context(parent, answer, digests[-1], rendered.ids, rendered.messages, request.schemas)
            self.metrics.observations_truncated += rendered.num_truncated
        self.metrics.requests += 1
        self.metrics.forks = tree.num_forks
        return TreePosition(node, digests[-1], node.tokens, node.num_routed)

    def make_streamed_response(
        self, request: CompletionRequest, position: TreePosition, send: Callable[[Field, str], None]
    ) -> StreamedResponse:
        """Create the stream that `answer` feeds while the engine generates."""
        return StreamedResponse(self._context.renderer.chat, request, str(position.node.messages[-1]["role"]), send)

    async def answer(
        self,
        request: CompletionRequest,
        position: TreePosition,
        response_id: str = "",
        streams: Sequence[StreamedResponse] = (),
    ) -> CompletionResponse:
        """Sample the policy's answers and add them to the tree. Raises RequestRefused.

        Args:
            response_id: id of the response
            streams: one stream per choice, fed during generation if the policy supports it
        """
        node = position.node
        response_id = response_id or new_id()
        if position.is_past_last_turn:
            return CompletionResponse(response_id, self.model, len(position.ids), (EMPTY_CHOICE,) * request.num_choices)
        try:
            generations = await self._sample(request, position, streams)
            async with asyncio.timeout_at(self._deadline):
                choices = [await self._context.renderer.read_answer(one, request, node) for one in generations]
            if not all(one.is_prefix_of(choice.message) for one, choice in zip(streams, choices, strict=False)):
                raise RequestFailed("the final answer differs from what was streamed to the client")
        except TimeoutError:
            self.fail(_TIMEOUT_REASON)
            raise self._fail_request(node, self.failure, 503) from None
        except RequestFailed as error:
            raise self._fail_request(node, str(error), 500) from None
        except Exception as error:  # engine loss or a bug: the session's owner must see it
            self._unexpected_error = self._unexpected_error or error
            raise self._fail_request(node, f"{type(error).__name__}: {error}", 503) from None
        self._unanswered.pop(node, None)
        for choice in choices:
            self.tree.add_answer(node, extend_digest(position.history, choice.message), choice, position.num_routed)
        return CompletionResponse(response_id, self.model, len(position.ids), tuple(choices))

    def _check_open(self) -> None:
        if self._deadline is not None and asyncio.get_running_loop().time() >= self._deadline:
            self.fail(_TIMEOUT_REASON)
        if self._closed or self.failure:
            reason = f"the session failed: {self.failure}" if self.failure else "the session is closed"
            raise RequestRefused(reason, status=503, code="session_closed")

    def _fail_request(self, node: Node, reason: str, status: int) -> RequestRefused:
        self.metrics.failed += 1
        self._unanswered[node] = reason
        return RequestRefused(reason, status=status, code="engine_failed")

    # --- rendering and sampling

    def _render_context(
        self, answer: Node | None, messages: tuple[Message, ...], count: int, schemas: Schemas
    ) -> tuple[Node | None, RenderedMessages]:
        """Render the messages after the `answer` answer, or the whole conversation if that is None.

        Raises RequestRefused.
        """
        renderer, config = self._context.renderer, self._context.config
        try:
            if answer is not None:
                return renderer.render_continuation(answer, messages, count, schemas, config)
            prompt_ids = self._prompt.token_ids
            if (messages, schemas) == self._prompt_request and len(prompt_ids) < config.max_context:
                return None, RenderedMessages(prompt_ids, messages)
            return None, renderer.render_conversation(messages, schemas, config)
        except ConfigError as error:
            raise RequestRefused(str(error), "messages") from None
        except ContextOverflow as error:
            if answer is not None:
                answer.end_reason = "length"
            raise RequestRefused(
                f"the messages are {error.tokens} tokens, and a conversation may have {config.max_context} with its "
                "answer (rollout.max_context)",
                "messages",
                "context_length_exceeded",
            ) from None

    def _locate_past_limit(self, answer: Node, history: Digest) -> TreePosition:
        """Handle a request that follows the policy's last allowed answer."""
        answer.end_reason = "max_turns"
        self.metrics.over_max_turns += 1
        if self.metrics.over_max_turns > _MAX_EXTRA_REQUESTS:
            max_turns = self._context.config.max_turns
            raise RequestRefused(
                f"the policy has used its {max_turns} turns (rollout.max_turns)", "messages", "max_turns_exceeded"
            )
        return TreePosition(answer, history, answer.tokens, 0, is_past_last_turn=True)

    async def _sample(
        self, request: CompletionRequest, position: TreePosition, streams: Sequence[StreamedResponse]
    ) -> list[Generation]:
        config, ids = self._context.config, position.ids
        budget = min(config.max_new_tokens, config.max_context - len(ids))
        budget = budget if request.max_tokens is None else min(budget, request.max_tokens)
        params = {**self.params, "max_new_tokens": budget}
        if request.stop_strings:
            params["stop"] = list(request.stop_strings)
        seeds = self._derive_seeds(ids, request.num_choices)

        if request.num_choices == 1:
            return [await self._generate(position, {**params, **seeds[0]}, *streams)]
        tasks = [
            asyncio.ensure_future(self._generate(position, {**params, **seed}, stream))
            for seed, stream in zip(seeds, streams or repeat(None, len(seeds)), strict=True)
        ]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _generate(
        self, position: TreePosition, params: dict[str, Any], stream: StreamedResponse | None = None
    ) -> Generation:
        """Generate one answer; if it is halted midway, continue with the next policy."""
        ids, routed, budget = position.ids, position.num_routed, params["max_new_tokens"]
        generation: Generation | None = None
        while True:
            await self._policy_ready.wait()
            policy, halt = self._policy, self._halt
            num_generated = 0 if generation is None else len(generation.token_ids)
            context = ids if generation is None else np.concatenate([ids, generation.token_ids])
            num_routed = (
                routed if generation is None or generation.routing is None else routed + len(generation.routing)
            )
            try:
                async with asyncio.timeout_at(self._deadline):
                    request_params = {**params, "max_new_tokens": budget - num_generated}
                    if stream is not None and isinstance(policy, StreamingPolicy):
                        continuation = await policy.stream(context, request_params, num_routed, stream.add_tokens)
                    else:
                        continuation = await policy.generate(context, request_params, num_routed)
                generation = continuation if generation is None else merge_generations(generation, continuation)
            except Halted:
                pass
            else:
                is_complete = (
                    len(generation.token_ids) == budget
                    or get_last(generation.token_ids) in self._context.renderer.chat.end_token_ids
                )
                if generation.finish_reason != "abort" or is_complete:
                    return generation
                if not halt.is_set():
                    raise RequestFailed(generation.abort_reason or "the engine aborted the answer")
            if policy is self._policy:
                self._policy_ready.clear()

    def _derive_seeds(self, ids: Ids, count: int) -> list[dict[str, int]]:
        """Return sampling seeds for `count` answers to the same ids.

        The first answer uses the run's seed. All others, including those of later requests, get different seeds, since
        equal seeds would sample equal answers.
        """
        if "sampling_seed" not in self.params:
            return [{}] * count
        digest = hashlib.blake2b(np.ascontiguousarray(ids).tobytes()).digest()
        base_seed, num_previous = self.params["sampling_seed"], self._num_asked[digest]
        self._num_asked[digest] += count
        return [
            {"sampling_seed": base_seed if number == 0 else derive_seed(base_seed, number, 0)}
            for number in range(num_previous, num_previous + count)
        ]


def _make_prompt_request(chat: ChatTemplate, prompt: Prompt) -> tuple[tuple[Message, ...], Schemas] | None:
    """Return the messages and schemas of a request that asks the prompt itself; None if it has no ids."""
    if not len(prompt.token_ids):
        return None
    try:
        return normalize_messages(prompt.messages), tuple(chat.select_schemas(prompt))
    except (RequestRefused, ConfigError):
        return None
