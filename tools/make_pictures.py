"""Make a task with pictures: count squares. With a tiny random vision-language model that learns it from scratch.

    .venv/bin/python tools/make_pictures.py OUT [--family qwen2_5_vl|qwen3_vl_moe] [--seed N]

writes OUT/model (an HF folder of about 0.2 M parameters, fp32), OUT/train.jsonl and OUT/eval.jsonl; the pictures are
PNG files in the rows. Train with `configs/quickstart_pictures.yaml`.

A picture has 1 to 4 squares on a board of 4 x 4 fields, each of a random colour. The policy answers with one of 50
words, of which the digits 1 to 4 are the right answers; it begins with a random word. No picture of eval.jsonl occurs
in train.jsonl.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import random
import sys
from pathlib import Path
from typing import Any

from make_quickstart import new_folder

from megarl.config.command_line import Parser, int_in_range, run_cli

FAMILIES = ("qwen2_5_vl", "qwen3_vl_moe")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
WORDS = """0 1 2 3 4 5 6 7 8 9 how many squares ? system user assistant unknown a the red blue green and or is are of in
to it that there this one two three four five none all more less next""".split()
FIELDS, FIELD = 4, 14  # fields along a side, and pixels along a field, which is a patch
MOST = 4
TEMPLATE = """\
{%- for message in messages -%}
<|im_start|> {{ message.role }} {{ message.content }} <|im_end|> {% endfor -%}
{%- if add_generation_prompt -%}<|im_start|> assistant {% endif -%}
"""


def picture(fields: list[int], draw: random.Random) -> bytes:
    """Return a PNG with a square in each of these fields."""
    import PIL.Image

    image = PIL.Image.new("RGB", (FIELDS * FIELD, FIELDS * FIELD), (255, 255, 255))
    for field in fields:
        row, column = divmod(field, FIELDS)
        colour = (draw.randint(0, 128), draw.randint(0, 128), draw.randint(0, 128))
        left, top = column * FIELD, row * FIELD
        image.paste(colour, (left + 2, top + 2, left + FIELD - 2, top + FIELD - 2))
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def write_data(out: Path, seed: int, train: int, held_out: int) -> None:
    """Write train.jsonl and eval.jsonl in verl's form, with pictures that all differ."""
    draw, used = random.Random(seed), set[bytes]()
    for name, size in (("eval", held_out), ("train", train)):
        with (out / f"{name}.jsonl").open("w") as file:
            for number in range(size):
                count = number % MOST + 1
                data = picture(draw.sample(range(FIELDS * FIELDS), count), draw)
                while data in used:
                    data = picture(draw.sample(range(FIELDS * FIELDS), count), draw)
                used.add(data)
                row = {
                    "id": f"{name}-{number}",
                    "prompt": [{"role": "user", "content": "<image> how many squares ?"}],
                    "images": [{"bytes": base64.b64encode(data).decode()}],
                    "ground_truth": str(count),
                }
                file.write(json.dumps(row) + "\n")


def make_tokenizer() -> Any:
    """Return a tokenizer of whole words with a chat template."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = (*SPECIAL, *VISION, *WORDS)
    words = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="unknown"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in (*SPECIAL, *VISION)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(family: str, tokenizer: Any) -> Any:
    """Return a tiny randomly initialised model of the family, fp32. Seed torch before calling."""
    import transformers

    ids = dict(zip(VISION, tokenizer.convert_tokens_to_ids(list(VISION)), strict=True))
    tokens = {
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
    }
    text: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    tower: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 64,
        "patch_size": FIELD,
        "out_hidden_size": 64,
        "initializer_range": 0.1,
    }
    shared: dict[str, Any] = {"tie_word_embeddings": False, "dtype": "float32", **tokens}
    if family == "qwen2_5_vl":
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
        tower |= {"window_size": 56, "fullatt_block_indexes": [1]}
        config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=tower, **shared)
        return transformers.Qwen2_5_VLForConditionalGeneration(config)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    text |= {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    text |= {"rope_parameters": rope, "tie_word_embeddings": False, "num_hidden_layers": 4}
    tower |= {"depth": 3, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1, 2]}
    config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=tower, **shared)
    return transformers.Qwen3VLMoeForConditionalGeneration(config)


def write_model(folder: Path, family: str, seed: int) -> int:
    """Write an HF folder that transformers and SGLang load. Return the number of parameters."""
    import torch
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    model = make_model(family, tokenizer)
    model.save_pretrained(folder)
    if family == "qwen3_vl_moe":
        transpose_experts(folder / "model.safetensors")
    tokenizer.save_pretrained(folder)
    area = (FIELDS * FIELD) ** 2
    Qwen2VLImageProcessorPil(patch_size=FIELD, size={"shortest_edge": 64, "longest_edge": area}).save_pretrained(folder)
    generation = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    return int(model.num_parameters())


def transpose_experts(file: Path) -> None:
    """Store the experts as published checkpoints and SGLang have them; transformers reads both forms."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    save_file(
        {name: tensor.mT.contiguous() if ".experts." in name else tensor for name, tensor in tensors.items()},
        file,
        {"format": "pt"},
    )


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("out", type=Path, help="folder to write into; made where it does not exist")
    parser.add_argument("--family", choices=FAMILIES, default="qwen2_5_vl")
    parser.add_argument("--seed", type=int_in_range(0), default=1, help="of the weights and pictures (default 1)")
    parser.add_argument("--train", type=int_in_range(0, 100_000), default=2048, help="prompts to train on")
    parser.add_argument("--held-out", type=int_in_range(0, 100_000), default=128, help="prompts to measure with")
    return parser.parse_args(arguments)


def make(options: argparse.Namespace) -> int:
    with new_folder(options.out) as folder:
        parameters = write_model(folder / "model", options.family, options.seed)
        write_data(folder, options.seed, options.train, options.held_out)
    print(
        f"{options.out}: model/ ({options.family}, {parameters / 1e6:.2f} M parameters), train.jsonl "
        f"({options.train}), eval.jsonl ({options.held_out})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(lambda: make(parse(sys.argv[1:]))))
