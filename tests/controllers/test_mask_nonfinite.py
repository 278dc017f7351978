"""A number that is none costs its episode, and nothing else."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config import Config, from_dict
from megarl.controllers.controller import make_controller
from megarl.controllers.policy_gradient import METRIC, add_metrics, mask_nonfinite
from megarl.observe.run_log import RunLog
from megarl.parallel.ranks import Job
from megarl.types import ModelOutput, Prompt, Rollout, Rollouts, TrainBatch, Turn
from megarl.workers.futures import Future

sys.path.insert(0, str(Path(__file__).parent))
from test_learning import TableFlow  # noqa: E402

pytestmark = pytest.mark.alone

NAN, INF = math.nan, math.inf


class Log:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def report_nonfinite(self, step: int, rollouts: Any) -> None:
        self.seen.append((step, rollouts))

    def log(self, text: str) -> None:
        pass


class Flow:
    step = 7

    def __init__(self) -> None:
        self.log: Any = Log()


def rollouts(branches: bool = False) -> Rollouts:
    """Four of a prompt token and two of the policy's; the last two may be branches of one episode."""
    local_items = [
        Rollout(Prompt(f"p{i}", ()), (Turn((9,)), Turn((1, 2), (-0.5, -0.25), True)), reward=float(i), seed=10 + i)
        for i in range(4)
    ]
    if branches:
        local_items[2:] = [
            dataclasses.replace(element, episode=0, group=2, prompt=local_items[2].prompt)
            for element in local_items[2:]
        ]
    return Rollouts.gather(local_items)


def column(**odd: float) -> torch.Tensor:
    """[12] of 1, but for tokens by their numbers."""
    values = torch.ones(12)
    for name, value in odd.items():
        values[int(name.removeprefix("t"))] = value
    return values


def test_where_all_are_numbers_nothing_changes() -> None:
    flow, selected = Flow(), rollouts()
    batch = TrainBatch.from_rollouts(selected).with_(values=column(t0=NAN, t3=INF))  # of tokens of prompts
    policy = ModelOutput(logprobs=column(t6=NAN))
    actual, outputs, metrics = mask_nonfinite(flow, selected, batch, policy)  # type: ignore[arg-type]
    assert actual is batch and outputs == [policy] and metrics == {} and not flow.log.seen


def test_a_sequence_with_a_number_that_is_none_is_masked_and_said_by_name() -> None:
    flow, selected = Flow(), rollouts()
    batch = TrainBatch.from_rollouts(selected).with_(values=column(t4=NAN, t5=INF), ref_logprobs=column())
    policy = ModelOutput(logprobs=column(t4=-INF, t11=NAN))
    actual, (cleaned,), metrics = mask_nonfinite(flow, selected, batch, policy)  # type: ignore[arg-type]
    assert metrics == {METRIC: 2.0}
    assert actual.loss_mask.tolist() == [False, True, True, *[False] * 4, True, True, *[False] * 3]
    gone = [3, 4, 5, 9, 10, 11]
    for values in (actual.values, actual.ref_logprobs, actual.rollout_logprobs, cleaned.logprobs):
        assert values is not None and values[gone].tolist() == [0.0] * 6
    assert actual.ref_logprobs is not None and actual.ref_logprobs[[0, 1, 8]].tolist() == [1.0] * 3
    assert actual.sequence_reward.tolist() == [0, 1, 2, 3]  # what groups are compared by stays
    ((step, records),) = flow.log.seen
    assert step == 7 and records == [
        {"prompt": "p1", "group": 0, "seed": 11, "not_finite": {"values of the batch": 2, "logprobs": 1}},
        {"prompt": "p3", "group": 0, "seed": 13, "not_finite": {"logprobs": 1}},
    ]


def test_branches_of_an_episode_go_together() -> None:
    flow, selected = Flow(), rollouts(branches=True)
    batch = TrainBatch.from_rollouts(selected).with_(advantages=column(t7=NAN))
    actual, _, metrics = mask_nonfinite(flow, selected, batch)  # type: ignore[arg-type]
    assert metrics == {METRIC: 2.0}
    assert actual.loss_mask.tolist() == [False, True, True, False, True, True, *[False] * 6]


def test_further_looks_add_up() -> None:
    assert add_metrics({"a": 1.0, METRIC: 2.0}, {METRIC: 1.0}) == {"a": 1.0, METRIC: 3.0}
    assert add_metrics({"a": 1.0}, {}) == {"a": 1.0}


class Spoilt(TableFlow):
    """Of each batch, what a model says of the first sequence's last token is no number."""

    step = 1

    def __init__(self, config: Config, who: str) -> None:
        super().__init__(config)
        self.log: Any = Log()
        self.who = who
        forward = self.policy.forward
        self.policy.forward = lambda batch: self._spoilt("policy", forward(batch), batch)  # type: ignore[method-assign]

    def forward(self, batch: TrainBatch) -> Future[ModelOutput]:
        return self._spoilt("others", super().forward(batch), batch)

    def _spoilt(self, who: str, future: Future[ModelOutput], batch: TrainBatch) -> Future[ModelOutput]:
        if who != self.who:
            return future
        output = future.wait()
        at = torch.arange(len(batch.tokens)) == int(batch.cu_seqlens[1]) - 1
        spoilt = {
            item.name: value.masked_fill(at, NAN)
            for item in dataclasses.fields(output)
            if (value := getattr(output, item.name)) is not None
        }
        return Future.completed(ModelOutput(**spoilt))


@pytest.mark.parametrize("who", ["policy", "others"])
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
@pytest.mark.parametrize("apply_to", ["reward", "loss"])
def test_the_others_are_trained_on_and_no_mean_is_spoilt(algorithm: str, who: str, apply_to: str) -> None:
    """Advantages are whitened, KLs are averaged, and a controller steers by that."""
    settings: dict[str, Any] = {"algorithm": algorithm, "kl": {"apply_to": apply_to, "target": 0.1}}
    config = from_dict({**settings, "run": {"num_update": 2}, "rollout": {"samples_per_prompt": 4}})
    flow = Spoilt(config, who)
    result = make_controller(config).step(flow, [Prompt(f"p{i}", ()) for i in range(4)])  # type: ignore[arg-type]
    assert result.metrics[METRIC] == 1 and len(flow.log.seen) == 1
    assert all(math.isfinite(value) for value in result.metrics.values()), result.metrics
    assert bool(torch.isfinite(flow.policy.table).all())
    assert not torch.equal(flow.policy.table, flow.first_table)
    assert result.batch is not None and int(result.batch.loss_mask[: int(result.batch.cu_seqlens[1])].sum()) == 0


def test_they_are_kept_for_a_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.parallel.ranks.broadcast_object", lambda value, source=0: value)
    log = RunLog(from_dict({"run": {"dir": str(tmp_path)}, "track": {"trackers": []}}), Job(0, 1, 0))
    odd = [{"prompt": f"p{i}", "group": i, "seed": i, "not_finite": {"logprobs": 1}} for i in range(5)]
    log.report_nonfinite(3, odd)
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "quarantine.jsonl").read_text().splitlines()]
    assert lines == [{"step": 3, **element} for element in odd]
    said = (tmp_path / "log.txt").read_text()
    assert (
        "ALARM: step 3: masked rollouts with non-finite" in said
        and "p0 (logprobs), p1 (logprobs), p2 (logprobs) and 2 more" in said
    )
