"""The check that engine and trainer have the same policy, before the first update."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from test_learning import TableFlow  # noqa: E402
from test_rollout_correction import StaleFlow, config_of, prompts  # noqa: E402

from megarl.config import ConfigError, from_dict  # noqa: E402
from megarl.controllers.controller import make_controller  # noqa: E402
from megarl.controllers.rollout_correction import (  # noqa: E402
    CHECK_EPISODES,
    check_same_policy,
    current_policy_mask,
    describe_layers,
    logprob_diff_bound,
)
from megarl.observe.health_bands import LOGPROB_DIFF, load_bands  # noqa: E402
from megarl.types import Prompt, Rollout, Rollouts, TrainBatch, Turn  # noqa: E402

pytestmark = pytest.mark.alone


class MismatchedFlow(TableFlow):
    """A flow whose engines' log-probs can be off by `logprob_error`, with layer 1 reported as mismatched."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.should_check_logprobs = True
        self.logprob_error = 0.0
        self.mismatches: list[str] | None = ["model.layers.1.mlp.experts.w13_weight"]
        self.forwards: list[int] = []
        forward = self.policy.forward

        def counting_forward(batch: TrainBatch) -> Any:
            self.forwards.append(len(batch.tokens))
            return forward(batch)

        self.policy.forward = counting_forward  # type: ignore[method-assign]

    def generate(self, items: Any, samples: int, greedy: bool = False, held_out: bool = False) -> Rollouts:
        result = super().generate(items, samples, greedy)
        shifted = [
            Rollout(
                item.prompt,
                tuple(
                    Turn(
                        turn.token_ids, tuple(value + self.logprob_error for value in turn.logprobs), turn.is_action, 0
                    )
                    for turn in item.turns
                ),
                item.status,
                group=item.group,
            )
            for item in result.local
        ]
        return Rollouts.gather(shifted, [item.group for item in shifted])

    def find_mismatches(self, actor: Any) -> list[str] | None:
        self.calls.append("find_mismatches")
        return self.mismatches


def single_update_config(**sections: Any) -> Any:
    """GRPO with one update per step, which needs no old log-probs."""
    tree = {
        "algorithm": "grpo",
        "kl": {"apply_to": "none"},
        "rollout": {"samples_per_prompt": 8, "verify_weights_every": 3},
    }
    return from_dict(tree | {"model": {"dtype": "float32"}} | sections)


def test_mismatch_raises_before_training_and_names_the_layer() -> None:
    flow: Any = MismatchedFlow(single_update_config())
    controller = make_controller(flow.config)
    controller.step(flow, prompts())
    assert not flow.should_check_logprobs and "find_mismatches" not in flow.calls
    flow.should_check_logprobs, flow.logprob_error = True, 0.02  # as after the first weight sync
    before = flow.policy.table.detach().clone()
    with pytest.raises(ConfigError) as error:
        controller.step(flow, prompts())
    assert "differ by 0.02 on average" in str(error.value) and "above 0.01" in str(error.value)
    assert "Layer 1: the engines' weights differ from the trainer's (model.layers.1.mlp" in str(error.value)
    assert torch.equal(flow.policy.table.detach(), before) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("mismatches", "message"),
    [([], "All tensors of the engines equal the trainer's"), (None, "so no layer can be named")],
)
def test_mismatch_without_a_known_layer_is_explained(mismatches: Any, message: str) -> None:
    flow: Any = MismatchedFlow(single_update_config())
    flow.logprob_error, flow.mismatches = 0.5, mismatches
    with pytest.raises(ConfigError, match=message):
        make_controller(flow.config).step(flow, prompts())


def test_check_runs_once_on_a_few_episodes() -> None:
    flow: Any = MismatchedFlow(single_update_config())
    controller = make_controller(flow.config)
    for _ in range(2):
        controller.step(flow, prompts(5))
    assert len(flow.forwards) == 1  # the first step always checks
    flow.should_check_logprobs = True
    controller.step(flow, prompts(5))
    assert flow.forwards[1:] == [3 * CHECK_EPISODES]
    controller.steps, flow.should_check_logprobs = 3, True
    controller.step(flow, prompts(5))
    assert len(flow.forwards) == 3 and flow.forwards[2] > 3 * CHECK_EPISODES


def test_stale_rollouts_are_not_compared() -> None:
    """Here all rollouts are stale, so the check stays pending."""
    flow: Any = StaleFlow(config_of({}))
    flow.should_check_logprobs = True
    controller = make_controller(flow.config)
    for _ in range(4):
        controller.step(flow, prompts())
    rollouts = flow.score(flow.generate(prompts(), 8))
    flow.should_check_logprobs, flow.find_mismatches = True, lambda actor: []
    check_same_policy(flow, TrainBatch.from_rollouts(rollouts))
    assert flow.should_check_logprobs
    mixed = Turn((1, 2, 3), (-1.0,) * 3, True, 4, ((3, 2), (4, 1)))
    current = Turn((1, 2), (-1.0,) * 2, True, 4)
    prompt = Prompt("p", ())
    rollouts_with_stale = Rollouts.gather([Rollout(prompt, (Turn((9,)), turn)) for turn in (mixed, current)], version=4)
    assert current_policy_mask(TrainBatch.from_rollouts(rollouts_with_stale)).tolist() == [False] * 3 + [
        True,
        False,
        True,
        True,
    ]


def test_bound_depends_on_dtype_unless_configured() -> None:
    assert (
        logprob_diff_bound(single_update_config()),
        logprob_diff_bound(single_update_config(model={"dtype": "bfloat16"})),
    ) == (0.01, 0.3)
    configured = single_update_config(guards={"bands": {LOGPROB_DIFF: [None, 0.5]}})
    assert logprob_diff_bound(configured) == 0.5 and load_bands(configured.guards) == {}
    unbounded = single_update_config(guards={"bands": {LOGPROB_DIFF: None}})
    assert logprob_diff_bound(unbounded) is None
    flow: Any = MismatchedFlow(unbounded)
    flow.logprob_error = 3.0
    make_controller(unbounded).step(flow, prompts())
    with pytest.raises(ConfigError, match=f"guards.bands.{LOGPROB_DIFF} must be two numbers"):
        load_bands(single_update_config(guards={"bands": {LOGPROB_DIFF: 0.5}}).guards)
    with pytest.raises(ConfigError, match="guards.alarms=false disables it"):
        load_bands(single_update_config(guards={"bands": {LOGPROB_DIFF: None, "actor/entropy": [0, 1]}}).guards)


def test_describe_layers() -> None:
    assert describe_layers(["model.layers.12.a", "model.layers.3.b", "model.layers.3.c"]) == "Layers 3, 12"
    assert describe_layers(["model.norm.weight", "model.layers.0.a"]) == "Layer 0 and tensors outside the layers"
