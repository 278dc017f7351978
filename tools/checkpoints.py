"""List the checkpoints of a run, show what is in one, and convert its model to a Hugging Face folder.

    .venv/bin/python tools/checkpoints.py list RUN [--hash] [--json]
    .venv/bin/python tools/checkpoints.py show RUN|CHECKPOINT [--hash] [--json]
    .venv/bin/python tools/checkpoints.py convert RUN|CHECKPOINT OUT [--role ROLE] [--adapter] [--config FILE]
                                                              [section.key=value ...]

RUN is a run folder, which stands for its newest complete checkpoint; CHECKPOINT is RUN/checkpoints/step_000020 or a
copy of it. `list` and `show` check the sizes of files; with --hash also every byte.

`convert` starts no ranks and no engine, needs no GPU, and holds a few times the largest matrix in memory, whatever the
size of the model. It writes what the run itself would export after that step: tokenizer and config.json of
`model.path`, with adapters merged; with --adapter only the adapters, in PEFT's format. --role names another model than
the policy, such as the critic, which becomes a sequence classifier. Every byte is compared with its checksum before it
is used. The run's configuration is the config.yaml in its folder, or --config; keys after it override it, such as
model.path=... on another machine.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

from megarl.checkpoint import manifest
from megarl.checkpoint.disk_space import format_bytes
from megarl.checkpoint.manifest import Entry, check_checkpoint, list_checkpoints, list_models, resolve_checkpoint
from megarl.checkpoint.provenance import config_hash
from megarl.config import Config, ConfigError, load_config
from megarl.config.command_line import Parser, run_cli

PARTS = ("world", "tp", "cp", "pp", "vpp", "ep", "etp")
"""Names of the numbers in a manifest's layout."""


def describe(folder: Path, hashes: bool) -> dict[str, Any]:
    """Return the values of a line of `list`."""
    fault: str | None = None
    tree: dict[str, Any] = {}
    files: dict[str, Entry] = {}
    try:
        tree, files = manifest.read(folder)
    except ConfigError:
        pass  # `check_checkpoint` says why
    try:
        check_checkpoint(folder, hashes)
    except ConfigError as error:
        fault = str(error)
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return {
        "name": folder.name,
        "step": tree.get("step"),
        "fault": fault,
        "layout": describe_layout(tree),
        "bytes": sum(sizes),
        "files": len(sizes),
        "written": (folder / manifest.FILE_NAME).stat().st_mtime if files else folder.stat().st_mtime,
        "config": tree.get("config", ""),
        "code": tree.get("code", ""),
        "holds": list_contents(files),
    }


def describe_layout(tree: Mapping[str, Any]) -> str:
    """Format a layout: `8 ranks: tp=2 ep=4`."""
    numbers, ranks = tree.get("layout") or [], tree.get("world_size", "?")
    if not isinstance(numbers, list):
        return "?"
    sizes = [f"{name}={number}" for name, number in zip(PARTS[1:], numbers[1:], strict=False) if number != 1]
    others = [str(text) for text in numbers[len(PARTS) :]]
    return f"{ranks} rank{'' if ranks == 1 else 's'}" + "".join(
        f"; {text}" for text in (" ".join(sizes), *others) if text
    )


def list_contents(files: Mapping[str, Entry]) -> list[str]:
    """Return the contents by name: models, and folders of other state."""
    others = {name.partition("/")[0] for name in files if "/" in name} - set(list_models(files))
    return [*list_models(files), *sorted(others)]


def list_run(run: Path, options: Namespace) -> int:
    if not run.is_dir():
        raise ConfigError(f"no run folder {run}")
    if not (run / "checkpoints").is_dir():
        raise ConfigError(f"{run} has no checkpoints: is it a run folder, and was run.save_every set?")
    rows = [describe(folder, options.hash) for folder in list_checkpoints(run)]
    if options.json:
        print(json.dumps(rows, indent=1))
        return 0
    if not rows:
        print(f"{run / 'checkpoints'} is empty")
    for row in rows:
        print(format_line(row))
    return 0


def format_line(row: Mapping[str, Any]) -> str:
    hashes = " ".join(f"{name} {row[name]}" for name in ("config", "code") if row[name])
    parts = [
        row["name"],
        "whole" if row["fault"] is None else f"DAMAGED: {row['fault']}",
        row["layout"],
        f"{format_bytes(row['bytes'])} in {row['files']} files",
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["written"])),
        hashes,
        ", ".join(row["holds"]),
    ]
    return "  ".join(part for part in parts if part)


# --- show ----------------------------------------------------------------------------------------------------


def show_checkpoint(path: Path, options: Namespace) -> int:
    folder = resolve_checkpoint(path)
    facts = describe(folder, options.hash) | {"path": str(folder)} | dict(describe_contents(folder))
    if options.json:
        print(json.dumps(facts, indent=1, default=str))
        return 0
    print(f"{folder}\n  {format_line(facts)}")
    for name, value in describe_contents(folder):
        print(f"  {name:<12}{value if isinstance(value, str) else json.dumps(value, default=str)}")
    return 0


def describe_contents(folder: Path) -> Iterator[tuple[str, Any]]:
    """Return (name, description) of each part, as far as it can be read."""
    try:
        _, files = manifest.read(folder)
    except ConfigError:
        return
    for role in list_models(files):
        try:
            yield role, model_in(folder / role)
        except ConfigError as error:
            yield role, f"cannot be read: {error}"
    if partial := sorted(name for name in files if name.startswith("partial_groups/")):
        yield "partial", conversations_in([folder / name for name in partial])
    if buffered := sorted(name for name in files if name.startswith("buffer/") and name.endswith(".parquet")):
        yield "buffer", f"{rollouts_in([folder / name for name in buffered])} rollouts of earlier steps"
    with suppress(ConfigError):
        host = manifest.host_state(folder)
        if isinstance(loader := host.get("loader"), dict):
            yield "loader", f"{loader.get('samples')} prompts handed out"
        for name in ("controller", "guards", "control"):
            if host.get(name):
                yield name, host[name]
    yield "random", f"states of {sum(name.startswith('rng_') for name in files)} ranks"


def model_in(folder: Path) -> str:
    """Describe the sizes and dtypes of a model in a checkpoint, and whether it has an optimizer."""
    from megarl.checkpoint.dist_checkpoint_reader import CheckpointReader

    reader = CheckpointReader(folder)
    weights = {name: tensor for name, tensor in reader.items() if not name.startswith("optimizer.")}
    adapters = {name: tensor for name, tensor in weights.items() if name.startswith("adapters.")}
    states = sorted({name.split(".")[2] for name in reader if name.startswith("optimizer.state.")})
    types = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()})
    elements = sum(prod(tensor.shape) for name, tensor in weights.items() if name not in adapters)
    parts = [f"{elements:,} elements in {len(weights) - len(adapters)} tensors ({', '.join(types)})"]
    if adapters:
        parts.append(f"adapters of {sum(prod(tensor.shape) for tensor in adapters.values()):,}")
    # Use the common names: Megatron's `param` are the fp32 master weights.
    names = {"param": "masters", "exp_avg": "first moments", "exp_avg_sq": "second moments"}
    parts.append("optimizer with " + ", ".join(names.get(name, name) for name in states) if states else "no optimizer")
    return "; ".join(parts)


def conversations_in(files: list[Path]) -> str:
    from megarl.rollout.partial_rollouts import read_groups

    try:
        groups = [group for file in files for group in read_groups(file)]
    except ConfigError as error:
        return str(error)
    return f"{sum(map(len, groups))} conversations under way, in {len(groups)} groups, of {len(files)} engines"


def rollouts_in(files: list[Path]) -> int:
    import pyarrow.parquet as pq

    return sum(pq.ParquetFile(file.absolute()).metadata.num_rows for file in files)


# --- convert -----------------------------------------------------------------------------------------------------


def load_run_config(folder: Path, options: Namespace) -> Config:
    """Return the configuration of a checkpoint's run. Raises ConfigError."""
    file = options.config or folder.parent.parent / "config.yaml"
    if not file.is_file():
        raise ConfigError(f"there is no {file}, the configuration of the run of {folder}; name it by --config")
    return load_config(file, options.overrides)


def convert_checkpoint(path: Path, options: Namespace) -> int:
    from megarl.chat_format.chat_template import ChatTemplate
    from megarl.checkpoint.to_hf import convert, convert_adapter
    from megarl.controllers.controller import load_requirements
    from megarl.models.family import classifier_config, padding_of
    from megarl.models.memory import critic_params
    from megarl.models.registry import family_of, load_hf_config, num_trained_mtp

    folder, out = resolve_checkpoint(path), options.out
    if out.exists() or out.is_symlink():
        raise ConfigError(f"{out} exists; name a folder that is not there yet")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"{out}: no folder {out.absolute().parent}; create it first")
    config = load_run_config(folder, options)
    declared = load_requirements(config)
    role = options.role or declared.main_role
    manifest.check_model(folder, role)
    written = manifest.read(folder)[0].get("config")
    if written and written != config_hash(config):
        print("note: the configuration has changed since this checkpoint was written", file=sys.stderr)

    source = Path(config.critic.path or config.model.path if role == "critic" else config.model.path)
    hf = load_hf_config(source)
    if role == "actor":
        table, classifier = family_of(hf).params(hf, 1, mtp=bool(num_trained_mtp(hf, config))), None
    else:
        table = critic_params(family_of(hf).params(hf, 1), int(hf["hidden_size"]))
        chat = ChatTemplate.load(str(source))
        padding = padding_of(hf, chat.tokenizer.pad_token_id, chat.end_of_turn)
        classifier = classifier_config(hf, family_of(hf).architecture, padding)
    if options.adapter:
        convert_adapter(folder / role, out, config, table)
    else:
        convert(folder / role, out, config, source, table, classifier)
    print(f"{out}: the {role.replace('_', ' ')} of {folder}")
    return 0


def main() -> int:
    assert __doc__
    parser = Parser(__doc__)
    commands = parser.add_subparsers(dest="command", metavar="list | show | convert")
    for name, work in (("list", list_run), ("show", show_checkpoint), ("convert", convert_checkpoint)):
        command = commands.add_parser(name, description=__doc__)
        command.add_argument("path", type=Path)
        command.set_defaults(work=work)
        if name != "convert":
            command.add_argument("--hash", action="store_true")
            command.add_argument("--json", action="store_true")
            continue
        command.add_argument("out", type=Path)
        command.add_argument("overrides", nargs="*", metavar="section.key=value")
        command.add_argument("--role", default="")
        command.add_argument("--adapter", action="store_true")
        command.add_argument("--config", type=Path)
    options = parser.parse_args()
    if options.command is None:
        parser.error("say what to do: list, show or convert")
    return int(options.work(options.path, options))


if __name__ == "__main__":
    sys.exit(run_cli(main))
