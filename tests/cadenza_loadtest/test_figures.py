"""Single figures: they show the measurements, of any shape."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.path import Path

from cadenza_loadtest.figures.changes import ratios
from cadenza_loadtest.figures.latency import Sample, latency_cdfs, latency_over_time
from cadenza_loadtest.figures.occupancy import occupancy
from cadenza_loadtest.figures.style import drawable, inline_svg, look, look_within, new_figure, styled
from cadenza_loadtest.figures.sweeps import Curve, over_swept, throughput_and_latency
from cadenza_loadtest.figures.thinning import binned, cdf_points, running
from cadenza_loadtest.measures.columns import StepColumns
from cadenza_loadtest.measures.uncertainty import Estimate
from cadenza_loadtest.results.comparison import Change, Interval


def sample(label: str, ttft_s: np.ndarray, **more: object) -> Sample:
    count = len(ttft_s)
    latencies = {"ttft_s": ttft_s, "tpot_s": ttft_s / 10, "e2e_s": ttft_s * 3, "itl_s": np.repeat(ttft_s / 10, 2)}
    given = {"due_s": np.arange(count, dtype=np.float64), "failed_due_s": np.zeros(0), **more}
    return Sample(label, latencies=latencies, **given)


def steps(count: int, **more: np.ndarray) -> StepColumns:
    ones = np.ones(count, np.int64)
    columns = {
        "executor": 0 * ones, "planned_s": np.arange(count) * 0.1, "applied_s": np.arange(count) * 0.1 + 0.05,
        "device_s": np.full(count, 0.04), "num_sequences": ones, "num_tokens": ones, "num_sampled": ones,
        "num_waiting": 0 * ones, "num_running": ones, "num_swapped": 0 * ones, "num_used_blocks": 50 * ones,
        "num_blocks": 100 * ones, "num_stored_tokens": 400 * ones, "num_preempted": 0 * ones, **more,
    }  # fmt: skip
    return StepColumns(**columns)


def names_of(figure: Figure) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def panel_names_of(figure: Figure) -> list[list[str]]:
    legends = [axes.get_legend() for axes in figure.axes]
    return [[text.get_text() for text in legend.get_texts()] if legend else [] for legend in legends]


@pytest.mark.parametrize("count", [1, 2, 499, 500, 501, 20_000])
def test_cdf_points_are_shares_of_no_greater_values(count: int) -> None:
    values = np.random.default_rng(count).lognormal(size=count)
    at, share = cdf_points(np.concatenate([values, [np.nan]]))
    assert len(at) <= 1000
    assert at[0] == values.min()
    assert at[-1] == values.max()
    assert share == pytest.approx((values[None] <= at[:, None]).mean(1))
    # Thinned, but by no more than a few thousandths, and at the ends by less.
    assert np.diff(share, prepend=0).max() <= max(1 / count, 0.0025)


def test_bins_keep_what_stands_out() -> None:
    rng = np.random.default_rng(1)
    times, values = rng.permutation(100_000) / 100, np.ones(100_000)
    values[[7, 5000]] = 99, np.nan
    bins = binned(times, values, 300)
    assert len(bins.at) == 300
    assert bins.high.max() == 99
    assert (bins.high > 1).sum() == 1
    assert bins.low.min() == 1


def test_running_quantiles_are_of_neighbours_in_time() -> None:
    rng = np.random.default_rng(2)
    order = rng.permutation(4000)
    found = running(order.astype(np.float64), order.astype(np.float64))
    assert found is not None
    assert (found.width, found.tail_percent) == (200, 99)
    assert found.median == pytest.approx(found.at)
    assert found.tail == pytest.approx(found.at + 0.49 * 199)
    assert running(np.arange(19.0), np.arange(19.0)) is None


def test_the_cdf_of_a_single_value_can_be_seen() -> None:
    figure = latency_cdfs([sample("one", np.array([0.2]))])
    (line,) = figure.axes[0].lines
    assert list(line.get_xdata()) == [200, 200]
    assert list(line.get_ydata()) == [0, 1]


def test_legends_name_only_what_is_drawn() -> None:
    empty, full = sample("empty", np.full(3, np.nan)), sample("full", np.linspace(0.1, 0.2, 30))
    assert names_of(latency_cdfs([empty, full, full], {"ttft_s": 500.0})) == ["full", "full"]
    assert names_of(latency_over_time(sample("few", np.array([0.1, 0.2])))) == ["request"]
    assert names_of(latency_over_time(empty)) == []
    assert names_of(latency_over_time(sample("s", np.full(30, 0.1), failed_due_s=np.array([4.0])))) == [
        "request", "median of 20 neighbours", "p90 of them", "failed (1)",
    ]  # fmt: skip


def test_each_panel_of_the_occupancy_names_what_it_shows() -> None:
    assert panel_names_of(occupancy(steps(5))) == [[], ["running"], ["in use"]]
    waiting = {"num_waiting": np.ones(5, np.int64), "num_preempted": np.arange(5)}
    assert panel_names_of(occupancy(steps(5, **waiting), block_size=16)) == [
        [], ["running", "waiting", "preemption (10)"], ["in use", "holds tokens"],
    ]  # fmt: skip


def test_requests_that_are_due_at_once_stand_side_by_side() -> None:
    at_once = sample("burst", np.linspace(0.1, 0.9, 40), due_s=np.zeros(40), window=(0.0, 0.0))
    figure = latency_over_time(at_once)
    for axes in figure.axes:
        assert list(axes.lines[0].get_xdata()) == list(range(1, 41))
        assert "due at 0 s" in axes.get_xlabel()


def test_what_holds_tokens_is_a_share_of_the_pool() -> None:
    figure = occupancy(steps(5), block_size=16)
    used, stored = (line.get_ydata() for line in figure.axes[2].lines)
    assert used == pytest.approx([50] * 5)
    assert stored == pytest.approx([100 * 400 / 1600] * 5)


def test_a_pool_of_unknown_size_is_reported_so() -> None:
    figure = occupancy(steps(5, num_blocks=np.zeros(5, np.int64)))
    assert not figure.axes[2].axison
    assert "not known" in figure.axes[2].texts[0].get_text()


def curve(label: str, at: list[float], width: float = 0.1) -> Curve:
    def estimate(value: float) -> Estimate:
        return Estimate(value=value, low=value * (1 - width), high=value * (1 + width), n=3, how="repetitions")

    names = [f"{name}_s.{mark}" for name in ("ttft", "tpot", "e2e") for mark in ("p50", "p99")]
    points = [
        {**{name: estimate(0.01 * (place + 1) * each) for place, name in enumerate(names)},
         "output_tokens_per_s": estimate(64 * each)}
        for each in at
    ]  # fmt: skip
    return Curve(label, [f"{each:g}" for each in at], points, "request-rate", at)


@pytest.mark.slow
@pytest.mark.parametrize("curves", [1, 3])
def test_names_of_points_are_clear_of_each_other_of_lines_and_of_edges(curves: int) -> None:
    """Each at the top of its point's bar."""
    figure = throughput_and_latency([curve(f"c{add}", [1, 2, 4, 7.8 + add, 7.9, 8], 0.3) for add in range(curves)])
    figure.canvas.draw()
    for axes in figure.axes:
        boxes, panel = [text.get_window_extent() for text in axes.texts], axes.get_window_extent()
        assert len(boxes) >= 3
        assert not any(a.overlaps(b) for place, a in enumerate(boxes) for b in boxes[:place])
        lines = [line for line in axes.lines if line.get_linestyle() != "None"]
        paths = [line.get_path().transformed(line.get_transform()) for line in lines]
        segments = [segment for bars in axes.collections for segment in bars.get_segments()]
        tops = [segment[:, 1].max() for segment in segments]
        paths += [Path(axes.transData.transform(segment)) for segment in segments]
        for text, box in zip(axes.texts, boxes, strict=True):
            top = axes.transData.transform((0, text.xy[1]))[1]
            assert box.y0 >= top
            assert min(abs(text.xy[1] - each) for each in tops) < 1e-9
            assert panel.x0 <= box.x0
            assert box.x1 <= panel.x1 + 2
            assert not any(path.intersects_bbox(box, filled=False) for path in paths)


def test_over_what_was_swept_if_that_is_one_number() -> None:
    figure = over_swept([curve("a", [1, 2, 4]), curve("b", [1, 2, 4])], {"ttft_s": 0.05})
    assert figure is not None
    assert [axes.get_ylabel() for axes in figure.axes] == ["TTFT, ms", "TPOT, ms", "E2E, ms", "output tokens/s"]
    assert figure.axes[0].get_xlabel() == "request rate, requests/s"
    assert list(figure.axes[3].lines[0].get_xdata()) == [1, 2, 4]
    top = max(line.get_ydata().max() for line in figure.axes[3].lines)
    assert figure.axes[3].get_ylim()[1] > 1.05 * top, "a mark at the edge would be cut"
    assert names_of(figure) == ["a", "b", "p50", "p99", "SLO"]
    assert over_swept([curve("a", [1, 2]), Curve("b", ["x"], [{}])]) is None


def test_a_change_is_shown_as_what_is_known_of_it() -> None:
    said = {
        "ttft_s.p50": ("lower", 0.5),
        "requests_per_s": ("lower", 0.9),
        "mean_concurrency": ("higher", 123.4),
        "e2e_s.p50": ("no difference shown", 1.0),
        "e2e_s.p99": ("not known", 2.0),
    }
    one = Estimate(value=1.0, n=1, how="single")
    changes = [
        Change(name, one, one, Interval(0.0), Interval(ratio), "none", verdict)
        for name, (verdict, ratio) in said.items()
    ]
    figure = ratios(changes, "after against before")
    assert names_of(figure) == ["better", "worse", "different", "no difference shown", "not known"]
    (axes,) = figure.axes
    marks = [line for line in axes.lines if line.get_marker() == "o"][::-1]
    legend = figure.legends[0].get_lines()
    assert [line.get_color() for line in marks] == [line.get_color() for line in legend]
    assert [line.get_markerfacecolor() == "none" for line in marks] == [False] * 4 + [True]
    assert [text.get_text() for text in axes.texts][::-1] == ["0.5", "0.9", "123", "1", "2"]
    assert names_of(ratios(changes[:1], "better alone")) == ["better"]


@styled()
def test_a_title_fits_in_its_line() -> None:
    for text in ("short", "W" * 200, "words " * 40):
        figure, _ = new_figure(text)
        box = figure._suptitle.get_window_extent(figure.canvas.get_renderer())
        assert box.x1 <= figure.bbox.x1
        assert figure.get_suptitle().startswith(text[:5])


def test_a_series_keeps_its_colour_and_its_parts_differ() -> None:
    parts = [look_within(1, part) for part in range(4)]
    assert {to_hex(part.colour) for part in parts} == {to_hex(look(1).colour)}
    assert len({part.line for part in parts}) == 4


def test_what_the_font_lacks_is_a_box() -> None:
    assert drawable("漢 a\n b") == "□ a b"
    assert len(drawable("x" * 99)) == 44


@pytest.mark.slow
def test_figures_in_a_page_have_its_colours() -> None:
    figure = latency_cdfs([sample("one", np.linspace(0.1, 0.2, 30))])
    svg = inline_svg(figure, "x")
    assert "#ffffff" not in svg
    assert "fill: var(--paper)" in svg
    assert "fill: var(--ink)" in svg
    assert "stroke: var(--line)" in svg
    assert look(0).colour in svg
