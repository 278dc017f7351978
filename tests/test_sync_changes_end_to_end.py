"""Weight syncs that send changes only, between two nodes of one rank, in BF16."""

from __future__ import annotations

from pathlib import Path

from training_run import make_folder, read_steps, train

SETTINGS = (
    *("rollout.sync_changes_only=true", "rollout.verify_weights_every=1", "parallel.ranks_per_node=1"),
    *("model.dtype=bfloat16", "run.num_rollout=3", "run.save_every=0", "run.eval_every=0", "run.export=false"),
    *("data.prompts_per_step=4", "rollout.samples_per_prompt=4", "actor_optimizer.lr=1e-5"),
)


def test_engines_get_the_trainers_bits_from_changes(tmp_path: Path, host: str) -> None:
    """Every sync verifies all pieces: a run stops if a box of an engine's tensors differs from the trainer's."""
    train(make_folder(tmp_path / "quickstart", "qwen3_moe"), tmp_path / "run", *SETTINGS, host=host)
    steps = read_steps(tmp_path / "run")
    sent = [step["weight_sync/sent_frac"] for step in steps]
    assert sent[0] == 1.0 and len(sent) == 3 and all(0 < fraction < 0.5 for fraction in sent[1:]), sent
    gigabytes = [step["weight_sync/network_gb"] for step in steps]
    assert gigabytes[1] < 0.5 * gigabytes[0] and all(step["actor/grad_norm"] > 0 for step in steps)
