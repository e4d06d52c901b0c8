"""`python -m benchmarks [NAME] [options]`: run one benchmark, or all of them; results on stdout, progress on stderr."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks import (
    agents,
    cpu_limits,
    cpu_serving,
    disaggregation,
    families,
    gateway,
    gpu_host,
    lane_scaling,
    lora,
    mapped_experts,
    placement,
    prefix_hits,
    real,
    scheduler_cost,
    service_plane,
    speculation,
    turns,
    window_memory,
)
from benchmarks.common.benchmark import (
    Benchmark,
    add_common_options,
    command_parser,
    progress,
    run_benchmark,
    run_command,
)
from benchmarks.fleet import benchmark as fleet

_MODULES = (
    agents,
    cpu_limits,
    cpu_serving,
    disaggregation,
    families,
    fleet,
    gateway,
    gpu_host,
    lane_scaling,
    lora,
    mapped_experts,
    placement,
    prefix_hits,
    real,
    scheduler_cost,
    service_plane,
    speculation,
    turns,
    window_memory,
)
BENCHMARKS: dict[str, Benchmark] = {each.BENCHMARK.name: each.BENCHMARK for each in _MODULES}
_LIST = "\n".join(f"  {each.name:16} {each.question}" for each in BENCHMARKS.values())


def main(arguments: Sequence[str]) -> int:
    """Exit codes: 0 success, 1 a benchmark failed, 2 wrong arguments."""
    parser = _parser()
    if not arguments or arguments[0].startswith("-"):
        return _run_all(parser.parse_args(arguments))
    name, *rest = arguments
    if name not in BENCHMARKS:
        parser.error(f"there is no benchmark {name!r}; there are {', '.join(BENCHMARKS)}")
    return run_command(BENCHMARKS[name], rest)


def _run_all(options: argparse.Namespace) -> int:
    if options.list:
        print(_LIST)
        return 0
    progress(f"running all benchmarks:\n{_LIST}")
    # All benchmarks run, even if an earlier one fails.
    failed = [each.name for each in BENCHMARKS.values() if not run_benchmark(each, _with_defaults(each, options))]
    if failed:
        progress(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        usage="python -m benchmarks [NAME] [options]",
        description="Run one benchmark, or without a name all of them.",
        epilog=f"benchmarks; NAME --help shows the options of one:\n{_LIST}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--list", action="store_true", help="list the benchmarks and exit")
    add_common_options(parser)
    return parser


def _with_defaults(benchmark: Benchmark, options: argparse.Namespace) -> argparse.Namespace:
    """The options, completed by the benchmark's defaults, because without a name none of its own can be given."""
    return argparse.Namespace(**{**vars(command_parser(benchmark).parse_args([])), **vars(options)})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
