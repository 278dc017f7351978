"""Sampling from the engines, by SGLang's native `/generate`: token ids in, token ids and log-probs out."""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

import aiohttp
import orjson

from megarl.serve.tinker_wire import RequestRefused, SampledSequence, SampleRequest, Samples


class EngineAddress(NamedTuple):
    url: str
    api_key: str


class EngineFailed(RuntimeError):
    """An engine did not answer a request."""


class EngineSampler:
    """Deals the sequences of requests out to engines. Use it inside one event loop.

    engines: addresses that this process reaches. max_context: tokens of a prompt and its continuation. timeout: seconds
    per sequence, the engine's queue included. concurrency: sequences that an engine has at a time; others wait here.
    """

    def __init__(self, engines: Sequence[EngineAddress], max_context: int, timeout: float, concurrency: int) -> None:
        self._next_engine = itertools.cycle(engines)
        self._max_context, self._timeout = max_context, timeout
        self._limit = asyncio.Semaphore(concurrency * max(1, len(engines)))

    async def sample(self, request: SampleRequest, version: int) -> Samples:
        """Continue a prompt with the weights of this version. Raises RequestRefused or EngineFailed."""
        seed = secrets.randbits(31) if request.seed is None else request.seed
        timeout = aiohttp.ClientTimeout(total=self._timeout)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            bodies = [
                self._make_body(request, (seed + number) % 2**31, version, is_first=not number)
                for number in range(request.num_samples)
            ]
            answers = await asyncio.gather(*(self._generate(session, body) for body in bodies))
        first = answers[0]["meta_info"]
        prompt_logprobs: list[float] | None = None
        topk_prompt: list[list[tuple[int, float]]] | None = None
        if request.prompt_logprobs:
            unscored = len(request.prompt) - len(first["input_token_logprobs"])
            scored = [entry[0] for entry in first["input_token_logprobs"]]
            prompt_logprobs = [math.nan] * unscored + [math.nan if value is None else value for value in scored]
            if request.topk_prompt_logprobs:
                topk_prompt = [[]] * unscored + [
                    _topk(row)[: request.topk_prompt_logprobs] for row in first["input_top_logprobs"]
                ]
        sequences = [_parse_sequence(answer, request.topk_logprobs) for answer in answers]
        return Samples(sequences, prompt_logprobs, topk_prompt, max(0, int(first.get("cached_tokens") or 0)))

    def _make_body(self, request: SampleRequest, seed: int, version: int, is_first: bool) -> dict[str, Any]:
        room = self._max_context - len(request.prompt)
        params: dict[str, Any] = {
            "max_new_tokens": min(room, request.max_tokens or room),
            "temperature": request.temperature,
            "top_k": request.top_k,
            "top_p": request.top_p,
            "sampling_seed": seed,
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        if request.temperature == 0:
            params |= {"top_k": 1, "temperature": 1.0}
        if request.stop is not None:
            is_text = any(isinstance(item, str) for item in request.stop)
            key = "stop" if is_text else "stop_token_ids"
            params |= {key: request.stop} if request.stop else {"ignore_eos": True}
        body = {
            "input_ids": request.prompt,
            "sampling_params": params,
            "return_logprob": True,
            "top_logprobs_num": request.topk_logprobs,
            "extra_key": str(version),  # keys and values of other weights are not reused
        }
        if is_first and request.prompt_logprobs:
            body["logprob_start_len"] = max(0, request.first_scored - 1)
            body["top_logprobs_num"] = max(request.topk_logprobs, request.topk_prompt_logprobs)
        return body

    async def _generate(self, session: aiohttp.ClientSession, body: dict[str, Any]) -> Any:
        async with self._limit:
            engine = next(self._next_engine)
            headers = {"Authorization": f"Bearer {engine.api_key}", "Content-Type": "application/json"}
            try:
                async with session.post(f"{engine.url}/generate", data=orjson.dumps(body), headers=headers) as response:
                    status, content = response.status, await response.read()
                if status == 200:
                    return orjson.loads(content)
            except (TimeoutError, aiohttp.ClientError, ValueError) as error:
                raise EngineFailed(f"the engine did not answer: {type(error).__name__}: {error}") from None
        if status == 400:
            raise RequestRefused(f"the engine refused the request: {content[:300].decode(errors='replace')}")
        raise EngineFailed(f"the engine answered with status {status}: {content[:300]!r}")


def _topk(row: Sequence[Sequence[Any]] | None) -> list[tuple[int, float]]:
    return [(int(token), float(logprob)) for logprob, token, *_ in row or ()]


def _parse_sequence(answer: Any, topk: int) -> SampledSequence:
    """Return the sequence of an engine's answer. Raises EngineFailed for an answer that is incomplete."""
    meta = answer["meta_info"]
    ids, pairs = answer["output_ids"], meta["output_token_logprobs"]
    kind = (meta.get("finish_reason") or {}).get("type")
    if kind not in ("stop", "length") or [token for _, token, *_ in pairs] != ids:
        raise EngineFailed(f"the engine ended a sequence of {len(ids)} tokens with {meta.get('finish_reason')}")
    rows = [_topk(row)[:topk] for row in meta["output_top_logprobs"]] if topk else None
    return SampledSequence(ids, [logprob for logprob, *_ in pairs], kind, rows)
