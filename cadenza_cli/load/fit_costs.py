"""`cadenza fit-costs`: a cost model from a recording."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cadenza_cli.load.options import require_loadtest
from cadenza_cli.text import notice

if TYPE_CHECKING:
    from cadenza_loadtest.results.results import LoadTestFile
    from cadenza_simulator.fit import Fit

HELP = """Fit a cost model to a recording: what a step costs by what it does.

\b
Examples:
  cadenza up --model FOLDER --record day.log      then send it a load with prompts of many lengths
  cadenza fit-costs day.log --output costs.json
  cadenza simulate --executor costs.json --request-rate 4
  python -m executor_svc --simulate costs.json

Prints how well the model predicts the recorded step times, and which terms the recording could not determine.
"""
EPILOG = "Exit codes: 0 fitted, 2 a wrong option, or a file that is not a recording."
_MEANING = {
    "step_us": "every step",
    "token_us": "every token computed",
    "context_token_us": "every position that a computed token reads",
    "kv_token_us": "every position whose KV a sequence reads",
    "sample_us": "every token sampled",
    "moved_block_us": "every block swapped or copied",
    "hidden_tokens": "tokens of a step that add no time to it",
    "plan_us": "the scheduler's work for a plan",
    "transit_us": "transit of a plan or a result",
    "noise step_us": "variance over mean of a step's time",
    "noise overheads": "coefficient of variation of plan_us and transit_us",
    "request_us": "from a client to the queue",
    "reply_us": "from a result to the client",
}


def fit_costs(
    recording: Annotated[str, typer.Argument(metavar="RECORDING", help="Plan log written by --record.")],
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the model, for simulate and for an executor."),
    ] = None,
    loadtest: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Result of the recorded load test, for the overheads of its clients."),
    ] = None,
    name: Annotated[str, typer.Option(metavar="TEXT", help="Name of the model; default: the file's name.")] = "",
) -> None:
    """Run the command; raises CadenzaError."""
    require_loadtest("fit-costs", "loadtest,scheduler")
    from cadenza_cli.load.results import check_outputs
    from cadenza_simulator.executor_profiles import write_profile
    from cadenza_simulator.fit import fit_costs as fit
    from cadenza_simulator.fit import fitted_profile, with_clients
    from cadenza_simulator.recordings import check_compatible, read_recording

    outputs = check_outputs(output=output, read=[recording, loadtest])
    clients = None if loadtest is None else _clients(loadtest)
    found = read_recording(recording)
    if found.num_cut_bytes:
        notice(f"{recording}: the last {found.num_cut_bytes} bytes are an incomplete record")
    if clients is not None and loadtest is not None:
        check_compatible(found, clients, loadtest)
    fitted = fit(found)
    if clients is not None:
        fitted = with_clients(fitted, clients.points[0].runs[0].requests)
    _show(fitted)
    if outputs.output is not None:
        write_profile(str(outputs.output), fitted_profile(found, fitted, name or outputs.output.stem, recording))


def _clients(path: str) -> LoadTestFile:
    """A load test with a run; raises LoadTestError."""
    from cadenza_loadtest.requests import LoadTestError
    from cadenza_loadtest.results.results import read

    file = read(path)
    if file.source != "loadtest" or not file.points:
        what = "it was simulated" if file.source != "loadtest" else "it has no run"
        raise LoadTestError(f"--loadtest {path}: {what}; give the load test that was recorded")
    return file


def _show(fitted: Fit) -> None:
    from rich.table import Table

    from cadenza_cli.load.results import tables_console

    table = Table(title=f"Fitted to {fitted.num_steps} steps", caption=_quality(fitted))
    table.add_column("term")
    table.add_column("value", justify="right")
    table.add_column("for")
    overheads = {name: value for name, value in fitted.overheads if value or name in ("plan_us", "transit_us")}
    noise = {f"noise {name}": value for name, value in fitted.noise}
    for term, value in {**fitted.costs.model_dump(), **overheads, **noise}.items():
        table.add_row(term, f"{value:,.4g}" if value < 10_000 else f"{value:,.0f}", _MEANING[term])
    tables_console().print(table)
    for warning in fitted.warnings:
        notice(warning)


def _quality(fitted: Fit) -> str:
    return (
        f"a step's error: {fitted.median_error:.1%} median, {fitted.p90_error:.1%} p90; "
        f"{max(0.0, fitted.explained):.1%} of the variance explained; all steps together: "
        f"{fitted.total_ratio - 1:+.1%}"
    )
