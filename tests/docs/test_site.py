"""The documentation site: hooks that adapt pages, navigation, and a strict build without dead links."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools/docs"))

import mkdocs_hooks as hooks  # noqa: E402
from pages import ROOT, commands, pages  # noqa: E402

from megarl.config import describe_keys  # noqa: E402
from megarl.config.recipes import RECIPES  # noqa: E402

pytestmark = pytest.mark.alone


def read_navigation() -> set[str]:
    """Return the paths of the pages in the navigation, with generated ones."""

    class Loader(yaml.SafeLoader):
        """Reads Python's tags, which only MkDocs needs, as None."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)
    config = type("Config", (), yaml.load((ROOT / "mkdocs.yml").read_text(), Loader))()

    def walk(item: Any) -> set[str]:
        if isinstance(item, dict | list):
            items = item.values() if isinstance(item, dict) else item
            return {page for entry in items for page in walk(entry)}
        return {item}

    return walk(hooks.on_config(config).nav)


def test_navigation_has_every_page() -> None:
    tree = {page.relative_to(ROOT).as_posix() for page in pages()}
    assert set(hooks.tree_pages()) == tree
    assert read_navigation() == tree | set(hooks.generated_pages())


def test_every_task_page_has_a_command() -> None:
    tasks = sorted((ROOT / "docs/tasks").glob("*.md"))
    assert len(tasks) == 7
    for page in [*tasks, *(ROOT / "docs/tutorials").glob("*.md")]:
        assert list(commands(page.read_text())), page


def test_reference_has_every_key_and_algorithm() -> None:
    generated = hooks.generated_pages()
    for key, _ in describe_keys():
        assert f"{{ #{key} }}" in generated[hooks.key_page(key)]
        assert f"#{key})" in generated["reference/keys/index.md"]
    assert all(f"| `{name}` |" in generated["reference/algorithms.md"] for name in RECIPES)


def test_api_modules_exist() -> None:
    for package, modules in hooks.API.items():
        for module in ("__init__", *modules):
            assert (ROOT / "megarl" / package.replace(".", "/") / f"{module.replace('.', '/')}.py").is_file(), module


def test_adapts_blocks() -> None:
    text = "Text\n- a\n- b\n  more\nText\n| a |\n|---|\n```python my.py\n- x\n```\n```yaml config\n| y |\n```\n"
    assert hooks.adapt_page(text, "docs/x.md").splitlines() == [
        *("Text", "", "- a", "- b", "  more", "Text", "", "| a |", "|---|"),
        *('```python title="my.py"', "- x", "```", "```yaml", "| y |", "```"),
    ]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("set `rollout.tp=2`", "set [`rollout.tp=2`](../reference/keys/rollout.md#rollout.tp)"),
        ("`rollout.none`, `kl`", "`rollout.none`, `kl`"),
        ("[`rollout.tp`](a.md)", "[`rollout.tp`](a.md)"),
        ("`docs/tuning.md`", "[`docs/tuning.md`](tuning.md)"),
        ("`rewards/SCORERS.md`", "[`rewards/SCORERS.md`](../megarl/rewards/SCORERS.md)"),
        ("`docs/evaluation.md`", "`docs/evaluation.md`"),
    ],
)
def test_links_names_of_keys_and_pages(line: str, expected: str) -> None:
    assert hooks.link_names(line, "docs/evaluation.md") == expected


class Document(HTMLParser):
    """Links, anchors, and what a page loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.anchors |= {value for name, value in attrs if name == "id" and value}
        target = attributes.get("href") or attributes.get("src")
        if target and tag == "a":
            self.links.add(target)
        elif target:
            self.loads.add(target)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly in the environment that MEGARL_DOCS names."""
    if not (environment := os.environ.get("MEGARL_DOCS")):
        pytest.skip("MEGARL_DOCS names no environment with the packages of the documentation site; .ci/run makes it")
    target = tmp_path_factory.mktemp("site") / "site"
    command = [f"{environment}/bin/python", "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=ROOT, env=variables | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=550
    )
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr[-4000:]
    return target


@cache
def read_documents(site: Path) -> dict[Path, Document]:
    return {page: Document(page.read_text(encoding="utf-8")) for page in site.rglob("*.html")}


def find_dead_links(site: Path) -> tuple[list[str], int]:
    """Return the links of a site whose file or anchor does not exist, and the number of links to its own files."""
    documents = read_documents(site)
    dead, checked = [], 0
    for page, document in documents.items():
        if page.name == "404.html":  # its links are absolute, because it is served anywhere
            continue
        for link in document.links | document.loads:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            checked += 1
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            target = target / "index.html" if target.is_dir() else target
            is_dead = not target.is_file()
            if not is_dead and parts.fragment and target in documents:
                is_dead = unquote(parts.fragment) not in documents[target].anchors
            if is_dead:
                dead.append(f"{page.relative_to(site)}: {link}")
    return sorted(dead), checked


def test_finds_dead_links(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="b.html#x">1</a><a href="b.html#y">2</a><img src="c.png"><a href="http://d">'
    )
    (tmp_path / "b.html").write_text('<p id="x"><a href="#x">3</a><a href="none.html">4</a>')
    assert find_dead_links(tmp_path) == (["a.html: b.html#y", "a.html: c.png", "b.html: none.html"], 5)


@pytest.mark.nightly
def test_built_links_and_anchors_exist(site: Path) -> None:
    dead, checked = find_dead_links(site)
    assert not dead, dead[:20]
    assert checked > 5000


@pytest.mark.nightly
def test_built_pages_load_nothing_from_other_hosts(site: Path) -> None:
    loads = {link for document in read_documents(site).values() for link in document.loads}
    assert len(loads) > 10 and not {link for link in loads if urlsplit(link).netloc}


@pytest.mark.nightly
def test_built_reference_has_keys_and_api(site: Path) -> None:
    documents = read_documents(site)
    for key, _ in describe_keys():
        assert key in documents[site / Path(hooks.key_page(key)).with_suffix(".html")].anchors, key
    types = documents[site / "reference/api/types.html"].anchors
    assert {"megarl.types.rollouts.Rollout", "megarl.types.batch.TrainBatch.loss_mask"} <= types
    for package, modules in hooks.API.items():
        anchors = documents[site / f"reference/api/{package.replace('.', '_')}.html"].anchors
        for module in modules:
            assert any(anchor.startswith(f"megarl.{package}.{module}.") for anchor in anchors), module


@pytest.mark.nightly
def test_built_site_is_searchable(site: Path) -> None:
    index = json.loads((site / "search/search_index.json").read_text())
    titles = [re.sub(r"<[^>]*>", "", item["title"]) for item in index["docs"]]
    assert "rollout.max_staleness" in titles and "A number game, from data to evaluation" in titles


@pytest.mark.nightly
def test_built_pages_show_code_lists_and_tables(site: Path) -> None:
    """No fence, list or table stays plain text."""
    for page in read_documents(site):
        text = re.sub(r"<(pre|code|script|style)\b.*?</\1>", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert not re.search(r"```|<p>\s*\||<p>[^<]*\n- |\{ #", text), page.relative_to(site)
