"""The list for CUDA, which nobody here can install: that it is complete, and that all of it can be had."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename
from packaging.version import Version

pytestmark = [pytest.mark.alone, pytest.mark.nightly]

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
INDEX = "https://pypi.org/simple"
GLIBC = 34
"""Minor version; sglang's wheel asks for 2.34."""
BUILT_HERE = {"transformer-engine-torch"}
"""What has no wheel, on purpose."""


def lines(name: str) -> list[Requirement]:
    text = (LAUNCH / name).read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in text if line and line[0] != "#"]


def pinned() -> dict[str, Version]:
    result = {}
    for line in lines("constraints-cuda.txt"):
        (only,) = line.specifier
        assert only.operator == "==" and canonicalize_name(line.name) not in result, line
        result[canonicalize_name(line.name)] = Version(only.version)
    return result


def tags() -> set[Tag]:
    """Of CPython 3.11 on x86-64 with that glibc."""
    linux = [f"manylinux_2_{minor}_x86_64" for minor in range(5, GLIBC + 1)]
    linux += [f"manylinux{year}_x86_64" for year in (1, 2010, 2014)] + ["linux_x86_64"]
    return {*cpython_tags((3, 11), platforms=linux), *compatible_tags((3, 11), "cp311", linux)}


def test_every_line_is_pinned_and_what_is_pinned_twice_is_so_alike() -> None:
    pins = pinned()
    for line in lines("requirements-cuda.txt"):
        assert pins.get(canonicalize_name(line.name), Version("0")) in line.specifier, line
    cpu = {canonicalize_name(line.name): line for line in lines("requirements-cpu.txt")}
    for name in ("megatron-core", "sglang", "transformers", "safetensors", "tenacity", "math-verify"):
        assert pins[name] in cpu[name].specifier, name


def files(name: str) -> list[dict[str, object]] | None:
    """What the index has of it; None where it cannot be reached."""
    accept = {"Accept": "application/vnd.pypi.simple.v1+json"}
    for _ in range(3):
        try:
            with urllib.request.urlopen(urllib.request.Request(f"{INDEX}/{name}/", headers=accept), timeout=20) as page:
                result: list[dict[str, object]] = json.load(page)["files"]
                return result
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return []
        except (OSError, ValueError):
            continue
    return None


def fits(file: str, name: str, version: Version, wanted: set[Tag]) -> bool:
    try:
        if file.endswith(".whl"):
            _, result, _, of = parse_wheel_filename(file)
            return result == version and name not in BUILT_HERE and not wanted.isdisjoint(of)
        return name in BUILT_HERE and parse_sdist_filename(file)[1] == version
    except ValueError:  # names of long ago
        return False


def test_all_of_it_can_be_had() -> None:
    """A wheel of each for this Python, or of what is built the source; not one that was withdrawn."""
    if not files("packaging"):
        pytest.skip(f"{INDEX} cannot be reached")
    pins, wanted = pinned(), tags()
    with ThreadPoolExecutor(16) as pool:
        pages = dict(zip(pins, pool.map(files, pins), strict=True))
    missing = [
        f"{name}=={version}"
        for name, version in pins.items()
        if (page := pages[name]) is not None
        and not any(not file.get("yanked") and fits(str(file["filename"]), name, version, wanted) for file in page)
    ]
    assert missing == [] and sum(page is not None for page in pages.values()) > len(pins) / 2


def test_what_cannot_be_had_would_be_found() -> None:
    wanted = tags()
    assert fits("torch-2.14.1-cp311-cp311-manylinux_2_28_x86_64.whl", "torch", Version("2.14.1"), wanted)
    assert fits("a-1.0-py3-none-any.whl", "a", Version("1.0"), wanted)
    for file in (
        "torch-2.14.0-cp311-cp311-manylinux_2_28_x86_64.whl",
        "torch-2.14.1-cp312-cp312-manylinux_2_28_x86_64.whl",
        "torch-2.14.1-cp311-cp311-manylinux_2_28_aarch64.whl",
        "torch-2.14.1-cp311-cp311-manylinux_2_39_x86_64.whl",
        "torch-2.14.1.tar.gz",
    ):
        assert not fits(file, "torch", Version("2.14.1"), wanted), file


def test_the_versions_that_are_named_elsewhere_are_the_lists() -> None:
    version = str(pinned()["transformer-engine"])
    setup = (LAUNCH.parent / "setup.py").read_text(encoding="utf-8")
    assert re.findall(r"transformer-engine\[[\w,]+\]==([\d.]+)", setup) == [version]
