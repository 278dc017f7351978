"""Train models at once, each on a subset of the job's ranks, and print their metrics and digests.

Arguments: a folder for checkpoints, then a JSON object for each model: `name`, `members`, `layout` (as `tiny.config`),
`family`, `role`, `steps`; optionally `origin`, the name of the model whose checkpoint it resumes from, and `after`, the
name of a model that must be done before this one starts, without communication between the two. Prints for each model
of this rank the metrics of every step and digests of its weights and states, its forward pass and its export.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "megatron"))
torch.set_num_threads(1)

import reference  # noqa: E402
import tiny  # noqa: E402
from ranks_layout import ADAM, LOSSES  # noqa: E402

from megarl.models.layout_algebra import shard  # noqa: E402
from megarl.parallel import ranks, rendezvous  # noqa: E402

FOLDER = Path(sys.argv[1])


def digest(tensors: Iterable[torch.Tensor]) -> str:
    result = hashlib.sha256()
    for tensor in tensors:
        result.update(tensor.detach().flatten().view(torch.uint8).numpy().tobytes())
    return result.hexdigest()


def build(part: dict[str, Any], layout_ranks: ranks.Ranks) -> Any:
    from megarl.megatron.trainer_model import MegatronModel

    family, role, layout = part["family"], part["role"], part["layout"]
    megatron: dict[str, Any] = dict(tiny.AUX_LOSSES) if "moe_intermediate_size" in tiny.HF[family] else {}
    if layout.get("pp", 1) > 1 and tiny.HF[family]["num_hidden_layers"] == 3:
        megatron["num_layers_in_first_pipeline_stage"] = 1
    sections: dict[str, Any] = {"actor_optimizer": ADAM, "critic": {"optimizer": ADAM}}
    config = tiny.config(world=len(layout_ranks.members), **layout, **sections, model={"megatron": megatron})
    weights = {name: tensor.clone() for name, tensor in reference.Trainer(family, role).tensors().items()}
    model = MegatronModel(tiny.HF[family], config, layout_ranks, role, total_updates=9)
    model.load_shards(lambda param, tp, rank: shard(param, weights, tp, rank))
    return model


def train(part: dict[str, Any], layout_ranks: ranks.Ranks) -> dict[str, Any]:
    from megarl.checkpoint.export import gather_hf
    from megarl.megatron.dist_checkpoint import restore_model
    from megarl.megatron.optimizer import state_tensors

    while "after" in part and not (FOLDER / part["after"] / "done").exists():
        time.sleep(0.02)
    model, batch = build(part, layout_ranks), tiny.batch()
    if "origin" in part:
        restore_model(model, FOLDER / part["origin"])
    result = {"metrics": [model.train_step(batch, LOSSES[part["role"]]) for _ in range(part["steps"])]}
    result["forward"] = digest(model.forward(batch).values())
    result["states"] = digest([*model.local_params().values(), *state_tensors(model.optimizer)])
    result["export"] = digest(tensor for _, tensor in gather_hf(model.merged_params(), model.params(), layout_ranks))
    tiny.save_model(model, FOLDER / part["name"])
    if layout_ranks.role_rank == 0:
        (FOLDER / part["name"] / "done").touch()
    return result


def main() -> None:
    parts = [json.loads(text) for text in sys.argv[2:]]
    job = ranks.join(rendezvous.read_launch_env().world, timeout_s=60)
    layouts = [
        ranks.create_layout(tiny.config(world=len(part["members"]), **part["layout"]).parallel, 60, part["members"])
        for part in parts
    ]
    assert [layout_ranks is not None for layout_ranks in layouts] == [job.rank in part["members"] for part in parts]
    results: dict[str, Any] = {}
    for is_first_pass in (True, False):
        for part, layout_ranks in zip(parts, layouts, strict=True):
            if layout_ranks is not None and is_first_pass == ("origin" not in part):
                assert layout_ranks.members[layout_ranks.role_rank] == job.rank == layout_ranks.job.rank
                results[part["name"]] = train(part, layout_ranks)
        ranks.barrier()
    print("RESULT " + json.dumps(results))
    ranks.shutdown()


main()
