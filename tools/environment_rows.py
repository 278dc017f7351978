"""Make prompts of an environment's own tasks: .venv/bin/python tools/environment_rows.py SPEC FILE.jsonl [--evaluation]

SPEC is an entry of rollout.environments that provides tasks: harbor:FOLDER (each task folder), or verifiers:NAME (its
data set). Write it as in the configuration, because each row names its environment. FILE is for data.train, or for
data.eval with --evaluation, which takes the environment's evaluation tasks.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from megarl.config import ConfigError
from megarl.config.command_line import Parser, run_cli
from megarl.config.paths import expand_spec
from megarl.environments import harbor, verifiers


def read_rows(spec: str, evaluation: bool = False) -> list[dict[str, Any]]:
    """Return rows for data.train. Raises ConfigError for an environment without tasks."""
    prefix, _, target = spec.partition(":")
    if prefix == "harbor":
        if evaluation:
            raise ConfigError("a folder of tasks has none for evaluation; name a folder of those")
        return harbor.rows(target)
    if prefix == "verifiers":
        return verifiers.rows(target, evaluation)
    raise ConfigError(f"{spec!r} is neither harbor:FOLDER nor verifiers:NAME, which bring tasks of their own")


def write(rows: list[dict[str, Any]], target: Path) -> None:
    """Write all rows or none. Raises ConfigError for a row that JSON cannot represent."""
    lines = []
    for row in rows:
        try:
            lines.append(json.dumps(row, ensure_ascii=False) + "\n")
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"row {row['id']}: {error}; only text, numbers, lists and mappings can be written"
            ) from None
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        unfinished.write_text("".join(lines), encoding="utf-8")
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def make() -> int:
    parser = Parser(__doc__)
    parser.add_argument("spec", metavar="SPEC", help="harbor:FOLDER or verifiers:NAME")
    parser.add_argument("target", metavar="FILE", type=Path, help="a .jsonl file")
    parser.add_argument("--evaluation", action="store_true", help="the rows that it has for evaluation")
    options = parser.parse_args()
    options.spec = expand_spec(options.spec, "SPEC")
    if options.target.suffix != ".jsonl":
        raise ConfigError(f"{options.target} must end in .jsonl")
    rows = read_rows(options.spec, options.evaluation)
    write(rows, options.target)
    print(f"{options.target}: {len(rows)} prompts")
    return 0


if __name__ == "__main__":
    sys.exit(run_cli(make))
