"""Extract the code from an answer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.rewards.code.grading import MAX_CODE_CHARS, extract_code

sys.path.insert(0, str(Path(__file__).parents[1]))
from answer_rollouts import HOSTILE  # noqa: E402

pytestmark = pytest.mark.alone


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("Here:\n```python\na = 1\n```\nDone.", "a = 1"),
        ("```python\na = 1\n```\nbetter\n```python\na = 2\n```", "a = 2"),
        ("```python\na = 1\n```\nIt prints\n```\n5\n```", "a = 1"),
        ("```py\na = 1\n```\n```bash\nls\n```", "a = 1"),
        ("```\na = 1\n```\n```text\nb\n```", "a = 1"),
        ("```cpp\nint a;\n```", "int a;"),
        ("```Python3 \na = 1\n```", "a = 1"),
        ("```python {title=x}\na = 1\n```", "a = 1"),
        ("Sure: ```python\na = 1```", "a = 1"),
        ("```python\na = 1\nb = ", "a = 1\nb = "),
        ("1. So:\n   ```python\n   def f():\n       return 1\n   ```\n", "def f():\n    return 1\n"),
        ('```python\nx = "```"\ny = 1\n```', 'x = "```"\ny = 1'),
        ("```python\r\na = 1\r\n```", "a = 1"),
        ("a = 1\n", "a = 1"),
        ("    return 1", "return 1"),
        ("<think>```python\na = 1\n```</think>```python\na = 2\n```", "a = 2"),
        ("<think>```python\na = 1\n```</think>I do not know", "I do not know"),
        ("", ""),
        (" \n\t", ""),
        ("```python\n```", ""),
        ("```python\n" + "#" * (MAX_CODE_CHARS + 1) + "\n```", ""),
    ],
)
def test_extracts_the_last_code_block(answer: str, code: str) -> None:
    assert extract_code(answer) == code


@pytest.mark.parametrize("text", HOSTILE)
def test_limits_code_from_hostile_answers(text: str) -> None:
    assert len(extract_code(HOSTILE[text])) <= MAX_CODE_CHARS


@pytest.mark.parametrize(
    "text",
    [
        "```" * 300_000,
        "```" * 300_000 + "\n",
        "\n```" * 250_000,
        "a ```\n b ```" * 90_000,
        "```" + " " * 1_000_000 + "x!\n",
        "```py\n" * 200_000,
        "\n" + " " * 1_000_000 + "```",
    ],
    ids=range(7),
)
def test_many_fences_are_fast(text: str) -> None:
    assert len(extract_code(text)) <= MAX_CODE_CHARS


@given(st.lists(st.sampled_from(["```", "```python", "\n", "a = 1", " ", "</think>", "~~~", "x"]), max_size=20))
def test_any_answer_gives_a_string(fragments: list[str]) -> None:
    assert isinstance(extract_code("".join(fragments)), str)
