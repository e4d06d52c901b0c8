"""A second process on the journal of a first one, both on virtual time: which requests go on, and with what."""

from __future__ import annotations

import contextlib
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from cadenza.v1 import generation_pb2 as pb
from cadenza.v1 import types_pb2
from scheduler_svc.convert.generation import request_fields
from scheduler_svc.core.errors import (
    RequestExistsError,
)
from scheduler_svc.core.types import FinishDetail
from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.engine.reader import RequestReader
from scheduler_svc.engine.resume_point import ResumePoint, SamplePosition
from scheduler_svc.front.front import open_reader
from scheduler_svc.journal import writer as writer_module
from scheduler_svc.journal.restore import Restored
from scheduler_svc.plan_loop.ports import ModelDescription
from scheduler_svc.requests.fields import RequestFields
from scheduler_svc.tenants.errors import TenantLimitError
from scheduler_svc.tenants.registry import Registry
from tests.helpers.scheduler.journals import stored
from tests.helpers.tenants import write_tenants
from tests.scheduler_svc.journal.restarts import EXACT, FAST, GRACE_S, Process, process, read


def num_steps(folder: Path) -> int:
    """Number of rows with the tokens of one batch."""
    with contextlib.closing(sqlite3.connect(folder / "journal.sqlite")) as database:
        return int(database.execute("SELECT count(*) FROM steps").fetchone()[0])


async def test_unfinished_requests_go_on_in_their_order_of_arrival(tmp_path: Path) -> None:
    """Ten on four places: the first process had begun with four of them."""
    names = [f"request {index}" for index in (3, 1, 4, 0, 5, 9, 2, 6, 8, 7)]
    async with process(tmp_path) as first:
        for name in names:
            first.submit(name)
        await first.steps(3)
    async with process(tmp_path, at_s=2.0) as second:
        assert second.restored == Restored(num_unfinished=10)
        engine = second.world.engine
        await second.steps(3)
        assert [engine.find("", name).num_completion_tokens for name in names] == [3, 3, 3, 3, 0, 0, 0, 0, 0, 0]
        # A new request comes after them, also for the next restart.
        second.submit("new")
        await second.steps(80)
        assert {read(engine.find("", name)) == ([9] * 20, FinishDetail.MAX_TOKENS) for name in names} == {True}
    assert [each.admission.request_id for each in stored(tmp_path)] == [*names, "new"]


async def test_a_stream_of_a_restored_request_starts_before_there_is_output(tmp_path: Path) -> None:
    """The client learns that the scheduler has it and computes, also if it sends the whole request again."""
    async with process(tmp_path) as first:
        first.submit("r")
        await first.steps(3)
    async with process(tmp_path, at_s=2.0) as second:
        reader = open_reader(second.submit("r"), RequestFields())
        chunk = reader.take()
        assert chunk is not None
        assert (chunk.is_first, chunk.samples) == (True, [])
        await second.steps(3)
        chunk = reader.take()
        assert chunk is not None
        assert [sample.token_ids for sample in chunk.samples] == [[9, 9, 9]]


async def test_a_deadline_is_absolute(tmp_path: Path) -> None:
    async with process(tmp_path) as first:
        first.submit("passed", 1000, timeout_s=2.0)
        first.submit("later", 1000, timeout_s=3.0)
        await first.steps(3)
    async with process(tmp_path, at_s=2.5) as second:
        await second.steps(3)
        engine = second.world.engine
        assert read(engine.find("", "passed"))[1] is FinishDetail.DEADLINE
        later = engine.find("", "later")
        await second.world.clock.advance(0.44)
        assert not later.ended
        await second.world.clock.advance(0.04)
        assert read(later)[1] is FinishDetail.DEADLINE


async def test_a_stream_that_has_more_than_was_computed_again_gets_the_deadlines_finish(tmp_path: Path) -> None:
    async with process(tmp_path) as first:
        first.submit(max_tokens=1000, timeout_s=0.5)
        await first.steps(20)
    async with process(tmp_path, at_s=0.46) as second:
        live = second.world.engine.find("", "r")
        reader = RequestReader(live, resume=ResumePoint((SamplePosition(0, 20),)))
        await second.world.clock.advance(0.1)
        assert live.num_completion_tokens < 20
        chunks = []
        while (chunk := reader.take()) is not None:
            chunks += [(each.first_token_index, each.token_ids, each.finish) for each in chunk.samples]
        assert [(first, ids) for first, ids, _ in chunks] == [(20, [])]
        assert chunks[0][2].detail is FinishDetail.DEADLINE
        assert reader.done


async def test_an_aborted_request_leaves_nothing_whatever_its_grace(tmp_path: Path) -> None:
    async with process(tmp_path) as first:
        live = first.submit(max_tokens=1000, resume_grace_s=50.0)
        first.world.engine.listen(live, lambda _: None)
        await first.steps(3)
        first.world.engine.abort("", "r")
        await first.steps(1)
    async with process(tmp_path, at_s=1.0) as second:
        assert second.world.engine.find("", "r") is None
        second.submit(max_tokens=7)
        await second.steps(20)
    (kept,) = stored(tmp_path)
    assert kept.samples[0].num_tokens == 7


async def test_the_seed_and_the_id_that_the_service_drew_stay(tmp_path: Path) -> None:
    async with process(tmp_path) as first:
        message = pb.GenerateRequest(prompt=[types_pb2.PromptPart(tokens=types_pb2.TokenIds(ids=[5]))])
        request = first.builder.build(request_fields(message), now=0.0, time_left_s=None)
        spec = first.world.engine.submit(request).request.spec
        await first.steps(1)
    async with process(tmp_path, at_s=1.0) as second:
        live = second.world.engine.find("", spec.request_id)
        assert live.request.spec == spec


@pytest.mark.parametrize("model", [EXACT, FAST])
async def test_the_limit_of_drafts_stays(tmp_path: Path, model: ModelDescription) -> None:
    """For requests that go on, that begin anew under another fingerprint, and that run when the id comes again."""
    limits = {"none": None, "off": 0, "some": 3}
    speculation = {
        name: None if most is None else pb.SpeculationParams(num_draft_tokens=most) for name, most in limits.items()
    }

    def found(process: Process, *names: str) -> dict[str, int | None]:
        return {name: process.world.engine.find("", name).request.spec.max_drafts for name in names}

    async with process(tmp_path, model) as first:
        for name in ("some", "off", "none"):
            first.submit(name, 40, speculation=speculation[name])
        first.submit("fills the fourth place", 4000)
        await first.steps(3)
        for name in limits:
            first.submit(f"waits {name}", speculation=speculation[name])
        assert found(first, *limits) == limits
    async with process(tmp_path, model, at_s=1.0) as second:
        assert second.restored.num_unfinished == 7
        assert found(second, *limits) == limits
        live = second.world.engine.find("", "some")
        assert second.submit("some", 40, speculation=speculation["some"]) is live
        for other in ("off", "none"):
            with pytest.raises(RequestExistsError):
                second.submit("some", 40, speculation=speculation[other])
    async with process(tmp_path, replace(model, fingerprint=b"other"), at_s=2.0) as third:
        waiting = {f"waits {name}": most for name, most in limits.items()}
        assert found(third, *waiting) == waiting


@pytest.mark.slow
async def test_a_request_whose_stream_stays_away_is_aborted_and_forgotten(tmp_path: Path) -> None:
    async with process(tmp_path) as first:
        first.submit("away", 4000)
        first.submit("back", 4000)
        await first.steps(2)
    async with process(tmp_path, at_s=1.0) as second:
        engine = second.world.engine
        back = second.submit("back", 4000)
        engine.listen(back, lambda _: None)
        await second.world.clock.advance(GRACE_S - 0.1)
        assert engine.find("", "away") is not None
        await second.world.clock.advance(0.2)
        assert engine.find("", "away") is None
        assert engine.find("", "back") is back
        assert not back.ended
        assert [each.admission.request_id for each in stored(tmp_path)] == ["back"]


@pytest.mark.long
@pytest.mark.slow
async def test_a_grace_longer_than_the_restarts_is_kept(tmp_path: Path) -> None:
    async with process(tmp_path) as first:
        first.submit(max_tokens=4000, resume_grace_s=50.0)
        await first.steps(2)
    async with process(tmp_path, at_s=1.0) as second:
        await second.world.clock.advance(35.0)
        assert second.world.engine.find("", "r") is not None
        await second.world.clock.advance(16.0)
        assert second.world.engine.find("", "r") is None


async def test_results_are_read_and_not_computed(tmp_path: Path) -> None:
    """Also twice, by restarts one after the other; and the id is taken as long as they are kept."""
    async with process(tmp_path) as first:
        first.submit(params={"n": 2, "temperature": 0.5})
        await first.steps(25)
    for at_s in (1.0, 2.0):
        async with process(tmp_path, at_s=at_s) as later:
            assert later.restored == Restored(num_ended=1)
            live = later.submit(params={"n": 2, "temperature": 0.5})
            assert read(live) == ([9] * 40, FinishDetail.MAX_TOKENS)
            assert later.world.core.num_steps == 0
            with pytest.raises(RequestExistsError):
                later.submit(max_tokens=7)
            await later.world.clock.advance(1)
    async with process(tmp_path, at_s=4.0) as last:
        await last.world.clock.advance(GRACE_S + 2)
        assert last.world.engine.find("", "r") is None
        assert stored(tmp_path) == []


async def test_in_fast_mode_the_stored_tokens_are_a_prompt(tmp_path: Path) -> None:
    async with process(tmp_path, FAST) as first:
        first.submit(params={"n": 2, "temperature": 0.5})
        await first.steps(6)
    async with process(tmp_path, FAST, at_s=1.0) as second:
        live = second.world.engine.find("", "r")
        assert read(live) == ([9] * 12, None)
        await second.steps(20)
        assert read(live) == ([9] * 40, FinishDetail.MAX_TOKENS)
        assert second.world.core.num_output_tokens == 28


async def test_tokens_are_written_whole_from_time_to_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the rows of single steps go; also tokens of requests that cannot run in this process stay."""
    monkeypatch.setattr(writer_module, "STEPS_KEPT", 4)
    async with process(tmp_path, FAST) as first:
        first.submit("a", params={"n": 2, "temperature": 0.5})
        first.submit("b", 4000, params={"logprobs": 0})
        await first.steps(6)
    assert num_steps(tmp_path) <= 4
    async with process(tmp_path, replace(FAST, fingerprint=b"other"), at_s=1.0) as second:
        assert second.restored == Restored(num_lost=2)
        second.submit("c")
        await second.steps(12)
        assert num_steps(tmp_path) <= 4
    async with process(tmp_path, FAST, at_s=2.0) as third:
        engine = third.world.engine
        assert [len(read(engine.find("", name))[0]) for name in ("a", "b")] == [12, 6]
        await third.steps(20)
        assert read(engine.find("", "a")) == ([9] * 40, FinishDetail.MAX_TOKENS)


async def test_a_number_is_not_used_again_while_a_step_has_it(tmp_path: Path) -> None:
    """Else a new request would get the tokens of one that was deleted."""
    async with process(tmp_path, FAST) as first:

        def listener(_: LiveRequest) -> None:
            pass

        live = first.submit("gone")
        first.world.engine.listen(live, listener)
        await first.steps(3)
        first.world.engine.detach(live, listener, handed_over=False)
        await first.steps(1)
    assert (stored(tmp_path), num_steps(tmp_path)) == ([], 3)
    async with process(tmp_path, FAST, at_s=1.0) as second:
        second.submit("new")
        await second.steps(1)
    (row,) = stored(tmp_path)
    assert row.admission.number == 2
    assert sum(len(part.token_ids) for part in row.tokens[0]) == 4


async def test_tenants_are_apart(tmp_path: Path) -> None:
    async with process(tmp_path) as first:
        first.submit(tenant="blue", max_tokens=5)
        first.submit(tenant="red", max_tokens=7)
        await first.steps(3)
    async with process(tmp_path, at_s=1.0) as second:
        await second.steps(10)
        engine = second.world.engine
        assert [len(read(engine.find(tenant, "r"))[0]) for tenant in ("blue", "red")] == [5, 7]
        assert engine.find("", "r") is None


async def test_restored_requests_count_in_their_tenants_limits(tmp_path: Path) -> None:
    """They are not charged again: the tokens of a minute begin anew with the process."""
    limits = {"max_requests": 2, "max_queued_tokens": 7, "tokens_per_minute": 30, "shared_prefixes": "team"}
    file = tmp_path / "tenants.toml"
    write_tenants(file, {"blue": limits, "red": limits})
    async with process(tmp_path, registry=Registry(str(file))) as first:
        for name in ("a", "b"):
            first.submit(name, tenant="blue", max_tokens=5)
        with pytest.raises(TenantLimitError):
            first.submit("c", tenant="blue")
    async with process(tmp_path, at_s=1.0, registry=Registry(str(file))) as second:
        assert second.restored.num_unfinished == 2
        quotas = second.world.engine.quotas
        assert (quotas.usage("blue").num_requests, quotas.usage("blue").num_queued_tokens) == (2, 6)
        live = second.world.engine.find("blue", "a")
        assert live.request.spec.shared_prefixes == "team"
        with pytest.raises(TenantLimitError, match="max_requests"):
            second.submit("c", tenant="blue")
        second.submit("a", tenant="red", max_tokens=1)
        await second.steps(20)
        assert quotas.usage("blue").num_requests == 0
        second.submit("c", tenant="blue")
