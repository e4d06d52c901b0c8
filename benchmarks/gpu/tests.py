"""`run.sh tests`: the kernels' tests on the real kernels, and `golden`, each file in processes of its own.

A kernel that breaks the device's context fails all that comes after it in its process: such tests are run once more,
each alone. $OUT gets summary.txt, failures.txt and junit.xml.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.common.rows import ROOT, usable_cores
from benchmarks.gpu.machine import header, out_folder

BUDGET_S = 490.0
GOLDEN = "benchmarks/gpu/golden.py"
_FOLDER = "tests/executor_svc/gpu"
_WORKERS = {GOLDEN: 6, "test_attention": 3, "test_compile": 4, "test_families": 4, "test_variants": 4}
"""Processes of a file's own, where it takes long."""
_AT_ONCE = 6
_TEST_TIMEOUT_S = 240
_RERUN_S = 90.0
_MOST_RERUN = 24
_END_S = 15.0
_BROKEN = re.compile(r"CUDA error|AcceleratorError|illegal memory access|unspecified launch failure|CUDA driver error")


@dataclass(frozen=True, slots=True)
class Test:
    """One test as it ran."""

    file: str
    name: str
    status: str
    """passed, failed, skipped."""
    seconds: float
    text: str = ""
    """What it said, if it did not pass."""

    @property
    def is_broken(self) -> bool:
        """Did the device refuse, maybe for an earlier test's fault."""
        return self.status == "failed" and _BROKEN.search(self.text) is not None


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="benchmarks/gpu/run.sh tests", description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", help=f"default: {_FOLDER}/**/test_*.py and {GOLDEN}")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds for all (default %(default)s)")
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="as pytest has it")
    options = parser.parse_args(arguments)
    options.files = options.files or test_files()
    return options


def test_files() -> list[str]:
    """What is run, what takes longest first."""
    found = [str(path.relative_to(ROOT)) for path in sorted((ROOT / _FOLDER).rglob("test_*.py"))]
    return sorted([GOLDEN, *found], key=lambda file: -_workers(file))


def command(target: str, junit: Path, expression: str = "", workers: int = 1) -> list[str]:
    """How pytest is called. Warnings of other versions of the libraries than the project's own fail nothing here."""
    spread = ["-n", str(workers)] if workers > 1 else ["-p", "no:xdist"]
    chosen = ["-k", expression] if expression else []
    return [
        *(sys.executable, "-m", "pytest", target, "-q", "-W", "default", "-p", "no:cacheprovider", *spread, *chosen),
        *("-o", f"timeout={_TEST_TIMEOUT_S}", f"--junitxml={junit}"),
    ]


def run_pytest(target: str, end_at: float, expression: str = "", workers: int = 1) -> list[Test]:
    """Run one file or test in processes of its own; what does not end by then is a failed test of its own."""
    with tempfile.TemporaryDirectory() as folder:
        junit, log = Path(folder, "junit.xml"), Path(folder, "log")
        with log.open("w", encoding="utf-8") as out:
            process = subprocess.Popen(
                command(target, junit, expression, workers),
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                start_new_session=True,
            )
            ended = _wait(process, end_at)
        said = log.read_text(encoding="utf-8", errors="replace")
        tests = read_junit(junit, target) if junit.is_file() else []
    if not ended:
        tests.append(Test(target, "(all)", "failed", 0.0, f"it did not end in time\n{said[-4000:]}"))
    elif not tests and process.returncode not in (0, 5):
        tests.append(Test(target, "(all)", "failed", 0.0, f"pytest ended with {process.returncode}\n{said[-4000:]}"))
    return tests


def _wait(process: subprocess.Popen[bytes], end_at: float) -> bool:
    """Wait for pytest and its workers; after end_at ask them to end, then make them. False if that was needed."""
    try:
        process.wait(max(0.1, end_at - time.monotonic()))
    except subprocess.TimeoutExpired:
        for number in (signal.SIGINT, signal.SIGKILL):
            os.killpg(process.pid, number)
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                continue
            return False
    return True


def read_junit(path: Path, target: str) -> list[Test]:
    """The tests of a file that pytest wrote."""
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


def run_all(options: argparse.Namespace, end_at: float) -> list[Test]:
    """All files, several at once; then, alone, those that the device refused."""

    def run(file: str) -> list[Test]:
        found = run_pytest(file, end_at, options.k, _workers(file))
        print(f"{file}: {counts(found)}", flush=True)
        return found

    with ThreadPoolExecutor(max(1, min(_AT_ONCE, usable_cores() // 2))) as pool:
        tests = [test for found in pool.map(run, options.files) for test in found]
    broken = [test for test in tests if test.is_broken][:_MOST_RERUN]
    if not broken or time.monotonic() + _RERUN_S / 3 > end_at:
        return tests
    print(f"{len(broken)} tests that the device refused are run once more, each alone", flush=True)
    rerun_end = min(end_at, time.monotonic() + _RERUN_S)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        again = pool.map(lambda test: run_pytest(f"{test.file}::{test.name}", rerun_end), broken)
        alone = {test: found[0] for test, found in zip(broken, again, strict=True) if found}
    return [_both(test, alone[test]) if test in alone else test for test in tests]


def _both(first: Test, alone: Test) -> Test:
    if alone.status == "passed":
        return Test(first.file, first.name, "passed", alone.seconds, "it failed after another test had; passed alone")
    return Test(first.file, first.name, alone.status, alone.seconds, f"(alone)\n{alone.text}")


def summary(tests: Sequence[Test]) -> str:
    """Counts by file, the slowest tests, and the names of those that failed."""
    lines = [
        f"{file}: {counts([test for test in tests if test.file == file])}"
        for file in dict.fromkeys(test.file for test in tests)
    ]
    slowest = sorted(tests, key=lambda test: -test.seconds)[:10]
    lines += ["== slowest", *(f"{test.seconds:.1f} s {test.file}::{test.name}" for test in slowest)]
    notes = [test for test in tests if test.status == "passed" and test.text]
    lines += [f"note: {test.file}::{test.name}: {test.text}" for test in notes]
    failed = [test for test in tests if test.status == "failed"]
    lines += [f"FAILED {test.file}::{test.name}: {_first_line(test.text)}" for test in failed]
    return "\n".join([*lines, f"== all: {counts(tests)}"])


def counts(tests: Iterable[Test]) -> str:
    """How many passed, failed, were skipped."""
    found = Counter(test.status for test in tests)
    return ", ".join(f"{found[status]} {status}" for status in ("passed", "failed", "skipped"))


def write(tests: Sequence[Test], folder: Path) -> None:
    """Put summary.txt, failures.txt and junit.xml into a folder."""
    (folder / "summary.txt").write_text(summary(tests) + "\n", encoding="utf-8")
    failed = [test for test in tests if test.status == "failed"]
    text = "\n".join(f"==== {test.file}::{test.name}\n{test.text}" for test in failed)
    (folder / "failures.txt").write_text(text + "\n", encoding="utf-8")
    suite = ElementTree.Element("testsuite", name="gpu", tests=str(len(tests)), failures=str(len(failed)))
    for test in tests:
        case = ElementTree.SubElement(
            suite, "testcase", classname=test.file, name=test.name, time=f"{test.seconds:.3f}"
        )
        if test.status != "passed":
            tag = "failure" if test.status == "failed" else "skipped"
            ElementTree.SubElement(case, tag, message=_first_line(test.text)).text = _printable(test.text)
    ElementTree.ElementTree(suite).write(folder / "junit.xml", encoding="utf-8", xml_declaration=True)


def _printable(text: str) -> str:
    """Without what XML can not hold."""
    return re.sub(r"[^\t\n\r -\ud7ff\ue000-\ufffd]", "?", text)


def _first_line(text: str) -> str:
    return _printable(next((line.strip() for line in text.splitlines() if line.strip()), ""))[:200]


def _workers(file: str) -> int:
    found = next((count for name, count in _WORKERS.items() if name in file), 1)
    return max(1, min(found, usable_cores() // 2))


def main(arguments: Sequence[str]) -> int:
    """Exit codes: 0 all passed, 1 one failed, 2 wrong arguments."""
    end_at = time.monotonic()
    options = parse(arguments)
    end_at += options.budget_s
    folder = out_folder("tests")
    print(header("tests"), flush=True)
    tests = run_all(options, end_at)
    write(tests, folder)
    print(summary(tests), flush=True)
    return int(any(test.status == "failed" for test in tests) or not tests)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
