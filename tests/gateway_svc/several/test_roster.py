"""Waiting for a model, and holding it; the launcher is played by the test."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from gateway_svc.http.errors import ApiError
from gateway_svc.several.roster import Roster
from gateway_svc.several.wire import Bounds, LoadState, ModelStatus, read_line, read_order, write_line, write_order


class Launcher:
    """Notes orders, and does what the test says."""

    def __init__(self, *names: str, **bounds) -> None:
        self.orders: list[tuple[str, str]] = []
        self.roster = Roster(lambda *order: self.orders.append(order), lambda model: None)
        self.roster.bounds = Bounds(**bounds)
        self.say(LoadState.UNLOADED, *names)

    def say(self, state: LoadState, *names: str, **more) -> None:
        for name in names:
            self.roster.update(ModelStatus(name, f"/m/{name}", state, **more))

    def state(self, name: str) -> LoadState:
        return self.roster.find(name).status.state

    def take(self, name: str) -> asyncio.Task:
        return asyncio.create_task(self.roster.take(self.roster.find(name)))


async def test_all_who_wait_get_a_model_that_is_loaded_once():
    launcher = Launcher("a", "b")
    waiting = [launcher.take("a") for _ in range(3)]
    await asyncio.sleep(0)
    assert launcher.orders == [("load", "a")]
    launcher.say(LoadState.LOADING, "a")
    launcher.say(LoadState.LOADED, "a", target="127.0.0.1:1")
    await asyncio.gather(*waiting)
    assert launcher.roster.find("a").num_running == 3
    assert launcher.orders == [("load", "a")]


async def test_others_are_served_meanwhile():
    launcher = Launcher("a", "b")
    launcher.say(LoadState.LOADED, "b")
    waiting = launcher.take("a")
    await asyncio.sleep(0)
    await launcher.roster.take(launcher.roster.find("b"))
    assert not waiting.done()
    waiting.cancel()


async def test_a_model_serves_those_who_waited_before_it_makes_room():
    """When c is loaded, nobody has it yet: a, which waits too, must not take its place before they do."""
    launcher = Launcher("a", "c", max_loaded=1)
    first, second = launcher.take("c"), launcher.take("a")
    await asyncio.sleep(0)
    launcher.say(LoadState.LOADING, "c")
    launcher.say(LoadState.LOADED, "c")
    await first
    assert launcher.state("c") is LoadState.LOADED
    launcher.roster.give_back(launcher.roster.find("c"))
    assert launcher.orders == [("load", "c"), ("unload", "c")]
    second.cancel()


async def test_what_the_launcher_said_before_it_heard_an_order_does_not_count():
    """A measure of memory that crosses the order to unload: no request may be sent to the model any more."""
    launcher = Launcher("a", "b", max_loaded=1)
    launcher.say(LoadState.LOADED, "a")
    waiting = launcher.take("b")
    await asyncio.sleep(0)
    assert launcher.orders == [("unload", "a")]
    launcher.say(LoadState.LOADED, "a", memory_bytes=5)
    assert launcher.state("a") is LoadState.UNLOADING
    launcher.say(LoadState.UNLOADING, "a")
    launcher.say(LoadState.UNLOADED, "a")
    assert launcher.orders == [("unload", "a"), ("load", "b")]
    waiting.cancel()


async def test_the_error_of_a_load_ends_the_wait_and_the_next_request_tries_again():
    launcher = Launcher("a")
    waiting = launcher.take("a")
    await asyncio.sleep(0)
    launcher.say(LoadState.LOADING, "a")
    launcher.say(LoadState.FAILED, "a", error="no such file")
    with pytest.raises(ApiError, match="the model a was not loaded: no such file") as caught:
        await waiting
    assert (caught.value.status, caught.value.code) == (503, "model_not_loaded")
    again = launcher.take("a")
    await asyncio.sleep(0)
    assert launcher.orders == [("load", "a"), ("load", "a")]
    again.cancel()


@pytest.mark.parametrize(
    ("said", "why"), [(LoadState.LOADING, "still being loaded"), (LoadState.UNLOADED, "other models have the memory")]
)
async def test_the_wait_has_a_bound(said, why):
    launcher = Launcher("a", "b", max_loaded=1, load_timeout_s=0.02)
    if said is LoadState.UNLOADED:
        launcher.say(LoadState.LOADED, "b")
        await launcher.roster.take(launcher.roster.find("b"))
    waiting = launcher.take("a")
    await asyncio.sleep(0)
    if said is LoadState.LOADING:
        launcher.say(said, "a")
    with pytest.raises(ApiError, match=rf"the model a cannot be had within 0.02 s \(--load-timeout-s\): .*{why}"):
        await waiting
    assert launcher.roster.find("a").num_waiting == 0


async def test_an_unknown_name_is_answered_with_those_that_there_are():
    launcher = Launcher("llama", "qwen")
    with pytest.raises(ApiError) as caught:
        launcher.roster.find("lama")
    assert caught.value.status == 404
    assert caught.value.message == "there is no model 'lama'; did you mean llama?; there are llama, qwen"
    with pytest.raises(ApiError, match="several models are served: name one of llama, qwen"):
        launcher.roster.find(None)
    assert launcher.roster.find("/m/qwen").status.name == "qwen"
    assert launcher.roster.find("llama/adapter").status.name == "llama"
    assert Launcher("only").roster.find("").status.name == "only"


def test_lines_are_read_as_they_were_written():
    status = ModelStatus("a", "/m/a", LoadState.FAILED, error="ä\n", options={"tool_call_parser": "hermes"})
    for value in (Bounds(1, 2, 3.0, 4.0), status, replace(status, state=LoadState.LOADED)):
        line = write_line(value)
        assert line.count(b"\n") == 1
        assert read_line(line) == value
    assert read_order(write_order("load", "a b")) == ("load", "a b")
