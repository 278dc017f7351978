"""The live display of a run; one line per step where the output is no terminal."""

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
"""Title, metric and format of what the display shows; a metric that a run does not have is left out."""
HIDDEN_IF_ZERO = ("actor/skipped", "critic/skipped", "reward_model/skipped")
"""Of these, what is left out while it is 0."""
REPORT_INTERVAL_S = 60.0
"""How often a phase that lasts says so, where the output is no terminal."""
MIN_BAR_S = 5.0
"""Phases below this have no bar."""
DOMINANT_SHARE = 0.3
"""The share of a step from which on a phase is named."""
EVAL_PREFIXES = ("eval/reward_", "eval/pass_at_", "eval/nll", "eval/accuracy", "eval/margin")
"""How the names of those begin that are shown of an evaluation."""


class Progress:
    """Says where a run is. Every rank makes one; only an enabled one (rank 0's) prints.

    `live=None` looks whether the output is a terminal. bands: by metric; whether it is in its band is shown, too.
    Evaluation metrics (`eval/...`) are shown until the next ones.
    """

    def __init__(
        self,
        title: str,
        total: int,
        enabled: bool = True,
        live: bool | None = None,
        bands: Mapping[str, Band] | None = None,
        counts: bool = True,
    ) -> None:
        self.title = title
        self.has_steps = counts
        """Whether steps are counted, of which an evaluation alone has one."""
        self.bands = bands or {}
        self.total = total
        self.enabled = enabled
        self.last_step = 0
        self._values: dict[str, float] = {}
        self._last: Mapping[str, float] = {}
        """Figures of the last step alone."""
        self._phase = "starting"
        self._phase_began = time.monotonic()
        self._phase_progress = (0, 0)
        """Of the work of this phase, and how much there is; 0 where nobody says."""
        self._phase_seconds: dict[str, float] = {}
        """What each phase has taken when it was last gone through."""
        self._closing = threading.Event()
        self._step_starts: deque[float] = deque(maxlen=21)
        # The terminal width decides nothing about lines that a file or a pipe receives: they are never wrapped.
        self._console = Console(soft_wrap=not sys.stdout.isatty(), highlight=False)
        self._live: Live | None = None
        if enabled and (self._console.is_terminal if live is None else live):
            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=2)
            self._live.start()
        elif enabled:
            given = (weakref.ref(self), self._closing)
            threading.Thread(target=_report_long_phases, args=given, name="progress", daemon=True).start()

    def begin_phase(self, name: str) -> None:
        now = time.monotonic()
        self._phase_seconds[self._phase] = now - self._phase_began
        self._phase, self._phase_began, self._phase_progress = name.replace("_", " "), now, (0, 0)

    def update_phase(self, done: int, total: int) -> None:
        """So much of the work of this phase is done; in units of its own."""
        self._phase_progress = (done, total)

    def estimate_phase(self) -> tuple[float, float] | None:
        """Of the phase under way: the share that is done, and the seconds left, by its own count where it has one, else
        by what it took the last time. None where neither is known, or it takes longer than the last time."""
        so_far = time.monotonic() - self._phase_began
        done, total = self._phase_progress
        if 0 < done <= total:
            return done / total, so_far * (total - done) / done
        before = self._phase_seconds.get(self._phase, 0.0)
        return (so_far / before, before - so_far) if so_far < before else None

    def describe_phase(self) -> str:
        """`loading weights 1:10, 45 %, 1:26 left`"""
        text = f"{self._phase} {format_duration(time.monotonic() - self._phase_began)}"
        if left := self.estimate_phase():
            text += f", {left[0]:.0%}, {format_duration(left[1])} left"
        return text

    def report_long_phase(self, said: float) -> float:
        """A line where neither it nor the phase is younger than a minute. said: when it was said last; returns that."""
        now = time.monotonic()
        if not self._phase or now - max(said, self._phase_began) < REPORT_INTERVAL_S:
            return said
        self.log(f"now: {self.describe_phase()}")
        return now

    def begin_step(self, step: int) -> None:
        """Step `step`, from 1, begins: from here on its time counts."""
        self.last_step = step - 1
        self._step_starts.append(time.monotonic())

    def end_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Step `step` is done."""
        self.last_step = step
        self._values |= metrics
        self._last = dict(metrics)
        if self._live is None:
            self.log(self.format_step(step, metrics))

    def report_evaluation(self, step: int, metrics: Mapping[str, float]) -> str:
        """Figures of the state after `step` steps; returns the line that it says."""
        self._values |= metrics
        figures = {name.removeprefix("eval/"): value for name, value in metrics.items() if _is_shown(name)}
        listed = "  ".join(f"{name} {value:.3f}" for name, value in figures.items())
        began, last = (metrics.get(f"eval/weight_version{end}", -1.0) for end in ("", "_last"))
        meanwhile = f", by the weights of {began:.0f} to {last:.0f}" if last > began else ""
        line = f"held out, after step {step}{meanwhile}: {listed}"
        self.log(line)
        return line

    def format_step(self, step: int, metrics: Mapping[str, float]) -> str:
        """`step 12/100  reward 0.512  ...  2:10 left`"""
        parts = [f"step {step}/{self.total}" if self.has_steps else "all answered:"]
        parts += [f"{title} {value}" for title, value in select_displayed(metrics)]
        if mostly := format_dominant_phases(metrics):
            parts.append(mostly)
        if out := [band.title for name, band in self.bands.items() if name in metrics and band.side(metrics[name])]:
            parts.append(f"out of band: {', '.join(out)}")
        left = self.estimate_remaining()
        if left is not None and left >= 0.5 and step < self.total:  # as it is rounded
            parts.append(f"{format_duration(left)} left")
        return "  ".join(parts)

    def log(self, text: str) -> None:
        """A line that stays, above the display."""
        if self.enabled:
            self._console.print(Text(text), soft_wrap=True)  # broken by the terminal alone, so that it can be copied
            self._console.file.flush()

    def estimate_remaining(self) -> float | None:
        """By the mean of the last 20 steps, evaluations among them included; None before the first is done."""
        stamps = list(self._step_starts)
        if not stamps or self.last_step == 0:
            return None
        begun = len(stamps) - 1
        per_step = (stamps[-1] - stamps[0]) / begun if begun else time.monotonic() - stamps[0]
        elapsed = time.monotonic() - stamps[-1]
        return max(0.0, per_step * (self.total - self.last_step) - min(elapsed, per_step))

    def close(self) -> None:
        self._closing.set()
        if self._live is not None:
            self._phase = ""
            self._live.stop()
            self._live = None

    def _render(self) -> RenderableType:
        left = self.estimate_remaining()
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(self.title, style="bold"),
            Text(f"step {self.last_step}/{self.total}" if self.has_steps else ""),
            ProgressBar(total=max(1, self.total), completed=self.last_step, width=30),
            Text("" if left is None or left < 0.5 or not self._phase else f"{format_duration(left)} left"),
        )
        rows: list[Any] = [head]
        if self._phase:
            rows.append(self._render_phase())
        if mostly := format_dominant_phases(self._last):
            rows.append(Text(f"last step: {mostly}", style="dim"))
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
        """The phase, and a bar where it lasts."""
        row = Table.grid(padding=(0, 2))
        text = Text(f"now: {self.describe_phase()}", style="cyan")
        so_far, left = time.monotonic() - self._phase_began, self.estimate_phase()
        if so_far + (left[1] if left else 0.0) < MIN_BAR_S:
            row.add_row(text)
        elif left is None:
            row.add_row(text, ProgressBar(pulse=True, width=20))  # nobody knows for how long
        else:
            row.add_row(text, ProgressBar(total=1.0, completed=left[0], width=20))
        return row

    def _render_bands(self) -> list[Text]:
        """Of each figure with a band, where it is."""
        known = [(band, self._values[name]) for name, band in self.bands.items() if name in self._values]
        return [
            Text.assemble(
                (f"{band.title} ", "dim"), (band.describe(value), "bold red" if band.side(value) else "green")
            )
            for band, value in known
        ]


def _report_long_phases(progress: weakref.ref[Progress], ends: threading.Event) -> None:
    """Of a display that is no longer there, nothing."""
    said = time.monotonic()
    while not ends.wait(REPORT_INTERVAL_S / 4):
        if (one := progress()) is None:
            return
        said = one.report_long_phase(said)
        del one


def select_displayed(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Title and value of what the display shows of these."""
    return [
        (title, format(metrics[name], style))
        for title, name, style in DISPLAYED_METRICS
        if name in metrics and (metrics[name] or name not in HIDDEN_IF_ZERO)
    ]


def format_dominant_phases(metrics: Mapping[str, float]) -> str:
    """`generate 62 %, actor update 31 %`: the phases that take most of a step's time; empty where none does."""
    whole = metrics.get("time/step", 0.0)
    if not whole > 0:
        return ""
    shares = {
        name.removeprefix("time/").replace("_", " "): seconds / whole
        for name, seconds in metrics.items()
        if name.startswith("time/") and name != "time/step"
    }
    largest = sorted(shares.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {min(1.0, share):.0%}" for name, share in largest[:3] if share >= DOMINANT_SHARE)


def _is_shown(name: str) -> bool:
    """Whether a metric is a figure of an evaluation to show: none of a single source, `eval/nll/<source>`."""
    return name.startswith(EVAL_PREFIXES) and name.count("/") == 1


def format_duration(seconds: float) -> str:
    """`0:07`, `12:34`, `1:02:03`"""
    whole = round(seconds)
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
