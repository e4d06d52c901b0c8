"""The load test's targets for Cadenza, over real connections to real and to badly behaved services; and its steps."""

from __future__ import annotations

import asyncio
import contextlib
import json

import grpc
import numpy as np
import pytest

from cadenza import AsyncClient
from cadenza.errors import UnavailableError
from cadenza_loadtest.driving.driver import Progress, drive
from cadenza_loadtest.driving.watch import watch_series
from cadenza_loadtest.failures import Failures
from cadenza_loadtest.measures.metrics import measure
from cadenza_loadtest.requests import LoadTestError, RequestShape
from cadenza_loadtest.targets.cadenza import GenerateTarget, read_tenant_tokens
from cadenza_loadtest.targets.session import SessionTarget
from cadenza_loadtest.workloads.prompts import Prompts
from tests.helpers.client import scripted_server
from tests.helpers.client.scripted_server import Script, event, responses_to, text_of
from tests.helpers.executor.simulated_adapters import make_adapter
from tests.helpers.scheduler.scheduler_world import world
from tests.helpers.scheduler.scripted_executor import VOCAB_SIZE, ScriptedExecutor
from tests.helpers.services import cadenza_services
from tests.helpers.tenants import token, write_tenants

BOTH = pytest.mark.parametrize("kind", [SessionTarget, GenerateTarget])


def shape(index: int, **fields) -> RequestShape:
    return RequestShape(index, **{"num_prompt_tokens": 4, "num_output_tokens": 5, **fields})


def burst(*shapes: RequestShape) -> list[tuple[float, RequestShape]]:
    return [(0.0, each) for each in shapes]


def prompts() -> Prompts:
    return Prompts(0, VOCAB_SIZE)


@contextlib.asynccontextmanager
async def started(target):
    target.facts = await target.start()
    try:
        yield target
    finally:
        await target.close()


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the condition is any
            await asyncio.sleep(0.002)


# ---------------------------------------------------------------- Cadenza


@BOTH
async def test_what_is_requested_comes_and_is_counted(kind) -> None:
    shapes = [shape(index, num_prompt_tokens=1 + index, num_output_tokens=1 + 2 * index) for index in range(20)]
    async with world() as w, started(kind(w.target)) as target:
        columns = await drive(burst(*shapes), target, prompts(), timeout_s=20)
        await w.idle()
    assert columns.ok.all(), set(columns.error)
    assert columns.num_output_tokens.tolist() == [each.num_output_tokens for each in shapes]
    assert columns.num_prompt_tokens.tolist() == [each.num_prompt_tokens for each in shapes]
    assert columns.num_cached_tokens.tolist() == [0] * 20
    assert columns.num_preemptions.tolist() == [0] * 20
    # The server's stamps lie within the client's: arrival after sending, the end before the last token is here.
    assert (columns.queue_s <= columns.server_first_s).all()
    assert (columns.server_first_s <= columns.first_s - columns.sent_s).all()
    assert (columns.server_total_s <= columns.last_s - columns.sent_s).all()
    # One message for each step at most: a step brings a token of each.
    assert (columns.num_gaps <= columns.num_output_tokens - 1).all()
    ends = np.cumsum(columns.num_gaps)
    for end, num, first_s, last_s in zip(ends, columns.num_gaps, columns.first_s, columns.last_s, strict=True):
        assert columns.gap_s[end - num : end].sum() == pytest.approx(last_s - first_s, abs=1e-5)


@BOTH
async def test_samples_and_beams_are_one_request(kind) -> None:
    shapes = [shape(0, n=3), shape(1, beam_width=3, tenant="b"), shape(2, tenant="b")]
    async with (
        cadenza_services(
            "simulated", simulate="instant", max_model_len=256, scheduler={"skip_tokenizer_init": True}
        ) as running,
        started(kind(running.target, seed=3)) as target,
    ):
        columns = await drive(burst(*shapes), target, Prompts(0, 1000), timeout_s=20)
    assert columns.error.tolist() == ["", "", ""]
    assert columns.num_output_tokens.tolist() == [15, 5, 5]
    assert columns.num_samples.tolist() == [3, 1, 1]
    assert columns.num_gaps[1] == 0, "a search returns nothing before its end"


@BOTH
async def test_requests_of_tenants_are_sent_with_their_tokens(kind, tmp_path) -> None:
    file = write_tenants(tmp_path / "tenants.toml", {"a": {}, "b": {}})
    (tmp_path / "tokens.toml").write_text(f'[tokens]\na = "{token("a")}"\nb = "{token("b")}"\n')
    tokens = read_tenant_tokens(str(tmp_path / "tokens.toml"))
    shapes = [shape(index, tenant="ab"[index % 2]) for index in range(6)]
    async with world(tenants=file) as w, started(kind(w.target, connections=2, tenant_tokens=tokens)) as target:
        columns = await drive(burst(*shapes), target, prompts(), timeout_s=20)
        assert columns.error.tolist() == [""] * 6
        assert [w.engine.quotas.usage(name).num_output_tokens for name in "ab"] == [15, 15]
        with pytest.raises(LoadTestError, match="--tenant-tokens has no token of tenant c"):
            await drive(burst(shape(7, tenant="c")), target, prompts(), timeout_s=20)


@BOTH
async def test_requests_name_their_adapters(kind, tmp_path) -> None:
    """An unknown one is an error of its own requests alone."""
    folder = make_adapter(tmp_path / "a", b"a")
    shapes = [shape(index, adapter=("a", "", "b")[index % 3]) for index in range(9)]
    options = {"skip_tokenizer_init": True, "lora": [f"a={folder}"]}
    async with (
        cadenza_services("simulated", simulate="instant", max_model_len=256, scheduler=options) as running,
        started(kind(running.target)) as target,
        AsyncClient(running.target) as client,
    ):
        columns = await drive(burst(*shapes), target, Prompts(0, 1000), timeout_s=20)
        (info,) = await client.adapters()
    assert columns.adapter.tolist() == ["a", "", "b"] * 3
    assert columns.error.tolist() == ["", "", "NOT_FOUND"] * 3
    assert info.content_hash, "a was loaded"
    metrics = measure(columns, window=None, slo=None)
    assert (metrics.num_adapters, metrics.errors) == (2, {"NOT_FOUND": 3})
    assert {name: group.num_ok for name, group in metrics.by_adapter.items()} == {"": 3, "a": 3, "b": 0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = 1", "must have one table, [tokens]"),
        ('[tokens]\na = "two words"', "[tokens] a: is no token"),
        ("[tokens", "this is not TOML"),
    ],
)
def test_wrong_files_of_tokens(tmp_path, text, message) -> None:
    (tmp_path / "tokens.toml").write_text(text)
    with pytest.raises(LoadTestError) as found:
        read_tenant_tokens(str(tmp_path / "tokens.toml"))
    assert message in str(found.value)
    assert "two words" not in str(found.value)


@BOTH
async def test_facts_of_the_server(kind) -> None:
    async with world(max_num_seqs=8) as w, started(kind(w.target)) as target:
        facts = target.facts
    assert (facts.kind, facts.api, facts.target, facts.model) == ("cadenza", kind.api, w.target, "toy")
    assert (facts.vocab_size, facts.max_model_len, facts.options["max_num_seqs"]) == (VOCAB_SIZE, 256, "8")
    assert [each.device for each in facts.executors] == ["cpu"]
    assert json.loads(json.dumps(facts.to_json()))["executors"][0]["block_size"] == 16


@BOTH
async def test_a_full_queue_is_an_error_and_nothing_is_sent_again(kind) -> None:
    seen: list[Progress] = []
    async with world(ScriptedExecutor(max_num_seqs=2), max_queued_requests=3) as w, started(kind(w.target)) as target:
        w.executor.going.clear()
        shapes = [shape(index) for index in range(12)]
        running = asyncio.create_task(drive(burst(*shapes), target, prompts(), timeout_s=20, on_progress=seen.append))
        await until(lambda: seen and seen[-1].num_failed + len(w.engine._live) == 12)
        w.executor.going.set()
        columns = await running
    full = columns.error == "RESOURCE_EXHAUSTED"
    assert (full | columns.ok).all()
    assert 7 <= full.sum() <= 9, "3 wait, and 2 may run"
    assert np.isnan(columns.first_s[full]).all()


@BOTH
async def test_a_timeout_aborts_at_the_server(kind) -> None:
    async with world() as w, started(kind(w.target)) as target:
        w.executor.going.clear()
        columns = await drive(burst(shape(0), shape(1)), target, prompts(), timeout_s=0.3)
        w.executor.going.set()
        await w.idle()
        again = await drive(burst(shape(0)), target, prompts(), timeout_s=20)
    assert columns.error.tolist() == ["TIMEOUT", "TIMEOUT"]
    assert again.ok.all(), "the others of the stream go on"


@BOTH
async def test_ctrl_c_aborts_at_the_server(kind) -> None:
    async with world() as w, started(kind(w.target)) as target:
        w.executor.going.clear()
        running = asyncio.create_task(drive(burst(shape(0), shape(1)), target, prompts(), on_cancelled=lambda: None))
        await until(lambda: len(w.engine._live) == 2)
        running.cancel()
        columns = await running
        w.executor.going.set()
        await w.idle()
    assert columns.error.tolist() == ["CANCELLED", "CANCELLED"]


@BOTH
async def test_a_refused_request_fails_alone(kind) -> None:
    shapes = [shape(0), shape(1, num_prompt_tokens=400), shape(2, n=1000)]
    async with world() as w, started(kind(w.target)) as target:
        columns = await drive(burst(*shapes), target, prompts(), timeout_s=20)
    assert columns.error.tolist() == ["", "INVALID_ARGUMENT", "INVALID_ARGUMENT"]


@BOTH
async def test_an_output_that_was_cut_short_is_an_error(kind) -> None:
    shapes = [shape(0, num_output_tokens=100), shape(1, num_output_tokens=400)]
    async with world(ScriptedExecutor(num_blocks=4)) as w, started(kind(w.target)) as target:
        columns = await drive(burst(shapes[0]), target, prompts(), timeout_s=20)
    assert columns.error.tolist() == ["KV_CAPACITY"]
    assert 0 < columns.num_output_tokens[0] < 100
    async with world() as w, started(kind(w.target)) as target:
        columns = await drive(burst(shapes[1]), target, prompts(), timeout_s=20)
    assert columns.error.tolist() == ["MAX_MODEL_LEN"]


@BOTH
async def test_turns_carry_the_answers_of_the_turns_before(kind, tokenizer_folder) -> None:
    talk = [shape(turn, session=0, turn=turn) for turn in range(3)]
    async with world(tokenizer=tokenizer_folder) as w, started(kind(w.target)) as target:
        columns = await drive(burst(*talk), target, prompts(), timeout_s=20)
        assert columns.ok.all()
        assert columns.num_prompt_tokens.tolist() == [4, 13, 22]
        text = [shape(index, prompt_text="Hello", session=0, turn=index) for index in range(2)]
        w.executor.scripts = {0: [256 + 10] * 5}
        columns = await drive(burst(*text), target, prompts(), timeout_s=20)
    assert columns.ok.all()
    assert columns.num_prompt_tokens[1] > 2 * columns.num_prompt_tokens[0]


@BOTH
async def test_a_message_that_is_too_large_is_not_sent(kind, monkeypatch) -> None:
    monkeypatch.setattr("cadenza.calls.session.MAX_REQUEST_BYTES", 300)
    monkeypatch.setattr("cadenza_loadtest.targets.cadenza.MAX_REQUEST_BYTES", 300)
    async with world() as w, started(kind(w.target)) as target:
        shapes = [shape(0), shape(1, num_prompt_tokens=200), shape(2)]
        columns = await drive(burst(*shapes), target, prompts(), timeout_s=20)
    assert columns.error.tolist() == ["", "MESSAGE_TOO_LARGE", ""]


@BOTH
async def test_no_server(kind) -> None:
    target = kind("127.0.0.1:1")
    with pytest.raises(UnavailableError, match=r"no service at 127\.0\.0\.1:1"):
        await target.start()
    await target.close()


class Breaking(Script):
    """A session ends with UNAVAILABLE on "break", with OK on "end"; it never answers "hang"."""

    async def Session(self, request_iterator, context):
        self.num_sessions += 1
        async for message in request_iterator:
            text = text_of(message.generate)
            if text == "break":
                await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
            if text == "end":
                return
            if text == "hang":
                self.hanging.set()
                continue
            if text == "vanish":
                yield event(message.generate, done=True)
                continue
            for index, response in enumerate(responses := responses_to(message.generate)):
                yield event(message.generate, response=response, done=index == len(responses) - 1)


@contextlib.asynccontextmanager
async def serving(script):
    server, address = await scripted_server.start(script)
    try:
        yield address
    finally:
        await server.stop(0)


def texts(*said: str) -> list[tuple[float, RequestShape]]:
    return burst(*(shape(index, prompt_text=text) for index, text in enumerate(said)))


@pytest.mark.parametrize(("end", "said"), [("break", "gone"), ("end", "the server ended the stream")])
async def test_a_broken_stream_fails_its_requests_and_the_next_opens_another(end, said) -> None:
    script, failures = Breaking(), Failures()
    async with serving(script) as address, started(SessionTarget(address)) as target:
        columns = await drive(texts("one two", "hang", end), target, prompts(), timeout_s=20, on_failed=failures.add)
        assert failures.messages == {"UNAVAILABLE": said}
        assert columns.error[1:].tolist() == ["UNAVAILABLE", "UNAVAILABLE"]
        assert script.num_sessions == 1
        columns = await drive(texts("one two", "three"), target, prompts(), timeout_s=20)
        assert columns.error.tolist() == ["", ""]
        assert columns.num_output_tokens.tolist() == [2, 1]
        assert script.num_sessions == 2


async def test_requests_end_when_the_target_is_closed() -> None:
    script = Breaking()
    async with serving(script) as address:
        target = SessionTarget(address)
        await target.start()
        running = asyncio.create_task(drive(texts("hang"), target, prompts()))
        await asyncio.to_thread(script.hanging.wait, 10)
        await target.close()
        assert (await running).error.tolist() == ["CANCELLED"]


@pytest.mark.parametrize(("kind", "script"), [(SessionTarget, Breaking()), (GenerateTarget, Script())])
async def test_a_request_that_vanishes_is_incomplete(kind, script) -> None:
    async with serving(script) as address, started(kind(address)) as target:
        columns = await drive(texts("vanish"), target, prompts(), timeout_s=20)
    assert columns.error.tolist() == ["INCOMPLETE"]


async def test_several_connections_take_turns() -> None:
    script = Breaking()
    async with serving(script) as address, started(SessionTarget(address, connections=3)) as target:
        columns = await drive(texts(*["a b c"] * 9), target, prompts(), timeout_s=20)
    assert columns.ok.all()
    assert script.num_sessions == 3


# ---------------------------------------------------------------- steps


async def test_steps_are_watched_on_the_runs_clock() -> None:
    async with world() as w, started(SessionTarget(w.target)) as target:
        async with watch_series(w.target) as series:
            before = await drive(burst(shape(0)), target, prompts(), timeout_s=20)
            assert before.ok.all()
            await w.idle()
            columns = await drive(
                [(0.01 * index, shape(index)) for index in range(10)],
                target,
                prompts(),
                timeout_s=20,
                on_start=series.begin,
            )
        steps = series.columns()
    assert series.error == ""
    assert steps.num_dropped == 0
    # Of the run alone: each request samples all its tokens, and computes all but the last, in the run's time.
    assert steps.num_sampled.sum() == columns.num_output_tokens.sum() == 50
    assert steps.num_tokens.sum() == 10 * (4 + 5 - 1)
    assert (steps.planned_s <= steps.applied_s).all()
    assert (np.diff(steps.applied_s) >= 0).all()
    assert steps.applied_s[0] >= 0
    # A step is known here after it was applied there, so none can seem later than what it brought.
    # How long a call takes is how far its clock may be off.
    assert steps.applied_s[-1] <= columns.last_s.max() + 1
    assert columns.first_s.min() >= steps.planned_s[0] - 1
    assert steps.num_running.max() >= 1
    assert set(steps.num_blocks) == {256}
    assert set(steps.executor) == {0}


async def test_a_watch_that_breaks_ends_no_run() -> None:
    class Ending(Script):
        async def WatchSteps(self, request, context):
            stream = super().WatchSteps(request, context)
            yield await anext(stream)
            yield await anext(stream)
            await stream.aclose()
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no more")

    async with serving(Ending()) as address, watch_series(address) as series:
        await until(lambda: series.error)
    assert series.error == "RESOURCE_EXHAUSTED"
    assert (len(series.columns()), series.columns().num_dropped) == (1, 2)


async def test_a_watch_needs_a_server() -> None:
    with pytest.raises(UnavailableError):
        async with watch_series("127.0.0.1:1"):
            pass
