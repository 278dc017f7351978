"""Check settings that generate ahead of training (asynchronous, over-sampled), and whether timeouts are long enough."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from megarl.config import Config, ConfigError, RolloutConfig
from megarl.config.command_line import check_writable_folder
from megarl.config.keys import max_pending_groups
from megarl.engine.external_wire import parse_address
from megarl.models.memory import VLLM_BLOCK_TOKENS
from megarl.parallel import job_secret
from megarl.parallel.placement import engine_ranks, has_model, placement_of, split_role
from megarl.parallel.policy_configs import SHARED_ENGINE_KEYS, engine_key, has_other_model, policy_config
from megarl.parallel.rendezvous import PUBLIC_NETWORK_ENV
from megarl.types.requirements import Requirements
from megarl.utils.addresses import is_public_literal


def check_asynchronous(config: Config, declared: Requirements, warnings: list[str]) -> None:
    """Check that asynchronous generation has something to overlap with, and keys that suit it."""
    if not declared.has_engines(config):
        return
    placement = placement_of(config)
    for engine_role, rollout in rollout_settings(config, declared.roles).items():
        if not rollout.asynchronous:
            continue
        key, sync_key, staleness_key = (
            engine_key(config, engine_role, name) for name in ("asynchronous", "on_weight_sync", "max_staleness")
        )
        if not declared.trained_roles:
            raise ConfigError(
                f"{key} with algorithm={declared.name}: nothing trains concurrently; set the first to false"
            )
        engines = set(placement.ranks_of(engine_role))
        for role in declared.roles:
            shared = engines & set(placement.ranks_of(role)) if role != engine_role and has_model(config, role) else ()
            if shared and rollout.on_weight_sync == "in_place":
                raise ConfigError(
                    f"{sync_key}=in_place with engines on the ranks of the {role} (rank {min(shared)}): they release "
                    "their KV cache while it computes, so there is none to keep; set the first to retract, or "
                    f"placement.{engine_role} to ranks without models"
                )
        if rollout.max_staleness and not declared.is_off_policy:
            _warn_once(
                warnings,
                f"{key} with {staleness_key}={rollout.max_staleness}: tokens may come from an older policy, for which "
                f"the loss of algorithm={config.algorithm} does not correct",
            )


def rollout_settings(config: Config, roles: Iterable[str]) -> dict[str, RolloutConfig]:
    """Return the `rollout` settings of those of the roles that are a policy's engines."""
    return {role: policy_config(config, role).rollout for role in roles if split_role(role)[0] == "rollout"}


def _warn_once(warnings: list[str], text: str) -> None:
    """Append a warning, unless another policy with the same settings has it."""
    if text not in warnings:
        warnings.append(text)


def check_oversampling(config: Config, declared: Requirements, warnings: list[str]) -> None:
    """Check that `rollout.oversample` and `rollout.max_staleness` suit the algorithm."""
    if not declared.has_engines(config):
        return
    for role, rollout in rollout_settings(config, declared.roles).items():
        if rollout.oversample == 1:
            continue
        oversample = f"{engine_key(config, role, 'oversample')}={rollout.oversample:g}"
        max_staleness = f"{engine_key(config, role, 'max_staleness')}={rollout.max_staleness}"
        if rollout.max_staleness == 0:
            _warn_once(
                warnings,
                f"{oversample} with {max_staleness}: partial rollouts are restarted in the next step, so answers that "
                "take longer than a step are never trained on; raise the second",
            )
        elif not declared.is_off_policy:
            _warn_once(
                warnings,
                f"{oversample} with {max_staleness}: tokens may come from weights that are many versions old, for "
                f"which the loss of algorithm={config.algorithm} does not correct; watch rollout/staleness_mean and "
                "rollout/logprob_diff_mean_stale",
            )


def check_expert_balance(config: Config, declared: Requirements) -> None:
    """Check that `rollout.rebalance_experts_every` has weight syncs that move experts."""
    for role, rollout in rollout_settings(config, declared.roles).items():
        if not rollout.rebalance_experts_every or rollout.replay:
            continue
        key = f"{engine_key(config, role, 'rebalance_experts_every')}={rollout.rebalance_experts_every}"
        if not declared.trained_roles:
            raise ConfigError(f"{key} with algorithm={declared.name}: no weight sync moves experts; set the first to 0")
        if rollout.sync_adapters_only:
            raise ConfigError(
                f"{key} with rollout.sync_adapters_only: a moved expert needs all of its weights on another rank, "
                "which such a sync does not send; set one of them"
            )


def check_external_weights_dir(config: Config, declared: Requirements) -> None:
    """Check that the run can write weights for external engines to its folder for them."""
    for role, rollout in rollout_settings(config, declared.roles).items():
        if rollout.external_weights_dir and not rollout.replay:
            key = engine_key(config, role, "external_weights_dir")
            check_writable_folder(Path(rollout.external_weights_dir), key)


def check_served_adapters(config: Config, declared: Requirements) -> None:
    """Check that the engines of the first policy can serve the adapters of all. Raises ConfigError."""
    rollout, key = config.rollout, f"rollout.max_loras={config.rollout.max_loras}"
    if not rollout.max_loras or rollout.replay or not config.lora.rank:
        return
    actors = [role for role in declared.trained_roles if split_role(role)[0] == "actor"]
    if not actors:
        raise ConfigError(f"{key} with algorithm={declared.name}: nothing trains adapters here; set it to 0")
    if len(actors) > rollout.max_loras:
        raise ConfigError(f"{key} is fewer than the policies, {', '.join(actors)}; set it to {len(actors)}")
    for role, other in rollout_settings(config, declared.roles).items():
        if other.external:
            external = engine_key(config, role, "external")
            raise ConfigError(f"{external} with {key} is not implemented; remove it, or set that to 0")
    if rollout.asynchronous and len(actors) > 1:
        raise ConfigError(
            f"rollout.asynchronous with {key}: policies share engines, and a weight sync of one would pause or abort "
            "the requests of the others; set one of them to false or 0"
        )
    placement = placement_of(config)
    for actor in actors[1:]:
        role, policy = actor.replace("actor", "rollout", 1), split_role(actor)[1]
        if has_other_model(config, policy):
            raise ConfigError(
                f"roles.{actor}.model with {key}: engines serve adapters of one model; set the second to 0"
            )
        if set(placement.ranks_of(role)) != set(placement.ranks_of("rollout")):
            raise ConfigError(
                f"placement.{role} with {key}: it has the engines of rollout; remove it, or set that to 0"
            )
        other = policy_config(config, role).rollout
        for name in SHARED_ENGINE_KEYS:
            if getattr(other, name) != getattr(rollout, name):
                raise ConfigError(
                    f"roles.{role}.rollout.{name} with {key}: {role} has the engines of rollout; set rollout.{name}"
                )


def check_external(config: Config, declared: Requirements) -> None:
    """Check the addresses of external engines, and that they get weights: they load none that a run trusts."""
    users: dict[str, str] = {}
    for role, rollout in rollout_settings(config, declared.roles).items():
        key = engine_key(config, role, "external")
        if rollout.external and not rollout.replay and not declared.trained_roles:
            raise ConfigError(
                f"{key} with algorithm={declared.name}: engines outside of the job generate only with weights that a "
                "trainer has sent them, and nothing trains here; remove it"
            )
        if rollout.external and not rollout.replay:
            job_secret.external_key()
        for text in rollout.external:
            try:
                host, port = parse_address(text)
            except ValueError as error:
                raise ConfigError(f"{key}: {error}, such as 10.0.0.5:7000") from None
            address = f"{host}:{port}"
            if address in users:
                raise ConfigError(
                    f"{key} names {text}, and so does {users[address]}: an engine has the weights of one policy; "
                    "name it once"
                    if users[address] != key
                    else f"{key} names {text} twice; remove one of them"
                )
            users[address] = key
            if is_public_literal(host) and os.environ.get(PUBLIC_NETWORK_ENV) != "1":
                raise ConfigError(
                    f"{key}: {text} is an address of the public internet, and weights are sent there unencrypted; use "
                    f"an address of the nodes' own network, or export {PUBLIC_NETWORK_ENV}=1 if a firewall protects it"
                )


def check_cache_budget(config: Config, declared: Requirements) -> None:
    """Check that `rollout.fit_kv_cache` has one KV cache to fit, which keeps prefixes."""
    for role, rollout in rollout_settings(config, declared.roles).items():
        key = engine_key(config, role, "fit_kv_cache")
        if not rollout.fit_kv_cache or rollout.replay:
            continue
        if rollout.external:
            raise ConfigError(
                f"{key} with {engine_key(config, role, 'external')}: conversations of external engines are in caches "
                "of their own; set the first to false"
            )
        settings = rollout.vllm if rollout.engine == "vllm" else rollout.sglang
        if settings.get("enable_prefix_caching") is False or settings.get("disable_radix_cache"):
            raise ConfigError(f"{key} with an engine whose cache keeps no prefixes: set it to false")


def check_enough_prompts(count: int, config: Config) -> None:
    """Check that there are enough prompts for none to be under way twice in a step."""
    data = config.data
    for role, rollout in rollout_settings(config, ("rollout", *config.roles)).items():
        most = max_pending_groups(data.prompts_per_step, rollout.oversample)
        if rollout.oversample > 1 and count < most and not rollout.replay:
            raise ConfigError(
                f"{engine_key(config, role, 'oversample')}={rollout.oversample:g} with {data.prompts_per_step=} has "
                f"{most} prompts in flight, but data.train has {count}; lower one of the first two"
            )


SLOW_TOKENS_PER_S = 20.0  # the tiny models on a CPU reach more
"""Pessimistic tokens per second of one conversation in a fully loaded engine, for judging timeouts."""
MAX_TOKENS_PER_S = 1000.0
"""Tokens per second that no engine reaches for one conversation."""


def check_timeouts(config: Config, warnings: list[str]) -> None:
    """Check that responses and steps of maximum length can finish in time.

    Raises ConfigError if they cannot even at MAX_TOKENS_PER_S, and warns if they cannot at SLOW_TOKENS_PER_S.
    """
    rollout = config.rollout
    if rollout.replay:
        return
    if rollout.request_timeout > rollout.step_timeout:
        raise ConfigError(
            f"{rollout.request_timeout=:g} is beyond {rollout.step_timeout=:g}: one answer cannot take longer than the "
            "step; lower the first or raise the second"
        )
    concurrency = rollout.concurrency
    max_requests = rollout.sglang.get("max_running_requests", rollout.vllm.get("max_num_seqs"))
    if isinstance(max_requests, int) and max_requests > 0:
        concurrency = min(concurrency, max_requests)
    blocks = rollout.vllm.get("num_gpu_blocks_override")
    max_tokens = rollout.sglang.get("max_total_tokens", blocks * VLLM_BLOCK_TOKENS if isinstance(blocks, int) else 0)
    if isinstance(max_tokens, int) and max_tokens > 0:
        concurrency = max(1, min(concurrency, max_tokens // rollout.max_context))
    engines = len(engine_ranks(config))
    steps = 1 + rollout.max_staleness if rollout.asynchronous else 1  # whose conversations share an engine
    conversations = -(-config.data.prompts_per_step * steps // engines) * rollout.samples_per_prompt
    num_waves, scope = -(-conversations // concurrency), "under way" if steps > 1 else "of a step"
    tokens_per_rollout = min(rollout.max_context, rollout.max_turns * rollout.max_new_tokens)
    answer = f"an answer of {rollout.max_new_tokens=}"
    rollouts = (
        f"an engine's {conversations} rollouts {scope}, of up to {tokens_per_rollout} tokens and {concurrency} at "
        f"once, so in {num_waves} waves,"
    )
    more_room = "raise it, or give the engines more room (rollout.concurrency, the size of their KV cache)"
    for key, limit, tokens, subject, remedy in (
        ("request_timeout", rollout.request_timeout, rollout.max_new_tokens, answer, "raise it or lower the other"),
        ("step_timeout", rollout.step_timeout, num_waves * tokens_per_rollout, rollouts, more_room),
    ):
        fastest, slow = tokens / MAX_TOKENS_PER_S, tokens / SLOW_TOKENS_PER_S
        if fastest > limit:
            raise ConfigError(
                f"rollout.{key}={limit:g} s is too short: {subject} would take {fastest:.0f} s at "
                f"{MAX_TOKENS_PER_S:g} tokens per second each, which no engine reaches; {remedy}"
            )
        if slow > limit:
            warnings.append(
                f"rollout.{key}={limit:g} s may be too short: {subject} would take {slow:.0f} s at "
                f"{SLOW_TOKENS_PER_S:g} tokens per second each; late ones are aborted; {remedy}"
            )
