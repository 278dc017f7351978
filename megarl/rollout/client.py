"""Asking an engine for tokens: SGLang's native `/generate`, ids in and ids out."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Protocol

import aiohttp
import numpy as np
import torch

from megarl.models.routing import RoutingShape

_TRIES = 3
_PAUSE_S = 0.5


@dataclass(frozen=True)
class Generation:
    """What the policy wrote in one turn, with the log-prob of each token as sampled and the version of the weights.

    finish: `stop` after an end token, which is the last id; `length` after max_new_tokens; `abort` when cut off.
    routing: [tokens, MoE layers, topk] int16, the experts of the tokens that were asked for, see `Policy`.
    drafted, accepted: tokens that were drafted for it (rollout.draft_tokens), and those of them that it accepted.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Literal["stop", "length", "abort"]
    weight_version: int
    routing: torch.Tensor | None = None
    drafted: int = 0
    accepted: int = 0


class Policy(Protocol):
    """Whatever can continue a conversation: an engine, or a script in a test."""

    async def generate(self, ids: Sequence[int], params: dict[str, Any], routed: int = 0) -> Generation:
        """Continue `ids` under SGLang's sampling `params`.

        Where routing is recorded, that of the first `routed` tokens is known from before; what comes back is of the
        others, but for the last one written, which the engine has not run.
        """
        ...


class Client:
    """HTTP client of one engine; use it with `async with` inside one event loop.

    routing: ask for the engine's record of it, which has this shape.
    """

    def __init__(
        self,
        url: str,
        api_key: str,
        request_timeout: float,
        concurrency: int,
        routing: RoutingShape | None = None,
    ) -> None:
        self._url = url
        self._headers = {"Authorization": f"Bearer {api_key}"}
        self._timeout = aiohttp.ClientTimeout(total=request_timeout)
        self._limit = concurrency
        self._routing = routing
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        connector = aiohttp.TCPConnector(limit=self._limit)
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=self._timeout, connector=connector)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def generate(self, ids: Sequence[int], params: dict[str, Any], routed: int = 0) -> Generation:
        """Continue `ids` by at most `params["max_new_tokens"]` tokens.

        Raises RuntimeError when the engine refuses, answers too late or is gone; only a lost connection is retried.
        """
        body: dict[str, Any] = {"input_ids": list(ids), "sampling_params": params, "return_logprob": True}
        if self._routing is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": routed}
        status, answer = await self._post("/generate", body)
        if status != 200:
            raise RuntimeError(f"the engine refused to generate: {str(answer)[:500]}")
        meta = answer["meta_info"]
        pairs = meta["output_token_logprobs"]
        token_ids = tuple(answer["output_ids"])
        if tuple(pair[1] for pair in pairs) != token_ids:
            raise RuntimeError(f"the engine wrote {len(token_ids)} tokens and gave {len(pairs)} log-probs of others")
        kind = (meta["finish_reason"] or {}).get("type", "abort")
        routing = None
        if self._routing is not None and not (kind == "abort" and meta.get("routed_experts") is None):
            rows = len(ids) + len(token_ids) - 1 - routed
            routing = decode_routing(meta.get("routed_experts"), rows, self._routing)
        return Generation(
            token_ids=token_ids,
            logprobs=tuple(pair[0] for pair in pairs),
            finish=kind if kind in ("stop", "length") else "abort",
            weight_version=int(meta["weight_version"]),
            routing=routing,
            drafted=meta.get("spec_num_proposed_drafts", 0),
            accepted=meta.get("spec_num_correct_drafts", 0),
        )

    async def parse_tool_calls(
        self, text: str, tools: Sequence[dict[str, Any]], parser: str
    ) -> tuple[str, list[Any]] | None:
        """SGLang's own parser: (text outside the calls, calls with `name` and `parameters`), or None if it choked."""
        body = {"text": text, "tools": list(tools), "tool_call_parser": parser}
        status, answer = await self._post("/parse_function_call", body)
        return (answer["normal_text"], answer["calls"]) if status == 200 else None

    async def _post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        assert self._session is not None, "the client is used outside `async with`"
        for attempt in range(1, _TRIES + 1):
            try:
                async with self._session.post(self._url + path, json=body) as answer:
                    if answer.content_type == "application/json":
                        return answer.status, await answer.json()
                    return answer.status, await answer.text()
            except TimeoutError:
                raise RuntimeError(f"the engine did not answer {path} within {self._timeout.total:g} s") from None
            except aiohttp.ClientConnectionError as error:
                if attempt == _TRIES:
                    raise RuntimeError(f"the engine cannot be reached: {error}") from None
                await asyncio.sleep(_PAUSE_S * attempt)
        raise AssertionError("unreachable")


def decode_routing(text: str | None, tokens: int, shape: RoutingShape) -> torch.Tensor:
    """What SGLang sends of `tokens` tokens, base64 of int32 [tokens, layers, topk] -> int16 [tokens, MoE layers, topk].

    It keeps the record beside the KV cache: of a token whose keys and values another request left there, it is what
    they were computed with. Raises RuntimeError where there is none, or one of another size.
    """
    if text is None:
        raise RuntimeError("the engine did not record which experts it chose; set train.replay_routing=false")
    found = np.frombuffer(base64.b64decode(text), dtype=np.int32)
    if found.size != tokens * shape.layers * shape.topk:
        raise RuntimeError(
            f"the engine's record of routing has {found.size} numbers, not those of {tokens} tokens in {shape.layers} "
            f"layers with {shape.topk} experts each: engine and trainer must load the same config.json"
        )
    record = found.reshape(tokens, shape.layers, shape.topk)[:, list(shape.moe_layers)]
    return torch.from_numpy(record.astype(np.int16))
