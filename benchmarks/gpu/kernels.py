"""`run.sh kernels`: kernels and whole steps beside what the hardware gives, most important first, in limited time.

Each group of cases has a process of its own. What does not compile, does not fit or breaks is one line, and the rest
goes on. Rows go to $OUT/gpu_kernels.jsonl as they come, the table to $OUT/kernels.txt at the end.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence

from benchmarks.common.benchmark import SEED, progress
from benchmarks.common.other_load import OtherLoad
from benchmarks.gpu import results
from benchmarks.gpu.cases import Case, Ceilings, Goal, Group, Metrics, Outcome
from benchmarks.gpu.ceilings import GROUP as CEILINGS
from benchmarks.gpu.ceilings import ceilings_of
from benchmarks.gpu.group_process import GroupProcess, outcomes
from benchmarks.gpu.groups import ORDER, WARM
from benchmarks.gpu.machine import header, out_folder

BUDGET_S = 490.0
_MOST_WARM = 8
_GRACE_S = 15.0
_LOAD_WINDOW_S = 0.5
_COMPILED = ("decode", "prefill", "blocks", "tune-decode", "tune-prefill")
"""Groups whose kernels are compiled by several processes before."""
_TUNED_BY = ("kv", "batch", "context", "num_tokens")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="benchmarks/gpu/run.sh kernels", description=__doc__.partition("\n")[0])
    names = [group.name for group in ORDER]
    parser.add_argument("--groups", help=f"some of {','.join(names)}; ceilings are always measured")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds for all (default %(default)s)")
    parser.add_argument(
        "--interpreted", action="store_true", help="tiny sizes, Triton's interpreter for a GPU: a trial"
    )
    options = parser.parse_args(arguments)
    chosen = names if options.groups is None else options.groups.split(",")
    if unknown := sorted(set(chosen) - set(names)):
        parser.error(f"--groups: there is no {unknown[0]!r}; there are {', '.join(names)}")
    options.groups = [group for group in ORDER if group.name in chosen or group is CEILINGS]
    return options


class LoadMeter:
    """Cores that others use, over windows that are long enough to tell."""

    def __init__(self) -> None:
        self._last = 0.0
        self._begin()

    def _begin(self) -> None:
        self._began, self._load = time.monotonic(), OtherLoad().__enter__()

    def read(self) -> float:
        """Of the last whole window."""
        if time.monotonic() - self._began >= _LOAD_WINDOW_S:
            self._load.__exit__(None, None, None)
            self._last = self._load.cores
            self._begin()
        return self._last


def measure(groups: Sequence[Group], tiny: bool, end_at: float) -> Iterator[tuple[Group, Case, Outcome]]:
    """Every case of every group and what came of it.

    What takes long to load is begun beside the compiling, or when the ceilings are known: they suffer nothing beside.
    """
    loading: dict[str, GroupProcess] = {}
    ceilings, found = Ceilings(), dict[str, Metrics]()
    compiles = any(group.name in _COMPILED for group in groups)
    try:
        if compiles:
            loading = _begin(groups, tiny)
            _compile(tiny, end_at)
        for group in groups:
            group_end = min(end_at, time.monotonic() + group.limit_s)
            for case, outcome in outcomes(group, tiny, ceilings, group_end, loading.pop(group.name, None)):
                yield group, case, outcome
                if group is CEILINGS and outcome.metrics:
                    found[case.name] = outcome.metrics
            if group is CEILINGS:
                ceilings = ceilings_of(found)
                progress(f"ceilings: {ceilings}")
                if not compiles:
                    loading = _begin(groups, tiny)
    finally:
        for process in loading.values():
            process.stop()


def _begin(groups: Sequence[Group], tiny: bool) -> dict[str, GroupProcess]:
    return {group.name: GroupProcess(group, tiny) for group in groups if group.preload is not None}


def _compile(tiny: bool, end_at: float) -> None:
    """Fill Triton's cache by several processes at once, as most of a case's time would be compiling."""
    began = time.monotonic()
    count = 1 if tiny else max(1, min(_MOST_WARM, (os.cpu_count() or 1) // 2))
    processes = [GroupProcess(WARM, tiny, start, count) for start in range(count)]
    names = [case.name for case in WARM.cases(tiny)]
    group_end = min(end_at, began + WARM.limit_s)
    num_done = 0
    for process in processes:
        try:
            if process.say(group_end - time.monotonic()) is not None:
                process.go(Ceilings(), group_end)
        except TimeoutError:
            process.stop()
    for process in processes:
        try:
            while (said := process.say(group_end + _GRACE_S - time.monotonic())) is not None:
                num_done += "done" in said and not said.get("skipped")
                if said.get("error"):
                    progress(f"warm: {names[said['done']]}: {said['error']}")
        except TimeoutError:
            progress("warm: a process did not end in time")
        process.stop()
    progress(f"warm: {num_done} of {len(names)} kernels compiled in {time.monotonic() - began:.0f} s")


def tables(done: Sequence[tuple[Group, Case, Outcome]]) -> str:
    """One table, group by group; of tiles the best ones too."""
    parts = []
    for group in dict.fromkeys(group.name for group, _, _ in done):
        rows = [(each, case.goal) for found, case, each in done if found.name == group]
        title = next(found.title for found, _, _ in done if found.name == group)
        parts.append(results.table(f"{group}: {title}", rows))
        if group.startswith("tune-"):
            metric = "tb_per_s" if group == "tune-decode" else "tflop_per_s"
            parts += results.best_of([outcome for outcome, _ in rows], _TUNED_BY, metric)
    parts.append(summary([(outcome, case.goal) for _, case, outcome in done]))
    return "\n".join(parts)


def summary(done: Sequence[tuple[Outcome, Goal | None]]) -> str:
    """How many of the cases came to something, and to their goals."""
    judged = [goal.judge(outcome.metrics) for outcome, goal in done if goal]
    failed, skipped = (sum(bool(getattr(outcome, name)) for outcome, _ in done) for name in ("error", "skipped"))
    return (
        f"== {len(done)} cases: {failed} failed, {skipped} skipped; goals: {judged.count('met')} met, "
        f"{judged.count('missed')} missed"
    )


def main(arguments: Sequence[str]) -> int:
    """Exit codes: 0 every case that was run came to something, 1 one failed, 2 wrong arguments."""
    began = time.monotonic()
    options = parse(arguments)
    if options.interpreted:
        os.environ["TRITON_INTERPRET"] = "1"
    folder = out_folder("kernels")
    print(header("kernels"), flush=True)
    meter, done = LoadMeter(), list[tuple[Group, Case, Outcome]]()
    for group, case, outcome in measure(options.groups, options.interpreted, began + options.budget_s):
        done.append((group, case, outcome))
        print(results.said(outcome, case.goal), flush=True)
        results.append_line(folder, results.KERNELS, results.json_line(results.KERNELS, outcome, SEED, meter.read()))
    text = tables(done)
    (folder / "kernels.txt").write_text(text + "\n", encoding="utf-8")
    print(f"{text}\n== {time.monotonic() - began:.0f} s", flush=True)
    return int(any(outcome.error for _, _, outcome in done))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
