"""Rewards from an external service over HTTP.

The complete protocol: each request is a `POST` with `Content-Type: application/json` and a batch of conversations:

    {"conversations": [{"id": "17", "data_source": "gsm8k", "prompt": [{"role": "user", "content": "2+3?"}],
                        "messages": [.., {"role": "assistant", "content": "5"}], "answer": "5", "status": "stop",
                        "ground_truth": "5", "extra": {}}]}

`messages` is the whole conversation, `prompt` its beginning, `answer` the policy's last message, and `status` the
reason why it ended; the other fields come from the data set's row. The response has status 200 and is a JSON list with
one entry per conversation, in order: a number, or `{"reward": 0.5, "parts": {"style": 0.2}}`. The parts are logged but
not added. `http_requests.py` says which failures are retried. Before the first step each URL receives a `GET`, to which
any response will do.

An entry of any other form fails its rollout. A response that is not such a list fails all rollouts of its request.
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
"""Name of this part of the reward."""
_MAX_PARTS = 32
_NAME = re.compile(r"[\w./-]{1,64}", re.ASCII)


@dataclass(frozen=True)
class ServiceOptions(HttpOptions):
    """Options of a reward service."""

    batch: PositiveInt = 16
    """Conversations per request."""


class Service:
    """Client of a reward service."""

    part = PART

    def __init__(self, options: ServiceOptions) -> None:
        self.options = options
        self.client = HttpClient(options, "reward service")

    def check_reachable(self) -> None:
        """Raise ConfigError unless each URL responds, with whatever status."""
        self.client.check_reachable()

    def score(self, rollouts: Sequence[Rollout], max_failed: float = math.inf) -> list[ServiceReward | RewardFailure]:
        """Return the service's reward of each rollout, or the reason of a failure.

        max_failed: once more rollouts than this have failed, the others are no longer sent and are `NOT_SCORED`.
        """
        rewards: list[ServiceReward | RewardFailure] = [NOT_SCORED] * len(rollouts)
        encoded: list[tuple[int, bytes]] = []
        for number, rollout in enumerate(rollouts):
            text = _encode_rollout(rollout)
            if isinstance(text, RewardFailure):
                rewards[number] = text
            else:
                encoded.append((number, text))
        size = self.options.batch
        batches = [encoded[i : i + size] for i in range(0, len(encoded), size)]
        bodies = [b'{"conversations": [' + b", ".join(text for _, text in batch) + b"]}" for batch in batches]
        failed = sum(isinstance(reward, RewardFailure) and reward is not NOT_SCORED for reward in rewards)

        def record(index: int, response: HttpResponse | RewardFailure) -> bool:
            nonlocal failed
            for (number, _), parts in zip(
                batches[index], self._parse_response(response, len(batches[index])), strict=True
            ):
                rewards[number] = parts
                failed += isinstance(parts, RewardFailure)
            return failed <= max_failed

        self.client.post_all(bodies, should_continue=record)
        return rewards

    def max_duration(self, count: int) -> float:
        """Return the maximum seconds that this many rollouts of a rank may take."""
        return self.client.max_duration(-(-count // self.options.batch))

    def _parse_response(
        self, response: HttpResponse | RewardFailure, count: int
    ) -> Sequence[ServiceReward | RewardFailure]:
        if isinstance(response, RewardFailure):
            return [response] * count
        try:
            entries = orjson.loads(response.data)
        except ValueError:
            problem = f"its answer is no JSON: {preview(response.data)}"
            return [self.client.to_failure(response.url, problem)] * count
        if not isinstance(entries, list) or len(entries) != count:
            what = f"a list of {len(entries)}" if isinstance(entries, list) else f"a {type(entries).__name__}"
            problem = f"its answer to {count} conversations must be a list of as many, not {what}: "
            return [self.client.to_failure(response.url, problem + preview(response.data))] * count
        return [self._entry(response.url, entry) for entry in entries]

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
    """Return the parts of an entry. Their names are restricted, because they become log columns and metric names."""
    if not isinstance(parts, dict):
        raise RewardError(f"it returned `parts` that are no mapping, but {preview(strict.short_repr(parts))}")
    if len(parts) > _MAX_PARTS:
        raise RewardError(f"it returned {len(parts)} parts; {_MAX_PARTS} are allowed")
    for name in parts:
        if not _NAME.fullmatch(name):
            raise RewardError(f"it returned a part with the name {preview(strict.short_repr(name))}; letters will do")
    return parts


def _encode_rollout(rollout: Rollout) -> bytes | RewardFailure:
    prompt = rollout.prompt
    fields = {
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
        return orjson.dumps(fields, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
        return RewardFailure(f"the sample cannot be sent to a reward service as JSON: {error}")
