"""Kernels compile ahead of time, in processes of their own: this one may have Triton's interpreter."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from triton.runtime.interpreter import InterpretedFunction

from executor_svc.gpu.kernels.compile import __main__ as command
from executor_svc.gpu.kernels.compile.build import Build, build_errors, compile_variant
from executor_svc.gpu.kernels.compile.build_all import BuildOutcome, tasks_of
from executor_svc.gpu.kernels.compile.registry import PACKAGE, entries, kernel_modules
from executor_svc.gpu.kernels.variant import Variant
from tests.helpers.marks import short_and_long
from tests.helpers.paths import ROOT

PAGE = ROOT / "docs" / "kernels.md"
REFUSED = "tests.executor_svc.gpu.kernels.compile.refused_kernels"
MAX_QUICK = 104


def compiled(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the command line without Triton's interpreter."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "executor_svc.gpu.kernels.compile", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=500, env=inherited | environment, check=False
    )


# --- the kernels that there are ---------------------------------------------------------------------------------------


def test_every_module_has_quick_variants_and_they_are_few():
    tasks = tasks_of(entries().values(), quick=True)
    assert len(tasks) <= MAX_QUICK, "take `quick` from some"
    assert {task.entry.module for task in tasks} == set(kernel_modules())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("newest", short_and_long([True, False], [True]))
def test_quick_variants_compile_as_they_must(newest):
    """For an A100 too: those of attention that are for it alone in `make test`, all of them in `make test-long`."""
    done = compiled("--quick", "--json", "--jobs", "1", *(["--newest"] if newest else []))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    tasks = tasks_of(entries().values(), quick=True, newest=newest)
    assert {task.arch for task in tasks} == {80, 90}
    assert [(build["name"], build["arch"]) for build in report["builds"]] == [
        (task.entry.variant.name, task.arch) for task in tasks
    ]
    assert not report["refused"]


def test_the_page_has_a_row_for_every_file_with_kernels():
    page = PAGE.read_text(encoding="utf-8")
    files = [f"{module.removeprefix(f'{PACKAGE}.').replace('.', '/')}.py" for module in kernel_modules()]
    missing = [file for file in files if f"`{file}`" not in page]
    assert not missing
    assert len(page.splitlines()) <= 80


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    """Builds by name and arch, refusals, and the folder that Triton would take for its cache."""
    cache = tmp_path_factory.mktemp("cache")
    done = compiled("--module", REFUSED, "--json", TRITON_CACHE_DIR=str(cache))
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    return {(build["name"], build["arch"]): Build(**build) for build in report["builds"]}, report["refused"], cache


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("crashing for sm_90", r"the compiler crashed: SIGABRT"),
        ("broken for sm_80", r"no_such_name is not defined"),
        ("unassembled for sm_90", r"(?s)ptxas.*no\.such\.instruction|Unknown modifier"),
        (
            "misdescribed for sm_90",
            r"target: among the arguments of the kernel, missing in the signature; goal: in the",
        ),
        ("spilling for sm_80", r"spills \d+ bytes of stores and \d+ of loads \(registers 255\), and must not"),
        ("without wgmma for sm_90", r"has no wgmma in its PTX, and must"),
        ("greedy for sm_80", r"needs \d{6} bytes of shared memory; a block has 166912"),
    ],
)
def test_each_reason_is_reported_with_the_name(refused, label, message):
    _, lines, _ = refused
    assert len(lines) == 7, lines
    (line,) = (line for line in lines if line.startswith(f"{REFUSED}: {label}"))
    assert re.search(message, line), line


@pytest.mark.slow
def test_facts_of_builds_in_order(refused):
    builds, _, cache = refused
    for arch in (80, 90):
        build = builds["in order", arch]
        assert 8 <= build.num_registers < 64
        assert (build.shared, build.spills, build.stack_frame, build.wgmma) == (0, 0, 0, False)
        # 1,024 elements of 4 bytes among 128 threads: two loads of 16 bytes each.
        assert (build.num_loads, build.num_wide_loads) == (2, 2)
    assert builds["in order narrow", 90].num_wide_loads == 0, "nothing is said of its addresses"
    assert builds["spilling allowed", 80].spills > 0
    assert builds["with wgmma", 90].wgmma
    assert builds["with wgmma", 90].shared == 2 * 64 * 64 * 2
    assert not any(cache.iterdir()), "a cache could hide an error"


@pytest.mark.slow
def test_only_what_is_named_is_compiled():
    done = compiled("--module", REFUSED, "--only", "order narrow")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    build, counts = done.stderr.splitlines()
    assert re.fullmatch(r"\[1/1\] in order narrow for sm_90: \d+ registers, 0 bytes shared, \d+\.\d s", build)
    assert counts == "1 variants, 1 builds, 0 of them spill registers; none refused"


# --- without compiling ------------------------------------------------------------------------------------------------


def test_parts_have_each_build_once(monkeypatch):
    taken = []

    def build_all(tasks, jobs):
        taken.append([task.label for task in tasks])
        return BuildOutcome()

    monkeypatch.setattr(command, "build_all", build_all)
    for part in ("1/3", "2/3", "3/3"):
        command.main(["--module", REFUSED, "--part", part])
    whole = [task.label for task in tasks_of(entries([REFUSED]).values())]
    assert sorted(label for part in taken for label in part) == sorted(whole)
    assert max(map(len, taken)) - min(map(len, taken)) <= 1
    for wrong in ("0/3", "4/3", "3"):
        with pytest.raises(SystemExit):
            command.main(["--part", wrong])


def kernel(target):
    """Never run."""


INTERPRETED = Variant(
    "interpreted", InterpretedFunction(kernel), {"target": "*i32"}, {}, wgmma=True, copies=True, roles=True
)
BUILD = Build(
    "interpreted",
    90,
    32,
    16,
    1024,
    0,
    0,
    0,
    True,
    False,
    ("wgmma m64n64k16",),
    1,
    4,
    4,
    1,
    (40, 232),
    9,
    66,
    0,
    "PWLM",
    0.1,
)


def test_the_interpreter_is_refused():
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"):
        compile_variant(INTERPRETED, 90)


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (BUILD, []),
        (replace(BUILD, wgmma=False), ["has no wgmma in its PTX, and must"]),
        (replace(BUILD, num_bulk_copies=0), ["has no instruction to the copy engine in its PTX, and must"]),
        (replace(BUILD, arch=80, wgmma=False, num_bulk_copies=0, role_registers=(), num_overlapped=0), []),
        (replace(BUILD, role_registers=()), ["has no registers by role or no barriers in its PTX, and must"]),
        (replace(BUILD, num_barriers=0), ["has no registers by role or no barriers in its PTX, and must"]),
        (replace(BUILD, num_touching=2), ["touches registers of products that may still run, 2 times"]),
        (replace(BUILD, num_overlapped=0), ["computes no exponents while a product runs, and must"]),
        (replace(BUILD, wgmma_serialized=True), ["has wgmma, but ptxas serializes it"]),
        (replace(BUILD, spill_stores=4, spill_loads=8), []),
        (replace(BUILD, dynamic_shared=227 * 1024 - 16), []),
        (replace(BUILD, dynamic_shared=227 * 1024), ["needs 232464 bytes of shared memory; a block has 232448"]),
    ],
)
def test_problems_of_a_build(build, expected):
    assert build_errors(INTERPRETED, build) == expected


@pytest.mark.parametrize(
    ("order", "fits"), [("WLM", True), ("PPWLM", True), ("M", False), ("LWM", False), ("WM", False)]
)
def test_dependent_kernels_wait_first(order, fits):
    found = build_errors(replace(INTERPRETED, dependent=True), replace(BUILD, order=order))
    assert (not found) == fits
    assert fits or found[0].startswith(f"begins with {order}, and must wait")


def test_narrow_loads_are_counted():
    variant = replace(INTERPRETED, narrow_loads=1)
    assert build_errors(variant, replace(BUILD, num_wide_loads=3)) == []
    (found,) = build_errors(variant, replace(BUILD, num_wide_loads=2))
    assert found == "reads less than 16 bytes at once with 2 instructions, and may with 1"
