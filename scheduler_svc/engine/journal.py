"""The engine's interface to a journal: what is recorded, and what readers may not see before it is durable."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from scheduler_svc.engine.live_request import LiveRequest
from scheduler_svc.plan_loop.ports import ModelDescription


class JournalUnavailableError(Exception):
    """The journal cannot be written, so no request is admitted; the message names the journal and the reason."""


class Journal(Protocol):
    """Records requests so that another process can go on with them.

    No call blocks or waits. A call that records output also hides it from readers until it is durable, where it must be
    durable before it is shown; then the request's listeners are called again.
    """

    @property
    def problem(self) -> str:
        """Why it cannot be written, without its place, for callers without a key; empty: it can be."""

    def check_admission(self) -> None:
        """Raise JournalUnavailableError if it cannot be written."""

    def on_admitted(self, live: LiveRequest, model: ModelDescription) -> None:
        """A request was admitted; nothing of it is shown before its record is durable."""

    def on_started(self, live: LiveRequest) -> None:
        """A request is part of a step for the first time: after its result there is something to show."""

    def on_outputs(self, lives: Iterable[LiveRequest]) -> None:
        """Requests have new tokens or finishes."""

    def on_ended(self, live: LiveRequest) -> None:
        """A request has ended."""

    def on_other_numerics(self, model: ModelDescription) -> None:
        """Unfinished requests go on under other numerics: their tokens so far cannot be computed again."""

    def on_adapters(self, adapters: Mapping[str, str]) -> None:
        """Operators have loaded or unloaded an adapter; the names and paths of all that they have loaded."""

    async def flushed(self) -> None:
        """Wait until all that was recorded before this call is durable; raises JournalUnavailableError."""


class NoJournal:
    """Records nothing and hides nothing."""

    problem = ""

    def check_admission(self) -> None:
        """Do nothing."""

    def on_admitted(self, live: LiveRequest, model: ModelDescription) -> None:
        """Do nothing."""

    def on_started(self, live: LiveRequest) -> None:
        """Do nothing."""

    def on_outputs(self, lives: Iterable[LiveRequest]) -> None:
        """Do nothing."""

    def on_ended(self, live: LiveRequest) -> None:
        """Do nothing."""

    def on_other_numerics(self, model: ModelDescription) -> None:
        """Do nothing."""

    def on_adapters(self, adapters: Mapping[str, str]) -> None:
        """Do nothing."""

    async def flushed(self) -> None:
        """Return at once."""
