"""Evaluators of others through an engine of ours: lm-eval, inspect, or any client of OpenAI's API, unmodified.

`open_endpoint` starts one engine with a policy's weights. Its server answers `/v1/completions`, with the log-probs of a
prompt, and `/v1/chat/completions`, with tool calls. An evaluator is a program of another environment, which is run with
that address; its results become metrics `eval/lm_eval/<task>/<metric>` and `eval/inspect/<task>/<scorer>_<metric>`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megarl.config import Config, ConfigError, ParallelConfig

MODEL = "policy"
"""The model's name in requests."""
FILTERED = re.compile(r"(?P<metric>[^,]+),(?P<filter>.+)")
"""A metric of lm-eval with the filter of the answers, such as `exact_match,strict-match`, or `none`."""
_NAME = re.compile(r"[^\w.@-]+")
ENGINE = "sglang"
"""The only engine whose server has OpenAI's API."""


class Endpoint(NamedTuple):
    """OpenAI's API of an engine: the address with `/v1`, its key, and the folder of the model and its tokenizer."""

    url: str
    key: str
    folder: str

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that clients read, added to those of this process. No proxy is asked for loopback."""
        proxies = ",".join(filter(None, (os.environ.get("NO_PROXY"), "127.0.0.1")))
        own = {"OPENAI_BASE_URL": self.url, "OPENAI_API_KEY": self.key, "OPENAI_MODEL": MODEL}
        return {**os.environ, **own, "NO_PROXY": proxies, "no_proxy": proxies}


@contextlib.contextmanager
def open_endpoint(config: Config) -> Iterator[Endpoint]:
    """Start an engine with the weights in `model.path` on `rollout.tp` devices of this machine, for as long.

    Its log is in `run.dir`/logs. Raises ConfigError for an engine without such an API, and EngineError if it does not
    start.
    """
    from megarl.engine.engine_backends import engine_backend
    from megarl.engine.http_engine import HTTPEngine

    check_engine(config)
    tp = config.rollout.tp
    parallel = ParallelConfig(world_size=tp, ranks_per_node=tp, ranks_per_gpu=config.parallel.ranks_per_gpu)
    config = dataclasses.replace(config, parallel=parallel, placement={})
    engine = engine_backend(config).make_engine(config)
    assert isinstance(engine, HTTPEngine)
    engine.parses_tool_calls = True
    try:
        engine.start()
        engine.wait_ready()
        yield Endpoint(f"{engine.url}/v1", engine.api_key, config.model.path)
    finally:
        engine.shutdown()


def check_engine(config: Config) -> None:
    """Raise ConfigError if the configured engine has no OpenAI API."""
    if config.rollout.engine != ENGINE:
        raise ConfigError(f"rollout.engine={config.rollout.engine} has no OpenAI API here: use rollout.engine={ENGINE}")


def find_program(name: str, package: str) -> str:
    """Return the path of an evaluator's program: in PATH, or beside this interpreter. Raises ConfigError."""
    beside = str(Path(sys.executable).parent)
    program = shutil.which(name) or shutil.which(name, path=beside)
    if program is None:
        raise ConfigError(
            f"{name} is not installed: `pip install {shlex.quote(package)}` into an environment of its own, and add "
            "its bin folder to PATH"
        )
    return program


# --- lm-eval and inspect


def lm_eval_command(program: str, tasks: str, endpoint: Endpoint, config: Config, out: Path) -> list[str]:
    """Return the command of lm-eval. tasks: names, separated by commas."""
    arguments = {
        "base_url": f"{endpoint.url}/completions",
        "model": MODEL,
        "tokenizer": endpoint.folder,
        "tokenizer_backend": "huggingface",
        "max_length": config.rollout.max_context,
        "max_gen_toks": config.rollout.max_new_tokens,
        "num_concurrent": config.rollout.concurrency,
    }
    pairs = json.dumps(arguments, separators=(",", ":"))  # not key=value, ...: a path may contain commas
    options = ["--model", "local-completions", "--model_args", pairs, "--output_path", str(out), "--log_samples"]
    return [program, "run", "--tasks", tasks, *options]


def read_lm_eval(out: Path) -> dict[str, float]:
    """Return the metrics in the newest results of lm-eval in a folder. Raises ConfigError if there are none."""
    files = sorted(out.rglob("results_*.json"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise ConfigError(f"lm_eval has left no results in {out}")
    metrics = {}
    for task, values in json.loads(files[-1].read_text(encoding="utf-8")).get("results", {}).items():
        for name, value in values.items():
            match = FILTERED.fullmatch(name)
            if match is None or not is_number(value):
                continue
            suffix = "" if match["filter"] == "none" else f"_{match['filter']}"
            metrics[f"eval/lm_eval/{clean(task)}/{clean(match['metric'] + suffix)}"] = float(value)
    return metrics


def inspect_command(program: str, task: str, config: Config, out: Path) -> list[str]:
    """Return the command of inspect. task: a file, a name of one in a package, or `file@name`."""
    file, at, name = task.partition("@")
    if Path(file).is_absolute():  # which inspect does not take
        task = f"{os.path.relpath(file)}{at}{name}"
    options = ["--log-dir", str(out), "--log-format", "json", "--display", "plain"]
    limits = ["--max-connections", str(config.rollout.concurrency), "--max-tokens", str(config.rollout.max_new_tokens)]
    return [program, "eval", task, "--model", f"openai/{MODEL}", *options, *limits]


def read_inspect(out: Path) -> dict[str, float]:
    """Return the metrics in the logs of inspect in a folder. Raises ConfigError if there are none or a task failed."""
    metrics = {}
    files = sorted(out.glob("*.json"), key=lambda file: file.stat().st_mtime)
    for file in files:
        tree = json.loads(file.read_text(encoding="utf-8"))
        if tree.get("status") != "success":
            message = (tree.get("error") or {}).get("message", "")
            raise ConfigError(f"inspect: {file} has the status {tree.get('status')}: {' '.join(message.split())[:300]}")
        task = clean(tree["eval"]["task"].rpartition("/")[2])
        for score in tree["results"]["scores"]:
            for name, entry in score["metrics"].items():
                if is_number(entry["value"]):
                    metrics[f"eval/inspect/{task}/{clean(score['name'])}_{clean(name)}"] = float(entry["value"])
    if not files:
        raise ConfigError(f"inspect has left no results in {out}")
    return metrics


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def clean(name: str) -> str:
    """Return a part of a metric's name."""
    return _NAME.sub("_", name).strip("_")


# --- running them


class Evaluator(NamedTuple):
    """Program to run on an endpoint: one of `lm_eval` (tasks), `inspect` (a task) and `command` (a command line).

    options: further arguments of lm-eval or inspect.
    """

    lm_eval: str = ""
    inspect: str = ""
    command: str = ""
    options: Sequence[str] = ()

    def find(self) -> str:
        """Return the program, before anything starts. Raises ConfigError if it is not installed."""
        if self.lm_eval:
            return find_program("lm_eval", "lm_eval[api]")
        if self.inspect:
            return find_program("inspect", "inspect_ai")
        words = shlex.split(self.command)
        if not words or shutil.which(words[0]) is None:
            raise ConfigError(f"--command {self.command!r}: there is no such program")
        return words[0]

    def run(self, endpoint: Endpoint, config: Config) -> dict[str, float]:
        """Run the evaluator and return its metrics; a command has none. Raises ConfigError if it fails."""
        program, out = self.find(), Path(config.run.dir).absolute()
        environment = endpoint.environment
        if self.lm_eval:
            command = lm_eval_command(program, self.lm_eval, endpoint, config, out / "lm_eval")
        elif self.inspect:
            command = inspect_command(program, self.inspect, config, out / "inspect")
        else:
            command = shlex.split(self.command)
        status = subprocess.run([*command, *self.options], env=environment).returncode
        if status:
            raise ConfigError(f"{Path(program).name} has failed with status {status}; its messages are above")
        if self.lm_eval:
            return read_lm_eval(out / "lm_eval")
        return read_inspect(out / "inspect") if self.inspect else {}


def format_metrics(metrics: Mapping[str, float]) -> str:
    width = max(map(len, metrics), default=0)
    return "\n".join(f"{name:<{width}}  {value:.4g}" for name, value in sorted(metrics.items()))
