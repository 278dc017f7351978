"""Hooks of MkDocs: collect the pages of the tree, adapt them, and generate the reference.

Pages stay where they are, beside the code that they describe, and are written for GitHub as well. The site has the same
tree, so links between pages work in both places. `mkdocs.yml` names this file under `hooks`.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from megarl.config import Config, describe_keys, describe_ranges, strict  # noqa: E402
from megarl.config.recipes import RECIPES  # noqa: E402

PAGE_URLS = {"docs/home.md": "index.html", "README.md": "readme.html"}
"""Pages whose address does not follow from their place in the tree."""
KEY_PAGES = "reference/keys"
API_PAGES = "reference/api"
TOP_LEVEL = "top_level"
"""Name of the page of the keys that are in no section."""

API: dict[str, tuple[str, ...]] = {
    "types": ("rollouts", "batch", "reward_values", "episodes", "requirements", "image_tokens", "prefixes", "comm"),
    "controllers": (
        *("controller", "generate", "mini_batches", "ppo", "grpo", "policy_gradient", "remax", "dapo", "pf_ppo", "sft"),
        *("reward_model", "dpo", "distill", "cross_tokenizer", "policies", "dialogue", "rollout_correction"),
    ),
    "algorithms": (
        *("advantages", "policy_losses", "losses", "preference_losses", "kl", "corrections", "token_spans"),
        "token_stats",
    ),
    "rewards": (
        *("functions", "arithmetic", "gsm8k", "math_dapo", "math_verify", "choice", "squad", "stated_answer"),
        *("format_reward", "language_consistency", "code.grading", "judge", "service", "sequence_classifier"),
        *("by_source", "composite"),
    ),
    "environments": (
        *("protocol", "tools", "schemas", "loading", "program", "mcp", "verifiers", "harbor"),
        *("ready.calculator", "ready.guess", "ready.python", "ready.search"),
    ),
    "engine": ("engine_protocol", "engine_backends"),
    "models": ("family", "layout_algebra", "blocks", "registry", "rotary", "gqa", "mixtral"),
    "reshard.plan": (
        *("layout", "cells", "assignment", "planner", "from_config", "bound", "cost_report", "expert_placement"),
        "adapters",
    ),
}
"""Modules of each package that a fork imports. MkDocs reads them by static analysis."""


@cache
def tree_pages() -> tuple[str, ...]:
    """Return the paths of all pages of the tree, sorted."""
    pages = []
    for folder, subfolders, files in os.walk(ROOT):
        subfolders[:] = [name for name in subfolders if name[0] != "." and name not in ("runs", "build")]
        pages += [Path(folder, name).relative_to(ROOT).as_posix() for name in files if name.endswith(".md")]
    return tuple(sorted(pages))


# --- hooks ---


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace `PAGES/*` in the navigation by the generated pages of that folder."""
    tree_pages.cache_clear()  # `mkdocs serve` builds again in the same process
    generated = generated_pages()

    def expand(item: Any) -> Any:
        if isinstance(item, Mapping):
            return {title: expand(value) for title, value in item.items()}
        if isinstance(item, list):
            items = [expand(entry) for entry in item]
            return [entry for value in items for entry in (value if isinstance(value, list) else [value])]
        if str(item).endswith("/*"):
            folder = str(item).removesuffix("*")
            return [page for page in generated if page.startswith(folder) and page != f"{folder}index.md"]
        return item

    config.nav = expand(config.nav)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return the pages of the tree, the files that they link, and the generated pages."""
    from mkdocs.structure.files import File, Files

    sources: dict[str, Path] = {}
    for page in tree_pages():
        sources[page] = ROOT / page
        for link in find_links((ROOT / page).read_text(encoding="utf-8")):
            target = posixpath.normpath(posixpath.join(posixpath.dirname(page), link.partition("#")[0]))
            if not target.startswith("..") and (ROOT / target).is_file():
                sources[target] = ROOT / target
    for asset in sorted((ROOT / "docs/assets").iterdir()):
        sources[f"docs/assets/{asset.name}"] = asset
    result = [file for file in files if file.src_dir != config.docs_dir]  # those of the theme
    result += [File.generated(config, uri, abs_src_path=str(path)) for uri, path in sources.items()]
    result += [File.generated(config, uri, content=text) for uri, text in generated_pages().items()]
    for file in result:
        if file.src_uri in PAGE_URLS:
            file.dest_uri = PAGE_URLS[file.src_uri]
            file.name = "index" if file.dest_uri == "index.html" else file.name
    return Files(result)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Adapt a page of the tree: what GitHub and Python-Markdown read differently, and links to pages and keys."""
    uri = page.file.src_uri
    # The drawing and the table need the width.
    page.meta["hide"] = {"docs/home.md": ["navigation", "toc"], f"{KEY_PAGES}/index.md": ["toc"]}.get(uri, [])
    return markdown if uri.startswith(f"{API_PAGES}/") else adapt_page(markdown, uri)


# --- pages of the tree ---

_FENCE = re.compile(r"(`{3,}|~{3,})\s*([\w+-]*)[ \t]*(.*)")
_LIST_ITEM = re.compile(r"([-*+]|\d+[.)]) ")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_SPAN = re.compile(r"(\[[^\]\n]*\]\([^)\n]*\))|(?<!`)`([^`\n]+)`(?!`)")


def split_fences(text: str) -> Iterator[tuple[Literal["prose", "opening", "code"], str]]:
    """Yield the kind and the text of each line of a page; `code` has the closing fence, too."""
    fence = ""
    for line in text.splitlines():
        if fence:
            yield "code", line
            fence = "" if line.strip() == fence else fence
        elif opened := _FENCE.match(line):
            yield "opening", line
            fence = opened[1]
        else:
            yield "prose", line


def find_links(text: str) -> list[str]:
    """Return the targets of a page's links to files of the tree."""
    prose = "\n".join(line for kind, line in split_fences(text) if kind == "prose")
    return [link for link in _LINK.findall(prose) if not re.match(r"[a-z]+:|#", link)]


def adapt_page(text: str, uri: str) -> str:
    """Adapt a page at `uri`, a path in the tree, to Python-Markdown, and link the pages and keys that it names."""
    result: list[str] = []
    is_in_list = False
    for kind, line in split_fences(text):
        if kind == "code":
            result.append(line)
            continue
        if kind == "opening":
            result.append(adapt_fence(line))
            continue
        is_item = bool(_LIST_ITEM.match(line))
        previous = result[-1] if result else ""
        # GitHub lets lists and tables interrupt a paragraph, Python-Markdown does not.
        is_new_block = (is_item and not is_in_list) or (line.startswith("|") and not previous.startswith("|"))
        if is_new_block and previous.strip():
            result.append("")
        is_in_list = is_item or (is_in_list and (not line.strip() or line.startswith(" ") or bool(previous.strip())))
        is_plain = line.startswith(("#", "    "))  # headings, and code by indentation
        result.append(line if is_plain else link_names(line, uri))
    return "\n".join(result) + "\n"


def adapt_fence(line: str) -> str:
    """Return the opening line of a block of code, with a file name after the language as its title."""
    match = _FENCE.match(line)
    assert match
    fence, language, title = match.groups()
    name = title.rpartition(" ")[2]
    return f'{fence}{language} title="{name}"' if "." in name else f"{fence}{language}"


def link_names(line: str, uri: str) -> str:
    """Link names of pages and of keys in backticks, outside of links."""

    def link(match: re.Match[str]) -> str:
        if match[1]:
            return match[0]
        target = find_target(match[2], uri)
        return f"[{match[0]}]({posixpath.relpath(target, posixpath.dirname(uri) or '.')})" if target else match[0]

    return _SPAN.sub(link, line)


def find_target(span: str, uri: str) -> str:
    """Return the page, with an anchor, that documents the page or key a span names; an empty string for others."""
    if re.fullmatch(r"[\w./]+\.md", span):
        folder = posixpath.dirname(uri)
        for base in (folder, "", "megarl"):
            target = posixpath.normpath(posixpath.join(base, span))
            if target in tree_pages() and target != uri:
                return target
    key = re.match(r"[a-z_]+(?:\.[a-z_0-9]+)+(?=$|[=:])", span)
    if key and key[0] in dict(describe_keys()):
        anchor = f"{key_page(key[0])}#{key[0]}"
        return "" if uri == key_page(key[0]) and "=" not in span and ":" not in span else anchor
    return ""


# --- reference ---


@cache
def generated_pages() -> dict[str, str]:
    """Return the text of each generated page by its path."""
    return key_pages() | api_pages() | {"reference/algorithms.md": recipe_page()}


def key_page(key: str) -> str:
    """Return the page that documents a key."""
    return f"{KEY_PAGES}/{key.split('.')[0] if '.' in key else TOP_LEVEL}.md"


def escape_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def format_default(value: Any) -> str:
    """Return a default as YAML writes it, on one line, and the beginning of a long one."""
    plain = json.loads(json.dumps(value))  # lists for tuples
    text = yaml.safe_dump(plain, default_flow_style=True, width=10_000).removesuffix("...\n")
    return textwrap.shorten(text, 100, placeholder=" ...")


def key_pages() -> dict[str, str]:
    """Return a page of all keys in one table, and one page for each section."""
    ranges, texts, summaries = (
        describe_ranges(),
        strict.collect_key_texts(Config),
        strict.collect_key_docs(Config),
    )
    index = [
        "# Configuration keys",
        "",
        "Every key with its default. A configuration sets some of them, and the command line overrides any:",
        "`.venv/bin/megarl train my.yaml rollout.temperature=0.9`. An algorithm changes some defaults:",
        "[recipes](../algorithms.md). The same list, in a terminal:",
        "",
        "```bash",
        ".venv/bin/megarl train --keys           # all keys",
        ".venv/bin/megarl train --keys kl reward # those whose names contain one of these words",
        "```",
        "",
        "| key | default | meaning |",
        "|---|---|---|",
    ]
    pages: dict[str, list[str]] = {}
    sections = {field.name: getattr(Config(), field.name) for field in fields(Config)}
    for name, default in describe_keys():
        page, value = key_page(name), format_default(default)
        section = name.split(".")[0] if "." in name else TOP_LEVEL
        if page not in pages:
            title = f"`{section}`" if is_dataclass(sections.get(section)) else "Outside of sections"
            pages[page] = [f"# {title}", ""]
        meaning = texts.get(name, "")
        pages[page] += [
            f"## `{name}` {{ #{name} }}",
            "",
            f"Default `{value}` · {ranges[name] or 'a list'}",
            "",
            meaning,
            "",
        ]
        link = f"{posixpath.basename(page)}#{name}"
        index.append(f"| [`{name}`]({link}) | `{escape_cell(value)}` | {escape_cell(summaries.get(name, ''))} |")
    return {f"{KEY_PAGES}/index.md": "\n".join(index) + "\n"} | {
        page: "\n".join(lines) + "\n" for page, lines in pages.items()
    }


def recipe_page() -> str:
    """Return the page of the algorithms: controllers, and the defaults that they change."""
    lines = [
        "# Algorithms by name",
        "",
        "`algorithm: NAME` selects a controller and defaults of keys; keys that you set override these. Papers and",
        "results are on the page of the [controllers](../megarl/controllers/README.md); how to add one is in",
        "[my algorithm](../docs/tasks/my_algorithm.md).",
        "",
        "```bash",
        ".venv/bin/megarl train configs/quickstart.yaml algorithm=grpo run.dir=runs/grpo --dry-run",
        "```",
        "",
        "| name | controller | defaults |",
        "|---|---|---|",
    ]
    for name, recipe in RECIPES.items():
        controller = recipe.controller if isinstance(recipe.controller, str) else recipe.controller.__name__
        defaults = "<br>".join(f"`{key}: {format_default(value)}`" for key, value in recipe.defaults.items())
        lines.append(f"| `{name}` | `{controller.rpartition(':')[2]}` | {defaults} |")
    return "\n".join(lines) + "\n"


def api_pages() -> dict[str, str]:
    """Return one page for each package, with directives of mkdocstrings."""
    pages = {}
    for package, modules in API.items():
        lines = [f"# megarl.{package}", "", f"::: megarl.{package}", "    options:", "      members: false", ""]
        for module in modules:
            lines += [f"## megarl.{package}.{module}", "", f"::: megarl.{package}.{module}", ""]
        pages[f"{API_PAGES}/{package.replace('.', '_')}.md"] = "\n".join(lines)
    return pages
