"""MXFP4 folders of gpt-oss: their numbers, parts of their tensors, errors, and exports in bfloat16."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_models
import torch
from mxfp4_folder import MAGNITUDES, quantise_folder
from safetensors.torch import load_file, save_file

from megarl.config import ConfigError
from megarl.models.hf_folder import open_hf, save_hf
from megarl.models.layout_algebra import shard
from megarl.models.mxfp4 import dequantise
from megarl.models.registry import family_of, load_hf_config

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tiny_models.save(tiny_models.gpt_oss(), tmp_path_factory.mktemp("mxfp4") / "model")
    return folder, quantise_folder(folder)


def test_numbers_follow_the_specification() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    blocks = codes.view(1, 16, 16)
    scales = torch.tensor([[127, 128, 120, 127, 130, 1, 252, 255, *[127] * 8]], dtype=torch.uint8)
    actual = dequantise(blocks, scales, torch.float32)
    for byte in range(256):
        exponent = int(scales[0, byte // 16])
        for half, code in enumerate((byte & 15, byte >> 4)):
            number = float(actual[0, 2 * byte + half])
            if exponent == 255:
                assert number != number
            else:
                assert number == (-1) ** (code >> 3) * MAGNITUDES[code & 7] * 2.0 ** (exponent - 127)


def test_reads_every_tensor_and_any_part_of_it(source: tuple[Path, dict[str, torch.Tensor]]) -> None:
    folder, meaning = source
    hf, weights = load_hf_config(folder), open_hf(folder)
    weights.check(hf)
    assert set(weights.names()) == meaning.keys()
    for param in family_of(hf).params(hf, 2):
        tensors = {tensor.name: weights.get(tensor.name) for tensor in param.hf}
        for name, tensor in tensors.items():
            view = weights.view(name)
            expected = meaning[name] if view is None else meaning[view.name][view.expert]
            expected = expected.mT if view is not None and view.transposed else expected
            assert weights.shape(name) == tuple(tensor.shape) and torch.equal(tensor.float(), expected)
        for rank in range(2):
            if param.expert is None or "bias" not in param.megatron:
                assert torch.equal(weights.get_shard(param, 2, rank), shard(param, tensors, 2, rank))


def test_exports_stacks_in_bfloat16(source: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    folder, meaning = source
    hf, weights = load_hf_config(folder), open_hf(folder)
    names = [tensor.name for param in family_of(hf).params(hf, 1) for tensor in param.hf]
    save_hf(tmp_path / "export", ((name, weights.get(name)) for name in names), folder, torch.bfloat16)
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert exported.keys() == meaning.keys()
    assert all(torch.equal(tensor, meaning[name].bfloat16()) for name, tensor in exported.items())
    assert "quantization_config" not in json.loads((tmp_path / "export" / "config.json").read_text())
    open_hf(tmp_path / "export").check(load_hf_config(tmp_path / "export"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("no scales", r"down_proj_scales is missing: MXFP4 blocks mean nothing without their scales"),
        ("short scales", r"down_proj_blocks and its scales are not \[experts, rows, columns / 32, 16\]"),
        ("no promise", r"_blocks is MXFP4, but config.json has no such quantization_config"),
    ],
)
def test_refuses_incomplete_folders(
    damage: str, message: str, source: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    tensors = load_file(source[0] / "model.safetensors")
    hf = load_hf_config(source[0])
    name = "model.layers.0.mlp.experts.down_proj_scales"
    if damage == "no scales":
        del tensors[name]
    elif damage == "short scales":
        tensors[name] = tensors[name][:, :-1].contiguous()
    else:
        del hf["quantization_config"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(hf))
    with pytest.raises(ConfigError, match=message) as error:
        open_hf(tmp_path).check(hf)
    assert "\n" not in str(error.value)


def test_refuses_mxfp4_of_other_families_and_other_formats_of_gpt_oss(
    source: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    gpt_oss = load_hf_config(source[0])
    qwen = {**tiny_models.qwen2().config.to_dict(), "architectures": ["Qwen2ForCausalLM"]}
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    for hf, quantization in ((qwen, {"quant_method": "mxfp4"}), (gpt_oss, fp8)):
        changed = {**hf, "quantization_config": quantization}
        with pytest.raises(ConfigError, match=f"quant_method='{quantization['quant_method']}' is not implemented"):
            family_of(changed).check(changed)
    changed = {**gpt_oss, "quantization_config": {"quant_method": "mxfp4", "group_size": 16}}
    with pytest.raises(ConfigError, match="quant_method=mxfp4 and group_size is not implemented"):
        family_of(changed).check(changed)
