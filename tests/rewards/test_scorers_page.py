"""megarl/rewards/SCORERS.md lists exactly the scorers, data sources and options that exist."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from megarl.config import from_dict
from megarl.parallel.placement import role_settings
from megarl.rewards.by_source import SOURCES
from megarl.rewards.functions import load_functions
from megarl.rewards.judge import JudgeOptions
from megarl.rewards.service import ServiceOptions

pytestmark = pytest.mark.alone

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "megarl" / "rewards" / "SCORERS.md").read_text(encoding="utf-8")
LISTED_SCORERS = re.findall(r"^\| `(megarl\.rewards\.\w+:\w+)`", PAGE, re.MULTILINE)


def test_page_lists_every_function() -> None:
    assert len(load_functions(LISTED_SCORERS)) == len(LISTED_SCORERS) >= 12
    documented = {load_functions([name])[name.partition(":")[2]] for name in LISTED_SCORERS}
    assert set(SOURCES.values()) <= documented


def test_page_lists_every_data_source() -> None:
    table = PAGE.partition("| data source | function |\n|---|---|\n")[2].partition("\n\n")[0]
    documented = {}
    for line in table.splitlines():
        sources, name = line.strip("| ").split(" | ")
        documented |= dict.fromkeys(sources.split(", "), name)
    names = {load_functions([name])[short]: short for name in LISTED_SCORERS if (short := name.partition(":")[2])}
    assert documented == {source: names[function] for source, function in SOURCES.items()}


def test_page_lists_every_option() -> None:
    rows = re.findall(r"^\| (`[a-z_`, ]+`) \|", PAGE, re.MULTILINE)
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert documented == {item.name for cls in (ServiceOptions, JudgeOptions) for item in fields(cls)}


def test_page_examples_are_valid() -> None:
    blocks = re.findall(r"(?:^    .*\n)+", PAGE, re.MULTILINE)
    result = [yaml.safe_load(block) for block in blocks if block.lstrip().startswith("roles:")]
    settings = [role_settings(from_dict(tree), "reward") for tree in result]
    assert [element.backend for element in settings] == [("http",), ("judge",)]
    assert ServiceOptions.read(settings[0].options).url == ("https://judge.lab.org/score",)
    assert JudgeOptions.read(settings[1].options).url == ("http://10.0.0.7:30000/v1",)


def test_page_states_the_defaults() -> None:
    stated = dict(re.findall(r"^\| `([a-z_]+)` \| ([\d.]+|false) \|", PAGE, re.MULTILINE))
    service = ServiceOptions()
    assert stated and {name: str(getattr(service, name)).lower().removesuffix(".0") for name in stated} == stated
