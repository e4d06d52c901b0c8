"""What a load asks for: the words that workloads, drivers, targets and the simulator share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cadenza.errors import OptionError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class LoadTestError(OptionError):
    """An option or a file of the load test is wrong; the message names it."""


@dataclass(frozen=True, slots=True)
class RequestShape:
    """One request, by its lengths; `prompts` makes the tokens. Lengths in tokens."""

    index: int
    """Place in the workload, from 0; token ids follow from it and the seed."""
    num_prompt_tokens: int
    """Of the whole prompt, a shared prefix included; of a session's later turns: of what is new."""
    num_output_tokens: int
    """For each sample; the end of text is ignored, so that exactly so many are made."""
    kind: str = ""
    """Label of its part of a mix, such as "long"; metrics are told for each."""
    prefix: int = -1
    """Which of the shared prefixes its prompt begins with; -1: none."""
    num_prefix_tokens: int = 0
    n: int = 1
    """Parallel samples."""
    beam_width: int = 0
    """Beam search of this width in place of sampling; 0: none."""
    tenant: str = ""
    session: int = -1
    """Conversation that it is a turn of; -1: none."""
    turn: int = 0
    """From 0. A later turn's prompt is the turn before, its answer, and what is new; it is sent when that answer is
    there and `think_s` have passed."""
    think_s: float = 0.0
    prompt_token_ids: tuple[int, ...] = ()
    """Given by a file; empty: made from the lengths."""
    prompt_text: str = ""
    """Given by a file, in place of token ids."""
    due_s: float | None = None
    """When it arrives, given by a trace, in seconds from the start; None: by the arrival process."""
    prompt_truncated: bool = False
    """Was its prompt, or the turn's part of it, to be longer than fits; so of its outputs."""
    output_truncated: bool = False

    @property
    def num_samples(self) -> int:
        """Outputs that come back."""
        return 1 if self.beam_width else self.n


class Workload(Protocol):
    """Where requests come from: made one by one, so that a million of them need no memory."""

    def shapes(self, num_requests: int | None, seed: int) -> Iterator[RequestShape]:
        """So many requests, the same ones for the same seed, turns of one session one after the other; a session
        counts as one. None: all that a file has, or without end."""
