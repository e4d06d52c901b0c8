"""`python -m benchmarks.gpu` without a GPU: options, parts, the part `tests`, and wheels for an offline machine."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks.common.rows import RESULTS, ROOT
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import limited, offline, part_b, part_b_beside
from benchmarks.gpu import tests_part as part
from benchmarks.gpu.__main__ import PART_B, PARTS, parse
from benchmarks.gpu.environment import Output, as_line
from benchmarks.gpu.kernels.part import groups_of
from benchmarks.gpu.serving import failover, stages
from benchmarks.gpu.serving import part as serving
from benchmarks.gpu.shapes import LLAMA_8B


def test_no_gpu_is_one_line_and_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main([]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: PyTorch ")
    assert printed.err.endswith("sees no GPU; this needs one of compute capability 8.0 or more\n")
    assert printed.err.count("\n") == 1


def test_an_old_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    assert command.gpu_problem() == "the GPU has compute capability 7.5, less than 8.0"


def test_without_a_part_each_runs_in_its_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def start(arguments: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        started.append(arguments[2:])
        return subprocess.CompletedProcess(arguments, int(arguments[3] == "tests"))

    monkeypatch.setattr(command.subprocess, "run", start)
    assert command.main(["--trial", "--seconds", "30"]) == 1
    assert started == [["benchmarks.gpu", name, "--trial", "--seconds", "30"] for name in PARTS if name != PART_B]


@pytest.mark.parametrize(
    "arguments", [["--groups", "decode,other"], ["--shapes", "other"], ["--requests", "0"], ["--seconds", "-1"]]
)
def test_wrong_options_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["kernels", *arguments])
    assert ended.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_groups_follow_from_options() -> None:
    def names(*arguments: str) -> list[str]:
        return [group.name for group in groups_of(parse(["kernels", *arguments]))]

    assert names("--groups", "linears") == ["ceilings", "linears"]
    of_8b = {"steps-8b", "steps-8b-exact", "steps-8b-skinny", "steps-8b-pdl"}
    assert set(names()) - set(names("--shapes", "qwen3-0.6b")) == of_8b


@dataclass
class Machine:
    """A clock, and steps that take as long as they may."""

    now: float = 0.0
    started: list[list[str]] = field(default_factory=list)

    def monotonic(self) -> float:
        return self.now

    def run_until(self, words: list[str], end_at: float, grace_s: float) -> int | None:
        assert words[1:3] == ["-m", "benchmarks.gpu"]
        self.started.append(words[3:])
        seconds = parse(words[3:]).seconds
        assert self.now + seconds < end_at
        self.now += seconds
        return 1 if "grammars" in words else None if "swaps" in words else 0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()
    monkeypatch.setattr(part_b, "run_until", found.run_until)
    monkeypatch.setattr(part_b.time, "monotonic", found.monotonic)
    return found


def test_part_b_takes_three_runs_of_nine_minutes(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each step is a run that the command knows, with a limit; what has no time is named, and a failure fails all."""
    options, codes, printed = ["part-b", "--out", str(tmp_path)], list[int](), list[str]()
    assert parse(options).seconds == 540
    left_out, more = "", list[str]()
    while not codes or left_out:
        began = machine.now
        codes.append(part_b.run(parse([*options, *more])))
        assert machine.now - began <= 540
        printed.append(capsys.readouterr().out)
        left_out = printed[-1].partition("go on with --steps ")[2].strip()
        more = ["--steps", left_out]
    assert codes == [0, 1, 0]
    assert "failed: 64 requests with structured output, swaps and the host's tier beside the link (did" in printed[1]
    assert "left out" not in printed[2]
    assert len(machine.started) == len(part_b.STEPS)
    assert all(step.beside in "".join(printed) for step in part_b.STEPS)
    tests = [[path for path in each if path.startswith("tests/")] for each in machine.started if each[0] == "tests"]
    assert all(len(named) > 4 and all((ROOT / path).exists() for path in named) for named in tests)


def test_part_b_says_what_exact_mode_costs(tmp_path: Path) -> None:
    """By rows of this run alone, of one load, and without a line that a killed step has not ended."""

    def add(name: str, group: str, case: str, medians: dict[str, float], **params: object) -> None:
        row = {"params": {"group": group, "case": case, **params}, "medians": medians}
        with (tmp_path / f"{name}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    add("gpu_kernels", "steps-8b-exact", "decode, batch 64", {"ms": 99.0}, phase="decode")
    before = part_b_beside.size_of(tmp_path)
    for group, factor in (("steps-8b", 1.0), ("steps-8b-exact", 1.08)):
        add("gpu_kernels", group, "decode, batch 64", {"ms": 10 * factor}, phase="decode")
        add("gpu_kernels", group, "decode, batch 64: on the device", {"device_ms": 9.0}, phase="decode")
    add("gpu_kernels", "steps-8b", "prefill, 1 x 8192", {"ms": 200.0}, phase="prefill")
    add("gpu_kernels", "steps-8b-exact", "prefill, 1 x 8192", {"ms": 260.0}, phase="prefill")
    for numerics, workload, rate in (("fast", "a", 9000.0), ("exact", "a", 7650.0), ("fast", "b", 5000.0)):
        given = {"shape": "8b", "workload": workload, "requests": 300, "numerics": numerics}
        add("gpu_serving", "8b", "all at once, finished results", {"tokens_per_s": rate}, **given)
    with (tmp_path / "gpu_serving.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"params": {"gro')
    lines = [as_line(outcome, goal) for outcome, goal in part_b_beside.compared(tmp_path, before)]
    assert lines == [
        "part-b: exact beside fast: decode, batch 64: cost_percent 8.000 (goal met)",
        "part-b: exact beside fast: prefill, 1 x 8192: cost_percent 30.00 (goal missed)",
        "part-b: exact beside fast: served, 300 requests: cost_percent 15.00",
    ]
    assert not list(part_b_beside.compared(tmp_path, part_b_beside.size_of(tmp_path)))


def test_a_step_without_enough_time_is_left_out(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert part_b.run(parse(["part-b", "--seconds", "40", "--out", str(tmp_path)])) == 0
    assert [each[0] for each in machine.started] == ["tests"]
    printed = capsys.readouterr().out
    assert f"left out, 0 s are left: {len(part_b.STEPS)} of {len(part_b.STEPS)}: " in printed
    assert "go on with --steps 2,3," in printed


@pytest.mark.parametrize("step", part_b.STEPS, ids=lambda step: step.question)
def test_the_least_time_of_a_step_is_enough_to_begin(step: part_b.Step) -> None:
    """Of served steps too: the parts' own estimates leave nothing out that has the step's least time."""
    options = parse(part_b.command(step, step.least_s, parse(["part-b"]))[3:])
    measuring_s = step.least_s - 15
    assert step.seconds >= step.least_s
    if options.part == "serve" and not options.features:
        load = serving.make_load(options, LLAMA_8B.vocab_size)
        assert stages.START_S + stages.least_s(load.requests) < measuring_s
    elif options.features == ["failover"]:
        assert measuring_s > failover.ESTIMATE_S
    elif options.part == "kernels":
        cases = [case for group in groups_of(options) for case in group.cases(False)[:1]]
        assert sum(case.estimate_s for case in cases) < measuring_s


def test_a_process_that_does_not_end_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w+", encoding="utf-8") as out:
        words = ["sh", "-c", "trap '' INT; sleep 1000 & echo $!; wait"]
        assert limited.run_until(words, time.monotonic() + 1.0, 0.1, out) is None
        out.seek(0)
        child = int(out.readline())
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(child).wait(timeout=10.0) is None
    assert limited.run_until(["sh", "-c", "exit 3"], time.monotonic() + 60, 1.0) == 3


def test_rows_of_a_trial_stay_out_of_the_results(tmp_path: Path) -> None:
    files = ROOT / "benchmarks" / "scratch" / "gpu" / "kernels"
    assert Output.of("kernels", None, trial=False) == Output(RESULTS, files)
    assert Output.of("kernels", None, trial=True) == Output(files, files)
    assert Output.of("kernels", tmp_path / "out", trial=False).rows == tmp_path / "out"
    assert Output(RESULTS, files).places("gpu_kernels") == (
        "rows: benchmarks/results/gpu_kernels.jsonl; tables and logs: benchmarks/scratch/gpu/kernels"
    )


# ---------------------------------------------------------------- tests


JUNIT = """<testsuites><testsuite><testcase name="a[1]" time="0.5"/>
<testcase name="b" time="2"><failure message="assert">CUDA error: an illegal memory access</failure></testcase>
<testcase name="c" time="0"><skipped message="no fp8"/></testcase></testsuite></testsuites>"""


def test_outcomes_are_read_and_summed_up(tmp_path: Path) -> None:
    (tmp_path / "in.xml").write_text(JUNIT, encoding="utf-8")
    found = part.read_junit(tmp_path / "in.xml", "tests/x.py::b")
    assert [(test.file, test.name, test.status, test.has_device_error) for test in found] == [
        ("tests/x.py", "a[1]", "passed", False),
        ("tests/x.py", "b", "failed", True),
        ("tests/x.py", "c", "skipped", False),
    ]
    part.write(found, tmp_path)
    assert "== all: 1 passed, 1 failed, 1 skipped" in (tmp_path / "summary.txt").read_text(encoding="utf-8")
    assert "illegal memory access" in (tmp_path / "failures.txt").read_text(encoding="utf-8")


def test_files_and_command(tmp_path: Path) -> None:
    files = part.test_files()
    assert part.GOLDEN in files
    assert "tests/executor_svc/gpu/kernels/attention/test_attention.py" in files
    words = part.command("a.py", tmp_path, "fp8", 3)
    assert words[3:5] == ["a.py", "-q"]
    assert {"-W", "default", "-n", "3", "-k", "fp8"} <= set(words)


def test_a_test_that_failed_after_another_may_pass_alone() -> None:
    failed = part.Test("f.py", "t", "failed", 1.0, "CUDA error")
    alone = part.Test("f.py", "t", "passed", 2.0)
    assert part.after_rerun(failed, alone).status == "passed"
    assert "note: f.py::t: failed after" in part.summary([part.after_rerun(failed, alone)])
    assert part.after_rerun(failed, replace(alone, status="failed", text="wrong")).text == "(alone)\nwrong"


@pytest.mark.slow
def test_tests_are_the_projects_beside_a_package_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site" / "tests").mkdir(parents=True)
    (tmp_path / "site" / "tests" / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}:{ROOT}:{ROOT / 'client'}")
    file = "tests/executor_svc/gpu/kernels/test_copy_pages.py"
    assert part.run(parse(["tests", "--trial", "--out", str(tmp_path), "--files", file, "-k", "sizes_of_a_page"])) == 0
    assert '"failed": 0.0' in (tmp_path / "gpu_tests.jsonl").read_text(encoding="utf-8")


# ---------------------------------------------------------------- wheels


def test_wheels_have_the_versions_of_the_constraints() -> None:
    found = offline.pinned(offline.PACKAGES, (ROOT / "constraints.txt").read_text(encoding="utf-8"))
    assert len(found) == len(offline.PACKAGES)
    assert "grpcio-status==1.76.0" in found
    assert offline.pinned(["pydantic-core"], "# x\npydantic_core==2.50.4  # y\n") == ["pydantic_core==2.50.4"]
    with pytest.raises(KeyError):
        offline.pinned(["nothing-there"], "torch==2.13.0")


def test_wheels_go_to_an_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = []

    def start(words: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        started.append(words)
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(offline.subprocess, "run", start)
    monkeypatch.setattr(offline, "versions", lambda: {"commit": "abc"})
    assert offline.main([str(tmp_path)]) == 0
    download, build = started
    assert {"--no-deps", "--only-binary=:all:", "3.12", "manylinux2014_x86_64", "grpcio==1.76.0"} <= set(download)
    assert build[-1] == str(ROOT)
    printed = capsys.readouterr().out
    assert f"{tmp_path}/*.whl" in printed
    assert "BENCH_COMMIT=abc" in printed
    (tmp_path / "old.whl").touch()
    with pytest.raises(SystemExit):
        offline.main([str(tmp_path)])
    assert len(started) == 2
