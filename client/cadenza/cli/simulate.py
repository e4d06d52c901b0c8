"""`cadenza simulate`: a load on cost models of executors, in virtual time."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cadenza.cli.extras import require_loadtest
from cadenza.cli.load_options import Csv, Label, Output, Plots, Report, Sweep, of_results
from cadenza.cli.loadtest import load_fields
from cadenza.cli.service_args import Config, FieldOption, service_fields
from cadenza.cli.text import notice, number
from cadenza.errors import CadenzaError

if TYPE_CHECKING:
    from cadenza.loadtest.tables import NumberTable
    from cadenza.simulate.campaign import Simulated
    from cadenza.simulate.capacity import Capacity

HELP = """Simulate a load in virtual time, with the real scheduler and cost models of executors.

\b
Examples:
  cadenza simulate --request-rate 4 --workload sharegpt --num-requests 2000
  cadenza simulate --executor costs.json --request-rate 10 --duration-s 86400 --output day.json
  cadenza simulate --executors 1,2,4 --slo ttft=0.5,tpot=0.05 --find-max-rate
  cadenza simulate --sweep request-rate=1,2,4 --batching static --report static.html

An executor is a published profile (a100-40gb-opt-13b, a100-80gb-opt-13b, h200-llama-3.1-8b) or a file that `cadenza
fit-costs` made from a recording. The results are those of `cadenza loadtest`: tables, files, figures, reports.
"""
EPILOG = "Exit codes: 0 simulated, 1 no request was served or no rate holds, 2 wrong options, 130 Ctrl-C."
_LOAD_PANELS = ("Workload", "Load", "Measuring")
_NOT_SIMULATED = ("timeout_s", "warm_up_requests", "sweep")


class NothingHoldsError(CadenzaError):
    """No rate holds, or no request was served."""


def simulate(
    executor: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME|FILE", help="Profile of an executor; several: all together.  [default: a100-40gb-opt-13b]"
        ),
    ] = None,
    executors: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,…", help="Copies of the executors under one scheduler; each number is a point.  [default: 1]"
        ),
    ] = None,
    config: Config = None,
    sweep: Sweep = None,
    rerun: Annotated[
        str | None,
        of_results("FILE", "Rerun this result with its settings and executors, overridden by the options given here."),
    ] = None,
    output: Output = None,
    csv: Csv = None,
    plots: Plots = None,
    report: Report = None,
    label: Label = "",
    **options: Any,
) -> None:
    """Run the command; raises CadenzaError."""
    require_loadtest("the simulator", "loadtest,scheduler")
    from cadenza.cli.load_results import check_outputs, check_whole, nothing_counted, tables_console, write_outputs
    from cadenza.loadtest.settings import make_settings, merged_values
    from cadenza.simulate.campaign import run_simulation
    from cadenza.simulate.options import make_simulated

    load_names = {option.name for option in _load_fields()}
    given = {name: options.pop(name) for name in load_names & options.keys()} | {"sweep": sweep or None}
    settings_before, before = _before(rerun)
    settings = make_settings(merged_values(settings_before, given))
    simulated = make_simulated(executor or (), executors, options, config=config, before=before)
    read = [rerun, config, settings.workload, *(executor or ())]
    outputs = check_outputs(output=output, csv=csv, plots=plots, report=report, read=read)
    command = ["cadenza", *sys.argv[1:]]
    file, capacities = run_simulation(settings, simulated, _Notices(), label=label, command=command)
    write_outputs(file, outputs)
    if capacities:
        tables_console().print(capacity_table(capacities))
        if outputs.plots is not None:
            from cadenza.simulate.pictures import write_capacity

            write_capacity(capacities, outputs.plots)
    check_whole(file)
    if capacities and all(each.held is None for each in capacities):
        raise NothingHoldsError(f"no rate that was tried holds {settings.slo}")
    if not capacities and (why := nothing_counted(file)) is not None:
        raise NothingHoldsError(why)


def simulate_fields() -> list[FieldOption]:
    """The options of a load and of the services that apply to a simulation; none if the extra is not installed."""
    fields = _load_fields()
    try:
        from cadenza.simulate.options import EXECUTOR_OPTIONS, SCHEDULER_OPTIONS
    except ImportError:
        return []

    known = {*EXECUTOR_OPTIONS, *SCHEDULER_OPTIONS}
    services = [option for option in service_fields("Simulated services: {}") if option.name in known]
    return [*fields, *services]


def capacity_table(capacities: Sequence[Capacity]) -> NumberTable:
    """A row for each number of executors: the highest rate that holds, and the latencies at it."""
    from cadenza.loadtest.tables import NumberTable
    from cadenza.simulate.capacity import summary_of

    rows = []
    for capacity in capacities:
        row = summary_of(capacity)
        times = [row.get(f"{name}_s_p{mark}") for name in ("ttft", "tpot") for mark in (50, 99)]
        rows.append(
            [
                str(capacity.num_executors),
                number(row["request_rate"], "none holds"),
                *(number(None if seconds is None else 1000 * seconds) for seconds in times),
                number(row.get("output_tokens_per_s")),
                number(row.get("tokens_per_s_per_executor")),
            ]
        )
    latencies = [f"{name}\n{mark} ms" for name in ("TTFT", "TPOT") for mark in ("p50", "p99")]
    heads = ["executors", "requests/s", *latencies, "tokens/s", "tokens/s\nper executor"]
    return NumberTable(heads, rows, title="Highest rate that holds the SLO")


def _before(rerun: str | None) -> tuple[dict[str, Any], Simulated | None]:
    """The settings and the simulated system of the result to rerun; empty and None without one."""
    from cadenza.loadtest.results import read_again
    from cadenza.loadtest.settings import settings_of
    from cadenza.simulate.options import simulated_of

    if rerun is None:
        return {}, None
    file = read_again(rerun, "simulate")
    return settings_of(file, rerun), simulated_of(file, rerun)


class _Notices:
    """Prints messages on stderr."""

    def say(self, text: str) -> None:
        """Print one line."""
        notice(text)


def _load_fields() -> list[FieldOption]:
    """The settings of a load that apply without a server; none if the extra is not installed."""
    return [option for option in load_fields() if option.panel in _LOAD_PANELS and option.name not in _NOT_SIMULATED]
