"""Common parts of the benchmarks of whole systems: options, and the rows' facts about model and workload."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.benchmark import positive
from benchmarks.common.checkpoints import max_model_len, vocab_size
from benchmarks.common.rows import BenchmarkError
from benchmarks.common.workload import Request, digest, load_workload, make_workload
from cadenza import ModelInfo, OptionError
from cadenza_launcher.services.options import route_options


def add_serving_options(parser: argparse.ArgumentParser) -> None:
    """Add --workload, --requests and --set."""
    parser.add_argument("--workload", help='JSON file: a list of {"id", "prompt": [ids], "output_len"}')
    parser.add_argument("--requests", type=positive, default=64, help="requests without --workload (default 64)")
    add_set_option(parser)


def add_set_option(parser: argparse.ArgumentParser) -> None:
    """Add --set."""
    parser.add_argument(
        "--set", type=_option, action="append", default=[], metavar="NAME=VALUE", help="an option of the services"
    )


def service_options(options: argparse.Namespace) -> dict[str, Any]:
    """Options of Cadenza's services. Each repeat sends the same prompts, so the prefix cache is off, as for the
    peers."""
    return {"enable_prefix_caching": False, **dict(options.set)}


def model_folder(path: str) -> Path:
    """The folder of --model; raises BenchmarkError if it does not exist."""
    folder = Path(path).expanduser().resolve()
    if not folder.is_dir():
        raise BenchmarkError(f"--model {path}: no such folder")
    return folder


def requests_of(options: argparse.Namespace, folder: Path) -> list[Request]:
    """The requests of --workload, or --requests random ones."""
    if options.workload is not None:
        return load_workload(Path(options.workload), vocab_size(folder), max_model_len(folder))
    return make_workload(options.requests, options.seed, vocab_size(folder))


def about_model(folder: Path, info: ModelInfo) -> dict[str, Any]:
    """For a row's params."""
    return {
        "model": folder.name,
        "num_parameters": info.num_parameters,
        "dtype": info.dtype,
        "exact_numerics": info.exact_numerics,
    }


def about_workload(requests: Sequence[Request]) -> dict[str, Any]:
    """For a row's params."""
    return {
        "requests": len(requests),
        "prompt_tokens": sum(len(request.prompt) for request in requests),
        "output_tokens": sum(request.output_len for request in requests),
        "workload": digest(requests),
    }


def _option(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, not {text!r}")
    name = name.replace("-", "_")
    try:  # checked now, not after minutes of preparation
        route_options("any/model", {name: value}, environment={})
    except OptionError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return name, value
