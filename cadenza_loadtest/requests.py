"""The requests of a load: types shared by workloads, drivers, targets and the simulator."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cadenza.errors import OptionError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class LoadTestError(OptionError):
    """An option or a file of the load test is invalid; the message names it."""


@dataclass(frozen=True, slots=True)
class RequestShape:
    """One request, described by its lengths in tokens; `prompts` makes the tokens."""

    index: int
    """Position in the workload, from 0; it and the seed determine the token ids."""
    num_prompt_tokens: int
    """Length of the whole prompt, including a shared prefix; for later turns of a session, of the new part only."""
    num_output_tokens: int
    """Output tokens of each sample; EOS is ignored, so that exactly this many are generated."""
    kind: str = ""
    """Label of the request's part of a mix, such as "long"; metrics are reported for each label."""
    prefix: int = -1
    """Index of the shared prefix that the prompt begins with; -1: none."""
    num_prefix_tokens: int = 0
    n: int = 1
    """Parallel samples."""
    beam_width: int = 0
    """Width of a beam search in place of sampling; 0: none."""
    tenant: str = ""
    adapter: str = ""
    """Name of the LoRA adapter; empty: none."""
    session: int = -1
    """The conversation that the request is a turn of; -1: none."""
    turn: int = 0
    """Index in the session, from 0. A later turn's prompt is the previous turn, its answer, and the new part; it is
    sent when that answer is complete and `think_s` have passed."""
    think_s: float = 0.0
    prompt_token_ids: tuple[int, ...] = ()
    """Token ids from a file; empty: made from the lengths."""
    prompt_text: str = ""
    """Text from a file, in place of token ids."""
    prompt_blocks: tuple[int, ...] = ()
    """Ids of the prompt's blocks of `workload_records.BLOCK_TOKENS`: equal ids stand for equal tokens."""
    due_s: float | None = None
    """Arrival time from a trace, in seconds from the start; None: by the arrival process."""
    prompt_truncated: bool = False
    """Whether the prompt, or the turn's part of it, was truncated to fit; `output_truncated` is the same for the
    output."""
    output_truncated: bool = False

    @property
    def num_samples(self) -> int:
        """Number of outputs."""
        return 1 if self.beam_width else self.n


class Workload(Protocol):
    """A source of requests, which makes them one by one, so that a million requests need no memory."""

    def shapes(self, num_requests: int | None, seed: int) -> Iterator[RequestShape]:
        """`num_requests` requests, which depend on the seed alone, with the turns of a session one after the other; a
        session counts as one. None: all requests of a file, or endless."""


@dataclass(slots=True)
class Truncations:
    """The requests of a schedule that had a length truncated."""

    prompts: set[int] = field(default_factory=set)
    """Indices of requests with a truncated prompt; `outputs` likewise."""
    outputs: set[int] = field(default_factory=set)

    def recording(self, schedule: Iterable[tuple[float, RequestShape]]) -> Iterator[tuple[float, RequestShape]]:
        """The same schedule, read lazily; truncations are recorded as it is read."""
        for due_s, shape in schedule:
            if shape.prompt_truncated:
                self.prompts.add(shape.index)
            if shape.output_truncated:
                self.outputs.add(shape.index)
            yield due_s, shape

    def count_among(self, index: Ints) -> tuple[int, int]:
        """Number of truncated prompts and of truncated outputs among the requests with these indices [n]."""
        prompts, outputs = (int(np.isin(index, list(cut)).sum()) for cut in (self.prompts, self.outputs))
        return prompts, outputs
