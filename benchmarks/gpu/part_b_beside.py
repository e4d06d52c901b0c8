"""What part `part-b` says when its steps are done: exact mode beside fast mode, from the rows that the steps wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.cases import Goal, Outcome
from benchmarks.gpu.kernels.part import ROWS as KERNEL_ROWS
from benchmarks.gpu.kernels.steps import EXACT, GROUPS
from benchmarks.gpu.serving.run import ROWS as SERVING_ROWS
from benchmarks.gpu.shapes import LLAMA_8B

GROUP = "part-b"
PEERS = "vLLM's invariant mode loses 22 to 31% of throughput, SGLang's 34%, by their own reports"
_DECODE_GOAL, _PREFILL_GOAL = Goal("cost_percent", at_most=10), Goal("cost_percent", at_most=25)
_SERVED = "all at once, finished results"


class _Row(NamedTuple):
    params: Mapping[str, Any]
    medians: Mapping[str, float]


def size_of(rows: Path) -> dict[Path, int]:
    """Return the bytes that these rows' files in a folder have: what `compared` is to leave out."""
    return {path: path.stat().st_size if path.exists() else 0 for path in _files(rows)}


def compared(rows: Path, before: Mapping[Path, int]) -> Iterator[tuple[Outcome, Goal | None]]:
    """Yield what exact mode costs where both modes have a row, of those that were written after `size_of`.

    cost_percent: how much longer a step takes, or how much less output a second has.
    """
    kernels, serving = (list(_read(path, before.get(path, 0))) for path in _files(rows))
    steps: dict[str, dict[str, _Row]] = {}
    for row in kernels:
        steps.setdefault(str(row.params["group"]), {})[str(row.params["case"])] = row
    fast = steps.get(GROUPS[LLAMA_8B.name].name, {})
    for case, row in steps.get(EXACT.name, {}).items():
        if case in fast and "ms" in row.medians:
            goals = {"decode": _DECODE_GOAL, "prefill": _PREFILL_GOAL}
            cost = row.medians["ms"] / fast[case].medians["ms"] - 1
            yield _outcome(case, cost), goals.get(str(row.params.get("phase")))
    # Rows of fp8 and of other loads have other parameters.
    served = {_load(row): row for row in serving if row.params["case"] == _SERVED}
    for (numerics, *load), row in served.items():
        other = served.get(("fast", *load))
        if numerics == "exact" and other is not None:
            cost = 1 - row.medians["tokens_per_s"] / other.medians["tokens_per_s"]
            yield _outcome(f"served, {row.params['requests']} requests", cost), None


def _outcome(case: str, cost: float) -> Outcome:
    return Outcome(GROUP, f"exact beside fast: {case}", {}, {"cost_percent": 100 * cost})


def _load(row: _Row) -> tuple[str, ...]:
    names = ("numerics", "shape", "workload", "quantization")
    return tuple(str(row.params.get(name)) for name in names)


def _files(rows: Path) -> tuple[Path, Path]:
    return rows / f"{KERNEL_ROWS}.jsonl", rows / f"{SERVING_ROWS}.jsonl"


def _read(path: Path, first: int) -> Iterator[_Row]:
    """Yield the rows from this byte on; a line that a killed step has not ended is left out."""
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(first)
        for line in file.read().decode(errors="replace").splitlines():
            try:
                found = json.loads(line)
            except ValueError:
                continue
            yield _Row(found["params"], found["medians"])
