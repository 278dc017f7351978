"""Engines outside of a job: their server, both ends of their weight syncs, and requests that are shared and lost.

The engine is a stub with two ranks in this process, whose loader is the real one.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_configs import QWEN2

from megarl.config import Config, ConfigError, from_dict
from megarl.engine import external_engines, external_server, weight_loader
from megarl.engine.engine_protocol import NOT_RECORDED, Generation, RecordedPrefix, RequestFailed
from megarl.engine.external_client import SharedClient
from megarl.engine.external_engines import ExternalEngine, ExternalEngines
from megarl.engine.external_files import WeightFiles
from megarl.engine.external_server import ExternalServer
from megarl.engine.external_wire import WireError
from megarl.engine.sglang.sglang_backend import SGLangBackend
from megarl.models.lora_tables import merge_adapter
from megarl.parallel import job_secret
from megarl.reshard.run.checksum import device_hash
from megarl.types import as_token_ids
from megarl.utils.addresses import free_port

pytestmark = pytest.mark.alone
RANKS = 2


class StubClient:
    """Answers each request with one token, `token`, once it may; a prompt of token 13 fails."""

    def __init__(self, token: int) -> None:
        self.token, self.weight_version, self.should_request_masks = token, None, True
        self.num_pending, self.last_response_time = 0, 0.0
        self.recorded: list[RecordedPrefix] = []
        self.is_stopped = False
        self.may_answer = threading.Event()
        self.may_answer.set()

    async def __aenter__(self) -> StubClient:
        return self

    async def __aexit__(self, *error: object) -> None:
        return None

    async def generate(self, ids: Any, params: Any, recorded: RecordedPrefix = NOT_RECORDED, *_: Any) -> Generation:
        self.recorded.append(recorded)
        if list(ids) == [13]:
            raise RequestFailed("unlucky")
        await asyncio.sleep(0.01)  # all requests of a test are there before the first one is answered
        while not self.may_answer.is_set() and not self.is_stopped:
            await asyncio.sleep(0.01)
        reason: Any = "abort" if self.is_stopped else "length"
        return Generation(as_token_ids([self.token]), torch.zeros(1).numpy(), reason, self.weight_version or 0)

    async def stop(self) -> None:
        self.is_stopped = True

    async def is_alive(self, seconds: float) -> bool:
        return True


class StubEngine:
    def __init__(self) -> None:
        self.models = [torch.nn.Linear(2, 3, bias=False) for _ in range(RANKS)]
        self.client, self.versions, self.start_number = StubClient(2), list[int | None](), 1
        self.is_asleep = self.is_paused = False
        self.placements: list[Mapping[int, Sequence[int]]] = []

    def start(self) -> None: ...

    def wait_ready(self) -> None: ...

    def check_running(self, start_number: int = 0) -> None: ...

    def shutdown(self) -> None: ...

    def abort_requests(self) -> None: ...

    def begin_update(self) -> None: ...

    def end_update(self, version: int | None) -> None:
        self.versions.append(version)

    def connect(self, *arguments: Any) -> StubClient:
        return self.client

    def call_loader(self, payloads: list[str], draft: bool = False, is_session: bool = False) -> None:
        hooks = weight_loader.LoaderHooks(place_experts=self.placements.append)

        def work(model: torch.nn.Module, payload: str) -> None:
            weight_loader.load(model, pickle.loads(base64.b64decode(payload)), hooks)

        pairs = zip(self.models, payloads, strict=True)
        threads = [threading.Thread(target=work, args=pair) for pair in pairs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


class StubBackend(SGLangBackend):
    def __init__(self) -> None:
        self.engine = StubEngine()

    def make_engine(self, *arguments: Any, **named: Any) -> StubEngine:  # type: ignore[override]
        return self.engine

    def layout(self, hf: Any, config: Config) -> Any:
        return SimpleNamespace(draft=False)


@dataclasses.dataclass
class Served:
    engine: StubEngine
    address: str
    config: Config


@pytest.fixture(params=["tcp"])
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Served:
    """A server of a stub engine, which ends with this process. Its weights arrive over TCP, or in a folder "disk"."""
    monkeypatch.setenv(job_secret.EXTERNAL_SECRET_ENV, "a secret of this test alone")
    monkeypatch.setattr(external_server, "_SESSION_END_S", 30.0)  # a busy machine needs longer
    backend = StubBackend()
    monkeypatch.setattr(external_server, "engine_backend", lambda config: backend)
    (tmp_path / "config.json").write_text(json.dumps(QWEN2))
    address = f"127.0.0.1:{free_port()}"
    rollout = {"tp": RANKS, "external": [address], "hang_timeout": 20}
    if request.param == "disk":
        (tmp_path / "disk").mkdir()
        rollout["external_weights_dir"] = str(tmp_path / "disk")
    config = from_dict({"model": {"path": str(tmp_path)}, "rollout": rollout})
    server, is_ready = ExternalServer(config, address, tmp_path), threading.Event()
    threading.Thread(target=server.run, args=(is_ready.set,), daemon=True).start()
    assert is_ready.wait(20)
    return Served(backend.engine, address, config)


class Run:
    """The ranks of a run's engine, as threads."""

    def __init__(self, config: Config) -> None:
        self._barrier, self._payloads = threading.Barrier(RANKS), [""] * RANKS
        self.ranks = [
            ExternalEngines(config, 0, 1, rank, lambda payload, rank=rank: self._gather(rank, payload))
            for rank in range(RANKS)
        ]
        for rank in self.ranks:
            rank.set_addresses(config.rollout.external)

    def _gather(self, rank: int, payload: str) -> list[str]:
        self._payloads[rank] = payload
        self._barrier.wait(20)
        result = list(self._payloads)
        self._barrier.wait(20)
        return result

    def on_all(self, work: Callable[[int, ExternalEngines], Any]) -> list[Any]:
        results: list[Any] = [None] * RANKS

        def run(number: int) -> None:
            results[number] = work(number, self.ranks[number])

        threads = [threading.Thread(target=run, args=(number,)) for number in range(RANKS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return results

    def sync(self, version: int) -> bool:
        """Write [version, rank] into the first row of each rank's weight; return whether an engine has joined."""

        def work(number: int, rank: ExternalEngines) -> bool:
            has_joined = rank.connect()
            rank.begin()
            send(rank, "write", {"weight": torch.tensor([[version, number]], dtype=torch.float32)})
            finish(rank, version, {0: [1, 0]})
            return has_joined

        return all(self.on_all(work))

    def close(self) -> None:
        self.on_all(lambda number, rank: rank.close())


def send(rank: ExternalEngines, do: str, tensors: dict[str, torch.Tensor]) -> None:
    """Write or compare the first rows of tensors in one session."""
    rank.open(256)
    buffer, slices = torch.zeros(256, dtype=torch.uint8), []
    for number, (name, tensor) in enumerate(tensors.items()):
        offset, (rows, columns) = 64 * number, tensor.shape
        if do == "write":
            buffer[offset : offset + 4 * tensor.numel()] = tensor.reshape(-1).view(torch.uint8)
        buffer[offset + 56 : offset + 64] = device_hash(tensor).view(1).view(torch.uint8)
        slices.append([name, -1, 0, rows, 0, columns, offset, offset + 56])
    order = {"do": do, "version": 1, "tensor_dtype": dict.fromkeys(tensors, "float32"), "slices": slices}
    rank.write(buffer, order, False)
    rank.close_session()


def finish(rank: ExternalEngines, version: int, experts: dict[int, list[int]] | None = None) -> None:
    rank.send_order({"do": "finish"} | ({"experts": experts} if experts else {}), False)
    rank.wait()
    rank.commit(version)


@pytest.fixture
def run(served: Served) -> Iterator[Run]:
    run = Run(served.config)
    yield run
    run.close()


def test_weights_reach_each_rank_and_joining_is_reported_once(served: Served, run: Run) -> None:
    assert run.sync(3) and not run.sync(4)
    assert [model.weight[0].tolist() for model in served.engine.models] == [[4, 0], [4, 1]]
    assert served.engine.versions == [3, 4]
    lead = run.ranks[0]
    assert [engine.address for engine in lead.usable(4)] == [served.address] and not lead.usable(3)
    assert lead.pop_changes() == [f"external engine {served.address} generates for this run"]
    assert lead.pop_changes() == []


def test_an_engine_that_one_rank_loses_comes_back_with_the_next_weight_sync(served: Served, run: Run) -> None:
    run.sync(1)
    run.ranks[0].pop_changes()
    (engine,) = run.ranks[1]._engines.values()
    engine.drop("its network is gone")
    assert run.sync(2)
    lost, back = run.ranks[0].pop_changes()
    assert lost.startswith(f"external engine {served.address} is not used: ")
    assert back == f"external engine {served.address} generates for this run"
    assert [model.weight[0].tolist() for model in served.engine.models] == [[2, 0], [2, 1]]
    run.ranks[0].set_addresses([])
    assert run.ranks[0].num_usable == 0


def test_a_run_with_other_settings_gets_a_reason(served: Served) -> None:
    other = dataclasses.replace(served.config, model=dataclasses.replace(served.config.model, dtype="float32"))
    run = Run(other)
    assert not run.sync(1)
    reason = "its model.dtype is bfloat16, and that of the run float32"
    assert run.ranks[0].pop_changes() == [f"external engine {served.address} is not used: {reason}"]
    run.close()


def test_it_serves_one_run_at_a_time(served: Served, run: Run) -> None:
    assert run.sync(1)
    second = Run(served.config)
    assert not second.sync(1)
    assert second.ranks[0].pop_changes() == [f"external engine {served.address} is not used: it serves another run"]
    run.close()
    assert second.sync(7)
    second.close()


def test_every_weight_sync_places_the_experts(served: Served, run: Run) -> None:
    """So an engine that joins later, or has served a run with another placement, gets that of its run."""
    run.sync(1)
    run.sync(2)
    assert served.engine.placements == [{0: [1, 0]}] * 2 * RANKS


by_tcp_or_disk = pytest.mark.parametrize("served", ["tcp", "disk"], indirect=True)


def sync_adapters(run: Run, bases: Sequence[torch.Tensor], value: float) -> None:
    """Send factors full of `value`, have them merged, and compare the weights with `bases` and these factors."""
    a, b = torch.full((1, 2), value), torch.full((3, 1), value)
    factors = {"weight.a": ["float32", [1, 2]], "weight.b": ["float32", [3, 1]]}
    merge = {"do": "merge", "scale": 0.5, "merges": [["weight", -1, 0, 0, 0, "weight.a", "weight.b"]]}

    def work(number: int, rank: ExternalEngines) -> None:
        rank.connect()
        rank.begin()
        for order in ({"do": "keep", "tensors": ["weight"], "factors": factors}, merge):
            if order is merge:
                send(rank, "write", {"weight.a": a, "weight.b": b})
            rank.send_order(order, False)
            rank.wait()
        send(rank, "compare", {"weight": merge_adapter(bases[number][None], a[None], b[None], 0.5)[0]})
        finish(rank, 1)

    run.on_all(work)


@by_tcp_or_disk
def test_adapters_are_merged_into_the_weights_that_an_engine_has_loaded(served: Served, run: Run) -> None:
    """Also by an engine that has merged others before, in the same run or in another one."""
    bases = [model.weight.detach().clone() for model in served.engine.models]
    for value in (1.0, 2.0):
        sync_adapters(run, bases, value)
        assert run.ranks[0].num_usable == 1
    run.close()
    second = Run(served.config)
    sync_adapters(second, bases, 3.0)
    assert second.ranks[0].num_usable == 1
    for base, model in zip(bases, served.engine.models, strict=True):
        assert torch.equal(model.weight, base + 0.5 * 9.0)
    second.close()


@by_tcp_or_disk
def test_an_engine_with_other_weights_below_its_adapters_is_dropped(served: Served, run: Run) -> None:
    bases = [model.weight.detach().clone() for model in served.engine.models]
    bases[1] += 1
    sync_adapters(run, bases, 1.0)
    assert run.ranks[0].num_usable == 0
    (line,) = run.ranks[0].pop_changes()
    assert line.endswith(" is not used: its weights differ from the trainer's: weight (1)")


def test_adapters_of_another_shape_are_refused(served: Served) -> None:
    def describe(**lora: Any) -> dict[str, Any]:
        rollout = dataclasses.replace(served.config.rollout, sync_adapters_only=True)
        lora_config = dataclasses.replace(served.config.lora, **lora)
        return external_server.describe_engine(dataclasses.replace(served.config, rollout=rollout, lora=lora_config))

    assert not external_server.find_difference(describe(rank=4, alpha=8), describe(rank=4, alpha=16))
    text = external_server.find_difference(describe(rank=4), describe(rank=8))
    assert text == "its lora.rank is 8, and that of the run 4"
    by_disk = dataclasses.replace(served.config.rollout, external_weights_dir="/there")
    run = external_server.describe_engine(dataclasses.replace(served.config, rollout=by_disk))
    text = external_server.find_difference(run, external_server.describe_engine(served.config))
    assert text == "its rollout.external_weights_dir is unset, and that of the run set"
    text = external_server.find_difference(describe(rank=4), describe())
    assert text == "its rollout.sync_adapters_only is False, and that of the run True"


@pytest.mark.parametrize("served", ["disk"], indirect=True)
def test_weights_by_disk_arrive_and_leave_no_file(served: Served, run: Run, tmp_path: Path) -> None:
    names: list[str] = []
    for rank in run.ranks:
        assert rank._files is not None
        store = rank._files.store
        rank._files.store = lambda data, store=store: names.append(name := store(data)) or name  # type: ignore[func-returns-value, method-assign, misc]
    assert run.sync(3)
    assert [model.weight[0].tolist() for model in served.engine.models] == [[3, 0], [3, 1]]
    assert len(set(names)) == RANKS and list((tmp_path / "disk").iterdir()) == []


@pytest.mark.parametrize("served", ["disk"], indirect=True)
def test_an_engine_that_does_not_find_its_weights_says_so(served: Served, run: Run, tmp_path: Path) -> None:
    """The first of two ranks is not the one that fails, and yet the run logs the reason."""
    folder = tmp_path / "elsewhere"
    run.ranks[1]._files = WeightFiles(folder, "run")
    assert run.sync(1)
    (line,) = run.ranks[0].pop_changes()
    assert " is not used: it does not find " in line and line.endswith("the folder that the run writes to")
    assert list(folder.iterdir()) == []
    run.ranks[1]._files = WeightFiles(tmp_path / "disk", "run")
    assert run.sync(2) and run.ranks[0].num_usable == 1


@pytest.mark.parametrize("served", ["disk"], indirect=True)
def test_files_of_weights_are_removed_at_the_end_and_by_the_next_run(served: Served, run: Run, tmp_path: Path) -> None:
    """Also those of a run that was killed with more ranks; another run's stay."""
    files = run.ranks[1]._files
    assert files is not None
    left, other = tmp_path / "disk" / f"{files._prefix}9-killed.weights", tmp_path / "disk" / "megarl-other.weights"
    files.store(torch.zeros(4, dtype=torch.uint8))  # a weight sync that an error ends
    run.close()
    assert list((tmp_path / "disk").iterdir()) == []
    left.touch(), other.touch()
    Run(served.config).close()
    assert list((tmp_path / "disk").iterdir()) == [other]


@pytest.mark.parametrize("served", ["disk"], indirect=True)
def test_a_folder_that_hangs_costs_the_engine_alone(served: Served, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(WeightFiles, "store", lambda files, data: release.wait(30) and "late")
    for rank in run.ranks:
        rank._timeout = 0.2
    try:
        assert run.sync(1)
    finally:
        release.set()
    (line,) = run.ranks[0].pop_changes()
    assert "the run has not written its weights in 0.2 s, see rollout.external_weights_dir" in line


def share(run: Run, work: Callable[[SharedClient, StubClient], Any]) -> Any:
    """Run `work` with a client that shares requests between a stub of the run's own engine and the external one."""

    async def main() -> Any:
        local = StubClient(1)
        async with SharedClient(local, run.ranks[0], 60, 20) as client:  # type: ignore[arg-type]
            client.weight_version = 1
            return await asyncio.wait_for(work(client, local), 60)

    return asyncio.run(main())


class Conversation:
    """Identity of a conversation."""


def test_requests_are_shared_and_conversations_stay(served: Served, run: Run) -> None:
    run.sync(1)

    async def work(client: SharedClient, local: StubClient) -> None:
        conversations = [Conversation() for _ in range(6)]

        async def tokens() -> list[int]:
            answers = [client.generate([5], {}, conversation=conversation) for conversation in conversations]
            return [int(answer.token_ids[0]) for answer in await asyncio.gather(*answers)]

        first = await tokens()
        assert sorted(first) == [1, 1, 1, 2, 2, 2] and first == await tokens()
        received: list[int] = []
        await client.generate([5], {}, on_tokens=received.extend, conversation=conversations[first.index(2)])
        assert received == [2]
        with pytest.raises(RequestFailed, match="unlucky"):
            await client.generate([13], {}, conversation=conversations[first.index(2)])

    share(run, work)
    assert (run.ranks[0].num_external, run.ranks[0].num_repeated) == (7, 0)


def test_a_lost_engine_costs_no_request_and_its_record_starts_over(served: Served, run: Run) -> None:
    run.sync(1)
    prefix = RecordedPrefix(4, 1)

    async def work(client: SharedClient, local: StubClient) -> None:
        served.engine.client.may_answer.clear()
        conversations = [Conversation(), Conversation()]
        answers = [
            asyncio.create_task(client.generate([5], {}, prefix, conversation=conversation))
            for conversation in conversations
        ]
        while not served.engine.client.recorded:
            await asyncio.sleep(0.01)
        (engine,) = run.ranks[1]._engines.values()
        engine.drop("its network is gone")  # which ends the session of all ranks
        assert [int(answer.token_ids[0]) for answer in await asyncio.gather(*answers)] == [1, 1]
        assert local.recorded == [prefix, NOT_RECORDED]

    share(run, work)
    assert (run.ranks[0].num_external, run.ranks[0].num_repeated) == (0, 1)
    assert "is not used: " in run.ranks[0].pop_changes()[0]
    assert run.sync(2)


def test_stopping_returns_what_there_is(served: Served, run: Run) -> None:
    run.sync(1)

    async def work(client: SharedClient, local: StubClient) -> None:
        served.engine.client.may_answer.clear()
        local.may_answer.clear()
        answers = [asyncio.create_task(client.generate([5], {}, conversation=Conversation())) for _ in range(2)]
        while not served.engine.client.recorded:
            await asyncio.sleep(0.01)
        await client.stop_external(wait=True)
        assert not answers[0].done() and (await answers[1]).finish_reason == "abort"
        local.may_answer.set()
        assert (await answers[0]).finish_reason == "length"

    share(run, work)


def test_an_engine_that_does_not_stop_is_given_up_and_its_requests_are_repeated(
    served: Served, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.sync(1)

    async def stop() -> None: ...

    async def work(client: SharedClient, local: StubClient) -> None:
        monkeypatch.setattr(client, "_hang_timeout", 0.3)
        monkeypatch.setattr(served.engine.client, "stop", stop)
        served.engine.client.may_answer.clear()
        local.may_answer.clear()
        answers = [asyncio.create_task(client.generate([5], {}, conversation=Conversation())) for _ in range(2)]
        await asyncio.sleep(0)  # the second one still connects
        await client.stop_external(wait=True)
        local.may_answer.set()
        assert [int(answer.token_ids[0]) for answer in await asyncio.gather(*answers)] == [1, 1]

    share(run, work)
    assert (run.ranks[0].num_external, run.ranks[0].num_repeated) == (0, 1)
    assert run.ranks[0].num_usable == 0
    assert run.sync(2)


def test_a_request_that_fails_unexpectedly_is_repeated(
    served: Served, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the engine raises it, or its response cannot be sent."""
    for version, response in enumerate((KeyError("logprob"), object()), 1):
        run.sync(version)

        async def generate(*_: Any, response: Any = response) -> Any:
            if isinstance(response, Exception):
                raise response
            return response

        async def work(client: SharedClient, local: StubClient, version: int = version) -> None:
            client.weight_version = version
            local.may_answer.clear()
            answers = [asyncio.create_task(client.generate([5], {}, conversation=Conversation())) for _ in range(2)]
            while run.ranks[0].num_usable:
                await asyncio.sleep(0.01)
            local.may_answer.set()
            assert [int(answer.token_ids[0]) for answer in await asyncio.gather(*answers)] == [1, 1]

        monkeypatch.setattr(served.engine.client, "generate", generate)
        share(run, work)
    reasons = [line for line in run.ranks[0].pop_changes() if "is not used" in line]
    assert len(reasons) == 2 and "KeyError" in reasons[0] and "EncodingError" in reasons[1], reasons
    assert run.ranks[0].num_repeated == 2


def test_a_late_loss_of_an_old_session_does_not_end_the_next_one(run: Run) -> None:
    run.sync(1)
    (engine,) = run.ranks[0]._engines.values()
    old = engine.token
    engine.drop("its network is gone", old)
    run.sync(2)
    engine.drop("its network is gone", old)
    assert run.ranks[0].num_usable == 1


def test_an_engine_that_hangs_delays_few_weight_syncs(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that refuses connections is tried each time: that costs nothing."""
    tried: list[str] = []

    def open_slowly(engines: ExternalEngines, engine: ExternalEngine) -> None:
        tried.append(engine.address)
        time.sleep(0.35 if engine.address.endswith("1") else 0)
        raise WireError("nothing answers")

    monkeypatch.setattr(external_engines, "_SLOW_S", 0.3)
    monkeypatch.setattr(ExternalEngines, "_open", open_slowly)
    run = Run(served.config)
    run.on_all(lambda number, rank: rank.set_addresses(["10.0.0.5:1", "10.0.0.5:2"]))
    counts = []
    for _ in range(8):
        tried.clear()
        run.on_all(lambda number, rank: rank.connect())
        counts.append((tried.count("10.0.0.5:1"), tried.count("10.0.0.5:2")))
    assert [slow for slow, _ in counts] == [2, 2, 0, 2, 0, 0, 0, 2]
    assert all(quick == 2 for _, quick in counts)
    run.close()


def test_a_removed_engine_is_reported(served: Served, run: Run) -> None:
    run.sync(1)
    lead = run.ranks[0]
    lead.pop_changes()
    run.on_all(lambda number, rank: rank.set_addresses([]))
    assert lead.pop_changes() == [f"external engine {served.address} is not used: it was removed"]
    assert lead.pop_changes() == []


def test_changed_weights_are_refused(served: Served, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_engines, "hash_data", lambda data: b"of other weights")
    before = [model.weight[0].tolist() for model in served.engine.models]
    run.sync(1)
    assert [model.weight[0].tolist() for model in served.engine.models] == before
    assert run.ranks[0].num_usable == 0


def test_the_next_session_begins_after_the_engine_was_reset(
    served: Served, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.sync(1)
    orders: list[str] = []
    begin_update = served.engine.begin_update

    def abort_requests() -> None:
        time.sleep(0.3)
        orders.append("reset")

    def begin() -> None:
        orders.append("begin")
        begin_update()

    monkeypatch.setattr(served.engine, "abort_requests", abort_requests)
    monkeypatch.setattr(served.engine, "begin_update", begin)
    monkeypatch.setattr(external_server, "_SESSION_LOSS_S", 30.0)
    run.close()
    second = Run(served.config)
    assert second.sync(2) and orders == ["reset", "begin"]
    second.close()


def test_the_machine_of_an_engine_may_have_its_own_settings(served: Served) -> None:
    def describe(settings: dict[str, Any]) -> dict[str, Any]:
        rollout = dataclasses.replace(served.config.rollout, sglang=settings)
        return external_server.describe_engine(dataclasses.replace(served.config, rollout=rollout))

    run = describe({"attention_backend": "triton", "mem_fraction_static": 0.8})
    assert not external_server.find_difference(run, describe({"attention_backend": "triton"}))
    assert "rollout.sglang is {}" in external_server.find_difference(run, describe({}))
    assert "version of MegaRL is None" in external_server.find_difference(run, {})


@pytest.mark.parametrize("host", ["0.0.0.0", "0", "::"])
def test_does_not_listen_at_all_addresses(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="accepts connections at all addresses"):
        external_server.check_listen_host(host)
    monkeypatch.setenv("MEGARL_PUBLIC_NETWORK", "1")
    external_server.check_listen_host(host)
