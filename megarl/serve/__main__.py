"""Serve a trainer to clients of the public `tinker` SDK.

    megarl serve CONFIG [section.key=value ...]

CONFIG is a configuration of `megarl.train`; its algorithm and data are not used. With lora.rank each client has an
adapter, without it all weights. `megarl serve CONFIG ...` does the same. README.md in this folder has the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

from megarl import train
from megarl.config.command_line import Parser
from megarl.launch import exit_status

SETTINGS = (
    "algorithm=megarl.serve.serve_controller:ServeController",
    "run.num_rollout=1",
    "run.save_every=0",
    "run.eval_every=0",
    "run.max_restarts=0",
    "run.export=false",
    "run.num_update=1",
    "run.ppo_epochs=1",
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(__doc__, prog="megarl serve")
    parser.add_argument("config", help="a YAML file, see configs/")
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value")
    options = parser.parse_intermixed_args(argv)
    return train.main([options.config, *SETTINGS, *options.overrides])


if __name__ == "__main__":
    exit_status.run_and_exit(main)
