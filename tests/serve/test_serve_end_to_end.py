"""The server on a tiny MoE with the real Megatron-Core and the real SGLang, by clients in the wire format."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import wire_client
from serve_jobs import serve
from wire_client import Failed, WireClient

KEY = "tml-secret"
ADAM = {"learning_rate": 1e-2, "beta1": 0.8, "beta2": 0.9, "eps": 1e-6, "grad_clip_norm": 1.0}
SEQUENCES = [list(range(5, 25)), list(range(40, 50)), [7, 3, 9, 2, 11]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tiny_models.qwen3_moe(), tmp_path_factory.mktemp("serve") / "model")


@pytest.fixture(scope="module")
def lora_server(host: str, model: Path) -> Iterator[str]:
    """Two ranks with TP and EP 2, each with an engine."""
    layout = ("parallel.world_size=2", "parallel.tp=2", "parallel.ep=2", "lora.rank=4")
    with serve(host, model, model.with_name("lora"), *layout, key=KEY) as url:
        yield url


def in_transformers(folder: Path, steps: int) -> list[list[list[float]]]:
    """Return the log-probs of `SEQUENCES` before each of some AdamW steps on their sum, in plain transformers."""
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    optimizer = torch.optim.AdamW(
        policy.parameters(), ADAM["learning_rate"], (ADAM["beta1"], ADAM["beta2"]), ADAM["eps"], weight_decay=0
    )
    result = []
    for _ in range(steps):
        rows = []
        for tokens in SEQUENCES:
            ids = torch.tensor([tokens])
            rows.append(policy(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0])
        result.append([row.tolist() for row in rows])
        optimizer.zero_grad()
        (-torch.cat(rows).sum()).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), ADAM["grad_clip_norm"])
        optimizer.step()
    return result


def train(client: WireClient, model_id: str, data: Any, splits: tuple[int, ...] = (2,)) -> list[list[float]]:
    """Take one step on the sum of a batch in several requests; return the log-probs."""
    rows, starts = [], (0, *splits, len(data))
    for start, stop in zip(starts[:-1], starts[1:], strict=True):
        rows += client.forward_backward(model_id, data[start:stop])[0]
    client.optim_step(model_id, **ADAM)
    return rows


def test_full_fine_tuning_is_that_of_transformers_and_survives_a_restart(host: str, model: Path) -> None:
    expected = in_transformers(model, 3)
    data = [wire_client.supervised(tokens) for tokens in SEQUENCES]
    one_rank = ("parallel.world_size=1", "parallel.ranks_per_node=1", "parallel.ep=1", "lora.rank=0")
    run_dir = model.with_name("full")
    with serve(host, model, run_dir, *one_rank) as url:
        client = WireClient(url)
        name = client.create_model(str(model), lora_config={"rank": 32})
        assert client.post("get_info", {"model_id": name})["is_lora"] is False
        first = train(client, name, data)
        path = client.call("save_weights", model_id=name, path="after_one")["path"]
        second = train(client, name, data)
        third, metrics = client.forward_backward(name, data, forward_only=True)
        assert metrics["loss:sum"] == pytest.approx(-sum(map(sum, third)), rel=1e-5)
        weights = client.call("save_weights_for_sampler", model_id=name, path="after_two")["path"]
        for actual, rows in zip((first, second, third), expected, strict=True):
            for row, reference in zip(actual, rows, strict=True):
                assert row == pytest.approx(reference, abs=2e-3)
        assert third[0] != pytest.approx(first[0], abs=0.1)
    with serve(host, model, run_dir, *one_rank) as url:
        client = WireClient(url)
        tree = {"session_id": client.session_id, "model_seq_id": 0, "path": path, "optimizer": True}
        name = client.result(client.post("load_weights", tree)["request_id"])["model_id"]
        assert train(client, name, data) == second
        assert client.forward_backward(name, data, forward_only=True)[0] == third
        sampler = client.sampler(model_path=weights)
        prompt = client.sample(sampler, SEQUENCES[0], max_tokens=1, prompt_logprobs=True).prompt_logprobs
        assert wire_client.logprobs_of(prompt)[1:] == pytest.approx(third[0], abs=1e-4)
        base = client.sample(client.sampler(base_model=str(model)), SEQUENCES[0], max_tokens=1, prompt_logprobs=True)
        assert wire_client.logprobs_of(base.prompt_logprobs)[1:] == pytest.approx(first[0], abs=1e-4)
        client.call("load_weights", model_id=name, path=path, optimizer=False)
        assert train(client, name, data) == second
        moved = client.forward_backward(name, data, forward_only=True)[0]  # without the moments of the first step
        assert moved[0] != pytest.approx(third[0], abs=1e-3)


@pytest.mark.nightly
def test_pipeline_and_context_parallel_ranks_and_the_engine_of_another_node(host: str, model: Path) -> None:
    """Two nodes of two ranks, with engines on the second alone."""
    expected = in_transformers(model, 3)
    data = [wire_client.supervised(tokens) for tokens in SEQUENCES]
    layout = ("parallel.pp=2", "parallel.cp=2", "parallel.ep=2", "lora.rank=0", "placement={actor: 0-3, rollout: 2-3}")
    with serve(host, model, model.with_name("nodes"), *layout, nodes=2) as url:
        client = WireClient(url)
        name = client.create_model(str(model), lora_config={"rank": 32})
        steps = [train(client, name, data) for _ in range(3)]
        for actual, rows in zip(steps, expected, strict=True):
            for row, reference in zip(actual, rows, strict=True):
                assert row == pytest.approx(reference, abs=2e-3)
        after = client.forward_backward(name, data, forward_only=True)[0]
        saved = client.call("save_weights_for_sampler", model_id=name, sampling_session_seq_id=90)
        for _ in range(2):  # one request to each engine
            result = client.sample(
                saved["sampling_session_id"], SEQUENCES[0], num_samples=3, max_tokens=4, prompt_logprobs=True
            )
            assert len(result.sequences) == 3
            assert wire_client.logprobs_of(result.prompt_logprobs)[1:] == pytest.approx(after[0], abs=1e-4)


def test_clients_with_an_adapter_each_get_what_they_get_alone(lora_server: str, model: Path) -> None:
    backwards = [tokens[::-1] for tokens in SEQUENCES]
    batches = [[wire_client.supervised(tokens) for tokens in rows] for rows in (SEQUENCES, backwards)]

    def open_models() -> list[tuple[WireClient, str]]:
        clients = [WireClient(lora_server, KEY) for _ in batches]
        return [(client, client.create_model(str(model), lora_config={"rank": 4})) for client in clients]

    pairs = zip(open_models(), batches, strict=True)
    alone = [[train(client, name, data) for _ in range(3)] for (client, name), data in pairs]
    models = open_models()
    together: list[list[Any]] = [[], []]
    for _ in range(3):  # the requests of a step of both, in turn
        rows: list[list[Any]] = [[], []]
        for part in (slice(0, 2), slice(2, 3)):
            for index, (client, name) in enumerate(models):
                rows[index] += client.forward_backward(name, batches[index][part])[0]
        for index, (client, name) in reversed(list(enumerate(models))):
            client.optim_step(name, **ADAM)
            together[index].append(rows[index])
    assert together == alone
    samplers = [
        client.call("save_weights_for_sampler", model_id=name, sampling_session_seq_id=90)["sampling_session_id"]
        for client, name in models
    ]
    before = [client.forward_backward(name, batches[0], forward_only=True)[0][0] for client, name in models]
    train(*models[0], batches[0])
    for _ in range(2):
        for (client, _), sampler, row in zip(models, samplers, before, strict=True):
            result = client.sample(sampler, SEQUENCES[0], max_tokens=1, prompt_logprobs=True)
            assert wire_client.logprobs_of(result.prompt_logprobs)[1:] == pytest.approx(row, abs=1e-4)
    assert before[0] != pytest.approx(before[1], abs=1e-2)


def test_requests_of_several_adapters_in_one_batch_get_what_they_get_alone(lora_server: str, model: Path) -> None:
    columns = [{"logprobs": [-5.0 - i] * 19, "advantages": [1.0, -0.5] * 9 + [0.25]} for i in range(2)]
    tokens = list(range(60, 80))
    policy = [wire_client.datum(tokens[:-1], tokens[1:], **inputs) for inputs in columns]
    requests = [
        ("cross_entropy", [wire_client.supervised(tokens) for tokens in SEQUENCES]),
        ("importance_sampling", policy),
        ("ppo", [*policy, policy[0]]),
    ]

    def open_models() -> list[tuple[WireClient, str]]:
        """Return clients whose models have taken a step each, on different data."""
        result = []
        for index, sequence in enumerate(SEQUENCES):
            client = WireClient(lora_server, KEY)
            name = client.create_model(str(model), lora_config={"rank": 4})
            train(
                client, name, [wire_client.supervised(sequence), wire_client.supervised(range(index, 30 + index))], ()
            )
            result.append((client, name))
        return result

    def finish(client: WireClient, name: str) -> tuple[float, list[list[float]]]:
        """Return the norm of the gradient, and the log-probs after an update."""
        norm = client.optim_step(name, **ADAM)["grad_norm:mean"]
        return norm, client.forward_backward(name, requests[0][1], forward_only=True)[0]

    alone = []
    for (client, name), (loss, data) in zip(open_models(), requests, strict=True):
        passed = [client.forward_backward(name, data, loss) for _ in range(2)]
        rows, metrics = passed[1]
        assert metrics.pop("models_in_batch:max") == 1
        alone.append((rows, metrics, *finish(client, name)))
        client.post(f"sessions/{client.session_id}/finish", {"reason": {"type": "success"}})
    models, busy = open_models(), WireClient(lora_server, KEY)
    other = busy.create_model(str(model), lora_config={"rank": 4})
    long = [wire_client.supervised(range(20, 140))] * 40

    def pass_together(*more: tuple[WireClient, str, Any, str]) -> list[str]:
        """Send the requests of all while the server is busy; return their ids."""
        names = [busy.start_pass(other, long, "cross_entropy", forward_only=True)]
        pairs = zip(models, requests, strict=True)
        senders = [*((client, name, data, loss) for (client, name), (loss, data) in pairs), *more]
        ids = [client.start_pass(name, data, loss) for client, name, data, loss in senders]
        assert busy.passed(names[0])[1]["models_in_batch:max"] == 1
        return ids

    # The second time, all are executed in turn, since a loss is not finite.
    huge = [wire_client.datum([1, 2], [2, 3], weights=[3e38, 3e38])]
    for more, size in (((), 3), (((busy, other, huge, "cross_entropy"),), 1)):
        ids = pass_together(*more)
        for (client, _), name, (rows, metrics, *_) in zip(models, ids, alone, strict=False):
            actual_rows, actual_metrics = client.passed(name)
            assert actual_metrics["models_in_batch:max"] == size
            for actual, expected in zip(actual_rows, rows, strict=True):
                assert actual == pytest.approx(expected, rel=1e-6)
            del actual_metrics["models_in_batch:max"]
            assert actual_metrics == pytest.approx(metrics, rel=1e-6)
    with pytest.raises(Failed, match="user: the loss is not finite"):
        busy.passed(ids[-1])
    with pytest.raises(Failed, match="user: optim_step without a gradient"):
        busy.optim_step(other, **ADAM)
    for (client, name), (_, _, norm, after) in zip(models, alone, strict=True):
        actual_norm, actual_after = finish(client, name)
        assert actual_norm == pytest.approx(norm, rel=1e-6)
        for actual, expected in zip(actual_after, after, strict=True):
            assert actual == pytest.approx(expected, rel=1e-5)
        client.post(f"sessions/{client.session_id}/finish", {"reason": {"type": "success"}})
    busy.post(f"sessions/{busy.session_id}/finish", {"reason": {"type": "success"}})


def test_samples_with_all_parameters(lora_server: str, model: Path) -> None:
    client = WireClient(lora_server, KEY)
    sampler, prompt = client.sampler(base_model=str(model)), SEQUENCES[0]
    sampled = client.sample(sampler, prompt, num_samples=3, max_tokens=8, stop=[], topk_sample_logprobs=2)
    rows = [wire_client.tokens_of(sequence) for sequence in sampled.sequences]
    assert [len(row) for row in rows] == [8] * 3 and rows[0] != rows[1]
    with pytest.raises(Failed, match="seed, but this server's engines are not deterministic"):
        client.sample(sampler, prompt, max_tokens=8, seed=5)  # SGLang's seeded sampler needs a GPU
    assert {sequence.stop_reason for sequence in sampled.sequences} == {1}  # length
    assert sampled.sequences[0].topk_sampled_logprobs.k == 2
    name = client.create_model(str(model), lora_config={"rank": 4})
    tokens = prompt + rows[0]
    (trained,), _ = client.forward_backward(name, [wire_client.supervised(tokens)], forward_only=True)
    assert wire_client.logprobs_of(sampled.sequences[0].logprobs) == pytest.approx(trained[-8:], abs=1e-4)
    greedy = [
        wire_client.tokens_of(client.sample(sampler, prompt, max_tokens=4, **params).sequences[0])
        for params in ({"temperature": 0}, {"top_k": 1}, {"top_p": 1e-6})
    ]
    assert greedy[0] == greedy[1] == greedy[2]
    stopped = client.sample(sampler, prompt, max_tokens=4, temperature=0, stop=[greedy[0][1]]).sequences[0]
    assert wire_client.tokens_of(stopped) == greedy[0][:2] and stopped.stop_reason == 0
    last = client.sample(sampler, tokens, max_tokens=1, prompt_logprobs=True, prompt_logprobs_last_n=8)
    scores = wire_client.logprobs_of(last.prompt_logprobs)
    assert scores[-8:] == pytest.approx(trained[-8:], abs=1e-4)
    assert all(score != score for score in scores[:-8])


def test_a_loss_that_is_not_finite_is_refused_and_changes_nothing(lora_server: str, model: Path) -> None:
    client = WireClient(lora_server, KEY)
    name, data = client.create_model(str(model), lora_config={"rank": 4}), [wire_client.supervised(SEQUENCES[0])]
    expected, _ = client.forward_backward(name, data)
    huge = [wire_client.datum([1, 2], [2, 3], weights=[3e38, 3e38])]
    with pytest.raises(Failed, match="user: the loss is not finite"):
        client.forward_backward(name, huge)
    metrics = client.optim_step(name, **ADAM)
    with pytest.raises(Failed, match="user: optim_step without a gradient"):
        client.optim_step(name, **ADAM)
    other = client.create_model(str(model), 1, lora_config={"rank": 4})
    assert client.forward_backward(other, data)[0] == expected
    assert client.optim_step(other, **ADAM) == metrics
    assert client.forward_backward(name, data)[0] == client.forward_backward(other, data)[0]
    client.post(f"sessions/{client.session_id}/finish", {"reason": {"type": "success"}})


def test_requests_of_a_model_that_could_not_be_created_fail_alone(lora_server: str, model: Path) -> None:
    """A client may send them before it learns that the checkpoint cannot be read."""
    client = WireClient(lora_server, KEY)
    name, data = client.create_model(str(model), lora_config={"rank": 4}), [wire_client.supervised(SEQUENCES[0])]
    path = client.call("save_weights", model_id=name, path="broken")["path"]
    (folder,) = model.with_name("lora").glob("clients/*/weights/broken")
    shutil.rmtree(folder)
    tree = {"session_id": client.session_id, "model_seq_id": 1, "path": path, "optimizer": True}
    request = client.post("load_weights", tree)
    early = client.post("optim_step", {"model_id": request["model_id"], "adam_params": ADAM, "seq_id": 900})
    with pytest.raises(Failed, match="user: "):
        client.result(request["request_id"])
    with pytest.raises(Failed, match="user: (model .* does not exist|optim_step without a gradient)"):
        client.result(early["request_id"])
    assert client.forward_backward(name, data, forward_only=True)[0]
