"""Ctrl-C in a script: Python shows the script's own frames and `KeyboardInterrupt`, but no frame of Cadenza."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from types import TracebackType

_OWN = ("cadenza", "cadenza_common", "cadenza_launcher")
"""Packages whose frames stand between a script and its interrupt."""

_installed = False


def shorten_interrupts() -> None:
    """Shorten the report of an uncaught KeyboardInterrupt; a second call does nothing.

    Only `sys.excepthook` sees an exception after its last frame, so only it can leave out all frames of Cadenza.
    The hook changes nothing else: it passes every exception to the hook that it found, and a program that sets its own
    hook later replaces this one. IPython reports errors without it.
    """
    global _installed
    if _installed:
        return
    _installed = True
    report = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, KeyboardInterrupt):
            _shorten(error)
            trace = error.__traceback__
        report(kind, error, trace)

    sys.excepthook = hook


@contextlib.contextmanager
def quiet_at_exit() -> Iterator[None]:
    """End the body without an error if Ctrl-C interrupts it when the main program has ended.

    Nothing could catch that interrupt any more, and Python would print its traceback.
    """
    try:
        yield
    except KeyboardInterrupt:
        if threading.main_thread().is_alive():
            raise


def _shorten(error: BaseException) -> None:
    """Cut the traceback before the first frame of Cadenza; drop contexts without other frames, and interrupts."""
    error.__traceback__ = _script_part(error.__traceback__)
    context = error.__context__
    while context is not None and (isinstance(context, KeyboardInterrupt) or not _script_part(context.__traceback__)):
        context = context.__context__
    error.__context__ = context
    if context is not None:
        _shorten(context)


def _script_part(trace: TracebackType | None) -> TracebackType | None:
    """The frames, from the outermost inwards, up to the first one of Cadenza; None if there are none."""
    if trace is None or trace.tb_frame.f_globals.get("__name__", "").partition(".")[0] in _OWN:
        return None
    trace.tb_next = _script_part(trace.tb_next)
    return trace
