"""`check_replay`: recorded rollouts must match the configuration that replays them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.config import Config, ConfigError, from_dict
from megarl.models.registry import load_hf_config
from megarl.observe.replayed_rollouts import ReplaySource, check_replay, needs_trainer_columns
from megarl.observe.rollout_log import part_file, write_part
from megarl.types import Prompt, Rollout, SamplingMask, Turn

pytestmark = pytest.mark.alone

HF = load_hf_config(Path(__file__).resolve().parents[2] / "configs/models/qwen3_30b_a3b.json")
"""48 layers with experts, 8 of 128 for a token."""


def make_rollout(group: int = 0, episode: int = -1, **records: Any) -> Rollout:
    turns = Turn((1, 2, 3)), Turn((7, 8), np.zeros(2, np.float32), is_action=True)
    return Rollout(Prompt("p", ()), turns, group=group, episode=episode, **records)


def write_rollouts(run_dir: Path, rollouts: list[Rollout], step: int = 1, vocab_hash: str = "") -> None:
    file = part_file(run_dir, step, 0)
    write_part(file, step, len(rollouts), range(len(rollouts)), rollouts, vocab_hash=vocab_hash)


def config(run_dir: Path, replay: str = "", **sections: Any) -> Config:
    """A run of one step with one prompt and one sample."""
    rollout = {"replay": replay or str(run_dir), "samples_per_prompt": 1, "max_context": 64, "max_new_tokens": 8}
    tree: dict[str, Any] = {"run": {"num_rollout": 1}, "data": {"prompts_per_step": 1}, "rollout": rollout}
    return from_dict(tree | {"rollout": rollout | sections.pop("rollout", {})} | sections)


def test_parses_the_run_and_its_first_step() -> None:
    assert [ReplaySource.parse("a/run").recorded_step(step) for step in (1, 2)] == [1, 2]
    assert (
        ReplaySource.parse("a/run@7") == ReplaySource(Path("a/run"), 7)
        and ReplaySource.parse("a/run@7").recorded_step(3) == 9
    )
    assert ReplaySource.parse("a@b/run") == ReplaySource(Path("a@b/run"))
    with pytest.raises(ConfigError, match="rollout.replay=run@0: steps count from 1"):
        ReplaySource.parse("run@0")


def test_folder_name_may_contain_an_at_sign(tmp_path: Path) -> None:
    (tmp_path / "run@7").mkdir()
    assert ReplaySource.parse(f"{tmp_path}/run@7") == ReplaySource(tmp_path / "run@7")


def test_requires_only_the_replayed_steps(tmp_path: Path) -> None:
    write_rollouts(tmp_path, [make_rollout()], step=5)
    check_replay(config(tmp_path, f"{tmp_path}@5"), HF)
    check_replay(config(tmp_path, f"{tmp_path}@5", run={"num_rollout": 90}), HF, max_step=1)
    with pytest.raises(ConfigError, match=r"no rollouts of step 1 \(step_000001\), it has steps 5 to 5: .*@5 begins"):
        check_replay(config(tmp_path), HF)
    with pytest.raises(ConfigError, match=r"no rollouts of step 6 .*, it has steps 5 to 5: lower run.num_rollout=2"):
        check_replay(config(tmp_path, f"{tmp_path}@5", run={"num_rollout": 2}), HF)


def test_rejects_another_tokenizer_and_out_of_vocabulary_tokens(tmp_path: Path) -> None:
    write_rollouts(tmp_path, [make_rollout()], vocab_hash="a" * 64)
    for digest in ("", "a" * 64):
        check_replay(config(tmp_path), HF, digest)
    with pytest.raises(ConfigError, match="was recorded with another tokenizer than that of model.path"):
        check_replay(config(tmp_path), HF, "b" * 64)
    with pytest.raises(ConfigError, match="has the token 8, and the model of model.path has 8 tokens"):
        check_replay(config(tmp_path), {**HF, "vocab_size": 8})


def test_routing_replay_requires_recorded_routing(tmp_path: Path) -> None:
    """Layers and experts must match the model; aborted rollouts are exempt."""
    routing_replay = {"train": {"routing_replay": True}}
    assert needs_trainer_columns(config(tmp_path, **routing_replay)) and not needs_trainer_columns(config(tmp_path))
    write_rollouts(tmp_path, [make_rollout(routing=torch.zeros((4, 48, 8), dtype=torch.uint8))])
    check_replay(config(tmp_path, **routing_replay), HF)
    write_rollouts(tmp_path, [make_rollout(routing=torch.zeros((4, 47, 8), dtype=torch.uint8))])
    with pytest.raises(ConfigError, match="has that of 47 layers with 8 experts each, and this model has 48 layers wi"):
        check_replay(config(tmp_path, **routing_replay), HF)
    write_rollouts(tmp_path, [make_rollout()])
    check_replay(config(tmp_path), HF)
    with pytest.raises(ConfigError, match="row 0, has no routing, .* or set train.routing_replay=false"):
        check_replay(config(tmp_path, **routing_replay), HF)
    write_rollouts(tmp_path, [Rollout(Prompt("p", ()), (Turn((1,)),), status="aborted")])
    check_replay(config(tmp_path, **routing_replay), HF)


def test_truncated_sampling_requires_sampling_masks(tmp_path: Path) -> None:
    truncated = {"rollout": {"top_k": 20}}
    assert needs_trainer_columns(config(tmp_path, **truncated))
    write_rollouts(tmp_path, [make_rollout(sampling_mask=SamplingMask.from_rows([[7, 9], [8]]))])
    check_replay(config(tmp_path, **truncated), HF)
    write_rollouts(tmp_path, [make_rollout()])
    with pytest.raises(ConfigError, match="row 0, has no sampling masks"):
        check_replay(config(tmp_path, **truncated), HF)


@pytest.mark.parametrize(("missing", "fits"), [(0, True), (1, False)])
def test_step_needs_one_episode_per_sample(tmp_path: Path, missing: int, fits: bool) -> None:
    """Per prompt three episodes: three branches, one numbered rollout, one plain rollout."""
    rollouts = [make_rollout(group, episode=number) for group in range(2) for number in (4, 4, 4, 5, -1)]
    write_rollouts(tmp_path, rollouts[missing * 4 :])
    tree: dict[str, Any] = {"run": {"num_rollout": 1}, "data": {"prompts_per_step": 2}}
    tree["rollout"] = {"replay": str(tmp_path), "samples_per_prompt": 3, "max_context": 64, "max_new_tokens": 8}
    if fits:
        check_replay(from_dict(tree), HF)
        return
    with pytest.raises(ConfigError, match="holds 4 rollouts of 2 prompts, not 3 of each of 2"):
        check_replay(from_dict(tree), HF)


@pytest.mark.parametrize(
    ("sizes", "prompts", "fits"),
    [
        ((4, 4, 4), 3, True),
        ((4, 4, 4, 4, 4), 3, True),
        ((4, 4, 4, 2, 1), 3, True),  # another generation may have other sample counts
        ((4, 0, 4, 4), 3, True),  # the algorithm replaced a group of the first generation
        ((4, 0, 4), 3, False),
        ((4, 4, 2, 4), 3, False),
        ((4, 4, 4, 4), 4, False),  # recorded with more prompts per step
    ],
)
def test_step_may_contain_several_generations(tmp_path: Path, sizes: tuple[int, ...], prompts: int, fits: bool) -> None:
    """Groups beyond prompts_per_step belong to further generations, if the recorded run had as many prompts."""
    write_rollouts(tmp_path, [make_rollout(group) for group, size in enumerate(sizes) for _ in range(size)])
    (tmp_path / "config.yaml").write_text(f"data: {{prompts_per_step: {prompts}}}")
    tree = {"run": {"num_rollout": 1}, "data": {"prompts_per_step": 3}, "rollout": {"replay": str(tmp_path)}}
    tree["rollout"] |= {"samples_per_prompt": 4, "max_context": 64, "max_new_tokens": 8}
    if fits:
        check_replay(from_dict(tree), HF)
        return
    with pytest.raises(ConfigError, match="it is of another configuration"):
        check_replay(from_dict(tree), HF)
