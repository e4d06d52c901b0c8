"""`run.sh serve`: both services over gRPC on random weights, 1,000 requests at once, 200 of them beside transformers.

For each shape: the services alone on the machine, then the peer alone, each in processes of its own. Rows go to
$OUT/gpu_serving.jsonl as they come, the table to $OUT/serve.txt, the services' log to $OUT/services.log.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.common.benchmark import SEED, positive
from benchmarks.common.rows import BenchmarkError
from benchmarks.gpu import results
from benchmarks.gpu.cases import Ceilings, Goal, Metrics, Outcome, one_line
from benchmarks.gpu.ceilings import GROUP as CEILINGS
from benchmarks.gpu.ceilings import ceilings_of
from benchmarks.gpu.kernels import measure, summary
from benchmarks.gpu.machine import header, out_folder
from benchmarks.gpu.serving_load import NUM_PEER_REQUESTS, NUM_REQUESTS, alike, make_requests, some_of
from benchmarks.gpu.serving_peer import LEAST_PEER_S, serve_peer
from benchmarks.gpu.serving_run import Load, Run
from benchmarks.gpu.serving_stages import serve_all
from benchmarks.gpu.shapes import LLAMA_8B, QWEN3_06B, SHAPES, TINY, write_config

BUDGET_S = 490.0
_RATIO_GOAL = 4.0
_FIRST_SHARE = 0.7
"""Of the time, for the first of two shapes, the larger."""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="benchmarks/gpu/run.sh serve", description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", default=f"{LLAMA_8B.name},{QWEN3_06B.name}", help="default %(default)s")
    parser.add_argument("--requests", type=positive, default=NUM_REQUESTS, help="default %(default)s")
    parser.add_argument("--peer-requests", type=positive, default=NUM_PEER_REQUESTS, help="default %(default)s")
    parser.add_argument("--no-peer", action="store_true", help="Cadenza alone")
    parser.add_argument("--fp8", action="store_true", help="in fp8: linears, keys and values; without the peer")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds for all (default %(default)s)")
    parser.add_argument("--trial", action="store_true", help="a tiny model and few requests, on the CPU")
    options = parser.parse_args(arguments)
    if options.trial:
        options.shapes, options.requests, options.peer_requests = TINY.name, 6, 3
    options.no_peer |= options.fp8
    names = options.shapes.split(",")
    if unknown := sorted(set(names) - set(SHAPES)):
        parser.error(f"--shapes: there is no {unknown[0]!r}; there are {', '.join(SHAPES)}")
    options.shapes = [SHAPES[name] for name in names]
    return options


def make_load(options: argparse.Namespace, vocab_size: int) -> Load:
    """The requests of a run; the same for the same seed and vocabulary."""
    lengths = {"least": 4, "most": 12} if options.trial else {}
    all_of = make_requests(options.requests, SEED, vocab_size, **lengths)
    watched = alike(4, 8, 400, SEED, vocab_size) if options.trial else alike(256, 64, 600, SEED, vocab_size)
    warm_up = [replace(each, output_len=min(each.output_len, 16)) for each in all_of[:64]]
    return Load(all_of, some_of(all_of, options.peer_requests, SEED), watched, warm_up)


def serve_shape(run: Run, options: argparse.Namespace) -> None:
    """All stages of a shape."""
    with tempfile.TemporaryDirectory(prefix="cadenza-shape-") as folder:
        model, ours = write_config(run.shape, Path(folder)), Metrics()
        try:
            ours = serve_all(run, model, options.trial, not options.no_peer)
        except BenchmarkError as error:
            run.add(Outcome(run.shape.name, "services", {"shape": run.shape.name}, error=one_line(error)))
        if options.no_peer:
            return
        least_s = 0.0 if options.trial else LEAST_PEER_S
        some = run.load.some
        theirs = run.stage("transformers, continuous batching", least_s, lambda: serve_peer(run, model), some)
        if ours and theirs:
            ratio = {"ratio": ours["tokens_per_s"] / theirs["tokens_per_s"]}
            run.stage("beside transformers", 0.0, lambda: ratio, some, Goal("ratio", at_least=_RATIO_GOAL))


def _measured_ceilings(end_at: float) -> Ceilings:
    """What the hardware gives, measured before anything else runs."""
    outcomes = [(case.name, outcome) for _, case, outcome in measure([CEILINGS], False, end_at)]
    ceilings = ceilings_of({name: outcome.metrics for name, outcome in outcomes if outcome.metrics})
    print(f"ceilings: {ceilings}", flush=True)
    return ceilings


def main(arguments: Sequence[str]) -> int:
    """Exit codes: 0 every stage that was run came to something, 1 one failed, 2 wrong arguments."""
    end_at = time.monotonic()
    options = parse(arguments)
    end_at += options.budget_s
    folder = out_folder("serve")
    print(header("serve"), flush=True)
    ceilings = Ceilings() if options.trial else _measured_ceilings(end_at)
    text, found = [], []
    for index, shape in enumerate(options.shapes):
        load = make_load(options, shape.vocab_size)
        is_first_of_two = index == 0 and len(options.shapes) > 1
        shape_end = end_at - (1 - _FIRST_SHARE) * options.budget_s if is_first_of_two else end_at
        run = Run(shape, load, "cpu" if options.trial else "cuda", shape_end, folder, ceilings, options.fp8)
        serve_shape(run, options)
        text.append(results.table(shape.name, run.found))
        found += run.found
    text.append(summary(found))
    (folder / "serve.txt").write_text("\n".join(text) + "\n", encoding="utf-8")
    print("\n".join(text), flush=True)
    return int(any(outcome.error for outcome, _ in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
