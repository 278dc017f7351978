"""The exact names that the CPU shim patches, so that a new one is a deliberate decision."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

EXPECTED = {
    "torch.cuda.current_device",
    "torch.cuda.synchronize",
    "torch.cuda.Stream",
    "torch.cuda.current_stream",
    "torch.cuda.stream",
    "torch.cuda.get_rng_state",
    "torch.cuda.manual_seed",
    "torch.cuda.random.get_rng_state",
    "torch.tensor",
    "torch.zeros",
    "torch.empty",
    "torch.Tensor.cuda",
    "torch.Tensor.type",
    "megatron.core.distributed.fsdp.src.megatron_fsdp.megatron_fsdp.torch",
    "megatron.core.jit.jit_fuser",
    "megatron.core.tensor_parallel.mappings._gather_along_first_dim",
    "megatron.core.tensor_parallel.mappings._reduce_scatter_along_first_dim",
    "megatron.core.tensor_parallel.random._set_cuda_rng_state",
    "megatron.core.tensor_parallel.random.CheckpointWithoutOutput.__init__",
    "megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu",
    "megatron.core.optimizer.cpu_offloading.hybrid_optimizer.HybridDeviceOptimizer.__init__",
    "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer._set_main_param_and_optimizer_states",
}


def test_patches_exactly_the_listed_names(units: dict[str, Any]) -> None:
    patched = units["platform"]["patched"]
    assert set(patched) == EXPECTED
    assert all(patched.values()), "every patch says why"


def test_second_install_has_no_effect(units: dict[str, Any]) -> None:
    assert units["platform"]["second_install"] is False
    assert units["platform"]["unchanged"] is True


def test_shim_is_not_installed_on_cuda(run_ranks: Any) -> None:
    result = run_ranks(1, "tests/megatron/ranks_no_shim.py", fresh=True)[0]
    assert result == {"installed": False, "patched": 0, "torch_is_untouched": True}


def test_megatron_core_imports_without_wandb_and_warnings(tmp_path: Path) -> None:
    """wandb creates folders on import, so Megatron-Core must not import it on every rank. It stays importable."""
    (tmp_path / "wandb.py").write_text("import tempfile\nMEDIA = tempfile.mkdtemp()\n")
    (tmp_path / "tmp").mkdir()
    code = (
        "import os, sys; import megarl.megatron.trainer_model\n"
        "assert 'wandb' not in sys.modules and not os.listdir(os.environ['TMPDIR']), os.listdir(os.environ['TMPDIR'])\n"
        "import wandb; assert wandb.MEDIA.startswith(os.environ['TMPDIR'])"
    )
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).resolve().parents[2])])
    environment = dict(os.environ, PYTHONPATH=path, TMPDIR=str(tmp_path / "tmp"))
    environment |= {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
