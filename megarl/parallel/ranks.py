"""Who sits where: torch.distributed, Megatron's process groups, and this rank's coordinates in them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megarl import strict
from megarl.config import ConfigError, ParallelConfig
from megarl.parallel import device, meeting

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This rank's coordinates. Dense parameters are cut by tp, routed experts dealt out by ep and cut by etp."""

    rank: int
    world: int
    local_rank: int
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
    def sizes(self) -> tuple[int, ...]:
        """What a layout is, apart from the number of ranks."""
        return self.tp, self.cp, self.pp, self.vpp, self.ep, self.etp

    def grid(self, expert: bool) -> tuple[int, int]:
        """In how many parts a routed expert's parameter, or another, is cut, and which of them this rank has."""
        return (self.etp, self.etp_rank) if expert else (self.tp, self.tp_rank)


_host_group: dist.ProcessGroup | None = None
_timeout_s = 1800.0
_layouts: dict[tuple[int, ...], dict[str, Any]] = {}
"""Megatron's groups of each layout, as the globals of its parallel_state, by its sizes."""


def check_layout(parallel: ParallelConfig) -> None:
    """Raise ConfigError where the layout does not divide the world; says what would."""
    strict.check(parallel, "parallel.")
    sizes = {"tp": parallel.tp, "cp": parallel.cp, "pp": parallel.pp}
    shown = {name: size for name, size in sizes.items() if name != "cp" or size > 1}
    model_parallel = prod(sizes.values())
    if parallel.world_size % model_parallel:
        raise ConfigError(
            f"parallel.world_size={parallel.world_size} is not a multiple of {' x '.join(shown)} = "
            f"{' x '.join(map(str, shown.values()))} = {model_parallel}; the nearest that are: "
            f"{_nearest_multiples(parallel.world_size, model_parallel)}"
        )
    expert_ranks = parallel.world_size // parallel.pp
    if expert_ranks % (parallel.ep * parallel.etp):
        for name, size, other in (("ep", parallel.ep, parallel.etp), ("etp", parallel.etp, parallel.ep)):
            fits = [n for n in range(1, expert_ranks + 1) if expert_ranks % (n * other) == 0]
            if size not in fits and (fits or name == "etp"):
                beside = f", beside {'etp' if name == 'ep' else 'ep'}={other}" if other > 1 else ""
                raise ConfigError(
                    f"parallel.{name}={size} does not divide the {expert_ranks} ranks of a pipeline stage "
                    f"(world_size / pp){beside}; possible: {', '.join(map(str, fits)) or 'none'}"
                )
    if parallel.vpp > 1 and parallel.pp < 3:
        # With two stages each is before and behind the other, and Megatron 0.16.1 mixes up what it sends both ways.
        raise ConfigError(
            f"parallel.vpp={parallel.vpp} needs at least 3 pipeline stages, not parallel.pp={parallel.pp}"
        )


def _nearest_multiples(value: int, of: int) -> str:
    low, high = value // of * of, (value // of + 1) * of
    return f"{low} and {high}" if low else str(high)


def initialize(parallel: ParallelConfig, timeout_s: float = 1800.0) -> Ranks:
    """Join the process group that torchrun describes in the environment; build Megatron's. Once per process.

    All ranks talk once before this returns: NCCL makes a group when it is first used, which must not be a push of
    weights or a pipeline's exchange, in which not all of its ranks may take part.
    """
    global _host_group, _timeout_s
    check_layout(parallel)
    here = meeting.place()
    if here.world != parallel.world_size:
        raise ConfigError(
            f"{here.world} ranks were started but parallel.world_size={parallel.world_size}: start as many, with "
            f"torchrun --nproc-per-node {parallel.world_size}, or without torchrun by python -m megarl.train"
        )
    import megarl.megatron  # noqa: F401  isort: skip  fits Megatron-Core to a machine without GPU, so it comes first
    from megatron.core import parallel_state, tensor_parallel  # isort: skip

    device.select()
    if not here.launched:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "WORLD_SIZE": "1"}
    timeout, _timeout_s = timedelta(seconds=timeout_s), timeout_s
    # Not `device_id`, by which NCCL's groups are made at once: with it, torch 2.13 has the ranks outside of a gloo
    # group take part in a split of NCCL's world that those in it know nothing of.
    dist.init_process_group(
        device.backend(), store=meeting.store(here, timeout), rank=here.rank, world_size=here.world, timeout=timeout
    )
    meet()
    _host_group = dist.new_group(backend="gloo", timeout=timeout)
    ranks = layout(parallel, timeout_s)
    vars(parallel_state).update(_layouts[ranks.sizes])
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    return ranks


def meet(group: dist.ProcessGroup | None = None) -> None:
    """All ranks of a group, or of the job, talk to each other once, on the device."""
    total = torch.ones(1, device=device.device())
    dist.all_reduce(total, group=group)
    if int(total) != dist.get_world_size(group):
        raise RuntimeError(f"{int(total)} of {dist.get_world_size(group)} ranks have met")


def first_to_say(text: str) -> bool | None:
    """Whether this rank is the first of all to ask with this text; None where there is nobody to ask."""
    if not dist.is_initialized():
        return None
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set_timeout(timedelta(seconds=5))
        return bool(store.add(f"said {text}", 1) == 1)
    except RuntimeError:
        return None


def layout(parallel: ParallelConfig, timeout_s: float = 1800.0) -> Ranks:
    """This rank's coordinates in a layout of the job's ranks, whose groups are made where nobody has asked for it yet.

    Collective over all ranks. Megatron goes on in the layout that it is in; `active` changes to another.
    """
    from megatron.core import parallel_state

    check_layout(parallel)
    sizes = (parallel.tp, parallel.cp, parallel.pp, parallel.vpp, parallel.ep, parallel.etp)
    before = _globals(parallel_state)
    if not _layouts:
        _layouts[()] = before  # of a Megatron that knows of no groups
    vars(parallel_state).update(_layouts.get(sizes, _layouts[()]))
    if sizes not in _layouts:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tp,
            pipeline_model_parallel_size=parallel.pp,
            virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
            context_parallel_size=parallel.cp,
            expert_model_parallel_size=parallel.ep,
            expert_tensor_parallel_size=parallel.etp,
            distributed_timeout_minutes=max(1, int(timeout_s // 60)),
        )
        _layouts[sizes] = _globals(parallel_state)
        _set_timeouts(list(dist.distributed_c10d._world.pg_map), timeout_s)  # Megatron makes some with torch's own
        if parallel.pp > 1:  # the others are for collectives of all their ranks
            meet(parallel_state.get_pipeline_model_parallel_group())
    ranks = Ranks(
        rank=dist.get_rank(),
        world=dist.get_world_size(),
        local_rank=int(os.environ.get("LOCAL_RANK", str(dist.get_rank()))),
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
    vars(parallel_state).update(before)
    return ranks


@contextmanager
def active(ranks: Ranks) -> Iterator[None]:
    """Within the block Megatron works in the layout of `ranks`, which has its groups in module globals."""
    from megatron.core import parallel_state

    before = _globals(parallel_state)
    vars(parallel_state).update(_layouts[ranks.sizes])
    try:
        yield
    finally:
        vars(parallel_state).update(before)


def _globals(parallel_state: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(parallel_state).items() if name.startswith("_") and name.isupper()}


@contextmanager
def patient(seconds: float) -> Iterator[None]:
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


def _set_timeouts(groups: Iterable[dist.ProcessGroup], seconds: float) -> None:
    for group in groups:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def raise_alarm(name: str) -> None:
    """Tell ranks that are busy, and in no collective meanwhile; they hear of it where they look, see `alarm_raised`."""
    dist.distributed_c10d._get_default_store().set(name, "raised")


def alarm_raised(name: str) -> bool:
    """Whether some rank has raised the alarm of this name."""
    return bool(dist.distributed_c10d._get_default_store().check([name]))


def count(name: str, more: int) -> int:
    """What a counter of all ranks is with so many more, from 0 on; one step, whoever counts at the same time."""
    return int(dist.distributed_c10d._get_default_store().add(name, more))


def host_group() -> dist.ProcessGroup:
    """A gloo group of all ranks, for host values; raises where `initialize` has not run."""
    if _host_group is None:
        raise RuntimeError("megarl.parallel.ranks.initialize has not run")
    return _host_group


def new_host_group(members: Iterable[int]) -> dist.ProcessGroup:
    """A gloo group of some ranks; collective over all ranks."""
    return dist.new_group(list(members), backend="gloo", timeout=timedelta(seconds=_timeout_s))


def own_address() -> str:
    """This machine's address as the others of the job see it: that of the interface towards MASTER_ADDR.

    Not the host name's, which may be that of another interface, or the same on two nodes.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], 9))  # UDP: nothing is sent
        return str(probe.getsockname()[0])


def free_port() -> int:
    """A port of this machine that nobody has at the moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def all_gather_objects(value: Any) -> list[Any]:
    """Every rank's value, by rank, on every rank. Values are pickled: for host values of our own only."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=host_group())
    return values


def shared_out(count: int, work: Callable[[int], Any]) -> list[Any]:
    """work(0), work(1), ... work(count - 1), each done by one of the ranks, on every rank. A ConfigError of any of them
    is raised on all."""
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


def broadcast_object(value: Any, source: int = 0) -> Any:
    """The source rank's value on every rank."""
    values = [value]
    dist.broadcast_object_list(values, src=source, group=host_group())
    return values[0]


def together(work: Callable[[], T], lead: bool = False) -> list[T | None]:
    """What `work` returns on each rank, by rank, on every rank; with `lead` it is done on rank 0 alone.

    An OSError or ConfigError on one rank is raised on all of them, as one of its kind: nobody is left waiting.
    """
    result: T | None = None
    error: Exception | None = None
    if is_lead() or not lead:
        try:
            result = work()
        except OSError as failure:
            what = failure.strerror or str(failure)
            error = OSError(f"{what}: {failure.filename}" if failure.filename else what)
        except ConfigError as failure:
            error = ConfigError(str(failure))
    outcomes = all_gather_objects((result, error))
    for _, failed in outcomes:
        if failed is not None:
            raise failed
    return [value for value, _ in outcomes]


def is_lead() -> bool:
    """Whether this is rank 0, which writes what is written once."""
    return dist.get_rank() == 0


def barrier() -> None:
    dist.barrier(group=host_group())


def shutdown() -> None:
    """Leave the process group, if this process is in one."""
    global _host_group
    if dist.is_initialized():
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        _layouts.clear()
    _host_group = None
