"""Chats to token ids by the model's own template, and tool results to the ids between two turns of the policy.

What the policy wrote is never tokenised again. The ids that follow it are the difference that the template makes: a
dummy conversation is rendered, and what stands after the policy's end token is tokenised by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from megarl.config import ConfigError
from megarl.rollout.tools import Tool
from megarl.types import Message, Prompt

_POLICY_TURN = "POLICYTURN"  # stands for what the policy wrote; any word that no template adds or changes
_MARKS = "<>[]|{}｜"  # an added token with one of these is taken for a control token, even if not declared special


class Chat:
    """tokenizer: of transformers, with a chat template. tools: by name, as `tools.load_tools` gives them."""

    def __init__(self, tokenizer: Any, tools: dict[str, Tool] | None = None) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError("the tokenizer of model.path has no chat template")
        self.tokenizer = tokenizer
        self.tools = tools or {}

    @classmethod
    def load(cls, folder: str, tools: dict[str, Tool] | None = None) -> Chat:
        """With the tokenizer of an HF folder. Raises ConfigError where it has none or no chat template."""
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # noqa: B036  the tokenizers package raises nothing narrower
            raise ConfigError(f"model.path: no tokenizer in {folder}: {' '.join(str(error).split())[:300]}") from None
        return cls(tokenizer, tools)

    def check_vocabulary(self, size: int) -> None:
        """Raise ConfigError where the tokenizer has ids that a model of `size` words does not know."""
        word, highest = max(self.tokenizer.get_vocab().items(), key=lambda item: int(item[1]))
        if highest >= size:
            raise ConfigError(
                f"model.path: the tokenizer gives {word!r} the id {highest}, but config.json has vocab_size={size}; "
                "the tokenizer is another model's"
            )

    def schemas(self, prompt: Prompt) -> list[dict[str, Any]]:
        """Schemas of the tools that this prompt allows. Raises ConfigError for one that is not in rollout.tools."""
        for name in prompt.tools:
            if name not in self.tools:
                raise ConfigError(f"prompt {prompt.id} asks for the tool {name}, which rollout.tools does not load")
        return [self.tools[name].schema for name in prompt.tools or self.tools]

    def render(self, prompt: Prompt) -> list[int]:
        """Ids of the prompt's messages, its tools and the head of the policy's first turn."""
        return self._ids(self._text(prompt.messages, self.schemas(prompt), generate=True))

    def text(self, ids: Sequence[int]) -> str:
        """What ids say, control tokens included."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    @cached_property
    def end_of_turn(self) -> int:
        """The token that the template puts after the policy's turn, and with which the policy must end it."""
        text = self._text([{"role": "user", "content": "x"}, {"role": "assistant", "content": _POLICY_TURN}])
        _, found, rest = text.rpartition(_POLICY_TURN)
        added = set(self.tokenizer.added_tokens_decoder)
        ids = [token for token in self._ids(rest) if token in added] if found else []
        if ids:
            return int(ids[0])
        if self.tokenizer.eos_token_id is None:
            raise ConfigError("the chat template ends a turn with no control token, and the tokenizer has no eos_token")
        return int(self.tokenizer.eos_token_id)

    def observation(self, results: Sequence[Message], schemas: Sequence[dict[str, Any]] = ()) -> list[int]:
        """Ids between the policy's end token and its next turn: tool results, then the head of that turn.

        results: messages of role `tool`. Control tokens in their contents are escaped: a tool must not be able to
        write a turn. Raises ConfigError where the template has no place for tool results.
        """
        safe = [{**message, "content": self.escape(str(message["content"]))} for message in results]
        ids = self._delta(safe, schemas)
        frame = self._controls(self._delta([{**message, "content": "0"} for message in results], schemas))
        if self._controls(ids) != frame:  # a tokenizer that reads control tokens where their text is not
            withheld = "(withheld: the output contains control tokens)"
            ids = self._delta([{**message, "content": withheld} for message in results], schemas)
        return ids

    def escape(self, text: str) -> str:
        """The text with a backslash inside whatever the tokenizer would read as a control token."""
        found = True
        while found:
            found = False
            for token in self._control_texts:
                if token in text:
                    text, found = text.replace(token, f"{token[0]}\\{token[1:]}"), True
        return text

    @cached_property
    def _control_texts(self) -> list[str]:
        """Longest first. Words that a tokenizer merely added are no control tokens and are left alone."""
        tokens = self.tokenizer.added_tokens_decoder.values()
        texts = {str(token) for token in tokens if token.special or any(mark in str(token) for mark in _MARKS)}
        return sorted((text for text in texts if len(text) > 1), key=lambda text: (-len(text), text))

    @cached_property
    def _control_ids(self) -> frozenset[int]:
        texts = set(self._control_texts)
        return frozenset(index for index, token in self.tokenizer.added_tokens_decoder.items() if str(token) in texts)

    def _controls(self, ids: Sequence[int]) -> list[int]:
        return [token for token in ids if token in self._control_ids]

    def _delta(self, results: Sequence[Message], schemas: Sequence[dict[str, Any]]) -> list[int]:
        head: list[Message] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _POLICY_TURN}]
        text = self._text([*head, *results], schemas, generate=True)
        _, found, rest = text.partition(_POLICY_TURN)
        _, ended, delta = rest.partition(self.text([self.end_of_turn]))
        if not found or not ended or not delta:
            raise ConfigError("the chat template of model.path cannot render a tool's result after the policy's turn")
        return self._ids(delta)

    def _text(self, messages: Sequence[Message], schemas: Sequence[dict[str, Any]] = (), generate: bool = False) -> str:
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages), tools=list(schemas) or None, tokenize=False, add_generation_prompt=generate
                )
            )
        except Exception as error:  # jinja2's errors and whatever a template raises on purpose
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ConfigError(f"the chat template of model.path cannot render the roles {roles}: {error}") from None

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))
