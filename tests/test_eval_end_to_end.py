"""`megarl.eval` and `megarl.chat` with a run's policy on real engines, with a tool."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from training_run import ENVIRONMENT, ONE_RANK, ROOT, make_folder, with_host

sys.path.insert(0, str(ROOT / "tests" / "helpers"))

from hub_server import TOKEN, serve_hub  # noqa: E402

from megarl.models.hf_folder import open_hf
from megarl.observe.rollout_log import read_rollouts

pytestmark = pytest.mark.nightly

LIMITS = ["rollout.max_new_tokens=40", "rollout.max_context=192", "rollout.tool_call_parser=qwen25"]
TOOL = "rollout.tools=[megarl.environments.ready.calculator:calculator]"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("quickstart") / "q", "qwen3_moe")


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    """Two steps of SFT, with checkpoints and an export."""
    command = [
        sys.executable,
        "-m",
        "megarl.train",
        "configs/quickstart_sft.yaml",
        *ONE_RANK,
        f"model.path={folder}/model",
    ]
    command += [f"data.train={folder}/sft.jsonl", f"run.dir={folder}/run", "run.num_rollout=2", "run.save_every=1"]
    command += ["track.progress=false", "run.export=true", "data.prompts_per_step=16", *LIMITS]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    *_, line, command = done.stdout.splitlines()
    assert line == f"done: 2 steps in {folder}/run"
    process = subprocess.run(command, cwd=ROOT, shell=True, capture_output=True, text=True)  # as pasted into a terminal
    assert process.returncode == 0 and "minutes of training" in process.stdout, process.stderr
    return folder / "run"


def test_evaluates_the_newest_checkpoint(folder: Path, run: Path, tmp_path: Path, host: str) -> None:
    rows = [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()[:7]]
    (tmp_path / "sums.jsonl").write_text("\n".join(json.dumps(row) for row in rows[:4]))
    product_rows = ({**row, "data_source": "products", "id": f"p{row['id']}"} for row in rows[4:])
    (tmp_path / "products.jsonl").write_text("\n".join(map(json.dumps, product_rows)))
    out = tmp_path / "out"
    command = [sys.executable, "-m", "megarl.eval", str(run), "--data", str(tmp_path / "sums.jsonl")]
    command += ["--data", str(tmp_path / "products.jsonl"), "--k", "1,3", "--out", str(out), TOOL]
    command += ["reward.functions=[sum_reward:even]", "track.progress=false"]
    done = subprocess.run(command, cwd=ROOT, env=with_host(host), capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    tree = json.loads((out / "eval.json").read_text())
    assert (tree["step"], tree["samples"], tree["prompts"], tree["rollouts"]) == (2, 3, 7, 21)
    assert list(tree["sources"]) == ["sums", "products", "all"]

    # The rollouts are logged like a run's, and the report matches them.
    rollouts = read_rollouts(out, 1)
    assert len(rollouts) == 21 and {len(item.prompt.tools) for item in rollouts} == {1}
    assert {turn.weight_version for item in rollouts for turn in item.turns if turn.is_action} == {0}
    for name, metrics in tree["sources"].items():
        local = [item for item in rollouts if name in (item.prompt.data_source, "all")]
        rewards = [item.reward for item in local]
        assert metrics["answers"] == len(local) == 3 * metrics["prompts"]
        assert metrics["reward"]["value"] == pytest.approx(sum(rewards) / len(rewards))
        assert metrics["pass_at"]["1"]["value"] == pytest.approx(sum(rewards) / len(rewards))
        solved = {item.prompt.id for item in local if item.reward}
        assert metrics["pass_at"]["3"]["value"] == pytest.approx(len(solved) / metrics["prompts"])
    assert "7 prompts of" in done.stdout and "steps of" not in done.stdout and "step 1/1" not in done.stdout
    assert "products" in done.stdout and "pass@3 [95 %]" in done.stdout

    # The policy is the checkpoint's, which equals the export of the run.
    saved, exported = open_hf(str(out / "model")), open_hf(str(run / "export"))
    assert set(saved.names()) == set(exported.names())
    view_command = [sys.executable, "tools/view_rollouts.py", str(out), "--show", "1"]
    shown_as = subprocess.run(view_command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True).stdout
    assert "turn 1: policy" in shown_as and "<|im_start|>" in shown_as  # text, decoded by the model's tokenizer


def test_pushes_a_checkpoint_that_the_card_loads(run: Path, tmp_path: Path) -> None:
    """To a stand-in of the Hub. The weights that arrive are those of the export, which is of the same step."""
    with serve_hub() as hub:
        environment = ENVIRONMENT | {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
        command = [sys.executable, "-m", "megarl.push", str(run), "lab/sums", "--step", "2"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
        note = "note: the card has none of what --license, --base-model, --dataset would add\n"
        assert (done.returncode, done.stderr) == (0, note), done.stderr
        files = hub.repos["lab/sums"].branches["main"]
    assert files["model.safetensors"] == (run / "export/model.safetensors").read_bytes()
    assert not list(run.glob(".push-*"))
    target = tmp_path / "pushed"
    target.mkdir()
    for name, content in files.items():
        (target / name).write_bytes(content)
    card = files["README.md"].decode()
    code = card.split("```python\n")[1].split("```")[0]
    code = code.replace("lab/sums", str(target)).replace("max_new_tokens=512", "max_new_tokens=4")
    code = code.replace(', device_map="auto"', "").replace('"..."', '"What is 12+7?"')  # without accelerate
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert shown.returncode == 0 and "What is 12+7?" in shown.stdout, shown.stderr
    assert "- sft" in card and "reinforcement-learning" not in card and "recorded no versions" not in card


def test_chats_with_the_exported_policy(run: Path, host: str) -> None:
    """Two conversations. The policy may or may not call the tool."""
    command = [
        sys.executable,
        "-m",
        "megarl.chat",
        str(run),
        "--tools",
        "megarl.environments.ready.calculator:calculator",
    ]
    chat_input = "What is 12+7?\n/nothing\n/reset\nWhat is 3*4?\n/quit\nnever read\n"
    done = subprocess.run(
        command, cwd=ROOT, env=with_host(host), input=chat_input, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    lines = done.stdout.splitlines()
    assert any("with calculator; /reset starts over" in line for line in lines)
    prompts = [line for line in lines if line.startswith("> ")]
    assert len(prompts) == 5 and "there is no '/nothing'" in done.stdout and "a new conversation" in done.stdout
    assert all(len(prompts[turn]) > 2 for turn in (0, 3)), done.stdout  # a response follows the prompt
    assert all(char.isprintable() or char == "\n" for char in done.stdout)
