"""One engine whose server answers by HTTP: start, health, sleep and wake, weight updates, shutdown.

The lead rank of an engine's ranks holds the `HTTPEngine`. Its server runs in separate processes (see `engine_host.py`).
So a rank never imports the engine, and survives its failure. The paths, and what is sent to them, are SGLang's.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import secrets
import socket
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from megarl.config import Config
from megarl.engine.engine_host import HOST_VARIABLE, HostedServer, HostProcess
from megarl.engine.engine_protocol import EngineError, EngineLost
from megarl.engine.http_client import HTTPClient
from megarl.engine.tool_calls import parser_name
from megarl.models.registry import load_hf_config
from megarl.models.routing import RoutingShape
from megarl.models.sparse_indices import IndexShape

_LOG_LINES = 20
_PORT_IN_USE = re.compile(
    r"address already in use|EADDRINUSE|port (at )?\d+ is (already )?(in use|not available)", re.I
)
_MAX_ATTEMPTS = 3
_NOISE = re.compile(
    r"nanobind:| - (leaked|\.\.\. skipped)|See https://nanobind|\s*\^*\s*$"
    r"|\[[^]]*\] Ignore import error|Multi-thread loading shards"
    r"|Loading safetensors checkpoint shards|Triton is installed|\[W.*NUMA binding"
)
"""Lines that libraries print when a process starts and ends; they would hide the reason for a failure."""
_MEMORY_TAGS = ("weights", "kv_cache", "cuda_graph")
"""Tags for the parts of an engine's memory that can be offloaded separately."""


class ServerLaunch(NamedTuple):
    """How to start a server, see `engine_host.HostedServer`.

    module: the server. python: the interpreter with its packages. environment, settings: as the server needs them.
    """

    module: str
    python: str
    environment: Mapping[str, str]
    settings: Mapping[str, Any]


class HTTPEngine(ABC):
    """An `Engine` in separate processes that `engine_host.py` starts. Arguments as for `EngineBackend.make_engine`.

    A kind of engine is a subclass with `_make_launch` and `_start_host`. Its server answers the paths that are called
    here and in `http_client.py`.
    """

    _loader_name = ""
    """Names the weight loader in a request, if the server asks for a name."""

    def __init__(
        self,
        config: Config,
        index: int = 0,
        *,
        label: str = "engine",
        keeps_weights: bool = False,
        threads: int = 0,
        first_rank: int = 0,
        nnodes: int = 1,
        node_rank: int = 0,
        dist_init_addr: str = "",
    ) -> None:
        self.config, self.index, self.name, self.keeps_weights = config, index, f"{label} {index}", keeps_weights
        self.nnodes, self.node_rank, self.dist_init_addr = nnodes, node_rank, dist_init_addr
        self.threads, self.first_rank = threads, first_rank
        self.api_key, self.port = secrets.token_urlsafe(24), 0
        self.is_usable = False
        """True if the engine may generate: it is ready, and no weight sync has failed since the last complete one."""
        self.weight_version = 0
        """Version of the last weight sync; 0 for the weights that the engine loaded itself."""
        self._adapter_versions: dict[str, int] = {}
        self.tool_call_parser = ""
        """Name of SGLang's parser for the policy's tool calls."""
        self.parses_tool_calls = False
        """Whether the server itself parses tool calls, for clients of its OpenAI API. Set it before `start`."""
        self.tool_call_marker = ""
        """Text by which SGLang's parser recognizes a tool call; empty if the parser has none."""
        node = f"_node_{node_rank}" if nnodes > 1 else ""
        self.log = Path(config.run.dir, "logs", f"{self.name.replace(' ', '_')}{node}.log")
        self._host: HostProcess | None = None
        self._server: HostedServer | None = None
        self._asleep: set[str] = set()  # subset of _MEMORY_TAGS
        self.is_paused = False
        """True between `pause_generation` and `resume_generation`."""
        self.start_number = 1
        """Number of starts so far, restarts included."""
        self._is_shut_down = False
        # Loopback must bypass any proxy set in the environment.
        self._http = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    @property
    def _can_free_memory(self) -> bool:
        """Whether the server can release parts of its memory (`_MEMORY_TAGS`); if not, `sleep` flushes its cache."""
        return False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connect(
        self,
        timeout: float,
        routing: RoutingShape | None = None,
        indices: IndexShape | None = None,
        adapter: str = "",
    ) -> HTTPClient:
        check_running = partial(self.check_running, self.start_number)
        version = self.version_of(adapter)
        return HTTPClient(self.url, self.api_key, timeout, routing, version, check_running, indices, adapter)

    def version_of(self, adapter: str) -> int:
        return self._adapter_versions.get(adapter, 0) if adapter else self.weight_version

    def start(self) -> None:
        """Start the engine's processes without waiting; call `wait_ready` next."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.write_bytes(b"")
        self._tries = 1
        self._launch()
        atexit.register(self.shutdown)

    def restart(self) -> None:
        """Kill any remaining processes, which frees their memory, and start anew; call `wait_ready` next.

        The engine then has the weights that it loads itself, and may not generate before a weight sync.
        """
        server, self._server = self._server, None
        self.is_usable = self.is_paused = False
        self.start_number, self.weight_version, self._adapter_versions = self.start_number + 1, 0, {}
        self._asleep.clear()
        if server is not None:
            server.close()
        with self.log.open("ab") as log:
            log.write(b"--- started again\n")
        self._tries = 1
        if not self._is_shut_down:
            self._launch()
            atexit.register(self.shutdown)

    @abstractmethod
    def _make_launch(self) -> ServerLaunch:
        """Return how to start the server on `port`, with `api_key` and `tool_call_parser`."""

    @abstractmethod
    def _start_host(self) -> HostProcess:
        """Start a host for this engine alone."""

    def _launch(self) -> None:
        hf = load_hf_config(self.config.model.path)
        self.tool_call_parser = parser_name(self.config.rollout.tool_call_parser, hf)
        self._log_offset = self.log.stat().st_size  # earlier attempts have written to the same log
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._facts = self.log.with_suffix(".json")
        self._facts.unlink(missing_ok=True)
        launch = self._make_launch()
        settings = {
            **launch.settings,
            "facts": str(self._facts.resolve()),
            "tool_call_parser": self.tool_call_parser,
        }
        path = os.environ.get(HOST_VARIABLE, "")
        if not path:
            try:
                self._host = self._host or self._start_host()
            except OSError as error:
                raise EngineError(f"{self.name}: its host process cannot be started ({error})") from None
            path = self._host.path
        try:
            self._server = HostedServer(path, launch.module, self.log, launch.environment, settings, launch.python)
        except OSError as error:
            raise EngineError(f"{self.name}: no engine host listens at {path} ({error})") from None

    def wait_ready(self, timeout: float | None = None) -> None:
        """Block until the engine answers; `timeout` defaults to `rollout.start_timeout` seconds.

        Raises EngineError with the last log lines if it dies or times out. It is launched again, a few times, if
        another process has taken its port, or it was killed together with its host.
        """
        limit = self.config.rollout.start_timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        while not self._is_responding():
            if self._is_shut_down or self._server is None:
                raise EngineError(f"{self.name} was terminated before it was ready")
            if self._server.poll() is not None:
                should_retry = self._server.is_abandoned or self._is_port_in_use()
                if should_retry and self._tries < _MAX_ATTEMPTS:
                    self._tries += 1
                    self._launch()
                else:
                    self._end()
                    raise EngineError(f"{self.name} did not start; {self._describe_log_tail()}")
            elif time.monotonic() > deadline:
                self._end()
                raise EngineError(f"{self.name} was not ready after {limit:g} s; {self._describe_log_tail()}")
            time.sleep(0.2)
        facts = json.loads(self._facts.read_text())
        self.tool_call_marker = facts["tool_call_marker"]
        self.is_usable = True

    def _is_responding(self) -> bool:
        # /model_info needs the key, so another server on this port does not pass. /health would generate a token.
        try:
            self._call("/model_info" if self.node_rank == 0 else "/health", timeout=5.0, post=False)
            return True
        except (EngineError, OSError):
            return False

    def check_running(self, start_number: int = 0) -> None:
        """Raise EngineLost if the engine is gone; one that was started again since `start_number` is another."""
        server = self._server  # another thread may restart the engine meanwhile
        if (start_number and start_number != self.start_number) or server is None or server.poll() is not None:
            raise EngineLost(
                "died", f"{self.name} is not running; {self._describe_log_tail()}", start_number=start_number
            )

    def hang_error(self, seconds: float) -> EngineLost:
        """Return the EngineLost for an engine that sent no heartbeat for `seconds`."""
        text = (
            f"{self.name} sent no heartbeat for {seconds:.0f} s, more than rollout.hang_timeout="
            f"{self.config.rollout.hang_timeout:g} allows; {self._describe_log_tail()}"
        )
        return EngineLost("hangs", text, seconds)

    def begin_update(self) -> None:
        """Open a weight update for `call_loader`. The engine is unusable until `end_update` with a version."""
        self.is_usable = False
        self._call("/begin_weight_update")

    def call_loader(self, payloads: list[str], draft: bool = False, is_session: bool = False) -> None:
        """Have the weight loader on each of the engine's ranks execute its payload, see `weight_sender.py`.

        Returns when all are done; their answers are in the shared memory that the payloads name. draft: address the
        draft model, which has the multi-token prediction layers. is_session: the request spans a weight sync.
        """
        body = {
            "serialized_named_tensors": payloads,
            "load_format": self._loader_name,
            "flush_cache": False,
            "selector": "draft" if draft else "target",
        }
        timeout = 86400.0 if is_session else self.config.rollout.hang_timeout  # one day, enough for any model size
        self._call("/update_weights_from_tensor", body, timeout=timeout)

    def end_update(self, version: int | None, adapter: str = "") -> None:
        """Close the weight update.

        version: weight version that the engine now holds completely; None if the update failed: the engine stays
        unusable. adapter: the one that has this version now, if the update wrote one beside others. While generation is
        paused the KV cache stays: paused responses go on with it, and later requests use a separate prefix cache, keyed
        by the version.
        """
        self._call("/end_weight_update")
        if version is None:
            return
        if not self.is_paused:
            self._flush_cache()  # computed with the old weights; if it is offloaded, this resets the bookkeeping
        body = {"new_version": str(version), "abort_all_requests": False}
        self._call("/update_weight_version", body | ({"lora_path": adapter} if adapter else {}))
        if adapter:
            self._adapter_versions[adapter] = version
        else:
            self.weight_version = version
        self.is_usable = True

    def pause_generation(self) -> None:
        """Pause all responses at the next token until `resume_generation`; they keep their KV cache."""
        self._call("/pause_generation", {"mode": "in_place"})
        self.is_paused = True

    def resume_generation(self) -> None:
        """Undo `pause_generation`, if it was called."""
        if self.is_paused:
            self._call("/continue_generation")
        self.is_paused = False

    def abort_requests(self) -> None:
        """Abort every request, even those whose client has given up; return when the engine is idle."""
        self._call("/abort_request", {"abort_all": True})
        self._flush_cache()

    @property
    def is_asleep(self) -> bool:
        """True if some of its memory is released."""
        return bool(self._asleep)

    def _flush_cache(self) -> None:
        """Drop the KV cache. This waits until nothing runs: finished requests may still be leaving."""
        self._call(f"/flush_cache?timeout={self.config.rollout.start_timeout / 2:g}")

    def sleep(self) -> None:
        """Free the device for training: offload what is not yet offloaded on a GPU; on a CPU only drop the KV cache."""
        awake = [part for part in _MEMORY_TAGS if part not in self._asleep]  # SGLang releases no tag twice
        if not awake:
            return
        self._flush_cache()
        if self._can_free_memory:
            self._call("/release_memory_occupation", {"tags": awake})
        self._asleep.update(awake)

    def wake_weights(self) -> None:
        """Onload the weights alone, for a weight sync. On a GPU their contents are lost unless `keeps_weights`."""
        self.wake(("weights",))

    def wake(self, parts: Sequence[str] = _MEMORY_TAGS) -> None:
        """Onload everything that is still offloaded, before generating."""
        asleep = [part for part in parts if part in self._asleep]
        if not asleep:
            return
        if self._can_free_memory:
            self._call("/resume_memory_occupation", {"tags": asleep})
            self.is_usable = self.is_usable and (self.keeps_weights or "weights" not in asleep)
        self._asleep.difference_update(asleep)

    def shutdown(self) -> None:
        """End the engine and all of its processes for good. Idempotent; also runs at exit."""
        self._is_shut_down = True
        self._end()

    def _end(self) -> None:
        server, self._server = self._server, None
        host, self._host = self._host, None
        self.is_usable = False
        atexit.unregister(self.shutdown)
        if host is not None:
            host.close()  # also ends the server
        if server is not None:
            server.close()

    def _call(self, path: str, body: dict[str, Any] | None = None, timeout: float = 0.0, post: bool = True) -> Any:
        headers = {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"}
        data = json.dumps(body or {}).encode() if post else None
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with self._http.open(request, timeout=timeout or self.config.rollout.start_timeout) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            text = error.read()[:500].decode(errors="replace")
            raise EngineError(f"{self.name} refused {path}: {text or error}") from None
        except OSError as error:
            is_timeout = isinstance(error, TimeoutError) or isinstance(getattr(error, "reason", None), TimeoutError)
            text = f"{self.name} does not respond {path} ({error}); {self._describe_log_tail()}"
            raise EngineLost("hangs" if is_timeout else "died", text) from None
        try:
            return json.loads(text)
        except ValueError:
            return text.decode(errors="replace")

    def _is_port_in_use(self) -> bool:
        """Search all of this attempt's log: long tracebacks of several processes may follow the line."""
        with self.log.open(errors="replace") as log:
            log.seek(self._log_offset)
            return any(_PORT_IN_USE.search(line) for line in log)

    def _describe_log_tail(self) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        lines = [line for line in text.splitlines() if not _NOISE.match(line)]
        tail = "\n".join(lines[-_LOG_LINES:])
        return f"the last lines of {self.log}:\n{tail or '(nothing)'}"
