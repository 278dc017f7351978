"""The HTTP service with stand-ins for the trainer and the engines: keys, limits, sessions, futures, faults."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import wire_client
from wire_client import Failed, WireClient

from megarl.config import from_dict
from megarl.serve import tinker_service, work_queue
from megarl.serve.commands import CreateModel, ForwardBackward, LoadModel, OptimStep, SaveModel, Stop, UnloadModel
from megarl.serve.engine_sampling import EngineFailed, EngineSampler
from megarl.serve.saved_weights import SavedWeights
from megarl.serve.tinker_service import ServiceSettings, TinkerService
from megarl.serve.tinker_wire import SampledSequence, SampleRequest, Samples
from megarl.serve.work_queue import WorkQueue

KEY = "tml-secret"
DATA = [wire_client.supervised([1, 2, 3])]


class FakeSampler(EngineSampler):
    """Repeats the prompt; a prompt that begins with 9 fails."""

    def __init__(self) -> None:
        super().__init__((), 64, 1.0, 1)

    async def sample(self, request: SampleRequest, version: int) -> Samples:
        await asyncio.sleep(0)
        if request.prompt[0] == 9:
            raise EngineFailed("the engine has died")
        sequence = SampledSequence(request.prompt, [-1.0] * len(request.prompt), "stop")
        return Samples([sequence] * request.num_samples)


class Server:
    """The service, and a thread that answers its commands."""

    def __init__(self, folder: Path, **limits: Any) -> None:
        self.model = folder / "model"
        self.model.mkdir()
        config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 16}
        (self.model / "config.json").write_text(json.dumps(config))
        settings = {"model": {"path": str(self.model)}, "lora": {"rank": 4}, "rollout": {"max_context": 64}}
        settings["rollout"]["max_new_tokens"] = 8
        self.saved, self.queue = SavedWeights(folder / "clients"), WorkQueue(limits.pop("capacity", 100))
        self.lines, self.commands = list[str](), list[Any]()
        self.may_run, self._is_closed = threading.Event(), False
        self.may_run.set()
        self.service = TinkerService(
            from_dict(settings),
            32,
            ServiceSettings(
                **{"max_request": 2**20, "max_models": 2, "session_timeout": 600.0, "api_key": KEY} | limits
            ),
            self.saved,
            self.queue,
            FakeSampler(),
            self.lines.append,
        )
        self.url = self.service.start("127.0.0.1", 0)
        self._thread = threading.Thread(target=self._execute)
        self._thread.start()

    def _execute(self) -> None:
        while True:
            job, samples = self.queue.next_job(lambda: self._is_closed)
            self.may_run.wait()
            if isinstance(job.command, Stop):
                return
            if samples:
                self.commands.append(("sample", samples[0].folder, len(samples)))
                assert self.service.run_samples(samples, 1).wait(30)
                continue
            self.commands.append(job.command)
            match job.command:
                case ForwardBackward(examples=examples):
                    job.finish(([np.zeros(len(item.tokens), np.float32) for item in examples], {"loss:sum": 1.0}))
                case OptimStep(adam=adam):
                    job.fail("the gradient is not finite") if adam.lr == 1 else job.finish({"grad_norm:mean": 2.0})
                case SaveModel(folder=path):
                    Path(path).mkdir()
                    job.finish(None)
                case _:
                    job.finish(None)

    def close(self) -> None:
        self._is_closed = True
        self.may_run.set()
        self._thread.join()
        self.service.close()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_queue, "IDLE_S", 0.1)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    running = Server(tmp_path)
    yield running
    running.close()


def test_trains_and_samples(server: Server) -> None:
    client = WireClient(server.url, KEY)
    model = client.create_model(str(server.model), lora_config={"rank": 4})
    assert client.post("get_info", {"model_id": model})["lora_rank"] == 4
    rows, metrics = client.forward_backward(model, DATA)
    assert rows == [[0.0, 0.0]] and metrics == {"loss:sum": 1.0}
    assert client.optim_step(model, learning_rate=0.5) == {"grad_norm:mean": 2.0}
    saved = client.call("save_weights_for_sampler", model_id=model, path="first")
    assert saved["path"] == f"tinker://{model}/sampler_weights/first"
    sampler = client.sampler(model_path=saved["path"])
    (one, two) = client.sample(sampler, [1, 2], num_samples=2, max_tokens=4).sequences
    assert wire_client.tokens_of(one) == wire_client.tokens_of(two) == [1, 2]
    assert client.get(f"samplers/{sampler}")["model_path"] == saved["path"]
    create, forward, step, save, sample = server.commands
    assert create == CreateModel(model) and forward.model_id == model and not forward.forward_only
    assert (step.adam.lr, step.adam.beta2, step.adam.max_grad_norm) == (0.5, 0.95, 0)
    assert save.for_sampler and sample == ("sample", save.folder, 1)


def test_only_the_key_opens_the_service(server: Server) -> None:
    for key in ("", "tml-other", KEY + "x", "\u00e9"):
        with pytest.raises(Failed, match="401: the API key is wrong"):
            WireClient(server.url, key)
    assert server.commands == []


@pytest.mark.parametrize(
    ("path", "tree", "text"),
    [
        ("nothing", {}, "404: there is no POST /api/v1/nothing"),
        ("create_session", [], "400: create_session is not a JSON object"),
        ("create_model", {"session_id": "x", "model_seq_id": 0}, "400: create_model lacks base_model"),
        ("create_model", {"base_model": "other"}, "400: base_model 'other' is not served"),
        ("create_model", {"base_model": "model", "lora_config": {"rank": 8}}, "trains adapters of rank 4"),
        ("create_model", {"base_model": "model", "session_id": "x"}, "410: session x does not exist"),
        ("optim_step", {"model_id": "x"}, "404: model x does not exist"),
        ("session_heartbeat", {"session_id": "x"}, "410: session x"),
        ("retrieve_future", {"request_id": "x"}, "410: there is no request x"),
        ("load_weights", {"path": "tinker://x/weights/y", "optimizer": True}, "404: there is no checkpoint"),
        ("load_weights", {"path": "tinker://../weights/y", "optimizer": True}, "400: '..' is no name"),
        ("load_weights", {"path": "tinker://x/sampler_weights/y", "optimizer": True}, "not a checkpoint of training"),
        ("asample", {"sampling_session_id": "x"}, "404: sampling session x"),
    ],
)
def test_refuses_what_is_wrong(server: Server, path: str, tree: Any, text: str) -> None:
    with pytest.raises(Failed) as refused:
        WireClient(server.url, KEY).post(path, tree)
    assert text in str(refused.value)
    assert server.commands == []


def test_faults_of_one_client_change_nothing_for_another(server: Server) -> None:
    good, bad = WireClient(server.url, KEY), WireClient(server.url, KEY)
    model, other = (client.create_model("model") for client in (good, bad))
    for data, loss, text in (
        ([wire_client.supervised([1, 99])], "cross_entropy", "datum 0: target_tokens: 99 is no token id"),
        ([wire_client.supervised([1] * 40)], "cross_entropy", "datum 0 has 39 tokens; the model takes 31"),
        (DATA, "nothing", "loss_fn 'nothing' is unknown"),
        (DATA, "ppo", "datum 0: ppo needs logprobs"),
    ):
        with pytest.raises(Failed, match=text):
            bad.forward_backward(other, data, loss)
    status, _, content = bad.request("forward_backward", b"{}")
    assert status == 415 and b"needs a body of type" in content
    with pytest.raises(Failed, match="user: the gradient is not finite"):
        bad.optim_step(other, learning_rate=1)
    with pytest.raises(Failed, match="learning_rate is not a number from 0 to 10"):
        bad.optim_step(other, learning_rate=1e30)
    sampler = bad.sampler(base_model="model")
    with pytest.raises(Failed, match="server: EngineFailed: the engine has died"):
        bad.sample(sampler, [9])
    with pytest.raises(Failed, match="prompt: 77 is no token id"):
        bad.sample(sampler, [77])
    assert good.forward_backward(model, DATA)[0] == [[0.0, 0.0]]
    assert sum(isinstance(command, ForwardBackward) for command in server.commands) == 1


def test_computes_the_loss_that_the_server_chose_for_a_name(server: Server, tmp_path: Path) -> None:
    data = [wire_client.datum([1, 2], [2, 3], logprobs=[0.0, 0.0], advantages=[1.0, 1.0])]
    client = WireClient(server.url, KEY)
    model, sampler = client.create_model("model"), client.sampler(base_model="model")
    for ask in (
        lambda: client.forward_backward(model, data, "stable_reinforce"),
        lambda: client.sample(sampler, [1, 2], record_stability_info=True),
    ):
        with pytest.raises(Failed, match="options.loss_aliases={stable_reinforce: importance_sampling}"):
            ask()
    (tmp_path / "other").mkdir()
    other = Server(tmp_path / "other", loss_aliases={"stable_reinforce": "importance_sampling"})
    try:
        client = WireClient(other.url, KEY)
        client.forward_backward(client.create_model("model"), data, "stable_reinforce")
        client.sample(client.sampler(base_model="model"), [1, 2], record_stability_info=True)
    finally:
        other.close()
    assert [item.loss for item in other.commands if isinstance(item, ForwardBackward)] == ["importance_sampling"]


def test_a_repeated_request_is_executed_once(server: Server) -> None:
    client = WireClient(server.url, KEY)
    model = client.create_model("model")
    body = wire_client.forward_backward_body(model, DATA, "cross_entropy", seq_id=1)
    answers = [client._json(*client.request("forward_backward", body, wire_client.PROTOBUF)) for _ in range(3)]
    assert answers[0] == answers[1] == answers[2]
    for _ in range(2):  # a response may get lost
        assert client.result(answers[0]["request_id"]).metrics[0].value == 1.0
    assert sum(isinstance(command, ForwardBackward) for command in server.commands) == 1


def test_a_model_is_unloaded_once(server: Server) -> None:
    """The SDK repeats a request whose answer is lost."""
    client = WireClient(server.url, KEY)
    model = client.create_model("model")
    answers = [client.post("unload_model", {"model_id": model}) for _ in range(2)]
    assert answers[0] == answers[1]
    for _ in range(2):
        assert client.result(answers[0]["request_id"]) == {"type": "unload_model", "model_id": model}
    assert client.post("unload_model", {"model_id": model}) == answers[0]
    assert server.commands.count(UnloadModel(model)) == 1
    with pytest.raises(Failed, match="404: model .* does not exist"):
        client.post("unload_model", {"model_id": f"{model}0"})


def test_polls_until_the_result_is_there(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tinker_service, "POLL_S", 0.05)
    client = WireClient(server.url, KEY)
    server.may_run.clear()
    tree = {"session_id": client.session_id, "model_seq_id": 0, "base_model": "model"}
    name = client.post("create_model", tree)["request_id"]
    body = json.dumps({"request_id": name}).encode()
    statuses = [client.request("retrieve_future", body)[0] for _ in range(2)]
    server.may_run.set()
    assert statuses == [408, 408]
    assert client.result(name)["model_id"] == f"{client.session_id}:train:0"


def test_a_result_that_arrives_as_a_poll_ends_is_not_lost(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tinker_service, "POLL_S", 0.0)
    client = WireClient(server.url, KEY)
    model = client.create_model("model")
    sampler = client.sampler(base_model="model")
    for number in range(20):
        assert client.forward_backward(model, DATA)[0] == [[0.0, 0.0]]
        assert wire_client.tokens_of(client.sample(sampler, [number % 8]).sequences[0]) == [number % 8]


def test_limits_models_requests_and_bodies(tmp_path: Path) -> None:
    server = Server(tmp_path, max_models=1, capacity=2, max_request=1000)
    try:
        client = WireClient(server.url, KEY)
        model = client.create_model("model")
        with pytest.raises(Failed, match="the server has 1 models"):
            client.create_model("model", 1)
        status, _, content = client.request("create_session", b" " * 2000)
        assert status == 413 and b"larger than 1000 bytes" in content
        server.may_run.clear()
        statuses = []
        for number in range(1, 6):
            tree = {"model_id": model, "adam_params": {}, "seq_id": number}
            statuses.append(client.request("optim_step", json.dumps(tree).encode())[0])
        assert statuses[:2] == [200, 200] and statuses[-1] == 429
        server.may_run.set()
    finally:
        server.close()


def test_results_that_nobody_retrieves_are_limited_by_session(tmp_path: Path) -> None:
    server = Server(tmp_path, capacity=3)
    try:
        client, other = WireClient(server.url, KEY), WireClient(server.url, KEY)
        model = client.create_model("model")
        trees = [{"model_id": model, "adam_params": {}, "seq_id": number} for number in range(1, 5)]
        names = [client.post("optim_step", tree)["request_id"] for tree in trees[:3]]
        with pytest.raises(Failed, match="429: the session has 3 results that it has not retrieved"):
            client.post("optim_step", trees[3])
        assert other.create_model("model") and other.optim_step(f"{other.session_id}:train:0")
        assert client.result(names[0]) and client.post("optim_step", trees[3])
    finally:
        server.close()


def test_ended_session_is_unloaded_though_the_queue_is_full(tmp_path: Path) -> None:
    server = Server(tmp_path, capacity=2)
    try:
        client = WireClient(server.url, KEY)
        model = client.create_model("model")
        server.may_run.clear()
        statuses = [
            client.request("optim_step", json.dumps({"model_id": model, "adam_params": {}, "seq_id": n}).encode())[0]
            for n in range(1, 6)
        ]
        assert 429 in statuses
        client.post(f"sessions/{client.session_id}/finish", {"reason": {"type": "success"}})
        server.may_run.set()
        assert WireClient(server.url, KEY).create_model("model")
        assert UnloadModel(model) in server.commands
    finally:
        server.close()


@pytest.mark.parametrize("content", ["", "[]", '{"name": "x"}', "\x00"])
def test_damaged_record_is_no_checkpoint(server: Server, content: str) -> None:
    client = WireClient(server.url, KEY)
    model = client.create_model("model")
    for name in ("a", "b"):
        client.call("save_weights", model_id=model, path=name)
    (record,) = server.saved.root.glob("*/weights/a.json")
    record.write_text(content)
    (checkpoint,) = client.get("checkpoints")["checkpoints"]
    assert checkpoint["checkpoint_id"] == "weights/b"
    with pytest.raises(Failed, match="404: there is no checkpoint"):
        client.call("load_weights", model_id=model, path=f"tinker://{model}/weights/a")


def test_a_client_that_goes_away_loses_nothing_that_it_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(tmp_path)
    try:
        client = WireClient(server.url, KEY)
        model = client.create_model("model")
        path = client.call("save_weights", model_id=model, path="a", user_metadata={"step": 3})["path"]
        with pytest.raises(Failed, match="'a' exists already"):
            client.call("save_weights", model_id=model, path="a")
        client.call("save_weights", model_id=model, path="a", overwrite=True, user_metadata={"step": 4})
        (folder,) = server.saved.root.glob("*/weights/*/")
        assert folder.name == "a"  # the overwritten one is gone
        client.call("save_weights_for_sampler", model_id=model, path="s")
        with pytest.raises(Failed, match="'s' exists already"):
            client.call("save_weights_for_sampler", model_id=model, path="s", overwrite=True)
        server.saved.delete(server.saved.find(f"tinker://{model}/sampler_weights/s")[1])
        client.call("save_weights_for_sampler", model_id=model, sampling_session_seq_id=5)
        (unnamed,) = (folder for folder in server.saved.root.glob("*/sampler_weights/unnamed-*"))
        client.post(f"sessions/{client.session_id}/finish", {"reason": {"type": "success"}})
        assert not unnamed.exists()
        with pytest.raises(Failed, match="404: model"):
            client.optim_step(model)
        other = WireClient(server.url, KEY)
        (listed,) = other.get("checkpoints")["checkpoints"]
        assert listed["tinker_path"] == path and listed["user_metadata"] == {"step": "4"}
        assert other.get(f"training_runs/{model}")["last_checkpoint"]["checkpoint_id"] == "weights/a"
        assert other.post("weights_info", {"tinker_path": path})["lora_rank"] == 4
        tree = {"session_id": other.session_id, "model_seq_id": 0, "path": path, "optimizer": True}
        loaded = other.result(other.post("load_weights", tree)["request_id"])["model_id"]
        other.call("load_weights", model_id=loaded, path=path, optimizer=False)
        folder = str(server.saved.find(path)[1])
        assert CreateModel(loaded, folder, True) in server.commands and UnloadModel(model) in server.commands
        assert LoadModel(loaded, folder, False) in server.commands
        status, _, _ = other.request(f"training_runs/{model}/checkpoints/weights/a", None, method="DELETE")
        assert status == 204 and other.get("checkpoints")["checkpoints"] == [] and not Path(folder).exists()
    finally:
        server.close()


def test_ends_a_session_without_a_sign_of_life(tmp_path: Path) -> None:
    server = Server(tmp_path, session_timeout=-1.0)  # at the next look
    try:
        client = WireClient(server.url, KEY)
        client.create_model("model")
        while not server.lines:
            threading.Event().wait(0.1)
        assert client.session_id in server.lines[0]
        with pytest.raises(Failed, match="410: session"):
            client.post("session_heartbeat", {"session_id": client.session_id})
    finally:
        server.close()
