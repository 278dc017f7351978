"""The CUDA requirements are consistent and available, checked without installing them."""

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
"""Minor version of glibc; the wheel of sglang needs 2.34."""
PYTHONS = ((3, 11), (3, 12))
BUILT_FROM_SOURCE = {"transformer-engine-torch"}
"""Packages without a wheel, on purpose."""


def read_requirements(name: str) -> list[Requirement]:
    text = (LAUNCH / name).read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in text if line and line[0] != "#"]


def read_pins() -> dict[str, Version]:
    result = {}
    for line in read_requirements("constraints-cuda.txt"):
        (specifier,) = line.specifier
        assert specifier.operator == "==" and canonicalize_name(line.name) not in result, line
        result[canonicalize_name(line.name)] = Version(specifier.version)
    return result


def supported_tags(python: tuple[int, int]) -> set[Tag]:
    """Return the wheel tags of this CPython on x86-64 with this glibc."""
    linux = [f"manylinux_2_{minor}_x86_64" for minor in range(5, GLIBC + 1)]
    linux += [f"manylinux{year}_x86_64" for year in (1, 2010, 2014)] + ["linux_x86_64"]
    return {*cpython_tags(python, platforms=linux), *compatible_tags(python, "cp{}{}".format(*python), linux)}


def test_pins_every_requirement_consistently() -> None:
    pins = read_pins()
    for line in read_requirements("requirements-cuda.txt"):
        assert pins.get(canonicalize_name(line.name), Version("0")) in line.specifier, line
    cpu = {canonicalize_name(line.name): line for line in read_requirements("requirements-cpu.txt")}
    for name in ("megatron-core", "sglang", "transformers", "safetensors", "tenacity", "math-verify"):
        assert pins[name] in cpu[name].specifier, name


def fetch_files(name: str) -> list[dict[str, object]] | None:
    """Return the files of a package on the index, or None if the index is unreachable."""
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


def is_installable(file: str, name: str, version: Version, tags: set[Tag]) -> bool:
    try:
        if file.endswith(".whl"):
            _, result, _, wheel_tags = parse_wheel_filename(file)
            return result == version and name not in BUILT_FROM_SOURCE and not tags.isdisjoint(wheel_tags)
        return name in BUILT_FROM_SOURCE and parse_sdist_filename(file)[1] == version
    except ValueError:  # file names of old formats
        return False


def test_all_pins_are_available() -> None:
    """Each pin has a wheel for each Python, or a source distribution if built here, that is not yanked."""
    if not fetch_files("packaging"):
        pytest.skip(f"{INDEX} cannot be reached")
    pins = read_pins()
    with ThreadPoolExecutor(16) as pool:
        pages = dict(zip(pins, pool.map(fetch_files, pins), strict=True))
    missing = [
        f"{name}=={version} for {python}"
        for python in PYTHONS
        for tags in [supported_tags(python)]
        for name, version in pins.items()
        if (page := pages[name]) is not None
        and not any(
            not file.get("yanked") and is_installable(str(file["filename"]), name, version, tags) for file in page
        )
    ]
    assert missing == [] and sum(page is not None for page in pages.values()) > len(pins) / 2


def test_detects_incompatible_files() -> None:
    tags = supported_tags((3, 11))
    assert is_installable("torch-2.14.1-cp311-cp311-manylinux_2_28_x86_64.whl", "torch", Version("2.14.1"), tags)
    assert is_installable("a-1.0-py3-none-any.whl", "a", Version("1.0"), tags)
    wheel = "torch-2.14.1-cp312-cp312-manylinux_2_28_x86_64.whl"
    assert is_installable(wheel, "torch", Version("2.14.1"), supported_tags((3, 12)))
    for file in (
        "torch-2.14.0-cp311-cp311-manylinux_2_28_x86_64.whl",
        "torch-2.14.1-cp312-cp312-manylinux_2_28_x86_64.whl",
        "torch-2.14.1-cp311-cp311-manylinux_2_28_aarch64.whl",
        "torch-2.14.1-cp311-cp311-manylinux_2_39_x86_64.whl",
        "torch-2.14.1.tar.gz",
    ):
        assert not is_installable(file, "torch", Version("2.14.1"), tags), file


def test_setup_py_agrees_with_the_pins() -> None:
    version = str(read_pins()["transformer-engine"])
    setup = (LAUNCH.parent / "setup.py").read_text(encoding="utf-8")
    assert re.findall(r"transformer-engine\[[\w,]+\]==([\d.]+)", setup) == [version]
