"""One session: a client's requests to the policy and the token tree that records them."""

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
from megarl.config import ConfigError
from megarl.engine.engine_protocol import Generation, Policy, RecordedPrefix, RequestFailed, TokenCallback
from megarl.rollout.conversation import TIMEOUT_REASON, Deadline, derive_seed
from megarl.rollout.partial_rollouts import PartialRollout
from megarl.rollout.session_server.rendering import ContextOverflow, MessageRenderer, RenderedMessages, get_last
from megarl.rollout.session_server.requests import (
    CompletionRequest,
    RequestRefused,
    hash_prefixes,
    normalize_messages,
)
from megarl.rollout.session_server.responses import EMPTY_CHOICE, Choice, StreamedResponse
from megarl.rollout.session_server.token_tree import Node, Schemas, TokenTree
from megarl.types import Branch, Ids, Message, Prompt

T = TypeVar("T")
_MAX_EXTRA_REQUESTS = 32
"""Requests beyond `rollout.max_turns` that get an empty answer; further ones get an error, to end the agent."""


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


class AgentSession:
    """A session as seen by its owner.

    Args:
        model: the policy's name for clients
        log_ignored: called with the name of each ignored field

    Attributes:
        id, key, base_url: how the client reaches it
        failure: why the session failed; empty if it did not
    """

    def __init__(
        self,
        renderer: MessageRenderer,
        url: str,
        prompt: Prompt,
        policy: Policy,
        params: Mapping[str, Any],
        deadline: Deadline | None = None,
        seed: int = 0,
        model: str = "policy",
        log_ignored: Callable[[str], None] = lambda field: None,
    ) -> None:
        self.id, self.key = secrets.token_hex(8), f"sk-{secrets.token_urlsafe(24)}"
        self.base_url = f"{url}/s/{self.id}/v1"
        self.model = model
        self.tree = TokenTree()
        self.metrics = SessionMetrics(sessions=1)
        self.failure = ""
        self.params = dict(params)
        self.renderer, self._prompt, self._policy = renderer, prompt, policy
        self._deadline, self._seed, self._log_ignored = deadline or Deadline(), seed, log_ignored
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._unanswered: dict[Node, str] = {}
        self._unexpected_error: Exception | None = None
        self._num_asked: Counter[bytes] = Counter()
        self._prompt_request = _make_prompt_request(renderer.chat, prompt)
        self._drift_by_leaf: dict[Node, bool] = {}

    # --- for the owner

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
        branches = [
            replace(partial, branch=Branch(index, self.tree.num_forks, self._has_drift(leaf)))
            for index, (leaf, partial) in enumerate(self.tree.collect_branches(self._prompt, self._seed))
        ]
        failure = self.failure or next(iter(self._unanswered.values()), "")
        if not branches:
            failure = failure or "the session made no request"
            branches = [PartialRollout.begin(self._prompt, self._seed)]
        if failure:
            branches = [replace(partial, status="aborted", failure=failure) for partial in branches]
        return tuple(branches)

    def _has_drift(self, leaf: Node) -> bool:
        """Return `MessageRenderer.has_drift`, cached because it renders the whole conversation."""
        if leaf not in self._drift_by_leaf:
            self._drift_by_leaf[leaf] = self.renderer.has_drift(leaf)
        return self._drift_by_leaf[leaf]

    async def close(self) -> None:
        """Cancel running requests, refuse further ones, and update the metrics that are known only at the end."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        leaves = self.tree.find_leaves()
        self.metrics.branches = len(leaves)
        self.metrics.drift = sum(map(self._has_drift, leaves))

    # --- for the client

    async def run_request(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run `work` until the session closes, which raises RequestRefused, or the caller is cancelled."""
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

    def locate_request(self, request: CompletionRequest) -> Node:
        """Find or add the context of a request in the tree. Raises RequestRefused.

        A request that follows the policy's last allowed answer is located at that answer.
        """
        self._check_open()
        for name in request.ignored:
            self.metrics.ignored[name] += 1
            self._log_ignored(name)
        tree, messages, max_turns = self.tree, request.messages, self.renderer.config.max_turns
        digests = hash_prefixes(messages, request.schemas)
        answer, count = tree.find_answer(digests, messages)
        if answer is not None and answer.num_turns >= max_turns:
            answer.end_reason = "max_turns"
            self.metrics.over_max_turns += 1
            if self.metrics.over_max_turns > _MAX_EXTRA_REQUESTS:
                reason = f"the policy has used its {max_turns} turns (rollout.max_turns)"
                raise RequestRefused(reason, "messages", "max_turns_exceeded")
            return answer
        node = tree.find_context(answer, digests[-1])
        if node is None:
            parent, rendered = self._render_context(answer, messages, count, request.schemas)
            node = tree.add_context(parent, answer, digests[-1], rendered.ids, rendered.messages, request.schemas)
            self.metrics.observations_truncated += rendered.num_truncated
        self.metrics.requests += 1
        self.metrics.forks = tree.num_forks
        return node

    async def answer(
        self, request: CompletionRequest, node: Node, streams: Sequence[StreamedResponse] = ()
    ) -> Sequence[Choice]:
        """Sample the policy's answers and add them to the tree. Raises RequestRefused.

        Args:
            node: from `locate_request`
            streams: one stream per choice, fed during generation if the policy streams
        """
        if node.generation is not None:  # the policy's last answer
            return (EMPTY_CHOICE,) * request.num_choices
        try:
            async with self._deadline.limit():
                generations = await self._sample(request, node, streams)
                choices = [await self.renderer.read_answer(output, request, node) for output in generations]
            if not all(stream.is_prefix_of(choice.message) for stream, choice in zip(streams, choices, strict=False)):
                raise RequestFailed("the final answer differs from what was streamed to the client")
        except TimeoutError:
            self.fail(TIMEOUT_REASON)
            raise self._fail_request(node, self.failure, 503) from None
        except RequestFailed as error:
            raise self._fail_request(node, str(error), 500) from None
        except Exception as error:  # engine loss or a bug: the session's owner must see it
            self._unexpected_error = self._unexpected_error or error
            raise self._fail_request(node, f"{type(error).__name__}: {error}", 503) from None
        self._unanswered.pop(node, None)
        for choice in choices:
            self.tree.add_answer(node, choice)
        return choices

    def _check_open(self) -> None:
        if self._deadline.is_over:
            self.fail(TIMEOUT_REASON)
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
        prompt_ids, max_context = self._prompt.token_ids, self.renderer.config.max_context
        try:
            if answer is not None:
                return self.renderer.render_continuation(answer, messages, count, schemas)
            if (messages, schemas) == self._prompt_request and len(prompt_ids) < max_context:
                return None, RenderedMessages(prompt_ids, messages)
            return None, self.renderer.render_conversation(messages, schemas)
        except ConfigError as error:
            raise RequestRefused(str(error), "messages") from None
        except ContextOverflow as error:
            if answer is not None:
                answer.end_reason = "length"
            raise RequestRefused(
                f"the messages are {error} tokens, and a conversation may have {max_context} with its "
                "answer (rollout.max_context)",
                "messages",
                "context_length_exceeded",
            ) from None

    async def _sample(
        self, request: CompletionRequest, node: Node, streams: Sequence[StreamedResponse]
    ) -> list[Generation]:
        config, ids = self.renderer.config, node.tokens
        budget = min(config.max_new_tokens, config.max_context - len(ids))
        budget = budget if request.max_tokens is None else min(budget, request.max_tokens)
        params = {**self.params, "max_new_tokens": budget}
        if request.stop_strings:
            params["stop"] = list(request.stop_strings)
        callbacks = [streams[index].add_tokens if streams else None for index in range(request.num_choices)]
        tasks = [
            asyncio.ensure_future(self._generate(ids, {**params, **seed}, node.recorded, on_tokens))
            for seed, on_tokens in zip(self._derive_seeds(ids, request.num_choices), callbacks, strict=True)
        ]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _generate(
        self, ids: Ids, params: dict[str, Any], recorded: RecordedPrefix, on_tokens: TokenCallback | None
    ) -> Generation:
        generation = await self._policy.generate(ids, params, recorded, on_tokens)
        is_complete = (
            len(generation.token_ids) == params["max_new_tokens"]
            or get_last(generation.token_ids) in self.renderer.chat.end_token_ids
        )
        if generation.finish_reason == "abort" and not is_complete:
            raise RequestFailed(generation.abort_reason or "the engine aborted the answer")
        return generation

    def _derive_seeds(self, ids: Ids, count: int) -> list[dict[str, int]]:
        """Return different seeds for all answers to the same ids, since equal ones would sample equal answers.

        The first answer uses the run's seed.
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
        return normalize_messages(prompt.messages), tuple(chat.catalog.select_schemas(prompt))
    except (RequestRefused, ConfigError):
        return None
