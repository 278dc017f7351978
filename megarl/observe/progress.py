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
    ("reverse KL to the teacher", "distill/reverse_kl", ".4f"),
    ("KL to reference", "actor/kl_to_reference", ".4f"),
    ("entropy", "actor/entropy", ".3f"),
    ("gradient norm", "actor/grad_norm", ".3f"),
    ("skipped updates", "actor/skipped", ".0%"),
    ("skipped updates of the critic", "critic/skipped", ".0%"),
    ("skipped updates", "reward_model/skipped", ".0%"),
    ("tool calls", "rollout/tool_calls_mean", ".2f"),
    ("log-prob difference", "rollout/logprob_diff", ".1e"),
    ("its mean", "rollout/logprob_diff_mean", ".1e"),
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
        has_steps: whether to display step counts.
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
        self.title = title
        self.has_steps = has_steps
        """Whether step counts are displayed; a standalone evaluation has only one step."""
        self.bands = bands or {}
        self.total = total
        self.enabled = enabled
        self.last_step = 0
        self._values: dict[str, float] = {}
        self._last: Mapping[str, float] = {}
        """Metrics of the last step only."""
        self._phase = "starting"
        self._phase_began = time.monotonic()
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

    def report_long_phase(self, last_report: float) -> float:
        """Log the current phase if it began, and was last logged, at least `REPORT_INTERVAL_S` ago.

        Args:
            last_report: time of the last such line; the return value is its update.
        """
        now = time.monotonic()
        if not self._phase or now - max(last_report, self._phase_began) < REPORT_INTERVAL_S:
            return last_report
        self.log(f"now: {self.describe_phase()}")
        return now

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
        shown = {name.removeprefix("eval/"): value for name, value in metrics.items() if _is_shown(name)}
        values_text = "  ".join(f"{name} {value:.3f}" for name, value in shown.items())
        first_version, last_version = (metrics.get(f"eval/weight_version{end}", -1.0) for end in ("", "_last"))
        versions = (
            f", by the weights of {first_version:.0f} to {last_version:.0f}" if last_version > first_version else ""
        )
        line = f"held out, after step {step}{versions}: {values_text}"
        self.log(line)
        return line

    def format_step(self, step: int, metrics: Mapping[str, float]) -> str:
        """Format a step's line, such as `step 12/100  reward 0.512  ...  2:10 left`."""
        parts = [f"step {step}/{self.total}" if self.has_steps else "all answered:"]
        parts += [f"{title} {value}" for title, value in select_displayed(metrics)]
        if dominant := format_dominant_phases(metrics):
            parts.append(dominant)
        if out_of_band := [
            band.title for name, band in self.bands.items() if name in metrics and band.side(metrics[name])
        ]:
            parts.append(f"out of band: {', '.join(out_of_band)}")
        remaining = self.estimate_remaining()
        if remaining is not None and remaining >= 0.5 and step < self.total:  # 0.5 s is what rounds to a second
            parts.append(f"{format_duration(remaining)} left")
        return "  ".join(parts)

    def log(self, text: str) -> None:
        """Print a permanent line above the live display."""
        if self.enabled:
            self._console.print(
                Text(text), soft_wrap=True
            )  # only the terminal wraps, so that copied text has no line breaks
            self._console.file.flush()

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
        remaining = self.estimate_remaining()
        header = Table.grid(padding=(0, 2))
        header.add_row(
            Text(self.title, style="bold"),
            Text(f"step {self.last_step}/{self.total}" if self.has_steps else ""),
            ProgressBar(total=max(1, self.total), completed=self.last_step, width=30),
            Text(
                "" if remaining is None or remaining < 0.5 or not self._phase else f"{format_duration(remaining)} left"
            ),
        )
        rows: list[Any] = [header]
        if self._phase:
            rows.append(self._render_phase())
        if dominant := format_dominant_phases(self._last):
            rows.append(Text(f"last step: {dominant}", style="dim"))
        cells = select_displayed(self._values)
        cells += [
            (f"held-out {name.removeprefix('eval/').removeprefix('reward_')}", f"{value:.3f}")
            for name, value in self._values.items()
            if _is_shown(name)
        ]
        if cells:
            texts = [Text.assemble((f"{title} ", "dim"), (value, "bold")) for title, value in cells]
            rows.append(Columns(texts, padding=(0, 3)))
        if banded := self._render_bands():
            rows.append(Columns(banded, padding=(0, 3)))
        return Group(*rows)

    def _render_phase(self) -> RenderableType:
        """Render the current phase, with a bar if it is long."""
        row = Table.grid(padding=(0, 2))
        text = Text(f"now: {self.describe_phase()}", style="cyan")
        elapsed, estimate = time.monotonic() - self._phase_began, self.estimate_phase()
        if elapsed + (estimate[1] if estimate else 0.0) < MIN_BAR_S:
            row.add_row(text)
        elif estimate is None:
            row.add_row(text, ProgressBar(pulse=True, width=20))  # duration unknown
        else:
            row.add_row(text, ProgressBar(total=1.0, completed=estimate[0], width=20))
        return row

    def _render_bands(self) -> list[Text]:
        """Render the position of each metric relative to its band."""
        values = [(band, self._values[name]) for name, band in self.bands.items() if name in self._values]
        return [
            Text.assemble(
                (f"{band.title} ", "dim"), (band.describe(value), "bold red" if band.side(value) else "green")
            )
            for band, value in values
        ]


def _report_long_phases(progress: weakref.ref[Progress], closing: threading.Event) -> None:
    """Log long phases until `closing` is set or the display is garbage-collected."""
    last_report = time.monotonic()
    while not closing.wait(REPORT_INTERVAL_S / 4):
        if (display := progress()) is None:
            return
        last_report = display.report_long_phase(last_report)
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
    shares = {
        name.removeprefix("time/").replace("_", " "): seconds / step_seconds
        for name, seconds in metrics.items()
        if name.startswith("time/") and name != "time/step"
    }
    largest = sorted(shares.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {min(1.0, share):.0%}" for name, share in largest[:3] if share >= DOMINANT_SHARE)


def _is_shown(name: str) -> bool:
    """Return whether to display an evaluation metric: not those of a single source, such as `eval/nll/<source>`."""
    return name.startswith(EVAL_PREFIXES) and name.count("/") == 1


def format_duration(seconds: float) -> str:
    """Format seconds as `0:07`, `12:34` or `1:02:03`."""
    total = round(seconds)
    minutes, second = divmod(total, 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
