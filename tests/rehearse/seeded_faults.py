"""Rehearses a tiny job once for each of the faults named in argv, and prints a line of JSON for each.

A fault is a change of the configuration or, in a process of its own, of the code.
"""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from megarl.config import from_dict
from megarl.dry_run.validation import validate
from megarl.rehearse import play, rehearsal

HF: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 1024,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
JOB: dict[str, dict[str, Any]] = {
    "run": {"dir": "none", "num_rollout": 1},
    "model": {"path": "none", "dtype": "bfloat16", "megatron": RECOMPUTE},
    "parallel": {"world_size": 8, "tp": 2, "pp": 2, "ep": 2, "ranks_per_node": 8, "gpu_gb": 0.004, "host_gb": 0.03},
    "rollout": {"tp": 2, "samples_per_prompt": 2, "max_context": 1024, "max_new_tokens": 32, "concurrency": 2},
    "data": {"train": "none.jsonl", "prompts_per_step": 2},
    "train": {"max_tokens_per_gpu": 1024, "logits_chunk_size": 64, "offload": True},
    "reward": {"functions": ["megarl.rewards.gsm8k:gsm8k"]},
}
"""Two stages of four ranks, which fit."""


class Fault(NamedTuple):
    """A fault, as a change of sections of `JOB` or of code."""

    sections: dict[str, dict[str, Any]] = {}
    seed: Callable[[], None] = lambda: None


def rank() -> int:
    return int(os.environ["RANK"])


def stage() -> int:
    return rank() // 4


def wrap(owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Replace a function by one that calls `change` with the function and its arguments."""
    function = getattr(owner, name)
    setattr(owner, name, lambda *arguments, **options: change(function, *arguments, **options))


def after_update(action: Callable[[Any], None]) -> None:
    """Do something after each training step of a model, on each rank."""
    from megarl.megatron.trainer_model import MegatronModel

    def train_step(function: Any, model: Any, *arguments: Any, **options: Any) -> Any:
        result = function(model, *arguments, **options)
        action(model)
        return result

    wrap(MegatronModel, "train_step", train_step)


def on_device(size: int) -> Any:
    import torch

    return torch.zeros(size, device="meta")


# --- order


def swap_collectives() -> None:
    """A metric's sum over all ranks, and a broadcast of the learning rate."""
    import torch.distributed as dist

    def act(model: Any) -> None:
        steps = [lambda: dist.all_reduce(on_device(8)), lambda: dist.broadcast(on_device(8), 0)]
        for step in steps if stage() == 0 else reversed(steps):
            step()

    after_update(act)


def skip_on_a_rank() -> None:
    """A rank without loss tokens leaves out the sum of a metric."""
    import torch.distributed as dist

    after_update(lambda model: None if rank() == 3 else dist.all_reduce(on_device(1)))


def skip_on_a_stage() -> None:
    import torch.distributed as dist

    after_update(lambda model: dist.all_reduce(on_device(1)) if stage() else None)


def wait_for_nothing() -> None:
    import torch.distributed as dist

    after_update(lambda model: dist.all_reduce(on_device(1), async_op=True))


def create_group_on_a_stage() -> None:
    import torch.distributed as dist

    after_update(lambda model: None if stage() else dist.new_group([0, 1, 2, 3], group_desc="METRICS"))


def create_groups_in_another_order() -> None:
    import torch.distributed as dist

    def act(model: Any) -> None:
        for name in ("FIRST", "SECOND") if stage() == 0 else ("SECOND", "FIRST"):
            dist.new_group(list(range(8)), group_desc=name)

    after_update(act)


def pad_on_a_rank() -> None:
    """A tensor parallel rank pads its rows to a multiple of 128 before it gathers them, and others do not."""
    import torch

    from megarl.rehearse import te_modules

    def gather(function: Any, x: Any, group: Any) -> Any:
        if rank() % 2 and not x.requires_grad:
            total = function(torch.empty(len(x) + 128, *x.shape[1:], dtype=x.dtype, device="meta"), group)
            return total[: len(x) * group.size()]
        return function(x, group)

    wrap(te_modules, "_gather_rows", gather)


def send_before_receiving() -> None:
    """Stages post sends and receives by themselves instead of in a batch."""
    import torch.distributed as dist
    from megatron.core.pipeline_parallel import p2p_communication

    def exchange(
        *, tensor_send_prev: Any, tensor_recv_prev: Any, tensor_send_next: Any, tensor_recv_next: Any, group: Any,
        prev_pipeline_rank: int, next_pipeline_rank: int,
    ) -> list[Any]:  # fmt: skip
        calls = [
            (dist.isend, tensor_send_prev, prev_pipeline_rank),
            (dist.isend, tensor_send_next, next_pipeline_rank),
            (dist.irecv, tensor_recv_prev, prev_pipeline_rank),
            (dist.irecv, tensor_recv_next, next_pipeline_rank),
        ]
        return [call(tensor, peer, group=group) for call, tensor, peer in calls if tensor is not None]

    p2p_communication._batched_p2p_ops = exchange


def skip_warm_up() -> None:
    """The pipeline's group is first used by its first two stages."""
    from megarl.parallel import ranks

    ranks.warm_up_group = lambda group=None: None


def exchange_with_other_stage(first: list[tuple[str, int]], second: list[tuple[str, int]]) -> Callable[[], None]:
    """Return a seed after which each rank exchanges tensors of these sizes in a batch; first: by the first stage."""

    def seed() -> None:
        import torch.distributed as dist

        def act(model: Any) -> None:
            peer = (rank() + 4) % 8
            operations = [
                dist.P2POp(getattr(dist, name), on_device(size), peer) for name, size in (second if stage() else first)
            ]
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()

        after_update(act)

    return seed


def route_to_other_topk() -> None:
    """An expert parallel rank sends its tokens to one expert each, while others expect them from two."""
    from megarl.rehearse import megatron_values

    wrap(
        megatron_values,
        "tokens_per_expert",
        lambda function, tokens, topk, *rest: function(tokens // (1 + rank() % 2) // 2 * 2, topk, *rest),
    )


def run_one_more_micro_batch() -> None:
    from megarl.megatron import trainer_model

    def get_schedule(function: Any) -> Any:
        schedule = function()

        def run(*, num_microbatches: int, data_iterator: Any, **options: Any) -> Any:
            results = schedule(
                num_microbatches=num_microbatches + stage(), data_iterator=_extend(data_iterator), **options
            )
            return results[:num_microbatches]  # the trainer would notice one result more

        return run

    wrap(trainer_model, "get_forward_backward_func", get_schedule)


def _extend(iterators: Any) -> Any:
    def repeat_last(iterator: Any) -> Any:
        item = None
        for item in iterator:
            yield item
        yield item

    return [repeat_last(item) for item in iterators] if isinstance(iterators, list) else repeat_last(iterators)


# --- memory


def keep_every_step() -> None:
    """Copies of weights and gradients for a diagnosis, of which the last would do."""
    steps: list[Any] = []

    def act(model: Any) -> None:
        for param in (param for chunk in model.chunks for param in chunk.parameters()):
            steps.append((param.detach().float(), param.main_grad.clone()))

    after_update(act)


FAULTS = {
    "nothing": Fault(),
    "swapped collectives": Fault(seed=swap_collectives),
    "a collective that a rank skips": Fault(seed=skip_on_a_rank),
    "a collective that a stage skips": Fault(seed=skip_on_a_stage),
    "a group of a stage alone": Fault(seed=create_group_on_a_stage),
    "groups in another order": Fault(seed=create_groups_in_another_order),
    "padding on a rank": Fault(seed=pad_on_a_rank),
    "no wait": Fault(seed=wait_for_nothing),
    "blocked sends": Fault(seed=send_before_receiving),
    "a send as first use": Fault({"parallel": {"pp": 4, "ep": 1}}, skip_warm_up),
    "an unreceived message": Fault(seed=exchange_with_other_stage([("isend", 8)], [])),
    "an unsent message": Fault(seed=exchange_with_other_stage([], [("irecv", 8)])),
    "swapped messages": Fault(
        seed=exchange_with_other_stage([("isend", 8), ("isend", 16)], [("irecv", 16), ("irecv", 8)])
    ),
    "splits that disagree": Fault(seed=route_to_other_topk),
    "one more micro-batch": Fault(seed=run_one_more_micro_batch),
    "long responses": Fault(
        {"rollout": {"max_context": 4096}, "train": {"max_tokens_per_gpu": 4096}, "model": {"megatron": {}}}
    ),
    "logits at once": Fault({"train": {"logits_chunk_size": 1 << 20}}),
    "no room for the engine": Fault({"train": {"offload": False}, "rollout": {"concurrency": 32}}),
    "a leak": Fault(seed=keep_every_step),
    "host memory": Fault({"parallel": {"host_gb": 0.01}}),
    "uneven stages": Fault(
        {"model": {"megatron": RECOMPUTE | {"num_layers_in_first_pipeline_stage": 1}}, "parallel": {"gpu_gb": 1.0}}
    ),
}


def rehearse(name: str, folder: Path) -> dict[str, Any]:
    """Rehearse the job with a fault, and return what `--rehearse` would."""
    start = time.monotonic()
    fault, job = FAULTS[name], copy.deepcopy(JOB)
    job["model"]["hf_config"], job["run"]["dir"] = str(folder / "config.json"), str(folder / "run")
    for section, keys in fault.sections.items():
        job[section] |= keys
    config = from_dict({"algorithm": "grpo"} | job)
    report = validate(config, dry_run=True)
    config = report.resolve(config)
    fault.seed()
    result = rehearsal.rehearse(config, report, num_processes=1)
    sizes = config.parallel.gpu_gb, config.parallel.host_gb
    return {
        "name": name,
        "faults": result.faults,
        "fits": result.fits(*sizes),
        "text": rehearsal.render(result, *sizes),
        "seconds": time.monotonic() - start,
    }


def rehearse_in_child(name: str, folder: Path) -> None:
    try:
        text = json.dumps(rehearse(name, folder))
    except Exception:
        text = json.dumps({"name": name, "error": traceback.format_exc()})
    Path(folder, f"{list(FAULTS).index(name)}.result").write_text(text)


def main(names: list[str]) -> None:
    play.prepare()
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        (folder / "config.json").write_text(json.dumps(HF))
        running: list[Any] = []
        for name in names:
            if len(running) == 2:
                running.pop(0).join()
            running.append(context.Process(target=rehearse_in_child, args=(name, folder)))
            running[-1].start()
        for process in running:
            process.join()
        for file in sorted(folder.glob("*.result")):
            print(file.read_text(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or list(FAULTS))
