"""A group in its own process: a kernel that breaks the device's context leaves other groups unharmed.

Writes lines of JSON: {"loaded": true} after the preload, then {"begun": index} and {"done": index, "metrics": ...} per
case, with "error" or "skipped", and "ends_group" if the remaining cases are not run. Reads one line that starts the
cases: {"ceilings": ..., "end_at": ...}.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks.gpu.cases import Bench, Ceilings, Group, one_line, run_cases
from benchmarks.gpu.environment import is_interpreted
from benchmarks.gpu.kernels.part import GROUPS
from benchmarks.peers.answering import answering


def make_bench(tiny: bool) -> Bench:
    """The GPU and its clock; under the interpreter the CPU and the host's clock."""
    import torch

    from benchmarks.gpu.cases import GpuClock, HostClock

    if is_interpreted():
        device = torch.device("cpu")
        return Bench(device, HostClock(), tiny=tiny)
    device = torch.device("cuda")
    return Bench(device, GpuClock(device), tiny=tiny)


@contextlib.contextmanager
def patched_interpreter() -> Iterator[None]:
    """Work around faults of Triton's interpreter, if it is in use."""
    if not is_interpreted():
        yield
        return
    from tests.executor_svc.gpu.interpreter import mended_interpreter

    with mended_interpreter():
        yield


def run_group(
    group: Group, bench: Bench, start: int, every: int, end_at: float, send: Callable[[Mapping[str, Any]], None]
) -> None:
    """Run a group's cases and send their outcomes."""
    for index, outcome in run_cases(group, bench, start, end_at, every):
        if outcome is None:
            send({"begun": index})
        else:
            names = ("error", "skipped", "ends_group")
            reasons = {name: value for name in names if (value := getattr(outcome, name))}
            send({"done": index, "metrics": outcome.metrics, **reasons})


def main(arguments: list[str]) -> int:
    """Preload, wait for the line, run the group."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.kernels.child")
    parser.add_argument("group", choices=sorted(GROUPS))
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    group = GROUPS[options.group]
    with answering() as send, patched_interpreter():
        bench = make_bench(options.tiny)
        if group.preload is not None:
            try:
                group.preload(bench)
            except Exception as error:
                # The bench keeps the error and raises it in each case.
                print(f"{group.name}: {one_line(error)}", file=sys.stderr)
        send({"loaded": True})
        line = sys.stdin.readline()
        if line:
            message = json.loads(line)
            bench.ceilings = Ceilings(**message["ceilings"])
            run_group(group, bench, options.start, options.every, message["end_at"], send)
    sys.stderr.flush()
    # Skip Python's shutdown: device threads may still wait.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
