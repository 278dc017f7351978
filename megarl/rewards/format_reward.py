"""Format rewards: check an answer's form, not its content.

DeepSeek-R1 (arXiv:2501.12948), section 2.2.2: a format reward for thinking between <think> and </think>; the template
in its table 1 puts the answer after it, between <answer> and </answer>.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

from megarl.types import Rollout


def in_tags(rollout: Rollout, tags: Sequence[str], opened: bool = False) -> float:
    """Return 1.0 if the answer is `<tag>..</tag>` for each tag in order and nothing else, else 0.0.

    Each tag occurs once, only white space surrounds the tags, and the last one is not empty. For your own tags:

            form = partial(in_tags, tags=("plan", "code"))      # of functools; name it as my_module:form

    opened: the chat template opens the first tag at the end of the prompt, so the policy does not write it.
    """
    text = f"<{tags[0]}>{rollout.answer}" if opened else rollout.answer
    if not all(text.count(f"<{tag}>") == text.count(f"</{tag}>") == 1 for tag in tags):
        return 0.0
    form = r"\s*".join(f"<{re.escape(tag)}>(.*)</{re.escape(tag)}>" for tag in tags)
    match = re.fullmatch(rf"\s*{form}\s*", text, re.DOTALL)
    return float(match is not None and match[len(tags)].strip() != "")


format_reward = partial(in_tags, tags=("think", "answer"))
"""Return 1.0 for `<think>..</think><answer>..</answer>` and nothing else, else 0.0."""

format_reward_opened = partial(in_tags, tags=("think", "answer"), opened=True)
"""As `format_reward`, for models whose chat template ends the prompt with `<think>`."""
