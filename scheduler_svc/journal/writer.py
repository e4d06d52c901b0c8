"""Writes the journal: one batch at a time, off the event loop. What happens meanwhile goes into the next batch."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from heapq import heappop, heappush

from scheduler_svc.core.types import RequestKey
from scheduler_svc.engine.journal import JournalUnavailableError
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.journal.entry import EntrySnapshot, JournalEntry, was_abandoned
from scheduler_svc.journal.records import NewTokens, RequestRecord, pack_tokens
from scheduler_svc.journal.store import JournalBatch, JournalStore
from scheduler_svc.plan_loop.clock import Clock, ScheduledCall
from scheduler_svc.plan_loop.ports import ModelDescription

_LOG = logging.getLogger(__name__)
_RETRY_S = 0.5
_PRUNE_S = 1.0
_Others = tuple[list[int], list[NewTokens], list[Mapping[str, str]]]
STEPS_KEPT = 500
"""After so many batches with tokens, all tokens of unfinished samples are written whole and the batches' rows go."""


class JournalWriter:
    """Implements the engine's Journal. Everything but the database's work runs on the event loop."""

    def __init__(self, store: JournalStore, clock: Clock, *, restart_grace_s: float) -> None:
        self._store = store
        self._clock = clock
        self._restart_grace_s = restart_grace_s
        self.refuse_request: Callable[[LiveRequest, Exception], None] = _ignore
        """Ends a request whose admission could not be recorded."""
        self.report_health: Callable[[], None] = _do_nothing
        """Called when there is a problem now, or none any more."""
        self.is_kept: Callable[[RequestKey], bool] = _is_not_kept
        """Whether the engine still keeps the results of an ended request."""
        self._next_number = 1
        self._entries: dict[LiveRequest, JournalEntry] = {}
        self._changed: dict[JournalEntry, None] = {}
        self._deleted: list[int] = []
        self._adapters: list[Mapping[str, str]] = []
        """The newest change of operators' adapters, if it is not recorded yet."""
        self._ended: dict[RequestKey, int] = {}
        """Numbers of ended requests that are kept."""
        self._expiring: list[tuple[int, int, RequestKey]] = []
        """(monotonic ns, number, key) of ended requests, as a heap."""
        self._waiters: list[asyncio.Future[None]] = []
        self._is_scheduled = False
        self._is_committing = False
        self._num_steps = 0
        """Number of batches with tokens since tokens were last written whole."""
        self._whole_tokens: list[NewTokens] = []
        """Tokens of unfinished requests that do not run here, to be written whole."""
        self._closed = False
        self._failure: JournalUnavailableError | None = None
        self._timers: dict[str, ScheduledCall] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    # --- the engine's calls ------------------------------------------------------------------------------------------

    @property
    def problem(self) -> str:
        """Why the last batch could not be written; empty: it could be."""
        return "" if self._failure is None else f"the journal cannot be written ({self._failure.__cause__})"

    def check_admission(self) -> None:
        """Raise JournalUnavailableError if the last batch could not be written."""
        if self._failure is not None:
            raise self._failure

    def on_admitted(self, live: LiveRequest, model: ModelDescription, number: int | None = None) -> None:
        """Record a request, and hide it until it is durable. `number`: its place if it was admitted before."""
        if self._closed:
            live.hidden = True
            return
        if number is None:
            number, self._next_number = self._next_number, self._next_number + 1
        replaced = self._ended.pop(live.request.spec.key, None)
        if replaced is not None:
            self._deleted.append(replaced)
        admission = self._admission(live, model, number)
        entry = JournalEntry(live, number, stores_tokens=admission.stores_tokens, admission=admission)
        self._entries[live] = entry
        entry.hide_output()
        self._change(entry)

    def on_started(self, live: LiveRequest) -> None:
        """Record that a request may have shown output from now on; it shows none before this is durable."""
        entry = self._entries.get(live)
        if entry is not None and not entry.started and not entry.shows_at_end:
            entry.started = live.hidden = True
            self._change(entry)

    def on_outputs(self, lives: Iterable[LiveRequest]) -> None:
        """Hide new finishes, and in fast mode new tokens, until they are durable."""
        for live in lives:
            entry = self._entries.get(live)
            if entry is not None and entry.hide_finishes():
                self._change(entry)

    def on_ended(self, live: LiveRequest) -> None:
        """Record the end; of a request that nobody can come back for, nothing is kept."""
        entry = self._entries.get(live)
        if entry is None or self._closed:
            return
        del self._entries[live]
        if was_abandoned(live):
            self._changed.pop(entry, None)
            self._deleted.append(entry.number)
            self._schedule()
            return
        entry.ended_ns = self._clock.wall_time_ns()
        self.keep_ended(live.request.spec.key, entry.number, max(live.request.resume_grace_s, self._restart_grace_s))
        self._change(entry)

    def on_other_numerics(self, model: ModelDescription) -> None:
        """From now on the tokens of all unfinished requests are stored."""
        for entry in self._entries.values():
            entry.store_tokens_from_now(model.fingerprint, model.vocab_size)
            self._change(entry)

    def on_adapters(self, adapters: Mapping[str, str]) -> None:
        """Record the names and paths of operators' adapters, in place of those recorded before."""
        self._adapters = [dict(adapters)]
        self._schedule()

    async def flushed(self) -> None:
        """Wait until all that was recorded before this call is durable; raises JournalUnavailableError."""
        if self._closed or not (self._changed or self._deleted or self._adapters or self._is_committing):
            return
        self.check_admission()
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self._schedule()
        await waiter

    # --- restoring ---------------------------------------------------------------------------------------------------

    def continue_after(self, number: int) -> None:
        """Number new requests after this one."""
        self._next_number = max(self._next_number, number + 1)

    def on_restored(self, live: LiveRequest, number: int, *, stores_tokens: bool, started: bool) -> None:
        """Go on recording a request of an earlier process; its output so far is durable."""
        entry = JournalEntry(live, number, stores_tokens=stores_tokens, admission=None)
        entry.started = entry.recorded_started = started
        for index, sample in enumerate(live.samples):
            entry.recorded_tokens[index] = len(sample.token_ids)
            entry.recorded_finished[index] = sample.finish is not None
        self._entries[live] = entry
        entry.hide_output()
        for sample in live.samples:
            if sample.finish is not None:
                sample.max_shown_tokens = None

    def keep_tokens(self, rows: Iterable[NewTokens]) -> None:
        """Keep the tokens of an unfinished request that cannot run here, and may run in a later process."""
        self._whole_tokens += rows
        self._schedule()

    def drop(self, number: int) -> None:
        """Delete a request of an earlier process."""
        self._deleted.append(number)
        self._schedule()

    def keep_ended(self, key: RequestKey, number: int, grace_s: float) -> None:
        """Keep an ended request for `grace_s` seconds, then delete it."""
        self._ended[key] = number
        heappush(self._expiring, (self._clock.monotonic_ns() + round(grace_s * 1e9), number, key))
        if "prune" not in self._timers and not self._closed:
            self._timers["prune"] = self._clock.call_later(_PRUNE_S, self._prune)

    async def close(self) -> None:
        """Record what has happened so far and nothing more: what happens from now on never becomes durable."""
        if self._closed:
            return
        if self._failure is None:
            self._begin_commit()
        await self._idle.wait()
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        self._resolve_waiters(JournalUnavailableError("the service is stopping"))
        self._store.close()

    # --- batches -----------------------------------------------------------------------------------------------------

    def _change(self, entry: JournalEntry) -> None:
        self._changed[entry] = None
        self._schedule()

    def _schedule(self) -> None:
        """Begin a batch when the loop is free, so that it holds all that happens in this turn."""
        if not (self._is_scheduled or self._is_committing or self._failure or self._closed):
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._begin_commit)

    def _begin_commit(self) -> None:
        self._is_scheduled = False
        if self._is_committing or self._closed:
            return
        batch = JournalBatch(probe=self._failure is not None)
        changed, self._changed = self._changed, {}
        deleted, self._deleted = self._deleted, []
        waiters, self._waiters = self._waiters, []
        batch.adapters, self._adapters = self._adapters, []
        batch.deleted = deleted
        gone = set(deleted)
        snapshots = [entry.add_to(batch) for entry in changed if entry.number not in gone]
        whole, self._whole_tokens = self._whole_tokens, []
        batch.whole_tokens += [row for row in whole if row[0] not in gone]
        self._num_steps += bool(batch.tokens)
        if self._num_steps >= STEPS_KEPT:
            self._num_steps, batch.drops_steps = 0, True
            for entry in self._entries.values():
                entry.add_whole_tokens(batch)
        if batch.is_empty:
            self._resolve(waiters, None)
            return
        self._is_committing = True
        self._idle.clear()
        loop = asyncio.get_running_loop()

        def on_done(future: Future[None]) -> None:
            error = future.exception()
            loop.call_soon_threadsafe(
                partial(self._on_committed, snapshots, (deleted, whole, batch.adapters), waiters, error)
            )

        self._store.commit(batch).add_done_callback(on_done)

    def _on_committed(
        self,
        snapshots: list[EntrySnapshot],
        others: _Others,
        waiters: list[asyncio.Future[None]],
        error: BaseException | None,
    ) -> None:
        self._is_committing = False
        if error is None:
            self._set_failure(None)
            for snapshot in snapshots:
                snapshot.entry.record(snapshot)
                snapshot.entry.live.notify()
            self._resolve(waiters, None)
        else:
            self._on_failure(snapshots, others, waiters, error)
        if self._changed or self._deleted or self._whole_tokens or self._adapters or self._waiters:
            self._schedule()
        self._idle.set()

    def _on_failure(
        self,
        snapshots: list[EntrySnapshot],
        others: _Others,
        waiters: list[asyncio.Future[None]],
        error: BaseException,
    ) -> None:
        """Refuse the batch's new requests, and try the rest again later: it stays hidden.

        `others`: what of the batch belongs to no snapshot, deleted numbers, whole tokens and adapters.
        """
        failure = JournalUnavailableError(
            f"the journal {self._store.path.parent} cannot be written ({error}): no request is admitted until it can be"
        )
        failure.__cause__ = error
        if not isinstance(error, sqlite3.Error):
            _LOG.error("writing the journal failed", exc_info=error)
        self._deleted, self._whole_tokens = others[0] + self._deleted, others[1] + self._whole_tokens
        self._adapters = self._adapters or others[2]
        self._set_failure(failure)
        self._resolve(waiters, failure)
        for snapshot in snapshots:
            entry = snapshot.entry
            if entry.admission is None:
                self._changed[entry] = None
                continue
            self._changed.pop(entry, None)
            self._entries.pop(entry.live, None)
            key = entry.live.request.spec.key
            if self._ended.get(key) == entry.number:
                del self._ended[key]
            if entry.number not in self._deleted:
                self.refuse_request(entry.live, failure)
        self._timers["retry"] = self._clock.call_later(_RETRY_S, self._begin_commit)

    def _set_failure(self, failure: JournalUnavailableError | None) -> None:
        changed = (failure is None) != (self._failure is None)
        self._failure = failure
        if changed:
            if failure is None:
                _LOG.info("the journal %s can be written again", self._store.path.parent)
            else:
                _LOG.error("%s", failure)
            self.report_health()

    def _resolve_waiters(self, error: Exception | None) -> None:
        waiters, self._waiters = self._waiters, []
        self._resolve(waiters, error)

    def _resolve(self, waiters: list[asyncio.Future[None]], error: Exception | None) -> None:
        for waiter in waiters:
            if waiter.done():
                continue
            if error is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(error)

    def _prune(self) -> None:
        """Delete ended requests whose grace is over."""
        self._timers.pop("prune", None)
        now = self._clock.monotonic_ns()
        while self._expiring and self._expiring[0][0] <= now:
            _, number, key = heappop(self._expiring)
            if self._ended.get(key) != number:
                continue
            if self.is_kept(key):
                # Its stream came back, and its grace began anew.
                heappush(self._expiring, (now + round(self._restart_grace_s * 1e9) + 1, number, key))
                continue
            del self._ended[key]
            self._deleted.append(number)
        if self._deleted:
            self._schedule()
        if self._expiring:
            self._timers["prune"] = self._clock.call_later(_PRUNE_S, self._prune)

    def _admission(self, live: LiveRequest, model: ModelDescription, number: int) -> RequestRecord:
        request, spec = live.request, live.request.spec
        # The monotonic clock of this process means nothing to the next one.
        to_wall_ns = self._clock.wall_time_ns() - self._clock.monotonic_ns()
        return RequestRecord(
            number=number,
            tenant=spec.tenant,
            request_id=spec.request_id,
            body=request.body,
            body_digest=request.body_digest,
            prompt_token_ids=pack_tokens(spec.prompt_token_ids),
            seed=spec.sampling.seed.to_bytes(8, "little"),
            end_token_ids=pack_tokens(sorted(model.eos_token_ids)),
            fingerprint=model.fingerprint,
            vocab_size=model.vocab_size,
            stores_tokens=not model.is_exact,
            arrived_ns=live.times.arrival_ns + to_wall_ns,
            deadline_ns=None if request.deadline is None else round(request.deadline * 1e9) + to_wall_ns,
            resume_grace_s=request.resume_grace_s,
        )


def _ignore(_: LiveRequest, __: Exception) -> None:
    """Before the engine is there, no request is admitted."""


def _is_not_kept(_: RequestKey) -> bool:
    """Without an engine nothing is kept."""
    return False


def _do_nothing() -> None:
    """Nobody is interested in the journal's health yet."""
