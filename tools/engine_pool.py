"""Engines outside of a job: start one on any machine, and let a running job use it, or stop using it.

    .venv/bin/python tools/engine_pool.py serve CONFIG [section.key=value ...] --listen HOST:PORT
                                                                      [--out FOLDER] [--threads N]
    .venv/bin/python tools/engine_pool.py add RUN HOST:PORT
    .venv/bin/python tools/engine_pool.py remove RUN HOST:PORT
    .venv/bin/python tools/engine_pool.py list RUN

`serve` starts an engine with the model and the `rollout` settings of CONFIG, a configuration file or a run folder, on
`rollout.tp` devices of this machine, and generates for whichever run connects to it. It must be the configuration of
that run; keys after it override it, such as model.path=... for a copy on this machine, or
rollout.external_weights_dir=... for the path at which this machine has that folder. Both need the same secret: that of
the user's home folder, or of MEGARL_ENGINE_SECRET. Logs go to FOLDER (default engines/HOST_PORT).

`add` and `remove` change `rollout.external` in the control.yaml of a run folder, which the run reads at the start of
each step: a new engine gets weights at the end of that step, and requests from the next one on. A run can also start
with rollout.external=[HOST:PORT,...]; then they take part from step 2 on, or at once if the run resumes. An engine may
be stopped and started again at any time. They change the engines of the first policy alone; those of another one
(roles.*.rollout.external) do not change during a run. `list` shows the engines of a run, and what each one does.
"""

from __future__ import annotations

import fcntl
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml

from megarl.config import ConfigError, load_config, plain_yaml
from megarl.config.command_line import Parser, int_in_range, run_cli
from megarl.config.stages import parse_stages
from megarl.engine.engine_protocol import EngineError
from megarl.engine.external_wire import Wire, WireError, parse_address
from megarl.observe.control import CONTROL_FILE
from megarl.utils.text import one_line, write_atomically


def parse_address_text(text: str) -> str:
    try:
        parse_address(text)
    except ValueError as error:
        raise ConfigError(f"{error}, such as 10.0.0.5:7000") from None
    return text


def find_config(path: Path) -> Path:
    """Return the configuration file of a run folder, or `path` itself."""
    return path / "config.yaml" if path.is_dir() else path


def check_folder(run: Path) -> None:
    if not run.is_dir() or not find_config(run).is_file():
        raise ConfigError(f"{run} is no run folder: it has no config.yaml")


def read_addresses(run: Path) -> tuple[str, ...]:
    """Return the addresses in a run's control.yaml, or else those of its configuration. Raises ConfigError."""
    addresses = read_control(run).get("rollout", {}).get("external")
    if addresses is not None:
        return tuple(addresses)
    config = load_config(find_config(run))
    if any(stage.rollout.external != config.rollout.external for stage in parse_stages(config).values()):
        raise ConfigError(
            f"stages of {run}/config.yaml change rollout.external: write the whole list once as "
            f"'rollout: {{external: [HOST:PORT, ...]}}' into {run / CONTROL_FILE}, which then holds for all steps"
        )
    return config.rollout.external


def read_control(run: Path) -> dict[str, dict[str, list[str]]]:
    """Return the content of a run's control.yaml."""
    file = run / CONTROL_FILE
    tree = plain_yaml.read(file) if file.exists() else {}
    if not isinstance(tree, dict | None) or not isinstance((tree or {}).get("rollout", {}), dict):
        raise ConfigError(f"{file} is no mapping of sections; correct it")
    return dict(tree or {})


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Keep other calls of this tool from changing the run's control.yaml meanwhile."""
    with open(run / f".{CONTROL_FILE}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_addresses(run: Path, addresses: Sequence[str]) -> None:
    """Set `rollout.external` in a run's control.yaml, and leave its other values."""
    tree = read_control(run)
    tree["rollout"] = {**tree.get("rollout", {}), "external": list(addresses)}
    write_atomically(run / CONTROL_FILE, yaml.safe_dump(tree, sort_keys=False))


def serve(options: Namespace) -> int:
    from megarl.engine.external_server import ExternalServer

    address = parse_address_text(options.listen)
    config = load_config(find_config(options.config), options.overrides)
    folder = options.out or Path("engines", address.replace(":", "_"))
    server = ExternalServer(config, address, folder, options.threads)
    print(f"the engine of {config.model.path} starts; its log is in {folder}/logs", flush=True)
    try:
        server.run(lambda: print(f"ready at {address}", flush=True))
    except EngineError as error:
        print(f"error: {one_line(error)}", file=sys.stderr, flush=True)
        return 1
    return 0


def add(options: Namespace) -> int:
    address = parse_address_text(options.address)
    check_folder(options.run)
    with locked(options.run):
        addresses = read_addresses(options.run)
        if address in addresses:
            raise ConfigError(f"{options.run} has {address} already")
        write_addresses(options.run, (*addresses, address))
    return 0


def remove(options: Namespace) -> int:
    check_folder(options.run)
    with locked(options.run):
        addresses = list(read_addresses(options.run))
        if options.address not in addresses:
            raise ConfigError(f"{options.run} has no {options.address}, only {', '.join(addresses) or 'none'}")
        # Engine k belongs to engine k mod n of the run: the last one moves, and all others stay where they are.
        last = addresses.pop()
        if last != options.address:
            addresses[addresses.index(options.address)] = last
        write_addresses(options.run, addresses)
    return 0


def list_engines(options: Namespace) -> int:
    check_folder(options.run)
    for address in read_addresses(options.run):
        try:
            wire = Wire.connect(address)
            wire.send({"kind": "status"})
            status = wire.receive()["status"]
            wire.close()
        except WireError as error:
            status = str(error)
        print(f"{address}: {status}")
    return 0


def main() -> int:
    assert __doc__
    parser = Parser(__doc__)
    commands = parser.add_subparsers(dest="command", metavar="serve | add | remove | list")
    command = commands.add_parser("serve", description=__doc__)
    command.add_argument("config", type=Path)
    command.add_argument("overrides", nargs="*", metavar="section.key=value")
    command.add_argument("--listen", required=True, metavar="HOST:PORT")
    command.add_argument("--out", type=Path)
    command.add_argument("--threads", type=int_in_range(0, 4096), default=0)
    command.set_defaults(work=serve)
    for name, work in (("add", add), ("remove", remove), ("list", list_engines)):
        command = commands.add_parser(name, description=__doc__)
        command.add_argument("run", type=Path)
        if name != "list":
            command.add_argument("address", metavar="HOST:PORT")
        command.set_defaults(work=work)
    options = parser.parse_args()
    if options.command is None:
        parser.error("say what to do: serve, add, remove or list")
    return int(options.work(options))


if __name__ == "__main__":
    sys.exit(run_cli(main))
