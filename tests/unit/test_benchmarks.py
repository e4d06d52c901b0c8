"""The benchmarks' workloads, rows and command line: what would make their numbers wrong or incomparable."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import scheduler_cost
from benchmarks.__main__ import main
from benchmarks.common import rows
from benchmarks.common.burst_client import StreamTimes, latencies
from benchmarks.common.other_load import DISTURBED_CORES, OtherLoad, _own_s, note_on
from benchmarks.common.rows import BenchmarkError, append_row, make_row
from benchmarks.common.stats import medians, percentile
from benchmarks.common.workload import digest, load_workload, make_workload


def test_a_workload_follows_from_its_seed() -> None:
    assert make_workload(64, 1, 8192) == make_workload(64, 1, 8192)
    assert digest(make_workload(64, 1, 8192)) != digest(make_workload(64, 2, 8192))
    # Fewer requests are the first ones of more.
    assert make_workload(64, 1, 8192)[:8] == make_workload(8, 1, 8192)


@pytest.mark.parametrize("vocab_size", [2048, 8192, 50_000])
def test_a_workload_keeps_its_ranges(vocab_size: int) -> None:
    requests = make_workload(400, 7, vocab_size)
    assert [request.request_id for request in requests] == list(range(400))
    assert all(16 <= len(request.prompt) <= 256 for request in requests)
    assert all(8 <= request.output_len <= 256 for request in requests)
    assert all(300 <= token_id < min(vocab_size, 8000) for request in requests for token_id in request.prompt)
    # Uniform, mean 136; exponential of mean 64, clipped: about 63.
    assert 120 < sum(len(request.prompt) for request in requests) / 400 < 152
    assert 50 < sum(request.output_len for request in requests) / 400 < 76


def test_a_vocabulary_may_be_too_small() -> None:
    with pytest.raises(BenchmarkError, match="too small"):
        make_workload(1, 0, 300)


def test_a_workload_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "workload.json"
    path.write_text(json.dumps([{"id": 3, "prompt": [1, 2], "output_len": 5}]), encoding="utf-8")
    (request,) = load_workload(path, 10)
    assert (request.request_id, request.prompt, request.output_len) == (3, [1, 2], 5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "workload"),
        ("[]", "at least one"),
        ('[{"id": 0, "prompt": [1]}]', "is needed"),
        ('[{"id": 0, "prompt": [], "output_len": 1}]', "prompt must be"),
        ('[{"id": 0, "prompt": [true], "output_len": 1}]', "prompt must be"),
        ('[{"id": 0, "prompt": [10], "output_len": 1}]', "0 to 9"),
        ('[{"id": 0, "prompt": [1], "output_len": 0}]', "output_len"),
    ],
)
def test_a_wrong_workload_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "workload.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(BenchmarkError, match=message):
        load_workload(path, 10)


def test_a_row_has_all_that_is_needed_to_judge_it(tmp_path: Path) -> None:
    measured = [{"x_us": 1.0}, {"x_us": 9.0}, {"x_us": 2.00004}]
    row = make_row("toy", seed=5, params={"running": 4}, repeats=measured, other_cores=[0.0, 0.5, 0.1])
    path = append_row(row, tmp_path / "results")
    assert append_row(row, tmp_path / "results") == path == tmp_path / "results" / "toy.jsonl"
    first, second = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    assert first == second
    assert set(first) == {
        "benchmark", "date", "machine", "versions", "seed", "repeats", "params", "medians", "other_cores", "note",
    }  # fmt: skip
    assert set(first["machine"]) == {"cpu", "cores", "memory_gib"}
    assert set(first["versions"]) == {"python", "torch", "transformers", "grpcio", "cadenza", "commit"}
    assert (first["seed"], first["repeats"], first["medians"]) == (5, 3, {"x_us": 2.0})
    assert first["other_cores"] == 0.5
    assert "0.50 cores" in first["note"]


def test_a_quiet_row_has_no_note() -> None:
    assert note_on(DISTURBED_CORES) == ""
    assert note_on(DISTURBED_CORES + 0.01) != ""


def test_own_work_is_not_other_load() -> None:
    """This process's work and that of a child that has ended by then are its own, to a few ticks of 10 ms."""
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    begin, busy_before = _own_s(), time.process_time()
    with OtherLoad() as other:
        subprocess.run([sys.executable, "-c", burn], check=True)
        while time.process_time() - busy_before < 0.2:
            pass
    assert _own_s() - begin > 0.4
    assert 0 <= other.cores <= (os.cpu_count() or 1) + 0.5


def test_percentiles_and_medians() -> None:
    assert percentile([4.0, 1.0, 2.0, 3.0], 50) == 2.5
    assert percentile([5.0], 99) == 5.0
    with pytest.raises(ValueError, match="at least one"):
        percentile([], 50)
    assert medians([{"a": 1.0, "b": 3.0}, {"a": 2.0, "b": 123456.0}]) == {"a": 1.5, "b": 61730.0}


def test_latencies_in_milliseconds() -> None:
    found = latencies([StreamTimes(0.1, 0.3, 3), StreamTimes(0.2, 0.2, 1)])
    assert found["ttft_p50_ms"] == pytest.approx(150)
    assert found["tpot_p50_ms"] == found["tpot_p99_ms"] == pytest.approx(100)
    assert "tpot_p50_ms" not in latencies([StreamTimes(0.2, 0.2, 1)])


def test_the_scheduler_benchmark_reaches_its_steady_state() -> None:
    core = scheduler_cost.steady_core(8, 40, 20, seed=0)
    metrics = scheduler_cost.measure(core, 8, 20).metrics()
    assert core.num_output_tokens >= 8 * 20
    assert core.num_preemptions == 0
    assert 0 < metrics["plan_bytes"] < 40
    assert metrics["step_us"] > 0


def test_the_command_runs_one_benchmark(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    options = [
        "--running",
        "2",
        "--churn",
        "0",
        "--steps",
        "4",
        "--context-len",
        "20",
        "--repeats",
        "2",
        "--quiet-wait-s",
        "0",
    ]
    assert main(["scheduler_cost", "--json", *options]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    row = json.loads(line)
    assert (row["benchmark"], row["params"]["running"], row["repeats"]) == ("scheduler_cost", 2, 2)
    assert not list(tmp_path.iterdir())
    assert main(["scheduler_cost", "--json", "--record", *options]) == 0
    printed = capsys.readouterr().out
    assert (tmp_path / "scheduler_cost.jsonl").read_text(encoding="utf-8") == printed


def test_a_failing_benchmark_fails_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serving_burst", "--model", "/nowhere"]) == 1
    assert "no such folder" in capsys.readouterr().err


def test_wrong_arguments_are_refused() -> None:
    for arguments in (["nothing"], ["scheduler_cost", "--steps", "0"], ["--steps", "3"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2


def test_the_list_names_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["scheduler_cost", "serving_burst"]
