"""`cadenza loadtest`: send a load to a server and measure what its users would see."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated, Any

import typer

from cadenza.errors import CadenzaError, OptionError
from cadenza_cli.generate import Model, Target
from cadenza_cli.load.options import Csv, Label, Output, Plots, Report, Sweep, of_results, require_loadtest
from cadenza_cli.service_args import Config, FieldOption, serving

HELP = """Send a load to a server and measure what its users would see.

\b
Examples:
  cadenza loadtest --request-rate 4 --num-requests 200 --slo ttft=0.5,tpot=0.05
  cadenza loadtest --model models/cadenza-demo --sweep request-rate=2,4,8 --repetitions 3 --report report.html
  cadenza loadtest --concurrency 8 --workload sharegpt --output before.json
  cadenza loadtest --url http://127.0.0.1:8000/v1 --request-rate 4
  cadenza loadtest --find-max-rate --slo ttft=0.5 --duration-s 60

The schedule is fixed before the run: a server that falls behind does not slow its own load, and latencies count from
the time when a request was due. With --model a server is started for this command only. Latencies are in seconds in
files, in milliseconds on the screen. `cadenza report FILE FILE` compares results.
"""
EPILOG = """Exit codes: 0 measured, 1 measurement failed or is incomplete, or no rate holds, 2 wrong options,
130 Ctrl-C. Measurements before Ctrl-C are printed and written; a second Ctrl-C ends at once.
"""


class NothingMeasuredError(CadenzaError):
    """Every request failed, or none was within the window that counts."""


def loadtest(
    target: Target = None,
    model: Model = None,
    config: Config = None,
    sweep: Sweep = None,
    rerun: Annotated[
        str | None,
        of_results("FILE", "Rerun this result with its settings and its server, overridden by the options given here."),
    ] = None,
    output: Output = None,
    csv: Csv = None,
    plots: Plots = None,
    report: Report = None,
    label: Label = "",
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
    **options: Any,
) -> None:
    """Run the command; raises CadenzaError."""
    require_loadtest("the load test")
    from cadenza_cli.load.results import check_outputs, check_whole, nothing_counted, write_outputs
    from cadenza_cli.load.server import ServerPlace, reached_at, rerun_place
    from cadenza_cli.load.views import LoadView
    from cadenza_loadtest.campaign import run_campaign
    from cadenza_loadtest.results.results import LoadTestFile, Reached, read_again
    from cadenza_loadtest.schedule import planned_points
    from cadenza_loadtest.settings import make_settings, merged_values, settings_of

    load_names = {option.name for option in load_fields()}
    given = {name: options.pop(name) for name in load_names & options.keys()} | {"sweep": sweep or None}
    place = ServerPlace(target, model, config, {name: value for name, value in options.items() if value is not None})
    was = read_again(rerun, "loadtest") if rerun is not None else None
    before = {} if was is None or rerun is None else settings_of(was, rerun, elsewhere=place.is_named)
    settings = make_settings(merged_values(before, given))
    planned_points(settings)  # invalid settings are refused before a server is started
    outputs = check_outputs(output=output, csv=csv, plots=plots, report=report, read=[rerun, settings.workload])

    def measure(address: str, reached: Reached | None = None) -> LoadTestFile:
        name, command = label or place.model or settings.url or place.target or "", ["cadenza", *sys.argv[1:]]
        view = LoadView(quiet)
        return asyncio.run(run_campaign(settings, address, view, label=name, command=command, reached=reached))

    if settings.api == "openai":
        if target is not None or model is not None:
            raise OptionError("give --url, or --target or --model, not both")
        stray = next(iter(place.options), None if config is None else "config")
        if stray is not None:
            raise OptionError(f"option {stray} is for a server started here, with --model")
        file = measure(str(settings.url))
    else:
        place = rerun_place(place, None if was is None else was.reached)
        with serving(place.target, place.model, place.config, dict(place.options)) as address:
            file = measure(address, reached_at(place, address))
    write_outputs(file, outputs)
    check_whole(file)
    if (why := nothing_counted(file)) is not None:
        raise NothingMeasuredError(why)


def load_fields() -> list[FieldOption]:
    """The settings of a load test as options; none if the extra is not installed."""
    try:
        from cadenza_loadtest.settings import LoadSettings
    except ImportError:
        return []
    from cadenza_common.settings.help import group_of

    return [FieldOption(name, field, group_of(field)) for name, field in LoadSettings.model_fields.items()]
