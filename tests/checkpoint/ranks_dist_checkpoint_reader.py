"""Train and save a tiny model in one layout, or restore another layout's checkpoint and save it again.

Arguments: family, role, layout (tp=2,pp=2), settings as JSON, folder to restore from ("" for none), folder to save to.
The settings include the number of layers, which must suit every layout.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "megatron"))
torch.set_num_threads(1)

import reference  # noqa: E402
import tiny  # noqa: E402

from megarl.megatron.dist_checkpoint import restore_model  # noqa: E402
from megarl.megatron.trainer_model import MegatronModel  # noqa: E402
from megarl.models.layout_algebra import shard  # noqa: E402
from megarl.parallel import ranks as parallel_ranks  # noqa: E402
from megarl.types import ModelOutput, TokenLoss, TrainBatch  # noqa: E402


def policy_loss(output: ModelOutput, batch: TrainBatch) -> TokenLoss:
    assert output.logprobs is not None and batch.advantages is not None
    return TokenLoss(-output.logprobs * batch.advantages)


def value_loss(output: ModelOutput, batch: TrainBatch) -> TokenLoss:
    assert output.values is not None and batch.returns is not None
    return TokenLoss((output.values - batch.returns) ** 2)


def main(family: str, role: str, layout: str, settings: str, source: str, target: str) -> None:
    config_tree: dict[str, Any] = json.loads(settings)
    tiny.HF[family]["num_hidden_layers"] = config_tree.pop("layers", tiny.HF[family]["num_hidden_layers"])
    sizes = dict(part.split("=") for part in layout.split(",") if part)
    adam = {"lr": 0.01, "schedule": "constant", "warmup_fraction": 0.0}
    sections = {"actor_optimizer": adam, "critic": {"optimizer": adam}, **config_tree}
    config = tiny.config(
        **{name: int(size) for name, size in sizes.items()}, world=int(os.environ["WORLD_SIZE"]), **sections
    )
    layout_ranks = parallel_ranks.initialize(config.parallel, timeout_s=120)
    model = MegatronModel(tiny.HF[family], config, layout_ranks, role, total_updates=5)  # type: ignore[arg-type]
    if source:
        restore_model(model, Path(source))
    else:
        weights = reference.Trainer(family, role, config.train.mtp_loss_coef).tensors()
        weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
        model.load_shards(lambda param, parts, part: shard(param, weights, parts, part))
        for _ in range(2):
            model.train_step(tiny.shard_batch(tiny.batch()), policy_loss if role == "actor" else value_loss)
    tiny.save_model(model, Path(target))
    updates = int(model.scheduler.num_steps)
    print("RESULT", json.dumps({"updates": updates, "lr": float(model.scheduler.get_lr({}))}), flush=True)
    parallel_ranks.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
