"""What readers see, and when: an engine on virtual time with a journal whose batches are committed when the test says.

Token 9 comes in each step of 10 ms.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from cadenza_common.plan.sampling import SequenceSampling
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.policies.policies import Policies
from scheduler_svc.core.types import BeamSpec, FinishDetail, RequestSpec
from scheduler_svc.engine.journal import JournalUnavailableError
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.engine.reader import RequestReader
from scheduler_svc.journal.journal import connect
from scheduler_svc.journal.store import JournalStore
from scheduler_svc.journal.writer import JournalWriter
from scheduler_svc.plan_loop.ports import EngineRequest, ModelDescription
from tests.helpers.scheduler.journals import HeldThread, opened_store, stored
from tests.helpers.scheduler.virtual_engine import MODEL, STEP_S, World

EXACT = replace(MODEL, is_exact=True, fingerprint=b"print")
FAST = replace(EXACT, is_exact=False)
GRACE_S = 30.0


@dataclass
class Journaled:
    """A world whose engine has a journal."""

    world: World
    thread: HeldThread
    store: JournalStore
    writer: JournalWriter

    def submit(
        self, request_id: str = "r", max_tokens: int = 5, body: bytes = b"body", **fields: object
    ) -> LiveRequest:
        spec = RequestSpec(request_id, (5, 6, 7), SequenceSampling(seed=1), max_tokens, **fields)
        return self.world.engine.submit(EngineRequest(spec, body=body, body_digest=b"digest"))

    async def steps(self, count: int) -> None:
        await self.world.clock.advance(count * STEP_S)

    async def release(self) -> None:
        """Commit what waits, and what follows from it."""
        self.thread.release()
        await self.world.clock.advance(0)

    def rows(self):
        """What the journal holds now, by request id."""
        return {each.admission.request_id: each for each in stored(self.store.path.parent)}


@contextlib.asynccontextmanager
async def journaled(folder: Path, model: ModelDescription = EXACT) -> AsyncIterator[Journaled]:
    world = World(SchedulerConfig(), STEP_S, model, Policies())
    thread = HeldThread()
    store = opened_store(folder, thread)
    writer = JournalWriter(store, world.clock, restart_grace_s=GRACE_S)
    engine = world.engine
    engine.journal = writer
    connect(writer, engine)
    starting = asyncio.create_task(engine.start())
    await world.clock.advance(0)
    await starting
    world.executor.lane = world.core.lanes[0]
    try:
        yield Journaled(world, thread, store, writer)
    finally:
        thread.holds = False
        thread.release()
        await writer.close()
        await engine.stop()


def read(reader: RequestReader) -> tuple[int, bool]:
    """Number of new tokens, and whether a finish came."""
    num_tokens, finished = 0, False
    while (chunk := reader.take()) is not None:
        num_tokens += sum(len(sample.token_ids) for sample in chunk.samples)
        finished = finished or any(sample.finish is not None for sample in chunk.samples)
    return num_tokens, finished


async def test_nothing_is_shown_before_the_admission_is_durable(tmp_path: Path) -> None:
    async with journaled(tmp_path) as journal:
        journal.thread.holds = True
        reader = RequestReader(journal.submit())
        await journal.steps(3)
        assert journal.world.core.num_output_tokens == 3
        assert read(reader) == (0, False)
        await journal.release()
        assert read(reader) == (3, False)
        assert journal.rows()["r"].started


async def test_that_a_request_may_have_shown_output_is_durable_before_it_shows_any(tmp_path: Path) -> None:
    """It waits for a place in the batch, longer than its admission takes."""
    async with journaled(tmp_path) as journal:
        for index in range(4):
            journal.submit(f"before {index}", max_tokens=3)
        reader = RequestReader(journal.submit("waits"))
        await journal.steps(1)
        assert not journal.rows()["waits"].started
        journal.thread.holds = True
        await journal.steps(5)
        assert not reader.live.ended
        assert reader.live.num_completion_tokens
        assert read(reader) == (0, False)
        await journal.release()
        await journal.release()
        assert journal.rows()["waits"].started
        assert read(reader) == (reader.live.num_completion_tokens, False)


async def test_in_exact_mode_tokens_are_shown_at_once_and_the_finish_when_it_is_durable(tmp_path: Path) -> None:
    async with journaled(tmp_path) as journal:
        live = journal.submit()
        reader = RequestReader(live)
        await journal.steps(2)
        journal.thread.holds = True
        await journal.steps(6)
        assert read(reader) == (5, False)
        assert live.ended
        row = journal.rows()["r"]
        assert (row.tokens, row.samples, row.end) == ({}, {}, None)
        await journal.release()
        assert read(reader) == (0, True)
        row = journal.rows()["r"]
        assert row.samples[0].num_tokens == 5
        assert row.samples[0].finish.detail is FinishDetail.MAX_TOKENS
        assert row.end is not None


async def test_in_fast_mode_tokens_are_shown_when_they_are_durable(tmp_path: Path) -> None:
    async with journaled(tmp_path, FAST) as journal:
        reader = RequestReader(journal.submit())
        await journal.steps(2)
        assert read(reader) == (2, False)
        journal.thread.holds = True
        await journal.steps(1)
        await journal.steps(1)
        assert read(reader) == (0, False)
        await journal.release()
        # The batch began with the first of both tokens.
        assert read(reader) == (1, False)
        assert [part.first_token for part in journal.rows()["r"].tokens[0]] == [0, 1, 2]
        await journal.release()
        assert read(reader) == (1, False)
        journal.thread.holds = False
        await journal.steps(1)
        assert read(reader) == (1, True)
        assert journal.rows()["r"].tokens == {}


@pytest.mark.parametrize("model", [EXACT, FAST])
async def test_beams_store_and_show_nothing_before_their_end(tmp_path: Path, model: ModelDescription) -> None:
    async with journaled(tmp_path, model) as journal:
        reader = RequestReader(journal.submit(beams=BeamSpec(2), num_samples=2))
        await journal.steps(4)
        journal.thread.holds = True
        assert journal.rows()["r"].tokens == {}
        assert not journal.rows()["r"].started
        await journal.steps(4)
        assert read(reader) == (0, False)
        await journal.release()
        assert read(reader) == (10, True)


async def test_an_abort_is_durable_before_it_is_shown_and_answered(tmp_path: Path) -> None:
    async with journaled(tmp_path) as journal:
        engine = journal.world.engine
        live = journal.submit()
        live.subscribe(lambda _: None)
        reader = RequestReader(live)
        await journal.steps(2)
        journal.thread.holds = True
        assert engine.abort("", "r")
        answered = asyncio.create_task(engine.journal.flushed())
        await journal.steps(1)
        assert not answered.done()
        assert read(reader) == (2, False)
        await journal.release()
        await answered
        assert read(reader) == (0, True)
        assert journal.rows()["r"].samples[0].finish.detail is FinishDetail.ABORTED


async def test_all_that_happens_during_a_commit_is_one_batch(tmp_path: Path) -> None:
    async with journaled(tmp_path, FAST) as journal:
        journal.thread.holds = True
        for index in range(20):
            journal.submit(f"request {index}")
        await journal.steps(1)
        journal.thread.num_done = 0
        await journal.release()
        await journal.steps(1)
        await journal.release()
        assert journal.thread.num_done == 2
        assert len(journal.rows()) == 20


async def test_a_request_that_nobody_can_come_back_for_leaves_nothing(tmp_path: Path) -> None:
    async with journaled(tmp_path) as journal:
        live = journal.submit()

        def listener(_: LiveRequest) -> None:
            pass

        live.subscribe(listener)
        await journal.steps(2)
        assert journal.rows().keys() == {"r"}
        journal.world.engine.detach(live, listener, handed_over=False)
        await journal.steps(1)
        assert journal.rows() == {}


async def test_results_are_kept_until_their_grace_ends(tmp_path: Path) -> None:
    async with journaled(tmp_path) as journal:
        journal.submit()
        await journal.steps(10)
        await journal.world.clock.advance(GRACE_S - 2)
        assert journal.rows()["r"].end is not None
        await journal.world.clock.advance(3)
        assert journal.rows() == {}


async def test_an_id_that_is_used_again_replaces_the_old_result(tmp_path: Path) -> None:
    """Also when the old request's end is not durable yet."""
    async with journaled(tmp_path) as journal:
        journal.submit()
        await journal.steps(1)
        journal.thread.holds = True
        await journal.steps(10)
        journal.submit(max_tokens=7)
        journal.thread.holds = False
        await journal.release()
        await journal.steps(2)
        assert journal.rows()["r"].end is None
        await journal.steps(10)
        assert journal.rows()["r"].samples[0].num_tokens == 7


async def test_a_journal_that_cannot_be_written_refuses_new_requests_and_nothing_else(tmp_path: Path) -> None:
    """In exact mode running requests go on; their finish waits for the journal, which is tried again and again."""
    async with journaled(tmp_path) as journal:
        engine = journal.world.engine
        running = RequestReader(journal.submit("running", max_tokens=10))
        await journal.steps(2)
        database = journal.store._database
        assert database is not None
        (num_pages,) = database.execute("PRAGMA page_count").fetchone()
        database.execute(f"PRAGMA max_page_count = {num_pages + 1}")
        health = []
        engine.add_health_listener(health.append)
        refused = journal.submit("refused", body=bytes(100_000))
        await journal.steps(1)
        assert isinstance(refused.error, JournalUnavailableError)
        assert read(RequestReader(refused)) == (0, False)
        assert (engine.healthy, health[-1]) == (False, False)
        assert journal.writer.problem == "the journal cannot be written (database or disk is full)"
        message = f"the journal {tmp_path} cannot be written .database or disk is full.: no request is admitted"
        with pytest.raises(JournalUnavailableError, match=message):
            journal.submit("later")
        await journal.steps(10)
        assert read(running) == (10, False)
        database.execute("PRAGMA max_page_count = 100000")
        await journal.world.clock.advance(1)
        assert read(running) == (0, True)
        assert (engine.healthy, health[-1], journal.writer.problem) == (True, True, "")
        journal.submit("later")
        await journal.steps(2)
        assert journal.rows().keys() == {"running", "later"}


async def test_what_happens_after_the_journal_is_closed_is_never_shown_as_durable(tmp_path: Path) -> None:
    """A service that stops aborts its requests; for the next one they are unfinished."""
    async with journaled(tmp_path) as journal:
        reader = RequestReader(journal.submit())
        await journal.steps(2)
        await journal.writer.close()
        journal.world.engine.abort("", "r")
        await journal.steps(1)
        assert read(reader) == (2, False)
    (found,) = stored(tmp_path)
    assert (found.started, found.end, found.samples) == (True, None, {})


async def test_after_other_numerics_tokens_are_stored(tmp_path: Path) -> None:
    """All of them, for those so far will not come out again; readers go on where they are."""
    async with journaled(tmp_path) as journal:
        reader = RequestReader(journal.submit(max_tokens=8))
        await journal.steps(2)
        assert read(reader) == (2, False)
        journal.writer.on_other_numerics(replace(EXACT, fingerprint=b"other"))
        await journal.steps(1)
        assert read(reader) == (1, False)
        row = journal.rows()["r"]
        assert row.admission.fingerprint == b"other"
        assert row.admission.stores_tokens
        assert sum(len(part.token_ids) for part in row.tokens[0]) == 3 * 4
