"""Parse conditions on rollouts, such as `reward<0.5 and turns>2`, by hand, so that nothing in them is executed.

    condition    = conjunction {"or" conjunction}
    conjunction  = term {"and" term}
    term         = "not" term | "(" condition ")" | column sign value
    sign         = < | <= | > | >= | = | == | != | ~          (~: the text contains the value)
    value        = a number, a word, or text in quotes

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

COLUMNS = (
    *("step", "number", "group", "prompt", "source", "status", "reward", "advantage", "logprob"),
    *("length", "actions", "turns", "tool_calls", "tool_errors", "staleness", "mode"),
)
"""Columns of the rollout index. number: in its step, from 0. group: index of the prompt in its step. prompt, source: id
and data source of the prompt. advantage, logprob: means over the policy's tokens. length: tokens; actions: those of the
policy. turns: of the policy. staleness: versions by which its oldest token is behind the newest of its step. mode: how
it was generated, see `MODES`."""
TEXT_COLUMNS = ("prompt", "source", "status", "mode")
MODES = ("sampled", "greedy")
MAX_CHARS, MAX_DEPTH = 1000, 40

_TOKEN = re.compile(
    r"""\s*(?:(?P<paren>[()])|(?P<sign><=|>=|==|!=|[<>=~])|(?P<quoted>"[^"]*"|'[^']*')|(?P<word>[^\s<>=!~()"']+))"""
)
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    **{"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge},
    **{"=": operator.eq, "==": operator.eq, "!=": operator.ne},
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
    return _Parser(text, option).parse()


class _Parser:
    def __init__(self, text: str, option: str) -> None:
        self._option, self._position = option, 0
        self._tokens: list[tuple[str, str]] = []
        """(kind, text), where kind is paren, sign, quoted or word."""
        position, text = 0, text.rstrip()
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None:
                rest = text[position : position + 30].strip()
                raise ConfigError(f"{option}: cannot read {rest!r}; write such as 'reward<0.5'")
            kind, token = str(match.lastgroup), match[match.lastgroup or 0]
            self._tokens.append((kind, token[1:-1] if kind == "quoted" else token))
            position = match.end()

    def parse(self) -> Condition:
        condition = self._parse_or(0)
        if self._position < len(self._tokens):
            raise self._syntax_error("and, or, or the end")
        return condition

    def _parse_or(self, depth: int) -> Condition:
        parts = [self._parse_and(depth)]
        while self._accept("or"):
            parts.append(self._parse_and(depth))
        return lambda row: any(part(row) for part in parts)

    def _parse_and(self, depth: int) -> Condition:
        parts = [self._parse_term(depth)]
        while self._accept("and"):
            parts.append(self._parse_term(depth))
        return lambda row: all(part(row) for part in parts)

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
        name = check_column(self._expect("a column", "word"), self._option)
        sign = self._expect("a sign such as <", "sign")
        value = self._expect("a value", "word", "quoted")
        compare = self._compare_text if name in TEXT_COLUMNS else self._compare_number
        return compare(name, sign, value)

    def _compare_text(self, name: str, sign: str, text: str) -> Condition:
        if sign == "~":
            return lambda row: text in str(row[name])
        if sign not in ("=", "==", "!="):
            raise ConfigError(f"{self._option}: {name} is text, which is compared by =, != or ~, not by {sign}")
        return lambda row: (row[name] == text) is (sign != "!=")

    def _compare_number(self, name: str, sign: str, text: str) -> Condition:
        if sign == "~":
            remedy = "compare it by =, <, >, <=, >= or !="
            raise ConfigError(f"{self._option}: {name} is a number, which ~ does not fit; {remedy}")
        try:
            number = float(text)
        except ValueError:
            raise ConfigError(f"{self._option}: {name} is a number, but {text[:30]!r} is not") from None
        if math.isnan(number):
            raise ConfigError(f"{self._option}: nothing can be compared with {text[:30]!r}")

        def holds(row: Mapping[str, Value]) -> bool:
            value = row[name]
            if value is None or isinstance(value, str) or math.isnan(value):
                return sign == "!="
            return _OPERATORS[sign](value, number)

        return holds

    def _accept(self, word: str) -> bool:
        is_next = self._tokens[self._position : self._position + 1] in ([("word", word)], [("paren", word)])
        self._position += is_next
        return is_next

    def _expect(self, expected: str, *kinds: str) -> str:
        if self._position >= len(self._tokens) or self._tokens[self._position][0] not in kinds:
            raise self._syntax_error(expected)
        self._position += 1
        return self._tokens[self._position - 1][1]

    def _syntax_error(self, expected: str) -> ConfigError:
        actual = repr(self._tokens[self._position][1][:30]) if self._position < len(self._tokens) else "the end"
        return ConfigError(
            f"{self._option}: expected {expected}, found {actual}; write such as 'reward<0.5 and turns>2'"
        )
