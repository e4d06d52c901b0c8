"""`cadenza simulate`: a load on cost models of executors, in virtual time."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cadenza.errors import CadenzaError, OptionError
from cadenza_cli.load.loadtest import load_fields
from cadenza_cli.load.options import Csv, Label, Output, Plots, Report, Sweep, of_results, require_loadtest
from cadenza_cli.service_args import Config, FieldOption, service_fields
from cadenza_cli.text import number

if TYPE_CHECKING:
    from cadenza_cli.load.results import Outputs
    from cadenza_loadtest.reports.tables import NumberTable
    from cadenza_simulator.campaign import Simulated
    from cadenza_simulator.capacity.capacity import Capacity

HELP = """Simulate a load in virtual time, with the real scheduler and cost models of executors.

\b
Examples:
  cadenza simulate --request-rate 4 --workload sharegpt --num-requests 2000
  cadenza simulate --executor costs.json --request-rate 10 --duration-s 86400 --output day.json
  cadenza simulate --executors 1,2,4 --slo ttft=0.5,tpot=0.05 --find-max-rate
  cadenza simulate --executors 1,2,4 --slo ttft=0.5,tpot=0.05 --find-max-rate --time-budget 10m
  cadenza simulate --executors 4 --placement round-robin --workload shared-prefix --request-rate 20
  cadenza simulate --sweep request-rate=1,2,4 --batching static --report static.html

An executor is a published profile (a100-40gb-opt-13b, a100-80gb-opt-13b, h200-llama-3.1-8b) or a file that `cadenza
fit-costs` made from a recording. The results are those of `cadenza loadtest`: tables, files, figures, reports.
"""
EPILOG = "Exit codes: 0 simulated, 1 no request was served or no rate holds, 2 wrong options, 130 Ctrl-C."
_LOAD_PANELS = ("Workload", "Load", "Measuring")
_NOT_SIMULATED = ("timeout_s", "warm_up_requests", "sweep", "adapters", "adapter_share", "adapter_prefix")


Executor = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME|FILE", help="Profile of an executor; several: all together.  [default: a100-40gb-opt-13b]"
    ),
]
Executors = Annotated[
    str | None,
    typer.Option(
        metavar="N,N,…", help="Copies of the executors under one scheduler; each number is a point.  [default: 1]"
    ),
]
Placement = Annotated[
    str | None,
    typer.Option(
        metavar="POLICY",
        help="Executor of a request: expected-time or round-robin, as the service, or for comparison llm-d or sglang, "
        "as these routers choose.  [default: expected-time]",
    ),
]
Budget = Annotated[
    str | None,
    typer.Option(
        metavar="SECONDS|none",
        help="With --find-max-rate: end the search after this time, such as 90, 90s or 5m, with what is known "
        "then; trials become shorter to fit. none or 0: no limit.  [default: 45]",
    ),
]


class NothingHoldsError(CadenzaError):
    """No rate holds, or no request was served."""


def simulate(
    executor: Executor = None,
    executors: Executors = None,
    placement: Placement = None,
    time_budget: Budget = None,
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
    from cadenza_cli.load.results import check_outputs, check_whole, nothing_counted, write_outputs
    from cadenza_cli.load.views import SearchView
    from cadenza_loadtest.settings import make_settings, merged_values
    from cadenza_simulator.campaign import run_simulation
    from cadenza_simulator.capacity.rate_trials import TimeBudget, read_time_budget
    from cadenza_simulator.options import make_simulated

    load_names = {option.name for option in _load_fields()}
    given = {name: options.pop(name) for name in load_names & options.keys()} | {"sweep": sweep or None}
    settings_before, before = _before(rerun)
    settings = make_settings(merged_values(settings_before, given))
    budget_s = read_time_budget(time_budget)
    if time_budget is not None and not settings.find_max_rate:
        raise OptionError("--time-budget limits a search: give --find-max-rate")
    simulated = make_simulated(executor or (), executors, options, config=config, before=before, placement=placement)
    read = [rerun, config, settings.workload, *(executor or ())]
    outputs = check_outputs(output=output, csv=csv, plots=plots, report=report, read=read)
    command = ["cadenza", *sys.argv[1:]]
    view = SearchView()
    with view.searching():
        file, capacities = run_simulation(
            settings, simulated, view, label=label, command=command, budget=TimeBudget(budget_s)
        )
    write_outputs(file, outputs)
    if capacities:
        _write_capacities(capacities, budget_s, outputs, interrupted=bool(file.cut_short))
    check_whole(file)
    if capacities:
        _check_held(capacities, settings.slo, budget_s)
    elif (why := nothing_counted(file)) is not None:
        raise NothingHoldsError(why)


def simulate_fields() -> list[FieldOption]:
    """The options of a load and of the services that apply to a simulation; none if the extra is not installed."""
    fields = _load_fields()
    try:
        from cadenza_simulator.options import EXECUTOR_OPTIONS, SCHEDULER_OPTIONS
    except ImportError:
        return []

    known = {*EXECUTOR_OPTIONS, *SCHEDULER_OPTIONS}
    services = [option for option in service_fields("Simulated services: {}") if option.name in known]
    return [*fields, *services]


def capacity_table(capacities: Sequence[Capacity]) -> NumberTable:
    """A row for each number of executors: the highest rate that holds, the lowest that fails, the virtual seconds of
    a trial, and the latencies at the former."""
    from cadenza_loadtest.reports.tables import NumberTable
    from cadenza_simulator.capacity.capacity import summary_of

    rows = []
    for capacity in capacities:
        row = summary_of(capacity)
        times = [row.get(f"{name}_s_p{mark}") for name in ("ttft", "tpot") for mark in (50, 99)]
        rows.append(
            [
                str(capacity.num_executors),
                number(row["request_rate"], "none holds" if capacity.trials else "not tried"),
                number(capacity.failed),
                number(capacity.trial_s),
                *(number(None if seconds is None else 1000 * seconds) for seconds in times),
                number(row.get("output_tokens_per_s")),
                number(row.get("tokens_per_s_per_executor")),
            ]
        )
    latencies = [f"{name}\n{mark} ms" for name in ("TTFT", "TPOT") for mark in ("p50", "p99")]
    heads = [
        "executors", "requests/s", "fails at", "trial,\ns", *latencies, "tokens/s", "tokens/s\nper executor",
    ]  # fmt: skip
    title = "Highest rate that holds the SLO"
    if not all(each.is_over for each in capacities):
        title += ", as far as the search came"
    elif not _is_complete(capacities):
        title += ", by short trials"
    return NumberTable(heads, rows, title=title)


def search_sentence(capacities: Sequence[Capacity], budget_s: float, *, interrupted: bool) -> str:
    """How sure the rates are, and what cut the search short."""
    from cadenza_simulator.capacity.search import TRIAL_S

    if _is_complete(capacities):
        return "The column `fails at` has the lowest rate that was tried and does not hold."
    what = "Ctrl-C" if interrupted else f"The time budget of {budget_s:g} s"
    sentences = [f"! {what} ended the search early."] if not all(each.is_over for each in capacities) else []
    shorter = [each.trial_s for each in capacities if each.trial_s is not None and not each.is_full_length]
    if shorter:
        least = f"{number(min(shorter))} s" if min(shorter) == max(shorter) else f"{number(min(shorter))} s or more"
        sentences.append(f"! Trials have {least} of arrivals in place of {TRIAL_S:g} s: the rates are less sure.")
    if budget_s < math.inf:
        sentences.append(f"The time budget is {budget_s:g} s; --time-budget none searches without a limit.")
    return "\n".join(sentences)


def _write_capacities(capacities: Sequence[Capacity], budget_s: float, outputs: Outputs, *, interrupted: bool) -> None:
    """Print the table and what is to be known about it, and write the figure if figures are requested."""
    from cadenza_cli.load.results import tables_console

    console = tables_console()
    console.print(capacity_table(capacities))
    console.print(search_sentence(capacities, budget_s, interrupted=interrupted), highlight=False)
    if outputs.plots is not None:
        from cadenza_simulator.capacity.pictures import write_capacity

        write_capacity(capacities, outputs.plots)


def _check_held(capacities: Sequence[Capacity], slo: str, budget_s: float) -> None:
    """Raise NothingHoldsError if no rate holds, or none was tried to its end."""
    if not any(each.trials for each in capacities):
        raise NothingHoldsError(f"--time-budget: {budget_s:g} s ended before the first trial")
    if all(each.held is None for each in capacities):
        raise NothingHoldsError(f"no rate that was tried holds {slo}")


def _is_complete(capacities: Sequence[Capacity]) -> bool:
    return all(each.complete for each in capacities)


def _before(rerun: str | None) -> tuple[dict[str, Any], Simulated | None]:
    """The settings and the simulated system of the result to rerun; empty and None without one."""
    from cadenza_loadtest.results.results import read_again
    from cadenza_loadtest.settings import settings_of
    from cadenza_simulator.options import simulated_of

    if rerun is None:
        return {}, None
    file = read_again(rerun, "simulate")
    return settings_of(file, rerun), simulated_of(file, rerun)


def _load_fields() -> list[FieldOption]:
    """The settings of a load that apply without a server; none if the extra is not installed."""
    return [option for option in load_fields() if option.panel in _LOAD_PANELS and option.name not in _NOT_SIMULATED]
