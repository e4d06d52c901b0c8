"""The prose of the pages in docs/ is wrapped at 120 columns, like code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

_WIDTH = 120
_OTHERS = ("log.md", "experiments.md")
"""A log of one paragraph a line, and a page that benchmarks make."""
_PAGES = [page for page in sorted(ROOT.glob("docs/*.md")) if page.name not in _OTHERS and ".zh-CN" not in page.name]
_WHOLE = re.compile(r"`[^`]+`|\]\([^)]+\)")
"""What no line break may divide: code spans, and the targets of links."""


def _prose(page: Path) -> list[str]:
    """Its lines without code blocks and tables."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    return [line for line in text.splitlines() if not line.startswith(("|", "    ", "<!--"))]


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.name)
def test_prose_is_wrapped_like_code(page: Path) -> None:
    too_long = [line for line in _prose(page) if len(line) > _WIDTH]
    assert not [line for line in too_long if max(map(len, _WHOLE.findall(line)), default=0) < _WIDTH // 2]
