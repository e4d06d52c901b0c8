"""`cadenza top` against a real scheduler: its figures are those of what ran, and a server may go and come back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys

import grpc
import pytest

from cadenza.calls.loop_thread import LoopThread
from cadenza.errors import DeadlineError, UnavailableError, UnsupportedError
from cadenza_cli.app import run
from cadenza_cli.top.figures import Lost, ServerFigures, json_line, percentiles
from cadenza_cli.top.top import follow
from cadenza_cli.top.watching import observe
from tests.helpers.client import scripted_server
from tests.helpers.client.scripted_server import Script
from tests.helpers.machine.relay import relay
from tests.helpers.machine.terminal import CTRL_C, Terminal
from tests.helpers.scheduler.scheduler_world import collect, request, world
from tests.helpers.scheduler.scripted_executor import ScriptedExecutor, serve

pytestmark = pytest.mark.timeout(60)
INTERVAL_S = 0.1


def observed(target: str):
    return contextlib.aclosing(observe(target, interval_s=INTERVAL_S, window_s=0.0))


async def until(outputs, condition) -> list:
    """What comes up to the first that satisfies the condition, and with it."""
    seen = []
    async with asyncio.timeout(30):
        async for each in outputs:
            seen.append(each)
            if condition(each):
                return seen
    raise AssertionError("it has ended")


async def test_the_figures_are_those_of_what_ran() -> None:
    async with world(max_num_seqs=4) as w, observed(w.target) as outputs:
        assert (await anext(outputs)).executors[0].num_steps == 0
        work = [collect(w.stub.Generate(request(ids=[5] * 20, seed=seed))) for seed in range(10)]
        running = asyncio.gather(*work)
        seen = await until(outputs, lambda each: each.info.load.num_output_tokens == 80)
        await running
        seen.append(await anext(outputs))
    assert sum(each.output_tokens_per_s * each.window_s for each in seen) == pytest.approx(80)
    assert sum(each.prompt_tokens_per_s * each.window_s for each in seen) == pytest.approx(200)
    steps = [each.executors[0] for each in seen]
    assert sum(f.sampled_tokens_per_s * s.window_s for f, s in zip(steps, seen, strict=True)) == pytest.approx(80)
    assert max(each.max_sequences for each in steps) == 4
    assert {f.times_s[name].p50 for f in steps for name in f.times_s if name == "total"} == {1e-6}
    assert {each.model for each in seen} == {"toy"}
    last = seen[-1]
    assert (last.info.load.num_running, last.running_s, last.waiting_s, last.num_dropped) == (0, None, None, 0)
    assert last.executors[0].info.incarnation == 7
    assert last.watched_s <= last.info.uptime_s


async def test_time_to_first_token_is_what_the_requests_were_told() -> None:
    async with (
        world(max_num_seqs=1) as w,
        contextlib.aclosing(observe(w.target, interval_s=INTERVAL_S, window_s=60.0)) as outputs,
    ):
        assert (await anext(outputs)).ttft_s is None
        work = (collect(w.stub.Generate(request(ids=[5] * 20, seed=seed, max_tokens=2))) for seed in range(5))
        done = await asyncio.gather(*work)
        *_, seen = await until(outputs, lambda each: each.info.load.num_output_tokens == 10)
    times = sorted(each.stats.first_token_ns / 1e9 for each in done)
    assert times[-1] > times[0], "one runs at a time: the others wait"
    assert seen.ttft_s == percentiles(times)


async def test_who_waits_and_who_runs_while_nothing_moves() -> None:
    async with world(max_num_seqs=1) as w:
        w.executor.going.clear()
        running = asyncio.gather(*(collect(w.stub.Generate(request(ids=[5] * 20, seed=seed))) for seed in range(3)))
        await w.until(lambda: w.engine.load().num_running == 1 and w.engine.load().num_waiting == 2)
        async with observed(w.target) as outputs:
            first, second = await anext(outputs), await anext(outputs)
        w.executor.going.set()
        await running
    assert (first.info.load.num_waiting, first.info.load.num_running, first.kv_use > 0) == (2, 1, True)
    assert first.waiting_s == 0, "no step was seen: from the first look on"
    assert second.waiting_s == pytest.approx(second.window_s)
    assert second.running_s is None, "when they joined was not seen"
    assert second.executors[0].info.num_inflight_plans > 0


async def test_a_server_that_goes_and_comes_back() -> None:
    async with contextlib.AsyncExitStack() as stack:
        gone = await stack.enter_async_context(world())
        outputs = await stack.enter_async_context(observed(gone.target))
        assert isinstance(await anext(outputs), ServerFigures)
        await gone.service.stop()
        *_, first = await until(outputs, lambda each: isinstance(each, Lost))
        lost = await anext(outputs)
        assert isinstance(first.error, UnavailableError)
        assert "no service at" in str(lost.error)
        assert 0 < first.lost_s < lost.lost_s
        again = await stack.enter_async_context(world(listen=gone.target))
        *_, back = await until(outputs, lambda each: isinstance(each, ServerFigures))
        await collect(again.stub.Generate(request(ids=[5] * 20)))
        *_, busy = await until(outputs, lambda each: each.info.load.num_output_tokens == 8)
    assert back.info.uptime_s < 30
    assert back.output_tokens_per_s == 0
    assert busy.output_tokens_per_s > 0


async def test_an_executor_that_is_away_is_seen() -> None:
    async with world() as w, observed(w.target) as outputs:
        assert (await anext(outputs)).executors[0].info.connected
        w.executor.refuse = grpc.StatusCode.UNAVAILABLE, "not now"
        await w.executor.break_up()
        await until(outputs, lambda each: not each.executors[0].info.connected)
        w.executor.refuse = None
        *_, back = await until(outputs, lambda each: each.executors[0].info.connected)
    assert back.executors[0].info.epoch == w.executor.last_epoch
    (lost,) = (fault for fault in back.info.faults if fault.kind == "executor_lost")
    assert (lost.count, lost.last_executor) == (1, back.executors[0].info.target)
    assert 0 < lost.last_age_s < back.info.uptime_s


async def test_a_server_that_falls_silent_is_lost(monkeypatch) -> None:
    monkeypatch.setattr("cadenza_cli.top.watching._ANSWER_S", 0.3)
    async with world() as w, relay(w.target) as between, observed(between.address) as outputs:
        assert isinstance(await anext(outputs), ServerFigures)
        between.silent = True
        *_, lost = await until(outputs, lambda each: isinstance(each, Lost))
    assert isinstance(lost.error, DeadlineError)
    assert str(lost.error) == f"{between.address} has not answered for 0.3 s"


async def test_a_watch_that_ends_is_a_server_that_is_lost() -> None:
    class Ending(Script):
        async def WatchSteps(self, request, context):
            stream = super().WatchSteps(request, context)
            yield await anext(stream)
            await stream.aclose()

    server, address = await scripted_server.start(Ending())
    try:
        async with observed(address) as outputs:
            lost = await anext(outputs)
    finally:
        await server.stop(0)
    assert str(lost.error) == f"{address} has ended the watch of its steps"


async def test_once_shows_one_and_ends() -> None:
    shown: list[ServerFigures | Lost] = []
    async with world() as w:
        async with asyncio.timeout(10):
            await follow(w.target, shown.append, interval_s=INTERVAL_S, window_s=0.0, once=True)
        await w.until(lambda: not w.engine.records.recorder.watches)
        (snapshot,) = shown
        assert json.loads(json_line(snapshot, target=w.target, time_s=1.0))["executors"][0]["target"]
    with pytest.raises(UnavailableError, match="no service at"):
        await follow(w.target, shown.append, interval_s=INTERVAL_S, window_s=0.0, once=True)


async def test_what_is_no_scheduler_is_not_waited_for() -> None:
    server, address = await serve(ScriptedExecutor())
    try:
        with pytest.raises(UnsupportedError, match="is it a Cadenza scheduler"):
            await follow(address, lambda outputs: None, interval_s=INTERVAL_S, window_s=0.0, once=False)
    finally:
        await server.stop(0)


# ---------------------------------------------------------------- the command


@pytest.fixture
def target():
    loop = LoopThread.shared()
    server, address = loop.run(scripted_server.start(Script()))
    yield address
    loop.run(server.stop(0))


def test_once_in_a_pipe(target, capsys) -> None:
    assert run(["top", "--target", target, "--once", "--interval", "0.1"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"cadenza top  {target}\nmodel            m\n")
    assert "running          3\n" in shown
    assert "TTFT p50         -\n" in shown
    assert "scheduler     1, 128.0 MiB resident\n" in shown
    assert "8.0 GiB resident\n" in shown
    assert "lost          2 step records" in shown
    assert "\x1b" not in shown


def test_json_lines_until_the_reader_has_gone(target, capsys, monkeypatch) -> None:
    lines: list[str] = []

    class Reader:
        encoding = "utf-8"

        def write(self, text: str) -> int:
            if len(lines) == 3:
                raise BrokenPipeError
            lines.append(text)
            return len(text)

        def flush(self) -> None:
            pass

    monkeypatch.setattr("cadenza_cli.app._discard_stdout", lambda: None)
    monkeypatch.setattr("sys.stdout", Reader())
    assert run(["top", "--target", target, "--json", "--interval", "0.1"]) == 1
    assert [json.loads(line)["load"]["num_running"] for line in lines] == [3, 3, 3]
    assert all(line.endswith("}\n") for line in lines)


def test_nothing_listens(capsys) -> None:
    assert run(["top", "--target", "127.0.0.1:1", "--once"]) == 1
    assert capsys.readouterr().err.startswith("cadenza: no service at 127.0.0.1:1")
    assert run(["top", "--target", "http://x"]) == 2
    assert capsys.readouterr().err.startswith("cadenza: option target: 'http://x' is not HOST:PORT")


@contextlib.contextmanager
def top_in_a_terminal(target: str, **options):
    command = (sys.executable, "-m", "cadenza", "top", "--target", target, "--interval", "0.1")
    terminal = Terminal(*command, kind="xterm-256color", **options)
    try:
        yield terminal
    finally:
        terminal.close()


@pytest.mark.slow
def test_keys_switch_between_screens_and_quit(target) -> None:
    with top_in_a_terminal(target, size=(50, 12)) as terminal:
        terminal.wait_for_screen(r"running +3 +██(.*\n)+q quit  d details")
        terminal.type(b"d")
        terminal.wait_for_screen(r"preemptions +0 in 0 s, 0 since the start(.*\n)+q quit  d overview")
        assert "running " not in "\n".join(terminal.screen)
        terminal.resize(80, 24)
        terminal.wait_for_screen(r"  memory +8.0 GiB resident(.*\n)+q quit")
        assert len(terminal.screen) == 24
        terminal.type(b"xt")
        terminal.wait_for_screen(r"no faults since the start(.*\n)+q quit  d details  t overview")
        terminal.type(b"t")
        terminal.wait_for_screen("running +3 +██+  max 3")
        terminal.type(b"q")
        terminal.wait_for(r"\x1b\[\?1049l")  # back on the shell's screen
        terminal.wait_for("running .*3 ")  # the last picture stays there
        terminal.wait_for("prefix hit rate .*\n")
        assert terminal.process.wait(10) == 0
        assert "q quit" not in terminal.text, "there are no keys any more"


@pytest.mark.slow
def test_ctrl_c_gives_the_terminal_back_with_the_last_picture(target) -> None:
    with top_in_a_terminal(target) as terminal:
        terminal.wait_for(r"\x1b\[\?1049h")  # the other screen
        terminal.wait_for_screen("running +3 +██")  # bars, of two intervals
        terminal.type(CTRL_C)
        terminal.wait_for(r"\x1b\[\?1049l")
        terminal.wait_for("prefix hit rate")
        assert terminal.process.wait(10) == 130
        assert terminal.reads_lines, "the shell's settings are back"


@pytest.mark.slow
def test_without_a_keyboard_there_are_no_keys(target) -> None:
    with top_in_a_terminal(target, keyboard=False) as terminal:
        terminal.wait_for_screen("running +3 +██(.*\n)+Ctrl-C quits")
        terminal.process.send_signal(signal.SIGINT)
        terminal.wait_for(r"\x1b\[\?1049l")
        terminal.wait_for("prefix hit rate")
        assert terminal.process.wait(10) == 130
