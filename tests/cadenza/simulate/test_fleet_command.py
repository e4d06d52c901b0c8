"""`cadenza simulate-fleet` on the command line: tables, files, the same seed, and wrong options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cadenza.cli.app import run

SMALL = "simulate-fleet --executor a100-80gb-opt-13b --traffic {trace} --duration-s 30 --slice-s 0.5"
TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{second:02d}.5,{100 + 17 * second},{10 + second}\n" for second in range(30)
)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


def command(text: str, trace: Path, *more: str) -> int:
    return run([*text.format(trace=trace).split(), *more])


def test_a_row_for_each_router_and_a_file(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "fleet.json"
    routers = "round-robin,llm-d,one-queue"
    more = "--schedulers 2 --executors 2 --request-rate 4 --price 3 --failure-rate 0.5 --slo ttft=1,tpot=0.1".split()
    assert command(SMALL, trace, "--router", routers, *more, "--output", str(output)) == 0
    printed = capsys.readouterr()
    assert "4.13 copies side by side of" in printed.err or "4 copies side by side of" in printed.err
    assert all(name in printed.out for name in (*routers.split(","), "1M tokens"))
    file = json.loads(output.read_text())
    assert list(file["runs"]) == routers.split(",")
    assert file["fleet"]["executors_per_scheduler"] == 2
    one = file["runs"]["round-robin"]
    assert one["summary"]["requests"] == sum(hour["requests"] for hour in one["hourly"]) > 90
    again = tmp_path / "again.json"
    assert command(SMALL, trace, "--router", routers, *more, "--output", str(again)) == 0
    assert again.read_text() == output.read_text()
    assert command(SMALL, trace, "--router", routers, *more, "--seed", "5", "--output", str(again)) == 0
    assert again.read_text() != output.read_text()


def test_drawn_traffic_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "simulate-fleet --executors 2 --request-rate 0.5 --duration-s 20 --course flat --slice-s 1".split()
    assert run(arguments) == 0
    printed = capsys.readouterr()
    assert "Traffic drawn from published statistics of mooncake-conversation, no trace itself" in printed.err


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("--router luck", "--router luck: must be one of round-robin, least-requests"),
        ("--schedulers 0", "--schedulers 0: must be 1 or more"),
        ("--schedulers 2000 --executors 16", "--executors 16: with --schedulers 2000 there are over 16,384 executors"),
        ("--duration-s 0", "--duration-s 0: must be a number over 0"),
        ("--slice-s -1", "--slice-s -1: must be a number over 0"),
        ("--request-rate 0", "--request-rate 0: must be a number over 0"),
        ("--course year", "--course year: must be one of day, flat"),
        ("--slo itl=1", "--slo itl=1: itl is not simulated; there are ttft and tpot"),
        ("--slo ttft=fast", "--slo ttft=fast: ttft must be a number of seconds over 0"),
        ("--failure-rate -1", "--failure-rate -1: must be 0 or more"),
        ("--gpus 0", "--gpus 0: must be 1 or more"),
        ("--seed -1", "--seed -1: must be 0 or more"),
        ("--price -2", "--price -2: must be 0 or more"),
        ("--prefill 16", "--prefill 16: must be from 1 to --executors less one"),
        ("--prefill 2", "--kv-bytes: is needed with --prefill"),
        ("--prefill 2 --kv-bytes 9 --schedulers 2", "--prefill 2: goes with one scheduler"),
        ("--prefill 2 --kv-bytes 0", "--kv-bytes 0: must be a number over 0"),
        ("--max-num-seqs 4096", "max_num_batched_tokens (2048) must be at least max_num_seqs (4096)"),
        ("--traffic nothing", "--traffic nothing: must be one of mooncake-conversation"),
        ("--traffic /nowhere.csv", "--traffic /nowhere.csv: no such file or directory"),
        ("--executor unknown", "--executor unknown: neither a file nor a known profile"),
    ],
)
def test_wrong_options_are_named(trace: Path, capsys: pytest.CaptureFixture[str], options: str, problem: str) -> None:
    assert command(SMALL, trace, *options.split()) == 2
    printed = capsys.readouterr()
    assert problem in printed.err
    assert not printed.out


def test_a_rate_is_needed_without_a_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate-fleet"]) == 2
    assert "--request-rate: is needed, as no trace is given that has one" in capsys.readouterr().err
