"""HTTP client of an engine, by SGLang's native `/generate`: token ids in, token ids out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import aiohttp
import numpy as np
import orjson
import pybase64
import torch

from megarl.cpu.sglang_images import request_images
from megarl.engine.engine_protocol import (
    NOT_RECORDED,
    EngineLoad,
    Generation,
    RecordedPrefix,
    RequestFailed,
    TokenCallback,
)
from megarl.models.routing import RoutingShape
from megarl.models.sparse_indices import IndexShape, positions
from megarl.types import Ids, Image, SamplingMask, as_token_ids
from megarl.utils.garbage_collection import pause_gc

_MAX_ATTEMPTS = 3
_RETRY_DELAY_S = 0.5
"""Delay before a retry (times the attempt number), and polling interval when checking that the engine runs."""
_PER_TOKEN_FIELDS = {"output_token_logprobs", "output_token_sampling_mask", "output_token_sampling_logprobs"}
"""Fields that each stream event carries for its own tokens only (incremental_streaming_output)."""
_DEATH_CHECK_S = 5.0
"""How long to watch the process after the last attempt: a dying engine at first only refuses connections."""
_LOAD_TIMEOUT_S = 5.0
_SERVER_ERRORS = (500, 502, 504)
"""HTTP statuses that mean a server-side fault."""
_JSON = {"Content-Type": "application/json"}


class HTTPClient:
    """HTTP client of one engine; use it with `async with` inside one event loop.

    timeout: seconds per request, including time in the engine's queue. The number of connections is unlimited, so a
    request to abort others never waits for them.
    routing: if set, request the engine's routing record, which has this shape.
    indices: if set, request its record of sparse attention indices, which has this shape.
    weight_version: version that every response must come from; None accepts any. It may be raised while requests are in
    flight; their responses may then mix both versions. The prefix cache of one version is not reused by the next.
    check_running: raises EngineLost if the engine is gone.
    adapter: name of the adapter to generate with, if the engine serves several.
    """

    def __init__(
        self,
        url: str,
        api_key: str,
        timeout: float,
        routing: RoutingShape | None = None,
        weight_version: int | None = None,
        check_running: Callable[[], None] = lambda: None,
        indices: IndexShape | None = None,
        adapter: str = "",
    ) -> None:
        self._adapter = adapter
        self._url, self._check_running = url, check_running
        self._headers = {"Authorization": f"Bearer {api_key}"}
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._routing, self._indices = routing, indices
        self.weight_version = weight_version
        self.should_request_masks = True
        """Request the sampling mask when sampling is truncated. Training needs it."""
        self.num_pending, self.last_response_time = 0, time.monotonic()
        """Number of responses in flight, and when the last one arrived (time.monotonic)."""
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> HTTPClient:
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=self._timeout, connector=connector)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def generate(
        self,
        ids: Ids | Sequence[int],
        params: dict[str, Any],
        recorded: RecordedPrefix = NOT_RECORDED,
        on_tokens: TokenCallback | None = None,
        *,
        images: Sequence[Image] = (),
    ) -> Generation:
        """Continue `ids` by at most `params["max_new_tokens"]` tokens, which `on_tokens` gets as they arrive.

        images: those of the image tokens in `ids`, by their starts.

        Raises RequestFailed if this request gets no valid response. Server-side errors and lost connections are retried
        a few times first. Any other RuntimeError concerns the engine: it is lost (`EngineLost`), or its
        weights are not the expected version.
        """
        is_truncated = self.should_request_masks and is_truncated_sampling(params)
        body: dict[str, Any] = {"input_ids": ids, "sampling_params": params, "return_logprob": not is_truncated}
        if is_truncated:  # return_logprob would be over the whole vocabulary
            body |= {"return_sampling_mask": True, "sampling_logprobs_mode": "selected"}
        request_version = self.weight_version
        record_start = recorded.next_start(request_version)
        if images:
            body["image_data"] = request_images(images, request_version)
        if request_version is not None:
            body["extra_key"] = str(request_version)
        if self._adapter:
            body["lora_path"] = self._adapter
        if self._routing is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": record_start}
        if self._indices is not None:  # MegaRL's plugin cuts this record like that of routing
            body |= {"return_indexer_topk": True, "routed_experts_start_len": record_start}
        self.num_pending += 1
        try:
            status, answer = await self._post("/generate", body, on_tokens)
        finally:
            self.num_pending -= 1
        self.last_response_time = time.monotonic()
        if status == 503 and "timeout reached" in str(answer):
            raise RequestFailed("the engine did not finish within rollout.request_timeout")
        if status != 200:
            raise RequestFailed(f"the engine refused to generate: {str(answer)[:300]}")
        try:
            self._check_version(answer["meta_info"], request_version)
            # A response's thousands of short-lived lists would trigger collections over everything that torch keeps
            # alive, which take longer than the parsing itself.
            with pause_gc():
                generation = self._parse_generation(answer, len(ids), record_start, is_truncated)
            # After a weight sync in flight even the first token may be by newer weights than its keys and values.
            return generation if request_version is None else replace(generation, weight_version=request_version)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise RequestFailed(f"the engine's response is invalid: {error!r}") from None

    def _parse_generation(
        self, answer: dict[str, Any], prompt_len: int, record_start: int, is_truncated: bool
    ) -> Generation:
        """Parse the response to a prompt of `prompt_len` tokens.

        The partial response of an aborted request is kept if it is complete: as many log-probs as tokens, for those
        same tokens, all finite, with the sampling mask if sampling was truncated and with routing if it is recorded.
        Otherwise an aborted response has no tokens, and any other response raises RequestFailed.
        """
        meta = answer["meta_info"]
        finish = meta["finish_reason"] or {}
        finish_type = finish.get("type", "abort")
        is_aborted = finish_type not in ("stop", "length")
        token_ids = as_token_ids(answer["output_ids"])
        problem, sampling_mask = "", None
        if is_truncated:
            values = meta.get("output_token_sampling_logprobs") or ()
            sampling_mask = SamplingMask.from_rows(meta.get("output_token_sampling_mask") or ())
            problem = _check_sampling_mask(sampling_mask, token_ids, len(values))
        else:
            triples = meta.get("output_token_logprobs", ()) if is_aborted else meta["output_token_logprobs"]
            values = [triple[0] for triple in triples]
            if [triple[1] for triple in triples] != answer["output_ids"]:
                problem = f"the engine wrote {len(token_ids)} tokens and returned {len(triples)} log-probs of others"
        logprobs = np.array(values, dtype=np.float32)  # NaN for None: JSON has no NaN
        if not problem and not np.isfinite(logprobs).all():
            problem = "the engine returned a log-prob that is not finite"
        if not problem and not is_aborted and not len(token_ids):
            problem = "the engine answered without a token"
        if not problem and is_aborted and self._routing is not None and meta.get("routed_experts") is None:
            problem = "the engine returned no routing"  # the request had been retracted
        if not problem and is_aborted and self._indices is not None and meta.get("indexer_topk") is None:
            problem = "the engine returned no sparse attention indices"
        if problem and not is_aborted:
            raise RequestFailed(problem)
        if problem:
            token_ids, logprobs, sampling_mask = token_ids[:0], logprobs[:0], None
        routing = None
        if self._routing is not None and len(token_ids):
            num_rows = prompt_len + len(token_ids) - 1 - record_start
            routing = decode_routing(meta.get("routed_experts"), num_rows, self._routing)
        indices = None
        if self._indices is not None and len(token_ids):
            first = max(record_start, self._indices.topk)
            num_rows = max(0, prompt_len + len(token_ids) - 1 - first)
            indices = decode_indices(meta.get("indexer_topk"), num_rows, first, self._indices)
        runs = _parse_weight_versions(meta.get("weight_versions") or (), len(token_ids))
        cached = meta.get("cached_tokens")
        return Generation(
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason="abort" if is_aborted else finish_type,
            # After a mid-response weight sync, later tokens still attend to keys and values of the older weights.
            weight_version=runs[0][0] if runs else int(meta["weight_version"]),
            routing=routing,
            sparse_indices=indices,
            record_start=record_start,
            sampling_mask=sampling_mask,
            drafted=meta.get("spec_num_proposed_drafts", 0),
            accepted=meta.get("spec_num_correct_drafts", 0),
            retractions=meta.get("num_retractions", 0),
            cached=cached if type(cached) is int and 0 <= cached <= prompt_len else -1,  # only a metric: never fail
            abort_reason=f"the engine aborted the answer: {finish.get('message', 'it gives no reason')}"
            if is_aborted
            else "",
        )

    def _check_version(self, meta: dict[str, Any], request_version: int | None) -> None:
        """Raise RuntimeError if the response came from weights outside of `request_version` to the current version."""
        if request_version is None or self.weight_version is None:
            return
        for span in meta.get("weight_versions") or [{"version": meta["weight_version"]}]:
            version = str(span["version"])
            if version != str(self.weight_version) and not (
                version.isdecimal() and request_version <= int(version) <= self.weight_version
            ):
                raise RuntimeError(
                    f"the engine answered with weight version {version}, but the last weight sync was version "
                    f"{self.weight_version}: something outside this run changed it"
                )

    async def stop(self) -> None:
        """Abort all requests of the engine."""
        try:
            status, answer = await self._post("/abort_request", {"abort_all": True})
        except RequestFailed:
            return  # the caller retries, since requests may still be on their way
        if status != 200:
            raise RuntimeError(f"the engine does not pause: {str(answer)[:300]}")

    async def parse_tool_calls(
        self, text: str, tools: Sequence[dict[str, Any]], parser: str
    ) -> tuple[str, list[Any]] | None:
        """Parse with SGLang's parser.

        Returns (text outside the calls, calls with `name` and `parameters`), or None if the parser failed. Raises as
        `generate` does.
        """
        body = {"text": text, "tools": list(tools), "tool_call_parser": parser}
        status, answer = await self._post("/parse_function_call", body)
        if status in (400, 500):  # the parser raised
            return None
        try:
            if status != 200:
                raise ValueError(f"status {status}")
            calls = [{**call, "name": str(call["name"]), "parameters": call["parameters"]} for call in answer["calls"]]
            return str(answer["normal_text"]), calls
        except (LookupError, TypeError, ValueError) as error:
            raise RequestFailed(f"the engine's answer to /parse_function_call cannot be one: {error!r}") from None

    async def is_alive(self, seconds: float) -> bool:
        """Return whether /health succeeds within `seconds`. SGLang's own health check takes up to 20 s."""
        assert self._session is not None, "the client is used outside `async with`"
        timeout = aiohttp.ClientTimeout(total=seconds)
        try:
            async with self._session.get(f"{self._url}/health", timeout=timeout) as answer:
                return answer.status == 200
        except (TimeoutError, aiohttp.ClientError):
            return False

    async def read_load(self) -> EngineLoad | None:
        """Return the engine's load by SGLang's /v1/loads, summed over data parallel ranks; None if it is not answered
        within seconds."""
        assert self._session is not None, "the client is used outside `async with`"
        timeout = aiohttp.ClientTimeout(total=_LOAD_TIMEOUT_S)
        try:
            async with self._session.get(f"{self._url}/v1/loads?include=core", timeout=timeout) as answer:
                return parse_load(orjson.loads(await answer.read())["loads"]) if answer.status == 200 else None
        except (TimeoutError, aiohttp.ClientError, LookupError, TypeError, ValueError):
            return None

    async def _post(self, path: str, body: dict[str, Any], on_tokens: TokenCallback | None = None) -> tuple[int, Any]:
        """Return the status and the response: parsed JSON, a stream merged as such, else text."""
        body = body if on_tokens is None else {**body, "stream": True}
        data = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            if self._session is not None and self._session.closed:  # closed between two attempts
                raise RequestFailed(f"no more requests to {path} after shutdown")
            error: aiohttp.ClientError | None = None
            try:
                status, response = await self._request(path, data, on_tokens)
                if status not in _SERVER_ERRORS or path != "/generate" or attempt == _MAX_ATTEMPTS:
                    return status, response
            except TimeoutError:
                raise RequestFailed(f"the engine did not answer {path} within {self._timeout.total:g} s") from None
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as client_error:
                error = client_error
            except (aiohttp.ClientError, ValueError) as invalid:
                raise RequestFailed(f"the engine's answer to {path} cannot be read: {invalid!r}") from None
            if attempt == _MAX_ATTEMPTS:
                for _ in range(round(_DEATH_CHECK_S / _RETRY_DELAY_S)):
                    self._check_running()
                    await asyncio.sleep(_RETRY_DELAY_S)
                self._check_running()
                raise RequestFailed(f"the engine cannot be reached: {error}") from None
            await asyncio.sleep(_RETRY_DELAY_S * attempt)
        raise AssertionError("unreachable")

    async def _request(self, path: str, data: bytes, on_tokens: TokenCallback | None) -> tuple[int, Any]:
        assert self._session is not None, "the client is used outside `async with`"
        async with self._session.post(self._url + path, data=data, headers=_JSON) as answer:
            if answer.content_type == "application/json":
                content = await answer.read()
                with pause_gc():
                    return answer.status, orjson.loads(content)
            if on_tokens is not None and answer.status == 200:
                return 200, await _merge_stream(answer, on_tokens)
            return answer.status, await answer.text()


def parse_load(ranks: Sequence[Mapping[str, Any]]) -> EngineLoad | None:
    """Parse the loads of an engine's data parallel ranks; None if there are none. Raises LookupError."""
    if not ranks:
        return None
    names = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens", "max_total_num_tokens")
    running, waiting, used, capacity = (sum(rank[name] for rank in ranks) for name in names)
    computed, busy_us = (
        sum(rank.get(f"total_prefill_{name}", 0) for rank in ranks) for name in ("uncached_tokens", "busy_us")
    )
    return EngineLoad(running, waiting, used / max(1, capacity), capacity, computed, busy_us / 1e6)


def is_truncated_sampling(params: Mapping[str, Any]) -> bool:
    """Return whether sampling is random and some tokens can never be drawn (top_p, top_k or min_p)."""
    is_restricted = params.get("top_p", 1.0) < 1 or params.get("top_k", -1) > 0 or params.get("min_p", 0.0) > 0
    return bool(is_restricted and params.get("temperature", 1.0) > 0)


def _check_sampling_mask(mask: SamplingMask, token_ids: Ids, num_logprobs: int) -> str:
    """Describe what is wrong with a sampling mask and its `num_logprobs` log-probs; empty if nothing is."""
    if not len(mask) and len(token_ids):
        return "the engine returned no sampling masks (return_sampling_mask)"
    if not len(mask) == num_logprobs == len(token_ids):
        return (
            f"the engine wrote {len(token_ids)} tokens, but returned sampling masks of {len(mask)} with {num_logprobs} "
            f"log-probs"
        )
    tokens = torch.tensor(token_ids)
    if bool((outside := mask.excludes(tokens) | (mask.counts == 0)).any()):
        return f"the engine sampled token {int(tokens[outside][0])}, which is not in its sampling mask"
    return ""


async def _merge_stream(answer: aiohttp.ClientResponse, on_tokens: TokenCallback) -> dict[str, Any]:
    """Merge a stream's events into one response.

    Raises RequestFailed for an invalid event, or if the connection is lost after the first tokens: a retry would report
    them to `on_tokens` twice.
    """
    merged: dict[str, Any] = {"output_ids": [], "meta_info": {}}
    lists: dict[str, list[Any]] = {}
    remainder = b""
    while True:
        try:
            data = await answer.content.readany()
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            if not merged["output_ids"]:
                raise
            raise RequestFailed(f"the engine's response ended early: {error}") from None
        if not data:
            break
        *events, remainder = (remainder + data).split(b"\n\n")
        for event in events:
            payload = event.removeprefix(b"data: ")
            if payload == b"[DONE]":
                continue
            try:
                event_data = orjson.loads(payload)
                if "error" in event_data:
                    raise RequestFailed(f"the engine refused to generate: {str(event_data['error'])[:300]}")
                tokens, meta = event_data["output_ids"], event_data["meta_info"]
                for name in _PER_TOKEN_FIELDS & meta.keys():
                    lists.setdefault(name, []).extend(meta[name])
                merged["output_ids"] += tokens
                merged["meta_info"] |= meta
                if tokens:
                    on_tokens(as_token_ids(tokens))
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                raise RequestFailed(f"the engine's response is invalid: {error!r}") from None
    merged["meta_info"] |= lists
    return merged


def _parse_weight_versions(spans: Sequence[dict[str, Any]], num_tokens: int) -> tuple[tuple[int, int], ...]:
    """Convert SGLang's version spans to the `versions` of a `Turn`.

    Raises RequestFailed if they do not cover exactly these `num_tokens`.
    """
    runs = [(int(span["version"]), span["start"], span["end"]) for span in spans]
    if len(runs) < 2 or not num_tokens:
        return ()
    ends = [0, *(end for _, _, end in runs)]
    if [start for _, start, _ in runs] != ends[:-1] or ends[-1] != num_tokens or sorted(set(ends)) != ends:
        raise RequestFailed(f"the engine wrote {num_tokens} tokens with weight versions of another number: {spans}")
    return tuple((version, end - start) for version, start, end in runs)


def decode_routing(text: str | None, tokens: int, shape: RoutingShape) -> torch.Tensor:
    """Decode SGLang's routing record of `tokens` tokens.

    The record is base64 of int32 [tokens, layers, topk]; the result is [tokens, MoE layers, topk], uint8 for up to 256
    experts, else int16. A token whose keys and values come from another request's cache entry has the experts that
    computed them. Raises RequestFailed if the record is missing or belongs to another size or model.
    """
    if text is None:
        raise RequestFailed(
            "the engine did not record routing; set train.routing_replay=false and rollout.rebalance_experts_every=0"
        )
    values = np.frombuffer(pybase64.b64decode(text, validate=True), dtype=np.int32)  # 100 times as fast as without
    if values.size != tokens * shape.num_layers * shape.topk:
        raise RequestFailed(
            f"the engine's record of routing has {values.size} numbers, not those of {tokens} tokens in "
            f"{shape.num_layers} layers with {shape.topk} experts each: engine and trainer must load the same "
            "config.json"
        )
    layers = shape.moe_layers
    is_consecutive = layers == tuple(range(layers[0], layers[-1] + 1))
    record = values.reshape(tokens, shape.num_layers, shape.topk)
    record = record[:, slice(layers[0], layers[-1] + 1) if is_consecutive else list(layers)]  # a slice copies nothing
    if record.size and record.view(np.uint32).max() >= shape.num_experts:  # as uint32, negative numbers are large
        raise RequestFailed(
            f"the engine's record of routing names experts from {record.min()} to {record.max()}, but config.json has "
            f"{shape.num_experts}, from 0"
        )
    return torch.from_numpy(record.astype(np.uint8 if shape.num_experts <= 256 else np.int16))


def decode_indices(text: str | None, tokens: int, first: int, shape: IndexShape) -> torch.Tensor:
    """Decode the record of sparse attention indices of `tokens` tokens from position `first` on.

    The record is base64 of [tokens, layers, topk], two or four bytes each, see `cpu/sglang_sparse_attention.py`. Raises
    RequestFailed if the record is missing, belongs to another size or model, or names later tokens.
    """
    if text is None:
        raise RequestFailed("the engine did not record its sparse attention; set train.sparse_index_replay=false")
    content, count = pybase64.b64decode(text, validate=True), tokens * len(shape.layers) * shape.topk
    if len(content) not in (2 * count, 4 * count):
        raise RequestFailed(
            f"the engine's record of sparse attention has {len(content)} bytes, not 2 or 4 for each of {tokens} tokens "
            f"in {len(shape.layers)} layers with {shape.topk} keys each: engine and trainer must load the same "
            "config.json"
        )
    values = np.frombuffer(content, dtype=np.int16 if len(content) == 2 * count else np.int32)
    record = torch.from_numpy(values.copy()).view(tokens, len(shape.layers), shape.topk)
    keys = positions(record)
    if tokens and bool(((keys < 0) | (keys > torch.arange(first, first + tokens)[:, None, None])).any()):
        raise RequestFailed("the engine's record of sparse attention names keys after their query")
    return record if record.dtype == shape.dtype else keys.to(shape.dtype)
