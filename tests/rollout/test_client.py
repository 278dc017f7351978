"""What an engine sends of its routing, read and refused; the rest of the client is tested with engines."""

import base64

import numpy as np
import pytest

from megarl.models.routing import RoutingShape
from megarl.rollout.client import decode_routing

SHAPE = RoutingShape(layers=3, moe_layers=(1, 2), topk=2, experts=400)


def sent(*shape: int) -> str:
    return base64.b64encode(np.arange(np.prod(shape), dtype=np.int32).reshape(shape).tobytes()).decode()


def test_only_layers_with_experts_are_kept() -> None:
    assert decode_routing(sent(2, 3, 2), 2, SHAPE).tolist() == [[[2, 3], [4, 5]], [[8, 9], [10, 11]]]
    assert decode_routing(sent(0, 3, 2), 0, SHAPE).shape == (0, 2, 2)


def test_a_record_of_another_size_is_one_error() -> None:
    with pytest.raises(RuntimeError, match="has 16 numbers, not those of 2 tokens in 3 layers with 2 experts each"):
        decode_routing(sent(2, 4, 2), 2, SHAPE)
    with pytest.raises(RuntimeError, match="did not record which experts it chose"):
        decode_routing(None, 2, SHAPE)
