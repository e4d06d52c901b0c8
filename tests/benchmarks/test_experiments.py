"""The experiments: each runs in small, its result becomes a page and figures, and docs/experiments.md is up to date."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks.common.rows import BenchmarkError
from benchmarks.experiments import experiment as module
from benchmarks.experiments.__main__ import EXPERIMENTS, main
from benchmarks.experiments.experiment import (
    Experiment,
    ExperimentResult,
    Figure,
    Finding,
    RunSettings,
    Series,
    Table,
    load,
    policies,
    save,
)
from benchmarks.experiments.page import FIGURES, PAGE, draw, page_text, write_page
from benchmarks.experiments.simulated import Case, drawn, fixed, poisson, run, scheduler_config
from benchmarks.experiments.variance import Scale, growing_maxima
from cadenza_simulator.executor_profiles import ExecutorProfile, ProfileLimits
from executor_svc.simulated.costs import StepCosts
from tests.helpers.marks import short_and_long

SEED = 7
STEP_MS = ExecutorProfile(costs=StepCosts(step_us=1000), limits=ProfileLimits(max_num_seqs=4, max_model_len=64))
"""1 ms a step, whatever is in it, and 4 sequences."""
REPEATED = [each for each in EXPERIMENTS if each.name in ("4-sharing", "7-served-ratio")]
"""All run on one simulator: drawn arrivals, drawn lengths, shared prefixes and several sizes are in these."""
SIMULATED = [each for each in EXPERIMENTS if "simulate" in each.places]


SHORT = [each for each in SIMULATED if each.name in ("4-sharing", "5-chunked-prefill")]


@pytest.fixture(scope="module", params=short_and_long(SIMULATED, SHORT), ids=lambda each: each.name)
def ran(request: pytest.FixtureRequest) -> tuple[Experiment, ExperimentResult]:
    each: Experiment = request.param
    return each, each.run(RunSettings("simulate", SEED, quick=True))


@pytest.fixture
def results_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "results"
    monkeypatch.setattr(module, "RESULTS", folder)
    return folder


def a_result(figure: Figure) -> ExperimentResult:
    return ExperimentResult(
        experiment="1-one",
        place="simulate",
        seed=1,
        setup={"load": "none"},
        findings=[Finding(claim="it is so ([a](https://a.example))", held=False, evidence="2 against 1")],
        figures=[figure],
        tables=[Table(title="All:", columns=["a", "b"], rows=[["1", "2"]])],
    )


def one(result: ExperimentResult) -> Experiment:
    return Experiment(result.experiment, "One", "A hypothesis.", lambda settings: result, notes="Why.")


LINE = Figure(
    name="line",
    title="A line",
    x_label="rate (1/s)",
    y_label="latency (s)",
    series=[
        Series(label="a", x=[1.0, 2.0, 4.0], y=[1.0, None, 3.0], low=[0.5, None, 2.0], high=[1.5, None, 4.0]),
        Series(label="b", x=[1.0, 2.0], y=[2.0, 2.5]),
    ],
)


# --- each experiment, in small ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_result_says_what_was_found(ran: tuple[Experiment, ExperimentResult]) -> None:
    each, result = ran
    assert (result.experiment, result.place, result.seed) == (each.name, "simulate", SEED)
    assert ExperimentResult.model_validate_json(result.model_dump_json()) == result
    assert result.findings
    assert result.figures
    assert result.setup
    for finding in result.findings:
        assert re.search(r"\d", finding.evidence), f"no numbers: {finding.evidence}"
        assert "nan" not in finding.evidence
        assert "|" not in finding.claim + finding.evidence
    assert any("](https://" in text for text in (each.hypothesis, *(finding.claim for finding in result.findings)))
    for table in result.tables:
        assert {len(row) for row in table.rows} == {len(table.columns)}


@pytest.mark.slow
def test_its_figures_can_be_drawn(ran: tuple[Experiment, ExperimentResult], tmp_path: Path) -> None:
    _, result = ran
    names = [figure.name for figure in result.figures]
    assert len(set(names)) == len(names)
    for figure in result.figures:
        assert re.fullmatch("[A-Za-z0-9-]+", figure.name)
        assert all(len(each.x) == len(each.y) for each in figure.series)
        assert all(
            bound is None or len(bound) == len(each.y) for each in figure.series for bound in (each.low, each.high)
        )
        assert any(y is not None for each in figure.series for y in each.y)
        draw(figure, tmp_path / f"{figure.name}.svg")
        assert ElementTree.parse(tmp_path / f"{figure.name}.svg").getroot().tag.endswith("svg")


@pytest.mark.slow
@pytest.mark.parametrize("ran", short_and_long(REPEATED, REPEATED[:1]), indirect=True, ids=lambda each: each.name)
def test_the_same_seed_gives_the_same(ran: tuple[Experiment, ExperimentResult]) -> None:
    each, result = ran
    again = each.run(RunSettings("simulate", SEED, quick=True))
    changing = {"created", "wall_s"}
    assert again.model_dump(exclude=changing) == result.model_dump(exclude=changing)


# --- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page_text(EXPERIMENTS), "make experiments EXPERIMENTS_ARGS=--page"


def test_its_figures_are_there_and_no_others() -> None:
    shown = set(re.findall(r"\(figures/([^)]+)\)", PAGE.read_text(encoding="utf-8")))
    assert shown == {path.name for path in FIGURES.glob("experiment-*.svg")}


def test_every_experiment_has_a_result() -> None:
    """From the simulator, if it runs there."""
    for each in EXPERIMENTS:
        result = load(each.name, each.places[0])
        assert result is not None, each.name
        # Results that differ from the claims are explained.
        assert each.notes or all(finding.held for finding in result.findings), each.name


def test_names_are_numbered_in_order() -> None:
    assert [each.name.partition("-")[0] for each in EXPERIMENTS] == [str(1 + i) for i in range(len(EXPERIMENTS))]


def test_a_page_is_made_of_saved_results(results_folder: Path, tmp_path: Path) -> None:
    result = a_result(LINE)
    save(result)
    assert load("1-one", "simulate") == result
    page = write_page([one(result)], tmp_path / "page.md", tmp_path / "figures")
    text = page.read_text(encoding="utf-8")
    assert text == page_text([one(result)])
    for part in (
        "## 1. One",
        "A hypothesis.",
        "| it is so ([a](https://a.example)) | 2 against 1 | **does not hold** |",
    ):
        assert part in text
    for part in ("load: none. Seed 1", "| a | b |\n|---|---|\n| 1 | 2 |", "Why."):
        assert part in text
    assert (tmp_path / "figures" / "experiment-1-one-simulate-line.svg").exists()


def test_an_experiment_without_results_has_no_section(results_folder: Path) -> None:
    assert "One" not in page_text([one(a_result(LINE))])
    assert load("1-one", "cpu") is None


def test_an_unknown_experiment_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--only", "99"])
    assert "there is no experiment '99'" in capsys.readouterr().err


# --- figures ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kind": "step"},
        {"kind": "bar"},
        {"log_x": True, "log_y": True},
        {"series": [Series(label="alone", x=["a", "b"], y=[1.0, -2.0])]},
        {"kind": "bar", "series": [Series(label="alone", x=["a", "b"], y=[1.0, 2.0], low=[0.5, 1.0], high=[2.0, 2.0])]},
        {"series": [Series(label="nothing", x=[1.0, 2.0], y=[None, None])]},
        {"y_label": "a label of so many words that it does not fit beside the axis if it is not broken"},
    ],
)
def test_a_figure_is_drawn_the_same_each_time(changes: dict[str, object], tmp_path: Path) -> None:
    figure = LINE.model_copy(update=changes)
    paths = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for path in paths:
        draw(figure, path)
    first, second = (path.read_bytes() for path in paths)
    assert first == second
    draw(figure, tmp_path / "one.png")
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")


def test_a_figure_shows_its_values(tmp_path: Path) -> None:
    draw(LINE, tmp_path / "one.svg")
    higher = LINE.model_copy(update={"series": [Series(label="a", x=[1.0, 2.0, 4.0], y=[1.0, None, 3.5])]})
    draw(higher, tmp_path / "two.svg")
    assert (tmp_path / "one.svg").read_bytes() != (tmp_path / "two.svg").read_bytes()


# --- runs in virtual time ---------------------------------------------------------------------------------------------


def test_a_case_takes_as_long_as_its_steps() -> None:
    """Two batches of 4, each one step for the prompts and their first tokens, and 9 more."""
    ran = run(Case(STEP_MS, fixed([8] * 8, [10] * 8)))
    assert ran.duration_s == pytest.approx(20e-3, rel=0.02)
    assert ran.output_tokens_per_s == pytest.approx(80 / 20e-3, rel=0.02)
    assert ran.tokens_per_s == pytest.approx(144 / 20e-3, rel=0.02)


def test_a_static_batch_waits_for_its_longest() -> None:
    shapes = fixed([8] * 8, [2, 2, 2, 20] * 2)
    static = run(Case(STEP_MS, shapes, scheduler=policies(4)["static"]))
    continuous = run(Case(STEP_MS, shapes, scheduler=policies(4)["continuous, memory reserved"]))
    assert static.duration_s == pytest.approx(40e-3, abs=1.5e-3)  # a step between the batches
    assert continuous.duration_s < 0.7 * static.duration_s


def test_a_case_with_a_failed_request_has_no_numbers() -> None:
    with pytest.raises(BenchmarkError, match="INVALID_ARGUMENT"):
        run(Case(STEP_MS, fixed([100], [10])))  # over max_model_len
    with pytest.raises(BenchmarkError, match="RESOURCE_EXHAUSTED"):
        run(Case(STEP_MS, fixed([8] * 9, [10] * 9), scheduler={"max_queued_requests": 2}))


def test_the_environment_has_no_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CADENZA_MAX_NUM_SEQS", "1")
    assert scheduler_config({}).max_num_seqs is None
    assert scheduler_config({"max_num_seqs": 3}).max_num_seqs == 3


def test_loads_follow_from_the_seed() -> None:
    options = {"input_len": "uniform:1:512", "output_len": "exponential:128:1:1536"}
    assert drawn(options, 20, 1) == drawn(options, 20, 1) != drawn(options, 20, 2)
    times = poisson(4.0, 4000, 1)
    assert times == sorted(times)
    # The sum of 4,000 exponential gaps of mean 1/4: within 5 standard deviations, of 1/4 * sqrt(4,000) each.
    assert times[-1] == pytest.approx(1000, abs=5 * 15.8)
    assert fixed([1, 2], [3, 4], ["a", "b"])[1].kind == "b"


def test_growing_maxima_are_the_posts_loads() -> None:
    scale = Scale(512, 128, (32, 1536), 15_696, 100, range(2))
    loads: list[list[int]] = []

    def serve(policy: str, shapes: list, size: int) -> float:
        loads.append([shape.num_output_tokens for shape in shapes])
        return float(size)

    first, last = growing_maxima(scale, ["static", "continuous, paged"], serve)
    assert (first.num_reserved, last.num_reserved) == (15_696 // 544, 15_696 // 2048) == (28, 7)
    assert [len(load) for load in loads] == [112] * 4 + [105] * 4  # whole batches
    assert max(map(max, loads[:4])) <= 32
    assert max(map(max, loads[4:])) > 32
    assert loads[0] == loads[2] != loads[1]  # each policy the same, each seed another
    assert first.ratio("continuous, paged") == 1.0
    batches = np.array([loads[4], loads[5]]).reshape(-1, 7)
    assert last.longest_over_mean == pytest.approx(batches.max(axis=1).mean() / batches.mean())
    assert json.loads(json.dumps(first.cv)) < last.cv
