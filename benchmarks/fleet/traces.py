"""Traffic from the file of a public trace: Azure's and BurstGPT's CSV, Mooncake's JSON lines."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.fleet.arrivals import Arrivals, ChunkedTraffic, day_factor, day_peak, joined
from benchmarks.fleet.routers import mixed
from cadenza_loadtest.requests import Floats, Ints, LoadTestError
from cadenza_loadtest.seeds import stream
from cadenza_loadtest.workloads.readers import read_records
from cadenza_loadtest.workloads.records import BLOCK_TOKENS, Record

_CHUNK_S = 10.0
_BRANCHES = 8
"""A block that is followed by so many different ones belongs to a beginning that sessions share."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A file's requests in the order of time, the first at 0."""

    requests: Arrivals
    num_sessions: int
    num_groups: int

    @property
    def duration_s(self) -> float:
        """From the first request until one after the last could follow."""
        count, last_s = len(self.requests), float(self.requests.due_s[-1])
        return last_s * count / max(1, count - 1) if last_s else 1.0

    @property
    def per_s(self) -> float:
        """Requests a second."""
        return len(self.requests) / self.duration_s


def read_trace(path: str) -> Trace:
    """Read a trace; raises a LoadTestError that names the file and the line."""
    times: list[float] = []
    prompts: list[int] = []
    outputs: list[int] = []
    blocks: list[tuple[int, ...]] = []
    for place, record in _records(path):
        if record.timestamp is None or record.output_len is None:
            missing = "timestamp" if record.timestamp is None else "output_len"
            raise LoadTestError(f"--traffic {path}, {place}: {missing} is missing")
        if record.session is not None:
            raise LoadTestError(f"--traffic {path}, {place}: session: turns have no times; `cadenza simulate` has them")
        if times and record.timestamp < times[-1]:
            raise LoadTestError(f"--traffic {path}, {place}: timestamp: is earlier than the one before; sort the file")
        times.append(record.timestamp)
        prompts.append(record.length)
        outputs.append(record.output_len)
        blocks.append(tuple(record.block_ids or ()))
    if not times:
        raise LoadTestError(f"--traffic {path}: has no request")
    due_s, prompt = np.array(times) - times[0], np.array(prompts, np.int64)
    session, fresh, shared, group, group_tokens = _shared(blocks, prompt)
    requests = Arrivals(due_s, prompt, np.array(outputs, np.int64), session, fresh, shared, group, group_tokens)
    return Trace(requests, int(session.max()) + 1, int(group.max()) + 1)


def _records(path: str) -> Iterator[tuple[str, Record]]:
    try:
        yield from read_records(Path(path))
    except LoadTestError as error:
        raise LoadTestError(str(error).replace("workload ", "--traffic ", 1)) from None


def _shared(
    blocks: Sequence[tuple[int, ...]], prompt: Ints
) -> tuple[Ints, np.ndarray[tuple[int], np.dtype[np.bool_]], Ints, Ints, Ints]:
    """What requests share, from the ids of their blocks: session, whether it begins, tokens of the session, shared
    beginning, its tokens."""
    following: dict[int, set[int]] = defaultdict(set)
    for each in blocks:
        for one, other in pairwise(each):
            following[one].add(other)
    common = {block for block, others in following.items() if len(others) >= _BRANCHES}
    last_of: dict[int, int] = {}
    groups: dict[int, int] = {}
    columns = [np.full(len(blocks), -1), np.zeros(len(blocks), np.bool_)]
    columns += [np.zeros(len(blocks), np.int64), np.full(len(blocks), -1), np.zeros(len(blocks), np.int64)]
    session, fresh, shared, group, group_tokens = columns
    num_sessions = 0
    for index, each in enumerate(blocks):
        if not each:
            continue
        num_common, num_known = _leading(each, common), _leading(each, last_of)
        if num_common:
            group[index] = groups.setdefault(each[num_common - 1], len(groups))
            group_tokens[index] = min(num_common * BLOCK_TOKENS, prompt[index])
        if num_known > num_common:
            session[index] = session[last_of[each[num_known - 1]]]
            shared[index] = min(num_known * BLOCK_TOKENS, prompt[index])
        else:
            session[index], fresh[index] = num_sessions, True
            num_sessions += 1
        last_of.update(dict.fromkeys(each, index))
    return session, fresh, shared, group, group_tokens


def _leading(blocks: Iterable[int], known: set[int] | dict[int, int]) -> int:
    """The number of blocks at the beginning that are known."""
    count = 0
    for block in blocks:
        if block not in known:
            break
        count += 1
    return count


class TraceTraffic(ChunkedTraffic):
    """A trace, repeated without end; at a higher rate as many copies of it side by side, each with sessions of its own,
    shifted by a time of its own."""

    def __init__(self, trace: Trace, per_s: float | None, seed: int, *, daily: bool = False) -> None:
        """`per_s`: requests a second on average, None for the trace's own; `daily`: they follow a day's course."""
        super().__init__(min(_CHUNK_S, trace.duration_s / 2))
        self._trace, self._daily = trace, daily
        self._copies = 1.0 if per_s is None else per_s / trace.per_s
        count = math.ceil(self._copies * (day_peak() if daily else 1.0))
        self.num_sessions = trace.num_sessions * count
        self.num_groups = trace.num_groups
        self.max_output = int(trace.requests.output.max())
        shifts = stream(seed, "trace copies").random(count - 1) * trace.duration_s
        self._shift_s = np.concatenate(([0.0], shifts))
        due_s = trace.requests.due_s
        self._twice_s = np.concatenate((due_s, due_s + trace.duration_s))

    def draw(self, chunk: int) -> Arrivals:
        """As in ChunkedTraffic."""
        begin_s, requests = chunk * self.chunk_s, self._trace.requests
        wanted = self._copies * (day_factor(begin_s + self.chunk_s / 2) if self._daily else 1.0)
        shift_s = self._shift_s[: math.ceil(wanted)]
        local_s = (begin_s + shift_s) % self._trace.duration_s
        low = np.searchsorted(self._twice_s, local_s)
        counts = np.searchsorted(self._twice_s, local_s + self.chunk_s) - low
        copy = np.repeat(np.arange(len(shift_s)), counts)
        index = np.arange(len(copy)) + np.repeat(low - (np.cumsum(counts) - counts), counts)
        due_s = begin_s + np.clip(self._twice_s[index] - local_s[copy], 0, np.nextafter(self.chunk_s, 0))
        found = requests.select(index % len(requests))
        session = np.where(found.session >= 0, found.session + copy * self._trace.num_sessions, -1)
        found = replace(found, due_s=due_s, session=session)
        last = copy == len(shift_s) - 1
        part = wanted - (len(shift_s) - 1)
        kept = ~last | (self._fractions(found) < part)
        return joined([found.select(kept)])

    def _fractions(self, found: Arrivals) -> Floats:
        """[n] a number from 0 to 1 for each request, the same for all requests of a session."""
        own = (found.due_s * 1e6).astype(np.int64) * 31 + found.prompt
        keys = np.where(found.session >= 0, found.session, own).astype(np.uint64)
        fractions: Floats = mixed(keys + np.uint64(1)) / 2**64
        return fractions
