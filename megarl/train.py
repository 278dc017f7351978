"""Entry point: configuration -> flow -> run.

    python -m megarl.train configs/quickstart.yaml [section.key=value ...] [--dry-run]

Under `torchrun` (or srun + torchrun) every rank runs this file. Without it, a configuration that needs more ranks
than one starts them itself, as `torchrun --standalone` would, as long as they fit on one machine.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Sequence

from megarl.config import Config, ConfigError, describe_keys, load_config


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="python -m megarl.train", description="Train by RL, SFT or on preferences.")
    parser.add_argument("config", nargs="?", help="a YAML file, see configs/")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--dry-run", action="store_true", help="check everything and print the plan, start nothing")
    parser.add_argument("--keys", action="store_true", help="list every configuration key with its default")
    options = parser.parse_intermixed_args(arguments)
    if options.keys:
        for name, default in describe_keys():
            print(f"{name} = {default!r}")
        return 0
    if options.config is None:
        parser.error("name a configuration, for example configs/quickstart.yaml")
    try:
        config = load_config(options.config, options.overrides)
        if options.dry_run:
            from megarl.dry_run import render, validate

            report = validate(config, dry_run=True)
            print(render(report))
            return 0 if report.ok else 2
        if "RANK" not in os.environ and config.parallel.world_size > 1:
            return start_ranks(config, arguments)
        warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")  # advice to the authors of trainers
        from megarl.flow import HybridFlow

        HybridFlow(config).run()
        return 0
    except ConfigError as error:
        # Every rank raises the same error for a mistake in the configuration; one line is enough.
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 2


def start_ranks(config: Config, arguments: Sequence[str]) -> int:
    """Check the configuration, then run this program as all ranks on this machine; returns their exit status."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from megarl.dry_run import validate
    from megarl.observe import run_folder
    from megarl.rollout.engine import start_host
    from megarl.rollout.hosting import SHARED

    validate(config).raise_errors()
    run_folder.look(config)
    world = config.parallel.world_size
    if world > config.parallel.ranks_per_node:
        raise ConfigError(
            f"parallel.world_size={world} needs more than one machine of {config.parallel.ranks_per_node} ranks: "
            "start it with slurm/ppo_moe.sh or launch/multi_node.sh"
        )
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world,
        run_id="megarl",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=0,
    )
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the ranks say themselves what is wrong
    host = None
    if config.generates and not config.rollout.replay and SHARED not in os.environ:
        host = start_host(config)  # one for all engines, and they load while the ranks do
        os.environ[SHARED] = host.path
    try:
        elastic_launch(launch, sys.executable)("-m", "megarl.train", *arguments)
        return 0
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as signalled:
        return 128 + int(signalled.sigval)
    finally:
        if host is not None:
            del os.environ[SHARED]
            host.close()


if __name__ == "__main__":
    sys.exit(main())
