"""Prompts, rollouts and packed training batches, on one rank and sharded over several."""

import dataclasses
import pickle

import numpy as np
import pytest
import torch
from thread_ranks import ThreadRank, as_ranks

from megarl.types import ROLLOUT_STATS, Prompt, Rollout, Rollouts, SamplingMask, TrainBatch, Turn
from megarl.types.prefixes import CommonPrefixes

pytestmark = pytest.mark.alone

# The worked example at the head of megarl/types/.
EXAMPLE = Rollout(
    prompt=Prompt(id="x", messages=({"role": "user", "content": "..."},)),
    turns=(
        Turn((1, 2, 3)),
        Turn((7, 8), (-0.1, -0.2), is_action=True, weight_version=4),
        Turn((4, 5)),
        Turn((9,), (-0.3,), is_action=True, weight_version=4),
    ),
    reward=0.5,
    group=6,
)
SHORT = Rollout(EXAMPLE.prompt, (Turn((1, 2)),), status="aborted", group=6)
OTHER = Rollout(EXAMPLE.prompt, (Turn((1,)), Turn((2, 3), (-1.0, -2.0), is_action=True)), reward=-1.0, group=2)


def test_worked_example():
    batch = TrainBatch.from_rollouts([EXAMPLE])
    assert batch.tokens.tolist() == [1, 2, 3, 7, 8, 4, 5, 9]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert batch.loss_mask.tolist() == [False, False, False, True, True, False, False, True]
    assert batch.rollout_logprobs.tolist() == pytest.approx([0, 0, 0, -0.1, -0.2, 0, 0, -0.3])
    assert batch.cu_seqlens.tolist() == [0, 8]
    assert batch.sequence_reward.tolist() == [0.5]
    assert batch.group.tolist() == [6]
    assert EXAMPLE.token_ids.tolist() == [1, 2, 3, 7, 8, 4, 5, 9] and EXAMPLE.token_ids.dtype == np.int32
    assert EXAMPLE.num_tokens == 8
    assert EXAMPLE.num_actions == 3


def test_worked_example_rewards():
    from megarl.algorithms.advantages import token_rewards

    batch = TrainBatch.from_rollouts([EXAMPLE])
    rewards = token_rewards(batch.sequence_reward, batch.cu_seqlens, batch.loss_mask)
    assert rewards.tolist() == [0, 0, 0, 0, 0, 0, 0, 0.5]


def test_packs_several_rollouts():
    batch = TrainBatch.from_rollouts([EXAMPLE, SHORT, OTHER])
    assert batch.num_sequences == 3
    assert batch.cu_seqlens.tolist() == [0, 8, 10, 13]
    assert batch.lengths.tolist() == [8, 2, 3]
    assert batch.sequence_ids.tolist() == [0] * 8 + [1] * 2 + [2] * 3
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 0, 1, 2]
    assert batch.loss_mask[8:].tolist() == [False, False, False, True, True]
    assert batch.group.tolist() == [6, 6, 2]
    assert batch.sequence_reward.tolist() == [0.5, 0.0, -1.0]
    dtypes = {item.name: getattr(batch, item.name).dtype for item in dataclasses.fields(batch)[:6]}
    assert dtypes == {
        "tokens": torch.int32,
        "cu_seqlens": torch.int64,
        "loss_mask": torch.bool,
        "group": torch.int64,
        "sequence_reward": torch.float32,
        "rollout_logprobs": torch.float32,
    }


def test_select():
    batch = TrainBatch.from_rollouts([EXAMPLE, SHORT, OTHER])
    batch = batch.with_(advantages=torch.arange(13.0))
    part = batch.select([2, 0])
    assert part.tokens.tolist() == [1, 2, 3, 1, 2, 3, 7, 8, 4, 5, 9]
    assert part.cu_seqlens.tolist() == [0, 3, 11]
    assert part.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 7]
    assert part.group.tolist() == [2, 6]
    assert part.sequence_reward.tolist() == [-1.0, 0.5]
    assert part.advantages is not None and part.advantages.tolist() == [10, 11, 12, 0, 1, 2, 3, 4, 5, 6, 7]
    assert part.values is None
    assert part.loss_mask.tolist() == [False, True, True, False, False, False, True, True, False, False, True]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1]])
def test_select_equals_packing_in_that_order(order):
    rollouts = [EXAMPLE, SHORT, OTHER]
    actual = TrainBatch.from_rollouts(rollouts).select(order)
    expected = TrainBatch.from_rollouts([rollouts[i] for i in order])
    for item in dataclasses.fields(TrainBatch):
        value, expected_value = getattr(actual, item.name), getattr(expected, item.name)
        if isinstance(expected_value, torch.Tensor):
            assert torch.equal(value, expected_value), item.name
        elif isinstance(expected_value, CommonPrefixes):
            assert torch.equal(value.position, expected_value.position)
            assert torch.equal(value.shared, expected_value.shared)
        else:
            assert value == expected_value, item.name


def test_empty_batch():
    for batch in (TrainBatch.from_rollouts([]), TrainBatch.from_rollouts([EXAMPLE]).select([])):
        assert batch.num_sequences == 0
        assert batch.cu_seqlens.tolist() == [0]
        assert len(batch.tokens) == len(batch.positions) == 0
        assert batch.tokens.dtype == torch.int32 and batch.loss_mask.dtype == torch.bool


def test_with_returns_a_new_batch():
    batch = TrainBatch.from_rollouts([SHORT])
    changed = batch.with_(values=torch.ones(2))
    assert batch.values is None and changed.values is not None
    assert changed.tokens is batch.tokens
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.values = torch.ones(2)  # type: ignore[misc]


def test_arrays_are_shared_and_read_only():
    ids = np.array([1, 2], np.int32)
    turn = Turn(ids, [-0.5, -1], is_action=True)
    assert (turn.token_ids.dtype, turn.logprobs.dtype) == (np.int32, np.float32)
    assert np.shares_memory(turn.token_ids, ids) and ids.flags.writeable
    prompt = Prompt("p", (), token_ids=turn.token_ids)
    assert prompt.token_ids is turn.token_ids
    for array in (
        turn.token_ids,
        turn.logprobs,
        Turn([1]).logprobs,
        Prompt("p", ()).token_ids,
        Prompt("p", (), [3]).token_ids,
    ):
        with pytest.raises(ValueError, match="read-only"):
            array[:] = 0


def test_equality_compares_values():
    turn = Turn([1, 2], [-0.5, float("nan")], is_action=True, weight_version=3)
    assert turn == Turn((1, 2), (-0.5, float("nan")), True, 3) == pickle.loads(pickle.dumps(turn))
    for field, value in {"token_ids": [1, 3], "logprobs": [-0.5, 0], "weight_version": 4}.items():
        assert turn != dataclasses.replace(turn, **{field: value})
    assert Turn([1]) != Turn([1, 1]) and Turn([1]) != (1,)
    assert Prompt("p", (), [1]) == Prompt("p", (), (1,)) != Prompt("p", (), [2])
    assert Prompt("p", (), [1]) != Prompt("q", (), [1])
    assert EXAMPLE == dataclasses.replace(EXAMPLE, turns=tuple(map(dataclasses.replace, EXAMPLE.turns)))
    assert EXAMPLE != dataclasses.replace(EXAMPLE, turns=EXAMPLE.turns[:3])


@pytest.mark.parametrize("ids", [["a"], [1.5], [True], 7, [[1]], [-1], [2**31], None], ids=str)
def test_rejects_invalid_token_ids(ids):
    for make in (Turn, lambda ids: Prompt("p", (), ids)):
        with pytest.raises(ValueError, match="token ids are a list of whole numbers|negative|no token has the id"):
            make(ids)


def test_turn_has_a_weight_version_per_token():
    turn = Turn([1, 2, 3], [0, 0, 0], True, weight_version=5, versions=((4, 1), (5, 2)))
    assert turn.token_versions.tolist() == [4, 5, 5]
    assert dataclasses.replace(turn, versions=()).token_versions.tolist() == [5, 5, 5]
    assert Turn([1, 2]).token_versions.tolist() == [-1, -1]
    with pytest.raises(ValueError, match="3 tokens with versions of others"):
        dataclasses.replace(turn, versions=((4, 1), (5, 1)))
    with pytest.raises(ValueError, match="by version 6 that ends by another"):
        dataclasses.replace(turn, weight_version=6)


def test_rejects_invalid_turns():
    with pytest.raises(ValueError, match="2 tokens but 1 logprobs"):
        Turn((1, 2), (-0.1,), is_action=True)
    with pytest.raises(ValueError, match="only an action"):
        Turn((1,), (-0.1,))


def test_answer_is_the_last_assistant_message():
    messages = [
        {"role": "user", "content": "8 * 9?"},
        {"role": "assistant", "content": None, "tool_calls": [{}]},
        {"role": "tool", "content": "72"},
    ]
    assert dataclasses.replace(EXAMPLE, messages=tuple(messages)).answer == ""
    messages.append({"role": "assistant", "content": "The answer is 72."})
    assert dataclasses.replace(EXAMPLE, messages=tuple(messages)).answer == "The answer is 72."
    assert EXAMPLE.answer == ""


def with_routing(rollout: Rollout, layers: int = 1) -> Rollout:
    """Return a copy whose token t was routed to experts t and t + 1; the last token has no record."""
    tokens = torch.arange(len(rollout.token_ids) - 1, dtype=torch.uint8)
    routing = torch.stack([tokens, tokens + 1], dim=-1)[:, None].repeat(1, layers, 1)
    return dataclasses.replace(rollout, routing=routing)


def test_select_keeps_routing_of_its_sequences():
    batch = TrainBatch.from_rollouts([with_routing(EXAMPLE), SHORT, with_routing(OTHER)])
    first = [[0, 1], [1, 2], [2, 3], [3, 4], [4, 5], [5, 6], [6, 7]]
    last = [[0, 1], [1, 2]]
    assert batch.routing is not None
    assert [record[:, 0].tolist() for record in batch.routing] == [first, [], last]  # the second has no record
    assert [record[:, 0].tolist() for record in batch.select([2, 0]).routing or ()] == [last, first]
    assert TrainBatch.from_rollouts([EXAMPLE]).routing is None
    assert with_routing(EXAMPLE) == EXAMPLE


def test_rejects_mismatched_routing():
    long = dataclasses.replace(SHORT, routing=with_routing(OTHER, layers=1).routing.repeat(2, 1, 1))
    with pytest.raises(ValueError, match="2 tokens has the routing of 4"):
        TrainBatch.from_rollouts([long])
    with pytest.raises(ValueError, match="different shapes"):
        TrainBatch.from_rollouts([with_routing(OTHER), with_routing(OTHER, layers=2)])


MASKED = dataclasses.replace(EXAMPLE, sampling_mask=SamplingMask.from_rows([[7], [3, 8], [9, 1, 2]]))


def rows_of(record: SamplingMask) -> list[list[int]]:
    return [part.tolist() for part in record.ids.split(record.counts.tolist())]


def test_sampling_masks_align_with_tokens():
    batch = TrainBatch.from_rollouts([MASKED, SHORT, OTHER])
    first, last = [[], [], [], [7], [3, 8], [], [], [9, 1, 2]], [[], [], []]
    assert batch.sampling_mask is not None
    assert [rows_of(record) for record in batch.sampling_mask] == [
        first,
        [[], []],
        last,
    ]  # sampling of the third was not truncated
    assert [rows_of(record) for record in batch.select([2, 0]).sampling_mask or ()] == [last, first]
    assert TrainBatch.from_rollouts([EXAMPLE]).sampling_mask is None
    assert ROLLOUT_STATS["sampling_mask_sizes"](MASKED) == 6 and ROLLOUT_STATS["sampling_mask_sizes"](OTHER) == 0
    assert MASKED == EXAMPLE


def test_rejects_mismatched_sampling_masks():
    short_mask = dataclasses.replace(EXAMPLE, sampling_mask=SamplingMask.from_rows([[7]]))
    with pytest.raises(ValueError, match="chose 3 tokens has sampling masks of 1"):
        TrainBatch.from_rollouts([short_mask])
    longer_mask = dataclasses.replace(EXAMPLE, sampling_mask=SamplingMask.from_rows([[7], [3, 4], [9]]))
    with pytest.raises(ValueError, match="token 4 of a rollout is not in its sampling mask"):
        TrainBatch.from_rollouts([longer_mask])
    for invalid in ([["x"]], [[1.5]], [[-1]], [[2**31]], [7]):
        with pytest.raises((ValueError, TypeError)):
            SamplingMask.from_rows(invalid)  # type: ignore[arg-type]


def test_selects_and_concatenates_sampling_masks():
    record = SamplingMask.from_rows([[1, 2], [], [3], [4, 5, 6]])
    assert rows_of(record.index_select(torch.tensor([3, -1, 0, 1, 2, 0]))) == [[4, 5, 6], [], [1, 2], [], [3], [1, 2]]
    assert rows_of(record.index_select(torch.tensor([], dtype=torch.int64))) == []
    assert rows_of(SamplingMask.unrestricted(0).index_select(torch.tensor([-1, -1]))) == [[], []]
    assert rows_of(SamplingMask.concat([record, SamplingMask.unrestricted(2), SamplingMask.from_rows([[7]])]))[3:] == [
        [4, 5, 6],
        [],
        [],
        [7],
    ]
    assert record.excludes(torch.tensor([2, 9, 9, 4])).tolist() == [False, False, True, False]


def sharded_rollouts(rank: ThreadRank) -> Rollouts:
    """Five rollouts on three ranks: numbers 3, 0, 4 on the first, none on the second, 1, 2 on the last."""
    local = {0: [(3, EXAMPLE), (0, SHORT), (4, OTHER)], 1: [], 2: [(1, with_routing(OTHER)), (2, EXAMPLE)]}[rank.rank]
    return Rollouts.gather([rollout for _, rollout in local], [number for number, _ in local], rank)


IN_ORDER = [SHORT, with_routing(OTHER), EXAMPLE, EXAMPLE, OTHER]


def test_gather_shares_stats_and_keeps_rollouts_local():
    result = as_ranks(3, sharded_rollouts)
    full = Rollouts.gather(IN_ORDER)
    for rank, rollouts in enumerate(result):
        assert rollouts.home.tolist() == [0, 2, 2, 0, 0]
        assert rollouts.local_indices.tolist() == [[0, 3, 4], [], [1, 2]][rank]
        assert rollouts.local == tuple(IN_ORDER[number] for number in rollouts.local_indices.tolist())
        assert rollouts.sources == full.sources
        for name in (*ROLLOUT_STATS, "source", "reward"):
            assert torch.equal(getattr(rollouts, name), getattr(full, name)), name
        assert rollouts.routed_tokens.tolist() == [0, 2, 0, 0, 0]
        bare = rollouts.without_routing()
        assert not bare.routed_tokens.any() and all(rollout.routing is None for rollout in bare.local)
        assert bare.local == rollouts.local and torch.equal(bare.length, rollouts.length)
        selected = rollouts.select(torch.tensor([True, False, True, True, False]))
        assert selected.local_indices.tolist() == [[0, 2], [], [1]][rank] and selected.home.tolist() == [0, 2, 0]
        assert selected.length.tolist() == [2, 8, 8] and len(selected.local) == len(selected.local_indices)


def test_turn_rewards_exist_on_all_ranks_if_on_any():
    """A turn's reward is on its last token; the reward of a turn without tokens is not in the column."""
    turns = [Turn((1, 2)), Turn((7, 8), (0.0, 0.0), True, reward=0.5), Turn((4,)), Turn((9,), (0.0,), True)]
    turns += [Turn((), (), True, reward=0.25)]
    element = Rollout(Prompt("p", ()), tuple(turns), reward=2.0)
    assert TrainBatch.from_rollouts(IN_ORDER).turn_rewards is None
    batch = TrainBatch.from_rollouts([SHORT, element])
    assert batch.turn_rewards.tolist() == [0, 0] + [0, 0, 0, 0.5, 0, 0] and batch.sequence_reward[1] == 2.0
    assert batch.select([1]).turn_rewards.tolist() == [0, 0, 0, 0.5, 0, 0]
    with pytest.raises(ValueError, match="only an action turn has a reward"):
        Turn((1,), reward=1.0)

    def work(rank: ThreadRank) -> list[float]:
        local = [] if rank.rank == 1 else [element if rank.rank else SHORT]
        rollouts = Rollouts.gather(local, None, rank)
        assert rollouts.rewarded_turns.tolist() == [0, 2]
        return TrainBatch.from_rollouts(rollouts).turn_rewards.tolist()

    assert as_ranks(3, work) == [[0.0, 0.0], [], [0, 0, 0, 0.5, 0, 0]]


def test_all_ranks_know_unscored_reasons():
    def scored(rank: ThreadRank) -> Rollouts:
        rollouts = sharded_rollouts(rank)
        unscored = {} if rank.rank == 0 else {"a": "late", "b": "raised"}
        return rollouts.replace_local([dataclasses.replace(r, unscored=unscored) for r in rollouts.local])

    for rollouts in as_ranks(3, scored):
        assert rollouts.unscored.tolist() == [0, 2, 2, 0, 0]
        samples = [OTHER.prompt.id, EXAMPLE.prompt.id]
        assert rollouts.unscored_reasons == tuple(
            (part, unscored, sample) for sample in samples for part, unscored in (("a", "late"), ("b", "raised"))
        )


def test_all_ranks_know_replaced_rewards():
    def scored(rank: ThreadRank) -> Rollouts:
        rollouts = sharded_rollouts(rank)
        new = [dataclasses.replace(r, reward=10.0 * rank.rank + i) for i, r in enumerate(rollouts.local)]
        return rollouts.replace_local([dataclasses.replace(r, reward_parts={f"of {rank.rank}": 1.0}) for r in new])

    for rollouts in as_ranks(3, scored):
        assert rollouts.reward.tolist() == [0.0, 20.0, 21.0, 1.0, 2.0]
        assert {name: part.tolist() for name, part in rollouts.reward_parts.items()} == {
            "of 0": [1, 0, 0, 1, 1],
            "of 2": [0, 1, 1, 0, 0],
        }


def test_sharded_batch_equals_the_full_batch():
    full = TrainBatch.from_rollouts(IN_ORDER)
    full = full.with_(advantages=torch.arange(float(len(full.tokens))))
    of_sequence = full.tokens.split(full.lengths.tolist())

    def work(rank: ThreadRank) -> None:
        batch = TrainBatch.from_rollouts(sharded_rollouts(rank))
        assert torch.equal(batch.lengths, full.lengths) and torch.equal(batch.group, full.group)
        assert torch.equal(batch.sequence_reward, full.sequence_reward) and batch.num_sequences == 5
        assert (batch.routing is None) == (rank.rank == 3)
        for part, numbers in ((batch, range(5)), (batch.select([4, 1, 0]), (4, 1, 0)), (batch.select([2]), (2,))):
            local = [numbers[i] for i in part.local_indices.tolist()]
            expected = torch.cat([torch.zeros(0, dtype=torch.int32), *(of_sequence[i] for i in local)])
            assert torch.equal(part.tokens, expected)
            assert torch.equal(part.lengths, full.lengths[list(numbers)])
            assert part.sequence_ids.tolist() == [
                i for i in part.local_indices.tolist() for _ in range(int(part.lengths[i]))
            ]
            assert part.sharding is not None and part.sharding.home.tolist() == [[0, 2, 2, 0, 0][i] for i in numbers]
            reference = full.select(list(numbers))
            assert torch.equal(part.all_gather(part.cu_seqlens.diff()), reference.lengths)
            assert int(part.all_reduce(part.loss_mask.sum())) == int(reference.loss_mask.sum())

    as_ranks(3, work)


STALE = dataclasses.replace(
    EXAMPLE,
    turns=(
        Turn((1, 2)),
        Turn((3, 4, 5), (-0.1,) * 3, True, 4, ((2, 1), (4, 2))),
        Turn((6,)),
        Turn((7,), (-1.0,), True, 5),
    ),
)


def test_staleness_per_rollout_and_per_token():
    rollouts = Rollouts.gather([STALE, SHORT], version=5)
    assert STALE.version_spans == ((2, 1), (4, 2), (5, 1))
    assert (rollouts.oldest_version[0], rollouts.staleness[0]) == (2, 3)
    rollouts = rollouts.replace_local(rollouts.local).select(torch.tensor([True, False]))  # keeps the version
    assert rollouts.staleness.tolist() == [3]
    staleness = TrainBatch.from_rollouts(rollouts).staleness
    assert staleness is not None and staleness.tolist() == [0, 0, 3, 1, 1, 0, 0] and staleness.dtype == torch.int32
    batch = TrainBatch.from_rollouts(rollouts).select([0])
    assert batch.staleness is not None and torch.equal(batch.staleness, staleness)


def test_no_staleness_column_without_stale_tokens():
    assert Rollouts.gather([STALE]).staleness.tolist() == [0] and TrainBatch.from_rollouts([STALE]).staleness is None
    only_prompt = dataclasses.replace(STALE, turns=STALE.turns[:1])
    assert Rollouts.gather([only_prompt], version=5).staleness.tolist() == [0]
    fresh_only = dataclasses.replace(STALE, turns=(STALE.turns[0], STALE.turns[3]))
    assert TrainBatch.from_rollouts(Rollouts.gather([fresh_only], version=5)).staleness is None


def test_staleness_exists_on_all_ranks_if_on_any():
    result = as_ranks(
        2, lambda rank: TrainBatch.from_rollouts(Rollouts.gather([STALE, SHORT][rank.rank :][:1], [rank.rank], rank, 5))
    )
    assert [batch.staleness is None for batch in result] == [False, False]
    assert not result[1].staleness.any()


def test_ranks_share_one_table_of_sources():
    def scored_rollout(source: str) -> Rollout:
        return dataclasses.replace(SHORT, prompt=dataclasses.replace(SHORT.prompt, data_source=source))

    rollouts_by_rank = [
        [scored_rollout("math"), scored_rollout("code")],
        [],
        [scored_rollout("math"), scored_rollout("")],
    ]
    for rollouts in as_ranks(3, lambda rank: Rollouts.gather(rollouts_by_rank[rank.rank], None, rank)):
        assert rollouts.sources == ("", "code", "math") and rollouts.source.tolist() == [2, 1, 2, 0]
        selected = rollouts.select(torch.tensor([False, True, True, False]))
        assert selected.source.tolist() == [1, 2] and selected.sources == rollouts.sources


def test_concat_joins_generations_of_a_step():
    """Stats are concatenated, missing reward parts are 0, and sources share one table."""

    def scored_rollout(source: str, group: int, **parts: float) -> Rollout:
        prompt = dataclasses.replace(SHORT.prompt, data_source=source)
        return dataclasses.replace(SHORT, prompt=prompt, group=group, reward=float(group), reward_parts=parts)

    first = [[scored_rollout("math", 0, a=1.0)], [scored_rollout("code", 1, a=2.0)]]
    second = [[], [scored_rollout("art", 2, b=3.0), scored_rollout("math", 2)]]
    for rank, rollouts in enumerate(
        as_ranks(
            2,
            lambda rank: Rollouts.concat(
                [Rollouts.gather(part[rank.rank], None, rank, version) for version, part in enumerate((first, second))]
            ),
        )
    ):
        assert rollouts.group.tolist() == [0, 1, 2, 2] and rollouts.reward.tolist() == [0.0, 1.0, 2.0, 2.0]
        assert [rollouts.sources[i] for i in rollouts.source.tolist()] == ["math", "code", "art", "math"]
        assert {name: part.tolist() for name, part in rollouts.reward_parts.items()} == {
            "a": [1.0, 2.0, 0.0, 0.0],
            "b": [0.0, 0.0, 3.0, 0.0],
        }
        assert rollouts.local_indices.tolist() == [[0], [1, 2, 3]][rank] and rollouts.version == 1
        assert [rollout.group for rollout in rollouts.local] == [[0], [1, 2, 2]][rank]
