"""Client, which blocks, against a scripted GenerationService over real gRPC: Ctrl-C, threads, event loops."""

from __future__ import annotations

import asyncio
import gc
import inspect
import itertools
import signal
import sys
import threading
import weakref

import pytest

from cadenza.async_client import AsyncClient
from cadenza.calls.loop_thread import LoopThread
from cadenza.client import Client
from cadenza.errors import (
    InvalidRequestError,
    UnavailableError,
)
from tests.helpers.client.scripted_server import Script, interrupt_when, start


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def blocking(script):
    """A blocking client; its server runs on the same background loop."""
    loop = LoopThread.shared()
    server, address = loop.run(start(script))
    with Client(address) as client:
        yield client
    loop.run(server.stop(0))


def test_blocking_client_does_the_same(blocking):
    outputs = blocking.generate(["a b", "c"])
    assert [output.outputs[0].text for output in outputs] == ["a b ", "c "]
    (answer,) = blocking.chat([{"role": "user", "content": "hi"}])
    assert answer.outputs[0].text == "hi "
    texts = [s.text for delta in blocking.stream("x y") for s in delta.outputs]
    assert texts == ["x ", "y "]
    assert blocking.abort("running")
    assert blocking.model_info().model == "m"
    assert blocking.server_info().load.num_running == 3
    with pytest.raises(InvalidRequestError):
        blocking.generate("bad")
    with pytest.raises(ValueError, match="at least one"):
        blocking.stream([])


@pytest.mark.parametrize(
    "name", [name for name in vars(Client) if not name.startswith("_") and callable(getattr(Client, name))]
)
def test_both_clients_have_the_same_parameters(name):
    """Names, order, kinds and defaults; an editor shows all of them, because none hides in **keywords."""
    ours = inspect.signature(getattr(Client, name)).parameters
    theirs = inspect.signature(getattr(AsyncClient, name)).parameters
    assert list(ours.values()) == list(theirs.values())
    assert not [each for each in ours.values() if each.kind is each.VAR_KEYWORD]


def calls_of(blocking):
    """Each call that makes requests, with the options that it is given."""
    chat = [{"role": "user", "content": "hi"}]
    return [
        lambda **options: blocking.generate("a", **options),
        lambda **options: blocking.chat(chat, **options),
        lambda **options: [*blocking.stream("a", **options)],
        lambda **options: [*blocking.stream_chat(chat, **options)],
    ]


def test_every_call_can_opt_out_of_the_prefix_cache(blocking, script):
    calls = calls_of(blocking)
    for call in calls:
        call()
        call(enable_prefix_caching=False)
    assert script.caching == [None, False] * len(calls)
    assert set(script.drafts) == {None}


def test_every_call_can_limit_drafts(blocking, script):
    calls = calls_of(blocking)
    for call in calls:
        for most in (None, 0, False, 3, 64):
            call(speculation=most)
    assert script.drafts == [None, 0, 0, 3, 64] * len(calls)
    assert set(script.caching) == {None}


def test_a_limit_of_drafts_holds_for_all_prompts_of_a_call(blocking, script):
    blocking.generate(["a", [1, 2], {"prompt": "c"}], speculation=2, enable_prefix_caching=False)
    blocking.chat([[{"role": "user", "content": "hi"}]] * 2, speculation=0)
    assert script.drafts == [2, 2, 2, 0, 0]
    assert script.caching == [False, False, False, None, None]


def test_a_wrong_limit_of_drafts_is_refused_before_anything_is_sent(blocking, script):
    for call in calls_of(blocking):
        for wrong in (-1, 65, True, 1.0, "3", [3], {"num_draft_tokens": 3}):
            with pytest.raises(ValueError, match=r"^speculation must be 0 \(off\) to 64 draft tokens"):
                call(speculation=wrong)
    assert script.params == []


def test_a_dropped_blocking_stream_aborts_the_request(blocking, script):
    for delta in blocking.stream("hang on", request_id="dropped"):
        if delta.outputs:
            break
    gc.collect()
    assert script.was_cancelled.wait(20)
    assert script.cancelled == ["dropped"]


def test_ctrl_c_in_a_blocking_stream_aborts_the_request(blocking, script):
    interrupt_when(script.hanging)
    with pytest.raises(KeyboardInterrupt):
        for _ in blocking.stream("hang on", request_id="interrupted"):
            pass
    assert script.was_cancelled.wait(20)
    assert script.cancelled == ["interrupted"]
    assert blocking.generate("a")[0].outputs[0].text == "a "


@pytest.mark.parametrize("moment", ["before", "after"])
def test_ctrl_c_while_the_loop_is_notified_leaves_nothing_running(blocking, script, monkeypatch, moment):
    """The worst moments: just before and just after the loop has been requested to fetch the next delta."""
    deltas = blocking.stream("hang on", request_id="interrupted")
    while not next(deltas).outputs:
        pass
    schedule = LoopThread.shared().loop.call_soon_threadsafe

    def interrupted(callback):
        monkeypatch.undo()
        if moment == "after":
            schedule(callback)
        raise KeyboardInterrupt

    monkeypatch.setattr(LoopThread.shared().loop, "call_soon_threadsafe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(deltas)
    assert script.was_cancelled.wait(20)
    assert script.cancelled == ["interrupted"]
    assert blocking.generate("a")[0].outputs[0].text == "a "


def test_a_ctrl_c_that_came_just_before_the_wait_ends_it():
    """Nothing wakes the waiting thread for such a signal, as here, where another thread gets it."""

    async def hang() -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        await asyncio.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        LoopThread.shared().run(hang())


def test_ctrl_c_at_any_line_of_a_blocking_call_is_a_keyboard_interrupt_and_no_other_error():
    """Python raises it between any two bytecodes, here at each line that the call runs, in turn."""
    loop = LoopThread.shared()

    async def work() -> str:
        await asyncio.sleep(0.001)
        return "done"

    for line in itertools.count():
        passed = 0

        def trace(frame, event, argument, line=line):
            nonlocal passed
            # A weak reference's callback swallows any exception; nobody can help that.
            passed += event == "line" and "weakref" not in frame.f_code.co_filename
            if passed > line:
                raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            loop.call(work)
        except KeyboardInterrupt:
            sys.settrace(None)
            assert loop.call(work) == "done"
        else:
            sys.settrace(None)
            break
        finally:
            sys.settrace(None)
    assert line > 20


def test_a_task_ends_on_its_loop():
    """Where its last reference goes asyncio runs Python code, in which a KeyboardInterrupt would be lost."""
    loop, threads, dropped = LoopThread.shared(), [], threading.Semaphore(0)

    def note() -> None:
        threads.append(threading.current_thread().name)
        dropped.release()

    async def work(fails: bool) -> None:
        weakref.finalize(asyncio.current_task(), note)
        if fails:
            raise ValueError("wrong")

    for _ in range(5):
        loop.run(work(False))
        with pytest.raises(ValueError, match="wrong"):
            loop.run(work(True))
    assert all(dropped.acquire(timeout=10) for _ in range(10))
    assert threads == ["cadenza-client"] * 10


def test_ctrl_c_in_a_blocking_batch_aborts_it(blocking, script):
    interrupt_when(script.hanging)
    with pytest.raises(KeyboardInterrupt):
        blocking.generate(["hang", "a"])
    assert script.was_cancelled.wait(20)
    assert script.cancelled == ["session"]


def test_blocking_calls_on_their_own_loop_are_refused(blocking):
    async def call():
        return blocking.model_info()

    with pytest.raises(RuntimeError, match="AsyncClient"):
        LoopThread.shared().run(call())


@pytest.mark.parametrize(
    "call", [lambda client: client.generate("hang"), lambda client: list(client.stream("hang on"))]
)
def test_closing_a_client_ends_the_calls_of_other_threads(blocking, script, call):
    ended: list[BaseException] = []

    def work():
        try:
            call(blocking)
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert script.hanging.wait(20)
    blocking.close()
    thread.join(20)
    (error,) = ended
    assert isinstance(error, UnavailableError)
    assert "closed" in str(error)


def test_an_async_client_is_of_one_loop(blocking):
    client = AsyncClient(blocking.target)

    async def call():
        return await client.model_info()

    asyncio.run(call())
    with pytest.raises(RuntimeError, match="another event loop"):
        asyncio.run(call())


def test_threads_share_one_client(blocking):
    results: dict[int, str] = {}

    def work(index):
        results[index] = blocking.generate(f"thread {index}")[0].outputs[0].text

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {index: f"thread {index} " for index in range(8)}


def test_two_event_loops_do_not_fill_the_log(blocking, caplog):
    """grpc.aio wakes both loops for every event, and asyncio logs that one of them found nothing to read."""

    async def streams() -> None:
        async with AsyncClient(blocking.target) as client:
            for _ in range(5):
                await asyncio.gather(*(client.generate(f"a {index}") for index in range(20)))

    asyncio.run(streams())
    assert not caplog.records
