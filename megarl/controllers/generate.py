"""Rollouts of a data set, by the engines alone with the weights of `model.path`: scored and recorded, without training.

    megarl train my.yaml algorithm=generate run.num_rollout=20 run.dir=runs/answers

The engines load the weights themselves; there is no other model. The output is a run folder: `tools/view_rollouts.py`
shows it, and `rollout.replay` trains on it. A step takes `data.prompts_per_step` prompts, in the order of the file
unless `data.shuffle` is set, with `rollout.samples_per_prompt` answers each; with `options.full_dataset` it takes all
prompts of the data. With `run.save_every` a stopped run can be resumed, like any run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megarl.config import Config
from megarl.controllers.controller import Flow, StepResult
from megarl.controllers.policy_gradient import PolicyController
from megarl.types import Prompt


@dataclass(frozen=True)
class GenerateOptions:
    scored: bool = True
    """Whether answers get a reward, as in training; otherwise they are recorded without one."""
    full_dataset: bool = False
    """Whether each step takes all prompts once, in the order of the files, as for an evaluation."""
    synonyms = {"whole": "full_dataset"}


class GenerateController(PolicyController):
    trained_roles = ()
    is_off_policy = False

    Options = GenerateOptions

    @classmethod
    def roles(cls, config: Config) -> tuple[str, ...]:
        return ("rollout", "reward") if cls.read_options(config).scored else ("rollout",)

    def load_items(self, flow: Flow) -> Sequence[Prompt]:
        self._prompts = flow.data.load_prompts(self.config.data.train, self.options.full_dataset)
        return self._prompts

    def load_eval_items(self, flow: Flow) -> Sequence[Prompt]:
        """Return the held-out prompts; empty without a reward to rate answers."""
        return super().load_eval_items(flow) if self.options.scored else ()

    def step(self, flow: Flow, items: Sequence[Prompt]) -> StepResult:
        items = self._prompts if self.options.full_dataset else items
        rollouts = flow.rollout.generate(
            items, self.config.rollout.samples_per_prompt, held_out=self.options.full_dataset
        )
        if self.options.scored:
            rollouts = flow.reward.score(rollouts)
        return StepResult({}, rollouts)
