"""What does the service's front take? Output tokens/s, the overhead of a step, and the TTFT that it adds.

Scheduler and executor run as processes, the executor simulated, and the client in this one, which shares the machine's
cores with them. CPU time per token is measured beside the speed, as other load disturbs it less. Groups of rows:

session, sessions8, streams: a lean reader over one Session, eight Sessions, a Generate stream for each request, steps
    that take no time, without text and with it.
generate, client_streams: the same with `AsyncClient.generate` and `AsyncClient.stream`.
overhead: a step's time beyond the modelled one, two plans in flight, over one Session and over Generate streams.
ttft: the time to the first token at a steady rate of requests; steps take no time, so all of it is added.

`--tls`, `--metrics` and `--tokens` turn on what operators do; `--in-turn` measures their cost beside plain services.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import uvloop

from benchmarks.common.benchmark import Benchmark, positive, positive_number, progress
from benchmarks.common.plane_clients import (
    Load,
    arriving,
    by_client_generate,
    by_client_streams,
    over_sessions,
    over_streams,
)
from benchmarks.common.plane_services import Extras, Services, cpu_s, plane_services
from benchmarks.common.rows import BenchmarkError, OtherLoad, Row, make_row, percentile, wait_quiet

NAME = "service_plane"
_OUTPUT_TOKENS = {1: 2000, 64: 512, 512: 256, 2000: 128}
"""Output tokens of each request, by the number of requests; other numbers as the next smaller one."""
_SKIPPED_STEPS, _TIMED_STEPS = 100, 1000
_TTFT_TOKENS = 32
Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class Case:
    """One row: what it is, and how a repeat of it is measured on services with steps of `step_us`."""

    params: Mapping[str, object]
    measure: Callable[[Services], Awaitable[Metrics]]
    step_us: float = 0.0


Reader = Callable[[str, Load], Awaitable[None]]
_READERS: dict[str, Reader] = {
    "session": lambda target, load: over_sessions(target, load, 1),
    "sessions8": lambda target, load: over_sessions(target, load, 8),
    "streams": over_streams,
    "generate": by_client_generate,
    "client_streams": by_client_streams,
}
GROUPS = (*_READERS, "overhead", "ttft")


async def tokens_per_s(services: Services, read: Reader, load: Load) -> Metrics:
    """Read a load to its end: speed, and CPU time per token of each process."""
    pids = {"scheduler": services.scheduler, "executor": services.executor}
    before = {name: cpu_s(pid) for name, pid in pids.items()}
    client_s, start = time.process_time(), time.perf_counter()
    await read(services.target, load)
    wall_s, client_s = time.perf_counter() - start, time.process_time() - client_s
    load.check()
    count = load.num_tokens
    return {
        "tokens_per_s": count / wall_s,
        **{f"{name}_cpu_us_per_token": 1e6 * (cpu_s(pid) - before[name]) / count for name, pid in pids.items()},
        "client_cpu_us_per_token": 1e6 * client_s / count,
        "tokens_per_message": count / load.num_messages,
    }


async def step_overhead(services: Services, running: int, step_us: float, read: Reader) -> Metrics:
    """Time of a step beyond the modelled one while `running` requests decode."""
    times: list[float] = []
    load = Load(running, _SKIPPED_STEPS + _TIMED_STEPS + 20, text=False)
    num_tokens, bounds = 0, [_SKIPPED_STEPS * running, (_SKIPPED_STEPS + _TIMED_STEPS) * running]

    def on_tokens(count: int) -> None:
        nonlocal num_tokens
        num_tokens += count
        while bounds and num_tokens >= bounds[0]:
            bounds.pop(0)
            times.append(time.perf_counter())

    load.on_tokens = on_tokens
    await read(services.target, load)
    load.check()
    step_s = (times[1] - times[0]) / _TIMED_STEPS
    return {"overhead_us": 1e6 * step_s - step_us, "overhead_percent": 100 * (1e6 * step_s / step_us - 1)}


async def ttft(services: Services, rate: float, count: int, *, streams: bool) -> Metrics:
    """Times to the first token, all of them added by the service, its wire and the client.

    And times to the first message of streams that need no work for it: gRPC alone takes these under this load.
    """
    load = Load(count, _TTFT_TOKENS, text=False)
    times, empty_s = await arriving(services.target, load, rate, streams=streams)
    load.check()
    if len(times) != count:
        raise BenchmarkError(f"{len(times)} first tokens of {count} requests")
    return {
        f"{name}_p{percent}_ms": 1e3 * percentile(each, percent)
        for name, each in (("ttft", times), ("server_ttft", load.server_ttft_s), ("empty_stream", empty_s))
        for percent in (50, 99)
    }


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """The rows of the chosen groups."""
    for group in options.groups:
        if group == "overhead":
            for step_ms in options.step_ms:
                for running in options.batches:
                    for over in ("session", "streams"):
                        yield _overhead_case(running, step_ms, over)
        elif group == "ttft":
            for streams in (False, True):
                yield _ttft_case(options, streams=streams)
        else:
            for count in options.requests:
                for text in [each == "on" for each in options.detokenize]:
                    yield _speed_case(group, count, options.output_tokens, text=text)


def _speed_case(group: str, count: int, length: int | None, *, text: bool) -> Case:
    length = length or _OUTPUT_TOKENS[max(each for each in _OUTPUT_TOKENS if each <= count)]
    params = {"group": group, "requests": count, "output_tokens": length, "detokenize": text}
    return Case(params, lambda services: tokens_per_s(services, _READERS[group], Load(count, length, text)))


def _overhead_case(running: int, step_ms: float, over: str) -> Case:
    step_us = 1000 * step_ms
    params = {"group": "overhead", "over": over, "requests": running, "step_ms": step_ms, "timed_steps": _TIMED_STEPS}
    return Case(params, lambda services: step_overhead(services, running, step_us, _READERS[over]), step_us)


def _ttft_case(options: argparse.Namespace, *, streams: bool) -> Case:
    count = max(1, round(options.rate * options.ttft_s))
    params = {"group": "ttft", "rate": options.rate, "requests": count, "over": "streams" if streams else "session"}
    return Case(params, lambda services: ttft(services, options.rate, count, streams=streams))


async def measure(variants: Sequence[Services], case: Case, repeats: int) -> list[tuple[list[Metrics], list[float]]]:
    """All repeats of a case on each variant, in turn; also the cores that other processes used during each."""
    found: list[tuple[list[Metrics], list[float]]] = [([], []) for _ in variants]
    in_turn, order = list(zip(variants, found, strict=True)), random.Random(repeats)
    for _ in range(repeats):
        for services, (metrics, other_cores) in in_turn:
            with OtherLoad() as other, services.in_use():
                metrics.append(await case.measure(services))
            other_cores.append(other.cores)
        order.shuffle(in_turn)  # none of them always follows the same one
    _compare(found)
    return found


def _compare(found: Sequence[tuple[list[Metrics], list[float]]]) -> None:
    """Add the speed as a share of that of the first variant, the plain one, in the same turn."""
    plain = [metrics.get("tokens_per_s") for metrics in found[0][0]]
    for repeats, _ in found[1:]:
        for metrics, of_plain in zip(repeats, plain, strict=True):
            if of_plain is not None:
                metrics["speed_of_plain_percent"] = 100 * metrics["tokens_per_s"] / of_plain


def _run(options: argparse.Namespace) -> Iterator[Row]:
    wait_quiet(options.quiet_wait_s)
    extras = Extras(options.tls, options.metrics, options.tokens)
    variants = extras.in_turn() if options.in_turn else [extras]
    for step_us, together in itertools.groupby(cases(options), lambda case: case.step_us):
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            stack = contextlib.AsyncExitStack()
            try:
                services = [runner.run(stack.enter_async_context(plane_services(step_us, each))) for each in variants]
                for case in together:
                    progress(f"{NAME}: {_title(case.params)}")
                    found = runner.run(measure(services, case, options.repeats))
                    for variant, (repeats, other_cores) in zip(variants, found, strict=True):
                        params = {**case.params, **variant.on()}
                        if len(variants) > 1:
                            params["in_turn_with"] = [each.title() for each in variants if each != variant]
                        yield make_row(NAME, seed=options.seed, params=params, repeats=repeats, other_cores=other_cores)
            finally:
                runner.run(stack.aclose())


def _title(params: Mapping[str, object]) -> str:
    if params["group"] == "overhead":
        return f"overhead: {params['requests']} running, steps of {params['step_ms']} ms, over {params['over']}"
    if params["group"] == "ttft":
        return f"ttft: {params['rate']} requests/s over {params['over']}"
    return f"{params['group']}: {params['requests']} requests, {'text' if params['detokenize'] else 'token ids'}"


def _describe(row: Row) -> str:
    found, extras = row.medians, Extras(*(bool(row.params.get(name)) for name in ("tls", "metrics", "tokens")))
    title = _title(row.params) + (f", {extras.title()}" if extras.on() else "")
    if "overhead_us" in found:
        return f"{title}: {found['overhead_us']:.0f} us a step, {found['overhead_percent']:.1f}%"
    if "ttft_p50_ms" in found:
        return (
            f"{title}: p50 {found['ttft_p50_ms']:.2f} ms, p99 {found['ttft_p99_ms']:.2f} ms; from arrival to the first "
            f"token in the scheduler {found['server_ttft_p50_ms']:.2f} and {found['server_ttft_p99_ms']:.2f} ms; "
            f"an empty stream {found['empty_stream_p50_ms']:.2f} and {found['empty_stream_p99_ms']:.2f} ms"
        )
    if "speed_of_plain_percent" in found:
        title += f" ({found['speed_of_plain_percent']:.1f}% of the speed of plain ones)"
    cpu = ", ".join(f"{name} {found[f'{name}_cpu_us_per_token']:.1f}" for name in ("scheduler", "executor", "client"))
    return (
        f"{title}: {found['tokens_per_s']:.0f} output tokens/s, {found['tokens_per_message']:.1f} in a message; "
        f"us of CPU time a token: {cpu}"
    )


def _listed(kind: Callable[[str], object], allowed: Sequence[str] = ()) -> Callable[[str], list[object]]:
    def parse(text: str) -> list[object]:
        parts = text.split(",")
        unknown = [part for part in parts if allowed and part not in allowed]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not among {', '.join(allowed)}")
        return [kind(part) for part in parts]

    return parse


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--groups", type=_listed(str, GROUPS), default=list(GROUPS), help=f"any of {','.join(GROUPS)} (default all)"
    )
    parser.add_argument(
        "--requests", type=_listed(positive), default=list(_OUTPUT_TOKENS), help="default 1,64,512,2000"
    )
    parser.add_argument(
        "--output-tokens", type=positive, help="of each request (default: fewer, the more requests there are)"
    )
    parser.add_argument("--detokenize", type=_listed(str, ("off", "on")), default=["off", "on"], help="default off,on")
    parser.add_argument("--batches", type=_listed(positive), default=[64, 256, 1024], help="default 64,256,1024")
    parser.add_argument("--step-ms", type=_listed(positive_number), default=[5.0, 1.0], help="default 5,1")
    parser.add_argument("--rate", type=positive_number, default=100.0, help="requests/s of ttft (default 100)")
    parser.add_argument("--tls", action="store_true", help="mutual TLS on both links (default: plain text)")
    parser.add_argument("--metrics", action="store_true", help="metrics of both services, scraped each second")
    parser.add_argument("--tokens", action="store_true", help="a tenants file; clients send a token")
    parser.add_argument(
        "--in-turn",
        action="store_true",
        help="measure, repeat by repeat, plain services, each of the three options given alone, and all given together",
    )
    parser.add_argument("--ttft-s", type=positive_number, default=4.0, help="seconds of ttft (default 4)")


BENCHMARK = Benchmark(NAME, "what does the service's front take?", _add_options, _run, _describe)
