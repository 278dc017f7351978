"""Pushes to a stand-in of the Hub: bytes that arrive, the model card, and failures at every request."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

from hub_server import TOKEN, USER, Hub, Repo, serve_hub  # noqa: E402

from megarl import model_card, push  # noqa: E402
from megarl.config import Config, from_dict  # noqa: E402
from megarl.observe.run_folder import claim_and_begin  # noqa: E402

WEBHOOK = "https://hooks.example/a-secret-path"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    from huggingface_hub import constants

    with serve_hub() as state:
        monkeypatch.setattr(constants, "ENDPOINT", state.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield state


def make_config(run: Path, **sections: object) -> Config:
    tree = {
        "algorithm": "grpo",
        "run": {"dir": str(run), "num_rollout": 12},
        "model": {"path": "/cache/hub/models--Qwen--Qwen3-30B-A3B/snapshots/0c1"},
        "data": {"train": [str(run.parent / "data/train.jsonl")], "eval": ["/data/of/mine/eval.jsonl"]},
        "actor_optimizer": {"lr": 3e-6},
        "reward": {"functions": ["megarl.rewards.gsm8k:gsm8k"]},
        "track": {"webhook": WEBHOOK},
    }
    return from_dict(tree | sections)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run of 12 steps with two evaluations and an export of two shards."""
    folder = tmp_path / "runs" / "sums"
    data = tmp_path / "runs/data/train.jsonl"
    data.parent.mkdir(parents=True)
    row = {"prompt": [{"role": "user", "content": "1+1?"}], "data_source": "openai/gsm8k", "ground_truth": "2"}
    data.write_text(json.dumps(row) + "\n")
    claim_and_begin(folder, make_config(folder), resume=False).release()
    rows = [{"step": step, "time": 1.0, "rollout/reward_mean": step / 12, "time/step": 30.0} for step in range(1, 13)]
    rows += [
        {"step": 0, "time": 1.0, "eval/reward_greedy": 0.25},
        {"step": 12, "time": 1.0, "eval/reward_greedy": 0.75},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    export = folder / "export"
    export.mkdir()
    (export / "config.json").write_text('{"architectures": ["Qwen3MoeForCausalLM"]}')
    (export / "tokenizer.json").write_text("{}")
    for number in (1, 2):
        (export / f"model-0000{number}-of-00002.safetensors").write_bytes(os.urandom(100_000))
    return folder


def run_push(*arguments: str | Path) -> int:
    return push.main([str(argument) for argument in arguments])


def local_files(run: Path) -> dict[str, bytes]:
    files = [*(run / "export").iterdir(), *(run / "model_card").iterdir()]
    return {file.name: file.read_bytes() for file in files}


def read_metadata(text: str) -> dict[str, object]:
    assert text.startswith("---\n")
    tree = yaml.safe_load(text.split("---\n")[1])
    assert isinstance(tree, dict)
    return tree


def test_bytes_that_arrive_equal_the_files(hub: Hub, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_push(run) == 0
    files = hub.repos[f"{USER}/sums"].branches["main"]
    assert files.pop(".gitattributes")
    assert files == local_files(run)
    assert {"README.md", "learning_curve.png", "megarl_config.yaml", "model-00002-of-00002.safetensors"} <= set(files)
    assert not hub.repos[f"{USER}/sums"].is_private
    output = capsys.readouterr().out
    assert f"{USER}/sums: 7 files pushed" in output and f"{hub.url}/{USER}/sums/commit/" in output
    assert run_push(run) == 0 and len(hub.sent("POST", "/commit/")) == 1  # nothing has changed


def test_program_takes_address_and_token_from_the_environment(hub: Hub, run: Path) -> None:
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "megarl", "push", str(run), "lab/sums", "--private", "--revision", "step/12"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    note = "note: the card has none of what --license would add\n"
    assert (done.returncode, done.stderr) == (0, note), done.stderr
    repo = hub.repos["lab/sums"]
    assert (
        repo.is_private
        and set(repo.branches) == {"main", "step/12"}
        and list(repo.branches["main"]) == [".gitattributes"]
    )
    assert repo.branches["step/12"].items() >= local_files(run).items()
    assert TOKEN not in done.stdout


def test_removes_weights_of_an_earlier_push(hub: Hub, run: Path) -> None:
    repo = hub.repos["lab/sums"] = Repo()
    stale = "model-00003-of-00003.safetensors", "model.safetensors.index.json"
    repo.branches["main"] |= dict.fromkeys((*stale, "notes.md", "extra/model.safetensors"), b"earlier")
    assert run_push(run, "lab/sums") == 0
    assert set(repo.branches["main"]) == {*local_files(run), ".gitattributes", "notes.md", "extra/model.safetensors"}


def test_dry_run_needs_no_network(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a connection"))
    assert run_push(run, "--dry-run") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "7 files for sums, none of them sent:"
    assert {line.split()[0] for line in lines[1:-1]} == set(local_files(run))
    assert lines[-1] == f"the card: {run}/model_card/README.md"


def test_card_describes_the_run(run: Path) -> None:
    assert run_push(run, "lab/sums", "--license", "apache-2.0", "--dry-run") == 0
    text = (run / "model_card/README.md").read_text()
    assert read_metadata(text) == {
        "license": "apache-2.0",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": "Qwen/Qwen3-30B-A3B",
        "datasets": ["openai/gsm8k"],
        "tags": ["reinforcement-learning", "grpo", "megarl", "megatron-core"],
    }
    assert "from [Qwen/Qwen3-30B-A3B](https://huggingface.co/Qwen/Qwen3-30B-A3B) by `grpo`, for 12 steps" in text
    assert "in 6 minutes" in text
    assert "| held-out reward, greedy | 0.250 | 0.750 |" in text
    assert "| training reward, mean of 5 steps | 0.250 | 0.833 |" in text
    recipe = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert recipe["actor_optimizer"] == {"lr": 3e-6} and recipe["run"] == {"num_rollout": 12}
    assert "track" not in recipe and "loss" not in recipe
    assert "`torch` | " in text and "commit of MegaRL" in text and "recorded no versions" not in text
    assert 'from_pretrained("lab/sums")' in text


def test_a_recipe_of_the_card_gives_the_same_configuration(run: Path) -> None:
    training = model_card.read_training(run, run / "export", None)
    tree = yaml.safe_load(model_card.format_changed_keys(training.config))
    rebuilt = from_dict(tree | {"track": {"webhook": ""}})
    expected = make_config(run, track={}, model={"path": ".../snapshots/0c1"})
    data = dataclasses.replace(expected.data, train=(".../data/train.jsonl",), eval=(".../mine/eval.jsonl",))
    assert rebuilt == dataclasses.replace(
        expected, run=dataclasses.replace(expected.run, dir=rebuilt.run.dir), data=data
    )


def test_no_secret_and_no_home_folder_is_pushed(hub: Hub, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "a-key-of-the-judge")
    roles = {"reward": {"backend": "http", "options": {"url": "http://me:pw1234@judge:80/a-key-of-the-judge"}}}
    config = make_config(run, roles=roles)
    (run / "config.yaml").unlink()
    (run / "config.yaml").write_text(yaml.safe_dump(dataclasses.asdict(config) | {"track": {"webhook": WEBHOOK}}))
    assert run_push(run) == 0
    pushed = b"".join(hub.repos[f"{USER}/sums"].branches["main"].values())
    assert b"//***@judge:80/***" in pushed
    for secret in (WEBHOOK, "a-key-of-the-judge", "pw1234", TOKEN, str(run.parent), "/cache/hub"):
        assert secret.encode() not in pushed, secret


def test_card_of_a_step_has_metrics_up_to_it(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = model_card.read_training(run, run / "export", 6)
    assert model_card.list_results(training.run) == [
        ("held-out reward, greedy", "0.250", "0.250"),
        ("training reward, mean of 3 steps", "0.167", "0.417"),
    ]
    text = model_card.format_card(training, "lab/sums", model_card.CardOptions())
    assert "# sums (the checkpoint after step 6)" in text and "for 6 of 12 steps" in text


def test_other_kinds_of_models(run: Path) -> None:
    for tree, tag, name in (
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            "text-classification",
            "AutoModelForSequenceClassification",
        ),
        ({"vision_config": {}}, "image-text-to-text", "AutoProcessor"),
    ):
        (run / "export/config.json").write_text(json.dumps(tree))
        training = model_card.read_training(run, run / "export", None)
        text = model_card.format_card(training, "lab/sums", model_card.CardOptions())
        assert read_metadata(text)["pipeline_tag"] == tag and name in text


def test_base_model_of_a_run_that_continues_another(run: Path, tmp_path: Path) -> None:
    later = make_config(tmp_path / "later", model={"path": str(run / "export")})
    assert model_card.find_base_model(later) == "Qwen/Qwen3-30B-A3B"
    for path in (str(tmp_path / "mine"), "models/Qwen3-30B-A3B"):  # a relative path looks like a name
        assert model_card.find_base_model(make_config(run, model={"path": path})) == ""


def test_pushes_an_edited_card(hub: Hub, run: Path, tmp_path: Path) -> None:
    card = tmp_path / "mine.md"
    card.write_text("---\ntags: [mine]\n---\nBy me.\n")
    assert run_push(run, "--card", card) == 0
    files = hub.repos[f"{USER}/sums"].branches["main"]
    assert files["README.md"] == card.read_bytes() and "mine.md" not in files and "megarl_config.yaml" in files


@pytest.mark.parametrize(
    ("method", "pattern", "statuses", "message"),
    [
        ("POST", "/preupload/", [403], "no permission to write to lab/sums"),
        ("POST", "/preupload/", [500] * 9, "the Hub failed with status 500"),
        ("POST", "/objects/batch", [503] * 9, "the Hub failed with status 503"),
        ("PUT", "/lfs/", [500] * 99, "the Hub failed with status 500"),
        ("PUT", "/lfs/", [0] * 99, "cannot reach http://127.0.0.1"),
        ("POST", "/commit/", [500], "the Hub failed with status 500"),
        ("POST", "/commit/", [409], "changed by another commit at the same time"),
        ("POST", "/commit/", [412], "changed by another commit at the same time"),
        ("POST", "/commit/", [429], "the Hub failed with status 429"),
        ("GET", "/tree/", [401], "does not accept the token"),
    ],
)
def test_a_failure_is_one_line_and_the_same_command_continues(
    hub: Hub,
    run: Path,
    capsys: pytest.CaptureFixture[str],
    method: str,
    pattern: str,
    statuses: list[int],
    message: str,
) -> None:
    repo = hub.repos["lab/sums"] = Repo()
    before = dict(repo.branches["main"])
    hub.faults[method, pattern] = statuses
    assert run_push(run, "lab/sums") == 2
    error = capsys.readouterr().err
    note, line = error.splitlines()
    assert note.startswith("note: ") and line.startswith("error: ") and message in line and TOKEN not in error, error
    assert repo.branches["main"] == before
    already = set(hub.objects)
    hub.faults.clear()
    hub.requests.clear()
    assert run_push(run, "lab/sums") == 0
    assert repo.branches["main"].items() >= local_files(run).items()
    assert not {path.removeprefix("/lfs/") for path, _ in hub.sent("PUT", "/lfs/")} & already


def test_an_upload_that_fails_in_the_middle_is_continued(hub: Hub, run: Path) -> None:
    """One of three objects arrives; the second command sends only the others."""
    hub.faults["PUT", "/lfs/"] = [500] * 1
    assert run_push(run, "lab/sums") == 0  # the client tries again
    assert len(hub.sent("PUT", "/lfs/")) == 4 and len(hub.objects) == 3


def test_an_invalid_token(
    hub: Hub, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_another_test")
    assert run_push(run, "lab/sums") == 2
    error = capsys.readouterr().err
    assert "the Hub does not accept the token" in error and "hf_of_another_test" not in error and not hub.repos


def test_a_token_without_permission(hub: Hub, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub.is_writable = False
    assert run_push(run, "lab/sums") == 2
    assert "no permission to write to lab/sums" in capsys.readouterr().err and not hub.repos
    assert not hub.sent("PUT", "/lfs/")


def test_a_private_push_does_not_go_to_a_public_repository(
    hub: Hub, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.repos["lab/sums"] = Repo()
    assert run_push(run, "lab/sums", "--private") == 2
    assert "exists and is public" in capsys.readouterr().err
    assert not hub.sent("POST", "/(preupload|commit)/")
    hub.repos["lab/sums"].is_private = True
    assert run_push(run, "lab/sums", "--private") == 0


def test_no_token(hub: Hub, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    assert run_push(run) == 2
    assert "no token for the Hugging Face Hub: run `hf auth login`" in capsys.readouterr().err and not hub.requests


def test_no_network(hub: Hub, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from huggingface_hub import constants

    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        assert run_push(run) == 2
    assert "cannot reach http://127.0.0.1" in capsys.readouterr().err


def test_a_run_without_an_export(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "export/config.json").unlink()
    assert run_push(run, "--dry-run") == 2
    assert f"{run} has no export: let it finish with run.export" in capsys.readouterr().err
    for step in (4, 8):
        (run / f"checkpoints/step_{step:06}").mkdir(parents=True)
    assert run_push(run, "--dry-run") == 2
    assert "has no export: choose one of its checkpoints by --step (4, 8)" in capsys.readouterr().err
    assert run_push(run, "--dry-run", "--step", "5") == 2
    assert "has no such checkpoint (its steps: 4, 8)" in capsys.readouterr().err
    assert run_push(run.parent, "--dry-run") == 2
    assert "is no run folder" in capsys.readouterr().err
    assert not list(run.glob(".push-*"))


@pytest.mark.parametrize("name", ["a/b/c", "a b", "-a", "a--b", "a..b", "a." * 60, "lab/"])
def test_invalid_names(run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_push("--dry-run", "--", run, name) == 2
    assert "is no name of a repository" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("folder", "name"),
    [("runs/mine", "mine"), ("runs/quickstart/run-1", "quickstart-run-1"), ("x/ä b", "x-b"), ("runs/a--b", "a-b")],
)
def test_default_names(tmp_path: Path, folder: str, name: str) -> None:
    result = push.default_repo(tmp_path / folder)
    assert result == name
    push.check_repo(result)
