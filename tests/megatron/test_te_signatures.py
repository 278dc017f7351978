"""Transformer Engine has every name and keyword argument that Megatron-Core uses, by the source of both.

The version is that of launch/requirements-cuda.txt. No test machine has the two installed together.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest
from signatures import Caller, Sources, downloaded, missing

pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.find_spec("megatron.core")
assert SPEC is not None and SPEC.submodule_search_locations
MEGATRON = Path(SPEC.submodule_search_locations[0])
FILES = """extensions/transformer_engine.py extensions/transformer_engine_spec_provider.py fp8_utils.py fp4_utils.py
    optimizer/__init__.py optimizer/optimizer.py optimizer/distrib_optimizer.py optimizer/clip_grads.py
    transformer/transformer_config.py transformer/transformer_block.py transformer/transformer_layer.py
    transformer/multi_latent_attention.py transformer/mla_qk_norm_config.py transformer/mlp.py
    transformer/module.py transformer/cuda_graphs.py
    models/common/embeddings/rope_utils.py pipeline_parallel/fine_grained_activation_offload.py""".split()
TE = "transformer_engine.pytorch"
KNOWN_ABSENCES = {
    f"{TE}.attention._SplitAlongDim": "in a try; without it torch.split, for interleaved queries, keys and values",
    f"{TE}.attention.apply_rotary_pos_emb": "of versions before 2.3; the newer place is asked for first",
    f"{TE}.module.base.get_workspace": "in a try; without it torch computes the router's fp32 product",
    f"{TE}.cpp_extensions.cast_to_fp8": "of versions before 2.0",
    f"{TE}.Linear ub_split_ag ub_split_rs ub_atomic_gemm_ag ub_atomic_gemm_rs": "of versions before 1.5",
    f"{TE}.LayerNormLinear ub_split_ag ub_atomic_gemm_ag": "of versions before 1.5",
    "transformer_engine.common.recipe.DelayedScaling interval": "of versions before 1.8",
    "transformer_engine.common.recipe.DelayedScaling override_linear_precision": "given always: the recipe is refused "
    "by megarl/models/megatron_fields.py",
    f"{TE}.float8_tensor.Float8Tensor shape dtype requires_grad data fp8_scale_inv fp8_dtype quantizer": "its __new__ "
    "takes them, in C++'s stead",
    f"{TE}.fp8.FP8GlobalStateManager.add_fp8_tensors_to_global_buffer fp8_weights": "of versions before 1.6",
}
"""Absent names and arguments, and why they do no harm."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    requirements = (ROOT / "launch" / "requirements-cuda.txt").read_text(encoding="utf-8")
    (version,) = re.findall(r"^transformer-engine\[[\w,]+\]==([\d.]+)$", requirements, re.MULTILINE)
    folder = downloaded("transformer-engine", version, tmp_path_factory.mktemp("transformer_engine"))
    if folder is None:
        pytest.skip(f"no package index here has transformer-engine {version}, whose sources are read")
    return Sources(folder)


def known_absences() -> set[str]:
    names = set()
    for line in KNOWN_ABSENCES:
        name, *words = line.split()
        names |= {f"{name} {word}" for word in words} or {name}
    return names


def test_transformer_engine_has_what_megatron_uses(sources: Sources) -> None:
    result = {
        missing_name: f"{file}, {usage}"
        for file in FILES
        for missing_name, usage in missing(sources, Caller(MEGATRON / file, "transformer_engine"))
    }
    excused = {
        missing_name
        for missing_name in result
        for name in known_absences()
        if missing_name == name or missing_name.startswith(name + ".")
    }
    assert {missing_name: location for missing_name, location in result.items() if missing_name not in excused} == {}
    assert known_absences() <= result.keys(), "remove reasons that are no longer needed"


def test_parameter_names_match_the_model_tables(sources: Sources) -> None:
    """`megarl/models/` uses the parameter names of Megatron's modules, which are Transformer Engine's."""
    text = {name: ast.unparse(result.node) for name in ("LayerNormLinear", "GroupedLinear", "Linear", "RMSNorm")
            if (result := sources.dotted(f"{TE}.{name}")) is not None and result.node is not None}  # fmt: skip
    assert "self.layer_norm_weight" in text["LayerNormLinear"] or "'layer_norm_weight'" in text["LayerNormLinear"]
    assert re.search(r"register_parameter\(f'weight\{", text["GroupedLinear"])
    assert text.keys() >= {"Linear", "RMSNorm"}
