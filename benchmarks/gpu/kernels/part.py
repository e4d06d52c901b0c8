"""Part `kernels`: kernels and whole steps beside the limits of the hardware, most important first, in limited time.

Each group of cases has its own process. A case that fails is one line, and the rest goes on. The last groups are
skipped first when time runs out.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence

from benchmarks.common.benchmark import SEED, progress
from benchmarks.common.rows import OtherLoad
from benchmarks.gpu import environment
from benchmarks.gpu.cases import Case, Ceilings, Group, Metrics, Outcome
from benchmarks.gpu.environment import Output, header
from benchmarks.gpu.kernels import (
    ceilings,
    elementwise,
    exact,
    experts,
    linears,
    lora,
    recurrences,
    skinny,
    steps,
    swaps,
)
from benchmarks.gpu.kernels.attention import attention, attention_tuning, flashinfer, latents
from benchmarks.gpu.kernels.ceilings import GROUP as CEILINGS
from benchmarks.gpu.kernels.ceilings import ceilings_of
from benchmarks.gpu.kernels.group_process import GroupProcess, outcomes

ROWS = "gpu_kernels"
_MAX_COMPILERS = 8
_GRACE_S = 15.0
_LOAD_WINDOW_S = 0.5
_TUNED_BY = ("kv", "batch", "context", "num_tokens")


def groups_of(options: argparse.Namespace) -> list[Group]:
    """The chosen groups, ceilings always; of whole steps those of the chosen shapes."""
    shapes = {shape.name for shape in options.shapes}
    of_shapes = [*steps.GROUPS.items(), *steps.SKINNY.items()]
    of_shapes += [(steps.EARLY_SHAPE, steps.EARLY), (steps.EXACT_SHAPE, steps.EXACT)]
    other_steps = [] if options.trial else [group for name, group in of_shapes if name not in shapes]
    chosen = [group.name for group in ORDER if group not in other_steps] if options.groups is None else options.groups
    return [group for group in ORDER if group.name in chosen or group is CEILINGS]


class LoadMeter:
    """CPU cores that other processes use, over windows long enough for a reading."""

    def __init__(self) -> None:
        self._last = 0.0
        self._begin()

    def _begin(self) -> None:
        self._began, self._load = time.monotonic(), OtherLoad().__enter__()

    def read(self) -> float:
        """Cores in the last complete window."""
        if time.monotonic() - self._began >= _LOAD_WINDOW_S:
            self._load.__exit__(None, None, None)
            self._last = self._load.cores
            self._begin()
        return self._last


def measure(groups: Sequence[Group], tiny: bool, end_at: float) -> Iterator[tuple[Group, Case, Outcome]]:
    """Every case of every group with its outcome.

    Preloads run while kernels compile, otherwise once the ceilings are known: ceilings are measured undisturbed.
    """
    loading: dict[str, GroupProcess] = {}
    ceilings, found = Ceilings(), dict[str, Metrics]()
    warm = list(dict.fromkeys(WARM[group.name].name for group in groups if group.name in WARM))
    try:
        if warm:
            loading = _preload(groups, tiny)
        for name in warm:
            _compile(GROUPS[name], tiny, end_at)
        for group in groups:
            group_end = min(end_at, time.monotonic() + group.limit_s)
            for case, outcome in outcomes(group, tiny, ceilings, group_end, loading.pop(group.name, None)):
                yield group, case, outcome
                if group is CEILINGS and outcome.metrics:
                    found[case.name] = outcome.metrics
            if group is CEILINGS:
                ceilings = ceilings_of(found)
                progress(f"ceilings: {ceilings}")
                if not warm:
                    loading = _preload(groups, tiny)
    finally:
        for process in loading.values():
            process.stop()


def _preload(groups: Sequence[Group], tiny: bool) -> dict[str, GroupProcess]:
    """Start the first group that loads slowly; the others load at their turn.

    All models together do not fit a GPU of 80 GB, and a start compares and times kernels, which others would disturb.
    """
    slow = [group for group in groups if group.preload is not None]
    return {group.name: GroupProcess(group, tiny) for group in slow[:1]}


def _compile(warm: Group, tiny: bool, end_at: float) -> None:
    """Fill Triton's cache with several processes at once: otherwise compiling would be most of a case's time."""
    began = time.monotonic()
    count = 1 if tiny else max(1, min(_MAX_COMPILERS, (os.cpu_count() or 1) // 2))
    processes = [GroupProcess(warm, tiny, start, count) for start in range(count)]
    names = [case.name for case in warm.cases(tiny)]
    group_end = min(end_at, began + warm.limit_s)
    num_done = 0
    for process in processes:
        try:
            if process.receive(group_end - time.monotonic()) is not None:
                process.go(Ceilings(), group_end)
        except TimeoutError:
            process.stop()
    for process in processes:
        try:
            while (message := process.receive(group_end + _GRACE_S - time.monotonic())) is not None:
                num_done += "done" in message and not message.get("skipped")
                if message.get("error"):
                    progress(f"compile: {names[message['done']]}: {message['error']}")
        except TimeoutError:
            progress("compile: a process did not end in time")
        process.stop()
    progress(f"compile: {num_done} of {len(names)} kernels in {time.monotonic() - began:.0f} s")


def tables(done: Sequence[tuple[Group, Case, Outcome]]) -> str:
    """A table for each group; for tiles the best candidates too."""
    parts = []
    for group in dict.fromkeys(group.name for group, _, _ in done):
        rows = [(each, case.goal) for found, case, each in done if found.name == group]
        title = next(found.title for found, _, _ in done if found.name == group)
        parts.append(environment.table(f"{group}: {title}", rows))
        if group.startswith("tune-"):
            metric = "tflop_per_s" if group == "tune-prefill" else "tb_per_s"
            parts += environment.best_of([outcome for outcome, _ in rows], _TUNED_BY, metric)
    parts.append(environment.summary([(outcome, case.goal) for _, case, outcome in done]))
    return "\n".join(parts)


def run(options: argparse.Namespace) -> int:
    """Exit codes: 0 no case failed, 1 one failed."""
    began = time.monotonic()
    output = Output.of("kernels", options.out, options.trial)
    print(header("kernels"), flush=True)
    meter, done = LoadMeter(), list[tuple[Group, Case, Outcome]]()
    for group, case, outcome in measure(groups_of(options), options.trial, began + options.seconds - _GRACE_S):
        done.append((group, case, outcome))
        print(environment.as_line(outcome, case.goal), flush=True)
        if outcome.metrics:
            output.add(environment.row_of(ROWS, outcome, SEED, meter.read()))
    text = tables(done)
    output.write("kernels.txt", text)
    print(text, output.places(ROWS), f"== {time.monotonic() - began:.0f} s", sep="\n", flush=True)
    return int(any(outcome.error for _, _, outcome in done))


WARM: dict[str, Group] = {
    **dict.fromkeys(("decode", "prefill", "blocks", "tune-decode", "tune-prefill"), attention_tuning.WARM),
    attention_tuning.TUNE_SEGMENTS.name: attention_tuning.WARM_SEGMENTS,
}
"""Groups whose kernels several processes compile in advance, each with the group that does it."""
ORDER: tuple[Group, ...] = (
    ceilings.GROUP,
    attention.DECODE,
    attention.PREFILL,
    latents.GROUP,
    recurrences.GROUP,
    exact.PRODUCTS,
    exact.CUBLASLT,
    exact.ATTENTION,
    *steps.GROUPS.values(),
    skinny.GROUP,
    *steps.SKINNY.values(),
    steps.EARLY,
    steps.EXACT,
    elementwise.GROUP,
    linears.GROUP,
    linears.FEW_BITS,
    experts.GROUP,
    lora.GROUP,
    swaps.GROUP,
    attention.BLOCKS,
    attention_tuning.TUNE_PREFILL,
    attention_tuning.TUNE_DECODE,
    attention_tuning.TUNE_SEGMENTS,
    skinny.TUNE,
    flashinfer.GROUP,
)
GROUPS: dict[str, Group] = {group.name: group for group in (*ORDER, *WARM.values())}
