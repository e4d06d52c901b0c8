"""The benchmarks' workloads, rows and command line: errors that would make numbers wrong or incomparable."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks import scheduler_cost
from benchmarks.__main__ import main
from benchmarks.common import rows
from benchmarks.common.burst_client import StreamTimes, latencies
from benchmarks.common.core_load import empty_core, measure, memory_per_sequence, start
from benchmarks.common.rows import (
    DISTURBED_CORES,
    BenchmarkError,
    OtherLoad,
    _own_s,
    append_row,
    make_row,
    medians,
    note_on,
    percentile,
)
from benchmarks.common.scheduler_load import BLOCK_SIZE, Case, leavers
from benchmarks.common.workload import digest, load_workload, make_workload
from benchmarks.peers.process import peer_process


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
        ('{"requests": []}', "must be a list of requests, not dict"),
        ("[" * 100_000, "recursion"),
        ('[{"id": 0, "prompt": [1]}]', "entry 0: output_len is missing"),
        ('[{"id": 0, "prompt": [], "output_len": 1}]', "prompt must be a list of one or more"),
        ('[{"id": 0, "prompt": [true], "output_len": 1}]', r"prompt\[0\] must be a token id"),
        ('[{"id": 0, "prompt": [1, 10], "output_len": 1}]', r"prompt\[1\] must be a token id, 0 to 9 .*: 10"),
        ('[{"id": 0, "prompt": [1], "output_len": 0}]', "output_len must be an integer of at least 1, not 0"),
        ('[{"id": 1.5, "prompt": [1], "output_len": 1}]', "id must be an integer or a string, not 1.5"),
        ('[{"id": 0, "prompt": [1], "output_len": 20}]', "1 [+] 20 tokens, over the model's 20"),
        (
            '[{"id": "a", "prompt": [1], "output_len": 1}, {"id": "a", "prompt": [2], "output_len": 1}]',
            "entry 1: id 'a' is given twice",
        ),
    ],
)
def test_a_wrong_workload_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "workload.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(BenchmarkError, match=message):
        load_workload(path, 10, max_model_len=20)


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


def test_a_child_that_has_to_be_idle_counts_as_another() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        before = {others: _own_s(others) for others in ((), (child.pid,))}
        assert child.stdout is not None
        child.stdout.readline()
        spent = [_own_s(others) - before[others] for others in ((), (child.pid,))]
        child.communicate(b"\n")
    assert spent[0] - spent[1] > 0.15


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
    # A request that arrived later waited from that time on.
    assert latencies([StreamTimes(2.1, 2.3, 3, due_s=2.0)])["ttft_p50_ms"] == pytest.approx(100)


@pytest.mark.slow
@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("churn", [0.0, 0.05])
def test_the_scheduler_benchmark_reaches_its_steady_state(churn: float, prefix_cache: bool) -> None:
    """`measure` itself raises for a step that differs from the case."""
    case = Case(20, churn, prefix_cache, context_len=40)
    core = empty_core(case, 20)
    start(core, case.prompts(0))
    metrics = measure(core, case, 20, seed=0).metrics()
    assert core.num_preemptions == 0
    assert core.num_output_tokens >= 20 * 20
    assert 0 < metrics["plan_bytes"] < (300 if churn else 40)
    assert metrics["us_per_step"] > 0


def test_a_step_that_is_not_steady_is_refused() -> None:
    case = Case(4, context_len=20)
    core = empty_core(case, 20)
    start(core, case.prompts(0)[:3])
    with pytest.raises(BenchmarkError, match="3 run"):
        measure(core, case, 20, seed=0)


@pytest.mark.slow
def test_what_a_sequence_weighs_does_not_follow_its_token_ids() -> None:
    """A block table may grow with the context; 8 bytes and more a token may not be counted."""
    short, long = (memory_per_sequence(Case(64, context_len=tokens), 0) for tokens in (100, 1600))
    assert all(500 < each["memory_bytes_per_seq"] < 4096 for each in (short, long))
    assert long["memory_bytes_per_seq"] - short["memory_bytes_per_seq"] < 1500 * 2


def test_prompts_are_spread_over_a_block_and_joiners_have_nothing_in_common() -> None:
    case = Case(64, 0.05, context_len=1000)
    lengths = [len(prompt) for prompt in case.prompts(3)]
    assert {length % BLOCK_SIZE for length in lengths} == set(range(BLOCK_SIZE))
    assert sum(lengths) / len(lengths) == pytest.approx(1000, abs=1)
    assert case.prompts(3) == case.prompts(3) != case.prompts(4)
    joiners = list(itertools.islice(case.joiner_prompts(3), 20))
    assert {len(prompt) for prompt in joiners} == {64}
    assert len({prompt[:8] for prompt in joiners}) == 20
    assert (case.num_changing, Case(10, 0.05).num_changing, Case(4096, 0.05).num_changing) == (3, 1, 205)


def test_leavers_take_turns() -> None:
    seen = [index for step in range(5) for index in leavers(step, 12, 2)]
    assert seen == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert list(leavers(3, 2, 4)) == [0, 1]


OPTIONS = "--running 2 --prefix-cache-running --churn 0 --steps 4 --context-len 20 --repeats 2 --quiet-wait-s 0".split()


@pytest.mark.slow
def test_the_command_prints_flat_rows_and_records_whole_ones(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    assert main(["scheduler_cost", "--json", *OPTIONS]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    row = json.loads(line)
    assert list(row)[:5] == ["system", "running", "churn", "us_per_step", "plan_bytes"]
    assert (row["system"], row["running"], row["churn"], row["repeats"]) == ("cadenza", 2, 0.0, 2)
    assert all(isinstance(row[name], float) for name in ("us_per_step", "plan_bytes", "memory_bytes_per_seq"))
    assert not list(tmp_path.iterdir())
    assert main(["scheduler_cost", "--json", "--record", *OPTIONS]) == 0
    printed = json.loads(capsys.readouterr().out)
    recorded = json.loads((tmp_path / "scheduler_cost.jsonl").read_text(encoding="utf-8"))
    assert recorded["benchmark"] == "scheduler_cost"
    assert recorded["medians"]["us_per_step"] == printed["us_per_step"]
    assert recorded["params"]["running"] == 2


def test_the_options_say_which_cases() -> None:
    parser = argparse.ArgumentParser()
    scheduler_cost.BENCHMARK.add_options(parser)
    by_default = scheduler_cost.cases_of(parser.parse_args([]))
    assert len(by_default) == len(set(by_default)) == 9
    assert [case for case in by_default if case.prefix_cache] == [Case(1024, 0.05, True)]
    options = "--running 8 --context-len 250 4000 --churn 0 --prefix-cache-running".split()
    assert scheduler_cost.cases_of(parser.parse_args(options)) == [Case(8, context_len=250), Case(8, context_len=4000)]


@pytest.mark.slow
def test_it_runs_by_its_path_from_anywhere(tmp_path: Path) -> None:
    script = Path(scheduler_cost.__file__).resolve()
    done = subprocess.run(
        [sys.executable, script, "--json", *OPTIONS], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["us_per_step"] > 0


FAKE_VLLM = """
import json, sys
print(json.dumps({"version": "1.2"}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request["case"]["running"] == 13:
        sys.exit("13 is too many")
    print(json.dumps({"us_per_step": request["case"]["running"] * 10.0, "steps": request["steps"]}), flush=True)
"""


@pytest.fixture
def fake_peer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A module that answers as a peer does."""
    (tmp_path / "fake_peer.py").write_text(FAKE_VLLM, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "fake_peer"


@pytest.mark.slow
def test_a_peer_answers_case_by_case(fake_peer: str) -> None:
    with peer_process(Path(sys.executable), fake_peer) as peer:
        assert peer.version == "1.2"
        assert peer.call({"case": asdict(Case(3)), "steps": 5}) == {"us_per_step": 30.0, "steps": 5}
        assert peer.call({"case": asdict(Case(4)), "steps": 6}) == {"us_per_step": 40.0, "steps": 6}
        with pytest.raises(BenchmarkError, match="13 is too many"):
            peer.call({"case": asdict(Case(13)), "steps": 5})


@pytest.mark.slow
def test_a_peer_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scheduler_cost", *OPTIONS, "--peer-python", "/nowhere/python"]) == 1
    assert "/nowhere/python: vllm is not installed there" in capsys.readouterr().err
    with pytest.raises(BenchmarkError, match="No module named"), peer_process(Path(sys.executable), "no.such.peer"):
        pass


def test_a_failing_benchmark_fails_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cpu_serving", "--model", "/nowhere"]) == 1
    assert "no such folder" in capsys.readouterr().err


def test_wrong_arguments_are_refused() -> None:
    for arguments in (["nothing"], ["scheduler_cost", "--steps", "0"], ["--steps", "3"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2


def test_the_list_names_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        "agents",
        "cpu_limits",
        "cpu_serving",
        "disaggregation",
        "families",
        "fleet",
        "gateway",
        "gpu_host",
        "lane_scaling",
        "lora",
        "mapped_experts",
        "placement",
        "prefix_hits",
        "real",
        "scheduler_cost",
        "service_plane",
        "speculation",
        "turns",
        "window_memory",
    ]
