"""A job of any size in which one process plays one rank, and nobody else exists.

torch's `fake` process groups return at once. Collectives of device tensors are recorded. What ranks tell each other on
the host is real as far as it is known: every other rank says what this one says (`ranks.all_gather_objects`).
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megarl.parallel import device, ranks
from megarl.rehearse import comm_recorder
from megarl.rehearse.comm_recorder import CommRecorder
from megarl.rehearse.rank_kinds import Family


class FakeJob:
    """The record of this process: its communication, and the groups of all ranks by family.

    A family has the groups that the ranks create by one kind of call, such as all tensor parallel groups. They are
    disjoint; groups of another layout are a family of their own.
    """

    def __init__(self, recorder: CommRecorder) -> None:
        self.recorder = recorder
        self._groups: dict[str, list[tuple[int, ...]]] = {}
        self._is_host: dict[str, bool] = {}
        self._members: dict[str, set[int]] = {}
        self._names: dict[str, str] = {}
        """Family of this rank's groups, by torch's name of the group."""

    def add_group(self, description: str, members: tuple[int, ...], is_host: bool) -> str:
        """Add a group and return the name of its family."""
        name, number = description, 1
        while not self._members.get(name, set()).isdisjoint(members):
            number += 1
            name = f"{description} ({number})"
        self._groups.setdefault(name, []).append(members)
        self._members.setdefault(name, set()).update(members)
        self._is_host[name] = is_host
        return name

    def set_name(self, group: Any, family: str) -> None:
        self._names[group.group_name] = family

    @property
    def families(self) -> dict[str, Family]:
        return {name: Family(tuple(groups), self._is_host[name]) for name, groups in self._groups.items()}

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events of `CommRecorder`, with the names of families as groups."""
        return [
            event | {"group": self._names[event["group"]]} if event["do"] == "post" else event
            for event in self.recorder.events
        ]


def prepare() -> None:
    """Patch torch and Megatron for ranks without a GPU. Once per process, before importing `megarl.megatron`."""
    from megarl.cpu import megatron_platform
    from megarl.rehearse import peak_memory, te_modules

    device.rehearse()
    te_modules.install()
    megatron_platform.install_for_rehearsal(peak_memory.fuse)
    dist.Backend.backend_capability["fake"].append("meta")
    dist.Backend.default_device_backend_map["meta"] = "fake"
    warnings.filterwarnings("ignore", "Set timeout is now only supported")


def join(rank: int, world: int, ranks_per_node: int) -> FakeJob:
    """Make this process the rank `rank` of `world`. Once per process, after `prepare`."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank % ranks_per_node)}
    os.environ["MASTER_ADDR"] = "127.0.0.1"  # of engines, which do not start
    new_group = dist.new_group

    def new_fake_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *_: Any, **options: Any) -> Any:
        members = tuple(range(world)) if ranks is None else tuple(sorted(ranks))  # as torch does
        family = job.add_group(options.get("group_desc") or "HOSTS", members, backend == "gloo")
        if rank not in members:
            return dist.GroupMember.NON_GROUP_MEMBER
        group = new_group(list(members), backend="fake", group_desc=family)
        job.set_name(group, family)
        return group

    dist.new_group = dist.distributed_c10d.new_group = new_fake_group
    job = FakeJob(comm_recorder.install(guards_buffers=False))  # tensors have no addresses
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    job.set_name(dist.group.WORLD, job.add_group("WORLD", tuple(range(world)), False))
    ranks.adopt_world()
    return job
