"""One SGLang engine: its start, health, sleep, weights and end.

The lead rank of an engine's ranks holds the `Engine`. SGLang runs in processes of its own (see `engine_host.py`), so
that on a CPU a rank never imports it, and survives its failures.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import json
import os
import re
import secrets
import socket
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from megarl.config import Config, server_args
from megarl.cpu import sglang_arguments
from megarl.cpu.sglang_arguments import NamedTensors
from megarl.engine import engine_cuda, weight_loader
from megarl.engine.engine_host_client import HOST_VARIABLE, HostedServer, HostProcess, secret_variables
from megarl.engine.engine_loss import EngineError as EngineError
from megarl.engine.engine_loss import EngineLost
from megarl.engine.tool_calls import parser_name
from megarl.models.registry import load_hf_config
from megarl.parallel import device, job_secret
from megarl.parallel.placement import engine_ranks
from megarl.reshard.plan import engine_settings

_CONFIG = "tokenizer_config.json"


def tokenizer_folder(model: str, beside: Path) -> str:
    """The model's own. Where that has no tokenizer_config.json, as with a tokenizer.model alone, SGLang 0.5.23 asks the
    Hub for one and does not start: then a folder `beside`, of links to the model's small files and an empty one."""
    if Path(model, _CONFIG).is_file() or not Path(model).is_dir():
        return model
    beside.mkdir(parents=True, exist_ok=True)
    for file in Path(model).iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            with contextlib.suppress(FileExistsError):
                (beside / file.name).symlink_to(file.resolve())
    (beside / _CONFIG).write_text("{}\n")
    return str(beside.resolve())


_LOG_LINES = 20
_PORT_IN_USE = re.compile(
    r"address already in use|EADDRINUSE|port (at )?\d+ is (already )?(in use|not available)", re.I
)
_MAX_ATTEMPTS = 3
_NOISE = re.compile(
    r"nanobind:| - (leaked|\.\.\. skipped)|See https://nanobind|\s*\^*\s*$"
    r"|\[[^]]*\] Ignore import error|Multi-thread loading shards"
)
"""What libraries print about themselves as a process begins and ends; it would hide the reason."""
_MEMORY_TAGS = ("weights", "kv_cache", "cuda_graph")
"""Of an engine's memory, each of which can sleep by itself: SGLang's tags."""


GatherPayloads = Callable[[str], list[str]]
"""Collective over an engine's ranks: this rank's payload in; all payloads, in rank order, out, on each of them.
No rank returns before all have entered."""


def start_host(config: Config, threads: int = 0) -> HostProcess:
    """A host for this machine's engines; the arguments as of `Engine`."""
    return HostProcess(
        _environment(config, threads), _platform().START_METHOD == "fork", hidden=secret_variables(config)
    )


def _environment(config: Config, threads: int) -> dict[str, str]:
    engines = Counter(members[0] // config.parallel.ranks_per_node for members in engine_ranks(config))
    return {
        # A port that takes in whoever comes, and for whose messages tensor parallel ranks then wait in vain.
        "SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "0",
        "SGLANG_FORWARD_UNKNOWN_TOOLS": "1",  # so that the policy is told which tool does not exist
        # From when the engine begins to work on a request, so without the time that it waits in its queue.
        "SGLANG_REQ_RUNNING_TIMEOUT": str(config.rollout.request_timeout),
        **({"GLOO_SOCKET_IFNAME": "lo"} if config.rollout.tp <= config.parallel.ranks_per_node else {}),
        "PYTHONWARNINGS": "ignore",  # dozens at each start, which would hide a failure's last lines
        **engine_settings.ENVIRONMENT,
        **_platform().environment(config.rollout.tp, max(engines.values(), default=1), threads),
    }


def _platform() -> ModuleType:
    return engine_cuda if device.has_cuda() else sglang_arguments


def check_platform(config: Config) -> None:
    """Raise ConfigError where SGLang is not installed, and for a setting of it that an engine here cannot have."""
    server_args.check_installed()
    _platform().check(config.rollout.sglang)


def allocate(size: int) -> torch.Tensor:
    """[size] uint8 where an engine's rank beside this one can be handed it, see `packed`."""
    tensor: torch.Tensor = _platform().allocate(size)
    return tensor


def pack_payload(tensors: NamedTensors) -> str:
    """A payload for the engine's rank beside this one: it says where the data are, which must stay there meanwhile.
    tensors: of `allocate`."""
    return base64.b64encode(_platform().pack(tensors)).decode()


class Engine:
    """Life cycle of one engine. Not thread-safe; one object per engine, on its lead rank.

    config: model, dtype, rollout.* and run.* are read. index: number of the engine within the job; names its log
    `<run.dir>/logs/engine_<index>.log`. threads: of each of the engine's tensor parallel ranks on a CPU; 0 for its
    share of the cores; where a host is shared, it is the host's number that counts. first_device: the first GPU of
    this engine. nnodes, node_rank, dist_init_addr ("host:port"): for an engine across machines, one object on each;
    only that with node_rank 0 generates.
    """

    def __init__(
        self,
        config: Config,
        index: int = 0,
        *,
        threads: int = 0,
        first_device: int = 0,
        nnodes: int = 1,
        node_rank: int = 0,
        dist_init_addr: str = "",
    ) -> None:
        server_args.check(config.rollout.sglang)
        self.config = config
        self.index = index
        self.nnodes, self.node_rank, self.dist_init_addr = nnodes, node_rank, dist_init_addr
        self.threads, self.first_device = threads, first_device
        self.api_key = secrets.token_urlsafe(24)
        self.port = 0
        self.is_usable = False
        """Whether it may generate: it is ready, and no push has failed since the last whole one."""
        self.weight_version = 0
        """Of the weights that it was given last; 0 are those that it has loaded itself."""
        self.tool_call_parser = ""
        """SGLang's parser for the policy's tool calls."""
        self.tool_call_marker = ""
        """Text by which SGLang's parser knows a tool call; empty where the parser has none."""
        node = f"_node_{node_rank}" if nnodes > 1 else ""
        self.log = Path(config.run.dir, "logs", f"engine_{index}{node}.log")
        self._platform = _platform()
        self._host: HostProcess | None = None
        self._server: HostedServer | None = None
        self._asleep: set[str] = set()  # of _PARTS
        self.is_paused = False
        """Whether it was told to stop at the next token."""
        self.start_number = 1
        """Which start of it this is."""
        self._is_shut_down = False
        # Loopback must not go through a proxy that the environment names.
        self._http = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    @property
    def _call_timeout(self) -> float:
        return self.config.rollout.start_timeout

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the engine's processes and return at once; `wait_ready` follows."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.write_bytes(b"")
        self._tries = 1
        self._launch()
        atexit.register(self.shutdown)

    def restart(self) -> None:
        """End what there is of its processes, which frees their memory, and start them anew; `wait_ready` follows. It
        has the weights that it loads itself then, and may not generate before a push."""
        server, self._server = self._server, None
        self.is_usable = self.is_paused = False
        self.start_number, self.weight_version = self.start_number + 1, 0
        self._asleep.clear()
        if server is not None:
            server.close()
        with self.log.open("ab") as log:
            log.write(b"--- started again\n")
        self._tries = 1
        if not self._is_shut_down:
            self._launch()
            atexit.register(self.shutdown)

    def _launch(self) -> None:
        rollout = self.config.rollout
        self.tool_call_parser = parser_name(rollout.tool_call_parser, load_hf_config(self.config.model.path))
        self._log_offset = self.log.stat().st_size  # of the log, which earlier tries have written to
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        arguments: dict[str, Any] = {
            "model_path": self.config.model.path,
            "tokenizer_path": tokenizer_folder(self.config.model.path, self.log.with_suffix("")),
            "dtype": self.config.model.dtype,
            "tp_size": rollout.tp,
            "ep_size": rollout.ep,
            "random_seed": self.config.run.seed + self.index,
            "host": "127.0.0.1",
            "port": self.port,
            "api_key": self.api_key,
            "nnodes": self.nnodes,
            "node_rank": self.node_rank,
            "weight_version": str(self.weight_version),
            "custom_weight_loader": [weight_loader.LOADER_NAME],
            "skip_server_warmup": True,
            "incremental_streaming_output": True,
            "log_level": "warning",
            "enable_return_routed_experts": self.config.train.replay_routing,
            **({"dist_init_addr": self.dist_init_addr} if self.dist_init_addr else {}),
            **server_args.speculative_args(rollout.draft_tokens),
            **server_args.sampling_args(rollout),
            **self._platform.server_args(self.config, self.first_device),
            **rollout.sglang,
        }
        self._facts = self.log.with_suffix(".json")
        self._facts.unlink(missing_ok=True)
        settings = {
            "server_args": arguments,
            "facts": str(self._facts.resolve()),
            "tool_call_parser": self.tool_call_parser,
            "start_method": self._platform.START_METHOD,
            "secret": job_secret.engine_secret(self.index),
        }
        path = os.environ.get(HOST_VARIABLE, "")
        if not path:
            self._host = self._host or start_host(self.config, self.threads)
            path = self._host.path
        environment = _environment(self.config, self.threads)
        try:
            self._server = HostedServer(path, self.log, environment, settings)
        except OSError as error:
            raise EngineError(f"engine {self.index}: nobody at {path} to start it ({error})") from None

    def wait_ready(self, timeout: float | None = None) -> None:
        """Block until the engine answers; `timeout` defaults to `rollout.start_timeout` seconds.

        Raises EngineError with the last log lines when it dies or does not get there in time. A port that another
        process took in the meantime is replaced by another, and an engine that was killed with its host is started
        again, a few times.
        """
        limit = self.config.rollout.start_timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        while not self._is_responding():
            if self._is_shut_down or self._server is None:
                raise EngineError(f"engine {self.index} was ended before it was ready")
            if self._server.poll() is not None:
                again = self._server.is_abandoned or self._is_port_in_use()
                if again and self._tries < _MAX_ATTEMPTS:
                    self._tries += 1
                    self._launch()
                else:
                    self._end()
                    raise EngineError(f"engine {self.index} did not start; {self._describe_log_tail()}")
            elif time.monotonic() > deadline:
                self._end()
                raise EngineError(f"engine {self.index} was not ready after {limit:g} s; {self._describe_log_tail()}")
            time.sleep(0.2)
        facts = json.loads(self._facts.read_text())
        self.tool_call_marker = facts["tool_call_marker"]
        self.is_usable = True

    def _is_responding(self) -> bool:
        # With the key, so that another server on this port is not taken for ours. /health would generate a token.
        try:
            self._call("/model_info" if self.node_rank == 0 else "/health", timeout=5.0, post=False)
            return True
        except (EngineError, OSError):
            return False

    def check_running(self, start: int = 0) -> None:
        """Raise EngineLost if the engine is gone. start: `starts` of when it was known to run: one that was started
        again since is another."""
        server = self._server  # it may be started again meanwhile
        if (start and start != self.start_number) or server is None or server.poll() is not None:
            raise EngineLost("died", f"engine {self.index} is not running; {self._describe_log_tail()}", start=start)

    def hang_error(self, seconds: float) -> EngineLost:
        """What is said of it where it gave no sign of life for so long."""
        text = (
            f"engine {self.index} gave no sign of life for {seconds:.0f} s, more than rollout.hang_timeout="
            f"{self.config.rollout.hang_timeout:g} allows; {self._describe_log_tail()}"
        )
        return EngineLost("hangs", text, seconds)

    def check_alive(self) -> None:
        """Raise EngineLost if the engine is gone, EngineError if it may not generate."""
        self.check_running()
        if not self.is_usable:
            raise EngineError(f"engine {self.index} has no whole set of weights; push them first")

    def begin_update(self) -> None:
        """Open the session in which `order` may be called. The engine is unusable until `end_update` with a version."""
        self.is_usable = False
        self._call("/begin_weight_update")

    def call_loader(self, payloads: list[str], draft: bool = False, lasting: bool = False) -> None:
        """Have the loader in each of the engine's ranks do what its payload says, one per rank, see `weight_sender.py`.

        draft: orders for the draft model, which has the layers of multi-token prediction. Returns when all ranks are
        done; what they answer is in the memory that the payloads speak of. lasting: of a push, which may take long.
        """
        body: dict[str, Any] = {
            "serialized_named_tensors": payloads,
            "load_format": weight_loader.LOADER_NAME,
            "flush_cache": False,
        }
        body["selector"] = "draft" if draft else "target"
        timeout = 86400.0 if lasting else self.config.rollout.hang_timeout  # a day, whatever the size
        self._call("/update_weights_from_tensor", body, timeout=timeout)

    def end_update(self, version: int | None) -> None:
        """Close the session. version: number of the weights that the engine now has, all of them; it generates with
        them from now on. None where the update failed: the engine stays unusable. The KV cache may be asleep: flushing
        it only forgets what was where, as SGLang itself does when it has put it to sleep. Where answers are held it
        stays: they go on with it, and what is asked for later has a cache of its own, by the version."""
        self._call("/end_weight_update")
        if version is None:
            return
        if not self.is_paused:
            self._flush_cache()  # it is of the old weights
        self._call("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})
        self.weight_version, self.is_usable = version, True

    def pause_generation(self) -> None:
        """Stop at the next token of all answers, until `go_on`; they keep what they have in the KV cache."""
        self._call("/pause_generation", {"mode": "in_place"})
        self.is_paused = True

    def resume_generation(self) -> None:
        """Undo `hold`, if it was called."""
        if self.is_paused:
            self._call("/continue_generation")
        self.is_paused = False

    def abort_requests(self) -> None:
        """Have it let go of every request, also of those whose client has given up; return when it is idle."""
        self._call("/abort_request", {"abort_all": True})
        self._flush_cache()

    def _flush_cache(self) -> None:
        """Drop the KV cache. It answers when nothing runs any more: what has been answered may still be leaving."""
        self._call(f"/flush_cache?timeout={self._call_timeout / 2:g}")

    def sleep(self) -> None:
        """Give the device to training: free what is awake where there is a GPU, else drop the KV cache."""
        awake = [part for part in _MEMORY_TAGS if part not in self._asleep]  # SGLang wants no part twice
        if not awake:
            return
        self._flush_cache()
        if self._platform.has_memory_saver():
            self._call("/release_memory_occupation", {"tags": awake})
        self._asleep.update(awake)

    def wake_weights(self) -> None:
        """Undo `sleep` for a push, which has no use for the rest. On a GPU the weights' contents are gone: it must
        follow."""
        self._wake("weights")

    def wake(self) -> None:
        """Undo `sleep` for whatever is still asleep, before generating."""
        self._wake(*_MEMORY_TAGS)

    def _wake(self, *parts: str) -> None:
        asleep = [part for part in parts if part in self._asleep]
        if not asleep:
            return
        if self._platform.has_memory_saver():
            self._call("/resume_memory_occupation", {"tags": asleep})
            self.is_usable = self.is_usable and "weights" not in asleep
        self._asleep.difference_update(asleep)

    def shutdown(self) -> None:
        """End the engine and all of its processes, for good; safe to call twice, and at exit."""
        self._is_shut_down = True
        self._end()

    def _end(self) -> None:
        server, self._server = self._server, None
        host, self._host = self._host, None
        self.is_usable = False
        atexit.unregister(self.shutdown)
        if host is not None:
            host.close()  # and with it the server
        if server is not None:
            server.close()

    def _call(self, path: str, body: dict[str, Any] | None = None, timeout: float = 0.0, post: bool = True) -> Any:
        headers = {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"}
        data = json.dumps(body or {}).encode() if post else None
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with self._http.open(request, timeout=timeout or self._call_timeout) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            text = error.read()[:500].decode(errors="replace")
            raise EngineError(f"engine {self.index} refused {path}: {text or error}") from None
        except OSError as error:
            late = isinstance(error, TimeoutError) or isinstance(getattr(error, "reason", None), TimeoutError)
            text = f"engine {self.index} does not answer {path} ({error}); {self._describe_log_tail()}"
            raise EngineLost("hangs" if late else "died", text) from None
        try:
            return json.loads(text)
        except ValueError:
            return text.decode(errors="replace")

    def _is_port_in_use(self) -> bool:
        """Whether this try says so anywhere: long tracebacks of several processes may follow."""
        with self.log.open(errors="replace") as log:
            log.seek(self._log_offset)
            return any(_PORT_IN_USE.search(line) for line in log)

    def _read_log_tail(self) -> str:
        if not self.log.exists():
            return ""
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if not _NOISE.match(line)]
        return "\n".join(lines[-_LOG_LINES:])

    def _describe_log_tail(self) -> str:
        return f"the last lines of {self.log}:\n{self._read_log_tail() or '(nothing)'}"
