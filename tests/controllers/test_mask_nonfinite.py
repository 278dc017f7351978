"""Non-finite values mask their episode and leave the rest of the batch unchanged."""

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


class FakeLog:
    def __init__(self) -> None:
        self.reports: list[Any] = []

    def report_nonfinite(self, step: int, rollouts: Any) -> None:
        self.reports.append((step, rollouts))

    def log(self, text: str) -> None:
        pass


class FakeFlow:
    step = 7

    def __init__(self) -> None:
        self.log: Any = FakeLog()


def rollouts(branches: bool = False) -> Rollouts:
    """Return four rollouts of one prompt and two action tokens; with branches, the last two are one episode."""
    local = [
        Rollout(Prompt(f"p{i}", ()), (Turn((9,)), Turn((1, 2), (-0.5, -0.25), True)), reward=float(i), seed=10 + i)
        for i in range(4)
    ]
    if branches:
        local[2:] = [dataclasses.replace(element, episode=0, group=2, prompt=local[2].prompt) for element in local[2:]]
    return Rollouts.gather(local)


def make_column(**changes: float) -> torch.Tensor:
    """Return ones [12], with changes by token: t3=NAN sets token 3."""
    values = torch.ones(12)
    for name, value in changes.items():
        values[int(name.removeprefix("t"))] = value
    return values


def test_finite_batch_is_unchanged() -> None:
    flow, selected = FakeFlow(), rollouts()
    batch = TrainBatch.from_rollouts(selected).with_(values=make_column(t0=NAN, t3=INF))  # prompt tokens
    policy = ModelOutput(logprobs=make_column(t6=NAN))
    actual, outputs, metrics = mask_nonfinite(flow, selected, batch, policy)  # type: ignore[arg-type]
    assert actual is batch and outputs == [policy] and metrics == {} and not flow.log.reports


def test_nonfinite_sequences_are_masked_and_reported() -> None:
    flow, selected = FakeFlow(), rollouts()
    batch = TrainBatch.from_rollouts(selected).with_(values=make_column(t4=NAN, t5=INF), ref_logprobs=make_column())
    policy = ModelOutput(logprobs=make_column(t4=-INF, t11=NAN))
    actual, (cleaned,), metrics = mask_nonfinite(flow, selected, batch, policy)  # type: ignore[arg-type]
    assert metrics == {METRIC: 2.0}
    assert actual.loss_mask.tolist() == [False, True, True, *[False] * 4, True, True, *[False] * 3]
    masked = [3, 4, 5, 9, 10, 11]
    for values in (actual.values, actual.ref_logprobs, actual.rollout_logprobs, cleaned.logprobs):
        assert values is not None and values[masked].tolist() == [0.0] * 6
    assert actual.ref_logprobs is not None and actual.ref_logprobs[[0, 1, 8]].tolist() == [1.0] * 3
    assert actual.sequence_reward.tolist() == [0, 1, 2, 3]  # rewards stay
    ((step, records),) = flow.log.reports
    assert step == 7 and records == [
        {"prompt": "p1", "group": 0, "seed": 11, "not_finite": {"values of the batch": 2, "logprobs": 1}},
        {"prompt": "p3", "group": 0, "seed": 13, "not_finite": {"logprobs": 1}},
    ]


def test_all_branches_of_an_episode_are_masked() -> None:
    flow, selected = FakeFlow(), rollouts(branches=True)
    batch = TrainBatch.from_rollouts(selected).with_(advantages=make_column(t7=NAN))
    actual, _, metrics = mask_nonfinite(flow, selected, batch)  # type: ignore[arg-type]
    assert metrics == {METRIC: 2.0}
    assert actual.loss_mask.tolist() == [False, True, True, False, True, True, *[False] * 6]


def test_add_metrics_sums_the_count() -> None:
    assert add_metrics({"a": 1.0, METRIC: 2.0}, {METRIC: 1.0}) == {"a": 1.0, METRIC: 3.0}
    assert add_metrics({"a": 1.0}, {}) == {"a": 1.0}


class NonfiniteFlow(TableFlow):
    """A flow in which one role's output is NaN at the first sequence's last token."""

    step = 1

    def __init__(self, config: Config, role: str) -> None:
        super().__init__(config)
        self.log: Any = FakeLog()
        self.role = role
        forward = self.policy.forward
        self.policy.forward = lambda batch: self._add_nan("policy", forward(batch), batch)  # type: ignore[method-assign]

    def forward(self, batch: TrainBatch) -> Future[ModelOutput]:
        return self._add_nan("others", super().forward(batch), batch)

    def _add_nan(self, role: str, future: Future[ModelOutput], batch: TrainBatch) -> Future[ModelOutput]:
        if role != self.role:
            return future
        output = future.wait()
        is_last = torch.arange(len(batch.tokens)) == int(batch.cu_seqlens[1]) - 1
        with_nan = {
            item.name: value.masked_fill(is_last, NAN)
            for item in dataclasses.fields(output)
            if (value := getattr(output, item.name)) is not None
        }
        return Future.completed(ModelOutput(**with_nan))


@pytest.mark.parametrize("role", ["policy", "others"])
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
@pytest.mark.parametrize("apply_to", ["reward", "loss"])
def test_training_continues_on_the_finite_sequences(algorithm: str, role: str, apply_to: str) -> None:
    """NaN reaches neither whitened advantages nor the mean KL of the adaptive controller."""
    settings: dict[str, Any] = {"algorithm": algorithm, "kl": {"apply_to": apply_to, "target": 0.1}}
    config = from_dict({**settings, "run": {"num_update": 2}, "rollout": {"samples_per_prompt": 4}})
    flow = NonfiniteFlow(config, role)
    result = make_controller(config).step(flow, [Prompt(f"p{i}", ()) for i in range(4)])  # type: ignore[arg-type]
    assert result.metrics[METRIC] == 1 and len(flow.log.reports) == 1
    assert all(math.isfinite(value) for value in result.metrics.values()), result.metrics
    assert bool(torch.isfinite(flow.policy.table).all())
    assert not torch.equal(flow.policy.table, flow.first_table)
    assert result.batch is not None and int(result.batch.loss_mask[: int(result.batch.cu_seqlens[1])].sum()) == 0


def test_reports_are_written_to_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megarl.parallel.ranks.broadcast_object", lambda value, source=0: value)
    log = RunLog(from_dict({"run": {"dir": str(tmp_path)}, "track": {"trackers": []}}), Job(0, 1, 0))
    changes = [{"prompt": f"p{i}", "group": i, "seed": i, "not_finite": {"logprobs": 1}} for i in range(5)]
    log.report_nonfinite(3, changes)
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "nonfinite.jsonl").read_text().splitlines()]
    assert lines == [{"step": 3, **element} for element in changes]
    log_text = (tmp_path / "log.txt").read_text()
    assert (
        "ALARM: step 3: masked rollouts with non-finite" in log_text
        and "p0 (logprobs), p1 (logprobs), p2 (logprobs) and 2 more" in log_text
    )
