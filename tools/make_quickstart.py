"""Make the quickstart's material: a tiny random MoE with a real tokenizer, and an arithmetic task with a calculator.

    .venv/bin/python tools/make_quickstart.py OUT [--family qwen3_moe|deepseek_v3|qwen3_next] [--seed N]

writes OUT/model (an HF folder of about 1 M parameters, fp32), OUT/sft.jsonl, OUT/train.jsonl and OUT/eval.jsonl.

The task is an expression of 2 or 3 numbers up to 99 with + - and *. The policy may guess, or call the calculator with
the expression, read its answer and state it. A minority (35 %) of the demonstrations in sft.jsonl use the tool; the
rest guess a random number without it. The warm-up therefore teaches every skill, but not the habit: RL must find out
that calling the tool pays. No problem of eval.jsonl occurs in train.jsonl or sft.jsonl.

With --conversations FILE it makes OUT/model alone, for a task of your own: FILE has demonstrations, as for SFT, and the
tokenizer knows their words.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from megarl.config import ConfigError
from megarl.config.command_line import Parser, check_writable_folder, int_in_range, run_cli
from megarl.environments.ready.calculator import calculator

VOCABULARY = 1024
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ADDED = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
TOOL_SHARE = 0.35  # share of the demonstrations that call the tool
FAMILIES = ("qwen3_moe", "deepseek_v3", "qwen3_next")
MAX_PROBLEMS = 1_000_000  # problems of each kind; there are 8.7 million

CHAT_TEMPLATE = """\
{%- set system = messages[0].content if messages and messages[0].role == 'system' else '' -%}
{%- if system or tools -%}
<|im_start|>system
{{ system }}
{%- if tools -%}
{%- if system -%}{{ '\\n\\n' }}{%- endif -%}
You may call these functions:
<tools>{{ '\\n' }}
{%- for tool in tools -%}
{{ tool | tojson }}{{ '\\n' }}
{%- endfor -%}
</tools>
Write each call as a JSON object:
<tool_call>
{"name": <name of the function>, "arguments": <object of arguments>}
</tool_call>
{%- endif -%}
<|im_end|>{{ '\\n' }}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
<|im_start|>assistant{{ '\\n' }}{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
{%- if message.content or not loop.first -%}{{ '\\n' }}{%- endif -%}
<tool_call>{{ '\\n' }}{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments
    if call.function.arguments is string else call.function.arguments | tojson }}}{{ '\\n' }}</tool_call>
{%- endfor -%}
<|im_end|>{{ '\\n' }}
{%- elif message.role == 'tool' -%}
{%- if loop.previtem is not defined or loop.previtem.role != 'tool' -%}<|im_start|>user{%- endif -%}
{{ '\\n' }}<tool_response>{{ '\\n' }}{{ message.content }}{{ '\\n' }}</tool_response>
{%- if loop.nextitem is not defined or loop.nextitem.role != 'tool' -%}<|im_end|>{{ '\\n' }}{%- endif -%}
{%- elif message.role != 'system' or not loop.first -%}
<|im_start|>{{ message.role }}{{ '\\n' }}{{ message.content }}<|im_end|>{{ '\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant{{ '\\n' }}{%- endif -%}
"""

# Fills the part of the vocabulary that the constant text leaves, so that other text is not spelt byte by byte.
PLAIN_WORDS = """the of and to in is you that it he was for on are as with his they at be this have from or one had by
word but not what all were we when your can said there use an each which she do how their if will up other about out
many then them these so some her would make like him into time has look two more write go see number no way could
people my than first water been call who oil its now find long down day did get come made may part over new sound take
only little work know place year live me back give most very after thing our just name good sentence man think say
great where help through much before line right too mean old any same tell boy follow came want show also around form
three small set put error result value tool stopped missing argument expression unknown valid object must type please
try again answer"""


def problem(draw: random.Random) -> str:
    """Return an expression of 2 or 3 numbers from 1 to 99, without spaces: `12+7*30`."""
    expression = str(draw.randint(1, 99))
    for _ in range(draw.choice((1, 2))):
        expression += draw.choice("+-*") + str(draw.randint(1, 99))
    return expression


def value(expression: str) -> int:
    """Evaluate an expression. Expressions come from `problem`: digits and + - * only."""
    return int(eval(expression, {"__builtins__": {}}))


def problems(draw: random.Random, count: int, used: set[str]) -> list[str]:
    """Return `count` problems that differ from each other and from those taken, and add them to these."""
    fresh: list[str] = []
    while len(fresh) < count:
        expression = problem(draw)
        if expression not in used:
            used.add(expression)
            fresh.append(expression)
    return fresh


def question(expression: str) -> dict[str, Any]:
    return {"role": "user", "content": f"What is {expression}?"}


def statement(number: int) -> dict[str, Any]:
    return {"role": "assistant", "content": f"The answer is {number}."}


def tool_call(expression: str) -> dict[str, Any]:
    function = {"name": "calculator", "arguments": json.dumps({"expression": expression})}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def demonstration(draw: random.Random, expression: str) -> list[dict[str, Any]]:
    """Return a conversation that uses the tool with probability TOOL_SHARE, else a guess that is almost always
    wrong."""
    if draw.random() >= TOOL_SHARE:
        return [question(expression), statement(draw.randint(0, 999))]
    result = value(expression)
    return [question(expression), tool_call(expression), {"role": "tool", "content": str(result)}, statement(result)]


def write_data(out: Path, seed: int, train: int, held_out: int, demonstrations: int) -> None:
    """Write eval.jsonl, train.jsonl and sft.jsonl; all problems differ."""
    draw = random.Random(seed)
    used: set[str] = set()
    for name, size in (("eval", held_out), ("train", train)):
        rows = (
            {"id": f"{name}-{i}", "prompt": [question(e)], "ground_truth": value(e), "tools": ["calculator"]}
            for i, e in enumerate(problems(draw, size, used))
        )
        write_jsonl(out / f"{name}.jsonl", rows)
    rows = (
        {"id": f"sft-{i}", "messages": demonstration(draw, e), "tools": [calculator.schema]}
        for i, e in enumerate(problems(draw, demonstrations, used))
    )
    write_jsonl(out / "sft.jsonl", rows)


def write_jsonl(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


Conversations = Sequence[tuple[list[dict[str, Any]], list[dict[str, Any]]]]
"""Conversations, each with the schemas of its tools."""


def make_tokenizer(examples: Conversations) -> Any:
    """Train a byte-level BPE tokenizer of exactly VOCABULARY ids, for the chat template above and text like `examples`.

    Words are split around digits and operators only, so each of these is always a token of its own, and the constant
    text between them, which is in the training text, collapses to very few tokens. A role's line is split off, too: the
    generation prompt ends there, and a conversation tokenised whole equals one tokenised turn by turn.
    """
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\A(?:system|user|assistant)\n|[0-9+\-*]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    bpe.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = CHAT_TEMPLATE

    texts = [str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)) for messages, tools in examples]
    text = "\0".join(texts)
    for token in (*SPECIAL, *ADDED):
        text = text.replace(token, "\0")
    constant = [part for part in text.split("\0") if part]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(ADDED),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Frequent words are merged before rare ones, so the constant text takes its share of the vocabulary first.
    bpe.train_from_iterator(constant * 1000 + [" " + word for word in PLAIN_WORDS.split()], trainer)
    bpe.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED])
    spare = VOCABULARY - bpe.get_vocab_size()
    bpe.add_special_tokens([AddedToken(f"<|spare_{i}|>", special=True, normalized=False) for i in range(spare)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(family: str, eos_id: int, pad_id: int) -> Any:
    """Return a tiny randomly initialised model of the family, fp32, embeddings not tied. Seed torch before calling."""
    from transformers import (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        Qwen3NextConfig,
        Qwen3NextForCausalLM,
    )

    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        # About hidden_size ** -0.5. The usual 0.02 suits a width of 2,500; here it costs 50 steps of warm-up.
        "initializer_range": 0.08,
        "bos_token_id": None,
        "eos_token_id": eos_id,
        "pad_token_id": pad_id,
        "dtype": "float32",
    }
    if family == "qwen3_moe":
        qwen: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 64, "num_experts": 8, "norm_topk_prob": True}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **qwen))
    if family == "qwen3_next":
        delta: dict[str, Any] = {f"linear_num_{kind}_heads": count for kind, count in (("key", 2), ("value", 4))}
        delta |= {f"linear_{kind}_head_dim": 32 for kind in ("key", "value")}
        delta |= {"num_key_value_heads": 2, "head_dim": 64, "num_experts": 8, "shared_expert_intermediate_size": 64}
        return Qwen3NextForCausalLM(Qwen3NextConfig(**common, **delta))
    # SGLang's MLA on CPU requires a yarn entry.
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512}
    yarn.update({"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0})
    deepseek: dict[str, Any] = {
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "rope_scaling": yarn,
    }
    return DeepseekV3ForCausalLM(DeepseekV3Config(**common, **deepseek))


def published_form(config: dict[str, Any]) -> dict[str, Any]:
    """Return config.json with the names that the published models use; transformers 5 reads both and writes its own."""
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else {**rope, "type": rope["rope_type"]}
    if config["model_type"] == "qwen3_moe":
        config["num_experts"] = config.pop("num_local_experts")
    elif config["model_type"] == "qwen3_next":
        config.update({"full_attention_interval": 4, "partial_rotary_factor": rope["partial_rotary_factor"]})
    else:
        # Keys that SGLang reads and transformers does not write.
        config.update({"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"})
    return config


def write_model(folder: Path, family: str, seed: int, examples: Conversations = ()) -> int:
    """Write an HF folder that transformers and SGLang load. Return the number of parameters. examples: see
    `make_tokenizer`; by default a conversation of the task."""
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()  # no progress bar for a file this small
    torch.manual_seed(seed)
    example = [question("1"), tool_call("1"), {"role": "tool", "content": "1"}, statement(1)]
    tokenizer = make_tokenizer(examples or [(example, [calculator.schema])])
    model = make_model(family, tokenizer.eos_token_id, tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_json(folder / "config.json", published_form(json.loads((folder / "config.json").read_text())))
    write_json(
        folder / "generation_config.json",
        {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id},
    )
    return int(model.num_parameters())


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("out", type=Path, help="folder to write into; made where it does not exist")
    parser.add_argument("--family", choices=FAMILIES, default="qwen3_moe")
    parser.add_argument(
        "--seed", type=int_in_range(0), default=1, help="of the weights and of the problems (default 1)"
    )
    sizes = int_in_range(0, MAX_PROBLEMS)
    parser.add_argument("--train", type=sizes, default=4096, help="prompts to train on (default 4096)")
    parser.add_argument("--held-out", type=sizes, default=256, help="prompts to measure with (default 256)")
    parser.add_argument("--demonstrations", type=sizes, default=25600, help="of the warm-up (default 25600: 400 x 64)")
    parser.add_argument(
        "--conversations", type=Path, metavar="FILE", help="make only a model, with the words of these (.jsonl)"
    )
    return parser.parse_args(arguments)


def read_conversations(file: Path, count: int = 64) -> Conversations:
    """Return the first conversations of a file for SFT, with the schemas of their tools. Raises ConfigError."""
    try:
        with file.open(encoding="utf-8") as lines:
            rows = [json.loads(line) for line in islice(lines, count)]
        conversations = [(row["messages"], row.get("tools", [])) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--conversations {file}: {error!r}; it needs lines like sft.jsonl, with messages") from None
    if not conversations:
        raise ConfigError(f"--conversations {file}: no line; it needs lines like sft.jsonl, with messages")
    return conversations


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder to write into, renamed to `out` at the end, so that `out` is always complete.

    Raises ConfigError if `out` is not empty or cannot be written.
    """
    check_writable_folder(out, "OUT")
    if out.is_dir() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty; name another folder, or remove what is in it")
    unfinished = out.absolute().with_name(f".{out.absolute().name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        unfinished.rename(out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def make(options: argparse.Namespace) -> int:
    examples = read_conversations(options.conversations) if options.conversations else ()
    with new_folder(options.out) as folder:
        parameters = write_model(folder / "model", options.family, options.seed, examples)
        if examples:
            print(f"{options.out}: model/ ({options.family}, {parameters / 1e6:.2f} M parameters)")
            return 0
        write_data(folder, options.seed, options.train, options.held_out, options.demonstrations)
    print(
        f"{options.out}: model/ ({options.family}, {parameters / 1e6:.2f} M parameters), sft.jsonl "
        f"({options.demonstrations}), train.jsonl ({options.train}), eval.jsonl ({options.held_out})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(lambda: make(parse(sys.argv[1:]))))
