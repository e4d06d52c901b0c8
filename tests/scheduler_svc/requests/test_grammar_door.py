"""The door for constraints: what is refused, by whom, and what a constraint that hangs or explodes does to others."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace

import psutil
import pytest

from cadenza_common.grammar import child
from cadenza_common.grammar.spec import GrammarSpec
from cadenza_common.grammar.table import TableSource, table_source
from scheduler_svc.core.errors import PreconditionError, RequestRejectedError, WaitingQueueFullError
from scheduler_svc.requests import grammar_door
from scheduler_svc.requests.grammar_door import GrammarDoor
from tests.helpers.client.scripted_server import until
from tests.helpers.paths import ROOT

BAD = [
    (GrammarSpec("json_schema", "{"), "the schema is no JSON"),
    (GrammarSpec("json_schema", "3"), "must be a JSON object"),
    (GrammarSpec("json_schema", '{"type": "banana"}'), "banana"),
    (GrammarSpec("json_schema", '{"not": {"type": "string"}}'), "not"),
    (GrammarSpec("json_schema", '{"$ref": "#/nowhere"}'), "nowhere"),
    (GrammarSpec("regex", "(a"), "regex"),
    (GrammarSpec("regex", "(?=a)b"), "look"),
    (GrammarSpec("grammar", "start: unknown"), "unknown"),
    (GrammarSpec("structural_tag", "[]"), "structures"),
    (
        GrammarSpec(
            "structural_tag",
            json.dumps({"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<g"]}),
        ),
        "no trigger is the beginning of the tag '<f>'",
    ),
]
GOOD = [
    GrammarSpec("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}'),
    GrammarSpec("json_schema", "true"),
    GrammarSpec("json_object", disable_any_whitespace=True),
    GrammarSpec("json_object", whitespace_pattern="[ ]?"),
    GrammarSpec("regex", r"\d{3}-[a-z]+"),
    GrammarSpec("choices", choices=("yes", 'a "quoted" \\ one\n', "ü", "\u0001")),
    GrammarSpec("grammar", 'start: "a" start | "b"'),
    GrammarSpec("grammar", 'root ::= "a" root | "b"'),
    GrammarSpec(
        "structural_tag",
        json.dumps(
            {"structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}], "triggers": ["<f"]}
        ),
    ),
]


@pytest.fixture(scope="module")
def source() -> TableSource:
    found = table_source(str(ROOT / "models" / "cadenza-demo"), 2048, [1])
    assert found is not None
    return found


@pytest.fixture
async def door(source: TableSource) -> AsyncIterator[GrammarDoor]:
    made = GrammarDoor(source, compile_s=20.0)
    yield made
    made.close()


async def check(door: GrammarDoor, source: TableSource, spec: GrammarSpec) -> str:
    """What is wrong with a constraint; empty: nothing. Raises QueueFullError."""
    try:
        await door.check(spec, repr(spec).encode(), source.engine().key)
    except RequestRejectedError as exc:
        found = exc
    else:
        return ""
    assert found.field == f"sampling_params.grammar.{spec.kind}"
    return str(found)


async def exceeds(door: GrammarDoor, source: TableSource, spec: GrammarSpec) -> str:
    """Which bound of its process a constraint exceeds: an error that says when to try again."""
    with pytest.raises(WaitingQueueFullError, match=rf"sampling_params.grammar.{spec.kind}") as caught:
        await check(door, source, spec)
    assert caught.value.retry_after_s > 0
    return str(caught.value)


async def test_what_is_refused_and_what_is_not(door: GrammarDoor, source: TableSource) -> None:
    for spec, message in BAD:
        found = await check(door, source, spec)
        assert message.lower() in found.lower(), (spec, found)
        assert len(found) < 700
    for spec in GOOD:
        assert await check(door, source, spec) == "", spec


async def test_a_constraint_is_compiled_once(door: GrammarDoor, source: TableSource) -> None:
    assert await check(door, source, BAD[0][0])
    child = door.child
    assert child is not None
    os.kill(child.pid, signal.SIGKILL)
    await until(lambda: door.child is None)
    assert await check(door, source, BAD[0][0])
    assert door.child is None
    assert await check(door, source, GOOD[0]) == ""
    assert door.child is not None


def exploding_rules(different: int = 0) -> GrammarSpec:
    """llguidance takes minutes for it, and panics."""
    names = [f"a{index}" for index in range(3000 + different)]
    rules = [f"{name}: " + " | ".join(f'"{each}x{name}"' for each in range(60)) for name in names]
    return GrammarSpec("grammar", "start: " + " ".join(names) + "\n" + "\n".join(rules))


async def test_what_explodes_is_refused_by_counted_limits(door: GrammarDoor, source: TableSource) -> None:
    """Whatever the machine, so that a refusal follows from the constraint."""
    patterns = [{"type": "string", "pattern": f".*{each}.{{{20 + i}}}$"} for i, each in enumerate("abcdefgh")]
    nested: dict[str, object] = {"type": "integer"}
    for _ in range(300):
        nested = {"type": "array", "items": nested}
    for schema, message in (({"allOf": patterns}, "Unable to determine"), (nested, "recursion limit exceeded")):
        assert message in await check(door, source, GrammarSpec("json_schema", json.dumps(schema)))
    assert await check(door, source, GOOD[0]) == ""


def test_what_the_first_forced_tokens_exceed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An executor looks for them with the first mask: 28,000 loops have room for that, and not for them (3 + 3 s)."""

    class FakeMatcher:
        error = ""

        def compute_bitmask(self) -> None:
            pass

        def compute_ff_tokens(self) -> None:
            self.error = "Too many items (limit 50000; ff_tokens)"

        def is_error(self) -> bool:
            return bool(self.error)

        def get_error(self) -> str:
            return self.error

    monkeypatch.setattr(child, "new_matcher", lambda spec, table: FakeMatcher())
    assert "Too many items" in child.what_is_wrong({"kind": "regex", "text": "a"}, None)


@pytest.mark.parametrize(
    "text",
    [
        "start: r0\n"
        + "".join(f'r{i}: "a" r{i + 1} | "b" r{i + 1} r{i + 1} | "c"\n' for i in range(6000))
        + 'r6000: "z"',
        "start: r0\n" + "".join(f'r{i}: "a" r{i + 1}\n' for i in range(12000)) + 'r12000: "z"',
    ],
    ids=["branches", "chain"],
)
async def test_what_is_nested_too_deeply_is_refused(door: GrammarDoor, source: TableSource, text: str) -> None:
    """Not as what another moment's memory would do for: the stack is the same everywhere."""
    found = await check(door, source, GrammarSpec("grammar", text))
    assert "is nested too deeply: the compiler has 4 MiB of stack" in found


@pytest.mark.slow
async def test_what_takes_too_long_is_ended(source: TableSource) -> None:
    door = GrammarDoor(source, compile_s=1.5)
    assert await check(door, source, GOOD[0]) == ""
    child = door.child
    assert "takes over 1.5 s to compile" in await exceeds(door, source, exploding_rules())
    assert not door._jobs
    assert await check(door, source, GOOD[1]) == ""
    assert door.child is child
    door._compile_s = 60.0
    again = asyncio.create_task(check(door, source, exploding_rules()))
    await until(lambda: bool(door._running))
    assert not again.done(), "it is compiled anew, as at another moment there may be time for it"
    again.cancel()
    door.close()


@pytest.mark.slow
async def test_what_is_slow_delays_itself_alone(source: TableSource) -> None:
    """Two slow constraints, one of which has to wait for the other; each ends with its last request."""
    door = GrammarDoor(source, compile_s=60.0)
    assert await check(door, source, GOOD[0]) == ""
    assert door.child is not None
    child = psutil.Process(door.child.pid)
    slow = [asyncio.create_task(check(door, source, exploding_rules(n % 2))) for n in range(3)]
    for spec in GOOD[1:]:
        assert await check(door, source, spec) == ""
    assert not any(each.done() for each in slow)
    await until(lambda: door.num_waiting == 1)
    assert len(door._jobs) == 2, "one of them is asked for twice"
    slow[0].cancel()
    await asyncio.wait(slow[:1])
    assert len(door._jobs) == 2, "somebody else waits for it"
    for each in slow[1:]:
        each.cancel()
    await asyncio.wait(slow)
    assert not door._jobs
    assert not door.num_waiting
    await until(lambda: not child.children())
    assert await check(door, source, BAD[2][0])
    door.close()


async def test_tenants_take_turns_in_a_queue_with_an_end(source: TableSource) -> None:
    door = GrammarDoor(source, slice_s=30.0, max_waiting=4)
    engine, order = source.engine().key, list[str]()
    assert await check(door, source, GOOD[0]) == ""
    assert door.child is not None
    os.kill(door.child.pid, signal.SIGSTOP)

    async def call(tenant: str, name: str) -> None:
        await door.check(GrammarSpec("regex", name), name.encode(), engine, tenant)
        order.append(name)

    calls = [asyncio.create_task(call(name[0], name)) for name in ("a1", "a2", "a3", "b1")]
    await until(lambda: door.num_waiting == 3)
    for tenant in "ab":
        with pytest.raises(WaitingQueueFullError, match="3 constraints") as caught:
            await call(tenant, tenant + "9")
        assert caught.value.retry_after_s >= 1
    os.kill(door.child.pid, signal.SIGCONT)
    await asyncio.gather(*calls)
    assert order == ["a1", "a2", "b1", "a3"]
    await call("b", "b9")
    door.close()


async def test_a_constraint_of_several_tenants_takes_the_turn_of_each(source: TableSource) -> None:
    """Who joins a constraint does not wait for the turn of those who asked first, and leaves them theirs."""
    door = GrammarDoor(source, slice_s=30.0)
    engine, order = source.engine().key, list[str]()
    assert await check(door, source, GOOD[0]) == ""
    assert door.child is not None
    os.kill(door.child.pid, signal.SIGSTOP)

    async def call(tenant: str, name: str) -> None:
        await door.check(GrammarSpec("regex", name), name.encode(), engine, tenant)
        order.append(tenant + name)

    asked = ("a1", "a2", "a3", "a4", "a5", "b4", "c5", "a4")
    calls = [asyncio.create_task(call(name[0], name[1:])) for name in asked]
    await until(lambda: door.num_waiting == 4)
    calls[6].cancel()
    await asyncio.wait(calls[6:7])
    assert door.num_waiting == 4, "its first tenant waits for it"
    os.kill(door.child.pid, signal.SIGCONT)
    await asyncio.gather(*calls, return_exceptions=True)
    assert order == ["a1", "a2", "a4", "b4", "a4", "a3", "a5"]
    assert not door._jobs
    assert not door._num_requests
    door.close()


async def test_requests_that_join_a_constraint_keep_to_a_limit(source: TableSource) -> None:
    """A tenant has as many as there are free places, and all where there are no tenants."""
    for tenants, shares in ((("a", "b"), (4, 2)), (("",), (8,))):
        door = GrammarDoor(source, max_waiting_requests=8)
        engine, calls = source.engine().key, []
        assert await check(door, source, GOOD[0]) == ""
        assert door.child is not None
        os.kill(door.child.pid, signal.SIGSTOP)
        for tenant, share in zip(tenants, shares, strict=True):
            calls += [asyncio.create_task(door.check(GOOD[4], b"same", engine, tenant)) for _ in range(share)]
            await until(lambda: door._num_requests.total() == len(calls))  # noqa: B023
            with pytest.raises(WaitingQueueFullError, match=f"{len(calls)} requests wait for constraints"):
                await door.check(GOOD[4], b"same", engine, tenant)
        os.kill(door.child.pid, signal.SIGCONT)
        await asyncio.gather(*calls)
        door.close()


async def test_a_child_that_hangs_is_replaced_while_the_loop_goes_on(
    source: TableSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_door, "_ANSWER_S", 0.3)
    door = GrammarDoor(source, compile_s=1.0)
    assert await check(door, source, GOOD[0]) == ""
    child = door.child
    assert child is not None
    os.kill(child.pid, signal.SIGSTOP)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.005)

    ticking = asyncio.create_task(tick())
    calls = [asyncio.create_task(each) for each in (exceeds(door, source, GOOD[1]), check(door, source, GOOD[2]))]
    assert "takes over 1 s" in await calls[0]
    assert await calls[1] == "", "the next child has compiled it"
    ticking.cancel()
    assert ticks > 20
    assert door.child is not child
    assert await check(door, source, GOOD[4]) == ""
    door.close()


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
async def test_a_child_that_dies_is_replaced(source: TableSource, times: int) -> None:
    """What it compiled is compiled by the next one, once."""
    door = GrammarDoor(source, slice_s=1.0)
    assert await check(door, source, GOOD[0]) == ""
    call = asyncio.create_task((check if times == 1 else exceeds)(door, source, exploding_rules()))
    for _ in range(times):
        await until(lambda: bool(door._running))
        assert door.child is not None
        os.kill(door.child.pid, signal.SIGKILL)
        await until(lambda: not door._running)
    if times == 2:
        assert "died twice; it may have 2048 MiB" in await call
    assert await check(door, source, GOOD[1]) == "", "it was not the constraint that ended the child"
    call.cancel()
    door.close()


async def test_too_little_memory_for_the_table(source: TableSource) -> None:
    door = GrammarDoor(source, max_bytes=2**24)
    with pytest.raises(PreconditionError, match="cannot start"):
        await door.check(GOOD[0], b"good", source.engine().key)
    door.close()


async def test_a_cancelled_call_leaves_nothing_behind(door: GrammarDoor, source: TableSource) -> None:
    """The next constraint gets its own answer."""
    assert await check(door, source, GOOD[0]) == ""
    call = asyncio.create_task(check(door, source, BAD[2][0]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await check(door, source, GOOD[1]) == ""
    assert await check(door, source, BAD[2][0])
    assert not door._jobs


async def test_a_door_that_is_closed_answers_those_who_wait(source: TableSource) -> None:
    door = GrammarDoor(source)
    calls = [asyncio.create_task(check(door, source, spec)) for spec in (GOOD[0], BAD[2][0])]
    await until(lambda: bool(door._jobs))
    door.close()
    assert [bool(found) for found in await asyncio.gather(*calls)] == [False, True]
    assert door.child is None


async def test_another_engine_than_the_executors(door: GrammarDoor, source: TableSource) -> None:
    other = replace(source, vocab_size=2049).engine().key
    with pytest.raises(PreconditionError, match="is not that of the executor"):
        await door.check(GOOD[0], b"good", other)
