"""Live progress display of a run; one line per step if the output is not a terminal."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megarl.observe.health_bands import Band

DISPLAYED_METRICS: tuple[tuple[str, str, str], ...] = (
    ("reward", "rollout/reward_mean", ".3f"),
    ("loss", "actor/nll", ".4f"),
    ("loss", "reward_model/loss", ".4f"),
    ("accuracy", "reward_model/accuracy", ".3f"),
    ("margin", "reward_model/margin", ".3f"),
    ("accuracy", "rewards/accuracy", ".3f"),
    ("margin", "rewards/margin", ".3f"),
    ("reverse KL to the teacher", "distill/reverse_kl", ".4f"),
    ("KL to reference", "actor/kl_to_reference", ".4f"),
    ("entropy", "actor/entropy", ".3f"),
    ("gradient norm", "actor/grad_norm", ".3f"),
    ("skipped updates", "actor/skipped", ".0%"),
    ("skipped updates of the critic", "critic/skipped", ".0%"),
    ("skipped updates", "reward_model/skipped", ".0%"),
    ("tool calls", "rollout/tool_calls_mean", ".2f"),
    ("log-prob difference", "rollout/logprob_diff", ".1e"),
    ("mean log-prob difference", "rollout/logprob_diff_mean", ".1e"),
    ("without replay", "rollout/logprob_diff_mean_unreplayed", ".1e"),
    ("tokens/s per rank", "perf/tokens_per_second_per_rank", ",.0f"),
    ("s/step", "time/step", ".1f"),
)
"""Title, metric and format of each displayed metric; metrics that a run lacks are skipped."""
HIDDEN_IF_ZERO = ("actor/skipped", "critic/skipped", "reward_model/skipped")
"""Displayed metrics that are skipped while they are 0."""
REPORT_INTERVAL_S = 60.0
"""How often a long phase is logged if the output is not a terminal."""
MIN_BAR_S = 5.0
"""Phases expected to be shorter have no progress bar."""
DOMINANT_SHARE = 0.3
"""Phases that take at least this fraction of a step are named."""
EVAL_PREFIXES = ("eval/reward_", "eval/pass_at_", "eval/nll", "eval/accuracy", "eval/margin")
"""Prefixes of the evaluation metrics that are displayed."""


class Progress:
    """Progress display of a run. Every rank creates one; only an enabled one (rank 0's) prints.

    Evaluation metrics (`eval/...`) stay on display until the next evaluation.

    Args:
        total: number of steps.
        live: whether to redraw in place; None to do so if the output is a terminal.
        bands: health bands by metric; the display shows whether each metric is within its band.
        has_steps: whether to display step counts; a standalone evaluation has only one step.
    """

    def __init__(
        self,
        title: str,
        total: int,
        enabled: bool = True,
        live: bool | None = None,
        bands: Mapping[str, Band] | None = None,
        has_steps: bool = True,
    ) -> None:
        self.title, self.total, self.enabled = title, total, enabled
        self.bands, self.has_steps = bands or {}, has_steps
        self.last_step = 0
        self._values: dict[str, float] = {}
        self._last: Mapping[str, float] = {}
        """Metrics of the last step only."""
        self._phase, self._phase_began = "starting", time.monotonic()
        self._phase_progress = (0, 0)
        """(done, total) of the current phase; 0 if it does not report progress."""
        self._phase_seconds: dict[str, float] = {}
        """Duration of each phase when it last ran."""
        self._closing = threading.Event()
        self._step_starts: deque[float] = deque(maxlen=21)
        # Lines to a file or a pipe are never wrapped at the terminal width.
        self._console = Console(soft_wrap=not sys.stdout.isatty(), highlight=False)
        self._live: Live | None = None
        if enabled and (self._console.is_terminal if live is None else live):
            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=2)
            self._live.start()
        elif enabled:
            thread_args = (weakref.ref(self), self._closing)
            threading.Thread(target=_report_long_phases, args=thread_args, name="progress", daemon=True).start()

    def begin_phase(self, name: str) -> None:
        now = time.monotonic()
        self._phase_seconds[self._phase] = now - self._phase_began
        self._phase, self._phase_began, self._phase_progress = name.replace("_", " "), now, (0, 0)

    def update_phase(self, done: int, total: int) -> None:
        """Report progress of the current phase, in units of its own."""
        self._phase_progress = (done, total)

    def estimate_phase(self) -> tuple[float, float] | None:
        """Return (fraction done, seconds left) of the current phase.

        Based on its reported progress if any, else on its last duration. None if neither is known, or if it has
        already taken longer than the last time.
        """
        elapsed = time.monotonic() - self._phase_began
        done, total = self._phase_progress
        if 0 < done <= total:
            return done / total, elapsed * (total - done) / done
        last_duration = self._phase_seconds.get(self._phase, 0.0)
        return (elapsed / last_duration, last_duration - elapsed) if elapsed < last_duration else None

    def describe_phase(self) -> str:
        """Format the current phase, such as `loading weights 1:10, 45%, 1:26 left`."""
        text = f"{self._phase} {format_duration(time.monotonic() - self._phase_began)}"
        if estimate := self.estimate_phase():
            text += f", {estimate[0]:.0%}, {format_duration(estimate[1])} left"
        return text

    def begin_step(self, step: int) -> None:
        """Start timing step `step`, counted from 1."""
        self.last_step = step - 1
        self._step_starts.append(time.monotonic())

    def end_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Display the metrics of the finished step."""
        self.last_step = step
        self._values |= metrics
        self._last = dict(metrics)
        if self._live is None:
            self.log(self.format_step(step, metrics))

    def report_evaluation(self, step: int, metrics: Mapping[str, float]) -> str:
        """Display evaluation metrics of the state after `step` steps. Return the logged line."""
        self._values |= metrics
        values_text = "  ".join(
            f"{name.removeprefix('eval/')} {value:.3f}" for name, value in metrics.items() if _is_shown(name)
        )
        first_version, last_version = (metrics.get(f"eval/weight_version{end}", -1.0) for end in ("", "_last"))
        has_newer = last_version > first_version
        versions = f", by the weights of {first_version:.0f} to {last_version:.0f}" if has_newer else ""
        line = f"held out, after step {step}{versions}: {values_text}"
        self.log(line)
        return line

    def format_step(self, step: int, metrics: Mapping[str, float]) -> str:
        """Format a step's line, such as `step 12/100  reward 0.512  ...  2:10 left`."""
        parts = [f"step {step}/{self.total}" if self.has_steps else "all answered:"]
        parts += [f"{title} {value}" for title, value in select_displayed(metrics)]
        if dominant := format_dominant_phases(metrics):
            parts.append(dominant)
        banded = [(band, metrics[name]) for name, band in self.bands.items() if name in metrics]
        if out_of_band := [band.title for band, value in banded if band.side(value)]:
            parts.append(f"out of band: {', '.join(out_of_band)}")
        if step < self.total and (remaining := self.describe_remaining()):
            parts.append(remaining)
        return "  ".join(parts)

    def log(self, text: str) -> None:
        """Print a permanent line above the live display."""
        if self.enabled:
            # Only the terminal wraps, so that copied text has no line breaks.
            self._console.print(Text(text), soft_wrap=True)
            self._console.file.flush()

    def describe_remaining(self) -> str:
        """Format the remaining time, such as `12:34 left`; empty if it is unknown or would round to 0."""
        seconds = self.estimate_remaining()
        return "" if seconds is None or seconds < 0.5 else f"{format_duration(seconds)} left"

    def estimate_remaining(self) -> float | None:
        """Estimate the remaining seconds by the mean of the last 20 steps, evaluations included.

        None before the first step is done.
        """
        stamps = list(self._step_starts)
        if not stamps or self.last_step == 0:
            return None
        num_steps = len(stamps) - 1
        per_step = (stamps[-1] - stamps[0]) / num_steps if num_steps else time.monotonic() - stamps[0]
        elapsed = time.monotonic() - stamps[-1]
        return max(0.0, per_step * (self.total - self.last_step) - min(elapsed, per_step))

    def close(self) -> None:
        self._closing.set()
        if self._live is not None:
            self._phase = ""
            self._live.stop()
            self._live = None

    def _render(self) -> RenderableType:
        header = Table.grid(padding=(0, 2))
        header.add_row(
            Text(self.title, style="bold"),
            Text(f"step {self.last_step}/{self.total}" if self.has_steps else ""),
            ProgressBar(total=max(1, self.total), completed=self.last_step, width=30),
            Text(self.describe_remaining() if self._phase else ""),
        )
        rows: list[Any] = [header]
        if self._phase:
            rows.append(self._render_phase())
        if dominant := format_dominant_phases(self._last):
            rows.append(Text(f"last step: {dominant}", style="dim"))
        cells = [(title, value, "bold") for title, value in select_displayed(self._values)]
        cells += [
            (f"held-out {name.removeprefix('eval/').removeprefix('reward_')}", f"{value:.3f}", "bold")
            for name, value in self._values.items()
            if _is_shown(name)
        ]
        banded = [(band, self._values[name]) for name, band in self.bands.items() if name in self._values]
        band_cells = [
            (band.title, band.describe(value), "bold red" if band.side(value) else "green") for band, value in banded
        ]
        for line in filter(None, (cells, band_cells)):
            texts = [Text.assemble((f"{title} ", "dim"), (value, style)) for title, value, style in line]
            rows.append(Columns(texts, padding=(0, 3)))
        return Group(*rows)

    def _render_phase(self) -> RenderableType:
        """Render the current phase, with a bar if it is long."""
        row = Table.grid(padding=(0, 2))
        cells: list[Any] = [Text(f"now: {self.describe_phase()}", style="cyan")]
        elapsed, estimate = time.monotonic() - self._phase_began, self.estimate_phase()
        if elapsed + (estimate[1] if estimate else 0.0) >= MIN_BAR_S:
            fraction = 0.0 if estimate is None else estimate[0]
            cells.append(ProgressBar(total=1.0, completed=fraction, pulse=estimate is None, width=20))
        row.add_row(*cells)
        return row


def _report_long_phases(progress: weakref.ref[Progress], closing: threading.Event) -> None:
    """Log phases that last, every `REPORT_INTERVAL_S`, until `closing` is set or the display is garbage-collected."""
    last_report = time.monotonic()
    while not closing.wait(REPORT_INTERVAL_S / 4):
        if (display := progress()) is None:
            return
        now = time.monotonic()
        if display._phase and now - max(last_report, display._phase_began) >= REPORT_INTERVAL_S:
            display.log(f"now: {display.describe_phase()}")
            last_report = now
        del display


def select_displayed(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return (title, formatted value) of the metrics to display."""
    return [
        (title, format(metrics[name], style))
        for title, name, style in DISPLAYED_METRICS
        if name in metrics and (metrics[name] or name not in HIDDEN_IF_ZERO)
    ]


def format_dominant_phases(metrics: Mapping[str, float]) -> str:
    """Format the phases that dominate a step, such as `generate 62%, actor update 31%`; empty if none does."""
    step_seconds = metrics.get("time/step", 0.0)
    if not step_seconds > 0:
        return ""
    phases = [
        (seconds / step_seconds, name.removeprefix("time/").replace("_", " "))
        for name, seconds in metrics.items()
        if name.startswith("time/") and name != "time/step"
    ]
    largest = sorted(phases, key=lambda phase: -phase[0])[:3]
    return ", ".join(f"{name} {min(1.0, share):.0%}" for share, name in largest if share >= DOMINANT_SHARE)


def _is_shown(name: str) -> bool:
    """Return whether to display an evaluation metric: not those of a single source, such as `eval/nll/<source>`."""
    return name.startswith(EVAL_PREFIXES) and name.count("/") == 1


def format_duration(seconds: float) -> str:
    """Format seconds as `0:07`, `12:34` or `1:02:03`."""
    total = round(seconds)
    minutes, second = divmod(total, 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
