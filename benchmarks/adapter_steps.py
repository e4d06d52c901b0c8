"""What do LoRA adapters cost on the CPU? Steps of one model whose rows have adapters, and the same steps without."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.common.benchmark import Benchmark, positive, progress
from benchmarks.common.checkpoints import SHAPES, random_checkpoint
from benchmarks.common.other_load import OtherLoad, wait_quiet
from benchmarks.common.rows import BenchmarkError, Row, make_row
from benchmarks.common.stats import percentile

if TYPE_CHECKING:  # torch comes with these: only once the benchmark runs
    from pathlib import Path

    from executor_svc.batch.forward_batch import ForwardBatch
    from executor_svc.cpu.runner import ModelRunner
    from executor_svc.models.adapters.adapter import Adapter

NAME = "adapter_steps"
_CONTEXT = 120


@dataclass(frozen=True, slots=True)
class _Case:
    """A step: `decodes` sequences of one token after a context of _CONTEXT, or one prompt of `prompt` tokens."""

    name: str
    decodes: int
    prompt: int
    adapters: int
    """Used in turns by the step's rows."""


_CASES = (
    *(_Case(f"decode16 of {count}", 16, 0, count) for count in (1, 4, 16)),
    *(_Case(f"decode64 of {count}", 64, 0, count) for count in (1, 4, 16, 64)),
    _Case("prefill256 of 1", 0, 256, 1),
)
_MOST = max(case.adapters for case in _CASES)


def _run(options: argparse.Namespace) -> Iterator[Row]:
    import torch

    from benchmarks.common.forward_step import make_runner, step_batch
    from executor_svc.models.adapters.places import AdapterSizes

    folder = random_checkpoint(options.shape)
    torch.manual_seed(options.seed)
    sizes = AdapterSizes(_MOST, options.max_rank)
    more = {"dtype": options.dtype}
    plain = make_runner(folder, options.num_threads, more=more)
    adapted = make_runner(folder, options.num_threads, more=more, adapter_sizes=sizes)
    assert adapted.adapters is not None
    for place in range(_MOST):
        adapted.adapters.load(place, adapted.adapters.pack(_random_adapter(folder, options.rank, place)))
    for case in _CASES:
        batch = step_batch([(_CONTEXT, 1)] * case.decodes + [(0, case.prompt)] * bool(case.prompt))
        rows = len(batch.token_ids)
        with_adapters = replace(batch, adapter_places=np.arange(rows) % case.adapters)
        _check(adapted.runner, plain.runner, batch, with_adapters)
        repeats, others = [], []
        for _ in range(options.repeats):
            wait_quiet(options.quiet_wait_s)
            with OtherLoad() as other:
                repeats.append(_compare(adapted.runner, plain.runner, batch, with_adapters, options.steps))
            others.append(other.cores)
            progress(f"{NAME}: {options.shape} {case.name}: {repeats[-1]}")
        params = {"model": folder.name, "case": case.name, "rank": options.rank, "max_rank": options.max_rank}
        params |= {"dtype": options.dtype, "steps": options.steps, "threads": adapted.num_threads}
        yield make_row(NAME, seed=options.seed, params=params, repeats=repeats, other_cores=others)


def _random_adapter(model: Path, rank: int, seed: int) -> Adapter:
    """Return an adapter of all linears of the layers."""
    import json

    import torch

    from executor_svc.models.adapters.adapter import Adapter, LoraPart
    from executor_svc.models.adapters.config import parse_config
    from executor_svc.models.adapters.modules import decoder_modules
    from executor_svc.models.registry import ARCHITECTURES

    content = json.loads((model / "config.json").read_text(encoding="utf-8"))
    random, linears = torch.Generator().manual_seed(seed), dict[object, tuple[LoraPart, ...]]()
    for module in decoder_modules(ARCHITECTURES[content["architectures"][0]](content)).values():
        if module.layer is None or module.linear is None:
            continue
        (outer, inner), use = module.shape, (module.layer, module.linear)
        a, b = torch.randn(rank, inner, generator=random), torch.randn(outer, rank, generator=random)
        part = LoraPart(module.name, a * inner**-0.5, b * 0.02, 1.0, module.first_row)
        linears[use] = (*linears.get(use, ()), part)
    config = parse_config({"peft_type": "LORA", "r": rank, "target_modules": "all-linear"})
    return Adapter(config, linears, None, None, None, bytes(32))  # type: ignore[arg-type]


def _check(adapted: ModelRunner, plain: ModelRunner, batch: ForwardBatch, with_adapters: ForwardBatch) -> None:
    """Raise BenchmarkError if a step without adapters is not the plain model's, or adapters change nothing."""
    expected = plain.forward(batch).clone()
    if not bool((adapted.forward(batch) == expected).all()):
        raise BenchmarkError("a step without adapters differs from the plain model's")
    if bool((adapted.forward(with_adapters) == expected).all(1).any()):
        raise BenchmarkError("an adapter changes nothing")


def _compare(
    adapted: ModelRunner, plain: ModelRunner, batch: ForwardBatch, with_adapters: ForwardBatch, steps: int
) -> Mapping[str, float]:
    """Medians of `steps` steps of each kind, in turns."""
    kinds = {"plain": (plain, batch), "none_used": (adapted, batch), "adapters": (adapted, with_adapters)}
    taken: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(steps):
        for name, (runner, step) in kinds.items():
            began = time.perf_counter()
            runner.forward(step)
            taken[name].append((time.perf_counter() - began) * 1e3)
    found = {f"{name}_ms": percentile(times, 50) for name, times in taken.items()}
    for name in ("none_used", "adapters"):
        found[f"{name}_cost_percent"] = (found[f"{name}_ms"] / found["plain_ms"] - 1) * 100
    return found


def _describe(row: Row) -> str:
    found = row.medians
    return (
        f"{row.params['model']} {row.params['case']} adapters of rank {row.params['rank']}: {found['plain_ms']:.2f} ms "
        f"without, {found['adapters_ms']:.2f} ms with ({found['adapters_cost_percent']:+.1f}%), none used "
        f"{found['none_used_cost_percent']:+.1f}%"
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=list(SHAPES), default="135m", help="random checkpoint (default 135m)")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="(default bfloat16)")
    parser.add_argument("--rank", type=positive, default=16, help="of each adapter (default 16)")
    parser.add_argument("--max-rank", type=positive, default=64, help="that adapters may have (default 64)")
    parser.add_argument("--steps", type=positive, default=100, help="steps of each kind in a repeat (default 100)")
    parser.add_argument("--num-threads", type=positive, help="compute threads (default: one for each core)")


BENCHMARK = Benchmark(NAME, "what do LoRA adapters cost on the CPU?", _add_options, _run, _describe)
