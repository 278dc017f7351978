"""Starting a run: command lines, launcher environments, and the scripts in launch/ and slurm/."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

from case import PROGRAM, Case

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ("-m", "megarl.train")
TORCHRUN = ("-m", "megarl.torchrun", "--standalone")
RANK_ENV = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
TWO = ("parallel.world_size=2", "parallel.ranks_per_node=2", "parallel.tp=2")
LISTENERS: list[socket.socket] = []  # keep their ports until this process ends


def make_folder(folder: Path) -> None:
    (folder / "folder.yaml").mkdir()


def make_dead_link(folder: Path) -> None:
    (folder / "link.yaml").symlink_to("nowhere.yaml")


def take_port(folder: Path) -> None:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("", 29517))
        listener.listen()
    except OSError:
        pass  # already in use
    LISTENERS.append(listener)


def not_installed(folder: Path) -> None:
    """Copy the scripts without a .venv beside them."""
    for name in ("launch", "slurm"):
        shutil.copytree(ROOT / name, folder / name)


def environment(**variables: str | None) -> dict[str, str]:
    return {name: text for name, text in {**RANK_ENV, **variables}.items() if text is not None}


def command_line(name: str, expected: tuple[str, ...], *arguments: str) -> Case:
    return Case(f"command line: {name}", expected, command=(*TRAIN, *arguments))


def from_environment(name: str, expected: tuple[str, ...], *arguments: str, **variables: str | None) -> Case:
    return Case(f"environment: {name}", expected, arguments, environment=environment(**variables))


def script(name: str, expected: tuple[str, ...], *command: str, **variables: str) -> Case:
    return Case(f"script: {name}", expected, command=("bash", *command), environment=variables)


NODES = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
MULTI, CONFIG = "launch/multi_node.sh", "FOLDER/config.yaml"
UNKNOWN = "unrecognized arguments"

CASES = [
    command_line("no arguments", ("name a configuration", "configs/quickstart.yaml", "usage")),
    command_line("a flag alone", ("name a configuration",), "--dry-run"),
    command_line("an unknown flag", (UNKNOWN, "--dryrun", "usage"), CONFIG, "--dryrun"),
    command_line("part of a flag", (UNKNOWN, "--dry", "usage"), CONFIG, "--dry"),
    command_line("a short flag", (UNKNOWN, "-x"), CONFIG, "-x"),
    command_line("a value for a flag", ("--dry-run", "ignored explicit argument 'yes'"), CONFIG, "--dry-run=yes"),
    command_line("a word without an equals sign", ("'yes'", "not of the form key=value"), CONFIG, "--dry-run", "yes"),
    command_line(
        "a word that is not a key", ("--keys rewrd: no key contains this", "did you mean reward?"), "--keys", "rewrd"
    ),
    Case(
        "command line: an unknown flag of the viewer", (UNKNOWN, "--nonsense"), command=("-m", "megarl", "--nonsense")
    ),
    command_line("a value for --keys", ("--keys", "ignored explicit argument"), "--keys=run"),
    command_line("a key as a flag", (UNKNOWN, "--run.seed=3"), CONFIG, "--run.seed=3"),
    command_line("the configuration as a flag", (UNKNOWN, "--config=FOLDER/config.yaml"), f"--config={CONFIG}"),
    command_line("a missing configuration", ("no configuration file FOLDER/none.yaml",), "FOLDER/none.yaml"),
    command_line(
        "a missing configuration, dry", ("no configuration file FOLDER/none.yaml",), "FOLDER/none.yaml", "--dry-run"
    ),
    command_line("an empty name", ("no configuration file",), ""),
    command_line("the name of no recipe", ("no configuration file quickstrat",), "quickstrat"),
    command_line("an override before the configuration", ("no configuration file run.seed=3",), "run.seed=3", CONFIG),
    command_line("two configurations", ("config.yaml'", "not of the form key=value"), CONFIG, CONFIG),
    command_line("a key without a value", ("'run.seed' is not of the form key=value",), CONFIG, "run.seed"),
    command_line(
        "a key and its value as two arguments", ("'run.seed' is not of the form key=value",), CONFIG, "run.seed", "3"
    ),
    command_line("a value without a key", ("not of the form key=value",), CONFIG, "=3"),
    command_line("a section without a key", ("not of the form key=value",), CONFIG, "run.=3"),
    command_line("a key without a section", ("not of the form key=value",), CONFIG, ".seed=3"),
    command_line("the model's folder", ("FOLDER/model is a folder; name the configuration file",), "FOLDER/model"),
    command_line("a device", ("no configuration file /dev/null",), "/dev/null"),
    command_line("a file as a folder", ("no configuration file FOLDER/config.yaml/x",), "FOLDER/config.yaml/x"),
    Case(
        "command line: a folder by that name",
        ("FOLDER/folder.yaml is a folder",),
        prepare=make_folder,
        command=(*TRAIN, "FOLDER/folder.yaml"),
    ),
    Case(
        "command line: a dead link",
        ("no configuration file FOLDER/link.yaml",),
        prepare=make_dead_link,
        command=(*TRAIN, "FOLDER/link.yaml"),
    ),
    Case(
        "more ranks than a machine may have",
        ("parallel.world_size=4", "slurm/ppo_moe.sh", "launch/multi_node.sh"),
        ("parallel.world_size=4", "parallel.ranks_per_node=2"),
    ),
    from_environment(
        "fewer ranks than configured", ("2 ranks were started", "parallel.world_size=1", "--nproc-per-node 1")
    ),
    from_environment("one rank of two started", ("1 ranks were started", "--nproc-per-node 2"), *TWO, WORLD_SIZE="1"),
    from_environment("no RANK", ("no RANK", "torchrun sets"), *TWO, RANK=None),
    from_environment("no WORLD_SIZE", ("no WORLD_SIZE", "unset"), *TWO, WORLD_SIZE=None),
    from_environment("no MASTER_ADDR", ("no MASTER_ADDR",), *TWO, MASTER_ADDR=None),
    from_environment("no MASTER_PORT", ("no MASTER_PORT",), *TWO, MASTER_PORT=None),
    from_environment("WORLD_SIZE as text", ("WORLD_SIZE='two'", "number from 1"), *TWO, WORLD_SIZE="two"),
    from_environment("WORLD_SIZE empty", ("WORLD_SIZE=''", "number from 1"), *TWO, WORLD_SIZE=""),
    from_environment("WORLD_SIZE of 0", ("WORLD_SIZE='0'", "number from 1"), *TWO, WORLD_SIZE="0"),
    from_environment("WORLD_SIZE negative", ("WORLD_SIZE='-2'",), *TWO, WORLD_SIZE="-2"),
    from_environment("WORLD_SIZE with a point", ("WORLD_SIZE='2.0'",), *TWO, WORLD_SIZE="2.0"),
    from_environment("RANK as text", ("RANK='first'", "number from 0"), *TWO, RANK="first"),
    from_environment("RANK negative", ("RANK='-1'",), *TWO, RANK="-1"),
    from_environment("RANK in non-ASCII digits", ("RANK='\u0661'",), *TWO, RANK="\u0661"),
    from_environment("RANK beyond the world", ("RANK=2 of WORLD_SIZE=2",), *TWO, RANK="2"),
    from_environment("LOCAL_RANK as text", ("LOCAL_RANK='x'",), *TWO, LOCAL_RANK="x"),
    from_environment("MASTER_PORT as text", ("MASTER_PORT='http'",), *TWO, MASTER_PORT="http"),
    from_environment("MASTER_PORT of 0", ("MASTER_PORT=0",), *TWO, MASTER_PORT="0"),
    from_environment("MASTER_PORT too large", ("MASTER_PORT=70000",), *TWO, MASTER_PORT="70000"),
    from_environment(
        "an unknown MASTER_ADDR", ("MASTER_ADDR=none.invalid cannot be resolved",), *TWO, MASTER_ADDR="none.invalid"
    ),
    from_environment("MASTER_ADDR empty", ("MASTER_ADDR",), *TWO, MASTER_ADDR=" "),
    Case(
        "environment: a port in use",
        ("MASTER_PORT=29517 is in use", "set MASTER_PORT"),
        TWO,
        take_port,
        environment=RANK_ENV,
    ),
    Case("torchrun: an unknown option", ("torchrun: ", UNKNOWN, "--rank"), command=(*TORCHRUN, "--rank", "2", "x.py")),
    Case("torchrun: no program", ("torchrun: ", "training_script"), command=TORCHRUN),
    Case("torchrun: ranks as text", ("torchrun: ", "two"), command=(*TORCHRUN, "--nproc-per-node", "two", "x.py")),
    Case("a flow of one's own: no override", ("'fast' is not of the form",), command=("launch/ppo_hello.py", "fast")),
    Case("a flow of one's own: no such key", ("run.sed", "run.seed"), command=("launch/ppo_hello.py", "run.sed=3")),
    script(
        "single node, no arguments", ("no configuration", "usage: bash launch/single_node.sh"), "launch/single_node.sh"
    ),
    script("single node, no such file", ("no configuration file none.yaml",), "launch/single_node.sh", "none.yaml"),
    script("single node, a flag", ("--dry-run", "not of the form"), "launch/single_node.sh", CONFIG, "--dry-run"),
    script("many nodes, no arguments", ("no configuration", "usage: NNODES=.."), MULTI),
    script("many nodes, no number of nodes", ("set NNODES",), MULTI, CONFIG),
    script("many nodes, no node rank", ("set NODE_RANK",), MULTI, CONFIG, NNODES="2"),
    script("many nodes, no address", ("set MASTER_ADDR",), MULTI, CONFIG, NNODES="2", NODE_RANK="0"),
    script("many nodes, empty", ("set NNODES",), MULTI, CONFIG, NNODES="", NODE_RANK="0"),
    script("many nodes, numbers as text", ("NNODES=two",), MULTI, CONFIG, **NODES | {"NNODES": "two"}),
    script("many nodes, 0 nodes", ("NNODES=0",), MULTI, CONFIG, **NODES | {"NNODES": "0"}),
    script("many nodes, spares as text", ("MEGARL_SPARES=one",), MULTI, CONFIG, **NODES, MEGARL_SPARES="one"),
    script(
        "many nodes, a spare's number too large",
        ("NODE_RANK=3", "from 0 to 2"),
        MULTI,
        CONFIG,
        *TWO,
        **NODES | {"NODE_RANK": "3", "MEGARL_SPARES": "1"},
    ),
    script("many nodes for one rank", ("parallel.world_size=1 does not divide by 2",), MULTI, CONFIG, **NODES),
    script(
        "many nodes, a node rank too large",
        ("NODE_RANK=2", "from 0 to 1"),
        MULTI,
        CONFIG,
        *TWO,
        **NODES | {"NODE_RANK": "2"},
    ),
    script("many nodes, a port as text", ("MASTER_PORT=x",), MULTI, CONFIG, *TWO, **NODES | {"MASTER_PORT": "x"}),
    Case("script: the Slurm script outside Slurm", ("sbatch slurm/ppo_moe.sh",), command=("bash", "slurm/ppo_moe.sh")),
    *(
        Case(
            f"script: not installed, {name}",
            ("no .venv in FOLDER", "bash launch/install.sh"),
            prepare=not_installed,
            command=("bash", f"FOLDER/{name}", "c.yaml"),
            environment=NODES | {"SLURM_JOB_ID": "1", "MEGARL_ROOT": "FOLDER"},
        )
        for name in ("launch/single_node.sh", MULTI, "slurm/ppo_moe.sh")
    ),
]
assert PROGRAM == TRAIN[1]
