"""Numbers of ranks that do not fit together, or not the model."""

from case import Case

CASES = [
    Case("tp beyond the world", ("parallel.world_size=1", "tp x pp", "2"), ("parallel.tp=2",)),
    Case("ep without a divisor", ("parallel.ep=3", "possible"), ("parallel.world_size=2", "parallel.ep=3")),
    Case("pp without a divisor", ("4 layers", "parallel.pp=3"), ("parallel.world_size=3", "parallel.pp=3")),
    Case("tp beyond the heads", ("num_key_value_heads=2", "1, 2"), ("parallel.world_size=4", "parallel.tp=4")),
    Case("ep beyond the experts", ("parallel.ep=16", "8 experts"), ("parallel.world_size=16", "parallel.ep=16")),
    Case("etp without a divisor", ("parallel.etp=3",), ("parallel.world_size=4", "parallel.etp=3")),
    Case("cp beyond the world", ("tp x cp x pp",), ("parallel.cp=5",)),
    Case("parts of two stages", ("parallel.vpp=2", "3"), ("parallel.world_size=2", "parallel.pp=2", "parallel.vpp=2")),
    Case("half a node", ("ranks_per_node=3", "multiple"), ("parallel.world_size=4", "parallel.ranks_per_node=3")),
    Case("engines that do not fit", ("rollout.tp=3", "1, 2, 4"), ("parallel.world_size=4", "rollout.tp=3")),
    Case("experts of half an engine", ("rollout.ep=2", "rollout.tp=1"), ("rollout.ep=2",)),
    Case("engines beyond the heads", ("rollout.tp=8", "heads"), ("parallel.world_size=8", "rollout.tp=8")),
    Case("a first stage of one", ("parallel.pp=1",), ("model.megatron.num_layers_in_first_pipeline_stage=2",)),
    Case("the critic's tp", ("the critic", "critic.parallel"), ("critic.parallel={tp: 2}",)),
    Case("the critic's unknown", ("critic.parallel.tpp", "critic.parallel.tp"), ("critic.parallel={tpp: 2}",)),
    Case("a million ranks", ("parallel.world_size", "at most 65536"), ("parallel.world_size=1000000",)),
    Case(
        "too many for here", ("more than one machine", "slurm"), ("parallel.world_size=16", "data.prompts_per_step=16")
    ),
    Case("no ranks", ("parallel.world_size", "at least 1"), ("parallel.world_size=0",)),
]
