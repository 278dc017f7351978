"""The run's end of engines that were started outside of the job: their weights, and who may be asked.

Each of a run's own engines feeds the external engines that are assigned to it: each of its ranks sends what the weight
sync passes on to its own engine process also to the same rank of those. The lead shares its requests with them
(`external_client.py`). An external engine that cannot be reached, fails or dies costs nothing but its help: its
requests are repeated elsewhere, and later weight syncs try to connect to it again.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megarl.config import Config
from megarl.engine.engine_protocol import GatherPayloads
from megarl.engine.external_files import WeightFiles, hash_data
from megarl.engine.external_server import describe_engine, find_difference
from megarl.engine.external_wire import Wire, WireBroken, WireError
from megarl.parallel import device

_MAX_THREADS = 32
_SLOW_S = 0.5
"""Seconds to connect from which a failure delays weight syncs."""


@dataclass
class ExternalEngine:
    """One external engine, as one rank of the run's engine knows it."""

    address: str
    token: str = ""
    """Token of the session, the same on all ranks."""
    wire: Wire | None = None
    """Connection for weights; None if there is no session."""
    version: int | None = None
    """Version of the weights that it has, on the lead; None if it must not generate."""
    is_syncing: bool = False
    problem: str = ""
    """Why it was given up."""
    is_cause: bool = False
    """Whether that is more than a broken connection: an engine hangs up on all ranks when one of them gives it up."""
    num_failures: int = 0
    """Attempts to connect in a row that took long and failed, and the first weight sync that tries again; the same on
    all ranks."""
    retry_at: int = 0
    pending: int = 0
    """Responses that it owes, on the lead."""

    def call(self, order: dict[str, Any], data: torch.Tensor | None = None) -> None:
        """Send an order for weights and wait for its answer. Raises WireError."""
        wire = self.wire
        if wire is None:  # its requests have failed meanwhile
            raise WireBroken(self.problem)
        wire.send(order, data)
        if errors := wire.receive()["errors"]:
            raise WireError(errors[0])

    def drop(self, problem: str, token: str = "", is_cause: bool = False) -> None:
        """Give it up until the next weight sync. token: of the session with the problem, which may have ended."""
        if token and token != self.token:
            return
        if not self.problem or (is_cause and not self.is_cause):
            self.problem, self.is_cause = problem, is_cause
        self.version, self.is_syncing = None, False
        wire, self.wire = self.wire, None
        if wire is not None:
            wire.close()


class ExternalEngines:
    """The external engines assigned to the engine of this rank. One object on each of its ranks.

    engine_index, num_engines: which of the run's engines this is. gather: over the ranks of this engine, in whose order
    they lead the ranks of the external ones. role: of the engines. Methods are collective over these ranks, except
    those that say otherwise.
    """

    def __init__(
        self,
        config: Config,
        engine_index: int,
        num_engines: int,
        position: int,
        gather: GatherPayloads,
        role: str = "rollout",
    ) -> None:
        self._index, self._num_engines, self._position, self._gather = engine_index, num_engines, position, gather
        self._timeout = config.rollout.hang_timeout
        self._facts = describe_engine(config) if config.rollout.external else {}
        self._config = config
        self._engines: dict[str, ExternalEngine] = {}
        self._members: list[ExternalEngine] = []
        """The engines with which the weight sync began, those that were dropped since included."""
        self._threads = ThreadPoolExecutor(_MAX_THREADS, "external engines")
        self._writes: list[Future[None]] = []
        self._files: WeightFiles | None = None
        """Files for weights; None if they go over TCP."""
        if folder := config.rollout.external_weights_dir:
            run = hashlib.blake2b(str(Path(config.run.dir).absolute()).encode(), digest_size=6).hexdigest()
            files = f"megarl-{run}-{role}-"
            leftovers = files if engine_index == position == 0 else ""  # nothing is written before all ranks are here
            self._files = WeightFiles(Path(folder), f"{files}{engine_index}-{position}", leftovers)
        self.num_responses = self.num_external = self.num_repeated = 0
        """On the lead: responses of all engines and of external ones, and requests that were repeated because an
        external engine was lost."""
        self._reported: dict[str, str] = {}
        self._changes: list[str] = []
        self._num_connects = 0

    def set_addresses(self, addresses: Sequence[str]) -> None:
        """Use the engines at these addresses, as far as they are assigned to this rank's. Not collective."""
        assigned = addresses[self._index :: self._num_engines]
        if assigned and not self._facts:
            self._facts = describe_engine(self._config)
        engines = self._engines
        # A new mapping, since the generation thread may be reading the old one.
        self._engines = {address: engines.get(address) or ExternalEngine(address) for address in assigned}
        for address in engines.keys() - self._engines.keys():
            engines[address].drop("it was removed")
            if self._reported.pop(address, None) == "ready":
                self._changes.append(f"external engine {address} is not used: it was removed")

    def usable(self, version: int | None) -> list[ExternalEngine]:
        """Return the engines with the weights of this version. On the lead; not collective."""
        engines = [engine for engine in self._engines.values() if engine.wire is not None]
        return [engine for engine in engines if version is not None and engine.version == version]

    @property
    def num_usable(self) -> int:
        """Number of engines that may generate. On the lead; not collective."""
        return sum(engine.wire is not None and engine.version is not None for engine in self._engines.values())

    def pop_changes(self) -> list[str]:
        """Return a line for each engine that has come or gone since the last call. On the lead; not collective."""
        lines, self._changes = self._changes, []
        for address, engine in self._engines.items():
            state = engine.problem or ("" if engine.version is None else "ready")
            if state and state != self._reported.get(address):
                text = "generates for this run" if state == "ready" else f"is not used: {state}"
                lines.append(f"external engine {address} {text}")
                self._reported[address] = state
        return lines

    def connect(self) -> bool:
        """Connect to those without a session, before a weight sync; return whether a new session began.

        An attempt that took long and failed is repeated in the next weight sync, then after 2, 4, 8 and always 16.
        """
        self._num_connects += 1
        if not self._engines:
            return False
        self._map(lambda engine: engine.call({"do": "ping"}), [e for e in self._engines.values() if e.wire])
        self._agree([engine for engine in self._engines.values() if engine.token])
        engines = self._engines.values()
        addresses = [e.address for e in engines if e.wire is None and e.retry_at <= self._num_connects]
        token = secrets.token_hex(16)
        tokens = {address: f"{token} {address}" for address in addresses}
        # Those that the lead misses: it may have given one up since the ranks have agreed.
        tokens = json.loads(self._gather(json.dumps(tokens))[0])
        if not tokens:
            return False
        missing = [self._engines[address] for address in tokens]
        if self._position == 0:
            self._changes = self.pop_changes()  # also of those that come back at once
        for engine in missing:
            engine.drop("it starts over")
            engine.token, engine.problem, engine.is_cause = tokens[engine.address], "", False
        slow: list[str] = []

        def work(engine: ExternalEngine) -> None:
            start = time.monotonic()
            try:
                self._open(engine)
            except WireError:
                if time.monotonic() - start > _SLOW_S:
                    slow.append(engine.address)
                raise

        self._map(work, missing)
        self._agree(missing)
        slow_on_any = {address for text in self._gather(json.dumps(slow)) for address in json.loads(text)}
        for engine in missing:
            engine.num_failures = engine.num_failures + 1 if engine.address in slow_on_any else 0
            engine.retry_at = self._num_connects + min(16, 1 << max(0, engine.num_failures - 1))
        return any(engine.wire is not None for engine in missing)

    def _open(self, engine: ExternalEngine) -> None:
        engine.wire = Wire.connect(engine.address)
        engine.wire.send({"kind": "weights", "token": engine.token, "rank": self._position})
        engine.wire.set_timeout(self._timeout)
        answer = engine.wire.receive()
        if problem := answer.get("error") or find_difference(self._facts, answer["engine"]):
            raise WireError(problem)

    def begin(self) -> None:
        """Begin a weight sync."""
        self._members = [engine for engine in self._engines.values() if engine.wire is not None]
        for engine in self._members:
            engine.version, engine.is_syncing = None, True
        self._call_all({"do": "begin"})

    def send_order(self, order: dict[str, Any], draft: bool) -> None:
        """Send an order without data, outside of `open` and `close`, without waiting: call `wait` after it."""
        self._submit({"do": "order", "order": order, "draft": draft})

    def open(self, size: int) -> None:
        """Open a session with buffers of `size` bytes, for `write`."""
        self._call_all({"do": "open", "bytes": size})

    def write(self, buffer: torch.Tensor, order: dict[str, Any], draft: bool) -> None:
        """Send an order to write or to compare and its data, without waiting: call `wait` before the buffer changes.
        Not collective."""
        self.wait()
        if order["do"] == "read" or not order["slices"] or not self._syncing:  # a read is the run's own
            return
        device.synchronize(buffer)
        if order["do"] == "compare":
            order, data = _pick_hashes(order, buffer)
        else:
            data = buffer[: _num_bytes(order)].cpu()
        message = {"do": "write", "order": {**order, "bucket": 0}, "draft": draft, "bytes": len(data)}
        self._submit(message, data)

    def wait(self) -> None:
        """Wait for the last order. Not collective."""
        for write in self._writes:
            write.result()
        self._writes = []
        if self._files is not None:
            self._files.remove()

    def close_session(self) -> None:
        """Close the session; engines whose weights differ from those compared are dropped."""
        self.wait()
        self._call_all({"do": "close"})

    def commit(self, version: int | None) -> None:
        """End the weight sync: the engines have this version now, or with None no usable weights."""

        def work(engine: ExternalEngine) -> None:
            engine.call({"do": "commit", "version": version})
            if engine.wire is not None:  # its requests have not failed meanwhile
                engine.version = version

        self.wait()
        if self._engines:
            self._agree(self._members)
        syncing, self._members = self._syncing, []
        if version is None:
            for engine in syncing:
                engine.drop("the weight sync failed")
        elif self._position == 0:
            self._map(work, syncing)
        for engine in syncing:
            engine.is_syncing = False

    def close(self) -> None:
        """Hang up. Not collective."""
        for engine in self._engines.values():
            engine.drop("the run has ended")
        self._threads.shutdown()
        if self._files is not None:
            self._files.remove()

    @property
    def _syncing(self) -> list[ExternalEngine]:
        return [engine for engine in self._engines.values() if engine.is_syncing]

    def _call_all(self, order: dict[str, Any]) -> None:
        if self._engines:
            self._map(lambda engine: engine.call(order), self._syncing)
            self._agree(self._members)

    def _submit(self, order: dict[str, Any], data: torch.Tensor | None = None) -> None:
        """Send an order to all engines in threads, with the hash of its data, or of the file that has them."""
        syncing = self._syncing
        if not syncing:
            return
        fields: dict[str, Future[Any]] = {}
        if data is not None:  # before those that wait for it
            fields["hash"] = self._threads.submit(hash_data, data)
            if self._files is not None:
                fields["file"], data = self._threads.submit(self._files.store, data), None

        def work(engine: ExternalEngine) -> None:
            try:
                values = {name: field.result(self._timeout) for name, field in fields.items()}
            except TimeoutError:
                key = "rollout.external_weights_dir"
                raise WireError(f"the run has not written its weights in {self._timeout:g} s, see {key}") from None
            engine.call({**order, **values}, data)

        self._writes = [self._threads.submit(self._try, work, engine) for engine in syncing]

    def _agree(self, engines: Sequence[ExternalEngine]) -> None:
        """Drop the engines that any rank has dropped."""
        local = {engine.address: [engine.problem, engine.is_cause] for engine in engines if engine.wire is None}
        for text in self._gather(json.dumps(local)):
            for address, (problem, is_cause) in json.loads(text).items():
                self._engines[address].drop(problem or "its connection is gone", is_cause=is_cause)

    def _map(self, work: Callable[[ExternalEngine], None], engines: Sequence[ExternalEngine]) -> None:
        """Apply `work` to all engines at once, and drop those that fail."""
        list(self._threads.map(lambda engine: self._try(work, engine), engines))

    def _try(self, work: Callable[[ExternalEngine], None], engine: ExternalEngine) -> None:
        try:
            work(engine)
        except WireError as error:
            engine.drop(str(error), is_cause=not isinstance(error, WireBroken))


def _num_bytes(order: dict[str, Any]) -> int:
    """Return how many bytes of its buffer a write order refers to."""
    sizes = {name: getattr(torch, dtype).itemsize for name, dtype in order["tensor_dtype"].items()}
    ends = [
        max(offset + (r1 - r0) * (c1 - c0) * sizes[name], hash_offset + 8)
        for name, _, r0, r1, c0, c1, offset, hash_offset in order["slices"]
    ]
    return max(ends, default=0)


def _pick_hashes(order: dict[str, Any], buffer: torch.Tensor) -> tuple[dict[str, Any], torch.Tensor]:
    """Return an order to compare with its hashes alone, [n] uint8 on the host: the pieces themselves are not there."""
    words = buffer[: len(buffer) // 8 * 8].view(torch.int64)
    hashes = words[torch.tensor([entry[-1] // 8 for entry in order["slices"]], dtype=torch.int64, device=buffer.device)]
    slices = [[*entry[:6], 0, 8 * number] for number, entry in enumerate(order["slices"])]
    return {**order, "slices": slices}, hashes.view(torch.uint8).cpu()
