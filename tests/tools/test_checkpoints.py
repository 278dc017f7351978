"""`checkpoints`: listing, showing and converting checkpoints, without ranks.

`tests/checkpoint/test_other_layouts.py` converts what real ranks wrote and compares it with their export byte by byte;
here the checkpoints are assembled from tensors.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import resource
import runpy
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from model_folder import write_tokenizer, write_weights
from safetensors.torch import load_file
from torch.distributed.checkpoint import filesystem, metadata

from megarl.checkpoint import disk_space
from megarl.checkpoint.manifest import hash_file
from megarl.checkpoint.to_hf import convert
from megarl.config import load_config
from megarl.config.command_line import run_cli
from megarl.models.layout_algebra import shard
from megarl.models.registry import family_of, load_hf_config
from megarl.rollout.partial_rollouts import PartialRollout, write_groups
from megarl.types import Prompt

ROOT = Path(__file__).resolve().parents[2]
HF: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "torch_dtype": "float32",
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "vocab_size": 150,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
LLAMA = HF | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 24}
LLAMA |= {"hidden_size": 256, "intermediate_size": 1024, "head_dim": 64}


def make_weights(hf: dict[str, Any]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    table = family_of(hf).params(hf, 1)
    return {tensor.name: torch.randn(tensor.shape, generator=generator) for param in table for tensor in param.hf}


def make_run(folder: Path, hf: dict[str, Any], steps: tuple[int, ...] = (3,)) -> dict[str, torch.Tensor]:
    """Write a run with complete checkpoints, layers and experts stacked as Megatron does; return the HF tensors."""
    model = folder / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(hf))
    write_tokenizer(model, ("a", "b"))
    tensors, pieces = make_weights(hf), {}
    experts, layers = hf["num_experts"], hf["num_hidden_layers"]
    for param in family_of(hf).params(hf, 1):
        parts, total = param.megatron.split("."), shard(param, tensors, 1, 0)
        if parts[:2] != ["decoder", "layers"]:
            pieces[param.megatron] = (total.shape, {(0,) * total.dim(): total})
            continue
        name, position, sizes = ".".join((*parts[:2], *parts[3:])), (int(parts[2]),), (layers,)
        if param.expert is not None:
            name = name.replace(f"experts.{param.expert}.", "experts.experts.")
            position, sizes = (*position, param.expert), (*sizes, experts)
        _, result = pieces.setdefault(name, ((*sizes, *total.shape), {}))
        result[*position, *(0,) * total.dim()] = total[(None,) * len(position)]
    run = folder / "run"
    for step in steps:
        checkpoint = run / f"checkpoints/step_{step:06d}"
        write_pieces(checkpoint / "actor", pieces)
        (checkpoint / "host.json").write_text(json.dumps({"step": step, "loader": {"samples": 4 * step}}))
        (checkpoint / "rng_00000.pt").write_bytes(b"random states")
        seal(checkpoint, step)
    config = {"algorithm": "grpo", "model": {"path": str(model), "dtype": "float32"}, "data": {"train": ["t.jsonl"]}}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    return tensors


def write_pieces(folder: Path, tensors: dict[str, Any]) -> None:
    """Write a distributed checkpoint. tensors: {name: (shape, {offsets: piece})}."""
    folder.mkdir(parents=True)
    tensor_metadata: dict[str, Any] = {}
    storage: dict[metadata.MetadataIndex, Any] = {}
    with (folder / "__0_0.distcp").open("wb") as stream:
        for name, (shape, pieces) in tensors.items():
            chunks = []
            for offsets, chunk in pieces.items():
                start = stream.tell()
                torch.save(chunk.clone(), stream)
                position = torch.Size(offsets)
                chunks.append(metadata.ChunkStorageMetadata(position, chunk.shape))
                location = filesystem._StorageInfo("__0_0.distcp", start, stream.tell() - start)
                storage[metadata.MetadataIndex(name, position)] = location
            kind = metadata.TensorProperties(dtype=torch.float32)
            tensor_metadata[name] = metadata.TensorStorageMetadata(kind, torch.Size(shape), chunks)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata.Metadata(tensor_metadata, storage_data=storage)))


def seal(checkpoint: Path, step: int) -> None:
    files = [path for path in checkpoint.rglob("*") if path.is_file() and path.name != "manifest.json"]
    tree = {
        "step": step,
        "world_size": 4,
        "layout": [4, 2, 1, 1, 1, 4, 1],
        "config": "c" * 16,
        "code": "r" * 16,
        "files": {str(path.relative_to(checkpoint)): hash_file(path)._asdict() for path in files},
    }
    (checkpoint / "manifest.json").write_text(json.dumps(tree))


class Tool:
    """The program in this process; a call returns its output, or its one-line error."""

    def __init__(self, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.patch, self.capsys = patch, capsys
        self.program = runpy.run_path(str(ROOT / "tools/checkpoints.py"))

    def __call__(self, *arguments: str | Path, fails: bool = False) -> str:
        self.capsys.readouterr()
        self.patch.setattr(sys, "argv", ["checkpoints.py", *map(str, arguments)])
        status = run_cli(self.program["main"])
        output = self.capsys.readouterr()
        assert status == (2 if fails else 0), output
        if not fails:
            return output.out
        (line,) = [text for text in output.err.splitlines() if text.startswith("error: ")]
        assert "Traceback" not in output.err and output.out == ""
        return line


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tool:
    return Tool(monkeypatch, capsys)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    make_run(folder, HF, steps=(3, 12))
    return folder


@pytest.fixture
def run(source: Path, tmp_path: Path) -> Path:
    shutil.copytree(source / "run", tmp_path / "run")
    return tmp_path / "run"


def flip_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_list_describes_checkpoints_and_their_damage(tool: Tool, run: Path) -> None:
    (run / "checkpoints/step_000013.tmp/actor").mkdir(parents=True)
    (run / "checkpoints/latest").write_text("step_000012")
    first, second, third = tool("list", run).splitlines()
    for line, name in ((first, "step_000003"), (second, "step_000012")):
        assert line.startswith(f"{name}  whole  4 ranks; tp=2 ep=4  ")
        assert f"config {'c' * 16} code {'r' * 16}" in line and line.endswith("  actor") and " MB in " in line
    assert third.startswith("step_000013.tmp  DAMAGED: was never completed")
    flip_bit(run / "checkpoints/step_000012/rng_00000.pt")
    (run / "checkpoints/step_000003/host.json").unlink()
    rows = json.loads(tool("list", run, "--json"))
    assert [(row["step"], row["fault"]) for row in rows[:2]] == [(3, "host.json is missing"), (12, None)]
    rows = json.loads(tool("list", run, "--json", "--hash"))
    assert rows[1]["fault"] == "rng_00000.pt differs from its checksum"


def test_show_describes_the_content(tool: Tool, run: Path) -> None:
    newest = run / "checkpoints/step_000012"
    partial = PartialRollout.begin(Prompt("p", (), [1, 2]), seed=0)
    write_groups(newest / "partial_groups/engine_00000.bin", [(partial, partial), (partial,)])
    seal(newest, 12)
    text = tool("show", run)
    padding = 2 * (256 - HF["vocab_size"]) * HF["hidden_size"]  # embedding and output layer
    elements = sum(tensor.numel() for tensor in make_weights(HF).values()) + padding
    assert text.startswith(f"{newest}\n  step_000012  whole")
    assert f"{elements:,} elements in 12 tensors (float32); no optimizer" in text
    assert "3 conversations under way, in 2 groups, of 1 engines" in text
    assert "48 prompts handed out" in text and "states of 1 ranks" in text
    summary = json.loads(tool("show", run / "checkpoints/step_000003", "--json"))
    assert summary["step"] == 3 and summary["holds"] == ["actor"] and summary["fault"] is None


def test_converts_weights_exactly(tool: Tool, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    output = tool("convert", source / "run", out)
    assert output == f"{out}: the actor of {source}/run/checkpoints/step_000012\n"
    result, expected = load_file(out / "model.safetensors"), make_weights(HF)
    assert result.keys() == expected.keys()
    assert all(torch.equal(result[name], expected[name]) for name in expected)
    assert (out / "tokenizer.json").read_bytes() == (source / "model/tokenizer.json").read_bytes()
    assert json.loads((out / "config.json").read_text()) == HF
    # Another dtype by override; a copy elsewhere by --config.
    shutil.copytree(source / "run/checkpoints/step_000003", tmp_path / "copy")
    assert "config.yaml, the configuration" in tool("convert", tmp_path / "copy", tmp_path / "b", fails=True)
    config = ("--config", source / "run/config.yaml")
    tool("convert", tmp_path / "copy", tmp_path / "b", "model.dtype=bfloat16", *config)
    converted = load_file(tmp_path / "b/model.safetensors")
    assert all(torch.equal(converted[name], expected[name].bfloat16()) for name in expected)


def run_in_fork(work: Callable[[], int]) -> int:
    """Return the result of `work` run in a fork of this process."""
    reader, writer = os.pipe()
    if not (child := os.fork()):
        status = 1
        try:
            os.write(writer, str(work()).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as output:
        text = output.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return int(text)


def process_memory(kind: str) -> int:
    """Memory of this process in bytes: current (VmRSS) or peak (VmHWM)."""
    result = re.search(rf"{kind}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert result is not None
    return 1024 * int(result[1])


def test_conversion_memory_is_bounded_by_the_largest_tensor(source: Path, tmp_path: Path) -> None:
    """The model is five times the bound; measured in fresh forks."""

    def convert_run(folder: Path) -> None:
        config = load_config(folder / "run/config.yaml")
        table = family_of(hf := load_hf_config(config.model.path)).params(hf, 1)
        role, out = folder / "run/checkpoints/step_000003/actor", tmp_path / f"out_{hf['hidden_size']}"
        convert(role, out, config, Path(config.model.path), table)

    def measure() -> int:
        convert_run(source)  # a small model first, to load all modules
        Path("/proc/self/clear_refs").write_text("5")
        baseline = process_memory("VmRSS")
        convert_run(tmp_path)
        return process_memory("VmHWM") - baseline

    def count_differences() -> int:
        result, expected = load_file(tmp_path / "out_256/model.safetensors"), make_weights(LLAMA)
        return sum(not torch.equal(result[name], tensor) for name, tensor in expected.items())

    total = run_in_fork(lambda: sum(tensor.numel() * 4 for tensor in make_run(tmp_path, LLAMA).values()))
    largest_bytes = 2 * LLAMA["intermediate_size"] * LLAMA["hidden_size"] * 4  # gate and up, in fp32
    bound = 6 * largest_bytes  # see `to_hf.py`
    assert total > 5 * bound
    peak = run_in_fork(measure)
    print(f"held {peak:,} bytes of {total:,}; the bound is {bound:,}, the largest tensor {largest_bytes:,}")
    assert peak < bound
    assert run_in_fork(count_differences) == 0


class MaliciousPickle:
    """A malicious pickle."""

    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/never",)


def test_failed_conversion_prints_one_line_and_leaves_nothing(
    tool: Tool, run: Path, source: Path, tmp_path: Path
) -> None:
    newest, out = run / "checkpoints/step_000012", tmp_path / "out"
    (tmp_path / "there").mkdir()

    def convert_error(*arguments: str | Path) -> str:
        line = tool("convert", *arguments, fails=True)
        assert not out.exists() and not (tmp_path / "out.tmp").exists()
        return line

    assert "exists; name a folder that is not there yet" in convert_error(run, tmp_path / "there")
    assert "no folder" in convert_error(run, tmp_path / "a/b")
    assert "no folder" in convert_error(tmp_path / "nothing", out)
    assert "is neither a checkpoint (manifest.json is missing) nor a run folder" in convert_error(
        tmp_path / "there", out
    )
    assert "has no critic; it has actor" in convert_error(run, out, "--role", "critic")
    assert "no adapters (lora.rank=0)" in convert_error(run, out, "--adapter")
    assert "model.pth" in convert_error(run, out, "model.pth=x")
    other_folder = tmp_path / "other"
    other_folder.mkdir()
    (other_folder / "config.json").write_text(json.dumps(HF | {"num_hidden_layers": 3}))
    write_tokenizer(other_folder, ("a", "b"))
    write_weights(other_folder, HF | {"num_hidden_layers": 3})
    assert "has no decoder.layers.2." in convert_error(run, out, f"model.path={other_folder}")
    (other_folder / "config.json").write_text(json.dumps(HF | {"moe_intermediate_size": 12}))
    assert "has shape (16, 16), and the configuration's model has (24, 16)" in convert_error(
        run, out, f"model.path={other_folder}"
    )
    # A foreign pickle with a matching checksum; a damaged one; an incomplete checkpoint.
    (newest / "actor/.metadata").write_bytes(pickle.dumps(MaliciousPickle()))
    seal(newest, 12)
    assert "it requests posix.system, which no checkpoint table contains" in convert_error(newest, out)
    flip_bit(newest / "actor/.metadata")
    assert "is damaged: actor/.metadata differs from its checksum" in convert_error(newest, out)
    (newest / "actor/.metadata").unlink()
    (newest / "manifest.json").unlink()
    assert "is not a complete checkpoint: manifest.json is missing" in convert_error(newest, out)
    assert tool("convert", run, out).startswith(f"{out}: the actor of {run}/checkpoints/step_000003")


def test_full_disk_prints_one_line_and_leaves_nothing(tool: Tool, run: Path, tmp_path: Path) -> None:
    """A file size limit stands in for the full disk, after the free-space check passed."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
        line = tool("convert", run, tmp_path / "out", fails=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert "File too large" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_refuses_to_convert_without_free_space(
    tool: Tool, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_space, "free_bytes", lambda folder: 1000)
    assert "are needed, and 0.0 MB are free" in tool("convert", run, tmp_path / "out", fails=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
