"""Full-text search for questions about a corpus; the reward is `megarl.rewards.squad:exact_match`, or another."""

from __future__ import annotations

import json
import re
import sqlite3
from functools import cache
from pathlib import Path

MAX_RESULTS = 10
MAX_CHARS = 1000
"""Characters of a document."""


class Search:
    """BM25 (sqlite's FTS5) over a JSONL file of {"title", "text"}. A prompt's column `corpus` or a subclass names it:
    `class LabSearch(Search): corpus = "docs.jsonl"`."""

    corpus = ""

    def reset(self, corpus: str = "") -> None:
        if not (corpus or self.corpus):
            raise ValueError("no corpus: give each prompt a column `corpus`, or define one in a class of your own")
        self._index = build_index(corpus or self.corpus)

    def search(self, query: str, count: int = 3) -> str:
        """Find documents by words that stand in them; the best first.

        Args:
            query: words, in any order
            count: how many documents to show
        """
        words = re.findall(r"\w+", query)
        if not words:
            raise ValueError("the query has no word")
        query = " OR ".join(f'"{word}"' for word in words)
        rows = self._index.execute(
            "SELECT title, text FROM documents WHERE documents MATCH ? ORDER BY bm25(documents), rowid LIMIT ?",
            (query, max(1, min(count, MAX_RESULTS))),
        )
        return "\n".join(f"{title}: {text[:MAX_CHARS]}" for title, text in rows) or "nothing found"


@cache
def build_index(corpus: str) -> sqlite3.Connection:
    """Index a corpus, once per process. Raises OSError, and ValueError for a line that is not a document."""
    index = sqlite3.connect(":memory:")
    index.execute("CREATE VIRTUAL TABLE documents USING fts5(title, text, tokenize='porter')")
    with Path(corpus).open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                document = json.loads(line)
                row = (str(document.get("title", "")), str(document["text"]))
            except (ValueError, LookupError, AttributeError, TypeError) as error:
                raise ValueError(f"{corpus}, line {number}, is not a document with a `text`: {error!r}") from None
            index.execute("INSERT INTO documents VALUES (?, ?)", row)
    return index
