"""What the page of ready scorers lists is there, and is all of it."""

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
READY = re.findall(r"^\| `(megarl\.rewards\.\w+:\w+)`", PAGE, re.MULTILINE)


def test_each_function_is_there_and_listed() -> None:
    assert len(load_functions(READY)) == len(READY) >= 12
    listed = {load_functions([name])[name.partition(":")[2]] for name in READY}
    assert set(SOURCES.values()) <= listed


def test_each_data_source_is_there_and_listed() -> None:
    table = PAGE.partition("| data source | function |\n|---|---|\n")[2].partition("\n\n")[0]
    listed = {}
    for line in table.splitlines():
        sources, name = line.strip("| ").split(" | ")
        listed |= dict.fromkeys(sources.split(", "), name)
    names = {load_functions([name])[short]: short for name in READY if (short := name.partition(":")[2])}
    assert listed == {source: names[function] for source, function in SOURCES.items()}


def test_each_option_is_there_and_listed() -> None:
    rows = re.findall(r"^\| (`[a-z_`, ]+`) \|", PAGE, re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert listed == {item.name for cls in (ServiceOptions, JudgeOptions) for item in fields(cls)}


def test_the_examples_are_read() -> None:
    blocks = re.findall(r"(?:^    .*\n)+", PAGE, re.MULTILINE)
    result = [yaml.safe_load(block) for block in blocks if block.lstrip().startswith("roles:")]
    settings = [role_settings(from_dict(tree), "reward") for tree in result]
    assert [element.backend for element in settings] == [("http",), ("judge",)]
    assert ServiceOptions.read(settings[0].options).url == ("https://judge.lab.org/score",)
    assert JudgeOptions.read(settings[1].options).url == ("http://10.0.0.7:30000/v1",)


def test_defaults_are_as_they_are_said() -> None:
    said = dict(re.findall(r"^\| `([a-z_]+)` \| ([\d.]+|false) \|", PAGE, re.MULTILINE))
    service = ServiceOptions()
    assert said and {name: str(getattr(service, name)).lower().removesuffix(".0") for name in said} == said
