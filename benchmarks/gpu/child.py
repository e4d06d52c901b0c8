"""One group in a process of its own: a kernel that breaks the device's context takes no other group with it.

Lines of JSON on stdout: {"loaded": true} after a preload, {"begun": index}, then {"done": index, "metrics"} with
"error" or "skipped", and "ends_group" if there is no use in another case. A line on stdin, {"ceilings", "end_at"},
lets it begin.
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
from benchmarks.gpu.groups import GROUPS
from benchmarks.gpu.machine import is_interpreted
from benchmarks.peers.answering import answering


def make_bench(tiny: bool) -> Bench:
    """What cases run with here: a GPU's clock, or the host's under the interpreter."""
    import torch

    from benchmarks.gpu.timing import GpuClock, HostClock

    if is_interpreted():
        device = torch.device("cpu")
        return Bench(device, HostClock(), tiny=tiny)
    device = torch.device("cuda")
    return Bench(device, GpuClock(device), tiny=tiny)


@contextlib.contextmanager
def playing_gpu() -> Iterator[None]:
    """Let Triton's interpreter do what it can not without help, where it plays the GPU's part."""
    if not is_interpreted():
        yield
        return
    from tests.executor_svc.gpu.interpreter import mended_interpreter

    with mended_interpreter():
        yield


def run_group(
    group: Group, bench: Bench, start: int, every: int, end_at: float, say: Callable[[Mapping[str, Any]], None]
) -> None:
    """Run a group's cases and say what comes of each."""
    for index, outcome in run_cases(group, bench, start, end_at, every):
        if outcome is None:
            say({"begun": index})
        else:
            names = ("error", "skipped", "ends_group")
            told = {name: value for name in names if (value := getattr(outcome, name))}
            say({"done": index, "metrics": outcome.metrics, **told})


def main(arguments: list[str]) -> int:
    """Preload if asked to, wait for the line, run the group."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.child")
    parser.add_argument("group", choices=sorted(GROUPS))
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    group = GROUPS[options.group]
    with answering() as say, playing_gpu():
        bench = make_bench(options.tiny)
        if group.preload is not None:
            try:
                group.preload(bench)
            except Exception as error:
                # Kept, and raised again by each case.
                print(f"{group.name}: {one_line(error)}", file=sys.stderr)
        say({"loaded": True})
        line = sys.stdin.readline()
        if line:
            asked = json.loads(line)
            bench.ceilings = Ceilings(**asked["ceilings"])
            run_group(group, bench, options.start, options.every, asked["end_at"], say)
    sys.stderr.flush()
    # Without the interpreter's end: device threads may still be waiting.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
