"""Helpers for command lines: a usage error is one line `error: ...` and exit status 2, before any work starts."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from megarl import __version__
from megarl.config.paths import expand
from megarl.config.strict import ConfigError

USAGE_ERROR = 2
"""Exit status for usage and configuration errors."""
_PYTHON = Path(sys.executable)
INSTALL_HINT = "bash launch/install.sh in a checkout, or pip as described in launch/README.md"


class Parser(argparse.ArgumentParser):
    """ArgumentParser that raises ConfigError instead of printing its usage.

    `--help` prints the description verbatim, `--version` the version of MegaRL.
    """

    def __init__(self, description: str | None = None, prog: str | None = None) -> None:
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=prog, description=description, formatter_class=form, allow_abbrev=False)
        self.add_argument(
            "-V", "--version", action="version", version=f"MegaRL {__version__}", help="print the version"
        )
        self.register("type", Path, lambda text: Path(parse_path_text(text)))

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see --help")


def parse_path_text(text: str) -> str:
    """Argument type for a path or a name: text with `~`, which shells do not expand in `--out=~/x`, and `$NAME`
    expanded."""
    try:
        return expand(text, "path")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("path: ")) from None


def int_in_range(least: int = 1, most: int = 10**12) -> Callable[[str], int]:
    """Return an argument type for integers from `least` to `most`."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a whole number, not {text[:40]!r}") from None
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"must be from {least} to {most}, not {text[:40]}")
        return number

    return parse


def float_in_range(least: float = 0.0, most: float = 1e12) -> Callable[[str], float]:
    """Return an argument type for numbers above `least`, at most `most`."""

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not least < number <= most:
            raise argparse.ArgumentTypeError(f"must be a number above {least:g}, at most {most:g}, not {text[:40]!r}")
        return number

    return parse


def check_writable_file(path: Path | None, option: str) -> None:
    """Raise ConfigError if the file cannot be written, before the work instead of after it."""
    if path is None:
        return
    try:
        if path.is_dir():
            raise ConfigError(f"{option} {path} is a folder; name a file")
        if not path.parent.is_dir():
            raise ConfigError(f"{option} {path}: no folder {path.parent}; create it first")
        new = not path.exists()
        if not new and not path.is_file() and not path.is_char_device():
            raise ConfigError(f"{option} {path} is not a regular file; name another")
        with path.open("ab"):
            pass
        if new:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"{option} {str(path)[:200]} cannot be written: {error.strerror}; name another") from None


def default_output_file(runs: Sequence[Path], name: str) -> Path:
    """Return the default path of a report on `runs`: `name` in the first run's folder.

    The names of any other runs become part of the file name, so that different reports do not overwrite each other.
    """
    file = runs[0] / name
    other_names = "_".join(run.resolve().name for run in runs[1:])
    return file.with_stem(f"{file.stem}_{other_names[:50]}") if other_names else file


def check_writable_folder(path: Path, option: str) -> None:
    """Raise ConfigError if the folder does not exist and cannot be created, or is not writable."""
    try:
        existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists() or folder.is_symlink())
        if not existing.is_dir():
            fault = "is not a folder" if existing == path else f"cannot be created: {existing} is not a folder"
            raise ConfigError(f"{option} {path} {fault}; name another")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise ConfigError(f"{option} {path} cannot be written: no permission in {existing}; name another folder")
    except OSError as error:
        raise ConfigError(f"{option} {str(path)[:200]} cannot be written: {error.strerror}; name another") from None


def format_command(program: str, *arguments: str | Path) -> str:
    """Return a shell command for a command of `megarl` or a program of this repository.

    Examples: `.venv/bin/megarl report 'runs/my run'`, `.venv/bin/python tools/view_rollouts.py runs/mine`. Uses this
    interpreter, with paths relative to the working directory. Empty for a file that does not exist, because only the
    package is installed.
    """
    first, _, command = program.partition(" ")
    if first == "megarl":
        script = _PYTHON.with_name("megarl")
        words = [_shorten(script)] if script.is_file() else [_shorten(_PYTHON), "-m", "megarl"]
        return shlex.join([*words, command, *map(str, arguments)])
    file = Path(__file__).resolve().parents[2] / program
    if not file.is_file():
        return ""
    return shlex.join([_shorten(_PYTHON), _shorten(file), *map(str, arguments)])


def _shorten(path: Path) -> str:
    """Return a path relative to the working directory if it is in it.

    Does not resolve it: a virtual environment is identified by its own link to the interpreter.
    """
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def run_cli(program: Callable[[], int]) -> int:
    """Run `program` and return its exit status; print configuration and file errors as one line."""
    try:
        return program()
    except BrokenPipeError:  # the reader of the output has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except (ConfigError, OSError, ModuleNotFoundError) as error:
        if isinstance(error, ModuleNotFoundError) and not missing_package_hint(error):
            raise
        text = missing_package_hint(error) or str(error)
        if isinstance(error, OSError) and error.strerror:
            text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        print(f"error: {' '.join(text.split())}", file=sys.stderr, flush=True)
        return USAGE_ERROR


def missing_package_hint(error: BaseException) -> str:
    """Return a remedy for a missing package that MegaRL imports; empty for any other error."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None or error.name.partition(".")[0] == "megarl":
        return ""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    files = [frame.f_code.co_filename for frame in frames if "importlib" not in frame.f_code.co_filename]
    if not files or Path(__file__).parents[1] not in Path(files[-1]).parents:  # not imported by MegaRL
        return ""
    return f"the package {error.name.partition('.')[0]} is not installed: {INSTALL_HINT}"
