"""Ranks and groups: torch.distributed, Megatron's process groups, and this rank's coordinates in them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist

from megarl.config import Config, ConfigError, ParallelConfig
from megarl.parallel import collectives, device, job_secret, rendezvous
from megarl.parallel.encoding import decode, encode
from megarl.parallel.placement import check_layout, placement_of, role_parallel
from megarl.parallel.rank_subset import use_member_groups
from megarl.parallel.role_settings import is_on_megatron
from megarl.parallel.wait_listeners import traced

T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """This rank among all ranks of the job, and on its machine."""

    rank: int
    world: int
    local_rank: int


@dataclass(frozen=True)
class Ranks:
    """This rank's coordinates in a layout. Dense parameters are cut by tp, routed experts dealt out by ep and cut by
    etp. A layout is of some ranks of the job, its members, which are those of a role: `job.rank` is this rank's number
    among all, `role_rank` among the members."""

    job: Job
    members: tuple[int, ...]
    """The job's numbers of the ranks in this layout, ascending."""
    tp: int
    tp_rank: int
    pp: int
    pp_rank: int
    ep: int
    ep_rank: int
    dp: int
    dp_rank: int
    cp: int = 1
    cp_rank: int = 0
    etp: int = 1
    etp_rank: int = 0
    vpp: int = 1

    @property
    def role_rank(self) -> int:
        """This rank's number among the members."""
        return self.members.index(self.job.rank)

    @property
    def role_world(self) -> int:
        return len(self.members)

    @property
    def host_group(self) -> dist.ProcessGroup:
        """A gloo group of the members, for host values."""
        return _hosts[self.members]

    @property
    def sizes(self) -> tuple[int, ...]:
        """What a layout is, apart from its ranks."""
        return self.tp, self.cp, self.pp, self.vpp, self.ep, self.etp

    def tp_size_and_rank(self, expert: bool) -> tuple[int, int]:
        """In how many parts a routed expert's parameter, or another, is cut, and which of them this rank has."""
        return (self.etp, self.etp_rank) if expert else (self.tp, self.tp_rank)


_host_group: dist.ProcessGroup | None = None
_timeout_s = 1800.0
_hosts: dict[tuple[int, ...], Any] = {}
"""Gloo groups by their members, of each set of ranks that has a layout."""
_layouts: dict[tuple[Any, ...], dict[str, Any]] = {}
"""Megatron's groups of each layout, as the globals of its parallel_state, by its members and sizes."""


def initialize(parallel: ParallelConfig, timeout_s: float = 1800.0) -> Ranks:
    """Join the job and build Megatron's groups over all of its ranks. Once per process."""
    check_layout(parallel)
    join(parallel.world_size, timeout_s)
    return create_layout(parallel, timeout_s)


def join(world_size: int, timeout_s: float = 1800.0) -> Job:
    """Join the process group that torchrun describes in the environment. Once per process; layouts come after.

    All ranks talk once before this returns: NCCL makes a group when it is first used, which must not be a push of
    weights or a pipeline's exchange, in which not all of its ranks may take part.
    """
    global _host_group, _timeout_s
    here = rendezvous.read_launch_env()
    if here.world != world_size:
        raise ConfigError(
            f"{here.world} ranks were started but parallel.world_size={world_size}: start as many, with "
            f"torchrun --nproc-per-node {world_size}, or without torchrun by python -m megarl.train"
        )
    import megarl.megatron  # noqa: F401  fits Megatron-Core to a machine without GPU, so it comes first

    device.set_device()
    job_secret.seal_object_collectives()
    if not here.is_launched:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "1"}
    timeout, _timeout_s = timedelta(seconds=timeout_s), timeout_s
    # Not `device_id`, by which NCCL's groups are made at once: with it, torch 2.13 has the ranks outside of a gloo
    # group take part in a split of NCCL's world that those in it know nothing of.
    dist.init_process_group(
        device.backend(),
        store=rendezvous.connect_store(here, timeout),
        rank=here.rank,
        world_size=here.world,
        timeout=timeout,
    )
    warm_up_group()
    _host_group = _hosts[tuple(range(here.world))] = dist.new_group(backend="gloo", timeout=timeout)
    return _job()


def _job() -> Job:
    rank = dist.get_rank()
    return Job(rank, dist.get_world_size(), int(os.environ.get("LOCAL_RANK", str(rank))))


def warm_up_group(group: dist.ProcessGroup | None = None) -> None:
    """All ranks of a group, or of the job, talk to each other once, on the device."""
    total = torch.ones(1, device=device.device())
    dist.all_reduce(total, group=group)
    if int(total) != dist.get_world_size(group):
        raise RuntimeError(f"{int(total)} of {dist.get_world_size(group)} ranks have met")


def is_first_report(text: str) -> bool | None:
    """Whether this rank is the first of all to ask with this text; None where there is nobody to ask."""
    if not dist.is_initialized():
        return None
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set_timeout(timedelta(seconds=5))
        return bool(store.add(f"said {text}", 1) == 1)
    except RuntimeError:
        return None


@overload
def create_layout(parallel: ParallelConfig, timeout_s: float = 1800.0) -> Ranks: ...
@overload
def create_layout(parallel: ParallelConfig, timeout_s: float, members: Sequence[int]) -> Ranks | None: ...
def create_layout(
    parallel: ParallelConfig, timeout_s: float = 1800.0, members: Sequence[int] | None = None
) -> Ranks | None:
    """This rank's coordinates in a layout of `members`, by default of all ranks of the job; None outside of them.

    parallel: with the members' number as world_size. Its groups are made where nobody has asked for this layout yet.
    Collective over all ranks of the job, also over those outside. Megatron goes on in the first layout that this rank
    is in; `use_layout` changes to another.
    """
    from megatron.core import parallel_state, tensor_parallel

    check_layout(parallel)
    job, chosen = _job(), tuple(range(dist.get_world_size()) if members is None else members)
    if list(chosen) != sorted(set(chosen) & set(range(job.world))) or len(chosen) != parallel.world_size:
        raise ConfigError(f"a layout of {parallel.world_size} of the job's {job.world} ranks cannot be on {chosen}")
    sizes = (parallel.tp, parallel.cp, parallel.pp, parallel.vpp, parallel.ep, parallel.etp)
    key, inside = (chosen, sizes), job.rank in chosen
    if chosen not in _hosts:
        _hosts[chosen] = new_host_group(chosen)
    before = _group_globals(parallel_state)
    if not _layouts:
        _layouts[()] = before  # of a Megatron that knows of no groups
    vars(parallel_state).update(_layouts.get(key, _layouts[()]))
    if key not in _layouts:
        with use_member_groups(chosen):
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=parallel.tp,
                pipeline_model_parallel_size=parallel.pp,
                virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
                context_parallel_size=parallel.cp,
                expert_model_parallel_size=parallel.ep,
                expert_tensor_parallel_size=parallel.etp,
                distributed_timeout_minutes=max(1, int(timeout_s // 60)),
            )
        _layouts[key] = _group_globals(parallel_state)
        _set_timeouts(list(dist.distributed_c10d._world.pg_map), timeout_s)  # Megatron makes some with torch's own
        if inside and parallel.pp > 1:  # the others are for collectives of all their ranks
            warm_up_group(parallel_state.get_pipeline_model_parallel_group())
        if inside and not tensor_parallel.get_cuda_rng_tracker().get_states():
            tensor_parallel.model_parallel_cuda_manual_seed(1)
    ranks = _coordinates(parallel_state, parallel, job, chosen) if inside else None
    if not inside or before["_DATA_PARALLEL_GROUP"] is not None:
        vars(parallel_state).update(before)
    return ranks


def _coordinates(parallel_state: Any, parallel: ParallelConfig, job: Job, members: tuple[int, ...]) -> Ranks:
    """Of this rank in the layout that Megatron is in."""
    return Ranks(
        job=job,
        members=members,
        tp=parallel.tp,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp=parallel.pp,
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        ep=parallel.ep,
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        dp=parallel_state.get_data_parallel_world_size(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        cp=parallel.cp,
        cp_rank=parallel_state.get_context_parallel_rank(),
        etp=parallel.etp,
        etp_rank=parallel_state.get_expert_tensor_parallel_rank(),
        vpp=parallel.vpp,
    )


@contextmanager
def use_layout(ranks: Ranks) -> Iterator[None]:
    """Within the block Megatron works in the layout of `ranks`, which has its groups in module globals."""
    from megatron.core import parallel_state

    before = _group_globals(parallel_state)
    vars(parallel_state).update(_layouts[ranks.members, ranks.sizes])
    try:
        yield
    finally:
        vars(parallel_state).update(before)


def _group_globals(parallel_state: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(parallel_state).items() if name.startswith("_") and name.isupper()}


@contextmanager
def with_timeout(seconds: float) -> Iterator[None]:
    """Within the block collectives of all groups wait for their peers for so long, instead of `run.timeout_s`.

    For work on the host that some ranks do while others wait: generating, loading, saving. A peer that dies is noticed
    at once all the same, because its connections close; one that hangs is after `seconds`. Entered by all ranks alike;
    a block within another ends with the other's patience.
    """
    global _timeout_s
    before, _timeout_s = _timeout_s, seconds
    try:
        _set_timeouts(list(dist.distributed_c10d._world.pg_map), seconds)
        yield
    finally:
        _timeout_s = before
        _set_timeouts(list(dist.distributed_c10d._world.pg_map), before)


def current_timeout() -> float:
    """Seconds that a wait for another rank may take at the moment: `run.timeout_s`, or what `with_timeout` says."""
    return _timeout_s


def _set_timeouts(groups: Iterable[dist.ProcessGroup], seconds: float) -> None:
    for group in groups:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def set_flag(name: str) -> None:
    """Tell ranks that are busy, and in no collective meanwhile; they hear of it where they look, see `is_flag_set`."""
    dist.distributed_c10d._get_default_store().set(name, "raised")


def is_flag_set(name: str) -> bool:
    """Whether some rank has raised the alarm of this name."""
    return bool(dist.distributed_c10d._get_default_store().check([name]))


def add_to_counter(name: str, more: int) -> int:
    """What a counter of all ranks is with so many more, from 0 on; one step, whoever counts at the same time."""
    store = dist.distributed_c10d._get_default_store()
    if not more:  # a store that is a file grows by what is written to it
        return int(store.get(name)) if store.check([name]) else 0
    return int(store.add(name, more))


def host_group() -> dist.ProcessGroup:
    """A gloo group of all ranks, for host values; raises where `initialize` has not run."""
    if _host_group is None:
        raise RuntimeError("megarl.parallel.ranks.initialize has not run")
    return _host_group


def layout_group(members: tuple[int, ...]) -> dist.ProcessGroup:
    """The gloo group of ranks that have a layout together."""
    group: dist.ProcessGroup = _hosts[members]
    return group


def new_host_group(members: Iterable[int]) -> dist.ProcessGroup:
    """A gloo group of some ranks; collective over all ranks."""
    return dist.new_group(list(members), backend="gloo", timeout=timedelta(seconds=_timeout_s))


def node_address() -> str:
    """This machine's address as the others of the job see it: that of the interface towards MASTER_ADDR.

    Not the host name's, which may be that of another interface, or the same on two nodes. Raises ConfigError where it
    is one of the public internet.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 9))  # UDP: nothing is sent
        address = str(probe.getsockname()[0])
    rendezvous.check_private("this node's address towards MASTER_ADDR", address)
    return address


def free_port() -> int:
    """A port of this machine that nobody has at the moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


# What follows is said among all ranks of the job, or among those of `group`, a host group, which count from 0 in it.


@traced("wait")
def all_gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's value, by rank, on every rank: plain data of the host, see `encoding.py`. Raises ForgedError where
    one does not come from a rank of this job."""
    group = group or host_group()
    data = _sealed(value, group.rank())
    shares = collectives.ragged_all_gather(data, group, _timeout_s)
    return [_unsealed(share, rank) for rank, share in enumerate(shares)]


def _sealed(value: Any, rank: int) -> torch.Tensor:
    """[bytes] uint8."""
    return torch.frombuffer(bytearray(job_secret.seal(encode(value), f"rank {rank}")), dtype=torch.uint8)


def _unsealed(data: torch.Tensor, rank: int) -> Any:
    return decode(job_secret.unseal(data.numpy().data, f"rank {rank}"))


def split_work(count: int, work: Callable[[int], Any]) -> list[Any]:
    """work(0), work(1), ... work(count - 1), each done by one of the job's ranks, on every rank. A ConfigError of any
    of them is raised on all."""
    rank, world, mine, problem = dist.get_rank(), dist.get_world_size(), [], None
    try:
        for number in range(rank, count, world):
            mine.append(work(number))
    except ConfigError as error:
        problem = (number, str(error))
    everyone = all_gather_objects((mine, problem))
    if problems := [found for _, found in everyone if found]:
        raise ConfigError(min(problems)[1])
    return [everyone[number % world][0][number // world] for number in range(count)]


@traced("wait")
def broadcast_object(value: Any, source: int = 0, group: dist.ProcessGroup | None = None) -> Any:
    """The source rank's value on every rank; as `all_gather_objects`."""
    group = group or host_group()
    is_source = group.rank() == source
    data = _sealed(value, source) if is_source else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([len(data)])
    dist.broadcast(size, group_src=source, group=group)
    if not is_source:
        data = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, group_src=source, group=group)
    return value if is_source else _unsealed(data, source)


def run_on_all(work: Callable[[], T], lead: bool = False, group: dist.ProcessGroup | None = None) -> list[T | None]:
    """What `work` returns on each rank, by rank, on every rank; with `lead` it is done on rank 0 alone.

    An OSError or ConfigError on one rank is raised on all of them, as one of its kind: nobody is left waiting.
    """
    result: T | None = None
    error = "", ""
    if is_lead(group) or not lead:
        try:
            result = work()
        except OSError as failure:
            what = failure.strerror or str(failure)
            error = "OSError", f"{what}: {failure.filename}" if failure.filename else what
        except ConfigError as failure:
            error = "ConfigError", str(failure)
    outcomes = all_gather_objects((result, error), group)
    for _, (kind, text) in outcomes:
        if kind:
            raise {"OSError": OSError, "ConfigError": ConfigError}[kind](text)
    return [value for value, _ in outcomes]


def is_lead(group: dist.ProcessGroup | None = None) -> bool:
    """Whether this is rank 0, which writes what is written once."""
    return (group or host_group()).rank() == 0


@traced("wait")
def barrier(group: dist.ProcessGroup | None = None) -> None:
    dist.barrier(group=group or host_group())


def shutdown() -> None:
    """Leave the process group, if this process is in one."""
    global _host_group
    if dist.is_initialized():
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        _layouts.clear()
        _hosts.clear()
    _host_group = None


def create_role_layouts(config: Config, roles: Collection[str]) -> dict[str, Ranks | None]:
    """This rank's place in the layout of each role with a model on Megatron. Collective over the job."""
    placement = placement_of(config)
    return {
        role: create_layout(role_parallel(config, role), config.run.timeout_s, placement.ranks_of(role))
        for role in roles
        if is_on_megatron(config, role)
    }
