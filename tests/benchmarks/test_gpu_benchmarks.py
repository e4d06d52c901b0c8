"""The benchmarks for a GPU, without one: wheels, shapes, cases, rows and tables, and what breaks and goes on."""

from __future__ import annotations

import json
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
from benchmarks.gpu import attention_cases, downloading, group_process, kernels, prepare, results
from benchmarks.gpu.attention_runs import Sizes
from benchmarks.gpu.cases import Bench, Case, Ceilings, Goal, Group, NotHere, Outcome, run_cases
from benchmarks.gpu.ceilings import ceilings_of
from benchmarks.gpu.groups import GROUPS, ORDER
from benchmarks.gpu.shapes import LLAMA_8B, QWEN3_06B, SHAPES, write_config
from benchmarks.gpu.step_cases import driver_options
from benchmarks.gpu.timing import HostClock
from executor_svc.config import ExecutorConfig
from executor_svc.models.registry import ARCHITECTURES

FAR = time.monotonic() + 1e6


# ---------------------------------------------------------------- wheels


def test_wheels_have_the_versions_of_the_constraints() -> None:
    names = prepare.names_in((prepare.HERE / "wheels.txt").read_text(encoding="utf-8"))
    found = prepare.pinned(names, (ROOT / "constraints.txt").read_text(encoding="utf-8"))
    assert len(found) == len(names) > 10
    assert "grpcio-status==1.76.0" in found
    assert "pydantic_core==2.50.4" in prepare.pinned(["pydantic-core"], "pydantic_core==2.50.4\n")
    for name, match in (("torch", "not to be carried"), ("nothing-there", "no version")):
        with pytest.raises(prepare.PrepareError, match=match):
            prepare.pinned([name], "torch==2.13.0")


def test_wheels_are_for_the_lent_machine() -> None:
    asked = downloading.command(["a==1"], Path("folder"))
    assert {"--no-deps", "--only-binary=:all:", "3.12", "manylinux2014_x86_64", "a==1"} <= set(asked)
    assert ".wheels/" in (prepare.HERE / ".gitignore").read_text(encoding="utf-8").splitlines()


def test_wheels_are_one_of_each_and_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_b-1.0-py3-none-any.whl").write_bytes(b"12345")
    assert prepare.check(tmp_path, ["a-b"]) == 5
    with pytest.raises(prepare.PrepareError, match=r"wheels\.txt: c"):
        prepare.check(tmp_path, ["a-b", "c"])
    monkeypatch.setattr(prepare, "MAX_BYTES", 4)
    with pytest.raises(prepare.PrepareError, match="more than 4"):
        prepare.check(tmp_path, ["a-b"])
    (tmp_path / "a_b-2.0-py3-none-any.whl").touch()
    with pytest.raises(prepare.PrepareError, match="several versions"):
        prepare.check(tmp_path, ["a-b"])


def test_the_script_says_what_it_takes() -> None:
    done = subprocess.run([prepare.HERE / "run.sh", "other"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert all(part in done.stderr for part in ("prepare", "tests", "kernels", "serve"))


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
    for group in (*ORDER, GROUPS["warm"]):
        cases = group.cases(tiny)
        assert len({case.name for case in cases}) == len(cases) > 0, group.name
        json.dumps([dict(case.params) for case in cases])
    assert list(GROUPS)[:3] == ["ceilings", "decode", "prefill"]


def test_decode_covers_the_goals_table() -> None:
    params = [case.params for case in attention_cases.decode_cases(False)]
    found = {(each["kv"], each["gqa"], each["batch"], each["context"]) for each in params}
    assert len(found) == 2 * 2 * 5 * 4
    assert {("bf16", 8, 256, 32768), ("fp8", 4, 1, 1024)} <= found
    assert [each["kv"] for each in params] == ["bf16"] * 40 + ["fp8"] * 40


@pytest.mark.slow
def test_listing_cases_imports_no_kernel() -> None:
    code = (
        "import sys; from benchmarks.gpu.groups import ORDER; [g.cases(t) for g in ORDER for t in (False, True)]; "
        "sys.exit('executor_svc.gpu.kernels.attention.attention' in sys.modules or 'triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_what_attention_computes_is_counted() -> None:
    whole = Sizes(1, 1024, num_tokens=1024)
    assert attention_cases.flops(whole) == 4 * 32 * 128 * 1024 * 1025 // 2
    # Two chunks are the whole.
    parts = (Sizes(1, 512, num_tokens=512), Sizes(1, 1024, num_tokens=512))
    assert sum(attention_cases.flops(part) for part in parts) == attention_cases.flops(whole)
    assert Sizes(4, 1000, fp8=True).kv_bytes * 2 == Sizes(4, 1000).kv_bytes == 4 * 1000 * 4096


def test_goals_are_judged() -> None:
    assert Goal("a", at_least=2).judge({"a": 2.0}) == "met"
    assert Goal("a", at_least=2).judge({"a": 1.9}) == "missed"
    assert Goal("a", at_most=2).judge({"a": 2.1}) == "missed"
    assert Goal("a", at_most=2).judge({"b": 1.0}) == ""


def test_ceilings_that_were_not_measured_are_known_ones() -> None:
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


def test_cases_without_time_are_skipped_and_may_be_shared() -> None:
    found = [outcome for _, outcome in run_cases(group_of(fine, fine), bench(), 1, time.monotonic() + 0.5) if outcome]
    assert [outcome.case for outcome in found] == ["case 1"]
    assert "it takes 1" in found[0].skipped
    every_second = [outcome.case for _, outcome in run_cases(group_of(*[fine] * 5), bench(), 1, FAR, 2) if outcome]
    assert every_second == ["case 1", "case 3"]


def test_what_all_cases_lack_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = failing(NotHere("no module"))
    found = [outcome for _, outcome in run_cases(group_of(lacking, lacking), bench(), 0, FAR) if outcome]
    assert [(outcome.skipped, outcome.ends_group) for outcome in found] == [("no module", True)]
    said = {"begun": 0}, {"done": 0, "metrics": {}, "skipped": "no module", "ends_group": True}
    assert told(monkeypatch, 2, Process(LOADED, *said, None)) == [
        Outcome("group", "case 0", {"index": 0}, skipped="no module", ends_group=True)
    ]


def test_what_could_not_be_made_is_not_tried_again() -> None:
    kept, tries = bench(), []

    def make() -> int:
        tries.append(1)
        raise BenchmarkError("no")

    for _ in range(2):
        with pytest.raises(BenchmarkError, match="no"):
            kept.keep("it", make)
    assert len(tries) == 1


class Process:
    """Stands in for a group's process: says these lines, then ends, or says nothing more."""

    def __init__(self, *lines: dict[str, Any] | None) -> None:
        self._lines: Iterator[dict[str, Any] | None] = iter(lines)

    def say(self, timeout_s: float) -> dict[str, Any] | None:
        line = next(self._lines, {"silent": True})
        if line == {"silent": True}:
            raise TimeoutError
        return line

    def go(self, ceilings: Ceilings, end_at: float) -> None: ...

    def wait(self) -> int:
        return -11

    def stop(self) -> int:
        return -9


def told(monkeypatch: pytest.MonkeyPatch, num_cases: int, *processes: Process) -> list[Outcome]:
    waiting = iter(processes)
    monkeypatch.setattr(group_process, "GroupProcess", lambda *arguments: next(waiting))
    return [outcome for _, outcome in group_process.outcomes(group_of(*[fine] * num_cases), True, Ceilings(), FAR)]


LOADED = {"loaded": True}


def done(index: int, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"begun": index}, {"done": index, "metrics": {"ms": 1.0}, **fields}


def test_a_process_that_dies_costs_its_case_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Process(LOADED, *done(0), {"begun": 1}, None)
    second = Process(LOADED, *done(2), None)
    found = told(monkeypatch, 3, first, second)
    assert [outcome.metrics for outcome in found] == [{"ms": 1.0}, {}, {"ms": 1.0}]
    assert found[1].error == "the process ended, with -11"


def test_a_process_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    found = told(monkeypatch, 2, Process(LOADED, {"begun": 0}), Process(LOADED, *done(1), None))
    assert [bool(outcome.error) for outcome in found] == [True, False]
    assert "nothing was heard" in found[0].error


def test_a_process_that_ends_after_an_error_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = {"metrics": {}, "error": "AcceleratorError: …"}
    first = Process(LOADED, {"begun": 0}, {"done": 0, **lost}, None)
    found = told(monkeypatch, 2, first, Process(LOADED, *done(1), None))
    assert [outcome.error for outcome in found] == ["AcceleratorError: …", ""]


def test_a_group_that_can_not_load_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    found = told(monkeypatch, 2, Process(None), Process(None))
    assert all("while it loaded" in outcome.error for outcome in found)
    # Still loading when time is up.
    assert [outcome.skipped for outcome in told(monkeypatch, 1, Process())] == ["no time was left"]


# ---------------------------------------------------------------- rows and tables


OUTCOME = Outcome("decode", "a case", {"batch": 4}, {"us": 12.345678, "percent_of_copy": 91.0})


def test_a_row_is_one_line_with_all_that_is_needed_to_judge_it() -> None:
    row = json.loads(results.json_line(results.KERNELS, OUTCOME, 7, 0.5))
    assert row["benchmark"] == "gpu_kernels"
    assert row["params"] == {"group": "decode", "case": "a case", "batch": 4}
    assert row["medians"] == {"us": 12.35, "percent_of_copy": 91.0}
    assert {"gpu", "cpu"} <= row["machine"].keys()
    assert {"torch", "triton", "commit"} <= row["versions"].keys()
    assert row["note"].startswith("disturbed")
    failed = json.loads(results.json_line(results.KERNELS, replace(OUTCOME, metrics={}, error="why"), 7))
    assert (failed["error"], failed["case"], "medians" in failed) == ("why", "a case", False)


def test_a_table_has_all_metrics_goals_and_failures() -> None:
    goal = Goal("percent_of_copy", at_least=90)
    rows = [(OUTCOME, goal), (replace(OUTCOME, case="slow", metrics={"us": 1e5, "extra": 0.25}), goal)]
    rows.append((replace(OUTCOME, case="broken", metrics={}, error="why"), goal))
    lines = results.table("title", rows).splitlines()
    assert lines[0] == "== title"
    assert lines[1].split() == ["case", "us", "percent_of_copy", "extra", "goal"]
    assert "met: percent_of_copy >= 90" in lines[2]
    assert lines[3].split() == ["slow", "100000", "0.2500"]
    assert lines[4] == "decode: broken: FAILED: why"
    assert results.said(OUTCOME, goal).endswith("(goal met)")


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.12345, "0.1235"), (12.3456, "12.35"), (99999.6, "100000"), (1.2e-7, "1.2e-07")]
)
def test_numbers_have_four_digits(value: float, text: str) -> None:
    assert results.number(value) == text


def test_the_best_tiles_are_named() -> None:
    rows = [
        Outcome("tune", f"{batch} {tile}", {"batch": batch, "tile": tile}, {"x": speed})
        for batch, tile, speed in ((1, 32, 2.0), (1, 64, 3.0), (4, 32, 9.0))
    ]
    assert results.best_of(rows, ["batch"], "x") == ["best: 1 64, x 3.000", "best: 4 32, x 9.000"]


def test_the_whole_of_it_is_summed_up() -> None:
    broken = replace(OUTCOME, metrics={}, error="why")
    table = kernels.tables([(GROUPS["decode"], case, OUTCOME) for case in attention_cases.decode_cases(True)])
    assert table.startswith("== decode: decode attention")
    assert table.endswith("2 cases: 0 failed, 0 skipped; goals: 2 met, 0 missed")
    assert "1 cases: 1 failed" in kernels.summary([(broken, None)])
