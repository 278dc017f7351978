"""The service as an algorithm: its only step executes clients' commands until the service is stopped.

Rank 0 runs the HTTP server in a thread, and broadcasts each command to all ranks over the host group.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch.distributed as dist

from megarl.config import Config, ConfigError
from megarl.config.strict import PositiveInt, Range
from megarl.controllers.controller import Controller, Flow, StepResult
from megarl.launch import exit_status
from megarl.parallel import ranks
from megarl.parallel.placement import placement_of
from megarl.serve.commands import (
    BeginSampling,
    Command,
    CreateModel,
    ForwardBackward,
    ForwardBackwardBatch,
    Idle,
    LoadModel,
    OptimStep,
    SaveModel,
    Stop,
    UnloadModel,
)
from megarl.serve.engine_relay import EngineRelay
from megarl.serve.engine_sampling import EngineAddress, EngineSampler
from megarl.serve.saved_weights import BASE, SavedWeights
from megarl.serve.tinker_losses import LOSSES
from megarl.serve.tinker_service import ServiceSettings, TinkerService
from megarl.serve.tinker_wire import RequestRefused
from megarl.serve.work_queue import IDLE_S, Job, SampleJob, WorkQueue
from megarl.types.requirements import Requirements

if TYPE_CHECKING:
    from megarl.engine.engine_protocol import Engine
    from megarl.serve.client_models import ClientModels

KEY_VARIABLE = "MEGARL_SERVE_API_KEY"


@dataclass(frozen=True)
class ServeOptions:
    host: str = "127.0.0.1"
    """Address to listen on. Beyond this machine the service needs a key, the environment variable
    MEGARL_SERVE_API_KEY."""
    port: Annotated[int, Range(0, 65535)] = 8000
    """0 chooses a free one; `<run.dir>/serve_url` has the address."""
    model_name: str = ""
    """Name of the model for clients, by which they also load its tokenizer, such as Qwen/Qwen3-8B. Empty for
    `model.path`, as on a file system that clients share."""
    max_request_mb: PositiveInt = 64
    """Maximum size of a request."""
    max_pending: PositiveInt = 4096
    """Maximum number of requests that wait, and of a session\'s results that it has not retrieved; further requests get
    status 429."""
    max_models: PositiveInt = 8
    """Maximum number of models of all clients, each of which takes host memory for its trained state."""
    max_batched_adapters: PositiveInt = 4
    """Maximum number of clients whose forward_backward requests, if they wait together, are executed as one batch, each
    with its client's adapter. 1 executes all requests in turn."""
    loss_aliases: dict[str, str] = field(default_factory=dict)
    """Losses to compute in place of those that this server does not have, by name. {stable_reinforce:
    importance_sampling} serves the cookbook's reinforcement learning unmodified."""
    session_timeout_s: Annotated[float, Range(10, 1e6)] = 600.0
    """A session without a request or heartbeat for so long ends, and its models are dropped. What it saved stays."""


class ServeController(Controller):
    item = "requests"
    Options = ServeOptions

    @classmethod
    def roles(cls, config: Config) -> tuple[str, ...]:
        return ("actor", "rollout")

    @classmethod
    def declare_requirements(cls, config: Config) -> Requirements:
        check_config(config)
        return super().declare_requirements(config)

    def load_items(self, flow: Flow) -> Sequence[str]:
        return ("requests",)

    def num_updates(self, role: str) -> int:
        return 1  # clients set the learning rate of each update

    def step(self, flow: Flow, items: Sequence[str]) -> StepResult:
        from megarl.serve.client_models import ClientModels  # Megatron, which the launcher and checks do not import

        engines = flow.rollout.engines
        models = ClientModels(flow.actor, engines)
        relay, addresses = self._open_engines(flow, engines.lead_engine)
        reason = models.reason_against_batches()
        queue = WorkQueue(self.options.max_pending, 1 if reason else self.options.max_batched_adapters)
        saved = SavedWeights(Path(flow.config.run.dir, "clients").absolute())
        service = None
        self._save_base(models, saved)
        try:
            if ranks.is_lead():
                config = flow.config
                rollout = config.rollout
                sampler = EngineSampler(addresses, rollout.max_context, rollout.request_timeout, rollout.concurrency)
                service = TinkerService(
                    config, flow.data.max_positions, self._service_settings(), saved, queue, sampler, flow.log.log
                )
                url = service.start(self.options.host, self.options.port)
                Path(config.run.dir, "serve_url").write_text(f"{url}\n")
                flow.log.log(f"serving {config.model.path} at {url}")
                if config.lora.rank and reason:
                    flow.log.log(f"serve: clients' adapters are trained in turn, since {reason}")
            count = self._execute_commands(models, queue, service, flow.log.progress.begin_phase)
        finally:
            if service is not None:
                service.close()
            if relay is not None:
                relay.close()
        return StepResult({"serve/commands": float(count)})

    def _open_engines(self, flow: Flow, engine: Engine | None) -> tuple[EngineRelay | None, list[EngineAddress]]:
        """Return the addresses of all engines for rank 0, and the relay of this rank's engine if it is on another
        node. Collective.

        engine: the one that this rank leads.
        """
        config = flow.config
        relay, address = None, None
        if engine is not None:
            address = EngineAddress(engine.url, engine.api_key)
            if dist.get_rank() >= config.parallel.ranks_per_node:  # rank 0 is on the first node
                relay = EngineRelay(engine.url, config.rollout.request_timeout, self.options.max_request_mb * 2**20)
                address = EngineAddress(relay.start(ranks.node_address()), engine.api_key)
        gathered = ranks.all_gather_objects(address and tuple(address))
        return relay, [EngineAddress(url, key) for url, key in filter(None, gathered)]

    def _service_settings(self) -> ServiceSettings:
        options = self.options
        return ServiceSettings(
            options.max_request_mb * 2**20,
            options.max_models,
            options.session_timeout_s,
            os.environ.get(KEY_VARIABLE, ""),
            options.model_name,
            options.loss_aliases,
        )

    def _save_base(self, models: ClientModels, saved: SavedWeights) -> None:
        """Save the weights of `model.path` for samplers of the base model, unless an earlier start has."""
        folder = saved.base_folder
        if not ranks.broadcast_object(folder.exists()):
            ranks.run_on_all(lambda: folder.parent.mkdir(parents=True, exist_ok=True), rank_zero_only=True)
            models.create(CreateModel(BASE))
            models.save(SaveModel(BASE, str(folder), for_sampler=True))
            models.unload(BASE)

    def _execute_commands(
        self,
        models: ClientModels,
        queue: WorkQueue,
        service: TinkerService | None,
        show_phase: Callable[[str], None],
    ) -> int:
        """Execute commands until the service is to stop; return their number.

        show_phase: called with the name of each command for the live display, empty while there is none.
        """
        jobs: list[SampleJob] | list[Job]
        count, jobs, job = 0, [], Job(Idle())
        while True:
            if ranks.is_lead():
                job, jobs = queue.next_job(exit_status.is_stop_requested)
            samples = [item for item in jobs if isinstance(item, SampleJob)]
            command: Command = ranks.broadcast_object(BeginSampling(samples[0].folder) if samples else job.command)
            if isinstance(command, Stop):
                return count
            show_phase("" if isinstance(command, Idle) else type(command).__name__)
            count += 1
            error = ""
            result: Any = None
            try:
                result = execute(models, command)
            except (RequestRefused, ConfigError) as failure:  # on all ranks
                error = str(failure)
            except OSError as failure:  # likewise, see `ranks.run_on_all`
                error = f"the server cannot read or write: {failure}"
            if isinstance(command, BeginSampling):
                if not error:
                    running = None if service is None else service.run_samples(samples, result)
                    while not ranks.broadcast_object(running is None or running.wait(IDLE_S)):
                        pass
                models.end_sampling()
            for item in jobs or (job,):
                if error:
                    item.fail(error)
                elif not jobs:
                    item.finish(result)
            if isinstance(command, ForwardBackwardBatch) and not error:
                for request, answer in zip(jobs, result, strict=False):  # jobs are on rank 0 alone
                    request.fail(str(answer)) if isinstance(answer, RequestRefused) else request.finish(answer)


def execute(models: ClientModels, command: Command) -> Any:
    """Execute a command on this rank; return its result on rank 0."""
    match command:
        case CreateModel():
            return models.create(command)
        case UnloadModel():
            return models.unload(command.model_id)
        case ForwardBackward():
            return models.forward_backward(command)
        case ForwardBackwardBatch():
            return models.forward_backward_batch(command)
        case OptimStep():
            return models.optim_step(command)
        case SaveModel():
            return models.save(command)
        case LoadModel():
            return models.load(command)
        case BeginSampling():
            return models.begin_sampling(command.folder)
    return None


def check_config(config: Config) -> None:
    """Raise ConfigError for a configuration that the service cannot run with."""
    options = ServeController.read_options(config)
    if options.host not in ("127.0.0.1", "localhost", "::1") and not os.environ.get(KEY_VARIABLE):
        raise ConfigError(f"options.host={options.host} is open to other machines; set {KEY_VARIABLE}")
    for name, loss in options.loss_aliases.items():
        if name in LOSSES or loss not in LOSSES:
            what = f"{name} is a loss of this server" if name in LOSSES else f"{loss} is none of this server's losses"
            raise ConfigError(f"options.loss_aliases: {what}; these are {', '.join(LOSSES)}")
    if config.actor_optimizer.type != "adam":
        raise ConfigError(
            f"actor_optimizer.type={config.actor_optimizer.type}: clients send the settings of Adam; leave it unset"
        )
    if config.train.routing_replay or config.train.sparse_index_replay:
        raise ConfigError(
            "clients send no records of routing: set train.routing_replay and sparse_index_replay to false"
        )
    if config.rollout.engine != "sglang":
        raise ConfigError(f"rollout.engine={config.rollout.engine}: serve samples by SGLang's interface alone")
    if config.rollout.asynchronous or config.rollout.replay or config.rollout.max_loras:
        raise ConfigError("serve needs rollout.asynchronous=false, no rollout.replay and rollout.max_loras=0")
    if 0 not in placement_of(config).ranks_of("actor"):
        raise ConfigError("serve needs the actor on rank 0, which answers the clients")
