"""Send rows of packed columns from the ranks that hold them to the ranks that need them.

    specs = {"tokens": (torch.int32, ())}
    delivery = RowExchange().deliver({"tokens": tokens}, specs, batch.lengths, batch.home, wants)
    rows = delivery.rows("tokens")  # waits; one [length] for each of wants[rank], in order

Within a machine, the rank that holds a row writes it once into memory that its readers map; a column that already lies
in shared memory is not copied. To another machine each row is sent once, by gloo, to one of the ranks that need it, and
its neighbors map the memory in which it arrives. Senders do not wait for readers.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial, reduce
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megarl.parallel import collectives, node_links, ranks, shared_memory
from megarl.parallel.encoding import decode, encode
from megarl.parallel.job_secret import seal, unseal
from megarl.parallel.row_exchange_plan import Block, ExchangePlan, Part, RowSpec
from megarl.parallel.wait_listeners import traced

_NO_TIMEOUT = timedelta(days=365)  # of background threads: whoever needs their results has a timeout of its own
_COPY_CHUNK_BYTES = 1 << 26  # bytes of a partial column that are copied at once
_FIRST_TAG = 7000  # tags of RowExchange messages, distinct from those of other users of the group

_LOCAL_ROWS, _FORWARDED_ROWS = "local", "forwarded"  # of a home; that a neighbor has received from other machines


class RowExchange:
    """Row exchange over `group` (default: host group of all ranks). Create it once per process, collectively.

    per_machine: pretend that each machine has this many ranks. All ranks of the group must make all calls of `deliver`
    and `exchange_objects` in the same order. Ranks are numbered within the group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, per_machine: int | None = None) -> None:
        self.group = group or ranks.host_group()
        self.rank, self.world = dist.get_rank(self.group), dist.get_world_size(self.group)
        size, gather = per_machine or self.world, partial(ranks.all_gather_objects, group=self.group)
        self._links = node_links.NodeLinks(self.rank, gather, lambda other: other // size == self.rank // size)
        RowExchange._num_instances += 1
        self._tag = _FIRST_TAG + max(gather(RowExchange._num_instances))
        self.machines = self._links.machines
        self.bytes_sent = {"machine": 0, "network": 0}  # bytes that this rank has written for others
        self._num_deliveries = 0
        self._messages: dict[tuple[int, str, int], tuple[Any, list[int]]] = {}
        self._open_deliveries: weakref.WeakValueDictionary[int, Delivery] = weakref.WeakValueDictionary()
        self._threads: list[threading.Thread] = []
        self._background_error: Exception | None = None

    _num_instances = 0

    @traced("data")
    def deliver(
        self,
        columns: Mapping[str, torch.Tensor],
        kinds: Mapping[str, RowSpec],
        lengths: torch.Tensor | Mapping[str, torch.Tensor],
        homes: torch.Tensor,
        wants: Sequence[Sequence[int]],
        parts: Mapping[str, Sequence[Sequence[int] | None]] | None = None,
    ) -> Delivery:
        """Send rows of `columns` to the ranks that want them; return the delivery from which this rank reads its own.

        columns: each [T, *tail] on the CPU, the rows of this rank's sequences in ascending order of sequence number;
        must not be written to afterwards. kinds: dtype and tail of each column. lengths, homes: [N] of all sequences;
        lengths by column if they differ. wants: the sequences that each rank needs. parts: for each rank the indices
        along dim 1 that it needs of a column, None for all. Everything except `columns` must be the same on all ranks.
        """
        self._poll()
        self._num_deliveries += 1
        plan = ExchangePlan(kinds, lengths, homes, wants, parts or {}, self.machines, self.rank)
        local_columns = {name: _check_column(name, columns.get(name), kinds[name], plan) for name in kinds}
        delivery = Delivery(self, self._num_deliveries, plan, local_columns)
        self._open_deliveries[self._num_deliveries] = delivery
        self._receive(plan, delivery)
        self._publish(plan, local_columns)
        send_requests, buffers = [], []
        for receiver, selection in plan.iter_sends():
            blocks, size = plan.blocks(selection)
            if size:
                buffers.append(torch.empty(size, dtype=torch.uint8))
                pieces = [rows.reshape(-1).view(torch.uint8) for rows in _iter_rows(plan, local_columns, blocks)]
                torch.cat(pieces, out=buffers[-1])
                send_requests.append(self._post_send(buffers[-1], receiver))
                self.bytes_sent["network"] += size
        if send_requests:
            self._start_thread(self._wait_for_sends, send_requests, buffers)
        return delivery

    def _publish(self, plan: ExchangePlan, local_columns: Mapping[str, torch.Tensor]) -> None:
        """Write the rows that neighbors need of this rank into shared memory and hand it to them."""
        readers = [other for other in plan.members if other != self.rank and plan.needs_rows(other, self.rank)]
        if not readers:
            return
        selection = plan.local_selection(self.rank)
        needed = {name for group, _, _ in selection for name in group.columns}
        regions = {name: region for name in needed if (region := shared_memory.find_region(local_columns[name]))}
        blocks, size = plan.blocks(selection, exclude=regions)
        descriptor = shared_memory.create(size)
        try:
            shared_memory.write(descriptor, _iter_rows(plan, local_columns, blocks))
            message = _LOCAL_ROWS, self._num_deliveries, {name: region.offset for name, region in regions.items()}
            descriptors = [descriptor, *(region.descriptor for region in regions.values())]
            for reader in readers:
                self._links.send(reader, message, descriptors, ranks.current_timeout())
        finally:
            os.close(descriptor)
        self.bytes_sent["machine"] += size

    def _receive(self, plan: ExchangePlan, delivery: Delivery) -> None:
        """Start to receive what other machines send to this rank."""
        sections, size = plan.inbox(self.rank)
        if not size:
            return
        readers = [other for other in plan.members if other != self.rank and plan.needs_forwarded(other, self.rank)]
        memory = (shared_memory.empty if readers else torch.empty)((size,), dtype=torch.uint8)
        requests = [self._post_receive(memory[at : at + length], home) for home, at, length, _ in sections if length]
        delivery.inbound = Future()
        self._start_thread(self._wait_for_receives, requests, memory, delivery.inbound, readers, self._num_deliveries)

    def _post_send(self, tensor: torch.Tensor, to: int) -> Any:
        with _as_connection_error():
            return dist.isend(tensor, group=self.group, group_dst=to, tag=self._tag)

    def _post_receive(self, tensor: torch.Tensor, source: int) -> Any:
        with _as_connection_error():
            return dist.irecv(tensor, group=self.group, group_src=source, tag=self._tag)

    def _start_thread(self, work: Any, *arguments: Any) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(threading.Thread(target=work, args=arguments, daemon=True))
        self._threads[-1].start()

    def _wait_for_sends(self, works: Sequence[Any], buffers: Any) -> None:
        """Keep the buffers alive until they have been sent."""
        try:
            for work in works:
                work.wait(_NO_TIMEOUT)
        except RuntimeError as error:
            self._background_error = error

    def _wait_for_receives(
        self,
        works: Sequence[Any],
        memory: torch.Tensor,
        inbound: Future[torch.Tensor],
        readers: Sequence[int],
        number: int,
    ) -> None:
        """Wait for rows from other machines, then forward them to the neighbors that need them, too."""
        content: Any = {}
        try:
            for work in works:
                work.wait(_NO_TIMEOUT)
            inbound.set_result(memory)
        except RuntimeError as error:
            inbound.set_exception(error)
            content = str(error)
        region = shared_memory.find_region(memory)
        descriptors = [region.descriptor] if region and not isinstance(content, str) else []
        for reader in readers:
            try:
                self._links.send(reader, (_FORWARDED_ROWS, number, content), descriptors, ranks.current_timeout())
            except OSError as error:
                self._background_error = error

    def _poll(self) -> None:
        """Raise background errors, read pending messages, and close the memory of deliveries that nobody will read."""
        if error := self._background_error:
            raise ConnectionError(f"a transfer did not reach a rank: {error}") from error
        for other in self._links.sockets:
            with suppress(ConnectionError):  # whoever needs that rank's rows notices
                while self._receive_message(other, 0.0):
                    pass
        for key, (_, descriptors) in list(self._messages.items()):
            if key[2] <= self._num_deliveries and key[2] not in self._open_deliveries:
                node_links.close_descriptors(descriptors)
                del self._messages[key]

    def _receive_message(self, other: int, timeout_s: float) -> bool:
        """Read a neighbor's next message; return False if none arrives in time."""
        if not (message := self._links.receive(other, timeout_s)):
            return False
        (what, number, content), descriptors = message
        self._messages[other, what, number] = content, descriptors
        return True

    def _wait_for_message(self, other: int, what: str, number: int) -> tuple[Any, list[int]]:
        """Return a neighbor's message about one delivery. Messages about other deliveries are kept."""
        while (other, what, number) not in self._messages:
            self._receive_message(other, ranks.current_timeout())
        return self._messages.pop((other, what, number))

    @traced("data")
    def exchange_objects(self, parcels: Mapping[int, Any]) -> dict[int, Any]:
        """Send plain data (see `encoding.py`) to some ranks; return what this rank was sent, by sender. Collective."""
        self._poll()
        outgoing = {
            other: torch.frombuffer(
                bytearray(seal(encode(parcel), f"parcel {self.rank} to {other}")), dtype=torch.uint8
            )
            for other, parcel in parcels.items()
        }
        sizes = torch.zeros(self.world, dtype=torch.int64)
        for other, data in outgoing.items():
            sizes[other] = len(data)
        incoming_sizes = torch.empty_like(sizes)
        dist.all_to_all_single(incoming_sizes, sizes, group=self.group)
        incoming = {
            other: outgoing[other] if other == self.rank else torch.empty(size, dtype=torch.uint8)
            for other, size in enumerate(incoming_sizes.tolist())
            if size
        }
        receiving = [self._post_receive(data, other) for other, data in incoming.items() if other != self.rank]
        sending = []
        for other, data in outgoing.items():
            if other != self.rank:
                sending.append(self._post_send(data, other))
                self.bytes_sent["machine" if other in self._links.sockets else "network"] += len(data)
        with _as_connection_error():
            for work in receiving:
                work.wait(timedelta(seconds=ranks.current_timeout()))
        if sending:
            self._start_thread(self._wait_for_sends, sending, outgoing)
        return {
            other: decode(unseal(data.numpy().data, f"parcel {other} to {self.rank}"))
            for other, data in incoming.items()
        }

    def close(self) -> None:
        """Wait until all sends have completed; no deliveries are possible afterwards. Not collective."""
        for thread in self._threads:
            thread.join(ranks.current_timeout())
        for _, descriptors in self._messages.values():
            node_links.close_descriptors(descriptors)
        self._messages.clear()
        self._links.close()


class Delivery:
    """Rows delivered to one rank: views of the memory in which they arrived, which lives as long as any of them."""

    def __init__(
        self, exchange: RowExchange, number: int, plan: ExchangePlan, local_columns: Mapping[str, torch.Tensor]
    ) -> None:
        self._exchange, self._number, self._plan, self._local_columns = exchange, number, plan, local_columns
        self.inbound: Future[torch.Tensor] | None = None
        """Memory in which this rank receives rows from other machines."""
        self._blocks: list[tuple[Block, torch.Tensor]] | None = None

    @traced("wait")
    def rows(self, name: str) -> list[torch.Tensor]:
        """Return a column's rows of each sequence that this rank wants, in order. Waits for the whole delivery.

        Each is [length, *tail], with only the needed indices along dim 1. Raises TimeoutError after the timeout of
        collectives, and ConnectionError if a rank is gone.
        """
        plan = self._plan
        if self._blocks is None:
            self._blocks = list(self._wait_for_blocks())
        part, wants, lengths = plan.part(name, plan.rank), plan.wants[plan.rank], plan.lengths[name]
        rows_by_want: list[torch.Tensor | None] = [None] * len(wants)
        for block, memory in self._blocks:
            if block.column == name and block.part in (part, None) and len(block.sequences):
                starts = np.cumsum(lengths[block.sequences]) - lengths[block.sequences]
                at = np.searchsorted(block.sequences, wants).clip(max=len(block.sequences) - 1)
                for index in np.flatnonzero(block.sequences[at] == wants).tolist():
                    rows = memory.narrow(0, int(starts[at[index]]), int(lengths[wants[index]]))
                    rows_by_want[index] = rows if block.part == part else _select(rows, part)
        dtype, tail = plan.kinds[name]
        no_rows = _select(torch.empty((0, *tail), dtype=dtype), part)
        return [no_rows if rows is None else rows for rows in rows_by_want]

    def _wait_for_blocks(self) -> Iterator[tuple[Block, torch.Tensor]]:
        """Yield all memory that holds rows for this rank, as blocks."""
        plan, rank = self._plan, self._plan.rank
        for name, rows in self._local_columns.items():
            yield _column_block(plan, name, rank), rows
        neighbors = [other for other in plan.members if other != rank]
        for home in neighbors:
            if plan.needs_rows(rank, home):
                offsets, memories = self._map_message(home, _LOCAL_ROWS)
                blocks, _ = plan.blocks(plan.local_selection(home), exclude=offsets)
                yield from ((block, _block_rows(plan, block, memories[0])) for block in blocks)
                for memory, (name, offset) in zip(memories[1:], offsets.items(), strict=True):
                    block = _column_block(plan, name, home, offset)
                    yield block, _block_rows(plan, block, memory)
        if self.inbound:
            try:
                memory = self.inbound.result(timeout_s := ranks.current_timeout())
            except TimeoutError:
                raise TimeoutError(f"other nodes have not sent this rank's data for {timeout_s:.0f} s") from None
            except RuntimeError as error:
                raise ConnectionError(f"data from other nodes did not arrive: {error}") from error
            yield from _inbound_blocks(plan, rank, memory)
        for receiver in neighbors:
            if plan.needs_forwarded(rank, receiver):
                _, memories = self._map_message(receiver, _FORWARDED_ROWS)
                yield from _inbound_blocks(plan, receiver, memories[0])

    def _map_message(self, other: int, what: str) -> tuple[dict[str, int], list[torch.Tensor]]:
        content, descriptors = self._exchange._wait_for_message(other, what, self._number)
        try:
            if isinstance(content, str):
                raise ConnectionError(f"data from other nodes for rank {other} did not arrive: {content}")
            return content, [shared_memory.attach(descriptor) for descriptor in descriptors]
        finally:
            node_links.close_descriptors(descriptors)


def _inbound_blocks(plan: ExchangePlan, receiver: int, memory: torch.Tensor) -> Iterator[tuple[Block, torch.Tensor]]:
    """Yield the blocks of memory in which a rank has received rows."""
    for _, start, _, blocks in plan.inbox(receiver)[0]:
        for block in blocks:
            yield block, _block_rows(plan, block, memory[start:])


def _column_block(plan: ExchangePlan, name: str, home: int, offset: int = 0) -> Block:
    """Return the block of a home's complete column."""
    sequences = plan.sequences_of(home)
    rows = int(plan.lengths[name][sequences].sum())
    return Block(name, None, sequences, rows, offset, rows * plan.row_bytes(name, None))


def _block_rows(plan: ExchangePlan, block: Block, memory: torch.Tensor) -> torch.Tensor:
    """View a block's rows in [bytes] uint8."""
    dtype, tail = plan.kinds[block.column]
    tail = tail if block.part is None else (len(block.part), *tail[1:])
    return memory[block.offset : block.offset + block.size].view(dtype).view(block.rows, *tail)


def _select(rows: torch.Tensor, part: Part) -> torch.Tensor:
    """Select a part along dim 1; a view if the part is a range, such as the layers of a pipeline stage."""
    if part is None:
        return rows
    first = part[0] if part else 0
    if part == tuple(range(first, first + len(part))):
        return rows.narrow(1, first, len(part))
    return rows.index_select(1, torch.tensor(part))


def _iter_rows(
    plan: ExchangePlan, local_columns: Mapping[str, torch.Tensor], blocks: Sequence[Block]
) -> Iterator[torch.Tensor]:
    """Yield this rank's rows of blocks as contiguous tensors."""
    for block in blocks:
        lengths, column = plan.lengths[block.column], local_columns[block.column]
        starts = np.cumsum(lengths[plan.local_sequences]) - lengths[plan.local_sequences]
        at = np.searchsorted(plan.local_sequences, block.sequences)
        breaks = np.flatnonzero(np.diff(at) != 1)  # between runs of adjacent sequences
        for first, last in zip(at[np.r_[0, breaks + 1]], at[np.r_[breaks, -1]], strict=True) if len(at) else ():
            start, stop = int(starts[first]), int(starts[last] + lengths[plan.local_sequences[last]])
            if block.part is None:
                yield column[start:stop]
                continue
            step = max(1, _COPY_CHUNK_BYTES // max(1, plan.row_bytes(block.column, block.part)))
            for begin in range(start, stop, step):
                yield _select(column[begin : min(stop, begin + step)], block.part).contiguous()


@contextmanager
def _as_connection_error() -> Iterator[None]:
    """Convert gloo's RuntimeError about a lost rank to ConnectionError."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(f"another rank disconnected or does not respond: {error}") from error


def _check_column(name: str, column: torch.Tensor | None, kind: RowSpec, plan: ExchangePlan) -> torch.Tensor:
    """Validate a column for `deliver`. A rank without sequences may omit it."""
    dtype, tail = kind
    rows = int(plan.lengths[name][plan.local_sequences].sum())
    if column is None and not rows:
        return torch.empty((0, *tail), dtype=dtype)
    if column is None or column.dtype != dtype or tuple(column.shape) != (rows, *tail) or column.is_cuda:
        what = "no column" if column is None else f"{column.dtype} {tuple(column.shape)} on {column.device}"
        raise ValueError(f"{name}: {what} to deliver, instead of {dtype} {(rows, *tail)} on the CPU")
    return column.detach().contiguous()


class WorldComm:
    """The ranks of the job as `types.Comm`."""

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @traced("wait")
    def all_reduce(self, local: torch.Tensor) -> torch.Tensor:
        """Sum a small tensor over all ranks, in rank order, so that the result is bitwise equal on all of them."""
        if dist.get_world_size() == 1:
            return local
        flat = local.detach().cpu().contiguous().view(-1)
        shares = collectives.all_gather_small(flat, ranks.host_group(), ranks.current_timeout())
        return reduce(torch.add, shares.view(-1, *local.shape)).to(local.device)

    @traced("wait")
    def all_gather_rows(self, local: torch.Tensor) -> torch.Tensor:
        """Concatenate [n, ...] of all ranks to [sum of n, ...]; dtype and tail must be the same on all ranks."""
        rows = local.detach().cpu().contiguous()
        data = rows.reshape(-1).view(torch.uint8)
        shares = collectives.ragged_all_gather(data, ranks.host_group(), ranks.current_timeout())
        return torch.cat(shares).view(rows.dtype).view(-1, *rows.shape[1:])

    def all_gather_objects(self, local: Any) -> list[Any]:
        return ranks.all_gather_objects(local)


_row_exchange: RowExchange | None = None


def get_row_exchange() -> RowExchange:
    """Return the job's row exchange. The first call creates it collectively."""
    global _row_exchange
    if _row_exchange is None or _row_exchange.group is not ranks.host_group():
        _row_exchange = RowExchange()
    return _row_exchange


def close_row_exchange() -> None:
    """Wait until all sends have completed. Not collective."""
    global _row_exchange
    closing, _row_exchange = _row_exchange, None
    if closing is not None:
        closing.close()
