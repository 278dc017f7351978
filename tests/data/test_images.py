"""Images in data files, and what the processor makes of them."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pyarrow
import pyarrow.parquet
import pytest
import torch

from megarl.config import ConfigError
from megarl.data.datasets import check_first_rows, read_conversations, read_preferences, read_prompts
from megarl.data.images import ImageFormat, ImageProcessor
from megarl.types import Prompt, Turn

pytestmark = pytest.mark.alone

SETTINGS = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 1024}}


def png(width: int = 16, height: int = 24, mode: str = "RGB", seed: int = 0, **options: Any) -> bytes:
    channels = {"RGB": 3, "RGBA": 4, "L": 1}[mode]
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    file = io.BytesIO()
    PIL.Image.fromarray(pixels.squeeze(-1) if channels == 1 else pixels).save(file, "PNG", **options)
    return file.getvalue()


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> ImageProcessor:
    folder = tmp_path_factory.mktemp("processor")
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    return ImageProcessor.load(str(folder))


def read(tmp_path: Path, row: dict[str, Any]) -> Prompt:
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({"ground_truth": 1, **row}) + "\n")
    (prompt,) = read_prompts(file)
    return prompt


QUESTION = [{"role": "user", "content": "<image>How many?"}]


def test_reads_images_as_verl_and_openai_have_them(tmp_path: Path) -> None:
    data = png()
    (tmp_path / "a.png").write_bytes(data)
    encoded = base64.b64encode(data).decode()
    url = f"data:image/png;base64,{encoded}"
    columns: list[Any] = [[{"path": str(tmp_path / "a.png")}], [{"bytes": encoded, "path": None}], [url]]
    columns += [[f"file://{tmp_path}/a.png"], {"bytes": encoded}, [{"bytes": None, "path": str(tmp_path / "a.png")}]]
    for column in columns:
        prompt = read(tmp_path, {"prompt": QUESTION, "images": column})
        assert [image.data for image in prompt.images] == [data] and prompt.messages == tuple(QUESTION)
        assert "images" not in prompt.extra
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image", "image": url},
        {"type": "image", "path": str(tmp_path / "a.png")},
        {"type": "input_image", "image_url": url},
    ]
    for part in parts:
        content = [{"type": "text", "text": "See "}, part, {"type": "text", "text": " here"}]
        prompt = read(tmp_path, {"prompt": [{"role": "user", "content": content}]})
        assert prompt.messages[0]["content"] == "See <image> here" and prompt.images[0].data == data
    table = pyarrow.table({"prompt": [QUESTION], "images": [[{"bytes": data, "path": "x.png"}]], "ground_truth": ["3"]})
    pyarrow.parquet.write_table(table, tmp_path / "data.parquet")
    (prompt,) = read_prompts(tmp_path / "data.parquet")
    assert prompt.images[0].data == data


def test_text_may_contain_the_placeholder_without_images(tmp_path: Path) -> None:
    assert read(tmp_path, {"prompt": QUESTION}).images == ()


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([{"path": "/no/such.png"}], "image 0 of 'images': cannot read /no/such.png: No such file"),
        ([{"path": "a.png"}, {"bytes": "AAAA"}], "image 0 of 'images': cannot read a.png"),
        ([{"bytes": "AAAA"}, {"bytes": "AAAA"}], "there are 2 images, but <image> occurs 1 times in the messages"),
        ([{"bytes": "not base64!"}], "image 0 of 'images' is a data URL that cannot be decoded"),
        (["data:image/png,xyz"], "cannot be decoded: it has no base64"),
        (["https://a.org/b.png"], "is the URL https://a.org/b.png; download it, and give its path or bytes"),
        ([{"name": "x"}], "has none of bytes, image_url, url, image, path"),
        ([5], "image 0 of 'images' is '5', not a path, a data URL or bytes"),
        (7, "'images' is '7', not a list of images"),
    ],
)
def test_names_the_row_of_a_bad_image(tmp_path: Path, images: Any, message: str) -> None:
    with pytest.raises(ConfigError, match="data.jsonl:1") as error:
        read(tmp_path, {"prompt": QUESTION, "images": images})
    assert message in str(error.value) and "\n" not in str(error.value)


def test_images_are_in_one_place(tmp_path: Path) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(png()).decode()}}
    row = {"prompt": [{"role": "user", "content": [part]}], "images": [part["image_url"]]}
    with pytest.raises(ConfigError, match="there are images in 'images' and in the messages; keep one of them"):
        read(tmp_path, row)
    with pytest.raises(ConfigError, match="only text and images can be trained on"):
        read(tmp_path, {"prompt": QUESTION, "videos": ["a.mp4"]})


class CharTokenizer:
    """A tokenizer whose ids are code points. Its template writes `(role:content;`."""

    eos_token = ";"

    def apply_chat_template(self, messages: list[dict[str, Any]], add_generation_prompt: bool, **_: Any) -> str:
        text = "".join(f"({message['role'][0]}:{message['content']};" for message in messages)
        return text + ("(a:" if add_generation_prompt else "")

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [ord(char) for char in text]


def text(turn: Turn) -> str:
    return "".join(map(chr, turn.token_ids))


def write_row(tmp_path: Path, row: dict[str, Any]) -> Path:
    (tmp_path / "data.jsonl").write_text(json.dumps(row) + "\n")
    return tmp_path / "data.jsonl"


ANSWER = {"role": "assistant", "content": "Two."}
WORSE = {"role": "assistant", "content": "Five."}


def test_conversations_have_images_in_any_message_of_the_user_and_of_tools(
    tmp_path: Path, processor: ImageProcessor
) -> None:
    """A picture of 16 x 24 pixels has 2 x 3 tokens, one of 16 x 16 has 2 x 2."""
    images = ImageFormat("<", "x", ">", ord("x"), processor)
    first, second = png(16, 24), png(16, 16)
    files = [{"bytes": base64.b64encode(data).decode()} for data in (first, second)]
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + files[0]["bytes"]}}
    last = {"role": "tool", "content": "Zoom: <image>"}
    (rollout,) = read_conversations(
        write_row(tmp_path, {"messages": [*QUESTION, ANSWER, last, ANSWER], "images": files}),
        CharTokenizer(),
        images=images,
    )
    assert [text(turn) for turn in rollout.turns] == [
        "(u:<xxxxxx>How many?;(a:",
        "Two.;",
        "(t:Zoom: <xxxx>;(a:",
        "Two.;",
    ]
    assert [[(image.start, image.num_tokens, image.data) for image in turn.images] for turn in rollout.turns] == [
        [(4, 6, first)],
        [],
        [(10, 4, second)],
        [],
    ]
    assert rollout.prompt.images == rollout.turns[0].images and rollout.images[1].start == 24 + 5 + 10
    # Parts of a message hold the image, or stand for one of the column.
    for part, column in ((url, {}), ({"type": "image", "text": None}, {"images": files[:1]})):
        asked = [{"role": "user", "content": [part, {"type": "text", "text": "How many?"}]}]
        (rollout,) = read_conversations(
            write_row(tmp_path, {"prompt": asked, "completion": [ANSWER]} | column), CharTokenizer(), images=images
        )
        assert text(rollout.turns[0]) == "(u:<xxxxxx>How many?;(a:" and rollout.images[0].data == first


def test_both_answers_of_a_pair_have_the_images_of_their_prompt(tmp_path: Path, processor: ImageProcessor) -> None:
    images, data = ImageFormat("<", "x", ">", ord("x"), processor), png(16, 24)
    encoded = base64.b64encode(data).decode()
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}
    asked = [{"role": "user", "content": [part, {"type": "text", "text": "How many?"}]}]
    bare = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "How many?"}]}]
    column = {"images": [{"bytes": encoded}]}
    rows: list[dict[str, Any]] = [
        {"prompt": QUESTION, "chosen": "Two.", "rejected": "Five."} | column,
        {"prompt": bare, "chosen": [ANSWER], "rejected": [WORSE]} | column,  # as in TRL
        {"prompt": asked, "chosen": [ANSWER], "rejected": [WORSE]},
        {"chosen": [*asked, ANSWER], "rejected": [*asked, WORSE]},
        {"prompt": asked, "chosen": [*asked, ANSWER], "rejected": [*asked, WORSE]},
    ]
    for row in rows:
        (pair,), dropped = read_preferences(write_row(tmp_path, row), CharTokenizer(), 100, 100, images=images)
        for rollout, answer in ((pair.chosen, "Two.;"), (pair.rejected, "Five.;")):
            assert [text(turn) for turn in rollout.turns] == ["(u:<xxxxxx>How many?;(a:", answer] and not dropped
            assert [(image.start, image.data) for image in rollout.images] == [(4, data)]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"images": []},
            "a part of type 'image' or 'image_url' has no image, and there is no column 'images'; add one",
        ),
        ({"chosen": "See <image>"}, "there are 1 images, but <image> occurs 2 times in the messages"),
        ({"prompt": "How many?", "chosen": "See <image>"}, "the assistant's words hold <image>, but the policy writes"),
        ({"images": [{"bytes": "AAAA"}]}, "no image that Pillow reads"),
    ],
)
def test_names_the_pair_of_a_misplaced_image(
    tmp_path: Path, row: dict[str, Any], message: str, processor: ImageProcessor
) -> None:
    images = ImageFormat("<", "x", ">", ord("x"), processor)
    prompt = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "How many?"}]}]
    column = [{"bytes": base64.b64encode(png()).decode()}]
    file = write_row(tmp_path, {"prompt": prompt, "chosen": "2", "rejected": "3", "images": column} | row)
    with pytest.raises(ConfigError, match="data.jsonl:1") as error:
        read_preferences(file, CharTokenizer(), 100, 100, images=images)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_pair_has_one_prompt_and_needs_a_model_that_reads_images(tmp_path: Path) -> None:
    sides = []
    for seed, answer in ((0, ANSWER), (1, WORSE)):
        url = "data:image/png;base64," + base64.b64encode(png(seed=seed)).decode()
        sides.append([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}, answer])
    file = write_row(tmp_path, {"chosen": sides[0], "rejected": sides[1]})
    with pytest.raises(ConfigError, match="'chosen' and 'rejected' begin differently"):
        read_preferences(file, CharTokenizer(), 100, 100)
    file = write_row(tmp_path, {"chosen": sides[0], "rejected": [sides[0][0], WORSE]})
    with pytest.raises(ConfigError, match="there are images, but the model of model.path has no vision tower"):
        read_preferences(file, CharTokenizer(), 100, 100)


def test_prompts_that_differ_in_their_images_are_different_rows(tmp_path: Path) -> None:
    from megarl.config import from_dict

    texts = []
    for seed in (0, 1):
        encoded = base64.b64encode(png(seed=seed)).decode()
        read(tmp_path, {"prompt": QUESTION, "images": [{"bytes": encoded}]})
        (row,) = check_first_rows(from_dict({}), "prompts", str(tmp_path / "data.jsonl"))
        texts.append(row.text)
    assert texts[0] != texts[1]


def test_grid_of_the_header_is_that_of_the_pixels(processor: ImageProcessor) -> None:
    """Sizes are rounded to squares of 8 pixels, and scaled into the processor's bounds."""
    for width, height in ((16, 24), (17, 21), (3, 5), (200, 40), (64, 64)):
        data = png(width, height)
        image, pixels = processor.read(data), processor.pixels(data)
        assert pixels.dtype == torch.float32 and len(pixels) == image.grid.t * image.grid.h * image.grid.w
        assert image.num_tokens == len(pixels) // 4 and 64 <= 16 * len(pixels) <= 1024
    assert processor.read(png(16, 24)).grid == (1, 6, 4)


def test_pixels_are_normalised_patches(processor: ImageProcessor) -> None:
    """The first patch of an unscaled image: channels, twice the same moment, 4 rows of 4 pixels."""
    data = png(16, 24)
    patch = processor.pixels(data)[0].view(3, 2, 4, 4)
    raw = torch.tensor(np.asarray(PIL.Image.open(io.BytesIO(data)))[:4, :4] / 255.0).permute(2, 0, 1)
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073])[:, None, None]
    std = torch.tensor([0.26862954, 0.26130258, 0.27577711])[:, None, None]
    for moment in (0, 1):
        torch.testing.assert_close(patch[:, moment].double(), ((raw - mean) / std).double(), atol=1e-5, rtol=0)


def test_transparency_becomes_white_and_exif_turns(processor: ImageProcessor) -> None:
    clear = PIL.Image.new("RGBA", (16, 16), (255, 0, 0, 0))
    white = PIL.Image.new("RGB", (16, 16), (255, 255, 255))
    files = []
    for image in (clear, white):
        file = io.BytesIO()
        image.save(file, "PNG")
        files.append(file.getvalue())
    assert torch.equal(processor.pixels(files[0]), processor.pixels(files[1]))
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    assert processor.read(png(16, 24, exif=exif)).grid == (1, 4, 6)
    assert processor.read(png(16, 24, mode="L")).grid == (1, 6, 4)


def test_refuses_what_is_no_image(processor: ImageProcessor, tmp_path: Path) -> None:
    for data in (b"", b"text", png()[:40]):
        with pytest.raises(ValueError, match="no image that Pillow reads|truncated|broken"):
            processor.read(data)
            processor.pixels(data)
    with pytest.raises(ConfigError, match="has no preprocessor_config.json, by which images are scaled"):
        ImageProcessor.load(str(tmp_path))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    with pytest.raises(ConfigError, match="merge_size=2, but vision_config.spatial_merge_size=3"):
        ImageProcessor.load(str(tmp_path), 3)
