"""LoRA in several layouts compared with transformers: log-probs, gradients, one step, merging and checkpoints.

Arguments: family:role[:targets]@layout (separated by blanks, targets by +), folder for checkpoints. Prints differences.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)

import mtp  # noqa: E402
import reference  # noqa: E402
import tiny  # noqa: E402
from ranks_layout import ADAM, policy_loss, value_loss  # noqa: E402

from megarl.models.layout_algebra import shard, unshard  # noqa: E402
from megarl.models.lora_tables import MergedWeights  # noqa: E402
from megarl.parallel import ranks as parallel_ranks  # noqa: E402
from megarl.types import TrainBatch  # noqa: E402

RANK, ALPHA, MTP_COEF = 3, 6.0, 0.3
# Megatron has them in one weight.
SHARED_A = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj", "in_proj_ba": "in_proj_qkvz"}
Tensors = dict[str, torch.Tensor]


class MTPLoss(torch.nn.Module):
    """Loss of a model's multi-token prediction layers."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return mtp.loss(self.model, tokens, weights)


class Reference:
    """transformers' model with W + alpha / rank * B A in place of each W that the targets name, by autograd."""

    def __init__(self, family: str, role: str, targets: list[str]) -> None:
        self.model = tiny.hf_model(family).requires_grad_(False)
        self.base = tiny.split_experts(dict(self.model.named_parameters()))
        self.buffers = dict(self.model.named_buffers())
        self.factors: Tensors = {}
        generator = torch.Generator().manual_seed(4)
        without = (".indexer.", ".kv_b_proj.") if hasattr(self.model.config, "index_topk") else ()
        for name in filter(lambda name: has_adapter(name, targets), self.base):
            if any(part in name for part in without):
                continue
            rows, columns = self.base[name].shape
            _, a, b = factor_names(name)
            if a not in self.factors:
                self.factors[a] = (torch.randn(RANK, columns, generator=generator) * 0.2).requires_grad_()
            self.factors[b] = (torch.randn(rows, RANK, generator=generator) * 0.2).requires_grad_()
        hidden = self.model.config.hidden_size
        self.head = reference.value_head(hidden).requires_grad_() if role == "critic" else None
        self.mtp_layers = MTPLoss(self.model) if mtp.num_layers(self.model.config) else None

    def trained_params(self) -> Tensors:
        return self.factors | ({} if self.head is None else {reference.HEAD: self.head})

    def weights(self) -> Tensors:
        """Return the weights of the base model."""
        result = {name: tensor.clone() for name, tensor in (self.base | self.buffers).items()}
        result.setdefault("lm_head.weight", result["model.embed_tokens.weight"])
        return result if self.head is None else result | {reference.HEAD: self.head.detach().clone()}

    def merged_params(self) -> Tensors:
        result = dict(self.base)
        for name in self.base:
            _, a, b = factor_names(name)
            if b in self.factors:
                result[name] = self.base[name] + ALPHA / RANK * self.factors[b] @ self.factors[a]
        return result

    def outputs(self, batch: TrainBatch, adapters: bool = True) -> torch.Tensor:
        """Return log-probs of a policy or values of a critic, [T]."""
        return self._outputs(batch, adapters)[0]

    def _outputs(self, batch: TrainBatch, adapters: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        tensors = join_experts(self.merged_params() if adapters else self.base)

        def call(tokens: torch.Tensor) -> Any:
            return torch.func.functional_call(self.model, tensors, (tokens,))

        if self.head is None:
            return reference.policy(call, batch)
        trunk = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")}
        trunk_only = SimpleNamespace(
            model=lambda tokens: torch.func.functional_call(self.model.model, trunk, (tokens,))
        )
        return reference.values(trunk_only, self.head, batch), None

    def step(self, batch: TrainBatch) -> tuple[float, float]:
        """Take one AdamW step on the loss of `ranks_layout.py`; return loss and gradient norm before clipping."""
        output, entropy = self._outputs(batch, adapters=True)
        assert batch.loss_weights is not None and batch.advantages is not None and batch.returns is not None
        if entropy is None:
            loss = (batch.loss_weights * (output - batch.returns) ** 2).sum()
        else:
            loss = (batch.loss_weights * (-output * batch.advantages - 0.1 * entropy)).sum()
        minimised = loss
        if self.mtp_layers is not None:
            tensors = {f"model.{name}": tensor for name, tensor in join_experts(self.merged_params()).items()}
            for a, b in reference.sequences(batch):
                part = batch.tokens[a:b], batch.loss_weights[a:b]
                minimised = minimised + MTP_COEF * torch.func.functional_call(self.mtp_layers, tensors, part)
        minimised.backward()
        params = list(self.trained_params().values())
        norm = torch.nn.utils.clip_grad_norm_(params, ADAM["max_grad_norm"])
        adam = {name: ADAM[name] for name in ("lr", "weight_decay", "eps")}
        torch.optim.AdamW(params, betas=(ADAM["beta1"], ADAM["beta2"]), **adam).step()
        return float(loss), float(norm)


def has_adapter(name: str, targets: list[str]) -> bool:
    """Return whether an HF weight has an adapter."""
    suffixes = "_proj.weight", "_proj_with_mqa.weight", "in_proj_qkvz.weight", "in_proj_ba.weight", "mtp.fc.weight"
    if not name.endswith(suffixes):
        return False
    kind = {
        "experts.linear_fc1": ".mlp.experts." in name and not name.endswith("down_proj.weight"),
        "experts.linear_fc2": ".mlp.experts." in name and name.endswith("down_proj.weight"),
        "linear_proj": name.endswith("o_proj.weight"),
    }
    return not targets or any(kind[target] for target in targets)


def factor_names(weight: str) -> tuple[str, str, str]:
    """Return module, A and B of an HF weight; weights that share A name it after the first of them."""
    module = weight.removesuffix(".weight")
    parent, _, leaf = module.rpartition(".")
    return module, f"{parent}.{SHARED_A.get(leaf, leaf)}.lora_A.weight", f"{module}.lora_B.weight"


def join_experts(tensors: Tensors) -> Tensors:
    """Invert `tiny.split_experts`."""
    result, stacks = {}, {}
    for name, tensor in tensors.items():
        if ".mlp.experts." in name:
            prefix, _, name_suffix = name.partition(".experts.")
            stacks.setdefault(prefix, {})[name_suffix] = tensor
        else:
            result[name] = tensor
    for prefix, stack in stacks.items():
        count = len({name_suffix.partition(".")[0] for name_suffix in stack})
        if "0.gate_up_proj.weight" in stack:  # gpt-oss
            for name in ("gate_up_proj", "down_proj"):
                result[f"{prefix}.experts.{name}"] = torch.stack([stack[f"{e}.{name}.weight"].T for e in range(count)])
                result[f"{prefix}.experts.{name}_bias"] = torch.stack([stack[f"{e}.{name}.bias"] for e in range(count)])
            continue
        gate_up_pairs = [
            torch.cat([stack[f"{e}.gate_proj.weight"], stack[f"{e}.up_proj.weight"]]) for e in range(count)
        ]
        result[f"{prefix}.experts.gate_up_proj"] = torch.stack(gate_up_pairs)
        result[f"{prefix}.experts.down_proj"] = torch.stack([stack[f"{e}.down_proj.weight"] for e in range(count)])
    return result


def gather(model: Any, local: Tensors, add: bool = False) -> Tensors:
    """Gather factors and head by HF name from all ranks: sums of gradient shards, or copies, which must be equal."""
    all_tensors = parallel_ranks.all_gather_objects((model.ranks, local))
    result: Tensors = {}
    for param in [*model.adapter_params(), *(param for param in model.params() if param.hf[0].name == reference.HEAD)]:
        holders = [(owner, tensors[param.megatron]) for owner, tensors in all_tensors if param.megatron in tensors]
        shards = []
        expert = param.expert is not None
        for part in range(model.ranks.tp_size_and_rank(expert)[0]):
            copies = [tensor for owner, tensor in holders if owner.tp_size_and_rank(expert)[1] == part]
            shards.append(torch.stack(copies).sum(0) if add else copies[0])
            assert add or all(torch.equal(copy, copies[0]) for copy in copies), f"{param.megatron} differs"
        result |= unshard(param, shards)
    return result


def trained_params(model: Any) -> dict[str, torch.nn.Parameter]:
    """Return this rank's factors and head as parameters, after asserting that nothing else is trained."""
    actual = {
        param.megatron: tensor
        for layers in lora_module()._adapters(model.chunks)
        for _, param, tensor in layers.named_factors()
    }
    named_parameters = [pair for chunk in model.chunks for pair in chunk.named_parameters()]
    for name, tensor in named_parameters:
        if name.endswith("output_layer.weight") and tensor.requires_grad:
            actual["output_layer.weight"] = tensor
    assert {id(tensor) for _, tensor in named_parameters if tensor.requires_grad} == {id(t) for t in actual.values()}
    return actual


def lora_module() -> Any:
    from megarl.megatron import lora as module

    return module


def gradients(model: Any) -> Tensors:
    """Return this rank's gradients; zero where the distributed optimizer has them on another rank."""
    result = {}
    for name, tensor in trained_params(model).items():
        full = torch.zeros(tensor.numel())
        for optimizer in model.optimizer.chained_optimizers:
            if tensor in getattr(optimizer, "model_param_gbuf_map", {}):
                span = optimizer._get_model_param_range_map(tensor)["param"]
                full[span.start : span.end] = tensor.main_grad.view(-1)[span.start : span.end]  # type: ignore[attr-defined]
        result[name] = full.view(tensor.shape)
    return result


def largest_difference(actual: Tensors, expected: Tensors) -> float:
    assert actual.keys() == expected.keys(), sorted(actual.keys() ^ expected.keys())[:6]
    return max(float((actual[name] - expected[name]).abs().max()) for name in expected)


def check(family: str, role: str, targets: list[str], layout: dict[str, int], folder: str) -> dict[str, float]:
    from megarl.checkpoint.export import gather_hf
    from megarl.megatron.dist_checkpoint import restore_model
    from megarl.megatron.trainer_model import MegatronModel
    from megarl.models.lora_tables import adapted_weights, peft_tensors
    from megarl.models.registry import family_of

    sections: dict[str, Any] = {"actor_optimizer": ADAM, "critic": {"optimizer": ADAM}}
    megatron: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "uniform"}
    megatron |= {"recompute_num_layers": 1}
    if layout.get("pp", 1) > 1 and family.startswith("deepseek_v3"):  # a stage without experts
        megatron = {"num_layers_in_first_pipeline_stage": 1}
    batch, expected = tiny.batch(), Reference(family, role, targets)
    if expected.mtp_layers is not None:
        sections["train"] = {"mtp_loss_coef": MTP_COEF}
    weights, output_name = expected.weights(), "logprobs" if role == "actor" else "values"

    def build(rank: int = RANK, recompute: bool = False, layout: dict[str, int] = layout) -> Any:
        options = {"lora": {"rank": rank, "alpha": ALPHA, "target_modules": targets}, "model": {}}
        if recompute or (layout.get("pp", 1) > 1 and "recompute_granularity" not in megatron):
            options["model"] = {"megatron": megatron}
        chosen = tiny.config(**layout, **sections, **options)
        ranks = parallel_ranks.create_layout(chosen.parallel)
        model = MegatronModel(tiny.HF[family], chosen, ranks, role, total_updates=3)  # type: ignore[arg-type]
        model.load_shards(lambda param, parts, part: shard(param, weights, parts, part))
        return model

    model = build()
    result: dict[str, float] = {}
    # Fresh adapters change nothing; A is drawn as in PEFT, independent of the layout.
    start = gather(model, dict(trained_params(model)))
    firsts = {name: tensor for name, tensor in start.items() if "lora_A" in name}
    assert all(not tensor.any() for name, tensor in start.items() if "lora_B" in name)
    actual = model.forward(batch)[output_name]
    with model.without_adapters():
        result["fresh"] = float((model.forward(batch)[output_name] - actual).abs().max())
    scaled = torch.cat([(tensor * tensor.shape[1] ** 0.5).flatten() for tensor in firsts.values()])
    result["widest"], result["spread"] = float(scaled.abs().max()), float(scaled.std())
    result["drawn"] = float(scaled.double().square().sum())

    def fill(model: Any) -> None:
        for param in model.adapter_params():
            if param.megatron in (local := model.local_adapters()):
                local[param.megatron].copy_(
                    shard(param, factors, *model.ranks.tp_size_and_rank(param.expert is not None))
                )
        model.optimizer.reload_model_params()

    factors = {name: tensor.detach().clone() for name, tensor in expected.factors.items()}
    fill(model)
    with torch.no_grad():
        result["outputs"] = float((model.forward(batch)[output_name] - expected.outputs(batch)).abs().max())
        with model.without_adapters():
            base_difference = model.forward(batch)[output_name] - expected.outputs(batch, adapters=False)
        result["base"] = float(base_difference.abs().max())
        result["adapters matter"] = float(
            (expected.outputs(batch) - expected.outputs(batch, adapters=False)).abs().max()
        )

        # Merged weights match products in float64, as HF tensors and as the weights of a model without LoRA.
        merged = dict(gather_hf(model.merged_params(), model.params(), model.ranks))
        exact = {
            name: weights[name].double() + ALPHA / RANK * factors[names[2]].double() @ factors[names[1]].double()
            for name in merged
            if (names := factor_names(name))[2] in factors
        }
        result["merged"] = largest_difference({name: merged[name].double() for name in exact}, exact)
        assert all(torch.equal(merged[name], weights[name]) for name in merged.keys() - exact.keys())
    base_model = build(rank=0)
    base_model.load_shards(lambda param, parts, part: shard(param, {**weights, **merged}, parts, part))
    result["merged outputs"] = float(
        (base_model.forward(batch)[output_name] - model.forward(batch)[output_name]).abs().max()
    )
    del base_model

    # PEFT's tensors: A for each of the HF weights, and B.
    complete = dict(gather_hf(model.local_adapters(), model.adapter_params(), model.ranks))
    peft = peft_tensors(complete, adapted_weights(model.params(), targets), RANK)
    for name in exact:
        if name.startswith(family_of(tiny.HF[family]).untrained_prefixes(tiny.HF[family])):  # of an MTP layer
            continue
        module, a, b = factor_names(name)
        for kind, expected_weight in (("lora_A", a), ("lora_B", b)):
            assert torch.equal(peft.pop(f"base_model.model.{module}.{kind}.weight"), factors[expected_weight])
    assert not peft

    before = tiny.snapshot(model)
    loss_fn = policy_loss if role == "actor" else value_loss
    metrics = model.train_step(batch, loss_fn)
    loss, norm = expected.step(batch)
    result["loss"] = abs(metrics[f"{role}/loss"] - loss)
    result["grad_norm"] = abs(metrics[f"{role}/grad_norm"] - norm) / norm
    assert norm > 1.2 * ADAM["max_grad_norm"], "the step is meant to be clipped"
    grads = {name: tensor.grad for name, tensor in expected.trained_params().items()}
    peak = max(float(grad.abs().max()) for grad in grads.values())  # type: ignore[union-attr]
    result["gradients"] = largest_difference(gather(model, gradients(model), add=True), grads) / peak  # type: ignore[arg-type]
    after = {name: tensor.detach() for name, tensor in expected.trained_params().items()}
    result["step"] = largest_difference(gather(model, dict(trained_params(model))), after) / ADAM["lr"]
    frozen = {name for name in before if name != "output_layer.weight" or role == "actor"}
    result["frozen"] = float(all(torch.equal(before[name], model.local_params()[name]) for name in frozen))
    # After restoring into a fresh model the next step is bitwise the same, and nearly so with recomputed activations.
    adapter_folder = Path(folder)
    tiny.save_model(model, adapter_folder)
    # Another layout restores masters and moments too, and its next step is nearly the same.
    other_layout = {"world": 2, "tp": 2} if layout.keys() & {"pp", "cp"} else {"world": 2, "cp": 2}
    resharded = build(layout=other_layout)
    restore_model(resharded, adapter_folder)
    if role == "critic" and targets:  # one rank's optimizer shard has nothing of the single dense tensor
        assert [len(part.optimizer.state) for part in resharded.optimizer.chained_optimizers][
            0
        ] == 1 - resharded.ranks.job.rank
        tiny.save_model(resharded, adapter_folder / "again")
        resharded = build(layout=other_layout)
        restore_model(resharded, adapter_folder / "again")
    original, resharded_tensors = (
        gather(model, dict(trained_params(model))),
        gather(resharded, dict(trained_params(resharded))),
    )
    assert all(torch.equal(original[name], resharded_tensors[name]) for name in original)
    resharded.train_step(batch, loss_fn)
    first = model.train_step(batch, loss_fn)
    for name, recompute in (("resumed", False), ("recomputed", True)):
        restored = build(recompute=recompute)
        restore_model(restored, adapter_folder)
        second = restored.train_step(batch, loss_fn)
        gaps = [
            float((a - b).abs().max())
            for a, b in zip(trained_params(model).values(), trained_params(restored).values(), strict=True)
        ]
        result[name] = max(gaps, default=0.0) / ADAM["lr"] + abs(first[f"{role}/loss"] - second[f"{role}/loss"])
    result["other_layout"] = (
        largest_difference(
            gather(resharded, dict(trained_params(resharded))), gather(model, dict(trained_params(model)))
        )
        / ADAM["lr"]
    )
    return result


class GroupedLinear(torch.nn.Module):
    """Fake of Transformer Engine's GroupedLinear: takes tokens sorted by expert, and their number per expert."""

    def __init__(self, experts: int, rows: int, columns: int) -> None:
        super().__init__()
        for i in range(experts):
            setattr(self, f"weight{i}", torch.nn.Parameter(torch.randn(rows, columns)))

    def forward(self, x: torch.Tensor, splits: list[int]) -> tuple[torch.Tensor, None]:
        parts = enumerate(x.split(splits))
        return torch.cat([part @ getattr(self, f"weight{i}").T for i, part in parts]), None


class NormedLinear(torch.nn.Module):
    """Fake of Transformer Engine's LayerNormLinear: norm and linear layer in one."""

    normalization, eps = "RMSNorm", 1e-5

    def __init__(self, rows: int, columns: int, zero_centered_gamma: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(rows, columns))
        self.layer_norm_weight = torch.nn.Parameter(torch.rand(columns))
        self.zero_centered_gamma = zero_centered_gamma

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        gamma = self.layer_norm_weight + self.zero_centered_gamma
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * gamma @ self.weight.T, None


def fake_te_layers() -> dict[str, float]:
    """Compare adapters with merged weights on layers with Transformer Engine's interface."""
    from torch.nn import Module, ModuleList

    from megarl.megatron.build import transformer_config
    from megarl.megatron.parameter_names import named_params

    torch.manual_seed(0)
    hf, settings = tiny.HF["qwen3_moe"], tiny.config(lora={"rank": RANK, "alpha": ALPHA})
    model = Module()
    model.config = transformer_config(hf, settings)
    model.share_embeddings_and_output_weights = False
    model.decoder = Module()
    model.decoder.layers = ModuleList([Module() for _ in range(2)])
    for number, layer in enumerate(model.decoder.layers):
        layer.layer_number = number + 1
        layer.self_attention, layer.mlp = Module(), Module()
        layer.self_attention.linear_qkv = NormedLinear(128, 32, zero_centered_gamma=bool(number))
        layer.mlp.experts = Module()
        layer.mlp.experts.linear_fc1 = GroupedLinear(4, 48, 32)
        layer.mlp.experts.linear_fc2 = GroupedLinear(4, 32, 24)
    lora_module().add_adapters(model, hf, settings)
    local = {param.megatron: tensor.detach() for _, param, tensor in model.adapters.named_factors()}
    for tensor in local.values():
        tensor.normal_()

    def outputs() -> list[torch.Tensor]:
        generator, splits = torch.Generator().manual_seed(1), [3, 0, 5, 2]
        layer_outputs = []
        for layer in model.decoder.layers:
            layer_outputs.append(layer.self_attention.linear_qkv(torch.randn(7, 1, 32, generator=generator))[0])
            layer_outputs.append(layer.mlp.experts.linear_fc1(torch.randn(10, 32, generator=generator), splits)[0])
            layer_outputs.append(layer.mlp.experts.linear_fc2(torch.randn(10, 24, generator=generator), splits)[0])
        return layer_outputs

    adapted, names = outputs(), named_params([model], 0)
    merged = {name: tensor.clone() for name, tensor in MergedWeights(names, local, ALPHA / RANK).items()}
    with torch.no_grad(), lora_module().disable_adapters([model]):
        base_model = outputs()
        for name, tensor in names.items():
            tensor.copy_(merged[name])
        gaps = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(adapted, outputs(), strict=True)]
        smallest_difference = min(float((a - b).abs().max()) for a, b in zip(adapted, base_model, strict=True))
    sum(tensor.sum() for tensor in adapted).backward()  # type: ignore[union-attr]
    grads = [tensor.grad for tensor in model.adapters.parameters()]
    return {
        "difference": max(gaps),
        "least effect": smallest_difference,
        "factors": float(len(local)),
        "with gradients": float(sum(bool(grad is not None and grad.any()) for grad in grads)),
    }


if __name__ == "__main__":
    world = int(os.environ["WORLD_SIZE"])
    parallel_ranks.initialize(tiny.config(world=world).parallel, timeout_s=120)
    results = {"fake TE layers": fake_te_layers()}
    for item in sys.argv[1].split():
        case, _, layout = item.partition("@")
        family, role, *targets = case.split(":")
        sizes = {name: int(size) for name, size in (pair.split("=") for pair in layout.split(","))}
        chosen = targets[0].split("+") if targets else []
        results[item] = check(family, role, chosen, {**sizes, "world": world}, f"{sys.argv[2]}/{len(results)}")
    print("RESULT " + json.dumps(results))
    parallel_ranks.shutdown()
