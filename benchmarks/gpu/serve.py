"""`run.sh serve`: both services over gRPC on random weights, 1,000 requests at once, 200 of them beside transformers.

For each shape: the services alone on the machine, then the peer alone, each in processes of its own. Rows go to
$OUT/gpu_serving.jsonl as they come, the table to $OUT/serve.txt, the services' log to $OUT/services.log.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from benchmarks.__main__ import SEED
from benchmarks.common.benchmark import positive
from benchmarks.common.burst_client import generate_burst, latencies, local_services, stream_burst
from benchmarks.common.other_load import OtherLoad
from benchmarks.common.rows import BenchmarkError
from benchmarks.common.serving_options import about_workload
from benchmarks.common.workload import Request
from benchmarks.gpu import results
from benchmarks.gpu.cases import Goal, Metrics, Outcome, one_line
from benchmarks.gpu.kernels import summary
from benchmarks.gpu.machine import header, out_folder
from benchmarks.gpu.serving_load import NUM_PEER_REQUESTS, NUM_REQUESTS, alike, make_requests, some_of
from benchmarks.gpu.shapes import LLAMA_8B, QWEN3_06B, SHAPES, TINY, ModelShape, write_config
from benchmarks.gpu.watching import watch
from benchmarks.peers.process import peer_process
from cadenza import LocalServices

BUDGET_S = 500.0
MAX_NUM_SEQS, MAX_BATCHED_TOKENS = 512, 8192
_MOST_TRACE_BYTES = 15 << 20
_TOKENS_PER_S_GOAL = {LLAMA_8B.name: 16000.0}
_IDLE_GOAL = {LLAMA_8B.name: 2.0, QWEN3_06B.name: 10.0}
_RATIO_GOAL = 4.0
_FIRST_SHARE = 0.7
"""Of the time, for the first of two shapes, the larger."""
_PEER = "benchmarks.gpu.transformers_peer"
_PEER_ATTEMPTS = 4
_PEER_S, _LEAST_PEER_S = 90.0, 45.0
"""What the peer takes, loading included, and what is left at least for another try."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent."""

    all_of: Sequence[Request]
    some: Sequence[Request]
    """Those that the peer serves too."""
    watched: Sequence[Request]
    warm_up: Sequence[Request]


@dataclass
class Run:
    """What is done for one shape, and what came of it."""

    shape: ModelShape
    load: Load
    device: str
    end_at: float
    folder: Path
    found: list[tuple[Outcome, Goal | None]] = field(default_factory=list)

    def stage(
        self,
        name: str,
        estimate_s: float,
        work: Callable[[], Metrics],
        requests: Sequence[Request] = (),
        goal: Goal | None = None,
    ) -> Metrics:
        """Run a stage if there is time, and write down what came of it; no metrics: it failed or was skipped."""
        params = {"shape": self.shape.name, **(about_workload(requests) if requests else {}), **self.options()}
        outcome = Outcome(self.shape.name, name, params)
        left = self.end_at - time.monotonic()
        with OtherLoad() as other:
            if left < estimate_s:
                outcome = replace(outcome, skipped=f"{max(left, 0):.0f} s were left, it takes {estimate_s:.0f}")
            else:
                try:
                    outcome = replace(outcome, metrics=work())
                except Exception as error:
                    outcome = replace(outcome, error=one_line(error))
        self.found.append((outcome, goal))
        print(results.said(outcome, goal), flush=True)
        line = results.json_line(results.SERVING, outcome, SEED, other.cores)
        results.append_line(self.folder, results.SERVING, line)
        return outcome.metrics

    def options(self) -> dict[str, Any]:
        """Of the services."""
        on_gpu = self.device == "cuda"
        longest = max(len(each.prompt) + each.output_len for each in (*self.load.all_of, *self.load.watched))
        return {
            "device": self.device,
            "numerics": "fast",
            "load_format": "dummy",
            "enable_prefix_caching": False,
            "max_model_len": -(-longest // 16) * 16,
            "max_num_seqs": MAX_NUM_SEQS if on_gpu else 8,
            "max_num_batched_tokens": MAX_BATCHED_TOKENS if on_gpu else 256,
        }

    def limited(self, work: Any) -> Any:
        """Run a coroutine until it is done, or no time is left."""
        return asyncio.run(asyncio.wait_for(work, max(1.0, self.end_at - time.monotonic())))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="benchmarks/gpu/run.sh serve", description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", default=f"{LLAMA_8B.name},{QWEN3_06B.name}", help="default %(default)s")
    parser.add_argument("--requests", type=positive, default=NUM_REQUESTS, help="default %(default)s")
    parser.add_argument("--peer-requests", type=positive, default=NUM_PEER_REQUESTS, help="default %(default)s")
    parser.add_argument("--no-peer", action="store_true", help="Cadenza alone")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds for all (default %(default)s)")
    parser.add_argument("--trial", action="store_true", help="a tiny model and few requests, on the CPU")
    options = parser.parse_args(arguments)
    if options.trial:
        options.shapes, options.requests, options.peer_requests = TINY.name, 6, 3
    names = options.shapes.split(",")
    if unknown := sorted(set(names) - set(SHAPES)):
        parser.error(f"--shapes: there is no {unknown[0]!r}; there are {', '.join(SHAPES)}")
    options.shapes = [SHAPES[name] for name in names]
    return options


def make_load(options: argparse.Namespace, vocab_size: int) -> Load:
    """The requests of a run; the same for the same seed and vocabulary."""
    lengths = {"least": 4, "most": 12} if options.trial else {}
    all_of = make_requests(options.requests, SEED, vocab_size, **lengths)
    watched = alike(4, 8, 60, SEED, vocab_size) if options.trial else alike(256, 64, 600, SEED, vocab_size)
    warm_up = [replace(each, output_len=min(each.output_len, 16)) for each in all_of[:64]]
    return Load(all_of, some_of(all_of, options.peer_requests, SEED), watched, warm_up)


@contextlib.contextmanager
def services(run: Run, model: Path) -> Iterator[LocalServices]:
    """Both services on this shape; their log goes to a file."""
    with (
        (run.folder / "services.log").open("a", encoding="utf-8") as log,
        local_services(
            model,
            on_log=lambda service, line: print(service, line, file=log, flush=True),
            start_timeout_s=max(1.0, run.end_at - time.monotonic()),
            **run.options(),
        ) as started,
    ):
        yield started


def serve_all(run: Run, model: Path, trial: bool, with_peer: bool) -> Metrics:
    """Cadenza's stages; returns those of the requests that the peer serves too."""
    load, began = run.load, time.monotonic()
    num_tokens = sum(each.output_len for each in load.all_of)
    with contextlib.ExitStack() as stack:
        started: list[LocalServices] = []

        def start() -> Metrics:
            started.append(stack.enter_context(services(run, model)))
            ready = time.monotonic() - began
            run.limited(generate_burst(started[0].target, load.warm_up))
            return {"start_s": ready}

        if not run.stage("start", 60.0 if not trial else 1.0, start):
            return {}
        target, executor = started[0].target, started[0].addresses["executor"]

        def finished(requests: Sequence[Request]) -> Metrics:
            _, wall_s = run.limited(generate_burst(target, requests))
            made = sum(each.output_len for each in requests)
            return {"tokens_per_s": made / wall_s, "requests_per_s": len(requests) / wall_s, "wall_s": wall_s}

        def streamed() -> Metrics:
            times, wall_s = run.limited(stream_burst(target, load.all_of))
            return {"tokens_per_s": num_tokens / wall_s, "wall_s": wall_s, **latencies(times)}

        def watched(traced: bool) -> Metrics:
            seen = run.limited(watch(target, executor, load.watched, traced=traced))
            if 0 < len(seen.trace) <= _MOST_TRACE_BYTES:
                (run.folder / f"trace-{run.shape.name}.json.gz").write_bytes(seen.trace)
            return dict(seen.metrics)

        per_s = _TOKENS_PER_S_GOAL.get(run.shape.name)
        goal = Goal("tokens_per_s", at_least=per_s) if per_s else None
        seconds = 0.0 if trial else 15.0
        # The streams come last: they are left out where the peer would have no time.
        peer_s = _PEER_S if with_peer and seconds else 0.0
        run.stage("all at once, finished results", 2 * seconds, lambda: finished(load.all_of), load.all_of, goal)
        some = run.stage("the peer's requests", seconds, lambda: finished(load.some), load.some)
        run.stage("decode steps", seconds, lambda: watched(False), load.watched)
        idle = _IDLE_GOAL.get(run.shape.name)
        run.stage(
            "device between steps, torch.profiler", seconds, lambda: watched(True), load.watched,
            Goal("idle_percent", at_most=idle) if idle else None,
        )  # fmt: skip
        run.stage("all at once, a stream each", 3 * seconds + peer_s, streamed, load.all_of)
    return some


def serve_peer(run: Run, model: Path) -> Metrics:
    """The peer's stage: tokens a second of its requests. With settings under which it breaks it is tried with others.

    Raises BenchmarkError with what it said last.
    """
    # It has no limit of its own, and what it has not ended by then it never will.
    limit = threading.Timer(max(1.0, run.end_at - time.monotonic()), _end_peer)
    limit.start()
    try:
        for left_out in range(_PEER_ATTEMPTS):
            try:
                return _ask_peer(run, model, left_out)
            except BenchmarkError as error:
                print(f"transformers, {left_out} settings left out: {error}", flush=True)
                if left_out == _PEER_ATTEMPTS - 1 or run.end_at - time.monotonic() < _LEAST_PEER_S:
                    raise
        raise BenchmarkError("transformers was not asked")
    finally:
        limit.cancel()


def _ask_peer(run: Run, model: Path, left_out: int) -> Metrics:
    requests = run.load.some
    longest = [max(len(each.prompt) for each in requests), max(each.output_len for each in requests)]
    arguments = [str(model), run.device, *map(str, (left_out, len(requests), *longest))]
    with peer_process(Path(sys.executable), _PEER, arguments) as peer:
        peer.ask(_question([replace(each, output_len=8) for each in requests[:16]]))
        answer = peer.ask(_question(requests))
    print(f"transformers {peer.version} with {peer.about['settings'] or 'its own settings'}", flush=True)
    num_tokens = sum(each.output_len for each in requests)
    return {"tokens_per_s": num_tokens / answer["wall_s"], "wall_s": answer["wall_s"]}


def _end_peer() -> None:
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if _PEER in child.cmdline():
                child.kill()


def _question(requests: Sequence[Request]) -> dict[str, Any]:
    asked = [{"prompt": each.prompt, "output_len": each.output_len} for each in requests]
    return {"requests": asked, "arrivals": None}


def serve_shape(run: Run, options: argparse.Namespace) -> None:
    """All stages of a shape."""
    with tempfile.TemporaryDirectory(prefix="cadenza-shape-") as folder:
        model = write_config(run.shape, Path(folder))
        ours = serve_all(run, model, options.trial, not options.no_peer)
        if options.no_peer:
            return
        theirs = run.stage(
            "transformers, continuous batching",
            0.0 if options.trial else _LEAST_PEER_S,
            lambda: serve_peer(run, model),
            run.load.some,
        )
        if ours and theirs:
            ratio = {"ratio": ours["tokens_per_s"] / theirs["tokens_per_s"]}
            run.stage("beside transformers", 0.0, lambda: ratio, run.load.some, Goal("ratio", at_least=_RATIO_GOAL))


def main(arguments: Sequence[str]) -> int:
    """Exit codes: 0 every stage that was run came to something, 1 one failed, 2 wrong arguments."""
    end_at = time.monotonic()
    options = parse(arguments)
    end_at += options.budget_s
    folder = out_folder("serve")
    print(header("serve"), flush=True)
    text, found = [], []
    for index, shape in enumerate(options.shapes):
        load = make_load(options, shape.vocab_size)
        is_first_of_two = index == 0 and len(options.shapes) > 1
        shape_end = end_at - (1 - _FIRST_SHARE) * options.budget_s if is_first_of_two else end_at
        run = Run(shape, load, "cpu" if options.trial else "cuda", shape_end, folder)
        serve_shape(run, options)
        text.append(results.table(shape.name, run.found))
        found += run.found
    text.append(summary(found))
    (folder / "serve.txt").write_text("\n".join(text) + "\n", encoding="utf-8")
    print("\n".join(text), flush=True)
    return int(any(outcome.error for outcome, _ in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
