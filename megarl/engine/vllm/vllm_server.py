"""The program of a vLLM engine, see `engine/engine_host.py`: an HTTP server around vLLM's AsyncLLM.

It answers the paths of SGLang that `http_engine.py` and `http_client.py` ask for, in SGLang's JSON. vLLM's own server
has no limit of time for a request, guards some paths only, and would need 22 more packages.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import orjson
import pybase64
from aiohttp import web

from megarl.engine.sglang.sglang_parsers import ParserProcess
from megarl.engine.vllm.vllm_settings import FAMILIES, adapter_id

MODEL_CLASSES = (*FAMILIES, "DeepSeekMTPModel")
"""vLLM's classes of the families, and of draft models."""
_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
_NAMES |= {"no_stop_trim": "include_stop_str_in_output"}
"""SGLang's names of sampling parameters, and vLLM's."""
_SAME_NAMES = frozenset(
    "temperature top_p min_p stop stop_token_ids ignore_eos skip_special_tokens frequency_penalty presence_penalty "
    "repetition_penalty".split()
)
_ALL_TOKENS = (-1, 1 << 30)
"""Values of SGLang's top_k that mean all tokens; vLLM's is 0."""
_POLL_S = 0.2
_START_VERSION = "0"
"""Weight version of an adapter that no weight sync has written since the engine's start."""


def preload() -> None:
    """Import all that an engine's processes will need. Afterwards this process still has one thread."""
    import vllm.v1.attention.backends.cpu_attn
    import vllm.v1.engine.async_llm
    import vllm.v1.engine.core
    import vllm.v1.spec_decode.eagle
    import vllm.v1.worker.gpu_worker  # noqa: F401
    from vllm.model_executor.models import ModelRegistry
    from vllm.platforms import current_platform

    import megarl.engine.vllm.vllm_worker  # noqa: F401

    for name in MODEL_CLASSES:  # vLLM inspects a class that is not registered in another process, which takes 17 s
        ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
    current_platform.import_kernels()


class Refused(Exception):
    """A request is answered with this `status` and `text`."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def sampling_values(params: Mapping[str, Any]) -> dict[str, Any]:
    """Translate SGLang's sampling parameters to vLLM's. Raises Refused for one that is not among them."""
    values: dict[str, Any] = {}
    for name, value in params.items():
        if name == "top_k":
            values[name] = 0 if value in _ALL_TOKENS else value
        elif name in _NAMES or name in _SAME_NAMES:
            values[_NAMES.get(name, name)] = value
        else:
            raise Refused(400, f"the sampling parameter {name} is not supported with vLLM")
    return values


class Load:
    """Reports of vLLM to its loggers, under the names of SGLang's /v1/loads."""

    def __init__(self) -> None:
        self.values = {"num_running_reqs": 0, "num_waiting_reqs": 0, "num_used_tokens": 0, "max_total_num_tokens": 0}
        self.values |= {"total_prefill_uncached_tokens": 0, "total_prefill_busy_us": 0}

    def make_logger(self, config: Any, engine_index: int = 0) -> Any:
        """Return a logger for vLLM, which calls this once it knows the size of the KV cache."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        self.values["max_total_num_tokens"] = config.cache_config.kv_cache_size_tokens or 0
        add_step = self.add_step

        class Logger(StatLoggerBase):
            def __init__(self) -> None: ...

            def log_engine_initialized(self) -> None: ...

            def record(self, scheduler_stats: Any, *others: Any, **named: Any) -> None:
                if scheduler_stats is not None:
                    add_step(scheduler_stats)

        return Logger()

    def add_step(self, stats: Any) -> None:
        """Add a step of the engine. stats: vLLM's SchedulerStats."""
        values, step = self.values, stats.iteration_details
        values["num_running_reqs"] = stats.num_running_reqs
        values["num_waiting_reqs"] = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
        values["num_used_tokens"] = round(stats.kv_cache_usage * values["max_total_num_tokens"])
        if step is not None and step.num_ctx_tokens:
            values["total_prefill_uncached_tokens"] += step.num_ctx_tokens
            values["total_prefill_busy_us"] += round(step.elapsed_ms * 1000)


class Server:
    """The engine and the HTTP server. settings: see `main`."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from megarl.engine.vllm.vllm_worker import SETTINGS, install_patches

        install_patches()
        self._settings = settings
        for_workers = {name: settings[name] for name in ("folder", "threads", "routing", "request_timeout", "lora")}
        arguments = AsyncEngineArgs(**settings["engine_args"], additional_config={SETTINGS: for_workers})
        config = arguments.create_engine_config()
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # the CPU platform has set spawn
        self._load = Load()
        self._engine = AsyncLLM.from_vllm_config(config, disable_log_stats=True, stat_loggers=[self._load.make_logger])
        self._versions: dict[str, str] = {}
        """Weight version of each adapter, and of the base weights as ""; the engine labels tokens with all of them."""
        self._numbers = itertools.count()
        self._adapters: dict[str, Any] = {}
        self._parsers = ParserProcess(settings["parser_python"])
        self._parser_lock = asyncio.Lock()  # the process answers one question at a time

    async def run(self) -> None:
        """Serve until the engine dies, which ends this process with status 1."""
        await self._set_version("", self._settings["weight_version"])
        async with self._parsers:
            marker = await self._parsers.find_marker(self._settings["tool_call_parser"])
            Path(self._settings["facts"]).write_text(json.dumps({"tool_call_marker": marker}))
            app = web.Application(client_max_size=1 << 30, middlewares=[self._make_guard()])
            app.add_routes([web.get("/health", self.health), web.get("/model_info", self.model_info)])
            app.add_routes([web.get("/v1/loads", self.loads)])
            for handler in (
                *(self.generate, self.abort_request, self.flush_cache, self.pause_generation),
                *(self.continue_generation, self.begin_weight_update, self.end_weight_update),
                *(self.update_weights_from_tensor, self.update_weight_version, self.parse_function_call),
            ):
                app.router.add_post(f"/{handler.__name__}", handler)
            # A client that goes away cancels its handler, which aborts the request.
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, handler_cancellation=True)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", self._settings["port"], backlog=4096).start()
            while not self._engine.errored:
                await asyncio.sleep(_POLL_S)
        print("vLLM's engine has died", flush=True)
        os._exit(1)

    def shutdown(self) -> None:
        """End the engine's processes."""
        self._engine.shutdown()

    def _make_guard(self) -> Any:
        from vllm.exceptions import VLLMClientError

        key = f"Bearer {self._settings['api_key']}".encode()

        @web.middleware
        async def guard(request: web.Request, handler: Callable[[web.Request], Awaitable[Any]]) -> Any:
            if not hmac.compare_digest(request.headers.get("Authorization", "").encode(), key):
                return _reply({"error": "unauthorized"}, 401)
            try:
                return await handler(request)
            except Refused as refused:
                return _reply({"error": {"message": str(refused)}}, refused.status)
            except (ValueError, TypeError, LookupError, VLLMClientError) as error:
                return _reply({"error": {"message": f"{type(error).__name__}: {error}"}}, 400)

        return guard

    # --- generation

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Answer a request of `HTTPClient.generate`, by one JSON or by a stream of events."""
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        from megarl.engine.vllm.vllm_worker import MASK, TIMED_OUT

        body = orjson.loads(await request.read())
        is_stream = bool(body.get("stream"))
        if body.get("image_data"):
            raise Refused(400, "images are not supported with vLLM")
        values = sampling_values(body["sampling_params"])
        params = SamplingParams(
            **values,
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
            detokenize=bool(values.get("stop")),
            output_kind=RequestOutputKind.DELTA if is_stream else RequestOutputKind.FINAL_ONLY,
            extra_args={MASK: True} if body.get("return_sampling_mask") else None,
            routed_experts_prompt_start=body.get("routed_experts_start_len", 0),
            skip_clone=True,
        )
        # The key keeps apart the prefix caches of weight versions.
        prompt = tokens_input(list(body["input_ids"]), cache_salt=body.get("extra_key"))
        outputs = self._engine.generate(
            *(prompt, params, body.get("rid") or f"request-{next(self._numbers)}"),
            lora_request=self._find_adapter(body.get("lora_path")),
        )
        late = f"timeout reached: the request was not finished in {self._settings['request_timeout']:g} s"
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            async for output in outputs:
                is_late = output.outputs[0].stop_reason == TIMED_OUT
                if is_late and not response.prepared:
                    raise Refused(503, late)
                if is_stream:
                    if not response.prepared:
                        await response.prepare(request)
                    answer = {"error": {"message": late}} if is_late else self._make_answer(body, output)
                    await _send_event(response, answer)
            if not is_stream:
                return _reply(self._make_answer(body, output))
            await response.write(b"data: [DONE]\n\n")
        finally:
            await outputs.aclose()  # aborts the request if it is not finished
        return response

    def _find_adapter(self, name: str | None) -> Any:
        """Return vLLM's request for the adapter that a request names, by SGLang's `lora_path`; None for the base
        weights."""
        from vllm.lora.request import LoRARequest

        limit = self._settings["adapters"]
        if not name:
            return None
        if not limit:
            raise Refused(400, "lora_path: this engine serves no adapters")
        if name not in self._adapters:
            if len(self._adapters) == limit:
                raise Refused(400, f"lora_path {name}: the engine serves {', '.join(self._adapters)} and no more")
            self._adapters[name] = LoRARequest(name, adapter_id(name), name)
        return self._adapters[name]

    def _make_answer(self, body: Mapping[str, Any], output: Any) -> dict[str, Any]:
        """Return SGLang's JSON for an output of vLLM's."""
        completion = output.outputs[0]
        ids, adapter = list(completion.token_ids), body.get("lora_path") or ""
        spans: list[dict[str, Any]] = []
        for span in completion.weight_versions or ():
            version = orjson.loads(span.version).get(adapter, _START_VERSION)
            if spans and spans[-1]["version"] == version:  # another adapter has got weights
                spans[-1]["end"] = span.end
            else:
                spans.append({"version": version, "start": span.start, "end": span.end})
        logprobs = completion.logprobs.logprobs if completion.logprobs is not None else []
        reason = completion.finish_reason
        finish = None if reason is None else {"type": reason, "message": "aborted by request"}
        meta: dict[str, Any] = {
            "prompt_tokens": len(output.prompt_token_ids),
            "cached_tokens": output.num_cached_tokens or 0,
            "finish_reason": finish,
            "weight_version": spans[-1]["version"] if spans else self._versions.get(adapter, _START_VERSION),
        }
        if len(spans) > 1:
            meta["weight_versions"] = spans
        if body.get("return_sampling_mask"):
            mask = completion.sampling_mask
            meta["output_token_sampling_mask"] = mask.token_ids if mask else []
            meta["output_token_sampling_logprobs"] = logprobs
        else:
            meta["output_token_logprobs"] = [[value, token, None] for value, token in zip(logprobs, ids, strict=True)]
        if body.get("return_routed_experts") and completion.routed_experts is not None:
            experts = completion.routed_experts.astype("<i4").tobytes()
            meta["routed_experts"] = pybase64.b64encode_as_string(experts)
        if (metrics := completion.spec_decode_metrics) is not None:
            meta["spec_num_proposed_drafts"] = metrics.num_draft_tokens
            meta["spec_num_correct_drafts"] = sum(number * steps for number, steps in enumerate(metrics.histogram))
        return {"output_ids": ids, "meta_info": meta}

    async def abort_request(self, request: web.Request) -> web.Response:
        """Abort all requests; each is answered with what it has generated."""
        await self._engine.abort(list(self._engine.output_processor.request_states), internal=True)
        return _reply({})

    async def parse_function_call(self, request: web.Request) -> web.Response:
        """Parse tool calls by SGLang's parser, in its own process. Status 500 if it fails."""
        body = orjson.loads(await request.read())
        async with self._parser_lock:
            result = await self._parsers.parse_tool_calls(body["text"], body["tools"], body["tool_call_parser"])
        if result is None:
            return _reply({"error": "the parser failed"}, 500)
        return _reply({"normal_text": result[0], "calls": result[1]})

    # --- pauses and caches

    async def flush_cache(self, request: web.Request) -> web.Response:
        """Drop the KV cache once no request is left, or answer with status 400 after `timeout` seconds."""
        deadline = time.monotonic() + float(request.query.get("timeout", 0))
        while True:
            is_idle = not self._engine.output_processor.has_unfinished_requests()
            if is_idle and await self._engine.reset_prefix_cache():
                return _reply({})
            if time.monotonic() > deadline:
                raise Refused(400, "requests are still running")
            await asyncio.sleep(0.01)

    async def pause_generation(self, request: web.Request) -> web.Response:
        """Take no further step until `continue_generation`; requests keep their KV cache."""
        if (mode := (await request.json())["mode"]) != "in_place":
            raise Refused(400, f"mode {mode} is not supported")
        await self._engine.pause_generation(mode="keep", clear_cache=False)
        return _reply({})

    async def continue_generation(self, request: web.Request) -> web.Response:
        """Undo `pause_generation`."""
        await self._engine.resume_generation()
        return _reply({})

    # --- weights. The engine core executes calls between two steps, so each order sees all weights of one version.

    async def begin_weight_update(self, request: web.Request) -> web.Response:
        """Do nothing: orders need no preparation."""
        return _reply({})

    async def end_weight_update(self, request: web.Request) -> web.Response:
        """Do nothing: orders need no completion."""
        return _reply({})

    async def update_weights_from_tensor(self, request: web.Request) -> web.Response:
        """Have each worker execute its order."""
        body = await request.json()
        arguments = (body["serialized_named_tensors"], body["selector"] == "draft")
        await self._engine.collective_rpc("execute_order", args=arguments)
        return _reply({})

    async def update_weight_version(self, request: web.Request) -> web.Response:
        """Set the version that later tokens are labelled with, of an adapter if the request names one."""
        body = await request.json()
        await self._set_version(body.get("lora_path") or "", str(body["new_version"]))
        return _reply({})

    async def _set_version(self, adapter: str, version: str) -> None:
        self._versions[adapter] = version
        await self._engine.update_weight_version(orjson.dumps(self._versions).decode())

    # --- state

    async def health(self, request: web.Request) -> web.Response:
        """Answer once the engine core has ended a step."""
        await self._engine.get_weight_version()
        return _reply({})

    async def loads(self, request: web.Request) -> web.Response:
        """Answer with the engine's load after its last step."""
        return _reply({"loads": [self._load.values]})

    async def model_info(self, request: web.Request) -> web.Response:
        """Answer with the weight version, without asking the engine core."""
        return _reply({"weight_version": self._versions[""]})


def _reply(content: Mapping[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(content), status=status, content_type="application/json")


async def _send_event(response: web.StreamResponse, content: Mapping[str, Any]) -> None:
    await response.write(b"data: " + orjson.dumps(content) + b"\n\n")


def main(settings: dict[str, Any]) -> None:
    """Run the server until it ends.

    settings: "engine_args" of AsyncEngineArgs; "port", "api_key", "request_timeout" in seconds, "weight_version",
    "threads" of a worker, whether to record "routing", the number of "adapters", their rank and scale ("lora"),
    "tool_call_parser" and the interpreter of its process ("parser_python"), the file for "facts"; and "folder" from the
    host.
    """
    preload()
    server = Server(settings)  # starts processes, so before there are threads and an event loop
    try:
        asyncio.run(server.run())
    finally:
        server.shutdown()


if __name__ == "__main__":
    main(json.load(sys.stdin))
