"""Part `serve`: both services over gRPC on random weights, 1,000 requests at once, 200 of them beside transformers.

For each shape first the services have the machine to themselves, then the peer, each in processes of their own.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.common.benchmark import SEED
from benchmarks.common.rows import BenchmarkError
from benchmarks.gpu import environment
from benchmarks.gpu.cases import Ceilings, Goal, Metrics, Outcome, one_line
from benchmarks.gpu.environment import Output, header
from benchmarks.gpu.kernels.ceilings import GROUP as CEILINGS
from benchmarks.gpu.kernels.ceilings import ceilings_of
from benchmarks.gpu.kernels.part import measure
from benchmarks.gpu.serving.adapters import serve_adapters, serve_drafts
from benchmarks.gpu.serving.failover import serve_failover
from benchmarks.gpu.serving.grammars import serve_grammars
from benchmarks.gpu.serving.heads import serve_heads
from benchmarks.gpu.serving.run import MIN_PEER_S, ROWS, Load, Run, serve_peer
from benchmarks.gpu.serving.stages import equal_requests, make_requests, sample_of, serve_all
from benchmarks.gpu.serving.starts import serve_starts
from benchmarks.gpu.shapes import write_config
from cadenza import LocalServiceError

_FEATURES = {
    "drafts": serve_drafts, "heads": serve_heads, "adapters": serve_adapters, "grammars": serve_grammars,
    "failover": serve_failover,
    "starts": serve_starts,
}  # fmt: skip
_RATIO_GOAL = 4.0
_FIRST_SHARE = 0.7
"""Share of the time for the first, larger shape of two."""
_END_S = 15.0


def make_load(options: argparse.Namespace, vocab_size: int) -> Load:
    """The requests of a run; the same for the same seed and vocabulary."""
    lengths = {"shortest": 4, "longest": 12} if options.trial else {}
    requests = make_requests(options.requests, SEED, vocab_size, **lengths)
    if options.equal is not None:
        size = 8 if options.trial else options.equal
        requests = equal_requests(options.requests, size, size, SEED, vocab_size)
    count, length, output_len = (4, 8, 400) if options.trial else (256, 64, 600)
    decodes = equal_requests(count, length, output_len, SEED, vocab_size)
    warm_up = [replace(each, output_len=min(each.output_len, 16)) for each in requests[:64]]
    return Load(requests, sample_of(requests, options.peer_requests, SEED), decodes, warm_up)


def serve_shape(run: Run, options: argparse.Namespace) -> None:
    """All stages of a shape."""
    with tempfile.TemporaryDirectory(prefix="cadenza-shape-") as folder:
        model, ours = write_config(run.shape, Path(folder)), Metrics()
        try:
            if options.features:
                for name in options.features:
                    _FEATURES[name](run, model, options.trial)
                return
            ours = serve_all(run, model, options.trial, not options.no_peer, only_first=options.only is not None)
        except (BenchmarkError, LocalServiceError) as error:
            run.add(Outcome(run.shape.name, "services", {"shape": run.shape.name}, error=one_line(error)))
        if options.no_peer:
            return
        min_s = 0.0 if options.trial else MIN_PEER_S
        sample = run.load.sample
        theirs = run.stage("transformers, continuous batching", min_s, lambda: serve_peer(run, model), sample)
        if ours and theirs:
            ratio = {"ratio": ours["tokens_per_s"] / theirs["tokens_per_s"]}
            run.stage("beside transformers", 0.0, lambda: ratio, sample, Goal("ratio", at_least=_RATIO_GOAL))


def _measured_ceilings(end_at: float) -> Ceilings:
    outcomes = [(case.name, outcome) for _, case, outcome in measure([CEILINGS], False, end_at)]
    return ceilings_of({name: outcome.metrics for name, outcome in outcomes if outcome.metrics})


def run(options: argparse.Namespace) -> int:
    """Exit codes: 0 no stage failed, 1 one failed."""
    seconds = options.seconds - _END_S
    end_at = time.monotonic() + seconds
    output = Output.of("serve", options.out, options.trial)
    print(header("serve"), flush=True)
    # With features and in fp8 nothing is held against them.
    without = options.trial or options.fp8 or options.features
    ceilings = Ceilings() if without else _measured_ceilings(end_at)
    text, found = [], []
    for index, shape in enumerate(options.shapes):
        load = make_load(options, shape.vocab_size)
        is_first_of_two = index == 0 and len(options.shapes) > 1
        shape_end = end_at - (1 - _FIRST_SHARE) * seconds if is_first_of_two else end_at
        device = "cpu" if options.trial else "cuda"
        shape_run = Run(shape, load, device, shape_end, output, ceilings, options.fp8, options.exact)
        serve_shape(shape_run, options)
        text.append(environment.table(shape.name, shape_run.found))
        found += shape_run.found
    text.append(environment.summary(found))
    output.write("serve.txt", "\n".join(text))
    print(*text, output.places(ROWS), sep="\n", flush=True)
    return int(any(outcome.error for outcome, _ in found))
