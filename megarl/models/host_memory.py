"""Estimate the host memory of a step's values, by part, from a configuration alone.

A machine holds its share of a step, whatever the number of machines, plus data in transit between ranks. Messages and
texts are left out, because their sizes are unknown in advance, and so is freed memory that an allocator retains.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil

from megarl.config import Config
from megarl.models.routing import RoutingShape
from megarl.types.requirements import Requirements

TOKEN_BYTES, FLOAT_BYTES, FLAG_BYTES, INDEX_BYTES = 4, 4, 1, 8
"""Bytes of a token id, a per-token number, a loss-mask flag, and an index."""
MICRO_BATCH_OVERHEAD = 5 * INDEX_BYTES  # per token beside its columns: ids, next ids, positions, two token indices
EXPERT_CHOICE_BYTES = 8
"""Bytes per recorded expert choice while micro-batches are built.

A choice is concatenated with the others in its stored dtype, then a tensor parallel rank's choices are looked up, and
exist as int16 of this micro-batch and of the current one.
"""
MASK_PICK_BYTES = 2 * INDEX_BYTES  # per sampling-mask id that a micro-batch gathers: source and target indices
GAE_ELEMENTS = 1 << 24  # that `algorithms.advantages.gae` processes at a time, see `MAX_BLOCK_STEPS` there
TENSOR_VIEW_BYTES = 512  # of the tensor object for a row of them
PENDING_CHECKPOINT = "checkpoint under way"
MEMORY_CHECKPOINTS = "checkpoints in memory"
OFFLOADED_STATES = "optimizer, offloaded"
RECORD_CHUNK_TOKENS = 1 << 20  # tokens of records that a rank writes at a time, see `observe.rollout_log`
RECORD_BYTES = 3 * (TOKEN_BYTES + 2 * FLOAT_BYTES)
"""Bytes per token of these records, with log-prob and advantage: as columns, encoded, and compressed.

The same number of bytes of other records counts as a token.
"""


def column_bytes(config: Config, requirements: Requirements) -> int:
    """Return the bytes per token of a training batch's columns."""
    roles, rollout = requirements.roles, config.rollout
    num_columns = 3 + ("reference" in roles)  # log-probs of engine and policy, advantages; log-probs of the reference
    num_columns += 3 if "critic" in roles else 0  # values, rewards, returns
    num_columns += rollout.max_staleness > 0 and (rollout.asynchronous or rollout.oversample > 1)  # staleness
    num_columns += config.correction.kind != "none"  # weights of the correction
    return TOKEN_BYTES + FLAG_BYTES + FLOAT_BYTES * num_columns


@dataclass(frozen=True)
class BatchSize:
    """The size of a step's batch."""

    tokens: int
    sequences: int
    max_length: int
    moved_share: float = 1.0  # of rows that are computed on a rank other than their home


def step_bytes(
    config: Config, requirements: Requirements, batch: BatchSize, routing: RoutingShape | None = None
) -> dict[str, int]:
    """Return the peak host memory, by part, of all ranks of a machine together, in bytes.

    The peak is that of the largest phase of `bytes_by_phase`, while the previous step is still being recorded. Engines
    are assumed to have equal shares of the batch. routing: None without replay.
    """
    largest = max(bytes_by_phase(config, requirements, batch, routing).values(), key=lambda parts: sum(parts.values()))
    if config.track.save_rollouts:
        token_bytes = TOKEN_BYTES + 2 * FLOAT_BYTES + _routing_bytes(routing) + _mask_bytes(config)
        recorded = _machine_share(config) * batch.tokens * token_bytes
        largest = largest | {"recording the step before": recorded + recording_bytes(config, batch, routing)}
    return {name: ceil(amount) for name, amount in largest.items()}


def checkpoint_copies(config: Config, states: Mapping[str, int], trained: Iterable[str]) -> dict[str, int]:
    """Return an upper bound on the bytes of a rank's copies of its models, by part.

    states: bytes of the trained roles' weights and optimizers, on the device and on the host.
    """
    names, run = [role.replace("_", " ") for role in trained], config.run
    if not (run.save_every and names):
        return {}
    weights, optimizer = (sum(states.get(f"{name} {part}", 0) for name in names) for part in ("weights", "optimizer"))
    # In fp32, weights on the device are their own masters, and are saved as both.
    optimizer = optimizer * 3 // 2 if config.model.dtype == "float32" else optimizer
    copied = weights + optimizer + sum(states.get(f"{name} {OFFLOADED_STATES}", 0) for name in names)
    num_copies = {PENDING_CHECKPOINT: int(run.save_async), MEMORY_CHECKPOINTS: count_memory_copies(config)}
    return {name: count * copied for name, count in num_copies.items() if count}


def count_memory_copies(config: Config) -> int:
    """Return how many copies of a rank's models `run.memory_save_every` needs.

    These are the files of two checkpoints, each of this rank and of one on another machine, and the copy that is being
    written into the second.
    """
    if not config.run.memory_save_every:
        return 0
    num_holders = min(2, config.parallel.world_size // _ranks_per_machine(config))
    return 2 * num_holders + config.run.save_async


def recording_bytes(config: Config, batch: BatchSize, routing: RoutingShape | None = None) -> float:
    """Return the working memory for recording a step, beside the recorded values themselves, in bytes."""
    home_ranks, extra_records = _num_home_ranks(config), 0.0
    if config.track.save_replay_data:
        extra_records = (_routing_bytes(routing) + _mask_bytes(config)) / (TOKEN_BYTES + 2 * FLOAT_BYTES)
    rank_tokens = _machine_share(config) * batch.tokens * (1 + extra_records) / home_ranks
    return home_ranks * RECORD_BYTES * min(RECORD_CHUNK_TOKENS, rank_tokens)


def bytes_by_phase(
    config: Config, requirements: Requirements, batch: BatchSize, routing: RoutingShape | None = None
) -> dict[str, dict[str, float]]:
    """Return host memory by phase and part, for the phases of a step that need most.

    Within a machine, rows are read in place. To another machine they are sent once, and as much is received.
    """
    machine_tokens, record = _machine_share(config) * batch.tokens, _routing_bytes(routing)
    parallel, machine_ranks, home_ranks = config.parallel, _ranks_per_machine(config), _num_home_ranks(config)
    machines = parallel.world_size // machine_ranks
    columns, mask_bytes = column_bytes(config, requirements), _mask_bytes(config)
    passes = max(1, config.run.num_update // config.run.ppo_epochs)
    mini_tokens, item_bytes = machine_tokens / passes, routing.dtype.itemsize if routing is not None else 1

    def base_parts(columns: int) -> dict[str, float]:
        """Return the rollouts and the batch. columns: bytes per token of the latter."""
        base = {
            "rollouts": machine_tokens * (TOKEN_BYTES + FLOAT_BYTES),
            "records of routing": machine_tokens * record,
        }
        if mask_bytes:  # the batch holds masks of all tokens in addition
            base["records of sampling"] = machine_tokens * mask_bytes * (2 if columns else 1)
        if config.rollout.asynchronous and config.rollout.max_staleness and not config.rollout.replay:
            pending = config.rollout.max_staleness * machine_tokens * (TOKEN_BYTES + FLOAT_BYTES + record + mask_bytes)
            base["rollouts of later steps"] = pending
        return base | {"columns of the batch": machine_tokens * columns}

    def pass_parts(rows: float, sent: int, row_bytes: int, record: int, mask_bytes: float) -> dict[str, float]:
        """Return the memory of a pass over rows: exchange buffers and micro-batches.

        Records are concatenated, sent, and concatenated again for a stage's layers. Then there is a current micro-batch
        while the next is being built, assuming equal micro-batches, as few as possible. A single rank sends nothing.

        mask_bytes: per token of sampling masks, which the last stages read.
        """
        stage = record / parallel.pp
        moved = (sent + record + mask_bytes) * batch.moved_share * (2 - 1 / machines)
        sending = rows * (moved + record + mask_bytes + (stage if parallel.pp > 1 else 0.0))
        received = rows * (moved + stage)
        rank = rows * (parallel.tp * parallel.cp * parallel.pp) / machine_ranks
        micro = min(rank, max(rank / ceil(rank / (config.train.max_tokens_per_gpu * parallel.cp)), batch.max_length))
        choices = stage * (1 + (EXPERT_CHOICE_BYTES / item_bytes - 1) / parallel.tp)
        picked = 2 * mask_bytes + MASK_PICK_BYTES * max(0.0, mask_bytes / FLOAT_BYTES - 1) + mask_bytes
        columns = 2 * (row_bytes + MICRO_BATCH_OVERHEAD) + 2 * INDEX_BYTES
        micro_bytes = machine_ranks * micro * (columns + choices + picked / (parallel.pp * parallel.cp))
        if parallel.world_size == 1:
            sending, received = 0.0, 0.0
        exchange, working = (sending, 0.0) if sending > received + micro_bytes else (received, micro_bytes)
        return {"buffers of exchanges": exchange, "micro-batches at work": working}

    if not requirements.trained_roles:
        return {"generating": base_parts(0)}
    initial_columns = TOKEN_BYTES + FLAG_BYTES + FLOAT_BYTES  # columns before the first forward pass
    num_forwards = sum(role in requirements.roles for role in ("actor", "reference", "critic"))
    reference_masks = mask_bytes if "reference" in requirements.roles else 0.0
    forwards = [  # the policy's, with replay, and the last one without replay
        base_parts(initial_columns + FLOAT_BYTES)
        | pass_parts(machine_tokens, TOKEN_BYTES, initial_columns, record, mask_bytes),
        base_parts(initial_columns + FLOAT_BYTES * num_forwards)
        | pass_parts(machine_tokens, TOKEN_BYTES, initial_columns, 0, reference_masks),
    ]
    mini_batches = machine_tokens * FLOAT_BYTES if passes == 1 else mini_tokens * (columns + FLOAT_BYTES)
    cutting = mini_batches if passes == 1 else mini_batches + mini_tokens * (columns + INDEX_BYTES)
    mini_columns = columns + FLOAT_BYTES
    phases = {
        "forward": max(forwards, key=lambda parts: sum(parts.values())),
        "cutting": base_parts(columns) | {"mini-batches": cutting},
        "update": base_parts(columns)
        | {"mini-batches": mini_batches}
        | pass_parts(mini_tokens, mini_columns, mini_columns, record, mask_bytes),
    }
    if "critic" in requirements.roles:
        steps = min(GAE_ELEMENTS, batch.max_length * batch.sequences * _machine_share(config) / home_ranks)
        block_bytes = 2 * FLOAT_BYTES * steps + TENSOR_VIEW_BYTES * batch.max_length
        rows = machine_tokens * (FLOAT_BYTES + INDEX_BYTES) + home_ranks * block_bytes
        phases["advantages"] = base_parts(columns) | {"functions of tokens": rows}
    return phases


def _ranks_per_machine(config: Config) -> int:
    return min(config.parallel.world_size, config.parallel.ranks_per_node)


def _num_home_ranks(config: Config) -> int:
    """Return the number of a machine's ranks that are home ranks of sequences."""
    return max(1, _ranks_per_machine(config) // config.rollout.tp)


def _machine_share(config: Config) -> float:
    """Return a machine's share of a step."""
    return _ranks_per_machine(config) / config.parallel.world_size


def _routing_bytes(routing: RoutingShape | None) -> int:
    return 0 if routing is None else len(routing.moe_layers) * routing.topk * routing.dtype.itemsize


def _mask_bytes(config: Config) -> float:
    """Return the bytes per token of sampling masks, a count and ids; 0 without truncated sampling."""
    return FLOAT_BYTES * (1 + max(0, config.rollout.top_k)) if config.rollout.has_truncated_sampling else 0.0
