"""The layouts of a configuration's roles, each on its own ranks."""

from __future__ import annotations

from collections.abc import Collection

from megarl.config import Config
from megarl.parallel import ranks
from megarl.parallel.placement import placement_of, role_parallel
from megarl.parallel.roles import on_megatron


def lay_out(config: Config, roles: Collection[str]) -> dict[str, ranks.Ranks | None]:
    """This rank's place in the layout of each role with a model on Megatron. Collective over the job."""
    placement = placement_of(config)
    return {
        role: ranks.layout(role_parallel(config, role), config.run.timeout_s, placement.of(role))
        for role in roles
        if on_megatron(config, role)
    }
