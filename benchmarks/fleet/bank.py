"""All executors of a fleet, advanced together: the same work as in the core's steps, in columns.

An executor has one queue in the order of arrival. A step computes a token of each decoding sequence and, within the
token budget, prompts from the queue, the last one perhaps in part. A request enters if it has a seat and its prompt
fits the memory; where output outgrows the memory, the newest sequence is preempted and computed again. Left out
against the core: copies and swaps of blocks, several samples, priorities, noise. Steps without prompts run on until
something changes, up to `_LONGEST_RUN`, as one operation.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from benchmarks.fleet.caches import ExecutorModel
from benchmarks.fleet.requests import DECODING, QUEUED, RequestTable
from benchmarks.fleet.results import LogHistogram
from cadenza_loadtest.requests import Floats, Ints

_LONGEST_RUN, _LOOK_AHEAD = 32, 64
_NO_END = 1 << 60
_QUEUE = 64


@dataclass(slots=True)
class Progress:
    """What an advance brought: requests and the times of these events, in pieces."""

    prefilled: list[tuple[Ints, Floats]] = field(default_factory=list)
    ended: list[tuple[Ints, Floats]] = field(default_factory=list)
    handed_on: list[tuple[Ints, Floats]] = field(default_factory=list)
    """Requests whose prompt a prefill executor has computed, and whose KV is to go elsewhere."""
    gaps: list[tuple[Floats, Ints]] = field(default_factory=list)
    """Times between two tokens, and how many there were of each."""


class ExecutorBank:
    """Columns [n], one entry for each executor."""

    def __init__(
        self, num_executors: int, model: ExecutorModel, table: RequestTable, max_output: int, num_prefill: int = 0
    ) -> None:
        """The first `num_prefill` executors compute prompts only. No request has more than `max_output` tokens."""
        self.model = model
        self.table = table
        self.up = np.ones(num_executors, np.bool_)
        self.only_prefills = np.arange(num_executors) < num_prefill
        self.clock_s = np.zeros(num_executors)
        """When the next step may begin."""
        self.num_steps = np.zeros(num_executors, np.int64)
        self.batch = np.zeros(num_executors, np.int64)
        """Decoding sequences."""
        self.context = np.zeros(num_executors, np.int64)
        """Tokens whose KV they read."""
        self.held = np.zeros(num_executors, np.int64)
        """Tokens of the pool that are allocated, half a block for the last one of each request included."""
        self.backlog = np.zeros(num_executors, np.int64)
        """Tokens that queued requests are still to compute."""
        self.queued_context = np.zeros(num_executors, np.int64)
        """Tokens that queued requests will hold."""
        self.size = np.zeros(num_executors, np.int64)
        """Queued requests, the one that is computed in part included."""
        self.head_ready_s = np.full(num_executors, np.inf)
        self.busy_s = np.zeros(num_executors)
        self.last_step_s = np.zeros(num_executors)
        """Time of the newest step."""
        self.least_step_s = np.zeros(num_executors)
        """Steps take no less: the scheduler has no time for more."""
        self.gaps = LogHistogram()
        """Times between two tokens of a request."""
        self.num_preemptions = 0
        self._head = np.zeros(num_executors, np.int64)
        self._queue = np.full((num_executors, _QUEUE), -1, np.int64)
        width = 1 << (max_output + _LONGEST_RUN + _LOOK_AHEAD).bit_length()
        self._ends = np.full((num_executors, width), -1, np.int32)
        """By executor and step, modulo the width: the first request that ends there."""
        self._next_end = np.full(num_executors, _NO_END)
        """A step before which none ends."""
        self._slack = model.block_size // 2

    def __len__(self) -> int:
        return len(self.up)

    def push(self, requests: Ints, executors: Ints) -> None:
        """Queue requests [n], each on its executor [n], in this order."""
        if not len(requests):
            return
        table = self.table
        order = np.argsort(executors, kind="stable")
        requests, executors = requests[order], executors[order]
        begins = np.flatnonzero(np.diff(executors, prepend=-1))
        counts = np.diff(np.append(begins, len(executors)))
        ranks = np.arange(len(executors)) - np.repeat(begins, counts)
        while int((self.size[executors] + ranks).max()) >= self._queue.shape[1] - 1:
            self._widen()
        mask = self._queue.shape[1] - 1
        self._queue[executors, (self._head[executors] + self.size[executors] + ranks) & mask] = requests
        first = executors[begins]
        was_empty = self.size[first] == 0
        self.size[first] += counts
        self.head_ready_s[first[was_empty]] = table.ready_s[requests[begins[was_empty]]]
        self.backlog[first] += np.add.reduceat(table.todo[requests], begins)
        self.queued_context[first] += np.add.reduceat(table.context[requests], begins)
        table.executor[requests] = executors

    def advance(self, until_s: float) -> Progress:
        """Begin all steps that begin before this time."""
        progress, rows = Progress(), np.flatnonzero(self.up)
        while True:
            begin_s = self._begin_s(rows)
            begins = begin_s < until_s
            rows, begin_s = rows[begins], begin_s[begins]
            if not len(rows):
                break
            self._step(rows, begin_s, until_s, progress)
        if progress.gaps:
            gaps, weights = zip(*progress.gaps, strict=True)
            self.gaps.add(np.concatenate(gaps), np.concatenate(weights))
        return progress

    def fail(self, executor: int) -> Ints:
        """An executor is gone, and its KV with it; returns its requests, which are to be queued elsewhere."""
        table, requests = self.table, self.table.on(executor)
        decoding = requests[table.state[requests] == DECODING]
        self._forget_progress(decoding, int(self.num_steps[executor]))
        queued = requests[table.state[requests] == QUEUED]
        table.state[requests] = QUEUED
        table.todo[queued] = table.context[queued]
        table.todo[decoding] = table.context[decoding]
        table.reserved[requests], table.again[requests], table.cached[requests] = False, True, 0
        for column in (self.batch, self.context, self.held, self.backlog, self.queued_context, self.size):
            column[executor] = 0
        self.head_ready_s[executor] = np.inf
        self._ends[executor] = -1
        self._next_end[executor] = _NO_END
        self.up[executor] = False
        return requests

    def restore(self, executor: int, now_s: float) -> None:
        """An executor that had failed is back, with an empty cache."""
        self.up[executor] = True
        self.clock_s[executor] = now_s

    def _begin_s(self, rows: Ints) -> Floats:
        """When the next step of executors begins; inf without work."""
        clock_s = self.clock_s[rows]
        idle_s = self.head_ready_s[rows] + (self.model.plan_s + self.model.transit_s)
        return np.where(self.batch[rows] > 0, clock_s, np.maximum(clock_s, idle_s))

    # --- one step, or a run of steps, of each of some executors -----------------------------------------------------

    def _step(self, rows: Ints, begin_s: Floats, until_s: float, progress: Progress) -> None:
        """`rows` [n]: executors; their steps begin at `begin_s` [n]."""
        batch, context = self.batch[rows], self.context[rows]
        # What the plan can have: it was made before the step before ended, if there was one.
        cut_s = begin_s - np.where(batch > 0, self.model.lead_s(self.last_step_s[rows]), 0.0)
        tokens, positions, read, joins = self._take_prompts(rows, cut_s)
        num_joins = np.zeros(len(rows), np.int64)
        for places, _ in joins:
            num_joins[places] += 1
        decoded = context + batch
        step_s = self.model.step_s(batch + tokens, decoded + positions, decoded + read, batch + num_joins)
        step_s = np.maximum(step_s, self.least_step_s[rows])
        head_s, has_head = self.head_ready_s[rows], self.size[rows] > 0
        bound_s = np.minimum(until_s, np.where(has_head & (head_s > cut_s), head_s, np.inf))
        may_run = (tokens == 0) & ~(has_head & (head_s <= cut_s)) & (batch > 0)
        count = np.ones(len(rows), np.int64)
        wanted = np.ceil((bound_s[may_run] - begin_s[may_run]) / np.maximum(step_s[may_run], 1e-9))
        count[may_run] = np.clip(wanted, 1, _LONGEST_RUN)
        took_s = count * step_s + self.model.position_s * batch * (count * (count - 1) // 2)
        stuck = (batch == 0) & (tokens == 0)
        took_s[stuck] = np.maximum(0.0, until_s - begin_s[stuck])
        before = self.num_steps[rows]
        self.num_steps[rows] = before + count
        self.clock_s[rows] = begin_s + took_s
        self.last_step_s[rows] = took_s / count
        self.busy_s[rows] += np.where(stuck, 0.0, took_s)
        self.context[rows] += batch * count
        self.held[rows] += batch * count
        decodes = batch > 0
        progress.gaps.append(((took_s / count)[decodes], (batch * count)[decodes]))
        self._end_due(rows, before, count, begin_s, took_s, progress)
        for places, requests in joins:
            self._join(rows[places], requests, self.clock_s[rows[places]], progress)
        for executor in rows[self.held[rows] > self.model.pool_tokens].tolist():
            self._preempt(executor)

    def _take_prompts(self, rows: Ints, cut_s: Floats) -> tuple[Ints, Ints, Ints, list[tuple[Ints, Ints]]]:
        """Tokens of prompts in the step, the positions to which they attend and the KV that they read, [n] each; and
        the requests whose prompt ends there, in lists without an executor twice: places in `rows`, requests."""
        table, budget = self.table, self.model.max_num_batched_tokens - self.batch[rows]
        slots = self.model.max_num_seqs - self.batch[rows]
        tokens, positions, read = (np.zeros(len(rows), np.int64) for _ in range(3))
        joins: list[tuple[Ints, Ints]] = []
        able = np.flatnonzero((self.size[rows] > 0) & (self.head_ready_s[rows] <= cut_s) & (slots > 0))
        while len(able):
            executors = rows[able]
            requests = self._queue[executors, self._head[executors] & (self._queue.shape[1] - 1)]
            room = self.model.pool_tokens - self.held[executors] - self._slack
            fits = table.reserved[requests] | (table.context[requests] <= room)
            able, executors, requests = able[fits], executors[fits], requests[fits]
            if not len(able):
                break
            new = ~table.reserved[requests]
            self.held[executors] += np.where(new, table.context[requests] + self._slack, 0)
            table.reserved[requests] = True
            todo, whole = table.todo[requests], table.context[requests]
            taken, done = np.minimum(todo, budget[able]), whole - todo
            tokens[able] += taken
            positions[able] += taken * done + taken * (taken + 1) // 2
            read[able] += done + taken
            budget[able] -= taken
            slots[able] -= 1
            table.todo[requests] = todo - taken
            self.backlog[executors] -= taken
            complete = taken == todo
            able, requests = able[complete], requests[complete]
            if len(able):
                joins.append((able, requests))
                self._pop(rows[able], requests)
            more = (self.size[rows[able]] > 0) & (self.head_ready_s[rows[able]] <= cut_s[able])
            able = able[more & (budget[able] > 0) & (slots[able] > 0)]
        return tokens, positions, read, joins

    def _pop(self, executors: Ints, requests: Ints) -> None:
        """Take the first request off the queues of these executors."""
        self._head[executors] += 1
        self.size[executors] -= 1
        self.queued_context[executors] -= self.table.context[requests]
        following = self._queue[executors, self._head[executors] & (self._queue.shape[1] - 1)]
        self.head_ready_s[executors] = np.where(self.size[executors] > 0, self.table.ready_s[following], np.inf)

    def _join(self, executors: Ints, requests: Ints, at_s: Floats, progress: Progress) -> None:
        """The prompts of these requests are computed, and each has another token; no executor is there twice."""
        table = self.table
        is_first = np.isnan(table.first_s[requests])
        table.first_s[requests[is_first]] = at_s[is_first]
        progress.prefilled.append((requests, at_s))
        table.left[requests] -= 1
        done, leaves = table.left[requests] == 0, self.only_prefills[executors]
        gone = done | leaves
        if gone.any():
            self.held[executors[gone]] -= table.context[requests[gone]] + self._slack
            table.reserved[requests[gone]] = False
            progress.ended.append((requests[done], at_s[done]))
            handed = leaves & ~done
            progress.handed_on.append((requests[handed], at_s[handed]))
            executors, requests = executors[~gone], requests[~gone]
        self.batch[executors] += 1
        self.context[executors] += table.context[requests]
        ends = self.num_steps[executors] + table.left[requests]
        places = ends & (self._ends.shape[1] - 1)
        table.state[requests] = DECODING
        table.end_step[requests] = ends
        table.next[requests] = self._ends[executors, places]
        self._ends[executors, places] = requests
        self._next_end[executors] = np.minimum(self._next_end[executors], ends)

    def _end_due(
        self, rows: Ints, before: Ints, count: Ints, begin_s: Floats, took_s: Floats, progress: Progress
    ) -> None:
        """Sequences whose last token is in these steps end."""
        (due,) = (before + count >= self._next_end[rows]).nonzero()
        if not len(due):
            return
        steps = np.arange(_LONGEST_RUN + _LOOK_AHEAD)
        columns = (before[due, None] + 1 + steps) & (self._ends.shape[1] - 1)
        found = self._ends[rows[due, None], columns]
        is_over, has_end = steps < count[due, None], found >= 0
        later = has_end & ~is_over
        first = np.where(later.any(axis=1), later.argmax(axis=1), len(steps))
        self._next_end[rows[due]] = before[due] + 1 + first
        place, column = np.nonzero(has_end & is_over)
        if not len(place):
            return
        requests = found[place, column].astype(np.int64)
        self._ends[rows[due[place]], columns[place, column]] = -1
        place = due[place]
        parts, owners, offsets = [requests], [place], [column]
        while len(requests):
            following = self.table.next[requests]
            goes_on = following >= 0
            requests, place, column = following[goes_on], place[goes_on], column[goes_on]
            parts.append(requests)
            owners.append(place)
            offsets.append(column)
        requests, place, column = np.concatenate(parts), np.concatenate(owners), np.concatenate(offsets)
        at_s = begin_s[place] + took_s[place] * (column + 1) / count[place]
        # All members ran to the end of the run; what they read and hold after their own ends is taken back.
        held = self.table.context[requests] + self.table.left[requests] + count[place] - 1 - column
        amounts = np.bincount(place, held, minlength=len(rows)).astype(np.int64)
        numbers = np.bincount(place, minlength=len(rows))
        self.batch[rows] -= numbers
        self.context[rows] -= amounts
        self.held[rows] -= amounts + self._slack * numbers
        self.table.state[requests] = QUEUED
        progress.ended.append((requests, at_s))

    def _preempt(self, executor: int) -> None:
        """Preempt the sequences that joined last, until the others fit; they are first in the queue."""
        table = self.table
        requests = table.on(executor)
        requests = requests[table.state[requests] == DECODING]
        while self.held[executor] > self.model.pool_tokens and len(requests) > 1:
            victim, requests = requests[-1:], requests[:-1]
            self._unlink(executor, int(victim[0]))
            self._forget_progress(victim, int(self.num_steps[executor]))
            table.state[victim], table.reserved[victim], table.again[victim] = QUEUED, False, True
            table.todo[victim] = table.context[victim]
            size = int(table.context[victim][0]) - 1  # of its last token no KV was there
            self.batch[executor] -= 1
            self.context[executor] -= size
            self.held[executor] -= size + self._slack
            self._push_first(executor, int(victim[0]))
            self.num_preemptions += 1

    def _forget_progress(self, decoding: Ints, num_steps: int) -> None:
        """Sequences that decode lose their KV: what they have produced, their first token included, is to be computed
        again."""
        table = self.table
        remaining = table.end_step[decoding] - num_steps
        table.context[decoding] += table.left[decoding] - remaining + 1
        table.left[decoding] = remaining

    def _unlink(self, executor: int, request: int) -> None:
        table = self.table
        place = int(table.end_step[request]) & (self._ends.shape[1] - 1)
        at = int(self._ends[executor, place])
        if at == request:
            self._ends[executor, place] = table.next[request]
            return
        while int(table.next[at]) != request:
            at = int(table.next[at])
        table.next[at] = table.next[request]

    def _push_first(self, executor: int, request: int) -> None:
        if self.size[executor] >= self._queue.shape[1] - 1:
            self._widen()
        self._head[executor] -= 1
        self._queue[executor, self._head[executor] & (self._queue.shape[1] - 1)] = request
        self.size[executor] += 1
        self.head_ready_s[executor] = self.clock_s[executor]
        self.table.ready_s[request] = self.clock_s[executor]
        self.backlog[executor] += self.table.todo[request]
        self.queued_context[executor] += self.table.context[request]

    def _widen(self) -> None:
        """Twice as much room in all queues."""
        width = self._queue.shape[1]
        places = (self._head[:, None] + np.arange(width)) & (width - 1)
        self._queue = np.concatenate(
            (np.take_along_axis(self._queue, places, 1), np.full_like(self._queue, -1)), axis=1
        )
        self._head[:] = 0
