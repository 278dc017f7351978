"""Random trainer and engine layouts of random tiny models, covering every feature of the layout algebra, on the same or
on different ranks."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

from megarl.reshard.plan.layout import EngineLayout, TrainLayout

WORLDS = (1, 2, 2, 3, 4, 4, 4, 6, 8, 8, 8, 8, 12, 16, 16, 16, 24, 32, 64)


@dataclass(frozen=True)
class Case:
    hf: dict[str, Any]
    train: TrainLayout
    engine: EngineLayout
    ranks_per_node: int
    bucket_bytes: int
    wire: str
    min_piece: int

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The arguments of ReshardPlan, in order."""
        return self.hf, self.train, self.engine, self.ranks_per_node, self.bucket_bytes, self.wire, self.min_piece


DELTA_NETS = 1000
"""Cases from this seed on have gated delta nets."""


def delta_nets(rng: random.Random, heads: int) -> dict[str, Any]:
    """Return the keys of Qwen3-Next or Qwen3.5-MoE, with a multiple of `heads` key heads."""
    architecture, model_type = rng.choice((("Qwen3Next", "qwen3_next"), ("Qwen3_5Moe", "qwen3_5_moe_text")))
    keys = heads * rng.randint(1, 2)
    return {
        "architectures": [f"{architecture}ForCausalLM"],
        "model_type": model_type,
        "partial_rotary_factor": 1.0,
        "full_attention_interval": rng.randint(1, 3),
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * rng.randint(1, 3),
        "linear_key_head_dim": rng.randint(1, 3),
        "linear_value_head_dim": rng.randint(1, 3),
        "linear_conv_kernel_dim": rng.randint(2, 4),
    }


def random_case(seed: int, worlds: tuple[int, ...] = WORLDS) -> Case:
    """Return a deterministic random case."""
    rng = random.Random(f"reshard {seed}")
    wire = rng.choice(("bf16", "bf16", "bf16", "fp32", "fp8"))
    # FP8 blocks need at least 128 rows per engine rank, so few ranks keep the tensors small.
    world = rng.choice([w for w in worlds if wire != "fp8" or w <= 8] or worlds)
    block = 128 if wire == "fp8" else 1
    family = rng.choice(("qwen2", "qwen3_moe", "deepseek_v3"))
    if seed >= DELTA_NETS:
        family, wire, block = "qwen3_moe", "fp32" if wire == "fp32" else "bf16", 1
    layers = rng.randint(1, 4)

    pp = rng.choice([d for d in divisors(world) if d <= layers + 2])
    stage = world // pp
    tp = rng.choice([d for d in divisors(stage) if d <= 8])
    cp = rng.choice([d for d in divisors(stage // tp) if d <= 2])
    etp = rng.choice([d for d in divisors(stage) if d <= 4])
    ep = rng.choice([d for d in divisors(stage // etp) if d <= 16])
    if family == "qwen2":
        etp = ep = 1
    train = TrainLayout(world, tp, ep, stages(rng, layers, pp), etp, cp)

    size = rng.choice(divisors(world))
    dp = rng.choice(divisors(size)) if rng.random() < 0.4 else 1
    engine_ep = rng.choice([d for d in divisors(size) if d <= 16]) if family != "qwen2" else 1
    mlp_tp = rng.choice((0, *divisors(size))) if dp > 1 else 0
    head_tp = rng.choice((0, size // dp)) if dp > 1 else 0
    shared_tp = random.Random(f"shared {seed}").choice((mlp_tp, 0, *divisors(size)))
    moe_tp = size // engine_ep

    experts = max(2, lcm(ep, engine_ep) * rng.randint(1, 2))
    hf: dict[str, Any] = {
        "vocab_size": rng.choice((5, 64, 100, 129, 200, 257, 300)),
        "hidden_size": tp * rng.randint(1, 3) if tp > 2 else rng.choice((4, 6)),
        "num_hidden_layers": layers,
        "tie_word_embeddings": rng.random() < 0.3,
        "hidden_act": "silu",
    }
    hf["intermediate_size"] = lcm(tp, (mlp_tp or size) * block) * rng.randint(1, 2)
    moe = lcm(etp, moe_tp * block)
    if family == "deepseek_v3":
        shared = rng.randint(0, 2)
        if shared:
            moe = lcm(moe, tp, (shared_tp or size) * block)
        hf |= deepseek_config(rng, lcm(tp, size // dp), block) | {
            "n_shared_experts": shared,
            "n_routed_experts": experts,
        }
    else:
        hf |= gqa_heads(rng, tp, size // dp, block)
        if family == "qwen2":
            hf |= {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
        else:
            hf |= {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": experts}
            hf |= {"num_experts_per_tok": 2, "norm_topk_prob": True}
        if seed >= DELTA_NETS:
            hf |= delta_nets(rng, lcm(tp, size // dp)) | {
                "shared_expert_intermediate_size": lcm(tp, shared_tp or size) * rng.randint(1, 2)
            }
    hf["moe_intermediate_size"] = moe

    redundant: dict[int | None, tuple[int, ...]] = {}
    if family != "qwen2" and rng.random() < 0.5:
        redundant = {layer: expert_placement(rng, experts, engine_ep) for layer in range(layers) if rng.random() < 0.8}
        redundant[None] = expert_placement(random.Random(f"draft {seed}"), experts, engine_ep)
    engine = EngineLayout(
        size,
        engine_ep,
        dp,
        mlp_tp,
        head_tp,
        shared_tp,
        experts=redundant,
        fuse_shared=hf.get("n_shared_experts") == 1 and rng.random() < 0.5,
        draft=rng.random() < 0.7,
    )
    if family != "qwen2" and wire == "bf16" and seed % 9 == 7:
        wire, engine = "int4", replace(engine, fuse_shared=False)
        hf |= {"hidden_size": 32 * hf["hidden_size"], "moe_intermediate_size": 32 * moe}  # groups of 32
    return Case(
        hf,
        train,
        engine,
        ranks_per_node=rng.choice([d for d in divisors(world) if d <= 32]),
        bucket_bytes=rng.choice((1 << 12, 1 << 14, 1 << 16, 1 << 20)),
        wire=wire,
        min_piece=rng.choice((0, 64, 1 << 16)),
    )


def random_split_case(
    seed: int, worlds: tuple[int, ...] = (1, 2, 3, 4, 4, 6, 8, 8, 12, 16), max_ranks: int = 64
) -> Case:
    """Return a `random_case` with trainer and engines on random ranks of a job of at most `max_ranks`."""
    rng = random.Random(f"apart {seed}")
    case = random_case(seed, worlds)
    train, tp = case.train.world, case.engine.tp
    engines = tp * rng.randint(1, max(1, min(16, max_ranks - train) // tp))
    low, high = max(train, engines), min(train + engines + rng.choice((0, 0, 1, 5)), max_ranks)
    layout = rng.choice(("behind", "before", "overlapping", "interleaved", "any", "any order"))
    job = rng.randint(low, high) if layout.startswith("any") else high
    if layout == "interleaved":  # as evenly as possible
        order = sorted(range(train + engines), key=lambda i: (i + 0.5) / train if i < train else (i - train) / engines)
        train_ranks = [position for position, i in enumerate(order) if i < train]
        engine_ranks = [position for position, i in enumerate(order) if i >= train]
    elif layout.startswith("any"):
        train_ranks, engine_ranks = rng.sample(range(job), train), rng.sample(range(job), engines)
        if layout == "any":
            train_ranks, engine_ranks = sorted(train_ranks), sorted(engine_ranks)
    else:
        shared = rng.randint(1, min(train, engines)) if layout == "overlapping" else 0
        first = 0 if layout != "before" else engines
        train_ranks = list(range(first, first + train))
        engine_ranks = (
            list(range(engines)) if layout == "before" else list(range(train - shared, train - shared + engines))
        )
    return replace(
        case,
        train=replace(case.train, ranks=tuple(train_ranks)),
        engine=replace(case.engine, ranks=tuple(engine_ranks)),
        ranks_per_node=rng.choice((1, 2, 3, 4, 8, 16)),
    )


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def stages(rng: random.Random, layers: int, pp: int) -> tuple[tuple[int, ...], ...]:
    """Return each stage's layers: uneven, interleaved or arbitrary; a stage may have none."""
    kind = rng.choice(("uneven", "interleaved", "custom"))
    if kind == "uneven":
        boundaries = sorted(rng.randint(0, layers) for _ in range(pp - 1))
        edges = [0, *boundaries, layers]
        return tuple(tuple(range(a, b)) for a, b in zip(edges, edges[1:], strict=False))
    owner = [layer % pp if kind == "interleaved" else rng.randrange(pp) for layer in range(layers)]
    return tuple(tuple(layer for layer in range(layers) if owner[layer] == stage) for stage in range(pp))


def gqa_heads(rng: random.Random, tp: int, engine_tp: int, block: int) -> dict[str, Any]:
    """Return head counts of grouped-query attention; an engine with more ranks than groups replicates them."""
    candidates = [g for g in (tp, 2 * tp, 3 * tp) if engine_tp % g == 0 or g % engine_tp == 0]
    groups = rng.choice(candidates or [lcm(tp, engine_tp)])
    return {
        "num_key_value_heads": groups,
        "num_attention_heads": lcm(groups, engine_tp) * rng.randint(1, 2),
        "head_dim": max(block, rng.choice((2, 4))),
    }


def deepseek_config(rng: random.Random, heads: int, block: int) -> dict[str, Any]:
    heads *= rng.randint(1, 2)
    is_small = block == 1
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        # The engine fuses the KV latent behind it, starting at a whole block.
        "q_lora_rank": rng.choice((None, rng.randint(1, 6) if is_small else 128)),
        "kv_lora_rank": rng.randint(1, 6),
        "qk_nope_head_dim": rng.randint(1, 3) if is_small else 128,
        "qk_rope_head_dim": 2 if is_small else 128,
        "v_head_dim": rng.randint(1, 3) if is_small else 128,
        "first_k_dense_replace": rng.randint(0, 2),
        "num_nextn_predict_layers": rng.randint(0, 1),  # the engine's draft model has one
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }


def expert_placement(rng: random.Random, experts: int, ep: int) -> tuple[int, ...]:
    """Return every expert, some of them several times, in random order."""
    result = list(range(experts)) + [rng.randrange(experts) for _ in range(ep * rng.randint(0, 2))]
    rng.shuffle(result)
    return tuple(result)
