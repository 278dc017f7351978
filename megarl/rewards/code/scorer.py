"""The reward function: does the code in an answer pass the hidden tests of its prompt?"""

from __future__ import annotations

from functools import cached_property

from megarl.rewards.code.answers import code_of
from megarl.rewards.code.formats import problem_of
from megarl.rewards.code.grading import Grading, grade
from megarl.sandbox.box import Sandbox
from megarl.types import Prompt, Rollout
from megarl.types.verdicts import Reward


class HiddenTests:
    """A reward function with settings of yours:

    mine = HiddenTests(Grading(most=20, seconds=2), share=True)      # name it as my_module:mine

    share: the reward is the share of tests that have passed; else 1.0 where all have, and 0.0.
    """

    sandboxed = True

    def __init__(self, how: Grading = Grading(), share: bool = False) -> None:  # noqa: B008
        self.how, self.share = how, share

    async def __call__(self, rollout: Rollout) -> Reward:
        """Part `passed`: the share of tests. Raises ValueError for a ground truth without tests, or with wrong ones,
        ConfigError and RuntimeError where there can be no box."""
        problem = problem_of(rollout.prompt.ground_truth)
        found = await grade(code_of(rollout.answer), problem, self._box, self.how)
        reward = found.share if self.share else float(found.passed == found.tests)
        return Reward(reward, parts={"passed": found.share})

    @staticmethod
    def check(prompt: Prompt) -> None:
        """Raises ValueError where the prompt's ground truth holds no tests."""
        problem_of(prompt.ground_truth)

    @cached_property
    def _box(self) -> Sandbox:
        """By the settings of the run that this process belongs to, which are there when it is called."""
        return Sandbox.from_environment()


hidden_tests = HiddenTests()
"""1.0 where the code in the answer passes all hidden tests of `prompt.ground_truth`, else 0.0."""
