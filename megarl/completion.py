"""Print a script that completes commands, options, configuration files and keys in bash or zsh.

    source <(megarl completion bash)     # in ~/.bashrc
    source <(megarl completion zsh)      # in ~/.zshrc, after compinit

All lists are in the script, so that completion is instant; print it again after an update.
"""

from __future__ import annotations

import argparse
import ast
import shlex
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from megarl.__main__ import COMMANDS
from megarl.config import Config, describe_keys, strict
from megarl.config.command_line import Parser, run_cli
from megarl.config.recipes import RECIPES
from megarl.config.shipped_files import list_recipes

KEY_COMMANDS = ("train", "eval", "chat", "serve", "sweep")
"""Commands that take `section.key=value`."""


def find_options(command: str) -> Iterator[tuple[str, bool]]:
    """Yield (long option, whether it needs a value), read from the source of a command's module: importing it may take
    seconds."""
    spec = find_spec(COMMANDS[command].module)
    assert spec is not None and spec.origin is not None
    yield from (("--help", False), ("--version", False))
    for node in ast.walk(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            names = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            settings = {item.value.value for item in node.keywords if isinstance(item.value, ast.Constant)}
            needs_value = not settings & {"store_true", "store_false", "?"}
            yield from ((name, needs_value) for name in names if isinstance(name, str) and name.startswith("--"))


def list_options(command: str) -> list[str]:
    """Return a command's long options."""
    return sorted({name for name, _ in find_options(command)})


def list_flags() -> list[str]:
    """Return the options after which a key may follow: those that need no value in any command that takes keys."""
    options = {option for command in KEY_COMMANDS for option in find_options(command)}
    return sorted({name for name, needs_value in options if not needs_value and (name, True) not in options})


def list_values() -> dict[str, list[str]]:
    """Return the values that a key may have, for keys with few of them."""
    values = {"algorithm": sorted(RECIPES)}
    for key, kind in strict.collect_key_types(Config).items():
        choices = list(_list_choices(kind))
        if choices and key not in values:
            values[key] = choices
    return values


def _list_choices(kind: Any) -> Iterator[str]:
    if get_origin(kind) is typing.Annotated:
        yield from _list_choices(get_args(kind)[0])
    elif get_origin(kind) is Literal:
        yield from (str(value) for value in get_args(kind) if value is not None and str(value))
    elif kind is bool:
        yield from ("true", "false")


def list_path_keys() -> list[str]:
    """Return the keys whose values are paths."""
    return [key for key, kind in strict.collect_key_types(Config).items() if strict.is_path_type(kind)]


def format_cases(cases: Mapping[str, Sequence[str]], variable: str) -> str:
    """Return lines of a `case` statement that assign each list of words to a variable."""
    return "\n".join(f"    {name}) {variable}={shlex.quote(' '.join(words))} ;;" for name, words in cases.items())


BASH = """\
# Completion of `megarl` for bash: source <(megarl completion bash)
_megarl() {
  local current before command options values prefix words
  # Words end at blanks only: bash also splits at = and :, which keys and modules contain.
  current=${COMP_LINE:0:COMP_POINT}; before=(${current% *}); current=${current##* }
  command=${before[1]}; COMPREPLY=()
  [[ ${#before[@]} -eq 1 ]] && { COMPREPLY=($(compgen -W "@COMMANDS@" -- "$current")); return; }
  case $command in
@OPTIONS@
  esac
  if [[ $current == -* ]]; then
    COMPREPLY=($(compgen -W "$options" -- "$current"))
  elif [[ " @KEY_COMMANDS@ " == *" $command "* && $current == *=* ]]; then
    prefix=${current%%=*}
    case $prefix in
@VALUES@
    esac
    if [[ " @PATH_KEYS@ " == *" $prefix "* ]]; then
      compopt -o filenames 2> /dev/null
      COMPREPLY=($(compgen -f -- "${current#*=}"))
    else
      COMPREPLY=($(compgen -W "$values" -- "${current#*=}"))
    fi
    [[ $COMP_WORDBREAKS == *=* ]] || COMPREPLY=("${COMPREPLY[@]/#/$prefix=}")
  elif [[ " train serve sweep " == *" $command "* && ${#before[@]} -eq 2 ]]; then
    compopt -o filenames 2> /dev/null
    COMPREPLY=($(compgen -f -X '!*.y*ml' -- "$current") $(compgen -d -- "$current")
      $(compgen -W "@RECIPES@" -- "$current"))
  elif [[ $command == recipes ]]; then
    COMPREPLY=($(compgen -W "@RECIPES@" -- "$current"))
  elif [[ $command == completion ]]; then
    COMPREPLY=($(compgen -W "bash zsh" -- "$current"))
  elif [[ " @KEY_COMMANDS@ " == *" $command "* && ${#before[@]} -gt 2 &&
      (${before[${#before[@]} - 1]} != --* || " @FLAGS@ " == *" ${before[${#before[@]} - 1]} "*) ]]; then
    compopt -o nospace 2> /dev/null
    COMPREPLY=($(compgen -W "@KEYS@" -- "$current"))
  else
    compopt -o filenames 2> /dev/null
    COMPREPLY=($(compgen -f -- "$current"))
  fi
}
complete -F _megarl megarl
"""

ZSH = """\
#compdef megarl
# Completion of `megarl` for zsh: source <(megarl completion zsh), after compinit
_megarl() {
  local current=${words[CURRENT]} command=${words[2]} options values
  if (( CURRENT == 2 )); then
    local -a commands=(@DESCRIBED@)
    _describe command commands
    return
  fi
  case $command in
@OPTIONS@
  esac
  if [[ $current == -* ]]; then
    compadd -- ${=options}
  elif [[ " @KEY_COMMANDS@ " == *" $command "* && $current == *=* ]]; then
    local prefix=${current%%=*}
    compset -P '*='
    case $prefix in
@VALUES@
    esac
    if [[ " @PATH_KEYS@ " == *" $prefix "* ]]; then _files; else compadd -- ${=values}; fi
  elif [[ " train serve sweep " == *" $command "* && CURRENT -eq 3 ]]; then
    _files -g '*.(yaml|yml)'
    compadd -- @RECIPES@
  elif [[ $command == recipes ]]; then
    compadd -- @RECIPES@
  elif [[ $command == completion ]]; then
    compadd -- bash zsh
  elif [[ " @KEY_COMMANDS@ " == *" $command "* && CURRENT -gt 3 &&
      ( ${words[CURRENT-1]} != --* || " @FLAGS@ " == *" ${words[CURRENT-1]} "* ) ]]; then
    compadd -S '' -- @KEYS@
  else
    _files
  fi
}
(( $+functions[compdef] )) && compdef _megarl megarl
"""


def build_script(shell: str) -> str:
    """Return the completion script of `bash` or `zsh`."""
    described = [f"{name}:{command.meaning}" for name, command in COMMANDS.items()]
    texts = {
        "COMMANDS": " ".join(COMMANDS),
        "DESCRIBED": " ".join(map(shlex.quote, described)),
        "OPTIONS": format_cases({name: list_options(name) for name in COMMANDS}, "options"),
        "VALUES": format_cases(list_values(), "values"),
        "PATH_KEYS": " ".join(list_path_keys()),
        "KEY_COMMANDS": " ".join(KEY_COMMANDS),
        "FLAGS": " ".join(list_flags()),
        "KEYS": " ".join(f"{key}=" for key, _ in describe_keys()),
        "RECIPES": " ".join(list_recipes()),
    }
    script = {"bash": BASH, "zsh": ZSH}[shell]
    for name, text in texts.items():
        script = script.replace(f"@{name}@", text)
    return script


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(__doc__, prog="megarl completion")
    parser.add_argument("shell", choices=("bash", "zsh"))
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> int:
    print(build_script(options.shell), end="")
    return 0


def main(arguments: Sequence[str]) -> int:
    return run_cli(lambda: run(parse(arguments)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
