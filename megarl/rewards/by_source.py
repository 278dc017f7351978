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
    **dict.fromkeys(("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"), math_verify),
    **dict.fromkeys(("numina_aops_forum", "numina_synthetic_math", "numina_amc_aime"), math_verify),
    **dict.fromkeys(("numina_synthetic_amc", "numina_cn_k12", "numina_olympiads"), math_verify),
    **dict.fromkeys(("math_dapo", "math", "math_dapo_reasoning", "aime*"), math_dapo),
    **dict.fromkeys(("searchR1_nq", "searchR1_triviaqa", "searchR1_popqa", "searchR1_hotpotqa"), exact_match),
    **dict.fromkeys(("searchR1_2wikimultihopqa", "searchR1_musique", "searchR1_bamboogle"), exact_match),
    "rajpurkar/squad": f1,
    **dict.fromkeys(("cais/mmlu", "allenai/ai2_arc", "tau/commonsense_qa"), choice),
    **dict.fromkeys(("apps", "codecontests", "codeforces", "taco", "openai/openai_humaneval"), hidden_tests),
    **dict.fromkeys(("google-research-datasets/mbpp", "livecodebench/*"), hidden_tests),
}
"""The names are verl's, so that its parquet files work unchanged; those with a `/` are data sets on the Hub. A name
that ends with `*` matches every data source with that prefix."""


class BySource:
    """Reward function that dispatches by the prompt's data source. To add your own functions:

    rewards = BySource({**SOURCES, "lab/riddles": riddles})      # name it as my_module:rewards
    """

    def __init__(self, sources: Mapping[str, RewardFunction]) -> None:
        self.sources = dict(sources)

    def __call__(self, rollout: Rollout) -> Any:
        """Return what the data source's function returns; a coroutine function runs to completion, one at a time."""
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
        if patterns := [name for name in self.sources if name.endswith("*") and source.startswith(name[:-1])]:
            return self.sources[max(patterns, key=len)]
        raise ValueError(
            f"no reward for the data source {source[:100]!r}; name a function in reward.functions, or give one to "
            f"megarl.rewards.by_source.BySource (known: {', '.join(self.sources)})"
        )


by_source = BySource(SOURCES)
