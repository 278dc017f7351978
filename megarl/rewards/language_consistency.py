"""Language consistency of the chain of thought (DeepSeek-R1, arXiv:2501.12948, section 3.2.1)."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from functools import lru_cache

from megarl.types import Rollout

_FORMULA = re.compile(r"```.*?```|\$[^$]*\$|\\[a-zA-Z]+|`[^`]*`|<[^<>\s]{1,40}>", re.DOTALL)
_WORD = re.compile(r"[^\W\d_]+")
_JAPANESE = {"HIRAGANA": "CJK", "KATAKANA": "CJK", "KATAKANA-HIRAGANA": "CJK"}
_UNSPACED = ("CJK", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN")
"""Scripts without spaces between words, in which each letter counts as one."""


@lru_cache(maxsize=65536)
def _script(letter: str) -> str:
    """Return the script of a letter, by the first word of its Unicode name: LATIN, CYRILLIC, CJK ..."""
    name = unicodedata.name(letter, "").partition(" ")[0]
    return _JAPANESE.get(name, name)


def count_words(text: str) -> Counter[str]:
    """Return the number of words by script. Formulas, code, tags and single Latin letters, which are names of
    variables, are not words."""
    counts: Counter[str] = Counter()
    for word in _WORD.findall(_FORMULA.sub(" ", text)):
        scripts = Counter(map(_script, word))
        for script in _UNSPACED:
            counts[script] += scripts.pop(script, 0)
        if scripts and (len(word) > 1 or "LATIN" not in scripts):
            counts[scripts.most_common(1)[0][0]] += 1
    return +counts


def language_consistency(rollout: Rollout) -> float:
    """Return the share of the chain of thought's words that are in the language of the prompt; 0.0 without any word.

    The language is the row's column `language` (`en`, `zh` ...), or that of most words of the last user message.
    Languages are told apart by their script: English from Chinese, but not from French.
    """
    thought = rollout.answer.partition("</think>")[0]  # the whole answer without the tag
    counts = count_words(thought)
    total = sum(counts.values())
    if not total:
        return 0.0
    target = _SCRIPTS.get(str(rollout.prompt.extra.get("language", "")).lower())
    if target is None:
        questions = [str(item.get("content") or "") for item in rollout.prompt.messages if item.get("role") == "user"]
        ranking = count_words(questions[-1] if questions else "").most_common(1)
        target = ranking[0][0] if ranking else "LATIN"
    return counts[target] / total


_SCRIPTS = {
    **dict.fromkeys(("en", "fr", "de", "es", "it", "pt", "nl", "pl", "tr", "vi", "id"), "LATIN"),
    **dict.fromkeys(("zh", "ja"), "CJK"),
    **dict.fromkeys(("ru", "uk", "bg"), "CYRILLIC"),
    **{"ko": "HANGUL", "ar": "ARABIC", "fa": "ARABIC", "hi": "DEVANAGARI", "el": "GREEK", "he": "HEBREW", "th": "THAI"},
}
"""Script by language code."""
