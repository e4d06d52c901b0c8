"""A scheduler's journal: its directory, its database, and the writer that the engine calls."""

from __future__ import annotations

import asyncio
import logging
import sqlite3

from scheduler_svc.engine.engine import Engine
from scheduler_svc.engine.faults import FaultKind
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.journal.directory import (
    DATABASE,
    DATABASE_SUFFIXES,
    JournalDamagedError,
    JournalDirectory,
    JournalError,
)
from scheduler_svc.journal.restore import Restorer
from scheduler_svc.journal.store import JournalStore
from scheduler_svc.journal.writer import JournalWriter
from scheduler_svc.plan_loop.clock import Clock
from scheduler_svc.requests.builder import RequestBuilder

_LOG = logging.getLogger(__name__)


class SchedulerJournal:
    """An open journal. Its directory stays locked until `close` or the end of the process."""

    def __init__(self, path: str, clock: Clock, *, restart_grace_s: float, sets_aside: bool = False) -> None:
        """Lock the directory and open the database; raises JournalError.

        sets_aside: move what is damaged to a folder of the directory, and begin anew; else it is an error.
        """
        self._restart_grace_s = restart_grace_s
        self._directory = JournalDirectory(path, sets_aside=sets_aside)
        self._store = JournalStore(self._directory.database)
        try:
            self._open_store(sets_aside)
        except BaseException:
            self._directory.close()
            raise
        self.scheduler_id = self._directory.scheduler_id
        self.writer = JournalWriter(self._store, clock, restart_grace_s=restart_grace_s)

    def _open_store(self, sets_aside: bool) -> None:
        try:
            self._store.open()
        except JournalDamagedError as exc:
            if not sets_aside:
                raise
            # The database first: a log without one is never taken for a new journal.
            self._directory.set_aside(exc, *(f"{DATABASE}{suffix}" for suffix in DATABASE_SUFFIXES))
            self._store.open()

    async def adapters(self) -> list[tuple[str, str]]:
        """The names and paths of the adapters that operators had loaded; raises JournalError."""
        try:
            return await asyncio.wrap_future(self._store.load_adapters())
        except sqlite3.Error as exc:
            raise JournalError(f"{self._store.path}: cannot be read: {exc}") from exc

    async def restore(self, engine: Engine, builder: RequestBuilder, *, allow_fingerprint_change: bool) -> None:
        """Put the requests of an earlier process into the engine; raises JournalError."""
        try:
            stored, last_number = await asyncio.wrap_future(self._store.load())
        except sqlite3.Error as exc:
            raise JournalError(f"{self._store.path}: cannot be read: {exc}") from exc
        self.writer.continue_after(last_number)
        restorer = Restorer(
            engine,
            self.writer,
            builder,
            restart_grace_s=self._restart_grace_s,
            allow_fingerprint_change=allow_fingerprint_change,
        )
        found = await restorer.run(stored)
        if not stored:
            _LOG.info("the journal %s is empty: nothing is restored", self._directory.path)
        else:
            _LOG.info(
                "restored from the journal %s: %d unfinished requests go on, %d cannot, %d have ended; their streams "
                "have %g s to come back",
                self._directory.path, found.num_unfinished, found.num_lost, found.num_ended, self._restart_grace_s,
            )  # fmt: skip

    async def close_writer(self) -> None:
        """Record nothing more: requests that end because the service stops are unfinished for the next process."""
        await self.writer.close()

    def unlock(self) -> None:
        """Let another process use the directory."""
        self._directory.close()


def connect(writer: JournalWriter, engine: Engine) -> None:
    """Give the writer its calls of the engine whose journal it is."""

    def refuse(live: LiveRequest, error: Exception) -> None:
        if live.ended:
            live.error = error
            live.notify()
        else:
            engine.fail(live, error)
        # It has shown nothing, and its id is free again.
        engine.kept.forget(live.request.spec.key)

    def report_health() -> None:
        if writer.problem:
            engine.faults.record(FaultKind.JOURNAL_FAILED)
        engine.report_health()

    writer.refuse_request = refuse
    writer.report_health = report_health
    writer.is_kept = engine.keeps
