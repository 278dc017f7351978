"""Multiple choice: does the answer state the right letter?"""

from __future__ import annotations

import re
from typing import Any

from megarl.rewards.functions import with_prompt_check
from megarl.rewards.stated_answer import extract_boxed, extract_final_part, find_box
from megarl.types import Prompt, Rollout

_MARK = re.compile(r"\b(?:answer|choice|option)\b", re.IGNORECASE)
_WINDOW = 60  # a keyword's letter must lie within this many characters, which bounds the cost per keyword
_FILL = r"[\s*_:=$\"'`~-]{0,8}"
_LETTER = r"(?:\\(?:textbf|text|mathrm|mathbf|boxed)\s?)?(?P<open>[(\[{]{0,2})\s?(?P<letter>[A-Ea-e])(?!\w|'\w)"
_VERBS = "is|are|be|was|would be|must be|should be|choice|option|letter|therefore|then"
_LETTER_AFTER_MARK = re.compile(rf"{_FILL}(?:(?:{_VERBS})\b{_FILL}){{0,4}}{_LETTER}")
_HIGHLIGHTED_LETTER = re.compile(
    r"(?<![\w\\])(?:[(\[]([A-E])[)\]]|\*\*[(\[]?([A-E])(?:[)\].:]?\*\*|[)\].:] [^*\n]{1,80}\*\*))(?!\w)"
)
_CALLED_CORRECT = re.compile(
    r"(?<![\w'\\])(?P<letter>[A-E])[)\]}*$]{0,3} (?:is|must be|should be) (?:therefore |thus |clearly |indeed )?"
    r"(?:the )?(?:only |most )?(?:correct|right|true|best)(?!\w)"
)
_UNSURE = re.compile(r"\b(?:if|whether|nor|or|suppose|assume|assuming|that|is)\s{1,8}[(\[{*$]{0,3}\Z", re.IGNORECASE)
_DENIED = re.compile(
    r"[)\]}*'\"`$\s]{0,8}(?:is|was|are|can|could|would|does|must|seems)"
    r"(?:(?:n't| not|not)|(?: \w{1,12})? (?:incorrect|wrong|false|out|impossible|ruled|eliminated))(?!\w)"
)
_ALONE = re.compile(r"^[ \t]{0,8}([A-E])[.):]?[ \t]{0,8}$", re.MULTILINE)
_LAST = re.compile(r"(?<![\w'])(?<!\bnot )([A-E])[\s.*!$)`]{0,8}\Z")
_FIRST = re.compile(r"\s{0,8}[(\[]?([A-E])[.):\]]\s")
_SHORT = 10  # an answer of at most this many characters may be the letter alone, also in lower case
_DELIMITER = re.compile(r"\\[()\[\]]")
_CLEAN = re.compile(r"\\(?:textbf|text|mathrm|mathbf)|[\s(){}\[\].:*$]")


def _truth(prompt: Prompt) -> str:
    truth = _parse_letter(prompt.ground_truth)
    if truth is None:
        raise ValueError(f"the ground truth {str(prompt.ground_truth)[:80]!r} is not a letter from A to E")
    return truth


@with_prompt_check(_truth)
def choice(rollout: Rollout) -> float:
    r"""Return 1.0 if the answer states the letter of `prompt.ground_truth`, A to E, else 0.0.

    The stated letter is the last one in a box or after one of the words answer, choice, option: `\boxed{B}`, "the
    answer is (B)", "Answer: b", but not "option A is incorrect". Failing that, it is the last one that is called
    correct ("B is correct"). Failing that, it is the last one in brackets, in bold, or alone on a line, the one at the
    end of the text, or the one that begins a single-line answer ("B) Paris"). A letter in running prose, such as the
    article, does not count. With `<answer>` tags, only the text between them counts, or a box after them. Raises
    ValueError for a ground truth that is not a letter from A to E.
    """
    return float(extract_letter(rollout.answer) == _truth(rollout.prompt))


def extract_letter(answer: str) -> str | None:
    """Return the letter that a text states, in upper case, or None."""
    answer = _DELIMITER.sub("$", extract_final_part(answer))
    if len(answer.strip()) <= _SHORT and (letter := _parse_letter(answer)):
        return letter
    after_keyword: tuple[int, str] | None = None
    for keyword in _MARK.finditer(answer):
        match = _LETTER_AFTER_MARK.match(answer[keyword.end() : keyword.end() + _WINDOW])
        if match is None or _DENIED.match(answer, end := keyword.end() + match.end(), end + _WINDOW):
            continue
        # A lower-case letter counts only in brackets or if no word follows.
        is_clear = match["letter"].isupper() or match["open"] or not re.match(r"\s{1,8}\w|-", answer[end : end + 10])
        if is_clear:
            after_keyword = keyword.end() + match.start("letter"), match["letter"].upper()
    box = extract_boxed(answer)
    if box is not None and find_box(answer) > (after_keyword[0] - 10 if after_keyword else -1):
        return _parse_letter(box)
    if after_keyword:
        return after_keyword[1]
    for match in reversed(list(_CALLED_CORRECT.finditer(answer))):
        if not _UNSURE.search(answer[max(0, match.start() - 20) : match.start()]):
            return match["letter"]
    candidates = [(match.start(), match[1] or match[2]) for match in _HIGHLIGHTED_LETTER.finditer(answer)]
    candidates += [(match.start(), match[1]) for match in _ALONE.finditer(answer)]
    if trailing := _LAST.search(answer[-20:]):
        candidates.append((max(0, len(answer) - 20) + trailing.start(), trailing[1]))
    if candidates:
        return max(candidates)[1]
    leading = _FIRST.match(answer) if "\n" not in answer.strip() else None
    return leading[1] if leading else None


def _parse_letter(value: Any) -> str | None:
    r"""Return the letter of a box or a ground truth, such as `\text{B}`, `(b)` or `B. Paris`."""
    text = str(value).strip()
    if match := re.match(r"[(\[]?([A-E])[.):\]]\s", text):
        return match[1]
    letter = _CLEAN.sub("", text[:100]).upper()
    return letter if letter in ("A", "B", "C", "D", "E") else None
