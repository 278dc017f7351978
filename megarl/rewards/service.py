"""Rewards by a service elsewhere, over HTTP.

The protocol, all of it. To each URL go requests `POST`, `Content-Type: application/json`, with some conversations:

    {"conversations": [{"id": "17", "data_source": "gsm8k", "prompt": [{"role": "user", "content": "2+3?"}],
                        "messages": [.., {"role": "assistant", "content": "5"}], "answer": "5", "status": "stop",
                        "ground_truth": "5", "extra": {}}]}

`messages` is the whole conversation, `prompt` what it began with, `answer` what the policy said last; `status`, why it
ended; the others are of the data set's row. The answer is `200` with a JSON list, one entry for each in their order: a
number, or `{"reward": 0.5, "parts": {"style": 0.2}}`, whose parts are recorded beside it and not added. A lost
connection, a time-out and the statuses 429 and 5xx are tried again, by the next URL; any other one ends the run. Before
the first step each URL is asked by `GET`, and may answer that as it likes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import urlsplit

import aiohttp
import orjson

from megarl import forks, strict
from megarl.config import Config, ConfigError, Range
from megarl.rewards.functions import Parts, number_of
from megarl.strict import Count, Seconds
from megarl.types import Rollout

PART = "service"
"""Name of its part of a reward."""
WHERE = "roles.reward.options."
_LONGEST_PAUSE_S = 10.0
_JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class ServiceOptions:
    url: tuple[str, ...] = ()
    """Where the service is; of several each gets its turn."""
    batch: Count = 16
    """Conversations of a request."""
    concurrency: Count = 8
    """Requests at once, of each rank that has rollouts."""
    timeout: Seconds = 60.0
    """Seconds that an answer may take."""
    tries: Count = 5
    """How often a request is made before the run ends."""
    pause: Annotated[float, Range(0, _LONGEST_PAUSE_S)] = 0.5
    """Seconds before the second try; twice as many before each one after it, at most ten."""

    @staticmethod
    def read(options: dict[str, Any]) -> ServiceOptions:
        """Raises ConfigError for what is none of these, and where there is no URL."""
        found: ServiceOptions = strict.build(ServiceOptions, options, WHERE, root=Config)
        if not found.url:
            raise ConfigError(
                f"{WHERE}url is not set; it must name the reward service, such as http://judge:8000/score"
            )
        for url in found.url:
            try:
                parts = urlsplit(url)
                good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
            except ValueError:  # of a port that is none
                good = False
            if not good:
                raise ConfigError(f"{WHERE}url: {url!r} is no address such as http://judge:8000/score")
        return found


class Service:
    def __init__(self, options: ServiceOptions) -> None:
        self.options = options

    def look(self) -> None:
        """Raise ConfigError unless somebody answers at each URL, whatever it is."""
        asyncio.run(self._look())

    def scores(self, rollouts: Sequence[Rollout]) -> list[Parts]:
        """What the service says of each of them. Raises ConfigError, which names the URL and what came back."""
        size = self.options.batch
        return asyncio.run(self._scores([rollouts[i : i + size] for i in range(0, len(rollouts), size)]))

    def longest(self, count: int) -> float:
        """Seconds that so many rollouts of a rank may take at most."""
        one = self.options
        in_turn = -(-count // (one.batch * one.concurrency))
        return in_turn * one.tries * (one.timeout + _LONGEST_PAUSE_S)

    async def _look(self) -> None:
        async with self._session() as session:
            for url in self.options.url:
                await self._ask(session, [url], None)

    async def _scores(self, batches: Sequence[Sequence[Rollout]]) -> list[Parts]:
        at_once = asyncio.Semaphore(self.options.concurrency)
        urls = self.options.url

        async def one(number: int, batch: Sequence[Rollout]) -> list[Parts]:
            async with at_once:
                first = number % len(urls)
                url, data = await self._ask(session, urls[first:] + urls[:first], _body(batch))
                return _read(url, data, batch)

        async with self._session() as session:
            found = await asyncio.gather(*(one(number, batch) for number, batch in enumerate(batches)))
        return [parts for batch in found for parts in batch]

    def _session(self) -> aiohttp.ClientSession:
        limit = aiohttp.ClientTimeout(total=self.options.timeout)
        return aiohttp.ClientSession(timeout=limit, connector=aiohttp.TCPConnector(limit=0))

    async def _ask(self, session: aiohttp.ClientSession, urls: Sequence[str], body: bytes | None) -> tuple[str, bytes]:
        """The first good answer, and whose it is. Without a body, any answer."""
        problem, pause = "", self.options.pause
        for attempt in range(self.options.tries):
            if attempt:
                await asyncio.sleep(min(pause, _LONGEST_PAUSE_S))
                pause *= 2
            url = urls[attempt % len(urls)]
            try:
                asked = session.get(url) if body is None else session.post(url, data=body, headers=_JSON)
                async with asked as reply:
                    status, data = reply.status, await reply.read()
            except TimeoutError:
                problem = f"there was no answer within {self.options.timeout:g} s"
                continue
            except (aiohttp.ClientError, OSError) as error:
                problem = forks.worded(error)
                continue
            if body is None or status == 200:
                return url, data
            problem = f"it answered with status {status}: {_shown(data)}"
            if status < 500 and status != 429:
                raise ConfigError(f"the reward service {url}: {problem}")
        raise ConfigError(
            f"the reward service {url}: {problem} ({self.options.tries} tries); see that it runs, or set {WHERE}url"
        )


def _body(batch: Sequence[Rollout]) -> bytes:
    return b'{"conversations": [' + b", ".join(map(_sent, batch)) + b"]}"


def _sent(rollout: Rollout) -> bytes:
    prompt = rollout.prompt
    about = {
        "id": prompt.id,
        "data_source": prompt.data_source,
        "prompt": prompt.messages,
        "messages": rollout.messages,
        "answer": rollout.answer,
        "status": rollout.status,
        "ground_truth": prompt.ground_truth,
        "extra": prompt.extra,
    }
    try:
        return orjson.dumps(about, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
        raise ConfigError(f"the sample {prompt.id!r} cannot be sent to a reward service as JSON: {error}") from None


def _read(url: str, data: bytes, batch: Sequence[Rollout]) -> list[Parts]:
    """Raises ConfigError where the answer is no list of as many numbers, or of objects with a reward."""
    try:
        entries = orjson.loads(data)
    except ValueError:
        raise ConfigError(f"the reward service {url}: its answer is no JSON: {_shown(data)}") from None
    if not isinstance(entries, list) or len(entries) != len(batch):
        what = f"a list of {len(entries)}" if isinstance(entries, list) else f"a {type(entries).__name__}"
        raise ConfigError(
            f"the reward service {url}: its answer to {len(batch)} conversations must be a list of as many, not "
            f"{what}: {_shown(data)}"
        )
    found = []
    for rollout, entry in zip(batch, entries, strict=True):
        about = f"the reward service {url} on the sample {rollout.prompt.id!r}"
        parts: Any = {}
        if isinstance(entry, dict):
            if "reward" not in entry:
                raise ConfigError(f"{about} returned no `reward`, but {strict.shown(entry)}")
            entry, parts = entry["reward"], entry.get("parts") or {}
            if not isinstance(parts, dict):
                raise ConfigError(f"{about} returned `parts` that are no mapping, but {strict.shown(parts)}")
        reward = number_of(entry, about)
        found.append((reward, {name: number_of(part, f"{about}, part {name}") for name, part in parts.items()}))
    return found


def _shown(data: bytes) -> str:
    return " ".join(data[:400].decode(errors="replace").split())[:200] or "nothing"
