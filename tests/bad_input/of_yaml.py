"""Unreadable or ambiguous YAML configurations, and malformed overrides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from case import PROGRAM, Case

FILE = "FOLDER/config.yaml"


def write_config(data: bytes | str) -> Callable[[Path], None]:
    """Replace the configuration."""

    def prepare(folder: Path) -> None:
        (folder / "config.yaml").write_bytes(data.encode() if isinstance(data, str) else data)

    return prepare


def with_line(text: str) -> Callable[[Path], None]:
    """Append to the configuration, whose seven lines start with an empty one."""

    def prepare(folder: Path) -> None:
        file = folder / "config.yaml"
        file.write_text(file.read_text() + text)

    return prepare


def remove_config(folder: Path) -> None:
    (folder / "config.yaml").unlink()


def make_folder(folder: Path) -> None:
    remove_config(folder)
    (folder / "config.yaml").mkdir()


def bomb() -> str:
    lines = ["a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    return "\n".join(lines)


FILES: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "no file": (remove_config, ("no configuration file", FILE)),
    "a folder": (make_folder, ("is a folder; name the configuration file", FILE)),
    "binary": (write_config(bytes(range(256))), ("not UTF-8 text", "save it as UTF-8")),
    "zeros": (write_config(b"run: {seed: 1}\0\0"), ("not text", FILE)),
    "Latin-1": (write_config("run:\n  dir: läufe\n".encode("latin-1")), ("not UTF-8 text", "line 2")),
    "UTF-16": (write_config("run: {seed: 1}\n".encode("utf-16")), ("not UTF-8 text", "line 1")),
    "too large": (write_config(b"#" * (2 << 20)), ("larger than 1 MiB",)),
    "nested 2,000 deep": (write_config("[" * 2000 + "]" * 2000), ("nested more than 40 deep", "line 1")),
    "mappings 2,000 deep": (write_config("".join(" " * n + "a:\n" for n in range(1000))), ("nested more than",)),
    "a bomb": (write_config(bomb()), ("values, with aliases written out",)),
    "a snake": (write_config("run: &a\n  seed: [*a]\n"), ("line 1: the anchor is part of itself",)),
    "no such anchor": (write_config("run: *nowhere\n"), ("undefined alias", "line 1")),
    "a list": (write_config("- run\n- model\n"), ("holds a list", "mapping of sections")),
    "a word": (write_config("quickstart\n"), ("holds a str",)),
    "a number": (write_config("3\n"), ("holds a int",)),
    "false": (write_config("false\n"), ("holds a bool",)),
    "two documents": (write_config("run: {seed: 1}\n---\nrun: {seed: 2}\n"), ("not valid YAML", "single document")),
    "tabs": (write_config("run:\n\tseed: 1\n"), ("not valid YAML", "line 2")),
    "unclosed": (write_config("run: {seed: 1\n"), ("not valid YAML", "line 2")),
    "unclosed quotes": (write_config('run: {dir: "a}\n'), ("not valid YAML",)),
    "a colon too many": (write_config("run: seed: 3\n"), ("not valid YAML", "line 1")),
    "badly indented": (write_config("run:\n  seed: 1\n dir: a\n"), ("not valid YAML", "line 3")),
    "a Python tag": (with_line("track2: !!python/object/apply:os.system [ls]\n"), ("line 8: the tag", "os.system")),
    "a tag of YAML's": (with_line("kl: !!omap [a: 1]\n"), ("line 8: the tag",)),
    "a binary tag": (with_line("kl: {coef: !!binary aaaa}\n"), ("line 8: the tag",)),
    "a time tag": (with_line("kl: {coef: !!timestamp x}\n"), ("line 8: the tag",)),
    "a section twice": (with_line("run: {seed: 3}\n"), ("run is set twice", "line 2 and line 8")),
    "a key twice": (
        with_line("kl:\n  coef: 1\n  target: 2\n  coef: 3\n"),
        ("coef is set twice", "line 9 and line 11"),
    ),
    "a key twice in what passes through": (with_line("train:\n  ddp: {a: 1, a: 1}\n"), ("a is set twice", "line 9")),
    "a number for a key": (with_line("1: 2\n"), ("unknown key '1'",)),
    "a negative number for a key": (with_line("-1: 2\n"), ("line 8: -1 is not a key",)),
    "null for a key": (with_line("null: 2\n"), ("line 8: null is not a key",)),
    "true for a key": (with_line("true: 2\n"), ("line 8: true is not a key",)),
    "nothing for a key": (with_line("kl: {: 2}\n"), ("not valid YAML", "line 8")),
    "a list for a key": (with_line("? [a, b]\n: 2\n"), ("line 8: a list or mapping is not a key",)),
    "a dot in a key": (with_line("run.seed: 3\n"), ("unknown key 'run.seed'", "seed in the section run")),
    "dots in a key": (with_line("critic.optimizer.lr: 3\n"), ("lr in the section critic.optimizer",)),
    "a key with a space": (with_line("kl coef: 3\n"), ("unknown key 'kl coef'",)),
    "a key of control characters": (with_line('"k\\x07l": 3\n'), ("unknown key",)),
    "a very long key": (with_line(f"{'k' * 900}: 3\n"), ("unknown key",)),
    "a time": (with_line("kl: {horizon: 12:30:45}\n"), ("kl.horizon", "not '12:30:45'")),
    "a date": (with_line("kl: {horizon: 2026-01-01}\n"), ("kl.horizon", "not '2026-01-01'")),
    "an octal number": (with_line("kl: {horizon: 010}\n"), ("kl.horizon", "not '010'")),
    "yes": (with_line("advantage: {whiten: yes}\n"), ("advantage.whiten must be true or false, not 'yes'",)),
    "a comma for a point": (with_line("kl: {coef: '0,001'}\n"), ("kl.coef must be a number", "'0,001'")),
    "a unit": (with_line("reward2: {}\nloss: {clip: 20%}\n"), ("reward2",)),
    "per cent": (with_line("loss: {clip: 20%}\n"), ("loss.clip must be a number", "'20%'")),
    "5,000 digits": (with_line(f"kl: {{horizon: {'9' * 5000}}}\n"), ("kl.horizon", "digits")),
    "a section that is a list": (with_line("kl: [coef, 1]\n"), ("kl must be a section of keys",)),
    "a section that is a number": (with_line("kl: 3\n"), ("kl must be a section of keys, not 3",)),
    "a merge of nothing": (with_line("kl: {<<: 3}\n"), ("not valid YAML", "merging")),
}

OVERRIDES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "no value": (("run.seed",), ("'run.seed' is not of the form key=value",)),
    "no key": (("=3",), ("is not of the form key=value",)),
    "nothing": (("",), ("is not of the form key=value",)),
    "a key that ends": (("run.=3",), ("'run.=3' is not of the form",)),
    "a key without a section": ((".seed=1",), ("'.seed=1' is not of the form",)),
    "two dots": (("run..seed=1",), ("'run..seed=1' is not of the form",)),
    "a space in the key": (("run seed=1",), ("'run seed=1' is not of the form",)),
    "a space after the key": (("run.seed =1",), ("'run.seed =1' is not of the form",)),
    "brackets in the key": (("run[seed]=1",), ("is not of the form",)),
    "a minus": (("run-seed=1",), ("is not of the form",)),
    "another alphabet": (("run.ѕeed=1",), ("unknown key run.", "run.seed")),
    "no value for a number": (("run.num_rollout=",), ("run.num_rollout must be a whole number", "not None")),
    "no value for a section": (("kl=",), ("kl is a section of keys", "kl.apply_to")),
    "a number for a section": (("critic.optimizer=3",), ("critic.optimizer is a section of keys",)),
    "text for a section": (("run=fast",), ("run is a section of keys",)),
    "a key of a number": (("run.seed.x=1",), ("run.seed must be a whole number", "not {'x': 1}")),
    "a key of a value": (("run.num_rollout.x=1",), ("num_rollout is a value, not a section",)),
    "an open list": (("reward.functions=[a:b",), ("not valid YAML", "reward.functions=[a:b")),
    "an open mapping": (("rollout.sglang={a: 1",), ("not valid YAML",)),
    "an open quotation": (('run.dir="a',), ("not valid YAML",)),
    "a tag": (("rollout.sglang={a: !!python/name:os.system x}",), ("the tag",)),
    "a bomb": ((f"rollout.sglang={{{bomb().replace(chr(10), ', ')}}}",), ("values, with aliases",)),
    "deep": ((f"rollout.sglang={{a: {'[' * 2000}{']' * 2000}}}",), ("nested more than 40 deep",)),
    "twice": (("kl.coef=0.1", "kl.coef=0.2"), ("kl.coef is given twice", "'kl.coef=0.1' and 'kl.coef=0.2'")),
    "twice the same": (("kl.coef=0.1", "kl.coef=0.1"), ("kl.coef is given twice",)),
    "a whole and a part": (("rollout.sglang={a: 1}", "rollout.sglang.b=2"), ("rollout.sglang is given twice",)),
    "a part and the whole": (("rollout.sglang.b=2", "rollout.sglang={a: 1}"), ("rollout.sglang.b is given twice",)),
    "a key twice in a mapping": (("rollout.sglang={a: 1, a: 2}",), ("a is set twice",)),
    "a number for a key": (("rollout.sglang={1.5: 2}",), ("1.5 is not a key",)),
    "two lines": (("data.prompt_key=a\nb",), ("data.prompt_key must be text",)),
    "half a character": (("data.prompt_key=a\udcff",), ("data.prompt_key must be text",)),
    "a very long name": ((f"data.prompt_key={'a' * 5000}",), ("data.prompt_key must be text",)),
    "a very long path": ((f"model.path=/{'a' * 300}",), ("model.path must be text",)),
    "a list of options": (("algorithm=ppo,grpo",), ("algorithm must be one of ppo, ", "'ppo,grpo'")),
    "an option": (("--seed=3",), ("unrecognized arguments: --seed=3", "usage")),
}

CASES = [
    *(Case(name, expected, prepare=prepare) for name, (prepare, expected) in FILES.items()),
    *(Case(f"override: {name}", expected, overrides) for name, (overrides, expected) in OVERRIDES.items()),
    Case("an unknown option", ("unrecognized arguments: --resume",), command=(PROGRAM, "--resume")),
]
