"""Print which features combine, and the runs that show it.

    .venv/bin/python tools/combinations.py            for each pair of settings the run that covers it, or the refusal
    .venv/bin/python tools/combinations.py --runs     the runs, as overrides for two to four ranks

Each run has one setting of every feature. The runs are a covering array: every two settings of different features meet
in one of them, unless they are refused. `tests/test_combinations_end_to_end.py` trains two steps with each, on the real
Megatron-Core and the real engine, and checks that the dry run refuses exactly what is refused here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations
from random import Random

from rich import box
from rich.console import Console
from rich.table import Table

from megarl.config.command_line import Parser, run_cli

Setting = tuple[str, str]
"""A feature and one of its settings."""

JUDGE = {
    "judge": {"backend": "sglang", "model": "MODEL", "rollout": {"max_context": 512, "concurrency": 8}},
    "reward": {
        "backend": "judge",
        # A grammar makes the random weights of a tiny model state a score.
        "options": {"prompt": "{answer} {ground_truth}?", "request": {"max_tokens": 12, "regex": "Score: [0-9]"}},
    },
}
"""Roles of a reward that a model on engines of its own gives. MODEL is the folder of the model; below, PORT is that of
an engine outside of the job, and DISK a folder for its weights, which else go over TCP."""

FEATURES: dict[str, dict[str, Sequence[str]]] = {
    "algorithm": {
        "grpo": ("algorithm=grpo",),
        "ppo": ("algorithm=ppo",),
        "dapo": ("algorithm=dapo", "options.max_num_gen_batches=2"),
        "remax": ("algorithm=remax",),
        "pf_ppo": ("algorithm=pf_ppo",),
        "ppo and remax": ("algorithm=megarl.controllers.policies:PPOAndReMaxController",),
    },
    "generation": {
        "synchronous": (),
        "over-sampled": ("rollout.oversample=1.5", "rollout.max_staleness=2"),
        "async, wait": ("rollout.asynchronous=true", "rollout.on_weight_sync=wait"),
        "async, in_place": ("rollout.asynchronous=true", "rollout.on_weight_sync=in_place"),
        "async, retract": ("rollout.asynchronous=true", "rollout.on_weight_sync=retract"),
        "async, over-sampled": ("rollout.asynchronous=true", "rollout.oversample=1.5", "rollout.max_staleness=2"),
    },
    "placement": {
        "colocated": ("parallel.world_size=2", "parallel.ranks_per_node=2", "rollout.tp=2"),
        "engines apart": (
            *("parallel.world_size=4", "parallel.ranks_per_node=4", "rollout.tp=2"),
            "placement={actor: 0-1, rollout: 2-3}",
        ),
        "some engines apart": (
            *("parallel.world_size=3", "parallel.ranks_per_node=3", "rollout.tp=1"),
            "placement={actor: 0-1, rollout: all}",
        ),
    },
    "pool": {
        "of the job": (),
        "and outside of it": ("rollout.external=[127.0.0.1:PORT]",),
        "outside of it, by disk": ("rollout.external=[127.0.0.1:PORT]", "rollout.external_weights_dir=DISK"),
    },
    "correction": {kind: (f"correction.kind={kind}",) for kind in ("none", "tis", "icepop", "mis", "reject")},
    "routing": {
        "own": (),
        "replayed": ("train.routing_replay=true",),
        "replayed, experts placed": (
            *("train.routing_replay=true", "rollout.ep=2"),
            *("rollout.num_redundant_experts=2", "rollout.rebalance_experts_every=1"),
        ),
    },
    "KV cache": {"of all conversations": (), "of those that fit": ("rollout.fit_kv_cache=true",)},
    "checkpoints": {"none": (), "in memory": ("run.save_every=9", "run.memory_save_every=1", "run.memory_dir=DISK")},
    "sampling": {"full": (), "truncated": ("rollout.top_p=0.9", "rollout.top_k=50")},
    "conversation": {
        "tools": ("rollout.tools=[megarl.environments.ready.calculator:calculator]",),
        "environment": ("rollout.tools=[]", "rollout.environments=[megarl.environments.ready.guess:Guess]"),
        "agent": ("rollout.tools=[]", "rollout.environments=[example_agents:calculating]"),
    },
    "reward": {"function": (), "function and judge": (f"roles={json.dumps(JUDGE)}",)},
    "weights": {
        "full": (),
        "LoRA": ("lora.rank=4",),
        "LoRA, adapters synced": ("lora.rank=4", "rollout.sync_adapters_only=true"),
    },
    "drafts": {"none": (), "MTP": ("rollout.num_speculative_tokens=2",)},
    "weight sync": {
        "whole": (),
        "changes": ("rollout.sync_changes_only=true", "parallel.ranks_per_node=1"),  # a node for each rank
    },
    "layout": {
        "TP2 x EP2": ("parallel.tp=2", "parallel.ep=2"),
        "PP2": ("parallel.tp=1", "parallel.ep=1", "parallel.pp=2"),
        "CP2": ("parallel.tp=1", "parallel.ep=1", "parallel.cp=2"),
        # A long conversation is on both ranks, and of shorter ones each rank has others.
        "CP2, dynamic": (
            *("parallel.tp=1", "parallel.ep=1", "parallel.cp=2", "parallel.dynamic_cp=true"),
            "train.max_tokens_per_gpu=256",
        ),
        "DP2 x EP2": ("parallel.tp=1", "parallel.ep=2"),
        # Of ranks with 1 GB each, where a tiny model fits as a whole: DP2, or more if there are more ranks.
        "automatic": ("parallel=auto", "parallel.gpu_gb=1"),
    },
    # An engine of vLLM's is within one machine, of which runs that sync changes have one for each rank.
    "engine": {"SGLang": (), "vLLM": ("rollout.engine=vllm", "rollout.tp=1")},
    "optimizer": {
        "AdamW": (),
        "AdamW on the host": ("actor_optimizer.offload_fraction=1", "critic.optimizer.offload_fraction=0.5"),
        "Muon": ("actor_optimizer.type=muon", "critic.optimizer.type=muon"),
        "AdamW with FSDP": ("train.fsdp=true",),
    },
}

_NO_CACHE = "an engine that sleeps while models use its device has no KV cache of the old weights left to continue with"

_ONE_RANK = "an engine of one rank has all experts, so that there is nothing to place"
_CACHES = "which of several caches a conversation is in is not known before it is sent there"
_ADAPTERS = "an expert that moves needs all of its weights on another rank, which a sync of adapters does not send"

REFUSED: dict[frozenset[Setting], str] = {
    frozenset({("generation", "async, in_place"), ("placement", "colocated")}): _NO_CACHE,
    frozenset({("generation", "async, in_place"), ("placement", "some engines apart")}): _NO_CACHE,
    # By default the engines of both policies take turns on the same ranks; on ranks of their own they keep it.
    frozenset({("algorithm", "ppo and remax"), ("generation", "async, in_place")}): _NO_CACHE,
    frozenset({("routing", "replayed, experts placed"), ("placement", "some engines apart")}): _ONE_RANK,
    frozenset({("routing", "replayed, experts placed"), ("engine", "vLLM")}): _ONE_RANK,
    frozenset({("routing", "replayed, experts placed"), ("weights", "LoRA, adapters synced")}): _ADAPTERS,
    frozenset({("KV cache", "of those that fit"), ("pool", "and outside of it")}): _CACHES,
    frozenset({("KV cache", "of those that fit"), ("pool", "outside of it, by disk")}): _CACHES,
}
"""Pairs of settings that the dry run refuses, and why."""

Run = dict[str, str]
"""The setting of each feature."""

_NUM_CANDIDATES = 40
_SEED = 39  # of 200, one of those with the fewest runs


def list_pairs() -> Iterator[frozenset[Setting]]:
    """Return all pairs of settings of different features."""
    for first, second in combinations(FEATURES, 2):
        for a in FEATURES[first]:
            for b in FEATURES[second]:
                yield frozenset({(first, a), (second, b)})


def covered_pairs(run: Mapping[str, str]) -> set[frozenset[Setting]]:
    return {frozenset(pair) for pair in combinations(run.items(), 2)}


def build_runs() -> list[Run]:
    """Return a covering array, built greedily: of some random runs with the first pair that is not covered, the one
    that covers the most others comes next. The same in every call."""
    random = Random(_SEED)
    missing = dict.fromkeys(pair for pair in list_pairs() if pair not in REFUSED)  # a set with an order
    runs: list[Run] = []
    while missing:
        candidates = [_build_run(next(iter(missing)), missing, random) for _ in range(_NUM_CANDIDATES)]
        run = max(candidates, key=lambda candidate: len(covered_pairs(candidate) & missing.keys()))
        for pair in covered_pairs(run):
            missing.pop(pair, None)
        runs.append({feature: run[feature] for feature in FEATURES})
    return runs


def _build_run(pair: frozenset[Setting], missing: Collection[frozenset[Setting]], random: Random) -> Run:
    """Extend a pair, in a random order of features, by the settings that cover the most missing pairs."""
    run: Run = dict(pair)
    for feature in random.sample(list(FEATURES), len(FEATURES)):
        if feature not in run:
            allowed = [
                (sum(frozenset({(feature, name), other}) in missing for other in run.items()), random.random(), name)
                for name in FEATURES[feature]
                if not any(frozenset({(feature, name), other}) in REFUSED for other in run.items())
            ]
            run[feature] = max(allowed)[2]
    return run


def overrides_of(run: Mapping[str, str]) -> list[str]:
    """Return the overrides of a run's settings."""
    return [override for feature, name in run.items() for override in FEATURES[feature][name]]


def render_table(runs: Sequence[Run]) -> Table:
    """Return a table of all pairs: the number of the first run that covers each, or a letter of a refusal."""
    settings = [(feature, name) for feature, names in FEATURES.items() for name in names]
    table = Table(box=box.SIMPLE_HEAD, padding=0, collapse_padding=True)
    table.add_column("feature", no_wrap=True)
    table.add_column("setting", no_wrap=True)
    for number in range(len(settings)):
        table.add_column(f" {number + 1}", justify="right")
    reasons = list(dict.fromkeys(REFUSED.values()))
    first_runs: dict[frozenset[Setting], int] = {}
    for number, run in enumerate(runs):
        for pair in covered_pairs(run):
            first_runs.setdefault(pair, number + 1)
    for number, (feature, name) in enumerate(settings):
        cells = []
        for other in settings[:number]:
            pair = frozenset({(feature, name), other})
            if other[0] == feature:
                cells.append("")
            elif pair in REFUSED:
                cells.append(chr(97 + reasons.index(REFUSED[pair])))
            else:
                cells.append(str(first_runs[pair]))
        is_last = number + 1 == len(settings) or settings[number + 1][0] != feature
        is_first = not number or settings[number - 1][0] != feature
        table.add_row(feature if is_first else "", f" {number + 1} {name}", *cells, end_section=is_last)
    return table


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--runs", action="store_true", help="print the runs instead of the table")
    options = parser.parse_args()
    runs, console = build_runs(), Console(width=240)
    if options.runs:
        for number, run in enumerate(runs, 1):
            print(f"{number}: {json.dumps(run)}\n   {' '.join(map(repr, overrides_of(run)))}")
        return 0
    console.print(render_table(runs))
    for letter, reason in enumerate(dict.fromkeys(REFUSED.values()), 97):
        print(f"{chr(letter)}: refused: {reason}")
    print(f"{len(runs)} runs cover {len(list(list_pairs())) - len(REFUSED)} pairs; {len(REFUSED)} pairs are refused")
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(main))
