"""The CUDA requirements are consistent and available, checked without installing them.

The metadata of each pinned package is read from the index, a few KB of each wheel.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
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


Pages = dict[str, list[dict[str, object]] | None]


@pytest.fixture(scope="module")
def pages() -> Pages:
    """Return the index's files of each pinned package."""
    if not fetch_files("packaging"):
        pytest.skip(f"{INDEX} cannot be reached")
    pins = read_pins()
    with ThreadPoolExecutor(32) as pool:
        return dict(zip(pins, pool.map(fetch_files, pins), strict=True))


def test_all_pins_are_available(pages: Pages) -> None:
    """Each pin has a wheel for each Python, or a source distribution if built here, that is not yanked."""
    pins = read_pins()
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


class RemoteFile(io.RawIOBase):
    """A file on the index, read by HTTP range requests.

    The first request reads the last 128 KiB, where most wheels have their table of contents and metadata.
    """

    def __init__(self, url: str) -> None:
        self.url, self.position = url, 0
        self.tail, self.size = self.fetch("-131072")

    def fetch(self, span: str) -> tuple[bytes, int]:
        """Return the bytes of a range, and the size of the file."""
        request = urllib.request.Request(self.url, headers={"Range": f"bytes={span}"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            data: bytes = answer.read()
            total = answer.headers["Content-Range"]  # absent if the server sends the whole of a small file
            return data, int(total.rpartition("/")[2]) if total else len(data)

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.position = (0, self.position, self.size)[whence] + offset
        return self.position

    def read(self, size: int = -1) -> bytes:
        start, end = self.position, self.size if size < 0 else min(self.size, self.position + size)
        self.position = max(start, end)
        first = self.size - len(self.tail)
        if start >= first or start >= end:
            return self.tail[start - first : end - first]
        return self.fetch(f"{start}-{end - 1}")[0]


def read_metadata(url: str) -> Message:
    """Return the metadata of a wheel or a source distribution."""
    file = RemoteFile(url)
    if url.endswith(".whl"):
        with zipfile.ZipFile(file) as wheel:
            (name,) = [name for name in wheel.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
            return message_from_bytes(wheel.read(name))
    with tarfile.open(fileobj=io.BytesIO(file.read())) as source:
        (name,) = [name for name in source.getnames() if re.fullmatch(r"[^/]+/PKG-INFO", name)]
        member = source.extractfile(name)
        assert member is not None
        return message_from_bytes(member.read())


@pytest.fixture(scope="module")
def metadata(pages: Pages) -> dict[str, Message]:
    """Return the metadata of each pin, for the newest Python."""
    tags, pins = supported_tags(PYTHONS[-1]), read_pins()

    def read(name: str) -> Message:
        url = next(
            str(file["url"])
            for file in pages[name] or ()
            if is_installable(str(file["filename"]), name, pins[name], tags)
        )
        for _ in range(2):
            try:
                return read_metadata(url)
            except OSError:
                continue
        return read_metadata(url)

    if unanswered := [name for name, page in pages.items() if page is None]:
        pytest.skip(f"{INDEX} did not answer for {unanswered}")
    try:
        with ThreadPoolExecutor(32) as pool:
            return dict(zip(pins, pool.map(read, pins), strict=True))
    except OSError as error:
        pytest.skip(f"{INDEX} does not serve files: {error}")


def resolve(
    requirements: list[Requirement], metadata: Mapping[str, Message], python: tuple[int, int]
) -> tuple[set[str], list[str]]:
    """Return the packages that the requirements bring with these versions, and what disagrees."""
    version = "{}.{}".format(*python)
    environment = {**default_environment(), "python_version": version, "python_full_version": f"{version}.0"}
    environment |= {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"}
    pending, errors, visited = [("the list", line) for line in requirements], [], set()
    while pending:
        user, requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        if name not in metadata:
            errors.append(f"{user} requires {requirement}, which is not pinned")
            continue
        if not requirement.specifier.contains(metadata[name]["Version"], prereleases=True):
            errors.append(f"{user} requires {requirement}, not {metadata[name]['Version']}")
        for extra in {"", *requirement.extras} - {extra for package, extra in visited if package == name}:
            visited.add((name, extra))
            lines = map(Requirement, metadata[name].get_all("Requires-Dist", []))
            pending += [
                (name, line)
                for line in lines
                if not line.marker or line.marker.evaluate({**environment, "extra": extra})
            ]
        if f"{version}.99" not in SpecifierSet(metadata[name]["Requires-Python"] or ""):
            errors.append(f"{name} requires Python {metadata[name]['Requires-Python']}")
    return {name for name, _ in visited}, sorted(set(errors))


@pytest.mark.parametrize("python", PYTHONS)
def test_pins_are_what_the_packages_require(metadata: dict[str, Message], python: tuple[int, int]) -> None:
    """The list brings the pins, all of them and no others, and each package accepts the versions of the others."""
    packages, errors = resolve(read_requirements("requirements-cuda.txt"), metadata, python)
    expected = [f"{name} requires Python >=3.12" for name in ("emerging-optimizers", "megatron-core")]
    assert errors == (expected if python < (3, 12) else [])  # installed with --ignore-requires-python
    assert set(metadata) - packages == {"wheel"}  # for builds without isolation
    kernels = {"torch", "triton", "megatron-core", "transformer-engine", "transformer-engine-torch"}
    assert kernels | {"flashinfer-python", "sglang", "sglang-kernel"} <= packages


def test_detects_disagreements() -> None:
    def package(version: str, *requires: str, python: str = ">=3.8") -> Message:
        message = Message()
        message["Version"], message["Requires-Python"] = version, python
        for line in requires:
            message["Requires-Dist"] = line
        return message

    packages = {
        "a": package("1.0", "B>=2", "c; extra == 'x'", "d; python_version < '3.12'", "e; sys_platform == 'win32'"),
        "b": package("2.1", python=">=3.12"),
        "c": package("3.0", "a==1.1"),
    }
    assert resolve([Requirement("a")], packages, (3, 12)) == ({"a", "b"}, [])
    assert resolve([Requirement("a"), Requirement("a[x]==1.*")], packages, (3, 11)) == (
        {"a", "b", "c"},
        [
            'a requires d; python_version < "3.12", which is not pinned',
            "b requires Python >=3.12",
            "c requires a==1.1, not 1.0",
        ],
    )


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
