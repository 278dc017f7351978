"""Megatron's training step of a small MoE: losses of some steps on one batch, each variant in a separate process.

The reference is fp32 on the CPU from the same weights. bf16 rounds, so its curve is close to the reference, not equal.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import zlib
from typing import Any

from gpu.found import CheckResult, make_result

STEPS = 12
TOLERANCE = 0.03
"""Maximum distance of bf16's curve from fp32's, as a share of the first loss."""
COMMON = 40
"""Tokens of the common prefix of `prefixes`."""
MODEL: dict[str, Any] = dict(
    architectures=["Qwen3MoeForCausalLM"],
    vocab_size=512,
    hidden_size=64,
    head_dim=16,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=128,
    moe_intermediate_size=64,
    num_experts=8,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    decoder_sparse_step=1,
    mlp_only_layers=[],
    num_hidden_layers=2,
    max_position_embeddings=1024,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    tie_word_embeddings=False,
)


def curve(device: str, **settings: Any) -> list[float]:
    """Return losses of `STEPS` steps on one batch.

    dtype; local: use Megatron's local modules; replay: seed of the replayed experts; megatron: further fields; shares:
    give sequences a common prefix, and compute it once if true. Raises RuntimeError with the process's last line.
    """
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    command = [sys.executable, "-W", "ignore", "-m", "gpu.training", json.dumps(settings)]
    process = subprocess.run(command, env={**os.environ, **hidden}, capture_output=True, text=True, timeout=280)
    results = [line for line in process.stdout.splitlines() if line.startswith("RESULT ")]
    if process.returncode or not results:
        lines = process.stderr.strip().splitlines() or ["no output"]
        raise RuntimeError(f"{settings} on {device}: {lines[-1][:400]}")
    return list(json.loads(results[-1].removeprefix("RESULT ")))


def compare_curves(losses: list[float], reference: list[float]) -> CheckResult:
    """Check that both curves fall, and stay close to each other."""
    gaps = [abs(a - b) / reference[0] for a, b in zip(losses, reference, strict=True)]
    gap = math.nan if any(map(math.isnan, gaps)) else max(gaps)  # `max` does not propagate NaN reliably
    faults = [f"the loss differs by {gap:.1%} of the first from the truth's"] if not gap <= TOLERANCE else []
    if not losses[-1] < 0.9 * losses[0]:
        faults.append(f"the loss does not fall: {losses[0]:.3f} to {losses[-1]:.3f}")
    figures = {"first loss": losses[0], "last loss": losses[-1], "fp32 last loss": reference[-1], "largest gap": gap}
    return make_result(faults, f"loss {losses[0]:.3f} to {losses[-1]:.3f}, within {gap:.2%} of the truth's", figures)


def local(device: str) -> CheckResult:
    return compare_curves(curve(device, dtype="bfloat16", local=True), curve("cpu", dtype="float32"))


def engine(device: str) -> CheckResult:
    return compare_curves(curve(device, dtype="bfloat16"), curve("cpu", dtype="float32"))


def fp8(device: str) -> CheckResult:
    """Compare FP8 with bf16 on the same device; the model's widths are multiples of 16, as FP8 products require."""
    return compare_curves(curve(device, dtype="bfloat16", megatron={"fp8": "hybrid"}), curve(device, dtype="bfloat16"))


def replay(device: str) -> CheckResult:
    """Compare with the same experts replayed for each token, other than the router would choose; the replay must change
    the losses."""
    reference = curve("cpu", dtype="float32", replay=3)
    result = compare_curves(curve(device, dtype="bfloat16", local=True, replay=3), reference)
    if result.state == "passed" and reference[0] == curve("cpu", dtype="float32")[0]:
        return make_result(["given experts change nothing"], "")
    return result


def prefixes(device: str) -> CheckResult:
    """Compare with whole sequences, of which all but two begin with the same tokens."""
    return compare_curves(curve(device, dtype="bfloat16", shares=True), curve("cpu", dtype="float32", shares=False))


def use_local_modules() -> None:
    """Use Megatron's local modules instead of Transformer Engine's on a GPU, with one MLP per expert."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.moe import moe_utils

    from megarl.cpu.megatron_modules import adapt_local_spec
    from megarl.megatron import build

    # The router asks whether it is None, but it is undefined where Transformer Engine is missing.
    vars(moe_utils).setdefault("te_general_gemm", None)
    original = build.transformer_config

    def without_grouped(*arguments: Any) -> Any:
        settings = original(*arguments)
        settings.moe_grouped_gemm = False
        return settings

    def local_spec(settings: Any, _: Any, vp_stage: int | None, __: bool) -> Any:
        options = dict(use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp_stage)
        return adapt_local_spec(get_gpt_decoder_block_spec(settings, **options))

    vars(build).update(transformer_config=without_grouped, _layer_spec=local_spec)


def measure(settings: dict[str, Any]) -> None:
    """Run as a separate process."""
    import torch

    if not torch.cuda.is_available():
        # Their optimizers and kernels, which Megatron prefers where they are installed, do not run on the CPU.
        sys.modules.update(dict.fromkeys(("transformer_engine", "apex")))  # type: ignore[arg-type]  # ImportError

    from megarl.config import from_dict
    from megarl.megatron.trainer_model import MegatronModel
    from megarl.parallel import ranks
    from megarl.types import ModelOutput, TokenLoss, TrainBatch
    from megarl.utils.addresses import free_port

    os.environ.setdefault("MASTER_PORT", str(free_port()))
    optimizer = dict(lr=3e-3, schedule="constant", warmup_fraction=0.0, weight_decay=0.0)
    tree = {
        "model": {"dtype": settings["dtype"], "megatron": settings.get("megatron", {})},
        "parallel": {"world_size": 1},
        "train": {
            "max_tokens_per_gpu": 512,
            "routing_replay": "replay" in settings,
            "share_prefixes": settings.get("shares", False),
        },
        "actor_optimizer": optimizer,
    }
    config = from_dict(tree)
    place = ranks.initialize(config.parallel, timeout_s=200)
    if settings.get("local"):
        use_local_modules()
    model = MegatronModel(MODEL, config, place, "actor", total_updates=STEPS)
    for name, tensor in model.local_params().items():  # initialised on the CPU by name: the same on each device
        drawn = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
        tensor.copy_(0.05 * drawn) if tensor.dim() > 1 else tensor.fill_(1.0)
    model.optimizer.reload_model_params()

    lengths = [64, 200, 17, 128, 90, 13]
    starts, total = torch.tensor([0, *lengths]).cumsum(0), sum(lengths)
    mask = torch.ones(total, dtype=torch.bool)
    mask[starts[:-1]] = False
    tokens = torch.randint(0, 512, (total,), generator=torch.Generator().manual_seed(2))
    if "shares" in settings:
        for start in starts[:-1][torch.tensor(lengths) > COMMON]:
            tokens[start : start + COMMON] = torch.arange(COMMON)
    zeros = torch.zeros(total)
    batch = TrainBatch(tokens, starts, mask, torch.arange(len(lengths)), torch.zeros(len(lengths)), zeros)
    batch = batch.with_(loss_weights=mask / mask.sum()).with_prefixes()
    if "replay" in settings:
        generator = torch.Generator().manual_seed(settings["replay"])
        layers, experts = MODEL["num_hidden_layers"], MODEL["num_experts"]
        experts_by_token = (
            torch.rand(total, layers, experts, generator=generator).topk(MODEL["num_experts_per_tok"]).indices
        )
        records = experts_by_token.to(torch.uint8).split(lengths)
        batch = batch.with_(routing=tuple(records))

    def loss(output: ModelOutput, _: TrainBatch) -> TokenLoss:
        assert output.logprobs is not None
        return TokenLoss(-output.logprobs)

    losses = []
    for _ in range(STEPS):
        step = model.train_step(batch, loss)
        losses.append(step["actor/loss"])
    print("RESULT " + json.dumps(losses), flush=True)
    ranks.shutdown()


if __name__ == "__main__":
    measure(json.loads(sys.argv[1]))
