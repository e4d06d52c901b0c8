"""`cadenza fit`: whether a model fits into this machine, before anything is loaded or downloaded."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from cadenza.errors import OptionError
from cadenza_launcher.services.checks import check_model

HELP = """Say whether a model fits into this machine's memory, and how fast it can be.

Only headers are read; of a model on the Hugging Face hub too, whose weights are not downloaded. Counted for the CPU:
weights by format, keys and values a token, the longest context, requests at once, and the speed that the memory allows,
which is measured once and kept in ~/.cache/cadenza. An error of a model that does not fit says the same.

\b
Examples:
  cadenza fit models/cadenza-demo
  cadenza fit OWNER/REPO:Q4_K_M --max-model-len 8192
"""
EPILOG = "Exit codes: 0 it fits, 1 it does not, 2 wrong options."

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Folder, GGUF file or hub name.", show_default=False)]
Length = Annotated[int | None, typer.Option(metavar="INTEGER", help="As for `cadenza up`.")]
Seqs = Annotated[int | None, typer.Option(metavar="INTEGER", help="As for `cadenza up`.")]
Share = Annotated[float | None, typer.Option(metavar="NUMBER", help="Share of the free memory, as for `cadenza up`.")]
Experts = Annotated[
    Literal["memory", "mapped"] | None, typer.Option(help="Where experts are, as for `cadenza up`.", show_default=False)
]
Ranks = Annotated[
    int, typer.Option(metavar="INTEGER", help="Ranks that share this machine, as for `cadenza up`; each has its part.")
]
Measure = Annotated[bool, typer.Option("--measure", help="Measure the memory's speed again.")]


def fit(
    model: Model,
    max_model_len: Length = None,
    max_num_seqs: Seqs = None,
    gpu_memory_utilization: Share = None,
    expert_weights: Experts = None,
    tensor_parallel_size: Ranks = 1,
    measure: Measure = False,
) -> None:
    """Print what a model takes; raises OptionError."""
    from cadenza_cli.models.memory import room
    from executor_svc.errors import StartError
    from executor_svc.models.fit.read_rate import read_rate
    from executor_svc.models.fit.sizes import read_sizes
    from executor_svc.models.fit.text import fit_lines
    from executor_svc.models.folder import check_kind

    if tensor_parallel_size < 1:
        raise OptionError(f"option tensor_parallel_size: {tensor_parallel_size} is out of range")
    with _headers(check_model(model)) as path:
        try:
            if path.is_dir():
                check_kind(path)
            sizes = read_sizes(path, tensor_parallel_size)
        except StartError as error:
            message = str(error).replace(str(path), model).removeprefix(f"--model {model}: ")
            raise OptionError(f"option model: {message}") from None
    if max_model_len is not None and 0 < sizes.context_limit < max_model_len:
        raise OptionError(
            f"option max_model_len: {max_model_len}: the model supports at most {sizes.context_limit} positions"
        )
    there = room(gpu_memory_utilization, max_num_seqs, max_model_len, read_rate(measure))
    there = replace(there, mapped=expert_weights == "mapped")
    sys.stdout.write("\n".join([f"{model} ({sizes.family})", *fit_lines(sizes, there)]) + "\n")
    if not there.fits(sizes):
        raise typer.Exit(1)


@contextlib.contextmanager
def _headers(model: str) -> Iterator[Path]:
    """Yield the model's path, or one with the headers of a model of the hub, from the cache if it cannot be reached."""
    from cadenza_common.hub.download import cached_model
    from cadenza_common.hub.headers import headers_only
    from cadenza_common.hub.names import HubError, parse

    name = parse(model)
    if name is None or Path(model).exists():
        yield Path(model)
        return
    try:
        local = cached_model(name)
        if local is not None:
            yield local
            return
        with headers_only(name) as path:
            yield path
    except HubError as error:
        raise OptionError(f"option model: there is no folder {model!r}, and {error}") from None
