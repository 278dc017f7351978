"""What a run must reach, which its configuration carries under `expect`, so that an example is a test:

expect:
  eval/reward_greedy: {least: 0.9}               # when it was last told
  rollout/logprob_diff: {most: 1.0e-4, step: 5}  # in the newest figures of step 5 or before
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from megarl import strict
from megarl.config import Config, ConfigError, Range

Number = Annotated[float, Range(-1e300, 1e300)]


@dataclass(frozen=True)
class Expected:
    least: Number | None = None
    most: Number | None = None
    step: Annotated[int, Range(0, 2**31 - 1)] | None = None
    """The figure is the newest up to this step; null for the last."""

    def __str__(self) -> str:
        bounds = [
            f"{word} {bound:g}"
            for word, bound in (("at least", self.least), ("at most", self.most))
            if bound is not None
        ]
        return " and ".join(bounds) + ("" if self.step is None else f" at step {self.step}")


def expectations(config: Config) -> dict[str, Expected]:
    """By metric. Raises ConfigError for what is none."""
    found = {}
    for metric, tree in config.expect.items():
        one: Expected = strict.build(Expected, tree, f"expect.{metric}.", root=Config)
        if one.least is None and one.most is None:
            raise ConfigError(f"expect.{metric} expects nothing: give it `least`, `most` or both")
        if one.step is not None and one.step > config.run.num_rollout:
            raise ConfigError(f"expect.{metric}.step={one.step} is beyond run.num_rollout={config.run.num_rollout}")
        found[metric] = one
    return found


def reached(
    expected: Mapping[str, Expected], metrics: Mapping[int, Mapping[str, float]]
) -> dict[str, tuple[float | None, bool]]:
    """Of each metric its figure, None where there is none, and whether that is as expected. metrics: by step."""
    result = {}
    for name, one in expected.items():
        figures = [
            of[name] for step, of in sorted(metrics.items()) if name in of and (one.step is None or step <= one.step)
        ]
        figure = figures[-1] if figures else None
        good = (
            figure is not None
            and (one.least is None or figure >= one.least)
            and (one.most is None or figure <= one.most)
        )
        result[name] = figure, good  # NaN is neither
    return result
