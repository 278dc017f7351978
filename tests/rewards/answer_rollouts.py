"""Build a rollout with a given answer, and hostile answers for every reward function."""

from __future__ import annotations

from typing import Any

from megarl.types import Prompt, Rollout, Turn


def make_rollout(answer: str, ground_truth: Any, source: str = "") -> Rollout:
    messages = ({"role": "user", "content": "?"}, {"role": "assistant", "content": answer})
    return Rollout(Prompt("x", (), data_source=source, ground_truth=ground_truth), (Turn((1,)),), messages=messages)


MB = 1 << 20
HOSTILE = {
    "a megabyte": "x" * MB,
    "digits": "1" * MB,
    "numbers": "1 " * (MB // 2),
    "spaces": " " * MB,
    "lines": "\n" * MB,
    "control characters": "".join(map(chr, range(32))) * 1000 + "\x7f\x80\u2028\ufeff\x00",
    "halves of characters": "\ud800\udfff" * 1000,
    "right to left": "\u202e" + "24 rewsna eht" * 1000,
    "open braces": "{" * MB,
    "deep braces": "{" * (MB // 2) + "}" * (MB // 2),
    "open boxes": r"\boxed{" * (MB // 7),
    "deep boxes": r"\boxed{" * 50_000 + "1" + "}" * 50_000,
    "a box of a megabyte": r"\boxed{" + "1+" * (MB // 2) + "1}",
    "deep fractions": r"\boxed{" + r"\frac{1}{" * 30 + "2" + "}" * 30 + "}",
    "deep brackets": r"\boxed{" + "(" * 100 + "1" + ")" * 100 + "}",
    "tower": r"\boxed{9^{9^{9^{9}}}}",
    "factorials": r"\boxed{((9!)!)!}",
    "binomial": r"\boxed{\binom{1000000}{500000}}",
    "expansion": r"\boxed{((x+y)^{200}+1)^{200}}",
    "sum": r"\boxed{\sum_{i=1}^{10^{12}} \frac{1}{i}}",
    "integral": r"\boxed{\int \sin(x^{x}) e^{\cos x} dx}",
    "exponential": r"\boxed{e^{e^{e^{e^{9}}}}}",
    "matrix": r"\boxed{\begin{pmatrix}a&b\\c&d\end{pmatrix}^{999}}",
    "tags": "<think>" * 100_000,
    "tags in tags": "<answer>" * 50_000 + "</answer>" * 50_000,
    "dollars": "$," * (MB // 2),
    "formulas": "$1$, " * (MB // 5),
    "answers": "answer: " * (MB // 8),
    "answers of spaces": "answer" + " " * MB,
    "answer is is": "answer " + "is " * (MB // 3),
    "choices": "(A) " * (MB // 4),
    "stars": "*" * MB,
    "backslashes": "\\" * MB,
    "text in text": r"Answer: " + r"\text{" * 40 + "1" + "}" * 40,
    "format fields": "{0.__class__} %s {} ${answer}",
    "code": "__import__('os')._exit(9)",
    "code in a box": r"\boxed{__import__('os').system('exit')}",
}
