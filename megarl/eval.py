"""Evaluate a policy on data sets: engines only, turn by turn with tools and environments as in training.

    megarl eval TARGET --data FILE [--data FILE2] [--k 1,8] [--samples N] [--out FOLDER]
                                    [section.key=value ...]
    megarl eval TARGET --lm-eval TASKS [section.key=value ...] [-- OPTIONS OF lm_eval]
    megarl eval TARGET --inspect TASK [section.key=value ...] [-- OPTIONS OF inspect]
    megarl eval TARGET --command COMMAND [section.key=value ...]

TARGET is a Hugging Face folder (or the Hub's name of one in this machine's cache), a checkpoint, or a run folder, which
stands for its newest checkpoint. A run's tools, sampling settings and rewards apply, too, unless keys override them. If
nothing sets a reward, the data source of each row selects it (`rewards/SCORERS.md`).

For each data source it prints the number of prompts and responses, the mean reward and pass@k, each with a 95 %
interval (bootstrapped over prompts), the share of truncated responses, and their length in tokens. OUT is a run folder:
eval.json beside the rollouts, which tools/view_rollouts.py shows.

--lm-eval and --inspect run the evaluators of these names, which PATH must have, on an engine with the policy's weights.
Their results are in OUT, as metrics in OUT/metrics.jsonl, and with --record in those of the run at the step of the
weights. --command runs any other client of OpenAI's API, with OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL set.
"""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megarl import train
from megarl.config import Config, ConfigError
from megarl.config.command_line import (
    Parser,
    check_writable_folder,
    float_in_range,
    format_command,
    int_in_range,
    parse_path_text,
    run_cli,
)
from megarl.evaluators import Evaluator, format_metrics, open_endpoint
from megarl.launch import exit_status
from megarl.processes.temp_folders import TempFolder

SAMPLES = 100_000


def _parse_counts(text: str) -> tuple[int, ...]:
    return tuple(sorted({int_in_range(1, SAMPLES)(part.strip()) for part in text.split(",")}))


def parse_arguments(arguments: Sequence[str] | None) -> Namespace:
    parser = Parser(__doc__, prog="megarl eval")
    parser.add_argument(
        "target", type=parse_path_text, metavar="TARGET", help="an HF folder or name, a checkpoint or a run folder"
    )
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value")
    parser.add_argument("--data", type=Path, action="append", default=[], help="prompts, .parquet or .jsonl")
    parser.add_argument("--k", type=_parse_counts, default=(1,), help="of pass@k, such as 1,8 (default 1)")
    parser.add_argument(
        "--samples", type=int_in_range(1, SAMPLES), help="answers to each prompt (default the largest k)"
    )
    parser.add_argument(
        "--right", type=float_in_range(-1e6, 1e6), default=0.5, help="least reward of a right answer (0.5)"
    )
    parser.add_argument("--out", type=Path, help="folder to write (default runs/eval/NAME-TIME)")
    parser.add_argument("--lm-eval", default="", metavar="TASKS", help="evaluate by lm-eval on these tasks")
    parser.add_argument("--inspect", default="", metavar="TASK", help="evaluate by inspect: FILE, FILE@TASK or a name")
    parser.add_argument("--command", default="", help="run another client of OpenAI's API")
    parser.add_argument("--record", action="store_true", help="add the metrics of lm-eval or inspect to the run's")
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_intermixed_args(arguments[:end])
    options.evaluator = Evaluator(options.lm_eval, options.inspect, options.command, arguments[end + 1 :])
    kinds = {
        "--data": options.data,
        "--lm-eval": options.lm_eval,
        "--inspect": options.inspect,
        "--command": options.command,
    }
    names = [name for name, value in kinds.items() if value]
    if len(names) != 1:
        parser.error(f"name one of {', '.join(kinds)}" + (f", not {' and '.join(names)}" if names else ""))
    if options.evaluator.options and not (options.lm_eval or options.inspect):
        parser.error("options after -- are for --lm-eval and --inspect")
    if options.record and not (options.lm_eval or options.inspect):
        parser.error("--record is for --lm-eval and --inspect")
    return options


def evaluate(options: Namespace) -> int:
    from megarl import model_sources
    from megarl.observe.run_folder import check_folder
    from megarl.parallel import rendezvous

    if rendezvous.read_launch_env().is_launched:
        raise ConfigError("start megarl.eval without torchrun: it starts the ranks that engines need itself")
    if not options.data:
        return evaluate_by(options, options.evaluator)
    samples = options.samples or max(options.k)
    if max(options.k) > samples:
        raise ConfigError(f"--k {max(options.k)} needs as many answers per prompt, but --samples is {samples}")
    for path in options.data:
        if not path.exists():
            raise ConfigError(f"--data {path}: no such file; correct the path")
    target = model_sources.resolve_target(options.target)
    out: Path = options.out or Path("runs/eval", f"{target.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    check_writable_folder(out, "--out")
    settings: dict[str, dict[str, Any]] = {
        "run": {"dir": str(out), "num_rollout": 1, "max_restarts": 0},
        "data": {"train": [str(path) for path in options.data], "prompts_per_step": 1},
        "rollout": {"samples_per_prompt": samples},
        "options": {"full_dataset": True},
    }
    reserved = {
        "run.dir": "use --out",
        "run.num_rollout": "eval has one step",
        "data.train": "use --data",
        "data.prompts_per_step": "eval uses all of the data",
        "rollout.samples_per_prompt": "use --samples",
    }
    with TempFolder("megarl-eval-") as folder:
        file = Path(folder, "eval.yaml")
        config = model_sources.build_config(target, settings, options.overrides, file, reserved)
        if samples > 1 and config.rollout.eval_config.temperature == 0:
            raise ConfigError(
                f"rollout.temperature=0 gives a prompt the same answer {samples} times; set it above 0, or --k and "
                "--samples to 1"
            )
        check_folder(config)
        problems = check_ground_truths(config)
        prepared = target.prepare(out / "model")
        config = model_sources.build_config(prepared, settings, options.overrides, file, reserved)
        start = time.monotonic()
        status = train.main([str(file), *options.overrides])
        if status:
            return status
        seconds = time.monotonic() - start
    return report(options, config, prepared, samples, problems, seconds)


def evaluate_by(options: Namespace, evaluator: Evaluator) -> int:
    """Run an evaluator on an engine with the target's weights, and write its metrics."""
    from megarl import model_sources
    from megarl.engine.engine_protocol import EngineError
    from megarl.evaluators import check_engine
    from megarl.observe.run_folder import append_metrics, claim_and_begin
    from megarl.utils.text import one_line

    evaluator.find()
    target = model_sources.resolve_target(options.target)
    recorded = find_run(target) if options.record else None
    out: Path = options.out or Path("runs/eval", f"{target.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    check_writable_folder(out, "--out")
    settings: dict[str, dict[str, Any]] = {"run": {"dir": str(out)}}
    reserved = {"run.dir": "use --out", "data.train": "the evaluator has its own"}
    with TempFolder("megarl-eval-") as temporary:
        file = Path(temporary, "eval.yaml")
        config = model_sources.build_config(target, settings, options.overrides, file, reserved)
        check_engine(config)
        folder = claim_and_begin(out, config, resume=False)
        try:
            prepared = target.prepare(out / "model")
            config = model_sources.build_config(prepared, settings, options.overrides, file, reserved)
            with open_endpoint(config) as endpoint:
                print(
                    f"an engine with {options.target} answers at {endpoint.url}; its log is in {out}/logs", flush=True
                )
                metrics = evaluator.run(endpoint, config)
        except EngineError as error:
            raise ConfigError(one_line(error)) from None
        finally:
            folder.release()
    if evaluator.command:
        return 0
    append_metrics(out, target.step or 0, metrics)
    if recorded is not None:
        append_metrics(*recorded, metrics)
    print(format_metrics(metrics))
    print(f"{out}/metrics.jsonl" + (f", {recorded[0]}/metrics.jsonl at step {recorded[1]}" if recorded else ""))
    return 0


def find_run(target: Any) -> tuple[Path, int]:
    """Return the run folder of a target, and the step of its weights. Raises ConfigError if it is not of a run."""
    from megarl.observe.run_folder import last_step

    if target.checkpoint is not None and target.step is not None:
        return target.checkpoint.parent.parent, target.step
    model = Path(target.model)
    if model.name == "export" and (model.parent / "metrics.jsonl").is_file():
        return model.parent, last_step(model.parent)
    raise ConfigError(f"--record: {target.argument} belongs to no run; name a run folder or a checkpoint in one")


def check_ground_truths(config: Config) -> int:
    """Return the number of prompts. Raises ConfigError for an empty file or a row that a reward function rejects."""
    from megarl.data.datasets import iter_prompts
    from megarl.rewards.functions import load_functions

    functions = load_functions(config.reward.functions)
    checks = [check for function in functions.values() if (check := getattr(function, "check", None))]
    count = 0
    for path in config.data.train:
        prompts = list(iter_prompts(Path(path), config.data.prompt_key, config.data.label_key))
        if not prompts:
            raise ConfigError(f"{path} holds no prompts")
        count += len(prompts)
        for location, prompt in prompts:
            for check in checks:
                try:
                    check(prompt)
                except ValueError as error:
                    missing = "no ground truth: " if prompt.ground_truth is None else ""
                    raise ConfigError(f"{location}: {missing}{error}") from None
    return count


def report(options: Namespace, config: Config, target: Any, samples: int, num_prompts: int, seconds: float) -> int:
    """Print the table; write eval.json and answers.jsonl."""
    from megarl.checkpoint.provenance import code_revision
    from megarl.observe.eval_metrics import compute_metrics, format_table, iter_json_rows, select_scored
    from megarl.observe.rollout_log import read_rollouts
    from megarl.utils import exact_json
    from megarl.utils.text import write_atomically

    out = Path(config.run.dir)
    rollouts = read_rollouts(out, 1)
    answers = select_scored(rollouts)
    if not answers:
        raise ConfigError(f"no answer has a reward; see {out}/log.txt")
    # With several files, rows without a source are counted under the first file's name.
    metrics = compute_metrics(answers, options.k, options.right, config.run.seed, options.data[0].stem)
    tree = {
        "target": options.target,
        "model": target.model,
        "step": target.step,
        "data": list(config.data.train),
        "k": list(options.k),
        "samples": samples,
        "right": options.right,
        "temperature": config.rollout.eval_config.temperature,
        "top_p": config.rollout.eval_config.top_p,
        "seed": config.run.seed,
        "reward": list(config.reward.functions),
        "prompts": num_prompts,
        "rollouts": len(rollouts),
        "without_reward": len(rollouts) - len(answers),
        "seconds": round(seconds, 1),
        "code": code_revision(),
        "sources": {name: asdict(entry) for name, entry in metrics.items()},
    }
    lines = (exact_json.dumps(line) for line in iter_json_rows(rollouts, options.right, options.data[0].stem))
    write_atomically(out / "answers.jsonl", "".join(f"{line}\n" for line in lines))
    write_atomically(out / "eval.json", json.dumps(tree, indent=1) + "\n")
    weights = f"step {target.step}" if target.step is not None else target.model
    subject = options.target if weights == options.target else f"{options.target} ({weights})"
    print(f"{subject}: {samples} answer{'s' if samples > 1 else ''} to each prompt")
    print(format_table(metrics, options.k))
    if tree["without_reward"]:
        print(f"{tree['without_reward']} answers without a reward (aborted or failed) are excluded")
    print(f"{out}/eval.json, answers.jsonl")
    print(format_command("tools/view_rollouts.py", out), flush=True)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    return run_cli(lambda: evaluate(parse_arguments(arguments)))


if __name__ == "__main__":
    exit_status.run_and_exit(main)
