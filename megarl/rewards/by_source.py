"""Choose the reward function by `prompt.data_source`, for runs that mix data sets."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from megarl.rewards.choice import choice
from megarl.rewards.code import hidden_tests
from megarl.rewards.functions import RewardFunction
from megarl.rewards.gsm8k import gsm8k
from megarl.rewards.math_dapo import math_dapo
from megarl.rewards.math_verify import math_verify
from megarl.rewards.squad import exact_match, f1
from megarl.types import Prompt, Rollout

SOURCES: Mapping[str, RewardFunction] = {
    "openai/gsm8k": gsm8k,
    "lighteval/MATH": math_verify,
    "DigitalLearningGmbH/MATH-lighteval": math_verify,
    "HuggingFaceH4/MATH-500": math_verify,
    "numina_aops_forum": math_verify,
    "numina_synthetic_math": math_verify,
    "numina_amc_aime": math_verify,
    "numina_synthetic_amc": math_verify,
    "numina_cn_k12": math_verify,
    "numina_olympiads": math_verify,
    "math_dapo": math_dapo,
    "math": math_dapo,
    "math_dapo_reasoning": math_dapo,
    "aime*": math_dapo,
    "searchR1_nq": exact_match,
    "searchR1_triviaqa": exact_match,
    "searchR1_popqa": exact_match,
    "searchR1_hotpotqa": exact_match,
    "searchR1_2wikimultihopqa": exact_match,
    "searchR1_musique": exact_match,
    "searchR1_bamboogle": exact_match,
    "rajpurkar/squad": f1,
    "cais/mmlu": choice,
    "allenai/ai2_arc": choice,
    "tau/commonsense_qa": choice,
    "apps": hidden_tests,
    "codecontests": hidden_tests,
    "codeforces": hidden_tests,
    "taco": hidden_tests,
    "openai/openai_humaneval": hidden_tests,
    "google-research-datasets/mbpp": hidden_tests,
    "livecodebench/*": hidden_tests,
}
"""The names are verl's, so that its parquet files work unchanged; those with a `/` are data sets on the Hub. A name
that ends with `*` matches every data source with that prefix."""


class BySource:
    """Reward function that dispatches by the prompt's data source. To add your own functions:

    rewards = BySource({**SOURCES, "lab/riddles": riddles})      # name it as my_module:rewards
    """

    def __init__(self, sources: Mapping[str, RewardFunction]) -> None:
        self.sources = dict(sources)
        self._prefixes = sorted((name[:-1] for name in sources if name.endswith("*")), key=len, reverse=True)

    def __call__(self, rollout: Rollout) -> Any:
        """Return what the data source's function returns. Raises ValueError for an unknown data source.

        A coroutine function runs to completion here, so a process makes such calls one at a time.
        """
        value = self.function_for(rollout.prompt.data_source)(rollout)
        return self._loop.run(value) if inspect.iscoroutine(value) else value

    def check(self, prompt: Prompt) -> None:
        """Raise ValueError for an unknown data source, or if that function's own `check` does."""
        check = getattr(self.function_for(prompt.data_source), "check", None)
        if check is not None:
            check(prompt)

    @cached_property
    def _loop(self) -> asyncio.Runner:
        """Event loop shared by all calls, so that what a function has opened stays open."""
        return asyncio.Runner()

    def function_for(self, source: str) -> RewardFunction:
        """Return the function of a data source: an exact match, else the longest matching prefix."""
        if source in self.sources:
            return self.sources[source]
        for prefix in self._prefixes:
            if source.startswith(prefix):
                return self.sources[f"{prefix}*"]
        raise ValueError(
            f"no reward for the data source {source[:100]!r}; name a function in reward.functions, or give one to "
            f"megarl.rewards.by_source.BySource (known: {', '.join(self.sources)})"
        )


by_source = BySource(SOURCES)
