"""Render chats to token ids by the model's own template, and tool results to the ids between two turns of the policy.

What the policy wrote is never tokenised again. The ids that follow it are the difference that the template makes: a
dummy conversation is rendered, and the text after the token that ended the policy's turn is tokenised by itself.

Templates end a turn in one of two ways, and both are read off the template. Most close it, as with <|im_end|>. GLM's
add nothing: the policy writes the token that opens the next turn, <|observation|> after a call and <|user|> after a
statement. Either way that token is the policy's own, the last of its turn, and an observation follows it.

`TextCodec` encodes and decodes text, with the tokenizer's Rust library where that gives the same ids, at half the cost.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from megarl.chat_format.chat_messages import (
    CALL_FORMATS,
    CallFormat,
    ControlTokens,
    EscapedEncoder,
    escape_schemas,
    format_call_id,
    make_example_arguments,
    normalize_message,
    read_eos_ids,
)
from megarl.chat_format.reasoning import ReasoningSpan, find_marks, find_reasoning, is_open, is_reasoning_dropped
from megarl.config import ConfigError
from megarl.environments.catalog import EnvironmentCatalog
from megarl.environments.protocol import EnvironmentInfo
from megarl.environments.tools import Tool
from megarl.types import Ids, Message, Prompt, as_token_ids
from megarl.utils.text import replace_surrogates

_TOKENIZER_METHODS = ("encode", "_encode_plus", "decode", "_decode")


class TextCodec:
    """tokenizer: of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = _find_backend(tokenizer)

    def encode(self, text: str) -> list[int]:
        """Of a text, with whatever control tokens it spells and none besides."""
        text, library = replace_surrogates(text), self._backend
        if library is not None and library.truncation is None and library.padding is None:  # others may set these
            return list(library.encode(text, add_special_tokens=False).ids)
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """What ids say, control tokens included."""
        if self._backend is not None:
            return str(self._backend.decode(ids, skip_special_tokens=False))
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _find_backend(tokenizer: Any) -> Any:
    """The object of `tokenizers` that does all of the tokenizer's work; None where other code has a part in it."""
    from transformers import PreTrainedTokenizerFast

    kind = type(tokenizer)
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or tokenizer.split_special_tokens:
        return None
    if any(getattr(kind, name) is not getattr(PreTrainedTokenizerFast, name) for name in _TOKENIZER_METHODS):
        return None
    library = tokenizer.backend_tokenizer
    return None if library.encode_special_tokens else library


_POLICY_TURN = "POLICYTURN"  # stands for what the policy wrote; any word that no template adds or changes
_TOOL_RESULT = "TOOLRESULT"  # and for what a tool, or the user, answered
_DUMMY_TURNS: list[Message] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _POLICY_TURN}]

_RolePattern = tuple[tuple[str, bool, bool], ...]
"""Of messages: role, whether there are words, whether there are calls."""


class ChatTemplate:
    """tokenizer: of transformers, with a chat template. tools, environments: by name, as `describing.load_catalog` gives
    them. eos: further tokens that end a turn, besides those that the template puts there and the tokenizer's own."""

    def __init__(
        self,
        tokenizer: Any,
        tools: Mapping[str, Tool] | None = None,
        eos: Sequence[int] = (),
        environments: Mapping[str, EnvironmentInfo] | None = None,
    ) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "the tokenizer of model.path has no chat template; put the model's chat_template.jinja into its folder"
            )
        self.tokenizer = tokenizer
        self.catalog = EnvironmentCatalog(tools or {}, environments or {})
        self.tools = self.catalog.all_tools
        """All tools that are known before a conversation begins, by name."""
        self.eos = tuple(eos)
        self.control_tokens = ControlTokens(tokenizer)
        self._codec = TextCodec(tokenizer)
        self._call_formats: dict[tuple[_RolePattern, bool], CallFormat | str] = {}
        self._is_opened_after: dict[str, bool] = {}
        self._encoder = EscapedEncoder(self.control_tokens, self.encode)

    @classmethod
    def load(
        cls,
        folder: str,
        tools: Mapping[str, Tool] | None = None,
        environments: Mapping[str, EnvironmentInfo] | None = None,
    ) -> ChatTemplate:
        """With the tokenizer of an HF folder and the end tokens of its generation_config.json. Raises ConfigError where
        it has no tokenizer or no chat template."""
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # whatever the readers of a broken file raise
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise ConfigError(f"model.path: no tokenizer in {folder}: {reason[:500]}") from None
        if not Path(folder, "tokenizer.json").exists() and Path(folder, "tokenizer.model").exists():
            _check_sentencepiece(tokenizer, folder)
        return cls(tokenizer, tools, read_eos_ids(Path(folder, "generation_config.json")), environments)

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
            self._apply_template([user], [tool.schema for tool in self.tools.values()], generate=True)
        for name in self.tools:
            self.render_calls(name)

    def select_schemas(self, prompt: Prompt) -> list[dict[str, Any]]:
        """Schemas of the tools that this prompt allows. Raises ConfigError as `Known` does."""
        return self.catalog.select_schemas(prompt)

    def encode_prompt(self, prompt: Prompt, schemas: Sequence[dict[str, Any]] | None = None) -> list[int]:
        """Ids of the prompt's messages, its tools and the head of the policy's first turn. schemas: of the tools, where
        they are not those that are known of the prompt."""
        own = self.select_schemas(prompt) if schemas is None else schemas
        return self.encode(self._apply_template(prompt.messages, own, generate=True))

    def decode(self, ids: Ids | Sequence[int]) -> str:
        """What ids say, control tokens included."""
        return self._codec.decode(as_token_ids(ids).tolist())

    def encode(self, text: str) -> list[int]:
        """Of a text, with whatever control tokens it spells and none besides."""
        return self._codec.encode(text)

    @cached_property
    def end_of_turn(self) -> int:
        """The token that the template puts after the policy's last turn; the tokenizer's own where it puts none."""
        ended = self.control_tokens.find_first(self._render_after_turn([]))
        if ended is not None:
            return ended.id
        if self.tokenizer.eos_token_id is None:
            raise ConfigError("the chat template ends a turn with no control token, and the tokenizer has no eos_token")
        return int(self.tokenizer.eos_token_id)

    @cached_property
    def end_of_call(self) -> int | None:
        """The token between the policy's turn and a tool's result, and with which the policy must end a turn that calls
        tools; None where the template has no place for results."""
        return self._find_end_token("tool")

    @cached_property
    def end_token_ids(self) -> frozenset[int]:
        """All tokens that end a turn of the policy, before whatever follows it."""
        found = {
            self.end_of_turn,
            self.end_of_call,
            self.tokenizer.eos_token_id,
            *self.eos,
            self._find_end_token("user"),
        }
        return frozenset(int(token) for token in found if token is not None)

    def _find_end_token(self, role: str) -> int | None:
        """The token between the policy's turn and a message of that role; None where the template has no such place."""
        try:
            rest = self._render_after_turn([normalize_message({"role": role, "content": _TOOL_RESULT})])
        except ConfigError:
            return None
        before, found, _ = rest.partition(_TOOL_RESULT)
        ended = self.control_tokens.find_first(before) if found else None
        return None if ended is None else ended.id

    def encode_continuation(
        self, messages: Sequence[Message], schemas: Sequence[dict[str, Any]] = (), last: int | None = None
    ) -> list[int]:
        """Ids behind a turn of the policy: these messages, and the head of its next turn.

        messages: of any role, in OpenAI's form: tool results, a user's words, the system's, and even an assistant's
        that a client has put there. Control tokens in whatever tools and others say, names, ids and arguments included,
        are escaped: a tool must not be able to write a turn, nor a policy by what it calls. last: the token that the
        policy's turn ends with. Where it is not the one by which the template ends a turn before such messages, as of a
        turn that was cut off, then that one comes first; by default it is.

        Raises ConfigError, which names the role, where the template has no place for such a message, and for one that
        holds what is not text.
        """
        return self._encoder.encode(
            messages, lambda ready: self._render_continuation(ready, schemas, last), lambda: (last, repr(schemas))
        )

    def _render_continuation(
        self, messages: Sequence[Message], schemas: Sequence[dict[str, Any]], last: int | None = None
    ) -> str:
        """`continuation` of messages that are plain, as text."""
        form = self._get_call_format(_role_pattern(messages), behind=True)
        rest = self._render_after_turn([form(message) for message in messages], schemas)
        end = self.control_tokens.find_first(rest)
        if end is None:
            raise ConfigError("the chat template of model.path ends a turn with no control token")
        over = end.id in self.end_token_ids if last is None else end.id == last
        return rest[end.stop :] if over else rest

    def encode_conversation(self, messages: Sequence[Message], schemas: Sequence[dict[str, Any]] = ()) -> list[int]:
        """Ids of a whole conversation that others have written, tokens escaped as in `continuation`, and the head of
        the policy's turn; errors as there."""

        def make(ready: Sequence[Message]) -> str:
            form = self._get_call_format(_role_pattern(ready), behind=False)
            return self._apply_template([form(message) for message in ready], schemas, generate=True)

        return self._encoder.encode(messages, make)

    # --- reasoning

    @cached_property
    def reasoning_marks(self) -> tuple[str, str] | None:
        """What opens the model's reasoning and what closes it; None for one that does not reason."""
        return find_marks(self.tokenizer)

    def find_reasoning_range(self, ids: Ids | Sequence[int], after: str = "user") -> range | None:
        """Which of a turn's ids are reasoning, with its marks; what the policy says stands behind them. None where
        there is none. after: role of the message that the turn answers: behind some the template itself opens it."""
        own = as_token_ids(ids)
        text = self.decode(own)
        found = self._find_reasoning(text, after)
        if found is None or self.reasoning_marks is None:
            return None
        if found.stop == len(text):
            return range(len(own))
        closing, inner = self.reasoning_marks[1], found.inner_start
        return range(bisect_left(range(len(own)), True, key=lambda n: closing in self.decode(own[:n])[inner:]))

    def split_reasoning(self, text: str, after: str = "user") -> tuple[str, str]:
        """(reasoning, content) of a turn's text without what ends it, as OpenAI's messages have them, without marks;
        see `reasoning`."""
        found = self._find_reasoning(text, after)
        return (text[found.inner_start : found.inner_end].strip(), text[found.stop :].lstrip()) if found else ("", text)

    def find_content_start(self, text: str, after: str = "user") -> int:
        """Where in a turn's text its reasoning is over; 0 where there is none."""
        found = self._find_reasoning(text, after)
        return found.stop if found else 0

    def is_reasoning_dropped(self, behind: Sequence[Message]) -> bool:
        """Whether the template's own rule leaves out the reasoning of the policy's turn where these messages follow it:
        it concerns who renders a whole conversation, and no ids that are gone on from. Errors as of `continuation`."""
        pattern = _role_pattern([normalize_message(message, number) for number, message in enumerate(behind)])
        return self.reasoning_marks is not None and self._is_dropped_before(pattern)

    def _find_reasoning(self, text: str, after: str) -> ReasoningSpan | None:
        return (
            None
            if self.reasoning_marks is None
            else find_reasoning(text, self.reasoning_marks, self._is_reasoning_opened(after))
        )

    def _is_reasoning_opened(self, after: str) -> bool:
        """Whether the template opens the reasoning of a turn behind a message of that role."""
        if after not in self._is_opened_after:
            assert self.reasoning_marks is not None
            try:
                rest = self._render_after_turn([normalize_message({"role": after, "content": _TOOL_RESULT})])
                self._is_opened_after[after] = is_open(rest.partition(_TOOL_RESULT)[2], self.reasoning_marks)
            except ConfigError:
                self._is_opened_after[after] = False
        return self._is_opened_after[after]

    def _is_dropped_before(self, pattern: _RolePattern) -> bool:
        behind = [_make_placeholder(*kind, number) for number, kind in enumerate(pattern)]
        calling = _make_placeholder("assistant", False, True, len(pattern))["tool_calls"]

        def render(turn: Message, following: Sequence[Message]) -> str:
            if following and following[0]["role"] == "tool":
                turn = {**turn, "tool_calls": calling}
            problem: ConfigError | None = None
            for form in CALL_FORMATS:
                try:
                    given = [form(message) for message in (_DUMMY_TURNS[0], turn, *following)]
                    return self._apply_template(given, generate=bool(following))
                except ConfigError as error:
                    problem = problem or error
            assert problem is not None
            raise problem

        assert self.reasoning_marks is not None
        return is_reasoning_dropped(
            render, self.reasoning_marks, behind, _make_placeholder("tool", True, False, len(pattern))
        )

    def render_calls(self, name: str) -> list[tuple[str, dict[str, Any]]]:
        """(text, arguments): how the template writes a call of the tool with these arguments, in each of the forms that
        messages with calls have in practice and that it has a place for. A parser must read one of them.

        Raises ConfigError where the template writes no call, or does not put behind it what `continuation` does.
        """
        schema = self.tools[name].schema
        arguments = make_example_arguments(schema)
        user: Message = {"role": "user", "content": "x"}
        answer = normalize_message({"role": "tool", "name": name, "content": _TOOL_RESULT})
        function = {"name": name, "arguments": arguments}
        call = {"type": "function", "id": format_call_id(name, 0), "function": function}
        found, problem = [], ""
        for form in CALL_FORMATS:
            turn = form({"role": "assistant", "content": "", "tool_calls": [call]})
            try:
                heads = [self._apply_template([user], [schema], generate=generate) for generate in (True, False)]
                written = self._apply_template([user, turn], [schema])
                whole = self._apply_template([user, turn, answer], [schema], generate=True)
                ending = self._render_continuation([answer], [schema])
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

    def _get_call_format(self, pattern: _RolePattern, behind: bool) -> CallFormat:
        """How messages of these roles are to be given to the template so that it leaves none of them out. Raises
        ConfigError where it always does. behind: they stand behind a turn of the policy's."""
        found = self._call_formats.get((pattern, behind))
        if found is None:
            found = self._call_formats[pattern, behind] = self._find_call_format(pattern, behind)
        if isinstance(found, str):
            raise ConfigError(found)
        return found

    def _find_call_format(self, pattern: _RolePattern, behind: bool) -> CallFormat | str:
        """That, or what is wrong with all of them."""
        messages = [_make_placeholder(*kind, number) for number, kind in enumerate(pattern)]
        found: list[tuple[int, CallFormat]] = []
        problem = ""
        for form in CALL_FORMATS if any(calls for _, _, calls in pattern) else CALL_FORMATS[:1]:
            given = [form(message) for message in messages]
            try:
                text = self._render_after_turn(given) if behind else self._apply_template(given, generate=True)
            except ConfigError as error:
                problem = problem or str(error)
                continue
            end = self.control_tokens.find_first(text)
            words = [word for one in messages for word in _list_words(one)]
            missing = [one["role"] for one in messages for word in _list_words(one) if word not in text]
            if missing:
                problem = problem or (
                    f"the chat template of model.path leaves out a message of role {missing[0]}, or what it calls"
                    + (", where it stands behind the policy's turn" if behind else "")
                    + f"; give it another role, or do without it (the roles: {_join_roles(messages)})"
                )
            elif behind and (end is None or any(text.find(word) < end.start for word in words)):
                problem = problem or "the chat template of model.path ends a turn with no control token"
            else:
                found.append((len(text), form))
        # Some write an empty turn more for no words, or what Python calls nothing.
        return min(found, key=lambda item: item[0])[1] if found else problem

    def _render_after_turn(self, following: Sequence[Message], schemas: Sequence[dict[str, Any]] = ()) -> str:
        """What the template writes after the policy's words where these messages follow, and then the policy again."""
        text = self._apply_template([*_DUMMY_TURNS, *following], schemas, generate=bool(following))
        _, found, rest = text.partition(_POLICY_TURN)
        if not found:
            raise ConfigError("the chat template of model.path leaves out or changes what the policy said")
        return rest

    def _apply_template(
        self, messages: Sequence[Message], schemas: Sequence[dict[str, Any]] = (), generate: bool = False
    ) -> str:
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages),
                    tools=escape_schemas(schemas, self.control_tokens) or None,
                    tokenize=False,
                    add_generation_prompt=generate,
                )
            )
        except Exception as error:  # jinja2's errors and whatever a template raises on purpose
            reason = " ".join(str(error).split())[:500]
            raise ConfigError(
                f"the chat template of model.path cannot render the roles {_join_roles(messages)}: {reason}"
            ) from None


def _join_roles(messages: Sequence[Message]) -> str:
    return ", ".join(str(message.get("role")) for message in messages)


def _role_pattern(messages: Sequence[Message]) -> _RolePattern:
    return tuple((one["role"], bool(one["content"]), bool(one.get("tool_calls"))) for one in messages)


def _make_placeholder(role: str, words: bool, calls: bool, number: int) -> Message:
    """A message of the kind, whose words can be found again in what a template makes of it."""
    message = normalize_message({"role": role, "content": f"MESSAGE{number}WORDS" if words else ""})
    name = f"MESSAGE{number}CALL"
    call = {"id": format_call_id(name, 0), "type": "function", "function": {"name": name, "arguments": {}}}
    return {**message, "tool_calls": [call]} if calls else message


def _list_words(message: Message) -> list[str]:
    called = [call["function"]["name"] for call in message.get("tool_calls", ())]
    return [word for word in (message["content"], *called) if word]


def _check_sentencepiece(tokenizer: Any, folder: str) -> None:
    """Raise ConfigError where the class that config.json asks for is none for SentencePiece's tokenizer.model, and
    takes it all the same: Qwen's loses the spaces."""
    text = "2 plus  3\nis 5"
    found = str(tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), clean_up_tokenization_spaces=False))
    if found.strip() != text:
        raise ConfigError(
            f"model.path: {type(tokenizer).__name__} does not read {folder}/tokenizer.model as it is meant: {text!r} "
            f"comes back as {found!r}; put the model's tokenizer.json beside it"
        )
