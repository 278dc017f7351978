"""List the recipes that come with MegaRL, or copy one to edit it.

    megarl recipes                       # names, and what each trains
    megarl recipes quickstart            # writes quickstart.yaml here; -o FILE, another file

`megarl train NAME` takes a recipe without a copy: `megarl train quickstart --dry-run`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megarl.config.command_line import Parser, check_writable_file, run_cli
from megarl.config.shipped_files import list_recipes
from megarl.config.strict import ConfigError, did_you_mean


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(__doc__, prog="megarl recipes")
    parser.add_argument("name", nargs="?", metavar="NAME", help="the recipe to copy")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="where the copy goes (default NAME.yaml)")
    return parser.parse_args(arguments)


def read_title(file: Path) -> str:
    """Return the first sentence of the comment at the beginning of a recipe."""
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# "))
    return " ".join(lines).partition(". ")[0].removesuffix(".")


def run(options: argparse.Namespace) -> int:
    recipes = list_recipes()
    if options.name is None:
        width = max(map(len, recipes))
        for name, file in recipes.items():
            print(f"{name:<{width}}  {read_title(file)}")
        return 0
    name = options.name.removeprefix("configs/").removesuffix(".yaml")
    if name not in recipes:
        raise ConfigError(f"no recipe {options.name[:80]}{did_you_mean(name, recipes)}; megarl recipes lists them")
    out: Path = options.out or Path(f"{name}.yaml")
    if out.exists():
        raise ConfigError(f"{out} exists; name another file with --out")
    check_writable_file(out, "--out")
    out.write_bytes(recipes[name].read_bytes())
    print(f"wrote {out}; check it: megarl train {out} --dry-run")
    return 0


def main(arguments: Sequence[str]) -> int:
    return run_cli(lambda: run(parse(arguments)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
