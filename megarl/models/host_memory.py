"""Bytes that a step's values take on the host, by part: pure arithmetic over a configuration.

What a rollout is made of stays on the rank that made it, and so do the columns of its tokens; a model is sent the rows
that it computes. So a machine holds its share of a step whatever the number of machines is, and what is under way
between ranks beside it. Sizes of messages and texts are not known before there are some, and are left out; so is what
the allocator of a process keeps of what was given back.
"""

from __future__ import annotations

from math import ceil

from megarl.config import Config
from megarl.models.routing import RoutingShape
from megarl.types.declared import Declared

TOKEN, NUMBER, FLAG = 4, 4, 1
"""Bytes of a token's id, of a number about a token, and of whether it is trained on."""
INDEX = 24
"""Bytes a token while a mini-batch is cut out: where it is, and the two terms that this is the sum of."""
PART = 1 << 20
"""Tokens of the part of a record that a rank writes at a time, see `observe.rollout_log`."""
RECORDED = 2 * (TOKEN + 2 * NUMBER)
"""Bytes a token of such a part, with log-prob and advantage: as columns, and as they are encoded."""


def column_bytes(declared: Declared) -> int:
    """Of a batch's columns when it is trained on, a token: ids and mask, log-probs of the engine and of the policy, of
    the reference where there is one, advantages, and with a critic values, rewards and returns."""
    numbers = 3 + ("reference" in declared.roles) + (3 if "critic" in declared.roles else 0)
    return TOKEN + FLAG + NUMBER * numbers


def step_bytes(config: Config, declared: Declared, tokens: int, routing: RoutingShape | None = None) -> dict[str, int]:
    """What all ranks of a machine hold together at most, by part, in a step of `tokens` tokens whose engines had equal
    shares of them. routing: of the records that are replayed, none by default.

    The parts are there at the same time, in an update. Rows go once to a machine that wants them, and within it they
    are read where they lie.
    """
    parallel = config.parallel
    here = min(parallel.world_size, parallel.ranks_per_node)
    machines = -(-parallel.world_size // here)
    own = tokens / machines
    record = 0 if routing is None else len(routing.moe_layers) * routing.topk * routing.dtype.itemsize
    columns = column_bytes(declared)
    cut = max(1, config.run.num_update // config.run.epochs)  # mini-batches of a pass
    mini = own / cut
    found = {
        "rollouts": own * (TOKEN + NUMBER),
        "records of routing": own * record,
        "columns of the batch": own * columns,
        # While one is cut out its predecessor is still there.
        "mini-batches": mini * (2 * (columns + NUMBER) + INDEX) if cut > 1 else own * NUMBER,
    }
    # What an update sends is laid together, records after they were joined; as much comes from other machines as goes.
    # On one rank nothing is, but its functions of tokens need about as much.
    found["buffers of exchanges"] = mini * ((columns + NUMBER + record) * (2 - 1 / machines) + record)
    longest = max(config.train.token_budget * parallel.cp, config.rollout.max_context)
    # The micro-batch at work: its rows laid together, and ids, positions, targets and places of tokens in 8 bytes.
    found["micro-batches at work"] = min(here * longest, tokens) * (columns + NUMBER + 5 * 8)
    if config.track.rollouts:
        found["recording the step before"] = own * (TOKEN + 2 * NUMBER + record) + here * RECORDED * min(
            PART, own / here
        )
    return {name: ceil(amount) for name, amount in found.items()}
