"""An engine outside of a job: it generates for a run that connects to it, with the weights that the run sends.

`ExternalServer` starts the engine on this machine, like a rank would, and is the only one that listens on the network.
A run opens a session of several connections (`external_wire.py`), which one token ties together:

- one for the weights of each of the engine's ranks, from a rank of the run whose own engine has the same slices. Its
  orders are those of `weight_loader.py`, so the same loader writes and hashes the same bytes.
- any number for requests, from the lead of that engine: the calls of an `EngineClient`.

A session ends with any of its connections for weights. The engine then waits for the next one, with whatever weights it
has, and answers no request before it has received weights again. It serves one session at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import torch

from megarl import __version__
from megarl.config import Config, ConfigError, ParallelConfig
from megarl.engine.engine_backends import engine_backend
from megarl.engine.engine_protocol import EngineClient, EngineError, EngineLost, RequestFailed
from megarl.engine.engine_restart import watch
from megarl.engine.external_files import hash_data, read_file
from megarl.engine.external_wire import Wire, WireError, parse_address
from megarl.engine.weight_sender import WeightSender
from megarl.models.registry import load_hf_config
from megarl.models.routing import routing_shape
from megarl.models.sparse_indices import index_shape
from megarl.parallel import device, job_secret
from megarl.parallel.encoding import EncodingError
from megarl.parallel.policy_configs import syncs_adapters
from megarl.parallel.rendezvous import PUBLIC_NETWORK_ENV, check_private, open_listener

HEARTBEAT_S = 2.0
"""Seconds between signs of life to whoever waits for responses."""
_SESSION_END_S, _SESSION_LOSS_S = 10.0, 1.0
"""Seconds that a new session waits for the rest of the last one: once it is over, and for its connections to break."""
_HOST_SETTINGS = {
    "sglang": ("max_running_requests", "max_total_tokens", "mem_fraction_static", "cuda_graph_max_bs", "log_level"),
    "vllm": ("gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens", "num_gpu_blocks_override"),
}
"""Settings of `rollout.sglang` and `rollout.vllm` that may suit the machine of the engine: room, not results."""


def describe_engine(config: Config) -> dict[str, Any]:
    """Return what a run and its external engines must have in common, by key."""
    rollout = config.rollout
    hf = json.dumps(load_hf_config(config.model.path), sort_keys=True)
    values: dict[str, Any] = {"version of MegaRL": __version__}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # an engine of the user's own
        values[f"version of {rollout.engine}"] = importlib.metadata.version(rollout.engine).partition("+")[0]
    values |= {"config.json of model.path": hashlib.blake2b(hf.encode(), digest_size=16).hexdigest()}
    values |= {"model.dtype": config.model.dtype, "model.megatron": config.model.megatron}
    values |= {"record of routing (train.routing_replay or rollout.rebalance_experts_every)": config.records_routing}
    values |= {"train.sparse_index_replay": config.train.sparse_index_replay}
    values |= {"rollout.sync_adapters_only": syncs_adapters(config)}
    if syncs_adapters(config):  # the shapes of the factors that an engine has
        values |= {"lora.rank": config.lora.rank, "lora.target_modules": sorted(config.lora.target_modules)}
    names = ("engine", "tp", "ep", "num_speculative_tokens", "max_context", "top_p", "top_k", "min_p")
    experts = "num_redundant_experts", "rebalance_experts_every"
    values |= {f"rollout.{name}": getattr(rollout, name) for name in (*names, *experts)}
    values |= {"rollout.external_weights_dir": "set" if rollout.external_weights_dir else "unset"}
    for name, host_settings in _HOST_SETTINGS.items():
        settings = getattr(rollout, name)
        values[f"rollout.{name}"] = {key: value for key, value in settings.items() if key not in host_settings}
    return values


def find_difference(run: dict[str, Any], external: dict[str, Any]) -> str:
    """Return the first key of `describe_engine` that differs, with both values; empty if none does."""
    for key in run | external:
        if run.get(key) != external.get(key):
            return f"its {key} is {external.get(key)}, and that of the run {run.get(key)}"
    return ""


def check_listen_host(host: str) -> None:
    """Raise ConfigError for a host that is, or may be, reached from the public internet, or that has no address."""
    check_private("--listen", host)
    hosts = {socket_address[0] for *_, socket_address in socket.getaddrinfo(host, None)}
    if any(ip_address(str(text)).is_unspecified for text in hosts) and os.environ.get(PUBLIC_NETWORK_ENV) != "1":
        raise ConfigError(
            f"--listen with {host} accepts connections at all addresses of this machine: name one of the nodes' own "
            f"network, or export {PUBLIC_NETWORK_ENV}=1 if a firewall protects the others"
        )


def check_weights_folder(folder: str) -> None:
    """Raise ConfigError if this machine cannot read a run's `rollout.external_weights_dir`. folder: empty if unset."""
    if folder and not (os.path.isdir(folder) and os.access(folder, os.R_OK | os.X_OK)):
        fault = "this user may not read it" if os.path.isdir(folder) else "there is no such folder on this machine"
        raise ConfigError(
            f"rollout.external_weights_dir={folder}: {fault}; create it, or name the folder that the run writes to, as "
            "this machine sees it"
        )


class _Session:
    """The connections of a run, and the collective of the threads that serve those for weights."""

    def __init__(self, token: str, num_ranks: int) -> None:
        self.token, self.num_weight_wires = token, 0
        self.is_over = threading.Event()
        self.version: int | None = None
        """Version of the weights that this session has sent last; None before, and during a weight sync."""
        self.is_updating = False
        self._barrier = threading.Barrier(num_ranks)
        self._payloads = [""] * num_ranks
        self._wires: list[Wire] = []
        self._lock = threading.Lock()

    def gather(self, rank: int, payload: str) -> list[str]:
        """Gather a payload over the ranks, see `engine_protocol.GatherPayloads`. Raises WireError if one is gone."""
        try:
            self._payloads[rank] = payload
            self._barrier.wait()
            payloads = list(self._payloads)
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise WireError("a connection of the session is gone") from None
        return payloads

    def add(self, wire: Wire) -> None:
        with self._lock:
            self._wires.append(wire)
            if self.is_over.is_set():
                wire.close()

    def end(self) -> None:
        """Close all connections; whoever serves one then stops."""
        self.is_over.set()
        self._barrier.abort()
        with self._lock:
            for wire in self._wires:
                wire.close()


class ExternalServer:
    """Starts an engine, and serves one run after the other at HOST:PORT.

    config: that of the run; of its `parallel` and `placement` only `ranks_per_gpu` matters. folder: for logs. threads:
    as for `EngineBackend.make_engine`.
    """

    def __init__(self, config: Config, address: str, folder: Path, threads: int = 0) -> None:
        job_secret.external_key()
        host, port = parse_address(address)
        check_listen_host(host)
        check_weights_folder(config.rollout.external_weights_dir)
        listener = open_listener(host, port)
        if listener is None:
            raise ConfigError(f"--listen {address} cannot be opened: name a free port of an address of this machine")
        self._listener, self.address = listener, address
        self._facts = describe_engine(config)
        tp = config.rollout.tp
        parallel = ParallelConfig(world_size=tp, ranks_per_node=tp, ranks_per_gpu=config.parallel.ranks_per_gpu)
        run = dataclasses.replace(config.run, dir=str(folder))
        self._config = config = dataclasses.replace(config, parallel=parallel, placement={}, run=run)
        hf = load_hf_config(config.model.path)
        self._routing = routing_shape(hf, config.model.megatron) if config.records_routing else None
        self._indices = index_shape(hf, config)
        self._backend = engine_backend(config)
        self._has_draft = self._backend.layout(hf, config).draft
        self._engine = self._backend.make_engine(config, port, label="external engine", threads=threads)
        self._session: _Session | None = None
        self._lock, self._leaving = threading.Lock(), threading.Lock()
        self._loop = asyncio.new_event_loop()

    def run(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """Serve until the engine is lost. Raises EngineError.

        on_ready: called once the engine has started.
        """
        self._engine.start()
        self._engine.wait_ready()
        threading.Thread(target=self._loop.run_forever, name="requests", daemon=True).start()
        threading.Thread(target=self._accept, name="accept", daemon=True).start()
        on_ready()
        try:
            while True:
                time.sleep(1.0)
                self._engine.check_running()
        finally:
            self._engine.shutdown()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Any) -> None:
        """Serve one connection; a broken one concerns nobody else."""
        try:
            wire = Wire(connection, is_server=True)
        except WireError:
            connection.close()
            return
        try:
            hello = wire.receive()
            if hello["kind"] == "status":
                wire.send({"status": self._status()})
                return
            session = self._join(hello)
            if session is None:
                wire.send({"error": "it serves another run"})
                return
            if hello["kind"] != "weights":
                self._begin_connection(wire, session)
                requests = self._serve_requests(wire, session, hello["timeout"])
                asyncio.run_coroutine_threadsafe(requests, self._loop).result()
                return
            try:
                self._begin_connection(wire, session)
                self._serve_weights(wire, session, hello["rank"])
            finally:
                self._leave(session)
        except WireError as error:
            print(f"a connection has ended: {error}", flush=True)
        finally:
            wire.close()

    def _begin_connection(self, wire: Wire, session: _Session) -> None:
        wire.send({"engine": self._facts})
        session.add(wire)
        wire.set_timeout(None)

    def _status(self) -> str:
        """Return in words what the engine does."""
        session = self._session
        if session is None or session.is_over.is_set():
            return "waits for a run"
        return "receives weights" if session.version is None else f"has the weights of version {session.version}"

    def _join(self, hello: dict[str, Any]) -> _Session | None:
        """Return the session with this token, which a connection for weights may begin; None if it cannot be joined.

        After a connection for weights has joined, it must `_leave`.
        """
        start = time.monotonic()
        while True:
            with self._lock:
                current, is_weights = self._session, hello["kind"] == "weights"
                if is_weights and (current is None or (current.is_over.is_set() and not current.num_weight_wires)):
                    current = self._session = _Session(hello["token"], self._config.rollout.tp)
                if current is not None and current.token == hello["token"] and not current.is_over.is_set():
                    current.num_weight_wires += is_weights
                    return current
                if not is_weights or current is None:
                    return None
            if time.monotonic() - start > (_SESSION_END_S if current.is_over.is_set() else _SESSION_LOSS_S):
                return None
            time.sleep(0.05)

    # --- weights

    def _serve_weights(self, wire: Wire, session: _Session, rank: int) -> None:
        """Serve the weights of one of the engine's ranks until its connection ends."""
        sync = _WeightSync(self, session, rank)
        try:
            while True:
                order = wire.receive()
                wire.send(sync.execute(order, wire))
        finally:
            session.end()
            sync.abandon()

    def _leave(self, session: _Session) -> None:
        """End the session with one of its connections for weights; the last one leaves the engine to the next."""
        session.end()
        with self._leaving:
            if session.num_weight_wires == 1:
                self._reset(session)
            with self._lock:
                session.num_weight_wires -= 1

    def _reset(self, session: _Session) -> None:
        """Leave nothing of a session in the engine."""
        try:
            if session.is_updating:
                session.is_updating = False
                self._engine.end_update(None)
            self._engine.abort_requests()
        except EngineError as error:
            print(f"the engine cannot be used any more: {error}", flush=True)
            self._engine.shutdown()
            os._exit(1)

    # --- requests

    async def _serve_requests(self, wire: Wire, session: _Session, timeout: float) -> None:
        await wire.open_streams()
        tasks: dict[int, asyncio.Task[None]] = {}
        async with self._engine.connect(timeout, self._routing, self._indices) as client:
            watcher = asyncio.create_task(self._watch(client))
            heart = asyncio.create_task(_beat(wire))
            try:
                while True:
                    message = await wire.receive_async()
                    number = message["number"]
                    if message["do"] == "generate":
                        answering = self._answer(wire, session, client, message)
                        tasks[number] = asyncio.create_task(answering)
                        tasks[number].add_done_callback(partial(_forget, tasks, number))
                    elif message["do"] == "cancel" and number in tasks:
                        tasks[number].cancel()
                    elif message["do"] == "stop":
                        await client.stop()
            finally:
                running = [*tasks.values(), watcher, heart]
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)
                wire.close_streams()

    async def _watch(self, client: EngineClient) -> None:
        try:
            await watch(self._engine, client, self._config.rollout.hang_timeout, self._engine.start_number)
        except EngineLost as error:
            print(f"the engine is lost: {error}", flush=True)
            self._engine.shutdown()
            os._exit(1)

    async def _answer(self, wire: Wire, session: _Session, client: EngineClient, message: dict[str, Any]) -> None:
        answer: dict[str, Any] = {"number": message["number"]}
        try:
            if session.version != message["version"]:
                answer["lost"] = f"it has weights of version {session.version}, not {message['version']}"
            else:
                client.weight_version, client.should_request_masks = message["version"], message["masks"]
                images = {"images": message["images"]} if message["images"] else {}
                answer["generation"] = await client.generate(
                    message["ids"], message["params"], message["recorded"], **images
                )
        except RequestFailed as failure:
            answer["failed"] = str(failure)
        except Exception as error:  # whoever waits must get an answer
            answer["lost"] = str(error) if isinstance(error, RuntimeError) else repr(error)
        with contextlib.suppress(WireError):
            try:
                await wire.send_async(answer)
            except EncodingError as error:
                await wire.send_async({"number": message["number"], "lost": repr(error)})


def _forget(tasks: dict[int, asyncio.Task[None]], number: int, task: asyncio.Task[None]) -> None:
    tasks.pop(number, None)


async def _beat(wire: Wire) -> None:
    with contextlib.suppress(WireError):
        while True:
            await wire.send_async({"alive": True})
            await asyncio.sleep(HEARTBEAT_S)


class _WeightSync:
    """One engine rank's side of the weight syncs of a session. Its orders, each answered by {"errors": [text]}:

    {"do": "ping"}: nothing.
    {"do": "begin"}: begins a weight sync.
    {"do": "order", "order": order, "draft": bool}: an order of `weight_loader.py` without data, on every rank:
    keep, merge, or finish. Not between "open" and "close".
    {"do": "open", "bytes": n}: opens a session with a bucket of n bytes.
    {"do": "write", "order": order, "draft": bool, "bytes": n, "hash": h}, and n bytes with the hash h of `hash_data`:
    an order of `weight_loader.py` to write or to compare. With "file": name, the bytes are in that file.
    {"do": "close"}: closes the session.
    {"do": "commit", "version": v}, to the first rank alone, after all orders: the engine now has this version.
    """

    def __init__(self, server: ExternalServer, session: _Session, rank: int) -> None:
        self._engine, self._has_draft = server._engine, server._has_draft
        self._backend, self._timeout = server._backend, server._config.rollout.hang_timeout
        self._folder = server._config.rollout.external_weights_dir
        self._session, self._rank = session, rank
        self._gpu = device.gpu_number(rank, server._config.parallel.ranks_per_gpu)
        self._sender: WeightSender | None = None
        self._bucket = self._staging = torch.empty(0, dtype=torch.uint8)

    def execute(self, order: dict[str, Any], wire: Wire) -> dict[str, list[str]]:
        """Execute an order, whose data follow on the wire. Raises WireError."""
        sender = self._sender
        match order["do"]:
            case "ping":
                return {"errors": []}
            case "begin":
                return {"errors": self._begin()}
            case "commit":
                return {"errors": self._commit(order["version"])}
        if sender is None:
            raise WireError(f"{order['do']} without a weight sync")
        if order["do"] == "write":
            size = order["bytes"]
            if "file" in order:
                try:
                    read_file(self._folder, order["file"], self._staging[:size], order["hash"])
                except WireError as error:
                    print(error, flush=True)
                    return {"errors": [str(error)]}
            else:
                wire.receive_data(self._staging[:size])
                if hash_data(self._staging[:size]) != order["hash"]:
                    raise WireError("weights do not have the hash of their order")
            self._bucket[:size].copy_(self._staging[:size])
            sender(self._bucket, order["order"], order["draft"])
            sender.wait_pending()
        elif order["do"] == "open":
            self._open(sender, order["bytes"])
        elif order["do"] == "close":
            sender.close()
            self._bucket = self._staging = torch.empty(0, dtype=torch.uint8)  # the engine generates without them
        elif order["do"] == "order":
            sender.send_order(order["order"], order["draft"])
        errors = list(sender.errors)
        if names := sender.mismatches:
            errors.append(f"its weights differ from the trainer's: {', '.join(names[:3])} ({len(names)})")
        return {"errors": errors}

    def _begin(self) -> list[str]:
        session, is_first = self._session, self._rank == 0
        self._sender = WeightSender(
            self._backend,
            self._engine if is_first else None,
            lambda payload: session.gather(self._rank, payload),
            self._timeout,
            self._gpu,
        )
        if is_first:
            session.version, session.is_updating = None, True
            try:
                self._engine.begin_update()
            except EngineError as error:
                self._sender.errors.append(str(error))
        return self._sender.errors

    def _open(self, sender: WeightSender, size: int) -> None:
        self._bucket = device.allocate_shared(size, self._gpu)
        self._staging = torch.empty(size, dtype=torch.uint8)
        # A session has two buckets; here the network is slower than the engine, so that the second would save nothing.
        sender.open([self._bucket, device.allocate_shared(8, self._gpu)], self._has_draft)

    def _commit(self, version: int | None) -> list[str]:
        try:
            self._engine.end_update(version)
        except EngineError as error:
            return [str(error)]
        self._session.version, self._session.is_updating = version, False
        return []

    def abandon(self) -> None:
        """Let go of a weight sync that has not finished."""
        if self._sender is not None:
            self._sender.close_channel()
