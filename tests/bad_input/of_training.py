"""Contradictory settings of losses, schedules and updates, or settings that train nothing."""

from pathlib import Path

from case import Case

GRPO = "algorithm=grpo"
REPLAY = "train.routing_replay=true"
SFT = ("algorithm=sft", "data.train=FOLDER/sft.jsonl")
HALF = """
from megarl.controllers.controller import Controller

class Half(Controller):
    item = "prompts"

    @classmethod
    def roles(cls, config):
        return ("actor",)
"""


def half_a_controller(folder: Path) -> None:
    (folder / "half.py").write_text(HALF)


CASES = [
    Case(
        "a critic's warm-up as long as the run",
        ("critic.warmup_steps=2", "run.num_rollout=2"),
        ("critic.warmup_steps=2",),
    ),
    Case(
        "a critic's warm-up beyond the run",
        ("critic.warmup_steps=20 leaves none of run.num_rollout=5",),
        ("critic.warmup_steps=20", "run.num_rollout=5"),
    ),
    Case(
        "a run as long as its warm-up",
        ("critic.warmup_steps=1 leaves none of run.num_rollout=1",),
        ("critic.warmup_steps=1", "run.num_rollout=1"),
    ),
    Case(
        "the policy's minimum rate above its rate",
        ("actor_optimizer.min_lr=0.1 is above actor_optimizer.lr=0.01",),
        ("actor_optimizer.min_lr=0.1", "actor_optimizer.lr=0.01"),
    ),
    Case(
        "the critic's minimum rate above its rate",
        ("critic.optimizer.min_lr=0.001 is above critic.optimizer.lr=0.0001",),
        ("critic.optimizer.min_lr=1e-3", "critic.optimizer.lr=1e-4"),
    ),
    Case(
        "SFT's minimum rate above its rate",
        ("actor_optimizer.min_lr=1 is above actor_optimizer.lr=1e-06",),
        (*SFT, "actor_optimizer.min_lr=1"),
    ),
    Case(
        "Muon on the host",
        ("actor_optimizer.offload_fraction=0.5 with actor_optimizer.type=muon", "updates by AdamW alone"),
        ("actor_optimizer.type=muon", "actor_optimizer.offload_fraction=0.5"),
    ),
    Case(
        "FSDP and Muon",
        ("train.fsdp with actor_optimizer.type=muon", "needs whole matrices"),
        ("train.fsdp=true", "actor_optimizer.type=muon"),
    ),
    Case(
        "FSDP and states on the host",
        ("train.fsdp with actor_optimizer.offload_fraction=0.5", "keeps the masters itself"),
        ("train.fsdp=true", "actor_optimizer.offload_fraction=0.5"),
    ),
    Case("max_loras without LoRA", ("rollout.max_loras", "lora.rank=0 trains no adapters"), ("rollout.max_loras=2",)),
    Case(
        "max_loras with SGLang",
        ("rollout.max_loras=2 with rollout.engine=sglang", "set rollout.engine=vllm, or rollout.max_loras to 0"),
        ("rollout.max_loras=2", "lora.rank=4"),
    ),
    Case(
        "FSDP with an overlap of its own",
        ("train.ddp.overlap_grad_reduce with train.fsdp", "remove it"),
        ("train.fsdp=true", "train.ddp.overlap_grad_reduce=true"),
    ),
    Case(
        "FSDP by Megatron's key",
        ("train.ddp.use_megatron_fsdp", "set train.fsdp"),
        ("train.ddp.use_megatron_fsdp=true",),
    ),
    Case(
        "settings of Muon without it",
        ("actor_optimizer.muon with actor_optimizer.type=adam", "set the second to muon"),
        ("actor_optimizer.muon.momentum=0.9",),
    ),
    Case("a stage at the first step", ("stages: '1' is no step from 2 on",), ("stages={1: {loss: {clip: 0.1}}}",)),
    Case("a stage without a step", ("stages: 'later' is no step",), ("stages={later: {loss: {clip: 0.1}}}",)),
    Case(
        "stages in descending order",
        ("stages: 3 follows 4; name the steps in ascending order",),
        ("stages={4: {loss: {clip: 0.1}}, 3: {loss: {clip: 0.2}}}",),
    ),
    Case(
        "an unknown key in a stage",
        ("unknown key stages.3.rollout.temprature; did you mean stages.3.rollout.temperature?",),
        ("stages={3: {rollout: {temprature: 0.5}}}",),
    ),
    Case(
        "a key that cannot change in a stage",
        ("stages.3.rollout.tp cannot change during a run (keys that can: rollout.max_context, ",),
        ("stages={3: {rollout: {tp: 2}}}",),
    ),
    Case(
        "a key with a dot in a stage",
        ("stages.3.rollout.temperature: write temperature in the section rollout",),
        ("stages={3: {rollout.temperature: 0.5}}",),
    ),
    Case(
        "a value out of range in a stage",
        ("stages.3.rollout.top_p must be a number, above 0 and at most 1, not 2",),
        ("stages={3: {rollout: {top_p: 2}}}",),
    ),
    Case(
        "a context beyond the model's in a stage",
        ("from step 3 on: rollout.max_context=99999 is beyond the model's",),
        ("stages={3: {rollout: {max_context: 99999}}}",),
    ),
    Case(
        "another temperature for conversations that run across steps",
        ("stages: rollout.temperature cannot change with rollout.oversample=2",),
        ("stages={3: {rollout: {temperature: 0.5}}}", "rollout.oversample=2"),
    ),
    Case(
        "refreshes without a reference",
        ("kl.refresh_reference_every=5, but algorithm=ppo with kl.apply_to='none' has no reference",),
        ("kl.refresh_reference_every=5", "kl.apply_to=none"),
    ),
    Case(
        "correction bounds in the wrong order",
        ("correction.low=3 and correction.high=2 must enclose 1",),
        ("correction.kind=tis", "correction.low=3"),
    ),
    Case("an unknown correction", ("correction.kind", "icepop"), ("correction.kind=tip",)),
    Case("a correction's bound below 0", ("correction.low",), ("correction.kind=mis", "correction.low=-1")),
    Case(
        "a sequence correction at token level",
        ("correction.kind=mis with correction.level=token: that is correction.kind=icepop",),
        (GRPO, "correction.kind=mis", "correction.level=token"),
    ),
    Case(
        "a correction with the engine's log-probs as old",
        ("correction.kind=tis weights by", "correction.proximal=engine"),
        ("correction.kind=tis", "correction.proximal=engine"),
    ),
    Case(
        "a correction without sampling",
        ("correction.kind=icepop with algorithm=sft: it does not generate",),
        (*SFT, "correction.kind=icepop"),
    ),
    Case("k1 as a loss", ("kl.estimator=k1", "kl.apply_to=loss", "null"), ("kl.apply_to=loss", "kl.estimator=k1")),
    Case("k1 as a loss of GRPO", ("kl.estimator=k1",), (GRPO, "kl.apply_to=loss", "kl.estimator=k1")),
    Case(
        "k3_unbiased as a reward",
        ("kl.estimator=k3_unbiased with kl.apply_to=reward", "null", "kl.apply_to to loss"),
        ("kl.estimator=k3_unbiased",),
    ),
    Case(
        "k3_unbiased as GRPO's reward",
        ("kl.estimator=k3_unbiased",),
        (GRPO, "kl.apply_to=reward", "kl.estimator=k3_unbiased"),
    ),
    Case(
        "an unknown estimator",
        ("kl.estimator must be one of k1, k2, k3, k3_unbiased", "did you mean k3?"),
        ("kl.estimator=k33",),
    ),
    Case("an estimator as a number", ("kl.estimator must be one of", "not 3"), ("kl.estimator=3",)),
    Case(
        "a KL in a reward whose parts are normalized",
        ("kl.apply_to=reward with advantage.estimator=gdpo", "set kl.apply_to to loss or none"),
        ("algorithm=gdpo", "kl.apply_to=reward"),
    ),
    Case(
        "the odds ratio of DPO's default log-probs",
        ("options.loss=orpo compares the odds", "options.length_normalized, as algorithm=orpo does"),
        ("algorithm=dpo", "options.loss=orpo"),
    ),
    Case(
        "an unknown loss of pairs",
        ("options.loss must be one of sigmoid", "kto"),
        ("algorithm=dpo", "options.loss=kto"),
    ),
    Case("an unknown apply_to", ("kl.apply_to must be one of reward, loss, none",), ("kl.apply_to=losses",)),
    Case("an empty apply_to", ("kl.apply_to must be one of reward, loss, none",), ("kl.apply_to=null",)),
    Case("an unknown agg_mode", ("loss.agg_mode must be one of token-mean, seq-mean",), ("loss.agg_mode=seq-mean",)),
    Case("an empty agg_mode", ("loss.agg_mode must be one of token-mean, seq-mean",), ("loss.agg_mode=null",)),
    Case("agg_mode as a list", ("loss.agg_mode must be one of",), ("loss.agg_mode=[token-mean]",)),
    Case(
        "a misspelt agg_mode",
        ("unknown key loss.agg_modes", "did you mean loss.agg_mode"),
        ("loss.agg_modes=token-mean",),
    ),
    Case("a dual clip that clips everything", ("loss.dual_clip", "above 1"), ("loss.dual_clip=1",)),
    Case(
        "a misspelt policy loss",
        ("loss.policy_loss must be one of ppo, gspo", "or module:name of a loss, not 'gpso'; did you mean gspo?"),
        ("loss.policy_loss=gpso",),
    ),
    Case("a policy loss in capitals", ("did you mean gspo?",), ("loss.policy_loss=GSPO",)),
    Case(
        "an option of another loss",
        ("unknown key loss.options.tau_positive", "known here: clip_low, clip_high"),
        ("loss.policy_loss=gspo", "loss.options.tau_positive=1"),
    ),
    Case("an option of a loss that has none", ("unknown key loss.options.clip_low",), ("loss.options.clip_low=1",)),
    Case(
        "a share of 0",
        ("loss.options.kl_cov_ratio must be a number, above 0 and at most 1, not 0",),
        ("loss.policy_loss=kl_cov", "loss.options.kl_cov_ratio=0"),
    ),
    Case(
        "a policy loss as text",
        ("__name__ is a str, and neither a PolicyLoss nor",),
        ("loss.policy_loss=sum_reward:__name__",),
    ),
    Case(
        "a scale factor of 0",
        ("loss.scale_factor must be", "at least 1"),
        ("loss.agg_mode=seq-mean-token-sum-norm", "loss.scale_factor=0"),
    ),
    Case(
        "an unknown advantage estimator",
        ("advantage.estimator must be one of grpo, gdpo, rloo",),
        (GRPO, "advantage.estimator=remax"),
    ),
    Case(
        "a coefficient above its bound",
        ("kl.coef=0.5 is above kl.max_coef=0.2", "kl.target to null"),
        ("kl.coef=0.5",),
    ),
    Case("a group of one", ("samples_per_prompt=1", "2 or more"), (GRPO, "rollout.samples_per_prompt=1")),
    Case("greedy sampling of groups", ("rollout.temperature=0", "above 0"), (GRPO, "rollout.temperature=0")),
    Case(
        "epochs and updates", ("num_update=3 is not a multiple", "epochs=2"), ("run.num_update=3", "run.ppo_epochs=2")
    ),
    Case("more epochs than updates", ("run.num_update=1", "run.ppo_epochs=3"), ("run.ppo_epochs=3",)),
    Case("more updates than rollouts", ("batch of 16 sequences in 17",), ("run.num_update=17",)),
    Case("more updates than conversations", ("batch of 4 sequences in 5",), (*SFT, "run.num_update=5")),
    Case("top_p alone", ("rollout.top_p=0.9 without rollout.top_k", "for example to 1000"), ("rollout.top_p=0.9",)),
    Case("min_p alone", ("rollout.min_p=0.1 without rollout.top_k",), ("rollout.min_p=0.1",)),
    Case("one token to choose from", ("rollout.top_k=1 leaves nothing", "temperature=0"), ("rollout.top_k=1",)),
    Case("no token to choose from", ("rollout.top_k=0 leaves nothing", "-1 for all"), ("rollout.top_k=0",)),
    Case(
        "more tokens than the engine has room to name",
        ("rollout.top_k=20 is beyond rollout.sglang.sampling_mask_max_tokens=10", "remove the second"),
        ("rollout.top_k=20", "rollout.sglang={sampling_mask_max_tokens: 10}"),
    ),
    Case(
        "SFT cannot replay routing",
        ("train.routing_replay=true", "sft has no engine"),
        (*SFT, "train.routing_replay=true"),
    ),
    Case(
        "experts placed by syncs of adapters",
        ("rollout.rebalance_experts_every=1 with rollout.sync_adapters_only", "set one of them"),
        ("rollout.rebalance_experts_every=1", "rollout.sync_adapters_only=true", "lora.rank=4"),
    ),
    Case(
        "experts of engines that get no weights",
        ("rollout.rebalance_experts_every=1", "no weight sync moves experts"),
        ("rollout.rebalance_experts_every=1", "algorithm=generate"),
    ),
    Case(
        "copies of experts without a placement",
        ("rollout.num_redundant_experts=2", "also set rollout.rebalance_experts_every"),
        ("rollout.num_redundant_experts=2",),
    ),
    Case(
        "index replay of a model without sparse attention",
        ("train.sparse_index_replay=true", "has no sparse attention; set it to false"),
        ("train.sparse_index_replay=true",),
    ),
    Case(
        "an indexer loss of a model without indexers",
        ("train.indexer_loss_coef=0.1", "has no sparse attention; set it to 0"),
        ("train.indexer_loss_coef=0.1",),
    ),
    Case("an unknown schedule", ("actor_optimizer.schedule must be one of cosine",), ("actor_optimizer.schedule=cos",)),
    Case("targets without LoRA", ("lora.target_modules", "set lora.rank"), ("lora.target_modules=[linear_qkv]",)),
    Case(
        "syncs of adapters without LoRA",
        ("rollout.sync_adapters_only", "set lora.rank"),
        ("rollout.sync_adapters_only=true",),
    ),
    Case(
        "syncs of adapters to engines that lose their weights",
        ("rollout.sync_adapters_only", "enable_weights_cpu_backup"),
        ("lora.rank=4", "rollout.sync_adapters_only=true", "rollout.sglang.enable_weights_cpu_backup=false"),
    ),
    Case(
        "an unknown LoRA target",
        ("lora.target_modules", "linear_qkw"),
        ("lora.rank=4", "lora.target_modules=[linear_qkw]"),
    ),
    Case("an unknown algorithm", ("algorithm must be one of ppo, ", "did you mean sft?"), ("algorithm=sfft",)),
    Case("an algorithm in a missing module", ("algorithm: cannot import no_lab",), ("algorithm=no_lab:A",)),
    Case("an algorithm without a name", ("algorithm: 'sum_reward:'", "module:name"), ("algorithm='sum_reward:'",)),
    Case("an algorithm missing in its module", ("sum_reward has no 'dapo'",), ("algorithm=sum_reward:dapo",)),
    Case("a function as algorithm", ("not a Controller: derive it from",), ("algorithm=sum_reward:even",)),
    Case(
        "an incomplete controller",
        ("Half lacks load_items, step",),
        ("algorithm=half:Half",),
        half_a_controller,
    ),
    Case("MTP of a model without MTP layers", ("train.mtp_loss_coef=0.1",), ("train.mtp_loss_coef=0.1",)),
    Case(
        "drafts without an MTP layer",
        ("rollout.num_speculative_tokens=3 needs a model with one layer",),
        ("rollout.num_speculative_tokens=3",),
    ),
    Case(
        "a critic on ranks of its own",
        ("critic.parallel.world_size", "remove it"),
        ("critic.parallel.world_size=2",),
    ),
    Case("a critic that does not fit", ("critic.parallel.world_size=1", "tp x pp"), ("critic.parallel.tp=2",)),
    Case("a misspelt critic", ("critic.parallel.tpp", "did you mean critic.parallel.tp"), ("critic.parallel.tpp=2",)),
    Case("misspelt DDP", ("train.ddp", "did you mean overlap_grad_reduce"), ("train.ddp.overlap_grad_reduc=true",)),
    Case("another router type", ("moe_router_fusion",), (REPLAY, "model.megatron.moe_router_fusion=true")),
    Case(
        "another load balancing",
        ("sinkhorn is incompatible with train.routing_replay",),
        (REPLAY, "model.megatron.moe_router_load_balancing_type=sinkhorn"),
    ),
    Case(
        "no chunks to record",
        ("chunked_prefill_size must be positive",),
        (REPLAY, "rollout.sglang.chunked_prefill_size=-1"),
    ),
    Case(
        "fewer experts than the engine's",
        ("model.megatron.moe_router_topk",),
        (REPLAY, "model.megatron.moe_router_topk=1"),
    ),
]
