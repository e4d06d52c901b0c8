"""Mutants of the scheduler's core and of the executor's batch and sampling: how many of them do the tests kill?

    python -m tests.mutants draw --seed 1 --number 300 --mutants OUT.jsonl
    python -m tests.mutants map --tests TREE --map MAP.jsonl
    python -m tests.mutants run --tests TREE --map MAP.jsonl --mutants OUT.jsonl --results ROWS.jsonl
    python -m tests.mutants carry --tests TREE --mutants OUT.jsonl --carried OTHER.jsonl

`draw` and `carry` need cosmic-ray and `map` needs coverage: install both in a virtual environment of your own; its
site-packages may be named by PYTHONPATH, and by MUTANTS_PATH for the workers. A TREE is a checkout: two trees with one
product and different tests are compared with one list of mutants; if the product of one has got other words since,
`carry` finds the places of the list's mutants in it. Each worker has a copy of the tree, which is the only place where
a mutant is written. The map says which tests run which lines, and is made once for a tree; a test that fails without a
mutant is not in it. `map` and `run` go on where they were stopped, and may be started again beside themselves: each
piece of work is taken once.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.helpers.paths import PACKAGES as INSTALLED
from tests.helpers.paths import ROOT
from tests.mutants.carry import carry_mutants
from tests.mutants.draw import PACKAGES, draw_mutants, read_mutants, write_mutants
from tests.mutants.worker import read_rows

_HERE = Path(__file__).resolve().parent
_NOT_COPIED = shutil.ignore_patterns(".git", ".venv*", "node_modules", ".mypy_cache", ".ruff_cache", ".pytest_cache")
_OUTSIDE = re.compile(
    r"tests/(benchmarks|docs|faults)/"
    r"|tests/(cadenza(_cli|_common|_launcher|_loadtest)?|gateway_svc)/"
    r"|tests/executor_svc/(cpu|device|models)/"
    r"|tests/executor_svc/gpu/(test_(kv|launches|memory|runner|sampling|warm)|kernels/(attention|compile|test_))"
    r"|tests/service/(client|deploy|examples|loadtest|terminal)/"
)
"""Test files that are not mapped by default: they run none of the packages, or for minutes what others run too."""


def copy_of(tree: Path, folder: Path) -> Path:
    """A private copy of the tree, with this tool in it, compiled so that a changed text is always seen."""
    copy = folder / "tree"
    shutil.copytree(tree, copy, ignore=_NOT_COPIED, symlinks=True)
    shutil.copytree(_HERE, copy / "tests" / "mutants", dirs_exist_ok=True)
    packages = [str(copy / root.relative_to(ROOT) / name) for name, root in INSTALLED.items()]
    # By hash: a mutant may have the size and the second of the text before it.
    compile_all = ["-m", "compileall", "-q", "-f", "--invalidation-mode", "checked-hash"]
    subprocess.run([sys.executable, *compile_all, *packages], check=True, stdout=subprocess.DEVNULL)
    return copy


def work_in_copies(tree: Path, workers: int, arguments: list[str]) -> None:
    """Run the workers to their end."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        running = []
        for index in range(workers):
            copy = copy_of(tree, Path(folder) / str(index))
            paths = [str(copy), str(copy / "client"), os.environ.get("MUTANTS_PATH", "")]
            environment = {**os.environ, "PYTHONPATH": ":".join(filter(None, paths)), "PYTHONDONTWRITEBYTECODE": "1"}
            command = [sys.executable, "-m", "tests.mutants.worker", *arguments]
            running.append(subprocess.Popen(command, cwd=copy, env=environment))
        try:
            codes = [worker.wait() for worker in running]
        except BaseException:
            for worker in running:
                worker.terminate()
            raise
    if any(codes):
        raise SystemExit(f"workers ended with {codes}")


def summary(mutants_path: Path, results: Path, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One row for the run, with its survivors."""
    mutants = read_mutants(mutants_path)
    rows: dict[int, list[dict[str, Any]]] = {mutant.number: [] for mutant in mutants}
    for row in read_rows(results):
        rows[row["number"]].append(row)
    outcome = {number: _outcome(found) for number, found in rows.items()}
    packages = {
        package: dict(sorted(Counter(outcome[each.number] for each in mutants if each.package == package).items()))
        for package in PACKAGES
    }
    counts = Counter(outcome.values())
    survivors = [mutant for mutant in mutants if outcome[mutant.number] in ("survived", "unfinished")]
    return {
        "tests": name, "seed": options.seed, "number": len(mutants), "killed": counts["killed"] + counts["timeout"],
        "survived": counts["survived"], "timeouts": counts["timeout"], "unfinished": counts["unfinished"],
        "cap": options.cap, "seconds": round(sum(row["seconds"] for found in rows.values() for row in found)),
        "packages": packages,
        "survivors": [
            {"number": each.number, "at": f"{each.module}:{each.line}", "operator": each.operator,
             "old": each.old, "new": each.new, "tests": sum(row["tests"] for row in rows[each.number])}
            for each in survivors
        ],
    }  # fmt: skip


def _outcome(rows: list[dict[str, Any]]) -> str:
    """Of a mutant: killed, timeout, survived, or unfinished if it has survived only what has run."""
    ends = [row["outcome"] for row in rows if row["outcome"] != "survived"]
    return ends[0] if ends else "survived" if any(row["last"] for row in rows) else "unfinished"


def _parser() -> argparse.ArgumentParser:
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__, formatter_class=kind)
    parser.add_argument("command", choices=("draw", "map", "run", "carry"))
    parser.add_argument("--tests", type=Path, default=Path(), help="the tree whose tests run (default: this one)")
    parser.add_argument("--name", help="what the tree is called in the row (default: its folder)")
    parser.add_argument("--mutants", type=Path, default=Path("mutants.jsonl"))
    parser.add_argument("--carried", type=Path, default=Path("carried.jsonl"))
    parser.add_argument("--drawn-from", type=Path, default=Path(), help="carry: the mutants' tree (default: this one)")
    parser.add_argument("--map", type=Path, default=Path("map.jsonl"))
    parser.add_argument("--results", type=Path, default=Path("results.jsonl"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--number", type=int, default=300)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--cap", type=float, default=60.0, help="seconds of tests for a mutant, as the map has them")
    parser.add_argument("--only", nargs="*", help="map: these test files alone, each named by its begin, in this order")
    return parser


def _test_files(tree: Path, only: list[str] | None) -> list[str]:
    files = sorted(str(path.relative_to(tree)) for path in (tree / "tests").rglob("test_*.py"))
    if only:
        return [file for begin in only for file in files if file.startswith(begin)]
    return [file for file in files if not _OUTSIDE.match(file)]


def main() -> None:
    options = _parser().parse_args()
    tree = options.tests.resolve()
    mutants, map_path, results = options.mutants.resolve(), options.map.resolve(), options.results.resolve()
    if options.command == "draw":
        write_mutants(draw_mutants(tree, options.seed, options.number), mutants)
    elif options.command == "carry":
        carried, lost = carry_mutants(read_mutants(mutants), options.drawn_from.resolve(), tree)
        write_mutants(carried, options.carried)
        print(f"{len(carried)} carried, {len(lost)} lost")
        for mutant in lost:
            print(f"{mutant.number} {mutant.module}:{mutant.line} {mutant.operator}")
    elif options.command == "map":
        work_in_copies(tree, options.workers, ["map", str(map_path), *_test_files(tree, options.only)])
    else:
        begun = time.time()
        work_in_copies(tree, options.workers, ["run", str(results), str(map_path), str(mutants), str(options.cap)])
        row = summary(mutants, results, options.name or tree.name, options)
        row["wall_seconds"] = round(time.time() - begun)
        results.with_suffix(".summary.json").write_text(json.dumps(row) + "\n", encoding="utf-8")
        print(json.dumps(row))


if __name__ == "__main__":
    main()
