"""A kind of engine (`rollout.engine`) for rehearsals, whose processes do not run.

What a weight sync sends to the engine rank on its device is
answered in this process, as `engine/weight_loader.py` would: every name, dtype, shape and place in a bucket is checked
against the tensors that the layout table expects the engine to have. Their bytes are not counted as the trainer's.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from megarl.config import Config
from megarl.engine import weight_loader
from megarl.engine.engine_backends import NamedTensors, engine_backend
from megarl.models.family import HFConfig
from megarl.reshard.plan.layout import EngineLayout, EngineTensors


class EngineRank:
    """The process of an engine on this rank's device, as far as a weight sync sees it.

    tensors: dtype and shape by name, of the engine's model (False) and of its draft model (True).
    """

    def __init__(self, tensors: Mapping[bool, EngineTensors]) -> None:
        with _disable_current_modes():  # which count the trainer's memory
            self._tensors = {draft: _allocate(described) for draft, described in tensors.items()}
        self._described = tensors
        self._factors: dict[bool, dict[str, torch.Tensor]] = {draft: {} for draft in tensors}
        self._session: threading.Thread | None = None
        self.orders: Counter[str] = Counter()
        """Orders executed, by what they do."""
        self.written_bytes = 0
        """Bytes that orders have written to the tensors."""

    @property
    def nbytes(self) -> int:
        """Bytes of the engine's weights on this rank."""
        return sum(tensor.nbytes for tensors in self._tensors.values() for tensor in tensors.values())

    def receive(self, named_tensors: NamedTensors) -> None:
        """Execute the order of a payload and write the answer, or start the session that it asks for."""
        shared = dict(named_tensors)
        order = json.loads(shared["order"].numpy().tobytes())
        if order["do"] == "session":
            serve = self._serve, (order["socket"], [shared["bucket"], shared["bucket1"]])
            self._session = threading.Thread(target=serve[0], args=serve[1], name="engine stand-in", daemon=True)
            self._session.start()
        else:
            weight_loader.write_answer(shared["answer"], self.execute(order, None))

    def wait_session(self) -> None:
        """Wait until the trainer has hung up."""
        if self._session is not None:
            self._session.join()

    def _serve(self, path: str, buckets: Sequence[torch.Tensor]) -> None:
        weight_loader.serve_orders(path, lambda order: self.execute(order, buckets[order["bucket"]]))

    def execute(self, order: Mapping[str, Any], bucket: torch.Tensor | None) -> dict[str, Any]:
        """Return the answer to an order, see `weight_loader.py`; {"error": text} if the order is invalid."""
        self.orders[order["do"]] += 1
        try:
            return self._execute(order, bucket)
        except (ValueError, KeyError, RuntimeError, IndexError) as error:
            return {"error": f"{type(error).__name__}: {error}"}

    def _execute(self, order: Mapping[str, Any], bucket: torch.Tensor | None) -> dict[str, Any]:
        draft = order["draft"]
        tensors, factors = self._tensors[draft], self._factors[draft]
        match order["do"]:
            case "describe":
                tensors_of_order = {
                    name: [dtype, list(shape)] for name, (dtype, shape) in self._described[draft].items()
                }
                return {"tensors": tensors_of_order, "odd": []}
            case "write" | "compare" | "read" as action:
                if bucket is None:
                    raise ValueError(f"a request to {action} needs a bucket")
                targets = weight_loader.resolve_targets(tensors | factors, dict(order), bucket)
                if action == "write":
                    self.written_bytes += sum(target.target.nbytes for target in targets)
            case "keep" | "select":
                with _disable_current_modes():
                    factors |= _allocate(order["factors"])
            case "merge":
                for name, first, count, dim, offset, a_name, b_name in order["merges"]:
                    target, a, b = (
                        tensor[None] if first == -1 else tensor.narrow(0, first, count)
                        for tensor in (tensors[name], factors[a_name], factors[b_name])
                    )
                    target.narrow(dim - 2, offset, a.shape[-1] if dim else b.shape[-2])
            case "join" | "finish":
                pass
            case action:
                raise ValueError(f"unknown order {action!r}")
        return {}


def _allocate(described: EngineTensors) -> dict[str, torch.Tensor]:
    return {
        name: torch.empty(tuple(shape), dtype=getattr(torch, dtype), device="meta")
        for name, (dtype, shape) in described.items()
    }


class EngineProcess:
    """Stands in for an engine on its lead rank, as `engine_protocol.Engine`: it is always ready, and never lost."""

    def __init__(self, config: Config, index: int, nnodes: int, node_rank: int) -> None:
        self.config, self.index, self.name = config, index, f"engine {index}"
        self.nnodes, self.node_rank = nnodes, node_rank
        self.log, self.url, self.api_key = Path("/nonexistent"), "", ""
        self.start_number, self.weight_version = 1, 0
        self.is_usable, self.is_paused, self.is_asleep = True, False, False
        self.tool_call_parser = self.tool_call_marker = ""
        self._adapter_versions: dict[str, int] = {}

    def version_of(self, adapter: str) -> int:
        return self._adapter_versions.get(adapter, 0) if adapter else self.weight_version

    def connect(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("nothing generates in a rehearsal")

    def start(self) -> None: ...

    def restart(self) -> None: ...

    def wait_ready(self, timeout: float | None = None) -> None: ...

    def check_running(self, start_number: int = 0) -> None: ...

    def hang_error(self, seconds: float) -> Any:
        raise AssertionError(f"the weight sync waited {seconds} s for an engine that stands in for one")

    def begin_update(self) -> None:
        self.is_usable = False

    def call_loader(self, payloads: list[str], draft: bool = False, is_session: bool = False) -> None:
        """Wait for the session, if it is one; every other order is executed when its payload is packed."""
        if is_session:
            _local_rank().wait_session()

    def end_update(self, version: int | None, adapter: str = "") -> None:
        self.is_usable = version is not None
        if adapter and version is not None:
            self._adapter_versions[adapter] = version
        elif version is not None:
            self.weight_version = version

    def pause_generation(self) -> None: ...

    def resume_generation(self) -> None: ...

    def abort_requests(self) -> None: ...

    def sleep(self) -> None: ...

    def wake_weights(self) -> None: ...

    def wake(self) -> None: ...

    def shutdown(self) -> None: ...


class BackendStandIn:
    """A kind of engine with the layout of the real one, as `engine_backends.EngineBackend`."""

    title = "rehearsed"

    def layout(self, hf: HFConfig, config: Config) -> EngineLayout:
        config = _with_kind(config, _local.kind)
        return engine_backend(config).layout(hf, config)

    def make_engine(
        self, config: Config, index: int = 0, *, nnodes: int = 1, node_rank: int = 0, **_: Any
    ) -> EngineProcess:
        return EngineProcess(config, index, nnodes, node_rank)

    def pack_payload(self, tensors: NamedTensors) -> str:
        """Have the engine rank on this device execute the payload."""
        _local_rank().receive(tensors)
        return ""


_KIND = f"{__name__}:{BackendStandIn.__name__}"


@dataclasses.dataclass
class _Local:
    """Settings of the stand-in; a kind of engine takes no arguments.

    kind: the real `rollout.engine`. rank: the engine rank of the current weight sync.
    """

    kind: str = ""
    rank: EngineRank | None = None


_local = _Local()


def _local_rank() -> EngineRank:
    assert _local.rank is not None, "orders are sent within `activate`"
    return _local.rank


def with_stand_ins(config: Config) -> Config:
    """Return the configuration with this kind of engine, for engines of the kind that it names."""
    _local.kind = config.rollout.engine
    return _with_kind(config, _KIND)


@contextmanager
def activate(rank: EngineRank | None) -> Iterator[None]:
    """Have this engine rank answer the orders that are sent to this rank's device within the block."""
    previous, _local.rank = _local.rank, rank
    try:
        yield
    finally:
        _local.rank = previous


def _with_kind(config: Config, kind: str) -> Config:
    return dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, engine=kind))
