"""Two steps of each run of `tools/combinations.py`, in which every two settings of different features meet, and a
bitwise replay of every tenth.

The policy is a tiny DeepSeek-V3 with a layer of multi-token prediction, in fp32.
"""

from __future__ import annotations

import json
import math
import sys
from contextlib import nullcontext
from pathlib import Path

import external_engine
import pytest
import tiny_models
from nights import cases_of_this_night
from training_run import ROOT, assert_replays, build_command, make_folder, read_steps, train, with_host

from megarl.config import ConfigError, load_config
from megarl.dry_run.validation import validate
from megarl.utils.addresses import free_port

sys.path.insert(0, str(ROOT / "tools"))

import combinations as pairwise  # noqa: E402

RUNS = pairwise.build_runs()
COMMON = [
    *("run.num_rollout=2", "run.num_update=1", "run.ppo_epochs=1", "run.save_every=0", "run.export=false"),
    *(
        "reward.functions=[sum_reward:even]",
        "rollout.max_new_tokens=24",
        "rollout.max_turns=2",
        "rollout.max_context=400",
        "data.eval=[]",
    ),
    *("rollout.samples_per_prompt=2", "rollout.tool_call_parser=qwen25", "kl.apply_to=none", "critic.warmup_steps=0"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_folder(tmp_path_factory.mktemp("combinations") / "q", "qwen3_moe")
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    untied = [json.dumps({name: value for name, value in row.items() if name != "tools"}) for row in rows]
    (folder / "train.jsonl").write_text("\n".join(untied) + "\n")
    tiny_models.save(tiny_models.deepseek_v3(num_nextn_predict_layers=1), folder / "mtp")
    return folder


def overrides_of(folder: Path, run: pairwise.Run, port: int = 7000, disk: str = "/tmp") -> list[str]:
    values = {"MODEL": f"{folder}/mtp", "PORT": str(port), "DISK": disk}
    settings = pairwise.overrides_of(run)
    for name, value in values.items():
        settings = [override.replace(name, value) for override in settings]
    return [f"model.path={folder}/mtp", *COMMON, *settings]


def errors_of(folder: Path, run: pairwise.Run) -> list[str]:
    """Return the errors of a dry run without a tokenizer, whose checks would start a process each time."""
    model = ("model.path=", f"model.hf_config={folder}/mtp/config.json")
    _, _, _, config, *settings = build_command(folder, folder / "run", *overrides_of(folder, run), *model)
    try:
        return [str(error) for error in validate(load_config(config, settings), dry_run=True).errors]
    except ConfigError as error:
        return [str(error)]


def test_runs_cover_all_pairs_that_are_not_refused() -> None:
    covered = set().union(*map(pairwise.covered_pairs, RUNS))
    assert covered == set(pairwise.list_pairs()) - pairwise.REFUSED.keys()
    assert len(RUNS) <= 41


def test_dry_run_refuses_the_refused_pairs_alone(folder: Path) -> None:
    assert {number: errors for number, run in enumerate(RUNS, 1) if (errors := errors_of(folder, run))} == {}
    default = {feature: next(iter(settings)) for feature, settings in pairwise.FEATURES.items()}
    assert errors_of(folder, default) == []
    for pair in pairwise.REFUSED:
        assert len(errors_of(folder, default | dict(pair))) == 1, pair


@pytest.mark.nightly
@pytest.mark.parametrize("number", cases_of_this_night(range(1, len(RUNS) + 1), 2))
def test_trains_two_steps(request: pytest.FixtureRequest, folder: Path, tmp_path: Path, number: int) -> None:
    run, port = RUNS[number - 1], free_port()
    is_vllm = run["engine"] == "vLLM"
    host = request.getfixturevalue("vllm_host").path if is_vllm else request.getfixturevalue("host")
    settings, is_replayed = overrides_of(folder, run, port, str(tmp_path)), number % 10 == 1
    has_external = run["pool"] != "of the job"
    _, _, _, config, *served = build_command(folder, tmp_path / "run", *settings)
    external = external_engine.serve(config, f"127.0.0.1:{port}", tmp_path / "external", served, with_host(host))
    with external if has_external else nullcontext():
        train(folder, tmp_path / "run", *settings, f"run.export={str(is_replayed).lower()}", host=host)
    rows = read_steps(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2]
    if has_external:  # it takes part from the first weight sync on
        assert [row["rollout/external_engines"] for row in rows] == [0, 1]
        assert all(row["rollout/external_repeated"] == 0 for row in rows)
        # Where one engine has all groups, it shares them with the external one.
        if run["generation"] == "synchronous" and run["placement"] != "some engines apart" and not is_vllm:
            assert rows[1]["rollout/external_frac"] > 0
    for row in rows:
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))
        assert row["rollout/aborted_frac"] == 0
        if "rollout/logprob_diff_mean" not in row:
            assert row["rollout/staleness_mean"] > 0, (run, row)  # with `wait` a whole step may be stale
    gaps = [row["rollout/logprob_diff_mean"] for row in rows if "rollout/logprob_diff_mean" in row]
    # Without replay a tie of two experts may fall either way, and changes what follows in its conversation.
    assert max(gaps, default=0.0) < (1e-2 if run["routing"] == "own" else 1e-4), (run, rows)
    if is_replayed:
        settings += ["run.export=true"]
        assert_replays(
            lambda target, replay: train(folder, target, *settings, replay, host=host), tmp_path / "run", "data/epoch"
        )  # a judge has engines in a replay, too
