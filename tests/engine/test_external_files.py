"""Weights for engines outside of a job in a shared folder: what arrives, what is removed, and what can go wrong."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
import torch

from megarl.config import ConfigError
from megarl.engine.external_files import WeightFiles, hash_data, read_file
from megarl.engine.external_server import check_weights_folder
from megarl.engine.external_wire import WireError

pytestmark = pytest.mark.alone


def random_bytes(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8)


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_data_arrive_and_files_are_removed(tmp_path: Path) -> None:
    folder, data, target = tmp_path / "new", random_bytes(1000), torch.zeros(1000, dtype=torch.uint8)
    files = WeightFiles(folder, "run-0-1")
    names = []
    for _ in range(2):
        names.append(files.store(data))
        read_file(str(folder), names[-1], target, hash_data(data))
        assert torch.equal(target, data) and list_names(folder) == [names[-1]]
        files.remove()
    assert names[0] != names[1] and list_names(folder) == []
    files.remove()


def test_removes_what_a_killed_rank_has_left(tmp_path: Path) -> None:
    left = WeightFiles(tmp_path, "run-0-1").store(random_bytes(8))
    of_others = [WeightFiles(tmp_path, "run-0-10").store(random_bytes(8)), "a file of the user"]
    (tmp_path / of_others[1]).touch()
    new = WeightFiles(tmp_path, "run-0-1", leftovers="run-0-1-").store(random_bytes(8))
    assert list_names(tmp_path) == sorted([new, *of_others]) and left != new
    WeightFiles(tmp_path, "run-0-1")
    assert list_names(tmp_path) == sorted([new, *of_others])


@pytest.mark.parametrize("fault", ["missing", "short", "long", "changed", "unreadable", "elsewhere"])
def test_a_bad_file_is_refused_in_one_line(tmp_path: Path, fault: str) -> None:
    data = random_bytes(64)
    name = WeightFiles(tmp_path, "run-0-0").store(data)
    path = tmp_path / name
    match fault:
        case "missing":
            path.unlink()
            text = (
                f"it does not find {path}: its rollout.external_weights_dir must be the folder that the run writes to"
            )
        case "short":
            os.truncate(path, 40)
            text = f"{path} has 40 of 64 bytes of weights"
        case "long":
            os.truncate(path, 65)
            text = f"{path} has more than 64 bytes of weights"
        case "changed":
            path.write_bytes(bytes([data[0] ^ 1, *data[1:]]))
            text = f"{path} does not have the hash of its order"
        case "unreadable":
            path.unlink()
            path.mkdir()
            text = f"it cannot read {path} (Is a directory), see rollout.external_weights_dir"
        case _:
            name = f"../{tmp_path.name}/{name}"
            text = f"{name!r} is no file name"
    with pytest.raises(WireError) as caught:
        read_file(str(tmp_path), name, torch.zeros(64, dtype=torch.uint8), hash_data(data))
    assert str(caught.value) == text


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WireError, match=r"the run cannot write \S*file/run-\S* \(Not a directory\), see roll"):
        WeightFiles(tmp_path / "file", "run").store(random_bytes(8))


def test_a_file_that_cannot_be_completed_is_named_and_removed(tmp_path: Path) -> None:
    """As on a full disk, but with a limit of this process."""
    files, limits = WeightFiles(tmp_path, "run"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(
            WireError, match=r"the run cannot write \S*/run-\S* \(File too large\), see rollout.external"
        ):
            files.store(random_bytes(2 << 20))
        files.remove()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list_names(tmp_path) == [] and files.store(random_bytes(2 << 20)) in list_names(tmp_path)


def test_the_engines_machine_must_see_the_folder(tmp_path: Path) -> None:
    check_weights_folder("")
    check_weights_folder(str(tmp_path))
    with pytest.raises(
        ConfigError, match="external_weights_dir=.*/new: there is no such folder on this machine; create it"
    ):
        check_weights_folder(str(tmp_path / "new"))
