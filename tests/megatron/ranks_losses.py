"""One layout: policy losses under all aggregations, with metrics and gradients, compared with transformers and torch.

Argument: layout (tp=2,cp=2,ep=2). Sequences are distributed as in training and micro-batches are small; the reference
is one process with the whole batch. Prints the largest differences.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)

import reference  # noqa: E402
import tiny  # noqa: E402
from ranks_layout import gather, parse_layout, shard_of_gradient  # noqa: E402

from megarl.algorithms.losses import positive_nll  # noqa: E402
from megarl.algorithms.policy_losses import POLICY_LOSSES  # noqa: E402
from megarl.config import Config  # noqa: E402
from megarl.controllers.mini_batches import split_mini_batches  # noqa: E402
from megarl.controllers.policy_gradient import policy_loss, policy_loss_columns  # noqa: E402
from megarl.models.layout_algebra import shard  # noqa: E402
from megarl.parallel import ranks as parallel_ranks  # noqa: E402
from megarl.types import ModelOutput, TokenLoss, TrainBatch, reads  # noqa: E402

FAMILY = "qwen3_moe"
OPTIONS: dict[str, dict[str, float]] = {
    "gspo": {"clip_low": 0.05, "clip_high": 0.05},
    "gspo_token": {"clip_low": 0.05, "clip_high": 0.05},
    "gmpo": {"clip_low": 0.2, "clip_high": 0.2},
    "cispo": {"max_ratio": 1.2},
    "clip_cov": {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.1, "clip_cov_ub": 100.0},
    "kl_cov": {"kl_cov_ratio": 0.2},
}


def make_config(layout: dict[str, int], policy: str, mean: str) -> Config:
    loss = {"policy_loss": policy, "agg_mode": mean, "scale_factor": 11, "options": OPTIONS.get(policy, {})}
    optimizer = {"lr": 1e-4, "max_grad_norm": 0.0, "schedule": "constant", "warmup_fraction": 0.0}
    return tiny.config(**layout, loss=loss, actor_optimizer=optimizer, kl={"apply_to": "loss"})


def batches(logprobs: torch.Tensor) -> dict[str, TrainBatch]:
    """Return batches with old log-probs, without them as for a single update, and with stale tokens."""
    generator = torch.Generator().manual_seed(7)
    batch = tiny.batch()
    noise = torch.randn(3, len(logprobs), generator=generator) * 0.3
    batch = batch.with_(
        sequence_reward=torch.tensor([1.0, -1.0, 0.0, 2.0, 1.0, -1.0, 1.0]),
        ref_logprobs=logprobs + noise[0],
        rollout_logprobs=logprobs + noise[1],
    )
    is_stale = (torch.rand(len(logprobs), generator=generator) < 0.3).int()
    return {
        "": batch.with_(old_logprobs=logprobs + noise[2]),
        "single": batch,
        "stale": batch.with_(staleness=is_stale),
    }


def check(layout: dict[str, int]) -> dict[str, dict[str, float]]:
    from megarl.megatron.trainer_model import MegatronModel

    trainer = reference.Trainer(FAMILY, "actor")
    weights = {name: tensor.clone() for name, tensor in trainer.tensors().items()}
    logprobs, entropy = reference.policy(trainer.model, tiny.batch())
    expected_output = ModelOutput(logprobs=logprobs, entropy=entropy.detach())
    params = dict(trainer.model.named_parameters())
    model = MegatronModel(tiny.HF[FAMILY], make_config(layout, "ppo", "token-mean"), RANKS, "actor", total_updates=100)
    results = {}
    cases = [
        (name, mean, "")
        for name in POLICY_LOSSES
        for mean in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")
    ]
    cases += [(name, "token-mean", "stale") for name, loss in POLICY_LOSSES.items() if loss.mark is None]
    cases.append(("ppo", "token-mean", "single"))
    results_by_case: dict[tuple[str, str], dict[str, float]] = {}
    for name, mean, kind in cases:
        config = make_config(layout, name, mean)
        full = batches(logprobs.detach())[kind]

        @reads(*policy_loss_columns(config, full))
        def loss_fn(output: ModelOutput, part: TrainBatch, config: Config = config) -> TokenLoss:
            result, nll = policy_loss(output, part, config, 0.1), positive_nll(output.logprobs, part)
            return TokenLoss(result.loss + 0.1 * nll.loss, result.metrics | nll.metrics, result.sequence_metrics)

        (mini,) = split_mini_batches(full, config, seed=3)
        expected = loss_fn(expected_output, mini)
        value = (mini.loss_weights * expected.loss).sum()
        expected_metrics = {key: float(figure) for key, figure in expected.reduce_metrics(mini).items()}
        grads = dict(zip(params, torch.autograd.grad(value, list(params.values()), retain_graph=True), strict=True))

        model.load_shards(lambda param, tp, rank: shard(param, weights, tp, rank))
        (mini_batch,) = split_mini_batches(tiny.shard_batch(full), config, seed=3)
        metrics = model.train_step(mini_batch, loss_fn)
        result = gather(model, shard_of_gradient(model), add=True)
        expected_grads = tiny.split_experts(grads)
        assert result.keys() == expected_grads.keys()
        grad_scale = max(float(grad.abs().max()) for grad in expected_grads.values())
        gap = max(float((result[key] - expected_grads[key]).abs().max()) for key in expected_grads)
        results[f"{name} {mean} {kind}"] = {
            "loss": abs(metrics["actor/loss"] - float(value)) / max(abs(float(value)), 1e-3),
            "gradients": gap / grad_scale,
            "metrics": max(abs(metrics[key] - expected_metrics[key]) for key in expected_metrics),
            "marked": float(expected_metrics.get("actor/cov_frac", -1.0)),
            # Metrics do not depend on the aggregation of the loss.
            "metric change": max(
                abs(results_by_case.setdefault((name, kind), expected_metrics)[key] - expected_metrics[key])
                for key in expected_metrics
            ),
        }
    return results


if __name__ == "__main__":
    LAYOUT = parse_layout(sys.argv[1])
    RANKS: Any = parallel_ranks.initialize(tiny.config(**LAYOUT).parallel, timeout_s=120)
    print("RESULT " + json.dumps(check(LAYOUT)))
    parallel_ranks.shutdown()
