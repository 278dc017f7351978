"""Model the seconds of a step of RL by phase, to compare layouts and to say where the time goes.

Updates and forward passes are those of `step_time.py`, times a factor, because RL trains slower than tuned
pre-training. An engine decodes token by token: each token reads the weights that the batch needs and the keys and
values of all conversations, and pays for launches and for messages between the engine's ranks in every layer. The
constants come from other published measurements than the runs that the model is compared with (docs/tuning.md).
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

from megarl.config import Config
from megarl.models.activation_memory import DTYPE_BYTES, is_moe
from megarl.models.family import HFConfig
from megarl.models.flops import active_expert_params, active_params
from megarl.models.memory import engine_bytes, kv_elements, max_cached_tokens
from megarl.models.registry import family_of, param_count
from megarl.models.step_time import GPUSpec, StepTime
from megarl.parallel.placement import placement_of, role_config

GENERATE, LOGPROBS, UPDATES, WEIGHT_SYNC = "generate", "log-probs", "updates", "weight sync"

GOLDEN_RATIO = (math.sqrt(5) - 1) / 2
_SEARCH_STEPS = 50
"""Halvings of an interval, which leave less than floating point resolves."""


@dataclass(frozen=True)
class RLSpec:
    """Constants of a step of RL, beside those of the GPU. docs/tuning.md has the measurement behind each."""

    dense_slowdown: float = 1.2  # of training and forward passes in RL, relative to `StepTime`
    moe_slowdown: float = 1.8
    layer_seconds: float = 35e-6  # launches and norms of a decoded token in a layer, with CUDA graphs
    moe_layer_seconds: float = 75e-6  # in a layer with experts
    hop_seconds: float = 30e-6  # latency of an all-reduce within a node
    network_hop_seconds: float = 50e-6  # and beyond it, for each doubling of nodes
    token_overhead: float = 80e-6  # of an engine's process per sampled token, one after another
    sync_bandwidth: float = 10e9  # bytes per second in which an engine's rank gets its weights, shard to shard


@dataclass(frozen=True)
class Conversations:
    """Conversations of a step: a prompt, and a response whose length has an exponential distribution, cut off where
    the conversation has `max_tokens`."""

    count: int
    mean_tokens: float  # of a conversation, prompt included
    max_tokens: int
    prompt_tokens: int

    @property
    def mean_context(self) -> float:
        """Tokens of a conversation on average while it is running."""
        return (self.prompt_tokens + self.mean_tokens) / 2

    def response_lengths(self, count: int) -> list[float]:
        """Return the lengths of `count` responses of the slowest engine: quantiles, of which the longest is that of the
        whole step, in an order in which neighbours differ."""
        longest = self.max_tokens - self.prompt_tokens
        rate = decay_rate(self.mean_tokens - self.prompt_tokens, longest)
        tails = [1 - (number + 0.5) / count for number in range(count)]  # shares of longer responses
        tails[-1] = min(tails[-1], 0.5 / self.count)
        lengths = [min(float(longest), -math.log(tail) / rate) if rate else float(longest) for tail in tails]
        return [lengths[number] for number in sorted(range(count), key=lambda number: number * GOLDEN_RATIO % 1)]


def decay_rate(mean: float, longest: float) -> float:
    """Return r such that min(x, longest) has this mean for x with the density r exp(-r x); 0 if the mean is `longest`.

    Raises ValueError for a mean that is not above 0, or above `longest`.
    """
    if not 0 < mean <= longest:
        raise ValueError(f"the mean length {mean} is not between 0 and the longest, {longest}")
    low, high = 0.0, 1 / mean  # without the cut the mean is 1 / r
    for _ in range(_SEARCH_STEPS):
        rate = (low + high) / 2
        low, high = (rate, high) if -math.expm1(-rate * longest) / rate > mean else (low, rate)
    return low


class EngineTime:
    """Models the decoding of one engine.

    tp: ranks of the engine. node: ranks of a node. size: bytes of an element, except of quantised weights. is_eager:
    without CUDA graphs, so that the host launches each kernel.
    """

    def __init__(
        self,
        hf: HFConfig,
        tp: int,
        node: int,
        machine: GPUSpec,
        spec: RLSpec,
        size: int = 2,
        is_eager: bool = False,
    ) -> None:
        settings = family_of(hf).megatron_config(hf)
        self.machine, self.spec, self.tp, self.node, self.size = machine, spec, tp, node, size
        self.layers, self.hidden = int(settings["num_layers"]), int(settings["hidden_size"])
        self.moe_layers = num_moe_layers(hf)
        self.experts, self.topk = int(settings.get("num_moe_experts") or 1), int(settings.get("moe_router_topk") or 1)
        self.active, active_experts = active_params(hf), active_expert_params(hf)
        self.dense, self.all_experts = self.active - active_experts, active_experts * self.experts / self.topk
        self.weight_size = engine_bytes(hf, 1, size) / sum(param_count(hf).values())  # less with FP8 or INT4
        self.cached_bytes = kv_elements(hf, tp) * size
        dense_layer, moe_layer = spec.layer_seconds, spec.moe_layer_seconds
        if is_eager:  # a forward pass is a third of what `StepTime` counts
            dense_layer, moe_layer = machine.layer_overhead / 3, machine.moe_layer_overhead / 3
        self.launches = (self.layers - self.moe_layers) * dense_layer + self.moe_layers * moe_layer

    def token_seconds(self, batch: float, context: float) -> float:
        """Return the seconds in which each of `batch` conversations, of `context` tokens on average, gets a token."""
        read_experts = self.all_experts * (1 - (1 - self.topk / self.experts) ** batch)
        nbytes = (self.dense + read_experts) / self.tp * self.weight_size + batch * context * self.cached_bytes
        computed = 2 * self.active * batch / self.tp / self.machine.flops
        device = max(nbytes / self.machine.memory_bandwidth, computed) + self.launches
        return device + 2 * self.layers * self.reduce_seconds(batch) + batch * self.spec.token_overhead

    def reduce_seconds(self, batch: float) -> float:
        """Return the seconds of an all-reduce of the hidden states of `batch` tokens between the engine's ranks."""
        if self.tp == 1:
            return 0.0
        nodes, local = math.ceil(self.tp / self.node), min(self.tp, self.node)
        nbytes = 2 * batch * self.hidden * self.size
        seconds = self.spec.hop_seconds + nbytes * (local - 1) / local / self.machine.nvlink_bandwidth
        if nodes > 1:  # reduced within nodes first, so that each rank sends its part to other nodes
            seconds += self.spec.network_hop_seconds * math.log2(nodes)
            seconds += nbytes / local * (nodes - 1) / nodes / self.machine.network_bandwidth
        return seconds

    def prefill_seconds(self, tokens: float) -> float:
        return 2 * self.active * tokens / self.tp / self.machine.flops

    def batch_seconds(self, conversations: Conversations, count: int, slots: int) -> float:
        """Return the seconds until the last of `count` conversations is complete, at most `slots` at a time."""
        prompt, waiting = conversations.prompt_tokens, conversations.response_lengths(count)[::-1]
        seconds = self.prefill_seconds(prompt * count)
        running: list[tuple[float, float]] = []  # heap of (end, start) of responses, in tokens that the engine decoded
        decoded, starts = 0.0, 0.0  # starts: the sum over running responses
        while waiting or running:
            while waiting and len(running) < slots:
                heapq.heappush(running, (decoded + waiting.pop(), decoded))
                starts += decoded
            end, start = running[0]
            batch, tokens = len(running), end - decoded
            context = prompt + decoded - starts / batch + tokens / 2
            seconds += tokens * self.token_seconds(batch, context)
            heapq.heappop(running)
            decoded, starts = end, starts - start
        return seconds

    def period_seconds(
        self, conversations: Conversations, count: int, slots: int, training: float, max_staleness: int
    ) -> float:
        """Return the seconds of a step whose `count` conversations overlap with those of other steps.

        training: seconds from a step's complete batch to the start of new conversations. These start `max_staleness`
        steps early, so that a response may take as many periods, and what training leaves of another.
        """
        response = conversations.mean_tokens - conversations.prompt_tokens
        longest = max(conversations.response_lengths(count))
        context, prompt = conversations.mean_context, conversations.prompt_tokens
        prefill = self.prefill_seconds(prompt * count)

        def is_enough(period: float) -> bool:
            """Return whether engines keep up: with the batch that runs on average, as Little's law has it."""
            low, high = 0.0, float(min(slots, count * (max_staleness + 1)))
            available = period - prefill
            if available <= 0 or count * response * self.token_seconds(high, context) / high > available:
                return False
            for _ in range(_SEARCH_STEPS):
                batch = (low + high) / 2
                is_more = count * response * self.token_seconds(batch, context) / available > batch
                low, high = (batch, high) if is_more else (low, batch)
            slowest = prefill + longest * self.token_seconds(max(1.0, high), context)
            return slowest + training <= (max_staleness + 1) * period

        low, high = training, training + self.batch_seconds(conversations, count, slots)
        if is_enough(low):
            return low
        for _ in range(_SEARCH_STEPS):
            period = (low + high) / 2
            low, high = (low, period) if is_enough(period) else (period, high)
        return high


def num_moe_layers(hf: HFConfig) -> int:
    settings = family_of(hf).megatron_config(hf)
    return sum(is_moe(settings, layer) for layer in range(int(settings["num_layers"])))


def forward_seconds(seconds: dict[str, float]) -> float:
    """Return the part of a forward pass in the seconds of an optimizer step by activity, without recomputation."""
    thirds = sum(seconds[name] for name in ("arithmetic", "memory", "launches", "waits"))
    return thirds / 3 + sum(seconds[name] for name in ("tensor", "context", "expert", "pipeline")) / 2


def training_seconds(
    hf: HFConfig,
    config: Config,
    conversations: Conversations,
    forward_passes: int,
    machine: GPUSpec | None = None,
    spec: RLSpec | None = None,
    role: str = "actor",
) -> dict[str, float]:
    """Return the modelled seconds of `log-probs` and `updates` of a role's model, see `rl_step_seconds`."""
    machine, spec, run = machine or GPUSpec(), spec or RLSpec(), config.run
    trained, mean = role_config(config, role), round(conversations.mean_tokens)
    tokens = round(conversations.count * conversations.mean_tokens)
    slowdown = spec.moe_slowdown if num_moe_layers(hf) else spec.dense_slowdown
    update = StepTime(hf, tokens * run.ppo_epochs // run.num_update, mean, machine).seconds(trained)
    whole = StepTime(hf, tokens, mean, machine).seconds(trained)
    host = update.pop("host")
    return {
        LOGPROBS: forward_passes * slowdown * forward_seconds(whole),
        UPDATES: run.num_update * (slowdown * sum(update.values()) + host),
    }


def generation_seconds(
    hf: HFConfig,
    config: Config,
    conversations: Conversations,
    training: float,
    machine: GPUSpec | None = None,
    spec: RLSpec | None = None,
    kv_tokens: int = 0,
) -> float:
    """Return the modelled seconds of `generate`, see `rl_step_seconds`.

    training: seconds of all other phases. kv_tokens: those that fit in an engine's cache; 0 for as many as the
    configuration says, or any number.
    """
    machine, spec, rollout = machine or GPUSpec(), spec or RLSpec(), config.rollout
    placement = placement_of(config)
    engine_ranks, node = placement.ranks_of("rollout"), config.parallel.ranks_per_node
    is_eager = bool(rollout.sglang.get("disable_cuda_graph"))
    engine = EngineTime(hf, rollout.tp, node, machine, spec, DTYPE_BYTES[config.model.dtype], is_eager)
    count = math.ceil(conversations.count / max(1, len(engine_ranks) // rollout.tp))
    is_overlapped = rollout.asynchronous and not set(engine_ranks) & set(placement.ranks_of("actor"))
    # Conversations that start together also end with most of their tokens together.
    tokens_each = conversations.mean_context if is_overlapped else conversations.mean_tokens
    cached = kv_tokens or max_cached_tokens(rollout)
    slots = min(rollout.concurrency, max(1, int(cached / tokens_each))) if cached else rollout.concurrency
    if is_overlapped:
        return engine.period_seconds(conversations, count, slots, training, rollout.max_staleness) - training
    return engine.batch_seconds(conversations, count, slots)


def rl_step_seconds(
    hf: HFConfig,
    config: Config,
    conversations: Conversations,
    forward_passes: int,
    machine: GPUSpec | None = None,
    spec: RLSpec | None = None,
) -> dict[str, float]:
    """Return the modelled seconds of a step by phase: `generate`, `log-probs`, `updates` and `weight sync`.

    With `rollout.asynchronous` engines on ranks of their own, `generate` is what training waits for.

    config: layouts, placement, `run.num_update` and the engines' settings. forward_passes: over all conversations,
    before the updates. Raises ConfigError for a layout that does not divide.
    """
    size, bandwidth = DTYPE_BYTES[config.model.dtype], (spec or RLSpec()).sync_bandwidth
    phases = training_seconds(hf, config, conversations, forward_passes, machine, spec)
    phases[WEIGHT_SYNC] = engine_bytes(hf, config.rollout.tp, size) / bandwidth
    training = sum(phases.values())
    return {GENERATE: generation_seconds(hf, config, conversations, training, machine, spec)} | phases
