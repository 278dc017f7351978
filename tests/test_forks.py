"""Extensions in a fork's own package: controllers, roles, workers, rewards and model families."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from megarl.config import ConfigError, from_dict, plugins
from megarl.controllers.controller import load_requirements
from megarl.models import gqa
from megarl.models.registry import family_of
from megarl.parallel.placement import role_parallel, role_settings, with_role
from megarl.workers.worker_registry import RegisteredWorker, check_roles, load_worker, resolve_worker, worker_options

pytestmark = [pytest.mark.alone, pytest.mark.slow]

ROOT = Path(__file__).resolve().parent.parent
CONTROLLERS = '''
"""Supervised fine-tuning on the conversations that a judge selects."""

import torch

from megarl.controllers.controller import StepResult
from megarl.controllers.mini_batches import MetricMeans, split_mini_batches
from megarl.controllers.sft import SFTController
from megarl.types import TokenLoss, TrainBatch


class FilteredSFT(SFTController):
    workers = {"judge": "lab.judge:Judge"}

    @classmethod
    def roles(cls, config):
        return ("actor", "judge")

    def step(self, flow, items):
        batch = TrainBatch.from_rollouts(flow.judge.select_short(flow.data.shard(items)))

        def loss(output, part):
            return TokenLoss(-output.logprobs, {"actor/nll": -output.logprobs.detach()})

        means = MetricMeans()
        for mini in split_mini_batches(batch, self.config, seed=0):
            means.add(flow.actor.update(mini, loss))
        return StepResult(means.sync() | {"judge/selected_frac": batch.num_sequences / len(items)})


class TaughtSFT(SFTController):
    @classmethod
    def roles(cls, config):
        return ("actor", "teacher")

    def step(self, flow, items):
        batch = TrainBatch.from_rollouts(flow.data.shard(items))
        logprobs = flow.teacher.forward(batch).wait().logprobs[batch.loss_mask]
        result = super().step(flow, items)
        return StepResult(result.metrics | {"teacher/nll": -float(logprobs.mean())})


class NoWorker(FilteredSFT):
    workers = {}


class EarlyAccess(FilteredSFT):
    def load_items(self, flow):
        flow.judge.select_short(())


class UndeclaredRole(FilteredSFT):
    def step(self, flow, items):
        flow.teacher.forward(items)


def is_short(rollout):
    return float(len(rollout.answer) < 20)
'''
JUDGE = '''
from megarl.workers.context import Worker


class Judge(Worker):
    def __init__(self, context, longest=12):
        super().__init__(context)
        assert context.role == "judge"
        self.longest = longest

    def select_short(self, rollouts):
        """Select the short conversations."""
        return rollouts.select(rollouts.length <= rollouts.length.median() + self.longest)
'''


@pytest.fixture(scope="module")
def fork_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package `lab`, a model and conversations."""
    target = tmp_path_factory.mktemp("fork")
    (target / "lab").mkdir()
    (target / "lab" / "__init__.py").touch()
    (target / "lab" / "sft.py").write_text(CONTROLLERS)
    (target / "lab" / "judge.py").write_text(JUDGE)
    command = [sys.executable, "tools/make_quickstart.py", str(target / "q"), "--demonstrations", "50"]
    subprocess.run([*command, "--train", "20"], cwd=ROOT, check=True, capture_output=True)
    return target


def train(fork_folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    all_overrides = [
        f"model.path={fork_folder}/q/model",
        f"data.train={fork_folder}/q/sft.jsonl",
        "data.eval=",
        "run.eval_every=0",
    ]
    steps = ["run.num_rollout=2", "run.num_update=1", "data.prompts_per_step=8"]
    steps += [f"parallel.{name}=1" for name in ("world_size", "tp", "ep")]
    command = [sys.executable, "-m", "megarl.train", "configs/quickstart_sft.yaml", *all_overrides, *steps, *overrides]
    environment = dict(os.environ, PYTHONPATH=f"{ROOT}:{fork_folder}", OMP_NUM_THREADS="1")
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment)


def test_trains_with_the_controller_of_a_fork(fork_folder: Path) -> None:
    plan = train(fork_folder, "algorithm=lab.sft:FilteredSFT", "--dry-run")
    assert plan.returncode == 0, plan.stderr
    assert "the configuration is valid" in plan.stdout
    done = train(fork_folder, "algorithm=lab.sft:FilteredSFT", f"run.dir={fork_folder}/run")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    rows = [json.loads(line) for line in (fork_folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(0 < row["judge/selected_frac"] <= 1 and row["actor/nll"] > 0 for row in rows)
    assert (fork_folder / "run" / "export" / "model.safetensors").is_file()
    assert "algorithm: lab.sft:FilteredSFT" in (fork_folder / "run" / "config.yaml").read_text().replace('"', "")


@pytest.mark.nightly
def test_trains_with_an_added_teacher_role(fork_folder: Path) -> None:
    """The teacher starts as the policy's own model, and stays as it is."""
    all_overrides = [
        "algorithm=lab.sft:TaughtSFT",
        f"roles={{teacher: {{model: {fork_folder}/q/model}}}}",
        "data.shuffle=false",
    ]
    plan = train(fork_folder, *all_overrides, "--dry-run")
    assert plan.returncode == 0 and "teacher weights" in plan.stdout, plan.stderr
    done = train(fork_folder, *all_overrides, f"run.dir={fork_folder}/taught", "rollout.temperature=1")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    rows = [json.loads(line) for line in (fork_folder / "taught" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["teacher/nll"] == pytest.approx(rows[0]["actor/nll"], abs=1e-5)
    assert rows[1]["teacher/nll"] > rows[1]["actor/nll"] and "time/teacher_logprobs" in rows[1]
    missing = train(fork_folder, all_overrides[0])
    assert missing.returncode == 2 and "roles.teacher.model is not set; it must name the HF folder" in missing.stderr


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "NoWorker",
            "no worker for the role judge of algorithm=lab.sft:NoWorker: name its worker in the controller's",
        ),
        ("EarlyAccess", "flow.judge is not available yet: workers start after `load_items`, which reads the data"),
        (
            "UndeclaredRole",
            "flow.teacher is not available: `roles()` of lab.sft:UndeclaredRole lists actor, judge; add it there",
        ),
    ],
)
def test_role_mistakes_are_one_line_errors(fork_folder: Path, name: str, message: str) -> None:
    done = train(fork_folder, f"algorithm=lab.sft:{name}", f"run.dir={fork_folder}/{name}")
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if "error:" in line]
    assert len(lines) == 1 and message in lines[0], done.stderr


def test_loads_the_reward_function_of_a_fork(fork_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megarl.rewards.functions import load_functions

    monkeypatch.syspath_prepend(fork_folder)
    assert list(load_functions(["lab.sft:is_short"])) == ["is_short"]


# --- workers of roles -------------------------------------------------------------------------------------------------


def test_resolves_the_worker_of_a_role(fork_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A registered worker wins over the configuration, then the controller, then the built-in workers."""
    monkeypatch.syspath_prepend(fork_folder)
    config = from_dict({"algorithm": "lab.sft:FilteredSFT"})
    declared = load_requirements(config)
    check_roles(config, declared, {})
    assert resolve_worker(config, declared, "judge", RegisteredWorker()) == "lab.judge:Judge"
    assert resolve_worker(config, declared, "actor", RegisteredWorker()) == "megarl.workers.actor:ActorWorker"
    with_backend = with_role(config, "actor", None, None, "megatron")
    assert resolve_worker(with_backend, declared, "actor", RegisteredWorker()) == "megarl.workers.actor:ActorWorker"
    assert load_worker(config, declared, "judge", RegisteredWorker("lab.sft:is_short")).__name__ == "is_short"
    by_name = from_dict({"algorithm": "lab.sft:FilteredSFT", "roles": {"judge": {"worker": "lab.sft:is_short"}}})
    assert load_worker(by_name, declared, "judge", RegisteredWorker()).__name__ == "is_short"
    assert load_worker(by_name, declared, "judge", RegisteredWorker(print)) is print
    worker = load_worker(config, declared, "judge", RegisteredWorker(options={"longest": 3}))
    assert worker.keywords == {"longest": 3}  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"^the options of the role judge: .*'widest'; see its worker, Judge$"):
        load_worker(config, declared, "judge", RegisteredWorker(options={"widest": 3}))


@pytest.mark.parametrize(
    ("roles", "registered", "message"),
    [
        (
            {"jugde": {}},
            {},
            r"^roles\.jugde: lab\.sft:FilteredSFT has no such role; did you mean judge\? \(it has actor, judge",
        ),
        ({}, {"jugde": RegisteredWorker()}, r"^register_worker\('jugde'\): .* did you mean judge\?"),
        ({"judge": {"wroker": "a:b"}}, {}, r"^unknown key roles\.judge\.wroker; did you mean roles\.judge\.worker\?"),
        ({"actor": {"backend": "mega"}}, {}, r"^roles\.actor\.backend=mega: no such backend .* has megatron$"),
        (
            {"critic": {"model": "/x"}, "actor": {"model": "/x"}},
            {},
            r"^roles\.actor\.model: for the actor this is model\.",
        ),
        ({"judge": []}, {}, r"^roles\.judge must be a section of keys, not \[\]$"),
    ],
)
def test_rejects_bad_role_settings(
    fork_folder: Path, monkeypatch: pytest.MonkeyPatch, roles: dict, registered: dict, message: str
) -> None:
    monkeypatch.syspath_prepend(fork_folder)
    config = from_dict({"algorithm": "lab.sft:FilteredSFT", "roles": roles})
    with pytest.raises(ConfigError, match=message):
        check_roles(config, load_requirements(config), registered)


def test_with_role_updates_the_configuration() -> None:
    config = with_role(from_dict({}), "teacher", "/big", {"tp": 2})
    config = with_role(config, "critic", "/critic", {"pp": 2})
    config = with_role(config, "actor", None, {"tp": 4})
    config = with_role(config, "reward", "/judge", {"pp": 2}, "transformers")
    settings = role_settings(config, "teacher")
    assert (settings.model, settings.parallel) == ("/big", {"tp": 2})
    assert (config.critic.path, config.critic.parallel) == ("/critic", {"pp": 2})
    assert (config.parallel.tp, config.reward.model) == (4, "/judge")
    judge = role_settings(config, "reward")
    assert (judge.backend, judge.parallel, judge.worker) == (("transformers",), {"pp": 2}, "")
    by_name = from_dict({"roles": {"reward": {"worker": "lab:Judge", "options": {"batch": 2}}}})
    assert role_settings(with_role(by_name, "reward", None, None, "http"), "reward").worker == ""
    assert worker_options(by_name, "reward", RegisteredWorker(options={"url": "u"})) == {"batch": 2, "url": "u"}
    assert config.model.path == "" and from_dict({}).roles == {}
    with pytest.raises(ConfigError, match=r"^register_worker\('rollout'\): the rollout has no separate model"):
        with_role(config, "rollout", "/x", None)


def test_role_may_have_its_own_layout() -> None:
    tree = {"parallel": {"world_size": 4, "tp": 4}, "placement": {"teacher": "2-3"}}
    config = from_dict({**tree, "roles": {"teacher": {"model": "/big", "parallel": {"tp": 2}}}})
    layout = role_parallel(config, "teacher")
    assert (layout.world_size, layout.tp) == (2, 2)
    invalid = from_dict({**tree, "roles": {"teacher": {"parallel": {"world_size": 2}}}})
    with pytest.raises(ConfigError, match=r"^roles\.teacher\.parallel\.world_size: placement.teacher sets"):
        role_parallel(invalid, "teacher")


def test_loads_a_model_family_from_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    local = {
        "LabForCausalLM": EntryPoint("LabForCausalLM", "megarl.models.gqa:QWEN3", "megarl.families"),
        "OddForCausalLM": EntryPoint("OddForCausalLM", "megarl.models.gqa:partial", "megarl.families"),
    }
    monkeypatch.setattr(plugins, "list_entry_points", lambda group: local if group == "megarl.families" else {})
    assert family_of({"architectures": ["LabForCausalLM"]}) is gqa.QWEN3
    assert family_of({"architectures": ["LabForSequenceClassification"]}) is gqa.QWEN3
    with pytest.raises(ConfigError, match=r"known: Qwen2ForCausalLM, .*, LabForCausalLM, OddForCausalLM$"):
        family_of({"architectures": ["NobodyForCausalLM"]})
    with pytest.raises(ConfigError, match=r"^the family of OddForCausalLM: megarl\.models\.gqa:partial is not a "):
        family_of({"architectures": ["OddForCausalLM"]})


def test_loads_a_worker_from_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    local = {"judge": EntryPoint("judge", "lab.judge:Judge", "megarl.workers")}
    monkeypatch.setattr(plugins, "list_entry_points", lambda group: local if group == "megarl.workers" else {})
    config = from_dict({})
    assert resolve_worker(config, load_requirements(config), "judge", RegisteredWorker()) == "lab.judge:Judge"
