"""The GPU benchmarks' kernels without a GPU: shapes, cases, processes, rows, tables, and tiny runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.common.rows import ROOT, BenchmarkError
from benchmarks.gpu import environment
from benchmarks.gpu.cases import Bench, Case, Ceilings, Goal, Group, HostClock, Outcome, Unavailable, run_cases
from benchmarks.gpu.kernels import group_process, part
from benchmarks.gpu.kernels.attention import attention
from benchmarks.gpu.kernels.attention.attention_launch import Sizes
from benchmarks.gpu.kernels.ceilings import ceilings_of
from benchmarks.gpu.kernels.part import GROUPS
from benchmarks.gpu.kernels.steps import driver_options
from benchmarks.gpu.shapes import LLAMA_8B, QWEN3_06B, SHAPES, write_config
from executor_svc.config import ExecutorConfig
from executor_svc.models.registry import ARCHITECTURES

FAR = time.monotonic() + 1e6
CPU = torch.device("cpu")


# ---------------------------------------------------------------- shapes


def test_shapes_have_the_models_sizes() -> None:
    # All parameters but the norms' 266,240 and the embedding table of the untied one.
    assert LLAMA_8B.layer_parameters + 2 * LLAMA_8B.head_parameters == 8_030_261_248 - 266_240
    assert QWEN3_06B.layer_parameters + QWEN3_06B.head_parameters == 596_049_920 - 65_536
    assert LLAMA_8B.kv_bytes_per_token == 128 * 1024
    read = 2 * (8_030_261_248 - 266_240 - LLAMA_8B.head_parameters)
    assert LLAMA_8B.decode_bytes(16, 1000) == read + 16 * 1000 * 128 * 1024
    # Twice the parameters for each token, and what attention adds at 8k: a seventh.
    per_token = LLAMA_8B.prefill_flops(1, 8192) / 8192
    assert 1.1 < per_token / (2 * LLAMA_8B.layer_parameters) < 1.2
    assert LLAMA_8B.prefill_flops(8, 1024) < LLAMA_8B.prefill_flops(1, 8192)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=lambda shape: shape.name)
def test_the_executor_reads_the_configs(shape: Any, tmp_path: Path) -> None:
    config = json.loads((write_config(shape, tmp_path) / "config.json").read_text(encoding="utf-8"))
    spec = ARCHITECTURES[config["architectures"][0]](config)
    assert spec.hidden_size == config["hidden_size"]
    assert spec.context_limit == config["max_position_embeddings"]
    options = driver_options(256, 1024, tiny=False)
    assert ExecutorConfig(model=str(tmp_path), **options).max_num_batched_tokens == 8192
    # Room for 256 sequences as long as they become, and for one of 8k tokens.
    assert options["num_gpu_blocks"] * 16 > 256 * (1024 + 80)
    assert options["max_model_len"] > 8192


# ---------------------------------------------------------------- cases


@pytest.mark.parametrize("tiny", [False, True])
def test_cases_have_names_and_parameters_of_their_own(tiny: bool) -> None:
    for group in GROUPS.values():
        cases = group.cases(tiny)
        assert len({case.name for case in cases}) == len(cases) > 0, group.name
        json.dumps([dict(case.params) for case in cases])
    assert list(GROUPS)[:3] == ["ceilings", "decode", "prefill"]


def test_decode_covers_all_batches() -> None:
    params = [case.params for case in attention.decode_cases(False)]
    found = {(each["kv"], each["gqa"], each["batch"], each["context"]) for each in params}
    assert len(found) == 2 * 2 * 5 * 4
    assert {("bf16", 8, 256, 32768), ("fp8", 4, 1, 1024)} <= found
    assert [each["kv"] for each in params[:80]] == ["bf16"] * 40 + ["fp8"] * 40
    assert [(each["batch"], each["num_tokens"]) for each in params[80:]] == [(1, 6), (4, 6), (16, 6), (64, 6)]


@pytest.mark.slow
def test_listing_cases_imports_no_kernel() -> None:
    code = (
        "import sys; from benchmarks.gpu.kernels.part import ORDER; "
        "[g.cases(t) for g in ORDER for t in (False, True)]; "
        "sys.exit('executor_svc.gpu.kernels.attention.attention' in sys.modules or 'triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_operations_and_bytes_of_attention() -> None:
    whole = Sizes(1, 1024, num_tokens=1024)
    assert attention.flops(whole) == 4 * 32 * 128 * 1024 * 1025 // 2
    # Two chunks are the whole.
    parts = (Sizes(1, 512, num_tokens=512), Sizes(1, 1024, num_tokens=512))
    assert sum(attention.flops(part) for part in parts) == attention.flops(whole)
    assert Sizes(4, 1000, fp8=True).kv_bytes * 2 == Sizes(4, 1000).kv_bytes == 4 * 1000 * 4096


def test_goals_are_judged() -> None:
    assert Goal("a", at_least=2).judge({"a": 2.0}) == "met"
    assert Goal("a", at_least=2).judge({"a": 1.9}) == "missed"
    assert Goal("a", at_most=2).judge({"a": 2.1}) == "missed"
    assert Goal("a", at_most=2).judge({"b": 1.0}) == ""


def test_ceilings_that_were_not_measured_are_defaults() -> None:
    assert not ceilings_of({"copy": {"tb_per_s": 4.0}}).measured
    found = ceilings_of({"copy": {"tb_per_s": 4.0}, "read": {"tb_per_s": 4.5}, "matmul": {"tflop_per_s": 700.0}})
    assert (found.copy, found.read, found.matmul, found.measured) == (4e12, 4.5e12, 7e14, True)


def bench() -> Bench:
    return Bench(torch.device("cpu"), HostClock())


def group_of(*works: Any) -> Group:
    cases = [Case(f"case {index}", {"index": index}, work, 1.0) for index, work in enumerate(works)]
    return Group("group", "title", lambda tiny: cases, 10.0)


def failing(error: Exception) -> Any:
    def work(_: Bench) -> Any:
        raise error

    return work


def fine(_: Bench) -> dict[str, float]:
    return {"ms": 1.5}


def test_a_case_that_fails_is_one_line_and_the_rest_goes_on() -> None:
    group = group_of(fine, failing(torch.OutOfMemoryError("CUDA out of\n memory")), fine)
    found = [outcome for _, outcome in run_cases(group, bench(), 0, FAR) if outcome]
    assert [outcome.metrics for outcome in found] == [{"ms": 1.5}, {}, {"ms": 1.5}]
    assert found[1].error == "OutOfMemoryError: CUDA out of memory"


@pytest.mark.parametrize(
    "error", [torch.AcceleratorError("CUDA error"), RuntimeError("Triton Error [CUDA]: an illegal memory access was …")]
)
def test_a_lost_device_leaves_the_rest_to_another_process(error: Exception) -> None:
    found = list(run_cases(group_of(failing(error), fine), bench(), 0, FAR))
    assert [index for index, _ in found] == [0, 0]


def test_cases_without_time_are_skipped_and_processes_share_cases() -> None:
    found = [outcome for _, outcome in run_cases(group_of(fine, fine), bench(), 1, time.monotonic() + 0.5) if outcome]
    assert [outcome.case for outcome in found] == ["case 1"]
    assert "it takes 1" in found[0].skipped
    every_second = [outcome.case for _, outcome in run_cases(group_of(*[fine] * 5), bench(), 1, FAR, 2) if outcome]
    assert every_second == ["case 1", "case 3"]


def test_what_every_case_lacks_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = failing(Unavailable("no module"))
    found = [outcome for _, outcome in run_cases(group_of(lacking, lacking), bench(), 0, FAR) if outcome]
    assert [(outcome.skipped, outcome.ends_group) for outcome in found] == [("no module", True)]
    messages = {"begun": 0}, {"done": 0, "metrics": {}, "skipped": "no module", "ends_group": True}
    assert outcomes(monkeypatch, 2, Process(LOADED, *messages, None)) == [
        Outcome("group", "case 0", {"index": 0}, skipped="no module", ends_group=True)
    ]


def test_an_object_that_could_not_be_made_is_not_tried_again() -> None:
    kept, tries = bench(), []

    def make() -> int:
        tries.append(1)
        raise BenchmarkError("no")

    for _ in range(2):
        with pytest.raises(BenchmarkError, match="no"):
            kept.cached("it", make)
    assert len(tries) == 1


class Process:
    """Stands in for a group's process: sends these messages, then ends (None) or hangs."""

    def __init__(self, *lines: dict[str, Any] | None) -> None:
        self._lines: Iterator[dict[str, Any] | None] = iter(lines)

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        line = next(self._lines, {"silent": True})
        if line == {"silent": True}:
            raise TimeoutError
        return line

    def go(self, ceilings: Ceilings, end_at: float) -> None: ...

    def wait(self) -> int:
        return -11

    def stop(self) -> int:
        return -9


def outcomes(monkeypatch: pytest.MonkeyPatch, num_cases: int, *processes: Process) -> list[Outcome]:
    waiting = iter(processes)
    monkeypatch.setattr(group_process, "GroupProcess", lambda *arguments: next(waiting))
    return [outcome for _, outcome in group_process.outcomes(group_of(*[fine] * num_cases), True, Ceilings(), FAR)]


LOADED = {"loaded": True}


def done(index: int, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"begun": index}, {"done": index, "metrics": {"ms": 1.0}, **fields}


def test_a_process_that_dies_fails_its_case_only(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Process(LOADED, *done(0), {"begun": 1}, None)
    second = Process(LOADED, *done(2), None)
    found = outcomes(monkeypatch, 3, first, second)
    assert [outcome.metrics for outcome in found] == [{"ms": 1.0}, {}, {"ms": 1.0}]
    assert found[1].error == "the process ended, with -11"


def test_a_process_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    found = outcomes(monkeypatch, 2, Process(LOADED, {"begun": 0}), Process(LOADED, *done(1), None))
    assert [bool(outcome.error) for outcome in found] == [True, False]
    assert "no message" in found[0].error


def test_a_process_that_ends_after_an_error_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = {"metrics": {}, "error": "AcceleratorError: …"}
    first = Process(LOADED, {"begun": 0}, {"done": 0, **lost}, None)
    found = outcomes(monkeypatch, 2, first, Process(LOADED, *done(1), None))
    assert [outcome.error for outcome in found] == ["AcceleratorError: …", ""]


def test_a_group_that_cannot_load_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    found = outcomes(monkeypatch, 2, Process(None), Process(None))
    assert all("while it loaded" in outcome.error for outcome in found)
    # Still loading when time is up.
    assert [outcome.skipped for outcome in outcomes(monkeypatch, 1, Process())] == ["no time was left"]


# ---------------------------------------------------------------- rows and tables


OUTCOME = Outcome("decode", "a case", {"batch": 4}, {"us": 12.345678, "percent_of_copy": 91.0})


def test_a_row_names_case_machine_and_versions() -> None:
    row = json.loads(environment.row_of("gpu_kernels", OUTCOME, 7, 0.5).to_json())
    assert row["benchmark"] == "gpu_kernels"
    assert row["params"] == {"group": "decode", "case": "a case", "batch": 4}
    assert row["medians"] == {"us": 12.35, "percent_of_copy": 91.0}
    assert {"gpu", "cpu"} <= row["machine"].keys()
    assert {"torch", "triton", "commit"} <= row["versions"].keys()
    assert row["note"].startswith("disturbed")


def test_a_table_has_all_metrics_goals_and_failures() -> None:
    goal = Goal("percent_of_copy", at_least=90)
    rows = [(OUTCOME, goal), (replace(OUTCOME, case="slow", metrics={"us": 1e5, "extra": 0.25}), goal)]
    rows.append((replace(OUTCOME, case="broken", metrics={}, error="why"), goal))
    lines = environment.table("title", rows).splitlines()
    assert lines[0] == "== title"
    assert lines[1].split() == ["case", "us", "percent_of_copy", "extra", "goal"]
    assert "met: percent_of_copy >= 90" in lines[2]
    assert lines[3].split() == ["slow", "100000", "0.2500"]
    assert lines[4] == "decode: broken: FAILED: why"
    assert environment.as_line(OUTCOME, goal).endswith("(goal met)")


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.12345, "0.1235"), (12.3456, "12.35"), (99999.6, "100000"), (1.2e-7, "1.2e-07")]
)
def test_numbers_have_four_digits(value: float, text: str) -> None:
    assert environment.number(value) == text


def test_the_best_tiles_are_named() -> None:
    rows = [
        Outcome("tune", f"{batch} {tile}", {"batch": batch, "tile": tile}, {"x": speed})
        for batch, tile, speed in ((1, 32, 2.0), (1, 64, 3.0), (4, 32, 9.0))
    ]
    assert environment.best_of(rows, ["batch"], "x") == ["best: 1 64, x 3.000", "best: 4 32, x 9.000"]


def test_all_groups_are_summed_up() -> None:
    broken = replace(OUTCOME, metrics={}, error="why")
    table = part.tables([(GROUPS["decode"], case, OUTCOME) for case in attention.decode_cases(True)])
    assert table.startswith("== decode: decode attention")
    assert table.endswith("3 cases: 0 failed, 0 skipped; goals: 2 met, 0 missed")
    assert "1 cases: 1 failed" in environment.summary([(broken, None)])


# ---------------------------------------------------------------- tiny runs


def child(*arguments: str, packages: tuple[Path, ...] = ()) -> list[dict[str, Any]]:
    """The messages of a group's process under Triton's interpreter; `packages` are folders that are searched first."""
    path = os.pathsep.join(map(str, (*packages, ROOT, ROOT / "client")))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    message = json.dumps({"ceilings": {"copy": 1e9, "read": 1e9, "matmul": 1e9}, "end_at": FAR})
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.kernels.child", *arguments, "--tiny"],
        input=message + "\n", capture_output=True, text=True, cwd=ROOT, env=environment, check=False, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "metric"),
    [
        ("prefill", "tflop_per_s"),
        pytest.param("tune-decode", "us", marks=pytest.mark.long),
        pytest.param("tune-split", "us", marks=pytest.mark.long),
        pytest.param("linears", "speedup", marks=pytest.mark.long),
        pytest.param("few-bits", "speedup", marks=pytest.mark.long),
        pytest.param("lora", "overhead_percent", marks=pytest.mark.long),
        pytest.param("experts", "us", marks=pytest.mark.long),
        pytest.param("swaps", "percent_of_link", marks=pytest.mark.long),
        ("exact-products", "equal_percent"),
        pytest.param("exact-cublaslt", "us", marks=pytest.mark.long),
        pytest.param("exact-attention", "ratio", marks=pytest.mark.long),
        ("skinny", "speedup"),
        pytest.param("tune-skinny", "us", marks=pytest.mark.long),
        ("ceilings", "ms"),
    ],
)
def test_kernels_run_in_a_separate_process(group: str, metric: str) -> None:
    lines = child(group)
    assert lines[:2] == [{"loaded": True}, {"begun": 0}]
    found = [line for line in lines if "done" in line]
    assert len(found) == len(GROUPS[group].cases(True))
    assert all(line["metrics"][metric] > 0 and "error" not in line for line in found)
    if group == "prefill":
        both = [line["metrics"].get("triton_ms", 0) > 0 for line in found]
        assert both == [False, False, True, True, True, True], "the last ones by the Gluon kernel's twin"


@pytest.mark.slow
def test_whole_steps_run_in_a_separate_process() -> None:
    # Only the first and the last of the timed cases: a decode of one sequence, and one beside a prompt.
    lines = child("steps-0.6b", "--every", "4")
    assert [line for line in lines if "done" not in line] == [{"loaded": True}, {"begun": 0}, {"begun": 4}]
    found = [line for line in lines if "done" in line]
    assert all(line["metrics"]["percent_of_limit"] > 0 and "error" not in line for line in found)


@pytest.mark.slow
@pytest.mark.long
def test_whole_steps_of_fused_layers() -> None:
    found = [line for line in child("steps-0.6b-skinny", "--every", "2") if "done" in line]
    assert found[0]["metrics"]["percent_of_limit"] > 0
    assert "error" not in found[0]


@pytest.mark.slow
@pytest.mark.long
def test_traces_of_whole_steps_need_a_device() -> None:
    found = [line for line in child("steps-0.6b", "--start", "5", "--every", "8") if "done" in line]
    assert [line["skipped"] for line in found] == ["the trace has no work of a device"]


@pytest.mark.slow
def test_decode_is_measured_beside_flashinfer(tmp_path: Path) -> None:
    wrapper = "from tests.helpers.executor.stand_in_flashinfer import BatchDecodeWithPagedKVCacheWrapper\n"
    (tmp_path / "flashinfer.py").write_text(wrapper, encoding="utf-8")
    lines = child("flashinfer", packages=(tmp_path,))
    found = [line["metrics"] for line in lines if "done" in line]
    assert len(found) == 2
    for each in found:
        best = min(each["cuda_cores_us"], each["tensor_cores_us"])
        assert each["ratio"] == pytest.approx(each["us"] / best)
        assert each["flashinfer_percent_of_copy"] == pytest.approx(each["percent_of_copy"] * each["ratio"])
