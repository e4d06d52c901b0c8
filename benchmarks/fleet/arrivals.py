"""Requests of a time slice, in columns."""

from __future__ import annotations

import abc
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from cadenza_loadtest.requests import Floats, Ints


@dataclass(frozen=True, slots=True)
class Arrivals:
    """In the order of arrival; [n] each."""

    due_s: Floats
    prompt: Ints
    """Tokens of the prompt."""
    output: Ints
    """Tokens of the output, which neither routers nor schedulers know."""
    session: Ints
    """Number of the session, -1 for none; the source may use a number again when a session is over."""
    fresh: np.ndarray[tuple[int], np.dtype[np.bool_]]
    """Whether a session begins."""
    shared: Ints
    """Tokens of the prompt that its session has had before."""
    group: Ints
    """Number of the beginning that sessions share, such as a system prompt; -1 for none."""
    group_tokens: Ints

    def __len__(self) -> int:
        return len(self.due_s)

    def select(self, rows: slice | np.ndarray[tuple[int], np.dtype[Any]]) -> Arrivals:
        """The arrivals at these indices, where a mask is true, or of a slice."""
        return Arrivals(*(getattr(self, each.name)[rows] for each in fields(self)))


def alone(due_s: Floats, prompt: Ints, output: Ints) -> Arrivals:
    """Arrivals of requests that share nothing."""
    none, nothing = np.full(len(due_s), -1), np.zeros(len(due_s), np.int64)
    return Arrivals(due_s, prompt, output, none, np.zeros(len(due_s), np.bool_), nothing, none, nothing)


def joined(parts: list[Arrivals]) -> Arrivals:
    """All of them, in the order of arrival."""
    whole = Arrivals(*(np.concatenate([getattr(part, each.name) for part in parts]) for each in fields(Arrivals)))
    return whole.select(np.argsort(whole.due_s, kind="stable"))


class ChunkedTraffic(abc.ABC):
    """A source that makes its requests in chunks of equal time, so that they do not depend on the slices taken."""

    num_sessions: int
    """Session numbers are below this."""
    num_groups: int
    max_output: int
    """No output is longer."""

    def __init__(self, chunk_s: float) -> None:
        self.chunk_s = chunk_s
        self._chunk = 0
        self._ready = alone(np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64))

    def take(self, begin_s: float, end_s: float) -> Arrivals:
        """The requests that are due from `begin_s` up to, not including, `end_s`; the next call begins there."""
        parts = [self._ready]
        while self._chunk * self.chunk_s < end_s:
            parts.append(self.draw(self._chunk))
            self._chunk += 1
        if len(parts) > 1:
            self._ready = joined(parts)
        count = int(np.searchsorted(self._ready.due_s, end_s))
        now, later = slice(count), slice(count, None)
        taken, self._ready = self._ready.select(now), self._ready.select(later)
        return taken

    @abc.abstractmethod
    def draw(self, chunk: int) -> Arrivals:
        """The requests of a chunk, counted from 0; the chunks are drawn in order, each once."""
