"""`cadenza up`: runs and supervises a scheduler, its executors and a gateway until a signal."""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import IO, TYPE_CHECKING, Annotated, Any, NoReturn, cast

import typer

from cadenza.errors import CadenzaError, OptionError
from cadenza_cli.service_args import Config
from cadenza_common.telemetry.logs import CRITICAL, json_line, parse_line
from cadenza_common.wire.transport import SCHEDULER_PORT

if TYPE_CHECKING:
    from rich.console import Console

    from cadenza_launcher.local import LocalServices

HELP = """Serve a model.

Starts an executor and a scheduler and supervises both; or several executors of one scheduler; or a gateway for several
models, each with a scheduler of its own (docs/several-models.md).

\b
Examples:
  cadenza up models/cadenza-demo
  cadenza generate "Hello"              (in another terminal)
  cadenza up MODEL --executors 2
  cadenza up MODEL --http 8000          (OpenAI's and Anthropic's APIs too)
  cadenza up MODEL --page               (the same, and a live page)
  cadenza up MODEL --kserve 8001        (clients of Triton too)
  cadenza up MODEL --executors 4 --distributed-executor-backend ray
  cadenza up A B C --models-memory 16   (several models, each when asked for)

MODEL is a folder, a GGUF file or a name of the Hugging Face hub (OWNER/REPO, OWNER/REPO:Q4_K_M, OWNER/REPO/FILE.gguf);
--model gives it too. `cadenza serve` is the same command.

Prints `ready HOST:PORT` on stdout once it can serve. The effective options and the logs of the services go to stderr,
each line with the name of the service: with several executors, executor 0, executor 1 and so on.

Ctrl-C stops all at once. SIGTERM lets the scheduler finish its requests, for --drain-timeout-s at most, before all
stop; a second signal stops them at once. SIGTERM to one of the services stops it in the same way, and it is started
again: a rolling restart.

Once all have served, a service that dies is started again, for as long as it takes: after 0.2 s, and after twice the
time for each death without progress, up to 30 s (scheduler: 5 s). Progress is a completed step of the executor, 10 s
of its life, or 1 s of the scheduler's. On Linux a service that a signal has stopped for 3 s is killed, and so started
again. Meanwhile the requests of an executor go on at the others; without another they wait, until their deadlines at
most. After a restart of an executor, the effective options are printed again.

With --log-format json each line on stderr is a JSON object, with the name of the service in it.

Every option can also be set in the environment, such as CADENZA_BLOCK_SIZE=32, or in a TOML file (--config), such as
block_size = 32. The command line overrides the environment, which overrides the file.
"""
EPILOG = "Exit codes: 0 stopped by a signal, 1 a service did not start the first time, 2 wrong options."
_LOOK_S = 0.5
_NAME_CELLS = 9
_MIN_CELLS = 20
_STYLES = {"executor": "cyan", "scheduler": "green", "gateway": "magenta", "cadenza": "bold yellow"}

Named = Annotated[
    list[str] | None,
    typer.Argument(metavar="MODEL", help="Folder, GGUF file or hub id of the model.", show_default=False),
]
Model = Annotated[str | None, typer.Option(metavar="MODEL", help="Folder, GGUF file or hub id, in place of MODEL.")]
Host = Annotated[str | None, typer.Option(metavar="TEXT", help="Address to listen on.  [default: 127.0.0.1]")]
Port = Annotated[
    str | None,
    typer.Option(metavar="INTEGER", help=f"Port to listen on; 0: any free one.  [default: {SCHEDULER_PORT}]"),
]


def up(
    named: Named = None,
    model: Model = None,
    host: Host = None,
    port: Port = None,
    config: Config = None,
    **options: Any,
) -> None:
    """Serve until SIGINT or SIGTERM; raises LocalServiceError if a service does not start the first time."""
    from cadenza_launcher.pool.several import are_several
    from cadenza_launcher.services.options import read_places

    named = named or []
    if named and model is not None and [model] != named:
        raise OptionError(f"option model: it is given twice: {', '.join(named)} and --model {model}")
    named = named if model is None else [model]
    places = read_places({"model": named[0] if named else None, "host": host, "port": port}, config)
    if are_several(named, config, options):
        _log.is_json = _log_format("several", options, config) == "json"
        with _errors_as_lines():
            one = [str(places["model"].value)] if "model" in places else []
            _run_several(named or one, places, config, options)
    if "model" not in places:
        raise OptionError(
            "option model: it is missing: cadenza up MODEL; or --model, CADENZA_MODEL, or model in a file with --config"
        )

    _log.is_json = _log_format(str(places["model"].value), options, config) == "json"
    with _errors_as_lines():
        _run(places, config, options)


@contextlib.contextmanager
def _errors_as_lines() -> Iterator[None]:
    """In the body, write an error that ends the command as a JSON object too, where lines are such objects."""
    try:
        yield
    except CadenzaError as error:
        if not _log.is_json:
            raise
        _log("cadenza", str(error), CRITICAL)
        raise typer.Exit(2 if isinstance(error, OptionError) else 1) from None


def _run(places: Any, config: Any, options: Mapping[str, Any]) -> None:
    from cadenza_launcher.local import LocalServices
    from cadenza_launcher.services.options import Setting
    from cadenza_launcher.services.supervised_service import RestartPolicy

    def value(name: str, default: Any) -> Any:
        return places.get(name, Setting(default)).value

    signal.signal(signal.SIGINT, _stop)
    signal.signal(signal.SIGTERM, _drain)
    restarted: queue.SimpleQueue[str] = queue.SimpleQueue()  # unlike an Event, it may be interrupted by a signal
    with LocalServices(
        value("model", None),
        host=value("host", "127.0.0.1"),
        port=value("port", SCHEDULER_PORT),
        config=config,
        restarts=RestartPolicy(max_deaths=None),
        on_log=_log,
        on_event=lambda text: _log("cadenza", text, "warning"),
        on_back=restarted.put,
        on_start=_log.start,
        **options,
    ) as services:
        try:
            _serve(services, places, restarted)
        except _Drain:
            _log("cadenza", "the scheduler finishes its requests; a second signal stops it at once")
            services.drain()
            _ignore_signals()
            raise


def _run_several(named: list[str], places: Any, config: Any, options: Mapping[str, Any]) -> NoReturn:
    from cadenza_cli.several_lines import several_lines
    from cadenza_launcher.pool.several import SeveralModels

    signal.signal(signal.SIGINT, _stop)
    signal.signal(signal.SIGTERM, _drain)
    with SeveralModels(
        named,
        host=str(places["host"].value) if "host" in places else "127.0.0.1",
        port=int(places["port"].value) if "port" in places else SCHEDULER_PORT,
        config=config,
        on_log=_log,
        on_event=lambda text: _log("cadenza", text, "warning"),
        **options,
    ) as models:
        try:
            for line in several_lines(models):
                _log("cadenza", line)
            _say_ready(models.target)
            while True:
                time.sleep(_LOOK_S)
        except _Drain:
            _log("cadenza", "the models finish their requests; a second signal stops them at once")
            models.drain()
            _ignore_signals()
            raise


def _log_format(model: str, options: Mapping[str, Any], config: Any) -> str:
    """The effective --log-format, which holds for this program's own lines too."""
    from cadenza_launcher.services.options import route_options

    setting = route_options(model, {"log_format": options.get("log_format")}, config=config).settings.get("log_format")
    return "text" if setting is None else str(setting.value)


def _serve(services: LocalServices, places: Any, restarted: queue.SimpleQueue[str]) -> NoReturn:
    _print_settings(services, places)
    _say_ready(services.target)
    while True:
        # Python runs a signal's handler once the main thread is awake, and the signal may have woken another one.
        with contextlib.suppress(queue.Empty):
            if restarted.get(timeout=_LOOK_S) in services.executors:
                _print_settings(services, places)  # values that it chooses itself, as its blocks, may have changed


def _say_ready(target: str) -> None:
    sys.stdout.write(f"ready {target}\n")
    sys.stdout.flush()


def _print_settings(services: LocalServices, places: Any) -> None:
    import grpc

    from cadenza_cli.effective_options import effective_options

    try:
        lines = effective_options(services, places)
    except grpc.RpcError as error:
        if getattr(error, "code", lambda: None)() is grpc.StatusCode.UNAUTHENTICATED:
            lines = ["the effective options are shown to tenants: CADENZA_TOKEN holds no valid token"]
        else:  # a service has just died again; its restart is reported
            lines = ["the effective options are not known: a service does not answer"]
    for line in lines:
        _log("cadenza", line)


class _LogFile:
    """stderr, without its errors: a line that cannot be written is lost, as when the disk is full. Serving goes on."""

    encoding = property(lambda self: sys.stderr.encoding)

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return sys.stderr.isatty()

    def fileno(self) -> int:
        """Its file descriptor."""
        return sys.stderr.fileno()

    def write(self, text: str) -> int:
        """Write text, or lose it."""
        with contextlib.suppress(OSError):
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        """Write what is buffered, or keep it."""
        with contextlib.suppress(OSError):
            sys.stderr.flush()


class _Log:
    """Prints a line behind the name of its service. On a terminal, words wrap whole and stay behind the bar."""

    def __init__(self) -> None:
        self._name_cells = _NAME_CELLS
        self.is_json = False
        """Whether each line is a JSON object, with the name of the service in it."""

    def start(self, executors: Sequence[str]) -> None:
        """Make room for the names of the executors."""
        self._name_cells = max(_NAME_CELLS, *map(len, executors))

    def __call__(self, service: str, line: str, level: str = "info") -> None:
        """Print a line; `level`: of one that is no JSON object, where lines are such objects."""
        if self.is_json:
            _stderr.write(_json_line(service, line, level) + "\n")
            _stderr.flush()
            return
        from rich.text import Text

        console, cells = _console(), self._name_cells
        name = f"{service:{cells}} │ "
        rows = [Text(line)]
        if console.is_terminal:
            rows = list(rows[0].wrap(console, max(_MIN_CELLS, console.width - len(name)))) or rows
        for row in rows:
            console.print(Text.assemble((name, _STYLES[service.split()[0]]), row))
            name = f"{'':{cells}} │ "


def _json_line(service: str, line: str, level: str) -> str:
    """A line of a service as it is, with the service's name; any other line as the message of an object."""
    fields = parse_line(line)
    if fields is None:
        return json_line(level, service, line, {"service": service})
    return json.dumps(fields | {"service": service})


@cache
def _console() -> Console:
    from rich.console import Console

    return Console(file=cast(IO[str], _stderr), soft_wrap=True, highlight=False)


_stderr = _LogFile()
_log = _Log()


class _Drain(SystemExit):
    """SIGTERM: the scheduler is to finish its requests before both services stop."""


def _drain(number: int, frame: object) -> None:
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, _stop)
    raise _Drain(0)


def _stop(number: int, frame: object) -> None:
    _ignore_signals()
    raise SystemExit(0)


def _ignore_signals() -> None:
    """Stopping has its own time limits; further signals must not interrupt it and leave child processes behind."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
