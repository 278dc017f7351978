"""`check_replay` and `ReplayedStep`: what a replay needs of a recording, and what it takes from it, call by call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.config import Config, ConfigError, from_dict
from megarl.config.replay_source import ReplaySource
from megarl.models.registry import load_hf_config
from megarl.observe.replayed_rollouts import ReplayedStep, check_replay, replayed_columns
from megarl.observe.rollout_log import part_file, write_part
from megarl.observe.rollout_table import StepGeneration
from megarl.types import Image, Prompt, Rollout, SamplingMask, Turn

pytestmark = pytest.mark.alone

MODELS = Path(__file__).resolve().parents[2] / "configs/models"
HF = load_hf_config(MODELS / "qwen3_30b_a3b.json")
"""48 layers with experts, 8 of 128 for a token."""
VISION = load_hf_config(MODELS / "qwen2.5_vl_7b.json")
SPARSE = load_hf_config(MODELS / "deepseek_v3_2.json") | {"index_topk": 2}
"""61 layers with an indexer, which choose two keys for a token."""


def make_rollout(group: int = 0, episode: int = -1, **records: Any) -> Rollout:
    turns = Turn((1, 2, 3)), Turn((7, 8), np.zeros(2, np.float32), is_action=True)
    return Rollout(Prompt("p", ()), turns, group=group, episode=episode, **records)


def write_rollouts(run_dir: Path, rollouts: list[Rollout], step: int = 1, vocab_hash: str = "", **options: Any) -> None:
    file = part_file(run_dir, step, 0)
    write_part(file, step, len(rollouts), range(len(rollouts)), rollouts, vocab_hash=vocab_hash, **options)


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
    assert [str(ReplaySource.parse(text)) for text in ("a/run", "a/run@7")] == ["a/run", "a/run@7"]
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
    assert replayed_columns(config(tmp_path, **routing_replay), HF) == ("routing",)
    assert replayed_columns(config(tmp_path), HF) == ()
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
    assert replayed_columns(config(tmp_path, **truncated), HF) == ("support_counts", "support_ids")
    write_rollouts(tmp_path, [make_rollout(sampling_mask=SamplingMask.from_rows([[7, 9], [8]]))])
    check_replay(config(tmp_path, **truncated), HF)
    write_rollouts(tmp_path, [make_rollout()])
    with pytest.raises(ConfigError, match="row 0, has no sampling masks"):
        check_replay(config(tmp_path, **truncated), HF)


def test_sparse_index_replay_requires_indices_beyond_the_first_keys(tmp_path: Path) -> None:
    """The last token needs no record, and the first two see all keys: the record of 5 tokens has 2."""
    sparse = config(tmp_path, train={"sparse_index_replay": True})
    assert replayed_columns(sparse, SPARSE) == ("sparse_indices",)
    write_rollouts(tmp_path, [make_rollout(sparse_indices=torch.zeros((2, 61, 2), dtype=torch.int16))])
    check_replay(sparse, SPARSE)
    write_rollouts(tmp_path, [make_rollout(sparse_indices=torch.zeros((2, 60, 2), dtype=torch.int16))])
    with pytest.raises(ConfigError, match="has that of 60 layers with 2 keys each, and this model has 61 layers"):
        check_replay(sparse, SPARSE)
    short = Rollout(Prompt("p", ()), (Turn((1, 2)), Turn((7,), np.zeros(1, np.float32), is_action=True)))
    write_rollouts(tmp_path, [short])
    check_replay(sparse, SPARSE)
    write_rollouts(tmp_path, [make_rollout()])
    with pytest.raises(ConfigError, match="row 0, has no sparse attention indices, .*train.sparse_index_replay=false"):
        check_replay(sparse, SPARSE)


def test_model_that_reads_images_requires_their_files(tmp_path: Path) -> None:
    with_image = Rollout(
        Prompt("p", ()),
        (Turn((1, 2, 3), images=(Image(b"png", num_tokens=1),)), Turn((7,), np.zeros(1, np.float32), is_action=True)),
    )
    write_rollouts(tmp_path, [with_image, make_rollout()])
    check_replay(config(tmp_path), VISION)
    assert replayed_columns(config(tmp_path), VISION) == ("image_files",)
    write_rollouts(tmp_path, [make_rollout(), with_image], save_replay_data=False)
    with pytest.raises(ConfigError, match="row 1, has images, which were not recorded: .*track.save_replay_data=true"):
        check_replay(config(tmp_path), VISION)
    check_replay(config(tmp_path), HF)
    write_rollouts(tmp_path, [make_rollout()], save_replay_data=False)
    check_replay(config(tmp_path), VISION)


def test_any_number_of_prompts_and_samples_is_replayed(tmp_path: Path) -> None:
    write_rollouts(tmp_path, [make_rollout(group) for group in (0, 0, 0, 2, 5, 5)])
    check_replay(config(tmp_path), HF)


def test_steps_of_another_stage_are_not_checked(tmp_path: Path) -> None:
    """The second step is longer than the first one's stage allows."""
    write_rollouts(tmp_path, [make_rollout()])
    write_rollouts(tmp_path, [Rollout(Prompt("p", ()), (Turn((1,) * 65),))], step=2)
    staged = config(tmp_path, run={"num_rollout": 2})
    for stage in (range(1, 2), range(0)):
        check_replay(staged, HF, stage=stage)
    for wrong in (None, range(2, 3)):
        with pytest.raises(ConfigError, match="row 0: a rollout of 65 tokens, beyond rollout.max_context=64"):
            check_replay(staged, HF, stage=wrong)


# --- a step, call by call -------------------------------------------------------------------------------------


def replayed_step(run_dir: Path, step: int = 1, replay: str = "") -> ReplayedStep:
    return ReplayedStep(config(run_dir, replay), HF, step, 0, 1)


def test_each_generation_gets_its_own_rollouts(tmp_path: Path) -> None:
    """Sampling and greedy generations are counted separately, and rollouts of no generation are left out."""
    groups = (0, 0, 1, 1, 0, 1, 5, 9)
    write_rollouts(
        tmp_path,
        [make_rollout(group) for group in groups],
        calls=[0, 0, 0, 0, 1, 1, 2, None],
        generation=StepGeneration((False, True, False), 3, {"rollout/idle_frac": 0.25}),
    )
    step = replayed_step(tmp_path)
    assert step.metrics == {"rollout/idle_frac": 0.25}
    assert [record.number for record in step.take(90, is_greedy=False)] == [0, 1, 2, 3]
    assert [record.number for record in step.take(90, is_greedy=False)] == [6]
    assert [record.number for record in step.take(90, is_greedy=True)] == [4, 5]
    with pytest.raises(
        ConfigError, match=r"replay=.*, step 1 has 2 sampling generations, and the algorithm asks for an"
    ):
        step.take(90, is_greedy=False)
    check_replay(config(tmp_path), HF, needs_greedy=True)
    write_rollouts(tmp_path, [make_rollout()], calls=[0], generation=StepGeneration((False,)))
    with pytest.raises(ConfigError, match="has no greedy answers in step 1, which algorithm=ppo needs"):
        check_replay(config(tmp_path), HF, needs_greedy=True)


@pytest.mark.parametrize(("recorded", "expected"), [("", [[0, 0, 1, 2, 3], []]), ("2", [[0, 0, 1], [2, 3]])])
def test_recordings_without_generations_are_split_by_group(
    tmp_path: Path, recorded: str, expected: list[list[int]]
) -> None:
    """The first generation has the groups of the recorded run's prompts, or all if its configuration is unknown."""
    write_rollouts(tmp_path, [make_rollout(group) for group in (0, 0, 1, 2, 3)])
    if recorded:
        (tmp_path / "config.yaml").write_text(f"data: {{prompts_per_step: {recorded}}}")
    step = replayed_step(tmp_path)
    taken = [[record.rollout.group for record in step.take(2, is_greedy=False)] for _ in range(2)]
    assert taken == expected and step.metrics == {}
    with pytest.raises(ConfigError, match="was recorded by a version that did not record greedy answers"):
        step.take(2, is_greedy=True)


def test_staleness_is_that_of_the_recorded_run(tmp_path: Path) -> None:
    """The recorded version of the first replayed step is this run's version 0."""
    for step in (5, 6):
        generation = StepGeneration((False,), step - 1)
        write_rollouts(tmp_path, [make_rollout()], step, calls=[0], generation=generation)
    trained = f"{tmp_path}@5"
    assert replayed_step(tmp_path, 1, trained).version_offset(0) == 4
    assert replayed_step(tmp_path, 2, trained).version_offset(1) == 4
    assert replayed_step(tmp_path, 6).version_offset(5) == 0  # a resumed run, whose first steps have been removed
    generated = tmp_path / "generated"  # by weights that never change
    for step in (1, 2):
        write_rollouts(generated, [make_rollout()], step, calls=[0], generation=StepGeneration((False,), 0))
    assert replayed_step(generated, 2).version_offset(1) == replayed_step(
        generated, 1, f"{generated}@2"
    ).version_offset(0)
    write_rollouts(generated, [make_rollout()], 3)  # in an earlier format
    assert replayed_step(generated, 1, f"{generated}@3").version_offset(0) == 2
