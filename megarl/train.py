"""Training entry point: load the configuration, then run its flow.

    megarl train configs/quickstart.yaml [section.key=value ...] [--dry-run | --rehearse]
    megarl train configs/quickstart.yaml --show-prompt 3

`.venv/bin/python -m megarl.train` is the same.

If the configuration needs more than one rank and they fit on one machine, this program starts them itself. With
`megarl.torchrun`, which launch/ and slurm/ use, or torch's own torchrun, every rank runs this file. Exit statuses are
described in `launch/exit_status.py`.
"""

from __future__ import annotations

import difflib
import os
import signal
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

from megarl.config import Config, ConfigError, describe_keys, describe_ranges, load_config, strict
from megarl.config.command_line import Parser, int_in_range
from megarl.launch import exit_status
from megarl.processes.children import inherit_orphans

if TYPE_CHECKING:
    from megarl.dry_run.validation import Report


EVERYDAY_KEYS = {
    "what is trained": ("algorithm", "model.path", "actor_optimizer.lr"),
    "on what": ("data.train", "data.eval", "data.prompts_per_step", "rollout.samples_per_prompt"),
    "by which reward, with which tools": ("reward.functions", "rollout.tools", "rollout.max_context"),
    "where, and for how long": ("parallel.world_size", "run.dir", "run.num_rollout", "run.save_every", "run.resume"),
}
"""Keys that a first run sets, for `--help`."""
EXAMPLE = "megarl train configs/quickstart.yaml algorithm=grpo run.dir=runs/mine --dry-run"


class _Parser(Parser):
    """Raise usage errors as ConfigError, so that they are reported once, whatever the number of ranks."""

    def format_help(self) -> str:
        return f"{super().format_help()}\n{describe_everyday_keys()}\n\nexample: {EXAMPLE}\n"

    def error(self, message: str) -> NoReturn:
        raise ConfigError(
            f"{message}; usage: {self.prog} CONFIG [section.key=value ...] [--dry-run] [--rehearse] "
            "[--show-prompt [ROW]] [--keys [WORD ...]]"
        )


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _Parser("Train by RL, SFT or on preferences.", prog="megarl train")
    parser.add_argument("config", nargs="?", help="a YAML file, see configs/")
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value")
    parser.add_argument("--dry-run", action="store_true", help="check everything and print the plan, start nothing")
    parser.add_argument("--rehearse", action="store_true", help="also play a step of all ranks, without GPUs or data")
    parser.add_argument(
        "--show-prompt",
        type=int_in_range(0),
        nargs="?",
        metavar="ROW",
        help="print a prompt of data.train (0, the first) as the engine gets it, or what SFT trains on; start nothing",
    )
    parser.add_argument("--keys", action="store_true", help="list the keys: default, range, meaning; all, or by words")
    try:
        options = parser.parse_intermixed_args(with_row_number(arguments))
        if options.config is None and not options.keys:
            parser.error("name a configuration file, for example configs/quickstart.yaml")
    except ConfigError as error:
        return exit_status.report_error(error)
    try:
        if options.keys:
            words = [options.config, *options.overrides] if options.config else []
            _print("\n".join(list_keys(words)))
            return 0
        config = load_config(options.config, options.overrides)
        if options.show_prompt is not None:
            from megarl.dry_run.prompt_preview import describe_row

            _print(describe_row(config, options.show_prompt))
            return 0
        if options.dry_run or options.rehearse:
            from megarl.dry_run.validation import render, validate
            from megarl.observe import run_folder

            report = validate(config, dry_run=True)
            _print(render(report))
            config = report.resolve(config)
            try:
                run_folder.check_folder(config)
            except ConfigError as error:
                _print(f"warning: the run would be rejected: {error}")
            return _rehearse(config, report) if options.rehearse else 0
        from megarl.dry_run.auto_layout import with_job_size
        from megarl.parallel import rendezvous

        if not config.train.fsdp:  # one queue, so that collectives start before the products that they overlap with
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # CUDA reads it once
        config = with_job_size(config)
        if not rendezvous.read_launch_env().is_launched and config.parallel.world_size > 1:
            inherit_orphans()
            return start_ranks(config, arguments)
        from megarl.flow import HybridFlow

        HybridFlow(config).run()
        return 0
    except BaseException as error:  # noqa: B036  top level of the program
        return exit_status.report_error(error)


def with_row_number(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with a number in each `--show-prompt`, so that it takes no file or key that follows it."""
    result: list[str] = []
    for number, argument in enumerate(arguments):
        if argument == "--show-prompt":
            following = arguments[number + 1] if number + 1 < len(arguments) else ""
            result += [argument] if following.lstrip("-").isdecimal() else ["--show-prompt=0"]
        else:
            result.append(argument)
    return result


def _rehearse(config: Config, report: Report) -> int:
    """Play a step of the job, print what came out, and return 1 if it would fail."""
    from megarl.rehearse import rehearsal

    result = rehearsal.rehearse(config, report)
    sizes = config.parallel.gpu_gb, config.parallel.host_gb
    _print(rehearsal.render(result, *sizes))
    return int(bool(result.faults) or not result.fits(*sizes))


def describe_everyday_keys() -> str:
    """Return the keys that a first run sets in groups, with their defaults and meanings."""
    defaults, meanings = dict(describe_keys()), strict.collect_key_docs(Config)
    lines = ["keys, in the file or as section.key=value:"]
    for group, keys in EVERYDAY_KEYS.items():
        lines += ["", f"  {group}"]
        for key in keys:
            text = f"{meanings[key]} (default: {_format_default(defaults[key])})"
            lines += textwrap.wrap(text, 110, initial_indent=f"    {key:<27} ", subsequent_indent=" " * 32)
    others = len(defaults) - sum(map(len, EVERYDAY_KEYS.values()))
    lines += [
        "",
        f"  {others} more keys, all with defaults: `megarl train --keys`, or those that match, `--keys rollout lr`",
    ]
    return "\n".join(lines)


def _format_default(value: object) -> str:
    return "none" if value in ("", (), None) else str(value)


def list_keys(words: Sequence[str] = ()) -> list[str]:
    """Return one line per configuration key with its default, range and meaning.

    words: list only keys whose names contain one of these words. Raises ConfigError for a word that no key contains.
    """
    keys = describe_keys()
    for word in words:
        if not any(word in name for name, _ in keys):
            matches = difflib.get_close_matches(
                word, [part for name, _ in keys for part in (name, *name.split("."))], n=1
            )
            hint = f"did you mean {matches[0]}? " if matches else ""
            raise ConfigError(f"--keys {word[:80]}: no key contains this; {hint}--keys alone lists all")
    ranges, meanings = describe_ranges(), strict.collect_key_docs(Config)
    return [
        f"{name} = {default!r}  # {ranges[name]}" + (f"; {meanings[name]}" if name in meanings else "")
        for name, default in keys
        if not words or any(word in name for word in words)
    ]


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # the reader closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def start_ranks(config: Config, arguments: Sequence[str]) -> int:
    """Check the configuration, run this program as all ranks on this machine, and return their exit status."""
    from megarl.controllers.controller import load_requirements
    from megarl.dry_run.validation import validate
    from megarl.engine.engine_backends import engine_backend
    from megarl.engine.engine_host import HOST_VARIABLE
    from megarl.launch import launcher, restarts
    from megarl.observe import run_folder
    from megarl.parallel.placement import describe_rank_roles
    from megarl.parallel.policy_configs import list_engine_roles
    from megarl.parallel.rendezvous import serve_local_store

    config = validate(config).resolve(config)
    run_folder.check_folder(config)
    world = config.parallel.world_size
    if world > config.parallel.ranks_per_node:
        raise ConfigError(
            f"parallel.world_size={world} needs more than one machine of {config.parallel.ranks_per_node} ranks: "
            "start it with slurm/ppo_moe.sh or launch/multi_node.sh"
        )
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    requirements = load_requirements(config)
    roles = describe_rank_roles(config, requirements.roles)
    command = (sys.executable, "-m", "megarl.train", *arguments)
    pending: list[int] = []

    def attempt(environment: Mapping[str, str]) -> tuple[exit_status.RunOutcome, restarts.RestartPolicy | None]:
        launch = launcher.Launch(
            command, world, saves_on_sigterm=config.run.save_every > 0, roles=roles, pending=pending
        )
        host = None
        if list_engine_roles(config, requirements.roles) and HOST_VARIABLE not in os.environ:
            with launcher.block_signals((signal.SIGINT, signal.SIGUSR1)):
                host = engine_backend(config).start_host(
                    config
                )  # shared by all engines; they load while the ranks start
            environment = {**environment, HOST_VARIABLE: host.path}
        try:
            with serve_local_store() as store_env:
                return launch.run({**environment, **store_env})
        finally:
            if host is not None:
                host.close()

    with launcher.record_signals(pending):
        return launcher.run_with_restarts(attempt, restarts.RestartTracker().decide, pending)


if __name__ == "__main__":
    exit_status.run_and_exit(main)
