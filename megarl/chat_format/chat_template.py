"""Render chats to token ids by the model's own template, and tool results to the ids between two turns of the policy.

What the policy wrote is never tokenised again. The ids that follow it are the difference that the template makes: a
dummy conversation is rendered, and the text after the token that ended the policy's turn is tokenised by itself.

Templates end a turn in one of two ways, and both are read off the template. Most close it, as with <|im_end|>. GLM's
add nothing: the policy writes the token that opens the next turn, <|observation|> after a call and <|user|> after a
statement. Either way that token is the policy's own, the last of its turn, and an observation follows it.

`Spelling` encodes and decodes text, with the tokenizer's Rust library where that gives the same ids, at half the cost.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from megarl.chat_format.chat_messages import (
    FORMS,
    Controls,
    Escaping,
    Form,
    call_id,
    example_arguments,
    generation_eos,
    plain,
    safe_schemas,
)
from megarl.chat_format.reasoning import Reasoned, find, forgets, is_open, marks_of
from megarl.config import ConfigError
from megarl.environments.catalog import Known
from megarl.environments.protocol import Described
from megarl.environments.tools import Tool
from megarl.types import Ids, Message, Prompt, ids_of
from megarl.utils.text import encodable

_OWN = ("encode", "_encode_plus", "decode", "_decode")


class Spelling:
    """tokenizer: of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._library = _library_of(tokenizer)

    def ids(self, text: str) -> list[int]:
        """Of a text, with whatever control tokens it spells and none besides."""
        text, library = encodable(text), self._library
        if library is not None and library.truncation is None and library.padding is None:  # others may set these
            return list(library.encode(text, add_special_tokens=False).ids)
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def text(self, ids: Sequence[int]) -> str:
        """What ids say, control tokens included."""
        if self._library is not None:
            return str(self._library.decode(ids, skip_special_tokens=False))
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _library_of(tokenizer: Any) -> Any:
    """The object of `tokenizers` that does all of the tokenizer's work; None where other code has a part in it."""
    from transformers import PreTrainedTokenizerFast

    kind = type(tokenizer)
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or tokenizer.split_special_tokens:
        return None
    if any(getattr(kind, name) is not getattr(PreTrainedTokenizerFast, name) for name in _OWN):
        return None
    library = tokenizer.backend_tokenizer
    return None if library.encode_special_tokens else library


_POLICY_TURN = "POLICYTURN"  # stands for what the policy wrote; any word that no template adds or changes
_RESULT = "TOOLRESULT"  # and for what a tool, or the user, answered
_HEAD: list[Message] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _POLICY_TURN}]

_Pattern = tuple[tuple[str, bool, bool], ...]
"""Of messages: role, whether there are words, whether there are calls."""


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
            raise ConfigError(
                "the tokenizer of model.path has no chat template; put the model's chat_template.jinja into its folder"
            )
        self.tokenizer = tokenizer
        self.known = Known(tools or {}, environments or {})
        self.tools = self.known.every
        """All tools that are known before a conversation begins, by name."""
        self.eos = tuple(eos)
        self.controls = Controls(tokenizer)
        self._spelling = Spelling(tokenizer)
        self._forms: dict[tuple[_Pattern, bool], Form | str] = {}
        self._opened: dict[str, bool] = {}
        self._escaping = Escaping(self.controls, self.ids)

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
        if not Path(folder, "tokenizer.json").exists() and Path(folder, "tokenizer.model").exists():
            _check_pieces(tokenizer, folder)
        return cls(tokenizer, tools, generation_eos(Path(folder, "generation_config.json")), environments)

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
        return self.ids(self._text(prompt.messages, own, generate=True))

    def text(self, ids: Ids | Sequence[int]) -> str:
        """What ids say, control tokens included."""
        return self._spelling.text(ids_of(ids).tolist())

    def ids(self, text: str) -> list[int]:
        """Of a text, with whatever control tokens it spells and none besides."""
        return self._spelling.ids(text)

    @cached_property
    def end_of_turn(self) -> int:
        """The token that the template puts after the policy's last turn; the tokenizer's own where it puts none."""
        ended = self.controls.first(self._after([]))
        if ended is not None:
            return ended.id
        if self.tokenizer.eos_token_id is None:
            raise ConfigError("the chat template ends a turn with no control token, and the tokenizer has no eos_token")
        return int(self.tokenizer.eos_token_id)

    @cached_property
    def end_of_call(self) -> int | None:
        """The token between the policy's turn and a tool's result, and with which the policy must end a turn that calls
        tools; None where the template has no place for results."""
        return self._end_before("tool")

    @cached_property
    def ends(self) -> frozenset[int]:
        """All tokens that end a turn of the policy, before whatever follows it."""
        found = {self.end_of_turn, self.end_of_call, self.tokenizer.eos_token_id, *self.eos, self._end_before("user")}
        return frozenset(int(token) for token in found if token is not None)

    def _end_before(self, role: str) -> int | None:
        """The token between the policy's turn and a message of that role; None where the template has no such place."""
        try:
            rest = self._after([plain({"role": role, "content": _RESULT})])
        except ConfigError:
            return None
        before, found, _ = rest.partition(_RESULT)
        ended = self.controls.first(before) if found else None
        return None if ended is None else ended.id

    def continuation(
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
        return self._escaping.ids(
            messages, lambda ready: self._behind(ready, schemas, last), lambda: (last, repr(schemas))
        )

    def _behind(self, messages: Sequence[Message], schemas: Sequence[dict[str, Any]], last: int | None = None) -> str:
        """`continuation` of messages that are plain, as text."""
        form = self._form(_pattern(messages), behind=True)
        rest = self._after([form(message) for message in messages], schemas)
        end = self.controls.first(rest)
        if end is None:
            raise ConfigError("the chat template of model.path ends a turn with no control token")
        over = end.id in self.ends if last is None else end.id == last
        return rest[end.stop :] if over else rest

    def opening(self, messages: Sequence[Message], schemas: Sequence[dict[str, Any]] = ()) -> list[int]:
        """Ids of a whole conversation that others have written, tokens escaped as in `continuation`, and the head of
        the policy's turn; errors as there."""

        def make(ready: Sequence[Message]) -> str:
            form = self._form(_pattern(ready), behind=False)
            return self._text([form(message) for message in ready], schemas, generate=True)

        return self._escaping.ids(messages, make)

    # --- reasoning

    @cached_property
    def marks(self) -> tuple[str, str] | None:
        """What opens the model's reasoning and what closes it; None for one that does not reason."""
        return marks_of(self.tokenizer)

    def reasoning(self, ids: Ids | Sequence[int], after: str = "user") -> range | None:
        """Which of a turn's ids are reasoning, with its marks; what the policy says stands behind them. None where
        there is none. after: role of the message that the turn answers: behind some the template itself opens it."""
        own = ids_of(ids)
        text = self.text(own)
        found = self._reasoned(text, after)
        if found is None or self.marks is None:
            return None
        if found.stop == len(text):
            return range(len(own))
        closing, inner = self.marks[1], found.inner
        return range(bisect_left(range(len(own)), True, key=lambda n: closing in self.text(own[:n])[inner:]))

    def reasoned(self, text: str, after: str = "user") -> tuple[str, str]:
        """(reasoning, content) of a turn's text without what ends it, as OpenAI's messages have them, without marks;
        see `reasoning`."""
        found = self._reasoned(text, after)
        return (text[found.inner : found.end].strip(), text[found.stop :].lstrip()) if found else ("", text)

    def content_begins(self, text: str, after: str = "user") -> int:
        """Where in a turn's text its reasoning is over; 0 where there is none."""
        found = self._reasoned(text, after)
        return found.stop if found else 0

    def drops_reasoning(self, behind: Sequence[Message]) -> bool:
        """Whether the template's own rule leaves out the reasoning of the policy's turn where these messages follow it:
        it concerns who renders a whole conversation, and no ids that are gone on from. Errors as of `continuation`."""
        pattern = _pattern([plain(message, number) for number, message in enumerate(behind)])
        return self.marks is not None and self._drops(pattern)

    def _reasoned(self, text: str, after: str) -> Reasoned | None:
        return None if self.marks is None else find(text, self.marks, self._opens(after))

    def _opens(self, after: str) -> bool:
        """Whether the template opens the reasoning of a turn behind a message of that role."""
        if after not in self._opened:
            assert self.marks is not None
            try:
                rest = self._after([plain({"role": after, "content": _RESULT})])
                self._opened[after] = is_open(rest.partition(_RESULT)[2], self.marks)
            except ConfigError:
                self._opened[after] = False
        return self._opened[after]

    def _drops(self, pattern: _Pattern) -> bool:
        behind = [_stand_in(*kind, number) for number, kind in enumerate(pattern)]
        calling = _stand_in("assistant", False, True, len(pattern))["tool_calls"]

        def render(turn: Message, following: Sequence[Message]) -> str:
            if following and following[0]["role"] == "tool":
                turn = {**turn, "tool_calls": calling}
            problem: ConfigError | None = None
            for form in FORMS:
                try:
                    given = [form(message) for message in (_HEAD[0], turn, *following)]
                    return self._text(given, generate=bool(following))
                except ConfigError as error:
                    problem = problem or error
            assert problem is not None
            raise problem

        assert self.marks is not None
        return forgets(render, self.marks, behind, _stand_in("tool", True, False, len(pattern)))

    def calls(self, name: str) -> list[tuple[str, dict[str, Any]]]:
        """(text, arguments): how the template writes a call of the tool with these arguments, in each of the forms that
        messages with calls have in practice and that it has a place for. A parser must read one of them.

        Raises ConfigError where the template writes no call, or does not put behind it what `continuation` does.
        """
        schema = self.tools[name].schema
        arguments = example_arguments(schema)
        user: Message = {"role": "user", "content": "x"}
        answer = plain({"role": "tool", "name": name, "content": _RESULT})
        function = {"name": name, "arguments": arguments}
        call = {"type": "function", "id": call_id(name, 0), "function": function}
        found, problem = [], ""
        for form in FORMS:
            turn = form({"role": "assistant", "content": "", "tool_calls": [call]})
            try:
                heads = [self._text([user], [schema], generate=generate) for generate in (True, False)]
                written = self._text([user, turn], [schema])
                whole = self._text([user, turn, answer], [schema], generate=True)
                ending = self._behind([answer], [schema])
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

    def _form(self, pattern: _Pattern, behind: bool) -> Form:
        """How messages of these roles are to be given to the template so that it leaves none of them out. Raises
        ConfigError where it always does. behind: they stand behind a turn of the policy's."""
        found = self._forms.get((pattern, behind))
        if found is None:
            found = self._forms[pattern, behind] = self._find_form(pattern, behind)
        if isinstance(found, str):
            raise ConfigError(found)
        return found

    def _find_form(self, pattern: _Pattern, behind: bool) -> Form | str:
        """That, or what is wrong with all of them."""
        messages = [_stand_in(*kind, number) for number, kind in enumerate(pattern)]
        found: list[tuple[int, Form]] = []
        problem = ""
        for form in FORMS if any(calls for _, _, calls in pattern) else FORMS[:1]:
            given = [form(message) for message in messages]
            try:
                text = self._after(given) if behind else self._text(given, generate=True)
            except ConfigError as error:
                problem = problem or str(error)
                continue
            end = self.controls.first(text)
            words = [word for one in messages for word in _words(one)]
            missing = [one["role"] for one in messages for word in _words(one) if word not in text]
            if missing:
                problem = problem or (
                    f"the chat template of model.path leaves out a message of role {missing[0]}, or what it calls"
                    + (", where it stands behind the policy's turn" if behind else "")
                    + f"; give it another role, or do without it (the roles: {_roles(messages)})"
                )
            elif behind and (end is None or any(text.find(word) < end.start for word in words)):
                problem = problem or "the chat template of model.path ends a turn with no control token"
            else:
                found.append((len(text), form))
        # Some write an empty turn more for no words, or what Python calls nothing.
        return min(found, key=lambda item: item[0])[1] if found else problem

    def _after(self, following: Sequence[Message], schemas: Sequence[dict[str, Any]] = ()) -> str:
        """What the template writes after the policy's words where these messages follow, and then the policy again."""
        text = self._text([*_HEAD, *following], schemas, generate=bool(following))
        _, found, rest = text.partition(_POLICY_TURN)
        if not found:
            raise ConfigError("the chat template of model.path leaves out or changes what the policy said")
        return rest

    def _text(self, messages: Sequence[Message], schemas: Sequence[dict[str, Any]] = (), generate: bool = False) -> str:
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages),
                    tools=safe_schemas(schemas, self.controls) or None,
                    tokenize=False,
                    add_generation_prompt=generate,
                )
            )
        except Exception as error:  # jinja2's errors and whatever a template raises on purpose
            reason = " ".join(str(error).split())[:500]
            raise ConfigError(
                f"the chat template of model.path cannot render the roles {_roles(messages)}: {reason}"
            ) from None


def _roles(messages: Sequence[Message]) -> str:
    return ", ".join(str(message.get("role")) for message in messages)


def _pattern(messages: Sequence[Message]) -> _Pattern:
    return tuple((one["role"], bool(one["content"]), bool(one.get("tool_calls"))) for one in messages)


def _stand_in(role: str, words: bool, calls: bool, number: int) -> Message:
    """A message of the kind, whose words can be found again in what a template makes of it."""
    message = plain({"role": role, "content": f"MESSAGE{number}WORDS" if words else ""})
    name = f"MESSAGE{number}CALL"
    call = {"id": call_id(name, 0), "type": "function", "function": {"name": name, "arguments": {}}}
    return {**message, "tool_calls": [call]} if calls else message


def _words(message: Message) -> list[str]:
    called = [call["function"]["name"] for call in message.get("tool_calls", ())]
    return [word for word in (message["content"], *called) if word]


def _check_pieces(tokenizer: Any, folder: str) -> None:
    """Raise ConfigError where the class that config.json asks for is none for SentencePiece's tokenizer.model, and
    takes it all the same: Qwen's loses the spaces."""
    text = "2 plus  3\nis 5"
    found = str(tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), clean_up_tokenization_spaces=False))
    if found.strip() != text:
        raise ConfigError(
            f"model.path: {type(tokenizer).__name__} does not read {folder}/tokenizer.model as it is meant: {text!r} "
            f"comes back as {found!r}; put the model's tokenizer.json beside it"
        )
