"""The GPU benchmarks' serving without a GPU: traces, steps, requests, stages, and a tiny run on the CPU."""

from __future__ import annotations

import gzip
import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.common.workload import Request
from benchmarks.gpu.__main__ import parse
from benchmarks.gpu.cases import Ceilings, Goal, device_time, read_trace
from benchmarks.gpu.environment import Output
from benchmarks.gpu.kernels.plan_driver import _batches, _scheduled
from benchmarks.gpu.serving import part, stages
from benchmarks.gpu.serving.run import Run
from benchmarks.gpu.serving.stages import decode_steps, step_metrics
from benchmarks.gpu.shapes import LLAMA_8B, TINY

FAR = time.monotonic() + 1e6


# ---------------------------------------------------------------- traces and steps


def event(start: float, end: float, kind: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "ts": start, "dur": end - start, "name": "a"}


def test_idle_time_is_time_without_work() -> None:
    events = [event(0, 10), event(5, 20, "gpu_memcpy"), event(30, 40), event(0, 100, "cpu_op"), {"ph": "M"}]
    found = device_time(events, left_out=0.0)
    assert found is not None
    assert (found.span_s, found.busy_s, found.num_kernels) == (pytest.approx(4e-5), pytest.approx(3e-5), 3)
    assert found.idle_share == pytest.approx(0.25)
    late = device_time(events, left_out=0.5)
    assert late is not None
    assert late.idle_share == 0
    assert device_time([event(0, 5, "cpu_op")]) is None


def test_traces_may_be_compressed() -> None:
    content = json.dumps({"traceEvents": [event(0, 1)]}).encode()
    assert read_trace(content) == read_trace(gzip.compress(content)) == [event(0, 1)]


def record(step_id: int, applied_ms: float, num_tokens: list[int], joined: bool = False) -> Any:
    return SimpleNamespace(
        step_id=step_id, applied_ns=applied_ms * 1e6, sequence_ids=range(len(num_tokens)), num_tokens=num_tokens,
        joined=[1] if joined else [],
    )  # fmt: skip


def test_only_steps_in_which_all_decode_are_measured() -> None:
    records = [
        record(1, 0, [9, 9]),
        record(2, 5, [1, 1]),
        record(3, 7, [1, 1]),
        record(4, 8, [1]),
        record(5, 9, [1, 1]),
    ]
    records += [record(6, 13, [1, 1]), record(7, 14, [1, 1], joined=True)]
    assert [each.step_id for each in decode_steps(records, 2)] == [2, 3, 5, 6]
    # From 5 to 7 ms and from 9 to 13 ms; step 4 lies between steps 3 and 5.
    assert step_metrics(records, 2) == {"step_ms": 3.0, "steps": 2.0}
    assert step_metrics(records, 3) == {}


def test_prompts_are_split_into_steps() -> None:
    chunks = [(0, 0, 8), (0, 8, 4), (1, 0, 8), (1, 8, 4)]
    steps = _batches(chunks, 12)
    assert steps == [[(0, 0, 8)], [(0, 8, 4), (1, 0, 8)], [(1, 8, 4)]]
    rows = _scheduled(steps[1], 12)
    expected = {"scheduled_slots": [0, 1], "scheduled_num_tokens": [4, 8], "scheduled_samples": [True, False]}
    assert rows == expected


# ---------------------------------------------------------------- serving


def test_requests_follow_from_their_seed() -> None:
    requests = stages.make_requests(1000, 1, 128256)
    assert requests == stages.make_requests(1000, 1, 128256)
    assert requests[:10] == stages.make_requests(10, 1, 128256)
    lengths = [each.output_len for each in requests] + [len(each.prompt) for each in requests]
    assert (min(lengths), max(lengths)) == (100, 1024)
    assert 540 < sum(lengths) / 2000 < 584
    some = stages.sample_of(requests, 200, 1)
    assert len(some) == 200
    assert some == stages.sample_of(requests, 200, 1) != stages.sample_of(requests, 200, 2)
    assert [each.request_id for each in some] == sorted(each.request_id for each in some)
    assert {(len(each.prompt), each.output_len) for each in stages.equal_requests(4, 8, 60, 1, 512)} == {(8, 60)}


def run_of(tmp_path: Path, seconds: float = 100.0) -> Run:
    options = parse(["serve", "--trial"])
    return Run(TINY, part.make_load(options, 512), "cpu", time.monotonic() + seconds, Output(tmp_path, tmp_path))


def test_stages_are_rows_errors_or_skipped(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    assert run.stage("fine", 1.0, lambda: {"ratio": 4.5}, run.load.sample, Goal("ratio", at_least=4)) == {"ratio": 4.5}
    assert run.stage("broken", 1.0, lambda: 1 / 0) == {}
    assert run.stage("late", 1000.0, lambda: {"a": 1.0}) == {}
    rows = [json.loads(line) for line in (tmp_path / "gpu_serving.jsonl").read_text(encoding="utf-8").splitlines()]
    assert rows[0]["medians"] == {"ratio": 4.5}
    assert rows[0]["params"]["requests"] == 3
    outcomes = [outcome for outcome, _ in run.found]
    assert outcomes[1].error == "ZeroDivisionError: division by zero"
    assert outcomes[2].skipped.endswith("s were left, it takes 1000")
    assert len(rows) == 1


def test_the_longest_request_fits(tmp_path: Path) -> None:
    options = parse(["serve", "--requests", "50"])
    assert [shape.name for shape in options.shapes] == ["llama-3.1-8b", "qwen3-0.6b"]
    run = Run(LLAMA_8B, part.make_load(options, 128256), "cuda", FAR, Output(tmp_path, tmp_path))
    longest = max(len(each.prompt) + each.output_len for each in run.load.requests)
    assert longest <= run.options()["max_model_len"] < longest + 16
    assert run.options()["max_num_seqs"] == 512
    assert "kv_cache_dtype" not in run.options()
    in_fp8 = parse(["serve", "--fp8"])
    assert in_fp8.no_peer
    assert (
        replace(run, fp8=in_fp8.fp8).options().items() >= {"quantization": "fp8_w8a8", "kv_cache_dtype": "fp8"}.items()
    )


def test_the_limit_of_a_load() -> None:
    requests = [Request(0, [1] * 10, 1), Request(1, [1] * 10, 3)]
    prompts, tokens = 2 * LLAMA_8B.prefill_flops(1, 10), 2 * LLAMA_8B.prefill_flops(1, 1)
    # The first output token is the prompt's; of the others, one sees 11 tokens and one 12.
    assert stages.limit_s(LLAMA_8B, requests, Ceilings(copy=1e30, matmul=1.0)) == pytest.approx(prompts + tokens)
    read = 23 * LLAMA_8B.kv_bytes_per_token
    assert stages.limit_s(LLAMA_8B, requests, Ceilings(copy=1.0, matmul=1e30)) == pytest.approx(read)


# ---------------------------------------------------------------- a tiny run


@pytest.mark.slow
def test_all_stages_run(tmp_path: Path) -> None:
    assert part.run(parse(["serve", "--trial", "--no-peer", "--out", str(tmp_path)])) == 0
    rows = [json.loads(line) for line in (tmp_path / "gpu_serving.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["params"]["case"] for row in rows] == [
        "start", "all at once, finished results", "the peer's requests", "decode steps",
        "device between steps, torch.profiler", "all at once, a stream each",
    ]  # fmt: skip
    assert all(row["medians"] for row in rows)
    assert rows[3]["medians"]["steps"] > 10
    assert (tmp_path / "trace-tiny.json.gz").stat().st_size > 0


@pytest.mark.slow
@pytest.mark.long
def test_drafts_run_beside_none(tmp_path: Path) -> None:
    assert part.run(parse(["serve", "--trial", "--features", "drafts", "--out", str(tmp_path)])) == 0
    rows = [json.loads(line) for line in (tmp_path / "gpu_serving.jsonl").read_text(encoding="utf-8").splitlines()]
    counts = (1, 4, 16)
    names = [f"{count} sequences, {kind}" for kind in ("off", "ngram", "drafts beside none") for count in counts]
    assert [row["params"]["case"] for row in rows] == names
    assert [row["params"]["speculative"] for row in rows[:6]] == ["off"] * 3 + ["ngram"] * 3
    drafted = rows[3]["medians"]
    assert 0 < drafted["acceptance"] <= 1
    assert drafted["tokens_per_step"] > rows[0]["medians"]["tokens_per_step"]


@pytest.mark.slow
@pytest.mark.long
def test_a_head_runs_beside_none(tmp_path: Path) -> None:
    assert part.run(parse(["serve", "--trial", "--features", "heads", "--out", str(tmp_path)])) == 0
    rows = [json.loads(line) for line in (tmp_path / "gpu_serving.jsonl").read_text(encoding="utf-8").splitlines()]
    medians = {row["params"]["case"]: row["medians"] for row in rows}
    assert len(medians) == 3 * 6
    for count in (1, 4, 16):
        wrong, right = (medians[f"{count} sequences, head, {kind} right"] for kind in ("none", "all"))
        assert 0 <= wrong["acceptance"] < right["acceptance"] <= 1
        assert medians[f"{count} sequences, head, none right beside none"]["gain_at_70"] > 0
        assert medians[f"{count} sequences, head, all right beside none"]["ratio"] > 0
    alone = (medians[f"1 sequences, {kind}"] for kind in ("off", "head, none right", "head, all right"))
    off, wrong, right = (metrics["tokens_per_step"] for metrics in alone)
    assert off == wrong < right


@pytest.mark.slow
@pytest.mark.long
def test_adapters_and_grammars_run_beside_none(tmp_path: Path) -> None:
    assert part.run(parse(["serve", "--trial", "--features", "adapters,grammars", "--out", str(tmp_path)])) == 0
    rows = [json.loads(line) for line in (tmp_path / "gpu_serving.jsonl").read_text(encoding="utf-8").splitlines()]
    names = [row["params"]["case"].removeprefix("4 sequences, ") for row in rows]
    kinds = ("unused", "1 adapter", "16")
    expected = [f"adapters: {each}" for each in ("base", *kinds)]
    expected += [f"adapters: {each} beside base" for each in kinds]
    expected += [f"grammars: {each}" for each in ("none", "all", "half")]
    assert names == [*expected, "grammars beside none"]
    assert all(row["medians"] for row in rows)


@pytest.mark.slow
@pytest.mark.long
def test_an_executor_that_is_killed_loses_no_token(tmp_path: Path) -> None:
    assert part.run(parse(["serve", "--trial", "--exact", "--features", "failover", "--out", str(tmp_path)])) == 0
    rows = [json.loads(line) for line in (tmp_path / "gpu_serving.jsonl").read_text().splitlines()]
    assert [row["params"]["case"] for row in rows] == [
        "SIGKILL of the executor, exact", "tokens after SIGKILL, exact"
    ]  # fmt: skip
    waits, tokens = (row["medians"] for row in rows)
    assert waits["tokens"] == 3 * 1024
    assert waits["longest_wait_s"] > 0.1, "a process was started meanwhile"
    assert tokens == {"different_tokens": 0}


def test_published_goals_are_for_their_own_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "about_gpu", lambda: {"gpu": "NVIDIA H200"})
    options = parse(["serve", "--fp8", "--equal", "1000", "--requests", "3"])
    load = part.make_load(options, LLAMA_8B.vocab_size)
    assert {(len(each.prompt), each.output_len) for each in load.requests} == {(1000, 1000)}
    output = Output.of("serve", tmp_path, trial=True)
    run = Run(LLAMA_8B, load, "cuda", 0.0, output, fp8=True)
    assert stages._goal(run) == Goal("tokens_per_s", at_least=17744)
    assert stages._goal(replace(run, fp8=False)) is None, "too few requests for a goal"
    many = replace(load, requests=[*load.requests] * 400)
    assert stages._goal(replace(run, fp8=False, load=many)) == Goal("tokens_per_s", at_least=16000)


@pytest.mark.parametrize(("tokens_per_s", "traced"), [(15000.0, True), (18000.0, False)])
def test_a_missed_goal_leaves_a_trace(
    tokens_per_s: float, traced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the first stage alone, too."""
    monkeypatch.setattr(stages, "about_gpu", lambda: {"gpu": "NVIDIA H200"})
    monkeypatch.setattr(stages, "_finished", lambda *_: {"tokens_per_s": tokens_per_s})

    def start(run: Run, model: Path, stack: Any, started: list[Any]) -> dict[str, float]:
        started.append(SimpleNamespace(target=""))
        return {"start_s": 1.0}

    monkeypatch.setattr(stages, "_start", start)
    monkeypatch.setattr(stages, "_decode_steps", lambda run, services, *, traced: {"idle_percent": 50.0 * traced})
    load = part.make_load(parse(["serve", "--fp8", "--equal", "1000", "--requests", "3"]), LLAMA_8B.vocab_size)
    run = Run(LLAMA_8B, load, "cuda", FAR, Output.of("serve", tmp_path, trial=True), fp8=True)
    stages.serve_all(run, tmp_path, trial=False, with_peer=False, only_first=True)
    found = {outcome.case: outcome.metrics for outcome, _ in run.found}
    assert ("device between steps, torch.profiler" in found) == traced
    assert found.get("device between steps, torch.profiler", {"idle_percent": 50.0}) == {"idle_percent": 50.0}


def test_a_feature_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["serve", "--features", "beams"])
    assert (
        "--features: there is no 'beams'; there are drafts, heads, adapters, grammars, failover"
        in capsys.readouterr().err
    )
