"""Chats to token ids by the model's own template, and tool results to the ids between two turns of the policy.

What the policy wrote is never tokenised again. The ids that follow it are the difference that the template makes: a
dummy conversation is rendered, and what stands after the token with which the policy ended its turn is tokenised by
itself.

Templates end a turn in one of two ways, and both are read from the template. Most close it, as with <|im_end|>. GLM's
put nothing there: the policy writes the token that opens the next turn, <|observation|> after a call, <|user|> after a
statement. Either way that token is the policy's own, the last of its turn, and an observation begins behind it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from megarl.config import ConfigError
from megarl.data.text import encodable
from megarl.environments.describing import Known
from megarl.environments.protocol import Described
from megarl.environments.tools import Tool
from megarl.types import Ids, Message, Prompt, ids_of

_POLICY_TURN = "POLICYTURN"  # stands for what the policy wrote; any word that no template adds or changes
_RESULT = "TOOLRESULT"  # and for what a tool, or the user, answered
_HEAD: list[Message] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _POLICY_TURN}]
_MARKS = "<>[]|{}｜"  # an added token with one of these is taken for a control token, even if not declared special


class Chat:
    """tokenizer: of transformers, with a chat template. tools, environments: by name, as `describing.known_of` gives
    them. eos: further tokens that end a turn, besides those that the template puts there and the tokenizer's own."""

    def __init__(
        self,
        tokenizer: Any,
        tools: Mapping[str, Tool] | None = None,
        eos: Sequence[int] = (),
        environments: Mapping[str, Described] | None = None,
    ) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError("the tokenizer of model.path has no chat template")
        self.tokenizer = tokenizer
        self.known = Known(tools or {}, environments or {})
        self.tools = self.known.every
        """All tools that are known before a conversation begins, by name."""
        self.eos = tuple(eos)

    @classmethod
    def load(
        cls,
        folder: str,
        tools: Mapping[str, Tool] | None = None,
        environments: Mapping[str, Described] | None = None,
    ) -> Chat:
        """With the tokenizer of an HF folder and the end tokens of its generation_config.json. Raises ConfigError where
        it has no tokenizer or no chat template."""
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # whatever the readers of a broken file raise
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise ConfigError(f"model.path: no tokenizer in {folder}: {reason[:500]}") from None
        return cls(tokenizer, tools, _generation_eos(Path(folder, "generation_config.json")), environments)

    def check_vocabulary(self, size: int) -> None:
        """Raise ConfigError where the tokenizer has ids that a model of `size` words does not know."""
        word, highest = max(self.tokenizer.get_vocab().items(), key=lambda item: int(item[1]))
        if highest >= size:
            raise ConfigError(
                f"model.path: the tokenizer gives {word!r} the id {highest}, but config.json has vocab_size={size}; "
                "the tokenizer is another model's"
            )
        if beyond := [token for token in self.eos if token >= size]:
            raise ConfigError(
                f"generation_config.json of model.path: eos_token_id {beyond[0]} is not in the vocabulary of {size}"
            )

    def check_tools(self) -> None:
        """Raise ConfigError where the template cannot hold a conversation with calls of the tools: it must write a call
        and go on behind its end exactly as it writes the whole. What writes a call is `calls`."""
        if self.tools:
            user: Message = {"role": "user", "content": "x"}
            self._text([user], [tool.schema for tool in self.tools.values()], generate=True)
        for name in self.tools:
            self.calls(name)

    def schemas(self, prompt: Prompt) -> list[dict[str, Any]]:
        """Schemas of the tools that this prompt allows. Raises ConfigError as `Known` does."""
        return self.known.schemas(prompt)

    def render(self, prompt: Prompt, schemas: Sequence[dict[str, Any]] | None = None) -> list[int]:
        """Ids of the prompt's messages, its tools and the head of the policy's first turn. schemas: of the tools, where
        they are not those that are known of the prompt."""
        own = self.schemas(prompt) if schemas is None else schemas
        return self._ids(self._text(prompt.messages, own, generate=True))

    def text(self, ids: Ids | Sequence[int]) -> str:
        """What ids say, control tokens included."""
        own = ids_of(ids).tolist()
        return str(self.tokenizer.decode(own, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    @cached_property
    def end_of_turn(self) -> int:
        """The token that the template puts after the policy's last turn; the tokenizer's own where it puts none."""
        ended = self._first_control(self._after([]))
        if ended is not None:
            return ended
        if self.tokenizer.eos_token_id is None:
            raise ConfigError("the chat template ends a turn with no control token, and the tokenizer has no eos_token")
        return int(self.tokenizer.eos_token_id)

    @cached_property
    def end_of_call(self) -> int | None:
        """The token between the policy's turn and a tool's result, and with which the policy must end a turn that calls
        tools; None where the template has no place for results."""
        try:
            rest = self._after([{"role": "tool", "name": "f", "tool_call_id": "f", "content": _RESULT}])
        except ConfigError:
            return None
        before, found, _ = rest.partition(_RESULT)
        return self._first_control(before) if found else None

    @cached_property
    def ends(self) -> frozenset[int]:
        """All tokens that end a turn of the policy, before whatever follows it."""
        found = {self.end_of_turn, self.end_of_call, self.tokenizer.eos_token_id, *self.eos}
        try:
            rest = self._after([{"role": "user", "content": _RESULT}])
            found.add(self._first_control(rest.partition(_RESULT)[0]))
        except ConfigError:  # a template for one turn only
            pass
        return frozenset(int(token) for token in found if token is not None)

    def observation(self, results: Sequence[Message], schemas: Sequence[dict[str, Any]] = ()) -> list[int]:
        """Ids between the last token of the policy's turn, which is `end_of_call`, and its next turn: tool results and
        the head of that turn.

        results: messages of role `tool`. Control tokens in whatever they say, names and ids included, are escaped: a
        tool must not be able to write a turn, nor a policy by what it calls. Raises ConfigError where the template has
        no place for tool results.
        """
        safe = [self._safe(message) for message in results]
        ids = self._ids(self._between(safe, schemas))
        frame = self._controls(self._ids(self._between([_plain("0") for _ in results], schemas)))
        if self._controls(ids) != frame:  # a tokenizer that reads control tokens where their text is not
            withheld = "(withheld: the output contains control tokens)"
            ids = self._ids(self._between([_plain(withheld) for _ in results], schemas))
        return ids

    def calls(self, name: str) -> list[tuple[str, dict[str, Any]]]:
        """(text, arguments): how the template writes a call of the tool with these arguments, in each of the forms that
        messages with calls have in practice and that it has a place for. A parser must read one of them.

        Raises ConfigError where the template writes no call, or does not put behind it what `observation` does.
        """
        schema = self.tools[name].schema
        arguments = _example(schema)
        user: Message = {"role": "user", "content": "x"}
        answer = {**_plain(_RESULT), "name": name}
        found, problem = [], ""
        for content in ("", None):
            for given in (arguments, json.dumps(arguments)):  # as a mapping, or as OpenAI's text
                function = {"name": name, "arguments": given}
                call = {"type": "function", "id": call_id(name, 0), "function": function}
                turn: Message = {"role": "assistant", "content": content, "tool_calls": [call]}
                try:
                    heads = [self._text([user], [schema], generate=generate) for generate in (True, False)]
                    written = self._text([user, turn], [schema])
                    whole = self._text([user, turn, answer], [schema], generate=True)
                    ending = self._end_text() + self._between([answer], [schema])
                except ConfigError as error:
                    problem = problem or str(error)
                    continue
                head = next((head for head in heads if written.startswith(head)), "")
                if name not in written[len(head) :]:
                    problem = problem or "it leaves calls out"
                elif not whole.endswith(ending):
                    problem = "what it puts between a call and the next turn depends on the call"
                elif (written[len(head) :], arguments) not in found:
                    found.append((written[len(head) :], arguments))
        if not found:
            raise ConfigError(
                f"the chat template of model.path has no place for calls of tools ({problem}); use a model with a "
                "template for tools, put one into its folder, or leave rollout.tools empty"
            )
        return found

    def escape(self, text: str) -> str:
        """The text with a backslash inside whatever the tokenizer would read as a control token."""
        found = True
        while found:
            found = False
            for token in self._control_texts:
                if token in text:
                    text, found = text.replace(token, f"{token[0]}\\{token[1:]}"), True
        return text

    def _safe(self, message: Message) -> Message:
        texts = {key: self.escape(encodable(str(value))) for key, value in message.items()}
        return {**texts, "role": "tool"}

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

    def _first_control(self, text: str) -> int | None:
        return next(iter(self._controls(self._ids(text))), None)

    def _after(self, following: Sequence[Message], schemas: Sequence[dict[str, Any]] = ()) -> str:
        """What the template writes after the policy's words where these messages follow, and then the policy again."""
        text = self._text([*_HEAD, *following], schemas, generate=bool(following))
        _, found, rest = text.partition(_POLICY_TURN)
        if not found:
            raise ConfigError("the chat template of model.path leaves out or changes what the policy said")
        return rest

    def _end_text(self) -> str:
        return "" if self.end_of_call is None else self.text([self.end_of_call])

    def _between(self, results: Sequence[Message], schemas: Sequence[dict[str, Any]]) -> str:
        rest = self._after(results, schemas)
        _, ended, text = rest.partition(self._end_text()) if self._end_text() else ("", "", "")
        if not ended or not text:
            raise ConfigError("the chat template of model.path cannot render a tool's result after the policy's turn")
        return text

    def _text(self, messages: Sequence[Message], schemas: Sequence[dict[str, Any]] = (), generate: bool = False) -> str:
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages), tools=list(schemas) or None, tokenize=False, add_generation_prompt=generate
                )
            )
        except Exception as error:  # jinja2's errors and whatever a template raises on purpose
            roles = ", ".join(str(message.get("role")) for message in messages)
            reason = " ".join(str(error).split())[:500]
            raise ConfigError(f"the chat template of model.path cannot render the roles {roles}: {reason}") from None

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(encodable(text), add_special_tokens=False))


def call_id(name: str, number: int) -> str:
    """Of a tool's call, the number counts all of a conversation: as Kimi K2 writes it, and others take any."""
    return f"functions.{name}:{number}"


def _plain(content: str) -> Message:
    return {"role": "tool", "name": "f", "tool_call_id": call_id("f", 0), "content": content}


_EXAMPLES: dict[str, Any] = {
    **{"string": "some words", "number": 1.5, "integer": 2, "boolean": True},
    **{"array": [], "object": {}},
}


def _example(schema: dict[str, Any]) -> dict[str, Any]:
    """Arguments that the schema would take: the required ones, where it has some."""
    parameters = schema["function"].get("parameters") or {}
    properties = parameters.get("properties") or {}
    names = parameters.get("required") or list(properties)[:1]
    chosen = {}
    for name in names:
        about = properties.get(name) or {}
        kind = about.get("type")
        chosen[name] = (about.get("enum") or [_EXAMPLES.get(kind if isinstance(kind, str) else "string", "words")])[0]
    return chosen


def _generation_eos(file: Path) -> tuple[int, ...]:
    """eos_token_id of a generation_config.json, none where there is no such file. Raises ConfigError for nonsense."""
    if not file.is_file():
        return ()
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        eos = found.get("eos_token_id")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{file} is not a JSON object: {error}") from None
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise ConfigError(f"{file}: eos_token_id must be a token id or a list of them, not {str(eos)[:80]}")
    return tuple(ids)
