"""Rollout and batch metrics against hand-computed values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from thread_ranks import ThreadRank, as_ranks

from megarl.observe import metrics as metrics_module
from megarl.observe.metrics import SourceMeans, batch_metrics, rollout_metrics
from megarl.types import BatchSharding, Prompt, Rollout, Rollouts, SamplingMask, Status, TrainBatch, Turn, as_branches

pytestmark = pytest.mark.alone


def rollout(group: int, reward: float, lengths: tuple[int, ...], calls: int, errors: int, status: Status) -> Rollout:
    turns = [Turn((0,) * 5)]
    for length in lengths:
        turns += [Turn((1,) * length, (0.0,) * length, is_action=True), Turn((2, 2))]
    return Rollout(Prompt("p", ()), tuple(turns), status, reward, {"a": reward, "b": 0.0}, 0, group, (), calls, errors)


def test_rollout_metrics_match_hand_computed_values() -> None:
    rollouts = [
        rollout(0, 1.0, (4, 2), 1, 0, "stop"),
        rollout(0, 0.0, (3,), 0, 0, "length"),
        rollout(1, 0.5, (1, 1, 1), 3, 2, "max_turns"),
        rollout(1, 0.5, (8,), 0, 0, "stop"),
    ]
    metrics = rollout_metrics(Rollouts.gather(rollouts))
    by_rank = as_ranks(2, lambda rank: rollout_metrics(Rollouts.gather(rollouts[2 * rank.rank :][:2], None, rank)))
    assert by_rank == [metrics, metrics]
    expected = {
        "rollout/reward_mean": 0.5,
        "rollout/reward_std": 0.125**0.5,
        "rollout/reward_variance": 0.125,
        "rollout/reward_min": 0.0,
        "rollout/reward_max": 1.0,
        "rollout/response_length_mean": (6 + 3 + 3 + 8) / 4,
        "rollout/response_length_max": 8.0,
        "rollout/prompt_length_mean": 5.0,
        "rollout/length_max": 15.0,
        "rollout/turns_mean": (2 + 1 + 3 + 1) / 4,
        "rollout/tool_calls_mean": 1.0,
        "rollout/tool_errors": 2.0,
        "rollout/no_tool_frac": 0.5,
        "rollout/truncated_frac": 0.25,
        "rollout/max_turns_frac": 0.25,
        "rollout/aborted_frac": 0.0,
        "rollout/reward_failed_frac": 0.0,
        "rollout/zero_spread_frac": 0.5,
        "reward/a": 0.5,
        "reward/b": 0.0,
    }
    assert metrics == pytest.approx(expected)


def test_aborted_rollouts_only_count_as_aborted() -> None:
    """Without its aborted rollout, group 0 has zero spread."""
    complete = [
        rollout(0, 1.0, (2,), 0, 0, "stop"),
        rollout(1, 0.0, (2,), 0, 0, "stop"),
        rollout(1, 1.0, (4,), 1, 0, "stop"),
    ]
    aborted = rollout(0, 0.0, (100,), 9, 9, "aborted")
    result = rollout_metrics(Rollouts.gather([*complete, aborted]))
    assert result == rollout_metrics(Rollouts.gather(complete)) | {"rollout/aborted_frac": 0.25}
    assert result["rollout/reward_mean"] == pytest.approx(2 / 3) and result["rollout/zero_spread_frac"] == 0.5
    assert rollout_metrics(Rollouts.gather([aborted])) == {"rollout/aborted_frac": 1.0}


def test_reward_metrics_skip_unscored_rollouts() -> None:
    """Two of four completed rollouts are unscored, one for two reasons; no group has two rewards."""
    scored = [rollout(0, 1.0, (2,), 0, 0, "stop"), rollout(1, 0.5, (4,), 1, 0, "stop")]
    failed = [
        replace(rollout(0, 0.0, (6,), 0, 0, "stop"), reward_parts={"a": 5.0}, unscored={"b": "it raised"}),
        replace(rollout(1, 0.0, (4,), 0, 0, "stop"), reward_parts={}, unscored={"a": "it raised", "b": "late"}),
    ]
    aborted = rollout(0, 0.0, (100,), 9, 9, "aborted")
    result = rollout_metrics(Rollouts.gather([*scored, *failed, aborted]))
    complete = rollout_metrics(Rollouts.gather(scored))
    assert result["rollout/reward_failed_frac"] == 0.5 and result["rollout/aborted_frac"] == pytest.approx(0.2)
    assert result["reward/a_failed_frac"] == 0.25 and result["reward/b_failed_frac"] == 0.5
    for name in ("rollout/reward_mean", "rollout/reward_std", "rollout/reward_min", "reward/a", "reward/b"):
        assert result[name] == complete[name]
    assert "rollout/zero_spread_frac" not in result and result["rollout/response_length_mean"] == 4.0
    unscored_only = rollout_metrics(Rollouts.gather(failed))
    assert unscored_only["rollout/reward_failed_frac"] == 1.0 and "rollout/reward_mean" not in unscored_only


def test_branches_count_as_one_episode() -> None:
    """An episode of three branches (4 + 2 + 3 tokens, reward 1), a rollout of reward 0, and an aborted one."""
    branches = [
        rollout(0, 1.0, (4,), 1, 0, "stop"),
        rollout(0, 1.0, (2,), 0, 0, "stop"),
        rollout(0, 1.0, (1, 2), 2, 1, "stop"),
    ]
    single, aborted = rollout(0, 0.0, (5,), 0, 0, "length"), rollout(0, 0.0, (9,), 9, 9, "aborted")
    result = rollout_metrics(Rollouts.gather([*as_branches(branches, 0), single, *as_branches([aborted] * 4, 1)]))
    complete = rollout_metrics(Rollouts.gather([rollout(0, 1.0, (4, 2, 1, 2), 3, 1, "stop"), single, aborted]))
    lengths = {"rollout/length_max": 12.0, "rollout/branches_mean": 2.0}  # the longest sequence, with its prompt
    assert result == complete | lengths
    assert result["rollout/reward_mean"] == 0.5 and result["rollout/response_length_mean"] == 7.0
    assert result["rollout/aborted_frac"] == pytest.approx(1 / 3) and result["rollout/truncated_frac"] == 0.5
    shards = [[*as_branches(branches, 0)], [single, *as_branches([aborted] * 4, 1)]]
    assert as_ranks(2, lambda rank: rollout_metrics(Rollouts.gather(shards[rank.rank], None, rank))) == [result] * 2


def test_failed_reward_counts_once_per_episode() -> None:
    failed = replace(rollout(0, 0.0, (2,), 0, 0, "stop"), unscored={"a": "it raised"})
    rollouts = [*as_branches([failed] * 3, 0), rollout(0, 1.0, (2,), 0, 0, "stop")]
    result = rollout_metrics(Rollouts.gather(rollouts))
    assert result["rollout/reward_failed_frac"] == result["reward/a_failed_frac"] == 0.5


def test_weighted_reward_part_is_reported_separately() -> None:
    plain = replace(rollout(0, 1.0, (1,), 0, 0, "stop"), reward_parts={"a": 1.0})
    assert "reward/a" not in rollout_metrics(Rollouts.gather([plain]))
    reweighted = replace(plain, reward=0.5)
    assert rollout_metrics(Rollouts.gather([reweighted, plain]))["reward/a"] == 1.0


def test_speculative_accept_rate() -> None:
    plain = rollout(0, 1.0, (1,), 0, 0, "stop")
    assert "rollout/spec_accept_rate" not in rollout_metrics(Rollouts.gather([plain]))
    drafted = [replace(plain, drafted=6, accepted=2), replace(plain, drafted=2, accepted=2), plain]
    metrics = rollout_metrics(Rollouts.gather(drafted), num_speculative_tokens=2)
    assert metrics["rollout/spec_accept_rate"] == 0.5
    # Four drafts of two tokens, of which four tokens were accepted; each verification adds one.
    assert metrics["rollout/spec_accept_length"] == (4 + 4) / 4


def test_mean_sampling_mask_size() -> None:
    plain = rollout(0, 1.0, (1,), 0, 0, "stop")
    assert "rollout/sampling_mask_size_mean" not in rollout_metrics(Rollouts.gather([plain]))
    num_actions = plain.num_actions
    truncated = replace(plain, sampling_mask=SamplingMask.from_rows([[1, 2, 3]] * num_actions))
    assert rollout_metrics(Rollouts.gather([truncated, truncated]))["rollout/sampling_mask_size_mean"] == 3


def test_no_rollouts_give_no_metrics() -> None:
    assert rollout_metrics(Rollouts.gather([])) == {}
    assert "rollout/zero_spread_frac" not in rollout_metrics(Rollouts.gather([rollout(0, 1.0, (1,), 0, 0, "stop")]))


def source_rollout(source: str, reward: float, length: int, status: Status = "stop") -> Rollout:
    base = rollout(0, reward, (length,), 0, 0, status)
    return replace(base, prompt=replace(base.prompt, data_source=source), reward_parts={})


SOURCES = [
    source_rollout("b", 1.0, 2),
    source_rollout("openai/a", 0.5, 4),
    source_rollout("b", 0.0, 6),
    source_rollout("", 1.0, 1),
    source_rollout("c", 9.0, 9, "aborted"),
]


def test_reports_metrics_per_source() -> None:
    complete = rollout_metrics(Rollouts.gather(SOURCES))
    result = {name: value for name, value in complete.items() if name.count("/") > 1}
    assert result == {
        **{"rollout/reward_mean/b": 0.5, "rollout/response_length_mean/b": 4.0, "rollout/count/b": 2.0},
        **{"rollout/reward_mean/openai/a": 0.5, "rollout/response_length_mean/openai/a": 4.0},
        **{"rollout/count/openai/a": 1.0, "rollout/count/other": 1.0},
        **{"rollout/reward_mean/other": 1.0, "rollout/response_length_mean/other": 1.0},
    }
    # A rank without a source and a rank without rollouts report the same.
    shards = [SOURCES[:2], [], SOURCES[2:]]
    by_rank = as_ranks(3, lambda rank: rollout_metrics(Rollouts.gather(shards[rank.rank], None, rank)))
    assert by_rank == [complete] * 3


def test_no_source_metrics_for_one_or_too_many_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    for rollouts in (SOURCES[:1], [SOURCES[0], SOURCES[2]], [SOURCES[3]], [SOURCES[0], SOURCES[4]]):
        assert all(name.count("/") == 1 for name in rollout_metrics(Rollouts.gather(rollouts)))
    monkeypatch.setattr(metrics_module, "MAX_SOURCES", 2)
    assert "rollout/count/b" in rollout_metrics(Rollouts.gather(SOURCES[:3]))
    assert all(name.count("/") == 1 for name in rollout_metrics(Rollouts.gather(SOURCES[:4])))


def test_source_means_across_batches() -> None:
    means = SourceMeans()
    for batch in (SOURCES[:2], SOURCES[2:4]):
        rollouts = Rollouts.gather(batch)
        means.add("eval/nll", rollouts.reward * 10, rollouts.actions, rollouts)
    assert means.result() == pytest.approx(
        {"eval/nll": 25 / 13, "eval/nll/b": 10 / 8, "eval/nll/openai/a": 5 / 4, "eval/nll/other": 10.0}
    )
    single = SourceMeans()
    single.add("eval/nll", torch.tensor([3.0]), torch.tensor([2]), Rollouts.gather(SOURCES[:1]))
    assert single.result() == {"eval/nll": 1.5}


def make_batch(*values: float, mask: tuple[bool, ...]) -> TrainBatch:
    """A batch of one sequence with these advantages."""
    count = len(values)
    return TrainBatch(
        tokens=torch.zeros(count, dtype=torch.int32),
        cu_seqlens=torch.tensor([0, count]),
        loss_mask=torch.tensor(mask),
        group=torch.zeros(1, dtype=torch.int64),
        sequence_reward=torch.zeros(1),
        rollout_logprobs=torch.zeros(count),
        advantages=torch.tensor(values),
    )


def test_batch_metrics_match_hand_computed_values() -> None:
    """Action tokens 1, -1, 3: mean 1, squared deviations 0, 4, 4; the prompt token is excluded."""
    batch = make_batch(99.0, 1.0, -1.0, 3.0, mask=(False, True, True, True))
    result = batch_metrics(batch, seconds=2.0, world=4)
    assert result["perf/tokens_per_second_per_rank"] == 0.5
    assert result["actor/advantage_mean"] == 1.0
    assert result["actor/advantage_variance"] == pytest.approx(8 / 3, rel=1e-12)
    speed = {"perf/tokens_per_second_per_rank": 0.5}
    assert batch_metrics(replace(batch, advantages=None), 2.0, 4) == speed
    assert batch_metrics(replace(batch, loss_mask=torch.zeros(4, dtype=torch.bool)), 2.0, 4) == speed


def test_advantage_variance_spans_ranks() -> None:
    parts = [make_batch(1.0, -1.0, mask=(True, True)), make_batch(3.0, 7.0, mask=(True, False))]
    lengths, routed, home = torch.tensor([2, 2]), torch.zeros(2, dtype=torch.int64), torch.tensor([0, 1])

    def source_rollout(rank: ThreadRank) -> dict[str, float]:
        sharding = BatchSharding(lengths, routed, home, torch.tensor([rank.rank]), rank)
        return batch_metrics(replace(parts[rank.rank], sharding=sharding, group=routed), 2.0, 2)

    first, second = as_ranks(2, source_rollout)
    assert first == second
    assert first["actor/advantage_variance"] == pytest.approx(8 / 3, rel=1e-12)
