"""Points at which a run waits for fault injection, and faults that only its own process can cause.

`hooked.py` loads this into the processes of a training program. A point is reached once per run, also across restarts:
the file `<name>.at` records the process and the time. A point that holds the run releases it when a file `<name>.go`
exists.
"""

from __future__ import annotations

import functools
import json
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE = "MEGARL_FAULTS"
"""Environment variable with the points, as JSON: {"folder": .., "points": [{"name": .., "at": .., ..}]}."""
_LOOK_S = 0.005
_STAGES = ("tmp", "data", "manifest", "rename", "latest")


@dataclass(frozen=True)
class Point:
    """at: a name of `INSTALL`. step, rank: of the run; steps count from 1. repeats: number of further consecutive steps
    in which to repeat the fault; 0 for points that hold the run. ends: for a stage of a checkpoint, whether the thread
    that reaches it ends."""

    name: str
    at: str
    step: int
    rank: int = 0
    repeats: int = 0
    ends: bool = False


class _Current:
    """State of this process."""

    step = 0
    busy = False  # whether it is checking a point, which opens files itself


class Moment:
    def __init__(self, point: Point, folder: Path) -> None:
        self.point, self.folder = point, folder
        self.is_on_rank = int(os.environ.get("RANK", "0")) == point.rank
        self.file = folder / f"{point.name}.at"

    def is_now(self) -> bool:
        return self.is_on_rank and self.point.step <= _Current.step <= self.point.step + self.point.repeats

    def mark(self) -> bool:
        """Record that the point is reached, unless it already was."""
        try:
            descriptor = os.open(self.file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "w") as file:
            record = {"pid": os.getpid(), "beside": threading.current_thread() is not threading.main_thread()}
            json.dump({**record, "time": time.time(), "step": _Current.step}, file)
        return True

    def block(self) -> None:
        while not self.file.with_suffix(".go").exists():
            time.sleep(_LOOK_S)

    def reach(self) -> None:
        """Hold the run here, unless it has been held before."""
        if self.mark():
            self.block()


def install(settings: str) -> None:
    """Install the points in this process. given: the value of the environment variable."""
    tree = json.loads(settings)
    moments = [Moment(Point(**fields), Path(tree["folder"])) for fields in tree["points"]]
    if not moments:
        return
    from megarl.observe.run_log import RunLog

    def begin_step(self: Any, step: int) -> None:
        _Current.step = step
        original(self, step)

    original = RunLog.begin_step
    RunLog.begin_step = begin_step  # type: ignore[method-assign]
    for moment in moments:
        INSTALL[moment.point.at](moment)


def _before(owner: Any, name: str, act: Callable[..., None]) -> None:
    """Call `act` with the same arguments before a function."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        act(*arguments, **keywords)
        return function(*arguments, **keywords)

    setattr(owner, name, call)


# --- what holds the run -----------------------------------------------------------------------------------------------


def _in_forward(moment: Moment) -> None:
    """Hold in the first layer of the step's model; peers continue until they need this rank."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    import megarl.megatron.trainer_model  # noqa: F401  first: it fits Megatron-Core to a machine without GPU

    _before(TransformerLayer, "forward", lambda *_, **__: moment.reach() if moment.is_now() else None)


def _in_all_reduce(moment: Moment) -> None:
    """Hold within an all-reduce: the other ranks are kept from theirs until released."""
    import torch.distributed as dist

    def act(tensor: Any, op: Any = None, group: Any = None, async_op: bool = False) -> None:
        if _Current.step != moment.point.step or dist.get_world_size(group) < 2:
            return
        if moment.is_on_rank:
            moment.mark()
        elif not moment.file.with_suffix(".go").exists():
            moment.block()

    _before(dist, "all_reduce", act)


def _in_weight_sync(moment: Moment) -> None:
    """Hold before an order to an engine during a weight sync."""
    from megarl.engine.sglang.sglang_engine import SGLangEngine

    _before(SGLangEngine, "call_loader", lambda *_, **__: moment.reach() if moment.is_now() else None)


def _in_save(moment: Moment) -> None:
    """Hold at a stage of a step's checkpoint, whoever writes it, recognised by Python's audit events for opened
    files."""
    import sys

    stage, folder = moment.point.at.partition(":")[2], f"step_{moment.point.step:06d}"
    opened: list[str] = []

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("open", "os.rename") or _Current.busy or not moment.is_on_rank:
            return
        path = os.fsdecode(arguments[0]) if isinstance(arguments[0], (str, bytes, os.PathLike)) else ""
        if event == "open" and not _writes(arguments[1], arguments[2]):
            return
        if event == "open" and f"/{folder}.tmp/" in path:
            opened.append(path)
        if save_stage(event, path, folder, len(opened)) == stage:
            _Current.busy = True
            try:
                if not moment.point.ends:
                    moment.reach()
                elif moment.mark():
                    raise SystemExit("ended by the fault matrix")  # like a thread that is ended from outside
            finally:
                _Current.busy = False

    sys.addaudithook(audit)


def _writes(mode: Any, flags: Any) -> bool:
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR))


def save_stage(event: str, path: str, folder: str, opened: int) -> str:
    """Return the checkpoint stage about to begin; empty if none. folder: its final name. opened: number of its files
    that this process has opened for writing, including this one."""
    is_in_step = f"/{folder}.tmp/" in path
    if event == "os.rename":
        return "rename" if path.endswith(f"/{folder}.tmp") else ""
    if is_in_step and re.search(r"/manifest\.[a-z.]+$", path):
        return "manifest"
    if is_in_step and opened == 1:
        return "tmp"
    if is_in_step and opened == 2:
        return "data"
    return "latest" if re.search(r"/checkpoints/\.?latest[^/]*$", path) else ""


# --- what spoils it ---------------------------------------------------------------------------------------------------


def _on_the_wire(moment: Moment) -> None:
    """Flip a bit of what a rank sends to the engines, after it was hashed."""
    from megarl.reshard.run.executor import Executor

    original = Executor._pack

    def packed(self: Any, packs: Any, local: Any, grids: Any, out: Any, *others: Any) -> None:
        original(self, packs, local, grids, out, *others)
        if packs and moment.is_now() and moment.mark():
            out[packs[0].placed.offset] ^= 1

    Executor._pack = packed  # type: ignore


def _in_the_gradient(moment: Moment) -> None:
    """Make this rank's gradients NaN, whichever shard of them it owns."""
    from megarl.megatron import optimizer

    def corrupt(chained: Any, *_: Any) -> None:
        if moment.is_now():
            moment.mark()
            for part in chained.chained_optimizers:
                for buffer in getattr(part, "buffers", ()):
                    buffer.grad_data.fill_(float("nan"))

    _before(optimizer, "take_step", corrupt)


def _in_the_log_probs(moment: Moment) -> None:
    """Make the log-probs of this rank's first sequence NaN."""
    from megarl.megatron.trainer_model import MegatronModel

    original = MegatronModel.forward

    def forward(self: Any, batch: Any, *arguments: Any, **keywords: Any) -> Any:
        output = original(self, batch, *arguments, **keywords)
        if moment.is_now() and "logprobs" in output and len(batch.cu_seqlens) > 1 and moment.mark():
            first, end = batch.cu_seqlens[:2].tolist()
            output["logprobs"][first:end] = float("nan")
        return output

    MegatronModel.forward = forward  # type: ignore[method-assign]


INSTALL: dict[str, Callable[[Moment], None]] = {
    "forward": _in_forward,
    "all_reduce": _in_all_reduce,
    "weight_sync": _in_weight_sync,
    "wire": _on_the_wire,
    "gradient": _in_the_gradient,
    "logprobs": _in_the_log_probs,
    **{f"save:{stage}": _in_save for stage in _STAGES},
}
"""Installers of points by name."""
