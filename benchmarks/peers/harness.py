"""Load generators as commands: the load that each one gets, and the timestamps that it reports."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.common.rows import ROOT, BenchmarkError
from benchmarks.peers.process import last_lines, log_file

_LIMIT_S = 1800.0
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Load:
    """Text prompts at a constant rate, in this order, each with as many output tokens."""

    url: str
    """Base URL, with /v1."""
    model: str
    """Name of the model at the server."""
    tokenizer: Path
    prompts: Sequence[str]
    output_len: int
    rate: float
    """Requests per second."""

    def lines(self, *, prompt: str, output_len: str) -> str:
        """JSON lines with the prompt and the output's length under these names."""
        return "".join(json.dumps({prompt: each, output_len: self.output_len}) + "\n" for each in self.prompts)


@dataclass(frozen=True, slots=True)
class Seen:
    """The measurements of a generator. Timestamps are in seconds of its own clock, [n] each in one order."""

    due_s: Floats
    sent_s: Floats
    first_s: Floats
    """Arrival of the first output token."""
    last_s: Floats
    num_prompt_tokens: int
    """Over all requests, as the server counts them; so is the next."""
    num_output_tokens: int
    reported: Mapping[str, float]
    """The values of its own report, by Cadenza's names."""
    version: str

    def metrics(self, output_len: int) -> dict[str, float]:
        """Medians in milliseconds, computed from the timestamps alike for all; throughput from first due to last
        token."""
        after_first = max(output_len - 1, 1)
        return {
            "lag_p50_ms": _median_ms(self.sent_s - self.due_s),
            "due_to_first_p50_ms": _median_ms(self.first_s - self.due_s),
            "sent_to_first_p50_ms": _median_ms(self.first_s - self.sent_s),
            "token_p50_ms": _median_ms((self.last_s - self.first_s) / after_first),
            "tokens_per_s": self.num_output_tokens / float(self.last_s.max() - self.due_s.min()),
        }


def run_command(command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    """Run a command, by default in this environment; if it fails, raises BenchmarkError with its last output."""
    with log_file() as log, log.open("w", encoding="utf-8") as out:
        try:
            done = subprocess.run(
                command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, cwd=ROOT, env=environment, timeout=_LIMIT_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BenchmarkError(f"{command[0]}: {error}") from None
        if done.returncode:
            raise BenchmarkError(f"{' '.join(command[:4])} failed: {last_lines(log)}")


def _median_ms(seconds: Floats) -> float:
    return 1e3 * float(np.median(seconds))
