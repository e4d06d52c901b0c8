"""`cadenza pull`: downloads a model of the Hugging Face hub."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from cadenza_launcher.services.checks import check_model, local_path

HELP = """Download a model of the Hugging Face hub into its cache, and print its path.

\b
Examples:
  cadenza pull HuggingFaceTB/SmolLM2-135M-Instruct
  cadenza pull bartowski/SmolLM2-135M-Instruct-GGUF            (Q4_K_M, or the nearest)
  cadenza pull bartowski/SmolLM2-135M-Instruct-GGUF:Q8_0
  cadenza pull OWNER/REPO/FILE.gguf

`cadenza up` and all others that take MODEL download it too. After a connection that breaks, or a call that
was stopped, the next one goes on there.
HF_TOKEN, HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE are heeded as by other programs.
"""
EPILOG = "Exit codes: 0 it is there, 2 it cannot be had."


def pull(model: Annotated[str, typer.Argument(metavar="MODEL", help="Name of the model.", show_default=False)]) -> None:
    """Download a model; raises OptionError."""
    sys.stdout.write(local_path(check_model(model), {}, write_line) + "\n")


def write_line(line: str) -> None:
    """Print a line on stderr."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
