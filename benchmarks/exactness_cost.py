"""What does exactness (a row's bits never depend on its batch) cost on the CPU? Steps of one model, computed in two
ways.

The other way uses the same kernels with two things that exactness forbids: LLVM may reorder and fuse float arithmetic,
and with up to four rows, for which registers are left, each element of a matrix product is two sums, added at the end.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.common.benchmark import Benchmark, positive, progress
from benchmarks.common.checkpoints import SHAPES, random_checkpoint
from benchmarks.common.other_load import OtherLoad, wait_quiet
from benchmarks.common.rows import Row, make_row
from benchmarks.common.stats import percentile

if TYPE_CHECKING:  # torch comes with these: only once the benchmark runs
    from executor_svc.batch.forward_batch import ForwardBatch
    from executor_svc.cpu.runner import ModelRunner

NAME = "exactness_cost"
_CONTEXT = 192


@dataclass(frozen=True, slots=True)
class _Case:
    """A step: `decodes` sequences of one token after a context of _CONTEXT, and a prompt of `prompt` tokens."""

    name: str
    decodes: int
    prompt: int


_CASES = (_Case("decode1", 1, 0), _Case("decode16", 16, 0), _Case("prefill256", 0, 256), _Case("mixed", 16, 240))


def _run(options: argparse.Namespace) -> Iterator[Row]:
    import torch

    from benchmarks.common.forward_step import make_runner, step_batch
    from executor_svc.cpu.kernels import matmul_tiles

    folder = random_checkpoint(options.shape)
    torch.manual_seed(options.seed)
    # fast: exact mode would detect and refuse the reordered kernels at start.
    loaded = make_runner(folder, options.num_threads, numerics="fast")
    exact, num_threads = loaded.runner, loaded.num_threads
    with _reordered(matmul_tiles):
        free = make_runner(folder, options.num_threads, numerics="fast").runner
    for case in _CASES:
        batch = step_batch([(_CONTEXT, 1)] * case.decodes + [(0, case.prompt)] * bool(case.prompt))
        differ = float((exact.forward(batch) != free.forward(batch)).double().mean())
        repeats, others = [], []
        for _ in range(options.repeats):
            wait_quiet(options.quiet_wait_s)
            with OtherLoad() as other:
                repeats.append(_compare(exact, free, batch, options.steps))
            others.append(other.cores)
            progress(f"{NAME}: {options.shape} {case.name}: {repeats[-1]}")
        params = {"model": folder.name, "case": case.name, "steps": options.steps, "threads": num_threads}
        params["share_of_hidden_states_that_differ"] = round(differ, 4)
        yield make_row(NAME, seed=options.seed, params=params, repeats=repeats, other_cores=others)


def _compare(exact: ModelRunner, free: ModelRunner, batch: ForwardBatch, steps: int) -> Mapping[str, float]:
    """Medians of `steps` steps of each runner, in turns."""
    taken: dict[str, list[float]] = {"exact": [], "free": []}
    for _ in range(steps):
        for name, runner in (("exact", exact), ("free", free)):
            began = time.perf_counter()
            runner.forward(batch)
            taken[name].append((time.perf_counter() - began) * 1e3)
    exact_ms, free_ms = (percentile(taken[name], 50) for name in ("exact", "free"))
    return {"exact_ms": exact_ms, "free_ms": free_ms, "cost_percent": (exact_ms / free_ms - 1) * 100}


@contextmanager
def _reordered(matmul_tiles: Any) -> Iterator[None]:
    """Kernels made in the context may add and multiply in any order."""
    from llvmlite import ir

    class Builder(ir.IRBuilder):  # type: ignore[misc]
        """Flags every operation as free to be reordered and fused."""

        def fadd(self, *operands: Any) -> Any:
            return super().fadd(*operands, flags=("fast",))

        def fsub(self, *operands: Any) -> Any:
            return super().fsub(*operands, flags=("fast",))

        def fmul(self, *operands: Any) -> Any:
            return super().fmul(*operands, flags=("fast",))

        def call(self, function: Any, operands: Any, *others: Any, **named: Any) -> Any:
            if isinstance(function.function_type.return_type, ir.VectorType):
                named["fastmath"] = ("fast",)
            return super().call(function, operands, *others, **named)

        def fdiv(self, *operands: Any) -> Any:
            return super().fdiv(*operands, flags=("fast",))

    before = ir.IRBuilder, matmul_tiles.CHAINS
    ir.IRBuilder, matmul_tiles.CHAINS = Builder, 2
    try:
        yield
    finally:
        ir.IRBuilder, matmul_tiles.CHAINS = before


def _describe(row: Row) -> str:
    found = row.medians
    return (
        f"{row.params['model']} {row.params['case']}: exact {found['exact_ms']:.2f} ms, free to reorder "
        f"{found['free_ms']:.2f} ms, exactness costs {found['cost_percent']:+.1f}%"
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=list(SHAPES), default="135m", help="random checkpoint (default 135m)")
    parser.add_argument("--steps", type=positive, default=100, help="steps of each way in a repeat (default 100)")
    parser.add_argument("--num-threads", type=positive, help="compute threads (default: one for each core)")


BENCHMARK = Benchmark(NAME, "what does exactness cost on the CPU?", _add_options, _run, _describe)
