"""Layouts whose sizes do not match each other or the model."""

from case import Case

FOUR, EIGHT = "parallel.world_size=4", "parallel.world_size=8"
ASYNCHRONOUS = "rollout.asynchronous=true"
SPLIT = "{actor: 0-3, rollout: 4-7}"


def placement_case(name: str, expected: tuple[str, ...], placement: str, *overrides: str) -> Case:
    """A case with this placement, on eight ranks by default."""
    return Case(name, expected, (*(overrides or (EIGHT,)), f"placement={placement}"))


CASES = [
    placement_case("a rank beyond the world", ("placement.critic=4-7", "rank 7", "0 to 3"), "{critic: 4-7}", FOUR),
    placement_case("a huge rank", ("rank 999999999", "parallel.world_size=8"), "{actor: 0-999999999}"),
    placement_case("an empty rank list", ("placement.actor=", "lists no ranks", "0-3"), "{actor: ''}"),
    placement_case("a role without a value", ("placement.actor=None", "remove the role"), "{actor: }"),
    placement_case(
        "a word instead of ranks", ("placement.actor=first", "is not a set of ranks", "0,2,5-6"), "{actor: first}"
    ),
    placement_case("dots instead of a dash", ("'0..3'", "is not a set of ranks"), "{actor: 0..3}"),
    placement_case("a fraction of a rank", ("placement.actor=[0, 1.5]", "write ranks as"), "{actor: [0, 1.5]}"),
    placement_case("a slice of ranks", ("0:4 does not say whether the last rank", "0-3"), "{actor: '0:4'}"),
    placement_case("a role of another project", ("placement.policy", "did you mean placement.actor"), "{policy: 0-3}"),
    placement_case("ranks of a role elsewhere", ("write placement.critic=actor",), "{critic: policy}"),
    placement_case("roles that follow each other", ("actor -> critic -> actor",), "{actor: critic, critic: actor}"),
    placement_case("a descending range of ranks", ("3-0 is descending", "0-3"), "{actor: 3-0}"),
    placement_case("a rank twice", ("names rank 2 twice",), "{actor: '0-3,2'}"),
    placement_case("a misspelt role", ("placement.critc", "did you mean placement.critic"), "{critc: 0-3}"),
    placement_case("a role of another algorithm", ("grpo has no such role",), "{critic: 0-3}", EIGHT, "algorithm=grpo"),
    placement_case(
        "a layout that does not divide the reference's ranks",
        ("the reference: placement.reference=4-6", "tp x pp"),
        "{actor: 0-3, reference: 4-6}",
        EIGHT,
        "parallel.tp=2",
    ),
    placement_case("an actor without ranks", ("placement.actor=cpu", "name ranks"), "{actor: cpu}"),
    placement_case(
        "a model without ranks", ("reward.model runs",), "{reward: cpu}", EIGHT, "reward.model=FOLDER/model"
    ),
    placement_case(
        "a layout that does not divide the actor's ranks",
        ("placement.actor=0-2", "2 and 4"),
        "{actor: 0-2}",
        EIGHT,
        "parallel.tp=2",
    ),
    placement_case(
        "ep that does not divide the actor's ranks",
        ("parallel.ep=8", "4 ranks"),
        "{actor: 0-3}",
        EIGHT,
        "parallel.ep=8",
    ),
    placement_case(
        "a layout that does not divide the critic's ranks",
        ("the critic: placement.critic=0-2", "tp x pp"),
        "{actor: 3-7, critic: 0-2}",
        EIGHT,
        "critic.parallel={tp: 2}",
    ),
    placement_case(
        "engines that do not divide their ranks",
        ("rollout.tp=4", "1, 2, 3, 6"),
        "{actor: 6-7, rollout: 0-5}",
        EIGHT,
        "rollout.tp=4",
    ),
    placement_case(
        "an engine on ranks that are not adjacent",
        ("ranks 2,4", "must be adjacent"),
        "{actor: '3', rollout: '0-2,4'}",
        EIGHT,
        "rollout.tp=2",
    ),
    placement_case(
        "asynchronous, with a KV cache to keep on the trainer's ranks",
        ("rollout.on_weight_sync=in_place", "the actor (rank 0)", "placement.rollout"),
        "{}",
        EIGHT,
        ASYNCHRONOUS,
        "rollout.on_weight_sync=in_place",
    ),
    placement_case(
        "negative staleness",
        ("rollout.max_staleness", "at least 0"),
        SPLIT,
        EIGHT,
        ASYNCHRONOUS,
        "rollout.max_staleness=-1",
    ),
    placement_case(
        "an unknown on_weight_sync",
        ("rollout.on_weight_sync", "retract, in_place, wait"),
        SPLIT,
        EIGHT,
        "rollout.on_weight_sync=drop",
    ),
    Case("a placement as text", ("placement must be a mapping", "not"), ("placement=0-3",)),
    Case("a placement as a number", ("placement must be a mapping",), ("placement=3",)),
    Case("a key within a role's placement", ("placement.actor",), (EIGHT, "placement.actor.first=0")),
    Case("tp beyond the world", ("parallel.world_size=1", "tp x pp", "2"), ("parallel.tp=2",)),
    Case(
        "ep that does not divide the ranks", ("parallel.ep=3", "possible"), ("parallel.world_size=2", "parallel.ep=3")
    ),
    Case(
        "pp that does not divide the layers", ("4 layers", "parallel.pp=3"), ("parallel.world_size=3", "parallel.pp=3")
    ),
    Case(
        "tp beyond the heads",
        ("parallel.tp=4: num_key_value_heads=2", "1, 2"),
        ("parallel.world_size=4", "parallel.tp=4"),
    ),
    Case("ep beyond the experts", ("parallel.ep=16", "8 experts"), ("parallel.world_size=16", "parallel.ep=16")),
    Case(
        "etp that does not divide the expert size",
        ("parallel.etp=3: moe_intermediate_size=64", "1, 2, 4"),
        ("parallel.world_size=3", "parallel.etp=3"),
    ),
    Case(
        "stages with other numbers of layers than the model",
        ("4 layers", "remove model.megatron.num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage"),
        (
            "parallel.world_size=2",
            "parallel.pp=2",
            "model.megatron={num_layers_in_first_pipeline_stage: 9, num_layers_in_last_pipeline_stage: 2}",
        ),
    ),
    Case("etp that does not divide the ranks", ("parallel.etp=3",), ("parallel.world_size=4", "parallel.etp=3")),
    Case("cp beyond the world", ("tp x cp x pp",), ("parallel.cp=5",)),
    Case(
        "vpp that does not divide the layers",
        ("parallel.vpp=2", "3"),
        ("parallel.world_size=2", "parallel.pp=2", "parallel.vpp=2"),
    ),
    Case(
        "ranks_per_node that does not divide the ranks",
        ("ranks_per_node=3", "multiple"),
        ("parallel.world_size=4", "parallel.ranks_per_node=3"),
    ),
    Case(
        "engines that do not divide the ranks", ("rollout.tp=3", "1, 2, 4"), ("parallel.world_size=4", "rollout.tp=3")
    ),
    Case("ep larger than the engine", ("rollout.ep=2", "rollout.tp=1"), ("rollout.ep=2",)),
    Case("engines beyond the heads", ("rollout.tp=8", "heads"), ("parallel.world_size=8", "rollout.tp=8")),
    Case(
        "stage layers without pipeline parallelism",
        ("parallel.pp=1",),
        ("model.megatron.num_layers_in_first_pipeline_stage=2",),
    ),
    Case("tp of a critic on the actor's ranks", ("the critic", "critic.parallel"), ("critic.parallel={tp: 2}",)),
    Case("an unknown key of the critic", ("critic.parallel.tpp", "critic.parallel.tp"), ("critic.parallel={tpp: 2}",)),
    Case("a million ranks", ("parallel.world_size", "at most 65536"), ("parallel.world_size=1000000",)),
    Case(
        "more ranks than this machine has",
        ("more than one machine", "slurm"),
        ("parallel.world_size=16", "data.prompts_per_step=16"),
    ),
    Case("no ranks", ("parallel.world_size", "at least 1"), ("parallel.world_size=0",)),
    Case("no ranks on a GPU", ("parallel.ranks_per_gpu", "at least 1"), ("parallel.ranks_per_gpu=0",)),
    Case(
        "GPUs that only the critic's ranks share",
        ("critic.parallel.ranks_per_gpu", "set parallel.ranks_per_gpu"),
        ("critic.parallel={ranks_per_gpu: 2}",),
    ),
    Case("another word than auto", ("parallel is a section of keys", "parallel.world_size"), ("parallel=automatic",)),
    Case(
        "an unknown key left to the program", ("parallel.auto[0] must be one of", "rollout.tp"), ("parallel.auto=[dp]",)
    ),
    Case("no memory to plan for", ("parallel.gpu_gb", "above 0"), ("parallel=auto", "parallel.gpu_gb=0")),
    Case(
        "memory in which no layout fits",
        ("parallel.auto: no layout of 2 ranks with 0.001 GB", "parallel.gpu_gb", "lower train.max_tokens_per_gpu"),
        ("parallel=auto", "parallel.world_size=2", "parallel.gpu_gb=0.001"),
    ),
    Case(
        "a size beside which nothing divides",
        ("parallel.world_size=2 is not a multiple of tp x pp = 3 x 1",),
        ("parallel=auto", "parallel.tp=3", "parallel.world_size=2"),
    ),
    Case("a critic's layout left to the program", ("critic.parallel.auto",), ("critic.parallel={auto: true}",)),
]
