"""Every SGLang choice of expert and FP8 backends has a verdict: supported, or refused with a reason."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.config import ConfigError, foreign_dataclasses
from megarl.engine.sglang import engine_settings, server_args

pytestmark = [pytest.mark.alone, pytest.mark.slow]

ROOT = Path(__file__).parents[3]
CHOICES = foreign_dataclasses.parse_constants(
    ast.parse((server_args.sglang_folder() / "arg_groups/choices.py").read_text())
)


def enum_values(file: str, name: str) -> set[str]:
    """Return the values of an enumeration in SGLang's source."""
    tree = ast.parse((server_args.sglang_folder() / file).read_text())
    (result,) = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)
    values = [node.value for node in result.body if isinstance(node, ast.Assign)]
    return {str(value.value) for value in values if isinstance(value, ast.Constant)}


def undecided_choices(choices: set[str], setting: str) -> set[str]:
    """Return choices without a verdict, and verdicts without a choice."""
    return choices ^ engine_settings.TABLES[setting].keys()


@pytest.mark.parametrize(
    ("setting", "constant"),
    [
        ("moe_runner_backend", "MOE_RUNNER_BACKEND_CHOICES"),
        ("quantization", "QUANTIZATION_CHOICES"),
        ("fp8_gemm_runner_backend", "FP8_GEMM_RUNNER_BACKEND_CHOICES"),
    ],
)
def test_every_sglang_choice_has_a_verdict(setting: str, constant: str) -> None:
    assert not undecided_choices(set(CHOICES[constant]), setting)
    assert undecided_choices({*CHOICES[constant], "new_choice"}, setting) == {"new_choice"}


def test_every_a2a_backend_has_a_verdict() -> None:
    assert not undecided_choices(enum_values("layers/moe/utils.py", "MoeA2ABackend"), "moe_a2a_backend")
    assert (
        set(server_args.load_fields()["moe_a2a_backend"].choices or ())
        <= engine_settings.TABLES["moe_a2a_backend"].keys()
    )


def test_every_runner_of_the_layers_has_a_verdict() -> None:
    """Only Ascend's runner is not a choice."""
    assert enum_values("layers/moe/utils.py", "MoeRunnerBackend") - engine_settings.TABLES[
        "moe_runner_backend"
    ].keys() == {"ascend"}


def test_expert_placement_settings_are_rejected() -> None:
    for name in engine_settings.PLACEMENTS:
        assert name in server_args.load_fields() and name not in engine_settings._ALLOWED


@pytest.mark.parametrize("setting", engine_settings.TABLES)
def test_check_follows_the_table(setting: str) -> None:
    for choice, verdict in engine_settings.TABLES[setting].items():
        if choice not in (server_args.load_fields()[setting].choices or (choice,)):
            continue
        if verdict.is_supported:
            engine_settings.check({setting: choice})
        else:
            with pytest.raises(ConfigError, match=f"rollout.sglang.{setting}={choice} may change"):
                engine_settings.check({setting: choice})
    assert engine_settings.supported_choices(setting) == tuple(
        name for name, verdict in engine_settings.TABLES[setting].items() if verdict.is_supported
    )


def test_error_gives_the_reason() -> None:
    with pytest.raises(ConfigError, match="has experts transposed; use one of triton, deep_gemm"):
        engine_settings.check({"moe_runner_backend": "triton_kernel"})


def test_blackwell_rejects_repacked_scales() -> None:
    sent = {"moe_a2a_backend": "deepep"}
    started = {**sent, **engine_settings.choose_runner(sent, blackwell=True)}
    with pytest.raises(ConfigError, match="moe_runner_backend=deep_gemm, which rollout.sglang.moe_a2a_backend=deepep"):
        engine_settings.check_blackwell(started, fp8=True)
    with pytest.raises(ConfigError, match="fp8_gemm_runner_backend=deep_gemm: with an FP8 checkpoint"):
        engine_settings.check_blackwell({"fp8_gemm_runner_backend": "deep_gemm"}, fp8=True)
    engine_settings.check_blackwell(started, fp8=False)
    engine_settings.check_blackwell(engine_settings.choose_runner({}, blackwell=True), fp8=True)


def test_sglang_marks_repacked_scales() -> None:
    """The refusal relies on this marker, and an engine's layout report would show it."""
    source = (server_args.sglang_folder() / "layers/quantization/fp8_utils.py").read_text()
    body = source[source.index("def requant_block_scale_ue8m0_for_deepgemm(") :]
    assert "weight_scale.format_ue8m0 = True" in body[: body.index("\ndef ", 1)]


LAYOUT_REPORTS = {
    ("triton_kernel", False): "transposed",
    ("flashinfer_cutlass", False): "the rows of up before those of gate",
    ("flashinfer_trtllm", False): "packs them into blocks",
    ("hpc_ops", True): "a copy of its scales",
}
"""Reports of SGLang's layers by (choice, is FP8), for layouts that shapes alone do not reveal."""


def test_sglang_keeps_supported_layouts_and_reports_the_rest() -> None:
    """Runs SGLang's post-load code as on Hopper and on Blackwell; see `post_load.py`."""
    choices = [*engine_settings.supported_choices("moe_runner_backend"), *(choice for choice, _ in LAYOUT_REPORTS)]
    path = os.pathsep.join([str(ROOT), str(ROOT / "megarl/cpu/stubs"), str(ROOT / "tests")])
    command = [sys.executable, "-W", "ignore", "tests/reshard/post_load.py", ",".join(choices)]
    environment = {**os.environ, "PYTHONPATH": path, **engine_settings.ENVIRONMENT}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    result = [json.loads(line) for line in lines]
    assert len(result) == 2 * 2 * (len(choices) + 2)
    for item in result:
        repacked = item["blackwell"] and item["fp8"] and item["choice"] == "deep_gemm"
        report = LAYOUT_REPORTS.get((item["choice"], item["fp8"]), "")
        assert report in "".join(item["odd"]) and bool(report) == bool(item["odd"]), item
        assert item["same"] == (item["choice"] != "triton_kernel" or item["fp8"]), item
        requirements = {"deep_gemm": repacked, "flashinfer": item["choice"] == "flashinfer_trtllm" and not item["fp8"]}
        assert item["error"] == next(
            (f"No module named {name!r}" for name, does in requirements.items() if does), ""
        ), item


@pytest.mark.parametrize(
    "model",
    ["qwen3_moe", "deepseek_v2", "glm4_moe", "gpt_oss", "qwen2_moe"]
    + ["minimax_m2", "glm4_moe_lite", "ernie4", "bailing_moe"],
)
def test_all_families_use_the_same_expert_layer(model: str) -> None:
    """A verdict on one family therefore holds for all. GLM-4.5 has its own file; Kimi K2 uses DeepSeek-V3's,
    and Qwen3-Next and Qwen3.5 use Qwen2-MoE's."""
    tree = ast.parse((server_args.sglang_folder() / f"models/{model}.py").read_text())
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert any("get_moe_impl_class" in call for call in calls)


def render_table() -> str:
    """Return the tables as in `README.md`."""
    lines = ["| setting | choice | BF16, FP32 | FP8 in blocks | why |", "|---|---|---|---|---|"]
    for setting, table in engine_settings.TABLES.items():
        by_verdict: dict[engine_settings.Verdict, list[str]] = {}
        for name, verdict in table.items():
            by_verdict.setdefault(verdict, []).append(name)
        for (is_supported, reason), names in by_verdict.items():
            word = "supported" if is_supported else "refused"
            lines.append(f"| {setting} | {', '.join(names)} | {word} | {word} | {reason} |")
    lines += [f"| {name} | any | refused | refused | {reason} |" for name, reason in engine_settings.PLACEMENTS.items()]
    return "\n".join(lines)


def test_readme_has_the_table() -> None:
    text = (ROOT / "megarl/reshard/README.md").read_text()
    begin, end = "<!-- runners: megarl/engine/sglang/engine_settings.py -->\n", "\n<!-- /runners -->"
    assert text[text.index(begin) + len(begin) : text.index(end)] == render_table()
