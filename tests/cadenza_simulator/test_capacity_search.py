"""The search for capacities against systems of known capacity, in made-up time: budgets, trials, reports, Ctrl-C."""

from __future__ import annotations

import io
import math
from collections.abc import Callable

import numpy as np
import pytest
from rich.console import Console

from cadenza_cli.app import run
from cadenza_cli.load import simulate as command
from cadenza_cli.load.views import SearchView
from cadenza_loadtest.requests import LoadTestError
from cadenza_loadtest.schedule import make_schedule
from cadenza_loadtest.settings import LoadSettings, make_settings
from cadenza_simulator.capacity.capacity import Capacity
from cadenza_simulator.capacity.rate_trials import DEFAULT_BUDGET_S, RunAt, TimeBudget, TrialRunner, read_time_budget
from cadenza_simulator.capacity.search import TRIAL_S, CapacitySearch, TrialProgress
from cadenza_simulator.request_log import Watch
from cadenza_simulator.run import RunOutcome
from tests.helpers.loadtest.load_views import SilentView
from tests.helpers.loadtest.loadtest_runs import columns
from tests.helpers.loadtest.simulations import shape

REQUEST_S = 0.001
"""Real time in which a request is simulated."""


class MadeUpSystem:
    """Serves up to a rate in 0.1 s, and above it too late; simulating a request takes `REQUEST_S` on its clock."""

    def __init__(self, rate_each: float) -> None:
        self.now = 0.0
        self.lengths: list[tuple[int, float, int]] = []
        """Number of executors, rate, and requests simulated, of each run."""
        self._rate_each = rate_each

    def clock(self) -> float:
        return self.now

    def runs(self, *counts: int) -> dict[int, RunAt]:
        return {count: self._run_of(count) for count in counts}

    def _run_of(self, count: int) -> RunAt:
        def run(settings: LoadSettings, seed: int, watch: Watch | None) -> RunOutcome:
            rate, capacity = settings.request_rate, count * self._rate_each
            due_s = np.array([due for due, _ in make_schedule(settings, seed)])
            late_s = 0.1 if rate <= capacity or rate == math.inf else 9.0
            ended = False
            for index, due in enumerate(due_s.tolist()):
                self.now += REQUEST_S
                if watch is not None and watch.ended(shape(index, 1, 1), due, due + late_s, due + late_s, 1, ""):
                    ended, due_s = True, due_s[: index + 1]
                    break
            self.lengths.append((count, rate, len(due_s)))
            done = columns(due_s=due_s, first_s=due_s + late_s, last_s=due_s + late_s)
            lasting_s = len(due_s) / capacity if rate == math.inf else float(due_s[-1]) + late_s
            return RunOutcome(done, None, 1, lasting_s, 1, 0, ended)

        return run


def wanted(**given: object) -> LoadSettings:
    return make_settings({"find_max_rate": True, "slo": "ttft=1", "arrivals": "constant", **given})


def searched(
    system: MadeUpSystem, *counts: int, budget_s: float = math.inf, **given: object
) -> tuple[list[Capacity], SilentView]:
    view = SilentView()
    budget = TimeBudget(budget_s, system.clock)
    search = CapacitySearch(wanted(**given), system.runs(*counts), view, budget=budget)
    search.run()
    return search.capacities, view


@pytest.mark.long
@pytest.mark.slow
def test_without_a_budget_trials_are_long_and_few() -> None:
    system = MadeUpSystem(20.0)
    found, _ = searched(system, 1, 2, 4)
    for capacity in found:
        limit = 20.0 * capacity.num_executors
        assert capacity.complete
        assert capacity.trial_s == pytest.approx(TRIAL_S, rel=0.01)
        assert capacity.held <= limit < capacity.failed <= 1.02 * capacity.held * 1.001
    # A start from the rate of fewer executors needs few trials, and most simulated requests are in long ones.
    for count in (2, 4):
        assert len([each for each in system.lengths if each[0] == count]) <= 4
    assert len([each for each in system.lengths if each[2] >= 20 * TRIAL_S * 0.98]) <= 10


@pytest.mark.long
@pytest.mark.slow
def test_a_budget_shortens_the_trials_and_keeps_the_answer() -> None:
    system = MadeUpSystem(20.0)
    found, _ = searched(system, 1, 2, 4, budget_s=25.0)
    assert system.now <= 25.0
    assert system.now > 8.0, "a budget is used"
    for capacity in found:
        assert capacity.is_over
        assert not capacity.is_full_length
        assert capacity.trial_s < TRIAL_S / 2
        assert capacity.held <= 20.0 * capacity.num_executors < capacity.failed
    slow = MadeUpSystem(20.0)
    searched(slow, 1, 2, 4)
    assert slow.now > 3 * system.now


@pytest.mark.slow
@pytest.mark.parametrize("budget_s", [0.5, 2.0, 5.0, 12.0, 25.0])
def test_a_budget_is_kept_to_a_request(budget_s: float) -> None:
    """Also within a trial, and what is stated then is what was seen."""
    system = MadeUpSystem(47.0)
    found, view = searched(system, 1, 2, 4, budget_s=budget_s)
    assert system.now <= budget_s + 2 * REQUEST_S
    for capacity in found:
        limit = 47.0 * capacity.num_executors
        assert not capacity.complete
        assert capacity.held is None or capacity.held <= limit
        assert capacity.failed is None or capacity.failed > limit
        tried = {trial.rate for trial in capacity.trials}
        assert {rate for rate in (capacity.held, capacity.failed) if rate is not None} <= tried
    if budget_s <= 5:
        assert not found[-1].trials, "no time was left for the last number"
        assert view.said[-1] == f"the time budget of {budget_s:g} s is spent"


def test_a_trial_of_a_given_length_keeps_it() -> None:
    system = MadeUpSystem(47.0)
    (found,), _ = searched(system, 1, budget_s=60.0, num_requests=700)
    assert found.complete
    assert found.trial_s is None
    assert {trial.settings.num_requests for trial in found.trials} == {700}


def test_slow_executors_lose_nothing_by_a_budget() -> None:
    """At 2 requests a second, the fewest requests take longer than five minutes, in the pilot too."""
    (found,), _ = searched(MadeUpSystem(2.0), 1, budget_s=60.0)
    assert found.complete
    assert found.trial_s == pytest.approx(1000 / found.held)
    assert len({trial.rate for trial in found.trials}) == len(found.trials), "no rate is tried twice"


@pytest.mark.slow
def test_what_is_tried_is_reported() -> None:
    _, view = searched(MadeUpSystem(47.0), 1, 2, budget_s=60.0)
    numbers = [each.number for each in view.trials]
    assert numbers == sorted(numbers)
    assert {each.num_executors for each in view.trials} == {1, 2}
    assert all(each.number <= each.expected <= 30 for each in view.trials)
    assert all(0 <= each.done <= 1 for each in view.trials)
    assert all(0 <= each.left_s <= 60.0 - each.elapsed_s for each in view.trials)
    shares = {each.share for each in view.trials}
    assert {None, 1.0} <= shares
    held = next(each.number for each in reversed(view.trials) if each.done > 0.9)
    within = [each for each in view.trials if each.number == held]
    assert len(within) > 10
    assert [each.done for each in within] == sorted(each.done for each in within)
    assert within[-1].left_s < within[0].left_s


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (None, DEFAULT_BUDGET_S),
        ("90", 90),
        ("90s", 90),
        ("1.5m", 90),
        ("1h", 3600),
        ("0", math.inf),
        ("none", math.inf),
    ],
)
def test_time_budgets(text: str | None, seconds: float) -> None:
    assert read_time_budget(text) == seconds


@pytest.mark.parametrize("text", ["soon", "-3", "5 min", ""])
def test_what_is_no_time_budget_is_named(text: str) -> None:
    with pytest.raises(LoadTestError, match=f"--time-budget {text}"):
        read_time_budget(text)


def progress(**given: object) -> TrialProgress:
    values = {"num_executors": 2, "rate": 124.3, "number": 7, "expected": 12, "done": 0.43, "share": 0.996}
    return TrialProgress(**{**values, "elapsed_s": 20.0, "left_s": 33.2, **given})  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [80, 140])
def test_a_terminal_has_a_bar(width: int) -> None:
    out = io.StringIO()
    view = SearchView(Console(file=out, force_terminal=True, width=width, highlight=False))
    with view.searching():
        view.on_trial(progress(left_s=93.2))
        view.say("1 executor, 62 requests/s: holds")
    shown = out.getvalue()
    for text in (
        "2 executors, 124.3 requests/s, trial 7 of ~12",
        "99.6% in SLO, 1:34 left",
        "━",
        "cadenza: 1 executor, 62 requests/s: holds\n",
    ):
        assert text in shown


def test_elsewhere_there_is_a_line_at_intervals() -> None:
    out, now = io.StringIO(), [0.0]
    view = SearchView(Console(file=out, width=140), clock=lambda: now[0])
    with view.searching():
        for now[0] in (1.0, 9.0, 11.0, 12.0, 20.0, 22.0):
            view.on_trial(progress(num_executors=1, share=None))
    line = "cadenza: 1 executor, 124.3 requests/s, trial 7 of ~12: 43% done, 0:34 left\n"
    assert out.getvalue() == 2 * line


ARGUMENTS = ["simulate", "--input-len", "8", "--output-len", "2", "--find-max-rate", "--slo", "ttft=0.2"]


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Ctrl-C in the trial at this position, from 0."""

    def interrupt(at: int) -> None:
        real, tried = TrialRunner.trial, []

        def trial(self, settings, on_progress):
            tried.append(settings.request_rate)
            if len(tried) > at:
                raise KeyboardInterrupt
            return real(self, settings, on_progress)

        monkeypatch.setattr(TrialRunner, "trial", trial)

    return interrupt


@pytest.mark.slow
def test_ctrl_c_prints_what_was_found_and_marks_it(interrupted, capsys: pytest.CaptureFixture[str]) -> None:
    interrupted(3)
    assert run([*ARGUMENTS, "--num-requests", "60", "--executors", "1,2"]) == 130
    printed = capsys.readouterr()
    assert "Highest rate that holds the SLO, as far as the search came" in printed.out
    assert "! Ctrl-C ended the search early." in printed.out
    assert "not tried" in printed.out
    assert "trial" not in printed.out.replace("trial,", "")
    assert printed.err.count("cadenza: 1 executor, ") == 3


@pytest.mark.slow
def test_ctrl_c_before_the_first_result_prints_nothing(interrupted, capsys: pytest.CaptureFixture[str]) -> None:
    interrupted(0)
    assert run([*ARGUMENTS, "--num-requests", "60"]) == 130
    assert capsys.readouterr().out == ""


@pytest.mark.long
@pytest.mark.slow
def test_the_command_says_what_the_budget_did(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*ARGUMENTS, "--executors", "1,2", "--time-budget", "1s"]) in (0, 1)
    printed = capsys.readouterr().out
    assert "as far as the search came" in printed
    assert "! The time budget of 1 s ended the search early." in printed
    assert "--time-budget none searches without a limit" in printed
    assert run([*ARGUMENTS, "--num-requests", "60", "--time-budget", "none"]) == 0
    printed = capsys.readouterr().out
    assert "fails at" in printed
    assert "as far as" not in printed


@pytest.mark.slow
def test_a_budget_that_affords_no_trial_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*ARGUMENTS, "--time-budget", "0.001"]) == 1
    assert "--time-budget: 0.001 s ended before the first trial" in capsys.readouterr().err


def test_a_budget_is_for_a_search(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "--time-budget", "5"]) == 2
    assert "--time-budget limits a search: give --find-max-rate" in capsys.readouterr().err


def test_the_sentence_says_how_sure_the_rates_are() -> None:
    whole = Capacity(1, 9.0, 9.1, (), trial_s=300.0)
    short = Capacity(2, 18.0, 18.3, (), trial_s=54.0, is_full_length=False)
    shorter = Capacity(4, 36.0, 39.0, (), trial_s=20.0, is_over=False, is_full_length=False)
    titles = [command.capacity_table(each).title for each in ([whole], [whole, short], [short, shorter])]
    ends = ("SLO", "SLO, by short trials", "SLO, as far as the search came")
    assert titles == [f"Highest rate that holds the {end}" for end in ends]
    assert not command.search_sentence([whole], 45.0, interrupted=False).startswith("!")
    assert command.search_sentence([whole, short], 45.0, interrupted=False).splitlines() == [
        "! Trials have 54 s of arrivals in place of 300 s: the rates are less sure.",
        "The time budget is 45 s; --time-budget none searches without a limit.",
    ]
    assert command.search_sentence([short, shorter], math.inf, interrupted=True).splitlines() == [
        "! Ctrl-C ended the search early.",
        "! Trials have 20 s or more of arrivals in place of 300 s: the rates are less sure.",
    ]
