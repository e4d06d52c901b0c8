"""The common style of all figures: sizes for 700 pixels, colours for the colour-blind, labels without markup.

Equal figures are saved as equal bytes.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.transforms import Bbox

from cadenza_loadtest.requests import LoadTestError

WIDTH = 7.0
"""In inches; 700 pixels at the 100 dots per inch of the layout."""

# `inline_svg` replaces these five by variables of the page, so that figures follow its light and dark modes.
PAPER = "#ffffff"
INK = "#24292f"
MUTED = "#5b636c"
GRID = "#dfe3e8"
SHADE = "#eef1f5"
FAILED = "#d55e00"

# Okabe and Ito, "Color Universal Design", https://jfly.uni-koeln.de/color/; without yellow, which is invisible on
# white, and in an order that keeps neighbours distinct. Vermillion comes late because failures use it.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", INK)
_STYLES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
_MARKERS = "osD^vPX"
_MAX_LABEL = 44

_RC = {
    "axes.axisbelow": True,
    "axes.edgecolor": MUTED,
    "axes.facecolor": PAPER,
    "axes.formatter.limits": (-5, 7),
    "axes.formatter.useoffset": False,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.labelsize": 9,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "figure.dpi": 100,
    "figure.facecolor": PAPER,
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "svg.fonttype": "path",
    "text.color": INK,
    # Labels are the user's text, which may have dollar signs.
    "text.parse_math": False,
    "xtick.color": MUTED,
    "xtick.labelcolor": INK,
    "xtick.labelsize": 8.5,
    "ytick.color": MUTED,
    "ytick.labelcolor": INK,
    "ytick.labelsize": 8.5,
}
_DPI = 200
_SALT = "cadenza"


@dataclass(frozen=True, slots=True)
class Look:
    """How every figure draws a series."""

    colour: str
    line: str | tuple[float, tuple[float, ...]]
    marker: str


@contextmanager
def styled() -> Iterator[None]:
    """Use only this style while figures are made or saved; also a decorator."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_RC)  # type: ignore[arg-type]
        yield


def look(index: int) -> Look:
    """The look of the series at this position, from 0: different colours first, then different dashes."""
    return Look(
        _COLOURS[index % len(_COLOURS)],
        _STYLES[index // len(_COLOURS) % len(_STYLES)],
        _MARKERS[(index + index // len(_COLOURS)) % len(_MARKERS)],
    )


def look_within(index: int, part: int) -> Look:
    """The look of a part of the series at this position: the series' colour with its own line style."""
    return Look(_COLOURS[index % len(_COLOURS)], _STYLES[part % len(_STYLES)], _MARKERS[part % len(_MARKERS)])


MOST_NAME = 28
"""Most characters of a file's name in a legend, which holds more than the name."""


@cache
def _charmap() -> Mapping[int, int]:
    charmap: Mapping[int, int] = get_font(findfont(FontProperties(family=["DejaVu Sans"]))).get_charmap()
    return charmap


def drawable(text: str, most: int = _MAX_LABEL) -> str:
    """The text as a label that can be drawn: one line of at most `most` characters, with a box for missing glyphs."""
    known = _charmap()
    text = " ".join(text.split())
    text = "".join(each if ord(each) in known else "□" for each in text)
    if len(text) > most:
        text = f"{text[: most // 2]}…{text[len(text) - (most - most // 2 - 1) :]}"
    # matplotlib drops labels that begin with an underscore from legends, with a warning.
    return f"\u200a{text}" if text.startswith("_") else text


def new_figure(title: str, rows: int = 1, columns: int = 1, height: float = 3.6) -> tuple[Figure, list[Axes]]:
    """A figure and its panels, row by row; `height` is in inches."""
    figure = Figure(
        figsize=(WIDTH, height), layout=ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.06, hspace=0.03, wspace=0.04)
    )
    FigureCanvasAgg(figure)
    if title:
        _put_title(figure, title)
    panels = figure.subplots(rows, columns, squeeze=False)
    return figure, [panels[row][column] for row in range(rows) for column in range(columns)]


def _put_title(figure: Figure, title: str) -> None:
    """Put as much of the title as fits on one line."""
    text = figure.suptitle("", x=0.012, ha="left", fontsize=11.5, fontweight="bold")
    for most in range(96, 16, -4):
        text.set_text(drawable(title, most))
        if _extent(figure, text).width <= 0.976 * figure.get_figwidth() * figure.dpi:
            return


def say(axes: Axes, sentence: str) -> None:
    """Put a sentence in place of a plot; the panel keeps its title."""
    axes.set_axis_off()
    axes.text(
        0.5,
        0.5,
        textwrap.fill(drawable(sentence, 200), 38),
        transform=axes.transAxes,
        ha="center",
        va="center",
        color=MUTED,
    )


def line_handle(label: str, colour: str = MUTED, **style: object) -> Line2D:
    """An entry of a legend."""
    return Line2D([], [], color=colour, label=drawable(label), **style)  # type: ignore[arg-type]


def put_legend(figure: Figure, handles: Sequence[Artist]) -> None:
    """Put all entries below the panels, in as many columns as fit; the figure grows by their height."""
    if not handles:
        return
    labels = [str(handle.get_label()) for handle in handles]
    room = figure.get_figwidth() * figure.dpi - 12
    for columns in range(min(len(handles), 6), 0, -1):
        legend = figure.legend(
            list(handles), labels, loc="outside lower center", ncols=columns, columnspacing=1.6, handlelength=2.2
        )
        if columns == 1 or _extent(figure, legend).width <= room:
            break
        legend.remove()
    figure.set_figheight(figure.get_figheight() + _extent(figure, legend).height / figure.dpi)


def put_panel_legend(axes: Axes, handles: Sequence[Artist]) -> None:
    """Put the legend of one panel to the right of its title."""
    if handles:
        axes.legend(
            handles=list(handles), loc="lower right", bbox_to_anchor=(1, 1), ncols=len(handles), borderaxespad=0.2,
            columnspacing=1.6, handlelength=2.2,
        )  # fmt: skip


def _extent(figure: Figure, artist: Artist) -> Bbox:
    canvas = figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    return artist.get_window_extent(canvas.get_renderer())  # type: ignore[no-untyped-call]


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
