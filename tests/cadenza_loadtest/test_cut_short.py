"""Load tests and simulations that end early: measurements until then are kept, and the early end is stated."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cadenza.errors import CadenzaError, UnavailableError
from cadenza_cli.load.results import check_whole, show
from cadenza_loadtest import campaign
from cadenza_loadtest.reports.report import write_report
from cadenza_loadtest.results.comparison import compare
from cadenza_loadtest.results.results import CTRL_C, LoadTestFile
from cadenza_loadtest.settings import make_settings
from cadenza_simulator import campaign as simulation
from cadenza_simulator.options import make_simulated
from tests.helpers.loadtest.driver_target import CampaignTarget
from tests.helpers.loadtest.load_views import SilentView
from tests.helpers.loadtest.loadtest_runs import made_up_file

pytestmark = pytest.mark.slow


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> CampaignTarget:
    made = CampaignTarget()
    monkeypatch.setattr(campaign, "make_target", lambda *_: made)
    return made


async def measured(warm_up: int = 0, **given: object) -> LoadTestFile:
    base = {"url": "http://fake", "num_requests": 3, "warm_up_requests": warm_up}
    return await campaign.run_campaign(make_settings(base | given), "http://fake", SilentView())


async def interrupted(target: CampaignTarget, **given: object) -> LoadTestFile:
    """By Ctrl-C, when the run hangs."""
    task = asyncio.create_task(measured(**given))
    await target.hanging.wait()
    task.cancel()
    return await task


async def test_ctrl_c_keeps_all_points_and_begins_no_other(target) -> None:
    target.hangs_in = 1
    file = await interrupted(target, sweep=("output-len=4,5,6",))
    assert [point.swept["output_len"] for point in file.points] == ["4", "5"]
    assert [run.requests.error.tolist() for point in file.points for run in point.runs] == [[""] * 3, ["CANCELLED"] * 3]
    assert file.cut_short == CTRL_C


async def test_ctrl_c_in_the_warm_up_ends_the_command(target) -> None:
    target.hangs_in = 0
    with pytest.raises(asyncio.CancelledError):
        await interrupted(target, warm_up=2)
    assert target.num_runs == 1


async def test_a_server_that_goes_between_points_takes_none_with_it(target) -> None:
    target.gone_before = 2
    file = await measured(sweep=("output-len=4,5,6",))
    assert [point.swept["output_len"] for point in file.points] == ["4", "5"]
    assert file.cut_short == "the server has gone"


async def test_a_server_that_goes_between_repetitions_takes_none_with_it(target) -> None:
    target.gone_before = 1
    file = await measured(repetitions=3)
    assert [len(point.runs) for point in file.points] == [1]
    assert file.cut_short


async def test_a_search_that_is_cut_short_says_what_it_has_found(target) -> None:
    target.gone_before = 1
    file = await measured(find_max_rate=True, slo="ttft=9", request_rate=200)
    assert file.max_rate is not None
    assert (file.max_rate.held, file.max_rate.failed) == (200, None)
    assert file.cut_short


async def test_a_search_among_failures_alone_ends(target) -> None:
    """Decreasing rates would take more and more time."""
    target.errors = dict.fromkeys(range(3), "HTTP_500")
    file = await measured(find_max_rate=True, slo="ttft=9", request_rate=200)
    assert target.num_runs == 1
    assert file.max_rate is not None
    assert (file.max_rate.held, file.max_rate.failed) == (None, 200)
    assert file.cut_short == "no request completed at 200 requests/s, so no other rate is tried"


async def test_with_nothing_measured_the_error_is_raised(target) -> None:
    target.gone_before = 0
    with pytest.raises(UnavailableError, match="the server has gone"):
        await measured(repetitions=3)


async def test_what_is_whole_is_not_cut_short(target) -> None:
    file = await measured()
    assert file.cut_short == ""
    check_whole(file)


@pytest.mark.parametrize(("why", "error"), [(CTRL_C, KeyboardInterrupt), ("the server has gone", CadenzaError)])
def test_it_is_stated_in_the_terminal(why: str, error: type, capsys: pytest.CaptureFixture[str]) -> None:
    file = made_up_file("a", [1], num_requests=20).model_copy(update={"cut_short": why})
    with pytest.raises(error):
        check_whole(file)
    show(file)
    assert f"Cut short ({why})" in capsys.readouterr().out
    whole = file.model_copy(update={"cut_short": ""})
    (difference,) = compare([whole, file]).differences
    assert (difference.name, difference.values) == ("cut_short", ("(none)", why))


def test_it_is_stated_in_the_report(tmp_path: Path) -> None:
    file = made_up_file("a", [1], num_requests=5).model_copy(update={"cut_short": CTRL_C})
    assert "Cut short (Ctrl-C)" in write_report([file], tmp_path / "a.html").read_text(encoding="utf-8")


def test_ctrl_c_keeps_the_points_that_were_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = make_settings({"num_requests": 5, "request_rate": 9, "sweep": ("output-len=4,5,6",)})
    real = simulation.simulate

    def simulate(point, *args, **kwargs):
        if point.output_len == "5":
            raise KeyboardInterrupt
        return real(point, *args, **kwargs)

    monkeypatch.setattr(simulation, "simulate", simulate)
    file, _ = simulation.run_simulation(settings, make_simulated([], None, {}), SilentView())
    assert [point.swept["output_len"] for point in file.points] == ["4"]
    assert file.cut_short == CTRL_C
