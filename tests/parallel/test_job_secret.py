"""Messages between ranks are sealed with the job's secret, and forged ones are refused before they are unpickled."""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megarl.config import ConfigError
from megarl.parallel import job_secret
from megarl.parallel.job_secret import ForgedError, SealedPickle, seal, unseal

KEY = bytes(32)


@pytest.fixture(autouse=True)
def no_job_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in (job_secret.SECRET_ENV, "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "MEGARL_RESTARTED"):
        monkeypatch.delenv(name, raising=False)
    job_secret.job_key.cache_clear()
    yield
    job_secret.job_key.cache_clear()


class CreatesFolder:
    """Creates a folder when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


def test_unseal_refuses_forged_messages() -> None:
    sealed = seal(b"text", "note", KEY)
    assert unseal(sealed, "note", KEY) == b"text"
    forged = [b"", sealed[:20], sealed[:-1], sealed + b"x", bytes(32) + b"text", bytes([sealed[0] ^ 1]) + sealed[1:]]
    for item in forged:
        with pytest.raises(ForgedError, match="not sent by a rank of this job"):
            unseal(item, "note", KEY)
    with pytest.raises(ForgedError):
        unseal(sealed, "another note", KEY)
    with pytest.raises(ForgedError):
        unseal(sealed, "note", b"x" * 32)


def test_sealed_pickle_refuses_foreign_pickles(tmp_path: Path) -> None:
    pickles = SealedPickle("x", KEY)
    assert pickles.loads(pickles.dumps([1, "a"])) == [1, "a"]
    executed = pickle.dumps(CreatesFolder(tmp_path / "harm"))
    for item in (executed, bytes(32) + executed, seal(executed, "y", KEY)):
        with pytest.raises(ForgedError):
            pickles.loads(item)
    assert not (tmp_path / "harm").exists()
    assert pickles.PickleError is pickle.PickleError


def test_object_collectives_are_sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All object collectives of torch use these two functions."""
    torch_functions = vars(dist.distributed_c10d)
    for name in ("_pickler", "_unpickler"):
        monkeypatch.setitem(torch_functions, name, torch_functions[name])
    cpu, payload = "cpu", io.BytesIO()
    pickle.Pickler(payload).dump(CreatesFolder(tmp_path / "harm"))
    job_secret.seal_object_collectives(KEY)
    data, size = torch_functions["_object_to_tensor"]({"a": 1}, cpu, None)
    assert torch_functions["_tensor_to_object"](data, size, None) == {"a": 1}
    data[40] += 1
    with pytest.raises(ForgedError):
        torch_functions["_tensor_to_object"](data, size, None)
    import torch

    forged = torch.frombuffer(bytearray(payload.getvalue()), dtype=torch.uint8)
    with pytest.raises(ForgedError):
        torch_functions["_tensor_to_object"](forged, torch.tensor(len(forged)), None)
    assert not (tmp_path / "harm").exists()


def test_key_depends_on_environment_secret_and_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv(job_secret.SECRET_ENV, "a" * 32)
    keys = [job_secret.job_key()]
    for name, text in (("MEGARL_RESTARTED", "1"), ("MASTER_PORT", "5"), (job_secret.SECRET_ENV, "b" * 32)):
        monkeypatch.setenv(name, text)
        job_secret.job_key.cache_clear()
        keys.append(job_secret.job_key())
    assert len({*keys, job_secret.launcher_key()}) == 5 and all(len(key) == 32 for key in keys)
    monkeypatch.setenv(job_secret.SECRET_ENV, "short")
    job_secret.job_key.cache_clear()
    with pytest.raises(ConfigError, match="MEGARL_SECRET has 5 characters: set it to 16"):
        job_secret.job_key()


def test_default_secret_is_private_to_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    file = tmp_path / "state/megarl/secret"
    key = job_secret.job_key()
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in file.parent.iterdir()] == ["secret"]
    job_secret.job_key.cache_clear()
    assert job_secret.job_key() == key
    file.chmod(0o644)
    job_secret.job_key.cache_clear()
    with pytest.raises(ConfigError, match="secret can be read by others, or is not yours: remove it"):
        job_secret.job_key()
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    with pytest.raises(ConfigError, match="cannot be read or written .*: set MEGARL_SECRET to the same"):
        job_secret.job_key()


def test_single_rank_needs_no_secret_file(tmp_path: Path) -> None:
    assert len(job_secret.job_key()) == 32
    assert not (tmp_path / "state").exists()
    assert sys.modules["megarl.parallel.job_secret"] is job_secret
