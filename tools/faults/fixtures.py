"""Fixtures that scenarios share: a tiny model, recorded answers, an engine host, undisturbed runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from faults.job import PATIENCE_S, ROOT, Job, UnexpectedOutcome, shortened
from faults.judging import NOTES
from faults.points import Point
from faults.recorded_answers import record
from faults.results import RowResult
from megarl.config import Config, ConfigError, describe_keys

STEPS, GROUPS, SAMPLES = 4, 4, 4
"""Steps of a run on recorded answers, groups of a step, and samples of a group."""
SFT_STEPS = 5

CONFIG = """
algorithm: grpo
run: {num_rollout: 4, save_every: 1, keep_checkpoints: 3, num_update: 1, ppo_epochs: 1, distributed_timeout_s: 60}
model: {dtype: float32}
data: {prompts_per_step: 4}
rollout: {samples_per_prompt: 4, max_context: 256, max_new_tokens: 64, max_turns: 1}
kl: {apply_to: none}
actor_optimizer: {lr: 0.01, warmup_fraction: 0.0}
reward: {functions: ["faults.recorded_answers:even"], processes: 1}
track: {progress: false, trackers: []}
"""
SFT = """
algorithm: sft
run: {num_rollout: 5, save_every: 1, keep_checkpoints: 9, distributed_timeout_s: 60}
model: {dtype: float32}
data: {prompts_per_step: 4}
rollout: {max_context: 256, max_new_tokens: 64}
actor_optimizer: {lr: 0.01, min_lr: 0.001, schedule: linear, warmup_fraction: 0.0}
track: {progress: false, trackers: []}
"""
KEYS = {name for name, _ in describe_keys()}


class Fixtures:
    """folder: for all files of the tool. say: reports progress to people."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self.folder, self.say = folder.resolve(), say
        self._closing: list[Callable[[], None]] = []

    def new_folder(self, name: str) -> Path:
        """Create a new folder."""
        folder = self.folder / name
        folder.mkdir(parents=True)
        return folder

    # --- material

    @cached_property
    def material(self) -> Path:
        """Write model/, questions.jsonl without tools, train.jsonl with one, sft.jsonl, and the two configurations."""
        target = self.folder / "material"
        command = [sys.executable, "tools/make_quickstart.py", str(target), "--family", "qwen3_moe"]
        command += ["--demonstrations", "60", "--train", "64"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise UnexpectedOutcome(f"tools/make_quickstart.py: {done.stderr.strip()[-300:]}")
        rows = ({"id": str(number), "prompt": f"Say numbers, {number}.", "ground_truth": 0} for number in range(64))
        (target / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (target / "grpo.yaml").write_text(CONFIG)
        (target / "sft.yaml").write_text(SFT)
        return target

    @cached_property
    def recorded_rollouts(self) -> Path:
        """Recorded rollouts of all steps."""
        return record(self.folder / "answers", self.material / "model", range(1, STEPS + 1), GROUPS, SAMPLES, ranks=2)

    @cached_property
    def longer_answers(self) -> Path:
        """Recorded rollouts of more steps than a run has."""
        steps = range(1, 2 * STEPS + 1)
        return record(self.folder / "longer_answers", self.material / "model", steps, GROUPS, SAMPLES, ranks=2)

    def host(self) -> str:
        """Engine host, so that engines start without importing SGLang."""
        if not hasattr(self, "_host"):
            from megarl.engine.sglang.sglang_engine import start_host

            self._host = start_host(Config(), threads=1)
            self._closing.append(self._host.close)
        return self._host.path

    # --- runs

    def start_sft(
        self, run_dir: Path, points: Sequence[Point] = (), prefix: Sequence[str] = (), **settings: Any
    ) -> Job:
        """Start an SFT run on one rank, which takes seconds to start. settings: keys with `__` for the dot."""
        overrides = {
            "model.path": self.material / "model",
            "data.train": self.material / "sft.jsonl",
            **_keys(settings),
        }
        overrides = {"parallel.world_size": 1, **overrides}
        return Job(run_dir, self.material / "sft.yaml", overrides, points, prefix)

    def start_replayed(
        self, run_dir: Path, points: Sequence[Point] = (), prefix: Sequence[str] = (), **settings: Any
    ) -> Job:
        """Start GRPO on two ranks, on recorded answers."""
        paths = {"model.path": self.material / "model", "data.train": self.material / "questions.jsonl"}
        overrides: dict[str, Any] = {**paths, "parallel.world_size": 2, "parallel.tp": 2, "parallel.ep": 2}
        overrides |= _keys(settings)
        if "rollout.replay" not in overrides:
            overrides["rollout.replay"] = self.recorded_rollouts
        return Job(run_dir, self.material / "grpo.yaml", overrides, points, prefix)

    @cached_property
    def caller(self) -> Path:
        """A policy that nearly knows one conversation by heart, in which it calls the calculator; its questions are
        next to it, in talks.jsonl."""
        from faults.tooling import calculator

        place = self.new_folder("caller")
        function = {"name": "calculator", "arguments": {"expression": "61+17"}}
        question = {"role": "user", "content": "What is 61+17?"}
        tool_call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        final = {"role": "assistant", "content": "The answer is 78."}
        conversation = [question, tool_call, {"role": "tool", "content": "78"}, final]
        lesson = json.dumps({"messages": conversation, "tools": [calculator.schema]})
        (place / "lessons.jsonl").write_text(f"{lesson}\n" * 16)
        rows = (
            {"id": str(number), "prompt": [question], "ground_truth": 78, "tools": ["calculator"]}
            for number in range(64)
        )
        (place / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        slow = {"actor_optimizer__lr": 0.005, "actor_optimizer__schedule": "constant"}
        lesson_settings: dict[str, Any] = {"data__train": place / "lessons.jsonl", "data__prompts_per_step": 16, **slow}
        wait_until_finished(self.start_sft(place / "run", run__num_rollout=10, run__save_every=0, **lesson_settings))
        return place

    def start_generated(self, run_dir: Path, points: Sequence[Point], settings: dict[str, Any]) -> Job:
        """Start GRPO of that policy, on two ranks with an engine each, with tools. The entropy bonus changes the
        weights, whatever the answers are."""
        overrides = {
            "model.path": self.caller / "run" / "export",
            "data.train": self.caller / "talks.jsonl",
            **{"parallel.world_size": 2, "parallel.ranks_per_node": 2, "run.export": False},
            **{"rollout.tools": ["faults.tooling:calculator"], "rollout.tool_call_parser": "qwen25"},
            **{"rollout.max_turns": 3, "rollout.max_new_tokens": 40, "rollout.temperature": 1.0},
            **{"rollout.concurrency": 2, "rollout.pass_env": [NOTES], "rollout.verify_weights_every": 1},
            **{"rollout.request_timeout": 60, "rollout.step_timeout": 240, "run.distributed_timeout_s": 120},
            **{"reward.functions": ["faults.tooling:counted"], "loss.entropy_coef": 0.01},
            **{"actor_optimizer.lr": 5e-4, "actor_optimizer.schedule": "constant"},
            **settings,
        }
        return Job(run_dir, self.material / "grpo.yaml", overrides, points, host=self.host())

    @cache  # noqa: B019  one instance exists
    def undisturbed(self) -> Path:
        """Run folder of an undisturbed run on recorded answers."""
        run_dir = self.new_folder("undisturbed") / "run"
        wait_until_finished(self.start_replayed(run_dir))
        return run_dir

    @cache  # noqa: B019
    def undisturbed_sft(self) -> Path:
        """Run folder of an undisturbed SFT run, with checkpoints of all steps."""
        run_dir = self.new_folder("undisturbed_sft") / "run"
        wait_until_finished(self.start_sft(run_dir))
        return run_dir

    def close(self) -> None:
        for close in reversed(self._closing):
            close()
        self._closing.clear()


def run_rows(
    fixtures: Fixtures, row_numbers: Sequence[int], works: Mapping[int, Callable[[Fixtures], RowResult]]
) -> Iterator[tuple[int, RowResult]]:
    """Run rows that have their own runs: an error in one does not stop the others."""
    for number, work in works.items():
        if number in row_numbers:
            fixtures.say(f"row {number}")
            yield number, run_row(work, fixtures)


def run_row(work: Callable[..., RowResult], *arguments: Any) -> RowResult:
    """Return a row's observations, or a failed result with the reason."""
    try:
        return work(*arguments)
    except (UnexpectedOutcome, ConfigError, OSError) as error:
        return RowResult(False, shortened(str(error), 300))


def wait_until_finished(job: Job, seconds: float = PATIENCE_S) -> float:
    """Wait for the end of an undisturbed run. Return its seconds. Raises UnexpectedOutcome."""
    with job:
        done = job.wait(seconds)
        if done.status:
            raise UnexpectedOutcome(f"a run that nothing was done to ended with status {done.status}: {done.reason}")
        return done.at - job.started_at


def _keys(settings: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("__", "."): value for name, value in settings.items()}
