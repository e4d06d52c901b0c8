"""Runs one of the wire's fuzzers on services of its own, and says what came of it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.checkpoints import make_llama
from tests.fuzz.wire import fuzz_executor, fuzz_scheduler
from tests.fuzz.wire.processes import VOCAB, FuzzedService, executor, scheduler

SERVICES = ("scheduler", "simulated", "cpu")
"""A scheduler, the simulated executor, and the executor of a model on the CPU."""


@dataclass(frozen=True)
class Report:
    """What came of a run in which nothing failed."""

    num_examples: int
    statuses: dict[str, int]
    """How calls ended, and steps; by name."""
    grown_bytes: int
    """Resident memory at the end over that after half of the examples."""


def fuzz(service: str, num_examples: int, seed_: int, on_example: Callable[[int], object] = lambda _: None) -> Report:
    """Send examples to one of `SERVICES`; raises what the first failing one raises, after shrinking it."""
    with _running(service) as (process, fuzzer, examples):
        sizes = [process.resident_bytes]

        @seed(seed_)
        @settings(
            max_examples=num_examples,
            database=None,
            derandomize=False,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink],
        )
        @given(examples)
        def run(example: Any) -> None:
            fuzzer.run(example)
            on_example(fuzzer.num_examples)
            if fuzzer.num_examples == num_examples // 2:
                sizes.append(process.resident_bytes)

        run()
        return Report(fuzzer.num_examples, fuzzer.statuses, process.resident_bytes - sizes[-1])


@contextmanager
def _running(service: str) -> Iterator[tuple[FuzzedService, Any, Any]]:
    with tempfile.TemporaryDirectory() as name:
        folder = make_llama(Path(name) / "model", tokenizer=True, vocab_size=VOCAB)
        if service == "scheduler":
            with scheduler(folder, Path(name)) as process:
                yield process, fuzz_scheduler.SchedulerFuzz(process), fuzz_scheduler.examples()
            return
        options = ("--simulate", "instant") if service == "simulated" else ()
        with executor(folder, *options, "--speculative", "suffix", log=Path(name) / "log") as process:
            yield process, fuzz_executor.ExecutorFuzz(process), fuzz_executor.examples()
