"""What does the scheduler cost a step? plan_step + apply_result while every running sequence decodes.

The core alone, with two plans in flight as in the service: no executor, no gRPC. The timed part assigns every token to
its sequence, checks EOS, stop ids and lengths, and makes the outputs that the engine sends to the streams. Results are
synthesized outside the timed part. With churn, in each step a share of the sequences ends with EOS and as many join.
Adding these requests, turning the plan into bytes and reading the result from bytes are timed beside the step, and
`us_whole` is the sum of all: what one step costs the process, without the streams. Times are CPU time of the
process, so other load on the machine changes them little.
vLLM's scheduler gets the same load in the same run, if vllm is available.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

if __name__ == "__main__":  # `python benchmarks/scheduler_cost.py`, from anywhere, without an installation of Cadenza
    _ROOT = Path(__file__).resolve().parents[1]
    sys.path[:1] = [str(_ROOT), str(_ROOT / "client")]

from benchmarks.common.benchmark import Benchmark, positive, progress, run_command
from benchmarks.common.core_load import empty_core, measure, memory_per_sequence, start
from benchmarks.common.rows import BenchmarkError, OtherLoad, Row, make_row, wait_quiet
from benchmarks.common.scheduler_load import BLOCK_SIZE, Case
from benchmarks.peers.process import PeerProcess, can_import, peer_process
from scheduler_svc.front.process_memory import collect_rarely

NAME = "scheduler_cost"
SIZES = (64, 256, 1024, 4096)
PEER = "vllm"
_PEER_MODULE = "benchmarks.peers.vllm_scheduler"
_INFLIGHT = {"cadenza": 2, PEER: 1}
_FIRST = ("system", "running", "churn", "us_per_step", "plan_bytes")


def cases_of(options: argparse.Namespace) -> list[Case]:
    """The cases that the options select, without repetitions."""
    cases = [
        Case(running, churn, False, context_len)
        for context_len in options.context_len
        for running in options.running
        for churn in options.churn
    ]
    cases += [
        Case(running, max(options.churn), True, options.context_len[0]) for running in options.prefix_cache_running
    ]
    return list(dict.fromkeys(cases))


def _run(options: argparse.Namespace) -> Iterator[Row]:
    collect_rarely()  # As in the service.
    cases = cases_of(options)
    memory = {case: memory_per_sequence(case, options.seed) for case in dict.fromkeys(map(_steady, cases))}
    with _peer(options.peer_python) as peer:
        systems = ["cadenza", *([PEER] if peer else [])]
        repeats: dict[tuple[str, Case], list[dict[str, float]]] = {
            (system, case): [] for system in systems for case in cases
        }
        other_cores = []
        wait_quiet(options.quiet_wait_s)
        for index in range(options.repeats):
            progress(f"{NAME}: repeat {index + 1} of {options.repeats}")
            # Around all cases and their set-up, because a small case alone takes too few of the kernel's ticks.
            with OtherLoad() as other:
                for system, case in repeats:
                    found = _measure(case, options, peer if system == PEER else None)
                    repeats[system, case].append({**found, **(memory[_steady(case)] if system == "cadenza" else {})})
            other_cores.append(other.cores)
    for (system, case), metrics in repeats.items():
        params = {
            "system": system,
            **asdict(case),
            "steps": options.steps,
            "block_size": BLOCK_SIZE,
            "inflight_plans": _INFLIGHT[system],
        }
        if system == PEER and peer:
            params["peer_version"] = peer.version
        yield make_row(NAME, seed=options.seed, params=params, repeats=metrics, other_cores=other_cores)


def _steady(case: Case) -> Case:
    """The same case without churn, for measuring memory."""
    return replace(case, churn=0.0)


def _measure(case: Case, options: argparse.Namespace, peer: PeerProcess | None) -> dict[str, float]:
    if peer is not None:
        return peer.call({"case": asdict(case), "steps": options.steps, "seed": options.seed})
    core = empty_core(case, options.steps)
    start(core, case.prompts(options.seed))
    return measure(core, case, options.steps, options.seed).metrics()


@contextlib.contextmanager
def _peer(python: Path | None) -> Iterator[PeerProcess | None]:
    """The peer, if an interpreter has it: the given one, which must have it, or this one."""
    if not can_import(python or Path(sys.executable), PEER):
        if python is not None:
            raise BenchmarkError(f"--peer-python {python}: {PEER} is not installed there")
        progress(f"{NAME}: no rows of {PEER}: it is not installed here; --peer-python names an interpreter that has it")
        yield None
        return
    with peer_process(python or Path(sys.executable), _PEER_MODULE) as peer:
        yield peer


def _describe(row: Row) -> str:
    found, params = row.medians, row.params
    memory = found.get("memory_bytes_per_seq")
    return (
        f"{params['system']:7} {params['running']:5} running of {params['context_len']}, churn {params['churn']:.0%}"
        f"{', prefix cache' if params['prefix_cache'] else ''}: {found['us_per_step']:8.1f} us a step "
        f"(plan {found['us_plan']:.1f}, apply {found['us_apply']:.1f}, p99 {found['us_p99']:.1f}); "
        f"plan of {found['plan_bytes']:.0f} bytes, made in {found['us_convert']:.1f} us; "
        f"with adding and both conversions: {found['us_whole']:.1f} us"
        + (f"; {memory:.0f} bytes a sequence" if memory is not None else "")
    )


def _flat_json(row: Row) -> str:
    """One flat object, with the parameters first."""
    values = {**row.params, **row.medians, "repeats": row.repeats, "seed": row.seed, "note": row.note}
    ordered = {name: values.pop(name) for name in _FIRST} | values
    return json.dumps({**ordered, "other_cores": row.other_cores, "cpu": row.machine["cpu"], **_versions(row)})


def _versions(row: Row) -> dict[str, str]:
    return {name: row.versions[name] for name in ("python", "cadenza", "commit")}


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 0.5:
        raise argparse.ArgumentTypeError(f"must be a share of 0 to 0.5, not {text!r}")
    return value


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--running", type=positive, nargs="+", default=list(SIZES), help="running sequences")
    parser.add_argument(
        "--churn", type=_share, nargs="+", default=[0.0, 0.05], help="shares of the sequences that change each step"
    )
    parser.add_argument(
        "--prefix-cache-running",
        type=positive,
        nargs="*",
        default=[1024],
        help="running sequences of the rows with the prefix cache on, at the largest churn (default 1024)",
    )
    parser.add_argument("--steps", type=positive, default=200, help="timed steps of each repeat (default 200)")
    parser.add_argument(
        "--context-len", type=positive, nargs="+", default=[1000], help="tokens of each sequence (default 1000)"
    )
    parser.add_argument(
        "--peer-python", type=Path, help=f"an interpreter that has {PEER} (default: this one, if it has it)"
    )


BENCHMARK: Benchmark = Benchmark(
    NAME, "what does the scheduler cost a step?", _add_options, _run, _describe, _flat_json
)

if __name__ == "__main__":
    sys.exit(run_command(BENCHMARK, sys.argv[1:]))
