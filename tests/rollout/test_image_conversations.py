"""Conversations with images: in the prompt, in tool results, and in requests to the policy."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import tiny_models
from scripted import CONFIG, ScriptedPolicy, call, parse

from megarl.chat_format.chat_template import ChatTemplate, load_image_format
from megarl.config import ConfigError
from megarl.data.images import ImageFormat, ImageProcessor
from megarl.engine.engine_protocol import Generation
from megarl.environments.catalog import load_tools
from megarl.environments.environment_process import split_images
from megarl.environments.process_sessions import EnvironmentPool
from megarl.environments.protocol import ToolResult
from megarl.rollout.conversation import RolloutContext, run_conversation
from megarl.rollout.partial_rollouts import PartialRollout
from megarl.types import Image, Prompt, Rollout, TrainBatch, unpack_images

pytestmark = pytest.mark.alone

SETTINGS = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 4096}}


def picture(width: int, height: int = 8) -> bytes:
    file = io.BytesIO()
    PIL.Image.new("RGB", (width, height), (width, 0, 0)).save(file, "PNG")
    return file.getvalue()


def make_chat() -> ChatTemplate:
    tokenizer = tiny_models.tokenizer()
    names = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    pad = tokenizer.convert_tokens_to_ids(names[1])
    images = ImageFormat(*names, pad, ImageProcessor("", SETTINGS, 2))
    tools = load_tools(["megarl.environments.ready.calculator:calculator"])
    return ChatTemplate(tokenizer, tools, images=images)


CHAT = make_chat()
PAD = CHAT.image_format.token_id
PROMPT = Prompt("p", ({"role": "user", "content": "<image>What is it?"},), images=(Image(picture(16)),))


class Policy(ScriptedPolicy):
    """Also records the images of its requests."""

    def __init__(self, *lines: str | Generation) -> None:
        super().__init__(*lines)
        self.images: list[Sequence[Image]] = []

    async def generate(self, context: Any, params: Any, *rest: Any, images: Sequence[Image] = ()) -> Generation:
        self.images.append(images)
        return await super().generate(context, params, *rest)


class Tools(EnvironmentPool):
    """A calculator in this process that answers with images."""

    def __init__(self, result: ToolResult, chat: ChatTemplate) -> None:
        super().__init__(chat.catalog, 60.0, 1)
        self.result = result

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        return self.result


def converse(prompt: Prompt, result: ToolResult, chat: ChatTemplate = CHAT, **config: Any) -> tuple[Rollout, Policy]:
    policy = Policy(call("1+2"), "done")

    async def run() -> Rollout:
        async with aclosing(Tools(result, chat)) as pool:
            context = RolloutContext(chat, pool, parse, replace(CONFIG, **config))
            started = PartialRollout.begin(chat.render_prompt(prompt), 9)
            return (await run_conversation(started, policy, context, {"temperature": 1.0})).to_rollout(0)

    return asyncio.run(run()), policy


def test_prompt_and_tool_result_have_images() -> None:
    rollout, policy = converse(PROMPT, ToolResult("a <image> b", True, (picture(24), picture(8))))
    assert rollout.status == "stop" and rollout.messages[2]["content"] == "<image><image>a <image > b"
    tokens = rollout.token_ids
    assert [image.num_tokens for image in rollout.images] == [2, 3, 1]
    spans = [tokens[image.start : image.stop].tolist() for image in rollout.images]
    assert spans == [[PAD] * 2, [PAD] * 3, [PAD]] and int((tokens == PAD).sum()) == 6
    assert [len(turn.images) for turn in rollout.turns] == [1, 0, 2, 0]
    assert [image.data for image in rollout.images] == [picture(16), picture(24), picture(8)]
    # Each request has all images so far, where their tokens are.
    assert [tuple(images) for images in policy.images] == [rollout.images[:1], rollout.images]
    batch = TrainBatch.from_rollouts([rollout])
    assert batch.images is not None and unpack_images(batch.images[0]) == rollout.images
    assert not bool(batch.loss_mask[batch.tokens == PAD].any())


def test_long_tool_results_lose_text_but_no_image() -> None:
    rollout, _ = converse(PROMPT, ToolResult("word " * 500, True, (picture(24),)), max_tool_response_tokens=40)
    assert "tokens cut" in rollout.messages[2]["content"] and len(rollout.images) == 2
    assert len(rollout.turns[2].token_ids) < 100


def test_an_image_that_cannot_be_read_is_an_error_of_the_tool() -> None:
    rollout, _ = converse(PROMPT, ToolResult("a", True, (b"no image",)))
    assert rollout.messages[2]["content"].startswith("Error: the tool returned an image that cannot be read: no image")
    assert (rollout.tool_errors, len(rollout.images)) == (1, 1)
    text_only = ChatTemplate(tiny_models.tokenizer(), load_tools(["megarl.environments.ready.calculator:calculator"]))
    plain = Prompt("p", ({"role": "user", "content": "x"},))
    rollout, _ = converse(plain, ToolResult("a", True, (picture(8),)), text_only)
    assert "the model of model.path has no vision tower" in rollout.messages[2]["content"]
    with pytest.raises(ConfigError, match="the model of model.path has no vision tower"):
        text_only.render_prompt(PROMPT)


def test_prompt_must_not_spell_the_image_token() -> None:
    spelled = replace(PROMPT, messages=({"role": "user", "content": "<image> and <|image_pad|>"},))
    with pytest.raises(ConfigError, match=r"prompt p spells the image token <\|image_pad\|>"):
        CHAT.render_prompt(spelled)
    broken = replace(PROMPT, images=(Image(b"no image"),))
    with pytest.raises(ConfigError, match="prompt p: no image that Pillow reads"):
        CHAT.render_prompt(broken)


def test_splits_the_parts_that_a_tool_returned(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(picture(8))
    encoded = base64.b64encode(picture(8)).decode()
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}
    file, mcp = {"type": "image", "image": str(tmp_path / "a.png")}, {"type": "image", "data": encoded}
    parts = [{"type": "text", "text": "see "}, url, file, mcp]
    assert split_images(parts, "it") == ("see ", [encoded] * 3)
    assert split_images(mcp, "it") == ("", [encoded])
    for value in ("text", 5, [1, 2], [{"type": "text", "text": "a"}], {"image": 3}):
        assert split_images(value, "it") == (value, [])
    with pytest.raises(FileNotFoundError):
        split_images([{"type": "image", "image": "/no.png"}], "it")
    with pytest.raises(
        TypeError, match="it holds the image 'https://a.org/b.png', which is no path, data URL or base64"
    ):
        split_images([{"type": "image", "image": "https://a.org/b.png"}], "it")
    with pytest.raises(TypeError, match="beside images, which is neither text nor image"):
        split_images([url, 5], "it")


@pytest.mark.parametrize("config", [None, {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}])
def test_folder_of_a_text_model_has_no_image_format(config: Any, tmp_path: Path) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_image_format(str(tmp_path), tiny_models.tokenizer()) is None
