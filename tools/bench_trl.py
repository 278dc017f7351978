"""GRPO steps of MegaRL and of TRL, interleaved on the same cores: seconds by phase, and the ratio of step times.

    .venv/bin/python tools/bench_trl.py --trl /tmp/trl/bin/python [--work shared] [key=value ...]

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
WORKS = {"quickstart": (16, 40), "shared": (4, 40)}
"""Workloads: prompts per step, each with 8 answers, and tokens per answer."""
SAMPLES = 8
KL = 0.04
LR = 2e-4
PROMPT_TOKENS = 300
"""Tokens of a prompt of `shared`; a prompt of the quickstart has about 22."""


# ---- inputs of both


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


def variety(text: str) -> float:
    """Return a reward that differs between answers: the share of distinct characters in a text."""
    return len(set(text)) / max(1, len(text))


def rollout_variety(rollout: Any) -> float:
    return variety(rollout.answer)


# ---- turns: a process reads the line "go" on stdin, and answers with a line of metrics of a step


def wait_for_turn() -> None:
    if not sys.stdin.readline():
        os._exit(0)  # the bench is over


def report_metrics(figures: dict[str, float]) -> None:
    print("STEP " + json.dumps(figures), flush=True)


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
        import psutil

        total = 0.0
        for child in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                parent = psutil.Process(child.pid)
                for process in (parent, *parent.children(recursive=True)):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        used = process.cpu_times()
                        total += used.user + used.system
        return total

    def end(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait()


# ---- the two sides


def run_megarl(options: argparse.Namespace) -> None:
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
        TimedRun("configs/quickstart.yaml", options.overrides).run()


def run_trl(options: argparse.Namespace) -> None:
    """Run the TRL side. Runs in TRL's environment, without MegaRL."""
    import time

    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    prompts, tokens = WORKS[options.work]
    rows = [{"prompt": json.loads(line)["text"]} for line in (options.folder / "trl.jsonl").read_text().splitlines()]
    seconds: dict[str, float] = {}
    count = {"tokens": 0.0}

    def timed(name: str) -> Any:
        work = getattr(GRPOTrainer, name)

        def call(*arguments: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = work(*arguments, **kwargs)
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start
            return result

        setattr(GRPOTrainer, name, call)

    for name in ("_generate", "_generate_and_score_completions"):
        timed(name)

    class TimedRun(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            wait_for_turn()
            seconds.clear()
            self.start = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            step = time.perf_counter() - self.start
            generate = seconds["_generate"]
            scored = seconds["_generate_and_score_completions"]
            phases = {"generate": generate, "reference_logprobs": scored - generate, "actor_update": step - scored}
            report_metrics(phases | {"step": step} | count)

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        count["tokens"] = sum(map(len, completion_ids)) / len(completion_ids)
        return [variety(text) for text in completions]

    settings = GRPOConfig(
        output_dir=str(options.folder / "trl"),
        per_device_train_batch_size=options.trl_batch or prompts * SAMPLES,
        gradient_accumulation_steps=prompts * SAMPLES // (options.trl_batch or prompts * SAMPLES),
        num_generations=SAMPLES,
        max_completion_length=tokens,
        generation_kwargs={"min_new_tokens": tokens},
        max_steps=1_000_000,
        beta=KL,
        learning_rate=LR,
        max_grad_norm=1.0,
        weight_decay=0.0,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_steps=1_000_000,
        disable_tqdm=True,
        seed=1,
        model_init_kwargs={"dtype": "float32"},
    )
    GRPOTrainer(
        model=str(options.folder / "model"),
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(options.folder / "model", padding_side="left"),
        callbacks=[TimedRun()],
    ).train()


# ---- the bench


def sides(options: argparse.Namespace, folder: Path) -> Iterator[Side]:
    from megarl.utils.addresses import free_port

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
        "reward.functions=[bench_trl:rollout_variety]",
        *options.overrides,
    ]
    from megarl.config import load_config

    world = load_config(ROOT / "configs/quickstart.yaml", overrides).parallel.world_size
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")]))
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
    command = [sys.executable, "-W", "ignore", __file__, "--be", "megarl", *overrides]
    yield Side("MegaRL", command, world, {**place, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, folder / "megarl.log")
    if options.trl is None:
        return
    their = [str(options.trl), "-W", "ignore", __file__, "--be", "trl", "--folder", str(folder), "--work", options.work]
    their += ["--trl-batch", str(options.trl_batch)]
    cores = str(len(os.sched_getaffinity(0)))
    trl_env = {
        "PYTHONPATH": "",
        "OMP_NUM_THREADS": cores,
        "OMP_WAIT_POLICY": "PASSIVE",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }
    yield Side("TRL", their, 0, trl_env, folder / "trl.log")


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


def show(work: str, results: dict[str, list[dict[str, float]]]) -> None:
    print(f"{work}: {WORKS[work][0] * SAMPLES} answers a step; medians of {len(results['MegaRL'])} steps, seconds")
    names = list(dict.fromkeys(name for steps in results.values() for name in steps[0]))
    print(f"{'':24}" + "".join(f"{side:>10}" for side in results))
    for name in names:
        row = [statistics.median([step.get(name, 0.0) for step in steps]) for steps in results.values()]
        print(f"{name:24}" + "".join(f"{value:10.3f}" for value in row))
    if "TRL" in results:
        for name, unit in (("step", "times as fast"), ("CPU seconds", "of TRL's CPU seconds over MegaRL's")):
            ratios = sorted(b[name] / a[name] for a, b in zip(results["MegaRL"], results["TRL"], strict=True))
            quarters = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
            print(f"{statistics.median(ratios):.2f} {unit} (quarters {quarters[0]:.2f} to {quarters[1]:.2f})")


class Parser(argparse.ArgumentParser):
    """Like the parser of `megarl.config.command_line`, which is not in TRL's environment: a mistake is one line and
    exit status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see --help\n")


def parse() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", type=Path, help="python of an environment with TRL; without, MegaRL alone")
    parser.add_argument(
        "--work", choices=list(WORKS), default="quickstart", help="shared: 50 M parameters, long prompts"
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=3, help="steps of each before those that count")
    parser.add_argument("--trl-batch", type=int, default=0, help="answers of TRL's micro-batches; 0 for all at once")
    parser.add_argument("--be", choices=("megarl", "trl"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="of MegaRL's configuration")
    return parser.parse_intermixed_args()


def main() -> int:
    options = parse()
    if options.be == "trl":
        run_trl(options)
    elif options.be == "megarl":
        run_megarl(options)
    else:
        show(options.work, compare(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
