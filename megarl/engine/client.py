"""Asking an engine for tokens: SGLang's native `/generate`, ids in and ids out."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import aiohttp
import numpy as np
import orjson
import pybase64
import torch

from megarl.engine.generation import Generation, RequestFailed, TokenCallback
from megarl.models.routing import RoutingShape
from megarl.types import Ids, SamplingMask, as_token_ids

_MAX_ATTEMPTS = 3
_RETRY_DELAY_S = 0.5
"""Between two tries, and as often as it is asked then whether the engine is there at all."""
_PER_TOKEN_FIELDS = {"output_token_logprobs", "output_token_sampling_mask", "output_token_sampling_logprobs"}
"""What each event of a stream has of its own tokens only (incremental_streaming_output)."""
_DEATH_CHECK_S = 5.0
"""After the last try: for so long, since an engine that dies is not told at once from one that refuses."""
_SERVER_ERRORS = (500, 502, 504)
"""Statuses by which a server says that the fault is its own."""
_JSON = {"Content-Type": "application/json"}


class Client:
    """HTTP client of one engine; use it with `async with` inside one event loop.

    timeout: seconds that any answer may take, with the engine's own queue. As many connections are made as there are
    requests at once, so that one to stop the others does not wait for them. routing: ask for the engine's record of it,
    which has this shape. version: of the weights that every answer must come from; None for any. It may be raised: what
    was asked before may then come from both. What the engine has cached by one version is nothing to the next.
    check_runs: raises EngineLost where the engine is gone.
    """

    def __init__(
        self,
        url: str,
        api_key: str,
        timeout: float,
        routing: RoutingShape | None = None,
        version: int | None = None,
        check_runs: Callable[[], None] = lambda: None,
    ) -> None:
        self._url, self._check_running = url, check_runs
        self._headers = {"Authorization": f"Bearer {api_key}"}
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._routing = routing
        self.weight_version = version
        self.should_request_masks = True
        """Whether it asks what could have been sampled, where sampling is cut off: training needs it."""
        self.num_pending, self.last_response_time = 0, time.monotonic()
        """Answers that it waits for, and when the last one came."""
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(headers=self._headers, timeout=self._timeout, connector=connector)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def generate(self, ids: Ids | Sequence[int], params: dict[str, Any], routed: int = 0) -> Generation:
        """Continue `ids` by at most `params["max_new_tokens"]` tokens.

        Raises RequestFailed where this request has no good answer, for one that is refused by a fault of the engine, or
        whose connection is lost, is tried again a few times. Any other RuntimeError is of the engine: it is lost, see
        `faults.EngineLost`, or it has other weights than it should have.
        """
        return await self.stream(ids, params, routed)

    async def stream(
        self, ids: Ids | Sequence[int], params: dict[str, Any], routed: int = 0, heard: TokenCallback | None = None
    ) -> Generation:
        """`generate`, and `heard` is told the tokens as they come."""
        cut_off = self.should_request_masks and is_truncated_sampling(params)
        body: dict[str, Any] = {"input_ids": ids, "sampling_params": params, "return_logprob": not cut_off}
        if cut_off:  # the others are of the whole vocabulary
            body |= {"return_sampling_mask": True, "sampling_logprobs_mode": "selected"}
        oldest = self.weight_version
        if oldest is not None:
            body["extra_key"] = str(oldest)
        if self._routing is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": routed}
        self.num_pending += 1
        try:
            status, data = await self._post("/generate", body, heard)
        finally:
            self.num_pending -= 1
        self.last_response_time = time.monotonic()
        with _pause_gc():
            return self._parse_response(status, data, len(ids), routed, oldest, cut_off)

    def _parse_response(
        self,
        status: int,
        data: bytes | str | dict[str, Any],
        asked: int,
        routed: int,
        oldest: int | None,
        cut_off: bool,
    ) -> Generation:
        answer = _parse_json("/generate", data)
        if status == 503 and "timeout reached" in str(answer):
            raise RequestFailed("the engine did not end the answer within rollout.request_timeout")
        if status != 200:
            raise RequestFailed(f"the engine refused to generate: {str(answer)[:300]}")
        try:
            self._check_version(answer["meta_info"], oldest)
            return self._parse_generation(answer, asked, routed, cut_off)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise RequestFailed(f"the engine's answer cannot be one: {error!r}") from None

    def _parse_generation(self, answer: dict[str, Any], asked: int, routed: int, cut_off: bool) -> Generation:
        """The answer to `asked` tokens, whose sampling was cut off or not. What was written before an answer was
        aborted is kept where it is whole: as many log-probs as tokens, of those tokens, all finite, with what could
        have been sampled, and with routing where it is recorded; else it has no tokens, and another answer fails."""
        meta = answer["meta_info"]
        finish = meta["finish_reason"] or {}
        kind = finish.get("type", "abort")
        cut = kind not in ("stop", "length")
        token_ids = as_token_ids(answer["output_ids"])
        problem, support = "", None
        if cut_off:
            values = meta.get("output_token_sampling_logprobs") or ()
            support = SamplingMask.from_rows(meta.get("output_token_sampling_mask") or ())
            problem = _check_sampling_mask(support, token_ids, len(values))
        else:
            triples = meta.get("output_token_logprobs", ()) if cut else meta["output_token_logprobs"]
            values = [triple[0] for triple in triples]
            if [triple[1] for triple in triples] != answer["output_ids"]:
                problem = f"the engine wrote {len(token_ids)} tokens and gave {len(triples)} log-probs of others"
        logprobs = np.array(values, dtype=np.float32)  # NaN for None: JSON has no NaN
        if not problem and not np.isfinite(logprobs).all():
            problem = "the engine gave a log-prob that is not finite"
        if not problem and not cut and not len(token_ids):
            problem = "the engine answered without a token"
        if not problem and cut and self._routing is not None and meta.get("routed_experts") is None:
            problem = "the engine says nothing of routing"  # of a request that it had taken back from work
        if problem and not cut:
            raise RequestFailed(problem)
        if problem:
            token_ids, logprobs, support = token_ids[:0], logprobs[:0], None
        routing = None
        if self._routing is not None and len(token_ids):
            routing = decode_routing(meta.get("routed_experts"), asked + len(token_ids) - 1 - routed, self._routing)
        runs = _parse_weight_versions(meta.get("weight_versions") or (), len(token_ids))
        return Generation(
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason="abort" if cut else kind,
            # Where weights were replaced in the middle of an answer, what follows has keys and values of older ones.
            weight_version=runs[0][0] if runs else int(meta["weight_version"]),
            routing=routing,
            sampling_mask=support,
            drafted=meta.get("spec_num_proposed_drafts", 0),
            accepted=meta.get("spec_num_correct_drafts", 0),
            cached=_parse_cached_tokens(meta.get("cached_tokens"), asked),
            abort_reason=f"the engine cut the answer off: {finish.get('message', 'it does not say why')}"
            if cut
            else "",
        )

    def _check_version(self, meta: dict[str, Any], oldest: int | None) -> None:
        """SGLang says by which weights the last token was chosen, and by which each, where they changed meanwhile.
        oldest: those when it was asked."""
        if oldest is None or self.weight_version is None:
            return
        for span in meta.get("weight_versions") or [{"version": meta["weight_version"]}]:
            found = str(span["version"])
            if found != str(self.weight_version) and not (
                found.isdecimal() and oldest <= int(found) <= self.weight_version
            ):
                raise RuntimeError(
                    f"the engine answered by weights of version {found}, but those that it was given last "
                    f"are version {self.weight_version}: something else than this run has changed it"
                )

    async def stop(self) -> None:
        try:
            status, answer = await self._post("/abort_request", {"abort_all": True})
        except RequestFailed:
            return  # whoever wants it asks again, for what was on its way
        if status != 200:
            raise RuntimeError(f"the engine does not stop: {str(answer)[:300]}")

    async def parse_tool_calls(
        self, text: str, tools: Sequence[dict[str, Any]], parser: str
    ) -> tuple[str, list[Any]] | None:
        """SGLang's own parser: (text outside the calls, calls with `name` and `parameters`), or None if it choked.

        Raises as `generate` does.
        """
        body = {"text": text, "tools": list(tools), "tool_call_parser": parser}
        status, data = await self._post("/parse_function_call", body)
        answer = _parse_json("/parse_function_call", data)
        if status in (400, 500):  # what it says where the parser raises
            return None
        try:
            if status != 200:
                raise ValueError(f"status {status}")
            calls = [{**call, "name": str(call["name"]), "parameters": call["parameters"]} for call in answer["calls"]]
            return str(answer["normal_text"]), calls
        except (LookupError, TypeError, ValueError) as error:
            raise RequestFailed(f"the engine's answer to /parse_function_call cannot be one: {error!r}") from None

    async def is_alive(self, seconds: float) -> bool:
        """Whether the engine says within so many seconds that it is at work. It looks by itself for some 20."""
        assert self._session is not None, "the client is used outside `async with`"
        try:
            timeout = aiohttp.ClientTimeout(total=seconds)
            async with self._session.get(f"{self._url}/health", timeout=timeout) as answer:
                return answer.status == 200
        except (TimeoutError, aiohttp.ClientError):
            return False

    async def _post(
        self, path: str, body: dict[str, Any], heard: TokenCallback | None = None
    ) -> tuple[int, bytes | str | dict[str, Any]]:
        """Status and answer, bytes where they say that they are JSON; of a stream its parts, put together."""
        body = body if heard is None else {**body, "stream": True}
        data = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            if self._session is not None and self._session.closed:  # between two tries: its generation has ended
                raise RequestFailed(f"the engine is not asked for {path} any more")
            error: aiohttp.ClientError | None = None
            try:
                status, found = await self._request(path, data, heard)
                if status not in _SERVER_ERRORS or path != "/generate" or attempt == _MAX_ATTEMPTS:
                    return status, found
            except TimeoutError:
                raise RequestFailed(f"the engine did not answer {path} within {self._timeout.total:g} s") from None
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as failed:
                error = failed
            except (aiohttp.ClientError, UnicodeError) as failed:
                raise RequestFailed(f"the engine's answer to {path} cannot be read: {failed!r}") from None
            if attempt == _MAX_ATTEMPTS:
                await self._raise_if_lost()
                raise RequestFailed(f"the engine cannot be reached: {error}") from None
            await asyncio.sleep(_RETRY_DELAY_S * attempt)
        raise AssertionError("unreachable")

    async def _request(
        self, path: str, data: bytes, heard: TokenCallback | None
    ) -> tuple[int, bytes | str | dict[str, Any]]:
        assert self._session is not None, "the client is used outside `async with`"
        async with self._session.post(self._url + path, data=data, headers=_JSON) as answer:
            if answer.content_type == "application/json":
                return answer.status, await answer.read()
            if heard is not None and answer.status == 200:
                return 200, await _merge_stream(answer, heard)
            return answer.status, await answer.text()

    async def _raise_if_lost(self) -> None:
        """Raise EngineLost where the engine's process ends within a few seconds."""
        until = time.monotonic() + _DEATH_CHECK_S
        self._check_running()
        while time.monotonic() < until:
            await asyncio.sleep(_RETRY_DELAY_S)
            self._check_running()


def is_truncated_sampling(params: Mapping[str, Any]) -> bool:
    """Whether under these sampling parameters not every token can be drawn, at random among several."""
    odd = params.get("top_p", 1.0) < 1 or params.get("top_k", -1) > 0 or params.get("min_p", 0.0) > 0
    return bool(odd and params.get("temperature", 1.0) > 0)


def _parse_cached_tokens(said: object, asked: int) -> int:
    """Of `asked` tokens; -1 for what can be no such number, for nothing is trained by it."""
    return said if type(said) is int and 0 <= said <= asked else -1


def _check_sampling_mask(support: SamplingMask, token_ids: Ids, values: int) -> str:
    """What is wrong with an engine's record of what it could have sampled, and so many log-probs; empty if nothing."""
    if not len(support) and len(token_ids):
        return "the engine does not say what it could have sampled (return_sampling_mask)"
    if not len(support) == values == len(token_ids):
        return (
            f"the engine wrote {len(token_ids)} tokens, and says of {len(support)} what it could have sampled, with "
            f"{values} log-probs"
        )
    tokens = torch.tensor(token_ids)
    if bool((outside := support.excludes(tokens) | (support.counts == 0)).any()):
        return f"the engine sampled token {int(tokens[outside][0])}, but says that it could not have sampled that"
    return ""


async def _merge_stream(answer: aiohttp.ClientResponse, heard: TokenCallback) -> dict[str, Any]:
    """A stream's events as the one answer that they are parts of. Raises RequestFailed, also where the connection is
    lost after the first of them: what was heard cannot be said again."""
    whole: dict[str, Any] = {"output_ids": [], "meta_info": {}}
    lists: dict[str, list[Any]] = {}
    rest = b""
    while True:
        try:
            data = await answer.content.readany()
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            if not whole["output_ids"]:
                raise
            raise RequestFailed(f"the engine broke off in the middle of its answer: {error}") from None
        if not data:
            break
        *events, rest = (rest + data).split(b"\n\n")
        for event in events:
            told = event.removeprefix(b"data: ")
            if told == b"[DONE]":
                continue
            try:
                part = orjson.loads(told)
                if "error" in part:
                    raise RequestFailed(f"the engine refused to generate: {str(part['error'])[:300]}")
                tokens, meta = part["output_ids"], part["meta_info"]
                for name in _PER_TOKEN_FIELDS & meta.keys():
                    lists.setdefault(name, []).extend(meta[name])
                whole["output_ids"] += tokens
                whole["meta_info"] |= meta
                if tokens:
                    heard(as_token_ids(tokens))
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                raise RequestFailed(f"the engine's answer cannot be one: {error!r}") from None
    whole["meta_info"] |= lists
    return whole


def _parse_json(path: str, data: bytes | str | dict[str, Any]) -> Any:
    try:
        return orjson.loads(data) if isinstance(data, bytes) else data
    except ValueError as error:
        raise RequestFailed(f"the engine's answer to {path} cannot be read: {error!r}") from None


@contextmanager
def _pause_gc() -> Iterator[None]:
    """Without passes of Python's collector, which thousands of short-lived lists in an answer set off again and again:
    over all that torch and others keep in this process, they take longer than to read the answer."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _parse_weight_versions(spans: Sequence[dict[str, Any]], tokens: int) -> tuple[tuple[int, int], ...]:
    """SGLang's spans of tokens that weights of one version chose, as of a `Turn`. Raises RequestFailed where they are
    not of these `tokens`."""
    runs = [(int(span["version"]), span["start"], span["end"]) for span in spans]
    if len(runs) < 2 or not tokens:
        return ()
    ends = [0, *(end for _, _, end in runs)]
    if [start for _, start, _ in runs] != ends[:-1] or ends[-1] != tokens or sorted(set(ends)) != ends:
        raise RequestFailed(f"the engine wrote {tokens} tokens and named the weights of others: {spans}")
    return tuple((version, end - start) for version, start, end in runs)


def decode_routing(text: str | None, tokens: int, shape: RoutingShape) -> torch.Tensor:
    """What SGLang sends of `tokens` tokens, base64 of int32 [tokens, layers, topk] -> [tokens, MoE layers, topk], uint8
    for up to 256 experts, else int16.

    It keeps the record beside the KV cache: of a token whose keys and values another request left there, it is what
    they were computed with. Raises RequestFailed where there is none, or one of another size or model.
    """
    if text is None:
        raise RequestFailed("the engine did not record which experts it chose; set train.replay_routing=false")
    found = np.frombuffer(pybase64.b64decode(text, validate=True), dtype=np.int32)  # 100 times as fast as if not
    if found.size != tokens * shape.num_layers * shape.topk:
        raise RequestFailed(
            f"the engine's record of routing has {found.size} numbers, not those of {tokens} tokens in {shape.num_layers} "
            f"layers with {shape.topk} experts each: engine and trainer must load the same config.json"
        )
    record = found.reshape(tokens, shape.num_layers, shape.topk)
    record = record[:, _slice(shape.moe_layers)]
    if record.size and record.view(np.uint32).max() >= shape.num_experts:  # negative ones are large so
        raise RequestFailed(
            f"the engine's record of routing names experts from {record.min()} to {record.max()}, but config.json has "
            f"{shape.num_experts}, from 0"
        )
    return torch.from_numpy(record.astype(np.uint8 if shape.num_experts <= 256 else np.int16))


def _slice(numbers: tuple[int, ...]) -> slice | list[int]:
    """What picks these; without a copy where each follows on the one before, as layers with experts mostly do."""
    first, last = numbers[0], numbers[-1]
    return slice(first, last + 1) if numbers == tuple(range(first, last + 1)) else list(numbers)
