"""Tinker's HTTP interface: sessions, models, samplers, futures. Runs on rank 0, in a thread of its own.

A request is checked when it arrives, so that a client's fault is answered with status 400 and changes nothing. It then
waits in the `WorkQueue`. The client polls its result by the request's id, which is the same for a repeated request, so
that it is not executed again.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import hmac
import math
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import zstandard
from aiohttp import web

from megarl.config import Config
from megarl.models.registry import load_hf_config
from megarl.serve.commands import CreateModel, ForwardBackward, LoadModel, OptimStep, SaveModel, UnloadModel
from megarl.serve.engine_sampling import EngineSampler
from megarl.serve.saved_weights import SAMPLER, TRAINING, SavedCheckpoint, SavedWeights
from megarl.serve.tinker_losses import check_loss
from megarl.serve.tinker_wire import (
    PROTOBUF,
    Fields,
    RequestRefused,
    check_tokens,
    format_forward_backward,
    format_samples,
    parse_forward_backward,
    parse_sample,
)
from megarl.serve.work_queue import Job, Request, SampleJob, WorkQueue
from megarl.types.adam_settings import AdamSettings

JSON = "application/json"
POLL_S = 20.0
"""Seconds that `retrieve_future` waits for a result; the client's time-out is 45."""
COLLECTED_S = 60.0
"""Seconds for which a collected result can be collected again, for a client that lost the response."""
UNCOLLECTED_S = 3600.0
"""Seconds for which a result is kept that no client collects."""
MAX_UNNAMED_SAMPLERS = 4
"""Unnamed samplers of a model whose weights stay on disk."""
MAX_EXAMPLES = 65536
STABLE_REINFORCE = "stable_reinforce"
_NO_STABLE_REINFORCE = (
    f"the formula of {STABLE_REINFORCE} is not public; use another loss_fn, or have the server compute one in its "
    f"place with options.loss_aliases={{{STABLE_REINFORCE}: importance_sampling}}"
)


@dataclass(frozen=True)
class ServiceSettings:
    """max_request: bytes of a body. api_key: empty accepts every key. model_name: empty for `model.path`. loss_aliases:
    losses by the names that clients may call them, too."""

    max_request: int
    max_models: int
    session_timeout: float
    api_key: str
    model_name: str = ""
    loss_aliases: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Session:
    last_seen: float
    user_metadata: dict[str, str]
    models: list[str] = field(default_factory=list)
    samplers: list[str] = field(default_factory=list)


@dataclass
class Sampler:
    """folder: of its weights. path: their tinker:// path; empty for the base model and unnamed weights."""

    folder: str
    path: str
    num_clients: int = 0


@dataclass
class Pending:
    """A request and how its result is encoded. finished, collected: when, by time.monotonic; 0 for not yet."""

    request: Request
    encode: Callable[[Any], bytes]
    content_type: str = JSON
    finished: float = 0.0
    collected: float = 0.0


class TinkerService:
    """max_positions: tokens of the longest sequence that the model can be trained on."""

    def __init__(
        self,
        config: Config,
        max_positions: int,
        settings: ServiceSettings,
        saved: SavedWeights,
        queue: WorkQueue,
        sampler: EngineSampler,
        log: Callable[[str], None],
    ) -> None:
        self._config, self._settings, self._saved, self._queue = config, settings, saved, queue
        self._sampler, self._log, self._max_positions = sampler, log, max_positions
        self._model_name = settings.model_name or config.model.path
        self._vocab_size = int(load_hf_config(config.model.path)["vocab_size"])
        self._sessions: dict[str, Session] = {}
        self._samplers: dict[str, Sampler] = {}
        self._pending: dict[str, Pending] = {}
        self._unnamed_samplers: dict[str, list[Path]] = {}
        """Folders of each model's latest unnamed samplers."""
        self._loop = asyncio.new_event_loop()
        self._runner: web.AppRunner | None = None
        self._thread = threading.Thread(target=self._loop.run_forever, name="tinker service", daemon=True)

    def start(self, host: str, port: int) -> str:
        """Listen, and return the address."""
        self._thread.start()
        return asyncio.run_coroutine_threadsafe(self._start(host, port), self._loop).result()

    async def _start(self, host: str, port: int) -> str:
        app = web.Application(client_max_size=self._settings.max_request, middlewares=[self._answer])
        posts: dict[str, Callable[[Any], Awaitable[Any]]] = {
            "client/config": self._client_config,
            "client/dynamic_config": self._dynamic_config,
            "telemetry": self._telemetry,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "create_model": self._create_model,
            "unload_model": self._unload_model,
            "get_info": self._get_info,
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            "save_weights": partial(self._save_weights, kind=TRAINING),
            "save_weights_for_sampler": partial(self._save_weights, kind=SAMPLER),
            "load_weights": self._load_weights,
            "weights_info": self._weights_info,
            "create_sampling_session": self._create_sampling_session,
            "join_sampling_session": self._join_sampling_session,
            "asample": self._asample,
            "retrieve_future": self._retrieve_future,
            "cancel_future": self._cancel_future,
            "sessions/{session}/finish": self._finish_session,
        }
        gets: dict[str, Callable[[Any], Awaitable[Any]]] = {
            "healthz": self._health,
            "get_server_capabilities": self._capabilities,
            "samplers/{sampler}": self._get_sampler,
            "sessions": self._list_sessions,
            "sessions/{session}": self._get_session,
            "training_runs": self._list_runs,
            "training_runs/{model}": self._get_run,
            "training_runs/{model}/checkpoints": self._list_checkpoints,
            "checkpoints": self._list_checkpoints,
        }
        for path, handler in posts.items():
            app.router.add_post(f"/api/v1/{path}", handler)
        for path, handler in gets.items():
            app.router.add_get(f"/api/v1/{path}", handler)
        app.router.add_delete("/api/v1/training_runs/{model}/checkpoints/{kind}/{name}", self._delete_checkpoint)
        self._runner = web.AppRunner(app, access_log=None, auto_decompress=False)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port, shutdown_timeout=1.0, backlog=4096).start()
        self._cleanup = asyncio.ensure_future(self._clean_up())
        name, chosen = self._runner.addresses[0][:2]
        return f"http://{name}:{chosen}"

    def close(self) -> None:
        """Stop listening."""

        async def stop() -> None:
            self._cleanup.cancel()
            if self._runner is not None:
                await self._runner.cleanup()

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def run_samples(self, jobs: Sequence[SampleJob], version: int) -> RunningSamples:
        """Start these samples with the weights that the engines have, and finish the jobs as they complete."""

        async def run(job: SampleJob) -> None:
            try:
                job.finish(await self._sampler.sample(job.request, version))
            except Exception as error:  # noqa: BLE001  of one request, and its answer
                if not job.answer.done():
                    job.answer.set_exception(error)

        async def run_all() -> None:
            await asyncio.gather(*map(run, jobs))

        return RunningSamples(asyncio.run_coroutine_threadsafe(run_all(), self._loop))

    # --- one request

    @web.middleware
    async def _answer(self, request: web.Request, handler: Callable[[web.Request], Awaitable[Any]]) -> web.Response:
        """Check the key, call the handler, and answer with its result or error as JSON."""
        try:
            if self._settings.api_key and not hmac.compare_digest(
                request.headers.get("X-API-Key", "").encode(errors="replace"), self._settings.api_key.encode()
            ):
                return _json({"error": "the API key is wrong", "category": "user"}, 401)
            result = await handler(request)
            return result if isinstance(result, web.Response) else _json(result)
        except RequestRefused as error:
            return _json({"error": str(error), "category": "user"}, error.status)
        except web.HTTPException as error:
            reasons = {
                404: f"there is no {request.method} {request.path[:200]}",
                413: f"the body is larger than {self._settings.max_request} bytes",
            }
            return _json({"error": reasons.get(error.status, error.reason), "category": "user"}, error.status)
        except Exception as error:  # noqa: BLE001  our fault, and no reason to end the service
            self._log(f"serve: {request.path[:200]} raised {type(error).__name__}: {error}")
            return _json({"error": f"{type(error).__name__}: {error}", "category": "server"}, 500)

    async def _fields(self, request: web.Request) -> Fields:
        body = await request.read()
        try:
            return Fields(orjson.loads(body), request.path.rpartition("/")[2])
        except orjson.JSONDecodeError:
            raise RequestRefused("the body is not JSON") from None

    def _see(self, session_id: str) -> Session:
        session = self._sessions.get(session_id)
        if session is None:
            raise RequestRefused(f"session {session_id[:80]} does not exist, or has ended", 410)
        session.last_seen = time.monotonic()
        return session

    def _see_model(self, model_id: str) -> Session:
        """Return the session of a model. Raises RequestRefused unless the model exists."""
        for session in self._sessions.values():
            if model_id in session.models:
                session.last_seen = time.monotonic()
                return session
        raise RequestRefused(f"model {model_id[:120]} does not exist, or its session has ended", 404)

    def _submit(
        self,
        name: str,
        request: Job | SampleJob,
        encode: Callable[[Any], bytes],
        content_type: str = JSON,
    ) -> None:
        """Queue a request whose result has this name. Raises RequestRefused if too many wait or are not collected."""
        session, limit = name.partition(":")[0], self._queue.capacity
        results = (item for other, item in self._pending.items() if other.partition(":")[0] == session)
        if sum(not item.collected for item in results) >= limit:
            raise RequestRefused(f"the session has {limit} results that it has not retrieved; retrieve them first", 429)
        self._queue.put(request)
        pending = self._pending[name] = Pending(request, encode, content_type)

        def on_done(future: concurrent.futures.Future[Any]) -> None:
            pending.finished = time.monotonic()

        request.answer.add_done_callback(on_done)

    def _submit_json(self, name: str, job: Job, result: dict[str, Any]) -> None:
        self._submit(name, job, lambda value: orjson.dumps(result if value is None else value))

    @staticmethod
    def _name(owner: str, fields: Fields) -> str:
        """Return the id of a request: the same for the same sequence number."""
        number = fields.raw("seq_id")
        return f"{owner}:{number if type(number) is int else uuid.uuid4().hex}"

    # --- configuration, sessions

    async def _client_config(self, request: web.Request) -> dict[str, Any]:
        # Chunks of a batch in turn, so that requests arrive in their order.
        return {"parallel_fwdbwd_chunks": False, "proto_compress_fwdbwd": True}

    async def _dynamic_config(self, request: web.Request) -> dict[str, Any]:
        return {}

    async def _telemetry(self, request: web.Request) -> dict[str, Any]:
        return {"status": "accepted"}

    async def _health(self, request: web.Request) -> dict[str, Any]:
        return {"status": "ok"}

    async def _capabilities(self, request: web.Request) -> dict[str, Any]:
        model = {
            "model_name": self._model_name,
            "max_context_length": self._config.rollout.max_context,
            "trainable": True,
            "sampleable": True,
        }
        return {"supported_models": [model]}

    async def _create_session(self, request: web.Request) -> dict[str, Any]:
        fields = await self._fields(request)
        session_id = uuid.uuid4().hex
        self._sessions[session_id] = Session(time.monotonic(), _texts(fields.raw("user_metadata")))
        return {"type": "create_session", "session_id": session_id}

    async def _heartbeat(self, request: web.Request) -> dict[str, Any]:
        self._see((await self._fields(request)).text("session_id"))
        return {"type": "session_heartbeat"}

    async def _finish_session(self, request: web.Request) -> web.Response:
        self._end_session(request.match_info["session"])
        return web.Response(status=204)

    def _end_session(self, session_id: str) -> None:
        """Drop what a session holds in memory; what it has saved stays."""
        session = self._sessions.pop(session_id, None)
        for model_id in session.models if session is not None else ():
            self._drop_model(model_id)
        for sampler in session.samplers if session is not None else ():
            self._samplers.pop(sampler, None)
        for name, pending in list(self._pending.items()):
            if name.partition(":")[0] == session_id and pending.finished:
                del self._pending[name]

    def _drop_model(self, model_id: str) -> Job:
        for folder in self._unnamed_samplers.pop(model_id, []):
            self._saved.delete(folder)
        job = Job(UnloadModel(model_id))
        self._queue.put(job, is_limited=False)
        return job

    async def _list_sessions(self, request: web.Request) -> dict[str, Any]:
        return {"sessions": list(self._sessions)}

    async def _get_session(self, request: web.Request) -> dict[str, Any]:
        session = self._see(request.match_info["session"])
        return {
            "training_run_ids": session.models,
            "sampler_ids": session.samplers,
            "user_metadata": session.user_metadata,
        }

    # --- models

    def _check_base_model(self, name: str) -> None:
        path = Path(self._config.model.path)
        if name not in (self._model_name, str(path), str(path.resolve()), path.name):
            raise RequestRefused(f"base_model {name[:200]!r} is not served; this server has {self._model_name}")

    async def _create_model(self, request: web.Request) -> dict[str, Any]:
        fields = await self._fields(request)
        self._check_base_model(fields.text("base_model"))
        if self._config.lora.rank and fields.has("lora_config"):
            rank = fields.nested("lora_config").integer("rank", 1, 65536)
            if rank != self._config.lora.rank:
                raise RequestRefused(
                    f"lora_config: rank {rank}, but this server trains adapters of rank {self._config.lora.rank} "
                    "(its key lora.rank)"
                )
        self._check_optimizer(fields)
        return self._start_model(fields, lambda model_id: CreateModel(model_id), "create_model")

    def _check_optimizer(self, fields: Fields) -> None:
        if fields.has("optimizer_config") and fields.nested("optimizer_config").text("type", "adamw") != "adamw":
            raise RequestRefused("optimizer_config: this server has AdamW only")

    def _start_model(self, fields: Fields, make: Callable[[str], CreateModel], kind: str) -> dict[str, Any]:
        session_id = fields.text("session_id")
        session = self._see(session_id)
        model_id = f"{session_id}:train:{fields.integer('model_seq_id', 0, 2**31)}"
        name = f"{model_id}:create"
        if name not in self._pending:
            if sum(len(other.models) for other in self._sessions.values()) >= self._settings.max_models:
                raise RequestRefused(
                    f"the server has {self._settings.max_models} models (options.max_models); finish a session first"
                )
            job = Job(make(model_id))
            self._submit_json(name, job, {"type": kind, "model_id": model_id})
            session.models.append(model_id)
            job.answer.add_done_callback(partial(self._forget_failed, session, model_id))
        return {"request_id": name, "model_id": model_id}

    def _forget_failed(self, session: Session, model_id: str, answer: concurrent.futures.Future[Any]) -> None:
        if answer.exception() is not None and model_id in session.models:
            session.models.remove(model_id)

    async def _unload_model(self, request: web.Request) -> dict[str, Any]:
        model_id = (await self._fields(request)).text("model_id")
        name = f"{model_id}:unload"
        is_loaded = any(model_id in session.models for session in self._sessions.values())
        if is_loaded or name not in self._pending:  # otherwise a client repeats a request whose answer it has lost
            self._see_model(model_id).models.remove(model_id)
            job = self._drop_model(model_id)
            result = orjson.dumps({"type": "unload_model", "model_id": model_id})
            self._pending[name] = Pending(job, lambda value: result, finished=time.monotonic())
        return {"request_id": name, "model_id": model_id}

    async def _get_info(self, request: web.Request) -> dict[str, Any]:
        model_id = (await self._fields(request)).text("model_id")
        self._see_model(model_id)
        tokenizer = self._settings.model_name or str(Path(self._config.model.path).resolve())
        return {
            "type": "get_info",
            "model_id": model_id,
            "model_name": self._model_name,
            "model_data": {"arch": None, "model_name": self._model_name, "tokenizer_id": tokenizer},
            **self._lora_fields(),
        }

    def _lora_fields(self) -> dict[str, Any]:
        rank = self._config.lora.rank
        return {"is_lora": bool(rank), "lora_rank": rank or None}

    # --- training

    async def _forward_backward(self, request: web.Request) -> dict[str, Any]:
        if request.content_type != PROTOBUF:
            raise RequestRefused(f"forward_backward needs a body of type {PROTOBUF}", 415)
        body = await request.read()
        if request.headers.get("Content-Encoding", "") == "zstd":
            body = _decompress(body, self._settings.max_request)
        parsed = await asyncio.to_thread(parse_forward_backward, body, MAX_EXAMPLES)
        self._see_model(parsed.model_id)
        name = f"{parsed.model_id}:{parsed.seq_id or uuid.uuid4().hex}"
        if name not in self._pending:
            loss = self._settings.loss_aliases.get(parsed.loss, parsed.loss)
            if loss == STABLE_REINFORCE:
                raise RequestRefused(_NO_STABLE_REINFORCE)
            check_loss(loss, parsed.options, parsed.examples)
            for number, example in enumerate(parsed.examples):
                check_tokens(example.tokens, self._vocab_size, f"datum {number}: model_input")
                check_tokens(example.targets, self._vocab_size, f"datum {number}: target_tokens")
                if len(example.tokens) >= self._max_positions:
                    raise RequestRefused(
                        f"datum {number} has {len(example.tokens)} tokens; the model takes {self._max_positions - 1}"
                    )
            command = ForwardBackward(parsed.model_id, parsed.examples, loss, parsed.options, parsed.forward_only)
            self._submit(name, Job(command), lambda result: format_forward_backward(*result), PROTOBUF)
        return {"request_id": name, "model_id": parsed.model_id}

    async def _optim_step(self, request: web.Request) -> dict[str, Any]:
        fields = await self._fields(request)
        model_id = fields.text("model_id")
        self._see_model(model_id)
        if not fields.has("adam_params"):
            raise RequestRefused("optim_step lacks adam_params; this server has AdamW only")
        params, name = fields.nested("adam_params"), self._name(model_id, fields)
        adam = AdamSettings(
            lr=params.number("learning_rate", 0, 10, 1e-4),
            beta1=params.number("beta1", 0, math.nextafter(1, 0), 0.9),
            beta2=params.number("beta2", 0, math.nextafter(1, 0), 0.95),
            eps=params.number("eps", 0, 1, 1e-12),
            weight_decay=params.number("weight_decay", 0, 10, 0.0),
            max_grad_norm=max(0.0, params.number("grad_clip_norm", -1e9, 1e9, 0.0)),
        )
        if name not in self._pending:
            job = Job(OptimStep(model_id, adam))
            self._submit(name, job, lambda metrics: orjson.dumps({"metrics": metrics}))
        return {"request_id": name, "model_id": model_id}

    # --- checkpoints

    async def _save_weights(self, request: web.Request, kind: str) -> dict[str, Any]:
        fields = await self._fields(request)
        model_id = fields.text("model_id")
        session = self._see_model(model_id)
        name = self._name(model_id, fields)
        if name in self._pending:
            return {"request_id": name, "model_id": model_id}
        is_named = fields.has("path")
        sampler_id = f"{model_id.partition(':')[0]}:sample:{fields.raw('sampling_session_seq_id')}"
        if not is_named and (kind == TRAINING or not fields.has("sampling_session_seq_id")):
            raise RequestRefused("the checkpoint needs a name: path")
        label = fields.text("path") if is_named else f"unnamed-{uuid.uuid4().hex}"
        folder = self._saved.folder_of(model_id, kind, label)
        expires = fields.integer("ttl_seconds", 1, 10**9) if fields.has("ttl_seconds") else None
        metadata = _texts(fields.raw("user_metadata"))
        may_overwrite = fields.flag("overwrite") and kind == TRAINING
        if folder.with_name(f"{label}.json").exists() and not may_overwrite:
            raise RequestRefused(f"the checkpoint {label!r} exists already; choose another name, or overwrite it")

        # A checkpoint that is overwritten stays until the new one is on disk.
        written = folder.with_name(f"{label}.{uuid.uuid4().hex}") if kind == TRAINING else folder

        def complete() -> None:
            if is_named:
                now, rank = time.time(), self._config.lora.rank
                until = None if expires is None else now + expires
                saved = SavedCheckpoint(model_id, kind, label, self._model_name, rank, now, until, metadata)
                self._saved.record(saved, written)

        folder.parent.mkdir(parents=True, exist_ok=True)
        if kind == SAMPLER:
            self._saved.delete(folder)  # left over from a server that has died
        job = Job(SaveModel(model_id, str(written), kind == SAMPLER), complete)
        path = f"tinker://{model_id}/{kind}/{label}"
        if is_named:
            result = {"path": path}
        else:
            session.samplers.append(sampler_id)
            self._samplers[sampler_id] = Sampler(str(folder), "")
            self._limit_samplers(model_id, folder)
            result = {"sampling_session_id": sampler_id}
        self._submit_json(name, job, {"type": "save_weights" + "_for_sampler" * (kind == SAMPLER), **result})
        return {"request_id": name, "model_id": model_id}

    def _limit_samplers(self, model_id: str, folder: Path) -> None:
        """Add an unnamed sampler's weights, and delete the model's oldest ones if there are too many."""
        folders = self._unnamed_samplers.setdefault(model_id, [])
        folders.append(folder)
        if len(folders) > MAX_UNNAMED_SAMPLERS:
            self._saved.delete(folders.pop(0))

    async def _load_weights(self, request: web.Request) -> dict[str, Any]:
        fields = await self._fields(request)
        saved, folder = self._saved.find(fields.text("path"), TRAINING)
        if saved.base_model != self._model_name or saved.lora_rank != self._config.lora.rank:
            raise RequestRefused(
                f"{saved.path} is of {saved.base_model} with LoRA rank {saved.lora_rank}, but this server trains "
                f"{self._model_name} with rank {self._config.lora.rank}"
            )
        has_optimizer = fields.flag("optimizer")
        if not fields.has("model_id"):
            if fields.has("base_model"):
                self._check_base_model(fields.text("base_model"))
            self._check_optimizer(fields)
            return self._start_model(
                fields, lambda model_id: CreateModel(model_id, str(folder), has_optimizer), "load_weights"
            )
        model_id = fields.text("model_id")
        self._see_model(model_id)
        name = self._name(model_id, fields)
        if name not in self._pending:
            result = {"type": "load_weights", "path": saved.path, "model_id": model_id}
            self._submit_json(name, Job(LoadModel(model_id, str(folder), has_optimizer)), result)
        return {"request_id": name, "model_id": model_id}

    async def _weights_info(self, request: web.Request) -> dict[str, Any]:
        saved, _ = self._saved.find((await self._fields(request)).text("tinker_path"))
        rank = saved.lora_rank
        return {"base_model": saved.base_model, "is_lora": bool(rank), "lora_rank": rank or None}

    async def _list_checkpoints(self, request: web.Request) -> dict[str, Any]:
        saved = [item.describe() for item in self._saved.list(request.match_info.get("model", ""))]
        return _page(request, "checkpoints", saved)

    async def _delete_checkpoint(self, request: web.Request) -> web.Response:
        info = request.match_info
        _, folder = self._saved.find(f"tinker://{info['model']}/{info['kind']}/{info['name']}")
        self._saved.delete(folder)
        return web.Response(status=204)

    async def _list_runs(self, request: web.Request) -> dict[str, Any]:
        models = dict.fromkeys(item.model_id for item in self._saved.list())
        models |= dict.fromkeys(model for session in self._sessions.values() for model in session.models)
        return _page(request, "training_runs", [self._describe_run(model_id) for model_id in models])

    async def _get_run(self, request: web.Request) -> dict[str, Any]:
        model_id = request.match_info["model"]
        if not self._saved.list(model_id):
            self._see_model(model_id)
        return self._describe_run(model_id)

    def _describe_run(self, model_id: str) -> dict[str, Any]:
        saved = self._saved.list(model_id)
        latest = {kind: next((item for item in saved if item.kind == kind), None) for kind in (TRAINING, SAMPLER)}
        training, sampler = latest[TRAINING], latest[SAMPLER]
        return {
            "training_run_id": model_id,
            "base_model": self._model_name,
            "model_owner": "megarl",
            "last_request_time": (saved[0].describe()["time"] if saved else "1970-01-01T00:00:00+00:00"),
            "last_checkpoint": None if training is None else training.describe(),
            "last_sampler_checkpoint": None if sampler is None else sampler.describe(),
            **self._lora_fields(),
        }

    # --- sampling

    async def _create_sampling_session(self, request: web.Request) -> dict[str, Any]:
        fields = await self._fields(request)
        session_id = fields.text("session_id")
        session = self._see(session_id)
        path = fields.text("model_path", "")
        if path:
            saved, folder = self._saved.find(path, SAMPLER)
            if saved.base_model != self._model_name:
                raise RequestRefused(f"{path} is of {saved.base_model}, but this server has {self._model_name}")
        else:
            self._check_base_model(fields.text("base_model"))
            folder = self._saved.base_folder
        sampler_id = f"{session_id}:sample:{fields.integer('sampling_session_seq_id', 0, 2**31)}"
        if sampler_id not in self._samplers:
            self._samplers[sampler_id] = Sampler(str(folder), path)
            session.samplers.append(sampler_id)
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    def _find_sampler(self, sampler_id: str) -> Sampler:
        sampler = self._samplers.get(sampler_id)
        if sampler is None:
            raise RequestRefused(f"sampling session {sampler_id[:120]} does not exist, or its session has ended", 404)
        self._see(sampler_id.partition(":")[0])
        return sampler

    async def _join_sampling_session(self, request: web.Request) -> dict[str, Any]:
        sampler = self._find_sampler((await self._fields(request)).text("sampling_session_id"))
        sampler.num_clients += 1
        return {"type": "join_sampling_session", "client_counter": sampler.num_clients}

    async def _get_sampler(self, request: web.Request) -> dict[str, Any]:
        sampler_id = request.match_info["sampler"]
        path = self._find_sampler(sampler_id).path
        return {"sampler_id": sampler_id, "base_model": self._model_name, "model_path": path or None}

    async def _asample(self, request: web.Request) -> dict[str, Any]:
        fields = await self._fields(request)
        sampler_id = fields.text("sampling_session_id")
        sampler = self._find_sampler(sampler_id)
        if not Path(sampler.folder).exists() and sampler.folder != str(self._saved.base_folder):
            waiting = any(
                isinstance(item.request, Job)
                and isinstance(item.request.command, SaveModel)
                and item.request.command.folder == sampler.folder
                for item in self._pending.values()
                if not item.finished
            )
            if not waiting:
                raise RequestRefused(
                    f"the sampler's weights are deleted: a model has its last {MAX_UNNAMED_SAMPLERS} unnamed ones; "
                    "save them under a name"
                )
        if fields.flag("record_stability_info") and STABLE_REINFORCE not in self._settings.loss_aliases:
            raise RequestRefused(_NO_STABLE_REINFORCE)
        parsed = parse_sample(fields, self._vocab_size, self._config.rollout.max_context)
        if parsed.seed is not None and not self._config.rollout.sglang.get("enable_deterministic_inference"):
            raise RequestRefused(
                "sampling_params: seed, but this server's engines are not deterministic (its key "
                "rollout.sglang.enable_deterministic_inference)"
            )
        name = self._name(sampler_id, fields)
        if name not in self._pending:
            self._submit(name, SampleJob(sampler.folder, parsed), format_samples, PROTOBUF)
        return {"request_id": name, "sample_sequence_ids": [f"{name}:{i}" for i in range(parsed.num_samples)]}

    # --- futures

    async def _retrieve_future(self, request: web.Request) -> web.Response:
        name = (await self._fields(request)).text("request_id")
        pending = self._pending.get(name)
        if pending is None:
            raise RequestRefused(f"there is no request {name[:160]}, or its result has expired", 410)
        if (session := self._sessions.get(name.partition(":")[0])) is not None:
            session.last_seen = time.monotonic()
        answer = pending.request.answer
        if not answer.done():
            waiting = asyncio.wrap_future(answer)
            waiting.add_done_callback(lambda future: future.cancelled() or future.exception())  # `answer` has it, too
            await asyncio.wait([waiting], timeout=POLL_S)
        if not answer.done():
            return _json({"type": "try_again", "request_id": name, "queue_state": "active"}, 408)
        pending.collected = pending.collected or time.monotonic()
        try:
            result = answer.result()
        except RequestRefused as error:
            return _json({"error": str(error), "category": "user"})
        except Exception as error:  # noqa: BLE001  the answer to one request
            return _json({"error": f"{type(error).__name__}: {error}", "category": "server"})
        body = await asyncio.to_thread(pending.encode, result)
        return web.Response(body=body, content_type=pending.content_type)

    async def _cancel_future(self, request: web.Request) -> web.Response:
        pending = self._pending.get((await self._fields(request)).text("request_id"))
        if pending is not None and isinstance(pending.request, SampleJob):
            pending.request.fail("the request was cancelled")
        return web.Response(status=204)

    async def _clean_up(self) -> None:
        """Drop expired results, sessions and checkpoints."""
        while True:
            await asyncio.sleep(5)
            now = time.monotonic()
            for name, pending in list(self._pending.items()):
                is_old = pending.finished and now - pending.finished > UNCOLLECTED_S
                if is_old or (pending.collected and now - pending.collected > COLLECTED_S):
                    del self._pending[name]
            for session_id, session in list(self._sessions.items()):
                if now - session.last_seen > self._settings.session_timeout:
                    self._log(f"serve: session {session_id} has ended without a sign of life; its models are dropped")
                    self._end_session(session_id)
            try:
                await asyncio.to_thread(self._saved.delete_expired)
            except OSError as error:  # the next round tries again
                self._log(f"serve: expired checkpoints cannot be deleted: {error}")


class RunningSamples:
    """Samples in progress."""

    def __init__(self, future: concurrent.futures.Future[None]) -> None:
        self._future = future

    def wait(self, seconds: float) -> bool:
        """Wait for at most `seconds`; return whether all are complete."""
        return bool(concurrent.futures.wait([self._future], seconds).done)


def _texts(tree: Any) -> dict[str, str]:
    """Return user metadata as texts."""
    return {str(name): str(value) for name, value in tree.items()} if isinstance(tree, dict) else {}


def _page(request: web.Request, name: str, items: Sequence[Any]) -> dict[str, Any]:
    """Return the page of a list that the query asks for."""
    offset, limit = (
        int(value) if (value := request.query.get(key, "")).isdecimal() else default
        for key, default in (("offset", 0), ("limit", 1000))
    )
    cursor = {"offset": offset, "limit": limit, "total_count": len(items)}
    return {name: items[offset : offset + limit], "cursor": cursor}


def _decompress(body: bytes, limit: int) -> bytes:
    """Decompress zstd. Raises RequestRefused for more than `limit` bytes."""
    try:
        content = zstandard.ZstdDecompressor().stream_reader(body).read(limit + 1)
    except zstandard.ZstdError:
        raise RequestRefused("the body is not compressed by zstd") from None
    if len(content) > limit:
        raise RequestRefused(f"the body is larger than {limit} bytes", 413)
    return content


def _json(content: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(content), status=status, content_type=JSON)
