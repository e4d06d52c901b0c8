"""The documents agree with each other and with what is there: links, pages made from code, both READMEs."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

_SKIPPED = {".venv", ".venv312", "node_modules", ".git", ".pytest_cache", ".hypothesis"}
PAGES = sorted(p for p in ROOT.rglob("*.md") if not _SKIPPED & set(p.relative_to(ROOT).parts))
_BLOCK = re.compile(r"^```.*?^```$", re.S | re.M)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def _prose(page: Path) -> str:
    """The page without its code blocks."""
    return _BLOCK.sub("", page.read_text(encoding="utf-8"))


def _anchors(page: Path) -> set[str]:
    """The anchors of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", _prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", text).lower()).replace(" ", "-") for text in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in _LINK.findall(_prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        goal = (page.parent / path).resolve() if path else page
        assert goal.exists(), f"{target} leads nowhere"
        assert not anchor or anchor in _anchors(goal), f"{target}: there is no such heading"


def test_the_chinese_readme_has_the_same_content() -> None:
    """Same sections, programs, links, names in code and numbers, in the same order where order matters."""
    english, chinese = ROOT / "README.md", ROOT / "README.zh-CN.md"
    texts = [page.read_text(encoding="utf-8") for page in (english, chinese)]
    assert _BLOCK.findall(texts[0]) == _BLOCK.findall(texts[1])
    prose = [_prose(page) for page in (english, chinese)]
    for what, pattern in {
        "sections": r"^(#+) ",
        "code spans": r"`([^`\n]+)`",
        "table rows": r"^(\|)",
        "numbers": r"(?<![\w.])(\d[\d,.]*\d|\d)(?![\w])",
    }.items():
        left, right = (Counter(re.findall(pattern, text, re.M)) for text in prose)
        assert left == right, f"{what}: only in English {left - right}, only in Chinese {right - left}"
    links = [[target for target in _LINK.findall(text) if not target.startswith("README")] for text in prose]
    assert links[0] == links[1]
