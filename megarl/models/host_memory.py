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
from megarl.types.requirements import Declared

TOKEN, NUMBER, FLAG, INDEX = 4, 4, 1, 8
"""Bytes of a token's id, of a number about a token, of whether it is trained on, and of where it is."""
CUT_MICRO = 5 * INDEX
"""Of a micro-batch beside its columns: ids, the next ids, positions, and the places of tokens, twice."""
CHOICE = 8
"""Of a choice of an expert on record, while micro-batches are made: joined to the others as it came; of those of a
tensor parallel rank as they are looked up, and as int16 of this one and of the one at work."""
RECTANGLE = 1 << 24
"""Of the numbers that `algorithms.advantages.gae` goes through together, see `STEPS` there."""
VIEW = 512
"""Of a row of that rectangle, the tensor that stands for it."""
CHECKPOINT = "checkpoint under way"
PART = 1 << 20
"""Tokens of the part of a record that a rank writes at a time, see `observe.rollout_log`."""
RECORDED = 3 * (TOKEN + 2 * NUMBER)
"""Bytes a token of such a part, with log-prob and advantage: as columns, as they are encoded, and compressed. As many
bytes of other records count as a token."""
PICKED = 2 * INDEX
"""Of an id on record that a token could have had, while those of a micro-batch are picked: from where, and to where."""


def column_bytes(config: Config, declared: Declared) -> int:
    """Of a batch's columns when it is trained on, a token: ids and mask, log-probs of the engine and of the policy, of
    the reference where there is one, advantages, and with a critic values, rewards and returns; lags where tokens may
    be of older weights, and the weights of a correction."""
    numbers = 3 + ("reference" in declared.roles) + (3 if "critic" in declared.roles else 0)
    rollout = config.rollout
    numbers += rollout.max_lag > 0 and (rollout.asynchronous or rollout.oversample > 1)
    numbers += config.correction.kind != "none"
    return TOKEN + FLAG + NUMBER * numbers


@dataclass(frozen=True)
class Batch:
    """A step's: what it has of tokens and sequences, and of the longest of these. leaving: the share of the rows that
    a rank computes that is not their home."""

    tokens: int
    sequences: int
    longest: int
    leaving: float = 1.0
    choices: float | None = None
    """Where sampling is cut off, of how many tokens each is one; None for as many as may be."""


def step_bytes(config: Config, declared: Declared, batch: Batch, routing: RoutingShape | None = None) -> dict[str, int]:
    """What all ranks of a machine hold together at most, by part, in a step whose engines had equal shares of the
    batch: in the `moments` in which it is most, while the step before is still being recorded. routing: of the records
    that are replayed, none by default."""
    found = max(moments(config, declared, batch, routing).values(), key=lambda parts: sum(parts.values()))
    if config.track.rollouts:
        own = _share(config) * batch.tokens
        kept = own * (TOKEN + 2 * NUMBER + _record_bytes(routing) + _choice_bytes(config, batch))
        found = found | {"recording the step before": kept + recording(config, batch, routing)}
    return {name: ceil(amount) for name, amount in found.items()}


def checkpoint_copy(config: Config, states: Mapping[str, int], trained: Iterable[str]) -> dict[str, int]:
    """What a rank has of its models a second time for `run.save_async`, at most: of weights that ranks have in common
    one of them has the copy. states: bytes of the trained roles' weights and optimizers."""
    names = [role.replace("_", " ") for role in trained]
    if not (config.run.save_every and config.run.save_async and names):
        return {}
    weights, optimizer = (sum(states.get(f"{name} {what}", 0) for name in names) for what in ("weights", "optimizer"))
    # In fp32 the weights are their own masters, and are written as both.
    return {CHECKPOINT: weights + (optimizer * 3 // 2 if config.model.dtype == "float32" else optimizer)}


def recording(config: Config, batch: Batch, routing: RoutingShape | None = None) -> float:
    """What it takes to record a step, beside what is recorded."""
    leads, records = _leads(config), 0.0
    if config.track.records:
        records = (_record_bytes(routing) + _choice_bytes(config, batch)) / (TOKEN + 2 * NUMBER)
    return leads * RECORDED * min(PART, _share(config) * batch.tokens * (1 + records) / leads)


def moments(
    config: Config, declared: Declared, batch: Batch, routing: RoutingShape | None = None
) -> dict[str, dict[str, float]]:
    """By part, at the times of a step at which there is much: a model says something of all tokens, advantages are
    computed, a mini-batch is cut out of the batch, and trained on.

    Within a machine rows are read where they lie; to another one they go once, and as much comes from there.
    """
    own, record = _share(config) * batch.tokens, _record_bytes(routing)
    parallel, here, leads = config.parallel, _here(config), _leads(config)
    machines = parallel.world_size // here
    columns = column_bytes(config, declared)
    passes = max(1, config.run.num_update // config.run.epochs)
    mini, kind = own / passes, routing.dtype.itemsize if routing is not None else 1
    choice = _choice_bytes(config, batch)

    def at(columns: int, parts: dict[str, float]) -> dict[str, float]:
        held = {"rollouts": own * (TOKEN + NUMBER), "records of routing": own * record}
        if choice:
            held["records of sampling"] = own * choice * (2 if columns else 1)  # those of the batch are of all tokens
        if config.rollout.asynchronous and config.rollout.max_lag:
            under_way = config.rollout.max_lag * own * (TOKEN + NUMBER + record + choice)
            held["rollouts of later steps"] = under_way
        return held | {"columns of the batch": own * columns} | parts

    def computing(rows: float, sent: int, each: int, record: int, choice: float) -> dict[str, float]:
        """Records are laid together, sent, and of a stage's layers laid together again. Then there is a micro-batch at
        work, of as few as may be, equal ones, and the next is being made. On one rank nothing is sent. choice: bytes
        of a token of what it could have been, which last stages look at."""
        stage = record / parallel.pp
        leaves = (sent + record + choice) * batch.leaving * (2 - 1 / machines)
        sending = rows * (leaves + record + choice + (stage if parallel.pp > 1 else 0.0))
        kept = rows * (leaves + stage)
        rank = rows * (parallel.tp * parallel.cp * parallel.pp) / here
        micro = min(rank, max(rank / ceil(rank / (config.train.token_budget * parallel.cp)), batch.longest))
        choices = stage * (1 + (CHOICE / kind - 1) / parallel.tp)
        picked = (2 * choice + PICKED * max(0.0, choice / NUMBER - 1) + choice) / (parallel.pp * parallel.cp)
        work = here * micro * (2 * (each + CUT_MICRO) + 2 * INDEX + choices + picked)
        if parallel.world_size == 1:
            sending, kept = 0.0, 0.0
        fuller = (sending, 0.0) if sending > kept + work else (kept, work)
        return dict(zip(("buffers of exchanges", "micro-batches at work"), fuller, strict=True))

    if not declared.trains:
        return {"generating": at(0, {})}
    first = TOKEN + FLAG + NUMBER  # what there is before the first model has said something
    says = sum(role in declared.roles for role in ("actor", "reference", "critic"))
    trained = own * NUMBER if passes == 1 else mini * (columns + NUMBER)
    forwards = [  # of the policy, which replays; the last of those that do not
        at(first + NUMBER, computing(own, TOKEN, first, record, choice)),
        at(first + NUMBER * says, computing(own, TOKEN, first, 0, choice if "reference" in declared.roles else 0.0)),
    ]
    found = {
        "forward": max(forwards, key=lambda parts: sum(parts.values())),
        "cutting": at(columns, {"mini-batches": trained if passes == 1 else trained + mini * (columns + INDEX)}),
        "update": at(
            columns, {"mini-batches": trained} | computing(mini, columns + NUMBER, columns + NUMBER, record, choice)
        ),
    }
    if "critic" in declared.roles:
        steps = min(RECTANGLE, batch.longest * batch.sequences * _share(config) / leads)
        rows = own * (NUMBER + INDEX) + leads * (2 * NUMBER * steps + VIEW * batch.longest)
        found["advantages"] = at(columns, {"functions of tokens": rows})
    return found


def _here(config: Config) -> int:
    """Ranks of a machine."""
    return min(config.parallel.world_size, config.parallel.ranks_per_node)


def _leads(config: Config) -> int:
    """Those of them that are homes."""
    return max(1, _here(config) // config.rollout.tp)


def _share(config: Config) -> float:
    """Of a step, on a machine."""
    return _here(config) / config.parallel.world_size


def _record_bytes(routing: RoutingShape | None) -> int:
    return 0 if routing is None else len(routing.moe_layers) * routing.topk * routing.dtype.itemsize


def _choice_bytes(config: Config, batch: Batch) -> float:
    """Of a token, where sampling is cut off: how many it could have been, and which."""
    if not config.rollout.cut_off:
        return 0.0
    return NUMBER * (1 + (max(0, config.rollout.top_k) if batch.choices is None else batch.choices))
