"""The command `megarl`: .venv/bin/python -m megarl COMMAND. Without a command, this form checks the machine (`doctor`).

Each command is a module of its own, which runs as by `python -m`. Nothing is imported before a command is known, so
that help and completion take no time.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from typing import NamedTuple

from megarl import __version__
from megarl.config.command_line import USAGE_ERROR, missing_package_hint
from megarl.config.strict import did_you_mean


class Command(NamedTuple):
    """A command of `megarl`: the module that it runs, and its line in the help."""

    module: str
    meaning: str


COMMANDS = {
    "train": Command("megarl.train", "train by RL, by SFT or on preferences; --dry-run only checks"),
    "eval": Command("megarl.eval", "evaluate a model folder, a checkpoint or a run on data sets"),
    "chat": Command("megarl.chat", "chat with a policy in the terminal, with its tools"),
    "view": Command("megarl.view.view_runs", "write a page of a run or follow it: curves, phases, every token"),
    "timeline": Command("megarl.view.run_timeline", "print which phase each rank of a run was in, and what waited"),
    "report": Command("megarl.observe.run_report", "print a table of runs and plot their rewards"),
    "sweep": Command("megarl.sweep", "run a grid or an Optuna study over keys, and print one table"),
    "push": Command("megarl.push", "upload a run's policy to the Hugging Face Hub, with a model card"),
    "serve": Command("megarl.serve", "serve a trainer to clients of the tinker SDK"),
    "plan": Command("megarl.dry_run.plan_command", "which layouts of a model fit on how many GPUs, by estimate"),
    "try-reward": Command("megarl.rewards.try_reward", "call a reward function on rows of a data set"),
    "try-tool": Command("megarl.environments.try_tool", "call a tool, or play an environment by hand"),
    "recipes": Command("megarl.config.recipe_copies", "list the recipes that come with MegaRL, or copy one"),
    "doctor": Command("megarl.doctor", "check what works on this machine"),
    "torchrun": Command("megarl.torchrun", "start ranks on several nodes, with restarts"),
    "completion": Command("megarl.completion", "print a script that completes all this in bash or zsh"),
}


def format_help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.meaning}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: megarl COMMAND ...",
            "",
            "Reinforcement learning of large mixture-of-experts models, by Megatron-Core and SGLang.",
            "",
            *lines,
            "",
            "`megarl COMMAND --help` has the options of a command. `megarl --version` prints the version.",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command with its arguments. Returns its exit status if it returns at all."""
    arguments = sys.argv[1:] if arguments is None else arguments
    first = arguments[0] if arguments else "--help"
    if first in COMMANDS:
        return run_module(COMMANDS[first].module, *arguments[1:])
    if first in ("-h", "--help"):
        print(format_help())
        return 0
    if first in ("-V", "--version"):
        print(f"MegaRL {__version__}")
        return 0
    if first.startswith("-"):
        hint = f"unrecognized arguments: {first}"
    elif first.endswith((".yaml", ".yml")):
        hint = f"no command {first}; did you mean megarl train {first}?"
    else:
        hint = f"no command {first}{did_you_mean(first, COMMANDS)}"
    print(f"error: {hint}; see megarl --help", file=sys.stderr)
    return USAGE_ERROR


def run_module(module: str, *arguments: str) -> int:
    """Run a module as `python -m` would and exit; return only if a package is missing."""
    sys.argv = [module, *arguments]
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # for the user's modules, as under `python -m`
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        if not (text := missing_package_hint(error)):
            raise
        print(f"error: {text}", file=sys.stderr)
        return USAGE_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["doctor"]))
