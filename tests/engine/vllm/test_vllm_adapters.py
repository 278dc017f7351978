"""Adapters of several policies on one real vLLM engine, compared with transformers whose weights have them merged."""

from __future__ import annotations

import asyncio
import copy
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from compare import PROMPTS
from engines import RunningEngine, start_engine
from orders import make_write_order
from transformers import PreTrainedModel

from megarl.config import LoraConfig
from megarl.engine.engine_backends import engine_backend
from megarl.engine.engine_host import HostProcess
from megarl.engine.engine_protocol import EngineError, Generation, RequestFailed
from megarl.engine.weight_sender import OrderBuffer
from megarl.models.layout_algebra import HFTensor, Param
from megarl.models.lora_tables import adapted_weights, factor_params
from megarl.models.registry import family_of, load_hf_config
from megarl.reshard.plan.adapters import AdapterTable, factor_shapes
from megarl.reshard.plan.layout import EngineLayout, engine_shapes

LORA = LoraConfig(rank=3, alpha=5)  # no rank of vLLM's, and a scale that is no power of 2
MAX_GAP = 5e-5  # with another adapter the log-probs are more than 0.1 away
SAMPLED: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 16, "ignore_eos": True}


def qwen2(seed: int) -> PreTrainedModel:
    """With biases, tied embeddings, and one key-value head for two ranks."""
    return tiny_models.qwen2(seed, hidden_size=128, num_key_value_heads=1, tie_word_embeddings=True)


class Adapters:
    """The tables of an engine's adapters, and orders to write them."""

    def __init__(self, running: RunningEngine, tp: int) -> None:
        self.running, self.layout, hf = running, EngineLayout(tp), load_hf_config(running.folder)
        family = family_of(hf)
        self.weights = adapted_weights(family.params(hf, 1), ())
        table = AdapterTable(family, LORA, self.layout)
        self.factors = [p for layer in range(hf["num_hidden_layers"]) for p in table.engine_layer(hf, layer, ())]

    def make(self, seed: int) -> dict[str, torch.Tensor]:
        """Return random factors by their HF names. Larger ones would outweigh the base weights and amplify rounding:
        with 0.2, transformers' own log-probs in fp32 are up to 1.4e-5 from those in fp64."""
        generator = torch.Generator().manual_seed(seed)
        tensors: list[HFTensor] = [tensor for param in self.factors for tensor in param.hf]
        return {t.name: 0.1 * torch.randn(t.shape, generator=generator) for t in tensors}

    def merge(self, factors: dict[str, torch.Tensor]) -> PreTrainedModel:
        """Return a copy of the model in fp64 with the adapter merged."""
        model = copy.deepcopy(self.running.model).double()
        state = model.state_dict()
        for weight in self.weights:
            a, b = factor_params(weight, LORA.rank)
            for tensor, rows in zip(weight.hf, b.hf, strict=True):
                state[tensor.name] += LORA.scale * factors[rows.name].double() @ factors[a.hf[0].name].double()
        return model

    def write(self, name: str, factors: dict[str, torch.Tensor], version: int) -> None:
        """Write an adapter into the engine, which checks a hash of each box."""
        engine, ranks = self.running.engine, range(self.layout.tp)
        buffers = [OrderBuffer(engine_backend(self.running.config)) for _ in ranks]
        rows: list[Param] = [part for row in self.weights for part in row.by_slot()]
        shapes = [factor_shapes(rows, LORA.rank, self.layout, rank, 0) for rank in ranks]
        described = [{key: ["float32", shape] for key, shape in of_rank.items()} for of_rank in shapes]
        engine.begin_update()
        selects = [{"do": "select", "adapter": name, "factors": factors} for factors in described]
        engine.call_loader([box.make_payload(order) for box, order in zip(buffers, selects, strict=True)])
        assert [box.read_answer() for box in buffers] == [{}] * len(ranks)
        writes = [make_write_order(self.factors, self.layout, rank, factors, described[rank], 0) for rank in ranks]
        engine.call_loader([box.make_payload(*order) for box, order in zip(buffers, writes, strict=True)])
        assert [box.read_answer() for box in buffers] == [{"wrong": []}] * len(ranks)
        engine.end_update(version, name)

    def generate(self, *names: str) -> list[tuple[list[int], Generation]]:
        """Generate with each adapter in turn for the prompts, in one batch.

        Raises RuntimeError if the server labels a response with another weight version than that of its adapter."""

        async def run() -> list[Generation]:
            async with AsyncExitStack() as stack:
                engine = self.running.engine
                clients = [await stack.enter_async_context(engine.connect(300.0, adapter=name)) for name in names]
                requests = enumerate((prompt, client) for prompt in PROMPTS for client in clients)
                return await asyncio.gather(
                    *(client.generate(prompt, {**SAMPLED, "sampling_seed": n}) for n, (prompt, client) in requests)
                )

        return list(zip([prompt for prompt in PROMPTS for _ in names], asyncio.run(run()), strict=True))


def max_gap(model: PreTrainedModel, outputs: list[tuple[list[int], Generation]]) -> float:
    """Return the largest difference of an engine's log-probs to those of a model."""
    gaps = []
    for prompt, out in outputs:
        tokens = torch.tensor(out.token_ids.tolist())
        logprobs = tiny_models.logprobs(model, [*prompt, *tokens.tolist()])[len(prompt) - 1 :]
        gaps.append((logprobs[: len(tokens)].gather(1, tokens[:, None])[:, 0] - torch.tensor(out.logprobs)).abs().max())
    return float(torch.stack(gaps).max())


def check_adapters(running: RunningEngine, tp: int) -> None:
    adapters = Adapters(running, tp)
    buffers = [OrderBuffer(engine_backend(running.config)) for _ in range(tp)]
    running.engine.call_loader([box.make_payload({"do": "describe"}) for box in buffers])
    for rank, answer in enumerate(box.read_answer() for box in buffers):
        shapes = {name: tuple(shape) for name, (_, shape) in answer["tensors"].items()}
        hf = load_hf_config(running.folder)
        rows = [part for row in family_of(hf).params(hf, 1) for part in row.by_slot()]
        assert answer["odd"] == [] and shapes == engine_shapes(rows, EngineLayout(tp), rank, 0)
    assert max_gap(running.model, adapters.generate("actor", "actor_b")) < MAX_GAP  # never written
    first, second = adapters.make(1), adapters.make(2)
    adapters.write("actor", first, 1)
    adapters.write("actor_b", second, 1)
    models = [adapters.merge(first), adapters.merge(second)]
    outputs = adapters.generate("actor", "actor_b")
    for number, model in enumerate(models):
        own, others = outputs[number::2], outputs[1 - number :: 2]
        assert max_gap(model, own) < MAX_GAP and max_gap(model, others) > 0.1
    # A new version of one adapter leaves the other as it is, and no prefix of the old one in the cache. The base
    # weights are served beside both.
    third = adapters.make(3)
    adapters.write("actor_b", third, 2)
    outputs = adapters.generate("actor", "actor_b", "")
    for number, (model, version) in enumerate(((models[0], 1), (adapters.merge(third), 2), (running.model, 0))):
        own = outputs[number::3]
        assert max_gap(model, own) < MAX_GAP and {out.weight_version for _, out in own} == {version}


def test_two_adapters_in_one_batch(vllm_host: HostProcess, tmp_path: Path) -> None:
    """Also on two ranks, which cut A or B; and requests and orders for an adapter without a slot are refused."""
    options: dict[str, Any] = {"engine": "vllm", "max_loras": 2, "tp": 2}
    with start_engine(vllm_host.path, qwen2(0), tmp_path, LORA, **options) as running:
        check_adapters(running, 2)
        adapters = Adapters(running, 2)
        with pytest.raises(RequestFailed, match="serves actor, actor_b and no more"):
            adapters.generate("actor_c")
        with pytest.raises(EngineError, match="no slot is left for the adapter actor_c; raise rollout.max_loras=2"):
            adapters.write("actor_c", adapters.make(4), 3)


@pytest.mark.nightly
@pytest.mark.parametrize("model", [tiny_models.qwen3, lambda seed: tiny_models.llama(seed, hidden_size=128)])
def test_adapters_of_other_families(vllm_host: HostProcess, tmp_path: Path, model: Any) -> None:
    with start_engine(vllm_host.path, model(0), tmp_path, LORA, engine="vllm", max_loras=2) as running:
        check_adapters(running, 1)
