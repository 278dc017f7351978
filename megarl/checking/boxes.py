"""The sandbox of a run: its settings reach every process, and it is looked at before anything starts."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

from megarl.config import Config, ConfigError
from megarl.environments.describing import known_of
from megarl.rewards.functions import load_functions
from megarl.sandbox.box import check_backend, probe, variables
from megarl.types.declared import Declared


def check_sandbox(config: Config, declared: Declared, warnings: list[str]) -> None:
    """Have the settings where `Sandbox.from_environment` finds them. Raise ConfigError where something is named that
    runs in a sandbox (it has an attribute `sandboxed`), and there can be none."""
    check_backend(config.sandbox)
    os.environ.update(variables(config.sandbox))
    if not declared.generates:
        return
    wanted = [one.spec for one in known_of(config.rollout).environments.values() if one.sandboxed]
    functions = load_functions(config.reward.functions) if "reward" in declared.roles else {}
    wanted += [name for name, function in functions.items() if getattr(function, "sandboxed", False)]
    if not wanted:
        return
    try:
        with ThreadPoolExecutor(1) as thread:  # an event loop may be running here
            found = thread.submit(probe, config.sandbox).result()
    except ConfigError as error:
        raise ConfigError(f"{wanted[0]} runs what the policy writes: {error}") from None
    if config.sandbox.backend == "none":
        warnings.append(str(found))
