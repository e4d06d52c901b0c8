"""Part `tests`: the kernels' tests on compiled kernels, and `golden`, several files at once.

A CUDA error fails every later test of its process: such tests run once more, each alone. Outcomes are read from
pytest's JUnit files.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.common.benchmark import SEED
from benchmarks.common.rows import ROOT, make_row, usable_cores
from benchmarks.gpu.environment import Output, header, with_gpu
from benchmarks.gpu.limited import run_until

GOLDEN = "benchmarks/gpu/golden.py"
ROWS = "gpu_tests"
_FOLDER = "tests/executor_svc/gpu"
_WORKERS = {
    GOLDEN: 6, "test_attention": 3, "test_compile.py": 4, "test_families": 4, "test_few_bits_linear": 3, "test_lora": 3,
    "test_split": 2, "test_variants": 4,
}  # fmt: skip
"""Number of pytest workers for slow files."""
_AT_ONCE = 8
_TEST_TIMEOUT_S = 240
_RERUN_S = 90.0
_MAX_RERUNS = 24
_END_S = 15.0


def test_files() -> list[str]:
    """The default files, slow ones first."""
    return sorted([GOLDEN, *files_of([_FOLDER])], key=lambda file: -_workers(file))


def files_of(targets: Iterable[str]) -> list[str]:
    """The files of tests in these folders, and the targets that are no folders: each has a process of its own."""
    found = []
    for target in targets:
        folder = ROOT / target
        paths = sorted(folder.rglob("test_*.py")) if folder.is_dir() else []
        found += [str(path.relative_to(ROOT)) for path in paths] or [target]
    return found


def command(target: str, junit: Path, expression: str = "", workers: int = 1) -> list[str]:
    """The pytest command for a file or a test. Warnings fail nothing: library versions may be other than the pinned."""
    spread = ["-n", str(workers)] if workers > 1 else ["-p", "no:xdist"]
    chosen = ["-k", expression] if expression else []
    return [
        *(sys.executable, "-m", "pytest", target, "-q", "-W", "default", "-p", "no:cacheprovider", *spread, *chosen),
        *("-p", "benchmarks.gpu.project_tests", "-o", f"timeout={_TEST_TIMEOUT_S}", f"--junitxml={junit}"),
    ]


def run_pytest(target: str, end_at: float, expression: str = "", workers: int = 1) -> list[Test]:
    """Run one file or test; if pytest itself fails or runs past `end_at`, that is one more failed test."""
    with tempfile.TemporaryDirectory() as folder:
        junit, log = Path(folder, "junit.xml"), Path(folder, "log")
        with log.open("w", encoding="utf-8") as out:
            code = run_until(command(target, junit, expression, workers), end_at, _END_S, out)
        printed = log.read_text(encoding="utf-8", errors="replace")[-4000:]
        tests = read_junit(junit, target) if junit.is_file() else []
    if code is None:
        tests.append(Test(target, "(all)", "failed", 0.0, f"it did not end in time\n{printed}"))
    elif not tests and code not in (0, 5):
        tests.append(Test(target, "(all)", "failed", 0.0, f"pytest ended with {code}\n{printed}"))
    return tests


def run_all(files: Sequence[str], expression: str, end_at: float) -> list[Test]:
    """Run all files, several at once; then those that failed with a device error, each alone."""

    def run_file(file: str) -> list[Test]:
        found = run_pytest(file, end_at, expression, _workers(file))
        print(f"{file}: {counted(found)}", flush=True)
        return found

    with ThreadPoolExecutor(max(1, min(_AT_ONCE, usable_cores() // 2))) as pool:
        tests = [test for found in pool.map(run_file, files) for test in found]
    broken = [test for test in tests if test.has_device_error][:_MAX_RERUNS]
    if not broken or time.monotonic() + _RERUN_S / 3 > end_at:
        return tests
    print(f"{len(broken)} tests failed with a device error and run once more, each alone", flush=True)
    rerun_end = min(end_at, time.monotonic() + _RERUN_S)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        again = pool.map(lambda test: run_pytest(f"{test.file}::{test.name}", rerun_end), broken)
        alone = {test: found[0] for test, found in zip(broken, again, strict=True) if found}
    return [after_rerun(test, alone[test]) if test in alone else test for test in tests]


def _workers(file: str) -> int:
    found = next((count for name, count in _WORKERS.items() if name in file), 1)
    return max(1, min(found, usable_cores() // 2))


def run(options: argparse.Namespace) -> int:
    """Exit codes: 0 all passed, 1 a test failed or none ran."""
    began = time.monotonic()
    output = Output.of("tests", options.out, options.trial)
    print(header("tests"), flush=True)
    files = files_of(options.files) if options.files else test_files()
    tests = run_all(files, options.k, began + options.seconds - _END_S)
    write(tests, output.files)
    params = {"files": len(files), "k": options.k}
    metrics = {**counts(tests), "wall_s": time.monotonic() - began}
    output.add(with_gpu(make_row(ROWS, seed=SEED, params=params, repeats=[metrics], other_cores=[])))
    print(summary(tests), output.places(ROWS), sep="\n", flush=True)
    return int(any(test.status == "failed" for test in tests) or not tests)


_DEVICE_ERROR = re.compile(
    r"CUDA error|AcceleratorError|illegal memory access|unspecified launch failure|CUDA driver error"
)


@dataclass(frozen=True, slots=True)
class Test:
    """The outcome of one test."""

    file: str
    name: str
    status: str
    """passed, failed or skipped."""
    seconds: float
    text: str = ""
    """The failure or the reason for skipping."""

    @property
    def has_device_error(self) -> bool:
        """Whether a CUDA error failed it, maybe one that an earlier test caused."""
        return self.status == "failed" and _DEVICE_ERROR.search(self.text) is not None


def read_junit(path: Path, target: str) -> list[Test]:
    """The tests in a JUnit file of pytest, as tests of the file `target`."""
    tests = []
    for case in ElementTree.parse(path).iter("testcase"):
        status, text = "passed", ""
        for child in case:
            if child.tag in ("failure", "error"):
                status, text = "failed", f"{text}{child.get('message', '')}\n{child.text or ''}\n"
            elif child.tag == "skipped":
                status, text = "skipped", child.get("message", "")
        seconds = float(case.get("time", "0"))
        tests.append(Test(target.partition("::")[0], str(case.get("name")), status, seconds, text))
    return tests


def after_rerun(first: Test, alone: Test) -> Test:
    """The outcome of a test that failed beside others and then ran alone."""
    if alone.status == "passed":
        return Test(first.file, first.name, "passed", alone.seconds, "failed after another test, passed alone")
    return Test(first.file, first.name, alone.status, alone.seconds, f"(alone)\n{alone.text}")


def counts(tests: Iterable[Test]) -> dict[str, float]:
    """Numbers of tests by status."""
    found = Counter(test.status for test in tests)
    return {status: float(found[status]) for status in ("passed", "failed", "skipped")}


def counted(tests: Iterable[Test]) -> str:
    """`3 passed, 0 failed, 1 skipped`."""
    return ", ".join(f"{count:.0f} {status}" for status, count in counts(tests).items())


def summary(tests: Sequence[Test]) -> str:
    """Counts per file, the slowest tests, notes, and the names of the tests that failed."""
    lines = [
        f"{file}: {counted([test for test in tests if test.file == file])}"
        for file in dict.fromkeys(test.file for test in tests)
    ]
    slowest = sorted(tests, key=lambda test: -test.seconds)[:10]
    lines += ["== slowest", *(f"{test.seconds:.1f} s {test.file}::{test.name}" for test in slowest)]
    notes = [test for test in tests if test.status == "passed" and test.text]
    lines += [f"note: {test.file}::{test.name}: {test.text}" for test in notes]
    lines += [f"FAILED {test.file}::{test.name}: {_first_line(test.text)}" for test in _failed(tests)]
    return "\n".join([*lines, f"== all: {counted(tests)}"])


def write(tests: Sequence[Test], folder: Path) -> None:
    """Write summary.txt and failures.txt."""
    (folder / "summary.txt").write_text(summary(tests) + "\n", encoding="utf-8")
    text = "\n".join(f"==== {test.file}::{test.name}\n{test.text}" for test in _failed(tests))
    (folder / "failures.txt").write_text(text + "\n", encoding="utf-8")


def _failed(tests: Iterable[Test]) -> list[Test]:
    return [test for test in tests if test.status == "failed"]


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")[:200]
