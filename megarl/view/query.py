"""Conditions on rollouts, such as `reward<0.5 and turns>2`: read by hand, so that nothing in them is ever run.

    condition  = both {"or" both}
    both       = one {"and" one}
    one        = "not" one | "(" condition ")" | column sign value
    sign       = < | <= | > | >= | = | == | != | ~          (~: the text has this in it)
    value      = a number, a word, or text in quotes

The page's table reads the same, in `static/query.js`.
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
    "lag": "versions that its oldest token is behind the newest of its step",
}
"""What is known of each rollout, by name."""
TEXTS = ("prompt", "source", "status")
LONGEST, DEEPEST = 1000, 40

_TOKEN = re.compile(r"""\s*(?:(<=|>=|==|!=|[<>=~()])|"([^"]*)"|'([^']*)'|([^\s<>=!~()"']+))""")
_SIGNS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
}


def known_column(name: str, option: str) -> str:
    """The name itself. Raises ConfigError, with those there are, where it is none."""
    if name not in COLUMNS:
        raise ConfigError(f"{option}: there is no column {name[:40]!r}; there are {', '.join(COLUMNS)}")
    return name


def condition(text: str, option: str = "--where") -> Condition:
    """Whether a row, by the names of `COLUMNS`, is what the text says. What is None is like nothing: only `!=` holds.
    Raises ConfigError for what is no condition."""
    if len(text) > LONGEST:
        raise ConfigError(f"{option}: a condition has at most {LONGEST} characters, not {len(text)}")
    return _Reader(_tokens(text, option), option).whole()


def _tokens(text: str, option: str) -> list[tuple[str, str]]:
    found, at = [], 0
    end = len(text.rstrip())
    while at < end:
        match = _TOKEN.match(text, at)
        if match is None:
            raise ConfigError(f"{option}: cannot read {text[at : at + 30].strip()!r}; write such as 'reward<0.5'")
        sign, double, single, word = match.groups()
        quoted = double if double is not None else single
        found.append(("sign", sign) if sign else ("text", quoted) if quoted is not None else ("word", word))
        at = match.end()
    return found


class _Reader:
    def __init__(self, tokens: list[tuple[str, str]], option: str) -> None:
        self._tokens, self._option, self._at = tokens, option, 0

    def whole(self) -> Condition:
        found = self._either(0)
        if self._at < len(self._tokens):
            raise self._wrong("and, or, or the end")
        return found

    def _either(self, depth: int) -> Condition:
        parts = [self._both(depth)]
        while self._takes("or"):
            parts.append(self._both(depth))
        return parts[0] if len(parts) == 1 else lambda row: any(part(row) for part in parts)

    def _both(self, depth: int) -> Condition:
        parts = [self._one(depth)]
        while self._takes("and"):
            parts.append(self._one(depth))
        return parts[0] if len(parts) == 1 else lambda row: all(part(row) for part in parts)

    def _one(self, depth: int) -> Condition:
        if depth > DEEPEST:
            raise ConfigError(f"{self._option}: more than {DEEPEST} parts within each other")
        if self._takes("not"):
            inner = self._one(depth + 1)
            return lambda row: not inner(row)
        if self._takes("("):
            inner = self._either(depth + 1)
            if not self._takes(")"):
                raise self._wrong("a closing parenthesis")
            return inner
        return self._comparison()

    def _comparison(self) -> Condition:
        kind, name = self._next("a column")
        if kind != "word":
            raise self._wrong("a column", back=1)
        known_column(name, self._option)
        kind, sign = self._next("a sign such as <")
        if kind != "sign" or sign in "()":
            raise self._wrong("a sign such as <", back=1)
        kind, value = self._next("a value")
        if kind == "sign":
            raise self._wrong("a value", back=1)
        return _text(name, sign, value, self._option) if name in TEXTS else _number(name, sign, value, self._option)

    def _takes(self, word: str) -> bool:
        here = self._tokens[self._at] if self._at < len(self._tokens) else ("", "")
        if here[0] == "text" or here[1] != word:
            return False
        self._at += 1
        return True

    def _next(self, wanted: str) -> tuple[str, str]:
        if self._at >= len(self._tokens):
            raise self._wrong(wanted)
        self._at += 1
        return self._tokens[self._at - 1]

    def _wrong(self, wanted: str, back: int = 0) -> ConfigError:
        at = self._at - back
        found = repr(self._tokens[at][1][:30]) if at < len(self._tokens) else "the end"
        return ConfigError(f"{self._option}: expected {wanted}, found {found}; write such as 'reward<0.5 and turns>2'")


def _text(name: str, sign: str, wanted: str, option: str) -> Condition:
    if sign == "~":
        return lambda row: wanted in str(row[name])
    if sign not in ("=", "==", "!="):
        raise ConfigError(f"{option}: {name} is text, which is compared by =, != or ~, not by {sign}")
    same = sign != "!="
    return lambda row: (row[name] == wanted) is same


def _number(name: str, sign: str, text: str, option: str) -> Condition:
    if sign == "~":
        raise ConfigError(f"{option}: {name} is a number, which ~ does not fit; compare it by =, <, >, <=, >= or !=")
    try:
        wanted = float(text)
    except ValueError:
        raise ConfigError(f"{option}: {name} is a number, and {text[:30]!r} is none") from None
    if math.isnan(wanted):
        raise ConfigError(f"{option}: nothing can be compared with {text[:30]!r}")
    compare = _SIGNS[sign]

    def holds(row: Mapping[str, Value]) -> bool:
        value = row[name]
        if value is None or isinstance(value, str) or math.isnan(value):
            return sign == "!="
        return compare(value, wanted)

    return holds
