"""What the GPU benchmarks run: traces and steps, serving, tests, and tiny runs of their own programs."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.common.rows import ROOT
from benchmarks.common.workload import Request
from benchmarks.gpu import kernels, serve, serving_load, tests
from benchmarks.gpu.cases import Ceilings, Goal
from benchmarks.gpu.groups import GROUPS
from benchmarks.gpu.plan_driver import _batches, _scheduled
from benchmarks.gpu.serving_run import Run
from benchmarks.gpu.shapes import LLAMA_8B, TINY
from benchmarks.gpu.trace import device_time, read_trace
from benchmarks.gpu.watching import decode_steps, step_metrics

FAR = time.monotonic() + 1e6


# ---------------------------------------------------------------- traces and steps


def event(start: float, end: float, kind: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "ts": start, "dur": end - start, "name": "a"}


def test_idle_is_what_no_kernel_covers() -> None:
    events = [event(0, 10), event(5, 20, "gpu_memcpy"), event(30, 40), event(0, 100, "cpu_op"), {"ph": "M"}]
    found = device_time(events, left_out=0.0)
    assert found is not None
    assert (found.span_s, found.busy_s, found.num_kernels) == (pytest.approx(4e-5), pytest.approx(3e-5), 3)
    assert found.idle_share == pytest.approx(0.25)
    late = device_time(events, left_out=0.5)
    assert late is not None
    assert late.idle_share == 0
    assert device_time([event(0, 5, "cpu_op")]) is None


def test_traces_are_read_zipped_or_not() -> None:
    content = json.dumps({"traceEvents": [event(0, 1)]}).encode()
    assert read_trace(content) == read_trace(gzip.compress(content)) == [event(0, 1)]


def record(step_id: int, applied_ms: float, num_tokens: list[int], joined: bool = False) -> Any:
    return SimpleNamespace(
        step_id=step_id, applied_ns=applied_ms * 1e6, sequence_ids=range(len(num_tokens)), num_tokens=num_tokens,
        joined=[1] if joined else [],
    )  # fmt: skip


def test_steps_are_those_in_which_all_decode() -> None:
    records = [
        record(1, 0, [9, 9]),
        record(2, 5, [1, 1]),
        record(3, 7, [1, 1]),
        record(4, 8, [1]),
        record(5, 9, [1, 1]),
    ]
    records += [record(6, 13, [1, 1]), record(7, 14, [1, 1], joined=True)]
    assert [each.step_id for each in decode_steps(records, 2)] == [2, 3, 5, 6]
    # 5 to 7, 9 to 13; from 3 to 5 there was another.
    assert step_metrics(records, 2) == {"step_ms": 3.0, "steps": 2.0}
    assert step_metrics(records, 3) == {}


def test_prompts_are_cut_into_steps() -> None:
    chunks = [(0, 0, 8), (0, 8, 4), (1, 0, 8), (1, 8, 4)]
    steps = _batches(chunks, 12)
    assert steps == [[(0, 0, 8)], [(0, 8, 4), (1, 0, 8)], [(1, 8, 4)]]
    rows = _scheduled(steps[1], 12)
    assert (rows.slots.tolist(), rows.num_tokens.tolist(), rows.samples.tolist()) == ([0, 1], [4, 8], [True, False])


# ---------------------------------------------------------------- serving


def test_requests_follow_from_their_seed() -> None:
    requests = serving_load.make_requests(1000, 1, 128256)
    assert requests == serving_load.make_requests(1000, 1, 128256)
    assert requests[:10] == serving_load.make_requests(10, 1, 128256)
    lengths = [each.output_len for each in requests] + [len(each.prompt) for each in requests]
    assert (min(lengths), max(lengths)) == (100, 1024)
    assert 540 < sum(lengths) / 2000 < 584
    some = serving_load.some_of(requests, 200, 1)
    assert len(some) == 200
    assert some == serving_load.some_of(requests, 200, 1) != serving_load.some_of(requests, 200, 2)
    assert [each.request_id for each in some] == sorted(each.request_id for each in some)
    assert {(len(each.prompt), each.output_len) for each in serving_load.alike(4, 8, 60, 1, 512)} == {(8, 60)}


def run_of(tmp_path: Path, seconds: float = 100.0) -> Run:
    options = serve.parse(["--trial"])
    return Run(TINY, serve.make_load(options, 512), "cpu", time.monotonic() + seconds, tmp_path)


def test_stages_are_rows_errors_or_skipped(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    assert run.stage("fine", 1.0, lambda: {"ratio": 4.5}, run.load.some, Goal("ratio", at_least=4)) == {"ratio": 4.5}
    assert run.stage("broken", 1.0, lambda: 1 / 0) == {}
    assert run.stage("late", 1000.0, lambda: {"a": 1.0}) == {}
    rows = [json.loads(line) for line in (tmp_path / "gpu_serving.jsonl").read_text(encoding="utf-8").splitlines()]
    assert rows[0]["medians"] == {"ratio": 4.5}
    assert rows[0]["params"]["requests"] == 3
    assert (rows[1]["error"], "skipped" in rows[2]) == ("ZeroDivisionError: division by zero", True)


def test_services_have_room_for_the_longest_request(tmp_path: Path) -> None:
    options = serve.parse(["--requests", "50"])
    assert [shape.name for shape in options.shapes] == ["llama-3.1-8b", "qwen3-0.6b"]
    run = Run(LLAMA_8B, serve.make_load(options, 128256), "cuda", FAR, tmp_path)
    longest = max(len(each.prompt) + each.output_len for each in run.load.all_of)
    assert longest <= run.options()["max_model_len"] < longest + 16
    assert run.options()["max_num_seqs"] == 512
    assert "kv_cache_dtype" not in run.options()
    in_fp8 = serve.parse(["--fp8"])
    assert in_fp8.no_peer
    assert (
        replace(run, fp8=in_fp8.fp8).options().items() >= {"quantization": "fp8_w8a8", "kv_cache_dtype": "fp8"}.items()
    )


def test_no_load_is_served_faster_than_the_hardware_computes() -> None:
    requests = [Request(0, [1] * 10, 1), Request(1, [1] * 10, 3)]
    prompts, tokens = 2 * LLAMA_8B.prefill_flops(1, 10), 2 * LLAMA_8B.prefill_flops(1, 1)
    # The first output token is the prompt's; of the others, one sees 11 tokens and one 12.
    assert serving_load.limit_s(LLAMA_8B, requests, Ceilings(copy=1e30, matmul=1.0)) == pytest.approx(prompts + tokens)
    read = 23 * LLAMA_8B.kv_bytes_per_token
    assert serving_load.limit_s(LLAMA_8B, requests, Ceilings(copy=1.0, matmul=1e30)) == pytest.approx(read)


@pytest.mark.parametrize(
    ("parse", "arguments"),
    [
        (kernels.parse, ["--groups", "decode,other"]),
        (serve.parse, ["--shapes", "other"]),
        (serve.parse, ["--requests", "0"]),
    ],
)
def test_wrong_arguments_are_refused(parse: Any, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert ended.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_ceilings_are_measured_with_any_group() -> None:
    assert [group.name for group in kernels.parse(["--groups", "linears"]).groups] == ["ceilings", "linears"]


# ---------------------------------------------------------------- tests on the GPU


JUNIT = """<testsuites><testsuite><testcase name="a[1]" time="0.5"/>
<testcase name="b" time="2"><failure message="assert">CUDA error: an illegal memory access</failure></testcase>
<testcase name="c" time="0"><skipped message="no fp8"/></testcase></testsuite></testsuites>"""


def test_results_of_tests_are_read_and_summed_up(tmp_path: Path) -> None:
    (tmp_path / "in.xml").write_text(JUNIT, encoding="utf-8")
    found = tests.read_junit(tmp_path / "in.xml", "tests/x.py::b")
    assert [(test.file, test.name, test.status) for test in found] == [
        ("tests/x.py", "a[1]", "passed"), ("tests/x.py", "b", "failed"), ("tests/x.py", "c", "skipped"),
    ]  # fmt: skip
    assert [test.is_broken for test in found] == [False, True, False]
    tests.write(found, tmp_path)
    assert "== all: 1 passed, 1 failed, 1 skipped" in (tmp_path / "summary.txt").read_text(encoding="utf-8")
    assert "illegal memory access" in (tmp_path / "failures.txt").read_text(encoding="utf-8")
    again = tests.read_junit(tmp_path / "junit.xml", "tests/x.py")
    assert [test.status for test in again] == ["passed", "failed", "skipped"]


def test_files_are_run_with_the_golden_ones(tmp_path: Path) -> None:
    files = tests.test_files()
    assert tests.GOLDEN in files
    assert "tests/executor_svc/gpu/kernels/attention/test_attention.py" in files
    asked = tests.command("a.py", tmp_path, "fp8", 3)
    assert asked[3:5] == ["a.py", "-q"]
    assert {"-W", "default", "-n", "3", "-k", "fp8"} <= set(asked)


def test_a_test_that_failed_with_its_process_may_pass_alone() -> None:
    failed = tests.Test("f.py", "t", "failed", 1.0, "CUDA error")
    alone = tests.Test("f.py", "t", "passed", 2.0)
    assert tests._both(failed, alone).status == "passed"
    assert "note: f.py::t: it failed after" in tests.summary([tests._both(failed, alone)])
    assert tests._both(failed, replace(alone, status="failed", text="wrong")).text == "(alone)\nwrong"


# ---------------------------------------------------------------- tiny runs


def child(*arguments: str, packages: tuple[Path, ...] = ()) -> list[dict[str, Any]]:
    """What a group's process says, under Triton's interpreter, with these folders of packages before all others."""
    path = os.pathsep.join(map(str, (*packages, ROOT, ROOT / "client")))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    asked = json.dumps({"ceilings": {"copy": 1e9, "read": 1e9, "matmul": 1e9}, "end_at": FAR})
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.child", *arguments, "--tiny"],
        input=asked + "\n", capture_output=True, text=True, cwd=ROOT, env=environment, check=False, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "metric"), [("prefill", "tflop_per_s"), ("tune-decode", "us"), ("linears", "speedup"), ("ceilings", "ms")]
)
def test_kernels_run_in_a_process_of_their_own(group: str, metric: str) -> None:
    lines = child(group)
    assert lines[:2] == [{"loaded": True}, {"begun": 0}]
    found = [line for line in lines if "done" in line]
    assert len(found) == len(GROUPS[group].cases(True))
    assert all(line["metrics"][metric] > 0 and "error" not in line for line in found)


@pytest.mark.slow
def test_whole_steps_run_in_a_process_of_their_own() -> None:
    # Of the timed cases the first and the last alone: a decode of one sequence, and one with a prompt beside it.
    lines = child("steps-0.6b", "--every", "4")
    assert [line for line in lines if "done" not in line] == [{"loaded": True}, {"begun": 0}, {"begun": 4}]
    found = [line for line in lines if "done" in line]
    assert all(line["metrics"]["percent_of_limit"] > 0 and "error" not in line for line in found)


@pytest.mark.slow
def test_traces_of_whole_steps_want_a_device() -> None:
    found = [line for line in child("steps-0.6b", "--start", "5", "--every", "8") if "done" in line]
    assert [line["skipped"] for line in found] == ["the trace has nothing of a device"]


@pytest.mark.slow
def test_decode_is_timed_beside_flashinfer(tmp_path: Path) -> None:
    wrapper = "from tests.helpers.stand_in_flashinfer import BatchDecodeWithPagedKVCacheWrapper\n"
    (tmp_path / "flashinfer.py").write_text(wrapper, encoding="utf-8")
    lines = child("flashinfer", packages=(tmp_path,))
    found = [line["metrics"] for line in lines if "done" in line]
    assert len(found) == 2
    for each in found:
        best = min(each["cuda_cores_us"], each["tensor_cores_us"])
        assert each["ratio"] == pytest.approx(each["us"] / best)
        assert each["flashinfer_percent_of_copy"] == pytest.approx(each["percent_of_copy"] * each["ratio"])


@pytest.mark.slow
def test_without_flashinfer_its_group_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "flashinfer.py").write_text("raise ModuleNotFoundError('not here')\n", encoding="utf-8")
    said = child("flashinfer", packages=(tmp_path,))[2:]
    assert said == [
        {"done": 0, "metrics": {}, "skipped": "no FlashInfer: ModuleNotFoundError: not here", "ends_group": True}
    ]


@pytest.mark.slow
def test_both_services_are_served_and_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    assert serve.main(["--trial", "--no-peer"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "gpu_serving.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["params"]["case"] for row in rows] == [
        "start", "all at once, finished results", "the peer's requests", "decode steps",
        "device between steps, torch.profiler", "all at once, a stream each",
    ]  # fmt: skip
    assert all(row["medians"] for row in rows)
    assert rows[3]["medians"]["steps"] > 10
    assert (tmp_path / "trace-tiny.json.gz").stat().st_size > 0
