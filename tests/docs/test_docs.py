"""The documents agree with each other and with what is there: links, both READMEs, the map of the folders."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

_SKIPPED = {".venv", ".venv312", ".venv-clients", "node_modules", ".git", ".pytest_cache", ".hypothesis"}
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


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in _LINK.findall(_prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        goal = (page.parent / path).resolve() if path else page
        assert goal.exists(), f"{target} leads nowhere"
        assert not anchor or anchor in _anchors(goal), f"{target}: there is no such heading"


@pytest.mark.parametrize("name", ["README", "docs/quickstart"])
def test_the_chinese_page_has_the_same_content(name: str) -> None:
    """Same sections, programs, links, names in code and numbers, in the same order where order matters."""
    english, chinese = ROOT / f"{name}.md", ROOT / f"{name}.zh-CN.md"
    texts = [page.read_text(encoding="utf-8") for page in (english, chinese)]
    assert _BLOCK.findall(texts[0]) == _BLOCK.findall(texts[1])
    prose = [_prose(page).replace(".zh-CN.md", ".md") for page in (english, chinese)]
    for what, pattern in {
        "sections": r"^(#+) ",
        "code spans": r"`([^`\n]+)`",
        "table rows": r"^(\|)",
        "numbers": r"(?<![\w.])(\d[\d,.]*\d|\d)(?![\w])",
    }.items():
        left, right = (Counter(re.findall(pattern, text, re.M)) for text in prose)
        assert left == right, f"{what}: only in English {left - right}, only in Chinese {right - left}"
    links = [[target for target in _LINK.findall(text) if Path(target).name != english.name] for text in prose]
    assert links[0] == links[1]


def _lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_the_readme_is_short() -> None:
    assert all(_lines(ROOT / name) < 150 for name in ("README.md", "README.zh-CN.md"))


def test_the_map_names_every_folder_of_the_services() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    named = {name.rstrip("/") for row in rows for name in re.findall(r"`([^`]+)`", row) if name.endswith("/")}
    assert not [name for name in named if not (ROOT / name).is_dir()]
    folders = {path.parent for service in ("scheduler_svc", "executor_svc") for path in ROOT.glob(f"{service}/*/*.py")}
    assert {str(folder.relative_to(ROOT)) for folder in folders} <= named
    of_core = re.search(r"\| `scheduler_svc/core/` \|(.+)\|", text)
    assert of_core
    parts = {path.parent.name for path in ROOT.glob("scheduler_svc/core/*/*.py")}
    assert set(re.findall(r"`(\w+)`", of_core[1])) == parts


def test_the_evenings_reading_is_as_long_as_stated() -> None:
    """Ten files with their lines, the sum of these, and the lines of the core: each within a tenth of what is there."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    files = {name: int(lines) for name, lines in re.findall(r"`([\w/]+\.py)` \((\d+)\)", text)}
    assert len(files) == 10
    sums = re.search(r"about ([\d,]+) lines of plain Python.+?these ten files, ([\d,]+) lines", text, re.S)
    assert sums
    core, total = (int(number.replace(",", "")) for number in sums.groups())
    assert total == sum(files.values())
    assert sum(_lines(ROOT / name) for name in files) == pytest.approx(total, rel=0.1)
    assert sum(_lines(path) for path in ROOT.glob("scheduler_svc/core/**/*.py")) == pytest.approx(core, rel=0.1)


def test_the_way_of_a_parameter_names_what_is_there_and_enters_no_folder_twice() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.split("## The way of one parameter")[1].split("\n## ")[0]
    drawings = _BLOCK.findall(section)
    assert len(drawings) == 3
    for drawing in drawings:
        folders: list[Path] = []
        for indent, folder, file in re.findall(r"^( +)((?:[\w/]+(?=  ))?) +([\w/]+\.py)  ", drawing, re.M):
            if folder:
                folders.append(folders[-1] / folder if len(indent) > 1 and folders else ROOT / folder)
            assert (folders[-1] / file).is_file(), f"{folders[-1]}: no {file}"
        assert len(folders) >= 2
        assert len(set(folders)) == len(folders)


def test_the_files_named_for_extensions_exist() -> None:
    """NAME stands for a file that the reader makes."""
    text = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:executor_svc|scheduler_svc|client|protos|tests|docs)/[\w./-]+)`", text))
    assert len(named) > 25
    assert [path for path in sorted(named) if "NAME" not in path and not (ROOT / path).exists()] == []
