"""Render chats with the model's own template, and tool results to the ids between two turns of the policy.

What the policy wrote is never re-tokenized. The ids that follow it are read off the template: a dummy conversation is
rendered, and the text after the token that ends the policy's turn is tokenized separately.

Templates end a turn in one of two ways, and both are detected. Most close it, as with <|im_end|>. GLM's add nothing:
the policy writes the token that opens the next turn, <|observation|> after a call and <|user|> after a statement.
Either way that token is the policy's own, the last of its turn, and an observation follows it. Turns in the harmony
format consist of several messages (`harmony.py`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from megarl.chat_format import harmony
from megarl.chat_format.chat_messages import (
    CALL_FORMATS,
    MARKS,
    CallFormat,
    ControlTokens,
    EscapedEncoder,
    ReasoningSpan,
    escape_schemas,
    find_reasoning,
    format_call,
    format_call_id,
    is_open,
    make_example_arguments,
    normalize_message,
    read_eos_ids,
)
from megarl.config import ConfigError
from megarl.data.images import ImageFormat, ImageProcessor
from megarl.environments.catalog import EnvironmentCatalog
from megarl.environments.protocol import EnvironmentInfo
from megarl.environments.tools import Tool
from megarl.models.config_json import need
from megarl.models.registry import VISION_FAMILIES, load_hf_config
from megarl.types import Ids, Image, Message, Prompt, as_token_ids
from megarl.utils.text import replace_surrogates

_TOKENIZER_METHODS = ("encode", "_encode_plus", "decode", "_decode")


def _find_backend(tokenizer: Any) -> Any:
    """Return the tokenizer's Rust library, which is twice as fast, or None if other code takes part."""
    from transformers import PreTrainedTokenizerFast

    kind = type(tokenizer)
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or tokenizer.split_special_tokens:
        return None
    if any(getattr(kind, name) is not getattr(PreTrainedTokenizerFast, name) for name in _TOKENIZER_METHODS):
        return None
    backend = tokenizer.backend_tokenizer
    return None if backend.encode_special_tokens else backend


def load_image_format(folder: str, tokenizer: Any) -> ImageFormat | None:
    """Return how the model of an HF folder reads images; None if it reads none. Raises ConfigError."""
    file = Path(folder, "config.json")
    hf = load_hf_config(file) if file.is_file() else {}
    vision = VISION_FAMILIES.get(next(iter(hf.get("architectures") or ()), ""))
    if vision is None:
        return None
    names = ("vision_start_token_id", "image_token_id", "vision_end_token_id")
    ids = [int(need(hf, name)) for name in names]
    texts = [str(token) for token in tokenizer.convert_ids_to_tokens(ids)]
    for name, token, text in zip(names, ids, texts, strict=True):
        if tokenizer.encode(text, add_special_tokens=False) != [token]:
            raise ConfigError(f"model.path: config.json has {name}={token}, which is no token of its own: {text!r}")
    processor = ImageProcessor.load(folder, int(vision.config(hf)["spatial_merge_size"]))
    start, pad, end = texts
    return ImageFormat(start, pad, end, ids[1], processor)


_POLICY_TURN = "POLICYTURN"  # placeholder for the policy's text: a word that no template adds or changes
_TOOL_RESULT = "TOOLRESULT"  # placeholder for a tool result or a user message
_REASONING = "REASONINGWORDS"  # placeholder for the policy's reasoning
_DUMMY_TURNS: list[Message] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _POLICY_TURN}]

_RolePattern = tuple[tuple[str, bool, bool], ...]
"""For each message: its role, whether it has content, and whether it has calls."""


def _kimi_config(folder: str) -> dict[str, Any]:
    """Return the argument with which transformers reads Kimi K2's tokenizer as it reads Kimi-K2.5's, without running
    the folder's code. It knows only the latter's config.json."""
    file = Path(folder, "config.json")
    if not file.is_file() or load_hf_config(file).get("model_type") != "kimi_k2":
        return {}
    from transformers.models.kimi_k25 import Kimi_K25Config

    return {"config": Kimi_K25Config()}


class ChatTemplate:
    """A tokenizer with its chat template, and the run's tools and environments.

    Args:
        tokenizer: transformers tokenizer with a chat template
        tools, environments: by name, as from `load_catalog`
        eos: further tokens that end a turn, besides the template's and the tokenizer's own
        images: how the model reads images; None if it reads none
    """

    def __init__(
        self,
        tokenizer: Any,
        tools: Mapping[str, Tool] | None = None,
        eos: Sequence[int] = (),
        environments: Mapping[str, EnvironmentInfo] | None = None,
        images: ImageFormat | None = None,
    ) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigError(
                "the tokenizer of model.path has no chat template; put the model's chat_template.jinja into its folder"
            )
        self.tokenizer = tokenizer
        self.catalog = EnvironmentCatalog(tools or {}, environments or {})
        self.tools = self.catalog.all_tools
        """All tools known before a conversation starts, by name."""
        self.eos = tuple(eos)
        self.control_tokens = ControlTokens(tokenizer)
        self.is_harmony = harmony.is_harmony(self.control_tokens.texts)
        self.images = images
        self._backend = _find_backend(tokenizer)
        self._call_formats: dict[tuple[_RolePattern, bool], CallFormat | str] = {}
        self._is_opened_after: dict[str, bool] = {}
        self._drops_reasoning_before: dict[_RolePattern, bool] = {}
        self._encoder = EscapedEncoder(self.control_tokens, self.encode)

    @classmethod
    def load(
        cls,
        folder: str,
        tools: Mapping[str, Tool] | None = None,
        environments: Mapping[str, EnvironmentInfo] | None = None,
    ) -> ChatTemplate:
        """Load the tokenizer of an HF folder and the end tokens of its generation_config.json.

        Raises ConfigError if the folder has no tokenizer or no chat template.
        """
        from transformers import AutoTokenizer

        options = _kimi_config(folder)
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, **options)
        except Exception as error:  # parsers raise anything on a broken file
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise ConfigError(f"model.path: no tokenizer in {folder}: {reason[:500]}") from None
        if not Path(folder, "tokenizer.json").exists() and Path(folder, "tokenizer.model").exists():
            _check_sentencepiece(tokenizer, folder)
        eos = read_eos_ids(Path(folder, "generation_config.json"))
        return cls(tokenizer, tools, eos, environments, load_image_format(folder, tokenizer))

    def check_vocabulary(self, size: int) -> None:
        """Raise ConfigError if the tokenizer has ids outside a vocabulary of `size`."""
        word, highest = max(self.tokenizer.get_vocab().items(), key=lambda item: int(item[1]))
        if highest >= size:
            raise ConfigError(
                f"model.path: the tokenizer gives {word!r} the id {highest}, but config.json has vocab_size={size}; "
                "the tokenizer is another model's"
            )
        if unknown := [token for token in self.eos if token >= size]:
            raise ConfigError(
                f"generation_config.json of model.path: eos_token_id {unknown[0]} is not in the vocabulary of {size}"
            )

    def check_tools(self) -> None:
        """Raise ConfigError if the template cannot hold a conversation with tool calls, see `render_calls`."""
        if self.tools:
            user: Message = {"role": "user", "content": "x"}
            self._apply_template([user], [tool.schema for tool in self.tools.values()], generate=True)
        for name in self.tools:
            self.render_calls(name)

    def encode_prompt(self, prompt: Prompt, schemas: Sequence[dict[str, Any]] | None = None) -> list[int]:
        """Encode the prompt's messages, its tools or `schemas`, and the head of the policy's first turn."""
        tool_schemas = self.catalog.select_schemas(prompt) if schemas is None else schemas
        text = self._apply_template(prompt.messages, tool_schemas, generate=True)
        if not prompt.images:
            return self.encode(text)
        if self.images is None:
            raise ConfigError(
                f"prompt {prompt.id} has images, but the model of model.path has no vision tower; drop the row, or use "
                "another model"
            )
        images, subject = self.images, f"prompt {prompt.id}"
        ids = self.encode(images.insert(text, prompt.images, subject))
        images.place(ids, prompt.images, subject)  # raises
        return ids

    @property
    def image_format(self) -> ImageFormat:
        """How the model reads images. Raises ConfigError if it reads none."""
        if self.images is None:
            raise ConfigError("there are images, but the model of model.path has no vision tower; use another model")
        return self.images

    def render_prompt(self, prompt: Prompt, schemas: Sequence[dict[str, Any]] | None = None) -> Prompt:
        """Return the prompt with its token ids, and with its images where their tokens are."""
        ids = self.encode_prompt(prompt, schemas)
        return replace(prompt, token_ids=as_token_ids(ids), images=self.place_images(ids, prompt.images))

    def place_images(self, ids: Ids | Sequence[int], images: Sequence[Image]) -> tuple[Image, ...]:
        """Return the images with their grids, at the image tokens of `ids`. Raises ConfigError if they do not fit."""
        return self.image_format.place(ids, images, "the prompt") if images else ()

    def decode(self, ids: Ids | Sequence[int]) -> str:
        """Decode ids to text, including control tokens."""
        tokens = as_token_ids(ids).tolist()
        if self._backend is not None:
            return str(self._backend.decode(tokens, skip_special_tokens=False))
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def encode(self, text: str) -> list[int]:
        """Encode a text; control tokens it spells are encoded as such, and none are added."""
        text, backend = replace_surrogates(text), self._backend
        if backend is not None and backend.truncation is None and backend.padding is None:  # other code may set these
            return list(backend.encode(text, add_special_tokens=False).ids)
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def replace_text(self, ids: Ids | Sequence[int], start: int, stop: int, text: str) -> list[int]:
        """Return ids with characters `start` to `stop` of their decoded text replaced by `text`.

        Tokens of the other characters stay, except those that hold replaced characters, too.
        """
        tokens = as_token_ids(ids).tolist()
        whole = self.decode(tokens)

        def num_chars_before(index: int) -> int:
            """Return how many characters the first tokens decode to; -1 if they end within a character."""
            head = self.decode(tokens[:index])
            return len(head) if whole.startswith(head) else -1

        first = bisect_right(range(len(tokens)), start, key=lambda index: len(self.decode(tokens[:index]))) - 1
        while not 0 <= num_chars_before(first) <= start:
            first -= 1
        last = bisect_left(range(len(tokens)), stop, key=lambda index: len(self.decode(tokens[:index])))
        while last < len(tokens) and num_chars_before(last) < stop:
            last += 1
        before, after = num_chars_before(first), num_chars_before(last)
        changed = whole[before:start] + text + whole[stop:after]
        return [*tokens[:first], *self.encode(changed), *tokens[last:]]

    @cached_property
    def end_of_turn(self) -> int:
        """The token that the template writes after the policy's last turn; else the tokenizer's eos token."""
        end_token = self.control_tokens.find_first(self._render_after_turn([]))
        if end_token is not None:
            return end_token.id
        if self.tokenizer.eos_token_id is None:
            raise ConfigError("the chat template ends a turn with no control token, and the tokenizer has no eos_token")
        return int(self.tokenizer.eos_token_id)

    @cached_property
    def end_of_call(self) -> int | None:
        """The token between the policy's turn and a tool result, which ends a turn with calls; None if unsupported."""
        if self.is_harmony:  # some templates write <|end|>
            end_token = self.control_tokens.find_first(harmony.END_OF_CALL)
            return None if end_token is None else end_token.id
        return self._find_end_token("tool")

    @cached_property
    def end_token_ids(self) -> frozenset[int]:
        """All tokens that end a turn of the policy, whatever follows."""
        candidates = {
            self.end_of_turn,
            self.end_of_call,
            self.tokenizer.eos_token_id,
            *self.eos,
            None if self.is_harmony else self._find_end_token("user"),  # <|end|> there, which ends reasoning, too
        }
        return frozenset(int(token) for token in candidates if token is not None)

    def _find_end_token(self, role: str) -> int | None:
        """Find the token between the policy's turn and a message of `role`; None if unsupported."""
        try:
            text = self._render_after_turn([normalize_message({"role": role, "content": _TOOL_RESULT})])
        except ConfigError:
            return None
        before, separator, _ = text.partition(_TOOL_RESULT)
        end_token = self.control_tokens.find_first(before) if separator else None
        return None if end_token is None else end_token.id

    def encode_continuation(
        self,
        messages: Sequence[Message],
        schemas: Sequence[dict[str, Any]] = (),
        last: int | None = None,
        images: Sequence[Image] = (),
    ) -> list[int]:
        """Encode the messages that follow a policy turn, and the head of its next turn.

        Control tokens in the messages, including names, ids and arguments, are escaped: neither a tool nor the name of
        a call may write a turn.

        Args:
            messages: of any role in OpenAI's form: tool results, user, system, even assistant messages added by a
                client
            last: the token that ended the policy's turn. If it differs from the template's end token before such
                messages, as after a truncated turn, the template's token comes first. By default they are equal.
            images: those of the messages, whose text has `IMAGE_PLACEHOLDER` for each

        Raises:
            ConfigError: if the template does not support a message's role, which the error names, or a message is not
                text
        """
        if not images:
            return self._encoder.encode(
                messages, lambda ready: self._render_continuation(ready, schemas, last), lambda: (last, repr(schemas))
            )

        def render(ready: Sequence[Message]) -> str:
            text = self._render_continuation(ready, schemas, last)
            return self.image_format.insert(text, images, "the tool results")

        return self._encoder.encode(messages, render)

    def _render_continuation(
        self, messages: Sequence[Message], schemas: Sequence[dict[str, Any]], last: int | None = None
    ) -> str:
        """Render normalized messages for `encode_continuation` as text."""
        form = self._get_call_format(_role_pattern(messages), behind=True)
        rest = self._render_after_turn([form(message) for message in messages], schemas)
        end = self.control_tokens.find_first(rest)
        if end is None:
            raise ConfigError("the chat template of model.path ends a turn with no control token")
        if self.is_harmony:  # the policy's own token may differ from the template's
            has_ended = last is None or last in self.end_token_ids
        else:
            has_ended = end.id in self.end_token_ids if last is None else end.id == last
        return rest[end.stop :] if has_ended else rest

    def encode_conversation(self, messages: Sequence[Message], schemas: Sequence[dict[str, Any]] = ()) -> list[int]:
        """Encode a whole conversation, escaped as in `encode_continuation`, and the head of the policy's turn."""

        def make(ready: Sequence[Message]) -> str:
            form = self._get_call_format(_role_pattern(ready), behind=False)
            return self._apply_template([form(message) for message in ready], schemas, generate=True)

        return self._encoder.encode(messages, make)

    # --- reasoning

    @cached_property
    def reasoning_marks(self) -> tuple[str, str] | None:
        """Opening and closing marks of reasoning, as added tokens or in the template; None if the model has none."""
        if self.is_harmony:
            return harmony.REASONING_MARKS
        added_tokens = {str(token) for token in self.tokenizer.added_tokens_decoder.values()}
        template = str(self.tokenizer.chat_template)
        return next((marks for marks in MARKS if {*marks} <= added_tokens or marks[1] in template), None)

    def find_reasoning_range(self, ids: Ids | Sequence[int], after: str = "user") -> range | None:
        """Return which of a turn's ids are reasoning, including its marks; None if there is none.

        `after` is the role of the message that the turn answers: after some roles the template itself opens reasoning.
        """
        turn_ids = as_token_ids(ids)
        text = self.decode(turn_ids)
        span = self._find_reasoning(text, after)
        if span is None or self.reasoning_marks is None:
            return None
        if span.stop == len(text):
            return range(len(turn_ids))
        closing, inner_start = self.reasoning_marks[1], span.inner_start
        return range(
            bisect_left(range(len(turn_ids)), True, key=lambda n: closing in self.decode(turn_ids[:n])[inner_start:])
        )

    def split_reasoning(self, text: str, after: str = "user") -> tuple[str, str]:
        """Split a turn's text, without its end token, into (reasoning, content) as in OpenAI's messages."""
        span = self._find_reasoning(text, after)
        reasoning, content = (
            (text[span.inner_start : span.inner_end].strip(), text[span.stop :].lstrip()) if span else ("", text)
        )
        return reasoning, harmony.strip_final_header(content) if self.is_harmony else content

    def find_content_start(self, text: str, after: str = "user") -> int:
        """Return the offset in a turn's text at which its reasoning ends; 0 if there is none."""
        span = self._find_reasoning(text, after)
        return span.stop if span else 0

    def is_reasoning_dropped(self, behind: Sequence[Message]) -> bool:
        """Return whether the template drops the reasoning of a policy turn if these normalized messages follow.

        This concerns only the rendering of a whole conversation, not the continuation of recorded ids. Raises
        ConfigError if the template cannot render the messages.
        """
        if self.reasoning_marks is None:
            return False
        if self.is_harmony:
            return harmony.is_reasoning_dropped(behind)
        pattern = _role_pattern(behind)
        if pattern not in self._drops_reasoning_before:
            self._drops_reasoning_before[pattern] = self._is_dropped_before(pattern, self.reasoning_marks)
        return self._drops_reasoning_before[pattern]

    def _find_reasoning(self, text: str, after: str) -> ReasoningSpan | None:
        if self.reasoning_marks is None or (
            self.is_harmony and not text.lstrip().startswith(self.reasoning_marks[0])
        ):  # in harmony <|end|> alone ends any message
            return None
        return find_reasoning(text, self.reasoning_marks, self._is_reasoning_opened(after))

    def _is_reasoning_opened(self, after: str) -> bool:
        """Return whether the template opens the reasoning of a turn that answers `after`."""
        if after not in self._is_opened_after:
            assert self.reasoning_marks is not None
            try:
                text = self._render_after_turn([normalize_message({"role": after, "content": _TOOL_RESULT})])
                self._is_opened_after[after] = is_open(text.partition(_TOOL_RESULT)[2], self.reasoning_marks)
            except ConfigError:
                self._is_opened_after[after] = False
        return self._is_opened_after[after]

    def _is_dropped_before(self, pattern: _RolePattern, marks: tuple[str, str]) -> bool:
        """Test it with OpenAI's reasoning field if the template knows it, else with reasoning inside the content."""
        behind = [_make_placeholder(*kind, number) for number, kind in enumerate(pattern)]
        result = _make_placeholder("tool", True, False, len(pattern))
        calls = _make_placeholder("assistant", False, True, len(pattern))["tool_calls"]
        by_field = {"role": "assistant", "content": "x", "reasoning_content": _REASONING}
        in_text = {"role": "assistant", "content": f"{marks[0]}\n{_REASONING}\n{marks[1]}\n\nx"}

        def is_shown(turn: Message, following: Sequence[Message]) -> bool:
            if following and following[0]["role"] == "tool":
                turn = {**turn, "tool_calls": calls}
            errors = []
            for form in CALL_FORMATS:
                formatted = [form(message) for message in (_DUMMY_TURNS[0], turn, *following)]
                try:
                    return _REASONING in self._apply_template(formatted, generate=bool(following))
                except ConfigError as error:
                    errors.append(error)
            raise errors[0]

        def reads_field(following: Sequence[Message]) -> bool:
            try:
                return is_shown(by_field, following)
            except ConfigError:
                return False

        return not is_shown(by_field if reads_field([]) or reads_field([result]) else in_text, behind)

    def render_calls(self, name: str) -> list[tuple[str, dict[str, Any]]]:
        """Return how the template writes a call of the tool, as (text, arguments) for each supported call format.

        A parser must read one of them. Raises ConfigError if the template writes no call, or does not continue after it
        as `encode_continuation` does.
        """
        schema = self.tools[name].schema
        arguments = make_example_arguments(schema)
        user: Message = {"role": "user", "content": "x"}
        result = normalize_message({"role": "tool", "name": name, "content": _TOOL_RESULT})
        call = format_call(name, arguments, format_call_id(name, 0))
        rendered, problem = [], ""
        for form in CALL_FORMATS:
            turn = form({"role": "assistant", "content": "", "tool_calls": [call]})
            try:
                heads = [self._apply_template([user], [schema], generate=generate) for generate in (True, False)]
                text = self._apply_template([user, turn], [schema])
                full_text = self._apply_template([user, turn, result], [schema], generate=True)
                continuation = self._render_continuation([result], [schema])
            except ConfigError as error:
                problem = problem or str(error)
                continue
            head = next((head for head in heads if text.startswith(head)), "")
            if name not in text[len(head) :]:
                problem = problem or "it omits calls"
            elif not full_text.endswith(continuation):
                problem = "what it inserts between a call and the next turn depends on the call"
            elif (text[len(head) :], arguments) not in rendered:
                rendered.append((text[len(head) :], arguments))
        if not rendered:
            raise ConfigError(
                f"the chat template of model.path does not support tool calls ({problem}); use a model with a "
                "template for tools, put one into its folder, or leave rollout.tools empty"
            )
        return rendered

    def _get_call_format(self, pattern: _RolePattern, behind: bool) -> CallFormat:
        """Return the call format in which the template drops none of these messages; raise ConfigError without one.

        `behind` says whether they follow a policy turn.
        """
        call_format = self._call_formats.get((pattern, behind))
        if call_format is None:
            call_format = self._call_formats[pattern, behind] = self._find_call_format(pattern, behind)
        if isinstance(call_format, str):
            raise ConfigError(call_format)
        return call_format

    def _find_call_format(self, pattern: _RolePattern, behind: bool) -> CallFormat | str:
        """Return a working call format, or what is wrong with all of them."""
        messages = [_make_placeholder(*kind, number) for number, kind in enumerate(pattern)]
        working: list[tuple[int, CallFormat]] = []
        problem = ""
        for form in CALL_FORMATS if any(calls for _, _, calls in pattern) else CALL_FORMATS[:1]:
            formatted = [form(message) for message in messages]
            try:
                text = self._render_after_turn(formatted) if behind else self._apply_template(formatted, generate=True)
            except ConfigError as error:
                problem = problem or str(error)
                continue
            end = self.control_tokens.find_first(text)
            words = [(word, placeholder["role"]) for placeholder in messages for word in _list_words(placeholder)]
            missing = [role for word, role in words if word not in text]
            if missing:
                problem = problem or (
                    f"the chat template of model.path omits a message of role {missing[0]}, or what it calls"
                    + (", where it follows the policy's turn" if behind else "")
                    + f"; give it another role, or remove it (the roles: {_join_roles(messages)})"
                )
            elif behind and (end is None or any(text.find(word) < end.start for word, _ in words)):
                problem = problem or "the chat template of model.path ends a turn with no control token"
            else:
                working.append((len(text), form))
        # Some templates write an extra empty turn, or "None", for missing content: take the shortest.
        return min(working, key=lambda item: item[0])[1] if working else problem

    def _render_after_turn(self, following: Sequence[Message], schemas: Sequence[dict[str, Any]] = ()) -> str:
        """Render what the template writes after the policy's text if these messages and another turn follow."""
        user, turn = _DUMMY_TURNS
        if self.is_harmony and following and following[0]["role"] == "tool":  # its head repeats the call's name
            call = format_call(following[0]["name"], {"x": _POLICY_TURN}, following[0]["tool_call_id"])
            turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        text = self._apply_template([user, turn, *following], schemas, generate=bool(following))
        _, placeholder, rest = text.partition(_POLICY_TURN)
        if not placeholder:
            raise ConfigError("the chat template of model.path omits or changes what the policy wrote")
        return rest

    def _apply_template(
        self, messages: Sequence[Message], schemas: Sequence[dict[str, Any]] = (), generate: bool = False
    ) -> str:
        if self.is_harmony:
            messages = [harmony.with_thinking(message) for message in messages]
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages),
                    tools=escape_schemas(schemas, self.control_tokens) or None,
                    tokenize=False,
                    add_generation_prompt=generate,
                )
            )
        except Exception as error:  # jinja2 errors, and those a template raises on purpose
            reason = " ".join(str(error).split())[:500]
            raise ConfigError(
                f"the chat template of model.path cannot render the roles {_join_roles(messages)}: {reason}"
            ) from None


def _join_roles(messages: Sequence[Message]) -> str:
    return ", ".join(str(message.get("role")) for message in messages)


def _role_pattern(messages: Sequence[Message]) -> _RolePattern:
    return tuple((message["role"], bool(message["content"]), bool(message.get("tool_calls"))) for message in messages)


def _make_placeholder(role: str, words: bool, calls: bool, number: int) -> Message:
    """Make a message of this kind whose words can be found in the rendered text."""
    message = normalize_message({"role": role, "content": f"MESSAGE{number}WORDS" if words else ""})
    name = f"MESSAGE{number}CALL"
    return {**message, "tool_calls": [format_call(name, {}, format_call_id(name, 0))]} if calls else message


def _list_words(message: Message) -> list[str]:
    tool_names = [call["function"]["name"] for call in message.get("tool_calls", ())]
    return [word for word in (message["content"], *tool_names) if word]


def _check_sentencepiece(tokenizer: Any, folder: str) -> None:
    """Raise ConfigError if the tokenizer class of config.json misreads a SentencePiece tokenizer.model.

    Classes made for other formats accept the file anyway; Qwen's loses the spaces.
    """
    text = "2 plus  3\nis 5"
    decoded = str(
        tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), clean_up_tokenization_spaces=False)
    )
    if decoded.strip() != text:
        raise ConfigError(
            f"model.path: {type(tokenizer).__name__} does not read {folder}/tokenizer.model correctly: {text!r} "
            f"comes back as {decoded!r}; put the model's tokenizer.json beside it"
        )
