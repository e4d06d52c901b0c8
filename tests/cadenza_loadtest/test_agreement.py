"""The benchmark that holds our load generator against another: like against like, and no row of unlike loads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.common.rows import BenchmarkError
from benchmarks.loadtest_agreement import compared
from benchmarks.peers.guidellm_run import _seen
from benchmarks.peers.harness import Load, Seen, run_command

LOAD = Load("http://h/v1", "m", Path("m"), ["a b", "c d"], 3, 2.0)


def seen(**fields) -> Seen:
    """Two requests at 2 a second, sent 10 ms late, first token 0.1 s later, then one each 20 ms."""
    due_s = np.array([5.0, 5.5])
    made = {"due_s": due_s, "sent_s": due_s + 0.01, "first_s": due_s + 0.11, "last_s": due_s + 0.15}
    reported = {"ttft_p50_ms": 110.0, "output_tokens_per_s": 8.0}
    return Seen(
        **{**made, "num_prompt_tokens": 4, "num_output_tokens": 6, "reported": reported, "version": "1", **fields}
    )


def test_stamps_become_metrics_of_one_definition() -> None:
    assert seen().metrics(3) == pytest.approx(
        {
            "lag_p50_ms": 10.0,
            "due_to_first_p50_ms": 110.0,
            "sent_to_first_p50_ms": 100.0,
            "token_p50_ms": 20.0,
            "tokens_per_s": 6 / 0.65,
        }
    )


def test_differences_are_other_less_own() -> None:
    theirs = seen(reported={"ttft_p50_ms": 100.0, "output_tokens_per_s": 9.0})
    found = compared(seen(), replace(theirs, first_s=theirs.first_s + 0.005), LOAD)
    assert (found["cadenza_ttft_p50_ms"], found["guidellm_ttft_p50_ms"]) == (110.0, 100.0)
    assert found["difference_ttft_p50_ms"] == -10.0
    assert found["difference_sent_to_first_p50_ms"] == pytest.approx(5.0)
    assert found["difference_token_p50_ms"] == pytest.approx(-2.5)


def test_unlike_loads_are_no_row() -> None:
    with pytest.raises(BenchmarkError, match="guidellm: 5 output tokens, where 6 were requested"):
        compared(seen(), seen(num_output_tokens=5), LOAD)
    with pytest.raises(BenchmarkError, match="prompt tokens differ: 4 and 9"):
        compared(seen(), seen(num_prompt_tokens=9), LOAD)


def test_each_generator_reads_the_same_lines_by_its_own_names() -> None:
    lines = LOAD.lines(prompt="prompt", output_len="output_tokens_count").splitlines()
    assert [json.loads(line) for line in lines] == [
        {"prompt": "a b", "output_tokens_count": 3},
        {"prompt": "c d", "output_tokens_count": 3},
    ]


def test_a_report_of_guidellm_is_read() -> None:
    """The parts of guidellm 0.8.1's file that are used."""
    stamps = {"targeted_start": 1.0, "request_start": 1.1, "first_token_iteration": 1.2, "last_token_iteration": 1.4}
    request = {"info": {"timings": stamps}, "prompt_tokens": 7, "output_tokens": 3}
    metrics = {
        "time_to_first_token_ms": {"successful": {"median": 100.0, "percentiles": {"p99": 101.0}}},
        "inter_token_latency_ms": {"successful": {"median": 99.0}},
        "output_tokens_per_second": {"successful": {"mean": 2.0}},
    }
    report = {
        "metadata": {"guidellm_version": "0.8.1"},
        "benchmarks": [{"metrics": metrics, "requests": {"successful": [request]}}],
    }
    found = _seen(report, 1)
    assert (found.due_s[0], found.sent_s[0], found.first_s[0], found.last_s[0]) == (1.0, 1.1, 1.2, 1.4)
    assert (found.num_prompt_tokens, found.num_output_tokens, found.version) == (7, 3, "0.8.1")
    assert found.reported == {
        "ttft_p50_ms": 100.0,
        "ttft_p99_ms": 101.0,
        "tpot_p50_ms": 99.0,
        "output_tokens_per_s": 2.0,
    }
    with pytest.raises(BenchmarkError, match="1 of 2 requests completed"):
        _seen(report, 2)


def test_a_command_that_fails_says_why() -> None:
    with pytest.raises(BenchmarkError, match="failed: no such thing"):
        run_command(["sh", "-c", "echo no such thing >&2; exit 3"])
    with pytest.raises(BenchmarkError, match="/nowhere/python"):
        run_command(["/nowhere/python"])


def test_without_interpreters_it_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["loadtest_agreement"]) == 0
    assert "skipped" in capsys.readouterr().err
    assert main(["loadtest_agreement", "--vllm-python", "/nowhere/python"]) == 1
    assert "an interpreter that has vllm is needed" in capsys.readouterr().err
