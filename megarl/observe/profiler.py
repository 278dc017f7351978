"""Profile the steps in `track.profile_steps`, with a named range per phase and span.

On CUDA this opens a capture window of `nsys profile -c cudaProfilerApi` with NVTX ranges; nsys must have started the
run. Without CUDA torch's profiler writes a Chrome trace, `<run>/profile/rank_00000_steps_3-4.json`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from megarl.config import Config, ConfigError
from megarl.observe.clock import Clock
from megarl.parallel import device
from megarl.utils.text import one_line


class CudaWindow:
    """An open profiling window: `annotate` opens a named range, `stop` returns where to find the profile."""

    def __init__(self) -> None:
        self.annotate = device.profiler_range
        device.profiler_start()

    def stop(self, file: Path) -> str:
        device.profiler_stop()
        command = "nsys profile -c cudaProfilerApi --capture-range-end=repeat"
        return f"in what nsys writes, if `{command}` has started the run"


class HostWindow:
    """Likewise; `stop` writes the profile to `file`."""

    def __init__(self) -> None:
        from torch.profiler import ProfilerActivity, profile, record_function

        self.annotate: Callable[[str], AbstractContextManager[Any]] = record_function
        self._profile: Any = profile(activities=[ProfilerActivity.CPU])
        self._profile.start()

    def stop(self, file: Path) -> str:
        self._profile.stop()
        file.parent.mkdir(exist_ok=True)
        partial = file.with_suffix(".tmp")
        self._profile.export_chrome_trace(str(partial))
        partial.replace(file)
        return f"in {file}, for Perfetto and chrome://tracing"


class StepProfiler:
    """Opens and closes profiling windows on one rank. Never raises.

    The clock is instrumented only while a window is open.
    """

    def __init__(
        self,
        steps: Sequence[int],
        clock: Clock,
        folder: Path,
        rank: int,
        log: Callable[[str], None],
        create_window: Callable[[], Any] | None = None,
    ) -> None:
        self._steps, self._clock, self._folder, self._rank, self._log = set(steps), clock, folder, rank, log
        self._create_window = create_window or (CudaWindow if device.has_cuda() else HostWindow)
        self._window: Any = None
        self._first = self._last = 0

    def begin(self, step: int) -> None:
        """Open a window if step `step` is to be profiled."""
        if step not in self._steps:
            return
        self._last = step
        if self._window is None:
            self._first = step
            with self._survive_failure():
                self._window = self._create_window()
                self._clock.profiler_range = self._window.annotate

    def end(self, step: int) -> None:
        """Close the window after step `step` unless the next step is profiled, too."""
        if self._window is not None and step + 1 not in self._steps:
            self.close()

    def close(self) -> None:
        """Close the window, also when the run ends within it."""
        window, self._window, self._clock.profiler_range = self._window, None, None
        if window is None:
            return
        steps = f"{self._first}-{self._last}" if self._last > self._first else f"{self._first}"
        file = self._folder / f"rank_{self._rank:05d}_steps_{steps}.json"
        with self._survive_failure():
            self._log(f"profile of steps {steps}: {window.stop(file)}")

    @contextmanager
    def _survive_failure(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001  such as a full disk, or another active profiler
            self._steps = set()
            self._log(f"could not profile: {one_line(error, 200)}; training continues without it")


def check_profile(config: Config) -> None:
    """Raise ConfigError if `track.profile_steps` has a step beyond the end of the run."""
    out_of_range = [step for step in config.track.profile_steps if step > config.run.num_rollout]
    if out_of_range:
        raise ConfigError(
            f"track.profile_steps names step {out_of_range[0]}, but run.num_rollout={config.run.num_rollout}"
        )
