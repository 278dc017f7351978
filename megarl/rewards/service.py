"""Rewards by a service elsewhere, over HTTP.

The protocol, all of it. To each URL go requests `POST`, `Content-Type: application/json`, with some conversations:

    {"conversations": [{"id": "17", "data_source": "gsm8k", "prompt": [{"role": "user", "content": "2+3?"}],
                        "messages": [.., {"role": "assistant", "content": "5"}], "answer": "5", "status": "stop",
                        "ground_truth": "5", "extra": {}}]}

`messages` is the whole conversation, `prompt` what it began with, `answer` what the policy said last; `status`, why it
ended; the others are of the data set's row. The answer is `200` with a JSON list, one entry for each in their order: a
number, or `{"reward": 0.5, "parts": {"style": 0.2}}`, whose parts are recorded beside it and not added. What is tried
again is said in `http_requests.py`; before the first step each URL is asked by `GET`, and may answer that as it likes.

An entry that is neither fails its rollout, an answer that is no such list those of its request.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from megarl.config import strict
from megarl.config.strict import PositiveInt
from megarl.rewards.failed_rewards import NOT_SCORED
from megarl.rewards.http_requests import HttpClient, HttpOptions, HttpResponse, preview
from megarl.types import Rollout
from megarl.types.reward_values import RewardError, RewardFailure, ServiceReward, parse_number

PART = "service"
"""Name of its part of a reward."""
_MOST_PARTS = 32
_NAME = re.compile(r"[\w./-]{1,64}", re.ASCII)


@dataclass(frozen=True)
class ServiceOptions(HttpOptions):
    batch: PositiveInt = 16
    """Conversations of a request."""


class Service:
    part = PART

    def __init__(self, options: ServiceOptions) -> None:
        self.options = options
        self.client = HttpClient(options, "reward service")

    def check_reachable(self) -> None:
        """Raise ConfigError unless somebody answers at each URL, whatever it is."""
        self.client.check_reachable()

    def score(self, rollouts: Sequence[Rollout], most_failed: float = math.inf) -> list[ServiceReward | RewardFailure]:
        """What the service says of each of them, or why there is nothing that could be taken. most_failed: when there
        is nothing for more than these, the others are not asked about any more."""
        found: list[ServiceReward | RewardFailure] = [NOT_SCORED] * len(rollouts)
        sent: list[tuple[int, bytes]] = []
        for number, rollout in enumerate(rollouts):
            text = _encode_rollout(rollout)
            if isinstance(text, RewardFailure):
                found[number] = text
            else:
                sent.append((number, text))
        size = self.options.batch
        batches = [sent[i : i + size] for i in range(0, len(sent), size)]
        bodies = [b'{"conversations": [' + b", ".join(text for _, text in batch) + b"]}" for batch in batches]
        failed = sum(isinstance(one, RewardFailure) and one is not NOT_SCORED for one in found)

        def note(index: int, answer: HttpResponse | RewardFailure) -> bool:
            nonlocal failed
            for (number, _), parts in zip(
                batches[index], self._parse_response(answer, len(batches[index])), strict=True
            ):
                found[number] = parts
                failed += isinstance(parts, RewardFailure)
            return failed <= most_failed

        self.client.post_all(bodies, goes_on=note)
        return found

    def max_duration(self, count: int) -> float:
        """Seconds that so many rollouts of a rank may take at most."""
        return self.client.max_duration(-(-count // self.options.batch))

    def _parse_response(
        self, answer: HttpResponse | RewardFailure, count: int
    ) -> Sequence[ServiceReward | RewardFailure]:
        if isinstance(answer, RewardFailure):
            return [answer] * count
        try:
            entries = orjson.loads(answer.data)
        except ValueError:
            problem = f"its answer is no JSON: {preview(answer.data)}"
            return [self.client.to_failure(answer.url, problem)] * count
        if not isinstance(entries, list) or len(entries) != count:
            what = f"a list of {len(entries)}" if isinstance(entries, list) else f"a {type(entries).__name__}"
            problem = f"its answer to {count} conversations must be a list of as many, not {what}: "
            return [self.client.to_failure(answer.url, problem + preview(answer.data))] * count
        return [self._entry(answer.url, entry) for entry in entries]

    def _entry(self, url: str, entry: Any) -> ServiceReward | RewardFailure:
        parts: dict[str, Any] = {}
        try:
            if isinstance(entry, dict):
                if "reward" not in entry:
                    raise RewardError(f"it returned no `reward`, but {preview(strict.short_repr(entry))}")
                entry, parts = entry["reward"], _check_parts(entry.get("parts") or {})
            reward = parse_number(entry, "it")
            return reward, {name: parse_number(part, f"it, as the part {name},") for name, part in parts.items()}
        except RewardError as error:
            return self.client.to_failure(url, str(error))


def _check_parts(parts: Any) -> dict[str, Any]:
    """Parts are columns of the rollout log and names of metrics, so that not everything will do."""
    if not isinstance(parts, dict):
        raise RewardError(f"it returned `parts` that are no mapping, but {preview(strict.short_repr(parts))}")
    if len(parts) > _MOST_PARTS:
        raise RewardError(f"it returned {len(parts)} parts; {_MOST_PARTS} are allowed")
    for name in parts:
        if not _NAME.fullmatch(name):
            raise RewardError(f"it returned a part with the name {preview(strict.short_repr(name))}; letters will do")
    return parts


def _encode_rollout(rollout: Rollout) -> bytes | RewardFailure:
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
        return RewardFailure(f"the sample cannot be sent to a reward service as JSON: {error}")
