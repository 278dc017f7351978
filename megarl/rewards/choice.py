"""Multiple choice: did the policy name the right letter?"""

from __future__ import annotations

import re
from typing import Any

from megarl.rewards.ground_truths import with_prompt_check
from megarl.rewards.stated_answer import extract_boxed, extract_final_part, find_box
from megarl.types import Prompt, Rollout

_MARK = re.compile(r"\b(?:answer|choice|option)\b", re.IGNORECASE)
_WINDOW = 60  # characters behind a mark in which its letter has to be, so that many marks cost little each
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
_SHORT = 10  # characters of an answer that may be the letter alone, also in lower case
_DELIMITER = re.compile(r"\\[()\[\]]")
_CLEAN = re.compile(r"\\(?:textbf|text|mathrm|mathbf)|[\s(){}\[\].:*$]")


def _truth(prompt: Prompt) -> str:
    truth = _parse_letter(prompt.ground_truth)
    if truth is None:
        raise ValueError(f"the ground truth {str(prompt.ground_truth)[:80]!r} is not a letter from A to E")
    return truth


@with_prompt_check(_truth)
def choice(rollout: Rollout) -> float:
    r"""1.0 where the letter that the answer states, A to E, is that of `prompt.ground_truth`, else 0.0.

    The letter is the last that is boxed or that follows one of the words answer, choice, option: `\boxed{B}`, "the
    answer is (B)", "Answer: b", but not "option A is incorrect". Where nothing is, the last that is called right ("B is
    correct"); else the last that is in brackets, in bold or alone on a line, or the one with which the text ends, or an
    only line begins ("B) Paris"). A letter in the midst of prose, such as the article, is none. Where there are
    `<answer>` tags, only what is between them counts, or a box behind them. Raises ValueError for a ground truth that
    is no letter from A to E.
    """
    return float(extract_letter(rollout.answer) == _truth(rollout.prompt))


def extract_letter(answer: str) -> str | None:
    """The letter that a text states, in upper case; None where it states none."""
    answer = _DELIMITER.sub("$", extract_final_part(answer))
    if len(answer.strip()) <= _SHORT and (letter := _parse_letter(answer)):
        return letter
    marked: tuple[int, str] | None = None
    for mark in _MARK.finditer(answer):
        found = _LETTER_AFTER_MARK.match(answer[mark.end() : mark.end() + _WINDOW])
        if found and _is_stated_letter(answer, mark.end() + found.end(), found):
            marked = mark.end() + found.start("letter"), found["letter"].upper()
    box = extract_boxed(answer)
    if box is not None and find_box(answer) > (marked[0] - 10 if marked else -1):
        return _parse_letter(box)
    if marked:
        return marked[1]
    for found in reversed(list(_CALLED_CORRECT.finditer(answer))):
        if not _UNSURE.search(answer[max(0, found.start() - 20) : found.start()]):
            return found["letter"]
    said = [(found.start(), found[1] or found[2]) for found in _HIGHLIGHTED_LETTER.finditer(answer)]
    said += [(found.start(), found[1]) for found in _ALONE.finditer(answer)]
    end = answer[-20:]
    if last := _LAST.search(end):
        said.append((len(answer) - len(end) + last.start(), last[1]))
    if said:
        return max(said)[1]
    first = _FIRST.match(answer) if "\n" not in answer.strip() else None
    return first[1] if first else None


def _is_stated_letter(answer: str, end: int, found: re.Match[str]) -> bool:
    """Whether a letter behind a mark is one: not where it is called wrong; in lower case only in brackets, or where a
    word does not follow."""
    if _DENIED.match(answer, end, end + _WINDOW):
        return False
    if found["letter"].isupper() or found["open"]:
        return True
    return not re.match(r"\s{1,8}\w|-", answer[end : end + 10])


def _parse_letter(said: Any) -> str | None:
    """The letter that a box or a ground truth holds, perhaps with what that stands for: `LORA_B`, `(b)`, `B. Paris`."""
    text = str(said).strip()
    if first := re.match(r"[(\[]?([A-E])[.):\]]\s", text):
        return first[1]
    letter = _CLEAN.sub("", text[:100]).upper()
    return letter if letter in ("A", "B", "C", "D", "E") else None
