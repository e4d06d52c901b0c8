"""`cadenza loadtest` and `cadenza report` as a user runs them, against services with an executor that takes no time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cadenza import LocalServices
from cadenza_cli.app import run
from cadenza_loadtest.results.results import CTRL_C, Reached, read
from tests.helpers.paths import ROOT

DEMO_MODEL = ROOT / "models" / "cadenza-demo"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with LocalServices(DEMO_MODEL, simulate="instant", max_queued_requests=16) as services:
        yield services.target


@pytest.mark.long
def test_a_sweep_from_load_to_report(server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, page = tmp_path / "out" / "result.json", tmp_path / "report.html"
    arguments = f"--target {server} --sweep request-rate=50,200 --num-requests 12 --repetitions 2 --slo ttft=1 --seed 7"
    files = f"--output {output} --csv {tmp_path / 'csv'} --plots {tmp_path / 'plots'} --report {page} --label mine"
    assert run(["loadtest", *arguments.split(), *files.split()]) == 0
    assert "TTFT" in capsys.readouterr().out

    file = read(output)
    assert [point.swept for point in file.points] == [{"request_rate": "50"}, {"request_rate": "200"}]
    assert (file.label, file.source, file.settings["seed"]) == ("mine", "loadtest", 7)
    for point in file.points:
        assert [run.seed for run in point.runs] == [7, 8]
        for each in point.runs:
            assert each.metrics.num_ok == 12 or each.metrics.window_s is not None
            assert (each.requests.error == "").all()
            assert (each.requests.num_output_tokens > 0).all()
            assert (each.requests.num_cached_tokens == 0).all()  # of earlier runs nothing is found in the prefix cache
            assert each.steps is not None
            assert each.steps.num_sampled.sum() >= each.requests.num_output_tokens.sum()
    assert (tmp_path / "csv" / "requests.csv").read_text(encoding="utf-8").count("\n") == 1 + 2 * 2 * 12
    assert any(path.suffix == ".svg" for path in (tmp_path / "plots").iterdir())
    assert "mine" in page.read_text(encoding="utf-8")

    again = tmp_path / "again.json"
    assert run(["loadtest", "--rerun", str(output), "--num-requests", "5", "--output", str(again)]) == 0
    rerun = read(again)
    assert rerun.reached == file.reached == Reached(target=server)
    assert rerun.settings == {**file.settings, "num_requests": 5}
    assert [len(each.requests) for point in rerun.points for each in point.runs] == [5] * 4
    assert run(["report", str(output), str(again), "--output", str(tmp_path / "change.html")]) == 0
    assert "num_requests" in capsys.readouterr().out


@pytest.mark.long
def test_a_server_that_was_started_for_the_test_is_started_again(tmp_path: Path) -> None:
    """With its options, but for what is given."""
    first, again = tmp_path / "first.json", tmp_path / "again.json"
    arguments = f"--model {DEMO_MODEL} --simulate instant --max-num-seqs 3 --block-size 32 --num-requests 3"
    assert run(["loadtest", *arguments.split(), "--output", str(first)]) == 0
    assert run(["loadtest", "--rerun", str(first), "--block-size", "8", "--output", str(again)]) == 0
    made, rerun = read(first), read(again)
    assert rerun.settings == made.settings
    assert made.server is not None
    assert rerun.server is not None
    assert rerun.server["options"]["max_num_seqs"] == "3"
    assert [file.server["executors"][0]["block_size"] for file in (made, rerun) if file.server] == [32, 8]


def test_a_full_queue_is_reported(server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "result.json"
    arguments = f"--target {server} --num-requests 300 --output-len 64 --warm-up-requests 0 --output {output}"
    assert run(["loadtest", *arguments.split()]) == 0
    (point,) = read(output).points
    (only,) = point.runs
    refused = only.metrics.errors.get("RESOURCE_EXHAUSTED", 0)
    assert refused > 0
    assert only.metrics.num_ok == 300 - refused
    assert "RESOURCE_EXHAUSTED" in capsys.readouterr().out


@pytest.mark.long
def test_the_highest_rate_is_searched(server: str, tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    arguments = f"--target {server} --find-max-rate --slo ttft=0.000001 --num-requests 4 --request-rate 2000"
    assert run(["loadtest", *arguments.split(), "--output", str(output)]) == 0
    file = read(output)
    assert file.max_rate is not None
    assert file.max_rate.held is None  # no server answers within a microsecond
    assert [float(point.swept["request_rate"]) for point in file.points] == sorted(
        float(point.swept["request_rate"]) for point in file.points
    )


def test_nothing_measured_is_a_failure(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = f"--target {server} --num-requests 2 --timeout-s 0.000001 --warm-up-requests 0"
    assert run(["loadtest", *arguments.split()]) == 1
    captured = capsys.readouterr()
    assert "TIMEOUT" in captured.out
    assert "no request completed" in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--url http://127.0.0.1:1/v1 --model x", "give --url, or --target or --model"),
        ("--url http://127.0.0.1:1/v1 --block-size 8", "option block_size is for a server started here"),
        ("--output /proc/nowhere/result.json", "--output /proc/nowhere/result.json"),
        ("--rerun /nowhere.json", "/nowhere.json"),
        ("--workload /nowhere.jsonl", "/nowhere.jsonl"),
        ("--sweep burstiness=1,x --arrivals gamma", "--burstiness: "),
    ],
)
def test_wrong_options_are_refused(
    arguments: str, message: str, server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    where = [] if "--url" in arguments else ["--target", server]
    assert run(["loadtest", *where, *arguments.split()]) == 2
    assert message in capsys.readouterr().err


def test_a_report_of_something_else_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "other.json"
    file.write_text(json.dumps({"kind": "something"}), encoding="utf-8")
    assert run(["report", str(file)]) == 2
    assert str(file) in capsys.readouterr().err


def test_ctrl_c_keeps_what_was_measured(server: str) -> None:
    from cadenza_loadtest.campaign import run_campaign
    from cadenza_loadtest.settings import make_settings
    from tests.helpers.loadtest.load_views import SilentView

    async def interrupted() -> None:
        settings = make_settings(
            {"request_rate": "20", "num_requests": "10000", "warm_up_requests": "0", "repetitions": "3"}
        )
        view = SilentView()
        task = asyncio.create_task(run_campaign(settings, server, view))
        await view.has_ended(5)
        task.cancel()
        file = await task
        (point,) = file.points
        (only,) = point.runs
        assert file.cut_short == CTRL_C
        assert 5 <= int((only.requests.error == "").sum()) < 10000

    asyncio.run(interrupted())
