"""Images of prompts, turns, rollouts and batches, and positions of their tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megarl.parallel.encoding import decode, encode
from megarl.types import (
    ROLLOUT_STATS,
    Grid,
    Image,
    Prompt,
    Rollout,
    Rollouts,
    TrainBatch,
    Turn,
    mrope_positions,
    pack_images,
    unpack_images,
)

pytestmark = pytest.mark.alone

SMALL, LARGE = Image(b"small", Grid(1, 4, 4), 4, 1), Image(b"the large one", Grid(1, 4, 6), 6, 7)
PROMPT = Prompt("p", (), [5, 9, 9, 9, 9, 6], images=(SMALL,))
TURNS = (
    Turn(PROMPT.token_ids, images=PROMPT.images),
    Turn([7, 8], [-0.1, -0.2], is_action=True),
    Turn([4, 9, 9, 9, 9, 9, 9], images=(replace(LARGE, start=1),)),
    Turn([3], [-0.3], is_action=True),
)
ROLLOUT = Rollout(PROMPT, TURNS)


def test_images_of_a_rollout_start_in_the_whole_sequence() -> None:
    assert ROLLOUT.images == (SMALL, replace(LARGE, start=9))
    assert ROLLOUT.token_ids[9:15].tolist() == [9] * 6
    assert unpack_images(pack_images(ROLLOUT.images)) == ROLLOUT.images
    assert ROLLOUT_STATS["image_bytes"](ROLLOUT) == len(pack_images(ROLLOUT.images))
    assert len(pack_images(())) == 0 and unpack_images(torch.zeros(0, dtype=torch.uint8)) == ()
    assert decode(encode(ROLLOUT)) == ROLLOUT


def test_images_are_not_the_policys() -> None:
    with pytest.raises(ValueError, match="images are in the tokens of a prompt or of a tool result"):
        Turn([9] * 5, [0.0] * 5, is_action=True, images=(SMALL,))
    with pytest.raises(ValueError, match="images are in the tokens"):
        Turn([1, 9], images=(SMALL,))


def test_batches_carry_images_of_their_sequences() -> None:
    plain = Rollout(Prompt("q", ()), (Turn([1]), Turn([2], [-0.5], is_action=True)))
    batch = TrainBatch.from_rollouts(Rollouts.gather([plain, ROLLOUT]))
    assert batch.images is not None
    assert [unpack_images(packed) for packed in batch.images] == [(), ROLLOUT.images]
    selected = batch.select([1])
    assert selected.images is not None and unpack_images(selected.images[0]) == ROLLOUT.images
    assert not bool(batch.loss_mask[batch.tokens == 9].any())
    assert TrainBatch.from_rollouts([plain]).images is None
    assert "images" not in batch.columns()


def test_positions_by_hand() -> None:
    """Two tokens, an image of 2 x 3 features, three tokens: rows and columns start at 2, and text goes on at 5."""
    positions = mrope_positions(11, [replace(LARGE, start=2)], 2)
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7],
    ]
    assert mrope_positions(3, [], 2).tolist() == [[0, 1, 2]] * 3
    with pytest.raises(ValueError, match="an image of 1 x 2 x 3 features has 5 tokens"):
        mrope_positions(11, [replace(LARGE, num_tokens=5)], 2)


@pytest.mark.parametrize("name", ["Qwen2_5_VL", "Qwen3VLMoe"])
def test_positions_are_those_of_transformers(name: str) -> None:
    import transformers
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
    from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeModel

    model_class = {"Qwen2_5_VL": Qwen2_5_VLModel, "Qwen3VLMoe": Qwen3VLMoeModel}[name]
    model = model_class.__new__(model_class)
    torch.nn.Module.__init__(model)
    model.config = getattr(transformers, f"{name}Config")()
    images = [replace(SMALL, start=2), replace(LARGE, start=7)]
    types = torch.zeros(1, 20, dtype=torch.int32)
    for image in images:
        types[0, image.start : image.stop] = 1
    grids = torch.tensor([image.grid for image in images])
    expected, _ = model.get_rope_index(torch.zeros(1, 20, dtype=torch.int64), types, image_grid_thw=grids)
    assert torch.equal(mrope_positions(20, images, 2), expected[:, 0])
