"""How near is the CPU path to what the machine allows? Steps alone, and both services, beside the machine's limits and
the peers.

The limits are measured around each repeat, and the higher rates count. A share is the least time for the work at these
rates over the time taken.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common.benchmark import Benchmark, positive, positive_number, progress
from benchmarks.common.checkpoints import (
    SHAPES,
    about_workload,
    add_set_option,
    has_tied_table,
    random_checkpoint,
    service_options,
    vocab_size,
)
from benchmarks.common.rows import BenchmarkError, OtherLoad, Row, make_row, percentile, usable_cores, wait_quiet
from benchmarks.common.workload import Request, decode_workload, make_workload
from benchmarks.serving.opening import (
    BF16,
    CADENZA,
    GGUF_WEIGHTS,
    SYSTEMS,
    WEIGHTS,
    add_peer_options,
    chosen_systems,
    model_path,
    names_type,
    open_systems,
    prepare_weights,
    rounding_option,
)
from benchmarks.serving.results import describe as describe_systems
from benchmarks.serving.results import serving_row
from benchmarks.serving.step_work import Chunk, DecoderWork, folder_work
from benchmarks.serving.systems import Job, Run, measure_all, run_text

if TYPE_CHECKING:  # torch and llvmlite come with these: only once the benchmark runs
    from benchmarks.common.forward_step import LoadedRunner
    from benchmarks.serving.machine_limits import LimitMeter, Limits
    from benchmarks.serving.step_work import StoredWeights

NAME = "cpu_limits"
FORWARD, SERVING = "forward", "serving"
GROUPS = (FORWARD, SERVING)
STEPS: dict[str, tuple[Chunk, ...]] = {
    "decode1": (Chunk(192, 1),),
    "decode16": (Chunk(192, 1),) * 16,
    "prompts": (Chunk(0, 128),) * 4,
}
"""The steps of the group `forward`."""
SCENARIOS = ("decode1", "decode16", "burst", "prompts")
_BURST = {"qwen3-0.6b": 16, "1b": 12, "olmoe-4l": 16, "qwen3-30b-a3b-3l": 16}
_BURST_OF_SMALL = 64
_FEWEST_STEPS = 3


@dataclass(frozen=True, slots=True)
class _Model:
    """A checkpoint with weights of --weights, and what its rows share."""

    shape: str
    folder: Path
    work: DecoderWork
    stored: StoredWeights | None
    """None: bf16."""
    meter: LimitMeter
    about: dict[str, Any]


def _run(options: argparse.Namespace) -> Iterator[Row]:
    from benchmarks.serving.machine_limits import chosen_isa

    isa = chosen_isa(options.isa)
    names = chosen_systems(options, (CADENZA,), options.weights) if SERVING in options.groups else []
    if options.num_threads and names not in ([], [CADENZA]):
        raise BenchmarkError("--num-threads is Cadenza's alone: the peers use every core")
    for shape in options.shapes:
        model = _prepared(shape, isa, options)
        if FORWARD in options.groups:
            yield from _forward(model, options)
        if SERVING in options.groups:
            yield from _serving(model, names, options)


def _prepared(shape: str, isa: str, options: argparse.Namespace) -> _Model:
    """Make the checkpoint and its weights, and measure the limits for the first time."""
    from benchmarks.serving.machine_limits import LimitMeter, int8_loop

    folder = random_checkpoint(shape)
    prepare_weights(folder, options.weights, options.llama_python)
    work, num_threads = folder_work(folder), options.num_threads or usable_cores()
    if work.experts is not None:
        from benchmarks.serving.expert_choices import experts_touched

        path, more = model_path(folder, options.weights), _loading(options)
        work = replace(
            work, experts=replace(work.experts, touched=experts_touched(path, num_threads, options.isa, more))
        )
    about: dict[str, Any] = {"model": folder.name, "weights": options.weights}
    stored = _stored(folder, work, options)
    int8 = None
    if work.experts is not None:
        about["experts_touched"] = {rows: round(number, 1) for rows, number in work.experts.touched.items()}
    if stored is not None:
        work = stored.work(work)
        about |= {"quantized_activations": _quantized_activations(options), "activations": stored.activations}
        about |= {"stored_bytes": stored.stored_bytes}
        int8 = int8_loop(isa, stored.words_in_short) if stored.int8_formats else None
    meter = LimitMeter(isa, num_threads, work.weight_bytes, int8)
    about |= {"isa": isa, "threads": num_threads, **meter.gemm_gflops}
    return _Model(shape, folder, work, stored, meter, about)


def _stored(folder: Path, work: DecoderWork, options: argparse.Namespace) -> StoredWeights | None:
    if options.weights == BF16:
        return None
    from benchmarks.serving.step_work import gguf_weights, rounded_weights
    from executor_svc.cpu.kernels.codegen.isa import forced_isa

    isa, activations = forced_isa(options.isa), _quantized_activations(options)
    if options.weights in GGUF_WEIGHTS:
        return gguf_weights(model_path(folder, options.weights), isa, activations)
    return rounded_weights(work, has_tied_table(folder), options.weights, isa, activations)


def _loading(options: argparse.Namespace) -> dict[str, Any]:
    """Options of the executor that say how weights are kept and multiplied."""
    return rounding_option(options.weights) | {"quantized_activations": _quantized_activations(options)}


def _quantized_activations(options: argparse.Namespace) -> Any:
    """--quantized-activations, which --set may give."""
    return dict(options.set).get("quantized_activations", "auto")


def _forward(model: _Model, options: argparse.Namespace) -> Iterator[Row]:
    """Steps of the model runner in this process."""
    from benchmarks.common.forward_step import make_runner

    folder, meter = model.folder, model.meter
    path = model_path(folder, options.weights)
    loaded = make_runner(path, options.num_threads, isa=options.isa, more=_loading(options))
    about = dict(model.about)
    if model.stored is not None:
        about["few_bits"] = loaded.few_bits
        about["resident_ratio"] = round(loaded.weight_bytes / model.stored.stored_bytes, 4)
    for scenario, chunks in STEPS.items():
        if scenario not in options.scenarios:
            continue
        num_tokens = sum(chunk.count for chunk in chunks)
        params = {"group": FORWARD, **about, "scenario": scenario, "sequences": len(chunks), "tokens": num_tokens}
        repeats, others = [], []
        for _ in range(options.repeats):
            wait_quiet(options.quiet_wait_s)
            meter.around()
            with OtherLoad() as other:
                taken = _step_s(loaded, chunks, options.seconds)
            limits = meter.around()
            limit_s, params["bound"] = limits.bound(model.work.step(chunks))
            repeats.append(
                {
                    "cadenza_step_ms": taken * 1e3,
                    "cadenza_tokens_per_s": num_tokens / taken,
                    "cadenza_share_of_limit": limit_s / taken,
                    "limit_tokens_per_s": num_tokens / limit_s,
                    **limits.metrics(),
                }
            )
            others.append(other.cores)
            progress(f"{NAME}: {folder.name} {scenario}: {repeats[-1]}")
        params["context"] = chunks[0].context
        yield make_row(NAME, seed=options.seed, params=params, repeats=repeats, other_cores=others)


def _step_s(loaded: LoadedRunner, chunks: Sequence[Chunk], seconds: float) -> float:
    """The median seconds of a step, over so many seconds; raises BenchmarkError for a result that is not finite."""
    from benchmarks.common.forward_step import step_batch

    batch = step_batch([(chunk.context, chunk.count) for chunk in chunks], loaded.layout)
    runner = loaded.runner
    if not bool(runner.forward(batch).isfinite().all()):
        raise BenchmarkError("hidden states are not finite")
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while len(taken) < _FEWEST_STEPS or time.perf_counter() < end:
        began = time.perf_counter()
        runner.forward(batch)
        taken.append(time.perf_counter() - began)
    return percentile(taken, 50)


def _serving(model: _Model, names: Sequence[str], options: argparse.Namespace) -> Iterator[Row]:
    """Requests at once through both services, and through the peers."""
    folder, shape = model.folder, model.shape
    service = service_options(options) | ({"cpu_isa": options.isa} if options.isa else {})
    service |= {"num_threads": options.num_threads} if options.num_threads else {}
    jobs = {scenario: Job(scenario, _requests(scenario, shape, folder, options)) for scenario in options.scenarios}
    requests = [request for job in jobs.values() for request in job.requests]
    runs: list[Run] = []
    bounds: dict[str, str] = {}
    with open_systems(names, folder, requests, options, service, weights=options.weights) as systems:
        for run in measure_all(systems, list(jobs.values()), options.repeats, options.quiet_wait_s):
            judged, bounds[run.measure] = _judged(run, jobs[run.measure], model.work, model.meter.around())
            progress(f"{NAME}: {folder.name}: {run_text(judged)}")
            runs.append(judged)
    for scenario, job in jobs.items():
        params = {"group": SERVING, **model.about, "scenario": scenario, "bound": bounds[scenario], "options": service}
        own = [run for run in runs if run.measure == scenario]
        yield serving_row(NAME, options.seed, {**params, **about_workload(job.requests)}, own)


def _judged(run: Run, job: Job, work: DecoderWork, limits: Limits) -> tuple[Run, str]:
    """The run with the limits around it. A prompt's tokens count only where outputs are of one token."""
    counted = sum(len(each.prompt) if job.measure == "prompts" else each.output_len for each in job.requests)
    limit_s, bound = limits.bound(work.requests(job.requests))
    wall_s = run.metrics["wall_s"]
    shares = {
        "tokens_per_s": counted / wall_s,
        "share_of_limit": limit_s / wall_s,
        "limit_tokens_per_s": counted / limit_s,
        **limits.metrics(),
    }
    return replace(run, metrics={**run.metrics, **shares}), bound


def _requests(scenario: str, shape: str, folder: Path, options: argparse.Namespace) -> list[Request]:
    vocab = vocab_size(folder)
    if scenario.startswith("decode"):
        return decode_workload(int(scenario.removeprefix("decode")), options.seed, vocab)
    requests = make_workload(options.requests or _BURST.get(shape, _BURST_OF_SMALL), options.seed, vocab)
    return [replace(each, output_len=1) for each in requests] if scenario == "prompts" else requests


def _describe(row: Row) -> str:
    params, found = row.params, row.medians
    about = f"{row.machine['cpu']}, {params['isa']}, {params['threads']} threads, bound by {params['bound']}"
    if params["weights"] != BF16:
        about = f"{params['weights']}, activations {params['activations']}; {about}"
    if params["group"] == SERVING:
        shares = ", ".join(
            f"{name.removesuffix('_share_of_limit')} {value:.0%}"
            for name, value in found.items()
            if name.endswith("_share_of_limit")
        )
        return f"{describe_systems(row)}\n  of the limit: {shares} ({about})"
    return (
        f"{params['model']} {params['group']} {params['scenario']}: {found['cadenza_step_ms']:.2f} ms, "
        f"{found['cadenza_tokens_per_s']:.4g} tokens/s, {found['cadenza_share_of_limit']:.0%} of the limit ({about})"
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shapes",
        type=names_type(tuple(SHAPES)),
        default=["10m", "135m"],
        metavar="NAMES",
        help=f"random checkpoints, of {','.join(SHAPES)} (default 10m,135m)",
    )
    parser.add_argument(
        "--weights",
        choices=WEIGHTS,
        default=BF16,
        help="Q8_0, Q4_0, Q4_K_M, MXFP4: a GGUF file by --llama-python; int8, int4: --quantization (default bf16)",
    )
    parser.add_argument(
        "--groups",
        type=names_type(GROUPS),
        default=list(GROUPS),
        metavar="NAMES",
        help="of forward (steps in this process), serving (both services, and the peers) (default both)",
    )
    parser.add_argument(
        "--scenarios",
        type=names_type(SCENARIOS),
        default=list(SCENARIOS),
        metavar="NAMES",
        help=f"of {','.join(SCENARIOS)}; forward has no burst (default all)",
    )
    parser.add_argument("--isa", help="force a lower instruction set of this processor, such as avx2")
    parser.add_argument("--num-threads", type=positive, help="compute threads (default: one for each core)")
    parser.add_argument("--requests", type=positive, help="of burst and prompts (default 64; 1b 12, larger ones 16)")
    parser.add_argument("--seconds", type=positive_number, default=1.5, help="of steps in a repeat (default 1.5)")
    parser.add_argument(
        "--systems",
        type=names_type(SYSTEMS),
        metavar="NAMES",
        help=f"of {','.join(SYSTEMS)} (cadenza and the peers with an interpreter)",
    )
    add_peer_options(parser)
    add_set_option(parser)


BENCHMARK = Benchmark(NAME, "how near is the CPU path to the machine's limits?", _add_options, _run, _describe)
