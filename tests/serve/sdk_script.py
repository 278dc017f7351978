"""A client's program on the public SDK, run by `test_tinker_sdk.py` with the SDK's own interpreter.

Arguments: address, base model, LoRA rank. Prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import tinker
from tinker import types

warnings.simplefilter("ignore")
TOKENS = list(range(5, 25))


def datum(tokens: list[int], prompt: int = 0) -> Any:
    weights = [0.0] * prompt + [1.0] * (len(tokens) - 1 - prompt)
    inputs: Any = {"target_tokens": tokens[1:], "weights": weights}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def main(url: str, base_model: str, rank: int) -> dict[str, Any]:
    result: dict[str, Any] = {}
    service = tinker.ServiceClient(base_url=url, api_key="tml-secret")
    rest = tinker.RestClient(base_url=url, api_key="tml-secret")
    result["models"] = [item.model_name for item in rest.get_server_capabilities().result().supported_models]
    client = service.create_lora_training_client(base_model, rank=rank).result()
    result["lora_rank"] = client.get_info().lora_rank
    losses = []
    for _ in range(3):
        passes = [client.forward_backward([datum(TOKENS)], "cross_entropy") for _ in range(2)]
        step = client.optim_step(types.AdamParams(learning_rate=1e-2))
        losses.append(passes[1].result().metrics["loss:sum"])
        result["grad_norm"] = step.result().metrics["grad_norm:mean"]
    result["losses"] = losses

    def policy_gradient(data: list[Any], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        loss = sum((row.exp() * 0.5).sum() for row in logprobs)
        return loss, {"custom": 3.0}

    custom = client.forward_backward_custom([datum(TOKENS)], policy_gradient).result()
    result["custom"] = custom.metrics["custom"]
    client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    state = client.save_state("first").result().path
    trained = client.forward([datum(TOKENS)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    sampler = client.save_weights_and_get_sampling_client().result()
    prompt = types.ModelInput.from_ints(TOKENS)
    scored = sampler.compute_logprobs(prompt).result()[1:]
    result["gap"] = max(abs(one - other) for one, other in zip(trained, scored, strict=True))
    params = types.SamplingParams(max_tokens=6, temperature=0.7, top_p=0.9, top_k=20, stop=[])
    sampled = sampler.sample(
        prompt, num_samples=2, sampling_params=params, topk_prompt_logprobs=2, include_prompt_logprobs=True
    ).result()
    result["sampled"] = [[len(item.tokens), len(item.logprobs), item.stop_reason] for item in sampled.sequences]
    result["topk"] = [row if row is None else len(row) for row in sampled.topk_prompt_logprobs][:3]
    again = service.create_training_client_from_state_with_optimizer(state).result()
    result["reloaded"] = (
        again.forward([datum(TOKENS)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data == trained
    )
    named = client.save_weights_for_sampler("named").result().path
    other = service.create_sampling_client(model_path=named).result()
    result["named"] = max(
        abs(one - two) for one, two in zip(other.compute_logprobs(prompt).result()[1:], scored, strict=True)
    )
    try:
        client.forward_backward([datum([1, 10**6])], "cross_entropy").result()
    except tinker.BadRequestError as error:
        result["refused"] = str(error)
    try:
        client.optim_step(types.AdamParams()).result()
    except tinker.RequestFailedError as error:
        result["failed"] = str(error)
    result["checkpoints"] = sorted(
        item.checkpoint_id for item in rest.list_checkpoints(client.model_id).result().checkpoints
    )
    rest.delete_checkpoint_from_tinker_path(named).result()
    result["left"] = [item.checkpoint_id for item in rest.list_checkpoints(client.model_id).result().checkpoints]
    service.close("success").result()
    try:
        tinker.ServiceClient(base_url=url, api_key="tml-other").create_lora_training_client(base_model, rank=rank)
    except tinker.AuthenticationError as error:
        result["key"] = str(error)
    return result


print(json.dumps(main(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
