"""Bytes that a step's values take on the host, by part: pure arithmetic over a configuration.

What a rollout is made of stays on the rank that made it, and so do the columns of its tokens; a model is sent the rows
that it computes. So a machine holds its share of a step whatever the number of machines is, and what is under way
between ranks beside it. Sizes of messages and texts are not known before there are some, and are left out; so is what
the allocator of a process keeps of what was given back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil

from megarl.config import Config
from megarl.models.routing import RoutingShape
from megarl.types.requirements import Requirements

TOKEN_BYTES, FLOAT_BYTES, FLAG_BYTES, INDEX_BYTES = 4, 4, 1, 8
"""Bytes of a token's id, of a number about a token, of whether it is trained on, and of where it is."""
MICRO_BATCH_OVERHEAD = 5 * INDEX_BYTES
"""Of a micro-batch beside its columns: ids, the next ids, positions, and the places of tokens, twice."""
EXPERT_CHOICE_BYTES = 8
"""Of a choice of an expert on record, while micro-batches are made: joined to the others as it came; of those of a
tensor parallel rank as they are looked up, and as int16 of this one and of the one at work."""
GAE_ELEMENTS = 1 << 24
"""Of the numbers that `algorithms.advantages.gae` goes through together, see `STEPS` there."""
TENSOR_VIEW_BYTES = 512
"""Of a row of that rectangle, the tensor that stands for it."""
PENDING_CHECKPOINT = "checkpoint under way"
RECORD_CHUNK_TOKENS = 1 << 20
"""Tokens of the part of a record that a rank writes at a time, see `observe.rollout_log`."""
RECORD_BYTES = 3 * (TOKEN_BYTES + 2 * FLOAT_BYTES)
"""Bytes a token of such a part, with log-prob and advantage: as columns, as they are encoded, and compressed. As many
bytes of other records count as a token."""
MASK_PICK_BYTES = 2 * INDEX_BYTES
"""Of an id on record that a token could have had, while those of a micro-batch are picked: from where, and to where."""


def column_bytes(config: Config, declared: Requirements) -> int:
    """Of a batch's columns when it is trained on, a token: ids and mask, log-probs of the engine and of the policy, of
    the reference where there is one, advantages, and with a critic values, rewards and returns; lags where tokens may
    be of older weights, and the weights of a correction."""
    numbers = 3 + ("reference" in declared.roles) + (3 if "critic" in declared.roles else 0)
    rollout = config.rollout
    numbers += rollout.max_lag > 0 and (rollout.asynchronous or rollout.oversample > 1)
    numbers += config.correction.kind != "none"
    return TOKEN_BYTES + FLAG_BYTES + FLOAT_BYTES * numbers


@dataclass(frozen=True)
class BatchSize:
    """A step's: what it has of tokens and sequences, and of the longest of these. leaving: the share of the rows that
    a rank computes that is not their home."""

    tokens: int
    sequences: int
    max_length: int
    moved_share: float = 1.0
    mask_size: float | None = None
    """Where sampling is cut off, of how many tokens each is one; None for as many as may be."""


def step_bytes(
    config: Config, declared: Requirements, batch: BatchSize, routing: RoutingShape | None = None
) -> dict[str, int]:
    """What all ranks of a machine hold together at most, by part, in a step whose engines had equal shares of the
    batch: in the `moments` in which it is most, while the step before is still being recorded. routing: of the records
    that are replayed, none by default."""
    found = max(bytes_by_phase(config, declared, batch, routing).values(), key=lambda parts: sum(parts.values()))
    if config.track.rollouts:
        own = _machine_share(config) * batch.tokens
        kept = own * (TOKEN_BYTES + 2 * FLOAT_BYTES + _routing_bytes(routing) + _mask_bytes(config, batch))
        found = found | {"recording the step before": kept + recording_bytes(config, batch, routing)}
    return {name: ceil(amount) for name, amount in found.items()}


def checkpoint_copy(config: Config, states: Mapping[str, int], trained: Iterable[str]) -> dict[str, int]:
    """What a rank has of its models a second time for `run.save_async`, at most: of weights that ranks have in common
    one of them has the copy. states: bytes of the trained roles' weights and optimizers."""
    names = [role.replace("_", " ") for role in trained]
    if not (config.run.save_every and config.run.save_async and names):
        return {}
    weights, optimizer = (sum(states.get(f"{name} {what}", 0) for name in names) for what in ("weights", "optimizer"))
    # In fp32 the weights are their own masters, and are written as both.
    return {PENDING_CHECKPOINT: weights + (optimizer * 3 // 2 if config.model.dtype == "float32" else optimizer)}


def recording_bytes(config: Config, batch: BatchSize, routing: RoutingShape | None = None) -> float:
    """What it takes to record a step, beside what is recorded."""
    leads, records = _num_home_ranks(config), 0.0
    if config.track.records:
        records = (_routing_bytes(routing) + _mask_bytes(config, batch)) / (TOKEN_BYTES + 2 * FLOAT_BYTES)
    return (
        leads * RECORD_BYTES * min(RECORD_CHUNK_TOKENS, _machine_share(config) * batch.tokens * (1 + records) / leads)
    )


def bytes_by_phase(
    config: Config, declared: Requirements, batch: BatchSize, routing: RoutingShape | None = None
) -> dict[str, dict[str, float]]:
    """By part, at the times of a step at which there is much: a model says something of all tokens, advantages are
    computed, a mini-batch is cut out of the batch, and trained on.

    Within a machine rows are read where they lie; to another one they go once, and as much comes from there.
    """
    own, record = _machine_share(config) * batch.tokens, _routing_bytes(routing)
    parallel, here, leads = config.parallel, _ranks_per_machine(config), _num_home_ranks(config)
    machines = parallel.world_size // here
    columns = column_bytes(config, declared)
    passes = max(1, config.run.num_update // config.run.epochs)
    mini, kind = own / passes, routing.dtype.itemsize if routing is not None else 1
    choice = _mask_bytes(config, batch)

    def at(columns: int, parts: dict[str, float]) -> dict[str, float]:
        held = {"rollouts": own * (TOKEN_BYTES + FLOAT_BYTES), "records of routing": own * record}
        if choice:
            held["records of sampling"] = own * choice * (2 if columns else 1)  # those of the batch are of all tokens
        if config.rollout.asynchronous and config.rollout.max_lag:
            under_way = config.rollout.max_lag * own * (TOKEN_BYTES + FLOAT_BYTES + record + choice)
            held["rollouts of later steps"] = under_way
        return held | {"columns of the batch": own * columns} | parts

    def computing(rows: float, sent: int, each: int, record: int, choice: float) -> dict[str, float]:
        """Records are laid together, sent, and of a stage's layers laid together again. Then there is a micro-batch at
        work, of as few as may be, equal ones, and the next is being made. On one rank nothing is sent. choice: bytes
        of a token of what it could have been, which last stages look at."""
        stage = record / parallel.pp
        leaves = (sent + record + choice) * batch.moved_share * (2 - 1 / machines)
        sending = rows * (leaves + record + choice + (stage if parallel.pp > 1 else 0.0))
        kept = rows * (leaves + stage)
        rank = rows * (parallel.tp * parallel.cp * parallel.pp) / here
        micro = min(rank, max(rank / ceil(rank / (config.train.token_budget * parallel.cp)), batch.max_length))
        choices = stage * (1 + (EXPERT_CHOICE_BYTES / kind - 1) / parallel.tp)
        picked = (2 * choice + MASK_PICK_BYTES * max(0.0, choice / FLOAT_BYTES - 1) + choice) / (
            parallel.pp * parallel.cp
        )
        work = here * micro * (2 * (each + MICRO_BATCH_OVERHEAD) + 2 * INDEX_BYTES + choices + picked)
        if parallel.world_size == 1:
            sending, kept = 0.0, 0.0
        fuller = (sending, 0.0) if sending > kept + work else (kept, work)
        return dict(zip(("buffers of exchanges", "micro-batches at work"), fuller, strict=True))

    if not declared.trained_roles:
        return {"generating": at(0, {})}
    first = TOKEN_BYTES + FLAG_BYTES + FLOAT_BYTES  # what there is before the first model has said something
    says = sum(role in declared.roles for role in ("actor", "reference", "critic"))
    trained = own * FLOAT_BYTES if passes == 1 else mini * (columns + FLOAT_BYTES)
    forwards = [  # of the policy, which replays; the last of those that do not
        at(first + FLOAT_BYTES, computing(own, TOKEN_BYTES, first, record, choice)),
        at(
            first + FLOAT_BYTES * says,
            computing(own, TOKEN_BYTES, first, 0, choice if "reference" in declared.roles else 0.0),
        ),
    ]
    found = {
        "forward": max(forwards, key=lambda parts: sum(parts.values())),
        "cutting": at(columns, {"mini-batches": trained if passes == 1 else trained + mini * (columns + INDEX_BYTES)}),
        "update": at(
            columns,
            {"mini-batches": trained} | computing(mini, columns + FLOAT_BYTES, columns + FLOAT_BYTES, record, choice),
        ),
    }
    if "critic" in declared.roles:
        steps = min(GAE_ELEMENTS, batch.max_length * batch.sequences * _machine_share(config) / leads)
        rows = own * (FLOAT_BYTES + INDEX_BYTES) + leads * (
            2 * FLOAT_BYTES * steps + TENSOR_VIEW_BYTES * batch.max_length
        )
        found["advantages"] = at(columns, {"functions of tokens": rows})
    return found


def _ranks_per_machine(config: Config) -> int:
    """Ranks of a machine."""
    return min(config.parallel.world_size, config.parallel.ranks_per_node)


def _num_home_ranks(config: Config) -> int:
    """Those of them that are homes."""
    return max(1, _ranks_per_machine(config) // config.rollout.tp)


def _machine_share(config: Config) -> float:
    """Of a step, on a machine."""
    return _ranks_per_machine(config) / config.parallel.world_size


def _routing_bytes(routing: RoutingShape | None) -> int:
    return 0 if routing is None else len(routing.moe_layers) * routing.topk * routing.dtype.itemsize


def _mask_bytes(config: Config, batch: BatchSize) -> float:
    """Of a token, where sampling is cut off: how many it could have been, and which."""
    if not config.rollout.has_truncated_sampling:
        return 0.0
    return FLOAT_BYTES * (1 + (max(0, config.rollout.top_k) if batch.mask_size is None else batch.mask_size))
