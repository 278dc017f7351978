"""Train a tiny Kimi K2 with INT4 experts in a layout; compare with the same training without rounding.

Arguments: a folder with `int4` and its dequantised copy `dense` (see `int4_folder`), layouts as in `ranks_layout.py`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)

import tiny  # noqa: E402
from ranks_layout import parse_layout, policy_loss  # noqa: E402

from megarl.models import int4  # noqa: E402
from megarl.models.hf_folder import open_hf  # noqa: E402
from megarl.models.registry import load_hf_config  # noqa: E402
from megarl.parallel import ranks as parallel_ranks  # noqa: E402


def masters(model: Any) -> dict[str, torch.Tensor]:
    """Return the expert weights' fp32 masters of which this rank has all elements, by canonical name."""
    from megarl.megatron import optimizer
    from megarl.megatron.parameter_names import named_params

    names = {id(tensor): name for name, tensor in named_params(model.chunks, model.ranks.ep_rank).items()}
    found = {}
    for _, part in optimizer._dist_optimizers(model.optimizer):
        for buffer in part.gbuf_ranges:
            for bucket in (bucket for buckets in buffer.values() for bucket in buckets):
                for param, ranges in bucket["param_map"].items():
                    master = part._get_main_param_and_optimizer_states(param)["param"]
                    if ".experts." in names[id(param)] and len(master) == param.numel():
                        assert ranges["param"].start == 0
                        found[names[id(param)]] = master.detach().clone().view(param.shape)
    return found


def check(folder: Path, layout: dict[str, Any]) -> dict[str, float]:
    from megarl.megatron.trainer_model import MegatronModel

    settings = dict(tp=1, pp=1, ep=1, cp=1, etp=1) | layout
    optimizer = {"lr": 1e-2, "schedule": "constant", "warmup_fraction": 0.0}
    recompute = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    config = tiny.config(
        **settings,
        model={"dtype": "bfloat16", "megatron": recompute},
        actor_optimizer=optimizer,
    )
    ranks = parallel_ranks.create_layout(config.parallel)
    models = {}
    for name in ("int4", "dense"):
        models[name] = MegatronModel(load_hf_config(folder / name), config, ranks, "actor", total_updates=3)
        models[name].load_hf(folder / name)
    table = {param.megatron: param for param in models["int4"].params()}
    experts = [name for name in models["int4"].local_params() if table[name].expert is not None]
    weights = open_hf(folder / "dense")
    loaded = {
        name: torch.equal(tensor, weights.get_shard(table[name], *ranks.tp_size_and_rank(name in experts)))
        for name, tensor in models["int4"].local_params().items()
        if table[name].dtype is None
    }
    batch = tiny.batch()
    outputs = {name: model.forward(batch)["logprobs"] for name, model in models.items()}
    metrics = {name: model.train_step(batch, policy_loss) for name, model in models.items()}
    both = {name: masters(model) for name, model in models.items()}
    after = models["int4"].local_params()
    rounded = {name: master.bfloat16() for name, master in both["int4"].items()}
    off_grid = 0.0
    for tensor in rounded.values():
        before = tensor.clone()
        int4.round_to_grid(tensor)
        off_grid = max(off_grid, float((before != tensor).float().mean()))
    return {
        "loaded": float(all(loaded.values())),
        "same outputs": float(torch.equal(outputs["int4"], outputs["dense"])),
        "same loss": float(metrics["int4"]["actor/loss"] == metrics["dense"]["actor/loss"]),
        "same gradient": float(metrics["int4"]["actor/grad_norm"] == metrics["dense"]["actor/grad_norm"]),
        "masters": float(len(rounded)),
        "same masters": float(all(torch.equal(both["int4"][name], both["dense"][name]) for name in both["dense"])),
        "rounded": float(all(torch.equal(after[name], rounded[name]) for name in rounded)),
        "off grid": off_grid,
        "unrounded": float(any(not torch.equal(models["dense"].local_params()[n], after[n]) for n in rounded)),
    }


if __name__ == "__main__":
    source, *names = sys.argv[1:]
    parallel_ranks.initialize(tiny.config(**parse_layout(names[0])).parallel, timeout_s=120)
    print("RESULT " + json.dumps({name: check(Path(source), parse_layout(name)) for name in names}))
    parallel_ranks.shutdown()
