"""A rank of `bench.py flow`: steps of a real controller on real batches, with mocked answers and models.

Everything between engine, model and optimizer is the code of the repository that this runs in. `MockModel` is a
`MegatronModel` whose schedule builds the micro-batches, reads the columns that the loss declares, and returns values
derived from the tokens, so that the results of two revisions can be compared.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from flow import memory, messages
from flow.answers import QUADRATIC, SIZES, Answer, Shape, answers, build_config, groups, routing_shape
from flow.parts import NOT_OURS, Parts
from megarl.config import Config
from megarl.controllers import policy_gradient
from megarl.controllers.controller import Controller, make_controller
from megarl.megatron import distribution
from megarl.megatron.distribution import BatchDispatcher, make_model_rank
from megarl.megatron.micro_batch import MicroBatch, make_micro_batch
from megarl.megatron.routing_replay import ReplayShard
from megarl.megatron.trainer_model import MegatronModel
from megarl.observe.clock import Clock
from megarl.observe.metrics import rollout_metrics
from megarl.parallel import ranks, row_exchange
from megarl.parallel.row_exchange import RowExchange
from megarl.types import ModelOutput, Prompt, Rollout, Rollouts, TokenLoss, TrainBatch, Turn
from megarl.workers.actor import ActorWorker, ReferenceWorker
from megarl.workers.context import Context
from megarl.workers.critic import CriticWorker
from megarl.workers.model_worker import TrainingWorker
from megarl.workers.reward import RewardWorker


class MockModel(MegatronModel):
    """A model's interface in a step, without the model."""

    def __init__(self, config: Config, place: ranks.Ranks, role: Any, shape: Shape, parts: Parts) -> None:
        self.config, self.ranks, self.role, self.mtp_layers = config, place, role, 0
        self.quadratic_cost, self.parts = QUADRATIC, parts
        chunk = SimpleNamespace(
            config=SimpleNamespace(num_moe_experts=None, dsa_indexer_loss_coeff=None),
            parameters=lambda: [torch.zeros(1, requires_grad=True)],
            **dict.fromkeys(("eval", "train", "zero_grad_buffer"), lambda: None),
        )
        self.chunks = [chunk]  # type: ignore[list-item]
        no_ops = dict.fromkeys(("zero_grad", "prepare_grads", "step"), lambda: None)
        self.optimizer = SimpleNamespace(get_grad_norm=lambda: 1.0, **no_ops)
        self.scheduler = SimpleNamespace(step=lambda by: None, get_lr=lambda group: 0.0)  # type: ignore[assignment]
        self.rounds_experts, self.index_shape, self._pending_copy = False, None, None
        self.replay_shape, self.layers = None, tuple[int, ...]()
        if role == "actor" and shape.layers:
            self.replay_shape = routing_shape(shape)
            self.layers = tuple(range(shape.layers))[place.pp_rank :: place.pp]
        self._reader = self  # type: ignore[assignment]
        budget = config.train.max_tokens_per_gpu * place.cp
        places = dict(ranks.all_gather_objects((place.job.rank, make_model_rank(place, self.layers))))
        self.dispatcher = BatchDispatcher(places, place.dp, budget, QUADRATIC, 1, self.replay_shape)
        self.oom_retry = SimpleNamespace(  # type: ignore[assignment]  # as if `guards.oom_retry` were off
            plans=lambda batch, plan, trains: [plan], catch_oom=nullcontext, track_current=iter, metrics={}
        )

    @contextmanager
    def _on_device(self, states: bool = True) -> Iterator[None]:
        yield

    def read(self, micro: MicroBatch, emitted: torch.Tensor, temperature: float, *more: Any) -> ModelOutput:
        with self.parts.measure(NOT_OURS):
            tokens = micro.batch.tokens.long()
            numbers = -1.0 - (tokens % 13).float() / 13
            return ModelOutput(logprobs=numbers, values=-numbers / 2)

    def train_step(self, batch: TrainBatch, loss_fn: Any, temperature: float = 1.0) -> dict[str, float]:
        def touch(output: ModelOutput, part: TrainBatch) -> TokenLoss:
            with self.parts.measure(NOT_OURS):
                columns = [getattr(part, name) for name in LOSS_READS[self.role]]
                read = torch.stack([column.float() for column in columns]).sum(0)
                return TokenLoss(read, {f"{self.role}/read": read})

        vars(touch).update(vars(loss_fn))  # columns that the replaced loss has declared
        return super().train_step(batch, touch, temperature)

    def _schedule(self, rows: Any, plan: Any, loss_func: Any, forward_only: bool, slots: Any = None) -> list[Any]:
        """Request the micro-batches one after another, as Megatron's schedule would; the last stage returns output."""
        place, outputs = torch.device("cpu"), []
        layers = tuple(list(rows.layers).index(layer) for layer in self.layers)
        at = self.ranks.tp, self.ranks.cp, self.ranks.cp_rank
        replayed = ReplayShard(layers, self.ranks.tp, self.ranks.tp_rank) if self.replay_shape is not None else None
        for indices in plan[self.ranks.dp_rank]:
            with self.parts.measure("micro-batches"):
                micro = make_micro_batch(rows.select(indices), indices, place, *at, 0, replayed)
                self.parts.computed += len(micro.unpadded_indices)
            with self.parts.measure(NOT_OURS):
                int(micro.tokens.sum()) + (0 if micro.routing is None else int(micro.routing.sum()))
            if self.ranks.pp_rank == self.ranks.pp - 1:
                outputs.append(loss_func(micro, torch.zeros(1))[2])
        return outputs


LOSS_READS = {
    "actor": ("loss_mask", "old_logprobs", "advantages", "loss_weights"),
    "critic": ("loss_mask", "values", "returns", "loss_weights"),
}


class MockRollout:
    """Engines of `tp` ranks each, which answer at once."""

    def __init__(self, local_rollouts: Sequence[Rollout], parts: Parts) -> None:
        self.local_rollouts, self.parts, self.share = local_rollouts, parts, 1.0

    def generate(self, items: Sequence[Any], samples: int, held_out: bool = False) -> Any:
        with self.parts.measure("figures"):
            count = int(len(self.local_rollouts) * self.share) // samples * samples
            local = self.local_rollouts[:count]
            return Rollouts.gather(local, [rollout.group for rollout in local], row_exchange.WorldComm())

    def sleep(self) -> None:
        return None

    def update_weights(self, actor: Any) -> None:
        return None


_parcels = [0]
"""Bytes of rollouts that were sent to other ranks for their rewards."""


def make_rollouts(group: int, group_answers: Sequence[Answer]) -> list[Rollout]:
    rollouts, prompt = [], Prompt(str(group), (), group_answers[0].prompt)
    for answer in group_answers:
        turns = [Turn(ids, logprobs, bool(len(logprobs))) for ids, logprobs in answer.turns]
        routing = None if answer.routing is None else torch.from_numpy(answer.routing)
        all_turns = (Turn(prompt.token_ids), *turns)
        rollouts.append(Rollout(prompt, all_turns, seed=answer.seed, group=group, routing=routing))
    return rollouts


def split_into_machines(size: int) -> None:
    """Have ranks exchange rows as if every `size` of them had a machine."""
    row_exchange._row_exchange = post = RowExchange(per_machine=size)
    exchange = post.exchange_objects

    def counted(parcels: Mapping[int, Any]) -> dict[int, Any]:
        before = sum(post.bytes_sent.values())
        received = exchange(parcels)
        _parcels[0] += sum(post.bytes_sent.values()) - before
        return received

    post.exchange_objects = counted  # type: ignore[method-assign]


def posted() -> int:
    """Return the bytes of rows that this rank has written for others."""
    return sum(row_exchange.get_row_exchange().bytes_sent.values()) - _parcels[0]


def trivial(rollout: Rollout) -> float:
    return rollout.seed % 7 / 7


def make_flow(config: Config, place: ranks.Ranks, rollouts: Sequence[Rollout], shape: Shape, parts: Parts) -> Any:
    """Return the roles of a flow: the real workers, with mocked models."""
    context = Context(config, place.job, {}, None, Clock(), Path(config.run.dir), {})  # type: ignore[arg-type]
    actor, critic = ActorWorker(context), CriticWorker(context)
    actor.model = MockModel(config, place, "actor", shape, parts)
    critic.model = MockModel(config, place, "critic", shape, parts)
    reference = ReferenceWorker(context, actor)
    reference.use_reference_weights = nullcontext
    reward = RewardWorker(context, trivial)
    rollout = MockRollout(rollouts, parts)
    return SimpleNamespace(
        config=config, rollout=rollout, actor=actor, critic=critic, reference=reference, reward=reward
    )


def watch_parts(parts: Parts, controller: Controller, log: Any) -> None:
    parts.time_calls(RewardWorker, "score", "rewards")
    parts.time_calls(TrainBatch, "from_rollouts", "columns")
    parts.time_calls(distribution, "plan_micro_batches", "plans")
    parts.time_calls(MegatronModel, "forward", "numbers back")
    parts.time_calls(TrainingWorker, "update", "checks")
    parts.time_calls(ActorWorker, "check_finite", "checks")
    parts.time_iteration(policy_gradient, "split_mini_batches", "mini-batches")
    parts.time_calls(controller, "step", "token functions")
    parts.time_calls(sys.modules[__name__], "rollout_metrics", "metrics")
    parts.time_calls(log, "end_step", "log")
    parts.time_calls(BatchDispatcher, "dispatch", "rows to models")
    parts.time_calls(BatchDispatcher, "collect", "numbers back")


def written() -> int:
    """Return the bytes that this process has written: to sockets, shared memory and files."""
    with open("/proc/self/io") as file:
        return int(dict(line.split(": ") for line in file.read().splitlines())["wchar"])


def measure(**spec: Any) -> list[dict[str, Any]]:
    """Run as one of the ranks: warm up, then take steps at each of SIZES, then one step with memory sampling. Return
    what each rank has measured."""
    torch.set_num_threads(1)
    messages.count()
    shape = Shape(**spec["shape"])
    folder = Path(spec["folder"])
    config = build_config(spec, folder)
    place = ranks.initialize(config.parallel, 1800.0)
    split_into_machines(spec["per_machine"])
    rank, world = place.job.rank, spec["ranks"]
    from megarl.observe.run_log import RunLog

    log, parts, controller = RunLog(config, place.job), Parts(), make_controller(config)

    def make_local_rollouts(shape: Shape) -> list[Rollout]:
        if rank % spec["engine_tp"]:
            return []
        engines, engine = world // spec["engine_tp"], rank // spec["engine_tp"]
        local_groups = [group for group in range(groups(shape)) if group * engines // groups(shape) == engine]
        return [rollout for group in local_groups for rollout in make_rollouts(group, list(answers(shape, group)))]

    small = replace(shape, sequences=min(shape.sequences, world * shape.samples), lengths="64")
    flow = make_flow(config, place, make_local_rollouts(small), shape, parts)
    watch_parts(parts, controller, log)
    step = 0

    def run_step(share: float, watched: bool = False) -> dict[str, Any]:
        nonlocal step
        step += 1
        flow.rollout.share = share
        parts.seconds.clear()
        parts.busy.clear()
        parts.computed, counted, posted_before = 0, messages.num_exchanges(), posted()
        ranks.barrier()
        wrote = written()
        with parts.measure("log"):
            log.begin_step(step)
        for worker in (flow.actor, flow.critic, flow.reward):
            worker.begin_step(step)
        result: Any = controller.step(flow, range(config.data.prompts_per_step))
        metrics = result.metrics | rollout_metrics(result.rollouts)
        if watched:
            mark("log", 0.0)
        log.end_step(step, metrics, result.rollouts, result.batch, result.trained_rollouts)
        with parts.measure("log") if watched else nullcontext():
            log.make_drain()()
        logged = sum(file.stat().st_size for file in folder.rglob(f"rank_{rank:05d}.parquet"))
        sent = written() - wrote - logged
        ranks.barrier()  # all ranks have read their counters
        shutil.rmtree(folder / "run" / "rollouts", ignore_errors=True) if rank == 0 else None
        ranks.barrier()
        tokens = int(result.batch.lengths.sum())
        return dict(
            parts=dict(parts.seconds),
            busy=sum(parts.busy.values()) - parts.busy.get(NOT_OURS, 0.0),
            busy_parts=dict(parts.busy),
            sent=sent,
            posted=posted() - posted_before,
            collectives=messages.num_exchanges() - counted,
            computed=parts.computed,
            seed=step - 1,
            log_bytes=logged,
            tokens=tokens,
            sequences=result.batch.num_sequences,
            metrics=metrics,
        )

    def mark(label: str, seconds: float = 0.4) -> None:
        """Report the current phase to the process that samples the memory."""
        ranks.barrier()
        if rank == 0:
            (folder / "label").write_text(label)
        time.sleep(seconds)
        ranks.barrier()

    run_step(1.0)
    flow.rollout.local_rollouts = []
    mark("baseline")
    before = memory.settled_bytes()
    flow.rollout.local_rollouts = make_local_rollouts(shape)
    in_use = {"rollouts": memory.settled_bytes() - before}
    mark("rollouts")
    mark("", 0.0)
    sizes = {}
    for name, share in SIZES.items():
        sizes[name] = [run_step(share) for _ in range(spec["repeats"])]
    mark("step", 0.0)
    sampler = memory.PeakSampler(before, lambda: parts.moment)
    run_step(1.0, watched=True)
    in_use |= sampler.stop()
    mark("", 0.0)
    num_tokens = sum(rollout.num_tokens for rollout in flow.rollout.local_rollouts)
    group = ranks.host_group()
    waits = {"latency": messages.latency(group), "wire": messages.wire(group)}
    rank_results: list[dict[str, Any]] = ranks.all_gather_objects(sizes | waits | {"held": in_use, "own": num_tokens})
    ranks.barrier()
    log.close()
    ranks.shutdown()
    return rank_results
