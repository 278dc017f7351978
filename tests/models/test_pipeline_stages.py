"""Layers of pipeline stages, and advice for layers that do not divide."""

from __future__ import annotations

import re
from itertools import product

import pytest

from megarl.config import ConfigError
from megarl.models.pipeline_stages import FIRST, LAST, stage_layers

pytestmark = pytest.mark.alone


def test_stage_layers_match_megatron() -> None:
    assert stage_layers(8, 4, {}) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    uneven = {"num_layers_in_first_pipeline_stage": 3, "num_layers_in_last_pipeline_stage": 1}
    assert stage_layers(8, 4, uneven) == [(0, 1, 2), (3, 4), (5, 6), (7,)]
    assert stage_layers(7, 4, {"num_layers_in_last_pipeline_stage": 1})[-1] == (6,)
    assert stage_layers(5, 2, {"num_layers_in_first_pipeline_stage": 2, "num_layers_in_last_pipeline_stage": 3}) == [
        (0, 1),
        (2, 3, 4),
    ]


def test_virtual_stages_interleave() -> None:
    assert stage_layers(8, 2, {}, vpp=2) == [(0, 1, 4, 5), (2, 3, 6, 7)]
    uneven = {"num_layers_in_first_pipeline_stage": 2, "num_layers_in_last_pipeline_stage": 2}
    assert stage_layers(8, 3, uneven, vpp=2) == [(0, 4), (1, 2, 5, 6), (3, 7)]
    with pytest.raises(ConfigError, match="parallel.vpp=3 does not divide the 2 layers of pipeline stage 0.*: 1, 2$"):
        stage_layers(8, 3, uneven, vpp=3)


@pytest.mark.parametrize("layers, pp", [(61, 16), (61, 8), (94, 8), (7, 2), (5, 4), (10, 4)])
def test_suggested_uneven_split_works(layers: int, pp: int) -> None:
    with pytest.raises(ConfigError) as error:
        stage_layers(layers, pp, {})
    text = str(error.value)
    keys = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
    advised = {key: int(text.split(f"{key}=")[1].split()[0].rstrip(",")) for key in keys if f"{key}=" in text}
    assert advised
    assert sum(len(stage) for stage in stage_layers(layers, pp, advised)) == layers


def test_refuses_impossible_pipeline() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.pp to one of 1, 2"):
        stage_layers(2, 3, {})
    with pytest.raises(ConfigError, match="parallel.pp=1"):
        stage_layers(4, 1, {"num_layers_in_last_pipeline_stage": 1})


def test_all_advice_leads_to_a_valid_split() -> None:
    """Following any advice in an error gives a valid split, even from wrong layer counts at both ends."""
    keys = (FIRST, LAST)
    for layers, pp, vpp, first, last in product(range(1, 10), range(1, 6), (1, 2), (None, 2, 9), (None, 1)):
        settings = {name: count for name, count in zip(keys, (first, last), strict=True) if count is not None}
        try:
            stage_layers(layers, pp, settings, vpp)
            continue
        except ConfigError as error:
            text = str(error)
        if "cannot be split" not in text:
            continue
        for advice in text.split("; ")[1].split(", or "):
            stage_settings = dict(settings) if "remove" not in advice else {}
            parts = 1 if "parallel.vpp to 1" in advice else vpp
            advised_settings = {key: int(result[1]) for key in keys if (result := re.search(rf"{key}=(\d+)", advice))}
            stage_settings = {**stage_settings, **advised_settings} if "remove" not in advice else advised_settings
            sizes = re.search(r"parallel\.pp to one of ([\d, ]+)", advice)
            for size in map(int, sizes[1].strip(", ").split(", ")) if sizes else [pp]:
                stages = stage_layers(layers, size, stage_settings, parts)
                assert sum(map(len, stages)) == layers and all(stages), (text, advice)
