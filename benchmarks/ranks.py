"""What do ranks cost on the CPU of one machine, and what do they save? One exchange beside gloo's, whole steps with 1
rank and more, and the bytes that each rank holds beside its share of the whole."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.common.benchmark import Benchmark, positive, progress
from benchmarks.common.checkpoints import SHAPES, random_checkpoint
from benchmarks.common.other_load import OtherLoad, wait_quiet
from benchmarks.common.rows import BenchmarkError, Row, make_row, usable_cores

NAME = "ranks"
MEASURES = ("exchange", "steps", "memory")
_ROWS, _HIDDEN, _SIZES = (1, 64, 512), (576, 4096), (2, 4)
_MOST_RANKS = 4
_MOST_PERCENT = 10.0
"""Over its share of the whole, of a rank's weights."""
_SEQUENCES, _PROMPT, _DECODES = 16, 16, 40
_TIMES = {1: 400, 64: 200, 512: 50}
"""Exchanges in a row, by the number of rows."""


def _run(options: argparse.Namespace) -> Iterator[Row]:
    if options.quick:
        options.shapes, options.repeats, options.sizes = ["10m"], 1, [2]
    if "exchange" in options.measure:
        for size in options.sizes:
            yield from _exchanges(size, options)
    for shape in options.shapes:
        if "steps" in options.measure:
            yield from _steps(shape, options)
        if "memory" in options.measure:
            yield from _memory(shape, options)


def sizes_of(shape: str) -> list[int]:
    """Return the numbers of ranks, 1 to 4, that a shape can be divided among."""
    fields = SHAPES[shape]
    heads, kv_heads = fields["num_attention_heads"], fields["num_key_value_heads"]
    return [
        size
        for size in range(1, _MOST_RANKS + 1)
        if not heads % size and not fields["intermediate_size"] % size and not (kv_heads % size and size % kv_heads)
    ]


# --- one exchange ----------------------------------------------------------------------------------------------------


def _exchanges(size: int, options: argparse.Namespace) -> Iterator[Row]:
    from benchmarks.parallel.exchanges import Exchange, exchange_times
    from benchmarks.parallel.processes import on_processes

    rows = _ROWS[:2] if options.quick else _ROWS
    cases = [Exchange(count, hidden, _TIMES[count]) for hidden in _HIDDEN for count in rows]
    repeats: list[list[dict[str, float]]] = []
    others: list[float] = []
    for _ in range(options.repeats):
        wait_quiet(options.quiet_wait_s)
        with OtherLoad() as other, tempfile.TemporaryDirectory(prefix="cadenza-ranks-", dir="/dev/shm") as folder:
            found = on_processes(size, exchange_times, folder, options.seed, cases)
        others.append(other.cores)
        # A rank that came last has waited least: the exchange takes as long as for the one that waits longest.
        repeats.append([_slowest([each[index] for each in found]) for index in range(len(cases))])
        progress(f"{NAME}: exchanges of {size} ranks: {repeats[-1]}")
    for index, case in enumerate(cases):
        params = {"case": "exchange", "ranks": size, "rows": case.rows, "hidden": case.hidden, "peer": "gloo"}
        yield _row(params, [each[index] for each in repeats], others, options)


def _slowest(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    ours, gloo = (max(each[name] for each in ranks) for name in ("ours", "gloo"))
    return {"ours_us": ours, "gloo_us": gloo, "times_gloo": gloo / ours}


# --- whole steps -----------------------------------------------------------------------------------------------------


def _steps(shape: str, options: argparse.Namespace) -> Iterator[Row]:
    from benchmarks.parallel.processes import on_processes
    from benchmarks.parallel.steps import BLOCK_SIZE, Steps, step_times

    steps = Steps(_SEQUENCES, _PROMPT, 8 if options.quick else _DECODES)
    blocks = _SEQUENCES * -(-(_PROMPT + steps.decodes + 1) // BLOCK_SIZE)
    sizes = {
        "block_size": BLOCK_SIZE, "num_gpu_blocks": blocks, "max_num_seqs": _SEQUENCES,
        "max_num_batched_tokens": _SEQUENCES * _PROMPT, "max_model_len": 512,
    }  # fmt: skip
    alone: Mapping[str, float] = {}
    for size in sizes_of(shape):
        wait_quiet(options.quiet_wait_s)
        with OtherLoad() as other:
            given = {**_options(shape, size), **sizes}
            (found,) = on_processes(1, step_times, given, steps, options.repeats)
        if any(each["tokens"] != found[0]["tokens"] for each in found):
            raise BenchmarkError(f"{shape}: {size} ranks have given other tokens in another session")
        repeats = [{name: each[name] for name in ("prefill_ms", "decode_ms", "agree_us")} for each in found]
        params = {
            "case": "steps", "model": shape, "ranks": size, "threads_of_a_rank": _threads(size),
            "sequences": _SEQUENCES, "prefill_tokens": _SEQUENCES * _PROMPT,
        }  # fmt: skip
        row = _row(params, repeats, [other.cores], options)
        alone = alone or row.medians
        row.medians["times_one_rank"] = round(row.medians["decode_ms"] / alone["decode_ms"], 3)
        yield row


# --- memory ----------------------------------------------------------------------------------------------------------


def _memory(shape: str, options: argparse.Namespace) -> Iterator[Row]:
    from benchmarks.parallel.memory import loaded_bytes
    from benchmarks.parallel.processes import on_processes

    (whole,) = on_processes(1, loaded_bytes, _options(shape, 1))
    for size in sizes_of(shape)[1:]:
        with OtherLoad() as other:
            ranks = on_processes(size, loaded_bytes, _options(shape, size))
        share = whole["weights"] / size
        most, grown = max(each["weights"] for each in ranks), max(each["grown"] for each in ranks)
        found = {
            "whole_bytes": whole["weights"],
            "most_of_a_rank_bytes": most,
            "over_its_share_percent": (most / share - 1) * 100,
            "whole_process_grows_bytes": whole["grown"],
            "process_grows_bytes": grown,
        }
        if found["over_its_share_percent"] > _MOST_PERCENT:
            raise BenchmarkError(
                f"{shape}: a rank of {size} holds {most:.0f} bytes of weights, its share is {share:.0f}"
            )
        yield _row({"case": "memory", "model": shape, "ranks": size}, [found], [other.cores], options)


# ---------------------------------------------------------------------------------------------------------------------


def _options(shape: str, size: int) -> dict[str, Any]:
    return {
        "model": str(random_checkpoint(shape)), "device": "cpu", "dtype": "bfloat16", "num_threads": _threads(size),
        "tensor_parallel_size": size,
    }  # fmt: skip


def _threads(size: int) -> int:
    return max(1, usable_cores() // size)


def _row(
    params: Mapping[str, Any],
    repeats: Sequence[Mapping[str, float]],
    others: Sequence[float],
    options: argparse.Namespace,
) -> Row:
    return make_row(NAME, seed=options.seed, params=params, repeats=repeats, other_cores=others)


def _describe(row: Row) -> str:
    params, found = row.params, row.medians
    if params["case"] == "exchange":
        return (
            f"{params['ranks']} ranks, sum of [{params['rows']}, {params['hidden']}]: {found['ours_us']:.0f} us, gloo "
            f"{found['gloo_us']:.0f} us"
        )
    if params["case"] == "steps":
        return (
            f"{params['model']}, {params['ranks']} ranks of {params['threads_of_a_rank']} threads: decode "
            f"{found['decode_ms']:.2f} ms ({found['times_one_rank']:.2f} times that of one rank), prefill "
            f"{found['prefill_ms']:.1f} ms, of which {found['agree_us']:.0f} us to agree"
        )
    return (
        f"{params['model']}, {params['ranks']} ranks: at most {found['most_of_a_rank_bytes'] / 2**20:.1f} MiB of "
        f"weights, {found['over_its_share_percent']:+.1f}% of the share of {found['whole_bytes'] / 2**20:.1f} MiB"
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--measure", nargs="+", choices=MEASURES, default=MEASURES, help="what (default all)")
    parser.add_argument(
        "--shapes", nargs="+", choices=list(SHAPES), default=["10m", "135m", "qwen3-0.6b"],
        help="random checkpoints of steps and memory (default 10m, 135m and qwen3-0.6b)",
    )  # fmt: skip
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=positive,
        default=list(_SIZES),
        help="numbers of ranks of exchanges (default 2 and 4)",
    )
    parser.add_argument("--quick", action="store_true", help="the small model, few cases: whether it works at all")


BENCHMARK = Benchmark(NAME, "what do ranks cost on the CPU, and what does each hold?", _add_options, _run, _describe)
