from __future__ import annotations

import pytest

from megarl.config import ConfigError
from megarl.models.stages import stage_layers


def test_stages_as_megatron_deals_them_out() -> None:
    assert stage_layers(8, 4, {}) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    uneven = {"num_layers_in_first_pipeline_stage": 3, "num_layers_in_last_pipeline_stage": 1}
    assert stage_layers(8, 4, uneven) == [(0, 1, 2), (3, 4), (5, 6), (7,)]
    assert stage_layers(7, 4, {"num_layers_in_last_pipeline_stage": 1})[-1] == (6,)
    assert stage_layers(5, 2, {"num_layers_in_first_pipeline_stage": 2, "num_layers_in_last_pipeline_stage": 3}) == [
        (0, 1),
        (2, 3, 4),
    ]


def test_parts_of_stages_take_turns() -> None:
    assert stage_layers(8, 2, {}, vpp=2) == [(0, 1, 4, 5), (2, 3, 6, 7)]
    uneven = {"num_layers_in_first_pipeline_stage": 2, "num_layers_in_last_pipeline_stage": 2}
    assert stage_layers(8, 3, uneven, vpp=2) == [(0, 4), (1, 2, 5, 6), (3, 7)]
    with pytest.raises(ConfigError, match="parallel.vpp=3 does not divide the 2 layers of pipeline stage 0.*: 1, 2$"):
        stage_layers(8, 3, uneven, vpp=3)


@pytest.mark.parametrize("layers, pp", [(61, 16), (61, 8), (94, 8), (7, 2), (5, 4), (10, 4)])
def test_the_remedy_for_layers_that_do_not_divide_is_one(layers: int, pp: int) -> None:
    with pytest.raises(ConfigError) as caught:
        stage_layers(layers, pp, {})
    text = str(caught.value)
    keys = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
    given = {key: int(text.split(f"{key}=")[1].split()[0].rstrip(",")) for key in keys if f"{key}=" in text}
    assert given
    assert sum(len(stage) for stage in stage_layers(layers, pp, given)) == layers


def test_an_impossible_pipeline() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.pp to one of 1, 2"):
        stage_layers(2, 3, {})
    with pytest.raises(ConfigError, match="parallel.pp=1"):
        stage_layers(4, 1, {"num_layers_in_last_pipeline_stage": 1})
