"""Saves figures as files and as parts of a page; equal figures give equal bytes."""

from __future__ import annotations

import io
import re
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from cadenza_loadtest.figures.style import GRID, INK, MUTED, PAPER, SHADE, styled
from cadenza_loadtest.requests import LoadTestError

_DPI = 200
_SALT = "cadenza"
_VARIABLES = {PAPER: "paper", INK: "ink", MUTED: "muted", GRID: "line", SHADE: "shade"}
"""CSS variables of the page by the colours that stand for them in a figure."""


@styled()
def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write NAME.png, at twice the 100 dots per inch of the layout, and NAME.svg; raises LoadTestError."""
    paths = [folder / f"{name}.{suffix}" for suffix in ("png", "svg")]
    matplotlib.rcParams["svg.hashsalt"] = _SALT
    for path in paths:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=_DPI, metadata={"Date": None} if path.suffix == ".svg" else None)
        except OSError as error:
            raise LoadTestError(f"{path}: cannot be written: {error.strerror or error}") from error
    return paths


@styled()
def inline_svg(figure: Figure, name: str) -> str:
    """An <svg> element for an HTML page: without prologue, full width, each id prefixed with `name` and a dot.

    Paper, text and axes use the page's CSS variables --paper, --ink, --muted, --line and --shade.
    """
    out = io.StringIO()
    matplotlib.rcParams["svg.hashsalt"] = f"{_SALT} {name}"
    figure.savefig(out, format="svg", dpi=_DPI, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = out.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    # A page has several figures, and references within a figure must stay within it.
    svg = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{name}.", svg)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(f": {colour}", f": var(--{variable})")
    # Coordinates with six decimals would be three quarters of the bytes.
    svg = re.sub(r' d="[^"]*"', lambda found: re.sub(r"(\.\d\d)\d+", r"\1", found[0]), svg)
    svg = re.sub(r' height="[0-9.]+pt"', "", svg, count=1)
    return re.sub(r'<svg ([^>]*?)width="[^"]*"', r'<svg \1width="100%"', svg, count=1)
