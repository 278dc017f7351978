"""Placement of roles on ranks: parsing, the layouts of roles and engines, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from megarl.config import Config, ConfigError, from_dict
from megarl.parallel.placement import (
    Placement,
    check_placement,
    describe_rank_roles,
    engine_ranks,
    format_ranges,
    has_separate_reference,
    is_on_megatron,
    optimizer_key,
    placement_of,
    role_config,
    role_parallel,
)

PPO = ("rollout", "actor", "reference", "critic", "reward")


def config(placement: dict[str, Any], world: int = 8, **sections: Any) -> Config:
    tree = {"placement": placement, "parallel": {"world_size": world, **sections.pop("parallel", {})}, **sections}
    return from_dict(tree)


@pytest.mark.alone
@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("0-3", (0, 1, 2, 3)),
        ("0,2,5-6", (0, 2, 5, 6)),
        ("5-6, 0, 2", (0, 2, 5, 6)),
        (3, (3,)),
        ("7", (7,)),
        ("4-4", (4,)),
        ("all", tuple(range(8))),
        ("cpu", ()),
        ([0, 1, 2, 3], (0, 1, 2, 3)),
        (["0-1", 5], (0, 1, 5)),
        ("gpu:0-3", (0, 1, 2, 3)),
        ("gpus 0-3", (0, 1, 2, 3)),
        ("cuda:0,cuda:2-3", (0, 2, 3)),
        ("ranks 4-5", (4, 5)),
        ({"ranks": "2-3"}, (2, 3)),
        ({"ranks": [2, 3]}, (2, 3)),
        ("node 1", (4, 5, 6, 7)),
        ("nodes 0-1", tuple(range(8))),
        ("nodes: 0", (0, 1, 2, 3)),
        ("host", ()),
        ("CPU", ()),
        ("All", tuple(range(8))),
        ("actor", (1, 2)),
        ("rollout", tuple(range(8))),  # not placed
        ("reference", (1, 2)),  # not placed, so it follows the actor
        ("colocate", (1, 2)),
        ("colocated with reward", (6,)),
        ("colocate: actor", (1, 2)),
    ],
)
def test_parses_rank_sets(text: Any, ranks: tuple[int, ...]) -> None:
    placement = Placement.parse({"critic": text, "actor": "1-2", "reward": 6}, 8, ranks_per_node=4)
    assert placement.ranks_of("critic") == ranks
    assert Placement.parse({"critic": placement.format_ranks("critic")}, 8).ranks_of("critic") == ranks


@pytest.mark.alone
def test_roles_that_share_ranks_may_be_named_in_any_order() -> None:
    placement = Placement.parse({"reference": "reward", "reward": "critic", "critic": "2-3", "rollout": "colocate"}, 4)
    assert placement.ranks_of("reference") == placement.ranks_of("reward") == (2, 3)
    assert placement.ranks_of("rollout") == placement.ranks_of("actor") == (0, 1, 2, 3)
    other = Placement.parse({"judge": "critic_b", "actor_b": "2-3", "actor": "0-1"}, 4)
    assert other.ranks_of("judge") == other.ranks_of("critic_b") == other.ranks_of("reference_b") == (2, 3)
    with pytest.raises(ConfigError, match="placement.judge"):  # of no policy that is placed
        Placement.parse({"judge": "actor_x", "actor_b": "1"}, 4)
    assert Placement.parse({"actor": "colocated", "rollout": "colocated"}, 4).is_colocated
    with pytest.raises(ConfigError, match="placement: actor -> critic -> actor follow each other; name the ranks"):
        Placement.parse({"actor": "critic", "critic": "actor"}, 4)


@pytest.mark.alone
def test_format_ranges_round_trips() -> None:
    for number in range(1, 2**8):
        ranks = tuple(rank for rank in range(8) if number >> rank & 1)
        assert Placement.parse({"actor": format_ranges(ranks)}, 8).ranks_of("actor") == ranks


@pytest.mark.alone
def test_unplaced_roles_follow_the_actor() -> None:
    """The engines are the exception: they default to all ranks."""
    placement = Placement.parse({"actor": "0-3", "critic": "4-7", "reward": "cpu"}, 8)
    assert placement.ranks_of("reference") == placement.ranks_of("actor") == (0, 1, 2, 3)
    assert placement.ranks_of("rollout") == tuple(range(8)) and placement.ranks_of("reward") == ()
    assert placement.describe(PPO) == "all: rollout; 0-3: actor, reference; 4-7: critic; cpu: reward"
    assert not placement.is_colocated
    default = Placement.parse({}, 2)
    assert default.is_colocated and {default.ranks_of(role) for role in (*PPO, "reward_model", "teacher")} == {(0, 1)}
    assert default.describe(PPO) == "all: rollout, actor, reference, critic, reward"
    assert Placement.parse({"actor": "0-1", "reward": "cpu"}, 2).is_colocated


@pytest.mark.alone
def test_role_layout_uses_its_own_world_size() -> None:
    split = config(
        {"actor": "0-3", "critic": "4-5"},
        parallel={"tp": 2, "ep": 2},
        critic={"parallel": {"tp": 1, "pp": 2, "ep": 1}},
        rollout={"tp": 2},
    )
    actor, critic, reward = (role_parallel(split, role) for role in ("actor", "critic", "reward"))
    assert (actor.world_size, actor.tp, actor.pp, actor.ep) == (4, 2, 1, 2) == (reward.world_size, 2, 1, 2)
    assert (critic.world_size, critic.tp, critic.pp, critic.ep) == (2, 1, 2, 1)
    stages = dataclasses.replace(
        split, model=dataclasses.replace(split.model, megatron={"num_layers_in_last_pipeline_stage": 3, "x": 1})
    )
    assert (
        role_config(stages, "critic").model.megatron == {"x": 1} and role_config(stages, "actor").model == stages.model
    )
    local = role_config(split, "critic")
    assert local.parallel == critic and placement_of(local).ranks_of("actor") == (0, 1)
    assert engine_ranks(split) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    disjoint = config({"actor": "0-3", "rollout": "4-7"}, rollout={"tp": 4})
    assert engine_ranks(disjoint) == [(4, 5, 6, 7)]


VALID_PLACEMENTS: list[dict[str, Any]] = [
    {},
    {"actor": "0-3", "critic": "4-7"},
    {"actor": "0-3", "critic": "4-7", "rollout": "all", "reward": "cpu"},
    {"actor": "0,2,4,6", "critic": "1,3,5,7", "reference": "0,2,4,6"},
    {"actor": "0-3", "critic": "0-3", "rollout": "4-7"},
    {"actor": "0-1", "critic": "2-3", "rollout": "4-7"},
]


@pytest.mark.alone
@pytest.mark.parametrize("placement", VALID_PLACEMENTS)
def test_accepts_valid_placement_without_warnings(placement: dict[str, Any]) -> None:
    warnings: list[str] = []
    check_placement(config(placement), PPO, warnings)
    assert not warnings


@pytest.mark.alone
@pytest.mark.parametrize(
    ("placement", "sections", "message"),
    [
        ({"actor": "0-3", "critic": "2-7"}, {}, "placement has actor on 0-3 and critic on 2-7: where only some"),
        ({"actor": "0-3", "rollout": "0-7"}, {}, ""),  # engines may be on all ranks
        ({"actor": "0-3", "rollout": "2-7"}, {}, "rollout on 2-7 and actor on 0-3; rollout on 2-7 and critic on 0-3: "),
        ({"actor": "0-3", "reward": "3-4", "rollout": "4-7"}, {}, ""),  # functions have no ranks
        ({"actor": "0-3", "reward": "2-7"}, {"reward": {"model": "x"}}, "; critic on 0-3 and reward on 2-7: where"),
        ({"actor": "0-3", "reference": "0-5"}, {}, "actor on 0-3 and reference on 0-5; reference on 0-5 and critic"),
        ({"actor": "0-3", "reference": "all"}, {}, ""),
    ],
)
def test_warns_of_roles_that_share_some_ranks(placement: Any, sections: Any, message: str) -> None:
    warnings: list[str] = []
    check_placement(config({"critic": placement["actor"], **placement}, **sections), PPO, warnings)
    overlaps = [line for line in warnings if "placement has" in line]
    assert len(overlaps) == 1 and message in overlaps[0] if message else not overlaps


@pytest.mark.alone
def test_reference_is_a_separate_model_where_it_differs_from_the_actor() -> None:
    assert not has_separate_reference(config({}))
    assert not has_separate_reference(config({"actor": "0-3", "reference": "actor"}))
    split = config({"actor": "0-3", "reference": "4-5"}, parallel={"tp": 2})
    assert has_separate_reference(split) and is_on_megatron(split, "reference")
    assert (role_parallel(split, "reference").world_size, role_parallel(split, "reference").tp) == (2, 2)
    for settings in ({"model": "x"}, {"parallel": {"pp": 2}}):
        assert has_separate_reference(config({}, roles={"reference": settings}))
    layout = role_parallel(config({"reference": 7}, roles={"reference": {"parallel": {"pp": 1}}}), "reference")
    assert (layout.world_size, layout.pp) == (1, 1)


@pytest.mark.alone
def test_warns_of_ranks_without_a_role() -> None:
    warnings: list[str] = []
    check_placement(config({"actor": "0-3", "critic": "5", "rollout": "0-3"}), PPO, warnings)
    assert len(warnings) == 1 and "rank 4,6-7 of 8 without a role" in warnings[0]


@pytest.mark.alone
def test_checks_roles_of_the_algorithm() -> None:
    single = from_dict(
        {"algorithm": "reward_model", "placement": {"reward_model": "1-2"}, "parallel": {"world_size": 3}}
    )
    warnings: list[str] = []
    check_placement(single, ("reward_model",), warnings)
    assert "rank 0 of 3" in warnings[0]
    with pytest.raises(ConfigError, match="placement.critic: grpo has no such role"):
        check_placement(config({"critic": "0-3"}, algorithm="grpo"), ("rollout", "actor", "reward"), [])
    with pytest.raises(ConfigError, match="did you mean placement.teacher"):
        check_placement(config({"techer": "0-3"}), (*PPO, "teacher"), [])


INVALID_PLACEMENTS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"actor": "4-8"}, {}, r"placement.actor=4-8 names rank 8, but the job has the ranks 0 to 7"),
    ({"actor": "0-99999999"}, {}, r"names rank 99999999"),
    ({"actor": ""}, {}, r"placement.actor= lists no ranks: write ranks as 0-3"),
    ({"actor": None}, {}, r"placement.actor=None lists no ranks"),
    ({"actor": []}, {}, r"placement.actor=\[\] lists no ranks"),
    ({"actor": "0:4"}, {}, r"0:4 does not say whether the last rank is included; write the range as 0-3"),
    ({"actor": "gpus 0:4"}, {}, r"0:4 does not say whether the last rank is included"),
    ({"actor": "nodes 0-1"}, {}, r"names node 1, but the job has the nodes 0 to 0"),
    ({"actor": {"gpus": 4}}, {}, r"\{ranks: 0-3\} is the only key"),
    ({"critic": "policy"}, {}, r"placement.critic=policy: here policy is the role actor; write placement.critic=actor"),
    ({"critic": "colocate: acto"}, {}, r"acto is no role; name one, such as placement.critic=actor"),
    ({"policy": "0-3"}, {}, r"placement.policy: ppo has no such role; did you mean placement.actor\?"),
    ({"reward_model": 0}, {}, r"ppo has no such role; did you mean placement.reward\?"),
    ({"ref_policy": 0}, {}, r"did you mean placement.reference\?"),
    ({"rollout_engine": 0}, {}, r"did you mean placement.rollout\?"),
    ({"actor": True}, {}, r"placement.actor=True lists no ranks"),
    ({"actor": [0, True]}, {}, r"lists no ranks"),
    ({"actor": "0..3"}, {}, r"is not a set of ranks, because '0..3' is not"),
    ({"actor": "0-3,"}, {}, r"is not a set of ranks"),
    ({"actor": -1}, {}, r"is not a set of ranks"),
    ({"actor": 0.5}, {}, r"lists no ranks"),
    ({"actor": "3-0"}, {}, r"the range 3-0 is descending; write 0-3"),
    ({"actor": "0-3,2"}, {}, r"names rank 2 twice"),
    ({"critc": "0-3"}, {}, r"placement.critc: ppo has no such role; did you mean placement.critic\?"),
    ({"actor": "cpu"}, {}, r"placement.actor=cpu, but the actor computes on ranks"),
    ({"reward": "cpu"}, {"reward": {"model": "x"}}, r"placement.reward=cpu, but reward.model runs on ranks"),
    (
        {"reference": "0-2"},
        {"roles": {"reference": {"parallel": {"tp": 2}}}},
        r"the reference: placement.reference=0-2 \(3 ranks\) is not a multiple of tp x pp = 2",
    ),
    (
        {"actor": "0-3"},
        {"critic": {"parallel": {"tp": 8}}},
        r"the critic: placement.critic=0-3 \(4 ranks\) is not a mul",
    ),
    ({"actor": "0-2"}, {"parallel": {"tp": 2}}, r"placement.actor=0-2 \(3 ranks\) is not a multiple of tp x pp = 2"),
    ({"actor": "0-3"}, {"parallel": {"ep": 8}}, r"parallel.ep=8 does not divide the 4 ranks of a pipeline stage"),
    ({"critic": "all"}, {"critic": {"parallel": {"tp": 3}}}, r"the critic: critic.parallel.world_size=8 is not a mult"),
    ({"actor": "0-3"}, {"critic": {"parallel": {"world_size": 4}}}, r"placement.critic sets the ranks of the critic"),
]


@pytest.mark.alone
@pytest.mark.parametrize(("placement", "sections", "message"), INVALID_PLACEMENTS)
def test_refuses_invalid_placement(placement: dict[str, Any], sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_placement(config(placement, **sections), PPO, [])


@pytest.mark.alone
@pytest.mark.parametrize(
    ("rollout", "tp", "ranks_per_node", "message"),
    [
        ("all", 3, 8, "rollout.tp=3 does not divide parallel.world_size=8; sizes that do: 1, 2, 4, 8"),
        ("0-5", 4, 8, "rollout.tp=4 does not divide the 6 ranks of placement.rollout=0-5; sizes that do: 1, 2, 3, 6"),
        ("0-2,4", 2, 8, "builds an engine from ranks 2,4"),
        ("1-4", 2, 2, "builds an engine from ranks 1-2: they must be adjacent in a node of 2 ranks"),
        ("1-4", 4, 2, "builds an engine from ranks 1-4: they must be adjacent in a node of 2 ranks, or whole"),
        ("2-4", 3, 4, "rollout.tp=3 does not fit nodes of 4 ranks"),
        ("2-5", 4, 2, ""),
        ("1-2,5-6", 2, 4, ""),
    ],
)
def test_engines_must_fit_their_ranks_and_nodes(rollout: str, tp: int, ranks_per_node: int, message: str) -> None:
    from megarl.controllers.controller import load_requirements
    from megarl.dry_run.config_checks import check_nodes

    chosen = config({"rollout": rollout}, parallel={"ranks_per_node": ranks_per_node}, rollout={"tp": tp})
    if not message:
        check_nodes(chosen, load_requirements(chosen))
        return
    with pytest.raises(ConfigError) as error:
        check_nodes(chosen, load_requirements(chosen))
    assert message in str(error.value)


def test_optimizer_keys_of_roles() -> None:
    keys = ["actor_optimizer", "critic.optimizer", "roles.actor_b.optimizer", "roles.critic_b.optimizer"]
    assert [optimizer_key(role) for role in ("actor", "critic", "actor_b", "critic_b")] == keys
    assert optimizer_key("reward_model") == "critic.optimizer"


def test_set_placement_sets_the_config_key(units: dict[str, Any]) -> None:
    assert units["set_placement"] == {"actor": "0-3", "critic": [4, 5]}


def test_names_of_other_projects_are_answered_by_those_here(units: dict[str, Any]) -> None:
    run, typo, model, tp, key, ranks, mapping = units["other_names"]
    assert (
        run
        == "flow.run has no argument num_rollouts; did you mean num_rollout? (it has num_rollout, num_update, until)"
    )
    assert typo.startswith("flow.run has no argument num_rolout; did you mean num_rollout?")
    assert model == "register_worker('actor', ..) has no argument model_path; did you mean model?"
    assert tp.endswith("no argument tensor_model_parallel_size; did you mean parallel={'tp': ..}?")
    assert key.startswith("unknown key parallel.tensor_model_parallel_size; did you mean parallel.tp?")
    assert ranks.endswith("no argument gpus; did you mean flow.set_placement({role: '0-3'})?")
    assert mapping.startswith(
        "HybridFlow takes the path of a YAML file, or a Config, not a dict: megarl.config.from_dict"
    )


def test_roles_are_unavailable_before_the_run(units: dict[str, Any]) -> None:
    assert units["roles_before_run"] == [
        "RoleUnavailable: flow.actor is not available before flow.run(...), which starts the workers",
        "RoleUnavailable: flow.judge is not available before flow.run(...), which starts the workers",
        "AttributeError: a HybridFlow has no 'teacher'",
    ]


@pytest.mark.alone
def test_describe_rank_roles_names_roles_of_each_rank() -> None:
    expected = {"actor": "0-1", "critic": 2, "rollout": "2-3"}
    assert describe_rank_roles(config(expected, world=5), ("rollout", "reward", "actor", "reference", "critic")) == {
        **dict.fromkeys((0, 1), "actor, reference"),
        2: "rollout, critic",
        3: "rollout",
        4: "no role",
    }
    assert describe_rank_roles(config({"rollout": "all"}, world=5), ("rollout", "actor")) == {}
