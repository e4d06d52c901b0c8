"""Requests of a time slice, in columns.

Traffic drawn from published statistics.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from benchmarks.fleet.statistics import MIXES, MixName, day_factor, day_peak, draw
from cadenza_loadtest.requests import Floats, Ints
from cadenza_loadtest.seeds import stream


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


_CHUNK_S = 60.0


class DrawnTraffic(ChunkedTraffic):
    """Poisson arrivals of a mix. A request that continues another one is of its session; sessions may branch."""

    def __init__(self, name: MixName, per_s: float, seed: int, *, daily: bool = True) -> None:
        """`per_s`: requests a second, on a day's average if `daily`, else all the time."""
        super().__init__(_CHUNK_S)
        self._mix, self._per_s, self._seed, self._daily = MIXES[name], per_s, seed, daily
        following = self._mix.continuation
        peak = day_peak() if daily else 1.0
        self._num_kept = 0 if following is None else math.ceil(following.gap_s[-1] / _CHUNK_S) + 1
        expected = per_s * peak * _CHUNK_S * (self._num_kept + 1)
        self.num_sessions = 0 if following is None else round(1.2 * expected + 1000)
        self.num_groups = 1 if self._mix.beginning else 0
        self.max_output = int(max(self._mix.output[-1], following.output[-1] if following else 0))
        self._past: list[tuple[Floats, Ints]] = []
        """Times and sessions of the requests of the last chunks, the newest last."""
        self._num_begun = 0

    def draw(self, chunk: int) -> Arrivals:
        """As in ChunkedTraffic."""
        rng, begin_s = stream(self._seed, "fleet traffic", chunk), chunk * _CHUNK_S
        factor = day_factor(begin_s + _CHUNK_S / 2) if self._daily else 1.0
        count = int(rng.poisson(self._per_s * factor * _CHUNK_S))
        due_s = begin_s + np.sort(rng.random(count)) * _CHUNK_S
        prompt, output = draw(self._mix.prompt, rng, count), draw(self._mix.output, rng, count)
        nothing = np.zeros(count, np.int64)
        session, shared, fresh = np.full(count, -1), nothing, np.zeros(count, np.bool_)
        following = self._mix.continuation
        if following is not None:
            continues, gap_s = rng.random(count) < following.share, draw(following.gap_s, rng, count)
            parent, past = self._parents(chunk, due_s, continues, gap_s)
            session, fresh = self._sessions(parent, past)
            prompt = np.where(fresh, prompt, draw(following.prompt, rng, count))
            output = np.where(fresh, output, draw(following.output, rng, count))
            shared = np.where(fresh, 0.0, prompt * draw(following.same, rng, count)).astype(np.int64)
            self._past = [*self._past, (due_s, session)][-self._num_kept :]
        whole, outputs = np.maximum(1, prompt).astype(np.int64), np.maximum(1, output).astype(np.int64)
        beginning = np.minimum(whole, self._mix.beginning)
        group = nothing if self._mix.beginning else np.full(count, -1)
        return Arrivals(due_s, whole, outputs, session, fresh, np.minimum(shared, whole), group, beginning)

    def _parents(
        self, chunk: int, due_s: Floats, continues: np.ndarray[tuple[int], np.dtype[np.bool_]], gap_s: Floats
    ) -> tuple[Ints, Ints]:
        """Which request each continues: its index in this chunk, -1 for none there; its session if it is earlier."""
        parent, past = np.full(len(due_s), -1), np.full(len(due_s), -1)
        back = chunk - np.floor((due_s - gap_s) / _CHUNK_S).astype(np.int64)
        for age in np.unique(back[continues]).tolist():
            (now,) = (continues & (back == age)).nonzero()
            if age == 0:
                parent[now] = np.searchsorted(due_s, due_s[now] - gap_s[now]) - 1
            elif age <= len(self._past):
                times, sessions = self._past[-age]
                if len(times):
                    place = np.searchsorted(times, due_s[now] - gap_s[now])
                    past[now] = sessions[np.minimum(place, len(times) - 1)]
        return parent, past

    def _sessions(self, parent: Ints, past: Ints) -> tuple[Ints, np.ndarray[tuple[int], np.dtype[np.bool_]]]:
        """The session of each request, and whether it begins."""
        fresh = (parent < 0) & (past < 0)
        session = past.copy()
        count = int(fresh.sum())
        session[fresh] = (self._num_begun + np.arange(count)) % self.num_sessions
        self._num_begun += count
        while (session < 0).any():  # a parent comes before, so each round ends some
            (open_ones,) = (session < 0).nonzero()
            session[open_ones] = session[parent[open_ones]]
        return session, fresh
