"""Ranks and groups: torch.distributed, Megatron's process groups, and this rank's coordinates in them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist

from megarl.config import Config, ConfigError, ParallelConfig
from megarl.parallel import collectives, device, gloo_devices, job_secret, rendezvous
from megarl.parallel.context_parallel import context_sizes
from megarl.parallel.encoding import decode, encode
from megarl.parallel.placement import check_layout, is_on_megatron, placement_of, role_parallel
from megarl.parallel.wait_listeners import traced

T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """This rank's position in the job and on its machine."""

    rank: int
    world: int
    local_rank: int


@dataclass(frozen=True)
class ContextGroups:
    """Groups of the ranks of a pipeline stage that compute a micro-batch together."""

    cp: dist.ProcessGroup
    tp_cp: dist.ProcessGroup  # of all of their tensor parallel ranks


@dataclass(frozen=True)
class Ranks:
    """This rank's coordinates in a layout.

    tp shards dense parameters; ep distributes routed experts and etp shards them. A layout spans the ranks of one role,
    its members: `job.rank` numbers this rank within the job, `role_rank` within the members.
    """

    job: Job
    members: tuple[int, ...]
    """Job ranks of this layout, ascending."""
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
    dynamic_cp: bool = False

    @property
    def role_rank(self) -> int:
        """This rank's index among the members."""
        return self.members.index(self.job.rank)

    @property
    def host_group(self) -> dist.ProcessGroup:
        """Gloo group of the members, for values on the host."""
        return _hosts[self.members]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes that identify a layout, apart from its members."""
        return self.tp, self.cp, self.pp, self.vpp, self.ep, self.etp

    @property
    def context_groups(self) -> Mapping[int, ContextGroups]:
        """This rank's groups for each size of context parallelism: cp, and with dynamic_cp smaller ones."""
        globals_ = _layouts[self.members, self.sizes]
        whole = ContextGroups(globals_["_CONTEXT_PARALLEL_GROUP"], globals_["_TENSOR_AND_CONTEXT_PARALLEL_GROUP"])
        return {self.cp: whole} | (_context_groups[self.members, self.sizes] if self.dynamic_cp else {})

    def tp_size_and_rank(self, expert: bool) -> tuple[int, int]:
        """Return the number of tp shards of a parameter (of a routed expert or not), and this rank's shard index."""
        return (self.etp, self.etp_rank) if expert else (self.tp, self.tp_rank)


_host_group: dist.ProcessGroup | None = None
_timeout_s = 1800.0
_hosts: dict[tuple[int, ...], dist.ProcessGroup] = {}
"""Gloo groups by members, one for each set of ranks that has a layout."""
_layouts: dict[tuple[Any, ...], dict[str, Any]] = {}
"""Globals of Megatron's parallel_state by (members, sizes), one set per layout."""
_context_groups: dict[tuple[Any, ...], dict[int, ContextGroups]] = {}
"""Groups of each size below cp, likewise."""


def initialize(parallel: ParallelConfig, timeout_s: float = 1800.0) -> Ranks:
    """Join the job and build Megatron's groups over all of its ranks. Call once per process."""
    check_layout(parallel)
    join(parallel.world_size, timeout_s, parallel.ranks_per_gpu)
    return create_layout(parallel, timeout_s)


def join(world_size: int, timeout_s: float = 1800.0, ranks_per_gpu: int = 1) -> Job:
    """Join the process group that torchrun describes in the environment. Call once, before creating layouts.

    Raises ConfigError if another number of ranks was started, or as `device.check_sharing`.

    All ranks communicate once before this returns: NCCL creates a communicator on first use, which must not be an
    exchange in which not all ranks take part.
    """
    global _host_group, _timeout_s
    env = rendezvous.read_launch_env()
    if env.world != world_size:
        raise ConfigError(
            f"{env.world} ranks were started but parallel.world_size={world_size}: start as many, with "
            f"torchrun --nproc-per-node {world_size}, or without torchrun by megarl train"
        )
    import megarl.megatron  # noqa: F401  fits Megatron-Core to a machine without GPU, so it comes first

    device.set_device(ranks_per_gpu)
    job_secret.seal_object_collectives()
    if not env.is_launched:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "1"}
    gloo_devices.share_devices()
    timeout, _timeout_s = timedelta(seconds=timeout_s), timeout_s
    # Do not pass `device_id`, which creates NCCL communicators eagerly: torch 2.13 then makes ranks outside of a gloo
    # group take part in a split of NCCL's world that the ranks inside do not join.
    dist.init_process_group(
        device.backend(),
        store=rendezvous.connect_store(env, timeout),
        rank=env.rank,
        world_size=env.world,
        timeout=timeout,
    )
    warm_up_group()
    _host_group = _hosts[tuple(range(env.world))] = dist.new_group(backend="gloo", timeout=timeout)
    return _job()


def adopt_world() -> Job:
    """Use the process group that exists already, which must be torch's `fake` one, for a rehearsal."""
    global _host_group
    _host_group = _hosts[tuple(range(dist.get_world_size()))] = dist.new_group(backend="gloo")
    return _job()


def _job() -> Job:
    rank = dist.get_rank()
    return Job(rank, dist.get_world_size(), int(os.environ.get("LOCAL_RANK", str(rank))))


def warm_up_group(group: dist.ProcessGroup | None = None) -> None:
    """Run one collective over a group (default: the job) on the device, so that its communicator exists."""
    total = torch.ones(1, device=device.device())
    dist.all_reduce(total, group=group)
    if not device.is_rehearsal() and int(total) != dist.get_world_size(group):
        raise RuntimeError(f"{int(total)} of {dist.get_world_size(group)} ranks have joined")


def is_first_report(text: str) -> bool | None:
    """Return whether this rank is the first of the job to report this text; None if no store can be asked."""
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
    """Return this rank's coordinates in a layout of `members` (default: all ranks of the job), or None outside of it.

    parallel: its world_size is the number of members. Groups are created the first time that a layout is requested.
    Collective over all ranks of the job, also over those outside. Megatron stays in the first layout that this rank is
    in; `use_layout` switches to another.
    """
    from megatron.core import parallel_state, tensor_parallel

    check_layout(parallel)
    job, member_ranks = _job(), tuple(range(dist.get_world_size()) if members is None else members)
    if (
        list(member_ranks) != sorted(set(member_ranks) & set(range(job.world)))
        or len(member_ranks) != parallel.world_size
    ):
        raise ConfigError(
            f"a layout of {parallel.world_size} of the job's {job.world} ranks cannot be on {member_ranks}"
        )
    sizes = (parallel.tp, parallel.cp, parallel.pp, parallel.vpp, parallel.ep, parallel.etp)
    key, is_member = (member_ranks, sizes), job.rank in member_ranks
    if member_ranks not in _hosts:
        _hosts[member_ranks] = new_host_group(member_ranks)
    previous = _group_globals(parallel_state)
    without_groups = _layouts.setdefault((), previous)
    vars(parallel_state).update(_layouts.get(key, without_groups))
    if key not in _layouts:
        with use_member_groups(member_ranks):
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
        _set_timeouts(timeout_s)  # Megatron creates some groups with torch's default
        if is_member and parallel.pp > 1:  # other groups only run collectives of all their ranks
            warm_up_group(parallel_state.get_pipeline_model_parallel_group())
        if is_member and not tensor_parallel.get_cuda_rng_tracker().get_states():
            tensor_parallel.model_parallel_cuda_manual_seed(1)
    if parallel.dynamic_cp and key not in _context_groups:
        _context_groups[key] = _create_context_groups(member_ranks, parallel)
    ranks = None
    if is_member:
        ranks = Ranks(
            job=job,
            members=member_ranks,
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
            dynamic_cp=parallel.dynamic_cp,
        )
    if not is_member or previous["_DATA_PARALLEL_GROUP"] is not None:
        vars(parallel_state).update(previous)
    return ranks


def _create_context_groups(members: Sequence[int], parallel: ParallelConfig) -> dict[int, ContextGroups]:
    """Divide each context parallel group of the members into groups of each smaller size. Collective over the job.

    Returns this rank's groups by size. Megatron numbers ranks by tp and cp, the first fastest, before all others.
    """
    rank, timeout, result = dist.get_rank(), timedelta(seconds=_timeout_s), dict[int, ContextGroups]()
    for size in context_sizes(parallel.cp)[:-1]:
        for start in range(0, len(members), size * parallel.tp):
            block = members[start : start + size * parallel.tp]
            together = dist.new_group(block, timeout=timeout)
            for first in range(parallel.tp):
                group = dist.new_group(block[first :: parallel.tp], timeout=timeout) if parallel.tp > 1 else together
                if rank in block[first :: parallel.tp]:
                    result[size] = ContextGroups(group, together)
    return result


@contextmanager
def use_layout(ranks: Ranks) -> Iterator[None]:
    """Switch Megatron, whose groups are module globals, to the layout of `ranks` within the block."""
    from megatron.core import parallel_state

    previous = _group_globals(parallel_state)
    vars(parallel_state).update(_layouts[ranks.members, ranks.sizes])
    try:
        yield
    finally:
        vars(parallel_state).update(previous)


def set_context_groups(groups: ContextGroups) -> None:
    """Switch Megatron to these context parallel groups, until the end of `use_layout`."""
    from megatron.core import parallel_state

    vars(parallel_state).update(
        _CONTEXT_PARALLEL_GROUP=groups.cp,
        _CONTEXT_PARALLEL_GLOBAL_RANKS=dist.get_process_group_ranks(groups.cp),
        _TENSOR_AND_CONTEXT_PARALLEL_GROUP=groups.tp_cp,
    )


@contextmanager
def use_member_groups(members: Sequence[int]) -> Iterator[None]:
    """Make `initialize_model_parallel` create groups of `members` (job ranks, ascending) within the block.

    Megatron takes the members for the whole job: the ranks that its RankGenerator lists are indices of the members. All
    ranks of the job must enter, because creating a group is collective over the job.
    """
    from megatron.core import parallel_state

    class AmongMembers(parallel_state.RankGenerator):  # type: ignore[misc]
        def get_ranks(self, token: str) -> list[list[int]]:
            return [[members[index] for index in indices] for indices in super().get_ranks(token)]

    generator, world_size = parallel_state.RankGenerator, dist.get_world_size

    def size(group: Any = None) -> int:
        return len(members) if group is None else world_size(group)

    parallel_state.RankGenerator = AmongMembers
    dist.get_world_size = size  # Megatron calls the package's function; torch's own modules do not
    try:
        yield
    finally:
        parallel_state.RankGenerator, dist.get_world_size = generator, world_size


@contextmanager
def use_member_world() -> Iterator[None]:
    """Make the members of Megatron's current layout torch's default group within the block, with ranks from 0.

    For code without a group of its own: distributed checkpoints, and the optimizer's parameter groups. Groups with job
    rank numbers must not be used within the block.
    """
    from megatron.core import parallel_state

    # Megatron has a single instance here.
    member_group = parallel_state.get_intra_distributed_optimizer_instance_group()
    if member_group.size() == dist.get_world_size():
        yield
        return
    group_ranks = dist.distributed_c10d._world.pg_group_ranks
    previous = dist.GroupMember.WORLD, group_ranks[member_group]
    role_ranks = {rank: rank for rank in range(member_group.size())}
    dist.GroupMember.WORLD, group_ranks[member_group] = member_group, role_ranks
    try:
        yield
    finally:
        dist.GroupMember.WORLD, group_ranks[member_group] = previous


def _group_globals(parallel_state: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(parallel_state).items() if name.startswith("_") and name.isupper()}


@contextmanager
def with_timeout(seconds: float) -> Iterator[None]:
    """Use this timeout instead of `run.distributed_timeout_s` for collectives of all groups within the block.

    For host work that some ranks do while others wait: generating, loading, saving. A dead peer is still noticed at
    once, because its connections close; a hanging one after `seconds`. All ranks must enter together. The previous
    timeout is restored at the end of the block, also of a nested one.
    """
    global _timeout_s
    previous_s, _timeout_s = _timeout_s, seconds
    try:
        _set_timeouts(seconds)
        yield
    finally:
        _timeout_s = previous_s
        _set_timeouts(previous_s)


def current_timeout() -> float:
    """Return the timeout of waits for other ranks in seconds: that of `with_timeout` or `run.distributed_timeout_s`."""
    return _timeout_s


def _set_timeouts(seconds: float) -> None:
    # Public since torch 2.14.
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    for group in list(dist.distributed_c10d._world.pg_map):
        set_timeout(timedelta(seconds=seconds), group)


def set_flag(name: str) -> None:
    """Set a flag for ranks that are busy outside of collectives; they poll it with `is_flag_set`."""
    dist.distributed_c10d._get_default_store().set(name, "raised")


def is_flag_set(name: str) -> bool:
    """Return whether any rank has set the flag `name`."""
    return bool(dist.distributed_c10d._get_default_store().check([name]))


def add_to_counter(name: str, amount: int) -> int:
    """Add `amount` to a counter shared by all ranks, which starts at 0, and return its new value. Atomic."""
    store = dist.distributed_c10d._get_default_store()
    if not amount:  # a file store grows with every write
        return int(store.get(name)) if store.check([name]) else 0
    return int(store.add(name, amount))


def host_group() -> dist.ProcessGroup:
    """Return the gloo group of all ranks, for values on the host. Raises RuntimeError before `initialize`."""
    if _host_group is None:
        raise RuntimeError("megarl.parallel.ranks.initialize has not run")
    return _host_group


def layout_group(members: tuple[int, ...]) -> dist.ProcessGroup:
    """Return the gloo group of the members of a layout."""
    return _hosts[members]


def new_host_group(members: Iterable[int]) -> dist.ProcessGroup:
    """Create a gloo group of some ranks. Collective over all ranks."""
    return dist.new_group(list(members), backend="gloo", timeout=timedelta(seconds=_timeout_s))


def node_address() -> str:
    """Return this machine's address as the job's other ranks see it: that of the interface towards MASTER_ADDR.

    The host name may resolve to another interface, or to the same address on two nodes. Raises ConfigError for a public
    address.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 9))  # UDP: sends nothing
        address = str(probe.getsockname()[0])
    rendezvous.check_private("this node's address towards MASTER_ADDR", address)
    return address


# The following collectives run over all ranks of the job, or over `group`, a host group with its own ranks from 0.


@traced("wait")
def all_gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return every rank's value, by rank: plain data on the host, see `encoding.py`.

    Raises ForgedError for a value that does not come from a rank of this job.
    """
    group = group or host_group()
    if device.is_rehearsal():  # there are no peers to ask: they say the same
        dist.barrier(group=group)
        return [value] * group.size()
    data = _sealed(value, group.rank())
    shares = collectives.ragged_all_gather(data, group, _timeout_s)
    return [_unsealed(share, rank) for rank, share in enumerate(shares)]


def _sealed(value: Any, rank: int) -> torch.Tensor:
    """Return the encoded and authenticated value as [bytes] uint8."""
    return torch.frombuffer(bytearray(job_secret.seal(encode(value), f"rank {rank}")), dtype=torch.uint8)


def _unsealed(data: torch.Tensor, rank: int) -> Any:
    return decode(job_secret.unseal(data.numpy().data, f"rank {rank}"))


def split_work(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Compute work(0), ..., work(count - 1) distributed over the job's ranks and return all results on every rank.

    A ConfigError on any rank is raised on all.
    """
    rank, world, results, problem = dist.get_rank(), dist.get_world_size(), [], None
    try:
        for number in range(rank, count, world):
            results.append(work(number))
    except ConfigError as error:
        problem = (number, str(error))
    outcomes = all_gather_objects((results, problem))
    if problems := [failure for _, failure in outcomes if failure]:
        raise ConfigError(min(problems)[1])
    return [outcomes[number % world][0][number // world] for number in range(count)]


@traced("wait")
def broadcast_object(value: Any, source: int = 0, group: dist.ProcessGroup | None = None) -> Any:
    """Return the source rank's value on every rank. Takes the same values as `all_gather_objects`."""
    group = group or host_group()
    if device.is_rehearsal():
        dist.barrier(group=group)
        return value
    is_source = group.rank() == source
    data = _sealed(value, source) if is_source else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([len(data)])
    dist.broadcast(size, group_src=source, group=group)
    if not is_source:
        data = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, group_src=source, group=group)
    return value if is_source else _unsealed(data, source)


def run_on_all(
    work: Callable[[], T], rank_zero_only: bool = False, group: dist.ProcessGroup | None = None
) -> list[T | None]:
    """Run `work` on each rank, or with `rank_zero_only` on rank 0 only, and return all results by rank on every rank.

    An OSError or ConfigError on one rank is raised on all of them, as the same kind, so that no rank is left waiting.
    """
    result: T | None = None
    error = "", ""
    if is_lead(group) or not rank_zero_only:
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
    """Return whether this is rank 0, which writes what is written once."""
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
        _context_groups.clear()
        _hosts.clear()
    _host_group = None


def create_role_layouts(config: Config, roles: Collection[str]) -> dict[str, Ranks | None]:
    """Return this rank's coordinates in the layout of each role with a model on Megatron. Collective over the job."""
    placement = placement_of(config)
    return {
        role: create_layout(role_parallel(config, role), config.run.distributed_timeout_s, placement.ranks_of(role))
        for role in roles
        if is_on_megatron(config, role)
    }
