"""Health bands of metrics, and their paragraphs in the README."""

from __future__ import annotations

from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

import megarl.observe
from megarl.config import ConfigError, from_dict
from megarl.observe.health_bands import BANDS, Band, load_bands

pytestmark = pytest.mark.alone

PAGE = (Path(megarl.observe.__file__).parent / "README.md").read_text(encoding="utf-8")


def bands(**guards: Any) -> dict[str, Band]:
    return load_bands(from_dict({"guards": guards}).guards)


@pytest.mark.parametrize(
    ("metric", "value", "expected_side"),
    [
        ("actor/entropy", 0.4, ""),
        ("actor/entropy", 0.39, "below"),
        ("actor/entropy", 0.6, ""),
        ("actor/entropy", 0.61, "above"),
        ("rollout/reward_variance", 0.25, ""),
        ("rollout/reward_variance", 0.09, "below"),
        ("actor/advantage_variance", 1.0000001, ""),  # whitened, and rounded
        ("actor/advantage_variance", 1.01, "above"),
        ("actor/advantage_variance", 0.0, ""),
        ("critic/vf_clipfrac", 0.05, ""),
        ("critic/vf_clipfrac", 0.06, "above"),
        ("actor/grad_norm", 0.49, "below"),
        ("actor/grad_norm", 2.0, ""),
        ("actor/grad_norm", inf, "above"),
        ("actor/grad_norm", nan, "not a number"),
        ("critic/vf_clipfrac", nan, "not a number"),
        ("actor/ppo_kl", 0.0, ""),  # the first update of each step
        ("actor/ppo_kl", 0.02, ""),
        ("actor/ppo_kl", 0.031, "above"),
    ],
)
def test_side_of_a_value(metric: str, value: float, expected_side: str) -> None:
    band = bands(alarms=True)[metric]
    assert band.side(value) == expected_side
    assert bool(band.get_remedy(value)) == bool(expected_side)


def test_describes_a_value_and_its_remedy() -> None:
    band = BANDS["actor/entropy"]
    assert band.describe(0.5) == "0.5, in 0.4 to 0.6"
    assert band.describe(0.31) == "0.31, below 0.4 to 0.6" and "kl.coef" in band.get_remedy(0.31)
    assert band.describe(nan) == "not a number, of 0.4 to 0.6"
    assert Band("", None, 0.05).describe(0.123456) == "0.1235, above at most 0.05"
    assert Band("", 100, None).describe(40) == "40, below at least 100"
    assert "loss.value_clip" in BANDS["critic/vf_clipfrac"].get_remedy(0.2)


def test_configured_bands_override_defaults() -> None:
    assert bands() == {} == bands(alarms=False)
    overrides = {"actor/entropy": [0.1, 0.2], "perf/tokens_per_second_per_rank": [2000, None], "actor/grad_norm": None}
    result = bands(alarms=True, bands={**overrides, "rollout/turns_mean": [None, 4.5]})
    defaults = {name for name in BANDS if not name.startswith("perf/")}
    assert result.keys() == defaults - {"actor/grad_norm"} | {"perf/tokens_per_second_per_rank", "rollout/turns_mean"}
    assert (result["actor/entropy"].lower, result["actor/entropy"].upper) == (0.1, 0.2)
    assert result["actor/entropy"].low_remedy == BANDS["actor/entropy"].low_remedy
    assert result["perf/tokens_per_second_per_rank"].side(1900) == "below"
    assert result["rollout/turns_mean"].side(5) == "above" and result["rollout/turns_mean"].get_remedy(5) == ""
    # Throughput and utilization have no default band.
    assert bands(alarms=True).keys() == {name for name in BANDS if not name.startswith("perf/")}
    low = bands(alarms=True, bands={"perf/gpu_utilization": [0.8, None], "perf/mfu": [0.3, None]})
    assert low["perf/gpu_utilization"].side(0.7) == "below" and "concurrency" in low["perf/gpu_utilization"].low_remedy
    assert low["perf/mfu"].side(0.31) == ""


@pytest.mark.parametrize(
    "band", [0.5, [0.5], [0.6, 0.4], ["a", "b"], [None, None], [0.1, 0.2, 0.3], [True, 2], {}, "0.4"]
)
def test_rejects_malformed_bands(band: Any) -> None:
    with pytest.raises(ConfigError, match=r"guards\.bands\.actor/entropy must be two numbers"):
        bands(alarms=True, bands={"actor/entropy": band})


def test_rejects_bands_without_alarms() -> None:
    with pytest.raises(ConfigError, match=r"guards\.alarms=false"):
        bands(bands={"actor/entropy": [0, 1]})


@pytest.mark.parametrize("metric", BANDS)
def test_readme_explains_each_band(metric: str) -> None:
    """Each paragraph has symptom, meaning and remedy, and names the keys of the alarm."""
    _, result, description = PAGE.partition(f"### `{metric}`\n")
    assert result
    paragraph = description.partition("\n### ")[0].partition("\n## ")[0]
    for part in ("Symptom:", "Meaning:", "Remedy:"):
        assert part in paragraph
    for text in (BANDS[metric].low_remedy, BANDS[metric].high_remedy):
        for key in (word.strip(",;") for word in text.split()):
            if "." in key and not key.endswith(".py"):
                assert key in paragraph, key


@pytest.mark.parametrize("guard", ["guards.ppo_kl", "guards.kl", "guards.oom_retry"])
def test_readme_explains_each_guard(guard: str) -> None:
    assert f"### `{guard}`\n" in PAGE
