"""Does an answer have the form that it should have? Of its content nothing is judged.

DeepSeek-R1 (arXiv:2501.12948), section 2.2.2: a format reward for thoughts between <think> and </think>; the template
of its table 1 has the answer between <answer> and </answer> behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from megarl.types import Rollout


def in_tags(rollout: Rollout, tags: Sequence[str], opened: bool = False) -> float:
    """1.0 where the answer is `<tag>..</tag>` for each of the tags in this order, each once, nothing but white space
    around them, and something in the last; else 0.0. For tags of yours:

        form = partial(in_tags, tags=("plan", "code"))      # of functools; name it as my_module:form

    opened: the first tag is opened by the chat template, at the end of the prompt, and not by the policy.
    """
    text = f"<{tags[0]}>{rollout.answer}" if opened else rollout.answer
    place, inside = 0, ""
    for tag in tags:
        start, end = text.find(f"<{tag}>", place), text.find(f"</{tag}>", place)
        if not place <= start < end or text[place:start].strip():
            return 0.0
        if text.count(f"<{tag}>") != 1 or text.count(f"</{tag}>") != 1:
            return 0.0
        inside = text[start + len(tag) + 2 : end].strip()
        place = end + len(tag) + 3
    return float(bool(inside) and not text[place:].strip())


format_reward = partial(in_tags, tags=("think", "answer"))
"""1.0 for `<think>..</think><answer>..</answer>` and nothing else, else 0.0."""

format_reward_opened = partial(in_tags, tags=("think", "answer"), opened=True)
"""As `format_reward`, for models whose chat template ends the prompt with `<think>`."""
