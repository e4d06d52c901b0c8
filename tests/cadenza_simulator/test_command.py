"""`cadenza simulate` and `cadenza fit-costs` on the command line: files, tables, figures, and wrong options."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from cadenza_cli.app import run
from cadenza_loadtest.requests import LoadTestError
from cadenza_loadtest.results.results import read
from cadenza_simulator.campaign import may_share
from cadenza_simulator.capacity.capacity import Capacity
from cadenza_simulator.capacity.pictures import capacity_figure, write_capacity
from cadenza_simulator.options import find_profile, make_simulated, read_counts
from cadenza_simulator.published import PUBLISHED

SMALL = ["--num-requests", "20", "--input-len", "uniform:4:40", "--output-len", "uniform:2:10"]


@pytest.fixture
def costs(tmp_path: Path) -> str:
    path = tmp_path / "costs.json"
    path.write_text('{"step_us": 5000, "token_us": 50}')
    return str(path)


@pytest.mark.slow
def test_a_result_like_that_of_a_load_test(
    costs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CADENZA_MAX_NUM_SEQS", raising=False)
    output = tmp_path / "out" / "day.json"
    arguments = [
        "simulate",
        "--executor",
        costs,
        *SMALL,
        "--request-rate",
        "50",
        "--batching",
        "dynamic",
        "--max-num-seqs",
        "4",
    ]
    assert run([*arguments, "--output", str(output), "--csv", str(tmp_path / "csv")]) == 0
    printed = capsys.readouterr()
    assert "TTFT" in printed.out
    assert "times as fast as real time" in printed.err
    file = read(output)
    assert (file.source, file.label) == ("simulate", "costs")
    assert file.server["options"] == {"batching": "dynamic", "max_num_seqs": "4"}
    assert file.server["executors"][0]["limits"]["max_num_seqs"] == 4
    assert file.settings["request_rate"] == 50.0
    (done,) = file.points[0].runs
    assert done.requests.ok.all()
    assert len(done.requests) == 20
    assert len(done.requests.gap_s) == done.requests.num_output_tokens.sum() - 20
    assert len(done.steps) > 10
    assert (tmp_path / "csv" / "requests.csv").exists()


@pytest.mark.slow
def test_the_placement_policy_is_in_the_result_and_is_repeated(costs: str, tmp_path: Path) -> None:
    first, again, other = (str(tmp_path / name) for name in ("first.json", "again.json", "other.json"))
    load = [*SMALL, "--request-rate", "100", "--executors", "2"]
    assert run(["simulate", "--executor", costs, *load, "--placement", "sglang", "--output", first]) == 0
    assert run(["simulate", "--rerun", first, "--output", again]) == 0
    assert run(["simulate", "--rerun", first, "--placement", "round-robin", "--output", other]) == 0
    assert [read(path).server["placement"] for path in (first, again, other)] == ["sglang", "sglang", "round-robin"]
    assert run(["simulate", "--executor", costs, *load, "--placement", "best"]) == 2


def test_the_environment_counts_as_for_the_services(
    costs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CADENZA_BATCHING", "static")
    config = tmp_path / "options.toml"
    config.write_text("max_num_seqs = 6\nbatch_size = 3\n")
    simulated = make_simulated([costs], "1", {"block_size": "32"}, config=str(config))
    assert (simulated.config.batching, simulated.config.batch_size) == ("static", 3)
    assert simulated.fleet[0].limits.max_num_seqs == 6
    assert simulated.fleet[0].limits.block_size == 32


@pytest.mark.slow
def test_points_of_sweeps_and_executors(costs: str, tmp_path: Path) -> None:
    output = str(tmp_path / "day.json")
    arguments = [
        "simulate",
        "--executor",
        costs,
        *SMALL,
        "--executors",
        "1,2",
        "--sweep",
        "request-rate=20,40",
        "--seed",
        "4",
    ]
    assert run([*arguments, "--repetitions", "2", "--output", output, "--no-keep-itl"]) == 0
    file = read(output)
    assert [point.swept for point in file.points] == [
        {"executors": float(count), "request_rate": rate} for count in (1, 2) for rate in ("20", "40")
    ]
    assert [each.seed for each in file.points[0].runs] == [4, 5]
    assert not len(file.points[0].runs[0].requests.gap_s)


@pytest.mark.long
@pytest.mark.slow
def test_a_search_ends_with_a_table_and_a_picture(
    costs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "simulate",
        "--executor",
        costs,
        *SMALL,
        "--num-requests",
        "15",
        "--find-max-rate",
        "--max-num-seqs",
        "8",
    ]
    output = str(tmp_path / "day.json")
    assert run([*arguments, "--slo", "ttft=0.2,tpot=0.02", "--executors", "1,2", "--output", output]) == 0
    printed = capsys.readouterr().out
    assert "Highest rate that holds the SLO" in printed
    assert run([*arguments, "--slo", "ttft=0.0001"]) == 1
    assert "no rate that was tried holds ttft=0.0001" in capsys.readouterr().err


def test_the_picture_of_capacities(tmp_path: Path) -> None:
    found = [Capacity(count, rate, rate * 1.02, ()) for count, rate in ((1, 4.0), (2, 7.9), (4, 13.5))]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        png, svg = write_capacity(found, tmp_path)
        figure = capacity_figure(found)
        nothing = capacity_figure([Capacity(1, None, 1.0, ())])
    assert png.stat().st_size > 5000
    assert "<svg" in svg.read_text()
    (axes,) = figure.axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("executors", "requests per second")
    assert axes.lines[1].get_ydata().tolist() == [4.0, 7.9, 13.5]
    assert "No rate" in nothing.axes[0].texts[0].get_text()
    with pytest.raises(LoadTestError, match="cannot be written"):
        write_capacity(found, png / "in-a-file")


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--executor", "a100-40gb-opt-13"],
            "--executor a100-40gb-opt-13: neither a file nor a known profile; did you mean",
        ),
        (["--executor", "tpu"], "there are a100-40gb-opt-13b, "),
        (["--executor", "none.json"], "--executor none.json: no such file"),
        (["--executors", "1,x"], "--executors 1,x: must be different numbers from 1 to 1024"),
        (["--executors", "2,2"], "--executors 2,2: must be different numbers"),
        (["--executors", "2", "--placement", "nearest"], "--placement nearest: must be one of expected-time"),
        (["--find-max-rate"], "--find-max-rate needs --slo"),
        (["--batching", "often"], "batching"),
        (["--max-num-seqs", "0"], "max_num_seqs"),
        (["--sweep", "input=3"], "--sweep input=3: input cannot be swept"),
        (["--request-rate", "0"], "--request-rate"),
        (["--workload", "nothing.jsonl"], "--workload nothing.jsonl"),
    ],
)
def test_wrong_options_are_named(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["simulate", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_counts_and_profiles() -> None:
    assert read_counts("1,2,16") == (1, 2, 16)
    assert find_profile("h200-llama-3.1-8b") is PUBLISHED["h200-llama-3.1-8b"]


def test_prompts_are_made_where_they_may_be_alike() -> None:
    from cadenza_loadtest.settings import make_settings

    assert not may_share(make_settings({"workload": "sharegpt"}))
    assert may_share(make_settings({"workload": "multi-turn"}))
    assert may_share(make_settings({"workload": "trace.csv"}))


@pytest.mark.slow
def test_shared_prefixes_are_found_in_the_cache(costs: str, tmp_path: Path) -> None:
    output = str(tmp_path / "day.json")
    arguments = [
        "simulate",
        "--executor",
        costs,
        "--workload",
        "shared-prefix",
        "--num-requests",
        "40",
        "--request-rate",
        "20",
    ]
    for extra, cached in (([], True), (["--no-enable-prefix-caching"], False)):
        assert run([*arguments, *extra, "--output", output]) == 0
        (done,) = read(output).points[0].runs
        assert bool(done.requests.num_cached_tokens.sum()) == cached


def test_what_is_no_recording_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "costs.json"
    path.write_text(json.dumps({"step_us": 1}))
    assert run(["fit-costs", str(path)]) == 2
    assert f"{path} is not a plan log" in capsys.readouterr().err
    assert run(["fit-costs", str(tmp_path / "none.log")]) == 2
    assert "no such file" in capsys.readouterr().err
