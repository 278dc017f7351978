"""`find_media_type` recognizes non-text message parts."""

from typing import Any

import pytest

from megarl.utils.text import find_media_type

pytestmark = pytest.mark.alone


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (
            [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}],
            "image_url",
        ),
        ([{"type": "image", "data": "AA", "mimeType": "image/png"}], "image"),
        ({"type": "image", "source": {"type": "base64", "data": "AA"}}, "image"),
        ([{"type": "input_audio", "input_audio": {}}], "input_audio"),
        ([{"type": "file", "file": {"file_id": "x"}}], "file"),
        ([{"type": "text", "text": "a"}], ""),
        ([{"type": "file", "name": "a.py"}, {"type": "image", "name": "b.png"}], ""),  # a listing
        ([[1], None, {"type": ["image"]}, {}], ""),
        ("image", ""),
        (None, ""),
    ],
)
def test_finds_media_parts_by_type(value: Any, kind: str) -> None:
    assert find_media_type(value) == kind
