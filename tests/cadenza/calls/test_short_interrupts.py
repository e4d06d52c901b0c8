"""The report of an uncaught KeyboardInterrupt: which frames stay, and whose excepthook is called."""

from __future__ import annotations

import sys
import traceback

import pytest

from cadenza.calls import short_interrupts
from cadenza.calls.short_interrupts import shorten_interrupts


@pytest.fixture
def reported(monkeypatch) -> list[tuple]:
    """What the program's own excepthook is given, by the frames' functions."""
    calls = []

    def own(kind, error, trace):
        assert trace is error.__traceback__
        calls.append((kind, functions(error), error.__context__))

    monkeypatch.setattr(sys, "excepthook", own)
    monkeypatch.setattr(short_interrupts, "_installed", False)
    shorten_interrupts()
    assert sys.excepthook is not own
    return calls


def functions(error: BaseException) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def report(function, *arguments) -> None:
    try:
        function(*arguments)
    except BaseException:
        sys.excepthook(*sys.exc_info())


def packaged(code: str):
    """A function whose frame is one of the package's."""
    names = {"__name__": "cadenza_launcher.made_up"}
    exec(code, names)
    return names["inside"]


def interrupt():
    raise KeyboardInterrupt


def test_frames_from_the_package_on_are_cut(reported):
    inside = packaged("def inside(then): then()")

    def script():
        inside(interrupt)

    report(script)
    report(inside, interrupt)
    assert reported == [(KeyboardInterrupt, ["report", "script"], None), (KeyboardInterrupt, ["report"], None)]


def test_an_interrupt_elsewhere_and_other_errors_keep_their_frames(reported):
    inside = packaged("def inside(): raise ValueError")
    report(interrupt)
    report(inside)
    assert reported == [(KeyboardInterrupt, ["report", "interrupt"], None), (ValueError, ["report", "inside"], None)]


def test_contexts_within_the_package_and_earlier_interrupts_are_dropped(reported):
    inside = packaged(
        "def inside(then):\n"
        "    try:\n"
        "        try: raise KeyError\n"
        "        except KeyError: then()\n"
        "    finally: then()\n"
    )

    def script():
        inside(interrupt)

    def handling():
        try:
            int("x")
        except ValueError:
            script()

    report(script)
    report(handling)
    (_, first, nothing), (_, second, context) = reported
    assert (first, nothing) == (["report", "script"], None)
    assert second == ["report", "handling", "script"]
    assert isinstance(context, ValueError), "the program's own error is still shown"


def test_a_hook_that_a_program_sets_later_stays(reported):
    own = sys.excepthook = lambda kind, error, trace: None
    shorten_interrupts()
    assert sys.excepthook is own
