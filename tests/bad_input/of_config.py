"""Keys, their values and their ranges; keys that do not go together."""

from __future__ import annotations

from case import Case

# By key: what it must not be. The range is in the message, and so is the key.
RANGES: dict[str, tuple[str, ...]] = {
    "run.seed": ("-1", str(2**63), "1.5", "true"),
    "run.num_rollout": ("0", "nan", "many", "1e30"),
    "run.num_update": ("-3", "[1]"),
    "run.epochs": ("0", ".inf"),
    "run.save_every": ("-1",),
    "run.keep_checkpoints": ("0",),
    "run.eval_every": ("-5",),
    "run.timeout_s": (".nan", "-1", "1e30", "0"),
    "run.storage_timeout_s": (".inf",),
    "run.max_skipped": ("-1",),
    "run.export": ("yes", "1"),
    "run.dir": ("[a]", "{a: 1}", "7", '"a\\nb"'),
    "parallel.world_size": ("1000000000", "-2", "2.5"),
    "parallel.ranks_per_node": ("0",),
    "parallel.tp": ("-1", "null"),
    "parallel.cp": ("0",),
    "parallel.vpp": ("1e400",),
    "parallel.etp": ("''",),
    "rollout.temperature": (".nan", "-0.5", "1e30"),
    "rollout.top_p": ("0", "1.5", ".nan"),
    "rollout.tool_timeout": ("-1", ".inf"),
    "rollout.request_timeout": ("0",),
    "rollout.step_timeout": (".nan",),
    "rollout.start_timeout": ("-.inf",),
    "rollout.max_aborted": ("1.1", ".nan", "-0.1"),
    "rollout.concurrency": ("0", "10000000000"),
    "rollout.push_bucket_mb": ("-1",),
    "rollout.samples_per_prompt": ("1e12",),
    "rollout.draft_tokens": ("-1",),
    "rollout.tools": ("3", "{a: b}"),
    "data.prompts_per_step": ("0", "1000000000000"),
    "data.shuffle": ("maybe", "0"),
    "loss.clip": ("0", "1.2", ".nan"),
    "loss.clip_high": ("-0.2", ".inf"),
    "loss.dual_clip": ("1", ".nan"),
    "loss.value_clip": ("0", "-.inf"),
    "loss.entropy_coef": (".nan", "1e30", "-1"),
    "loss.truncated": ("cut", "true"),
    "advantage.gamma": ("1.01", ".nan"),
    "advantage.lam": ("-0.1", "[]"),
    "kl.coef": (".nan", ".inf", "-0.1"),
    "kl.target": ("0", ".nan"),
    "kl.horizon": ("0", str(10**400)),
    "kl.estimator": ("k4",),
    "actor_optimizer.lr": (".nan", ".inf", "-1e-6", "fast"),
    "actor_optimizer.weight_decay": ("-0.1",),
    "actor_optimizer.beta1": ("1", ".nan"),
    "actor_optimizer.eps": ("0",),
    "actor_optimizer.warmup_fraction": ("2",),
    "actor_optimizer.max_grad_norm": ("-1", ".nan"),
    "critic.optimizer.lr": (".nan", "1e400"),
    "critic.optimizer.beta2": ("1.5",),
    "critic.optimizer.schedule": ("cosin",),
    "critic.warmup_steps": ("-1",),
    "train.token_budget": ("0", "100000000000"),
    "train.logits_at_once": ("-1",),
    "train.mtp": (".nan", "-1"),
    "lora.rank": ("-1", "100000"),
    "lora.alpha": ("0", ".nan"),
    "reward.timeout": ("0",),
    "reward.processes": ("-1", "1.5", "many"),
    "reward.max_failed": ("1.5", ".nan", "-0.1"),
    "algorithm": ("ppoo", "null", "[ppo]"),
}
PLAIN = {
    "rollout.sglang": ("{mem_fraction_static: .nan}", "3", "[1]", "null"),
    "model.megatron": ("{moe_aux_loss_coeff: .inf}", "x"),
    "reward.weights": ("{even: .nan}", "{even: .inf}", "{even: high}", "{even: true}", "{even: 1e9}", "[1]", "3"),
    "train.ddp": ("{bucket_size: 100000000000000000000}",),
    "critic.parallel": ("{tp: .nan}", "2"),
}

CASES = [
    *(
        Case(f"{key} is {value[:20]}", (f"{key} must be ", " not "), (f"{key}={value}",))
        for key, values in RANGES.items()
        for value in values
    ),
    *(
        Case(f"{key} is {value[:20]}", (key, "must be"), (f"{key}={value}",))
        for key, values in PLAIN.items()
        for value in values
    ),
    Case("a tool that is a number", ("rollout.tools[0] must be text",), ("rollout.tools=[3]",)),
    Case("more epochs than updates", ("run.num_update=1 ", "run.epochs=3"), ("run.epochs=3",)),
    Case("more updates than sequences", ("run.num_update=1000", "lower"), ("run.num_update=1000",)),
    Case("an adapter beyond the matrix", ("lora.rank=60000", "hidden_size"), ("lora.rank=60000",)),
    Case(
        "a rate that ends higher",
        ("actor_optimizer.min_lr=1 ", "lr=1e-06"),
        ("actor_optimizer.min_lr=1", "actor_optimizer.lr=1e-6"),
    ),
    Case("only the critic learns", ("critic.warmup_steps=2", "num_rollout"), ("critic.warmup_steps=2",)),
    Case("nearly greedy", ("rollout.temperature=1e-09", "0.001"), ("rollout.temperature=1e-9",)),
    Case("k1 as a loss", ("kl.estimator=k1", "set kl.estimator to null"), ("kl.place=loss", "kl.estimator=k1")),
    Case(
        "a group of one",
        ("rollout.samples_per_prompt=1", "2 or more"),
        ("algorithm=grpo", "rollout.samples_per_prompt=1"),
    ),
    Case(
        "a weight of no part",
        ("reward.weights", "no part of the reward is called 'evn'", "did you mean even?"),
        ("reward.weights={evn: 0.5}",),
    ),
    Case("evaluation without data", ("run.eval_every=1", "data.eval"), ("run.eval_every=1",)),
    Case("no room for a prompt", ("rollout.max_new_tokens=192", "lower"), ("rollout.max_new_tokens=192",)),
    Case("more than the positions", ("rollout.max_context=1000000", "positions"), ("rollout.max_context=1000000",)),
    Case("another depth", ("model.megatron.num_layers", "config.json"), ("model.megatron={num_layers: 2}",)),
    Case("another width", ("model.megatron.hidden_size", "config.json"), ("model.megatron={hidden_size: 2}",)),
    Case("experts for all", ("model.megatron.num_moe_experts", "config.json"), ("model.megatron.num_moe_experts=2",)),
    Case("other rotations", ("model.megatron.rotary_base", "config.json"), ("model.megatron.rotary_base=5",)),
    Case("anywhere", ("moe_router_force_load_balancing",), ("model.megatron.moe_router_force_load_balancing=true",)),
    Case("in the wrong section", ("run.lam", "advantage.lam"), ("run.lam=1",)),
    Case("misspelt", ("rollout.temprature", "rollout.temperature"), ("rollout.temprature=1",)),
    Case("section misspelt", ("rolout", "rollout"), ("rolout.tp=1",)),
    Case("the critic's own world", ("critic.parallel.world_size",), ("critic.parallel={world_size: 2}",)),
    Case("mtp without layers", ("train.mtp", "set it to 0"), ("train.mtp=0.5",)),
]
