"""A worker: stands in its private copy of the tree, takes pieces of work that nobody has taken, appends their rows.

Started by `python -m tests.mutants`, as `python -m tests.mutants.worker map|run OUT MAP MUTANTS CAP`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import psutil

from tests.mutants.draw import read_mutants
from tests.mutants.forks import warm_up

NICE = 5


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows that all workers have appended."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def append_row(path: Path, row: dict[str, Any]) -> None:
    """One line, in one write, since other workers append too."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def claim(rows: Path, name: str) -> bool:
    """Whether the piece of work is this worker's now: nobody has it, or a worker that has died."""
    folder = rows.with_suffix(".claims")
    folder.mkdir(exist_ok=True)
    path = folder / name.replace("/", "~")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(str(os.getpid()))
        return True
    except FileExistsError:
        owner = path.read_text(encoding="utf-8")
    if not owner or psutil.pid_exists(int(owner)):
        return False
    path.unlink(missing_ok=True)
    return claim(rows, name)


def make_map(out: Path, files: list[str]) -> None:
    """Append each file's row to the map."""
    from tests.mutants.recording import map_file

    for file in files:
        if file in {row["file"] for row in read_rows(out)} or not claim(out, file):
            continue
        row = map_file(file, Path.cwd().parent)
        append_row(out, row)
        counts = f"{len(row['tests'])} tests, {len(row['left_out'])} left out"
        print(f"{file}: {counts}{'' if row['complete'] else ', NOT COMPLETE'}", flush=True)


def try_mutants(out: Path, map_path: Path, mutants_path: Path, cap: float) -> None:
    """All mutants' first rounds, then the second rounds of those that survived, and so on; appends their rows."""
    from tests.mutants.seeing import read_map
    from tests.mutants.trial import rounds, try_mutant

    rows = read_map(map_path)
    mutants = read_mutants(mutants_path)
    left = {mutant.number: rounds(mutant, rows, cap) for mutant in mutants}
    for index in range(max(map(len, left.values()))):
        for mutant in mutants:
            done = [row for row in read_rows(out) if row["number"] == mutant.number]
            batch = left[mutant.number][index : index + 1]
            ended = any(row["outcome"] != "survived" or row["round"] == index for row in done)
            if ended or not batch or not claim(out, f"{mutant.number}-{index}"):
                continue
            row = try_mutant(mutant, index, batch[0], rows, Path.cwd().parent)
            row["last"] = index + 1 == len(left[mutant.number])
            append_row(out, row)
            place = f"{mutant.number}-{index} {mutant.module}:{mutant.line}"
            print(f"{place} {row['outcome']} {row['seconds']} s {row['by']}", flush=True)


def main() -> None:
    """`map OUT FILES...` or `run OUT MAP MUTANTS CAP`."""
    kind, out, *rest = sys.argv[1:]
    os.nice(NICE)
    warm_up()
    if kind == "map":
        make_map(Path(out), rest)
    else:
        try_mutants(Path(out), Path(rest[0]), Path(rest[1]), float(rest[2]))


if __name__ == "__main__":
    main()
