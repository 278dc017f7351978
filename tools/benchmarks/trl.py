"""GRPO steps of MegaRL and of TRL, interleaved on the same cores: seconds by phase, and the ratio of step times.

    .venv/bin/python tools/bench.py trl --trl /tmp/trl/bin/python [--work shared] [key=value ...]

--trl is the python of a separate environment, with trl==1.16.0 and the same torch and transformers as here. Both start,
and then take steps in turn; the one that waits uses no core. Both have the same random weights (an HF folder that this
program writes), prompts, number of answers and of tokens in each, fp32, AdamW, KL to a reference in the loss, one
update on all answers. TRL generates with `transformers`, in one process with all cores, without gradient checkpointing,
in batches of --trl-batch. MegaRL runs configs/quickstart.yaml with GRPO and one turn; key=value overrides it. A random
policy hardly ever ends an answer early; TRL is not allowed to.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import compute_ratio, tree_seconds
from benchmarks.output import Report
from benchmarks.trl_side import KL, LR, PROMPT_TOKENS, SAMPLES, WORKS, report_metrics, wait_for_turn
from benchmarks.workloads import ROOT
from megarl.config import ConfigError, load_config
from megarl.config.command_line import int_in_range
from megarl.utils.addresses import free_port

TOOLS = ROOT / "tools"
MEGARL_PROGRAM = "import sys; from benchmarks.trl import run_megarl; run_megarl(sys.argv[1:])"
TRL_PROGRAM = """
import pathlib, sys
from benchmarks.trl_side import run_trl
run_trl(pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
"""


def make_work(folder: Path, work: str) -> None:
    """Write model/, and prompts.jsonl with rows {prompt, text, ground_truth}: the chat, and the text that a model
    reads."""
    import make_quickstart
    import torch
    from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

    make_quickstart.make(make_quickstart.parse([str(folder), "--demonstrations", "1", "--train", "1024"]))
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    draw = random.Random(1)
    if work == "shared":
        torch.manual_seed(1)
        sizes = {"hidden_size": 512, "moe_intermediate_size": 256, "num_hidden_layers": 7, "num_experts": 16}
        heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
        model_config = json.loads((folder / "model/config.json").read_text())
        shared_settings = {
            name: model_config[name] for name in ("vocab_size", "num_experts_per_tok", "eos_token_id", "pad_token_id")
        }
        shared_settings |= {"tie_word_embeddings": False, "norm_topk_prob": True, "max_position_embeddings": 2048}
        model = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(**sizes, **heads, **shared_settings, initializer_range=0.04, dtype="float32")
        )
        model.save_pretrained(folder / "model")
        config = make_quickstart.published_form(json.loads((folder / "model/config.json").read_text()))
        make_quickstart.write_json(folder / "model/config.json", config)
        print(f"{sum(x.numel() for x in model.parameters()) / 1e6:.1f} M parameters")
    rows = []
    for line in (folder / "train.jsonl").read_text().splitlines():
        row = json.loads(line)
        tools = [make_quickstart.calculator.schema] if work == "quickstart" else None
        if tools is None:
            words = make_quickstart.PLAIN_WORDS.split()
            row["prompt"][0]["content"] = " ".join(draw.choices(words, k=PROMPT_TOKENS - 10))
            del row["tools"]
        row["text"] = tokenizer.apply_chat_template(
            row["prompt"], tools=tools, add_generation_prompt=True, tokenize=False
        )
        rows.append(row)
    for name, columns in (("prompts.jsonl", ("id", "prompt", "ground_truth", "tools")), ("trl.jsonl", ("text",))):
        lines = [json.dumps({key: row[key] for key in columns if key in row}) for row in rows]
        (folder / name).write_text("\n".join(lines) + "\n")


class Side:
    """One of the two sides: the processes of a command; this program talks to the first. world: its number of ranks; 0
    for a program without ranks."""

    def __init__(self, name: str, command: list[str], world: int, environment: dict[str, str], log: Path) -> None:
        self.name, self._log = name, log
        with log.open("w") as lines:
            self._processes = [
                subprocess.Popen(
                    command,
                    env={
                        **os.environ,
                        **environment,
                        **({"RANK": str(rank), "LOCAL_RANK": str(rank)} if world else {}),
                    },
                    stdin=subprocess.DEVNULL if rank else subprocess.PIPE,
                    stdout=lines if rank else subprocess.PIPE,
                    stderr=lines,
                    text=True,
                )
                for rank in range(world or 1)
            ]

    def step(self) -> dict[str, float]:
        """Take a step. Return the report of the side, with the CPU seconds of all its processes, engines included."""
        first = self._processes[0]
        assert first.stdin is not None and first.stdout is not None
        before = self._cpu_seconds()
        with contextlib.suppress(BrokenPipeError):
            first.stdin.write("go\n")
            first.stdin.flush()
        for line in first.stdout:
            if line.startswith("STEP "):
                return {**json.loads(line.removeprefix("STEP ")), "CPU seconds": self._cpu_seconds() - before}
        raise SystemExit(f"{self.name} has ended:\n{self._log.read_text()[-4000:]}")

    def _cpu_seconds(self) -> float:
        return sum(tree_seconds(process.pid) for process in self._processes)

    def end(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait()


def run_megarl(overrides: Sequence[str]) -> None:
    """Run a rank of MegaRL's side."""
    from megarl.controllers.controller import StepResult
    from megarl.flow import HybridFlow
    from megarl.launch.exit_status import exit_on_error
    from megarl.parallel import ranks

    class TimedRun(HybridFlow):
        def begin_step(self) -> None:
            if self.job.rank == 0:
                wait_for_turn()
            ranks.barrier()
            self.clock.lap()
            super().begin_step()

        def _finish_step(self, result: StepResult) -> dict[str, float]:
            metrics = super()._finish_step(result)
            if self.job.rank == 0:
                seconds = {name[5:]: value for name, value in metrics.items() if name.startswith("time/")}
                report_metrics(seconds | {"tokens": metrics["rollout/response_length_mean"]})
            return metrics

    with exit_on_error():
        TimedRun(str(ROOT / "configs/quickstart.yaml"), list(overrides)).run()


def sides(options: argparse.Namespace, folder: Path) -> Iterator[Side]:
    prompts, tokens = WORKS[options.work]
    longest = 2 * PROMPT_TOKENS if options.work == "shared" else 192
    overrides = [
        "algorithm=grpo",
        "kl.apply_to=loss",
        f"kl.coef={KL}",
        f"actor_optimizer.lr={LR}",
        "actor_optimizer.schedule=constant",
        "actor_optimizer.warmup_fraction=0",
        "run.num_rollout=1000000",
        "run.num_update=1",
        "run.ppo_epochs=1",
        "run.eval_every=0",
        "run.export=false",
        "run.distributed_timeout_s=3600",
        f"run.dir={folder / 'run'}",
        f"model.path={folder / 'model'}",
        f"data.train={folder / 'prompts.jsonl'}",
        f"data.prompts_per_step={prompts}",
        f"rollout.samples_per_prompt={SAMPLES}",
        f"rollout.max_new_tokens={tokens}",
        f"rollout.max_context={longest}",
        "rollout.max_turns=1",
        "reward.functions=[benchmarks.trl_side:rollout_variety]",
        *options.overrides,
    ]
    world = load_config(ROOT / "configs/quickstart.yaml", overrides).parallel.world_size
    path = os.pathsep.join(filter(None, [str(ROOT), str(TOOLS), os.environ.get("PYTHONPATH", "")]))
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
    command = [sys.executable, "-W", "ignore", "-c", MEGARL_PROGRAM, *overrides]
    yield Side("MegaRL", command, world, {**place, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, folder / "megarl.log")
    if options.trl is None:
        return
    command = [str(options.trl), "-W", "ignore", "-c", TRL_PROGRAM, str(folder), options.work, str(options.trl_batch)]
    environment = {
        "PYTHONPATH": str(TOOLS),
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
        "OMP_WAIT_POLICY": "PASSIVE",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }
    yield Side("TRL", command, 0, environment, folder / "trl.log")


def compare(options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    with tempfile.TemporaryDirectory(prefix="bench-trl-") as place:
        folder = Path(place) / options.work
        make_work(folder, options.work)
        all_sides = list(sides(options, folder))
        results: dict[str, list[dict[str, float]]] = {side.name: [] for side in all_sides}
        try:
            for turn in range(options.warm_up + options.rounds):
                for side in all_sides[:: 1 if turn % 2 else -1]:
                    figures = side.step()
                    if turn >= options.warm_up:
                        results[side.name].append(figures)
        finally:
            for side in all_sides:
                side.end()
    return results


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trl", type=Path, help="python of an environment with TRL; without, MegaRL alone")
    parser.add_argument(
        "--work", choices=list(WORKS), default="quickstart", help="shared: 50 M parameters, long prompts"
    )
    parser.add_argument("--rounds", type=int_in_range(), default=10)
    parser.add_argument("--warm-up", type=int_in_range(0), default=3, help="steps of each before those that count")
    parser.add_argument(
        "--trl-batch", type=int_in_range(0), default=0, help="answers of TRL's micro-batches; 0 for all at once"
    )
    parser.add_argument("overrides", nargs="*", help="of MegaRL's configuration")


def run(options: argparse.Namespace, report: Report) -> None:
    report.start(**({"trl": read_trl_version(options.trl)} if options.trl else {}))
    show(options.work, compare(options), report)


def read_trl_version(python: Path) -> str:
    """Return the version of TRL in an environment. Raises ConfigError if it has none."""
    program = "import importlib.metadata as m; print(m.version('trl'))"
    process = subprocess.run([str(python), "-c", program], capture_output=True, text=True)
    if process.returncode:
        raise ConfigError(f"--trl {python} has no TRL; name the python of an environment with it")
    return process.stdout.strip()


def show(work: str, results: dict[str, list[dict[str, float]]], report: Report) -> None:
    names = list(dict.fromkeys(name for steps in results.values() for name in steps[0]))
    samples = {
        side: {name: [step.get(name, 0.0) for step in steps] for name in names} for side, steps in results.items()
    }
    rows: list[dict[str, Any]] = []
    for side, by_name in samples.items():
        rows.append({"side": side, **{name: statistics.median(values) for name, values in by_name.items()}})
        for label, name in (("TRL's seconds over these", "step"), ("TRL's CPU seconds over these", "CPU seconds")):
            if "TRL" in samples:
                rows[-1][label] = compute_ratio(samples["TRL"][name], by_name[name])
        rows[-1]["samples"] = by_name
    steps = len(results["MegaRL"])
    report.table(f"{work}: {WORKS[work][0] * SAMPLES} answers a step, medians of {steps} steps, seconds", rows, True)
