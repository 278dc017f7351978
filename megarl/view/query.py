"""Parse conditions on rollouts, such as `reward<0.5 and turns>2`, by hand, so that nothing in them is executed.

    condition  = both {"or" both}
    both       = one {"and" one}
    one        = "not" one | "(" condition ")" | column sign value
    sign       = < | <= | > | >= | = | == | != | ~          (~: the text has this in it)
    value      = a number, a word, or text in quotes

`static/query.js` parses the same language for the page's table.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping

from megarl.config.strict import ConfigError

Value = float | str | None
Condition = Callable[[Mapping[str, Value]], bool]

COLUMNS: dict[str, str] = {
    "step": "in which it was sampled",
    "number": "which of its step, from 0",
    "group": "which prompt of its step",
    "prompt": "id of the prompt",
    "source": "data source of the prompt",
    "status": "stop, length, max_turns or aborted",
    "reward": "none where it has none",
    "advantage": "mean over the policy's tokens",
    "logprob": "mean over the policy's tokens",
    "length": "tokens",
    "actions": "tokens that the policy wrote",
    "turns": "turns of the policy",
    "tool_calls": "",
    "tool_errors": "calls that failed",
    "staleness": "versions by which its oldest token is behind the newest of its step",
}
"""Columns of the rollout index, with their descriptions."""
TEXT_COLUMNS = ("prompt", "source", "status")
MAX_CHARS, MAX_DEPTH = 1000, 40

_TOKEN = re.compile(r"""\s*(?:(<=|>=|==|!=|[<>=~()])|"([^"]*)"|'([^']*)'|([^\s<>=!~()"']+))""")
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
}


def check_column(name: str, option: str) -> str:
    """Return `name` if it is a column. Raises ConfigError, which lists the columns, otherwise."""
    if name not in COLUMNS:
        raise ConfigError(f"{option}: unknown column {name[:40]!r}; the columns are {', '.join(COLUMNS)}")
    return name


def parse_condition(text: str, option: str = "--where") -> Condition:
    """Parse a condition into a predicate on rows with `COLUMNS`.

    A value of None satisfies only `!=`. Raises ConfigError for invalid conditions.
    """
    if len(text) > MAX_CHARS:
        raise ConfigError(f"{option}: a condition has at most {MAX_CHARS} characters, not {len(text)}")
    return _Parser(_tokenize(text, option), option).parse()


def _tokenize(text: str, option: str) -> list[tuple[str, str]]:
    tokens, position = [], 0
    end = len(text.rstrip())
    while position < end:
        match = _TOKEN.match(text, position)
        if match is None:
            raise ConfigError(
                f"{option}: cannot read {text[position : position + 30].strip()!r}; write such as 'reward<0.5'"
            )
        sign, double, single, word = match.groups()
        quoted = double if double is not None else single
        tokens.append(("sign", sign) if sign else ("text", quoted) if quoted is not None else ("word", word))
        position = match.end()
    return tokens


class _Parser:
    def __init__(self, tokens: list[tuple[str, str]], option: str) -> None:
        self._tokens, self._option, self._position = tokens, option, 0

    def parse(self) -> Condition:
        condition = self._parse_or(0)
        if self._position < len(self._tokens):
            raise self._syntax_error("and, or, or the end")
        return condition

    def _parse_or(self, depth: int) -> Condition:
        parts = [self._parse_and(depth)]
        while self._accept("or"):
            parts.append(self._parse_and(depth))
        return parts[0] if len(parts) == 1 else lambda row: any(part(row) for part in parts)

    def _parse_and(self, depth: int) -> Condition:
        parts = [self._parse_term(depth)]
        while self._accept("and"):
            parts.append(self._parse_term(depth))
        return parts[0] if len(parts) == 1 else lambda row: all(part(row) for part in parts)

    def _parse_term(self, depth: int) -> Condition:
        if depth > MAX_DEPTH:
            raise ConfigError(f"{self._option}: more than {MAX_DEPTH} parts within each other")
        if self._accept("not"):
            inner = self._parse_term(depth + 1)
            return lambda row: not inner(row)
        if self._accept("("):
            inner = self._parse_or(depth + 1)
            if not self._accept(")"):
                raise self._syntax_error("a closing parenthesis")
            return inner
        return self._parse_comparison()

    def _parse_comparison(self) -> Condition:
        token_type, name = self._expect("a column")
        if token_type != "word":
            raise self._syntax_error("a column", back=1)
        check_column(name, self._option)
        token_type, sign = self._expect("a sign such as <")
        if token_type != "sign" or sign in "()":
            raise self._syntax_error("a sign such as <", back=1)
        token_type, value = self._expect("a value")
        if token_type == "sign":
            raise self._syntax_error("a value", back=1)
        return (
            _text_condition(name, sign, value, self._option)
            if name in TEXT_COLUMNS
            else _number_condition(name, sign, value, self._option)
        )

    def _accept(self, word: str) -> bool:
        token = self._tokens[self._position] if self._position < len(self._tokens) else ("", "")
        if token[0] == "text" or token[1] != word:
            return False
        self._position += 1
        return True

    def _expect(self, expected: str) -> tuple[str, str]:
        if self._position >= len(self._tokens):
            raise self._syntax_error(expected)
        self._position += 1
        return self._tokens[self._position - 1]

    def _syntax_error(self, expected: str, back: int = 0) -> ConfigError:
        index = self._position - back
        actual = repr(self._tokens[index][1][:30]) if index < len(self._tokens) else "the end"
        return ConfigError(
            f"{self._option}: expected {expected}, found {actual}; write such as 'reward<0.5 and turns>2'"
        )


def _text_condition(name: str, sign: str, text: str, option: str) -> Condition:
    if sign == "~":
        return lambda row: text in str(row[name])
    if sign not in ("=", "==", "!="):
        raise ConfigError(f"{option}: {name} is text, which is compared by =, != or ~, not by {sign}")
    is_equal = sign != "!="
    return lambda row: (row[name] == text) is is_equal


def _number_condition(name: str, sign: str, text: str, option: str) -> Condition:
    if sign == "~":
        raise ConfigError(f"{option}: {name} is a number, which ~ does not fit; compare it by =, <, >, <=, >= or !=")
    try:
        number = float(text)
    except ValueError:
        raise ConfigError(f"{option}: {name} is a number, but {text[:30]!r} is not") from None
    if math.isnan(number):
        raise ConfigError(f"{option}: nothing can be compared with {text[:30]!r}")
    compare = _OPERATORS[sign]

    def holds(row: Mapping[str, Value]) -> bool:
        value = row[name]
        if value is None or isinstance(value, str) or math.isnan(value):
            return sign == "!="
        return compare(value, number)

    return holds
