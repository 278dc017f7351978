"""The rows of `gpu_check.py` in their order: the quickstart, then the others, cheap ones first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec

from megarl.config.strict import ConfigError

TE = ("megatron", "transformer_engine")
LOOP = (*TE, "sglang", "torch_memory_saver")


@dataclass(frozen=True)
class Row:
    """`work`: module of this folder and its function, device -> CheckResult. `needs`: modules that must import, with
    the device `cuda`, and on any. `cpu`: whether it has a form without a GPU, which tests the row's own code."""

    title: str
    work: str
    needs: tuple[str, ...] = ()
    cpu: bool = False
    timeout_s: float = 60.0  # on a GPU
    needs_anywhere: tuple[str, ...] = ("torch",)


ROWS: dict[str, Row] = {
    "quickstart": Row("the quickstart, shortened", "loop:quickstart", LOOP, timeout_s=240),
    "exact": Row("kernels against references", "kernels:exact", ("triton",), cpu=True),
    "ipc": Row("hand-off between processes", "handing:hand_off", cpu=True),
    "saver": Row("memory saver", "saver:pause", ("torch_memory_saver",)),
    "alone": Row("collectives of one rank", "collectives:single_rank", cpu=True),
    "shared": Row("collectives of two processes on one device", "collectives:shared", cpu=True),
    "te": Row("training step, Transformer Engine, bf16 beside fp32 on the CPU", "training:engine", TE, timeout_s=120),
    "memory": Row("memory of states against the plan", "memory:states", TE),
    "step": Row("peak memory of a step against a rehearsal's", "activations:peaks", TE, cpu=True, timeout_s=120),
    "local": Row(
        "training step, Megatron's local modules, bf16 beside fp32 on the CPU",
        "training:local",
        cpu=True,
        timeout_s=120,
        needs_anywhere=("torch", "megatron"),
    ),
    "replay": Row(
        "replayed routing (R3), bf16 beside fp32 on the CPU",
        "training:replay",
        cpu=True,
        timeout_s=120,
        needs_anywhere=("torch", "megatron"),
    ),
    "prefixes": Row(
        "common prefixes computed once, bf16 beside fp32 on the CPU",
        "training:prefixes",
        TE,
        cpu=True,
        timeout_s=120,
        needs_anywhere=("torch", "megatron"),
    ),
    "fp8": Row("FP8 training beside bf16", "training:fp8", TE, timeout_s=120),
    "compile": Row("torch.compile", "compiled:compiled", cpu=True),
    "speed": Row("kernels against a copy", "kernels:speed", ("triton",)),
    "engine": Row("the real engine: weight syncs, log-prob gap", "loop:engine", LOOP, timeout_s=180),
    "ranks": Row("two ranks on one GPU: TP2 x EP2, an engine of both", "loop:two_ranks", LOOP, timeout_s=180),
    "tests": Row("pytest -m gpu", "tests:tests", ("pytest", "hypothesis"), timeout_s=240),
}
FIRST_LOOK = ("exact", "ipc", "saver", "alone", "te")
"""Rows of `--two-minutes`."""


def parse_rows(text: str) -> list[str]:
    """Parse "ipc,local" to names in the table's order; all of them for "". Raises ConfigError."""
    names = [name.strip() for name in text.split(",")] if text else list(ROWS)
    for name in names:
        if name not in ROWS:
            raise ConfigError(f"--only: there is no row {name[:40]!r}; there are {', '.join(ROWS)}")
    return [name for name in ROWS if name in names]


def missing(names: Iterable[str], find: Callable[[str], object] = find_spec) -> list[str]:
    """Return the modules that are not installed."""
    return [name for name in names if not find(name)]


def reason_against(row: Row, device: str, has_gpu: bool, find: Callable[[str], object] = find_spec) -> str:
    """Return why a row cannot be tried on this machine; "" if it can."""
    if device == "cuda" and not has_gpu:
        return "no NVIDIA GPU"
    if device == "cpu" and not row.cpu:
        return "has no form without an NVIDIA GPU"
    if lacking := missing([*row.needs_anywhere, *(row.needs if device == "cuda" else ())], find):
        return f"not installed: {', '.join(lacking)}"
    return ""
