"""Model folders whose only tokenizer is SentencePiece's `tokenizer.model`. `test_end_to_end.py` trains and exports
one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_models
from sentencepiece_tokenizer import put_pieces

from megarl.chat_format.chat_template import ChatTemplate
from megarl.config import Config, ConfigError, ModelConfig
from megarl.dry_run.model_folders import check_same_tokenizer, vocabulary_hash
from megarl.types import Prompt

TEXT = "\n".join(f"What is {a} plus {b}? The answer is {a + b}." for a in range(40) for b in range(40))


def make_folder(folder: Path, model_type: str, text: str = TEXT) -> Path:
    folder.mkdir()
    config = {"model_type": model_type, "vocab_size": 320}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(tiny_models.CHAT_TEMPLATE)
    put_pieces(folder, text)
    assert [path.name for path in folder.glob("tokenizer*")] == ["tokenizer.model"]
    return folder


def test_loads_a_sentencepiece_tokenizer(tmp_path: Path) -> None:
    chat = ChatTemplate.load(str(make_folder(tmp_path / "deepseek", "deepseek_v3")))
    content = "What is  3 plus 4?\n- é \\ {}"
    text = chat.decode(chat.encode_prompt(Prompt("p", ({"role": "user", "content": content},))))
    assert text.endswith("What is  3 plus 4?\n- é \\ {}<|im_end|>\n<|im_start|>assistant\n")
    chat.check_vocabulary(320)
    assert chat.decode([chat.end_of_turn]) == "<|im_end|>"


def test_tokenizer_class_that_loses_spaces_is_a_config_error(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "qwen", "qwen3_moe")
    with pytest.raises(ConfigError, match=r"Qwen.*'2 plus  3\\nis 5' comes back as .*put the model's tokenizer.json"):
        ChatTemplate.load(str(folder))


def test_compares_vocabularies(tmp_path: Path) -> None:
    first = make_folder(tmp_path / "first", "deepseek_v3")
    equal = make_folder(tmp_path / "same", "deepseek_v3")
    different = make_folder(tmp_path / "other", "deepseek_v3", TEXT.replace("plus", "with"))
    assert vocabulary_hash(str(first)) == vocabulary_hash(str(equal)) != vocabulary_hash(str(different)) != ""
    config = replace(Config(), model=ModelConfig(path=str(first)))
    check_same_tokenizer(config, "reward.model", str(equal), "it must")
    with pytest.raises(ConfigError, match="reward.model has another tokenizer .*they differ in "):
        check_same_tokenizer(config, "reward.model", str(different), "it must")
