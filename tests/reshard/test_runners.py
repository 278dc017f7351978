"""Each of SGLang's choices about experts and types is decided: supported, or refused with a reason."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.config import ConfigError, foreign_dataclasses, server_args
from megarl.reshard.plan import engine_settings

pytestmark = [pytest.mark.alone, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
CHOICES = foreign_dataclasses.parse_constants(
    ast.parse((server_args.sglang_folder() / "arg_groups/choices.py").read_text())
)


def members(file: str, name: str) -> set[str]:
    """The values of an enumeration in SGLang's source."""
    tree = ast.parse((server_args.sglang_folder() / file).read_text())
    (result,) = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)
    values = [node.value for node in result.body if isinstance(node, ast.Assign)]
    return {str(value.value) for value in values if isinstance(value, ast.Constant)}


def undecided(choices: set[str], setting: str) -> set[str]:
    """Choices without a verdict, and verdicts on what is no choice."""
    return choices ^ engine_settings.TABLES[setting].keys()


@pytest.mark.parametrize(
    ("setting", "constant"),
    [
        ("moe_runner_backend", "MOE_RUNNER_BACKEND_CHOICES"),
        ("quantization", "QUANTIZATION_CHOICES"),
        ("fp8_gemm_runner_backend", "FP8_GEMM_RUNNER_BACKEND_CHOICES"),
    ],
)
def test_every_choice_that_sglang_lists_is_decided(setting: str, constant: str) -> None:
    assert not undecided(set(CHOICES[constant]), setting)
    assert undecided({*CHOICES[constant], "new_in_a_later_one"}, setting) == {"new_in_a_later_one"}


def test_every_way_to_send_tokens_is_decided() -> None:
    assert not undecided(members("layers/moe/utils.py", "MoeA2ABackend"), "moe_a2a_backend")
    assert (
        set(server_args.load_fields()["moe_a2a_backend"].choices or ())
        <= engine_settings.TABLES["moe_a2a_backend"].keys()
    )


def test_what_the_layers_know_beside_the_settings_is_decided() -> None:
    """Ascend's alone cannot be chosen."""
    assert members("layers/moe/utils.py", "MoeRunnerBackend") - engine_settings.TABLES["moe_runner_backend"].keys() == {
        "ascend"
    }


def test_where_experts_are_is_refused() -> None:
    for name in engine_settings.PLACEMENTS:
        assert name in server_args.load_fields() and name not in engine_settings._ALLOWED


@pytest.mark.parametrize("setting", engine_settings.TABLES)
def test_the_start_check_reads_the_table(setting: str) -> None:
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


def test_a_refusal_says_why() -> None:
    with pytest.raises(ConfigError, match="has experts transposed; use one of triton, deep_gemm"):
        engine_settings.check({"moe_runner_backend": "triton_kernel"})


def test_on_blackwell_scales_that_are_repacked_are_refused() -> None:
    sent = {"moe_a2a_backend": "deepep"}
    started = {**sent, **engine_settings.choose_runner(sent, blackwell=True)}
    with pytest.raises(ConfigError, match="moe_runner_backend=deep_gemm, which rollout.sglang.moe_a2a_backend=deepep"):
        engine_settings.check_blackwell(started, fp8=True)
    with pytest.raises(ConfigError, match="fp8_gemm_runner_backend=deep_gemm: with an FP8 checkpoint"):
        engine_settings.check_blackwell({"fp8_gemm_runner_backend": "deep_gemm"}, fp8=True)
    engine_settings.check_blackwell(started, fp8=False)
    engine_settings.check_blackwell(engine_settings.choose_runner({}, blackwell=True), fp8=True)


def test_sglang_repacks_scales_there_and_marks_them() -> None:
    """What the refusal rests on, and what an engine that did it by itself would say of its layers."""
    source = (server_args.sglang_folder() / "layers/quantization/fp8_utils.py").read_text()
    body = source[source.index("def requant_block_scale_ue8m0_for_deepgemm(") :]
    assert "weight_scale.format_ue8m0 = True" in body[: body.index("\ndef ", 1)]


HIDDEN_BY = {
    ("triton_kernel", False): "transposed",
    ("flashinfer_cutlass", False): "the rows of up before those of gate",
    ("flashinfer_trtllm", False): "packs them into blocks",
    ("hpc_ops", True): "a copy of its scales",
}
"""What SGLang's own layers say, by choice and whether in FP8, that a shape does not show or not alone."""


def test_sglang_leaves_in_place_what_is_carried_and_marks_the_rest() -> None:
    """Its own code, that runs when weights are loaded, as on Hopper and on Blackwell; see `post_load.py`."""
    choices = [*engine_settings.supported_choices("moe_runner_backend"), *(choice for choice, _ in HIDDEN_BY)]
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
        said = HIDDEN_BY.get((item["choice"], item["fp8"]), "")
        assert said in "".join(item["odd"]) and bool(said) == bool(item["odd"]), item
        assert item["same"] == (item["choice"] != "triton_kernel" or item["fp8"]), item
        needs = {"deep_gemm": repacked, "flashinfer": item["choice"] == "flashinfer_trtllm" and not item["fp8"]}
        assert item["error"] == next((f"No module named {name!r}" for name, does in needs.items() if does), ""), item


@pytest.mark.parametrize("model", ["qwen3_moe", "deepseek_v2", "glm4_moe"])
def test_the_experts_of_every_family_are_the_same_kind_of_layer(model: str) -> None:
    """So what is true of one of these is true of all; GLM-4.5's file is its own, Kimi K2 is DeepSeek-V3 by name."""
    tree = ast.parse((server_args.sglang_folder() / f"models/{model}.py").read_text())
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert any("get_moe_impl_class" in call for call in calls)


def as_markdown() -> str:
    """The tables as `README.md` has them."""
    lines = ["| setting | choice | BF16, FP32 | FP8 in blocks | why |", "|---|---|---|---|---|"]
    for setting, table in engine_settings.TABLES.items():
        by_verdict: dict[engine_settings.Verdict, list[str]] = {}
        for name, verdict in table.items():
            by_verdict.setdefault(verdict, []).append(name)
        for (is_supported, why), names in by_verdict.items():
            word = "supported" if is_supported else "refused"
            lines.append(f"| {setting} | {', '.join(names)} | {word} | {word} | {why} |")
    lines += [f"| {name} | any | refused | refused | {why} |" for name, why in engine_settings.PLACEMENTS.items()]
    return "\n".join(lines)


def test_the_readme_has_the_table() -> None:
    text = (ROOT / "megarl/reshard/README.md").read_text()
    begin, end = "<!-- runners: megarl/reshard/plan/engine_settings.py -->\n", "\n<!-- /runners -->"
    assert text[text.index(begin) + len(begin) : text.index(end)] == as_markdown()
